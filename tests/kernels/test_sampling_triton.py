"""The kernel of the best token against its reference, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.sampling import argmax_finite_ref

triton = pytest.importorskip("triton")

from dsv4lite.kernels.gemm_triton import counters_of  # noqa: E402
from dsv4lite.kernels.sampling_triton import PIECE, argmax_finite_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
INF, NAN = math.inf, math.nan
REAL = [(1, 129_280), (64, 129_280)] if CUDA else []


def same(logits: Tensor) -> None:
    top, token_ids, finite = argmax_finite_triton(logits.to(DEVICE))
    wanted_top, wanted_ids, wanted_finite = argmax_finite_ref(logits.cpu())
    assert torch.equal(top.cpu().view(torch.int32), wanted_top.view(torch.int32))
    assert torch.equal(token_ids.cpu(), wanted_ids) and torch.equal(finite.cpu(), wanted_finite)
    assert not counters_of(DEVICE).any()


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 5), (1, 1), (3, 7), (2, PIECE), (2, PIECE + 1), (5, 3 * PIECE - 1), *REAL])
def test_best_token_is_the_references(rows: int, vocabulary: int) -> None:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))
    same(logits)
    same(logits.round())  # ties
    same(-logits.abs())


def test_lowest_of_equal_tokens_wins_in_every_piece() -> None:
    logits = torch.full((6, 4 * PIECE), -1.0)
    for row, first in enumerate((0, 1, PIECE - 1, PIECE, 3 * PIECE, 4 * PIECE - 1)):
        logits[row, first:] = 2.5
    same(logits)


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_zeros_of_both_signs_are_equal(first: float) -> None:
    logits = torch.full((1, 2 * PIECE), -1.0)
    logits[0, 3], logits[0, 5], logits[0, PIECE + 2] = first, -first, 0.0
    same(logits)


def test_rows_that_cannot_be_sampled_from_say_so() -> None:
    logits = torch.randn(6, 2 * PIECE + 3, generator=torch.Generator().manual_seed(1))
    logits[0, PIECE + 7] = NAN
    logits[1, 4], logits[1, 2] = INF, NAN
    logits[2, 2 * PIECE] = INF
    logits[3] = -INF
    logits[4] = NAN
    logits[5, 0] = -INF
    same(logits)


def test_rows_of_a_wider_tensor_are_taken_as_they_are() -> None:
    wide = torch.randn(4, 3 * PIECE, generator=torch.Generator().manual_seed(2))
    same(wide[::2, 5 : PIECE + 50])
    same(wide[:, ::3])
