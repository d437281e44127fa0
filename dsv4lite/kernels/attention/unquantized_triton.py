"""Kernels of ``paged_attention`` for rows of float32 or bfloat16 in pages, of any even width.

    attend    one token x a block of heads x one of ``splits`` shares of its rows
    merge     one token and head: adds the shares, in order; not launched for a single share

Rows are found and counted as packed ones are (``triton.py``); share s takes pieces s, s + splits, … Products of float32
are three products of TF32; the tensor cores cut their sums, which costs a few of float32's last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention.triton import counts_of, locate
from dsv4lite.kernels.dispatch import capability_of, on_gpu
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import PlainRow, RowStore
from dsv4lite.kernels.rows.packed import LOG2_E
from dsv4lite.kernels.rows.triton import rounded

FEW_SPLITS = 8  # from here on blocks of few heads: more programs
_LARGE = (90, 100, 103)  # chips with more than 200 KB of shared memory for a program
_MERGED = 8  # shares read at a time
_ROW_BYTES = 1024  # the widest for which the larger tiles leave room


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one program attends.

    Attributes:
        heads: Block of heads, at least the 16 rows of a tensor core's operand.
        rows: Piece.
    """

    heads: int
    rows: int
    num_warps: int
    num_stages: int


def tile_for(heads: int, row_bytes: int, splits: int, capability: int) -> Tile:
    """Return the tile, which follows from the layer and ``splits`` alone on one kind of chip."""
    if row_bytes > _ROW_BYTES:
        large = capability in _LARGE
        return Tile(heads=16, rows=32 if large else 16, num_warps=4, num_stages=2 if large else 1)
    if heads >= 64 and splits < FEW_SPLITS and capability == 90:
        return Tile(heads=64, rows=64, num_warps=8, num_stages=2)
    return Tile(heads=16, rows=32, num_warps=4, num_stages=2)


