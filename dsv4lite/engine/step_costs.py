"""How long steps take of the device, with guesses and without, found out before there is traffic by replaying their graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from dsv4lite.engine.graphs import DecodeGraphs
from dsv4lite.engine.verify_graphs import VerifyGraphs
from dsv4lite.scheduling.step_plan import SequencePlan, StepPlan, StepShape
from dsv4lite.speculation.draft_policy import StepCosts
from dsv4lite.state.store import StateCache

_SIZES = (1, 8, 64)
_REPLAYS = 2
_ROUNDS, _ROUNDS_S = 3, 0.004  # of replays: at most so many, and no further ones after so long; the shortest counts


def measure_steps(plain: DecodeGraphs, verify: VerifyGraphs, cache: StateCache, vocab_size: int) -> StepCosts | None:
    """Time steps of first tokens, for a few numbers of sequences and guesses; what they leave in the state nobody reads.

    Args:
        plain: Steps without guesses.
        verify: Steps with some.
        cache: The state of both.
        vocab_size: Tokens that there are.

    Returns:
        The times; ``None`` if there are no graphs of such steps.
    """
    max_drafts, largest = max(width for _, width in verify.shapes) - 1, plain.shapes[-1]
    ks = sorted({0, 1, max_drafts})
    found: dict[int, tuple[float, ...]] = {}
    for size in sorted({min(size, largest.size) for size in _SIZES}):
        times = {}
        for k in ks:
            plan = _step(size, k, cache.sizes.window_pages, vocab_size)
            shape = StepShape.of((plan,))._replace(longest=largest.max_model_len)  # by graphs of all lengths, as with guesses
            graphs: DecodeGraphs | VerifyGraphs = verify if k else plain
            if graphs.covers(shape):
                times[k] = _shortest(partial(_run, graphs, plan, shape))
        cache.reset(torch.arange(size, device=cache.device))
        if len(times) == len(ks):
            slope = (times[max_drafts] - times[1]) / max(1, max_drafts - 1)
            found[size] = (times[0], *(times[1] + slope * k for k in range(max_drafts)))
    return StepCosts(seconds=found) if found else None


def _step(size: int, k: int, pages: int, vocab_size: int) -> StepPlan:
    """Return a step of sequences that begin with it, each with so many guesses."""
    sequences = [
        SequencePlan(
            seq_id=-1 - i,
            slot=i,
            start=0,
            token_ids=tuple((7919 * (i + 1) + 31 * place) % vocab_size for place in range(1 + k)),
            pages=(0,),
            window_first=0,
            window_pages=(i % pages,),
            sample=True,
            drafts=k,
        )
        for i in range(size)
    ]
    return StepPlan(step=0, sequences=tuple(sequences), max_drafts=k)


def _run(graphs: DecodeGraphs | VerifyGraphs, plan: StepPlan, shape: StepShape) -> None:
    if isinstance(graphs, DecodeGraphs):
        graphs.replay(plan.sequences, shape)
        return
    output = graphs.replay(plan.sequences, shape)
    if graphs.drafter is not None:
        graphs.draft(output.out[0], plan.max_drafts)


def _shortest(work: Callable[[], None]) -> float:
    """Return the seconds of some work on the device."""
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
