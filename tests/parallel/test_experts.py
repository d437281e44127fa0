"""Dispatchers, against the sum that one rank would make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import ConfigError
from dsv4lite.layout import Layout
from dsv4lite.parallel.experts import DISPATCHERS, ExpertRanks, Local, Rows, make_dispatcher
from dsv4lite.parallel.mesh import Axis, Mesh
from tests.parallel.ranks import Ranks

SLOTS, PER_TOKEN, WIDTH = 8, 3, 6
NONE = SLOTS


def tokens_of(replica: int, count: int) -> tuple[Rows, Tensor, Tensor]:
    """Rows of two tensors as experts take them, slots (some none), weights."""
    generator = torch.Generator().manual_seed(100 * replica + count)
    codes = torch.randn(count, WIDTH, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.randint(1, 4, (count, 1), generator=generator, dtype=torch.uint8)
    slots = torch.rand(count, SLOTS + 1, generator=generator).topk(PER_TOKEN).indices
    return (codes, scales), slots, torch.rand(count, PER_TOKEN, generator=generator)


class Experts:
    """Experts from ``first`` on: expert e rotates a row by e, in bfloat16, so that the order of a sum matters."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __call__(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor) -> Tensor:
        codes, scales = rows
        x = codes.float() * scales.float()
        assert bool((slots_TK <= self.count).all())
        parts = torch.zeros(*slots_TK.shape, WIDTH)
        for t, k in torch.nonzero(slots_TK < self.count).tolist():
            parts[t, k] = (x[t].roll(self.first + int(slots_TK[t, k])) * weight_TK[t, k]).bfloat16().float()
        total, *others = parts.unbind(1)
        for other in others:
            total = total + other
        return total


def dispatched(mesh: Mesh, name: str, counts: tuple[int, ...], most_tokens: int | None) -> tuple[Tensor, Tensor]:
    """Return the sums after adding up over peers, and this rank's part."""
    peers = mesh.tp if mesh.layout.copies == 1 else mesh.ep
    share = SLOTS // mesh.ep.size
    ranks = ExpertRanks(ep=mesh.ep, peers=peers, slots_per_rank=share, dtype=torch.bfloat16, recorded=True)
    experts = Experts(mesh.ep.rank * share, share)
    part = make_dispatcher(name, ranks).start(*tokens_of(mesh.dp.rank, counts[mesh.dp.rank]), most_tokens)(experts)()
    return peers.all_reduce(part.clone()), part


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(tp=2, ep=2), Layout(tp=2, ep=4), Layout(ep=4)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_tokens_that_all_ranks_have_get_their_sums(ranks: Ranks, name: str, layout: Layout, count: int) -> None:
    wanted = Experts(0, SLOTS)(*tokens_of(0, count))
    for whole, part in ranks.run(dispatched, name, (count,), None, layout=layout):
        assert part.dtype == torch.float32
        torch.testing.assert_close(whole, wanted, rtol=0, atol=1e-5)
        assert name != "all_to_all" or torch.equal(whole, wanted)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=4, ep=4), Layout(dp=2, tp=2, ep=4), Layout(dp=4, ep=2)], ids=str)
@pytest.mark.parametrize(("counts", "most_tokens"), [((5, 5, 5, 5), 5), ((0, 9, 1, 4), None), ((1, 7, 3, 2), 8)])
def test_tokens_of_several_replicas_get_their_sums(
    ranks: Ranks, name: str, layout: Layout, counts: tuple[int, ...], most_tokens: int | None
) -> None:
    answers = ranks.run(dispatched, name, counts, most_tokens, layout=layout)
    for rank, (whole, _) in enumerate(answers):
        replica = layout.place(rank).dp
        wanted = Experts(0, SLOTS)(*tokens_of(replica, counts[replica]))
        torch.testing.assert_close(whole, wanted, rtol=0, atol=1e-5)
        assert name != "all_to_all" or torch.equal(whole, wanted)


def ranks_of(*, ep: int, peers: int, recorded: bool = False) -> ExpertRanks:
    axes = [Axis(name, 0, size, object()) for name, size in (("ep", ep), ("tp", peers))]
    return ExpertRanks(ep=axes[0], peers=axes[1], slots_per_rank=4, dtype=torch.float32, recorded=recorded)


@pytest.mark.parametrize(
    ("ep", "peers", "recorded", "chosen"),
    [
        (2, 2, False, "local"),
        (2, 4, True, "local"),
        (4, 2, True, "all_gather"),
        (4, 2, False, "all_to_all"),
        (1, 2, False, "local"),
    ],
)
def test_auto_takes_what_the_layout_needs(ep: int, peers: int, recorded: bool, chosen: str) -> None:
    assert type(make_dispatcher("auto", ranks_of(ep=ep, peers=peers, recorded=recorded))) is DISPATCHERS[chosen]


def test_dispatcher_may_be_the_users_own() -> None:
    made: list[Any] = []

    def mine(ranks: ExpertRanks) -> Local:
        made.append(ranks)
        return Local(ranks)

    given = ranks_of(ep=2, peers=2)
    assert isinstance(make_dispatcher(mine, given), Local) and made == [given]


@pytest.mark.parametrize(
    ("name", "ep", "peers", "message"),
    [
        ("local", 4, 2, "ep=4 ranks work on different tokens; choose the dispatcher all_gather or all_to_all"),
        ("all_to_all", 2, 4, "tp=4 ranks share the width of experts on ep=2"),
        ("all_gather", 2, 4, "choose the dispatcher local, or ep=4"),
        ("magic", 2, 2, "dispatcher='magic' is not one of auto, local, all_gather, all_to_all"),
    ],
)
def test_dispatcher_that_does_not_suit_the_layout_is_refused(name: str, ep: int, peers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_dispatcher(name, ranks_of(ep=ep, peers=peers))
