"""Quantizers against tables of all codes, in exact arithmetic; the kernel against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.quantize import (
    dequantize_fp4,
    dequantize_fp8,
    dequantize_matrix,
    e2m1_codes,
    e2m1_values,
    e8m0_to_float,
    hadamard,
    pack_fp4,
    quantize_fp4,
    quantize_fp8,
    quantize_matrix,
    quantize_packed_fp4,
    round_fp4,
    round_fp8,
    scale_bits,
    unpack_fp4,
)
from tests.kernels.tensors import DEVICE, ON_GPU, kernel_test, launch

# All non-negative values, in the order of their codes: three mantissa bits and seven for the exponents (1 and 2 bits for e2m1).
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
KINDS = {"fp8": (E4M3, 1e-4, round_fp8, 8), "fp4": (E2M1, 6 * 2.0**-126, round_fp4, 4)}


def nearest(x: Tensor, table: list[float]) -> Tensor:
    """Round magnitudes to the nearest value of a table, ties to the even code, in float64."""
    values = torch.tensor(table, dtype=torch.float64)
    gap = (x.double().abs()[..., None] - values).abs()
    tied = gap == gap.amin(-1, keepdim=True)
    even = torch.arange(len(table)) % 2 == 0
    code = torch.where(tied.sum(-1, keepdim=True) > 1, tied & even, tied).int().argmax(-1)
    return values[code] * torch.where(x.double() < 0, -1.0, 1.0)


def oracle(x: Tensor, group: int, table: list[float], floor: float) -> tuple[Tensor, Tensor]:
    """Quantize in float64: the scale is the smallest power of two that brings the group into range."""
    parts = x.double().unflatten(-1, (-1, group))
    amax = parts.abs().amax(-1).clamp_min(floor)
    exponent = torch.zeros_like(amax)
    for power in range(-140, 130):
        exponent[amax > table[-1] * 2.0**power] = power + 1
    scale = 2.0 ** exponent[..., None]
    return (nearest(parts / scale, table) * scale).flatten(-2), exponent


def numbers(*shape: int, spread: float = 6.0) -> Tensor:
    """Random numbers whose groups differ in magnitude, zeros among them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    return x


def test_scale_is_the_smallest_power_of_two_for_every_bfloat16() -> None:
    amax = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()  # all normal positive numbers
    for qmax, floor in ((448.0, 1e-4), (6.0, 6 * 2.0**-126)):
        x = amax[amax >= floor]
        exponent = ((scale_bits(x, qmax) >> 23) - 127).double()
        assert (x.double() <= qmax * 2.0**exponent).all()
        assert (x.double() > qmax * 2.0 ** (exponent - 1)).all()


