"""Axes and their collectives, on gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsv4lite.device import forget_frames
from dsv4lite.layout import Layout
from dsv4lite.parallel.mesh import LOOPBACK, Axis, Mesh, open_store
from tests.parallel.holdings import listening
from tests.parallel.ranks import RankError, Ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
MOVED = (*DTYPES, torch.uint8, torch.bool, torch.float8_e4m3fn)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def reduced(mesh: Mesh) -> Any:
    axis, found = mesh.tp, []
    for dtype in DTYPES:
        strided = values(axis.rank, 6, 4, dtype=dtype).t()
        whole = axis.all_reduce(strided)
        rows = axis.reduce_scatter(values(axis.rank, 4 * axis.size, 3, dtype=dtype))
        found.append((whole, rows, axis.all_reduce(torch.zeros(0, 4, dtype=dtype))))
    return found


def test_mesh_whose_ranks_do_not_come_leaves_no_port_with_its_error() -> None:
    """The error kept the store, and so its port, although the engine clears the frames of an error that a caller may keep."""
    before, store = listening(), open_store(LOOPBACK, LOOPBACK)
    with pytest.raises(RuntimeError, match="timeout") as error:
        Mesh.from_store(store, Layout(tp=2), 0, torch.device("cpu"), host=LOOPBACK, timeout_s=0.2)
    assert listening() > before
    del store
    forget_frames(error.value)
    assert listening() == before


@pytest.mark.parametrize("size", [2, 4])
def test_sums_equal_those_of_one_process(ranks: Ranks, size: int) -> None:
    for rank, answers in enumerate(ranks.run(reduced, layout=Layout(tp=size))):
        for dtype, (whole, rows, none) in zip(DTYPES, answers, strict=True):
            assert torch.equal(whole, sum(values(r, 6, 4, dtype=dtype) for r in range(size)).t()) and whole.dtype == dtype
            assert torch.equal(rows, sum(values(r, 4 * size, 3, dtype=dtype) for r in range(size)).chunk(size)[rank])
            assert none.shape == (0, 4)


def moved(mesh: Mesh) -> Any:
    return [moved_rows(mesh, dtype) for dtype in MOVED]


def moved_rows(mesh: Mesh, dtype: torch.dtype) -> Any:
    axis = mesh.ep
    mine = values(axis.rank, 3, 2).to(dtype)
    counts = [[(source + 2 * target) % 3 for target in range(axis.size)] for source in range(axis.size)]
    rows = values(axis.rank, sum(counts[axis.rank]), 2).to(dtype)
    return (
        axis.all_gather(mine),
        axis.all_gather(mine.t(), 1),
        axis.all_gather(mine, -1),
        *axis.begin_all_gather(mine, mine[:1]).wait(),
        axis.broadcast(mine.clone(), axis.size - 1),
        axis.begin_all_to_all(rows, counts[axis.rank], [row[axis.rank] for row in counts]).wait(),
    )


def test_moved_rows_arrive_unchanged(ranks: Ranks) -> None:
    for dtype, *answers in zip(MOVED, *ranks.run(moved, layout=Layout(ep=3)), strict=True):
        assert_moved(dtype, answers)


def assert_moved(dtype: torch.dtype, answers: list[Any]) -> None:
    size = 3
    each = [values(r, 3, 2).to(dtype) for r in range(size)]
    counts = [[(source + 2 * target) % 3 for target in range(size)] for source in range(size)]
    sent = [values(r, sum(counts[r]), 2).to(dtype).split(counts[r]) for r in range(size)]
    for rank, answer in enumerate(answers):
        expected = (
            torch.cat(each),
            torch.cat([x.t() for x in each], 1),
            torch.cat(each, 1),
            torch.cat(each),
            torch.cat([x[:1] for x in each]),
            each[-1],
            torch.cat([parts[rank] for parts in sent]),
        )
        for got, want in zip(answer, expected, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            assert torch.equal(got.to(torch.float32), want.to(torch.float32))


class Coalescing:
    """Stands for a process group that makes one launch of several collectives; its one rank hears what it says, twice."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.said: list[str] = []

    def _start_coalescing(self) -> None:
        self.said.append("start")

    def _allgather_base(self, gathered: torch.Tensor, mine: torch.Tensor) -> None:
        self.said.append(f"gather {len(mine)}")
        gathered.copy_(torch.cat([mine, mine]))

    def _end_coalescing(self) -> Coalescing:
        self.said.append("end")
        return self

    def wait(self) -> None:
        self.said.append("wait")


