"""Measure dsv4lite on one or several GPUs by batch and context: layers of a model's real shapes, with random weights.

    python -m examples.benchmarks.engine --layers 8 --batch 1 8 64              # a table
    python -m examples.benchmarks.engine --layers 24 --batch 1 --json out.json
    python -m examples.benchmarks.engine --batch 1 2 4 8 16 32 64 128 --context 1024 8192 --plot throughput.svg
    python -m examples.benchmarks.engine --layers 43 --ep 2 --dp 2 --batch 1 8 64 256
    python -m examples.benchmarks.engine --model pro --layers 8 --tp 4 --batch 1 8 64
    python -m examples.benchmarks.engine --model v2-lite --layers 27 --batch 1 8 64 256
    python -m examples.benchmarks.engine --model shipped --layers 6 --device cpu --tp 2 --batch 1 4 --context 64 --prefill 1x256

Prints the parts of the start time; the time of a decode step, its roofline (the bytes of weights that it must read) and the host's
part of it; the rate of prefill; and the number of sequences that fit. Random weights need no download (V4-Flash: 3.4 GB a layer).

With several GPUs the roofline is the bytes that one of them must read, and the replicas share a batch. ``profile.py`` shows where
the time of a step goes.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import logging
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dsv4lite import AsyncLLM, EngineConfig, SamplingParams, tiny_model
from dsv4lite.device import choose_device
from dsv4lite.layout import AXES, Layout
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.family import FAMILIES, Family
from dsv4lite.models.shard import ModelShard
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.planning.memory import choose_numerics, weight_bytes
from dsv4lite.planning.roofline import weights_read
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.source import ModelSource

BYTES_PER_SECOND = 4.3e12  # an H200's copy rate


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


def pro(layers: int) -> dict[str, Any]:
    """Return V4-Pro's configuration with ``layers`` layers, as overrides of another model's."""
    ratios = [128, 128] + [4, 128] * layers
    return {
        **flash(layers),
        "hidden_size": 7168,
        "compress_ratios": [*ratios[:layers], 0],
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "index_topk": 1024,
    }


def shipped(layers: int) -> dict[str, Any]:
    """Return the overrides that give the checkpoint that ships with the package ``layers`` layers."""
    return {"num_hidden_layers": layers, "compress_ratios": [*([0, 0] + [4, 128] * layers)[:layers], 0]}


def v2_lite(layers: int) -> dict[str, Any]:
    """Return V2-Lite's configuration with ``layers`` layers."""
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    return {
        "model_type": "deepseek_v2",
        "torch_dtype": "bfloat16",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "rope_theta": 10000,
        "rope_scaling": {**scaling, "mscale": 0.707, "mscale_all_dim": 0.707},
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
    }


