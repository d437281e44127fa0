"""Time routed experts at V4-Flash's shapes: ``python -m examples.benchmarks.kernels.experts [FORMAT] [--sweep]`` on a CUDA device.

FORMAT is ``fp4`` (the default), or ``int4`` in groups of 128, ``nvfp4`` or ``bf16``, whose inputs are bfloat16.

Checks the result first. Replays a graph that walks through layers of weights, each far larger than the L2 cache.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from dsv4lite.kernels.experts import ExpertInputs, ExpertSum, Tiles, experts_forward, experts_outputs, scale_words, sum_experts
from dsv4lite.kernels.experts.grouping_triton import BlockConfig
from dsv4lite.kernels.experts.triton import experts_outputs_triton
from dsv4lite.kernels.experts.weight_only_triton import weight_only_outputs_triton
from dsv4lite.kernels.quantize import quantize_fp8
from examples.benchmarks.kernels.timing import BANDWIDTH, distance, four_bit, microseconds

HIDDEN, WIDTH, EXPERTS, TOP_K = 4096, 2048, 256, 6
COPIES = 3
SWEEP = tuple(
    BlockConfig(rows=rows, tiles=tiles, num_warps=warps, num_stages=stages)
    for rows, tiles, warps, stages in (
        (32, 2, 4, 4),
        (64, 2, 4, 3),
        (64, 2, 8, 4),
        (64, 4, 8, 3),
        (64, 4, 16, 4),
        (128, 1, 4, 3),
        (128, 2, 8, 3),
        (128, 2, 16, 3),
    )
)
TOKENS = (1, 2, 4, 8, 16, 64, 256, 2048, 8192)


def tiles(rows: int, columns: int) -> Tiles:
    """Return random FP4 matrices."""
    codes, scales = Tiles.shapes(EXPERTS, rows, columns, fp4=True)
    return Tiles(
        torch.randint(0, 256, codes, dtype=torch.uint8, device="cuda"),
        scale_words(torch.randint(118, 120, (*scales, 4), device="cuda"), torch.tensor([92], device="cuda"))[..., 0],
    )


def matrices(rows: int, columns: int) -> torch.Tensor:
    """Return random matrices in bfloat16."""
    return torch.empty(EXPERTS, rows, columns, dtype=torch.bfloat16, device="cuda").normal_(std=columns**-0.5)


FORMATS = {
    "fp4": (tiles, experts_outputs_triton),
    "int4": (partial(four_bit, EXPERTS, nvfp4=False), weight_only_outputs_triton),
    "nvfp4": (partial(four_bit, EXPERTS, nvfp4=True), weight_only_outputs_triton),
    "bf16": (matrices, weight_only_outputs_triton),
}
BYTES = {"fp4": 1 / 2 + 1 / 32, "int4": 1 / 2 + 3 / 128, "nvfp4": 1 / 2 + 1 / 16, "bf16": 2}  # of a weight


def main() -> None:
    """Print a table; with ``--sweep`` also other blocks for many tokens."""
    name = next((word for word in sys.argv[1:] if word in FORMATS), "fp4")
    make, outputs = FORMATS[name]
    layers = [(make(2 * WIDTH, HIDDEN), make(HIDDEN, WIDTH)) for _ in range(COPIES)]
    print(f"{'tokens':>7}{'experts':>9}{'us':>9}{'TB/s':>7}{'roofline':>10}{'TFLOP/s':>9}{'error':>10}")
    for tokens in TOKENS:
        given_x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        x = quantize_fp8(given_x, 128) if name == "fp4" else (given_x, None)
        chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.sort(-1).values
        weight = torch.rand(tokens, TOP_K, device="cuda")
        used = len(chosen.unique())
        error = 0.0
        if tokens <= 64:
            given = ExpertInputs(*x, chosen, weight, *layers[0], 10.0)
            parts = ExpertSum(chosen, experts_outputs.reference(given), None, EXPERTS)
            error = distance(experts_forward(given), sum_experts.reference(parts))
            assert error < 5e-3, error

        def run(
            i: int,
            block: BlockConfig | None = None,
            args: tuple = (*x, chosen, weight),  # type: ignore[type-arg]
        ) -> torch.Tensor:
            given = ExpertInputs(*args, *layers[i], 10.0)
            return sum_experts(ExpertSum(given.slots_TK, outputs(given, block=block), None, EXPERTS))

        us = microseconds(run, COPIES)
        moved = used * 3 * HIDDEN * WIDTH * BYTES[name]
        rate, operations = moved / us * 1e6, 6 * tokens * TOP_K * HIDDEN * WIDTH
        speed = f"{us:>9.1f}{rate / 1e12:>7.2f}{rate / BANDWIDTH:>10.0%}{operations / us / 1e6:>9.0f}"
        print(f"{tokens:>7}{used:>9}{speed}{error:>10.1e}", flush=True)
        if "--sweep" in sys.argv and tokens >= 2048:
            for block in SWEEP:
                us = microseconds(lambda i, block=block: run(i, block), COPIES)  # type: ignore[misc]
                same = "same bits" if torch.equal(run(0, block), run(0)) else "OTHER BITS"
                print(f"    {us:>8.1f} us{operations / us / 1e6:>6.0f} TFLOP/s  {same}  {block}", flush=True)


if __name__ == "__main__":
    main()
