"""Replicas that share experts, each with loads of its own, as on a GPU: captured steps, shapes that all ranks know, drafts."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite import tiny_model
from dsv4lite.config import MTP
from dsv4lite.engine.prompt_graphs import PromptGraphs, PromptShape
from dsv4lite.engine.rank import Probe
from dsv4lite.engine.runner import Runner
from dsv4lite.engine.step_graphs import GraphShape, StepGraphs
from dsv4lite.layout import Layout
from dsv4lite.llm import LLM
from dsv4lite.models import moe
from dsv4lite.parallel import mesh as mesh_module
from dsv4lite.request import Logprobs, Prompt, RequestOutput, SamplingParams
from dsv4lite.scheduling.step_plan import IN_FLIGHT, SequencePlan, StepPlan, StepShape
from dsv4lite.speculation.speculator import DraftProposer
from dsv4lite.weights.quant import Numerics
from tests.e2e.engines import MODEST, SMALL, engine_of, overlapping, prompts_of, same_logprobs, same_outputs
from tests.parallel.dispatchers import OwnAllGather
from tests.parallel.ranks import Ranks
from tests.parallel.requests import TOLERANCE
from tests.parallel.test_external import Job, on_host
from tests.recorded import Recording, record, without_device

PROMPTS = prompts_of((5, 9, 40, 290), SMALL["vocab_size"], seed=5)
TWO, FOUR = Layout(dp=2, ep=2), Layout(dp=2, tp=2, ep=4)
COLLECTIVES = ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "broadcast")
Drafted = list[tuple[int, tuple[int, ...]]]


@dataclass
class Log:
    """What a rank does.

    Attributes:
        replays: Of each replay, the sequences that this rank had, and the shape of the graph; steps with prompts included.
        collectives: Of each its name, and dtypes and shapes of its tensors.
        freed: Graphs and groups in the order in which they were freed.
    """

    replays: list[tuple[int, GraphShape | PromptShape]] = field(default_factory=list)
    collectives: list[tuple[str, Any]] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)


class Logged:
    """A process group that logs its collectives."""

    def __init__(self, group: Any, log: Log) -> None:
        self._group, self._log = group, log
        weakref.finalize(self, log.freed.append, "group")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        return self._logged(name, method) if name in COLLECTIVES else method

    def _logged(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
            self._log.collectives.append((name, tuple((str(x.dtype), tuple(x.shape)) for x in flat)))
            return method(*args)

        return run


@contextmanager
def as_on_a_device(log: Log, **sizes: Any) -> Iterator[None]:
    """Let engines capture their steps, and log what they do."""

    def replay(graphs: StepGraphs, sequences: Any, shape: GraphShape) -> Any:
        log.replays.append((len(sequences), shape))
        return replaying(graphs, sequences, shape)

    def run(graphs: PromptGraphs, sequences: Any, shape: PromptShape, *args: Any) -> Any:
        log.replays.append((len(sequences), shape))
        return running(graphs, sequences, shape, *args)

    def build(probe: Probe, *args: Any) -> Runner:
        runner = building(probe, *args)
        options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024, "prompt_tokens": 256, **sizes}
        runner._graphs = StepGraphs(runner.model, runner.cache, **options, sampling=runner.sampler, drafter=runner._drafter)
        return runner

    def init(recording: Recording, *args: Any) -> None:
        making(recording, *args)
        weakref.finalize(recording, log.freed.append, "graph")

    building, replaying, making, grouping = Probe.build, StepGraphs.replay, Recording.__init__, mesh_module._make_group
    running = PromptGraphs.run
    with pytest.MonkeyPatch.context() as patch:
        without_device(patch)
        patch.setattr(Probe, "build", build)
        patch.setattr(StepGraphs, "_record", record)
        patch.setattr(StepGraphs, "replay", replay)
        patch.setattr(PromptGraphs, "run", run)
        patch.setattr(Recording, "__init__", init)
        patch.setattr(mesh_module, "_make_group", lambda *args: Logged(grouping(*args), log))
        yield


def requests(llm: LLM) -> list[RequestOutput]:
    """Run prompts of several lengths, then single ones, which leave the other replica idle."""
    greedy = SamplingParams(max_tokens=10, temperature=0, logprobs=2)
    kinds = [greedy, greedy, replace(greedy, prompt_logprobs=1, max_tokens=3), replace(greedy, max_tokens=14)]
    return [
        *llm.generate_batch(all_at_once(llm), kinds),
        llm.generate({"prompt_token_ids": PROMPTS[0]}, replace(greedy, return_routed_experts=True)),
        llm.generate({"prompt_token_ids": PROMPTS[1]}, greedy),
    ]


def all_at_once(llm: LLM) -> Iterator[Prompt]:
    """Yield the prompts while no step runs: the steps are those of four requests at once, however busy the machine is."""
    with llm.paused():
        yield from ({"prompt_token_ids": prompt} for prompt in PROMPTS)


def random_requests(llm: LLM) -> None:
    """Run requests of random lengths and settings from several threads."""

    def ask(chance: random.Random) -> None:
        for _ in range(3):
            (prompt,) = prompts_of((chance.choice([1, 7, 60, 700]),), SMALL["vocab_size"], seed=chance.randrange(100))
            params = SamplingParams(
                max_tokens=chance.randrange(1, 8),
                temperature=chance.choice([0.0, 1.0]),
                prompt_logprobs=chance.choice([None, 1]),
                return_routed_experts=chance.random() < 0.3,
                seed=1,
            )
            llm.generate({"prompt_token_ids": prompt}, params)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, map(random.Random, range(4))))


def generate(model: Path, settings: Job, rank: int) -> tuple[list[RequestOutput], int, Log]:
    """Return outputs, how many replays they took, and a log that includes random requests after them."""
    log, outputs = Log(), list[RequestOutput]()
    with as_on_a_device(log), overlapping(True), LLM(str(model), **settings) as llm:
        engine = engine_of(llm)
        if rank == 0:
            outputs = requests(llm)
        replays = len(log.replays)
        if rank == 0:
            random_requests(llm)
    assert engine._dead is None  # the leader has ended on purpose
    del llm, engine
    gc.collect()
    return outputs, replays, log


def sizes_of(layout: Layout) -> dict[str, Any]:
    """Return the settings of a layout, with the dispatcher whose steps can be captured."""
    sizes = {"data_parallel_size": layout.dp, "tensor_parallel_size": layout.tp, "expert_parallel_size": layout.ep}
    return {**sizes, "dispatcher": "all_gather"}


@pytest.mark.parametrize(("layout", "deterministic"), [(TWO, False), (TWO, True), (FOUR, False)], ids=str)
def test_replicas_with_uneven_loads_give_what_one_rank_gives_by_the_same_collectives(
    ranks: Ranks, model: Path, layout: Layout, deterministic: bool
) -> None:
    settings = {**MODEST, "deterministic": deterministic}
    with LLM(str(model), **settings) as llm:
        expected = requests(llm)
    answers = on_host(ranks, model, generate, {**settings, **sizes_of(layout)}, layout.world)
    (outputs, count, first), logs = answers[0], [log for _, _, log in answers]
    same_outputs(outputs, expected, tolerance=TOLERANCE)
    steps = list(zip(*(log.replays for log in logs), strict=True))
    assert all(len({shape for _, shape in step}) == 1 for step in steps)  # the same graph on every rank
    assert any(isinstance(shape, PromptShape) for _, shape in first.replays)
    counts = [{count for count, _ in step} for step in steps[:count]]
    assert {0, 1} in counts and {1, 2} in counts and {2} in counts
    for log in logs:
        assert log.freed == sorted(log.freed) and set(log.freed) == {"graph", "group"}
        if layout.tp == 1:  # else each replica has collectives of its own, too
            assert log.collectives == first.collectives
            assert {name for name, _ in log.collectives} == {"_allgather_base", "_reduce_scatter_base"}
            assert log.freed.count("group") == 1


def drafting(model: Path, settings: Job, *, leads: bool = True) -> tuple[list[RequestOutput], Drafted]:
    """Run a prompt by itself, which leaves another replica idle, then prompts of several lengths.

    Returns:
        The outputs, and the drafts for the first prompt with the number of tokens before them.
    """
    drafted: Drafted = []
    propose = DraftProposer.propose

    def spy(proposer: DraftProposer, sequence: Any, most: int) -> tuple[int, ...]:
        drafted.append((len(sequence.tokens), propose(proposer, sequence, most)))
        return drafted[-1][1]

    params = SamplingParams(max_tokens=10, temperature=0, logprobs=2, ignore_eos=True)
    others = replace(params, seed=1, temperature=0.5, allowed_token_ids=(9, 10, 11))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftProposer, "propose", spy)
        with LLM(str(model), **settings, speculative=MTP(2, adaptive=False)) as llm:
            if not leads:
                return [], []
            first, known = llm.generate({"prompt_token_ids": PROMPTS[2]}, params), list(drafted)
            outputs = [first, *llm.generate_batch([{"prompt_token_ids": prompt} for prompt in PROMPTS], others)]
            assert llm.stats().speculation.accepted > 0
            return outputs, known


def draft_on_ranks(model: Path, settings: Job, rank: int) -> tuple[list[RequestOutput], Drafted, Log]:
    log = Log()
    with as_on_a_device(log, widths=(1, 3), max_tokens=24):
        return *drafting(model, settings, leads=rank == 0), log


@pytest.mark.parametrize("layout", [TWO, FOUR], ids=str)
def test_ranks_that_replay_steps_draft_as_one_rank(ranks: Ranks, model: Path, layout: Layout) -> None:
    expected, known = drafting(model, dict(MODEST))
    answers = on_host(ranks, model, draft_on_ranks, {**MODEST, **sizes_of(layout)}, layout.world)
    outputs, drafted, _ = answers[0]
    same_outputs(outputs, expected, tolerance=TOLERANCE)
    assert drafted == known and sum(len(drafts) for _, drafts in known) > 10
    steps = list(zip(*(log.replays for _, _, log in answers), strict=True))
    assert all(len({shape for _, shape in step}) == 1 for step in steps)
    assert any(isinstance(shape, PromptShape) and shape.drafts for step in steps for _, shape in step)
    assert any({count for count, _ in step} == {0, 1} for step in steps)  # one replica replays the other's step


def sequence(seq_id: int, tokens: int, *, drafts: int = 0, **change: Any) -> SequencePlan:
    return SequencePlan(seq_id, 0, 9, (1,) * tokens, (0,), 0, (0,), sample=True, drafts=drafts)._replace(**change)


@pytest.mark.parametrize(
    ("plans", "routed", "shape"),
    [
        ([[sequence(1, 1)], None], (), StepShape(1, 1, 1, True, longest=10)),
        ([[sequence(1, 1)], [sequence(2, 1), sequence(3, 1)]], (), StepShape(2, 2, 1, True, longest=10)),
        ([[sequence(1, 1)], [sequence(2, 3, drafts=2)]], (), StepShape(3, 1, 3, True, longest=12)),
        ([[sequence(1, 1)], [sequence(2, 7)]], (), StepShape(7, 1, 7, False, longest=16, pairs=91, pages=1)),
        ([[sequence(1, 1, sample=False)], [sequence(2, 1)]], (), StepShape(1, 1, 1, False, longest=10)),
        ([[sequence(1, 1)], [sequence(2, 1, score=(8, 9))]], (), StepShape(1, 1, 1, False, longest=10)),
        ([[sequence(1, 1)], [sequence(2, 1)]], {2}, StepShape(1, 1, 1, False, longest=10, records=True)),
        ([[sequence(1, 1)], [sequence(2, 1, token_ids=(IN_FLIGHT,))]], {3}, StepShape(1, 1, 1, True, longest=10)),
        (
            [[sequence(1, 1)], [sequence(4, 7, sample=False)]],
            (),
            StepShape(None, 1, 7, False, longest=16, records=True, pairs=91, pages=1),
        ),
        (
            [[sequence(1, 3, drafts=2), sequence(2, 248), sequence(3, 2)]],
            (),
            StepShape(253, 3, 248, False, longest=257, pairs=33129, pages=3),
        ),
        (
            [[sequence(1, 3, drafts=2, unresolved=4)], [sequence(2, 1, start=12)]],
            (),
            StepShape(3, 1, 3, True, longest=16, unresolved=True),
        ),
    ],
)
def test_shape_of_a_step_is_that_of_all_replicas(plans: Any, routed: Any, shape: StepShape) -> None:
    found = StepShape.of([None if p is None else StepPlan(step=0, sequences=tuple(p)) for p in plans], routed, given={4})
    assert found == shape


def replay(model: Path, settings: Job, rank: int) -> list[Logprobs]:
    """Return log-probabilities of rollouts, scores with their records, and with other records: of weights that stay quantized."""
    choose, found = Numerics.choose, list[Logprobs]()

    def resident(**how: Any) -> Numerics:
        return replace(choose(**how), resident_fp8=how["dense_fp8"], resident_experts=how["expert_format"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Numerics, "choose", resident)
        patch.setattr(moe, "most_peer_tokens", lambda *args: 1 << 30)  # rows of any number are gathered before experts are chosen
        with LLM(str(model), **settings) as llm:
            if rank == 0:
                params = SamplingParams.for_rollout(max_tokens=4, seed=1, ignore_eos=True, return_replay=True)
                outs = llm.generate_batch([{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]], params)
                ones = [out.outputs[0] for out in outs]
                pairs = [(out.prompt_token_ids, one.token_ids) for out, one in zip(outs, ones, strict=True)]
                records = [one.replay for one in ones]
                other = replace(records[0], routed_experts=(records[0].routed_experts + 1) % 8)
                found += [one.logprobs for one in ones]
                found += llm.score_batch(pairs, params, replays=records)
                found += llm.score_batch(pairs, params, replays=[other, None])
                found.append(llm.score(*pairs[0], params, replay=other))
    return found


def test_given_experts_of_one_replica_are_chosen_though_others_route_its_tokens(ranks: Ranks) -> None:
    """A dispatcher of the host's own gets every call, after experts are chosen: the same bits."""
    settings = {**MODEST, **sizes_of(TWO), "deterministic": True}
    found, apart = (
        on_host(ranks, tiny_model(), replay, {**settings, "dispatcher": way}, 2)[0] for way in ("all_gather", OwnAllGather)
    )
    for ours, theirs in zip(found, apart, strict=True):
        same_logprobs(ours, theirs)
    for rollout, score in zip(found[:2], found[2:4], strict=True):
        same_logprobs(score, rollout)
    moved, second, alone = found[4:]
    assert not torch.equal(moved.sampled, found[0].sampled)
    same_logprobs(second, found[1])
    same_logprobs(alone, moved)


def replay_without_experts(model: Path, settings: Job, rank: int) -> list[Logprobs]:
    """Return log-probabilities of a rollout, and scores with a record of what could be sampled, beside scores without."""
    found: list[Logprobs] = []
    with as_on_a_device(Log()), overlapping(True), LLM(str(model), **settings) as llm:
        if rank == 0:
            params = SamplingParams.for_rollout(max_tokens=4, seed=1, top_k=5, ignore_eos=True, return_replay=True)
            out = llm.generate({"prompt_token_ids": PROMPTS[1]}, params)
            pair, kept = (PROMPTS[1], out.token_ids), replace(out.outputs[0].replay, routed_experts=None)
            found.append(out.outputs[0].logprobs)
            for _ in range(3):  # the second step of a shape is captured
                found += llm.score_batch([pair, pair], params, replays=[kept, None])
    return found


def test_replay_without_experts_runs_the_same_steps_on_every_rank(ranks: Ranks, model: Path) -> None:
    """The replica with the replay runs eagerly: so does the other one, though it could replay a captured step."""
    settings = {**MODEST, **sizes_of(TWO), "deterministic": True}
    first, *scores = on_host(ranks, model, replay_without_experts, settings, 2)[0]
    for score in scores:
        same_logprobs(score, first)
