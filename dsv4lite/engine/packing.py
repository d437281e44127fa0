"""From a plan of plain ints to the tensors of a step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dsv4lite.models.family import Batch, Model
from dsv4lite.paging import WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.step_plan import IN_FLIGHT, StepPlan
from dsv4lite.state.paging import SequenceInput, make_paging
from dsv4lite.state.store import StateCache

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
        (plan.grow_copies, partial(cache.copy_pages, "grow")),
        (plan.window_copies, partial(cache.copy_pages, "window")),
    ):
        if pairs:
            copy(*_pairs(pairs, device))


def zero_fill(plan: StepPlan, cache: StateCache, drafter: int) -> None:
    """Zero-fill the window rows of tokens for which a drafter did not run; the layers of its state begin at ``drafter``.

    Attention reads such a row as any other key; zeros keep the drafter independent of what the page held before.
    """
    addresses = [page * WINDOW_PAGE_TOKENS + place for page, first, last in plan.zero_rows for place in range(first, last)]
    for _, part, store in cache.stores(drafter):
        if part.lifetime == "window":
            store.clear(_ids(tuple(addresses), cache.device))


def apply_saves(plan: StepPlan, cache: StateCache) -> None:
    """Save snapshots of the state that the step left at the boundaries of cached prefixes."""
    if plan.saves:
        cache.save(*_pairs(plan.saves, cache.device))


def empty_last_token(cache: StateCache) -> Tensor:
    """Allocate the tokens sampled last in each slot, int64 [slots + 1]; the last one is for padding."""
    return torch.zeros(cache.sizes.slots + 1, dtype=torch.int64, device=cache.device)


def pack(plan: StepPlan, model: Model, last_token: Tensor, most_tokens: int | None = None) -> Batch:
    """Return the step's batch.

    Args:
        plan: What to run.
        model: Whose step it is.
        last_token: int64 [slots + 1], the token sampled last in each slot, for sequences whose token id is still ``IN_FLIGHT``.
        most_tokens: Tokens of the replica with the most, of those that share experts.
    """
    device = model.numerics.device
    token_ids_T, paging, longest = make_paging(plan.sequences, device)
    unknown, row = [], -1
    for sequence in plan.sequences:
        row += len(sequence.token_ids)
        if sequence.token_ids[-1] == IN_FLIGHT:
            unknown.append((row, sequence.slot))
    if unknown:
        rows, slots = _pairs(tuple(unknown), device)
        token_ids_T[rows] = last_token[slots]
    batch = model.batch(token_ids_T, paging, max_tokens=longest)
    batch.most_tokens = most_tokens
    return batch


def padding(tokens: int, model: Model) -> Batch:
    """Return a step that is all padding: it launches everything and changes no state.

    Ranks that share experts run it with the same number of tokens.
    """
    ids = (0,) * tokens
    nowhere = SequenceInput(token_ids=ids, start=0, slot=-1, pages=(0,), window_first=0, window_pages=(-1,))
    token_ids_T, paging, longest = make_paging([nowhere], model.numerics.device)
    batch = model.batch(token_ids_T, paging, max_tokens=longest)
    paging.positions_T.fill_(-1)
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
