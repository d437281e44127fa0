"""Products of experts of FP4 on Hopper, for blocks of up to 128 rows.

The kernels are warp-specialized, and therefore written in Gluon. Four producer warps copy blocks of rows, which lie anywhere, and
let the hardware copy tiles of weights, several chunks of 128 inputs ahead. Two groups of four consumer warps have the same rows and
two tiles of weights each: they widen a tile in registers, so that 128 rows share the instructions for its codes, multiply, and add
up the product of a chunk by the scales of its rows. While tensor cores multiply the first tile, the second one is widened.

If weights come from registers, tensor cores need some 52 cycles for an instruction with 64 rows, and 64 cycles for one with 128. A
block of at most 64 rows therefore has code of its own, but costs more than half of a full one.

An item is one block x 256 columns, of ``u`` or of the result. In the first product a group has 128 columns of ``u``, which share
scales, in two turns of two tiles each; between these they wait in shared memory. What follows a product is written as loops: a
program whose code is too long for the instruction cache waits for its instructions.

The bits are those of ``triton.py``. Producers and consumers each count chunks (``step``): the count says which buffer is next, and
which phase of its barriers to wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4lite.kernels.dispatch import HOPPER, capability_of, multiprocessors_of
from dsv4lite.kernels.e4m3 import fp8_scale_bits_of, fp8_scaled
from dsv4lite.kernels.experts import TILE_COLUMNS, TILE_ROWS, ExpertInputs, Tiles
from dsv4lite.kernels.experts.items_triton import barriers_of, give_item, grouped, place_of, take_item
from dsv4lite.kernels.hopper import copy_by_threads, copy_tile, described, next_item, pairs_to_bfloat16
from dsv4lite.kernels.swiglu.triton import swiglu_of
from dsv4lite.kernels.widen_triton import row_exponents, side_by_side, widen_words

_ROWS = gl.constexpr(128)  # of a block
_STAGES = gl.constexpr(4)
_TILES = gl.constexpr(4)  # of a stage, two for each group of consumers
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=2))
_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Half of the codes of a tile [16, 128]: a thread has the 16 bytes that it passes to the tensor cores.
_PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]],
        lane_bases=[[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[16, 128],
    )
)
# 32 columns of ``u`` in 64 rows: four neighbouring threads have two rows.
_U = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [4, 0], [8, 0], [16, 0]],
        lane_bases=[[1, 0], [2, 0], [0, 2], [0, 4], [0, 8]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[32, 64],
    )
)


@gluon.jit
def _load(inputs, taken, task, buffers, barriers, TOP_K: gl.constexpr, TURNS: gl.constexpr):
    """Producer warps: copy each item's rows and tiles, with their scales, as soon as their buffers are free."""
    x, x_words, w = inputs
    scales, groups, pairs, chunks, per_block = task
    block_pairs, _block_expert, _block_span, num_blocks = groups
    rows, units, tiles, words = buffers
    full, empty, item_told = barriers
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT)), 0)
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
    items = gl.load(num_blocks) * per_block
    step = 0
    item_phase = 1
    item = gl.program_id(0)
    while item < items:
        block, place, expert = place_of(item, groups, per_block)
        many = gl.load(block_pairs + block * _ROWS + 64) < pairs  # used rows come first
        give_item(block, place, expert, gl.where(many, 128, 64), item_told, item_phase)
        item_phase ^= 1
        of_rows = x_words + block.to(gl.int64) * (chunks * _ROWS) + gl.arange(0, _ROWS, layout=_LINE)
        pair = gl.load(block_pairs + block * _ROWS + row)
        used = gl.expand_dims(pair < pairs, 1)
        at = x + gl.expand_dims((pair // TOP_K).to(gl.int64) * (chunks * 128), 1) + column
        for turn in range(TURNS):
            tile = (expert * per_block + place) * (_TILES * TURNS) + 2 * turn
            of_tiles = scales + tile.to(gl.int64) * (chunks * 64) + gl.arange(0, 64, layout=_LINE)
            for chunk in range(chunks):
                slot = step % _STAGES
                mbarrier.wait(empty.index(slot), (step // _STAGES & 1) ^ 1)
                mbarrier.expect(full.index(slot), _TILES * 32 * 128)
                for part in gl.static_range(_TILES):
                    further = (part // 2 * 2 * TURNS + part % 2) * chunks + chunk
                    copy_tile(w, [(tile * chunks + further) * 32, 0], full.index(slot), tiles.index(_TILES * slot + part))
                    copy_by_threads(words.index(_TILES * slot + part), of_tiles + further * 64)
                copy_by_threads(rows.index(slot), at + chunk * 128, mask=used)
                copy_by_threads(units.index(slot), of_rows + chunk * _ROWS)
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                step += 1
        item = next_item(taken, items)
    give_item(0, 0, 0, 0, item_told, item_phase)


@gluon.jit
def _by_rows(piece):
    """Arrange bytes of a piece by rows and columns, [64, 32], as ``widen_triton.place`` does."""
    return gl.reshape(gl.permute(piece, (0, 4, 1, 3, 2, 5)), (64, 32))


@gluon.jit
def _half(codes, words, PIECE: gl.constexpr):
    """Return 64 columns of a tile as e5m2 [64, 64]."""
    piece = gl.reshape(codes.slice(16 * PIECE, 16).load(_PIECE), (4, 8, 4, 2, 2, 4))
    OF_WORDS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(5, piece.type.layout)))
    s = words.reshape((4, 2, 8)).permute((0, 2, 1)).load(OF_WORDS)
    s = gl.expand_dims(gl.expand_dims(gl.expand_dims(s, 2), 3), 5)
    first, second = widen_words(piece, s >> (16 * PIECE) & 0x7C, s >> (16 * PIECE + 8) & 0x7C)
    return side_by_side(_by_rows(first), _by_rows(second)).to(gl.float8e5, bitcast=True)


@gluon.jit
def _widened(codes, words, LAYOUT: gl.constexpr):
    """Return a tile as the left operand of a product, e5m2 [64, 128]."""
    a = side_by_side(_half(codes, words, 0), _half(codes, words, 1))
    return gl.convert_layout(a, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)


@gluon.jit
def _unit(units, LAYOUT: gl.constexpr, COUNT: gl.constexpr):
    """Return the scales of ``COUNT`` rows, float32."""
    return units.slice(0, COUNT).load(gl.SliceLayout(0, LAYOUT)).to(gl.float32, bitcast=True)


@gluon.jit
def _products(step, tile, scales, chunks, buffers, barriers, PART: gl.constexpr, LAYOUT: gl.constexpr, COUNT: gl.constexpr):
    """Return the products of ``tile`` and the next one with ``COUNT`` rows, float32 [64, COUNT] each, and the step after them."""
    rows, units, tiles, words = buffers
    full, empty, _item_told = barriers
    none = gl.zeros((64, COUNT), gl.float32, LAYOUT)
    first = none
    second = none
    for _chunk in range(chunks):
        slot = step % _STAGES
        mbarrier.wait(full.index(slot), step // _STAGES & 1)
        own = _TILES * slot + 2 * PART
        b = rows.index(slot).slice(0, COUNT).permute((1, 0))
        part = warpgroup_mma(_widened(tiles.index(own), words.index(own), LAYOUT), b, none, use_acc=False, is_async=True)
        a = _widened(tiles.index(own + 1), words.index(own + 1), LAYOUT)
        part = warpgroup_mma_wait(0, deps=(part,))
        first += part * gl.expand_dims(_unit(units.index(slot), LAYOUT, COUNT), 0)
        part = warpgroup_mma_wait(0, deps=(warpgroup_mma(a, b, none, use_acc=False, is_async=True),))
        unit = _unit(units.index(slot), LAYOUT, COUNT)  # again: registers do not hold it meanwhile
        mbarrier.arrive(empty.index(slot), count=1)
        second += part * gl.expand_dims(unit, 0)
        step += 1
    return first * _base(scales, tile, chunks, LAYOUT), second * _base(scales, tile + 1, chunks, LAYOUT), step


@gluon.jit
def _base(scales, tile, chunks, LAYOUT: gl.constexpr):
    """Return what the scales of a tile's rows are relative to, float32 [64, 1]."""
    words = gl.load(scales + tile.to(gl.int64) * (chunks * 64) + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)))
    return gl.expand_dims(((row_exponents(words) + 14) << 23).to(gl.float32, bitcast=True), 1)


@gluon.jit
def _activated(product, mixes, limit, COUNT: gl.constexpr):
    """Return 32 columns of ``u``, bfloat16 [32, COUNT]; routing weights lie in shared memory."""
    # Reference: gate, up = ((x @ w13.dequantize(expert, half).T).bfloat16() for half in (0, 1))
    both = gl.reshape(pairs_to_bfloat16(product), (4, 2, 8, COUNT))
    gate, up = gl.split(gl.permute(both, (0, 2, 3, 1)))
    # Reference: u = (swiglu(gate, up, limit) * weight_TK[at][:, None]).bfloat16()
    gate, up = gl.reshape(gate, (32, COUNT)).to(gl.float32), gl.reshape(up, (32, COUNT)).to(gl.float32)
    mix = mixes.slice(0, COUNT).load(gl.SliceLayout(0, gate.type.layout))
    return pairs_to_bfloat16(swiglu_of(gate, up, limit) * gl.expand_dims(mix, 0))


@gluon.jit
def _quantize(u, pair_of_row, u_codes, u_words, width, pairs, PART: gl.constexpr, FIRST: gl.constexpr):
    """Quantize 128 columns of ``u``, four times 32 in shared memory, in 64 rows from ``FIRST`` on."""
    largest = gl.zeros((32, 64), gl.float32, _U)
    for turn in range(4):
        largest = gl.maximum(largest, gl.abs(u.index(4 * PART + turn).slice(FIRST, 64, 1).load(_U).to(gl.float32)))
    # Reference: u = dequantize_fp8(*quantize_fp8(u, GROUP), GROUP)
    bits = fp8_scale_bits_of(gl.max(largest, 0))
    gl.store(u_words + FIRST + gl.arange(0, 64, layout=bits.type.layout), bits)
    for turn in range(4):
        columns = u.index(4 * PART + turn).slice(FIRST, 64, 1).load(_U)
        _store_codes(columns, bits, pair_of_row, u_codes + 32 * turn, width, pairs, FIRST)


@gluon.jit
def _store_codes(u, bits, pair_of_row, u_codes, width, pairs, FIRST: gl.constexpr):
    """Store the codes of 32 columns of ``u``, bfloat16 [32, 64]."""
    u = gl.permute(u.to(gl.float32), (1, 0))
    bits = gl.convert_layout(bits, gl.SliceLayout(1, u.type.layout))
    STORED: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])
    codes = gl.convert_layout(fp8_scaled(u, bits).to(gl.float8e4nv), STORED)
    pair = pair_of_row.slice(FIRST, 64).load(gl.SliceLayout(1, STORED))
    at = gl.expand_dims(pair.to(gl.int64) * width, 1) + gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, STORED)), 0)
    gl.store(u_codes + at, codes, mask=gl.expand_dims(pair < pairs, 1))


