"""Kernels of ``latent.py`` and ``heads.py`` for plain models: rows of float32 or bfloat16, of any even width.

latents    two programs a token, one for each latent; the kv row goes to the step's rows and to the window
heads      programs take a few heads of one token; whether query or index heads follows from where they stand
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import on_gpu
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.qk_norm_rope import HeadInputs
from dsv4lite.kernels.rows import PlainRow, RowStore
from dsv4lite.kernels.rows.triton import inverse_rms, inverse_root, mean_of, only_if, rotate_tail, rounded

BLOCK = 2048  # channels of one program's heads


@triton.jit
def _latent_row(x, weight, real, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, GPU: tl.constexpr):
    """Return ``rms_norm`` of one row, [1, PADDED]; zeros for padding."""
    # Reference: rms_norm(latent_TK[:, :rank], q_norm, eps)
    column = tl.arange(0, PADDED)[None, :]
    inside = column < WIDTH
    row = tl.load(x + column, mask=only_if(real, inside), other=0.0).to(tl.float32)
    return rounded(row * inverse_rms(row, eps, WIDTH) * tl.load(weight + column, mask=inside, other=0.0), WIDE, GPU)


@triton.jit
def _store_row(p, y, wanted, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)[None, :]
    tl.store(p + column, y.to(p.dtype.element_ty), mask=only_if(wanted, column < WIDTH))


@triton.jit
def _latent_kernel(
    latent, q_norm, kv_norm, cos, sin, q, fresh, memory, positions, sequences, first, lens, window_pages, window_first,
    row_stride, page_stride, pages, window_tokens, eps,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr,
    PLACES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = latent.dtype.element_ty == tl.float32
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    real = position >= 0
    latent += t * row_stride
    if tl.program_id(1) == 0:
        qr = _latent_row(latent, q_norm, real, eps, RANK, RANK_PADDED, WIDE, GPU)
        _store_row(q + t * RANK, qr, t >= 0, RANK, RANK_PADDED)
    else:
        # Where the row goes.  first_kept_S = paging.first_S + paging.lens_S - window_tokens
        sequence = tl.load(sequences + t).to(tl.int64)
        kept = real & (position >= tl.load(first + sequence) + tl.load(lens + sequence) - window_tokens)
        index = position // PLACES - tl.load(window_first + sequence)
        page = tl.load(window_pages + sequence * pages + index, mask=kept, other=-1).to(tl.int64)
        # kv_TC = rope(rms_norm(latent_TK[:, rank:], kv_norm, eps), cos, sin)
        kv = _latent_row(latent + RANK, kv_norm, real, eps, WIDTH, PADDED, WIDE, GPU)
        kv = rotate_tail(kv, cos + t * (ROPE // 2), sin + t * (ROPE // 2), 1, WIDTH, PADDED, ROPE, WIDE, GPU)
        _store_row(fresh + t * WIDTH, kv, t >= 0, WIDTH, PADDED)
        home = memory + page * page_stride + tl.maximum(position, 0) % PLACES * WIDTH
        _store_row(home, kv, page >= 0, WIDTH, PADDED)


@triton.jit
def _heads(begin, heads, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the channels of a block of heads lie, [BLOCK, PADDED], and which of them there are."""
    head = begin + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    return head * WIDTH + column, (head < heads) & (column < WIDTH)


