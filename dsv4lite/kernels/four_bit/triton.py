"""4-bit weights inside kernels: tiles of them as numbers that are exact in the dtype of the inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4lite.kernels.dispatch import compiled
from dsv4lite.kernels.e4m3 import e4m3_values
from dsv4lite.kernels.rows.triton import e2m1_values

# Two codes of a byte, at bits 0 and 16, as the last bits of 128 in bfloat16, and minus what belongs to 128 plus the zero point.
_TWO_CODES = tl.constexpr("""{
    .reg .b32 pair, one;
    lop3.b32 pair, $2, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 one, 0x3F803F80;
    fma.rn.bf16x2 pair, pair, one, $3;
    mov.b32 {$0, $1}, pair;
}""")


@triton.jit
def int4_tile(codes, zero, row, k, K: tl.constexpr, INPUTS: tl.constexpr, WIDE: tl.constexpr):
    """Return the codes of some rows for ``INPUTS`` inputs from ``k`` on, minus the zero points int32 [rows]; float32 if WIDE."""
    pairs = tl.load(codes + row[:, None] * (K // 2) + (k // 2 + tl.arange(0, INPUTS // 2))[None, :]).to(tl.int32)
    if WIDE or not compiled():
        low, high = (pairs & 15) - zero[:, None], (pairs >> 4) - zero[:, None]
        low, high = low.to(tl.float32), high.to(tl.float32)
    else:
        offset = tl.broadcast_to((zero * 0x10001 - 0x3CFF3D00)[:, None], pairs.shape)
        low, high = tl.inline_asm_elementwise(
            _TWO_CODES, "=h,=h,r,r", [pairs * 0x1001, offset], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    return tl.reshape(tl.join(low, high), (row.shape[0], INPUTS))


@triton.jit
def nvfp4_tile(
    codes, scales, row, k, K: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return weights of some rows over the rows' factors, for ``INPUTS`` inputs from ``k`` on: float32 if WIDE, else bfloat16."""
    byte = k // 2 + tl.arange(0, INPUTS // 2)
    pairs = tl.load(codes + row[:, None] * (K // 2) + byte[None, :], mask=(byte < K // 2)[None, :], other=0).to(tl.int32)
    group = k // GROUP + tl.arange(0, INPUTS // GROUP)
    at, inside = row[:, None] * (K // GROUP) + group[None, :], (group < K // GROUP)[None, :]
    scale = e4m3_values(tl.load(scales + at, mask=inside, other=0))
    scale = tl.broadcast_to(scale[:, :, None], (row.shape[0], INPUTS // GROUP, GROUP // 2))
    scale = tl.reshape(scale, (row.shape[0], INPUTS // 2))
    low, high = e2m1_values(pairs & 15) * scale, e2m1_values(pairs >> 4) * scale
    return tl.reshape(tl.join(low, high), (row.shape[0], INPUTS)).to(tl.float32 if WIDE else tl.bfloat16)
