"""Kernels of ``hc_enter`` and ``hc_expand`` for four streams in bfloat16.

    expand_project   tokens x channels: writes a sub-layer's output into the streams, and the projection's sums over these channels
    collapse         one program per token writes the next sub-layer's input; others write ``post`` and ``comb`` of some tokens

The order of a sum over channels does not depend on the number of tokens: a unit is 32 channels of all streams, on the tensor cores;
units are added in order within each of eight parts, then the parts in pairs. With few tokens one program takes a unit, and
``collapse`` adds the units; with many one program takes a part. Streams are bfloat16, and weights are split into three bfloat16
terms, so products are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import by_most, ceil_div, compiled, power_of_2
from dsv4lite.kernels.e4m3 import e4m3_bytes, fp8_scale_bits, fp8_scaled, has_e4m3, to_bf16
from dsv4lite.kernels.hc import KERNEL_STREAMS, HcEntered, HcInputs, HcMix, has_kernel
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.quantize import FP8_GROUP

UNIT_CHANNELS = 32
PARTS_OF_SUM = 8
_UNIT, _PARTS = tl.constexpr(UNIT_CHANNELS), tl.constexpr(PARTS_OF_SUM)
# By the most tokens of a step: tokens whose ``post`` and ``comb`` one program computes. All warps of a program repeat the same
# computation: programs of one token end first but cost most in total. With 32 tokens a thread takes 128 registers, and two programs
# fit on a multiprocessor.
_MIX_TOKENS: tuple[tuple[int | None, int], ...] = ((128, 1), (512, 4), (None, 16))

# Convert two numbers at a time; the compiler emits a slower instruction per number, and more to unpack pairs.
_ROUND = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_WIDEN = tl.constexpr("""{
    shl.b32 $0, $2, 16;
    and.b32 $1, $2, 0xffff0000;
}""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile sizes and launch options of ``expand_project``.

    Attributes:
        tokens: Tokens of one program.
        whole: A program takes a whole part of the channels instead of a unit.
    """

    tokens: int
    whole: bool
    num_warps: int
    num_stages: int


# Limits are tokens of a step.
TILES: tuple[tuple[int | None, Tile], ...] = (
    (512, Tile(tokens=64, whole=False, num_warps=4, num_stages=1)),
    (None, Tile(tokens=64, whole=True, num_warps=4, num_stages=3)),
)


def tile_for(tokens: int) -> Tile:
    """Return the tile for a number of tokens."""
    return by_most(TILES, tokens)


def units_of(width: int) -> int:
    """Return the number of units in each part of the channels; the last ones may be empty."""
    return -(-width // (UNIT_CHANNELS * PARTS_OF_SUM))


@triton.jit
def _rounded(x):
    """Round to bfloat16. The assembly is not pure, so the compiler cannot recompute the result in another layout."""
    if compiled():
        rounded = tl.inline_asm_elementwise(_ROUND, "=r,f,f", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    else:
        rounded = to_bf16(x)
    return rounded


@triton.jit
def _wide(x):
    """Return bfloat16 numbers in float32."""
    if compiled():
        bits = tl.inline_asm_elementwise(_WIDEN, "=&r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2)
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def weigh(a0, a1, a2, a3, w0, w1, w2, w3, rest):
    """Return ``sum_i a_i w_i + rest`` in one order."""
    return tl.fma(a3, w3, tl.fma(a2, w2, tl.fma(a1, w1, tl.fma(a0, w0, rest))))


@triton.jit
def load4(p, stride, mask):
    """Return four tiles that lie ``stride`` numbers apart."""
    return (
        tl.load(p, mask=mask, other=0.0),
        tl.load(p + stride, mask=mask, other=0.0),
        tl.load(p + 2 * stride, mask=mask, other=0.0),
        tl.load(p + 3 * stride, mask=mask, other=0.0),
    )


@triton.jit
def _columns(p, mask):
    """Return four numbers of each row as [rows, 1]; separate loads avoid a layout conversion."""
    a, b, c, d = load4(p, 1, mask)
    return a[:, None], b[:, None], c[:, None], d[:, None]


@triton.jit
def store4(p, stride, a, b, c, d, mask):
    """Store four tiles ``stride`` numbers apart."""
    tl.store(p, a, mask=mask)
    tl.store(p + stride, b, mask=mask)
    tl.store(p + 2 * stride, c, mask=mask)
    tl.store(p + 3 * stride, d, mask=mask)


@triton.jit
def _project(fn, inside, x, total):
    """Add ``x @ fn.T`` to ``total`` [TOKENS, ROWS]; ``fn`` points to float32 [ROWS, UNIT], ``x`` is bfloat16 [TOKENS, UNIT]."""
    f = tl.load(fn, mask=inside, other=0.0)
    high = _rounded(f)
    rest = f - _wide(high)
    middle = _rounded(rest)
    low = _rounded(rest - _wide(middle))
    if not compiled():  # the interpreter multiplies bfloat16 as integers
        x, high, middle, low = x.to(tl.float32), high.to(tl.float32), middle.to(tl.float32), low.to(tl.float32)
    return tl.dot(x, tl.trans(high), tl.dot(x, tl.trans(middle), tl.dot(x, tl.trans(low), total)))


@triton.jit(do_not_specialize=["tokens"])
def expand_project_kernel(
    streams,
    y,
    post,
    comb,
    fn,
    out,
    sums,
    tokens,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    UNITS: tl.constexpr,
    EXPAND: tl.constexpr,
    PROJECT: tl.constexpr,
    STAGES: tl.constexpr,
):
    wait_for_predecessor()
    part = tl.program_id(0) % PROGRAMS
    first = (tl.program_id(0) // PROGRAMS).to(tl.int64) * TOKENS
    token = tl.arange(0, TOKENS)
    here = first + token < tokens
    streams += first * (4 * WIDTH)
    out += first * (4 * WIDTH)
    row = tl.arange(0, ROWS_TILE)
    if EXPAND:
        y += first * WIDTH
        p0, p1, p2, p3 = _columns(post + first * 4 + token * 4, here)
        comb += first * 16 + token * 16
        c00, c01, c02, c03 = _columns(comb, here)
        c10, c11, c12, c13 = _columns(comb + 4, here)
        c20, c21, c22, c23 = _columns(comb + 8, here)
        c30, c31, c32, c33 = _columns(comb + 12, here)
    total = tl.zeros((TOKENS, ROWS_TILE), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for unit in tl.range(0, UNITS, num_stages=STAGES):
        column = (part * UNITS + unit) * _UNIT + tl.arange(0, _UNIT)
        inside = here[:, None] & (column < WIDTH)[None, :]
        at = token[:, None] * (4 * WIDTH) + column[None, :]
        x0, x1, x2, x3 = load4(streams + at, WIDTH, inside)
        if EXPAND:
            # Reference: baddbmm(mix.post[..., None] * y_TD.float()[:, None], mix.comb.transpose(1, 2), streams_TND.float())
            w = _wide(tl.load(y + token[:, None] * WIDTH + column[None, :], mask=inside, other=0.0))
            f0, f1, f2, f3 = _wide(x0), _wide(x1), _wide(x2), _wide(x3)
            x0, x1, x2, x3 = (
                _rounded(weigh(f0, f1, f2, f3, c00, c10, c20, c30, p0 * w)),
                _rounded(weigh(f0, f1, f2, f3, c01, c11, c21, c31, p1 * w)),
                _rounded(weigh(f0, f1, f2, f3, c02, c12, c22, c32, p2 * w)),
                _rounded(weigh(f0, f1, f2, f3, c03, c13, c23, c33, p3 * w)),
            )
            store4(out + at, WIDTH, x0, x1, x2, x3, inside)
        if PROJECT:
            # Reference: z = streams_TND.flatten(1).float(); matmul_rows(z, fn), z.square().sum(-1)
            wanted = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
            weights = fn + row[:, None] * (4 * WIDTH) + column[None, :]
            product = tl.zeros((TOKENS, ROWS_TILE), tl.float32)
            product = _project(weights, wanted, x0, product)
            product = _project(weights + WIDTH, wanted, x1, product)
            product = _project(weights + 2 * WIDTH, wanted, x2, product)
            product = _project(weights + 3 * WIDTH, wanted, x3, product)
            total += product
            f0, f1, f2, f3 = _wide(x0), _wide(x1), _wide(x2), _wide(x3)
            squares += tl.sum(weigh(f0, f1, f2, f3, f0, f1, f2, f3, tl.zeros((TOKENS, _UNIT), tl.float32)), 1)
    let_successor_in()
    if PROJECT:
        sums += (part.to(tl.int64) * tokens + first) * (ROWS + 1)
        tl.store(sums + token[:, None] * (ROWS + 1) + row[None, :], total, mask=here[:, None] & (row < ROWS)[None, :])
        tl.store(sums + token * (ROWS + 1) + ROWS, squares, mask=here)


@triton.jit
def normalise(total, norm_eps, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return the normalised projection of tokens, float32 [TOKENS, ROWS_TILE], from what each part [TOKENS, ROWS_TILE, 8] adds."""
    # Parts are added in pairs, then the pairs: with tl.sum the order would depend on the layout.
    tl.static_assert(total.shape[2] == 8)
    a, b = tl.split(tl.reshape(total, (total.shape[0], total.shape[1], 4, 2)))
    a, b = tl.split(tl.reshape(a + b, (total.shape[0], total.shape[1], 2, 2)))
    a, b = tl.split(a + b)
    projected = a + b
    # Reference: sums[..., :-1] * torch.rsqrt(sums[..., -1:] / width + norm_eps)
    last = tl.arange(0, total.shape[1])[None, :] == ROWS
    squares = tl.sum(tl.where(last, projected, 0.0), 1, keep_dims=True)
    return projected * tl.rsqrt(squares / (4 * WIDTH) + norm_eps)


