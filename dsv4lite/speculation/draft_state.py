"""Where guesses of sequences begin, and go on: tensors that a recorded round of guessing finds in the same places every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.models.family import Batch
from dsv4lite.sampling.state import send
from dsv4lite.scheduling.step_plan import NO_PAGE, SequencePlan

Choose = Callable[[Tensor, Tensor], Tensor]
"""Chooses a guess of each sequence, int64 [S], from logits float32 [S, V] and the positions before the guesses, int32 [S]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """The S sequences that are guessed for; a round of guesses changes the first three.

    Attributes:
        streams_SND: The last ones of the main model, or of the drafter.
        tokens_S: int64, the token that follows them.
        positions_S: int64, where they are; -1 is padding.
        slots_S: int32, -1 for padding.
        window_SP: int32, window pages of the step before, ``NO_PAGE`` where there are none.
        window_first_S: int32, logical number of the first of them.
        plans: Of the step before, for drafters whose ops ask the host.
        most: Where replicas share experts, sequences of the one with the most.
    """

    streams_SND: Tensor
    tokens_S: Tensor
    positions_S: Tensor
    slots_S: Tensor
    window_SP: Tensor
    window_first_S: Tensor
    plans: tuple[SequencePlan, ...] = ()
    most: int | None = None

    @classmethod
    def empty(cls, sequences: int, pages: int, like_ND: Tensor) -> Chain:
        """Return places for so many sequences, and window pages of each, all of them padding."""
        device = like_ND.device
        return cls(
            streams_SND=like_ND.new_zeros(sequences, *like_ND.shape),
            tokens_S=torch.zeros(sequences, dtype=torch.int64, device=device),
            positions_S=torch.full((sequences,), -1, dtype=torch.int64, device=device),
            slots_S=torch.full((sequences,), -1, dtype=torch.int32, device=device),
            window_SP=torch.full((sequences, pages), NO_PAGE, dtype=torch.int32, device=device),
            window_first_S=torch.zeros(sequences, dtype=torch.int32, device=device),
        )

    @classmethod
    def behind(
        cls, plans: Sequence[SequencePlan], begins: Sequence[int], streams_TND: Tensor, ends: tuple[Tensor, Tensor], most: int
    ) -> Chain:
        """Begin behind a step of which the host knows the plan.

        Args:
            plans: Of the sequences that sampled.
            begins: The row of the last token of each before its drafts.
            streams_TND: The main model's.
            ends: How many drafts of each were right, and the token behind them, int64 [S] twice.
            most: Sequences of the replica with the most.
        """
        behind_S, tokens_S = ends
        width = max(len(s.window_pages) for s in plans)
        lines = [
            (begin, s.end - 1 - s.drafts, s.slot, s.window_first, *s.window_pages, *[NO_PAGE] * (width - len(s.window_pages)))
            for s, begin in zip(plans, begins, strict=True)
        ]
        table = send(torch.tensor(lines, dtype=torch.int64, device="cpu"), tokens_S.device)
        begin_S, start_S, slots_S, first_S = table[:, :4].unbind(dim=1)
        return cls(
            streams_SND=streams_TND[begin_S + behind_S],
            tokens_S=tokens_S.clone(),
            positions_S=start_S + behind_S,
            slots_S=slots_S.int(),
            window_SP=table[:, 4:].int(),
            window_first_S=first_S.int(),
            plans=tuple(plans),
            most=most,
        )

    def first(self, count: int) -> Chain:
        """Return the first sequences, in the same memory."""
        return Chain(
            streams_SND=self.streams_SND[:count],
            tokens_S=self.tokens_S[:count],
            positions_S=self.positions_S[:count],
            slots_S=self.slots_S[:count],
            window_SP=self.window_SP[:count],
            window_first_S=self.window_first_S[:count],
            most=count,  # others replay the same round
        )

    def begin(self, batch: Batch, streams_TND: Tensor, tokens_SQ: Tensor) -> None:
        """Begin behind a step of runs of Q rows each, of which nobody but the device knows how many count.

        Args:
            batch: The step; a sequence that needs less than Q rows has padding behind them.
            streams_TND: The main model's.
            tokens_SQ: int64, what was sampled from each row.
        """
        paging = batch.paging
        given_SQ = batch.token_ids_T.view_as(tokens_SQ)
        place_Q = torch.arange(tokens_SQ.shape[1] - 1, device=tokens_SQ.device)
        right_SQ = (tokens_SQ[:, :-1] == given_SQ[:, 1:]) & (place_Q < paging.drafts_S[:, None])
        behind_S = right_SQ.long().cumprod(1).sum(1)
        rows_S = paging.rows_S + behind_S
        self.streams_SND.copy_(streams_TND[rows_S])
        self.tokens_S.copy_(tokens_SQ.flatten()[rows_S])
        self.positions_S.copy_(torch.where(paging.slots_S < 0, -1, paging.first_S + behind_S))
        self.slots_S.copy_(paging.slots_S)
        self.window_SP.copy_(paging.window_SP)
        self.window_first_S.copy_(paging.window_first_S)

    def advance(self, streams_SND: Tensor, tokens_S: Tensor) -> None:
        """Go on one position farther."""
        self.streams_SND.copy_(streams_SND)
        self.tokens_S.copy_(tokens_S)
        self.positions_S.add_(self.positions_S >= 0)
