"""Hyper-connections against float64, line by line as the specification has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.gemm import ROW_TILE
from dsv4lite.kernels.hc import (
    HcMix,
    HcWeights,
    has_kernel,
    hc_collapse,
    hc_collapse_quantize,
    hc_enter_few,
    hc_expand,
    hc_head,
    hc_head_norm,
    hc_leave_enter,
    hc_project,
    hc_split,
    hc_sums,
    sinkhorn,
    sinkhorn_scalar,
    suits_few,
    weighted_sum,
)
from dsv4lite.kernels.quantize import quantize_fp8

ITERS, EPS = 20, 1e-6
COUNTS = (0, 1, 2, 63, 257)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(streams: int, width: int, *, head: bool = False) -> HcWeights:
    rows = streams if head else streams * (streams + 2)
    fn = random(rows, streams * width, seed=1, scale=(streams * width) ** -0.5)
    return HcWeights(fn, random(rows, seed=2), 1 + random(1 if head else 3, seed=3, scale=0.2))


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
@pytest.mark.parametrize("project", [sinkhorn, sinkhorn_scalar])
def test_sinkhorn_equals_the_formula_even_for_uneven_matrices(project, iters: int) -> None:
    mix = (8 * random(63, 4, 4)).softmax(-1) + EPS
    torch.testing.assert_close(project(mix, iters, EPS).double(), sinkhorn_of(mix.double(), iters), rtol=1e-5, atol=1e-7)


def test_sinkhorn_leaves_columns_normalised() -> None:
    mix = random(63, 4, 4).softmax(-1) + EPS
    done = sinkhorn(mix, ITERS, EPS)
    assert (done.sum(1) - 1).abs().max() < 5e-6 and (done.sum(2) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("count", COUNTS)
def test_inexact_coefficients_differ_in_the_last_bits_only(count: int) -> None:
    x, w = random(count, 4, 48), weights_of(4, 48)
    projected = hc_project(x, w.fn, EPS)
    with torch.no_grad():
        exact = hc_split(projected, w.base, w.scale, ITERS, EPS)
        other = hc_split(projected, w.base, w.scale, ITERS, EPS, exact=False)
    for a, b in zip(exact, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", COUNTS)
def test_leaving_and_entering_equal_the_formula(count: int) -> None:
    x, y, w = random(count, 4, 48), random(count, 48, seed=5), weights_of(4, 48)
    mix = HcMix(random(count, 4, seed=6).sigmoid(), random(count, 4, 4, seed=7).softmax(-1))
    expected = mix.post.double()[..., None] * y.double()[:, None] + torch.einsum("tjk,tjd->tkd", mix.comb.double(), x.double())
    torch.testing.assert_close(hc_expand(y, x, mix).double(), expected, rtol=0, atol=2e-6)
    streams, sums = hc_leave_enter(x, (y, mix), w.fn, EPS)
    assert torch.equal(streams, hc_expand(y, x, mix)) and torch.equal(sums, hc_sums(streams, w.fn))
    assert hc_leave_enter(x, None, w.fn, EPS)[0] is x


@pytest.mark.parametrize("count", COUNTS)
def test_collapse_sums_by_pre_and_norms(count: int) -> None:
    x, w, norm = random(count, 4, 48), weights_of(4, 48), 1 + random(48, seed=8, scale=0.3)
    pre, post, comb = coefficients(x, w)
    summed = (pre[..., None] * x.double()).sum(1)
    expected = summed / (summed.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    got, mix = hc_collapse(x, hc_sums(x, w.fn), w.base, w.scale, norm, iters=ITERS, eps=EPS, norm_eps=EPS)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(mix.post.double(), post, rtol=0, atol=3e-6)
    torch.testing.assert_close(mix.comb.double(), comb, rtol=0, atol=3e-6)


def test_sums_may_come_in_parts() -> None:
    x, w, norm = random(5, 4, 48), weights_of(4, 48), 1 + random(48, seed=8, scale=0.3)
    sums = hc_sums(x, w.fn)
    options = {"iters": ITERS, "eps": EPS, "norm_eps": EPS}
    whole, mix = hc_collapse(x, sums, w.base, w.scale, norm, **options)
    halves, mix_of_halves = hc_collapse(x, torch.cat([0.25 * sums, 0.75 * sums]), w.base, w.scale, norm, **options)
    torch.testing.assert_close(halves, whole)
    torch.testing.assert_close(mix_of_halves, mix)


def test_collapse_quantizes_what_it_returns() -> None:
    x, w, norm = random(5, 4, 320).bfloat16(), weights_of(4, 320), 1 + random(320, seed=8, scale=0.3)
    given, options = (x, hc_sums(x, w.fn), w.base, w.scale, norm), {"iters": ITERS, "eps": EPS, "norm_eps": EPS}
    expected, mix = hc_collapse(*given, **options)
    entered, codes, scales, same_mix = hc_collapse_quantize(*given, **options)
    assert torch.equal(entered, expected) and all(torch.equal(a, b) for a, b in zip(same_mix, mix, strict=True))
    wanted_codes, wanted_scales = quantize_fp8(expected, 128)
    assert torch.equal(codes.float(), wanted_codes.float()) and torch.equal(scales, wanted_scales) and scales.shape == (5, 3)


def test_entering_few_is_leaving_projecting_and_collapse() -> None:
    x, y, w = random(3, 4, 320).bfloat16(), random(3, 320, seed=5).bfloat16(), weights_of(4, 320)
    mix, norm = HcMix(random(3, 4, seed=6).sigmoid(), random(3, 4, 4, seed=7).softmax(-1)), 1 + random(320, seed=8, scale=0.3)
    options = {"iters": ITERS, "eps": EPS, "norm_eps": EPS}
    streams, entered, rounded, returned = hc_enter_few(x, (y, mix), w, norm, **options, quantize=True)
    left, sums = hc_leave_enter(x, (y, mix), w.fn, EPS)
    wanted, codes, scales, wanted_mix = hc_collapse_quantize(left, sums, w.base, w.scale, norm, **options)
    assert rounded is not None
    got = (streams, entered, rounded[0].float(), rounded[1], *returned)
    assert all(torch.equal(a, b) for a, b in zip(got, (left, wanted, codes.float(), scales, *wanted_mix), strict=True))
    alone, _, plain, _ = hc_enter_few(x, None, w, norm, **options, quantize=False)
    assert alone is x and plain is None


def test_few_tokens_of_four_streams_in_bfloat16_are_entered_at_once() -> None:
    x = torch.empty(16, 4, 64, dtype=torch.bfloat16)
    assert suits_few(x, None) and suits_few(x[:1], None)
    assert not any((suits_few(x, ROW_TILE), suits_few(x.float(), None), suits_few(x[:0], None), suits_few(x[:, :2], None)))
    assert not suits_few(torch.cat([x, x]), None) and not suits_few(torch.empty(1, 4, 8448, dtype=torch.bfloat16), None)


@pytest.mark.parametrize("count", COUNTS)
def test_head_equals_the_formula(count: int) -> None:
    x, w = random(count, 4, 48), weights_of(4, 48, head=True)
    z = x.double().flatten(1)
    m = (z / (z.square().mean(-1, keepdim=True) + EPS).sqrt()) @ w.fn.double().T
    gate = (m * w.scale.double() + w.base.double()).sigmoid() + EPS
    torch.testing.assert_close(
        hc_head(x, w, eps=EPS, norm_eps=EPS).double(), (gate[..., None] * x.double()).sum(1), rtol=0, atol=5e-6
    )


def test_head_is_normed_by_what_comes_of_it() -> None:
    x, w, norm = random(3, 4, 48), weights_of(4, 48, head=True), 1 + random(48, seed=8, scale=0.3)
    summed = hc_head(x, w, eps=EPS, norm_eps=EPS).double()
    expected = summed / (summed.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    torch.testing.assert_close(hc_head_norm(x, w, norm, eps=EPS, norm_eps=EPS).double(), expected, rtol=0, atol=5e-6)


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
        sums = hc_sums(x[part], w.fn, ROW_TILE)
        entered, mix = hc_collapse(x[part], sums, w.base, w.scale, norm, iters=ITERS, eps=EPS, norm_eps=EPS)
        left = hc_expand(y[part], x[part], mix)
        return [sums[0], entered, mix.post, mix.comb, left, hc_head(left, head, eps=EPS, norm_eps=EPS, row_tile=ROW_TILE)]

    everything = run(slice(0, 100))
    for a in range(0, 100, 7):
        for count in (1, 2, 5, 16, 23):
            for got, expected in zip(run(slice(a, a + count)), everything, strict=True):
                assert torch.equal(got, expected[a : a + count])


def test_kernels_are_for_four_streams_in_bfloat16() -> None:
    assert has_kernel(torch.bfloat16, 4)
    assert not has_kernel(torch.float32, 4) and not has_kernel(torch.bfloat16, 2)
