"""The norm's kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.norm import rms_norm
from tests.kernels.tensors import DEVICE, ON_GPU, random

pytest.importorskip("triton")

from dsv4lite.kernels.norm.triton import rms_norm_triton

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("poison")]


def assert_close(got: Tensor, expected: Tensor) -> None:
    """One rounding to bfloat16 apart at most, and rarely that."""
    got, expected = got.float(), expected.float()
    torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=1e-30)
    assert (got != expected).float().mean() < 0.01 if got.numel() > 200 else True


SHAPES = [(0, 64), (1, 512), (3, 2, 150), (5, 64)]
SHAPES += [(63, 4096), (257, 7168), (8192, 1024), (9, 4, 4096), (33, 1536)] if ON_GPU else []


@pytest.mark.parametrize("weighted", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_agrees_with_the_reference(shape: tuple[int, ...], weighted: torch.dtype | None) -> None:
    x = (3 * random(*shape)).bfloat16()
    weight = None if weighted is None else (1 + 0.3 * random(shape[-1], seed=1)).to(weighted)
    got = rms_norm_triton(x, weight, 1e-6)
    assert got.dtype == torch.bfloat16 and got.shape == x.shape
    assert_close(got, rms_norm.reference(x, weight, 1e-6))


def test_small_rows_feel_eps_and_rows_of_zeros_stay() -> None:
    x = torch.stack([torch.full((64,), 1e-3), torch.zeros(64)]).bfloat16().to(DEVICE)
    assert_close(rms_norm_triton(x, None, 1e-6), rms_norm.reference(x, None, 1e-6))


def test_rows_may_lie_apart_and_do_not_depend_on_each_other() -> None:
    x = random(9, 512).bfloat16()
    together = rms_norm_triton(x[:, 100:420], None, 1e-6)
    assert_close(together, rms_norm.reference(x[:, 100:420], None, 1e-6))
    for part in (slice(0, 1), slice(4, 9)):
        assert torch.equal(rms_norm_triton(x[part, 100:420].contiguous(), None, 1e-6), together[part])


def test_float32_is_not_rounded() -> None:
    x, weight = random(3, 200), 1 + random(200, seed=1)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-6), rms_norm.reference(x, weight, 1e-6), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(rms_norm_triton(x, None, 1e-6), rms_norm.reference(x, None, 1e-6), rtol=2e-6, atol=1e-7)
