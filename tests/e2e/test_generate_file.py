"""Requests in a file: every kind of row, what is wrong with them, and runs that were ended at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsv4lite import LLM, AsyncLLM, FileReport, SamplingParams
from dsv4lite.__main__ import main
from dsv4lite.config import tiny_model
from dsv4lite.errors import ConfigError, EngineStateError, InvalidRequestError
from tests.e2e.engines import MODEST, opened
from tests.loops import both_loops

CHAT = {"method": "POST", "url": "/v1/chat/completions"}
TEXT = {"method": "POST", "url": "/v1/completions"}
HELLO = [{"role": "user", "content": "abc"}]
GOOD: list[Any] = [
    "abc",
    {"custom_id": "a", "prompt": "abc", "max_tokens": 3},
    {"prompt_token_ids": [20, 21], "n": 2, "seed": 1, "max_tokens": 2, "ignore_eos": True},
    {"custom_id": "b", "messages": HELLO, "max_tokens": 4, "reasoning_effort": "high"},
    {"custom_id": "c", **CHAT, "body": {"messages": HELLO, "prompt": 3, "max_completion_tokens": 2, "reasoning_effort": None}},
    {"custom_id": "d", **TEXT, "body": {"model": "m", "prompt": "cab", "max_tokens": 5, "stream": False, "messages": HELLO}},
    {"prompt": "abc", "logit_bias": {"20": 100}},
    {"custom_id": None, "prompt": "abc", **dict.fromkeys(("messages", "tools", "stop", "temperature", "ignore_eos", "seed"))},
]
DEEP = '{"a": ' * 600 + "1" + "}" * 600
BAD: dict[str, str] = {
    "{": "the line is not JSON",
    "3": "must be an object, or a prompt as a string",
    '{"prompt": "a", "max_token": 3}': "unknown sampling parameter 'max_token'; did you mean 'max_tokens'?",
    '{"prompt": "a", "messages": []}': "must have one of messages, prompt, prompt_token_ids",
    '{"max_tokens": 3, "prompt": null}': "must have one of messages, prompt, prompt_token_ids",
    '{"prompt": "a", "max_token": null}': "unknown sampling parameter 'max_token'",
    '{"prompt": "a", "temperature": -1}': "temperature=-1 must be",
    '{"prompt_token_ids": [1, 99999]}': "99999",
    '{"messages": [{"role": "nobody", "content": ""}]}': "role",
    '{"messages": [{"role": "user", "content": "a"}], "reasoning_effort": ""}': "reasoning='' must be",
    '{"prompt": "a", "prompt_logprobs": 0}': "prompt_logprobs=0 is not written to a file",
    '{"url": "/v1/completions", "body": {"prompt": "a", "return_replay": true}}': "return_replay=True is not written to a file",
    '{"custom_id": 3, "prompt": "a"}': "custom_id=3 must be a string",
    '{"custom_id": "\\ud800", "prompt": "a"}': "must be a string without lone surrogates",
    "[" * 100_000: "the line is not JSON",
    f'{{"prompt": {DEEP}}}': "the prompt has the unknown key 'a'",
    '{"url": "/v1/embeddings", "body": {}}': "must be '/v1/chat/completions' or '/v1/completions'",
    '{"url": "/v1/completions", "body": {"messages": []}}': "must be an object with 'prompt'",
    '{"method": "GET", "url": "/v1/completions", "body": {}}': "method='GET' must be 'POST'",
    '{"url": "/v1/completions", "body": {"prompt": "a", "stream": true}}': "must be false in a file",
    '{"url": "/v1/chat/completions", "body": {"messages": 3}}': "messages",
    '{"prompt": "' + "a" * 2000 + '"}': "max_model_len",
}
DEFAULTS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def written(path: Path, rows: list[Any]) -> Path:
    """Write rows; one that is bytes is a line as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def outputs(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of outputs by the number of the row; none comes twice."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    found = {int(line["id"].removeprefix("row-")): line for line in lines}
    assert len(found) == len(lines)
    return found


def texts(path: Path) -> dict[int, Any]:
    """Return what was generated for each row."""
    return {
        number: [choice.get("text", choice.get("message")) for choice in line["response"]["body"]["choices"]]
        for number, line in sorted(outputs(path).items())
    }


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with opened(model, enable_prefix_caching=False, deterministic=True) as llm:
        yield llm


def test_rows_of_every_kind_are_answered_as_calls_answer_them(llm: LLM, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in", GOOD), tmp_path / "out"
    reports: list[FileReport] = []
    report = llm.generate_file(source, target, DEFAULTS, progress=reports.append)
    found = outputs(target)
    assert sorted(found) == list(range(len(GOOD))) and all(line["error"] is None for line in found.values())
    assert [found[i]["custom_id"] for i in range(len(GOOD))] == [None, "a", None, "b", "c", "d", None, None]
    assert (report.rows, report.earlier, report.done, report.failed) == (len(GOOD), 0, len(GOOD), 0)
    assert [seen.done for seen in reports] == list(range(1, len(GOOD) + 1)) and report.remaining_s == 0
    usage = [line["response"]["body"]["usage"] for line in found.values()]
    assert report.completion_tokens == sum(each["completion_tokens"] for each in usage)
    assert report.prompt_tokens == sum(each["prompt_tokens"] for each in usage)

    def change(**settings: Any) -> SamplingParams:
        return DEFAULTS.replace(**settings)

    wanted = [
        llm.generate("abc", DEFAULTS),
        llm.generate("abc", change(max_tokens=3)),
        llm.generate({"prompt_token_ids": [20, 21]}, change(n=2, seed=1, max_tokens=2)),
        llm.chat(HELLO, change(max_tokens=4), reasoning="high"),
        llm.chat(HELLO, change(max_tokens=2)),
        llm.generate("cab", change(max_tokens=5)),
        llm.generate("abc", change(logit_bias={20: 100})),
        llm.generate("abc", DEFAULTS),
    ]
    bodies = [output.to_openai(chat=i in (3, 4)) for i, output in enumerate(wanted)]
    assert [found[i]["response"]["body"]["choices"] for i in range(len(GOOD))] == [body["choices"] for body in bodies]
    assert all(found[i]["response"]["body"]["created"] > 0 for i in found)


def test_malformed_rows_are_named_and_the_others_go_on(llm: LLM, tmp_path: Path) -> None:
    bad = [line.encode() for line in BAD]
    source, target = written(tmp_path / "in", ["abc", *bad, b"", "abc"]), tmp_path / "out"
    report = llm.generate_file(source, target, DEFAULTS)
    found = outputs(target)
    assert (report.rows, report.done, report.failed) == (len(bad) + 2, len(bad) + 2, len(bad))
    for number, problem in enumerate(BAD.values(), 1):
        error = found[number]["error"]
        assert error["code"] in ("InvalidRequestError", "ContextLengthError") and problem in error["message"], (number, error)
        assert found[number]["response"] is None
    assert found[0]["error"] is None and found[len(bad) + 2]["error"] is None
    assert llm.generate_file(source, target, DEFAULTS).failed == len(bad)  # they still have no answer


def test_line_separators_of_unicode_break_no_output(llm: LLM, tmp_path: Path) -> None:
    """A program that reads the outputs as text sees a line for each, as on the pages."""
    ids = ["\x85a", "b\u2028\u2029é"]
    source = written(tmp_path / "in", [{"custom_id": name, "prompt": "abc"} for name in ids])
    for report in (llm.generate_file(source, tmp_path / "out", DEFAULTS) for _ in range(2)):
        assert report.rows == report.earlier + report.done == 2
    text = (tmp_path / "out").read_text(encoding="utf-8")
    assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()) == sorted(ids) and "é" in text


def test_a_run_goes_on_wherever_the_one_before_was_ended(llm: LLM, tmp_path: Path) -> None:
    source, whole, target = written(tmp_path / "in", GOOD * 4), tmp_path / "whole", tmp_path / "out"
    llm.generate_file(source, whole, DEFAULTS)
    lines, rng = whole.read_bytes(), random.Random(0)
    for end in [0, 1, len(lines) - 1, len(lines), *(rng.randrange(len(lines)) for _ in range(6))]:
        target.write_bytes(lines[:end])
        kept = lines[:end].count(b"\n")
        report = llm.generate_file(source, target, DEFAULTS)
        assert (report.earlier, report.done) == (kept, len(GOOD) * 4 - kept)
        assert texts(target) == texts(whole)


def test_a_run_that_its_caller_left_goes_on(llm: LLM, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in", ["abc"] * 30), tmp_path / "out"

    def leave(report: FileReport) -> None:
        if report.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate_file(source, target, DEFAULTS, max_in_flight=2, progress=leave)
    assert len(outputs(target)) == 3
    report = llm.generate_file(source, target, DEFAULTS)
    assert (report.earlier, report.done) == (3, 27) and len(set(map(str, texts(target).values()))) == 1


@pytest.mark.parametrize("how", ["abort", "close"])
def test_rows_that_were_cut_off_run_again(model: Path, tmp_path: Path, how: str) -> None:
    """They have no line, as after a kill. A closed engine ends the call; an abort ends only the rows that run."""
    source, target = written(tmp_path / "in", ["abc"] * 8), tmp_path / "out"
    params, at_once = DEFAULTS.replace(max_tokens=40), 8 if how == "close" else 3

    def cut(report: FileReport) -> None:
        if report.done >= 2:
            getattr(llm, how)()

    with LLM(str(model), **MODEST | {"max_num_seqs": 2}) as llm:
        if how == "close":
            with pytest.raises(EngineStateError, match="closed"):
                llm.generate_file(source, target, params, progress=cut, max_in_flight=at_once)
        else:
            report = llm.generate_file(source, target, params, progress=cut, max_in_flight=at_once)
            assert report.done == len(outputs(target)) < 8 and report.failed == 0
    with opened(model) as llm:
        report = llm.generate_file(source, target, params)
    assert report.earlier + report.done == 8
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 40 for line in outputs(target).values())


def test_rows_that_are_appended_meanwhile_run_with_the_next_call(llm: LLM, tmp_path: Path) -> None:
    """The report had more rows done than there are, and a row that was half written had an error as its output for good."""
    source, target = written(tmp_path / "in.jsonl", ["abc", "cab"]), tmp_path / "out.jsonl"

    def append(report: FileReport) -> None:
        if report.done == 1:
            with source.open("ab") as file:
                file.write(b'"bca"\n"ac')

    report = llm.generate_file(source, target, DEFAULTS, max_in_flight=1, progress=append)
    assert (report.rows, report.done, report.remaining_s) == (2, 2, 0.0)
    with source.open("ab") as file:
        file.write(b'b"\n')
    report = llm.generate_file(source, target, DEFAULTS)
    assert (report.rows, report.earlier, report.done, report.failed) == (4, 2, 2, 0) and sorted(outputs(target)) == [0, 1, 2, 3]


def test_a_second_run_on_the_same_target_is_refused(llm: LLM, tmp_path: Path) -> None:
    """It would answer each row again."""
    source, target = written(tmp_path / "in", GOOD), tmp_path / "out"
    refused: list[str] = []

    def again(report: FileReport) -> None:
        with pytest.raises(ConfigError, match="is being written by another run") as caught:
            llm.generate_file(source, target, DEFAULTS)
        refused.append(str(caught.value))

    llm.generate_file(source, target, DEFAULTS, progress=again)
    assert len(refused) == len(outputs(target)) == len(GOOD)
    assert llm.generate_file(source, target, DEFAULTS).done == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_a_run_does_not_keep_its_target(llm: LLM, tmp_path: Path) -> None:
    """As a pool of processes that was started meanwhile: the next run was refused, for the fork had the locked file."""
    source, target, forks = written(tmp_path / "in.jsonl", ["abc"]), tmp_path / "out.jsonl", []

    def fork(report: FileReport) -> None:
        forks.append(os.fork())
        if forks[0] == 0:
            signal.pause()

    llm.generate_file(source, target, DEFAULTS, progress=fork)
    try:
        assert llm.generate_file(source, target, DEFAULTS).earlier == 1
    finally:
        os.kill(forks[0], signal.SIGKILL)
        os.waitpid(forks[0], 0)


def test_files_that_do_not_fit_are_refused_and_stay_as_they_are(llm: LLM, tmp_path: Path) -> None:
    source = written(tmp_path / "in", GOOD)
    for name, content, problem in (
        ("text", b"hello\n", "holds other data than outputs of generate_file: b'hello"),
        ("unfinished", b"hello", "holds other data than outputs of generate_file: b'hello"),
        ("other", b'{"id": 3}\n', "holds other data than outputs"),
        ("number", b'{"id": "row-1", "custom_id": 3}\n', "holds other data than outputs"),
        ("surrogate", b'{"id": "row-1", "custom_id": "\\ud800"}\n', "holds other data than outputs"),
        ("deep", b"[" * 100_000 + b"\n", "holds other data than outputs"),
        ("more", b'{"id": "row-99", "custom_id": null}\n', "in has no row 99"),
        ("ids", b'{"id": "row-1", "custom_id": "z"}\n', "row 1 of .*in is 'a'"),
    ):
        target = tmp_path / name
        target.write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            llm.generate_file(source, target, DEFAULTS)
        assert target.read_bytes().startswith(content)
    with pytest.raises(InvalidRequestError, match="must be SamplingParams or None"):
        llm.generate_file(source, tmp_path / "new", {"max_tokens": 4})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="return_routed_experts=True is not written to a file"):
        llm.generate_file(source, tmp_path / "new", DEFAULTS.replace(return_routed_experts=True))
    with pytest.raises(ConfigError, match="source and target are the same file"):
        llm.generate_file(source, source, DEFAULTS)
    for bad in ("a\0b", "", None):
        for paths, named in (((bad, source), "^source="), ((source, bad), "^target=")):
            with pytest.raises(ConfigError, match=named):
                llm.generate_file(*paths, DEFAULTS)  # type: ignore[arg-type]
    os.mkfifo(tmp_path / "fifo")
    for paths in ((tmp_path / "fifo", tmp_path / "new"), (source, tmp_path / "fifo")):
        with pytest.raises(ConfigError, match="is a pipe"):
            llm.generate_file(*paths, DEFAULTS)
    with pytest.raises(FileNotFoundError):
        llm.generate_file(tmp_path / "none", tmp_path / "new", DEFAULTS)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for target, problem in ((tmp_path, "Is a directory"), (tmp_path / "loop", "symbolic links")):
        with pytest.raises(OSError, match=problem):
            llm.generate_file(source, target, DEFAULTS)
    assert llm.generate("abc", DEFAULTS).outputs[0].finish_reason == "length"


