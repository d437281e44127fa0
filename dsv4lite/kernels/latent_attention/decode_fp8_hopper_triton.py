"""The absorbed form on Hopper for at most 16 heads and FP8 rows, of latents of 512 channels and 64 rotated ones.

With so few heads, widening the codes and moving them through shared memory takes longer than the products. Codes are therefore
widened in registers and multiplied from there, twice: rows are the M dimension of the product for logits, channels that of the
product for weighted sums. Heads are the N dimension of both.

The kernel is warp-specialized, and therefore written in Gluon. A producer warp lets the hardware copy pieces of 64 rows to shared
memory. Two teams of four warps take every other piece each. Each team has its own softmax; at the end of an item the second one
passes on its results to the first.

Codes become float16, which holds them exactly; one instruction does it for two codes. Scales, which are powers of two, multiply
logits and weights instead. Queries are multiplied by 1/4, and are exact in float16 between 2^-12 and 2^17. Weights are relative to
the largest product of a weight and a scale so far, and are multiplied by 2^15: those that are 2^-29 times as large still have all
bits.

An item is one token x a KV split; a program computes one after the other. All warps count the pieces of all items (``number``): the
count says which buffer is next, and which phase of its barriers to wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from dsv4lite.kernels.dispatch import multiprocessors_of
from dsv4lite.kernels.hopper import copy_tile, described
from dsv4lite.kernels.latent_attention import LatentAttentionInputs
from dsv4lite.kernels.latent_attention.decode_hopper_triton import (
    _GROUPS,
    _HALF,
    _LATENT,
    _NUMBERS,
    _OPERAND,
    _ROPE,
    _hidden_zero,
    _item_of,
    takes_absorbed,
)
from dsv4lite.kernels.rows import Fp8Latent
from dsv4lite.kernels.rows.packed import LOG2_E

FEW_PIECE_ROWS = _HALF.value
_MOST_HEADS = 16
_ROWS, _HEADS = _HALF, gl.constexpr(_MOST_HEADS)
_STAGES = gl.constexpr(4)
_QUERY_UNIT, _WEIGHT_UNIT = gl.constexpr(4.0), gl.constexpr(2.0**-15)  # what a float16 1 stands for
# Layouts in shared memory: words of four codes, scales, weights, and sums that a team passes on.
_CODES_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
_SCALES_SHARED = gl.constexpr(gl.NVMMASharedLayout(0, 32, rank=2))
_WEIGHTS_SHARED = gl.constexpr(gl.NVMMASharedLayout(32, 16, rank=2))
_SUMS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 2, [1, 0]))
_PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _MOST_HEADS, 16]))
# How a team has words of a group's codes: for logits a thread has 8 words of 2 rows, for sums one word of 16 rows. And its scales.
_WARPS = [[16, 0], [32, 0]]
_BY_ROW = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], _WARPS, [], [64, 32])
)
_BY_CHANNEL = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [], [64, 32]
    )
)
_SCALES = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], _WARPS, [], [64, 4])
)
# How it stores a group's sums: 4 channels side by side. From ``_PRODUCTS``, numbers do not change threads.
_SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1], [0, 8]], [[0, 2], [0, 4], [4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0]], [], [128, 16]
    )
)
_LINES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))  # words of whole rows
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # queries


@gluon.jit
def _bring(descriptors, inputs, sizes, buffers, barriers, PLACES: gl.constexpr, ROW: gl.constexpr):
    """Producer warp: copy each item's pieces as soon as their buffers are free. A piece lies in one page."""
    codes_at, scales_at, tails_at = descriptors
    _query, _q, _cos, _sin, positions, sequences, grow = inputs
    items, splits, begin, _q_row, columns = sizes
    codes, scales, tails = buffers
    full, empty = barriers
    number = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, _block, split, count, _listed = _item_of(item, positions, begin, splits, 0, 1)
        pieces = gl.cdiv(count, _ROWS)
        if split < pieces:
            pages = grow + gl.load(sequences + begin + token).to(gl.int64) * columns
            for piece in range(split, pieces, splits):
                stage, phase = number % _STAGES, (number // _STAGES & 1) ^ 1
                row = gl.load(pages + piece * _ROWS // PLACES) * PLACES + piece * _ROWS % PLACES
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(full.index(stage), _ROWS * ROW)
                copy_tile(codes_at, [row, 0], full.index(stage), codes.index(stage))
                copy_tile(scales_at, [row, _LATENT // 4], full.index(stage), scales.index(stage))
                copy_tile(tails_at, [row, (_LATENT + 4 * _GROUPS) // 2], full.index(stage), tails.index(stage))
                number += 1


@gluon.jit
def _in_operand_order(x):
    """Return [N, C] with channels in the order in which a thread has C / 4 neighbours of them in an operand of a product."""
    return gl.reshape(gl.permute(gl.reshape(x, (x.shape[0], 4, x.shape[1] // 8, 2)), (0, 2, 1, 3)), x.shape)


@gluon.jit
def _in_channel_order(x):
    """Return [128, N] with channels in their own order instead of that of ``_by_channel``."""
    return gl.reshape(gl.permute(gl.reshape(x, (2, 4, 2, 8, x.shape[1])), (1, 3, 0, 2, 4)), x.shape)


@gluon.jit
def _by_row(codes):
    """Return the codes of a group as operand [64, 128]; its channels are in the order of ``_in_operand_order``."""
    c0, c1, c2, c3 = gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b; .reg .b32 t, u;
        mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 t, a; cvt.rn.f16x2.e4m3x2 u, b;
        mov.b32 {$0, $1}, t; mov.b32 {$2, $3}, u;
        }""",
        "=h,=h,=h,=h,r", [codes.load(_BY_ROW)], dtype=(gl.float16,) * 4, is_pure=True, pack=1,
    )  # fmt: skip
    wide = gl.reshape(gl.join(gl.join(c0, c2), gl.join(c1, c3)), (_ROWS, 128))
    return gl.convert_layout(_in_operand_order(wide), gl.DotOperandLayout(0, _PRODUCTS, 2))


@gluon.jit
def _by_channel(codes):
    """Return the codes of a group as operand [128, 64]; ``_in_channel_order`` puts the results in order."""
    c0, c1, c2, c3 = gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b; .reg .b32 t;
        prmt.b32 t, $4, $5, 0x5140; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;
        prmt.b32 t, $4, $5, 0x7362; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $2, a; cvt.rn.f16x2.e4m3x2 $3, b;
        }""",
        "=&r,=&r,=&r,=r,r,r", [codes.load(_BY_CHANNEL)], dtype=(gl.float16,) * 4, is_pure=True, pack=2,
    )  # fmt: skip
    wide = gl.reshape(gl.join(gl.join(c0, c1), gl.join(c2, c3)), (_ROWS, 4, 8, 2, 2))
    wide = gl.reshape(gl.permute(wide, (4, 1, 3, 2, 0)), (128, _ROWS))
    return gl.convert_layout(wide, gl.DotOperandLayout(0, _PRODUCTS, 2))


@gluon.jit
def _scales_of(scales, rows):
    """Return the bits of each group's scales [64, 1], of the first ``rows`` of a piece's rows; zeros for the others."""
    OF_ROW: gl.constexpr = gl.SliceLayout(1, _PRODUCTS)
    r = gl.expand_dims(gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _SCALES)), 1)
    even, odd = gl.split(gl.reshape(gl.where(r < rows, scales.load(_SCALES), 0), (_ROWS, 2, 2)))
    b0, b2 = gl.split(even)
    b1, b3 = gl.split(odd)
    b0, b1 = gl.convert_layout(b0, OF_ROW, assert_trivial=True), gl.convert_layout(b1, OF_ROW, assert_trivial=True)
    b2, b3 = gl.convert_layout(b2, OF_ROW, assert_trivial=True), gl.convert_layout(b3, OF_ROW, assert_trivial=True)
    return gl.expand_dims(b0, 1), gl.expand_dims(b1, 1), gl.expand_dims(b2, 1), gl.expand_dims(b3, 1)


@gluon.jit
def _float(bits):
    """Return the float32 numbers with these bits."""
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _logits_of(codes, tails, bits, queries, rotated_queries, first):
    """Return the logits [64, 16] of a piece. Codes of a group are widened while those before them are multiplied."""
    b0, b1, b2, b3 = bits
    none = gl.zeros((_ROWS, _HEADS), gl.float32, _PRODUCTS)
    logits = warpgroup_mma(tails, rotated_queries.permute((1, 0)), none, use_acc=False, is_async=True)
    wide = _by_row(codes.slice(0, 32, 1))
    logits = warpgroup_mma_wait(0, deps=(logits,))
    part = warpgroup_mma(wide, queries.index(first).permute((1, 0)), none, use_acc=False, is_async=True)
    wide = _by_row(codes.slice(32, 32, 1))
    logits += warpgroup_mma_wait(0, deps=(part,)) * (_float(b0) * _QUERY_UNIT)
    part = warpgroup_mma(wide, queries.index(first + 1).permute((1, 0)), none, use_acc=False, is_async=True)
    wide = _by_row(codes.slice(64, 32, 1))
    logits += warpgroup_mma_wait(0, deps=(part,)) * (_float(b1) * _QUERY_UNIT)
    part = warpgroup_mma(wide, queries.index(first + 2).permute((1, 0)), none, use_acc=False, is_async=True)
    wide = _by_row(codes.slice(96, 32, 1))
    logits += warpgroup_mma_wait(0, deps=(part,)) * (_float(b2) * _QUERY_UNIT)
    part = warpgroup_mma(wide, queries.index(first + 3).permute((1, 0)), none, use_acc=False, is_async=True)
    return logits + warpgroup_mma_wait(0, deps=(part,)) * (_float(b3) * _QUERY_UNIT)


@gluon.jit
def _weighted(logits, bits, rows, scale, peak, totals, weights_of, first):
    """Store the weights of the first ``rows`` of a piece's rows, times the scales of each group, to shared memory.

    Args:
        peak, totals: The largest logarithm of a weight times its row's largest scale so far; and sums of weights, relative to it.

    Returns:
        The factor of the sums so far, and the new peak and totals.
    """
    b0, b1, b2, b3 = bits
    if rows < _ROWS:
        r = gl.expand_dims(gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _PRODUCTS)), 1)
        logits = gl.where(r < rows, logits, float("-inf"))
    # Reference: sparse_attention, one block; exponentials of two instead of e.
    largest = gl.maximum(gl.maximum(b0, b1), gl.maximum(b2, b3))
    logits = logits * scale + ((largest >> 23) - 127).to(gl.float32)
    new_peak = gl.maximum(peak, gl.max(logits, 0))
    shrink = gl.exp2(peak - new_peak)
    weights = gl.exp2(logits - gl.expand_dims(new_peak, 0))
    unit = (127 + 15 << 23) - largest  # the exponent of 2^15, less that of the largest scale
    weights_of.index(first).store((weights * _float(b0 + unit)).to(gl.float16))
    weights_of.index(first + 1).store((weights * _float(b1 + unit)).to(gl.float16))
    weights_of.index(first + 2).store((weights * _float(b2 + unit)).to(gl.float16))
    weights_of.index(first + 3).store((weights * _float(b3 + unit)).to(gl.float16))
    fence_async_shared()
    totals = totals * gl.expand_dims(shrink, 0) + weights * _float((254 << 23) - largest)
    return shrink, new_peak, totals


@gluon.jit
def _add(codes, shrink, sums, weights_of, first, empty):
    """Add a piece's weighted latents to the sums [128, 16] of each group of channels."""
    sums0, sums1, sums2, sums3 = sums
    shrink = gl.expand_dims(shrink, 0)
    wide = _by_channel(codes.slice(0, 32, 1))
    sums0 = warpgroup_mma(wide, weights_of.index(first), sums0 * shrink, is_async=True)
    wide = _by_channel(codes.slice(32, 32, 1))
    sums0 = warpgroup_mma_wait(0, deps=(sums0,))
    sums1 = warpgroup_mma(wide, weights_of.index(first + 1), sums1 * shrink, is_async=True)
    wide = _by_channel(codes.slice(64, 32, 1))
    sums1 = warpgroup_mma_wait(0, deps=(sums1,))
    sums2 = warpgroup_mma(wide, weights_of.index(first + 2), sums2 * shrink, is_async=True)
    wide = _by_channel(codes.slice(96, 32, 1))
    mbarrier.arrive(empty, count=1)
    sums2 = warpgroup_mma_wait(0, deps=(sums2,))
    sums3 = warpgroup_mma(wide, weights_of.index(first + 3), sums3 * shrink, is_async=True)
    return sums0, sums1, sums2, warpgroup_mma_wait(0, deps=(sums3,))


@gluon.jit
def _without_rest(codes, rows):
    """Replace codes from row ``rows`` on by zeros: they may be NaN, which no weight of zero leaves out."""
    r = gl.expand_dims(gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _LINES)), 1)
    codes.store(gl.where(r < rows, codes.load(_LINES), 0))


@gluon.jit
def _bring_queries(
    inputs, sizes, token, queries, rotated_queries, TEAM: gl.constexpr, H: gl.constexpr, NOPE: gl.constexpr, TURNS: gl.constexpr
):  # fmt: skip
    """Bring an item's queries to shared memory, in operand order. Those of missing heads are zeros."""
    query, q, cos, sin, _positions, _sequences, _grow = inputs
    _items, _splits, begin, q_row, _columns = sizes
    of_step = begin + token
    head = gl.expand_dims(gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _WIDE)), 1)
    at = query + (token * H + head) * _LATENT + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, _WIDE)), 0)
    for group in gl.static_range(_GROUPS):
        x = gl.load(at + group * 128, mask=head < H, other=0.0).to(gl.float32) * (1.0 / _QUERY_UNIT)
        queries.index(_GROUPS * TEAM + group).store(_in_operand_order(x.to(gl.float16)))
    pair = gl.expand_dims(gl.arange(0, _ROPE, layout=gl.SliceLayout(0, _WIDE)), 0)
    x = gl.load(q + of_step * q_row + head * (NOPE + _ROPE) + NOPE + pair, mask=head < H, other=0.0)
    if TURNS:
        # Reference: rope
        even, odd = gl.split(gl.reshape(x.to(gl.float32), (_HEADS, _ROPE // 2, 2)))
        angle = of_step * (_ROPE // 2) + gl.arange(0, _ROPE // 2, layout=gl.SliceLayout(0, even.type.layout))
        c, s = gl.expand_dims(gl.load(cos + angle), 0), gl.expand_dims(gl.load(sin + angle), 0)
        x = gl.reshape(gl.join(even * c - odd * s, odd * c + even * s), (_HEADS, _ROPE)).to(gl.bfloat16)
    rotated_queries.store(gl.convert_layout(x, _WIDE))
    fence_async_shared()


@gluon.jit
def _attend(
    inputs, results, sizes, scale, buffers, own, passed, barriers, TEAM: gl.constexpr, H: gl.constexpr, NOPE: gl.constexpr,
    SPLIT: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A team: attend to the pieces with an even (``TEAM`` 0) or odd (1) number. The first team stores the results."""
    _query, _q, _cos, _sin, positions, _sequences, _grow = inputs
    items, splits, begin, _q_row, _columns = sizes
    codes, scales, tails = buffers
    queries, rotated_queries, weights = own
    full, empty, s_full, s_empty = barriers
    number = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, _block, split, count, _listed = _item_of(item, positions, begin, splits, 0, 1)
        pieces = gl.cdiv(count, _ROWS)
        pieces_of_item = gl.cdiv(pieces - split, splits)
        sums = (gl.zeros((128, _HEADS), gl.float32, _PRODUCTS),) * 4
        peak = gl.full((_HEADS,), float("-inf"), gl.float32, gl.SliceLayout(0, _PRODUCTS))
        totals = gl.zeros((_ROWS, _HEADS), gl.float32, _PRODUCTS)
        if split < pieces:
            _bring_queries(inputs, sizes, token, queries, rotated_queries.index(TEAM), TEAM, H, NOPE, TURNS)
        for turn in range(number + TEAM & 1, pieces_of_item, 2):
            rows, first = count - (split + turn * splits) * _ROWS, _hidden_zero(turn) + _GROUPS * TEAM
            stage, phase = (number + turn) % _STAGES, (number + turn) // _STAGES & 1
            mbarrier.wait(full.index(stage), phase)
            bits = _scales_of(scales.index(stage), rows)
            if rows < _ROWS:
                _without_rest(codes.index(stage), rows)
            logits = _logits_of(codes.index(stage), tails.index(stage), bits, queries, rotated_queries.index(TEAM), first)
            shrink, peak, totals = _weighted(logits, bits, rows, scale, peak, totals, weights, first)
            sums = _add(codes.index(stage), shrink, sums, weights, first, empty.index(stage))
        total = gl.sum(totals, 0)
        if (number + 1 & 1) < pieces_of_item:  # the second team has pieces of the item
            if TEAM == 0:
                sums, peak, total = _joined(sums, peak, total, passed, s_full, s_empty)
            else:
                _pass_on(sums, peak, total, passed, s_full, s_empty)
        number += pieces_of_item
        if TEAM == 0:
            if not SPLIT:
                _store(results[0], sums, total, token, H)
            elif split < pieces:
                _store_split(results, sums, peak, total, token + split * (items // splits), H)


@gluon.jit
def _pass_on(sums, peak, total, passed, full, empty):
    """Pass on the second team's results, one group of channels after the other."""
    group_sums, numbers = passed
    numbers.index(0).store(peak)
    numbers.index(1).store(total)
    for group in gl.static_range(_GROUPS):
        mbarrier.wait(empty, (group & 1) ^ 1)
        group_sums.store(sums[group])
        mbarrier.arrive(full, count=1)


@gluon.jit
def _joined(sums, peak, total, passed, full, empty):
    """Return the first team's results and those that ``_pass_on`` passes on together."""
    group_sums, numbers = passed
    joined = ()
    for group in gl.static_range(_GROUPS):
        mbarrier.wait(full, group & 1)
        if group == 0:
            other_peak = numbers.index(0).load(peak.type.layout)
            new_peak = gl.maximum(peak, other_peak)
            mine, others = gl.exp2(peak - new_peak), gl.exp2(other_peak - new_peak)
            total = total * mine + numbers.index(1).load(peak.type.layout) * others
            mine, others = gl.expand_dims(mine, 0), gl.expand_dims(others, 0)
        joined += (sums[group] * mine + group_sums.load(_PRODUCTS) * others,)
        mbarrier.arrive(empty, count=1)
    return joined, new_peak, total


@gluon.jit
def _store(out, sums, total, row, H: gl.constexpr):
    """Store the results of a token as row ``row``; zeros for padding, which has no rows."""
    factor = gl.expand_dims(_WEIGHT_UNIT / gl.where(total > 0.0, total, 1.0), 0)
    for group in gl.static_range(_GROUPS):
        _store_group(out, (sums[group] * factor).to(gl.bfloat16), row, group, H)


@gluon.jit
def _store_split(results, sums, peak, total, row, H: gl.constexpr):
    """Store the sums of a KV split of a token as row ``row`` of all, with their peaks and totals."""
    parts, stats = results
    for group in gl.static_range(_GROUPS):
        _store_group(parts, sums[group] * _WEIGHT_UNIT, row, group, H)
    head = gl.arange(0, _HEADS, layout=peak.type.layout)
    gl.store(stats + (row * H + head) * 2, peak, mask=head < H)
    gl.store(stats + (row * H + head) * 2 + 1, total, mask=head < H)


@gluon.jit
def _store_group(out, sums, row, GROUP: gl.constexpr, H: gl.constexpr):
    """Store the sums [128, 16] of a group of channels."""
    head = gl.expand_dims(gl.arange(0, _HEADS, layout=gl.SliceLayout(0, _SUMS)), 0)
    channel = GROUP * 128 + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, _SUMS)), 1)
    x = gl.convert_layout(_in_channel_order(sums), _SUMS, assert_trivial=True)
    gl.store(out + (row * H + head) * _LATENT + channel, x, mask=head < H)


@gluon.jit(do_not_specialize=["items", "splits", "begin", "columns"])
def _few_heads_kernel(
    codes_at, scales_at, tails_at, query, q, cos, sin, positions, sequences, grow, out, stats, items, splits, begin, q_row, columns,
    scale, H: gl.constexpr, NOPE: gl.constexpr, ROW: gl.constexpr, PLACES: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    codes = gl.allocate_shared_memory(gl.int32, [_STAGES, _ROWS, _LATENT // 4], _CODES_SHARED)
    scales = gl.allocate_shared_memory(gl.int32, [_STAGES, _ROWS, _GROUPS], _SCALES_SHARED)
    tails = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _ROWS, _ROPE], _OPERAND)
    queries = gl.allocate_shared_memory(gl.float16, [2 * _GROUPS, _HEADS, 128], _OPERAND)
    rotated_queries = gl.allocate_shared_memory(gl.bfloat16, [2, _HEADS, _ROPE], _OPERAND)
    weights = gl.allocate_shared_memory(gl.float16, [2 * _GROUPS, _ROWS, _HEADS], _WEIGHTS_SHARED)
    sums = gl.allocate_shared_memory(gl.float32, [128, _HEADS], _SUMS_SHARED)
    numbers = gl.allocate_shared_memory(gl.float32, [2, _HEADS], _NUMBERS)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # of sums that a team passes on
    s_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(s_full, count=1)
    mbarrier.init(s_empty, count=1)
    inputs = (query, q, cos, sin, positions, sequences, grow)
    sizes = (items, splits, begin, q_row, columns)
    buffers, own, passed = (codes, scales, tails), (queries, rotated_queries, weights), (sums, numbers)
    barriers = (full, empty, s_full, s_empty)
    gl.warp_specialize(
        [
            (_attend, (inputs, (out, stats), sizes, scale, buffers, own, passed, barriers, 0, H, NOPE, SPLIT, TURNS)),
            (_attend, (inputs, (out, stats), sizes, scale, buffers, own, passed, barriers, 1, H, NOPE, SPLIT, TURNS)),
            (_bring, ((codes_at, scales_at, tails_at), inputs, sizes, buffers, (full, empty), PLACES, ROW)),
        ],
        [4, 1],  # warps and registers of the second and third function
        [232, 24],
    )


def takes_few_heads(given: LatentAttentionInputs) -> bool:
    """Return whether this kernel supports the chip, the sizes and the rows, of which none are selected.

    The order of its sums is its own. Where it is fixed, a step must not take another kernel because a token of it selects rows.
    """
    fits = given.q_THC.shape[1] <= _MOST_HEADS and given.rows.rows_per_page % FEW_PIECE_ROWS == 0
    takes = given.any_order and given.selected_TK is None and isinstance(given.rows.format, Fp8Latent)
    return takes and fits and takes_absorbed(given)


def attend_few_heads(
    given: LatentAttentionInputs, query_THL: Tensor, begin: int, rows: tuple[Tensor, int], results: tuple[Tensor, Tensor]
) -> None:
    """Write the weighted sums of latents, or those of KV splits with their peaks and totals, for what ``takes_few_heads``.

    Args:
        given, query_THL, begin: See ``attend_absorbed``.
        rows: Memory of rows, and bytes of a row.
        results: See ``attend_absorbed_hopper``.
    """
    (tokens, heads, _), paging, q, (memory, row) = query_THL.shape, given.paging, given.q_THC, rows
    items = tokens * paging.splits
    words, halves = memory.view(torch.int32).view(-1, row // 4), memory.view(torch.bfloat16).view(-1, row // 2)
    _few_heads_kernel[(min(items, multiprocessors_of(q.device)),)](
        described(words, (FEW_PIECE_ROWS, _LATENT.value // 4), _CODES_SHARED.value),
        described(words, (FEW_PIECE_ROWS, _GROUPS.value), _SCALES_SHARED.value),
        described(halves, (FEW_PIECE_ROWS, _ROPE.value), _OPERAND.value),
        query_THL, q, *given.angles(), paging.positions_T, paging.sequence_T, paging.grow_SP, *results, items,
        paging.splits, begin, q.stride(0), paging.grow_SP.stride(0), given.scale * LOG2_E,
        H=heads, NOPE=given.nope, ROW=row, PLACES=given.rows.rows_per_page, SPLIT=paging.splits > 1,
        TURNS=given.cos is not None, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
