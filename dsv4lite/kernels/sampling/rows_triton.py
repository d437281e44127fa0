"""Kernels of ``rows.sample_rows``. If several programs share a row, the last to arrive combines their results.

A token's *rank number*, int64, orders a row from best to worst: the upper bits hold the value, the lower 23 the token id.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.counters import COUNTERS, counters_of
from dsv4lite.kernels.dispatch import ceil_div, power_of_2
from dsv4lite.kernels.sampling.rows import (
    BEST,
    CANDIDATES,
    GROUPS,
    HEADER,
    ID_BITS,
    MOST_VOCABULARY,
    NUM_COLUMNS,
    PIECE,
    STATE_COLUMNS,
    Column,
    Needs,
    SampleInputs,
    State,
    apply_masks,
)
from dsv4lite.kernels.sampling.triton import arrive, ascending, best_key, best_token, fixed_exp, log_of_fixed, total_of

ROUNDS = 3  # more draws with ``top_p`` after the first, among all tokens; rows without a result by then take ``_search_kernel``
_NUM_WARPS = 8
_SEARCH_BLOCK = 4096

_TEMPERATURE, _LOG_MIN_P, _TOP_K, _TOP_P, _REPETITION, _FREQUENCY, _PRESENCE, _OCCURRENCES, *_OTHERS = map(
    tl.constexpr, map(int, Column)
)
_EDITS, _STOPS, _NUM_STOPS, _STOPS_FROM, _STREAM, _NUM_LOGPROBS, _PROCESSED = _OTHERS
_COLUMNS = tl.constexpr(NUM_COLUMNS)
_BEST = tl.constexpr(BEST)
_CANDIDATES = tl.constexpr(CANDIDATES)
_PIECE = tl.constexpr(PIECE)
_GROUPS = tl.constexpr(GROUPS)
_HEADER = tl.constexpr(HEADER)
_COMPARED = tl.constexpr(16)  # candidates with which all candidates are compared at a time
_TOP, _TOP_ID, _DRAWN, _LIMIT, _TOTAL, _CUT, _REACH, _COUNT, _LOG_SUM = map(tl.constexpr, map(int, State))
_STATE = tl.constexpr(STATE_COLUMNS)
_DONE = tl.constexpr(-1)
_ID_BITS = tl.constexpr(ID_BITS)
_ID_MASK = tl.constexpr(MOST_VOCABULARY - 1)
_RANK_BITS = tl.constexpr(31 + MOST_VOCABULARY.bit_length())
_HIGHEST_BIT = tl.constexpr(MOST_VOCABULARY << 31)
_NO_KEY = tl.constexpr(-0x8000000000000000)
_BEYOND = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_INF = tl.constexpr(float("inf"))


@triton.jit
def _slot(slots, row, last):
    slot = tl.load(slots + row)
    return tl.where(slot < 0, last, slot).to(tl.int64)


@triton.jit
def _is_edited(line, position):
    """Return whether a row is sampled from edited logits."""
    rows = (tl.load(line + _OCCURRENCES) != 0) | (tl.load(line + _EDITS) != 0)
    return rows | ((tl.load(line + _NUM_STOPS) > 0) & (position + 1 < tl.load(line + _STOPS_FROM)))


@triton.jit
def _source(line, row, position, logits, edited_logits, best_top, state, vocabulary):
    """Return the offset from ``logits`` of the logits that a row is sampled from, edited or not, and the largest of them."""
    is_edited = _is_edited(line, position)
    shift = tl.multiple_of((edited_logits.to(tl.int64) - logits.to(tl.int64)) >> 2, 4)
    own = tl.load(state + row * _STATE + _TOP).to(tl.int32).to(tl.float32, bitcast=True)
    top = tl.where(is_edited, own, tl.load(best_top + row))
    return row * vocabulary + tl.where(is_edited, shift, 0), top


@triton.jit
def _rank(value, token):
    """Return rank numbers, int64 >= 0: smaller is better."""
    return ((0x7FFFFFFF - ascending(value).to(tl.int64)) << _ID_BITS) | token.to(tl.int64)


@triton.jit
def _value_of(rank):
    number = (0x7FFFFFFF - (rank >> _ID_BITS)).to(tl.int32)
    return (number ^ ((number >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(rank):
    return rank & _ID_MASK


@triton.jit
def _scaled(x, top, temperature, log_min_p):
    # Reference: scale, drop_below
    scaled = tl.div_rn(x - top, temperature)
    return tl.where(scaled < log_min_p, float("-inf"), scaled)


@triton.jit
def _mix(x, key):
    # Reference: _mix_
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD + key
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _stream(line, position):
    # Reference: keys = _mix_(streams ^ positions[:, None], 0)
    place = (position + 1).to(tl.uint32, bitcast=True)
    half = tl.load(line + _STREAM + tl.arange(0, 2)).to(tl.int32).to(tl.uint32, bitcast=True)
    mixed = _mix(half ^ place, tl.zeros((2,), tl.uint32))
    which = tl.arange(0, 2)
    return tl.sum(tl.where(which == 0, mixed, 0), 0).to(tl.uint32), tl.sum(tl.where(which == 1, mixed, 0), 0).to(tl.uint32)


@triton.jit
def _minus_u(token, a, b):
    """Return ``minus_u`` of ``log_exponential`` for (stream, position, token id), in (-1, 0)."""
    bits = _mix(token.to(tl.uint32) ^ a, b) & 0x7FFFFFFF
    u = (bits.to(tl.int32).to(tl.float32) + 0.5) * -4.656612873077393e-10
    return tl.maximum(u, -0.999999940395355224609375)


@triton.jit
def _log_exponential(minus_u):
    # Reference: minus_u.log1p_().neg_().log_()
    w = 1.0 + minus_u
    d = w - 1.0  # exact: the part of minus_u that is in w
    log1p = tl.where(d == 0.0, minus_u, tl.log(w) * tl.div_rn(minus_u, tl.where(d == 0.0, 1.0, d)))
    return tl.log(-log1p)


@triton.jit
def _draw_keys(scaled, token, inside, a, b):
    """Return the keys of a draw: the winner has the largest, and of equal ones the lowest id."""
    time = scaled - _log_exponential(_minus_u(token, a, b))
    key = (ascending(time).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    return tl.where(inside, key, _NO_KEY)


@triton.jit(do_not_specialize=["last", "pieces"], do_not_specialize_on_alignment=["slots", "positions", "tokens", "places"])
def _edit_kernel(
    logits, edited, slots, positions, tokens, places, settings, state, partial, arrivals, last, vocabulary, pieces,
    PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = settings + _slot(slots, row, last) * _COLUMNS
    position = tl.load(positions + row)
    if not _is_edited(line, position):
        return
    token = tl.program_id(1) * _PIECE + tl.arange(0, _PIECE)
    live = token < vocabulary
    x = tl.load(logits + row * vocabulary + token, mask=live, other=float("-inf"))
    occurrences = tl.load(line + _OCCURRENCES).to(tl.int64)
    if occurrences != 0:
        # Reference: penalize
        counts = tl.multiple_of(occurrences.to(tl.pointer_type(tl.int32)), 16)
        seen = tl.load(counts + token, mask=live, other=0)
        for back in range(tl.load(places + row)):  # earlier drafts of the sequence count as generated
            seen += (token == tl.load(tokens + row - back)).to(tl.int32)
        count = seen & 0x7FFFFFFF
        repetition = tl.load(line + _REPETITION).to(tl.float32)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(seen != 0, repeated, x)
        x = x - tl.load(line + _FREQUENCY).to(tl.float32) * count.to(tl.float32)
        x = x - tl.load(line + _PRESENCE).to(tl.float32) * (count > 0).to(tl.float32)
    edits = tl.load(line + _EDITS).to(tl.int64)
    if edits != 0:
        x = x + tl.load(tl.multiple_of(edits.to(tl.pointer_type(tl.float32)), 16) + token, mask=live, other=0.0)
    if position + 1 < tl.load(line + _STOPS_FROM):
        stops = tl.load(line + _STOPS).to(tl.int64).to(tl.pointer_type(tl.int32))
        for i in range(tl.load(line + _NUM_STOPS).to(tl.int32)):
            x = tl.where(token == tl.load(stops + i), float("-inf"), x)
    tl.store(edited + row * vocabulary + token, x, mask=live)
    # Reference: argmax_finite
    tl.store(partial + row * 2 * pieces + tl.program_id(1), best_key(x, token))
    if arrive(arrivals, row, pieces):
        token_id = best_token(partial + row * 2 * pieces, pieces, PIECES)
        best = tl.load(edited + row * vocabulary + token_id, cache_modifier=".cg")
        tl.store(state + row * _STATE + _TOP, best.to(tl.int32, bitcast=True))
        tl.store(state + row * _STATE + _TOP_ID, token_id)


@triton.jit(do_not_specialize=["last", "pieces"], do_not_specialize_on_alignment=["slots", "positions"])
def _draw_kernel(
    logits,
    edited,
    best_top,
    best_ids,
    slots,
    positions,
    settings,
    state,
    partial,
    arrivals,
    last,
    vocabulary,
    pieces,
    PIECES: tl.constexpr,
    FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = settings + _slot(slots, row, last) * _COLUMNS
    temperature = tl.load(line + _TEMPERATURE).to(tl.float32)
    top_p = tl.load(line + _TOP_P)
    if (temperature == 0) | (tl.load(line + _TOP_K) > 0) | ((top_p == 1) & (not FIRST)):
        return
    position = tl.load(positions + row)
    begin, top = _source(line, row, position, logits, edited, best_top, state, vocabulary)
    if not (tl.abs(top) < _INF):
        return
    limit = tl.full((), _BEYOND, tl.int64)
    if not FIRST:
        limit = tl.load(state + row * _STATE + _LIMIT)
        if limit == _DONE:
            return
    token = tl.program_id(1) * _PIECE + tl.arange(0, _PIECE)
    x = tl.load(logits + begin + token, mask=token < vocabulary, other=float("-inf"))
    log_min_p = tl.load(line + _LOG_MIN_P).to(tl.float32)
    scaled = _scaled(x, top, temperature, log_min_p)
    inside = scaled > float("-inf")
    if not FIRST:
        inside = inside & (_rank(scaled, token) < limit)
    a, b = _stream(line, position)
    # Every draw includes the best token, ``best_id``. A token that beats it has an exponential variate, and hence a u, below
    # exp(scaled - rival). Mostly few have, and only for them are logarithms computed.
    own = tl.load(state + row * _STATE + _TOP_ID).to(tl.int32)
    best_id = tl.where(_is_edited(line, position), own, tl.load(best_ids + row).to(tl.int32))
    rival = -_log_exponential(_minus_u(best_id, a, b))
    fast = inside & (-0.999 * _minus_u(token, a, b) <= tl.exp(scaled - rival))
    place = partial + row * 2 * pieces + tl.program_id(1)
    if tl.max(fast.to(tl.int32), 0) > 0:
        tl.store(place, tl.max(_draw_keys(scaled, token, fast, a, b), 0))
    else:
        tl.store(place, _NO_KEY)
    if top_p < 1:
        tl.store(place + pieces, tl.sum(tl.where(inside, fixed_exp(scaled), 0), 0))
    if arrive(arrivals, row, pieces):
        winner = tl.minimum(best_token(partial + row * 2 * pieces, pieces, PIECES), vocabulary - 1)
        mine = state + row * _STATE
        if top_p == 1:
            tl.store(mine + _DRAWN, winner)
        else:
            mass = total_of(partial + (row * 2 + 1) * pieces, pieces, PIECES)
            next_limit = _rank(_scaled(tl.load(logits + begin + winner), top, temperature, log_min_p), winner)
            if FIRST:
                tl.store(mine + _TOTAL, mass)
                tl.store(mine + _LIMIT, next_limit)
            else:
                # Reference: _mass_before(mass) < wanted
                kept = mass.to(tl.float64) < top_p * tl.load(mine + _TOTAL).to(tl.float64)
                tl.store(mine + _DRAWN, _id_of(limit))
                tl.store(mine + _LIMIT, tl.where(kept, _DONE, next_limit))


@triton.jit
def _num_best(line, SCORE: tl.constexpr):
    """Return how many of a row's best tokens are needed: to list them if SCORE, otherwise to draw from them."""
    if SCORE:
        return tl.load(line + _NUM_LOGPROBS).to(tl.int32)
    top_k = tl.load(line + _TOP_K).to(tl.int32)
    return tl.where((tl.load(line + _TEMPERATURE) > 0) & (top_k <= _BEST), top_k, 0)


