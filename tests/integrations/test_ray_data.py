"""The recipe for Ray Data on its page, with the real package where it is installed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import dsv4lite
from dsv4lite import config
from dsv4lite.llm import LLM
from dsv4lite.request import SamplingParams
from tests.e2e.engines import write_model

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[2]


def test_rows_come_back_with_their_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    page = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(import ray\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    model = str(write_model(tmp_path))
    monkeypatch.setattr(dsv4lite, "tiny_model", lambda: model)  # first, for it keeps what it finds in ``config``
    monkeypatch.setattr(config, "tiny_model", lambda: model)
    code = code.replace("SamplingParams(max_tokens=4)", "SamplingParams(max_tokens=4, seed=1)")
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT)])}})
    try:
        exec(compile(code, "docs/integrations.md", "exec"), {"__name__": "recipe"})
    finally:
        ray.shutdown()
    with LLM(model) as llm:
        texts = {text: llm.generate(text, SamplingParams(max_tokens=4, seed=1)).text for text in ("import os", "x = 1")}
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(f"{prompt} {text!r} " for prompt, text in texts.items())
