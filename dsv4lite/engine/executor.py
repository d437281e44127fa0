"""Executors run the steps of an engine: in its own thread, in child processes, or on ranks that the host has started."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pickle import PicklingError
from typing import Any, TypeVar

from torch import Tensor

from dsv4lite.checks import names_main
from dsv4lite.config import EngineConfig, LoadProgress, Progress
from dsv4lite.device import choose_device, own_thread, sole_device
from dsv4lite.engine.rank import Probe, ProbeReport, common_plan, device_of, require_files, require_ranks, sendable, software
from dsv4lite.engine.resident import Ask
from dsv4lite.engine.runner import Runner, StepResult
from dsv4lite.engine.wire import PlanWriter
from dsv4lite.engine.worker import Answer, Change, ChangeMethod, ExternalWorker, SentAsk, Start, Step, answer_to, unsendable
from dsv4lite.errors import DSV4LiteError, EngineDeadError, WeightUpdateError, described
from dsv4lite.parallel.channel import Channel, Closed, encode
from dsv4lite.parallel.launch import RankProcess
from dsv4lite.parallel.mesh import LOOPBACK, Mesh, open_store
from dsv4lite.parallel.rendezvous import ExternalRank, Rendezvous, lead
from dsv4lite.parallel.watch import Loss, Watch
from dsv4lite.planning.memory import MemoryPlan, require_fit
from dsv4lite.request import Request
from dsv4lite.scheduling.replicas import SEQ_IDS, JointPlan
from dsv4lite.scheduling.step_plan import StepPlan, StepShape
from dsv4lite.text.structured import GrammarCompiler, StructuredOutputs
from dsv4lite.weights.shared import SharedWeights

log = logging.getLogger("dsv4lite.engine")

M = TypeVar("M")
_WORKER = "dsv4lite.engine.worker"
_FINISH = "finish a step"  # for the error of a rank that is too slow


class InProcessExecutor:
    """The only rank of an engine, in the engine's thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def probe(self, stack: ExitStack) -> tuple[ProbeReport, MemoryPlan]:
        """Inspect checkpoint and device; this thread uses its own stream until ``stack`` ends."""
        device = choose_device(self._config)
        stack.enter_context(own_thread(device, deterministic=self._config.deterministic))
        self._probe = Probe.of(self._config, device)
        return self._probe.report, self._probe.report.plan

    def load(self, plan: MemoryPlan, grammars: GrammarCompiler | None, progress: Progress | None) -> Runner:
        """Load everything; return the runner."""
        return self._probe.build(plan, Mesh(), grammars, progress)


def make_executor(
    config: EngineConfig, on_loss: Callable[[DSV4LiteError], None]
) -> tuple[EngineConfig, InProcessExecutor | MultiRankExecutor | ExternalWorker]:
    """Return the settings, with the sizes of a device mesh, and the executor that they name.

    With ``executor="external"`` this is a collective call of the host's ranks; all but rank 0 get an ``ExternalWorker``.

    Raises:
        ConfigError: The host has no process groups, its ranks differ, or an engine cannot start ranks of its own.
        CapacityError: The machine has too little memory for the processes of the ranks, or one may not open enough files.
        DSV4LiteError: The error of a rank of the host, raised on every rank.
    """
    if config.place_of_ranks != "external":
        if config.layout.world == 1 and config.place_of_ranks == "thread":
            return config, InProcessExecutor(config)
        require_ranks(config)
        return config, MultiRankExecutor(config, on_loss)
    host = Rendezvous.of(config)
    problem, device = host.problem, ""
    try:
        if problem is None:
            require_files(host.config.layout)
            device = sole_device(device_of(host.config, host.rank))
    except DSV4LiteError as error:
        problem = error
    machines = host.agree(software(), problem, device)
    if host.rank == 0:
        return host.config, MultiRankExecutor(host.config, on_loss, (host, machines))
    return host.config, ExternalWorker(host, on_loss)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointStep:
    """A step that has been launched on all ranks; see ``InFlightStep``.

    Attributes:
        plan: The step's plan.
        parts: Functions that wait for the results of a replica each.
    """

    plan: StepPlan | JointPlan
    parts: Sequence[Callable[[], StepResult]]

    def wait(self) -> StepResult:
        """Wait for the results of all replicas."""
        joint = StepResult()
        for result in [part() for part in self.parts]:
            joint.sampled.update(result.sampled)
            joint.scores.update(result.scores)
            joint.chosen.update(result.chosen)
        return joint


