"""Unquantized models as whole engines on a CUDA device against references on the CPU: the same greedy tokens, except at ties.

32 prompts of up to three pages, 64 tokens each: chunks beside single tokens, cached prefixes, preemption, graphs.
Where a token first differs, the reference's float32 numbers show that rounding alone decides between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.llm import LLM
from dsv4lite.request import RequestOutput, SamplingParams
from tests.e2e.engines import SMALL, engine_of, opened, prompts_of, room_for, write_model
from tests.mla import RELEASED_HEADS, VARIANTS, write_random_model

pytestmark = pytest.mark.gpu

Tokens = Sequence[Sequence[int]]

DEVICE = "cuda"
VOCAB = SMALL["vocab_size"]
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
PROMPTS = [*prompts_of([1 + (i * 83) % 400 for i in range(31)], VOCAB, seed=8), prompts_of([700], VOCAB, seed=9)[0]]
RELEASE: Mapping[str, Any] = {
    "compress_ratios": [4, 128, 0, 0],
    "sliding_window": 128,
    "index_topk": 17,
    "hc_mult": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "index_head_dim": 32,
}
MODELS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "float32": (SMALL, "float32"),
    "float32_release_ratios": ({**SMALL, **RELEASE}, "float32"),
    "bfloat16": ({**SMALL, **RELEASE, "hidden_size": 128}, "bfloat16"),
    "v2_lite_float32": ({}, "float32"),
    "v3_bfloat16": (RELEASED_HEADS, "bfloat16"),
}


@dataclass(frozen=True)
class Reference:
    """A model, and its outputs on the CPU in float32.

    Attributes:
        folder: The model; its weights are numbers of ``dtype``.
        dtype: What it runs in on the GPU.
        tokens: The greedy tokens of each prompt.
        logprobs: Log-probabilities of these tokens.
        ties: Where ``dtype`` rounds: how much less likely the reference path's own choices are where rounding made it depart, in
            order.
        rounding: How far rounding takes 99 % of its log-probabilities of these tokens.
        most: How far it takes any of those of the whole vocabulary: where it decides which experts or entries are chosen.
    """

    folder: Path
    dtype: str
    tokens: Tokens
    logprobs: Sequence[Tensor]
    ties: Sequence[float] = ()
    rounding: float = 1e-4
    most: float = 1e-4

    def on_gpu(self, **settings: Any) -> Any:
        given = {"device": DEVICE, "dtype": self.dtype, "max_num_seqs": 32, "kv_cache_memory_bytes": 64 << 20, **settings}
        return opened(self.folder, **given)

    def check(self, outputs: Sequence[RequestOutput]) -> None:
        """Assert that tokens are the same up to a tie; in float32 nearly all must be the same altogether.

        In bfloat16, where a single rounding may decide which experts are chosen, the kernels may depart no more often and no
        farther than its rounding takes the reference path, but for chance.
        """
        ties = departures(self.folder, self.tokens, [output.outputs[0].token_ids for output in outputs])
        if self.dtype == "float32":
            assert len(ties) <= 1 and max(ties, default=0.0) <= 2e-4, ties
        else:
            assert len(ties) <= len(self.ties) + 5 and ties[-1] <= 2 * self.most, (ties, self.ties, self.most)
            assert median(ties) <= 3 * median(self.ties), (ties, self.ties)


def departures(folder: Path, tokens: Tokens, others: Tokens) -> list[float]:
    """Return, in order, how much less likely other tokens are where they depart from ``tokens`` for the first time."""
    found = []
    with opened(folder, dtype="float32") as exact:
        for prompt, ours, theirs in zip(PROMPTS, tokens, others, strict=True):
            assert len(ours) == len(theirs)
            first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            if first is not None:
                a, b = (float(exact.score([*prompt, *ours[:first]], [choice[first]]).sampled[0]) for choice in (ours, theirs))
                found.append(a - b)
    return sorted(found)


def greedy(llm: LLM) -> Tokens:
    """Return the prompts' completions."""
    return [output.outputs[0].token_ids for output in llm.generate_batch(PROMPTS, PARAMS)]


