"""The plan of a step, and its outputs. Frozen, picklable, plain data.

Values that exist once per sequence and step are named tuples: constructing one takes a quarter of a frozen dataclass's time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import NamedTuple

from dsv4lite.errors import DSV4LiteError
from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.request import TokenLogprob

IN_FLIGHT = -1
"""In a plan, the token that the previous step sampled for this sequence and that is still on the device."""
UNKNOWN = -1
"""In a plan, a token that the host does not know yet."""
NO_PAGE = -1
"""In ``window_pages``, a page that is neither read nor written."""

Copies = tuple[tuple[int, int], ...]


class SequencePlan(NamedTuple):
    """The scheduled span of one sequence: positions ``[start, end)``.

    It reads the grow pages, the window rows ``[max(0, start - window + 1), start)`` and the compressor state in its slot. It writes
    what its tokens add to the grow pages, the window rows ``[max(start, end - drafts - window), end)``, and the compressor state. A
    span with drafts is a known token and the drafts that follow it: a token is sampled from each position, and the first rejected
    draft voids those after it.

    Attributes:
        seq_id: Unique in the scheduler's life.
        slot: Slot of its compressor state.
        start: Position of the first token.
        token_ids: The tokens; ``IN_FLIGHT`` as the single token of a span, or for all tokens of one that is unresolved.
        pages: Grow pages of the positions ``[0, end)`` in logical order. The same tuple object until a page is added.
        window_first: Logical number of the first page of ``window_pages``.
        window_pages: Window pages up to the one of position ``end - 1``; ``NO_PAGE`` inside a gap that a long span leaves. Empty
            for a model without sliding window.
        sample: Whether a token is sampled from the last position.
        score: Absolute positions ``[a, b)`` of this span for which the log-probability of the *next* prompt token is wanted.
        drafts: How many of the last tokens are drafts.
        state_copy: Copy of the compressor state that it starts from. Without drafts it writes copy 0, else copy i after token i.
        next_id: The token after the last, or ``UNKNOWN``.
        unresolved: Number of unresolved drafts, if the span was planned while drafts of the previous span were being verified. The
            span may begin and end up to this many positions later. The device knows its position, its tokens and its copy of the
            compressor state; it may have fewer drafts than ``drafts``. Pages are allocated for the latest end. ``None`` if the host
            knows the position.
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
    state_copy: int = 0
    next_id: int = UNKNOWN
    unresolved: int | None = None

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether the span is one known token, and drafts."""
        return len(self.token_ids) == 1 + self.drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Order: resets, restores, copies, then all sequences at once, then saves.

    Plans must run in the order in which they were made; a plan may reuse ids that the one before it still reads. Within a plan no
    id is written twice, and no id that a sequence writes is read by another.

    Attributes:
        step: Counts plans.
        sequences: Scheduled spans; those of one token and drafts first.
        resets: Slots whose compressor state starts empty.
        restores: ``(snapshot, slot)``.
        grow_copies: ``(from, to)`` grow pages; like the other copies, of a forked sequence.
        window_copies: ``(from, to)`` window pages.
        slot_copies: ``(from, to)`` slots.
        saves: ``(slot, snapshot)``, after the sequences.
        max_drafts: Most drafts in a span, and drafts to make after it; 0 if the model's own drafter does not run.
        zero_rows: ``(window page, row)`` of the model's own drafter to zero-fill, for tokens whose KV it has not computed; without
            sliding window ``(grow page, row)``.
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
    zero_rows: Copies = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(s.token_ids) for s in self.sequences)

    @property
    def prompts(self) -> bool:
        """Whether prompts run; a prompt's single last token counts as decode."""
        return not self.sequences[-1].decodes

    @property
    def decodes(self) -> bool:
        """Whether all spans are one known token, and drafts, and sample."""
        return not [s for s in self.sequences if not s.sample or len(s.token_ids) != 1 + s.drafts]


class StepShape(NamedTuple):
    """The shape of a step: equal on all ranks that run it together, though replicas have different sequences or none.

    Attributes:
        tokens: Tokens of the replica with the most; ``None`` if a sequence replays given experts, which only its own replica knows:
            ranks that share experts then route their tokens before they send rows.
        sequences: Sequences of the replica with the most.
        width: Tokens of the longest span.
        decodes: All spans are one token and drafts, and sample, without scores or routed experts.
        max_drafts: Drafts to make after each span.
        longest: Length of the longest sequence after the step, if all drafts are accepted.
        unresolved: Some sequence starts from accepted lengths that only the device knows.
        records: Some sequence records its routed experts, or replays given ones.
        pairs, pages: Of sequences whose span is of a prompt: pairs of a token of the step and a token that it sees, and grow pages;
            each of the replica with the most.
    """

    tokens: int | None
    sequences: int
    width: int
    decodes: bool
    max_drafts: int = 0
    longest: int = 0
    unresolved: bool = False
    records: bool = False
    pairs: int = 0
    pages: int = 0

    @classmethod
    def of(cls, plans: Iterable[StepPlan | None], routed: Collection[int] = (), given: Collection[int] = ()) -> StepShape:
        """Return the shape of a step.

        Args:
            plans: Plans of all replicas; ``None`` for those that have nothing to do.
            routed: Ids of sequences that record their experts.
            given: Ids of sequences that replay given experts.
        """
        tokens = sequences = width = max_drafts = longest = pairs = pages = 0
        decodes, unresolved, known, records = True, False, True, False
        for plan in plans:
            if plan is None:
                continue
            # By columns: a loop over the sequences would cost several times as much.
            _, _, starts, token_ids, _, _, _, samples, scores, drafts, _, _, ahead = zip(*plan.sequences, strict=True)
            lengths = list(map(len, token_ids))
            longest = max(longest, max(map(add, starts, lengths)) + max(filter(None, ahead), default=0))
            own, count = sum(lengths), len(lengths)
            prompts = own > count + sum(drafts)
            decodes = decodes and all(samples) and not any(scores) and not prompts
            if prompts:
                spans = [(start, n) for start, n, drafted in zip(starts, lengths, drafts, strict=True) if n > 1 + drafted]
                pairs = max(pairs, sum(n * start + n * (n + 1) // 2 for start, n in spans))
                pages = max(pages, sum(-(-(start + n) // PAGE_TOKENS) for start, n in spans))
            unresolved = unresolved or ahead.count(None) < count
            tokens, sequences, width = max(tokens, own), max(sequences, count), max(width, *lengths)
            max_drafts = max(max_drafts, plan.max_drafts)
            if routed and any(s.seq_id in routed for s in plan.sequences):
                decodes, records = False, True
            if given and any(s.seq_id in given for s in plan.sequences):
                known, records = False, True
        return cls(tokens if known else None, sequences, width, decodes, max_drafts, longest, unresolved, records, pairs, pages)


class Sampled(NamedTuple):
    """What a step sampled for one sequence.

    Attributes:
        token_id: The token; meaningless with ``error``.
        logprob: Its log-probability, if asked for.
        error: Why the sequence cannot continue.
        after: What was sampled after each accepted draft, in order.
        drafts: Draft tokens for the next step.
        drafted: How many draft tokens the span had.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    error: DSV4LiteError | None = None
    after: tuple[Sampled, ...] = ()
    drafts: tuple[int, ...] = ()
    drafted: int = 0


sampled_of: Callable[[tuple[object, ...]], Sampled] = partial(tuple.__new__, Sampled)
"""Construct one from its fields, unchecked, in a quarter of the time of the generated constructor; one is made per token."""
