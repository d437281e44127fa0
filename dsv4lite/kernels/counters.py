"""Counters in device memory through which the programs of one kernel synchronize and exchange numbers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Enough for the kernel that needs most: a split-K product counts the arrivals at each tile (``gemm``), and ``hc_enter`` exchanges
# sums (``hc``). Tests of both check that their largest launch fits.
COUNTERS = 135168


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "launch a kernel that uses counters on this stream before capturing: a graph must not own the counters"
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def counters_of(device: torch.device) -> Tensor:
    """Return the current stream's counters, int32 [COUNTERS]. Each kernel leaves them zero for the next kernel of the stream.

    Graphs captured on one stream share its counters and must not run concurrently.
    """
    return _counters(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
