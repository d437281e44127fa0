"""Weights of four bits: their numbers, and the kernel of their products against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertInputs, experts_outputs
from dsv4lite.kernels.four_bit import FourBit, four_bit_linear, round_four_bit
from dsv4lite.kernels.quantize import e2m1_values
from tests.kernels.tensors import DEVICE, ON_GPU, kernel_test, launch, random

FORMS = [(128, torch.float16), (64, torch.bfloat16), (32, torch.float32), (16, torch.float16), (16, torch.float8_e4m3fn)]
KERNEL_FORMS = [form for form in FORMS if form != (16, torch.float16)]  # int4 needs groups of 32 inputs
SHAPES = [(*form, columns) for form in FORMS for columns in (256, 320, 96, 48) if columns % form[0] == 0]
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 16, 17, 70, *([129, 4096] if ON_GPU else [])]


def four_bit(*shape: int, group: int, scale_dtype: torch.dtype, seed: int = 0) -> FourBit:
    """Random weights of all codes, with zero points, and scales that differ between groups."""
    generator = torch.Generator().manual_seed(seed)
    w = FourBit.empty(*shape, group=group, scale_dtype=scale_dtype, device=torch.device("cpu"))
    codes = torch.randint(0, 16, w.shape, generator=generator, dtype=torch.uint8)
    w.scales.copy_((0.1 + torch.rand(w.scales.shape, generator=generator)) / 4)
    w.offsets.copy_(
        torch.rand(w.offsets.shape, generator=generator) if w.nvfp4 else torch.randint(0, 16, w.offsets.shape, generator=generator)
    )
    return FourBit(*(part.to(DEVICE) for part in FourBit.of(codes, w.scales, w.offsets)))


def place(column: int, block: int) -> tuple[int, int]:
    """Word and nibble of an input, by the formula of ``FourBit``; blocks of no inputs mean their own order."""
    if block == 0:
        return divmod(column, 8)
    v, s, h = column % block // 32, column % 32 // 16, column % 16 // 8
    q, j = column % 8 // 2, column % 2
    return column // block * (block // 8) + block // 32 * q + v, 4 * j + 2 * s + h


def numbers(w: FourBit) -> Tensor:
    """What the words of a matrix stand for, number by number."""
    rows, columns = w.shape
    found = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            word, nibble = place(column, w.lane_block)
            code, group = int(w.words[row, word]) >> 4 * nibble & 15, column // w.group
            scale = w.scales[row, group].float()
            if w.nvfp4:
                found[row, column] = e2m1_values(torch.tensor(code)) * (scale * w.offsets[row, 0])
            else:
                found[row, column] = (code - float(w.offsets[row, group])) * scale
    return found


@pytest.mark.parametrize(("group", "scale_dtype", "columns"), SHAPES)
def test_numbers_are_those_of_the_words(group: int, scale_dtype: torch.dtype, columns: int) -> None:
    w = four_bit(5, columns, group=group, scale_dtype=scale_dtype)
    assert w.shape == (5, columns) and w.group == group
    assert torch.equal(w.dequantize().cpu(), numbers(FourBit(*(part.cpu() for part in w))))
    stack = FourBit(*(torch.stack([part, part.flip(0)]) for part in w))
    assert torch.equal(stack.of_expert(1).dequantize(), w.dequantize().flip(0))
    assert torch.equal(stack.rows(4, 7).dequantize(), stack.dequantize().flatten(0, 1)[4:7])


@pytest.mark.parametrize("group", [8, 16, 32, 128])
def test_codes_may_lie_in_any_order_of_memory(group: int) -> None:
    """AWQ packs along the rows, so its codes have the strides of a transpose: groups of fewer than 32 inputs did not load."""
    w = four_bit(8, 384, group=group, scale_dtype=torch.float16)
    transposed = w.codes.t().contiguous().t()
    assert torch.equal(FourBit.of(transposed, w.scales, w.offsets).words, w.words)


@pytest.mark.parametrize(("group", "scale_dtype"), FORMS)
def test_rounding_keeps_what_is_near_and_restores_its_own_numbers(group: int, scale_dtype: torch.dtype) -> None:
    weight = random(6, 256, seed=3)
    weight[2, :group] = 0.0
    w = round_four_bit(weight, group=group, scale_dtype=scale_dtype)
    again = w.dequantize()
    amax = weight.unflatten(1, (-1, group)).abs().amax(2, keepdim=True)
    off = (again - weight).unflatten(1, (-1, group)).abs()
    assert (off <= amax * (0.2 if w.nvfp4 else 0.08)).all() and again[2, :group].abs().max() == 0
    assert again.abs().max() <= 1.07 * weight.abs().max()


def test_kernels_take_blocks_of_lanes_of_one_group() -> None:
    def block(columns: int, group: int, scale_dtype: torch.dtype = torch.float16) -> int:
        return four_bit(1, columns, group=group, scale_dtype=scale_dtype).lane_block

    assert [block(4 * group, group) for group in (8, 16, 24, 48)] == [0, 0, 0, 0]
    assert [block(3 * group, group) for group in (32, 64, 96, 128, 192, 256)] == [32, 64, 32, 128, 64, 128]
    assert [block(columns, 16, torch.float8_e4m3fn) for columns in (1408, 704, 352, 176)] == [128, 64, 32, 0]


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "scale_dtype", "columns"), [*((*form, 384) for form in KERNEL_FORMS), (*FORMS[-1], 352)])
def test_linear_kernel_agrees(group: int, scale_dtype: torch.dtype, columns: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    w = four_bit(80, columns, group=group, scale_dtype=scale_dtype)
    for rows in (0, *ROWS) if group == 128 else ROWS[:2]:
        x = random(rows, columns + 16, seed=rows).to(dtype)[:, 16:]  # rows of a wider matrix
        got, wanted = launch(four_bit_linear, x, w, torch.float32), four_bit_linear.reference(x, w, torch.float32)
        size = x.abs().float() @ w.dequantize().abs().T
        assert got.shape == wanted.shape and ((got - wanted).abs() <= 2**-14 * size).all()
        if rows == 16:
            assert torch.equal(launch(four_bit_linear, x, w, dtype), got.to(dtype))


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "scale_dtype", "outs", "columns", "filled"),
    [(*FORMS[0], 5120 if ON_GPU else 128, 1024, True), (*FORMS[1], 80, 2112, False), (*FORMS[-1], 80, 1600, False)],
)
def test_sums_of_parts_are_those_of_any_number_of_rows(
    group: int, scale_dtype: torch.dtype, outs: int, columns: int, filled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are programs where tiles are few; elsewhere a program adds its parts, if the order is fixed."""
    pytest.importorskip("triton")
    if filled and not ON_GPU:
        monkeypatch.setattr("dsv4lite.kernels.experts.weight_only_triton.FILLED", 2)
    rows = 70 if ON_GPU else 33
    w, x = four_bit(outs, columns, group=group, scale_dtype=scale_dtype), random(rows, columns, seed=5).to(dtype)
    wanted = four_bit_linear.reference(x, w, torch.float32)
    size = x.abs().float() @ w.dequantize().abs().T
    parts = (x[:3], x[:20], x) if ON_GPU or not filled else (x,)
    results = [launch(four_bit_linear, part, w, torch.float32, 32) for part in parts]
    for got in results:
        assert ((got - wanted[: len(got)]).abs() <= 2**-14 * size[: len(got)]).all()
        if ON_GPU:  # the interpreter's products are a library's, which has an order of its own for every shape
            assert torch.equal(got, results[-1][: len(got)])
    if ON_GPU or not filled:
        assert ((launch(four_bit_linear, x, w, torch.float32) - wanted).abs() <= 2**-14 * size).all()


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "scale_dtype"), [FORMS[1], FORMS[-1]])
def test_expert_kernels_agree(group: int, scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from dsv4lite.kernels.experts.weight_only_triton import FOUR_BIT_BLOCKS, weight_only_outputs_triton

    experts, top_k, hidden, width, tokens = 4, 2, 128, 64, 40 if ON_GPU else 7
    stacks = (
        four_bit(experts, *size, group=group, scale_dtype=scale_dtype, seed=i)
        for i, size in enumerate(((2 * width, hidden), (hidden, width)))
    )
    slots_TK = random(tokens, experts + 1, seed=3).topk(top_k).indices.sort(-1).values  # some to no expert
    given = ExpertInputs((0.05 * random(tokens, hidden)).to(dtype), None, slots_TK, random(tokens, top_k).abs(), *stacks, 9.0)
    found_TK = slots_TK < experts
    wanted = experts_outputs.reference(given)[found_TK]
    got = launch(experts_outputs, given)
    assert got.dtype == dtype and wanted.abs().max() > 0.1
    bound = (2**-14 if dtype == torch.float32 else 2**-6) * wanted.abs().max()
    assert (got[found_TK].float() - wanted.float()).abs().max() <= bound
    if dtype == torch.bfloat16:
        for _, block in FOUR_BIT_BLOCKS[:2]:
            other = weight_only_outputs_triton(given, block=block)[found_TK]
            # The interpreter's products are a library's, which has an order of its own for every shape.
            torch.testing.assert_close(other, got[found_TK], rtol=0, atol=0.0 if ON_GPU else 1e-5 * float(wanted.abs().max()))
