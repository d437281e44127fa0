"""Measure the gain of rebalancing experts when some are much more popular than others.

    python -m examples.benchmarks.balancing --layers 2 --ep 2                        # V4-Flash's shapes on two GPUs
    python -m examples.benchmarks.balancing --model shipped --layers 2 --device cpu --dp 2 --ep 2 --batch 4 --prompts 4x64 \\
        --tokens 8 --redundant-experts 2 --rebalance-steps 60

Writes a checkpoint with random weights (3.4 GB a layer of V4-Flash; ``--folder`` keeps it). Biases of its routers make tokens
choose experts by Zipf's law, with other popular experts in every layer. Prints the busiest rank's load over the average, the rate
of prefill and the time of a decode step before and after experts have moved, and whether the same requests gave the same bits.
Once experts have moved, a token's experts are summed in another order, except by ``all_to_all``, which ``--dp`` takes on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dsv4lite import AsyncLLM, RequestOutput, SamplingParams, tiny_model
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.weights.checkpoint import read_config, write_tensors
from dsv4lite.weights.dummy import dummy_tensors
from examples.benchmarks.engine import MODELS, decode, params, prefill, prompts_of

VOCAB = 8192  # a small one, for a small checkpoint
SHARD_BYTES = 2 << 30


def biases(experts: int, per_token: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Return biases, float32 [experts], with which random scores choose experts, in a random order, by Zipf's law."""
    wanted = torch.arange(1, experts + 1, dtype=torch.float32) ** -exponent
    wanted = (wanted / wanted.sum())[torch.randperm(experts, generator=generator)]
    scores = softplus(torch.randn(2048, experts, generator=generator)).sqrt()
    bias, least = torch.zeros(experts), 0.1 / scores.shape[0] / per_token
    for _ in range(100):
        chosen = (scores + bias).topk(per_token, dim=1).indices
        load = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
        bias += 0.1 * (wanted.log() - load.clamp_min(least).log())
    return bias


def write_skewed(folder: Path, args: argparse.Namespace) -> None:
    """Write the checkpoint."""
    ours = {"vocab_size": VOCAB, "num_hash_layers": 0, "num_nextn_predict_layers": 0}
    config = {**read_config(Path(tiny_model())), **MODELS[args.model](args.layers), **ours}
    model = parse_config(config)
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in dummy_tensors(model, V4_TENSORS, expert_format="fp4", quantized=True, device=device):
            skewed = name.endswith("gate.bias")
            yield name, biases(model.num_experts, model.experts_per_token, args.exponent, generator) if skewed else tensor.cpu()

    shard: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)

    def flush() -> None:
        file = f"model-{len(set(files.values())):05}.safetensors"
        write_tensors(folder / file, shard, {})
        files.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors():
        shard[name] = tensor
        if sum(part.nbytes for part in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(config))


