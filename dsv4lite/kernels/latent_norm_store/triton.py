"""Kernel of ``latent.py``: two programs a token, one for each latent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import on_gpu
from dsv4lite.kernels.e4m3 import e4m3_bytes
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows import Fp8Kv, RowStore
from dsv4lite.kernels.rows.triton import bf16, fp8_scale, inverse_rms, rotate, store_kv


@triton.jit
def query_latent(
    latent, q_norm, q_codes, q_scales, t, positions, row_stride, eps, RANK: tl.constexpr, GROUPS: tl.constexpr, GPU: tl.constexpr
):
    """Norm and quantize the query latent of token ``t``."""
    position = tl.load(positions + t)
    latent += t * row_stride
    # quantize_fp8(rms_norm(latent_TK[:, :rank], q_norm, eps), QUERY_GROUP)
    group = tl.arange(0, GROUPS)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = at < RANK
    x = tl.where(position >= 0, tl.load(latent + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    weight = tl.load(q_norm + at, mask=inside, other=0.0)
    y = bf16(x * inverse_rms(x, eps, RANK) * weight, GPU)
    byte, inverse = fp8_scale(y, 1)
    tl.store(q_codes + t * RANK + at, e4m3_bytes(y * inverse[:, None], False), mask=inside)
    SCALES: tl.constexpr = (RANK + 127) // 128
    tl.store(q_scales + t * SCALES + group, byte.to(tl.uint8), mask=group < SCALES)


@triton.jit
def kv_latent(
    latent, kv_norm, cos, sin, fresh, memory, t, positions, sequences, first, lens, window_pages, window_first,
    row_stride, page_stride, pages, window_tokens, eps,
    RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, FRESH_ROW: tl.constexpr,
    GPU: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and pack the kv row of token ``t``, and keep it in the window."""
    position = tl.load(positions + t)
    real = position >= 0
    latent += t * row_stride
    WIDTH: tl.constexpr = NOPE + ROPE
    at = tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = at < WIDTH
    x = tl.where(real, tl.load(latent + RANK + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    weight = tl.load(kv_norm + at, mask=inside, other=0.0)
    pair = tl.arange(0, ROPE // 2)
    c = tl.load(cos + t * (ROPE // 2) + pair)
    s = tl.load(sin + t * (ROPE // 2) + pair)
    # Where the row goes.  first_kept_S = paging.first_S + paging.lens_S - window_tokens
    sequence = tl.load(sequences + t).to(tl.int64)
    kept = real & (position >= tl.load(first + sequence) + tl.load(lens + sequence) - window_tokens)
    index = position // PLACES - tl.load(window_first + sequence)
    page = tl.load(window_pages + sequence * pages + index, mask=kept, other=-1).to(tl.int64)
    # kv_TC = rope(rms_norm(latent_TK[:, rank:], kv_norm, eps), cos, sin)
    y = bf16(x * inverse_rms(x, eps, WIDTH) * weight, GPU)
    last = tl.arange(0, ROWS)[:, None] == NOPE // 64
    y = rotate(y, c[None, :], s[None, :], last, ROWS, 64, GPU)
    # fresh_TB = torch.cat(window.format.pack(kv_TC), -1); window.write(page * rows + position % rows, kv_TC)
    DATA: tl.constexpr = NOPE + 2 * ROPE
    SCALES: tl.constexpr = (NOPE // 64 + 7) // 8 * 8
    fresh += t * FRESH_ROW
    store_kv(y, fresh, fresh + DATA, t, ROWS, NOPE, ROPE)
    place = tl.maximum(position, 0) % PLACES
    home = memory + page * page_stride
    store_kv(y, home + place * DATA, home + PLACES * DATA + place * SCALES, page, ROWS, NOPE, ROPE)


@triton.jit(do_not_specialize=["pages"])
def _latent_kernel(
    latent, q_norm, kv_norm, cos, sin, q_codes, q_scales, fresh, memory,
    positions, sequences, first, lens, window_pages, window_first, row_stride, page_stride, pages, window_tokens, eps,
    RANK: tl.constexpr, QUERY_GROUPS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr,
    PLACES: tl.constexpr, FRESH_ROW: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    let_successor_in()
    t = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        query_latent(latent, q_norm, q_codes, q_scales, t, positions, row_stride, eps, RANK, QUERY_GROUPS, GPU)
    else:
        kv_latent(
            latent, kv_norm, cos, sin, fresh, memory, t, positions, sequences, first, lens, window_pages, window_first,
            row_stride, page_stride, pages, window_tokens, eps, RANK, NOPE, ROPE, ROWS, PLACES, FRESH_ROW, GPU,
        )  # fmt: skip


def latent_sizes(rank: int, fmt: Fp8Kv) -> dict[str, int]:
    """Return what kernels of the latents are compiled for; rows that start at 16 bytes are read faster."""
    return {
        "RANK": rank,
        "QUERY_GROUPS": triton.next_power_of_2(triton.cdiv(rank, 128)),
        "NOPE": fmt.nope,
        "ROPE": fmt.rope,
        "ROWS": triton.next_power_of_2(fmt.width // 64),
        "FRESH_ROW": triton.cdiv(fmt.data_bytes + fmt.scale_bytes, 16) * 16,
    }


def room_for_latents(latent_TK: Tensor, rank: int, fmt: Fp8Kv) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the query latents, their scales and the packed kv rows go."""
    tokens, device = latent_TK.shape[0], latent_TK.device
    assert fmt.nope % 64 == 0 and fmt.rope == 64, fmt
    assert latent_TK.dtype == torch.bfloat16 and latent_TK.shape[1] == rank + fmt.width and latent_TK.stride(1) == 1
    q_codes = torch.empty(tokens, rank, dtype=torch.float8_e4m3fn, device=device)
    q_scales = torch.empty(tokens, triton.cdiv(rank, 128), dtype=torch.uint8, device=device)
    fresh_TB = torch.empty(tokens, latent_sizes(rank, fmt)["FRESH_ROW"], dtype=torch.uint8, device=device)
    return q_codes, q_scales, fresh_TB[:, : fmt.data_bytes + fmt.scale_bytes]


def latent_norms_triton(
    latent_TK: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    window: RowStore,
    paging: Paging,
    window_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``latent.latent_norms``; the format is Fp8Kv with 64 rotated channels after a multiple of 64 others."""
    fmt, tokens, rank = window.format, latent_TK.shape[0], q_norm.shape[0]
    assert isinstance(fmt, Fp8Kv), fmt
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape == (tokens, fmt.rope // 2)
    q_codes, q_scales, fresh_TB = room_for_latents(latent_TK, rank, fmt)
    if tokens:
        _latent_kernel[(tokens, 2)](
            latent_TK,
            q_norm,
            kv_norm,
            cos,
            sin,
            q_codes.view(torch.uint8),
            q_scales,
            fresh_TB,
            window.memory,
            paging.positions_T,
            paging.sequence_T,
            paging.first_S,
            paging.lens_S,
            paging.window_SP,
            paging.window_first_S,
            latent_TK.stride(0),
            window.memory.stride(0),
            paging.window_SP.stride(0),
            window_tokens,
            eps,
            **latent_sizes(rank, fmt),
            PLACES=window.rows_per_page,
            GPU=on_gpu(latent_TK.device),
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=dependent_launch(latent_TK.device),
        )
    return q_codes, q_scales, fresh_TB
