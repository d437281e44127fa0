"""Kernels of ``head_norms``: programs take a few heads of one token; whether query or index heads follows from where they stand.

How many heads a program takes follows from their width alone, and so does the order of every sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import on_gpu
from dsv4lite.kernels.e4m3 import to_bf16
from dsv4lite.kernels.norm.unquantized_triton import plain_head_norms_triton
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.qk_norm_rope import HeadInputs
from dsv4lite.kernels.rows.triton import bf16, e2m1_round, fp4_scale, hadamard_rows, inverse_root, mean_of, rotate

BLOCK = 2048  # channels of one program: two accesses of 16 bytes for each thread


@triton.jit
def _load_rows(p, heads, begin, BLOCK_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    head = begin + tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, PADDED)
    at = head[:, None] * WIDTH + channel[None, :]
    mask = (head < heads)[:, None] & (channel < WIDTH)[None, :]
    return at, mask, tl.load(p + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _turn(x, cos, sin, ROPE: tl.constexpr, BLOCK_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, GPU: tl.constexpr):
    pair = tl.arange(0, PADDED // 2) - (WIDTH - ROPE) // 2
    turned = (pair >= 0) & (pair < ROPE // 2)
    c = tl.load(cos + pair, mask=turned, other=1.0)
    s = tl.load(sin + pair, mask=turned, other=0.0)
    return rotate(x, c[None, :], s[None, :], turned[None, :], BLOCK_HEADS, PADDED, GPU)


@triton.jit
def _query_part(
    query,
    cos,
    sin,
    q,
    heads,
    begin,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ROPE: tl.constexpr,
    GPU: tl.constexpr,
):
    at, mask, x = _load_rows(query, heads, begin, BLOCK_HEADS, WIDTH, PADDED)
    # Few channels rotate: they are read again, from the first cache.
    head = begin + tl.arange(0, BLOCK_HEADS)[:, None]
    tail = head * WIDTH + (WIDTH - ROPE) + tl.arange(0, ROPE)[None, :]
    end = tl.load(query + tail, mask=head < heads, other=0.0).to(tl.float32)
    pair = tl.arange(0, ROPE // 2)[None, :]
    c = tl.load(cos + pair)
    s = tl.load(sin + pair)
    # mean = q_THC.square().float().mean(-1, keepdim=True).to(q_THC.dtype)
    mean = bf16(mean_of(tl.sum(bf16(x * x, GPU), axis=1), WIDTH), GPU)
    # q_THC * torch.rsqrt((mean + eps).float()).to(q_THC.dtype)
    factor = bf16(inverse_root(bf16(mean + eps, GPU)), GPU)[:, None]
    plain = tl.arange(0, PADDED)[None, :] < WIDTH - ROPE
    tl.store(q + at, to_bf16(x * factor, GPU), mask=mask & plain)
    y = rotate(bf16(end * factor, GPU), c, s, pair >= 0, BLOCK_HEADS, ROPE, GPU)
    tl.store(q + tail, y.to(tl.bfloat16), mask=head < heads)


@triton.jit
def _index_part(
    query, cos, sin, iq, heads, begin, LOG: tl.constexpr, BLOCK_HEADS: tl.constexpr, ROPE: tl.constexpr, GPU: tl.constexpr
):
    WIDTH: tl.constexpr = 1 << LOG
    at, mask, x = _load_rows(query, heads, begin, BLOCK_HEADS, WIDTH, WIDTH)
    # round_fp4(hadamard(rope(iq_THC, cos, sin)))
    y = _turn(x, cos, sin, ROPE, BLOCK_HEADS, WIDTH, WIDTH, GPU)
    y = tl.reshape(hadamard_rows(y, BLOCK_HEADS, LOG, GPU), (BLOCK_HEADS, WIDTH // 32, 32))
    byte, inverse = fp4_scale(y, 2)
    scale = (byte << 23).to(tl.float32, bitcast=True)
    y = tl.reshape(e2m1_round(y * inverse[:, :, None]) * scale[:, :, None], (BLOCK_HEADS, WIDTH))
    tl.store(iq + at, y.to(tl.bfloat16), mask=mask)


@triton.jit
def _heads_kernel(
    query,
    cos,
    sin,
    q,
    iq,
    row_stride,
    heads,
    index_heads,
    query_blocks,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    INDEX_LOG: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    GPU: tl.constexpr,
):
    wait_for_predecessor()
    let_successor_in()
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query += t * row_stride
    cos += t * (ROPE // 2)
    sin += t * (ROPE // 2)
    if block < query_blocks:
        q += t * heads * WIDTH
        _query_part(query, cos, sin, q, heads, block * BLOCK_HEADS, eps, WIDTH, PADDED, BLOCK_HEADS, ROPE, GPU)
    else:
        iq += (t * index_heads) << INDEX_LOG
        begin = (block - query_blocks) * INDEX_BLOCK
        _index_part(query + heads * WIDTH, cos, sin, iq, index_heads, begin, INDEX_LOG, INDEX_BLOCK, ROPE, GPU)


def head_norms_triton(given: HeadInputs) -> tuple[Tensor, Tensor | None, None]:
    """See ``head_norms``; the width of index heads is a power of two where they are rounded to FP4."""
    if not given.fp4:
        return plain_head_norms_triton(given)
    query_TK, heads, channels, index_heads, index_dim, cos, sin, eps, _, _ = given
    tokens, rope = query_TK.shape[0], 2 * cos.shape[1]
    assert query_TK.dtype == torch.bfloat16 and query_TK.stride(1) == 1
    assert query_TK.shape[1] == heads * channels + index_heads * index_dim, query_TK.shape
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape == (tokens, rope // 2)
    assert channels % 2 == 0 and rope <= channels
    q_THC = torch.empty(tokens, heads, channels, dtype=query_TK.dtype, device=query_TK.device)
    iq_THC: Tensor | None = None
    log = 7
    if index_heads:
        log = index_dim.bit_length() - 1
        assert index_dim == 1 << log and index_dim % 32 == 0 and rope <= index_dim
        iq_THC = torch.empty(tokens, index_heads, index_dim, dtype=query_TK.dtype, device=query_TK.device)
    padded = triton.next_power_of_2(channels)
    block_heads, index_block = max(1, BLOCK // padded), max(1, BLOCK >> log)
    query_blocks = triton.cdiv(heads, block_heads)
    if tokens:
        _heads_kernel[(tokens, query_blocks + triton.cdiv(index_heads, index_block))](
            query_TK,
            cos,
            sin,
            q_THC,
            q_THC if iq_THC is None else iq_THC,
            query_TK.stride(0),
            heads,
            index_heads,
            query_blocks,
            eps,
            WIDTH=channels,
            PADDED=padded,
            BLOCK_HEADS=block_heads,
            INDEX_LOG=log,
            INDEX_BLOCK=index_block,
            ROPE=rope,
            GPU=on_gpu(query_TK.device),
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=dependent_launch(query_TK.device),
        )
    return q_THC, iq_THC, None
