"""Measures, at start, the device time of steps with and without draft tokens, by replaying captured steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from dsv4lite.engine.step_graphs import GraphShape, StepGraphs, StepOutput
from dsv4lite.scheduling.step_plan import SequencePlan, StepPlan, StepShape
from dsv4lite.speculation.controller import StepCosts
from dsv4lite.state.store import StateCache

_SIZES = (1, 8, 64)
_REPLAYS = 2
_ROUNDS, _ROUNDS_S = 3, 0.004  # most rounds of replays, and seconds after which no further round starts; the shortest counts


def measure_steps(graphs: StepGraphs, cache: StateCache, vocab_size: int) -> StepCosts | None:
    """Time steps at position 0, for a few numbers of sequences and draft tokens; reset the state afterwards.

    Args:
        graphs: The captured steps.
        cache: Their state.
        vocab_size: Number of tokens of the vocabulary.

    Returns:
        The times; ``None`` unless there are captured steps with draft tokens and others without the drafter.
    """
    max_drafts, longest = max(s.width for s in graphs.shapes) - 1, max(s.max_model_len for s in graphs.shapes)
    if not max_drafts or all(s.drafts for s in graphs.shapes):
        return None
    most, counts = max(s.sequences for s in graphs.shapes if s.width == 1), sorted({0, 1, max_drafts})
    found: dict[int, tuple[float, ...]] = {}
    for size in sorted({min(size, most) for size in _SIZES}):
        times = {}
        for k in counts:
            plan = _step(size, k, cache.sizes.window_pages, vocab_size)
            shape = graphs.shape_for(StepShape.of((plan,))._replace(longest=longest))  # with the indexer, as in verify steps
            if shape is not None:
                times[k] = _shortest(partial(_run, graphs, plan, shape))
        cache.reset(torch.arange(size, device=cache.device))
        if len(times) == len(counts):
            slope = (times[max_drafts] - times[1]) / max(1, max_drafts - 1)
            found[size] = (times[0], *(times[1] + slope * k for k in range(max_drafts)))
    return StepCosts(seconds=found) if found else None


def _step(size: int, k: int, pages: int, vocab_size: int) -> StepPlan:
    """Return a step at position 0 of ``size`` sequences with ``k`` draft tokens each."""
    sequences = [
        SequencePlan(
            seq_id=-1 - i,
            slot=i,
            start=0,
            token_ids=tuple((7919 * (i + 1) + 31 * place) % vocab_size for place in range(1 + k)),
            pages=(0,),
            window_first=0,
            window_pages=(i % pages,) if pages else (),
            sample=True,
            drafts=k,
        )
        for i in range(size)
    ]
    return StepPlan(step=0, sequences=tuple(sequences), max_drafts=k)


def _run(graphs: StepGraphs, plan: StepPlan, shape: GraphShape) -> None:
    output = graphs.replay(plan.sequences, shape)
    if shape.drafts and isinstance(output, StepOutput):
        graphs.draft(plan.sequences, output.out[0], plan.max_drafts)


def _shortest(work: Callable[[], None]) -> float:
    """Return the device seconds of ``work``, the shortest of a few rounds."""
    stream = torch.cuda.current_stream()
    work()
    stream.synchronize()
    times: list[float] = []
    while len(times) < _ROUNDS and sum(times) * _REPLAYS < _ROUNDS_S:
        began = time.perf_counter()
        for _ in range(_REPLAYS):
            work()
        stream.synchronize()
        times.append((time.perf_counter() - began) / _REPLAYS)
    return min(times)
