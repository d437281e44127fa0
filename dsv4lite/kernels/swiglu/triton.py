"""Kernels of SwiGLU: one token x four groups of 128 channels for each program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div
from dsv4lite.kernels.e4m3 import e4m3_bytes, fp8_scale_bits, fp8_scaled, has_e4m3, to_bf16
from dsv4lite.kernels.quantize import FP8_GROUP
from dsv4lite.kernels.rows.triton import rounded

_GROUPS = 4  # of one program


@triton.jit
def swiglu_of(gate, up, limit, KEEP_NAN: tl.constexpr = False):
    """Return SwiGLU of float32 numbers; unless KEEP_NAN, the limit takes the place of a NaN."""
    KIND: tl.constexpr = tl.PropagateNan.ALL if KEEP_NAN else tl.PropagateNan.NONE
    gate = tl.minimum(gate, limit, KIND)
    up = tl.minimum(tl.maximum(up, -limit, KIND), limit, KIND)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu_groups(h, codes, scales, token, group, width, groups, limit, ALIGNED: tl.constexpr):
    """Activate and quantize groups [GROUPS] of 128 channels of a token."""
    if ALIGNED:
        width = groups * 128  # tells the compiler that rows are aligned
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    # gate, up = h_TI.chunk(2, -1)
    row = h + token * 2 * width + column
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width, mask=inside, other=0.0).to(tl.float32)
    # quantize_fp8(swiglu(gate, up, limit).to(h_TI.dtype), FP8_GROUP)
    y = to_bf16(swiglu_of(gate, up, limit, True)).to(tl.float32)
    bits = fp8_scale_bits(y)
    tl.store(codes + token * width + column, e4m3_bytes(fp8_scaled(y, bits), has_e4m3()), mask=inside)
    tl.store(scales + token * groups + group, (bits >> 23).to(tl.uint8), mask=group < groups)


@triton.jit(do_not_specialize=["width", "groups"])
def _swiglu_kernel(h, codes, scales, width, groups, limit, GROUPS: tl.constexpr, ALIGNED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    swiglu_groups(h, codes, scales, token, group, width, groups, limit, ALIGNED)


@triton.jit(do_not_specialize=["width"])
def _halves_kernel(h, u, width, limit, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = h + token * 2 * width + column
    # swiglu(gate, up, limit).to(h_TI.dtype)
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width, mask=inside, other=0.0).to(tl.float32)
    y = rounded(swiglu_of(gate, up, limit, True), h.dtype.element_ty == tl.float32)
    tl.store(u + token * width + column, y.to(u.dtype.element_ty), mask=inside)


def swiglu_halves_triton(h_TI: Tensor, limit: float) -> Tensor:
    """See ``swiglu.swiglu_halves``."""
    tokens, width, block = h_TI.shape[0], h_TI.shape[1] // 2, _GROUPS * FP8_GROUP
    assert h_TI.is_contiguous() and h_TI.shape[1] == 2 * width, h_TI.shape
    u = torch.empty(tokens, width, dtype=h_TI.dtype, device=h_TI.device)
    if h_TI.numel():
        grid = (tokens, ceil_div(width, block))
        _halves_kernel[grid](h_TI, u, width, limit, BLOCK=block, num_warps=4, enable_fp_fusion=True)
    return u


def swiglu_quantize_triton(h_TI: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """See ``swiglu.swiglu_quantize``."""
    tokens, width = h_TI.shape[0], h_TI.shape[1] // 2
    groups = ceil_div(width, FP8_GROUP)
    assert h_TI.dtype == torch.bfloat16 and h_TI.is_contiguous() and h_TI.shape[1] == 2 * width, (h_TI.dtype, h_TI.shape)
    codes = torch.empty(tokens, width, dtype=torch.uint8, device=h_TI.device)
    scales = torch.empty(tokens, groups, dtype=torch.uint8, device=h_TI.device)
    if h_TI.numel():
        _swiglu_kernel[(tokens, ceil_div(groups, _GROUPS))](
            h_TI,
            codes,
            scales,
            width,
            groups,
            limit,
            GROUPS=_GROUPS,
            ALIGNED=width % FP8_GROUP == 0,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return codes.view(torch.float8_e4m3fn), scales
