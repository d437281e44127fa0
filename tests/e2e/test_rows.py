"""Rows of a batch: what comes back with them, and the bars that count them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4lite import LLM, AsyncLLM, InvalidRequestError, LoadProgress, Row, SamplingParams, UnsupportedError, tiny_model
from dsv4lite.errors import ConfigError
from tests.e2e.engines import MODEST
from tests.fakes import POISON, Lab
from tests.loops import both_loops


@both_loops
async def test_metadata_comes_back_with_outputs_and_errors(lab: Lab) -> None:
    marks = [object() for _ in range(4)]
    rows: list[Any] = [
        Row("one", marks[0]),
        "two",
        Row([POISON] * 5, marks[1]),
        Row(7, marks[2]),  # type: ignore[arg-type]
        Row("three", marks[3], SamplingParams(max_tokens=1)),
    ]
    async with AsyncLLM("m") as llm:
        outputs = [output async for output in llm.as_completed(iter(rows), SamplingParams(), on_error="return")]
    outputs.sort(key=lambda output: output.index)
    assert [output.metadata for output in outputs] == [marks[0], None, marks[1], marks[2], marks[3]]
    assert [output.error is None for output in outputs] == [True, True, False, False, True]
    assert [output.text for output in outputs[:2]] == ["one", "two"] and len(outputs[4].token_ids) == 1


def test_error_of_a_row_names_it(lab: Lab) -> None:
    with LLM("m") as llm, pytest.raises(InvalidRequestError) as caught:
        llm.generate_batch(["one", Row(7, "my id")])  # type: ignore[list-item]
    assert "row 1 of the batch: Row(prompt=7, metadata='my id', params=None)" in caught.value.__notes__


def test_rows_of_a_file_choose_tools_and_have_texts_of_logprobs(lab: Lab, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    hello = {"messages": [{"role": "user", "content": "Hello"}], "tools": [tool]}
    rows = [
        {**hello, "tool_choice": "none"},
        {"custom_id": "a", "url": "/v1/chat/completions", "body": {**hello, "tool_choice": "g"}},
        {"prompt": "Hello", "logprobs": 0},
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, rows)))
    with LLM("m") as llm:
        llm.generate_file(tmp_path / "in", tmp_path / "out", SamplingParams())
        none = next(request for request in lab.engine.submitted if request.params.logprobs is None)
        marker = lab.tokenizer.token_id("｜DSML｜")
        assert none.params.bad_words_ids == ((marker,),)
    found = {line["id"]: line for line in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert found["row-0"]["error"] is None and "tool_choice='g'" in found["row-1"]["error"]["message"]
    logprobs = found["row-2"]["response"]["body"]["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]).startswith("Hello") and logprobs["token_logprobs"][0] == -1.0


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


def test_bar_counts_the_rows_of_a_file_that_are_left(lab: Lab, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('"one"\n"two"\n"three"\n')
    with LLM("m") as llm:
        llm.generate_file(source, target)
        target.write_bytes(target.read_bytes().splitlines(keepends=True)[0])
        report = llm.generate_file(source, target, progress=True)
        with pytest.raises(InvalidRequestError, match="progress=3 must be True or False"):
            llm.generate_file(source, target, progress=3)  # type: ignore[arg-type]
    shown = capfd.readouterr().err
    assert (report.earlier, report.done) == (1, 2) and "generate_file" in shown and "2/2" in shown and "3/3" not in shown


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
