"""Kernels of ``hc_enter`` for any number of streams in float32 or bfloat16.

    expand     writes a sub-layer's output into the streams, and the sum of squares of each token
    collapse   coefficients of the token, its weighted sum of the streams, and the norm

One program takes one token, so a token's bits do not depend on the batch. Between the two, ``matmul_rows`` projects the streams.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import power_of_2
from dsv4lite.kernels.gemm import matmul_rows
from dsv4lite.kernels.hc import HcEntered, HcInputs, HcMix
from dsv4lite.kernels.hc.prefill_triton import Results, sigmoid
from dsv4lite.kernels.quantize import FP8_GROUP, quantize_fp8
from dsv4lite.kernels.rows.triton import inverse_root, rounded

_BLOCK = 1024  # channels per iteration


@triton.jit
def _expand_kernel(
    streams, y, post, comb, out, squares,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EXPAND: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = out.dtype.element_ty == tl.float32
    token = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < WIDTH
        for k in tl.static_range(STREAMS):
            here = (token * STREAMS + k) * WIDTH + column
            if EXPAND:
                # Reference: hc_expand
                added = tl.load(y + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
                value = added * tl.load(post + token * STREAMS + k)
                for j in tl.static_range(STREAMS):
                    weight = tl.load(comb + (token * STREAMS + j) * STREAMS + k)
                    x = tl.load(streams + (token * STREAMS + j) * WIDTH + column, mask=inside, other=0.0)
                    value += x.to(tl.float32) * weight
                value = rounded(value, WIDE)
                tl.store(out + here, value.to(out.dtype.element_ty), mask=inside)
            else:
                value = tl.load(streams + here, mask=inside, other=0.0).to(tl.float32)
            total += value * value
    # Reference: z.square().sum(-1)
    tl.store(squares + token, tl.sum(total))


@triton.jit
def _mix(sums, base, scale, post, comb, factor, eps, STREAMS: tl.constexpr, TILE: tl.constexpr, ITERS: tl.constexpr):
    """Store ``post`` and ``comb`` of a token."""
    # Reference: hc_split
    j = tl.arange(0, TILE)
    here = j < STREAMS
    m = tl.load(sums + STREAMS + j, mask=here, other=0.0) * factor
    written = 2 * sigmoid(m * tl.load(scale + 1) + tl.load(base + STREAMS + j, mask=here, other=0.0))
    tl.store(post + j, written, mask=here)
    at = j[:, None] * STREAMS + j[None, :]
    both = here[:, None] & here[None, :]
    m = tl.load(sums + 2 * STREAMS + at, mask=both, other=0.0) * factor
    m = m * tl.load(scale + 2) + tl.load(base + 2 * STREAMS + at, mask=both, other=0.0)
    e = tl.where(both, tl.exp(m - tl.max(tl.where(both, m, float("-inf")), 1)[:, None]), 0.0)
    a = tl.where(both, e / tl.where(here, tl.sum(e, 1), 1.0)[:, None] + eps, 0.0)
    # Reference: sinkhorn; padding stays 1
    row = tl.full((TILE,), 1.0, tl.float32)
    col = tl.where(here, tl.sum(a, 0) + eps, 1.0)
    for _ in range(ITERS - 1):
        row = tl.where(here, eps * row + tl.sum(a / col[None, :], 1), 1.0)
        col = tl.where(here, eps * col + tl.sum(a / row[:, None], 0), 1.0)
    tl.store(comb + at, a / (row[:, None] * col[None, :]), mask=both)


@triton.jit
def _collapse_kernel(
    streams, sums, base, scale, norm_weight, x, post, comb, eps, norm_eps,
    STREAMS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, ITERS: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = x.dtype.element_ty == tl.float32
    token = tl.program_id(0).to(tl.int64)
    sums += token * (ROWS + 1)
    # Reference: hc_normalise
    factor = inverse_root(tl.load(sums + ROWS) / (STREAMS * WIDTH) + norm_eps)
    if not HEAD:
        _mix(sums, base, scale, post + token * STREAMS, comb + token * (STREAMS * STREAMS), factor, eps, STREAMS, TILE, ITERS)
    # Reference: weighted_sum
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    total = tl.zeros((PADDED,), tl.float32)
    for j in tl.static_range(STREAMS):
        pre = sigmoid(tl.load(sums + j) * factor * tl.load(scale) + tl.load(base + j)) + eps
        stream = tl.load(streams + (token * STREAMS + j) * WIDTH + column, mask=inside, other=0.0)
        total += stream.to(tl.float32) * pre
    total = rounded(total, WIDE)
    if not HEAD:
        # Reference: rms_norm
        weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        total = rounded(total * inverse_root(tl.sum(total * total) / WIDTH + norm_eps) * weight, WIDE)
    tl.store(x + token * WIDTH + column, total.to(x.dtype.element_ty), mask=inside)


def expand_project_triton(
    streams_TND: Tensor, pending: tuple[Tensor, HcMix] | None, fn: Tensor | None, row_tile: int | None
) -> tuple[Tensor, Tensor]:
    """Launch the first half of ``hc_enter``; see ``prefill_triton.expand_project_triton``. The sums have one part."""
    tokens, streams, width = streams_TND.shape
    y, (post, comb) = pending or (streams_TND, (streams_TND,) * 2)
    assert streams_TND.is_contiguous() and y.is_contiguous() and post.is_contiguous() and comb.is_contiguous()
    out = streams_TND if pending is None else torch.empty_like(streams_TND)
    rows = 0 if fn is None else len(fn)
    sums = torch.empty(1, tokens, rows + 1, dtype=torch.float32, device=streams_TND.device)
    squares = torch.empty(tokens, dtype=torch.float32, device=streams_TND.device)
    if tokens:
        _expand_kernel[(tokens,)](
            streams_TND, y, post, comb, out, squares,
            STREAMS=streams, WIDTH=width, BLOCK=min(_BLOCK, power_of_2(width)), EXPAND=pending is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if fn is not None:
        sums[0, :, :rows] = matmul_rows(out.flatten(1).float(), fn, row_tile)
        sums[0, :, rows] = squares
    return out, sums


def collapse_triton(streams_TND: Tensor, sums: Tensor, given: HcInputs) -> HcEntered:
    """Launch the second half of ``hc_enter``; see ``prefill_triton.collapse_triton``."""
    (tokens, streams, width), rows, head = streams_TND.shape, len(given.weights.base), given.is_head
    assert sums.shape == (1, tokens, rows + 1) and sums.is_contiguous() and streams_TND.is_contiguous(), sums.shape
    assert rows == (streams if head else streams * (streams + 2)), (rows, streams)
    assert head or given.norm_weight is not None
    results = Results.allocate(given._replace(quantize=False))
    x = results.x
    if tokens:
        _collapse_kernel[(tokens,)](
            streams_TND, sums, given.weights.base, given.weights.scale, x if head else given.norm_weight, x,
            results.post, results.comb, given.settings.eps, given.settings.norm_eps,
            STREAMS=streams, TILE=power_of_2(streams), WIDTH=width, PADDED=power_of_2(width), ROWS=rows,
            ITERS=given.settings.iters, HEAD=head, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    rounded = quantize_fp8(x, FP8_GROUP) if given.quantize else None
    return results.entered(streams_TND, given)._replace(rounded=rounded)
