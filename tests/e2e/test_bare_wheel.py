"""The wheel with its declared dependencies alone, as ``pip install`` leaves an empty environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.e2e.engines import SMALL, write_model
from tests.e2e.test_docs import ELSEWHERE, HUB, LONG, PYTHON

ROOT = Path(__file__).resolve().parents[2]

BARE = """
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}
find_spec = PathFinder.find_spec

def find(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find_spec(name, path, target)

PathFinder.find_spec = classmethod(find)
"""

PAGES = """
import ast, asyncio, inspect, json, sys
import anyio, dsv4lite
from dsv4lite import config

with open(sys.argv[1]) as file:
    blocks = json.load(file)
lacking = []
for where, model, text in blocks:
    config.tiny_model = lambda: model
    vars(dsv4lite).pop("tiny_model", None)  # where it was looked up before
    names = {name: getattr(dsv4lite, name) for name in dsv4lite.__all__}
    names |= {"anyio": anyio, "model": model, "prompt": [5, 6, 7, 8, 9]}
    try:
        result = eval(compile(text, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except (ModuleNotFoundError, dsv4lite.UnsupportedError) as error:
        lacking.append(f"{where} {error}")
print("\\n".join(lacking), file=sys.stderr)
"""


def needed(requirements: list[str] | None) -> set[str]:
    """Return the distributions that requirements bring, and those that these bring."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements or ()]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in found or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += map(Requirement, distribution(name).requires or ())
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that can import the unpacked wheel and its dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().partition("\n\n")[0].splitlines()
    wanted = needed([line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")])
    assert {"torch", "tokenizers"} <= wanted and "numpy" not in wanted
    kept = {*wanted, "dsv4lite", "setuptools", "pip"}
    hidden = {top for top, owners in packages_distributions().items() if kept.isdisjoint(map(canonicalize_name, owners))}
    assert {"numpy", "pytest", "transformers"} <= hidden
    (folder / "site" / "sitecustomize.py").write_text(BARE.format(hidden=hidden))
    return {**os.environ, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(bare: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-W", "error", *arguments], env=bare, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    return ended


def test_help_needs_the_wheel_alone(bare: dict[str, str], tmp_path: Path) -> None:
    """``--help`` used to import torch, which warns where numpy is missing."""
    assert "generate" in run(bare, tmp_path, "-m", "dsv4lite", "--help").stdout
    loaded = "import sys, dsv4lite.__main__ as m; print(m.__file__, 'torch' in sys.modules)"
    path, torch_loaded = run(bare, tmp_path, "-c", loaded).stdout.split()
    assert path.startswith(bare["PYTHONPATH"]) and torch_loaded == "False"


def test_commands_of_the_bare_wheel_work_without_a_warning(bare: dict[str, str], tmp_path: Path) -> None:
    """Commands used to print torch's warning about numpy, and to fail with ``-W error``."""
    assert run(bare, tmp_path, "-m", "dsv4lite", "generate", "def f(", "--max-tokens", "3").stdout.startswith("def f(")
    assert "tokens of KV cache" in run(bare, tmp_path, "-m", "dsv4lite", "plan").stdout


def test_library_of_the_bare_wheel_saves_and_replays_a_step(bare: dict[str, str], tmp_path: Path) -> None:
    """``dump_step`` used to fail without numpy."""
    program = """
        import asyncio
        from dsv4lite import AsyncLLM, SamplingParams, tiny_model
        from dsv4lite.__main__ import main

        async def quick_start():
            async with AsyncLLM(tiny_model()) as llm:
                await llm.dump_step("step.safetensors")
                output = await llm.generate("def f(", SamplingParams(temperature=0, max_tokens=3))
                assert len(output.token_ids) == 3

        asyncio.run(quick_start())
        raise SystemExit(main(["replay", "step.safetensors"]))
    """
    assert run(bare, tmp_path, "-c", textwrap.dedent(program)).stdout


def test_code_of_the_pages_runs_with_the_bare_wheel_or_lacks_what_it_names(bare: dict[str, str], tmp_path: Path) -> None:
    models = [str(write_model(tmp_path / str(length), {**SMALL, "max_position_embeddings": length})) for length in (220, 2000)]
    here = [block for block in PYTHON if not any(setting in block.text for setting in ELSEWHERE)]
    given = [(str(block), models[LONG in block.text], HUB.sub(models[LONG in block.text], block.text)) for block in here]
    (tmp_path / "blocks.json").write_text(json.dumps(given))
    lacking = run(bare, tmp_path, "-c", PAGES, "blocks.json").stderr
    named = re.findall(
        r"^(\S+:\d+) .*(starlette|llguidance|lm_eval|inspect_ai|prometheus_client|jinja2|tqdm)", lacking, re.MULTILINE
    )
    assert len(named) == len(re.findall(r"^\S+:\d+ ", lacking, re.MULTILINE)) < len(here) / 3, lacking


def test_rollout_example_runs_with_the_bare_wheel(bare: dict[str, str], tmp_path: Path) -> None:
    """It needed numpy to write a checkpoint."""
    assert "mean reward" in run(bare, tmp_path, str(ROOT / "examples" / "grpo.py"), "--steps", "1").stdout
