"""Matrix products whose bits do not depend on how many rows share the call.

Library GEMMs pick their kernel, and so their order of summation, from the number of rows. With ``row_tile`` every product runs
in tiles of exactly that many rows (the last one padded), so that a row's result is a function of the row alone. The kernels keep
one order of summation per weight shape, whatever the number of rows, and need no tiles; without ``row_tile`` they sum single rows,
more than MANY_ROWS rows, and more than 128 rows by large bfloat16 weights, in orders of their own.

    fp8_linear          y = (codes_x * 2^s_x) @ (codes_w * 2^s_w).T      both in FP8, scales per 128 inputs
    fp8_weight_linear   y_g = x_g @ (codes_w_g * 2^s_w).T                only the weights in FP8, one product per group
    float_linear        y = x @ w.T                                      both unquantized
    fp8_weight_linear_quantize    the second, its results quantized as a row
    pair_linear         the first and the last, of the same rows         at the same time, up to MANY_ROWS rows

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

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.quantize import FP8_GROUP, dequantize_fp8, e8m0_to_float, quantize_fp8

ROW_TILE = 16
MANY_ROWS = 512  # above, kernels sum in one part if any order of summation is allowed


def matmul_rows(x_MK: Tensor, w_NK: Tensor, row_tile: int | None = None) -> Tensor:
    """Return ``x @ w.T`` [M, N] in the operands' dtype.

    Args:
        x_MK: Rows.
        w_NK: Weights, ``[out, in]``.
        row_tile: ``None`` leaves the order of summation to the library; a number makes each row independent of the others.
    """
    rows = x_MK.shape[0]
    if row_tile is None:
        return _linear(x_MK, w_NK)
    if rows == 0:
        return x_MK.new_empty(0, w_NK.shape[0])
    # MKL sums few outputs of a row in an order that depends on strides, and on the row's place unless inputs come in fours, or
    # outputs of transposed weights.
    if odd := -x_MK.shape[1] % 4:
        x_MK, w_NK = pad(x_MK, (0, odd)), pad(w_NK, (0, odd))
    elif len(w_NK) % 4:
        w_NK = w_NK.contiguous()
    padded = pad(x_MK, (0, 0, 0, -rows % row_tile)) if rows % row_tile else x_MK.contiguous()
    if len(padded) == row_tile:
        return _linear(padded, w_NK)[:rows]
    tiles = [_linear(tile, w_NK) for tile in padded.split(row_tile)]
    return torch.cat(tiles)[:rows]


def scale_rows(w_codes: Tensor, w_scales: Tensor) -> int:
    """Return how many rows of FP8 weights [..., N, K] share a row of their scales [S, ceil(K / 128)]: 128, or 1.

    One scale per row and 128 inputs is for fused matrices with a boundary inside a block of 128 rows.
    """
    rows, columns = w_codes.flatten(0, -2).shape
    count, blocks = w_scales.shape
    assert blocks == -(-columns // FP8_GROUP) and count in (rows, -(-rows // FP8_GROUP)), (w_codes.shape, w_scales.shape)
    return 1 if count == rows else FP8_GROUP


def dequantize_fp8_rows(w_codes: Tensor, w_scales: Tensor) -> Tensor:
    """Return float32 weights [..., N, K] from e4m3 codes and the scales of their rows (see ``scale_rows``), as bytes or float32."""
    flat = w_codes.flatten(0, -2)
    rows, columns = flat.shape
    per_row = e8m0_to_float(w_scales).repeat_interleave(scale_rows(w_codes, w_scales), 0)[:rows]
    return (flat.float() * per_row.repeat_interleave(FP8_GROUP, 1)[:, :columns]).view(w_codes.shape)


def _is_bf16(x: Tensor, *_: object, **__: object) -> bool:
    return x.dtype == torch.bfloat16


@op("gemm.triton:fp8_linear_triton")
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
        w_scales: uint8 e8m0, or float32, [ceil(N / 128), ceil(K / 128)] or [N, ceil(K / 128)].
        dtype: Of the result.
        row_tile: As for ``matmul_rows``; to kernels any number means the same.

    Returns:
        [M, N].
    """
    x = dequantize_fp8(x_codes, x_scales, FP8_GROUP)
    return matmul_rows(x, dequantize_fp8_rows(w_codes, w_scales), row_tile).to(dtype)


