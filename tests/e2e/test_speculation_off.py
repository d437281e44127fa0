"""Steps without drafts leave out the model's own drafter; the rows it misses do no harm when it drafts again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4lite.config import MTP, DSpark
from dsv4lite.engine.runner import Runner
from dsv4lite.engine.step_costs import measure_steps
from dsv4lite.request import SamplingParams
from dsv4lite.speculation.controller import DraftController
from dsv4lite.speculation.speculator import DraftProposer
from tests.e2e.engines import REFRESHED, SMALL, engine_of, opened, prompts_of, write_model
from tests.e2e.test_speculation import EagerGraphs, record
from tests.mla import write_random_model
from tests.recorded import without_device

VOCAB = SMALL["vocab_size"]
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "mtp": write_model(folder / "classic", seed=2),
        "dspark": write_model(folder / "refreshed", REFRESHED, seed=2),
        "mla": write_random_model(folder / "mla", "v3", num_nextn_predict_layers=1),
    }


PROMPTS = prompts_of((5, 70, 258), VOCAB, seed=3)


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[tuple[int, ...]]]:
    """What each model generates without speculation; the last prompt twice."""
    found = {}
    for name, folder in models.items():
        with opened(folder) as llm:
            found[name] = [llm.generate(prompt, PARAMS).token_ids for prompt in (*PROMPTS, PROMPTS[2])]
    return found


class Ops(TorchDispatchMode):
    """Lists all ops but views, which launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
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


def record_all(engine: Any) -> EagerGraphs:
    """Let an engine run its steps from graphs: those with its drafter, if it has one, and those without."""
    return record(engine, (1,) if engine._runner._drafter is None else (1, 2, 3), adaptive=True)


@pytest.mark.parametrize(("drafter", "captured"), [("mtp", True), ("dspark", False)])
def test_steps_without_drafts_are_those_of_no_speculation(
    models: dict[str, Path], drafter: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, single tokens and a cached prefix: the same ops with and without a drafter."""
    monkeypatch.setattr(DraftController, "choose", lambda controller, num_sequences: 0)
    without_device(monkeypatch)
    prompts, params, found = prompts_of((5, 258), VOCAB, seed=7), replace(PARAMS, max_tokens=5), []
    for speculative in (None, MTP(2) if drafter == "mtp" else DSpark(2)):
        with opened(models[drafter], speculative=speculative) as llm:
            graphs = engine_of(llm).call(record_all).result() if captured else None
            with listed() as ops:
                tokens = [llm.generate(prompt, params).token_ids for prompt in (*prompts, prompts[1])]
            stats = llm.stats()
        assert graphs is None or (graphs.steps, graphs.drafting) == (12, 0)
        assert stats.speculation.length == stats.speculation.drafted == 0 and stats.cached_tokens == 256
        found.append((tokens, ops))
    assert len(found[0][1]) == 16
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("drafter", "captured", "overlap"),
    [("mtp", False, False), ("mtp", True, False), ("mtp", True, True), ("dspark", True, True)],
)
def test_rows_that_the_drafter_missed_are_blank(
    models: dict[str, Path],
    expected: dict[str, list[tuple[int, ...]]],
    drafter: str,
    captured: bool,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It drafts the same whatever its memory held before, also with graphs and steps planned ahead."""
    without_device(monkeypatch)
    checked: list[list[Any]] = []  # by step: sequences with drafts, and what was sampled after them
    inner, lengths = DraftProposer.count, [itertools.cycle([0])]

    def spy(proposer: DraftProposer, plan: Any, results: Any, *args: Any, **keywords: Any) -> None:
        checked.append([(s.start, s.token_ids, results[s.seq_id]) for s in plan.sequences if s.drafts])
        inner(proposer, plan, results, *args, **keywords)

    monkeypatch.setattr(DraftProposer, "count", spy)
    monkeypatch.setattr(DraftProposer, "choose_length", lambda proposer, num_sequences: next(lengths[0]))
    found = []
    settings = {"max_num_batched_tokens": 150, "overlap": overlap}
    for filler in (0, 255):
        with opened(models[drafter], speculative=MTP(2) if drafter == "mtp" else DSpark(2), **settings) as llm:
            engine, tokens = engine_of(llm), []
            graphs = engine.call(record_all).result() if captured else None
            for layer in engine._runner.cache.layers[len(engine._runner.model.layers) :]:
                layer.stores["window"].memory.fill_(filler)
            for prompt in (*PROMPTS, PROMPTS[2]):  # the last one from a cached prefix
                lengths[0] = itertools.cycle([0] * 4 + [2] * 4 + [0] + [1] * 3)
                tokens.append(llm.generate(prompt, PARAMS).token_ids)
            assert llm.stats().speculation.drafted > 20
        found.append((tokens, list(checked)))
        checked.clear()
        assert graphs is None or min(graphs.drafting, graphs.rounds, graphs.steps - graphs.drafting) > 4
    assert found[0] == found[1] and found[0][0] == expected[drafter]


@pytest.mark.parametrize("model", ["mtp", "mla"])
def test_timed_steps_leave_no_trace(models: dict[str, Path], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are timed on free slots and pages; requests that get them later give the same outputs as without."""
    without_device(monkeypatch)
    prompts, found = prompts_of((5, 70), VOCAB, seed=3), []
    for timed in (False, True):
        with opened(models[model], speculative=MTP(2, adaptive=False)) as llm:
            graphs = engine_of(llm).call(record_all).result()
            if timed:
                cache = engine_of(llm)._runner.cache
                work = partial(measure_steps, graphs, cache, VOCAB)
                costs = engine_of(llm).call(lambda engine, work=work: work()).result()
                assert list(costs.seconds) == [1, 8] and all(len(times) == 3 and min(times) > 0 for times in costs.seconds.values())
                assert min(graphs.drafting, graphs.rounds, graphs.steps - graphs.drafting) > 2
            found.append([output.token_ids for output in llm.generate_batch(prompts, PARAMS)] + [llm.stats().speculation.accepted])
    assert found[0] == found[1]


def test_engine_that_never_drafts_takes_the_steps_of_one_without_a_drafter(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many steps, planned ahead, of as many tokens, with the same completions and cached prefixes."""
    monkeypatch.setattr(DraftController, "choose", lambda controller, num_sequences: 0)
    prompts = prompts_of((240, 258), VOCAB, seed=7)
    for n in (1, 6):
        found = []
        for speculative in (None, "auto"):
            with opened(models["mtp"], speculative=speculative, overlap=True) as llm:
                outputs = [llm.generate(prompt, replace(PARAMS, max_tokens=10, n=n)) for prompt in (*prompts, prompts[1])]
                stats = llm.stats()
            assert stats.speculation.drafted == 0
            found.append(([output.token_ids for output in outputs], stats.steps, stats.generated_tokens, stats.cached_tokens))
        assert found[0] == found[1] and found[0][3] > 0
