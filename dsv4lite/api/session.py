"""One engine and its open requests: the part of the API that does not wait.

A ``Session`` owns one engine. It keeps the queue of requests that wait for a place, passes the engine's updates to each request's
``Collector``, and knows the state of the engine. Only ``start`` and ``close`` block. Results are ``concurrent.futures.Future``
objects; ``AsyncLLM`` and ``LLM`` bring the bridge whose loop runs ``drain`` after an engine step.

    caller                       loop (event loop or delivery thread)           engine thread
    submit  ----------------------------------------------------------------->  engine.submit
                                 drain  <----- one post per step  ------------  deliver
            ticket's deltas <--- collector: text, stop strings
            and future
    abort   ----------------------------------------------------------------->  engine.abort
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar
from weakref import WeakSet

from dsv4lite.api.bridge import Bridge, Callback, Signal
from dsv4lite.api.collect import Collector
from dsv4lite.api.prepare import Job
from dsv4lite.bare import import_torch
from dsv4lite.checks import require
from dsv4lite.config import EngineConfig
from dsv4lite.errors import (
    DSV4LiteError,
    EngineDeadError,
    EngineStateError,
    QueueFullError,
    RequestFailedError,
    WeightsNotLoadedError,
)
from dsv4lite.request import (
    MEMORY_TAGS,
    Delta,
    FinishReason,
    MemoryTag,
    Phase,
    Request,
    RequestOutput,
    SequenceUpdate,
    WeightSource,
)

if TYPE_CHECKING:
    from dsv4lite.engine.engine import Engine

T = TypeVar("T")
PauseMode = Literal["keep", "wait", "abort"]
UpdateMode = Literal["keep", "wait", "abort", "recompute"]

SERVING = (Phase.READY, Phase.PAUSED, Phase.UPDATING)
STARTED = (*SERVING, Phase.ASLEEP, Phase.WEIGHTS_INVALID)
NOT_UPDATING = (Phase.READY, Phase.PAUSED, Phase.ASLEEP, Phase.WEIGHTS_INVALID)
_HINTS = {
    Phase.NEW: "start it first: enter it with `with` or `async with`, or make it with `create`",
    Phase.STARTING: "wait until it has started",
    Phase.READY: "it has been started already",
    Phase.PAUSED: "it has been started already",
    Phase.UPDATING: "leave the block of the open update first",
    Phase.ASLEEP: "wake it up with `wake_up`",
    Phase.WEIGHTS_INVALID: "give it all weights with `update_weights`",
    Phase.CLOSED: "make a new one",
}
_FOREVER = float("inf")
_MOST_ENDED_AT_ONCE = 64  # most requests that one call ends, holding the lock for 0.1 ms each


def open_engine(config: EngineConfig) -> Engine:
    """Make an engine; the only place that imports the layers below, and with them torch.

    All its methods but ``start`` and ``close`` are thread-safe and never block. Every sequence of an accepted request ends with
    exactly one update that has a ``finish_reason``; a request that the engine refuses ends with one that has an ``error``.
    """
    import_torch()
    from dsv4lite.engine.engine import Engine

    return Engine(config)


@dataclass(slots=True, eq=False)
class Ticket:
    """One open request, queued or in the engine.

    Attributes:
        request_id: The caller's id.
        request: With the engine's id.
        wake: Of a stream: called after ``deltas`` or ``future`` changed, in any thread; must not block nor call the session.
        open_sequences: Number of its sequences that the engine has not ended yet.
        future: Gets the output. It never fails: a failed request has an output with an ``error``.
        deltas: What a stream has not read yet.
    """

    request_id: str
    request: Request
    collector: Collector
    wake: Callback | None
    open_sequences: int
    future: Future[RequestOutput] = field(default_factory=Future)
    deltas: deque[Delta] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        return self.future.done()

    def result(self) -> RequestOutput:
        """Return the output of a request that is done, or raise its error."""
        output = self.future.result()
        if output.error is not None:
            raise output.error
        return output

    def add(self, delta: Delta) -> None:
        """Keep a delta for the stream, unless it is empty."""
        if self.wake and (delta.token_ids or delta.text or delta.reasoning or delta.tool_calls or delta.finish_reason):
            self.deltas.append(delta)
            self.wake()


@dataclass(slots=True, eq=False)
class Pause:
    """A call of ``pause``, until ``resume``; or a ``paused`` block, until it is left.

    Attributes:
        block: It is a ``paused`` block.
        frozen: Requests in the engine keep their state; otherwise they finish first, and then this is set.
        answered: The engine was ordered to pause, and ``done`` follows its answer.
        done: Completes when the engine has paused.
    """

    block: bool
    frozen: bool
    answered: bool = False
    done: Future[None] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class Update:
    """An open weight update.

    Attributes:
        version: Of the new weights.
        serial: Its number in the session.
        staged: Nothing is written before the commit.
        pause: Stops requests while weights are written.
        loads: Calls of ``load`` that have not succeeded; they may have delivered only some of their tensors.
        ended: It was committed or rolled back, or the engine has been told to commit.
    """

    version: int
    mode: UpdateMode
    partial: bool
    staged: bool
    serial: int = 0
    pause: Pause | None = None
    loads: set[Future[None]] = field(default_factory=set)
    ended: bool = False


class Session:
    """One engine and its open requests. Thread-safe; see the module's docstring.

    Attributes:
        weight_version: Of the last committed update.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._phase = Phase.NEW
        self._process: int | None = None  # id of the process that started the engine
        self._failure: EngineDeadError | None = None
        self._engine: Engine | None = None
        self._bridge: Bridge | None = None
        self._lifecycle = threading.Lock()  # held while the engine starts or closes
        self._lock = threading.RLock()  # guards what follows, up to the updates
        self._visible: dict[str, Ticket] = {}  # open for their callers, by request_id
        self._in_engine: dict[str, Ticket] = {}  # open for the engine, by its id; the caller may have left
        self._queue: OrderedDict[str, Ticket] = OrderedDict()  # waiting for a place, in order of arrival, by the engine's id
        self._ending: OrderedDict[Ticket, tuple[FinishReason, DSV4LiteError | None]] = OrderedDict()  # ended in groups
        self._pauses: list[Pause] = []  # while there are any, requests stay queued
        self._stopped = False  # the engine was told to pause
        self._answer = _done()  # the engine's answer to the last order to pause or resume
        self._released: frozenset[MemoryTag] = frozenset()  # what sleeps, or will once the engine has carried out its commands
        self._memory = _done()  # the last sleep or wake-up
        self._valid = True  # whether weights, resident or in host memory, are valid, or will be after these commands
        self._orders = 0  # pending calls that change these two
        self._hold: Pause | None = None  # while the engine cannot serve
        self._update: Update | None = None
        self.weight_version = 0
        self._sweeps = [_FOREVER]  # times at which the deadlines of queued requests are checked, the next one last
        self._serial, self._reuses = itertools.count(), itertools.count()
        self._update_serial = itertools.count()
        self._mean_seconds = 1.0  # of recent requests
        self._updates_lock = threading.RLock()
        self._updates: list[SequenceUpdate] = []
        self._posted = False
        self._orphaned = False
        self._readers: WeakSet[Signal] = WeakSet()  # woken when the engine ends

    # ---- state ----

    @property
    def phase(self) -> Phase:
        """The state of the engine."""
        return Phase.UPDATING if self._update is not None and self._state in STARTED else self._state

    @property
    def _state(self) -> Phase:
        """The state without regard to an open update, even one that is overwriting the weights."""
        if self.forked:
            return Phase.CLOSED
        if self._phase is not Phase.READY:
            return self._phase
        if self._failure is not None:  # a caller may have the engine's error before the loop has it
            return Phase.FAILED
        if self._released:
            return Phase.ASLEEP
        if not self._valid and (self._update is None or self._hold is not None):
            return Phase.WEIGHTS_INVALID
        return Phase.PAUSED if self._stopped else Phase.READY

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the engine's. It lacks the engine's thread, and its copies of locks may stay locked."""
        return self._process is not None and self._process != os.getpid()

    def require_process(self, call: str) -> None:
        """Raise unless this process started the engine.

        Raises:
            EngineStateError: This process is a fork of the one that did.
        """
        if self.forked:
            message = f"{call}: process {self._process} started the engine, and this is a fork of it; start an engine here"
            raise EngineStateError(message, state=Phase.CLOSED.value)

    def require_here(self, call: str) -> None:
        """Raise unless the caller may wait here.

        Raises:
            EngineStateError: An ``AsyncLLM`` is used in another event loop, or in a fork of its process; or the engine's own thread
                made the call, in a callback, and would wait for itself.
        """
        self.require_process(call)
        engine = self._engine
        if engine is not None and engine.is_current_thread():
            message = f"{call}: a callback of the engine, such as a function of `apply`, would wait for the thread that it runs in"
            raise EngineStateError(f"{message}; make the call in another thread, or after the callback", state=self.phase.value)
        if self._bridge is not None and not self._bridge.is_current():
            message = f"{call}: this AsyncLLM was started in another event loop; use it there, or start one per loop"
            raise EngineStateError(message, state=self.phase.value)

    def require(self, call: str, *allowed: Phase) -> None:
        """Raise unless the state is one of ``allowed``. If ``allowed`` has ``UPDATING``, an open update is disregarded.

        Raises:
            EngineDeadError: The engine has failed.
            WeightsNotLoadedError: The engine has no weights.
            EngineStateError: The engine is in another state, or in another process.
        """
        self.require_process(call)
        phase = self._state if Phase.UPDATING in allowed else self.phase
        if phase in allowed:
            return
        if phase is Phase.FAILED:
            raise self._death()
        raise self._refusal(call, phase, allowed)

    def _refusal(self, call: str, phase: Phase, allowed: Iterable[Phase], problem: str = "") -> EngineStateError:
        """Return the error of a call in the wrong state; ``problem`` takes the place of the state and its hint."""
        message = f"{call}: {problem or f'the engine is {phase.value}; {_HINTS[phase]}'}"
        lost = not self._valid and phase in (Phase.ASLEEP, Phase.WEIGHTS_INVALID)
        if lost and phase is Phase.ASLEEP:
            message += ", and give it all weights with `update_weights`"
        return (WeightsNotLoadedError if lost else EngineStateError)(message, state=phase.value, allowed=[p.value for p in allowed])

    def engine(self, call: str, *allowed: Phase) -> Engine:
        """Return the engine, for a call that does not block; ``allowed`` defaults to the states in which it serves."""
        self.require_process(call)
        with self._lock:
            return self._engine_in(call, *allowed or SERVING)

    def _engine_in(self, call: str, *allowed: Phase) -> Engine:
        self.require(call, *allowed)
        assert self._engine is not None
        return self._engine

    def _death(self) -> EngineDeadError:
        assert self._failure is not None
        return self._failure.copy()

    # ---- start and close; these block ----

    def begin_start(self, bridge: Bridge) -> None:
        """Reserve the start of the engine for the caller. Does not block.

        Raises:
            EngineStateError: It was started before.
        """
        with self._lock:
            self.require("start", Phase.NEW)
            self._phase = Phase.STARTING
            self._bridge, self._process = bridge, os.getpid()

    def start(self) -> None:
        """Load the engine; blocks until it is ready.

        Raises:
            DSV4LiteError: The engine could not start; the state is then FAILED.
            EngineStateError: It was closed during the start.
        """
        with self._lifecycle:
            self.require("start", Phase.STARTING)
            try:
                self._engine = open_engine(self.config)
                self.require("start", Phase.STARTING)  # importing takes a while, too
                self._engine.start(self._deliver, self._deliver_failure)
            except BaseException as error:
                failure = EngineDeadError(f"the engine did not start: {error}", phase="start")
                failure.__cause__ = error.__cause__ if isinstance(error, EngineDeadError) else error
                with self._lock:
                    self._failure = failure
                    if self._phase is Phase.STARTING:
                        self._phase = Phase.FAILED
                self._close_engine()
                raise
            with self._lock:
                wanted = self._phase is Phase.STARTING
                if wanted:
                    self._phase = Phase.READY
            if not wanted:
                self._close_engine()
                self.require("start", Phase.STARTING)

    def begin_close(self) -> None:
        """Refuse new requests from now on and end queued ones. Does not block.

        Raises:
            EngineStateError: The engine's own thread made the call, in a callback; it would wait for its own end.
        """
        if self.forked:
            return
        if self._engine is not None and self._engine.is_current_thread():
            message = "close: a callback of the engine, such as `progress`, cannot close it; raise an exception in the callback"
            raise EngineStateError(f"{message} to end the engine, or close it in another thread", state=self.phase.value)
        with self._lock:
            starting, self._phase = self._phase is Phase.STARTING, Phase.CLOSED
            self._end_all(self._queue.values(), "abort")
            self._end_pauses("closed")
            self._end_loads(EngineStateError("load: the engine was closed", state=Phase.CLOSED.value))
            self._wake_readers()
        if starting and self._engine is not None:
            self._engine.close(wait=False)
        self._end_rest()

    def close(self) -> None:
        """End open requests with their partial outputs, then the engine and the bridge.

        A start ends at its next report of progress. May be repeated. In a fork of the engine's process it does nothing.
        """
        if self.forked:
            return
        self.begin_close()
        with self._lifecycle:
            self._close_engine()
            self.drain()
            with self._lock:
                self._in_engine.clear()  # a dead engine sends no final updates
                self._end_all(self._visible.values(), "abort")
            while self._ending:
                self.drain()
        if self._bridge is not None:
            self._bridge.close()

    def _close_engine(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def drop(self) -> None:
        """End the engine of an ``AsyncLLM`` or ``LLM`` that was garbage-collected. No call is open: it would keep the object alive.

        A finalizer calls this in any thread, perhaps with the lock held, so that it takes no lock and does not wait.
        """
        phase = self.phase
        if phase in (Phase.NEW, Phase.CLOSED):
            return
        self._phase = Phase.CLOSED
        if self._engine is not None:
            self._engine.close(wait=False)
        if self._bridge is not None:
            self._bridge.close(wait=False)
        if phase is not Phase.FAILED:
            message = f"an engine of model={self.config.model!r} was dropped without closing: use a `with` block, or `close`"
            warnings.warn(message, ResourceWarning, stacklevel=2)

    def wake_at_end(self, reader: Signal) -> None:
        """Wake ``reader``, which waits for something other than a request, when the engine is closed or dies."""
        with self._lock:
            self._readers.add(reader)

    def drop_ticket(self, ticket: Ticket) -> None:
        """End the request of a stream that was garbage-collected; for a finalizer, like ``drop``."""
        if ticket.done or self.forked:
            return
        assert self._bridge is not None
        self._bridge.post(partial(self.abort_ticket, ticket))
        message = f"the stream of request {ticket.request_id!r} was dropped in its block, and ends; leave the block instead"
        warnings.warn(message, ResourceWarning, stacklevel=2)

    def drop_update(self, update: Update) -> None:
        """Roll an open update back that was garbage-collected; for a finalizer, like ``drop``."""
        if self._update is not update or update.ended or self._phase is not Phase.READY or self.forked:
            return
        assert self._bridge is not None
        self._bridge.post(partial(self.roll_back, update))
        message = f"the update of the weights to version={update.version} was dropped in its block, and is rolled back; leave the"
        warnings.warn(f"{message} block instead", ResourceWarning, stacklevel=2)

    def _postpones(self, call: Callback) -> bool:
        """Post a call that ends something, if this thread holds a lock: it interrupts what the lock guards.

        The garbage collector may run in any line, and the tasks and generators that it collects leave their blocks there.
        """
        locks = (self._lock, self._updates_lock)
        held = any(lock._is_owned() for lock in locks)  # type: ignore[attr-defined]  # as ``threading.Condition`` asks
        if held:
            assert self._bridge is not None
            self._bridge.post(call)
        return held

    # ---- requests ----

    def submit(self, job: Job, request: Request, arrival: float, wake: Callback | None, opened: list[Ticket]) -> Ticket:
        """Submit the checked request of a job, which arrived at a monotonic second, or queue it; ``wake`` is given for a stream.

        ``opened`` gets the ticket once the request is open, so that the caller can end it if this call is interrupted.

        Raises:
            EngineStateError: The engine does not serve.
            InvalidRequestError: The request id belongs to an open request.
            QueueFullError: There is no place, and ``wait`` is off.
        """
        options = job.options
        self.require_process("generate")
        with self._lock:
            tokenizer = self._engine_in("generate", *SERVING).info.tokenizer
            rule = "belongs to an open request; choose another, or none"
            require(options.request_id not in self._visible, "request_id", options.request_id, rule)
            if not options.wait and len(self._in_engine) + len(self._queue) >= self._places:
                raise self._queue_full()
            names = (f"request-{number}" for number in self._serial)
            request_id = engine_id = options.request_id or next(name for name in names if name not in self._visible)
            while engine_id in self._in_engine or engine_id in self._queue:
                # A caller may reuse its id once its request has ended; the engine may not have ended that request yet.
                engine_id = f"{request_id}~{next(self._reuses)}"
            deadline = None if options.deadline is None else arrival + options.deadline
            request = replace(request, request_id=engine_id, given_id=request_id, arrival=arrival, deadline=deadline)
            collector = Collector(request, tokenizer, index=options.index, parser=job.parser, streaming=wake is not None)
            ticket = Ticket(request_id, request, collector, wake, request.params.n)
            self._visible[request_id] = self._queue[engine_id] = ticket
            opened.append(ticket)
            self._pump()
            if engine_id in self._queue and deadline is not None:
                self._sweep_at(deadline)
            return ticket

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all, with their partial outputs; an unknown id is ignored. The loop ends most of many."""
        if self.forked or self._postpones(partial(self.abort, request_id)):
            return
        self.drain()
        with self._lock:
            if request_id is None:
                self._abort_all()
            elif request_id in self._visible:
                ticket = self._visible[request_id]
                if self._waits_for_choices(ticket):
                    self._withdraw(ticket)
                else:
                    self._end(ticket, "abort")
        self._end_rest()

    def abort_ticket(self, ticket: Ticket) -> None:
        """End a request; its id may belong to another request by now."""
        if self.forked or self._postpones(partial(self.abort_ticket, ticket)):
            return
        self.drain()
        with self._lock:
            self._end(ticket, "abort")

    # ---- control ----

    def pause(self, mode: PauseMode, *, block: bool = False) -> Pause:
        """Queue new requests, treat open ones as ``mode`` says, and pause the engine.

        With ``wait`` and ``abort`` requests end first, unless a block with ``keep`` is open.

        Args:
            mode: What becomes of open requests.
            block: The pause ends with ``leave`` only; otherwise also with the next ``resume``.
        """
        require_pause_mode(mode)
        with self._lock:
            self._engine_in("pause", *STARTED)
            if mode == "abort":
                self._abort_all()
            # Nothing runs that could be waited for while the engine sleeps or has no weights.
            pause = Pause(block=block, frozen=mode == "keep" or (mode == "wait" and self._hold is not None))
            self._pauses.append(pause)
            self._apply_pauses()
        self._end_rest()
        return pause

    def resume(self) -> Future[None]:
        """End all pauses that are not blocks, complete or not; the engine resumes unless there are blocks."""
        with self._lock:
            self._engine_in("resume", *STARTED)
            self._end_pauses("resumed", blocks=False)
            self._apply_pauses()
            return self._answer

    def leave(self, pause: Pause) -> None:
        """End a pause: its block was left, or its caller stopped waiting."""
        if self.forked or self._postpones(partial(self.leave, pause)):
            return
        with self._lock:
            self._drop_pause(pause)

    # ---- weights and memory; the engine does these in the order in which they are called ----

    def open_update(self, update: Update) -> None:
        """Open the only update. It is not staged if the weights are not valid, for then there is nothing to roll back to.

        Raises:
            EngineStateError: The engine's weights cannot be updated now.
        """
        self.require_here("update_weights")
        with self._lock:
            call, possible = "update_weights", (Phase.READY, Phase.PAUSED, Phase.WEIGHTS_INVALID)
            self._engine_in(call, *NOT_UPDATING)
            if "weights" in self._released:
                raise self._refusal(call, self._state, possible, "the weights are asleep; `wake_up(tags=['weights'])` first")
            if update.partial and not self._valid:
                raise self._refusal(call, self._state, possible[:2], "the weights were lost; partial=True cannot replace all")
            update.serial, update.staged = next(self._update_serial), update.staged and self._valid
            self._update = update

    def begin_update(self, update: Update) -> Future[None]:
        """Make the engine ready for new weights. If the update is not staged, the present weights are invalid from now on."""
        with self._lock:
            engine = self._engine_in("update_weights", *STARTED)
            answer = engine.begin_update(update.serial, update.staged)
            self._valid = self._valid and update.staged
            self._orders += 1

        def end(answer: Future[None]) -> None:
            with self._lock:
                self._end_order(engine)
                if update.staged or update.ended:  # an open update that is not staged has paused the requests itself
                    self._update_hold()

        return _after(answer, end)

    def load(self, update: Update, source: WeightSource) -> Future[None]:
        """Give a source's tensors to the engine, in a new thread, because the source may take long or hang."""
        self.require_here("load")
        with self._lock:
            engine, future = self._engine_in("load", *STARTED), Future[None]()
            if self._update is not update or update.ended:
                raise EngineStateError("load: this update is not open; load inside its block", state=self.phase.value)
            update.loads.add(future)

        def run() -> None:
            try:
                engine.load_weights(update.serial, source, lambda: update.ended or future.done())
            except BaseException as error:
                _fail(future, error)
            else:
                with contextlib.suppress(InvalidStateError):
                    future.set_result(None)

        threading.Thread(target=run, name="dsv4lite-weights", daemon=True).start()
        return future

    def _end_loads(self, error: DSV4LiteError) -> None:
        """End open calls of ``load``: their sources may wait for a trainer that sends no more."""
        for future in () if self._update is None else tuple(self._update.loads):
            _fail(future, error)

    def commit_update(self, update: Update) -> Future[None]:
        """Commit what was loaded; the update ends when the engine has done so, or refused."""

        def end(answer: Future[None]) -> None:
            error = answer.exception()
            with self._lock:
                self._end_order(engine)
                if error is None:
                    self.weight_version = update.version
                self._end_update(update, committed=error is None)
            self._end_rest()

        with self._lock:
            engine = self._engine_in("update_weights", *STARTED)
            recompute = update.mode == "recompute"
            answer = engine.commit_update(update.serial, update.version, partial=update.partial, recompute=recompute)
            self._orders += 1
            update.ended = True
        return _after(answer, end)

    def roll_back(self, update: Update) -> None:
        """Roll an update back. Without effect once the engine was told to commit it. Does not block."""
        if self.forked or self._postpones(partial(self.roll_back, update)):
            return
        with self._lock:
            if not update.ended:
                update.ended = True
                self._end_update(update)
        self._end_rest()

    def _end_update(self, update: Update, *, committed: bool = False) -> None:
        self._update = None
        if self._phase is not Phase.READY or self._engine is None:
            return
        if not committed:
            with contextlib.suppress(EngineDeadError, EngineStateError):
                self._engine.ask("roll_back", update.serial)
        if not self._valid and self._hold is None:
            lost = WeightsNotLoadedError("an update of the weights failed", state=Phase.WEIGHTS_INVALID.value)
            died = self._failure is not None  # before ``drain`` has noticed
            self._abort_in_engine(None)
            self._end_all(self._visible.values(), "error", self._death() if died else lost)
        self._update_hold()
        if update.pause is not None:
            self._drop_pause(update.pause)

    def with_weights(self, call: str, ask: Callable[[Engine], Future[T]]) -> Future[T]:
        """Let ``ask`` call the engine, before any later ``sleep``, if the weights are there."""
        with self._lock:
            engine = self._engine_in(call, *STARTED)
            if "weights" in self._released or not self._valid:
                if self._state in SERVING:  # an update that is not staged overwrites them
                    raise self._refusal(call, Phase.UPDATING, (Phase.READY, Phase.PAUSED))
                raise self._refusal(call, self._state, SERVING)
            return ask(engine)

    def sleeps(self, level: int) -> bool:
        """Return whether ``sleep`` has no effect: the engine sleeps at this level or a higher one."""
        return self._released == frozenset(MEMORY_TAGS) and (level == 1 or not self._valid)

    def sleep(self, level: int) -> Future[None]:
        """Put the paused engine to sleep. If it sleeps already, only a higher level has an effect."""
        with self._lock:
            engine = self._engine_in("sleep", *NOT_UPDATING)
            if self.sleeps(level):
                return self._pending()
            answer = engine.sleep(level)
            self._released, self._valid = frozenset(MEMORY_TAGS), self._valid and level == 1
            self._orders += 1
            self._update_hold()
        return self._follow(engine, answer)

    def wake_up(self, tags: Iterable[MemoryTag]) -> Future[None]:
        """Wake up those of ``tags`` that sleep; the engine serves once all tags are awake and the weights are valid."""
        with self._lock:
            engine = self._engine_in("wake_up", *NOT_UPDATING)
            wanted = frozenset(tag for tag in self._released if tag in tags)  # not the caller's, of a type that ranks may lack
            if not wanted:
                return self._pending()
            answer = engine.wake_up(tuple(wanted))
            self._released -= wanted
            self._orders += 1
        return self._follow(engine, answer)

    def _follow(self, engine: Engine, answer: Future[None]) -> Future[None]:
        """Return a future that ends with a sleep or wake-up, after the session has taken over its result."""

        def end(answer: Future[None]) -> None:
            with self._lock:
                self._end_order(engine)
                self._update_hold()

        self._memory = _after(answer, end)
        return self._memory

    def _end_order(self, engine: Engine) -> None:
        """Note that a call has ended. When none is pending, take over the engine's state: any of the calls may have failed."""
        self._orders -= 1
        if not self._orders:
            self._released, self._valid = engine.memory_state()

    def _pending(self) -> Future[None]:
        """Return the future of the sleep or wake-up in progress; a call that changes nothing waits for it."""
        return _done() if self._memory.done() else self._memory

    def _update_hold(self) -> None:
        """Hold all requests while the engine sleeps or has no valid weights, and until pending calls have ended."""
        if self._phase is not Phase.READY:
            return
        if self._released or not self._valid:
            if self._hold is None:
                self._hold = Pause(block=True, frozen=True)
                self._pauses.append(self._hold)
                self._apply_pauses()
        elif self._hold is not None and not self._orders:
            hold, self._hold = self._hold, None
            self._drop_pause(hold)

    # ---- from the engine ----

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        with self._updates_lock:
            if not self._orphaned:
                self._updates += updates
        self._post_drain()

    def _deliver_failure(self, error: EngineDeadError) -> None:
        with self._updates_lock:
            self._failure = error
        self._post_drain()

    def _post_drain(self) -> None:
        """Post a drain unless one is pending: a slow loop gets the updates of several steps at once, and no backlog of posts."""
        with self._updates_lock:
            assert self._bridge is not None
            if self._orphaned or (self._posted and not self._bridge.is_gone):
                return
            self._posted = self._bridge.post(self.drain)
            self._orphaned = not self._posted
        if self._orphaned:  # the host's loop ended without closing the engine: no output will be read again
            with self._lock:
                self._abort_in_engine(None)
                for tickets in (self._visible, self._queue, self._ending, self._in_engine):
                    tickets.clear()  # their waiting tasks never run again, and would keep the AsyncLLM alive

    def drain(self) -> None:
        """Pass the delivered updates to their requests, and end some of the requests in ``_ending``. Never raises."""
        with self._lock:
            with self._updates_lock:
                updates, self._updates, self._posted = self._updates, [], False
                failure = self._failure
            now = time.monotonic()
            for update in updates:
                self._receive(update, now)
            if failure is not None and self._phase is Phase.READY:
                self._die()
            self._end_some()
            if self._pauses and not self._in_engine:
                self._apply_pauses()
            self._pump()
        self._end_rest()

    def _end_rest(self) -> None:
        """Let the loop end more of the requests in ``_ending``. Called without the lock."""
        if self._ending:
            self._post_drain()

    def _receive(self, update: SequenceUpdate, now: float) -> None:
        ticket = self._in_engine.get(update.request_id)
        if ticket is None:
            return
        refused = update.error is not None and not update.started
        if update.finish_reason is not None:
            ticket.open_sequences = 0 if refused else ticket.open_sequences - 1
            if ticket.open_sequences == 0:
                del self._in_engine[update.request_id]
        if refused:
            self._end(ticket, "error", update.error)
        if ticket.done:
            return
        try:
            delta = ticket.collector.push(update, now)
            if delta is None:
                return
            output = ticket.collector.output(now) if ticket.collector.finished else None
        except Exception as flaw:
            self._resolve(ticket, _unreadable(ticket, flaw))
            self._withdraw(ticket)
            return
        if delta.finish_reason is not None and update.finish_reason is None:
            self._abort_in_engine(update.request_id, update.index)  # it ended with a stop string, which the engine does not see
        ticket.add(delta)
        if output is not None:
            self._mean_seconds += 0.1 * (output.timing.total - self._mean_seconds)
            self._resolve(ticket, output)

    def _die(self) -> None:
        self._phase = Phase.FAILED
        self._in_engine.clear()
        self._end_all(self._visible.values(), "error", self._death())
        self._end_pauses("failed")
        self._end_loads(self._death())
        self._wake_readers()

    # ---- called with the lock held ----

    def _wake_readers(self) -> None:
        for reader in self._readers:
            reader()

    @property
    def _places(self) -> int:
        return self.config.max_num_seqs + self.config.max_queued_requests

    def _pump(self) -> None:
        """Submit queued requests to the engine while there are places, in order of arrival."""
        while self._queue and not self._pauses and self._phase is Phase.READY and len(self._in_engine) < self._places:
            engine_id, ticket = self._queue.popitem(last=False)
            self._in_engine[engine_id] = ticket
            try:
                self._engine_in("generate", *SERVING).submit(ticket.request)
            except DSV4LiteError as error:
                del self._in_engine[engine_id]
                self._end(ticket, "error", error)

    def _end(self, ticket: Ticket, reason: FinishReason, error: DSV4LiteError | None = None) -> None:
        """End a request for its caller at once, and abort it in the engine."""
        if not ticket.done:
            self._finish(ticket, reason, error)
            self._withdraw(ticket)

    def _end_all(self, tickets: Iterable[Ticket], reason: FinishReason, error: DSV4LiteError | None = None) -> None:
        """End requests for their callers, some at once and the others in the loop; does not abort them in the engine."""
        for ticket in list(tickets):
            self._queue.pop(ticket.request.request_id, None)
            self._ending.setdefault(ticket, (reason, error))
        self._end_some()

    def _abort_all(self) -> None:
        """Abort all requests in the engine, and end them for their callers."""
        self._abort_in_engine(None)
        self._end_all([ticket for ticket in self._visible.values() if not self._waits_for_choices(ticket)], "abort")

    def _waits_for_choices(self, ticket: Ticket) -> bool:
        """Whether the engine's last update of a request will bring the recorded choices; an abort waits for that update."""
        running = self._in_engine.get(ticket.request.request_id) is ticket and self._failure is None
        return running and ticket.request.params.records_choices

    def _end_some(self) -> None:
        for _ in range(min(_MOST_ENDED_AT_ONCE, len(self._ending))):
            ticket, (reason, error) = self._ending.popitem(last=False)
            if not ticket.done:
                self._finish(ticket, reason, error.copy() if isinstance(error, EngineDeadError) else copy.copy(error))

    def _finish(self, ticket: Ticket, reason: FinishReason, error: DSV4LiteError | None) -> None:
        try:
            deltas = ticket.collector.end(reason, error)
            output = ticket.collector.output(time.monotonic())
        except Exception as flaw:
            deltas, output = [], _unreadable(ticket, flaw)
        for delta in deltas:
            ticket.add(delta)
        self._resolve(ticket, output)

    def _resolve(self, ticket: Ticket, output: RequestOutput) -> None:
        self._visible.pop(ticket.request_id, None)  # empty once the host's loop is gone
        ticket.future.set_result(output)
        if ticket.wake is not None:
            ticket.wake()

    def _withdraw(self, ticket: Ticket) -> None:
        """Remove a request from the queue, or abort it in the engine."""
        engine_id = ticket.request.request_id
        if self._queue.get(engine_id) is ticket:
            del self._queue[engine_id]
        elif self._in_engine.get(engine_id) is ticket:
            self._abort_in_engine(engine_id)

    def _abort_in_engine(self, engine_id: str | None, index: int | None = None) -> None:
        """Abort a request in the engine, or all; an engine that is dead or closing has ended them."""
        if self._engine is not None:
            with contextlib.suppress(EngineDeadError, EngineStateError):
                self._engine.abort(engine_id, index=index)

    def _sweep_at(self, deadline: float) -> None:
        """Check deadlines of queued requests at the monotonic second ``deadline``; the engine checks those of its own requests."""
        if deadline < self._sweeps[-1]:
            self._sweeps.append(deadline)
            assert self._bridge is not None
            self._bridge.post_later(max(0.0, deadline - time.monotonic()), self._sweep)

    def _sweep(self) -> None:
        with self._lock:
            self._sweeps.pop()  # later ones stay, because each has a timer, which cannot be cancelled
            now = time.monotonic()
            waiting = [(ticket.request.deadline, ticket) for ticket in self._queue.values() if ticket.request.deadline is not None]
            self._end_all([ticket for deadline, ticket in waiting if deadline <= now], "deadline")
            self._sweep_at(min((deadline for deadline, _ in waiting if deadline > now), default=_FOREVER))
        self._end_rest()

    def _apply_pauses(self) -> None:
        """Pause or resume the engine. Requests keep their state if the latest pause or any block says so."""
        frozen = any(pause.frozen and (pause.block or pause is self._pauses[-1]) for pause in self._pauses)
        pause_now = bool(self._pauses) and (frozen or not self._in_engine)
        try:
            engine = self._engine_in("pause", *STARTED)
            if pause_now != self._stopped:
                self._answer = engine.set_paused(pause_now)
                self._stopped = pause_now
        except (EngineDeadError, EngineStateError) as error:  # it died or is being closed
            self._end_pauses("stopped", error=error)
            return
        for pause in self._pauses:
            if pause_now and not pause.answered and (pause.frozen or not self._in_engine):
                pause.frozen = pause.answered = True
                _copy(self._answer, pause.done)
        self._pump()

    def _drop_pause(self, pause: Pause) -> None:
        if pause in self._pauses:
            self._pauses.remove(pause)
            self._apply_pauses()

    def _end_pauses(self, event: str, *, blocks: bool = True, error: DSV4LiteError | None = None) -> None:
        """End all pauses, or those that are not blocks; their callers get the reason as an error."""
        ended = [pause for pause in self._pauses if blocks or not pause.block]
        self._pauses = [pause for pause in self._pauses if pause not in ended]
        message = f"the engine was {event} before the pause was complete"
        for pause in ended:
            if not pause.answered:
                failed = self._death() if self._phase is Phase.FAILED else error
                pause.done.set_exception(failed or EngineStateError(message, state=self._phase.value))

    def _queue_full(self) -> QueueFullError:
        """Return the error for a full queue: a place is freed every mean duration / requests in the engine (Little's law)."""
        retry_after = self._mean_seconds * (len(self._queue) + 1) / max(1, len(self._in_engine))
        limit = self.config.max_queued_requests
        return QueueFullError(
            f"max_num_seqs={self.config.max_num_seqs} requests run and max_queued_requests={limit} wait already; "
            f"retry in about {retry_after:.2g} s, or call with wait=True",
            limit=limit,
            retry_after=retry_after,
        )