def scores(llm: LLM, tokens: Tokens) -> list[Tensor]:
    """Return the log-probabilities of given completions of the prompts."""
    return [llm.score(prompt, completion).sampled.cpu() for prompt, completion in zip(PROMPTS, tokens, strict=True)]


def distributions(llm: LLM, tokens: Tokens) -> Tensor:
    """Return the log-probabilities [T, V] of the whole vocabulary at given completions of every fourth prompt."""
    pairs = list(zip(PROMPTS, tokens, strict=True))[::4]
    found = [llm.score(prompt, completion, top_logprobs=VOCAB) for prompt, completion in pairs]
    return torch.cat([torch.zeros_like(f.values).scatter(1, f.token_ids.long(), f.values) for f in found])


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    config, dtype = MODELS[request.param]
    stored, folder = getattr(torch, dtype), tmp_path_factory.mktemp(request.param)
    variant = request.param.removesuffix(f"_{dtype}")
    if variant in VARIANTS:
        write_random_model(folder, variant, **config)
    else:
        write_model(folder, config, seed=4, change=lambda _, tensor: tensor.to(stored).to(tensor.dtype))
    with opened(folder, dtype="float32", max_num_seqs=32) as cpu:
        tokens = greedy(cpu)
        logprobs = scores(cpu, tokens)
    if dtype == "float32":
        return Reference(folder, dtype, tokens, logprobs)
    listed = {"max_logprobs": VOCAB, "max_num_seqs": 32}
    with opened(folder, dtype="float32", **listed) as exact, opened(folder, dtype=dtype, **listed) as rounded:
        apart = (torch.cat(scores(rounded, tokens)) - torch.cat(logprobs)).abs()
        every = (distributions(rounded, tokens) - distributions(exact, tokens)).abs()
        others = greedy(rounded)
    ties = departures(folder, tokens, others)
    return Reference(folder, dtype, tokens, logprobs, ties, float(apart.quantile(0.99)), float(every.max()))


def test_steps_run_on_pages_and_from_graphs(reference: Reference) -> None:
    with reference.on_gpu() as gpu:
        runner = engine_of(gpu)._runner
        assert DEVICE == "cpu" or runner._graphs is not None


def test_chunks_beside_single_tokens_give_the_same_tokens(reference: Reference) -> None:
    with reference.on_gpu(max_num_batched_tokens=131) as gpu:
        reference.check(gpu.generate_batch(PROMPTS, PARAMS))


def test_cached_prefixes_give_the_same_tokens(reference: Reference) -> None:
    with reference.on_gpu() as gpu:
        reference.check(gpu.generate_batch(PROMPTS, PARAMS))
        again = gpu.generate_batch(PROMPTS, PARAMS)
        assert sum(output.usage.cached_tokens for output in again) >= 256
        reference.check(again)


def test_preempted_requests_give_the_same_tokens(reference: Reference) -> None:
    settings = {"max_num_seqs": 32, "max_model_len": 1024, "enable_prefix_caching": False, "dtype": reference.dtype}
    room = room_for(reference.folder, 12, **settings)
    with reference.on_gpu(kv_cache_memory_bytes=room, max_num_batched_tokens=300, **settings) as gpu:
        outputs = gpu.generate_batch(PROMPTS, PARAMS)
        assert gpu.stats().preemptions > 0
    reference.check(outputs)


def test_log_probabilities_agree_at_every_token(reference: Reference) -> None:
    """Also after a tie: each token is given."""
    with reference.on_gpu(max_num_batched_tokens=200) as gpu:
        got = torch.cat(scores(gpu, reference.tokens))
    error = (got - torch.cat(list(reference.logprobs))).abs()
    assert error.median() <= reference.rounding and error.quantile(0.99) <= 2 * reference.rounding


def test_deterministic_tokens_do_not_depend_on_company(reference: Reference) -> None:
    with reference.on_gpu(deterministic=True, enable_prefix_caching=False) as gpu:
        together = gpu.generate_batch(PROMPTS[:8], PARAMS)
        alone = [gpu.generate(prompt, PARAMS) for prompt in PROMPTS[:8:3]]
    assert [output.outputs[0].token_ids for output in together[::3]] == [output.outputs[0].token_ids for output in alone]
