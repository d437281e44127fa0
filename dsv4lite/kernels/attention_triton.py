"""Kernels of ``attention.py`` on packed pages.

    attend    one token x a block of heads x one of ``splits`` shares of its rows
    merge     one token and head: adds the shares, in order; not launched for a single share

A token's rows are cut into pieces of fixed size, window first; share s takes pieces s, s + splits, … A piece is read once for all
heads of the block: codes are widened to bfloat16 in registers, four at a time, and the tile then serves both products from shared
memory. The next piece's bytes, and the addresses of the one after, are on their way meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import Variant
from dsv4lite.kernels.gemm_triton import capability_of
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import KV_GROUP, Fp8Kv, RowStore

LOG2_E = 1.4426950408889634
FEW_SPLITS = 8  # from here on blocks of few heads: more programs, each of which waits less for its queries
_HOPPER = (90, 100, 103)  # chips whose shared memory holds a piece of 64 rows beside 64 queries of 512 channels
_MERGED = 8  # shares read at a time


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


def tile_for(heads: int, splits: int, capability: int) -> Tile:
    """Return the tile, which follows from the layer and ``splits`` alone on one kind of chip."""
    most = max(16, triton.next_power_of_2(heads))
    if capability not in _HOPPER:
        return Tile(heads=min(most, 16), rows=32, swap=False, num_warps=4)
    if most < 64 or splits >= FEW_SPLITS:
        return Tile(heads=16, rows=64, swap=True, num_warps=4)
    return Tile(heads=64, rows=64, swap=False, num_warps=8)


@triton.jit
def _bf16(x, GPU: tl.constexpr):
    """Round float32 to the nearest bfloat16; the interpreter would cut, and knows no products of bfloat16."""
    if GPU:
        rounded = x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1) & -65536).to(tl.float32, bitcast=True)
    return rounded


_WIDEN = tl.constexpr("""{
.reg .b32 t, m, f, z;
mov.b32 f, 0x7B807B80; mov.b32 z, 0x80008000;
prmt.b32 t, $2, 0, 0x1404;
and.b32 m, t, 0x7F007F00; shr.b32 m, m, 4; lop3.b32 t, t, 0x80008000, m, 0xEA;
fma.rn.bf16x2 t, t, f, z; fma.rn.bf16x2 $0, t, $3, z;
prmt.b32 t, $2, 0, 0x3424;
and.b32 m, t, 0x7F007F00; shr.b32 m, m, 4; lop3.b32 t, t, 0x80008000, m, 0xEA;
fma.rn.bf16x2 t, t, f, z; fma.rn.bf16x2 $1, t, $3, z;
}""")


@triton.jit
def _widen(codes, scale, GPU: tl.constexpr):
    """Return e4m3 codes [R, 64] times a power of two for each row, given as e8m0 byte int32 [R]."""
    # Reference: dequantize_fp8(codes, scales, KV_GROUP).to(dtype)
    # Exponent and mantissa four bits up are a bfloat16 of 2^-120 times the value; the assembly takes four codes at a time.
    if GPU:
        bits = tl.where(scale == 0, 0x0040, tl.where(scale == 255, 0x7FC0, scale << 7))
        both = (bits | (bits << 16))[:, None]
        wide = tl.inline_asm_elementwise(_WIDEN, "=r,=r,r,r,r,r,r", [codes, both], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        bits = ((codes.to(tl.int32) & 0x7F) << 20) | ((codes.to(tl.int32) & 0x80) << 24)
        factor = tl.where(scale == 0, 0x00400000, tl.where(scale == 255, 0x7FC00000, scale << 23))
        wide = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * factor.to(tl.float32, bitcast=True)[:, None]
    return wide


@triton.jit
def _locate(
    piece,
    fresh,
    window,
    entries,
    selected,
    grow,
    window_pages,
    position,
    first,
    row,
    page_first,
    window_pieces,
    window_rows,
    entry_rows,
    listed,
    FRESH_ROW: tl.constexpr,
    WINDOW_PAGE_BYTES: tl.constexpr,
    WINDOW_PAGE_ROWS: tl.constexpr,
    ENTRY_PAGE_BYTES: tl.constexpr,
    ENTRY_PAGE_ROWS: tl.constexpr,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    SELECTED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Return pointers to the data and the scales of a piece's rows, and which of them there are."""
    r = tl.arange(0, ROWS)
    in_window = piece < window_pieces
    live = r < tl.where(in_window, window_rows - piece * ROWS, 0)
    at = position + 1 - window_rows + piece * ROWS + r
    since = at - first
    # Reference: _window_rows
    column = at // WINDOW_PAGE_ROWS - page_first
    page = tl.load(window_pages + column, mask=live & (since < 0), other=0).to(tl.int64)
    base = window + page * WINDOW_PAGE_BYTES
    own = fresh + (row + since).to(tl.int64) * FRESH_ROW
    place = at % WINDOW_PAGE_ROWS
    data = tl.where(since >= 0, own, base + place * DATA)
    scales = tl.where(since >= 0, own + DATA, base + WINDOW_PAGE_ROWS * DATA + place * SCALES)
    if ENTRY_PAGE_ROWS > 0:
        # Reference: _entry_rows
        done = (piece - window_pieces) * ROWS
        left = tl.where(in_window, 0, entry_rows - done)
        more = r < left
        entry = done + r
        if SELECTED:
            entry = tl.where(listed, tl.load(selected + entry, mask=r < tl.where(listed, left, 0), other=0), entry)
        page = tl.load(grow + entry // ENTRY_PAGE_ROWS, mask=more, other=0).to(tl.int64)
        base = entries + page * ENTRY_PAGE_BYTES
        place = entry % ENTRY_PAGE_ROWS
        data = tl.where(in_window, data, base + place * DATA)
        scales = tl.where(in_window, scales, base + ENTRY_PAGE_ROWS * DATA + place * SCALES)
        live = live | more
    return tl.multiple_of(data, ALIGN), tl.multiple_of(scales, 8), live


@triton.jit
def _group(data, live, number: tl.constexpr):
    return tl.load(data[:, None] + number * 64 + tl.arange(0, 64)[None, :], mask=live[:, None], other=0)


@triton.jit
def _fetch(data, scales, live, NOPE: tl.constexpr, ALIGN: tl.constexpr):
    """Return a piece's bytes: codes in groups of 64 channels (unused groups repeat the first), the rotated channels, the scales."""
    tail = tl.multiple_of((data + NOPE).to(tl.pointer_type(tl.bfloat16)), ALIGN)
    tail = tl.load(tail[:, None] + tl.arange(0, 64)[None, :], mask=live[:, None], other=0.0)
    words = tl.load(scales.to(tl.pointer_type(tl.int64)), mask=live, other=0)
    c0 = _group(data, live, 0)
    c1 = _group(data, live, 1) if NOPE > 64 else c0
    c2 = _group(data, live, 2) if NOPE > 128 else c0
    c3 = _group(data, live, 3) if NOPE > 192 else c0
    c4 = _group(data, live, 4) if NOPE > 256 else c0
    c5 = _group(data, live, 5) if NOPE > 320 else c0
    c6 = _group(data, live, 6) if NOPE > 384 else c0
    return c0, c1, c2, c3, c4, c5, c6, tail, words


@triton.jit
def _scaled(codes, words, number: tl.constexpr, GPU: tl.constexpr):
    return _widen(codes, ((words >> (8 * number)) & 255).to(tl.int32), GPU)


@triton.jit
def _tile(raw, NOPE: tl.constexpr, ROWS: tl.constexpr, GPU: tl.constexpr):
    """Return the rows [R, C], bfloat16 (float32 in the interpreter), from what ``_fetch`` has read."""
    # Reference: RowFormat.unpack. Joining leaves every value with the thread that has read it.
    words = raw[8]
    tail = raw[7] if GPU else raw[7].to(tl.float32)
    k0 = _scaled(raw[0], words, 0, GPU)
    if NOPE == 64:
        joined = tl.permute(tl.join(k0, tail), (0, 2, 1))
    elif NOPE == 192:
        k1 = _scaled(raw[1], words, 1, GPU)
        k2 = _scaled(raw[2], words, 2, GPU)
        joined = tl.permute(tl.join(tl.join(k0, k2), tl.join(k1, tail)), (0, 2, 3, 1))
    else:
        k1 = _scaled(raw[1], words, 1, GPU)
        k2 = _scaled(raw[2], words, 2, GPU)
        k3 = _scaled(raw[3], words, 3, GPU)
        k4 = _scaled(raw[4], words, 4, GPU)
        k5 = _scaled(raw[5], words, 5, GPU)
        k6 = _scaled(raw[6], words, 6, GPU)
        even = tl.join(tl.join(k0, k4), tl.join(k2, k6))
        odd = tl.join(tl.join(k1, k5), tl.join(k3, tail))
        joined = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1))
    return tl.reshape(joined, (ROWS, NOPE + 64))


