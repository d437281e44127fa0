"""Guesses on the host's side: whom to ask, what to believe, and how often it was right. Plain Python, no tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from dsv4lite.engine.draft_policy import DraftPolicy, DraftState
from dsv4lite.engine.ngram import NGramSpeculator
from dsv4lite.speculation import MTP, Drafter, Drafting, DSpark, NGram, Speculator

if TYPE_CHECKING:
    from dsv4lite.engine.sequence import Sequence
    from dsv4lite.engine.step import Sampled, StepPlan

log = logging.getLogger("dsv4lite.engine")

_STATE_S = 0.1  # of steps between two looks at what the policy knows: one takes the host as long as several steps of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """How guessing went so far.

    Attributes:
        drafted: Guesses that steps ran.
        accepted: How many of them were right, as were all before them in the same step.
        runs: How often a sequence ran with guesses.
        drafted_by_position: Of the first guess of a run, the second, and so on.
        accepted_by_position: How many of these were right.
        length: Guesses in a row that were asked for in the last step.
        policy: What the choice of that length knows and did; ``None`` if the length is fixed.
    """

    drafted: int = 0
    accepted: int = 0
    runs: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    length: int = 0
    policy: DraftState | None = None

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a run with guesses gave on average, its own included; 0 before the first."""
        return 1 + self.accepted / self.runs if self.runs else 0.0


class _ReadOnly(Tokens[int]):
    """Tokens of a sequence for those who must not change them."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]


def make_speculators(drafters: Tokens[Drafter]) -> tuple[Speculator, ...]:
    """Return the drafters that guess on the host, in their order."""
    return tuple(NGramSpeculator(d) if isinstance(d, NGram) else d for d in drafters if not isinstance(d, MTP | DSpark))


class Guesses:
    """Collects guesses for the scheduler, and decides how many; mutable, owned by the engine's thread.

    Args:
        drafting: Who guesses. The first on the host that has something to say is heard; what was drafted on the device comes last.
        vocab_size: Tokens that there are.
    """

    def __init__(self, drafting: Drafting, *, vocab_size: int) -> None:
        self._speculators = drafting.speculators
        self._vocab_size = vocab_size
        self._length = drafting.max_drafts
        self._policy = DraftPolicy(drafting.max_drafts, forgets=drafting.own is not None) if drafting.adaptive else None
        self._last: int | None = None  # guesses that each run of the last step could have
        self._drafted = [0] * drafting.max_drafts
        self._accepted = [0] * drafting.max_drafts
        self._runs = 0
        self._silenced: set[int] = set()
        self._unseen_s = 0.0  # of steps since the last look
        self._state: DraftState | None = None
        self._stats: SpeculationStats | None = None  # until something of it changes

    def choose_length(self, num_sequences: int) -> int:
        """Return how many guesses in a row the next step, of about so many sequences, should run.

        Guesses of the device are made a step before they run.
        """
        if self._policy is not None:
            length = self._policy.choose(max(1, num_sequences))
            self._stats = self._stats if length == self._length else None
            self._length = length
        return self._length

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Return at most ``most`` guesses of what follows a sequence's tokens."""
        if seq.seq_id in self._silenced:
            return ()
        for speculator in self._speculators:
            wanted = min(most, speculator.k)
            try:
                drafts = tuple(speculator.propose(seq.seq_id, _ReadOnly(seq.tokens), wanted))
            except Exception as error:
                self._silence(seq, speculator, f"raised {type(error).__name__}: {error}")
                return ()
            wrong = next((t for t in drafts if type(t) is not int or not 0 <= t < self._vocab_size), None)
            if wrong is not None or len(drafts) > wanted:
                what = f"{len(drafts)} guesses of {wanted}" if wrong is None else f"{wrong!r}, which is no token"
                self._silence(seq, speculator, f"returned {what}")
                return ()
            if drafts:
                return drafts
        return seq.drafts[:most]

    def _silence(self, seq: Sequence, speculator: Speculator, what: str) -> None:
        """Ask no more for a sequence."""
        self._silenced.add(seq.seq_id)
        log.warning("request %s goes on without guesses: %s %s", seq.request.request_id, type(speculator).__name__, what)

    def count(self, plan: StepPlan, results: Mapping[int, Sampled], seconds: float, *, followed: bool = True) -> None:
        """Take note of a step: what was guessed, and what was right.

        Args:
            plan: The step.
            results: Of it.
            seconds: Since the end of the one before.
            followed: Whether the engine went on as it goes on behind steps with so many guesses: planned ahead, if it does so.
        """
        self._unseen_s += seconds
        right = self._count_right(plan, results) if plan.max_drafts else []
        last, self._last = self._last, plan.max_drafts
        if self._policy is None:
            return
        continued = len([run for run in plan.sequences if run.sample and len(run.token_ids) == 1 + run.drafts])
        if not continued:
            return
        alone = continued == len(plan.sequences)
        if last == plan.max_drafts and followed:
            self._policy.observe(continued, plan.max_drafts, seconds if alone else None, right)
        elif alone:
            self._policy.observe_detour(continued, seconds, 1 + sum(right) / continued)

    def _count_right(self, plan: StepPlan, results: Mapping[int, Sampled]) -> list[int]:
        """Count a step's guesses; return by position how many were right."""
        self._stats = None
        right = [0] * plan.max_drafts
        for run in plan.sequences:
            if not run.drafts:
                continue
            self._runs += 1
            accepted = len(results[run.seq_id].after)
            for position in range(run.drafts):
                self._drafted[position] += 1
            for position in range(accepted):
                self._accepted[position] += 1
                right[position] += 1
        return right

    def forget(self, seq_id: int) -> None:
        """Drop what is kept of a sequence that ended."""
        self._silenced.discard(seq_id)
        for speculator in self._speculators:
            try:
                speculator.forget(seq_id)
            except Exception:
                log.warning("%s.forget failed", type(speculator).__name__, exc_info=True)

    def stats(self) -> SpeculationStats:
        """Return the present counts; of the policy what it knew a moment ago, for taking stock takes long."""
        if self._policy is not None and (self._state is None or self._unseen_s > _STATE_S):
            self._state, self._unseen_s, self._stats = self._policy.snapshot(), 0.0, None
        if self._stats is None:
            self._stats = SpeculationStats(
                drafted=sum(self._drafted),
                accepted=sum(self._accepted),
                runs=self._runs,
                drafted_by_position=tuple(self._drafted),
                accepted_by_position=tuple(self._accepted),
                length=self._length,
                policy=self._state,
            )
        return self._stats
