"""The draft policy in a simulated engine whose costs and acceptance are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from dsv4lite.engine.draft_policy import EXPLORATION, DraftPolicy

MAX_K = 4
Cost = Callable[[int, int], float]


def gpu(num_sequences: int, k: int) -> float:
    """Seconds of a step: bound by memory up to 128 rows, by arithmetic beyond; drafts cost a little each."""
    rows = num_sequences * (1 + k)
    return 0.008 + 0.0004 * k + 0.00004 * rows + 0.0001 * max(0, rows - 128)


def staircase(num_sequences: int, k: int) -> float:
    """A kernel with tiles of 16 rows: one draft costs as much as three."""
    return 0.004 * -(-num_sequences * (1 + k) // 16)


def rate(cost: Cost, acceptance: Sequence[float], num_sequences: int, k: int) -> float:
    """Tokens per second with a fixed k."""
    tokens = survival = 1.0
    for chance in acceptance[:k]:
        survival *= chance
        tokens += survival
    return num_sequences * tokens / cost(num_sequences, k)


@dataclass
class Engine:
    """Steps of random length with random acceptance."""

    cost: Cost
    noise: float
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.policy = DraftPolicy(MAX_K)
        self.chosen: list[int] = []
        # Tokens expected of the chosen k, of the best fixed one, and of the better of on and off in the same time.
        self.tokens = self.best = self.switched = 0.0

    def run(self, steps: int, num_sequences: int, acceptance: Sequence[float]) -> None:
        rates = [rate(self.cost, acceptance, num_sequences, k) for k in range(MAX_K + 1)]
        for _ in range(steps):
            k = self.policy.choose(num_sequences)
            seconds = self.cost(num_sequences, k) * max(0.3, self.rng.gauss(1, self.noise))
            accepted, reached = [], num_sequences
            for chance in acceptance[:k]:
                reached = sum(self.rng.random() < chance for _ in range(reached))
                accepted.append(reached)
            self.policy.observe(num_sequences, k, seconds, accepted)
            self.chosen.append(k)
            mean_seconds = self.cost(num_sequences, k)
            self.tokens += mean_seconds * rates[k]
            self.best += mean_seconds * max(rates)
            self.switched += mean_seconds * max(rates[0], rates[MAX_K])


GOOD, MIDDLING, BAD = (0.85, 0.7, 0.6, 0.5), (0.4, 0.3, 0.2, 0.2), (0.05, 0.05, 0.05, 0.05)


@pytest.mark.parametrize("noise", [0.02, 0.2])
@pytest.mark.parametrize("num_sequences", [1, 16, 256])
@pytest.mark.parametrize("acceptance", [GOOD, MIDDLING, BAD], ids=["good", "middling", "bad"])
def test_policy_is_hardly_slower_than_the_best_fixed_choice(acceptance: Sequence[float], num_sequences: int, noise: float) -> None:
    engine = Engine(gpu, noise)
    engine.run(6000, num_sequences, acceptance)
    assert engine.tokens > 0.97 * engine.best
    assert engine.tokens > 0.97 * engine.switched
    state = engine.policy.snapshot()
    settled = state.classes[0].k
    fastest = max(rate(gpu, acceptance, num_sequences, k) for k in range(MAX_K + 1))
    assert rate(gpu, acceptance, num_sequences, settled) > 0.95 * fastest
    assert state.changes <= 6
    assert state.lost_seconds < 2 * EXPLORATION * state.seconds


def test_policy_sees_over_a_step_of_the_costs() -> None:
    """One draft more is no gain, three are: looking at the next k only would find nothing."""
    engine = Engine(staircase, 0.05)
    assert staircase(16, 1) == 2 * staircase(16, 0) and staircase(4, 3) == staircase(4, 0)
    engine.run(1500, 4, (0.5, 0.5, 0.5, 0.5))
    assert engine.policy.snapshot().classes[0].k == 3
    engine.run(1500, 16, GOOD)
    assert engine.policy.snapshot().classes[-1].k == 0
    assert engine.tokens > 0.92 * engine.best


@pytest.mark.parametrize(("num_sequences", "before", "after"), [(1, BAD, GOOD), (8, GOOD, BAD), (64, BAD, GOOD), (64, GOOD, BAD)])
def test_policy_follows_a_change_of_acceptance(num_sequences: int, before: Sequence[float], after: Sequence[float]) -> None:
    engine = Engine(gpu, 0.05)
    engine.run(3000, num_sequences, before)
    engine.run(2500, num_sequences, after)
    used = engine.policy.snapshot().classes[0].k
    fastest = max(rate(gpu, after, num_sequences, k) for k in range(MAX_K + 1))
    assert rate(gpu, after, num_sequences, used) > 0.96 * fastest


def test_policy_does_not_flap_where_nothing_is_to_be_gained() -> None:
    """With half of all drafts accepted, costs that grow with the tokens make every k as good as any other."""

    def even(num_sequences: int, k: int) -> float:
        return 0.01 * sum(0.5**i for i in range(k + 1))

    engine = Engine(even, 0.1)
    engine.run(10_000, 16, (0.5, 0.5, 0.5, 0.5))
    assert engine.policy.snapshot().changes <= 10
    assert engine.tokens > 0.97 * engine.best


def test_policy_serves_all_sizes_of_a_load_that_rises_and_falls() -> None:
    engine = Engine(gpu, 0.1)
    for i in range(6400):
        engine.run(1, 1 + abs(i // 20 % 160 - 80), GOOD)
    assert engine.tokens > 0.97 * engine.best
    assert engine.tokens > 0.97 * engine.switched


def test_costs_that_rise_for_all_lengths_do_not_change_the_choice() -> None:
    """Contexts grow: only the k in use is measured then, and it must not look slower than the others for that."""
    scale = [1.0]
    engine = Engine(lambda r, k: scale[0] * gpu(r, k), 0.02)
    engine.run(2000, 64, MIDDLING)
    used, before = engine.policy.snapshot().classes[0].k, engine.policy.snapshot().changes
    for _ in range(2000):
        scale[0] *= 1.0005
        engine.run(1, 64, MIDDLING)
    state = engine.policy.snapshot()
    assert (state.classes[0].k, state.changes) == (used, before) == (1, before)


def test_new_class_begins_as_its_neighbour() -> None:
    engine = Engine(gpu, 0.0)
    engine.run(2000, 12, BAD)
    assert engine.policy.snapshot().classes[0].k == 0
    assert engine.policy.choose(13) == 0


def test_acceptance_is_measured_by_position() -> None:
    engine = Engine(gpu, 0.02)
    engine.run(4000, 8, (0.9, 0.7, 0.8, 0.6))
    assert engine.policy.snapshot().acceptance == pytest.approx((0.9, 0.7, 0.8, 0.6), abs=0.06)


def test_equal_observations_lead_to_equal_decisions() -> None:
    runs = []
    for _ in range(2):
        engine = Engine(gpu, 0.2, seed=5)
        engine.run(500, 3, MIDDLING)
        engine.run(500, 30, GOOD)
        runs.append((engine.chosen, engine.policy.snapshot()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("max_k", [1, 2])
def test_short_drafts_are_chosen_too(max_k: int) -> None:
    policy = DraftPolicy(max_k)
    for _ in range(300):
        k = policy.choose(5)
        assert 0 <= k <= max_k
        policy.observe(5, k, 0.01, [4] * k)
    assert policy.snapshot().classes[0].k == max_k
    assert all(seconds == pytest.approx(0.01) for seconds in policy.snapshot().classes[0].seconds)


def test_lengths_that_cannot_pay_are_tried_ever_less() -> None:
    """Each draft costs more than a step: even if all were accepted, none would pay, and the state says so."""
    engine = Engine(lambda num_sequences, k: 0.01 * (1 + 1.2 * k), 0.03)
    tries, lost = [], []
    for _ in range(5):
        engine.run(2000, 8, GOOD)
        state = engine.policy.snapshot()
        tries.append(state.tries)
        lost.append(state.lost_seconds)
    used = state.classes[0]
    assert used.k == 0 and state.changes == 1
    assert used.gains[0] == pytest.approx(1) and max(used.gains[1:]) < max(used.most_gains[1:]) < 1
    assert tries[4] - tries[3] < (tries[1] - tries[0]) / 2
    assert lost[4] - lost[0] < 0.003 * state.seconds
    assert engine.tokens > 0.985 * engine.best


@pytest.mark.parametrize("forgets", [0.0, 0.3])
def test_acceptance_behind_a_gap_says_how_it_will_be(forgets: float) -> None:
    """A drafter that was left out is accepted less at first; how much less is learned, and the rest is what counts."""
    policy, rng, seen = DraftPolicy(1, forgets=True), random.Random(3), 128.0
    for step in range(3000):
        policy.choose(16)
        k = int(step % 100 < 70)  # whatever it would choose
        policy._seen = seen = min(128.0, seen + 1) if k else seen * 0.92
        chance = 0.6 * (1 - forgets / (1 + seen / 10))
        policy.observe(16, k, 0.01, [sum(rng.random() < chance for _ in range(16))] * k)
        if step > 1000 and step % 100 == 4:
            early = policy.snapshot().acceptance[0]
            assert early == pytest.approx(0.6, abs=0.06)


def test_few_steps_that_others_delayed_do_not_end_what_pays_elsewhere() -> None:
    """The first steps with drafts of a new class take long: what is known of another class speaks against it."""
    delay = [1.0]
    engine = Engine(lambda num_sequences, k: 0.01 * (1 + 0.1 * k) * (delay[0] if num_sequences == 8 and k else 1.0), 0.03)
    engine.policy = DraftPolicy(1)
    engine.run(300, 1, (0.85,))
    delay[0] = 3.5
    engine.run(12, 8, (0.85,))
    assert engine.policy.snapshot().classes[-1].k == 0
    delay[0] = 1.0
    engine.run(400, 8, (0.85,))
    assert engine.policy.snapshot().classes[-1].k == 1


@pytest.mark.parametrize("max_k", [1, MAX_K])
def test_steps_that_do_what_is_done_once_do_not_decide(max_k: int) -> None:
    """The first two steps with drafts take thirty times as long: something is compiled, or recorded."""
    policy, rng, slow = DraftPolicy(max_k), random.Random(0), 2
    chosen = []
    for _ in range(400):
        k = policy.choose(8)
        seconds = gpu(8, k) * rng.gauss(1, 0.03) * (30 if k and slow else 1)
        slow -= k > 0 and slow > 0
        policy.observe(8, k, seconds, [round(8 * 0.8 ** (i + 1)) for i in range(k)])
        chosen.append(k)
    assert policy.snapshot().classes[0].k >= min(max_k, 3)
    assert chosen[50:].count(0) < 20
