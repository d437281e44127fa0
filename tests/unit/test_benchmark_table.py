"""What ``examples/benchmarks/table.py`` measures, and against what."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4lite import EngineConfig, tiny_model
from dsv4lite.weights.quant import Numerics
from examples.benchmarks import table
from examples.benchmarks.engine import configured
from examples.benchmarks.peer import Peer

pytestmark = pytest.mark.usefixtures("forked_ranks")

SMALL = (
    "--model shipped --layers 1 --device cpu --max-model-len 1024 --batch 1 2 --context 8 --tokens 3 --runs 1 "
    "--prefill 2x16 --requests 4x2 --lengths 16x4"
)


def arguments(line: str) -> Any:
    return table.arguments([*SMALL.split(), *line.split()])


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as a GPU holds them."""
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "quantized": True, "deterministic": False, "dense_fp8": True}
    numerics = Numerics.choose(**settings, device=torch.device("cuda"), expert_format="fp4")
    monkeypatch.setattr(table, "choose_numerics", lambda *_: numerics)


@pytest.mark.usefixtures("resident")
@pytest.mark.parametrize(
    ("line", "steps_ms", "rate"),
    [("--layers 8", {1: 0.68, 8: 1.63, 64: 5.5}, 163e3), ("--layers 43 --tp 2", {1: 1.46, 8: 4.02, 64: 14.4, 256: 18.1}, 60e3)],
)
def test_rooflines_of_v4_flash(line: str, steps_ms: dict[int, float], rate: float) -> None:
    """Against figures worked out from bytes and products of a layer by hand."""
    args = table.arguments([*line.split(), "--device", "cpu"])
    rooflines = table.Rooflines(configured(args), 256)
    assert {batch: 1e3 * rooflines.step_s[batch] for batch in steps_ms} == pytest.approx(steps_ms, rel=0.01)
    assert 1 / rooflines.prompt_token_s == pytest.approx(rate, rel=0.04)


def test_roofline_of_requests_is_that_of_full_steps() -> None:
    rooflines = object.__new__(table.Rooflines)
    rooflines.step_s, rooflines.prompt_token_s = {1: 10.0, 2: 11.0}, 0.5
    # The prompts give three first tokens. Two run: one step of both, then the third takes the place of the first.
    assert rooflines.requests([[0] * 4, [0] * 2, [0] * 2], [2, 4, 2], 2) == pytest.approx(0.5 * 8 + 11 + 11 + 10)


class Fake:
    """An engine whose seconds are 5 for a prompt and 2 for a step of the longest output; the second run is slower."""

    name, version, runs = "fake", "1", 0

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def seconds(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> float:
        assert len(prompts) == len(counts)
        Fake.runs += max(counts) > 2
        return len(prompts) * 5.0 + (max(counts) - 1) * (20.0 if Fake.runs == 2 else 2.0)

    def close(self) -> None:
        """Nothing to free."""


def test_a_step_is_what_more_tokens_take_and_the_middle_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "Own", Fake)
    monkeypatch.setattr(Fake, "runs", 0)
    decode, prefill = table.run(arguments("--batch 2 --tokens 9 --runs 3 --rows decode,prefill"))
    assert decode["row"] == "decode-2x8" and decode["seconds"] == 2 and decode["runs"] == [2, 20, 2]
    assert (prefill["row"], prefill["seconds"], prefill["tokens"]) == ("prefill-2x16", 10, 32)


def test_rows_are_measured_in_parts_and_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.json"
    other = {"device": "another", "model": "V4-Flash/8", "layout": "tp=1 ep=1 dp=1 pp=1", "row": "decode-1", "engine": "dsv4lite"}
    file.write_text(json.dumps([other]))
    for rows, names in (
        ("decode-2,prefill", ["decode-2x8", "prefill-2x16"]),
        ("requests,decode-2", ["prefill-2x16", "decode-2x8", "requests"]),
    ):
        found = table.run(arguments(f"--rows {rows} --json {file}"))
        assert [row["row"] for row in found] == names
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved == [other, *found]
    printed = capsys.readouterr().out
    assert all(row["row"] in printed and row["model"] == "V4-Shipped/1" for row in found)
    prefill, decode, requests = found
    assert (prefill["tokens"], decode["tokens"]) == (32, 2) and decode["roofline_s"] > 0
    assert all(row["seconds"] > row["roofline_s"] > 0 for row in (prefill, requests))  # a step of a busy CPU may be anything


