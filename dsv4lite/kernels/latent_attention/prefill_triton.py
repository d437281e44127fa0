"""The up-projected form: each head has its own keys and values, which are computed from latent rows in rounds.

A round reads rows of one or several sequences and up-projects them once for all queries; then one program attends with a block of a
sequence's tokens and one head. If a sequence continues in the next round, its blocks' partial sums are stored in float32.

With a selection, a first launch writes each token's positions as bits. Programs read all rows: until a sequence is several times as
long as the selection, products of a block of queries with all rows cost less than reading the rows of each query by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention.merge_triton import LOW, softmax_step
from dsv4lite.kernels.dispatch import LARGE_SHARED_MEMORY, capability_of, ceil_div, compiled, power_of_2, send
from dsv4lite.kernels.gemm import float_linear
from dsv4lite.kernels.latent_attention import LatentAttentionInputs, projected_rows
from dsv4lite.kernels.latent_attention.prefill_hopper_triton import KEYS, QUERIES, attend_round, takes_round
from dsv4lite.kernels.rows.packed import LOG2_E, narrowed
from dsv4lite.kernels.rows.triton import only_if, rotate

_CUT = KEYS  # first positions in a round are multiples of it, for words of ``selection_bits``


class Round(NamedTuple):
    """Rows that are up-projected together.

    Attributes:
        addresses_R: Addresses of the rows, int64.
        blocks: int32 [B, 8], for each block of queries: its first row in the step, its number of queries, its first position; the
            first position of its sequence's rows in this round, their number, and the index of the first one in the round; whether
            sums continue from the previous round, and whether they are complete after this one.
    """

    addresses_R: Tensor
    blocks: Tensor


def _pieces(spans: Sequence[tuple[int, int, int, int]], most: int, unit: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Cut the rows of sequences into rounds of ``most``; yield each round's parts: span index, first position, count, place.

    First positions are multiples of ``_CUT``, places of ``unit``.
    """
    parts: list[tuple[int, int, int, int]] = []
    used = 0
    for index, (_, _, new, first) in enumerate(spans):
        begin = 0
        while begin < first + new:
            count, room = first + new - begin, most - used
            if count > room:
                count = room // _CUT * _CUT
            if count:
                parts.append((index, begin, count, used))
                begin, used = begin + count, used + ceil_div(count, unit) * unit
            if begin < first + new or used == most:
                yield parts
                parts, used = [], 0
    if parts:
        yield parts


