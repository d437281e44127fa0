"""From a plan of plain ints to the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4lite.models.deepseek_v4.batch import Batch, SequenceInput, make_batch
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.scheduling.step_plan import IN_FLIGHT, StepPlan
from dsv4lite.state.cache import WINDOW_PAGE, LayerCache, StateCache

_FEW = (1, 2, 4, 8)


def apply_copies(plan: StepPlan, cache: StateCache) -> None:
    """Apply what a step does to the state before its sequences run: reset, restored and forked slots, copied pages."""
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


def zero_fill(plan: StepPlan, layers: Sequence[LayerCache]) -> None:
    """Zero-fill the window rows of tokens for which a drafter, which has these layers, did not run.

    Attention reads such a row as any other key; zeros keep the drafter independent of what the page held before.
    """
    addresses = [page * WINDOW_PAGE + place for page, first, last in plan.zero_rows for place in range(first, last)]
    for layer in layers:
        layer.window.clear(_ids(tuple(addresses), layer.window.memory.device))


def apply_saves(plan: StepPlan, cache: StateCache) -> None:
    """Save snapshots of the state that the step left at the boundaries of cached prefixes."""
    if plan.saves:
        cache.save(*_pairs(plan.saves, cache.device))


def empty_last_token(cache: StateCache) -> Tensor:
    """Allocate the tokens sampled last in each slot, int64 [slots + 1]; the last one is for padding."""
    return torch.zeros(cache.sizes.slots + 1, dtype=torch.int64, device=cache.device)


def pack(plan: StepPlan, model: DeepseekV4, last_token: Tensor, most_tokens: int | None = None) -> Batch:
    """Return the step's batch.

    Args:
        plan: What to run.
        model: Whose step it is.
        last_token: int64 [slots + 1], the token sampled last in each slot, for sequences whose token id is still ``IN_FLIGHT``.
        most_tokens: Tokens of the replica with the most, of those that share experts.
    """
    sequences = [
        SequenceInput(
            token_ids=s.token_ids,
            start=s.start,
            slot=s.slot,
            pages=s.pages,
            window_first=s.window_first,
            window_pages=s.window_pages,
            drafts=s.drafts,
            carry=s.state_copy,
        )
        for s in plan.sequences
    ]
    numerics = model.numerics
    batch = make_batch(sequences, model.rotary, numerics.device, deterministic=numerics.deterministic)
    unknown, row = [], -1
    for sequence in plan.sequences:
        row += len(sequence.token_ids)
        if sequence.token_ids[-1] == IN_FLIGHT:
            unknown.append((row, sequence.slot))
    if unknown:
        rows, slots = _pairs(tuple(unknown), numerics.device)
        batch.token_ids_T[rows] = last_token[slots]
    batch.most_tokens = most_tokens
    return batch


def padding(tokens: int, model: DeepseekV4) -> Batch:
    """Return a step that is all padding: it launches everything and changes no state.

    Ranks that share experts run it with the same number of tokens.
    """
    ids = (0,) * tokens
    nowhere = SequenceInput(token_ids=ids, start=0, slot=-1, pages=(0,), window_first=0, window_pages=(-1,))
    batch = make_batch([nowhere], model.rotary, model.numerics.device, deterministic=model.numerics.deterministic)
    batch.paging.positions_T.fill_(-1)
    batch.most_tokens = tokens
    return batch


def graph_sizes(most: int) -> list[int]:
    """Return the numbers of sequences that have a graph of their own, ascending; a step takes the next larger one."""
    sizes = [size for size in _FEW if size < most]
    sizes += range(16, min(most, 64), 8)
    sizes += range(64, min(most, 256), 32)
    sizes += range(256, most, 128)
    return [*sizes, most]


def _ids(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _pairs(pairs: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    both = torch.tensor(pairs, dtype=torch.int64, device=device)
    return both[:, 0], both[:, 1]
