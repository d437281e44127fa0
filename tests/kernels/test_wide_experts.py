"""Experts of plain numbers: the reference against the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts.unquantized import wide_experts_forward
from dsv4lite.kernels.quantize import round_fp8

EXPERTS, HIDDEN, WIDTH, LIMIT = 5, 24, 12, 0.8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


W13, W2 = random(EXPERTS, 2 * WIDTH, HIDDEN, seed=1) / 4, random(EXPERTS, HIDDEN, WIDTH, seed=2) / 4


def one(x: Tensor, expert: int, weight: float) -> Tensor:
    """The formula for one token, in float64."""
    gate, up = (W13[expert].double() @ x.double()).split(WIDTH)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return W2[expert].double() @ (torch.nn.functional.silu(gate) * up * weight)


@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_each_token_sums_its_experts_and_the_shared_one(tokens: int) -> None:
    x, shared, weights = random(tokens, HIDDEN, seed=3), random(tokens, HIDDEN, seed=4), random(tokens, 2, seed=5).abs()
    chosen = torch.stack([torch.arange(tokens) % 3, 3 + torch.arange(tokens) % 3], 1)  # 5 is none
    got = wide_experts_forward(x, chosen, weights, W13, W2, LIMIT, shared)
    assert got.shape == (tokens, HIDDEN)
    for t in range(tokens):
        wanted = shared[t].double()
        for expert, weight in zip(chosen[t].tolist(), weights[t].tolist(), strict=True):
            wanted = wanted + one(x[t], expert, weight) if expert < EXPERTS else wanted
        torch.testing.assert_close(got[t].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 4])
def test_padding_gets_the_shared_expert_alone(tokens: int) -> None:
    x, shared = torch.full((tokens, HIDDEN), float("nan")), random(tokens, HIDDEN)
    chosen = torch.full((tokens, 2), EXPERTS)
    assert torch.equal(wide_experts_forward(x, chosen, torch.zeros(tokens, 2), W13, W2, LIMIT, shared), shared)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_sum_without_a_shared_expert_is_not_rounded(tokens: int) -> None:
    x, weights = random(tokens, HIDDEN, seed=3).bfloat16(), random(tokens, 2, seed=5).abs()
    chosen = torch.stack([torch.arange(tokens) % 3, 3 + torch.arange(tokens) % 3], 1)
    got = wide_experts_forward(x, chosen, weights, W13, W2, LIMIT)
    shared = random(tokens, HIDDEN, seed=4).bfloat16()
    assert got.dtype == torch.float32 and got.shape == x.shape
    assert torch.equal((got + shared).bfloat16(), wide_experts_forward(x, chosen, weights, W13, W2, LIMIT, shared))
    assert tokens == 0 or not torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize("tokens", [1, 6])
def test_parts_of_the_width_add_up_without_a_rounding(tokens: int) -> None:
    x, weights, chosen = (
        random(tokens, HIDDEN, seed=3).bfloat16(),
        random(tokens, 1, seed=5).abs(),
        torch.arange(tokens)[:, None] % 5,
    )
    gate, up = W13.split(WIDTH, 1)
    halves = [slice(0, WIDTH // 2), slice(WIDTH // 2, WIDTH)]
    parts = [(torch.cat([gate[:, half], up[:, half]], 1), W2[:, :, half].contiguous()) for half in halves]
    parts, whole = ([tuple(w.bfloat16() for w in pair) for pair in pairs] for pairs in (parts, [(W13, W2)]))
    exact = wide_experts_forward(x, chosen, weights, *whole[0], LIMIT, partial=True)
    together = sum(wide_experts_forward(x, chosen, weights, *part, LIMIT, partial=True) for part in parts)
    torch.testing.assert_close(together, exact, rtol=0, atol=1e-6 * float(exact.abs().max()))
    assert torch.equal(exact.bfloat16().float(), wide_experts_forward(x, chosen, weights, *whole[0], LIMIT))


def test_quantized_models_round_the_inputs_of_both_products() -> None:
    x, shared, weights = random(3, HIDDEN, seed=3), torch.zeros(3, HIDDEN), torch.ones(3, 1)
    chosen = torch.tensor([[0], [2], [4]])
    got = wide_experts_forward(x, chosen, weights, W13, W2, LIMIT, shared, round_inputs=True)
    again = wide_experts_forward(round_fp8(x, 128), chosen, weights, W13, W2, LIMIT, shared, round_inputs=True)
    assert torch.equal(got, again)
    assert not torch.equal(got, wide_experts_forward(round_fp8(x, 128), chosen, weights, W13, W2, LIMIT, shared))


def test_a_token_alone_has_the_same_bits() -> None:
    x, shared, weights = random(9, HIDDEN, seed=3), random(9, HIDDEN, seed=4), random(9, 2, seed=5).abs()
    chosen = torch.stack([torch.arange(9) % 2, 2 + torch.arange(9) % 3], 1)
    together = wide_experts_forward(x, chosen, weights, W13, W2, LIMIT, shared, row_tile=16)
    alone = wide_experts_forward(x[4:5], chosen[4:5], weights[4:5], W13, W2, LIMIT, shared[4:5], row_tile=16)
    assert torch.equal(alone[0], together[4])
