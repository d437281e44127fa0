"""State on the device after a step: accepted lengths, from which the next step starts, and the inputs of the drafter.

If steps and drafter passes are captured, both are tensors at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import send
from dsv4lite.models.batch import Batch
from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.scheduling.step_plan import NO_PAGE, UNKNOWN, SequencePlan, StepPlan

Choose = Callable[[Tensor, Tensor], Tensor]
"""Chooses a draft token per sequence, int64 [S], from logits float32 [S, V] and the position before the token, int32 [S]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptedLengths:
    """Accepted lengths of a step, kept on the device so that the next step can start from them.

    Attributes:
        columns: Column of each sequence, by its id.
        next_3S: int64 [3, S]: the next position; the number of accepted draft tokens, which is also the compressor-state copy to
            continue from; the next token.
        drafts_KS: int64 [K, S], draft tokens after the next token, ``UNKNOWN`` where there are none.
    """

    columns: Mapping[int, int]
    next_3S: Tensor
    drafts_KS: Tensor

    @classmethod
    def of(cls, sequences: Sequence[SequencePlan], accepted: tuple[Tensor, Tensor], drafts_SK: Tensor) -> AcceptedLengths:
        """Return the accepted lengths of a step whose plan the host has resolved.

        Args:
            sequences: The sequences that sampled.
            accepted: Number of accepted draft tokens of each, and the token after them, int64 [S] twice.
            drafts_SK: int64 [S, K], draft tokens after that token.
        """
        accepted_S, tokens_S = accepted
        firsts = torch.tensor([s.end - s.drafts for s in sequences], dtype=torch.int64, device="cpu")
        next_S = send(firsts, accepted_S.device) + accepted_S
        columns = {s.seq_id: column for column, s in enumerate(sequences)}
        return cls(columns=columns, next_3S=torch.stack((next_S, accepted_S, tokens_S)), drafts_KS=drafts_SK.t())

    def resolve(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the positions and tokens of its unresolved spans. Waits for the device."""
        starts, copies, tokens = self.next_3S.tolist()
        drafts = self.drafts_KS.t().tolist()

        def resolved(s: SequencePlan) -> SequencePlan:
            if s.unresolved is None:
                return s
            column = self.columns[s.seq_id]
            assert s.start <= starts[column] <= s.start + s.unresolved
            known = tuple(takewhile(lambda token_id: token_id != UNKNOWN, drafts[column][: s.drafts]))
            token_ids, state_copy = (tokens[column], *known), copies[column]
            return s._replace(start=starts[column], token_ids=token_ids, drafts=len(known), state_copy=state_copy, unresolved=None)

        return replace(plan, sequences=tuple(map(resolved, plan.sequences)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftState:
    """Inputs of a drafter pass over S sequences; the pass advances the first three.

    Attributes:
        streams_SND: Final streams of the main model, or of the drafter's last pass, at ``positions_S``.
        tokens_S: int64, the token after that position.
        positions_S: int64; -1 is padding.
        slots_S: int32, -1 for padding.
        window_SP: int32, window pages of the step, ``NO_PAGE`` where there are none.
        window_first_S: int32, logical number of the first window page.
        grow_SP: int32, grow pages of the step, then ``NO_PAGE``: they hold the drafter's rows if the model has no sliding window.
            Otherwise ``None``.
        most: If replicas share experts, sequences of the replica with the most.
    """

    streams_SND: Tensor
    tokens_S: Tensor
    positions_S: Tensor
    slots_S: Tensor
    window_SP: Tensor
    window_first_S: Tensor
    grow_SP: Tensor | None = None
    most: int | None = None

    @classmethod
    def empty(cls, sequences: int, pages: int, like_ND: Tensor, *, grow: int = 0) -> DraftState:
        """Allocate a state of padding, with ``pages`` window pages per sequence and, without sliding window, ``grow`` pages."""
        device = like_ND.device
        return cls(
            streams_SND=like_ND.new_zeros(sequences, *like_ND.shape),
            tokens_S=torch.zeros(sequences, dtype=torch.int64, device=device),
            positions_S=torch.full((sequences,), -1, dtype=torch.int64, device=device),
            slots_S=torch.full((sequences,), -1, dtype=torch.int32, device=device),
            window_SP=torch.full((sequences, pages), NO_PAGE, dtype=torch.int32, device=device),
            window_first_S=torch.zeros(sequences, dtype=torch.int32, device=device),
            grow_SP=torch.full((sequences, grow), NO_PAGE, dtype=torch.int32, device=device) if grow else None,
        )

    @classmethod
    def after(
        cls, plans: Sequence[SequencePlan], begins: Sequence[int], streams_TND: Tensor, accepted: tuple[Tensor, Tensor], most: int
    ) -> DraftState:
        """Return the state after a step whose plan the host has resolved.

        Args:
            plans: Plans of the sequences that sampled.
            begins: Row of each sequence's last token before its draft tokens.
            streams_TND: Final streams of the main model.
            accepted: Number of accepted draft tokens of each, and the token after them, int64 [S] twice.
            most: See the class.
        """
        accepted_S, tokens_S = accepted
        windows = any(s.window_pages for s in plans)
        pages = [s.window_pages if windows else s.pages for s in plans]
        width = max(map(len, pages))
        lines = [
            (begin, s.end - 1 - s.drafts, s.slot, s.window_first, *held, *[NO_PAGE] * (width - len(held)))
            for s, begin, held in zip(plans, begins, pages, strict=True)
        ]
        table = send(torch.tensor(lines, dtype=torch.int64, device="cpu"), tokens_S.device)
        begin_S, start_S, slots_S, first_S = table[:, :4].unbind(dim=1)
        return cls(
            streams_SND=streams_TND[begin_S + accepted_S],
            tokens_S=tokens_S.clone(),
            positions_S=start_S + accepted_S,
            slots_S=slots_S.int(),
            window_SP=table[:, 4 : 4 + width * windows].int(),
            window_first_S=first_S.int(),
            grow_SP=None if windows else table[:, 4:].int(),
            most=most,
        )

    def first(self, count: int) -> DraftState:
        """Return a view of the first ``count`` sequences."""
        return DraftState(
            streams_SND=self.streams_SND[:count],
            tokens_S=self.tokens_S[:count],
            positions_S=self.positions_S[:count],
            slots_S=self.slots_S[:count],
            window_SP=self.window_SP[:count],
            window_first_S=self.window_first_S[:count],
            grow_SP=None if self.grow_SP is None else self.grow_SP[:count],
            most=count,  # other ranks replay the same pass
        )

    def start(self, batch: Batch, streams_TND: Tensor, tokens_SQ: Tensor) -> None:
        """Write the state after a step of Q rows per sequence; the accepted draft tokens are counted on the device.

        Args:
            batch: The step; sequences with fewer than Q tokens are padded.
            streams_TND: Final streams of the main model.
            tokens_SQ: int64, the token sampled from each row.
        """
        paging = batch.paging
        given_SQ = batch.token_ids_T.view_as(tokens_SQ)
        place_Q = torch.arange(tokens_SQ.shape[1] - 1, device=tokens_SQ.device)
        accepted_SQ = (tokens_SQ[:, :-1] == given_SQ[:, 1:]) & (place_Q < paging.drafts_S[:, None])
        accepted_S = accepted_SQ.long().cumprod(1).sum(1)
        rows_S = paging.rows_S + accepted_S
        self.streams_SND.copy_(streams_TND[rows_S])
        self.tokens_S.copy_(tokens_SQ.flatten()[rows_S])
        self.positions_S.copy_(torch.where(paging.slots_S < 0, -1, paging.first_S + accepted_S))
        self.slots_S.copy_(paging.slots_S)
        self.window_SP.copy_(paging.window_SP)
        self.window_first_S.copy_(paging.window_first_S)
        if self.grow_SP is not None:  # after a sequence's end, its row of the table has old entries
            last_S = (paging.first_S + paging.lens_S - 1) // PAGE_TOKENS
            held_SP = torch.arange(self.grow_SP.shape[1], device=last_S.device) <= last_S[:, None]
            self.grow_SP.copy_(torch.where(held_SP, paging.grow_SP, NO_PAGE))

    def advance(self, streams_SND: Tensor, tokens_S: Tensor) -> None:
        """Move to the next position."""
        self.streams_SND.copy_(streams_SND)
        self.tokens_S.copy_(tokens_S)
        self.positions_S.add_(self.positions_S >= 0)
