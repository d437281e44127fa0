"""The choice of the length in an engine whose device guesses a step ahead."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dsv4lite.engine.ngram import NGramSpeculator
from dsv4lite.engine.speculator import Guesses
from dsv4lite.engine.step import Sampled, SequencePlan, StepPlan
from dsv4lite.speculation import MTP, Drafting, NGram

MAX_K = 4


class Device:
    """Steps of a known cost, with drafts that are right with a known chance; those for a step are made in the one before it."""

    def __init__(self, drafting: Drafting, *, num_sequences: int, ahead: bool) -> None:
        self.guesses = Guesses(drafting, vocab_size=10)
        self.rng = random.Random(1)
        self.num_sequences, self.ahead = num_sequences, ahead
        self.made = 0
        self.tokens, self.seconds = 0, 0.0
        self.lengths: list[int] = []

    def step(self, chance: float, *, prefill: bool = False) -> None:
        length = self.guesses.choose_length(self.num_sequences)
        drafts = min(self.made, length) if self.ahead else length
        runs, results = [], {}
        for seq_id in range(self.num_sequences):
            right = 0
            while right < drafts and self.rng.random() < chance:
                right += 1
            runs.append(run_of(seq_id, [5] * (1 + drafts), drafts))
            results[seq_id] = Sampled(5, after=(Sampled(5),) * right)
            self.tokens += 1 + right
        if prefill:
            runs.append(run_of(99, [5] * 300, 0))
            results[99] = Sampled(5)
        rows = self.num_sequences * (1 + drafts) + 300 * prefill
        seconds = (0.01 + 0.0001 * rows + 0.0005 * length) * self.rng.gauss(1, 0.02)
        self.seconds += seconds
        self.guesses.count(StepPlan(step=0, sequences=tuple(runs), max_drafts=length), results, seconds)
        self.made = length
        self.lengths.append(length)


def run_of(seq_id: int, token_ids: Sequence[int], drafts: int) -> SequencePlan:
    return SequencePlan(
        seq_id=seq_id, slot=0, start=7, token_ids=tuple(token_ids), pages=(0,), window_first=0, window_pages=(0,), sample=True,
        drafts=drafts,
    )  # fmt: skip


def usual(lengths: Sequence[int]) -> int:
    return max(set(lengths), key=lengths.count)


@pytest.mark.parametrize(("own", "ahead"), [(MTP(MAX_K), True), (None, False)], ids=["device", "host"])
def test_length_follows_what_is_right(own: MTP | None, ahead: bool) -> None:
    """Back, too, from no guesses at all: the first step of a try has none that a device could have made, and does not count."""
    drafting = Drafting(own=own, speculators=() if ahead else (NGramSpeculator(NGram(MAX_K)),), adaptive=True)
    device = Device(drafting, num_sequences=8, ahead=ahead)
    for _ in range(1500):
        device.step(0.02)
    assert usual(device.lengths[-200:]) == 0
    for _ in range(1500):
        device.step(0.95)
    assert usual(device.lengths[-200:]) == MAX_K
    policy = device.guesses.stats().policy
    assert policy is not None and policy.acceptance[0] == pytest.approx(0.95, abs=0.05)


def test_acceptance_is_learned_beside_prompts_and_their_time_is_not() -> None:
    device = Device(Drafting(own=MTP(MAX_K), adaptive=True), num_sequences=4, ahead=True)
    for _ in range(50):
        device.step(0.8)
    before = device.guesses.stats().policy
    for _ in range(300):
        device.step(0.3, prefill=True)
    after = device.guesses.stats().policy
    assert before is not None and after is not None
    assert before.acceptance[0] > 0.7 and after.acceptance[0] < 0.4
    assert after.seconds == before.seconds and after.classes[0].steps == before.classes[0].steps


def test_length_is_fixed_without_a_policy() -> None:
    device = Device(Drafting(own=MTP(3)), num_sequences=2, ahead=True)
    for _ in range(20):
        device.step(0.0)
    assert set(device.lengths) == {3} and device.guesses.stats().policy is None
