"""When an op runs its Triton kernel, and what launchers know about the chip: tests can pretend another one here, and only here."""

from __future__ import annotations

import torch
from torch import Tensor

GPU_TYPE = "cuda"  # of the devices that run kernels; tests on a machine without a GPU pretend that others do


def on_gpu(device: torch.device) -> bool:
    """Return whether kernels on ``device`` are compiled for a GPU; else they are interpreted."""
    return device.type == GPU_TYPE


def use_triton(x: Tensor) -> bool:
    """Return whether an op on ``x`` runs its kernel: on a GPU, unless gradients are wanted."""
    return on_gpu(x.device) and not x.requires_grad


def capability_of(device: torch.device) -> int:
    """Return the compute capability as one number, 90 for 9.0; the interpreter on a CPU stands for the newest."""
    if not on_gpu(device):
        return 120
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors_of(device: torch.device) -> int:
    """Return how many multiprocessors the chip has; the interpreter on a CPU runs one program after the other and needs none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
