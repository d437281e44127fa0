"""The up-projected form: each head has its own keys and values, which are computed from latent rows in rounds.

A round reads rows of one or several sequences and up-projects them once for all queries; then one program attends with a block of a
sequence's tokens and one head. If a sequence continues in the next round, its blocks' partial sums are stored in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention.triton import LARGE_SHARED_MEMORY
from dsv4lite.kernels.dispatch import capability_of, on_gpu, power_of_2, send
from dsv4lite.kernels.gemm import float_linear
from dsv4lite.kernels.latent_attention import LatentAttentionInputs, projected_rows
from dsv4lite.kernels.rows.packed import LOG2_E, narrowed
from dsv4lite.kernels.rows.triton import only_if, rotate


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


def _pieces(spans: Sequence[tuple[int, int, int, int]], most: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Cut the rows of sequences into rounds of ``most``; yield each round's parts: span index, first position, count, place."""
    parts: list[tuple[int, int, int, int]] = []
    used = 0
    for index, (_, _, new, first) in enumerate(spans):
        begin = 0
        while begin < first + new:
            count = min(first + new - begin, most - used)
            parts.append((index, begin, count, used))
            begin, used = begin + count, used + count
            if used == most:
                yield parts
                parts, used = [], 0
    if parts:
        yield parts


def plan_rounds(given: LatentAttentionInputs, sequences: Sequence[int], queries: int) -> list[Round]:
    """Return the rounds of some sequences, for which the host must know ``spans``; blocks have up to ``queries`` tokens."""
    paging, per_page = given.paging, given.rows.rows_per_page
    device, table_SP = paging.grow_SP.device, paging.grow_SP.long()
    spans = [(sequence, *paging.spans()[sequence]) for sequence in sequences]
    heads, channels, _ = given.up_HCL.shape
    most = given.chunk_rows or projected_rows(heads, channels, given.up_HCL.element_size())
    rounds = []
    for parts in _pieces(spans, most):
        blocks, owner, place = [], [], []
        for index, begin, count, used in parts:
            sequence, row, new, first = spans[index]
            owner.append(torch.full((count,), sequence, dtype=torch.int64, device="cpu"))
            place.append(torch.arange(begin, begin + count, dtype=torch.int64, device="cpu"))
            for at in range(0, new, queries):
                size = min(queries, new - at)
                last = first + at + size - 1
                if last >= begin:
                    blocks.append((row + at, size, first + at, begin, count, used, begin > 0, last < begin + count))
        owner_R, place_R = send(torch.stack([torch.cat(owner), torch.cat(place)]), device)
        addresses_R = table_SP[owner_R, place_R // per_page] * per_page + place_R % per_page
        rounds.append(Round(addresses_R, send(torch.tensor(blocks, dtype=torch.int32, device="cpu"), device)))
    return rounds


@triton.jit
def _projected_kernel(
    q, cos, sin, projected, rows, blocks, out, parts, stats, q_row, scale,
    H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, KEY: tl.constexpr,
    TAIL: tl.constexpr, OUT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, TURNS: tl.constexpr,
    GPU: tl.constexpr,
):  # fmt: skip
    FLOAT32: tl.constexpr = q.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = "tf32x3" if FLOAT32 else "tf32"
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
        q1 = rotate(q1.to(tl.float32), c, s, pair < ROPE // 2, QUERIES, TAIL, FLOAT32, GPU).to(q1.dtype)
    if not GPU:
        q0, q1 = q0.to(tl.float32), q1.to(tl.float32)
    again = only_if(goes_on > 0, i < size)
    acc = tl.load(parts + at[:, None] * VALUE + value, mask=again[:, None] & (value < VALUE), other=0.0)
    peak = tl.load(stats + at * 2, mask=again, other=-1e30)  # finite, so that a difference of two peaks is not NaN
    total = tl.load(stats + at * 2 + 1, mask=again, other=0.0)
    end = tl.minimum(count, position + size - first)
    for begin in tl.range(0, end, KEYS, num_stages=STAGES):
        key = begin + tl.arange(0, KEYS)
        live = (key < end)[:, None]
        of_head = projected + ((place + key) * H + head)[:, None] * (NOPE + VALUE)
        k0 = tl.load(of_head + channel, mask=live & (channel < NOPE), other=0.0)
        k1 = tl.load(rows + (place + key)[:, None] * (LATENT + ROPE) + LATENT + tail, mask=live & (tail < ROPE), other=0.0)
        v = tl.load(of_head + NOPE + value, mask=live & (value < VALUE), other=0.0)
        if not GPU:
            k0, k1, v = k0.to(tl.float32), k1.to(tl.float32), v.to(tl.float32)
        # Reference: attend, and merged; exponentials of two instead of e.
        logits = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        logits = tl.dot(q1, tl.trans(k1), logits, input_precision=PRECISION) * scale
        seen = (first + key)[None, :] <= (position + i)[:, None]
        logits = tl.where(seen & (key < end)[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shrink = tl.exp2(peak - new_peak)
        p = tl.exp2(logits - new_peak[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(narrowed(p, FLOAT32, GPU), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    inside = here & (value < VALUE)
    if complete > 0:
        o = narrowed(acc / tl.where(total > 0.0, total, 1.0)[:, None], FLOAT32, GPU)
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
    large = capability_of(device) in LARGE_SHARED_MEMORY and q.element_size() == 2 and key + value <= 256
    queries, keys, stages = (128, 64, 3) if large else (32 if q.element_size() == 4 else 64, 32, 1 if key + value > 256 else 2)
    name = ("rounds", tuple(sequences), heads, channels, queries, given.chunk_rows, given.rows.rows_per_page)
    rounds = given.paging.once(name, lambda: plan_rounds(given, sequences, queries))
    waits = len(rounds) > 1
    parts = torch.empty((tokens, heads, channels - nope) if waits else (1,), dtype=torch.float32, device=device)
    stats = torch.empty((tokens, heads, 2) if waits else (1,), dtype=torch.float32, device=device)
    for addresses_R, blocks in rounds:
        rows = given.rows.read(addresses_R, q.dtype)
        projected = float_linear(rows[:, :latent], up_HCL.flatten(0, 1), q.dtype)
        _projected_kernel[(len(blocks), heads)](
            q, *given.angles(), projected, rows, blocks, out_THV, parts, stats, q.stride(0), given.scale * LOG2_E,
            H=heads, NOPE=nope, ROPE=given.rope, VALUE=channels - nope, LATENT=latent, KEY=key,
            TAIL=max(16, power_of_2(given.rope)), OUT=value, QUERIES=queries, KEYS=keys, STAGES=stages,
            TURNS=given.cos is not None, GPU=on_gpu(device), num_warps=8 if large else 4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
        del rows, projected
