"""Requests of all kinds for engines of all layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dsv4lite.llm import LLM
from dsv4lite.request import RequestOutput, SamplingParams
from tests.e2e.engines import MODEST, SMALL, prompts_of, room_for

TOLERANCE = 1e-5  # of log-probabilities on several ranks, whose sums are cut
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
    short = SamplingParams(max_tokens=4, temperature=0, logprobs=3)
    llm.generate({"prompt_token_ids": [5]}, kinds[2])  # loads what grammars need, so that later ones start beside the others
    outputs = [
        *llm.generate_batch([{"prompt_token_ids": p} for p in PROMPTS], [replace(kind) for kind in kinds]),
        *llm.generate_batch([{"prompt_token_ids": p} for p in PROMPTS[2:]], short),
        *[llm.generate({"prompt_token_ids": PROMPTS[3]}, short) for _ in range(2)],
    ]
    assert outputs[-1].usage.cached_tokens == 256
    late = llm.generate({"prompt_token_ids": PROMPTS[1]}, greedy, deadline=1e-6)
    assert late.outputs[0].finish_reason == "deadline"
    with llm.stream({"prompt_token_ids": PROMPTS[1]}, SamplingParams(max_tokens=500, ignore_eos=True)) as stream:
        next(iter(stream))
    return outputs


def tight(model: Path, **settings: Any) -> dict[str, Any]:
    """Settings with so little room that sequences give way to each other."""
    sizes = {"max_model_len": MODEST["max_model_len"], "max_num_seqs": MODEST["max_num_seqs"]}
    room = room_for(model, 5, **sizes, speculative=settings.get("speculative"))
    return {**MODEST, **settings, "kv_cache_memory_bytes": room}
