"""Kernel of ``head_norms``: a program takes a few heads of one token, the first programs query heads, the others index heads.

The number of heads per program, and so the order of every sum, depends on the heads' width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div, power_of_2
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.qk_norm_rope import HeadInputs
from dsv4lite.kernels.rows.triton import (
    e2m1_round,
    fp4_scale,
    hadamard_rows,
    inverse_root,
    mean_of,
    rotate,
    rotate_tail,
    rounded,
)

BLOCK = 2048  # channels of one program: two accesses of 16 bytes for each thread


@triton.jit
def _load_rows(p, heads, begin, BLOCK_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    head = begin + tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, PADDED)
    at = head[:, None] * WIDTH + channel[None, :]
    mask = (head < heads)[:, None] & (channel < WIDTH)[None, :]
    return at, mask, tl.load(p + at, mask=mask, other=0.0).to(tl.float32)


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
    INDEX: tl.constexpr,
    INDEX_PADDED: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    FP4_LOG: tl.constexpr,
    ROPE: tl.constexpr,
):
    wait_for_predecessor()
    let_successor_in()
    FLOAT32: tl.constexpr = query.dtype.element_ty == tl.float32
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query += t * row_stride
    cos += t * (ROPE // 2)
    sin += t * (ROPE // 2)
    if block < query_blocks:
        q += t * heads * WIDTH
        at, mask, x = _load_rows(query, heads, block * BLOCK_HEADS, BLOCK_HEADS, WIDTH, PADDED)
        if ROPE & (ROPE - 1) == 0:
            # The few rotated channels are read again, from the L1 cache.
            head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
            tail = head * WIDTH + (WIDTH - ROPE) + tl.arange(0, ROPE)[None, :]
            end = tl.load(query + tail, mask=head < heads, other=0.0).to(tl.float32)
            pair = tl.arange(0, ROPE // 2)[None, :]
            c = tl.load(cos + pair)
            s = tl.load(sin + pair)
        # mean = q_THC.square().float().mean(-1, keepdim=True).to(q_THC.dtype)
        mean = rounded(mean_of(tl.sum(rounded(x * x, FLOAT32), axis=1), WIDTH), FLOAT32)
        # q_THC * torch.rsqrt((mean + eps).float()).to(q_THC.dtype)
        factor = rounded(inverse_root(rounded(mean + eps, FLOAT32)), FLOAT32)[:, None]
        y = rounded(x * factor, FLOAT32)
        if ROPE & (ROPE - 1) == 0:
            still = tl.arange(0, PADDED)[None, :] < WIDTH - ROPE
            tl.store(q + at, y.to(q.dtype.element_ty), mask=mask & still)
            end = rotate(rounded(end * factor, FLOAT32), c, s, pair >= 0, BLOCK_HEADS, ROPE, FLOAT32)
            tl.store(q + tail, end.to(q.dtype.element_ty), mask=head < heads)
        else:
            y = rotate_tail(y, cos, sin, BLOCK_HEADS, WIDTH, PADDED, ROPE, FLOAT32)
            tl.store(q + at, y.to(q.dtype.element_ty), mask=mask)
    else:
        begin = (block - query_blocks) * INDEX_BLOCK
        of_index, valid, key = _load_rows(query + heads * WIDTH, index_heads, begin, INDEX_BLOCK, INDEX, INDEX_PADDED)
        key = rotate_tail(key, cos, sin, INDEX_BLOCK, INDEX, INDEX_PADDED, ROPE, FLOAT32)
        if FP4_LOG:
            # round_fp4(hadamard(rope(iq_THC, cos, sin)))
            key = tl.reshape(hadamard_rows(key, INDEX_BLOCK, FP4_LOG), (INDEX_BLOCK, INDEX // 32, 32))
            byte, inverse = fp4_scale(key, 2)
            scale = (byte << 23).to(tl.float32, bitcast=True)
            key = tl.reshape(e2m1_round(key * inverse[:, :, None]) * scale[:, :, None], (INDEX_BLOCK, INDEX))
        tl.store(iq + t * index_heads * INDEX + of_index, key.to(iq.dtype.element_ty), mask=valid)


def head_norms_triton(given: HeadInputs) -> tuple[Tensor, Tensor | None]:
    """See ``head_norms``; the width of index heads is a power of two where they are rounded to FP4."""
    query_TK, heads, channels, index_heads, index_dim, cos, sin, eps, fp4 = given
    tokens, rope = query_TK.shape[0], 2 * cos.shape[1]
    assert query_TK.stride(1) == 1 and query_TK.shape[1] == heads * channels + index_heads * index_dim, query_TK.shape
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape == (tokens, rope // 2)
    assert channels % 2 == 0 and rope <= channels and (not fp4 or query_TK.dtype == torch.bfloat16)
    q_THC = torch.empty(tokens, heads, channels, dtype=query_TK.dtype, device=query_TK.device)
    iq_THC: Tensor | None = None
    if index_heads:
        assert index_dim % 2 == 0 and rope <= index_dim
        iq_THC = torch.empty(tokens, index_heads, index_dim, dtype=query_TK.dtype, device=query_TK.device)
    else:
        index_dim = 128
    padded, index_padded = power_of_2(channels), power_of_2(index_dim)
    assert not fp4 or (index_padded == index_dim and index_dim % 32 == 0), index_dim
    block_heads, index_block = max(1, BLOCK // padded), max(1, BLOCK // index_padded)
    query_blocks = ceil_div(heads, block_heads)
    if tokens:
        _heads_kernel[(tokens, query_blocks + ceil_div(index_heads, index_block))](
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
            INDEX=index_dim,
            INDEX_PADDED=index_padded,
            INDEX_BLOCK=index_block,
            FP4_LOG=index_dim.bit_length() - 1 if fp4 else 0,
            ROPE=rope,
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=dependent_launch(query_TK.device),
        )
    return q_THC, iq_THC
