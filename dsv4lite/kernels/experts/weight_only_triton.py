"""Kernel of products whose inputs are not quantized, with unquantized or 4-bit weights: both products of experts, and dense ones.

    gate, up  one program: one block of rows x 64 columns of ``u``, from 128 rows of weights
    down      one program: one block of rows x 64 columns of the result, one row per token and expert

For many rows of bfloat16 Hopper has other kernels with the same bits, ``prefill_bf16_triton.py``.

Grouping and the sum over experts are those of ``triton.py``. Weights are the left operand: 64 of their rows fill the tensor cores
whatever the number of tokens. 4-bit weights become numbers that are exact in the dtype of the inputs: int4 codes minus their zero
point, for one group of inputs at a time, whose scale multiplies the group's sum; or e2m1 times its group's scale, and the row's
factor multiplies the result. Blocks of every size run the same additions in the same order; dense products of many rows that may
run them in any order do not add in parts. A float32 product is three TF32 products; the tensor cores truncate their sums, which
costs a few of float32's last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.counters import counters_of
from dsv4lite.kernels.dispatch import by_most, ceil_div, compiled
from dsv4lite.kernels.experts import ExpertInputs, prefill_bf16_triton
from dsv4lite.kernels.experts.grouping_triton import BlockConfig, BlockTable, Groups, group_triton
from dsv4lite.kernels.four_bit import FourBit
from dsv4lite.kernels.four_bit.triton import NVFP4_LACKS, int4_tile, nvfp4_tile
from dsv4lite.kernels.gemm.triton import FEW_ROWS, FILLED, finish_tile, splits_of
from dsv4lite.kernels.rows.triton import rounded
from dsv4lite.kernels.swiglu.triton import swiglu_of

# Dense products have twice as many programs as ``splits_of`` aims at, for several share a multiprocessor. Up to ``FEW_ROWS`` rows,
# tiles below this number are computed in parts; with more rows, those below ``FILLED``.
_SPREAD, _FEW_FILLED = 2, 512
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
    x, w, scales, offsets, block_pairs, block_expert, num_blocks, weight, sums, arrivals, y, pairs, x_row, limit,
    K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, NVFP4: tl.constexpr, GROUPED: tl.constexpr, SWIGLU: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Multiply rows of ``x`` by a matrix [N, K]; if GROUPED by their experts' matrices; if SWIGLU by gate and up, and activate.

    Weights are 4-bit codes with scales and offsets for GROUP inputs, in BLOCKs of lanes, or unquantized if GROUP is 0. Sums of PART
    inputs are added in order: SPLITS programs compute one each, or one program computes all.
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
    FOLD: tl.constexpr = SPLITS == 1 and PART < K
    if FOLD:
        folded = tl.zeros((_OUTS, ROWS), tl.float32)
    factor = tl.load(offsets + row)[:, None] * NVFP4_LACKS if NVFP4 else 1.0
    begin = 0 if SPLITS == 1 else tl.program_id(1) * PART
    end = K if SPLITS == 1 else tl.minimum(begin + PART, K)
    for k in tl.range(begin, end, INPUTS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        # Reference: matmul_rows(x_MK, w[expert], row_tile).to(dtype); 4-bit: x_MK.float(), w.dequantize()
        a = tl.load(inputs + k, mask=(k + channel < K)[None, :] & valid[:, None], other=0.0)
        total = _add(weights, row, k, a, total, K, INPUTS, GROUP, BLOCK, NVFP4)
        if SWIGLU:
            up = _add(weights, row + N, k, a, up, K, INPUTS, GROUP, BLOCK, NVFP4)
        if FOLD:  # noqa: SIM102  decided when compiled; the other when run
            if (k + INPUTS) % PART == 0:
                folded += total * factor
                total = tl.zeros((_OUTS, ROWS), tl.float32)
    total *= factor
    if FOLD:
        total += folded
    if SWIGLU:
        if NVFP4:
            up *= tl.load(offsets + row + N)[:, None] * NVFP4_LACKS
        # Reference: u_NI = (swiglu(h_NI[:, :width], h_NI[:, width:], limit) * weight_N1).to(dtype)
        WIDE: tl.constexpr = x.dtype.element_ty == tl.float32
        u = swiglu_of(rounded(total, WIDE), rounded(up, WIDE), limit)
        total = u * tl.load(weight + pair, mask=valid, other=0.0)[None, :]
    pair = tl.where(valid, pair, pairs)  # these are not stored
    arrivals += tl.program_id(0)
    finish_tile(total, sums, y, arrivals, tl.program_id(1), block * ROWS, pair, column, pairs, N, N, True, SPLITS)


def four_bit_linear_triton(x_MK: Tensor, w: FourBit, dtype: torch.dtype, row_tile: int | None = None) -> Tensor:
    """See ``four_bit.four_bit_linear``."""
    rows, x = len(x_MK), x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    out = torch.empty(rows, w.shape[0], dtype=dtype, device=x.device)
    if rows:
        block = by_most(FOUR_BIT_BLOCKS, rows)
        _launch(block, ceil_div(rows, block.rows), x, w, out, rows, any_order=row_tile is None)
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
    if block is None and prefill_bf16_triton.takes_blocks(given):
        return prefill_bf16_triton.outputs_of_blocks(given).view_as(y)
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
    any_order: bool = False,
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
    tiles = blocks * ceil_div(outs, _OUTS.value)
    part, splits = (w.shape[-1], 1) if groups is not None else _parts(w.shape[-1], outs, inputs, tiles, block, any_order)
    sums, arrivals = y, y
    if splits > 1:
        sums, arrivals = torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device), counters_of(y.device)
    work = (y, y, y) if groups is None else (groups.block_pairs, groups.block_expert, groups.num_blocks)
    _weight_only_kernel[(tiles, splits)](
        x,
        *parts,
        *work,
        y if weight_TK is None else weight_TK,
        sums,
        arrivals,
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
        PART=part,
        SPLITS=splits,
        num_warps=block.num_warps,
        num_stages=block.num_stages,
        enable_fp_fusion=True,
    )


def _parts(columns: int, outs: int, inputs: int, tiles: int, block: BlockConfig, any_order: bool) -> tuple[int, int]:
    """Return the inputs of each part of a dense product's sums, and how many programs compute parts of a tile.

    The parts are those of ``gemm``, of ``inputs`` inputs or a multiple of them.
    """
    part = ceil_div(ceil_div(columns, inputs), splits_of(ceil_div(outs, _SPREAD), columns // 128)) * inputs
    if tiles < (FILLED if block.rows > FEW_ROWS else _FEW_FILLED):
        return part, ceil_div(columns, part)
    return (columns if any_order else part), 1  # adding parts in one program takes a quarter longer
