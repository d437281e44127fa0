"""Attention of many tokens on packed pages, on Hopper: all rows that the tokens may see are first widened to bfloat16.

The first kernel writes, one after the other, the step's own rows, the window rows before them and the compressed entries of each
sequence. In the second kernel every multiprocessor takes one token x a block of heads after the other, and processes the rows in
the pieces of ``triton.py``, with the same bits. Neighbouring tokens share most rows, so each row is widened and looked up in the
page tables once for all of them.

The second kernel is warp-specialized, and therefore written in Gluon. Four producer warps copy queries and rows to shared memory,
up to two pieces ahead. Two groups of four consumer warps have half of the channels each: a group computes its part of the logits,
exchanges it with the other group, takes the softmax, and adds up its half of the result. Where all warps run the same instructions,
copies, products and softmax of a piece follow each other.

An item is one token x one block of heads; a program computes one after the other. Producers and consumers each count items
(``turn``) and pieces (``step``): the counts say which buffer is next, and which phase of its barriers to wait for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

from dsv4lite.kernels.attention import AttentionInputs
from dsv4lite.kernels.attention.merge_triton import counts_of
from dsv4lite.kernels.dispatch import ceil_div, multiprocessors_of
from dsv4lite.kernels.hopper import copy_by_threads
from dsv4lite.kernels.rows.packed import LOG2_E, fetch, scaled

_HEADS, _ROWS = 64, 64  # heads of a block; rows of a piece
_WIDENED = 32  # rows of one program of the first kernel
# A thread's numbers by address: four side by side, then those of its neighbours, then its next four.
_EXCHANGED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        warp_bases=[[0, 128], [0, 256]],
        block_bases=[],
        shape=[8, 512],
    )
)


@triton.jit(do_not_specialize=["tokens", "sequences", "grow_columns", "window_columns"])
def _widen_rows_kernel(
    fresh, window, entries, firsts, lens, grow, window_pages, window_firsts, out, tokens, sequences, grow_columns, window_columns,
    RATIO: tl.constexpr, WINDOW: tl.constexpr, NOPE: tl.constexpr, FRESH_ROW: tl.constexpr, WINDOW_BYTES: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, ENTRY_BYTES: tl.constexpr, ENTRY_ROWS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    DATA: tl.constexpr = NOPE + 128
    SCALES: tl.constexpr = 8
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = row < tokens
    data = fresh + row.to(tl.int64) * FRESH_ROW
    scales = data + DATA
    # Window rows before the step's first token.
    at = row - tokens
    sequence = at // WINDOW
    live = (at >= 0) & (sequence < sequences)
    place = tl.load(firsts + sequence, mask=live, other=0) - WINDOW + at % WINDOW
    column = place // WINDOW_ROWS - tl.load(window_firsts + sequence, mask=live, other=0)
    live = live & (place >= 0) & (column >= 0)
    page = tl.load(window_pages + sequence * window_columns + column, mask=live, other=-1).to(tl.int64)
    live = live & (page >= 0)
    base = window + page * WINDOW_BYTES
    data = tl.where(own, data, base + place % WINDOW_ROWS * DATA)
    scales = tl.where(own, scales, base + WINDOW_ROWS * DATA + place % WINDOW_ROWS * SCALES)
    live = live | own
    if ENTRY_ROWS > 0:
        at -= sequences * WINDOW
        sequence = at // (grow_columns * ENTRY_ROWS)
        entry = at % (grow_columns * ENTRY_ROWS)
        more = (at >= 0) & (sequence < sequences)
        end = tl.load(firsts + sequence, mask=more, other=0) + tl.load(lens + sequence, mask=more, other=0)
        more = more & (entry < end // RATIO)
        page = tl.load(grow + sequence * grow_columns + entry // ENTRY_ROWS, mask=more, other=0).to(tl.int64)
        base = entries + page * ENTRY_BYTES
        data = tl.where(more, base + entry % ENTRY_ROWS * DATA, data)
        scales = tl.where(more, base + ENTRY_ROWS * DATA + entry % ENTRY_ROWS * SCALES, scales)
        live = live | more
    data, scales = tl.multiple_of(data, 16 if FRESH_ROW % 16 == 0 else 8), tl.multiple_of(scales, SCALES)
    raw = fetch(data, scales, live, NOPE, FRESH_ROW, False)
    out += row.to(tl.int64)[:, None] * (NOPE + 64) + tl.arange(0, 64)[None, :]
    for group in tl.static_range(NOPE // 64):
        tl.store(out + group * 64, scaled(raw[group], raw[8], group), mask=live[:, None])
    tl.store(out + NOPE, raw[7], mask=live[:, None])


@gluon.jit
def _rows_of(
    piece, selected, here, counts, tokens, window_base, entry_base, r, ENTRIES: gl.constexpr, SELECTED: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Return the indices of a piece's rows ``r``; for missing rows the index of the token's own row."""
    position, first, first_row = here
    window_rows, entry_rows, listed, window_pieces, _pieces = counts
    in_window = piece < window_pieces
    # Reference: _RecentRows
    since = position + 1 - window_rows + piece * ROWS + r - first
    own = first_row + position - first
    place = gl.where(since >= 0, first_row + since, window_base + since)
    place = gl.where(r < window_rows - piece * ROWS, place, own)
    if ENTRIES:
        # Reference: _entry_rows
        done = (piece - window_pieces) * ROWS
        left = gl.where(in_window, 0, entry_rows - done)
        entry = done + r
        if SELECTED:
            entry = gl.where(listed, gl.load(selected + entry, mask=r < gl.where(listed, left, 0), other=0), entry)
        place = gl.where(in_window, place, gl.where(r < left, entry_base + entry, own))
    return place