def plan_rounds(given: LatentAttentionInputs, sequences: Sequence[int], queries: int, unit: int = 1) -> list[Round]:
    """Return the rounds of some sequences, for which the host must know ``spans``.

    Args:
        given: Inputs of the step.
        sequences: Their indices.
        queries: Most tokens of a block.
        unit: The rows of a sequence begin at multiples of it in a round; the rows between repeat the sequence's last.
    """
    paging, per_page = given.paging, given.rows.rows_per_page
    device, table_SP = paging.grow_SP.device, paging.grow_SP.long()
    spans = [(sequence, *paging.spans()[sequence]) for sequence in sequences]
    heads, channels, _ = given.up_HCL.shape
    most = ceil_div(max(_CUT, given.chunk_rows or projected_rows(heads, channels, given.up_HCL.element_size())), unit) * unit
    rounds = []
    for parts in _pieces(spans, most, unit):
        blocks, owner, place = [], [], []
        for index, begin, count, used in parts:
            sequence, row, new, first = spans[index]
            rows = ceil_div(count, unit) * unit
            owner.append(torch.full((rows,), sequence, dtype=torch.int64, device="cpu"))
            place.append(torch.arange(begin, begin + rows, dtype=torch.int64, device="cpu").clamp_(max=begin + count - 1))
            for at in range(0, new, queries):
                size = min(queries, new - at)
                last = first + at + size - 1
                if last >= begin:
                    blocks.append((row + at, size, first + at, begin, count, used, begin > 0, last < begin + count))
        owner_R, place_R = send(torch.stack([torch.cat(owner), torch.cat(place)]), device)
        addresses_R = table_SP[owner_R, place_R // per_page] * per_page + place_R % per_page
        rounds.append(Round(addresses_R, send(torch.tensor(blocks, dtype=torch.int32, device="cpu"), device)))
    return rounds


@triton.jit(do_not_specialize=["words"])
def _selection_bits_kernel(selected, positions, bits, words, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    visible = tl.load(positions + t) + 1
    bits += t * words
    if visible > TOP_K:
        for begin in tl.static_range(0, TOP_K, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            position = tl.load(selected + t * TOP_K + at, mask=at < TOP_K, other=0)
            tl.atomic_or(bits + position // 32, 1 << (position % 32), mask=at < TOP_K, sem="relaxed")
    else:
        # The token attends to every position it sees.
        for begin in range(0, visible, 32 * BLOCK):
            word = begin // 32 + tl.arange(0, BLOCK)
            count = tl.minimum(visible - word * 32, 32)
            tl.store(bits + word, tl.where(count == 32, -1, (1 << count) - 1), mask=count > 0)


def selection_bits(given: LatentAttentionInputs) -> Tensor:
    """Return the positions that each token attends to as bits, int32 [T, W]: bit p % 32 of word p // 32 for position p."""
    assert given.selected_TK is not None and given.selected_TK.is_contiguous()
    (tokens, top_k), longest = given.selected_TK.shape, max(first + new for _, new, first in given.paging.spans())
    bits_TW = torch.zeros(tokens, ceil_div(longest, _CUT) * _CUT // 32, dtype=torch.int32, device=given.q_THC.device)
    _selection_bits_kernel[(tokens,)](
        given.selected_TK, given.paging.positions_T, bits_TW, bits_TW.shape[1], TOP_K=top_k, BLOCK=min(1024, power_of_2(top_k)),
        num_warps=4,
    )  # fmt: skip
    return bits_TW


@triton.jit
def _with_rows(
    acc, peak, total, q0, q1, last, bits, projected, rows, begin, end, place, head, scale,
    H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, KEY: tl.constexpr,
    TAIL: tl.constexpr, OUT: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Return the sums with the rows from ``begin`` on added.

    MASK is 0 if every query sees all of them, 1 if each sees those up to ``last``, and 2 if each sees those of its ``bits``.
    """
    FLOAT32: tl.constexpr = projected.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = "tf32x3" if FLOAT32 else "tf32"
    key = begin + tl.arange(0, KEYS)
    live = (key < end)[:, None]
    channel = tl.arange(0, KEY)[None, :]
    tail = tl.arange(0, TAIL)[None, :]
    value = tl.arange(0, OUT)[None, :]
    of_head = projected + ((place + key) * H + head)[:, None] * (NOPE + VALUE)
    k0 = tl.load(of_head + channel, mask=live & (channel < NOPE), other=0.0)
    k1 = tl.load(rows + (place + key)[:, None] * (LATENT + ROPE) + LATENT + tail, mask=live & (tail < ROPE), other=0.0)
    v = tl.load(of_head + NOPE + value, mask=live & (value < VALUE), other=0.0)
    if not compiled():
        k0, k1, v = k0.to(tl.float32), k1.to(tl.float32), v.to(tl.float32)
    # Reference: attend, and merged
    logits = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    logits = tl.dot(q1, tl.trans(k1), logits, input_precision=PRECISION) * scale
    if MASK == 1:
        logits = tl.where(key[None, :] <= last[:, None], logits, float("-inf"))
    if MASK == 2:
        bit = tl.arange(0, KEYS)[None, :]
        word = tl.load(bits + begin // 32)[:, None]
        if KEYS == 64:
            word = tl.where(bit < 32, word, tl.load(bits + begin // 32 + 1)[:, None])
        logits = tl.where((word & (1 << bit % 32)) != 0, logits, float("-inf"))
    p, shrink, peak, total = softmax_step(logits, peak, total, 1)
    acc = tl.dot(narrowed(p, FLOAT32), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, peak, total


@triton.jit(do_not_specialize=["words"])
def _projected_kernel(
    q, cos, sin, projected, rows, blocks, bits, out, parts, stats, q_row, words, scale,
    H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, KEY: tl.constexpr,
    TAIL: tl.constexpr, OUT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SELECTED: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    FLOAT32: tl.constexpr = q.dtype.element_ty == tl.float32
    blocks += tl.program_id(0) * 8
    head = tl.program_id(1)
    row, size, position = tl.load(blocks).to(tl.int64), tl.load(blocks + 1), tl.load(blocks + 2)
    first, count, place = tl.load(blocks + 3), tl.load(blocks + 4), tl.load(blocks + 5).to(tl.int64)
    goes_on, complete = tl.load(blocks + 6), tl.load(blocks + 7)
    i = tl.arange(0, QUERIES)
    here = (i < size)[:, None]
    channel = tl.arange(0, KEY)[None, :]
    tail = tl.arange(0, TAIL)[None, :]
    value = tl.arange(0, OUT)[None, :]
    at = (row + i) * H + head
    q += (row + i)[:, None] * q_row + head * (NOPE + ROPE)
    q0 = tl.load(q + channel, mask=here & (channel < NOPE), other=0.0)
    q1 = tl.load(q + NOPE + tail, mask=here & (tail < ROPE), other=0.0)
    if TURNS:
        # Reference: rope
        pair = tl.arange(0, TAIL // 2)[None, :]
        angle, inside = (row + i)[:, None] * (ROPE // 2) + pair, here & (pair < ROPE // 2)
        c, s = tl.load(cos + angle, mask=inside, other=1.0), tl.load(sin + angle, mask=inside, other=0.0)
        q1 = rotate(q1.to(tl.float32), c, s, pair < ROPE // 2, QUERIES, TAIL, FLOAT32).to(q1.dtype)
    if not compiled():
        q0, q1 = q0.to(tl.float32), q1.to(tl.float32)
    again = only_if(goes_on > 0, i < size)
    acc = tl.load(parts + at[:, None] * VALUE + value, mask=again[:, None] & (value < VALUE), other=0.0)
    peak = tl.load(stats + at * 2, mask=again, other=LOW)
    total = tl.load(stats + at * 2 + 1, mask=again, other=0.0)
    end = tl.minimum(count, position + size - first)
    last = tl.minimum(position + i - first, count - 1)
    seen = 0
    if SELECTED:
        bits += (row + tl.minimum(i, size - 1)) * words + first // 32
    else:
        # Comparisons for each logit take a tenth of the time: only the last rows, which not every query sees, have them.
        seen = tl.maximum(tl.minimum(position + 1 - first, count), 0) // KEYS * KEYS
        for begin in tl.range(0, seen, KEYS, num_stages=STAGES):
            acc, peak, total = _with_rows(
                acc, peak, total, q0, q1, last, bits, projected, rows, begin, seen, place, head, scale,
                H, NOPE, ROPE, VALUE, LATENT, KEY, TAIL, OUT, KEYS, 0,
            )  # fmt: skip
    for begin in tl.range(seen, end, KEYS, num_stages=STAGES):
        acc, peak, total = _with_rows(
            acc, peak, total, q0, q1, last, bits, projected, rows, begin, end, place, head, scale,
            H, NOPE, ROPE, VALUE, LATENT, KEY, TAIL, OUT, KEYS, 2 if SELECTED else 1,
        )  # fmt: skip
    inside = here & (value < VALUE)
    if complete > 0:
        o = narrowed(acc / tl.where(total > 0.0, total, 1.0)[:, None], FLOAT32)
        tl.store(out + at[:, None] * VALUE + value, o.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(parts + at[:, None] * VALUE + value, acc, mask=inside)
        tl.store(stats + at * 2, peak, mask=i < size)
        tl.store(stats + at * 2 + 1, total, mask=i < size)


def attend_projected(given: LatentAttentionInputs, sequences: Sequence[int], out_THV: Tensor) -> None:
    """Write the results of some sequences' tokens in the up-projected form."""
    q, up_HCL, nope, device = given.q_THC, given.up_HCL, given.nope, given.q_THC.device
    (tokens, heads, _), (_, channels, latent) = q.shape, up_HCL.shape
    key, value = (max(16, power_of_2(size)) for size in (nope, channels - nope))
    hopper = takes_round(given, len(sequences))
    large = capability_of(device) in LARGE_SHARED_MEMORY and q.element_size() == 2 and key + value <= 256
    queries, keys, stages = (QUERIES, 64, 3) if large else (32 if q.element_size() == 4 else 64, 32, 1 if key + value > 256 else 2)
    unit = KEYS if hopper else 1
    name = ("rounds", tuple(sequences), heads, channels, queries, unit, given.chunk_rows, given.rows.rows_per_page)
    rounds = given.paging.once(name, lambda: plan_rounds(given, sequences, queries, unit))
    waits, selects = len(rounds) > 1, given.selected_TK is not None
    bits_TW = selection_bits(given) if selects else given.paging.grow_SP
    parts = torch.empty((tokens, heads, channels - nope) if waits else (1,), dtype=torch.float32, device=device)
    stats = torch.empty((tokens, heads, 2) if waits else (1,), dtype=torch.float32, device=device)
    for addresses_R, blocks in rounds:
        rows = given.rows.read(addresses_R, q.dtype)
        projected = float_linear(rows[:, :latent], up_HCL.flatten(0, 1), q.dtype)
        if hopper:
            attend_round(given, projected, rows, blocks, bits_TW, (out_THV, parts, stats))
        else:
            _projected_kernel[(len(blocks), heads)](
                q, *given.angles(), projected, rows, blocks, bits_TW, out_THV, parts, stats, q.stride(0), bits_TW.stride(0),
                given.scale * LOG2_E,
                H=heads, NOPE=nope, ROPE=given.rope, VALUE=channels - nope, LATENT=latent, KEY=key,
                TAIL=max(16, power_of_2(given.rope)), OUT=value, QUERIES=queries, KEYS=keys, STAGES=stages,
                SELECTED=selects, TURNS=given.cos is not None, num_warps=8 if large else 4, num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip
        del rows, projected
