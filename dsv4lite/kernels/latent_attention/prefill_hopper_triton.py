"""One round of the up-projected form on Hopper, for heads of 128 + 64 key channels and 128 values.

The kernel is warp-specialized, and therefore written in Gluon. One producer warp lets the hardware copy queries, keys and values to
shared memory, up to two pieces of 128 rows ahead. Two groups of four consumer warps have 64 queries each: while one takes its
softmax, the other one's products keep the tensor cores busy.

Whole pieces are copied, without masks: in a round, rows of a sequence begin at multiples of 128, and rows up to the next sequence
repeat its own.

An item is one block of queries x one head. A program computes one item after the other: its producer takes the next one that no
program has, for items take between one and hundreds of pieces. Producers and consumers each count pieces (``step``): the count says
which buffer is next, and which phase of its barriers to wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from dsv4lite.kernels.attention.merge_triton import LOW
from dsv4lite.kernels.counters import counters_of
from dsv4lite.kernels.dispatch import HOPPER, capability_of, describable, multiprocessors_of
from dsv4lite.kernels.hopper import STORED, copy_tile, described, next_item, tell, told
from dsv4lite.kernels.latent_attention import LatentAttentionInputs
from dsv4lite.kernels.rows.packed import LOG2_E

QUERIES = 128  # of a block
KEYS = 128  # of a piece: rows of a sequence begin at multiples of it in a round
_LEAST_TOKENS = 1024  # of a step: for fewer, encoding descriptors takes the host longer than this kernel saves
_LEAST_MEAN = 256  # of tokens for each sequence: with fewer, too many rows lie between sequences
_NOPE, _ROPE, _VALUE = 128, 64, 128
_QUERIES = gl.constexpr(QUERIES // 2)  # of a group of consumer warps
_KEYS = gl.constexpr(KEYS)
_STAGES = gl.constexpr(2)
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def _block_of(blocks, num_blocks, item):
    """Return an item's fields of ``Round.blocks``. The last blocks, which see most rows, come first."""
    block = blocks + (num_blocks - 1 - item % num_blocks) * 8
    row, size, position = gl.load(block), gl.load(block + 1), gl.load(block + 2)
    first, count, place = gl.load(block + 3), gl.load(block + 4), gl.load(block + 5)
    return row, size, position, first, count, place, gl.load(block + 6), gl.load(block + 7)


@gluon.jit
def _load(descriptors, blocks, used, taken, buffers, barriers, H: gl.constexpr, LATENT: gl.constexpr):
    """Producer warp: copy each item's queries and the rows of its pieces as soon as their buffers are free."""
    num_blocks = gl.load(used)
    items = num_blocks * H
    q_nope, q_rope, projected, rows = descriptors
    q0, q1, k0, k1, v, following = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, i_full, i_empty = barriers
    step = 0
    item_phase = 1
    item = gl.program_id(0)
    while item < items:
        head = item // num_blocks
        row, size, position, first, count, place, _goes_on, _complete = _block_of(blocks, num_blocks, item)
        end = gl.minimum(count, position + size - first)
        for piece in range(gl.cdiv(end, _KEYS)):
            slot, phase = step % _STAGES, (step // _STAGES & 1) ^ 1
            at = place + piece * _KEYS
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), _KEYS * 192 * 2)
            copy_tile(projected, [at, head * 256], k_full.index(slot), k0.index(slot))
            copy_tile(rows, [at, LATENT], k_full.index(slot), k1.index(slot))
            if piece == 0:
                for part in gl.static_range(2):
                    mbarrier.wait(q_empty.index(part), item_phase)
                    mbarrier.expect(q_full.index(part), _QUERIES * 192 * 2)
                    at_q = row + part * _QUERIES
                    copy_tile(q_nope, [at_q, head * 192], q_full.index(part), q0.index(part))
                    copy_tile(q_rope, [at_q, head * 192 + 128], q_full.index(part), q1.index(part))
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), _KEYS * 128 * 2)
            copy_tile(projected, [at, head * 256 + 128], v_full.index(slot), v.index(slot))
            step += 1
        item = next_item(taken, items)
        mbarrier.wait(i_empty, item_phase)
        tell(item, following, 1)
        mbarrier.arrive(i_full, count=1)
        item_phase ^= 1


