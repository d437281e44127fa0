"""Ids of sequence state on the device, who holds them, and the prefix cache that keeps some of them. Plain Python, no tensors.

A sequence's state has four lifetimes, one pool of ids each:

    grow        256 tokens of compressed rows and index keys, all layers; kept as long as the sequence
    window      64 tokens of raw rows, all layers; released when the sliding window has passed them
    slots       the carry (compressor accumulators) of one running sequence
    snapshots   a copy of the carry at a cached border

An id is held by sequences (references) or by the prefix cache (pins). What only the cache holds can be had back at any time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS

_KEY_BYTES = 16


def pages_for(num_tokens: int) -> int:
    """Return how many grow pages hold the positions ``[0, num_tokens)``."""
    return -(-num_tokens // PAGE_TOKENS)


def first_window_page(position: int, window: int) -> int:
    """Return the first logical window page that the token at ``position`` attends to; pages before it have slid away.

    Args:
        position: Of the token.
        window: Tokens that sliding-window attention sees; 0 if no layer has a window, and so no pages.
    """
    return max(0, position - window + 1) // WINDOW_PAGE_TOKENS if window else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Ids of a pool: ``total``, ``free`` ones, and ``cached`` ones that only the prefix cache holds."""

    total: int
    free: int
    cached: int


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
        """Ids that nobody holds."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Ids that are free, or would be if the prefix cache let go of everything."""
        return len(self._free) + self._reclaimable

    def stats(self) -> PoolStats:
        """Return the present counts."""
        return PoolStats(total=self.total, free=len(self._free), cached=self._reclaimable)

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
        """Add a reference to ids that somebody holds."""
        refs = self._refs
        for i in ids:
            if not refs[i]:
                assert self._pins[i], f"{self.name} {i} is free and cannot be shared"
                self._reclaimable -= 1
            refs[i] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Take one reference back from each id."""
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
        """Let the cache hold ids, which must be referenced at this moment."""
        for i in ids:
            assert self._refs[i], f"{self.name} {i} has no reference and cannot be pinned"
            self._pins[i] += 1

    def unpin(self, ids: Iterable[int]) -> None:
        """Take one pin back from each id."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The four pools of one engine."""

    grow: IdPool
    window: IdPool
    slots: IdPool
    snapshots: IdPool

    @classmethod
    def sized(cls, *, grow: int, window: int, slots: int, snapshots: int) -> Pools:
        """Return full pools of the given numbers of ids."""
        return cls(
            grow=IdPool("grow page", grow),
            window=IdPool("window page", window),
            slots=IdPool("slot", slots),
            snapshots=IdPool("snapshot", snapshots),
        )


class PrefixChain:
    """Hashes of all whole-page prefixes of one growing token list.

    The key of k pages covers every token before it, the weight epoch and the salt: equal keys mean equal state. Each page is hashed
    once, when its key is first asked for. The list is the sequence's own and may only grow.

    Attributes:
        epoch: The weight epoch that the keys stand for.
    """

    __slots__ = ("_keys", "_token_ids", "epoch")

    def __init__(self, token_ids: list[int], *, epoch: int, salt: str | None) -> None:
        self.epoch = epoch
        self._token_ids = token_ids
        seed = epoch.to_bytes(8, "little") + (b"-" if salt is None else b"+" + salt.encode("utf-8", "surrogatepass"))
        self._keys = [hashlib.blake2b(seed, digest_size=_KEY_BYTES).digest()]

    def key(self, num_pages: int) -> bytes:
        """Return the hash of the first ``num_pages`` pages, whose tokens must all be known."""
        keys = self._keys
        while len(keys) <= num_pages:
            end = len(keys) * PAGE_TOKENS
            page = self._token_ids[end - PAGE_TOKENS : end]
            assert len(page) == PAGE_TOKENS, f"the tokens before {end} are not all known"
            keys.append(hashlib.blake2b(array("q", page).tobytes(), key=keys[-1], digest_size=_KEY_BYTES).digest())
        return keys[num_pages]

    def known_keys(self) -> list[bytes]:
        """Return the keys of one page and more that were computed so far."""
        return self._keys[1:]

    def fork(self, token_ids: list[int]) -> PrefixChain:
        """Return a chain over another list that begins with the same tokens as far as this one has been hashed."""
        twin = PrefixChain.__new__(PrefixChain)
        twin.epoch = self.epoch
        twin._token_ids = token_ids
        twin._keys = self._keys.copy()
        return twin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """Everything that is needed to go on after a prefix; holds one pin on each of its ids.

    Attributes:
        num_tokens: The border, a multiple of 256.
        grow: All its grow pages, in logical order.
        window: Window pages up to the border, from ``first_window_page(num_tokens, window)`` on.
        snapshot: The carry at the border.
        fed_until: Of how many of the tokens the model's own drafter has its rows; see ``Sequence``.
    """

    num_tokens: int
    grow: tuple[int, ...]
    window: tuple[int, ...]
    snapshot: int
    fed_until: int = 0