@triton.jit
def _heads_kernel(
    query, cos, sin, q, iq, row_stride, heads, index_heads, query_blocks, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK_HEADS: tl.constexpr, INDEX: tl.constexpr, INDEX_PADDED: tl.constexpr,
    INDEX_BLOCK: tl.constexpr, ROPE: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = query.dtype.element_ty == tl.float32
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query += t * row_stride
    cos += t * (ROPE // 2)
    sin += t * (ROPE // 2)
    if block < query_blocks:
        at, inside = _heads(block * BLOCK_HEADS, heads, WIDTH, PADDED, BLOCK_HEADS)
        x = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
        # Reference: rms_norm_heads, which rounds every step in bfloat16
        mean = rounded(mean_of(tl.sum(rounded(x * x, WIDE, GPU), axis=1), WIDTH), WIDE, GPU)
        factor = rounded(inverse_root(rounded(mean + eps, WIDE, GPU)), WIDE, GPU)
        y = rounded(x * factor[:, None], WIDE, GPU)
        y = rotate_tail(y, cos, sin, BLOCK_HEADS, WIDTH, PADDED, ROPE, WIDE, GPU)
        tl.store(q + t * heads * WIDTH + at, y.to(q.dtype.element_ty), mask=inside)
    else:
        of_index, valid = _heads((block - query_blocks) * INDEX_BLOCK, index_heads, INDEX, INDEX_PADDED, INDEX_BLOCK)
        key = tl.load(query + heads * WIDTH + of_index, mask=valid, other=0.0).to(tl.float32)
        key = rotate_tail(key, cos, sin, INDEX_BLOCK, INDEX, INDEX_PADDED, ROPE, WIDE, GPU)
        tl.store(iq + t * index_heads * INDEX + of_index, key.to(iq.dtype.element_ty), mask=valid)


def plain_latent_norms_triton(
    latent_TK: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    window: RowStore,
    paging: Paging,
    window_tokens: int,
) -> tuple[Tensor, None, Tensor]:
    """See ``latent.latent_norms``."""
    fmt, (tokens, columns), rank = window.format, latent_TK.shape, q_norm.shape[0]
    assert isinstance(fmt, PlainRow) and fmt.dtype == latent_TK.dtype and columns == rank + fmt.width, (fmt, latent_TK.dtype)
    assert latent_TK.stride(1) == 1 and fmt.width % 2 == 0 and cos.shape == sin.shape and 2 * cos.shape[1] <= fmt.width
    assert cos.is_contiguous() and sin.is_contiguous() and len(cos) == tokens
    q_TR = torch.empty(tokens, rank, dtype=fmt.dtype, device=latent_TK.device)
    fresh_TC = torch.empty(tokens, fmt.width, dtype=fmt.dtype, device=latent_TK.device)
    memory = window.memory.view(fmt.dtype)
    if tokens:
        _latent_kernel[(tokens, 2)](
            latent_TK, q_norm, kv_norm, cos, sin, q_TR, fresh_TC, memory, paging.positions_T, paging.sequence_T, paging.first_S,
            paging.lens_S, paging.window_SP, paging.window_first_S,
            latent_TK.stride(0), memory.stride(0), paging.window_SP.stride(0), window_tokens, eps,
            RANK=rank,
            RANK_PADDED=triton.next_power_of_2(rank),
            WIDTH=fmt.width,
            PADDED=triton.next_power_of_2(fmt.width),
            ROPE=2 * cos.shape[1],
            PLACES=window.rows_per_page,
            GPU=on_gpu(latent_TK.device),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return q_TR, None, fresh_TC.view(torch.uint8)


def plain_head_norms_triton(given: HeadInputs) -> tuple[Tensor, Tensor | None, None]:
    """See ``head_norms``."""
    query_TK, heads, channels, index_heads, index_dim, cos, sin, eps, _, _ = given
    tokens, rope = query_TK.shape[0], 2 * cos.shape[1]
    assert query_TK.stride(1) == 1 and query_TK.shape[1] == heads * channels + index_heads * index_dim, query_TK.shape
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape == (tokens, rope // 2)
    assert channels % 2 == 0 and rope <= channels and (not index_heads or (index_dim % 2 == 0 and rope <= index_dim))
    q_THC = torch.empty(tokens, heads, channels, dtype=query_TK.dtype, device=query_TK.device)
    iq_THC: Tensor | None = None
    if index_heads:
        iq_THC = torch.empty(tokens, index_heads, index_dim, dtype=query_TK.dtype, device=query_TK.device)
    else:
        index_dim = channels
    padded, index_padded = triton.next_power_of_2(channels), triton.next_power_of_2(index_dim)
    block, index_block = max(1, BLOCK // padded), max(1, BLOCK // index_padded)
    query_blocks = triton.cdiv(heads, block)
    if tokens:
        _heads_kernel[(tokens, query_blocks + triton.cdiv(index_heads, index_block))](
            query_TK, cos, sin, q_THC, q_THC if iq_THC is None else iq_THC,
            query_TK.stride(0), heads, index_heads, query_blocks, eps,
            WIDTH=channels, PADDED=padded, BLOCK_HEADS=block,
            INDEX=index_dim, INDEX_PADDED=index_padded, INDEX_BLOCK=index_block,
            ROPE=rope, GPU=on_gpu(query_TK.device), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return q_THC, iq_THC, None
