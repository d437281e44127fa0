"""Kernel of ``hc_enter`` for few tokens: leaving, projecting and collapse in one launch, as further launches would cost more.

    project     one token x 32 or 64 channels, in float32 without tensor cores: writes the streams, and sends their sums
    mix         one token: waits for its sums, writes its ``post`` and ``comb``
    collapse    one token x 512 channels: leaves for them, too, waits for the sums, and writes the next sub-layer's input

Consumers poll the value itself: memory holds 0 where nothing has been written, and 0 is sent as -0. So no program waits until a
write is confirmed, and none sends a flag. Streams would need a flag, and are computed twice instead. Once all consumers have read
a number, its place is cleared for the next kernel.

Programs that project wait for no other. Those that mix and collapse do, the latter also for the others of their token, which
exchange sums of squares. ``suits_decode_small`` admits a launch only if all that wait leave room on the chip for one that projects,
so it ends in whatever order its programs start.

Sums differ in their last bits from those of ``prefill_triton.py``, and with how many channels a program projects.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4lite.kernels.counters import counters_of
from dsv4lite.kernels.dispatch import ceil_div, on_gpu, power_of_2
from dsv4lite.kernels.e4m3 import native_e4m3, to_bf16
from dsv4lite.kernels.experts import ExpertSum
from dsv4lite.kernels.hc import COLLAPSED_CHANNELS, KERNEL_STREAMS, HcEntered, HcInputs
from dsv4lite.kernels.hc.prefill_triton import (
    PARTS_OF_SUM,
    Results,
    load4,
    normalise,
    normed,
    store4,
    store_fp8,
    weigh,
    weighted_sum,
    write_mix,
)
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.quantize import FP8_GROUP

_WARPS = 4
# Channels of a token that one program projects: of more tokens more, or not all programs would run at once.
_FEWEST_TOKENS, _UNIT, _WIDER_UNIT = 4, 32, 64
_RECORD = 32  # numbers that a program sends: those of the rows, and the sum of squares four times, so that they are read in pairs
_MINUS_ZERO = tl.constexpr(-(1 << 31))  # bits of it


@triton.jit
def _written(
    y, chosen, shared, token, column, inside, WIDTH: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, GPU: tl.constexpr
):  # fmt: skip
    """Return what a sub-layer has put out, float32 [UNIT]: ``y``, or the sum of its ``TOP_K`` experts and the shared one."""
    if TOP_K:
        # Reference: sum_experts; what was never written is read, too, so that no read waits for ``chosen``, and not used.
        total = tl.zeros(column.shape, tl.float32)
        for k in tl.static_range(TOP_K):
            pair = token * TOP_K + k
            found = tl.load(chosen + pair) < EXPERTS
            total += tl.where(found, tl.load(y + pair * WIDTH + column, mask=inside, other=0.0).to(tl.float32), 0.0)
        total += tl.load(shared + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        w = to_bf16(total, GPU).to(tl.float32)
    else:
        w = tl.load(y + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    return w


@triton.jit
def _left(
    streams, pending, token, column, inside,
    WIDTH: tl.constexpr, LEAVE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Return some channels of a token's streams, bfloat16, once a sub-layer's output is written into them."""
    x0, x1, x2, x3 = load4(streams + token * (4 * WIDTH) + column, WIDTH, inside)
    if LEAVE:
        y, chosen, shared, post, comb = pending
        # Reference: baddbmm(mix.post[..., None] * y_TD.float()[:, None], mix.comb.transpose(1, 2), streams_TND.float())
        f0, f1, f2, f3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        w = _written(y, chosen, shared, token, column, inside, WIDTH, TOP_K, EXPERTS, GPU)
        p0, p1, p2, p3 = load4(post + token * 4, 1, True)
        c00, c01, c02, c03 = load4(comb + token * 16, 1, True)
        c10, c11, c12, c13 = load4(comb + token * 16 + 4, 1, True)
        c20, c21, c22, c23 = load4(comb + token * 16 + 8, 1, True)
        c30, c31, c32, c33 = load4(comb + token * 16 + 12, 1, True)
        x0, x1, x2, x3 = (
            to_bf16(weigh(f0, f1, f2, f3, c00, c10, c20, c30, p0 * w), GPU),
            to_bf16(weigh(f0, f1, f2, f3, c01, c11, c21, c31, p1 * w), GPU),
            to_bf16(weigh(f0, f1, f2, f3, c02, c12, c22, c32, p2 * w), GPU),
            to_bf16(weigh(f0, f1, f2, f3, c03, c13, c23, c33, p3 * w), GPU),
        )
    return x0, x1, x2, x3