class Moves(logging.Handler):
    """Collects the engine's log of moved experts: the busiest rank's load before and after, matrices, seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, float, int, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("experts rebalanced") and isinstance(record.args, tuple):
            self.found.append(record.args)  # type: ignore[arg-type]


async def outputs(llm: AsyncLLM, args: argparse.Namespace) -> list[RequestOutput]:
    """Return the outputs of a few requests that all start in the same step."""
    rng = random.Random(1)
    greedy = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False, logprobs=0)
    async with llm.paused():
        prompts = [[rng.randrange(16, 4000) for _ in range(50 + 10 * i)] for i in range(4)]
        tasks = [asyncio.create_task(llm.generate(prompt, greedy)) for prompt in prompts]
        await asyncio.sleep(0.1)  # until all are queued
    return await asyncio.gather(*tasks)


def same_bits(left: RequestOutput, right: RequestOutput) -> bool:
    """Return whether two outputs have the same tokens with the same log-probabilities."""
    a, b = left.outputs[0], right.outputs[0]
    assert a.logprobs is not None and b.logprobs is not None
    return a.token_ids == b.token_ids and torch.equal(a.logprobs.sampled, b.logprobs.sampled)


async def measure(llm: AsyncLLM, args: argparse.Namespace, moves: Moves) -> dict[str, Any]:
    """Measure before and after experts have moved; then let them move again, which logs the loads in between."""
    phases: list[dict[str, Any]] = []
    for number in range(2):
        given = await outputs(llm, args)
        rng = random.Random(2)
        await prefill(llm, *args.prompts, rng)
        rate = await prefill(llm, *args.prompts, rng)
        step = (await decode(llm, args.batch, 64, args.tokens, rng))["step_s"]
        if len(moves.found) > number:
            raise SystemExit(
                f"experts moved while steps were measured, of which there were {llm.stats().steps}: raise --rebalance-steps"
            )
        phases.append({"given": given, "prefill": rate, "step_s": step})
        while len(moves.found) == number:
            await llm.generate([random.randrange(16, 4000) for _ in range(64)], params(16))
    (uneven, planned, matrices, seconds), (even, *_) = moves.found[:2]
    equal = [same_bits(a, b) for a, b in zip(phases[0].pop("given"), phases[1].pop("given"), strict=True)]
    return {
        "busiest": (uneven, even),
        "planned": planned,
        "matrices": matrices,
        "move_s": seconds,
        "equal": sum(equal),
        "outputs": len(equal),
        **{name: tuple(phase[name] for phase in phases) for name in phases[0]},
    }


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start an engine and measure it; print and return the figures."""
    if not (folder / "config.json").exists():  # which is written last
        started = time.perf_counter()
        write_skewed(folder, args)
        print(f"checkpoint written in {time.perf_counter() - started:.1f} s", flush=True)
    moves, log = Moves(), logging.getLogger("dsv4lite.engine")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(moves)
    llm = AsyncLLM(
        str(folder),
        tokenizer=tiny_model(),
        device=args.device,
        max_model_len=4096,
        max_num_seqs=max(args.batch, 8),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        deterministic=args.deterministic,
        tensor_parallel_size=args.tp,
        data_parallel_size=args.dp,
        expert_parallel_size=args.ep,
        dispatcher=args.dispatcher,
        redundant_experts=args.redundant_experts,
        rebalance_steps=args.rebalance_steps,
        executor="thread",  # whose rank 0 tells us of the moves
        start_timeout_s=args.timeout,
        step_timeout_s=args.timeout,
    )
    try:
        async with llm:
            result = await measure(llm, args, moves)
    finally:
        log.removeHandler(moves)
        log.setLevel(level)
    layout = f"V4-{args.model.capitalize()}/{args.layers}, {llm.config.layout}, dispatcher {args.dispatcher}"
    print(f"{layout}, {args.redundant_experts} redundant experts\n{'':<32}{'before':>10}{'after':>10}{'ratio':>8}")
    for name, digits, key, factor in (
        ("busiest rank's load / average", 2, "busiest", 1.0),
        ("prefill, tokens/s", 0, "prefill", 1.0),
        (f"decode step, batch {args.batch}, ms", 2, "step_s", 1e3),
    ):
        before, after = (factor * value for value in result[key])
        print(f"{name:<32}{before:>10,.{digits}f}{after:>10,.{digits}f}{after / before:>8.2f}")
    print(f"{result['matrices']} matrices of rank 0 moved in {result['move_s']:.1f} s; planned load {result['planned']:.2f}")
    print(f"same bits: {result['equal']} of {result['outputs']} outputs", flush=True)
    return {"layout": layout, **result}


def arguments(line: list[str] | None = None) -> argparse.Namespace:
    """Read a command line, by default this program's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="flash", help="whose shapes (default flash)")
    parser.add_argument("--layers", type=int, default=2, help="how many of its layers (default 2)")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default auto)")
    for axis, size in (("tp", 1), ("dp", 1), ("ep", 2)):
        parser.add_argument(f"--{axis}", type=int, default=size, help=f"ranks along the axis {axis} (default {size})")
    parser.add_argument("--dispatcher", default="auto", help="how tokens get to their experts (default auto)")
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law (default 1)")
    parser.add_argument("--redundant-experts", type=int, default=16, help="slots for copies (default 16)")
    parser.add_argument("--rebalance-steps", type=int, default=1000, help="steps until experts move (default 1000)")
    parser.add_argument("--batch", type=int, default=64, help="sequences that decode together (default 64)")
    parser.add_argument(
        "--prompts", type=prompts_of, default=(32, 1024), metavar="COUNTxTOKENS", help="to prefill (default 32x1024)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode (default 64)")
    parser.add_argument("--deterministic", action="store_true", help="results independent of what shares the batch")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the start, and for a step (default 600)")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint: read if there is one, else written")
    parser.add_argument("--prepare", action="store_true", help="only write the checkpoint")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args(line)
    if args.prepare and args.folder is None:
        parser.error("--prepare needs --folder")
    return args


def main() -> None:
    args = arguments()
    if args.prepare:
        write_skewed(args.folder, args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = asyncio.run(run(args, args.folder or Path(scratch)))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
