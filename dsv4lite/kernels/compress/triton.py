"""Kernels of ``compress_step``; a vector of C channels is a tile with rows of 64.

With few tokens per sequence, or few in all, one kernel does everything, one program per sequence. Otherwise ``_entry_kernel``
computes each entry from its group's tokens of this step and the compressor state before the step; then ``_state_kernel`` writes the
state after it. All add tokens in the same order with the same operations, so chunked prefill does not change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4lite.kernels.compress import OVERLAP_RATIO, CompressInputs
from dsv4lite.kernels.dispatch import ceil_div, power_of_2
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows import UnquantizedRow
from dsv4lite.kernels.rows.triton import (
    hadamard_rows,
    inverse_rms,
    kind_of,
    memory_of,
    only_if,
    rotate,
    rounded,
    row_angles,
    store_row,
)

STAGES = 12  # pipeline stages of the loop over tokens, one more than the tokens that are prefetched
# One program takes a sequence if the step has at most SEQUENCE_TOKENS tokens, or at most SEQUENCE_WIDTH rows per sequence.
SEQUENCE_TOKENS, SEQUENCE_WIDTH = 16, 4
STATE_ROWS = 2  # rows of 64 channels that one program of ``_state_kernel`` writes


@triton.jit
def _channels(block, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the channels of a block of ROWS rows of 64, and which of them exist."""
    at = (block * ROWS + tl.arange(0, ROWS)[:, None]) * 64 + tl.arange(0, 64)[None, :]
    return at, at < WIDTH


@triton.jit
def _empty(here):
    # empty_state: peak, sum, weighted sum
    zero = tl.zeros((here[0].shape[0], 64), tl.float32)
    return zero - float("inf"), zero, zero


@triton.jit
def _choose(condition, a, b):
    return tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1]), tl.where(condition, a[2], b[2])


@triton.jit
def _load_set(state, here, wanted, WIDTH: tl.constexpr):
    """Return a set of accumulators; zeros unless ``wanted``."""
    at, mask = here
    mask = only_if(wanted, mask)
    peak = tl.load(state + at, mask=mask, other=0.0)
    total = tl.load(state + WIDTH + at, mask=mask, other=0.0)
    return peak, total, tl.load(state + 2 * WIDTH + at, mask=mask, other=0.0)


@triton.jit
def _store_state(state, here, sums, lower, A: tl.constexpr, WIDTH: tl.constexpr):
    at, mask = here
    tl.store(state + at, sums[0], mask=mask)
    tl.store(state + WIDTH + at, sums[1], mask=mask)
    tl.store(state + 2 * WIDTH + at, sums[2], mask=mask)
    if A == 2:
        tl.store(state + 3 * WIDTH + at, lower[0], mask=mask)
        tl.store(state + 4 * WIDTH + at, lower[1], mask=mask)
        tl.store(state + 5 * WIDTH + at, lower[2], mask=mask)


@triton.jit
def _accumulate(sums, score, value):
    # _accumulate, one token
    p, t, w = sums
    peak = tl.maximum(p, score)
    shrink = tl.exp(p - peak)
    gain = tl.exp(score - peak)
    return peak, t * shrink + gain, w * shrink + gain * value


@triton.jit
def _add_token(sums, inputs, here, row, phase, SCORES: tl.constexpr):
    """Add one token, in the step's ``row``, to accumulators."""
    projected, ape, row_stride = inputs
    at, mask = here
    # scores_TK + ape[phase] and values_TK
    values = projected + row.to(tl.int64) * row_stride + at
    term = tl.load(ape + phase * SCORES + at, mask=mask, other=0.0)
    score = tl.load(values + SCORES, mask=mask, other=0.0) + term
    return _accumulate(sums, score, tl.load(values, mask=mask, other=0.0))


@triton.jit
def _add_rows(sums, inputs, here, begin, end, phase, SCORES: tl.constexpr, STAGES: tl.constexpr):
    """Add rows ``begin`` to ``end`` to accumulators, in order; ``phase`` is that of row ``begin``."""
    projected, ape, row_stride = inputs
    at, mask = here
    values = projected + begin.to(tl.int64) * row_stride + at
    terms = ape + phase * SCORES + at
    for i in tl.range(0, end - begin, num_stages=STAGES):
        value = values + i * row_stride
        score = tl.load(value + SCORES, mask=mask, other=0.0) + tl.load(terms + i * SCORES, mask=mask, other=0.0)
        sums = _accumulate(sums, score, tl.load(value, mask=mask, other=0.0))
    return sums


