"""Gradients of a model's weights, by their places."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lite.weights.quant import Slot, TensorSlot


def gradient(slot: Slot) -> Tensor:
    """Return the gradient of one tensor of the checkpoint."""
    if isinstance(slot, TensorSlot):
        return torch.zeros_like(slot.tensor) if slot.tensor.grad is None else slot.tensor.grad
    grad = slot.matrix.weight.grad
    assert grad is not None
    return grad.flatten(0, -2)[slot.begin : slot.end]
