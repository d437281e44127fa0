"""Kernels of the indexer on packed or unquantized pages.

    scores      a few tokens of one sequence x pieces of keys: a piece is widened once and stays in shared memory for all tokens;
                or one token, whose query stays there, x pieces of keys, which are loaded ahead
    select      one token whose scores fit into one program's registers: bisection for the threshold, then one cumulative sum
    segment     one segment of a token's scores if there are more: histograms of each byte of the scores' ordered bits, a pass for
                each byte, give the threshold and the number of entries selected in earlier segments; a last pass selects

Kernels skip tokens that see at most ``top_k`` entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import capability_of, ceil_div, compiled, power_of_2
from dsv4lite.kernels.e4m3 import e8m0
from dsv4lite.kernels.gemm.triton import e4m3_to_bf16
from dsv4lite.kernels.indexer import IndexInputs
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows import Fp4Key, Fp8Key, UnquantizedRow
from dsv4lite.kernels.rows.triton import bf16, e2m1_values, memory_of, opaque

KEYS, FEW_KEYS = 128, 64  # keys of a piece; see ``_piece_keys``
TOKENS = 32  # most tokens that share a piece
PROGRAMS, SINGLE_PROGRAMS = 4096, 528  # number of programs that the scores kernel aims at; if tokens do not share pieces
SEGMENT = tl.constexpr(4096)  # scores of one program if a token has too many for ``select``
MOST, MOST_OF_FEW = 32768, 16384  # most scores of a token in one program of ``select``; in steps of few tokens
FEW = 128  # tokens; for so few, programs that share a token's scores are faster than one
ALIGNED = tl.constexpr(4)  # rows of scores begin at multiples of so many, which threads load at once

# Widens the low and the high nibbles of bytes 0 and 1, then of bytes 2 and 3. Every byte has its own scale: if the product reads k
# from registers, the four bytes of a thread belong to several keys.
_WIDEN = tl.constexpr("""{
.reg .b32 t, s, m, f, z;
mov.b32 f, 0x7E807E80; mov.b32 z, 0x80008000;
prmt.b32 t, $4, 0, 0x4140;
shl.b32 s, t, 12; shl.b32 m, t, 6; and.b32 m, m, 0x01C001C0; lop3.b32 s, s, 0x80008000, m, 0xEA;
fma.rn.bf16x2 s, s, f, z; fma.rn.bf16x2 $0, s, $5, z;
shl.b32 s, t, 8; shl.b32 m, t, 2; and.b32 m, m, 0x01C001C0; lop3.b32 s, s, 0x80008000, m, 0xEA;
fma.rn.bf16x2 s, s, f, z; fma.rn.bf16x2 $2, s, $5, z;
prmt.b32 t, $4, 0, 0x4342;
shl.b32 s, t, 12; shl.b32 m, t, 6; and.b32 m, m, 0x01C001C0; lop3.b32 s, s, 0x80008000, m, 0xEA;
fma.rn.bf16x2 s, s, f, z; fma.rn.bf16x2 $1, s, $6, z;
shl.b32 s, t, 8; shl.b32 m, t, 2; and.b32 m, m, 0x01C001C0; lop3.b32 s, s, 0x80008000, m, 0xEA;
fma.rn.bf16x2 s, s, f, z; fma.rn.bf16x2 $3, s, $6, z;
}""")
# 1 if the first number is less than the second, for numbers of 16 and of 32 bits. A comparison in Triton takes longer.
_LESS_16 = tl.constexpr("{ .reg .b32 t; sub.u32 t, $1, $2; shr.u32 $0, t, 31; }")
_LESS_32 = tl.constexpr("{ .reg .pred p; setp.lt.u32 p, $1, $2; selp.u32 $0, 1, 0, p; }")


@triton.jit
def _page(pages, piece, count, PAGE_ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return the page of a piece, or of each of its keys if it can have several."""
    if PAGE_ROWS % KEYS == 0:
        page = tl.load(pages + piece * KEYS // PAGE_ROWS, mask=piece * KEYS < count, other=0)
    else:
        entry = piece * KEYS + tl.arange(0, KEYS)
        page = tl.load(pages + entry // PAGE_ROWS, mask=entry < count, other=0)
    return page


@triton.jit
def _keys(
    keys, page, piece, count,
    PAGE_BYTES: tl.constexpr, PAGE_ROWS: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr,
    KEYS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Return a piece of keys [KEYS, C] (float32 in the interpreter), FP8 keys without their scales, and these scales [KEYS].

    Entries from ``count`` on are zeros.
    """
    entry = piece * KEYS + tl.arange(0, KEYS)
    live = entry < count
    page = page.to(tl.int64)
    place = entry % PAGE_ROWS
    base = keys + page * PAGE_BYTES
    scale = 0.0
    if FP8:
        # Reference: Fp8Key.unpack
        data = base + place * CHANNELS
        codes = tl.load(data[:, None] + tl.arange(0, CHANNELS)[None, :], mask=live[:, None], other=0)
        scale = tl.load((base + PAGE_ROWS * CHANNELS).to(tl.pointer_type(tl.float32)) + place, mask=live, other=0.0)
        k = e4m3_to_bf16(codes)
    elif GROUPS == 0:
        # Reference: UnquantizedRow.unpack
        row = keys + (page * PAGE_ROWS + place) * CHANNELS
        channel = tl.arange(0, PADDED)
        k = tl.load(row[:, None] + channel[None, :], mask=live[:, None] & (channel < CHANNELS)[None, :], other=0.0)
    else:
        # Reference: Fp4Key.unpack
        DATA: tl.constexpr = GROUPS * 16
        data = tl.multiple_of(base + place * DATA, 16)
        group = tl.arange(0, GROUPS)
        at = data[:, None, None] + group[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        codes = tl.load(at, mask=live[:, None, None], other=0)
        WORD: tl.constexpr = tl.int8 if GROUPS == 1 else tl.int16 if GROUPS == 2 else tl.int32 if GROUPS == 4 else tl.int64
        words = tl.load((base + PAGE_ROWS * DATA).to(tl.pointer_type(WORD)) + place, mask=live, other=0)
        byte = (words[:, None] >> (group * 8)[None, :]).to(tl.int32) & 255
        # Exponent and mantissa of a nibble, moved to where bfloat16 has them, are 2^-126 times its value.
        if compiled():
            bits = tl.where(byte == 0, 0x0040, tl.where(byte == 255, 0x7FC0, byte << 7))
            factor = bits.to(tl.int16)[:, :, None]
            low, high = tl.inline_asm_elementwise(
                _WIDEN, "=r,=r,=r,=r,r,r,r", [codes, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            factor = e8m0(byte)[:, :, None]
            low = e2m1_values(codes.to(tl.int32) & 15) * factor
            high = e2m1_values(codes.to(tl.int32) >> 4) * factor
        # Triton 3.6 cannot compile a product with a reshaped operand for compute capability 10.0, unless it is a copy.
        k = opaque(tl.reshape(tl.join(low, high), (KEYS, GROUPS * 32)))
    return k if compiled() else k.to(tl.float32), scale


@triton.jit
def _query(
    iq, weights, row, weight_stride, weight_scale,
    H: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return a token's queries [PADDED, HEADS] and the weights of its heads, float32."""
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, PADDED)
    inside = (head < H)[:, None]
    if CHANNELS < PADDED:
        inside = inside & (channel < CHANNELS)[None, :]
    q = tl.load(iq + (row * H + head[:, None]) * CHANNELS + channel[None, :], mask=inside, other=0.0)
    if not compiled():
        q = q.to(tl.float32)
    # Reference: weights_NH.to(iq_NHC.dtype) * weight_scale
    weight = tl.load(weights + row * weight_stride + head, mask=head < H, other=0.0).to(tl.float32)
    if FLOAT32:
        weight = weight * weight_scale
    else:
        weight = bf16(bf16(weight) * weight_scale)
    return tl.trans(q), weight


@triton.jit
def _positive(x):
    """Return numbers rounded to bfloat16, 0 for negative ones, as float32."""
    if compiled():
        asm: tl.constexpr = "cvt.rn.relu.bf16x2.f32 $0, $2, $1;"
        x = tl.inline_asm_elementwise(asm, "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2).to(tl.float32)
    else:
        x = tl.maximum(bf16(x), 0.0)
    return x


@triton.jit
def _store_scores(scores, k, scale, q, weight, visible, piece, KEYS: tl.constexpr, FP8: tl.constexpr):
    """Store a token's scores of a piece of keys, those of the entries that it sees."""
    # Reference: _weigh(dots, weights, dtype)
    dots = tl.dot(k, q, input_precision="tf32x3")
    if scores.dtype.element_ty == tl.float32:
        score = tl.sum(tl.maximum(dots, 0.0) * weight[None, :], 1)
    else:
        positive = _positive(dots)
        score = bf16(tl.sum(bf16(positive * weight[None, :]), 1))
    score = score * scale if FP8 else score  # a key's scale multiplies its score
    at = piece * KEYS + tl.arange(0, KEYS)
    tl.store(scores + at, score.to(scores.dtype.element_ty), mask=at < visible)


@triton.jit(do_not_specialize=["grow_columns", "weight_stride", "begin", "count", "columns"])
def _scores_kernel(
    iq,
    weights,
    keys,
    positions,
    sequences,
    first_rows,
    lens,
    grow,
    scores,
    grow_columns,
    weight_stride,
    begin,
    count,
    columns,
    weight_scale,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
):
    wait_for_predecessor()
    FLOAT32: tl.constexpr = scores.dtype.element_ty == tl.float32
    step = tl.num_programs(1)
    n = tl.program_id(0) * TOKENS
    stop = tl.minimum(n + TOKENS, count)
    while n < stop:
        # Tokens n to end are of one sequence; padding is skipped one token at a time.
        position = tl.load(positions + begin + n)
        sequence = tl.load(sequences + begin + n).to(tl.int64)
        ends = tl.load(first_rows + sequence) + tl.load(lens + sequence) - begin
        end = tl.minimum(stop, tl.where(position < 0, n + 1, ends))
        most = (position + end - n) // RATIO
        pieces = tl.where(most > TOP_K, (most + KEYS - 1) // KEYS, 0)
        pages = grow + sequence * grow_columns
        row = n + tl.zeros((), tl.int64)
        if TOKENS == 1:
            q, weight = _query(iq, weights, row, weight_stride, weight_scale, H, HEADS, CHANNELS, PADDED, FLOAT32)
            ahead = _page(pages, tl.program_id(1), most, PAGE_ROWS, KEYS)
            for piece in tl.range(tl.program_id(1), pieces, step, num_stages=STAGES):
                page = ahead
                ahead = _page(pages, piece + step, most, PAGE_ROWS, KEYS)
                k, scale = _keys(keys, page, piece, most, PAGE_BYTES, PAGE_ROWS, GROUPS, CHANNELS, PADDED, KEYS, FP8)
                _store_scores(scores + row * columns, k, scale, q, weight, most, piece, KEYS, FP8)
        else:
            for piece in range(tl.program_id(1), pieces, step):
                page = _page(pages, piece, most, PAGE_ROWS, KEYS)
                k, scale = _keys(keys, page, piece, most, PAGE_BYTES, PAGE_ROWS, GROUPS, CHANNELS, PADDED, KEYS, FP8)
                # Index of the first token that needs scores and sees an entry of the piece.
                needs = n + RATIO * (tl.maximum(TOP_K, piece * KEYS) + 1) - 1 - position
                for token in tl.range(tl.maximum(n, needs), end, num_stages=STAGES):
                    row = token + tl.zeros((), tl.int64)
                    q, weight = _query(iq, weights, row, weight_stride, weight_scale, H, HEADS, CHANNELS, PADDED, FLOAT32)
                    visible = (position + token - n + 1) // RATIO
                    _store_scores(scores + row * columns, k, scale, q, weight, visible, piece, KEYS, FP8)
        n = end


@triton.jit
def _ordered(scores, at, visible):
    """Return unsigned integers in the order of the scores, of 16 bits or, if these are float32, of 32; 0 for invisible entries.

    No score has the integer 0, which would be a NaN's.
    """
    # Reference: scores.masked_fill(hidden, -inf); -0 equals 0
    BITS: tl.constexpr = scores.dtype.element_ty.primitive_bitwidth
    SIGN: tl.constexpr = 1 << (BITS - 1)
    ALL: tl.constexpr = 2 * SIGN - 1
    KIND: tl.constexpr = tl.uint32 if BITS == 32 else tl.uint16
    readable = (visible + ALIGNED - 1) // ALIGNED * ALIGNED
    bits = tl.load(scores + at, mask=at < readable, other=0.0).to(KIND, bitcast=True).to(tl.uint32)
    bits = tl.where(bits == SIGN, 0, bits)
    return tl.where(at < visible, bits ^ tl.where(bits >= SIGN, ALL, SIGN).to(tl.uint32), 0)


@triton.jit
def _gather(selected, at, number, threshold, above, equal, wanted):
    """Store entries ``at`` above the threshold and the first ``wanted`` equal to it; ``above`` and ``equal`` count those before."""
    # Reference: order = scores.sort(descending=True, stable=True).indices[:, :top_k]; order.sort()
    more = (number > threshold).to(tl.uint32)
    same = (number == threshold).to(tl.uint32)
    both = tl.cumsum(more + (same << 16), 0)
    equals = equal + (both >> 16).to(tl.int32)
    take = (more != 0) | ((same != 0) & (equals <= wanted))
    place = above + (both & 0xFFFF).to(tl.int32) + tl.minimum(equals, wanted) - 1
    tl.store(selected + place, at, mask=take)


@triton.jit(do_not_specialize=["begin", "columns"])
def _select_kernel(
    scores, positions, selected, begin, columns, TOP_K: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    wait_for_predecessor()
    let_successor_in()
    n = tl.program_id(0).to(tl.int64)
    visible = (tl.load(positions + begin + n) + 1) // RATIO
    if visible <= TOP_K:
        return
    at = tl.arange(0, BLOCK)
    number = _ordered(scores + n * (columns // ALIGNED * ALIGNED), at, visible)
    # The largest integer that TOP_K scores reach, bit by bit.
    BITS: tl.constexpr = scores.dtype.element_ty.primitive_bitwidth
    threshold = tl.zeros((), tl.uint32)
    for i in range(BITS):
        higher = threshold | (tl.full((), 1, tl.uint32) << (BITS - 1 - i))
        if compiled():
            asm: tl.constexpr = _LESS_16 if BITS == 16 else _LESS_32
            less = tl.inline_asm_elementwise(asm, "=r,r,r", [number, higher], dtype=tl.uint32, is_pure=True, pack=1)
        else:
            less = (number < higher).to(tl.uint32)
        threshold = tl.where(BLOCK - tl.sum(less).to(tl.int32) >= TOP_K, higher, threshold)
    wanted = TOP_K - tl.sum((number > threshold).to(tl.int32))
    _gather(selected + n * TOP_K, at, number, threshold, 0, 0, wanted)


@triton.jit
def _threshold_bin(count, wanted):
    """Return the highest bin that, together with all higher bins, counts ``wanted``; and the count of the higher bins."""
    bins = tl.arange(0, 256)
    from_here = tl.sum(count) - tl.cumsum(count, 0) + count
    found = tl.max(tl.where(from_here >= wanted, bins, 0))
    return found, tl.sum(tl.where(bins > found, count, 0))


@triton.jit
def _histogram_sums(counts, used, segment, SEGMENTS: tl.constexpr):
    """Return the sum of the histograms [used, 256], and the sum of those before ``segment``."""
    each = tl.arange(0, SEGMENTS)[:, None]
    count = tl.load(counts + each * 256 + tl.arange(0, 256)[None, :], mask=each < used, other=0)
    return tl.sum(count, 0), tl.sum(tl.where(each < segment, count, 0), 0)


@triton.jit(do_not_specialize=["begin", "columns"])
def _segment_kernel(
    scores, positions, counts, selected, begin, columns, TOP_K: tl.constexpr, RATIO: tl.constexpr, SEGMENTS: tl.constexpr,
    PASS: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = scores.dtype.element_ty.primitive_bitwidth // 8
    n = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    visible = (tl.load(positions + begin + n) + 1) // RATIO
    used = (visible + SEGMENT - 1) // SEGMENT
    if (visible <= TOP_K) | (segment >= used):
        return
    at = segment * SEGMENT + tl.arange(0, SEGMENT)
    number = _ordered(scores + n * (columns // ALIGNED * ALIGNED), at, visible)
    row = n * tl.num_programs(1)
    stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * 256  # of a pass
    bins = tl.arange(0, 256)
    threshold, wanted, more, equal = tl.zeros((), tl.uint32), TOP_K, 0, 0
    for i in tl.static_range(PASS):
        total, before = _histogram_sums(counts + i * stride + row * 256, used, segment, SEGMENTS)
        found, above = _threshold_bin(total, wanted)
        threshold = threshold | (found.to(tl.uint32) << (8 * (BYTES - 1 - i)))
        wanted -= above
        more += tl.sum(tl.where(bins > found, before, 0))
        equal = tl.sum(tl.where(bins == found, before, 0))
    if PASS < BYTES:
        # If the bytes so far equal the threshold's, this is the next byte; otherwise it is at least 256.
        byte = (number ^ threshold) >> (8 * (BYTES - 1 - PASS))
        count = tl.histogram(byte.to(tl.int32), 256, mask=(at < visible) & (byte < 256))
        tl.store(counts + PASS * stride + (row + segment) * 256 + bins, count)
    else:
        _gather(selected + n * TOP_K, at, number, threshold, more, equal, wanted)


def _piece_keys(given: IndexInputs) -> int:
    """Return the number of keys of a piece: few with float32 queries, or if tokens do not share pieces.

    On compute capability 10 the tensor cores spread the heads of 64 keys otherwise than those of 128, so their sum would have
    another order, and a token's scores would depend on whether it shares pieces.
    """
    if given.iq_THC.dtype == torch.float32:
        return FEW_KEYS
    return FEW_KEYS if given.paging.singles and capability_of(given.iq_THC.device) // 10 != 10 else KEYS


def index_scores_paged_triton(given: IndexInputs, begin: int, end: int) -> Tensor:
    """See ``indexer.index_scores_paged``."""
    iq_NHC, weights_NH, keys, paging = given.iq_THC[begin:end], given.weights_TH[begin:end], given.keys, given.paging
    (count, heads, channels), fmt, entries_max, top_k = iq_NHC.shape, keys.format, given.entries_max, given.top_k
    assert iq_NHC.is_contiguous() and weights_NH.shape == (count, heads) and weights_NH.stride(1) == 1
    columns = ceil_div(entries_max, ALIGNED.value) * ALIGNED.value
    scores = torch.empty(count, columns, dtype=given.dtype, device=iq_NHC.device)[:, :entries_max]
    if count == 0 or entries_max <= top_k:
        return scores
    assert given.has_kernel and fmt.width == channels, (fmt, channels, iq_NHC.dtype)
    assert isinstance(fmt, UnquantizedRow) or channels & (channels - 1) == 0, fmt
    tokens = 1 if paging.singles else TOKENS
    tiles, piece = ceil_div(count, tokens), _piece_keys(given)
    programs, stages = SINGLE_PROGRAMS if paging.singles else PROGRAMS, 1 if iq_NHC.dtype == torch.float32 else 3
    pieces = min(ceil_div(entries_max, piece), max(1, programs // tiles))
    _scores_kernel[(tiles, pieces)](
        iq_NHC,
        weights_NH,
        memory_of(keys),
        paging.positions_T,
        paging.sequence_T,
        paging.rows_S,
        paging.lens_S,
        paging.grow_SP,
        scores,
        paging.grow_SP.stride(0),
        weights_NH.stride(0),
        begin,
        count,
        columns,
        given.weight_scale,
        H=heads,
        HEADS=max(16, power_of_2(heads)),
        GROUPS=fmt.scale_bytes if isinstance(fmt, Fp4Key) else 0,
        CHANNELS=channels,
        PADDED=max(16, power_of_2(channels)),
        RATIO=given.ratio,
        TOP_K=top_k,
        PAGE_BYTES=keys.memory.shape[1],
        PAGE_ROWS=keys.rows_per_page,
        KEYS=piece,
        TOKENS=tokens,
        STAGES=stages,
        FP8=isinstance(fmt, Fp8Key),
        num_warps=4,
        num_stages=stages,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(iq_NHC.device),
    )
    return scores


def select_paged_triton(scores_NE: Tensor, paging: Paging, ratio: int, begin: int, out: Tensor) -> Tensor:
    """See ``indexer.select_paged``."""
    (count, columns), top_k = scores_NE.shape, out.shape[1]
    assert scores_NE.stride(1) == 1 and scores_NE.stride(0) % ALIGNED.value == 0, scores_NE.stride()
    assert out.is_contiguous() and out.shape[0] == count and out.dtype == torch.int32
    if count == 0 or columns <= top_k:
        return out
    inputs = (scores_NE, paging.positions_T)
    options = {"TOP_K": top_k, "RATIO": ratio, "num_stages": 1, "enable_fp_fusion": True}
    if columns <= (MOST if count > FEW else MOST_OF_FEW):
        block = max(1024, power_of_2(columns))  # few sizes, so that few kernels are compiled
        options |= {"num_warps": max(min(4, block // 512), block // 2048), "launch_pdl": dependent_launch(out.device)}
        _select_kernel[(count,)](*inputs, out, begin, scores_NE.stride(0), **options, BLOCK=block)
        return out
    segments, passes = ceil_div(columns, SEGMENT.value), scores_NE.element_size()
    options |= {"SEGMENTS": power_of_2(segments), "num_warps": 8}
    counts = torch.empty(passes, count, segments, 256, dtype=torch.int32, device=out.device)
    for number in range(passes + 1):
        _segment_kernel[(count, segments)](*inputs, counts, out, begin, scores_NE.stride(0), **options, PASS=number)
    return out
