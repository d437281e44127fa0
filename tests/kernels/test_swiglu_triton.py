"""The kernels of the activation between two products against the references."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.swiglu import swiglu_halves, swiglu_quantize
from tests.kernels.tensors import DEVICE, ON_GPU, random

pytest.importorskip("triton")

from dsv4lite.kernels.swiglu.triton import swiglu_halves_triton, swiglu_quantize_triton

pytestmark = pytest.mark.kernel
SHAPES = [(0, 128), (1, 128), (3, 200), (5, 1152), (2, 96)] + ([(1, 2048), (64, 3072), (8192, 2048)] if ON_GPU else [])
shapes = pytest.mark.parametrize(("tokens", "width"), SHAPES)


@shapes
@pytest.mark.parametrize("limit", [0.5, 10.0])
def test_quantized_activations_agree_with_the_reference(tokens: int, width: int, limit: float) -> None:
    h = random(tokens, 2 * width, seed=width, scale=4.0).bfloat16()
    (codes, scales), (expected, expected_scales) = swiglu_quantize_triton(h, limit), swiglu_quantize.reference(h, limit)
    assert codes.shape == expected.shape and codes.dtype == expected.dtype and scales.shape == expected_scales.shape
    if tokens:
        same = scales == expected_scales  # the last place of a group's largest number may move its scale
        assert same.float().mean() > 0.99
        moved = (codes.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
        moved = moved[same.repeat_interleave(128, 1)[:, :width]]
        assert moved.max() <= 1 and (moved > 0).float().mean() < 0.01


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_unquantized_activations_agree_with_the_reference(tokens: int, width: int, dtype: torch.dtype) -> None:
    h = random(tokens, 2 * width, seed=width, scale=4.0).to(dtype)
    got, expected = swiglu_halves_triton(h, 2.0), swiglu_halves.reference(h, 2.0)
    torch.testing.assert_close(got, expected, rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=1e-7)


def test_a_group_of_zeros_has_the_least_scale() -> None:
    h = torch.zeros(1, 256, dtype=torch.bfloat16, device=DEVICE)
    codes, scales = swiglu_quantize_triton(h, 10.0)
    assert not codes.view(torch.uint8).any() and torch.equal(scales, swiglu_quantize.reference(h, 10.0)[1])
