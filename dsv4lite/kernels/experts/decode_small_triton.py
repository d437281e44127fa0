"""Kernels of ``moe_decode_small``: two launches, because most parts take less time than a launch.

    prepare    one program routes a token, and the last one to end groups them; others do the shared expert's activation, and scales
    experts    the routed experts' first product (``triton.py``), the shared expert's second, the routed experts' second

Each part runs the same operations in the same order as its kernel for many tokens. A program of the routed experts' second product
waits for the programs of the first product that compute its block. Each program takes a ticket when it starts, which is its number.
So the programs that another one waits for have started, and they wait for no program themselves. The launch therefore ends however
few programs run at the same time and in whatever order the GPU starts them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.counters import counters_of
from dsv4lite.kernels.dispatch import by_most, capability_of, ceil_div, multiprocessors_of, power_of_2
from dsv4lite.kernels.experts import HALF_ROWS, ExpertSum
from dsv4lite.kernels.experts.decode_small import DECODE_SMALL_TOKENS, MoeInputs
from dsv4lite.kernels.experts.grouping_triton import BlockConfig, BlockTable
from dsv4lite.kernels.experts.triton import Work, down_tile, gate_up_tile
from dsv4lite.kernels.gemm import scale_rows
from dsv4lite.kernels.gemm.triton import product_tile, splits_of
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.quantize import FP8_GROUP
from dsv4lite.kernels.routing.triton import _router_constants, route_rows
from dsv4lite.kernels.swiglu.triton import swiglu_groups

_OUTS = 64  # outputs of one program of the shared expert
# Blocks of the first product; limits are tiles per multiprocessor. With few tiles a program takes one, and prefetches more of it.
GATE_UP: BlockTable = (
    (2, BlockConfig(rows=16, tiles=1, num_warps=4, num_stages=4, unroll=4)),
    (5, BlockConfig(rows=16, tiles=1, num_warps=4, num_stages=3, unroll=4)),
    (12, BlockConfig(rows=16, tiles=2, num_warps=4, num_stages=4, unroll=2)),
    (None, BlockConfig(rows=16, tiles=2, num_warps=4, num_stages=3, unroll=2)),
)
# Block of the second product.
_DOWN = BlockConfig(rows=16, tiles=2, num_warps=4, num_stages=3, unroll=2)
# By the most tokens: programs that share a token's activation, and warps of every program.
_ACTIVATION_PARTS = {1: (16, 1), 4: (16, 4), 8: (8, 4), DECODE_SMALL_TOKENS: (4, 4)}


@triton.jit
def _group_rows(
    token, ids, place, used, block_pairs, block_expert, num_blocks, pairs, most,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Give each expert a block, in the order of their ids. ``ids`` [TOKENS, TOP_TILE] are the experts of tokens where ``used``."""
    PAIRS: tl.constexpr = ids.shape[0] * ids.shape[1]
    fill = tl.arange(0, FILL)
    tl.store(block_pairs + fill, pairs, mask=fill < most * ROWS)  # marks all rows as unused
    wanted = tl.reshape(used, (PAIRS,))
    expert = tl.where(wanted, tl.reshape(ids, (PAIRS,)), -1)
    number = tl.reshape(tl.broadcast_to(token[:, None], ids.shape), (PAIRS,)).to(tl.int32)
    pair = number * TOP_K + tl.reshape(place, (PAIRS,))
    # Reference: at = torch.nonzero(chosen_TK == expert, as_tuple=True)
    same = expert[None, :] == expert[:, None]
    row = tl.sum((same & (number[None, :] < number[:, None])).to(tl.int32), 1)
    first = wanted & (row == 0)
    block = tl.sum((first[None, :] & (expert[None, :] < expert[:, None])).to(tl.int32), 1)
    tl.store(num_blocks, tl.sum(first.to(tl.int32)))
    tl.store(block_expert + block, expert, mask=first)
    tl.debug_barrier()  # all threads have marked rows as unused
    tl.store(block_pairs + block * ROWS + row, pair, mask=wanted)


