"""One completion in the scheduler, and the queues. Plain Python, no tensors."""

from __future__ import annotations

import enum
import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.request import FinishReason, Request, SamplingParams, SequenceUpdate
from dsv4lite.scheduling.prefix_cache import CachedPrefix, PrefixChain

if TYPE_CHECKING:
    from dsv4lite.request import Logprobs

NO_SLOT = -1
ALL_TOKENS = 1 << 62
"""A position after every token of a sequence, future ones included."""


class State(enum.Enum):
    """The scheduling state of a sequence.

    Attributes:
        HELD: Waits until its request is ready.
        WAITING: In the queue, without state on the device.
        UNFORKED: Waits for its leader to prefill the prompt that they share.
        RUNNING: Has a slot and pages.
        RETIRED: Its last step is planned and its state released; the results are still to come.
        ENDED: Its finish reason is known.
    """

    HELD = enum.auto()
    WAITING = enum.auto()
    UNFORKED = enum.auto()
    RUNNING = enum.auto()
    RETIRED = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One completion; the scheduler's only mutable record.

    Attributes:
        tokens: Prompt and completion, as far as the host knows them. An array: the garbage collector visits each element of a list.
        last_run: Computed length at which the sequence ends.
        end_ids: Tokens that end it after ``min_tokens``.
        num_computed: KV computed length once the steps planned so far have run, if all their drafts are accepted.
        in_flight: Sampled tokens that have not arrived on the host: at most 1 before a step is planned, at most 2 after that.
        steady_until: Before this position decode is in a steady state: spans need no page, release none, fill no grow page, and
            are not the last.
        state_copy: The copy of its compressor state that is valid at ``num_computed``.
        drafts: Draft tokens that follow ``tokens``, made on the device.
        drafter_computed: KV computed length of the model's own drafter, zero-filled rows included, as far back as the window
            reaches; ``ALL_TOKENS`` while it computes that of every token.
        needs_host: The host may have to see its token in flight before the next one can be sampled.
        window_first: Logical number of the first page of ``window``.
        window: Window pages, ``NO_PAGE`` inside the gap that a long span leaves until the next step.
        chain: Prefix keys of ``tokens``, in the epoch in which the sequence started.
        cached_until: Length of its last lasting cached prefix, whether or not it could be cached.
        rolling: Its cached prefix that the next one replaces.
        pending: A captured prefix whose last token is in flight, and whether it is a lasting one.
        score_next: First prompt position whose next token is still to be scored.
        unforked: Completions that will share this one's prompt.
        cached_tokens: Prompt tokens from the prefix cache, until they are reported.
        started: Time of its first step, from ``time.monotonic()``.
    """

    seq_id: int
    index: int
    request: Request
    tokens: array[int]
    prompt_len: int
    last_run: int
    end_ids: frozenset[int]
    order: tuple[int, float, int]
    score_next: int | None
    needs_host: bool
    state: State = State.HELD
    num_computed: int = 0
    in_flight: int = 0
    slot: int = NO_SLOT
    state_copy: int = 0
    drafts: tuple[int, ...] = ()
    drafter_computed: int = 0
    pages: tuple[int, ...] = ()
    window_first: int = 0
    window: tuple[int, ...] = ()
    chain: PrefixChain | None = None
    cached_until: int = 0
    rolling: CachedPrefix | None = None
    pending: tuple[CachedPrefix, bool] | None = None
    unforked: dict[Sequence, None] = field(default_factory=dict)
    cached_tokens: int = 0
    started: float | None = None
    steady_until: int = 0

    @property
    def num_to_run(self) -> int:
        """Known tokens that must run: all but those after ``last_run``."""
        return min(len(self.tokens), self.last_run)

    def outcome(self) -> tuple[FinishReason | None, int | None]:
        """Return the finish and stop reasons of the last token, if any."""
        token, request = self.tokens[-1], self.request
        if token in self.end_ids:
            params = request.params
            # Before min_tokens only a grammar that allows no other token ends a sequence; see ``SequenceState.forbidden_next``.
            if len(self.tokens) - self.prompt_len > params.min_tokens or params.structured_outputs is not None:
                return "stop", None if token == request.eos_token_id and not params.ignore_eos else token
        return ("length" if len(self.tokens) > self.last_run else None), None

    def event(
        self,
        *,
        prompt_logprobs: Logprobs | None = None,
        finish_reason: FinishReason | None = None,
    ) -> SequenceUpdate:
        """Return an update without a token."""
        return SequenceUpdate(
            request_id=self.request.request_id,
            index=self.index,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            cached_tokens=self.take_cached_tokens(),
            started=self.started or 0.0,
        )

    def take_cached_tokens(self) -> int:
        """Return the prompt tokens that came from the prefix cache on the first call, then 0."""
        cached, self.cached_tokens = self.cached_tokens, 0
        return cached

    @property
    def prompt_pages_end(self) -> int:
        """End of the prompt's last full page that leaves a token to run after it."""
        return (self.prompt_len - 1) // PAGE_TOKENS * PAGE_TOKENS


