"""The router against float64."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.routing import Copies, Router, in_top_groups, route, scores_of, softplus, take_copies


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_scores_are_the_published_ones() -> None:
    logits = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0])
    expected = torch.tensor([0.220425, 0.559698, 0.832555, 0.986953, 1.145976, 1.458399])
    assert (softplus(logits).sqrt() - expected).abs().max() < 1e-6


def test_softplus_is_stable_and_equals_the_formula() -> None:
    x = torch.cat([random(257, scale=8.0), torch.tensor([0.0, -0.0, 80.0, -80.0, 1e4, -1e4])])
    torch.testing.assert_close(softplus(x).double(), torch.nn.functional.softplus(x.double()), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("tokens", [0, 1, 63, 257])
@pytest.mark.parametrize("choice", ["scores", "biased scores", "table"])
def test_best_experts_or_those_of_the_table_are_weighed_without_the_bias(tokens: int, choice: str) -> None:
    logits, ids = random(tokens, 11, scale=2.0), torch.arange(tokens) % 3
    bias = random(11, seed=1) if choice == "biased scores" else None
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
    logits, positions = random(5, 11), torch.tensor([4, -1, 0, -1, 9], dtype=torch.int32)
    chosen, weights = route(logits, Router(3, 2.0, positions_T=positions))
    padding = positions < 0
    assert chosen[padding].eq(11).all() and weights[padding].eq(0).all()
    expected = route(logits[~padding], Router(3, 2.0))
    assert torch.equal(chosen[~padding], expected[0]) and torch.equal(weights[~padding], expected[1])


def test_routing_a_token_does_not_depend_on_the_others() -> None:
    logits, router = random(100, 11, scale=2.0), Router(3, 2.5, random(11, seed=1))
    chosen, weights = route(logits, router)
    for a in range(0, 100, 7):
        for count in (1, 2, 5, 23):
            got = route(logits[a : a + count], router)
            assert torch.equal(got[0], chosen[a : a + count]) and torch.equal(got[1], weights[a : a + count])


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
    logits, bias = random(63, 16, scale=2.0), random(16, seed=1) - 0.8 if scoring == "sigmoid" else None
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
    assert not router.has_kernel and Router(2, 2.5).has_kernel


def test_names_of_scores_and_groups() -> None:
    logits = random(3, 6)
    assert torch.equal(scores_of(logits, "sqrtsoftplus"), softplus(logits).sqrt())
    limited = in_top_groups(logits, Router(1, 1.0, None, None, None, None, "softmax", 3, 1))
    assert limited.isfinite().sum(1).tolist() == [2, 2, 2]
    assert in_top_groups(logits, Router(1, 1.0)) is logits
