"""4-bit weights inside kernels: tiles of them as numbers that are exact in the dtype of the inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4lite.kernels.dispatch import compiled
from dsv4lite.kernels.e4m3 import e4m3_values
from dsv4lite.kernels.rows.triton import e2m1_values

# The eight bfloat16 numbers of a word of codes: those of nibbles t and t + 4, for t from 0 to 3. Sums and products are ``fma``,
# which compute capability 8.0 has. Nibbles of int4 become the last bits of 128, plus $9, which is -(128 + zero point) twice.
_EIGHT_INT4 = tl.constexpr(
    "{.reg .b32 pair, one; mov.b32 one, 0x3F803F80;"
    + "".join(
        f"""
        shr.u32 pair, $8, {4 * t};
        lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 pair, pair, one, $9;
        mov.b32 {{${2 * t}, ${2 * t + 1}}}, pair;"""
        for t in range(4)
    )
    + "}"
)
# Of e2m1, exponent and mantissa at bit 6 are the value times 2^-126; then times 2^118 times the scale. $9 are the e4m3 codes of two
# scales, of nibbles with t below 2 and of the others; at bits 4 and 20 they are the scales times 2^-120.
_EIGHT_E2M1 = tl.constexpr(
    """{.reg .b32 pair, sign, zero, none, power, scales;
        mov.b32 zero, 0x80008000;
        mov.b32 none, 0;
        prmt.b32 pair, $9, none, 0x4140;
        shl.b32 sign, pair, 8;
        and.b32 sign, sign, zero;
        shl.b32 pair, pair, 4;
        lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;
        mov.b32 power, 0x7F007F00;
        fma.rn.bf16x2 pair, pair, power, zero;
        mov.b32 power, 0x77007700;
        fma.rn.bf16x2 scales, pair, power, zero;"""
    + "".join(
        f"""
        prmt.b32 power, scales, none, {"0x1010" if t < 2 else "0x3232"};
        {"shl.b32" if t < 2 else "shr.u32"} pair, $8, {abs(6 - 4 * t)};
        shl.b32 sign, $8, {12 - 4 * t};
        and.b32 sign, sign, zero;
        lop3.b32 pair, pair, 0x01C001C0, sign, 0xEA;
        fma.rn.bf16x2 pair, pair, power, zero;
        mov.b32 {{${2 * t}, ${2 * t + 1}}}, pair;"""
        for t in range(4)
    )
    + "}"
)
NVFP4_LACKS = tl.constexpr(256.0)
"""Factor that numbers of ``nvfp4_tile`` lack: bfloat16 holds no larger scale that multiplies the smallest numbers exactly."""


@triton.jit
def _eight(asm: tl.constexpr, words, other):
    """Return the numbers of nibbles 0, 4, 1, 5, 2, 6, 3 and 7 of each word, bfloat16, which the assembly makes."""
    return tl.inline_asm_elementwise(
        asm, "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r", [words, other],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _in_order(a0, b0, a1, b1, a2, b2, a3, b3, INPUTS: tl.constexpr):
    """Return the numbers of nibbles t (``a``) and t + 4 (``b``) of words of ``INPUTS`` inputs, in the order of the inputs."""
    lower, upper = tl.join(tl.join(a0, b0), tl.join(a1, b1)), tl.join(tl.join(a2, b2), tl.join(a3, b3))
    numbers = tl.reshape(tl.join(lower, upper), (a0.shape[0], 4, INPUTS // 32, 2, 2, 2))  # row, q, v, j, h, s
    return tl.reshape(tl.permute(numbers, (0, 2, 5, 4, 1, 3)), (a0.shape[0], INPUTS))


@triton.jit
def _words(words, row, k, K: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the words of ``INPUTS`` inputs of a block in the order of lanes: those of the first lanes first."""
    word = tl.arange(0, INPUTS // 8)
    if INPUTS < BLOCK:
        word = word // (INPUTS // 32) * (BLOCK // 32) + word % (INPUTS // 32) + k % BLOCK // 32
        k = k // BLOCK * BLOCK
    return tl.load(words + row[:, None] * (K // 8) + (k // 8 + word)[None, :])


@triton.jit
def int4_tile(words, zero, row, k, K: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the codes of some rows for ``INPUTS`` inputs from ``k`` on, minus the zero points int32 [rows]; float32 if WIDE.

    ``BLOCK`` is the matrix's ``lane_block``, which ``INPUTS`` divides.
    """
    words = _words(words, row, k, K, INPUTS, BLOCK)
    if WIDE or not compiled():
        zero = tl.broadcast_to(zero[:, None], words.shape)
        a0, b0, a1, b1 = _int4(words, zero, 0), _int4(words, zero, 4), _int4(words, zero, 1), _int4(words, zero, 5)
        a2, b2, a3, b3 = _int4(words, zero, 2), _int4(words, zero, 6), _int4(words, zero, 3), _int4(words, zero, 7)
    else:
        offset = tl.broadcast_to((zero * 0x10001 - 0x3CFF3D00)[:, None], words.shape)
        a0, b0, a1, b1, a2, b2, a3, b3 = _eight(_EIGHT_INT4, words, offset)
    return _in_order(a0, b0, a1, b1, a2, b2, a3, b3, INPUTS)


@triton.jit
def _int4(words, zero, nibble: tl.constexpr):
    return ((words >> 4 * nibble & 15) - zero).to(tl.float32)


@triton.jit
def nvfp4_tile(
    words, scales, row, k, K: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return weights of some rows over ``NVFP4_LACKS`` times the rows' factors, float32 if WIDE, else bfloat16; see ``int4_tile``.

    ``scales`` points to two e4m3 codes in 16 bits.
    """
    words = _words(words, row, k, K, INPUTS, BLOCK)
    # Two scales of each word, those of its first and last 16 inputs.
    pairs = tl.load(scales + row[:, None] * (K // 32) + (k // 32 + tl.arange(0, INPUTS // 32))[None, :]).to(tl.int32)
    pairs = tl.broadcast_to(pairs[:, None, :], (words.shape[0], 4, INPUTS // 32))
    pairs = tl.reshape(pairs, words.shape) & 0xFFFF
    if WIDE or not compiled():
        first, second = e4m3_values(pairs & 255) * 0.00390625, e4m3_values(pairs >> 8) * 0.00390625
        a0, b0, a1, b1 = _e2m1(words, first, 0), _e2m1(words, first, 4), _e2m1(words, first, 1), _e2m1(words, first, 5)
        a2, b2, a3, b3 = _e2m1(words, second, 2), _e2m1(words, second, 6), _e2m1(words, second, 3), _e2m1(words, second, 7)
    else:
        a0, b0, a1, b1, a2, b2, a3, b3 = _eight(_EIGHT_E2M1, words, pairs)
    return _in_order(a0, b0, a1, b1, a2, b2, a3, b3, INPUTS)


@triton.jit
def _e2m1(words, scale, nibble: tl.constexpr):
    return e2m1_values(words >> 4 * nibble & 15) * scale
