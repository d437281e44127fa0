"""SwiGLU with clamped inputs; with FP8 products the result is quantized for the second product.

    u = silu(min(gate, limit)) * clamp(up, -limit, limit)      rounded to the activations' dtype
    fp8(u)                                                     per 128 channels

Source: DeepSeek-V4 specification 3.8 and 4.1.  Numerics: the activation in float32, one rounding to the activations' dtype, then
the official quantizer. The kernel's exponential differs in the last place, which changes a few codes by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.quantize import FP8_GROUP, quantize_fp8


def silu(x: Tensor) -> Tensor:
    """``x sigmoid(x)`` from elementwise operations whose bits do not depend on an element's place."""
    return x / (1.0 + torch.exp(-x))


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return ``silu(min(gate, limit)) * clamp(up, -limit, limit)`` in float32."""
    return silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


@op("swiglu.triton:swiglu_halves_triton")
def swiglu_halves(h_TI: Tensor, limit: float) -> Tensor:
    """Activate; return [T, I] in the dtype of ``h_TI`` [T, 2 I], contiguous: gate, then up."""
    gate, up = h_TI.chunk(2, -1)
    return swiglu(gate, up, limit).to(h_TI.dtype)


@op("swiglu.triton:swiglu_quantize_triton")
def swiglu_quantize(h_TI: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Activate and quantize.

    Args:
        h_TI: bfloat16 [T, 2 I], contiguous: gate, then up.

    Returns:
        Codes float8_e4m3fn [T, I] and scale bytes uint8 [T, ceil(I / 128)].
    """
    return quantize_fp8(swiglu_halves.reference(h_TI, limit), FP8_GROUP)
