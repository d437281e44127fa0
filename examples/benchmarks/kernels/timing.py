"""Timing for the benchmarks of kernels: CUDA graphs of many calls, replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4lite.kernels.four_bit import FourBit

BANDWIDTH = 4.3e12  # bytes per second that an H200 copies at
ROTATED = 300 << 20  # bytes of different inputs: more than the L2 cache holds


def microseconds(
    call: Callable[[int], object], copies: int, *, calls: int = 4, replays: int = 7, before: Callable[[], object] = lambda: None
) -> float:
    """Return the median time of one call.

    Args:
        call: What is timed, given which copy of its inputs to take.
        copies: How many copies of its inputs there are.
        calls: Of a graph, at least; each copy has its turn.
        replays: Of the graph.
        before: Called before each replay.
    """
    calls = max(copies, calls)
    call(0)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(calls):
                call(i % copies)
    graph.replay()
    times = []
    for _ in range(replays):
        before()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return sorted(times)[replays // 2]


def distance(got: Tensor, wanted: Tensor) -> float:
    """Return how far apart they are, relative to the norm of what is wanted."""
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def four_bit(*shape: int, nvfp4: bool) -> FourBit:
    """Return random 4-bit codes in groups of 128, or of 16."""
    group, dtype = (16, torch.float8_e4m3fn) if nvfp4 else (128, torch.float16)
    found = FourBit.empty(*shape, group=group, scale_dtype=dtype, device=torch.device("cuda"))
    found.words.random_(-(1 << 31), (1 << 31) - 1)
    found.scales.copy_(torch.rand(found.scales.shape, device="cuda") * 0.01 + 0.01)
    return found._replace(offsets=torch.full_like(found.offsets, 1 if nvfp4 else 8))