def test_e8m0_bytes_are_powers_of_two() -> None:
    scales = torch.arange(255, dtype=torch.uint8)
    expected = 2.0 ** (torch.arange(255, dtype=torch.float64) - 127)
    assert torch.equal(e8m0_to_float(scales).double(), expected)
    assert torch.equal(e8m0_to_float(scales.view(torch.float8_e8m0fnu)).double(), expected)
    assert e8m0_to_float(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert torch.equal(e8m0_to_float(torch.tensor([0.375])), torch.tensor([0.375]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "group", "groups"), [(0, 64, 1), (1, 32, 1), (63, 64, 7), (257, 128, 2)])
def test_rounding_equals_the_nearest_code(kind: str, rows: int, group: int, groups: int) -> None:
    table, floor, rounded, _ = KINDS[kind]
    x = numbers(rows, group * groups).bfloat16()
    expected, _ = oracle(x, group, table, floor)
    assert torch.equal(rounded(x, group).double(), expected.to(torch.bfloat16).double())
    assert torch.equal(rounded(x.float(), group).double(), expected.float().double())


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_again_changes_nothing(kind: str) -> None:
    _, _, rounded, _ = KINDS[kind]
    once = rounded(numbers(63, 256).bfloat16(), 64)
    assert torch.equal(rounded(once, 64), once)


def test_codes_and_scales_dequantize_to_the_rounded_values() -> None:
    x = numbers(33, 256).bfloat16()
    for group in (64, 128):
        codes, scales = quantize_fp8(x, group)
        assert codes.dtype == torch.float8_e4m3fn and scales.shape == (33, 256 // group)
        assert torch.equal(dequantize_fp8(codes, scales, group).to(x.dtype), round_fp8(x, group))
    codes, scales = quantize_fp4(x)
    assert codes.dtype == torch.uint8 and int(codes.max()) < 16
    assert torch.equal(dequantize_fp4(codes, scales).to(x.dtype), round_fp4(x))


def test_scale_bytes_equal_the_oracle() -> None:
    x = numbers(65, 128).bfloat16()
    for quantize, (table, floor, _, _) in ((quantize_fp8, KINDS["fp8"]), (quantize_fp4, KINDS["fp4"])):
        _, exponent = oracle(x, 32, table, floor)
        assert torch.equal(quantize(x, 32)[1].double(), exponent + 127)


def test_last_group_may_be_shorter() -> None:
    x = numbers(5, 150).bfloat16()
    padded = torch.nn.functional.pad(x, (0, 42))
    assert torch.equal(round_fp8(x, 64), round_fp8(padded, 64)[:, :150])
    assert quantize_fp8(x, 64)[1].shape == (5, 3)


def test_small_groups_get_the_floor() -> None:
    zeros = torch.zeros(1, 64)
    assert quantize_fp8(zeros, 64)[1].item() == 127 - 22 and round_fp8(zeros, 64).eq(0).all()
    assert quantize_fp8(torch.full((1, 64), 1e-7), 64)[1].item() == 127 - 22
    assert quantize_fp4(torch.zeros(1, 32))[1].item() == 127 - 126


def test_nan_stays_visible_in_fp8() -> None:
    x = torch.ones(2, 128)
    x[0, 3] = float("nan")
    rounded = round_fp8(x, 128)
    assert rounded[0, 3].isnan() and torch.equal(rounded[1], x[1])


def test_quantizing_a_row_does_not_depend_on_the_others() -> None:
    x = numbers(257, 448).bfloat16()
    for a, b in ((0, 1), (5, 6), (17, 80), (200, 257)):
        for kind in KINDS.values():
            assert torch.equal(kind[2](x[a:b], 64), kind[2](x, 64)[a:b])


def test_nibbles_are_even_element_low_odd_element_high() -> None:
    packed = torch.tensor([0x21, 0x7F, 0x9A], dtype=torch.uint8)
    assert e2m1_values(unpack_fp4(packed)).tolist() == [0.5, 1.0, -6.0, 6.0, -1.0, -0.5]
    assert torch.equal(unpack_fp4(packed.view(torch.int8)), unpack_fp4(packed))
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32) & 15
    assert torch.equal(unpack_fp4(pack_fp4(codes)), codes)


def test_e2m1_codes_name_their_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert e2m1_values(codes).tolist() == [*E2M1, *(-value for value in E2M1)]
    assert torch.equal(e2m1_codes(e2m1_values(codes)), codes)


@pytest.mark.parametrize("width", [1, 2, 16, 128])
@pytest.mark.parametrize("rows", [0, 1, 63])
def test_hadamard_is_sylvesters_matrix(width: int, rows: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = torch.randn(rows, 3, width, generator=torch.Generator().manual_seed(width))
    got = hadamard(x)
    assert (got.double() - x.double() @ matrix * width**-0.5).abs().amax().item() < 1e-5 if rows else got.shape == x.shape
    if rows:
        assert (hadamard(got) - x).abs().max() < 1e-5
        assert torch.equal(hadamard(x[:1]), got[:1])
    assert hadamard(x.to(torch.bfloat16)).dtype == torch.bfloat16


def test_fp8_matrix_is_scaled_by_its_block() -> None:
    """Blocks at the lower and right border are cut; the scale may be e8m0 or float32."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(130, 300, generator=generator).to(torch.float8_e4m3fn)
    exponent = torch.randint(100, 140, (2, 3), generator=generator)
    for scale in (exponent.to(torch.uint8).view(torch.float8_e8m0fnu), 2.0 ** (exponent - 127).float()):
        got = dequantize_matrix(weight, scale)
        for row, column in ((0, 0), (127, 127), (128, 128), (129, 299), (5, 256), (128, 255)):
            expected = weight[row, column].double() * 2.0 ** (exponent[row // 128, column // 128].item() - 127)
            assert got[row, column].double() == expected


def test_fp4_matrix_is_scaled_by_row_and_32_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (3, 5, 48), generator=generator).to(torch.uint8)
    exponent = torch.randint(100, 140, (3, 5, 3), generator=generator)
    scale = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    for weight in (packed, packed.view(torch.int8)):
        got = dequantize_matrix(weight, scale)
        assert got.shape == (3, 5, 96)
        for expert, row, column in ((0, 0, 0), (1, 2, 31), (2, 4, 32), (2, 0, 95), (0, 3, 64)):
            code = int(packed[expert, row, column // 2]) >> (4 if column % 2 else 0) & 15
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            assert got[expert, row, column].double() == value * 2.0 ** (exponent[expert, row, column // 32].item() - 127)


def test_plain_matrix_is_widened() -> None:
    weight = torch.randn(3, 5).to(torch.bfloat16)
    assert torch.equal(dequantize_matrix(weight, None), weight.float())


@pytest.mark.parametrize("shape", [(1, 32), (128, 128), (130, 288), (300, 64)])
@pytest.mark.parametrize("fp4", [False, True])
def test_matrix_is_quantized_by_blocks_and_restored_exactly(shape: tuple[int, int], fp4: bool) -> None:
    """A trainer's copy of a dequantized matrix comes back as the same numbers; others are rounded with the scale of their block."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, shape[0])[:, None]
    codes, scale = quantize_matrix(made, fp4=fp4)
    block, most = ((1, 32), 6) if fp4 else ((128, 128), 448)
    assert scale.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1])) and scale.dtype == torch.float8_e8m0fnu
    assert codes.shape == (shape[0], shape[1] // (2 if fp4 else 1))
    wide = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    restored = dequantize_matrix(codes, scale)
    table = E2M1 if fp4 else E4M3
    assert restored.double().equal(nearest(made / wide, table) * wide.double())
    assert (made.abs() / wide).max() <= most
    for again in (restored, restored.bfloat16()):
        assert dequantize_matrix(*quantize_matrix(again, fp4=fp4)).equal(restored)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("exponent", [-120, -40, -20])
def test_matrix_of_small_numbers_is_restored_exactly(exponent: int, fp4: bool) -> None:
    """The floor of activations' scales, 1e-4 / 448, is not that of weights."""
    made = torch.randn(130, 288, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize_matrix(made, fp4=fp4)
    small = (scale.float() * 2.0**exponent).to(torch.float8_e8m0fnu)
    numbers = dequantize_matrix(codes, small)
    assert dequantize_matrix(*quantize_matrix(numbers, fp4=fp4)).equal(numbers)


# The kernel.


def assert_same(x: Tensor, group: int) -> None:
    (codes, scales), (wanted, wanted_scales) = launch(quantize_fp8, x, group), quantize_fp8.reference(x, group)
    assert codes.dtype == wanted.dtype and codes.shape == wanted.shape and torch.equal(scales, wanted_scales)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


SHAPES = [(0, 128), (3, 2, 384), (2, 150), (1, 2500)] + ([(63, 4096), (257, 7168), (8192, 1024)] if ON_GPU else [])


@kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales_equal_the_reference(shape: tuple[int, ...], group: int, dtype: torch.dtype) -> None:
    assert_same(numbers(*shape).to(DEVICE, dtype), group)


@kernel_test
def test_every_bfloat16_rounds_as_the_reference_does() -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = x[x.isfinite()].to(DEVICE)
    tops = torch.tensor([2.0**e * 1.7 for e in range(-9, 20)], device=DEVICE).bfloat16()
    for top in tops if ON_GPU else tops[::14]:
        # The first of a group decides its scale; a program takes 16 groups.
        inside = pad(finite[finite.abs() <= top], 127)
        assert_same(pad(torch.cat([top.expand(len(inside), 1), inside], 1).flatten(), 16 * 128), 128)


def pad(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % width)).view(-1, width)


@kernel_test
def test_nan_stays_one_and_other_groups_do_not_notice() -> None:
    x = numbers(2, 256, spread=0.0).to(DEVICE, torch.bfloat16)
    codes, scales = launch(quantize_fp8, x, 128)
    spoilt = x.clone()
    spoilt[0, 3] = float("nan")
    got, got_scales = launch(quantize_fp8, spoilt, 128)
    assert got[0, 3].float().isnan() and torch.equal(got_scales.flatten()[1:], scales.flatten()[1:])
    assert torch.equal(got.view(torch.uint8).flatten()[128:], codes.view(torch.uint8).flatten()[128:])


@kernel_test
def test_rows_may_lie_apart() -> None:
    assert_same(numbers(5, 512).to(DEVICE)[:, 128:384], 128)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (3, 2, 96), (65, 64)] + ([(4096, 2048), (3, 7168)] if ON_GPU else []), ids=str)
def test_packed_fp4_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(*shape).clamp(-60000, 60000).to(DEVICE, dtype)
    for given in (x, x.clamp(-1, 1).round(decimals=1), x.mT.contiguous().mT, torch.zeros_like(x)):
        got, wanted = launch(quantize_packed_fp4, given), quantize_packed_fp4.reference(given)
        assert all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@kernel_test
def test_every_bfloat16_rounds_to_fp4_as_the_reference_does() -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = x[x.isfinite()].to(DEVICE)
    for top in torch.tensor([6.0 * 2.0**e for e in (range(-9, 20) if ON_GPU else (-9, 0, 3))], device=DEVICE).bfloat16():
        inside = pad(finite[finite.abs() <= top], 31)
        given = torch.cat([top.expand(len(inside), 1), inside], 1)
        got, wanted = launch(quantize_packed_fp4, given), quantize_packed_fp4.reference(given)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
