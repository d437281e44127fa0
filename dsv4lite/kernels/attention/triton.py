"""Kernel of ``paged_attention`` on packed pages.

One program takes one token x a block of heads x one of ``splits`` shares of its rows; where there are several shares,
``merge_triton.py`` adds them. A token's rows are cut into pieces of fixed size, window first; share s takes pieces s,
s + splits, … A piece is read once for all heads of the block: codes are widened to bfloat16 in registers, four at a time, and the
tile then serves both products from shared memory. The next piece's bytes, and the addresses of the one after, are on their way
meanwhile. Few tokens take another kernel, that of ``decode_triton.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention import FEW_SPLITS
from dsv4lite.kernels.attention.decode_triton import few_attention_triton
from dsv4lite.kernels.attention.inputs import PackedInputs
from dsv4lite.kernels.attention.merge_triton import merged
from dsv4lite.kernels.dispatch import capability_of
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import KV_GROUP, Fp8Kv, RowStore
from dsv4lite.kernels.rows.packed import LOG2_E, bf16, group_of, rotated_back, scaled

_LARGE = (90, 100, 103)  # chips with more than 200 KB of shared memory for a program


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one program attends.

    Attributes:
        heads: Block of heads, at least the 16 rows of a tensor core's operand.
        rows: Piece.
        swap: Rows are the left operand of both products, so that few heads still fill the tensor cores.
    """

    heads: int
    rows: int
    swap: bool
    num_warps: int
    num_stages: int


def tile_for(heads: int, capability: int) -> Tile:
    """Return the tile, which follows from the layer alone on one kind of chip."""
    most = max(16, triton.next_power_of_2(heads))
    if capability not in _LARGE:
        return Tile(heads=min(most, 16), rows=32, swap=False, num_warps=4, num_stages=2)
    # Triton 3.9 leaves nothing of the wide tile on sm_100.
    if most < 64 or capability != 90:
        return Tile(heads=16, rows=64, swap=True, num_warps=4, num_stages=3)
    return Tile(heads=64, rows=64, swap=False, num_warps=8, num_stages=3)


