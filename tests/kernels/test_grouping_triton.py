"""Rows of each expert in blocks, as both products of experts find them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dsv4lite.kernels.experts.grouping_triton import Groups, group_triton, most_blocks

pytestmark = pytest.mark.kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_every_pair_has_one_place_among_those_of_its_expert() -> None:
    tokens, top_k, experts, rows = 37, 3, 5, 16
    rng = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, experts + 2, generator=rng).topk(top_k).indices.clamp_max(experts)  # some are none
    scales = torch.randint(100, 130, (tokens, 2), generator=rng, dtype=torch.uint8)
    groups = Groups.allocate(tokens, top_k, experts, 256, 128, rows, DEVICE, by_token=False)
    group_triton(chosen.to(DEVICE), scales.to(DEVICE), experts, groups)
    count = int(groups.count)
    order, owner, words = groups.order[:count].cpu(), groups.owner[:count].cpu(), groups.x_words[:count].cpu()
    found = order < tokens * top_k
    pairs = order[found].long()
    assert sorted(pairs.tolist()) == (chosen.flatten() < experts).nonzero().flatten().tolist()
    assert torch.equal(chosen.flatten()[pairs], owner.long()[:, None].expand_as(order)[found])
    assert torch.equal(words.transpose(1, 2)[found], scales[pairs // top_k].int() << 23)
    assert not groups.arrivals[:count].any()


def test_blocks_suffice_for_any_routing() -> None:
    rng = torch.Generator().manual_seed(0)
    for tokens, count, top_k, rows in ((1, 8, 6, 16), (7, 8, 2, 16), (100, 8, 3, 16), (300, 64, 6, 64)):
        for skew in (0.0, 3.0, 30.0):
            pull = skew * torch.rand(count, generator=rng)
            chosen = (torch.rand(tokens, count, generator=rng) + pull).topk(top_k).indices
            needed = int((torch.bincount(chosen.flatten(), minlength=count) + rows - 1).div(rows, rounding_mode="floor").sum())
            assert needed <= most_blocks(tokens * top_k, count, rows) <= tokens * top_k