@gluon.jit
def _gate_up(place, step, task, results, buffers, barriers, PART: gl.constexpr, COUNT: gl.constexpr):
    """Compute and quantize 128 columns of ``u`` for one block; return the next step."""
    block, column, expert = place
    scales, groups, pairs, chunks, per_block = task
    mixes, u_codes, u_words, limit, u, pair_of_row, mix_of_row = results
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 32])
    column = column * 2 + PART
    pair = gl.load(groups[0] + block * _ROWS + gl.arange(0, _ROWS, layout=_LINE))
    for turn in range(2):
        tile = (expert * per_block * 2 + column) * 4 + 2 * turn
        first, second, step = _products(step, tile, scales, chunks, buffers, barriers, PART, LAYOUT, COUNT)
        if turn == 0:
            pair_of_row.index(PART).store(pair)
            mix_of_row.index(PART).store(gl.load(mixes + pair, mask=pair < pairs, other=0.0))
        for i in range(2):
            columns = _activated(gl.where(i == 0, first, second), mix_of_row.index(PART), limit, COUNT)
            u.index(4 * PART + 2 * turn + i).slice(0, COUNT, 1).store(columns)
    u_words += (block * (per_block * 2) + column) * _ROWS
    for half in gl.static_range(COUNT // 64):
        _quantize(u, pair_of_row.index(PART), u_codes + column * 128, u_words, per_block * 256, pairs, PART, half * 64)
    return step


@gluon.jit
def _down(place, step, task, y, buffers, barriers, PART: gl.constexpr, COUNT: gl.constexpr):
    """Compute 128 columns of the result for one block; return the next step."""
    block, column, expert = place
    scales, groups, pairs, chunks, per_block = task
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 32])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = column * 2 + PART
    pair = gl.load(groups[0] + block * _ROWS + gl.arange(0, COUNT, layout=gl.SliceLayout(1, STORED)))
    tile = (expert * per_block * 2 + column) * 2
    first, second, step = _products(step, tile, scales, chunks, buffers, barriers, PART, LAYOUT, COUNT)
    at = gl.expand_dims(pair.to(gl.int64) * (per_block * 256) + column * 128, 1)
    at += gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, STORED)), 0)
    # Reference: outputs[at] = y.bfloat16()
    used = gl.expand_dims(pair < pairs, 1)
    gl.store(y + at, gl.convert_layout(gl.permute(first.to(y.dtype.element_ty), (1, 0)), STORED), mask=used)
    gl.store(y + at + 64, gl.convert_layout(gl.permute(second.to(y.dtype.element_ty), (1, 0)), STORED), mask=used)
    return step


