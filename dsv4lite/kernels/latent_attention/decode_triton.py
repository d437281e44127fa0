"""The absorbed form: attention over latent rows, and the merge of KV splits.

One program takes one token x a block of heads x one of ``splits`` KV splits. Rows are cut into pieces of fixed size; split s takes
pieces s, s + splits, … A piece is read once, for both products and all heads of the block: the latents of its rows are keys and
values. Codes of FP8 rows are widened to bfloat16 in registers. The next piece is loaded while one is processed, so that programs on
the same multiprocessor do not all wait for memory at the same time.

Neighbouring tokens of a prompt read mostly the same rows. If a step has many tokens for its FP8 rows, a first launch copies all of
them, widened to bfloat16, from pages to where their positions say; where the order of sums is fixed, no bit changes.

``decode_hopper_triton`` and ``decode_fp8_hopper_triton`` have kernels for Hopper and the sizes of released models.

A float32 product is three TF32 products; the tensor cores truncate their sums, which costs a few of float32's last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.attention.merge_triton import LOW, softmax_step
from dsv4lite.kernels.attention.triton import Tile
from dsv4lite.kernels.dispatch import LARGE_SHARED_MEMORY, capability_of, ceil_div, compiled, power_of_2
from dsv4lite.kernels.e4m3 import e4m3_values
from dsv4lite.kernels.latent_attention import LatentAttentionInputs
from dsv4lite.kernels.latent_attention.decode_fp8_hopper_triton import FEW_PIECE_ROWS, attend_few_heads, takes_few_heads
from dsv4lite.kernels.latent_attention.decode_hopper_triton import PIECE_ROWS, attend_absorbed_hopper, takes_absorbed
from dsv4lite.kernels.latent_rows.triton import _row_elements
from dsv4lite.kernels.rows.packed import LOG2_E, WIDEN_E4M3, narrowed
from dsv4lite.kernels.rows.triton import memory_of, rotate_tail

_CHUNK = 8  # splits that are merged at a time
_WIDENED = tl.constexpr(32)  # rows of one program of ``_widen_kernel``


def _tile_for(itemsize: int, capability: int) -> Tile:
    """Return the tile; it depends on the chip and the bytes of a number of the queries alone.

    There is one stage more than pieces that fit into shared memory. With two stages the load of a piece starts when the previous
    piece has been processed; with three, one load is always in flight.
    """
    large = capability in LARGE_SHARED_MEMORY
    if itemsize == 4:
        return Tile(heads=16, rows=32 if large else 16, num_warps=4, num_stages=2 if large else 1)
    if not large:
        return Tile(heads=16, rows=32 if capability == 80 else 16, num_warps=4, num_stages=2)
    return Tile(heads=16, rows=32, num_warps=4, num_stages=3)  # two programs fit on a multiprocessor


@triton.jit
def _widened(codes, scales):
    """Return e4m3 codes [R, C] times the powers of two of their groups, the bits of float32 [R, C / 128]; bfloat16 on a GPU."""
    # Reference: Fp8Latent.unpack.  Exponent and mantissa, shifted to bit 4 of a bfloat16, are 2^-120 times the value.
    grouped = tl.reshape(codes, (codes.shape[0], codes.shape[1] // 128, 128))
    if compiled():  # not pure, or the compiler would widen them again for the second product
        factor = (scales >> 16).to(tl.int16)[:, :, None]
        wide = tl.inline_asm_elementwise(WIDEN_E4M3, "=r,=r,r,r,r", [grouped, factor], dtype=tl.bfloat16, is_pure=False, pack=4)
    else:
        wide = e4m3_values(grouped) * scales.to(tl.float32, bitcast=True)[:, :, None]
    return tl.reshape(wide, codes.shape)


@triton.jit
def _locate(
    piece, count, listed, memory, selected, grow, TOP_K: tl.constexpr, ROW: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    """Return pointers to a piece's rows, and which of them exist."""
    # Reference: entry_addresses
    at = piece * ROWS + tl.arange(0, ROWS)
    live = at < count
    if TOP_K > 0:
        chosen = at < tl.where(listed, count, 0)
        at = tl.where(chosen, tl.load(selected + at, mask=chosen, other=0), at)
    if WIDENED:
        return memory + at.to(tl.int64) * ROW, live
    if TOP_K == 0 and PLACES % ROWS == 0:
        first = piece * ROWS
        page = tl.load(grow + first // PLACES, mask=first < count, other=0).to(tl.int64)
    else:
        page = tl.load(grow + at // PLACES, mask=live, other=0).to(tl.int64)
    return memory + (page * PLACES + at % PLACES) * ROW, live


@triton.jit
def _fetch(
    data, live, LATENT: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, TAIL: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """Return the latents of a piece's rows, their scales if FP8, and the rotated channels."""
    column = tl.arange(0, PADDED)[None, :]
    pair = tl.arange(0, TAIL)[None, :]
    inside = live[:, None] if LATENT == PADDED else live[:, None] & (column < LATENT)
    turned = live[:, None] if ROPE == TAIL else live[:, None] & (pair < ROPE)
    if FP8:
        latents = tl.load(data[:, None] + column, mask=inside, other=0)
        group = tl.arange(0, PADDED // 128)[None, :]
        scales = (data + LATENT).to(tl.pointer_type(tl.int32))[:, None] + group
        scales = tl.load(scales, mask=live[:, None] & (group < LATENT // 128), other=0)
        tails = tl.load((data + LATENT + LATENT // 32).to(tl.pointer_type(tl.bfloat16))[:, None] + pair, mask=turned, other=0.0)
    else:
        latents = tl.load(data[:, None] + column, mask=inside, other=0.0)
        scales = 0
        tails = tl.load(data[:, None] + LATENT + pair, mask=turned, other=0.0)
    return latents, scales, tails


@triton.jit(do_not_specialize=["columns", "begin"])
def _absorbed_kernel(
    query, q, cos, sin, memory, selected, positions, sequences, grow, out, stats, q_row, columns, scale, begin,
    H: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, TAIL: tl.constexpr,
    ROW: tl.constexpr, PLACES: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, FP8: tl.constexpr, WIDENED: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    FLOAT32: tl.constexpr = query.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = "tf32x3" if FLOAT32 else "tf32"
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    of_step = begin + token
    count = tl.load(positions + of_step) + 1
    listed = count > TOP_K
    if TOP_K > 0:
        count = tl.minimum(count, TOP_K)
    pieces = (count + ROWS - 1) // ROWS
    if SPLITS > 1:  # noqa: SIM102  decided when compiled; the other when run
        if split >= pieces:
            return
    sequence = tl.load(sequences + of_step).to(tl.int64)
    if WIDENED:
        memory += sequence * columns * (PLACES * ROW)
    else:
        grow += sequence * columns
    selected += of_step * TOP_K
    at = token * H + head[:, None]
    inside = (head < H)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    pair = tl.arange(0, TAIL)[None, :]
    valued = inside & (column < LATENT)
    q0 = tl.load(query + at * LATENT + column, mask=valued, other=0.0)
    q1 = tl.load(q + of_step * q_row + head[:, None] * (NOPE + ROPE) + NOPE + pair, mask=inside & (pair < ROPE), other=0.0)
    if TURNS:
        # Reference: rope
        angle = of_step * (ROPE // 2)
        q1 = rotate_tail(q1.to(tl.float32), cos + angle, sin + angle, HEADS, ROPE, TAIL, ROPE, FLOAT32).to(q1.dtype)
    if not compiled():
        q0, q1 = q0.to(tl.float32), q1.to(tl.float32)
    acc = tl.zeros((HEADS, PADDED), tl.float32)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for piece in tl.range(split, pieces, SPLITS, num_stages=STAGES):
        data, live = _locate(piece, count, listed, memory, selected, grow, TOP_K, ROW, PLACES, ROWS, WIDENED)
        latents, scales, k1 = _fetch(data, live, LATENT, PADDED, ROPE, TAIL, FP8)
        k0 = _widened(latents, scales) if FP8 else latents
        if FLOAT32 or not compiled():
            k0, k1 = k0.to(tl.float32), k1.to(tl.float32)
        rows = count - piece * ROWS
        logits = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        logits = tl.dot(q1, tl.trans(k1), logits, input_precision=PRECISION)
        logits = tl.where((tl.arange(0, ROWS) < rows)[None, :], logits * scale, float("-inf"))
        p, shrink, peak, total = softmax_step(logits, peak, total, 1)
        acc = tl.dot(narrowed(p, FLOAT32), k0, acc * shrink[:, None], input_precision=PRECISION)

    if SPLITS > 1:
        place = split * (tl.num_programs(0) // BLOCKS).to(tl.int64) * H
        tl.store(out + (place + at) * LATENT + column, acc, mask=valued)
        stat = stats + (place + token * H + head) * 2
        tl.store(stat, peak, mask=head < H)
        tl.store(stat + 1, total, mask=head < H)
    else:
        o = narrowed(acc / tl.where(total > 0.0, total, 1.0)[:, None], FLOAT32)  # padding has no rows: zeros
        tl.store(out + at * LATENT + column, o.to(out.dtype.element_ty), mask=valued)


@triton.jit(do_not_specialize=["begin"])
def _merge_kernel(
    parts, stats, positions, out, begin,
    H: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    FLOAT32: tl.constexpr = out.dtype.element_ty == tl.float32
    at = tl.program_id(0).to(tl.int64)  # token and head
    stride = tl.num_programs(0).to(tl.int64)
    count = tl.load(positions + begin + at // H) + 1
    if TOP_K > 0:
        count = tl.minimum(count, TOP_K)
    used = tl.minimum((count + ROWS - 1) // ROWS, SPLITS)
    column = tl.arange(0, PADDED)[None, :]
    every = tl.arange(0, SPLITS)
    stat = stats + (every * stride + at) * 2
    peaks = tl.load(stat, mask=every < used, other=LOW)
    totals = tl.load(stat + 1, mask=every < used, other=0.0)
    peak = tl.max(peaks)
    total = tl.sum(totals * tl.exp2(peaks - peak))
    acc = tl.zeros((PADDED,), tl.float32)
    for chunk in tl.range(0, used, CHUNK, num_stages=1):
        number = chunk + tl.arange(0, CHUNK)
        place = number * stride + at
        weight = tl.exp2(tl.load(stats + place * 2, mask=number < used, other=float("-inf")) - peak)
        part = tl.load(parts + place[:, None] * LATENT + column, mask=(number < used)[:, None] & (column < LATENT), other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    o = narrowed(acc / tl.where(total > 0.0, total, 1.0), FLOAT32)[None, :]
    tl.store(out + at * LATENT + column, o.to(out.dtype.element_ty), mask=column < LATENT)


@triton.jit(do_not_specialize=["columns", "row_stride"])
def _widen_kernel(
    memory, grow, firsts, lens, out, columns, row_stride, LATENT: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr,
    TAIL: tl.constexpr, ROW: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = PLACES // _WIDENED
    page = tl.program_id(0) // PARTS
    sequence, column = page // columns, page % columns
    place = tl.program_id(0) % PARTS * _WIDENED + tl.arange(0, _WIDENED)
    live = column * PLACES + place < tl.load(firsts + sequence) + tl.load(lens + sequence)
    source = tl.load(grow + sequence * row_stride + column).to(tl.int64)
    latents, scales, tails = _fetch(memory + (source * PLACES + place) * ROW, live, LATENT, PADDED, ROPE, TAIL, True)
    wide = _widened(latents, scales).to(tl.bfloat16)
    out += (page.to(tl.int64) * PLACES + place)[:, None] * (LATENT + ROPE)
    latent, pair = tl.arange(0, PADDED)[None, :], tl.arange(0, TAIL)[None, :]
    tl.store(out + latent, wide, mask=live[:, None] & (latent < LATENT))
    tl.store(out + LATENT + pair, tails, mask=live[:, None] & (pair < ROPE))


def widened_rows(given: LatentAttentionInputs) -> Tensor:
    """Return all rows that the tokens may see, which are FP8, as bfloat16 [S, N, L + R] by sequence and position.

    Rows past a sequence's end are undefined.
    """
    (sequences, columns), paging, rows, device = given.paging.grow_SP.shape, given.paging, given.rows, given.q_THC.device
    places, latent, memory = rows.rows_per_page, given.up_HCL.shape[2], memory_of(rows)
    row, fp8 = _row_elements(rows.format, memory, places)
    assert fp8 and places % _WIDENED.value == 0 and paging.grow_SP.stride(1) == 1
    wide_SNR = torch.empty(sequences, columns * places, latent + given.rope, dtype=torch.bfloat16, device=device)
    _widen_kernel[(sequences * columns * places // _WIDENED.value,)](
        memory, paging.grow_SP, paging.first_S, paging.lens_S, wide_SNR, columns, paging.grow_SP.stride(0),
        LATENT=latent, PADDED=max(16, power_of_2(latent)), ROPE=given.rope, TAIL=max(16, power_of_2(given.rope)), ROW=row,
        PLACES=places, num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return wide_SNR


def attend_absorbed(given: LatentAttentionInputs, query_THL: Tensor, begin: int = 0, wide_SNR: Tensor | None = None) -> Tensor:
    """Return the weighted sums of latents [N, H, L]; zeros for padding.

    Args:
        given: The step.
        query_THL: Latent queries [N, H, L] of the step's tokens from ``begin`` on.
        begin: First token.
        wide_SNR: The result of ``widened_rows``, if the rows are read from it.
    """
    (tokens, heads, latent), rows, paging, q = query_THL.shape, given.rows, given.paging, given.q_THC
    memory, splits, device = memory_of(rows), paging.splits, q.device
    row, fp8 = _row_elements(rows.format, memory, rows.rows_per_page)
    columns = paging.grow_SP.stride(0)
    if wide_SNR is not None:
        memory, row, fp8, columns = wide_SNR, wide_SNR.shape[2], False, paging.grow_SP.shape[1]
    assert q.stride()[1:] == (q.shape[2], 1) and query_THL.is_contiguous(), q.stride()
    assert fp8 or memory.dtype == q.dtype, (q.dtype, memory.dtype)
    assert given.selected_TK is None or given.selected_TK.is_contiguous()
    top_k = 0 if given.selected_TK is None else given.selected_TK.shape[1]
    hopper, tile = takes_absorbed(given), _tile_for(q.element_size(), capability_of(device))
    few_heads = wide_SNR is None and takes_few_heads(given)
    layer = {
        "H": heads, "LATENT": latent, "PADDED": max(16, power_of_2(latent)), "TOP_K": top_k, "SPLITS": splits,
        "ROWS": FEW_PIECE_ROWS if few_heads else PIECE_ROWS if hopper else tile.rows,
    }  # fmt: skip
    out = torch.empty_like(query_THL)
    parts = stats = out
    if splits > 1:
        parts = torch.empty(splits, tokens, heads, latent, dtype=torch.float32, device=device)
        stats = torch.empty(splits, tokens, heads, 2, dtype=torch.float32, device=device)
    selected = paging.positions_T if given.selected_TK is None else given.selected_TK
    if few_heads:
        attend_few_heads(given, query_THL, begin, (memory, row), (parts, stats))
    elif hopper:
        attend_absorbed_hopper(
            given, query_THL, begin, (memory, row, fp8), columns, selected, (parts, stats), widened=wide_SNR is not None
        )
    else:
        # A row's address depends on its page number, which may depend on its position: each of these loads needs as many stages as
        # the row.
        stages = 1 + (tile.num_stages - 1) * (1 + (top_k > 0) + (wide_SNR is None))
        tables = (paging.positions_T, paging.sequence_T, paging.grow_SP)
        _absorbed_kernel[(tokens * ceil_div(heads, tile.heads), splits)](
            query_THL, q, *given.angles(), memory, selected, *tables, parts, stats, q.stride(0), columns,
            given.scale * LOG2_E, begin,
            **layer, NOPE=given.nope, ROPE=given.rope, TAIL=max(16, power_of_2(given.rope)), ROW=row,
            PLACES=rows.rows_per_page, HEADS=tile.heads, STAGES=stages, FP8=fp8,
            WIDENED=wide_SNR is not None, TURNS=given.cos is not None,
            num_warps=tile.num_warps, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    if splits > 1:
        _merge_kernel[(tokens * heads,)](
            parts, stats, paging.positions_T, out, begin, **layer, CHUNK=min(_CHUNK, splits),
            num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out
