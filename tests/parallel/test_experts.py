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


Steps = tuple[tuple[tuple[int, ...], int | None], ...]
"""Of each step the tokens of every replica, and the largest number of them if ranks know it."""


def dispatched(mesh: Mesh, name: str, steps: Steps) -> list[Tensor]:
    """Return the sums of each step after adding up over peers."""
    peers = mesh.tp if mesh.layout.copies == 1 else mesh.ep
    share = SLOTS // mesh.ep.size
    ranks = ExpertRanks(ep=mesh.ep, peers=peers, slots_per_rank=share, dtype=torch.bfloat16, captured=True)
    experts, dispatcher, found = Experts(mesh.ep.rank * share, share), make_dispatcher(name, ranks), []
    for counts, most_tokens in steps:
        part = dispatcher.start(*tokens_of(mesh.dp.rank, counts[mesh.dp.rank]), most_tokens)(experts)()
        assert part.dtype == torch.float32
        found.append(peers.all_reduce(part.clone()))
    return found


TOGETHER = (Layout(ep=2), Layout(tp=2, ep=2), Layout(tp=2, ep=4), Layout(ep=4))
APART = (Layout(dp=2, ep=2), Layout(dp=4, ep=4), Layout(dp=2, tp=2, ep=4), Layout(dp=4, ep=2))


@pytest.mark.parametrize(
    ("layout", "names", "steps"),
    [
        *((layout, tuple(DISPATCHERS), (((0,), None), ((1,), None), ((7,), None))) for layout in TOGETHER),
        *((layout, ("all_gather", "all_to_all"), (((5, 5, 5, 5), 5), ((0, 9, 1, 4), None), ((1, 7, 3, 2), 8))) for layout in APART),
    ],
    ids=str,
)
def test_tokens_get_the_sums_of_their_experts(ranks: Ranks, layout: Layout, names: tuple[str, ...], steps: Steps) -> None:
    for name in names:
        for rank, sums in enumerate(ranks.run(dispatched, name, steps, layout=layout)):
            replica = layout.place(rank).dp
            for (counts, _), found in zip(steps, sums, strict=True):
                wanted = Experts(0, SLOTS)(*tokens_of(replica, counts[replica]))
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
                assert name != "all_to_all" or torch.equal(found, wanted)


def ranks_of(*, ep: int, peers: int, captured: bool = False) -> ExpertRanks:
    axes = [Axis(name, 0, size, object()) for name, size in (("ep", ep), ("tp", peers))]
    return ExpertRanks(ep=axes[0], peers=axes[1], slots_per_rank=4, dtype=torch.float32, captured=captured)


@pytest.mark.parametrize(
    ("ep", "peers", "captured", "chosen"),
    [
        (2, 2, False, "local"),
        (2, 4, True, "local"),
        (4, 2, True, "all_gather"),
        (4, 2, False, "all_to_all"),
        (1, 2, False, "local"),
    ],
)
def test_auto_takes_what_the_layout_needs(ep: int, peers: int, captured: bool, chosen: str) -> None:
    assert type(make_dispatcher("auto", ranks_of(ep=ep, peers=peers, captured=captured))) is DISPATCHERS[chosen]


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