@gluon.jit
def angles_of(cos, sin, row, size, STEP: gl.constexpr, WARPS: gl.constexpr):
    """Return cos and sin [64, 32] of ``size`` queries; a query is ``STEP`` rows after the one before it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    i = gl.expand_dims(gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, LAYOUT)), 1)
    at = (row + i * STEP) * 32 + gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(cos + at, mask=i < size, other=1.0), gl.load(sin + at, mask=i < size, other=0.0)


@gluon.jit
def rotate(queries, cos, sin, WARPS: gl.constexpr):
    """Rotate queries [64, 64] in shared memory."""
    # Reference: rope
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    even, odd = gl.split(gl.reshape(queries.load(LAYOUT).to(gl.float32), (_QUERIES, 32, 2)))
    cos = gl.convert_layout(cos, even.type.layout, assert_trivial=True)
    sin = gl.convert_layout(sin, even.type.layout, assert_trivial=True)
    rotated = gl.reshape(gl.join(even * cos - odd * sin, odd * cos + even * sin), (_QUERIES, 64))
    queries.store(gl.convert_layout(rotated.to(gl.bfloat16), LAYOUT))
    fence_async_shared()


@gluon.jit
def _selected(logits, words):
    """Return logits [64, 128] with -inf where the bits of ``words`` [64, 4] are not set."""
    LAYOUT: gl.constexpr = logits.type.layout
    by_word = gl.reshape(logits, (_QUERIES, 4, 32))
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, by_word.type.layout)))
    chosen = (gl.expand_dims(words, 2) & (1 << gl.expand_dims(gl.expand_dims(bit, 0), 1))) != 0
    by_word = gl.where(chosen, by_word, float("-inf"))
    return gl.convert_layout(gl.reshape(by_word, (_QUERIES, _KEYS)), LAYOUT, assert_trivial=True)


@gluon.jit
def _attend(
    given, results, scale, buffers, barriers, PART: gl.constexpr, H: gl.constexpr, SELECTED: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Consumer warps: compute half ``PART`` of the queries of every item."""
    blocks, used, cos, sin, bits, words = given
    num_blocks = gl.load(used)
    items = num_blocks * H
    q0, q1, k0, k1, v, following = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, i_full, i_empty = barriers
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])  # of logits, and of results
    i = gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, LAYOUT))
    key = gl.expand_dims(gl.arange(0, _KEYS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    none = gl.zeros((_QUERIES, _KEYS), gl.float32, LAYOUT)
    WORDS: gl.constexpr = gl.SliceLayout(2, gl.reshape(none, (_QUERIES, 4, 32)).type.layout)
    q0, q1 = q0.index(PART), q1.index(PART)
    step = 0
    item_phase = 0
    item = gl.program_id(0)
    while item < items:
        head = item // num_blocks
        row, size, position, first, count, _place, goes_on, complete = _block_of(blocks, num_blocks, item)
        pieces = gl.cdiv(gl.minimum(count, position + size - first), _KEYS)
        # Of this half; positions count from the sequence's first row in the round.
        row, size = row.to(gl.int64) + PART * _QUERIES, gl.minimum(size - PART * _QUERIES, _QUERIES)
        position += PART * _QUERIES - first
        last = gl.expand_dims(gl.minimum(position + i, count - 1), 1)
        unmasked = gl.minimum(position + 1, count) // _KEYS
        own = gl.where(size > 0, gl.cdiv(gl.maximum(gl.minimum(position + size, count), 0), _KEYS), 0)
        acc, peak, total = _sums_so_far(results, (row + i) * H + head, i < size, goes_on, LAYOUT)
        if TURNS:
            c, s = angles_of(cos, sin, row, size, 1, 4)
        mbarrier.wait(q_full.index(PART), item_phase)
        if TURNS:
            rotate(q1, c, s, 4)
        for piece in range(own):
            slot, phase = step % _STAGES, step // _STAGES & 1
            if SELECTED:
                line = row + gl.minimum(gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, WORDS)), size - 1)
                at = gl.expand_dims(line * (words * 4), 1) + gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS)), 0)
                chosen = gl.load(bits + at + (first // _KEYS + piece) * 4)
            mbarrier.wait(k_full.index(slot), phase)
            logits = warpgroup_mma(q0, k0.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
            logits = warpgroup_mma(q1, k1.index(slot).permute((1, 0)), logits, is_async=True)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            if SELECTED:
                logits = _selected(logits, chosen)
            elif piece >= unmasked:
                logits = gl.where(piece * _KEYS + key <= last, logits, float("-inf"))
            # Reference: attend, and merged; exponentials of two instead of e.
            new_peak = gl.maximum(peak, gl.max(logits, 1) * scale)
            shrink = gl.exp2(peak - new_peak)
            weights = gl.exp2(logits * scale - gl.expand_dims(new_peak, 1))
            total = total * shrink + gl.sum(weights, 1)
            peak = new_peak
            acc *= gl.expand_dims(shrink, 1)
            weights = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, LAYOUT, 2))
            mbarrier.wait(v_full.index(slot), phase)
            acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(weights, v.index(slot), acc, is_async=True),))
            mbarrier.arrive(v_empty.index(slot), count=1)
            step += 1
        mbarrier.arrive(q_empty.index(PART), count=1)
        for _piece in range(own, pieces):  # of the other half alone
            slot, phase = step % _STAGES, step // _STAGES & 1
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.arrive(k_empty.index(slot), count=1)
            mbarrier.wait(v_full.index(slot), phase)
            mbarrier.arrive(v_empty.index(slot), count=1)
            step += 1
        _store(results, acc, peak, total, row, size, head, complete, H)
        mbarrier.wait(i_full, item_phase)
        item = told(following)
        mbarrier.arrive(i_empty, count=1)
        item_phase ^= 1