def make_sequences(request: Request, *, first_id: int, max_model_len: int) -> list[Sequence]:
    """Return the ``n`` completions of a checked request, whose ids count on from ``first_id``."""
    params, prompt_len, generate = request.params, len(request.prompt_token_ids), request.generate
    assert 2 - generate <= prompt_len <= max_model_len - generate and (generate or params.n == 1)
    longest = max_model_len if params.max_tokens is None else min(max_model_len, prompt_len + params.max_tokens)
    end_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        end_ids.update(request.end_token_ids, () if request.eos_token_id is None else (request.eos_token_id,))
    score_next = None
    if request.score_from is not None and request.score_from < prompt_len:
        score_next = request.score_from - 1
    return [
        Sequence(
            seq_id=first_id + index,
            index=index,
            request=request,
            tokens=array("i", request.prompt_token_ids),
            prompt_len=prompt_len,
            last_run=longest - 1 if generate else prompt_len - 1,
            end_ids=frozenset(end_ids),
            order=(request.priority, request.arrival, first_id + index),
            score_next=score_next if index == 0 else None,
            needs_host=_needs_host(params),
        )
        for index in range(params.n)
    ]


def _needs_host(params: SamplingParams) -> bool:
    return bool(
        params.structured_outputs is not None
        or params.thinking_budget is not None
        or (params.bad_words_ids and max(map(len, params.bad_words_ids)) > 1)
    )


class WaitingQueue:
    """Waiting sequences by (priority, arrival). A sequence that ends stays in the heap and is skipped later.

    So ending n sequences takes O(n log n); removing each from a sorted list would take O(n^2).
    """

    __slots__ = ("_entries", "_size")

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, float, int], Sequence]] = []  # a heap
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in no particular order."""
        return (seq for _, seq in self._entries if seq.state is State.WAITING)

    def add(self, seq: Sequence) -> None:
        """Insert a sequence; its state is then ``WAITING``."""
        seq.state = State.WAITING
        heapq.heappush(self._entries, (seq.order, seq))
        self._size += 1

    def first(self) -> Sequence:
        """Return the first sequence, of at least one."""
        while self._entries[0][1].state is not State.WAITING:
            heapq.heappop(self._entries)
        return self._entries[0][1]

    def pop(self) -> Sequence:
        """Remove and return the first sequence, of at least one."""
        seq = self.first()
        heapq.heappop(self._entries)
        self._size -= 1
        return seq

    def leave(self, seq: Sequence) -> None:
        """Note that a sequence has ended."""
        assert seq.state is State.ENDED
        self._size -= 1
        if 2 * self._size < len(self._entries):
            self._entries = [entry for entry in self._entries if entry[1].state is State.WAITING]
            heapq.heapify(self._entries)
