"""Who runs kernels, and what launchers know about a chip."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv4lite.kernels import dispatch
from dsv4lite.kernels.dispatch import (
    by_most,
    capability_of,
    ceil_div,
    describable,
    multiprocessors_of,
    on_gpu,
    power_of_2,
    use_triton,
)

META = torch.device("meta")


def test_kernels_run_on_cuda_only() -> None:
    assert not use_triton(torch.zeros(1))
    assert not use_triton(torch.zeros(1, device=META)) and not on_gpu(META)
    assert on_gpu(torch.device("cuda", 1))


def test_a_test_can_pretend_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "GPU_TYPE", "meta")
    chip = SimpleNamespace(major=8, minor=9, multi_processor_count=58)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    x = torch.zeros(1, device=META)
    assert use_triton(x) and not use_triton(x.requires_grad_())
    assert (capability_of(META), capability_of(torch.device("cpu"))) == (89, 120)
    assert (multiprocessors_of(META), multiprocessors_of(torch.device("cpu"))) == (58, 132)


def test_kernels_give_way_to_gradients_of_any_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "GPU_TYPE", "meta")
    x, weight = torch.zeros(1, device=META), torch.zeros(1, device=META, requires_grad=True)
    assert use_triton(x, x) and not use_triton(x, weight) and not use_triton(x, (1, (x, weight)))
    with torch.no_grad():
        assert use_triton(x, weight)


def test_choice_is_the_first_one_that_is_for_so_many() -> None:
    table = ((0, "none"), (16, "few"), (None, "many"))
    assert [by_most(table, count) for count in (0, 1, 16, 17, None)] == ["none", "few", "few", "many", "many"]


def test_parts_and_powers_of_two() -> None:
    assert [ceil_div(count, 16) for count in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [power_of_2(least) for least in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


@pytest.mark.gpu
def test_kernels_give_way_to_gradients() -> None:
    x = torch.zeros(1, device="cuda")
    assert use_triton(x) and not use_triton(x.requires_grad_())


def test_descriptors_are_made_of_rows_at_multiples_of_16_bytes() -> None:
    x = torch.empty(4, 3, 32, dtype=torch.bfloat16)
    assert describable(x) and describable(x[:, 1:]) and describable(x[..., 8:])
    assert not describable(x[..., 1:]) and not describable(x[..., ::2])
    assert not describable(torch.empty(4, 12, dtype=torch.bfloat16))
