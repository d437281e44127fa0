"""The absorbed form on Hopper, for latents of 512 channels and 64 rotated ones.

The kernel is warp-specialized, and therefore written in Gluon. A piece has 128 rows. Eight producer warps bring each half of it to
shared memory as soon as its buffer is free: they copy rows of bfloat16, and widen codes of FP8 rows, which they have prefetched to
the L2 cache and load two groups of 128 channels ahead. Two groups of four consumer warps compute the logits of 64 rows of a piece
each, and sum half of the latents of all its rows.

The groups take their softmaxes one after the other: the first one passes on its weights with the peak and the total so far, and so
does the second one. Weights take the place of the rotated channels of their rows. While one group takes its softmax, products of
the other one keep the tensor cores busy.

An item is one token x a block of heads x a KV split; a program computes one after the other. Producers and consumers each count
items (``turn``) and pieces (``step``): the counts say which phase of a buffer's barriers to wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4lite.kernels.dispatch import HOPPER, capability_of, ceil_div, multiprocessors_of
from dsv4lite.kernels.hopper import STORED, copy_by_threads
from dsv4lite.kernels.latent_attention import MOST_HEADS, LatentAttentionInputs
from dsv4lite.kernels.latent_attention.prefill_hopper_triton import angles_of, rotate
from dsv4lite.kernels.rows.packed import LOG2_E, WIDEN_E4M3

PIECE_ROWS = 128
_HEADS = gl.constexpr(MOST_HEADS)  # of a block
_ROWS, _HALF = gl.constexpr(PIECE_ROWS), gl.constexpr(PIECE_ROWS // 2)
_LATENT, _ROPE = gl.constexpr(512), gl.constexpr(64)
_GROUPS = gl.constexpr(4)  # of 128 channels, which share scales
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# How producers have rows of bfloat16; and words of four codes of FP8 rows, their rotated channels, and their lines of cache. Each
# thread then has one FP8 row. Codes that are carried over a loop as bytes would take a register each.
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
_TAILS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
_LINES = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [8, 1], [1, 0]))
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def _item_of(item, positions, begin, splits, TOP_K: gl.constexpr, BLOCKS: gl.constexpr):
    """Return an item's token, block of heads, KV split, number of rows, and whether its rows are selected."""
    token, block, split = item // (BLOCKS * splits), item // splits % BLOCKS, item % splits
    count = gl.load(positions + begin + token) + 1
    listed = count > TOP_K
    if TOP_K > 0:
        count = gl.minimum(count, TOP_K)
    return token.to(gl.int64), block, split, count, listed


@gluon.jit
def _rows_of(
    start, count, listed, selected, pages, first, TOP_K: gl.constexpr, PLACES: gl.constexpr, FP8: gl.constexpr,
    WIDENED: gl.constexpr,
):  # fmt: skip
    """Return the numbers of 64 rows from ``start`` on; from ``count`` on they repeat the last one."""
    # Reference: entry_addresses
    LAYOUT: gl.constexpr = _CODES if FP8 else _WIDE
    at = gl.minimum(start + gl.arange(0, _HALF, layout=gl.SliceLayout(1, LAYOUT)), count - 1)
    if TOP_K > 0:
        at = gl.where(listed, gl.load(selected + gl.where(listed, at, 0)), at)
    return first + at if WIDENED else gl.load(pages + at // PLACES) * PLACES + at % PLACES


@gluon.jit
def _codes_of(memory, place, GROUP: gl.constexpr, ROW: gl.constexpr):
    """Return words of the codes of a group of channels [64, 32] of FP8 rows ``place`` [64]."""
    words = gl.expand_dims(memory.to(gl.pointer_type(gl.int32)) + place.to(gl.int64) * (ROW // 4), 1)
    return gl.load(words + GROUP * 32 + gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, _CODES)), 0))


