"""Steps that fail on another rank, or never end: every request fails with the rank, the phase and the reason all the same."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.engine import engine as engine_module
from dsv4lite.errors import EngineDeadError
from dsv4lite.llm import LLM
from dsv4lite.request import SamplingParams
from tests.e2e.engines import MODEST, thread_of
from tests.parallel.ranks import Ranks
from tests.parallel.requests import PROMPTS
from tests.parallel.test_external import Job, on_host
from tests.parallel.trouble import ALARM, Fails, LeaderSleeps, Sleeps, hold_passes

pytestmark = pytest.mark.usefixtures("forked_ranks")

SETTINGS = {**MODEST, "expert_parallel_size": 2}
STEP_S = {Fails: 60.0, Sleeps: 0.5, LeaderSleeps: 0.5}  # failures are sent at once
Failure = tuple[str, int | None, str | None]


def failures(llm: LLM) -> list[Failure]:
    """Return the errors of several requests, and of one after them."""
    errors: list[Failure] = []

    def ask(prompt: list[int]) -> None:
        try:
            llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=20, ignore_eos=True))
        except EngineDeadError as error:
            errors.append((str(error), error.rank, error.phase))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    ask(PROMPTS[0])
    return errors


def assert_errors(errors: list[Failure], trouble: type[Fails]) -> None:
    stuck = "did not finish a step within 0.5 s: it, or a rank that it waits for, is stuck"
    rank, reason = (1, "failed: ValueError: no experts today") if trouble is Fails else (0, stuck)
    assert len(errors) == len(PROMPTS) + 1
    for message, lost, phase in errors:
        assert (lost, phase) == (rank, "step")
        assert message.startswith(f"rank {rank} (process ") and message.endswith(f") {reason}; phase: step")


@pytest.mark.parametrize(("executor", "trouble"), [("thread", Fails), ("thread", Sleeps), ("process", LeaderSleeps)])
def test_step_that_does_not_end_ends_every_request(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executor: Any, trouble: type[Fails]
) -> None:
    monkeypatch.setenv(ALARM, str(tmp_path / "never"))
    with LLM(str(model), **SETTINGS, executor=executor, dispatcher=trouble, step_timeout_s=STEP_S[trouble]) as llm:
        errors = failures(llm)
    assert_errors(errors, trouble)


def test_thread_that_does_not_return_from_its_step_does_not_block_close(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ALARM, str(tmp_path / "alarm"))
    monkeypatch.setattr(engine_module, "_LAST_STEP_S", 0.1)
    monkeypatch.setattr(engine_module, "_JOIN_POLL_S", 0.05)
    with LLM(str(model), **SETTINGS, executor="thread", dispatcher=LeaderSleeps, step_timeout_s=0.5) as llm:
        thread = thread_of(llm)
        errors = failures(llm)
    assert thread.is_alive()  # its step has not ended
    assert_errors(errors, LeaderSleeps)
    assert f"rank 0 (process {os.getpid()})" in errors[0][0]
    (tmp_path / "alarm").touch()
    thread.join(30)
    assert not thread.is_alive()


def test_rank_that_is_stuck_does_not_stop_the_leader_in_a_send(model: Path, tmp_path: Path) -> None:
    """A request that did not fit into the connection's buffer waited for ever for a stage that never read it."""
    sizes = {"max_model_len": 16384, "max_num_batched_tokens": 1024, "pipeline_parallel_size": 2}
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = (([9] * 10_000, params), (PROMPTS[0], params.replace(stop=("x" * (1 << 20),))))
    errors: list[BaseException] = []

    def ask(prompt: list[int], params: SamplingParams) -> None:
        try:
            llm.generate({"prompt_token_ids": prompt}, params)
        except EngineDeadError as error:
            errors.append(error)

    with LLM(str(model), **{**MODEST, **sizes}, step_timeout_s=4.0) as llm:
        llm.apply(hold_passes, 1, str(tmp_path))
        threads = [threading.Thread(target=ask, args=request) for request in requests]
        for thread in threads:
            thread.start()
            time.sleep(0.5)  # the second one comes when two steps are in flight: it is sent with the third
        (tmp_path / "1").touch()
        for thread in threads:
            thread.join(20)
        stuck = [thread.is_alive() for thread in threads]
        for number in range(2, 40):
            (tmp_path / str(number)).touch()  # otherwise the engine could not be closed
        for thread in threads:
            thread.join()
    assert stuck == [False, False]
    assert [str(error).partition(") ")[2] for error in errors] == [
        "did not finish a step within 4 s: it, or a rank that it waits for, is stuck; phase: step"
    ] * 2


def stumble(model: Path, settings: Job, rank: int) -> list[Failure]:
    alarm = Path(settings.pop("alarm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALARM, str(alarm))  # before the other rank can begin a step
        patch.setattr(engine_module, "_LAST_STEP_S", 0.1)  # a collective without its peer does not return
        with LLM(str(model), **settings) as llm:
            if rank == 0:
                errors = failures(llm)
                alarm.touch()  # the sleeping rank wakes up only after every request has failed
                return errors
            thread_of(llm).join(30)
            return failures(llm)


@pytest.mark.parametrize("trouble", [Fails, Sleeps, LeaderSleeps])
def test_step_that_does_not_end_ends_every_request_of_the_host(
    ranks: Ranks, model: Path, tmp_path: Path, trouble: type[Fails]
) -> None:
    settings = {**SETTINGS, "dispatcher": trouble, "step_timeout_s": STEP_S[trouble], "alarm": str(tmp_path / "alarm")}
    first, second = on_host(ranks, model, stumble, settings, 2)
    assert_errors(first, trouble)
    assert len(second) == len(first)  # the other rank's engine is dead, too
