"""Layouts: which rank stands where."""

from __future__ import annotations

import itertools

import pytest

from dsv4lite.errors import ConfigError
from dsv4lite.layout import AXES, Layout

LAYOUTS = [
    Layout(**dict(zip(AXES, sizes, strict=True)))
    for sizes in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 3), (1, 2))
    if (sizes[0] * sizes[2]) % sizes[1] == 0 or sizes[1] % (sizes[0] * sizes[2]) == 0
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_puts_every_rank_into_one_group_of_each_axis(layout: Layout) -> None:
    assert layout.world == layout.pp * max(layout.tp * layout.dp, layout.ep)
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(layout.world))
        assert {len(group) for group in groups} == {getattr(layout, axis)}
        for group in groups:
            for position, rank in enumerate(group):
                assert layout.group(axis, rank) == group
                assert getattr(layout.place(rank), axis) == position


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_keeps_the_other_places_fixed_within_a_group(layout: Layout) -> None:
    for axis, fixed in (("tp", ("dp", "pp", "copy")), ("dp", ("tp", "pp", "copy")), ("pp", ("tp", "ep", "dp", "copy"))):
        for group in layout.groups(axis):
            for name in fixed:
                assert len({getattr(layout.place(rank), name) for rank in group}) == 1
    for group in layout.groups("ep"):
        assert group == tuple(range(group[0], group[0] + layout.ep))
        assert len({layout.place(rank).pp for rank in group}) == 1


def test_layout_counts_stages_then_replicas_then_tp() -> None:
    layout = Layout(tp=2, dp=2, ep=4, pp=2)
    assert layout.world == 8
    assert [(p.pp, p.dp, p.tp, p.ep) for p in map(layout.place, range(8))] == [
        *((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 2), (0, 1, 1, 3)),
        *((1, 0, 0, 0), (1, 0, 1, 1), (1, 1, 0, 2), (1, 1, 1, 3)),
    ]


def test_layout_of_experts_alone_replicates_attention() -> None:
    layout = Layout(ep=2)
    assert (layout.world, layout.copies) == (2, 2)
    assert layout.groups("ep") == ((0, 1),)
    assert layout.groups("tp") == ((0,), (1,))


def test_layout_names_who_shares_requests_and_who_samples() -> None:
    layout = Layout(tp=2, dp=2, ep=8, pp=2)
    assert (layout.world, layout.copies) == (16, 2)
    assert layout.groups("replica") == ((0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15))
    assert [layout.reporter(replica) for replica in range(2)] == [8, 10]


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"tp": 2, "ep": 3}, ("ep=3", "tp=2")),
        ({"tp": 3, "dp": 2, "ep": 4}, ("ep=4", "dp=2")),
        ({"tp": 4, "ep": 6}, ("tp=4 x dp=1", "choose one of 1, 2, 4, or a multiple of 4")),
        ({"tp": 0}, ("tp=0",)),
        ({"pp": -1}, ("pp=-1",)),
        ({"dp": 1.5}, ("dp=1.5",)),
        ({"ep": True}, ("ep=True",)),
    ],
)
def test_layout_that_does_not_divide_is_refused_naming_the_values(sizes: dict[str, int], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout(**sizes)
    assert all(value in str(caught.value) for value in named)


def test_error_of_a_layout_with_replicas_offers_only_sizes_that_are_possible() -> None:
    """It offered a multiple of 6, which is refused with replicas, and a divisor of 6 that tp=3 and ep=2 do not share."""
    with pytest.raises(ConfigError, match=r"ep=8 does not fit tp=3 x dp=2, the 6 ranks .*; choose one of 1, 3, 6$"):
        Layout(tp=3, dp=2, ep=8)


def test_place_of_a_rank_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank=4 .* 4 ranks"):
        Layout(tp=2, dp=2).place(4)
