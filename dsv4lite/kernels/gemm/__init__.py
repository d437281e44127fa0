"""Matrix products whose bits do not depend on how many rows share the call.

Library GEMMs pick their kernel, and so their order of summation, from the number of rows. With ``row_tile`` every product runs
in tiles of exactly that many rows (the last one padded), so that a row's result is a function of the row alone. The kernels keep
one order of summation per weight shape, whatever the number of rows, and need no tiles; without ``row_tile`` the last two
products of many rows are the library's on every device, and single rows have kernels of their own.

    fp8_linear          y = (codes_x * 2^s_x) @ (codes_w * 2^s_w).T      both in FP8, scales per 128 inputs
    fp8_weight_linear   y_g = x_g @ (codes_w_g * 2^s_w).T                only the weights in FP8, one product per group
    float_linear        y = x @ w.T                                      both plain
    fp8_weight_linear_quantize    the second, its results quantized as a row
    pair_linear         the first and the last, of the same rows         one launch where these are few

Source: DeepSeek-V4 specification 4.1 and 4.4.  Numerics: products of 128 inputs are summed first, then scaled, then added, all in
float32; one rounding at the end. Kernels agree with the references to that rounding and a share of the sum of absolute products,
|x| @ |w|.T: 2^-16, or 2^-10 if both operands are FP8. FP8 tensor cores align the products that they add at a time, and the sum so
far, to the largest of them and keep 13 bits after its first: what they cut off grows with the products, however small the result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as _linear
from torch.nn.functional import pad

from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.quantize import FP8_GROUP, dequantize_fp8, e8m0_to_float, quantize_fp8

ROW_TILE = 16
PAIR_ROWS = 16  # at most, of two products in one launch
QUANTIZED_ROWS = 16  # at most, of a product whose kernel quantizes what it makes
LIBRARY_ROWS = 512  # above, kernels leave plain products to the library if any order of summation will do


def matmul_rows(x_MK: Tensor, w_NK: Tensor, row_tile: int | None = None) -> Tensor:
    """Return ``x @ w.T`` [M, N] in the operands' dtype.

    Args:
        x_MK: Rows.
        w_NK: Weights, ``[out, in]``.
        row_tile: ``None`` leaves the order of summation to the library; a number makes each row independent of the others.
    """
    rows = x_MK.shape[0]
    if row_tile is None or rows == row_tile:
        return _linear(x_MK, w_NK)
    if rows == 0:
        return x_MK.new_empty(0, w_NK.shape[0])
    padded = pad(x_MK, (0, 0, 0, -rows % row_tile)) if rows % row_tile else x_MK
    tiles = [_linear(tile, w_NK) for tile in padded.contiguous().split(row_tile)]
    return torch.cat(tiles)[:rows]


def scale_rows(w_codes: Tensor, w_scales: Tensor) -> int:
    """Return how many rows of FP8 weights [..., N, K] share a row of their scales [S, ceil(K / 128)]: 128, or 1.

    One scale per row and 128 inputs is for fused matrices with a border inside a block of 128 rows.
    """
    rows, columns = w_codes.flatten(0, -2).shape
    count, blocks = w_scales.shape
    assert blocks == -(-columns // FP8_GROUP) and count in (rows, -(-rows // FP8_GROUP)), (w_codes.shape, w_scales.shape)
    return 1 if count == rows else FP8_GROUP


def dequantize_fp8_rows(w_codes: Tensor, w_scales: Tensor) -> Tensor:
    """Return float32 weights [..., N, K] from e4m3 codes and the scale bytes uint8 of their rows (see ``scale_rows``)."""
    flat = w_codes.flatten(0, -2)
    rows, columns = flat.shape
    per_row = e8m0_to_float(w_scales).repeat_interleave(scale_rows(w_codes, w_scales), 0)[:rows]
    return (flat.float() * per_row.repeat_interleave(FP8_GROUP, 1)[:, :columns]).view(w_codes.shape)


def fp8_linear_ref(
    x_codes: Tensor,
    x_scales: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    row_tile: int | None = None,
) -> Tensor:
    """See ``fp8_linear``: dequantize both, multiply in float32, round once."""
    x = dequantize_fp8(x_codes, x_scales, FP8_GROUP)
    return matmul_rows(x, dequantize_fp8_rows(w_codes, w_scales), row_tile).to(dtype)


def fp8_linear(
    x_codes: Tensor,
    x_scales: Tensor,
    w_codes: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    row_tile: int | None = None,
) -> Tensor:
    """Multiply quantized rows by quantized weights.

    Args:
        x_codes: float8_e4m3fn [M, K].
        x_scales: uint8 [M, ceil(K / 128)], e8m0.
        w_codes: float8_e4m3fn [N, K].
        w_scales: uint8 [ceil(N / 128), ceil(K / 128)] or [N, ceil(K / 128)], e8m0.
        dtype: Of the result.
        row_tile: As for ``matmul_rows``; the kernel does without.

    Returns:
        [M, N].
    """
    if use_triton(x_codes):
        from dsv4lite.kernels.gemm.decode_1_triton import fp8_row, takes_fp8
        from dsv4lite.kernels.gemm.triton import fp8_linear_triton

        if row_tile is None and takes_fp8(x_codes, w_codes, w_scales):
            return fp8_row(x_codes, x_scales, w_codes, w_scales, dtype)
        return fp8_linear_triton(x_codes, x_scales, w_codes, w_scales, dtype)
    return fp8_linear_ref(x_codes, x_scales, w_codes, w_scales, dtype, row_tile)


def fp8_weight_linear_ref(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor, row_tile: int | None = None) -> Tensor:
    """See ``fp8_weight_linear``: dequantize the weights, multiply in float32, round once."""
    w_GNK = dequantize_fp8_rows(w_codes, w_scales)
    products = [matmul_rows(x_MGK[:, g].float(), w_NK, row_tile) for g, w_NK in enumerate(w_GNK)]
    return torch.stack(products, 1).to(x_MGK.dtype)


def fp8_weight_linear(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor, row_tile: int | None = None) -> Tensor:
    """Multiply each group's plain inputs by its quantized weights.

    Args:
        x_MGK: bfloat16 [M, G, K].
        w_codes: float8_e4m3fn [G, N, K].
        w_scales: uint8 e8m0, of the rows [G * N] taken together: [ceil(G * N / 128), ceil(K / 128)] or [G * N, ceil(K / 128)].
        row_tile: As for ``matmul_rows``; to the kernel any number means the same.

    Returns:
        [M, G, N] in the dtype of ``x``.
    """
    if use_triton(x_MGK) and x_MGK.dtype == torch.bfloat16:
        from dsv4lite.kernels.gemm.triton import fp8_weight_linear_triton

        return fp8_weight_linear_triton(x_MGK, w_codes, w_scales, any_order=row_tile is None)
    return fp8_weight_linear_ref(x_MGK, w_codes, w_scales, row_tile)


def fp8_weight_linear_quantize_ref(
    x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """See ``fp8_weight_linear_quantize``."""
    return quantize_fp8.reference(fp8_weight_linear_ref(x_MGK, w_codes, w_scales, row_tile).flatten(1), FP8_GROUP)


def fp8_weight_linear_quantize(
    x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize what ``fp8_weight_linear`` returns, with its bits: few rows in the same launch.

    Args:
        x_MGK, w_codes, w_scales, row_tile: As for ``fp8_weight_linear``.

    Returns:
        Codes float8_e4m3fn [M, G N] and scale bytes uint8 [M, ceil(G N / 128)].
    """
    few = 0 < len(x_MGK) <= QUANTIZED_ROWS and w_codes.shape[1] % FP8_GROUP == 0
    if few and x_MGK.dtype == torch.bfloat16 and use_triton(x_MGK):
        from dsv4lite.kernels.gemm.decode_1_triton import groups_row, takes_groups
        from dsv4lite.kernels.gemm.triton import fp8_weight_linear_quantize_triton

        if row_tile is None and takes_groups(x_MGK, w_codes, w_scales):
            return groups_row(x_MGK, w_codes, w_scales)
        return fp8_weight_linear_quantize_triton(x_MGK, w_codes, w_scales)
    return quantize_fp8(fp8_weight_linear(x_MGK, w_codes, w_scales, row_tile).flatten(1), FP8_GROUP)


