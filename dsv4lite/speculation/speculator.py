"""Guesses on the host's side: whom to ask, what to believe, and how often it was right. Plain Python, no tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from dsv4lite.config import MTP, Drafter, Drafting, DSpark, NGram, Speculator
from dsv4lite.speculation.draft_policy import DraftPolicy, DraftState, StepCosts
from dsv4lite.speculation.draft_stretches import DraftStretches
from dsv4lite.speculation.ngram import NGramSpeculator

if TYPE_CHECKING:
    from dsv4lite.scheduling.sequence import Sequence
    from dsv4lite.scheduling.step_plan import Sampled, StepPlan

log = logging.getLogger("dsv4lite.engine")

_STATE_S = 0.1  # between two looks at what the policy knows: one takes the host as long as a step of a GPU


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
        costs: What steps take, if that was measured.
        clock: Of the time that they take from now on.
        ahead: Whether steps without guesses are planned one ahead.
    """

    def __init__(
        self,
        drafting: Drafting,
        *,
        vocab_size: int,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ahead: bool = False,
    ) -> None:
        self._speculators = drafting.speculators
        self._vocab_size = vocab_size
        self._policy: DraftPolicy | None = None
        self._stretches: DraftStretches | None = None
        self._length = drafting.max_drafts
        if drafting.adaptive:
            self._policy = DraftPolicy(drafting.max_drafts, forgets=drafting.own is not None, costs=costs)
            self._stretches = DraftStretches(self._policy, clock, ahead=ahead)
        self._drafted = [0] * drafting.max_drafts
        self._accepted = [0] * drafting.max_drafts
        self._runs = 0
        self._silenced: set[int] = set()
        self._began = self._looked = 0.0  # of the last stretch that is known of, and of the one when stock was taken
        self._state: DraftState | None = None
        self._stats: SpeculationStats | None = None  # until something of it changes

    def choose_length(self, num_sequences: int) -> int:
        """Return how many guesses in a row the next step, of about so many sequences, should run.

        Guesses of the device are made a step before they run.
        """
        return self._length if self._stretches is None else self._stretches.choose(num_sequences)

    def interrupt(self, *, idle: bool = False) -> None:
        """Take note that the step that was just asked about runs prompts, too, or that the engine is ``idle``."""
        if self._stretches is not None:
            self._stretches.interrupt(idle=idle)

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

    def count(self, plan: StepPlan, results: Mapping[int, Sampled]) -> None:
        """Take note of a step that could have guesses: what was guessed, and what was right."""
        self._stats = None
        checked = [(one.drafted, len(one.after)) for one in results.values() if one.drafted]
        self._runs += len(checked)
        right = [len([accepted for _, accepted in checked if accepted > position]) for position in range(plan.max_drafts)]
        for position, count in enumerate(right):
            self._drafted[position] += len([drafts for drafts, _ in checked if drafts > position])
            self._accepted[position] += count
        continued = len([run for run in plan.sequences if run.sample and len(run.token_ids) == 1 + run.drafts])
        if self._policy is not None and self._stretches is not None and continued and not self._stretches.switches:
            self._policy.learn(continued, right)

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
        stretches = self._stretches
        if self._policy is not None and stretches is not None and stretches.began != self._began:
            self._began, self._stats, self._length = stretches.began, None, stretches.length
            if self._state is None or self._began - self._looked > _STATE_S:
                self._state, self._looked = self._policy.snapshot(), self._began
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
