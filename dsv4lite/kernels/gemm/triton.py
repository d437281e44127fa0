"""Kernels of matrix products of any number of rows.

Every product sums in one order that follows from the weights' shape alone: inside a block of 128 inputs as the tensor cores do,
blocks in order within each of ``splits`` equal parts of the inputs, parts in order. Where there are too few tiles to fill the chip,
each part has programs of its own, and the last of a tile to arrive adds all; elsewhere one program folds them as it goes, for sums
of parts are read and written once each, which costs more than the operands do.

From 33 to 512 rows the tile follows from rows and weights: the largest of a few that makes enough programs. A program that has a
multiprocessor for itself waits for each block in turn, for its copy, its product and its scales: two blocks in one turn of the loop
share that.

A product that may sum in any order has one part above ``MANY_ROWS`` rows, which is faster, and of bfloat16 from fewer rows on if
the weights are large (``fills_chip``). Products of bfloat16 in one part have a kernel of their own above ``FEW_ROWS`` rows,
``prefill_triton``; those of FP8 have one on Hopper, in one part or in several, if
there are enough tiles of 128 rows, ``prefill_fp8_triton``.

Up to ``FEW_ROWS`` rows, and of bfloat16 where few programs have more, the weights are the left operand: they fill the tensor
cores' 64 rows, and the inputs are 16 or 32 columns.

A single row in any order takes the kernels of ``decode_1_triton``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.counters import COUNTERS, counters_of
from dsv4lite.kernels.dispatch import capability_of, ceil_div, compiled
from dsv4lite.kernels.e4m3 import as_stored, e4m3_values, e8m0
from dsv4lite.kernels.gemm import MANY_ROWS, scale_rows
from dsv4lite.kernels.gemm.decode_1_triton import (
    float_row,
    fp8_row,
    groups_row,
    pair_row,
    takes_float,
    takes_fp8,
    takes_groups,
    takes_pair,
)
from dsv4lite.kernels.gemm.prefill_fp8_triton import many_rows_fp8, takes_many_fp8
from dsv4lite.kernels.gemm.prefill_triton import fills_chip, many_rows, place, takes_many
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.quantize import FP8_GROUP
from dsv4lite.kernels.quantize.triton import quantize_fp8_triton

PROGRAMS = 264  # that splitting aims at: two for each multiprocessor of the largest chips, on every chip, for the same bits
MIN_BLOCKS = 4  # of 128 inputs in one part
FEW_ROWS = 32
FILLED = 80  # programs that keep the largest chips busy, each with all parts of a tile: sums of parts would go through the L2 cache
SHORT_BLOCKS, SHORT_STAGES = 8, 3  # where a program has few blocks to read, many programs read more than many stages
_GROUPED_ROWS = tl.constexpr(1024)  # of inputs, whose tiles share the weights in cache
_OTHER_COUNTERS = tl.constexpr(COUNTERS // 2)  # the first counter of a product that overlaps the previous one

Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""The inputs [M, G, K], their scales, the weights [G, N, K] and their scales."""
Overlap = Literal["next", "previous"]
"""Which launch shares nothing with a product and runs at the same time; see ``pdl``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one program multiplies.

    Attributes:
        rows, outs: Shape of its piece of the result.
        swap: Weights are the left operand.
        turn: Blocks of 128 inputs in one turn of its loop: barriers and copies of two blocks cost little more than those of one.
    """

    rows: int
    outs: int
    swap: bool
    num_warps: int
    num_stages: int
    turn: int = 1