@triton.jit
def _distribution(line, row, position, logits, edited, best_top, state, vocabulary, SCORE: tl.constexpr):
    """Return the parameters of ``_values``: offset of the row's logits, maximum, temperature (0: raw logits), log min_p, cut."""
    begin, top = _source(line, row, position, logits, edited, best_top, state, vocabulary)
    temperature = tl.load(line + _TEMPERATURE).to(tl.float32)
    log_min_p = tl.load(line + _LOG_MIN_P).to(tl.float32)
    cut = tl.full((), _BEYOND, tl.int64)
    if SCORE:
        raw = tl.load(line + _PROCESSED) == 0
        begin = tl.where(raw, row * vocabulary, begin)
        top = tl.where(raw, tl.load(best_top + row), top)
        temperature = tl.where(raw, 0.0, temperature)
        if (temperature > 0) & ((tl.load(line + _TOP_K) > 0) | (tl.load(line + _TOP_P) < 1)):
            cut = tl.load(state + row * _STATE + _CUT)
    return begin, top, temperature, log_min_p, cut


@triton.jit
def _values(logits, begin, token, vocabulary, top, temperature, log_min_p, cut):
    x = tl.load(logits + begin + token, mask=token < vocabulary, other=float("-inf"))
    if temperature > 0:
        x = _scaled(x, top, temperature, log_min_p)
        x = tl.where(_rank(x, token) <= cut, x, float("-inf"))
    return x


