"""One completion on its way through the scheduler. Plain Python, no tensors."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from dsv4lite.engine.pages import PAGE_TOKENS, Checkpoint, PrefixChain
from dsv4lite.request import Request

NO_SLOT = -1


class State(enum.Enum):
    """Where a sequence is.

    Attributes:
        WAITING: In the queue; it has no state on the device.
        UNFORKED: A completion that waits for its leader to prefill their prompt.
        RUNNING: It has a slot and pages.
        RETIRED: Its last step is planned, its state given back, and the outcome still to come.
        ENDED: Its finish reason is known.
    """

    WAITING = enum.auto()
    UNFORKED = enum.auto()
    RUNNING = enum.auto()
    RETIRED = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One completion on its way; the scheduler's only mutable record.

    Attributes:
        tokens: Prompt and completion as far as known.
        last_run: Length of prompt and completion after whose state nothing is left to do.
        num_computed: Tokens whose state exists once the steps planned so far have run.
        in_flight: Sampled tokens whose ids did not arrive yet: 0, 1, or between ``schedule`` and the ``update`` before it 2.
        quiet_until: While its single tokens end before this position they need no page, leave none behind, pass no border, and
            are not the last.
        window_first: Logical number of the first page of ``window``.
        window: Window pages, ``NO_PAGE`` inside the gap that a long run leaves until the next step.
        chain: Prefix keys of ``tokens``, in the epoch in which the state was begun.
        kept_border: Where its last lasting checkpoint is, or would be.
        rolling: Its checkpoint that the next one replaces.
        pending: A checkpoint whose last token is in flight, and whether it will be a lasting one.
        score_next: First prompt position whose next token is still to be scored.
        unforked: Completions that will share this one's prompt.
        cached_tokens: Prompt tokens from the prefix cache, until they are reported.
        started: Second of its first step.
    """

    seq_id: int
    index: int
    request: Request
    tokens: list[int]
    prompt_len: int
    last_run: int
    order: tuple[int, float, int]
    score_next: int | None
    state: State = State.WAITING
    num_computed: int = 0
    in_flight: int = 0
    slot: int = NO_SLOT
    pages: list[int] = field(default_factory=list)
    window_first: int = 0
    window: list[int] = field(default_factory=list)
    chain: PrefixChain | None = None
    kept_border: int = 0
    rolling: Checkpoint | None = None
    pending: tuple[Checkpoint, bool] | None = None
    unforked: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0
    started: float | None = None
    quiet_until: int = 0
    # The lists as plans need them, built once per change and not once per step.
    page_tuple: tuple[int, ...] | None = None
    window_tuple: tuple[int, ...] | None = None

    @property
    def num_to_run(self) -> int:
        """Known tokens that must run: all, unless nothing is sampled after them."""
        return min(len(self.tokens), self.last_run)

    def report_cached_tokens(self) -> int:
        """Return the prompt tokens that came from the prefix cache on the first call, then 0."""
        cached, self.cached_tokens = self.cached_tokens, 0
        return cached

    @property
    def prompt_border(self) -> int:
        """The last border inside the prompt that leaves a token to run after it."""
        return (self.prompt_len - 1) // PAGE_TOKENS * PAGE_TOKENS


class SequenceQueue:
    """Sequences sorted by (priority, arrival)."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def add(self, seq: Sequence) -> None:
        """Insert a sequence at its place."""
        insort(self.items, seq, key=_ORDER)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence, which must be in."""
        i = bisect_left(self.items, seq.order, key=_ORDER)
        assert self.items[i] is seq
        del self.items[i]


_ORDER = attrgetter("order")
