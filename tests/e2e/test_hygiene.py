"""An engine changes nothing that belongs to the host, and the host's settings do not affect the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import host

ROOT = Path(__file__).resolve().parents[2]
Report = dict[str, Any]
IN_A_LOOP = "in an event loop"
# Threads and open files change with the engines; other tests check them.
OF_AN_ENGINE = {"threads", "files", "mapped files"}
ASPECTS = sorted(host.look().keys() - OF_AN_ENGINE)


def run(mode: str) -> Report:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, host.__file__, mode], capture_output=True, text=True, check=False, timeout=900, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    report: Report = json.loads(ran.stdout)
    return report


@pytest.fixture(scope="module")
def plain() -> Report:
    """The report of a host with ordinary settings."""
    return run("plain")


@pytest.fixture(scope="module")
def unusual() -> Report:
    """The report of a host that has changed what a host may change."""
    return run("unusual")


@pytest.fixture(params=["plain", "unusual"])
def report(request: pytest.FixtureRequest) -> Report:
    found: Report = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("aspect", ASPECTS)
def test_state_of_the_host_never_changes(report: Report, aspect: str) -> None:
    stages = {stage: seen[aspect] for stage, seen in report["stages"].items()}
    in_a_loop = {stage: stages.pop(stage) for stage in list(stages) if stage.startswith(IN_A_LOOP)}
    before = stages["before import"]
    assert {stage: seen for stage, seen in stages.items() if seen != before} == {}
    # asyncio itself takes SIGINT while it runs.
    first, *others = in_a_loop.values()
    assert all(seen == first for seen in others)
    assert first == before or aspect == "signal handlers"


def test_settings_of_the_host_are_really_unusual(plain: Report, unusual: Report) -> None:
    """The tests above depend on it."""
    ordinary, changed = (one["stages"]["before import"] for one in (plain, unusual))
    assert {aspect for aspect in ordinary if ordinary[aspect] != changed[aspect]} >= {
        "default dtype",
        "default device",
        "grad mode",
        "torch determinism",
        "torch random state",
        "signal handlers",
        "log handlers",
        "exception hooks",
        "garbage collector",
        "working directory",
    }


def test_threads_are_the_engines_own_and_end_with_them(report: Report) -> None:
    threads = {stage: seen["threads"] for stage, seen in report["stages"].items()}
    assert threads["after import"] == threads["before import"] == ["MainThread"]
    assert threads["an engine"] == threads["an engine at work"] == ["MainThread", "dsv4lite-engine"]
    assert threads["two engines at work"].count("dsv4lite-engine") == 2
    assert all(name == "MainThread" or name.startswith("dsv4lite-") for name in threads["two engines at work"])
    assert threads["both closed"] == ["MainThread"]
    assert threads["at the end"] == ["MainThread"]


def test_files_are_closed_with_the_engines(report: Report) -> None:
    stages = report["stages"]
    before = stages["before import"]["files"]
    assert stages["after import"]["files"] == before
    assert stages["both closed"]["files"] == before
    assert stages["at the end"]["files"] == before
    assert stages["at the end"]["mapped files"] == []


def test_neither_cuda_nor_a_process_group_is_opened_for_an_engine_on_the_cpu(report: Report) -> None:
    for seen in report["stages"].values():
        assert not seen["cuda initialised"]
        assert not seen["process group"]
        assert seen["children"] == []


def test_no_task_is_left_in_the_event_loop(report: Report) -> None:
    assert report["results"]["tasks left"] == []


def test_results_are_the_same_in_every_host(plain: Report, unusual: Report) -> None:
    """A default dtype of float64 once affected the hyper-connections, a default device the log-probabilities."""
    assert plain["results"] == unusual["results"]
    assert plain["results"]["LLM"] == plain["results"]["AsyncLLM"]
    assert len(plain["results"]["LLM"]["token_ids"]) == host.LENGTH
    assert plain["results"]["LLM"]["tensors"] == ["cpu torch.float32", "cpu torch.float32", "cpu torch.int32"]
