"""Norms against float64, and the kernel against the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels import dispatch
from dsv4lite.kernels.norm import rms_norm, rms_norm_heads
from tests.kernels.tensors import DEVICE, ON_GPU, assert_independent, cpu_random, kernel_test, launch, random

on_cpu = partial(cpu_random, scale=3.0)


@pytest.mark.parametrize("shape", [(0, 48), (1, 512), (63, 48), (257, 4, 33)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_equals_the_formula(shape: tuple[int, ...], weighted: bool) -> None:
    x, weight = on_cpu(*shape), on_cpu(shape[-1], seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() if weighted else 1.0)
    got = rms_norm(x, weight if weighted else None, 1e-6)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-7)
    low = rms_norm(x.to(torch.bfloat16), weight if weighted else None, 1e-6)
    assert low.dtype == torch.bfloat16


def test_rms_norm_of_bfloat16_rounds_once() -> None:
    x, weight = on_cpu(63, 512).to(torch.bfloat16), on_cpu(512, seed=1)
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
    q = on_cpu(33, 5, 24)
    wide = q.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm_heads(q, 1e-6).double(), expected, rtol=1e-6, atol=1e-7)


def rounded(x: Tensor) -> Tensor:
    """Round float64 to bfloat16 and back; through float32 nothing that was exact there rounds twice."""
    return x.float().to(torch.bfloat16).double()


@pytest.mark.parametrize("shape", [(0, 4, 512), (1, 1, 512), (3, 16, 512), (17, 5, 64)])
def test_head_norm_in_bfloat16_rounds_at_every_step(shape: tuple[int, ...]) -> None:
    q = on_cpu(*shape).to(torch.bfloat16)
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
    q = on_cpu(100, heads, 64).to(dtype)
    weight = on_cpu(64, seed=1)
    assert_independent(lambda part: [rms_norm_heads(q[part], 1e-6), rms_norm(q[part], weight, 1e-6)])


def assert_close(got: Tensor, expected: Tensor) -> None:
    """One rounding to bfloat16 apart at most, and rarely that."""
    got, expected = got.float(), expected.float()
    torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=1e-30)
    assert (got != expected).float().mean() < 0.01 if got.numel() > 200 else True


SHAPES = [(0, 64), (1, 512), (3, 2, 150), (5, 64)]
SHAPES += [(63, 4096), (257, 7168), (8192, 1024), (9, 4, 4096), (33, 1536)] if ON_GPU else []


@kernel_test
@pytest.mark.parametrize("weighted", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_agrees_with_the_reference(shape: tuple[int, ...], weighted: torch.dtype | None) -> None:
    x = (3 * random(*shape)).bfloat16()
    weight = None if weighted is None else (1 + 0.3 * random(shape[-1], seed=1)).to(weighted)
    got = launch(rms_norm, x, weight, 1e-6)
    assert got.dtype == torch.bfloat16 and got.shape == x.shape
    assert_close(got, rms_norm.reference(x, weight, 1e-6))


@kernel_test
def test_weight_has_a_gradient_where_the_input_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the first layer of a model whose embedding is frozen."""
    monkeypatch.setattr(dispatch, "GPU_TYPE", DEVICE.type)
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    rms_norm(random(3, 64), weight, 1e-6).sum().backward()
    assert weight.grad is not None and weight.grad.ne(0).all()


@kernel_test
def test_small_rows_feel_eps_and_rows_of_zeros_stay() -> None:
    x = torch.stack([torch.full((64,), 1e-3), torch.zeros(64)]).bfloat16().to(DEVICE)
    assert_close(launch(rms_norm, x, None, 1e-6), rms_norm.reference(x, None, 1e-6))


@kernel_test
def test_rows_may_lie_apart_and_do_not_depend_on_each_other() -> None:
    x = random(9, 512).bfloat16()
    together = launch(rms_norm, x[:, 100:420], None, 1e-6)
    assert_close(together, rms_norm.reference(x[:, 100:420], None, 1e-6))
    for part in (slice(0, 1), slice(4, 9)):
        assert torch.equal(launch(rms_norm, x[part, 100:420].contiguous(), None, 1e-6), together[part])


@kernel_test
def test_float32_is_not_rounded() -> None:
    x, weight = random(3, 200), 1 + random(200, seed=1)
    torch.testing.assert_close(launch(rms_norm, x, weight, 1e-6), rms_norm.reference(x, weight, 1e-6), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(launch(rms_norm, x, None, 1e-6), rms_norm.reference(x, None, 1e-6), rtol=2e-6, atol=1e-7)
