"""Rows of logits by sequence: a sequence that runs drafts has one row for each of them, and one more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dsv4lite.sampling.state import send
from dsv4lite.scheduling.step_plan import UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The R rows of a step, those of a sequence one behind the other.

    Each row samples a token. The sequence's next row takes for granted that this is a certain draft, and counts only if it is.

    Attributes:
        seq_ids: Of the sequences.
        first_rows: Of the sequences, and R.
        drafts: The draft that each row's token must be for the next row to count; ``UNKNOWN`` at the last row of a sequence.
    """

    seq_ids: tuple[int, ...]
    first_rows: tuple[int, ...]
    drafts: tuple[int, ...]

    @classmethod
    def of(cls, seq_ids: Sequence[int], drafts: Sequence[int] | None = None) -> Runs:
        """Group rows.

        Args:
            seq_ids: Of the rows; all different without drafts.
            drafts: Of the rows.
        """
        if drafts is None:
            return cls(seq_ids=tuple(seq_ids), first_rows=tuple(range(len(seq_ids) + 1)), drafts=(UNKNOWN,) * len(seq_ids))
        first = [row for row in range(len(seq_ids)) if row == 0 or drafts[row - 1] == UNKNOWN]
        return cls(seq_ids=tuple(seq_ids[row] for row in first), first_rows=(*first, len(seq_ids)), drafts=tuple(drafts))

    @property
    def single(self) -> bool:
        """Whether every sequence has one row."""
        return len(self.seq_ids) == len(self.drafts)

    def spans(self) -> list[tuple[int, int]]:
        """Return the first row of each sequence, and the one after its last."""
        return list(pairwise(self.first_rows))

    def given(self) -> list[tuple[int, int]]:
        """Return each row with every draft that it takes for granted."""
        return [(row, draft) for begin, end in self.spans() for row in range(begin, end) for draft in self.drafts[begin:row]]

    def last_rows(self, token_ids: Tensor) -> Tensor:
        """Return the last row that counts of each sequence, int64 [S]; nothing waits for the device.

        Args:
            token_ids: int64 [R], what was sampled.
        """
        first_S = self._first(token_ids.device)
        if self.single:
            return first_S
        width = max(end - begin for begin, end in self.spans()) - 1
        padded = [self.drafts[begin : end - 1] + (UNKNOWN,) * (width - (end - 1 - begin)) for begin, end in self.spans()]
        drafts_SK = send(torch.tensor(padded, dtype=torch.int64, device="cpu"), token_ids.device)
        rows_SK = first_S[:, None] + torch.arange(width, device=token_ids.device)
        right_SK = token_ids[rows_SK.clamp_max(len(token_ids) - 1)] == drafts_SK
        return first_S + right_SK.long().cumprod(1).sum(1)

    def ends(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many drafts of each sequence are right, and the token behind them, int64 [S] twice; nothing waits.

        Args:
            token_ids: int64 [R], what was sampled.
        """
        last_S = self.last_rows(token_ids)
        return last_S - self._first(token_ids.device), token_ids[last_S]

    def _first(self, device: torch.device) -> Tensor:
        return send(torch.tensor(self.first_rows[:-1], dtype=torch.int64, device="cpu"), device)

    def counting(self, token_ids: Tensor) -> Tensor:
        """Return which rows count, bool [R]."""
        last_S = self.last_rows(token_ids)
        owner = [i for i, (begin, end) in enumerate(self.spans()) for _ in range(begin, end)]
        every = torch.arange(len(token_ids), device=token_ids.device)
        return every <= last_S[send(torch.tensor(owner, dtype=torch.int64, device="cpu"), token_ids.device)]
