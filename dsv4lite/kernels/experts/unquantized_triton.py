"""Kernels of unquantized experts. Grouping and the sum over experts are those of ``triton.py``.

    gate_up   one program: one block x 64 columns of ``u``, from 128 rows of weights
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

from dsv4lite.kernels.dispatch import by_most, ceil_div, on_gpu
from dsv4lite.kernels.experts import ExpertInputs
from dsv4lite.kernels.experts.grouping_triton import BlockConfig, BlockTable, Groups, group_triton
from dsv4lite.kernels.rows.triton import rounded

OUTS = 64
_INPUT_BYTES = 128  # of a row of inputs, per iteration

# Limits are pairs per expert.
UNQUANTIZED_BLOCKS: BlockTable = (
    (16, BlockConfig(rows=16, tiles=1, num_warps=4, num_stages=4)),
    (None, BlockConfig(rows=64, tiles=1, num_warps=4, num_stages=3)),
)


@triton.jit
def times(w, x, total, GPU: tl.constexpr):
    """Return ``w @ x.T + total``, float32."""
    if not GPU:  # the interpreter multiplies bfloat16 as integers
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x), total, input_precision="tf32x3")


@triton.jit(do_not_specialize=["pairs"])
def _gate_up_kernel(
    x, w13, block_pairs, block_expert, num_blocks, weight, u, pairs, limit,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    PROGRAMS: tl.constexpr = (WIDTH + OUTS - 1) // OUTS
    block = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    column = tl.program_id(0) % PROGRAMS * OUTS + tl.arange(0, OUTS)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    pair = tl.load(block_pairs + block * ROWS + tl.arange(0, ROWS))
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
        gate = times(tl.load(rows + k, mask=inside, other=0.0), a, gate, GPU)
        up = times(tl.load(rows + WIDTH * HIDDEN + k, mask=inside, other=0.0), a, up, GPU)
    # Reference: u_TI = (swiglu(h_TI[:, :width], h_TI[:, width:], limit) * weight_T1).to(dtype)
    WIDE: tl.constexpr = x.dtype.element_ty == tl.float32
    gate = tl.minimum(rounded(gate, WIDE, GPU), limit)
    up = tl.minimum(tl.maximum(rounded(up, WIDE, GPU), -limit), limit)
    mix = tl.load(weight + pair, mask=valid, other=0.0)
    y = rounded(gate / (1.0 + tl.exp(-gate)) * up * mix[None, :], WIDE, GPU).to(x.dtype.element_ty)
    tl.store(u + pair[None, :] * WIDTH + column[:, None], y, mask=valid[None, :] & (column < WIDTH)[:, None])


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    u, w2, block_pairs, block_expert, num_blocks, y, pairs,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GPU: tl.constexpr,
):  # fmt: skip
    PROGRAMS: tl.constexpr = (HIDDEN + OUTS - 1) // OUTS
    block = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    column = tl.program_id(0) % PROGRAMS * OUTS + tl.arange(0, OUTS)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    pair = tl.load(block_pairs + block * ROWS + tl.arange(0, ROWS))
    valid = pair < pairs
    pair = tl.where(valid, pair, 0).to(tl.int64)
    channel = tl.arange(0, INPUTS)
    inputs = u + pair[:, None] * WIDTH + channel[None, :]
    rows = w2 + (expert * HIDDEN + tl.minimum(column, HIDDEN - 1))[:, None] * WIDTH + channel[None, :]
    total = tl.zeros((OUTS, ROWS), tl.float32)
    for k in tl.range(0, WIDTH, INPUTS, num_stages=STAGES):
        # Reference: matmul_rows(u_TI, w2[expert], row_tile).to(dtype); float32 if ``partial``
        inside = (k + channel < WIDTH)[None, :]
        a = tl.load(inputs + k, mask=inside & valid[:, None], other=0.0)
        total = times(tl.load(rows + k, mask=inside, other=0.0), a, total, GPU)
    total = rounded(total, y.dtype.element_ty == tl.float32, GPU).to(y.dtype.element_ty)
    tl.store(y + pair[None, :] * HIDDEN + column[:, None], total, mask=valid[None, :] & (column < HIDDEN)[:, None])


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
    sizes = {"HIDDEN": hidden, "WIDTH": width, "ROWS": block.rows, "OUTS": OUTS, "INPUTS": _INPUT_BYTES // x.dtype.itemsize}
    launch = sizes | {
        "STAGES": block.num_stages, "GPU": on_gpu(device),
        "num_warps": block.num_warps, "num_stages": block.num_stages, "enable_fp_fusion": True,
    }  # fmt: skip
    _gate_up_kernel[(most * ceil_div(width, OUTS),)](x, w13, *work, given.weight_TK, u, pairs, given.limit, TOP_K=top_k, **launch)
    _down_kernel[(most * ceil_div(hidden, OUTS),)](u, w2, *work, y, pairs, **launch)
    return y
