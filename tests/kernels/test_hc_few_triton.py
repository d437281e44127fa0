"""The kernel of hyper-connections for few tokens against the reference, and the sum over experts that it takes on the way."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.moe_few import ExpertSum, sum_experts_ref
from tests.kernels.test_hc_triton import (
    DEVICE,
    EPS,
    ON_GPU,
    assert_enters,
    hc_normalise,
    hc_project,
    pending_of,
    poison,
    random,
    streams_of,
    weights_of,
)

pytest.importorskip("triton")

from dsv4lite.kernels.hc_few_triton import enter_few_triton

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures(poison.__name__)]

SHAPES = [(0, 64), (1, 256), (3, 100)]
if ON_GPU:
    SHAPES += [(1, 4096), (16, 4096), (7, 7168)]


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_entering_projects_what_it_leaves(tokens: int, width: int) -> None:
    assert_enters(enter_few_triton, tokens, width)


@pytest.mark.parametrize("width", [100, 4096] if ON_GPU else [100])
def test_few_tokens_sum_experts_on_the_way(width: int) -> None:
    """To the bit; where there is no expert, nothing is added of what has not been written."""
    x, (y, mix), fn = streams_of(3, width), pending_of(3, width), weights_of(width).fn
    outputs = torch.empty(3, 5, width, dtype=torch.bfloat16, device=DEVICE)
    chosen = torch.tensor([[0, 2, 4, 7, 8], [9] * 5, [1, 3, 9, 9, 9]], device=DEVICE)
    outputs[chosen < 9] = random(7, width, seed=9).bfloat16()
    parts = ExpertSum(chosen, outputs, y, 9)
    assert outputs.isnan().any() and sum_experts_ref(parts).isfinite().all()
    got, expected = (enter_few_triton(x, (each, *mix), fn) for each in (parts, sum_experts_ref(parts)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_entering_without_leaving_returns_the_streams() -> None:
    x, fn = streams_of(3, 64), weights_of(64).fn
    left, sums = enter_few_triton(x, None, fn)
    assert left is x
    torch.testing.assert_close(hc_normalise(sums, 256, EPS), hc_project(x, fn, EPS), rtol=0, atol=1e-5)
