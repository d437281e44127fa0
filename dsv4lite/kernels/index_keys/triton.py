"""Kernels of ``index_keys``: one program takes a token's key, or eight heads of its queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div
from dsv4lite.kernels.e4m3 import as_stored, e4m3_bytes, e4m3_values
from dsv4lite.kernels.index_keys import EPS, IndexKeyInputs
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows import Fp8Key, RowStore, UnquantizedRow
from dsv4lite.kernels.rows.triton import fp8_scale, hadamard_float32, inverse_root, mean_of, memory_of, store_fp8_key

_HEADS = 8  # of one program


@triton.jit
def _partner(channel, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the other channel of each channel's pair, itself if it does not rotate, and the index of the pair's angle."""
    HALF: tl.constexpr = ROPE // 2
    if INTERLEAVED:
        other, angle = channel ^ 1, channel // 2
    else:
        other, angle = tl.where(channel < HALF, channel + HALF, channel - HALF), channel % HALF
    turned = channel < ROPE
    return tl.where(turned, other, channel), tl.where(turned, angle, 0)


@triton.jit
def _turned(x, y, channel, cos, sin, t, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return ``rope_first`` of vectors ``x`` [R, C]; ``y`` holds each channel's partner."""
    _other, angle = _partner(channel, ROPE, INTERLEAVED)
    c = tl.load(cos + t * (ROPE // 2) + angle)[None, :]
    s = tl.load(sin + t * (ROPE // 2) + angle)[None, :]
    first = (channel % 2 == 0 if INTERLEAVED else channel < ROPE // 2)[None, :]
    return tl.where((channel < ROPE)[None, :], tl.where(first, x * c - y * s, y * s + x * c), x)


@triton.jit(do_not_specialize=["columns"])
def _key_kernel(
    key, weight, bias, cos, sin, out, memory, positions, sequences, grow, row_stride, columns, eps,
    CHANNELS: tl.constexpr, LOG: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, PLACES: tl.constexpr,
    PAGE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    let_successor_in()
    t = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    other, _angle = _partner(channel, ROPE, INTERLEAVED)
    # Reference: layer_norm
    x = tl.load(key + t * row_stride + channel).to(tl.float32)
    y = tl.load(key + t * row_stride + other).to(tl.float32)
    mean = mean_of(tl.sum(x), CHANNELS)
    x -= mean
    root = inverse_root(mean_of(tl.sum(x * x), CHANNELS) + eps)
    x = x * root * tl.load(weight + channel) + tl.load(bias + channel)
    y = (y - mean) * root * tl.load(weight + other) + tl.load(bias + other)
    x = _turned(x[None, :], y[None, :], channel, cos, sin, t, ROPE, INTERLEAVED)
    if FP8:
        x = hadamard_float32(x, 1, LOG)
    tl.store(out + t * CHANNELS + channel[None, :], x)
    position = tl.load(positions + t)
    if position >= 0:
        sequence = tl.load(sequences + t).to(tl.int64)
        page = memory + tl.load(grow + sequence * columns + position // PLACES).to(tl.int64) * PAGE
        place = position % PLACES
        if FP8:
            store_fp8_key(x, page + place * CHANNELS, page + PLACES * CHANNELS + place * 4, CHANNELS)
        else:
            tl.store(page + place * CHANNELS + channel[None, :], as_stored(x, memory))


@triton.jit
def _query_kernel(
    query, cos, sin, out, row_stride,
    H: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, LOG: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    let_successor_in()
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, CHANNELS)
    other, _angle = _partner(channel, ROPE, INTERLEAVED)
    row = query + t * row_stride + tl.minimum(head, H - 1) * CHANNELS
    x, y = tl.load(row + channel[None, :]).to(tl.float32), tl.load(row + other[None, :]).to(tl.float32)
    x = _turned(x, y, channel, cos, sin, t, ROPE, INTERLEAVED)
    if FP8:
        # Reference: round_fp8(hadamard(turned_THC), C)
        x = hadamard_float32(x, HEADS, LOG)
        byte, inverse = fp8_scale(x, 1)
        scale = (byte << 23).to(tl.float32, bitcast=True)[:, None]
        x = e4m3_values(e4m3_bytes(x * inverse[:, None], False)) * scale
    x = as_stored(x, out)
    tl.store(out + (t * H + head) * CHANNELS + channel[None, :], x, mask=head < H)


def _layer(cos: Tensor, sin: Tensor, keys: RowStore, channels: int, interleaved: bool) -> dict[str, object]:
    """Check the angles, and return constants and launch options."""
    assert cos.is_contiguous() and sin.is_contiguous() and channels & (channels - 1) == 0 and 2 * cos.shape[1] <= channels
    return {
        "CHANNELS": channels, "LOG": channels.bit_length() - 1, "ROPE": 2 * cos.shape[1], "INTERLEAVED": interleaved,
        "FP8": isinstance(keys.format, Fp8Key), "num_warps": 4, "enable_fp_fusion": False,
        "launch_pdl": dependent_launch(cos.device),
    }  # fmt: skip


def store_index_keys_triton(given: IndexKeyInputs) -> Tensor:
    """See ``index_keys.store_index_keys``."""
    key_TC, weight, bias, cos, sin, interleaved, keys, paging = given
    (tokens, channels), memory = key_TC.shape, memory_of(keys)
    assert key_TC.stride(1) == 1 and weight.is_contiguous() and bias.is_contiguous() and keys.format.width == channels
    out = torch.empty(tokens, channels, dtype=torch.float32, device=key_TC.device)
    if tokens:
        _key_kernel[(tokens,)](
            key_TC, weight, bias, cos, sin, out, memory, paging.positions_T, paging.sequence_T, paging.grow_SP,
            key_TC.stride(0), paging.grow_SP.stride(0), EPS, PLACES=keys.rows_per_page, PAGE=memory.stride(0),
            **_layer(cos, sin, keys, channels, interleaved),
        )  # fmt: skip
    return out


def index_queries_triton(query_THC: Tensor, cos: Tensor, sin: Tensor, keys: RowStore, *, interleaved: bool) -> Tensor:
    """See ``index_keys.index_queries``."""
    tokens, heads, channels = query_THC.shape
    assert query_THC.stride(2) == 1 and query_THC.stride(1) == channels, query_THC.stride()
    dtype = keys.format.dtype if isinstance(keys.format, UnquantizedRow) else torch.bfloat16
    out = torch.empty(tokens, heads, channels, dtype=dtype, device=query_THC.device)
    if tokens:
        _query_kernel[(tokens, ceil_div(heads, _HEADS))](
            query_THC, cos, sin, out, query_THC.stride(0), H=heads, HEADS=_HEADS,
            **_layer(cos, sin, keys, channels, interleaved),
        )  # fmt: skip
    return out
