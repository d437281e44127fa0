"""The router against float64, and its kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.routing import Copies, Router, in_top_groups, own_slots, route, scores_of, softplus, take_copies
from tests.kernels.tensors import DEVICE, ON_GPU, assert_independent, cpu_random, kernel_test, launch, random


def test_scores_are_the_published_ones() -> None:
    logits = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0])
    expected = torch.tensor([0.220425, 0.559698, 0.832555, 0.986953, 1.145976, 1.458399])
    assert (softplus(logits).sqrt() - expected).abs().max() < 1e-6


def test_softplus_is_stable_and_equals_the_formula() -> None:
    x = torch.cat([cpu_random(257, scale=8.0), torch.tensor([0.0, -0.0, 80.0, -80.0, 1e4, -1e4])])
    torch.testing.assert_close(softplus(x).double(), torch.nn.functional.softplus(x.double()), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("tokens", [0, 1, 63, 257])
@pytest.mark.parametrize("choice", ["scores", "biased scores", "table"])
def test_best_experts_or_those_of_the_table_are_weighed_without_the_bias(tokens: int, choice: str) -> None:
    logits, ids = cpu_random(tokens, 11, scale=2.0), torch.arange(tokens) % 3
    bias = cpu_random(11, seed=1) if choice == "biased scores" else None
    table = torch.tensor([[5, 0, 8], [1, 2, 10], [4, 3, 9]]) if choice == "table" else None
    chosen, weights = route(logits, Router(3, 2.5, bias, table, ids))
    scores = torch.log1p(logits.double().exp()).sqrt()
    best = (scores + (0 if bias is None else bias.double())).topk(3).indices if table is None else table[ids]
    assert torch.equal(chosen, best.sort(-1).values)
    picked = scores.gather(1, chosen)
    torch.testing.assert_close(weights.double(), picked / picked.sum(-1, keepdim=True) * 2.5, rtol=1e-5, atol=1e-7)


def test_bias_can_choose_an_expert_of_a_lower_score() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert route(logits, Router(1, 1.0))[0].tolist() == [[0]]
    chosen, weights = route(logits, Router(1, 1.0, bias_E=torch.tensor([0.0, 0.0, 5.0])))
    assert chosen.tolist() == [[2]] and weights.tolist() == [[1.0]]


def test_padding_has_no_experts() -> None:
    logits, positions = cpu_random(5, 11), torch.tensor([4, -1, 0, -1, 9], dtype=torch.int32)
    chosen, weights = route(logits, Router(3, 2.0, positions_T=positions))
    padding = positions < 0
    assert chosen[padding].eq(11).all() and weights[padding].eq(0).all()
    expected = route(logits[~padding], Router(3, 2.0))
    assert torch.equal(chosen[~padding], expected[0]) and torch.equal(weights[~padding], expected[1])


def test_routing_a_token_does_not_depend_on_the_others() -> None:
    logits, router = cpu_random(100, 11, scale=2.0), Router(3, 2.5, cpu_random(11, seed=1))
    assert_independent(lambda part: route(logits[part], router))


def test_slots_of_other_ranks_are_none() -> None:
    assert own_slots(torch.arange(7), 2, 3).tolist() == [3, 3, 0, 1, 2, 3, 3]


def test_tokens_take_the_copies_of_an_expert_in_turn_and_are_counted() -> None:
    copies = Copies(torch.tensor([[3, 9], [0, 2], [9, 9]]), torch.tensor([1, 2, 1]), torch.tensor([0, 0, 5]))
    chosen = torch.tensor([[0, 1], [0, 1], [1, 2], [1, 2]])
    assert take_copies(chosen, copies).tolist() == [[3, 0], [3, 2], [0, 9], [2, 9]]
    assert copies.load_E is not None and copies.load_E.tolist() == [2, 4, 7]


def choices(scores: torch.Tensor, bias: torch.Tensor | None, groups: int, top_groups: int, top_k: int) -> torch.Tensor:
    """The experts of each token, found one after the other."""
    every = scores.shape[1]
    size, biased = every // groups, scores if bias is None else scores + bias
    found = []
    for row in biased.tolist():
        cut = [row[g * size : (g + 1) * size] for g in range(groups)]
        rank = [max(part) if bias is None else sum(sorted(part)[-2:]) for part in cut]
        kept = sorted(range(groups), key=lambda g: -rank[g])[:top_groups]
        found.append(sorted(sorted((e for e in range(every) if e // size in kept), key=lambda e: -row[e])[:top_k]))
    return torch.tensor(found)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_come_from_the_best_groups(scoring: str, groups: int, top_groups: int, renormalize: bool) -> None:
    """Some scores with bias are negative, and still better than experts of other groups."""
    logits, bias = cpu_random(63, 16, scale=2.0), cpu_random(16, seed=1) - 0.8 if scoring == "sigmoid" else None
    rules = (scoring, groups, top_groups, renormalize)
    chosen, weights = route(logits, Router(4, 2.5, bias, None, None, None, *rules))
    scores = logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()
    assert torch.equal(chosen, choices(scores, None if bias is None else bias.double(), groups, top_groups, 4))
    picked = scores.gather(1, chosen)
    wanted = picked / picked.sum(-1, keepdim=True) if renormalize else picked
    torch.testing.assert_close(weights.double(), wanted * 2.5, rtol=1e-5, atol=1e-7)


def test_scores_that_all_underflow_give_weights() -> None:
    router = Router(2, 2.5, None, None, None, None, "sigmoid")
    _, weights = route(torch.full((1, 5), -200.0), router)
    assert weights.tolist() == [[0.0, 0.0]]


def test_names_of_scores_and_groups() -> None:
    logits = cpu_random(3, 6)
    assert torch.equal(scores_of(logits, "sqrtsoftplus"), softplus(logits).sqrt())
    limited = in_top_groups(logits, Router(1, 1.0, None, None, None, None, "softmax", 3, 1))
    assert limited.isfinite().sum(1).tolist() == [2, 2, 2]
    assert in_top_groups(logits, Router(1, 1.0)) is logits


SHAPES = [(0, 8, 2), (1, 16, 3), (9, 11, 3)] + ([(63, 256, 6), (8192, 256, 6), (257, 384, 6)] if ON_GPU else [])


def assert_same(logits: Tensor, router: Router) -> None:
    got, expected = launch(route, logits, router), route.reference(logits, router)
    assert got[0].dtype == torch.int64 and torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=0)


@kernel_test
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


@kernel_test
def test_of_equal_scores_the_lowest_ids_win() -> None:
    chosen, weights = launch(route, torch.zeros(2, 11, device=DEVICE), Router(4, 1.0))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2 and weights.tolist() == [[0.25] * 4] * 2


@kernel_test
def test_negative_biases_and_extreme_logits_keep_their_order() -> None:
    logits = torch.tensor([[-80.0, 90.0, -20.0, 0.0, 1e4, -1e4, 3.0]], device=DEVICE)
    bias = torch.tensor([-1.0, -200.0, -0.5, -4.0, -150.0, -2.0, -3.0], device=DEVICE)
    assert_same(logits, Router(3, 2.5))
    assert_same(logits, Router(3, 2.5, bias))


@kernel_test
def test_not_a_number_never_leaves_the_experts() -> None:
    chosen, _ = launch(route, torch.full((1, 5), float("nan"), device=DEVICE), Router(3, 1.0))
    assert chosen.tolist() == [[0, 1, 2]]


@kernel_test
def test_logits_may_be_a_slice() -> None:
    assert_same(random(4, 40)[:, 7:24], Router(3, 1.0))


GROUPED = [(1, 16, 1, 1, 3), (9, 24, 8, 3, 4), (3, 20, 4, 2, 4)]
GROUPED += [(63, 64, 1, 1, 6), (63, 160, 8, 3, 6), (63, 256, 8, 4, 8), (8192, 256, 8, 4, 8), (257, 384, 1, 1, 8)] if ON_GPU else []


@kernel_test
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "groups", "top_groups", "top_k"), GROUPED)
def test_kernel_agrees_with_groups(
    tokens: int, experts: int, groups: int, top_groups: int, top_k: int, scoring: str, renormalize: bool
) -> None:
    """Of selections that a rounding may decide, logits are apart."""
    places = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(t)) for t in range(min(tokens, 64))])
    logits = (places.repeat(-(-tokens // len(places)), 1)[:tokens].float() * 0.05 - 3.0).to(DEVICE)
    bias = (torch.arange(experts).float() * 0.0013 - 0.5).to(DEVICE) if scoring == "sigmoid" else None
    where = torch.arange(tokens, device=DEVICE, dtype=torch.int32) - 1
    assert_same(logits, Router(top_k, 2.5, bias, None, None, where, scoring, groups, top_groups, renormalize))


@kernel_test
@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid"])
def test_kernel_gives_weights_where_all_scores_underflow(scoring: str) -> None:
    _, weights = launch(route, torch.full((1, 5), -200.0, device=DEVICE), Router(2, 2.5, None, None, None, None, scoring))
    assert weights.tolist() == [[0.0, 0.0]]