@triton.jit
def _in_progress(
    inputs, state, here, position, row, first, A: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr
):
    """Return the accumulators of the entry in progress after the token at ``position``, in the step's ``row``.

    ``state`` is the sequence's state before this step; its first token of the step has position ``first``.
    """
    projected, ape, row_stride = inputs
    group = position // RATIO * RATIO
    begin = tl.maximum(group, first)
    started = begin == first
    end = row + 1
    row += begin - position
    UPPER: tl.constexpr = (A - 1) * WIDTH
    sums = _empty(here)
    own = _load_set(state, here, started, WIDTH)
    if A == 2:
        # previous = torch.cat([fresh, lower[:-1]]): the tokens of the previous group that are in this step
        before = tl.maximum(group - RATIO, first)
        count = tl.maximum(group - before, 0)
        cut = (before == first) & (count > 0)
        sums = _choose(cut, _load_set(state + 3 * WIDTH, here, cut, WIDTH), sums)
        sums = _add_rows(sums, inputs, here, row - count, row, before % RATIO, A * WIDTH, STAGES)
    # torch.where(started, carried_GA3C[:, 0], previous)
    sums = _choose(started, own, sums)
    upper = (projected + UPPER, ape + UPPER, row_stride)
    return _add_rows(sums, upper, here, row, end, begin % RATIO, A * WIDTH, STAGES)


