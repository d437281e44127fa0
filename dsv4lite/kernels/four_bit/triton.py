"""4-bit weights inside kernels: tiles of them as numbers that are exact in the dtype of the inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4lite.kernels.dispatch import compiled
from dsv4lite.kernels.e4m3 import e4m3_values
from dsv4lite.kernels.rows.triton import e2m1_values

# Two bfloat16 numbers from two codes. int4: from bits 0 and 16, as the last bits of 128, plus $3, which is -(128 + zero point).
_TWO_INT4 = tl.constexpr("""{
    .reg .b32 pair, one;
    lop3.b32 pair, $2, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 one, 0x3F803F80;
    fma.rn.bf16x2 pair, pair, one, $3;
    mov.b32 {$0, $1}, pair;
}""")
# e2m1: from bits 12 and 28. Exponent and mantissa at bit 6 are the value times 2^-126; then times 2^126 and times the scale $3.
# Products are ``fma`` with -0.0 added, which compute capability 8.0 has.
_TWO_E2M1 = tl.constexpr("""{
    .reg .b32 pair, sign, power, zero;
    shr.u32 pair, $2, 6;
    and.b32 sign, $2, 0x80008000;
    lop3.b32 pair, pair, 0x01C001C0, sign, 0xEA;
    mov.b32 power, 0x7E807E80;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 pair, pair, power, zero;
    fma.rn.bf16x2 pair, pair, $3, zero;
    mov.b32 {$0, $1}, pair;
}""")
# A scale twice, from its e4m3 code at bits 4 and 20, which is the scale times 2^-120.
_TWO_SCALES = tl.constexpr("""{
    .reg .b32 power, zero;
    mov.b32 power, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 $0, $1, power, zero;
}""")


@triton.jit
def _two(asm: tl.constexpr, codes, other):
    """Return the bfloat16 numbers of the first and of the second code of each byte, which the assembly makes."""
    return tl.inline_asm_elementwise(asm, "=h,=h,r,r", [codes, other], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1)


@triton.jit
def int4_tile(codes, zero, row, k, K: tl.constexpr, INPUTS: tl.constexpr, WIDE: tl.constexpr):
    """Return the codes of some rows for ``INPUTS`` inputs from ``k`` on, minus the zero points int32 [rows]; float32 if WIDE."""
    pairs = tl.load(codes + row[:, None] * (K // 2) + (k // 2 + tl.arange(0, INPUTS // 2))[None, :]).to(tl.int32)
    if WIDE or not compiled():
        low, high = (pairs & 15) - zero[:, None], (pairs >> 4) - zero[:, None]
        low, high = low.to(tl.float32), high.to(tl.float32)
    else:
        offset = tl.broadcast_to((zero * 0x10001 - 0x3CFF3D00)[:, None], pairs.shape)
        low, high = _two(_TWO_INT4, pairs * 0x1001, offset)
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
    scale = tl.load(scales + at, mask=inside, other=0)
    if WIDE or not compiled():
        scale = _of_pairs(e4m3_values(scale), INPUTS, GROUP)
        low, high = e2m1_values(pairs & 15) * scale, e2m1_values(pairs >> 4) * scale
    else:
        bits = ((scale.to(tl.int32) & 0x7F) << 4 | (scale.to(tl.int32) & 0x80) << 8) * 0x10001
        scale = tl.inline_asm_elementwise(_TWO_SCALES, "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)
        low, high = _two(_TWO_E2M1, pairs * 0x1001000, _of_pairs(scale, INPUTS, GROUP))
    return tl.reshape(tl.join(low, high), (row.shape[0], INPUTS))


@triton.jit
def _of_pairs(scale, INPUTS: tl.constexpr, GROUP: tl.constexpr):
    """Return the scale of each pair of inputs, given one for each group."""
    wide = tl.broadcast_to(scale[:, :, None], (scale.shape[0], INPUTS // GROUP, GROUP // 2))
    return tl.reshape(wide, (scale.shape[0], INPUTS // 2))