def v3(layers: int) -> dict[str, Any]:
    """Return V3's configuration with ``layers`` layers, one of them dense (V3 has three dense layers of 61)."""
    lite = v2_lite(layers)
    return {
        **lite,
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {**lite["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }


def v32(layers: int) -> dict[str, Any]:
    """Return V3.2's configuration with ``layers`` layers, one of them dense."""
    own = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    like = v3(layers)
    return {**like, **own, "quantization_config": {**like["quantization_config"], "scale_fmt": "ue8m0"}}


MODELS = {"flash": flash, "pro": pro, "shipped": shipped, "v2-lite": v2_lite, "v3": v3, "v3.2": v32}


def roofline_bytes(
    model: ModelConfig, numerics: Numerics, layout: Layout, batches: Sequence[int], family: Family = FAMILIES["deepseek_v4"]
) -> list[float]:
    """Return the bytes of weights that a step of each batch must read on one GPU, summed over the pipeline's stages."""
    totals = [0.0] * len(batches)
    for rank in range(0, layout.world, layout.stage):
        mesh = Mesh.outline(layout, rank)
        shard = ModelShard.of(model, family.tensors, mesh)
        weights = weight_bytes(family, model, numerics, mesh, with_mtp=False)
        for i, batch in enumerate(batches):
            totals[i] += weights_read(model, numerics, shard, weights, batch / layout.dp)
    return totals


def params(count: int) -> SamplingParams:
    """Return parameters that generate exactly ``count`` tokens."""
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


async def decode(llm: AsyncLLM, batch: int, context: int, tokens: int, rng: random.Random) -> dict[str, float]:
    """Return the seconds of a step that decodes ``batch`` sequences, measured at one of their streams, and the host's part."""

    def prompt() -> list[int]:
        return [rng.randrange(3, 4000) for _ in range(context)]

    async def report() -> None:
        while True:  # prompts of thousands of sequences take minutes
            await asyncio.sleep(20)
            now = llm.stats()
            print(
                f"{now.num_running:,} sequences, {now.prompt_tokens:,} prompt tokens, {now.kv_usage:.0%} of the KV cache",
                flush=True,
            )

    times, host = [], []
    reports = asyncio.create_task(report())
    long_enough = min(tokens + 64 + 8 * batch, llm.config.max_model_len - context)
    others = [asyncio.create_task(llm.generate(prompt(), params(long_enough))) for _ in range(batch - 1)]
    await asyncio.sleep(0.05)
    async with llm.stream(prompt(), params(tokens)) as stream:  # starts last: the others are decoding by then
        async for delta in stream:
            times.extend([time.perf_counter()] * len(delta.token_ids))
            host.append(llm.stats().host_s)
    gaps = [b - a for a, b in pairwise(times)][tokens // 2 :]
    reports.cancel()
    llm.abort()
    await asyncio.gather(*others)
    return {"step_s": statistics.median(gaps), "host_s": statistics.median(host[tokens // 2 :])}


async def prefill(llm: AsyncLLM, count: int, length: int, rng: random.Random) -> float:
    """Return prompt tokens per second."""
    prompts = [[rng.randrange(3, 4000) for _ in range(length)] for _ in range(count)]
    started = time.perf_counter()
    await llm.generate_batch(prompts, params(1))
    return count * length / (time.perf_counter() - started)


def written(config: dict[str, Any]) -> str:
    """Return a folder with this ``config.json`` and the tokenizer of the checkpoint that ships with the package."""
    folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
    atexit.register(shutil.rmtree, folder)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_model(), name), folder)
    return str(folder)


def configured(args: argparse.Namespace) -> EngineConfig:
    """Return the settings of the engine to measure."""
    shapes = MODELS[args.model](args.layers)
    whole = "model_type" in shapes
    return EngineConfig(
        model=written(shapes) if whole else tiny_model(),
        hf_overrides={} if whole else shapes,
        load_format="dummy",
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=-(-max(args.batch) // args.dp),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        deterministic=args.deterministic,
        tensor_parallel_size=args.tp,
        expert_parallel_size=args.ep,
        data_parallel_size=args.dp,
        pipeline_parallel_size=args.pp,
        redundant_experts=args.redundant_experts,
        executor=args.executor,
        compile_cache_dir=args.compile_cache,
        start_timeout_s=args.timeout,
        step_timeout_s=args.timeout,
    )


async def measure(llm: AsyncLLM, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure a started engine; print each result at once."""
    rng, config = random.Random(0), llm.config
    source = ModelSource.open(config)
    numerics = choose_numerics(config, source, choose_device(config))
    print(f"{'batch':>6}{'context':>9}{'step ms':>10}{'roof ms':>10}{'share':>8}{'host ms':>9}{'tok/s':>9}")
    must_read = roofline_bytes(source.model, numerics, config.layout, args.batch, source.family)
    rooflines = [count / BYTES_PER_SECOND for count in must_read]
    for batch, roofline in zip(args.batch, rooflines, strict=True):
        for context in args.context:
            measured = await decode(llm, batch, context, args.tokens, rng)
            step = measured["step_s"]
            result["decode"].append({"batch": batch, "context": context, "roofline_s": roofline, **measured})
            row = f"{batch:>6}{context:>9}{step * 1e3:>10.2f}{roofline * 1e3:>10.2f}{roofline / step:>8.2f}"
            print(f"{row}{measured['host_s'] * 1e3:>9.2f}{batch / step:>9.0f}", flush=True)
    for count, length in args.prefill:
        await prefill(llm, 1, length, rng)
        rate = await prefill(llm, count, length, rng)
        result[f"prefill_{count}x{length}"] = rate
        print(f"prefill {count} x {length}: {rate:,.0f} tokens/s", flush=True)


def device_name(args: argparse.Namespace) -> str:
    """Return the name of the GPU that engines will use, or ``cpu``."""
    return torch.cuda.get_device_name() if args.device != "cpu" and torch.cuda.is_available() else "cpu"


def model_name(args: argparse.Namespace) -> str:
    """Return the model's name and its number of layers."""
    return ("" if args.model.startswith("v") else "V4-") + f"{args.model.title()}/{args.layers}"


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine and measure it."""
    config = configured(args)
    device = device_name(args)
    on_gpu = device != "cpu"
    name = model_name(args) + (f", {config.layout}" if config.layout.world > 1 else "")
    result: dict[str, Any] = {
        "device": device,
        "model": name,
        "layers": args.layers,
        "ranks": config.layout.world,
        "torch": torch.__version__,
        "decode": [],
    }
    started = time.perf_counter()
    async with AsyncLLM(config) as llm:
        result["start_s"] = time.perf_counter() - started
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()  # random weights take more while they are made
        print(f"{device}, {name}: started in {result['start_s']:.1f} s")
        plan = llm.memory()
        result["planned_bytes"] = plan.per_device[0].used
        result["concurrent"] = plan.max_concurrency
        print(plan)
        await measure(llm, args, result)
        if on_gpu:
            result["measured_bytes"] = torch.cuda.max_memory_reserved()
            print(f"reserved by this process since then, at most {result['measured_bytes'] / 2**30:.2f} GiB")
    result["host_bytes"] = 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"host memory, most of a rank: {result['host_bytes'] / 2**30:.2f} GiB")
    return result


def prompts_of(text: str) -> tuple[int, int]:
    """Read ``64x1024`` as 64 prompts of 1024 tokens."""
    count, length = text.split("x")
    return int(count), int(length)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``configured`` reads besides ``--batch``."""
    parser.add_argument("--model", choices=tuple(MODELS), default="flash", help="whose shapes (default flash)")
    parser.add_argument("--layers", type=int, default=8, help="how many of the model's layers (default 8)")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"ranks along the axis {axis} (default 1)")
    parser.add_argument("--redundant-experts", type=int, help="slots for copies of popular experts")
    parser.add_argument("--executor", default="auto", help="where ranks run: thread or process (default auto)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the start, and for a step (default 600)")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default auto)")
    parser.add_argument("--max-model-len", type=int, default=16384, help="longest sequence (default 16384)")
    parser.add_argument("--deterministic", action="store_true", help="results independent of what shares the batch")
    parser.add_argument("--compile-cache", metavar="DIR", help="where compiled kernels are kept (default the package's own place)")


def engine_options(args: argparse.Namespace) -> list[str]:
    """Return the options of ``add_engine_options`` as a command line."""
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    given = [(action.option_strings[0], getattr(args, action.dest), action.nargs) for action in parser._actions[1:]]
    line = [[name] if nargs == 0 else [name, str(value)] for name, value, nargs in given if value not in (None, False)]
    return [word for words in line for word in words]


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line, by default this program's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="sequences that decode together (default 1 8 64)")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="prompt tokens of each (default 1024)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to decode for each figure (default 96)")
    sizes: dict[str, Any] = {"type": prompts_of, "nargs": "*", "default": [(1, 8192), (64, 1024)], "metavar": "COUNTxTOKENS"}
    parser.add_argument("--prefill", **sizes, help="prompts to prefill (default 1x8192 64x1024)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw tokens per second against batch, with the roofline, into this file (SVG, PNG, ...)"
    )
    return parser.parse_args(line)


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    result = asyncio.run(run(args))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    if args.plot:
        from examples.benchmarks.plots import rates

        rates(result).savefig(args.plot)


if __name__ == "__main__":
    main()
