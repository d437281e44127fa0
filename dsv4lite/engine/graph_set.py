"""What the graphs of decode steps and of steps that check guesses have in common."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dsv4lite.kernels.sampling.rows import Needs
from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.sampling.device import DeviceSampler
from dsv4lite.sampling.state import send
from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.state.store import StateCache

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured(Generic[T]):
    """The graph of a step's shape.

    Attributes:
        graph: Of the step without its sampling.
        inputs: int32, what it is told; written before each replay.
        output: What it leaves.
        samplings: Graphs behind it that sample, and where they leave what they return, by what is asked for.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: T
    samplings: dict[Needs, tuple[torch.cuda.CUDAGraph, Tensor]] = field(default_factory=dict)


class PageTables:
    """Grow pages by slot, where graphs find them; rows are sent only when a sequence has taken a page.

    Args:
        cache: The state whose pages they are.
        max_model_len: Longest sequence.

    Attributes:
        tensor: int32 [slots + 1, P]; the last row is for padding.
    """

    def __init__(self, cache: StateCache, max_model_len: int) -> None:
        pages = -(-max_model_len // PAGE_TOKENS)
        self.tensor = torch.zeros(cache.sizes.slots + 1, pages, dtype=torch.int32, device=cache.device)
        self._held: dict[int, tuple[int, ...]] = {}
        self._last: tuple[list[int], list[tuple[int, ...]]] = [], []  # slots and grow pages of the step that ran last

    def update(self, sequences: Sequence[SequencePlan]) -> None:
        """Send what has changed of the sequences of a step."""
        now = [s.slot for s in sequences], [s.pages for s in sequences]
        if now == self._last:  # mostly, and equal tuples are the same ones: nobody looks into them
            return
        self._last = now
        changed = [s for s in sequences if self._held.get(s.slot) is not s.pages]
        if not changed:
            return
        self._held.update((s.slot, s.pages) for s in changed)
        width = max(len(s.pages) for s in changed)
        rows = torch.tensor([(s.slot, *s.pages, *([0] * (width - len(s.pages)))) for s in changed], dtype=torch.int32, device="cpu")
        rows = send(rows, self.tensor.device)
        self.tensor[rows[:, 0].long(), :width] = rows[:, 1:]


def rows_of_ints(values: Sequence[int], columns: int) -> Tensor:
    """Return numbers as int32 [rows, columns] on the CPU, as graphs are told them."""
    # PyTorch takes five times as long to read a list.
    packed = bytearray(4 * len(values))
    struct.pack_into(f"{len(values)}i", packed, 0, *values)
    return torch.frombuffer(packed, dtype=torch.int32).view(-1, columns)


class GraphSet:
    """Graphs of one kind of step; mutable, owned by the engine's thread, recorded on its stream.

    Args:
        cache: The state.
        max_model_len: Longest sequence.
        last_token: int64 [slots + 1], the token sampled last in each slot.
        sampling: Samples behind the steps, if somebody does on the device.
        pool: Where what graphs work with lies; those that have it in common run one after the other.
    """

    def __init__(
        self, cache: StateCache, max_model_len: int, last_token: Tensor, sampling: DeviceSampler | None, pool: Any
    ) -> None:
        self.sampling = sampling
        self.last_token = last_token
        self._cache = cache
        self._max_model_len = max_model_len
        self._tables = PageTables(cache, max_model_len)
        self._pool = pool

    def _record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Record what ``work``, which runs once, launches on the current stream; return the graph, and what ``work`` returns."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
        return graph, result

    def _replay_sampling(self, captured: Captured[Any], needs: Needs, work: Callable[[], Tensor]) -> Tensor:
        """Sample from what a step has just left, by ``work`` if that has not been recorded yet; return what it returns."""
        if needs not in captured.samplings:
            captured.samplings[needs] = self._record(work)
        graph, out = captured.samplings[needs]
        graph.replay()
        return out
