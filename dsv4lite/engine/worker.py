"""Workers: the ranks of an engine other than the leader. They load together and run the leader's plans.

    leader                                       worker
    Start                             ------>
                                      <------    ProbeReport      memory it would use, and facts to compare
    MemoryPlan of all ranks           ------>    loads
                                      <------    LoadProgress …   from rank 0
                                      <------    str              ready for steps; what its warm-up did
    Step(changes, plan)               ------>    runner.launch
                                      <------    StepResult       from ranks that sample
    SentAsk(method, arguments)        ------>    runner.ask       while no step is in flight
                                      <------    Answer
    None                              ------>    the end

A worker is a child process (``main``) or a process of the host (``ExternalWorker``). Errors are sent on the connection for signs of
life, in both directions: at both ends a thread always listens there.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Literal

import torch

from dsv4lite.config import EngineConfig
from dsv4lite.device import own_thread
from dsv4lite.engine.rank import Probe, ProbeReport, device_of, grammar_compiler, sendable
from dsv4lite.engine.resident import Ask, ResidentMethod
from dsv4lite.engine.runner import InFlightStep, Runner
from dsv4lite.engine.wire import PlanReader, Wire
from dsv4lite.errors import DSV4LiteError, InvalidRequestError
from dsv4lite.parallel.channel import Channel, Closed, encode, portable
from dsv4lite.parallel.launch import Heartbeat, set_up_child
from dsv4lite.parallel.mesh import Mesh, join_store
from dsv4lite.parallel.rendezvous import Rendezvous, join
from dsv4lite.planning.memory import MemoryPlan
from dsv4lite.scheduling.step_plan import StepShape
from dsv4lite.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a worker: settings, its rank, and host and port of the store in which ranks find each other."""

    config: EngineConfig
    rank: int
    store: tuple[str, int]


_VERDICT_S = 3.0  # how long to wait for the leader to say which rank was lost
ChangeMethod = Literal["prepare", "add", "remove", "accept"]  # of ``Runner``
Change = tuple[ChangeMethod, tuple[Any, ...]]
"""A method of ``Runner`` and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next step.

    Attributes:
        changes: Calls of the runner since the last step, in order.
        plan: Plan of the worker's replica; ``None`` if the replica has no sequences to run.
        shape: Shape of the step of all replicas if they share experts; a worker without a plan then runs its experts. Without
            plan and shape, only the changes are made.
    """

    changes: tuple[Change, ...]
    plan: Wire | None
    shape: StepShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentAsk:
    """An ``Ask`` of another process. Its arguments, which may be the host's, are still encoded: decoding them may fail."""

    method: ResidentMethod
    arguments: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of an ``Ask`` on one rank, or its error."""

    result: Any = None
    error: BaseException | None = None


def unsendable(method: str, error: BaseException) -> InvalidRequestError:
    """Return the error of a call whose function or arguments other processes cannot get."""
    problem = f"{method}: {error}; other ranks get functions and arguments by pickle: define them in a module"
    return InvalidRequestError(problem, parameter=method)


def answer_to(runner: Runner, ask: Ask | SentAsk) -> Answer:
    """Make the call on a runner of this process."""
    try:
        if isinstance(ask, SentAsk):
            try:
                ask = Ask(ask.method, pickle.loads(ask.arguments))
            except Exception as error:
                raise unsendable(ask.method, error) from error
        return Answer(result=runner.ask(ask)[0])
    except BaseException as error:  # a function of the host may raise anything, ``CancelledError`` too
        return Answer(error=portable(error))


def main(work: int, life: int, parent: int) -> None:
    """Run a worker in a child process of the engine's process ``parent``, on two sockets; see ``parallel.launch``."""
    channel, life_channel = Channel(Connection(work)), Channel(Connection(life))
    heartbeat = Heartbeat(life_channel, lambda error: os._exit(1), parent)
    status = 1
    try:
        start: Start = channel.receive()
        with ExitStack() as stack:
            device = device_of(start.config, start.rank)
            set_up_child(device, start.config.layout.world)
            stack.enter_context(own_thread(device, deterministic=start.config.deterministic))
            worker = Worker(start.config, start.rank, device, channel, life_channel)
            worker.load(start.store)
            worker.run()
        status = 0
    except Closed:
        pass  # the leader is gone, or is ending this process
    except BaseException as error:
        life_channel.send(portable(error))
        threading.Event().wait()  # until the leader has received it and ends this process
    finally:
        heartbeat.stop()
        os._exit(status)  # skips destructors of process groups, which may wait for lost ranks


