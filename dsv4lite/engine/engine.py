"""The engine: one thread that owns device, model and state, and generates the tokens of requests step by step."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dsv4lite.config import Drafting, EngineConfig, LoadProgress, Progress
from dsv4lite.device import advice_for, forget_frames, start_error
from dsv4lite.engine.choices import ChoiceRecord
from dsv4lite.engine.contract import ExecutionContract
from dsv4lite.engine.executor import InProcessExecutor, JointStep, MultiRankExecutor, make_executor
from dsv4lite.engine.rank import ProbeReport, grammar_compiler
from dsv4lite.engine.recorder import StepRecorder
from dsv4lite.engine.resident import Ask, ResidentMethod, whole_checksums
from dsv4lite.engine.runner import InFlightStep, Runner, StepResult
from dsv4lite.engine.trace import StepTrace
from dsv4lite.engine.worker import ExternalWorker
from dsv4lite.errors import DSV4LiteError, EngineDeadError, EngineStateError, UnsupportedError, WeightUpdateError, described, shown
from dsv4lite.models.config import ModelConfig
from dsv4lite.planning.memory import MemoryPlan, require_fit
from dsv4lite.request import MEMORY_TAGS, FinishReason, MemoryTag, Request, SamplingParams, SequenceUpdate, WeightSource
from dsv4lite.sampling.sampler import dry_run
from dsv4lite.sampling.state import failed
from dsv4lite.scheduling.pages import Pools
from dsv4lite.scheduling.replicas import SEQ_IDS, Replicas
from dsv4lite.scheduling.scheduler import Scheduler, SchedulerLimits
from dsv4lite.speculation.speculator import DraftProposer, SpeculationStats, make_drafting
from dsv4lite.text.forms import ChatForm, find_form
from dsv4lite.text.structured import GrammarCompiler, StructuredOutputs
from dsv4lite.text.tokenizer import Tokenizer
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.source import progress_of
from dsv4lite.weights.update import Given, buckets

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("dsv4lite.engine")

T = TypeVar("T")
Deliver = Callable[[list[SequenceUpdate]], None]
DeliverFailure = Callable[[EngineDeadError], None]

_PAUSED_POLL_S = 0.02  # how often a paused engine checks deadlines
_NO_PAGES_S = 0.0005  # how long the loop sleeps when no sequence can run
_JOIN_POLL_S = 0.5  # how often ``close`` checks whether the engine has died
_UNTRACED = nullcontext()
_ON_WEIGHTS = ("begin", "take", "checksums", "apply", "capture")  # calls that read or write resident weights
_LAST_STEP_S = 10.0  # how long the thread of a dead engine may take to return from its step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a started engine; ``no_chat`` says why ``chat`` is ``None``."""

    max_model_len: int
    max_logprobs: int
    max_completions: int
    model: ModelConfig
    tokenizer: Tokenizer
    default_params: SamplingParams
    end_token_ids: Sequence[int]
    chat: ChatForm | None
    no_chat: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine's counters.

    Attributes:
        steps: Steps run so far.
        num_running: Sequences that hold state.
        num_waiting: Sequences that wait to run; preempted ones and those whose grammar is being compiled are included.
        prompt_tokens: Tokens of sequences that started, cached ones included. Completions that take over the prompt's state count
            nothing; a sequence that starts again after a preemption or a sleep counts again.
        cached_tokens: Prompt tokens that came from the prefix cache.
        generated_tokens: Tokens sampled.
        preemptions: How often a sequence was preempted.
        kv_usage: Fraction of grow pages in use, cached prefixes excluded.
        step_s: Seconds of the last step.
        host_s: Seconds of the last step that the host spent on scheduling, launching and processing results, for which an idle
            device would wait. The delivery of updates is not included: it happens while the device works.
        speculation: Counts of draft tokens, and statistics of the draft controller.
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
        overlap: Plan and launch a step before the host has the results of the previous step; with P pipeline stages, of the step P
            steps earlier. Default: on CUDA. On a CPU a launch runs the whole step, so steps do not overlap.
    """

    def __init__(self, config: EngineConfig, *, overlap: bool | None = None) -> None:
        self.config = config
        self._overlap = overlap
        self._overlaps = False  # a launched step runs while the host works
        self._plans_ahead = False  # the next step may be planned before the results of the last one
        self._drafts_ahead = False  # even if both steps have draft tokens
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ready: Future[None] = Future()  # of the start
        self._unwanted = False  # closed: a start ends at its next report of progress
        self._thread: threading.Thread | None = None
        self._at_exit: weakref.finalize[..., threading.Thread]
        self._info: EngineInfo | None = None
        self._numerics: Numerics
        self._plan: MemoryPlan | None = None
        self._deliver: Deliver = _ignore
        self._deliver_failure: DeliverFailure = _ignore
        self._dead: EngineDeadError | None = None
        self._died = float("inf")
        self._dying = threading.Lock()
        self._running_call: Future[Any] | None = None  # future of the call that the engine's thread runs
        self._closing = False
        self._ended = False
        self._paused = False
        self._released: set[MemoryTag] = set()
        self._valid = True  # whether the weights, resident or in host memory, are valid
        self._stats = EngineStats()
        self._steps = self._generated = 0
        self._step_s = self._host_s = 0.0
        self._outputs: list[SequenceUpdate] = []
        self._in_flight: deque[InFlightStep | JointStep] = deque()
        self._choices: dict[int, ChoiceRecord] = {}
        self._proposer: DraftProposer | None = None
        self._seq_ids: dict[tuple[str, int], int] = {}
        self._with_host_rules: set[int] = set()  # sequences with sampling rules on the host, which read every sampled token
        self._scheduler: Scheduler | Replicas
        self._grammars: GrammarCompiler | None
        self._no_grammars = ""  # why there is no compiler
        self._compiling: dict[int, Future[LLMatcher]] = {}  # grammars of held sequences; the compiler holds weak references
        self._recorder: StepRecorder | None = None
        self._trace: StepTrace | None = None
        self._executor: InProcessExecutor | MultiRankExecutor | ExternalWorker
        self._external: ExternalWorker | None = None
        self._runner: Runner | MultiRankExecutor

    # ------------------------------------------------------------------------------------------------- from other threads

    def start(self, deliver: Deliver, deliver_failure: DeliverFailure) -> None:
        """Load everything and start the thread; returns when the engine is ready.

        Args:
            deliver: Called in the engine's thread, once per step, with the updates of all sequences. Must not block.
            deliver_failure: Called once if the engine dies: in the engine's thread, or in another one when a rank is lost.

        Raises:
            CheckpointError, ConfigError, CapacityError: The model cannot be loaded; everything is freed.
            UnsupportedError: The chip, the driver or Triton cannot run the model.
            EngineDeadError: Another error, its cause.
        """
        assert self._thread is None, "an engine starts once"
        self._deliver, self._deliver_failure = deliver, deliver_failure
        self._thread = threading.Thread(target=self._run, name="dsv4lite-engine", daemon=True)
        # If the interpreter finalizes while this thread is inside torch, the process aborts. So the engine ends in an exit handler:
        # before finalization, and after the other non-daemon threads, which may use the engine until they end.
        self._at_exit = weakref.finalize(self._thread, self._leave_interpreter)
        self._thread.start()
        try:
            self._ready.result()
        except DSV4LiteError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise EngineDeadError(f"the engine could not start: {described(error)}", phase="start") from error

    @property
    def info(self) -> EngineInfo:
        """Facts about the started engine and its model; only after ``start``."""
        assert self._info is not None, "start() the engine first"
        return self._info

    def submit(self, request: Request) -> None:
        """Queue a validated request; its updates go to ``deliver``."""
        self._put(partial(self._add, request))

    def abort(self, request_id: str | None = None, reason: FinishReason = "abort", *, index: int | None = None) -> None:
        """End a request, one of its completions, or (``None``) all requests; do nothing if it has ended."""
        self._put(partial(self._abort, request_id, reason, index))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function in the engine's thread between two steps."""
        future: Future[T] = Future()
        self._put(partial(self._call, function, future))
        return future

    def set_paused(self, paused: bool) -> Future[None]:
        """Stop or resume stepping; sequences keep their state."""
        return self.call(lambda engine: engine._set_paused(paused))

    def reset_prefix_cache(self) -> Future[None]:
        """Forget cached prefixes."""
        return self.call(lambda engine: engine._scheduler.reset_prefix_cache())

    def dump_step(self, path: Path) -> Future[None]:
        """Save the next step to a file; the future completes before that step runs."""
        return self.call(lambda engine: engine._dump_step(path))

    def ask(self, method: ResidentMethod, *arguments: Any) -> Future[Any]:
        """Call a method of every rank's ``Resident`` between two steps; return the results by rank."""
        return self.call(lambda engine: engine._ask(method, *arguments))

    def load_weights(self, serial: int, source: WeightSource, ended: Callable[[], bool]) -> None:
        """Send a source's tensors to every rank, one bucket at a time. Blocks the caller; the engine can step between two buckets.

        Args:
            ended: Asked after each tensor; the source is not read further once it returns ``True``.

        Raises:
            WeightUpdateError: The tensors do not fit the model, or the update has ended.
            Exception: What the source raises.
        """
        if not isinstance(source, WeightSource):
            raise WeightUpdateError(f"{shown(source)} is not a source of weights; pass a NamedTensors, ModuleSource or DiskSource")

        def tensors() -> Iterator[tuple[str, Given]]:
            for pair in source.tensors():
                if ended():
                    raise WeightUpdateError("this update has ended")
                yield pair

        for bucket in buckets(tensors()):
            self.ask("take", serial, bucket).result()

    def memory_state(self) -> tuple[frozenset[MemoryTag], bool]:
        """Return what sleeps, and whether the weights, resident or in host memory, are valid. Exact while no call is pending."""
        return frozenset(self._released), self._valid

    def begin_update(self, serial: int, staged: bool) -> Future[None]:
        """Make every rank ready for new weights. If they are not staged, the present ones are invalid from then on."""
        return self.call(lambda engine: engine._begin_update(serial, staged))

    def commit_update(self, serial: int, version: int, *, partial: bool, recompute: bool) -> Future[None]:
        """Write the new weights on every rank and publish the version; if the check fails on one rank, no rank writes.

        With ``recompute``, running sequences compute their state again with the new weights.
        """
        return self.call(lambda engine: engine._commit(serial, version, partial, recompute))

    def sleep(self, level: int) -> Future[None]:
        """Release the memory of weights and KV cache; level 1 keeps the weights in host memory. An error changes nothing."""
        return self.call(lambda engine: engine._sleep(level))

    def wake_up(self, tags: Sequence[MemoryTag]) -> Future[None]:
        """Allocate memory that ``sleep`` released, and restore the weights from host memory. An error changes nothing."""
        return self.call(lambda engine: engine._wake_up(tags))

    def weight_checksums(self) -> Future[dict[str, str]]:
        """Return the checksums of whole tensors by their official names."""
        return self.call(lambda engine: whole_checksums(engine._ask("checksums")))

    def execution_contract(self) -> Future[ExecutionContract]:
        """Return everything that the bits of results depend on."""

        def make(engine: Engine) -> ExecutionContract:
            return ExecutionContract.of(
                engine.info.model, engine._numerics, engine.config.layout, whole_checksums(engine._ask("checksums"))
            )

        return self.call(make)

    def stats(self) -> EngineStats:
        """Return the counters of the last step."""
        return self._stats

    def memory(self) -> MemoryPlan:
        """Return the memory plan that the engine was started with."""
        assert self._plan is not None, "start() the engine first"
        return self._plan

    def is_current_thread(self) -> bool:
        """Whether the engine's own thread makes this call, as in a callback."""
        return threading.current_thread() is self._thread

    def close(self, *, wait: bool = True) -> None:
        """Abort every request, free everything and end the thread; on an external worker, wait until rank 0 closes its engine.

        A start ends at its next report of progress.

        May be called twice, and from any thread but the engine's. If the thread of a dead engine does not return from its last step
        within 10 seconds, ``close`` returns; the thread keeps running and keeps its memory.

        Args:
            wait: Join the thread. Otherwise the thread ends on its own, and the call takes no lock, so a finalizer may make it.
        """
        thread, self._unwanted = self._thread, True
        if thread is None:
            return
        self._inbox.put(self._close)
        while wait and thread.is_alive():
            thread.join(_JOIN_POLL_S)
            if thread.is_alive() and time.monotonic() - self._died > _LAST_STEP_S:
                log.warning("the engine's thread still waits for a lost rank; it keeps running and keeps its memory")
                return

    def _leave_interpreter(self) -> None:
        external = self._external
        if external is not None:
            external.leave()
        self.close()

    def _put(self, command: Callable[[], None]) -> None:
        if self._dead is not None:
            raise self._dead.copy()
        if self._thread is None or self._closing:
            state, problem = "closed" if self._closing else "new", "the engine does not run here, or rank 0 has closed its engine"
            raise EngineStateError(f"{problem}; open a new one", state=state, allowed=("ready", "paused"))
        if self._external is not None:
            raise EngineStateError("this rank runs the steps of rank 0; use the engine of rank 0", state="following")
        self._inbox.put(command)
        if self._ended or self._dead is not None:
            # The thread no longer reads the inbox. Only this call fails here: callbacks of others may take locks of this caller.
            self._fail_call(command)

    # ------------------------------------------------------------------------------------------------- in the engine's thread

    def _run(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._at_exit.detach)
            try:
                self._open(stack)
            except BaseException as error:
                self._closing = True
                explained = error
                try:
                    explained = start_error(error, plan=self._plan)
                finally:  # ``str`` of an exception of the host may raise in ``start_error``
                    forget_frames(error)  # its frames hold what was loaded
                    _answer(self._ready, error=explained)
                return
            _answer(self._ready)
            try:
                with torch.inference_mode():
                    if self._external is not None:
                        self._external.run()
                        self._closing = True
                    while not self._closing:
                        self._drain()
                        if not self._closing and not self._paused:
                            self._step()
            except BaseException as error:
                self._die(error)
            finally:
                self._free()

    def _open(self, stack: ExitStack) -> None:
        self.config, executor = make_executor(self.config, self._lose)
        config, self._executor = self.config, executor
        if config.trace_path is not None and not isinstance(executor, ExternalWorker):  # rank 0 traces its steps
            self._trace = stack.enter_context(StepTrace(config.trace_path))
        if isinstance(executor, ExternalWorker):
            report, self._external = executor.open(stack), executor
            plan = self._plan = report.plan
        else:
            report, plan = executor.probe(stack)
            self._plan = plan
            require_fit(plan)
        self._numerics = report.numerics
        tokenizer = Tokenizer.from_folder(config.tokenizer or report.folder, vocab_size=report.model.vocab_size)
        if not isinstance(executor, ExternalWorker):
            self._load(executor, report, plan, tokenizer)
        chat, no_chat = find_form(report.chat, tokenizer, shipped=config.chat_template == "checkpoint")
        self._info = EngineInfo(
            max_model_len=plan.max_model_len,
            max_logprobs=config.max_logprobs,
            max_completions=config.max_completions,
            model=report.model,
            tokenizer=tokenizer,
            default_params=report.default_params.replace(stop_token_ids=()),
            end_token_ids=report.default_params.stop_token_ids,  # apply to every request, also to one with its own stop_token_ids
            chat=chat,
            no_chat=no_chat,
        )

    def _load(
        self, executor: InProcessExecutor | MultiRankExecutor, report: ProbeReport, plan: MemoryPlan, tokenizer: Tokenizer
    ) -> None:
        config, vocab_size = self.config, report.model.vocab_size
        self._grammars, self._no_grammars = grammar_compiler(tokenizer, vocab_size)
        runner = self._runner = executor.load(plan, self._grammars, partial(self._report, progress_of(config)))
        alone = runner if isinstance(runner, Runner) else None  # one rank, in this thread
        if alone is not None:
            self._recorder = alone.recorder = StepRecorder(config, alone.model, alone.cache)
        drafting = make_drafting(config.speculative, report.own)
        on_cpu = not plan.per_device[0].device.startswith("cuda")
        self._overlaps = not on_cpu if self._overlap is None else self._overlap
        # The draft proposer on the host needs the last token of a sequence, which a pipeline that plans ahead does not know yet.
        self._plans_ahead = self._overlaps and (config.layout.pp == 1 or not drafting.max_drafts)
        # Draft tokens and accepted lengths of the model's own drafter are on the device of every rank that runs the next step.
        self._drafts_ahead = self._plans_ahead and drafting.own is not None and not drafting.speculators
        if drafting.max_drafts:
            # On a CPU this thread computes the steps, and its own CPU time excludes the work of other processes.
            clock = time.thread_time if on_cpu and alone is not None else time.perf_counter
            costs = None if alone is None else alone.step_costs
            self._proposer = DraftProposer(drafting, vocab_size=vocab_size, costs=costs, clock=clock)
        self._scheduler = self._make_scheduler(plan, report.model.window, drafting)

    def _report(self, progress: Progress | None, report: LoadProgress) -> None:
        if self._unwanted:
            raise EngineStateError("the engine was closed during its start", state="closed")
        if progress is not None:
            progress(report)

    def _make_scheduler(self, plan: MemoryPlan, window: int, drafting: Drafting) -> Scheduler | Replicas:
        config, sizes = self.config, plan.sizes
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            window=window,
            prefix_checkpoint_tokens=config.prefix_checkpoint_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            snapshots=any(budget.snapshots for budget in plan.per_device),
            max_drafts=drafting.max_drafts,
            drafter_rows=drafting.own is not None,
            stages=config.layout.pp,
        )
        propose = None if self._proposer is None else self._proposer.propose
        schedulers = [
            Scheduler(
                limits,
                Pools(grow=sizes.grow_pages, window=sizes.window_pages, slots=sizes.slots, snapshots=sizes.snapshots),
                propose=propose,
                first_seq_id=replica * SEQ_IDS,
            )
            for replica in range(config.layout.dp)
        ]
        return schedulers[0] if len(schedulers) == 1 else Replicas(schedulers, config.data_parallel_placement)

    def _drain(self) -> None:
        """Run the commands in the inbox; wait for one when no sequence can run."""
        block, timeout = not self._scheduler.has_work(), None
        if self._compiling or (self._paused and not block):
            block, timeout = block or self._paused, _PAUSED_POLL_S
        if block and not self._in_flight:
            if self._proposer is not None:
                self._proposer.interrupt(idle=True)
            self._publish()
            if timeout is None:
                self._scheduler.check_released()
            with suppress(Empty):
                self._inbox.get(timeout=timeout)()
            self._notify(self._scheduler.expire(time.monotonic()))  # deadlines pass while the engine is paused, too
        while not self._closing:
            try:
                self._inbox.get_nowait()()
            except Empty:
                return

    def _step(self) -> None:
        """Launch the next step, and wait for the results of the oldest one if too many are in flight."""
        if self._recorder is not None and self._recorder.active:
            self._finish_all()  # a step that may be saved runs alone
            self._plain_step()
        elif self._overlaps:
            self._overlapped_step()
        else:
            self._plain_step()

    def _plain_step(self) -> None:
        """Launch a step, wait for the oldest results, deliver them. Only a pipeline has several steps in flight here."""
        started = time.perf_counter()
        launches = self._launch(self._draft_length())
        launched = time.perf_counter()
        if len(self._in_flight) > (self.config.layout.pp - 1 if launches else 0):
            self._finish(started, launched)
        self._publish()

    def _overlapped_step(self) -> None:
        """Launch a step while the previous one runs, deliver the updates processed last, then wait for the oldest results."""
        started = time.perf_counter()
        length = self._draft_length()
        if len(self._in_flight) > self._most_in_flight(length):  # the next plan depends on these results
            self._finish(started, started)
        launches = self._launch(length)
        launched = time.perf_counter()
        self._publish()  # after the launch: readers of the updates take the GIL, and an idle device would wait for them
        if len(self._in_flight) > (self._most_in_flight(length) if launches else 0):
            self._finish(started, launched)

    def _draft_length(self) -> int:
        """Return how many draft tokens per sequence the next step should have."""
        return 0 if self._proposer is None else self._proposer.choose_length(self._scheduler.num_running)

    def _most_in_flight(self, length: int) -> int:
        """Return how many steps may be in flight while a step of ``length`` draft tokens is planned, and again after its launch."""
        ahead = self._plans_ahead and (length == 0 or self._drafts_ahead) and self._scheduler.foresees(length)
        return self.config.layout.pp - 1 + ahead

    def _launch(self, length: int) -> bool:
        """Plan and launch a step if any sequence can run; return whether a step was launched."""
        now = time.monotonic()
        with self._span("schedule"):
            self._notify(self._scheduler.expire(now))
            plan: Any = self._scheduler.schedule(now, length)  # a ``JointPlan`` if there are replicas
        if self._proposer is not None and plan is not None and plan.prompts:
            self._proposer.interrupt()
        if plan is not None:
            with self._span("launch", plan):
                self._in_flight.append(self._runner.launch(plan))
        elif not self._in_flight and self._scheduler.has_work():
            time.sleep(_NO_PAGES_S)  # all sequences wait for pages, which only an abort or a deadline can free
        return plan is not None

    def _finish(self, started: float, launched: float) -> None:
        """Wait for the results of the oldest step in flight and process them.

        Args:
            started, launched: When the host began this iteration of the loop, and when it had launched a step, else ``started``.
        """
        oldest = self._in_flight.popleft()
        with self._span("wait", oldest.plan):
            result = oldest.wait()
        arrived = time.perf_counter()
        if self._recorder is not None and self._recorder.active:
            self._recorder.end()
        with self._span("process", oldest.plan):
            self._process(oldest.plan, result)
        ended = time.perf_counter()
        self._step_s, self._host_s = ended - started, launched - started + ended - arrived

    def _finish_all(self) -> None:
        """Wait for all steps in flight and process their results."""
        while self._in_flight:
            oldest = self._in_flight.popleft()
            try:
                self._process(oldest.plan, oldest.wait())
            except Exception as error:
                raise self._die(error) from error

    def _process(self, plan: Any, result: StepResult) -> None:
        """Pass the result of a step (a ``StepPlan`` or a ``JointPlan``) to the scheduler, and queue the updates."""
        sampled = result.sampled
        self._steps += 1
        self._generated += len(sampled)
        if plan.max_drafts and self._proposer is not None:
            self._generated += sum([len(one.after) for one in sampled.values()])
            self._proposer.count(plan, sampled)
        for seq_id, part in result.chosen.items():
            if seq_id in self._choices:
                self._choices[seq_id].parts.append(part)
        for seq_id in self._with_host_rules.intersection(sampled):
            for one in (sampled[seq_id], *sampled[seq_id].after):
                if one.error is None:
                    self._runner.accept(seq_id, one.token_id)
        self._notify(self._scheduler.update(plan, sampled, scores=result.scores))

    def _notify(self, updates: list[SequenceUpdate]) -> None:
        """Queue updates for the next delivery; release sequences that ended."""
        for update in updates:
            if update.finish_reason is not None:
                update = self._release(update)
            self._outputs.append(update)

    def _release(self, update: SequenceUpdate) -> SequenceUpdate:
        """Forget a sequence that ended; return its last update, with its recorded experts and index entries, if any."""
        seq_id = self._seq_ids.pop((update.request_id, update.index))
        self._with_host_rules.discard(seq_id)
        self._compiling.pop(seq_id, None)
        self._runner.remove(seq_id)
        if self._proposer is not None:
            self._proposer.forget(seq_id)
        choices = self._choices.pop(seq_id, None)
        if choices is None:
            return update
        first = self.info.model.most_unselected
        return replace(update, routed_experts=choices.routed_experts(), index_entries=(first, choices.index_entries(first)))

    def _publish(self) -> None:
        """Update the counters, and deliver the queued updates."""
        counts = self._scheduler.stats()
        self._stats = EngineStats(
            steps=self._steps,
            generated_tokens=self._generated,
            step_s=self._step_s,
            host_s=self._host_s,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            preemptions=counts.preemptions,
            speculation=SpeculationStats() if self._proposer is None else self._proposer.stats(),
            kv_usage=1 - counts.available_pages / max(1, counts.num_pages),
        )
        self._flush()

    def _flush(self) -> None:
        if self._outputs:
            updates, self._outputs = self._outputs, []
            with self._span("deliver"):
                self._deliver(updates)

    def _span(self, name: str, plan: Any = None) -> AbstractContextManager[None]:
        """Return a context manager that records a span in the trace, with the size of the step if a plan is given."""
        if self._trace is None:
            return _UNTRACED
        if plan is None:
            return self._trace.span(name, {})
        tokens = sum([len(sequence.token_ids) for sequence in plan.sequences])
        return self._trace.span(name, {"sequences": len(plan.sequences), "tokens": tokens})

    # ------------------------------------------------------------------------------------------------- commands

    def _add(self, request: Request) -> None:
        """Add a request; its sequences are held until its grammar is compiled."""
        try:
            compiled = self._begin_grammar(request)
            seq_ids = self._admit(request, ready=compiled is None)
        except Exception as error:
            self._refuse(request.request_id, error)
            return
        if compiled is not None:
            self._compiling.update(dict.fromkeys(seq_ids, compiled))
            compiled.add_done_callback(lambda done: self._inbox.put(partial(self._compiled, request.request_id, seq_ids, done)))

    def _begin_grammar(self, request: Request) -> Future[LLMatcher] | None:
        """Start to compile the grammar of a request; ``None`` if it has none, or one that is compiled."""
        grammar = request.params.structured_outputs
        if grammar is None:
            return None
        if self._grammars is None:
            raise UnsupportedError(self._no_grammars)
        assert isinstance(grammar, StructuredOutputs)
        self._runner.prepare(grammar)
        compiled = self._grammars.begin(grammar)
        if not compiled.done():
            return compiled
        compiled.result()
        return None

    def _compiled(self, request_id: str, seq_ids: Sequence[int], compiled: Future[LLMatcher]) -> None:
        """Let a request run whose grammar is compiled, unless all its sequences have ended."""
        if not [seq_id for seq_id in seq_ids if self._compiling.pop(seq_id, None)]:
            return
        try:
            compiled.result()
        except Exception as error:
            self._refuse(request_id, error)
        else:
            self._scheduler.ready(request_id)

    def _refuse(self, request_id: str, error: Exception) -> None:
        """End a request that cannot run. Its error is a copy: requests with one grammar share an error, and each adds notes."""
        for update in self._scheduler.abort(request_id):
            self._release(update)
        reason = copy(error) if isinstance(error, DSV4LiteError) else failed(error)
        reason.__cause__ = reason.__cause__ or error.__cause__
        self._outputs.append(SequenceUpdate(request_id=request_id, finish_reason="error", error=reason))

    def _admit(self, request: Request, *, ready: bool) -> tuple[int, ...]:
        """Add a request to the scheduler and the runner; return the ids of its sequences."""
        dry_run(request, self.info.model.vocab_size)
        self._scheduler.add(request, ready=ready)
        sequences = self._scheduler.sequences_of(request.request_id)
        self._seq_ids.update({(request.request_id, s.index): s.seq_id for s in sequences})
        self._with_host_rules.update(s.seq_id for s in sequences if s.needs_host)
        for sequence in sequences:
            self._runner.add(sequence.seq_id, request, sequence.index)
        if request.params.records_choices:
            leader = self._choices[sequences[0].seq_id] = ChoiceRecord()
            shared = (leader, len(request.prompt_token_ids) - 1)
            self._choices.update({s.seq_id: ChoiceRecord(shared=shared) for s in sequences[1:]})
        return tuple(s.seq_id for s in sequences)

    def _abort(self, request_id: str | None, reason: FinishReason, index: int | None) -> None:
        self._notify(self._scheduler.abort(request_id, reason, index=index))

    def _call(self, function: Callable[[Engine], T], future: Future[T]) -> None:
        if future.done() or not future.set_running_or_notify_cancel():
            return
        self._running_call = future
        try:
            result = function(self)
        except BaseException as error:
            forget_frames(error)  # the caller may keep the error longer than the engine
            _answer(future, error=error)
        else:
            _answer(future, result)
        self._running_call = None

    def _dump_step(self, path: Path) -> None:
        if self._recorder is None:
            raise UnsupportedError("steps can be saved only in the engine's own process: use one rank and executor='thread'")
        self._recorder.request(path)

    def _set_paused(self, paused: bool) -> None:
        if paused:
            self._finish_all()
        self._paused = paused

    def _ask(self, method: ResidentMethod, *arguments: Any, undo: Ask | None = None) -> list[Any]:
        """Call a method of every rank's ``Resident``; if one raises, call ``undo`` on all of them."""
        if method in _ON_WEIGHTS and "weights" in self._released:
            reason = "the weights are asleep, because a `wake_up` before this call failed; call `wake_up` again"
            raise EngineStateError(reason, state="asleep")
        self._finish_all()
        try:
            return self._runner.ask(Ask(method, arguments))
        except Exception:
            if undo is not None and self._dead is None:
                self._runner.ask(undo)
            raise

    def _begin_update(self, serial: int, staged: bool) -> None:
        self._ask("begin", serial, staged)
        self._valid = self._valid and staged

    def _commit(self, serial: int, version: int, partial: bool, recompute: bool) -> None:
        try:
            self._ask("check", serial, partial)
            self._ask("write", serial)
        except BaseException as error:
            self._valid = self._valid and isinstance(error, WeightUpdateError)  # after this error nothing was written
            raise
        self._valid = True
        if recompute:
            self._scheduler.preempt_all()
        self._scheduler.publish(version)

    def _sleep(self, level: int) -> None:
        if level == 1 and "weights" not in self._released:
            self._ask("copy_out", undo=Ask("drop_copies", (True,)))
        self._finish_all()
        self._scheduler.preempt_all()
        self._scheduler.reset_prefix_cache()
        self._ask("release", MEMORY_TAGS)
        self._released.update(MEMORY_TAGS)
        if level == 2:
            self._valid = False
            self._ask("drop_copies", True)

    def _wake_up(self, tags: Sequence[MemoryTag]) -> None:
        wanted = tuple(self._released.intersection(tags))
        self._ask("restore", wanted, undo=Ask("release", (wanted,)))
        self._released.difference_update(wanted)
        if "weights" in wanted:
            self._ask("drop_copies", False)

    def _lose(self, loss: DSV4LiteError) -> None:
        """Fail open requests and calls because a rank was lost. Runs in another thread: the engine's may never leave its step.

        While the engine starts, its thread may wait for the rank, too, so ``start`` raises the loss.
        """

        def fail() -> None:
            raise loss

        if self._info is None:
            self._died = time.monotonic()
            _answer(self._ready, error=loss)
        elif isinstance(loss, EngineDeadError):
            self._announce(loss)
            call = self._running_call
            if call is not None:
                _answer(call, error=loss.copy())
            self._answer_rest()
        self._inbox.put(fail)

    def _close(self) -> None:
        self._finish_all()
        self._abort(None, "abort", None)
        self._publish()
        self._closing = True

    # ------------------------------------------------------------------------------------------------- the end

    def _die(self, error: BaseException) -> EngineDeadError:
        """Fail open requests, once; return the error that they get."""
        if self._dead is None:
            if isinstance(self._executor, MultiRankExecutor):
                error = self._executor.explain(error)
            saved = None if self._recorder is None else self._recorder.failed(error)
            where = "" if saved is None else f"; the step is saved as {saved}"
            if isinstance(error, EngineDeadError):
                dead = error
            else:
                message = f"the engine failed in a step: {described(error)}{advice_for(error)}{where}"
                dead = EngineDeadError(message, phase="step")
                dead.__cause__ = error
            self._flush()
            self._announce(dead)
        assert self._dead is not None
        return self._dead

    def _announce(self, dead: EngineDeadError) -> None:
        """Report the engine's death to the host once, from any thread; later calls do nothing."""
        with self._dying:
            if self._dead is not None:
                return
            self._died = time.monotonic()
            self._dead = dead
        self._closing = True
        log.error("the engine failed", exc_info=dead)
        self._deliver_failure(dead)

    def _free(self) -> None:
        """Drop all tensors, and fail the queued calls."""
        for held in (self._in_flight, self._choices, self._compiling):
            held.clear()
        self._external = None
        for part in ("_runner", "_executor", "_scheduler", "_grammars", "_recorder"):  # an external worker lacks some
            vars(self).pop(part, None)
        if self._dead is not None:
            forget_frames(self._dead.__cause__)  # callers keep the error, whose frames hold the model
        self._ended = True
        self._answer_rest()

    def _answer_rest(self) -> None:
        """Fail the calls in the inbox, which will not run; sessions fail their requests."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            self._fail_call(command)

    def _fail_call(self, command: Callable[[], None]) -> None:
        if isinstance(command, partial) and command.func == self._call:
            closed = EngineStateError("the engine was closed", state="closed")
            _answer(command.args[1], error=closed if self._dead is None else self._dead.copy())


def _answer(future: Future[Any], result: object = None, *, error: BaseException | None = None) -> None:
    """Set the result of a future, unless another thread has done so."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _ignore(what: object) -> None:
    """Deliver nothing: the engine has not started."""
