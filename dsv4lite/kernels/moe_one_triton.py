"""Kernel of ``moe_one.py``: a single launch, for one that waits for another takes longer than most of this work.

    router, shared expert's first product, routed experts' first, shared expert's second, routed experts' second

Programs stand in this order. What one waits for has smaller numbers, was started before it and waits for nobody behind it: so it
ends however few run at a time. Nobody chooses for others, for that would be one more wait: every program of an expert's first
product works out which expert it is, from a table even before there are scores, and then waits only for their weights; every one of
their second quantizes all of its inputs. Each part does what its kernel for many tokens does, in the same order; but where sums may
have any order the router reads its rows from end to end, and its scores are their own signs that they have come.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import Variant
from dsv4lite.kernels.e4m3 import e4m3_bytes, fp8_scale_bits, fp8_scaled, native_e4m3, to_bf16
from dsv4lite.kernels.experts import GROUP, HALF_ROWS, TILE_ROWS, Tiles
from dsv4lite.kernels.experts_triton import Block, tile_product, weighed_swiglu
from dsv4lite.kernels.gemm import FP8_BLOCK, scale_rows
from dsv4lite.kernels.gemm_row_triton import strip
from dsv4lite.kernels.gemm_triton import GROUPED_TILES, capability_of, counters_of, float_tile, fp8_tile, splits_of
from dsv4lite.kernels.moe_few import ExpertSum, Held, Router
from dsv4lite.kernels.moe_one import Shared, suits_one
from dsv4lite.kernels.moe_triton import score, weigh_experts
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.swiglu_triton import swiglu_codes

_ROWS = 16  # of a tile of inputs, all but one empty
_OUTS = 64  # of one program of the router and the shared expert, as of any product of few rows
_ROUTER_ROWS, _ROUTER_COLUMNS = 1, 4096  # that a program reads where sums have any order; columns at a time
_BLOCK = Block(rows=_ROWS, tiles=1, num_warps=4, num_stages=3, unroll=4)
# Where gates and counts of arrivals lie among those of products, apart from each other: programs that wait look again and again.
_READ, _ROUTED, _ACTIVATED, _OWNED, _DONE, _SHARED, _UNITS, _SCORES = (
    tl.constexpr(at) for at in (0, 32, 64, 96, 128, 160, 288, 416)
)
_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
_MOST_BLOCKS = tl.constexpr(128)  # of 128 inputs
_FAR = tl.constexpr(1 << 20)  # more than ever pass a gate


@triton.jit
def arrive(gate, first, others, passing):
    """Say at a gate that what this program has to do is done; when it and all others have arrived, ``passing`` programs may pass.

    The gate is a number, zero before and after. One program is the first: it adds what may pass, and what the others take away.
    """
    tl.debug_barrier()  # all threads have written when one of them says so
    tl.atomic_add(gate, tl.where(first, others * _FAR + passing, -_FAR), sem="release", scope="gpu")


@triton.jit
def pass_gate(gate, passing):
    """Wait until all have arrived at a gate: what they have written is seen from here on."""
    left = tl.load(gate, volatile=True)  # an atomic would have those who arrive wait for all who look
    while (left <= 0) | (left > passing):
        left = tl.load(gate, volatile=True)
    tl.debug_barrier()  # all threads have seen it, before the gate shuts behind the last program
    tl.atomic_add(gate, -1, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _missing(words):
    """Return how many words have not come: each is its own sign that it has, for there is 0 before."""
    missing = (words == 0).to(tl.int32)
    if len(words.shape) == 3:
        missing = tl.sum(tl.sum(missing, 2), 1)
    return tl.sum(missing, 0)


@triton.jit
def _wait_for(p, wanted):
    """Wait until words have come.

    They are no fewer than threads: two that looked at the same one might see it come at different times.
    """
    missing = _missing(tl.load(p, mask=wanted, other=1, volatile=True))
    while missing > 0:
        missing = _missing(tl.load(p, mask=wanted, other=1, volatile=True))
    tl.debug_barrier()  # all threads have read


@triton.jit
def _every_expert(BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """Return the numbers of all experts once for each warp, [WARPS, parts, lanes]: then none has to ask another for the largest."""
    LANES: tl.constexpr = min(max(BLOCK, 32), 128)
    expert = tl.arange(0, max(BLOCK // LANES, 1))[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    return tl.broadcast_to(expert, (WARPS, expert.shape[1], LANES))


@triton.jit
def _await_scores(gates, expert, EXPERTS: tl.constexpr):
    """Return the scores of experts, of as many as there are, as soon as all have come."""
    # As in ``_wait_for``, which cannot return what it waits for: Triton 3.6 does not compile where nobody uses it.
    words = tl.load(gates + _SCORES + expert, mask=expert < EXPERTS, other=1, volatile=True)
    while _missing(words) > 0:
        words = tl.load(gates + _SCORES + expert, mask=expert < EXPERTS, other=1, volatile=True)
    tl.debug_barrier()  # all threads have read
    return words.to(tl.float32, bitcast=True)


@triton.jit
def _router_tile(
    program, x, gate, x_scales, parts, gates, passing,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, OUTS: tl.constexpr,
    STRIP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GPU: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Compute a part of some logits, or ``OUTS`` scores; the first program also hands out the scales of the inputs."""
    TILES: tl.constexpr = (EXPERTS + BN - 1) // BN
    BLOCKS: tl.constexpr = HIDDEN // 128
    if program == 0:
        column = tl.arange(0, COLUMNS)
        scale = tl.load(x_scales + column, mask=column < BLOCKS, other=0).to(tl.int32)
        tl.store(gates + _UNITS + column, tl.maximum(scale, 1) << 23, mask=column < BLOCKS)
    if OUTS:
        first = program * OUTS
        scores = score(strip(x, x, gate, gate, first, HIDDEN, OUTS, STRIP, False, False), GPU).to(tl.int32, bitcast=True)
        tl.store(gates + _SCORES + first + tl.arange(0, OUTS), tl.where(scores == 0, -(1 << 31), scores))
    else:
        split = program // TILES
        part = parts + split * EXPERTS
        float_tile(
            program % TILES, split, x, gate, gate, part, part, gates, 1, EXPERTS, HIDDEN, BLOCKS, (BLOCKS + SPLITS - 1) // SPLITS,
            HIDDEN, 0, 1, BM, BN, 0, True, True, False, 1, GPU, GROUPED,
        )  # fmt: skip
        arrive(gates + _ROUTED, program == 0, TILES * SPLITS - 1, passing)