def _unreadable(ticket: Ticket, flaw: Exception) -> RequestOutput:
    """Return the output of a request whose updates could not be read: that request fails, and the host's loop continues."""
    error = RequestFailedError(f"the output of {ticket.request_id!r} could not be read: {flaw!r}")
    error.__cause__ = flaw
    ids = ticket.request.prompt_token_ids
    return RequestOutput(request_id=ticket.request_id, prompt_token_ids=ids, outputs=(), error=error)


def require_pause_mode(mode: object) -> None:
    """Raise ``InvalidRequestError`` unless a mode is one of ``PauseMode``."""
    require(mode in ("keep", "wait", "abort"), "mode", mode, "must be 'keep', 'wait' or 'abort'")


def _done() -> Future[None]:
    """Return a future that has completed."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _after(answer: Future[None], end: Callable[[Future[None]], None]) -> Future[None]:
    """Return a future that completes as ``answer`` does, after ``end`` has run; a waiter of ``answer`` may wake earlier."""
    answer.add_done_callback(end)
    done: Future[None] = Future()
    _copy(answer, done)
    return done


def _fail(future: Future[None], error: BaseException) -> None:
    """Set the error of a future, unless it has ended."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def _copy(source: Future[None], target: Future[None]) -> None:
    def copy(completed: Future[None]) -> None:
        error = completed.exception()
        if error is None:
            target.set_result(None)
        else:
            target.set_exception(error.copy() if isinstance(error, EngineDeadError) else error)

    source.add_done_callback(copy)
