"""Speculation on several ranks on what a GPU runs: rows in pages, recorded steps, experts of shapes that all agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.config import MTP
from dsv4lite.engine.graph_set import GraphSet
from dsv4lite.engine.rank import Prospect
from dsv4lite.engine.runner import Runner
from dsv4lite.engine.verify_graphs import VerifyGraphs
from dsv4lite.layout import Layout
from dsv4lite.llm import LLM
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.speculation.speculator import Guesses
from tests.e2e.engines import MODEST, SMALL, prompts_of
from tests.parallel.ranks import Ranks
from tests.parallel.requests import assert_same
from tests.parallel.test_external import Job, job_of, on_ranks
from tests.recorded import Recording, without_device

PROMPTS = prompts_of((5, 9, 40, 290), SMALL["vocab_size"], seed=5)
Guessed = list[tuple[int, tuple[int, ...]]]


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
        sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024, "widths": (1, 3), "max_tokens": 24}
        runner._graphs = VerifyGraphs(runner.model, runner.cache, **sizes, drafter=runner._drafter)
        return runner

    building, replaying = Prospect.build, VerifyGraphs.replay
    patch.setattr(Prospect, "build", build)
    patch.setattr(GraphSet, "_record", record)
    patch.setattr(VerifyGraphs, "replay", replay)


def run(model: Path, settings: Job, patch: pytest.MonkeyPatch, *, leads: bool = True) -> tuple[list[RequestOutput], Guessed]:
    """Run a prompt by itself, which leaves another replica idle, then prompts of several lengths.

    Returns:
        What comes of them, and what was guessed for the first: behind how many tokens, and which ones.
    """
    guessed: Guessed = []
    propose = Guesses.propose

    def spy(guesses: Guesses, sequence: Any, most: int) -> tuple[int, ...]:
        drafts = propose(guesses, sequence, most)
        guessed.append((len(sequence.tokens), drafts))
        return drafts

    patch.setattr(Guesses, "propose", spy)
    params = SamplingParams(max_tokens=10, temperature=0, logprobs=2, ignore_eos=True)
    others = replace(params, seed=1, temperature=0.5, allowed_token_ids=(9, 10, 11))
    with LLM(str(model), **settings, speculative=MTP(2, adaptive=False)) as llm:
        if not leads:
            return [], []
        first, known = llm.generate({"prompt_token_ids": PROMPTS[2]}, params), list(guessed)
        outputs = [first, *llm.generate_batch([{"prompt_token_ids": prompt} for prompt in PROMPTS], others)]
        assert llm.stats().speculation.accepted > 0
        return outputs, known


def generate(model: Path, settings: Job, rank: int) -> tuple[list[RequestOutput], Guessed, list[int]]:
    replays: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_device(patch, replays)
        return *run(model, settings, patch, leads=rank == 0), replays


@pytest.fixture(scope="module")
def alone(model: Path) -> tuple[list[RequestOutput], Guessed]:
    with pytest.MonkeyPatch.context() as patch:
        return run(model, dict(MODEST), patch)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, tp=2, ep=4)], ids=str)
def test_ranks_that_replay_steps_guess_as_one_rank(
    ranks: Ranks, model: Path, alone: tuple[list[RequestOutput], Guessed], layout: Layout
) -> None:
    sizes: dict[str, Any] = {"data_parallel_size": layout.dp, "tensor_parallel_size": layout.tp, "expert_parallel_size": layout.ep}
    sizes["dispatcher"] = "all_gather"  # which steps can be captured with
    job = job_of(ranks, model, generate, {**MODEST, **sizes}, layout.world)
    answers = ranks.run(on_ranks, job, layout=Layout(dp=layout.world))
    assert_same(answers[0][0], alone[0])
    assert answers[0][1] == alone[1] and sum(len(drafts) for _, drafts in alone[1]) > 10
    together = list(zip(*(replays for _, _, replays in answers), strict=True))
    assert any(set(step) == {0, 1} for step in together)  # one replica replays the other's step
