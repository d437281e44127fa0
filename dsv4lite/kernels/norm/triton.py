"""Kernel of ``rms_norm``: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import power_of_2
from dsv4lite.kernels.e4m3 import as_stored
from dsv4lite.kernels.quantize.triton import _as_rows


@triton.jit
def rms_norm_kernel(x, weight, out, row_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    # Reference: y = x.float(); y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / N + eps)
    # Reference: (y if weight is None else y * weight.float()).to(x.dtype)
    if WEIGHTED:
        y = y * w
    tl.store(out + row * N + column, as_stored(y, out), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See ``norm.rms_norm``."""
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    assert weight is None or (weight.is_contiguous() and weight.shape == x.shape[-1:]), weight
    rows = _as_rows(x)
    count, width = rows.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_2(width)
    if count:
        rms_norm_kernel[(count,)](
            rows,
            rows if weight is None else weight,
            out,
            rows.stride(0),
            eps,
            N=width,
            BLOCK=block,
            WEIGHTED=weight is not None,
            num_warps=min(8, max(1, block // 512)),  # 16 channels or more for each thread of the wide ones
            enable_fp_fusion=False,
        )
    return out
