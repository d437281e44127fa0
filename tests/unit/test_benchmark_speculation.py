"""What ``examples/benchmarks/speculation.py`` makes of windows measured side by side."""

from __future__ import annotations

import asyncio
import random

import pytest

from examples.benchmarks import speculation


def test_ratio_is_known_better_than_what_it_is_of() -> None:
    """The machine is slow in some rounds, by up to a half, for all alike; by themselves windows differ by 2 %."""
    rng = random.Random(0)
    inside = 0
    for _ in range(100):
        machine = [rng.uniform(0.5, 1) for _ in range(40)]
        ours, theirs = ([pace * speed * rng.gauss(1, 0.02) for pace in machine] for speed in (0.97, 1.0))
        ratio, low, high = speculation.median_ratio(ours, theirs, draws=400)
        assert 0.94 < low <= ratio <= high < 1
        inside += low <= 0.97 <= high
    assert inside > 85


def test_engines_are_compared_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["none", "MTP(1)"]
    # An odd number of rounds: of an even one the medians of both ratios may be above 1.
    line = "--layers 0 --device cpu --batch 1 --context 4 --rounds 3 --tokens 2 --learn 8 --compare"
    found = asyncio.run(speculation.compare(speculation.arguments([*line.split(), *names])))
    assert [row["engine"] for row in found] == names
    assert all(len(row["tokens_per_s"]) == 3 and min(row["tokens_per_s"]) > 0 for row in found)
    assert max(row["over_better"][0] for row in found) == 1
    tokens_a_step = [float(line[26:41]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert tokens_a_step[0] == 1 <= tokens_a_step[1] <= 2


def test_drafter_is_right_whenever_it_shall_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "START", 2)
    line = "--layers 0 --device cpu --batch 2 --context 9 --steps 3 --drafts 0 1 --acceptance 1"
    rows = asyncio.run(speculation.run(speculation.arguments(line.split())))
    assert [(row["drafts"], row["batch"]) for row in rows] == [(0, 2), (1, 2)]
    assert [row["tokens_per_s"] * row["step_s"] / row["batch"] for row in rows] == pytest.approx([1, 2], rel=0.3)
