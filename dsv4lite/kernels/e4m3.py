"""FP8 e4m3 inside Triton kernels: scales and codes with the bits of ``quantize.quantize_fp8``.

Integer arithmetic computes the codes on chips without e4m3 conversions, and in the interpreter, which rounds differently.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import asked_by_kernels, capability_of, compiled, on_gpu


def native_e4m3(x: Tensor) -> bool:
    """Return whether the chip of ``x`` has e4m3 conversions."""
    return on_gpu(x.device) and capability_of(x.device) >= 89


@asked_by_kernels
def has_e4m3(_semantic: Any = None) -> bool:
    """Return whether the kernel's chip has e4m3 conversions; false in the interpreter."""
    return _semantic is not None and int(_semantic.builder.options.arch.removeprefix("sm")) >= 89


@triton.jit
def e8m0(byte):
    """Return the values of scale bytes: 2^(byte - 127); byte 0 is a subnormal, 255 is NaN. Float32 scales pass through."""
    if byte.dtype == tl.float32:
        scale = byte
    else:
        bits = tl.where(byte == 0, 0x00400000, byte.to(tl.int32) << 23)
        scale = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def fp8_scale_bits(y):
    """Return the float32 bits of the scale of each row of ``y``, float32 [rows, group]: int32 [rows]."""
    return fp8_scale_bits_of(tl.max(tl.abs(y), 1))


@triton.jit
def fp8_scale_bits_of(largest):
    """Return the float32 bits of the scales of groups whose largest magnitudes are ``largest``: int32."""
    # scale_bits(y.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR), FP8_MAX)
    amax = tl.maximum(largest, 1e-4)
    return ((amax * (1.0 / 448.0)).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000


@triton.jit
def fp8_scaled(y, bits):
    """Return ``y`` over its scales, clamped to the range of e4m3."""
    # (y * _scale_and_inverse(bits)[1]).clamp(-FP8_MAX, FP8_MAX)
    scaled = y * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]
    return tl.minimum(tl.maximum(scaled, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)


@triton.jit
def e4m3_bytes(x, NATIVE: tl.constexpr):
    """Return the codes, uint8, of float32 numbers in [-448, 448], rounded to nearest, ties to even."""
    if NATIVE:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 numbers are multiples of 2^-9, the unit in the last place of 2^14.
        tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, tiny, normal)
        code = tl.where(size > 0x7F800000, 0x7F, code)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def e4m3_values(codes):
    """Return the float32 numbers of codes; a NaN code becomes 480."""
    # Exponent and mantissa as float32 bits, shifted to bit 20, are the value times 2^-120.
    bits = ((codes.to(tl.int32) & 0x7F) << 20) | ((codes.to(tl.int32) & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def to_bf16(x):
    """Round float32 to the nearest bfloat16, ties to even; the interpreter's own conversion truncates."""
    if compiled():
        rounded = x.to(tl.bfloat16)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return rounded


@triton.jit
def as_stored(x, out):
    """Return float32 numbers in the dtype to which ``out`` points: as they are, or rounded to bfloat16."""
    return x if out.dtype.element_ty == tl.float32 else to_bf16(x)
