"""The draft controller in a simulated engine whose step costs and acceptance are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from dsv4lite.speculation.controller import EXPLORATION, Acceptance, DraftController, StepCosts

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
    max_k: int = MAX_K
    costs: StepCosts | None = None

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.now = 0.0
        self.controller = DraftController(self.max_k, lambda: self.now, costs=self.costs)
        self.delay: Cost = lambda num_sequences, k: 1.0  # by others, that is not counted
        self.chosen: list[int] = []
        # Tokens expected of the chosen k, of the best fixed one, and of the better of on and off in the same time.
        self.tokens = self.best = self.switched = 0.0

    def run(self, steps: int, num_sequences: int, acceptance: Sequence[float]) -> None:
        rates = [rate(self.cost, acceptance, num_sequences, k) for k in range(self.max_k + 1)]
        for _ in range(steps):
            k = self.controller.choose(num_sequences)
            mean_seconds = self.cost(num_sequences, k)
            self.now += mean_seconds * max(0.3, self.rng.gauss(1, self.noise)) * self.delay(num_sequences, k)
            accepted, reached = [], num_sequences
            for chance in acceptance[:k]:
                reached = sum(self.rng.random() < chance for _ in range(reached))
                accepted.append(reached)
            if k:
                self.controller.learn(num_sequences, accepted)
            self.chosen.append(k)
            self.tokens += mean_seconds * rates[k]
            self.best += mean_seconds * max(rates)
            self.switched += mean_seconds * max(rates[0], rates[-1])


GOOD, MIDDLING, BAD = (0.85, 0.7, 0.6, 0.5), (0.4, 0.3, 0.2, 0.2), (0.05, 0.05, 0.05, 0.05)


@pytest.mark.parametrize("noise", [0.02, 0.2])
@pytest.mark.parametrize("num_sequences", [1, 16, 256])
@pytest.mark.parametrize("acceptance", [GOOD, MIDDLING, BAD], ids=["good", "middling", "bad"])
def test_controller_is_hardly_slower_than_the_best_fixed_choice(
    acceptance: Sequence[float], num_sequences: int, noise: float
) -> None:
    engine = Engine(gpu, noise)
    engine.run(6000, num_sequences, acceptance)
    assert engine.tokens > 0.97 * engine.best
    assert engine.tokens > 0.97 * engine.switched
    state = engine.controller.stats()
    settled = state.classes[0].k
    fastest = max(rate(gpu, acceptance, num_sequences, k) for k in range(MAX_K + 1))
    assert rate(gpu, acceptance, num_sequences, settled) > 0.95 * fastest
    assert state.changes <= 6
    assert state.lost_seconds < 2 * EXPLORATION * state.seconds


def test_controller_sees_over_a_step_of_the_costs() -> None:
    """One draft more is no gain, three are: looking at the next k only would find nothing."""
    engine = Engine(staircase, 0.05)
    assert staircase(16, 1) == 2 * staircase(16, 0) and staircase(4, 3) == staircase(4, 0)
    engine.run(1500, 4, (0.5, 0.5, 0.5, 0.5))
    assert engine.controller.stats().classes[0].k == 3
    engine.run(1500, 16, GOOD)
    assert engine.controller.stats().classes[-1].k == 0
    assert engine.tokens > 0.92 * engine.best


@pytest.mark.parametrize(("num_sequences", "before", "after"), [(1, BAD, GOOD), (8, GOOD, BAD), (64, BAD, GOOD), (64, GOOD, BAD)])
def test_controller_follows_a_change_of_acceptance(num_sequences: int, before: Sequence[float], after: Sequence[float]) -> None:
    engine = Engine(gpu, 0.05)
    engine.run(3000, num_sequences, before)
    engine.run(2500, num_sequences, after)
    used = engine.controller.stats().classes[0].k
    fastest = max(rate(gpu, after, num_sequences, k) for k in range(MAX_K + 1))
    assert rate(gpu, after, num_sequences, used) > 0.96 * fastest


def test_controller_does_not_flap_where_nothing_is_to_be_gained() -> None:
    """With half of all drafts accepted, costs that grow with the tokens make every k as good as any other."""

    def even(num_sequences: int, k: int) -> float:
        return 0.01 * sum(0.5**i for i in range(k + 1))

    engine = Engine(even, 0.1)
    engine.run(10_000, 16, (0.5, 0.5, 0.5, 0.5))
    assert engine.controller.stats().changes <= 10
    assert engine.tokens > 0.97 * engine.best


def test_controller_serves_all_sizes_of_a_load_that_rises_and_falls() -> None:
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
    used, before = engine.controller.stats().classes[0].k, engine.controller.stats().changes
    for _ in range(2000):
        scale[0] *= 1.0005
        engine.run(1, 64, MIDDLING)
    state = engine.controller.stats()
    assert (state.classes[0].k, state.changes) == (used, before) == (1, before)


def test_new_bucket_starts_as_its_neighbour() -> None:
    engine = Engine(gpu, 0.0)
    engine.run(2000, 12, BAD)
    assert engine.controller.stats().classes[0].k == 0
    engine.run(5, 20, BAD)
    assert engine.chosen[-5:] == [0] * 5


def test_acceptance_is_measured_by_position() -> None:
    engine = Engine(gpu, 0.02)
    engine.run(4000, 8, (0.9, 0.7, 0.8, 0.6))
    assert engine.controller.stats().acceptance == pytest.approx((0.9, 0.7, 0.8, 0.6), abs=0.06)


def test_equal_observations_lead_to_equal_decisions() -> None:
    runs = []
    for _ in range(2):
        engine = Engine(gpu, 0.2, seed=5)
        engine.run(500, 3, MIDDLING)
        engine.run(500, 30, GOOD)
        runs.append((engine.chosen, engine.controller.stats()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("max_k", [1, 2])
def test_short_drafts_are_chosen_too(max_k: int) -> None:
    engine = Engine(lambda num_sequences, k: 0.01, 0.0, max_k=max_k)
    engine.run(300, 5, (0.8, 0.8))
    used = engine.controller.stats().classes[0]
    assert set(engine.chosen) <= set(range(max_k + 1)) and used.k == max_k
    assert used.seconds == pytest.approx([0.01] * (1 + max_k))


def test_lengths_that_cannot_pay_are_tried_ever_less() -> None:
    """A draft costs more than a step: even if all were accepted, it would not pay, and the state says so."""
    engine = Engine(lambda num_sequences, k: 0.01 * (1 + 1.05 * k), 0.01, max_k=1)
    tries, lost = [], []
    for _ in range(10):
        engine.run(1000, 8, GOOD)
        state = engine.controller.stats()
        tries.append(state.tries)
        lost.append(state.lost_seconds)
    used = state.classes[0]
    assert used.k == 0 and state.changes == 1
    assert used.gains[0] == pytest.approx(1) and max(used.gains[1:]) < max(used.most_gains[1:]) < 1
    assert tries[1] >= 2 and tries[9] - tries[4] <= 3
    assert lost[9] - lost[0] < 0.003 * state.seconds
    assert engine.tokens > 0.985 * engine.best


class Clock:
    """Steps of one second."""

    now = 0.0

    def run(self, controller: DraftController, steps: int, num_sequences: int = 8, *, prompts: bool = False) -> list[int]:
        lengths = []
        for _ in range(steps):
            lengths.append(controller.choose(num_sequences))
            if prompts:
                controller.interrupt()
            self.now += 100.0 if prompts else 1.0
        return lengths


@pytest.mark.parametrize("forgets", [0.0, 0.3])
def test_acceptance_after_a_gap_predicts_that_of_a_full_context(forgets: float) -> None:
    """A drafter that had no part in some steps is accepted less at first; how much less is learned and taken out."""
    acceptance, rng, context = Acceptance(1, forgets=True), random.Random(3), 128.0
    for step in range(3000):
        if step % 100 >= 70:
            acceptance.skip(1)
            context *= 0.92
            continue
        context = min(128.0, context + 1)
        chance = 0.6 * (1 - forgets / (1 + context / 10))
        acceptance.learn(16, [sum(rng.random() < chance for _ in range(16))])
        if step > 1000 and step % 100 == 4:
            assert acceptance.probabilities() == pytest.approx([0.6], abs=0.06)


def test_steps_with_prompts_and_pauses_are_not_timed() -> None:
    clock = Clock()
    controller = DraftController(1, lambda: clock.now)
    clock.run(controller, 200)
    before = controller.stats()
    for _ in range(20):
        clock.run(controller, 3, prompts=True)
        clock.run(controller, 10)
        controller.interrupt(idle=True)
        clock.now += 1000.0
        clock.run(controller, 10)
    after = controller.stats()
    assert after.seconds - before.seconds == pytest.approx(sum(after.classes[0].steps) - sum(before.classes[0].steps))
    assert 100 < after.seconds - before.seconds < 400
    assert [seconds for seconds in after.classes[0].seconds if seconds is not None] == pytest.approx([1.0, 1.0])


def test_nothing_is_probed_among_prompts() -> None:
    clock = Clock()
    controller = DraftController(MAX_K, lambda: clock.now)
    assert set(clock.run(controller, 500, prompts=True)) == {1}
    state = controller.stats()
    assert controller.windows > 10 and state.tries == 0 and state.seconds == 0
    assert len(set(clock.run(controller, 500))) > 1


def test_decision_is_new_when_the_batch_changes_by_a_quarter() -> None:
    clock = Clock()
    controller = DraftController(1, lambda: clock.now)
    for num_sequences in (8, 9, 10, 7, 6, 8):
        clock.run(controller, 1, num_sequences)
    assert controller.windows == 1
    clock.run(controller, 1, 11)
    assert controller.windows == 2


def test_few_steps_that_others_delayed_do_not_end_what_pays_elsewhere() -> None:
    """The first steps with drafts of a new class take long: what is known of another class speaks against it."""
    engine = Engine(lambda num_sequences, k: 0.01 * (1 + 0.1 * k), 0.03, max_k=1)
    engine.run(300, 1, (0.85,))
    engine.delay = lambda num_sequences, k: 3.5 if k else 1.0
    engine.run(40, 8, (0.85,))
    assert engine.controller.stats().classes[-1].k == 0
    engine.delay = lambda num_sequences, k: 1.0
    engine.run(500, 8, (0.85,))
    assert engine.controller.stats().classes[-1].k == 1


@pytest.mark.parametrize("max_k", [1, MAX_K])
def test_steps_that_do_what_is_done_once_do_not_decide(max_k: int) -> None:
    """The first two steps with drafts take thirty times as long: something is compiled, or recorded."""
    engine, slow = Engine(gpu, 0.03, max_k=max_k), 2

    def once(num_sequences: int, k: int) -> float:
        nonlocal slow
        slow -= k > 0 and slow > 0
        return 30.0 if k and slow else 1.0

    engine.delay = once
    engine.run(400, 8, (0.8,) * MAX_K)
    assert engine.controller.stats().classes[0].k >= min(max_k, 3)
    assert engine.chosen[50:].count(0) < 20


def device(share: float = 1.0) -> StepCosts:
    """What ``gpu`` takes of the device, for a few numbers of sequences."""
    return StepCosts(seconds={size: tuple(share * gpu(size, k) for k in range(MAX_K + 1)) for size in (1, 8, 64)})


def test_costs_between_and_beyond_measured_sizes_lie_on_lines() -> None:
    costs = StepCosts(seconds={1: (1.0, 2.0), 8: (1.7, 4.1), 64: (1.7, 9.7)})
    assert costs.of(1) == (1.0, 2.0) and costs.of(8) == pytest.approx((1.7, 4.1))
    assert costs.of(4) == pytest.approx((1.3, 2.9)) and costs.of(36) == pytest.approx((1.7, 6.9))
    assert costs.of(128) == pytest.approx((1.7, 16.1))
    assert StepCosts(seconds={4: (1.0, 2.0)}).of(100) == (1.0, 2.0)


def test_engine_that_has_just_begun_tries_what_can_pay_and_nothing_else() -> None:
    """A draft that costs more than a step is left alone from the first step on; one that pays is found at once."""
    engine = Engine(lambda num_sequences, k: 0.01 * (1 + 1.3 * k), 0.02, max_k=1, costs=StepCosts(seconds={8: (0.01, 0.023)}))
    engine.run(2000, 8, GOOD)
    assert sum(engine.chosen[:400]) == 0 and engine.tokens > 0.995 * engine.best
    engine = Engine(lambda num_sequences, k: 0.01 * (1 + 0.4 * k), 0.02, max_k=1, costs=StepCosts(seconds={8: (0.01, 0.014)}))
    engine.run(300, 8, GOOD)
    assert sum(engine.chosen[:50]) > 40 and engine.tokens > 0.98 * engine.best


def test_host_that_makes_all_steps_longer_does_not_hide_what_pays() -> None:
    """The device's part of a step with a draft is 2.3 times that without; with the host's it is less than twice."""
    engine = Engine(
        lambda num_sequences, k: 0.006 + (0.002, 0.0046)[k], 0.02, max_k=1, costs=StepCosts(seconds={1: (0.002, 0.0046)})
    )
    engine.run(1500, 1, GOOD)
    assert engine.controller.stats().classes[0].k == 1
    assert engine.tokens > 0.96 * engine.best


@pytest.mark.parametrize("num_sequences", [1, 16, 64])
@pytest.mark.parametrize("acceptance", [GOOD, BAD], ids=["good", "bad"])
def test_engine_that_knows_costs_loses_little_from_the_start(acceptance: Sequence[float], num_sequences: int) -> None:
    engine = Engine(gpu, 0.05, costs=device(0.9))
    engine.run(600, num_sequences, acceptance)
    assert engine.tokens > 0.97 * engine.switched
