"""What the scheduler tells the device to do in one step, and what it hears back. Frozen, picklable, plain data.

What exists once per sequence and step is a named tuple, which takes a quarter of the time that a frozen dataclass takes to make.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import NamedTuple

from dsv4lite.errors import DSV4LiteError
from dsv4lite.request import TokenLogprob

IN_FLIGHT = -1
"""Stands in a plan for the token that the previous step sampled for this sequence and that is still on the device."""
UNKNOWN = -1
"""Stands in a plan for a token that nobody knows yet."""
NO_PAGE = -1
"""Stands in ``window_pages`` for a page that is neither read nor written."""

Copies = tuple[tuple[int, int], ...]


class SequencePlan(NamedTuple):
    """A run of tokens of one sequence: positions ``[start, end)``.

    It reads the grow pages, the window rows ``[max(0, start - window + 1), start)`` and the carry in its slot. It writes what its
    tokens add to the grow pages, the window rows ``[max(start, end - drafts - window), end)``, and the carry. A run with drafts is
    a known token and guesses of what follows it: a token is sampled from each position, and the first wrong guess makes the rest
    void.

    Attributes:
        seq_id: Unique in the scheduler's life.
        slot: Where its carry is.
        start: Position of the first token.
        token_ids: The tokens; ``IN_FLIGHT`` as the single token of a run, or for all tokens of one that has ``slack``.
        pages: Grow pages of the positions ``[0, end)`` in logical order. The same tuple object until a page is added.
        window_first: Logical number of the first page of ``window_pages``.
        window_pages: Window pages up to the one of position ``end - 1``; ``NO_PAGE`` inside a gap that a long run leaves.
        sample: Whether a token is sampled from the last position.
        score: Absolute positions ``[a, b)`` of this run for which the log-probability of the *next* prompt token is wanted.
        drafts: How many of the last tokens are guesses.
        carry: The copy of the carry that it starts from. Without drafts it leaves copy 0, else copy i after token i.
        next_id: The token after the last, or ``UNKNOWN``.
        slack: If the run was planned while the guesses of the one before were being checked: how many positions later than
            ``start`` it may begin, and end. The device knows where, with which tokens, and from which copy of the carry; there may
            be fewer guesses than ``drafts``. Pages are there for the latest end. ``None`` if the host knows.
    """

    seq_id: int
    slot: int
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    window_first: int
    window_pages: tuple[int, ...]
    sample: bool
    score: tuple[int, int] | None = None
    drafts: int = 0
    carry: int = 0
    next_id: int = UNKNOWN
    slack: int | None = None

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether the run is one known token, and guesses."""
        return len(self.token_ids) == 1 + self.drafts

    def settled(self, start: int, token_ids: tuple[int, ...], carry: int = 0) -> SequencePlan:
        """Return a run with ``slack`` as it is once it is known where it begins, and with which guesses behind its first token."""
        assert self.slack is not None and self.start <= start <= self.start + self.slack
        assert 0 < len(token_ids) <= 1 + self.drafts
        pages, windows = self.pages, (self.window_first, self.window_pages)
        return SequencePlan(self.seq_id, self.slot, start, token_ids, pages, *windows, True, None, len(token_ids) - 1, carry)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Order: resets, restores, copies, then all sequences at once, then saves.

    Plans must run in the order in which they were made; a plan may reuse ids that the one before still reads. Within a plan no id
    is written by two parties, and none that a sequence writes is read by another.

    Attributes:
        step: Counts plans.
        sequences: Those that decode, of one token and drafts, first.
        resets: Slots whose carry starts empty.
        restores: ``(snapshot, slot)``.
        grow_copies: ``(from, to)`` grow pages; like the other copies, of a forked sequence.
        window_copies: ``(from, to)`` window pages.
        slot_copies: ``(from, to)`` slots.
        saves: ``(slot, snapshot)``, after the sequences.
        max_drafts: Guesses that each run could have, and that are wanted of what follows it; without any the model's own drafter
            has no part in the step.
        blanks: Window page, first place and place after the last, of rows that the model's own drafter has missed: they are made
            zero before the step.
    """

    step: int
    sequences: tuple[SequencePlan, ...]
    resets: tuple[int, ...] = ()
    restores: Copies = ()
    grow_copies: Copies = ()
    window_copies: Copies = ()
    slot_copies: Copies = ()
    saves: Copies = ()
    max_drafts: int = 0
    blanks: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(s.token_ids) for s in self.sequences)

    @property
    def prompts(self) -> bool:
        """Whether prompts run, of which there are at most single tokens among those that decode."""
        return not self.sequences[-1].decodes

    @property
    def decodes(self) -> bool:
        """Whether all runs are one known token, and guesses, and sample."""
        return not [s for s in self.sequences if not s.sample or len(s.token_ids) != 1 + s.drafts]


class StepShape(NamedTuple):
    """What several ranks must know alike of a step that they run together, each with sequences of its own or with none.

    Attributes:
        tokens: Of the replica with the most.
        sequences: Of the replica with the most.
        width: Tokens of the longest run.
        decodes: All runs are one token and guesses that follow it, and nothing but what comes next is wanted of them.
        in_flight: Some run's token is.
        max_drafts: Guesses that are wanted of what follows.
        longest: Tokens of the longest sequence after the step, at most.
        unresolved: Some sequence continues from accepted lengths that only the device knows.
    """

    tokens: int
    sequences: int
    width: int
    decodes: bool
    in_flight: bool
    max_drafts: int = 0
    longest: int = 0
    unresolved: bool = False

    @classmethod
    def of(cls, plans: Iterable[StepPlan | None], routed: Collection[int] = ()) -> StepShape:
        """Return the shape of a step.

        Args:
            plans: Of all replicas; ``None`` for those that have nothing to do.
            routed: Sequences whose experts are wanted.
        """
        tokens = sequences = width = max_drafts = longest = 0
        decodes, in_flight, unresolved = True, False, False
        for plan in plans:
            if plan is None:
                continue
            # By columns: a turn of a loop for every token would cost several times as much.
            _, _, starts, token_ids, _, _, _, samples, scores, drafts, _, _, slacks = zip(*plan.sequences, strict=True)
            lengths = list(map(len, token_ids))
            longest = max(longest, max(map(add, starts, lengths)) + max(filter(None, slacks), default=0))
            own, count = sum(lengths), len(lengths)
            decodes = decodes and all(samples) and not any(scores) and own == count + sum(drafts)
            in_flight = in_flight or (IN_FLIGHT,) in token_ids
            unresolved = unresolved or slacks.count(None) < count
            tokens, sequences, width = max(tokens, own), max(sequences, count), max(width, *lengths)
            max_drafts = max(max_drafts, plan.max_drafts)
            if routed and decodes:
                decodes = not any(s.seq_id in routed for s in plan.sequences)
        return cls(tokens, sequences, width, decodes, in_flight, max_drafts, longest, unresolved)


class Sampled(NamedTuple):
    """What a step sampled for one sequence.

    Attributes:
        token_id: The token; meaningless with ``error``.
        logprob: Its log-probability, if asked for.
        error: Why the sequence cannot go on.
        after: What was sampled behind each draft that turned out right, in order.
        drafts: Guesses of what comes next.
        drafted: How many guesses the run had.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    error: DSV4LiteError | None = None
    after: tuple[Sampled, ...] = ()
    drafts: tuple[int, ...] = ()
    drafted: int = 0


sampled_of: Callable[[tuple[object, ...]], Sampled] = partial(tuple.__new__, Sampled)
"""Make one from its fields, unchecked, in a quarter of the time that the usual way takes; there is one for every token."""
