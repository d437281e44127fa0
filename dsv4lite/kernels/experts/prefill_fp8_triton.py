"""Products of experts of FP8 on Hopper, for blocks of 64 rows.

The kernels are warp-specialized, and therefore written in Gluon. Four producer warps copy blocks of rows, which lie anywhere, and
let the hardware copy tiles of weights, several chunks of 128 inputs ahead. Two groups of four consumer warps have the same rows and
two tiles of weights each: while one adds up the product of a chunk by its scales, the other one's keeps the tensor cores busy.

An item is one block x four tiles. In the first product these are 128 columns of ``u``, which share scales: each group tells the
other one the largest numbers of its half.

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
from dsv4lite.kernels.hopper import STORED, copy_by_threads, copy_tile, described, next_item, pairs_to_bfloat16
from dsv4lite.kernels.swiglu.triton import swiglu_of

_ROWS = gl.constexpr(64)  # of a block
_STAGES = gl.constexpr(5)
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=2))
_TILES = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=3))
# How four warps store codes [64, 64]: a thread has 16 side by side. From the layout of products, codes change threads within their
# warp only.
_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)


@gluon.jit
def _load(inputs, taken, task, buffers, barriers, TOP_K: gl.constexpr):
    """Producer warps: copy each item's rows and tiles, with their scales, as soon as their buffers are free."""
    x, x_words, w = inputs
    scales, groups, pairs, chunks, per_block = task
    block_pairs, _block_expert, _block_span, num_blocks = groups
    rows, words, tiles, of_tiles = buffers
    full, empty, item_told = barriers
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT)), 0)
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, _ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    OF_TILES: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [4, 1], [1, 0])
    below = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, OF_TILES)), 1) * (chunks * 2)
    below += gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, OF_TILES)), 0)
    items = gl.load(num_blocks) * per_block
    step = 0
    item_phase = 1
    item = gl.program_id(0)
    while item < items:
        block, four, expert = place_of(item, groups, per_block)
        give_item(block, four, expert, _ROWS, item_told, item_phase)
        item_phase ^= 1
        of_rows = x_words + block.to(gl.int64) * (chunks * _ROWS) + word
        pair = gl.load(block_pairs + block * _ROWS + row)
        used = gl.expand_dims(pair < pairs, 1)
        at = x + gl.expand_dims((pair // TOP_K).to(gl.int64) * (chunks * 128), 1) + column
        tile = (expert * per_block + four) * 4
        of_four = scales + tile.to(gl.int64) * (chunks * 2) + below
        for chunk in range(chunks):
            slot = step % _STAGES
            mbarrier.wait(empty.index(slot), (step // _STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), 4 * 64 * 128)
            for part in gl.static_range(2):
                copy_tile(w, [tile + 2 * part, chunk * 64, 0], full.index(slot), tiles.index(2 * slot + part))
            copy_by_threads(rows.index(slot), at + chunk * 128, mask=used)
            copy_by_threads(words.index(slot), of_rows + chunk * _ROWS)
            copy_by_threads(of_tiles.index(slot), of_four + chunk * 2)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            step += 1
        item = next_item(taken, items)
    give_item(0, 0, 0, 0, item_told, item_phase)


@gluon.jit
def _by_tile(product):
    """Arrange a product [64, 128] as [64, 2 tiles, 4, 2 halves, 8]."""
    return gl.reshape(product, (_ROWS, 2, 4, 2, 8))


@gluon.jit
def _product(chunks, step, buffers, barriers, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the product of an item's rows and half ``PART`` of its tiles, float32 as of ``_by_tile``, and the next step."""
    rows, words, tiles, of_tiles = buffers
    full, empty, _item_told = barriers
    none = gl.zeros((_ROWS, 128), gl.float32, LAYOUT)
    acc = _by_tile(none)
    OF_UNITS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, acc.type.layout))))
    OF_TILES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(4, acc.type.layout)))
    for _chunk in range(chunks):
        slot = step % _STAGES
        mbarrier.wait(full.index(slot), step // _STAGES & 1)
        b = tiles.index(2 * slot + PART).reshape((128, 128)).permute((1, 0))
        part = warpgroup_mma(rows.index(slot), b, none, use_acc=False, is_async=True)
        unit = words.index(slot).load(OF_UNITS).to(gl.float32, bitcast=True)
        unit = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(unit, 1), 2), 3), 4)
        scale = of_tiles.index(slot).slice(2 * PART, 2).load(OF_TILES).to(gl.float32, bitcast=True)
        scale = gl.expand_dims(gl.expand_dims(gl.expand_dims(scale, 0), 2), 4) * unit
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(slot), count=1)
        acc += _by_tile(part) * scale
        step += 1
    return acc, step


