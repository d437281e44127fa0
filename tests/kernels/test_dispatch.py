"""Who runs kernels, and how they describe themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dsv4lite.kernels.dispatch import Variant, use_triton


def test_kernels_run_on_cuda_only() -> None:
    assert not use_triton(torch.zeros(1))
    assert not use_triton(torch.zeros(1, device="meta"))


@pytest.mark.gpu
def test_kernels_give_way_to_gradients() -> None:
    x = torch.zeros(1, device="cuda")
    assert use_triton(x) and not use_triton(x.requires_grad_())


def test_variants_are_for_every_chip_by_default_and_do_not_change() -> None:
    variant = Variant(kernel=None, signature={"x": "*bf16"})
    assert variant.capabilities == (80, 89, 90, 100, 120) and variant.constants == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        variant.num_warps = 8  # type: ignore[misc]
