"""Helpers of kernels that write rows: scales, codes, norms, rotation and the Hadamard transform, on blocks in registers.

Blocks are float32; they hold bfloat16 numbers where the references round. All operations are elementwise or exact and return the
references' bits, except for sums of squares, whose order the compiler chooses: ``inverse_rms`` is within two units in the last
place of ``torch.rsqrt``. That can change a rounding to bfloat16 by one unit (seen in one of 10^4 numbers).

Launch with ``enable_fp_fusion=False``: the references round products before they add them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import compiled
from dsv4lite.kernels.e4m3 import e4m3_bytes, to_bf16
from dsv4lite.kernels.rows import KV_GROUP, Fp4Key, Fp8Kv, RowFormat, RowStore, UnquantizedRow

KV, FP4_KEY, FP8_KEY, UNQUANTIZED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # kinds of rows


@triton.jit
def only_if(condition, mask):
    # ``mask & condition`` with a scalar condition, which the interpreter would turn into integers
    return mask & (tl.broadcast_to(condition.to(tl.int32), mask.shape) != 0)


@triton.jit
def opaque(x):
    # A copy of bfloat16 numbers, behind which the compiler does not see how they came about.
    if compiled():
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    return x


@triton.jit
def bf16(x):
    # .to(torch.bfloat16), in float32
    return to_bf16(x).to(tl.float32)


@triton.jit
def rounded(x, FLOAT32: tl.constexpr):
    # .to(dtype), which is float32 or bfloat16, in float32
    return x if FLOAT32 else bf16(x)


@triton.jit
def power_scale(amax, QMAX: tl.constexpr):
    # scale_bits: 2^ceil(log2(amax / qmax)); returns its e8m0 byte and its inverse
    bits = ((amax * (1.0 / QMAX)).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits >> 23, (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def fp8_scale(y, AXIS: tl.constexpr):
    # y.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR)
    return power_scale(tl.maximum(tl.max(tl.abs(y), axis=AXIS), 1e-4), 448.0)


@triton.jit
def fp4_scale(y, AXIS: tl.constexpr):
    # y.abs().amax(-1).clamp_min(FP4_AMAX_FLOOR), which is 6 * 2^-126
    return power_scale(tl.maximum(tl.max(tl.abs(y), axis=AXIS), 7.052966104933725e-38), 6.0)


@triton.jit
def e2m1_codes(x):
    # e2m1_codes, one per byte
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - (126 << 1)
    # Below 1 numbers are multiples of 0.5: the spacing of floats at 2^22.
    small = (tl.abs(x) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    code = tl.where(magnitude < 0x3F800000, small, normal)
    return (tl.minimum(code, 7) | ((bits >> 28) & 8)).to(tl.uint8)


@triton.jit
def e2m1_values(codes):
    # e2m1_values, of int32 codes: exponent and mantissa 22 bits up are the value times 2^-126
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e2m1_round(x):
    # e2m1_values(e2m1_codes(x)), the sign of zero included
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) & 0x7FC00000
    small = ((tl.abs(x) + 4194304.0) - 4194304.0).to(tl.int32, bitcast=True)
    value = tl.where(magnitude < 0x3F800000, small, normal)
    return (value | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def inverse_root(mean):
    # torch.rsqrt, both operations rounded to nearest
    return tl.math.div_rn(1.0, tl.math.sqrt_rn(mean))


@triton.jit
def mean_of(total, WIDTH: tl.constexpr):
    # total / WIDTH, rounded to nearest
    if WIDTH & (WIDTH - 1) == 0:
        mean = total * (1.0 / WIDTH)
    else:
        mean = tl.math.div_rn(total, WIDTH * 1.0)
    return mean


@triton.jit
def inverse_rms(x, eps, WIDTH: tl.constexpr):
    # torch.rsqrt(y.square().mean() + eps), over all of a two-dimensional block
    return inverse_root(mean_of(tl.sum(tl.sum(x * x, axis=1), axis=0), WIDTH) + eps)


@triton.jit
def rotate(x, cos, sin, turned, ROWS: tl.constexpr, WIDTH: tl.constexpr, FLOAT32: tl.constexpr):
    # (a, b) -> (a cos - b sin, a sin + b cos) where ``turned``; cos, sin, turned are of [ROWS, WIDTH / 2], or broadcast to it
    a, b = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    c = tl.where(turned, rounded(a * cos - b * sin, FLOAT32), a)
    d = tl.where(turned, rounded(a * sin + b * cos, FLOAT32), b)
    return tl.reshape(tl.join(c, d), (ROWS, WIDTH))


@triton.jit
def rotate_tail(
    x, cos, sin, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    # rope of rows [ROWS, PADDED]: rotates the last ROPE of WIDTH channels by the angles at ``cos`` and ``sin``
    pair = tl.arange(0, PADDED // 2) - (WIDTH - ROPE) // 2
    turned = (pair >= 0) & (pair < ROPE // 2)
    c = tl.load(cos + pair, mask=turned, other=1.0)
    s = tl.load(sin + pair, mask=turned, other=0.0)
    return rotate(x, c[None, :], s[None, :], turned[None, :], ROWS, PADDED, FLOAT32)


@triton.jit
def row_angles(cos, sin, WIDTH: tl.constexpr, ROWS: tl.constexpr, ROPE: tl.constexpr):
    """Return cos and sin of the pairs of a vector of WIDTH channels in ROWS of 64, and which pairs rotate: the last ROPE / 2."""
    if ROPE == 64 and WIDTH % 64 == 0:
        pair = tl.arange(0, 32)
        c = tl.load(cos + pair)[None, :]
        s = tl.load(sin + pair)[None, :]
        turned = tl.arange(0, ROWS)[:, None] == WIDTH // 64 - 1
    else:
        pair = tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :] - (WIDTH - ROPE) // 2
        turned = (pair >= 0) & (pair < ROPE // 2)
        c = tl.load(cos + pair, mask=turned, other=1.0)
        s = tl.load(sin + pair, mask=turned, other=0.0)
    return c, s, turned


@triton.jit
def _butterflies(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    pair = tl.reshape(x, (ROWS, WIDTH // (2 * HALF), 2, HALF))
    a, b = tl.split(tl.permute(pair, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, WIDTH))


@triton.jit
def hadamard_float32(x, ROWS: tl.constexpr, LOG: tl.constexpr):
    # hadamard, of rows of 2^LOG in float32; the same additions in the same order
    WIDTH: tl.constexpr = 1 << LOG
    for stage in tl.static_range(LOG):
        x = _butterflies(x, ROWS, WIDTH, 1 << stage)
    SCALE: tl.constexpr = WIDTH**-0.5
    return x * SCALE


@triton.jit
def hadamard_rows(x, ROWS: tl.constexpr, LOG: tl.constexpr):
    # hadamard, of rows of 2^LOG, one rounding to bfloat16
    return bf16(hadamard_float32(x, ROWS, LOG))


# Codes are computed by integer arithmetic on every chip, because there are few. A scaled number exceeds 448 at most by a rounding
# error and then rounds to 448, so nothing is clamped.


@triton.jit
def store_kv(x, data, scales, page, ROWS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr):
    """Fp8Kv.pack, of a vector in rows of 64: codes of NOPE channels, then ROPE in bfloat16 at ``data``, bytes at ``scales``.

    Nothing is stored if ``page`` is negative.
    """
    wanted = page >= 0
    row = tl.arange(0, ROWS)
    at = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    byte, inverse = fp8_scale(x, 1)
    tl.store(data + at, e4m3_bytes(x * inverse[:, None], False), mask=only_if(wanted, at < NOPE))
    tail = (data + NOPE).to(tl.pointer_type(tl.bfloat16))
    tl.store(tail + (at - NOPE), x.to(tl.bfloat16), mask=only_if(wanted, (at >= NOPE) & (at < NOPE + ROPE)))
    # scales padded with zeros to a multiple of eight
    GROUPS: tl.constexpr = NOPE // 64
    BYTES: tl.constexpr = (GROUPS + 7) // 8 * 8
    byte = tl.where(row < GROUPS, byte, 0).to(tl.uint8)
    tl.store(scales + row, byte, mask=only_if(wanted, row < BYTES))
    if BYTES > ROWS:
        # BYTES - ROWS is a multiple of ROWS, because ROWS is a power of two
        for more in tl.static_range(ROWS, BYTES, ROWS):
            tl.store(scales + more + row, tl.zeros((ROWS,), tl.uint8), mask=only_if(wanted, more + row < BYTES))


@triton.jit
def store_fp4(x, data, scales, groups, GROUPS: tl.constexpr):
    """quantize_packed_fp4 of numbers in rows of 32; stores the first ``groups`` rows."""
    group = tl.arange(0, GROUPS)
    byte, inverse = fp4_scale(x, 1)
    low, high = tl.split(tl.reshape(e2m1_codes(x * inverse[:, None]), (GROUPS, 16, 2)))
    tl.store(data + group[:, None] * 16 + tl.arange(0, 16)[None, :], low | (high << 4), mask=group[:, None] < groups)
    tl.store(scales + group, byte.to(tl.uint8), mask=group < groups)


@triton.jit
def store_fp8_key(x, data, scales, WIDTH: tl.constexpr):
    """Fp8Key.pack, of a vector in one row."""
    byte, inverse = fp8_scale(x, 1)
    tl.store(data + tl.arange(0, WIDTH)[None, :], e4m3_bytes(x * inverse[:, None], False))
    tl.store(scales.to(tl.pointer_type(tl.int32)) + tl.arange(0, 1), byte << 23)


@triton.jit
def store_row(
    y, memory, place, page, WIDTH: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Store a vector at ``place`` of a page of PLACES rows at ``memory``; kv and unquantized rows only if ``page`` >= 0."""
    if KIND == KV:
        DATA: tl.constexpr = WIDTH + ROPE
        SCALES: tl.constexpr = ((WIDTH - ROPE) // 64 + 7) // 8 * 8
        y = tl.reshape(y, (ROWS, 64))
        store_kv(y, memory + place * DATA, memory + PLACES * DATA + place * SCALES, page, ROWS, WIDTH - ROPE, ROPE)
    elif KIND == FP4_KEY:
        scales = memory + PLACES * (WIDTH // 2) + place * (WIDTH // 32)
        store_fp4(tl.reshape(y, (WIDTH // 32, 32)), memory + place * (WIDTH // 2), scales, WIDTH // 32, WIDTH // 32)
    elif KIND == FP8_KEY:
        store_fp8_key(tl.reshape(y, (1, WIDTH)), memory + place * WIDTH, memory + PLACES * WIDTH + place * 4, WIDTH)
    else:
        at = tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(memory + place * WIDTH + at, y.to(memory.dtype.element_ty), mask=only_if(page >= 0, at < WIDTH))


def kind_of(fmt: RowFormat) -> int:
    """Return the KIND of a format that kernels can write."""
    if isinstance(fmt, UnquantizedRow):
        assert fmt.width % 2 == 0, fmt
        return 3
    if isinstance(fmt, Fp8Kv):
        assert fmt.rope == KV_GROUP and fmt.nope % KV_GROUP == 0, fmt
        return 0
    assert fmt.width & (fmt.width - 1) == 0, fmt
    return 1 if isinstance(fmt, Fp4Key) else 2


def memory_of(store: RowStore) -> Tensor:
    """Return a store's memory for kernels: bytes, or unquantized rows in their dtype."""
    return store.memory.view(store.format.dtype) if isinstance(store.format, UnquantizedRow) else store.memory
