"""Kernels of the compressor: a vector of C channels lies in rows of 64.

With one token a sequence, or few tokens in all, one program does everything for a sequence. Otherwise an entry that closes is made
from its group's tokens of this step and what was carried from before; then programs of their own write what is carried.
All pour tokens in the same order with the same operations, so how a prompt is cut changes no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.compress import OVERLAP_RATIO
from dsv4lite.kernels.dispatch import on_gpu
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows import Fp4Key, Fp8Key, Fp8Kv, PlainRow, RowFormat, RowStore
from dsv4lite.kernels.rows.triton import (
    hadamard_rows,
    inverse_rms,
    only_if,
    rotate,
    rotate_tail,
    rounded,
    store_fp4_key,
    store_fp8_key,
    store_kv,
)

STAGES = 12  # how many tokens of a long group are read ahead, and one
FEW_TOKENS = 16  # of a step, at most, in which one program takes all of a sequence's
CARRY_ROWS = 2  # of 64 channels, in one program that writes what is carried
_KV, _FP4_KEY, _FP8_KEY, _PLAIN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _empty(ROWS: tl.constexpr):
    # empty_carry: peak, sum, weighted sum
    zero = tl.zeros((ROWS, 64), tl.float32)
    return zero - float("inf"), zero, zero


@triton.jit
def _choose(condition, p, t, w, other_p, other_t, other_w):
    return tl.where(condition, p, other_p), tl.where(condition, t, other_t), tl.where(condition, w, other_w)


@triton.jit
def _carried(carry, at, mask, wanted, WIDTH: tl.constexpr):
    """Return a set of accumulators; zeros where it is not wanted."""
    here = only_if(wanted, mask)
    peak = tl.load(carry + at, mask=here, other=0.0)
    total = tl.load(carry + WIDTH + at, mask=here, other=0.0)
    return peak, total, tl.load(carry + 2 * WIDTH + at, mask=here, other=0.0)


@triton.jit
def _store_set(carry, at, mask, p, t, w, WIDTH: tl.constexpr):
    tl.store(carry + at, p, mask=mask)
    tl.store(carry + WIDTH + at, t, mask=mask)
    tl.store(carry + 2 * WIDTH + at, w, mask=mask)


@triton.jit
def _turn(closed, p, t, w, lower_p, lower_t, lower_w, ROWS: tl.constexpr):
    """Return what is carried after a token: all of it if its group stays open."""
    closed = closed != 0
    # after = torch.stack([where(is_open, done, last_lower), where(is_open, last_lower, fresh)]); without overlap, lower is fresh
    fresh_p, fresh_t, fresh_w = _empty(ROWS)
    p, t, w = _choose(closed, lower_p, lower_t, lower_w, p, t, w)
    lower_p, lower_t, lower_w = _choose(closed, fresh_p, fresh_t, fresh_w, lower_p, lower_t, lower_w)
    return p, t, w, lower_p, lower_t, lower_w


@triton.jit
def _store_carry(carry, at, mask, p, t, w, lower_p, lower_t, lower_w, A: tl.constexpr, WIDTH: tl.constexpr):
    _store_set(carry, at, mask, p, t, w, WIDTH)
    if A == 2:
        _store_set(carry + 3 * WIDTH, at, mask, lower_p, lower_t, lower_w, WIDTH)


@triton.jit
def _accumulate(p, t, w, score, value):
    # accumulate, one token
    peak = tl.maximum(p, score)
    shrink = tl.exp(p - peak)
    gain = tl.exp(score - peak)
    return peak, t * shrink + gain, w * shrink + gain * value


@triton.jit
def _token(projected, ape, at, mask, row_stride, row, phase, SCORES: tl.constexpr):
    # scores_TK + ape[phase] and values_TK of one row
    here = projected + row.to(tl.int64) * row_stride + at
    term = tl.load(ape + phase * SCORES + at, mask=mask, other=0.0)
    return tl.load(here + SCORES, mask=mask, other=0.0) + term, tl.load(here, mask=mask, other=0.0)


@triton.jit
def _pour(p, t, w, projected, ape, at, mask, row_stride, begin, end, phase, SCORES: tl.constexpr, STAGES: tl.constexpr):
    """Take rows ``begin`` to ``end``, in order; ``phase`` is that of row ``begin``."""
    values = projected + begin.to(tl.int64) * row_stride + at
    terms = ape + phase * SCORES + at
    for i in tl.range(0, end - begin, num_stages=STAGES):
        here = values + i * row_stride
        score = tl.load(here + SCORES, mask=mask, other=0.0) + tl.load(terms + i * SCORES, mask=mask, other=0.0)
        p, t, w = _accumulate(p, t, w, score, tl.load(here, mask=mask, other=0.0))
    return p, t, w


@triton.jit
def _in_progress(
    projected,
    ape,
    carry,
    at,
    mask,
    row_stride,
    position,
    row,
    first,
    A: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the accumulators of the entry in progress once the token at ``position``, in the step's ``row``, is in.

    ``carry`` is the sequence's before this step, in which its tokens begin at position ``first``.
    """
    group = position // RATIO * RATIO
    begin = tl.maximum(group, first)
    started = begin == first
    end = row + 1
    row += begin - position
    UPPER: tl.constexpr = (A - 1) * WIDTH
    p, t, w = _empty(ROWS)
    own_p, own_t, own_w = _carried(carry, at, mask, started, WIDTH)
    if A == 2:
        # previous = torch.cat([fresh, lower[:-1]]): the group before, as far as it lies in this step
        before = tl.maximum(group - RATIO, first)
        count = tl.maximum(group - before, 0)
        cut = (before == first) & (count > 0)
        p, t, w = _choose(cut, *_carried(carry + 3 * WIDTH, at, mask, cut, WIDTH), p, t, w)
        p, t, w = _pour(p, t, w, projected, ape, at, mask, row_stride, row - count, row, before % RATIO, A * WIDTH, STAGES)
    # torch.where(started, carried_GA3C[:, 0], previous)
    p, t, w = _choose(started, own_p, own_t, own_w, p, t, w)
    projected += UPPER
    ape += UPPER
    return _pour(p, t, w, projected, ape, at, mask, row_stride, row, end, begin % RATIO, A * WIDTH, STAGES)


