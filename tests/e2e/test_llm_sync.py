"""LLM, the synchronous API, on a scripted engine: what a thread instead of an event loop makes different from ``test_llm_api``."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dsv4lite.api import session
from dsv4lite.api.collect import Collector
from dsv4lite.api.session import Session
from dsv4lite.errors import (
    CheckpointError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.request import Phase, RequestOutput, SamplingParams
from dsv4lite.weights.update import NamedTensors
from tests.e2e.test_llm_api import SERVING_ONLY, WHILE_STARTED, WITH_WEIGHTS, text_model
from tests.fakes import ENDLESS, MANY, POISON, FakeEngine, Lab, endless


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.001)


def test_calls_return_and_threads_end_with_close(lab: Lab) -> None:
    before = set(threading.enumerate())
    with LLM("m") as llm:
        own = set(threading.enumerate()) - before
        assert len(own) == 2
        assert [c.text for c in llm.generate("Grüße, 世界", SamplingParams(n=2)).outputs] == ["Grüße, 世界"] * 2
        assert (llm.state, llm.weight_version, llm.stats(), llm.memory()) == (Phase.READY, 0, {"open": 0}, "plan")
        assert llm.generate("something longer than seven tokens").usage.completion_tokens == 7
        assert llm.tokenizer is lab.tokenizer
        llm.pause()
        llm.resume()
        llm.reset_prefix_cache()
        assert (lab.engine.resets, llm.state) == (1, Phase.READY)
    assert not own & set(threading.enumerate())
    assert (llm.state, repr(llm)) == (Phase.CLOSED, "LLM('m', state='closed')")


def test_stream_yields_deltas_and_ends_with_its_block(lab: Lab) -> None:
    with LLM("m") as llm:
        with llm.stream("Grüße, 世界", SamplingParams(n=2)) as stream:
            text = "".join(delta.text for delta in stream if delta.index == 1)
            assert text == stream.final().outputs[1].text == "Grüße, 世界"
        lab.engine.model = endless
        with llm.stream("x", MANY) as stream:
            first = next(stream)
        assert stream.final().token_ids[:1] == first.token_ids
        assert stream.final().outputs[0].finish_reason == "abort"
        until(lambda: not lab.engine.sequences)
        with llm.stream("x", MANY) as stream:
            next(stream)
            stream.abort()
            assert list(stream)[-1].finish_reason == "abort"
        with pytest.raises(RuntimeError, match="with"):
            next(llm.stream("x"))


def test_threads_that_share_an_iterator_get_everything_once(lab: Lab, pool: ThreadPoolExecutor) -> None:
    """A thread that looked just before another one was woken once waited for ever."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with LLM("m") as llm:
            for _ in range(100):
                outputs = llm.as_completed("abcdefgh".__iter__(), SamplingParams())
                readers = [pool.submit(lambda one=outputs: [output.index for output in one]) for _ in range(4)]
                assert sorted(index for reader in readers for index in reader.result(30)) == [*range(8)]
                with llm.stream("a text", SamplingParams()) as stream:
                    parts = [pool.submit(lambda one=stream: [len(delta.token_ids) for delta in one]) for _ in range(4)]
                    assert sum(sum(part.result(30)) for part in parts) == len(stream.final().token_ids)
    finally:
        sys.setswitchinterval(interval)


def test_generate_from_many_threads(lab: Lab, pool: ThreadPoolExecutor) -> None:
    with LLM("m", max_num_seqs=4, max_queued_requests=2) as llm:
        futures = [pool.submit(llm.generate, [100 + n, 5, 6], SamplingParams()) for n in range(200)]
        assert [future.result(30).token_ids[0] for future in futures] == [100 + n for n in range(200)]
        assert lab.engine.max_open <= 6


def test_everything_works_in_a_thread_that_runs_an_event_loop(lab: Lab) -> None:
    async def main() -> None:
        with LLM("m") as llm:
            assert llm.generate("a", SamplingParams()).text == "a"
            with llm.stream("b", SamplingParams()) as stream:
                assert "".join(delta.text for delta in stream) == "b"
            assert [out.text for out in llm.generate_batch(["c", "d"], SamplingParams())] == ["c", "d"]
            async with AsyncLLM("n") as other:
                assert (await other.generate("e", SamplingParams())).text == "e"

    asyncio.run(main())


