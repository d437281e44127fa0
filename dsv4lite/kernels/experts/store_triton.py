"""Kernel of ``store_matrix``: writes a checkpoint's rows into tiles, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import power_of_2
from dsv4lite.kernels.experts import HALF_ROWS, TILE_COLUMNS
from dsv4lite.kernels.quantize import e8m0_to_float


@triton.jit
def _store_tiles_kernel(
    weight, scale, codes, words, half, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr, FP4: tl.constexpr
):
    i = tl.arange(0, 32)
    if WHOLE:
        tile, half = tl.program_id(0) // 2, tl.program_id(0) % 2
        row = tile.to(tl.int64) * 64 + (i >> 3) * 16 + half * 8 + (i & 7)
    else:
        tile = tl.program_id(0)
        row = tile.to(tl.int64) * 32 + i
    chunk = tl.program_id(1)
    at = tile.to(tl.int64) * CHUNKS + chunk
    place_of_row = (i >> 3) * 16 + half * 8 + (i & 7)
    if FP4:
        # Reference: _fit_scales, scale_words
        group = tl.arange(0, GROUPS)[None, :]
        scale += row[:, None] * (CHUNKS * 4)
        largest = tl.max(tl.load(scale + group, mask=group < CHUNKS * 4, other=0).to(tl.int32), 1)
        base = tl.maximum(largest - 27, 0)[:, None]
        four = tl.arange(0, 4)[None, :]
        kept = tl.maximum(tl.load(scale + chunk * 4 + four).to(tl.int32), base + 1)
        tl.store(words + at * 64 + place_of_row, tl.sum(((kept - base) << 2 | (base >> (four * 2) & 3)) << (four * 8), 1))
        # Address bits of a 32-bit word in a piece: row 5-4, row 2-0, column 3-2, column 4, half. ``q`` has those of the columns.
        q = tl.arange(0, 16)[None, :]
        piece, column = q >> 3, (q & 1) * 16 + (q >> 1 & 3) * 4
        codes += at * 1024 + (i * 16 + half)[:, None] + piece * 512 + (q & 7) * 2
        n = tl.arange(0, 8)[None, None, :]
        place = (column + piece * 64)[:, :, None] + (n >> 2) * 32 + (n & 3)
        packed = tl.load(weight + row[:, None, None] * (CHUNKS * 64) + chunk * 64 + (place >> 1)).to(tl.int32)
        code = packed >> ((place & 1) * 4)
        own = tl.load(scale[:, :, None] + chunk * 4 + (place >> 5)).to(tl.int32)
        down = tl.minimum(tl.maximum(base[:, :, None] + 1 - own, 0), 5)
        # ``near`` is twice the magnitude over 2^down, rounded, ties to even. It is the new code, but 6 has code 5.
        m = code & 7
        twice = tl.where(m < 2, m, (2 | (m & 1)) << (tl.maximum(m >> 1, 1) - 1))
        floor = twice >> down
        rest, tie = twice - (floor << down), (1 << down) >> 1
        near = floor + ((rest > tie) | ((rest == tie) & (floor & 1 == 1))).to(tl.int32)
        m = tl.where(down > 0, tl.where(near == 6, 5, near), m)
        sign = (code >> 3 & 1) << ((n & 3) * 8 + tl.where(n < 4, 7, 3))
        tl.store(codes, tl.sum(m << (n * 4) | sign, 2))
    else:
        word = tl.arange(0, 32)[None, :]
        numbers = tl.load(weight + row[:, None] * (CHUNKS * 32) + chunk * 32 + word)
        tl.store(codes + at * 2048 + place_of_row[:, None] * 32 + word, numbers)
        tl.store(words + at * 2 + half, tl.load(scale + tl.min(row >> 7) * CHUNKS + chunk))


def store_matrix_triton(codes: Tensor, words: Tensor, weight: Tensor, scale: Tensor, half: int | None) -> None:
    """See ``experts.store_matrix``."""
    (rows, width), whole = weight.shape, half is None
    fp4 = weight.dtype in (torch.int8, torch.uint8)
    chunks = width * (2 if fp4 else 1) // TILE_COLUMNS
    assert codes.is_contiguous() and words.is_contiguous()
    assert codes.shape[:2] == (rows // (2 * HALF_ROWS if whole else HALF_ROWS), chunks), (codes.shape, weight.shape, half)
    numbers, scales = (torch.uint8, scale.view(torch.uint8)) if fp4 else (torch.int32, e8m0_to_float(scale).view(torch.int32))
    _store_tiles_kernel[(rows // HALF_ROWS, chunks)](
        weight.contiguous().view(numbers), scales.contiguous(), codes.view(torch.int32), words, half or 0,
        CHUNKS=chunks, GROUPS=power_of_2(chunks * 4), WHOLE=whole, FP4=fp4, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
