"""Rows of a batch: what comes back with them, and the bars that count them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dsv4lite import LLM, AsyncLLM, InvalidRequestError, LoadProgress, Row, SamplingParams, UnsupportedError, tiny_model
from dsv4lite.errors import ConfigError
from tests.e2e.engines import MODEST
from tests.fakes import POISON, Lab


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_metadata_comes_back_with_outputs_and_errors(lab: Lab, backend: str) -> None:
    import anyio

    marks = [object() for _ in range(4)]
    rows: list[Any] = [
        Row("one", marks[0]),
        "two",
        Row([POISON] * 5, marks[1]),
        Row(7, marks[2]),  # type: ignore[arg-type]
        Row("three", marks[3], SamplingParams(max_tokens=1)),
    ]

    async def run() -> list[Any]:
        async with AsyncLLM("m") as llm:
            outputs = [output async for output in llm.as_completed(iter(rows), SamplingParams(), on_error="return")]
            return sorted(outputs, key=lambda output: output.index)

    outputs = anyio.run(run, backend=backend)
    assert [output.metadata for output in outputs] == [marks[0], None, marks[1], marks[2], marks[3]]
    assert [output.error is None for output in outputs] == [True, True, False, False, True]
    assert [output.text for output in outputs[:2]] == ["one", "two"] and len(outputs[4].token_ids) == 1


def test_error_of_a_row_names_it(lab: Lab) -> None:
    with LLM("m") as llm, pytest.raises(InvalidRequestError) as caught:
        llm.generate_batch(["one", Row(7, "my id")])  # type: ignore[list-item]
    assert "row 1 of the batch: Row(prompt=7, metadata='my id', params=None)" in caught.value.__notes__


def test_bar_counts_rows(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    with LLM("m") as llm:
        llm.generate_batch(["one", "two", "three"], progress=True)
        some = llm.as_completed(iter(["one", "two"]), progress=True)
        next(some)
        some.close()
    shown = capfd.readouterr().err
    assert "generate_batch" in shown and "3/3" in shown and "tokens=" in shown and "as_completed" in shown
    with LLM("m") as llm:
        llm.generate_batch(["one"])
    assert capfd.readouterr().err == ""


def test_bar_without_its_package_says_what_to_install(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with LLM("m") as llm, pytest.raises(UnsupportedError, match=r"pip install 'dsv4lite\[progress\]'"):
        llm.generate_batch(["one"], progress=True)


def test_loading_shows_a_bar_for_each_phase(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    reports: list[LoadProgress] = []
    with LLM(tiny_model(), progress=reports.append, **MODEST):
        pass
    with LLM(tiny_model(), progress="bar", **MODEST):
        pass
    shown = capfd.readouterr().err
    assert reports and all(report.phase in shown for report in reports) and "100%" in shown


def test_progress_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="progress='bars' must be True, False, 'bar' or a callable"):
        LLM("m", progress="bars")  # type: ignore[arg-type]
