"""Streaming pooling of tokens into compressed entries.

    c_w[ch] = sum_t softmax_t(s_t[ch]) u_t[ch]        over the tokens of group w, per channel

A softmax streams: three accumulators per channel, (peak, sum, weighted sum), take the tokens one after the other in position
order, in prefill and decode alike, so that no cut of a prompt into chunks changes a bit. They are the compressor state.

Without overlap (any ratio but 4) an entry pools its group's r tokens. With overlap (ratio 4) u and s have two halves: an entry
pools the lower halves of the previous group and the upper halves of its own, so a sequence has two sets of accumulators:

    state[0]   the entry in progress        starts as the previous group's state[1]
    state[1]   lower halves of the current group, for the next entry

Source: DeepSeek-V4 specification 3.5.  Numerics: float32; within 1e-6 of the softmax over all tokens at once. The kernel does the
same operations in the same order with another exponential: accumulators and pooled entries are within 2e-6 of the reference's,
relative to the largest value of the group, and about one number in 10^3 of a packed row is the neighbouring one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.quantize import hadamard as hadamard_transform
from dsv4lite.kernels.rope import rope
from dsv4lite.kernels.rows import RowStore, UnquantizedRow

OVERLAP_RATIO = 4
PAGE_TOKENS = 256


class Segments(NamedTuple):
    """The parts of groups that a step's tokens fall into; segments of one sequence are consecutive.

    Attributes:
        tokens_GL: int64, batch rows of each segment's tokens, in order; what is missing at the end repeats a valid row.
        missing_GL: bool, those places; ``None`` if there are none.
        first_G: bool, the sequence's first segment, which continues from its compressor state.
        sequence_G: int64, index of the sequence in the step.
        last_S: int64, each sequence's last segment.
        open_S: bool, whether that segment's group remains unfinished.
        closed_E: int64, segments whose group closes and whose entry is wanted, one each.
        positions_E: int64, position of the first token of each closed group.
    """

    tokens_GL: Tensor
    missing_GL: Tensor | None
    first_G: Tensor
    sequence_G: Tensor
    last_S: Tensor
    open_S: Tensor
    closed_E: Tensor
    positions_E: Tensor


def make_segments(
    starts_S: Tensor, lens_S: Tensor, ratio: int, *, rows_S: Tensor | None = None, whole_S: Tensor | None = None
) -> Segments:
    """Cut the tokens of a step at the boundaries of groups.

    Args:
        starts_S: int64, first position of each scheduled span.
        lens_S: int64, its tokens.
        ratio: Tokens of a group.
        rows_S: int64, batch row of its first token; by default spans follow each other.
        whole_S: bool, spans whose entries are wanted; by default all.
    """
    device = starts_S.device
    rows_S = lens_S.cumsum(0) - lens_S if rows_S is None else rows_S
    ends_S = starts_S + lens_S
    first_group = starts_S // ratio
    count_S = (ends_S - 1) // ratio - first_group + 1
    before_S = count_S.cumsum(0) - count_S
    sequence_G = torch.repeat_interleave(torch.arange(len(starts_S), device=device), count_S)
    group_G = first_group[sequence_G] + torch.arange(len(sequence_G), device=device) - before_S[sequence_G]
    begin_G = torch.maximum(group_G * ratio, starts_S[sequence_G])
    end_G = torch.minimum((group_G + 1) * ratio, ends_S[sequence_G])
    row_G = (rows_S - starts_S)[sequence_G] + begin_G
    size_G = end_G - begin_G
    place_L = torch.arange(int(size_G.max()), device=device)
    missing_GL = place_L >= size_G[:, None]
    tokens_GL = row_G[:, None] + torch.minimum(place_L, (size_G - 1)[:, None])
    closed_G = end_G == (group_G + 1) * ratio
    last_S = before_S + count_S - 1
    closed_E = (closed_G if whole_S is None else closed_G & whole_S[sequence_G]).nonzero()[:, 0]
    return Segments(
        tokens_GL=tokens_GL,
        missing_GL=missing_GL if bool(missing_GL.any()) else None,
        first_G=begin_G == starts_S[sequence_G],
        sequence_G=sequence_G,
        last_S=last_S,
        open_S=~closed_G[last_S],
        closed_E=closed_E,
        positions_E=group_G[closed_E] * ratio,
    )


def empty_state(*shape: int, device: torch.device | None = None) -> Tensor:
    """Return accumulators float32 [*shape, 3, C] (last of ``shape`` is C) that have seen no token."""
    state = torch.zeros(*shape[:-1], 3, shape[-1], dtype=torch.float32, device=device)
    state[..., 0, :] = float("-inf")
    return state


def _accumulate(state: Tensor, scores_GLC: Tensor, values_GLC: Tensor) -> Tensor:
    """Add L tokens, one after the other, to accumulators [G, 3, C]; a score of -inf adds nothing and changes no bit."""
    peak, total, weighted = state.unbind(1)
    for score, value in zip(scores_GLC.unbind(1), values_GLC.unbind(1), strict=True):
        new_peak = torch.maximum(peak, score)
        shrink, gain = torch.exp(peak - new_peak), torch.exp(score - new_peak)
        total = total * shrink + gain
        weighted = weighted * shrink + gain * value
        peak = new_peak
    return torch.stack([peak, total, weighted], 1)


def compress(values_TK: Tensor, scores_TK: Tensor, state_SA3C: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Pool a step's tokens into the entries that close in it.

    Args:
        values_TK: float32 [T, C] without, [T, 2 C] with overlap (lower half first).
        scores_TK: The same shape, position term included.
        state_SA3C: float32 [S, A, 3, C], compressor state of each sequence before the step; A = 2 with overlap, else 1.
        segments: From ``make_segments`` with this compressor's ratio.

    Returns:
        Pooled entries float32 [E, C], and the state after the step.
    """
    scores, values = scores_TK[segments.tokens_GL], values_TK[segments.tokens_GL]
    if segments.missing_GL is not None:
        scores = scores.masked_fill(segments.missing_GL[..., None], float("-inf"))
    width = state_SA3C.shape[-1]
    started = segments.first_G[:, None, None]
    state_GA3C = state_SA3C[segments.sequence_G]
    fresh = empty_state(1, width, device=values_TK.device)
    if state_SA3C.shape[1] == 1:
        done = _accumulate(torch.where(started, state_GA3C[:, 0], fresh), scores, values)
        after = torch.where(segments.open_S[:, None, None], done[segments.last_S], fresh)[:, None]
    else:
        lower = _accumulate(torch.where(started, state_GA3C[:, 1], fresh), scores[..., :width], values[..., :width])
        previous = torch.cat([fresh, lower[:-1]])
        done = _accumulate(torch.where(started, state_GA3C[:, 0], previous), scores[..., width:], values[..., width:])
        is_open = segments.open_S[:, None, None]
        last_lower = lower[segments.last_S]
        after = torch.stack([torch.where(is_open, done[segments.last_S], last_lower), torch.where(is_open, last_lower, fresh)], 1)
    closed = done[segments.closed_E]
    return closed[:, 2] / closed[:, 1], after