@triton.jit
def _rotated_back(o, cos, sin, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr):
    """Turn the last ROPE of WIDTH channels of results [H, PADDED] by the token's angles."""
    # Reference: rope(o, cos, sin, inverse=True)
    pair = tl.arange(0, PADDED // 2) - (WIDTH - ROPE) // 2
    turned = (pair >= 0) & (pair < ROPE // 2)
    c = tl.load(cos + pair, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=turned, other=0.0)[None, :]
    a, b = tl.split(tl.reshape(o, (HEADS, PADDED // 2, 2)))
    turned = turned[None, :]
    return tl.reshape(tl.join(tl.where(turned, a * c + b * s, a), tl.where(turned, b * c - a * s, b)), (HEADS, PADDED))


@triton.jit(do_not_specialize=["grow_columns", "window_columns"])
def _attend_kernel(
    q, fresh, window, entries, selected, positions, sequences, firsts, first_rows, grow, window_pages, window_firsts,
    sink, cos, sin, out, parts, stats, grow_columns, window_columns, scale,
    H: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr,
    WINDOW: tl.constexpr, WINDOW_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    BYTES: tl.constexpr = WIDTH * (4 if WIDE else 2)
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    position = tl.load(positions + token)
    sequence = tl.load(sequences + token).to(tl.int64)
    counts = counts_of(position, RATIO, TOP_K, WINDOW, ROWS, ENTRY_ROWS > 0)
    pieces = counts[4]
    if SPLITS > 1:  # noqa: SIM102  decided when compiled; the other when run
        if split >= pieces:
            return
    stores = (fresh, window, entries)
    tables = (selected + token * TOP_K, grow + sequence * grow_columns, window_pages + sequence * window_columns)
    here = (position, tl.load(firsts + sequence), tl.load(first_rows + sequence), tl.load(window_firsts + sequence))

    column = tl.arange(0, PADDED)
    inside = (head < H)[:, None] & (column < WIDTH)[None, :]
    at = (token * H + head[:, None]) * WIDTH + column[None, :]
    queries = tl.load(q + at, mask=inside, other=0.0)
    if not GPU:  # the interpreter knows no products of bfloat16
        queries = queries.to(tl.float32)
    acc = tl.zeros((HEADS, PADDED), tl.float32)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for piece in tl.range(split, pieces, SPLITS, num_stages=STAGES):
        data, _scales, live = locate(
            piece, stores, tables, here, counts, BYTES, WINDOW_ROWS * BYTES, WINDOW_ROWS, ENTRY_ROWS * BYTES, ENTRY_ROWS, BYTES,
            ROWS, TOP_K > 0,
        )  # fmt: skip
        # Reference: RowFormat.unpack
        row = data.to(tl.pointer_type(q.dtype.element_ty))
        keys = tl.load(row[:, None] + column[None, :], mask=live[:, None] & (column < WIDTH)[None, :], other=0.0)
        if not GPU:
            keys = keys.to(tl.float32)
        # Reference: sparse_attention, one block; exponentials of two instead of e.
        logits = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * scale
        logits = tl.where(live[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shrink = tl.exp2(peak - new_peak)
        p = tl.exp2(logits - new_peak[:, None])
        total = total * shrink + tl.sum(p, 1)
        p = rounded(p, WIDE, GPU)
        acc = tl.dot(p.to(keys.dtype), keys, acc * shrink[:, None], input_precision="tf32x3")
        peak = new_peak

    if SPLITS > 1:
        place = split * (tl.num_programs(0) // BLOCKS).to(tl.int64) * H
        tl.store(parts + place * WIDTH + at, acc, mask=inside)
        stat = stats + (place + token * H + head) * 2
        tl.store(stat, peak, mask=head < H)
        tl.store(stat + 1, total, mask=head < H)
    else:
        # Padding has no rows: its peak is -inf, this sum infinite, its result 0.
        total += tl.exp2(tl.load(sink + head, mask=head < H, other=0.0) * 1.4426950408889634 - peak)
        o = rounded(acc / total[:, None], WIDE, GPU)
        turns = token * (ROPE // 2)
        o = rounded(_rotated_back(o, cos + turns, sin + turns, HEADS, WIDTH, PADDED, ROPE), WIDE, GPU)
        tl.store(out + at, o.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge_kernel(
    parts, stats, positions, sink, cos, sin, out,
    H: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr,
    WINDOW: tl.constexpr, ENTRIES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = out.dtype.element_ty == tl.float32
    at = tl.program_id(0).to(tl.int64)  # token and head
    token = at // H
    stride = tl.num_programs(0).to(tl.int64)
    position = tl.load(positions + token)
    _rows, _entries, _listed, _window, pieces = counts_of(position, RATIO, TOP_K, WINDOW, ROWS, ENTRIES)
    used = tl.minimum(pieces, SPLITS)
    every = tl.arange(0, SPLITS_PADDED)
    peak = tl.max(tl.load(stats + (every * stride + at) * 2, mask=every < used, other=float("-inf")))
    total = tl.exp2(tl.load(sink + at % H) * 1.4426950408889634 - peak)
    acc = tl.zeros((PADDED,), tl.float32)
    column = tl.arange(0, PADDED)
    for begin in range(0, used, CHUNK):
        split = begin + tl.arange(0, CHUNK)
        live = split < used
        place = split * stride + at
        weight = tl.exp2(tl.load(stats + place * 2, mask=live, other=float("-inf")) - peak)
        total += tl.sum(tl.load(stats + place * 2 + 1, mask=live, other=0.0) * weight)
        inside = live[:, None] & (column < WIDTH)[None, :]
        acc += tl.sum(tl.load(parts + place[:, None] * WIDTH + column[None, :], mask=inside, other=0.0) * weight[:, None], 0)
    turns = token * (ROPE // 2)
    o = rounded(acc / total, WIDE, GPU)[None, :]
    o = rounded(_rotated_back(o, cos + turns, sin + turns, 1, WIDTH, PADDED, ROPE), WIDE, GPU)
    tl.store(out + at * WIDTH + column[None, :], o.to(out.dtype.element_ty), mask=(column < WIDTH)[None, :])


def plain_paged_attention_triton(
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
    (tokens, heads, channels), fmt = q_THC.shape, window.format
    assert isinstance(fmt, PlainRow) and fmt.dtype == q_THC.dtype and fmt.width == channels and channels % 2 == 0, fmt
    assert entries is None or (entries.format == fmt and ratio > 0), (fmt, ratio)
    assert cos.shape == sin.shape and len(cos) == tokens and cos.is_contiguous() and sin.is_contiguous(), cos.shape
    assert fresh_TB.shape == (tokens, fmt.data_bytes) and fresh_TB.is_contiguous(), fresh_TB.shape
    assert selected_TK is None or selected_TK.is_contiguous()
    q = q_THC.contiguous()
    out = torch.empty_like(q)
    if tokens == 0:
        return out
    tile = tile_for(heads, fmt.data_bytes, splits, capability_of(q.device))
    parts = stats = out
    if splits > 1:
        parts = torch.empty(splits, tokens, heads, channels, dtype=torch.float32, device=q.device)
        stats = torch.empty(splits, tokens, heads, 2, dtype=torch.float32, device=q.device)
    layer = {
        "H": heads, "WIDTH": channels, "PADDED": _padded(channels), "ROPE": 2 * cos.shape[1], "RATIO": max(ratio, 1),
        "TOP_K": 0 if selected_TK is None else selected_TK.shape[1], "WINDOW": window_size, "SPLITS": splits, "ROWS": tile.rows,
        "GPU": on_gpu(q.device),
    }  # fmt: skip
    _attend_kernel[(tokens * triton.cdiv(heads, tile.heads), splits)](
        q, fresh_TB, window.memory, window.memory if entries is None else entries.memory,
        paging.positions_T if selected_TK is None else selected_TK,
        paging.positions_T, paging.sequence_T, paging.first_S, paging.rows_S,
        paging.grow_SP, paging.window_SP, paging.window_first_S, sink_H, cos, sin, out, parts, stats,
        paging.grow_SP.stride(0), paging.window_SP.stride(0), scale * LOG2_E, **layer,
        WINDOW_ROWS=window.rows_per_page,
        ENTRY_ROWS=0 if entries is None else entries.rows_per_page,
        HEADS=tile.heads, STAGES=tile.num_stages, num_warps=tile.num_warps, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        _merge_kernel[(tokens * heads,)](
            parts, stats, paging.positions_T, sink_H, cos, sin, out, **layer,
            ENTRIES=entries is not None, SPLITS_PADDED=padded, CHUNK=min(_MERGED, padded),
            num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _padded(channels: int) -> int:
    """Return how many channels tiles have: a power of two that the tensor cores can multiply."""
    return max(16, 1 << (channels - 1).bit_length())
