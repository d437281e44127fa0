"""GPU memory of an engine against its plan."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

from dsv4lite.config import MTP, tiny_model
from dsv4lite.llm import LLM
from dsv4lite.request import SamplingParams
from examples.benchmarks.engine import flash

pytestmark = pytest.mark.gpu
PLAIN = {**flash(4), "n_routed_experts": 16, "quantization_config": None, "torch_dtype": "bfloat16"}
PIECES = 64 << 20  # a few of the allocator's smallest segments, 20 MiB each, to which small models are rounded up


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        ({}, {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 16384}),
        ({}, {"max_num_batched_tokens": 512, "max_num_seqs": 8, "max_model_len": 4096}),
        ({}, {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "max_model_len": 4096, "speculative": MTP(4)}),
        (flash(4), {"max_num_batched_tokens": 2048, "max_num_seqs": 32, "max_model_len": 4096, "speculative": MTP(2)}),
        (flash(4), {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "max_model_len": 16384}),
        (flash(4), {"max_num_batched_tokens": 2048, "max_num_seqs": 4, "max_model_len": 1 << 17}),
        (PLAIN, {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "max_model_len": 16384}),
        ({**PLAIN, "torch_dtype": "float32"}, {"max_num_batched_tokens": 4096, "max_num_seqs": 16, "max_model_len": 16384}),
    ],
    ids=["tiny", "tiny-few", "tiny-mtp", "flash-4-mtp", "flash-4", "flash-4-long", "plain-bfloat16", "plain-float32"],
)
def test_plan_is_what_traffic_takes(overrides: dict[str, Any], settings: dict[str, Any], deterministic: bool) -> None:
    rng = random.Random(0)
    lengths = [settings["max_model_len"] - 40, 8191, 5000, 1025, 700, 513, 64, 3] + [300] * settings["max_num_seqs"]
    prompts = [[rng.randrange(3, 4000) for _ in range(min(n, settings["max_model_len"] - 40))] for n in lengths]
    kinds = (
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=1, top_p=0.9, seed=1, logprobs=5, max_tokens=32, ignore_eos=True, detokenize=False),
    )
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with LLM(tiny_model(), load_format="dummy", hf_overrides=overrides, deterministic=deterministic, **settings) as llm:
        ready = torch.cuda.memory_reserved() - before
        torch.cuda.reset_peak_memory_stats()  # making weights took more, before the state was allocated
        for params in kinds:
            llm.generate_batch(prompts, params)
        budget = llm.memory().per_device[0]
        measured = torch.cuda.max_memory_reserved() - before
        torch.cuda.synchronize()
    print(f"planned {budget.used / 2**20:,.0f} MiB, ready {ready / 2**20:,.0f}, after traffic {measured / 2**20:,.0f}; {budget}")
    assert abs(measured - budget.used) <= 0.03 * measured + PIECES
    assert measured - ready <= PIECES  # traffic takes nothing more than the start
    gc.collect()
    assert torch.cuda.memory_reserved() - before <= PIECES  # and all of it is freed
