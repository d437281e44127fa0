"""Attention of few tokens on packed pages, optimized for latency instead of bandwidth.

One program takes one token x 16 heads x one of ``splits`` KV splits; ``merge_triton.py`` merges them. The number of window pieces
does not depend on how full the window is, so page numbers are loaded at the same time as the position. All bytes of a piece are
loaded before one is used. The first piece of a program, mostly its only one, is outside the loop. The loop copies each piece while
the one before it is used, if the chip's shared memory is large enough. Rows are widened once, and both products read them from the
same shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention import WINDOW, AttentionInputs
from dsv4lite.kernels.attention.merge_triton import LOW, entries_of, merged, softmax_step
from dsv4lite.kernels.dispatch import LARGE_SHARED_MEMORY, capability_of, ceil_div, compiled
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows.packed import LOG2_E, fetch, joined, narrowed, scaled
from dsv4lite.kernels.rows.triton import opaque

_HEADS = 16
_SMALL_SPLITS = 16  # from this number of splits on, layers with few rows have enough programs for small pieces

# $1, ored with the others where $5 has a bit, which is never set: so the others must be loaded before $1 is used.
_AFTER_LOADS = tl.constexpr("""{
.reg .b32 t;
or.b32 t, $2, $3; or.b32 t, t, $4;
lop3.b32 $0, $1, t, $5, 0xF8;
}""")


@triton.jit
def _after_loads(codes, a, b, c, never):
    """Return ``codes`` in such a way that the compiler must load ``a``, ``b`` and ``c`` first; ``never`` is 0."""
    if compiled():
        given = [codes, a, b, c, never]
        codes = tl.inline_asm_elementwise(_AFTER_LOADS, "=r,r,r,r,r,r,r,r,r", given, dtype=tl.uint8, is_pure=False, pack=4)
    return codes


@triton.jit
def _page_numbers(
    piece, tables, grow_columns, window_columns, WINDOW_PIECES: tl.constexpr, ENTRY_ROWS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return the first three page numbers of the window, and that of the piece's entries if all of them are on one page."""
    _selected, grow, window_pages = tables
    w0 = tl.load(window_pages, mask=window_columns > 0, other=0)
    w1 = tl.load(window_pages + 1, mask=window_columns > 1, other=0)
    w2 = tl.load(window_pages + 2, mask=window_columns > 2, other=0)
    page = w0
    if ENTRY_ROWS > 0 and ENTRY_ROWS % ROWS == 0:
        column = tl.maximum((piece - WINDOW_PIECES) * ROWS // ENTRY_ROWS, 0)
        page = tl.load(grow + column, mask=column < grow_columns, other=0)
    return w0, w1, w2, page


@triton.jit
def _fetch(
    piece, numbers, stores, tables, at, entry_rows, listed, FRESH_ROW: tl.constexpr, WINDOW_BYTES: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, ENTRY_BYTES: tl.constexpr, ENTRY_ROWS: tl.constexpr, NOPE: tl.constexpr,
    WINDOW: tl.constexpr, SELECTED: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return a piece's bytes and the number of rows; 0 or less if there are none.

    A loop copies them ahead if AHEAD; otherwise all of them are loaded before one is used.
    """
    DATA: tl.constexpr = NOPE + 128
    ALIGN: tl.constexpr = 16 if FRESH_ROW % 16 == 0 else 8 if FRESH_ROW % 8 == 0 else 4
    WINDOW_PIECES: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    SCALES: tl.constexpr = 8
    w0, w1, w2, entry_page = numbers
    fresh, window, entries = stores
    selected, grow, window_pages = tables
    position, first, row, page_first, never = at
    r = tl.arange(0, ROWS)
    in_window = piece < WINDOW_PIECES
    # Reference: _RecentRows
    window_rows = tl.minimum(position + 1, WINDOW)
    left = tl.where(in_window, window_rows - piece * ROWS, 0)
    place = position + 1 - window_rows + piece * ROWS + r
    since = place - first
    column = place // WINDOW_ROWS - page_first
    far = (r < left) & (since < 0) & (column > 2)
    page = tl.where(column == 0, w0, tl.where(column == 1, w1, w2))
    page = tl.where(far, tl.load(window_pages + column, mask=far, other=0), page)
    base = window + page.to(tl.int64) * WINDOW_BYTES
    own = fresh + (row + since).to(tl.int64) * FRESH_ROW
    place = place % WINDOW_ROWS
    data = tl.where(since >= 0, own, base + place * DATA)
    scales = tl.where(since >= 0, own + DATA, base + WINDOW_ROWS * DATA + place * SCALES)
    if ENTRY_ROWS > 0:
        # Reference: _entry_rows
        done = (piece - WINDOW_PIECES) * ROWS
        more = tl.where(in_window, 0, entry_rows - done)
        left += more
        entry = done + r
        if ENTRY_ROWS % ROWS == 0:
            page = tl.zeros((ROWS,), tl.int32) + entry_page
        else:
            page = tl.load(grow + entry // ENTRY_ROWS, mask=r < more, other=0)
        if SELECTED:
            chosen = r < tl.where(listed, more, 0)
            entry = tl.where(chosen, tl.load(selected + entry, mask=chosen, other=0), entry)
            page = tl.where(chosen, tl.load(grow + entry // ENTRY_ROWS, mask=chosen, other=0), page)
        base = entries + page.to(tl.int64) * ENTRY_BYTES
        place = entry % ENTRY_ROWS
        data = tl.where(in_window, data, base + place * DATA)
        scales = tl.where(in_window, scales, base + ENTRY_ROWS * DATA + place * SCALES)
    data, scales = tl.multiple_of(data, ALIGN), tl.multiple_of(scales, SCALES)
    c0, c1, c2, c3, c4, c5, c6, tail, words = fetch(data, scales, r < left, NOPE, FRESH_ROW, not AHEAD)
    if not AHEAD:
        c0 = _after_loads(c0, c4, c5, c6, never)
    return (c0, c1, c2, c3, c4, c5, c6, tail, words), left


@triton.jit
def _pair(a, b):
    """Return two tiles [R, 64] side by side."""
    # Without the copy Triton converts bytes to each product's layout before it widens them, so widens twice.
    return opaque(joined(a, b, b, b, 2))


@triton.jit
def _widened(raw, NOPE: tl.constexpr):
    """Return a piece's rows in tiles of 128 channels, bfloat16 (float32 in the interpreter); unused ones repeat the first."""
    # Reference: RowFormat.unpack
    words = raw[8]
    tail = raw[7] if compiled() else raw[7].to(tl.float32)
    k0 = _pair(scaled(raw[0], words, 0), scaled(raw[1], words, 1) if NOPE > 64 else tail)
    k1 = k0
    k2 = k0
    k3 = k0
    if NOPE > 64:
        k1 = _pair(scaled(raw[2], words, 2), scaled(raw[3], words, 3) if NOPE > 192 else tail)
    if NOPE > 192:
        k2 = _pair(scaled(raw[4], words, 4), scaled(raw[5], words, 5))
        k3 = _pair(scaled(raw[6], words, 6), tail)
    return k0, k1, k2, k3


@triton.jit
def _added(sums, queries, raw, rows, scale, NOPE: tl.constexpr, ROWS: tl.constexpr):
    """Return the sums with the first ``rows`` rows of a piece added."""
    acc0, acc1, acc2, acc3, peak, total = sums
    q0, q1, q2, q3 = queries
    k0, k1, k2, k3 = _widened(raw, NOPE)
    # Each product is scaled on its own, so the products do not wait for each other.
    logits = tl.dot(q0, tl.trans(k0)) * scale
    if NOPE > 64:
        logits += tl.dot(q1, tl.trans(k1)) * scale
    if NOPE > 192:
        logits += tl.dot(q2, tl.trans(k2)) * scale
        logits += tl.dot(q3, tl.trans(k3)) * scale
    logits = tl.where((tl.arange(0, ROWS) < rows)[None, :], logits, float("-inf"))
    p, shrink, peak, total = softmax_step(logits, peak, total, 1)
    p = narrowed(p, False)
    acc0 = tl.dot(p, k0, acc0 * shrink[:, None])
    if NOPE > 64:
        acc1 = tl.dot(p, k1, acc1 * shrink[:, None])
    if NOPE > 192:
        acc2 = tl.dot(p, k2, acc2 * shrink[:, None])
        acc3 = tl.dot(p, k3, acc3 * shrink[:, None])
    return acc0, acc1, acc2, acc3, peak, total


@triton.jit
def _queries(q, at, inside, NOPE: tl.constexpr):
    """Return queries [H, C] in tiles of 128 channels; unused tiles repeat the first."""
    q0 = tl.load(q + at, mask=inside, other=0.0)
    q1 = tl.load(q + 128 + at, mask=inside, other=0.0) if NOPE > 64 else q0
    q2 = tl.load(q + 256 + at, mask=inside, other=0.0) if NOPE > 192 else q0
    q3 = tl.load(q + 384 + at, mask=inside, other=0.0) if NOPE > 192 else q0
    if compiled():
        q0, q1, q2, q3 = q0.to(tl.bfloat16), q1.to(tl.bfloat16), q2.to(tl.bfloat16), q3.to(tl.bfloat16)
    else:
        q0, q1, q2, q3 = q0.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32), q3.to(tl.float32)
    return opaque(q0), opaque(q1), opaque(q2), opaque(q3)


@triton.jit(do_not_specialize=["grow_columns", "window_columns"])
def _decode_kernel(
    q, fresh, window, entries, selected, positions, sequences, firsts, first_rows, grow, window_pages, window_firsts,
    parts, stats, grow_columns, window_columns, scale,
    H: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr,
    FRESH_ROW: tl.constexpr, WINDOW_BYTES: tl.constexpr, WINDOW_ROWS: tl.constexpr, ENTRY_BYTES: tl.constexpr,
    ENTRY_ROWS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, SINGLES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    NOPE: tl.constexpr = WIDTH - 64
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    WINDOW_PIECES: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    position = tl.load(positions + token)
    if SINGLES:
        sequence, first, row = token, position, token.to(tl.int32)
    else:
        sequence = tl.load(sequences + token).to(tl.int64)
        first, row = tl.load(firsts + sequence), tl.load(first_rows + sequence)
    page_first = tl.load(window_firsts + sequence)
    tables = (selected + token * TOP_K, grow + sequence * grow_columns, window_pages + sequence * window_columns)
    numbers = _page_numbers(split, tables, grow_columns, window_columns, WINDOW_PIECES, ENTRY_ROWS, ROWS)
    entry_rows, listed = entries_of(position, RATIO, TOP_K, ENTRY_ROWS > 0)
    pieces = WINDOW_PIECES + (entry_rows + ROWS - 1) // ROWS
    # No page number is below -1. Comparing them here makes the compiler load them before the branch.
    lowest = tl.minimum(tl.minimum(numbers[0], numbers[1]), tl.minimum(numbers[2], numbers[3]))
    if (split >= pieces) | (tl.minimum(lowest, page_first) < -1):
        return
    stores = (fresh, window, entries)
    never = (position >> 30) & 1  # padding has no rows
    here = (position, first, row, page_first, never)
    raw, rows = _fetch(
        split, numbers, stores, tables, here, entry_rows, listed, FRESH_ROW, WINDOW_BYTES, WINDOW_ROWS, ENTRY_BYTES, ENTRY_ROWS,
        NOPE, WINDOW, TOP_K > 0, ROWS, False,
    )  # fmt: skip
    inside = (head < H)[:, None]
    at = (token * H + head[:, None]) * WIDTH + tl.arange(0, 128)[None, :]
    queries = _queries(q, at, inside, NOPE)
    zero = tl.zeros((HEADS, 128), tl.float32)
    sums = (zero, zero, zero, zero, tl.full((HEADS,), LOW, tl.float32), tl.zeros((HEADS,), tl.float32))
    sums = _added(sums, queries, raw, rows, scale, NOPE, ROWS)
    splits = tl.num_programs(1)  # no constant, so that one compiled kernel serves all
    for piece in tl.range(split + splits, pieces, splits, num_stages=STAGES):
        numbers = _page_numbers(piece, tables, grow_columns, window_columns, WINDOW_PIECES, ENTRY_ROWS, ROWS)
        raw, rows = _fetch(
            piece, numbers, stores, tables, here, entry_rows, listed, FRESH_ROW, WINDOW_BYTES, WINDOW_ROWS, ENTRY_BYTES,
            ENTRY_ROWS, NOPE, WINDOW, TOP_K > 0, ROWS, STAGES > 1,
        )  # fmt: skip
        sums = _added(sums, queries, raw, rows, scale, NOPE, ROWS)

    place = split * (tl.num_programs(0) // BLOCKS).to(tl.int64) * H
    at = (place + token * H + head[:, None]) * WIDTH + tl.arange(0, WIDTH)[None, :]
    let_successor_in()
    tl.store(parts + at, joined(sums[0], sums[1], sums[2], sums[3], WIDTH // 128), mask=inside)
    stat = stats + (place + token * H + head[:, None]) * 2 + tl.arange(0, 2)[None, :]
    tl.store(stat, tl.join(sums[4], sums[5]), mask=inside)


def decode_attention_triton(given: AttentionInputs) -> Tensor:
    """See ``attention.paged_attention``; ``paged_attention_triton`` has checked the inputs."""
    (tokens, heads, _), q = given.q_THC.shape, given.q_THC
    assert q.is_contiguous(), q.stride()
    parts, stats = given.allocate_splits()
    # Small pieces for layers with few rows besides those of the window.
    small = given.paging.splits >= _SMALL_SPLITS and (given.ratio == 0 or given.ratio >= WINDOW)
    rows, warps = (32, 4) if small else (64, 8)
    _decode_kernel[(tokens * ceil_div(heads, _HEADS), given.paging.splits)](
        *given.tensors(), parts, stats, given.paging.grow_SP.stride(0), given.paging.window_SP.stride(0),
        given.scale * LOG2_E, **given.layer(rows), **given.row_layout(), HEADS=_HEADS,
        SINGLES=given.paging.singles,
        STAGES=2 if capability_of(q.device) in LARGE_SHARED_MEMORY else 1,
        num_warps=warps, num_stages=1, enable_fp_fusion=True, launch_pdl=dependent_launch(q.device),
    )  # fmt: skip
    return merged(given, parts, stats, rows, fills=False)