@gluon.jit
def _scales_of(memory, place, ROW: gl.constexpr):
    """Return the bits of the scales of FP8 rows ``place`` [64], of each group."""
    at = memory.to(gl.pointer_type(gl.int32)) + place.to(gl.int64) * (ROW // 4) + _LATENT // 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def _prefetch(memory, place, ROW: gl.constexpr):
    """Bring FP8 rows ``place`` [64] to the L2 cache."""
    place = gl.convert_layout(place, gl.SliceLayout(1, _LINES), assert_trivial=True)
    line = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, _LINES)), 0) * 128
    row = gl.expand_dims(memory + place.to(gl.int64) * ROW, 1)
    ASM: gl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(ASM, "=r,l", [row + line], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(ASM, "=r,l", [row + gl.minimum(line + 512, ROW - 1)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pair(x):
    """Return the two bfloat16 numbers of words."""
    return (x & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True), (x >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _widen_words(words, bits):
    """Return the values of words of codes [64, 32] as bfloat16 [64, 128], given the bits of the rows' scales."""
    # Reference: Fp8Latent.unpack.  Exponent and mantissa, shifted to bit 4 of a bfloat16, are 2^-120 times the value.
    words, factor = gl.broadcast(words, gl.expand_dims((bits >> 16) * 0x10001, 1))
    low, high = gl.inline_asm_elementwise(
        WIDEN_E4M3, "=r,=r,r,r,r", [words, factor, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    first, second = _pair(low)
    third, fourth = _pair(high)
    return gl.reshape(gl.join(gl.join(first, third), gl.join(second, fourth)), (_HALF, 128))


@gluon.jit
def _first_codes(memory, place, ROW: gl.constexpr):
    """Return words of the codes of FP8 rows ``place`` [64] in the first two groups, and the bits of their scales in all groups."""
    words0, words1 = _codes_of(memory, place, 0, ROW), _codes_of(memory, place, 1, ROW)
    bits0, bits1, bits2, bits3 = _scales_of(memory, place, ROW)
    return words0, words1, bits0, bits1, bits2, bits3


@gluon.jit
def _bring_codes(memory, place, following, ahead, HALF: gl.constexpr, buffers, full, ROW: gl.constexpr):
    """Bring half of a piece of FP8 rows to shared memory, widened.

    Args:
        place: Numbers of its rows.
        following: Those of the next half's rows.
        ahead: ``_first_codes`` of this half.

    Returns:
        ``_first_codes`` of the next half.
    """
    _queries, _rotated_queries, keys, rotated, _stats = buffers
    words0, words1, bits0, bits1, bits2, bits3 = ahead
    tail = memory + gl.convert_layout(place, gl.SliceLayout(1, _TAILS), assert_trivial=True).to(gl.int64) * ROW
    tail = (tail + (_LATENT + 4 * _GROUPS)).to(gl.pointer_type(gl.bfloat16))
    pair = gl.arange(0, _ROPE, layout=gl.SliceLayout(0, _TAILS))
    copy_by_threads(rotated.index(HALF), gl.expand_dims(tail, 1) + gl.expand_dims(pair, 0))
    async_copy.mbarrier_arrive(full.index(HALF), increment_count=False)
    words2 = _codes_of(memory, place, 2, ROW)
    keys[4 * HALF].index(0).store(_widen_words(words0, bits0))
    words3 = _codes_of(memory, place, 3, ROW)
    keys[4 * HALF + 1].index(0).store(_widen_words(words1, bits1))
    words0 = _codes_of(memory, following, 0, ROW)
    keys[4 * HALF + 2].index(0).store(_widen_words(words2, bits2))
    words1 = _codes_of(memory, following, 1, ROW)
    keys[4 * HALF + 3].index(0).store(_widen_words(words3, bits3))
    bits0, bits1, bits2, bits3 = _scales_of(memory, following, ROW)
    fence_async_shared()
    mbarrier.arrive(full.index(HALF), count=1)
    return words0, words1, bits0, bits1, bits2, bits3


@gluon.jit
def _bring_rows(memory, place, HALF: gl.constexpr, buffers, full, ROW: gl.constexpr):
    """Bring half of a piece of bfloat16 rows ``place`` [64] to shared memory."""
    _queries, _rotated_queries, keys, rotated, _stats = buffers
    data = gl.expand_dims(memory + place.to(gl.int64) * ROW, 1)
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, _WIDE)), 0)
    for group in gl.static_range(_GROUPS):
        copy_by_threads(keys[4 * HALF + group].index(0), data + group * 128 + column)
    pair = gl.expand_dims(gl.arange(0, _ROPE, layout=gl.SliceLayout(0, _WIDE)), 0)
    copy_by_threads(rotated.index(HALF), data + _LATENT + pair)
    async_copy.mbarrier_arrive(full.index(HALF), increment_count=False)


@gluon.jit
def _bring_queries(query, q, cos, sin, token, of_step, block, buffers, full, H: gl.constexpr, TURNS: gl.constexpr):
    """Bring an item's queries to shared memory. Those of missing heads are zeros.

    Args:
        q: The first rotated channel of the step's token.
    """
    queries, rotated_queries, _keys, _rotated, _stats = buffers
    rotated_queries = rotated_queries.index(0)
    head = block * _HEADS + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _WIDE))
    inside = gl.expand_dims(head < H, 1)
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, _WIDE)), 0)
    pair = gl.expand_dims(gl.arange(0, _ROPE, layout=gl.SliceLayout(0, _WIDE)), 0)
    at = query + gl.expand_dims((token * H + head) * _LATENT, 1) + column
    for group in gl.static_range(_GROUPS):
        copy_by_threads(queries.index(group), at + group * 128, mask=inside)
    async_copy.mbarrier_arrive(full, increment_count=False)
    rotated_queries.store(gl.load(q + pair, mask=inside, other=0.0))
    if TURNS:
        c, s = angles_of(cos, sin, of_step, _HEADS, 0, 8)  # one token's
        rotate(rotated_queries, c, s, 8)
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _load(
    inputs, sizes, buffers, barriers, H: gl.constexpr, NOPE: gl.constexpr, ROW: gl.constexpr, PLACES: gl.constexpr,
    TOP_K: gl.constexpr, FP8: gl.constexpr, WIDENED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Producer warps: bring each item's rows and queries to shared memory."""
    query, q, cos, sin, memory, selected, positions, sequences, grow = inputs
    items, splits, begin, q_row, columns = sizes
    q_full, q_empty, k_full, k_empty, _p_full = barriers
    BLOCKS: gl.constexpr = (H + _HEADS - 1) // _HEADS
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, block, split, count, listed = _item_of(item, positions, begin, splits, TOP_K, BLOCKS)
        of_step = begin + token
        sequence = gl.load(sequences + of_step)
        pages, first = grow + sequence.to(gl.int64) * columns, sequence * columns * PLACES
        chosen = selected + of_step * TOP_K
        pieces = gl.cdiv(count, _ROWS)
        if split < pieces:
            place = _rows_of(split * _ROWS, count, listed, chosen, pages, first, TOP_K, PLACES, FP8, WIDENED)
            following = _rows_of(split * _ROWS + _HALF, count, listed, chosen, pages, first, TOP_K, PLACES, FP8, WIDENED)
            if FP8:
                _prefetch(memory, following, ROW)
                ahead = _first_codes(memory, place, ROW)
            for piece in range(split, pieces, splits):
                for half in gl.static_range(2):
                    start = (piece + splits) * _ROWS + half * _HALF
                    later = _rows_of(start, count, listed, chosen, pages, first, TOP_K, PLACES, FP8, WIDENED)
                    mbarrier.wait(k_empty.index(half), (step & 1) ^ 1)
                    if FP8:
                        ahead = _bring_codes(memory, place, following, ahead, half, buffers, k_full, ROW)
                        _prefetch(memory, later, ROW)
                    else:
                        _bring_rows(memory, place, half, buffers, k_full, ROW)
                    place = following
                    following = later
                if piece == split:
                    mbarrier.wait(q_empty, (turn & 1) ^ 1)
                    head = block * _HEADS + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _WIDE))
                    of_token = q + of_step * q_row + gl.expand_dims(head * (NOPE + _ROPE), 1) + NOPE
                    _bring_queries(query, of_token, cos, sin, token, of_step, block, buffers, q_full, H, TURNS)
                    turn += 1
                step += 1