@triton.jit
def _rotated_back(o, cos, sin, NOPE: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, GPU: tl.constexpr):
    """Turn the last channels of ``o`` [H, C], rounded to bfloat16, by the token's angles."""
    # Reference: rope(o, cos, sin, inverse=True)
    pair = tl.arange(0, C // 2) - NOPE // 2
    c = tl.load(cos + pair, mask=pair >= 0, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=pair >= 0, other=0.0)[None, :]
    a, b = tl.split(tl.reshape(o.to(tl.float32), (HEADS, C // 2, 2)))
    turns = (pair >= 0)[None, :]
    return tl.reshape(tl.join(tl.where(turns, a * c + b * s, a), tl.where(turns, b * c - a * s, b)), (HEADS, C))


@triton.jit
def _counts(position, ratio, top_k, WINDOW: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, SELECTED: tl.constexpr):
    """Return a token's rows in the window, its entries, whether these are listed, the window's pieces and all pieces."""
    window_rows = tl.minimum(position + 1, WINDOW)
    window_pieces = (window_rows + ROWS - 1) // ROWS
    entry_rows = (position + 1) // ratio if ENTRIES else 0
    listed = entry_rows > top_k
    if SELECTED:
        entry_rows = tl.minimum(entry_rows, top_k)
    return window_rows, entry_rows, listed, window_pieces, window_pieces + (entry_rows + ROWS - 1) // ROWS


@triton.jit(do_not_specialize=["grow_columns", "window_columns"])
def attend_kernel(
    q,
    fresh,
    window,
    entries,
    selected,
    positions,
    sequences,
    firsts,
    first_rows,
    grow,
    window_pages,
    window_firsts,
    sink,
    cos,
    sin,
    out,
    parts,
    stats,
    grow_columns,
    window_columns,
    scale,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    WINDOW: tl.constexpr,
    FRESH_ROW: tl.constexpr,
    WINDOW_PAGE_BYTES: tl.constexpr,
    WINDOW_PAGE_ROWS: tl.constexpr,
    ENTRY_PAGE_BYTES: tl.constexpr,
    ENTRY_PAGE_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SWAP: tl.constexpr,
    GPU: tl.constexpr,
):
    C: tl.constexpr = NOPE + 64
    DATA: tl.constexpr = NOPE + 128
    SCALES: tl.constexpr = 8
    SELECTED: tl.constexpr = TOP_K > 0
    ALIGN: tl.constexpr = 16 if FRESH_ROW % 16 == 0 else 8
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    position = tl.load(positions + token)
    sequence = tl.load(sequences + token).to(tl.int64)
    window_rows, entry_rows, listed, window_pieces, pieces = _counts(
        position, RATIO, TOP_K, WINDOW, ROWS, ENTRY_PAGE_ROWS > 0, SELECTED
    )
    if SPLITS > 1:  # noqa: SIM102  decided when compiled; the other when run
        if split >= pieces:
            return
    first = tl.load(firsts + sequence)
    row = tl.load(first_rows + sequence)
    page_first = tl.load(window_firsts + sequence)
    selected += token * TOP_K
    grow += sequence * grow_columns
    window_pages += sequence * window_columns

    q_tile = tl.load(q + (token * H + head[:, None]) * C + tl.arange(0, C)[None, :], mask=(head < H)[:, None], other=0.0)
    if not GPU:
        q_tile = q_tile.to(tl.float32)
    acc = tl.zeros((C, HEADS) if SWAP else (HEADS, C), tl.float32)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    r = tl.arange(0, ROWS)
    data, scales, live = _locate(
        split, fresh, window, entries, selected, grow, window_pages, position, first, row, page_first,
        window_pieces, window_rows, entry_rows, listed,
        FRESH_ROW, WINDOW_PAGE_BYTES, WINDOW_PAGE_ROWS, ENTRY_PAGE_BYTES, ENTRY_PAGE_ROWS, DATA, SCALES, ROWS, SELECTED, ALIGN,
    )  # fmt: skip
    raw = _fetch(data, scales, live, NOPE, ALIGN)
    data, scales, live = _locate(
        split + SPLITS, fresh, window, entries, selected, grow, window_pages, position, first, row, page_first,
        window_pieces, window_rows, entry_rows, listed,
        FRESH_ROW, WINDOW_PAGE_BYTES, WINDOW_PAGE_ROWS, ENTRY_PAGE_BYTES, ENTRY_PAGE_ROWS, DATA, SCALES, ROWS, SELECTED, ALIGN,
    )  # fmt: skip
    for piece in range(split, pieces, SPLITS):
        k = _tile(raw, NOPE, ROWS, GPU)
        raw = _fetch(data, scales, live, NOPE, ALIGN)
        data, scales, live = _locate(
            piece + 2 * SPLITS, fresh, window, entries, selected, grow, window_pages, position, first, row, page_first,
            window_pieces, window_rows, entry_rows, listed,
            FRESH_ROW, WINDOW_PAGE_BYTES, WINDOW_PAGE_ROWS, ENTRY_PAGE_BYTES, ENTRY_PAGE_ROWS, DATA, SCALES, ROWS, SELECTED, ALIGN,
        )  # fmt: skip
        rows = tl.where(piece < window_pieces, window_rows - piece * ROWS, entry_rows - (piece - window_pieces) * ROWS)
        # Reference: sparse_attention, one block; exponentials of two instead of e.
        if SWAP:
            logits = tl.where((r < rows)[:, None], tl.dot(k, tl.trans(q_tile)) * scale, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logits, 0))
            p = tl.exp2(logits - new_peak[None, :])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(p, 0)
            acc = tl.dot(tl.trans(k), _bf16(p, GPU), acc * shrink[None, :])
        else:
            logits = tl.where((r < rows)[None, :], tl.dot(q_tile, tl.trans(k)) * scale, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logits, 1))
            p = tl.exp2(logits - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(_bf16(p, GPU), k, acc * shrink[:, None])
        peak = new_peak

    if SPLITS > 1:
        at = (split * tl.num_programs(0).to(tl.int64) // BLOCKS + token) * H + head
        column = tl.arange(0, C)
        if SWAP:
            tl.store(parts + at[None, :] * C + column[:, None], acc, mask=(head < H)[None, :])
        else:
            tl.store(parts + at[:, None] * C + column[None, :], acc, mask=(head < H)[:, None])
        tl.store(stats + at * 2, peak, mask=head < H)
        tl.store(stats + at * 2 + 1, total, mask=head < H)
    else:
        # Padding has no rows: its peak is -inf, this sum infinite, its result 0.
        total += tl.exp2(tl.load(sink + head, mask=head < H, other=0.0) * 1.4426950408889634 - peak)
        o = _bf16(acc / (total[None, :] if SWAP else total[:, None]), GPU)
        if SWAP:
            o = tl.trans(o)
        o = _rotated_back(o, cos + token * 32, sin + token * 32, NOPE, C, HEADS, GPU)
        at = (token * H + head[:, None]) * C + tl.arange(0, C)[None, :]
        tl.store(out + at, _bf16(o, GPU), mask=(head < H)[:, None])


@triton.jit
def merge_kernel(
    parts,
    stats,
    positions,
    sink,
    cos,
    sin,
    out,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    WINDOW: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    GPU: tl.constexpr,
):
    C: tl.constexpr = NOPE + 64
    at = tl.program_id(0).to(tl.int64)  # token and head
    token = at // H
    stride = tl.num_programs(0).to(tl.int64)
    position = tl.load(positions + token)
    _rows, _entries, _listed, _window, pieces = _counts(position, RATIO, TOP_K, WINDOW, ROWS, ENTRIES, TOP_K > 0)
    used = tl.minimum(pieces, SPLITS)
    every = tl.arange(0, PADDED)
    peak = tl.max(tl.load(stats + (every * stride + at) * 2, mask=every < used, other=float("-inf")))
    log_sink = tl.load(sink + at % H) * 1.4426950408889634
    total = tl.exp2(log_sink - peak)
    acc = tl.zeros((C,), tl.float32)
    column = tl.arange(0, C)
    for begin in range(0, used, CHUNK):
        split = begin + tl.arange(0, CHUNK)
        live = split < used
        place = split * stride + at
        weight = tl.exp2(tl.load(stats + place * 2, mask=live, other=float("-inf")) - peak)
        total += tl.sum(tl.load(stats + place * 2 + 1, mask=live, other=0.0) * weight)
        share = tl.load(parts + place[:, None] * C + column[None, :], mask=live[:, None], other=0.0)
        acc += tl.sum(share * weight[:, None], 0)
    o = _rotated_back(_bf16(acc / total, GPU)[None, :], cos + token * 32, sin + token * 32, NOPE, C, 1, GPU)
    tl.store(out + at * C + column[None, :], _bf16(o, GPU))


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
) -> Tensor:
    """See ``attention.paged_attention``."""
    tokens, heads, channels = q_THC.shape
    fmt = window.format
    assert isinstance(fmt, Fp8Kv) and fmt.rope == KV_GROUP and fmt.nope in (64, 192, 448), fmt
    assert fmt.width == channels and (entries is None or (entries.format == fmt and ratio > 0)), (fmt, q_THC.shape, ratio)
    assert cos.shape == sin.shape == (tokens, fmt.rope // 2) and cos.is_contiguous() and sin.is_contiguous(), cos.shape
    assert fresh_TB.shape == (tokens, fmt.data_bytes + fmt.scale_bytes) and fresh_TB.stride(1) == 1, fresh_TB.shape
    assert selected_TK is None or selected_TK.is_contiguous()
    q = q_THC.contiguous()
    out = torch.empty_like(q)
    if tokens == 0:
        return out
    tile = tile_for(heads, splits, capability_of(q.device))
    entry_store = window if entries is None else entries
    parts = stats = out
    if splits > 1:
        parts = torch.empty(splits, tokens, heads, channels, dtype=torch.float32, device=q.device)
        stats = torch.empty(splits, tokens, heads, 2, dtype=torch.float32, device=q.device)
    layer = {
        "H": heads,
        "NOPE": fmt.nope,
        "RATIO": max(ratio, 1),
        "TOP_K": 0 if selected_TK is None else selected_TK.shape[1],
        "WINDOW": window_size,
        "SPLITS": splits,
        "ROWS": tile.rows,
        "GPU": q.is_cuda,
    }
    attend_kernel[(tokens * triton.cdiv(heads, tile.heads), splits)](
        q,
        fresh_TB,
        window.memory,
        entry_store.memory,
        paging.positions_T if selected_TK is None else selected_TK,
        paging.positions_T,
        paging.sequence_T,
        paging.first_S,
        paging.rows_S,
        paging.grow_SP,
        paging.window_SP,
        paging.window_first_S,
        sink_H,
        cos,
        sin,
        out,
        parts,
        stats,
        paging.grow_SP.stride(0),
        paging.window_SP.stride(0),
        scale * LOG2_E,
        **layer,
        FRESH_ROW=fresh_TB.stride(0),
        WINDOW_PAGE_BYTES=window.memory.shape[1],
        WINDOW_PAGE_ROWS=window.rows_per_page,
        ENTRY_PAGE_BYTES=entry_store.memory.shape[1],
        ENTRY_PAGE_ROWS=0 if entries is None else entries.rows_per_page,
        HEADS=tile.heads,
        SWAP=tile.swap,
        num_warps=tile.num_warps,
        num_stages=1,
        enable_fp_fusion=True,
    )
    if splits > 1:
        merge_kernel[(tokens * heads,)](
            parts,
            stats,
            paging.positions_T,
            sink_H,
            cos,
            sin,
            out,
            **layer,
            ENTRIES=entries is not None,
            PADDED=triton.next_power_of_2(splits),
            CHUNK=min(_MERGED, triton.next_power_of_2(splits)),
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return out


def variants() -> list[Variant]:
    """Return the tiles of every chip at V4-Flash's sizes and at small ones, with and without entries and a selection."""
    ints = ("positions", "sequences", "firsts", "first_rows", "grow", "window_pages", "window_firsts", "selected")
    signature = {
        "q": "*bf16", **dict.fromkeys(("fresh", "window", "entries"), "*u8"), **dict.fromkeys(ints, "*i32"),
        **dict.fromkeys(("sink", "cos", "sin"), "*fp32"), "out": "*bf16", "parts": "*fp32", "stats": "*fp32",
        "grow_columns": "i32", "window_columns": "i32", "scale": "fp32",
    }  # fmt: skip
    order = attend_kernel.arg_names
    signature = {name: signature[name] for name in order if name in signature}
    merged = {
        "parts": "*fp32",
        "stats": "*fp32",
        "positions": "*i32",
        **dict.fromkeys(("sink", "cos", "sin"), "*fp32"),
        "out": "*bf16",
    }
    found = []
    # Heads, channels without position, ratio, selected entries.
    layers = ((64, 448, 0, 0), (64, 448, 4, 512), (64, 448, 128, 0), (8, 64, 4, 64))
    for capability, (heads, nope, ratio, top_k), splits in product((80, 89, 90, 100, 120), layers, (1, 4, 16)):
        tile = tile_for(heads, splits, capability)
        layer = {
            "H": heads, "NOPE": nope, "RATIO": max(ratio, 1), "TOP_K": top_k, "WINDOW": 128, "SPLITS": splits, "ROWS": tile.rows,
            "GPU": True,
        }  # fmt: skip
        places = {
            "FRESH_ROW": nope + 136 if splits == 1 else nope + 144, "WINDOW_PAGE_BYTES": 65 * (nope + 128), "WINDOW_PAGE_ROWS": 64,
            "ENTRY_PAGE_BYTES": 65 * (nope + 128), "ENTRY_PAGE_ROWS": 256 // ratio if ratio else 0, "HEADS": tile.heads,
            "SWAP": tile.swap,
        }  # fmt: skip
        only = (capability,)
        found.append(
            Variant(
                kernel=attend_kernel,
                signature=signature,
                constants={**layer, **places},
                num_warps=tile.num_warps,
                num_stages=1,
                capabilities=only,
            )
        )
        if splits > 1:
            constants = {**layer, "ENTRIES": ratio > 0, "PADDED": splits, "CHUNK": min(_MERGED, splits)}
            found.append(
                Variant(kernel=merge_kernel, signature=merged, constants=constants, num_warps=4, num_stages=1, capabilities=only)
            )
    return found
