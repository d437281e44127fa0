"""Products of bfloat16 rows by bfloat16 weights in one part, for more than a few rows; weights may be transposed in memory.

The operands come through tensor descriptors: the hardware copies whole tiles to shared memory. There are at most as many programs
as multiprocessors, and each computes one tile of the result after the other. The loop over tiles and the loop over inputs are
compiled to one loop, so that the first inputs of the next tile are copied while the last ones of this tile are multiplied.

The tensor cores add 16 inputs at a time to a sum, in order. So do the kernels of few rows: where these sum in one part too, both
have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4lite.kernels.dispatch import capability_of, ceil_div, compiled, describable, multiprocessors_of, on_gpu, power_of_2
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows.packed import narrowed

_CHIPS = (90, 100, 103)  # that copy tiles by descriptors and have the shared memory for the tiles below
_LEAST_ROWS, _LEAST_TILES = 128, 64  # above so many rows, so many small tiles take less time in one part than sums of parts
_GROUPED = tl.constexpr(8)  # tiles of rows that read the same weights one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """How one program multiplies.

    Attributes:
        rows, outs: Shape of its piece of the result.
        inputs: Of one turn of its loop.
        rate: Of products of many tiles, relative to that of cuBLAS.
    """

    rows: int
    outs: int
    inputs: int
    num_warps: int
    num_stages: int
    rate: float


_TILES = (
    _Tile(rows=128, outs=256, inputs=64, num_warps=8, num_stages=3, rate=0.97),
    _Tile(rows=64, outs=128, inputs=128, num_warps=4, num_stages=4, rate=0.8),
)


@triton.jit
def place(pid, M, tiles_n, BM: tl.constexpr, GROUPED: tl.constexpr):
    """Return the tile of rows and the tile of results: all results of a few tiles of rows come before the next rows."""
    tiles_m = tl.cdiv(M, BM)
    first = pid // (GROUPED * tiles_n) * GROUPED
    size = tl.minimum(tiles_m - first, GROUPED)
    within = pid % (GROUPED * tiles_n)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["M"])
def _many_rows_kernel(
    x, w, out, M, N, K, groups,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY_INPUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles * groups, tl.num_programs(0), flatten=True):
        group = tile // tiles
        pm, pn = place(tile % tiles, M, tiles_n, BM, _GROUPED)
        m, n = pm * BM, pn * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            # matmul_rows(x[:, group].float(), w[group].float())
            a = x.load([group, m, k]).reshape(BM, BK)
            b = w.load([group, k, n]).reshape(BK, BN) if BY_INPUT else w.load([group, n, k]).reshape(BN, BK).T
            if not compiled():  # the interpreter has no products of bfloat16
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total)
        # In halves: shared memory has no room for a whole tile of results beside the stages.
        left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        FLOAT32: tl.constexpr = out.dtype == tl.float32
        out.store([group, m, n], narrowed(left, FLOAT32).to(out.dtype).reshape(1, BM, BN // 2))
        out.store([group, m, n + BN // 2], narrowed(right, FLOAT32).to(out.dtype).reshape(1, BM, BN // 2))
    let_successor_in()


def _by_input(w: Tensor) -> bool:
    """Return whether the weights of one input lie side by side."""
    return w.stride(-1) != 1 and w.stride(-2) == 1


def _in_order(w: Tensor) -> Tensor:
    """Return the weights with the dimensions in the order of memory."""
    return w.transpose(-2, -1) if _by_input(w) else w


def takes_many(x: Tensor, w: Tensor, out: Tensor) -> bool:
    """Return whether descriptors can describe the operands and the result, and the chip has them; the interpreter has."""
    known = not on_gpu(out.device) or capability_of(out.device) in _CHIPS
    return known and describable(x) and describable(_in_order(w)) and describable(out)


def fills_chip(rows: int, groups: int, outs: int) -> bool:
    """Return whether a product [M, G, N] has enough tiles to be faster in one part: the same for any M up to a power of two."""
    return rows > _LEAST_ROWS and _tiles(_TILES[-1], power_of_2(rows), groups, outs) >= _LEAST_TILES


def many_rows(x: Tensor, w: Tensor, out: Tensor) -> None:
    """Write ``float_linear(x, w)`` to ``out`` [M, N] or [M, G, N], for operands that ``takes_many``."""
    rows, groups, outs = out.shape if out.dim() == 3 else (out.shape[0], 1, out.shape[1])
    inputs, device, programs = x.shape[-1], out.device, multiprocessors_of(out.device)
    tile = _tile_for(rows, groups, outs, programs)
    by_input = _by_input(w)
    _many_rows_kernel[(min(_tiles(tile, rows, groups, outs), programs),)](
        _described(x if x.dim() == 2 else x.transpose(0, 1), tile.rows, tile.inputs),
        _described(_in_order(w), *((tile.inputs, tile.outs) if by_input else (tile.outs, tile.inputs))),
        _described(out if out.dim() == 2 else out.transpose(0, 1), tile.rows, tile.outs // 2),
        rows,
        outs,
        inputs,
        groups,
        BM=tile.rows,
        BN=tile.outs,
        BK=tile.inputs,
        BY_INPUT=by_input,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(device),
    )


@lru_cache(maxsize=256)
def _tile_for(rows: int, groups: int, outs: int, multiprocessors: int) -> _Tile:
    """Return the tile with which the multiprocessors are done first.

    Args:
        rows: Numbers with the same next power of two have the same tile, or warming up would need a step for each.
    """
    rows = power_of_2(rows)

    def time(tile: _Tile) -> float:
        return ceil_div(_tiles(tile, rows, groups, outs), multiprocessors) * tile.rows * tile.outs / tile.rate

    return min(_TILES, key=time)


def _tiles(tile: _Tile, rows: int, groups: int, outs: int) -> int:
    return ceil_div(rows, tile.rows) * ceil_div(outs, tile.outs) * groups


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of pieces [1, rows, columns]; only a first dimension of one is no detour through registers."""
    shape, strides = (x.shape, x.stride()) if x.dim() == 3 else ((1, *x.shape), (x.stride(0), *x.stride()))
    return TensorDescriptor(x, list(shape), list(strides), [1, rows, columns])
