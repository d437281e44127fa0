"""The engine: one thread that owns device, model and state, and turns requests into tokens, step by step."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from dsv4lite.config import Drafting, EngineConfig
from dsv4lite.device import advice_for, forget_frames, sole_device, start_error
from dsv4lite.engine.preparing import Preparing
from dsv4lite.engine.rank import Alone, Survey, device_of, drafting_of, grammar_compiler, software
from dsv4lite.engine.ranks import JointFlight, Ranks
from dsv4lite.engine.recorder import StepRecorder
from dsv4lite.engine.runner import Flight, RoutedExperts, Runner
from dsv4lite.engine.serve import Guest
from dsv4lite.errors import DSV4LiteError, EngineDeadError, EngineStateError, UnsupportedError
from dsv4lite.parallel.meet import HostRanks
from dsv4lite.planning.memory import MemoryPlan, require_fit
from dsv4lite.request import FinishReason, Request, SamplingParams, SequenceUpdate
from dsv4lite.sampling.sampler import rehearse
from dsv4lite.sampling.state import failed
from dsv4lite.scheduling.pages import Pools
from dsv4lite.scheduling.replicas import SEQ_IDS, Replicas
from dsv4lite.scheduling.scheduler import Scheduler, SchedulerLimits
from dsv4lite.scheduling.step_plan import Sampled
from dsv4lite.speculation.speculator import Guesses, SpeculationStats
from dsv4lite.text.tokenizer import Tokenizer
from dsv4lite.weights.source import progress_of

log = logging.getLogger("dsv4lite.engine")

T = TypeVar("T")
Deliver = Callable[[list[SequenceUpdate]], None]
DeliverFailure = Callable[[EngineDeadError], None]

_PAUSED_POLL_S = 0.02  # how often a paused engine looks at deadlines
_JOIN_POLL_S = 0.5  # how often one who closes looks whether the engine has died
_LAST_STEP_S = 10.0  # how long the thread of a dead engine may take to come back from its step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine knows once it has started."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_completions: int
    tokenizer: Tokenizer
    default_params: SamplingParams
    chat: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine's counters.

    Attributes:
        steps: Steps run so far.
        num_running: Sequences that hold state.
        num_waiting: Sequences that wait for a place.
        prompt_tokens: Prompt tokens of sequences started, cached ones included.
        cached_tokens: How many of them came from the prefix cache.
        generated_tokens: Tokens sampled.
        preemptions: How often a sequence gave up its state.
        kv_usage: Fraction of grow pages in use, cached prefixes excluded.
        step_s: Seconds of the last step.
        host_s: Of those, the host's part, for which a device with nothing else to do would wait: scheduling, launching, taking
            results. News are delivered while the device works.
        speculation: How guessing tokens ahead went.
    """

    steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    kv_usage: float = 0.0
    step_s: float = 0.0
    host_s: float = 0.0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


