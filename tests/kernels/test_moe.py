"""Routing and the clamped activation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.routing import Copies, route, silu, softplus, swiglu, take_copies


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_scores_are_the_published_ones() -> None:
    logits = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0])
    expected = torch.tensor([0.220425, 0.559698, 0.832555, 0.986953, 1.145976, 1.458399])
    assert (softplus(logits).sqrt() - expected).abs().max() < 1e-6


def test_softplus_and_silu_are_stable_and_equal_the_formula() -> None:
    x = torch.cat([random(257, scale=8.0), torch.tensor([0.0, -0.0, 80.0, -80.0, 1e4, -1e4])])
    wide = x.double()
    torch.testing.assert_close(softplus(x).double(), torch.nn.functional.softplus(wide), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(silu(x).double(), wide * torch.sigmoid(wide), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("tokens", [0, 1, 63, 257])
@pytest.mark.parametrize("biased", [False, True])
def test_routing_takes_the_best_by_bias_and_weighs_without(tokens: int, biased: bool) -> None:
    logits, bias = random(tokens, 11, scale=2.0), random(11, seed=1) if biased else None
    chosen, weights = route(logits, 3, 2.5, bias_E=bias)
    scores = torch.log1p(logits.double().exp()).sqrt()
    expected = (scores + (0 if bias is None else bias.double())).topk(3).indices.sort(-1).values
    assert torch.equal(chosen, expected)
    picked = scores.gather(1, expected)
    torch.testing.assert_close(weights.double(), picked / picked.sum(-1, keepdim=True) * 2.5, rtol=1e-5, atol=1e-7)


def test_bias_can_choose_an_expert_of_a_lower_score() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert route(logits, 1, 1.0)[0].tolist() == [[0]]
    chosen, weights = route(logits, 1, 1.0, bias_E=torch.tensor([0.0, 0.0, 5.0]))
    assert chosen.tolist() == [[2]] and weights.tolist() == [[1.0]]


def test_table_decides_and_scores_weigh() -> None:
    logits, table = random(9, 6), torch.tensor([[5, 0], [1, 2], [4, 3]])[torch.arange(9) % 3]
    chosen, weights = route(logits, 2, 1.5, chosen_TK=table)
    assert torch.equal(chosen, table.sort(-1).values)
    scores = torch.log1p(logits.double().exp()).sqrt().gather(1, chosen)
    torch.testing.assert_close(weights.double(), scores / scores.sum(-1, keepdim=True) * 1.5, rtol=1e-5, atol=1e-7)


def test_clamp_is_one_sided_for_the_gate_and_two_sided_for_the_other() -> None:
    gate, up = torch.tensor([5.0, -5.0, 0.5, 0.5]), torch.tensor([1.0, 1.0, 7.0, -7.0])
    expected = torch.nn.functional.silu(torch.tensor([2.0, -5.0, 0.5, 0.5])) * torch.tensor([1.0, 1.0, 2.0, -2.0])
    torch.testing.assert_close(swiglu(gate, up, 2.0), expected, rtol=1e-6, atol=1e-7)
    assert swiglu(gate.to(torch.bfloat16), up.to(torch.bfloat16), 2.0).dtype == torch.float32


def test_routing_a_token_does_not_depend_on_the_others() -> None:
    logits, bias, gate, up = random(100, 11, scale=2.0), random(11, seed=1), random(100, 19), random(100, 19, seed=2)
    chosen, weights = route(logits, 3, 2.5, bias_E=bias)
    activated = swiglu(gate, up, 0.6)
    for a in range(0, 100, 7):
        for count in (1, 2, 5, 23):
            part = slice(a, a + count)
            got = route(logits[part], 3, 2.5, bias_E=bias)
            assert torch.equal(got[0], chosen[part]) and torch.equal(got[1], weights[part])
            assert torch.equal(swiglu(gate[part], up[part], 0.6), activated[part])


def test_tokens_take_the_copies_of_an_expert_in_turn_and_are_counted() -> None:
    copies = Copies(torch.tensor([[3, 9], [0, 2], [9, 9]]), torch.tensor([1, 2, 1]), torch.tensor([0, 0, 5]))
    chosen = torch.tensor([[0, 1], [0, 1], [1, 2], [1, 2]])
    assert take_copies(chosen, copies).tolist() == [[3, 0], [3, 2], [0, 9], [2, 9]]
    assert copies.load_E.tolist() == [2, 4, 7]
