"""Makes the ``Paging`` of a step (positions of tokens, places of their rows) from the plain integers of its plan."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from struct import pack
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import send
from dsv4lite.kernels.paging import Paging
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.state.spec import StateSizes

_ZERO, _MINUS_ONE = b"\0" * 4, b"\xff" * 4  # int32
_ALIGNED = 4  # integers; every part begins at a multiple of 16 bytes, since kernels are compiled for aligned addresses only


def whole_sequences(sequences: Sequence[Sequence[int]]) -> tuple[list[SequencePlan], StateSizes]:
    """Return plans that run whole sequences in an otherwise empty state, and the sizes of that state."""
    plans: list[SequencePlan] = []
    first_page = first_window = 0
    for index, token_ids in enumerate(sequences):
        pages = range(first_page, first_page + -(-len(token_ids) // PAGE_TOKENS))
        windows = range(first_window, first_window + -(-len(token_ids) // WINDOW_PAGE_TOKENS))
        plans.append(SequencePlan(index, index, 0, tuple(token_ids), tuple(pages), 0, tuple(windows), sample=False))
        first_page, first_window = pages.stop, windows.stop
    sizes = StateSizes(grow_pages=first_page, window_pages=first_window, slots=len(plans), snapshots=0)
    return plans, sizes


class PagingSizes(NamedTuple):
    """Sizes of a step's tensors.

    Attributes:
        tokens, sequences: Numbers of the step, padding included.
        grow_pages, window_pages: Pages per sequence, at least 1.
    """

    tokens: int
    sequences: int
    grow_pages: int
    window_pages: int

    @classmethod
    def of(cls, sequences: Sequence[SequencePlan]) -> PagingSizes:
        """Return the exact sizes of some sequences, without padding."""
        grow, window = (max(1, *map(len, pages)) for pages in ([s.pages for s in sequences], [s.window_pages for s in sequences]))
        return cls(sum(len(s.token_ids) for s in sequences), len(sequences), grow, window)

    @property
    def columns(self) -> tuple[int, ...]:
        """Number of integers of each part of ``write_paging``."""
        tables = self.sequences * self.window_pages, self.sequences * self.grow_pages
        return (*[self.tokens] * 3, *[self.sequences] * 7, *tables)


def first_rows(sequences: Sequence[SequencePlan]) -> list[int]:
    """Return the row of each sequence's first token."""
    return [0, *accumulate(len(s.token_ids) for s in sequences)][: len(sequences)]


def write_paging(sequences: Sequence[SequencePlan], sizes: PagingSizes) -> Tensor:
    """Return the integers of a step, int32 on the CPU, in the format of ``read_paging``, padded to ``sizes``.

    Padding tokens are at position -1 of the first sequence; padding sequences have no tokens and no slot.
    """
    lens = [len(s.token_ids) for s in sequences]
    tokens, missing = sizes.tokens - sum(lens), sizes.sequences - len(sequences)
    integers = _integers(max((s.end for s in sequences), default=0).bit_length())
    columns: list[tuple[bytes, bytes, int]] = [
        (_packed(tuple(chain.from_iterable(s.token_ids for s in sequences))), _ZERO, tokens),
        (b"".join([integers[s.start : s.end] for s in sequences]), _MINUS_ONE, tokens),
        (b"".join([pack("i", index) * length for index, length in enumerate(lens)]), _ZERO, tokens),
        (_packed([s.slot for s in sequences]), _MINUS_ONE, missing),
        (_packed([s.start for s in sequences]), _ZERO, missing),
        (_packed(first_rows(sequences)), _ZERO, missing),
        (_packed(lens), _ZERO, missing),
        (_packed([s.drafts for s in sequences]), _ZERO, missing),
        (_packed([s.state_copy for s in sequences]), _ZERO, missing),
        (_packed([s.window_first for s in sequences]), _ZERO, missing),
    ]
    values = array("i")
    for column, filler, count in columns:
        values.frombytes(column + filler * count)
        values.extend([0] * (-len(values) % _ALIGNED))
    for tables, width, filler in (
        ([s.window_pages for s in sequences], sizes.window_pages, b"\xff"),  # -1: no page
        ([s.pages for s in sequences], sizes.grow_pages, b"\0"),
    ):
        assert max(map(len, tables), default=0) <= width, (max(map(len, tables)), width)
        size = width * values.itemsize
        rows = [_packed(table).ljust(size, filler) for table in tables]
        values.frombytes(b"".join(rows).ljust(sizes.sequences * size, filler))
        values.extend([0] * (-len(values) % _ALIGNED))
    return torch.frombuffer(values, dtype=torch.int32)


def read_paging(
    block: Tensor, sizes: PagingSizes, *, width: int, spans: tuple[tuple[int, int, int], ...] | None = None
) -> tuple[Tensor, Paging]:
    """Return token ids int32 [T] and the ``Paging``, as views of a block of ``write_paging``; ``spans`` if the host knows them."""
    parts = block.split([size + -size % _ALIGNED for size in sizes.columns])
    token_ids, positions, sequence, slots, first, row, length, drafts, copies, window_first, window, grow = (
        part[:size] for part, size in zip(parts, sizes.columns, strict=True)
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
        grow_SP=grow.view(sizes.sequences, -1),
        window_SP=window.view(sizes.sequences, -1),
        window_first_S=window_first,
        width=width,
        host_spans=spans,
    )
    return token_ids, paging


def make_paging(sequences: Sequence[SequencePlan], device: torch.device) -> tuple[Tensor, Paging, int]:
    """Return token ids int64 [T], the ``Paging``, and the length of the longest sequence after the step.

    All integers go to the device in one copy.
    """
    sizes, lens = PagingSizes.of(sequences), [len(s.token_ids) for s in sequences]
    spans = tuple(zip(first_rows(sequences), lens, [s.start for s in sequences], strict=True))
    token_ids_T, paging = read_paging(send(write_paging(sequences, sizes), device), sizes, width=int(max(lens) == 1), spans=spans)
    return token_ids_T.long(), paging, max(s.end for s in sequences)


# A prompt has thousands of integers, and the device waits for them: other ways take two to five times.
def _packed(values: Sequence[int]) -> bytes:
    """Return int32 bytes."""
    return pack(f"{len(values)}i", *values)


@cache
def _integers(bits: int) -> memoryview:
    """Return all integers of so many bits in order, int32."""
    values = array("i", bytes(4 << bits))
    torch.arange(1 << bits, dtype=torch.int32, device="cpu", out=torch.frombuffer(values, dtype=torch.int32))
    return memoryview(values)
