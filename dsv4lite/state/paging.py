"""From plain ints to ``Paging``: where a step's tokens stand, and where their rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import send
from dsv4lite.kernels.paging import Paging
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.state.spec import StateSizes


def whole_sequences(sequences: Sequence[Sequence[int]]) -> tuple[list[SequencePlan], StateSizes]:
    """Return the plans of whole sequences in a state that has nothing else, and the sizes of that state."""
    plans: list[SequencePlan] = []
    first_page = first_window = 0
    for index, token_ids in enumerate(sequences):
        pages = range(first_page, first_page + -(-len(token_ids) // PAGE_TOKENS))
        windows = range(first_window, first_window + -(-len(token_ids) // WINDOW_PAGE_TOKENS))
        plans.append(SequencePlan(index, index, 0, tuple(token_ids), tuple(pages), 0, tuple(windows), sample=False))
        first_page, first_window = pages.stop, windows.stop
    sizes = StateSizes(grow_pages=first_page, window_pages=first_window, slots=len(plans), snapshots=0)
    return plans, sizes


def make_paging(sequences: Sequence[SequencePlan], device: torch.device) -> tuple[Tensor, Paging, int]:
    """Return token ids int64 [T], where they stand, and the length of the longest sequence after the step.

    One copy to the device brings all of it.
    """
    lens = [len(s.token_ids) for s in sequences]
    starts = [s.start for s in sequences]
    rows = [0, *accumulate(lens)][:-1]
    columns: list[list[int]] = [
        [token for s in sequences for token in s.token_ids],
        [position for s in sequences for position in range(s.start, s.end)],
        [index for index, length in enumerate(lens) for _ in range(length)],
        [s.slot for s in sequences],
        starts,
        rows,
        lens,
        [s.drafts for s in sequences],
        [s.state_copy for s in sequences],
        [s.window_first for s in sequences],
        _flat([s.window_pages for s in sequences], -1),
        _flat([s.pages for s in sequences], 0),
    ]
    # Each begins at a multiple of 16 bytes: kernels are compiled for aligned addresses, and not again while requests run.
    aligned = [[*column, *[0] * (-len(column) % 4)] for column in columns]
    packed = torch.tensor([value for column in aligned for value in column], dtype=torch.int32, device="cpu")
    parts = send(packed, device).split([len(column) for column in aligned])
    token_ids, positions, sequence, slots, first, row, length, drafts, copies, window_first, window, grow = (
        part[: len(column)] for part, column in zip(parts, columns, strict=True)
    )
    paging = Paging(
        positions_T=positions,
        sequence_T=sequence,
        slots_S=slots,
        first_S=first,
        rows_S=row,
        lens_S=length,
        drafts_S=drafts,
        state_copy_S=copies,
        grow_SP=grow.view(len(lens), -1),
        window_SP=window.view(len(lens), -1),
        window_first_S=window_first,
        singles=max(lens) == 1,
        host_spans=tuple(zip(rows, lens, starts, strict=True)),
    )
    return token_ids.long(), paging, max(s.end for s in sequences)


def _flat(tables: Sequence[Sequence[int]], filler: int) -> list[int]:
    """Return tables one after the other, all as long as the longest."""
    width = max(1, max(len(table) for table in tables))
    return [value for table in tables for value in (*table, *([filler] * (width - len(table))))]
