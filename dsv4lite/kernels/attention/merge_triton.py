"""What the kernels of attention share: their arguments, and the sum over KV splits: one program for a token and head, in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention import AttentionInputs
from dsv4lite.kernels.dispatch import on_gpu
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows.packed import narrowed, rotated_back

LOW = tl.constexpr(-1e30)  # the peak of no rows: finite, so that the difference of two is a number
_WARPS = 4
_CHUNK = 8  # splits read at a time


@triton.jit
def entries_of(position, RATIO: tl.constexpr, TOP_K: tl.constexpr, ENTRIES: tl.constexpr):
    """Return how many entries a token attends to, and whether they are listed."""
    rows = (position + 1) // RATIO if ENTRIES else 0
    listed = rows > TOP_K
    if TOP_K > 0:
        rows = tl.minimum(rows, TOP_K)
    return rows, listed


@triton.jit
def _merge_kernel(
    parts, stats, positions, sink, cos, sin, out,
    H: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, GPU: tl.constexpr, ENTRIES: tl.constexpr, FILLS: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    WIDE: tl.constexpr = out.dtype.element_ty == tl.float32
    at = tl.program_id(0).to(tl.int64)  # token and head
    token = at // H
    stride = tl.num_programs(0).to(tl.int64)
    position = tl.load(positions + token)
    entry_rows, _listed = entries_of(position, RATIO, TOP_K, ENTRIES)
    window_rows = tl.minimum(position + 1, WINDOW) if FILLS else WINDOW
    used = tl.minimum((window_rows + ROWS - 1) // ROWS + (entry_rows + ROWS - 1) // ROWS, SPLITS)
    log_sink = tl.load(sink + at % H) * 1.4426950408889634
    column = tl.arange(0, PADDED)[None, :]
    few = tl.arange(0, CHUNK)
    inside = (few < used)[:, None] & (column < WIDTH)
    part = tl.load(parts + (few * stride + at)[:, None] * WIDTH + column, mask=inside, other=0.0)
    every = tl.arange(0, SPLITS_PADDED)
    stat = stats + (every * stride + at) * 2
    peaks = tl.load(stat, mask=every < used, other=LOW)
    totals = tl.load(stat + 1, mask=every < used, other=0.0)
    peak = tl.max(peaks)
    # Padding has no rows: its peak is low, this sum infinite, its result 0.
    total = tl.exp2(log_sink - peak) + tl.sum(totals * tl.exp2(peaks - peak))
    weight = tl.exp2(tl.load(stats + (few * stride + at) * 2, mask=few < used, other=LOW) - peak)
    acc = tl.sum(part * weight[:, None], 0)
    for begin in tl.range(CHUNK, used, CHUNK, num_stages=1):
        place = (begin + few) * stride + at
        live = begin + few < used
        weight = tl.exp2(tl.load(stats + place * 2, mask=live, other=LOW) - peak)
        part = tl.load(parts + place[:, None] * WIDTH + column, mask=live[:, None] & (column < WIDTH), other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    turns = token * (ROPE // 2)
    o = rotated_back(narrowed(acc / total, WIDE, GPU)[None, :], cos + turns, sin + turns, 1, PADDED, WIDTH - ROPE, ROPE)
    let_successor_in()
    tl.store(out + at * WIDTH + column, narrowed(o, WIDE, GPU), mask=column < WIDTH)


def room_for_splits(q_THC: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Return room for each split's sums, and for its peak and total, float32 [splits, T, H, C or 2]."""
    parts = torch.empty(splits, *q_THC.shape, dtype=torch.float32, device=q_THC.device)
    return parts, torch.empty(splits, *q_THC.shape[:2], 2, dtype=torch.float32, device=q_THC.device)


def tensors_of(given: AttentionInputs) -> tuple[Tensor, ...]:
    """Return queries, rows, selection and tables, as kernels take them."""
    paging = given.paging
    return (
        given.q_THC,
        given.fresh_TB,
        given.window.memory,
        (given.entries or given.window).memory,
        paging.positions_T if given.selected_TK is None else given.selected_TK,
        paging.positions_T,
        paging.sequence_T,
        paging.first_S,
        paging.rows_S,
        paging.grow_SP,
        paging.window_SP,
        paging.window_first_S,
    )


def layer_of(given: AttentionInputs, rows: int) -> dict[str, int]:
    """Return what is compiled in of the layer; a piece has so many ``rows``."""
    return {
        "H": given.q_THC.shape[1],
        "WIDTH": given.q_THC.shape[2],
        "RATIO": max(given.ratio, 1),
        "TOP_K": 0 if given.selected_TK is None else given.selected_TK.shape[1],
        "WINDOW": given.window_size,
        "SPLITS": given.splits,
        "ROWS": rows,
        "GPU": on_gpu(given.q_THC.device),
    }


def places_of(given: AttentionInputs) -> dict[str, int]:
    """Return what is compiled in of the places of rows."""
    return {
        "FRESH_ROW": given.fresh_TB.stride(0),
        "WINDOW_BYTES": given.window.memory.shape[1],
        "WINDOW_ROWS": given.window.rows_per_page,
        "ENTRY_BYTES": (given.entries or given.window).memory.shape[1],
        "ENTRY_ROWS": 0 if given.entries is None else given.entries.rows_per_page,
    }


def padded_width(channels: int) -> int:
    """Return how many channels tiles have: a power of two whose halves the tensor cores can multiply."""
    return max(32, triton.next_power_of_2(channels))


def merged(given: AttentionInputs, parts: Tensor, stats: Tensor, rows: int, *, fills: bool) -> Tensor:
    """Return the result of attention.

    Args:
        given: Inputs of attention.
        parts, stats: From ``room_for_splits``, written.
        rows: Of a piece; split s has pieces s, s + splits, …
        fills: A window that is not full yet has fewer pieces, not empty ones.
    """
    q, splits = given.q_THC, triton.next_power_of_2(given.splits)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _merge_kernel[(q.shape[0] * q.shape[1],)](
        parts,
        stats,
        given.paging.positions_T,
        given.sink_H,
        given.cos,
        given.sin,
        out,
        **layer_of(given, rows),
        ENTRIES=given.entries is not None,
        FILLS=fills,
        PADDED=padded_width(q.shape[2]),
        ROPE=2 * given.cos.shape[1],
        SPLITS_PADDED=splits,
        CHUNK=min(_CHUNK, splits),
        num_warps=_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(q.device),
    )
    return out
