"""Time products of V4-Flash, V3 and V2-Lite, in FP8, four bits and bfloat16, and the best token of a row, on a CUDA device.

    python -m examples.benchmarks.kernels.gemm [--only wo_a,wq_b] [--rows 1,16,64] [--tp 2] [--sweep]

Checks each product first. ``--tp`` takes V4-Flash's matrices as a rank of so many has them. Replays a graph that walks through
copies of the weights larger than the L2 cache. ``--sweep`` also tries other tiles, and then the best of them with other numbers of
parts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from dsv4lite.kernels.experts.weight_only_triton import four_bit_linear_triton
from dsv4lite.kernels.four_bit import four_bit_linear
from dsv4lite.kernels.gemm import ROW_TILE, float_linear, fp8_linear, fp8_weight_linear
from dsv4lite.kernels.gemm import triton as gemm_triton
from dsv4lite.kernels.gemm.triton import float_linear_triton, fp8_linear_triton, fp8_weight_linear_triton
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling.triton import argmax_finite_triton
from examples.benchmarks.kernels.timing import BANDWIDTH, ROTATED, distance, four_bit, microseconds

ROWS = (1, 8, 16, 32, 64, 128, 512, 8192)
FP8 = {"wq_a+wkv": (1536, 4096), "wq_b": (32768, 1024), "wq_b+index": (40960, 1024), "wo_b": (4096, 8192)}
V3 = {
    "v3 wq_a+wkv_a": (2112, 7168),
    "v3 wq_b": (24576, 1536),
    "v3 wo": (7168, 16384),
    "v3 gate+up": (4096, 7168),
    "v3 down": (7168, 2048),
}
INT4 = {name.replace("v3", "int4"): shape for name, shape in V3.items()}  # in groups of 128
NVFP4 = {name.replace("v3", "nvfp4"): shape for name, shape in V3.items()}
PLAIN = {"csa compress_in": (2624, 4096), "hca compress_in": (1024, 4096), "gate": (256, 4096), "head": (129280, 4096)}
LITE = {"lite wq+wkv_a": (3648, 2048), "lite wo": (2048, 2048), "lite gate+up": (5632, 2048), "lite down": (2048, 2816)}
GROUPED = {"wo_a": (8, 1024, 4096)}

KINDS = {"fp8": FP8, "v3": V3, "int4": INT4, "nvfp4": NVFP4, "grouped": GROUPED, "plain": PLAIN | LITE}

CUT = {"wq_b": 0, "wq_b+index": 0, "wo_b": 1, "head": 0, "wo_a": 0}  # the axis of which ranks of tp have parts
INDEX_ROWS = 8192  # of wq_b+index, which all ranks have

Product = Callable[[int], Tensor]


def of_rank(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Return the shape of what a rank of ``tp`` has of a matrix."""
    if name not in CUT:
        return shape
    whole = INDEX_ROWS if name == "wq_b+index" else 0
    return tuple((size - whole) // tp + whole if axis == CUT[name] else size for axis, size in enumerate(shape))


def codes_of(*shape: int, floats: bool = False) -> tuple[Tensor, Tensor]:
    """Return random codes and scales, one per 128 x 128: bytes, or float32 as V3 has them."""
    codes = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    blocks = (-(-codes.flatten(0, -2).shape[0] // 128), -(-shape[-1] // 128))
    if floats:
        return codes, torch.rand(blocks, device="cuda") / 64 + 0.01
    return codes, torch.randint(118, 123, blocks, device="cuda", dtype=torch.uint8)


def case(kind: str, shape: tuple[int, ...], rows: int, row_tile: int | None) -> tuple[Product, int, float, float]:
    """Return a product, how many copies of its weights there are, the bytes it must move, and its error."""
    size = 2 if kind == "plain" else 1
    count = size * torch.Size(shape).numel()
    copies = min(16, max(1, ROTATED // count))
    if kind == "plain":
        x = torch.randn(rows, 1, shape[-1], device="cuda").bfloat16()
        w = [(torch.randn(1, *shape, device="cuda") / 64).bfloat16() for _ in range(copies)]

        def plain(i: int) -> Tensor:
            return float_linear_triton(x, w[i], torch.float32, row_tile=row_tile)

        error = distance(plain(0), float_linear.reference(x, w[0], torch.float32))
        return plain, copies, count + 2 * x.numel() + 4 * rows * shape[0], error
    if kind in ("int4", "nvfp4"):
        given = torch.randn(rows, shape[-1], device="cuda").bfloat16()
        matrices = [four_bit(*shape, nvfp4=kind == "nvfp4") for _ in range(2 * copies)]

        def packed(i: int) -> Tensor:
            return four_bit_linear_triton(given, matrices[i], torch.bfloat16)

        error = distance(packed(0), four_bit_linear.reference(given, matrices[0], torch.bfloat16))
        moved = sum(part.nbytes for part in matrices[0]) + given.nbytes + 2 * rows * shape[0]
        return packed, len(matrices), moved, error
    weights = [codes_of(*shape, floats=kind == "v3") for _ in range(copies)]
    if kind == "grouped":
        x = torch.randn(rows, shape[0], shape[-1], device="cuda").bfloat16()

        def grouped(i: int) -> Tensor:
            return fp8_weight_linear_triton(x, *weights[i], row_tile=row_tile)

        error = distance(grouped(0), fp8_weight_linear.reference(x, *weights[0]))
        return grouped, copies, count + 2 * x.numel() + 2 * rows * shape[0] * shape[1], error
    codes, scales = quantize_fp8(torch.randn(rows, shape[-1], device="cuda"), 128)

    def fp8(i: int) -> Tensor:
        return fp8_linear_triton(codes, scales, *weights[i], row_tile=row_tile)

    error = distance(fp8(0), fp8_linear.reference(codes, scales, *weights[0]))
    return fp8, copies, count + codes.numel() + 2 * rows * shape[0], error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="names of matrices, or argmax, with commas between")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    counts = [int(rows) for rows in options.rows.split(",")]
    print(f"{'matrix':<18}{'rows':>6}{'us':>9}{'TB/s':>7}{'roofline':>10}{'TFLOP/s':>9}{'error':>10}")
    for kind, shapes in KINDS.items():
        for (name, whole), rows in itertools.product(shapes.items(), counts):
            shape = of_rank(name, whole, options.tp)
            if (only and name not in only) or (name == "head" and rows > 128):
                continue
            for row_tile in (ROW_TILE,) if 1 < rows <= 128 else (ROW_TILE, None):  # the others may have other kernels in any order
                product, copies, moved, error = case(kind, shape, rows, row_tile)
                assert error < 5e-3, (name, rows, error)
                us = microseconds(product, copies)
                operations = 2 * rows * torch.Size(shape).numel()
                rate = moved / us * 1e6
                speed = f"{us:>9.1f}{rate / 1e12:>7.2f}{rate / BANDWIDTH:>10.0%}{operations / us / 1e6:>9.0f}"
                print(f"{name:<18}{rows:>6}{speed}{error:>10.1e}{'' if row_tile else '  any order'}", flush=True)
                if options.sweep and row_tile:
                    sweep(product, copies, rows, outs=torch.Size(shape[:-1]).numel(), blocks=shape[-1] // 128)
    if not only or "argmax" in only:
        best_tokens(counts)


def best_tokens(counts: list[int]) -> None:
    """Time the best token of V4's vocabulary against the library's."""
    for rows in counts:
        if rows <= 512:
            copies = [torch.randn(rows, 129280, device="cuda") for _ in range(max(1, min(16, ROTATED // (rows * 517120))))]
            for got, wanted in zip(argmax_finite_triton(copies[0]), argmax_finite.reference(copies[0]), strict=True):
                assert torch.equal(got, wanted)
            ours = microseconds(lambda i, copies=copies: argmax_finite_triton(copies[i])[1], len(copies))
            library = microseconds(lambda i, copies=copies: argmax_finite.reference(copies[i])[1], len(copies))
            rate = copies[0].nbytes / ours / 1e6
            print(f"{'argmax':<18}{rows:>6}{ours:>9.1f}{rate:>7.2f}   library {library:.1f}", flush=True)


def sweep(product: Product, copies: int, rows: int, *, outs: int, blocks: int) -> None:
    """Print the best of other tiles for the same product, and of other numbers of parts for the best tile."""
    tile_for, splits_of = gemm_triton.tile_for, gemm_triton.splits_of
    least = min(128, max(16, 1 << (rows - 1).bit_length()))

    def timed(tile: gemm_triton.Tile, splits: int) -> float:
        gemm_triton.tile_for = lambda *given: (tile, tile_for(*given)[1])
        gemm_triton.splits_of = lambda outs, blocks: splits
        try:
            return microseconds(product, copies)
        except Exception as error:  # too much shared memory for this tile
            if "OutOfResources" not in type(error).__name__:
                raise
            return float("inf")
        finally:
            gemm_triton.tile_for, gemm_triton.splits_of = tile_for, splits_of

    usual = splits_of(outs, blocks)
    tiles = [
        gemm_triton.Tile(rows=height, outs=width, swap=swap, num_warps=warps, num_stages=stages)
        for height in {least, max(16, least // 2)}
        for width, warps in ((64, 4), (128, 4), (128, 8))
        for stages in (2, 3, 4, 5, 6, 8)
        for swap in (True, False)
        if swap or height >= 64
    ]
    found = sorted(((timed(tile, usual), tile) for tile in tiles), key=lambda pair: pair[0])[:3]
    for us, tile in found:
        print(f"    {us:>8.1f} us  {tile}", flush=True)
    for splits in (usual // 4, usual // 2, usual * 2, usual * 4):
        if 1 <= splits <= blocks // 2:
            print(f"    {timed(found[0][1], splits):>8.1f} us  the first with {splits} parts instead of {usual}", flush=True)


if __name__ == "__main__":
    main()
