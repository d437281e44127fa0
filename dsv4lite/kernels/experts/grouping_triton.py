"""Grouping of rows by expert into blocks, the work units of both products of routed experts. The host reads nothing back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div, power_of_2
from dsv4lite.kernels.quantize import FP8_GROUP

COUNT_FROM = 4096  # pairs of token and expert; from here on a kernel of its own counts the pairs of each expert
_COUNT_CHUNK = tl.constexpr(4096)  # pairs of one program of that kernel
_SCAN_CHUNKS = (64, 1024, 4096)


def max_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return the largest number of blocks that any routing needs."""
    return min(pairs, (pairs + min(experts, pairs) * (rows - 1)) // rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Tile sizes and launch options of one program of a product.

    Attributes:
        rows: Rows of a block, one for each pair of token and expert.
        tiles: Tiles of 64 weight rows.
        num_stages: Pipeline stages of the loop over weights.
        unroll: Chunks of inputs per iteration of that loop, with FP4 or int4 weights; a stage holds as many chunks.
    """

    rows: int
    tiles: int
    num_warps: int
    num_stages: int
    unroll: int = 1

    def unroll_of(self, fp4: bool, native: bool) -> int:
        """Return the chunks per iteration: 1 with FP8 weights, whose chunks are large, and on chips without e4m3."""
        return self.unroll if fp4 and native else 1


BlockTable = tuple[tuple[int | None, BlockConfig], ...]


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(chosen, counts, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr):
    at = tl.program_id(0) * _COUNT_CHUNK + tl.arange(0, _COUNT_CHUNK)
    ids = tl.load(chosen + at, mask=at < pairs, other=BINS - 1).to(tl.int32)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + bins, tl.histogram(ids, BINS), mask=bins < EXPERTS)


@triton.jit
def _count_pairs(chosen, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many pairs each expert has, int32 [BINS]; 0 from EXPERTS on."""
    count = tl.zeros((BINS,), tl.int32)
    for begin in range(0, pairs, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        count += tl.histogram(tl.load(chosen + at, mask=at < pairs, other=BINS - 1).to(tl.int32), BINS)
    return tl.where(tl.arange(0, BINS) < EXPERTS, count, 0)


@triton.jit
def _own_blocks(count, expert, num_blocks, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Return an expert's first block and its number of blocks; the program of expert 0 stores the total number in ``blocks``."""
    bins = tl.arange(0, BINS)
    needed = (count + ROWS - 1) // ROWS
    if expert == 0:
        tl.store(num_blocks, tl.sum(needed))
    return tl.sum(tl.where(bins < expert, needed, 0)), tl.sum(tl.where(bins == expert, needed, 0))


@triton.jit
def _list_pairs(chosen, block_pairs, first, mine, expert, pairs, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Store an expert's pairs, ascending, into its ``mine`` blocks from ``first`` on; unused rows get the value ``pairs``."""
    base = block_pairs + first.to(tl.int64) * ROWS
    found = tl.zeros((), tl.int32)
    for begin in range(0, pairs, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        here = (tl.load(chosen + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(base + found + tl.cumsum(here) - 1, at, mask=here != 0)
        found += tl.sum(here)
    row = tl.arange(0, ROWS)
    tl.store(base + found + row, pairs, mask=found + row < mine * ROWS)


@triton.jit(do_not_specialize=["pairs"])
def _group_kernel(
    chosen, counts, x_scales, block_pairs, block_expert, block_span, num_blocks, arrivals, x_words, pairs,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_TILE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    # One program per expert. Reference: order = slots_TK.flatten().argsort(stable=True)
    expert = tl.program_id(0)
    if COUNTED:
        bins = tl.arange(0, BINS)
        count = tl.load(counts + bins, mask=bins < EXPERTS, other=0)
    else:
        count = _count_pairs(chosen, pairs, EXPERTS, BINS, CHUNK)
    first, mine = _own_blocks(count, expert, num_blocks, BINS, ROWS)
    if mine > 0:
        _list_pairs(chosen, block_pairs, first, mine, expert, pairs, ROWS, CHUNK)
        if SCALED:
            tl.debug_barrier()  # the order is read again below, by other threads
            row = tl.arange(0, ROWS)
            column = tl.arange(0, COLUMNS_TILE)
            group = tl.arange(0, GROUPS_TILE)
        for block in range(mine):
            number = (first + block).to(tl.int64)
            tl.store(block_expert + number, expert)
            tl.store(block_span + number * 2, first)
            tl.store(block_span + number * 2 + 1, mine)
            if SCALED:
                tl.store(arrivals + number * GROUPS + group, tl.zeros((GROUPS_TILE,), tl.int32), mask=group < GROUPS)
                pair = tl.load(block_pairs + number * ROWS + row)
                token = (pair // TOP_K).to(tl.int64)
                wanted = (pair < pairs)[None, :] & (column < COLUMNS)[:, None]
                scale = tl.load(x_scales + token[None, :] * COLUMNS + column[:, None], mask=wanted, other=127).to(tl.int32)
                at = (number * COLUMNS + column[:, None]) * ROWS + row[None, :]
                tl.store(x_words + at, scale << 23, mask=(column < COLUMNS)[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The rows of each block; written by kernels.

    Attributes:
        pairs: Number of pairs of token and expert.
        block_pairs: Pairs of each block, int32 [blocks, rows]; the value ``pairs`` marks an unused row.
        block_expert, num_blocks: Expert of each block [blocks], and number of used blocks [1].
        block_span: First block and number of blocks of each block's expert, [blocks, 2]; not written with ``by_token``.
        arrivals: For quantized experts, programs that have written their part of 128 columns of ``u``, [blocks, I / 128].
        x_words: Float32 bits of the inputs' scales, int32: by block [blocks, D / 128, rows], or by token [T, D / 128].
    """

    pairs: int
    block_pairs: Tensor
    block_expert: Tensor
    block_span: Tensor
    num_blocks: Tensor
    arrivals: Tensor
    x_words: Tensor

    @classmethod
    def allocate(
        cls, tokens: int, top_k: int, experts: int, sizes: tuple[int, int], rows: int, device: torch.device, *, by_token: bool
    ) -> Groups:
        """Allocate for any routing; ``sizes`` are ``(D, I)``, or zeros if there are no scales; ``by_token`` chooses ``x_words``."""
        pairs, (columns, groups) = tokens * top_k, (size // FP8_GROUP for size in sizes)
        most = max_blocks(pairs, experts, rows)
        empty = partial(torch.empty, dtype=torch.int32, device=device)
        return cls(
            pairs=pairs,
            block_pairs=empty(most, rows),
            block_expert=empty(most),
            block_span=empty(most, 2),
            num_blocks=empty(1),
            arrivals=empty(most, groups),
            x_words=empty(tokens, columns) if by_token else empty(most, columns, rows),
        )

    @property
    def max_blocks(self) -> int:
        """Number of blocks that are allocated, enough for any routing."""
        return len(self.block_pairs)


def group_triton(slots_TK: Tensor, x_scales: Tensor | None, experts: int, groups: Groups) -> None:
    """Fill groups that were allocated with ``by_token=False``.

    Args:
        slots_TK: Experts, int64; ``experts`` and more mean none.
        x_scales: Scale bytes of the inputs, uint8 [T, D / 128]; ``None`` if inputs are not quantized.
    """
    bins = power_of_2(experts + 1)
    counts, counted = groups.num_blocks, groups.pairs >= COUNT_FROM
    if counted:
        counts = torch.zeros(experts, dtype=torch.int32, device=slots_TK.device)
        _count_kernel[(ceil_div(groups.pairs, _COUNT_CHUNK.value),)](
            slots_TK,
            counts,
            groups.pairs,
            EXPERTS=experts,
            BINS=bins,
            num_warps=4,
            enable_fp_fusion=True,
        )
    columns, hidden_groups = 0 if x_scales is None else x_scales.shape[1], groups.arrivals.shape[1]
    _group_kernel[(experts,)](
        slots_TK,
        counts,
        slots_TK if x_scales is None else x_scales,
        groups.block_pairs,
        groups.block_expert,
        groups.block_span,
        groups.num_blocks,
        groups.arrivals,
        groups.x_words,
        groups.pairs,
        EXPERTS=experts,
        BINS=bins,
        TOP_K=slots_TK.shape[1],
        COLUMNS=columns,
        COLUMNS_TILE=power_of_2(columns),
        GROUPS=hidden_groups,
        GROUPS_TILE=power_of_2(hidden_groups),
        ROWS=groups.block_pairs.shape[1],
        CHUNK=next(chunk for chunk in _SCAN_CHUNKS if groups.pairs <= chunk or chunk == _SCAN_CHUNKS[-1]),
        COUNTED=counted,
        SCALED=x_scales is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
