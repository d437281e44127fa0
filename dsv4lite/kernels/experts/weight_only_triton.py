"""Kernel of products whose inputs are not quantized, with unquantized or 4-bit weights: both products of experts, and dense ones.

    gate, up  one program: one block of rows x 64 columns of ``u``, from 128 rows of weights
    down      one program: one block of rows x 64 columns of the result, one row per token and expert

Grouping and the sum over experts are those of ``triton.py``. Weights are the left operand: 64 of their rows fill the tensor cores
whatever the number of tokens. 4-bit weights become numbers that are exact in the dtype of the inputs: int4 codes minus their zero
point, for one group of inputs at a time, whose scale multiplies the group's sum; or e2m1 times its group's scale, and the row's
factor multiplies the result. Blocks of every size run the same additions in the same order. A float32 product is three TF32
products; the tensor cores truncate their sums, which costs a few of float32's last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import by_most, ceil_div, compiled
from dsv4lite.kernels.experts import ExpertInputs
from dsv4lite.kernels.experts.grouping_triton import BlockConfig, BlockTable, Groups, group_triton
from dsv4lite.kernels.four_bit import FourBit
from dsv4lite.kernels.four_bit.triton import NVFP4_LACKS, int4_tile, nvfp4_tile
from dsv4lite.kernels.rows.triton import rounded
from dsv4lite.kernels.swiglu.triton import swiglu_of

_OUTS = tl.constexpr(64)  # columns of one program
_INPUT_BYTES = 128  # of a row of inputs, per iteration; of 4-bit weights twice as many, but of no more than one block of lanes

# Limits are pairs per expert.
UNQUANTIZED_BLOCKS: BlockTable = (
    (16, BlockConfig(rows=16, tiles=1, num_warps=4, num_stages=4)),
    (None, BlockConfig(rows=64, tiles=1, num_warps=4, num_stages=3)),
)
# Limits are rows; for experts, pairs of token and expert per expert.
FOUR_BIT_BLOCKS: BlockTable = (
    (16, BlockConfig(rows=16, tiles=1, num_warps=4, num_stages=3, unroll=2)),
    (32, BlockConfig(rows=32, tiles=1, num_warps=4, num_stages=3)),
    (None, BlockConfig(rows=64, tiles=1, num_warps=4, num_stages=3)),
)


@triton.jit
def _times(w, x, total):
    """Return ``w @ x.T + total``, float32."""
    if not compiled():  # the interpreter multiplies bfloat16 as integers
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x), total, input_precision="tf32x3")


@triton.jit
def _add(
    weights, row, k, x, total, K: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, NVFP4: tl.constexpr
):  # fmt: skip
    """Return ``total`` plus the products of ``x`` with some rows of weights, for ``INPUTS`` inputs from ``k`` on."""
    w, scales, offsets = weights
    WIDE: tl.constexpr = x.dtype == tl.float32
    if GROUP == 0:
        channel = tl.arange(0, INPUTS)
        tile = tl.load(w + row[:, None] * K + channel[None, :] + k, mask=(k + channel < K)[None, :], other=0.0)
        total = _times(tile, x, total)
    elif NVFP4:
        total = _times(nvfp4_tile(w, scales, row, k, K, INPUTS, BLOCK, WIDE), x, total)
    else:  # the inputs are of one group
        at = row * (K // GROUP) + k // GROUP
        tile = int4_tile(w, tl.load(offsets + at).to(tl.int32), row, k, K, INPUTS, BLOCK, WIDE)
        total += _times(tile, x, tl.zeros(total.shape, tl.float32)) * tl.load(scales + at).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["pairs"])
def _weight_only_kernel(
    x, w, scales, offsets, block_pairs, block_expert, num_blocks, weight, y, pairs, x_row, limit,
    K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, NVFP4: tl.constexpr, GROUPED: tl.constexpr, SWIGLU: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Multiply rows of ``x`` by a matrix [N, K]; if GROUPED by their experts' matrices; if SWIGLU by gate and up, and activate.

    Weights are 4-bit codes with scales and offsets for GROUP inputs, in BLOCKs of lanes, or unquantized if GROUP is 0.
    """
    PROGRAMS: tl.constexpr = (N + _OUTS - 1) // _OUTS
    block = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    column = tl.program_id(0) % PROGRAMS * _OUTS + tl.arange(0, _OUTS)
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
    weights = (w, scales, offsets)
    total = tl.zeros((_OUTS, ROWS), tl.float32)
    if SWIGLU:
        up = tl.zeros((_OUTS, ROWS), tl.float32)
    for k in tl.range(0, K, INPUTS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        # Reference: matmul_rows(x_MK, w[expert], row_tile).to(dtype); float32 if ``partial``; 4-bit: x_MK.float(), w.dequantize()
        a = tl.load(inputs + k, mask=(k + channel < K)[None, :] & valid[:, None], other=0.0)
        total = _add(weights, row, k, a, total, K, INPUTS, GROUP, BLOCK, NVFP4)
        if SWIGLU:
            up = _add(weights, row + N, k, a, up, K, INPUTS, GROUP, BLOCK, NVFP4)
    if NVFP4:
        total *= (tl.load(offsets + row) * NVFP4_LACKS)[:, None]
        if SWIGLU:
            up *= (tl.load(offsets + row + N) * NVFP4_LACKS)[:, None]
    if SWIGLU:
        # Reference: u_NI = (swiglu(h_NI[:, :width], h_NI[:, width:], limit) * weight_N1).to(dtype)
        WIDE: tl.constexpr = x.dtype.element_ty == tl.float32
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


def weight_only_outputs_triton(given: ExpertInputs, *, block: BlockConfig | None = None) -> Tensor:
    """Launch ``experts_outputs`` of unquantized or 4-bit weights; ``block`` is for tests."""
    (tokens, top_k), (experts, hidden, width), x, w13, w2 = given.slots_TK.shape, given.sizes, given.x, given.w13, given.w2
    assert isinstance(w13, FourBit | Tensor) and isinstance(w2, FourBit | Tensor)
    assert w13.shape == (experts, 2 * width, hidden) and x.shape == (tokens, hidden) and x.is_contiguous(), (w13.shape, x.shape)
    assert given.slots_TK.is_contiguous() and given.weight_TK.is_contiguous() and given.weight_TK.dtype == torch.float32
    pairs, device = tokens * top_k, x.device
    y = torch.empty(tokens, top_k, hidden, dtype=given.dtype, device=device)
    if tokens == 0:
        return y
    block = block or by_most(FOUR_BIT_BLOCKS if isinstance(w2, FourBit) else UNQUANTIZED_BLOCKS, pairs / experts)
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
    w: FourBit | Tensor,
    y: Tensor,
    pairs: int,
    groups: Groups | None = None,
    top_k: int = 1,
    weight_TK: Tensor | None = None,
    limit: float = 0.0,
) -> None:
    """Launch a product of ``blocks`` blocks of rows; only the first product of experts has ``weight_TK``."""
    if isinstance(w, FourBit):
        parts, group, nvfp4 = (w.words, w.scales.view(torch.int16) if w.nvfp4 else w.scales, w.offsets), w.group, w.nvfp4
    else:
        assert x.dtype == w.dtype, (x.dtype, w.dtype)
        parts, group, nvfp4 = (w, w, w), 0, False
    assert all(part.is_contiguous() for part in (*parts, y)) and x.shape[1] == w.shape[-1], (x.shape, w.shape)
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    outs, inputs, lane_block = y.shape[1], _INPUT_BYTES // x.dtype.itemsize, 0
    if isinstance(w, FourBit):
        lane_block = w.lane_block
        inputs = min(2 * inputs, lane_block)
    work = (y, y, y) if groups is None else (groups.block_pairs, groups.block_expert, groups.num_blocks)
    _weight_only_kernel[(blocks * ceil_div(outs, _OUTS.value),)](
        x,
        *parts,
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
        INPUTS=inputs,
        GROUP=group,
        BLOCK=lane_block,
        NVFP4=nvfp4,
        GROUPED=groups is not None,
        SWIGLU=weight_TK is not None,
        STAGES=block.num_stages,
        UNROLL=1 if nvfp4 else block.unroll,
        num_warps=block.num_warps,
        num_stages=block.num_stages,
        enable_fp_fusion=True,
    )
