"""The kernel of ``all_reduce_few`` in Triton's interpreter: ranks run one after the other, on buffers that all of them reach."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.all_reduce import EMPTY, TURNS, Inbox, all_reduce_few_ref, part_of_experts
from dsv4lite.kernels.experts import ExpertSum

pytest.importorskip("triton")

from dsv4lite.kernels.all_reduce import triton as kernels
from dsv4lite.kernels.all_reduce.triton import BLOCK, all_reduce_experts_triton, all_reduce_triton

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(torch.cuda.is_available(), reason="buffers are on the CPU")]
NUMBERS = 3 * BLOCK


@dataclass(frozen=True, slots=True)
class World:
    """Buffers of some ranks, in one process."""

    buffers: list[Tensor]
    inboxes: list[Inbox]
    abandoned: Tensor

    @classmethod
    def of(cls, ranks: int, numbers: int = NUMBERS) -> World:
        buffers = [torch.full((TURNS, ranks, numbers), EMPTY, dtype=torch.int32) for _ in range(ranks)]
        abandoned = torch.zeros(1, dtype=torch.int32)
        addresses = torch.tensor([x.data_ptr() for x in (*buffers, abandoned)])
        inboxes = [Inbox(addresses, torch.zeros(numbers // BLOCK, dtype=torch.int64), rank, numbers) for rank in range(ranks)]
        return cls(buffers, inboxes, abandoned)

    def run(self, rank: int, part: Tensor, dtype: torch.dtype = torch.float32, also: Tensor | None = None) -> Tensor:
        return all_reduce_triton(part, self.inboxes[rank], dtype, also)

    def deliver(self, rank: int, part: Tensor) -> None:
        """Write what a rank will send in its next call."""
        bits = part.view(torch.int32)
        for block, call in enumerate(self.inboxes[rank].calls.tolist()):
            places = slice(block * BLOCK, min(len(part), (block + 1) * BLOCK))
            for buffer in self.buffers if places.start < len(part) else ():
                buffer[call % TURNS, rank, places] = torch.where(bits[places] == EMPTY, 0, bits[places])


def parts_of(ranks: int, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(count, generator=generator) for _ in range(ranks)]
    for part, first in zip(parts, ([-0.0, 0.0, -0.0], [-0.0, -0.0, 1.5]), strict=False):
        part[:3] = torch.tensor(first)[:count]
    return parts


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_reduce_few_adds_up_parts_of_any_size_call_after_call(ranks: int) -> None:
    """Blocks are used in different numbers of calls, and every rank is the late one once."""
    world = World.of(ranks)
    for number, count in enumerate((17, NUMBERS, BLOCK + 5, 1)):
        parts, late = parts_of(ranks, count, number), number % ranks
        others = [rank for rank in range(ranks) if rank != late]
        for rank in others:
            world.deliver(rank, parts[rank])
        found = [world.run(rank, parts[rank]) for rank in (late, *others)]
        expected = all_reduce_few_ref(parts, torch.float32)
        assert all(torch.equal(x, found[0]) for x in found)
        torch.testing.assert_close(found[0], expected, rtol=0 if ranks == 2 else 1e-6, atol=0 if ranks == 2 else 1e-6)


def test_all_reduce_few_rounds_once_and_adds_another_part() -> None:
    world = World.of(2)
    mine, theirs = parts_of(2, 500, 1)
    also = torch.randn(500, generator=torch.Generator().manual_seed(2))
    for part in (also, also.bfloat16()):
        world.deliver(1, theirs)
        found = world.run(0, mine, torch.bfloat16, part)
        world.inboxes[1].calls[0] += 1
        assert torch.equal(found, all_reduce_few_ref([mine + part, theirs], torch.bfloat16))


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
def test_all_reduce_experts_adds_up_what_each_rank_has_of_them(whole: bool) -> None:
    """Results of experts that are elsewhere are whatever lay in memory; of whole ones, the shared one is on one rank only."""
    world, rng, top_k, hidden = World.of(2, 6 * BLOCK), torch.Generator().manual_seed(3), 3, 2 * BLOCK
    sums = []
    for rank in range(2):
        chosen = torch.randint(0, 5, (3, top_k), generator=rng)  # of three here
        outputs = torch.randn(3, top_k, hidden, generator=rng)
        outputs[chosen >= 3] = torch.nan
        shared = torch.randn(3, hidden, generator=rng)
        parts = ExpertSum(chosen, outputs.bfloat16(), shared.bfloat16(), 3) if whole else ExpertSum(chosen, outputs, shared, 3)
        if whole and rank == 1:
            parts = parts._replace(shared_TD=None)
        sums.append((parts, part_of_experts(parts)))
    world.deliver(1, sums[1][1].flatten())
    expected = all_reduce_few_ref([part for _, part in sums], torch.bfloat16)
    found = [all_reduce_experts_triton(parts, world.inboxes[rank], torch.bfloat16) for rank, (parts, _) in enumerate(sums)]
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)


def test_all_reduce_few_sends_its_part_to_all_and_clears_what_it_read_before() -> None:
    world = World.of(2)
    for call in range(2 * TURNS):
        mine, theirs = parts_of(2, 900, call)
        world.deliver(1, theirs)
        world.run(0, mine)
        world.inboxes[1].calls[0] += 1
        assert torch.equal(world.buffers[1][call % TURNS, 0, :900].view(torch.float32), mine + 0.0)
        assert (world.buffers[0][(call - 1) % TURNS] == EMPTY).all()
        world.buffers[1][(call - 1) % TURNS] = EMPTY  # what the other rank does


def test_all_reduce_few_waits_for_nobody_once_it_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PATIENCE", 1)
    world = World.of(2)
    world.abandoned.fill_(1)
    world.run(0, torch.ones(10))
    assert world.inboxes[0].calls.tolist() == [1, 0, 0]
    assert torch.equal(world.buffers[1][0, 0, :10].view(torch.float32), torch.ones(10))
