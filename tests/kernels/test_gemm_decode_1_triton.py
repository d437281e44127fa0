"""Products of a single row against their references, and which products take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.gemm import ROW_TILE, fp8_linear, fp8_weight_linear
from dsv4lite.kernels.quantize import dequantize_fp8, quantize_fp8
from tests.kernels.tensors import DEVICE, ON_GPU, fp8_weights, random

triton = pytest.importorskip("triton")

from dsv4lite.kernels.counters import counters_of  # noqa: E402
from dsv4lite.kernels.gemm.decode_1_triton import (  # noqa: E402
    fp8_row,
    groups_row,
    pair_row,
    takes_fp8,
    takes_groups,
    takes_pair,
)
from dsv4lite.kernels.gemm.triton import (  # noqa: E402
    float_linear_triton,
    fp8_linear_triton,
    fp8_weight_linear_quantize_triton,
    fp8_weight_linear_triton,
    pair_linear_triton,
)

pytestmark = pytest.mark.kernel


def assert_rounded(got: Tensor, x: Tensor, xs: Tensor, w: Tensor, ws: Tensor) -> None:
    """Check an FP8 product for one rounding to bfloat16, and 2^-16 of the sums of absolute products."""
    wanted = fp8_linear.reference(x, xs, w, ws, torch.float32)
    sums = fp8_linear.reference(x.float().abs().to(x.dtype), xs, w.float().abs().to(w.dtype), ws, torch.float32)
    error = (got.float() - wanted).abs()
    assert got.dtype == torch.bfloat16 and bool((error <= 2**-8 * wanted.abs() + 2**-16 * sums).all()), error.max()


@pytest.mark.parametrize(
    ("outs", "inputs"), [(12, 256), (132, 384), (4, 2048), *([(4096, 8192), (1536, 4096), (7168, 16384)] if ON_GPU else [])]
)
def test_fp8_row_agrees_with_its_reference(outs: int, inputs: int) -> None:
    given = (*quantize_fp8(random(1, inputs), 128), *fp8_weights(outs, inputs))
    assert takes_fp8(given[0], *given[2:])
    got = fp8_row(*given, torch.bfloat16)
    assert_rounded(got, *given)
    assert torch.equal(fp8_row(*given, torch.float32).bfloat16(), got)
    assert torch.equal(fp8_row(*given, torch.bfloat16), got)


@pytest.mark.parametrize(
    ("groups", "outs", "inputs"), [(1, 128, 256), (3, 256, 384), *([(8, 1024, 4096), (16, 1024, 4096)] if ON_GPU else [])]
)
def test_groups_row_agrees_with_its_reference(groups: int, outs: int, inputs: int) -> None:
    x = random(2, groups, 2 * inputs).bfloat16()[1:, :, :inputs]
    w, ws = fp8_weights(groups, outs, inputs)
    assert takes_groups(x, w, ws)
    wanted = fp8_weight_linear.reference(x, w, ws).flatten(1)
    wanted_codes, _ = quantize_fp8.reference(wanted, 128)
    for _ in range(2):  # the second finds the counters as the first has left them
        codes, scales = groups_row(x, w, ws)
        got = dequantize_fp8(codes, scales, 128)
        # A last bit of bfloat16 before an e4m3 rounding: half a step of e4m3, and where that changes the code, a whole one.
        largest = wanted.float().view(-1, 128).abs().amax(1).repeat_interleave(128)[None]
        assert bool(((got - wanted.float()).abs() <= 2**-3 * wanted.float().abs() + 2**-9 * largest).all())
        same = (codes.view(torch.uint8) == wanted_codes.view(torch.uint8)).float().mean()
        assert same > 0.98, same
    assert not counters_of(DEVICE).any()


@pytest.mark.parametrize(
    ("fp8_outs", "outs", "inputs"),
    [(8, 12, 256), (132, 4, 1152), *([(1536, 2624, 4096), (4096, 256, 4096), (6144, 384, 7168)] if ON_GPU else [])],
)
def test_pair_row_agrees_with_its_reference(fp8_outs: int, outs: int, inputs: int) -> None:
    x, unquantized = random(1, inputs).bfloat16(), random(outs, inputs, seed=3).bfloat16()
    given = (*quantize_fp8(x, 128), *fp8_weights(fp8_outs, inputs))
    assert takes_pair(x, *given[2:], unquantized)
    quantized, exact = pair_row(x, *given, unquantized)
    assert_rounded(quantized, *given)
    wanted, sums = x.float() @ unquantized.float().T, x.float().abs() @ unquantized.float().abs().T
    assert bool(((exact - wanted).abs() <= 2**-16 * sums).all())


def test_others_are_left_to_tensor_cores() -> None:
    x, _ = quantize_fp8(random(2, 256), 128)
    w, ws = fp8_weights(128, 256)
    assert takes_fp8(x[:1], w, ws)
    assert not takes_fp8(x, w, ws), "two rows"
    assert not takes_fp8(x[:1, :128], *fp8_weights(128, 128)), "no longer than there are results"
    assert not takes_fp8(x[:1], *fp8_weights(127, 256)), "not a whole number of strips"
    assert not takes_fp8(x[:1], *fp8_weights(128, 256, per_row=True)), "scales of rows"
    assert not takes_pair(x[:1], w, ws, random(3, 256)), "not a whole number of strips"
    assert takes_groups(random(1, 2, 256), *fp8_weights(2, 128, 256))
    assert not takes_groups(random(1, 2, 256), *fp8_weights(2, 64, 256)), "blocks of results across groups"


def test_single_rows_take_these_kernels_unless_the_order_of_summation_is_fixed() -> None:
    x, grouped, unquantized = random(1, 256).bfloat16(), random(1, 2, 256).bfloat16(), random(4, 256, seed=3).bfloat16()
    row, groups = (*quantize_fp8(x, 128), *fp8_weights(128, 256)), (grouped, *fp8_weights(2, 128, 256))

    def same(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
        return all(torch.equal(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))

    assert same((fp8_linear_triton(*row),), (fp8_row(*row, torch.bfloat16),))
    assert same(pair_linear_triton(x, *row, unquantized), pair_row(x, *row, unquantized))
    assert same(fp8_weight_linear_quantize_triton(*groups), groups_row(*groups))
    # A fixed order is that of many rows.
    many = (*(each.expand(2, -1).contiguous() for each in row[:2]), *row[2:])
    fixed = pair_linear_triton(x, *row, unquantized, ROW_TILE)
    assert same(fixed[:1], (fp8_linear_triton(*many)[:1],))
    assert same(fixed[1:], (float_linear_triton(x.expand(2, -1)[:, None], unquantized[None], torch.float32)[:1, 0],))
    several = quantize_fp8(fp8_weight_linear_triton(grouped.expand(2, -1, -1).contiguous(), *groups[1:]).flatten(1), 128)
    assert same(fp8_weight_linear_quantize_triton(*groups, ROW_TILE), tuple(each[:1] for each in several))
