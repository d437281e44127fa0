"""Products of a few rows by whole strips of the weights against their references, and who takes them."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels import gemm
from dsv4lite.kernels.gemm import fp8_linear_ref, fp8_weight_linear_quantize, fp8_weight_linear_ref, pair_linear
from dsv4lite.kernels.quantize import quantize_fp8, quantize_fp8_ref
from tests.kernels.test_gemm_row_triton import CUDA, DEVICE, assert_rounded, random, weights

triton = pytest.importorskip("triton")

from dsv4lite.kernels.gemm_few_triton import (  # noqa: E402
    FEW_ROWS,
    groups_few,
    pair_few,
    takes_groups,
    takes_pair,
)
from dsv4lite.kernels.gemm_pair_triton import pair_linear_triton  # noqa: E402
from dsv4lite.kernels.gemm_triton import (  # noqa: E402
    counters_of,
    fp8_weight_linear_quantize_triton,
)

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize(
    ("rows", "groups", "outs", "inputs"),
    [(2, 2, 128, 256), (5, 1, 256, 512), *([(8, 8, 1024, 4096), (4, 16, 1024, 4096)] if CUDA else [])],
)
def test_groups_of_few_rows_agree_with_their_reference(rows: int, groups: int, outs: int, inputs: int) -> None:
    x = random(rows, groups, 2 * inputs).bfloat16()[..., :inputs]
    w, ws = weights(groups, outs, inputs)
    assert takes_groups(x, w, ws)
    for _ in range(2):  # the second finds the counters as the first has left them
        codes, scales = groups_few(x, w, ws)
        wanted_codes, wanted_scales = quantize_fp8_ref(fp8_weight_linear_ref(x, w, ws).flatten(1), 128)
        # Where a last bit of bfloat16 changes the code, or a block's largest number passes a power of two.
        assert (codes.view(torch.uint8) == wanted_codes.view(torch.uint8)).float().mean() > 0.98
        assert (scales == wanted_scales).float().mean() > 0.98 and bool(((scales.int() - wanted_scales.int()).abs() <= 1).all())
    assert not counters_of(DEVICE).any()


@pytest.mark.parametrize(
    ("rows", "fp8_outs", "outs", "inputs"),
    [(3, 32, 16, 512), *([(8, 1536, 2624, 4096), (2, 4096, 256, 4096), (8, 6144, 384, 7168)] if CUDA else [])],
)
def test_pairs_of_few_rows_agree_with_their_reference(rows: int, fp8_outs: int, outs: int, inputs: int) -> None:
    x = random(rows, inputs).bfloat16()
    rounded = quantize_fp8(x, 128)
    w, ws = weights(fp8_outs, inputs)
    plain = random(outs, inputs, seed=3).bfloat16()
    assert takes_pair(x, w, ws, plain)
    quantized, exact = pair_few(x, *rounded, w, ws, plain)
    sums = fp8_linear_ref(rounded[0].float().abs().to(w.dtype), rounded[1], w.float().abs().to(w.dtype), ws, torch.float32)
    assert_rounded(quantized, fp8_linear_ref(*rounded, w, ws, torch.float32), sums)
    bound = 2**-16 * (x.float().abs() @ plain.float().abs().T)
    assert bool(((exact - x.float() @ plain.float().T).abs() <= bound).all())
    alone = pair_few(x[1:2], rounded[0][1:2], rounded[1][1:2], w, ws, plain)
    assert torch.equal(alone[0], quantized[1:2]) and torch.equal(alone[1], exact[1:2]), "a row depends on its neighbours"


def test_others_are_left_to_wider_tiles() -> None:
    x, (w, ws) = random(FEW_ROWS + 1, 512), weights(128, 512)
    few, plain = x[:2], random(16, 512)
    assert takes_pair(few, w, ws, plain)
    assert not takes_pair(x, w, ws, plain), "too many rows"
    assert not takes_pair(x[:0], w, ws, plain), "no rows"
    assert not takes_pair(few[:, :384], *weights(128, 384), random(16, 384)), "blocks of inputs left over"
    assert not takes_pair(few, *weights(120, 512), plain), "not a whole number of strips"
    assert not takes_pair(few, w, ws, plain[:8]), "not a whole number of plain strips"
    assert not takes_pair(few, *weights(128, 512, per_row=True), plain), "scales of rows"
    assert takes_groups(random(2, 2, 512), *weights(2, 128, 512))
    assert not takes_groups(random(2, 2, 512), *weights(2, 64, 512)), "blocks of results across groups"


def test_fixed_orders_of_summation_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "use_triton", lambda x: True)
    x = random(2, 512).bfloat16()
    rounded, (w, ws), plain = quantize_fp8(x, 128), weights(128, 512), random(16, 512, seed=3).bfloat16()
    grouped, (g, gs) = random(2, 2, 512).bfloat16(), weights(2, 128, 512)
    for tile, fixed in ((16, pair_linear_triton), (None, pair_few)):
        both = zip(pair_linear(x, *rounded, w, ws, plain, tile), fixed(x, *rounded, w, ws, plain), strict=True)
        assert all(torch.equal(a, b) for a, b in both)
    for tile, many in ((16, fp8_weight_linear_quantize_triton), (None, groups_few)):
        quantized = zip(fp8_weight_linear_quantize(grouped, g, gs, tile), many(grouped, g, gs), strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in quantized)
