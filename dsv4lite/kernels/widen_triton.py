"""Helpers of the experts' kernels: widen bytes of tiles to numbers for the tensor cores, without moving them between threads."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4lite.kernels.e4m3 import has_e4m3

# Widens the eight numbers of a word of FP4 codes: magnitudes select bytes of their groups' tables, then signs are added.
_WIDEN = tl.constexpr("""{
    .reg .b32 a, b;
    and.b32 a, $2, 0x77777777;
    shr.u32 b, a, 16;
    prmt.b32 a, $3, $7, a;
    lop3.b32 $0, a, $2, 0x80808080, 0xf8;
    prmt.b32 b, $11, $15, b;
    shl.b32 a, $2, 4;
    lop3.b32 $1, b, a, 0x80808080, 0xf8;
}""")
_WIDEN_REGISTERS = tl.constexpr("=&r,=&r,r" + 16 * ",r")


@triton.jit
def place(piece, TILES: tl.constexpr):
    """Arrange the bytes [TILES, 2048] of a piece by rows and columns, [TILES * 64, 32]; no byte moves between threads."""
    piece = tl.permute(tl.reshape(piece, (TILES, 4, 8, 4, 2, 2, 4)), (0, 1, 5, 2, 4, 3, 6))
    return tl.reshape(piece, (TILES * 64, 32))


@triton.jit
def side_by_side(a, b):
    """Return the columns of ``a``, then those of ``b``; no number moves between threads."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _table(exponent):
    """Return the e5m2 bytes of the magnitudes of e2m1, times 2^(exponent - 14), from 4 * exponent: two words."""
    return exponent * 0x01010100 + 0x06040000, exponent * 0x01010101 + 0x0E0C0A08


@triton.jit
def row_exponents(words):
    """Return the exponents of rows, e8m0 bytes as int32, from words of FP4 scales."""
    return words & 3 | (words >> 6) & 0xC | (words >> 12) & 0x30 | (words >> 18) & 0xC0


@triton.jit
def widen_words(words, first, second):
    """Return the e5m2 bytes of the first and of the other four codes of each word.

    Args:
        words: Bytes, uint8 [..., 4].
        first, second: 4 times the relative exponents of the scales of the first and of the other four codes, int32 [..., 1].
    """
    low, high = _table(first)
    low2, high2 = _table(second)
    return tl.inline_asm_elementwise(
        _WIDEN,
        _WIDEN_REGISTERS,
        [words, low, high, low2, high2],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )


@triton.jit
def widen_fp4(piece, first, second, TILES: tl.constexpr):
    """Return the 64 columns of a piece as e5m2, or as float16 on chips without it.

    Args:
        piece: uint8 [TILES, 2048].
        first, second: 4 times the relative exponents of the first 32 and of the other columns' scales, int32 [TILES * 64].
    """
    if has_e4m3():
        a, b = widen_words(place(piece, TILES), first[:, None], second[:, None])
        numbers = side_by_side(a, b).to(tl.float8e5, bitcast=True)
    else:
        nibbles = tl.permute(tl.reshape(tl.join(piece & 7, (piece >> 4) & 7), (TILES, 512, 2, 4)), (0, 1, 3, 2))
        a, b = tl.split(nibbles)
        a, b = place(tl.reshape(a, (TILES, 2048)), TILES), place(tl.reshape(b, (TILES, 2048)), TILES)
        signs = place(piece, TILES)
        wide = side_by_side(
            _scaled_e2m1(a, first) | (signs & 0x80).to(tl.int32) << 8,
            _scaled_e2m1(b, second) | (signs & 0x08).to(tl.int32) << 12,
        )
        numbers = wide.to(tl.uint16).to(tl.float16, bitcast=True)
    return numbers


@triton.jit
def _scaled_e2m1(magnitude, exponent):
    """Return the bits of float16 numbers without signs, int32: the e5m2 byte of ``_table``, shifted left by 8."""
    magnitude = magnitude.to(tl.int32)
    entry = 2 * magnitude - 2 * (magnitude == 1).to(tl.int32) + exponent[:, None]
    return tl.where(magnitude == 0, 0, entry) << 8


@triton.jit
def widen_fp8(code):
    """Return e4m3 bytes as e4m3, or as float16 divided by 2^8 on chips without it."""
    if has_e4m3():
        numbers = code.to(tl.float8e4nv, bitcast=True)
    else:
        wide = code.to(tl.uint16)
        numbers = ((wide & 0x7F) << 7 | (wide & 0x80) << 8).to(tl.uint16).to(tl.float16, bitcast=True)
    return numbers
