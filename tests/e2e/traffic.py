"""Send random requests, some of them aborted, cancelled or late, for a given time:

    python -m tests.e2e.traffic --minutes 10

Between rounds the engine must be idle with every page accounted for, and must hold as much memory as after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter

import torch

from dsv4lite.config import tiny_model
from dsv4lite.llm import AsyncLLM
from dsv4lite.request import SamplingParams
from tests.e2e.engines import assert_idle, engine_of

ROUND = 1500


async def traffic(llm: AsyncLLM, requests: int, *, vocab_size: int, seed: int) -> list[str]:
    """Send random requests, some of them aborted, cancelled or late; return why each ended."""
    rng, ends = random.Random(seed), []
    gate = asyncio.Semaphore(150)

    async def one(index: int) -> None:
        prompt = [rng.randrange(300, vocab_size) for _ in range(rng.choice((1, 5, 60, 130, 400, 1500)))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 200),
            temperature=rng.choice((0, 0.7)),
            top_p=rng.choice((1.0, 0.9)),
            n=rng.choice((1, 1, 1, 2)),
            logprobs=rng.choice((None, None, 2)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
        )
        deadline = rng.choice((None, None, 0.05, 1.0))
        fate, delay = rng.random(), rng.random() / 4
        async with gate:
            task = asyncio.ensure_future(llm.generate(prompt, params, request_id=f"{seed}-{index}", deadline=deadline))
            if fate < 0.3:
                await asyncio.sleep(delay)
                if fate < 0.15:
                    task.cancel()
                else:
                    llm.abort(f"{seed}-{index}")
            try:
                ends.append((await task).outputs[0].finish_reason)
            except asyncio.CancelledError:
                ends.append("cancelled")

    await asyncio.gather(*(one(index) for index in range(requests)))
    return ends


async def rounds(seconds: float, device: str) -> None:
    """Run rounds of requests on one engine; print what each did."""
    settings = {"kv_cache_memory_bytes": 24 << 20, "max_model_len": 2048, "max_num_seqs": 48}
    async with AsyncLLM(tiny_model(), device=device, **settings) as llm:
        started, held, number = time.monotonic(), 0, 0
        while time.monotonic() < started + seconds:
            ends = Counter(await traffic(llm, ROUND, vocab_size=llm.tokenizer.vocab_size, seed=number))
            await asyncio.wrap_future(engine_of(llm).call(assert_idle))
            assert ends.total() == ROUND and "error" not in ends, ends
            now = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            held = held or now
            assert now <= held + (1 << 20), f"round {number}: {now:,} bytes are allocated, {held:,} after the first"
            elapsed, steps = time.monotonic() - started, llm.stats().steps
            print(f"{elapsed:6.0f} s  round {number}: {dict(ends)}; {steps:,} steps, {now >> 20} MiB", flush=True)
            number += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    asyncio.run(rounds(60 * arguments.minutes, arguments.device))
