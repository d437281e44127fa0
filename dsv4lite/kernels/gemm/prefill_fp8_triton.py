"""Products of FP8 rows by FP8 weights on Hopper, for more than 128 rows.

The kernel is warp-specialized, and therefore written in Gluon. One producer warp lets the hardware copy blocks of rows and of
weights to shared memory, several ahead. Two groups of four consumer warps have 64 rows each: while one adds up its product of 128
inputs by its scales, the other one's product keeps the tensor cores busy. Programs compute one tile of the result after the other.

Inside a block of 128 inputs the tensor cores sum, blocks of a part are added in order, and parts in order: the bits are those of
``triton.py``.

Producers and consumers each count blocks (``step``): the count says which buffer is next, and which phase of its barriers to wait
for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dsv4lite.kernels.dispatch import HOPPER, capability_of, ceil_div, describable, multiprocessors_of, power_of_2
from dsv4lite.kernels.e4m3 import e8m0
from dsv4lite.kernels.gemm.prefill_triton import place
from dsv4lite.kernels.hopper import STORED, copy_tile, described

_LEAST_ROWS, _LEAST_TILES = 129, 100  # with fewer tiles, idle multiprocessors cost more than this kernel saves
_GROUPED = gl.constexpr(8)  # tiles of rows that read the same weights one after the other
_TILE = gl.constexpr(128)  # rows, results and inputs
_STAGES = gl.constexpr(6)
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=2))


@gluon.jit
def _load(x, w, M, tiles_n, blocks, buffers, barriers):
    """Producer warp: copy the blocks of each tile's rows and weights as soon as their buffers are free."""
    rows, weights = buffers
    full, empty = barriers
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, _TILE) * tiles_n, gl.num_programs(0)):
        pm, pn = place(tile, M, tiles_n, _TILE, _GROUPED)
        for block in range(blocks):
            slot = step % _STAGES
            mbarrier.wait(empty.index(slot), (step // _STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * _TILE * _TILE)
            for part in gl.static_range(2):
                at = pm * _TILE + part * (_TILE // 2)
                copy_tile(x, [at, block * _TILE], full.index(slot), rows.index(2 * slot + part))
            copy_tile(w, [pn * _TILE, block * _TILE], full.index(slot), weights.index(slot))
            step += 1


@gluon.jit
def _sum_blocks(none, first, end, blocks, scales, step, buffers, barriers, HALF: gl.constexpr):
    """Return the sum of some blocks' products, float32 [64, 128], with ``scales`` and ``step`` of the next block.

    Args:
        none: Zeros, of the products' layout.
        first, end: The blocks, of ``blocks``.
        scales: Pointers to the scales of rows and weights, and those of the first block.
    """
    rows, weights = buffers
    full, empty = barriers
    acc = none
    of_rows, of_weights, next_x, next_w = scales
    for block in range(first, end):
        slot = step % _STAGES
        scale = e8m0(next_x) * e8m0(next_w)
        ahead = gl.minimum(block + 1, blocks - 1)
        next_x, next_w = gl.load(of_rows + ahead), gl.load(of_weights + ahead)
        mbarrier.wait(full.index(slot), step // _STAGES & 1)
        b = weights.index(slot).permute((1, 0))
        product = warpgroup_mma(rows.index(2 * slot + HALF), b, none, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(slot), count=1)
        acc += product * gl.expand_dims(scale, 1)
        step += 1
    return acc, (of_rows, of_weights, next_x, next_w), step


@gluon.jit
def _multiply(
    xs, ws, out, M, N, tiles_n, blocks, part, buffers, barriers, HALF: gl.constexpr, FOLD: gl.constexpr
):  # fmt: skip
    """Consumer warps: compute half ``HALF`` of the rows of every tile, in parts of ``part`` blocks if FOLD."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    none = gl.zeros((_TILE // 2, _TILE), gl.float32, LAYOUT)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, _TILE) * tiles_n, gl.num_programs(0)):
        pm, pn = place(tile, M, tiles_n, _TILE, _GROUPED)
        row = pm * _TILE + HALF * (_TILE // 2)
        # matmul_rows(x, dequantize_fp8_rows(w_codes, w_scales)); x = dequantize_fp8(x_codes, x_scales)
        m = gl.minimum(row + gl.arange(0, _TILE // 2, layout=gl.SliceLayout(1, LAYOUT)), M - 1)
        of_rows, of_weights = xs + m.to(gl.int64) * blocks, ws + pn * blocks
        scales = (of_rows, of_weights, gl.load(of_rows), gl.load(of_weights))
        total, scales, step = _sum_blocks(none, 0, part, blocks, scales, step, buffers, barriers, HALF)
        if FOLD:
            for first in range(part, blocks, part):
                end = gl.minimum(first + part, blocks)
                acc, scales, step = _sum_blocks(none, first, end, blocks, scales, step, buffers, barriers, HALF)
                total += acc
        acc = gl.convert_layout(total.to(out.dtype.element_ty), STORED)
        m = gl.expand_dims(row + gl.arange(0, _TILE // 2, layout=gl.SliceLayout(1, STORED)), 1)
        n = gl.expand_dims(pn * _TILE + gl.arange(0, _TILE, layout=gl.SliceLayout(0, STORED)), 0)
        gl.store(out + m.to(gl.int64) * N + n, acc, mask=(m < M) & (n < N))


@gluon.jit(do_not_specialize=["M", "blocks", "part"])
def _many_rows_fp8_kernel(x, xs, w, ws, out, M, N, blocks, part, FOLD: gl.constexpr):
    rows = gl.allocate_shared_memory(gl.float8e4nv, [2 * _STAGES, _TILE // 2, _TILE], _OPERAND)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, _TILE, _TILE], _OPERAND)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both groups of consumers
    buffers = (rows, weights)
    barriers = (full, empty)
    tiles_n = gl.cdiv(N, _TILE)
    gl.warp_specialize(
        [
            (_multiply, (xs, ws, out, M, N, tiles_n, blocks, part, buffers, barriers, 0, FOLD)),
            (_multiply, (xs, ws, out, M, N, tiles_n, blocks, part, buffers, barriers, 1, FOLD)),
            (_load, (x, w, M, tiles_n, blocks, buffers, barriers)),
        ],
        [4, 1],  # warps and registers of the second and third function
        [240, 24],
    )


def takes_many_fp8(x: Tensor, w: Tensor, scale_of: int) -> bool:
    """Return whether this kernel supports the chip and the sizes, and there are enough rows and tiles."""
    (rows, inputs), outs = x.shape, w.shape[0]
    known = x.dtype == torch.float8_e4m3fn and capability_of(x.device) == HOPPER and scale_of == _TILE.value
    # Rows with the same next power of two take the same kernel, or warming up would need a step for each.
    tiles = ceil_div(power_of_2(rows), _TILE.value) * ceil_div(outs, _TILE.value)
    sizes = rows >= _LEAST_ROWS and tiles >= _LEAST_TILES and inputs % _TILE.value == 0 and outs % 16 == 0
    return known and sizes and describable(x) and describable(w)


def many_rows_fp8(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, out: Tensor, splits: int) -> None:
    """Write ``fp8_linear(x, xs, w, ws)`` to ``out`` [M, N], summed in ``splits`` parts, for operands that ``takes_many_fp8``."""
    (rows, inputs), outs, tile = x.shape, w.shape[0], _TILE.value
    programs = min(ceil_div(rows, tile) * ceil_div(outs, tile), multiprocessors_of(x.device))
    _many_rows_fp8_kernel[(programs,)](
        described(x, (tile // 2, tile), _OPERAND.value), xs, described(w, (tile, tile), _OPERAND.value), ws, out, rows, outs,
        inputs // tile, ceil_div(inputs // tile, splits), FOLD=splits > 1, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
