"""Measure dsv4lite on one GPU: V4-Flash's real layers with random weights, fewer of them, by batch and context.

    python examples/benchmark.py --layers 8 --batch 1 8 64              # a table
    python examples/benchmark.py --layers 24 --batch 1 --json out.json
    python examples/benchmark.py --batch 1 2 4 8 16 32 64 128 --context 1024 8192 --plot throughput.svg

Prints how long the start took and on what, the time of a decode step and how near it comes to the bytes it must read, the host's
part of it, the rate of prefill, and the sequences that fit. Weights are random and need no download (3.4 GB a layer).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import statistics
import time
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import escape

import torch

from dsv4lite import AsyncLLM, EngineConfig, SamplingParams, tiny_model

BYTES_PER_SECOND = 4.3e12  # an H200's copy rate
COLOURS = ("#1f6fb2", "#c8501e", "#2b8a3e", "#8a3ffc", "#b8860b", "#5c5c5c")


def flash(layers: int) -> dict[str, Any]:
    """Return V4-Flash's configuration with ``layers`` layers, as overrides of another model's."""
    ratios = [0, 0] + [4, 128] * layers
    return {
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": layers,
        "compress_ratios": [*ratios[:layers], 0],
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "num_hash_layers": 3,
        "index_n_heads": 64,
        "index_topk": 512,
        "max_position_embeddings": 1 << 20,
    }


def floor_bytes(layers: int, batch: int) -> float:
    """Return the bytes of weights that a decode step must read."""
    experts = 256 * (1 - (1 - 6 / 256) ** batch)
    total = 129280 * 4096 * 2.0
    for layer in range(layers):
        compressed = 0 if layer < 2 else 35e6 if layer % 2 == 0 else 14e6
        total += 107e6 + 25e6 + max(5e6, compressed) + 13.4e6 * experts
    return total


async def decode(llm: AsyncLLM, batch: int, context: int, tokens: int, rng: random.Random) -> dict[str, float]:
    """Return seconds of a step in which ``batch`` sequences decode, as one of their streams sees it, and the host's part."""

    def prompt() -> list[int]:
        return [rng.randrange(3, 4000) for _ in range(context)]

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)

    times, host = [], []
    others = [asyncio.create_task(llm.generate(prompt(), params(tokens + 64 + 8 * batch))) for _ in range(batch - 1)]
    await asyncio.sleep(0.05)
    async with llm.stream(prompt(), params(tokens)) as stream:  # the last to start: the others decode by then
        async for delta in stream:
            times += [time.perf_counter()] * len(delta.token_ids)
            host.append(llm.stats().host_s)
    llm.abort()
    await asyncio.gather(*others)
    gaps = [b - a for a, b in pairwise(times)][tokens // 2 :]
    return {"step_s": statistics.median(gaps), "host_s": statistics.median(host[tokens // 2 :])}


async def prefill(llm: AsyncLLM, count: int, length: int, rng: random.Random) -> float:
    """Return prompt tokens per second."""
    prompts = [[rng.randrange(3, 4000) for _ in range(length)] for _ in range(count)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    await llm.generate_batch(prompts, one)
    return count * length / (time.perf_counter() - started)


async def profiled(name: str, work: Coroutine[Any, Any, Any]) -> list[dict[str, Any]]:
    """Run something; print and return its kernels by the time they take in all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        await work
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows) or 1.0
    print(f"{name}: {total / 1e3:.1f} ms on the device\n{'share':>7}{'calls':>8}{'us each':>10}  kernel")
    for row in rows[:40]:
        share = row.device_time_total / total
        print(f"{share:>7.1%}{row.count:>8}{row.device_time_total / row.count:>10.1f}  {row.key[:90]}", flush=True)
    return [{"kernel": row.key, "calls": row.count, "us": row.device_time_total} for row in rows]


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; print as it comes."""
    rng = random.Random(0)
    config = EngineConfig(
        model=tiny_model(),
        hf_overrides=flash(args.layers),
        load_format="dummy",
        max_model_len=args.max_model_len,
        max_num_seqs=max(args.batch),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        deterministic=args.deterministic,
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    result: dict[str, Any] = {"device": device, "layers": args.layers, "torch": torch.__version__, "decode": []}
    started = time.perf_counter()
    async with AsyncLLM(config) as llm:
        result["start_s"] = time.perf_counter() - started
        print(f"{device}, V4-Flash/{args.layers}: started in {result['start_s']:.1f} s")
        plan = llm.memory()
        result["planned_bytes"] = plan.per_device[0].used
        if torch.cuda.is_available():
            result["measured_bytes"] = torch.cuda.max_memory_reserved()
        result["concurrent"] = plan.max_concurrency
        print(f"{plan}\nreserved {result.get('measured_bytes', 0) / 2**30:.2f} GiB")
        print(f"{'batch':>6}{'context':>9}{'step ms':>10}{'floor ms':>10}{'share':>8}{'host ms':>9}{'tok/s':>9}")
        for batch in args.batch:
            for context in args.context:
                measured = await decode(llm, batch, context, args.tokens, rng)
                floor = floor_bytes(args.layers, batch) / BYTES_PER_SECOND
                step = measured["step_s"]
                result["decode"].append({"batch": batch, "context": context, "floor_s": floor, **measured})
                print(
                    f"{batch:>6}{context:>9}{step * 1e3:>10.2f}{floor * 1e3:>10.2f}{floor / step:>8.2f}"
                    f"{measured['host_s'] * 1e3:>9.2f}{batch / step:>9.0f}",
                    flush=True,
                )
                if args.profile:
                    name = f"decode, batch {batch}, context {context}"
                    result[name] = await profiled(name, decode(llm, batch, context, 32, rng))
        if args.profile:
            result["prefill"] = await profiled("prefill, 8192 tokens", prefill(llm, 1, 8192, rng))
        for count, length in ((1, 8192), (64, 1024)):
            await prefill(llm, 1, length, rng)
            rate = await prefill(llm, count, length, rng)
            result[f"prefill_{count}x{length}"] = rate
            print(f"prefill {count} x {length}: {rate:,.0f} tokens/s", flush=True)
    return result


def ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten from ``low`` to ``high``."""
    every = [digit * 10.0**power for power in range(-3, 12) for digit in (1, 2, 5)]
    return [value for value in every if low <= value <= high]


def plot(result: dict[str, Any]) -> str:
    """Return tokens per second against batch as an SVG, logarithmic both ways: a line for each context, and the floor's, dashed."""
    width, height, left, right, top, bottom = 720, 460, 80, 150, 50, 60
    rows = result["decode"]
    curves = {
        f"context {context}": [(row["batch"], row["batch"] / row["step_s"]) for row in rows if row["context"] == context]
        for context in sorted({row["context"] for row in rows})
    }
    curves["bytes of weights"] = sorted({(row["batch"], row["batch"] / row["floor_s"]) for row in rows})
    batches = sorted({batch for points in curves.values() for batch, _ in points})
    rates = [rate for points in curves.values() for _, rate in points]
    low_x, high_x, low_y, high_y = batches[0] / 1.2, batches[-1] * 1.2, min(rates) / 1.3, max(rates) * 1.3

    def x(batch: float) -> str:
        return f"{left + (width - left - right) * math.log(batch / low_x) / math.log(high_x / low_x):.1f}"

    def y(rate: float) -> str:
        return f"{height - bottom - (height - top - bottom) * math.log(rate / low_y) / math.log(high_y / low_y):.1f}"

    title = escape(f"{result['device']}, V4-Flash/{result['layers']}: decoded tokens per second")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="28" font-size="15">{title}</text>',
    ]
    for batch in batches:
        parts.append(f'<line x1="{x(batch)}" x2="{x(batch)}" y1="{top}" y2="{height - bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{x(batch)}" y="{height - bottom + 20}" text-anchor="middle">{batch}</text>')
    for rate in ticks(low_y, high_y):
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y(rate)}" y2="{y(rate)}" stroke="#eee"/>')
        parts.append(f'<text x="{left - 8}" y="{y(rate)}" text-anchor="end" dominant-baseline="middle">{rate:,.0f}</text>')
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 18}" text-anchor="middle">sequences that decode together</text>')
    for i, (name, points) in enumerate(curves.items()):
        floor = i == len(curves) - 1
        stroke = 'stroke="#888" stroke-dasharray="5 4"' if floor else f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="2"'
        path = " ".join(f"{x(batch)},{y(rate)}" for batch, rate in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        parts += [] if floor else [f'<circle cx="{x(b)}" cy="{y(r)}" r="3" fill="{COLOURS[i % len(COLOURS)]}"/>' for b, r in points]
        at = top + 8 + 22 * i
        parts.append(f'<line x1="{width - right + 14}" x2="{width - right + 40}" y1="{at}" y2="{at}" {stroke}/>')
        parts.append(f'<text x="{width - right + 46}" y="{at}" dominant-baseline="middle">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="how many of the model's layers (default 8)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="sequences that decode together (default 1 8 64)")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="prompt tokens of each (default 1024)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to decode for each figure (default 96)")
    parser.add_argument("--max-model-len", type=int, default=16384, help="longest sequence (default 16384)")
    parser.add_argument("--deterministic", action="store_true", help="results independent of what shares the batch")
    parser.add_argument("--profile", action="store_true", help="list the kernels by their time")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw tokens per second against batch, with the floor, into this SVG file")
    args = parser.parse_args()
    result = asyncio.run(run(args))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    if args.plot:
        with open(args.plot, "w", encoding="utf-8") as file:
            file.write(plot(result))


if __name__ == "__main__":
    main()