@op("gemm.triton:fp8_weight_linear_triton", suits=_is_bf16)
def fp8_weight_linear(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor, row_tile: int | None = None) -> Tensor:
    """Multiply each group's unquantized inputs by its quantized weights.

    Args:
        x_MGK: Float [M, G, K]; the kernel takes bfloat16.
        w_codes: float8_e4m3fn [G, N, K].
        w_scales: uint8 e8m0, of the rows [G * N] taken together: [ceil(G * N / 128), ceil(K / 128)] or [G * N, ceil(K / 128)].
        row_tile: As for ``fp8_linear``.

    Returns:
        [M, G, N] in the dtype of ``x``.
    """
    w_GNK = dequantize_fp8_rows(w_codes, w_scales)
    products = [matmul_rows(x_MGK[:, g].float(), w_NK, row_tile) for g, w_NK in enumerate(w_GNK)]
    return torch.stack(products, 1).to(x_MGK.dtype)


@op("gemm.triton:fp8_weight_linear_quantize_triton", suits=lambda x_MGK, *_, **__: _is_bf16(x_MGK) and len(x_MGK) == 1)
def fp8_weight_linear_quantize(
    x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize what ``fp8_weight_linear`` returns, one row in the same launch.

    Args:
        x_MGK, w_codes, w_scales, row_tile: As for ``fp8_weight_linear``.

    Returns:
        Codes float8_e4m3fn [M, G N] and scale bytes uint8 [M, ceil(G N / 128)].
    """
    return quantize_fp8(fp8_weight_linear(x_MGK, w_codes, w_scales, row_tile).flatten(1), FP8_GROUP)


@op("gemm.triton:float_linear_triton", suits=lambda x, w, *_, **__: _is_bf16(x) and _is_bf16(w))
def float_linear(x: Tensor, w: Tensor, dtype: torch.dtype, row_tile: int | None = None, *, out: Tensor | None = None) -> Tensor:
    """Multiply inputs by weights, or each group's by its own, accumulated in float32 whatever the operands and the result.

    Args:
        x: Float [M, K], or of groups [M, G, K]; the kernel takes bfloat16.
        w: Float [N, K], or of groups [G, N, K]; the kernel takes bfloat16.
        dtype: Of the result.
        row_tile: As for ``fp8_linear``.
        out: Where the result is wanted, contiguous.

    Returns:
        [M, N] or [M, G, N].
    """
    # The operands keep their dtype if it is that of the result; else float32 accumulates what is rounded once.
    wide = w.dtype if w.dtype in (dtype, torch.float32) else torch.float32
    x, w = x.to(wide), w.to(wide)
    if w.dim() == 2:
        result = matmul_rows(x, w, row_tile).to(dtype)
    else:
        result = torch.stack([matmul_rows(x[:, g], w_NK, row_tile) for g, w_NK in enumerate(w)], 1).to(dtype)
    return result if out is None else out.copy_(result)


@op("gemm.triton:pair_linear_triton", suits=lambda x_MK, *given: _is_bf16(x_MK) and _is_bf16(given[4]))
def pair_linear(
    x_MK: Tensor, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor, w_NK: Tensor, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Multiply the same rows by quantized and by unquantized weights: ``fp8_linear`` and ``float_linear``.

    With ``row_tile`` both products have the bits of these.

    Args:
        x_MK: Rows; the kernels take bfloat16.
        x_codes, x_scales: The same, quantized.
        w_codes, w_scales: Quantized weights.
        w_NK: Unquantized weights.
        row_tile: As for ``fp8_linear``.

    Returns:
        The product of quantized rows and weights in the dtype of ``x``, and the unquantized product in float32.
    """
    quantized = fp8_linear(x_codes, x_scales, w_codes, w_scales, x_MK.dtype, row_tile)
    return quantized, float_linear(x_MK, w_NK, torch.float32, row_tile)
