"""FP8 codes made inside kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.quantize import quantize_fp8
from tests.kernels.tensors import DEVICE

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from dsv4lite.kernels.dispatch import compiled, on_gpu  # noqa: E402
from dsv4lite.kernels.e4m3 import e4m3_bytes, fp8_scale_bits, fp8_scaled, has_e4m3, native_e4m3, to_bf16  # noqa: E402

pytestmark = pytest.mark.kernel


@triton.jit
def quantize_rows(x, codes, scales, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, 128)
    y = tl.load(x + row[:, None] * 128 + column[None, :])
    bits = fp8_scale_bits(y)
    tl.store(codes + row[:, None] * 128 + column[None, :], e4m3_bytes(fp8_scaled(y, bits), NATIVE and has_e4m3()))
    tl.store(scales + row, (bits >> 23).to(tl.uint8))


@pytest.mark.parametrize("native", [False, True])
def test_codes_and_scales_are_the_references(native: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator) * torch.exp2(torch.randint(-30, 20, (64, 1), generator=generator))
    x[0] = 0.0
    x[1] = torch.arange(128) / 2**9 - 0.1  # ties, and codes below the normal ones
    x[1, 0] = 448.0
    x[2, 1:] = torch.ldexp(x[2, 1:], torch.tensor(-14))
    x = x.to(DEVICE)
    codes, scales = torch.empty(64, 128, dtype=torch.uint8, device=DEVICE), torch.empty(64, dtype=torch.uint8, device=DEVICE)
    quantize_rows[(1,)](x, codes, scales, ROWS=64, NATIVE=native)
    expected, expected_scales = quantize_fp8(x, 128)
    assert torch.equal(scales, expected_scales[:, 0]) and torch.equal(codes, expected.view(torch.uint8))


@triton.jit
def round_all(x, y):
    at = tl.arange(0, 1024)
    tl.store(y + at, to_bf16(tl.load(x + at)))


@triton.jit
def answer(y):
    tl.store(y, 1.0 if compiled() else 0.0)
    tl.store(y + 1, 1.0 if has_e4m3() else 0.0)


def test_kernels_ask_whether_they_are_compiled_and_have_e4m3() -> None:
    """``asked_by_kernels`` makes a constant of each answer."""
    y = torch.full((2,), float("nan"), device=DEVICE)
    answer[(1,)](y)
    assert y.tolist() == [on_gpu(y.device), native_e4m3(y)]


def test_bfloat16_is_the_nearest() -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    x[:512] = x[:512].bfloat16().float() * (1 + 2**-8)  # near ties
    x[512:768] = (x[512:768].view(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)  # ties
    x = x.to(DEVICE)
    y = torch.full((1024,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    round_all[(1,)](x, y)
    assert torch.equal(y, x.bfloat16())
