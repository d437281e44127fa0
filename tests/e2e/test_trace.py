"""The trace of steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dsv4lite.config import tiny_model
from dsv4lite.errors import ConfigError, EngineDeadError
from dsv4lite.request import SamplingParams
from tests.e2e.engines import engine_of, opened, raising, unopened

PARTS = ("schedule", "launch", "wait", "process", "deliver")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_step_is_in_the_trace(tmp_path: Path, overlap: bool) -> None:
    path = tmp_path / "steps.json"
    with opened(tiny_model(), overlap=overlap, trace_path=path) as llm:
        llm.generate_batch([[5, 6, 7], [8, 9]], GREEDY)
        steps = llm.stats().steps
    events = json.loads(path.read_text())
    found = Counter(event["name"] for event in events)
    assert set(found) == set(PARTS) and found["launch"] == found["wait"] == found["process"] == steps
    assert found["schedule"] >= steps and found["deliver"] >= 6
    launched = [event["args"] for event in events if event["name"] == "launch"]
    assert launched == [event["args"] for event in events if event["name"] == "process"]
    assert sum(step["tokens"] for step in launched) == 3 + 2 + 2 * 5
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events) and len({event["tid"] for event in events}) == 1
    ends = [event["ts"] + event["dur"] for event in events]
    assert ends == sorted(ends) and all(later["ts"] >= end for later, end in zip(events[1:], ends, strict=False))


def test_trace_of_an_engine_without_work_has_no_steps(tmp_path: Path) -> None:
    with opened(tiny_model(), trace_path=str(tmp_path / "steps.json")):
        pass
    assert {event["name"] for event in json.loads((tmp_path / "steps.json").read_text())} <= {"schedule"}


def test_trace_of_an_engine_that_fails_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    with unopened(tiny_model(), trace_path=path) as llm:
        engine_of(llm)._runner.launch = raising(ZeroDivisionError("the device is on fire"))
        with pytest.raises(EngineDeadError):
            llm.generate([5, 6, 7], GREEDY)
    assert json.loads(path.read_text())[-1]["name"] in ("launch", "deliver")


def test_trace_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace_path=.*cannot be written: .*choose another file, or None"):
        unopened(tiny_model(), trace_path=tmp_path).__enter__()


def test_full_disk_ends_the_trace_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with opened(tiny_model(), trace_path="/dev/full") as llm:
        assert len(llm.generate([5, 6, 7], GREEDY).token_ids) == 6
    assert "the trace /dev/full ends here" in caplog.text