@triton.jit
def _store_entry(
    total,
    weighted,
    norm_weight,
    memory,
    grow_row,
    cos,
    sin,
    token,
    position,
    page_stride,
    eps,
    at,
    mask,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    LOG: tl.constexpr,
    KIND: tl.constexpr,
    ROPE: tl.constexpr,
    GPU: tl.constexpr,
):
    """Norm, rotate, transform, pack and store the entry that the token at ``position`` closes."""
    # rope(rms_norm(pooled.to(torch.bfloat16), norm_weight, eps), cos_T[closing_E], sin_T[closing_E])
    WIDE: tl.constexpr = memory.dtype.element_ty == tl.float32
    x = tl.where(mask, rounded(tl.math.div_rn(weighted, total), WIDE, GPU), 0.0)
    y = rounded(x * inverse_rms(x, eps, WIDTH) * tl.load(norm_weight + at, mask=mask, other=0.0), WIDE, GPU)
    if KIND == _PLAIN:
        turns = token.to(tl.int64) * (ROPE // 2)
        y = tl.reshape(y, (1, ROWS * 64))
        y = tl.reshape(rotate_tail(y, cos + turns, sin + turns, 1, WIDTH, ROWS * 64, ROPE, WIDE, GPU), (ROWS, 64))
    else:
        pair = token.to(tl.int64) * 32 + tl.arange(0, 32)
        last = tl.arange(0, ROWS)[:, None] == WIDTH // 64 - 1
        y = rotate(y, tl.load(cos + pair)[None, :], tl.load(sin + pair)[None, :], last, ROWS, 64, GPU)
    if LOG:
        y = hadamard_rows(tl.reshape(y, (1, WIDTH)), 1, LOG, GPU)
    # page_E * store.rows_per_page + index_E % store.rows_per_page
    entry = position // RATIO
    home = memory + tl.load(grow_row + entry // PLACES).to(tl.int64) * page_stride
    place = entry % PLACES
    if KIND == _KV:
        DATA: tl.constexpr = WIDTH + 64
        SCALES: tl.constexpr = (WIDTH // 64 + 6) // 8 * 8
        y = tl.reshape(y, (ROWS, 64))
        store_kv(y, home + place * DATA, home + PLACES * DATA + place * SCALES, position, ROWS, WIDTH - 64, 64)
    elif KIND == _FP4_KEY:
        scales = home + PLACES * (WIDTH // 2) + place * (WIDTH // 32)
        store_fp4_key(tl.reshape(y, (WIDTH // 32, 32)), home + place * (WIDTH // 2), scales, WIDTH)
    elif KIND == _PLAIN:
        tl.store(home + place * WIDTH + at, y.to(memory.dtype.element_ty), mask=mask)
    else:
        store_fp8_key(tl.reshape(y, (1, WIDTH)), home + place * WIDTH, home + PLACES * WIDTH + place * 4, WIDTH)


@triton.jit(do_not_specialize=["pages"])
def _sequence_kernel(
    projected, ape, norm_weight, carry, memory, cos, sin, slots, copies, first, rows, lens, drafts, grow,
    num_copies, row_stride, page_stride, pages, eps,
    A: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, LOG: tl.constexpr,
    KIND: tl.constexpr, ROPE: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """One program per sequence takes its tokens one after the other, and stores the entries that close and what is carried."""
    wait_for_predecessor()
    let_successor_in()
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    length = tl.load(lens + sequence)
    position = tl.load(first + sequence)
    row = tl.load(rows + sequence)
    guesses = tl.load(drafts + sequence)
    copy = tl.load(copies + sequence)
    real = (slot >= 0) & (position >= 0) & (length > 0)
    if real:
        at = tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :]
        mask = at < WIDTH
        carry += slot * num_copies * (A * 3 * WIDTH)
        before = carry + copy * (A * 3 * WIDTH)
        UPPER: tl.constexpr = (A - 1) * WIDTH
        low_p, low_t, low_w = _empty(ROWS)
        p, t, w = _carried(before, at, mask, real, WIDTH)
        if A == 2:
            low_p, low_t, low_w = _carried(before + 3 * WIDTH, at, mask, real, WIDTH)
        tl.debug_barrier()  # the same program has read what it now overwrites
        for i in range(length):
            token = row + i
            phase = (position + i) % RATIO
            score, value = _token(projected + UPPER, ape + UPPER, at, mask, row_stride, token, phase, A * WIDTH)
            p, t, w = _accumulate(p, t, w, score, value)
            if A == 2:
                score, value = _token(projected, ape, at, mask, row_stride, token, phase, A * WIDTH)
                low_p, low_t, low_w = _accumulate(low_p, low_t, low_w, score, value)
            closed = phase == RATIO - 1
            if closed:
                _store_entry(
                    t, w, norm_weight, memory, grow + sequence.to(tl.int64) * pages, cos, sin, token, position + i, page_stride,
                    eps, at, mask, RATIO, WIDTH, ROWS, PLACES, LOG, KIND, ROPE, GPU,
                )  # fmt: skip
            p, t, w, low_p, low_t, low_w = _turn(closed, p, t, w, low_p, low_t, low_w, ROWS)
            guess = i + 1 + guesses - length
            if guess >= 0:
                _store_carry(carry + guess * (A * 3 * WIDTH), at, mask, p, t, w, low_p, low_t, low_w, A, WIDTH)


@triton.jit(do_not_specialize=["tokens", "pages"])
def _entry_kernel(
    projected,
    ape,
    norm_weight,
    carry,
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
    GPU: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per RATIO tokens: most often with one entry that closes, but among tokens of many sequences with any number."""
    row = tl.program_id(0) * RATIO + tl.arange(0, RATIO)
    position = tl.load(positions + row, mask=row < tokens, other=-1)
    closing = (position >= 0) & (position % RATIO == RATIO - 1)
    done = -1
    for _closing in range(tl.sum(closing.to(tl.int32), axis=0)):
        token = tl.min(tl.where(closing & (row > done), row, tokens), axis=0)
        done = token
        sequence = tl.load(sequences + token).to(tl.int64)
        slot = tl.load(slots + sequence).to(tl.int64)
        if slot >= 0:
            at = tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :]
            mask = at < WIDTH
            last = tl.load(positions + token)
            begin = tl.load(first + sequence)
            before = carry + (slot * num_copies + tl.load(copies + sequence)) * (A * 3 * WIDTH)
            _, t, w = _in_progress(projected, ape, before, at, mask, row_stride, last, token, begin, A, RATIO, WIDTH, ROWS, STAGES)
            pages_of = grow + sequence * pages
            _store_entry(
                t, w, norm_weight, memory, pages_of, cos, sin, token, last, page_stride, eps, at, mask, RATIO, WIDTH, ROWS, PLACES,
                LOG, KIND, ROPE, GPU,
            )  # fmt: skip


@triton.jit
def _carry_kernel(
    projected,
    ape,
    carry,
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
    """One program per sequence and block of channels: what is carried after the step, and before each of its drafts."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    length = tl.load(lens + sequence)
    if (slot >= 0) & (length > 0):
        at = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]) * 64 + tl.arange(0, 64)[None, :]
        mask = at < WIDTH
        carry += slot * num_copies * (A * 3 * WIDTH)
        before = carry + tl.load(copies + sequence) * (A * 3 * WIDTH)
        begin = tl.load(first + sequence)
        guesses = tl.load(drafts + sequence)
        position = begin + length - 1 - guesses
        row = tl.load(rows + sequence) + length - 1 - guesses
        closed = position % RATIO == RATIO - 1
        low_p, low_t, low_w = _empty(ROWS)
        # Without overlap a closed group leaves nothing; with it, its lower half is all that is left.
        p, t, w = _in_progress(projected, ape, before, at, mask, row_stride, position, row, begin, A, RATIO, WIDTH, ROWS, STAGES)
        if A == 2:
            start = tl.maximum(position // RATIO * RATIO, begin)
            low_p, low_t, low_w = _choose(
                start == begin, *_carried(before + 3 * WIDTH, at, mask, start == begin, WIDTH), low_p, low_t, low_w
            )
            from_row = row - (position - start)
            low_p, low_t, low_w = _pour(
                low_p, low_t, low_w, projected, ape, at, mask, row_stride, from_row, row + 1, start % RATIO, A * WIDTH, STAGES
            )
        tl.debug_barrier()  # the same program has read what it now overwrites
        p, t, w, low_p, low_t, low_w = _turn(closed, p, t, w, low_p, low_t, low_w, ROWS)
        _store_carry(carry, at, mask, p, t, w, low_p, low_t, low_w, A, WIDTH)
        UPPER: tl.constexpr = (A - 1) * WIDTH
        for guess in range(1, guesses + 1):
            phase = (position + guess) % RATIO
            score, value = _token(projected + UPPER, ape + UPPER, at, mask, row_stride, row + guess, phase, A * WIDTH)
            p, t, w = _accumulate(p, t, w, score, value)
            if A == 2:
                score, value = _token(projected, ape, at, mask, row_stride, row + guess, phase, A * WIDTH)
                low_p, low_t, low_w = _accumulate(low_p, low_t, low_w, score, value)
            p, t, w, low_p, low_t, low_w = _turn(phase == RATIO - 1, p, t, w, low_p, low_t, low_w, ROWS)
            _store_carry(carry + guess * (A * 3 * WIDTH), at, mask, p, t, w, low_p, low_t, low_w, A, WIDTH)


def _kind(fmt: RowFormat) -> int:
    if isinstance(fmt, Fp8Kv):
        assert fmt.rope == 64, fmt
        return 0
    if isinstance(fmt, PlainRow):
        return 3
    assert isinstance(fmt, Fp4Key | Fp8Key) and fmt.width & (fmt.width - 1) == 0, fmt
    return 1 if isinstance(fmt, Fp4Key) else 2


def entry_sizes(ratio: int, store: RowStore, rope: int, hadamard: bool) -> dict[str, int]:
    """Return what kernels are compiled for that pool ``ratio`` tokens into rows of a store."""
    fmt, width = store.format, store.format.width
    if isinstance(fmt, PlainRow):
        assert not hadamard and width % 2 == 0 and rope <= width, width
    else:
        assert width % 64 == 0 and rope == 64 and (not hadamard or width & (width - 1) == 0), width
    assert ratio & (ratio - 1) == 0, ratio
    return {
        "A": 2 if ratio == OVERLAP_RATIO else 1,
        "RATIO": ratio,
        "WIDTH": width,
        "ROWS": triton.next_power_of_2(triton.cdiv(width, 64)),
        "PLACES": store.rows_per_page,
        "LOG": width.bit_length() - 1 if hadamard else 0,
        "KIND": _kind(fmt),
        "ROPE": rope,
    }


def memory_of(store: RowStore) -> Tensor:
    """Return a store's memory as kernels see it: bytes, or plain rows in their dtype."""
    return store.memory.view(store.format.dtype) if isinstance(store.format, PlainRow) else store.memory


def compress_step_triton(
    projected: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    carry: Tensor,
    store: RowStore,
    paging: Paging,
    ratio: int,
    cos_T: Tensor,
    sin_T: Tensor,
    eps: float,
    hadamard: bool,
) -> None:
    """See ``compress.compress_step``; widths of packed rows are multiples of 64, of which 64 channels rotate."""
    tokens, width, rope = projected.shape[0], norm_weight.shape[0], 2 * cos_T.shape[1]
    sizes, memory = entry_sizes(ratio, store, rope, hadamard), memory_of(store)
    sets = sizes["A"]
    assert projected.dtype == torch.float32 and projected.stride(1) == 1 and projected.shape[1] >= 2 * sets * width
    assert width == store.format.width and ape.shape == (ratio, sets * width) and ape.is_contiguous()
    assert carry.shape[2:] == (sets, 3, width) and carry.is_contiguous()
    assert cos_T.shape == sin_T.shape and len(cos_T) == tokens and cos_T.is_contiguous() and sin_T.is_contiguous()
    if tokens == 0:
        return
    stages = min(STAGES, ratio + 1)
    shape = {name: sizes[name] for name in ("A", "RATIO", "WIDTH")}
    entry = {**sizes, "GPU": on_gpu(projected.device), "num_warps": _warps(width)}
    grow, slots, copies = paging.grow_SP, paging.slots_S, paging.carry_S
    strides = (projected.stride(0), memory.stride(0), grow.stride(0), eps)
    places = (projected, ape, norm_weight, carry, memory, cos_T, sin_T)
    if paging.singles or tokens <= FEW_TOKENS:
        runs = (slots, copies, paging.first_S, paging.rows_S, paging.lens_S, paging.drafts_S, grow)
        entry |= {"enable_fp_fusion": False, "launch_pdl": dependent_launch(projected.device)}
        _sequence_kernel[(len(slots),)](*places, *runs, carry.shape[1], *strides, **entry)
        return
    of_tokens = (paging.positions_T, paging.sequence_T, slots, copies, paging.first_S, grow, tokens, carry.shape[1])
    grid = (triton.cdiv(tokens, ratio),)
    _entry_kernel[grid](*places, *of_tokens, *strides, **entry, STAGES=stages, enable_fp_fusion=False)
    _carry_kernel[(len(paging.slots_S), triton.cdiv(width, 64 * CARRY_ROWS))](
        projected,
        ape,
        carry,
        slots,
        copies,
        paging.first_S,
        paging.rows_S,
        paging.lens_S,
        paging.drafts_S,
        carry.shape[1],
        projected.stride(0),
        **shape,
        ROWS=CARRY_ROWS,
        STAGES=stages,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _warps(width: int) -> int:
    """Return how many warps hold a vector, four channels a thread."""
    return 4 if width > 256 else 2 if width > 128 else 1