def test_batch_keeps_order_and_returns_errors(lab: Lab) -> None:
    prompts: list[Any] = [[100 + n] * (1 + n % 5) for n in range(30)]
    prompts[7], prompts[9] = [], [POISON, 5, 6]
    with LLM("m", max_num_seqs=4) as llm:
        outs = llm.generate_batch(prompts, SamplingParams(), on_error="return")
        assert [out.index for out in outs] == list(range(30))
        assert isinstance(outs[7].error, InvalidRequestError) and isinstance(outs[9].error, RequestFailedError)
        assert all(out.prompt_token_ids == tuple(prompts[out.index]) for out in outs if out.error is None)
        with pytest.raises(InvalidRequestError):
            llm.generate_batch(prompts, SamplingParams())
        until(lambda: not lab.engine.sequences)


def test_as_completed_pulls_lazily_and_aborts_when_left(lab: Lab) -> None:
    pulled = 0

    def rows() -> Iterator[list[int]]:
        nonlocal pulled
        while True:
            pulled += 1
            yield [100 + pulled % 7]

    lab.model = endless
    with LLM("m") as llm:
        for taken, out in enumerate(llm.as_completed(rows(), SamplingParams(max_tokens=2), max_in_flight=5), 1):
            assert pulled - taken <= 5 and len(out.token_ids) == 2
            if taken == 20:
                break
        gc.collect()
        until(lambda: not lab.engine.sequences)
        with llm.as_completed(rows(), MANY.replace(max_tokens=1)) as batch:
            next(batch)
        assert list(batch) == []
        for wrong in ("one", {"prompt_token_ids": [1]}, 5):
            with pytest.raises(InvalidRequestError):
                llm.as_completed(wrong)  # type: ignore[arg-type]


def test_chat_and_score(lab: Lab) -> None:
    lab.model = text_model("thought</think>answer")
    messages = [{"role": "user", "content": "2+2?"}]
    with LLM("m") as llm:
        out = llm.chat(messages, SamplingParams(), reasoning="high")
        assert (out.reasoning, out.text) == ("thought", "answer")
        with llm.chat_stream(messages, SamplingParams(), reasoning="high") as stream:
            assert "".join(delta.reasoning for delta in stream) == "thought"
        assert llm.score([5], [6, 7], top_logprobs=1).sampled.tolist() == [-6, -7]


def test_abort_and_death_reach_calls_of_other_threads(lab: Lab, pool: ThreadPoolExecutor) -> None:
    lab.model = endless
    with LLM("m") as llm:
        future = pool.submit(llm.generate, "x", ENDLESS)
        until(lambda: bool(lab.engine.sequences))
        llm.abort()
        assert future.result(30).outputs[0].finish_reason == "abort"
        until(lambda: not lab.engine.sequences)
        future = pool.submit(llm.generate, "x", ENDLESS)
        until(lambda: bool(lab.engine.sequences))
        lab.engine.die(MemoryError())
        later = (lambda: llm.generate("x"), llm.pause, llm.resume, llm.reset_prefix_cache, lambda: llm.as_completed([]))
        for call in (lambda: future.result(30), *later):
            with pytest.raises(EngineDeadError) as error:
                call()
            assert isinstance(error.value.__cause__, MemoryError)


