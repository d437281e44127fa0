"""Time the experts of few tokens at V4-Flash's shapes, on a CUDA device.

    python -m examples.benchmarks.kernels.experts_decode_small [--width 1024]

Everything between the first products and the sum over experts, in six launches and in three, after checking that both give the
same bits. ``--width`` is that of a rank's part of each expert. Replays a graph that walks through layers of weights, each
far larger than the L2 cache.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertInputs, experts_forward, sum_experts
from dsv4lite.kernels.experts.decode_small import MoeInputs
from dsv4lite.kernels.experts.decode_small_triton import moe_decode_small_triton
from dsv4lite.kernels.gemm.triton import fp8_linear_triton
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.kernels.routing import Router
from dsv4lite.kernels.routing.triton import route_triton
from dsv4lite.kernels.swiglu.triton import swiglu_quantize_triton
from examples.benchmarks.kernels.experts import EXPERTS, HIDDEN, TOP_K, WIDTH, tiles
from examples.benchmarks.kernels.timing import microseconds

COPIES = 3
LIMIT = 10.0
TOKENS = (1, 2, 4, 8, 16)


def main() -> None:
    """Print a table: microseconds of all launches, and of parts of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=WIDTH)
    width = parser.parse_args().width
    layers = [(tiles(2 * width, HIDDEN), tiles(HIDDEN, width)) for _ in range(COPIES)]
    shared = [
        (
            torch.randn(HIDDEN, width, device="cuda").to(torch.float8_e4m3fn),
            torch.randint(117, 124, (HIDDEN // 128, width // 128), dtype=torch.uint8, device="cuda"),
        )
        for _ in range(COPIES)
    ]
    print(f"{'tokens':>7}{'alone':>9}{'decode_small':>14}{'routed':>9}")
    for tokens in TOKENS:
        x = quantize_fp8(torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), 128)
        logits, h = torch.randn(tokens, EXPERTS, device="cuda"), torch.randn(tokens, 2 * width, device="cuda").bfloat16()
        ids = torch.arange(tokens, dtype=torch.int32, device="cuda")
        router = Router(TOP_K, 1.5, torch.rand(EXPERTS, device="cuda"), None, ids, ids)

        def alone(i: int, logits: Tensor = logits, router: Router = router, x: tuple = x, h: Tensor = h) -> Tensor:  # type: ignore[type-arg]
            chosen = route_triton(logits, router)
            added = fp8_linear_triton(*swiglu_quantize_triton(h, LIMIT), *shared[i], row_tile=1)
            return experts_forward(ExpertInputs(*x, *chosen, *layers[i], LIMIT), added)

        def few(i: int, logits: Tensor = logits, router: Router = router, x: tuple = x, h: Tensor = h) -> Tensor:  # type: ignore[type-arg]
            return sum_experts(moe_decode_small_triton(MoeInputs(logits, router, *x, h, *shared[i], *layers[i], LIMIT)))

        assert all(torch.equal(alone(i), few(i)) for i in range(COPIES)), "other bits"
        chosen = route_triton(logits, router._replace(positions_T=None))
        times = [
            microseconds(op, COPIES)
            for op in (
                alone,
                few,
                lambda i, x=x, chosen=chosen: experts_forward(ExpertInputs(*x, *chosen, *layers[i], LIMIT)),  # type: ignore[misc]
            )
        ]
        print(f"{tokens:>7}{times[0]:>9.1f}{times[1]:>14.1f}{times[2]:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