def test_runs_that_fail_before_their_first_row_leave_no_target(model: Path, tmp_path: Path) -> None:
    """An empty file stayed, as of a run without rows. What was there before stays, and so does a link to no file."""
    source, nothing = written(tmp_path / "in", ["abc"] * 3), written(tmp_path / "nothing", [])
    new, empty, link = tmp_path / "new", tmp_path / "empty", tmp_path / "link"
    empty.touch()
    link.symlink_to(tmp_path / "away")
    with opened(model) as llm:
        for target in (new, empty, link):
            with pytest.raises(InvalidRequestError):
                llm.generate_file(source, target, DEFAULTS, max_in_flight=0)
        llm.generate_file(nothing, tmp_path / "none", DEFAULTS)
    for target in (new, empty, link):
        assert main(["batch", str(source), str(target), "--model", str(tmp_path)]) == 2
        with pytest.raises(EngineStateError):
            llm.generate_file(source, target, DEFAULTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "in", "link", "none", "nothing"]
    assert (tmp_path / "none").read_bytes() == empty.read_bytes() == b""
    with opened(model) as llm:
        for target in (new, empty, link):
            assert llm.generate_file(source, target, DEFAULTS).done == 3 == len(outputs(target))
    assert link.is_symlink()


def test_a_full_disk_ends_the_call_and_loses_nothing(llm: LLM, tmp_path: Path) -> None:
    source = written(tmp_path / "in", GOOD)
    with pytest.raises(OSError, match=r"No space left.*/dev/full"):
        llm.generate_file(source, Path("/dev/full"), DEFAULTS)
    assert llm.generate("abc", DEFAULTS).outputs[0].finish_reason == "length"


