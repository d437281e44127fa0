"""The GRPO example: what it promises, in a few steps."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.grpo import Settings, Step, main, plot, reward, run

SHORT = Settings(steps=3)


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return run(SHORT)


def test_reward_doubles(steps: list[Step]) -> None:
    assert steps[-1].reward >= 2 * steps[0].reward > 0


def test_trainer_and_rollouts_have_the_same_bits(steps: list[Step]) -> None:
    """At every step, with weights that only updates of a sleeping engine have brought."""
    assert [(step.kl, step.most, step.stale, step.version) for step in steps] == [(0.0, 0.0, 0.0, number) for number in range(3)]


def test_sleep_gives_memory_back(steps: list[Step]) -> None:
    assert all(step.asleep < step.awake for step in steps)


def test_runs_with_one_seed_are_identical(steps: list[Step]) -> None:
    assert [step.results for step in run(replace(SHORT, steps=2))] == [step.results for step in steps[:2]]


def test_updates_in_flight_leave_no_request_behind() -> None:
    """Trainer and rollouts at the same time: tokens of the newest weights still have the trainer's bits."""
    steps = run(SHORT, asynchronous=True)
    assert len(steps) == SHORT.steps and steps[0].version == 0
    assert all(step.most == 0 and 0 <= step.stale <= 1 for step in steps) and steps[0].stale == 0


@pytest.mark.parametrize(
    ("text", "value"), [("7\n", 1), ("97\nx", 1), ("7", 0), ("1\n", 0), ("9\n", 0), ("²\n", 0), ("x\n", 0), ("\n", 0)]
)
def test_reward_is_for_prime_numbers(text: str, value: float) -> None:
    assert reward(text) == value


def test_plots(steps: list[Step], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(steps, tmp_path)
    assert (tmp_path / "grpo.png").stat().st_size > 10_000 and (tmp_path / "grpo.json").exists()


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_run_without_steps_is_refused(steps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["grpo.py", "--steps", steps])
    with pytest.raises(SystemExit):
        main()
    assert f"--steps must be at least 1, not {steps}" in capsys.readouterr().err


def test_plots_without_matplotlib_are_refused_before_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The run ended in a traceback after all its steps, and the measures were lost."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("sys.argv", ["grpo.py", "--steps", "1", "--plots", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "--plots needs matplotlib: pip install 'dsv4lite[plots]'" in capsys.readouterr().err
