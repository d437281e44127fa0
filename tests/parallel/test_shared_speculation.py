"""Speculation on several ranks on what a GPU runs: rows in pages, recorded steps, experts of shapes that all agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.engine import rank as rank_module
from dsv4lite.engine.rank import Prospect
from dsv4lite.engine.runner import Runner
from dsv4lite.engine.verify_graphs import VerifyGraphs
from dsv4lite.layout import Layout
from dsv4lite.llm import LLM
from dsv4lite.memory import choose_numerics
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.speculation import MTP
from tests.e2e.engines import MODEST, SMALL, prompts_of
from tests.parallel.ranks import Ranks
from tests.parallel.requests import assert_same
from tests.parallel.test_external import Job, job_of, on_ranks
from tests.recorded import Recording, without_device

PROMPTS = prompts_of((5, 9, 40, 290), SMALL["vocab_size"], seed=5)
SPECULATIVE = MTP(2, adaptive=False)


def as_on_a_device(patch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """Let engines run on pages, and record their steps that check guesses."""
    without_device(patch)

    def record(graphs: VerifyGraphs, work: Callable[[], Any]) -> tuple[Recording, Any]:
        result = work()
        return Recording(work, result), result

    def replay(graphs: VerifyGraphs, sequences: Any, shape: Any) -> Any:
        replays.append(len(sequences))
        return replaying(graphs, sequences, shape)

    def build(prospect: Prospect, *args: Any) -> Runner:
        runner = building(prospect, *args)
        runner._graphs = VerifyGraphs(runner.model, runner.cache, max_num_seqs=8, max_model_len=1024, widths=(1, 3), max_tokens=24)
        return runner

    building, replaying = Prospect.build, VerifyGraphs.replay
    patch.setattr(rank_module, "choose_numerics", lambda *args: replace(choose_numerics(*args), paged=True))
    patch.setattr(Prospect, "build", build)
    patch.setattr(VerifyGraphs, "_record", record)
    patch.setattr(VerifyGraphs, "replay", replay)


def requests(llm: LLM) -> tuple[list[RequestOutput], tuple[int, int]]:
    """Run a prompt by itself, which leaves another replica idle, then prompts of several lengths; count guesses of the first."""
    params = SamplingParams(max_tokens=10, temperature=0, logprobs=2, allowed_token_ids=(9, 10, 11), ignore_eos=True)
    first = llm.generate({"prompt_token_ids": PROMPTS[2]}, params)
    others = llm.generate_batch([{"prompt_token_ids": prompt} for prompt in PROMPTS], replace(params, seed=1, temperature=0.8))
    return [first, *others], (first.usage.drafted_tokens, first.usage.accepted_tokens)


def generate(model: Path, settings: Job, rank: int) -> tuple[Any, list[int]]:
    replays: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_device(patch, replays)
        with LLM(str(model), **settings, speculative=SPECULATIVE) as llm:
            return requests(llm) if rank == 0 else None, replays


@pytest.fixture(scope="module")
def alone(model: Path) -> tuple[list[RequestOutput], tuple[int, int]]:
    with LLM(str(model), **MODEST, speculative=SPECULATIVE) as llm:
        return requests(llm)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, tp=2, ep=4)], ids=str)
def test_ranks_that_replay_steps_guess_as_one_rank(
    ranks: Ranks, model: Path, alone: tuple[list[RequestOutput], tuple[int, int]], layout: Layout
) -> None:
    sizes = {"data_parallel_size": layout.dp, "tensor_parallel_size": layout.tp, "expert_parallel_size": layout.ep}
    job = job_of(ranks, model, generate, {**MODEST, **sizes}, layout.world)
    answers = ranks.run(on_ranks, job, layout=Layout(dp=layout.world))
    outputs, guesses = answers[0][0]
    assert_same(outputs, alone[0])
    assert guesses == alone[1] and guesses[0] > guesses[1] > 0
    together = list(zip(*(replays for _, replays in answers), strict=True))
    assert any(set(step) == {0, 1} for step in together)  # one replica replays the other's step