@gluon.jit
def _activated(product, mix, limit):
    """Return half of 128 columns of ``u``, bfloat16 numbers as float32 [64, 64]."""
    # Reference: gate, up = ((x @ w13.dequantize(expert, half).T).bfloat16() for half in (0, 1))
    gate, up = gl.split(gl.permute(pairs_to_bfloat16(product), (0, 1, 2, 4, 3)))
    # Reference: u = (swiglu(gate, up, limit) * weight_TK[at][:, None]).bfloat16()
    gate, up = gl.reshape(gate, (_ROWS, 64)).to(gl.float32), gl.reshape(up, (_ROWS, 64)).to(gl.float32)
    mix = gl.convert_layout(mix, gl.SliceLayout(1, gate.type.layout))
    return pairs_to_bfloat16(swiglu_of(gate, up, limit) * gl.expand_dims(mix, 1)).to(gl.float32)


@gluon.jit
def _gate_up(task, results, buffers, barriers, PART: gl.constexpr):
    """Consumer warps: compute half ``PART`` of every item's columns of ``u`` and quantize them."""
    _scales, groups, pairs, chunks, per_block = task
    block_pairs = groups[0]
    mixes, u_codes, u_words, limit, largest, s_full, s_empty = results
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
    step = 0
    turn = 0
    block, four, _expert, count = take_item(barriers[2], 0)
    while count > 0:
        product, step = _product(chunks, step, buffers, barriers, PART, LAYOUT)
        pair = gl.load(block_pairs + block * _ROWS + row)
        u = _activated(product, gl.load(mixes + pair, mask=pair < pairs, other=0.0), limit)
        # Reference: u = dequantize_fp8(*quantize_fp8(u, GROUP), GROUP)
        own = gl.max(gl.abs(u), 1)
        mbarrier.wait(s_empty.index(PART), (turn & 1) ^ 1)
        largest.index(PART).store(own)
        mbarrier.arrive(s_full.index(PART), count=1)
        mbarrier.wait(s_full.index(1 - PART), turn & 1)
        other = largest.index(1 - PART).load(own.type.layout)
        mbarrier.arrive(s_empty.index(1 - PART), count=1)
        bits = fp8_scale_bits_of(gl.maximum(own, other))
        codes = gl.convert_layout(fp8_scaled(u, bits).to(gl.float8e4nv), _CODES)
        pair = gl.load(block_pairs + block * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _CODES)))
        at = gl.expand_dims(pair.to(gl.int64) * (per_block * 128) + four * 128 + PART * 64, 1)
        column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, _CODES)), 0)
        gl.store(u_codes + at + column, codes, mask=gl.expand_dims(pair < pairs, 1))
        if PART == 0:
            gl.store(u_words + (block * per_block + four) * _ROWS + gl.arange(0, _ROWS, layout=bits.type.layout), bits)
        turn += 1
        block, four, _expert, count = take_item(barriers[2], turn & 1)


@gluon.jit
def _down(task, y, buffers, barriers, PART: gl.constexpr):
    """Consumer warps: compute half ``PART`` of every item's columns of the result."""
    _scales, groups, pairs, chunks, per_block = task
    block_pairs = groups[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    step = 0
    turn = 0
    block, four, _expert, count = take_item(barriers[2], 0)
    while count > 0:
        product, step = _product(chunks, step, buffers, barriers, PART, LAYOUT)
        # Reference: outputs[at] = y.bfloat16()
        stored = gl.convert_layout(gl.reshape(product, (_ROWS, 128)).to(y.dtype.element_ty), STORED)
        pair = gl.load(block_pairs + block * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, STORED)))
        at = gl.expand_dims(pair.to(gl.int64) * (per_block * 256) + four * 256 + PART * 128, 1)
        column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, STORED)), 0)
        gl.store(y + at + column, stored, mask=gl.expand_dims(pair < pairs, 1))
        turn += 1
        block, four, _expert, count = take_item(barriers[2], turn & 1)


