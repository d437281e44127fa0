"""The kernel of the activation between two FP8 products against the reference."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.swiglu import swiglu_halves_ref, swiglu_quantize_ref

pytest.importorskip("triton")

from dsv4lite.kernels.swiglu.triton import swiglu_halves_triton, swiglu_quantize_triton

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(0, 128), (1, 128), (3, 200), (5, 1152), (2, 96)]
if torch.cuda.is_available():
    SHAPES += [(1, 2048), (64, 3072), (8192, 2048)]


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("limit", [0.5, 10.0])
def test_kernel_agrees_with_the_reference(tokens: int, width: int, limit: float) -> None:
    generator = torch.Generator().manual_seed(width)
    h = (4 * torch.randn(tokens, 2 * width, generator=generator)).bfloat16().to(DEVICE)
    (codes, scales), (expected, expected_scales) = swiglu_quantize_triton(h, limit), swiglu_quantize_ref(h, limit)
    assert codes.shape == expected.shape and codes.dtype == expected.dtype and scales.shape == expected_scales.shape
    if tokens:
        same = scales == expected_scales  # the last place of a group's largest number may move its scale
        assert same.float().mean() > 0.99
        moved = (codes.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
        moved = moved[same.repeat_interleave(128, 1)[:, :width]]
        assert moved.max() <= 1 and (moved > 0).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_plain_kernel_agrees_with_the_reference(tokens: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    h = (4 * torch.randn(tokens, 2 * width, generator=generator)).to(dtype).to(DEVICE)
    got, expected = swiglu_halves_triton(h, 2.0), swiglu_halves_ref(h, 2.0)
    torch.testing.assert_close(got, expected, rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=1e-7)


def test_a_group_of_zeros_has_the_least_scale() -> None:
    codes, scales = swiglu_quantize_triton(torch.zeros(1, 256, dtype=torch.bfloat16, device=DEVICE), 10.0)
    assert not codes.view(torch.uint8).any() and scales.item() == swiglu_quantize_ref(torch.zeros(1, 256), 10.0)[1].item()
