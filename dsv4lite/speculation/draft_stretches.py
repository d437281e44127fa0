"""Stretches of steps with as many drafts each: between two decisions a step costs the host a counter and two comparisons."""

from __future__ import annotations

from collections.abc import Callable

from dsv4lite.speculation.draft_policy import DraftPolicy

_WAY_STEPS = 2  # until steps are what they will be: the first ones have no drafts of the device yet, or others are in flight
_LEAST_STEPS = 4  # of a stretch whose time says anything


class DraftStretches:
    """Asks a policy, for each stretch of steps, how far to draft, and tells it what the last one took, from end to end.

    It is asked again early when the number of sequences is another by a quarter. Steps that are not like the others, because they
    run prompts or the engine was idle, are left out, as are those on the way from one length to another.

    Args:
        policy: Decides.
        clock: Of the time that steps take.
        ahead: Whether steps without drafts are planned one ahead.

    Attributes:
        length: Of the present stretch.
        began: When it did, by the clock.
        switches: The first steps of a stretch with another length than the one before are on their way.
    """

    def __init__(self, policy: DraftPolicy, clock: Callable[[], float], *, ahead: bool = False) -> None:
        self.length = 0
        self.began = -1.0
        self.switches = False
        self._policy, self._clock, self._ahead = policy, clock, ahead
        self._sequences, self._low, self._high = 1, 1, 0  # nobody's: the first step begins a stretch
        self._steps = self._left = 0
        self._to_come = 1  # while steps are on their way, those of the stretch itself
        self._timed = False

    def choose(self, num_sequences: int) -> int:
        """Return the number of drafts for each sequence of the next step."""
        self._left -= 1
        if self._left < 0 or not self._low <= num_sequences <= self._high:
            self._turn(num_sequences)
        return self.length

    def interrupt(self, *, idle: bool = False) -> None:
        """Take note that the step that was just asked about runs prompts, too, or that the engine is ``idle``."""
        if not self._to_come:
            self._close(None if idle and self._ahead else self._clock(), self._steps - self._left - (not idle))
            self._to_come = max(self._left, _LEAST_STEPS)
        elif not idle:
            self._to_come -= 1
        if not self._to_come:  # prompts all the time: the policy is asked again all the same
            self._low, self._high = 1, 0
        self.switches = self.switches and self._left == _WAY_STEPS - 1  # the first step alone has no drafts
        self._timed = False
        self._steps, self._left = _WAY_STEPS, _WAY_STEPS - (not idle)

    def _turn(self, num_sequences: int) -> None:
        now, policy = self._clock(), self._policy
        if self._to_come and self._low <= num_sequences <= self._high:
            if self.switches and self._timed:
                policy.observe_way(self._sequences, self._steps, now - self.began)
            self.switches = False
            self._begin(now, self._to_come, 0)
            return
        if not self._to_come:
            self._close(now, self._steps - self._left - 1)
        length, steps = policy.choose(max(1, num_sequences), may_try=self._timed)
        self._sequences = max(1, num_sequences)
        self._low, self._high = num_sequences - num_sequences // 4, num_sequences + num_sequences // 4
        if length != self.length or self._to_come:
            self.switches |= length != self.length
            self.length = length
            self._begin(now, _WAY_STEPS, steps)
        else:
            self._begin(now, steps, 0)

    def _begin(self, now: float, steps: int, to_come: int) -> None:
        self.began, self._timed = now, True
        self._steps, self._left, self._to_come = steps, steps - 1, to_come

    def _close(self, now: float | None, steps: int) -> None:
        """Tell the policy of so many steps, which have ended by now; their time does not count if ``None``."""
        if steps > 0:
            took = None if now is None or steps < _LEAST_STEPS else now - self.began
            self._policy.observe(self._sequences, self.length, steps, took or None)