class MultiRankExecutor:
    """The leader of an engine with several ranks. It has the methods of a ``Runner``, and calls them on every rank.

    Args:
        config: Settings; more than one rank, or ``executor="process"``.
        on_loss: Called in another thread when a rank is lost. It may be this rank, whose thread may never return from its step.
            While the engine starts it gets the lost rank's own error if there is one.
        host: For ranks of the host: the rendezvous of this rank, which is rank 0, and the name of each rank's machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_loss: Callable[[DSV4LiteError], None],
        host: tuple[Rendezvous, Mapping[int, str]] | None = None,
    ) -> None:
        self._host, self._config = host, config
        self._layout = config.layout
        self._on_loss = on_loss
        self._phase = "start"
        self._lost: EngineDeadError | None = None
        self._processes: dict[int, RankProcess | ExternalRank] = {}
        self._watch: Watch | None = None
        self._store: Any = None
        self._probe: Probe | None = None
        self._local: Runner | None = None
        self._mesh: Mesh | None = None
        self._changes: list[list[Change]] = [[] for _ in range(self._layout.dp)]
        self._writers = [PlanWriter() for _ in range(self._layout.dp)]
        self._shared = self._layout.ep > self._layout.tp  # replicas share experts, so all of them run every step
        self._recording: set[int] = set()
        self._replaying: set[int] = set()

    # ------------------------------------------------------------------------------------------------------------- the start

    def probe(self, stack: ExitStack) -> tuple[ProbeReport, MemoryPlan]:
        """Start the ranks and compare their reports; ``stack`` ends the ranks.

        Returns:
            The report of rank 0, and the memory plan of all ranks.

        Raises:
            DSV4LiteError: The error of a rank, or the differences between ranks.
        """
        stack.callback(self.close)
        config = sendable(self._config)
        if self._host is None:
            name = bind = LOOPBACK
            for rank in range(self._layout.world):
                if rank > 0 or config.executor == "process":
                    self._processes[rank] = RankProcess(rank, _WORKER)
        else:
            (name, bind), found = lead(*self._host, config.start_timeout_s)
            self._processes |= found
        self._store = open_store(name, bind)
        self._watch = Watch({r: p.life for r, p in self._processes.items()}, config.rank_timeout_s, self._lose)
        for rank, process in self._processes.items():
            self._send(process.work, encode(Start(config=config, rank=rank, store=(name, self._store.port))))
        try:
            reports: dict[int, ProbeReport] = {}
            if 0 not in self._processes:
                device = device_of(config, 0)
                stack.enter_context(own_thread(device, deterministic=config.deterministic))
                self._probe = Probe.of(config, device, several=True)
                reports[0] = self._probe.report
            reports |= self._gather(ProbeReport)
            plan = common_plan(reports)
            require_fit(plan)
        except Exception as error:
            self._cancel_start(error)
            raise
        return reports[0], plan

    def _cancel_start(self, error: Exception) -> None:
        """Send the other ranks the error that ended the start, and end them."""
        assert self._watch is not None
        self._watch.stop()  # ranks that end from now on are not reported as lost
        if not isinstance(error, DSV4LiteError):
            error = EngineDeadError(f"rank 0 could not start: {described(error)}", rank=0, phase=self._phase)
        for process in self._processes.values():
            process.kill(error)

    def load(self, plan: MemoryPlan, grammars: GrammarCompiler | None, progress: Progress | None) -> MultiRankExecutor:
        """Load on all ranks, and return when they are ready for steps."""
        self._phase = "load"
        for process in self._processes.values():
            self._send(process.work, encode(plan))
        if self._probe is not None:
            assert self._store is not None and self._watch is not None
            device, timeout_s = self._probe.numerics.device, self._config.start_timeout_s
            try:
                self._mesh = Mesh.from_store(self._store, self._layout, 0, device, host=self._store.host, timeout_s=timeout_s)
                with self._watch.within(timeout_s, 0, "get ready"):
                    self._local = self._probe.build(plan, self._mesh, grammars, progress)
            except RuntimeError as error:
                raise self.explain(error) from error
        for rank, warmed in sorted(self._gather(str, progress).items()):
            if warmed:
                log.info("rank %d: %s", rank, warmed)
        self._phase = "step"
        return self

    def _gather(self, kind: type[M], progress: Progress | None = None) -> dict[int, M]:
        """Return a message of a kind from every other rank, by rank."""
        until = time.monotonic() + self._config.start_timeout_s
        waiting = {process.work.connection: rank for rank, process in self._processes.items()}
        found: dict[int, M] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, sorted(waiting.values())))
                complaint = f"not ready within start_timeout_s={self._config.start_timeout_s:g}: rank {late}"
                raise EngineDeadError(complaint, rank=min(waiting.values()), phase=self._phase)
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    message: object = self._processes[rank].work.receive()
                except Closed as error:
                    raise self.explain(error) from None
                if isinstance(message, LoadProgress):
                    if progress is not None:
                        progress(message)
                else:
                    assert isinstance(message, kind), message
                    found[rank] = message
                    del waiting[connection]  # type: ignore[arg-type]
        return found

    # ----------------------------------------------------------------------------------------------------- a runner's methods

    def prepare(self, grammar: StructuredOutputs) -> None:
        """Let the ranks that sample compile a grammar while the leader compiles it, so that no step waits for it."""
        for replica in range(self._layout.dp):
            self._send_step(replica, Step(changes=(("prepare", (grammar,)),), plan=None, shape=None))

    def add(self, seq_id: int, request: Request, index: int) -> None:
        """Announce a sequence before its first step."""
        if request.params.records_choices or request.replay is not None:  # its replica runs eagerly, and so must the others
            self._recording.add(seq_id)
        if request.replay is not None and request.replay.routed_experts is not None:
            self._replaying.add(seq_id)
        self._change(seq_id, "add", seq_id, request, index)
        if index == 0 and request.params.structured_outputs is not None:  # its grammar is compiled from now on, not in a step
            replica = seq_id // SEQ_IDS
            self._send_step(replica, Step(changes=tuple(self._changes[replica]), plan=None, shape=None))
            self._changes[replica].clear()

    def remove(self, seq_id: int) -> None:
        self._recording.discard(seq_id)
        self._replaying.discard(seq_id)
        self._change(seq_id, "remove", seq_id)

    def accept(self, seq_id: int, token_id: int) -> None:
        self._change(seq_id, "accept", seq_id, token_id)

    def _change(self, seq_id: int, method: ChangeMethod, *arguments: Any) -> None:
        """Call a method of the runners of a sequence's replica: here at once, in workers before their next step."""
        replica = seq_id // SEQ_IDS
        if self._local is not None and replica == 0:
            getattr(self._local, method)(*arguments)
        self._changes[replica].append((method, arguments))

    def launch(self, plan: StepPlan | JointPlan) -> JointStep:
        """Start a step on all ranks."""
        assert self._watch is not None
        plans = plan.plans if isinstance(plan, JointPlan) else (plan,)
        shape = StepShape.of(plans, self._recording, self._replaying) if self._shared else None
        changes, self._changes = self._changes, [[] for _ in range(self._layout.dp)]
        parts: list[Callable[[], StepResult]] = []
        for replica, part in enumerate(plans):
            if part is None and shape is None:
                self._changes[replica] = changes[replica]  # sent with its next step
                continue
            written = None if part is None else self._writers[replica].write(part)
            self._send_step(replica, Step(changes=tuple(changes[replica]), plan=written, shape=shape))
            reporter = self._layout.reporter(replica)
            if part is not None and reporter in self._processes:
                parts.append(partial(self._result, reporter, self._processes[reporter].work.receive))
        if self._local is not None:
            reporter = self._layout.reporter(0)
            with self._watch.within(self._config.step_timeout_s, reporter, _FINISH):
                if plans[0] is not None:
                    step = self._local.launch(plans[0], shape=shape)
                    if reporter == 0:
                        parts.insert(0, partial(self._result, reporter, step.wait))
                elif shape is not None:
                    self._local.take_part(shape)
        return JointStep(plan=plan, parts=parts)

    def _result(self, rank: int, wait: Callable[[], StepResult]) -> StepResult:
        """Return the result of a step from the rank that samples."""
        assert self._watch is not None
        with self._watch.within(self._config.step_timeout_s, rank, _FINISH):
            try:
                return wait()
            except Closed as error:
                raise self.explain(error) from None

    def ask(self, ask: Ask) -> list[Any]:
        """Call a method of every rank's ``Resident``; return the results by rank. No step may be in flight.

        Raises:
            InvalidRequestError: The arguments cannot be sent to other processes.
            WeightUpdateError: The tensors that ranks rejected, joined.
            Exception: The error of one rank. By then, every rank has run the method or failed in it.
        """
        assert self._watch is not None
        with ExitStack() as stack:
            shared = self._with_shared_tensors(ask, stack)
            try:
                arguments = encode(shared.arguments)
            except (PicklingError, AttributeError, TypeError) as error:  # what ``pickle`` raises for local functions, locks, …
                raise unsendable(ask.method, error) from error
            if ask.method == "apply" and self._host is None and names_main(arguments):
                raise unsendable(ask.method, ImportError("ranks in child processes do not import the host's __main__"))
            message = encode(SentAsk(method=ask.method, arguments=arguments))
            for process in self._processes.values():
                self._send(process.work, message)
            answers = [] if self._local is None else [answer_to(self._local, ask)]
            for rank, process in sorted(self._processes.items()):
                with self._watch.within(self._config.start_timeout_s, rank, f"{ask.method} weights or memory"):
                    try:
                        answers.append(process.work.receive())
                    except Closed as error:
                        raise self.explain(error) from None
                    except BaseException as error:  # unpickling what a function of the host returned; others still answer
                        answers.append(Answer(error=error))
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            raise joined(errors)
        return [answer.result for answer in answers]

    def _with_shared_tensors(self, ask: Ask, stack: ExitStack) -> Ask:
        """Return the call with its tensors in shared memory until ``stack`` ends, which avoids a copy to each child process.

        Ranks of the host may be on other machines; they get the tensors in messages.
        """
        if ask.method != "take" or self._host is not None:
            return ask
        serial, bucket = ask.arguments
        held = [(name, tensor) for name, tensor in bucket if isinstance(tensor, Tensor)]
        shared = stack.enter_context(SharedWeights(held, on_host=True))
        others = [(name, given) for name, given in bucket if not isinstance(given, Tensor)]
        return Ask("take", (serial, [*others, *((handle.name, handle) for handle in shared.handles)]))

    # --------------------------------------------------------------------------------------------------------------- the end

    def explain(self, error: BaseException) -> BaseException:
        """Return the loss of a rank if one caused the error, else the error."""
        if self._watch is not None:
            self._watch.await_decision()
        return error if self._lost is None else self._public(self._lost)

    def _public(self, lost: EngineDeadError) -> DSV4LiteError:
        """Return the error to raise for a loss: while the engine starts, the lost rank's own error if it sent one."""
        cause = lost.__cause__
        return cause if self._phase in ("start", "load") and isinstance(cause, DSV4LiteError) else lost

    def close(self) -> None:
        """End the ranks. May be repeated."""
        if self._watch is not None:
            self._watch.stop()
        self._end(kill=self._lost is not None or self._phase != "step")
        if self._local is not None:
            self._local.close()
        if self._mesh is not None and self._lost is None:
            self._mesh.close()
        self._local = self._probe = self._mesh = self._store = None

    def _lose(self, loss: Loss) -> None:
        """Fail everything that waits for a lost rank; called in the thread of the watch."""
        process = self._processes.get(loss.rank)  # ``None`` for this rank
        where = f"process {os.getpid()}" if process is None else process.where
        reason = process.fate() if loss.gone and process is not None else loss.reason
        lost = EngineDeadError(f"rank {loss.rank} ({where}) {reason}; phase: {self._phase}", rank=loss.rank, phase=self._phase)
        lost.__cause__ = loss.error
        self._lost = lost
        self._on_loss(self._public(lost))
        for other in self._processes.values():
            other.kill(self._public(lost))
        if self._mesh is not None and self._probe is not None and self._probe.numerics.device.type == "cuda":
            self._mesh.abort()

    def _end(self, *, kill: bool) -> None:
        processes, self._processes = self._processes, {}
        for process in processes.values():
            if not kill:
                try:
                    process.work.send(None)
                except Closed:
                    continue
        for process in processes.values():
            process.end(kill=kill)

    def _send_step(self, replica: int, step: Step) -> None:
        """Send to the ranks of a replica, which may be in a step: a long message waits until a rank has finished it, and reads."""
        assert self._watch is not None
        message = encode(step)
        for rank, process in self._processes.items():
            if self._layout.place(rank).dp == replica:
                with self._watch.within(self._config.step_timeout_s, rank, _FINISH):
                    self._send(process.work, message)

    def _send(self, channel: Channel, message: bytes) -> None:
        try:
            channel.send_bytes(message)
        except Closed as error:
            raise self.explain(error) from None


def joined(errors: Sequence[BaseException]) -> BaseException:
    """Return one error for the errors of ranks: the first that is no ``WeightUpdateError``, or one that lists all tensors."""
    refusals = [error for error in errors if isinstance(error, WeightUpdateError)]
    if len(refusals) < len(errors):
        return next(error for error in errors if not isinstance(error, WeightUpdateError))
    names = ("missing", "unexpected", "mismatched")
    lines = {name: dict.fromkeys(line for error in refusals for line in getattr(error, name)) for name in names}
    return WeightUpdateError(refusals[0].reason, **lines)
