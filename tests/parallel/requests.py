"""Requests of all kinds for engines of all layouts, and what it means that two engines give the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsv4lite.llm import LLM
from dsv4lite.request import RequestOutput, SamplingParams
from tests.e2e.engines import MODEST, SMALL, prompts_of, room_for

VOCAB = SMALL["vocab_size"]
PROMPTS = prompts_of((5, 250, 262, 262), VOCAB, seed=3)  # most pass the boundary of a page
PROMPTS[3][:258] = PROMPTS[2][:258]  # a cached prefix
# What four ranks share divides by four.
SHARED = {**SMALL, "num_attention_heads": 8, "o_groups": 4}


def all_kinds(llm: LLM) -> list[RequestOutput]:
    """Run requests of every kind, one of which is ended early and one of which comes too late."""
    greedy = SamplingParams(max_tokens=8, temperature=0, logprobs=3, prompt_logprobs=1, return_routed_experts=True)
    kinds = [
        greedy,
        SamplingParams(max_tokens=8, seed=1, n=4, logprobs=0, presence_penalty=0.5, stop_token_ids=(9,)),
        SamplingParams(max_tokens=8, seed=2, structured_outputs={"regex": "[a-e]{4,8}"}),
        SamplingParams(max_tokens=8, seed=3, bad_words_ids=((20, 21), (30,)), min_tokens=3),
    ]
    outputs = [
        *llm.generate_batch([{"prompt_token_ids": p} for p in PROMPTS], [replace(kind) for kind in kinds]),
        *llm.generate_batch(
            [{"prompt_token_ids": p} for p in PROMPTS[2:]], SamplingParams(max_tokens=4, temperature=0, logprobs=3)
        ),
    ]
    late = llm.generate({"prompt_token_ids": PROMPTS[1]}, greedy, deadline=1e-6)
    assert late.outputs[0].finish_reason == "deadline"
    with llm.stream({"prompt_token_ids": PROMPTS[1]}, SamplingParams(max_tokens=500, ignore_eos=True)) as stream:
        next(iter(stream))
    return outputs


def assert_same(left: list[RequestOutput], right: list[RequestOutput], tolerance: float = 1e-5) -> None:
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.token_ids, x.finish_reason, x.stop_reason) == (y.token_ids, y.finish_reason, y.stop_reason)
            for p, q in ((x.logprobs, y.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
                assert (p is None) == (q is None)
                if p is not None and q is not None:
                    torch.testing.assert_close(p.sampled, q.sampled, atol=tolerance, rtol=0)
                    torch.testing.assert_close(p.values, q.values, atol=tolerance, rtol=0)
            assert (x.routed_experts is None) == (y.routed_experts is None)
            if x.routed_experts is not None and y.routed_experts is not None:
                assert torch.equal(x.routed_experts, y.routed_experts)


def tight(model: Path, **settings: Any) -> dict[str, Any]:
    """Settings with so little room that sequences give way to each other."""
    sizes = {"max_model_len": MODEST["max_model_len"], "max_num_seqs": MODEST["max_num_seqs"]}
    room = room_for(model, 6, **sizes, speculative=settings.get("speculative"))
    return {**MODEST, **settings, "kv_cache_memory_bytes": room}
