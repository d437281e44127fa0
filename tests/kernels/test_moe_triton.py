"""The routing kernel against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.routing import route_ref

pytest.importorskip("triton")

from dsv4lite.kernels.routing.triton import route_triton

pytestmark = pytest.mark.kernel

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill what is not initialised with NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert got[0].dtype == torch.int64 and torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=0)


SHAPES = [(0, 8, 2), (1, 16, 3), (9, 11, 3)]
if ON_GPU:
    SHAPES += [(63, 256, 6), (8192, 256, 6), (257, 384, 6)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_best_experts_are_those_of_the_reference(tokens: int, experts: int, top_k: int, biased: bool) -> None:
    logits, bias = random(tokens, experts, scale=3.0), random(experts, seed=1) if biased else None
    assert_same(route_triton(logits, top_k, 2.5, bias), route_ref(logits, top_k, 2.5, bias_E=bias))


@pytest.mark.parametrize("positions", [None, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_given_experts_are_sorted_and_weighed(
    tokens: int, experts: int, top_k: int, by_id: bool, positions: torch.dtype | None
) -> None:
    logits = random(tokens, experts, scale=3.0)
    table = random(50 if by_id else tokens, experts, seed=2).argsort(-1)[:, :top_k].contiguous()
    ids = torch.arange(tokens, device=DEVICE) * 7 % 50 if by_id else None
    where = None if positions is None else torch.arange(tokens, device=DEVICE).sub(2).to(positions)
    expected = route_ref(logits, top_k, 1.5, chosen_TK=table, token_ids_T=ids, positions_T=where)
    assert_same(route_triton(logits, top_k, 1.5, None, table, ids, where), expected)


def test_padding_has_no_experts() -> None:
    logits, positions = random(5, 11), torch.tensor([4, -1, 0, -1, 9], dtype=torch.int32, device=DEVICE)
    chosen, weights = route_triton(logits, 3, 2.0, positions_T=positions)
    padding = positions < 0
    assert chosen[padding].eq(11).all() and weights[padding].eq(0).all()
    expected = route_ref(logits, 3, 2.0)
    assert_same((chosen[~padding], weights[~padding]), (expected[0][~padding], expected[1][~padding]))


def test_of_equal_scores_the_lowest_ids_win() -> None:
    chosen, weights = route_triton(torch.zeros(2, 11, device=DEVICE), 4, 1.0)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2 and weights.tolist() == [[0.25] * 4] * 2


def test_negative_biases_and_extreme_logits_keep_their_order() -> None:
    logits = torch.tensor([[-80.0, 90.0, -20.0, 0.0, 1e4, -1e4, 3.0]], device=DEVICE)
    bias = torch.tensor([-1.0, -200.0, -0.5, -4.0, -150.0, -2.0, -3.0], device=DEVICE)
    for given in (None, bias):
        got, expected = route_triton(logits, 3, 2.5, given), route_ref(logits, 3, 2.5, bias_E=given)
        assert_same(got, expected)


def test_not_a_number_never_leaves_the_experts() -> None:
    chosen, _ = route_triton(torch.full((1, 5), float("nan"), device=DEVICE), 3, 1.0)
    assert chosen.tolist() == [[0, 1, 2]]


def test_logits_may_lie_apart() -> None:
    wide = random(4, 40)
    assert_same(route_triton(wide[:, 7:24], 3, 1.0), route_ref(wide[:, 7:24], 3, 1.0))
