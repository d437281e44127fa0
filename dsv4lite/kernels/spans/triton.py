"""Kernel of ``place_spans``: one program for 32 spans."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div
from dsv4lite.kernels.rows.triton import only_if
from dsv4lite.kernels.spans import FIELDS, PlacedSpans

_BLOCK = tl.constexpr(32)  # spans of one program
_FIELDS = tl.constexpr(FIELDS)


@triton.jit(do_not_specialize=["size", "columns", "num_drafts", "padding_place"])
def _place_kernel(
    given, last_token, following, drafts, spans, places, rows, lens, sequences, positions, tokens,
    size, columns, num_drafts, padding_place, WIDTH: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = s < size
    start = tl.load(given + s, mask=inside, other=-1)
    slot = tl.load(given + size + s, mask=inside, other=-1)
    copy = tl.load(given + 2 * size + s, mask=inside, other=0)
    wanted = tl.load(given + 3 * size + s, mask=inside, other=0)
    column = tl.load(given + 5 * size + s, mask=inside, other=-1)
    # places_S = where(slot_S < 0, len(last_token) - 1, slot_S)
    place = tl.where(slot < 0, padding_place, slot).to(tl.int64)
    last = tl.load(last_token + place, mask=inside, other=0).to(tl.int32)
    follows = inside & (column >= 0)
    start = tl.where(follows, tl.load(following + column, mask=follows, other=0).to(tl.int32), start)
    copy = tl.where(follows, tl.load(following + columns + column, mask=follows, other=0).to(tl.int32), copy)
    next_token = tl.load(following + 2 * columns + column, mask=follows, other=0).to(tl.int32)
    more = follows
    made = tl.zeros((_BLOCK,), dtype=tl.int32)
    for q in tl.static_range(0, WIDTH):
        given_token = tl.load(given + (_FIELDS + q) * size + s, mask=inside, other=0)
        token = tl.where(given_token < 0, last, given_token)
        if q == 0:
            token = tl.where(follows, next_token, token)
        else:
            # made_S = (draft_KS >= 0).cumprod(0).sum(0)
            known = only_if(num_drafts >= q, follows)
            draft = tl.load(drafts + (q - 1) * columns + column, mask=known, other=-1).to(tl.int32)
            more = more & (draft >= 0)
            made += more.to(tl.int32)
            token = tl.where(follows, draft, token)
        token = tl.maximum(token, 0)
        tl.store(spans + (3 + q) * size + s, token, mask=inside)
        tl.store(tokens + s * WIDTH + q, token.to(tl.int64), mask=inside)
    count = tl.where(follows, tl.minimum(made, wanted), wanted)
    for q in tl.static_range(0, WIDTH):
        taken = (start >= 0) & (q <= count)
        tl.store(positions + s * WIDTH + q, tl.where(taken, start + q, -1), mask=inside)
        tl.store(sequences + s * WIDTH + q, s, mask=inside)
    tl.store(spans + s, start, mask=inside)
    tl.store(spans + size + s, count, mask=inside)
    tl.store(spans + 2 * size + s, copy, mask=inside)
    tl.store(places + s, place, mask=inside)
    tl.store(rows + s, s * WIDTH, mask=inside)
    length = tl.minimum(count + 1, WIDTH)
    if WIDTH > 1:
        length = tl.where(start >= 0, length, 0)
    tl.store(lens + s, length, mask=inside)


def place_spans_triton(given_XS: Tensor, width: int, last_token: Tensor, next_3C: Tensor, drafts_KC: Tensor) -> PlacedSpans:
    """See ``place_spans``."""
    size, device = given_XS.shape[1], given_XS.device
    assert given_XS.is_contiguous() and next_3C.is_contiguous() and drafts_KC.is_contiguous()
    assert next_3C.shape[1] == drafts_KC.shape[1] and given_XS.dtype == torch.int32

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    placed = PlacedSpans(
        spans_XS=empty(3 + width, size),
        places_S=empty(size, dtype=torch.int64),
        rows_S=empty(size),
        lens_S=empty(size),
        sequence_T=empty(size * width),
        positions_T=empty(size * width),
        tokens_T=empty(size * width, dtype=torch.int64),
    )
    _place_kernel[(ceil_div(size, _BLOCK.value),)](
        given_XS,
        last_token,
        next_3C,
        drafts_KC,
        placed.spans_XS,
        placed.places_S,
        placed.rows_S,
        placed.lens_S,
        placed.sequence_T,
        placed.positions_T,
        placed.tokens_T,
        size,
        next_3C.shape[1],
        drafts_KC.shape[0],
        len(last_token) - 1,
        WIDTH=width,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return placed
