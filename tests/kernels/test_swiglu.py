"""The activation between two FP8 products."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.quantize import dequantize_fp8
from dsv4lite.kernels.routing import swiglu
from dsv4lite.kernels.swiglu import swiglu_halves, swiglu_quantize, swiglu_quantize_ref


@pytest.mark.parametrize(("tokens", "width"), [(0, 128), (1, 128), (3, 200), (5, 384)])
def test_codes_are_those_of_the_rounded_activation(tokens: int, width: int) -> None:
    h = (4 * torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(width))).bfloat16()
    codes, scales = swiglu_quantize(h, 2.0)
    assert codes.shape == (tokens, width) and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (tokens, -(-width // 128)) and scales.dtype == torch.uint8
    exact = swiglu(h[:, :width], h[:, width:], 2.0)
    error = (dequantize_fp8(codes, scales, 128) - exact).abs()
    assert (error <= exact.abs() * (2**-4 + 2**-8) + 2**-15).all()
    assert torch.equal(codes.view(torch.uint8), swiglu_quantize_ref(h, 2.0)[0].view(torch.uint8))


def test_plain_activations_are_rounded_once() -> None:
    h = 4 * torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(swiglu_halves(h, 2.0), swiglu(h[:, :20], h[:, 20:], 2.0))
    short = h.bfloat16()
    assert torch.equal(swiglu_halves(short, 2.0), swiglu(short[:, :20], short[:, 20:], 2.0).bfloat16())