class PrefixCache:
    """Checkpoints by prefix, the least recently used first to go.

    Keys contain the epoch, so that a new epoch makes every older checkpoint unreachable at once. These can no longer be used, hence
    they are the least recently used ones, and go first when ids are needed.

    Attributes:
        epoch: Counts ``bump_epoch``.
    """

    def __init__(self, pools: Pools) -> None:
        self.epoch = 0
        self._pools = pools
        self._entries: OrderedDict[bytes, Checkpoint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def chain(self, token_ids: list[int], salt: str | None) -> PrefixChain:
        """Return the chain of a token list in the present epoch."""
        return PrefixChain(token_ids, epoch=self.epoch, salt=salt)

    def lookup(self, chain: PrefixChain, max_tokens: int) -> Checkpoint | None:
        """Return the longest checkpoint of at most ``max_tokens`` tokens and mark it as used."""
        if not self._entries:
            return None
        for num_pages in range(max_tokens // PAGE_TOKENS, 0, -1):
            key = chain.key(num_pages)
            checkpoint = self._entries.get(key)
            if checkpoint is not None:
                self._entries.move_to_end(key)
                return checkpoint
        return None

    def longest(self, chain: PrefixChain, max_tokens: int) -> int:
        """Return the tokens of the longest checkpoint of at most ``max_tokens``, without marking it as used."""
        pages = range(max_tokens // PAGE_TOKENS, 0, -1) if self._entries else ()
        return PAGE_TOKENS * next((num_pages for num_pages in pages if chain.key(num_pages) in self._entries), 0)

    def contains(self, chain: PrefixChain, num_tokens: int) -> bool:
        """Return whether there is a checkpoint at a border, without marking it as used."""
        return chain.key(num_tokens // PAGE_TOKENS) in self._entries

    def capture(self, *, num_tokens: int, grow: Sequence[int], window: Sequence[int], fed_until: int = 0) -> Checkpoint | None:
        """Pin pages and a snapshot of a border, or return ``None`` when no snapshot can be had.

        The checkpoint belongs to the caller, who passes it to ``insert`` or ``drop``.
        """
        assert num_tokens == len(grow) * PAGE_TOKENS, f"{len(grow)} pages do not end at {num_tokens}"
        snapshot = self.allocate(self._pools.snapshots, 1)
        if snapshot is None:
            return None
        checkpoint = Checkpoint(
            num_tokens=num_tokens, grow=tuple(grow), window=tuple(window), snapshot=snapshot[0], fed_until=fed_until
        )
        self._pools.grow.pin(checkpoint.grow)
        self._pools.window.pin(checkpoint.window)
        self._pools.snapshots.pin(snapshot)
        self._pools.snapshots.release(snapshot)
        return checkpoint

    def insert(self, chain: PrefixChain, checkpoint: Checkpoint) -> bool:
        """Take over a captured checkpoint. One of an older epoch, or of a prefix that is cached already, is dropped.

        Returns:
            Whether it was inserted.
        """
        if chain.epoch != self.epoch or self.contains(chain, checkpoint.num_tokens):
            self.drop(checkpoint)
            return False
        self._entries[chain.key(checkpoint.num_tokens // PAGE_TOKENS)] = checkpoint
        return True

    def drop(self, checkpoint: Checkpoint) -> None:
        """Give back the ids of a checkpoint that is not, or no longer, in the cache."""
        self._pools.grow.unpin(checkpoint.grow)
        self._pools.window.unpin(checkpoint.window)
        self._pools.snapshots.unpin((checkpoint.snapshot,))

    def discard(self, chain: PrefixChain, checkpoint: Checkpoint) -> None:
        """Remove one checkpoint of a chain if it is still there."""
        key = chain.key(checkpoint.num_tokens // PAGE_TOKENS)
        if self._entries.get(key) is checkpoint:
            self.drop(self._entries.pop(key))

    def forget(self, chain: PrefixChain) -> None:
        """Remove every checkpoint of a chain: its state turned out to be damaged."""
        for key in chain.known_keys():
            if key in self._entries:
                self.drop(self._entries.pop(key))

    def evict_one(self) -> bool:
        """Remove the least recently used checkpoint; return whether there was one."""
        if not self._entries:
            return False
        self.drop(self._entries.popitem(last=False)[1])
        return True

    def bump_epoch(self) -> None:
        """Make every checkpoint unreachable. O(1): ids come back as they are needed."""
        self.epoch += 1

    def allocate(self, pool: IdPool, count: int) -> list[int] | None:
        """Allocate ids, evicting as many checkpoints as that takes; ``None``, and nothing evicted, if even all would not do."""
        if count > pool.num_available:
            return None
        while pool.num_free < count:
            if not self.evict_one():
                return None  # what is left is pinned by checkpoints that were captured but not inserted yet
        return pool.allocate(count)

    def checkpoints(self) -> Iterable[Checkpoint]:
        """Return all checkpoints, the least recently used first."""
        return self._entries.values()