class Worker:
    """A rank that runs the leader's plans; constructed and used in one thread, which has its own stream.

    Attributes:
        mesh: This rank's axes, once it has joined the others.
    """

    def __init__(self, config: EngineConfig, rank: int, device: torch.device, work: Channel, life: Channel) -> None:
        self._config, self._rank, self._device = config, rank, device
        self._work, self._life = work, life
        self._runner: Runner | None = None
        self.mesh: Mesh | None = None
        self._reader = PlanReader()
        self._launched: SimpleQueue[InFlightStep | None] = SimpleQueue()

    def load(self, store: tuple[str, int]) -> ProbeReport:
        """Load together with the other ranks, and return the report of this one.

        Raises:
            Closed: The leader is gone.
            DSV4LiteError: This rank cannot load, or the ranks do not fit together.
        """
        config, rank = self._config, self._rank
        probe = Probe.of(config, self._device, rank, several=True)
        self._work.send(probe.report)
        plan: MemoryPlan = self._work.receive()
        found, timeout_s = join_store(*store), config.start_timeout_s
        mesh = self.mesh = Mesh.from_store(found, config.layout, rank, self._device, host=store[0], timeout_s=timeout_s)
        grammars = None
        if config.layout.reporter(mesh.place.dp) == rank:
            vocab_size = probe.source.model.vocab_size
            tokenizer = Tokenizer.from_folder(config.tokenizer or probe.source.folder, vocab_size=vocab_size)
            grammars, _ = grammar_compiler(tokenizer, vocab_size)
        self._runner = probe.build(plan, mesh, grammars, self._work.send if rank == 0 else None)
        self._work.send(self._runner.warmed)
        return probe.report

    def run(self) -> None:
        """Run plans until the leader closes its engine; raise ``Closed`` if the leader is gone."""
        assert self._runner is not None
        reporting = self._runner.sampler is not None
        # On a GPU another thread waits for results while this one launches the next step. It sends results on a CPU, too: the
        # leader of a pipeline reads them only after it has sent the next step, which this thread must receive.
        apart = threading.Thread(target=self._report, name="dsv4lite-results", daemon=True)
        if reporting:
            apart.start()
        try:
            with torch.inference_mode():
                while (step := self._work.receive()) is not None:
                    if isinstance(step, SentAsk):
                        answer = answer_to(self._runner, step)
                        try:
                            message = encode(answer)
                        except Exception as error:  # ``pickle`` does not take the result of a function of the host
                            message = encode(Answer(error=portable(error)))
                        self._work.send_bytes(message)
                        continue
                    launched = self._run(step)
                    if launched is not None and reporting:
                        self._launched.put(launched)
        finally:
            self._launched.put(None)
        if reporting:
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
        if self.mesh is not None:
            self.mesh.close()
        self._runner = self.mesh = None

    def _report(self) -> None:
        try:
            while (launched := self._launched.get()) is not None:
                self._work.send(launched.wait())
        except Closed:
            return
        except BaseException as error:
            self._life.send(portable(error))


class ExternalWorker:
    """A worker in a process of the host; constructed and used in the thread of its engine, which runs nothing else.

    ``on_loss`` is called in another thread when a rank is lost, or the leader is gone.
    """

    def __init__(self, host: Rendezvous, on_loss: Callable[[DSV4LiteError], None]) -> None:
        self._host = host
        self._on_loss = on_loss
        self._lost: DSV4LiteError | None = None
        self._left = False
        self._knows = threading.Event()
        self._worker: Worker | None = None

    def open(self, stack: ExitStack) -> ProbeReport:
        """Load together with the other ranks; return the report of this one.

        Raises:
            DSV4LiteError: This rank cannot load, or the ranks do not fit together.
        """
        config = sendable(self._host.config)
        device = device_of(config, self._host.rank)
        self._work, self._life = join(self._host, config.start_timeout_s)
        stack.callback(self._work.close)
        stack.callback(self._life.close)
        stack.enter_context(own_thread(device, deterministic=config.deterministic))
        worker = self._worker = Worker(config, self._host.rank, device, self._work, self._life)
        stack.callback(worker.close)
        heartbeat = Heartbeat(self._life, self._lose)
        stack.callback(heartbeat.stop)
        try:
            start: Start = self._work.receive()
            return worker.load(start.store)
        except BaseException as error:
            raise self._explained(error) from None

    def run(self) -> None:
        """Run the leader's plans until it closes its engine.

        Raises:
            EngineDeadError: A rank was lost.
        """
        assert self._worker is not None
        try:
            self._worker.run()
        except BaseException as error:
            if not (self._left and isinstance(error, Closed)):
                raise self._explained(error) from None

    def leave(self) -> None:
        """Stop because this process ends; for the leader the rank is lost."""
        self._left = True
        self._work.shut_down()

    def _lose(self, error: DSV4LiteError) -> None:
        """Fail everything that waits for other ranks; called in the thread of the heartbeat."""
        self._lost = error
        self._knows.set()
        self._on_loss(error)
        self._work.shut_down()
        if self._worker is not None and self._worker.mesh is not None:
            self._worker.mesh.abort()

    def _explained(self, error: BaseException) -> BaseException:
        """Return the cause of an error: this rank's own error, which is sent to the leader, or the loss that the leader reports."""
        if self._lost is None and not isinstance(error, Closed):
            with suppress(Closed):
                self._life.send(portable(error))
        if isinstance(error, DSV4LiteError):
            return error
        self._knows.wait(_VERDICT_S)
        return self._lost or error
