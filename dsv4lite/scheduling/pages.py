"""Pools of page and slot ids, counted by holder. Plain Python, no tensors.

A sequence's state has four lifetimes, one pool of ids each:

    grow        pages of 256 tokens, all layers; held as long as the sequence
    window      sliding-window pages of 64 tokens, all layers; released when the window has passed them
    slots       the compressor state of one running sequence
    snapshots   a copy of the compressor state at the end of a cached prefix

An id is held by sequences (references) or by the prefix cache (pins). Ids that only the cache holds can be evicted at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS


def pages_for(num_tokens: int) -> int:
    """Return how many grow pages hold the positions ``[0, num_tokens)``."""
    return -(-num_tokens // PAGE_TOKENS)


def first_window_page(position: int, window: int) -> int:
    """Return the first logical window page that the token at ``position`` attends to; pages before it have slid away.

    Args:
        position: Position of the token.
        window: Tokens that sliding-window attention sees; 0 if no layer has a window, and so no pages.
    """
    return max(0, position - window + 1) // WINDOW_PAGE_TOKENS if window else 0


class IdPool:
    """The ids ``0 .. total - 1``, counted by holder.

    Attributes:
        name: For messages.
        total: Number of ids.
    """

    __slots__ = ("_free", "_pins", "_reclaimable", "_refs", "name", "total")

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._refs = [0] * total
        self._pins = [0] * total
        self._reclaimable = 0

    @property
    def num_free(self) -> int:
        """Ids without a holder."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Ids that are free or held by the prefix cache alone."""
        return len(self._free) + self._reclaimable

    def allocate(self, count: int) -> list[int] | None:
        """Return ``count`` free ids with one reference each, or ``None`` when there are not as many."""
        split = len(self._free) - count
        if split < 0:
            return None
        ids = self._free[split:]
        del self._free[split:]
        for i in ids:
            self._refs[i] = 1
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """Add a reference to ids that are held."""
        refs = self._refs
        for i in ids:
            if not refs[i]:
                assert self._pins[i], f"{self.name} {i} is free and cannot be shared"
                self._reclaimable -= 1
            refs[i] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Drop one reference of each id."""
        refs = self._refs
        for i in ids:
            assert refs[i], f"{self.name} {i} has no reference to release"
            refs[i] -= 1
            if not refs[i]:
                if self._pins[i]:
                    self._reclaimable += 1
                else:
                    self._free.append(i)

    def pin(self, ids: Iterable[int]) -> None:
        """Add a pin of the prefix cache to ids that have a reference."""
        for i in ids:
            assert self._refs[i], f"{self.name} {i} has no reference and cannot be pinned"
            self._pins[i] += 1

    def unpin(self, ids: Iterable[int]) -> None:
        """Drop one pin of each id."""
        pins = self._pins
        for i in ids:
            assert pins[i], f"{self.name} {i} has no pin to release"
            pins[i] -= 1
            if not pins[i] and not self._refs[i]:
                self._reclaimable -= 1
                self._free.append(i)

    def check(self, refs: Counter[int], pins: Counter[int]) -> None:
        """Assert that the holders are exactly the given ones and that free + held + cached == total."""
        for what, counts, holders in (("references", self._refs, refs), ("pins", self._pins, pins)):
            expected = [0] * self.total
            for i, count in holders.items():
                expected[i] = count
            # Whole lists are compared, as a pool may have a million ids; the message looks for the few that differ.
            assert counts == expected, (
                f"{self.name}: wrong {what} (id, counted, held) "
                f"{[(i, a, b) for i, (a, b) in enumerate(zip(counts, expected, strict=True)) if a != b][:8]}"
            )
        free, held = set(self._free), refs.keys() | pins.keys()
        assert len(free) == len(self._free), f"{self.name}: an id is free twice"
        assert free.isdisjoint(held), f"{self.name} {sorted(free & held)[:8]} are free and held"
        assert len(free) + len(held) == self.total, f"{self.name}: {self.total - len(free) - len(held)} ids are lost"
        cached = len(pins.keys() - refs.keys())
        assert cached == self._reclaimable, f"{self.name}: {cached} ids are cached, {self._reclaimable} counted"


class Pools:
    """The four pools of one engine, of the given numbers of ids."""

    def __init__(self, *, grow: int, window: int, slots: int, snapshots: int) -> None:
        self.grow = IdPool("grow page", grow)
        self.window = IdPool("window page", window)
        self.slots = IdPool("slot", slots)
        self.snapshots = IdPool("snapshot", snapshots)

    def check_released(self) -> None:
        """Assert that no sequence holds an id. Compares counts only; ``IdPool.check`` looks at every id."""
        for pool in (self.grow, self.window, self.slots, self.snapshots):
            assert pool.num_available == pool.total, f"{pool.name}: {pool.total - pool.num_available} ids are lost"