@both_loops
async def test_event_loops_run_while_files_are_read(model: Path, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in", ["abc"] * 3000), tmp_path / "out"
    target.write_text("".join(f'{{"id": "row-{i}", "custom_id": null}}\n' for i in range(3000)))
    ended, turns = anyio.Event(), 0

    async def count() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            await anyio.sleep(0)

    async with AsyncLLM(str(model), **MODEST) as llm, anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await anyio.sleep(0)
        before = turns
        report = await llm.generate_file(source, target, DEFAULTS)
        assert (report.earlier, report.done) == (3000, 0) and turns > before
        ended.set()


def test_outputs_of_other_requests_are_found_before_a_row_runs(llm: LLM, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in", GOOD), tmp_path / "out"
    target.write_bytes(b'{"id": "row-5", "custom_id": "z"}\n')
    with pytest.raises(ConfigError, match=r"row 5 of .*in is 'd'"):
        llm.generate_file(source, target, DEFAULTS, max_in_flight=1)
    assert len(outputs(target)) == 1


@both_loops
async def test_event_loops_have_it_too(model: Path, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in", GOOD), tmp_path / "out"
    async with AsyncLLM(str(model), **MODEST) as llm:
        with anyio.move_on_after(0):  # a cancelled call leaves a file that the next one continues
            await llm.generate_file(source, target, DEFAULTS)
        report = await llm.generate_file(source, target, DEFAULTS)
    assert (report.earlier + report.done, report.failed, len(outputs(target))) == (len(GOOD), 0, len(GOOD))


def test_killed_commands_are_continued(tmp_path: Path) -> None:
    source = written(tmp_path / "in", [{"custom_id": str(i), "prompt": f"def f{i}(", "max_tokens": 8} for i in range(40)])
    target = tmp_path / "out"
    command = [sys.executable, "-m", "dsv4lite", "batch", str(source), str(target), "--max-num-seqs", "4", "--max-model-len", "256"]
    for most in (3, 20):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        lines = 0
        while process.poll() is None and lines < most:
            time.sleep(0.02)
            with suppress(FileNotFoundError):  # also removed and made again while the command begins
                lines = target.read_bytes().count(b"\n")
        process.kill()
        assert process.wait() == -signal.SIGKILL
    done = subprocess.run([*command, "--json"], capture_output=True, check=True)
    report = json.loads(done.stdout)
    assert report["earlier"] >= 20 and report["earlier"] + report["done"] == 40 and report["failed"] == 0
    assert sorted(outputs(target)) == list(range(40))
    assert all(line["custom_id"] == str(number) for number, line in outputs(target).items())


def test_command_says_what_is_wrong_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "FileNotFoundError" in capsys.readouterr().err
    source = written(tmp_path / "in", ["abc"])
    assert main(["batch", str(source), str(source)]) == 2
    assert "ConfigError: source and target are the same file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["plan", tiny_model(), "--json", "--device", "cpu"], ["--version"]], ids=str)
def test_commands_whose_reader_leaves_end_quietly(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "dsv4lite", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("line", ["generate abc --max-tokens 2 2>&-", "batch none out 2>&-", "batch none out 2>/dev/full"])
def test_commands_without_standard_error_write_only_results_to_standard_output(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing shows a batch's progress either; asking whether the stream is a terminal ended it. The status of errors was 1."""
    command = ["sh", "-c", f'exec "$0" -m dsv4lite {line}', sys.executable]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (main(line.split()[:-1]), capsys.readouterr().out) == (ended.returncode, ended.stdout)


def test_errors_of_a_batch_name_their_row(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate_batch(["abc", {"prompt_token_ids": [99999]}], DEFAULTS)
    assert caught.value.__notes__ == ["row 1 of the batch: {'prompt_token_ids': [99999]}"]


def test_default_params_are_those_of_the_checkpoint(llm: LLM) -> None:
    assert llm.default_params == SamplingParams()
