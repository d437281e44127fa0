"""The routing kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.routing import Router, route
from tests.kernels.tensors import DEVICE, ON_GPU, random

pytest.importorskip("triton")

from dsv4lite.kernels.routing.triton import route_triton

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("poison")]
SHAPES = [(0, 8, 2), (1, 16, 3), (9, 11, 3)] + ([(63, 256, 6), (8192, 256, 6), (257, 384, 6)] if ON_GPU else [])


def assert_same(logits: Tensor, router: Router) -> None:
    got, expected = route_triton(logits, router), route.reference(logits, router)
    assert got[0].dtype == torch.int64 and torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("positions", [None, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("choice", ["scores", "biased scores", "table"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_kernel_agrees_with_the_reference(
    tokens: int, experts: int, top_k: int, choice: str, positions: torch.dtype | None
) -> None:
    bias = random(experts, seed=1) if choice == "biased scores" else None
    table = random(50, experts, seed=2).argsort(-1)[:, :top_k].contiguous() if choice == "table" else None
    ids = torch.arange(tokens, device=DEVICE) * 7 % 50
    where = None if positions is None else torch.arange(tokens, device=DEVICE).sub(2).to(positions)
    assert_same(random(tokens, experts, scale=3.0), Router(top_k, 2.5, bias, table, ids, where))


def test_of_equal_scores_the_lowest_ids_win() -> None:
    chosen, weights = route_triton(torch.zeros(2, 11, device=DEVICE), Router(4, 1.0))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2 and weights.tolist() == [[0.25] * 4] * 2


def test_negative_biases_and_extreme_logits_keep_their_order() -> None:
    logits = torch.tensor([[-80.0, 90.0, -20.0, 0.0, 1e4, -1e4, 3.0]], device=DEVICE)
    bias = torch.tensor([-1.0, -200.0, -0.5, -4.0, -150.0, -2.0, -3.0], device=DEVICE)
    assert_same(logits, Router(3, 2.5))
    assert_same(logits, Router(3, 2.5, bias))


def test_not_a_number_never_leaves_the_experts() -> None:
    chosen, _ = route_triton(torch.full((1, 5), float("nan"), device=DEVICE), Router(3, 1.0))
    assert chosen.tolist() == [[0, 1, 2]]


def test_logits_may_be_a_slice() -> None:
    assert_same(random(4, 40)[:, 7:24], Router(3, 1.0))