@gluon.jit
def _load_rows(
    tensors, sizes, buffers, H: gl.constexpr, WIDTH: gl.constexpr, RATIO: gl.constexpr, TOP_K: gl.constexpr,
    WINDOW: gl.constexpr, ENTRY_ROWS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Producer warps: copy each item's queries and the rows of its pieces as soon as their buffers are free."""
    q, rows, selected, positions, sequence_of, firsts, first_rows = tensors
    tokens, sequences, grow_columns = sizes
    queries, keys, q_full, q_empty, k_full, k_empty = buffers
    HALF: gl.constexpr = WIDTH // 2
    BLOCKS: gl.constexpr = (H + HEADS - 1) // HEADS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT)), 0)
    step = 0
    turn = 0
    for item in range(gl.program_id(0), tokens * BLOCKS, gl.num_programs(0)):
        token = item // BLOCKS
        position = gl.load(positions + token)
        sequence = gl.load(sequence_of + token)
        here = (position, gl.load(firsts + sequence), gl.load(first_rows + sequence))
        counts = counts_of(position, RATIO, TOP_K, WINDOW, ROWS, ENTRY_ROWS > 0)
        window_base = tokens + (sequence + 1) * WINDOW
        entry_base = tokens + sequences * WINDOW + sequence * grow_columns * ENTRY_ROWS
        chosen = selected + token.to(gl.int64) * TOP_K
        place = _rows_of(0, chosen, here, counts, tokens, window_base, entry_base, r, ENTRY_ROWS > 0, TOP_K > 0, ROWS)
        for piece in range(counts[4]):
            at = rows + gl.expand_dims(place.to(gl.int64) * WIDTH, 1) + column
            for half in gl.static_range(2):
                slot = step % 2 * 2 + half
                mbarrier.wait(k_empty.index(slot), (step // 2 & 1) ^ 1)
                copy_by_threads(keys.index(slot), at + half * HALF)
                async_copy.mbarrier_arrive(k_full.index(slot), increment_count=False)
            if piece == 0:
                head = item % BLOCKS * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
                at = q + gl.expand_dims((token.to(gl.int64) * H + head) * WIDTH, 1) + column
                inside = gl.expand_dims(head < H, 1) if H % HEADS != 0 else None
                for half in gl.static_range(2):
                    mbarrier.wait(q_empty.index(half), (turn & 1) ^ 1)
                    copy_by_threads(queries.index(half), at + half * HALF, mask=inside)
                    async_copy.mbarrier_arrive(q_full.index(half), increment_count=False)
                turn += 1
            step += 1
            # The indices of the next piece are loaded before the wait for its buffer.
            place = _rows_of(
                piece + 1, chosen, here, counts, tokens, window_base, entry_base, r, ENTRY_ROWS > 0, TOP_K > 0, ROWS
            )  # fmt: skip


@gluon.jit
def _spread(sums):
    """Arrange sums [64, 64] for their exchange, so that each thread stores 16 bytes beside those of its neighbours."""
    sums = gl.permute(gl.reshape(sums, (4, 2, 8, 8, 4, 2)), (3, 0, 2, 4, 1, 5))
    return gl.convert_layout(gl.reshape(sums, (8, 512)), _EXCHANGED, assert_trivial=True)


@gluon.jit
def _gathered(sums, LAYOUT: gl.constexpr):
    """Undo ``_spread``."""
    sums = gl.permute(gl.reshape(sums, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(sums, (64, 64)), LAYOUT, assert_trivial=True)


@gluon.jit
def _turned_back(result, cos, sin):
    """Rotate the last 64 channels of a result back by the token's angles."""
    # Reference: rope(o, cos, sin, inverse=True)
    HEADS: gl.constexpr = result.shape[0]
    PAIRS: gl.constexpr = result.shape[1] // 2
    even, odd = gl.split(gl.reshape(result.to(gl.float32), (HEADS, PAIRS, 2)))
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, even.type.layout)) - (PAIRS - 32)
    turned = pair >= 0
    c = gl.expand_dims(gl.load(cos + pair, mask=turned, other=1.0), 0)
    s = gl.expand_dims(gl.load(sin + pair, mask=turned, other=0.0), 0)
    turned = gl.expand_dims(turned, 0)
    # Rounded as ``rotated_back`` is compiled.
    even, odd = gl.where(turned, gl.fma(even, c, odd * s), even), gl.where(turned, gl.fma(odd, c, -(even * s)), odd)
    return gl.reshape(gl.join(even, odd), (HEADS, 2 * PAIRS)).to(gl.bfloat16)


@gluon.jit
def _attend(
    tensors, tokens, buffers, exchange, scale, PART: gl.constexpr, H: gl.constexpr, WIDTH: gl.constexpr, RATIO: gl.constexpr,
    TOP_K: gl.constexpr, WINDOW: gl.constexpr, ENTRY_ROWS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Consumer warps: compute half ``PART`` of the channels of every item's result."""
    positions, sink, cos, sin, out = tensors
    queries, keys, q_full, q_empty, k_full, k_empty = buffers
    exchanged, s_full, s_empty = exchange
    HALF: gl.constexpr = WIDTH // 2
    BLOCKS: gl.constexpr = (H + HEADS - 1) // HEADS
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OF_LOGITS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OF_RESULT: gl.constexpr = gl.SliceLayout(1, RESULT)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LOGITS)), 0)
    step = 0
    turn = 0
    for item in range(gl.program_id(0), tokens * BLOCKS, gl.num_programs(0)):
        token = item // BLOCKS
        position = gl.load(positions + token)
        window_rows, entry_rows, _listed, window_pieces, pieces = counts_of(position, RATIO, TOP_K, WINDOW, ROWS, ENTRY_ROWS > 0)
        acc = gl.zeros((HEADS, HALF), gl.float32, RESULT)
        peak = gl.full((HEADS,), float("-inf"), gl.float32, OF_LOGITS)
        total = gl.zeros((HEADS,), gl.float32, OF_LOGITS)
        if pieces > 0:
            mbarrier.wait(q_full.index(PART), turn & 1)
            turn += 1
        for piece in range(pieces):
            slot = step % 2 * 2 + PART
            mbarrier.wait(k_full.index(slot), step // 2 & 1)
            rows = keys.index(slot)
            none = gl.zeros((HEADS, ROWS), gl.float32, LOGITS)
            own = warpgroup_mma(queries.index(PART), rows.permute((1, 0)), none, use_acc=False, is_async=True)
            own = warpgroup_mma_wait(0, deps=(own,))
            mbarrier.arrive(q_empty.index(PART), count=1, pred=piece == pieces - 1)
            # Each half of the channels gives a part of every logit.
            mbarrier.wait(s_empty.index(PART), (step & 1) ^ 1)
            exchanged.index(PART).store(_spread(own))
            mbarrier.arrive(s_full.index(PART), count=1)
            mbarrier.wait(s_full.index(1 - PART), step & 1)
            other = _gathered(exchanged.index(1 - PART).load(_EXCHANGED), LOGITS)
            mbarrier.arrive(s_empty.index(1 - PART), count=1)
            logits = (own + other) * scale
            count = gl.where(piece < window_pieces, window_rows - piece * ROWS, entry_rows - (piece - window_pieces) * ROWS)
            if count < ROWS:
                logits = gl.where(r < count, logits, float("-inf"))
            # Reference: sparse_attention, one block; exponentials of two instead of e.
            new_peak = gl.maximum(peak, gl.max(logits, 1))
            shrink = gl.exp2(peak - new_peak)
            weights = gl.exp2(logits - gl.expand_dims(new_peak, 1))
            # Added as ``_attend_kernel`` of triton.py adds them, whose warps have half of a piece's rows each.
            added = gl.sum(gl.sum(gl.reshape(weights, (HEADS, 2, ROWS // 2)), 2), 1)
            total = total * shrink + gl.convert_layout(added, OF_LOGITS)
            peak = new_peak
            acc *= gl.expand_dims(gl.convert_layout(shrink, OF_RESULT), 1)
            weights = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, RESULT, 2))
            acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(weights, rows, acc, is_async=True),))
            mbarrier.arrive(k_empty.index(slot), count=1, pred=piece < pieces - 1)
            step += 1
        head = item % BLOCKS * HEADS + gl.arange(0, HEADS, layout=OF_RESULT)
        total = gl.convert_layout(total, OF_RESULT)
        total += gl.exp2(gl.load(sink + head, mask=head < H, other=0.0) * 1.4426950408889634 - gl.convert_layout(peak, OF_RESULT))
        # Padding has no rows: its peak is -inf, ``total`` is infinite and the result 0.
        result = (acc / gl.expand_dims(total, 1)).to(gl.bfloat16)
        if PART == 1:
            result = gl.convert_layout(_turned_back(result, cos + token * 32, sin + token * 32), RESULT)
        head = item % BLOCKS * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, STORED))
        column = PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, STORED))
        at = out + gl.expand_dims((token.to(gl.int64) * H + head) * WIDTH, 1) + gl.expand_dims(column, 0)
        inside = gl.expand_dims(head < H, 1) if H % HEADS != 0 else None
        if pieces > 0:
            # Through the buffer of the last piece, which has as many rows as a block has heads, so that a thread stores 16 bytes.
            slot = (step + 1) % 2 * 2 + PART
            keys.index(slot).store(result)
            stored = keys.index(slot).load(STORED)
            mbarrier.arrive(k_empty.index(slot), count=1)
            gl.store(at, stored, mask=inside)
        else:
            gl.store(at, gl.zeros((HEADS, HALF), gl.bfloat16, STORED), mask=inside)


