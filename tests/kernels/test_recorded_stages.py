"""Stages of a pipeline in one process: recorded steps, micro-batches and sampled tokens on their way, against one rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.engine.runner import InFlightStep, Runner
from dsv4lite.layout import Layout
from dsv4lite.parallel.mesh import Axis, Mesh
from dsv4lite.scheduling.step_plan import StepPlan
from dsv4lite.weights.quant import Numerics
from tests.golden import TINY, fill, poisoned, tiny_checkpoint
from tests.kernels.test_recorded_sampling import CPU, no_device, pytestmark, run, runner_of  # noqa: F401 the fixture is for all

pytest.importorskip("triton")
PATIENCE_S = 30.0


class Parcel:
    """A tensor on its way, not to be written until it is taken."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.as_sent, self.taken = tensor, tensor.clone(), threading.Event()

    def wait(self) -> None:
        assert self.taken.wait(PATIENCE_S), "what was sent is not taken"

    def take(self, into: Tensor) -> None:
        assert torch.equal(self.tensor, self.as_sent), "overwritten while under way"
        into.copy_(self.tensor)
        self.taken.set()


class Taking:
    def __init__(self, parcels: SimpleQueue[Parcel], into: Tensor) -> None:
        self.parcels, self.into = parcels, into

    def wait(self) -> None:
        self.parcels.get(timeout=PATIENCE_S).take(self.into)


class Link:
    """What two stages of one process have in place of a process group: nothing is done before a wait for it."""

    def __init__(self) -> None:
        self.streams: SimpleQueue[Parcel] = SimpleQueue()
        self.tokens: SimpleQueue[Parcel] = SimpleQueue()

    def end(self, rank: int) -> Any:
        return type("End", (), {"send": self.send, "recv": self.recv, "broadcast": self.root if rank else self.leaf})

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Parcel:
        self.streams.put(parcel := Parcel(tensors[0]))
        return parcel

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Taking:
        time.sleep(0.005)  # lets the other stage go on as far as it dares
        return Taking(self.streams, tensors[0])

    def root(self, tensors: list[Tensor], options: Any) -> Parcel:
        self.tokens.put(parcel := Parcel(tensors[0]))
        return parcel

    def leaf(self, tensors: list[Tensor], options: Any) -> Taking:
        return Taking(self.tokens, tensors[0])


class Line:
    """A pipeline of two stages, the second of which has a thread of its own, as ``Ranks`` has processes."""

    def __init__(self, stages: list[Runner]) -> None:
        self.stages = stages
        self.work: SimpleQueue[Callable[[], InFlightStep | None] | None] = SimpleQueue()
        self.flights: SimpleQueue[InFlightStep] = SimpleQueue()
        self.thread = threading.Thread(target=self.follow)
        self.thread.start()

    def follow(self) -> None:
        with torch.inference_mode():
            while (work := self.work.get()) is not None:
                if (flight := work()) is not None:
                    self.flights.put(flight)

    def launch(self, plan: StepPlan) -> Any:
        self.work.put(partial(self.stages[1].launch, plan))
        assert self.stages[0].launch(plan).samples is None
        return type("Flight", (), {"plan": plan, "wait": lambda flight: self.flights.get(timeout=PATIENCE_S).wait()})()

    def add(self, *args: Any) -> None:
        self.stages[0].add(*args)
        self.stages[1].add(*args)

    def remove(self, seq_id: int) -> None:
        self.stages[0].remove(seq_id)
        self.work.put(partial(self.stages[1].remove, seq_id))

    def accept(self, seq_id: int, token_id: int) -> None:
        self.work.put(partial(self.stages[1].accept, seq_id, token_id))

    def close(self) -> None:
        self.work.put(None)
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def test_recorded_stages_give_what_one_rank_gives() -> None:
    numerics = Numerics.choose(dtype=torch.float32, quantized=False, deterministic=True, device=CPU)
    weights, link, layout = tiny_checkpoint(TINY), Link(), Layout(pp=2)
    stages = []
    for rank in range(2):
        axes = {name: Axis(name, rank, 2, link.end(rank)) for name in ("pp", "replica")}
        mesh = Mesh(layout=layout, rank=rank, **axes)
        model = poisoned(TINY, numerics, mesh)
        fill(model, {name: weights[name] for name in model.slots()}).requires_grad_(False)
        stages.append(runner_of(model, recorded=True, mesh=mesh))
    line = Line(stages)
    try:
        together = run(line, stages=2)
    finally:
        line.close()
    alone = fill(poisoned(TINY, numerics), weights).requires_grad_(False)
    assert together == run(runner_of(alone, recorded=False))
    assert all(stage._graphs is not None and stage._graphs._captured for stage in stages)
