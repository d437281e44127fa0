"""Drafting on the host: asks the drafters in turn, checks what they return, and counts what was accepted. Plain Python."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from dsv4lite.config import MTP, Drafting, DSpark, NGram, Speculator, named_drafters
from dsv4lite.errors import shown
from dsv4lite.speculation.controller import ControllerStats, DraftController, StepCosts
from dsv4lite.speculation.ngram import NGramSpeculator

if TYPE_CHECKING:
    from dsv4lite.scheduling.sequence import Sequence
    from dsv4lite.scheduling.step_plan import Sampled, StepPlan

log = logging.getLogger("dsv4lite.engine")

_CONTROLLER_STATS_S = 0.1  # between two statistics of the controller: computing them takes the host as long as a step of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Statistics of speculative decoding so far.

    Attributes:
        drafted: Draft tokens that steps verified.
        accepted: How many of them were accepted.
        runs: How often a sequence's step had draft tokens.
        drafted_by_position: Draft tokens by position: the first of a sequence's step, the second, and so on.
        accepted_by_position: How many of these were accepted.
        length: Draft tokens per sequence that were asked for in the last step.
        policy: Statistics of the draft controller; ``None`` if the length is fixed.
    """

    drafted: int = 0
    accepted: int = 0
    runs: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    length: int = 0
    policy: ControllerStats | None = None

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens that a sequence's step with draft tokens yielded, the sampled one included; 0 before the first."""
        return 1 + self.accepted / self.runs if self.runs else 0.0


class _ReadOnly(Tokens[int]):
    """A read-only view of a sequence's tokens."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: Any) -> Any:
        found = self._tokens[index]
        return found.tolist() if isinstance(index, slice) else found


def make_drafting(speculative: Any, own: MTP | DSpark | None) -> Drafting:
    """Return the drafters that a setting names; ``own`` is the model's own drafter."""
    named = named_drafters(speculative)
    speculators = tuple(NGramSpeculator(d) if isinstance(d, NGram) else d for d in named if not isinstance(d, MTP | DSpark))
    adaptive = any(drafter.adaptive for drafter in (own, *named) if isinstance(drafter, MTP | DSpark | NGram))
    return Drafting(own=own, speculators=speculators, adaptive=adaptive)


class DraftProposer:
    """Collects draft tokens for the scheduler, and decides their number; mutable, owned by the engine's thread.

    Args:
        drafting: The drafters. The first one on the host that returns draft tokens is used; the device's draft tokens come last.
        vocab_size: Number of tokens.
        costs: Step costs from the warm-up.
        clock: Returns the time in seconds, to time steps.
    """

    def __init__(
        self,
        drafting: Drafting,
        *,
        vocab_size: int,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._speculators = drafting.speculators
        self._vocab_size, self._clock = vocab_size, clock
        self._controller: DraftController | None = None
        self._length = 0 if drafting.adaptive else drafting.max_drafts
        if drafting.adaptive:
            self._controller = DraftController(drafting.max_drafts, clock, forgets=drafting.own is not None, costs=costs)
        self._drafted = [0] * drafting.max_drafts
        self._accepted = [0] * drafting.max_drafts
        self._runs = 0
        self._disabled: set[int] = set()  # sequences whose drafter failed
        self._stats: SpeculationStats | None = None  # cached until a count changes
        self._controller_stats: ControllerStats | None = None
        self._windows, self._updated = 0, 0.0  # the controller's windows at the last ``stats``; time of ``_controller_stats``

    def choose_length(self, num_sequences: int) -> int:
        """Return how many tokens to draft per sequence in a step of about ``num_sequences`` sequences; called once per step.

        The device drafts one step before its draft tokens are verified.
        """
        return self._length if self._controller is None else self._controller.choose(num_sequences)

    def interrupt(self, *, idle: bool = False) -> None:
        """Note that the step of the last ``choose_length`` also runs prompts, or that the engine is ``idle``."""
        if self._controller is not None:
            self._controller.interrupt(idle=idle)

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Return at most ``most`` draft tokens for a sequence."""
        if seq.seq_id in self._disabled:
            return ()
        for speculator in self._speculators:
            try:
                wanted = min(most, speculator.k)
                proposed = speculator.propose(seq.seq_id, _ReadOnly(seq.tokens), wanted)
                drafts = tuple(islice(proposed, wanted + 1))  # a speculator may return an endless iterator
            except BaseException as error:  # a function of the host may raise anything, ``CancelledError`` too
                self._disable(seq, speculator, f"raised {shown(error)}")
                return ()
            wrong = next((t for t in drafts if type(t) is not int or not 0 <= t < self._vocab_size), None)
            if wrong is not None or len(drafts) > wanted:
                what = f"more than {wanted} draft tokens" if wrong is None else f"{shown(wrong)}, which is not a token id"
                self._disable(seq, speculator, f"returned {what}")
                return ()
            if drafts:
                return drafts
        return seq.drafts[:most]

    def _disable(self, seq: Sequence, speculator: Speculator, what: str) -> None:
        """Stop drafting for a sequence."""
        self._disabled.add(seq.seq_id)
        log.warning("request %s continues without speculation: %s %s", seq.request.request_id, type(speculator).__name__, what)

    def count(self, plan: StepPlan, results: Mapping[int, Sampled]) -> None:
        """Count the draft tokens of a step, and those that were accepted."""
        self._stats = None
        verified = [(one.drafted, len(one.after)) for one in results.values() if one.drafted]
        self._runs += len(verified)
        accepted = [len([right for _, right in verified if right > position]) for position in range(plan.max_drafts)]
        for position, count in enumerate(accepted):
            self._drafted[position] += len([drafts for drafts, _ in verified if drafts > position])
            self._accepted[position] += count
        continued = len([part for part in plan.sequences if part.sample and len(part.token_ids) == 1 + part.drafts])
        if self._controller is not None and continued:
            self._controller.learn(continued, accepted)

    def forget(self, seq_id: int) -> None:
        """Drop a finished sequence."""
        self._disabled.discard(seq_id)
        for speculator in self._speculators:
            try:
                speculator.forget(seq_id)
            except BaseException:
                log.warning("%s.forget failed", type(speculator).__name__, exc_info=True)

    def stats(self) -> SpeculationStats:
        """Return the current statistics; those of the controller may be ``_CONTROLLER_STATS_S`` old."""
        controller = self._controller
        if controller is not None and controller.windows != self._windows:
            self._windows, self._length, self._stats = controller.windows, controller.length, None
            now = self._clock()
            if self._controller_stats is None or now - self._updated > _CONTROLLER_STATS_S:
                self._controller_stats, self._updated = controller.stats(), now
        if self._stats is None:
            self._stats = SpeculationStats(
                drafted=sum(self._drafted),
                accepted=sum(self._accepted),
                runs=self._runs,
                drafted_by_position=tuple(self._drafted),
                accepted_by_position=tuple(self._accepted),
                length=self._length,
                policy=self._controller_stats,
            )
        return self._stats
