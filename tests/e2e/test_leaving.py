"""Programs that end, fork, or drop an engine while it generates."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import leave
from tests.e2e.engines import write_model
from tests.parallel.requests import SHARED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), SHARED)


def ran(model: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit status of a program and what it wrote to standard error."""
    status, _, errors = said(model, *arguments)
    return status, errors


def said(model: Path, *arguments: str) -> tuple[int, str, str]:
    """The same, with what it wrote to standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, leave.__file__, str(model), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("ending", "kinds", "status", "last_line"),
    [
        ("end", ["llm"], 0, ""),
        ("exit", ["llm", "async"], 3, ""),
        ("raise", ["async"], 1, "ZeroDivisionError"),
        ("interrupt", ["llm", "process"], -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_interpreter_that_ends_with_open_engines_keeps_its_exit_status(
    model: Path, ending: str, kinds: list[str], status: int, last_line: str
) -> None:
    """The engine's thread, inside torch while the interpreter finalized, once aborted the process: status 134."""
    found, errors = ran(model, ending, *kinds)
    assert (found, errors.strip().rpartition("\n")[2]) == (status, last_line), errors
    assert not last_line or errors.startswith("Traceback")


def test_interpreter_that_ends_while_a_grammar_is_compiled_keeps_its_exit_status(model: Path) -> None:
    """llguidance's code, left by a daemon thread during finalization, once crashed the process: status 139."""
    pytest.importorskip("llguidance")
    assert ran(model, "grammar") == (0, "")


@pytest.mark.parametrize(
    ("ending", "answer"), [("thread", "bbbb"), ("handler", "the program ends: no grammar is compiled any more")]
)
def test_grammar_after_the_end_of_the_main_thread_does_not_hold_the_program(model: Path, ending: str, answer: str) -> None:
    """The request once waited for ever, and so did the program."""
    pytest.importorskip("llguidance")
    assert said(model, "late", ending) == (0, answer + "\n", "")


def test_rank_of_a_host_that_ends_keeps_its_exit_status_and_the_leader_reports_it(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    with ThreadPoolExecutor(2) as pool:
        (lead, report), (status, errors) = pool.map(lambda rank: ran(model, "rank", rank, port), "01")
    assert (lead, status) == (4, 3), report + errors


def test_engines_and_streams_that_are_dropped_end(model: Path) -> None:
    """They once generated to the end of each request, and threads and memory of the engines remained."""
    status, errors = ran(model, "drop", "llm", "async", "process")
    assert status == 0, errors
    assert errors.count("ResourceWarning: an engine of") == 3 and errors.count("ResourceWarning: the stream of") == 3


def test_fork_of_the_process_has_no_engine_and_leaves_it_alone(model: Path) -> None:
    """Calls in the fork once waited forever for a thread that a fork does not have."""
    assert ran(model, "fork", "llm", "process") == (0, "")
