"""Kernels of matrix products of any number of rows.

Every product sums in one order that follows from the weights' shape alone: inside a block of 128 inputs as the tensor cores do,
blocks in order within each of ``splits`` equal parts of the inputs, parts in order. With few rows each part has programs of its
own, and the last of a tile to arrive adds all; with many rows one program folds them as it goes.

A product that may sum in any order goes to the library above ``LIBRARY_ROWS`` rows: it multiplies bfloat16 faster than they do.

Up to 64 rows the weights are the left operand: they fill the tensor cores' 64 rows, and the inputs are 16 columns or a little more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import capability_of, on_gpu
from dsv4lite.kernels.e4m3 import e4m3_bytes, fp8_scale_bits, fp8_scaled, native_e4m3, to_bf16
from dsv4lite.kernels.gemm import LIBRARY_ROWS, QUANTIZED_ROWS, scale_rows
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.quantize import FP8_GROUP

PROGRAMS = 264  # that splitting aims at: two for each multiprocessor of the largest chips, on every chip, for the same bits
MIN_BLOCKS = 4  # of 128 inputs in one part
SPLIT_MAX_ROWS = 128  # above, rows fill the chip, and the parts' sums would cost more memory traffic than the weights
SHORT_BLOCKS, SHORT_STAGES = 8, 3  # where a program has few blocks to read, many programs read more than many stages
GROUPED_TILES = 8  # of rows that share the weights in cache
# Tiles of a product in parts, at most: of 16 rows, and of 64 results of as many groups as there are results (see ``splits_of``);
# and the sums that programs of ``hc.decode_small_triton`` send each other.
COUNTERS = max(SPLIT_MAX_ROWS // 16 * PROGRAMS * 64 // 2, 16 * (8192 + 256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one program multiplies.

    Attributes:
        rows, outs: Shape of its piece of the result.
        swap: Weights are the left operand.
    """

    rows: int
    outs: int
    swap: bool
    num_warps: int
    num_stages: int


Tiles = tuple[tuple[int | None, Tile], ...]

_WIDEN_ROWS, _WIDEN_COLUMNS = 8, 512

# By the most rows each is for.
_FP8_TILES: Tiles = (
    (16, Tile(rows=16, outs=64, swap=True, num_warps=4, num_stages=6)),
    (32, Tile(rows=32, outs=64, swap=True, num_warps=4, num_stages=5)),
    (SPLIT_MAX_ROWS, Tile(rows=64, outs=64, swap=True, num_warps=4, num_stages=4)),
    (512, Tile(rows=64, outs=128, swap=False, num_warps=4, num_stages=3)),
    (None, Tile(rows=128, outs=128, swap=False, num_warps=8, num_stages=3)),
)
_PLAIN_TILES: Tiles = (
    (16, Tile(rows=16, outs=64, swap=True, num_warps=4, num_stages=4)),
    (32, Tile(rows=32, outs=64, swap=True, num_warps=4, num_stages=4)),
    (SPLIT_MAX_ROWS, Tile(rows=64, outs=64, swap=True, num_warps=4, num_stages=3)),
    (512, Tile(rows=64, outs=128, swap=False, num_warps=4, num_stages=2)),
    (None, Tile(rows=128, outs=128, swap=False, num_warps=8, num_stages=3)),
)
_WEIGHT_ONLY_TILES: Tiles = (
    (16, Tile(rows=16, outs=64, swap=True, num_warps=4, num_stages=4)),
    (32, Tile(rows=32, outs=64, swap=True, num_warps=4, num_stages=4)),
    (SPLIT_MAX_ROWS, Tile(rows=64, outs=64, swap=True, num_warps=4, num_stages=3)),
    (None, Tile(rows=128, outs=128, swap=True, num_warps=8, num_stages=3)),
)
_OPERAND_BYTES = {_FP8_TILES: (1, 1), _PLAIN_TILES: (2, 2), _WEIGHT_ONLY_TILES: (2, 1)}  # inputs, weights
# Bytes of shared memory for stages, by capability: what one program may use less a margin. Other chips have the least.
_SHARED = {80: 161 << 10, 87: 161 << 10, 90: 225 << 10, 100: 225 << 10, 103: 225 << 10}
_LEAST_SHARED = 97 << 10


