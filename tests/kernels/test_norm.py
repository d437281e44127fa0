"""Norms against float64."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.norm import rms_norm, rms_norm_heads


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(0, 48), (1, 512), (63, 48), (257, 4, 33)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_equals_the_formula(shape: tuple[int, ...], weighted: bool) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() if weighted else 1.0)
    got = rms_norm(x, weight if weighted else None, 1e-6)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-7)
    low = rms_norm(x.to(torch.bfloat16), weight if weighted else None, 1e-6)
    assert low.dtype == torch.bfloat16


def test_rms_norm_of_bfloat16_rounds_once() -> None:
    x, weight = random(63, 512).to(torch.bfloat16), random(512, seed=1)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    got = rms_norm(x, weight, 1e-6)
    # Half a unit of bfloat16, and what float32 adds to it.
    assert ((got.double() - exact).abs() <= exact.abs() * (2.0**-8 * 1.001)).all()
    assert (got == exact.to(torch.bfloat16)).float().mean() > 0.999


def test_rms_norm_epsilon_counts() -> None:
    assert torch.allclose(rms_norm(torch.full((1, 4), 1e-3), None, 1e-6), torch.full((1, 4), 0.5**0.5))
    assert rms_norm(torch.zeros(1, 4), None, 1e-6).eq(0).all()


def test_head_norm_in_float32_equals_the_formula() -> None:
    q = random(33, 5, 24)
    wide = q.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm_heads(q, 1e-6).double(), expected, rtol=1e-6, atol=1e-7)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round float64 to bfloat16 and back; through float32 nothing that was exact there rounds twice."""
    return x.float().to(torch.bfloat16).double()


@pytest.mark.parametrize("shape", [(0, 4, 512), (1, 1, 512), (3, 16, 512), (17, 5, 64)])
def test_head_norm_in_bfloat16_rounds_at_every_step(shape: tuple[int, ...]) -> None:
    q = random(*shape).to(torch.bfloat16)
    mean = rounded(rounded(q.double().square()).mean(-1, keepdim=True))
    factor = rounded(rounded(mean + 1e-6).rsqrt())
    expected = rounded(q.double() * factor)
    got = rms_norm_heads(q, 1e-6)
    assert got.dtype == torch.bfloat16
    # The mean is summed in float32, so a rare head may get the neighbouring factor.
    wrong = (got.double() != expected).any(-1)
    assert wrong.float().mean() <= 0.02 if got.numel() else got.shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_norming_a_token_does_not_depend_on_the_others(dtype: torch.dtype, heads: int) -> None:
    """A regression: bfloat16 rsqrt rounded twice in the tail of torch's vector loop."""
    q = random(100, heads, 64).to(dtype)
    weight = random(64, seed=1)
    everything, weighted = rms_norm_heads(q, 1e-6), rms_norm(q, weight, 1e-6)
    for a in range(0, 100, 7):
        for count in (1, 2, 5, 23):
            part = slice(a, a + count)
            assert torch.equal(rms_norm_heads(q[part], 1e-6), everything[part])
            assert torch.equal(rms_norm(q[part], weight, 1e-6), weighted[part])
