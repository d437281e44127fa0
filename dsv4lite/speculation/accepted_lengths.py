"""Accepted lengths of a verify step, kept on the device so that the next step can start from them before the host knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from dsv4lite.sampling.state import send
from dsv4lite.scheduling.step_plan import UNKNOWN, SequencePlan, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptedLengths:
    """Where S sequences continue after a step, on the device.

    Attributes:
        columns: Column of each sequence, by its id.
        next_3S: int64 [3, S]: the next position; the copy of the compressor state to continue from, which is the number of
            accepted draft tokens; the next token.
        drafts_KS: int64 [K, S], draft tokens that follow it, ``UNKNOWN`` where there are none.
    """

    columns: Mapping[int, int]
    next_3S: Tensor
    drafts_KS: Tensor

    @classmethod
    def of(cls, sequences: Sequence[SequencePlan], accepted: tuple[Tensor, Tensor], drafts_SK: Tensor) -> AcceptedLengths:
        """Return the accepted lengths of a step whose plan the host has resolved.

        Args:
            sequences: Those that sampled.
            accepted: Number of accepted draft tokens of each, and the token that follows them, int64 [S] twice.
            drafts_SK: int64 [S, K], draft tokens that follow it.
        """
        accepted_S, tokens_S = accepted
        firsts = torch.tensor([s.end - s.drafts for s in sequences], dtype=torch.int64, device="cpu")
        next_S = send(firsts, accepted_S.device) + accepted_S
        columns = {s.seq_id: column for column, s in enumerate(sequences)}
        return cls(columns=columns, next_3S=torch.stack((next_S, accepted_S, tokens_S)), drafts_KS=drafts_SK.t())

    def resolve(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the positions and tokens of the sequences that continue from here. Waits for the device."""
        starts, copies, tokens = self.next_3S.tolist()
        drafts = self.drafts_KS.t().tolist()

        def resolved(s: SequencePlan) -> SequencePlan:
            if s.unresolved is None:
                return s
            column = self.columns[s.seq_id]
            known = takewhile(lambda token_id: token_id != UNKNOWN, drafts[column][: s.drafts])
            return s.resolve(starts[column], (tokens[column], *known), state_copy=copies[column])

        return replace(plan, sequences=tuple(map(resolved, plan.sequences)))
