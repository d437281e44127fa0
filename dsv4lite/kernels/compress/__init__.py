"""Streaming pooling of tokens into compressed entries.

    c_w[ch] = sum_t softmax_t(s_t[ch]) u_t[ch]        over the tokens of group w, per channel

The softmax is computed online: three accumulators per channel, (peak, sum, weighted sum), take the tokens one by one in position
order, in prefill and decode. So chunked prefill does not change a bit. The accumulators are the compressor state.

Without overlap (any ratio but 4) an entry pools its group's r tokens. With overlap (ratio 4) u and s have two halves: an entry
pools the lower halves of the previous group and the upper halves of its own, so a sequence has two sets of accumulators:

    state[0]   the entry in progress        starts as the previous group's state[1]
    state[1]   lower halves of the current group, for the next entry

Source: DeepSeek-V4 specification 3.5.  Numerics: float32; within 1e-6 of the softmax over all tokens at once. The kernel runs the
same operations in the same order with another exponential: accumulators and pooled entries are within 2e-6 of the reference's,
relative to the largest value of the group, and about one number in 10^3 of a packed row is rounded to the neighbouring value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.quantize import hadamard as hadamard_transform
from dsv4lite.kernels.rope import rope
from dsv4lite.kernels.rows import GradientStore, RowStore, UnquantizedRow

OVERLAP_RATIO = 4
PAGE_TOKENS = 256


class Segments(NamedTuple):
    """A step's tokens divided by groups: a segment is a sequence's tokens of one group. Segments of one sequence are consecutive.

    Attributes:
        tokens_GL: int64, batch rows of each segment's tokens, in order; padded at the end with a valid row.
        missing_GL: bool, which places are padding; ``None`` if there is none.
        first_G11: bool, whether this is the sequence's first segment, which continues from its compressor state.
        sequence_G: int64, index of the sequence in the step.
        last_S: int64, each sequence's last segment.
        open_S11: bool, whether that segment's group is incomplete.
        closed_E: int64, segments that complete a group whose entry is wanted.
        positions_E: int64, position of the first token of each of these groups.
    """

    tokens_GL: Tensor
    missing_GL: Tensor | None
    first_G11: Tensor
    sequence_G: Tensor
    last_S: Tensor
    open_S11: Tensor
    closed_E: Tensor
    positions_E: Tensor


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a step.

    Attributes:
        start: Position of the first one.
        tokens: Number of tokens, at least 1.
        row: Batch row of the first one.
        whole: Whether the entries of the groups that it completes are wanted.
    """

    start: int
    tokens: int
    row: int = 0
    whole: bool = True