def test_tensors_are_gathered_in_one_launch_where_the_backend_can() -> None:
    group, parts = Coalescing(), (values(0, 3, 2), values(1, 3).to(torch.float8_e4m3fn))
    transfers = Axis("ep", 0, 2, group).begin_all_gather(*parts)
    assert group.said == ["start", "gather 6", "gather 3", "end"]
    for whole, part in zip(transfers.wait(), parts, strict=True):
        assert torch.equal(whole.float(), torch.cat([part.float(), part.float()])) and whole.dtype == part.dtype
    assert group.said[4:] == ["wait"]


def passed_on(mesh: Mesh) -> Any:
    axis, x = mesh.pp, torch.empty(2, 3)
    if axis.rank == 0:
        axis.begin_send(torch.arange(6.0).view(3, 2).t(), 1).wait()
        return axis.receive(x, axis.size - 1)
    axis.receive(x, axis.rank - 1)
    axis.begin_send(x + 1, (axis.rank + 1) % axis.size).wait()
    return x


def test_stages_pass_tensors_on(ranks: Ranks) -> None:
    first, second, third = ranks.run(passed_on, layout=Layout(pp=3))
    expected = torch.arange(6.0).view(3, 2).t()
    assert torch.equal(second, expected) and torch.equal(third, expected + 1) and torch.equal(first, expected + 2)


def places(mesh: Mesh) -> Any:
    gathered = {name: getattr(mesh, name).all_gather(torch.tensor([mesh.rank])).tolist() for name in ("tp", "ep", "dp", "pp")}
    positions = {name: (getattr(mesh, name).rank, getattr(mesh, name).size) for name in gathered}
    return gathered, positions, len(mesh.groups()), dist.is_initialized()


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, dp=2), Layout(tp=2, dp=2, ep=4), Layout(tp=2, pp=2), Layout(dp=2, ep=2), Layout(tp=2, ep=4)],
    ids=str,
)
def test_axes_connect_the_ranks_of_the_layout(ranks: Ranks, layout: Layout) -> None:
    for rank, (gathered, positions, num_groups, initialised) in enumerate(ranks.run(places, layout=layout)):
        groups = {name: layout.group(name, rank) for name in gathered}
        assert gathered == {name: list(group) for name, group in groups.items()}
        assert positions == {name: (getattr(layout.place(rank), name), getattr(layout, name)) for name in gathered}
        assert num_groups == len({group for group in (*groups.values(), layout.group("replica", rank)) if len(group) > 1})
        assert not initialised


def scattered_unevenly(mesh: Mesh) -> Any:
    return mesh.tp.reduce_scatter(torch.zeros(3, 2))


def test_scatter_of_unequal_parts_is_refused_on_every_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(scattered_unevenly, layout=Layout(tp=2))
    assert str(caught.value).count("rows of [3, 2] cannot be scattered over 2 ranks") == 2


def test_single_axes_return_what_they_get() -> None:
    mesh, x = Mesh(), values(0, 4, 2)
    for axis in (mesh.tp, mesh.ep, mesh.dp, mesh.pp):
        assert axis.all_reduce(x) is x and axis.all_gather(x, 1) is x and axis.reduce_scatter(x) is x
        assert axis.broadcast(x, 0) is x
    assert mesh.groups() == () and (mesh.tp.rank, mesh.tp.size) == (0, 1)


def test_axes_without_a_group_or_in_another_place_are_refused() -> None:
    for make in (lambda: Axis("tp", 0, 2), lambda: Axis("tp", 2, 2), lambda: Mesh(layout=Layout(tp=2), rank=1)):
        with pytest.raises(AssertionError):
            make()