@gluon.jit
def _hidden_zero(x):
    """Return zero, but hide it from the compiler, which would keep the descriptors of all tiles in registers over a loop."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _logits(buffers, zero, HALF: gl.constexpr):
    """Start the products of the queries and one half of a piece's rows."""
    queries, rotated_queries, keys, rotated, _stats = buffers
    none = gl.zeros((_HEADS, _HALF), gl.float32, _LOGITS)
    rows = keys[4 * HALF].index(zero).permute((1, 0))
    logits = warpgroup_mma(queries.index(zero), rows, none, use_acc=False, is_async=True)
    for group in gl.static_range(1, _GROUPS):
        rows = keys[4 * HALF + group].index(zero).permute((1, 0))
        logits = warpgroup_mma(queries.index(zero + group), rows, logits, is_async=True)
    return warpgroup_mma(rotated_queries.index(zero), rotated.index(zero + HALF).permute((1, 0)), logits, is_async=True)


@gluon.jit
def _weights_of(logits, rows, scale, peak, total):
    """Return the weights of the first ``rows`` of 64 rows, the factor of the sums so far, and the new peak and total."""
    if rows < _HALF:
        r = gl.expand_dims(gl.arange(0, _HALF, layout=gl.SliceLayout(0, logits.type.layout)), 0)
        logits = gl.where(r < rows, logits, float("-inf"))
    # Reference: sparse_attention, one block; exponentials of two instead of e.
    new_peak = gl.maximum(peak, gl.max(logits, 1) * scale)
    shrink = gl.exp2(peak - new_peak)
    weights = gl.exp2(logits * scale - gl.expand_dims(new_peak, 1))
    return weights.to(gl.bfloat16), shrink, new_peak, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _pass_on(weights, shrink, peak, total, buffers, full, HALF: gl.constexpr):
    """Pass on the results of ``_weights_of``; return the weights as operand of a product."""
    _queries, _rotated_queries, _keys, rotated, stats = buffers
    shrinks, peaks, totals = stats
    rotated.index(HALF).store(weights)
    shrinks.index(HALF).store(shrink)
    peaks.index(HALF).store(peak)
    totals.index(HALF).store(total)
    fence_async_shared()
    mbarrier.arrive(full.index(HALF), count=1)
    return gl.convert_layout(weights, gl.DotOperandLayout(0, _RESULT, 2))


