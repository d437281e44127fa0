"""From plain ints to ``Paging``: where a step's tokens stand, and where their rows lie."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
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
    columns: list[Iterable[Iterable[int]]] = [
        (s.token_ids for s in sequences),
        (range(s.start, s.end) for s in sequences),
        (array("i", (index,)) * length for index, length in enumerate(lens)),
        ([s.slot for s in sequences],),
        (starts,),
        (rows,),
        (lens,),
        ([s.drafts for s in sequences],),
        ([s.state_copy for s in sequences],),
        ([s.window_first for s in sequences],),
        _filled([s.window_pages for s in sequences], -1),
        _filled([s.pages for s in sequences], 0),
    ]
    values, sizes, aligned = array("i"), [], []  # not lists: a prompt has thousands of each, and the device waits for them
    for column in columns:
        begin = len(values)
        for part in column:
            values.extend(part)
        sizes.append(len(values) - begin)
        # Each begins at a multiple of 16 bytes: kernels are compiled for aligned addresses, and not again while requests run.
        values.extend([0] * (-len(values) % 4))
        aligned.append(len(values) - begin)
    parts = send(torch.frombuffer(values, dtype=torch.int32), device).split(aligned)
    token_ids, positions, sequence, slots, first, row, length, drafts, copies, window_first, window, grow = (
        part[:size] for part, size in zip(parts, sizes, strict=True)
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


def _filled(tables: Sequence[Sequence[int]], filler: int) -> Iterator[Sequence[int]]:
    """Yield tables, all as long as the longest."""
    width = max(1, max(len(table) for table in tables))
    for table in tables:
        yield table
        yield [filler] * (width - len(table))
