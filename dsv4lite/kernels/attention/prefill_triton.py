"""Attention of many tokens on packed pages: all rows that the tokens may see are first widened to bfloat16.

The first kernel writes, one after the other, the step's own rows, the window rows before them and the compressed entries of each
sequence. In the second kernel one program takes one token x a block of heads. It processes the rows in the pieces of ``triton.py``
and returns the same bits, but copies a piece to shared memory without converting it. Neighbouring tokens share most rows, so each
row is widened and looked up in the page tables once for all of them.

If a rank has only 32 heads, half of a block of 64 heads is empty. With ``any_order`` such a layer takes blocks of 32 heads as the
right operand of both products. They fill the tensor cores and leave room for a second program on the multiprocessor, which computes
while the first waits for rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention import AttentionInputs
from dsv4lite.kernels.attention.merge_triton import added, counts_of, dot_of_halves
from dsv4lite.kernels.dispatch import ceil_div
from dsv4lite.kernels.rows.packed import LOG2_E, fetch, narrowed, rotated_back, scaled

_HEADS, _SWAPPED_HEADS, _ROWS, _STAGES = 64, 32, 64, 2  # heads of a program, also swapped; rows of a piece; pipeline stages
_WIDENED = 32  # rows of one program of the first kernel


@triton.jit(do_not_specialize=["tokens", "sequences", "grow_columns", "window_columns"])
def _widen_rows_kernel(
    fresh, window, entries, firsts, lens, grow, window_pages, window_firsts, out, tokens, sequences, grow_columns, window_columns,
    RATIO: tl.constexpr, WINDOW: tl.constexpr, NOPE: tl.constexpr, FRESH_ROW: tl.constexpr, WINDOW_BYTES: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, ENTRY_BYTES: tl.constexpr, ENTRY_ROWS: tl.constexpr, ROWS: tl.constexpr, GPU: tl.constexpr,
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
        tl.store(out + group * 64, scaled(raw[group], raw[8], group, GPU), mask=live[:, None])
    tl.store(out + NOPE, raw[7], mask=live[:, None])


@triton.jit
def _rows_of(
    piece, selected, here, counts, tokens, window_base, entry_base, WINDOW: tl.constexpr, ENTRIES: tl.constexpr,
    SELECTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the indices of a piece's rows; for missing rows the index of the token's own row."""
    position, first, first_row = here
    window_rows, entry_rows, listed, window_pieces, _pieces = counts
    r = tl.arange(0, ROWS)
    in_window = piece < window_pieces
    # Reference: _RecentRows
    since = position + 1 - window_rows + piece * ROWS + r - first
    own = first_row + position - first
    place = tl.where(since >= 0, first_row + since, window_base + since)
    place = tl.where(r < window_rows - piece * ROWS, place, own)
    if ENTRIES:
        # Reference: _entry_rows
        done = (piece - window_pieces) * ROWS
        left = tl.where(in_window, 0, entry_rows - done)
        entry = done + r
        if SELECTED:
            entry = tl.where(listed, tl.load(selected + entry, mask=r < tl.where(listed, left, 0), other=0), entry)
        place = tl.where(in_window, place, tl.where(r < left, entry_base + entry, own))
    return place


@triton.jit
def _logits(q0, q1, k0, k1, scale, always, SWAP: tl.constexpr):
    """Return the products of queries and rows, [H, R] or, swapped, [R, H]; ``always`` is true."""
    if SWAP:
        logits = tl.dot(k1, q1, tl.dot(k0, q0)) * scale
    else:
        logits = dot_of_halves(q0, q1, k0, k1, always, "tf32") * scale
    return logits


