"""What a rank does that does not lead: it gets ready step by step with the others, then runs the leader's plans until told to stop.

    leader                                       rank
    Setup                             ------>
                                      <------    Survey           what it would hold, and facts to compare
    Go(plan)                          ------>
                                      <------    LoadProgress …
                                      <------    Ready
    Step(changes, plan)               ------>    runner.launch
                                      <------    Landed           from ranks that sample
    None                              ------>    the end

Errors go the way of signs of life, in both directions: at either end somebody listens there at any time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

import torch
from torch import Tensor

from dsv4lite.config import EngineConfig, LoadProgress
from dsv4lite.device import own_thread
from dsv4lite.engine.rank import Prospect, bare, device_of, grammar_compiler
from dsv4lite.engine.runner import InFlightStep, Runner
from dsv4lite.engine.wire import PlanReader, Wire
from dsv4lite.errors import DSV4LiteError, EngineDeadError
from dsv4lite.parallel.channel import Channel, Closed, portable
from dsv4lite.parallel.launch import Pulse, connections, settle_child
from dsv4lite.parallel.meet import HostRanks, join
from dsv4lite.parallel.mesh import Mesh, join_store, near_only
from dsv4lite.planning.memory import MemoryPlan
from dsv4lite.request import Logprobs
from dsv4lite.scheduling.step_plan import Sampled, StepShape
from dsv4lite.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message to a child.

    Attributes:
        config: Settings, without what cannot leave the host's process.
        rank: Its number.
        store: Host and port where ranks meet.
    """

    config: EngineConfig
    rank: int
    store: tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Load, according to this plan."""

    plan: MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A rank is ready for steps.

    Attributes:
        warmed: What it has done for that, in words.
    """

    warmed: str


_VERDICT_S = 3.0  # how long to wait for the leader to say who was lost
Change = tuple[Literal["prepare", "add", "remove", "accept"], tuple[Any, ...]]
"""A method of ``Runner`` and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to do next.

    Attributes:
        changes: Since the last step, in order.
        plan: For the rank's replica; ``None`` if it has nothing to do but to take part with its experts.
        shape: Of the step of all replicas, where they share experts. Without plan and shape there are only the changes.
    """

    changes: tuple[Change, ...]
    plan: Wire | None
    shape: StepShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """What a step has brought; see ``InFlightStep``."""

    results: dict[int, Sampled] = field(default_factory=dict)
    scores: dict[int, Logprobs] = field(default_factory=dict)
    routed: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, flight: InFlightStep) -> Landed:
        """Wait for a step."""
        return cls(results=flight.results(), scores=flight.scores, routed=flight.routed)


def main(work: int, life: int, parent: int) -> None:
    """Be a child process of the engine's; see ``parallel.launch``."""
    channel, pulse_channel = connections(work, life)
    pulse = Pulse(pulse_channel, lambda error: os._exit(1), parent)
    status = 1
    try:
        setup: Setup = channel.receive()
        with ExitStack() as stack:
            device = device_of(setup.config, setup.rank)
            settle_child(device, setup.config.layout.world)
            stack.enter_context(own_thread(device, deterministic=setup.config.deterministic))
            follower = Follower(setup.config, setup.rank, device, channel, pulse_channel)
            follower.get_ready(setup.store)
            follower.work()
        status = 0
    except Closed:
        pass  # the leader is gone, or ends us
    except BaseException as error:
        pulse_channel.send(portable(error))
        threading.Event().wait()  # until the leader has heard of it, and ends us
    finally:
        pulse.stop()
        os._exit(status)  # without destructors of collectives, which may wait for ranks that are gone