@gluon.jit
def _sums_so_far(results, at, here, goes_on, LAYOUT: gl.constexpr):
    """Return sums [64, 128], peaks and totals [64] over the previous rounds' rows."""
    _out, parts, stats = results
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if goes_on > 0:
        value = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT)), 0)
        acc = gl.load(parts + gl.expand_dims(at * 128, 1) + value, mask=gl.expand_dims(here, 1), other=0.0)
        peak = gl.load(stats + at * 2, mask=here, other=LOW)
        total = gl.load(stats + at * 2 + 1, mask=here, other=0.0)
    else:
        acc = gl.zeros((_QUERIES, 128), gl.float32, LAYOUT)
        peak = gl.full((_QUERIES,), LOW, gl.float32, ROW)
        total = gl.zeros((_QUERIES,), gl.float32, ROW)
    return acc, peak, total


@gluon.jit
def _store(results, acc, peak, total, row, size, head, complete, H: gl.constexpr):
    """Store the results of queries that have seen all rows, or the sums so far."""
    out, parts, stats = results
    if complete > 0:
        result = acc / gl.expand_dims(gl.where(total > 0.0, total, 1.0), 1)
        result = gl.convert_layout(result.to(gl.bfloat16), STORED)
        query = gl.expand_dims(gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, STORED)), 1)
        value = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, STORED)), 0)
        gl.store(out + ((row + query) * H + head) * 128 + value, result, mask=query < size)
    else:
        i = gl.arange(0, _QUERIES, layout=peak.type.layout)
        at = (row + i) * H + head
        channel = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, acc.type.layout)), 0)
        gl.store(parts + gl.expand_dims(at * 128, 1) + channel, acc, mask=gl.expand_dims(i < size, 1))
        gl.store(stats + at * 2, peak, mask=i < size)
        gl.store(stats + at * 2 + 1, total, mask=i < size)