@triton.jit(do_not_specialize=["tokens", "sequences", "grow_columns"])
def _prefill_kernel(
    q, rows, selected, positions, sequence_of, firsts, first_rows, sink, cos, sin, out, tokens, sequences, grow_columns, scale,
    H: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr,
    ENTRY_ROWS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = tl.program_id(0) // BLOCKS
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    position = tl.load(positions + token)
    sequence = tl.load(sequence_of + token)
    here = (position, tl.load(firsts + sequence), tl.load(first_rows + sequence))
    counts = counts_of(position, RATIO, TOP_K, WINDOW, ROWS, ENTRY_ROWS > 0)
    window_rows, entry_rows, _listed, window_pieces, pieces = counts
    window_base = tokens + (sequence + 1) * WINDOW
    entry_base = tokens + sequences * WINDOW + sequence * grow_columns * ENTRY_ROWS
    selected += token.to(tl.int64) * TOP_K

    column = tl.arange(0, HALF)[None, :]
    at = (token.to(tl.int64) * H + head[:, None]) * WIDTH + column
    inside = (head < H)[:, None]
    q0 = tl.load(q + at, mask=inside, other=0.0)
    q1 = tl.load(q + HALF + at, mask=inside, other=0.0)
    if not GPU:
        q0, q1 = q0.to(tl.float32), q1.to(tl.float32)
    if SWAP:  # transposed before the loop: inside it the compiler would write them to shared memory for each piece
        q0, q1 = tl.trans(q0), tl.trans(q1)
    acc0 = tl.zeros((HALF, HEADS) if SWAP else (HEADS, HALF), tl.float32)
    acc1 = tl.zeros((HALF, HEADS) if SWAP else (HEADS, HALF), tl.float32)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for piece in tl.range(0, pieces, num_stages=STAGES):
        place = _rows_of(
            piece, selected, here, counts, tokens, window_base, entry_base, WINDOW, ENTRY_ROWS > 0, TOP_K > 0, ROWS
        )  # fmt: skip
        keys = rows + place[:, None] * WIDTH + column
        k0 = tl.load(keys)
        k1 = tl.load(keys + HALF)
        if SWAP:  # noqa: SIM102  decided when compiled; the other when run
            # If rows are used only from shared memory, the compiler reserves two pieces, and one program fits on a multiprocessor.
            # This branch, which is never taken, uses them in registers; then it reserves one piece, and two programs fit.
            if piece > pieces:
                tl.store(out + place[:, None] * WIDTH + column, k0)
                tl.store(out + place[:, None] * WIDTH + column, k1)
        if not GPU:
            k0, k1 = k0.to(tl.float32), k1.to(tl.float32)
        logits = _logits(q0, q1, k0, k1, scale, piece < pieces, SWAP)
        count = tl.where(piece < window_pieces, window_rows - piece * ROWS, entry_rows - (piece - window_pieces) * ROWS)
        acc0, acc1, peak, total = added(acc0, acc1, peak, total, logits, k0, k1, count, ROWS, SWAP, False, "tf32", GPU)

    if SWAP:
        acc0, acc1 = tl.trans(acc0), tl.trans(acc1)
    # Padding has no rows: its peak is -inf, ``total`` is infinite and the result 0.
    total += tl.exp2(tl.load(sink + head, mask=head < H, other=0.0) * 1.4426950408889634 - peak)
    cos += token * 32
    sin += token * 32
    o0 = narrowed(acc0 / total[:, None], False, GPU)
    o1 = rotated_back(narrowed(acc1 / total[:, None], False, GPU), cos, sin, HEADS, HALF, HALF - 64, 64)
    tl.store(out + at, o0, mask=inside)
    tl.store(out + HALF + at, narrowed(o1, False, GPU), mask=inside)


def prefill_attention_triton(given: AttentionInputs) -> Tensor:
    """See ``attention.paged_attention``; inputs are as ``paged_attention_triton`` has checked them."""
    (tokens, heads, channels), paging, q = given.q_THC.shape, given.paging, given.q_THC
    sequences, columns = paging.grow_SP.shape
    count, layout, layer = given.visible_rows, given.row_layout(), given.layer(_ROWS)
    rows = torch.empty(count, channels, dtype=torch.bfloat16, device=q.device)
    _widen_rows_kernel[(ceil_div(count, _WIDENED),)](
        given.fresh_TB, given.window.memory, (given.entries or given.window).memory, paging.first_S, paging.lens_S,
        paging.grow_SP, paging.window_SP, paging.window_first_S, rows, tokens, sequences, columns, paging.window_SP.shape[1],
        RATIO=layer["RATIO"], WINDOW=given.window_size, NOPE=channels - 64, **layout, ROWS=_WIDENED, GPU=layer["GPU"],
        num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    out, swap = torch.empty_like(q), heads <= _SWAPPED_HEADS and given.any_order
    block = _SWAPPED_HEADS if swap else _HEADS
    _prefill_kernel[(tokens * ceil_div(heads, block),)](
        q, rows, paging.positions_T if given.selected_TK is None else given.selected_TK, paging.positions_T, paging.sequence_T,
        paging.first_S, paging.rows_S, given.sink_H, given.cos, given.sin, out, tokens, sequences, columns, given.scale * LOG2_E,
        H=heads, WIDTH=channels, RATIO=layer["RATIO"], TOP_K=layer["TOP_K"], WINDOW=given.window_size,
        ENTRY_ROWS=layout["ENTRY_ROWS"], HEADS=block, ROWS=_ROWS, SWAP=swap, STAGES=_STAGES, GPU=layer["GPU"],
        num_warps=4 if swap else 8, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out
