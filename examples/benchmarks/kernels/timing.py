"""Timing for the benchmarks of kernels: CUDA graphs of many calls, replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
