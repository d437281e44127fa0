"""Entering of few tokens in one launch against the references, and the sum over experts that it takes on the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts.decode_small import ExpertSum, sum_experts_ref
from dsv4lite.kernels.hc import FEW_TOKENS, FEW_WIDTH, HcMix, hc_collapse_ref, hc_head_ref, hc_leave_enter_ref, hc_sums
from dsv4lite.kernels.norm import rms_norm_ref
from dsv4lite.kernels.quantize import quantize_fp8_ref
from tests.kernels.test_hc_triton import (
    DEVICE,
    EPS,
    ON_GPU,
    assert_rounded,
    pending_of,
    poison,
    random,
    streams_of,
    weights_of,
)

pytest.importorskip("triton")

from dsv4lite.kernels.gemm.triton import COUNTERS, counters_of
from dsv4lite.kernels.hc.decode_small_triton import enter_few_triton, room_of, sizes_of

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures(poison.__name__)]

OPTIONS = {"iters": 20 if ON_GPU else 2, "eps": EPS, "norm_eps": EPS}
SHAPES = [(2, 260)]
if ON_GPU:
    SHAPES += [(1, 4096), (16, 4096), (7, 7168)]


def test_there_is_room_for_what_programs_send_each_other() -> None:
    widest = max(range(32, FEW_WIDTH + 1, 32), key=lambda width: room_of(sizes_of(1, width, gpu=True)))
    assert FEW_TOKENS * room_of(sizes_of(1, widest, gpu=True)) <= COUNTERS


def entered(x: Tensor, pending: tuple[Tensor | ExpertSum, HcMix] | None, *, fp8: bool = True) -> tuple[Tensor, ...]:
    """Return the streams, the sub-layer's input, its codes and scales, ``post`` and ``comb``."""
    width = x.shape[2]
    left = None if pending is None else (pending[0], *pending[1])
    found = enter_few_triton(x, left, *weights_of(width), 1 + random(width, seed=8, scale=0.3), **OPTIONS, fp8=fp8)
    assert not counters_of(x.device).any(), "the next kernel would take these numbers for its own"
    return found


def assert_agrees(found: tuple[Tensor, ...], x: Tensor, pending: tuple[Tensor, HcMix] | None) -> None:
    left, got, codes, scales, post, comb = found
    width = x.shape[2]
    w, norm = weights_of(width), 1 + random(width, seed=8, scale=0.3)
    assert_rounded(left, hc_leave_enter_ref(x, pending, w.fn)[0])
    sums = hc_sums(left.cpu(), w.fn.cpu()).to(DEVICE)
    expected, mix = hc_collapse_ref(left, sums, w.base, w.scale, norm, **OPTIONS)
    assert_rounded(got, expected, units=2)
    torch.testing.assert_close(post, mix.post, rtol=0, atol=1e-5)
    torch.testing.assert_close(comb, mix.comb, rtol=0, atol=1e-5)
    wanted_codes, wanted_scales = quantize_fp8_ref(got[: len(codes)], 128)
    assert torch.equal(codes, wanted_codes.view(torch.uint8)) and torch.equal(scales, wanted_scales)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_entering_agrees_with_the_references(tokens: int, width: int) -> None:
    x, pending = streams_of(tokens, width), pending_of(tokens, width)
    assert_agrees(entered(x, pending), x, pending)


def test_head_agrees_with_the_reference() -> None:
    x, w = streams_of(2, 4096 if ON_GPU else 100), weights_of(4096 if ON_GPU else 100, head=True)
    norm = 1 + random(x.shape[2], seed=8, scale=0.3)
    _, got, *others = enter_few_triton(x, None, *w, norm, iters=0, eps=EPS, norm_eps=EPS, fp8=False)
    assert not counters_of(x.device).any() and not any(tensor.numel() for tensor in others)
    assert_rounded(got, rms_norm_ref(hc_head_ref(x, w, eps=EPS, norm_eps=EPS), norm, EPS), units=2)


def test_entering_without_leaving_returns_the_streams_and_zeros_arrive() -> None:
    """Memory that nobody has written is zero, too: a sum of nothing is sent as -0."""
    x = streams_of(2, 64)
    x[0] = 0.0
    found = entered(x, None, fp8=False)
    assert found[0] is x and not found[1][0].any() and found[2].numel() == found[3].numel() == 0
    assert_agrees(found, x, None)


@pytest.mark.skipif(not ON_GPU, reason="NumPy warns of what the interpreter does with NaN")
def test_numbers_that_are_not_finite_arrive() -> None:
    x = streams_of(3, 64)
    expected = entered(x, None)
    x[2, 1, 5] = torch.nan
    got = entered(x, None)
    assert all(torch.equal(a[:2], b[:2]) for a, b in zip(got[1:], expected[1:], strict=True))
    assert all(tensor[2].isnan().all() for tensor in (got[1], *got[4:]))


@pytest.mark.parametrize("width", [100, 4096] if ON_GPU else [100])
def test_few_tokens_sum_experts_on_the_way(width: int) -> None:
    """To the bit; where there is no expert, nothing is added of what has not been written."""
    x, (y, mix) = streams_of(2, width), pending_of(2, width)
    outputs = torch.empty(2, 3, width, dtype=torch.bfloat16, device=DEVICE)
    chosen = torch.tensor([[0, 2, 9], [9] * 3], device=DEVICE)
    outputs[chosen < 9] = random(2, width, seed=9).bfloat16()
    parts = ExpertSum(chosen, outputs, y, 9)
    assert outputs.isnan().any() and sum_experts_ref(parts).isfinite().all()
    got, expected = (entered(x, (each, mix)) for each in (parts, sum_experts_ref(parts)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("width", [640, 4096] if ON_GPU else [100])
def test_every_number_of_tokens_gives_the_same_bits(width: int) -> None:
    tokens = 16 if ON_GPU else 3
    x, (y, mix) = streams_of(tokens, width), pending_of(tokens, width)
    expected = entered(x, (y, mix))
    part = slice(1, tokens - 1)
    got = entered(x[part], (y[part], HcMix(mix.post[part], mix.comb[part])))
    assert all(torch.equal(a, b[part]) for a, b in zip(got, expected, strict=True))
