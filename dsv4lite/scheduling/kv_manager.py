"""The KV manager: allocates, shares and releases the pages and slots of sequences. Plain Python, no tensors.

The scheduler decides which sequence gets pages, and which one is preempted for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.pages import Pools, first_window_page, pages_for
from dsv4lite.scheduling.prefix_cache import CachedPrefix, PrefixCache
from dsv4lite.scheduling.sequence import ALL_TOKENS, NO_SLOT, Sequence
from dsv4lite.scheduling.step_plan import NO_PAGE


class KVManager:
    """Owns the pools and the prefix cache; the only writer of a sequence's pages and slot.

    Args:
        pools: Ids of pages and slots.
        window: Tokens that sliding-window attention sees, the token itself included; 0 without it.
        snapshots: Whether a cached prefix needs a snapshot of compressor state.

    Attributes:
        cache: Its cached prefixes are evicted when sequences need their pages.
    """

    def __init__(self, pools: Pools, *, window: int, snapshots: bool) -> None:
        self.cache = PrefixCache(pools, snapshots=snapshots)
        self._pools = pools
        self._window = window
        self._drafter_runs = False  # the model's own drafter computes its KV in the step
        self._changes: dict[str, list[Any]] = defaultdict(list)  # by field of the next plan

    # ------------------------------------------------------------------------------------------------------- start and end

    def take_slot(self, seq: Sequence) -> bool:
        """Allocate a slot; return whether there was one."""
        slots = self._pools.slots.allocate(1)
        if slots is not None:
            seq.slot = slots[0]
        return slots is not None

    def attach_prefix(self, seq: Sequence) -> CachedPrefix | None:
        """Share the longest cached prefix that ends before the last position to run and before the first position to score."""
        if seq.chain is None or seq.chain.epoch != self.cache.epoch:
            seq.chain = self.cache.chain(seq.tokens, seq.request.cache_salt)
        if seq.request.params.records_choices or seq.request.replay is not None:
            return None  # choices are recorded and replayed only for tokens that run
        most = seq.num_to_run - 1
        prefix = self.cache.lookup(seq.chain, most if seq.score_next is None else min(most, seq.score_next))
        if prefix is None:
            return None
        # A prefix ends at the end of a window page, too: later tokens go to new pages, and shared ones are never written again.
        assert prefix.num_tokens % WINDOW_PAGE_TOKENS == 0
        seq.num_computed = seq.cached_until = prefix.num_tokens
        seq.drafter_computed = prefix.drafter_computed
        seq.pages, seq.window = prefix.grow, prefix.window
        seq.window_first = first_window_page(prefix.num_tokens, self._window)
        self._pools.grow.share(seq.pages)
        self._pools.window.share(seq.window)
        return prefix

    def start(self, seq: Sequence, prefix: CachedPrefix | None) -> None:
        """Let the step being planned initialize the state of a sequence that starts."""
        if prefix is None or not prefix.snapshot:
            self._changes["resets"].append(seq.slot)
        else:
            self._changes["restores"].append((prefix.snapshot[0], seq.slot))
        if self._drafter_runs:
            self._zero_missed(seq)

    def fork(self, leader: Sequence, child: Sequence) -> bool:
        """Start a completion with the state before its leader's last prompt token, which the step being planned runs.

        Returns:
            Whether there was room; if not, the child holds nothing.
        """
        shared = leader.prompt_len - 1
        full_pages, partial_page = divmod(shared, PAGE_TOKENS)
        first = first_window_page(shared, self._window)
        full_window, partial_window = divmod(shared, WINDOW_PAGE_TOKENS)
        full_window -= first
        assert leader.window_first == first and leader.chain is not None
        child.pages = leader.pages[:full_pages]
        child.window = leader.window[:full_window]
        child.window_first = first
        child.num_computed = shared
        child.drafter_computed = leader.drafter_computed
        self._pools.grow.share(child.pages)
        self._pools.window.share(child.window)
        if not self.extend(child, shared + 1) or not self.take_slot(child):
            self.release(child)
            return False
        if partial_page:
            self._changes["grow_copies"].append((leader.pages[full_pages], child.pages[full_pages]))
        if partial_window and self._window:
            self._changes["window_copies"].append((leader.window[full_window], child.window[full_window]))
        self._changes["slot_copies"].append((leader.slot, child.slot))
        child.chain = leader.chain.fork(child.tokens)
        child.cached_until = leader.prompt_pages_end
        return True

    def release(self, seq: Sequence) -> None:
        """Release all state of a sequence, which can start again from its first token."""
        self._pools.grow.release(seq.pages)
        self._pools.window.release(page for page in seq.window if page != NO_PAGE)
        if seq.slot != NO_SLOT:
            self._pools.slots.release((seq.slot,))
        seq.slot = NO_SLOT
        seq.pages = seq.window = ()
        seq.window_first = 0
        seq.num_computed = seq.cached_until = seq.steady_until = seq.drafter_computed = 0
        seq.state_copy, seq.drafts = 0, ()
        seq.rolling = None

    def take_changes(self) -> dict[str, tuple[Any, ...]]:
        """Return the changes of state that the step being planned makes besides its sequences, by field of ``StepPlan``.

        ``zero_rows`` may include rows of a sequence that was preempted since.
        """
        changes = {name: tuple(ids) for name, ids in self._changes.items()}
        self._changes.clear()
        return changes

    # ---------------------------------------------------------------------------------------------------------------- pages

    def extend(self, seq: Sequence, end: int, *, reserve: int = 0) -> bool:
        """Allocate the pages of the span ``[num_computed, end)``, and grow pages for ``reserve`` tokens.

        Returns:
            Whether all were available; if not, the sequence keeps those that it got.
        """
        missing = pages_for(max(end, reserve)) - len(seq.pages)
        if missing > 0:
            pages = self.cache.allocate(self._pools.grow, missing)
            if pages is None:
                return False
            seq.pages += tuple(pages)
        if not self._window:
            return True
        known_end = seq.window_first + len(seq.window)
        first = max(known_end, max(seq.num_computed, end - self._window) // WINDOW_PAGE_TOKENS)
        missing = (end - 1) // WINDOW_PAGE_TOKENS + 1 - first
        if missing > 0:
            pages = self.cache.allocate(self._pools.window, missing)
            if pages is None:
                return False
            if not seq.window:
                seq.window_first = first
            else:
                seq.window += (NO_PAGE,) * (first - known_end)
            seq.window += tuple(pages)
        return True

    def slides_at(self, seq: Sequence) -> int:
        """Return how many tokens must have run for the window to have passed the sequence's first window page."""
        return (seq.window_first + 1) * WINDOW_PAGE_TOKENS + self._window - 1 if self._window else ALL_TOKENS

    def steady_limit(self, seq: Sequence) -> int:
        """Return the position before which decode needs no page, releases none, fills no grow page, and is not the last step."""
        if not self._window:
            return min(pages_for(seq.num_computed) * PAGE_TOKENS, seq.last_run)
        next_page = (seq.window_first + len(seq.window)) * WINDOW_PAGE_TOKENS  # every grow page ends with a window page
        return min(next_page, self.slides_at(seq), seq.last_run)

    def slide(self, seq: Sequence) -> None:
        """Release the window pages that the next token does not attend to."""
        first = first_window_page(min(seq.num_computed, len(seq.tokens)), self._window)
        passed, seq.window = seq.window[: first - seq.window_first], seq.window[first - seq.window_first :]
        seq.window_first, seq.steady_until = first, 0
        self._pools.window.release(page for page in passed if page != NO_PAGE)

    def rewind(self, seq: Sequence, length: int) -> None:
        """Take back rejected drafts from position ``length`` on: release later window pages; later spans overwrite other rows."""
        seq.num_computed = length
        if seq.drafter_computed != ALL_TOKENS:
            seq.drafter_computed = min(seq.drafter_computed, length)
        kept = (length - 1) // WINDOW_PAGE_TOKENS + 1 - seq.window_first
        if kept < len(seq.window):
            self._pools.window.release(seq.window[kept:])
            seq.window, seq.steady_until = seq.window[:kept], 0

    # ------------------------------------------------------------------------------------------------------ the drafter's KV

    def run_drafter(self, running: Iterable[Sequence], *, on: bool) -> None:
        """Set whether the model's own drafter computes its KV from the next step on."""
        if on == self._drafter_runs:
            return
        self._drafter_runs = on
        for seq in running:
            if on:
                self._zero_missed(seq)
            else:
                seq.drafter_computed = min(seq.drafter_computed, seq.num_computed)

    def _zero_missed(self, seq: Sequence) -> None:
        """Let the step zero-fill drafter rows of tokens whose KV is not computed: those in the window, or all without a window.

        Rows of a cached prefix may be among them; they are then zero for every sequence that shares it.
        """
        size, pages, before, first = WINDOW_PAGE_TOKENS, seq.window, seq.window_first, seq.num_computed + 1 - self._window
        if not self._window:
            size, pages, before, first = PAGE_TOKENS, seq.pages, 0, 0
        for position in range(max(seq.drafter_computed, first, 0), seq.num_computed):
            number, row = divmod(position, size)
            self._changes["zero_rows"].append((pages[number - before], row))
        seq.drafter_computed = ALL_TOKENS

    # ------------------------------------------------------------------------------------------------------ cached prefixes

    def capture(self, ends: Iterable[tuple[Sequence, int, bool]]) -> None:
        """Cache prefixes that end with a span of the step being planned; the next step may use them, since it runs later.

        Args:
            ends: Sequence, length of the prefix, and whether it is kept when the sequence's next one is cached.
        """
        captured = []
        for seq, length, lasting in ends:
            assert seq.chain is not None
            if seq.chain.epoch != self.cache.epoch or seq.request.replay is not None:  # state of replayed choices
                continue
            if seq.rolling is not None:
                self.cache.discard(seq.chain, seq.rolling)
                seq.rolling = None
            if length <= len(seq.tokens) and self.cache.contains(seq.chain, length):
                continue
            window = seq.window[first_window_page(length, self._window) - seq.window_first :]
            assert NO_PAGE not in window
            prefix = self.cache.capture(
                num_tokens=length,
                grow=seq.pages[: length // PAGE_TOKENS],
                window=window,
                drafter_computed=min(seq.drafter_computed, length),
            )
            if prefix is not None:
                self._changes["saves"] += [(seq.slot, snapshot) for snapshot in prefix.snapshot]
                seq.pending = (prefix, lasting)
                captured.append(seq)
        # Inserted only now: within the loop, a new prefix could be evicted and its snapshot saved to twice in one step.
        for seq in captured:
            self.insert_pending(seq)

    def insert_pending(self, seq: Sequence) -> None:
        """Insert a captured prefix into the cache if all its tokens are known."""
        if seq.pending is not None and seq.pending[0].num_tokens <= len(seq.tokens):
            assert seq.chain is not None
            prefix, lasting = seq.pending
            seq.pending = None
            if self.cache.insert(seq.chain, prefix) and not lasting:
                seq.rolling = prefix

    def drop_pending(self, seq: Sequence) -> None:
        """Drop a captured prefix whose last token will not be known."""
        if seq.pending is not None:
            self.cache.drop(seq.pending[0])
            seq.pending = None

    # ------------------------------------------------------------------------------------------------------------- integrity

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that every id is free, or held by exactly the sequences and cached prefixes that list it."""
        holders, pools = list(holders), self._pools
        pins = [seq.pending[0] for seq in holders if seq.pending is not None]
        pins += self.cache.prefixes()
        pools.grow.check(Counter(i for s in holders for i in s.pages), Counter(i for p in pins for i in p.grow))
        pools.window.check(
            Counter(i for s in holders for i in s.window if i != NO_PAGE), Counter(i for p in pins for i in p.window)
        )
        pools.slots.check(Counter(s.slot for s in holders if s.slot != NO_SLOT), Counter())
        pools.snapshots.check(Counter(), Counter(i for p in pins for i in p.snapshot))
