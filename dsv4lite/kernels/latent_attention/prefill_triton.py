"""The up-projected form: each head has its own keys and values, which are computed from latent rows in rounds.

A round reads rows of one or several sequences and up-projects them once for all queries; then one program attends with a block of a
sequence's tokens and one head. If a sequence continues in the next round, its blocks' partial sums are stored in float32.

With a selection, a first launch writes each token's positions as bits. Programs read all rows: until a sequence is several times as
long as the selection, products of a block of queries with all rows cost less than reading the rows of each query by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention.merge_triton import LOW, softmax_step
from dsv4lite.kernels.dispatch import LARGE_SHARED_MEMORY, capability_of, ceil_div, compiled, power_of_2, send
from dsv4lite.kernels.gemm import float_linear
from dsv4lite.kernels.latent_attention import PLACE_ROWS, LatentAttentionInputs, captured_rows, projected_rows
from dsv4lite.kernels.latent_attention.prefill_hopper_triton import KEYS, QUERIES, attend_round, takes_round
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows.packed import LOG2_E, narrowed
from dsv4lite.kernels.rows.triton import only_if, rotate

_WORD = 32  # bits of a word of ``selection_bits``


class Round(NamedTuple):
    """Rows that are up-projected together.

    Attributes:
        addresses_R: Addresses of the rows, int64.
        blocks: int32 [B, 8], for each block of queries: its first row in the step, its number of queries, its first position; the
            first position of its sequence's rows in this round, their number, and the index of the first one in the round; whether
            sums continue from the previous round, and whether they are complete after this one. Blocks past the last are zeros.
        used: int32 [1], the number of blocks.
    """

    addresses_R: Tensor
    blocks: Tensor
    used: Tensor


class _Tile(NamedTuple):
    """How kernels divide the work.

    Attributes:
        hopper: ``prefill_hopper_triton`` does it.
        queries: Most tokens of a block.
        keys: Rows of a piece. The rows of a sequence begin at multiples of it in a round; the rows between repeat its last.
        stages, num_warps: Of the kernel for any chip.
    """

    hopper: bool
    queries: int
    keys: int
    stages: int
    num_warps: int

    @classmethod
    def of(cls, given: LatentAttentionInputs) -> _Tile:
        channels, itemsize = given.up_HCL.shape[1], given.q_THC.element_size()
        width = sum(max(16, power_of_2(size)) for size in (given.nope, channels - given.nope))
        if capability_of(given.q_THC.device) in LARGE_SHARED_MEMORY and itemsize == 2 and width <= 256:
            hopper = takes_round(given)
            return cls(hopper, QUERIES, KEYS if hopper else 64, stages=3, num_warps=8)
        return cls(False, 32 if itemsize == 4 else 64, 32, stages=1 if width > 256 else 2, num_warps=4)


def _owners(stop_S: Tensor, begin: int, count: int) -> Tensor:
    """Return which sequence each of ``count`` items from ``begin`` on belongs to, int64; sequence s has those before ``stop_S[s]``.

    Items past the last stop belong to the last sequence. On a CPU, ``searchsorted`` may wait milliseconds for other threads.
    """
    stops = torch.zeros(count + 1, dtype=torch.int64, device=stop_S.device)
    stops.index_add_(0, (stop_S - begin).clamp(0, count), torch.ones_like(stop_S))
    return stops[:count].cumsum(0).clamp_max(len(stop_S) - 1)


def _places(spans_3S: Tensor, tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each sequence's rows begin and stop, if those of all prompts lie one after the other, and how many it has."""
    _, new_S, first_S = spans_3S
    end_S = (first_S + new_S).masked_fill(new_S == 0, 0)
    size_S = -(-end_S // tile.keys) * tile.keys
    stop_S = size_S.cumsum(0)
    return stop_S - size_S, stop_S, end_S


def _rows_of(spans_3S: Tensor, begin: int, count: int, tile: _Tile) -> tuple[Tensor, Tensor]:
    """Return sequences and positions of a round's rows, int64 [R]: of ``count`` rows of all prompts, from ``begin`` on."""
    start_S, stop_S, end_S = _places(spans_3S, tile)
    owner_R = _owners(stop_S, begin, count)
    at_R = torch.arange(begin, begin + count, device=start_S.device)
    return owner_R, torch.minimum(at_R - start_S[owner_R], end_S[owner_R] - 1).clamp_min(0)


def _blocks_of(spans_3S: Tensor, begin: int, count: int, blocks: int, tile: _Tile) -> Tensor:
    """Return ``Round.blocks`` of the same round, int64 [B, 8]; blocks that see none of its rows are zeros.

    Args:
        spans_3S: From ``LatentAttentionInputs.prompts``.
        begin, count: The rows of the round.
        blocks: B, at least the number of blocks of all prompts.
        tile: Sizes of blocks and pieces.
    """
    (row_S, new_S, first_S), (start_S, _, end_S) = spans_3S, _places(spans_3S, tile)
    pieces_S = -(-new_S // tile.queries)
    stop_S = pieces_S.cumsum(0)
    owner_B = _owners(stop_S, 0, blocks)
    at_B = (torch.arange(blocks, device=stop_S.device) - (stop_S - pieces_S)[owner_B]) * tile.queries
    size_B = (new_S[owner_B] - at_B).clamp(0, tile.queries)
    position_B = first_S[owner_B] + at_B
    read_S = (begin - start_S).clamp_min(0)  # in earlier rounds
    count_S = (torch.minimum(end_S, begin + count - start_S) - read_S).clamp_min(0)
    read_B, count_B, newest_B = read_S[owner_B], count_S[owner_B], position_B + size_B - 1
    where_B6 = [row_S[owner_B] + at_B, size_B, position_B, read_B, count_B, (start_S + read_S)[owner_B] - begin]
    block_B8 = torch.stack([*where_B6, (read_B > 0).long(), (newest_B < read_B + count_B).long()], 1)
    return block_B8.masked_fill(~((size_B > 0) & (count_B > 0) & (newest_B >= read_B))[:, None], 0)


class PromptPlan(NamedTuple):
    """What the layers of a step share.

    Attributes:
        tile: How their kernels divide the work.
        rounds: The rows of prompts: as many rounds as they need if the host knows ``spans``, one of fixed size in a captured step.
        spans: Those of the prompts, if the host knows them.
        rest: The paging of the other tokens: in a captured step those of prompts are padding.
    """

    tile: _Tile
    rounds: Sequence[Round]
    spans: Sequence[tuple[int, int, int]]
    rest: Paging


def plan_prompts(given: LatentAttentionInputs) -> PromptPlan:
    """Return the plan for the prompts of a step."""
    paging, tile = given.paging, _Tile.of(given)
    if given.captured:
        prompts_S = given.prompts()[1] > 0
        positions_T = paging.positions_T.masked_fill(prompts_S[paging.sequence_T.long()], -1)
        return PromptPlan(tile, _plan_rounds(given, tile, ()), (), replace(paging, positions_T=positions_T))
    spans = [paging.spans()[sequence] for sequence in given.projected]
    return PromptPlan(tile, _plan_rounds(given, tile, spans), spans, paging)


def _plan_rounds(given: LatentAttentionInputs, tile: _Tile, spans: Sequence[tuple[int, int, int]]) -> list[Round]:
    """Return ``PromptPlan.rounds``; ``spans`` is that of the plan."""
    (heads, channels, _), itemsize, device = given.up_HCL.shape, given.up_HCL.element_size(), given.paging.grow_SP.device
    spans_3S, table_SP, per_page, captured = given.prompts(), given.paging.grow_SP.long(), given.rows.rows_per_page, given.captured
    if captured:
        total = most = captured_rows(len(given.q_THC), heads, channels, itemsize)
        blocks = len(given.q_THC) // tile.queries + min(spans_3S.shape[1], total // PLACE_ROWS)
    else:
        most = ceil_div(given.chunk_rows or projected_rows(heads, channels, itemsize), KEYS) * KEYS
        total = sum(ceil_div(first + new, tile.keys) * tile.keys for _, new, first in spans)
        blocks = sum(ceil_div(new, tile.queries) for _, new, _ in spans)
    rounds = []
    for begin in range(0, total, most):
        count = min(most, total - begin)
        block_B8 = _blocks_of(spans_3S, begin, count, blocks, tile)
        if not captured:
            block_B8 = send(block_B8[block_B8[:, 1] > 0], device)
        owner_R, position_R = _rows_of(spans_3S if captured else send(spans_3S, device), begin, count, tile)
        addresses_R = table_SP[owner_R, position_R // per_page] * per_page + position_R % per_page
        rounds.append(Round(addresses_R, block_B8.int(), (block_B8[:, 1] > 0).sum(dtype=torch.int32)[None]))
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
    (tokens, top_k), longest = given.selected_TK.shape, given.paging.grow_SP.shape[1] * given.rows.rows_per_page
    bits_TW = torch.zeros(tokens, ceil_div(longest, KEYS) * KEYS // _WORD, dtype=torch.int32, device=given.q_THC.device)
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


def attend_projected(given: LatentAttentionInputs, prompts: PromptPlan, out_THV: Tensor) -> None:
    """Write the results of the tokens of prompts."""
    q, up_HCL, nope, device, (tile, rounds, *_) = given.q_THC, given.up_HCL, given.nope, given.q_THC.device, prompts
    (tokens, heads, _), (_, channels, latent) = q.shape, up_HCL.shape
    waits, selects = len(rounds) > 1, given.selected_TK is not None
    bits_TW = selection_bits(given) if selects else given.paging.grow_SP
    parts = torch.empty((tokens, heads, channels - nope) if waits else (1,), dtype=torch.float32, device=device)
    stats = torch.empty((tokens, heads, 2) if waits else (1,), dtype=torch.float32, device=device)
    for addresses_R, blocks, used in rounds:
        rows = given.rows.read(addresses_R, q.dtype)
        projected = float_linear(rows[:, :latent], up_HCL.flatten(0, 1), q.dtype)
        if tile.hopper:
            attend_round(given, projected, rows, (blocks, used), bits_TW, (out_THV, parts, stats))
        else:
            _projected_kernel[(len(blocks), heads)](
                q, *given.angles(), projected, rows, blocks, bits_TW, out_THV, parts, stats, q.stride(0), bits_TW.stride(0),
                given.scale * LOG2_E,
                H=heads, NOPE=nope, ROPE=given.rope, VALUE=channels - nope, LATENT=latent, KEY=max(16, power_of_2(nope)),
                TAIL=max(16, power_of_2(given.rope)), OUT=max(16, power_of_2(channels - nope)), QUERIES=tile.queries,
                KEYS=tile.keys, STAGES=tile.stages, SELECTED=selects, TURNS=given.cos is not None,
                num_warps=tile.num_warps, num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip
        del rows, projected
