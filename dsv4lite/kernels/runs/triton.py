"""Kernel of ``place_runs``: a program for a few sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.rows.triton import only_if
from dsv4lite.kernels.runs import TOLD, PlacedRuns

_BLOCK = 32


@triton.jit(do_not_specialize=["size", "columns", "guesses", "padding_place"])
def _place_kernel(
    told, last_token, heads, drafts, runs, places, rows, lens, sequences, positions, tokens,
    size, columns, guesses, padding_place, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOLD: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < size
    start = tl.load(told + s, mask=inside, other=-1)
    slot = tl.load(told + size + s, mask=inside, other=-1)
    copy = tl.load(told + 2 * size + s, mask=inside, other=0)
    wanted = tl.load(told + 3 * size + s, mask=inside, other=0)
    column = tl.load(told + 5 * size + s, mask=inside, other=-1)
    # places_S = where(slot_S < 0, len(last_token) - 1, slot_S)
    place = tl.where(slot < 0, padding_place, slot).to(tl.int64)
    last = tl.load(last_token + place, mask=inside, other=0).to(tl.int32)
    behind = inside & (column >= 0)
    start = tl.where(behind, tl.load(heads + column, mask=behind, other=0).to(tl.int32), start)
    copy = tl.where(behind, tl.load(heads + columns + column, mask=behind, other=0).to(tl.int32), copy)
    head = tl.load(heads + 2 * columns + column, mask=behind, other=0).to(tl.int32)
    going = behind
    made = tl.zeros((BLOCK,), dtype=tl.int32)
    for q in tl.static_range(0, WIDTH):
        told_token = tl.load(told + (TOLD + q) * size + s, mask=inside, other=0)
        token = tl.where(told_token < 0, last, told_token)
        if q == 0:
            token = tl.where(behind, head, token)
        else:
            # made_S = (guess_KS >= 0).cumprod(0).sum(0)
            known = only_if(guesses >= q, behind)
            guess = tl.load(drafts + (q - 1) * columns + column, mask=known, other=-1).to(tl.int32)
            going = going & (guess >= 0)
            made += going.to(tl.int32)
            token = tl.where(behind, guess, token)
        token = tl.maximum(token, 0)
        tl.store(runs + (3 + q) * size + s, token, mask=inside)
        tl.store(tokens + s * WIDTH + q, token.to(tl.int64), mask=inside)
    count = tl.where(behind, tl.minimum(made, wanted), wanted)
    for q in tl.static_range(0, WIDTH):
        taken = (start >= 0) & (q <= count)
        tl.store(positions + s * WIDTH + q, tl.where(taken, start + q, -1), mask=inside)
        tl.store(sequences + s * WIDTH + q, s, mask=inside)
    tl.store(runs + s, start, mask=inside)
    tl.store(runs + size + s, count, mask=inside)
    tl.store(runs + 2 * size + s, copy, mask=inside)
    tl.store(places + s, place, mask=inside)
    tl.store(rows + s, s * WIDTH, mask=inside)
    length = tl.minimum(count + 1, WIDTH)
    if WIDTH > 1:
        length = tl.where(start >= 0, length, 0)
    tl.store(lens + s, length, mask=inside)


def place_runs_triton(told_XS: Tensor, width: int, last_token: Tensor, heads_3C: Tensor, drafts_KC: Tensor) -> PlacedRuns:
    """See ``runs.place_runs``."""
    size, device = told_XS.shape[1], told_XS.device
    assert told_XS.is_contiguous() and heads_3C.is_contiguous() and drafts_KC.is_contiguous()
    assert heads_3C.shape[1] == drafts_KC.shape[1] and told_XS.dtype == torch.int32

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    placed = PlacedRuns(
        runs_XS=empty(3 + width, size),
        places_S=empty(size, dtype=torch.int64),
        rows_S=empty(size),
        lens_S=empty(size),
        sequence_T=empty(size * width),
        positions_T=empty(size * width),
        tokens_T=empty(size * width, dtype=torch.int64),
    )
    _place_kernel[(triton.cdiv(size, _BLOCK),)](
        told_XS,
        last_token,
        heads_3C,
        drafts_KC,
        placed.runs_XS,
        placed.places_S,
        placed.rows_S,
        placed.lens_S,
        placed.sequence_T,
        placed.positions_T,
        placed.tokens_T,
        size,
        heads_3C.shape[1],
        drafts_KC.shape[0],
        len(last_token) - 1,
        WIDTH=width,
        BLOCK=_BLOCK,
        TOLD=TOLD,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return placed
