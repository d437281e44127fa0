"""Matrix products by row tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.gemm import (
    ROW_TILE,
    dequantize_fp8_rows,
    float_linear,
    fp8_linear,
    fp8_weight_linear,
    fp8_weight_linear_quantize,
    matmul_rows,
    pair_linear,
    scale_rows,
)
from dsv4lite.kernels.quantize import dequantize_matrix, quantize_fp8, round_fp8
from tests.kernels.tensors import cpu_random as random


@pytest.mark.parametrize("row_tile", [None, ROW_TILE, 5])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 63, 257])
def test_product_equals_float64(rows: int, row_tile: int | None) -> None:
    x, w = random(rows, 57), random(33, 57, seed=1)
    got = matmul_rows(x, w, row_tile)
    assert got.shape == (rows, 33)
    torch.testing.assert_close(got.double(), x.double() @ w.double().T, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("inner", "outer"), [(7, 3), (57, 8), (24, 5), (19, 40), (48, 20), (57, 33), (512, 24), (1024, 128), (2048, 61)]
)
def test_row_does_not_depend_on_the_others(inner: int, outer: int) -> None:
    """Whatever number of rows, whatever place in a tile, whatever address in memory."""
    x, weights = random(90, inner), random(outer, inner, seed=1)
    for w in (weights, weights.t().contiguous().t()):
        everything = matmul_rows(x, w, ROW_TILE)
        for a in (*range(17), 33, 74, 89):
            for count in (1, 2, 15, 16, 17, 32, 57):
                part = x[a : a + count]
                assert torch.equal(matmul_rows(part, w, ROW_TILE), everything[a : a + count]), (a, count)


def test_nan_stays_in_its_row() -> None:
    x, w = random(20, 48), random(24, 48, seed=1)
    clean = matmul_rows(x, w, ROW_TILE)
    x[7] = float("nan")
    got = matmul_rows(x, w, ROW_TILE)
    assert got[7].isnan().all() and torch.equal(got[:7], clean[:7]) and torch.equal(got[8:], clean[8:])


def test_rows_of_a_wider_matrix_are_taken_as_they_are() -> None:
    wide, w = random(40, 96), random(24, 48, seed=1)
    for row_tile in (None, ROW_TILE):
        assert torch.equal(matmul_rows(wide[:, 48:], w, row_tile), matmul_rows(wide[:, 48:].contiguous(), w, row_tile))
    tile = wide[:ROW_TILE, 48:]
    assert torch.equal(matmul_rows(tile, w[:7], ROW_TILE), matmul_rows(wide[:, 48:], w[:7], ROW_TILE)[:ROW_TILE])


# FP8 weights ------------------------------------------------------------------------------------------


def codes(*shape: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return FP8 codes and scale bytes of the blocks of 128 x 128 of their rows."""
    rows = torch.Size(shape[:-1]).numel()
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(117, 124, (-(-rows // 128), -(-shape[-1] // 128)), generator=generator, dtype=torch.uint8)
    return random(*shape, seed=seed).to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("shape", [(300, 140), (128, 128), (1, 5), (3, 70, 130)])
def test_weights_widen_as_in_the_checkpoint_whichever_way_scales_lie(shape: tuple[int, ...]) -> None:
    w_codes, scales = codes(*shape)
    rows = torch.Size(shape[:-1]).numel()
    wanted = dequantize_matrix(w_codes.flatten(0, -2), scales.view(torch.float8_e8m0fnu)).view(shape)
    assert torch.equal(dequantize_fp8_rows(w_codes, scales), wanted)
    per_row = scales.repeat_interleave(128, 0)[:rows]
    assert scale_rows(w_codes, per_row) == 1 and (rows == 1 or scale_rows(w_codes, scales) == 128)
    assert torch.equal(dequantize_fp8_rows(w_codes, per_row), wanted)


@pytest.mark.parametrize("row_tile", [None, ROW_TILE])
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_fp8_product_is_that_of_the_rounded_numbers(rows: int, row_tile: int | None) -> None:
    x, (w_codes, scales) = random(rows, 140).bfloat16(), codes(33, 140)
    wanted = matmul_rows(round_fp8(x, 128).float(), dequantize_fp8_rows(w_codes, scales), row_tile)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(fp8_linear(*quantize_fp8(x, 128), w_codes, scales, dtype, row_tile), wanted.to(dtype))


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_groups_are_multiplied_by_their_own_weights(rows: int) -> None:
    x, (w_codes, scales) = random(rows, 3, 140).bfloat16(), codes(3, 50, 140)
    w = dequantize_fp8_rows(w_codes, scales)
    wanted = torch.stack([x[:, g].float() @ w[g].T for g in range(3)], 1)
    got = fp8_weight_linear(x, w_codes, scales, ROW_TILE)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wanted, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(float_linear(x, w, torch.float32, ROW_TILE), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_products_of_groups_are_quantized_as_one_row(rows: int) -> None:
    x, (w_codes, scales) = random(rows, 3, 140).bfloat16(), codes(3, 50, 140)
    wanted = quantize_fp8(fp8_weight_linear(x, w_codes, scales, ROW_TILE).flatten(1), 128)
    for got, want in zip(fp8_weight_linear_quantize(x, w_codes, scales, ROW_TILE), wanted, strict=True):
        assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_float_product_of_bfloat16_keeps_float32_results() -> None:
    x, w = random(5, 1, 512).bfloat16(), random(1, 24, 512, seed=1).bfloat16()
    got = float_linear(x, w, torch.float32)
    assert not torch.equal(got, got.bfloat16().float())
    torch.testing.assert_close(got[:, 0].double(), x[:, 0].double() @ w[0].double().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_put_where_it_is_wanted(dtype: torch.dtype) -> None:
    x, w = random(3, 1, 40).to(dtype), random(1, 7, 40, seed=1).to(dtype)
    room = torch.full((5, 1, 7), -1.0)
    got = float_linear(x, w, torch.float32, out=room[:3])
    assert got.data_ptr() == room.data_ptr() and torch.equal(got, float_linear(x, w, torch.float32))
    assert bool((room[3:] == -1).all())


@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_pair_multiplies_by_each(rows: int) -> None:
    rng = torch.Generator().manual_seed(rows)
    x, plain = torch.randn(rows, 256, generator=rng).bfloat16(), torch.randn(24, 256, generator=rng).bfloat16()
    codes, scales = torch.randn(40, 256, generator=rng).to(torch.float8_e4m3fn), torch.tensor([[118, 121]], dtype=torch.uint8)
    given = (x, *quantize_fp8(x, 128), codes, scales, plain)
    first, second = pair_linear(*given)
    assert torch.equal(first, fp8_linear(*given[1:5]))
    assert second.dtype == torch.float32 and second.shape == (rows, 24)
    torch.testing.assert_close(second, x.float() @ plain.float().T)