def tile_for(tiles: Tiles, rows: int, capability: int) -> Tile:
    """Return the tile for a number of rows, with as many of its stages as fit; a smaller one where not even two do."""
    x_bytes, w_bytes = _OPERAND_BYTES[tiles]
    at = next(i for i, (most, _) in enumerate(tiles) if most is None or rows <= most)
    while True:
        tile = tiles[at][1]
        fit = _SHARED.get(capability, _LEAST_SHARED) // (FP8_GROUP * (tile.rows * x_bytes + tile.outs * w_bytes))
        if fit >= 2:
            return replace(tile, num_stages=min(fit, tile.num_stages))
        at -= 1


def splits_of(outs: int, blocks: int) -> int:
    """Return how many parts the inputs of a product have: a power of two, from the weights' shape alone.

    Args:
        outs: Results per row, of all groups.
        blocks: Blocks of 128 inputs.
    """
    most = max(1, min(PROGRAMS * 64 // max(outs, 1), blocks // MIN_BLOCKS))
    return 1 << (most.bit_length() - 1)


@triton.jit
def e8m0(byte):
    # e8m0_to_float: 2^(byte - 127); byte 0 is a subnormal, 255 is NaN
    bits = tl.where(byte == 0, 0x00400000, byte.to(tl.int32) << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


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
def e4m3_to_bf16(code, GPU: tl.constexpr):
    # Exponent and mantissa four bits up are a bfloat16 of 2^-120 times the value; the assembly takes four codes at a time, and has
    # their signs where they belong by extending them to the bits above.
    # A NaN code becomes 480: checkpoints hold none.
    if GPU:
        return tl.inline_asm_elementwise(_WIDEN_FOUR, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    bits = ((code.to(tl.int32) & 0x7F) << 20) | ((code.to(tl.int32) & 0x80) << 24)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(tl.bfloat16)


_WIDEN_PAIR = tl.constexpr("""{
.reg .b32 t, f, z;
mov.b32 f, 0x7B807B80; mov.b32 z, 0x80008000;
cvt.u32.u16 t, $2; prmt.b32 t, t, 0, 0x9180;
mul.lo.u32 t, t, 16; and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 t, t, f, z;
mov.b32 {$0, $1}, t;
}""")


@triton.jit
def _e4m3_pairs_to_bf16(pairs, GPU: tl.constexpr):
    # Two codes in an int16 are what the matrix unit wants in one register: nothing is taken apart or put together.
    if GPU:
        first, second = tl.inline_asm_elementwise(
            _WIDEN_PAIR, "=h,=h,h", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    else:
        first, second = e4m3_to_bf16(pairs & 0xFF, GPU), e4m3_to_bf16((pairs >> 8) & 0xFF, GPU)
    return tl.reshape(tl.join(first, second), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def _place(pid, M, tiles_n, BM: tl.constexpr, GROUPED: tl.constexpr):
    """Return the tile of rows and the tile of results: all results of a few tiles of rows come before the next rows."""
    pid = pid.to(tl.int64)
    tiles_m = tl.cdiv(M, BM)
    first = pid // (GROUPED * tiles_n) * GROUPED
    size = tl.minimum(tiles_m - first, GROUPED)
    within = pid % (GROUPED * tiles_n)
    return first + within % size, within // size


@triton.jit
def _store(out, total, rm, rn, M, N, row_stride, SWAP: tl.constexpr):
    if SWAP:
        p = out + rm[None, :] * row_stride + rn[:, None]
        mask = (rm < M)[None, :] & (rn < N)[:, None]
    else:
        p = out + rm[:, None] * row_stride + rn[None, :]
        mask = (rm < M)[:, None] & (rn < N)[None, :]
    tl.store(p, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _finish(
    acc, parts, out, arrivals, split, first_row, rm, rn, M, N, row_stride, SWAP: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Store a tile; if it is one part of several, the program that stores the last of them adds all."""
    if SPLITS == 1:
        _store(out, acc, rm, rn, M, N, row_stride, SWAP)
    else:
        _store(parts + split * M.to(tl.int64) * row_stride, acc, rm, rn, M, N, row_stride, SWAP)
        tl.debug_barrier()  # all threads have written when one of them says so
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
                tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
            tl.store(arrivals, 0)  # as the next product finds it


@triton.jit
def _finish_block(
    acc, parts, codes, scales, arrivals, split, rm, rn, first_column, M, N, row_stride,
    SWAP: tl.constexpr, SPLITS: tl.constexpr, TILES: tl.constexpr, NATIVE: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Store a part of a tile; the program that stores the last of a block of 128 results adds all its parts, and quantizes it."""
    _store(parts + split * M.to(tl.int64) * row_stride, acc, rm, rn, M, N, row_stride, SWAP)
    tl.debug_barrier()  # all threads have written when one of them says so
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS * TILES - 1:
        row = tl.arange(0, rm.shape[0])
        at = row[:, None] * row_stride + first_column + tl.arange(0, 128)[None, :]
        inside = (row < M)[:, None]
        total = tl.zeros((rm.shape[0], 128), tl.float32)
        for each in tl.static_range(SPLITS):
            total += tl.load(parts + each * M.to(tl.int64) * row_stride + at, mask=inside, other=0.0, cache_modifier=".cg")
        # Reference: quantize_fp8(y.to(x.dtype), FP8_GROUP)
        y = to_bf16(total, GPU).to(tl.float32)
        bits = fp8_scale_bits(y)
        tl.store(codes + at, e4m3_bytes(fp8_scaled(y, bits), NATIVE), mask=inside)
        tl.store(scales + row * (row_stride // 128), (bits >> 23).to(tl.uint8), mask=row < M)
        tl.store(arrivals, 0)  # as the next product finds it


@triton.jit
def fp8_tile(
    pid, split, x, xs, w, ws, parts, out, arrivals, M, N, K, blocks, part,
    BM: tl.constexpr, BN: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    FOLD: tl.constexpr, SPLITS: tl.constexpr, CODES: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Compute tile ``pid`` of the result, or its part number ``split``."""
    pm, pn = _place(pid, M, tl.cdiv(N, BN), BM, GROUPED)
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    rk = tl.arange(0, 128)
    if EVEN_K:
        K = blocks * 128  # the compiler sees that rows are aligned
    # Rows beyond the end are not stored; with few rows they are not read either, or all programs would wait for the same lines.
    here = (rm < M)[:, None]
    m = tl.minimum(rm, M - 1)
    n = tl.minimum(rn, N - 1)
    xp = x + m[:, None] * K + rk[None, :]
    wp = w + n[:, None] * K + rk[None, :]
    xsp = xs + m * blocks
    # A tile of results divides 128: it lies in one block of scales.
    wsp = ws + (pn * BN // SCALE_ROWS * blocks if SCALE_ROWS == 128 else n * blocks)
    begin = 0 if FOLD else split * part
    end = blocks if FOLD else tl.minimum(begin + part, blocks)
    SHAPE_0: tl.constexpr = BN if SWAP else BM
    SHAPE_1: tl.constexpr = BM if SWAP else BN
    acc = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    if FOLD:
        total = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    # Scale bytes are too small for asynchronous copies: they are read one block ahead.
    first = tl.minimum(begin, blocks - 1)
    next_sx = tl.load(xsp + first)
    next_sw = tl.load(wsp + first)
    for kb in tl.range(begin, end):
        # x = dequantize_fp8(x_codes, x_scales); w = dequantize_fp8_rows(w_codes, w_scales); x @ w.T
        if EVEN_K:
            a = tl.load(xp + kb * 128, mask=here, other=0.0) if SWAP else tl.load(xp + kb * 128)
            b = tl.load(wp + kb * 128)
        else:
            inside = (rk < K - kb * 128)[None, :]
            a = tl.load(xp + kb * 128, mask=inside, other=0.0)
            b = tl.load(wp + kb * 128, mask=inside, other=0.0)
        sx = e8m0(next_sx)
        sw = e8m0(next_sw)
        ahead = tl.minimum(kb + 1, blocks - 1)
        next_sx = tl.load(xsp + ahead)
        next_sw = tl.load(wsp + ahead)
        if CODES:
            a = _e4m3_to_fp16(a)
            b = _e4m3_to_fp16(b)
            sx = sx * 65536.0
        product = tl.dot(b, tl.trans(a)) if SWAP else tl.dot(a, tl.trans(b))
        if SCALE_ROWS == 128:
            acc += product * ((sx * sw)[None, :] if SWAP else (sx * sw)[:, None])
        else:
            acc += product * (sw[:, None] * sx[None, :] if SWAP else sx[:, None] * sw[None, :])
        if FOLD:  # noqa: SIM102  decided when compiled; the other when run
            if (kb + 1) % part == 0:
                total += acc
                acc = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    if FOLD:
        acc = total + acc
    let_successor_in()
    _finish(acc, parts, out, arrivals + pid, split, pm * BM, rm, rn, M, N, N, SWAP, SPLITS)


@triton.jit(do_not_specialize=["M"])
def _fp8_kernel(
    x, xs, w, ws, parts, out, arrivals, M, N, K, blocks, part,
    BM: tl.constexpr, BN: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, FOLD: tl.constexpr,
    SPLITS: tl.constexpr, CODES: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    fp8_tile(
        tl.program_id(0), tl.program_id(1), x, xs, w, ws, parts, out, arrivals, M, N, K, blocks, part,
        BM, BN, SCALE_ROWS, EVEN_K, SWAP, FOLD, SPLITS, CODES, GROUPED,
    )  # fmt: skip


# SCALE_ROWS is 0 for plain weights. The interpreter knows neither assembly nor products of bfloat16.
@triton.jit
def float_tile(
    pid, split, x, w, ws, parts, out, arrivals, M, N, K, blocks, part, x_row, x_group, groups,
    BM: tl.constexpr, BN: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    FOLD: tl.constexpr, SPLITS: tl.constexpr, GPU: tl.constexpr, GROUPED: tl.constexpr,
    scales=None, QUANTIZED: tl.constexpr = False, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """Compute tile ``pid`` of the result, or its part number ``split``; QUANTIZED gives codes and scales, of one tile of rows."""
    tiles_n = tl.cdiv(N, BN)
    pm, pn = _place(pid, M, tiles_n * groups, BM, GROUPED)
    g = pn // tiles_n
    rm = pm * BM + tl.arange(0, BM)
    rn = pn % tiles_n * BN + tl.arange(0, BN)
    rk = tl.arange(0, 128)
    if EVEN_K:
        K = blocks * 128
        x_row, x_group = x_row // 16 * 16, x_group // 16 * 16
    here = (rm < M)[:, None]
    m = tl.minimum(rm, M - 1)
    n = g * N + tl.minimum(rn, N - 1)
    xp = x + m[:, None] * x_row + g * x_group + rk[None, :]
    PAIRS: tl.constexpr = 2 if EVEN_K and SCALE_ROWS else 1  # of codes, int16
    wp = w + n[:, None] * (K // PAIRS) + tl.arange(0, 128 // PAIRS)[None, :]
    begin = 0 if FOLD else split * part
    end = blocks if FOLD else tl.minimum(begin + part, blocks)
    SHAPE_0: tl.constexpr = BN if SWAP else BM
    SHAPE_1: tl.constexpr = BM if SWAP else BN
    acc = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    total = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    if SCALE_ROWS:
        wsp = ws + n // SCALE_ROWS * blocks
        next_sw = tl.load(wsp + tl.minimum(begin, blocks - 1))
    for kb in tl.range(begin, end):
        # matmul_rows(x[:, g].float(), dequantize_fp8_rows(w_codes, w_scales)[g])
        if EVEN_K:
            a = tl.load(xp + kb * 128, mask=here, other=0.0) if SWAP else tl.load(xp + kb * 128)
            b = tl.load(wp + kb * (128 // PAIRS))
        else:
            inside = (rk < K - kb * 128)[None, :]
            a = tl.load(xp + kb * 128, mask=inside, other=0.0)
            b = tl.load(wp + kb * 128, mask=inside, other=0)
        if SCALE_ROWS:
            b = _e4m3_pairs_to_bf16(b, GPU) if PAIRS == 2 else e4m3_to_bf16(b, GPU)
        if not GPU:
            a, b = a.to(tl.float32), b.to(tl.float32)
        if SCALE_ROWS:
            sw = e8m0(next_sw)
            next_sw = tl.load(wsp + tl.minimum(kb + 1, blocks - 1))
            if SWAP:
                acc += tl.dot(b, tl.trans(a)) * sw[:, None]
            else:
                acc += tl.dot(a, tl.trans(b)) * sw[None, :]
        elif SWAP:
            acc = tl.dot(b, tl.trans(a), acc)
        else:
            acc = tl.dot(a, tl.trans(b), acc)
        if FOLD:  # noqa: SIM102  decided when compiled; the other when run
            if (kb + 1) % part == 0:
                total += acc
                acc = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    if FOLD:
        acc = total + acc
    let_successor_in()
    if QUANTIZED:
        TILES: tl.constexpr = 128 // BN
        block = pid // TILES
        column = pn % tiles_n // TILES * 128
        _finish_block(
            acc, parts + g * N, out + g * N, scales + block, arrivals + block, split, rm, rn, column, M, N, N * groups,
            SWAP, SPLITS, TILES, NATIVE, GPU,
        )  # fmt: skip
    else:
        _finish(acc, parts + g * N, out + g * N, arrivals + pid, split, pm * BM, rm, rn, M, N, N * groups, SWAP, SPLITS)


@triton.jit(do_not_specialize=["M"])
def _float_kernel(
    x, w, ws, parts, out, scales, arrivals, M, N, K, blocks, part, x_row, x_group, groups,
    BM: tl.constexpr, BN: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, FOLD: tl.constexpr,
    SPLITS: tl.constexpr, GPU: tl.constexpr, GROUPED: tl.constexpr, QUANTIZED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    float_tile(
        tl.program_id(0), tl.program_id(1), x, w, ws, parts, out, arrivals, M, N, K, blocks, part, x_row, x_group, groups,
        BM, BN, SCALE_ROWS, EVEN_K, SWAP, FOLD, SPLITS, GPU, GROUPED, scales, QUANTIZED, NATIVE,
    )  # fmt: skip


@triton.jit
def _widen_kernel(
    w,
    ws,
    out,
    N,
    K,
    blocks,
    SCALE_ROWS: tl.constexpr,
    GPU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < N) & (column < K)
    # dequantize_fp8_rows(w_codes, w_scales).bfloat16(): powers of two round nothing
    codes = tl.load(w + row * K + column, mask=inside, other=0)
    scale = e8m0(tl.load(ws + row // SCALE_ROWS * blocks + column // 128, mask=inside, other=0))
    tl.store(out + row * K + column, (e4m3_to_bf16(codes, GPU).to(tl.float32) * scale).to(tl.bfloat16), mask=inside)


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    """Return a stream's counters of arrived programs, int32 [COUNTERS]: zero between kernels, which one stream runs in order."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "run a product on a stream before capturing one there: a graph cannot own what outlives it"
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def counters_of(device: torch.device) -> Tensor:
    """Return the counters of the current stream; graphs captured on one stream must not run side by side."""
    return _counters(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


def fp8_linear_triton(
    x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """See ``gemm.fp8_linear``."""
    (rows, inputs), outs = x_codes.shape, w_codes.shape[0]
    blocks = -(-inputs // FP8_GROUP)
    assert x_scales.shape == (rows, blocks) and w_codes.shape[1] == inputs, (x_scales.shape, w_codes.shape)
    assert w_codes.is_contiguous() and w_scales.is_contiguous()
    if rows == 0 or outs == 0:
        return x_codes.new_empty((rows, outs), dtype=dtype)
    capability = capability_of(x_codes.device)
    tile = tile_for(_FP8_TILES, rows, capability)
    codes = capability < 89
    x, w = x_codes.contiguous(), w_codes
    if codes:
        x, w = x.view(torch.uint8), w.view(torch.uint8)
    splits = splits_of(outs, blocks)
    if blocks // splits <= SHORT_BLOCKS:
        tile = replace(tile, num_stages=min(tile.num_stages, SHORT_STAGES))
    fold = rows > SPLIT_MAX_ROWS and splits > 1
    programs = 1 if fold else splits
    out = torch.empty(rows, outs, dtype=dtype, device=x.device)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(outs, tile.outs), programs)
    _fp8_kernel[grid](
        x,
        x_scales.contiguous(),
        w,
        w_scales,
        *room_for(programs, out),
        rows,
        outs,
        inputs,
        blocks,
        triton.cdiv(blocks, splits),
        BM=tile.rows,
        BN=tile.outs,
        SCALE_ROWS=scale_rows(w_codes, w_scales),
        EVEN_K=inputs % FP8_GROUP == 0,
        SWAP=tile.swap,
        FOLD=fold,
        SPLITS=programs,
        CODES=codes,
        GROUPED=GROUPED_TILES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(x.device),
    )
    return out


def fp8_weight_linear_triton(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor, *, any_order: bool = False) -> Tensor:
    """See ``gemm.fp8_weight_linear``; ``any_order`` leaves many rows to the library."""
    if any_order and len(x_MGK) > LIBRARY_ROWS:
        return _library_linear(x_MGK, widen_triton(w_codes, w_scales), x_MGK.dtype)
    return _float_linear(x_MGK, w_codes.view(torch.uint8), w_scales, scale_rows(w_codes, w_scales), x_MGK.dtype)


def fp8_weight_linear_quantize_triton(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor) -> tuple[Tensor, Tensor]:
    """See ``gemm.fp8_weight_linear_quantize``; for 1 to ``QUANTIZED_ROWS`` rows and a multiple of 128 results of each group."""
    rows, (groups, outs, _) = len(x_MGK), w_codes.shape
    assert 0 < rows <= QUANTIZED_ROWS and outs % FP8_GROUP == 0, (x_MGK.shape, w_codes.shape)
    codes = torch.empty(rows, groups, outs, dtype=torch.uint8, device=x_MGK.device)
    scales = torch.empty(rows, groups * outs // FP8_GROUP, dtype=torch.uint8, device=x_MGK.device)
    _float_linear(x_MGK, w_codes.view(torch.uint8), w_scales, scale_rows(w_codes, w_scales), codes.dtype, codes, scales)
    return codes.flatten(1).view(torch.float8_e4m3fn), scales


def float_linear_triton(
    x_MGK: Tensor, w_GNK: Tensor, dtype: torch.dtype, *, any_order: bool = False, out: Tensor | None = None
) -> Tensor:
    """See ``gemm.float_linear``; ``any_order`` leaves many rows to the library."""
    if any_order and len(x_MGK) > LIBRARY_ROWS:
        result = _library_linear(x_MGK, w_GNK, dtype)
        return result if out is None else out.copy_(result)
    return _float_linear(x_MGK, w_GNK, w_GNK, 0, dtype, out)


def widen_triton(w_codes: Tensor, w_scales: Tensor) -> Tensor:
    """Return FP8 weights [..., N, K] as bfloat16, exactly while the scales leave them within its range."""
    columns = w_codes.shape[-1]
    rows = w_codes.numel() // max(columns, 1)
    out = torch.empty(w_codes.shape, dtype=torch.bfloat16, device=w_codes.device)
    assert w_codes.is_contiguous() and w_scales.is_contiguous()
    if out.numel():
        _widen_kernel[(triton.cdiv(rows, _WIDEN_ROWS), triton.cdiv(columns, _WIDEN_COLUMNS))](
            w_codes.view(torch.uint8),
            w_scales,
            out,
            rows,
            columns,
            w_scales.shape[1],
            SCALE_ROWS=scale_rows(w_codes, w_scales),
            GPU=on_gpu(out.device),
            ROWS=_WIDEN_ROWS,
            COLUMNS=_WIDEN_COLUMNS,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def _library_linear(x_MGK: Tensor, w_GNK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each group's ``x @ w.T`` as the library orders it."""
    out = torch.empty(*x_MGK.shape[:2], w_GNK.shape[1], dtype=dtype, device=x_MGK.device)
    if dtype == x_MGK.dtype:
        torch.bmm(x_MGK.transpose(0, 1), w_GNK.transpose(1, 2), out=out.transpose(0, 1))
    else:
        for g, w_NK in enumerate(w_GNK):
            torch.mm(x_MGK[:, g], w_NK.t(), out_dtype=dtype, out=out[:, g])
    return out


def _float_linear(
    x_MGK: Tensor,
    w_GNK: Tensor,
    w_scales: Tensor,
    scale_rows: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    rows, (groups, outs, inputs) = x_MGK.shape[0], w_GNK.shape
    assert x_MGK.shape[1:] == (groups, inputs), (x_MGK.shape, w_GNK.shape)
    assert w_GNK.is_contiguous() and w_scales.is_contiguous()
    if rows == 0 or outs == 0:
        return x_MGK.new_empty((rows, groups, outs), dtype=dtype)
    even = inputs % FP8_GROUP == 0
    w = w_GNK.view(torch.int16) if even and scale_rows else w_GNK
    x = x_MGK if x_MGK.stride(2) == 1 and not (even and any(s % 16 for s in x_MGK.stride()[:2])) else x_MGK.contiguous()
    tile = tile_for(_WEIGHT_ONLY_TILES if scale_rows else _PLAIN_TILES, rows, capability_of(x.device))
    blocks = -(-inputs // FP8_GROUP)
    splits = splits_of(groups * outs, blocks)
    fold = rows > SPLIT_MAX_ROWS and splits > 1
    programs = 1 if fold else splits
    if out is None:
        out = torch.empty(rows, groups, outs, dtype=dtype, device=x.device)
    assert out.shape == (rows, groups, outs) and out.dtype == dtype and out.is_contiguous()
    parts, _, arrivals = room_for(programs, out, always=scales is not None)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(outs, tile.outs) * groups, programs)
    _float_kernel[grid](
        x,
        w,
        w_scales,
        parts,
        out,
        out if scales is None else scales,
        arrivals,
        rows,
        outs,
        inputs,
        blocks,
        triton.cdiv(blocks, splits),
        x.stride(0),
        x.stride(1),
        groups,
        BM=tile.rows,
        BN=tile.outs,
        SCALE_ROWS=scale_rows,
        EVEN_K=even,
        SWAP=tile.swap,
        FOLD=fold,
        SPLITS=programs,
        GPU=on_gpu(x.device),
        GROUPED=GROUPED_TILES,
        QUANTIZED=scales is not None,
        NATIVE=scales is not None and native_e4m3(x),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(x.device),
    )
    return out


def room_for(parts: int, out: Tensor, *, always: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return where a kernel puts the parts of a result, the result, and the counters of arrivals; one part is the result itself."""
    if parts == 1 and not always:
        return out, out, out
    return torch.empty(parts, *out.shape, dtype=torch.float32, device=out.device), out, counters_of(out.device)