@gluon.jit
def _consume(task, results, buffers, barriers, FIRST: gl.constexpr, PART: gl.constexpr):
    """Consumer warps: compute half ``PART`` of every item's columns, of the first or of the second product."""
    step = 0
    phase = 0
    block, column, expert, count = take_item(barriers[2], phase)
    while count > 0:
        if count > 64:
            step = _item((block, column, expert), step, task, results, buffers, barriers, FIRST, PART, 128)
        else:
            step = _item((block, column, expert), step, task, results, buffers, barriers, FIRST, PART, 64)
        phase ^= 1
        block, column, expert, count = take_item(barriers[2], phase)


@gluon.jit
def _item(place, step, task, results, buffers, barriers, FIRST: gl.constexpr, PART: gl.constexpr, COUNT: gl.constexpr):
    if FIRST:
        step = _gate_up(place, step, task, results, buffers, barriers, PART, COUNT)
    else:
        step = _down(place, step, task, results, buffers, barriers, PART, COUNT)
    return step


@gluon.jit
def _buffers():
    """Allocate buffers of rows, of tiles, and of the scales of both."""
    rows = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, _ROWS, 128], _OPERAND)
    units = gl.allocate_shared_memory(gl.int32, [_STAGES, _ROWS], _NUMBERS)
    tiles = gl.allocate_shared_memory(gl.uint8, [_TILES * _STAGES, 32, 128], _OPERAND)
    words = gl.allocate_shared_memory(gl.int32, [_TILES * _STAGES, 64], _NUMBERS)
    return rows, units, tiles, words


