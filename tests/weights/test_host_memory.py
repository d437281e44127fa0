"""Memory of the host for copies of tensors, and for the bytes of an update."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsv4lite.errors import CapacityError
from dsv4lite.kernels.quantize import quantize_matrix
from dsv4lite.weights import host_memory, mirror
from dsv4lite.weights.host_memory import HostMemory
from dsv4lite.weights.mirror import Mirror
from dsv4lite.weights.quant import CopiedSlot, Matrix, Numerics, Slot, TensorSlot, TiledStack, parameter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn)


def filled(memory: HostMemory, rng: random.Random) -> list[tuple[Tensor, int]]:
    """Take tensors of many shapes, some larger than a piece and some empty; fill each with a byte of its own."""
    taken = []
    for byte in range(100):
        shape = [rng.randrange(0, 40) for _ in range(rng.randrange(0, 4))]
        tensor = memory.take(shape, rng.choice(DTYPES))
        assert list(tensor.shape) == shape and tensor.is_contiguous()
        tensor.view(-1).view(torch.uint8).fill_(byte)
        taken.append((tensor, byte))
    return taken


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_do_not_overlap_and_memory_is_used_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE", 1 << 16)
    memory = HostMemory(torch.device(device))
    addresses = []
    for _ in range(2):
        taken = filled(memory, random.Random(0))
        assert all((tensor.view(-1).view(torch.uint8) == byte).all() for tensor, byte in taken)
        assert all(tensor.is_pinned() == (device == "cuda") for tensor, _ in taken if tensor.numel())
        addresses.append([tensor.data_ptr() for tensor, _ in taken])
        memory.clear()
    assert addresses[0] == addresses[1]
    del taken
    memory.free()
    filled(memory, random.Random(1))


def test_too_little_memory_is_named() -> None:
    with pytest.raises(CapacityError, match="the host has too little memory for copies of weights"):
        HostMemory(torch.device("cpu")).take([1 << 50], torch.uint8)


# --------------------------------------------------------------------------------------------------------------- mirrors


def home(kind: str, device: str, generator: torch.Generator) -> tuple[list[Tensor], list[Slot]]:
    """Return resident tensors with random bytes, and the slots in them."""
    numerics = replace(
        Numerics.choose(dtype=torch.bfloat16, quantized=True, deterministic=False, device=torch.device(device)),
        matrix_dtype=torch.bfloat16,
        resident_fp8=True,
        resident_experts="fp4" if "fp4" in kind else "fp8",
        scale_dtype={"fp8 with float scales": torch.float32, "four bits": torch.float16}.get(kind, torch.uint8),
        group=32,
    )
    module: nn.Module
    if "tiles" in kind:
        module = stack = TiledStack(4, 256, 384, numerics=numerics)
        gates, ups = ([stack.rows(begin, begin + 128, expert=i) for i in range(4)] for begin in (0, 128))
        slots = [stack.rows(0, 256, expert=1), gates[3], ups[3], CopiedSlot((gates[0], gates[2])), CopiedSlot((ups[0], ups[2]))]
    elif kind == "tensors":
        module = nn.ParameterList([parameter(*shape, numerics=numerics) for shape in ((), (7,), (300, 31))])
        slots = [TensorSlot(tensor) for tensor in module]
    else:
        boundary = 72 if kind == "fp8 with a scale per row" else 256
        form = {"four_bit": True} if kind == "four bits" else {"fp8": kind != "unquantized"}
        module = matrix = Matrix(2 * boundary + 64, 160, numerics=numerics, boundaries=[boundary, 2 * boundary], **form)
        slots = [matrix.rows(0, boundary), matrix.rows(boundary, 2 * boundary), matrix.rows(2 * boundary, 2 * boundary + 64)]
    for tensor in module.parameters():
        bytes_ = torch.randint(256, (tensor.nbytes,), generator=generator, dtype=torch.uint8)
        tensor.detach().view(-1).view(torch.uint8).copy_(bytes_)
    return list(module.parameters()), slots


def given(kind: str, slot: Slot, device: str, generator: torch.Generator) -> tuple[Any, Tensor | None]:
    """Return a checkpoint tensor for a slot."""
    numbers = torch.randn(slot.shape, generator=generator).to(device)
    if kind in ("unquantized", "tensors", "four bits"):
        return numbers.to([torch.bfloat16, torch.float32][len(numbers.shape) % 2]), None
    weight, scale = quantize_matrix(numbers, fp4="fp4" in kind)
    return weight, scale.float() if kind == "fp8 with float scales" else scale


KINDS = (
    *("unquantized", "tensors", "fp8", "fp8 with float scales", "fp8 with a scale per row"),
    *("four bits", "fp4 tiles", "fp8 tiles"),
)


@torch.no_grad()
@pytest.mark.parametrize("source", DEVICES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("segment", [1 << 9, 1 << 13, 1 << 26])
@pytest.mark.parametrize("kind", KINDS)
def test_mirror_sends_the_bytes_that_slots_store(
    kind: str, segment: int, device: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some slots in any order, with segments that cut places; nothing changes before, and nothing else."""
    monkeypatch.setattr(mirror, "SEGMENT", segment)
    monkeypatch.setattr(mirror, "_MOST_HELD", {1 << 9: 0, 1 << 13: 3}.get(segment, 8))
    memory, rng, generator = HostMemory(torch.device(device)), random.Random(0), torch.Generator()
    for count in (1, 2, 5):
        (stored, slots), (mirrored, others) = (home(kind, device, generator.manual_seed(count)) for _ in range(2))
        before, staging = [tensor.clone() for tensor in mirrored], Mirror(memory)
        for i in rng.sample(range(len(slots)), min(count, len(slots))):
            weight, scale = given(kind, slots[i], source, generator)
            weight, scale = (None if each is None else each.to(device if scale is not None else source) for each in (weight, scale))
            slots[i].store(weight, scale)
            staging.store(others[i], weight, scale)
        assert all(same_bytes(*pair) for pair in zip(mirrored, before, strict=True))
        staging.send()
        assert all(same_bytes(*pair) for pair in zip(mirrored, stored, strict=True))
        assert not all(same_bytes(*pair) for pair in zip(mirrored, before, strict=True))
        memory.clear()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(tensor.detach().view(-1).view(torch.uint8) for tensor in (a, b)))


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_sending_takes_no_memory_of_the_device_and_only_segments_that_were_written_take_any_of_the_host(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "SEGMENT", 1 << 12)
    monkeypatch.setattr(host_memory, "PIECE", 1)
    stack, taken = torch.zeros(64, 1 << 8, device=device), []
    numerics = Numerics.choose(dtype=torch.float32, quantized=False, deterministic=False, device=torch.device(device))
    matrix = Matrix(64, 1 << 8, numerics=numerics)
    memory = HostMemory(torch.device(device))
    take = memory.take
    monkeypatch.setattr(memory, "take", lambda shape, dtype: taken.append(shape) or take(shape, dtype))
    staging = Mirror(memory)
    for begin in (5, 6, 21):  # 4 rows of a segment each
        staging.store(matrix.rows(begin, begin + 1), stack[begin : begin + 1])
    assert [list(shape) for shape in taken] == [[1 << 12]] * 2
    before = torch.cuda.memory_stats()["allocation.all.allocated"] if device == "cuda" else 0
    staging.send()
    assert device == "cpu" or torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert not matrix.weight[[5, 6, 21]].any()
