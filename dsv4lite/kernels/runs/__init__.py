"""Runs of a step that checks guesses, laid out as rows: each begins where the host says, or where the one before it has ended.

    behind    = column_S >= 0
    start     = heads[0, column] if behind else told              copy of the accumulators: heads[1, column] likewise
    drafts    = min(told, guesses in drafts[:, column] before the first -1) if behind else told
    token q   = (heads[2], drafts[0], drafts[1], …)[q, column] if behind else told, and for -1 the token sampled last in the slot
    position  = start + q for q = 0 … drafts, else -1, in row s W + q

Numerics: integers.  Shapes: S sequences, W rows of each, C columns, K guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import use_triton

TOLD = 6
"""Lines that say of each run: position, -1 for padding; slot, -1 for padding; copy of the accumulators; number of guesses; first
window page; column of the run that it follows, -1 if the host knows where it begins. A line for each of its W tokens follows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedRuns:
    """Where the rows of a step stand.

    Attributes:
        runs_XS: int32 [3 + W, S]: position, number of guesses, copy of the accumulators, tokens; those behind the guesses are any.
        places_S: int64, the slot; that of padding is the last one.
        rows_S, lens_S: int32, first row and number of rows that are taken.
        sequence_T, positions_T: int32 [S W].
        tokens_T: int64 [S W].
    """

    runs_XS: Tensor
    places_S: Tensor
    rows_S: Tensor
    lens_S: Tensor
    sequence_T: Tensor
    positions_T: Tensor
    tokens_T: Tensor


def place_runs_ref(told_XS: Tensor, width: int, last_token: Tensor, heads_3C: Tensor, drafts_KC: Tensor) -> PlacedRuns:
    """See ``place_runs``."""
    size, device = told_XS.shape[1], told_XS.device
    start_S, slot_S, copy_S, wanted_S, _, column_S = told_XS[:TOLD]
    told_QS = told_XS[TOLD : TOLD + width]
    places_S = torch.where(slot_S < 0, len(last_token) - 1, slot_S).long()
    behind_S, at_S = column_S >= 0, column_S.clamp_min(0).long()
    heads_3S, guess_KS = heads_3C[:, at_S].int(), drafts_KC[: width - 1, at_S].int()
    made_S = (guess_KS >= 0).int().cumprod(0).sum(0, dtype=torch.int32)
    found_QS = torch.cat((heads_3S[2:], guess_KS, torch.zeros_like(told_QS[1 + len(guess_KS) :])))
    start_S = torch.where(behind_S, heads_3S[0], start_S)
    drafts_S = torch.where(behind_S, torch.minimum(made_S, wanted_S), wanted_S)
    tokens_QS = torch.where(behind_S, found_QS, torch.where(told_QS < 0, last_token[places_S].int(), told_QS)).clamp_min(0)
    place_Q, every_T = (torch.arange(n, dtype=torch.int32, device=device) for n in (width, size * width))
    taken_SQ = (start_S[:, None] >= 0) & (place_Q <= drafts_S[:, None])
    return PlacedRuns(
        runs_XS=torch.cat((start_S[None], drafts_S[None], torch.where(behind_S, heads_3S[1], copy_S)[None], tokens_QS)),
        places_S=places_S,
        rows_S=every_T[::width].contiguous(),
        lens_S=taken_SQ.sum(1, dtype=torch.int32) if width > 1 else torch.ones_like(start_S),
        sequence_T=every_T // width,
        positions_T=torch.where(taken_SQ, start_S[:, None] + place_Q, -1).flatten(),
        tokens_T=tokens_QS.t().flatten().long(),
    )


def place_runs(told_XS: Tensor, width: int, last_token: Tensor, heads_3C: Tensor, drafts_KC: Tensor) -> PlacedRuns:
    """Lay out the runs of a step.

    Args:
        told_XS: int32 [at least TOLD + W, S].
        width: W.
        last_token: int64 [slots + 1], the token sampled last in each slot.
        heads_3C: int64, of what follows the last right guess of each run before: its position, the copy of the accumulators that
            holds there, the token.
        drafts_KC: int64, guesses of what follows that, -1 from where there are none.
    """
    if use_triton(told_XS):
        from dsv4lite.kernels.runs.triton import place_runs_triton

        return place_runs_triton(told_XS, width, last_token, heads_3C, drafts_KC)
    return place_runs_ref(told_XS, width, last_token, heads_3C, drafts_KC)
