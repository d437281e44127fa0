"""The activation between two products."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.quantize import dequantize_fp8
from dsv4lite.kernels.swiglu import silu, swiglu, swiglu_halves, swiglu_quantize


def random(*shape: int, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_silu_is_stable_and_equals_the_formula() -> None:
    x = torch.cat([random(257, scale=8.0), torch.tensor([0.0, -0.0, 80.0, -80.0, 1e4, -1e4])])
    torch.testing.assert_close(silu(x).double(), x.double() * torch.sigmoid(x.double()), rtol=2e-6, atol=1e-30)


def test_clamp_is_one_sided_for_the_gate_and_two_sided_for_the_other() -> None:
    gate, up = torch.tensor([5.0, -5.0, 0.5, 0.5]), torch.tensor([1.0, 1.0, 7.0, -7.0])
    expected = torch.nn.functional.silu(torch.tensor([2.0, -5.0, 0.5, 0.5])) * torch.tensor([1.0, 1.0, 2.0, -2.0])
    torch.testing.assert_close(swiglu(gate, up, 2.0), expected, rtol=1e-6, atol=1e-7)
    assert swiglu(gate.to(torch.bfloat16), up.to(torch.bfloat16), 2.0).dtype == torch.float32


def test_activating_a_token_does_not_depend_on_the_others() -> None:
    gate, up = random(100, 19, scale=1.0), random(100, 19, seed=2, scale=1.0)
    activated = swiglu(gate, up, 0.6)
    for a in range(0, 100, 7):
        for count in (1, 2, 5, 23):
            part = slice(a, a + count)
            assert torch.equal(swiglu(gate[part], up[part], 0.6), activated[part])


@pytest.mark.parametrize(("tokens", "width"), [(0, 128), (1, 128), (3, 200), (5, 384)])
def test_codes_are_those_of_the_rounded_activation(tokens: int, width: int) -> None:
    h = random(tokens, 2 * width, seed=width).bfloat16()
    codes, scales = swiglu_quantize(h, 2.0)
    assert codes.shape == (tokens, width) and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (tokens, -(-width // 128)) and scales.dtype == torch.uint8
    exact = swiglu(h[:, :width], h[:, width:], 2.0)
    error = (dequantize_fp8(codes, scales, 128) - exact).abs()
    assert (error <= exact.abs() * (2**-4 + 2**-8) + 2**-15).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantized_activations_are_rounded_once(dtype: torch.dtype) -> None:
    h = random(3, 40).to(dtype)
    assert torch.equal(swiglu_halves(h, 2.0), swiglu(h[:, :20], h[:, 20:], 2.0).to(dtype))
