"""Measure what guessing costs and brings: steps and tokens per second by guesses in a row, at a chance to be right of your choice.

    python examples/benchmark_speculation.py --layers 8 --batch 1 8 64 --acceptance 0.8
    python examples/benchmark_speculation.py --device cpu --layers 0 --batch 1 --guesses 0 1 2

The engine may only say one word, so that a drafter can be right as often as it likes. With ``--mtp`` the model's MTP block drafts
behind each step as well: its cost is in, its guesses are not heard. ``--layers 0`` is the checkpoint that ships with the package.
Weights are those of ``benchmark.py``: V4-Flash's shapes, fewer layers, random numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

from benchmark import flash

from dsv4lite import MTP, AsyncLLM, SamplingParams, tiny_model

WORD, OTHER = 300, 301


class Sometimes:
    """Guesses the one word that may be said, with a given chance; else another one."""

    def __init__(self, k: int, chance: float) -> None:
        self.k = k
        self._chance, self._rng = chance, random.Random(0)

    def propose(self, sequence_id: int, token_ids: Sequence[int], max_drafts: int) -> list[int]:
        """Guess."""
        return [WORD if self._rng.random() < self._chance else OTHER for _ in range(max_drafts)]

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept."""


async def rate(llm: AsyncLLM, batch: int, context: int, seconds: float) -> dict[str, float]:
    """Return seconds of a step in which ``batch`` sequences decode, and the tokens per second that come of it."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, allowed_token_ids=[WORD], max_tokens=8192)
    prompts = [[rng.randrange(3, 4000) for _ in range(context)] for _ in range(batch)]
    running = [asyncio.create_task(llm.generate(prompt, params)) for prompt in prompts]
    begun = llm.stats().generated_tokens
    while llm.stats().num_running < batch or llm.stats().generated_tokens < begun + 16 * batch:
        await asyncio.sleep(0.02)
    before, started = llm.stats(), time.perf_counter()
    await asyncio.sleep(seconds)
    after, took = llm.stats(), time.perf_counter() - started
    llm.abort()
    await asyncio.gather(*running)
    steps = max(1, after.steps - before.steps)
    return {"step_s": took / steps, "tokens_per_s": (after.generated_tokens - before.generated_tokens) / took}


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure everything; print as it comes."""
    shape: dict[str, Any] = {"hf_overrides": flash(args.layers), "load_format": "dummy"} if args.layers else {}
    found = []
    print(f"{'guesses':>8}{'batch':>7}{'step ms':>10}{'tokens a step':>15}{'tok/s':>9}", flush=True)
    for k in args.guesses:
        own = (MTP(min(k, MTP.most), adaptive=False),) if args.mtp and k else ()
        speculative = (Sometimes(k, args.acceptance), *own) if k else None
        llm = AsyncLLM(
            tiny_model(),
            **shape,
            device=args.device,
            max_model_len=16384,
            max_num_seqs=max(args.batch),
            enable_prefix_caching=False,
            speculative=speculative,
        )
        async with llm:
            for batch in args.batch:
                row = {"guesses": k, "batch": batch, **await rate(llm, batch, args.context, args.seconds)}
                found.append(row)
                each = row["tokens_per_s"] * row["step_s"] / batch
                print(f"{k:>8}{batch:>7}{row['step_s'] * 1e3:>10.2f}{each:>15.2f}{row['tokens_per_s']:>9.0f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=8, help="how many of the model's layers; 0 for the tiny checkpoint (default 8)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="sequences that decode together (default 1 8 64)")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each (default 1024)")
    parser.add_argument("--guesses", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="in a row (default 0 1 2 3 4)")
    parser.add_argument("--acceptance", type=float, default=0.8, help="chance of a guess to be right (default 0.8)")
    parser.add_argument("--mtp", action="store_true", help="let the MTP block draft, too")
    parser.add_argument("--seconds", type=float, default=4.0, help="to measure each figure (default 4)")
    parser.add_argument("--device", default="auto", help="where (default auto)")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    found = asyncio.run(run(args))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
