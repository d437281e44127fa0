"""Memory of the host for copies of tensors."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import CapacityError
from dsv4lite.weights import host_memory
from dsv4lite.weights.host_memory import HostMemory

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


@pytest.mark.parametrize("device", DEVICES)
def test_copies_on_the_device_arrive_before_their_use(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE", 1 << 16)
    monkeypatch.setattr(host_memory, "WINDOW", 1 << 12)
    memory, rng = HostMemory(torch.device(device)), random.Random(0)
    taken = filled(memory, rng)
    groups = []
    while taken:
        size = rng.randrange(1, 4)
        groups.append(taken[:size])
        taken = taken[size:]
    sums = []
    for group, copies in zip(groups, memory.sent([[tensor for tensor, _ in group] for group in groups]), strict=True):
        for (tensor, byte), copy in zip(group, copies, strict=True):
            assert copy.device.type == device and copy.dtype == tensor.dtype and copy.shape == tensor.shape
            sums.append((copy.view(-1).view(torch.uint8).long() - byte).abs().sum())
    assert not any(sums)
    interrupted = memory.sent([[tensor] for group in groups for tensor, _ in group])
    next(interrupted)
    interrupted.close()
    assert not any(memory.sent([]))


def test_too_little_memory_is_named() -> None:
    with pytest.raises(CapacityError, match="the host has too little memory for copies of weights"):
        HostMemory(torch.device("cpu")).take([1 << 50], torch.uint8)
