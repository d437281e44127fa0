"""What ``AsyncLLM`` and ``LLM`` share: settings, state, and the way from a prompt to the engine and back."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from dsv4lite.api.batch import Batch, OnError
from dsv4lite.api.bridge import Bridge
from dsv4lite.api.prepare import Job, Message, Options, Reasoning, Tool, chat_job, completion_job, score_job
from dsv4lite.api.session import SERVING, Session, Ticket
from dsv4lite.api.streams import AsyncCompletions, MakeJob, value_of
from dsv4lite.config import (
    Dtype,
    EngineConfig,
    ExecutorKind,
    ExpertDispatch,
    KvCacheDtype,
    LoadFormat,
    ModelFamily,
    Progress,
    ReplicaPlacement,
    Speculative,
)
from dsv4lite.errors import EngineStateError, InvalidRequestError, shown
from dsv4lite.request import Phase, Prompt, RequestOutput, SamplingParams
from dsv4lite.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dsv4lite.engine.engine import EngineStats
    from dsv4lite.planning.memory import MemoryPlan

Model = str | os.PathLike[str] | EngineConfig
BatchParams = SamplingParams | Sequence[SamplingParams] | None


class EngineSettings(TypedDict, total=False):
    """The fields of ``EngineConfig`` besides ``model``, as keyword arguments; they are described there."""

    revision: str | None
    tokenizer: str | None
    dtype: Dtype
    kv_cache_dtype: KvCacheDtype
    load_format: LoadFormat
    device: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    max_queued_requests: int
    max_completions: int
    max_logprobs: int
    enable_prefix_caching: bool
    prefix_checkpoint_tokens: int
    speculative: Speculative
    deterministic: bool
    seed: int
    progress: bool | Progress
    compile_cache_dir: str | None
    dump_dir: str | None
    hf_overrides: Mapping[str, Any]
    family: ModelFamily
    tensor_parallel_size: int
    expert_parallel_size: int
    data_parallel_size: int
    data_parallel_placement: ReplicaPlacement
    pipeline_parallel_size: int
    redundant_experts: int | None
    rebalance_steps: int
    dispatcher: ExpertDispatch
    executor: ExecutorKind
    device_mesh: Any
    process_group: Any
    start_timeout_s: float
    step_timeout_s: float
    rank_timeout_s: float


class BaseLLM:
    """An engine and its public calls; ``AsyncLLM`` and ``LLM`` add how a caller waits."""

    _bridge: Bridge
    _sources: tuple[type, ...]
    """Kinds of iterables that prompts may come from."""

    def __init__(self, model: Model, **settings: Unpack[EngineSettings]) -> None:
        """Describe an engine. Cheap: nothing is read, downloaded or allocated before it is started.

        Args:
            model: Folder of a checkpoint, a hub id, or a whole ``EngineConfig``.
            **settings: Fields of ``EngineConfig``; with one given, changes to it.

        Raises:
            ConfigError: A setting is unknown (with a near match) or out of range.
        """
        given: dict[str, Any] = {"model": model}
        if isinstance(model, EngineConfig):
            given = {field.name: getattr(model, field.name) for field in fields(model)}
        self._session = Session(EngineConfig.from_dict({**given, **settings}))
        # The session does not know this object: what the engine's thread holds must not keep it from being garbage.
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
        """The checkpoint's vocabulary; only while the engine serves."""
        return self._session.facts("tokenizer").tokenizer

    @property
    def weight_version(self) -> int:
        """How often the weights were replaced; 0 for those of the checkpoint."""
        return 0

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters; never blocks. Requests that wait for a place in its queue are not counted.

        Raises:
            EngineStateError: The engine does not serve.
        """
        return self._session.engine("stats").stats()

    def memory(self) -> MemoryPlan:
        """Return the memory plan the engine was started with.

        Raises:
            EngineStateError: The engine does not serve.
        """
        return self._session.engine("memory").memory()

    def abort(self, request_id: str | None = None) -> None:
        """End an open request, or all of them, now.

        Its caller gets the output so far, with ``finish_reason="abort"``. Allowed in every state and from every thread; an id that
        is not open is ignored.
        """
        self._session.abort(request_id)

    # ---- inside ----

    def _check(self, call: str) -> None:
        """Raise unless the engine serves and the caller may wait here."""
        self._session.require(call, *SERVING)
        if not self._bridge.is_current():
            message = f"{call}: this AsyncLLM was started in another event loop; use it there, or start one per loop"
            raise EngineStateError(message, state=self.state.value, allowed=[phase.value for phase in SERVING])

    async def _submit(self, job: Job, *, streaming: bool = False, wake: Callable[[], None] = lambda: None) -> Ticket:
        """Encode and check a prompt, and hand the request to the session."""
        self._check("generate")
        checked = await self._bridge.offload(job.make) if job.is_long else job.make()
        return self._session.submit(checked, streaming=streaming, wake=wake)

    async def _run(self, job: Job) -> RequestOutput:
        """Submit a request and wait for its output; an exception that ends the wait ends the request."""
        ticket = await self._submit(job)
        try:
            output = await self._bridge.wait(ticket.future)
        except BaseException:
            self._session.abort_ticket(ticket)
            raise
        return value_of(output)

    def _check_rows(self, call: str, rows: object, name: str) -> None:
        """Check a call that takes many rows, in the parameter ``name``; they may be of any length and are not looked at."""
        self._check(call)
        if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, self._sources):
            message = f"{name} must be an iterable of {name}, not {type(rows).__name__}; put a single one into a list"
            raise InvalidRequestError(message, parameter=name, value=rows)

    def _completions(
        self, rows: Any, make_job: MakeJob, on_error: OnError = "raise", max_in_flight: int | None = None
    ) -> AsyncCompletions:
        signal = self._bridge.signal()
        batch = Batch(self._session, on_error, max_in_flight, signal)
        return AsyncCompletions(batch, signal, self._bridge, self._submit, rows, make_job)

    def _completion_job(self, prompt: Prompt, params: SamplingParams | None, options: Options) -> Job:
        return completion_job(self._session.facts("generate"), prompt, params, options)

    def _batch_jobs(
        self, prompts: object, params: BatchParams, priority: int, deadline: float | None, cache_salt: str | None
    ) -> MakeJob:
        choose = _params_of_rows(prompts, params)

        def job(index: int, prompt: Prompt) -> Job:
            options = Options(priority=priority, deadline=deadline, cache_salt=cache_salt, index=index)
            return self._completion_job(prompt, choose(index), options)

        return job

    def _chat_job(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        options: Options,
        tools: Sequence[Tool] | None,
        reasoning: Reasoning,
        allow_special: bool,
    ) -> Job:
        facts = self._session.facts("chat")
        return chat_job(facts, messages, params, options, tools=tools, reasoning=reasoning, allow_special=allow_special)

    def _score_job(
        self, prompt: Prompt, completion: Prompt, params: SamplingParams | None, top_logprobs: int, index: int = 0
    ) -> Job:
        return score_job(self._session.facts("score"), prompt, completion, params, top_logprobs, Options(index=index))

    def _score_jobs(self, pairs: object, params: BatchParams, top_logprobs: int) -> MakeJob:
        choose = _params_of_rows(pairs, params)

        def job(index: int, prompt: Any) -> Job:
            if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)) or len(prompt) != 2:
                message = f"pair {index} must be (prompt, completion), not {shown(prompt)}"
                raise InvalidRequestError(message, parameter="pairs", value=prompt)
            before, after = prompt
            return self._score_job(before, after, choose(index), top_logprobs, index)

        return job


def _params_of_rows(rows: object, params: Any) -> Callable[[int], SamplingParams | None]:
    """Return what finds the settings of a row, given its number.

    Raises:
        InvalidRequestError: There is not one for each row.
    """
    if params is None or isinstance(params, SamplingParams):
        return lambda index: params
    if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
        message = f"params={shown(params)} must be SamplingParams, a sequence with one for each row, or None"
        raise InvalidRequestError(message, parameter="params", value=params)
    each: tuple[SamplingParams | None, ...] = tuple(params)
    if isinstance(rows, Sized) and len(rows) != len(each):
        message = f"params has {len(each)} entries for {len(rows)} prompts; give one for each, or one for all"
        raise InvalidRequestError(message, parameter="params", value=len(each))

    def choose(index: int) -> SamplingParams | None:
        if index >= len(each):
            message = f"params has {len(each)} entries and there are more prompts; give one for each, or one for all"
            raise InvalidRequestError(message, parameter="params", value=len(each))
        return each[index]

    return choose