@gluon.jit(do_not_specialize=["words"])
def _round_kernel(
    q_nope, q_rope, projected, rows, cos, sin, blocks, used, bits, out, parts, stats, taken, words, scale,
    H: gl.constexpr, LATENT: gl.constexpr, SELECTED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    q0 = gl.allocate_shared_memory(gl.bfloat16, [2, _QUERIES, 128], _OPERAND)
    q1 = gl.allocate_shared_memory(gl.bfloat16, [2, _QUERIES, 64], _OPERAND)
    k0 = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _KEYS, 128], _OPERAND)
    k1 = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _KEYS, 64], _OPERAND)
    v = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _KEYS, 128], _OPERAND)
    following = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    i_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(i_full, count=1)
    mbarrier.init(i_empty, count=2)  # both groups of consumers
    for part in gl.static_range(2):
        mbarrier.init(q_full.index(part), count=1)
        mbarrier.init(q_empty.index(part), count=1)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    buffers = (q0, q1, k0, k1, v, following)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, i_full, i_empty)
    given = (blocks, used, cos, sin, bits, words)
    results = (out, parts, stats)
    descriptors = (q_nope, q_rope, projected, rows)
    gl.warp_specialize(
        [
            (_attend, (given, results, scale, buffers, barriers, 0, H, SELECTED, TURNS)),
            (_attend, (given, results, scale, buffers, barriers, 1, H, SELECTED, TURNS)),
            (_load, (descriptors, blocks, used, taken, buffers, barriers, H, LATENT)),
        ],
        [4, 1],  # warps and registers of the second and third function
        [240, 24],
    )


def takes_round(given: LatentAttentionInputs) -> bool:
    """Return whether this kernel supports the chip and the sizes, and an eager step is large enough for its number of prompts."""
    q_THC, sizes = given.q_THC, (given.nope, given.rope, given.up_HCL.shape[1] - given.nope)
    known = q_THC.dtype == torch.bfloat16 and sizes == (_NOPE, _ROPE, _VALUE) and capability_of(q_THC.device) == HOPPER
    aligned = describable(q_THC) and given.up_HCL.shape[2] % 8 == 0  # rows begin at multiples of 16 bytes
    large = given.captured or len(q_THC) >= max(_LEAST_TOKENS, _LEAST_MEAN * len(given.projected))
    return known and aligned and large


def attend_round(
    given: LatentAttentionInputs, projected_RC: Tensor, rows_RC: Tensor, blocks: tuple[Tensor, Tensor],
    bits_TW: Tensor, results: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Attend to the rows of one round, for what ``takes_round``.

    Args:
        given: Inputs of all rounds.
        projected_RC: Keys and values of the rows.
        rows_RC: The rows.
        blocks: ``Round.blocks``, of 128 queries, and ``Round.used``.
        bits_TW: ``selection_bits``; not read without a selection.
        results: Results [T, H, V]; and sums [T, H, V], peaks and totals [T, H, 2] of sequences that continue in the next round.
    """
    q_THC, (heads, _, latent) = given.q_THC, given.up_HCL.shape
    q_TC = q_THC.as_strided((len(q_THC), heads * (_NOPE + _ROPE)), (q_THC.stride(0), 1))
    operand = _OPERAND.value
    _round_kernel[(min(len(blocks[0]) * heads, multiprocessors_of(q_THC.device)),)](
        described(q_TC, (_QUERIES.value, _NOPE), operand), described(q_TC, (_QUERIES.value, _ROPE), operand),
        described(projected_RC, (KEYS, _VALUE), operand), described(rows_RC, (KEYS, _ROPE), operand),
        *given.angles(), *blocks, bits_TW, *results, counters_of(q_THC.device), bits_TW.stride(0) // 4,
        given.scale * LOG2_E, H=heads, LATENT=latent, SELECTED=given.selected_TK is not None, TURNS=given.cos is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
