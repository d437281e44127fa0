"""Times the matrix products at V4-Flash's shapes: ``python tests/kernels/bench_gemm.py [--sweep]`` on a CUDA device.

Checks each product first. Replays a graph that walks through copies of the weights larger than the L2 cache.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dsv4lite.kernels import gemm_triton
from dsv4lite.kernels.gemm import float_linear_ref, fp8_linear_ref, fp8_weight_linear_ref
from dsv4lite.kernels.gemm_triton import float_linear_triton, fp8_linear_triton, fp8_weight_linear_triton
from dsv4lite.kernels.quantize import quantize_fp8

BANDWIDTH = 4.3e12  # bytes per second that an H200 copies at
ROTATED = 300 << 20
ROWS = (1, 8, 16, 32, 64, 128, 512, 8192)
FP8 = {"wq_a+wkv": (1536, 4096), "wq_b": (32768, 1024), "wq_b+index": (40960, 1024), "wo_b": (4096, 8192)}
PLAIN = {"csa compress_in": (2624, 4096), "hca compress_in": (1024, 4096), "gate": (256, 4096), "head": (129280, 4096)}
GROUPED = {"wo_a": (8, 1024, 4096)}

Product = Callable[[int], Tensor]


def microseconds(product: Product, copies: int) -> float:
    """Return the median time of one product over graph replays."""
    product(0)
    torch.cuda.synchronize()
    calls = max(copies, 4)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        product(0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                product(i % copies)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return sorted(times)[2]


def codes_of(*shape: int) -> tuple[Tensor, Tensor]:
    """Return random codes and scale bytes, one per 128 x 128."""
    codes = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    blocks = (-(-codes.flatten(0, -2).shape[0] // 128), -(-shape[-1] // 128))
    return codes, torch.randint(118, 123, blocks, device="cuda", dtype=torch.uint8)


def distance(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def case(kind: str, shape: tuple[int, ...], rows: int) -> tuple[Product, int, float, float]:
    """Return a product, how many copies of its weights there are, the bytes it must move, and its error."""
    size = 2 if kind == "plain" else 1
    count = size * torch.Size(shape).numel()
    copies = min(16, max(1, ROTATED // count))
    if kind == "plain":
        x = torch.randn(rows, 1, shape[-1], device="cuda").bfloat16()
        w = [(torch.randn(1, *shape, device="cuda") / 64).bfloat16() for _ in range(copies)]
        error = distance(float_linear_triton(x, w[0], torch.float32), float_linear_ref(x, w[0], torch.float32))
        return (
            lambda i: float_linear_triton(x, w[i], torch.float32),
            copies,
            count + 2 * x.numel() + 4 * rows * shape[0],
            error,
        )
    weights = [codes_of(*shape) for _ in range(copies)]
    if kind == "grouped":
        x = torch.randn(rows, shape[0], shape[-1], device="cuda").bfloat16()
        error = distance(fp8_weight_linear_triton(x, *weights[0]), fp8_weight_linear_ref(x, *weights[0]))
        moved = count + 2 * x.numel() + 2 * rows * shape[0] * shape[1]
        return lambda i: fp8_weight_linear_triton(x, *weights[i]), copies, moved, error
    codes, scales = quantize_fp8(torch.randn(rows, shape[-1], device="cuda"), 128)
    error = distance(fp8_linear_triton(codes, scales, *weights[0]), fp8_linear_ref(codes, scales, *weights[0]))
    return lambda i: fp8_linear_triton(codes, scales, *weights[i]), copies, count + codes.numel() + 2 * rows * shape[0], error


def main() -> None:
    """Print a table; with ``--sweep`` also other tiles."""
    print(f"{'matrix':<18}{'rows':>6}{'us':>9}{'TB/s':>7}{'floor':>7}{'TFLOP/s':>9}{'error':>10}")
    for kind, shapes in (("fp8", FP8), ("grouped", GROUPED), ("plain", PLAIN)):
        for (name, shape), rows in itertools.product(shapes.items(), ROWS):
            if name == "head" and rows > 128:
                continue
            product, copies, moved, error = case(kind, shape, rows)
            assert error < 5e-3, (name, rows, error)
            us = microseconds(product, copies)
            operations = 2 * rows * torch.Size(shape).numel()
            rate = moved / us * 1e6
            speed = f"{us:>9.1f}{rate / 1e12:>7.2f}{rate / BANDWIDTH:>7.0%}{operations / us / 1e6:>9.0f}"
            print(f"{name:<18}{rows:>6}{speed}{error:>10.1e}", flush=True)
            if "--sweep" in sys.argv:
                sweep(product, copies, rows)


def sweep(product: Product, copies: int, rows: int) -> None:
    """Print the best of other tiles for the same product."""
    chosen, least = gemm_triton.tile_for, min(128, max(16, 1 << (rows - 1).bit_length()))
    found = []
    for outs, warps, stages, swap in itertools.product((64, 128), (4, 8), (2, 3, 4, 6), (True, False)):
        if least == 16 and not swap:
            continue
        tile = gemm_triton.Tile(rows=least, outs=outs, swap=swap, num_warps=warps, num_stages=stages)
        gemm_triton.tile_for = lambda tiles, rows, capability, tile=tile: replace(tile)
        try:
            found.append((microseconds(product, copies), tile))
        except Exception as error:  # too much shared memory for this tile
            if "OutOfResources" not in type(error).__name__:
                raise
        finally:
            gemm_triton.tile_for = chosen
    for us, tile in sorted(found, key=lambda pair: pair[0])[:3]:
        print(f"    {us:>8.1f} us  {tile}", flush=True)


if __name__ == "__main__":
    main()