# The first one that makes a fitting number of programs is taken; whether one program folds all parts of its tile; the tile.
Choices = tuple[tuple[range, bool, Tile], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """How products of one kind are cut into programs.

    Attributes:
        few: Tiles by the most rows each is for: one has all rows, and parts are programs.
        between: Choices up to MANY_ROWS. The last takes any number of programs and fits every chip.
        many: Tile of more rows, which folds.
        x_bytes, w_bytes: Of an input and of a weight.
    """

    few: tuple[tuple[int, Tile], ...]
    between: Choices
    many: Tile
    x_bytes: int
    w_bytes: int


_WIDEN_ROWS, _WIDEN_COLUMNS = tl.constexpr(8), tl.constexpr(512)  # of one program

_ANY = range(1 << 31)
_FILLED = range(FILLED, 1 << 31)
_FP8_TILES = Tiles(
    few=(
        (16, Tile(rows=16, outs=64, swap=True, num_warps=4, num_stages=6)),
        (32, Tile(rows=32, outs=64, swap=True, num_warps=4, num_stages=5)),
    ),
    between=(
        (range(200, 1 << 31), True, Tile(rows=64, outs=128, swap=False, num_warps=4, num_stages=4)),
        (_FILLED, True, Tile(rows=64, outs=64, swap=False, num_warps=4, num_stages=3, turn=2)),
        (range(48, 1 << 31), True, Tile(rows=64, outs=32, swap=False, num_warps=4, num_stages=4, turn=2)),
        (_ANY, False, Tile(rows=64, outs=64, swap=False, num_warps=4, num_stages=4)),
    ),
    many=Tile(rows=64, outs=128, swap=False, num_warps=4, num_stages=3),
    x_bytes=1,
    w_bytes=1,
)
_UNQUANTIZED_TILES = Tiles(
    few=(
        (16, Tile(rows=16, outs=64, swap=True, num_warps=4, num_stages=4)),
        (32, Tile(rows=32, outs=64, swap=True, num_warps=4, num_stages=4)),
    ),
    between=(
        (_FILLED, True, Tile(rows=128, outs=64, swap=False, num_warps=8, num_stages=4)),
        (range(100, 1 << 31), True, Tile(rows=64, outs=64, swap=False, num_warps=4, num_stages=3)),
        (range(100, 1 << 31), True, Tile(rows=64, outs=32, swap=False, num_warps=4, num_stages=4)),
        (range(PROGRAMS), False, Tile(rows=32, outs=64, swap=True, num_warps=4, num_stages=4)),
        (_ANY, False, Tile(rows=64, outs=64, swap=False, num_warps=4, num_stages=3)),
    ),
    many=Tile(rows=128, outs=128, swap=False, num_warps=8, num_stages=3),
    x_bytes=2,
    w_bytes=2,
)
_WEIGHT_ONLY_TILES = Tiles(  # what widens weights has no registers left for sums of parts, and folds only to save memory
    few=_UNQUANTIZED_TILES.few,
    between=(
        (_ANY, False, Tile(rows=128, outs=128, swap=True, num_warps=8, num_stages=3)),
        (_ANY, False, Tile(rows=64, outs=64, swap=True, num_warps=4, num_stages=4)),
    ),
    many=Tile(rows=128, outs=128, swap=True, num_warps=8, num_stages=3),
    x_bytes=2,
    w_bytes=1,
)
# Bytes of shared memory for stages, by capability: what one program may use less a margin. Other chips have the least.
_SHARED = {80: 161 << 10, 87: 161 << 10, 90: 225 << 10, 100: 225 << 10, 103: 225 << 10}
_LEAST_SHARED = 97 << 10


def fitted(tiles: Tiles, tile: Tile, capability: int) -> Tile | None:
    """Return a tile with as many of its stages as fit, None where not even two do."""
    fit = _SHARED.get(capability, _LEAST_SHARED) // (FP8_GROUP * (tile.rows * tiles.x_bytes + tile.outs * tiles.w_bytes))
    if fit < 2 * tile.turn:
        tile = replace(tile, turn=1)
    stages = min(fit // tile.turn, tile.num_stages)
    return replace(tile, num_stages=stages) if stages >= 2 else None


@cache
def tile_for(tiles: Tiles, rows: int, outs: int, groups: int, splits: int, capability: int) -> tuple[Tile, bool]:
    """Return the tile of a product, and whether one program folds all parts of its tile.

    Args:
        rows: Numbers with the same next power of two have the same tile, or warming up would need a step for each.
        outs: Results per row, of one group.
        splits: Parts of the inputs.
    """
    rows = 1 << (rows - 1).bit_length()
    choices = (*((_ANY, False, tile) for most, tile in tiles.few if rows <= most), *tiles.between)
    if rows > MANY_ROWS:
        choices = ((_ANY, True, tiles.many), *choices)
    for fitting, fold, wanted in choices:
        tile = fitted(tiles, wanted, capability)
        programs = ceil_div(rows, wanted.rows) * ceil_div(outs, wanted.outs) * groups * (1 if fold else splits)
        if tile and programs in fitting and (tile.rows <= 64 or rows > 64):
            return tile, fold and splits > 1
    raise AssertionError((rows, outs, capability))


def splits_of(outs: int, blocks: int) -> int:
    """Return how many parts the inputs of a product have: a power of two, from the weights' shape alone.

    Args:
        outs: Results per row, of all groups.
        blocks: Blocks of 128 inputs.
    """
    most = max(1, min(PROGRAMS * 64 // max(outs, 1), blocks // MIN_BLOCKS))
    return 1 << (most.bit_length() - 1)


@triton.jit
def _e4m3_to_fp16(code):
    # Exponent and mantissa one bit further left are a float16 of 2^-8 times the value, subnormals included.
    magnitude = code.to(tl.int16) & 0x7F
    bits = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7) | ((code.to(tl.int16) & 0x80) << 8)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


_WIDEN_FOUR = tl.constexpr("""{
.reg .b32 t, f, z;
mov.b32 f, 0x7B807B80; mov.b32 z, 0x80008000;
prmt.b32 t, $2, 0, 0x9180;
mul.lo.u32 t, t, 16; and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 $0, t, f, z;
prmt.b32 t, $2, 0, 0xB3A2;
mul.lo.u32 t, t, 16; and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 $1, t, f, z;
}""")


@triton.jit
def e4m3_to_bf16(code):
    # Exponent and mantissa four bits up are a bfloat16 of 2^-120 times the value; the assembly takes four codes at a time, and has
    # their signs where they belong by extending them to the bits above.
    # A NaN code becomes 480: checkpoints hold none.
    if compiled():
        return tl.inline_asm_elementwise(_WIDEN_FOUR, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    return e4m3_values(code).to(tl.bfloat16)


_WIDEN_PAIR = tl.constexpr("""{
.reg .b32 t, f, z;
mov.b32 f, 0x7B807B80; mov.b32 z, 0x80008000;
cvt.u32.u16 t, $2; prmt.b32 t, t, 0, 0x9180;
mul.lo.u32 t, t, 16; and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 t, t, f, z;
mov.b32 {$0, $1}, t;
}""")


@triton.jit
def _e4m3_pairs_to_bf16(pairs):
    # The two codes of an int16 become one register of the matrix unit's operand, so no bytes are moved.
    if compiled():
        first, second = tl.inline_asm_elementwise(
            _WIDEN_PAIR, "=h,=h,h", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    else:
        first, second = e4m3_to_bf16(pairs & 0xFF), e4m3_to_bf16((pairs >> 8) & 0xFF)
    return tl.reshape(tl.join(first, second), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def _store(out, total, rm, rn, M, N, row_stride, SWAP: tl.constexpr):
    if SWAP:
        p = out + rm[None, :] * row_stride + rn[:, None]
        mask = (rm < M)[None, :] & (rn < N)[:, None]
    else:
        p = out + rm[:, None] * row_stride + rn[None, :]
        mask = (rm < M)[:, None] & (rn < N)[None, :]
    tl.store(p, as_stored(total, out), mask=mask)


@triton.jit
def finish_tile(
    acc, parts, out, arrivals, split, first_row, rm, rn, M, N, row_stride, SWAP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store a tile; if it is one part of several, the program that stores the last of them adds all."""
    if SPLITS == 1:
        _store(out, acc, rm, rn, M, N, row_stride, SWAP)
    else:
        _store(parts + split * M.to(tl.int64) * row_stride, acc, rm, rn, M, N, row_stride, SWAP)
        tl.debug_barrier()  # the writes of all threads precede the count
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            ROWS: tl.constexpr = rm.shape[0] if rm.shape[0] < 32 else 32  # at a time, for all their parts fit into registers
            for first in tl.range(0, rm.shape[0], ROWS, num_stages=1):
                row = first_row + first + tl.arange(0, ROWS)[:, None]
                at = row * row_stride + rn[None, :]
                inside = (row < M) & (rn < N)[None, :]
                total = tl.zeros((ROWS, rn.shape[0]), tl.float32)
                for each in tl.static_range(SPLITS):
                    part = parts + each * M.to(tl.int64) * row_stride
                    total += tl.load(part + at, mask=inside, other=0.0, cache_modifier=".cg")
                total = as_stored(total, out)
                tl.store(out + at, total, mask=inside)
            tl.store(arrivals, 0)  # counters are zero between kernels


# The interpreter supports neither assembly nor products of bfloat16.
@triton.jit
def _add_product(acc, a, b, sx, sw, FP8_X: tl.constexpr, SCALE_ROWS: tl.constexpr, SWAP: tl.constexpr):
    """Return ``acc`` and the product of 128 inputs of some rows, ``a``, and of some weights, ``b``, with their scales."""
    if FP8_X:
        if a.dtype == tl.uint8:  # on a chip without e4m3
            a, b, sx = _e4m3_to_fp16(a), _e4m3_to_fp16(b), sx * 65536.0
        product = tl.dot(b, tl.trans(a)) if SWAP else tl.dot(a, tl.trans(b))
        if SCALE_ROWS == 128:
            acc += product * ((sx * sw)[None, :] if SWAP else (sx * sw)[:, None])
        else:
            acc += product * (sw[:, None] * sx[None, :] if SWAP else sx[:, None] * sw[None, :])
    else:
        if SCALE_ROWS:
            b = _e4m3_pairs_to_bf16(b) if b.shape[1] == 64 else e4m3_to_bf16(b)
        if not compiled():
            a, b = a.to(tl.float32), b.to(tl.float32)
        if SCALE_ROWS:
            acc += tl.dot(b, tl.trans(a)) * sw[:, None] if SWAP else tl.dot(a, tl.trans(b)) * sw[None, :]
        else:
            acc = tl.dot(b, tl.trans(a), acc) if SWAP else tl.dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def _operands(xp, wp, kb, here, rk, K, EVEN_K: tl.constexpr, SWAP: tl.constexpr, PAIRS: tl.constexpr):
    """Return block number ``kb`` of 128 inputs of a tile's rows, and of its weights."""
    if EVEN_K:
        a = tl.load(xp + kb * 128, mask=here, other=0.0) if SWAP else tl.load(xp + kb * 128)
        b = tl.load(wp + kb * (128 // PAIRS))
    else:
        inside = (rk < K - kb * 128)[None, :]
        a = tl.load(xp + kb * 128, mask=inside, other=0.0)
        b = tl.load(wp + kb * 128, mask=inside, other=0.0)
    return a, b


@triton.jit
def product_tile(
    pid, split, x, xs, w, ws, parts, out, arrivals, M, N, K, blocks, part,
    BM: tl.constexpr, BN: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, FOLD: tl.constexpr,
    SPLITS: tl.constexpr, FP8_X: tl.constexpr = True, x_row=0, x_group=0, groups=1, TURN: tl.constexpr = 1,
):  # fmt: skip
    """Compute tile ``pid`` of the result, or its part number ``split``.

    Inputs are FP8 (FP8_X) of one group, or bfloat16; weights are FP8, with a scale for SCALE_ROWS rows, or bfloat16, if that is 0.
    """
    tiles_n = tl.cdiv(N, BN)
    pm, pn = place(pid, M, tiles_n * groups, BM, _GROUPED_ROWS // BM)
    g = 0 if FP8_X else (pn // tiles_n).to(tl.int64)
    pm, pn = pm.to(tl.int64), (pn if FP8_X else pn % tiles_n).to(tl.int64)  # from here on: divisions of 32 bits are quicker
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    rk = tl.arange(0, 128)
    if EVEN_K:  # the compiler sees that rows are aligned
        K = blocks * 128
        x_row, x_group = x_row // 16 * 16, x_group // 16 * 16
    x_row = K if FP8_X else x_row
    # In place of rows beyond the end, whose results are not stored, others are read, mirrored at the end: if all programs read the
    # last row, they would wait for the same cache lines.
    here = (rm < M)[:, None]
    m = tl.minimum(rm, tl.maximum(2 * M - 1 - rm, 0))
    n = g * N + tl.minimum(rn, N - 1)
    xp = x + m[:, None] * x_row + g * x_group + rk[None, :]
    PAIRS: tl.constexpr = 2 if EVEN_K and SCALE_ROWS and not FP8_X else 1  # of codes, int16
    wp = w + n[:, None] * (K // PAIRS) + tl.arange(0, 128 // PAIRS)[None, :]
    begin = 0 if FOLD else split * part
    end = blocks if FOLD else tl.minimum(begin + part, blocks)
    SHAPE_0: tl.constexpr = BN if SWAP else BM
    SHAPE_1: tl.constexpr = BM if SWAP else BN
    acc = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    if FOLD:
        total = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
        part_end = part
    # Scale bytes are too small for asynchronous copies: they are read one turn ahead.
    first = tl.minimum(begin, blocks - 1)
    if FP8_X:
        xsp = xs + m * blocks
        next_sx, second_sx = tl.load(xsp + first), tl.load(xsp + first + (TURN - 1))
    if SCALE_ROWS:
        # A tile of results divides 128: in one group it lies in one block of scales.
        wsp = ws + (pn * BN // 128 * blocks if FP8_X and SCALE_ROWS == 128 else n // SCALE_ROWS * blocks)
        next_sw, second_sw = tl.load(wsp + first), tl.load(wsp + first + (TURN - 1))
    for kb in tl.range(begin, end, TURN):
        # matmul_rows(x, dequantize_fp8_rows(w_codes, w_scales)); x = dequantize_fp8(x_codes, x_scales), or x[:, g].float()
        a, b = _operands(xp, wp, kb, here, rk, K, EVEN_K, SWAP, PAIRS)
        if TURN == 2:
            a2, b2 = _operands(xp, wp, kb + 1, here, rk, K, EVEN_K, SWAP, PAIRS)
        ahead = tl.minimum(kb + TURN, blocks - TURN)
        sx, sw = 0, 0
        if FP8_X:
            sx = e8m0(next_sx)
            next_sx = tl.load(xsp + ahead)
        if SCALE_ROWS:
            sw = e8m0(next_sw)
            next_sw = tl.load(wsp + ahead)
        acc = _add_product(acc, a, b, sx, sw, FP8_X, SCALE_ROWS, SWAP)
        if TURN == 2:
            if FP8_X:
                sx = e8m0(second_sx)
                second_sx = tl.load(xsp + ahead + 1)
            if SCALE_ROWS:
                sw = e8m0(second_sw)
                second_sw = tl.load(wsp + ahead + 1)
            acc = _add_product(acc, a2, b2, sx, sw, FP8_X, SCALE_ROWS, SWAP)
        if FOLD:  # noqa: SIM102  decided when compiled; the other when run
            if kb + TURN == part_end:
                part_end += part
                total += acc
                acc = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    if FOLD:
        acc = total + acc
    let_successor_in()
    parts += g * N
    out += g * N
    finish_tile(acc, parts, out, arrivals + pid, split, pm * BM, rm, rn, M, N, N * groups, SWAP, SPLITS)


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    x, xs, w, ws, parts, out, arrivals, M, N, K, blocks, part, x_row, x_group, groups,
    BM: tl.constexpr, BN: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, FOLD: tl.constexpr,
    SPLITS: tl.constexpr, FP8_X: tl.constexpr, TURN: tl.constexpr, OVERLAPS_NEXT: tl.constexpr, OVERLAPS_PREVIOUS: tl.constexpr,
):  # fmt: skip
    if not OVERLAPS_PREVIOUS:
        wait_for_predecessor()
    if OVERLAPS_NEXT:
        let_successor_in()
    if OVERLAPS_PREVIOUS and SPLITS > 1:
        arrivals += _OTHER_COUNTERS
    product_tile(
        tl.program_id(0), tl.program_id(1), x, xs, w, ws, parts, out, arrivals, M, N, K, blocks, part,
        BM, BN, SCALE_ROWS, EVEN_K, SWAP, FOLD, SPLITS, FP8_X, x_row, x_group, groups, TURN,
    )  # fmt: skip
    if OVERLAPS_PREVIOUS:
        wait_for_predecessor()


@triton.jit
def _widen_kernel(
    w,
    ws,
    out,
    N,
    K,
    blocks,
    SCALE_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * _WIDEN_ROWS + tl.arange(0, _WIDEN_ROWS)[:, None]
    column = tl.program_id(1) * _WIDEN_COLUMNS + tl.arange(0, _WIDEN_COLUMNS)[None, :]
    inside = (row < N) & (column < K)
    # dequantize_fp8_rows(w_codes, w_scales).bfloat16(): powers of two round nothing
    codes = tl.load(w + row * K + column, mask=inside, other=0)
    scale = e8m0(tl.load(ws + row // SCALE_ROWS * blocks + column // 128, mask=inside, other=0))
    tl.store(out + row * K + column, (e4m3_to_bf16(codes).to(tl.float32) * scale).to(tl.bfloat16), mask=inside)


def fp8_linear_triton(
    x_codes: Tensor,
    x_scales: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    row_tile: int | None = None,
) -> Tensor:
    """See ``gemm.fp8_linear``."""
    if row_tile is None and takes_fp8(x_codes, w_codes, w_scales):
        return fp8_row(x_codes, x_scales, w_codes, w_scales, dtype)
    return _fp8_linear(_fp8_operands(x_codes, x_scales, w_codes, w_scales), dtype, _in_parts(x_codes, row_tile))


def fp8_weight_linear_triton(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor, row_tile: int | None = None) -> Tensor:
    """See ``gemm.fp8_weight_linear``."""
    if row_tile is None and len(x_MGK) > MANY_ROWS:
        return float_linear_triton(x_MGK, widen_triton(w_codes, w_scales), x_MGK.dtype)
    return _float_linear(x_MGK, w_codes, w_scales, torch.empty(_results_of(x_MGK, w_codes), dtype=x_MGK.dtype, device=x_MGK.device))


def fp8_weight_linear_quantize_triton(
    x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """See ``gemm.fp8_weight_linear_quantize``; for one row."""
    if row_tile is None and takes_groups(x_MGK, w_codes, w_scales):
        return groups_row(x_MGK, w_codes, w_scales)
    return quantize_fp8_triton(fp8_weight_linear_triton(x_MGK, w_codes, w_scales, row_tile).flatten(1), FP8_GROUP)


def float_linear_triton(
    x: Tensor, w: Tensor, dtype: torch.dtype, row_tile: int | None = None, *, out: Tensor | None = None
) -> Tensor:
    """See ``gemm.float_linear``."""
    shape = _results_of(x, w)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=x.device)
    assert out.shape == shape and out.dtype == dtype and out.is_contiguous()
    if row_tile is None and fills_chip(shape[0], shape[1] if w.dim() == 3 else 1, shape[-1]) and takes_many(x, w, out):
        many_rows(x, w, out)
        return out
    x_MGK, w_GNK, out_MGN = (x, w, out) if w.dim() == 3 else (x[:, None], w[None], out[:, None])
    if row_tile is None and takes_float(x_MGK, w_GNK):
        float_row(x_MGK[0], w_GNK[0], out_MGN)
    else:
        _float_linear(x_MGK, w_GNK, None, out_MGN, _in_parts(x_MGK, row_tile))
    return out


def pair_linear_triton(
    x_MK: Tensor, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor, w_NK: Tensor, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """See ``gemm.pair_linear``."""
    if row_tile is None and takes_pair(x_MK, w_codes, w_scales, w_NK):
        return pair_row(x_MK, x_codes, x_scales, w_codes, w_scales, w_NK)
    if len(x_MK) > MANY_ROWS:
        quantized = fp8_linear_triton(x_codes, x_scales, w_codes, w_scales, x_MK.dtype, row_tile)
        return quantized, float_linear_triton(x_MK, w_NK, torch.float32, row_tile)
    out = torch.empty(len(x_MK), 1, len(w_NK), dtype=torch.float32, device=x_MK.device)
    x_MK, fp8 = x_MK.contiguous(), _fp8_operands(x_codes, x_scales, w_codes, w_scales)
    scratch = _launch(_UNQUANTIZED_TILES, (x_MK[:, None], x_MK, w_NK[None], w_NK), out, overlaps="next")
    quantized = _fp8_linear(fp8, x_MK.dtype, overlaps="previous")
    del scratch  # not earlier: the second product runs at the same time, and must not be given the same memory
    return quantized, out[:, 0]


def widen_triton(w_codes: Tensor, w_scales: Tensor) -> Tensor:
    """Return FP8 weights [..., N, K] as bfloat16, exactly while the scales leave them within its range."""
    columns = w_codes.shape[-1]
    rows = w_codes.numel() // max(columns, 1)
    out = torch.empty(w_codes.shape, dtype=torch.bfloat16, device=w_codes.device)
    assert w_codes.is_contiguous() and w_scales.is_contiguous()
    if out.numel():
        _widen_kernel[(ceil_div(rows, _WIDEN_ROWS.value), ceil_div(columns, _WIDEN_COLUMNS.value))](
            w_codes.view(torch.uint8),
            w_scales,
            out,
            rows,
            columns,
            w_scales.shape[1],
            SCALE_ROWS=scale_rows(w_codes, w_scales),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def _results_of(x: Tensor, w: Tensor) -> tuple[int, ...]:
    """Return the shape [M, N] or [M, G, N] of a product."""
    assert x.shape[1:] == w.shape[:-2] + w.shape[-1:], (x.shape, w.shape)
    return x.shape[0], *w.shape[:-1]  # ``len`` of a tensor takes microseconds


def _fp8_operands(x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor) -> Operands:
    """Return FP8 inputs and weights as ``_launch`` takes them: as bytes, if the chip lacks e4m3."""
    rows, inputs = x_codes.shape
    assert x_scales.shape == (rows, ceil_div(inputs, FP8_GROUP)) and w_codes.shape[1] == inputs, (x_scales.shape, w_codes.shape)
    x, w = x_codes.contiguous(), w_codes
    if capability_of(x.device) < 89:
        x, w = x.view(torch.uint8), w.view(torch.uint8)
    return x[:, None], x_scales.contiguous(), w[None], w_scales


def _fp8_linear(operands: Operands, dtype: torch.dtype, in_parts: bool = True, overlaps: Overlap | None = None) -> Tensor:
    """Multiply what ``_fp8_operands`` returns; the other arguments are those of ``_launch``."""
    x, _, w, w_scales = operands
    out = torch.empty(len(x), 1, w.shape[1], dtype=dtype, device=x.device)
    scale_of = scale_rows(w[0], w_scales)
    if overlaps is None and takes_many_fp8(x[:, 0], w[0], scale_of):
        splits = splits_of(w.shape[1], ceil_div(w.shape[2], FP8_GROUP)) if in_parts else 1
        many_rows_fp8(x[:, 0], operands[1], w[0], w_scales, out[:, 0], splits)
        return out[:, 0]
    _launch(_FP8_TILES, operands, out, in_parts, FP8_X=True, SCALE_ROWS=scale_of, overlaps=overlaps)
    return out[:, 0]


def _in_parts(x: Tensor, row_tile: int | None) -> bool:
    """Return whether rows are summed in the parts in which few rows are, for the same bits."""
    return row_tile is not None or len(x) <= MANY_ROWS


def _float_linear(x_MGK: Tensor, w_GNK: Tensor, w_scales: Tensor | None, out: Tensor, in_parts: bool = True) -> Tensor:
    """Multiply by weights in bfloat16, or in FP8 with their scales."""
    (rows, groups, outs), blocks = out.shape, ceil_div(w_GNK.shape[2], FP8_GROUP)
    one_part = w_scales is None and (not in_parts or splits_of(groups * outs, blocks) == 1)
    if one_part and rows > FEW_ROWS and takes_many(x_MGK, w_GNK, out):
        many_rows(x_MGK, w_GNK, out)
        return out
    even = w_GNK.shape[2] % FP8_GROUP == 0
    x = x_MGK if x_MGK.stride(2) == 1 and not (even and any(s % 16 for s in x_MGK.stride()[:2])) else x_MGK.contiguous()
    if w_scales is None:
        _launch(_UNQUANTIZED_TILES, (x, x, w_GNK, w_GNK), out, in_parts)
    else:
        codes = w_GNK.view(torch.int16 if even else torch.uint8)
        _launch(_WEIGHT_ONLY_TILES, (x, x, codes, w_scales), out, SCALE_ROWS=scale_rows(w_GNK, w_scales))
    return out


def _launch(
    tiles: Tiles,
    operands: Operands,
    out: Tensor,
    in_parts: bool = True,
    *,
    FP8_X: bool = False,
    SCALE_ROWS: int = 0,
    overlaps: Overlap | None = None,
) -> Tensor:
    """Launch a product, and return its scratch memory.

    Args:
        in_parts: Many rows are summed in the parts in which few rows are, for the same bits.
        overlaps: Which launch runs at the same time, if any.
    """
    (x, _, w, w_scales), (rows, groups, outs) = operands, out.shape
    inputs, blocks = x.shape[2], ceil_div(x.shape[2], FP8_GROUP)
    assert w.is_contiguous() and w_scales.is_contiguous()
    if rows == 0 or outs == 0:
        return out
    splits = splits_of(groups * outs, blocks) if in_parts else 1
    part = ceil_div(blocks, splits)
    tile, fold = tile_for(tiles, rows, outs, groups, splits, capability_of(x.device))
    if part % tile.turn or inputs % (tile.turn * FP8_GROUP):
        tile = replace(tile, turn=1)
    if FP8_X and tile.turn == 1 and (blocks if fold else part) <= SHORT_BLOCKS:
        tile = replace(tile, num_stages=min(tile.num_stages, SHORT_STAGES))
    programs = 1 if fold else splits
    parts, arrivals = out, out
    if programs > 1:  # one part is the result itself
        parts = torch.empty(programs, *out.shape, dtype=torch.float32, device=out.device)
        arrivals = counters_of(out.device)
    _product_kernel[(ceil_div(rows, tile.rows) * ceil_div(outs, tile.outs) * groups, programs)](
        *operands,
        parts,
        out,
        arrivals,
        rows,
        outs,
        inputs,
        blocks,
        part,
        x.stride(0),
        x.stride(1),
        groups,
        BM=tile.rows,
        BN=tile.outs,
        SCALE_ROWS=SCALE_ROWS,
        EVEN_K=inputs % FP8_GROUP == 0,
        SWAP=tile.swap,
        FOLD=fold,
        SPLITS=programs,
        FP8_X=FP8_X,
        TURN=tile.turn,
        OVERLAPS_NEXT=overlaps == "next",
        OVERLAPS_PREVIOUS=overlaps == "previous",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(x.device),
    )
    return parts
