"""Kernels of ``wide_experts.py``: four launches, the same whatever the routing, without a word to the host.

    group     rows of each expert -> blocks of ``rows`` rows, and the expert of each block
    gate_up   one block x 64 columns of ``u``, from twice as many rows of weights
    down      one block x 64 columns of the result, one row per token and expert
    combine   sum over k, and the shared expert

Weights are the left operand: 64 of their rows fill the tensor cores whatever the number of tokens, and blocks of every size run the
same additions in the same order. Products of float32 are three products of TF32; the tensor cores cut their sums, which costs a few
of float32's last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import on_gpu
from dsv4lite.kernels.experts.grouping_triton import count_pairs, list_pairs, most_blocks, own_blocks
from dsv4lite.kernels.rows.triton import only_if, rounded

OUTS = 64
_INPUT_BYTES = 128  # of a row, multiplied at a time
_SUM_BLOCK = 1024
_SCAN_CHUNK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How one program multiplies.

    Attributes:
        rows: Tokens of one block.
        num_stages: Of the weight stream.
    """

    rows: int
    num_stages: int


# By the most pairs of token and expert there are for each expert.
BLOCKS: tuple[tuple[int | None, Block], ...] = (
    (16, Block(rows=16, num_stages=4)),
    (None, Block(rows=64, num_stages=3)),
)


def block_for(pairs: int, experts: int) -> Block:
    """Return how to multiply, from the numbers of pairs and of experts alone."""
    return next(block for most, block in BLOCKS if most is None or pairs <= most * experts)


@triton.jit(do_not_specialize=["pairs"])
def _group_kernel(
    chosen, order, owner, blocks, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    # One program per expert. Reference: order = chosen_TK.flatten().argsort(stable=True)
    expert = tl.program_id(0)
    first, mine = own_blocks(count_pairs(chosen, pairs, EXPERTS, BINS, CHUNK), expert, blocks, BINS, ROWS)
    if mine > 0:
        list_pairs(chosen, order, first, mine, expert, pairs, ROWS, CHUNK)
        for block in range(mine):
            tl.store(owner + first + block, expert)


@triton.jit
def _times(w, x, total, GPU: tl.constexpr):
    """Return ``w @ x.T + total``, float32."""
    if not GPU:  # the interpreter multiplies bfloat16 as integers
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x), total, input_precision="tf32x3")


