"""Random requests against the simulated device: every sequence reads its own state and gets its own tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv4lite.scheduling.pages import Pools, pages_for
from dsv4lite.scheduling.scheduler import SchedulerLimits
from tests.scheduling.simulator import VOCAB, Harness, request

LENGTHS = (
    1, 2, 63, 64, 65, 127, 128, 129, 130, 191, 192, 193, 255, 256, 257, 258, 300, 384, 385, 511, 512, 513, 514, 600, 768, 769, 900,
)  # fmt: skip


class Traffic:
    """A source of random requests whose prompts share prefixes."""

    def __init__(self, rng: random.Random, harness: Harness) -> None:
        self.rng, self.harness, self.count = rng, harness, 0
        self.texts = [[rng.randrange(1, VOCAB) for _ in range(1200)] for _ in range(2)]

    def send(self) -> None:
        rng, limit = self.rng, self.harness.limits.max_model_len
        generate = rng.random() < 0.85
        length = min(rng.choice(LENGTHS), limit - generate)
        if not generate:
            length = max(length, 2)
        prompt = rng.choice(self.texts)[:length]
        if rng.random() < 0.3:
            prompt[rng.randrange(length)] = rng.randrange(1, VOCAB)
        self.count += 1
        name = f"r{self.count}"
        self.harness.add(
            request(
                name,
                prompt,
                priority=rng.choice((0, 0, 0, -1, 2)),
                deadline=self.harness.now + rng.randrange(1, 200) if rng.random() < 0.1 else None,
                salt=rng.choice((None, None, None, "a", "")),
                score_from=rng.randrange(1, length + 1) if rng.random() < 0.15 or not generate else None,
                generate=generate,
                arrival=self.harness.now,
                n=rng.choice((1, 1, 1, 2, 3, 5)) if generate else 1,
                max_tokens=rng.choice((None, 1, 2, 3, 10, 70, 150, 300)) if length + 300 <= limit else rng.choice((None, 1)),
                min_tokens=rng.choice((0, 0, 1)),
                ignore_eos=rng.random() < 0.7,
                stop_token_ids=(5,) if rng.random() < 0.1 else (),
                thinking_budget=9 if rng.random() < 0.15 else None,
                seed=rng.randrange(3),
            ),
            fails_at=rng.randrange(4) if rng.random() < 0.04 else None,
        )


def make_harness(
    rng: random.Random,
    drafts: int = 0,
    right: Callable[[], bool] | None = None,
    *,
    stages: int = 1,
    ahead: bool = False,
    windows: bool = True,
) -> Harness:
    """Without ``windows`` the model has neither sliding-window pages nor compressor state: only grow pages."""
    limits = SchedulerLimits(
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_num_batched_tokens=rng.choice((5, 64, 100, 256, 300, 700, 2048)),
        max_model_len=rng.choice((258, 400, 513, 900, 1100)),
        window=rng.choice((2, 8, 64, 65, 128, 128, 128, 130)) if windows else 0,
        snapshots=windows,
        prefix_checkpoint_tokens=rng.choice((256, 512, 1024)),
        enable_prefix_caching=rng.random() < 0.9,
        max_drafts=drafts,
        drafter_rows=drafts > 0,
        stages=stages,
    )
    pools = Pools(
        grow=pages_for(limits.max_model_len - 1) + rng.choice((0, 1, 3, 8)),
        window=limits.window_pages + rng.choice((0, 1, 4, 20)) if windows else 0,
        slots=rng.choice((1, 2, 4, 8)),
        snapshots=rng.choice((0, 1, 2, 5, 20)) if windows else 0,
    )
    return Harness(limits, pools, overlap=rng.random() < 0.7, right=right if drafts else None, ahead=ahead)


@pytest.mark.parametrize("seed", range(98))
def test_random_traffic_reads_only_its_own_state(seed: int) -> None:
    """Drafts are accepted, rejected or missing at random; rejected ones leave no trace."""
    rng = random.Random(seed)
    share, drafts = rng.choice((0.0, 0.3, 0.7, 0.9, 1.0)), rng.choice((1, 1, 2, 4))
    right = lambda: rng.random() < share
    if seed < 40:
        harness = make_harness(rng)
    elif seed < 70:
        harness = make_harness(rng, drafts, right)
    elif seed < 82:
        harness = make_harness(rng, drafts if seed % 3 == 0 else 0, right, stages=rng.choice((2, 2, 3, 5)))
    else:  # drafts of the device: a span is planned for any number of accepted drafts, which the device knows
        harness = make_harness(rng, drafts, right, ahead=True)
    run_traffic(rng, harness)
    assert any(part.window_pages for plan in harness.plans for part in plan.sequences)


@pytest.mark.parametrize("seed", range(98, 122))
def test_random_traffic_without_windows_and_compressor_state_reads_only_its_own_state(seed: int) -> None:
    """A family whose state is grow pages alone: prefixes are cached without snapshots."""
    rng = random.Random(seed)
    drafts, ahead = rng.choice(((0, False), (2, False), (2, True)))
    harness = make_harness(rng, drafts, lambda: rng.random() < 0.6, ahead=ahead, windows=False)
    run_traffic(rng, harness)
    assert not any(part.window_pages for plan in harness.plans for part in plan.sequences)
    assert not harness.limits.enable_prefix_caching or sum(harness.cached.values()) or harness.limits.max_model_len < 400


def run_traffic(rng: random.Random, harness: Harness) -> None:
    traffic = Traffic(rng, harness)
    while traffic.count < 14:
        if rng.random() < 0.08:
            traffic.send()
        if rng.random() < 0.01 and harness.requests:
            name = rng.choice(list(harness.requests))
            harness.abort(name, rng.choice((None, 0, harness.requests[name].params.n - 1)))
        if rng.random() < 0.004:
            harness.bump()
        if rng.random() < 0.002 and not harness.outstanding:
            harness.preempt_all()
        if rng.random() < 0.05 and harness.outstanding:
            harness.update()
        harness.now += rng.random()
        harness.step()
    harness.drain()


class SchedulerMachine(RuleBasedStateMachine):
    """Any sequence of calls; failures shrink to the shortest one."""

    @initialize(
        limits=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(1, 4),
                "max_num_batched_tokens": st.sampled_from((64, 200, 600)),
                "window": st.sampled_from((8, 65, 128)),
                "enable_prefix_caching": st.booleans(),
                "max_drafts": st.sampled_from((0, 0, 1, 4)),
                "stages": st.sampled_from((1, 1, 2, 4)),
            }
        ),
        spare=st.fixed_dictionaries({"grow": st.integers(0, 4), "window": st.integers(0, 8), "slots": st.integers(0, 3)}),
        snapshots=st.integers(0, 4),
        period=st.integers(1, 4),
        overlap=st.booleans(),
        ahead=st.booleans(),
    )
    def start(self, limits: dict[str, Any], spare: dict[str, int], snapshots: int, period: int, overlap: bool, ahead: bool) -> None:
        made = SchedulerLimits(**limits, max_model_len=600, prefix_checkpoint_tokens=256, drafter_rows=limits["max_drafts"] > 0)
        least = {"grow": pages_for(599), "window": made.window_pages, "slots": 1}
        pools = Pools(**{name: count + spare[name] for name, count in least.items()}, snapshots=snapshots)
        turns = itertools.count(1)
        right = (lambda: next(turns) % period > 0) if made.max_drafts else None
        self.harness = Harness(made, pools, overlap=overlap, right=right, ahead=ahead)
        self.count = 0

    @rule(
        length=st.sampled_from((1, 2, 64, 130, 255, 256, 257, 300, 512, 513, 590)),
        text=st.integers(1, 2),
        settings=st.fixed_dictionaries(
            {
                "n": st.sampled_from((1, 1, 2, 4)),
                "max_tokens": st.sampled_from((1, 2, 5, 60, None)),
                "priority": st.integers(-1, 1),
                "salt": st.sampled_from((None, None, "a")),
                "thinking_budget": st.sampled_from((None, None, 5)),
            }
        ),
        patience=st.sampled_from((None, None, 3, 40)),
        score_from=st.sampled_from((None, None, 1, 200)),
        generate=st.booleans(),
        fails_at=st.sampled_from((None, None, None, 2)),
    )
    def add(
        self,
        length: int,
        text: int,
        settings: dict[str, Any],
        patience: int | None,
        score_from: int | None,
        generate: bool,
        fails_at: int | None,
    ) -> None:
        generate = generate or settings["n"] > 1 or length == 1
        self.count += 1
        made = request(
            f"r{self.count}",
            [1 + (text * i * i + i // 7) % (VOCAB - 1) for i in range(length)],
            deadline=None if patience is None else self.harness.now + patience,
            score_from=score_from if generate else score_from or 1,
            generate=generate,
            arrival=self.harness.now,
            **settings,
        )
        self.harness.add(made, fails_at=fails_at if generate else None, held=settings["thinking_budget"] is not None)

    @rule(steps=st.sampled_from((1, 1, 2, 5, 60)))
    def step(self, steps: int) -> None:
        self.harness.release()
        for _ in range(steps):
            self.harness.now += 1
            self.harness.step()

    @precondition(lambda self: self.harness.outstanding)
    @rule()
    def update(self) -> None:
        self.harness.update()

    @rule(which=st.integers(0, 9), index=st.sampled_from((None, None, 0, 1)))
    def abort(self, which: int, index: int | None) -> None:
        name = f"r{self.count - which}"
        if name in self.harness.requests and (index is None or index < self.harness.requests[name].params.n):
            self.harness.abort(name, index)

    @rule()
    def bump(self) -> None:
        self.harness.bump()

    @precondition(lambda self: not self.harness.outstanding)
    @rule()
    def preempt_all(self) -> None:
        self.harness.preempt_all()

    @invariant()
    def consistent(self) -> None:
        self.harness.scheduler.check()

    def teardown(self) -> None:
        self.harness.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
