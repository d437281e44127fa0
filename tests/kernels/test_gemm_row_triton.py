"""Products of a single row against their references, and who takes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels import gemm
from dsv4lite.kernels.gemm import (
    fp8_linear,
    fp8_linear_ref,
    fp8_weight_linear_quantize,
    fp8_weight_linear_quantize_ref,
    fp8_weight_linear_ref,
    pair_linear,
    pair_linear_ref,
)
from dsv4lite.kernels.quantize import dequantize_fp8, quantize_fp8

triton = pytest.importorskip("triton")

from dsv4lite.kernels.gemm.decode_1_triton import (  # noqa: E402
    fp8_row,
    groups_row,
    pair_row,
    takes_fp8,
    takes_groups,
    takes_pair,
)
from dsv4lite.kernels.gemm.pair_triton import pair_linear_triton  # noqa: E402
from dsv4lite.kernels.gemm.triton import counters_of, fp8_linear_triton, fp8_weight_linear_quantize_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weights(*shape: int, per_row: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes that differ from block to block."""
    rows = torch.Size(shape[:-1]).numel()
    scales = (rows if per_row else -(-rows // 128), -(-shape[-1] // 128))
    generator = torch.Generator().manual_seed(1)
    return random(*shape, seed=2).to(torch.float8_e4m3fn), torch.randint(
        117, 124, scales, generator=generator, dtype=torch.uint8
    ).to(DEVICE)


def assert_rounded(got: Tensor, wanted: Tensor, sums: Tensor) -> None:
    """Check for one rounding to bfloat16, and 2^-16 of the sums of absolute products."""
    error = (got.float() - wanted.float()).abs()
    assert bool((error <= 2**-8 * wanted.float().abs() + 2**-16 * sums).all()), error.max()


@pytest.mark.parametrize(
    ("outs", "inputs"), [(12, 256), (132, 384), (4, 2048), *([(4096, 8192), (1536, 4096), (7168, 16384)] if CUDA else [])]
)
def test_fp8_row_agrees_with_its_reference(outs: int, inputs: int) -> None:
    x, xs = quantize_fp8(random(1, inputs), 128)
    w, ws = weights(outs, inputs)
    assert takes_fp8(x, w, ws)
    got = fp8_row(x, xs, w, ws, torch.bfloat16)
    sums = fp8_linear_ref(x.float().abs().to(x.dtype), xs, w.float().abs().to(w.dtype), ws, torch.float32)
    assert got.dtype == torch.bfloat16
    assert_rounded(got, fp8_linear_ref(x, xs, w, ws, torch.float32), sums)
    wide = fp8_row(x, xs, w, ws, torch.float32)
    assert torch.equal(wide.bfloat16(), got)
    assert torch.equal(fp8_row(x, xs, w, ws, torch.bfloat16), got)


@pytest.mark.parametrize(
    ("groups", "outs", "inputs"), [(1, 128, 256), (3, 256, 384), *([(8, 1024, 4096), (16, 1024, 4096)] if CUDA else [])]
)
def test_groups_row_agrees_with_its_reference(groups: int, outs: int, inputs: int) -> None:
    x = random(2, groups, 2 * inputs).bfloat16()[1:, :, :inputs]
    w, ws = weights(groups, outs, inputs)
    assert takes_groups(x, w, ws)
    for _ in range(2):  # the second finds the counters as the first has left them
        codes, scales = groups_row(x, w, ws)
        wanted = fp8_weight_linear_ref(x, w, ws).flatten(1)
        got = dequantize_fp8(codes, scales, 128)
        # A last bit of bfloat16 before an e4m3 rounding: half a step of e4m3, and where that changes the code, a whole one.
        largest = wanted.float().view(-1, 128).abs().amax(1).repeat_interleave(128)[None]
        assert bool(((got - wanted.float()).abs() <= 2**-3 * wanted.float().abs() + 2**-9 * largest).all())
        same = (codes.view(torch.uint8) == fp8_weight_linear_quantize_ref(x, w, ws)[0].view(torch.uint8)).float().mean()
        assert same > 0.98, same
    assert not counters_of(DEVICE).any()


@pytest.mark.parametrize(
    ("fp8_outs", "outs", "inputs"),
    [(8, 12, 256), (132, 4, 1152), *([(1536, 2624, 4096), (4096, 256, 4096), (6144, 384, 7168)] if CUDA else [])],
)
def test_pair_row_agrees_with_its_reference(fp8_outs: int, outs: int, inputs: int) -> None:
    x = random(1, inputs).bfloat16()
    rounded = quantize_fp8(x, 128)
    w, ws = weights(fp8_outs, inputs)
    plain = random(outs, inputs, seed=3).bfloat16()
    assert takes_pair(x, w, ws, plain)
    quantized, exact = pair_row(x, *rounded, w, ws, plain)
    _, wanted = pair_linear_ref(x, *rounded, w, ws, plain)
    sums = fp8_linear_ref(rounded[0].float().abs().to(w.dtype), rounded[1], w.float().abs().to(w.dtype), ws, torch.float32)
    assert_rounded(quantized, fp8_linear_ref(*rounded, w, ws, torch.float32), sums)
    bound = 2**-16 * (x.float().abs() @ plain.float().abs().T)
    assert bool(((exact - wanted).abs() <= bound).all())


def test_others_are_left_to_tensor_cores() -> None:
    x, _ = quantize_fp8(random(2, 256), 128)
    w, ws = weights(128, 256)
    groups, group_scales = weights(2, 128, 256)
    assert takes_fp8(x[:1], w, ws)
    assert not takes_fp8(x, w, ws), "two rows"
    assert not takes_fp8(x[:1, :128], *weights(128, 128)), "no longer than there are results"
    assert not takes_fp8(x[:1], *weights(127, 256)), "not a whole number of strips"
    assert not takes_fp8(x[:1], *weights(128, 256, per_row=True)), "scales of rows"
    assert not takes_pair(x[:1], w, ws, random(3, 256)), "not a whole number of strips"
    assert takes_groups(random(1, 2, 256), groups, group_scales)
    assert not takes_groups(random(1, 2, 256), *weights(2, 64, 256)), "blocks of results across groups"


def test_fixed_orders_of_summation_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "use_triton", lambda x: True)
    x = random(1, 256).bfloat16()
    rounded, (w, ws), plain = quantize_fp8(x, 128), weights(128, 256), random(4, 256, seed=3).bfloat16()
    grouped, (g, gs) = random(1, 2, 256).bfloat16(), weights(2, 128, 256)
    assert torch.equal(fp8_linear(*rounded, w, ws, row_tile=16), fp8_linear_triton(*rounded, w, ws))
    assert torch.equal(fp8_linear(*rounded, w, ws), fp8_row(*rounded, w, ws, torch.bfloat16))
    for got, fixed in ((16, pair_linear_triton), (None, pair_row)):
        both = zip(pair_linear(x, *rounded, w, ws, plain, got), fixed(x, *rounded, w, ws, plain), strict=True)  # type: ignore[operator]
        assert all(torch.equal(a, b) for a, b in both)
    several = random(2, 256).bfloat16()
    both = zip(
        pair_linear(several, *quantize_fp8(several, 128), w, ws, plain),
        pair_linear_triton(several, *quantize_fp8(several, 128), w, ws, plain),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in both)
    for tile, fixed in ((16, fp8_weight_linear_quantize_triton), (None, groups_row)):
        quantized = zip(fp8_weight_linear_quantize(grouped, g, gs, tile), fixed(grouped, g, gs), strict=True)  # type: ignore[operator]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in quantized)
