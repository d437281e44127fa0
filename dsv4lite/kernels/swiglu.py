"""The clamped activation between two FP8 products, quantized for the second.

    u = fp8(bf16(silu(min(gate, limit)) * clamp(up, -limit, limit)))      per 128 channels

Source: DeepSeek-V4 specification 3.8 and 4.1.  Numerics: the activation in float32, one rounding to the activations' dtype, then
the official quantizer. The kernel's exponential differs in its last place, which here and there moves a code by one.
"""

from __future__ import annotations

from torch import Tensor

from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.moe import swiglu
from dsv4lite.kernels.quantize import quantize_fp8

GROUP = 128


def swiglu_quantize(h_TI: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Activate and quantize.

    Args:
        h_TI: bfloat16 [T, 2 I], contiguous: gate, then up.
        limit: Of the activation.

    Returns:
        Codes float8_e4m3fn [T, I] and scale bytes uint8 [T, ceil(I / 128)].
    """
    if use_triton(h_TI):
        from dsv4lite.kernels.swiglu_triton import swiglu_quantize_triton

        return swiglu_quantize_triton(h_TI, limit)
    return swiglu_quantize_ref(h_TI, limit)


def swiglu_quantize_ref(h_TI: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """See ``swiglu_quantize``."""
    gate, up = h_TI.chunk(2, -1)
    return quantize_fp8(swiglu(gate, up, limit).to(h_TI.dtype), GROUP)