@gluon.jit(do_not_specialize=["pairs", "chunks", "per_block"])
def _gate_up_kernel(
    x, x_words, w, scales, block_pairs, block_expert, block_span, num_blocks, taken, mixes, u_codes, u_words, limit, pairs, chunks,
    per_block, TOP_K: gl.constexpr,
):  # fmt: skip
    buffers, barriers = _buffers(), barriers_of(_STAGES)
    # Of each group of consumers.
    u = gl.allocate_shared_memory(gl.bfloat16, [2 * 4, 32, _ROWS], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
    pair_of_row = gl.allocate_shared_memory(gl.int32, [2, _ROWS], _NUMBERS)
    mix_of_row = gl.allocate_shared_memory(gl.float32, [2, _ROWS], _NUMBERS)
    task = (scales, (block_pairs, block_expert, block_span, num_blocks), pairs, chunks, per_block)
    results = (mixes, u_codes, u_words, limit, u, pair_of_row, mix_of_row)
    gl.warp_specialize(
        [
            (_consume, (task, results, buffers, barriers, True, 0)),
            (_consume, (task, results, buffers, barriers, True, 1)),
            (_load, ((x, x_words, w), taken, task, buffers, barriers, TOP_K, 2)),
        ],
        [4, 4],  # warps and registers of the second and third function
        [232, 40],
    )


@gluon.jit(do_not_specialize=["pairs", "chunks", "per_block"])
def _down_kernel(
    u_codes, u_words, w, scales, block_pairs, block_expert, block_span, num_blocks, taken, y, pairs, chunks, per_block
):  # fmt: skip
    buffers, barriers = _buffers(), barriers_of(_STAGES)
    task = (scales, (block_pairs, block_expert, block_span, num_blocks), pairs, chunks, per_block)
    gl.warp_specialize(
        [
            (_consume, (task, y, buffers, barriers, False, 0)),
            (_consume, (task, y, buffers, barriers, False, 1)),
            (_load, ((u_codes, u_words, w), taken, task, buffers, barriers, 1, 1)),
        ],
        [4, 4],
        [232, 40],
    )


def takes_blocks(given: ExpertInputs) -> bool:
    """Return whether these kernels support the chip, the format and the sizes."""
    w2, (_, hidden, width) = given.w2, given.sizes
    known = isinstance(w2, Tiles) and w2.fp4 and capability_of(given.x.device) == HOPPER
    return known and hidden % (4 * TILE_ROWS) == width % (2 * TILE_COLUMNS) == 0


def _operand(w: Tiles) -> TensorDescriptor:
    """Return a descriptor, of which tiles are copied to shared memory."""
    return described(w.codes.view(-1, 128), (32, 128), _OPERAND.value)


def outputs_of_blocks(given: ExpertInputs) -> Tensor:
    """Return the outputs of all pairs, [T * K, D], for what ``takes_blocks``."""
    w13, w2, (_, hidden, width), device = given.w13, given.w2, given.sizes, given.x.device
    assert isinstance(w13, Tiles) and isinstance(w2, Tiles)
    chunks, down_items = width // TILE_COLUMNS, hidden // (4 * TILE_ROWS)
    tables, x_words, u_codes, u_words = grouped(given, _ROWS.value)
    most, pairs, programs = len(tables[0]), len(u_codes), multiprocessors_of(device)
    _gate_up_kernel[(min(most * chunks // 2, programs),)](
        given.x, x_words, _operand(w13), w13.scales, *tables, given.weight_TK, u_codes, u_words, given.limit, pairs,
        hidden // TILE_COLUMNS, chunks // 2, TOP_K=given.slots_TK.shape[1], num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    y = torch.empty(pairs, hidden, dtype=given.dtype, device=device)
    _down_kernel[(min(most * down_items, programs),)](
        u_codes, u_words, _operand(w2), w2.scales, *tables, y, pairs, chunks, down_items, num_warps=4, enable_fp_fusion=True
    )
    return y
