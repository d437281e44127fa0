"""An engine without a model: a real thread, scripted tokens, failures on demand."""

from __future__ import annotations

import copy
import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from dsv4lite.config import EngineConfig
from dsv4lite.errors import EngineDeadError, EngineStateError, InvalidRequestError, RequestFailedError, WeightUpdateError
from dsv4lite.models.config import ModelConfig
from dsv4lite.request import MEMORY_TAGS, FinishReason, Logprobs, MemoryTag, Request, SamplingParams, SequenceUpdate, TokenLogprob
from dsv4lite.text.forms import FORMS, ChatForm
from dsv4lite.text.tokenizer import Tokenizer
from tests.text.shipped import SHIPPED

REFUSED, POISON = 4000, 4001
"""Prompt tokens: the engine refuses a request with the first; one with the second fails after two tokens."""
MANY = SamplingParams(max_tokens=100_000, detokenize=False)
SIZES = ModelConfig(vocab_size=4096, hidden_size=8, num_hidden_layers=1, max_positions=200_000, num_experts=4)
ENDLESS = SamplingParams(max_tokens=None, detokenize=False)
"""For a request that never ends, with the model ``endless``."""
Model = Callable[[Request, int], Iterator[int]]
T = TypeVar("T")


def echo(request: Request, index: int) -> Iterator[int]:
    """Repeat the prompt, then end."""
    yield from request.prompt_token_ids
    yield 1


def endless(request: Request, index: int) -> Iterator[int]:
    """Count through the vocabulary forever."""
    while True:
        yield from range(100, 1000)


@dataclass(frozen=True, kw_only=True)
class FakeInfo:
    tokenizer: Tokenizer
    max_model_len: int = 200_000
    max_logprobs: int = 64
    max_completions: int = 1024
    model: ModelConfig = SIZES
    default_params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.5, max_tokens=7))
    end_token_ids: tuple[int, ...] = ()
    chat: ChatForm | None = FORMS["deepseek_v4"]
    no_chat: str = ""


@dataclass
class FakeSequence:
    request: Request
    index: int
    tokens: Iterator[int]
    count: int = 0


