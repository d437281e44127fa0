"""AsyncLLM on a scripted engine: every async test runs under asyncio and under Trio, see the end of this file."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import json
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import anyio
import anyio.abc
import anyio.from_thread
import anyio.lowlevel
import pytest
import torch

from dsv4lite.api.streams import AsyncStream
from dsv4lite.config import EngineConfig, EngineSettings, LoadProgress
from dsv4lite.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    DSV4LiteError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    WeightsNotLoadedError,
)
from dsv4lite.llm import AsyncLLM
from dsv4lite.models.family import Family
from dsv4lite.parallel.experts import DispatcherFactory
from dsv4lite.request import Delta, Phase, Request, RequestOutput, SamplingParams
from dsv4lite.text.forms import FORMS
from dsv4lite.text.tokenizer import LONG_TEXT
from dsv4lite.weights.formats import QuantFormat
from dsv4lite.weights.update import NamedTensors
from tests.fakes import ENDLESS, MANY, POISON, REFUSED, FakeEngine, Lab, endless
from tests.loops import LOOPS, both_loops


def text_model(*texts: str) -> Callable[[Request, int], Iterator[int]]:
    """Say ``texts[index]``, then end."""
    tokenizer = Lab().tokenizer

    def model(request: Request, index: int) -> Iterator[int]:
        yield from tokenizer.encode(texts[index])
        yield 1

    return model


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await anyio.sleep(0.001)


async def spawn(group: anyio.abc.TaskGroup, call: Callable[[], Awaitable[Any]], results: list[Any]) -> None:
    """Start a call whose result, or error, is appended to ``results``."""

    async def work() -> None:
        try:
            results.append(await call())
        except DSV4LiteError as error:
            results.append(error)

    group.start_soon(work)


# ---- generate ----


async def test_generate_returns_text_usage_and_timing(lab: Lab) -> None:
    async with AsyncLLM("m") as llm:
        out = await llm.generate("Hello wörld 😀", SamplingParams())
    ids = tuple(lab.tokenizer.encode("Hello wörld 😀"))
    assert out.text == "Hello wörld 😀"
    assert out.prompt_token_ids == ids
    assert out.token_ids == (*ids, 1)
    assert out.outputs[0].finish_reason == "stop" and out.outputs[0].stop_reason is None
    assert out.outputs[0].weight_versions == ((0, 0, len(ids) + 1),)
    assert (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.cached_tokens) == (len(ids), len(ids) + 1, 4)
    assert 0 < out.timing.queued <= out.timing.first_token <= out.timing.total
    assert out.to_openai()["choices"][0]["text"] == "Hello wörld 😀"


async def test_generate_takes_text_ids_and_mappings(lab: Lab) -> None:
    ids = lab.tokenizer.encode("abc def")
    async with AsyncLLM("m") as llm:
        prompts = ("abc def", ids, tuple(ids), torch.tensor(ids), {"prompt_token_ids": ids})
        texts = [(await llm.generate(prompt, SamplingParams())).text for prompt in prompts]
    assert texts == ["abc def"] * 5


async def test_generate_without_params_uses_the_generation_config(lab: Lab) -> None:
    async with AsyncLLM("m") as llm:
        out = await llm.generate("a prompt of more than seven tokens, by far")
        assert lab.engine.submitted[0].params == SamplingParams(temperature=0.5, max_tokens=7)
        await llm.generate("a", SamplingParams())
        assert lab.engine.submitted[1].params == SamplingParams()
    assert out.outputs[0].finish_reason == "length"


async def test_generate_gives_the_engine_what_it_needs(lab: Lab) -> None:
    async with AsyncLLM("m") as llm:
        await llm.generate("a", SamplingParams(), request_id="mine", priority=3, cache_salt="s", deadline=100)
    request = lab.engine.submitted[0]
    assert (request.request_id, request.priority, request.cache_salt) == ("mine", 3, "s")
    assert request.deadline == pytest.approx(request.arrival + 100)
    assert (request.eos_token_id, request.think_ids, request.score_from, request.generate) == (1, (5, 6), None, True)


async def test_generate_returns_all_completions(lab: Lab) -> None:
    lab.model = text_model("one", "two is longer", "3")
    async with AsyncLLM("m") as llm:
        out = await llm.generate("x", SamplingParams(n=3))
    assert [c.text for c in out.outputs] == ["one", "two is longer", "3"]
    assert [c.index for c in out.outputs] == [0, 1, 2]
    assert out.usage.completion_tokens == sum(len(c.token_ids) for c in out.outputs)


async def test_generate_returns_logprobs_of_prompt_and_completion(lab: Lab) -> None:
    ids = lab.tokenizer.encode("some words to score here")
    async with AsyncLLM("m") as llm:
        out = await llm.generate(ids, SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=3, logprobs_mode="processed"))
    logprobs, prompt = out.outputs[0].logprobs, out.prompt_logprobs
    assert logprobs is not None and prompt is not None
    assert logprobs.sampled.tolist() == [-1, -2, -3] and logprobs.ranks.tolist() == [1, 2, 3]
    assert logprobs.token_ids.tolist() == [[t, t] for t in ids[:3]] and logprobs.mode == "processed"
    assert out.outputs[0].cumulative_logprob == -6
    assert prompt.sampled.tolist() == [-t for t in ids[1:]] and prompt.token_ids.shape == (len(ids) - 1, 1)


async def test_generate_refuses_what_is_no_prompt(lab: Lab) -> None:
    cycle: dict[str, Any] = {}
    cycle["prompt_token_ids"] = cycle
    several = "not list with 'a' in it; generate_batch takes several prompts"
    wrong: tuple[tuple[Any, str], ...] = (
        *((empty, "the prompt is empty") for empty in ("", [])),
        *((other, "must be a str, token ids") for other in (7, None, [1.5], {1, 2}, iter([1]), torch.tensor(1))),
        *((b"bytes", "decode it to a str"), (memoryview(b"bytes"), "decode it to a str"), (["a", "b"], several)),
        *((torch.tensor([True]), "token id True is outside"), (torch.tensor([[1], [2]]), "generate_batch takes several prompts")),
        *(([True], "token id True is outside"), ({"prompt_token_ids": torch.tensor(1)}, "not Tensor")),
        *(([4096], r"4096 is outside the vocabulary \[0, 4096\)"), ([-1], "-1 is outside the vocabulary")),
        *(({"prompt_ids": [1]}, "prompt_token_ids"), ({"prompt_token_ids": None}, "prompt"), (cycle, "not dict")),
    )
    async with AsyncLLM("m") as llm:
        for prompt, message in wrong:
            with pytest.raises(InvalidRequestError, match=message) as error:
                await llm.generate(prompt, SamplingParams())
            assert error.value.parameter == "prompt", prompt
        assert lab.engine.submitted == []


async def test_generate_refuses_wrong_parameters(lab: Lab) -> None:
    async with AsyncLLM("m") as llm:
        for wrong in (
            {"params": {"max_tokens": 3}},
            {"request_id": ""},
            {"request_id": 5},
            {"deadline": "soon"},
            {"deadline": math.nan},
            {"deadline": math.inf},
            {"deadline": 0},
            {"deadline": -0.5},
            {"deadline": 10**5000},
            {"priority": 1.5},
            {"priority": True},
            {"wait": "no"},
            {"cache_salt": 5},
        ):
            with pytest.raises(InvalidRequestError) as error:
                await llm.generate("a", **wrong)  # type: ignore[arg-type]
            assert error.value.parameter in wrong
        with pytest.raises(ContextLengthError):
            await llm.generate("a", SamplingParams(max_tokens=200_000))
        with pytest.raises(InvalidRequestError, match="mean 'prompt_token_ids'"):
            await llm.generate({"prompt_tokens_ids": [1]})  # type: ignore[dict-item]


async def test_request_id_must_be_unique_among_open_requests(lab: Lab) -> None:
    async with AsyncLLM("m") as llm, anyio.create_task_group() as group:
        lab.engine.hold()
        results: list[RequestOutput] = []
        await spawn(group, lambda: llm.generate("one", SamplingParams(), request_id="x"), results)
        await until(lambda: len(lab.engine.submitted) == 1)
        with pytest.raises(InvalidRequestError, match="open request"):
            await llm.generate("two", SamplingParams(), request_id="x")
        lab.engine.go()
        await until(lambda: len(results) == 1)
        assert (await llm.generate("two", SamplingParams(), request_id="x")).text == "two"
    assert results[0].text == "one"


async def test_request_id_is_free_while_the_engine_still_ends_the_last_one(lab: Lab) -> None:
    lab.held = True
    async with AsyncLLM("m") as llm:
        async with llm.stream("abc", SamplingParams(), request_id="x") as stream:
            assert stream.request_id == "x"
        lab.engine.go()
        out = await llm.generate("again", SamplingParams(), request_id="x")
    assert (out.request_id, out.text) == ("x", "again")
    assert len({request.request_id for request in lab.engine.submitted}) == 2


# ---- stop strings ----


async def test_stop_string_ends_text_and_tokens_and_tells_the_engine(lab: Lab) -> None:
    lab.model = text_model("The answer is 42. END of it", "no such thing")  # one for each completion
    async with AsyncLLM("m") as llm:
        out = await llm.generate("x", SamplingParams(n=2, stop=("END", "zzz"), logprobs=0))
        await until(lambda: not lab.engine.sequences)
    first, second = out.outputs
    assert (first.text, first.finish_reason, first.stop_reason) == ("The answer is 42. ", "stop", "END")
    full = lab.tokenizer.encode("The answer is 42. END of it")
    kept = len(first.token_ids)
    assert first.token_ids == tuple(full[:kept])
    assert "END" in lab.tokenizer.decode(full[:kept]) and "END" not in lab.tokenizer.decode(full[: kept - 1])
    assert first.logprobs is not None and len(first.logprobs) == kept
    assert (second.text, second.stop_reason) == ("no such thing", None)
    assert lab.engine.aborted == [(lab.engine.submitted[0].request_id, 0)]


async def test_stop_string_can_stay_in_the_text(lab: Lab) -> None:
    lab.model = text_model("one two three four")
    async with AsyncLLM("m") as llm:
        params = SamplingParams(stop="three", include_stop_str_in_output=True)  # type: ignore[arg-type]
        async with llm.stream("x", params) as stream:
            text = "".join([delta.text async for delta in stream])
            out = await stream.final()
    assert text == out.text == "one two three"


async def test_stop_string_that_begins_but_does_not_match_is_text(lab: Lab) -> None:
    lab.model = text_model("ends with EN")
    async with AsyncLLM("m") as llm:
        out = await llm.generate("x", SamplingParams(stop=("END",)))
    assert (out.text, out.outputs[0].stop_reason) == ("ends with EN", None)


async def test_stop_token_is_reported(lab: Lab) -> None:
    ids = lab.tokenizer.encode("alpha beta gamma")
    async with AsyncLLM("m") as llm:
        out = await llm.generate(ids, SamplingParams(stop_token_ids=(ids[2],)))
    assert (out.token_ids, out.outputs[0].stop_reason) == (tuple(ids[:3]), ids[2])


async def test_stop_token_stays_in_the_text_and_a_stop_string_ends_before_min_tokens(lab: Lab) -> None:
    """Both differ from vLLM, as the guide says."""
    ids = lab.tokenizer.encode("alpha beta gamma")
    async with AsyncLLM("m") as llm:
        by_token = await llm.generate(ids, SamplingParams(stop_token_ids=(ids[2],)))
        by_string = await llm.generate(ids, SamplingParams(stop=("lph",), min_tokens=len(ids)))
    assert by_token.text == lab.tokenizer.decode(ids[:3])
    assert (by_string.text, by_string.outputs[0].finish_reason) == ("a", "stop")


# ---- streams ----


async def test_stream_deltas_join_to_the_final_output(lab: Lab) -> None:
    prompt = "Grüße, 世界! 👩‍👩‍👧 …and more"
    async with AsyncLLM("m") as llm, llm.stream(prompt, SamplingParams(n=2, logprobs=1)) as stream:
        deltas = [delta async for delta in stream]
        out = await stream.final()
        assert out == await stream.final()
    for completion in out.outputs:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in mine) == completion.text == prompt
        assert tuple(t for delta in mine for t in delta.token_ids) == completion.token_ids
        assert [delta.finish_reason for delta in mine[-2:]] == [None, "stop"]
        values = [v for delta in mine if delta.logprobs is not None for v in delta.logprobs.sampled.tolist()]
        assert completion.logprobs is not None and values == completion.logprobs.sampled.tolist()
        assert all("�" not in delta.text for delta in mine)


async def test_stream_leaving_the_block_ends_the_request(lab: Lab) -> None:
    lab.model = endless
    async with AsyncLLM("m") as llm:
        async with llm.stream("x", MANY) as stream:
            first = await anext(stream)
        out = await stream.final()
        assert out.outputs[0].finish_reason == "abort" and out.token_ids[:1] == first.token_ids
        await until(lambda: not lab.engine.sequences)


async def test_stream_read_that_is_cancelled_loses_nothing(lab: Lab) -> None:
    lab.held = True
    got: list[int] = []
    async with AsyncLLM("m") as llm, llm.stream("some words, to be read slowly", SamplingParams()) as stream:
        cancelled = 0
        ended = False
        while not ended:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def disturb(scope: anyio.CancelScope = scope, steps: bool = cancelled > 0) -> None:
                        if steps:  # the first read finds nothing, so that one is cancelled in any case
                            lab.engine.step()
                        for _ in range(random.randrange(4)):
                            await anyio.lowlevel.checkpoint()
                        scope.cancel()

                    group.start_soon(disturb)
                    delta = await anext(stream, None)
                    got += delta.token_ids if delta else ()
                    ended = delta is None
                    group.cancel_scope.cancel()
            cancelled += scope.cancelled_caught
        out = await stream.final()
    assert tuple(got) == out.token_ids
    assert cancelled > 0


async def test_stream_cancelled_by_asyncio_or_trio_itself_loses_nothing(lab: Lab) -> None:
    """``asyncio.wait_for`` cancels tasks without any scope."""
    lab.held = True
    async with AsyncLLM("m") as llm, llm.stream("a b c d e f", SamplingParams()) as stream:
        got: list[int] = []
        for _ in range(5):
            if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.001)
            else:
                with anyio.move_on_after(0.001):
                    await anext(stream)
            lab.engine.step()
            got += (await anext(stream)).token_ids
        lab.engine.go()
        async for delta in stream:
            got += delta.token_ids
        assert tuple(got) == (await stream.final()).token_ids


async def test_stream_abort_is_a_last_delta(lab: Lab) -> None:
    lab.model = endless
    async with AsyncLLM("m") as llm, llm.stream("x", MANY) as stream:
        await anext(stream)
        stream.abort()
        stream.abort()
        rest = [delta async for delta in stream]
        assert rest[-1].finish_reason == "abort"
        assert (await stream.final()).outputs[0].finish_reason == "abort"


async def test_stream_waits_for_a_slow_reader(lab: Lab) -> None:
    async with AsyncLLM("m") as llm, llm.stream("all of this, please", SamplingParams()) as stream:
        out = await stream.final()
        assert lab.engine.sequences == {}
        assert "".join([delta.text async for delta in stream]) == out.text == "all of this, please"
        assert [delta async for delta in stream] == []


async def test_stream_must_be_entered_once(lab: Lab) -> None:
    async with AsyncLLM("m") as llm:
        stream = llm.stream("x", SamplingParams())
        with pytest.raises(RuntimeError, match="async with"):
            await anext(stream)
        async with stream:
            with pytest.raises(RuntimeError, match="only once"):
                await stream.__aenter__()
        with pytest.raises(InvalidRequestError):
            async with llm.stream("", SamplingParams()):
                pytest.fail("entered")


async def test_stream_that_two_tasks_enter_is_submitted_once(lab: Lab) -> None:
    """The second one entered while the first waited for its prompt to be encoded, and the first request was never ended."""
    entered: list[str] = []

    async def enter(stream: Any) -> None:
        try:
            async with stream:
                entered.append("entered")
        except RuntimeError as error:
            entered.append(str(error))

    async with AsyncLLM("m") as llm:
        stream = llm.stream("x" * (LONG_TEXT + 1), SamplingParams())
        async with anyio.create_task_group() as group:
            group.start_soon(enter, stream)
            group.start_soon(enter, stream)
    assert sorted(entered) == ["a stream can be entered only once", "entered"] and len(lab.engine.submitted) <= 1


async def test_stream_of_a_failed_request_yields_its_deltas_first(lab: Lab) -> None:
    async with AsyncLLM("m") as llm, llm.stream([200, 201, 202, POISON], SamplingParams()) as stream:
        got: list[Delta] = []
        with pytest.raises(RequestFailedError) as error:
            async for delta in stream:
                got.append(delta)
        assert [t for delta in got for t in delta.token_ids] == [200, 201]
        assert got[-1].finish_reason == "error"
        assert error.value.output is not None and error.value.output.token_ids == (200, 201)
        with pytest.raises(RequestFailedError):
            await stream.final()


# ---- abort, cancellation, deadlines ----


async def test_abort_gives_the_waiting_caller_the_partial_output(lab: Lab) -> None:
    lab.model, lab.held = endless, True
    async with AsyncLLM("m") as llm, anyio.create_task_group() as group:
        results: list[RequestOutput] = []
        await spawn(group, lambda: llm.generate("x", MANY, request_id="a"), results)
        await spawn(group, lambda: llm.generate("x", MANY, request_id="b"), results)
        await until(lambda: len(lab.engine.submitted) == 2)
        lab.engine.step(3)
        await until(lambda: lab.engine.steps == 3)
        llm.abort("unknown")
        for wrong in (5, []):
            with pytest.raises(InvalidRequestError, match="request_id"):
                llm.abort(wrong)  # type: ignore[arg-type]
        llm.abort("a")
        llm.abort("a")
        await until(lambda: len(results) == 1)
        assert (results[0].request_id, results[0].outputs[0].finish_reason, len(results[0].token_ids)) == ("a", "abort", 3)
        await anyio.to_thread.run_sync(llm.abort)
        await until(lambda: len(results) == 2)
        assert results[1].outputs[0].finish_reason == "abort"
        await until(lambda: not lab.engine.sequences)


async def test_cancelling_generate_ends_the_request_and_passes_unaltered(lab: Lab) -> None:
    lab.model = endless
    cancelled, seen = anyio.get_cancelled_exc_class(), list[BaseException]()
    async with AsyncLLM("m") as llm:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def cancel() -> None:
                    await until(lambda: lab.engine.steps > 5)
                    scope.cancel()

                group.start_soon(cancel)
                try:
                    await llm.generate("x", MANY)
                except BaseException as error:
                    seen.append(error)
                    raise
        assert scope.cancelled_caught and isinstance(seen[0], cancelled)
        await until(lambda: not lab.engine.sequences)
        assert (await llm.generate("fine", SamplingParams(max_tokens=1))).usage.completion_tokens == 1


async def test_random_cancellation_leaves_nothing_behind(lab: Lab) -> None:
    chance = random.Random(5)
    outcomes: list[str] = []

    async def client(llm: AsyncLLM, number: int) -> None:
        prompt = [100 + number, *range(200, 200 + chance.randrange(1, 30))]
        with anyio.move_on_after(chance.choice([0, 0.001, 0.01, 0.03, 1])) as scope:
            match number % 3:
                case 0:
                    out = await llm.generate(prompt, SamplingParams())
                    assert out.token_ids == (*prompt, 1)
                case 1:
                    async with llm.stream(prompt, SamplingParams(n=2)) as stream:
                        got = [t async for delta in stream if delta.index == 0 for t in delta.token_ids]
                        assert got == [*prompt, 1]
                case 2:
                    outs = await llm.generate_batch([prompt] * 5, SamplingParams(), max_in_flight=2)
                    assert [out.token_ids for out in outs] == [(*prompt, 1)] * 5
        outcomes.append("cancelled" if scope.cancelled_caught else "done")

    async with AsyncLLM("m", max_num_seqs=8, max_queued_requests=8) as llm:
        async with anyio.create_task_group() as group:
            for number in range(150):
                group.start_soon(client, llm, number)
        await until(lambda: not lab.engine.sequences)
        assert llm._session._in_engine == llm._session._visible == llm._session._queue == {}
    assert len(outcomes) == 150 and set(outcomes) == {"cancelled", "done"}


async def test_deadline_ends_a_running_request_with_what_it_has(lab: Lab) -> None:
    lab.model = endless
    async with AsyncLLM("m") as llm:
        out = await llm.generate("x", MANY, deadline=0.05)
        assert out.outputs[0].finish_reason == "deadline" and len(out.token_ids) > 0
        assert (await llm.generate("x", MANY, deadline=1e-9)).outputs[0].finish_reason == "deadline"


async def test_deadline_ends_a_request_that_waits_in_line(lab: Lab) -> None:
    lab.held = True
    async with AsyncLLM("m", max_num_seqs=1, max_queued_requests=1) as llm, anyio.create_task_group() as group:
        results: list[RequestOutput] = []
        for name in ("a", "b"):
            await spawn(group, lambda name=name: llm.generate("x", SamplingParams(), request_id=name), results)
        await until(lambda: len(lab.engine.submitted) == 2)
        async with anyio.create_task_group() as inner:
            waiting: list[RequestOutput] = []
            for deadline in (0.03, 0.01, 0.02):
                await spawn(inner, lambda d=deadline: llm.generate("x", SamplingParams(), deadline=d), waiting)
        assert [out.outputs[0].finish_reason for out in waiting] == ["deadline"] * 3
        assert len(lab.engine.submitted) == 2 and results == []
        lab.engine.go()
    assert [out.text for out in results] == ["x", "x"]


@pytest.mark.parametrize("prompt", ["x", [{"role": "user", "content": "x"}]], ids=["stream", "chat_stream"])
async def test_deadline_and_timing_of_a_stream_begin_where_its_block_is_entered(lab: Lab, prompt: Any) -> None:
    """They began with the call that made the stream."""
    async with AsyncLLM("m") as llm:
        stream = (llm.stream if prompt == "x" else llm.chat_stream)(prompt, SamplingParams(), deadline=60.0)
        made = time.monotonic()
        async with stream:
            await stream.final()
    (request,) = lab.engine.submitted
    assert made <= request.arrival and request.deadline == request.arrival + 60.0


# ---- the queue ----


def test_deadlines_in_line_leave_no_timers(lab: Lab) -> None:
    """Each check of the deadlines once left a task that waited for the last one of them."""

    async def overload() -> None:
        async with AsyncLLM("m") as llm, llm.paused():
            patient = asyncio.create_task(llm.generate("x", SamplingParams(), deadline=3600))
            for seconds in (0.003, 0.002, 0.004, 0.001) * 5:
                assert (await llm.generate("x", SamplingParams(), deadline=seconds)).outputs[0].finish_reason == "deadline"
            assert len(asyncio.all_tasks()) <= 3  # with this one, and the one timer
            llm.abort()
            await patient

    asyncio.run(overload())


async def test_full_queue_refuses_or_waits_in_order(lab: Lab) -> None:
    lab.held = True
    async with AsyncLLM("m", max_num_seqs=1, max_queued_requests=2) as llm, anyio.create_task_group() as group:
        results: list[RequestOutput] = []
        for name in "abcdefg":
            await spawn(group, lambda name=name: llm.generate(name, SamplingParams(), request_id=name), results)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(QueueFullError) as error:
            await llm.generate("h", SamplingParams(), wait=False)
        # The mean duration, 1 s until requests have ended, of four in line and this one, by three in the engine.
        assert error.value.limit == 2 and error.value.retry_after == pytest.approx(5 / 3)
        with pytest.raises(QueueFullError):
            async with llm.stream("h", SamplingParams(), wait=False):
                pytest.fail("entered")
        llm.abort("e")
        await until(lambda: len(results) == 1)
        lab.engine.go()
        await until(lambda: len(results) == 7)
        assert [r.request_id for r in lab.engine.submitted] == list("abcdfg")
        assert lab.engine.max_open == 3
        assert (await llm.generate("h", SamplingParams(), wait=False)).text == "h"
    assert {out.request_id: out.text for out in results} == {name: name for name in "abcdfg"} | {"e": ""}


async def test_full_queue_estimates_when_a_place_gets_free(lab: Lab) -> None:
    """The mean duration of recent requests, by those in the engine, for each request in line and this one."""
    lab.held = True
    async with AsyncLLM("m", max_num_seqs=1, max_queued_requests=2) as llm, anyio.create_task_group() as group:
        mean = 1.0  # until there are requests to go by

        async def expect(waiting: int, in_engine: int) -> None:
            with pytest.raises(QueueFullError) as error:
                await llm.generate("h", SamplingParams(), wait=False)
            assert f"in about {mean * (waiting + 1) / in_engine:.2g} s" in str(error.value)
            assert error.value.retry_after == pytest.approx(mean * (waiting + 1) / in_engine, rel=1e-9)

        results: list[RequestOutput] = []
        for count in range(1, 8):
            await spawn(group, lambda: llm.generate("a", SamplingParams(max_tokens=1)), results)
            await anyio.wait_all_tasks_blocked()
            if count >= 3:
                await expect(count - 3, 3)
        lab.engine.step()
        await until(lambda: len(results) == 1 and len(lab.engine.submitted) == 4)
        mean += 0.1 * (results[0].timing.total - mean)
        await expect(3, 3)
        lab.engine.go()


async def test_abort_of_many_holds_up_neither_its_caller_nor_the_loop(lab: Lab) -> None:
    """All were once ended within the call, with the lock held: 100,000 took 21 seconds."""
    lab.held = True
    for end in ("abort", "die", "aclose"):
        results: list[Any] = []
        llm = await AsyncLLM.create("m", max_num_seqs=1, max_queued_requests=1)
        async with anyio.create_task_group() as group:
            for _ in range(500):
                await spawn(group, lambda llm=llm: llm.generate("x", SamplingParams()), results)  # type: ignore[misc]
            await anyio.wait_all_tasks_blocked()
            if end == "abort":
                llm.abort()
                assert len(llm._session._visible) > 400
            elif end == "die":
                lab.engine.die(MemoryError("no more"))
            else:
                group.start_soon(llm.aclose)
            most = 0
            while len(results) < 500:
                before = len(results)
                await anyio.lowlevel.checkpoint()
                most = max(most, len(results) - before)
            # A loop that is closed hears from a thread, at the thread's pace.
            assert most <= 200 or end == "aclose"
        if end == "die":
            assert {type(error) for error in results} == {EngineDeadError} and len(set(map(id, results))) == 500
        else:
            assert {out.outputs[0].finish_reason for out in results} == {"abort"}
        await llm.aclose()


async def test_cancelling_a_request_in_line_gives_up_its_place(lab: Lab) -> None:
    lab.held = True
    async with AsyncLLM("m", max_num_seqs=1, max_queued_requests=1) as llm, anyio.create_task_group() as group:
        results: list[RequestOutput] = []
        for name in "ab":
            await spawn(group, lambda name=name: llm.generate(name, SamplingParams(), request_id=name), results)
        await until(lambda: len(lab.engine.submitted) == 2)
        with anyio.move_on_after(0.01):
            await llm.generate("c", SamplingParams())
        lab.engine.go()
    assert {request.request_id for request in lab.engine.submitted} == {"a", "b"}


async def test_five_hundred_requests_at_once(lab: Lab) -> None:
    async with AsyncLLM("m", max_num_seqs=64, max_queued_requests=64) as llm, anyio.create_task_group() as group:
        results: list[RequestOutput] = []
        for number in range(500):
            await spawn(group, lambda n=number: llm.generate([100 + n, 7, 8], SamplingParams(), request_id=str(n)), results)
        await until(lambda: len(results) == 500)
    assert {out.request_id: out.token_ids[0] for out in results} == {str(n): 100 + n for n in range(500)}
    assert lab.engine.max_open <= 128


# ---- batches ----


async def test_batch_keeps_the_order_and_takes_params_for_each_prompt(lab: Lab) -> None:
    prompts = [[5], [6], [7]]
    each = [SamplingParams(max_tokens=n) for n in (2, 1, 2)]
    many = [[100 + n] * (1 + n % 7) for n in range(40)]
    async with AsyncLLM("m", max_num_seqs=4) as llm:
        outs = await llm.generate_batch(many, SamplingParams())
        assert [(out.index, list(out.prompt_token_ids)) for out in outs] == list(enumerate(many))
        assert await llm.generate_batch([], SamplingParams()) == []
        outs = await llm.generate_batch(prompts, each)
        assert [out.usage.completion_tokens for out in outs] == [2, 1, 2]
        outs = await llm.generate_batch(iter(prompts[:2]), each)
        assert [out.usage.completion_tokens for out in outs] == [2, 1]
        with pytest.raises(InvalidRequestError, match="2 entries for 3 prompts"):
            await llm.generate_batch(prompts, each[:2])
        with pytest.raises(InvalidRequestError, match="there are more prompts"):
            await llm.generate_batch(iter(prompts), each[:2])


async def test_batch_raises_the_first_error_and_aborts_the_rest(lab: Lab) -> None:
    lab.model = endless
    async with AsyncLLM("m") as llm:
        with pytest.raises(RequestFailedError):
            await llm.generate_batch([[5], [6], [POISON], [7]], SamplingParams())
        with pytest.raises(InvalidRequestError, match="empty"):
            await llm.generate_batch([[5], [], [7]], SamplingParams())
        with pytest.raises(InvalidRequestError, match="refused"):
            await llm.generate_batch([[5], [REFUSED], [7]], SamplingParams())
        await until(lambda: not lab.engine.sequences)


async def test_batch_returns_errors_in_their_place(lab: Lab) -> None:
    prompts: list[Any] = ["ok", "", [POISON, 5, 6], [REFUSED], {"wrong": 1}, "fine"]
    async with AsyncLLM("m") as llm:
        outs = await llm.generate_batch(prompts, SamplingParams(n=2), on_error="return")
    assert [type(out.error).__name__ for out in outs] == [
        "NoneType", "InvalidRequestError", "RequestFailedError", "InvalidRequestError", "InvalidRequestError", "NoneType",
    ]  # fmt: skip
    assert (outs[0].text, outs[5].text) == ("ok", "fine")
    assert outs[2].token_ids == (POISON, 5)


async def test_as_completed_pulls_lazily(lab: Lab) -> None:
    pulled = taken = most = 0

    def rows() -> Iterator[list[int]]:
        nonlocal pulled, most
        for n in range(60):
            pulled += 1
            most = max(most, pulled - taken)
            yield [100 + n]

    async with AsyncLLM("m") as llm:
        indices = []
        async for out in llm.as_completed(rows(), SamplingParams(), max_in_flight=5):
            assert out.prompt_token_ids == (100 + out.index,)
            indices.append(out.index)
            if taken % 7 == 0:
                await anyio.sleep(0.005)  # a slow consumer
            taken += 1
    assert sorted(indices) == list(range(60))
    assert most <= 6  # five in flight, and the one that the consumer has just been given


async def test_as_completed_takes_async_sources_that_need_its_outputs(lab: Lab) -> None:
    """A source that waits for an earlier output must not keep that output from being handed out."""
    send, receive = anyio.create_memory_object_stream[int](10)
    closed = []

    async def rows() -> AsyncIterator[list[int]]:
        try:
            yield [100]
            for n in range(1, 10):
                assert await receive.receive() == 100 + n - 1
                yield [100 + n]
        finally:
            await anyio.lowlevel.checkpoint()
            closed.append(True)

    async with AsyncLLM("m") as llm:
        async for out in llm.as_completed(rows(), SamplingParams(), max_in_flight=3):
            await send.send(out.prompt_token_ids[0])
            last = out.index
    assert last == 9 and closed == [True]
    send.close(), receive.close()


async def test_as_completed_left_early_aborts_and_closes_its_source(lab: Lab) -> None:
    lab.model = endless
    pulled = closed = 0

    async def rows() -> AsyncIterator[list[int]]:
        nonlocal pulled, closed
        try:
            while True:
                pulled += 1
                yield [100]
        finally:
            closed += 1

    async with AsyncLLM("m") as llm:
        batch = llm.as_completed(rows(), SamplingParams(max_tokens=3), max_in_flight=4)
        async with batch:
            async for _ in batch:
                break
        await until(lambda: closed == 1 and not lab.engine.sequences)
        before = pulled
        assert before <= 5
        assert [out async for out in batch] == []

        async for _ in llm.as_completed(rows(), MANY.replace(max_tokens=1), max_in_flight=2):
            break
        gc.collect()  # a dropped iterator does the same
        await until(lambda: closed == 2 and not lab.engine.sequences)


async def test_as_completed_raises_what_its_source_raises(lab: Lab) -> None:
    def rows() -> Iterator[list[int]]:
        yield [100]
        yield [101]
        raise ZeroDivisionError

    async def async_rows() -> AsyncIterator[list[int]]:
        for row in rows():
            yield row

    async with AsyncLLM("m") as llm:
        for source in (rows, async_rows):
            got = []
            with pytest.raises(ZeroDivisionError):
                async for out in llm.as_completed(source(), SamplingParams(), on_error="return"):
                    got.append(out.index)
            assert sorted(got) == [0, 1]
            with pytest.raises(ZeroDivisionError):
                await llm.generate_batch(source(), SamplingParams())
        await until(lambda: not lab.engine.sequences)


async def test_as_completed_does_not_take_an_error_of_its_source_for_the_end(lab: Lab) -> None:
    def rows() -> Iterator[str]:
        yield "a"
        raise StopAsyncIteration  # as of a source that runs an asynchronous one

    async with AsyncLLM("m") as llm:
        with pytest.raises(RuntimeError, match="source raised StopAsyncIteration"):
            await llm.generate_batch(rows(), SamplingParams())


@pytest.mark.parametrize("dies", [False, True])
async def test_as_completed_that_waits_for_its_source_ends_with_the_engine(dies: bool, lab: Lab) -> None:
    async def rows() -> AsyncIterator[str]:
        yield "a"
        await anyio.sleep_forever()

    async with AsyncLLM("m") as llm, anyio.create_task_group() as group:
        outputs = llm.as_completed(rows(), SamplingParams(), on_error="return")
        assert (await anext(outputs)).text == "a"
        results: list[Any] = []
        await spawn(group, outputs.__anext__, results)
        await anyio.wait_all_tasks_blocked()
        if dies:
            lab.engine.die(EngineDeadError("it broke", phase="step"))
        else:
            await llm.aclose()
        with anyio.fail_after(10):
            await until(lambda: bool(results))
        assert isinstance(results[0], EngineDeadError if dies else EngineStateError)


async def test_as_completed_ends_with_a_source_that_was_cancelled(lab: Lab) -> None:
    """What the source waits for may be cancelled; the reader of the outputs once waited for ever."""

    async def rows() -> AsyncIterator[str]:
        yield "a"
        raise asyncio.CancelledError

    async with AsyncLLM("m") as llm:
        outputs = llm.as_completed(rows(), SamplingParams(), on_error="return")
        assert (await anext(outputs)).text == "a"
        with anyio.move_on_after(10) as scope, pytest.raises(asyncio.CancelledError):
            await anext(outputs)
        assert not scope.cancel_called


async def test_as_completed_refuses_wrong_arguments(lab: Lab) -> None:
    async with AsyncLLM("m") as llm:
        for prompts in ("one prompt", {"prompt_token_ids": [1]}, 5, None):
            with pytest.raises(InvalidRequestError, match="iterable of prompts"):
                llm.as_completed(prompts)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="on_error"):
            llm.as_completed([], on_error="ignore")  # type: ignore[arg-type]
        for limit in (0, -1, 2.5, True):
            with pytest.raises(InvalidRequestError, match="max_in_flight"):
                llm.as_completed([], max_in_flight=limit)  # type: ignore[arg-type]


async def test_as_completed_cancelled_read_loses_no_row(lab: Lab) -> None:
    """A long row is encoded in a thread; a read that is cancelled meanwhile has pulled the row, but not submitted it."""
    encode = lab.tokenizer.encode
    scope, cancelled = anyio.CancelScope(), list[bool]()

    def cancelling(text: str, *, add_bos: bool = False) -> list[int]:
        if not cancelled:
            cancelled.append(True)
            anyio.from_thread.run_sync(scope.cancel)
        return encode(text, add_bos=add_bos)

    lab.tokenizer.encode = cancelling  # type: ignore[method-assign]
    async with AsyncLLM("m") as llm:
        batch = llm.as_completed(["long " * 10_001, "short"], SamplingParams(max_tokens=1), max_in_flight=1)
        with scope:
            await anext(batch)
        assert scope.cancelled_caught and lab.engine.submitted == []
        assert [out.index async for out in batch] == [0, 1]


async def test_as_completed_with_several_readers_submits_every_row_once(lab: Lab) -> None:
    """While one reader waits until a long row is encoded, the others must not submit that row, too."""
    rows, indices = [*(["long " * 10_001] * 4), *(["short"] * 4)], list[int]()
    async with AsyncLLM("m") as llm:
        batch = llm.as_completed(rows, SamplingParams(max_tokens=1), max_in_flight=3)

        async def read() -> None:
            async for out in batch:
                indices.append(out.index)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(read)
        assert len(lab.engine.submitted) == len(rows)
    assert sorted(indices) == list(range(len(rows)))


# ---- chat and score ----

THINKING = 'Let me see.</think>It is 4.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
THINKING += '<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}


TOKENS = "Let me see.</think>It is 4.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
TOKENS += '{"a": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'


async def test_chat_separates_reasoning_answer_and_tool_calls(lab: Lab) -> None:
    """In the formats of V4, V3.1 and V3.2."""
    messages = [{"role": "user", "content": "2+2?"}]
    for form, said in (("deepseek_v4", THINKING), ("deepseek_v31", TOKENS), ("deepseek_v32", THINKING)):

        def talk(engine: FakeEngine, form: str = form) -> None:
            engine.info = replace(engine.info, chat=FORMS[form])

        lab.model, lab.prepare = text_model(said, said), talk
        async with AsyncLLM("m") as llm:
            out = await llm.chat(messages, SamplingParams(n=2), tools=[ADD], reasoning="high")
        prompt = lab.tokenizer.decode(out.prompt_token_ids, skip_special_tokens=False)
        assert prompt.startswith("<｜begin▁of▁sentence｜>") and prompt.endswith("<｜Assistant｜><think>")
        assert ("### add" if form == "deepseek_v31" else '"add"') in prompt
        for completion in out.outputs:
            assert (completion.reasoning, completion.text) == ("Let me see.", "It is 4.")
            (call,) = completion.tool_calls
            assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2})
        assert len({c.tool_calls[0].id for c in out.outputs}) == 2
        assert out.to_openai(chat=True)["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("special", [False, True])
async def test_mark_in_a_continued_answer_opens_reasoning_only_as_a_control_token(lab: Lab, special: bool) -> None:
    """As text it opened reasoning, too, and all of the answer was taken for that."""

    def talk(engine: FakeEngine) -> None:
        engine.info = replace(engine.info, chat=FORMS["deepseek_v31"])

    lab.model, lab.prepare = text_model("It is 4."), talk
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Say <think>", "wo_eos": True}]
    async with AsyncLLM("m") as llm:
        (completion,) = (await llm.chat(messages, allow_special=special)).outputs
    assert (completion.reasoning or "", completion.text) == (("It is 4.", "") if special else ("", "It is 4."))


async def test_chat_refuses_tools_that_no_parser_could_read(lab: Lab) -> None:
    """A user's message with tools raised what was no error of this package."""
    async with AsyncLLM("m") as llm:
        for tools in (3, [3], [{}]):
            with pytest.raises(InvalidRequestError, match="tools"):
                await llm.chat([{"role": "user", "content": "a", "tools": tools}])


