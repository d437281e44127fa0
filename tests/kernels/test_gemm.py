"""Matrix products by row tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.gemm import ROW_TILE, matmul_rows


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("row_tile", [None, ROW_TILE, 5])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 63, 257])
def test_product_equals_float64(rows: int, row_tile: int | None) -> None:
    x, w = random(rows, 57), random(33, 57, seed=1)
    got = matmul_rows(x, w, row_tile)
    assert got.shape == (rows, 33)
    torch.testing.assert_close(got.double(), x.double() @ w.double().T, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("inner", "outer"), [(7, 3), (19, 40), (48, 20), (57, 33), (512, 24), (1024, 128), (2048, 61)])
def test_row_does_not_depend_on_the_others(inner: int, outer: int) -> None:
    """Whatever number of rows, whatever place in a tile, whatever address in memory."""
    x, w = random(90, inner), random(outer, inner, seed=1)
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
