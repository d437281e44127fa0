"""Kernel of ``paged_attention``.

One program takes one token x a block of heads x one of ``splits`` KV splits; ``merge_triton.py`` merges several splits. A token's
rows are cut into pieces of fixed size, window first; split s takes pieces s, s + splits, … All heads of the block share one read of
a piece: codes of packed rows are widened to bfloat16 in registers, four at a time, and both products read them from shared memory.
Meanwhile the bytes of the next pieces and the page numbers of the pieces after them are loaded. ``decode_triton.py`` has the kernel
for packed rows of few tokens, ``prefill_triton.py`` that for packed rows that many tokens share.

A float32 product is three TF32 products; the tensor cores truncate their sums, which costs a few of float32's last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention import DECODE_SPLITS, WIDENED_ROWS, AttentionInputs
from dsv4lite.kernels.attention.decode_triton import decode_attention_triton
from dsv4lite.kernels.attention.merge_triton import added, counts_of, dot_of_halves, merged
from dsv4lite.kernels.attention.prefill_triton import prefill_attention_triton
from dsv4lite.kernels.dispatch import HOPPER, LARGE_SHARED_MEMORY, capability_of, ceil_div, compiled
from dsv4lite.kernels.rows import KV_GROUP, Fp8Kv, UnquantizedRow
from dsv4lite.kernels.rows.packed import LOG2_E, fetch, joined, narrowed, rotated_back, scaled

SMALL_BLOCK_SPLITS = 8  # from this number of splits on, unquantized rows take blocks of 16 heads, for more programs
_ROW_BYTES = 1024  # widest unquantized row for which larger tiles fit into shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile sizes and launch options of one program.

    Attributes:
        heads: Heads of a block, at least 16, the rows of a tensor-core operand.
        rows: Rows of a piece.
        swap: Rows are the left operand of both products, so that few heads still fill the tensor cores.
        num_stages: While one piece is used, ``num_stages - 1`` pieces are loaded.
    """

    heads: int
    rows: int
    swap: bool = False
    num_warps: int
    num_stages: int


WIDE = Tile(heads=64, rows=64, num_warps=8, num_stages=3)


def tile_for(capability: int) -> Tile:
    """Return the tile for packed rows; it depends on the chip alone."""
    if capability not in LARGE_SHARED_MEMORY:
        return Tile(heads=16, rows=32, num_warps=4, num_stages=2)
    # Triton 3.9 removes the whole computation of the wide tile on sm_100.
    if capability != HOPPER:
        return Tile(heads=16, rows=64, swap=True, num_warps=4, num_stages=3)
    return WIDE


def unquantized_tile_for(heads: int, row_bytes: int, splits: int, capability: int) -> Tile:
    """Return the tile for unquantized rows; it depends on the layer, ``splits`` and the chip alone."""
    if row_bytes > _ROW_BYTES:
        large = capability in LARGE_SHARED_MEMORY
        return Tile(heads=16, rows=32 if large else 16, num_warps=4, num_stages=2 if large else 1)
    if heads >= 64 and splits < SMALL_BLOCK_SPLITS and capability == HOPPER:
        return Tile(heads=64, rows=64, num_warps=8, num_stages=2)
    return Tile(heads=16, rows=32, num_warps=4, num_stages=2)


