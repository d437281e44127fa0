"""Kernel that merges KV splits, one program per token and head, in order; and helpers that the attention kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention import AttentionInputs
from dsv4lite.kernels.dispatch import power_of_2
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows.packed import narrowed, rotated_back

LOW = tl.constexpr(-1e30)  # peak if there are no rows: finite, so that a difference of two peaks is not NaN
_WARPS = 4
_CHUNK = 8  # splits read at a time


@triton.jit
def dot_of_halves(q0, q1, k0, k1, always, PRECISION: tl.constexpr):
    """Return the products of queries and rows [H, R], both given in halves of their channels; ``always`` is true."""
    # If the compiler sees that a product is an operand of another one, each group of four warps computes all of it. A branch hides
    # this, so that the groups divide the product among them.
    if always:
        logits = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        more = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    else:
        logits = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        more = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    return logits + more


@triton.jit
def softmax_step(logits, peak, total, AXIS: tl.constexpr):
    """Return the weights of a piece's rows, which are on AXIS, the factor of the sums so far, and the new peak and total."""
    # Reference: sparse_attention, one block; exponentials of two instead of e.
    new_peak = tl.maximum(peak, tl.max(logits, AXIS))
    shrink = tl.exp2(peak - new_peak)
    p = tl.exp2(logits - tl.expand_dims(new_peak, AXIS))
    return p, shrink, new_peak, total * shrink + tl.sum(p, AXIS)


@triton.jit
def added(
    acc0, acc1, peak, total, logits, k0, k1, rows, ROWS: tl.constexpr, SWAP: tl.constexpr, FLOAT32: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums with the first ``rows`` rows of a piece added."""
    inside = tl.arange(0, ROWS) < rows
    logits = tl.where(inside[:, None] if SWAP else inside[None, :], logits, float("-inf"))
    p, shrink, peak, total = softmax_step(logits, peak, total, 0 if SWAP else 1)
    p = narrowed(p, FLOAT32)
    if SWAP:
        acc0 = tl.dot(tl.trans(k0), p, acc0 * shrink[None, :], input_precision=PRECISION)
        acc1 = tl.dot(tl.trans(k1), p, acc1 * shrink[None, :], input_precision=PRECISION)
    else:
        acc0 = tl.dot(p, k0, acc0 * shrink[:, None], input_precision=PRECISION)
        acc1 = tl.dot(p, k1, acc1 * shrink[:, None], input_precision=PRECISION)
    return acc0, acc1, peak, total


@triton.jit
def entries_of(position, RATIO: tl.constexpr, TOP_K: tl.constexpr, ENTRIES: tl.constexpr):
    """Return how many entries a token attends to, and whether ``selected`` lists them."""
    rows = (position + 1) // RATIO if ENTRIES else 0
    listed = rows > TOP_K
    if TOP_K > 0:
        rows = tl.minimum(rows, TOP_K)
    return rows, listed


@triton.jit
def counts_of(position, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr):
    """Return the number of window rows and of entries of a token, whether entries are listed, window pieces, and all pieces."""
    window_rows = tl.minimum(position + 1, WINDOW)
    window_pieces = (window_rows + ROWS - 1) // ROWS
    entry_rows, listed = entries_of(position, RATIO, TOP_K, ENTRIES)
    return window_rows, entry_rows, listed, window_pieces, window_pieces + (entry_rows + ROWS - 1) // ROWS


@triton.jit
def _merge_kernel(
    parts, stats, positions, sink, cos, sin, out,
    H: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, FILLS: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    FLOAT32: tl.constexpr = out.dtype.element_ty == tl.float32
    at = tl.program_id(0).to(tl.int64)  # token and head
    token = at // H
    stride = tl.num_programs(0).to(tl.int64)
    position = tl.load(positions + token)
    entry_rows, _listed = entries_of(position, RATIO, TOP_K, ENTRIES)
    window_rows = tl.minimum(position + 1, WINDOW) if FILLS else WINDOW
    used = tl.minimum((window_rows + ROWS - 1) // ROWS + (entry_rows + ROWS - 1) // ROWS, SPLITS)
    log_sink = tl.load(sink + at % H) * 1.4426950408889634
    column = tl.arange(0, PADDED)[None, :]
    first = tl.arange(0, CHUNK)
    inside = (first < used)[:, None] & (column < WIDTH)
    part = tl.load(parts + (first * stride + at)[:, None] * WIDTH + column, mask=inside, other=0.0)
    every = tl.arange(0, SPLITS_PADDED)
    stat = stats + (every * stride + at) * 2
    peaks = tl.load(stat, mask=every < used, other=LOW)
    totals = tl.load(stat + 1, mask=every < used, other=0.0)
    peak = tl.max(peaks)
    # Padding has no rows: its peak is LOW, ``total`` is infinite and the result 0.
    total = tl.exp2(log_sink - peak) + tl.sum(totals * tl.exp2(peaks - peak))
    weight = tl.exp2(tl.load(stats + (first * stride + at) * 2, mask=first < used, other=LOW) - peak)
    acc = tl.sum(part * weight[:, None], 0)
    for begin in tl.range(CHUNK, used, CHUNK, num_stages=1):
        place = (begin + first) * stride + at
        live = begin + first < used
        weight = tl.exp2(tl.load(stats + place * 2, mask=live, other=LOW) - peak)
        part = tl.load(parts + place[:, None] * WIDTH + column, mask=live[:, None] & (column < WIDTH), other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    turns = token * (ROPE // 2)
    o = rotated_back(narrowed(acc / total, FLOAT32)[None, :], cos + turns, sin + turns, 1, PADDED, WIDTH - ROPE, ROPE)
    let_successor_in()
    tl.store(out + at * WIDTH + column, narrowed(o, FLOAT32), mask=column < WIDTH)


def merged(given: AttentionInputs, parts: Tensor, stats: Tensor, rows: int, *, fills: bool) -> Tensor:
    """Merge the splits and return the result of attention.

    Args:
        parts, stats: The splits' results, in tensors from ``given.allocate_splits``.
        rows: Rows of a piece; split s has pieces s, s + splits, …
        fills: A window that is not full has fewer pieces; otherwise some of its pieces are empty.
    """
    q, splits = given.q_THC, power_of_2(given.paging.splits)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _merge_kernel[(q.shape[0] * q.shape[1],)](
        parts,
        stats,
        given.paging.positions_T,
        given.sink_H,
        given.cos,
        given.sin,
        out,
        **given.layer(rows),
        SPLITS=given.paging.splits,
        ENTRIES=given.entries is not None,
        FILLS=fills,
        PADDED=given.padded_width,
        ROPE=2 * given.cos.shape[1],
        SPLITS_PADDED=splits,
        CHUNK=min(_CHUNK, splits),
        num_warps=_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(q.device),
    )
    return out
