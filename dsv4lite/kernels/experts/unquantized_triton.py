"""Kernel of both products of unquantized experts. Grouping and the sum over experts are those of ``triton.py``.

    gate, up  one program: one block x 64 columns of ``u``, from 128 rows of weights
    down      one program: one block x 64 columns of the result, one row per token and expert

Weights are the left operand: 64 of their rows fill the tensor cores whatever the number of tokens. Blocks of every size run the
same additions in the same order. A float32 product is three TF32 products; the tensor cores truncate their sums, which costs a few
of float32's last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import by_most, ceil_div, compiled
from dsv4lite.kernels.experts import ExpertInputs
from dsv4lite.kernels.experts.grouping_triton import BlockConfig, BlockTable, Groups, group_triton
from dsv4lite.kernels.rows.triton import rounded
from dsv4lite.kernels.swiglu.triton import swiglu_of

OUTS = tl.constexpr(64)  # columns of one program
_INPUT_BYTES = 128  # of a row of inputs, per iteration

# Limits are pairs per expert.
UNQUANTIZED_BLOCKS: BlockTable = (
    (16, BlockConfig(rows=16, tiles=1, num_warps=4, num_stages=4)),
    (None, BlockConfig(rows=64, tiles=1, num_warps=4, num_stages=3)),
)


@triton.jit
def times(w, x, total):
    """Return ``w @ x.T + total``, float32."""
    if not compiled():  # the interpreter multiplies bfloat16 as integers
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x), total, input_precision="tf32x3")


@triton.jit(do_not_specialize=["pairs"])
def _unquantized_kernel(
    x, w, block_pairs, block_expert, num_blocks, weight, y, pairs, limit,
    K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
    SWIGLU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply rows of ``x`` by their experts' matrices [N, K]; if SWIGLU by gate and up, and activate."""
    PROGRAMS: tl.constexpr = (N + OUTS - 1) // OUTS
    block = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    column = tl.program_id(0) % PROGRAMS * OUTS + tl.arange(0, OUTS)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    pair = tl.load(block_pairs + block * ROWS + tl.arange(0, ROWS))
    valid = pair < pairs
    pair = tl.where(valid, pair, 0).to(tl.int64)
    channel = tl.arange(0, INPUTS)
    inputs = x + (pair // TOP_K)[:, None] * K + channel[None, :]
    rows = w + (expert * (2 * N if SWIGLU else N) + tl.minimum(column, N - 1))[:, None] * K + channel[None, :]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    if SWIGLU:
        up = tl.zeros((OUTS, ROWS), tl.float32)
    for k in tl.range(0, K, INPUTS, num_stages=STAGES):
        # Reference: matmul_rows(x_MK, w[expert], row_tile).to(dtype); float32 if ``partial``
        inside = (k + channel < K)[None, :]
        a = tl.load(inputs + k, mask=inside & valid[:, None], other=0.0)
        total = times(tl.load(rows + k, mask=inside, other=0.0), a, total)
        if SWIGLU:
            up = times(tl.load(rows + N * K + k, mask=inside, other=0.0), a, up)
    if SWIGLU:
        # Reference: u_TI = (swiglu(h_TI[:, :width], h_TI[:, width:], limit) * weight_T1).to(dtype)
        WIDE: tl.constexpr = x.dtype.element_ty == tl.float32
        u = swiglu_of(rounded(total, WIDE), rounded(up, WIDE), limit)
        total = u * tl.load(weight + pair, mask=valid, other=0.0)[None, :]
    total = rounded(total, y.dtype.element_ty == tl.float32).to(y.dtype.element_ty)
    tl.store(y + pair[None, :] * N + column[:, None], total, mask=valid[None, :] & (column < N)[:, None])


def unquantized_outputs_triton(given: ExpertInputs, *, block: BlockConfig | None = None) -> Tensor:
    """Launch ``experts_outputs`` of unquantized weights; ``block`` is for tests."""
    (tokens, top_k), (experts, hidden, width), x, w13, w2 = given.slots_TK.shape, given.sizes, given.x, given.w13, given.w2
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor) and w13.is_contiguous() and w2.is_contiguous()
    assert w13.shape == (experts, 2 * width, hidden) and x.shape == (tokens, hidden) and x.is_contiguous(), (w13.shape, x.shape)
    assert x.dtype == w13.dtype == w2.dtype and x.dtype in (torch.bfloat16, torch.float32), x.dtype
    assert given.slots_TK.is_contiguous() and given.weight_TK.is_contiguous() and given.weight_TK.dtype == torch.float32
    pairs, device = tokens * top_k, x.device
    y = torch.empty(tokens, top_k, hidden, dtype=given.dtype, device=device)
    if tokens == 0:
        return y
    block = block or by_most(UNQUANTIZED_BLOCKS, pairs / experts)
    groups = Groups.allocate(tokens, top_k, experts, (0, 0), block.rows, device, by_token=False)
    group_triton(given.slots_TK, None, experts, groups)
    u = torch.empty(pairs, width, dtype=x.dtype, device=device)
    work, most = (groups.block_pairs, groups.block_expert, groups.num_blocks), groups.max_blocks
    launch = {
        "ROWS": block.rows, "INPUTS": _INPUT_BYTES // x.dtype.itemsize,
        "STAGES": block.num_stages, "num_warps": block.num_warps, "num_stages": block.num_stages, "enable_fp_fusion": True,
    }  # fmt: skip
    _unquantized_kernel[(most * ceil_div(width, OUTS.value),)](
        x, w13, *work, given.weight_TK, u, pairs, given.limit, K=hidden, N=width, TOP_K=top_k, SWIGLU=True, **launch
    )
    _unquantized_kernel[(most * ceil_div(hidden, OUTS.value),)](
        u, w2, *work, given.weight_TK, y, pairs, given.limit, K=width, N=hidden, TOP_K=1, SWIGLU=False, **launch
    )
    return y
