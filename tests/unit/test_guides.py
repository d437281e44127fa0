"""Guides that name things of the package: names of settings and calls exist, and messages are those of the source."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import dsv4lite
from dsv4lite import LLM, AsyncLLM, CompletionOutput, EngineConfig, RequestOutput, SamplingParams, errors
from dsv4lite.device import CHIPS
from tests.kernels.launches import CHIPS as COMPILED

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs/guides"
TROUBLES = GUIDES / "troubleshooting.md"


def rows(text: str) -> list[list[str]]:
    """Return the cells of a page's tables, row by row, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def template(node: ast.AST) -> str:
    """Return a string of the source, with ``…`` for what an f-string puts in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


@cache
def messages() -> tuple[str, ...]:
    """Return every string of the package's source."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "dsv4lite").rglob("*.py")]
    return tuple({found for tree in trees for node in ast.walk(tree) if (found := template(node))})


@pytest.mark.parametrize("page", ["from-vllm.md", "from-sglang.md"])
def test_names_that_take_the_place_of_others_exist(page: str) -> None:
    known = {field.name for kind in (EngineConfig, SamplingParams, RequestOutput, CompletionOutput) for field in fields(kind)}
    known |= set(dir(AsyncLLM)) | set(dir(LLM)) | set(dsv4lite.__all__) | {"cache_salt"}
    named = [name for row in rows((GUIDES / page).read_text(encoding="utf-8")) for name in re.findall(r"`(\w+)`", row[1])]
    assert len(named) > 60 and set(named) - known == set()


def test_troubleshooting_has_every_error_and_only_messages_of_the_source() -> None:
    text = TROUBLES.read_text(encoding="utf-8")
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.DSV4LiteError)}
    titles = set(re.findall(r"\w+Error", " ".join(re.findall(r"^## (.*)$", text, re.MULTILINE))))
    assert titles == kinds - {"DSV4LiteError"}
    named = [found[1] for row in rows(text) if (found := re.match(r"`(.*)`$", row[0]))]
    assert len(named) > 40
    assert [message for message in named if not any(message in source for source in messages())] == []


def test_table_of_chips_is_that_of_the_plans_and_of_the_compiled_kernels() -> None:
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8").partition("\n## Chips\n")[2].partition("\n## ")[0]
    listed = {(name, row[1]) for row in rows(text) for name in re.findall(r"`([\w-]+)`", row[0])}
    assert listed == {(name, f"{chip.capability[0]}.{chip.capability[1]}") for name, chip in CHIPS.items()}
    assert {row[1] for row in rows(text)[1:]} == {f"{capability // 10}.{capability % 10}" for capability in COMPILED}


def test_page_counts_no_more_tests_than_there_are_and_not_far_fewer() -> None:
    listed = rows((ROOT / "docs/testing.md").read_text(encoding="utf-8"))[1:]
    folders = set()
    for row in listed:
        named = re.findall(r"`(tests/\w+)`", row[0])
        texts = [path.read_text(encoding="utf-8") for folder in named for path in (ROOT / folder).glob("test_*.py")]
        found = sum(len(re.findall(r"^ *(?:async )?def test_", text, re.MULTILINE)) for text in texts)
        assert 0.6 * found <= int(row[1]) <= found, f"{row[0]}: {found}"
        folders |= set(named)
    assert folders == {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
