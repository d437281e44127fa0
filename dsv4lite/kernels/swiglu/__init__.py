"""The clamped activation between two products: of plain numbers, or of FP8 and then quantized for the second.

    u = silu(min(gate, limit)) * clamp(up, -limit, limit)      rounded to the activations' dtype
    fp8(u)                                                     per 128 channels

Source: DeepSeek-V4 specification 3.8 and 4.1.  Numerics: the activation in float32, one rounding to the activations' dtype, then
the official quantizer. The kernel's exponential differs in its last place, which here and there moves a code by one.
"""

from __future__ import annotations

from torch import Tensor

from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.kernels.routing import swiglu

GROUP = 128


def swiglu_halves(h_TI: Tensor, limit: float) -> Tensor:
    """Activate; return [T, I] in the dtype of ``h_TI`` [T, 2 I], contiguous: gate, then up."""
    if use_triton(h_TI):
        from dsv4lite.kernels.swiglu.triton import swiglu_halves_triton

        return swiglu_halves_triton(h_TI, limit)
    return swiglu_halves_ref(h_TI, limit)


def swiglu_halves_ref(h_TI: Tensor, limit: float) -> Tensor:
    """See ``swiglu_halves``."""
    gate, up = h_TI.chunk(2, -1)
    return swiglu(gate, up, limit).to(h_TI.dtype)


def swiglu_quantize(h_TI: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Activate and quantize.

    Args:
        h_TI: bfloat16 [T, 2 I], contiguous: gate, then up.
        limit: Of the activation.

    Returns:
        Codes float8_e4m3fn [T, I] and scale bytes uint8 [T, ceil(I / 128)].
    """
    if use_triton(h_TI):
        from dsv4lite.kernels.swiglu.triton import swiglu_quantize_triton

        return swiglu_quantize_triton(h_TI, limit)
    return swiglu_quantize_ref(h_TI, limit)


def swiglu_quantize_ref(h_TI: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """See ``swiglu_quantize``."""
    return quantize_fp8(swiglu_halves_ref(h_TI, limit), GROUP)