def make_segments(spans: Sequence[Span], ratio: int, device: torch.device | None = None) -> Segments:
    """Cut the tokens of spans at the boundaries of groups of ``ratio`` tokens."""
    rows: list[int] = []
    sizes, sequences, first, last, is_open, closed, positions = [], [], [], [], [], [], []
    for sequence, span in enumerate(spans):
        end = span.start + span.tokens
        for group_start in range(span.start - span.start % ratio, end, ratio):
            begin, stop = max(group_start, span.start), min(group_start + ratio, end)
            if span.whole and stop == group_start + ratio:
                closed.append(len(rows))
                positions.append(group_start)
            rows.append(span.row + begin - span.start)
            sizes.append(stop - begin)
            sequences.append(sequence)
            first.append(begin == span.start)
        last.append(len(rows) - 1)
        is_open.append(end % ratio != 0)

    def ints(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    longest = max(sizes)
    place_L, size_G1 = torch.arange(longest, device=device), ints(sizes)[:, None]
    return Segments(
        tokens_GL=ints(rows)[:, None] + torch.minimum(place_L, size_G1 - 1),
        missing_GL=place_L >= size_G1 if min(sizes) < longest else None,
        first_G11=torch.tensor(first, dtype=torch.bool, device=device)[:, None, None],
        sequence_G=ints(sequences),
        last_S=ints(last),
        open_S11=torch.tensor(is_open, dtype=torch.bool, device=device)[:, None, None],
        closed_E=ints(closed),
        positions_E=ints(positions),
    )


def empty_state(*shape: int, device: torch.device | None = None) -> Tensor:
    """Return accumulators of no tokens, float32 [*shape[:-1], 3, C] for ``shape`` [..., C]."""
    state = torch.zeros(*shape[:-1], 3, shape[-1], dtype=torch.float32, device=device)
    state[..., 0, :] = float("-inf")
    return state


def _accumulate(state: Tensor, scores_GLC: Tensor, values_GLC: Tensor) -> Tensor:
    """Add L tokens, one by one, to accumulators [G, 3, C]; a score of -inf changes no bit."""
    peak, total, weighted = state.unbind(1)
    for score, value in zip(scores_GLC.unbind(1), values_GLC.unbind(1), strict=True):
        new_peak = torch.maximum(peak, score)
        shrink, gain = torch.exp(peak - new_peak), torch.exp(score - new_peak)
        total = total * shrink + gain
        weighted = weighted * shrink + gain * value
        peak = new_peak
    return torch.stack([peak, total, weighted], 1)


def compress(values_TK: Tensor, scores_TK: Tensor, state_SA3C: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Pool a step's tokens into the entries of the groups that it completes.

    Args:
        values_TK: float32 [T, C]; with overlap [T, 2 C], lower half first.
        scores_TK: The same shape, position term included.
        state_SA3C: float32 [S, A, 3, C], compressor state of each sequence before the step; A = 2 with overlap, else 1.
        segments: From ``make_segments`` with this compressor's ratio.

    Returns:
        Pooled entries float32 [E, C], and the state after the step.
    """
    scores, values = scores_TK[segments.tokens_GL], values_TK[segments.tokens_GL]
    if segments.missing_GL is not None:
        scores = scores.masked_fill(segments.missing_GL[..., None], float("-inf"))
    width, started, is_open = state_SA3C.shape[-1], segments.first_G11, segments.open_S11
    state_GA3C = state_SA3C[segments.sequence_G]
    fresh = empty_state(1, width, device=values_TK.device)
    if state_SA3C.shape[1] == 1:
        done = _accumulate(torch.where(started, state_GA3C[:, 0], fresh), scores, values)
        after = torch.where(is_open, done[segments.last_S], fresh)[:, None]
    else:
        lower = _accumulate(torch.where(started, state_GA3C[:, 1], fresh), scores[..., :width], values[..., :width])
        previous = torch.cat([fresh, lower[:-1]])
        done = _accumulate(torch.where(started, state_GA3C[:, 0], previous), scores[..., width:], values[..., width:])
        last_lower = lower[segments.last_S]
        after = torch.stack([torch.where(is_open, done[segments.last_S], last_lower), torch.where(is_open, last_lower, fresh)], 1)
    closed = done[segments.closed_E]
    return closed[:, 2] / closed[:, 1], after


class CompressInputs(NamedTuple):
    """Arguments of ``compress_step``.

    Attributes:
        projected: float32 [T, 2 columns or more], rows of any stride: values, then scores without their position term.
        ape: float32 [ratio, columns], the position term; columns are C, with overlap 2 C.
        norm_weight: float32 [C].
        state: float32 [slots, copies, A, 3, C], updated in place at the slots of ``paging``; one copy more than drafts.
        store: Entries, ``256 / ratio`` rows per page; ``paging.grow_SP`` gives the page of an entry.
        paging: Positions, slots and pages of the tokens.
        ratio: Tokens of a group.
        cos_T, sin_T: float32 [T, rope / 2], angles of the first position of each token's group.
        eps: Of the norm.
        hadamard: Transform the entry before it is packed.
        overlaps: The launch before this one shares nothing with it but inputs of both, and runs at the same time.
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
    overlaps: bool = False


@op("compress.triton:compress_step_triton")
def compress_step(given: CompressInputs) -> None:
    """Update every sequence's compressor state, and store the entries of completed groups: normed, rotated, packed."""
    projected, ape, norm_weight, state, store, paging, ratio, cos_T, sin_T, eps, hadamard, _ = given
    prefixes = paging.once(("prefixes", ratio), lambda: _prefixes(paging, ratio))
    if prefixes is None:
        return
    columns, segments = ape.shape[1], prefixes.segments
    values, scores = projected[:, :columns], projected[:, columns : 2 * columns] + ape[prefixes.phase_T]
    pooled, after = compress(values, scores, state[prefixes.slots_P, prefixes.from_P], segments)
    if not isinstance(store, GradientStore):  # in a pass with gradients nothing reads it, but a layer may run again
        state[prefixes.slots_P, prefixes.to_P] = after
    if not len(pooled):
        return
    dtype = store.format.dtype if isinstance(store.format, UnquantizedRow) else torch.bfloat16
    closing_E = segments.tokens_GL[segments.closed_E, -1]
    entries = rope(rms_norm(pooled.to(dtype), norm_weight, eps), cos_T[closing_E], sin_T[closing_E])
    index_E, rows = segments.positions_E // ratio, PAGE_TOKENS // ratio
    pages_E = paging.grow_SP[prefixes.owner_P[segments.sequence_G[segments.closed_E]], index_E // rows].long()
    store.write(pages_E * rows + index_E % rows, hadamard_transform(entries) if hadamard else entries)


class _Prefixes(NamedTuple):
    """The prefixes of a step's spans, which all compressors of one ratio share.

    A span with d drafts has 1 + d prefixes: without drafts, with the first draft, and so on. The state after each of these P
    prefixes is stored in its own copy, because the accepted drafts are not known yet.

    Attributes:
        segments: Of the prefixes; entries are stored only for whole spans.
        phase_T: int64, position within the group.
        owner_P, slots_P, from_P, to_P: int64, sequence, slot, and the copies of the state that the prefix reads and writes.
    """

    segments: Segments
    phase_T: Tensor
    owner_P: Tensor
    slots_P: Tensor
    from_P: Tensor
    to_P: Tensor


def _prefixes(paging: Paging, ratio: int) -> _Prefixes | None:
    """Return the step's ``_Prefixes``; ``None`` if all its tokens are padding."""
    spans, places_P4 = paging.once("prefixes", lambda: _spans(paging))
    if not spans:
        return None
    segments = make_segments(spans, ratio, paging.positions_T.device)
    return _Prefixes(segments, paging.positions_T.long() % ratio, *places_P4.unbind(1))


def _spans(paging: Paging) -> tuple[list[Span], Tensor]:
    """Return the prefixes of a step's spans, and their ``owner_P``, ``slots_P``, ``from_P`` and ``to_P`` [P, 4]."""
    spans, places = [], []
    fields = (paging.first_S, paging.lens_S, paging.rows_S, paging.drafts_S, paging.slots_S, paging.state_copy_S)
    for sequence, (start, tokens, row, drafts, slot, copy) in enumerate(zip(*(field.tolist() for field in fields), strict=True)):
        if slot >= 0 and tokens > 0:
            for kept in range(drafts + 1):
                spans.append(Span(start, tokens - drafts + kept, row, whole=kept == drafts))
                places.append((sequence, slot, copy, kept))
    return spans, torch.tensor(places, dtype=torch.int64, device=paging.positions_T.device)