def float_linear_ref(x_MGK: Tensor, w_GNK: Tensor, dtype: torch.dtype, row_tile: int | None = None) -> Tensor:
    """See ``float_linear``: widen both unless they have the dtype of the result, multiply, round once."""
    wide = w_GNK.dtype if w_GNK.dtype in (dtype, torch.float32) else torch.float32
    products = [matmul_rows(x_MGK[:, g].to(wide), w_NK.to(wide), row_tile) for g, w_NK in enumerate(w_GNK)]
    return (products[0][:, None] if len(products) == 1 else torch.stack(products, 1)).to(dtype)


def float_linear(
    x_MGK: Tensor, w_GNK: Tensor, dtype: torch.dtype, row_tile: int | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply each group's inputs by its weights, accumulated in float32 whatever the operands and the result.

    Args:
        x_MGK: Float [M, G, K].
        w_GNK: Float [G, N, K].
        dtype: Of the result.
        row_tile: As for ``matmul_rows``; to the kernel, which takes bfloat16 operands, any number means the same.
        out: Where the result is wanted, contiguous.

    Returns:
        [M, G, N].
    """
    if use_triton(x_MGK) and x_MGK.dtype == w_GNK.dtype == torch.bfloat16:
        from dsv4lite.kernels.gemm.triton import float_linear_triton

        return float_linear_triton(x_MGK, w_GNK, dtype, any_order=row_tile is None, out=out)
    result = float_linear_ref(x_MGK, w_GNK, dtype, row_tile)
    return result if out is None else out.copy_(result)


def pair_linear_ref(
    x_MK: Tensor, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor, w_NK: Tensor, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """See ``pair_linear``."""
    quantized = fp8_linear_ref(x_codes, x_scales, w_codes, w_scales, x_MK.dtype, row_tile)
    return quantized, float_linear_ref(x_MK[:, None], w_NK[None], torch.float32, row_tile)[:, 0]


def pair_linear(
    x_MK: Tensor, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor, w_NK: Tensor, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Multiply the same rows by quantized and by plain weights: ``fp8_linear`` and ``float_linear``, with their bits.

    Args:
        x_MK: Rows, bfloat16.
        x_codes, x_scales: The same, quantized.
        w_codes, w_scales: Quantized weights.
        w_NK: Plain weights.
        row_tile: As for ``matmul_rows``; the kernel does without.

    Returns:
        The product of quantized rows and weights in the dtype of ``x``, and the plain product in float32.
    """
    if use_triton(x_MK) and 0 < len(x_MK) <= PAIR_ROWS and x_MK.dtype == w_NK.dtype == torch.bfloat16:
        from dsv4lite.kernels.gemm.decode_1_triton import pair_row, takes_pair
        from dsv4lite.kernels.gemm.pair_triton import pair_linear_triton

        if row_tile is None and takes_pair(x_MK, w_codes, w_scales, w_NK):
            return pair_row(x_MK, x_codes, x_scales, w_codes, w_scales, w_NK)
        return pair_linear_triton(x_MK, x_codes, x_scales, w_codes, w_scales, w_NK)
    quantized = fp8_linear(x_codes, x_scales, w_codes, w_scales, x_MK.dtype, row_tile)
    return quantized, float_linear(x_MK[:, None], w_NK[None], torch.float32, row_tile)[:, 0]
