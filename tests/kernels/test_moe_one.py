"""One token's experts against the ops that do each part, in references."""

from __future__ import annotations

import torch

from dsv4lite.kernels.gemm import pair_linear
from dsv4lite.kernels.moe_few import Held, Router, moe_few, sum_experts
from dsv4lite.kernels.moe_one import Shared, moe_one, suits_one
from dsv4lite.kernels.quantize import quantize_fp8
from tests.kernels.test_moe_few import EXPERTS, HIDDEN, TOP_K, WIDTH, tiles


def test_one_token_has_the_sum_of_its_parts() -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(1, HIDDEN).bfloat16(), torch.randn(EXPERTS, HIDDEN) / 16
    up = torch.randn(2 * WIDTH, HIDDEN).to(torch.float8_e4m3fn), torch.full((2, 2), 120, dtype=torch.uint8)
    down = torch.randn(HIDDEN, WIDTH).to(torch.float8_e4m3fn), torch.full((2, 1), 120, dtype=torch.uint8)
    router = Router(TOP_K, 1.5, torch.rand(EXPERTS), None, torch.tensor([3]), torch.tensor([7]))
    experts, rounded = (tiles(2 * WIDTH, HIDDEN), tiles(HIDDEN, WIDTH)), quantize_fp8(x, 128)
    parts = moe_one(x, *rounded, gate, router, Shared(*up, *down), *experts, 10.0, held=Held())
    h, logits = pair_linear(x, *rounded, *up, gate)
    expected = moe_few(logits, router, *rounded, h, *down, *experts, 10.0)
    assert torch.equal(parts.chosen_TK, expected.chosen_TK) and torch.equal(sum_experts(parts), sum_experts(expected))


def test_one_launch_is_for_one_token_and_whole_groups_of_the_shared_expert() -> None:
    assert [suits_one(tokens, 256) for tokens in (0, 1, 2)] == [False, True, False]
    assert not suits_one(1, 200) and suits_one(1, 128 * 128) and not suits_one(1, 129 * 128)