class Follower:
    """A rank that runs what the leader plans.

    Attributes:
        mesh: The ranks, once they have met.
        prospect: What this one has found.

    Args:
        config: Settings.
        rank: Its number.
        device: Its device; this thread runs on its stream.
        work: Connection to the leader.
        life: Where errors of other threads go.
    """

    def __init__(self, config: EngineConfig, rank: int, device: torch.device, work: Channel, life: Channel) -> None:
        self._config, self._rank, self._device = config, rank, device
        self._work, self._life = work, life
        self._runner: Runner | None = None
        self.mesh: Mesh | None = None
        self.prospect: Prospect | None = None
        self._reader = PlanReader()
        self._flights: SimpleQueue[InFlightStep | None] = SimpleQueue()

    def get_ready(self, store: tuple[str, int]) -> None:
        """Load everything, together with the other ranks.

        Raises:
            Closed: The leader is gone.
            DSV4LiteError: What is wrong with this rank, or with the ranks together.
        """
        config, rank = self._config, self._rank
        prospect = Prospect.of(config, self._device, rank, several=True)
        self.prospect = prospect
        self._work.send(prospect.survey)
        go: Go = self._work.receive()
        host, timeout_s = near_only(store[0]), config.start_timeout_s
        mesh = self.mesh = Mesh.from_store(join_store(*store), config.layout, rank, self._device, host=host, timeout_s=timeout_s)
        grammars = None
        if config.layout.reporter(mesh.place.dp) == rank:
            vocab_size = prospect.source.model.vocab_size
            tokenizer = Tokenizer.from_folder(config.tokenizer or prospect.source.folder, vocab_size=vocab_size)
            grammars, _ = grammar_compiler(tokenizer, vocab_size)
        self._runner = prospect.build(go.plan, mesh, grammars, self._tell if rank == 0 else None)
        self._work.send(Ready(warmed=self._runner.warmed))

    def _tell(self, progress: LoadProgress) -> None:
        self._work.send(progress)

    def work(self) -> None:
        """Run plans until there are no more.

        Raises:
            Closed: The leader is gone.
        """
        assert self._runner is not None
        reporting = self._runner.sampler is not None
        # On a device with a stream of its own somebody else waits for results while the next step is launched.
        apart = threading.Thread(target=self._report, name="dsv4lite-results", daemon=True)
        if reporting and self._device.type == "cuda":
            apart.start()
        with torch.inference_mode():
            while (step := self._work.receive()) is not None:
                flight = self._run(step)
                if flight is None or not reporting:
                    continue
                if self._device.type == "cuda":
                    self._flights.put(flight)
                else:
                    self._work.send(Landed.of(flight))
        if apart.is_alive():
            self._flights.put(None)
            apart.join()

    def _run(self, step: Step) -> InFlightStep | None:
        runner = self._runner
        assert runner is not None
        for method, arguments in step.changes:
            getattr(runner, method)(*arguments)
        if step.plan is None:
            if step.shape is not None:
                runner.take_part(step.shape)
            return None
        return runner.launch(self._reader.read(step.plan), shape=step.shape)

    def close(self) -> None:
        """Free the model and its graphs, then the groups."""
        if self._runner is not None:
            self._runner.close()
        self._runner = self.prospect = self.mesh = None

    def _report(self) -> None:
        try:
            while (flight := self._flights.get()) is not None:
                self._work.send(Landed.of(flight))
        except Closed:
            return
        except BaseException as error:
            self._life.send(portable(error))


class Guest:
    """A rank of the host that does not lead; made and used in its engine's thread.

    Args:
        host: The host's ranks.
        on_loss: Called in another thread when a rank is lost, or the leader is gone.
    """

    def __init__(self, host: HostRanks, on_loss: Callable[[EngineDeadError], None]) -> None:
        self._host = host
        self._on_loss = on_loss
        self._lost: DSV4LiteError | None = None
        self._left = False
        self._heard = threading.Event()
        self._follower: Follower | None = None

    def open(self, stack: ExitStack) -> Prospect:
        """Get ready together with the other ranks; return what this one has found.

        Raises:
            DSV4LiteError: What is wrong with this rank, or with the ranks together.
        """
        config = bare(self._host.config)
        device = device_of(config, self._host.rank)
        work, life = join(self._host, config.start_timeout_s)
        stack.callback(work.close)
        stack.callback(life.close)
        stack.enter_context(own_thread(device, deterministic=config.deterministic))
        stack.callback(self._close)
        self._work = work
        pulse = Pulse(life, self._lose)
        stack.callback(pulse.stop)
        self._life = life
        try:
            setup: Setup = work.receive()
            self._follower = Follower(config, self._host.rank, device, work, life)
            self._follower.get_ready(setup.store)
        except BaseException as error:
            raise self._explained(error) from None
        assert self._follower.prospect is not None
        return self._follower.prospect

    def work(self) -> None:
        """Run what the leader plans, until it closes its engine.

        Raises:
            EngineDeadError: A rank is lost.
        """
        assert self._follower is not None
        try:
            self._follower.work()
        except BaseException as error:
            if not (self._left and isinstance(error, Closed)):
                raise self._explained(error) from None

    def leave(self) -> None:
        """Follow no longer, for this process ends; the leader loses a rank."""
        self._left = True
        self._work.hang_up()

    def explain(self, error: BaseException) -> BaseException:
        """Return what is behind an error."""
        return error

    def _lose(self, error: DSV4LiteError) -> None:
        """Stop waiting for anybody."""
        self._lost = error
        self._heard.set()
        if isinstance(error, EngineDeadError):  # else nothing was loaded, and ``open`` raises it
            self._on_loss(error)
        self._work.hang_up()
        if self._follower is not None and self._follower.mesh is not None:
            self._follower.mesh.abort()

    def _close(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def _explained(self, error: BaseException) -> BaseException:
        """Return what is behind an error; tell the leader if it is this rank's own."""
        if self._lost is None and not isinstance(error, Closed):
            with suppress(Closed):
                self._life.send(portable(error))
        if isinstance(error, DSV4LiteError):
            return error
        self._heard.wait(_VERDICT_S)
        return self._lost or error