@triton.jit
def _store_entry(
    sums,
    entries,
    grow_row,
    token,
    position,
    here,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    LOG: tl.constexpr,
    KIND: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Norm, rotate, transform, pack and store the entry of the group that the token at ``position`` completes."""
    norm_weight, memory, cos, sin, page_stride, eps = entries
    at, mask = here
    # rope(rms_norm(pooled.to(torch.bfloat16), norm_weight, eps), cos_T[closing_E], sin_T[closing_E])
    FLOAT32: tl.constexpr = memory.dtype.element_ty == tl.float32
    x = tl.where(mask, rounded(tl.math.div_rn(sums[2], sums[1]), FLOAT32), 0.0)
    y = rounded(x * inverse_rms(x, eps, WIDTH) * tl.load(norm_weight + at, mask=mask, other=0.0), FLOAT32)
    turns = token.to(tl.int64) * (ROPE // 2)
    c, s, turned = row_angles(cos + turns, sin + turns, WIDTH, ROWS, ROPE)
    y = rotate(y, c, s, turned, ROWS, 64, FLOAT32)
    if LOG:
        y = hadamard_rows(tl.reshape(y, (1, WIDTH)), 1, LOG)
    # page_E * store.rows_per_page + index_E % store.rows_per_page
    entry = position // RATIO
    page = memory + tl.load(grow_row + entry // PLACES).to(tl.int64) * page_stride
    store_row(y, page, entry % PLACES, position, WIDTH, ROPE, ROWS, PLACES, KIND)


@triton.jit(do_not_specialize=["pages"])
def _sequence_kernel(
    projected, ape, norm_weight, state, memory, cos, sin, slots, copies, first, rows, lens, drafts, grow,
    num_copies, row_stride, page_stride, pages, eps,
    A: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, LOG: tl.constexpr,
    KIND: tl.constexpr, ROPE: tl.constexpr, OVERLAPS_PREVIOUS: tl.constexpr,
):  # fmt: skip
    """One program per sequence adds its tokens one by one, and stores completed entries and the compressor state."""
    if not OVERLAPS_PREVIOUS:
        wait_for_predecessor()
    let_successor_in()
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    length = tl.load(lens + sequence)
    position = tl.load(first + sequence)
    row = tl.load(rows + sequence)
    num_drafts = tl.load(drafts + sequence)
    copy = tl.load(copies + sequence)
    real = (slot >= 0) & (position >= 0) & (length > 0)
    if real:
        here = _channels(0, ROWS, WIDTH)
        SET: tl.constexpr = A * 3 * WIDTH
        UPPER: tl.constexpr = (A - 1) * WIDTH
        inputs = (projected, ape, row_stride)
        upper = (projected + UPPER, ape + UPPER, row_stride)
        entries = (norm_weight, memory, cos, sin, page_stride, eps)
        state += slot * num_copies * SET
        before = state + copy * SET
        lower = _empty(here)
        sums = _load_set(before, here, real, WIDTH)
        if A == 2:
            lower = _load_set(before + 3 * WIDTH, here, real, WIDTH)
        tl.debug_barrier()  # all threads have read the state before it is overwritten
        for i in range(length):
            phase = (position + i) % RATIO
            sums = _add_token(sums, upper, here, row + i, phase, A * WIDTH)
            if A == 2:
                lower = _add_token(lower, inputs, here, row + i, phase, A * WIDTH)
            closed = phase == RATIO - 1
            if closed:
                _store_entry(
                    sums, entries, grow + sequence.to(tl.int64) * pages, row + i, position + i, here, RATIO, WIDTH, ROWS, PLACES,
                    LOG, KIND, ROPE,
                )  # fmt: skip
            # after = stack([where(is_open, done, last_lower), where(is_open, last_lower, fresh)]); without overlap, lower is fresh
            sums = _choose(closed, lower, sums)
            lower = _choose(closed, _empty(here), lower)
            draft = i + 1 + num_drafts - length
            if draft >= 0:
                _store_state(state + draft * SET, here, sums, lower, A, WIDTH)
    if OVERLAPS_PREVIOUS:
        wait_for_predecessor()


@triton.jit(do_not_specialize=["tokens", "pages"])
def _entry_kernel(
    projected,
    ape,
    norm_weight,
    state,
    memory,
    cos,
    sin,
    positions,
    sequences,
    slots,
    copies,
    first,
    grow,
    tokens,
    num_copies,
    row_stride,
    page_stride,
    pages,
    eps,
    A: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    LOG: tl.constexpr,
    KIND: tl.constexpr,
    ROPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per RATIO rows; mostly one of these tokens completes an entry, but with several sequences any number can."""
    row = tl.program_id(0) * RATIO + tl.arange(0, RATIO)
    position = tl.load(positions + row, mask=row < tokens, other=-1)
    closing = (position >= 0) & (position % RATIO == RATIO - 1)
    inputs = (projected, ape, row_stride)
    entries = (norm_weight, memory, cos, sin, page_stride, eps)
    done = -1
    for _closing in range(tl.sum(closing.to(tl.int32), axis=0)):
        token = tl.min(tl.where(closing & (row > done), row, tokens), axis=0)
        done = token
        sequence = tl.load(sequences + token).to(tl.int64)
        slot = tl.load(slots + sequence).to(tl.int64)
        if slot >= 0:
            here = _channels(0, ROWS, WIDTH)
            last = tl.load(positions + token)
            begin = tl.load(first + sequence)
            before = state + (slot * num_copies + tl.load(copies + sequence)) * (A * 3 * WIDTH)
            sums = _in_progress(inputs, before, here, last, token, begin, A, RATIO, WIDTH, STAGES)
            grow_row = grow + sequence * pages
            _store_entry(sums, entries, grow_row, token, last, here, RATIO, WIDTH, ROWS, PLACES, LOG, KIND, ROPE)


@triton.jit
def _state_kernel(
    projected,
    ape,
    state,
    slots,
    copies,
    first,
    rows,
    lens,
    drafts,
    num_copies,
    row_stride,
    A: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per sequence and block of channels writes the state before the step's drafts and after each of them."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    length = tl.load(lens + sequence)
    if (slot >= 0) & (length > 0):
        here = _channels(tl.program_id(1), ROWS, WIDTH)
        SET: tl.constexpr = A * 3 * WIDTH
        UPPER: tl.constexpr = (A - 1) * WIDTH
        inputs = (projected, ape, row_stride)
        upper = (projected + UPPER, ape + UPPER, row_stride)
        state += slot * num_copies * SET
        before = state + tl.load(copies + sequence) * SET
        begin = tl.load(first + sequence)
        num_drafts = tl.load(drafts + sequence)
        position = begin + length - 1 - num_drafts
        row = tl.load(rows + sequence) + length - 1 - num_drafts
        closed = position % RATIO == RATIO - 1
        lower = _empty(here)
        # After a completed group the state is empty without overlap, and with overlap the accumulators of its lower half.
        sums = _in_progress(inputs, before, here, position, row, begin, A, RATIO, WIDTH, STAGES)
        if A == 2:
            start = tl.maximum(position // RATIO * RATIO, begin)
            lower = _choose(start == begin, _load_set(before + 3 * WIDTH, here, start == begin, WIDTH), lower)
            lower = _add_rows(lower, inputs, here, row - (position - start), row + 1, start % RATIO, A * WIDTH, STAGES)
        tl.debug_barrier()  # all threads have read the state before it is overwritten
        sums = _choose(closed, lower, sums)
        lower = _choose(closed, _empty(here), lower)
        _store_state(state, here, sums, lower, A, WIDTH)
        for draft in range(1, num_drafts + 1):
            phase = (position + draft) % RATIO
            sums = _add_token(sums, upper, here, row + draft, phase, A * WIDTH)
            if A == 2:
                lower = _add_token(lower, inputs, here, row + draft, phase, A * WIDTH)
            closed = phase == RATIO - 1
            sums = _choose(closed, lower, sums)
            lower = _choose(closed, _empty(here), lower)
            _store_state(state + draft * SET, here, sums, lower, A, WIDTH)


def compress_step_triton(given: CompressInputs) -> None:
    """See ``compress_step``. Packed rows have a multiple of 64 channels, of which 64 rotate."""
    projected, ape, norm_weight, state, store, paging, ratio, cos_T, sin_T, eps, hadamard, overlaps = given
    tokens, width, rope, sets = projected.shape[0], norm_weight.shape[0], 2 * cos_T.shape[1], state.shape[2]
    fmt, memory, kind = store.format, memory_of(store), kind_of(store.format)
    assert width == fmt.width and (not hadamard or width & (width - 1) == 0), width
    if isinstance(fmt, UnquantizedRow):
        assert not hadamard and rope <= width, (fmt, rope)
    else:
        assert rope == 64 and width % 64 == 0, (fmt, rope)
    assert sets == (2 if ratio == OVERLAP_RATIO else 1) and ratio & (ratio - 1) == 0, (sets, ratio)
    assert projected.dtype == torch.float32 and projected.stride(1) == 1 and projected.shape[1] >= 2 * sets * width
    assert ape.shape == (ratio, sets * width) and ape.is_contiguous()
    assert state.shape[3:] == (3, width) and state.is_contiguous()
    assert cos_T.shape == sin_T.shape and len(cos_T) == tokens and cos_T.is_contiguous() and sin_T.is_contiguous()
    if tokens == 0:
        return
    stages, shape = min(STAGES, ratio + 1), {"A": sets, "RATIO": ratio, "WIDTH": width}
    entry = {
        **shape,
        "ROWS": power_of_2(ceil_div(width, 64)),
        "PLACES": store.rows_per_page,
        "LOG": width.bit_length() - 1 if hadamard else 0,
        "KIND": kind,
        "ROPE": rope,
        "num_warps": 4 if width > 256 else 2 if width > 128 else 1,  # four channels per thread
    }
    grow, slots, copies = paging.grow_SP, paging.slots_S, paging.state_copy_S
    strides = (state.shape[1], projected.stride(0), memory.stride(0), grow.stride(0), eps)
    inputs = (projected, ape, norm_weight, state, memory, cos_T, sin_T)
    spans = (slots, copies, paging.first_S, paging.rows_S, paging.lens_S, paging.drafts_S)
    if 0 < paging.width <= SEQUENCE_WIDTH or tokens <= SEQUENCE_TOKENS:
        entry |= {"OVERLAPS_PREVIOUS": overlaps, "enable_fp_fusion": False, "launch_pdl": dependent_launch(projected.device)}
        _sequence_kernel[(len(slots),)](*inputs, *spans, grow, *strides, **entry)
        return
    of_tokens = (paging.positions_T, paging.sequence_T, slots, copies, paging.first_S, grow, tokens)
    grid = (ceil_div(tokens, ratio),)
    _entry_kernel[grid](*inputs, *of_tokens, *strides, **entry, STAGES=stages, enable_fp_fusion=False)
    shape |= {"ROWS": STATE_ROWS, "STAGES": stages, "num_warps": 1, "enable_fp_fusion": False}
    _state_kernel[(len(slots), ceil_div(width, 64 * STATE_ROWS))](projected, ape, state, *spans, *strides[:2], **shape)
