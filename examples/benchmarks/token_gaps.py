"""Measure the gaps between a stream's tokens while the host's own Python is busy.

    python -m examples.benchmarks.token_gaps [--tokens 256] [--threads 1]

The engine thread shares the interpreter lock with its host. This prints the median and the 99th percentile of the gaps with an
idle host, and with threads that do nothing but run Python.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from itertools import pairwise

from dsv4lite import AsyncLLM, SamplingParams, tiny_model


class Burner:
    """Threads that run pure Python and never wait."""

    def __init__(self, count: int) -> None:
        self._stop = False
        self._threads = [threading.Thread(target=self._burn, daemon=True) for _ in range(count)]

    def _burn(self) -> None:
        total = 0
        while not self._stop:
            total = (total * 31 + 7) % 1_000_003

    def __enter__(self) -> Burner:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()


async def gaps(llm: AsyncLLM, tokens: int) -> list[float]:
    """Stream greedily; return the sorted seconds between tokens."""
    times = []
    async with llm.stream("def main():", SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)) as stream:
        async for delta in stream:
            times += [time.perf_counter()] * len(delta.token_ids)
    return sorted(b - a for a, b in pairwise(times))


def row(name: str, values: list[float]) -> str:
    shown = (values[len(values) // 2], values[int(len(values) * 0.99)], values[-1])
    return f"{name:<28}" + "".join(f"{value * 1000:>10.1f}" for value in shown)


async def run(model: str, tokens: int, threads: int) -> None:
    async with AsyncLLM(model) as llm:
        await gaps(llm, 8)
        print(f"{'gap between tokens, ms':<28}{'median':>10}{'p99':>10}{'worst':>10}")
        print(row("idle host", await gaps(llm, tokens)))
        with Burner(threads):
            print(row(f"{threads} thread(s) of busy Python", await gaps(llm, tokens)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure token gaps with a busy host.")
    parser.add_argument("--model", default=tiny_model(), help="checkpoint (default: the one that ships)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each stream (default: 256)")
    parser.add_argument("--threads", type=int, default=1, help="busy threads (default: 1)")
    args = parser.parse_args()
    asyncio.run(run(args.model, args.tokens, args.threads))


if __name__ == "__main__":
    main()