def test_drafters_and_starts_are_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(table, "START", 2)
    monkeypatch.setattr("examples.benchmarks.speculation.START", 2)
    found = table.run(arguments("--acceptance 1 --rows start,speculation-mtp2-1,speculation-adaptive-2"))
    names = ["start-cold", "start-warm", "speculation-mtp2-1x8", "speculation-adaptive-2x8"]
    assert [row["row"] for row in found] == names and all(row["seconds"] > 0 for row in found)
    assert all(row["roofline_s"] is None for row in found)
    assert re.search(r"^mtp2: ([1-9]\d*) of \1 drafts were right$", capsys.readouterr().out, re.MULTILINE)
    table.run(arguments("--acceptance 0 --rows speculation-mtp2-1"))
    assert re.search(r"^mtp2: 0 of [1-9]\d* drafts were right$", capsys.readouterr().out, re.MULTILINE)


def test_layers_are_routed_by_token_id_where_a_model_can() -> None:
    assert table.settings(arguments("--layers 4")).hf_overrides["num_hash_layers"] == 4
    assert table.settings(arguments("--dp 2 --batch 1 --requests 512x256")).max_num_seqs == 128
    assert "num_hash_layers" not in table.settings(arguments("--model v2-lite")).hf_overrides


@pytest.mark.usefixtures("resident")
def test_shares_are_drawn_for_every_row_with_a_roofline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from examples.benchmarks.plots import shares

    key = {"device": "GPU", "model": "V4-Flash/8", "layout": "tp=1"}
    rows = [
        {**key, "row": "decode-1", "engine": "dsv4lite", "seconds": 2.0, "roofline_s": 1.0},
        {**key, "row": "decode-1", "engine": "vllm", "seconds": 4.0, "roofline_s": 1.0},
        {**key, "row": "prefill-1x8192", "engine": "dsv4lite", "seconds": 3.0, "roofline_s": 2.4},
        {**key, "row": "start-cold", "engine": "dsv4lite", "seconds": 3.0, "roofline_s": None},
    ]
    axes = shares(rows).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.5, 0.8, 0.25])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["decode-1", "prefill-1x8192"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["dsv4lite", "vllm"]
    several = shares([*rows, {**rows[0], "layout": "tp=2"}]).axes[0]
    assert [text.get_text() for text in several.get_yticklabels()][-1] == "V4-Flash/8, tp=2: decode-1"
    monkeypatch.setattr(table, "Own", Fake)
    table.run(arguments(f"--rows prefill --plot {tmp_path / 'table.png'}"))
    assert (tmp_path / "table.png").stat().st_size > 1000


def test_peer_gets_the_same_settings_and_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []
    filled: list[int] = []
    model = torch.nn.Module()
    model.gate = torch.nn.Module()
    model.gate.register_buffer("tid2eid", torch.zeros(50, 3, dtype=torch.int32))
    asked: list[tuple[Any, Any]] = []

    class Engine:
        def __init__(self, **settings: Any) -> None:
            made.append(settings)

        def apply_model(self, fill: Any) -> None:
            filled.append(fill(model))

        def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> None:
            asked.append((prompts, params))

    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__version__ = Engine, SimpleNamespace, "0.26.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(table, "Own", Fake)
    found = table.run(arguments(f"--peer --rows decode-1,requests --json {tmp_path / 'table.json'}"))
    assert [(row["row"], row["engine"]) for row in found] == [
        *(("decode-1x8", "fake"), ("requests", "fake")),
        *(("decode-1x8", "vllm"), ("requests", "vllm")),
    ]
    assert {row["version"] for row in found} == {"1", "0.26.0"}
    (settings,) = made
    assert settings["load_format"] == "dummy" and settings["max_num_seqs"] == 2 and not settings["enable_expert_parallel"]
    config = json.loads((Path(settings["model"]) / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == config["num_hash_layers"] == 1 and config["vocab_size"] > 4000
    experts = model.gate.tid2eid
    assert filled == [1] and experts.unique().tolist() == list(range(config["n_routed_experts"]))
    assert all(len(set(row)) == 3 for row in experts.tolist()), "a token's experts differ"
    prompts, params = asked[-1]
    assert len(prompts) == len(params) == 4 and all(one.temperature == 1 and one.ignore_eos for one in params)
    assert all(len(prompt["prompt_token_ids"]) <= 16 for prompt in prompts)


def test_peer_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=tiny_model())
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match="install vllm"):
        Peer(config.model, config)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(SystemExit, match="one replica"):
        Peer(config.model, replace(config, data_parallel_size=2))