@triton.jit
def locate(
    piece, stores, tables, at, counts, FRESH_ROW: tl.constexpr, WINDOW_BYTES: tl.constexpr, WINDOW_ROWS: tl.constexpr,
    ENTRY_BYTES: tl.constexpr, ENTRY_ROWS: tl.constexpr, DATA: tl.constexpr, ROWS: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Return pointers to the data and the scales of a piece's rows, and which of them there are."""
    ALIGN: tl.constexpr = 16 if FRESH_ROW % 16 == 0 else 8 if FRESH_ROW % 8 == 0 else 4
    SCALES: tl.constexpr = 8
    fresh, window, entries = stores
    selected, grow, window_pages = tables
    position, first, row, page_first = at
    window_rows, entry_rows, listed, window_pieces, _pieces = counts
    r = tl.arange(0, ROWS)
    in_window = piece < window_pieces
    # Reference: _window_rows
    live = r < tl.where(in_window, window_rows - piece * ROWS, 0)
    place = position + 1 - window_rows + piece * ROWS + r
    since = place - first
    page = tl.load(window_pages + (place // WINDOW_ROWS - page_first), mask=live & (since < 0), other=0).to(tl.int64)
    base = window + page * WINDOW_BYTES
    own = fresh + (row + since).to(tl.int64) * FRESH_ROW
    place = place % WINDOW_ROWS
    data = tl.where(since >= 0, own, base + place * DATA)
    scales = tl.where(since >= 0, own + DATA, base + WINDOW_ROWS * DATA + place * SCALES)
    if ENTRY_ROWS > 0:
        # Reference: _entry_rows
        done = (piece - window_pieces) * ROWS
        left = tl.where(in_window, 0, entry_rows - done)
        more = r < left
        entry = done + r
        if SELECTED:
            entry = tl.where(listed, tl.load(selected + entry, mask=r < tl.where(listed, left, 0), other=0), entry)
        page = tl.load(grow + entry // ENTRY_ROWS, mask=more, other=0).to(tl.int64)
        base = entries + page * ENTRY_BYTES
        place = entry % ENTRY_ROWS
        data = tl.where(in_window, data, base + place * DATA)
        scales = tl.where(in_window, scales, base + ENTRY_ROWS * DATA + place * SCALES)
        live = live | more
    return tl.multiple_of(data, ALIGN), tl.multiple_of(scales, 8), live


@triton.jit
def _fetch(data, scales, live, NOPE: tl.constexpr, FRESH_ROW: tl.constexpr):
    """Return a piece's bytes: codes in groups of 64 channels (unused groups repeat the first), the rotated channels, the scales."""
    tail = tl.multiple_of((data + NOPE).to(tl.pointer_type(tl.bfloat16)), 16 if FRESH_ROW % 16 == 0 else 8)
    tail = tl.load(tail[:, None] + tl.arange(0, 64)[None, :], mask=live[:, None], other=0.0)
    words = tl.load(scales.to(tl.pointer_type(tl.int64)), mask=live, other=0)
    c0 = group_of(data, live, 0)
    c1 = group_of(data, live, 1) if NOPE > 64 else c0
    c2 = group_of(data, live, 2) if NOPE > 128 else c0
    c3 = group_of(data, live, 3) if NOPE > 192 else c0
    c4 = group_of(data, live, 4) if NOPE > 256 else c0
    c5 = group_of(data, live, 5) if NOPE > 320 else c0
    c6 = group_of(data, live, 6) if NOPE > 384 else c0
    return c0, c1, c2, c3, c4, c5, c6, tail, words


@triton.jit
def _joined(a, b, c, d, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Return the first ``TILES`` tiles [R, 64] side by side; every value stays with its thread."""
    if TILES == 1:
        both = a
    elif TILES == 2:
        both = tl.permute(tl.join(a, b), (0, 2, 1))
    else:
        both = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(both, (ROWS, TILES * 64))


@triton.jit
def _first_half(raw, NOPE: tl.constexpr, ROWS: tl.constexpr, GPU: tl.constexpr):
    """Return channels [0, C / 2) of a piece's rows, bfloat16 (float32 in the interpreter), from what ``_fetch`` has read."""
    # Reference: RowFormat.unpack
    words = raw[8]
    k0 = scaled(raw[0], words, 0, GPU)
    k1 = scaled(raw[1], words, 1, GPU) if NOPE > 64 else k0
    k2 = scaled(raw[2], words, 2, GPU) if NOPE > 192 else k0
    k3 = scaled(raw[3], words, 3, GPU) if NOPE > 192 else k0
    return _joined(k0, k1, k2, k3, ROWS, (NOPE + 64) // 128)


@triton.jit
def _second_half(raw, NOPE: tl.constexpr, ROWS: tl.constexpr, GPU: tl.constexpr):
    """Return channels [C / 2, C)."""
    words = raw[8]
    tail = raw[7] if GPU else raw[7].to(tl.float32)
    if NOPE == 64:
        half = tail
    elif NOPE == 192:
        half = _joined(scaled(raw[2], words, 2, GPU), tail, tail, tail, ROWS, 2)
    else:
        k4 = scaled(raw[4], words, 4, GPU)
        k5 = scaled(raw[5], words, 5, GPU)
        k6 = scaled(raw[6], words, 6, GPU)
        half = _joined(k4, k5, k6, tail, ROWS, 4)
    return half


@triton.jit
def _logits(raw, q0, q1, always, NOPE: tl.constexpr, ROWS: tl.constexpr, SWAP: tl.constexpr, GPU: tl.constexpr):
    """Return the products of queries and rows, [H, R] or, swapped, [R, H], and both halves of the rows; ``always`` is true."""
    k0 = _first_half(raw, NOPE, ROWS, GPU)
    if SWAP:
        logits = tl.dot(k0, tl.trans(q0))
        k1 = _second_half(raw, NOPE, ROWS, GPU)
        logits = tl.dot(k1, tl.trans(q1), logits)
    else:
        k1 = _second_half(raw, NOPE, ROWS, GPU)
        # A product that the compiler sees going into another one is computed by each group of four warps as a whole. A branch
        # hides that it does, so that the groups share it.
        if always:
            logits = tl.dot(q0, tl.trans(k0))
            more = tl.dot(q1, tl.trans(k1))
        else:
            logits = tl.dot(q1, tl.trans(k1))
            more = tl.dot(q0, tl.trans(k0))
        logits += more
    return logits, k0, k1


@triton.jit
def _added(
    acc0, acc1, peak, total, logits, k0, k1, rows, ROWS: tl.constexpr, SWAP: tl.constexpr, GPU: tl.constexpr
):  # fmt: skip
    """Return the sums with the first ``rows`` rows of a piece added."""
    # Reference: sparse_attention, one block; exponentials of two instead of e.
    AXIS: tl.constexpr = 0 if SWAP else 1
    inside = tl.arange(0, ROWS) < rows
    logits = tl.where(inside[:, None] if SWAP else inside[None, :], logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, AXIS))
    shrink = tl.exp2(peak - new_peak)
    p = tl.exp2(logits - (new_peak[None, :] if SWAP else new_peak[:, None]))
    total = total * shrink + tl.sum(p, AXIS)
    p = bf16(p, GPU)
    if SWAP:
        acc0 = tl.dot(tl.trans(k0), p, acc0 * shrink[None, :])
        acc1 = tl.dot(tl.trans(k1), p, acc1 * shrink[None, :])
    else:
        acc0 = tl.dot(p, k0, acc0 * shrink[:, None])
        acc1 = tl.dot(p, k1, acc1 * shrink[:, None])
    return acc0, acc1, new_peak, total


@triton.jit
def counts_of(position, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr):
    """Return a token's rows in the window, its entries, whether these are listed, the window's pieces and all pieces."""
    window_rows = tl.minimum(position + 1, WINDOW)
    window_pieces = (window_rows + ROWS - 1) // ROWS
    entry_rows = (position + 1) // RATIO if ENTRIES else 0
    listed = entry_rows > TOP_K
    if TOP_K > 0:
        entry_rows = tl.minimum(entry_rows, TOP_K)
    return window_rows, entry_rows, listed, window_pieces, window_pieces + (entry_rows + ROWS - 1) // ROWS


@triton.jit(do_not_specialize=["grow_columns", "window_columns"])
def _attend_kernel(
    q, fresh, window, entries, selected, positions, sequences, firsts, first_rows, grow, window_pages, window_firsts,
    sink, cos, sin, out, parts, stats, grow_columns, window_columns, scale,
    H: tl.constexpr, NOPE: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr,
    FRESH_ROW: tl.constexpr, WINDOW_BYTES: tl.constexpr, WINDOW_ROWS: tl.constexpr, ENTRY_BYTES: tl.constexpr,
    ENTRY_ROWS: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, SWAP: tl.constexpr,
    STAGES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = NOPE + 64
    HALF: tl.constexpr = C // 2
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    position = tl.load(positions + token)
    sequence = tl.load(sequences + token).to(tl.int64)
    counts = counts_of(position, RATIO, TOP_K, WINDOW, ROWS, ENTRY_ROWS > 0)
    window_rows, entry_rows, _listed, window_pieces, pieces = counts
    if SPLITS > 1:  # noqa: SIM102  decided when compiled; the other when run
        if split >= pieces:
            return
    stores = (fresh, window, entries)
    tables = (selected + token * TOP_K, grow + sequence * grow_columns, window_pages + sequence * window_columns)
    here = (position, tl.load(firsts + sequence), tl.load(first_rows + sequence), tl.load(window_firsts + sequence))

    inside = (head < H)[:, None]
    at = (token * H + head[:, None]) * C + tl.arange(0, HALF)[None, :]
    q0 = tl.load(q + at, mask=inside, other=0.0)
    q1 = tl.load(q + HALF + at, mask=inside, other=0.0)
    if not GPU:
        q0, q1 = q0.to(tl.float32), q1.to(tl.float32)
    acc0 = tl.zeros((HALF, HEADS) if SWAP else (HEADS, HALF), tl.float32)
    acc1 = tl.zeros((HALF, HEADS) if SWAP else (HEADS, HALF), tl.float32)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    data, scales, live = locate(
        split, stores, tables, here, counts, FRESH_ROW, WINDOW_BYTES, WINDOW_ROWS, ENTRY_BYTES, ENTRY_ROWS, NOPE + 128, ROWS,
        TOP_K > 0,
    )  # fmt: skip
    for piece in tl.range(split, pieces, SPLITS, num_stages=STAGES):
        raw = _fetch(data, scales, live, NOPE, FRESH_ROW)
        data, scales, live = locate(
            piece + SPLITS, stores, tables, here, counts, FRESH_ROW, WINDOW_BYTES, WINDOW_ROWS, ENTRY_BYTES, ENTRY_ROWS,
            NOPE + 128, ROWS, TOP_K > 0,
        )  # fmt: skip
        rows = tl.where(piece < window_pieces, window_rows - piece * ROWS, entry_rows - (piece - window_pieces) * ROWS)
        logits, k0, k1 = _logits(raw, q0, q1, piece < pieces, NOPE, ROWS, SWAP, GPU)
        acc0, acc1, peak, total = _added(acc0, acc1, peak, total, logits * scale, k0, k1, rows, ROWS, SWAP, GPU)

    if SWAP:
        acc0, acc1 = tl.trans(acc0), tl.trans(acc1)
    if SPLITS > 1:
        place = split * (tl.num_programs(0) // BLOCKS).to(tl.int64) * H
        tl.store(parts + place * C + at, acc0, mask=inside)
        tl.store(parts + place * C + HALF + at, acc1, mask=inside)
        stat = stats + (place + token * H + head) * 2
        tl.store(stat, peak, mask=head < H)
        tl.store(stat + 1, total, mask=head < H)
    else:
        # Padding has no rows: its peak is -inf, this sum infinite, its result 0.
        total += tl.exp2(tl.load(sink + head, mask=head < H, other=0.0) * 1.4426950408889634 - peak)
        o1 = rotated_back(bf16(acc1 / total[:, None], GPU), cos + token * 32, sin + token * 32, HEADS, HALF)
        tl.store(out + at, bf16(acc0 / total[:, None], GPU), mask=inside)
        tl.store(out + HALF + at, bf16(o1, GPU), mask=inside)


def paged_attention_triton(
    q_THC: Tensor,
    fresh_TB: Tensor,
    window: RowStore,
    entries: RowStore | None,
    paging: Paging,
    sink_H: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    ratio: int,
    selected_TK: Tensor | None,
    splits: int,
    window_size: int,
    norm_eps: float | None = None,
) -> Tensor:
    """See ``attention.paged_attention``."""
    tokens, heads, channels = q_THC.shape
    fmt = window.format
    assert isinstance(fmt, Fp8Kv) and fmt.rope == KV_GROUP and fmt.nope in (64, 192, 448), fmt
    assert fmt.width == channels and (entries is None or (entries.format == fmt and ratio > 0)), (fmt, q_THC.shape, ratio)
    assert cos.shape == sin.shape == (tokens, fmt.rope // 2) and cos.is_contiguous() and sin.is_contiguous(), cos.shape
    assert fresh_TB.shape == (tokens, fmt.data_bytes + fmt.scale_bytes) and fresh_TB.stride(1) == 1, fresh_TB.shape
    assert selected_TK is None or selected_TK.is_contiguous()
    few = splits >= FEW_SPLITS
    q = q_THC if few else q_THC.contiguous()
    if tokens == 0:
        return torch.empty_like(q)
    inputs = PackedInputs(
        q_THC=q,
        fresh_TB=fresh_TB,
        window=window,
        entries=entries,
        paging=paging,
        ratio=ratio,
        selected_TK=selected_TK,
        splits=splits,
        window_size=window_size,
    )
    if few:
        return few_attention_triton(inputs, sink_H, scale, (cos, sin), norm_eps)
    assert norm_eps is None
    tile = tile_for(heads, capability_of(q.device))
    out = q if splits > 1 else torch.empty_like(q)  # that of shares is made by those who add them
    parts, stats = inputs.shares() if splits > 1 else (out, out)
    _attend_kernel[(tokens * triton.cdiv(heads, tile.heads), splits)](
        *inputs.tensors(), sink_H, cos, sin, out, parts, stats, *inputs.columns(), scale * LOG2_E, **inputs.layer(tile.rows),
        **inputs.places(), HEADS=tile.heads, SWAP=tile.swap, STAGES=tile.num_stages,
        num_warps=tile.num_warps, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out if splits == 1 else merged(inputs, parts, stats, sink_H, (cos, sin), tile.rows, fills=True)
