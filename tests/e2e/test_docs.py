"""The README and the pages of ``docs/``: code runs, commands parse, links have targets."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import anyio
import pytest

import dsv4lite
from dsv4lite import EngineConfig, SamplingParams, config
from dsv4lite import __main__ as program
from tests.e2e.engines import SMALL, prompts_of, write_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
ELSEWHERE = ("_parallel_size", "device_mesh", "import ray")  # code with one of these starts processes; other tests run it
LONG = "tools=tools"  # the prompt of code with this has more than 1,000 letters
OPTIONAL = {"inspect_ai", "prometheus_client", "starlette"}  # not among the test extra's packages everywhere
HUB = re.compile(r"(deepseek-ai|path/to)/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page=name_of(page), line=line, language=match[1], text=match[2]))
    return found


PYTHON = [block for block in blocks() if block.language == "python"]
COMMANDS = [
    pytest.param(line, id=f"{block.page}:{line}")
    for block in blocks()
    for line in block.text.splitlines()
    if line.startswith(("python ", "sh ")) and not block.language
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint in place of those that pages name."""
    folder = tmp_path_factory.mktemp("model")
    return str(write_model(folder, {**SMALL, "max_position_embeddings": 220}))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same for prompts that are longer."""
    return str(write_model(tmp_path_factory.mktemp("long"), {**SMALL, "max_position_embeddings": 2000}))


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_code_of_the_pages_runs(
    block: Block, model: str, long_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if LONG in block.text:
        model = long_model
    text = HUB.sub(model, block.text)
    code = compile("\n" * block.line + text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if any(setting in text for setting in ELSEWHERE):
        return
    for package in OPTIONAL & set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)):
        pytest.importorskip(package)
    if "inspect_ai" in text:
        importlib.import_module("dsv4lite.integrations.inspect_ai")  # what its entry point does where the package is installed
    if "integrations.lm_eval" in text:
        pytest.importorskip("lm_eval")
    monkeypatch.setattr(dsv4lite, "tiny_model", lambda: model)  # first, for it keeps what it finds in ``config``
    monkeypatch.setattr(config, "tiny_model", lambda: model)
    names: dict[str, Any] = {name: getattr(dsv4lite, name) for name in dsv4lite.__all__}
    names |= {"anyio": anyio, "model": model, "prompt": prompts_of((9,), SMALL["vocab_size"])[0]}
    result = eval(code, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)
    if "print(" in text:
        assert capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_pages_parse(command: str) -> None:
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "dsv4lite"]:
        if words[3:] != ["--help"]:
            program._parser().parse_args(words[3:])
    elif words[1:3] == ["-m", "mkdocs"]:
        assert (ROOT / words[-1]).is_file()
    elif words[1] != "-m":
        assert (ROOT / words[1]).is_file()
    else:
        assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "examples/benchmarks/kernels").glob("*.py")))
def test_kernel_benchmarks_load_without_a_gpu(name: str) -> None:
    pytest.importorskip("triton")
    assert importlib.import_module(f"examples.benchmarks.kernels.{name}").__doc__


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_programs_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"\b(?:examples|tests)/[\w/]+\.(?:py|sh)\b", text)
    modules = re.findall(r"-m ((?:examples|tests)\.[\w.]+\w)", text)
    for file in [*files, *(module.replace(".", "/") + ".py" for module in modules)]:
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_the_pages_have_targets(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


def names_in(section: str) -> set[str]:
    """Return the names in backticks in a section of api.md: in the first column of its table, or in its first paragraph."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0].strip()
    columns = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) or [text.partition(": each")[0]]
    return {name for column in columns for name in re.findall(r"`(\w+)`", column)}


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_api_page_names_every_setting_and_no_other(kind: type[EngineConfig | SamplingParams]) -> None:
    assert names_in(kind.__name__) == {field.name for field in fields(kind)}
