"""Kernels that quantize, with the reference's codes and scale bytes; but a NaN does not change the rest of its FP8 group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div
from dsv4lite.kernels.e4m3 import e4m3_bytes, fp8_scale_bits, fp8_scaled, has_e4m3
from dsv4lite.kernels.rows.triton import store_fp4

_TILE = 2048  # channels per program
_FP4_GROUP = 32


@triton.jit
def quantize_kernel(x, codes, scales, row_stride, N: tl.constexpr, GROUP: tl.constexpr, GROUPS_TILE: tl.constexpr):
    GROUPS: tl.constexpr = (N + GROUP - 1) // GROUP
    TILES: tl.constexpr = (GROUPS + GROUPS_TILE - 1) // GROUPS_TILE
    row = (tl.program_id(0) // TILES).to(tl.int64)
    group = (tl.program_id(0) % TILES) * GROUPS_TILE + tl.arange(0, GROUPS_TILE)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # Reference: codes, bits = _fp8_groups(x, group)
    y = tl.load(x + row * row_stride + column, mask=column < N, other=0.0).to(tl.float32)
    bits = fp8_scale_bits(y)
    tl.store(codes + row * N + column, e4m3_bytes(fp8_scaled(y, bits), has_e4m3()), mask=column < N)
    tl.store(scales + row * GROUPS + group, (bits >> 23).to(tl.uint8), mask=group < GROUPS)


def _as_rows(x: Tensor) -> Tensor:
    """Return ``x`` [..., N] as rows [M, N] with contiguous channels, copied only if necessary."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def quantize_fp8_triton(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """See ``quantize.quantize_fp8``; ``group`` is a power of two."""
    assert group & (group - 1) == 0 and x.dtype in (torch.bfloat16, torch.float32), (group, x.dtype)
    rows = _as_rows(x)
    count, width = rows.shape
    groups = ceil_div(width, group)
    tile = min(max(1, _TILE // group), 1 << (groups - 1).bit_length())  # groups of one program
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], groups, dtype=torch.uint8, device=x.device)
    if codes.numel():
        quantize_kernel[(count * ceil_div(groups, tile),)](
            rows,
            codes,
            scales,
            rows.stride(0),
            N=width,
            GROUP=group,
            GROUPS_TILE=tile,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def quantize_packed_fp4_kernel(x, codes, scales, groups, GROUPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)[:, None]
    # Reference: quantize_fp4(x), pack_fp4(codes)
    at = x + first * 32 + group * 32 + tl.arange(0, 32)[None, :]
    y = tl.load(at, mask=group < groups - first, other=0.0).to(tl.float32)
    store_fp4(y, codes + first * 16, scales + first, groups - first, GROUPS)


def quantize_packed_fp4_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """See ``quantize.quantize_packed_fp4``."""
    numbers = (x if x.dtype in (torch.bfloat16, torch.float32) else x.float()).contiguous()
    groups = numbers.numel() // _FP4_GROUP
    assert x.shape[-1] % _FP4_GROUP == 0, x.shape
    codes = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // _FP4_GROUP, dtype=torch.uint8, device=x.device)
    if groups:
        tile = _TILE // _FP4_GROUP
        quantize_packed_fp4_kernel[(ceil_div(groups, tile),)](
            numbers, codes, scales, groups, GROUPS=tile, num_warps=4, enable_fp_fusion=False
        )
    return codes, scales
