"""While nobody guesses, the model's own drafter has no part in steps, and what it misses does no harm when it begins again."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4lite.config import MTP, DSpark
from dsv4lite.engine.graphs import DecodeGraphs
from dsv4lite.engine.runner import Runner
from dsv4lite.engine.step_costs import measure_steps
from dsv4lite.request import SamplingParams
from dsv4lite.speculation.draft_policy import DraftPolicy
from dsv4lite.speculation.speculator import Guesses
from tests.e2e.engines import SMALL, engine_of, opened, prompts_of, write_model
from tests.e2e.test_drafters import REFRESHED
from tests.e2e.test_speculation import EagerGraphs, record
from tests.recorded import Recording, without_device

VOCAB = SMALL["vocab_size"]
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "mtp": write_model(folder / "classic", seed=2),
        "dspark": write_model(folder / "refreshed", REFRESHED, seed=2),
    }


class Ops(TorchDispatchMode):
    """Lists the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def listed() -> Iterator[list[list[str]]]:
    """List the ops of every launch."""
    found: list[list[str]] = []
    inner = Runner.launch

    def launch(runner: Runner, *args: Any, **keywords: Any) -> Any:
        with Ops() as ops:
            flight = inner(runner, *args, **keywords)
        found.append(ops.names)
        return flight

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "launch", launch)
        yield found


class EagerDecodes(DecodeGraphs):
    """Graphs of single tokens on a CPU."""

    steps = 0

    def _record(self, work: Any) -> Any:
        result = work()
        return Recording(work, result), result

    def replay(self, *args: Any) -> Any:
        self.steps += 1
        return super().replay(*args)


def record_all(engine: Any) -> tuple[EagerGraphs | None, EagerDecodes]:
    """Let an engine on pages run its steps from graphs: those with guesses, if it guesses, and those without."""
    runner = engine._runner
    guessing = None if runner._drafter is None else record(engine, (1, 2, 3))
    shared = None if guessing is None else guessing.shared
    plain = EagerDecodes(runner.model, runner.cache, max_num_seqs=8, max_model_len=1024, shared=shared)
    if guessing is None:
        runner._graphs, runner._last_token = plain, plain.last_token
    else:
        runner._plain = plain
    return guessing, plain


