"""Leaving and entering for few tokens: a program for each token and 32 channels, in float32 without tensor cores.

Nothing to wait for but memory; and the sum over experts is on the way. Sums of the projection differ in their last bits from those
of ``hc_triton.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import Variant
from dsv4lite.kernels.e4m3 import to_bf16
from dsv4lite.kernels.hc_triton import PARTS_OF_SUM, STREAMS, UNIT_CHANNELS, load4, store4, units_of, weigh
from dsv4lite.kernels.moe_few import ExpertSum


@triton.jit
def _written(
    y, chosen, shared, token, column, inside, WIDTH: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, GPU: tl.constexpr
):  # fmt: skip
    """Return what a sub-layer has put out, float32 [UNIT]: ``y``, or the sum of its ``TOP_K`` experts and the shared one."""
    if TOP_K:
        # Reference: sum_experts; what nobody has written is read, too, so that nothing waits for ``chosen``, and not used.
        total = tl.zeros(column.shape, tl.float32)
        for k in tl.static_range(TOP_K):
            pair = token * TOP_K + k
            found = tl.load(chosen + pair) < EXPERTS
            total += tl.where(found, tl.load(y + pair * WIDTH + column, mask=inside, other=0.0).to(tl.float32), 0.0)
        total += tl.load(shared + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        w = to_bf16(total, GPU).to(tl.float32)
    else:
        w = tl.load(y + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    return w


@triton.jit(do_not_specialize=["tokens"])
def _enter_few_kernel(
    streams,
    y,
    chosen,
    shared,
    post,
    comb,
    fn,
    out,
    sums,
    tokens,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    UNIT: tl.constexpr,
    LEAVE: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    GPU: tl.constexpr,
):
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    column = part * UNIT + tl.arange(0, UNIT)
    inside = column < WIDTH
    row = tl.arange(0, ROWS_TILE)
    wanted = (row < ROWS)[:, None] & inside[None, :]
    w0, w1, w2, w3 = load4(fn + row[:, None] * (4 * WIDTH) + column[None, :], WIDTH, wanted)
    x0, x1, x2, x3 = load4(streams + token * (4 * WIDTH) + column, WIDTH, inside)
    f0, f1, f2, f3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    if LEAVE:
        w = _written(y, chosen, shared, token, column, inside, WIDTH, TOP_K, EXPERTS, GPU)
        p0, p1, p2, p3 = load4(post + token * 4, 1, token < tokens)
        c00, c01, c02, c03 = load4(comb + token * 16, 1, token < tokens)
        c10, c11, c12, c13 = load4(comb + token * 16 + 4, 1, token < tokens)
        c20, c21, c22, c23 = load4(comb + token * 16 + 8, 1, token < tokens)
        c30, c31, c32, c33 = load4(comb + token * 16 + 12, 1, token < tokens)
        x0, x1, x2, x3 = (
            to_bf16(weigh(f0, f1, f2, f3, c00, c10, c20, c30, p0 * w), GPU),
            to_bf16(weigh(f0, f1, f2, f3, c01, c11, c21, c31, p1 * w), GPU),
            to_bf16(weigh(f0, f1, f2, f3, c02, c12, c22, c32, p2 * w), GPU),
            to_bf16(weigh(f0, f1, f2, f3, c03, c13, c23, c33, p3 * w), GPU),
        )
        store4(out + token * (4 * WIDTH) + column, WIDTH, x0, x1, x2, x3, inside)
        f0, f1, f2, f3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    # Reference: z = streams_TND.flatten(1).float(); matmul_rows(z, fn), z.square().sum(-1)
    product = weigh(f0[None, :], f1[None, :], f2[None, :], f3[None, :], w0, w1, w2, w3, tl.zeros((ROWS_TILE, UNIT), tl.float32))
    squares = weigh(f0, f1, f2, f3, f0, f1, f2, f3, tl.zeros((UNIT,), tl.float32))
    sums += (part.to(tl.int64) * tokens + token) * (ROWS + 1)
    tl.store(sums + row, tl.sum(product, 1), mask=row < ROWS)
    tl.store(sums + ROWS, tl.sum(squares, 0))


def enter_few_triton(
    streams_TND: Tensor, pending: tuple[Tensor | ExpertSum, Tensor, Tensor] | None, fn: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch ``hc_leave_enter``; ``pending`` is a sub-layer's output, ``post`` and ``comb``."""
    tokens, streams, width = streams_TND.shape
    assert streams == STREAMS and streams_TND.dtype == torch.bfloat16 and streams_TND.is_contiguous(), streams_TND.shape
    rows = fn.shape[0]
    assert fn.dtype == torch.float32 and fn.is_contiguous() and fn.shape[1] == STREAMS * width, fn.shape
    output, post, comb = pending or (streams_TND,) * 3
    y, chosen, shared, top_k, experts = streams_TND, streams_TND, streams_TND, 0, 0
    if isinstance(output, ExpertSum):
        assert output.shared_TD is not None, "this rank has a part of the sum"
        chosen, y, shared, experts = output.chosen_TK, output.outputs_TKD, output.shared_TD, output.experts
        top_k = chosen.shape[1]
        assert y.shape == (tokens, top_k, width) and chosen.is_contiguous() and shared.is_contiguous(), y.shape
    elif pending is not None:
        y = output
    assert y.dtype == shared.dtype == torch.bfloat16 and y.is_contiguous() and post.is_contiguous() and comb.is_contiguous()
    programs = PARTS_OF_SUM * units_of(width)
    out = streams_TND if pending is None else torch.empty_like(streams_TND)
    sums = torch.empty(programs, tokens, rows + 1, dtype=torch.float32, device=streams_TND.device)
    if tokens:
        _enter_few_kernel[(programs, tokens)](
            streams_TND,
            y,
            chosen,
            shared,
            post,
            comb,
            fn,
            out,
            sums,
            tokens,
            WIDTH=width,
            ROWS=rows,
            ROWS_TILE=triton.next_power_of_2(rows),
            UNIT=UNIT_CHANNELS,
            LEAVE=pending is not None,
            TOP_K=top_k,
            EXPERTS=experts,
            GPU=streams_TND.is_cuda,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out, sums


def variants() -> list[Variant]:
    """Return every launch, for compilation ahead of time: entering alone, after attention, after experts."""
    return [
        Variant(
            kernel=_enter_few_kernel,
            signature={
                **dict.fromkeys(("streams", "y", "shared", "out"), "*bf16"),
                **dict.fromkeys(("post", "comb"), "*fp32" if leave else "*bf16"),
                **dict.fromkeys(("fn", "sums"), "*fp32"),
                "chosen": "*i64" if top_k else "*bf16",
                "tokens": "i32",
            },
            constants={
                "WIDTH": width,
                "ROWS": 24,
                "ROWS_TILE": 32,
                "UNIT": UNIT_CHANNELS,
                "LEAVE": leave,
                "TOP_K": top_k,
                "EXPERTS": 256 if top_k else 0,
                "GPU": True,
            },
        )
        for width in (4096, 7168)
        for leave, top_k in ((False, 0), (True, 0), (True, 6))
    ]
