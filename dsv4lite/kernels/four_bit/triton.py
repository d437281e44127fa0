"""Kernel of products with 4-bit weights: dense ones, and both products of routed experts.

One program computes up to 128 rows x 64 columns. Weights are the left operand, as in ``experts/unquantized_triton.py``: 64 of their
rows fill the tensor cores whatever the number of tokens. A tile of weights is dequantized in registers and rounded to the dtype of
the inputs. Blocks of every size run the same additions in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import by_most, ceil_div
from dsv4lite.kernels.e4m3 import e4m3_values
from dsv4lite.kernels.experts import ExpertInputs
from dsv4lite.kernels.experts.grouping_triton import BlockConfig, BlockTable, Groups, group_triton
from dsv4lite.kernels.experts.unquantized_triton import OUTS, times
from dsv4lite.kernels.four_bit import FourBit
from dsv4lite.kernels.rows.triton import e2m1_values, rounded
from dsv4lite.kernels.swiglu.triton import swiglu_of

_INPUT_BYTES = 128  # of a row of inputs, per iteration

# Limits are rows; for experts, pairs of token and expert per expert.
FOUR_BIT_BLOCKS: BlockTable = (
    (16, BlockConfig(rows=16, tiles=1, num_warps=4, num_stages=4)),
    (64, BlockConfig(rows=64, tiles=1, num_warps=4, num_stages=3)),
    (None, BlockConfig(rows=128, tiles=1, num_warps=8, num_stages=3)),
)


@triton.jit
def _weights(
    codes, scales, offsets, row, k, K: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, NVFP4: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Return the weights of some rows for ``INPUTS`` inputs from ``k`` on: float32, rounded to bfloat16 unless WIDE."""
    byte = k // 2 + tl.arange(0, INPUTS // 2)
    pairs = tl.load(codes + row[:, None] * (K // 2) + byte[None, :], mask=(byte < K // 2)[None, :], other=0)
    q = tl.reshape(tl.join(pairs & 15, pairs >> 4), (row.shape[0], INPUTS)).to(tl.int32)
    GROUPS: tl.constexpr = INPUTS // GROUP if INPUTS > GROUP else 1
    group = k // GROUP + tl.arange(0, GROUPS)
    at, inside = row[:, None] * (K // GROUP) + group[None, :], (group < K // GROUP)[None, :]
    scale = tl.load(scales + at, mask=inside, other=0)
    if NVFP4:
        # e2m1_values(codes) * (scales.float() * offsets)
        scale = e4m3_values(scale) * tl.load(offsets + row)[:, None]
        value = e2m1_values(q)
    else:
        # (codes.float() - offsets.float()) * scales.float()
        scale = scale.to(tl.float32)
        zero = tl.load(offsets + at, mask=inside, other=0).to(tl.int32)
        if GROUPS > 1:
            zero = tl.reshape(tl.broadcast_to(zero[:, :, None], (row.shape[0], GROUPS, GROUP)), (row.shape[0], INPUTS))
        value = (q - zero).to(tl.float32)
    if GROUPS > 1:
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (row.shape[0], GROUPS, GROUP)), (row.shape[0], INPUTS))
    return rounded(value * scale, WIDE)


@triton.jit(do_not_specialize=["pairs"])
def _four_bit_kernel(
    x, codes, scales, offsets, block_pairs, block_expert, num_blocks, weight, y, pairs, x_row, limit,
    K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr, NVFP4: tl.constexpr, GROUPED: tl.constexpr, SWIGLU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply rows of ``x`` by a matrix [N, K]; if GROUPED by their experts' matrices; if SWIGLU by gate and up, and activate."""
    PROGRAMS: tl.constexpr = (N + OUTS - 1) // OUTS
    block = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    column = tl.program_id(0) % PROGRAMS * OUTS + tl.arange(0, OUTS)
    row = tl.minimum(column, N - 1).to(tl.int64)
    pair = block * ROWS + tl.arange(0, ROWS)
    if GROUPED:
        if block >= tl.load(num_blocks):
            return
        row += tl.load(block_expert + block).to(tl.int64) * (2 * N if SWIGLU else N)
        pair = tl.load(block_pairs + pair)
    valid = pair < pairs
    pair = tl.where(valid, pair, 0).to(tl.int64)
    channel = tl.arange(0, INPUTS)
    inputs = x + (pair // TOP_K)[:, None] * x_row + channel[None, :]
    WIDE: tl.constexpr = x.dtype.element_ty == tl.float32
    total = tl.zeros((OUTS, ROWS), tl.float32)
    if SWIGLU:
        up = tl.zeros((OUTS, ROWS), tl.float32)
    for k in tl.range(0, K, INPUTS, num_stages=STAGES):
        # Reference: matmul_rows(x_MK.float(), w.dequantize(), row_tile).to(dtype)
        a = tl.load(inputs + k, mask=(k + channel < K)[None, :] & valid[:, None], other=0.0)
        w = _weights(codes, scales, offsets, row, k, K, INPUTS, GROUP, NVFP4, WIDE).to(x.dtype.element_ty)
        total = times(w, a, total)
        if SWIGLU:
            w = _weights(codes, scales, offsets, row + N, k, K, INPUTS, GROUP, NVFP4, WIDE).to(x.dtype.element_ty)
            up = times(w, a, up)
    if SWIGLU:
        # Reference: u_NI = (swiglu(h_NI[:, :width], h_NI[:, width:], limit) * weight_N1).to(dtype)
        u = swiglu_of(rounded(total, WIDE), rounded(up, WIDE), limit)
        total = u * tl.load(weight + pair, mask=valid, other=0.0)[None, :]
    total = rounded(total, y.dtype.element_ty == tl.float32).to(y.dtype.element_ty)
    tl.store(y + pair[None, :] * N + column[:, None], total, mask=valid[None, :] & (column < N)[:, None])


def four_bit_linear_triton(x_MK: Tensor, w: FourBit, dtype: torch.dtype, row_tile: int | None = None) -> Tensor:
    """See ``four_bit.four_bit_linear``."""
    rows, x = len(x_MK), x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    out = torch.empty(rows, w.shape[0], dtype=dtype, device=x.device)
    if rows:
        block = by_most(FOUR_BIT_BLOCKS, rows)
        _launch(block, ceil_div(rows, block.rows), x, w, out, rows)
    return out


def four_bit_outputs_triton(given: ExpertInputs, *, block: BlockConfig | None = None) -> Tensor:
    """Launch ``experts_outputs`` with 4-bit weights; ``block`` is for tests."""
    (tokens, top_k), (experts, hidden, width), x, w13, w2 = given.slots_TK.shape, given.sizes, given.x, given.w13, given.w2
    assert isinstance(w13, FourBit) and isinstance(w2, FourBit) and x.shape == (tokens, hidden) and x.is_contiguous()
    assert w13.shape == (experts, 2 * width, hidden), (w13.shape, given.sizes)
    assert given.slots_TK.is_contiguous() and given.weight_TK.is_contiguous() and given.weight_TK.dtype == torch.float32
    pairs, device = tokens * top_k, x.device
    y = torch.empty(tokens, top_k, hidden, dtype=given.dtype, device=device)
    if tokens == 0:
        return y
    block = block or by_most(FOUR_BIT_BLOCKS, pairs / experts)
    groups = Groups.allocate(tokens, top_k, experts, (0, 0), block.rows, device, by_token=False)
    group_triton(given.slots_TK, None, experts, groups)
    u = torch.empty(pairs, width, dtype=x.dtype, device=device)
    _launch(block, groups.max_blocks, x, w13, u, pairs, groups, top_k, given.weight_TK, given.limit)
    _launch(block, groups.max_blocks, u, w2, y.view(pairs, hidden), pairs, groups)
    return y


def _launch(
    block: BlockConfig,
    blocks: int,
    x: Tensor,
    w: FourBit,
    y: Tensor,
    pairs: int,
    groups: Groups | None = None,
    top_k: int = 1,
    weight_TK: Tensor | None = None,
    limit: float = 0.0,
) -> None:
    """Launch a product of ``blocks`` blocks of rows; only the first product of experts has ``weight_TK``."""
    assert all(part.is_contiguous() for part in (w.codes, w.scales, w.offsets, y)) and x.shape[1] == w.shape[-1], (x.shape, w.shape)
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    outs = y.shape[1]
    work = (y, y, y) if groups is None else (groups.block_pairs, groups.block_expert, groups.num_blocks)
    _four_bit_kernel[(blocks * ceil_div(outs, OUTS.value),)](
        x,
        w.codes,
        w.scales.view(torch.uint8) if w.nvfp4 else w.scales,
        w.offsets,
        *work,
        y if weight_TK is None else weight_TK,
        y,
        pairs,
        x.stride(0),
        limit,
        K=w.shape[-1],
        N=outs,
        TOP_K=top_k,
        ROWS=block.rows,
        INPUTS=_INPUT_BYTES // x.dtype.itemsize,
        GROUP=w.group,
        NVFP4=w.nvfp4,
        GROUPED=groups is not None,
        SWIGLU=weight_TK is not None,
        STAGES=block.num_stages,
        num_warps=block.num_warps,
        num_stages=block.num_stages,
        enable_fp_fusion=True,
    )
