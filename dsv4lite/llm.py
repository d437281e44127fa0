"""The public API: ``AsyncLLM`` for event loops, ``LLM`` for synchronous code. Text in, text out.

``AsyncLLM`` implements every call. Its waits go through a bridge to the host's own loop, asyncio or Trio; ``LLM`` runs the
same calls with a bridge whose waits block the thread. Nothing is held open between calls: no task group, no cancel scope, no
hidden event loop.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

import anyio
import anyio.to_thread

from dsv4lite.api.batch import BatchRow, OnError
from dsv4lite.api.blocking import Block, Completions, Stream, WeightUpdate, blocking, finish
from dsv4lite.api.bridge import ThreadBridge, current_loop
from dsv4lite.api.common import BaseLLM, BatchParams, Model
from dsv4lite.api.jsonl import FileProgress, FileReport, RowFiles
from dsv4lite.api.prepare import (
    Message,
    Options,
    Reasoning,
    Tool,
    ToolChoice,
    chat_job,
    completion_job,
    pair_job,
    row_job,
    score_job,
)
from dsv4lite.api.session import NOT_UPDATING, SERVING, STARTED, PauseMode, Update, UpdateMode, require_pause_mode
from dsv4lite.api.streams import AsyncCompletions, AsyncStream
from dsv4lite.api.update import AsyncWeightUpdate
from dsv4lite.checks import file_name, require
from dsv4lite.config import EngineSettings
from dsv4lite.errors import ConfigError, RequestFailedError, shown
from dsv4lite.request import MEMORY_TAGS, Logprobs, MemoryTag, Phase, Prompt, Replay, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from dsv4lite.engine.contract import ExecutionContract

T = TypeVar("T")


def _scores(output: RequestOutput) -> Logprobs:
    """Return the log-probabilities of a scored completion; raise ``RequestFailedError`` if the request ended early."""
    logprobs, reason = output.prompt_logprobs, output.outputs[0].finish_reason
    if logprobs is None or reason != "stop":
        known = 0 if logprobs is None else len(logprobs)
        raise RequestFailedError(f"scoring ended after {known} tokens: {reason}", output=output)
    return logprobs


class AsyncLLM(BaseLLM):
    """DeepSeek models in the host's own process, for asyncio and Trio.

        async with AsyncLLM("deepseek-ai/DeepSeek-V4-Flash") as llm:
            output = await llm.generate("What is MLA?", SamplingParams(max_tokens=200))
            print(output.text)

    An ``AsyncLLM`` belongs to the event loop in which it was started. Cancelling a call ends its request within one engine step,
    and the cancellation propagates. Leaving the block ends every open request and frees everything. Other threads may call
    ``abort``, ``stats`` and ``memory`` and read the properties; another event loop may call ``aclose``.

    States: ``new``, ``starting``, ``ready``, ``paused``, ``updating``, ``asleep``, ``weights_invalid``, ``failed``, ``closed``.
    A method is allowed while the engine is ready, paused or updating, unless its description says otherwise. In other states it
    raises ``EngineStateError``, or ``EngineDeadError`` with the cause if the engine failed.
    """

    _sources = (Iterable, AsyncIterable)

    @classmethod
    async def create(cls, model: Model, **settings: Unpack[EngineSettings]) -> Self:
        """Make and start an engine, for frameworks that cannot use ``async with``; call ``aclose`` when done.

        Args:
            model: Folder of a checkpoint, a hub id, or a whole ``EngineConfig``.
            **settings: Fields of ``EngineConfig``.

        Raises:
            ConfigError, CheckpointError, CapacityError: The engine cannot be made or loaded; all that it had allocated is freed.
        """
        llm = cls(model, **settings)
        await llm._start()
        return llm

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End open requests with what they have (``finish_reason="abort"``) and free everything. May be repeated.

        Returns or raises only once the engine has closed: a cancellation, even a repeated ``task.cancel()``, waits until then.

        Raises:
            EngineStateError: A callback of the engine, such as ``progress``, made the call.
        """
        if self._session.forked:  # worker threads of the event loop are not in this process either
            return
        self._session.begin_close()
        cancelled: BaseException | None = None
        with anyio.CancelScope(shield=True):
            while True:
                try:
                    await anyio.to_thread.run_sync(self._session.close, limiter=anyio.CapacityLimiter(1))
                    break
                except anyio.get_cancelled_exc_class() as error:  # asyncio's ``task.cancel()`` ignores the shield
                    cancelled = error
        if cancelled is not None:
            raise cancelled

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        wait: bool = True,
    ) -> RequestOutput:
        """Continue a prompt.

        Args:
            prompt: Text, token ids, or ``{"prompt_token_ids": [...]}``.
            params: Sampling parameters; ``None`` means the checkpoint's ``generation_config.json``.
            request_id: A name for ``abort``, unique among open requests; generated by default.
            priority: Smaller runs earlier; equal ones run in order of arrival.
            deadline: Seconds from now; after them the request ends with its output so far, ``finish_reason="deadline"``.
            cache_salt: Share cached prefixes only with requests of the same salt.
            wait: When the queue is full, wait for a place in order of arrival instead of raising ``QueueFullError``.

        Returns:
            All ``params.n`` completions. While the engine is paused, the request waits in the queue.

        Raises:
            InvalidRequestError: A parameter is wrong; ``ContextLengthError`` if prompt and completion do not fit.
            QueueFullError: With ``wait=False``; ``retry_after`` estimates when to try again.
            RequestFailedError: This request failed; ``output`` has what was generated before.
            EngineDeadError: The engine failed; the cause is chained.
        """
        options = Options(request_id=request_id, priority=priority, deadline=deadline, cache_salt=cache_salt, wait=wait)
        return await self._run(completion_job(self._check("generate"), prompt, params, options))

    async def generate_batch(
        self,
        prompts: Iterable[BatchRow] | AsyncIterable[BatchRow],
        params: BatchParams = None,
        *,
        on_error: OnError = "raise",
        max_in_flight: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue many prompts and return the outputs in their order; see ``as_completed``."""
        job = row_job(Options(priority=priority, deadline=deadline, cache_salt=cache_salt))
        async with self._completions("generate_batch", prompts, params, job, on_error, max_in_flight, progress) as outputs:
            return sorted([output async for output in outputs], key=lambda output: output.index)

    def as_completed(
        self,
        prompts: Iterable[BatchRow] | AsyncIterable[BatchRow],
        params: BatchParams = None,
        *,
        on_error: OnError = "raise",
        max_in_flight: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        progress: bool = False,
    ) -> AsyncCompletions:
        """Continue many prompts and iterate over the outputs as they finish.

        Args:
            prompts: An iterable of any length, of prompts or of ``Row``; the metadata of a ``Row`` comes back on its output. A
                prompt is pulled only when an output is asked for and ``max_in_flight`` allows it. ``AsyncLLM`` also takes an
                asynchronous iterable, which a separate task pulls, so that it may wait for what the consumer does with outputs.
            params: One for all prompts, or a sequence with one for each.
            on_error: ``"raise"`` ends the iteration with the first prompt that fails; ``"return"`` returns its output with
                ``error`` set, and continues. An exception of ``prompts`` itself, or the end of the engine, is always raised.
            max_in_flight: Most prompts that were pulled and whose outputs were not returned yet; default ``2 * max_num_seqs``.
            priority: As in ``generate``.
            deadline: Seconds from the moment a prompt is pulled.
            cache_salt: As in ``generate``.
            progress: Show a bar (tqdm, the extra ``progress``), also in notebooks.

        Returns:
            An iterator; ``index`` of an output is the prompt's position. If the loop ends early, requests in flight are aborted
            when the iterator is garbage-collected; ``async with`` around it, or ``aclose``, aborts them at once.
        """
        job = row_job(Options(priority=priority, deadline=deadline, cache_salt=cache_salt))
        return self._completions("as_completed", prompts, params, job, on_error, max_in_flight, progress)

    async def generate_file(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        params: SamplingParams | None = None,
        *,
        max_in_flight: int | None = None,
        progress: FileProgress | bool = False,
    ) -> FileReport:
        """Run the requests in the lines of a file and write a line for each as it ends; resume a run that was interrupted.

        A line is a prompt (a JSON string), an object with ``prompt``, ``prompt_token_ids`` or ``messages`` beside fields of
        ``SamplingParams``, or a line of OpenAI's batch format; its ``custom_id`` is copied to the output. Outputs are in OpenAI's
        batch format, in the order in which they end, each with ``"id": "row-N"`` for line N of ``source``, counted from 0. Rows
        that have a line in ``target`` are skipped, so that the same call resumes a run that was interrupted or killed.

        Args:
            source: The file of requests; read line by line.
            target: The file of outputs.
            params: Settings for what a row does not set; ``None`` means the checkpoint's ``generation_config.json``.
            max_in_flight: Most rows in memory at a time; default ``2 * max_num_seqs``.
            progress: ``True`` shows a bar of the remaining rows, as in ``as_completed``; a callable gets a report after each row.

        Returns:
            How many rows were done. A row that is malformed or fails has its ``error`` in the file and is counted in ``failed``. A
            row that is aborted has no line, and runs with the next call.

        Raises:
            EngineDeadError, EngineStateError: The engine failed, was closed or lost its weights. ``target`` keeps its lines.
            InvalidRequestError: ``params`` are of another kind, or ask for what a line of outputs has no place for.
            ConfigError: ``source`` or ``target`` is not a path or not a file, ``target`` holds other data than outputs of these
                requests, or another run is writing it.
            OSError: A file cannot be read or written. ``target`` keeps its lines.
        """
        with RowFiles(source, target, params) as files:
            await self._bridge.offload(files.read)
            bar = False if callable(progress) else progress
            async with self._completions("generate_file", files, None, files.job, "return", max_in_flight, bar) as outputs:
                async for output in outputs:
                    files.write(output)
                    if callable(progress):
                        progress(files.report())
            report = files.report()
        if report.earlier + report.done < report.rows:  # rows were aborted, perhaps because the engine was closed
            self._session.require("generate_file", *STARTED)
        return report

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        wait: bool = True,
    ) -> AsyncStream:
        """Continue a prompt and read the output as it is made.

            async with llm.stream(prompt, params) as stream:
                async for delta in stream:
                    print(delta.text, end="")
                output = await stream.final()

        Arguments and errors are those of ``generate``; entering the block raises the errors of the prompt and its parameters.
        """
        options = Options(request_id=request_id, priority=priority, deadline=deadline, cache_salt=cache_salt, wait=wait)
        job = completion_job(self._check("stream"), prompt, params, options)
        return AsyncStream(self._session, self._bridge, partial(self._submit, job))

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning: Reasoning | None = "none",
        allow_special: bool = False,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        wait: bool = True,
    ) -> RequestOutput:
        """Write the assistant's next turn of a conversation.

        Args:
            messages: OpenAI-style messages with ``role`` and ``content``; see ``dsv4lite.text.chat.render_messages``.
            params: As in ``generate``.
            tools: OpenAI-style tool definitions.
            tool_choice: ``"auto"``: the model answers or calls tools; ``"none"``: it cannot call any; ``"required"``: it calls one
                or more; a tool's name, or OpenAI's ``{"type": "function", ...}``: it calls that one, once. Forced calls follow a
                grammar, and so does ``"auto"`` if a tool has ``"strict": True``: they are well-formed, their arguments fit the
                tools' schemas, and none ends up in the text. A grammar needs the extra ``structured``.
            reasoning: Effort to think before the answer; ``"none"`` and ``None`` turn thinking off. V3 never thinks, R1 always.
            allow_special: Encode control tokens that are written in messages and tools, such as ``<｜User｜>``, as control tokens.
                By default they are text, and a tool's result cannot close its own tag.
            request_id, priority, deadline, cache_salt, wait: As in ``generate``.

        Returns:
            An output whose ``text`` is the answer; ``reasoning`` and ``tool_calls`` are separate fields.

        Raises:
            InvalidRequestError: A message, a tool or a parameter is malformed. Other errors are those of ``generate``.
            UnsupportedError: ``tool_choice`` needs a grammar, but the model's format of calls is not known, or
                ``structured_outputs`` are given as well.
        """
        options = Options(request_id=request_id, priority=priority, deadline=deadline, cache_salt=cache_salt, wait=wait)
        return await self._run(
            chat_job(self._check("chat"), messages, params, options, tools, tool_choice, reasoning, allow_special)
        )

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning: Reasoning | None = "none",
        allow_special: bool = False,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        wait: bool = True,
    ) -> AsyncStream:
        """Write the assistant's next turn and read it as it is made: deltas with ``reasoning``, ``text`` and whole ``tool_calls``.

        Arguments are those of ``chat``; use is that of ``stream``.

        Raises:
            InvalidRequestError: A message or a tool is malformed.
        """
        options = Options(request_id=request_id, priority=priority, deadline=deadline, cache_salt=cache_salt, wait=wait)
        job = chat_job(self._check("chat_stream"), messages, params, options, tools, tool_choice, reasoning, allow_special)
        return AsyncStream(self._session, self._bridge, partial(self._submit, job))

    async def score(
        self,
        prompt: Prompt,
        completion: Prompt,
        params: SamplingParams | None = None,
        *,
        top_logprobs: int = 0,
        replay: Replay | None = None,
    ) -> Logprobs:
        """Return the log-probabilities of a given completion's tokens, as decoding with ``params`` records them.

        With ``logprobs_mode="raw"``, and without ``params``, they are of the model's own distribution. With ``"processed"`` they
        are of the distribution that ``params`` sample from, after penalties, bias, masks, temperature and truncation; a token that
        could not have been sampled has -inf. With ``deterministic=True`` they equal those of decoding bit for bit.

        Args:
            prompt: The tokens before the completion, at least one; not scored.
            completion: Text or token ids. Text is encoded on its own, without regard to the prompt's last characters.
            params: Those that the completion was sampled with; fields that do not affect log-probabilities are ignored.
            top_logprobs: Also return that many best tokens at each position, and at least ``params.logprobs``.
            replay: Repeat the choices of a rollout: experts, selected KV entries, and tokens that could be sampled. The latter
                replace all settings that forbid or truncate tokens.

        Raises:
            InvalidRequestError: The prompt or the completion is empty or malformed, or both together are too long.
            UnsupportedError: ``params`` ask for processed values with ``structured_outputs``, and no ``replay`` has the tokens that
                could be sampled.
            RequestFailedError: The request failed or was aborted.
        """
        return _scores(await self._run(score_job(self._check("score"), prompt, completion, params, top_logprobs, replay)))

    async def score_batch(
        self,
        pairs: Iterable[tuple[Prompt, Prompt]] | AsyncIterable[tuple[Prompt, Prompt]],
        params: BatchParams = None,
        *,
        top_logprobs: int = 0,
        replays: Sequence[Replay | None] | None = None,
    ) -> list[Logprobs]:
        """Score many pairs of prompt and completion; see ``score``. The first failure is raised, and the rest is aborted.

        Args:
            pairs: Any iterable; see ``as_completed``.
            params: One for all pairs, or a sequence with one for each.
            top_logprobs: As in ``score``.
            replays: One for each pair.

        Returns:
            The log-probabilities of each pair, in order.
        """
        job = pair_job(top_logprobs, replays, pairs)
        async with self._completions("score_batch", pairs, params, job) as outputs:
            found = {output.index: _scores(output) async for output in outputs}
        return [found[index] for index in sorted(found)]

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Pause generation; new requests wait in the queue. Returns once no step runs, at once if the engine is paused already.

        Args:
            mode: ``"keep"``: open requests keep their state and continue after ``resume``; ``"wait"``: requests in the engine
                finish first; ``"abort"``: all open requests end now with their output so far.

        Raises:
            EngineStateError: The engine was resumed or closed before the pause was complete.
        """
        self._check("pause", *STARTED)
        pause = self._session.pause(mode)
        try:
            await self._bridge.wait(pause.done)
        except BaseException:  # a caller that was cancelled does not know that it should resume
            self._session.leave(pause)
            raise

    async def resume(self) -> None:
        """Resume after any number of ``pause`` calls; without effect if the engine is not paused.

        While ``paused`` blocks are open, the engine stays paused; it resumes when the last one is left.
        """
        self._check("resume", *STARTED)
        await self._bridge.wait(self._session.resume())

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "keep") -> AsyncIterator[None]:
        """Pause while a block runs. Blocks of several tasks may overlap: the engine resumes when the last one is left.

        If ``pause`` was called as well, the engine stays paused after the block.
        """
        self._check("pause", *STARTED)
        pause = self._session.pause(mode, block=True)
        try:
            await self._bridge.wait(pause.done)
            yield
        finally:
            self._session.leave(pause)

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes; running requests are not affected."""
        self._check("reset_prefix_cache", *STARTED)
        await self._bridge.wait(self._session.engine("reset_prefix_cache", *STARTED).reset_prefix_cache())

    def update_weights(
        self, version: int, *, mode: UpdateMode = "keep", partial: bool = False, staged: bool = True
    ) -> AsyncWeightUpdate:
        """Replace the weights of the running engine in one transaction: all of them or none.

            async with llm.update_weights(version=1) as update:
                await update.load(ModuleSource(policy))

        Tensors have official names or those of transformers' modules, and come in any order, over any number of ``load`` calls.
        Floats for a matrix that the model stores in FP8 or FP4 are quantized; a matrix that is quantized already comes with its
        scale. If the model's own drafter is in use, its tensors belong to the weights.

        Args:
            version: A number for the new weights: ``weight_version`` and ``weight_versions`` of outputs.
            mode: What happens to open requests when the weights are written. ``"keep"``: they continue with the KV they have;
                ``"recompute"``: they continue after their KV is computed again; ``"wait"``: they finish first; ``"abort"``: they
                end now.
            partial: Tensors that are not given keep their values; otherwise every tensor must be given.
            staged: Keep new tensors in host memory until the block is left: requests continue, and a failure changes nothing.
                If false, tensors are written as they arrive, requests are paused from the start, and a failure leaves the engine
                without valid weights (state ``weights_invalid``) until a full update.

        Raises:
            EngineStateError: On entering the block: an update is open, or the weights are asleep.
            WeightUpdateError: On leaving it: tensors are missing; nothing was published.
        """
        self._check("update_weights", *NOT_UPDATING)
        good = isinstance(version, int) and not isinstance(version, bool) and 0 <= version < 1 << 63
        require(good, "version", version, "must be an integer of at least 0, below 2**63")
        require(mode in ("keep", "wait", "abort", "recompute"), "mode", mode, "must be 'keep', 'wait', 'abort' or 'recompute'")
        for name, value in (("partial", partial), ("staged", staged)):
            require(isinstance(value, bool), name, value, "must be True or False")
        return AsyncWeightUpdate(self._session, self._bridge, Update(version=version, mode=mode, partial=partial, staged=staged))

    async def weight_checksums(self) -> dict[str, str]:
        """Return a checksum of every tensor by its official name: equal for equal numbers, whatever the layout of ranks.

        Raises:
            EngineStateError: The weights are asleep, or being replaced without staging; ``WeightsNotLoadedError``: there are none.
        """
        self._check("weight_checksums", *STARTED)
        return await self._ask(self._session.with_weights("weight_checksums", lambda engine: engine.weight_checksums()))

    async def apply(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Run ``function(model, rank, *arguments)`` on every rank between two steps; return the results in the order of ranks.

        The function gets the rank's part of the model, a ``torch.nn.Module``, under ``torch.inference_mode``. It cannot call the
        engine, except for ``abort``, ``stats``, ``memory`` and properties. After it has changed weights, call
        ``reset_prefix_cache``: cached prefixes are of the old ones. Ranks in other processes get the function and its arguments by
        pickle, and send results back in the same way, tensors on the CPU.

        Raises:
            InvalidRequestError: The function or an argument cannot be sent to other processes.
            EngineStateError: As ``weight_checksums``.
            Exception: What the function raises on a rank; every rank has run it by then.
        """
        require(callable(function), "function", function, "must be callable")
        self._check("apply", *STARTED)
        return await self._ask(self._session.with_weights("apply", lambda engine: engine.ask("apply", function, arguments)))

    async def warmup(self) -> None:
        """Capture all shapes of decode steps now, for example after ``wake_up``; else each is captured when it is first needed.

        The start does the same. Without effect on a CPU.

        Raises:
            EngineStateError: The engine is asleep, or has no valid weights.
        """
        self._check("warmup", *SERVING)
        await self._ask(self._session.engine("warmup", *SERVING).ask("capture"))

    async def execution_contract(self) -> ExecutionContract:
        """Return all that the bits of results depend on besides the tokens, for comparison with a trainer's contract.

        Raises:
            EngineStateError: As ``weight_checksums``.
        """
        self._check("execution_contract", *STARTED)
        return await self._ask(self._session.with_weights("execution_contract", lambda engine: engine.execution_contract()))

    async def sleep(self, level: Literal[1, 2] = 1, *, mode: PauseMode = "abort") -> None:
        """Give the memory of weights and KV cache back to the device, until ``wake_up``. Requests are refused meanwhile.

        Without effect on an engine that sleeps at this level or a higher one. If it fails, the engine is awake as before.

        Args:
            level: 1 keeps the weights in host memory; 2 drops them, so that an update must bring all of them after ``wake_up``.
            mode: What happens to open requests: ``"abort"`` ends them now, ``"wait"`` lets them finish first, and ``"keep"``
                continues them after ``wake_up``; the KV of their tokens is then computed again.

        Raises:
            EngineStateError: An update is open.
        """
        self._check("sleep", *NOT_UPDATING)
        require(level in (1, 2) and not isinstance(level, bool), "level", level, "must be 1 or 2")
        require_pause_mode(mode)
        if self._session.sleeps(level):  # a pause would end the requests that an earlier call keeps
            return await self._bridge.wait(self._session.sleep(level))
        pause = self._session.pause(mode, block=True)
        try:
            await self._bridge.wait(pause.done)
            await self._bridge.wait(self._session.sleep(level))
        finally:
            self._session.leave(pause)

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Allocate what ``sleep`` gave back, and restore weights that are in host memory. What is awake stays as it is.

        After a sleep of level 2 the weights have to be updated before the engine serves (state ``weights_invalid``).

        Args:
            tags: ``"weights"``, ``"kv_cache"`` or both; default is both.

        Raises:
            EngineStateError: An update is open.
            CapacityError: There is too little memory; the engine sleeps as before.
        """
        self._check("wake_up", *NOT_UPDATING)
        wanted = MEMORY_TAGS if tags is None else tags
        good = not isinstance(wanted, str) and isinstance(wanted, Sequence) and all(tag in MEMORY_TAGS for tag in wanted)
        require(good, "tags", tags, f"must be a sequence of {' and '.join(map(repr, MEMORY_TAGS))}, or None")
        await self._bridge.wait(self._session.wake_up(wanted))

    async def dump_step(self, path: str | os.PathLike[str]) -> None:
        """Save the next step as ``path``, for ``python -m dsv4lite replay``; returns before that step has run.

        Raises:
            ConfigError: There is no such folder, it cannot be written to, or ``path`` is there and is no regular file.
            UnsupportedError: The engine has several ranks, or its model is in another process.
        """
        self._check("dump_step")
        file = None if file_name(path) else Path(path).absolute()
        try:
            free = file is not None and (file.is_file() or not file.exists())  # a device or a pipe would be replaced
            good = file is not None and free and file.parent.is_dir() and os.access(file.parent, os.W_OK)
        except OSError:  # the name is too long, or a folder above may not be searched
            good = False
        if file is None or not good:
            raise ConfigError(f"path={shown(path)} must be a file in a folder that exists and can be written to")
        await self._bridge.wait(self._session.engine("dump_step").dump_step(file))

    # ---- inside ----

    async def _start(self) -> None:
        bridge = current_loop()
        self._session.begin_start(bridge)
        self._bridge = bridge
        try:
            await anyio.to_thread.run_sync(self._session.start, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        except BaseException:
            # After a cancellation the thread runs on; at its next report it finds the session closed and frees the engine.
            if self._session.phase is not Phase.FAILED:
                await self.aclose()
            raise


class LLM(BaseLLM):
    """DeepSeek models in the host's own process, for plain synchronous code.

        with LLM("deepseek-ai/DeepSeek-V4-Flash") as llm:
            for output in llm.as_completed(prompts, SamplingParams(max_tokens=200)):
                print(output.index, output.text)

    The calls of ``AsyncLLM`` without ``async`` and ``await``: same parameters, results and errors. May be used from several threads
    at once, and in a thread that runs an event loop, which it blocks while it waits. ``KeyboardInterrupt`` in a call ends its
    request.
    """

    _sources = (Iterable,)

    @classmethod
    def create(cls, model: Model, **settings: Unpack[EngineSettings]) -> Self:
        """Make and start an engine; call ``close`` when done. See ``AsyncLLM.create``."""
        llm = cls(model, **settings)
        llm._start()
        return llm

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End open requests with what they have (``finish_reason="abort"``) and free everything. May be repeated.

        Raises:
            EngineStateError: A callback of the engine, such as ``progress``, made the call.
        """
        self._session.close()

    generate = blocking(AsyncLLM.generate, finish)
    generate_batch = blocking(AsyncLLM.generate_batch, finish)
    generate_file = blocking(AsyncLLM.generate_file, finish)
    as_completed = blocking(AsyncLLM.as_completed, Completions)
    stream = blocking(AsyncLLM.stream, Stream)
    chat = blocking(AsyncLLM.chat, finish)
    chat_stream = blocking(AsyncLLM.chat_stream, Stream)
    score = blocking(AsyncLLM.score, finish)
    score_batch = blocking(AsyncLLM.score_batch, finish)
    pause = blocking(AsyncLLM.pause, finish)
    resume = blocking(AsyncLLM.resume, finish)
    paused = blocking(AsyncLLM.paused, Block)
    reset_prefix_cache = blocking(AsyncLLM.reset_prefix_cache, finish)
    update_weights = blocking(AsyncLLM.update_weights, WeightUpdate)
    weight_checksums = blocking(AsyncLLM.weight_checksums, finish)
    apply = blocking(AsyncLLM.apply, finish)
    warmup = blocking(AsyncLLM.warmup, finish)
    execution_contract = blocking(AsyncLLM.execution_contract, finish)
    sleep = blocking(AsyncLLM.sleep, finish)
    wake_up = blocking(AsyncLLM.wake_up, finish)
    dump_step = blocking(AsyncLLM.dump_step, finish)

    # ---- inside ----

    def _start(self) -> None:
        bridge = ThreadBridge("dsv4lite-delivery")
        try:
            self._session.begin_start(bridge)
            self._bridge = bridge
            self._session.start()
        except BaseException:
            bridge.close()
            raise
