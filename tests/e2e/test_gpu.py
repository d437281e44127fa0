"""Whole engines on a CUDA device: the shipped checkpoint on the kernels, with captured steps."""

from __future__ import annotations

import asyncio
import gc
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4lite.config import tiny_model
from dsv4lite.engine import rank
from dsv4lite.engine.prompt_graphs import PromptGraphs
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.request import SamplingParams
from tests.e2e.engines import assert_idle, engine_of, opened, prompts_of, room_for
from tests.e2e.test_engine_determinism import Ask, Reference, ask_all, asks
from tests.e2e.traffic import traffic

pytestmark = pytest.mark.gpu

TINY = Path(tiny_model())
VOCAB = 4096
STRANGERS = tuple(
    Ask(f"stranger {i}", prompt, SamplingParams(max_tokens=5 + i, seed=i, temperature=i % 3 / 2, logprobs=i % 2, ignore_eos=True))
    for i, prompt in enumerate(prompts_of([3 + 37 * i % 600 for i in range(60)], VOCAB, seed=6))
)


def on_gpu(**settings: Any) -> Any:
    return opened(TINY, **{"device": "cuda", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 2048, **settings})


class OnGpu(Reference):
    def open(self, **settings: Any) -> Any:
        return on_gpu(deterministic=True, **settings)


@pytest.fixture(scope="module")
def alone() -> Iterator[OnGpu]:
    """Requests run alone, each prompt in one pass, nothing cached."""
    with on_gpu(deterministic=True, enable_prefix_caching=False) as llm:
        outputs = [ask_all(llm, [ask])[0] for ask in asks(VOCAB)]
    yield OnGpu(TINY, True, outputs)


def test_a_second_engine_gives_the_same_bits(alone: OnGpu) -> None:
    with alone.open(enable_prefix_caching=False) as llm:
        alone.check([ask_all(llm, [ask])[0] for ask in asks(VOCAB)])


def test_a_batch_of_64_gives_the_same_bits(alone: OnGpu) -> None:
    with alone.open(max_num_seqs=64) as llm:
        alone.check(ask_all(llm, [*STRANGERS, *asks(VOCAB)]))


@pytest.mark.parametrize("tokens", [19, 131])
def test_chunks_give_the_same_bits(alone: OnGpu, tokens: int) -> None:
    with alone.open(max_num_batched_tokens=tokens, enable_prefix_caching=False) as llm:
        alone.check(ask_all(llm, [*STRANGERS[:6], *asks(VOCAB)]))


def test_captured_steps_with_prompts_give_the_bits_of_eager_ones(alone: OnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    with alone.open(enable_prefix_caching=False) as llm:
        for _ in range(3):  # the first step of a shape launches its kernels, the second is captured, the third replayed
            alone.check(ask_all(llm, asks(VOCAB)))
    monkeypatch.setattr(rank, "captured_prompts", lambda *args: 0)
    with alone.open(enable_prefix_caching=False) as llm:
        alone.check(ask_all(llm, asks(VOCAB)))


def test_garbage_that_holds_graphs_ends_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run, and free the graphs of an engine that is gone, while a step is captured."""
    forward = PromptGraphs._forward
    monkeypatch.setattr(PromptGraphs, "_forward", lambda *args: (gc.collect(), forward(*args))[1])
    with on_gpu() as llm:
        gc.disable()
        try:
            graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
            with torch.cuda.graph(graph):
                x.add_(1)
            cycle: list[Any] = [graph]
            cycle.append(cycle)
            params = SamplingParams(max_tokens=1, temperature=0)
            asked = [llm.generate("def f(x):", params)]
            del graph, cycle  # garbage, which the second step of the shape finds while it is captured
            asked += [llm.generate("def f(x):", params) for _ in range(2)]
        finally:
            gc.enable()
    assert len({output.outputs[0].token_ids for output in asked}) == 1


def test_preemption_gives_the_same_bits(alone: OnGpu) -> None:
    settings = {"max_num_seqs": 8, "max_model_len": 512, "enable_prefix_caching": False}
    room = room_for(TINY, 4, **settings)
    with alone.open(kv_cache_memory_bytes=room, max_num_batched_tokens=100, **settings) as llm:
        outputs = ask_all(llm, asks(VOCAB))
        assert llm.stats().preemptions > 0
    alone.check(outputs)


def nats(llm: LLM, text: str) -> float:
    """Return the mean negative log-probability of a text's tokens, in pieces of a few hundred characters' context."""
    total, count = 0.0, 0
    for start in range(0, len(text), 4000):
        logprobs = llm.score(text[start : start + 400], text[start + 400 : start + 4000])
        total -= float(logprobs.sampled.sum())
        count += len(logprobs)
    return total / count


def test_scores_have_the_bits_of_decoding_with_and_without_a_replay() -> None:
    """Of processed log-probabilities, in company and in chunks, as a trainer asks for them."""
    params = SamplingParams.for_rollout(n=2, seed=3, max_tokens=40, ignore_eos=True, temperature=0.7, top_p=0.9, return_replay=True)
    prompts = prompts_of((7, 130, 600), VOCAB, seed=8)
    with on_gpu(deterministic=True, max_num_batched_tokens=256) as llm:
        outs = llm.generate_batch(prompts, params)
        ones = [one for out in outs for one in out.outputs]
        pairs = [(out.prompt_token_ids, one.token_ids) for out in outs for one in out.outputs]
        for replays in (None, [one.replay for one in ones]):
            scores = llm.score_batch(pairs, params, replays=replays)
            assert all(torch.equal(score.sampled, one.logprobs.sampled) for score, one in zip(scores, ones, strict=True))


def test_kernels_predict_text_as_well_as_the_references() -> None:
    text = inspect.getsource(textwrap) + inspect.getsource(inspect)[:20000]
    with on_gpu() as gpu:
        fast = nats(gpu, text)
    with opened(TINY, device="cpu", max_model_len=2048) as cpu:
        slow = nats(cpu, text)
    assert abs(fast - slow) < 0.005 * slow


def test_random_traffic_leaves_no_state() -> None:
    async def run() -> list[str]:
        async with AsyncLLM(str(TINY), device="cuda", kv_cache_memory_bytes=24 << 20, max_model_len=2048, max_num_seqs=48) as llm:
            ends = await traffic(llm, 1500, vocab_size=VOCAB, seed=4)
            await asyncio.wrap_future(engine_of(llm).call(assert_idle))
            return ends

    ends = asyncio.run(run())
    assert len(ends) == 1500
    assert {"length", "abort", "cancelled", "deadline"} <= set(ends) <= {"length", "abort", "cancelled", "deadline", "stop"}


def test_two_engines_share_a_process() -> None:
    prompt = prompts_of([200], VOCAB, seed=3)[0]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with on_gpu() as one, on_gpu() as two:
        outputs = [llm.generate(prompt, params).outputs[0].token_ids for llm in (one, two, one)]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_closed_engine_gives_its_memory_back() -> None:
    def used() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    with on_gpu() as llm:  # whose stream, with what the matrix library keeps for it, is there for the next ones
        llm.generate("def f(x):", SamplingParams(max_tokens=8))
    before = used()
    for _ in range(2):
        with on_gpu() as llm:
            llm.generate("def f(x):", SamplingParams(max_tokens=8))
    assert used() <= before + (1 << 20)
