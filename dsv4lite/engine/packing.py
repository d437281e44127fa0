"""Makes the tensors of a step from its plan of plain integers: of an eager step, and of a captured one.

A captured step reads one block of integers per step, and the page tables of all slots.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import send
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.spans import FIELDS, PlacedSpans
from dsv4lite.models.batch import Batch
from dsv4lite.models.family import Model
from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.scheduling.sequence import NO_SLOT
from dsv4lite.scheduling.step_plan import IN_FLIGHT, NO_PAGE, SequencePlan, StepPlan
from dsv4lite.state.paging import make_paging
from dsv4lite.state.store import StateCache


def prepare_state(plan: StepPlan, cache: StateCache, drafter: int) -> None:
    """Apply the plan's changes of state before its sequences run: reset, restored and forked slots, copied pages, zeroed rows.

    Rows of the drafter are zero-filled for tokens for which it did not run: attention reads such rows as keys, and zeros make the
    drafts independent of the page's earlier contents. The rows are in window pages, or in grow pages for a model without sliding
    window. The drafter's layers begin at index ``drafter``.
    """
    device = cache.device
    if plan.resets:
        cache.reset(send(torch.tensor(plan.resets, dtype=torch.int64, device="cpu"), device))
    for pairs, change in (
        (plan.zero_rows, partial(cache.zero_rows, drafter)),
        (plan.restores, cache.restore),
        (plan.slot_copies, cache.copy_slots),
        (plan.grow_copies, partial(cache.copy_pages, "grow")),
        (plan.window_copies, partial(cache.copy_pages, "window")),
    ):
        if pairs:
            change(*_pairs(pairs, device))


def save_snapshots(plan: StepPlan, cache: StateCache) -> None:
    """Save snapshots of the compressor state after the step, for the cached prefixes that end there."""
    if plan.saves:
        cache.save(*_pairs(plan.saves, cache.device))


def pack(plan: StepPlan, model: Model, cache: StateCache, most_tokens: int | None = None) -> Batch:
    """Return the step's batch.

    Args:
        plan: The step's plan.
        model: The model that runs it.
        cache: The state; ``last_token`` has the tokens of sequences whose token id is ``IN_FLIGHT``.
        most_tokens: Largest number of tokens of a replica, if replicas share experts.
    """
    token_ids_T, paging, longest = make_paging(plan.sequences, model.numerics.device)
    batch = model.batch(known_tokens(token_ids_T, paging, cache.last_token), paging, max_tokens=longest)
    batch.most_tokens = most_tokens
    return batch


def known_tokens(token_ids_T: Tensor, paging: Paging, last_token: Tensor) -> Tensor:
    """Return token ids int64 [T] with each ``IN_FLIGHT`` replaced by the ``last_token`` of its slot."""
    last_T = last_token[paging.slots_S.long()[paging.sequence_T.long()]]
    return torch.where(token_ids_T == IN_FLIGHT, last_T, token_ids_T)


def padding(tokens: int, model: Model, *, sequences: int = 1) -> Batch:
    """Return a step of padding for ``sequences`` sequences: it launches all kernels and changes no state.

    Ranks that share experts run it with the same number of tokens.
    """
    nowhere = []
    for i in range(sequences):
        own = tokens // sequences + (i < tokens % sequences)
        pages = (0,) * -(-own // PAGE_TOKENS)  # read as those of a prompt are, never written
        nowhere.append(SequencePlan(-1 - i, NO_SLOT, 0, (0,) * own, pages, 0, (NO_PAGE,), sample=False))
    token_ids_T, paging, longest = make_paging(nowhere, model.numerics.device)
    batch = model.batch(token_ids_T, paging, max_tokens=longest)
    paging.positions_T.fill_(-1)
    batch.most_tokens = tokens
    return batch


class PageTables:
    """Page tables by slot, at a fixed address; a row is sent to the device only when its sequence has a new page. Mutable.

    Args:
        cache: The state that has the pages.
        max_model_len: Longest sequence.

    Attributes:
        tensor: int32 [slots + 1, P]; the last row is for padding.
    """

    def __init__(self, cache: StateCache, max_model_len: int) -> None:
        pages = -(-max_model_len // PAGE_TOKENS)
        self.tensor = torch.zeros(cache.sizes.slots + 1, pages, dtype=torch.int32, device=cache.device)
        self._held: dict[int, tuple[int, ...]] = {}
        self._last: tuple[list[int], list[tuple[int, ...]]] = [], []  # slots and pages of the last step

    def update(self, sequences: Sequence[SequencePlan]) -> None:
        """Send the rows that differ from those on the device."""
        now = [s.slot for s in sequences], [s.pages for s in sequences]
        if now == self._last:  # the usual case; comparison is cheap, as equal tuples are mostly the same objects
            return
        self._last = now
        changed = [s for s in sequences if self._held.get(s.slot) is not s.pages]
        if not changed:
            return
        self._held.update((s.slot, s.pages) for s in changed)
        width = max(len(s.pages) for s in changed)
        rows = torch.tensor([(s.slot, *s.pages, *([0] * (width - len(s.pages)))) for s in changed], dtype=torch.int32, device="cpu")
        rows = send(rows, self.tensor.device)
        self.tensor[rows[:, 0].long(), :width] = rows[:, 1:]


def step_inputs(sequences: Sequence[SequencePlan], size: int, width: int, pages: int, columns: Mapping[int, int]) -> Tensor:
    """Return the integers of a step, int32 [rows, size] on the CPU; missing sequences are padding.

    The first ``FIELDS`` rows are positions, slots, copies of the compressor state, numbers of draft tokens, first window pages and,
    for sequences with unresolved drafts, their columns in ``AcceptedLengths``, else -1. ``width`` rows of tokens follow. The window
    pages, as [size, pages], begin at row ``_pages_row(width)``.

    Args:
        sequences: At most ``size``.
        size: Number of sequences, padding included.
        width: Tokens of a sequence, padding included.
        pages: Window pages of a sequence.
        columns: Columns in ``AcceptedLengths`` by sequence id.
    """
    missing = size - len(sequences)
    none, zero = [-1] * missing, [0] * missing
    _, slots, starts, token_ids, _, window_first, held, _, _, drafts, copies, _, unresolved = (
        zip(*sequences, strict=True) if sequences else ((),) * 13
    )
    following = [-1] * size
    if unresolved.count(None) < len(unresolved):
        following[: len(sequences)] = [-1 if s.unresolved is None else columns[s.seq_id] for s in sequences]
    tokens = token_ids if width == 1 else [ids if len(ids) == width else (*ids, *[0] * (width - len(ids))) for ids in token_ids]
    tails = [(-1,) * (pages - count) for count in range(pages + 1)]
    values = [
        *(*starts, *none, *slots, *none, *copies, *zero, *drafts, *zero, *window_first, *zero, *following),
        *(chain.from_iterable((*column, *zero) for column in zip(*tokens, strict=True)) if tokens else zero * width),
        *chain.from_iterable([some + tails[len(some)] for some in held]),
        *none * pages,
    ]
    used, unused = size * (FIELDS + width), 4 * size * (_pages_row(width) - FIELDS - width)
    packed = struct.pack(f"{used}i{unused}x{size * pages}i", *values)  # torch.tensor takes five times as long to read a list
    return torch.frombuffer(bytearray(packed), dtype=torch.int32).view(-1, size)


def step_batch(inputs: Tensor, placed: PlacedSpans, tables: Tensor, model: Model, max_model_len: int) -> Batch:
    """Return the batch of a step with the same number of rows for each sequence.

    Args:
        inputs: From ``step_inputs``.
        placed: Its rows, from ``place_spans``.
        tables: int32 [slots + 1, P], page tables by slot.
        model: The model that runs it.
        max_model_len: Longest sequence.
    """
    size = inputs.shape[1]
    width = len(placed.tokens_T) // size
    start_S, drafts_S, state_copy_S = placed.spans_XS[:3]
    paging = Paging(
        positions_T=placed.positions_T,
        sequence_T=placed.sequence_T,
        slots_S=inputs[1],
        first_S=start_S,
        rows_S=placed.rows_S,
        lens_S=placed.lens_S,
        drafts_S=drafts_S,
        state_copy_S=state_copy_S,
        grow_SP=tables.index_select(0, placed.places_S),
        window_SP=inputs[_pages_row(width) :].view(size, -1),
        window_first_S=inputs[4],
        width=width,
    )
    batch = model.batch(placed.tokens_T, paging, max_tokens=max_model_len)
    batch.most_tokens = size * width  # other ranks replay the same shape
    return batch


def _pages_row(width: int) -> int:
    """Return the row of ``step_inputs`` where window pages begin: a multiple of 4, so that they are aligned to 16 bytes."""
    return -(-(FIELDS + width) // 4) * 4


def _pairs(pairs: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    both = send(torch.tensor(pairs, dtype=torch.int64, device="cpu"), device)
    return both[:, 0], both[:, 1]