@gluon.jit(do_not_specialize=["tokens", "sequences", "grow_columns"])
def _prefill_kernel(
    q, rows, selected, positions, sequence_of, firsts, first_rows, sink, cos, sin, out, tokens, sequences, grow_columns, scale,
    H: gl.constexpr, WIDTH: gl.constexpr, RATIO: gl.constexpr, TOP_K: gl.constexpr, WINDOW: gl.constexpr,
    ENTRY_ROWS: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = WIDTH // 2
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], OPERAND)
    keys = gl.allocate_shared_memory(gl.bfloat16, [4, ROWS, HALF], OPERAND)
    exchanged = gl.allocate_shared_memory(gl.float32, [2, 8, 512], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(k_full.index(i), count=128)  # the threads that copy
        mbarrier.init(k_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=128)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(s_full.index(i), count=1)
        mbarrier.init(s_empty.index(i), count=1)
    buffers = (queries, keys, q_full, q_empty, k_full, k_empty)
    exchange = (exchanged, s_full, s_empty)
    results = (positions, sink, cos, sin, out)
    given = (q, rows, selected, positions, sequence_of, firsts, first_rows)
    sizes = (tokens, sequences, grow_columns)
    gl.warp_specialize(
        [
            (_attend, (results, tokens, buffers, exchange, scale, 0, H, WIDTH, RATIO, TOP_K, WINDOW, ENTRY_ROWS, ROWS, HEADS)),
            (_attend, (results, tokens, buffers, exchange, scale, 1, H, WIDTH, RATIO, TOP_K, WINDOW, ENTRY_ROWS, ROWS, HEADS)),
            (_load_rows, (given, sizes, buffers, H, WIDTH, RATIO, TOP_K, WINDOW, ENTRY_ROWS, ROWS, HEADS)),
        ],
        [4, 4],  # warps and registers of the second and third function
        [216, 72],
    )


def widened_rows_triton(given: AttentionInputs) -> Tensor:
    """Launch the first kernel; return the rows, bfloat16 [visible_rows, C], those that no token may see undefined."""
    (tokens, _, channels), paging, layout = given.q_THC.shape, given.paging, given.row_layout()
    sequences, columns = paging.grow_SP.shape
    count, layer = given.visible_rows, given.layer(_ROWS)
    rows = torch.empty(count, channels, dtype=torch.bfloat16, device=given.q_THC.device)
    _widen_rows_kernel[(ceil_div(count, _WIDENED),)](
        given.fresh_TB, given.window.memory, (given.entries or given.window).memory, paging.first_S, paging.lens_S,
        paging.grow_SP, paging.window_SP, paging.window_first_S, rows, tokens, sequences, columns, paging.window_SP.shape[1],
        RATIO=layer["RATIO"], WINDOW=given.window_size, NOPE=channels - 64, **layout, ROWS=_WIDENED,
        num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return rows


def prefill_attention_triton(given: AttentionInputs) -> Tensor:
    """See ``attention.paged_attention``; inputs are as ``paged_attention_triton`` has checked them."""
    (tokens, heads, channels), paging, q = given.q_THC.shape, given.paging, given.q_THC
    sequences, columns = paging.grow_SP.shape
    rows, layer = widened_rows_triton(given), given.layer(_ROWS)
    out, items = torch.empty_like(q), tokens * ceil_div(heads, _HEADS)
    _prefill_kernel[(min(items, multiprocessors_of(q.device)),)](
        q, rows, paging.positions_T if given.selected_TK is None else given.selected_TK, paging.positions_T, paging.sequence_T,
        paging.first_S, paging.rows_S, given.sink_H, given.cos, given.sin, out, tokens, sequences, columns, given.scale * LOG2_E,
        H=heads, WIDTH=channels, RATIO=layer["RATIO"], TOP_K=layer["TOP_K"], WINDOW=given.window_size,
        ENTRY_ROWS=given.row_layout()["ENTRY_ROWS"], ROWS=_ROWS, HEADS=_HEADS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out
