"""The public API: ``AsyncLLM`` for event loops, ``LLM`` for synchronous code. Text in, text out.

``AsyncLLM`` describes every call once. Its waits go through a bridge to the host's own loop, asyncio or Trio; ``LLM`` runs the
same calls with a bridge whose waits block the thread. Nothing is held open between calls: no task group, no cancel scope, no
hidden event loop.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, Unpack

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
from dsv4lite.api.session import NOT_UPDATING, STARTED, PauseMode, Update, UpdateMode, require_pause_mode
from dsv4lite.api.streams import AsyncCompletions, AsyncStream
from dsv4lite.api.update import AsyncWeightUpdate
from dsv4lite.checks import file_name, require
from dsv4lite.config import EngineSettings
from dsv4lite.errors import ConfigError, RequestFailedError, shown
from dsv4lite.request import MEMORY_TAGS, Logprobs, MemoryTag, Phase, Prompt, Replay, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from dsv4lite.engine.contract import ExecutionContract


def _scores(output: RequestOutput) -> Logprobs:
    """Return the log-probabilities of a scored completion; one that was aborted has too few."""
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

    An ``AsyncLLM`` belongs to the event loop in which it was started. Cancelling a call ends its request within one engine step and
    lets the cancellation pass; leaving the block ends every open request and frees everything. Only ``abort`` and what does not
    wait may be used from other threads, and ``aclose`` from another loop.

    States: ``new``, ``starting``, ``ready``, ``paused``, ``updating``, ``asleep``, ``weights_invalid``, ``failed``, ``closed``.
    Unless said otherwise a method is allowed while the engine is ready, paused or updating; else it raises ``EngineStateError``, or
    ``EngineDeadError`` with the cause if the engine failed.
    """

    _sources = (Iterable, AsyncIterable)

    @classmethod
    async def create(cls, model: Model, **settings: Unpack[EngineSettings]) -> Self:
        """Make and start an engine, for frameworks that cannot nest blocks; ``aclose`` it in the end.

        Args:
            model: Folder of a checkpoint, a hub id, or a whole ``EngineConfig``.
            **settings: Fields of ``EngineConfig``.

        Raises:
            ConfigError, CheckpointError, CapacityError: The engine cannot be made or loaded; nothing is left behind.
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

        Returns or raises once that is done: a cancellation, ``task.cancel()`` any number of times included, waits for it.

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
                except anyio.get_cancelled_exc_class() as error:  # by asyncio itself, which knows no shields
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
            params: How; ``None`` means the checkpoint's ``generation_config.json``.
            request_id: A name for ``abort``, unique among open requests; default is a new one.
            priority: Smaller runs earlier; equal ones run in order of arrival.
            deadline: Seconds from now after which the request ends with what it has, ``finish_reason="deadline"``.
            cache_salt: Share cached prefixes only with requests of the same salt.
            wait: When the queue is full, wait for a place in order of arrival instead of raising ``QueueFullError``.

        Returns:
            All ``params.n`` completions. While the engine is paused the request queues.

        Raises:
            InvalidRequestError: A parameter is wrong; ``ContextLengthError`` if prompt and completion do not fit.
            QueueFullError: With ``wait=False``; ``retry_after`` estimates when to try again.
            RequestFailedError: This request failed; ``output`` has what there was.
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
            prompts: Any iterable of any length, of prompts or of ``Row``, whose metadata comes back on its output. It is pulled
                only as far as ``max_in_flight`` allows, when an output is asked for. ``AsyncLLM`` also takes an asynchronous one
                and pulls it in a task of its own, so that it may wait for what the consumer does with the outputs.
            params: One for all prompts, or a sequence with one for each.
            on_error: ``"raise"`` ends the iteration with the first prompt that fails; ``"return"`` hands out its output with
                ``error`` set, and goes on. An exception of ``prompts`` itself, or the end of the engine, is raised in either case.
            max_in_flight: Most prompts that were pulled and whose outputs were not yet handed out; default ``2 * max_num_seqs``.
            priority: As in ``generate``.
            deadline: Seconds from the moment a prompt is pulled.
            cache_salt: As in ``generate``.
            progress: Show a bar (tqdm, the extra ``progress``), also in notebooks.

        Returns:
            An iterator; ``index`` of an output is the prompt's position. Leaving the loop early aborts what is in flight as soon as
            the iterator is dropped; ``async with`` around it, or ``aclose``, does so at a definite point.
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
        """Run the requests in the lines of a file, and write a line for each as it ends; continue what an earlier run has begun.

        A line is a prompt (a JSON string), an object with ``prompt``, ``prompt_token_ids`` or ``messages`` beside fields of
        ``SamplingParams``, or a line of OpenAI's batch format; ``custom_id`` comes back. Outputs are in OpenAI's batch format, in
        the order in which they end, each with ``"id": "row-N"`` for line N of ``source``, counted from 0. Rows that have a line in
        ``target`` are passed over, so that a run that was ended, even by a kill, goes on with the same call.

        Args:
            source: The file of requests; read line by line.
            target: The file of outputs.
            params: What rows do not set themselves; ``None`` means the checkpoint's ``generation_config.json``.
            max_in_flight: Most rows that are held at a time; default ``2 * max_num_seqs``.
            progress: ``True`` shows a bar of the rows that are left, as in ``as_completed``; a callable gets a report after each
                row.

        Returns:
            How many rows were done. A row that is malformed or fails has its ``error`` in the file and is counted in ``failed``.

        Raises:
            ConfigError: ``target`` holds something else than outputs of these requests, or is being written by another run.
            OSError: A file cannot be read or written. What is in ``target`` stays.
        """
        with RowFiles(source, target, params) as files:
            bar = False if callable(progress) else progress
            async with self._completions("generate_file", files, None, files.job, "return", max_in_flight, bar) as outputs:
                async for output in outputs:
                    files.write(output)
                    if callable(progress):
                        progress(files.report())
            return files.report()

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

        Arguments and errors are those of ``generate``; what is wrong with the request is raised on entering the block.
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
        reasoning: Reasoning = "none",
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
            reasoning: How hard to think before the answer; ``"none"`` is not to. V3 never thinks, R1 always.
            allow_special: Let control tokens that are written in messages and tools, such as ``<｜User｜>``, act as such. By
                default they are text, and a tool's result cannot close its own tag.
            request_id, priority, deadline, cache_salt, wait: As in ``generate``.

        Returns:
            An output whose ``text`` is the answer, with ``reasoning`` and ``tool_calls`` apart.

        Raises:
            InvalidRequestError: A message, a tool or a parameter is malformed. Other errors are those of ``generate``.
            UnsupportedError: ``tool_choice`` needs a grammar, and the model's form of calls is not known or ``structured_outputs``
                are given, too.
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
        reasoning: Reasoning = "none",
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
        are of the one that ``params`` sample from: penalties, bias, masks, temperature and truncation included; a token that could
        not have been sampled has -inf. With ``deterministic=True`` they equal those of decoding bit for bit.

        Args:
            prompt: What comes before; not scored, at least one token.
            completion: Text or token ids. Text is encoded on its own, without regard to the prompt's last characters.
            params: Those that the completion was sampled with; what does not concern log-probabilities is ignored.
            top_logprobs: Also return that many best tokens at each position, and at least ``params.logprobs``.
            replay: Make the choices of a rollout again: experts, entries that are attended to, and tokens that could be sampled,
                which then stand for all settings that forbid or truncate.

        Raises:
            InvalidRequestError: One of the two is empty or malformed, or they do not fit.
            UnsupportedError: ``params`` want processed values under ``structured_outputs``.
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
        """Score many pairs of prompt and completion; see ``score``. The first that fails is raised, and the rest aborted.

        Args:
            pairs: Any iterable; see ``as_completed``.
            params: One for all pairs, or a sequence with one for each.
            top_logprobs: As in ``score``.
            replays: One for each pair.

        Returns:
            One for each pair, in order.
        """
        job = pair_job(top_logprobs, replays, pairs)
        async with self._completions("score_batch", pairs, params, job) as outputs:
            found = {output.index: _scores(output) async for output in outputs}
        return [found[index] for index in sorted(found)]

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating; requests that come meanwhile queue. Returns once the engine stands still, at once if it does already.

        Args:
            mode: ``"keep"``: open requests keep their state and go on after ``resume``; ``"wait"``: those that the engine has come
                to their end first; ``"abort"``: all open requests end now with what they have.

        Raises:
            EngineStateError: The engine was resumed or closed before it stood still.
        """
        self._check("pause", *STARTED)
        pause = self._session.pause(mode)
        try:
            await self._bridge.wait(pause.done)
        except BaseException:  # the caller is cancelled, and will not know that it should resume
            self._session.leave(pause)
            raise

    async def resume(self) -> None:
        """Go on after ``pause``, however often it was called; without effect if the engine is not paused.

        While there are ``paused`` blocks the engine stands still; it goes on when the last one is left.
        """
        self._check("resume", *STARTED)
        await self._bridge.wait(self._session.resume())

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "keep") -> AsyncIterator[None]:
        """Pause for the length of a block, however it is left. Blocks of several tasks may overlap: the last to be left resumes.

        An engine that ``pause`` has stopped stays so after the block.
        """
        self._check("pause", *STARTED)
        pause = self._session.pause(mode, block=True)
        try:
            await self._bridge.wait(pause.done)
            yield
        finally:
            self._session.leave(pause)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests are not affected."""
        self._check("reset_prefix_cache", *STARTED)
        await self._bridge.wait(self._session.engine("reset_prefix_cache", *STARTED).reset_prefix_cache())

    def update_weights(
        self, version: int, *, mode: UpdateMode = "keep", partial: bool = False, staged: bool = True
    ) -> AsyncWeightUpdate:
        """Replace the weights while the engine lives, all of them or none.

            async with llm.update_weights(version=1) as update:
                await update.load(ModuleSource(policy))

        Tensors come under official names or those of transformers' modules, in any order, over any number of ``load`` calls.
        Floats for a matrix that the model stores in FP8 or FP4 are quantized; a matrix that is quantized already comes with its
        scale. The drafter's tensors belong to the model's, if it drafts.

        Args:
            version: A number for the new weights: ``weight_version`` and ``weight_versions`` of outputs.
            mode: What becomes of open requests when the weights are written. ``"keep"``: they go on with the KV they have;
                ``"recompute"``: they go on, and compute their KV again; ``"wait"``: they end first; ``"abort"``: they end now.
            partial: Tensors that do not come stay as they are; otherwise each must come.
            staged: Keep new tensors in host memory until the block is left, so that requests go on and a failure changes nothing.
                Without, they are written as they come, requests stand still from the start, and a failure leaves the engine
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
        return AsyncWeightUpdate(self._session, self._bridge, version, Update(mode=mode, partial=partial, staged=staged))

    async def weight_checksums(self) -> dict[str, str]:
        """Return a checksum of every tensor by its official name: equal for equal numbers, whatever the layout of ranks.

        Raises:
            EngineStateError: The weights are asleep, or being replaced without staging; ``WeightsNotLoadedError``: there are none.
        """
        self._check("weight_checksums", *STARTED)
        return await self._bridge.wait(self._session.weight_checksums())

    async def execution_contract(self) -> ExecutionContract:
        """Return what the bits of results depend on besides their tokens, to be compared with another side's.

        Raises:
            EngineStateError: As ``weight_checksums``.
        """
        self._check("execution_contract", *STARTED)
        return await self._bridge.wait(self._session.execution_contract())

    async def sleep(self, level: Literal[1, 2] = 1, *, mode: PauseMode = "abort") -> None:
        """Give the memory of weights and KV cache back to the device, until ``wake_up``. Requests are refused meanwhile.

        Without effect on an engine that sleeps at this level or a higher one. If it fails, the engine is awake as before.

        Args:
            level: 1 keeps the weights in host memory; 2 drops them: after it an update has to bring all of them.
            mode: What becomes of open requests: ``"abort"`` ends them now, ``"wait"`` lets them end first, and ``"keep"`` lets
                them go on after ``wake_up``, from their tokens, whose KV is then computed again.

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
        """Have the next step saved as ``path``, for ``python -m dsv4lite replay``; returns before that step has run.

        Raises:
            ConfigError: There is no such folder, or it cannot be written to.
        """
        self._check("dump_step")
        file = None if file_name(path) else Path(path).absolute()
        if file is None or not file.parent.is_dir() or file.is_dir() or not os.access(file.parent, os.W_OK):
            raise ConfigError(f"path={shown(path)} must be a file in a folder that exists and can be written to")
        await self._bridge.wait(self._session.engine("dump_step").dump_step(file))

    # ---- inside ----

    async def _start(self) -> None:
        bridge = current_loop()
        self._session.begin_start(bridge)
        self._bridge = bridge
        try:
            await anyio.to_thread.run_sync(self._session.start, limiter=anyio.CapacityLimiter(1))
        except BaseException:
            # A task of asyncio can be cancelled while the thread goes on; it then finds the session closed and cleans up.
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
        """Make and start an engine; ``close`` it in the end. See ``AsyncLLM.create``."""
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
