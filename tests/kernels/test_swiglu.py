"""The activation between two products, and its kernels against the references."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.quantize import dequantize_fp8
from dsv4lite.kernels.swiglu import silu, swiglu, swiglu_halves, swiglu_quantize
from tests.kernels.tensors import DEVICE, ON_GPU, assert_independent, cpu_random, launch, random


def test_silu_is_stable_and_equals_the_formula() -> None:
    x = torch.cat([cpu_random(257, scale=8.0), torch.tensor([0.0, -0.0, 80.0, -80.0, 1e4, -1e4])])
    torch.testing.assert_close(silu(x).double(), x.double() * torch.sigmoid(x.double()), rtol=2e-6, atol=1e-30)


def test_clamp_is_one_sided_for_the_gate_and_two_sided_for_the_other() -> None:
    gate, up = torch.tensor([5.0, -5.0, 0.5, 0.5]), torch.tensor([1.0, 1.0, 7.0, -7.0])
    expected = torch.nn.functional.silu(torch.tensor([2.0, -5.0, 0.5, 0.5])) * torch.tensor([1.0, 1.0, 2.0, -2.0])
    torch.testing.assert_close(swiglu(gate, up, 2.0), expected, rtol=1e-6, atol=1e-7)
    assert swiglu(gate.to(torch.bfloat16), up.to(torch.bfloat16), 2.0).dtype == torch.float32


def test_activating_a_token_does_not_depend_on_the_others() -> None:
    gate, up = cpu_random(100, 19), cpu_random(100, 19, seed=2)
    assert_independent(lambda part: [swiglu(gate[part], up[part], 0.6)])


@pytest.mark.parametrize(("tokens", "width"), [(0, 128), (1, 128), (3, 200), (5, 384)])
def test_codes_are_those_of_the_rounded_activation(tokens: int, width: int) -> None:
    h = cpu_random(tokens, 2 * width, seed=width, scale=4.0).bfloat16()
    codes, scales = swiglu_quantize(h, 2.0)
    assert codes.shape == (tokens, width) and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (tokens, -(-width // 128)) and scales.dtype == torch.uint8
    exact = swiglu(h[:, :width], h[:, width:], 2.0)
    error = (dequantize_fp8(codes, scales, 128) - exact).abs()
    assert (error <= exact.abs() * (2**-4 + 2**-8) + 2**-15).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantized_activations_are_rounded_once(dtype: torch.dtype) -> None:
    h = cpu_random(3, 40, scale=4.0).to(dtype)
    assert torch.equal(swiglu_halves(h, 2.0), swiglu(h[:, :20], h[:, 20:], 2.0).to(dtype))


SHAPES = [(0, 128), (1, 128), (3, 200), (5, 1152), (2, 96)] + ([(1, 2048), (64, 3072), (8192, 2048)] if ON_GPU else [])
shapes = pytest.mark.parametrize(("tokens", "width"), SHAPES)


@pytest.mark.kernel
@shapes
@pytest.mark.parametrize("limit", [0.5, 10.0])
def test_quantized_activations_agree_with_the_reference(tokens: int, width: int, limit: float) -> None:
    h = random(tokens, 2 * width, seed=width, scale=4.0).bfloat16()
    (codes, scales), (expected, expected_scales) = launch(swiglu_quantize, h, limit), swiglu_quantize.reference(h, limit)
    assert codes.shape == expected.shape and codes.dtype == expected.dtype and scales.shape == expected_scales.shape
    if tokens:
        same = scales == expected_scales  # the last place of a group's largest number may move its scale
        assert same.float().mean() > 0.99
        moved = (codes.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
        moved = moved[same.repeat_interleave(128, 1)[:, :width]]
        assert moved.max() <= 1 and (moved > 0).float().mean() < 0.01


@pytest.mark.kernel
@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_unquantized_activations_agree_with_the_reference(tokens: int, width: int, dtype: torch.dtype) -> None:
    h = random(tokens, 2 * width, seed=width, scale=4.0).to(dtype)
    got, expected = launch(swiglu_halves, h, 2.0), swiglu_halves.reference(h, 2.0)
    torch.testing.assert_close(got, expected, rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=1e-7)


@pytest.mark.kernel
def test_a_group_of_zeros_has_the_least_scale() -> None:
    h = torch.zeros(1, 256, dtype=torch.bfloat16, device=DEVICE)
    codes, scales = launch(swiglu_quantize, h, 10.0)
    assert not codes.view(torch.uint8).any() and torch.equal(scales, swiglu_quantize.reference(h, 10.0)[1])
