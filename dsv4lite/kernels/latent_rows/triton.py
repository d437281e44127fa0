"""Kernel of ``store_latent_rows``: two programs per token, one for the query latent and one for the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div, power_of_2
from dsv4lite.kernels.e4m3 import e4m3_bytes, to_bf16
from dsv4lite.kernels.latent_rows import LatentRowInputs
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows import LATENT_GROUP, Fp8Latent
from dsv4lite.kernels.rows.triton import fp8_scale, inverse_rms, memory_of, rounded


@triton.jit
def _normed(x, weight, at, eps, WIDTH: tl.constexpr, FLOAT32: tl.constexpr):
    """Return a normed vector of WIDTH channels as a tile with the channels ``at``; zeros from WIDTH on."""
    # Reference: rms_norm
    inside = at < WIDTH
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return rounded(y * inverse_rms(y, eps, WIDTH) * tl.load(weight + at, mask=inside, other=0.0), FLOAT32)


@triton.jit(do_not_specialize=["columns"])
def _latent_rows_kernel(
    latent, q_norm, kv_norm, cos, sin, q, memory, positions, sequences, grow, row_stride, columns, eps,
    RANK: tl.constexpr, RANK_GROUPS: tl.constexpr, LATENT: tl.constexpr, GROUPS: tl.constexpr, ROPE: tl.constexpr,
    PAIRS: tl.constexpr, ROW: tl.constexpr, PLACES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    let_successor_in()
    FLOAT32: tl.constexpr = latent.dtype.element_ty == tl.float32
    t = tl.program_id(0).to(tl.int64)
    latent += t * row_stride
    channel = tl.arange(0, 128)[None, :]
    if tl.program_id(1) == 1:
        at = tl.arange(0, RANK_GROUPS)[:, None] * 128 + channel
        y = _normed(latent, q_norm, at, eps, RANK if RANK > 0 else 1, FLOAT32)
        tl.store(q + t * RANK + at, y.to(q.dtype.element_ty), mask=at < RANK)
    else:
        position = tl.load(positions + t)
        if position >= 0:
            sequence = tl.load(sequences + t).to(tl.int64)
            page = tl.load(grow + sequence * columns + position // PLACES).to(tl.int64)
            row = memory + (page * PLACES + position % PLACES) * ROW
            latent += RANK
            group = tl.arange(0, GROUPS)
            at = group[:, None] * 128 + channel
            y = _normed(latent, kv_norm, at, eps, LATENT, FLOAT32)
            # Reference: rope
            pair = tl.arange(0, PAIRS)
            turned = pair < ROPE // 2
            c = tl.load(cos + t * (ROPE // 2) + pair, mask=turned, other=0.0)
            s = tl.load(sin + t * (ROPE // 2) + pair, mask=turned, other=0.0)
            a = tl.load(latent + LATENT + 2 * pair, mask=turned, other=0.0).to(tl.float32)
            b = tl.load(latent + LATENT + 2 * pair + 1, mask=turned, other=0.0).to(tl.float32)
            first, second = rounded(a * c - b * s, FLOAT32), rounded(a * s + b * c, FLOAT32)
            if FP8:
                # Reference: Fp8Latent.pack
                byte, inverse = fp8_scale(y, 1)
                tl.store(row + at, e4m3_bytes(y * inverse[:, None], False), mask=at < LATENT)
                tl.store((row + LATENT).to(tl.pointer_type(tl.int32)) + group, byte << 23, mask=group < LATENT // 128)
                tail = (row + LATENT + LATENT // 32).to(tl.pointer_type(tl.bfloat16)) + 2 * pair
                tl.store(tail, to_bf16(first), mask=turned)
                tl.store(tail + 1, to_bf16(second), mask=turned)
            else:
                tl.store(row + at, y.to(memory.dtype.element_ty), mask=at < LATENT)
                tl.store(row + LATENT + 2 * pair, first.to(memory.dtype.element_ty), mask=turned)
                tl.store(row + LATENT + 2 * pair + 1, second.to(memory.dtype.element_ty), mask=turned)


def _row_elements(fmt: object, memory: Tensor, places: int) -> tuple[int, bool]:
    """Return the number of elements of a row in ``memory``, and whether rows are FP8."""
    row, fp8 = memory.shape[1] // places, isinstance(fmt, Fp8Latent)
    assert not isinstance(fmt, Fp8Latent) or (fmt.latent % LATENT_GROUP == 0 and row == fmt.data_bytes), fmt
    return row, fp8


def store_latent_rows_triton(given: LatentRowInputs) -> Tensor | None:
    """See ``latent_rows.store_latent_rows``. The latent of FP8 rows must have a multiple of 128 channels."""
    latent_TK, q_norm, kv_norm, cos, sin, eps, rows, paging = given
    tokens, rank, latent, rope = len(latent_TK), 0 if q_norm is None else len(q_norm), len(kv_norm), 2 * cos.shape[1]
    memory = memory_of(rows)
    row, fp8 = _row_elements(rows.format, memory, rows.rows_per_page)
    assert latent_TK.shape[1] == rank + latent + rope and latent_TK.stride(1) == 1, latent_TK.shape
    assert rows.format.width == latent + rope and (fp8 or memory.dtype == latent_TK.dtype), (rows.format, latent_TK.dtype)
    assert cos.is_contiguous() and sin.is_contiguous() and len(cos) == len(sin) == tokens
    q_TR = torch.empty(tokens, rank, dtype=latent_TK.dtype, device=latent_TK.device)
    if tokens:
        _latent_rows_kernel[(tokens, 2 if rank else 1)](
            latent_TK, kv_norm if q_norm is None else q_norm, kv_norm, cos, sin, q_TR, memory,
            paging.positions_T, paging.sequence_T, paging.grow_SP, latent_TK.stride(0), paging.grow_SP.stride(0), eps,
            RANK=rank, RANK_GROUPS=power_of_2(ceil_div(max(rank, 1), 128)),
            LATENT=latent, GROUPS=power_of_2(ceil_div(latent, 128)),
            ROPE=rope, PAIRS=power_of_2(rope // 2), ROW=row, PLACES=rows.rows_per_page, FP8=fp8,
            num_warps=4, enable_fp_fusion=False, launch_pdl=dependent_launch(latent_TK.device),
        )  # fmt: skip
    return None if q_norm is None else q_TR