@triton.jit
def _locate(
    piece, stores, tables, at, counts, FRESH_ROW: tl.constexpr, WINDOW_BYTES: tl.constexpr, WINDOW_ROWS: tl.constexpr,
    ENTRY_BYTES: tl.constexpr, ENTRY_ROWS: tl.constexpr, DATA: tl.constexpr, ROWS: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Return pointers to the data and the scales of a piece's rows, and which of them exist."""
    ALIGN: tl.constexpr = 16 if FRESH_ROW % 16 == 0 else 8 if FRESH_ROW % 8 == 0 else 4
    SCALES: tl.constexpr = 8
    fresh, window, entries = stores
    selected, grow, window_pages = tables
    position, first, row, page_first = at
    window_rows, entry_rows, listed, window_pieces, _pieces = counts
    r = tl.arange(0, ROWS)
    in_window = piece < window_pieces
    # Reference: _RecentRows
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
def _first_half(raw, NOPE: tl.constexpr, PACKED: tl.constexpr):
    """Return the first half of the channels of a piece's rows, from its bytes; float32 in the interpreter."""
    # Reference: RowFormat.unpack
    if PACKED:
        words = raw[8]
        k0 = scaled(raw[0], words, 0)
        k1 = scaled(raw[1], words, 1) if NOPE > 64 else k0
        k2 = scaled(raw[2], words, 2) if NOPE > 192 else k0
        k3 = scaled(raw[3], words, 3) if NOPE > 192 else k0
        half = joined(k0, k1, k2, k3, (NOPE + 64) // 128)
    else:
        half = raw[0] if compiled() else raw[0].to(tl.float32)
    return half


@triton.jit
def _second_half(raw, NOPE: tl.constexpr, PACKED: tl.constexpr):
    if not PACKED:
        half = raw[1] if compiled() else raw[1].to(tl.float32)
    else:
        words = raw[8]
        tail = raw[7] if compiled() else raw[7].to(tl.float32)
        if NOPE == 64:
            half = tail
        elif NOPE == 192:
            half = joined(scaled(raw[2], words, 2), tail, tail, tail, 2)
        else:
            k4 = scaled(raw[4], words, 4)
            k5 = scaled(raw[5], words, 5)
            k6 = scaled(raw[6], words, 6)
            half = joined(k4, k5, k6, tail, 4)
    return half


@triton.jit
def _logits(raw, q0, q1, always, NOPE: tl.constexpr, SWAP: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr):
    """Return the products of queries and rows, [H, R] or, swapped, [R, H], and both halves of the rows; ``always`` is true."""
    k0 = _first_half(raw, NOPE, PACKED)
    if SWAP:
        logits = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
        k1 = _second_half(raw, NOPE, PACKED)
        logits = tl.dot(k1, tl.trans(q1), logits, input_precision=PRECISION)
    else:
        k1 = _second_half(raw, NOPE, PACKED)
        logits = dot_of_halves(q0, q1, k0, k1, always, PRECISION)
    return logits, k0, k1


@triton.jit(do_not_specialize=["grow_columns", "window_columns"])
def _attend_kernel(
    q, fresh, window, entries, selected, positions, sequences, firsts, first_rows, grow, window_pages, window_firsts,
    sink, cos, sin, out, parts, stats, grow_columns, window_columns, scale,
    H: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr,
    FRESH_ROW: tl.constexpr, WINDOW_BYTES: tl.constexpr, WINDOW_ROWS: tl.constexpr, ENTRY_BYTES: tl.constexpr,
    ENTRY_ROWS: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, SWAP: tl.constexpr,
    STAGES: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    FLOAT32: tl.constexpr = q.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = "tf32x3" if FLOAT32 else "tf32"
    NOPE: tl.constexpr = WIDTH - ROPE
    DATA: tl.constexpr = WIDTH + ROPE if PACKED else FRESH_ROW
    HALF: tl.constexpr = PADDED // 2
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    position = tl.load(positions + token)
    sequence = tl.load(sequences + token).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    at = (token * H + head[:, None]) * WIDTH + column
    first = (head < H)[:, None] & (column < WIDTH)
    second = (head < H)[:, None] & (HALF + column < WIDTH)
    q0 = tl.load(q + at, mask=first, other=0.0)
    q1 = tl.load(q + HALF + at, mask=second, other=0.0)
    counts = counts_of(position, RATIO, TOP_K, WINDOW, ROWS, ENTRY_ROWS > 0)
    window_rows, entry_rows, _listed, window_pieces, pieces = counts
    if SPLITS > 1:  # noqa: SIM102  decided when compiled; the other when run
        if split >= pieces:
            return
    stores = (fresh, window, entries)
    tables = (selected + token * TOP_K, grow + sequence * grow_columns, window_pages + sequence * window_columns)
    here = (position, tl.load(firsts + sequence), tl.load(first_rows + sequence), tl.load(window_firsts + sequence))

    if not compiled():
        q0, q1 = q0.to(tl.float32), q1.to(tl.float32)
    acc0 = tl.zeros((HALF, HEADS) if SWAP else (HEADS, HALF), tl.float32)
    acc1 = tl.zeros((HALF, HEADS) if SWAP else (HEADS, HALF), tl.float32)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    # A piece is located in its own iteration: if the loop carried the address to the next one, the load would become a separate
    # copy, and the loop would wait for all copies. Each load on the way to the rows needs as many stages as the rows' bytes.
    LOADS: tl.constexpr = 3 if TOP_K > 0 else 2
    for piece in tl.range(split, pieces, SPLITS, num_stages=1 + (STAGES - 1) * LOADS):
        data, scales, live = _locate(
            piece, stores, tables, here, counts, FRESH_ROW, WINDOW_BYTES, WINDOW_ROWS, ENTRY_BYTES, ENTRY_ROWS, DATA, ROWS,
            TOP_K > 0,
        )  # fmt: skip
        if PACKED:
            raw = fetch(data, scales, live, NOPE, FRESH_ROW, False)
        else:
            keys = data.to(tl.pointer_type(q.dtype.element_ty))[:, None] + column
            k0 = tl.load(keys, mask=live[:, None] & (column < WIDTH), other=0.0)
            raw = (k0, tl.load(keys + HALF, mask=live[:, None] & (HALF + column < WIDTH), other=0.0))
        rows = tl.where(piece < window_pieces, window_rows - piece * ROWS, entry_rows - (piece - window_pieces) * ROWS)
        logits, k0, k1 = _logits(raw, q0, q1, piece < pieces, NOPE, SWAP, PACKED, PRECISION)
        acc0, acc1, peak, total = added(acc0, acc1, peak, total, logits * scale, k0, k1, rows, ROWS, SWAP, FLOAT32, PRECISION)

    if SWAP:
        acc0, acc1 = tl.trans(acc0), tl.trans(acc1)
    if SPLITS > 1:
        place = split * (tl.num_programs(0) // BLOCKS).to(tl.int64) * H
        tl.store(parts + place * WIDTH + at, acc0, mask=first)
        tl.store(parts + place * WIDTH + HALF + at, acc1, mask=second)
        stat = stats + (place + token * H + head) * 2
        tl.store(stat, peak, mask=head < H)
        tl.store(stat + 1, total, mask=head < H)
    else:
        # Padding has no rows: its peak is -inf, ``total`` is infinite and the result 0.
        total += tl.exp2(tl.load(sink + head, mask=head < H, other=0.0) * 1.4426950408889634 - peak)
        cos += token * (ROPE // 2)
        sin += token * (ROPE // 2)
        o0 = narrowed(acc0 / total[:, None], FLOAT32)
        if NOPE < HALF:
            o0 = narrowed(rotated_back(o0, cos, sin, HEADS, HALF, NOPE, ROPE), FLOAT32)
        o1 = rotated_back(narrowed(acc1 / total[:, None], FLOAT32), cos, sin, HEADS, HALF, NOPE - HALF, ROPE)
        tl.store(out + at, o0, mask=first)
        tl.store(out + HALF + at, narrowed(o1, FLOAT32), mask=second)


def paged_attention_triton(given: AttentionInputs) -> Tensor:
    """See ``attention.paged_attention``. Packed rows need 64, 192 or 448 FP8 channels and 64 rotated ones."""
    (tokens, heads, channels), fmt, splits = given.q_THC.shape, given.window.format, given.paging.splits
    rope, packed = 2 * given.cos.shape[1], isinstance(fmt, Fp8Kv)
    if isinstance(fmt, Fp8Kv):
        assert fmt.rope == rope == KV_GROUP and fmt.nope in (64, 192, 448), (fmt, rope)
    else:
        assert isinstance(fmt, UnquantizedRow) and fmt.dtype == given.q_THC.dtype and channels % 2 == 0 and rope <= channels, fmt
        assert given.fresh_TB.is_contiguous()
    assert fmt.width == channels and (given.entries is None or (given.entries.format == fmt and given.ratio > 0)), fmt
    assert given.cos.shape == given.sin.shape and len(given.cos) == tokens
    assert given.cos.is_contiguous() and given.sin.is_contiguous()
    assert given.fresh_TB.shape == (tokens, fmt.data_bytes + fmt.scale_bytes) and given.fresh_TB.stride(1) == 1
    assert given.selected_TK is None or given.selected_TK.is_contiguous()
    if tokens == 0:
        return torch.empty(given.q_THC.shape, dtype=given.q_THC.dtype, device=given.q_THC.device)
    if packed and splits >= DECODE_SPLITS:
        return decode_attention_triton(given)
    q = given.q_THC.contiguous()
    given, capability = given._replace(q_THC=q), capability_of(q.device)
    tile = tile_for(capability) if packed else unquantized_tile_for(heads, fmt.data_bytes, splits, capability)
    # Widening all rows first changes no bit, so results do not depend on this choice.
    if packed and tile == WIDE and splits == 1 and given.visible_rows <= WIDENED_ROWS * tokens:
        return prefill_attention_triton(given)
    out = q if splits > 1 else torch.empty_like(q)  # with several splits unused: ``merged`` allocates the result
    parts, stats = given.allocate_splits() if splits > 1 else (out, out)
    _attend_kernel[(tokens * ceil_div(heads, tile.heads), splits)](
        *given.tensors(), given.sink_H, given.cos, given.sin, out, parts, stats,
        given.paging.grow_SP.stride(0), given.paging.window_SP.stride(0), given.scale * LOG2_E,
        **given.layer(tile.rows), **given.row_layout(), SPLITS=splits, HEADS=tile.heads, SWAP=tile.swap, STAGES=tile.num_stages,
        PADDED=given.padded_width, ROPE=rope, PACKED=packed,
        num_warps=tile.num_warps, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out if splits == 1 else merged(given, parts, stats, tile.rows, fills=True)
