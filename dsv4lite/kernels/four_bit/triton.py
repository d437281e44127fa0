"""4-bit weights inside kernels: a tile of them dequantized in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4lite.kernels.e4m3 import e4m3_values
from dsv4lite.kernels.rows.triton import e2m1_values, rounded


@triton.jit
def four_bit_weights(
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