class CompressInputs(NamedTuple):
    """What ``compress_step`` takes.

    Attributes:
        projected: float32 [T, 2 columns or more], rows of any stride: values, then scores without their position term.
        ape: float32 [ratio, columns], the position term; columns = C without, 2 C with overlap.
        norm_weight: float32 [C].
        state: float32 [slots, copies, A, 3, C], changed in place where ``paging`` names a slot; one copy more than drafts.
        store: Entries, ``256 / ratio`` rows a page; the page of an entry follows from ``paging.grow_SP``.
        paging: Positions, slots and pages of the tokens.
        ratio: Tokens of a group.
        cos_T, sin_T: float32 [T, rope / 2], angles of the first position of each token's group.
        eps: Of the norm.
        hadamard: Transform the entry before it is packed.
    """

    projected: Tensor
    ape: Tensor
    norm_weight: Tensor
    state: Tensor
    store: RowStore
    paging: Paging
    ratio: int
    cos_T: Tensor
    sin_T: Tensor
    eps: float
    hadamard: bool


@op("compress.triton:compress_step_triton")
def compress_step(given: CompressInputs) -> None:
    """Advance every sequence's compressor state, and store the entries that close: normed, rotated, packed."""
    projected, ape, norm_weight, state, store, paging, ratio, cos_T, sin_T, eps, hadamard = given
    spans = paging.once(("spans", ratio), lambda: _spans(paging, ratio))
    if spans is None:
        return
    columns, segments = ape.shape[1], spans.segments
    values, scores = projected[:, :columns], projected[:, columns : 2 * columns] + ape[spans.phase_T]
    pooled, after = compress(values, scores, state[spans.slots_P, spans.from_P], segments)
    state[spans.slots_P, spans.to_P] = after.detach()

    dtype = store.format.dtype if isinstance(store.format, UnquantizedRow) else torch.bfloat16
    entries = rope(rms_norm(pooled.to(dtype), norm_weight, eps), cos_T[spans.closing_E], sin_T[spans.closing_E])
    store.write(spans.addresses_E, hadamard_transform(entries) if hadamard else entries)


class _Spans(NamedTuple):
    """What the compressors of one ratio share in a step.

    A span of tokens of which d are drafts counts 1 + d times: without drafts, with the first one, and so on. Each of these P
    prefixes writes the state after it to a copy of its own.

    Attributes:
        segments: Of the prefixes; entries are those of whole spans.
        phase_T: int64, position within the group.
        slots_P, from_P, to_P: int64, slot, and copies of the state that a prefix starts from and writes.
        closing_E: int64, the row of a token in each group that closes.
        addresses_E: int64, where its entry goes.
    """

    segments: Segments
    phase_T: Tensor
    slots_P: Tensor
    from_P: Tensor
    to_P: Tensor
    closing_E: Tensor
    addresses_E: Tensor


def _spans(paging: Paging, ratio: int) -> _Spans | None:
    """Work out ``_Spans``; ``None`` if a step is all padding."""
    present = ((paging.slots_S >= 0) & (paging.lens_S > 0)).nonzero()[:, 0]
    if not len(present):
        return None
    counts_S = paging.drafts_S[present].long() + 1
    owner_P = torch.repeat_interleave(present, counts_S)
    to_P = torch.arange(len(owner_P), device=present.device) - torch.repeat_interleave(counts_S.cumsum(0) - counts_S, counts_S)
    starts_P, lens_P, slots_P, rows_P, drafts_P, from_P = (
        part[owner_P].long()
        for part in (paging.first_S, paging.lens_S, paging.slots_S, paging.rows_S, paging.drafts_S, paging.state_copy_S)
    )
    segments = make_segments(starts_P, lens_P - drafts_P + to_P, ratio, rows_S=rows_P, whole_S=to_P == drafts_P)
    sequence_E, index_E, rows = owner_P[segments.sequence_G[segments.closed_E]], segments.positions_E // ratio, PAGE_TOKENS // ratio
    return _Spans(
        segments=segments,
        phase_T=paging.positions_T.long() % ratio,
        slots_P=slots_P,
        from_P=from_P,
        to_P=to_P,
        closing_E=segments.tokens_GL[segments.closed_E, -1],
        addresses_E=paging.grow_SP[sequence_E, index_E // rows].long() * rows + index_E % rows,
    )
