"""What ``AsyncLLM`` and ``LLM`` share: settings, state, and the way from a prompt to the engine and back."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence, Sized
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from dsv4lite.api.batch import Batch, OnError
from dsv4lite.api.bridge import Bridge, Callback
from dsv4lite.api.prepare import Job, RowJob
from dsv4lite.api.session import STARTED, Session, Ticket
from dsv4lite.api.streams import AsyncCompletions
from dsv4lite.checks import require
from dsv4lite.config import EngineConfig, EngineSettings
from dsv4lite.progress import new_bar
from dsv4lite.request import Phase, RequestOutput, SamplingParams
from dsv4lite.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dsv4lite.engine.engine import EngineInfo, EngineStats
    from dsv4lite.planning.memory import MemoryPlan

log = logging.getLogger("dsv4lite.api")
T = TypeVar("T")
Model = str | os.PathLike[str] | EngineConfig
BatchParams = SamplingParams | Sequence[SamplingParams] | None


def _on_current_gpu(config: EngineConfig) -> EngineConfig:
    """Return the settings with the GPU that is current in this thread, if they name none: the engine's thread has another."""
    torch = sys.modules.get("torch")
    named = config.layout.world > 1 or config.device not in ("auto", "cuda")
    if named or torch is None or not torch.cuda.is_initialized() or not torch.cuda.current_device():
        return config
    return replace(config, device=f"cuda:{torch.cuda.current_device()}")


class BaseLLM:
    """An engine and its public calls; ``AsyncLLM`` and ``LLM`` add how a caller waits."""

    _bridge: Bridge
    _sources: tuple[type, ...]
    """Kinds of iterables that prompts may come from."""

    def __init__(self, model: Model, **settings: Unpack[EngineSettings]) -> None:
        """Describe an engine. Cheap: nothing is read, downloaded or allocated before it is started.

        Args:
            model: Folder of a checkpoint, a hub id, or a whole ``EngineConfig``.
            **settings: Fields of ``EngineConfig``; they override those of a given ``EngineConfig``.

        Raises:
            ConfigError: A setting is unknown (with a near match) or out of range.
        """
        given: dict[str, Any] = {"model": model}
        if isinstance(model, EngineConfig):
            given = {field.name: getattr(model, field.name) for field in fields(model)}
        self._session = Session(_on_current_gpu(EngineConfig.from_dict({**given, **settings})))
        self._noted_limit = False
        # The session has no reference to this object, so that the engine's thread does not keep it alive.
        weakref.finalize(self, self._session.drop).atexit = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config.model!r}, state={self.state.value!r})"

    @property
    def config(self) -> EngineConfig:
        """The settings; they never change."""
        return self._session.config

    @property
    def state(self) -> Phase:
        """The state of the engine; equal to its name, such as ``"ready"``."""
        return self._session.phase

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's vocabulary; only once the engine has started."""
        return self._session.engine("tokenizer", *STARTED).info.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What requests without ``params`` use: the checkpoint's ``generation_config.json``; only once the engine has started."""
        return self._session.engine("default_params", *STARTED).info.default_params

    @property
    def weight_version(self) -> int:
        """The version of the last weight update that was committed; 0 for the weights of the start."""
        return self._session.weight_version

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters; never blocks. Requests that wait for a place in its queue are not counted.

        Raises:
            EngineStateError: The engine has not started, or was closed.
        """
        return self._session.engine("stats", *STARTED).stats()

    def memory(self) -> MemoryPlan:
        """Return the memory plan the engine was started with.

        Raises:
            EngineStateError: The engine has not started, or was closed.
        """
        return self._session.engine("memory", *STARTED).memory()

    def abort(self, request_id: str | None = None) -> None:
        """End an open request, or all of them, now.

        Its caller gets the output so far, with ``finish_reason="abort"``. With recorded experts or a replay, the output has them
        and comes after the current step. Allowed in every state and from every thread; an id that is not open is ignored.

        Raises:
            InvalidRequestError: ``request_id`` is neither a string nor ``None``.
        """
        require(request_id is None or isinstance(request_id, str), "request_id", request_id, "must be a string or None")
        self._session.abort(request_id)

    # ---- inside ----

    def _check(self, call: str, *allowed: Phase) -> EngineInfo:
        """Return what the engine knows of its model; raise unless the state allows the call and the caller may wait here."""
        info = self._session.engine(call, *allowed).info
        self._session.require_here(call)
        return info

    async def _submit(self, job: Job, wake: Callback | None = None) -> Ticket:
        """Encode and check a prompt, and hand the request to the session."""
        self._check("generate")
        arrival = time.monotonic()
        request = await self._bridge.offload(job.make) if job.is_long else job.make()
        if request.generate and request.params.max_tokens is None and not self._noted_limit:
            self._noted_limit = True
            log.warning("a request without max_tokens may run to max_model_len; set SamplingParams(max_tokens=...)")
        opened: list[Ticket] = []
        try:
            return self._session.submit(job, request, arrival, wake, opened)
        except BaseException:  # such as a KeyboardInterrupt between the submission and this frame
            for ticket in opened:
                self._session.abort_ticket(ticket)
            raise

    async def _run(self, job: Job) -> RequestOutput:
        """Submit a request and wait for its output; an exception that ends the wait ends the request."""
        ticket = await self._submit(job)
        try:
            await self._bridge.wait(ticket.future)
        except BaseException:
            self._session.abort_ticket(ticket)
            raise
        return ticket.result()

    async def _ask(self, answer: Future[T]) -> T:
        """Wait for a call that the engine runs between two steps. One whose caller has left before it began is dropped."""
        try:
            return await self._bridge.wait(answer)
        finally:
            answer.cancel()  # without effect once it has begun

    def _completions(
        self,
        call: str,
        rows: Any,
        params: BatchParams,
        make_job: RowJob,
        on_error: OnError = "raise",
        max_in_flight: int | None = None,
        progress: bool = False,
    ) -> AsyncCompletions:
        """Run the jobs of many prompts or pairs, as in ``as_completed``; ``call`` is named in errors."""
        self._check(call)
        name = "pairs" if call == "score_batch" else "prompts"
        good = isinstance(rows, self._sources) and not isinstance(rows, (str, bytes, Mapping))
        require(good, name, rows, f"must be an iterable of {name}; put a single one into a list")
        good = params is None or (isinstance(params, (SamplingParams, Sequence)) and not isinstance(params, (str, bytes)))
        require(good, "params", params, "must be SamplingParams, a sequence with one for each row, or None")
        one, each = (None, tuple(params)) if isinstance(params, Sequence) else (params, None)
        if each is not None and isinstance(rows, Sized) and len(rows) != len(each):
            require(False, "params", each, f"has {len(each)} entries for {len(rows)} prompts; give one for each, or one for all")

        async def submit(index: int, row: Any) -> Ticket:
            if each is not None and index >= len(each):
                problem = f"has {len(each)} entries and there are more prompts; give one for each, or one for all"
                require(False, "params", each, problem)
            return await self._submit(make_job(self._check(call), row, one if each is None else each[index], index))

        require(isinstance(progress, bool), "progress", progress, "must be True or False")
        batch = Batch(self._session, self._bridge, rows, on_error, max_in_flight)
        bar = new_bar(call, len(rows) if isinstance(rows, Sized) else None, "rows") if progress else None
        return AsyncCompletions(batch, submit, bar)