@triton.jit
def _normed(
    sums,
    token,
    here,
    tokens,
    norm_eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Return the normalised projection of tokens [TOKENS], float32 [TOKENS, ROWS_TILE]; a part has UNITS sums."""
    stride = tokens.to(tl.int64) * (ROWS + 1)
    row = tl.arange(0, ROWS_TILE)[None, :, None]
    p = sums + tl.arange(0, _PARTS)[None, None, :] * (UNITS * stride) + token[:, None, None] * (ROWS + 1) + row
    inside = here[:, None, None] & (row <= ROWS)
    total = tl.load(p, mask=inside, other=0.0)
    for unit in tl.static_range(1, UNITS):
        total += tl.load(p + unit * stride, mask=inside, other=0.0)
    return normalise(total, norm_eps, WIDTH, ROWS)


@triton.jit
def _column(x, i):
    """Return column ``i`` of a tile [rows], or a scalar if the tile has one row: every thread then has it."""
    masked = tl.where(tl.arange(0, x.shape[1])[None, :] == i, x, 0.0)
    if x.shape[0] == 1:
        column = tl.sum(masked)
    else:
        column = tl.sum(masked, 1)
    return column


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softmax(a, b, c, d, eps):
    """Return a row's softmax plus ``eps``."""
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    inverse = 1.0 / (a + b + c + d)
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@triton.jit
def _inverse(x):
    """Return ``1 / x`` within one unit in the last place, for numbers far from the limits of float32."""
    if has_e4m3():  # older chips divide
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 1.0 / x


@triton.jit
def write_mix(
    m, bias, post_scale, comb_scale, post, comb, tokens, eps, block,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, ITERS: tl.constexpr,
):  # fmt: skip
    """Write ``post`` and ``comb`` of some tokens from their projection; each number of a token's matrix is a variable."""
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    row = tl.arange(0, m.shape[1])
    inside = here[:, None] & (row <= ROWS)[None, :]
    # Reference: post = 2 * sigmoid(projected[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    written = 2.0 * sigmoid(m * post_scale + bias[None, :])
    tl.store(post + token[:, None] * 4 + row[None, :] - 4, written, mask=inside & ((row >= 4) & (row < 8))[None, :])
    # Reference: comb = (projected[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + eps
    m = m * comb_scale + bias[None, :]
    a00, a01, a02, a03 = _softmax(_column(m, 8), _column(m, 9), _column(m, 10), _column(m, 11), eps)
    a10, a11, a12, a13 = _softmax(_column(m, 12), _column(m, 13), _column(m, 14), _column(m, 15), eps)
    a20, a21, a22, a23 = _softmax(_column(m, 16), _column(m, 17), _column(m, 18), _column(m, 19), eps)
    a30, a31, a32, a33 = _softmax(_column(m, 20), _column(m, 21), _column(m, 22), _column(m, 23), eps)
    # Reference: sinkhorn
    c0 = eps + a00 + a10 + a20 + a30
    c1 = eps + a01 + a11 + a21 + a31
    c2 = eps + a02 + a12 + a22 + a32
    c3 = eps + a03 + a13 + a23 + a33
    r0 = tl.full(c0.shape, 1.0, tl.float32)
    r1, r2, r3 = r0, r0, r0
    for _ in range(ITERS - 1):
        w0, w1, w2, w3 = _inverse(c0), _inverse(c1), _inverse(c2), _inverse(c3)
        r0 = weigh(a00, a01, a02, a03, w0, w1, w2, w3, eps * r0)
        r1 = weigh(a10, a11, a12, a13, w0, w1, w2, w3, eps * r1)
        r2 = weigh(a20, a21, a22, a23, w0, w1, w2, w3, eps * r2)
        r3 = weigh(a30, a31, a32, a33, w0, w1, w2, w3, eps * r3)
        w0, w1, w2, w3 = _inverse(r0), _inverse(r1), _inverse(r2), _inverse(r3)
        c0 = weigh(a00, a10, a20, a30, w0, w1, w2, w3, eps * c0)
        c1 = weigh(a01, a11, a21, a31, w0, w1, w2, w3, eps * c1)
        c2 = weigh(a02, a12, a22, a32, w0, w1, w2, w3, eps * c2)
        c3 = weigh(a03, a13, a23, a33, w0, w1, w2, w3, eps * c3)
    if TOKENS == 1:
        at = comb + block.to(tl.int64) * 16
        here = block < tokens
    else:
        at = comb + token * 16
    store4(at, 1, a00 / (r0 * c0), a01 / (r0 * c1), a02 / (r0 * c2), a03 / (r0 * c3), here)
    store4(at + 4, 1, a10 / (r1 * c0), a11 / (r1 * c1), a12 / (r1 * c2), a13 / (r1 * c3), here)
    store4(at + 8, 1, a20 / (r2 * c0), a21 / (r2 * c1), a22 / (r2 * c2), a23 / (r2 * c3), here)
    store4(at + 12, 1, a30 / (r3 * c0), a31 / (r3 * c1), a32 / (r3 * c2), a33 / (r3 * c3), here)


@triton.jit
def _mix(
    sums, base, scale, post, comb, tokens, eps, norm_eps, block, WIDTH: tl.constexpr, ROWS: tl.constexpr, ROWS_TILE: tl.constexpr,
    UNITS: tl.constexpr, TOKENS: tl.constexpr, ITERS: tl.constexpr,
):  # fmt: skip
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    m = _normed(sums, token, token < tokens, tokens, norm_eps, WIDTH, ROWS, ROWS_TILE, UNITS)
    row = tl.arange(0, ROWS_TILE)
    bias = tl.load(base + row, mask=row < ROWS, other=0.0)
    post_scale, comb_scale = tl.load(scale + 1), tl.load(scale + 2)
    write_mix(m, bias, post_scale, comb_scale, post, comb, tokens, eps, block, ROWS, TOKENS, ITERS)


@triton.jit
def weighted_sum(x0, x1, x2, x3, m, bias, scale, eps):
    """Return the sum of a token's streams, rounded to bfloat16; ``m`` [1, ROWS_TILE] is its projection."""
    # Reference: pre = sigmoid(projected[:, :n] * scale[0] + base[:n]) + eps
    pre = sigmoid(m * scale + bias[None, :]) + eps
    # Reference: x = weighted_sum(streams_TND, pre)
    summed = _wide(x0) * _column(pre, 0) + _wide(x1) * _column(pre, 1)
    summed = summed + _wide(x2) * _column(pre, 2) + _wide(x3) * _column(pre, 3)
    return _rounded(summed)


@triton.jit
def normed(v, squares, weight, norm_eps, WIDTH: tl.constexpr):
    """Return a token, or some of its channels, normed by its root mean square."""
    # Reference: rms_norm(x, normweight, norm_eps)
    return _rounded(v * tl.rsqrt(squares / WIDTH + norm_eps) * weight)


@triton.jit
def store_fp8(v, codes, scales, token, column, group, WIDTH: tl.constexpr):
    # Reference: quantize_fp8(x, 128)
    bits = fp8_scale_bits(v)
    tl.store(codes + column, e4m3_bytes(fp8_scaled(v, bits), has_e4m3()), mask=column < WIDTH)
    groups = (WIDTH + 127) // 128
    tl.store(scales + token * groups + group, (bits >> 23).to(tl.uint8), mask=group < groups)


@triton.jit(do_not_specialize=["tokens", "mixers"])
def collapse_kernel(
    streams,
    sums,
    base,
    scale,
    normweight,
    x,
    codes,
    scales,
    post,
    comb,
    tokens,
    mixers,
    eps,
    norm_eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    GROUPS_TILE: tl.constexpr,
    UNITS: tl.constexpr,
    MIX_TOKENS: tl.constexpr,
    ITERS: tl.constexpr,
    HEAD: tl.constexpr,
    FP8: tl.constexpr,
):
    wait_for_predecessor()
    program = tl.program_id(0)
    if program < mixers:
        if not HEAD:
            _mix(
                sums, base, scale, post, comb, tokens, eps, norm_eps, program,
                WIDTH, ROWS, ROWS_TILE, UNITS, MIX_TOKENS, ITERS,
            )  # fmt: skip
    else:
        token = (mixers + tokens - 1 - program).to(tl.int64)  # last tokens first: they were written last and are in the L2 cache
        group = tl.arange(0, GROUPS_TILE)
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = column < WIDTH
        at = streams + token * (4 * WIDTH) + column
        x0, x1, x2, x3 = load4(at, WIDTH, inside)
        one, here = tl.full((1,), token, tl.int64), tl.full((1,), True, tl.int1)
        m = _normed(sums, one, here, tokens, norm_eps, WIDTH, ROWS, ROWS_TILE, UNITS)
        row = tl.arange(0, ROWS_TILE)
        bias = tl.load(base + row, mask=row < 4, other=0.0)
        rounded = weighted_sum(x0, x1, x2, x3, m, bias, tl.load(scale), eps)
        if not HEAD:
            weight = tl.load(normweight + column, mask=inside, other=0.0).to(tl.float32)
            v = _wide(rounded)
            rounded = normed(v, tl.sum(v * v), weight, norm_eps, WIDTH)
        let_successor_in()
        tl.store(x + token * WIDTH + column, rounded, mask=inside)
        if FP8:
            store_fp8(_wide(rounded), codes + token * WIDTH, scales, token, column, group, WIDTH)


class Results(NamedTuple):
    """Tensors that kernels write: x [T, D], its codes uint8 [T, D] and scale bytes, post [T, N] and comb [T, N, N].

    Without ``quantize`` codes and scales have no rows; post and comb of the head have none.
    """

    x: Tensor
    codes: Tensor
    scales: Tensor
    post: Tensor
    comb: Tensor

    @classmethod
    def allocate(cls, given: HcInputs) -> Results:
        (tokens, streams, width), device = given.streams_TND.shape, given.streams_TND.device
        quantized, mixed = tokens if given.quantize else 0, 0 if given.is_head else tokens
        return cls(
            torch.empty(tokens, width, dtype=given.streams_TND.dtype, device=device),
            torch.empty(quantized, width, dtype=torch.uint8, device=device),
            torch.empty(quantized, ceil_div(width, FP8_GROUP), dtype=torch.uint8, device=device),
            torch.empty(mixed, streams, dtype=torch.float32, device=device),
            torch.empty(mixed, streams, streams, dtype=torch.float32, device=device),
        )

    def entered(self, streams_TND: Tensor, given: HcInputs) -> HcEntered:
        """Return the results of ``hc_enter``."""
        rounded = (self.codes.view(torch.float8_e4m3fn), self.scales) if given.quantize else None
        return HcEntered(streams_TND, self.x, rounded, None if given.is_head else HcMix(self.post, self.comb))


def expand_project_triton(
    streams_TND: Tensor, pending: tuple[Tensor, HcMix] | None, fn: Tensor | None, row_tile: int | None
) -> tuple[Tensor, Tensor]:
    """Launch the first half of ``hc_enter``.

    Args:
        pending: A sub-layer's output to write, and its mix; ``None`` writes nothing.
        fn: Projects the result; ``None`` projects nothing.
        row_tile: Ignored: a token's bits never depend on the number of tokens.

    Returns:
        The streams, and the partial sums of their projection.
    """
    tokens, streams, width = streams_TND.shape
    assert streams == KERNEL_STREAMS and streams_TND.dtype == torch.bfloat16 and streams_TND.is_contiguous(), streams_TND.shape
    y, (post, comb) = pending or (streams_TND, (streams_TND,) * 2)
    assert y.dtype == torch.bfloat16 and y.is_contiguous() and post.is_contiguous() and comb.is_contiguous()
    rows = 1 if fn is None else fn.shape[0]
    assert fn is None or (fn.dtype == torch.float32 and fn.is_contiguous() and fn.shape[1] == KERNEL_STREAMS * width)
    tile, units = tile_for(tokens), units_of(width)
    programs = PARTS_OF_SUM if tile.whole else PARTS_OF_SUM * units
    out = streams_TND if pending is None else torch.empty_like(streams_TND)
    sums = torch.empty(programs, tokens, rows + 1, dtype=torch.float32, device=streams_TND.device)
    if tokens:
        expand_project_kernel[(ceil_div(tokens, tile.tokens) * programs,)](
            streams_TND,
            y,
            post,
            comb,
            sums if fn is None else fn,
            out,
            sums,
            tokens,
            WIDTH=width,
            ROWS=rows,
            ROWS_TILE=max(16, power_of_2(rows)),  # at least the rows of one instruction of the tensor cores
            TOKENS=tile.tokens,
            PROGRAMS=programs,
            UNITS=units if tile.whole else 1,
            EXPAND=pending is not None,
            PROJECT=fn is not None,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
            launch_pdl=dependent_launch(streams_TND.device),
        )
    return out, sums


def collapse_triton(streams_TND: Tensor, sums: Tensor, given: HcInputs) -> HcEntered:
    """Launch the second half of ``hc_enter`` on the streams and sums of the first; a head is not normed here."""
    (tokens, _, width), rows, head = streams_TND.shape, len(given.weights.base), given.is_head
    assert has_kernel(streams_TND.dtype, streams_TND.shape[1]) and streams_TND.is_contiguous(), streams_TND.shape
    assert sums.shape[1:] == (tokens, rows + 1) and sums.is_contiguous() and rows == (4 if head else 24), sums.shape
    assert sums.shape[0] in (PARTS_OF_SUM, PARTS_OF_SUM * units_of(width)), sums.shape
    assert head or (given.norm_weight is not None and given.norm_weight.is_contiguous() and given.norm_weight.shape == (width,))
    results = Results.allocate(given)
    mix_tokens = by_most(_MIX_TOKENS, tokens)
    mixers = ceil_div(len(results.post), mix_tokens)
    groups_tile = power_of_2(ceil_div(width, FP8_GROUP))
    if tokens:
        collapse_kernel[(mixers + tokens,)](
            streams_TND,
            sums,
            given.weights.base,
            given.weights.scale,
            results.x if head else given.norm_weight,
            *results,
            tokens,
            mixers,
            given.settings.eps,
            given.settings.norm_eps,
            WIDTH=width,
            ROWS=rows,
            ROWS_TILE=power_of_2(rows + 1),
            GROUPS_TILE=groups_tile,
            UNITS=len(sums) // PARTS_OF_SUM,
            MIX_TOKENS=mix_tokens,
            ITERS=given.settings.iters,
            HEAD=head,
            FP8=given.quantize,
            num_warps=min(8, max(4, groups_tile // 4)),  # programs that compute ``post`` and ``comb`` also need four
            enable_fp_fusion=False,
            launch_pdl=dependent_launch(streams_TND.device),
        )
    return results.entered(streams_TND, given)
