"""Block quantization with power-of-two scales: FP8 e4m3, FP4 e2m1, and the Hadamard transform before FP4.

    s = 2^ceil(log2(amax / qmax))          exponent taken from the float's bits, never from an approximate log2
    q = round_to_nearest_even(clamp(x / s, -qmax, qmax))

Source: DeepSeek-V4 specification 4.1-4.3 and 2.3.  Numerics: codes and scale bytes equal the official kernels' bit for bit.
A scale is stored as an e8m0 byte b and means 2^(b - 127).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op

FP8_GROUP = 128  # activations have a scale per 128 channels, weights per 128 x 128
FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4  # of activations
FP8_WEIGHT_AMAX_FLOOR = FP8_MAX * 2.0**-126
FP4_AMAX_FLOOR = FP4_MAX * 2.0**-126
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_bits(amax: Tensor, qmax: float) -> Tensor:
    """Return the float32 bits of ``2^ceil(log2(amax / qmax))``, int32, exactly, for positive float32 ``amax``.

    A mantissa that is not zero carries into the exponent. The e8m0 byte of the scale is ``bits >> 23``.
    """
    return ((amax * (1.0 / qmax)).view(torch.int32) + 0x7FFFFF) & 0x7F800000


def _scale_and_inverse(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return a power of two and its inverse, float32 [..., 1], from bits [...]."""
    return bits.view(torch.float32)[..., None], (0x7F000000 - bits).view(torch.float32)[..., None]


def e8m0_to_float(scale: Tensor) -> Tensor:
    """Return float32 values of e8m0 scales, ``float8_e8m0fnu`` or uint8 bytes (255 is NaN); float scales pass through."""
    if scale.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return scale.float()
    return scale.view(torch.float8_e8m0fnu).float()


def _groups(x: Tensor, group: int) -> Tensor:
    width = x.shape[-1]
    if width % group:
        x = torch.nn.functional.pad(x, (0, group - width % group))
    return torch.unflatten(x.float(), -1, (-1, group))


