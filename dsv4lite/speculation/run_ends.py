"""Where the runs of a step that checked guesses ended, for whoever runs what was planned behind them before anybody knew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from dsv4lite.sampling.state import send
from dsv4lite.scheduling.step_plan import UNKNOWN, SequencePlan, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunEnds:
    """The ends of S runs, on the device.

    Attributes:
        columns: Of each sequence.
        heads: int64 [3, S], of what follows the last right guess: its position, the copy of the carry that holds there, the token.
        drafts: int64 [K, S], guesses of what follows it, ``UNKNOWN`` from where there are none.
    """

    columns: Mapping[int, int]
    heads: Tensor
    drafts: Tensor

    @classmethod
    def behind(cls, sequences: Sequence[SequencePlan], ends: tuple[Tensor, Tensor], drafts_SK: Tensor) -> RunEnds:
        """Return the ends of runs that the host knows.

        Args:
            sequences: The runs.
            ends: How many guesses of each were right, and the token behind them, int64 [S] twice.
            drafts_SK: Of what follows.
        """
        right_S, tokens_S = ends
        firsts = torch.tensor([s.end - s.drafts for s in sequences], dtype=torch.int64, device="cpu")
        starts_S = send(firsts, right_S.device) + right_S
        columns = {s.seq_id: column for column, s in enumerate(sequences)}
        return cls(columns=columns, heads=torch.stack((starts_S, right_S, tokens_S)), drafts=drafts_SK.t())

    def settle(self, plan: StepPlan) -> StepPlan:
        """Return a plan with what its runs begin with where they follow these. Waits for the device."""
        starts, copies, tokens = self.heads.tolist()
        drafts = self.drafts.t().tolist()

        def resolve(s: SequencePlan) -> SequencePlan:
            if s.unresolved is None:
                return s
            at = self.columns[s.seq_id]
            found = takewhile(lambda token_id: token_id != UNKNOWN, drafts[at][: s.drafts])
            return s.resolve(starts[at], (tokens[at], *found), state_copy=copies[at])

        return replace(plan, sequences=tuple(map(resolve, plan.sequences)))