@pytest.mark.parametrize(("drafter", "form"), [("mtp", "recorded"), ("dspark", "references")])
def test_steps_without_guesses_are_those_of_no_speculation(
    models: dict[str, Path], drafter: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, single tokens and a cached prefix: op by op the same, whoever could guess."""
    monkeypatch.setattr(DraftPolicy, "choose", lambda policy, num_sequences, may_try: (0, 32))
    without_device(monkeypatch)
    prompts, params, runs = prompts_of((5, 258), VOCAB, seed=7), replace(PARAMS, max_tokens=5), []
    for speculative in (None, MTP(2) if drafter == "mtp" else DSpark(2)):
        with opened(models[drafter], speculative=speculative) as llm:
            graphs = engine_of(llm).call(record_all).result() if form == "recorded" else None
            with listed() as ops:
                tokens = [llm.generate(prompt, params).token_ids for prompt in (*prompts, prompts[1])]
            stats = llm.stats()
        assert graphs is None or graphs[1].steps == 12
        assert graphs is None or graphs[0] is None or graphs[0].steps == 0
        assert stats.speculation.length == stats.speculation.drafted == 0 and stats.cached_tokens == 256
        runs.append((tokens, ops))
    assert len(runs[0][1]) == 16
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("drafter", "form"), [("mtp", "references"), ("mtp", "recorded"), ("mtp", "ahead"), ("dspark", "ahead")])
def test_drafter_finds_nothing_of_others_where_it_missed_tokens(
    models: dict[str, Path], drafter: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that it did not get are blank, whatever lay there: with memory full of numbers that are none, it guesses the same.

    From graphs, too, and while steps are planned ahead, with guesses and without.
    """
    without_device(monkeypatch)
    checked: list[list[Any]] = []  # by step: runs with guesses, and what was sampled behind them
    inner, lengths = Guesses.count, [itertools.cycle([0])]

    def spy(guesses: Guesses, plan: Any, results: Any, *args: Any, **keywords: Any) -> None:
        checked.append([(s.start, s.token_ids, results[s.seq_id]) for s in plan.sequences if s.drafts])
        inner(guesses, plan, results, *args, **keywords)

    monkeypatch.setattr(Guesses, "count", spy)
    monkeypatch.setattr(Guesses, "choose_length", lambda guesses, num_sequences: next(lengths[0]))
    prompts, found = prompts_of((5, 70, 258), VOCAB, seed=3), []
    settings = {"max_num_batched_tokens": 150, "overlap": form == "ahead"}
    for filler in (0, 255):
        with opened(models[drafter], speculative=MTP(2) if drafter == "mtp" else DSpark(2), **settings) as llm:
            engine, said = engine_of(llm), []
            if form != "references":
                guessing, plain = engine.call(record_all).result()
            for layer in engine._runner.cache.layers[len(engine._runner.model.layers) :]:
                layer.stores["window"].memory.fill_(filler)
            for prompt in (*prompts, prompts[2]):  # the last one from a cached prefix
                lengths[0] = itertools.cycle([0] * 4 + [2] * 4 + [0] + [1] * 3)
                said.append(llm.generate(prompt, PARAMS).token_ids)
            assert llm.stats().speculation.drafted > 20
        found.append((said, list(checked)))
        checked.clear()
        assert form == "references" or min(guessing.steps, guessing.rounds, plain.steps) > 4
    assert found[0] == found[1]
    with opened(models[drafter]) as llm:
        assert found[0][0] == [llm.generate(prompt, PARAMS).token_ids for prompt in (*prompts, prompts[2])]


def test_steps_that_are_timed_leave_nothing_behind(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are replayed on slots and pages that nobody has yet; who has them later says what it says without."""
    without_device(monkeypatch)
    prompts, said = prompts_of((5, 70), VOCAB, seed=3), []
    for timed in (False, True):
        with opened(models["mtp"], speculative=MTP(2, adaptive=False)) as llm:
            guessing, plain = engine_of(llm).call(record_all).result()
            if timed:
                cache = engine_of(llm)._runner.cache
                work = partial(measure_steps, plain, guessing, cache, VOCAB)
                costs = engine_of(llm).call(lambda engine, work=work: work()).result()
                assert list(costs.seconds) == [1, 8] and all(len(times) == 3 and min(times) > 0 for times in costs.seconds.values())
                assert min(guessing.steps, guessing.rounds, plain.steps) > 2
            said.append([output.token_ids for output in llm.generate_batch(prompts, PARAMS)] + [llm.stats().speculation.accepted])
    assert said[0] == said[1]


def calls_and_plans(model: Path, speculative: Any, prompts: Sequence[Sequence[int]], n: int) -> tuple[Counter[str], list[Any]]:
    """Say something, planning ahead; count what the engine calls in 32 steps, by file; list the plans, and how many under way."""
    calls: Counter[str] = Counter()
    plans: list[Any] = []

    def count(frame: Any, event: str, what: Any) -> None:
        path = frame.f_code.co_filename
        if event in ("call", "c_call") and "dsv4lite/engine/" in path:
            calls[path] += 1

    with opened(model, speculative=speculative, overlap=True) as llm:
        engine = engine_of(llm)
        step, launch = engine._step, engine._runner.launch

        def counted() -> None:
            if engine._steps in (4, 36):
                sys.setprofile(count if engine._steps == 4 else None)
            step()

        def listed(plan: Any, recorder: Any) -> Any:
            plans.append((plan, len(engine._in_flight)))
            return launch(plan, recorder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "_step", counted)
            patch.setattr(engine._runner, "launch", listed)
            for prompt in prompts:
                llm.generate(prompt, replace(PARAMS, max_tokens=40, n=n))
    return calls, plans


def test_engine_that_does_not_guess_does_as_one_that_cannot(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan by plan, field by field, as far ahead, and with a few calls more for a step, however many sequences it has."""
    monkeypatch.setattr(DraftPolicy, "choose", lambda policy, num_sequences, may_try: (0, 32))
    prompts, more = prompts_of((240, 258), VOCAB, seed=7), {}
    for n in (1, 6):
        calls, plans = zip(*(calls_and_plans(models["mtp"], own, (*prompts, prompts[1]), n) for own in (None, "auto")), strict=True)
        assert len(plans[0]) > 100 and max(ahead for _, ahead in plans[0]) == 1
        assert plans[0] == plans[1]
        more[n] = calls[1].total() - calls[0].total()
    assert 32 <= more[1] == more[6] < 32 * 16
