"""Experts of few tokens together against each part by itself, in references."""

from __future__ import annotations

import torch

from dsv4lite.kernels.experts import ExpertInputs, ExpertSum, Tiles, experts_forward, scale_words, sum_experts
from dsv4lite.kernels.experts.decode_small import MoeInputs, moe_decode_small
from dsv4lite.kernels.gemm import fp8_linear
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.kernels.routing import Router, route
from dsv4lite.kernels.swiglu import swiglu_quantize

TOKENS, EXPERTS, HIDDEN, WIDTH, TOP_K = 5, 6, 256, 128, 3


def tiles(rows: int, columns: int) -> Tiles:
    codes, scales = Tiles.shapes(EXPERTS, rows, columns, fp4=True)
    words = scale_words(torch.randint(118, 120, (*scales, 4)), torch.tensor([92]))[..., 0]
    return Tiles(torch.randint(0, 256, codes, dtype=torch.uint8), words.contiguous())


def test_sum_is_that_of_each_part_by_itself() -> None:
    torch.manual_seed(0)
    x, h, logits = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, 2 * WIDTH).bfloat16(), torch.randn(TOKENS, EXPERTS)
    bias, ids, positions = torch.rand(EXPERTS), torch.arange(TOKENS), torch.tensor([4, -1, 0, 7, -1])
    shared = torch.randn(HIDDEN, WIDTH).to(torch.float8_e4m3fn), torch.full((2, 1), 120, dtype=torch.uint8)
    w13, w2 = tiles(2 * WIDTH, HIDDEN), tiles(HIDDEN, WIDTH)
    rounded = quantize_fp8(x, 128)
    for router in (
        Router(TOP_K, 1.5, bias, None, ids, positions),
        Router(TOP_K, 2.0, None, torch.rand(9, EXPERTS).topk(TOP_K).indices, ids, None),
    ):
        parts = moe_decode_small(MoeInputs(logits, router, *rounded, h, *shared, w13, w2, 10.0))
        chosen, weights = route(logits, router)
        added = fp8_linear(*swiglu_quantize(h, 10.0), *shared)
        assert torch.equal(parts.slots_TK, chosen) and torch.equal(parts.shared_TD, added)
        expected = experts_forward(ExpertInputs(*rounded, chosen, weights, w13, w2, 10.0), added)
        assert torch.equal(sum_experts(parts), expected) and not torch.equal(expected, added)


def test_what_no_expert_has_written_is_not_added() -> None:
    chosen = torch.tensor([[0, 2], [1, 3], [3, 3]])
    outputs = torch.tensor([1.0, 2.0, 4.0, torch.nan, torch.inf, torch.nan], dtype=torch.bfloat16).view(3, 2, 1)
    shared = torch.full((3, 1), 0.5, dtype=torch.bfloat16)
    assert sum_experts(ExpertSum(chosen, outputs, shared, 3)).tolist() == [[3.5], [4.5], [0.5]]