@triton.jit(do_not_specialize=["last", "pieces"], do_not_specialize_on_alignment=["slots", "positions"])
def _peaks_kernel(
    logits, edited, best_top, slots, positions, settings, state, peaks, arrivals, last, vocabulary, pieces,
    PIECES: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = settings + _slot(slots, row, last) * _COLUMNS
    k = _num_best(line, SCORE)
    if k <= 0:
        return
    position = tl.load(positions + row)
    begin, top, temperature, log_min_p, cut = _distribution(line, row, position, logits, edited, best_top, state, vocabulary, SCORE)
    if not (tl.abs(top) < _INF):
        return
    piece = tl.program_id(1)
    x = _values(logits, begin, piece * _PIECE + tl.arange(0, _PIECE), vocabulary, top, temperature, log_min_p, cut)
    groups = tl.reshape(ascending(x), (_PIECE // _GROUPS, _GROUPS))
    tl.store(peaks + (row * pieces + piece) * _GROUPS + tl.arange(0, _GROUPS), tl.max(groups, 0))
    if arrive(arrivals, row, pieces):
        at = tl.arange(0, PIECES * _GROUPS)
        used = at < pieces * _GROUPS
        every = tl.load(peaks + row * pieces * _GROUPS + at, mask=used, other=0, cache_modifier=".cg")
        height = tl.where(used, every.to(tl.int64) + 0x80000000, -1)
        # The largest value that k group maxima reach, bit by bit. At least k tokens reach it, and not many more.
        reach = tl.zeros((), tl.int64)
        for i in range(32):
            higher = reach | (tl.full((), 0x80000000, tl.int64) >> i)
            reach = tl.where(tl.sum((height >= higher).to(tl.int32), 0) >= k, higher, reach)
        tl.store(state + row * _STATE + _REACH, reach - 0x80000000)
        tl.store((state + row * _STATE + _COUNT).to(tl.pointer_type(tl.int32)), 0)


@triton.jit
def _pick(logits, begin, vocabulary, top, temperature, log_min_p, cut, k, mine):
    """Store the k best tokens one by one, for rows with too many candidates because of ties; return how many there are."""
    count = tl.zeros((), tl.int32)
    last = tl.full((), -1, tl.int64)
    for i in range(k):
        next_best = tl.full((_PIECE,), _BEYOND, tl.int64)
        for start in range(0, vocabulary, _PIECE):
            token = start + tl.arange(0, _PIECE)
            x = _values(logits, begin, token, vocabulary, top, temperature, log_min_p, cut)
            rank = _rank(x, token)
            next_best = tl.minimum(next_best, tl.where((x > float("-inf")) & (rank > last), rank, _BEYOND))
        last = tl.min(next_best, 0)
        tl.store(mine + i, last)
        count += (last < _BEYOND).to(tl.int32)
    return count


@triton.jit(do_not_specialize=["last", "pieces", "rows"], do_not_specialize_on_alignment=["slots", "positions"])
def _best_kernel(
    logits,
    edited,
    best_top,
    slots,
    positions,
    settings,
    state,
    candidates,
    out,
    arrivals,
    last,
    vocabulary,
    pieces,
    rows,
    SCORE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = settings + _slot(slots, row, last) * _COLUMNS
    k = _num_best(line, SCORE)
    if k <= 0:
        return
    position = tl.load(positions + row)
    begin, top, temperature, log_min_p, cut = _distribution(line, row, position, logits, edited, best_top, state, vocabulary, SCORE)
    if not (tl.abs(top) < _INF):
        return
    token = tl.program_id(1) * _PIECE + tl.arange(0, _PIECE)
    x = _values(logits, begin, token, vocabulary, top, temperature, log_min_p, cut)
    take = (x > float("-inf")) & (ascending(x) >= tl.load(state + row * _STATE + _REACH).to(tl.int32))
    found = tl.sum(take.to(tl.int32), 0)
    counter = (state + row * _STATE + _COUNT).to(tl.pointer_type(tl.int32))
    mine = candidates + row * _CANDIDATES
    if found > 0:
        # The order of candidates is arbitrary; they are ranked below.
        at = tl.atomic_add(counter, found, sem="relaxed", scope="gpu") + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(mine + at, _rank(x, token), mask=take & (at < _CANDIDATES))
    if arrive(arrivals, row, tl.num_programs(1)):
        count = tl.load(counter, cache_modifier=".cg")
        if count > _CANDIDATES:
            count = _pick(logits, begin, vocabulary, top, temperature, log_min_p, cut, k, mine)
            tl.debug_barrier()
        j = tl.arange(0, _CANDIDATES)
        rank = tl.load(mine + j, mask=j < count, other=_BEYOND, cache_modifier=".cg")
        place, before = tl.zeros((_CANDIDATES,), tl.int32), tl.zeros((_CANDIDATES,), tl.int64)
        taken = tl.zeros((_CANDIDATES,), tl.int32)  # whether a token of the lowest ids is a candidate
        for start in range(0, count, _COMPARED):
            at = start + tl.arange(0, _COMPARED)
            other = tl.load(mine + at, mask=at < count, other=_BEYOND, cache_modifier=".cg")
            ahead = other[None, :] < rank[:, None]
            place += tl.sum(ahead.to(tl.int32), 1)
            if SCORE:
                taken += tl.sum((_id_of(other)[None, :] == j[:, None]).to(tl.int32), 1)
            else:
                weight = fixed_exp(tl.where(at < count, _value_of(other), float("-inf")))
                before += tl.sum(tl.where(ahead, weight[None, :], 0), 1)
        chosen = (j < count) & (place < k)
        value = tl.where(chosen, _value_of(rank), float("-inf"))
        token_id = _id_of(rank).to(tl.int32)
        if SCORE:
            log_sum = tl.load(state + row * _STATE + _LOG_SUM).to(tl.int32).to(tl.float32, bitcast=True)
            logprob = tl.where(temperature > 0, value, value - top) - log_sum
            line_at = out + (_HEADER + 2 * place) * rows + row
            tl.store(line_at, token_id, mask=chosen)
            tl.store(line_at + rows, logprob.to(tl.int32, bitcast=True), mask=chosen)
            if count < k:
                # Tokens at -inf follow, the lowest ids first.
                place = count + tl.cumsum((taken == 0).to(tl.int32), 0) - 1
                line_at = out + (_HEADER + 2 * place) * rows + row
                tl.store(line_at, j, mask=(taken == 0) & (place < k))
                tl.store(line_at + rows, -0x800000, mask=(taken == 0) & (place < k))  # -inf
        else:
            # Reference: keep_best
            top_p = tl.load(line + _TOP_P)
            mass = top_p * tl.sum(fixed_exp(value), 0).to(tl.float64)
            kept = chosen & (before.to(tl.float64) < tl.where(top_p == 1, float("inf"), mass))
            a, b = _stream(line, position)
            winner = tl.max(_draw_keys(value, token_id, kept, a, b), 0)
            tl.store(state + row * _STATE + _DRAWN, 0x7FFFFFFF - (winner & 0x7FFFFFFF))
            tl.store(state + row * _STATE + _CUT, tl.max(tl.where(kept, rank, 0), 0))


@triton.jit(do_not_specialize=["last"], do_not_specialize_on_alignment=["slots", "positions"])
def _search_kernel(
    logits, edited, best_top, slots, positions, settings, state, last, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = settings + _slot(slots, row, last) * _COLUMNS
    temperature = tl.load(line + _TEMPERATURE).to(tl.float32)
    top_k, top_p = tl.load(line + _TOP_K).to(tl.int32), tl.load(line + _TOP_P)
    scored = (tl.load(line + _NUM_LOGPROBS) >= 0) & (tl.load(line + _PROCESSED) != 0)
    if (temperature == 0) | ((top_k > 0) & (top_k <= _BEST)) | ((top_k == 0) & (top_p == 1)):
        return
    mine = state + row * _STATE
    if (top_k == 0) & (not scored) & (tl.load(mine + _LIMIT) == _DONE):
        return
    position = tl.load(positions + row)
    begin, top = _source(line, row, position, logits, edited, best_top, state, vocabulary)
    if not (tl.abs(top) < _INF):
        return
    log_min_p = tl.load(line + _LOG_MIN_P).to(tl.float32)
    cut = tl.full((), _BEYOND, tl.int64)
    for stage in range(2):  # top_k, then top_p of the tokens that top_k keeps
        goal = top_k.to(tl.float64)
        if stage == 1:
            total = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, vocabulary, BLOCK):
                token = start + tl.arange(0, BLOCK)
                total += fixed_exp(_values(logits, begin, token, vocabulary, top, temperature, log_min_p, cut))
            goal = top_p * tl.sum(total, 0).to(tl.float64)
        if tl.where(stage == 0, top_k > 0, top_p < 1):
            # The largest rank number before which there is less than the goal: a number of tokens, or a mass.
            found = tl.zeros((), tl.int64)
            for i in range(_RANK_BITS):
                trial = found | (tl.full((), _HIGHEST_BIT, tl.int64) >> i)
                before = tl.zeros((BLOCK,), tl.int64)
                for start in range(0, vocabulary, BLOCK):
                    token = start + tl.arange(0, BLOCK)
                    x = _values(logits, begin, token, vocabulary, top, temperature, log_min_p, cut)
                    weight = tl.where(stage == 0, (token < vocabulary).to(tl.int64), fixed_exp(x))
                    before += tl.where(_rank(x, token) < trial, weight, 0)
                found = tl.where(tl.sum(before, 0).to(tl.float64) < goal, trial, found)
            cut = tl.minimum(cut, found)
    a, b = _stream(line, position)
    best = tl.full((), _NO_KEY, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _values(logits, begin, token, vocabulary, top, temperature, log_min_p, cut)
        best = tl.maximum(best, tl.max(_draw_keys(x, token, x > float("-inf"), a, b), 0))
    tl.store(mine + _DRAWN, 0x7FFFFFFF - (best & 0x7FFFFFFF))
    tl.store(mine + _CUT, cut)


@triton.jit(
    do_not_specialize=["last", "rows", "vocabulary"],
    do_not_specialize_on_alignment=["slots", "positions", "tokens", "places"],
)
def _finish_kernel(
    best_top, best_ids, finite, slots, positions, tokens, places, settings, state, last_token, out, last, rows, vocabulary,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(places + row) > 0:
        return
    more, counts = row < rows, row < rows  # whether there is another row; whether all earlier samples equal the drafts
    while more:
        slot = _slot(slots, row, last)
        line = settings + slot * _COLUMNS
        edited = _is_edited(line, tl.load(positions + row))
        mine = state + row * _STATE
        top = tl.where(edited, tl.load(mine + _TOP).to(tl.int32).to(tl.float32, bitcast=True), tl.load(best_top + row))
        feasible = tl.abs(top) < _INF
        token_id = tl.where(edited, tl.load(mine + _TOP_ID), tl.load(best_ids + row))
        token_id = tl.where(feasible & (tl.load(line + _TEMPERATURE) > 0), tl.load(mine + _DRAWN), token_id)
        token_id = tl.minimum(tl.maximum(token_id, 0), vocabulary - 1)
        tl.store(out + row, token_id.to(tl.int32))
        tl.store(out + rows + row, tl.load(finite + row).to(tl.int32))
        tl.store(out + 2 * rows + row, feasible.to(tl.int32))
        tl.store(last_token + slot, token_id, mask=counts)
        occurrences = tl.load(line + _OCCURRENCES).to(tl.int64)
        if counts & (occurrences != 0):
            tl.atomic_add(occurrences.to(tl.pointer_type(tl.int32)) + token_id, 1)
        row += 1
        more = tl.load(places + row, mask=row < rows, other=0) > 0
        counts = counts & (token_id == tl.load(tokens + row, mask=more, other=-1))


@triton.jit(do_not_specialize=["last", "pieces", "rows"], do_not_specialize_on_alignment=["slots", "positions"])
def _score_kernel(
    logits, edited, best_top, slots, positions, settings, state, partial, out, arrivals, last, vocabulary, pieces, rows,
    PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = settings + _slot(slots, row, last) * _COLUMNS
    if tl.load(line + _NUM_LOGPROBS) < 0:
        return
    position = tl.load(positions + row)
    begin, top, temperature, log_min_p, cut = _distribution(line, row, position, logits, edited, best_top, state, vocabulary, True)
    if not (tl.abs(top) < _INF):
        return
    token = tl.program_id(1) * _PIECE + tl.arange(0, _PIECE)
    x = _values(logits, begin, token, vocabulary, top, temperature, log_min_p, cut)
    sampled = tl.load(logits + begin + tl.load(out + row))
    if temperature > 0:
        sampled = _scaled(sampled, top, temperature, log_min_p)
        top = 0.0
    mine = partial + row * 2 * pieces + tl.program_id(1)
    tl.store(mine, tl.sum(fixed_exp(x - top), 0))
    tl.store(mine + pieces, tl.sum((x > sampled).to(tl.int64), 0))
    if arrive(arrivals, row, pieces):
        log_sum = log_of_fixed(total_of(partial + row * 2 * pieces, pieces, PIECES))
        tl.store(out + 3 * rows + row, (1 + total_of(partial + (row * 2 + 1) * pieces, pieces, PIECES)).to(tl.int32))
        tl.store(out + 4 * rows + row, (sampled - top - log_sum).to(tl.int32, bitcast=True))
        tl.store(state + row * _STATE + _LOG_SUM, log_sum.to(tl.int32, bitcast=True))


def sample_rows_triton(given: SampleInputs) -> Tensor:
    """Launch ``sample_rows``."""
    logits, (top, best_ids, finite), slots, positions, settings, last_token, space, needs, drafts, scored, masks = given
    (rows, vocabulary), device = logits.shape, logits.device
    tokens, places = (slots, space.single) if drafts is None else drafts  # kernels read no ``tokens`` of single rows
    assert tokens.dtype == places.dtype == torch.int32 and tokens.is_contiguous() and places.is_contiguous()
    assert logits.dtype == torch.float32 and logits.is_contiguous() and rows <= min(len(space.state), COUNTERS), logits.shape
    assert slots.dtype == positions.dtype == torch.int32 and slots.is_contiguous() and positions.is_contiguous()
    assert settings.dtype == torch.float64 and settings.is_contiguous() and last_token.dtype == torch.int64
    out = torch.empty(HEADER + 2 * BEST, rows, dtype=torch.int32, device=device)
    if rows == 0:
        return out
    pieces, last = ceil_div(vocabulary, PIECE), len(settings) - 1
    assert (space.edited.data_ptr() - logits.data_ptr()) % 16 == 0
    common = (slots, positions, settings, space.state)
    placed = (slots, positions, tokens, places, settings, space.state)
    arrivals, grid = counters_of(device), (rows, pieces)
    shape: dict[str, Any] = {"PIECES": power_of_2(pieces)}
    options: dict[str, Any] = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
    if Needs.EDITS in needs:
        editing = (logits, space.edited, *placed, space.partial, arrivals, last, vocabulary, pieces)
        _edit_kernel[grid](*editing, **shape, **options)
    if masks is not None:
        apply_masks(space, masks)
    source = (logits, space.edited, top)
    if needs & (Needs.DRAWS | Needs.NUCLEI):
        drawing = (*source, best_ids, *common, space.partial, arrivals, last, vocabulary, pieces)
        for number in range(1 + ROUNDS if Needs.NUCLEI in needs else 1):
            _draw_kernel[grid](*drawing, FIRST=number == 0, **shape, **options)

    def list_best(score: bool) -> None:
        peaking = (*source, *common, space.peaks, arrivals, last, vocabulary, pieces)
        _peaks_kernel[grid](*peaking, SCORE=score, **shape, **options)
        gathering = (*source, *common, space.candidates, out, arrivals, last, vocabulary, pieces, rows)
        _best_kernel[grid](*gathering, SCORE=score, **options)

    if Needs.BEST in needs:
        list_best(False)
    if needs & (Needs.SEARCHES | Needs.NUCLEI):
        block = min(_SEARCH_BLOCK, power_of_2(vocabulary))
        _search_kernel[(rows,)](*source, *common, last, vocabulary, BLOCK=block, num_warps=16, enable_fp_fusion=False)
    if scored is None:
        ending = (top, best_ids, finite.view(torch.uint8), *placed, last_token, out, last, rows, vocabulary)
        _finish_kernel[(rows,)](*ending, num_warps=1, enable_fp_fusion=False)
    else:
        out[0] = scored
        out[4].view(torch.float32).fill_(float("nan"))
    if Needs.SCORES in needs:
        _score_kernel[grid](*source, *common, space.partial, out, arrivals, last, vocabulary, pieces, rows, **shape, **options)
    if Needs.LISTS in needs:
        list_best(True)
    return out