@op("quantize.triton:quantize_fp8_triton", suits=lambda x, group: group & (group - 1) == 0)
def quantize_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize groups of the last dimension to e4m3.

    Args:
        x: Float [..., N]. A NaN stays NaN and makes its whole group NaN (the official kernel's clamp turns it into a number).
        group: Channels that share a scale; the last group may be shorter.

    Returns:
        Codes float8_e4m3fn [..., N] and scale bytes uint8 [..., ceil(N / group)].
    """
    codes, bits = _fp8_groups(x, group)
    return codes.flatten(-2)[..., : x.shape[-1]], (bits >> 23).to(torch.uint8)


def _fp8_groups(x: Tensor, group: int, floor: float = FP8_AMAX_FLOOR) -> tuple[Tensor, Tensor]:
    """Return codes [..., groups, group] and the bits of their scales [..., groups]."""
    y = _groups(x, group)
    bits = scale_bits(y.abs().amax(-1).clamp_min(floor), FP8_MAX)
    return (y * _scale_and_inverse(bits)[1]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), bits


def dequantize_fp8(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return float32 [..., N] from e4m3 codes and a scale byte or float scale per ``group`` channels."""
    return (_groups(codes.float(), group) * e8m0_to_float(scales)[..., None]).flatten(-2)[..., : codes.shape[-1]]


def round_fp8(x: Tensor, group: int) -> Tensor:
    """Round to e4m3 and back, in the dtype of ``x``: what a reader of the quantized tensor sees."""
    codes, bits = _fp8_groups(x, group)
    return (codes.float() * bits.view(torch.float32)[..., None]).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def e2m1_codes(x: Tensor) -> Tensor:
    """Return the 4-bit codes, uint8, of values in [-6, 6] rounded to nearest, ties to the even code."""
    a = x.abs()
    # Thresholds are half way between neighbours; a tie rounds up if the upper code is even.
    code = (a > 0.25).to(torch.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """Return the float32 values of 4-bit codes."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def pack_fp4(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [..., N] into bytes [..., N / 2]; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Return 4-bit codes uint8 [..., N] of packed bytes [..., N / 2] (uint8 or int8)."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def quantize_fp4(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """Quantize groups of the last dimension to e2m1.

    Returns:
        Codes uint8 [..., N], one per byte, and scale bytes uint8 [..., N / group].
    """
    y = _groups(x, group)
    bits = scale_bits(y.abs().amax(-1).clamp_min(FP4_AMAX_FLOOR), FP4_MAX)
    scaled = (y * _scale_and_inverse(bits)[1]).clamp(-FP4_MAX, FP4_MAX)
    return e2m1_codes(scaled).flatten(-2)[..., : x.shape[-1]], (bits >> 23).to(torch.uint8)


@op("quantize.triton:quantize_packed_fp4_triton")
def quantize_packed_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize groups of 32 of the last dimension to e2m1, as a checkpoint stores it.

    Args:
        x: Finite floats [..., N]; N is a multiple of 32.

    Returns:
        Two codes per byte, uint8 [..., N / 2], and scale bytes uint8 [..., N / 32].
    """
    codes, scales = quantize_fp4(x)
    return pack_fp4(codes), scales


def dequantize_fp4(codes: Tensor, scales: Tensor, group: int = 32) -> Tensor:
    """Return float32 [..., N] from unpacked codes and scale bytes."""
    return (_groups(e2m1_values(codes), group) * e8m0_to_float(scales)[..., None]).flatten(-2)[..., : codes.shape[-1]]


def round_fp4(x: Tensor, group: int = 32) -> Tensor:
    """Round to e2m1 and back, in the dtype of ``x``."""
    codes, scales = quantize_fp4(x, group)
    return dequantize_fp4(codes, scales, group).to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, a power of two; Sylvester order, float32 inside, one rounding."""
    width = x.shape[-1]
    y, half = x.float(), 1
    while half < width:
        pair = y.unflatten(-1, (-1, 2, half))
        y = torch.stack([pair[..., 0, :] + pair[..., 1, :], pair[..., 0, :] - pair[..., 1, :]], -2).flatten(-3)
        half *= 2
    scale: float = width**-0.5
    return (y * scale).to(x.dtype)


def quantize_matrix(weight: Tensor, *, fp4: bool) -> tuple[Tensor, Tensor]:
    """Return a matrix as a quantized checkpoint stores it. A result of ``dequantize_matrix`` keeps its numbers exactly.

    Args:
        weight: Float [out, in]; of FP4 ``in`` is a multiple of 32.
        fp4: Packed FP4 with a scale per row and 32 inputs; otherwise FP8 with a scale per 128 x 128.

    Returns:
        int8 [out, in / 2] or float8_e4m3fn [out, in], and float8_e8m0fnu scales.
    """
    if fp4:
        packed, scales = quantize_packed_fp4(weight)
        return packed.view(torch.int8), scales.view(torch.float8_e8m0fnu)
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % FP8_GROUP, 0, -rows % FP8_GROUP))
    blocks = padded.unflatten(0, (-1, FP8_GROUP)).unflatten(2, (-1, FP8_GROUP)).transpose(1, 2)
    codes, bits = _fp8_groups(blocks.flatten(2), FP8_GROUP**2, FP8_WEIGHT_AMAX_FLOOR)
    whole = codes.view(blocks.shape).transpose(1, 2).reshape(padded.shape)[:rows, :cols]
    return whole.contiguous(), (bits[..., 0] >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def dequantize_matrix(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a checkpoint matrix as float32 [..., out, in]; the format follows from the dtypes.

    Args:
        weight: float8_e4m3fn [..., out, in] with 128x128 scales, packed FP4 int8/uint8 [..., out, in / 2] with scales per row
            and 32 inputs, or plain floats.
        scale: e8m0 (or float32, for FP8) scales; ``None`` for plain floats.
    """
    if weight.dtype == torch.float8_e4m3fn:
        assert scale is not None
        rows, cols = weight.shape[-2:]
        wide = e8m0_to_float(scale).repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :cols]
        return weight.float() * wide
    if weight.dtype in (torch.int8, torch.uint8):
        assert scale is not None
        return dequantize_fp4(unpack_fp4(weight), scale.view(torch.uint8), 32)
    return weight.float()