class Engine:
    """Runs requests. ``submit``, ``abort``, ``call`` and ``stats`` may be called from any thread and never block.

    Args:
        config: Settings.
        overlap: Plan and launch a step before the results of the previous one are looked at: with a pipeline, of the one by as many
            steps before as it has stages. Default: on CUDA, where the device works meanwhile; on a CPU there is nobody to.
    """

    def __init__(self, config: EngineConfig, *, overlap: bool | None = None) -> None:
        self.config = config
        self._overlap = overlap
        self._most_in_flight = 0  # between two steps, if none is planned ahead
        self._background = False  # a step runs by itself once it is launched
        self._ahead = False  # and the next one may be planned meanwhile
        self._guesses_ahead = False  # even if it has guesses and follows one with guesses
        self._length = 0  # guesses in a row of the step that was planned last
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_exit: weakref.finalize[..., threading.Thread]
        self._info: EngineInfo | None = None
        self._plan: MemoryPlan | None = None
        self._deliver: Deliver = _nobody
        self._deliver_failure: DeliverFailure = _nobody
        self._dead: EngineDeadError | None = None
        self._died = 0.0
        self._dying = threading.Lock()
        self._asked: Future[Any] | None = None  # whose answer the engine's thread is working on
        self._closing = False
        self._ended = False
        self._paused = False
        self._stats = EngineStats()
        self._steps = self._generated = 0
        self._step_s = self._host_s = 0.0
        self._outbox: list[SequenceUpdate] = []
        self._in_flight: deque[Flight | JointFlight] = deque()
        self._routed: dict[int, RoutedExperts] = {}
        self._guesses: Guesses | None = None
        self._seq_ids: dict[tuple[str, int], int] = {}
        self._scheduler: Scheduler | Replicas
        self._preparing: Preparing
        self._recorder: StepRecorder | None = None
        self._crew: Alone | Ranks | Guest
        self._guest: Guest | None = None
        self._runner: Runner | Ranks

    # ------------------------------------------------------------------------------------------------- from other threads

    def start(self, deliver: Deliver, deliver_failure: DeliverFailure) -> None:
        """Load everything and start the thread; returns when the engine is ready.

        Args:
            deliver: Called in the engine's thread, once per step, with the news of all sequences. Must not block.
            deliver_failure: Called once if the engine dies, there or, when a rank is lost, in another thread.

        Raises:
            CheckpointError, ConfigError, CapacityError: The model cannot be loaded; nothing is left behind.
            UnsupportedError: The machine cannot run it: chip, driver, Triton.
        """
        if self._thread is not None:
            raise EngineStateError("the engine was started before; make a new one", state="started", allowed=("new",))
        self._deliver, self._deliver_failure = deliver, deliver_failure
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="dsv4lite-engine", daemon=True)
        # An interpreter that finalizes while this thread is inside torch aborts the process, so the engine must end before that:
        # after all other threads that may use it, hence no earlier than exit handlers run.
        self._at_exit = weakref.finalize(self._thread, self._leave_interpreter)
        self._thread.start()
        try:
            ready.result()
        except DSV4LiteError:
            self._thread.join()
            raise
        except Exception as error:
            self._thread.join()
            raise EngineDeadError(f"the engine could not start: {type(error).__name__}: {error}", phase="start") from error

    @property
    def info(self) -> EngineInfo:
        """What is known of the model; only after ``start``."""
        assert self._info is not None, "start() the engine first"
        return self._info

    def submit(self, request: Request) -> None:
        """Queue a validated request; what becomes of it arrives through ``deliver``."""
        self._put(partial(self._add, request))

    def abort(self, request_id: str | None = None, reason: FinishReason = "abort", *, index: int | None = None) -> None:
        """End a request, one of its completions, or everything. What ended already is left alone."""
        self._put(partial(self._abort, request_id, reason, index))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function in the engine's thread between two steps."""
        future: Future[T] = Future()
        self._put(partial(self._call, function, future))
        return future

    def pause(self) -> Future[None]:
        """Stop stepping; sequences keep their state."""
        return self.call(lambda engine: engine._set_paused(True))

    def resume(self) -> Future[None]:
        """Go on stepping."""
        return self.call(lambda engine: engine._set_paused(False))

    def reset_prefix_cache(self) -> Future[None]:
        """Forget cached prefixes."""
        return self.call(lambda engine: engine._scheduler.reset_prefix_cache())

    def dump_step(self, path: Path) -> Future[None]:
        """Save the next step; done as soon as that is sure to happen."""
        return self.call(lambda engine: engine._dump_step(path))

    def check(self) -> Future[None]:
        """Verify that every page, slot and snapshot is accounted for; fails with AssertionError otherwise."""
        return self.call(lambda engine: engine._scheduler.check())

    def stats(self) -> EngineStats:
        """Return the counters of the last step."""
        return self._stats

    def memory(self) -> MemoryPlan:
        """Return the plan that the engine was started with."""
        assert self._plan is not None, "start() the engine first"
        return self._plan

    def close(self, *, wait: bool = True) -> None:
        """End every request as aborted, free everything and end the thread; a rank that follows waits for the leader to do so.

        May be called twice, and from any thread but the engine's. A dead engine's thread that does not come back from its step is
        left behind with what it holds.

        Args:
            wait: Join the thread. Without, it ends by itself, and the call takes no lock: a finalizer may make it.
        """
        thread = self._thread
        if thread is None:
            return
        self._inbox.put(self._close)
        while wait and thread.is_alive():
            thread.join(_JOIN_POLL_S)
            if thread.is_alive() and self._dead is not None and time.monotonic() - self._died > _LAST_STEP_S:
                log.warning("the engine's thread does not come back from its last step; it is left behind with what it holds")
                return

    def _leave_interpreter(self) -> None:
        guest = self._guest
        if guest is not None:
            guest.leave()
        self.close()

    def _put(self, command: Callable[[], None]) -> None:
        if self._dead is not None:
            raise self._dead.copy()
        if self._thread is None or self._closing:
            state = "closed" if self._closing else "new"
            raise EngineStateError("the engine is not running", state=state, allowed=("ready", "paused"))
        if self._guest is not None:
            raise EngineStateError("this rank follows rank 0, which alone takes requests", state="following")
        self._inbox.put(command)
        if self._ended or self._dead is not None:  # it ended in this very moment, and will not look again
            self._answer_rest()

    # ------------------------------------------------------------------------------------------------- in the engine's thread

    def _run(self, ready: Future[None]) -> None:
        try:
            self._live(ready)
        finally:
            self._at_exit.detach()

    def _live(self, ready: Future[None]) -> None:
        with ExitStack() as stack:
            try:
                self._open(stack)
            except BaseException as error:
                self._closing = True
                explained = start_error(error, plan=self._plan)
                forget_frames(error)  # the caller's error does not hold what was loaded
                ready.set_exception(explained)
                return
            ready.set_result(None)
            try:
                with torch.inference_mode():
                    if self._guest is not None:
                        self._guest.work()
                        self._closing = True
                    while not self._closing:
                        self._drain()
                        if not self._closing and not self._paused:
                            self._step()
                        if not self._background:
                            self._publish()
            except BaseException as error:
                self._die(error)
            finally:
                self._free()

    def _open(self, stack: ExitStack) -> None:
        config = self.config
        crew = self._crew = self._recruit()
        if isinstance(crew, Guest):
            survey = crew.open(stack).survey
            self._plan, self._guest = survey.plan, crew
            tokenizer = Tokenizer.from_folder(config.tokenizer or survey.folder, vocab_size=survey.model.vocab_size)
            self._inform(survey, survey.plan, tokenizer)
            return
        survey, self._plan = crew.survey(stack)
        plan = self._plan
        require_fit(plan)
        vocab_size = survey.model.vocab_size
        tokenizer = Tokenizer.from_folder(config.tokenizer or survey.folder, vocab_size=vocab_size)
        grammars, problem = grammar_compiler(tokenizer, vocab_size)
        runner = self._runner = crew.load(plan, grammars, progress_of(config))
        self._preparing = Preparing(
            grammars, problem, runner.prepare, lambda r: self._inbox.put(partial(self._add, r, prepared=True))
        )
        if isinstance(self._runner, Runner):
            self._recorder = StepRecorder(config, self._runner.model, self._runner.cache)
        drafting = drafting_of(config, survey)
        on_cpu = not plan.per_device[0].device.startswith("cuda")
        self._background = not on_cpu if self._overlap is None else self._overlap
        # Guesses of the host follow tokens that it knows, so a step with some is planned when the last one has been looked at.
        self._most_in_flight = config.layout.pp - 1
        self._ahead = self._background and (config.layout.pp == 1 or not drafting.max_drafts)
        self._guesses_ahead = self._ahead and self._runner.runs_ahead and not drafting.speculators
        if drafting.max_drafts:
            # On a CPU this thread does the work: what others take of the machine is no step's fault.
            clock = time.thread_time if on_cpu and isinstance(self._runner, Runner) else time.perf_counter
            costs = self._runner.step_costs
            self._guesses = Guesses(drafting, vocab_size=vocab_size, costs=costs, clock=clock, ahead=self._ahead)
        self._scheduler = self._make_scheduler(plan, survey.model.window, drafting)
        self._inform(survey, plan, tokenizer)

    def _recruit(self) -> Alone | Ranks | Guest:
        """Return who runs the steps."""
        config = self.config
        if config.place_of_ranks != "external":
            several = config.layout.world > 1 or config.place_of_ranks == "process"
            return Ranks(config, self._lose) if several else Alone(config)
        host = HostRanks.of(config)
        host.compare(software())
        config = self.config = host.config
        problem, device = host.problem, ""
        try:
            if problem is None:
                device = sole_device(device_of(config, host.rank))
        except DSV4LiteError as error:
            problem = error
        machines = host.agree(problem, device)
        return Ranks(config, self._lose, (host, machines)) if host.rank == 0 else Guest(host, self._lose)

    def _inform(self, survey: Survey, plan: MemoryPlan, tokenizer: Tokenizer) -> None:
        vocab_size = survey.model.vocab_size
        self._info = EngineInfo(
            vocab_size=vocab_size,
            max_model_len=plan.max_model_len,
            max_logprobs=self.config.max_logprobs,
            max_completions=self.config.max_completions,
            tokenizer=tokenizer,
            default_params=survey.default_params,
            chat=survey.chat,
        )

    def _make_scheduler(self, plan: MemoryPlan, window: int, drafting: Drafting) -> Scheduler | Replicas:
        config, sizes = self.config, plan.sizes
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            window=window,
            prefix_checkpoint_tokens=config.prefix_checkpoint_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            max_drafts=drafting.max_drafts,
            drafter_rows=drafting.own is not None,
            stages=config.layout.pp,
        )
        propose = None if self._guesses is None else self._guesses.propose
        schedulers = [
            Scheduler(
                limits,
                Pools.sized(grow=sizes.grow_pages, window=sizes.window_pages, slots=sizes.slots, snapshots=sizes.snapshots),
                propose=propose,
                first_seq_id=replica * SEQ_IDS,
            )
            for replica in range(config.layout.dp)
        ]
        return schedulers[0] if len(schedulers) == 1 else Replicas(schedulers, config.data_parallel_placement)

    def _drain(self) -> None:
        """Run what others have asked for; wait for it when there is nothing else to do."""
        block, preparing, timeout = not self._scheduler.has_work(), self._preparing.num_waiting > 0, None
        if preparing:
            self._outbox += self._preparing.expire(time.monotonic())
        if preparing or (self._paused and not block):
            block, timeout = block or self._paused, _PAUSED_POLL_S
        if block and not self._in_flight:
            if self._guesses is not None:
                self._guesses.interrupt(idle=True)
            self._publish()
            if timeout is None:
                self._scheduler.check()
            try:
                self._inbox.get(timeout=timeout)()
            except Empty:
                self._expire()
        while not self._closing:
            try:
                self._inbox.get_nowait()()
            except Empty:
                return

    def _step(self) -> None:
        """Launch the next step, then look at the results of the oldest one if there are more in flight than there may be."""
        started = time.perf_counter()
        recorder = self._recorder if self._recorder is not None and self._recorder.active else None
        if recorder is not None:
            self._settle()  # a step that may be saved runs alone
        guesses = self._guesses
        length = 0 if guesses is None else guesses.choose_length(self._scheduler.num_running)
        rests, self._length = not (length or self._length), length  # nobody guesses, nor did before
        if self._in_flight and not rests and self._ahead and not self._may_follow(length):
            self._finish(started, started)
        plan: Any = self._scheduler.schedule(time.monotonic(), length)  # of replicas it is a joint one, which only ranks run
        if guesses is not None and plan is not None and plan.prompts:
            guesses.interrupt()
        self._tell(self._scheduler.pop_expired())
        flight = self._runner.launch(plan, recorder) if plan is not None else None
        launched = time.perf_counter()
        if self._background:  # not before: readers would have taken the interpreter from this thread, and made the device wait
            self._publish()
        if flight is not None:
            self._in_flight.append(flight)
        most = self._most_in_flight + (self._ahead and (rests or self._may_follow(length)))
        if len(self._in_flight) > (most if recorder is None and flight is not None else 0):
            self._finish(started, launched, recorder)
        elif not self._in_flight and self._scheduler.has_work():
            time.sleep(0.0005)  # everybody waits for pages that only an abort or a deadline can free

    def _may_follow(self, length: int) -> bool:
        """Whether a step of so many guesses may be launched behind what is in flight."""
        return (length == 0 or self._guesses_ahead) and self._scheduler.foresees(length)

    def _finish(self, started: float, launched: float, recorder: StepRecorder | None = None) -> None:
        """Look at the results of the oldest step in flight.

        Args:
            started, launched: When the host began to prepare what it launched last, and when that was done.
            recorder: Has watched the step.
        """
        previous = self._in_flight.popleft()
        results = previous.results()
        landed = time.perf_counter()
        if recorder is not None:
            recorder.end(previous.samples)
        self._land(previous, results)
        ended = time.perf_counter()
        self._step_s, self._host_s = ended - started, launched - started + ended - landed

    def _land(self, flight: Flight | JointFlight, results: Mapping[int, Sampled]) -> None:
        """Bring the results of a step to the scheduler, and its news to the outbox."""
        plan: Any = flight.plan  # of replicas a joint one
        self._steps += 1
        self._generated += len(results)
        if plan.max_drafts and self._guesses is not None:
            self._generated += sum([len(one.after) for one in results.values()])
            self._guesses.count(plan, results)
        for seq_id, part in flight.routed.items():
            if seq_id in self._routed:
                self._routed[seq_id].parts.append(part)
        for seq_id in self._runner.hosted.intersection(results):
            for one in (results[seq_id], *results[seq_id].after):
                if one.error is None:
                    self._runner.accept(seq_id, one.token_id)
        self._tell(self._scheduler.update(plan, results, scores=flight.scores))

    def _tell(self, updates: list[SequenceUpdate]) -> None:
        """Queue news for the next delivery; forget sequences that ended."""
        for update in updates:
            if update.finish_reason is not None:
                update = self._farewell(update)
            self._outbox.append(update)

    def _farewell(self, update: SequenceUpdate) -> SequenceUpdate:
        seq_id = self._seq_ids.pop((update.request_id, update.index))
        self._runner.remove(seq_id)
        if self._guesses is not None:
            self._guesses.forget(seq_id)
        routed = self._routed.pop(seq_id, None)
        return update if routed is None else replace(update, routed_experts=routed.by_position())

    def _publish(self) -> None:
        """Bring the counters up to date, and deliver the news."""
        counts = self._scheduler.stats()
        self._stats = EngineStats(
            steps=self._steps,
            generated_tokens=self._generated,
            step_s=self._step_s,
            host_s=self._host_s,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting + self._preparing.num_waiting,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            preemptions=counts.preemptions,
            speculation=SpeculationStats() if self._guesses is None else self._guesses.stats(),
            kv_usage=1 - (counts.grow.free + counts.grow.cached) / max(1, counts.grow.total),
        )
        self._flush()

    def _flush(self) -> None:
        if self._outbox:
            news, self._outbox = self._outbox, []
            self._deliver(news)

    # ------------------------------------------------------------------------------------------------- commands

    def _add(self, request: Request, *, prepared: bool = False) -> None:
        """Take in a request. One whose grammar is still to be compiled comes a second time, ``prepared``, when that is done."""
        ended: set[int] = set()
        try:
            if prepared:
                found = self._preparing.finish(request)
                if found is None:
                    return
                _, ended = found  # ``found`` keeps the compiled grammar until the sampler has it
            elif not self._preparing.begin(request):
                return
            self._admit(request)
        except Exception as error:
            told = error if isinstance(error, DSV4LiteError) else failed(error)
            self._outbox.append(SequenceUpdate(request_id=request.request_id, finish_reason="error", error=told))
            return
        for index in ended:
            for update in self._scheduler.abort(request.request_id, index=index):
                self._farewell(update)  # which was told when it ended

    def _admit(self, request: Request) -> None:
        """Give a request to scheduler and runner; if that raises, neither knows of it."""
        rehearse(request, self.info.vocab_size)
        self._scheduler.add(request)
        sequences = self._scheduler.sequences_of(request.request_id)
        self._seq_ids.update({(request.request_id, s.index): s.seq_id for s in sequences})
        try:
            for sequence in sequences:
                self._runner.add(sequence.seq_id, request, sequence.index)
        except Exception:
            for update in self._scheduler.abort(request.request_id):
                self._farewell(update)
            raise
        if request.params.return_routed_experts:
            leader = self._routed[sequences[0].seq_id] = RoutedExperts()
            shared = (leader, len(request.prompt_token_ids) - 1)
            self._routed.update({s.seq_id: RoutedExperts(shared=shared) for s in sequences[1:]})

    def _abort(self, request_id: str | None, reason: FinishReason, index: int | None) -> None:
        self._outbox += self._preparing.end(request_id, reason, index)
        self._tell(self._scheduler.abort(request_id, reason, index=index))

    def _call(self, function: Callable[[Engine], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._asked = future
        try:
            result = function(self)
        except BaseException as error:
            _answer(future, error=error)
        else:
            _answer(future, result)
        self._asked = None

    def _dump_step(self, path: Path) -> None:
        if self._recorder is None:
            raise UnsupportedError("steps are saved in the engine's own process only: use one rank and executor='thread'")
        self._recorder.request(path)

    def _set_paused(self, paused: bool) -> None:
        if paused:
            self._settle()
        self._paused = paused

    def _settle(self) -> None:
        """Wait for the steps in flight."""
        while self._in_flight:
            flight = self._in_flight.popleft()
            try:
                self._land(flight, flight.results())
            except Exception as error:
                raise self._die(error) from error

    def _lose(self, loss: EngineDeadError) -> None:
        """Learn, from another thread, that a rank is lost. Everybody is told there: the engine's may be in a step for ever."""

        def fail() -> None:
            raise loss

        if self._info is not None:  # else whoever starts the engine is told
            self._announce(loss)
            asked = self._asked
            if asked is not None:
                _answer(asked, error=loss.copy())
            self._answer_rest()
        self._inbox.put(fail)

    def _expire(self) -> None:
        """End requests whose deadline passed while the engine is paused."""
        self._tell(self._scheduler.expire(time.monotonic()))

    def _close(self) -> None:
        self._settle()
        self._abort(None, "abort", None)
        self._publish()
        self._closing = True

    # ------------------------------------------------------------------------------------------------- the end

    def _die(self, error: BaseException) -> EngineDeadError:
        """Tell everybody that the engine failed, and why, once."""
        if self._dead is None:
            error = self._crew.explain(error)
            saved = None if self._recorder is None else self._recorder.failed(error)
            where = "" if saved is None else f"; the step is saved as {saved}"
            if isinstance(error, EngineDeadError):
                dead = error
            else:
                message = f"the engine failed in a step: {type(error).__name__}: {error}{advice_for(error)}{where}"
                dead = EngineDeadError(message, phase="step")
                dead.__cause__ = error
            self._flush()
            self._announce(dead)
        assert self._dead is not None
        return self._dead

    def _announce(self, dead: EngineDeadError) -> None:
        """Tell everybody that the engine is dead, in any thread; who comes second tells nobody."""
        with self._dying:
            if self._dead is not None:
                return
            self._died = time.monotonic()
            self._dead = dead
        self._closing = True
        log.error("the engine failed", exc_info=dead)
        self._deliver_failure(dead)

    def _free(self) -> None:
        """Drop tensors, and answer those who still wait."""
        self._in_flight.clear()
        self._routed.clear()
        self._guest = None
        for part in ("_runner", "_crew", "_scheduler", "_preparing", "_recorder"):  # a guest has not all of them
            vars(self).pop(part, None)
        if self._dead is not None:
            forget_frames(self._dead.__cause__)  # everybody keeps the error, and must not keep the model with it
        self._ended = True
        self._answer_rest()

    def _answer_rest(self) -> None:
        """Tell those whose calls will not be run any more; requests are told by their face."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(command, partial) and command.func == self._call:
                future: Future[Any] = command.args[1]
                if future.set_running_or_notify_cancel():
                    closed = EngineStateError("the engine was closed", state="closed")
                    future.set_exception(closed if self._dead is None else self._dead.copy())


def _answer(future: Future[Any], result: object = None, *, error: BaseException | None = None) -> None:
    """Settle a future, unless another thread has done so."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _nobody(news: object) -> None:
    """Deliver to nobody: before the engine is started."""
