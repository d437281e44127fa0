"""Hyper-connections against float64, line by line as the specification has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels import hc
from dsv4lite.kernels.gemm import ROW_TILE
from dsv4lite.kernels.hc import (
    HcInputs,
    HcMix,
    HcSettings,
    HcWeights,
    has_kernel,
    hc_enter,
    hc_expand,
    hc_head,
    hc_project,
    hc_split,
    sinkhorn,
    suits_decode_small,
    weighted_sum,
)
from dsv4lite.kernels.quantize import quantize_fp8
from tests.kernels.tensors import CPU, assert_independent
from tests.kernels.tensors import cpu_random as random

ITERS, EPS = 20, 1e-6
SETTINGS = HcSettings(ITERS, EPS, EPS)
COUNTS = (0, 1, 2, 63, 257)


def weights_of(streams: int, width: int, *, head: bool = False, device: torch.device = CPU) -> HcWeights:
    rows = streams if head else streams * (streams + 2)
    fn = random(rows, streams * width, seed=1, scale=(streams * width) ** -0.5, device=device)
    return HcWeights(fn, random(rows, seed=2, device=device), 1 + random(1 if head else 3, seed=3, scale=0.2, device=device))


def sinkhorn_of(m: Tensor, iters: int) -> Tensor:
    m = m / (m.sum(-2, keepdim=True) + EPS)
    for _ in range(iters - 1):
        m = m / (m.sum(-1, keepdim=True) + EPS)
        m = m / (m.sum(-2, keepdim=True) + EPS)
    return m


def coefficients(x: Tensor, w: HcWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre, post and comb in float64."""
    n = x.shape[1]
    z = x.double().flatten(1)
    m = (z / (z.square().mean(-1, keepdim=True) + EPS).sqrt()) @ w.fn.double().T
    scale, base = w.scale.double(), w.base.double()
    pre = (m[:, :n] * scale[0] + base[:n]).sigmoid() + EPS
    post = 2 * (m[:, n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
    comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + EPS
    return pre, post, sinkhorn_of(comb, ITERS)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("row_tile", [None, ROW_TILE])
def test_coefficients_equal_the_formula(count: int, streams: int, row_tile: int | None) -> None:
    x, w = random(count, streams, 48, scale=3.0), weights_of(streams, 48)
    got = hc_split(hc_project(x, w.fn, EPS, row_tile), w.base, w.scale, ITERS, EPS)
    for ours, expected in zip(got, coefficients(x, w), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_sinkhorn_equals_the_formula_even_for_uneven_matrices(iters: int) -> None:
    mix = (8 * random(63, 4, 4)).softmax(-1) + EPS
    torch.testing.assert_close(sinkhorn(mix, iters, EPS).double(), sinkhorn_of(mix.double(), iters), rtol=1e-5, atol=1e-7)


def test_sinkhorn_leaves_columns_normalised() -> None:
    mix = random(63, 4, 4).softmax(-1) + EPS
    done = sinkhorn(mix, ITERS, EPS)
    assert (done.sum(1) - 1).abs().max() < 5e-6 and (done.sum(2) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("count", COUNTS)
def test_entering_equals_the_formula(count: int) -> None:
    """The pending output is written, then the streams are summed by ``pre`` and normed."""
    x, y, w, norm = random(count, 4, 48), random(count, 48, seed=5), weights_of(4, 48), 1 + random(48, seed=8, scale=0.3)
    mix = HcMix(random(count, 4, seed=6).sigmoid(), random(count, 4, 4, seed=7).softmax(-1))
    written = mix.post.double()[..., None] * y.double()[:, None] + torch.einsum("tjk,tjd->tkd", mix.comb.double(), x.double())
    torch.testing.assert_close(hc_expand(y, x, mix).double(), written, rtol=0, atol=2e-6)
    got = hc_enter(HcInputs(x, (y, mix), w, norm, SETTINGS))
    assert torch.equal(got.streams_TND, hc_expand(y, x, mix)) and got.rounded is None
    assert got.mix is not None and hc_enter(HcInputs(x, None, w, norm, SETTINGS)).streams_TND is x
    pre, post, comb = coefficients(got.streams_TND, w)
    summed = (pre[..., None] * got.streams_TND.double()).sum(1)
    expected = summed / (summed.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    torch.testing.assert_close(got.x_TD.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(got.mix.post.double(), post, rtol=0, atol=3e-6)
    torch.testing.assert_close(got.mix.comb.double(), comb, rtol=0, atol=3e-6)


@pytest.mark.parametrize("row_tile", [None, ROW_TILE])
def test_entering_quantizes_what_it_returns(row_tile: int | None) -> None:
    x, w, norm = random(5, 4, 320).bfloat16(), weights_of(4, 320), 1 + random(320, seed=8, scale=0.3)
    unquantized, got = (hc_enter(HcInputs(x, None, w, norm, SETTINGS, quantize, row_tile)) for quantize in (False, True))
    assert unquantized.mix is not None and got.mix is not None
    assert torch.equal(got.x_TD, unquantized.x_TD) and all(torch.equal(a, b) for a, b in zip(got.mix, unquantized.mix, strict=True))
    codes, scales = quantize_fp8(unquantized.x_TD, 128)
    assert got.rounded is not None and torch.equal(got.rounded[0].float(), codes.float())
    assert torch.equal(got.rounded[1], scales) and scales.shape == (5, 3)


def test_kernels_of_their_own_are_for_four_streams_in_bfloat16() -> None:
    assert has_kernel(torch.bfloat16, 4)
    assert not has_kernel(torch.float32, 4) and not has_kernel(torch.bfloat16, 2)


def test_few_tokens_of_four_streams_in_bfloat16_are_entered_in_one_launch() -> None:
    x = torch.empty(16, 4, 64, dtype=torch.bfloat16)
    assert suits_decode_small(x, None) and suits_decode_small(x[:1], None)
    assert not any(suits_decode_small(*given) for given in ((x, ROW_TILE), (x.float(), None), (x[:0], None), (x[:, :2], None)))
    assert not suits_decode_small(torch.cat([x, x]), None)
    assert not suits_decode_small(torch.empty(1, 4, 8448, dtype=torch.bfloat16), None)


def test_programs_that_wait_never_fill_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that they wait for might find no place: on small chips fewer tokens enter in one launch."""
    x = torch.empty(16, 4, 7168, dtype=torch.bfloat16)
    for multiprocessors, most in ((132, 16), (46, 6), (8, 1), (7, 0)):  # a token has one program that mixes and 14 that collapse
        monkeypatch.setattr(hc, "multiprocessors_of", lambda device, count=multiprocessors: count)
        assert [tokens for tokens in range(1, 17) if suits_decode_small(x[:tokens], None)] == list(range(1, most + 1))


@pytest.mark.parametrize("count", COUNTS)
def test_head_equals_the_formula(count: int) -> None:
    x, w, norm = random(count, 4, 48), weights_of(4, 48, head=True), 1 + random(48, seed=8, scale=0.3)
    z = x.double().flatten(1)
    m = (z / (z.square().mean(-1, keepdim=True) + EPS).sqrt()) @ w.fn.double().T
    gate = (m * w.scale.double() + w.base.double()).sigmoid() + EPS
    got = hc_head(x, w, None, EPS, EPS).double()
    torch.testing.assert_close(got, (gate[..., None] * x.double()).sum(1), rtol=0, atol=5e-6)
    normed = got / (got.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    torch.testing.assert_close(hc_head(x, w, norm, EPS, EPS).double(), normed, rtol=0, atol=5e-6)


def test_bfloat16_streams_round_once() -> None:
    x, y = random(63, 4, 48).to(torch.bfloat16), random(63, 48, seed=5).to(torch.bfloat16)
    mix = HcMix(random(63, 4, seed=6).sigmoid(), random(63, 4, 4, seed=7).softmax(-1))
    assert torch.equal(hc_expand(y, x, mix), hc_expand(y.float(), x.float(), mix).to(torch.bfloat16))
    assert torch.equal(weighted_sum(x, mix.post), weighted_sum(x.float(), mix.post).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [20, 48, 512])
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype, width: int) -> None:
    x, y, w = random(100, 4, width).to(dtype), random(100, width, seed=5).to(dtype), weights_of(4, width)
    norm = 1 + random(width, seed=8, scale=0.3)
    head = weights_of(4, width, head=True)

    def run(part: slice) -> list[Tensor]:
        entered = hc_enter(HcInputs(x[part], None, w, norm, SETTINGS, row_tile=ROW_TILE))
        assert entered.mix is not None
        left = hc_expand(y[part], x[part], entered.mix)
        return [entered.x_TD, *entered.mix, left, hc_head(left, head, None, EPS, EPS, ROW_TILE)]

    assert_independent(run, counts=(1, 2, 5, 16, 23))
