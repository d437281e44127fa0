"""Positions of a step's tokens and addresses of their rows, as tensors for kernels; the host may not know their values.

    compressed entry e of ratio r     page grow_SP[s, e // (256 / r)], place e % (256 / r)
    window row of position p          before this step: page window_SP[s, p // 64 - window_first_S[s]], place p % 64
                                      of this step:     the step's own packed rows, row rows_S[s] + p - first_S[s]

    row of token p in grow pages      entry p of ratio 1

Shapes: T tokens, S sequences, P grow pages, Q window pages.  Tokens of a sequence are consecutive rows and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Derived = TypeVar("Derived")


class Block(NamedTuple):
    """Consecutive rows of a step that a reference processes together.

    Attributes:
        begin, end: First row, and the one after the last.
        sequence: The sequence of all rows; ``None`` if they may belong to several.
        oldest, newest: Smallest and largest position.
    """

    begin: int
    end: int
    sequence: int | None
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """One step, int32 throughout.

    Attributes:
        positions_T: Position of each token; -1 is padding, which reads and writes no store and whose results are ignored.
        sequence_T: Row of the per-sequence tensors; any valid one for padding.
        slots_S: Slot of each sequence's compressor state; -1 is padding.
        first_S: Position of its first token in this step.
        rows_S: Row of that token.
        lens_S: Its number of tokens.
        drafts_S: Number of drafts, which are its last tokens: the compressor state before each draft has its own copy.
        state_copy_S: The copy of the compressor state that it starts from.
        grow_SP: Pages of 256 positions each, from position 0; past the end any valid page.
        window_SP: Pages of 64 positions each; -1 for pages that are neither read nor written.
        window_first_S: Column 0 of ``window_SP`` holds positions from 64 times this number on.
        width: Rows of every sequence, including padding: T = S * width and rows_S = 0, width, …; 0 if the numbers of rows differ.
        host_spans: The result of ``spans``, if the host knows it.
        splits: KV splits in attention; the bits of its result depend on them.
        derived: Values derived from the tensors (``once``). What is derived on the host must not change afterwards.
    """

    positions_T: Tensor
    sequence_T: Tensor
    slots_S: Tensor
    first_S: Tensor
    rows_S: Tensor
    lens_S: Tensor
    drafts_S: Tensor
    state_copy_S: Tensor
    grow_SP: Tensor
    window_SP: Tensor
    window_first_S: Tensor
    width: int
    splits: int = 1
    host_spans: tuple[tuple[int, int, int], ...] | None = None
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """Return the result of ``make``, called once per step and key, so that layers share it."""
        if key not in self.derived:
            self.derived[key] = make()
        found: Derived = self.derived[key]
        return found

    @property
    def singles(self) -> bool:
        """Every sequence has one token: S = T and rows_S = 0, 1, 2, …"""
        return self.width == 1

    @property
    def padding_T(self) -> Tensor | None:
        """Which rows are padding, bool [T]; ``None`` if no row is. For references."""

        def find() -> Tensor | None:
            padding_T = self.positions_T < 0
            return padding_T if bool(padding_T.any()) else None

        return self.once("padding", find)

    def spans(self) -> list[tuple[int, int, int]]:
        """Return first row, number of tokens and first position of each sequence. For references, or with ``host_spans``."""
        if self.host_spans is not None:
            return list(self.host_spans)
        tables = (self.rows_S, self.lens_S, self.first_S)
        return self.once("spans", lambda: list(zip(*(table.tolist() for table in tables), strict=True)))

    def own_rows(self, rows_per_page: int) -> tuple[Tensor | None, Tensor]:
        """Return the rows that are not padding, int64 [N] or ``None`` for all, and their addresses in grow pages with one row per
        token. For references.
        """

        def find() -> tuple[Tensor | None, Tensor]:
            position_T, page_T = self.positions_T.long(), self.positions_T.long().clamp_min(0) // rows_per_page
            address_T = self.grow_SP[self.sequence_T.long(), page_T].long() * rows_per_page + position_T % rows_per_page
            if self.padding_T is None:
                return None, address_T
            rows_N = (~self.padding_T).nonzero()[:, 0]
            return rows_N, address_T[rows_N]

        return self.once(("own rows", rows_per_page), find)

    def blocks(self, most: int, least: int | None = None) -> list[Block]:
        """Cut the step into blocks of at most ``most`` rows. For references.

        Args:
            most: Rows of a block.
            least: A sequence with at least so many tokens gets blocks of its own; ``None``: no sequence does.
        """

        def cut() -> list[Block]:
            positions = self.positions_T.tolist()

            def pieces(begin: int, end: int, sequence: int | None) -> Iterator[Block]:
                for row in range(begin, end, most):
                    held = positions[row : min(row + most, end)]
                    yield Block(row, row + len(held), sequence, min(held), max(held))

            found, row = [], 0
            for sequence, (begin, count) in enumerate(zip(self.rows_S.tolist(), self.lens_S.tolist(), strict=True)):
                if least is not None and count >= least and min(positions[begin : begin + count]) >= 0:
                    found += [*pieces(row, begin, None), *pieces(begin, begin + count, sequence)]
                    row = begin + count
            return [*found, *pieces(row, len(positions), None)]

        return self.once(("blocks", most, least), cut)
