"""Scheduled spans of a captured step, laid out as rows; a span starts where the host says, or after a span of the previous step.

    follows   = column_S >= 0
    start     = next[0, column] if follows else given             copy of the compressor state: next[1, column] likewise
    drafts    = min(given, drafts in drafts[:, column] before the first -1) if follows else given
    token q   = (next[2], drafts[0], drafts[1], …)[q, column] if follows else given, and for -1 the token sampled last in the slot
    position  = start + q for q = 0 … drafts, else -1, in row s W + q

Numerics: integers.  Shapes: S sequences, W rows of each, C columns, K drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op

FIELDS = 6
"""Rows of ``given_XS`` before the W rows of tokens: position, -1 for padding; slot, -1 for padding; copy of the compressor state;
number of drafts; first window page; column of the previous step's span that it continues, -1 if the host knows its start."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedSpans:
    """Positions and rows of a step's tokens.

    Attributes:
        spans_XS: int32 [3 + W, S]: position, number of drafts, copy of the compressor state, tokens; undefined after the drafts.
        places_S: int64, the slot; for padding the last one.
        rows_S, lens_S: int32, first row, and number of rows with tokens.
        sequence_T, positions_T: int32 [S W].
        tokens_T: int64 [S W].
    """

    spans_XS: Tensor
    places_S: Tensor
    rows_S: Tensor
    lens_S: Tensor
    sequence_T: Tensor
    positions_T: Tensor
    tokens_T: Tensor


@op("spans.triton:place_spans_triton")
def place_spans(given_XS: Tensor, width: int, last_token: Tensor, next_3C: Tensor, drafts_KC: Tensor) -> PlacedSpans:
    """Lay out the spans of a step.

    Args:
        given_XS: int32 [at least FIELDS + W, S].
        last_token: int64 [slots + 1], the token sampled last in each slot.
        next_3C: int64, for each span of the previous step: the next position after its accepted tokens, the copy of the compressor
            state before that position, and the token there.
        drafts_KC: int64, draft tokens after that token; -1 from the first missing one on.
    """
    size, device = given_XS.shape[1], given_XS.device
    start_S, slot_S, copy_S, wanted_S, _, column_S = given_XS[:FIELDS]
    given_QS = given_XS[FIELDS : FIELDS + width]
    places_S = torch.where(slot_S < 0, len(last_token) - 1, slot_S).long()
    follows_S, at_S = column_S >= 0, column_S.clamp_min(0).long()
    next_3S, draft_KS = next_3C[:, at_S].int(), drafts_KC[: width - 1, at_S].int()
    made_S = (draft_KS >= 0).int().cumprod(0).sum(0, dtype=torch.int32)
    found_QS = torch.cat((next_3S[2:], draft_KS, torch.zeros_like(given_QS[1 + len(draft_KS) :])))
    start_S = torch.where(follows_S, next_3S[0], start_S)
    drafts_S = torch.where(follows_S, torch.minimum(made_S, wanted_S), wanted_S)
    tokens_QS = torch.where(follows_S, found_QS, torch.where(given_QS < 0, last_token[places_S].int(), given_QS)).clamp_min(0)
    place_Q, every_T = (torch.arange(n, dtype=torch.int32, device=device) for n in (width, size * width))
    taken_SQ = (start_S[:, None] >= 0) & (place_Q <= drafts_S[:, None])
    return PlacedSpans(
        spans_XS=torch.cat((start_S[None], drafts_S[None], torch.where(follows_S, next_3S[1], copy_S)[None], tokens_QS)),
        places_S=places_S,
        rows_S=every_T[::width].contiguous(),
        lens_S=taken_SQ.sum(1, dtype=torch.int32) if width > 1 else torch.ones_like(start_S),
        sequence_T=every_T // width,
        positions_T=torch.where(taken_SQ, start_S[:, None] + place_Q, -1).flatten(),
        tokens_T=tokens_QS.t().flatten().long(),
    )
