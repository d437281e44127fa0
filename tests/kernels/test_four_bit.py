"""Weights of four bits: their numbers, and the kernel of their products against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertInputs, experts_outputs
from dsv4lite.kernels.four_bit import FourBit, four_bit_linear, kernels_take, round_four_bit
from dsv4lite.kernels.quantize import e2m1_values
from tests.kernels.tensors import DEVICE, ON_GPU, kernel_test, launch, random

FORMS = [(128, torch.float16), (64, torch.bfloat16), (32, torch.float32), (16, torch.float16), (16, torch.float8_e4m3fn)]
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 16, 17, 70, *([129, 4096] if ON_GPU else [])]


def four_bit(*shape: int, group: int, scale_dtype: torch.dtype, seed: int = 0) -> FourBit:
    """Random weights of all codes, with zero points, and scales that differ between groups."""
    generator = torch.Generator().manual_seed(seed)
    w = FourBit.empty(*shape, group=group, scale_dtype=scale_dtype, device=torch.device("cpu"))
    w.codes.copy_(torch.randint(0, 256, w.codes.shape, generator=generator, dtype=torch.uint8))
    w.scales.copy_((0.1 + torch.rand(w.scales.shape, generator=generator)) / 4)
    w.offsets.copy_(
        torch.rand(w.offsets.shape, generator=generator) if w.nvfp4 else torch.randint(0, 16, w.offsets.shape, generator=generator)
    )
    return FourBit(*(part.to(DEVICE) for part in w))


def numbers(w: FourBit) -> Tensor:
    """What the bytes of a matrix stand for, number by number."""
    rows, columns = w.shape
    found = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            byte, group = int(w.codes[row, column // 2]), column // w.group
            code, scale = byte >> 4 if column % 2 else byte & 15, w.scales[row, group].float()
            if w.nvfp4:
                found[row, column] = e2m1_values(torch.tensor(code)) * (scale * w.offsets[row, 0])
            else:
                found[row, column] = (code - float(w.offsets[row, group])) * scale
    return found


@pytest.mark.parametrize(("group", "scale_dtype"), FORMS)
def test_numbers_are_those_of_the_bytes(group: int, scale_dtype: torch.dtype) -> None:
    w = four_bit(5, 256, group=group, scale_dtype=scale_dtype)
    assert w.shape == (5, 256) and w.group == group
    assert torch.equal(w.dequantize().cpu(), numbers(FourBit(*(part.cpu() for part in w))))
    stack = FourBit(*(torch.stack([part, part.flip(0)]) for part in w))
    assert torch.equal(stack.of_expert(1).dequantize(), w.dequantize().flip(0))
    assert torch.equal(stack.rows(4, 7).dequantize(), stack.dequantize().flatten(0, 1)[4:7])


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


def test_groups_of_other_sizes_are_left_to_the_reference() -> None:
    assert [group for group in (8, 16, 24, 32, 48, 64, 96, 128, 192, 256) if kernels_take(group)] == [16, 32, 64, 128, 192, 256]


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "scale_dtype"), FORMS)
def test_linear_kernel_agrees(group: int, scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    w = four_bit(80, 384, group=group, scale_dtype=scale_dtype)
    for rows in (0, *ROWS) if group == 128 else ROWS[:2]:
        x = random(rows, 400, seed=rows).to(dtype)[:, 16:]  # rows of a wider matrix
        got, wanted = launch(four_bit_linear, x, w, torch.float32), four_bit_linear.reference(x, w, torch.float32)
        size = x.abs().float() @ w.dequantize().abs().T
        assert got.shape == wanted.shape and ((got - wanted).abs() <= 2**-14 * size).all()
        if rows == 16:
            assert torch.equal(launch(four_bit_linear, x, w, dtype), got.to(dtype))


@kernel_test
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "scale_dtype"), [FORMS[1], FORMS[-1]])
def test_expert_kernels_agree(group: int, scale_dtype: torch.dtype, dtype: torch.dtype, partial: bool) -> None:
    pytest.importorskip("triton")
    from dsv4lite.kernels.experts.weight_only_triton import FOUR_BIT_BLOCKS, weight_only_outputs_triton

    experts, top_k, hidden, width, tokens = 4, 2, 128, 64, 40 if ON_GPU else 7
    stacks = (
        four_bit(experts, *size, group=group, scale_dtype=scale_dtype, seed=i)
        for i, size in enumerate(((2 * width, hidden), (hidden, width)))
    )
    slots_TK = random(tokens, experts + 1, seed=3).topk(top_k).indices.sort(-1).values  # some to no expert
    given = ExpertInputs(
        (0.05 * random(tokens, hidden)).to(dtype), None, slots_TK, random(tokens, top_k).abs(), *stacks, 9.0, partial
    )
    found_TK = slots_TK < experts
    wanted = experts_outputs.reference(given)[found_TK]
    got = launch(experts_outputs, given)
    assert got.dtype == (torch.float32 if partial else dtype) and wanted.abs().max() > 0.1
    bound = (2**-14 if dtype == torch.float32 else 2**-6) * wanted.abs().max()
    assert (got[found_TK].float() - wanted.float()).abs().max() <= bound
    if partial and dtype == torch.bfloat16:
        for _, block in FOUR_BIT_BLOCKS[:2]:
            other = weight_only_outputs_triton(given, block=block)[found_TK]
            # The interpreter's products are a library's, which has an order of its own for every shape.
            torch.testing.assert_close(other, got[found_TK], rtol=0, atol=0.0 if ON_GPU else 1e-5 * float(wanted.abs().max()))
