"""Helpers of the attention kernels: e4m3 codes of rows widened to bfloat16, tiles put side by side, results rotated back."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4lite.kernels.dispatch import compiled
from dsv4lite.kernels.e4m3 import e4m3_values, e8m0, to_bf16

LOG2_E = 1.4426950408889634


@triton.jit
def narrowed(x, FLOAT32: tl.constexpr):
    """Round float32 to bfloat16 unless FLOAT32; in the interpreter, which cannot multiply bfloat16, keep it in float32."""
    if FLOAT32:
        rounded = x
    elif compiled():
        rounded = x.to(tl.bfloat16)
    else:
        rounded = to_bf16(x).to(tl.float32)
    return rounded


WIDEN_E4M3 = tl.constexpr("""{
.reg .b32 t, f, z;
mov.b32 f, 0x7B807B80; mov.b32 z, 0x80008000;
prmt.b32 t, $2, 0, 0x9180;
shl.b32 t, t, 4; and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 t, t, f, z; fma.rn.bf16x2 $0, t, $3, z;
prmt.b32 t, $2, 0, 0xB3A2;
shl.b32 t, t, 4; and.b32 t, t, 0x87F087F0;
fma.rn.bf16x2 t, t, f, z; fma.rn.bf16x2 $1, t, $4, z;
}""")


@triton.jit
def _widen(codes, scale):
    """Return e4m3 codes [R, 64] times a power of two for each row, given as e8m0 byte int32 [R]."""
    # Reference: dequantize_fp8(codes, scales, KV_GROUP).to(dtype)
    # Exponent and mantissa of a code, shifted to bit 4 of a bfloat16, are 2^-120 times the value. The assembly takes four codes at
    # a time, each with its own scale, because the compiler chooses which four codes a thread has.
    if compiled():
        bits = tl.where(scale == 0, 0x0040, tl.where(scale == 255, 0x7FC0, scale << 7))
        factor = bits.to(tl.int16)[:, None]
        wide = tl.inline_asm_elementwise(WIDEN_E4M3, "=r,=r,r,r,r", [codes, factor], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = e4m3_values(codes) * e8m0(scale)[:, None]
    return wide


@triton.jit
def _group(data, live, number: tl.constexpr, VOLATILE: tl.constexpr):
    return tl.load(data[:, None] + number * 64 + tl.arange(0, 64)[None, :], mask=live[:, None], other=0, volatile=VOLATILE)


@triton.jit
def fetch(data, scales, live, NOPE: tl.constexpr, FRESH_ROW: tl.constexpr, VOLATILE: tl.constexpr):
    """Return a piece's bytes: codes in groups of 64 channels (unused groups repeat the first), the rotated channels, the scales."""
    tail = tl.multiple_of((data + NOPE).to(tl.pointer_type(tl.bfloat16)), 16 if FRESH_ROW % 16 == 0 else 8)
    tail = tl.load(tail[:, None] + tl.arange(0, 64)[None, :], mask=live[:, None], other=0.0, volatile=VOLATILE)
    words = tl.load(scales.to(tl.pointer_type(tl.int64)), mask=live, other=0, volatile=VOLATILE)
    c0 = _group(data, live, 0, VOLATILE)
    c1 = _group(data, live, 1, VOLATILE) if NOPE > 64 else c0
    c2 = _group(data, live, 2, VOLATILE) if NOPE > 128 else c0
    c3 = _group(data, live, 3, VOLATILE) if NOPE > 192 else c0
    c4 = _group(data, live, 4, VOLATILE) if NOPE > 256 else c0
    c5 = _group(data, live, 5, VOLATILE) if NOPE > 320 else c0
    c6 = _group(data, live, 6, VOLATILE) if NOPE > 384 else c0
    return c0, c1, c2, c3, c4, c5, c6, tail, words


@triton.jit
def scaled(codes, words, number: tl.constexpr):
    return _widen(codes, ((words >> (8 * number)) & 255).to(tl.int32))


@triton.jit
def joined(a, b, c, d, TILES: tl.constexpr):
    """Return the first ``TILES`` tiles side by side, 1, 2 or 4; no value moves between threads."""
    if TILES == 1:
        both = a
    elif TILES == 2:
        both = tl.permute(tl.join(a, b), (0, 2, 1))
    else:
        both = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(both, (a.shape[0], TILES * a.shape[1]))


@triton.jit
def rotated_back(o, cos, sin, HEADS: tl.constexpr, WIDTH: tl.constexpr, BEGIN: tl.constexpr, ROPE: tl.constexpr):
    """Rotate back ROPE channels, from BEGIN on, of results [HEADS, WIDTH] by the token's angles; BEGIN may be negative."""
    # Reference: rope(o, cos, sin, inverse=True)
    pair = tl.arange(0, WIDTH // 2) - BEGIN // 2
    turned = (pair >= 0) & (pair < ROPE // 2)
    c = tl.load(cos + pair, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=turned, other=0.0)[None, :]
    a, b = tl.split(tl.reshape(o.to(tl.float32), (HEADS, WIDTH // 2, 2)))
    turned = turned[None, :]
    return tl.reshape(tl.join(tl.where(turned, a * c + b * s, a), tl.where(turned, b * c - a * s, b)), (HEADS, WIDTH))