@gluon.jit
def _passed(stats, HALF: gl.constexpr):
    """Return the factor of the sums so far, and the peak and total, as ``_pass_on`` has passed them on."""
    OF_LOGITS: gl.constexpr = gl.SliceLayout(1, _LOGITS)
    shrinks, peaks, totals = stats
    return shrinks.index(HALF).load(OF_LOGITS), peaks.index(HALF).load(OF_LOGITS), totals.index(HALF).load(OF_LOGITS)


@gluon.jit
def _add(weights, shrink, sums0, sums1, keys, zero, HALF: gl.constexpr, PART: gl.constexpr):
    """Start adding the weighted latents of one half of a piece's rows."""
    shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, _RESULT)), 1)
    sums0 *= shrink
    sums1 *= shrink
    sums0 = warpgroup_mma(weights, keys[4 * HALF + 2 * PART].index(zero), sums0, is_async=True)
    return sums0, warpgroup_mma(weights, keys[4 * HALF + 2 * PART + 1].index(zero), sums1, is_async=True)


@gluon.jit
def _attend(
    results, positions, sizes, scale, buffers, barriers, PART: gl.constexpr, H: gl.constexpr, TOP_K: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Consumer warps: compute the logits of half ``PART`` of every piece's rows, and sum half ``PART`` of the latents."""
    items, splits, begin, _q_row, _columns = sizes
    q_full, q_empty, k_full, k_empty, p_full = barriers
    _queries, _rotated_queries, keys, rotated, stats = buffers
    BLOCKS: gl.constexpr = (H + _HEADS - 1) // _HEADS
    OF_LOGITS: gl.constexpr = gl.SliceLayout(1, _LOGITS)
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, block, split, count, _listed = _item_of(item, positions, begin, splits, TOP_K, BLOCKS)
        pieces = gl.cdiv(count, _ROWS)
        sums0 = gl.zeros((_HEADS, 128), gl.float32, _RESULT)
        sums1 = gl.zeros((_HEADS, 128), gl.float32, _RESULT)
        peak = gl.full((_HEADS,), float("-inf"), gl.float32, OF_LOGITS)
        total = gl.zeros((_HEADS,), gl.float32, OF_LOGITS)
        if split < pieces:
            mbarrier.wait(q_full, turn & 1)
            turn += 1
        for piece in range(split, pieces, splits):
            rows = count - piece * _ROWS
            mbarrier.wait(k_full.index(PART), step & 1)
            zero = _hidden_zero(step)
            logits = _logits(buffers, zero, PART)
            if PART == 0:
                logits = warpgroup_mma_wait(0, deps=(logits,))
                weights, shrink, peak, total = _weights_of(logits, rows, scale, peak, total)
                weights = _pass_on(weights, shrink, peak, total, buffers, p_full, 0)
                sums0, sums1 = _add(weights, shrink, sums0, sums1, keys, zero, 0, PART)
                sums0, sums1 = warpgroup_mma_wait(0, deps=(sums0, sums1))
                mbarrier.arrive(k_empty.index(0), count=1)
                mbarrier.wait(p_full.index(1), step & 1)
                shrink, peak, total = _passed(stats, 1)
                sums0, sums1 = _add(rotated.index(zero + 1), shrink, sums0, sums1, keys, zero, 1, PART)
            else:
                mbarrier.wait(p_full.index(0), step & 1)
                shrink, peak, total = _passed(stats, 0)
                sums0, sums1 = _add(rotated.index(zero), shrink, sums0, sums1, keys, zero, 0, PART)
                logits = warpgroup_mma_wait(2, deps=(logits,))
                weights, shrink, peak, total = _weights_of(logits, rows - _HALF, scale, peak, total)
                sums0, sums1 = warpgroup_mma_wait(0, deps=(sums0, sums1))
                mbarrier.arrive(k_empty.index(0), count=1)
                weights = _pass_on(weights, shrink, peak, total, buffers, p_full, 1)
                sums0, sums1 = _add(weights, shrink, sums0, sums1, keys, zero, 1, PART)
            sums0, sums1 = warpgroup_mma_wait(0, deps=(sums0, sums1))
            mbarrier.arrive(k_empty.index(1), count=1)
            step += 1
        if split < pieces:
            mbarrier.arrive(q_empty, count=1)
        if not SPLIT:
            _store(results[0], (sums0, sums1), total, token, block, PART, H)
        elif split < pieces:
            _store_split(results, (sums0, sums1), peak, total, token + split * (items // (BLOCKS * splits)), block, PART, H)


@gluon.jit
def _store(out, sums, total, token, block, PART: gl.constexpr, H: gl.constexpr):
    """Store the results of an item; zeros for padding, which has no rows."""
    factor = gl.convert_layout(1.0 / gl.where(total > 0.0, total, 1.0), gl.SliceLayout(1, _RESULT))
    factor = gl.expand_dims(factor, 1)
    head = block * _HEADS + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, STORED))
    channel = PART * 256 + gl.arange(0, 128, layout=gl.SliceLayout(0, STORED))
    at = out + gl.expand_dims((token * H + head) * _LATENT, 1) + gl.expand_dims(channel, 0)
    inside = gl.expand_dims(head < H, 1)
    gl.store(at, gl.convert_layout((sums[0] * factor).to(gl.bfloat16), STORED), mask=inside)
    gl.store(at + 128, gl.convert_layout((sums[1] * factor).to(gl.bfloat16), STORED), mask=inside)


@gluon.jit
def _store_split(results, sums, peak, total, row, block, PART: gl.constexpr, H: gl.constexpr):
    """Store the sums of a KV split of a token as row ``row`` of all, with their peaks and totals."""
    parts, stats = results
    head = block * _HEADS + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _RESULT))
    channel = PART * 256 + gl.arange(0, 128, layout=gl.SliceLayout(0, _RESULT))
    at = parts + gl.expand_dims((row * H + head) * _LATENT, 1) + gl.expand_dims(channel, 0)
    inside = gl.expand_dims(head < H, 1)
    gl.store(at, sums[0], mask=inside)
    gl.store(at + 128, sums[1], mask=inside)
    if PART == 0:
        head = block * _HEADS + gl.arange(0, _HEADS, layout=peak.type.layout)
        gl.store(stats + (row * H + head) * 2, peak, mask=head < H)
        gl.store(stats + (row * H + head) * 2 + 1, total, mask=head < H)