@triton.jit
def _sent(x):
    """Return the bits of a number that is on its way: those of 0 say that nothing has come."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits == 0, _MINUS_ZERO, bits)


@triton.jit
def _look(p, wanted, UNITS: tl.constexpr, RECORD: tl.constexpr):
    """Return the sums of ``UNITS`` numbers each, as far as these have come, and how many have not."""
    missing = tl.zeros(p.shape, tl.int32)
    total = tl.zeros(p.shape, tl.float32)
    for unit in tl.static_range(UNITS):
        bits = tl.load(p + unit * RECORD, mask=wanted, other=_MINUS_ZERO, volatile=True)
        missing += (bits == 0).to(tl.int32)
        # Reference: sums.sum(0)
        total += bits.to(tl.float32, bitcast=True)
    return total, tl.sum(tl.sum(tl.sum(missing, axis=2), axis=1), axis=0)


@triton.jit
def _awaited(p, wanted, UNITS: tl.constexpr, RECORD: tl.constexpr):
    """Return the sums of ``UNITS`` numbers each, float32 [1, 32, 8], when all have come.

    They are no fewer than threads: two that looked at the same number might see it come at different times.
    """
    total, missing = _look(p, wanted, UNITS, RECORD)
    while missing > 0:
        total, missing = _look(p, wanted, UNITS, RECORD)
    tl.debug_barrier()  # all threads have read
    return total


@triton.jit
def _clear(p, wanted, UNITS: tl.constexpr, RECORD: tl.constexpr):
    for unit in tl.static_range(UNITS):
        tl.store(p + unit * RECORD, tl.zeros(p.shape, tl.int32), mask=wanted)  # as the next kernel finds it


@triton.jit
def _project(
    program, streams, pending, fn, out, inbox, WIDTH: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
    RECORD: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr, LEAVE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    GPU: tl.constexpr,
):  # fmt: skip
    """Leave for one of a token's ``UNITS`` units of channels, and send their sums."""
    token = (program // UNITS).to(tl.int64)
    column = program % UNITS * UNIT + tl.arange(0, UNIT)
    inside = column < WIDTH
    row = tl.arange(0, RECORD)
    wanted = (row < ROWS)[:, None] & inside[None, :]
    w0, w1, w2, w3 = load4(fn + row[:, None] * (4 * WIDTH) + column[None, :], WIDTH, wanted)
    x0, x1, x2, x3 = _left(streams, pending, token, column, inside, WIDTH, LEAVE, TOP_K, EXPERTS, GPU)
    # Reference: z = streams_TND.flatten(1).float(); matmul_rows(z, fn), z.square().sum(-1)
    f0, f1, f2, f3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    zeros = tl.zeros((RECORD, UNIT), tl.float32)
    product = weigh(f0[None, :], f1[None, :], f2[None, :], f3[None, :], w0, w1, w2, w3, zeros)
    squares = weigh(f0, f1, f2, f3, f0, f1, f2, f3, tl.zeros((UNIT,), tl.float32))
    numbers = tl.where(row < ROWS, tl.sum(product, 1), tl.sum(squares, 0))
    # For one who waits rows 4 to 23 and the sum of squares twice, for the other rows 0 to 3 and the same.
    place = tl.where(row < 4, row + ROWS + 2, tl.where(row < ROWS + 2, row, row + 4))
    read = (row < ROWS + 4) & ((row < 4) | (row >= (ROWS + 2 if HEAD else 4)))
    let_successor_in()
    tl.store(inbox + program.to(tl.int64) * RECORD + place, _sent(numbers), mask=read)
    if LEAVE:
        store4(out + token * (4 * WIDTH) + column, WIDTH, x0, x1, x2, x3, inside)


@triton.jit
def _mix(
    token, tokens, base, scale, inbox, post, comb, eps, norm_eps, WIDTH: tl.constexpr, PARTS: tl.constexpr, UNITS: tl.constexpr,
    RECORD: tl.constexpr, ROWS: tl.constexpr, ITERS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Wait for a token's sums, and write its ``post`` and ``comb``."""
    row = tl.arange(0, RECORD)
    bias = tl.load(base + row, mask=row < ROWS, other=0.0)
    post_scale, comb_scale = tl.load(scale + 1), tl.load(scale + 2)
    part = (token * PARTS + tl.arange(0, PARTS)) * (UNITS * RECORD)
    p = inbox + part[None, None, :] + row[None, :, None]
    wanted = tl.broadcast_to(((row >= 4) & (row < ROWS + 2))[None, :, None], p.shape)
    total = _awaited(p, wanted, UNITS, RECORD)
    let_successor_in()
    _clear(p, wanted, UNITS, RECORD)
    m = normalise(total, norm_eps, WIDTH, ROWS)
    write_mix(m, bias, post_scale, comb_scale, post, comb, tokens, eps, token, ROWS, 1, ITERS, NATIVE)


@triton.jit
def _whole_sum(part, notes, share, SHARES: tl.constexpr, RECORD: tl.constexpr, PARTS: tl.constexpr):
    """Return the sum of what every share of a token has found; they wait for each other."""
    peer = tl.arange(0, RECORD)[None, :, None] * PARTS + tl.arange(0, PARTS)[None, None, :]
    there = peer < SHARES
    tl.store(notes + peer * SHARES + share, tl.broadcast_to(_sent(part), peer.shape), mask=there)
    p = notes + share * SHARES + peer
    total = _awaited(p, there, 1, 0)
    _clear(p, there, 1, 0)
    return tl.sum(total)


@triton.jit
def _collapse(
    program, tokens, streams, pending, base, scale, normweight, inbox, x, codes, scales, eps, norm_eps,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, UNITS: tl.constexpr, SHARES: tl.constexpr, GROUPS: tl.constexpr,
    RECORD: tl.constexpr, ROWS: tl.constexpr, LEAVE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Leave for a share of a token's channels, too, wait for its sums, and write the next sub-layer's input."""
    token, share = (program // SHARES).to(tl.int64), program % SHARES
    group = share * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    weight = tl.load(normweight + column, mask=inside, other=0.0)
    row = tl.arange(0, RECORD)
    bias = tl.load(base + row, mask=row < 4, other=0.0)
    pre_scale = tl.load(scale)
    x0, x1, x2, x3 = _left(streams, pending, token, column, inside, WIDTH, LEAVE, TOP_K, EXPERTS, GPU)
    part = (token * PARTS + tl.arange(0, PARTS)) * (UNITS * RECORD)
    p = inbox + part[None, None, :] + (row + ROWS + 2)[None, :, None]
    wanted = tl.broadcast_to((row < 6)[None, :, None], p.shape)
    m = normalise(_awaited(p, wanted, UNITS, RECORD), norm_eps, WIDTH, 4)
    v = weighted_sum(x0, x1, x2, x3, m, bias, pre_scale, eps, NATIVE).to(tl.float32)
    squares = tl.sum(v * v)
    if SHARES > 1:
        notes = inbox + tokens.to(tl.int64) * (PARTS * UNITS * RECORD) + token * (SHARES * SHARES)
        squares = _whole_sum(squares, notes, share, SHARES, RECORD, PARTS)
    let_successor_in()
    if share == 0:
        _clear(p, wanted, UNITS, RECORD)  # all have read
    rounded = normed(v, squares, weight, norm_eps, WIDTH, NATIVE)
    tl.store(x + token * WIDTH + column, rounded, mask=inside)
    if FP8:
        store_fp8(rounded.to(tl.float32), codes + token * WIDTH, scales, token, column, group, WIDTH, NATIVE)


@triton.jit(do_not_specialize=["tokens"])
def _enter_kernel(
    streams, y, chosen, shared, post, comb, fn, base, scale, normweight, inbox,
    out, x, codes, scales, new_post, new_comb, tokens, eps, norm_eps,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, UNITS: tl.constexpr, SHARES: tl.constexpr,
    GROUPS: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr, ITERS: tl.constexpr, LEAVE: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    program = tl.program_id(0)
    pending = (y, chosen, shared, post, comb)
    projecting = PARTS * UNITS * tokens
    mixing = 0 if HEAD else tokens
    if program < projecting:
        _project(
            program, streams, pending, fn, out, inbox, WIDTH, UNIT, PARTS * UNITS, RECORD, ROWS, HEAD, LEAVE, TOP_K, EXPERTS, GPU
        )  # fmt: skip
    elif program < projecting + mixing:
        _mix(
            (program - projecting).to(tl.int64), tokens, base, scale, inbox, new_post, new_comb, eps, norm_eps,
            WIDTH, PARTS, UNITS, RECORD, ROWS, ITERS, NATIVE,
        )  # fmt: skip
    else:
        _collapse(
            program - projecting - mixing, tokens, streams, pending, base, scale, normweight, inbox, x, codes, scales,
            eps, norm_eps, WIDTH, PARTS, UNITS, SHARES, GROUPS, RECORD, ROWS, LEAVE, TOP_K, EXPERTS, FP8, NATIVE, GPU,
        )  # fmt: skip


def enter_triton(given: HcInputs) -> HcEntered:
    """See ``hc.hc_enter``; for what ``suits_decode_small``."""
    streams_TND, pending, (fn, base, scale), norm_weight, settings, quantize, _ = given
    (tokens, streams, width), device, head = streams_TND.shape, streams_TND.device, given.is_head
    assert norm_weight is not None
    assert streams == KERNEL_STREAMS and streams_TND.dtype == torch.bfloat16 and streams_TND.is_contiguous(), streams_TND.shape
    assert len(fn) == (4 if head else 24) and fn.shape[1] == streams * width and fn.is_contiguous() and norm_weight.is_contiguous()
    assert fn.dtype == base.dtype == scale.dtype == norm_weight.dtype == torch.float32 and norm_weight.shape == (width,)
    output, (post, comb) = pending or (streams_TND, (streams_TND,) * 2)
    y, chosen, shared, top_k, experts = streams_TND, streams_TND, streams_TND, 0, 0
    if isinstance(output, ExpertSum):
        assert output.shared_TD is not None, "this rank has a part of the sum"
        chosen, y, shared, experts = output.slots_TK, output.outputs_TKD, output.shared_TD, output.experts
        top_k = chosen.shape[1]
        assert y.shape == (tokens, top_k, width) and chosen.is_contiguous() and shared.is_contiguous(), y.shape
    elif pending is not None:
        y = output
    assert y.dtype == shared.dtype == torch.bfloat16 and y.is_contiguous() and post.is_contiguous() and comb.is_contiguous()
    inbox, sizes = counters_of(device), sizes_of(tokens, width, gpu=on_gpu(device))
    assert 0 < tokens * room_of(sizes) <= len(inbox), (tokens, width)
    out = streams_TND if pending is None else torch.empty_like(streams_TND)
    results = Results.allocate(given)
    _enter_kernel[(tokens * (PARTS_OF_SUM * sizes["UNITS"] + sizes["SHARES"]) + len(results.post),)](
        streams_TND, y, chosen, shared, post, comb, fn, base, scale, norm_weight, inbox,
        out, *results, tokens, settings.eps, settings.norm_eps,
        ROWS=len(fn), HEAD=head, ITERS=settings.iters, LEAVE=pending is not None, TOP_K=top_k, EXPERTS=experts, FP8=quantize,
        NATIVE=native_e4m3(streams_TND), GPU=on_gpu(device), **sizes, num_warps=_WARPS, enable_fp_fusion=False,
        launch_pdl=dependent_launch(device),
    )  # fmt: skip
    return results.entered(out, given)


def sizes_of(tokens: int, width: int, *, gpu: bool) -> dict[str, int]:
    """Return how the work on a token is shared.

    The interpreter runs one program after the other: there one program collapses a token, and waits for no other of its kind.
    """
    groups = ceil_div(width, FP8_GROUP)
    each = COLLAPSED_CHANNELS // FP8_GROUP if gpu else power_of_2(groups)
    unit = _UNIT if tokens <= _FEWEST_TOKENS else _WIDER_UNIT
    return {
        "WIDTH": width,
        "UNIT": unit,
        "PARTS": PARTS_OF_SUM,
        "UNITS": ceil_div(width, unit * PARTS_OF_SUM),
        "SHARES": ceil_div(groups, each),
        "GROUPS": each,
        "RECORD": _RECORD,
    }


def room_of(sizes: dict[str, int]) -> int:
    """Return how many numbers programs send each other for a token."""
    return PARTS_OF_SUM * sizes["UNITS"] * _RECORD + sizes["SHARES"] ** 2
