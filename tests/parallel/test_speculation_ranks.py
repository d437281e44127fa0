"""Speculation on several ranks: the tokens of one rank without it, and the drafts of one rank with it."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.config import MTP, Drafter, DSpark, NGram, tiny_model
from dsv4lite.engine.executor import MultiRankExecutor
from dsv4lite.engine.runner import InFlightStep, Runner
from dsv4lite.errors import EngineDeadError
from dsv4lite.llm import LLM
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.moe import MoE
from dsv4lite.models.shard import stages
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.scheduling.scheduler import Scheduler
from dsv4lite.scheduling.step_plan import StepPlan, StepShape
from dsv4lite.speculation.drafters import MtpDrafter
from dsv4lite.speculation.speculator import DraftProposer
from tests.e2e.engines import MODEST, REFRESHED, SMALL, engine_of, overlapping, prompts_of, same_outputs, write_model
from tests.parallel.ranks import Ranks
from tests.parallel.requests import PROMPTS, SHARED, TOLERANCE, all_kinds, tight
from tests.parallel.test_external import Job, on_host
from tests.parallel.test_shared_experts import Log, as_on_a_device

pytestmark = pytest.mark.usefixtures("forked_ranks")

ENOUGH_S = 60.0
TWO = MTP(2, adaptive=False)
FOUR = MTP(4, adaptive=False)
BOTH = (NGram(2, min_n=1, adaptive=False), MTP(3, adaptive=False))
# One sequence: what is drafted then depends on nothing but the text.
(PROBE,) = prompts_of((70,), SMALL["vocab_size"], seed=5)
Drafted = tuple[tuple[int, ...], int, int]
PROBING = SamplingParams(max_tokens=24, seed=1, temperature=0.6, ignore_eos=True, allowed_token_ids=(9, 10, 11))


def drafted(llm: LLM) -> Drafted:
    """Return the first text of an engine, and how many tokens were drafted and how many accepted."""
    output = llm.generate({"prompt_token_ids": PROBE}, PROBING)
    usage, stats = output.usage, llm.stats().speculation
    assert (usage.drafted_tokens, usage.accepted_tokens) == (stats.drafted, stats.accepted)
    return output.token_ids, usage.drafted_tokens, usage.accepted_tokens


def experts_of_drafter(llm: LLM) -> MoE:
    """Return those of a rank of this process that drafts; of another rank, those of a layer."""
    runner = engine_of(llm)._runner
    model = (runner._local if isinstance(runner, MultiRankExecutor) else runner).model  # type: ignore[union-attr]
    block = model.dspark.stages[0] if model.dspark is not None else model.mtp[0].block if model.mtp else model.layers[0]
    assert isinstance(block.ffn, MoE)
    return block.ffn


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[Any, Drafted]:
    """What one rank drafts."""
    found = {}
    for speculative in (TWO, FOUR, BOTH):
        with LLM(str(model), **MODEST, speculative=speculative) as llm:
            found[speculative] = drafted(llm)
        assert found[speculative][1] > found[speculative][2] > 0
    return found


def draft_and_run_all_kinds(model: Path, settings: Job, rank: int) -> tuple[Drafted, list[RequestOutput]] | None:
    """One request by itself; then all kinds, some of which are preempted, some aborted, and some find their prefix cached."""
    with LLM(str(model), **settings) as llm:
        if rank > 0:
            return None
        alone, outputs = drafted(llm), all_kinds(llm)
        assert llm.stats().cached_tokens > 0
        engine_of(llm).call(lambda engine: engine._scheduler.check()).result(ENOUGH_S)
        return alone, outputs


@pytest.mark.parametrize(
    ("settings", "speculative", "size"),
    [
        ({"tensor_parallel_size": 2, "executor": "process"}, TWO, 0),
        ({"expert_parallel_size": 2}, BOTH, 2),
        ({"data_parallel_size": 2, "expert_parallel_size": 2}, FOUR, 2),
        ({"pipeline_parallel_size": 2}, TWO, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, FOUR, 4),
    ],
    ids=["tp-process", "ep", "dp-ep", "pp", "tp-pp"],
)
def test_block_on_several_ranks_drafts_as_on_one_and_changes_no_token(
    ranks: Ranks,
    model: Path,
    expected: list[RequestOutput],
    alone: dict[Any, Drafted],
    settings: dict[str, Any],
    speculative: Drafter | tuple[Drafter, ...],
    size: int,
) -> None:
    """On ranks of a host of so many processes, or, without one, on ranks that the engine starts."""
    settings = tight(model, **settings, speculative=speculative)
    if size:
        found, *others = on_host(ranks, model, draft_and_run_all_kinds, settings, size)
        assert not any(others)
    else:
        found = draft_and_run_all_kinds(model, settings, 0)
    assert found[0] == alone[speculative]
    same_outputs(found[1], expected, tolerance=TOLERANCE)


def complete(model: str, settings: Job, rank: int) -> tuple[list[RequestOutput], int] | None:
    """Return outputs of the shipped checkpoint, and how many drafts were accepted."""
    prompts = ["def add(a, b):\n    return", "The quick brown fox. The quick brown"]
    params = [SamplingParams(max_tokens=8, temperature=0, logprobs=3), SamplingParams(max_tokens=8, seed=1, logprobs=3)]
    with LLM(model, **MODEST, **settings, deterministic=True) as llm:
        return (llm.generate_batch(prompts, params), llm.stats().speculation.accepted) if rank == 0 else None


@pytest.mark.parametrize(
    ("baseline", "settings"),
    [
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "speculative": TWO}),
        ({}, {"data_parallel_size": 2, "expert_parallel_size": 2, "speculative": "auto"}),  # changes no sum
    ],
    ids=["tp", "dp-ep"],
)
def test_trained_block_changes_no_bit_in_deterministic_mode(ranks: Ranks, baseline: Job, settings: Job) -> None:
    """In the official formats, where many drafts are right."""

    def completed(layout: Job) -> tuple[list[RequestOutput], int]:
        return on_host(ranks, tiny_model(), complete, layout, 2)[0]  # type: ignore[no-any-return]

    plain = completed(baseline) if baseline else complete(tiny_model(), {}, 0)
    assert plain is not None
    found, accepted = completed(settings)
    same_outputs(found, plain[0])
    assert accepted > 1


def alternate(model: Path, settings: Job, rank: int) -> tuple[list[RequestOutput], int, int]:
    """Return outputs of an engine whose steps with and without drafts alternate, the steps planned ahead, and the drafts."""
    lengths, ahead, inner = itertools.cycle([0] * 3 + [2] * 3), 0, Scheduler.schedule

    def spy(scheduler: Scheduler, now: float, most: int | None = None) -> Any:
        nonlocal ahead
        ahead += len(scheduler._outstanding)
        return inner(scheduler, now, most)

    with pytest.MonkeyPatch.context() as patch, overlapping(True):
        patch.setattr(Scheduler, "schedule", spy)
        patch.setattr(DraftProposer, "choose_length", lambda proposer, num_sequences: next(lengths))
        with LLM(str(model), **settings, speculative=MTP(2)) as llm:
            return ([], 0, 0) if rank > 0 else (all_kinds(llm), ahead, llm.stats().speculation.drafted)


@pytest.mark.parametrize(
    "settings", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2, "expert_parallel_size": 2}], ids=["tp", "dp-ep"]
)
def test_ranks_plan_ahead_in_steps_without_drafts(
    ranks: Ranks, model: Path, expected: list[RequestOutput], settings: dict[str, Any]
) -> None:
    """Tokens in flight reach the other ranks between steps with drafts."""
    outputs, ahead, drafts = on_host(ranks, model, alternate, {**MODEST, **settings}, 2)[0]
    same_outputs(outputs, expected, tolerance=TOLERANCE)
    assert ahead > 2 and drafts > 2


def long_ones(llm: LLM) -> list[RequestOutput]:
    """Run requests that draft for many steps."""
    params = [SamplingParams(max_tokens=40, temperature=i % 2, seed=i, logprobs=1, ignore_eos=True) for i in range(3)]
    return llm.generate_batch([{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]], params)


@pytest.fixture(scope="module")
def expected_long(model: Path) -> list[RequestOutput]:
    with LLM(str(model), **MODEST) as llm:
        return long_ones(llm)


def run_ahead(model: Path, settings: Job, rank: int, *, captured: bool) -> tuple[list[RequestOutput], int]:
    """Return outputs, and how many spans this rank began before the host knew where."""
    spans, launch = 0, Runner.launch

    def spy(runner: Runner, plan: StepPlan, shape: StepShape | None = None) -> InFlightStep:
        nonlocal spans
        spans += sum(s.unresolved is not None for s in plan.sequences)
        return launch(runner, plan, shape)

    device = as_on_a_device(Log(), widths=(1, 3), max_tokens=24) if captured else nullcontext()
    with pytest.MonkeyPatch.context() as patch, overlapping(True), device:
        patch.setattr(Runner, "launch", spy)
        with LLM(str(model), **settings) as llm:
            outputs = [*all_kinds(llm), *long_ones(llm)] if rank == 0 else []
    return outputs, spans


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"expert_parallel_size": 2},
        {"data_parallel_size": 2, "expert_parallel_size": 2, "dispatcher": "all_gather"},
    ],
    ids=["tp", "ep", "dp-ep"],
)
def test_ranks_run_steps_ahead_of_what_the_host_knows(
    ranks: Ranks,
    model: Path,
    expected: list[RequestOutput],
    expected_long: list[RequestOutput],
    settings: dict[str, Any],
    captured: bool,
) -> None:
    """Each learns from the one that samples how many drafts were right. Sequences give way to others that need the room."""
    settings = tight(model, **settings, speculative=TWO)
    (outputs, ahead), other = on_host(ranks, model, partial(run_ahead, captured=captured), settings, 2)
    same_outputs(outputs, [*expected, *expected_long], tolerance=TOLERANCE)
    assert ahead > 20 and other[1] > 20 and ("data_parallel_size" in settings or other[1] == ahead)


def move_experts(model: Path, settings: Job, rank: int) -> tuple[Drafted, list[RequestOutput]] | None:
    """Return what is drafted, and outputs, of an engine whose experts and those of whose drafter move meanwhile."""
    with LLM(str(model), **settings) as llm:
        if rank > 0:
            return None
        leader, block = engine_of(llm)._executor, experts_of_drafter(llm)
        assert isinstance(leader, MultiRankExecutor) and leader._local is not None
        experts = [block, *(layer.ffn for layer in leader._local.model.layers)]
        before = [one.placement for one in experts]
        found = drafted(llm)
        assert block.placement != before[0]
        outputs = all_kinds(llm)
        assert [one.placement for one in experts] != before
        assert {len(one.placement.experts) for one in experts} == {SMALL["n_routed_experts"] + 2}
        return found, outputs


def test_experts_move_while_requests_run_those_of_the_block_with_the_others(
    ranks: Ranks, model: Path, expected: list[RequestOutput], alone: dict[Any, Drafted]
) -> None:
    settings = {"expert_parallel_size": 2, "redundant_experts": 2, "rebalance_steps": 7, "speculative": TWO}
    (found, outputs), _ = on_host(ranks, model, move_experts, {**MODEST, **settings}, 2)
    assert found == alone[TWO]
    same_outputs(outputs, expected, tolerance=TOLERANCE)


@pytest.fixture(scope="module")
def refreshed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose drafter looks at layers of both of two stages."""
    config = {**REFRESHED, **SHARED, "compress_ratios": [4, 8, 0, 0, 0]}
    shape = parse_config(config)
    assert shape.dspark is not None
    assert all(set(shape.dspark.targets).intersection(layers) for layers in stages(shape, V4_TENSORS, 2))
    return write_model(tmp_path_factory.mktemp("refreshed"), config, seed=2)


