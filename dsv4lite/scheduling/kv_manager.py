"""What each sequence holds of the pools and the prefix cache: getting it, sharing it, giving it back. Plain Python, no tensors.

Who gets anything, and who has to give, is up to the scheduler.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.pages import (
    Checkpoint,
    Pools,
    PrefixCache,
    first_window_page,
    pages_for,
)
from dsv4lite.scheduling.sequence import FED, NO_SLOT, Sequence
from dsv4lite.scheduling.step_plan import NO_PAGE, SequencePlan, StepPlan


@dataclass(slots=True, eq=False)
class Moves:
    """What a step does to state besides running its sequences; see ``StepPlan``."""

    resets: list[int] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    grow_copies: list[tuple[int, int]] = field(default_factory=list)
    window_copies: list[tuple[int, int]] = field(default_factory=list)
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, slot: int, checkpoint: Checkpoint | None) -> None:
        """Fill a slot that a sequence has just taken: from a checkpoint, or with nothing."""
        if checkpoint is None:
            self.resets.append(slot)
        else:
            self.restores.append((checkpoint.snapshot, slot))


@dataclass(slots=True, eq=False)
class StepDraft:
    """A step plan in the making.

    Attributes:
        now: ``time.monotonic()``.
        room: Tokens that it can still take.
        max_drafts: Most guesses in a run.
        singles, chunks: Runs of one known token, and others.
        moves: What else is done to state.
        leaders: Sequences whose prompt ends in this step, with completions that wait for it.
        borders: Sequences that end on a border, which border, and whether its checkpoint is a lasting one.
        crowded: Somebody had to give way, so that nobody new may come in.
    """

    now: float
    room: int
    max_drafts: int
    singles: list[SequencePlan] = field(default_factory=list)
    chunks: list[SequencePlan] = field(default_factory=list)
    moves: Moves = field(default_factory=Moves)
    leaders: list[Sequence] = field(default_factory=list)
    borders: list[tuple[Sequence, int, bool]] = field(default_factory=list)
    crowded: bool = False

    def plan(self, step: int, blanks: tuple[tuple[int, int, int], ...] = ()) -> StepPlan:
        """Return the finished plan."""
        moves = self.moves
        return StepPlan(
            step=step,
            sequences=(*self.singles, *self.chunks),
            resets=tuple(moves.resets),
            restores=tuple(moves.restores),
            grow_copies=tuple(moves.grow_copies),
            window_copies=tuple(moves.window_copies),
            slot_copies=tuple(moves.slot_copies),
            saves=tuple(moves.saves),
            max_drafts=self.max_drafts,
            blanks=blanks,
        )


class Holdings:
    """Hands out the ids of sequence state, and is the only one to enter them into sequences.

    Args:
        pools: Where ids come from.
        cache: Prefixes that sequences begin with and leave behind; whatever it holds gives way to sequences.
        window: Tokens that sliding-window attention sees, the token itself included; 0 if no layer has a window.
    """

    def __init__(self, pools: Pools, cache: PrefixCache, *, window: int) -> None:
        self._pools = pools
        self._cache = cache
        self._window = window
        self._feeds = False  # steps bring the model's own drafter its rows
        self._blanks: list[tuple[int, int, int]] = []  # of the next plan

    # ------------------------------------------------------------------------------------------------- beginning and ending

    def take_slot(self, seq: Sequence) -> bool:
        """Get a slot, if there is one."""
        slots = self._pools.slots.allocate(1)
        if slots is not None:
            seq.slot = slots[0]
        return slots is not None

    def attach_prefix(self, seq: Sequence) -> Checkpoint | None:
        """Begin a sequence with the longest cached prefix that leaves it something to run and to score."""
        if seq.chain is None or seq.chain.epoch != self._cache.epoch:
            seq.chain = self._cache.chain(seq.tokens, seq.request.cache_salt)
        if seq.request.params.return_routed_experts:
            return None  # they are only known for tokens that run
        most = seq.num_to_run - 1
        checkpoint = self._cache.lookup(seq.chain, most if seq.score_next is None else min(most, seq.score_next))
        if checkpoint is None:
            return None
        # The border is one of window pages too: what follows goes to new pages, and shared ones are never written again.
        assert checkpoint.num_tokens % WINDOW_PAGE_TOKENS == 0
        seq.num_computed = seq.kept_border = checkpoint.num_tokens
        seq.fed_until = checkpoint.fed_until
        seq.pages = list(checkpoint.grow)
        seq.window = list(checkpoint.window)
        seq.window_first = first_window_page(checkpoint.num_tokens, self._window)
        self._pools.grow.share(seq.pages)
        self._pools.window.share(seq.window)
        return checkpoint

    def begin(self, seq: Sequence, checkpoint: Checkpoint | None, moves: Moves) -> None:
        """Fill what a sequence that starts has taken, by the step being planned."""
        moves.begin(seq.slot, checkpoint)
        if self._feeds:
            self._fill(seq)

    def fork(self, leader: Sequence, child: Sequence, moves: Moves) -> bool:
        """Begin a completion with the state before its leader's last prompt token, which the step being planned runs.

        Returns:
            Whether there was room; if not, the child holds nothing.
        """
        shared = leader.prompt_len - 1
        full_pages, partly_page = divmod(shared, PAGE_TOKENS)
        first = first_window_page(shared, self._window)
        full_window, partly_window = divmod(shared, WINDOW_PAGE_TOKENS)
        full_window -= first
        assert leader.window_first == first and leader.chain is not None
        child.pages = leader.pages[:full_pages]
        child.window = leader.window[:full_window]
        child.window_first = first
        child.num_computed = shared
        child.fed_until = leader.fed_until
        self._pools.grow.share(child.pages)
        self._pools.window.share(child.window)
        if not self.extend(child, shared + 1) or not self.take_slot(child):
            self.release(child)
            return False
        if partly_page:
            moves.grow_copies.append((leader.pages[full_pages], child.pages[full_pages]))
        if self._window and partly_window:
            moves.window_copies.append((leader.window[full_window], child.window[full_window]))
        moves.slot_copies.append((leader.slot, child.slot))
        child.chain = leader.chain.fork(child.tokens)
        child.kept_border = leader.prompt_border
        return True

    def release(self, seq: Sequence) -> None:
        """Give back all state of a sequence; it would have to start from its first token."""
        self._pools.grow.release(seq.pages)
        self._pools.window.release(page for page in seq.window if page != NO_PAGE)
        if seq.slot != NO_SLOT:
            self._pools.slots.release((seq.slot,))
        seq.slot = NO_SLOT
        seq.pages, seq.page_tuple = [], None
        seq.window, seq.window_tuple, seq.window_first = [], None, 0
        seq.num_computed = seq.kept_border = seq.quiet_until = seq.fed_until = 0
        seq.carry, seq.drafts = 0, ()
        seq.rolling = None

    # ---------------------------------------------------------------------------------------------------------------- pages

    def can_reserve(self, seq: Sequence, num_tokens: int, *, spare: int) -> bool:
        """Return whether the grow pages of ``num_tokens`` tokens could be had with ``spare`` pages left over."""
        return self._pools.grow.num_available - (pages_for(num_tokens) - len(seq.pages)) >= spare

    def extend(self, seq: Sequence, end: int, *, reserve: int = 0) -> bool:
        """Get the pages for the run ``[num_computed, end)``, and grow pages for ``reserve`` tokens; keep what could be had."""
        missing = pages_for(max(end, reserve)) - len(seq.pages)
        if missing > 0:
            pages = self._cache.allocate(self._pools.grow, missing)
            if pages is None:
                return False
            seq.pages += pages
            seq.page_tuple = None
        if not self._window:
            return True
        known_end = seq.window_first + len(seq.window)
        first = max(known_end, max(seq.num_computed, end - self._window) // WINDOW_PAGE_TOKENS)
        missing = (end - 1) // WINDOW_PAGE_TOKENS + 1 - first
        if missing > 0:
            pages = self._cache.allocate(self._pools.window, missing)
            if pages is None:
                return False
            if not seq.window:
                seq.window_first = first
            else:
                seq.window += [NO_PAGE] * (first - known_end)
            seq.window += pages
            seq.window_tuple = None
        return True

    def slides_at(self, seq: Sequence) -> int:
        """Return how many tokens must have run for the window to have passed the first window page."""
        return (seq.window_first + 1) * WINDOW_PAGE_TOKENS + self._window - 1 if self._window else sys.maxsize

    def steady_until(self, seq: Sequence) -> int:
        """Return the position before which runs end on no border, need no page, leave none behind, and are not the last."""
        held = (seq.window_first + len(seq.window)) * WINDOW_PAGE_TOKENS  # a border of grow pages is one of these too
        next_page = held if self._window else len(seq.pages) * PAGE_TOKENS
        return min(next_page, self.slides_at(seq), seq.last_run)

    def slide(self, seq: Sequence) -> None:
        """Release the window pages that the next token does not attend to, wherever its sequence goes on."""
        first = first_window_page(min(seq.num_computed, len(seq.tokens)), self._window)
        gone = seq.window[: first - seq.window_first]
        del seq.window[: first - seq.window_first]
        seq.window_first = first
        seq.window_tuple, seq.quiet_until = None, 0
        self._pools.window.release(page for page in gone if page != NO_PAGE)

    def rewind(self, seq: Sequence, length: int) -> None:
        """Take back what a sequence runs from position ``length`` on, all of it drafts: rows are overwritten, pages given back."""
        seq.num_computed = length
        if seq.fed_until != FED:
            seq.fed_until = min(seq.fed_until, length)
        kept = (length - 1) // WINDOW_PAGE_TOKENS + 1 - seq.window_first
        if kept < len(seq.window):
            self._pools.window.release(seq.window[kept:])
            del seq.window[kept:]
            seq.window_tuple, seq.quiet_until = None, 0

    # ------------------------------------------------------------------------------------------------- the drafter's rows

    def feed(self, running: Iterable[Sequence], *, on: bool) -> None:
        """Let the model's own drafter have its rows of the tokens that the step runs, and of those behind; or miss them."""
        if on == self._feeds:
            return
        self._feeds = on
        for seq in running:
            if on:
                self._fill(seq)
            else:
                seq.fed_until = min(seq.fed_until, seq.num_computed)

    def _fill(self, seq: Sequence) -> None:
        """Give the drafter a blank row for each token of a sequence's window that it has missed."""
        end = seq.num_computed
        place = max(seq.fed_until, end + 1 - self._window, 0)
        while place < end:
            number, first = divmod(place, WINDOW_PAGE_TOKENS)
            last = min(first + end - place, WINDOW_PAGE_TOKENS)
            self._blanks.append((seq.window[number - seq.window_first], first, last))
            place += last - first
        seq.fed_until = FED

    def take_blanks(self) -> tuple[tuple[int, int, int], ...]:
        """Return the rows that become blank before the step that was planned; see ``StepPlan``. They may be of an earlier try."""
        blanks, self._blanks = tuple(self._blanks), []
        return blanks

    # --------------------------------------------------------------------------------------------------------- checkpoints

    def capture(self, borders: Iterable[tuple[Sequence, int, bool]], moves: Moves) -> None:
        """Turn borders on which runs of a step end into checkpoints, which the next step may use: by then they are written.

        Args:
            borders: Each with its sequence and whether its checkpoint is a lasting one; others are replaced by the next.
            moves: Of that step.
        """
        captured = []
        for seq, border, lasting in borders:
            assert seq.chain is not None
            if seq.chain.epoch != self._cache.epoch:
                continue
            if seq.rolling is not None:
                self._cache.discard(seq.chain, seq.rolling)
                seq.rolling = None
            if border <= len(seq.tokens) and self._cache.contains(seq.chain, border):
                continue
            first = first_window_page(border, self._window)
            window = seq.window[first - seq.window_first :]
            assert NO_PAGE not in window
            grow, fed = seq.pages[: border // PAGE_TOKENS], min(seq.fed_until, border)
            checkpoint = self._cache.capture(num_tokens=border, grow=grow, window=window, fed_until=fed)
            if checkpoint is not None:
                moves.saves.append((seq.slot, checkpoint.snapshot))
                seq.pending = (checkpoint, lasting)
                captured.append(seq)
        # Inserting only now keeps a snapshot of this step from being evicted, and saved to twice, within it.
        for seq in captured:
            self.insert_pending(seq)

    def insert_pending(self, seq: Sequence) -> None:
        """Cache a captured checkpoint if all its tokens are known."""
        if seq.pending is not None and seq.pending[0].num_tokens <= len(seq.tokens):
            assert seq.chain is not None
            checkpoint, lasting = seq.pending
            seq.pending = None
            if self._cache.insert(seq.chain, checkpoint) and not lasting:
                seq.rolling = checkpoint

    def drop_pending(self, seq: Sequence) -> None:
        """Give up a captured checkpoint whose last token will not be known."""
        if seq.pending is not None:
            self._cache.drop(seq.pending[0])
            seq.pending = None

    def forget_prefixes(self, seq: Sequence) -> None:
        """Remove every cached prefix of a sequence: its state turned out to be damaged."""
        if seq.chain is not None:
            self._cache.forget(seq.chain)

    # ------------------------------------------------------------------------------------------------------------- integrity

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that every id is free, or held or cached by exactly those who think so."""
        holders, pools = list(holders), self._pools
        pins = [seq.pending[0] for seq in holders if seq.pending is not None]
        pins += self._cache.checkpoints()
        pools.grow.check(Counter(i for s in holders for i in s.pages), Counter(i for c in pins for i in c.grow))
        pools.window.check(
            Counter(i for s in holders for i in s.window if i != NO_PAGE), Counter(i for c in pins for i in c.window)
        )
        pools.slots.check(Counter(s.slot for s in holders if s.slot != NO_SLOT), Counter())
        pools.snapshots.check(Counter(), Counter(c.snapshot for c in pins))
