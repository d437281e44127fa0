"""Captured steps without a device: a stand-in for a graph repeats its work, everything else is as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dsv4lite.engine.rank import Probe
from dsv4lite.engine.runner import Runner
from dsv4lite.engine.step_graphs import StepGraphs
from dsv4lite.kernels.paging import Paging


class Recording:
    """Stands for a CUDA graph: does the work again, and puts its results where they were."""

    def __init__(self, work: Callable[[], Any], result: Any) -> None:
        self._work, self._result = work, result

    def replay(self) -> None:
        put(self._work(), self._result)


def record(graphs: StepGraphs, work: Callable[[], Any]) -> tuple[Recording, Any]:
    """Stand for ``StepGraphs._record``: do the work once for its results, and undo what else it did."""
    kept = [graphs._cache.last_token, *graphs._cache._tensors()]
    if graphs.sampling is not None:
        lines = [s.line for s in graphs.sampling._sequences.values() if s.line is not None]
        kept += [graphs._logits, *(x for line in lines for x in line.held)]
    with _disable_current_modes():  # which list the ops of a step
        before = [x.clone() for x in kept]
    result = work()
    with _disable_current_modes():
        for x, old in zip(kept, before, strict=True):
            x.copy_(old)
    return Recording(work, result), result


def put(source: Any, target: Any) -> None:
    """Copy tensors, and those in tuples and dataclasses, to where others are."""
    if isinstance(source, Tensor):
        target.copy_(source)
    elif isinstance(source, Paging):
        for name in [field.name for field in fields(source) if field.init]:
            put(getattr(source, name), getattr(target, name))
        target.derived.clear()  # which was derived from other positions
    elif is_dataclass(source):
        for field in fields(source):
            put(getattr(source, field.name), getattr(target, field.name))
    elif isinstance(source, dict):
        put(tuple(source.values()), tuple(target.values()))
    elif isinstance(source, tuple | list):
        for one, other in zip(source, target, strict=True):
            put(one, other)


def without_device(patch: pytest.MonkeyPatch) -> None:
    """Replace what captured steps ask of CUDA besides graphs."""
    stream = type("Stream", (), {"synchronize": lambda self: None})
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: stream())
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@contextmanager
def recorded() -> Iterator[list[Callable[[], Any]]]:
    """Let engines with ``captured_engines`` capture and replay; yield what was captured."""
    captured: list[Callable[[], Any]] = []

    def counted(graphs: StepGraphs, work: Callable[[], Any]) -> Any:
        captured.append(work)
        return record(graphs, work)

    with pytest.MonkeyPatch.context() as patch:
        without_device(patch)
        patch.setattr(StepGraphs, "_record", counted)
        yield captured


@contextmanager
def captured_engines(**sizes: Any) -> Iterator[None]:
    """Give graphs to engines that start in this block; a block of ``recorded`` must last as long as they do."""

    def build(probe: Probe, *args: Any) -> Runner:
        runner: Any = building(probe, *args)
        options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024, **sizes}
        if runner._drafter is not None:
            options |= {"widths": (1, 1 + runner._drafter.most), "drafter": runner._drafter}
        runner._graphs = runner._resident._graphs = StepGraphs(runner.model, runner.cache, **options, sampling=runner.sampler)
        return runner  # type: ignore[no-any-return]

    building = Probe.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probe, "build", build)
        yield
