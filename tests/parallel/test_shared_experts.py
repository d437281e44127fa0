"""Replicas that share experts, each with loads of its own, on what a GPU runs: rows in pages, recorded steps, agreed shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.engine.graphs import DecodeGraphs
from dsv4lite.engine.rank import Prospect
from dsv4lite.engine.runner import Runner
from dsv4lite.layout import Layout
from dsv4lite.llm import LLM
from dsv4lite.request import Prompt, RequestOutput, SamplingParams
from dsv4lite.scheduling.step_plan import IN_FLIGHT, SequencePlan, StepPlan, StepShape
from tests.e2e.engines import MODEST, SMALL, prompts_of
from tests.parallel.ranks import Ranks
from tests.parallel.requests import assert_same
from tests.parallel.test_external import Job, job_of, on_ranks
from tests.recorded import Recording, without_device

LENGTHS = prompts_of((5, 9, 40, 290), SMALL["vocab_size"], seed=5)
Replays = list[tuple[int, int]]
"""Of each replay, the sequences that this rank had, and those that the graph is for."""


def as_on_a_device(patch: pytest.MonkeyPatch, replays: Replays) -> None:
    """Let engines run on pages, and record their decode steps."""
    without_device(patch)

    def record(graphs: DecodeGraphs, work: Callable[[], Any]) -> tuple[Recording, Any]:
        result = work()
        return Recording(work, result), result

    def replay(graphs: DecodeGraphs, sequences: Any, shape: StepShape) -> Any:
        replays.append((len(sequences), graphs.shape_for(shape).size))
        return replaying(graphs, sequences, shape)

    def build(prospect: Prospect, *args: Any) -> Runner:
        runner = building(prospect, *args)
        if runner.model.capturable:
            runner._graphs = DecodeGraphs(runner.model, runner.cache, max_num_seqs=8, max_model_len=1024)
            runner._last_token = runner._graphs.last_token
        return runner

    building, replaying = Prospect.build, DecodeGraphs.replay
    patch.setattr(Prospect, "build", build)
    patch.setattr(DecodeGraphs, "_record", record)
    patch.setattr(DecodeGraphs, "replay", replay)


def requests(llm: LLM) -> list[RequestOutput]:
    """Run prompts of several lengths, then a single one, which leaves the other replica idle."""
    greedy = SamplingParams(max_tokens=10, temperature=0, logprobs=2)
    kinds = [greedy, greedy, replace(greedy, prompt_logprobs=1, max_tokens=3), replace(greedy, return_routed_experts=True)]
    return [
        *llm.generate_batch(all_at_once(llm), [*kinds[:3], replace(greedy, max_tokens=14)]),
        llm.generate({"prompt_token_ids": LENGTHS[0]}, kinds[3]),
        llm.generate({"prompt_token_ids": LENGTHS[1]}, greedy),
    ]


def all_at_once(llm: LLM) -> Iterator[Prompt]:
    """Yield the prompts while no step runs: the steps are those of four that came together, however busy the machine is."""
    with llm.paused():
        yield from ({"prompt_token_ids": prompt} for prompt in LENGTHS)


def generate(model: Path, settings: Job, rank: int) -> tuple[list[RequestOutput], Replays]:
    replays: Replays = []
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_device(patch, replays)
        with LLM(str(model), **settings) as llm:
            return requests(llm) if rank == 0 else [], replays


@pytest.fixture(scope="module")
def alone(model: Path) -> list[RequestOutput]:
    with LLM(str(model), **MODEST) as llm:
        return requests(llm)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, tp=2, ep=4)], ids=str)
def test_replicas_with_uneven_loads_give_what_one_rank_gives(
    ranks: Ranks, model: Path, alone: list[RequestOutput], layout: Layout
) -> None:
    sizes: dict[str, Any] = {"data_parallel_size": layout.dp, "tensor_parallel_size": layout.tp, "expert_parallel_size": layout.ep}
    sizes["dispatcher"] = "all_gather"  # which steps can be captured with
    job = job_of(ranks, model, generate, {**MODEST, **sizes}, layout.world)
    answers = ranks.run(on_ranks, job, layout=Layout(dp=layout.world))
    assert_same(answers[0][0], alone)
    replays = [found for _, found in answers]
    assert len({len(found) for found in replays}) == 1
    together = list(zip(*replays, strict=True))
    assert all(len({size for _, size in step}) == 1 for step in together)  # the same graph on every rank
    counts = [{count for count, _ in step} for step in together]
    assert {0, 1} in counts and {1, 2} in counts and {2} in counts


def sequence(seq_id: int, tokens: int, *, drafts: int = 0, **change: Any) -> SequencePlan:
    return SequencePlan(seq_id, 0, 9, (1,) * tokens, (0,), 0, (0,), sample=True, drafts=drafts)._replace(**change)


@pytest.mark.parametrize(
    ("plans", "routed", "shape"),
    [
        ([[sequence(1, 1)], None], (), StepShape(1, 1, 1, True, False, longest=10)),
        ([[sequence(1, 1)], [sequence(2, 1), sequence(3, 1)]], (), StepShape(2, 2, 1, True, False, longest=10)),
        ([[sequence(1, 1)], [sequence(2, 3, drafts=2)]], (), StepShape(3, 1, 3, True, False, longest=12)),
        ([[sequence(1, 1)], [sequence(2, 7)]], (), StepShape(7, 1, 7, False, False, longest=16)),
        ([[sequence(1, 1, sample=False)], [sequence(2, 1)]], (), StepShape(1, 1, 1, False, False, longest=10)),
        ([[sequence(1, 1)], [sequence(2, 1, score=(8, 9))]], (), StepShape(1, 1, 1, False, False, longest=10)),
        ([[sequence(1, 1)], [sequence(2, 1)]], {2}, StepShape(1, 1, 1, False, False, longest=10)),
        ([[sequence(1, 1)], [sequence(2, 1, token_ids=(IN_FLIGHT,))]], {3}, StepShape(1, 1, 1, True, True, longest=10)),
        ([[sequence(1, 3, drafts=2, slack=4)], [sequence(2, 1, start=12)]], (), StepShape(3, 1, 3, True, False, longest=16)),
    ],
)
def test_shape_of_a_step_is_that_of_all_replicas(plans: Any, routed: Any, shape: StepShape) -> None:
    found = StepShape.of([None if p is None else StepPlan(step=0, sequences=tuple(p)) for p in plans], routed)
    assert found == shape