@gluon.jit
def _tiles():
    """Allocate tiles of latents, four for each half of a piece. Between stores to parts of one buffer warps wait for each other."""
    k0 = gl.allocate_shared_memory(gl.bfloat16, [1, _HALF, 128], _OPERAND)
    k1 = gl.allocate_shared_memory(gl.bfloat16, [1, _HALF, 128], _OPERAND)
    k2 = gl.allocate_shared_memory(gl.bfloat16, [1, _HALF, 128], _OPERAND)
    k3 = gl.allocate_shared_memory(gl.bfloat16, [1, _HALF, 128], _OPERAND)
    k4 = gl.allocate_shared_memory(gl.bfloat16, [1, _HALF, 128], _OPERAND)
    k5 = gl.allocate_shared_memory(gl.bfloat16, [1, _HALF, 128], _OPERAND)
    k6 = gl.allocate_shared_memory(gl.bfloat16, [1, _HALF, 128], _OPERAND)
    k7 = gl.allocate_shared_memory(gl.bfloat16, [1, _HALF, 128], _OPERAND)
    return k0, k1, k2, k3, k4, k5, k6, k7


@gluon.jit(do_not_specialize=["items", "splits", "begin", "columns"])
def _absorbed_kernel(
    query, q, cos, sin, memory, selected, positions, sequences, grow, out, stats, items, splits, begin, q_row, columns, scale,
    H: gl.constexpr, NOPE: gl.constexpr, ROW: gl.constexpr, PLACES: gl.constexpr, TOP_K: gl.constexpr, SPLIT: gl.constexpr,
    FP8: gl.constexpr, WIDENED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    queries = gl.allocate_shared_memory(gl.bfloat16, [_GROUPS, _HEADS, 128], _OPERAND)
    rotated_queries = gl.allocate_shared_memory(gl.bfloat16, [1, _HEADS, _ROPE], _OPERAND)
    keys = _tiles()
    rotated = gl.allocate_shared_memory(gl.bfloat16, [2, _HALF, _ROPE], _OPERAND)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, _HEADS], _NUMBERS)
    peaks = gl.allocate_shared_memory(gl.float32, [2, _HEADS], _NUMBERS)
    totals = gl.allocate_shared_memory(gl.float32, [2, _HEADS], _NUMBERS)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=256 + 1)  # each thread that copies, and all threads that store
    mbarrier.init(q_empty, count=2)
    for half in gl.static_range(2):
        mbarrier.init(k_full.index(half), count=256 + 1 if FP8 else 256)
        mbarrier.init(k_empty.index(half), count=2)
        mbarrier.init(p_full.index(half), count=1)
    buffers = (queries, rotated_queries, keys, rotated, (shrinks, peaks, totals))
    barriers = (q_full, q_empty, k_full, k_empty, p_full)
    sizes = (items, splits, begin, q_row, columns)
    inputs = (query, q, cos, sin, memory, selected, positions, sequences, grow)
    results = (out, stats)
    gl.warp_specialize(
        [
            (_attend, (results, positions, sizes, scale, buffers, barriers, 0, H, TOP_K, SPLIT)),
            (_attend, (results, positions, sizes, scale, buffers, barriers, 1, H, TOP_K, SPLIT)),
            (_load, (inputs, sizes, buffers, barriers, H, NOPE, ROW, PLACES, TOP_K, FP8, WIDENED, TURNS)),
        ],
        [4, 8],  # warps and registers of the second and third function
        [200, 56],
    )


