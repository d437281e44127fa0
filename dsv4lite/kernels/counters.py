"""Counters through which programs of one kernel, or what is left of it, find each other."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# What the kernel that needs most has: a product in parts counts the arrivals of each tile (``gemm``), and an entered sub-layer
# exchanges sums (``hc``). Their tests compare.
COUNTERS = 135168


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "run a product on a stream before capturing one there: a graph cannot own what outlives it"
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def counters_of(device: torch.device) -> Tensor:
    """Return the current stream's counters, int32 [COUNTERS]: zero between kernels, which one stream runs in order.

    Graphs captured on one stream must not run side by side.
    """
    return _counters(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
