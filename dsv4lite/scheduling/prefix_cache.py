"""The prefix cache: pages and snapshots of computed prefixes, found by hash. Plain Python, no tensors."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.scheduling.pages import IdPool, Pools

_KEY_BYTES = 16


class PrefixChain:
    """Hashes of all whole-page prefixes of one growing sequence of tokens.

    The key of k pages covers all their tokens, the weight epoch and the salt: equal keys mean equal state. Each page is hashed
    once, when its key is first requested. The tokens may only grow.

    Attributes:
        epoch: The weight epoch that the keys stand for.
        keys: Keys of 0, 1, 2, … pages, as far as they were requested.
    """

    __slots__ = ("_token_ids", "epoch", "keys")

    def __init__(self, token_ids: Sequence[int], *, epoch: int, salt: str | None) -> None:
        self.epoch = epoch
        self._token_ids = token_ids
        seed = epoch.to_bytes(8, "little") + (b"-" if salt is None else b"+" + salt.encode("utf-8", "surrogatepass"))
        self.keys = [hashlib.blake2b(seed, digest_size=_KEY_BYTES).digest()]

    def key(self, num_pages: int) -> bytes:
        """Return the hash of the first ``num_pages`` pages, whose tokens must all be known."""
        keys = self.keys
        while len(keys) <= num_pages:
            end = len(keys) * PAGE_TOKENS
            page = self._token_ids[end - PAGE_TOKENS : end]
            assert len(page) == PAGE_TOKENS, f"the tokens before {end} are not all known"
            keys.append(hashlib.blake2b(array("i", page).tobytes(), key=keys[-1], digest_size=_KEY_BYTES).digest())
        return keys[num_pages]

    def fork(self, token_ids: Sequence[int]) -> PrefixChain:
        """Return a chain over another sequence, equal to this one as far as that has been hashed."""
        twin = PrefixChain.__new__(PrefixChain)
        twin.epoch = self.epoch
        twin._token_ids = token_ids
        twin.keys = self.keys.copy()
        return twin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedPrefix:
    """The state after a prefix; holds one pin on each of its ids.

    Attributes:
        num_tokens: Length of the prefix, a multiple of 256.
        grow: All its grow pages, in logical order.
        window: Window pages from ``first_window_page(num_tokens, window)`` on.
        snapshot: Snapshot of the compressor state after it; empty for a model without such state.
        drafter_computed: KV computed length of the drafter; see ``Sequence``.
    """

    num_tokens: int
    grow: tuple[int, ...]
    window: tuple[int, ...]
    snapshot: tuple[int, ...]
    drafter_computed: int = 0


class PrefixCache:
    """Cached prefixes; the least recently used one is evicted first.

    Keys contain the epoch: a new epoch makes every older prefix unreachable at once. As unreachable prefixes are never used again,
    they become the least recently used ones and are evicted first.

    Args:
        pools: Pools of the ids of pages and snapshots.
        snapshots: Whether a prefix needs a snapshot of compressor state.

    Attributes:
        epoch: Number of calls of ``bump_epoch``.
    """

    def __init__(self, pools: Pools, *, snapshots: bool = True) -> None:
        self.epoch = 0
        self._pools = pools
        self._snapshots = snapshots
        self._entries: OrderedDict[bytes, CachedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def chain(self, token_ids: Sequence[int], salt: str | None) -> PrefixChain:
        """Return the chain of tokens in the present epoch."""
        return PrefixChain(token_ids, epoch=self.epoch, salt=salt)

    def longest(self, chain: PrefixChain, max_tokens: int) -> int:
        """Return the length of the longest cached prefix of at most ``max_tokens`` tokens, without marking it as used."""
        pages = range(max_tokens // PAGE_TOKENS, 0, -1) if self._entries else ()
        return PAGE_TOKENS * next((num_pages for num_pages in pages if chain.key(num_pages) in self._entries), 0)

    def lookup(self, chain: PrefixChain, max_tokens: int) -> CachedPrefix | None:
        """Return the longest cached prefix of at most ``max_tokens`` tokens and mark it as used."""
        num_tokens = self.longest(chain, max_tokens)
        if not num_tokens:
            return None
        key = chain.key(num_tokens // PAGE_TOKENS)
        self._entries.move_to_end(key)
        return self._entries[key]

    def contains(self, chain: PrefixChain, num_tokens: int) -> bool:
        """Return whether the first ``num_tokens`` tokens are cached, without marking them as used."""
        return chain.key(num_tokens // PAGE_TOKENS) in self._entries

    def capture(
        self, *, num_tokens: int, grow: Sequence[int], window: Sequence[int], drafter_computed: int = 0
    ) -> CachedPrefix | None:
        """Pin the pages of a prefix and allocate its snapshot; ``None`` if no snapshot is available.

        The caller owns the result and passes it to ``insert`` or ``drop``.
        """
        assert num_tokens == len(grow) * PAGE_TOKENS, f"{len(grow)} pages do not end at {num_tokens}"
        snapshot = self.allocate(self._pools.snapshots, 1) if self._snapshots else []
        if snapshot is None:
            return None
        self._pools.grow.pin(grow)
        self._pools.window.pin(window)
        self._pools.snapshots.pin(snapshot)
        self._pools.snapshots.release(snapshot)
        return CachedPrefix(
            num_tokens=num_tokens,
            grow=tuple(grow),
            window=tuple(window),
            snapshot=tuple(snapshot),
            drafter_computed=drafter_computed,
        )

    def insert(self, chain: PrefixChain, prefix: CachedPrefix) -> bool:
        """Cache a captured prefix; drop it if its epoch is over or it is cached already. Return whether it was inserted."""
        if chain.epoch != self.epoch or self.contains(chain, prefix.num_tokens):
            self.drop(prefix)
            return False
        self._entries[chain.key(prefix.num_tokens // PAGE_TOKENS)] = prefix
        return True

    def drop(self, prefix: CachedPrefix) -> None:
        """Unpin the ids of a prefix that is not, or no longer, in the cache."""
        self._pools.grow.unpin(prefix.grow)
        self._pools.window.unpin(prefix.window)
        self._pools.snapshots.unpin(prefix.snapshot)

    def discard(self, chain: PrefixChain, prefix: CachedPrefix) -> None:
        """Remove one cached prefix of a chain if it is still there."""
        key = chain.key(prefix.num_tokens // PAGE_TOKENS)
        if self._entries.get(key) is prefix:
            self.drop(self._entries.pop(key))

    def forget(self, chain: PrefixChain) -> None:
        """Remove every cached prefix of a chain whose state turned out to be damaged."""
        for key in chain.keys[1:]:
            if key in self._entries:
                self.drop(self._entries.pop(key))

    def evict_one(self) -> bool:
        """Remove the least recently used prefix; return whether there was one."""
        if not self._entries:
            return False
        self.drop(self._entries.popitem(last=False)[1])
        return True

    def bump_epoch(self) -> None:
        """Make every cached prefix unreachable, in O(1); their ids are evicted when they are needed."""
        self.epoch += 1

    def allocate(self, pool: IdPool, count: int) -> list[int] | None:
        """Allocate ids, evicting prefixes as needed; return ``None``, without eviction, if too few ids are available."""
        if count > pool.num_available:
            return None
        while pool.num_free < count:
            if not self.evict_one():
                return None  # the others are pinned by prefixes that were captured but not inserted yet
        return pool.allocate(count)

    def prefixes(self) -> Iterable[CachedPrefix]:
        """Return all cached prefixes, the least recently used first."""
        return self._entries.values()
