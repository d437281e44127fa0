"""The absorbed form on Hopper for at most 16 heads and FP8 rows, of latents of 512 channels and 64 rotated ones.

With so few heads, widening the codes takes longer than the products. Rows, and then channels, are therefore the M dimension of the
products, and heads N: a thread multiplies codes by the queries right from the registers in which it has widened them.

The kernel is warp-specialized, and therefore written in Gluon. A piece has 64 rows, and two groups of four warps take turns. They
copy the codes of their next piece to shared memory while they widen those of the current one, compute logits, and store logits and
widened latents to shared memory. Four other warps take the softmax, and add up the weighted latents.

A thread widens 32 neighbouring codes of a row at a time. For the product with the queries, channels are in an order in which these
are what a thread has of an operand (``_in_operand_order``); latents are stored in this order, too.

An item is one token x a KV split; a program computes one after the other. Both sides count pieces over all items (``number``): the
count says which phase of a buffer's barriers to wait for.
"""

from __future__ import annotations

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

from dsv4lite.kernels.dispatch import multiprocessors_of
from dsv4lite.kernels.hopper import copy_by_threads
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
    _weights_of,
    _widen_words,
    takes_absorbed,
)
from dsv4lite.kernels.rows import Fp8Latent
from dsv4lite.kernels.rows.packed import LOG2_E