async def test_chat_takes_deeply_nested_tools(lab: Lab) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    lab.model = text_model("Hi!")
    async with AsyncLLM("m") as llm:
        assert (await llm.chat([{"role": "user", "content": "a"}], SamplingParams(), tools=[tool])).text == "Hi!"


async def test_chat_without_reasoning_has_none(lab: Lab) -> None:
    lab.model = text_model("Hi!")
    async with AsyncLLM("m") as llm:
        out = await llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(detokenize=False))
        with pytest.raises(InvalidRequestError):
            await llm.chat([{"role": "nobody", "content": "Hello"}])
        with pytest.raises(InvalidRequestError):
            llm.chat_stream([], SamplingParams())
    assert (out.text, out.reasoning, out.tool_calls) == ("Hi!", "", ())


async def test_chat_with_no_effort_does_not_think(lab: Lab) -> None:
    """``body.get("reasoning_effort")`` of a request without one turned thinking on."""
    messages, made = [{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=1)
    for form in FORMS:
        lab.prepare = lambda engine, form=form: setattr(engine, "info", replace(engine.info, chat=FORMS[form]))
        async with AsyncLLM("m") as llm:
            wanted = (await llm.chat(messages, made, reasoning="none")).prompt_token_ids
            assert (await llm.chat(messages, made, reasoning=None)).prompt_token_ids == wanted
            async with llm.chat_stream(messages, made, reasoning=None) as stream:
                assert (await stream.final()).prompt_token_ids == wanted
            with pytest.raises(InvalidRequestError, match="reasoning=''"):
                await llm.chat(messages, made, reasoning="")  # type: ignore[arg-type]


async def test_chat_stream_deltas_join_to_the_final_output(lab: Lab) -> None:
    lab.model = text_model(THINKING)
    messages = [{"role": "user", "content": "2+2?"}]
    async with AsyncLLM("m") as llm, llm.chat_stream(messages, SamplingParams(), reasoning="max", tools=[ADD]) as stream:
        deltas = [delta async for delta in stream]
        out = await stream.final()
    assert "".join(delta.text for delta in deltas) == out.text == "It is 4."
    assert "".join(delta.reasoning for delta in deltas) == out.reasoning == "Let me see."
    assert tuple(call for delta in deltas for call in delta.tool_calls) == out.tool_calls != ()


async def test_score_returns_the_completions_logprobs(lab: Lab) -> None:
    completion = lab.tokenizer.encode(" the completion to score")
    async with AsyncLLM("m") as llm:
        for given in (" the completion to score", completion):
            logprobs = await llm.score("The prompt.", given, top_logprobs=2)
            assert logprobs.sampled.tolist() == [-t for t in completion]
            assert logprobs.token_ids.shape == (len(completion), 2)
        request = lab.engine.submitted[0]
        assert request.generate is False and request.score_from == len(lab.tokenizer.encode("The prompt."))
        for wrong, name in ((("", "a"), "prompt"), ((5, "a"), "prompt"), (([5000], "a"), "prompt"), (("a", ""), "completion")):
            with pytest.raises(InvalidRequestError, match=name) as refused:
                await llm.score(*wrong)  # type: ignore[arg-type]
            assert refused.value.parameter == name
        with pytest.raises(InvalidRequestError, match="completion token id 5000 is outside") as refused:
            await llm.score("a", [5, 5000])
        assert refused.value.parameter == "completion"
        assert len(await llm.score([5], [6] * 199_999)) == 199_999  # exactly max_model_len together
        with pytest.raises(ContextLengthError, match="have 200001 tokens, more than max_model_len=200000") as error:
            await llm.score([5], [6] * 200_000)
        assert (error.value.length, error.value.limit) == (200_001, 200_000)


async def test_score_that_is_aborted_fails(lab: Lab) -> None:
    lab.held = True
    async with AsyncLLM("m") as llm, anyio.create_task_group() as group:
        results: list[Any] = []
        await spawn(group, lambda: llm.score("a", "b c d"), results)
        await until(lambda: len(lab.engine.submitted) == 1)
        llm.abort()
        await until(lambda: len(results) == 1)
    assert isinstance(results[0], RequestFailedError) and results[0].output is not None


# ---- pause ----


async def test_pause_keep_freezes_and_resume_goes_on(lab: Lab) -> None:
    async with AsyncLLM("m") as llm, anyio.create_task_group() as group:
        lab.engine.hold()
        results: list[RequestOutput] = []
        await spawn(group, lambda: llm.generate("first", SamplingParams()), results)
        await until(lambda: len(lab.engine.submitted) == 1)
        await llm.pause()
        assert (llm.state, lab.engine.paused) == ("paused", True)
        await llm.pause()
        await spawn(group, lambda: llm.generate("second", SamplingParams()), results)
        await spawn(group, lambda: llm.generate("late", SamplingParams(), deadline=0.01), results)
        lab.engine.go()
        await until(lambda: len(results) == 1)
        assert results[0].outputs[0].finish_reason == "deadline"
        assert len(lab.engine.submitted) == 1
        await llm.resume()
        await llm.resume()
        assert llm.state is Phase.READY
    assert sorted(out.text for out in results) == ["", "first", "second"]


async def test_pause_wait_lets_open_requests_end(lab: Lab) -> None:
    async with AsyncLLM("m") as llm, anyio.create_task_group() as group:
        lab.engine.hold()
        results: list[RequestOutput] = []
        await spawn(group, lambda: llm.generate("first", SamplingParams()), results)
        await until(lambda: len(lab.engine.submitted) == 1)
        await llm.pause("keep")
        paused: list[None] = []
        await spawn(group, lambda: llm.pause("wait"), paused)
        await spawn(group, lambda: llm.generate("second", SamplingParams()), results)
        await anyio.sleep(0.01)
        assert (paused, results) == ([], [])
        lab.engine.go()
        await until(lambda: len(paused) == 1)
        assert [out.text for out in results] == ["first"] and llm.state is Phase.PAUSED
        assert len(lab.engine.submitted) == 1
        await llm.resume()
    assert [out.text for out in results] == ["first", "second"]


async def test_pause_abort_ends_everything(lab: Lab) -> None:
    lab.model = endless
    async with AsyncLLM("m", max_num_seqs=1, max_queued_requests=1) as llm, anyio.create_task_group() as group:
        results: list[RequestOutput] = []
        for _ in range(4):
            await spawn(group, lambda: llm.generate("x", MANY), results)
        await until(lambda: len(lab.engine.submitted) == 2)
        await llm.pause("abort")
        assert lab.engine.paused and not lab.engine.sequences
        await until(lambda: len(results) == 4)
        assert {out.outputs[0].finish_reason for out in results} == {"abort"}


async def test_paused_block_resumes_however_it_is_left(lab: Lab) -> None:
    async with AsyncLLM("m") as llm:
        with pytest.raises(ZeroDivisionError):
            async with llm.paused("wait"):
                assert llm.state is Phase.PAUSED
                async with llm.paused("abort"):
                    pass
                assert llm.state is Phase.PAUSED
                raise ZeroDivisionError
        assert llm.state is Phase.READY
        with anyio.CancelScope() as scope:
            async with llm.paused():
                scope.cancel()
                await anyio.sleep(1)
        assert llm.state is Phase.READY
        assert (await llm.generate("on", SamplingParams())).text == "on"


async def test_paused_blocks_may_overlap(lab: Lab) -> None:
    """The first task to leave its block once resumed the engine inside of the other's."""
    lab.model = endless
    async with AsyncLLM("m") as llm, llm.stream("x", MANY) as stream:
        for first in (0, 1):
            blocks = [llm.paused(), llm.paused()]
            for block in blocks:
                await block.__aenter__()
            await blocks[first].__aexit__(None, None, None)
            await llm.reset_prefix_cache()
            assert llm.state is Phase.PAUSED and lab.engine.paused
            await blocks[1 - first].__aexit__(None, None, None)
            await anext(stream)
            assert llm.state is Phase.READY
        with pytest.raises(InvalidRequestError, match="mode"):
            await llm.pause("stop")  # type: ignore[arg-type]
        # ``resume`` does not end a block, and a ``pause`` inside of one outlasts it.
        async with llm.paused():
            await llm.resume()
            assert llm.state is Phase.PAUSED
            await llm.pause()
        assert llm.state is Phase.PAUSED
        async with llm.paused():
            pass
        assert llm.state is Phase.PAUSED
        await llm.resume()
        assert llm.state is Phase.READY


async def test_paused_block_is_respected_by_pauses_that_want_requests_to_end(lab: Lab) -> None:
    lab.model = endless
    async with AsyncLLM("m") as llm, anyio.create_task_group() as group, llm.stream("x", MANY):
        done: list[None] = []
        async with llm.paused():
            steps = lab.engine.steps
            for _ in range(2):
                await spawn(group, lambda: llm.pause("wait"), done)
            with anyio.move_on_after(0.05) as scope:
                async with llm.paused("wait"):
                    pytest.fail("entered")
            assert scope.cancelled_caught and llm.state is Phase.PAUSED
            assert lab.engine.steps == steps and not done
        await until(lambda: lab.engine.steps > steps)
        assert llm.state is Phase.READY and not done
        llm.abort()
        await until(lambda: len(done) == 2)
        assert llm.state is Phase.PAUSED


@both_loops
async def test_calls_that_are_cancelled_before_they_begin_never_run(lab: Lab) -> None:
    """Callers that tried again after a timeout held up all requests."""
    begun, go, ran = threading.Event(), threading.Event(), list[int]()

    def hold(model: object, rank: int) -> None:
        begun.set()
        go.wait(30)

    async with AsyncLLM("m") as llm, anyio.create_task_group() as tasks:
        tasks.start_soon(llm.apply, hold)
        await anyio.to_thread.run_sync(begun.wait)
        with anyio.move_on_after(0.01) as scope:
            await llm.apply(lambda model, rank: ran.append(rank))
        assert scope.cancelled_caught
        go.set()
        assert await llm.apply(lambda model, rank: len(ran)) == [0]


async def test_pause_that_is_cancelled_is_undone_and_leaves_those_of_others(lab: Lab) -> None:
    lab.model = endless
    async with AsyncLLM("m") as llm, llm.stream("x", MANY):
        with anyio.move_on_after(0.01) as scope:
            await llm.pause("wait")
        assert scope.cancelled_caught and llm.state is Phase.READY
        assert (await llm.generate("on", SamplingParams(max_tokens=1))).usage.completion_tokens == 1
        async with llm.paused("keep"):
            with anyio.move_on_after(0.01) as scope:
                await llm.pause("wait")
            assert scope.cancelled_caught and llm.state is Phase.PAUSED
        assert llm.state is Phase.READY
        await llm.pause()
        with anyio.move_on_after(0.01) as scope:
            await llm.pause("wait")
        assert scope.cancelled_caught and llm.state is Phase.PAUSED
        await llm.resume()
        assert llm.state is Phase.READY


async def test_pause_overtaken_by_resume_or_close_raises(lab: Lab) -> None:
    lab.model = endless
    async with AsyncLLM("m") as llm, anyio.create_task_group() as group:
        results: list[Any] = []
        await spawn(group, lambda: llm.generate("x", MANY), results)
        await until(lambda: bool(lab.engine.sequences))
        for end in (llm.resume, llm.aclose):
            pauses: list[Any] = []
            await spawn(group, functools.partial(llm.pause, "wait"), pauses)
            await anyio.wait_all_tasks_blocked()
            await end()
            await until(lambda pauses=pauses: len(pauses) == 1)  # type: ignore[misc]
            assert isinstance(pauses[0], EngineStateError)
        with pytest.raises(EngineStateError):
            await llm.pause()
    assert results[0].outputs[0].finish_reason == "abort"


# ---- failures ----


async def test_dead_engine_fails_open_and_later_calls_with_its_cause(lab: Lab) -> None:
    lab.held = True
    async with AsyncLLM("m", max_num_seqs=1, max_queued_requests=1) as llm, anyio.create_task_group() as group:
        results: list[Any] = []
        for _ in range(3):  # the last one waits in line
            await spawn(group, lambda: llm.generate("x y z", SamplingParams()), results)
        async with llm.stream("x", SamplingParams()) as stream:
            await until(lambda: len(lab.engine.submitted) == 2)
            lab.engine.die(MemoryError("out of it"))
            await until(lambda: len(results) == 3)
            for error in results:
                assert isinstance(error, EngineDeadError) and isinstance(error.__cause__, MemoryError) and error.phase == "step"
            assert len({id(error) for error in results}) == 3
            with pytest.raises(EngineDeadError):
                await stream.final()
            with pytest.raises(EngineDeadError):
                [delta async for delta in stream]
        assert llm.state is Phase.FAILED
        for call in (llm.generate("x"), llm.generate_batch([]), llm.pause(), llm.resume(), llm.reset_prefix_cache()):
            with pytest.raises(EngineDeadError) as error:
                await call
            assert isinstance(error.value.__cause__, MemoryError)
        llm.abort()
    assert llm.state is Phase.CLOSED


async def test_batch_on_a_dying_engine_returns_what_was_open_and_raises(lab: Lab) -> None:
    lab.held = True
    got: list[RequestOutput] = []
    async with AsyncLLM("m") as llm, anyio.create_task_group() as group:

        async def consume() -> None:
            with pytest.raises(EngineDeadError):
                async for out in llm.as_completed([[5]] * 10, MANY, on_error="return", max_in_flight=3):
                    got.append(out)

        group.start_soon(consume)
        await until(lambda: len(lab.engine.submitted) == 3)
        lab.engine.die(MemoryError())
    assert [type(out.error) for out in got] == [EngineDeadError] * 3


async def test_request_failure_carries_the_partial_output(lab: Lab) -> None:
    async with AsyncLLM("m", max_num_seqs=1, max_queued_requests=1) as llm:
        with pytest.raises(RequestFailedError, match="finite") as error:
            await llm.generate([POISON, 200, 201, 202], SamplingParams(n=2))
        out = error.value.output
        assert out is not None and [c.token_ids for c in out.outputs] == [(POISON, 200)] * 2
        assert {c.finish_reason for c in out.outputs} == {"error"}
        with pytest.raises(InvalidRequestError, match="refused"):
            await llm.generate([REFUSED], SamplingParams(n=3))
        assert (await llm.generate("fine", SamplingParams(), wait=False)).text == "fine"  # neither keeps its place


async def test_flaw_in_text_processing_costs_one_request(lab: Lab) -> None:
    class Flawed:
        """Delegates, but cannot decode token 777."""

        def __getattr__(self, name: str) -> Any:
            return getattr(Lab().tokenizer, name)

        def decode_bytes(self, ids: Any, *, skip_special_tokens: bool) -> bytes:
            if 777 in ids:
                raise KeyError(777)
            return b"." * len(ids)

    lab.tokenizer = Flawed()  # type: ignore[assignment]
    async with AsyncLLM("m", max_num_seqs=1, max_queued_requests=1) as llm:
        for _ in range(3):  # more than there are places: none of them keeps its own
            with pytest.raises(RequestFailedError, match="777") as error:
                await llm.generate([5, 777, 5], SamplingParams())
            assert isinstance(error.value.__cause__, KeyError)
        assert (await llm.generate([5, 5, 5], SamplingParams())).text == "...."


# ---- life ----


async def test_create_and_aclose_work_without_a_block(lab: Lab) -> None:
    llm = await AsyncLLM.create("m", max_num_seqs=3)
    assert (llm.state, llm.config.max_num_seqs, llm.weight_version) == (Phase.READY, 3, 0)
    assert llm.tokenizer is lab.tokenizer and llm.stats() == {"open": 0} and llm.memory() == "plan"
    await llm.reset_prefix_cache()
    await llm.dump_step("step")
    assert (lab.engine.resets, lab.engine.dumps) == (1, [Path("step").absolute()])
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(llm.aclose)
    await llm.aclose()
    assert (llm.state, lab.engine.alive) == (Phase.CLOSED, False)
    assert repr(llm) == "AsyncLLM('m', state='closed')"


async def test_constructor_touches_nothing(lab: Lab) -> None:
    llm = AsyncLLM("does/not/exist")
    assert lab.engines == [] and llm.state is Phase.NEW
    await llm.aclose()
    assert llm.state is Phase.CLOSED


async def test_close_ends_open_requests_with_what_they_have(lab: Lab) -> None:
    lab.model = endless
    results: list[RequestOutput] = []
    async with anyio.create_task_group() as group, AsyncLLM("m", max_num_seqs=2, max_queued_requests=1) as llm:
        for _ in range(6):
            await spawn(group, lambda: llm.generate("x", MANY), results)
        await until(lambda: lab.engine.steps > 5)
    assert [out.outputs[0].finish_reason for out in results] == ["abort"] * 6
    assert sum(bool(out.token_ids) for out in results) == 2
    with pytest.raises(EngineStateError) as error:
        await llm.generate("x")
    assert (error.value.state, error.value.allowed) == ("closed", ("ready", "paused", "updating"))


async def test_close_completes_in_a_cancelled_scope(lab: Lab) -> None:
    with anyio.CancelScope() as scope:
        async with AsyncLLM("m") as llm:
            scope.cancel()
            await anyio.sleep(1)
    assert scope.cancelled_caught and llm.state is Phase.CLOSED and not lab.engine.alive


def test_close_completes_however_often_asyncio_itself_cancels_it(lab: Lab) -> None:
    """The second ``task.cancel()`` once left the engine's thread to itself."""
    proceed = threading.Event()

    def slow(engine: FakeEngine) -> None:
        end = engine._close
        engine._close = lambda: (proceed.wait(30), end())[1]  # type: ignore[method-assign]

    async def main() -> None:
        lab.prepare = slow
        llm = await AsyncLLM.create("m")

        async def hold() -> None:
            try:
                await anyio.sleep(60)
            finally:
                await llm.aclose()

        task = asyncio.create_task(hold())
        await anyio.sleep(0.01)
        for _ in range(4):
            task.cancel()
            await anyio.sleep(0.01)
        assert not task.done() and llm.state is Phase.CLOSED
        proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not lab.engine.alive

    asyncio.run(main())


async def test_engine_that_is_dropped_ends_with_a_warning(lab: Lab) -> None:
    lab.model = endless
    llm: AsyncLLM | None = await AsyncLLM.create("m")
    assert llm is not None
    stream = llm.stream("x", ENDLESS)
    await stream.__aenter__()
    await anext(stream)
    llm = None
    gc.collect()
    await anext(stream)  # what an engine has made keeps it alive
    with pytest.warns(ResourceWarning, match="dropped") as warned:
        del stream
        gc.collect()
    assert len(warned) == 2
    await until(lambda: not lab.engine.alive)


async def test_stream_that_is_dropped_ends_with_a_warning(lab: Lab) -> None:
    """Its request once ran to its own end, which an endless one never comes to."""
    lab.model = endless
    async with AsyncLLM("m") as llm:
        stream = llm.stream("x", ENDLESS, request_id="lost")
        await stream.__aenter__()
        await anext(stream)
        with pytest.warns(ResourceWarning, match="'lost' was dropped in its block"):
            del stream
            gc.collect()
        await until(lambda: not lab.engine.sequences)
        async with llm.stream("x", ENDLESS) as stream:
            await anext(stream)
        del stream
        gc.collect()


async def test_two_engines_live_in_one_process(lab: Lab) -> None:
    async with AsyncLLM("one") as one, AsyncLLM("two") as two:
        first, second = lab.engines
        a, b = await one.generate("a", SamplingParams(), request_id="x"), await two.generate("b", SamplingParams(), request_id="x")
        assert (a.text, b.text, len(first.submitted), len(second.submitted)) == ("a", "b", 1, 1)
        first.die(MemoryError())
        await until(lambda: one.state is Phase.FAILED)
        assert (await two.generate("still", SamplingParams())).text == "still"


async def test_failed_start_raises_and_leaves_nothing(lab: Lab) -> None:
    def fail(engine: FakeEngine) -> None:
        engine.fail_start = CheckpointError("incomplete", problems=["a is missing"])

    lab.prepare = fail
    llm = AsyncLLM("m")
    with pytest.raises(CheckpointError, match="a is missing"):
        await llm.__aenter__()
    assert llm.state is Phase.FAILED and lab.engine.closes == 1
    with pytest.raises(EngineDeadError) as error:
        await llm.generate("x")
    assert isinstance(error.value.__cause__, CheckpointError)
    await llm.aclose()


async def test_second_start_is_refused_and_leaves_the_first_alone(lab: Lab) -> None:
    llm, results = AsyncLLM("m"), list[Any]()
    async with anyio.create_task_group() as group:
        for _ in range(2):
            await spawn(group, llm.__aenter__, results)
    assert llm in results and any(isinstance(result, EngineStateError) for result in results)
    assert (await llm.generate("still", SamplingParams())).text == "still"
    await llm.aclose()


async def test_cancelled_start_leaves_nothing(lab: Lab) -> None:
    begun, proceed = threading.Event(), threading.Event()

    def slow(engine: FakeEngine) -> None:
        def start() -> None:
            begun.set()
            assert proceed.wait(10)

        engine.starting = start

    lab.prepare = slow
    llm = AsyncLLM("m")
    async with anyio.create_task_group() as group:
        group.start_soon(llm.__aenter__)
        await until(begun.is_set)
        assert llm.state is Phase.STARTING
        with pytest.raises(EngineStateError, match="starting"):
            await llm.generate("x")
        group.cancel_scope.cancel()
        proceed.set()
    await llm.aclose()
    assert llm.state is Phase.CLOSED and not lab.engine.alive


def test_start_cancelled_by_asyncio_itself_leaves_nothing(lab: Lab) -> None:
    """A plain task cancellation does not respect shields: the loading thread is left alone and must clean up."""
    begun, proceed = threading.Event(), threading.Event()

    def slow(engine: FakeEngine) -> None:
        engine.starting = lambda: (begun.set(), proceed.wait(10))[0]

    async def main() -> None:
        lab.prepare = slow
        llm = AsyncLLM("m")
        task = asyncio.create_task(llm.__aenter__())
        await until(begun.is_set)
        task.cancel()
        await anyio.sleep(0.01)
        proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.state is Phase.CLOSED and not lab.engine.alive

    asyncio.run(main())


async def test_another_event_loop_is_refused(lab: Lab) -> None:
    lab.model = endless
    async with AsyncLLM("m") as llm, llm.stream("x", MANY) as stream, llm.update_weights(1) as update:
        outputs = llm.as_completed(["x"])

        async def read_all(stream: AsyncStream) -> None:
            async for _ in stream:
                pass

        async def elsewhere() -> None:
            calls = (llm.generate("x"), llm.pause(), llm.score("a", "b"), llm.chat([]))
            opened = (stream.final(), outputs.__anext__(), update.load(NamedTensors({})), read_all(stream))
            for call in (*calls, *opened):
                with pytest.raises(EngineStateError, match="another event loop"):
                    await call
            for use in (lambda: llm.stream("x"), lambda: llm.as_completed(["x"])):
                with pytest.raises(EngineStateError, match="another event loop"):
                    use()

        for backend in ("asyncio", "trio"):
            await anyio.to_thread.run_sync(functools.partial(anyio.run, elsewhere, backend=backend))


@LOOPS
def test_engine_survives_a_loop_that_ends_without_closing_it(backend: str, lab: Lab) -> None:
    """The engine's thread must neither die nor generate for ever when its host's loop is gone; any loop may then close it.

    A request that ends by itself would hide an engine that goes on.
    """
    lab.model = endless
    holder: list[Any] = []

    async def forget() -> None:
        llm = await AsyncLLM.create("m")
        holder.append(llm)
        stream = llm.stream("x", ENDLESS)
        await stream.__aenter__()
        await anext(stream)
        holder.append(stream)

    anyio.run(forget, backend=backend)

    async def wait_and_close() -> None:
        with anyio.fail_after(30):
            await until(lambda: not lab.engine.sequences)
        assert lab.engine.alive
        await holder[1].__aexit__(None, None, None)
        with pytest.raises(EngineStateError, match="another event loop"):
            await holder[0].generate("x")
        await holder[0].aclose()

    anyio.run(wait_and_close)
    assert not lab.engine.alive


async def test_long_prompts_are_encoded_off_the_loop(lab: Lab) -> None:
    threads: list[int] = []
    encode = lab.tokenizer.encode

    def spy(text: str, **options: bool) -> list[int]:
        threads.append(threading.get_ident())
        return encode(text, **options)

    lab.tokenizer.encode = spy  # type: ignore[method-assign]
    async with AsyncLLM("m") as llm:
        one = SamplingParams(max_tokens=1)
        await llm.generate("short", one)
        await llm.generate("long " * 10_001, one)
        await llm.chat([{"role": "user", "content": "long " * 10_001}], one)
        await llm.score("long " * 10_001, "short")
    here = threading.get_ident()
    assert threads[0] == here
    assert len(threads) > 4 and here not in threads[1:]


async def test_slow_loop_gets_many_steps_in_one_post(lab: Lab) -> None:
    lab.held = True
    async with AsyncLLM("m") as llm, llm.stream(list(range(100, 150)), SamplingParams()) as stream:
        posts = 0
        post = llm._bridge.post

        def count(callback: Callable[[], None]) -> bool:
            nonlocal posts
            posts += 1
            return post(callback)

        llm._bridge.post = count  # type: ignore[method-assign]
        lab.engine.step(30)
        while lab.engine.steps < 30:  # without giving the loop a chance
            pass
        lab.engine.sync()
        assert posts == 1
        assert [(await anext(stream)).token_ids[0] for _ in range(30)] == list(range(100, 130))
        lab.engine.go()


# ---- states: every pair of state and method ----


async def update(llm: AsyncLLM) -> None:
    async with llm.update_weights(3) as transaction:
        await transaction.load(NamedTensors({}))


WITH_WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "weight_checksums": lambda llm: llm.weight_checksums(),
    "apply": lambda llm: llm.apply(lambda model, rank: rank),
}
SERVING_ONLY: dict[str, Callable[[Any], Any]] = {
    "generate": lambda llm: llm.generate("x", SamplingParams(max_tokens=1), deadline=1e-9),
    "generate_batch": lambda llm: llm.generate_batch([], SamplingParams()),
    "as_completed": lambda llm: llm.as_completed([]),
    "stream": lambda llm: llm.stream("x"),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "x"}], deadline=1e-9),
    "chat_stream": lambda llm: llm.chat_stream([{"role": "user", "content": "x"}]),
    "score": lambda llm: llm.score("", "y"),
    "score_batch": lambda llm: llm.score_batch([]),
    "dump_step": lambda llm: llm.dump_step("step"),
    "warmup": lambda llm: llm.warmup(),
    **WITH_WEIGHTS,
}
WHILE_STARTED: dict[str, Callable[[Any], Any]] = {
    "pause": lambda llm: llm.pause(),
    "resume": lambda llm: llm.resume(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "stats": lambda llm: llm.stats(),
    "memory": lambda llm: llm.memory(),
    "tokenizer": lambda llm: llm.tokenizer,
}
BETWEEN_UPDATES: dict[str, Callable[[Any], Any]] = {
    "sleep": lambda llm: llm.sleep(2),
    "wake_up": lambda llm: llm.wake_up(),
    "update_weights": update,
}
ALWAYS: dict[str, Callable[[AsyncLLM], Any]] = {
    "abort": lambda llm: llm.abort(),
    "state": lambda llm: llm.state,
    "config": lambda llm: llm.config,
    "weight_version": lambda llm: llm.weight_version,
    "repr": repr,
}


async def in_phase(lab: Lab, phase: Phase, proceed: threading.Event, group: anyio.abc.TaskGroup) -> tuple[AsyncLLM, object]:
    """Return an engine in a state, and what is to be kept as long as it shall be in it."""
    lab.held, update = True, None
    if phase is Phase.STARTING:
        lab.prepare = lambda engine: setattr(engine, "starting", lambda: proceed.wait(10))
    llm = AsyncLLM("m")
    if phase is Phase.STARTING:
        group.start_soon(llm.__aenter__)
        await until(lambda: llm.state is Phase.STARTING)
    elif phase is not Phase.NEW:
        await llm.__aenter__()
    if phase is Phase.PAUSED:
        await llm.pause()
    elif phase is Phase.UPDATING:
        update = await llm.update_weights(1).__aenter__()
    elif phase is Phase.ASLEEP:
        await llm.sleep(1)
    elif phase is Phase.WEIGHTS_INVALID:
        await llm.sleep(2)
        await llm.wake_up()
    elif phase is Phase.FAILED:
        lab.engine.die(MemoryError())
        await until(lambda: llm.state is Phase.FAILED)
    elif phase is Phase.CLOSED:
        await llm.aclose()
    assert llm.state is phase
    return llm, update


@pytest.mark.parametrize("phase", Phase, ids=str)
async def test_state_allows_or_refuses_every_call(lab: Lab, phase: Phase) -> None:
    """Refused calls change nothing and use one engine; each allowed call has an engine of its own."""
    calls = {**SERVING_ONLY, **WHILE_STARTED, **BETWEEN_UPDATES, **ALWAYS, "start": lambda llm: llm.__aenter__()}

    async def outcome_of(llm: AsyncLLM, method: str) -> Exception | None:
        try:
            result = calls[method](llm)
            if isinstance(result, Awaitable):
                await result
        except DSV4LiteError as error:
            return error
        return None

    async def call(methods: list[str], allowed: bool) -> None:
        proceed = threading.Event()
        async with anyio.create_task_group() as group:
            llm, update = await in_phase(lab, phase, proceed, group)
            for method in methods:
                outcome = await outcome_of(llm, method)
                if allowed:
                    assert outcome is None or (method == "score" and isinstance(outcome, InvalidRequestError)), (method, outcome)
                elif phase is Phase.FAILED:
                    assert isinstance(outcome, EngineDeadError) and isinstance(outcome.__cause__, MemoryError), method
                else:
                    assert isinstance(outcome, EngineStateError), method
                    assert outcome.state == phase and phase not in outcome.allowed, method
                    assert isinstance(outcome, WeightsNotLoadedError) == (phase is Phase.WEIGHTS_INVALID), method
            assert allowed or llm.state is phase
            proceed.set()
        await llm.aclose()
        del update

    serving = phase in (Phase.READY, Phase.PAUSED, Phase.UPDATING)
    started = serving or phase in (Phase.ASLEEP, Phase.WEIGHTS_INVALID)
    allowed = [*ALWAYS, *(SERVING_ONLY if serving else ()), *(WHILE_STARTED if started else ())]
    allowed += [name for name in BETWEEN_UPDATES if started and phase is not Phase.UPDATING]
    allowed += ["start"] if phase is Phase.NEW else []
    if phase is Phase.ASLEEP:
        allowed.remove("update_weights")  # the weights sleep, too
    for method in allowed:
        await call([method], True)
    await call([method for method in calls if method not in allowed], False)


# ---- settings ----


def test_settings_mirror_the_engine_config() -> None:
    # Aliases in both refer to them by name.
    names = {"LoadProgress": LoadProgress, "DispatcherFactory": DispatcherFactory, "Family": Family, "QuantFormat": QuantFormat}
    wanted = get_type_hints(EngineConfig, localns=names)
    del wanted["model"]
    assert get_type_hints(EngineSettings, localns=names) == wanted


def test_settings_unknown_name_has_a_near_match() -> None:
    with pytest.raises(ConfigError, match="mean 'max_model_len'"):
        AsyncLLM("m", max_modellen=5)  # type: ignore[call-arg]


def test_settings_change_a_given_config() -> None:
    config = EngineConfig(model="m", seed=3)
    llm = AsyncLLM(config, max_num_seqs=2)
    assert (llm.config.model, llm.config.seed, llm.config.max_num_seqs) == ("m", 3, 2)
    assert AsyncLLM(config).config == config


for _name, _test in [*globals().items()]:
    if _name.startswith("test_") and inspect.iscoroutinefunction(_test):
        globals()[_name] = both_loops(_test)
