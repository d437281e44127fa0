"""The choice of the draft length in engines of known costs: on the host, and on a device that drafts a step ahead."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dsv4lite.config import MTP, Drafting, NGram
from dsv4lite.scheduling.step_plan import Sampled, SequencePlan, StepPlan
from dsv4lite.speculation.controller import StepCosts
from dsv4lite.speculation.ngram import NGramSpeculator
from dsv4lite.speculation.speculator import DraftProposer

MAX_K = 4


def verified(
    rng: random.Random, num_sequences: int, drafts: int, chance: float, length: int
) -> tuple[StepPlan, dict[int, Sampled], int]:
    """Return a step of so many drafts, its results, and its tokens; ``length`` is what was asked for."""
    spans, results, tokens = [], {}, 0
    for seq_id in range(num_sequences):
        accepted = 0
        while accepted < drafts and rng.random() < chance:
            accepted += 1
        spans.append(SequencePlan(seq_id, 0, 7, (5,) * (1 + drafts), (0,), 0, (0,), True, drafts=drafts))
        results[seq_id] = Sampled(5, after=(Sampled(5),) * accepted, drafted=drafts)
        tokens += 1 + accepted
    return StepPlan(step=0, sequences=tuple(spans), max_drafts=length), results, tokens


class Device:
    """Steps of a known cost, with drafts of a known acceptance; those for a step are made in the one before it."""

    def __init__(self, drafting: Drafting, *, num_sequences: int, ahead: bool) -> None:
        self.proposer = DraftProposer(drafting, vocab_size=10, clock=lambda: self.seconds)
        self.rng = random.Random(1)
        self.num_sequences, self.ahead, self.made, self.seconds = num_sequences, ahead, 0, 0.0
        self.lengths: list[int] = []

    def step(self, chance: float, *, prefill: bool = False) -> None:
        length = self.proposer.choose_length(self.num_sequences)
        drafts = min(self.made, length) if self.ahead else length
        plan, results, _ = verified(self.rng, self.num_sequences, drafts, chance, length)
        rows = self.num_sequences * (1 + drafts)
        if prefill:
            prompt = SequencePlan(99, 0, 7, (5,) * 300, (0,), 0, (0,), True)
            plan, rows, results[99] = replace(plan, sequences=(*plan.sequences, prompt)), rows + 300, Sampled(5)
            self.proposer.interrupt()
        self.seconds += (0.01 + 0.0001 * rows + 0.0005 * length) * self.rng.gauss(1, 0.02)
        if length:
            self.proposer.count(plan, results)
        self.made = length
        self.lengths.append(length)


def usual(lengths: Sequence[int]) -> int:
    return max(set(lengths), key=lengths.count)


@pytest.mark.parametrize(("own", "ahead"), [(MTP(MAX_K), True), (None, False)], ids=["device", "host"])
def test_length_follows_the_acceptance(own: MTP | None, ahead: bool) -> None:
    """Back, too, from no drafts: the first step of a probe has none that a device could have made, and does not count."""
    drafting = Drafting(own=own, speculators=() if ahead else (NGramSpeculator(NGram(MAX_K)),), adaptive=True)
    device = Device(drafting, num_sequences=8, ahead=ahead)
    for _ in range(1500):
        device.step(0.02)
    assert usual(device.lengths[-200:]) == 0
    for _ in range(1500):
        device.step(0.95)
    assert usual(device.lengths[-200:]) == MAX_K
    policy = device.proposer.stats().policy
    assert policy is not None and policy.acceptance[0] == pytest.approx(0.95, abs=0.05)


def test_acceptance_is_learned_beside_prompts_and_their_time_is_not() -> None:
    device = Device(Drafting(own=MTP(MAX_K), adaptive=True), num_sequences=4, ahead=True)
    for _ in range(50):
        device.step(0.8)
    before = device.proposer.stats().policy
    for _ in range(300):
        device.step(0.3, prefill=True)
    after = device.proposer.stats().policy
    assert before is not None and after is not None
    assert before.acceptance[0] > 0.7 and after.acceptance[0] < 0.4
    assert after.seconds < before.seconds + 0.2 and sum(after.classes[0].steps) < sum(before.classes[0].steps) + 20


def test_length_is_fixed_without_a_controller() -> None:
    device = Device(Drafting(own=MTP(3)), num_sequences=2, ahead=True)
    for _ in range(20):
        device.step(0.0)
    assert set(device.lengths) == {3} and device.proposer.stats().policy is None


# Milliseconds of a step at eight of V4-Flash's layers by its rows: measured on an H200 up to 64, beyond as the roofline grows.
ROWS, STEP_MS = (1, 2, 4, 8, 64, 320), (1.40, 1.56, 1.93, 2.50, 7.08, 15.0)
HOST_MS = {1: 0.25, 8: 0.35, 64: 0.75}
FEED_MS, DRAFT_MS = 0.02, 0.4  # where drafts are wanted: the MTP block's row of every token; the block and the head


def step_ms(rows: int) -> float:
    """Return the device's part of a step."""
    i = max(1, min(bisect_left(ROWS, rows), len(ROWS) - 1))
    share = (rows - ROWS[i - 1]) / (ROWS[i] - ROWS[i - 1])
    return STEP_MS[i - 1] + share * (STEP_MS[i] - STEP_MS[i - 1])