def takes_absorbed(given: LatentAttentionInputs) -> bool:
    """Return whether this kernel supports the chip and the sizes."""
    q_THC, sizes = given.q_THC, (given.up_HCL.shape[2], given.rope)
    return q_THC.dtype == torch.bfloat16 and sizes == (_LATENT.value, _ROPE.value) and capability_of(q_THC.device) == HOPPER


def attend_absorbed_hopper(
    given: LatentAttentionInputs, query_THL: Tensor, begin: int, rows: tuple[Tensor, int, bool], columns: int, selected: Tensor,
    results: tuple[Tensor, Tensor], *, widened: bool,
) -> None:  # fmt: skip
    """Write the weighted sums of latents, or those of KV splits with their peaks and totals, for what ``takes_absorbed``.

    Args:
        given, query_THL, begin: See ``attend_absorbed``.
        rows: Memory of rows, elements of a row, and whether they are FP8.
        columns: Pages of a sequence from one to the next in the page table, or in the result of ``widened_rows``.
        selected: ``given.selected_TK``; not read without a selection.
        results: Of one KV split the sums [N, H, L], bfloat16, and a tensor that is not written; of more the sums [S, N, H, L], and
            peaks and totals [S, N, H, 2], float32.
        widened: Rows are the result of ``widened_rows``.
    """
    (tokens, heads, _), paging, q, (memory, row, fp8) = query_THL.shape, given.paging, given.q_THC, rows
    items = tokens * ceil_div(heads, MOST_HEADS) * paging.splits
    _absorbed_kernel[(min(items, multiprocessors_of(q.device)),)](
        query_THL, q, *given.angles(), memory, selected, paging.positions_T, paging.sequence_T, paging.grow_SP, *results, items,
        paging.splits, begin, q.stride(0), columns, given.scale * LOG2_E,
        H=heads, NOPE=given.nope, ROW=row, PLACES=given.rows.rows_per_page,
        TOP_K=0 if given.selected_TK is None else given.selected_TK.shape[1], SPLIT=paging.splits > 1, FP8=fp8, WIDENED=widened,
        TURNS=given.cos is not None, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
