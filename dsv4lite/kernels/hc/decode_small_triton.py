"""Kernel of ``hc_enter`` for few tokens: one launch, because a second launch would take longer than the work.

    project     one token x 32 or 64 channels, in float32 without tensor cores: writes the streams and sends partial sums
    mix         one token: waits for its sums, writes its ``post`` and ``comb``
    collapse    one token x 512 channels: computes these channels of the streams again, waits for the token's sums, and writes the
                next sub-layer's input

Programs exchange sums through ``counters_of``. Consumers poll the value itself: 0 marks "not written yet", and a sum of 0 is sent
as -0. So no program sends a flag or waits until its write is visible. Streams would need a flag, and are computed twice instead.
Once all consumers have read a number, one of them sets it to 0 for the next kernel.

Programs that project wait for no other program. Those that mix or collapse wait for them; those that collapse also wait for each
other within a token, to add their sums of squares. ``suits_decode_small`` accepts a step only if all waiting programs together
leave room on the GPU for one that projects, so the launch ends in whatever order its programs start.

Sums differ in their last bits from those of ``prefill_triton.py``, and between the two numbers of channels per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4lite.kernels.counters import counters_of
from dsv4lite.kernels.dispatch import ceil_div, on_gpu, power_of_2
from dsv4lite.kernels.e4m3 import to_bf16
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
# Channels that one program projects: ``_UNIT`` up to ``_NARROW_TOKENS`` tokens, else more, so that all programs run at once.
_NARROW_TOKENS, _UNIT, _WIDER_UNIT = 4, 32, 64
_PARTS = tl.constexpr(PARTS_OF_SUM)
# Words of one program's sums: one for each row of fn, and four copies of the sum of squares, so that reads are paired.
_RECORD = tl.constexpr(32)
_MINUS_ZERO = tl.constexpr(-(1 << 31))  # bits of -0.0


@triton.jit
def _expanded(streams, pending, token, column, inside, WIDTH: tl.constexpr, EXPAND: tl.constexpr):
    """Return some channels of a token's streams, bfloat16, including the pending output of a sub-layer if EXPAND."""
    x0, x1, x2, x3 = load4(streams + token * (4 * WIDTH) + column, WIDTH, inside)
    if EXPAND:
        y, post, comb = pending
        # Reference: baddbmm(mix.post[..., None] * y_TD.float()[:, None], mix.comb.transpose(1, 2), streams_TND.float())
        f0, f1, f2, f3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        w = tl.load(y + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        p0, p1, p2, p3 = load4(post + token * 4, 1, True)
        c00, c01, c02, c03 = load4(comb + token * 16, 1, True)
        c10, c11, c12, c13 = load4(comb + token * 16 + 4, 1, True)
        c20, c21, c22, c23 = load4(comb + token * 16 + 8, 1, True)
        c30, c31, c32, c33 = load4(comb + token * 16 + 12, 1, True)
        x0, x1, x2, x3 = (
            to_bf16(weigh(f0, f1, f2, f3, c00, c10, c20, c30, p0 * w)),
            to_bf16(weigh(f0, f1, f2, f3, c01, c11, c21, c31, p1 * w)),
            to_bf16(weigh(f0, f1, f2, f3, c02, c12, c22, c32, p2 * w)),
            to_bf16(weigh(f0, f1, f2, f3, c03, c13, c23, c33, p3 * w)),
        )
    return x0, x1, x2, x3


@triton.jit
def _message_bits(x):
    """Return a number's bits as they are sent: -0.0 instead of +0.0, because 0 marks a word that is not written yet."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits == 0, _MINUS_ZERO, bits)


@triton.jit
def _poll_once(p, wanted, UNITS: tl.constexpr):
    """Return the sums of ``UNITS`` numbers each, and how many of these are not written yet."""
    missing = tl.zeros(p.shape, tl.int32)
    total = tl.zeros(p.shape, tl.float32)
    for unit in tl.static_range(UNITS):
        bits = tl.load(p + unit * _RECORD, mask=wanted, other=_MINUS_ZERO, volatile=True)
        missing += (bits == 0).to(tl.int32)
        # Reference: sums.sum(0)
        total += bits.to(tl.float32, bitcast=True)
    return total, tl.sum(tl.sum(tl.sum(missing, axis=2), axis=1), axis=0)


@triton.jit
def _poll(p, wanted, UNITS: tl.constexpr):
    """Wait until all numbers are written; return the sums of ``UNITS`` numbers each, float32 [1, 32, 8].

    There are at least as many sums as threads: two threads that read the same number could see it written at different times.
    """
    total, missing = tl.zeros(p.shape, tl.float32), 1
    while missing > 0:
        total, missing = _poll_once(p, wanted, UNITS)
    tl.debug_barrier()  # all threads have read
    return total


@triton.jit
def _clear(p, wanted, UNITS: tl.constexpr):
    for unit in tl.range(UNITS):  # not unrolled: many stores make Triton's compilation slow
        tl.store(p + unit * _RECORD, tl.zeros(p.shape, tl.int32), mask=wanted)  # for the next kernel


@triton.jit
def _project(
    program, streams, pending, fn, out, exchange, WIDTH: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
    ROWS: tl.constexpr, HEAD: tl.constexpr, EXPAND: tl.constexpr,
):  # fmt: skip
    """Compute the streams of one of a token's ``UNITS`` units of channels, write them if EXPAND, and send their sums."""
    token = (program // UNITS).to(tl.int64)
    column = program % UNITS * UNIT + tl.arange(0, UNIT)
    inside = column < WIDTH
    row = tl.arange(0, _RECORD)
    wanted = (row < ROWS)[:, None] & inside[None, :]
    w0, w1, w2, w3 = load4(fn + row[:, None] * (4 * WIDTH) + column[None, :], WIDTH, wanted)
    x0, x1, x2, x3 = _expanded(streams, pending, token, column, inside, WIDTH, EXPAND)
    # Reference: z = streams_TND.flatten(1).float(); matmul_rows(z, fn), z.square().sum(-1)
    f0, f1, f2, f3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    zeros = tl.zeros((_RECORD, UNIT), tl.float32)
    product = weigh(f0[None, :], f1[None, :], f2[None, :], f3[None, :], w0, w1, w2, w3, zeros)
    squares = weigh(f0, f1, f2, f3, f0, f1, f2, f3, tl.zeros((UNIT,), tl.float32))
    numbers = tl.where(row < ROWS, tl.sum(product, 1), tl.sum(squares, 0))
    # For ``_mix`` rows 4 to 23 and the sum of squares twice; for ``_collapse`` rows 0 to 3 and the sum of squares twice.
    place = tl.where(row < 4, row + ROWS + 2, tl.where(row < ROWS + 2, row, row + 4))
    read = (row < ROWS + 4) & ((row < 4) | (row >= (ROWS + 2 if HEAD else 4)))
    let_successor_in()
    tl.store(exchange + program.to(tl.int64) * _RECORD + place, _message_bits(numbers), mask=read)
    if EXPAND:
        store4(out + token * (4 * WIDTH) + column, WIDTH, x0, x1, x2, x3, inside)


@triton.jit
def _mix(
    token, tokens, base, scale, exchange, post, comb, eps, norm_eps, WIDTH: tl.constexpr, UNITS: tl.constexpr,
    ROWS: tl.constexpr, ITERS: tl.constexpr,
):  # fmt: skip
    """Wait for a token's sums, and write its ``post`` and ``comb``."""
    row = tl.arange(0, _RECORD)
    bias = tl.load(base + row, mask=row < ROWS, other=0.0)
    post_scale, comb_scale = tl.load(scale + 1), tl.load(scale + 2)
    part = (token * _PARTS + tl.arange(0, _PARTS)) * (UNITS * _RECORD)
    p = exchange + part[None, None, :] + row[None, :, None]
    wanted = tl.broadcast_to(((row >= 4) & (row < ROWS + 2))[None, :, None], p.shape)
    total = _poll(p, wanted, UNITS)
    let_successor_in()
    _clear(p, wanted, UNITS)
    m = normalise(total, norm_eps, WIDTH, ROWS)
    write_mix(m, bias, post_scale, comb_scale, post, comb, tokens, eps, token, ROWS, 1, ITERS)


@triton.jit
def _sum_over_chunks(part, squares_at, chunk, CHUNKS: tl.constexpr):
    """Send ``part`` to all programs of the token, wait for theirs, and return the sum of all."""
    peer = tl.arange(0, _RECORD)[None, :, None] * _PARTS + tl.arange(0, _PARTS)[None, None, :]
    there = peer < CHUNKS
    tl.store(squares_at + peer * CHUNKS + chunk, tl.broadcast_to(_message_bits(part), peer.shape), mask=there)
    p = squares_at + chunk * CHUNKS + peer
    total = _poll(p, there, 1)
    _clear(p, there, 1)
    return tl.sum(total)


@triton.jit
def _collapse(
    program, tokens, streams, pending, base, scale, normweight, exchange, x, codes, scales, eps, norm_eps,
    WIDTH: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    EXPAND: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Compute the streams of one chunk of a token's channels, wait for the token's sums, write the next sub-layer's input."""
    token, chunk = (program // CHUNKS).to(tl.int64), program % CHUNKS
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < WIDTH
    weight = tl.load(normweight + column, mask=inside, other=0.0)
    row = tl.arange(0, _RECORD)
    bias = tl.load(base + row, mask=row < 4, other=0.0)
    pre_scale = tl.load(scale)
    x0, x1, x2, x3 = _expanded(streams, pending, token, column, inside, WIDTH, EXPAND)
    part = (token * _PARTS + tl.arange(0, _PARTS)) * (UNITS * _RECORD)
    p = exchange + part[None, None, :] + (row + ROWS + 2)[None, :, None]
    wanted = tl.broadcast_to((row < 6)[None, :, None], p.shape)
    m = normalise(_poll(p, wanted, UNITS), norm_eps, WIDTH, 4)
    v = weighted_sum(x0, x1, x2, x3, m, bias, pre_scale, eps).to(tl.float32)
    squares = tl.sum(v * v)
    if CHUNKS > 1:
        squares_at = exchange + tokens.to(tl.int64) * (_PARTS * UNITS * _RECORD) + token * (CHUNKS * CHUNKS)
        squares = _sum_over_chunks(squares, squares_at, chunk, CHUNKS)
    let_successor_in()
    if chunk == 0:
        _clear(p, wanted, UNITS)  # all programs of the token have read it
    rounded = normed(v, squares, weight, norm_eps, WIDTH)
    tl.store(x + token * WIDTH + column, rounded, mask=inside)
    if FP8:
        store_fp8(rounded.to(tl.float32), codes + token * WIDTH, scales, token, column, group, WIDTH)


@triton.jit(do_not_specialize=["tokens"])
def _enter_kernel(
    streams, y, post, comb, fn, base, scale, normweight, exchange,
    out, x, codes, scales, new_post, new_comb, tokens, eps, norm_eps,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, HEAD: tl.constexpr, ITERS: tl.constexpr, EXPAND: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    program = tl.program_id(0)
    pending = (y, post, comb)
    projecting = _PARTS * UNITS * tokens
    mixing = 0 if HEAD else tokens
    if program < projecting:
        _project(
            program, streams, pending, fn, out, exchange, WIDTH, UNIT, _PARTS * UNITS, ROWS, HEAD, EXPAND,
        )  # fmt: skip
    elif program < projecting + mixing:
        _mix(
            (program - projecting).to(tl.int64), tokens, base, scale, exchange, new_post, new_comb, eps, norm_eps,
            WIDTH, UNITS, ROWS, ITERS,
        )  # fmt: skip
    else:
        _collapse(
            program - projecting - mixing, tokens, streams, pending, base, scale, normweight, exchange, x, codes, scales,
            eps, norm_eps, WIDTH, UNITS, CHUNKS, GROUPS, ROWS, EXPAND, FP8,
        )  # fmt: skip


def enter_triton(given: HcInputs) -> HcEntered:
    """Launch ``hc.hc_enter`` for streams that ``suits_decode_small`` accepts."""
    streams_TND, pending, (fn, base, scale), norm_weight, settings, quantize, _ = given
    (tokens, streams, width), device, head = streams_TND.shape, streams_TND.device, given.is_head
    assert norm_weight is not None
    assert streams == KERNEL_STREAMS and streams_TND.dtype == torch.bfloat16 and streams_TND.is_contiguous(), streams_TND.shape
    assert len(fn) == (4 if head else 24) and fn.shape[1] == streams * width and fn.is_contiguous() and norm_weight.is_contiguous()
    assert fn.dtype == base.dtype == scale.dtype == norm_weight.dtype == torch.float32 and norm_weight.shape == (width,)
    y, (post, comb) = pending or (streams_TND, (streams_TND,) * 2)
    assert y.dtype == torch.bfloat16 and y.is_contiguous() and post.is_contiguous() and comb.is_contiguous()
    exchange, sizes = counters_of(device), launch_sizes(tokens, width, gpu=on_gpu(device))
    assert 0 < tokens * exchange_words(sizes) <= len(exchange), (tokens, width)
    out = streams_TND if pending is None else torch.empty_like(streams_TND)
    results = Results.allocate(given)
    _enter_kernel[(tokens * (PARTS_OF_SUM * sizes["UNITS"] + sizes["CHUNKS"]) + len(results.post),)](
        streams_TND, y, post, comb, fn, base, scale, norm_weight, exchange,
        out, *results, tokens, settings.eps, settings.norm_eps,
        ROWS=len(fn), HEAD=head, ITERS=settings.iters, EXPAND=pending is not None, FP8=quantize, **sizes,
        num_warps=_WARPS, enable_fp_fusion=False, launch_pdl=dependent_launch(device),
    )  # fmt: skip
    return results.entered(out, given)


def launch_sizes(tokens: int, width: int, *, gpu: bool) -> dict[str, int]:
    """Return how the channels of a token are divided among programs.

    The interpreter runs one program after the other, so there one program collapses a whole token.
    """
    groups = ceil_div(width, FP8_GROUP)
    groups_per_chunk = COLLAPSED_CHANNELS // FP8_GROUP if gpu else power_of_2(groups)
    unit = _UNIT if tokens <= _NARROW_TOKENS else _WIDER_UNIT
    return {
        "WIDTH": width,
        "UNIT": unit,
        "UNITS": ceil_div(width, unit * PARTS_OF_SUM),
        "CHUNKS": ceil_div(groups, groups_per_chunk),
        "GROUPS": groups_per_chunk,
    }


def exchange_words(sizes: dict[str, int]) -> int:
    """Return how many words of ``counters_of`` a token takes."""
    words: int = PARTS_OF_SUM * sizes["UNITS"] * _RECORD.value + sizes["CHUNKS"] ** 2
    return words
