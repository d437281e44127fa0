"""The parts of kernels that write rows, each in a kernel of its own, against the references: every bit."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.quantize import e2m1_codes as e2m1_codes_ref
from dsv4lite.kernels.quantize import e2m1_values, hadamard, quantize_fp4, quantize_fp8
from dsv4lite.kernels.rope import rope
from dsv4lite.kernels.rows import Fp4Key, Fp8Key, Fp8Kv, RowFormat, RowStore, UnquantizedRow
from tests.kernels.tensors import DEVICE

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from dsv4lite.kernels.rows.triton import (  # noqa: E402
    bf16,
    e2m1_codes,
    e2m1_round,
    fp4_scale,
    fp8_scale,
    hadamard_rows,
    inverse_rms,
    inverse_root,
    kind_of,
    mean_of,
    memory_of,
    only_if,
    power_scale,
    rotate,
    store_row,
)

pytestmark = pytest.mark.kernel


@triton.jit
def _e2m1_kernel(x, codes, values, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    y = tl.load(x + at)
    tl.store(codes + at, e2m1_codes(y))
    tl.store(values + at, e2m1_round(y))


def test_e2m1_rounds_every_number_like_the_reference() -> None:
    """All bfloat16 numbers in range, the ties among them, and their neighbours in float32."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[numbers.abs() <= 6]
    numbers = torch.cat([numbers, torch.nextafter(numbers, torch.tensor(0.0)), torch.nextafter(numbers, numbers.sign() * 6)])
    size = triton.cdiv(len(numbers), 1024) * 1024
    x = torch.nn.functional.pad(numbers, (0, size - len(numbers))).to(DEVICE)
    codes, values = torch.empty(size, dtype=torch.uint8, device=DEVICE), torch.empty(size, device=DEVICE)
    _e2m1_kernel[(size // 1024,)](x, codes, values, N=1024, enable_fp_fusion=False)
    assert torch.equal(codes, e2m1_codes_ref(x))
    assert torch.equal(values.view(torch.int32), e2m1_values(codes).view(torch.int32))


@triton.jit
def _scale_kernel(x, fp8, fp4, inverses, roots, rounded):
    at = tl.arange(0, 64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    row = tl.arange(0, 64)
    y = tl.load(x + at)
    byte, inverse = fp8_scale(y, 1)
    tl.store(fp8 + row, byte.to(tl.uint8))
    byte, inverse = fp4_scale(y, 1)
    tl.store(fp4 + row, byte.to(tl.uint8))
    byte, inverse = power_scale(tl.max(tl.abs(y), axis=1), 6.0)
    tl.store(inverses + row, inverse)
    tl.store(roots + row, inverse_root(tl.max(tl.abs(y), axis=1) + 1e-20))
    tl.store(rounded + at, bf16(y))
    tl.store(roots + 65 + row, mean_of(tl.max(tl.abs(y), axis=1), 96))
    tl.store(roots + 64 + tl.arange(0, 1), inverse_rms(y, 1e-6, 2048) + tl.zeros((1,), tl.float32))


def test_scales_and_roots_are_exact() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-40, 24)[:, None]
    x[0] = 0.0
    x[1, 0] = 448.0
    x[1, 1:] = 6.0
    x = x.to(DEVICE)
    fp8, fp4 = (torch.empty(64, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    inverses, roots, rounded = torch.empty(64, device=DEVICE), torch.empty(129, device=DEVICE), torch.empty_like(x)
    _scale_kernel[(1,)](x, fp8, fp4, inverses, roots, rounded, enable_fp_fusion=False)
    assert torch.equal(fp8, quantize_fp8(x, 32)[1][:, 0])
    assert torch.equal(fp4, quantize_fp4(x, 32)[1][:, 0])
    assert torch.equal(inverses[1:], 2.0 ** (127 - fp4[1:].float()))
    assert torch.equal(rounded, x.bfloat16().float())
    # On CUDA torch multiplies by the inverse of a number.
    assert torch.equal(roots[65:].cpu(), x.abs().amax(1).cpu() / 96)
    torch.testing.assert_close(roots[:64], (x.abs().amax(1) + 1e-20).rsqrt(), rtol=2**-22, atol=0)
    torch.testing.assert_close(roots[64], torch.rsqrt(x.square().mean() + 1e-6), rtol=2**-21, atol=0)


@triton.jit
def _turn_kernel(x, cos, sin, out, ROWS: tl.constexpr, LOG: tl.constexpr):
    WIDTH: tl.constexpr = 1 << LOG
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    pair = tl.arange(0, ROWS)[:, None] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    y = rotate(tl.load(x + at), tl.load(cos + pair), tl.load(sin + pair), pair >= 0, ROWS, WIDTH, False)
    tl.store(out + at, y)
    tl.store(out + ROWS * WIDTH + at, hadamard_rows(y, ROWS, LOG))


@pytest.mark.parametrize("log", [5, 6, 7])
def test_rotation_and_hadamard_equal_the_references(log: int) -> None:
    width = 1 << log
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    angle = 100 * torch.rand(8, width // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out = torch.empty(2, 8, width, device=DEVICE)
    _turn_kernel[(1,)](x.float(), angle.cos(), angle.sin(), out, ROWS=8, LOG=log, enable_fp_fusion=False)
    turned = rope(x, angle.cos(), angle.sin())
    assert torch.equal(out[0], turned.float())
    assert torch.equal(out[1], hadamard(turned).float())


@triton.jit
def _store_kernel(
    x, memory, place, WIDTH: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    y = tl.load(x + at, mask=at < WIDTH, other=0.0)
    store_row(y, memory, place, tl.program_id(0), WIDTH, ROPE, ROWS, PLACES, KIND)


FORMATS = [Fp8Kv(448, 64), Fp8Kv(64, 64), Fp8Kv(192, 64), Fp8Kv(576, 64), Fp4Key(128), Fp8Key(128)]
FORMATS += [UnquantizedRow(100, dtype) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 300.0])
def test_rows_are_stored_byte_for_byte(fmt: RowFormat, scale: float) -> None:
    x = (scale * torch.randn(1, fmt.width, generator=torch.Generator().manual_seed(0))).bfloat16().to(DEVICE)
    ours, theirs = (RowStore(fmt, 3, 4, DEVICE) for _ in range(2))
    for store in (ours, theirs):
        store.memory.fill_(0xA5)
    theirs.write(torch.tensor([1 * 4 + 2], device=DEVICE), x)
    rows, sizes = triton.next_power_of_2(triton.cdiv(fmt.width, 64)), {"WIDTH": fmt.width, "ROPE": 64, "PLACES": 4}
    _store_kernel[(1,)](x.float(), memory_of(ours)[1], 2, **sizes, ROWS=rows, KIND=kind_of(fmt), enable_fp_fusion=False)
    assert torch.equal(ours.memory, theirs.memory)


@triton.jit
def _mask_kernel(x, out):
    at = tl.arange(0, 8)
    tl.store(out + at, at + 1, mask=only_if(tl.load(x) > 0, at < 6))


@pytest.mark.parametrize("condition", [True, False])
def test_condition_masks_all_or_nothing(condition: bool) -> None:
    x, out = torch.tensor([int(condition)], device=DEVICE), torch.zeros(8, dtype=torch.int32, device=DEVICE)
    _mask_kernel[(1,)](x, out, enable_fp_fusion=False)
    assert out.tolist() == ([1, 2, 3, 4, 5, 6, 0, 0] if condition else [0] * 8)
