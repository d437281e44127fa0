"""Adds up the shares of a token's rows that programs have attended to by themselves: one program for a token and head, in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention.inputs import PackedInputs
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows.packed import bf16, rotated_back

LOW = tl.constexpr(-1e30)  # the peak of no rows: finite, so that the difference of two is a number
_WARPS = 4
_CHUNK = 8  # shares read at a time


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
    H: tl.constexpr, NOPE: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr, ENTRIES: tl.constexpr,
    FILLS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    C: tl.constexpr = NOPE + 64
    at = tl.program_id(0).to(tl.int64)  # token and head
    token = at // H
    stride = tl.num_programs(0).to(tl.int64)
    position = tl.load(positions + token)
    entry_rows, _listed = entries_of(position, RATIO, TOP_K, ENTRIES)
    window_rows = tl.minimum(position + 1, WINDOW) if FILLS else WINDOW
    used = tl.minimum((window_rows + ROWS - 1) // ROWS + (entry_rows + ROWS - 1) // ROWS, SPLITS)
    log_sink = tl.load(sink + at % H) * 1.4426950408889634
    column = tl.arange(0, C)[None, :]
    few = tl.arange(0, CHUNK)
    share = tl.load(parts + (few * stride + at)[:, None] * C + column, mask=(few < used)[:, None], other=0.0)
    every = tl.arange(0, PADDED)
    stat = stats + (every * stride + at) * 2
    peaks = tl.load(stat, mask=every < used, other=LOW)
    totals = tl.load(stat + 1, mask=every < used, other=0.0)
    peak = tl.max(peaks)
    # Padding has no rows: its peak is low, this sum infinite, its result 0.
    total = tl.exp2(log_sink - peak) + tl.sum(totals * tl.exp2(peaks - peak))
    weight = tl.exp2(tl.load(stats + (few * stride + at) * 2, mask=few < used, other=LOW) - peak)
    acc = tl.sum(share * weight[:, None], 0)
    for begin in tl.range(CHUNK, used, CHUNK, num_stages=1):
        place = (begin + few) * stride + at
        live = begin + few < used
        weight = tl.exp2(tl.load(stats + place * 2, mask=live, other=LOW) - peak)
        share = tl.load(parts + place[:, None] * C + column, mask=live[:, None], other=0.0)
        acc += tl.sum(share * weight[:, None], 0)
    o = rotated_back(bf16(acc / total, GPU)[None, :], cos + token * 32, sin + token * 32, 1, C)
    let_successor_in()
    tl.store(out + at * C + column, bf16(o, GPU))


def merged(
    inputs: PackedInputs, parts: Tensor, stats: Tensor, sink_H: Tensor, angles: tuple[Tensor, Tensor], rows: int, *, fills: bool
) -> Tensor:
    """Return the result of attention.

    Args:
        inputs: Of attention, split.
        parts, stats: From ``inputs.shares``, filled.
        sink_H: float32 logit that only joins the denominator.
        angles: cos and sin of the tokens, by which results turn back.
        rows: Of a piece; share s has pieces s, s + splits, …
        fills: A window that is not full yet has fewer pieces, not empty ones.
    """
    q = inputs.q_THC
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _merge_kernel[(q.shape[0] * q.shape[1],)](
        parts, stats, inputs.paging.positions_T, sink_H, *angles, out, **inputs.layer(rows),
        **_shares(inputs.splits, inputs.entries is not None, fills), num_warps=_WARPS, num_stages=1, enable_fp_fusion=True,
        launch_pdl=dependent_launch(q.device),
    )  # fmt: skip
    return out


def _shares(splits: int, entries: bool, fills: bool) -> dict[str, int]:
    padded = triton.next_power_of_2(splits)
    return {"ENTRIES": entries, "FILLS": fills, "PADDED": padded, "CHUNK": min(_CHUNK, padded)}
