"""When a policy is asked, and what it is told: stretches of steps, timed by their ends."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4lite.speculation.draft_policy import DraftPolicy
from dsv4lite.speculation.draft_stretches import DraftStretches


class Listener(DraftPolicy):
    """Decides as it is told, and notes what it hears."""

    def __init__(self, lengths: list[int], steps: int = 8) -> None:
        super().__init__(4)
        self.lengths, self.steps = lengths, steps
        self.asked: list[tuple[int, bool]] = []
        self.heard: list[Any] = []

    def choose(self, num_sequences: int, *, may_try: bool = True) -> tuple[int, int]:
        self.asked.append((num_sequences, may_try))
        return self.lengths[min(len(self.asked), len(self.lengths)) - 1], self.steps

    def observe(self, num_sequences: int, k: int, steps: int, seconds: float | None) -> None:
        self.heard.append((num_sequences, k, steps, seconds))

    def observe_way(self, num_sequences: int, steps: int, seconds: float) -> None:
        self.heard.append(("way", steps, seconds))


class Clock:
    """Steps of a second, the one before the last known when the next is chosen."""

    now = 0.0
    reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now

    def run(self, stretches: DraftStretches, steps: int, num_sequences: int = 8, seconds: float = 1.0) -> list[int]:
        out = []
        for _ in range(steps):
            out.append(stretches.choose(num_sequences))
            self.now += seconds
        return out


def test_clock_is_read_at_the_ends_of_stretches_alone() -> None:
    clock, policy = Clock(), Listener([0])
    clock.run(DraftStretches(policy, clock), 2 + 8 * 10)
    assert clock.reads == 11 and len(policy.asked) == 10
    assert policy.heard == [(8, 0, 8, 8.0)] * 9


def test_steps_on_the_way_to_another_length_count_apart() -> None:
    clock, policy = Clock(), Listener([0, 0, 3, 0])
    stretches = DraftStretches(policy, clock)
    assert clock.run(stretches, 18) == [0] * 18
    assert clock.run(stretches, 2, seconds=5.0) == [3, 3] and stretches.switches
    assert clock.run(stretches, 8) == [3] * 8 and not stretches.switches
    assert clock.run(stretches, 10) == [0] * 10
    assert policy.heard == [(8, 0, 8, 8.0), (8, 0, 8, 8.0), ("way", 2, 10.0), (8, 3, 8, 8.0), ("way", 2, 2.0)]


def test_policy_is_asked_early_for_another_number_of_sequences() -> None:
    clock, policy = Clock(), Listener([0])
    stretches = DraftStretches(policy, clock)
    for num_sequences in (8, 8, 8, 9, 10, 7, 6, 8):
        clock.run(stretches, 1, num_sequences)
    assert len(policy.asked) == 1
    clock.run(stretches, 3, 11)
    assert policy.asked == [(8, False), (11, True)]
    assert policy.heard == [(8, 0, 6, 6.0)]


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_with_prompts_and_pauses_are_left_out(ahead: bool) -> None:
    clock, policy = Clock(), Listener([0], steps=16)
    stretches = DraftStretches(policy, clock, ahead=ahead)
    clock.run(stretches, 2 + 5)
    stretches.choose(8)
    stretches.interrupt()  # this step runs prompts
    clock.now += 100.0  # it, or the one before if steps are planned ahead
    stretches.choose(8)
    clock.now += 100.0
    clock.run(stretches, 5)
    stretches.interrupt(idle=True)
    clock.now += 100.0
    clock.run(stretches, 2 + 4)
    measured = [seconds for _, _, _, seconds in policy.heard]
    assert measured == [5.0, None if ahead else 5.0]


def test_policy_is_asked_among_prompts_too_but_may_not_try() -> None:
    clock, policy = Clock(), Listener([0])
    stretches = DraftStretches(policy, clock)
    for _ in range(100):
        clock.run(stretches, 1)
        stretches.interrupt()
    assert len(policy.asked) > 5 and not any(may_try for _, may_try in policy.asked[1:])
    assert all(seconds is None for _, _, _, seconds in policy.heard)