class FakeEngine:
    """Stands for ``dsv4lite.engine.engine.Engine``. ``hold`` stops stepping until ``step`` or ``go``, without pausing."""

    def __init__(self, config: EngineConfig, *, model: Model = echo, tokenizer: Tokenizer, held: bool = False) -> None:
        self.config = config
        self.model = model
        self.info = FakeInfo(tokenizer=tokenizer)
        self.fail_start: Exception | None = None
        self.starting: Callable[[], None] = lambda: None
        self.submitted: list[Request] = []
        self.aborted: list[tuple[str | None, int | None]] = []
        self.resets = 0
        self.told: list[tuple[Any, ...]] = []  # about weights and memory
        self.released, self.valid = frozenset[MemoryTag](), True
        self.failing: dict[str, Exception] = {}
        self.dumps: list[Path] = []
        self.steps = 0
        self.max_open = 0
        self.closes = 0
        self.paused = False
        self.sequences: dict[tuple[str, int], FakeSequence] = {}
        self._budget = 0 if held else float("inf")
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: list[SequenceUpdate] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._dead: EngineDeadError | None = None

    # ---- the engine's interface ----

    def start(self, deliver: Callable[[list[SequenceUpdate]], None], deliver_failure: Callable[[EngineDeadError], None]) -> None:
        self.starting()
        if self.fail_start is not None:
            raise self.fail_start
        self._deliver, self._deliver_failure = deliver, deliver_failure
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._put(lambda: self._add(request))

    def abort(self, request_id: str | None = None, reason: FinishReason = "abort", *, index: int | None = None) -> None:
        self._put(lambda: self._abort(request_id, reason, index))

    def call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(answer)
        return future

    def set_paused(self, paused: bool) -> Future[None]:
        return self.call(lambda: setattr(self, "paused", paused))

    def reset_prefix_cache(self) -> Future[None]:
        return self.call(lambda: setattr(self, "resets", self.resets + 1))

    def dump_step(self, path: Path) -> Future[None]:
        return self.call(lambda: self.dumps.append(path))

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        if method == "apply":
            function, given = arguments
            return self.call(lambda: [function("model", 0, *given)])
        return self._told(method, *arguments)

    def load_weights(self, serial: int, source: Any, ended: Callable[[], bool]) -> None:
        for name, _ in source.tensors():
            self._told("take", serial, name).result(10)

    def memory_state(self) -> tuple[frozenset[MemoryTag], bool]:
        return self.released, self.valid

    def begin_update(self, serial: int, staged: bool) -> Future[None]:
        return self._told("begin", serial, staged, then=lambda: setattr(self, "valid", self.valid and staged))

    def commit_update(self, serial: int, version: int, *, partial: bool, recompute: bool) -> Future[None]:
        return self._told("commit", serial, version, partial, recompute, then=lambda: setattr(self, "valid", True))

    def sleep(self, level: int) -> Future[None]:
        def do() -> None:
            self.released, self.valid = frozenset(MEMORY_TAGS), self.valid and level == 1

        return self._told("sleep", level, then=do)

    def wake_up(self, tags: Sequence[MemoryTag]) -> Future[None]:
        return self._told("wake_up", *sorted(tags), then=lambda: setattr(self, "released", self.released.difference(tags)))

    def weight_checksums(self) -> Future[dict[str, str]]:
        return self.call(lambda: {"w": "0" * 16})

    def _told(self, *call: Any, then: Callable[[], None] = lambda: None) -> Future[None]:
        def do() -> None:
            self.told.append(call)
            if (failure := self.failing.pop(call[0], None)) is not None:
                # As in the engine: an error of a commit that is no ``WeightUpdateError`` may come in the middle of writing.
                self.valid = self.valid and (call[0] != "commit" or isinstance(failure, WeightUpdateError))
                raise failure
            assert call[0] in ("begin", "take", "roll_back", "capture") or self.paused, f"{call} while steps run"
            then()

        return self.call(do)

    def stats(self) -> Any:
        return {"open": len(self.sequences)}

    def memory(self) -> Any:
        return "plan"

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self, *, wait: bool = True) -> None:
        self.closes += 1
        if self._thread is not None:
            self._inbox.put(self._close)
            if wait:
                self._thread.join()

    # ---- what tests do to it ----

    def hold(self) -> None:
        """Take no further step; return when the engine has stopped stepping."""
        self.call(lambda: setattr(self, "_budget", 0)).result(10)

    def step(self, count: int = 1) -> None:
        """Let a held engine take some steps."""
        self._put(lambda: setattr(self, "_budget", self._budget + count))

    def go(self) -> None:
        """Step without limit."""
        self.step(10**9)

    def sync(self) -> None:
        """Return when all commands so far are done and their events delivered."""
        self.call(self._flush).result(10)

    def die(self, error: Exception) -> None:
        """Fail in the next step."""

        def fail() -> None:
            raise error

        self._put(fail)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # ---- the thread ----

    def _put(self, command: Callable[[], None]) -> None:
        if self._dead is not None:
            raise self._dead.copy()
        if self._closed or self._thread is None:
            raise EngineStateError("the engine is not running", state="closed")
        self._inbox.put(command)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._drain()
                self._expire()
                if self.sequences and not self.paused and self._budget > 0:
                    self._budget -= 1
                    self._step()
                self._flush()
        except Exception as error:
            self._dead = EngineDeadError(f"step {self.steps}: {error}", phase="step")
            self._dead.__cause__ = error
            self._deliver_failure(self._dead)

    def _drain(self) -> None:
        busy = self.sequences and not self.paused and self._budget > 0
        try:
            self._inbox.get(timeout=0.0002 if busy else 0.005)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _add(self, request: Request) -> None:
        self.submitted.append(request)
        if REFUSED in request.prompt_token_ids:
            error = InvalidRequestError("refused", parameter="prompt")
            self._outbox.append(SequenceUpdate(request_id=request.request_id, finish_reason="error", error=error))
            return
        assert (request.request_id, 0) not in self.sequences, "the session must not send an id twice"
        for index in range(request.params.n):
            self.sequences[request.request_id, index] = FakeSequence(request, index, self.model(request, index))
        self.max_open = max(self.max_open, len({request_id for request_id, _ in self.sequences}))

    def _abort(self, request_id: str | None, reason: FinishReason, index: int | None) -> None:
        self.aborted.append((request_id, index))
        for key in list(self.sequences):
            if request_id in (None, key[0]) and index in (None, key[1]):
                self._end(key, reason)

    def _end(self, key: tuple[str, int], reason: FinishReason, **more: Any) -> None:
        del self.sequences[key]
        self._outbox.append(SequenceUpdate(request_id=key[0], index=key[1], finish_reason=reason, **more))

    def _expire(self) -> None:
        now = time.monotonic()
        for key, sequence in list(self.sequences.items()):
            if sequence.request.deadline is not None and now >= sequence.request.deadline:
                self._end(key, "deadline")

    def _step(self) -> None:
        self.steps += 1
        for key, sequence in list(self.sequences.items())[: self.config.max_num_seqs]:
            self._advance(key, sequence)

    def _advance(self, key: tuple[str, int], sequence: FakeSequence) -> None:
        request, params = sequence.request, sequence.request.params
        first = sequence.count == 0
        more: dict[str, Any] = {"started": time.monotonic(), "cached_tokens": 4} if first else {}
        if request.score_from is not None and sequence.index == 0 and first:
            self._score(request)
        if not request.generate:
            return self._end(key, "stop", **more)
        if POISON in request.prompt_token_ids and sequence.count == 2:
            return self._end(key, "error", error=RequestFailedError("logits are not finite"), started=time.monotonic())
        token = next(sequence.tokens)
        sequence.count += 1
        reason: FinishReason | None = None
        if token == request.eos_token_id and not params.ignore_eos:
            reason = "stop"
        elif token in params.stop_token_ids:
            reason, more["stop_reason"] = "stop", token
        elif sequence.count == params.max_tokens:
            reason = "length"
        if reason is not None:
            del self.sequences[key]
        if params.logprobs is not None:
            k = params.logprobs
            more["logprobs"] = (
                TokenLogprob(
                    logprob=-float(sequence.count),
                    rank=sequence.count,
                    token_ids=array("i", [token] * k),
                    values=array("f", [0.0] * k),
                ),
            )
        self._outbox.append(SequenceUpdate(request_id=key[0], index=key[1], token_ids=(token,), finish_reason=reason, **more))
        return None

    def _score(self, request: Request) -> None:
        """Prompt scores arrive in pieces, as after a chunked prefill; the value of a token is minus its id."""
        k = request.params.prompt_logprobs or 0
        scored = request.prompt_token_ids[request.score_from :]
        size = 2 + len(scored) // 4
        for start in range(0, len(scored), size):
            ids = torch.tensor(scored[start : start + size])
            part = Logprobs(
                sampled=-ids.float(),
                ranks=torch.ones(len(ids), dtype=torch.int32),
                token_ids=ids.int()[:, None].expand(-1, k),
                values=torch.zeros(len(ids), k),
            )
            self._outbox.append(SequenceUpdate(request_id=request.request_id, prompt_logprobs=part))

    def _flush(self) -> None:
        if self._outbox:
            updates, self._outbox = self._outbox, []
            self._deliver(updates)

    def _close(self) -> None:
        for key in list(self.sequences):
            self._end(key, "abort")
        self._flush()
        self._closed = True


class Lab:
    """Makes the engines of one test."""

    def __init__(self) -> None:
        self.tokenizer = copy.copy(SHIPPED)  # a test may replace its methods
        self.engines: list[FakeEngine] = []
        self.model: Model = echo
        self.held = False
        self.prepare: Callable[[FakeEngine], None] = lambda engine: None

    @property
    def engine(self) -> FakeEngine:
        """The engine that was made last."""
        return self.engines[-1]

    def open_engine(self, config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config, model=self.model, tokenizer=self.tokenizer, held=self.held)
        self.prepare(engine)
        self.engines.append(engine)
        return engine