@triton.jit
def _shared_tile(
    program, x, x_scales, w, w_scales, parts, codes, scales, gates, passing, limit,
    HIDDEN: tl.constexpr, SHARED: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SCALE_ROWS: tl.constexpr, CODES: tl.constexpr, NATIVE: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Compute a part of the shared expert's gate or up; the last program of 128 channels activates and quantizes them."""
    TILES: tl.constexpr = 2 * SHARED // BN
    BLOCKS: tl.constexpr = HIDDEN // 128
    tile = program % TILES
    split = program // TILES
    part = parts + split * (2 * SHARED)
    fp8_tile(
        tile, split, x, x_scales, w, w_scales, part, part, gates, 1, 2 * SHARED, HIDDEN, BLOCKS, (BLOCKS + SPLITS - 1) // SPLITS,
        BM, BN, SCALE_ROWS, True, True, False, 1, CODES, GROUPED,
    )  # fmt: skip
    group = tile // (128 // BN) % (SHARED // 128)
    arrivals = gates + _SHARED + group
    tl.debug_barrier()  # all threads have written when one of them says so
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == 2 * (128 // BN) * SPLITS - 1:
        column = group * 128 + tl.arange(0, 128)[None, :]
        gate = tl.zeros((1, 128), tl.float32)
        up = tl.zeros((1, 128), tl.float32)
        for each in tl.static_range(SPLITS):
            at = parts + each * (2 * SHARED) + column
            gate += tl.load(at, cache_modifier=".cg")
            up += tl.load(at + SHARED, cache_modifier=".cg")
        gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
        quantized, bits = swiglu_codes(gate, up, limit, NATIVE)
        tl.store(codes + column, quantized)
        tl.store(scales + group + tl.arange(0, 1), (bits >> 23).to(tl.uint8))
        tl.store(arrivals, 0)  # as the next launch finds it
        arrive(gates + _ACTIVATED, group == 0, SHARED // 128 - 1, passing)


@triton.jit
def _scores(parts, gates, at, mask, EXPERTS: tl.constexpr, SPLITS: tl.constexpr, GPU: tl.constexpr):
    """Return the scores of experts, from the parts of their logits, or as the router has written them."""
    if SPLITS == 0:
        scores = tl.load(gates + _SCORES + at, mask=mask, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
    else:
        logits = tl.zeros(at.shape, tl.float32)
        for each in tl.static_range(SPLITS):
            logits += tl.load(parts + each * EXPERTS + at, mask=mask, other=0.0, cache_modifier=".cg")
        scores = score(logits, GPU)
    return scores


@triton.jit
def _wait_for_scores(gates, passing, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, WARPS: tl.constexpr):
    if SPLITS == 0:
        expert = _every_expert(BLOCK, WARPS)
        _wait_for(gates + _SCORES + expert, expert < EXPERTS)
    else:
        pass_gate(gates + _ROUTED, passing)


@triton.jit
def _ask(codes, GPU: tl.constexpr):
    """Ask for the first 16 KB of a tile, for the second cache."""
    if GPU:
        line = (codes + tl.arange(0, 128) * 128).to(tl.int64)
        tl.inline_asm_elementwise(_PREFETCH, "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _choose(
    number, parts, bias, gates, passing, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_TILE: tl.constexpr,
    BIASED: tl.constexpr, SPLITS: tl.constexpr, WARPS: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Return what ``best_experts`` does, and the one of which ``number`` others have smaller ids."""
    expert = _every_expert(BLOCK, WARPS)
    inside = expert < EXPERTS
    if BIASED:
        added = tl.load(bias + expert, mask=inside, other=0.0)
    if SPLITS == 0:
        selection = _await_scores(gates, expert, EXPERTS)
    else:
        pass_gate(gates + _ROUTED, passing)
        selection = _scores(parts, gates, expert, inside, EXPERTS, SPLITS, GPU)
    if BIASED:
        selection += added
    LAST: tl.constexpr = -(1 << 31)
    key = selection.to(tl.int32, bitcast=True)
    key = tl.where(inside, key ^ ((key >> 31) & 0x7FFFFFFF), LAST)
    slot = tl.arange(0, TOP_TILE)[None, :]
    ids = tl.full((WARPS, TOP_TILE), EXPERTS, tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.max(key, 1), 1)[:, None, None]
        found = tl.min(tl.min(tl.where(key == best, expert, EXPERTS), 1), 1)[:, None]
        key = tl.where(expert == found[:, :, None], LAST, key)
        ids = tl.where(slot == k, found, ids)
    left = tl.where(inside & (key == LAST), expert, EXPERTS)
    own = tl.full((WARPS,), EXPERTS, tl.int32)
    for k in tl.static_range(TOP_K):
        least = tl.min(tl.min(left, 1), 1)
        left = tl.where(left == least[:, None, None], EXPERTS, left)
        own = tl.where(number == k, least, own)
    return tl.max(ids, 0)[None, :], tl.max(own, 0)


@triton.jit
def _gate_up_tile(
    number, part_of, x, codes, scales, parts, bias, table, token_ids, positions, chosen, owner, u, gates,
    passing, passing_down, route_scale, limit,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    TOP_TILE: tl.constexpr, BIASED: tl.constexpr, FIXED: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, FP4: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
    WARPS: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Compute ``TILES * 32`` columns of ``u`` of the chosen expert ``number``."""
    CHUNKS: tl.constexpr = HIDDEN // 128
    BYTES: tl.constexpr = 4096 if FP4 else 8192
    token = tl.arange(0, 1)
    slot = tl.arange(0, TOP_TILE)[None, :]
    used = slot < TOP_K
    block = tl.arange(0, _MOST_BLOCKS)
    _wait_for(gates + _UNITS + block, block < CHUNKS)
    if FIXED:
        entry = tl.load(token_ids + token).to(tl.int64)[:, None]
        ids = tl.load(table + entry * TOP_K + slot, mask=used, other=EXPERTS).to(tl.int32)
        picked = tl.full((1, TOP_TILE), 1.0, tl.float32)  # not known yet
        found, weight, place = weigh_experts(ids, picked, token, token >= 0, positions, route_scale, EXPERTS, TOP_K, PADDED)
        expert = tl.sum(tl.where(used & (place == number), found, 0))
    else:
        ids, expert = _choose(number, parts, bias, gates, passing, EXPERTS, BLOCK, TOP_K, TOP_TILE, BIASED, SPLITS, WARPS, GPU)
        if PADDED:
            expert = tl.where(tl.load(positions) < 0, EXPERTS, expert)
    if part_of == 0:
        tl.store(chosen + number, expert.to(tl.int64))
        tl.store(owner + number, expert)
        arrive(gates + _OWNED + number, True, 0, passing_down)
    row = tl.arange(0, ROWS)
    valid = row < 1
    tile = (expert.to(tl.int64) * (WIDTH // 32) + part_of * TILES + tl.arange(0, TILES)) * CHUNKS
    if expert < EXPERTS:
        if not FIXED:
            _ask(codes + (expert.to(tl.int64) * (WIDTH // 32) + part_of * TILES) * CHUNKS * BYTES, GPU)
            picked = _scores(parts, gates, ids, used, EXPERTS, SPLITS, GPU)
            found, weight, place = weigh_experts(ids, picked, token, token >= 0, positions, route_scale, EXPERTS, TOP_K, PADDED)
        # Reference: gate, up = ((x @ w13.dequantize(expert, half).T).bfloat16() for half in (0, 1))
        both = tile_product(
            x + row[None, :] * 0 + tl.arange(0, 128)[:, None],
            valid,
            gates + _UNITS + row * 0,
            codes + tile[:, None] * BYTES + tl.arange(0, 2048)[None, :],
            scales + tile[:, None] * 64 + tl.arange(0, 64)[None, :],
            CHUNKS,
            ROWS,
            1,
            TILES,
            FP4,
            NATIVE,
            STAGES,
            UNROLL,
        )
        if FIXED:
            _wait_for_scores(gates, passing, EXPERTS, BLOCK, SPLITS, WARPS)
            picked = _scores(parts, gates, ids, used, EXPERTS, SPLITS, GPU)
            found, weight, place = weigh_experts(ids, picked, token, token >= 0, positions, route_scale, EXPERTS, TOP_K, PADDED)
        mix = tl.where(valid, tl.sum(tl.where(used & (place == number), weight, 0.0)), 0.0)
        activated = weighed_swiglu(to_bf16(both, NATIVE), mix, limit, ROWS, TILES, NATIVE)
        column = part_of * (TILES * 32) + tl.arange(0, TILES * 32)
        tl.store(u + number * WIDTH + column[:, None] + row[None, :] * 0, activated, mask=valid[None, :])
        arrive(gates + _DONE + number, part_of == 0, WIDTH // 32 // TILES - 1, passing_down)
    elif FIXED:
        _wait_for_scores(gates, passing, EXPERTS, BLOCK, SPLITS, WARPS)
    read = tl.atomic_add(gates + _READ, 1, sem="acq_rel", scope="gpu")
    if read == passing - 1:  # all have read: memory as the next launch finds it
        tl.store(gates + _UNITS + block, tl.zeros(block.shape, tl.int32))
        tl.store(gates + _SCORES + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.int32))
        tl.store(gates + _READ, 0)


@triton.jit
def _down_tile(
    number, part_of, u, u_codes, u_numbers, u_words, codes, scales, owner, y, gates, passing,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    FP4: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute ``TILES * 64`` columns of the result of the chosen expert ``number``."""
    CHUNKS: tl.constexpr = WIDTH // 128
    BYTES: tl.constexpr = 4096 if FP4 else 8192
    pass_gate(gates + _OWNED + number, passing)
    expert = tl.load(owner + number).to(tl.int64)
    if expert < EXPERTS:
        row = tl.arange(0, ROWS)
        valid = row < 1
        tile = (expert * (HIDDEN // 64) + part_of * TILES + tl.arange(0, TILES)) * CHUNKS
        pass_gate(gates + _DONE + number, passing)
        # Every program quantizes for itself: to wait for one that does it for all would take longer.
        # Reference: u = dequantize_fp8(*quantize_fp8_ref(u, GROUP), GROUP)
        group = tl.arange(0, GROUPS)[:, None]
        column = group * 128 + tl.arange(0, 128)[None, :]
        inside = column < WIDTH
        amount = tl.load(u + number * WIDTH + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        bits = fp8_scale_bits(amount)
        own = number * (HIDDEN // 64 // TILES) + part_of
        tl.store(u_codes + own * WIDTH + column, e4m3_bytes(fp8_scaled(amount, bits), NATIVE), mask=inside)
        tl.store(u_words + own * CHUNKS + group, bits[:, None], mask=group < CHUNKS)
        tl.debug_barrier()
        # Reference: y = u @ w2.dequantize(expert).T;  outputs[at] = y if partial else y.bfloat16()
        out = tile_product(
            u_numbers + own * WIDTH + row[None, :] * 0 + tl.arange(0, 128)[:, None],
            valid,
            u_words + own * CHUNKS + row * 0,
            codes + tile[:, None] * BYTES + tl.arange(0, 2048)[None, :],
            scales + tile[:, None] * 64 + tl.arange(0, 64)[None, :],
            CHUNKS,
            ROWS,
            1,
            TILES,
            FP4,
            NATIVE,
            STAGES,
            UNROLL,
        )
        let_successor_in()
        PARTIAL: tl.constexpr = y.dtype.element_ty == tl.float32
        if not PARTIAL:
            out = to_bf16(out, NATIVE)
        column = part_of * (TILES * 64) + tl.arange(0, TILES * 64)
        tl.store(y + number * HIDDEN + column[:, None] + row[None, :] * 0, out, mask=valid[None, :])


@triton.jit
def _moe_one_kernel(
    x, gate, x_codes, x_numbers, x_scales, s13_codes, s13_scales, s2_codes, s2_scales, bias, table, token_ids, positions,
    w13_codes, w13_scales, w2_codes, w2_scales, gates, parts, shared_parts, chosen, owner, s_codes, s_numbers, s_scales,
    shared, u, u_codes, u_numbers, u_words, y, route_scale, limit,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, TOP_K: tl.constexpr, TOP_TILE: tl.constexpr, BIASED: tl.constexpr,
    FIXED: tl.constexpr, PADDED: tl.constexpr, OUTS: tl.constexpr, STRIP: tl.constexpr, WARPS: tl.constexpr, SPLITS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr, DOWN_SPLITS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, FP4: tl.constexpr,
    NATIVE: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, BN: tl.constexpr, SCALE_ROWS: tl.constexpr,
    CODES: tl.constexpr, GPU: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    ROUTER: tl.constexpr = EXPERTS // OUTS if OUTS else (EXPERTS + BN - 1) // BN * SPLITS
    FIRST: tl.constexpr = 2 * SHARED // BN * SHARED_SPLITS
    GATE_UP: tl.constexpr = WIDTH // 32 // TILES
    SECOND: tl.constexpr = HIDDEN // BN
    DOWN: tl.constexpr = HIDDEN // 64 // TILES
    program = tl.program_id(0)
    if program < ROUTER:
        _router_tile(
            program, x, gate, x_scales, parts, gates, TOP_K * GATE_UP,
            HIDDEN, EXPERTS, COLUMNS, SPLITS, OUTS, STRIP, ROWS, BN, GPU, GROUPED,
        )  # fmt: skip
    elif program < ROUTER + FIRST:
        _shared_tile(
            program - ROUTER, x_codes, x_scales, s13_codes, s13_scales, shared_parts, s_codes, s_scales, gates, SECOND, limit,
            HIDDEN, SHARED, SHARED_SPLITS, ROWS, BN, SCALE_ROWS, CODES, NATIVE, GROUPED,
        )  # fmt: skip
    elif program < ROUTER + FIRST + TOP_K * GATE_UP:
        program -= ROUTER + FIRST
        _gate_up_tile(
            program // GATE_UP, program % GATE_UP, x_numbers, w13_codes, w13_scales, parts, bias, table, token_ids,
            positions, chosen, owner, u, gates, TOP_K * GATE_UP, DOWN, route_scale, limit,
            HIDDEN, WIDTH, EXPERTS, BLOCK, TOP_K, TOP_TILE, BIASED, FIXED, PADDED, SPLITS, ROWS, TILES, FP4, NATIVE, STAGES, UNROLL,
            WARPS, GPU,
        )  # fmt: skip
    elif program < ROUTER + FIRST + TOP_K * GATE_UP + SECOND:
        pass_gate(gates + _ACTIVATED, SECOND)
        fp8_tile(
            program - (ROUTER + FIRST + TOP_K * GATE_UP), 0, s_numbers, s_scales, s2_codes, s2_scales, shared, shared, gates,
            1, HIDDEN, SHARED, SHARED // 128, (SHARED // 128 + DOWN_SPLITS - 1) // DOWN_SPLITS, ROWS, BN, SCALE_ROWS,
            True, True, True, 1, CODES, GROUPED,
        )  # fmt: skip
    else:
        program -= ROUTER + FIRST + TOP_K * GATE_UP + SECOND
        _down_tile(
            program // DOWN, program % DOWN, u, u_codes, u_numbers, u_words, w2_codes, w2_scales, owner, y, gates, DOWN,
            HIDDEN, WIDTH, GROUPS, EXPERTS, ROWS, TILES, FP4, NATIVE, STAGES, UNROLL,
        )  # fmt: skip


def moe_one_triton(
    x_TD: Tensor,
    x_codes: Tensor,
    x_scales: Tensor,
    gate_ED: Tensor,
    router: Router,
    shared: Shared,
    w13: Tiles,
    w2: Tiles,
    limit: float,
    held: Held,
    *,
    any_order: bool = True,
) -> ExpertSum:
    """Launch ``moe_one``; unless sums may have any order, with the bits of the kernels for several tokens."""
    assert held.first == 0 and held.copies is None, "the kernel takes experts by their ids"
    _check(x_TD, x_codes, gate_ED, router, shared, w13, w2)
    (experts, hidden, width), inputs, top_k, device = w2.shape, shared.w2.shape[1], router.top_k, x_codes.device
    native, codes = native_e4m3(x_codes), capability_of(device) < 89
    constants = _constants(hidden, width, inputs, experts, top_k, fp4=w13.fp4, native=native, any_order=any_order)
    constants |= {"BIASED": router.bias_E is not None, "FIXED": router.table_VK is not None, "CODES": codes, "GPU": x_TD.is_cuda}
    constants |= {"PADDED": router.positions_T is not None, "SCALE_ROWS": scale_rows(shared.w13, shared.w13_scales)}

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def numbers(x: Tensor) -> Tensor:
        return x.view(torch.uint8 if codes else torch.float8_e4m3fn)

    def tiled(x: Tensor) -> Tensor:
        return x.view(torch.float8_e4m3fn if native else torch.uint8)

    scoring = experts // constants["OUTS"] if any_order else triton.cdiv(experts, _OUTS) * constants["SPLITS"]
    shared_parts = room(splits_of(2 * inputs, hidden // FP8_BLOCK), 2 * inputs, dtype=torch.float32)
    s_codes, u_codes = room(1, inputs, dtype=torch.uint8), room(top_k * hidden // TILE_ROWS, width, dtype=torch.uint8)
    chosen_TK = room(1, top_k, dtype=torch.int64)
    outputs_TKD = room(1, top_k, hidden, dtype=torch.float32 if held.partial else x_TD.dtype)
    shared_TD = room(1, hidden, dtype=torch.float32 if held.shared_partial else x_TD.dtype)
    routed = top_k * (width // HALF_ROWS + hidden // TILE_ROWS) // _BLOCK.tiles
    _moe_one_kernel[(scoring + (2 * inputs * len(shared_parts) + hidden) // _OUTS + routed,)](
        x_TD,
        gate_ED,
        numbers(x_codes),
        tiled(x_codes),
        x_scales,
        numbers(shared.w13),
        shared.w13_scales,
        numbers(shared.w2),
        shared.w2_scales,
        x_TD if router.bias_E is None else router.bias_E,
        chosen_TK if router.table_VK is None else router.table_VK,
        router.token_ids_T,
        router.token_ids_T if router.positions_T is None else router.positions_T,
        w13.codes,
        w13.scales,
        w2.codes,
        w2.scales,
        counters_of(device),
        room(constants["SPLITS"], experts, dtype=torch.float32),
        shared_parts,
        chosen_TK,
        room(top_k),
        s_codes,
        numbers(s_codes),
        room(1, inputs // GROUP, dtype=torch.uint8),
        shared_TD,
        room(top_k, width, dtype=torch.bfloat16),
        u_codes,
        tiled(u_codes),
        room(top_k * hidden // TILE_ROWS, width // GROUP),
        outputs_TKD,
        router.scale,
        limit,
        **constants,
        num_warps=_BLOCK.num_warps,
        num_stages=_BLOCK.num_stages,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(device),
    )
    return ExpertSum(chosen_TK, outputs_TKD, shared_TD, experts)


def _check(x_TD: Tensor, x_codes: Tensor, gate: Tensor, router: Router, shared: Shared, w13: Tiles, w2: Tiles) -> None:
    """See that everything is as the kernel reads it."""
    (experts, hidden, _), inputs = w2.shape, shared.w2.shape[1]
    bias, table = router.bias_E, router.table_VK
    assert x_TD.shape == x_codes.shape == (1, hidden) and gate.shape == (experts, hidden), (x_TD.shape, gate.shape)
    assert x_TD.dtype == gate.dtype == torch.bfloat16 and w13.fp4 == w2.fp4, (x_TD.dtype, gate.dtype)
    assert shared.w2.shape == (hidden, inputs) and shared.w13.shape == (2 * inputs, hidden), shared.w13.shape
    assert hidden % GROUP == 0 and hidden <= _MOST_BLOCKS.value * GROUP and suits_one(1, inputs), (hidden, inputs)
    assert bias is None or bias.dtype == torch.float32
    assert table is None or table.shape[1] == router.top_k
    given = (x_TD, gate, bias, table, router.positions_T, router.token_ids_T, *shared)
    assert all(x is None or x.is_contiguous() for x in given)


def _divisor(number: int, most: int) -> int:
    """Return the largest power of two up to ``most`` that divides a number."""
    return min(most, number & -number)


def _constants(
    hidden: int, width: int, shared_width: int, experts: int, top_k: int, *, fp4: bool, native: bool, any_order: bool
) -> dict[str, int | bool]:
    """Return what the kernel is compiled for, as far as it follows from sizes and formats."""
    blocks = hidden // FP8_BLOCK
    return {
        "HIDDEN": hidden,
        "WIDTH": width,
        "SHARED": shared_width,
        "EXPERTS": experts,
        "BLOCK": triton.next_power_of_2(experts),
        "COLUMNS": triton.next_power_of_2(blocks),
        "TOP_K": top_k,
        "TOP_TILE": triton.next_power_of_2(top_k),
        "GROUPS": triton.next_power_of_2(width // GROUP),
        "OUTS": _divisor(experts, _ROUTER_ROWS) if any_order else 0,
        "STRIP": _divisor(hidden, _ROUTER_COLUMNS),
        "WARPS": _BLOCK.num_warps,
        "SPLITS": 0 if any_order else splits_of(experts, blocks),
        "SHARED_SPLITS": splits_of(2 * shared_width, blocks),
        "DOWN_SPLITS": splits_of(hidden, shared_width // FP8_BLOCK),
        "ROWS": _ROWS,
        "TILES": _BLOCK.tiles,
        "FP4": fp4,
        "NATIVE": native,
        "STAGES": _BLOCK.num_stages,
        "UNROLL": _BLOCK.unroll_of(fp4, native),
        "BN": _OUTS,
        "GROUPED": GROUPED_TILES,
    }


# What variants are compiled for: V4-Flash.
_HIDDEN, _WIDTH, _EXPERTS, _TOP_K = 4096, 2048, 256, 6


def variants() -> list[Variant]:
    """Return FP8 experts from a table, with parts of results, and FP4 ones that are chosen, in one order or any."""
    newer = (89, 90, 100, 120)
    first = _variant(fp4=False, fixed=True, any_order=True, native=True, capabilities=newer)
    return [
        replace(first, signature={**first.signature, **dict.fromkeys(("shared", "y"), "*fp32")}),
        _variant(fp4=True, fixed=False, any_order=True, native=False, capabilities=(80,)),
        _variant(fp4=True, fixed=False, any_order=False, native=True, capabilities=newer),
        _variant(fp4=True, fixed=False, any_order=True, native=True, capabilities=newer),
    ]


def _variant(*, fp4: bool, fixed: bool, any_order: bool, native: bool, capabilities: tuple[int, ...]) -> Variant:
    numbers = ("x_codes", "x_numbers", "s13_codes", "s2_codes", "s_numbers", "u_numbers")
    bytes_ = ("x_scales", "s13_scales", "s2_scales", "w13_codes", "w2_codes", "s_codes", "s_scales", "u_codes")
    return Variant(
        kernel=_moe_one_kernel,
        signature={
            **dict.fromkeys(numbers, "*fp8e4nv" if native else "*u8"),
            **dict.fromkeys(bytes_, "*u8"),
            **dict.fromkeys(("positions", "w13_scales", "w2_scales", "gates", "owner", "u_words"), "*i32"),
            **dict.fromkeys(("x", "gate", "u", "shared", "y"), "*bf16"),
            **dict.fromkeys(("bias", "parts", "shared_parts"), "*fp32"),
            **dict.fromkeys(("table", "token_ids", "chosen"), "*i64"),
            **dict.fromkeys(("route_scale", "limit"), "fp32"),
        },
        constants={
            **_constants(_HIDDEN, _WIDTH, _WIDTH, _EXPERTS, _TOP_K, fp4=fp4, native=native, any_order=any_order),
            "BIASED": not fixed,
            "FIXED": fixed,
            "PADDED": True,
            "SCALE_ROWS": FP8_BLOCK,
            "CODES": not native,
            "GPU": True,
        },
        num_warps=_BLOCK.num_warps,
        num_stages=_BLOCK.num_stages,
        capabilities=capabilities,
    )