@triton.jit(do_not_specialize=["pairs"])
def _gate_up_kernel(
    x, w13, order, owner, blocks, weight, u, pairs, limit,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    PROGRAMS: tl.constexpr = (WIDTH + OUTS - 1) // OUTS
    block = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    column = tl.program_id(0) % PROGRAMS * OUTS + tl.arange(0, OUTS)
    if block >= tl.load(blocks):
        return
    expert = tl.load(owner + block).to(tl.int64)
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
    valid = pair < pairs
    pair = tl.where(valid, pair, 0).to(tl.int64)
    channel = tl.arange(0, INPUTS)
    inputs = x + (pair // TOP_K)[:, None] * HIDDEN + channel[None, :]
    rows = w13 + (expert * (2 * WIDTH) + tl.minimum(column, WIDTH - 1))[:, None] * HIDDEN + channel[None, :]
    gate = tl.zeros((OUTS, ROWS), tl.float32)
    up = tl.zeros((OUTS, ROWS), tl.float32)
    for k in tl.range(0, HIDDEN, INPUTS, num_stages=STAGES):
        # Reference: h_TI = matmul_rows(x, w13[expert], row_tile).to(dtype)
        inside = (k + channel < HIDDEN)[None, :]
        a = tl.load(inputs + k, mask=inside & valid[:, None], other=0.0)
        gate = _times(tl.load(rows + k, mask=inside, other=0.0), a, gate, GPU)
        up = _times(tl.load(rows + WIDTH * HIDDEN + k, mask=inside, other=0.0), a, up, GPU)
    # Reference: u_TI = (swiglu(h_TI[:, :width], h_TI[:, width:], limit) * weight_T1).to(dtype)
    WIDE: tl.constexpr = x.dtype.element_ty == tl.float32
    gate = tl.minimum(rounded(gate, WIDE, GPU), limit)
    up = tl.minimum(tl.maximum(rounded(up, WIDE, GPU), -limit), limit)
    mix = tl.load(weight + pair, mask=valid, other=0.0)
    y = rounded(gate / (1.0 + tl.exp(-gate)) * up * mix[None, :], WIDE, GPU).to(x.dtype.element_ty)
    tl.store(u + pair[None, :] * WIDTH + column[:, None], y, mask=valid[None, :] & (column < WIDTH)[:, None])


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    u, w2, order, owner, blocks, y, pairs,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GPU: tl.constexpr,
):  # fmt: skip
    PROGRAMS: tl.constexpr = (HIDDEN + OUTS - 1) // OUTS
    block = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    column = tl.program_id(0) % PROGRAMS * OUTS + tl.arange(0, OUTS)
    if block >= tl.load(blocks):
        return
    expert = tl.load(owner + block).to(tl.int64)
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
    valid = pair < pairs
    pair = tl.where(valid, pair, 0).to(tl.int64)
    channel = tl.arange(0, INPUTS)
    inputs = u + pair[:, None] * WIDTH + channel[None, :]
    rows = w2 + (expert * HIDDEN + tl.minimum(column, HIDDEN - 1))[:, None] * WIDTH + channel[None, :]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    for k in tl.range(0, WIDTH, INPUTS, num_stages=STAGES):
        # Reference: matmul_rows(u_TI, w2[expert], row_tile).to(dtype); float32 if it is a part
        inside = (k + channel < WIDTH)[None, :]
        a = tl.load(inputs + k, mask=inside & valid[:, None], other=0.0)
        total = _times(tl.load(rows + k, mask=inside, other=0.0), a, total, GPU)
    total = rounded(total, y.dtype.element_ty == tl.float32, GPU).to(y.dtype.element_ty)
    tl.store(y + pair[None, :] * HIDDEN + column[:, None], total, mask=valid[None, :] & (column < HIDDEN)[:, None])


@triton.jit
def _combine_kernel(
    y,
    chosen,
    shared,
    out,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    GPU: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        here = only_if(tl.load(chosen + token * TOP_K + k) < EXPERTS, inside)
        total += tl.load(y + (token * TOP_K + k) * HIDDEN + column, mask=here, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    total = rounded(total, out.dtype.element_ty == tl.float32, GPU).to(out.dtype.element_ty)
    tl.store(out + token * HIDDEN + column, total, mask=inside)


def wide_experts_forward_triton(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    shared_TD: Tensor | None = None,
    *,
    partial: bool = False,
) -> Tensor:
    """See ``wide_experts.wide_experts_forward``."""
    (tokens, top_k), (experts, hidden, width) = chosen_TK.shape, w2.shape
    assert w13.shape == (experts, 2 * width, hidden) and w13.is_contiguous() and w2.is_contiguous(), (w13.shape, w2.shape)
    assert x_TD.shape == (tokens, hidden) and x_TD.is_contiguous()
    assert x_TD.dtype == w13.dtype == w2.dtype and x_TD.dtype in (torch.bfloat16, torch.float32), x_TD.dtype
    if shared_TD is not None:
        assert shared_TD.shape == x_TD.shape and shared_TD.dtype == x_TD.dtype and shared_TD.is_contiguous()
    assert chosen_TK.is_contiguous() and weight_TK.is_contiguous() and weight_TK.dtype == torch.float32
    out = torch.empty_like(x_TD, dtype=torch.float32 if shared_TD is None else x_TD.dtype)
    if tokens == 0:
        return out
    pairs, device = tokens * top_k, x_TD.device
    block = block_for(pairs, experts)
    count = most_blocks(pairs, experts, block.rows)
    order = torch.empty(count * block.rows, dtype=torch.int32, device=device)
    owner, blocks = torch.empty(count, dtype=torch.int32, device=device), torch.empty(1, dtype=torch.int32, device=device)
    _group_kernel[(experts,)](
        chosen_TK, order, owner, blocks, pairs,
        EXPERTS=experts, BINS=_bins(experts), ROWS=block.rows, CHUNK=_SCAN_CHUNK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    u = torch.empty(pairs, width, dtype=x_TD.dtype, device=device)
    y = torch.empty(pairs, hidden, dtype=torch.float32 if partial else x_TD.dtype, device=device)
    sizes = {"HIDDEN": hidden, "WIDTH": width, **_tile(block, x_TD.dtype), "GPU": on_gpu(x_TD.device)}
    launch = {"num_warps": 4, "num_stages": block.num_stages, "enable_fp_fusion": True}
    _gate_up_kernel[(count * triton.cdiv(width, OUTS),)](
        x_TD, w13, order, owner, blocks, weight_TK, u, pairs, limit, TOP_K=top_k, **sizes, **launch
    )
    _down_kernel[(count * triton.cdiv(hidden, OUTS),)](u, w2, order, owner, blocks, y, pairs, **sizes, **launch)
    del u
    _combine_kernel[(tokens, triton.cdiv(hidden, _SUM_BLOCK))](
        y, chosen_TK, out if shared_TD is None else shared_TD, out,
        EXPERTS=experts, HIDDEN=hidden, TOP_K=top_k, SHARED=shared_TD is not None, BLOCK=_SUM_BLOCK, GPU=on_gpu(x_TD.device),
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _bins(experts: int) -> int:
    """Return how many bins count the experts, and those that are none."""
    bins: int = triton.next_power_of_2(experts + 2)
    return bins


def _tile(block: Block, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "ROWS": block.rows,
        "OUTS": OUTS,
        "INPUTS": _INPUT_BYTES // dtype.itemsize,
        "STAGES": block.num_stages,
    }
