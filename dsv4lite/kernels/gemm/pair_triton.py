"""Two products of the same few rows in one launch, with FP8 and with plain weights: each alone would leave the chip half empty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import capability_of, on_gpu
from dsv4lite.kernels.gemm import PAIR_ROWS, scale_rows
from dsv4lite.kernels.gemm.triton import GROUPED_TILES, float_tile, fp8_tile, room_for, splits_of
from dsv4lite.kernels.pdl import dependent_launch, wait_for_predecessor
from dsv4lite.kernels.quantize import FP8_GROUP

OUTS = 64  # of a tile
_NUM_WARPS, _NUM_STAGES = 4, 3  # so that three programs fit on a multiprocessor: both products' have to run at once


@triton.jit(do_not_specialize=["M", "first"])
def _pair_kernel(
    x, w, x_codes, x_scales, w_codes, w_scales, parts, out, fp8_parts, fp8_out, arrivals,
    M, N, FP8_N, K, blocks, part, fp8_part, first, x_row,
    BM: tl.constexpr, BN: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr, FP8_SPLITS: tl.constexpr, CODES: tl.constexpr, GPU: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    program = tl.program_id(0)
    if program < first:
        tiles = tl.cdiv(N, BN)
        float_tile(
            program % tiles, program // tiles, x, w, w, parts, out, arrivals, M, N, K, blocks, part, x_row, 0, 1,
            BM, BN, 0, EVEN_K, True, False, SPLITS, GPU, GROUPED,
        )  # fmt: skip
    else:
        program -= first
        tiles = tl.cdiv(FP8_N, BN)
        fp8_tile(
            program % tiles, program // tiles, x_codes, x_scales, w_codes, w_scales, fp8_parts, fp8_out, arrivals + tl.cdiv(N, BN),
            M, FP8_N, K, blocks, fp8_part, BM, BN, SCALE_ROWS, EVEN_K, True, False, FP8_SPLITS, CODES, GROUPED,
        )  # fmt: skip


def pair_linear_triton(
    x_MK: Tensor, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor, w_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``gemm.pair_linear``; for 1 to ``PAIR_ROWS`` rows."""
    (rows, inputs), (fp8_outs, outs) = x_MK.shape, (len(w_codes), len(w_NK))
    assert 0 < rows <= PAIR_ROWS and x_MK.dtype == w_NK.dtype == torch.bfloat16, (x_MK.shape, x_MK.dtype, w_NK.dtype)
    assert w_codes.shape[1] == w_NK.shape[1] == x_codes.shape[1] == inputs, (x_codes.shape, w_codes.shape, w_NK.shape)
    assert w_codes.is_contiguous() and w_scales.is_contiguous() and w_NK.is_contiguous() and x_scales.is_contiguous()
    blocks = -(-inputs // FP8_GROUP)
    splits, fp8_splits = splits_of(outs, blocks), splits_of(fp8_outs, blocks)
    out = torch.empty(rows, outs, dtype=torch.float32, device=x_MK.device)
    fp8_out = torch.empty(rows, fp8_outs, dtype=x_MK.dtype, device=x_MK.device)
    parts, _, arrivals = room_for(splits, out)
    fp8_parts, _, fp8_arrivals = room_for(fp8_splits, fp8_out)
    first = triton.cdiv(outs, OUTS) * splits
    codes = capability_of(x_MK.device) < 89
    plain, x, w = x_MK.contiguous(), x_codes.contiguous(), w_codes
    if codes:
        x, w = x.view(torch.uint8), w.view(torch.uint8)
    _pair_kernel[(first + triton.cdiv(fp8_outs, OUTS) * fp8_splits,)](
        plain,
        w_NK,
        x,
        x_scales,
        w,
        w_scales,
        parts,
        out,
        fp8_parts,
        fp8_out,
        fp8_arrivals if splits == 1 else arrivals,
        rows,
        outs,
        fp8_outs,
        inputs,
        blocks,
        triton.cdiv(blocks, splits),
        triton.cdiv(blocks, fp8_splits),
        first,
        plain.stride(0),
        BM=PAIR_ROWS,
        BN=OUTS,
        SCALE_ROWS=scale_rows(w_codes, w_scales),
        EVEN_K=inputs % FP8_GROUP == 0,
        SPLITS=splits,
        FP8_SPLITS=fp8_splits,
        CODES=codes,
        GPU=on_gpu(x.device),
        GROUPED=GROUPED_TILES,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(x.device),
    )
    return fp8_out, out