def test_state_is_the_new_one_when_a_call_returns(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A future wakes who waits before it runs its callbacks: under load an engine was still "updating" after an update."""
    invoke = Future._invoke_callbacks

    def late(future: Future[Any]) -> None:
        time.sleep(0.05)
        invoke(future)

    monkeypatch.setattr(Future, "_invoke_callbacks", late)
    with LLM("m") as llm:
        with llm.update_weights(1) as update:
            update.load(NamedTensors({"w": torch.zeros(1)}))
        assert (llm.state, llm.weight_version) == (Phase.READY, 1)
        llm.sleep(1)
        assert llm.state is Phase.ASLEEP
        llm.wake_up()
        assert llm.state is Phase.READY
        lab.engine.failing["sleep"] = MemoryError()
        with pytest.raises(MemoryError):
            llm.sleep(1)
        assert llm.state is Phase.READY


def test_keyboard_interrupt_ends_the_request(lab: Lab) -> None:
    lab.model = endless

    def interrupt() -> None:
        until(lambda: lab.engine.steps > 3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with LLM("m") as llm:
            for call in (lambda: llm.generate("x", MANY), lambda: llm.generate_batch(["x", "y"], MANY)):
                lab.engine.steps = 0
                thread = threading.Thread(target=interrupt)
                thread.start()
                with pytest.raises(KeyboardInterrupt):
                    call()
                thread.join()
                until(lambda: not lab.engine.sequences)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("call", [lambda llm: llm.generate("x", MANY), lambda llm: llm.stream("x", MANY).__enter__()])
def test_keyboard_interrupt_at_the_end_of_the_submission_ends_the_request(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, call: Callable[[LLM], object]
) -> None:
    lab.model, submit = endless, Session.submit

    def interrupted(*args: Any) -> None:
        submit(*args)
        raise KeyboardInterrupt

    with LLM("m") as llm:
        with monkeypatch.context() as patch:
            patch.setattr(Session, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call(llm)
        lab.engine.sync()
        assert len(lab.engine.submitted) == 1 and not lab.engine.sequences


def test_keyboard_interrupt_of_a_start_leaves_no_thread(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = set(threading.enumerate()), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            LLM.create("m")
    until(lambda: set(threading.enumerate()) <= before)


def test_deadlines_of_any_length_end_queued_requests_and_hold_up_nothing(lab: Lab, pool: ThreadPoolExecutor) -> None:
    """One of 1e12 seconds, of a request in line, once ended the delivery thread: that request and all later ones hung."""
    lab.held = True
    with LLM("m", max_num_seqs=1, max_queued_requests=1) as llm:
        futures = [pool.submit(llm.generate, "x", SamplingParams(), deadline=deadline) for deadline in (1e12, 1e300, 1e12, 2e9)]
        until(lambda: len(lab.engine.submitted) == 2)
        for deadline in (0.02, 0.01, 1e-9):
            assert llm.generate("x", MANY, deadline=deadline).outputs[0].finish_reason == "deadline"
        with pytest.raises(QueueFullError):
            llm.generate("x", MANY, wait=False)
        lab.engine.go()
        assert [future.result(30).text for future in futures] == ["x"] * 4
        assert llm.generate("y", SamplingParams()).text == "y"
        lab.engine.hold()
        futures = [pool.submit(llm.generate, "x", MANY) for _ in range(2)]
        until(lambda: len(lab.engine.submitted) == 7)
        llm.abort()
        assert {future.result(30).outputs[0].finish_reason for future in futures} == {"abort"}
        lab.engine.go()
        assert llm.generate("x", MANY, deadline=5).text == ""


def test_paused_blocks_of_several_threads_overlap(lab: Lab) -> None:
    with LLM("m") as llm:
        first, second = llm.paused("wait"), llm.paused("abort")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert llm.state is Phase.PAUSED
        with pytest.raises(ZeroDivisionError), llm.paused():
            raise ZeroDivisionError
        assert llm.state is Phase.PAUSED
        second.__exit__(None, None, None)
        assert llm.state is Phase.READY


def test_pause_queues_what_comes(lab: Lab, pool: ThreadPoolExecutor) -> None:
    with LLM("m") as llm:
        for mode in ("keep", "wait", "abort"):
            with llm.paused(mode):  # type: ignore[arg-type]
                before = len(lab.engine.submitted)
                future = pool.submit(llm.generate, "x", SamplingParams())
                until(lambda: bool(llm._session._queue))
                assert len(lab.engine.submitted) == before and llm.state is Phase.PAUSED
            assert future.result(30).text == "x"


def test_close_from_another_thread_ends_open_requests(lab: Lab, pool: ThreadPoolExecutor) -> None:
    lab.model = endless
    llm = LLM.create("m", max_num_seqs=2, max_queued_requests=1)
    futures: list[Any] = [pool.submit(llm.generate, "x", MANY) for _ in range(5)]
    until(lambda: lab.engine.steps > 3)
    llm.close()
    llm.close()
    outs: list[RequestOutput] = [future.result(30) for future in futures]
    assert {out.outputs[0].finish_reason for out in outs} == {"abort"}
    with pytest.raises(EngineStateError, match="closed"):
        llm.generate("x")


def test_engine_that_is_dropped_ends_with_a_warning(lab: Lab) -> None:
    lab.model = endless
    before = set(threading.enumerate())
    rows = iter(LLM.create("m").as_completed([[5], [6]], SamplingParams(max_tokens=3)))
    assert len(next(rows).token_ids) == 3  # what an engine has made keeps it alive
    stream = LLM.create("m").stream("x", ENDLESS).__enter__()
    next(stream)
    with pytest.warns(ResourceWarning, match="dropped") as warned:
        del rows, stream
        gc.collect()
    assert len(warned) == 3  # two engines and a stream
    until(lambda: not set(threading.enumerate()) - before)


def test_generator_that_is_collected_leaves_its_block_in_the_middle_of_any_call(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector of garbage may run while the session holds its lock, which the end of a block takes, too."""
    lab.model = endless

    def work(block: Any, own: list[Any]) -> Iterator[None]:  # ``own`` has the generator: only the collector ends it
        with block:
            yield

    def collect(*args: Any, **settings: Any) -> Collector:
        gc.collect()
        return Collector(*args, **settings)

    with LLM("m") as llm:
        for block, ended in (
            (llm.stream("x", ENDLESS, request_id="lost"), lambda: not lab.engine.sequences),
            (llm.paused(), lambda: not lab.engine.paused),
            (llm.update_weights(1), lambda: llm.state is Phase.READY),
        ):
            own: list[Any] = []
            own.append(work(block, own))
            next(own[0])
            until(lambda: not ended())  # noqa: B023
            with monkeypatch.context() as patch:
                patch.setattr(session, "Collector", collect)
                del own
                with llm.stream("y", ENDLESS):
                    pass
            until(ended)


def test_failed_start_leaves_no_thread(lab: Lab) -> None:
    def fail(engine: FakeEngine) -> None:
        engine.fail_start = CheckpointError("incomplete")

    lab.prepare = fail
    before = threading.active_count()
    with pytest.raises(CheckpointError), LLM("m"):
        pytest.fail("entered")
    assert threading.active_count() == before and lab.engine.closes == 1


@pytest.mark.parametrize("state", ["new", "closed"])
def test_engine_that_does_not_run_refuses_calls(lab: Lab, state: str) -> None:
    llm = LLM("m")
    if state == "closed":
        with llm:
            pass
    serving = ("ready", "paused", "updating")
    for name, call in {**SERVING_ONLY, **WHILE_STARTED}.items():
        with pytest.raises(EngineStateError) as error:
            call(llm)
        more = () if name in SERVING_ONLY and name not in WITH_WEIGHTS else ("asleep", "weights_invalid")
        assert (error.value.state, error.value.allowed) == (state, (*serving, *more)), name
    for call in (llm.sleep, llm.wake_up, lambda: llm.update_weights(1)):
        with pytest.raises(EngineStateError) as error:
            call()
        assert (error.value.state, error.value.allowed) == (state, ("ready", "paused", "asleep", "weights_invalid"))
    llm.abort()
    llm.close()
    llm.close()
    with pytest.raises(EngineStateError), llm:
        pytest.fail("entered")


def test_llm_has_the_calls_of_async_llm() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    assert public(AsyncLLM) - {"aclose"} == public(LLM) - {"close"}
    for name in public(LLM) - {"close", "create"}:
        mine, other = getattr(LLM, name), getattr(AsyncLLM, name)
        assert mine.__doc__ == other.__doc__
        if callable(mine):
            found, expected = inspect.signature(mine), inspect.signature(other)
            assert found.parameters == expected.parameters and mine.__qualname__.split(".")[0] in ("LLM", "BaseLLM")
            assert not inspect.iscoroutinefunction(mine) and "Async" not in found.return_annotation
    assert "priority" in inspect.signature(LLM.generate).parameters and "deadline:" in (LLM.generate.__doc__ or "")
