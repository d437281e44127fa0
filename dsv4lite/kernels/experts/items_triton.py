"""Items of the experts' kernels for Hopper: one block, and some of its expert's tiles.

Items of an expert follow each other, first those of the same tiles, and a program takes the next item that no program has. So tiles
that are read from memory once are then found in L2; programs that take every 132nd item drift apart, and read them up to three
times. Producer warps look up what an item is, while the consumers still have chunks of the one before.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4lite.kernels.counters import counters_of
from dsv4lite.kernels.experts import ExpertInputs
from dsv4lite.kernels.experts.grouping_triton import Groups, group_triton
from dsv4lite.kernels.hopper import tell, told
from dsv4lite.kernels.quantize import FP8_GROUP


@gluon.jit
def barriers_of(STAGES: gl.constexpr):
    """Allocate barriers that say which stages are full or empty, and an item's numbers with theirs, for two groups of consumers."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128 + 1)  # threads that copy, and one that expects what the hardware copies
        mbarrier.init(empty.index(stage), count=2)
    item = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    i_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(i_full, count=1)
    mbarrier.init(i_empty, count=2)
    return full, empty, (item, i_full, i_empty)


@gluon.jit
def place_of(item, groups, per_block):
    """Return an item's block, its place among the ``per_block`` items of the block, and its expert."""
    _block_pairs, block_expert, block_span, _num_blocks = groups
    any_block = item // per_block  # of the expert
    first, count = gl.load(block_span + any_block * 2), gl.load(block_span + any_block * 2 + 1)
    item -= first * per_block
    return first + item % count, item // count, gl.load(block_expert + any_block)


@gluon.jit
def give_item(block, place, expert, rows, buffers, phase):
    """Four producer warps: tell the consumers their next item and how many of its rows to compute; none if nothing is left."""
    item, full, empty = buffers
    mbarrier.wait(empty, phase)
    tell(block, item.index(0), 4)
    tell(place, item.index(1), 4)
    tell(expert, item.index(2), 4)
    tell(rows, item.index(3), 4)
    mbarrier.arrive(full, count=1)


@gluon.jit
def take_item(buffers, phase):
    """Four consumer warps: return the block, place, expert and number of rows that the producers have given."""
    item, full, empty = buffers
    mbarrier.wait(full, phase)
    block, place, expert, rows = told(item.index(0)), told(item.index(1)), told(item.index(2)), told(item.index(3))
    mbarrier.arrive(empty, count=1)
    return block.to(gl.int64), place, expert, rows


def tables_of(groups: Groups) -> tuple[Tensor, ...]:
    """Return ``block_pairs``, ``block_expert``, ``block_span`` and ``num_blocks``, and the counter of ``next_item``."""
    return groups.block_pairs, groups.block_expert, groups.block_span, groups.num_blocks, counters_of(groups.block_pairs.device)


def grouped(given: ExpertInputs, rows: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
    """Group the pairs of token and expert of FP8 inputs in blocks of ``rows`` rows, and allocate ``u``.

    Returns:
        ``tables_of`` the groups; ``x_words`` of ``Groups``; ``u``, float8_e4m3fn [pairs, I]; and the bits of its scales, int32
        [blocks, I / 128, rows].
    """
    (tokens, top_k), (experts, hidden, width), device = given.slots_TK.shape, given.sizes, given.x.device
    groups = Groups.allocate(tokens, top_k, experts, (hidden, width), rows, device, by_token=False)
    group_triton(given.slots_TK, given.x_scales, experts, groups)
    u_codes = torch.empty(groups.pairs, width, dtype=torch.float8_e4m3fn, device=device)
    u_words = torch.empty(groups.max_blocks, width // FP8_GROUP, rows, dtype=torch.int32, device=device)
    return tables_of(groups), groups.x_words, u_codes, u_words