@gluon.jit
def _buffers():
    """Allocate buffers of rows, of tiles, and of the scales of both."""
    rows = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, _ROWS, 128], _OPERAND)
    tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * _STAGES, 2, 64, 128], _TILES)
    words = gl.allocate_shared_memory(gl.int32, [_STAGES, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    of_tiles = gl.allocate_shared_memory(gl.int32, [_STAGES, 4, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return rows, words, tiles, of_tiles


@gluon.jit(do_not_specialize=["pairs", "chunks", "per_block"])
def _gate_up_kernel(
    x, x_words, w, scales, block_pairs, block_expert, block_span, num_blocks, taken, mixes, u_codes, u_words, pairs, limit, chunks,
    per_block, TOP_K: gl.constexpr,
):  # fmt: skip
    buffers, barriers = _buffers(), barriers_of(_STAGES)
    largest = gl.allocate_shared_memory(gl.float32, [2, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(2):
        mbarrier.init(s_full.index(part), count=1)
        mbarrier.init(s_empty.index(part), count=1)
    task = (scales, (block_pairs, block_expert, block_span, num_blocks), pairs, chunks, per_block)
    results = (mixes, u_codes, u_words, limit, largest, s_full, s_empty)
    gl.warp_specialize(
        [
            (_gate_up, (task, results, buffers, barriers, 0)),
            (_gate_up, (task, results, buffers, barriers, 1)),
            (_load, ((x, x_words, w), taken, task, buffers, barriers, TOP_K)),
        ],
        [4, 4],  # warps and registers of the second and third function
        [216, 72],
    )


@gluon.jit(do_not_specialize=["pairs", "chunks", "per_block"])
def _down_kernel(
    u_codes, u_words, w, scales, block_pairs, block_expert, block_span, num_blocks, taken, y, pairs, chunks, per_block
):  # fmt: skip
    buffers, barriers = _buffers(), barriers_of(_STAGES)
    task = (scales, (block_pairs, block_expert, block_span, num_blocks), pairs, chunks, per_block)
    gl.warp_specialize(
        [
            (_down, (task, y, buffers, barriers, 0)),
            (_down, (task, y, buffers, barriers, 1)),
            (_load, ((u_codes, u_words, w), taken, task, buffers, barriers, 1)),
        ],
        [4, 4],
        [216, 72],
    )


def takes_blocks(given: ExpertInputs) -> bool:
    """Return whether these kernels support the chip, the format and the sizes."""
    w2 = given.w2
    known = isinstance(w2, Tiles) and not w2.fp4 and capability_of(given.x.device) == HOPPER
    return known and given.sizes[1] % (4 * TILE_ROWS) == 0


def _operand(w: Tiles) -> TensorDescriptor:
    """Return a descriptor, of which two tiles, one below the other, are copied to shared memory."""
    count, tiles, chunks, _ = w.codes.shape
    x = w.codes.view(torch.float8_e4m3fn).view(count * tiles, chunks * TILE_ROWS, TILE_COLUMNS)
    return described(x, (2, TILE_ROWS, TILE_COLUMNS), _TILES.value)


def outputs_of_blocks(given: ExpertInputs) -> Tensor:
    """Return the outputs of all pairs, [T * K, D], for what ``takes_blocks``."""
    w13, w2, (_, hidden, width), device = given.w13, given.w2, given.sizes, given.x.device
    assert isinstance(w13, Tiles) and isinstance(w2, Tiles)
    chunks, fours = width // TILE_COLUMNS, hidden // (4 * TILE_ROWS)
    tables, x_words, u_codes, u_words = grouped(given, _ROWS.value)
    most, pairs, programs = len(tables[0]), len(u_codes), multiprocessors_of(device)
    _gate_up_kernel[(min(most * chunks, programs),)](
        given.x, x_words, _operand(w13), w13.scales, *tables, given.weight_TK, u_codes, u_words, pairs, given.limit,
        hidden // TILE_COLUMNS, chunks, TOP_K=given.slots_TK.shape[1], num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    y = torch.empty(pairs, hidden, dtype=given.dtype, device=device)
    _down_kernel[(min(most * fours, programs),)](
        u_codes, u_words, _operand(w2), w2.scales, *tables, y, pairs, chunks, fours, num_warps=4, enable_fp_fusion=True
    )
    return y
