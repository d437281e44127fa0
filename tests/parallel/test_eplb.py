"""The balancer: every expert has a place, ranks hold equally many, and the busiest has little more than its share."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lite.errors import ConfigError
from dsv4lite.parallel.eplb import Placement, balance

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=24)


def zipf(experts: int, exponent: float = 1.0) -> list[float]:
    """Loads by popularity, the popular ones spread over the ids."""
    return [1.0 / (1 + (7 * e) % experts) ** exponent for e in range(experts)]


def least_maximum(items: list[float], packs: int) -> float:
    """The busiest pack's load under the best of all packings of equally many items."""
    room, best = len(items) // packs, sum(items)

    def place(i: int, loads: tuple[float, ...], counts: tuple[int, ...]) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if i == len(items):
            best = max(loads)
            return
        for p in {pair: p for p, pair in enumerate(zip(loads, counts, strict=True)) if counts[p] < room}.values():
            place(
                i + 1,
                (*loads[:p], loads[p] + items[i], *loads[p + 1 :]),
                (*counts[:p], counts[p] + 1, *counts[p + 1 :]),
            )

    place(0, (0.0,) * packs, (0,) * packs)
    return best


def test_placement_is_the_published_one() -> None:
    """The published example spreads two layers over two nodes; within a node, which has two of four groups, one rule holds."""
    published = {
        (61, 104, 165, 39, 4, 73): (5, 6, 5, 7, 8, 4, 3, 4),
        (56, 183, 86, 90, 132, 40): (10, 9, 10, 2, 0, 1, 11, 1),
        (187, 157, 172, 86, 16, 27): (7, 10, 6, 8, 6, 11, 8, 9),
        (20, 107, 104, 64, 19, 197): (2, 4, 5, 1, 5, 0, 3, 1),
    }
    for first, (loads, experts) in zip((3, 9, 6, 0), published.items(), strict=True):  # of twelve experts
        assert tuple((first + e) % 12 for e in balance(loads, slots=8, ranks=4).experts) == experts


@given(loads=LOADS, ranks=st.integers(1, 6), extra=st.integers(0, 12))
def test_every_expert_has_a_slot_and_ranks_hold_equally_many(loads: list[int], ranks: int, extra: int) -> None:
    slots = -(-(len(loads) + extra) // ranks) * ranks
    placed = balance(loads, slots=slots, ranks=ranks)
    held = [placed.held_by(rank) for rank in range(ranks)]
    assert {len(experts) for experts in held} == {slots // ranks}
    assert set().union(*held) == set(range(len(loads)))
    assert [e for experts in held for e in experts] == list(placed.experts)
    assert all(placed.experts[slot] == e for e, copies in enumerate(placed.copies) for slot in copies)
    assert sum(placed.rank_loads(loads)) == pytest.approx(sum(loads))
    assert placed == balance(loads, slots=slots, ranks=ranks)


@given(loads=LOADS, extra=st.integers(0, 12))
def test_copies_go_where_the_load_per_copy_is_largest(loads: list[int], extra: int) -> None:
    """No other division of the copies has a smaller largest load per copy: to lower it, that expert itself would need one more."""
    placed = balance(loads, slots=len(loads) + extra, ranks=1)
    counts = Counter(placed.experts)
    most = max(load / counts[e] for e, load in enumerate(loads))
    assert all(counts[e] == 1 or load / (counts[e] - 1) >= most for e, load in enumerate(loads))


@settings(max_examples=40)
@given(items=st.lists(st.integers(0, 100), min_size=1, max_size=9), packs=st.integers(2, 3))
def test_busiest_rank_is_close_to_the_best_packing(items: list[int], packs: int) -> None:
    items = items[: len(items) // packs * packs]
    if not items:
        return
    got = max(balance(items, slots=len(items), ranks=packs).rank_loads(items))
    assert got <= 4 / 3 * least_maximum([float(item) for item in items], packs)


@pytest.mark.parametrize(
    ("experts", "slots", "ranks", "before", "after"),
    # V4-Flash on 8 ranks and V4-Pro on 32, with one redundant expert a rank, and Flash without any.
    [(256, 264, 8, 1.5, 1.02), (384, 416, 32, 4.0, 1.05), (256, 256, 8, 1.5, 1.48)],
)
def test_popular_experts_get_copies(experts: int, slots: int, ranks: int, before: float, after: float) -> None:
    loads = zipf(experts)
    assert Placement.consecutive(experts, ranks).imbalance(loads) > before
    assert balance(loads, slots=slots, ranks=ranks).imbalance(loads) < after


@given(old=LOADS, seed=st.integers(0, 5), ranks=st.integers(1, 4), extra=st.integers(0, 6))
def test_experts_that_stay_keep_their_slots(old: list[int], seed: int, ranks: int, extra: int) -> None:
    slots = -(-(len(old) + extra) // ranks) * ranks
    before = balance(old, slots=slots, ranks=ranks)
    wanted = balance([(load * 7919 + seed) % 1009 for load in old], slots=slots, ranks=ranks)
    after = wanted.keeping_slots(before)
    for rank in range(ranks):
        assert Counter(after.held_by(rank)) == Counter(wanted.held_by(rank))
        stays = Counter(before.held_by(rank)) & Counter(wanted.held_by(rank))
        same = Counter(a for a, b in zip(after.held_by(rank), before.held_by(rank), strict=True) if a == b)
        assert same == stays


@pytest.mark.parametrize("loads", [[0] * 8, [5] * 8])
def test_even_loads_are_even_on_the_ranks(loads: list[int]) -> None:
    assert balance(loads, slots=8, ranks=4).imbalance(loads) == 1.0


@pytest.mark.parametrize(("slots", "message"), [(10, "10 expert slots on 4 ranks.*multiple of 4"), (4, "4 expert.*at least 8")])
def test_what_does_not_divide_is_refused(slots: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        balance([1] * 8, slots=slots, ranks=4)


def test_ranges_must_be_equal() -> None:
    with pytest.raises(ConfigError, match="6 experts cannot be shared equally by ep=4 ranks"):
        Placement.consecutive(6, 4)