FEW_PIECE_ROWS = _HALF.value
_MOST_HEADS = 16
_ROWS, _HEADS = _HALF, gl.constexpr(_MOST_HEADS)
_WORDS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_TRANSPOSED = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))
_PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _MOST_HEADS, 16]))
# How four warps have words of four codes, rotated channels and scales of a piece's rows.
_LANES, _WARPS = [[1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
_CODES = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], *_LANES], _WARPS, [], [64, 32])
)
_TAILS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], [[0, 16], [0, 32], *_LANES], _WARPS, [], [64, 64])
)
_SCALES = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], *_LANES], _WARPS, [], [64, 4]))
_COPIED = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))  # words of whole rows
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # queries
# How they have logits for the softmax: all rows of a head are in one warp.
_LOGITS = gl.constexpr(
    gl.DistributedLinearLayout([[1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [32, 0], [0, 1], [0, 2]], [[0, 4], [0, 8]], [], [64, 16])
)


@gluon.jit
def _piece_at(piece, count, memory, pages, ROW: gl.constexpr, PLACES: gl.constexpr):
    """Return the pointer to a piece, which lies in one page."""
    page = gl.load(pages + gl.minimum(piece * _ROWS, count - 1) // PLACES)
    return memory + (page * PLACES + piece * _ROWS % PLACES).to(gl.int64) * ROW


@gluon.jit
def _offsets(last, ROW: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the bytes from a piece to its rows [64, 1]; from row ``last`` on they repeat it."""
    return gl.expand_dims(gl.minimum(gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT)), last), 1) * ROW


@gluon.jit
def _copy_codes(place, last, codes, ROW: gl.constexpr):
    """Start to copy the codes of a piece to shared memory, if it exists: otherwise ``last`` is negative."""
    offsets = _offsets(last, ROW, _COPIED)
    words = (place + offsets).to(gl.pointer_type(gl.int32))
    column = gl.expand_dims(gl.arange(0, _LATENT // 4, layout=gl.SliceLayout(0, _COPIED)), 0)
    copy_by_threads(codes, words + column, mask=offsets >= 0)
    async_copy.commit_group()


@gluon.jit
def _scales_of(place, last, ROW: gl.constexpr):
    """Return the bits of the scales of a piece's rows [64], of each group."""
    at = (place + _LATENT + _offsets(last, ROW, _SCALES)).to(gl.pointer_type(gl.int32))
    bits = gl.load(at + gl.expand_dims(gl.arange(0, _GROUPS, layout=gl.SliceLayout(0, _SCALES)), 0))
    even, odd = gl.split(gl.reshape(bits, (_ROWS, 2, 2)))
    bits0, bits2 = gl.split(even)
    bits1, bits3 = gl.split(odd)
    return bits0, bits1, bits2, bits3


@gluon.jit
def _tails_of(place, last, ROW: gl.constexpr):
    """Return the rotated channels of a piece's rows, [64, 64]."""
    at = (place + (_LATENT + 4 * _GROUPS) + _offsets(last, ROW, _TAILS)).to(gl.pointer_type(gl.bfloat16))
    return gl.load(at + gl.expand_dims(gl.arange(0, _ROPE, layout=gl.SliceLayout(0, _TAILS)), 0))


@gluon.jit
def _in_operand_order(x):
    """Return [N, C] with channels in the order in which a thread has C / 4 neighbours of them in an operand of a product."""
    return gl.reshape(gl.permute(gl.reshape(x, (x.shape[0], 4, x.shape[1] // 8, 2)), (0, 2, 1, 3)), x.shape)


@gluon.jit
def _in_channel_order(x):
    """Return [C, N] with channels, which are in operand order, in their own order."""
    return gl.reshape(gl.permute(gl.reshape(x, (x.shape[0] // 8, 4, 2, x.shape[1])), (1, 0, 2, 3)), x.shape)


@gluon.jit
def _operand(x):
    """Return rows [64, C] as operand of their product with the queries."""
    return gl.convert_layout(_in_operand_order(x), gl.DotOperandLayout(0, _PRODUCTS, 2))


@gluon.jit
def _widened_operand(words, bits):
    """Return the values of words of codes [64, 32] as ``_operand``; see ``_widen_words``."""
    return _operand(_widen_words(words, gl.convert_layout(bits, gl.SliceLayout(1, _CODES), assert_trivial=True)))


@gluon.jit
def _widen_piece(
    place, last, following, last_following, codes, buffers, empty, phase, zero, BUFFER: gl.constexpr, ROW: gl.constexpr
):  # fmt: skip
    """Widen a piece, and store its latents and logits to shared memory.

    Args:
        place, last: Pointer to the piece, and its last row.
        following, last_following: Those of the piece that these warps take next; see ``_copy_codes``.
        codes: Words of the piece's codes [64, 128], which the next ones replace.
    """
    queries, rotated_queries, latents, logits_of, _weights, _shrinks = buffers
    none = gl.zeros((_ROWS, _HEADS), gl.float32, _PRODUCTS)
    bits0, bits1, bits2, bits3 = _scales_of(place, last, ROW)
    tails = _tails_of(place, last, ROW)
    async_copy.wait_group(0)
    words0, words1 = codes.slice(0, 32, 1).load(_CODES), codes.slice(32, 32, 1).load(_CODES)
    words2, words3 = codes.slice(64, 32, 1).load(_CODES), codes.slice(96, 32, 1).load(_CODES)
    _copy_codes(following, last_following, codes, ROW)
    wide = _widened_operand(words0, bits0)
    logits = warpgroup_mma(wide, queries.index(zero).permute((1, 0)), none, is_async=True)
    mbarrier.wait(empty, phase)
    latents[0].index(BUFFER).store(wide)
    wide = _widened_operand(words1, bits1)
    logits = warpgroup_mma_wait(0, deps=(logits,))
    logits = warpgroup_mma(wide, queries.index(zero + 1).permute((1, 0)), logits, is_async=True)
    latents[1].index(BUFFER).store(wide)
    wide = _widened_operand(words2, bits2)
    logits = warpgroup_mma_wait(0, deps=(logits,))
    logits = warpgroup_mma(wide, queries.index(zero + 2).permute((1, 0)), logits, is_async=True)
    latents[2].index(BUFFER).store(wide)
    wide = _widened_operand(words3, bits3)
    logits = warpgroup_mma_wait(0, deps=(logits,))
    logits = warpgroup_mma(wide, queries.index(zero + 3).permute((1, 0)), logits, is_async=True)
    latents[3].index(BUFFER).store(wide)
    logits = warpgroup_mma(_operand(tails), rotated_queries.index(zero).permute((1, 0)), logits, is_async=True)
    logits_of.index(BUFFER).store(warpgroup_mma_wait(0, deps=(logits,)))
    fence_async_shared()


@gluon.jit
def _widen(inputs, sizes, buffers, barriers, TEAM: gl.constexpr, ROW: gl.constexpr, PLACES: gl.constexpr):
    """Widen every other piece: those whose number is even (``TEAM`` 0) or odd (1)."""
    _query, _q, _cos, _sin, memory, positions, sequences, grow = inputs
    items, splits, begin, _q_row, columns = sizes
    q_full, q_empty, full, empty = barriers
    codes = gl.allocate_shared_memory(gl.int32, [_ROWS, _LATENT // 4], _WORDS)
    number = TEAM
    past = 0  # pieces of the items so far
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, _block, split, count, _listed = _item_of(item, positions, begin, splits, 0, 1)
        pieces = gl.cdiv(count, _ROWS)
        if split < pieces:
            pages = grow + gl.load(sequences + begin + token).to(gl.int64) * columns
            first, stride = split + (number - past) * splits, 2 * splits
            place = _piece_at(first, count, memory, pages, ROW, PLACES)
            following = _piece_at(first + stride, count, memory, pages, ROW, PLACES)
            _copy_codes(place, count - 1 - first * _ROWS, codes, ROW)
            mbarrier.wait(q_full, turn & 1)
            for piece in range(first, pieces, stride):
                later = _piece_at(piece + 2 * stride, count, memory, pages, ROW, PLACES)
                last, phase = count - 1 - piece * _ROWS, (number // 2 & 1) ^ 1
                _widen_piece(
                    place, last, following, last - stride * _ROWS, codes, buffers, empty.index(TEAM), phase, _hidden_zero(number),
                    TEAM, ROW,
                )  # fmt: skip
                mbarrier.arrive(full.index(TEAM), count=1)
                place = following
                following = later
                number += 2
            past += gl.cdiv(pieces - split, splits)
            turn += 1
            mbarrier.arrive(q_empty, count=1)


@gluon.jit
def _bring_queries(inputs, sizes, token, buffers, H: gl.constexpr, NOPE: gl.constexpr, TURNS: gl.constexpr):
    """Bring an item's queries to shared memory, in operand order. Those of missing heads are zeros."""
    query, q, cos, sin, _memory, _positions, _sequences, _grow = inputs
    _items, _splits, begin, q_row, _columns = sizes
    queries, rotated_queries, _latents, _logits, _weights, _shrinks = buffers
    of_step = begin + token
    head = gl.expand_dims(gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _WIDE)), 1)
    at = query + (token * H + head) * _LATENT + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, _WIDE)), 0)
    for group in gl.static_range(_GROUPS):
        queries.index(group).store(_in_operand_order(gl.load(at + group * 128, mask=head < H, other=0.0)))
    pair = gl.expand_dims(gl.arange(0, _ROPE, layout=gl.SliceLayout(0, _WIDE)), 0)
    x = gl.load(q + of_step * q_row + head * (NOPE + _ROPE) + NOPE + pair, mask=head < H, other=0.0)
    if TURNS:
        # Reference: rope
        even, odd = gl.split(gl.reshape(x.to(gl.float32), (_HEADS, _ROPE // 2, 2)))
        angle = of_step * (_ROPE // 2) + gl.arange(0, _ROPE // 2, layout=gl.SliceLayout(0, even.type.layout))
        c, s = gl.expand_dims(gl.load(cos + angle), 0), gl.expand_dims(gl.load(sin + angle), 0)
        x = gl.reshape(gl.join(even * c - odd * s, odd * c + even * s), (_HEADS, _ROPE)).to(gl.bfloat16)
    rotated_queries.index(0).store(_in_operand_order(x))
    fence_async_shared()


@gluon.jit
def _add(weights, shrink, sums, buffers, buffer):
    """Add a piece's weighted latents to the sums [128, 16] of each group of channels."""
    _queries, _rotated_queries, latents, _logits, weights_of, shrinks = buffers
    sums0, sums1, sums2, sums3 = sums
    weights_of.index(0).store(gl.permute(weights, (1, 0)))
    shrinks.store(shrink)
    fence_async_shared()
    shrink = gl.expand_dims(shrinks.load(gl.SliceLayout(0, _PRODUCTS)), 0)
    weights = weights_of.index(0).permute((1, 0))
    sums0 = warpgroup_mma(latents[0].index(buffer).permute((1, 0)), weights, sums0 * shrink, is_async=True)
    sums1 = warpgroup_mma(latents[1].index(buffer).permute((1, 0)), weights, sums1 * shrink, is_async=True)
    sums2 = warpgroup_mma(latents[2].index(buffer).permute((1, 0)), weights, sums2 * shrink, is_async=True)
    sums3 = warpgroup_mma(latents[3].index(buffer).permute((1, 0)), weights, sums3 * shrink, is_async=True)
    return warpgroup_mma_wait(0, deps=(sums0, sums1, sums2, sums3))


@gluon.jit
def _attend(
    inputs, results, sizes, scale, buffers, barriers, H: gl.constexpr, NOPE: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Bring each item's queries, take the softmax, add up the weighted latents, and store the results."""
    _query, _q, _cos, _sin, _memory, positions, _sequences, _grow = inputs
    items, splits, begin, _q_row, _columns = sizes
    q_full, q_empty, full, empty = barriers
    _queries, _rotated_queries, _latents, logits_of, _weights, _shrinks = buffers
    number = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, _block, split, count, _listed = _item_of(item, positions, begin, splits, 0, 1)
        pieces = gl.cdiv(count, _ROWS)
        sums = (gl.zeros((128, _HEADS), gl.float32, _PRODUCTS),) * 4
        peak = gl.full((_HEADS,), float("-inf"), gl.float32, gl.SliceLayout(0, _LOGITS))
        total = gl.zeros((_HEADS,), gl.float32, gl.SliceLayout(0, _LOGITS))
        if split < pieces:
            mbarrier.wait(q_empty, (turn & 1) ^ 1)
            _bring_queries(inputs, sizes, token, buffers, H, NOPE, TURNS)
            mbarrier.arrive(q_full, count=1)
            turn += 1
        for piece in range(split, pieces, splits):
            buffer = number & 1
            mbarrier.wait(full.index(buffer), number // 2 & 1)
            logits = logits_of.index(buffer).load(_LOGITS)
            weights, shrink, peak, total = _weights_of(logits, count - piece * _ROWS, scale, peak, total, 0)
            sums = _add(weights, shrink, sums, buffers, buffer)
            mbarrier.arrive(empty.index(buffer), count=1)
            number += 1
        if not SPLIT:
            _store(results[0], sums, total, token, H)
        elif split < pieces:
            _store_split(results, sums, peak, total, token + split * (items // splits), H)


@gluon.jit
def _store(out, sums, total, row, H: gl.constexpr):
    """Store the results of a token as row ``row``; zeros for padding, which has no rows."""
    factor = gl.convert_layout(1.0 / gl.where(total > 0.0, total, 1.0), gl.SliceLayout(0, _PRODUCTS))
    for group in gl.static_range(_GROUPS):
        _store_group(out, (sums[group] * gl.expand_dims(factor, 0)).to(gl.bfloat16), row, group, H)


@gluon.jit
def _store_split(results, sums, peak, total, row, H: gl.constexpr):
    """Store the sums of a KV split of a token as row ``row`` of all, with their peaks and totals."""
    parts, stats = results
    for group in gl.static_range(_GROUPS):
        _store_group(parts, sums[group], row, group, H)
    head = gl.arange(0, _HEADS, layout=peak.type.layout)
    gl.store(stats + (row * H + head) * 2, peak, mask=head < H)
    gl.store(stats + (row * H + head) * 2 + 1, total, mask=head < H)


@gluon.jit
def _store_group(out, sums, row, GROUP: gl.constexpr, H: gl.constexpr):
    """Store the sums [128, 16] of a group of channels."""
    x = _in_channel_order(sums)
    head = gl.expand_dims(gl.arange(0, _HEADS, layout=gl.SliceLayout(0, x.type.layout)), 0)
    channel = GROUP * 128 + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, x.type.layout)), 1)
    gl.store(out + (row * H + head) * _LATENT + channel, x, mask=head < H)


@gluon.jit(do_not_specialize=["items", "splits", "begin", "columns"])
def _few_heads_kernel(
    query, q, cos, sin, memory, positions, sequences, grow, out, stats, items, splits, begin, q_row, columns, scale,
    H: gl.constexpr, NOPE: gl.constexpr, ROW: gl.constexpr, PLACES: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    queries = gl.allocate_shared_memory(gl.bfloat16, [_GROUPS, _HEADS, 128], _OPERAND)
    rotated_queries = gl.allocate_shared_memory(gl.bfloat16, [1, _HEADS, _ROPE], _OPERAND)
    # One by one: between stores to parts of one buffer warps wait for each other.
    l0 = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, 128], _OPERAND)
    l1 = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, 128], _OPERAND)
    l2 = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, 128], _OPERAND)
    l3 = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, 128], _OPERAND)
    logits = gl.allocate_shared_memory(gl.float32, [2, _ROWS, _HEADS], _TRANSPOSED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [1, _HEADS, _ROWS], _OPERAND)
    shrinks = gl.allocate_shared_memory(gl.float32, [_HEADS], _NUMBERS)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # of the latents and logits of a piece
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for buffer in gl.static_range(2):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=1)
    buffers = (queries, rotated_queries, (l0, l1, l2, l3), logits, weights, shrinks)
    barriers = (q_full, q_empty, full, empty)
    sizes = (items, splits, begin, q_row, columns)
    inputs = (query, q, cos, sin, memory, positions, sequences, grow)
    gl.warp_specialize(
        [
            (_attend, (inputs, (out, stats), sizes, scale, buffers, barriers, H, NOPE, SPLIT, TURNS)),
            (_widen, (inputs, sizes, buffers, barriers, 0, ROW, PLACES)),
            (_widen, (inputs, sizes, buffers, barriers, 1, ROW, PLACES)),
        ],
        [4, 4],  # warps and registers of the second and third function
        [168, 168],
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
    _few_heads_kernel[(min(items, multiprocessors_of(q.device)),)](
        query_THL, q, *given.angles(), memory, paging.positions_T, paging.sequence_T, paging.grow_SP, *results, items,
        paging.splits, begin, q.stride(0), paging.grow_SP.stride(0), given.scale * LOG2_E,
        H=heads, NOPE=given.nope, ROW=row, PLACES=given.rows.rows_per_page, SPLIT=paging.splits > 1,
        TURNS=given.cos is not None, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
