"""Whole steps with sampling behind them, as they are captured on a device, against steps without graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4lite.engine.runner import InFlightStep, Runner
from dsv4lite.engine.step_graphs import StepGraphs
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.request import Request, SamplingParams
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.scheduling.pages import Pools
from dsv4lite.scheduling.scheduler import Scheduler, SchedulerLimits
from dsv4lite.scheduling.sequence import Sequence
from dsv4lite.speculation.drafters import MtpDrafter
from dsv4lite.state.spec import StateSizes
from dsv4lite.state.store import StateCache
from dsv4lite.weights.quant import Numerics
from tests.golden import TINY, fill, poisoned, tiny_checkpoint
from tests.recorded import record, without_device

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/e2e/test_gpu.py runs whole engines on a device"),
]

CPU = torch.device("cpu")
SIZES = StateSizes(grow_pages=24, window_pages=64, slots=4, snapshots=0)
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.5, "seed": 4, "logprobs": 1},
    "nucleus": {"top_p": 0.8, "frequency_penalty": 1.0, "min_tokens": 3},
    "ranked": {"top_k": 5, "logit_bias": {7: 2.0}},
    "worded": {"bad_words_ids": ((9, 10), (3, 4)), "temperature": 2.0},
    "listed": {"logprobs": 3, "logprobs_mode": "processed", "presence_penalty": 1.0},
}


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    without_device(monkeypatch)
    monkeypatch.setattr(StepGraphs, "_record", record)
    with torch.inference_mode():
        yield


def runner_of(model: DeepseekV4, *, recorded: bool, drafts: int = 0, mesh: Mesh | None = None, own: bool = False) -> Runner:
    cache, vocab_size = StateCache.allocate(replace(model.state_spec, copies=1 + drafts), SIZES, CPU), model.config.vocab_size
    sampler = Sampler(vocab_size, CPU, 0, slots=SIZES.slots, rows=16) if model.shard.last else None
    if not recorded:
        return Runner(model, cache, sampler)
    rows: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "sampling": sampler}
    if drafts:
        drafter = rows["drafter"] = MtpDrafter(model, cache.layers[-1], drafts) if own else None
        return Runner(model, cache, sampler, StepGraphs(model, cache, **rows, widths=(1, 1 + drafts), max_tokens=16), drafter)
    return Runner(model, cache, sampler, StepGraphs(model, cache, **rows), mesh=mesh)


def run(runner: Any, known: Mapping[str, list[Any]] | None = None, *, stages: int = 1) -> dict[str, list[Any]]:
    """Run more requests than there are slots; return tokens, and log-probabilities where wanted.

    Args:
        runner: Runs one step while the results of others are under way, one for each stage.
        known: Tokens that each request will have: they are guessed, some wrongly, and no step is under way.
        stages: Of the runner, where it is a pipeline.
    """
    limits = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=512,
        window=TINY.window,
        enable_prefix_caching=False,
        max_drafts=0 if known is None else 1,
        stages=stages,
    )

    def propose(seq: Sequence, most: int) -> tuple[int, ...]:
        at, texts = len(seq.tokens) - seq.prompt_len, known or {}
        right = [token for token, *_ in texts[seq.request.request_id]][at : at + most]
        return tuple(t + len(seq.tokens) % 4 // 3 for t in right)

    pools = Pools(grow=SIZES.grow_pages, window=SIZES.window_pages, slots=SIZES.slots, snapshots=0)
    scheduler = Scheduler(limits, pools, propose=None if known is None else propose)
    found: dict[str, list[Any]] = {name: [] for name in SETTINGS}
    for i, (name, each) in enumerate(SETTINGS.items()):
        params = SamplingParams(**each, max_tokens=3 + i % 3, ignore_eos=True)  # type: ignore[arg-type]
        prompt = tuple((7 * i + j * j) % TINY.vocab_size for j in range(3 + 4 * i))
        request = Request(request_id=name, prompt_token_ids=prompt, params=params, eos_token_id=1)
        scheduler.add(request)
        runner.add(scheduler.sequences_of(name)[0].seq_id, request, 0)
    hosted = {s.seq_id for name in SETTINGS for s in scheduler.sequences_of(name) if s.needs_host}
    seq_ids = {name: scheduler.sequences_of(name)[0].seq_id for name in SETTINGS}
    flights, most = deque[InFlightStep](), 0 if known is not None else stages
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        if plan is not None:
            flights.append(runner.launch(plan))
        if not flights or (plan is not None and len(flights) <= most):
            continue
        landing = flights.popleft()
        results = landing.wait().sampled
        for seq_id in hosted.intersection(results):
            for one in (results[seq_id], *results[seq_id].after):
                runner.accept(seq_id, one.token_id)
        for update in scheduler.update(landing.plan, results):
            assert update.error is None
            logprobs = [(x.rank, x.token_ids.tolist(), round(x.logprob, 3)) for x in update.logprobs]
            found[update.request_id] += zip(update.token_ids, logprobs or [None] * len(update.token_ids), strict=True)
            if update.finish_reason is not None:
                runner.remove(seq_ids[update.request_id])
    return found


def test_runs_after_unchecked_drafts_sample_as_others_do() -> None:
    """Penalties, streams of random numbers and log-probabilities follow the positions that only the device knows."""
    settings: dict[str, Any] = {"temperature": 1.5, "seed": 4, "logprobs": 1, "allowed_token_ids": (3, 4), "frequency_penalty": 0.5}
    request = Request(request_id="", prompt_token_ids=(5, 6, 7), params=SamplingParams(**settings, max_tokens=11), eos_token_id=1)
    numerics = Numerics.choose(dtype=torch.float32, quantized=False, deterministic=True, device=CPU)
    model = fill(poisoned(TINY, numerics, with_mtp=True), tiny_checkpoint(TINY)).requires_grad_(False)
    texts, behind = [], []
    for drafts in (0, 2):
        limits = SchedulerLimits(
            max_num_seqs=4, max_num_batched_tokens=16, max_model_len=512, window=TINY.window, max_drafts=drafts
        )
        pools = Pools(grow=SIZES.grow_pages, window=SIZES.window_pages, slots=SIZES.slots, snapshots=0)
        scheduler = Scheduler(limits, pools, propose=(lambda seq, most: seq.drafts[:most]) if drafts else None)
        runner = runner_of(model, recorded=drafts > 0, drafts=drafts, own=True)
        scheduler.add(request)
        runner.add(0, request, 0)
        flights, updates = deque[InFlightStep](), []
        while scheduler.has_work():
            plan = scheduler.schedule(0.0) if not flights or scheduler.foresees(drafts) else None
            if plan is not None:
                flights.append(runner.launch(plan))
                behind.append(any(s.unresolved is not None for s in flights[-1].plan.sequences))
            if plan is None or len(flights) > 1:
                landing = flights.popleft()
                updates += scheduler.update(landing.plan, landing.wait().sampled)
        scores = [(x.rank, round(x.logprob, 3)) for update in updates for x in update.logprobs]
        texts.append(([token for update in updates for token in update.token_ids], scores))
    assert texts[0] == texts[1] and len(texts[0][0]) == 11
    assert sum(behind) > 2 < sum(update.accepted for update in updates)


def test_captured_steps_sample_as_others_do() -> None:
    numerics = Numerics.choose(dtype=torch.float32, quantized=False, deterministic=True, device=CPU)
    model = fill(poisoned(TINY, numerics), tiny_checkpoint(TINY)).requires_grad_(False)
    plain = run(runner_of(model, recorded=False))
    for drafts in (0, 1):
        recorded = runner_of(model, recorded=True, drafts=drafts)
        assert run(recorded, plain if drafts else None) == plain
        assert recorded.sampler is not None and recorded.sampler.num_sequences == 0
