"""From a plan of plain ints to the tensors of a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lite.engine.cache import StateCache
from dsv4lite.engine.step import IN_FLIGHT, StepPlan
from dsv4lite.models.batch import Batch, SequenceInput, make_batch
from dsv4lite.models.deepseek_v4 import DeepseekV4


def apply_copies(plan: StepPlan, cache: StateCache) -> None:
    """Bring the state to where the step's sequences expect it: fresh, restored and forked slots, copied pages."""
    device = cache.device
    if plan.resets:
        cache.reset(_ids(plan.resets, device))
    if plan.restores:
        cache.restore(*_pairs(plan.restores, device))
    for pairs, copy in (
        (plan.slot_copies, cache.copy_slots),
        (plan.grow_copies, cache.copy_grow_pages),
        (plan.window_copies, cache.copy_window_pages),
    ):
        if pairs:
            copy(*_pairs(pairs, device))


def apply_saves(plan: StepPlan, cache: StateCache) -> None:
    """Keep snapshots of what the step left at cached borders."""
    if plan.saves:
        cache.save(*_pairs(plan.saves, cache.device))


def pack(plan: StepPlan, model: DeepseekV4, sampled: Mapping[int, Tensor]) -> Batch:
    """Return the step's batch.

    Args:
        plan: What to run.
        model: Whose step it is.
        sampled: Last sampled token, int64 scalar on the device, of sequences whose token id is still ``IN_FLIGHT``.
    """
    batch = make_batch(
        [
            SequenceInput(
                token_ids=s.token_ids,
                start=s.start,
                slot=s.slot,
                pages=s.pages,
                window_first=s.window_first,
                window_pages=s.window_pages,
            )
            for s in plan.sequences
        ],
        model.config,
        model.rotary,
        model.numerics.device,
        banded=model.numerics.banded,
    )
    row = -1
    for sequence in plan.sequences:
        row += len(sequence.token_ids)
        if sequence.token_ids[-1] == IN_FLIGHT:
            batch.token_ids_T[row] = sampled[sequence.seq_id]
    return batch


def _ids(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _pairs(pairs: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    both = torch.tensor(pairs, dtype=torch.int64, device=device)
    return both[:, 0], both[:, 1]