def draft_blocks(model: Path, settings: Job, rank: int) -> tuple[Drafted, bool, list[RequestOutput]] | None:
    """Return what DSpark drafts, whether its experts have moved meanwhile, and outputs."""
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=3)
    with LLM(str(model), **settings, speculative=DSpark(4, adaptive=False)) as llm:
        if rank > 0:
            return None
        before = experts_of_drafter(llm).placement
        found = drafted(llm)
        moved = experts_of_drafter(llm).placement != before
        return found, moved, llm.generate_batch([{"prompt_token_ids": p} for p in PROMPTS[:2]], params)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
        ({"data_parallel_size": 2, "expert_parallel_size": 2, "redundant_experts": 2, "rebalance_steps": 7}, 2),
    ],
    ids=["tp-pp", "dp-ep"],
)
def test_block_drafter_on_several_ranks_drafts_as_on_one(
    ranks: Ranks, refreshed: Path, settings: dict[str, Any], size: int
) -> None:
    one = draft_blocks(refreshed, dict(MODEST), 0)
    (found, moved, outputs), *_ = on_host(ranks, refreshed, draft_blocks, {**MODEST, **settings}, size)
    assert one is not None and not one[1] and found == one[0] and 0 < found[2] < found[1]
    assert moved == ("rebalance_steps" in settings)
    same_outputs(outputs, one[2], tolerance=TOLERANCE)


def test_rank_lost_while_it_drafts_ends_every_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"tensor_parallel_size": 2, "executor": "thread", "speculative": TWO}
    with LLM(str(model), **MODEST, **settings) as llm:
        ranks, draft, calls = engine_of(llm)._executor, MtpDrafter.draft, iter(range(3))
        assert isinstance(ranks, MultiRankExecutor)
        pid = ranks._processes[1].pid

        def interrupted(*args: Any) -> Any:
            if next(calls, None) is None:
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            return draft(*args)

        monkeypatch.setattr(MtpDrafter, "draft", interrupted)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"rank 1 .* was killed by SIGKILL") as caught:
                llm.generate({"prompt_token_ids": PROBE}, PROBING)
            assert caught.value.rank == 1 and caught.value.phase == "step"
