"""Kernel of ``rms_norm`` and ``add_rms_norm``: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import power_of_2
from dsv4lite.kernels.e4m3 import as_stored
from dsv4lite.kernels.quantize.triton import _as_rows


@triton.jit
def rms_norm_kernel(
    x, y, weight, total, out, x_stride, y_stride, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    z = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        # Reference: total = x + y
        sums = as_stored(z + tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32), total)
        tl.store(total + row * N + column, sums, mask=inside)
        z = sums.to(tl.float32)
    # Reference: y = x.float(); y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if WEIGHTED:
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    z = z * tl.rsqrt(tl.sum(z * z) / N + eps)
    # Reference: (y if weight is None else y * weight.float()).to(x.dtype)
    if WEIGHTED:
        z = z * w
    tl.store(out + row * N + column, as_stored(z, out), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See ``norm.rms_norm``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, None, weight, out, out, eps)
    return out


def add_rms_norm_triton(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``norm.add_rms_norm``."""
    assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, y.shape, x.dtype, y.dtype)
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm(x, y, weight, total, out, eps)
    return total, out


def _norm(x: Tensor, y: Tensor | None, weight: Tensor | None, total: Tensor, out: Tensor, eps: float) -> None:
    """Write the results of ``rms_norm``, or of ``add_rms_norm`` for a ``y``."""
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    assert weight is None or (weight.is_contiguous() and weight.shape == x.shape[-1:]), weight
    rows = _as_rows(x)
    others = rows if y is None else _as_rows(y)
    count, width = rows.shape
    block = power_of_2(width)
    if count:
        rms_norm_kernel[(count,)](
            rows,
            others,
            rows if weight is None else weight,
            total,
            out,
            rows.stride(0),
            others.stride(0),
            eps,
            N=width,
            BLOCK=block,
            ADDS=y is not None,
            WEIGHTED=weight is not None,
            num_warps=min(8, max(1, block // 512)),  # 16 channels or more for each thread of the wide ones
            enable_fp_fusion=False,
        )
