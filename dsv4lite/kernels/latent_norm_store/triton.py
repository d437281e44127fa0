"""Kernel of ``latent_norms``: two programs a token, one for each latent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div, power_of_2
from dsv4lite.kernels.e4m3 import e4m3_bytes
from dsv4lite.kernels.latent_norm_store import LatentInputs
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows import UnquantizedRow
from dsv4lite.kernels.rows.triton import (
    UNQUANTIZED,
    fp8_scale,
    inverse_rms,
    kind_of,
    memory_of,
    rotate,
    rounded,
    row_angles,
    store_row,
)


@triton.jit(do_not_specialize=["pages"])
def _latent_kernel(
    latent, q_norm, kv_norm, cos, sin, q, q_scales, fresh, memory,
    positions, sequences, first, lens, drafts, window_pages, window_first, row_stride, page_stride, pages, window_tokens, eps,
    RANK: tl.constexpr, QUERY_GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr,
    PLACES: tl.constexpr, FRESH_ROW: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    let_successor_in()
    FLOAT32: tl.constexpr = latent.dtype.element_ty == tl.float32
    t = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        real = tl.load(positions + t) >= 0
        latent += t * row_stride
        # quantize_fp8(rms_norm(latent_TK[:, :rank], q_norm, eps), QUERY_GROUP)
        group = tl.arange(0, QUERY_GROUPS)
        of_query = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        valid = of_query < RANK
        latent_q = tl.where(real, tl.load(latent + of_query, mask=valid, other=0.0).to(tl.float32), 0.0)
        weight_q = tl.load(q_norm + of_query, mask=valid, other=0.0)
        qr = rounded(latent_q * inverse_rms(latent_q, eps, RANK) * weight_q, FLOAT32)
        q += t * RANK
        if KIND == UNQUANTIZED:
            tl.store(q + of_query, qr.to(q.dtype.element_ty), mask=valid)
        else:
            byte, inverse = fp8_scale(qr, 1)
            tl.store(q + of_query, e4m3_bytes(qr * inverse[:, None], False), mask=valid)
            SCALES: tl.constexpr = (RANK + 127) // 128
            tl.store(q_scales + t * SCALES + group, byte.to(tl.uint8), mask=group < SCALES)
    else:
        position = tl.load(positions + t)
        real = position >= 0
        latent += t * row_stride
        at = tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :]
        inside = at < WIDTH
        x = tl.where(real, tl.load(latent + RANK + at, mask=inside, other=0.0).to(tl.float32), 0.0)
        weight = tl.load(kv_norm + at, mask=inside, other=0.0)
        c, s, turned = row_angles(cos + t * (ROPE // 2), sin + t * (ROPE // 2), WIDTH, ROWS, ROPE)
        # The row's page.  first_kept_S = paging.first_S + paging.lens_S - paging.drafts_S - window_tokens
        sequence = tl.load(sequences + t).to(tl.int64)
        end = tl.load(first + sequence) + tl.load(lens + sequence) - tl.load(drafts + sequence)
        kept = real & (position >= end - window_tokens)
        index = position // PLACES - tl.load(window_first + sequence)
        page = tl.load(window_pages + sequence * pages + index, mask=kept, other=-1).to(tl.int64)
        # kv_TC = rope(rms_norm(latent_TK[:, rank:], kv_norm, eps), cos, sin)
        y = rounded(x * inverse_rms(x, eps, WIDTH) * weight, FLOAT32)
        y = rotate(y, c, s, turned, ROWS, 64, FLOAT32)
        # pack_rows(window.format, kv_TC); window.write(page * rows + position % rows, kv_TC)
        store_row(y, fresh + t * FRESH_ROW, 0, t, WIDTH, ROPE, ROWS, 1, KIND)
        store_row(y, memory + page * page_stride, tl.maximum(position, 0) % PLACES, page, WIDTH, ROPE, ROWS, PLACES, KIND)


def latent_norms_triton(given: LatentInputs) -> tuple[Tensor, Tensor | None, Tensor]:
    """See ``latent_norms``. Packed rows have a multiple of 64 FP8 channels and 64 rotated ones."""
    latent_TK, q_norm, kv_norm, cos, sin, eps, window, paging, window_tokens = given
    fmt, (tokens, columns), rank, device = window.format, latent_TK.shape, q_norm.shape[0], latent_TK.device
    assert columns == rank + fmt.width and latent_TK.stride(1) == 1, latent_TK.shape
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape and len(cos) == tokens
    kind, memory, q_scales = kind_of(fmt), memory_of(window), None
    if isinstance(fmt, UnquantizedRow):
        assert fmt.dtype == latent_TK.dtype and 2 * cos.shape[1] <= fmt.width, (fmt, latent_TK.dtype)
        q_TR = codes = torch.empty(tokens, rank, dtype=fmt.dtype, device=device)
        fresh = torch.empty(tokens, fmt.width, dtype=fmt.dtype, device=device)
        fresh_TB = fresh.view(torch.uint8)
    else:
        assert latent_TK.dtype == torch.bfloat16 and 2 * cos.shape[1] == 64, (fmt, latent_TK.dtype)
        q_TR = torch.empty(tokens, rank, dtype=torch.float8_e4m3fn, device=device)
        codes = q_TR.view(torch.uint8)
        q_scales = torch.empty(tokens, ceil_div(rank, 128), dtype=torch.uint8, device=device)
        row = fmt.data_bytes + fmt.scale_bytes
        fresh = torch.empty(tokens, ceil_div(row, 16) * 16, dtype=torch.uint8, device=device)  # aligned rows are read faster
        fresh_TB = fresh[:, :row]
    if tokens:
        _latent_kernel[(tokens, 2)](
            latent_TK,
            q_norm,
            kv_norm,
            cos,
            sin,
            codes,
            codes if q_scales is None else q_scales,
            fresh,
            memory,
            paging.positions_T,
            paging.sequence_T,
            paging.first_S,
            paging.lens_S,
            paging.drafts_S,
            paging.window_SP,
            paging.window_first_S,
            latent_TK.stride(0),
            memory.stride(0),
            paging.window_SP.stride(0),
            window_tokens,
            eps,
            RANK=rank,
            QUERY_GROUPS=power_of_2(ceil_div(rank, 128)),
            WIDTH=fmt.width,
            ROPE=2 * cos.shape[1],
            ROWS=power_of_2(ceil_div(fmt.width, 64)),
            PLACES=window.rows_per_page,
            FRESH_ROW=fresh.shape[1],
            KIND=kind,
            num_warps=4,
            enable_fp_fusion=False,
            launch_pdl=dependent_launch(device),
        )
    return q_TR, q_scales, fresh_TB
