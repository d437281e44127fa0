"""The kernels of the best token, bit for bit, and of log-probabilities against their references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.sampling import argmax_finite, token_logprobs
from tests.kernels.tensors import DEVICE, ON_GPU

triton = pytest.importorskip("triton")

from dsv4lite.kernels.counters import counters_of  # noqa: E402
from dsv4lite.kernels.sampling.triton import PIECE, argmax_finite_triton, token_logprobs_triton  # noqa: E402

pytestmark = pytest.mark.kernel

INF, NAN = math.inf, math.nan
REAL = [(1, 129_280), (64, 129_280)] if ON_GPU else []


def same(logits: Tensor) -> None:
    top, token_ids, finite = argmax_finite_triton(logits.to(DEVICE))
    wanted_top, wanted_ids, wanted_finite = argmax_finite.reference(logits.cpu())
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


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 5), (1, 1), (3, 7), (2, PIECE), (2, PIECE + 1), (5, 3 * PIECE - 1), *REAL])
def test_log_probabilities_are_the_references(rows: int, vocabulary: int) -> None:
    logits = 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))
    logits[:, ::3] = logits[:, ::3].round()  # ties
    logits[:, 5:][:, ::11] = -INF
    token_ids = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(1))
    k = min(vocabulary, 9)
    found = [x.cpu() for x in token_logprobs_triton(logits.to(DEVICE), token_ids.to(DEVICE), k)]
    _, ranks, best, _ = token_logprobs.reference(logits, token_ids, k)
    assert torch.equal(found[1], ranks) and torch.equal(found[2], best)
    exact = logits.double().log_softmax(-1)
    for one, ids in ((found[0][:, None], token_ids[:, None]), (found[3], best.long())):
        torch.testing.assert_close(one.double(), exact.gather(-1, ids), rtol=1e-6, atol=1e-5)
    assert not counters_of(DEVICE).any()


def test_a_score_does_not_depend_on_its_neighbours_or_its_stride() -> None:
    logits = torch.randn(7, 2 * PIECE + 9, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    token_ids = torch.arange(7, device=DEVICE) * 501
    whole = token_logprobs_triton(logits, token_ids, 3)
    for row in range(7):
        alone = token_logprobs_triton(logits[row : row + 1, :].clone(), token_ids[row : row + 1], 3)
        assert all(torch.equal(one, every[row : row + 1]) for one, every in zip(alone, whole, strict=True))
    wide = torch.cat([logits, logits], 1)[:, : logits.shape[1]]
    assert all(torch.equal(one, other) for one, other in zip(token_logprobs_triton(wide, token_ids, 3), whole, strict=True))