@triton.jit(do_not_specialize=["tokens", "most", "first"])
def _prepare_kernel(
    logits, bias, table, token_ids, positions, copy_slots, copy_counts, load, h, x_scales,
    chosen, weights, routed, block_pairs, block_expert, num_blocks, arrivals, done, ticket, x_words, s_codes, s_scales,
    tokens, most, logits_stride, route_scale, width, limit, first,
    EXPERTS: tl.constexpr, HELD: tl.constexpr, COPIES: tl.constexpr, COUNTS: tl.constexpr,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_TILE: tl.constexpr, BIASED: tl.constexpr,
    FIXED: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, FILL: tl.constexpr,
    COLUMNS: tl.constexpr, COLUMNS_TILE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr,
    SHARED: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    let_successor_in()
    program = tl.program_id(0)
    if program < tokens:
        token = program + tl.arange(0, 1)
        ids, weight, place = route_rows(
            token.to(tl.int64), logits, bias, table, token_ids, positions, logits_stride, route_scale,
            EXPERTS, BLOCK, TOP_K, TOP_TILE, BIASED, FIXED, PADDED,
        )  # fmt: skip
        used = tl.arange(0, TOP_TILE)[None, :] < TOP_K
        at = token[:, None] * TOP_K + place
        tl.store(weights + at, weight, mask=used)
        if COPIES > 0:
            # Reference: take_copies
            if COUNTS:
                tl.atomic_add(load + ids, tl.full(ids.shape, 1, tl.int64), mask=used, sem="relaxed")
            turn = token[:, None] % tl.load(copy_counts + ids, mask=used, other=1).to(tl.int32)
            ids = tl.load(copy_slots + ids * COPIES + turn, mask=used, other=0).to(tl.int32)
        # Reference: own_slots
        here = used & (ids >= first) & (ids < first + HELD)
        ids = tl.where(here, ids - first, HELD)
        tl.store(chosen + at, ids.to(tl.int64), mask=used)
        tl.debug_barrier()  # all threads have written before one of them counts the program
        arrived = tl.atomic_add(routed, 1, sem="acq_rel", scope="gpu")
        if arrived == tokens - 1:
            every = tl.arange(0, TOKENS)
            each = tl.arange(0, TOP_TILE)[None, :] + tl.zeros((TOKENS, TOP_TILE), tl.int32)
            there = (every < tokens)[:, None] & (each < TOP_K)
            all_ids = tl.load(chosen + every[:, None] * TOP_K + each, mask=there, other=HELD, cache_modifier=".cg").to(tl.int32)
            held = all_ids < HELD
            _group_rows(every, all_ids, each, held, block_pairs, block_expert, num_blocks, tokens * TOP_K, most, TOP_K, ROWS, FILL)
            tl.store(routed, 0)  # for the next kernel
    else:
        row = ((program - tokens) // PARTS).to(tl.int64)
        part = (program - tokens) % PARTS
        if SHARED > 0:
            group = part * (SHARED // PARTS) + tl.arange(0, SHARED // PARTS)
            swiglu_groups(h, s_codes, s_scales, row, group, width, (width + 127) // 128, limit, ALIGNED)
        if program == tokens:
            tl.store(ticket, 0)
        if part == 0:
            column = tl.arange(0, COLUMNS_TILE)
            scale = tl.load(x_scales + row * COLUMNS + column, mask=column < COLUMNS, other=0).to(tl.int32)
            tl.store(x_words + row * COLUMNS + column, scale << 23, mask=column < COLUMNS)
            choice = tl.arange(0, TOP_TILE)
            block = row * TOP_K + choice
            wanted = (choice < TOP_K) & (block < most)
            tl.store(done + block, tl.zeros((TOP_TILE,), tl.int32), mask=wanted)
            hidden = tl.arange(0, GROUPS_TILE)[None, :]
            counts = arrivals + block[:, None] * GROUPS + hidden
            tl.store(counts, tl.zeros((TOP_TILE, GROUPS_TILE), tl.int32), mask=wanted[:, None] & (hidden < GROUPS))


@triton.jit(do_not_specialize=["pairs", "M"])
def _experts_kernel(
    x, x_words, codes, scales, block_pairs, block_expert, num_blocks, weight, u, u_codes, u_words, arrivals, pairs, limit,
    s_codes, s_scales, shared_codes, shared_scales, shared, M, N, K, k_blocks, k_part,
    u_numbers, w2_codes, w2_scales, y, done, ticket, gate_up_programs, shared_programs,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, FP4: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SCALE_ROWS: tl.constexpr, EVEN_K: tl.constexpr,
    DOWN_TILES: tl.constexpr, DOWN_STAGES: tl.constexpr, DOWN_UNROLL: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    program = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
    if program < gate_up_programs:
        gate_up_tile(
            x, x_words, codes, scales, block_pairs, block_expert, num_blocks, weight, u, u_codes, u_words, arrivals,
            pairs, limit, HIDDEN, WIDTH, TOP_K, ROWS, True, TILES, FP4, STAGES, UNROLL, program, done,
        )  # fmt: skip
    elif program < gate_up_programs + shared_programs:
        product_tile(
            program - gate_up_programs, 0, s_codes, s_scales, shared_codes, shared_scales, shared, shared, arrivals,
            M, N, K, k_blocks, k_part, BM, BN, SCALE_ROWS, EVEN_K, True, True, 1,
        )  # fmt: skip
    else:
        down_tile(
            u_numbers, u_words, w2_codes, w2_scales, block_pairs, block_expert, num_blocks, y, pairs, HIDDEN, WIDTH, ROWS,
            DOWN_TILES, FP4, DOWN_STAGES, DOWN_UNROLL, program - gate_up_programs - shared_programs, done,
        )  # fmt: skip


def _gate_up_block(given: MoeInputs) -> BlockConfig:
    """Return the block of the first product from sizes alone, as if this rank's experts got their average share of the pairs."""
    held, _, width = given.w2.shape
    tokens, experts = given.logits_TE.shape
    tiles = tokens * given.router.top_k * min(1, held / experts) * (width // HALF_ROWS)
    return by_most(GATE_UP, tiles / multiprocessors_of(given.x_codes.device))


def moe_decode_small_triton(given: MoeInputs) -> ExpertSum:
    """Launch ``moe_decode_small``."""
    _, router, x_codes, x_scales, h_TI, shared_codes, shared_scales, w13, w2, limit, held, _ = given
    (tokens, hidden), (experts, _, width) = x_codes.shape, w2.shape
    assert w13.shape == (experts, 2 * width, hidden) and w2.shape[1] == hidden and w13.fp4 == w2.fp4, (w13.shape, w2.shape)
    assert x_codes.dtype == torch.float8_e4m3fn and x_codes.is_contiguous() and x_scales.is_contiguous()
    work = Work.allocate(tokens, router.top_k, w2, _gate_up_block(given), by_token=True)
    done, ticket = (torch.empty(n, dtype=torch.int32, device=x_codes.device) for n in (work.groups.max_blocks, 1))
    shared = h_TI is not None
    if h_TI is None:  # no shared expert: zero channels
        h_TI = torch.empty(tokens, 0, dtype=torch.bfloat16, device=x_codes.device)
    slots_TK, weight_TK, s_codes, s_scales = _prepare(given, h_TI, work, done, ticket)
    u_codes = work.empty_rows(width, torch.uint8)
    y = work.empty_rows(hidden, torch.bfloat16)
    shared_dtype = torch.float32 if held.shared_partial else h_TI.dtype
    shared_TD = torch.empty(tokens if shared else 0, hidden, dtype=shared_dtype, device=h_TI.device)
    inputs = shared_codes.shape[1]
    blocks, shared_programs = ceil_div(inputs, FP8_GROUP), ceil_div(hidden, _OUTS) if shared else 0
    assert shared_codes.shape == (hidden, h_TI.shape[1] // 2 if shared else inputs), shared_codes.shape
    assert shared_codes.is_contiguous() and shared_scales.is_contiguous()
    codes = capability_of(x_codes.device) < 89
    s, w = (s_codes, shared_codes.view(torch.uint8)) if codes else (s_codes.view(torch.float8_e4m3fn), shared_codes)
    _experts_kernel[(work.gate_up_programs + shared_programs + work.down_programs(_DOWN),)](
        *work.gate_up_arguments(x_codes, weight_TK, w13, limit, u_codes),
        s,
        s_scales,
        w,
        shared_scales,
        shared_TD,
        tokens,
        hidden,
        inputs,
        blocks,
        ceil_div(blocks, splits_of(hidden, blocks)),
        work.as_operand(u_codes),
        w2.codes,
        w2.scales,
        y,
        done,
        ticket,
        work.gate_up_programs,
        shared_programs,
        TOP_K=router.top_k,
        BM=DECODE_SMALL_TOKENS,
        BN=_OUTS,
        SCALE_ROWS=scale_rows(shared_codes, shared_scales),
        EVEN_K=inputs % FP8_GROUP == 0,
        DOWN_TILES=_DOWN.tiles,
        DOWN_STAGES=_DOWN.num_stages,
        DOWN_UNROLL=_DOWN.unroll_of(w2.fp4, work.native),
        **work.constants(w13),
        launch_pdl=dependent_launch(x_codes.device),
    )
    return ExpertSum(slots_TK, y.view(tokens, router.top_k, hidden), shared_TD if shared else None, experts)


def _prepare(given: MoeInputs, h_TI: Tensor, work: Work, done: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the first kernel; return slots, weights, and the shared expert's activation: codes uint8 [T, I] and scales."""
    logits_TE, router, x_scales, limit, held = given.logits_TE, given.router, given.x_scales, given.limit, given.held
    (tokens, experts), top_k, device, groups = logits_TE.shape, router.top_k, logits_TE.device, work.groups
    table, positions, bias, copies = router.table_VK, router.positions_T, router.bias_E, held.copies
    constants = _router_constants(logits_TE, router)
    assert 0 < tokens <= work.block.rows and router.token_ids_T is not None and router.token_ids_T.is_contiguous(), tokens
    assert h_TI.dtype == torch.bfloat16 and h_TI.is_contiguous(), h_TI.dtype
    assert copies is None or (copies.slots_EC.is_contiguous() and len(copies.slots_EC) == experts + 1)
    load_E = None if copies is None else copies.load_E
    chosen_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    weight_TK = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    inputs, tile = h_TI.shape[1] // 2, next(tile for tile in _ACTIVATION_PARTS if tokens <= tile)
    most_parts, num_warps = _ACTIVATION_PARTS[tile]
    shared_groups = ceil_div(inputs, FP8_GROUP)
    s_codes = torch.empty(tokens, inputs, dtype=torch.uint8, device=device)
    s_scales = torch.empty(tokens, shared_groups, dtype=torch.uint8, device=device)
    shared = power_of_2(shared_groups) if inputs else 0
    parts = min(max(shared, 1), most_parts)
    columns, hidden_groups = x_scales.shape[1], groups.arrivals.shape[1]
    routing = (logits_TE, logits_TE if bias is None else bias, chosen_TK if table is None else table)
    padding = (router.token_ids_T, router.token_ids_T if positions is None else positions)
    copied = (*((chosen_TK,) * 2 if copies is None else copies[:2]), chosen_TK if load_E is None else load_E)
    blocks = (groups.block_pairs, groups.block_expert, groups.num_blocks, groups.arrivals, done, ticket, groups.x_words)
    _prepare_kernel[(tokens + tokens * parts,)](
        *routing,
        *padding,
        *copied,
        h_TI,
        x_scales,
        chosen_TK,
        weight_TK,
        counters_of(device),
        *blocks,
        s_codes,
        s_scales,
        tokens,
        groups.max_blocks,
        logits_TE.stride(0),
        router.scale,
        inputs,
        limit,
        held.first or 0,
        **constants,
        HELD=len(work.w2.codes),
        COPIES=0 if copies is None else copies.slots_EC.shape[1],
        COUNTS=load_E is not None,
        TOKENS=tile,
        ROWS=work.block.rows,
        FILL=power_of_2(tile * top_k * work.block.rows),
        COLUMNS=columns,
        COLUMNS_TILE=power_of_2(columns),
        GROUPS=hidden_groups,
        GROUPS_TILE=power_of_2(hidden_groups),
        SHARED=shared,
        PARTS=parts,
        ALIGNED=inputs % FP8_GROUP == 0,
        num_warps=num_warps,
        enable_fp_fusion=False,
        launch_pdl=dependent_launch(device),
    )
    return chosen_TK, weight_TK, s_codes, s_scales
