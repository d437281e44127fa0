"""Hundreds of random requests, some aborted, cancelled or late: each ends once, and nothing remains of any."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsv4lite.engine.engine import Engine
from dsv4lite.errors import InvalidRequestError
from dsv4lite.llm import AsyncLLM
from dsv4lite.request import CompletionOutput, RequestOutput, SamplingParams, SequenceUpdate
from tests.e2e.engines import (
    END_THINK,
    EOS,
    FIRST_LETTER,
    SMALL,
    SPECIAL,
    THINK,
    assert_idle,
    engine_of,
    overlapping,
    pools_of,
    prompts_of,
    room_for,
    tensor_bytes,
    write_model,
)
from tests.mla import write_random_model

AT_ONCE = 64
VOCAB = SMALL["vocab_size"]
STEMS = prompts_of((250, 253, 257, 508), VOCAB, seed=12)
MAX_MODEL_LEN = 700
STRUCTURES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"regex": "[a-c]{2,4}"}, "[a-c]{2,4}"),
    ({"choice": ["yes", "no"]}, "yes|no"),
    ({"json": {"enum": [1, 22, 333]}}, "1|22|333"),
)
RSS_SLACK = 96 << 20
PAGES = 8
# As many sequences as there are pages, each of which needs one for its prompt and another one in the end.
CROWD = SamplingParams(n=PAGES, seed=3, max_tokens=30, ignore_eos=True)
(CROWD_PROMPT,) = prompts_of((240,), VOCAB, seed=13)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of V4, or the variant of the MLA family that a test names."""
    if request.param != "v4":
        sizes = {"hidden_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 2, "topk_group": 1}
        return write_random_model(tmp_path_factory.mktemp("soak"), request.param, **sizes, index_topk=64)
    config = {**SMALL, "hidden_size": 16, "n_routed_experts": 3, "num_experts_per_tok": 1, "hc_sinkhorn_iters": 1}
    return write_model(tmp_path_factory.mktemp("soak"), config)


class Host:
    """A host that sends requests of every kind, and aborts, cancels, pauses and resets at random."""

    def __init__(self, llm: AsyncLLM, rng: random.Random) -> None:
        self.llm = llm
        self.rng = rng
        self.open: list[str] = []
        self.aborted: set[str] = set()
        self.reasons: Counter[str] = Counter()
        self.refused = self.cancelled = self.left = self.asked = 0

    def prompt(self) -> list[int]:
        rng = self.rng
        own = [rng.randrange(FIRST_LETTER, VOCAB) for _ in range(rng.choice((1, 1, 2, 3, 7, 30, 80)))]
        prompt = own if rng.random() < 0.75 else [*rng.choice(STEMS), *own]
        return [*prompt, THINK] if rng.random() < 0.1 else prompt

    def params(self) -> SamplingParams:
        rng = self.rng
        max_tokens = rng.choice((1, 2, 4, 8, 12))
        settings: dict[str, Any] = {"max_tokens": max_tokens, "n": rng.choice((1, 1, 1, 2, 3))}
        letters = range(FIRST_LETTER, VOCAB)
        for name, draw in (
            ("min_tokens", lambda: rng.randrange(max_tokens + 1)),
            ("temperature", lambda: rng.choice((0.0, 0.7, 2.0))),
            ("top_p", lambda: rng.uniform(0.1, 1)),
            ("top_k", lambda: rng.randrange(VOCAB)),
            ("min_p", lambda: rng.uniform(0, 0.5)),
            ("presence_penalty", lambda: rng.uniform(-2, 2)),
            ("frequency_penalty", lambda: rng.uniform(-2, 2)),
            ("repetition_penalty", lambda: rng.uniform(0.5, 2)),
            ("seed", lambda: rng.randrange(5)),
            ("stop", lambda: [rng.choice("abcxyz") for _ in range(3)]),
            ("stop_token_ids", lambda: rng.sample(letters, 3)),
            ("include_stop_str_in_output", lambda: True),
            ("ignore_eos", lambda: True),
            ("bad_words_ids", lambda: (rng.sample(letters, 2), rng.sample(letters, 1))),
            ("logit_bias", lambda: {rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(3)}),
            ("allowed_token_ids", lambda: rng.sample(letters, 20)),
            ("logprobs", lambda: rng.choice((0, 3))),
            ("prompt_logprobs", lambda: rng.choice((0, 3))),
            ("logprobs_mode", lambda: "processed"),
            ("thinking_budget", lambda: rng.randrange(6)),
            ("return_routed_experts", lambda: True),
            ("skip_special_tokens", lambda: False),
        ):
            if rng.random() < 0.2:
                settings[name] = draw()
        if rng.random() < 0.06:
            for name in ("bad_words_ids", "allowed_token_ids", "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos"):
                settings.pop(name, None)
            settings |= {"structured_outputs": rng.choice(STRUCTURES)[0], "max_tokens": 20}
        elif rng.random() < 0.04:
            settings["structured_outputs"] = {"regex": "("}
        elif rng.random() < 0.1 and "stop" not in settings:
            settings["detokenize"] = False
        return SamplingParams(**settings)

    async def ask(self) -> None:
        """Make a random request, which may be aborted, and check its output."""
        rng = self.rng
        self.asked += 1
        name = f"r{self.asked}"
        settings: dict[str, Any] = {
            "request_id": name,
            "priority": rng.randrange(-1, 2),
            "cache_salt": rng.choice((None, None, None, "salt")),
            "deadline": rng.choice((1e-9, 0.05, 0.3)) if rng.random() < 0.06 else None,
        }
        patience = rng.uniform(0, 0.2) if rng.random() < 0.06 else inf
        most = rng.choice((2, 5, 1000, 1000, 1000)) if rng.random() < 0.3 else None
        self.open.append(name)
        try:
            await self.run(self.prompt(), self.params(), patience, most, **settings)
        finally:
            self.open.remove(name)

    async def run(
        self, prompt: list[int], params: SamplingParams, patience: float = inf, most: int | None = None, **settings: Any
    ) -> None:
        """Make a request and check its output.

        Args:
            prompt: Of the request.
            params: Of the request.
            patience: Seconds after which it is cancelled.
            most: Tokens after which its stream is left; without, it is not streamed.
            settings: Further options of the call.
        """
        try:
            with anyio.move_on_after(patience) as scope:
                if most is not None:
                    output = await self.stream(prompt, params, most, settings)
                else:
                    output = await self.llm.generate(prompt, params, **settings)
                if output is not None:
                    self.judge(prompt, params, output)
            self.cancelled += scope.cancelled_caught
        except InvalidRequestError:
            assert params.structured_outputs is not None and params.structured_outputs.regex == "("  # type: ignore[union-attr]
            self.refused += 1

    async def bring_about_every_end(self) -> None:
        """Make a request for each end that random requests may miss on a fast or on a slow machine."""
        (prompt,) = prompts_of((20,), VOCAB, seed=1)
        endless = SamplingParams(max_tokens=600, ignore_eos=True)
        await self.run(prompt, SamplingParams(max_tokens=20, structured_outputs={"choice": ["yes", "no"]}))  # stop
        await self.run(prompt, SamplingParams(structured_outputs={"regex": "("}))  # refused
        await self.run(prompt, endless, deadline=1e-9)
        await self.run(prompt, endless, patience=0)  # cancelled
        await self.run(prompt, endless, most=2)  # left
        async with self.llm.stream(prompt, endless) as stream:
            await anext(stream)
            stream.abort()
            self.judge(prompt, endless, await stream.final())

    async def interfere(self, done: anyio.Event) -> None:
        """Abort, reset and pause at random until ``done``; as often for each step, whatever the speed of the machine."""
        rng, llm = self.rng, self.llm
        while not done.is_set():
            step = llm.stats().steps + rng.randrange(1, 12)
            while llm.stats().steps < step and not done.is_set():
                await anyio.sleep(0.005)  # less than a step takes
            act = rng.random()
            if act < 0.5 and self.open:
                name = rng.choice(self.open)
                self.aborted.add(name)
                llm.abort(name)
            elif act < 0.6:
                await llm.reset_prefix_cache()
            elif act < 0.7:
                async with llm.paused():
                    await anyio.sleep(0.01)

    async def stream(self, prompt: list[int], params: SamplingParams, most: int, settings: dict[str, Any]) -> RequestOutput | None:
        async with self.llm.stream(prompt, params, **settings) as stream:
            tokens: list[list[int]] = [[] for _ in range(params.n)]
            texts = [""] * params.n
            ends: Counter[int] = Counter()
            async for delta in stream:
                tokens[delta.index] += delta.token_ids
                texts[delta.index] += delta.text
                ends[delta.index] += delta.finish_reason is not None
                if sum(map(len, tokens)) > most:
                    self.left += 1
                    return None
            output = await stream.final()
        assert set(ends.values()) == {1} and len(ends) == params.n
        assert [c.token_ids for c in output.outputs] == [tuple(ids) for ids in tokens]
        assert [c.text for c in output.outputs] == texts
        return output

    def judge(self, prompt: list[int], params: SamplingParams, output: RequestOutput) -> None:
        assert output.error is None and len(output.outputs) == params.n
        self.reasons.update(c.finish_reason for c in output.outputs)
        assert output.usage.completion_tokens == sum(len(c.token_ids) for c in output.outputs)
        for completion in output.outputs:
            ids, reason = completion.token_ids, completion.finish_reason
            assert params.max_tokens is not None and len(ids) <= params.max_tokens
            if reason == "length":
                assert len(ids) == params.max_tokens
            elif reason == "stop":
                assert ids
            else:
                assert reason in ("abort", "deadline")
            if reason in ("length", "stop"):
                self.judge_whole(prompt, params, completion, aborted=output.request_id in self.aborted)
            assert (completion.logprobs is None) == (params.logprobs is None)
            if completion.logprobs is not None:
                assert completion.logprobs.sampled.shape == (len(ids),)
                assert completion.logprobs.values.shape == (len(ids), params.logprobs)
                assert completion.logprobs.sampled.isfinite().all()
            if params.allowed_token_ids is not None:
                assert set(ids) <= {*params.allowed_token_ids, END_THINK}
        if params.prompt_logprobs is not None and output.outputs[0].finish_reason in ("length", "stop"):
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs.values.shape == (len(prompt) - 1, params.prompt_logprobs)

    def judge_whole(self, prompt: list[int], params: SamplingParams, completion: CompletionOutput, *, aborted: bool) -> None:
        ids = completion.token_ids
        # A completion that a stop string has just ended does not wait for its experts when it is aborted.
        if params.return_routed_experts and not (aborted and completion.routed_experts is None):
            assert completion.routed_experts is not None
            assert completion.routed_experts.shape == (len(prompt) + len(ids) - 1, SMALL["num_hidden_layers"], 1)
        legible = THINK not in prompt or not params.skip_special_tokens  # else the end of the thinking is not in the text
        if params.structured_outputs is not None and completion.finish_reason == "stop" and legible:
            answer = completion.text.rpartition("</think>")[2].removesuffix(SPECIAL[EOS])
            kinds = {pattern: SamplingParams(structured_outputs=wanted).structured_outputs for wanted, pattern in STRUCTURES}
            (pattern,) = (pattern for pattern, wanted in kinds.items() if wanted == params.structured_outputs)
            assert re.fullmatch(pattern, answer), completion.text


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def empty_cache(engine: Engine) -> None:
    """Empty the prefix cache; all ids must then be free."""
    assert_idle(engine)
    while engine._scheduler._cache.evict_one():
        pass
    assert [pool.num_free for pool in pools_of(engine)] == [pool.total for pool in pools_of(engine)]


@pytest.mark.parametrize(
    ("model", "requests", "overlap", "backend"),
    [("v4", 600, False, "asyncio"), ("v4", 400, True, "trio"), ("v32", 200, True, "asyncio")],
    indirect=["model"],
)
def test_every_request_ends_once_and_leaves_nothing(model: Path, requests: int, overlap: bool, backend: str) -> None:
    ends: Counter[tuple[str, int]] = Counter()
    settings = {"max_num_seqs": 32, "max_model_len": MAX_MODEL_LEN}

    async def scenario() -> None:
        room = room_for(model, PAGES, **settings)
        async with AsyncLLM(
            str(model), device="cpu", kv_cache_memory_bytes=room, max_num_batched_tokens=300, max_queued_requests=9, **settings
        ) as llm:
            engine = engine_of(llm)
            deliver = engine._deliver

            def watch(updates: list[SequenceUpdate]) -> None:
                ends.update((u.request_id, u.index) for u in updates if u.finish_reason is not None)
                deliver(updates)

            engine._deliver = watch
            host = Host(llm, random.Random(7))
            places = anyio.Semaphore(AT_ONCE)

            async def work(count: int) -> None:
                done = anyio.Event()

                async def one() -> None:
                    try:
                        await host.ask()
                    finally:
                        places.release()

                async with llm.stream(CROWD_PROMPT, CROWD) as crowd:
                    await anext(crowd)  # its completions now hold all pages, and each comes to need a second one
                    async with anyio.create_task_group() as interference:
                        interference.start_soon(host.interfere, done)
                        async with anyio.create_task_group() as group:
                            group.start_soon(host.bring_about_every_end)
                            for _ in range(count):
                                await places.acquire()
                                group.start_soon(one)
                        done.set()
                    host.judge(CROWD_PROMPT, CROWD, await crowd.final())

            async def idle() -> None:
                while llm._session._in_engine:
                    await anyio.sleep(0.001)
                for cached in (0, 256):
                    await anyio.to_thread.run_sync(engine.call(empty_cache if not cached else assert_idle).result)
                    output = await llm.generate(STEMS[2], SamplingParams(max_tokens=1))
                    assert output.usage.cached_tokens == cached
                await anyio.to_thread.run_sync(engine.call(empty_cache).result)

            await work(requests // 4)
            await idle()
            tensors, resident = tensor_bytes(), resident_bytes()
            await work(requests - requests // 4)
            await idle()
            assert not llm._session._visible and not llm._session._queue and not host.open
            assert tensor_bytes() <= tensors + 10_000
            assert resident_bytes() <= resident + RSS_SLACK
            assert llm.stats().preemptions > 0
            assert host.asked == requests
            report = {**host.reasons, "refused": host.refused, "cancelled": host.cancelled, "left": host.left}
            rare = ("stop", "length", "abort", "deadline", "refused", "cancelled", "left")
            assert all(report.get(name, 0) > 0 for name in rare), json.dumps(report)

    async def guarded() -> None:
        with anyio.fail_after(900):
            await scenario()

    with overlapping(overlap):
        anyio.run(guarded, backend=backend)
    assert ends and set(ends.values()) == {1}
