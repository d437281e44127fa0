"""The quantizer's kernel against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.quantize import quantize_fp8
from tests.kernels.tensors import DEVICE, ON_GPU

pytest.importorskip("triton")

from dsv4lite.kernels.quantize.triton import quantize_fp8_triton

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("poison")]


def numbers(*shape: int, spread: float = 6.0) -> Tensor:
    """Random numbers whose rows differ in magnitude, zeros among them."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=rng) * torch.exp(spread * torch.randn(*shape[:-1], 1, generator=rng))
    x[torch.rand(shape, generator=rng) < 0.05] = 0.0
    return x.to(DEVICE)


def assert_same(x: Tensor, group: int) -> None:
    (codes, scales), (wanted, wanted_scales) = quantize_fp8_triton(x, group), quantize_fp8.reference(x, group)
    assert codes.dtype == wanted.dtype and codes.shape == wanted.shape and torch.equal(scales, wanted_scales)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


SHAPES = [(0, 128), (3, 2, 384), (2, 150), (1, 2500)] + ([(63, 4096), (257, 7168), (8192, 1024)] if ON_GPU else [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales_equal_the_reference(shape: tuple[int, ...], group: int, dtype: torch.dtype) -> None:
    assert_same(numbers(*shape).to(dtype), group)


def test_every_bfloat16_rounds_as_the_reference_does() -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = x[x.isfinite()].to(DEVICE)
    tops = torch.tensor([2.0**e * 1.7 for e in range(-9, 20)], device=DEVICE).bfloat16()
    for top in tops if ON_GPU else tops[::14]:
        # The first of a group decides its scale.
        inside = finite[finite.abs() <= top]
        assert_same(torch.cat([top.expand(-(-len(inside) // 127), 1), pad(inside, 127)], 1), 128)


def pad(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % width)).view(-1, width)


def test_nan_stays_one_and_other_groups_do_not_notice() -> None:
    x = numbers(2, 256, spread=0.0).bfloat16()
    codes, scales = quantize_fp8_triton(x, 128)
    spoilt = x.clone()
    spoilt[0, 3] = float("nan")
    got, got_scales = quantize_fp8_triton(spoilt, 128)
    assert got[0, 3].float().isnan() and torch.equal(got_scales.flatten()[1:], scales.flatten()[1:])
    assert torch.equal(got.view(torch.uint8).flatten()[128:], codes.view(torch.uint8).flatten()[128:])


def test_rows_may_lie_apart() -> None:
    assert_same(numbers(5, 512)[:, 128:384], 128)
