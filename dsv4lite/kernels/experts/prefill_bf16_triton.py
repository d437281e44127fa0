"""Products of experts of bfloat16 on Hopper, for blocks of 128 rows.

The kernels are warp-specialized, and therefore written in Gluon. Four producer warps copy blocks of rows, which lie anywhere, and
let the hardware copy rows of weights, several chunks of 64 inputs ahead. Two groups of four consumer warps have 64 rows each, and
the same 256 rows of weights: in the first product those of 128 gates and of 128 ups. While one group waits for its product, the
other one's keeps the tensor cores busy. A block of at most 64 rows is computed by the first group alone.

An item is one block x 128 columns of ``u``, or x 256 columns of the result.

The tensor cores add 16 inputs at a time to a sum, in order, as in ``weight_only_triton.py``: the bits are the same. Producers and
consumers each count chunks (``step``): the count says which buffer is next, and which phase of its barriers to wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4lite.kernels.dispatch import HOPPER, capability_of, ceil_div, multiprocessors_of
from dsv4lite.kernels.experts import ExpertInputs
from dsv4lite.kernels.experts.grouping_triton import Groups, group_triton
from dsv4lite.kernels.experts.items_triton import barriers_of, give_item, place_of, tables_of, take_item
from dsv4lite.kernels.hopper import STORED, copy_by_threads, copy_tile, described, next_item, pairs_to_bfloat16
from dsv4lite.kernels.swiglu.triton import swiglu_of

LEAST_PAIRS = 64  # per expert, on average; fewer leave blocks of 128 rows mostly empty
_ROWS, _HALF = gl.constexpr(128), gl.constexpr(64)  # of a block, and of a group of consumers
_OUTS = gl.constexpr(256)  # rows of weights of an item
_INPUTS = gl.constexpr(64)  # of a chunk
_STAGES = gl.constexpr(4)
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=4))
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def _load(inputs, taken, task, buffers, barriers, ROWS: gl.constexpr, TOP_K: gl.constexpr):
    """Producer warps: copy each item's rows and weights as soon as their buffers are free."""
    x, w = inputs
    groups, pairs, chunks, per_block, _width = task
    block_pairs, _block_expert, _block_span, num_blocks = groups
    rows, weights = buffers
    full, empty, item_told = barriers
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.expand_dims(gl.arange(0, _INPUTS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    row = gl.arange(0, _HALF, layout=gl.SliceLayout(1, LAYOUT))
    items = gl.load(num_blocks) * per_block
    step = 0
    item_phase = 1
    item = gl.program_id(0)
    while item < items:
        block, place, expert = place_of(item, groups, per_block)
        many = gl.load(block_pairs + block * _ROWS + _HALF) < pairs  # used rows come first
        give_item(block, place, expert, gl.where(many, _ROWS, _HALF), item_told, item_phase)
        item_phase ^= 1
        pair0 = gl.load(block_pairs + block * _ROWS + row)
        pair1 = gl.load(block_pairs + block * _ROWS + _HALF + row)
        at0 = x + gl.expand_dims((pair0 // TOP_K).to(gl.int64) * (chunks * _INPUTS), 1) + column
        at1 = x + gl.expand_dims((pair1 // TOP_K).to(gl.int64) * (chunks * _INPUTS), 1) + column
        used0, used1 = gl.expand_dims(pair0 < pairs, 1), gl.expand_dims(pair1 < pairs, 1)
        for chunk in range(chunks):
            slot = step % _STAGES
            mbarrier.wait(empty.index(slot), (step // _STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), _OUTS * _INPUTS * 2)
            copy_tile(w, [expert, 0, place * ROWS, chunk * _INPUTS], full.index(slot), weights.index(slot))
            copy_by_threads(rows.index(2 * slot), at0 + chunk * _INPUTS, mask=used0)
            copy_by_threads(rows.index(2 * slot + 1), at1 + chunk * _INPUTS, mask=used1)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            step += 1
        item = next_item(taken, items)
    give_item(0, 0, 0, 0, item_told, item_phase)


@gluon.jit
def _product(chunks, step, buffers, barriers, PART: gl.constexpr):
    """Return the products of 64 of an item's rows with both halves of its weights, float32 [64, 128] each, and the next step."""
    rows, weights = buffers
    full, empty, _item_told = barriers
    acc = gl.zeros((_HALF, _OUTS), gl.float32, _PRODUCT)
    for _chunk in range(chunks):
        slot = step % _STAGES
        mbarrier.wait(full.index(slot), step // _STAGES & 1)
        b = weights.index(slot).reshape((_OUTS, _INPUTS)).permute((1, 0))
        acc = warpgroup_mma(rows.index(2 * slot + PART), b, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(slot), count=1)
        step += 1
    first, second = gl.split(gl.permute(gl.reshape(acc, (_HALF, 2, _OUTS // 2)), (0, 2, 1)))
    return first, second, step


@gluon.jit
def _leave_out(chunks, step, barriers):
    """Free the buffers of an item without computing it; return the next step."""
    full, empty, _item_told = barriers
    for _chunk in range(chunks):
        mbarrier.wait(full.index(step % _STAGES), step // _STAGES & 1)
        mbarrier.arrive(empty.index(step % _STAGES), count=1)
        step += 1
    return step


@gluon.jit
def _store(results, out, groups, block, column, width, pairs, PART: gl.constexpr):
    """Store 128 columns of an item's results in 64 rows, [64, 128], from ``column`` on."""
    stored = gl.convert_layout(results, STORED)
    pair = gl.load(groups[0] + block * _ROWS + PART * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, STORED)))
    at = column + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, STORED)), 0)
    inside = gl.expand_dims(pair < pairs, 1) & (at < width)
    gl.store(out + gl.expand_dims(pair.to(gl.int64) * width, 1) + at, stored, mask=inside)


@gluon.jit
def _activated(gate, up, mixes, groups, block, limit, pairs, PART: gl.constexpr):
    """Return 128 columns of ``u``, bfloat16 [64, 128]."""
    row = PART * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, gate.type.layout))
    pair = gl.load(groups[0] + block * _ROWS + row)
    mix = gl.load(mixes + pair, mask=pair < pairs, other=0.0)
    # Reference: u_NI = (swiglu(h_NI[:, :width], h_NI[:, width:], limit) * weight_N1).to(dtype)
    gate, up = pairs_to_bfloat16(gate).to(gl.float32), pairs_to_bfloat16(up).to(gl.float32)
    return pairs_to_bfloat16(swiglu_of(gate, up, limit) * gl.expand_dims(mix, 1))


@gluon.jit
def _consume(task, results, buffers, barriers, FIRST: gl.constexpr, PART: gl.constexpr):
    """Consumer warps: compute every item's columns of the first or of the second product in half of its rows."""
    groups, pairs, chunks, _per_block, width = task
    step = 0
    turn = 0
    block, place, _expert, count = take_item(barriers[2], 0)
    while count > 0:
        if count > PART * _HALF:
            first, second, step = _product(chunks, step, buffers, barriers, PART)
            if FIRST:
                mixes, u, limit = results
                activated = _activated(first, second, mixes, groups, block, limit, pairs, PART)
                _store(activated, u, groups, block, place * 128, width, pairs, PART)
            else:
                # Reference: matmul_rows(u_NI, w2[expert], row_tile)
                y = results
                _store(first.to(y.dtype.element_ty), y, groups, block, place * 256, width, pairs, PART)
                _store(second.to(y.dtype.element_ty), y, groups, block, place * 256 + 128, width, pairs, PART)
        else:
            step = _leave_out(chunks, step, barriers)
        turn += 1
        block, place, _expert, count = take_item(barriers[2], turn & 1)


@gluon.jit
def _buffers(HALVES: gl.constexpr):
    """Allocate buffers of rows, 64 in each, and of weights, in one part or in halves."""
    rows = gl.allocate_shared_memory(gl.bfloat16, [2 * _STAGES, _HALF, _INPUTS], _OPERAND)
    return rows, gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 1, HALVES, _OUTS // HALVES, _INPUTS], _WEIGHTS)


@gluon.jit(do_not_specialize=["pairs", "chunks", "per_block"])
def _gate_up_kernel(
    x, w, block_pairs, block_expert, block_span, num_blocks, taken, mixes, u, pairs, limit, chunks, per_block, width,
    TOP_K: gl.constexpr,
):  # fmt: skip
    buffers, barriers = _buffers(2), barriers_of(_STAGES)
    task = ((block_pairs, block_expert, block_span, num_blocks), pairs, chunks, per_block, width)
    gl.warp_specialize(
        [
            (_consume, (task, (mixes, u, limit), buffers, barriers, True, 0)),
            (_consume, (task, (mixes, u, limit), buffers, barriers, True, 1)),
            (_load, ((x, w), taken, task, buffers, barriers, 128, TOP_K)),
        ],
        [4, 4],  # warps and registers of the second and third function
        [216, 72],
    )


@gluon.jit(do_not_specialize=["pairs", "chunks", "per_block"])
def _down_kernel(u, w, block_pairs, block_expert, block_span, num_blocks, taken, y, pairs, chunks, per_block, hidden):
    buffers, barriers = _buffers(1), barriers_of(_STAGES)
    task = ((block_pairs, block_expert, block_span, num_blocks), pairs, chunks, per_block, hidden)
    gl.warp_specialize(
        [
            (_consume, (task, y, buffers, barriers, False, 0)),
            (_consume, (task, y, buffers, barriers, False, 1)),
            (_load, ((u, w), taken, task, buffers, barriers, 256, 1)),
        ],
        [4, 4],
        [216, 72],
    )


def takes_blocks(given: ExpertInputs) -> bool:
    """Return whether these kernels support the chip, the format, the sizes and the number of tokens."""
    w2, (experts, hidden, width) = given.w2, given.sizes
    known = isinstance(w2, Tensor) and w2.dtype == torch.bfloat16 and capability_of(given.x.device) == HOPPER
    return known and hidden % _INPUTS.value == width % _INPUTS.value == 0 and given.slots_TK.numel() >= LEAST_PAIRS * experts


def _operand(w: Tensor, halves: int) -> TensorDescriptor:
    """Return a descriptor of matrices in one part or in halves, of which 256 rows are copied to shared memory."""
    return described(w.unflatten(1, (halves, -1)), (1, halves, _OUTS.value // halves, _INPUTS.value), _WEIGHTS.value)


def outputs_of_blocks(given: ExpertInputs) -> Tensor:
    """Return the outputs of all pairs, [T * K, D], for what ``takes_blocks``."""
    w13, w2, (_, hidden, width), device = given.w13, given.w2, given.sizes, given.x.device
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor) and w13.is_contiguous() and w2.is_contiguous()
    (tokens, top_k), experts, programs = given.slots_TK.shape, len(w2), multiprocessors_of(device)
    groups = Groups.allocate(tokens, top_k, experts, (0, 0), _ROWS.value, device, by_token=False)
    group_triton(given.slots_TK, None, experts, groups)
    tables, pairs = tables_of(groups), groups.pairs
    most, wide, twos = len(tables[0]), ceil_div(width, 128), ceil_div(hidden, 256)
    u = torch.empty(pairs, width, dtype=torch.bfloat16, device=device)
    _gate_up_kernel[(min(most * wide, programs),)](
        given.x, _operand(w13, 2), *tables, given.weight_TK, u, pairs, given.limit, hidden // _INPUTS.value,
        wide, width, TOP_K=top_k, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    y = torch.empty(pairs, hidden, dtype=given.dtype, device=device)
    _down_kernel[(min(most * twos, programs),)](
        u, _operand(w2, 1), *tables, y, pairs, width // _INPUTS.value, twos, hidden,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return y