class Ahead:
    """An engine on such a device: it plans a step without drafts ahead, and one with drafts when the last one is known."""

    def __init__(self, k: int, num_sequences: int, chance: float, costs: StepCosts | None = None, *, seed: int = 7) -> None:
        drafting = Drafting(own=MTP(k), adaptive=True)
        self.proposer = DraftProposer(drafting, vocab_size=10, costs=costs, clock=lambda: self.now)
        self.rng = random.Random(seed)
        self.forgets, self.seen = 0.3, 128.0
        self.num_sequences, self.chance = num_sequences, chance
        self.host_s, self.made, self.tokens = HOST_MS[num_sequences] / 1e3, 0, 0
        self.now = self.free = 0.0
        self.in_flight: deque[tuple[StepPlan, dict[int, Sampled], int, float]] = deque()

    def run(self, seconds: float) -> float:
        """Return tokens per second."""
        while self.now < seconds:
            length = self.proposer.choose_length(self.num_sequences)
            if length and self.in_flight:
                self.finish()
            self.now += 0.7 * self.host_s
            self.launch(length)
            if len(self.in_flight) > (length == 0):
                self.finish()
        return self.tokens / self.now

    def launch(self, length: int) -> None:
        drafts = min(self.made, length)
        self.made = length
        self.seen = min(128, self.seen + 1) if length else 0.92 * self.seen
        chance = self.chance * (1 - self.forgets / (1 + self.seen / 10))
        plan, results, tokens = verified(self.rng, self.num_sequences, drafts, chance, length)
        busy_ms = step_ms(self.num_sequences * (1 + drafts)) + (FEED_MS if length else 0) + DRAFT_MS * length
        self.free = max(self.free, self.now) + busy_ms / 1e3 * max(0.5, self.rng.gauss(1, 0.03))
        self.in_flight.append((plan, results, tokens, self.free))

    def finish(self) -> None:
        plan, results, tokens, end = self.in_flight.popleft()
        self.now = max(self.now, end) + 0.3 * self.host_s
        self.tokens += tokens
        if plan.max_drafts:
            self.proposer.count(plan, results)


@pytest.mark.parametrize(
    ("k", "num_sequences", "chance"),
    [(1, 1, 0.8), (1, 1, 0.5), (1, 1, 0.05), (1, 8, 0.8), (1, 8, 0.45), (1, 64, 0.8), (1, 64, 0.1), (4, 1, 0.8), (4, 8, 0.1)],
)
def test_choice_is_hardly_slower_than_the_better_of_on_and_off(k: int, num_sequences: int, chance: float) -> None:
    """Against an engine that never drafts and plans ahead, and one that always does, with the loss of probes."""
    device = Ahead(k, num_sequences, chance)
    host_ms = HOST_MS[num_sequences]
    off = num_sequences / max(host_ms, step_ms(num_sequences)) * 1e3
    gained = sum(chance**i for i in range(k + 1))
    on = num_sequences * gained / (host_ms + step_ms(num_sequences * (1 + k)) + FEED_MS + DRAFT_MS * k) * 1e3
    found = device.run(12.0 if num_sequences < 64 else 20.0)
    policy = device.proposer.stats().policy
    assert policy is not None
    assert found > 0.97 * max(on, off)
    assert policy.lost_seconds < 0.02 * policy.seconds
