"""Iterators: the deltas of one request and the outputs of many prompts. ``blocking`` has them for ``LLM``."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Protocol, Self

import anyio

from dsv4lite.api.batch import Batch
from dsv4lite.api.bridge import Bridge, LoopBridge, Signal
from dsv4lite.api.prepare import Job
from dsv4lite.api.session import Session, Ticket
from dsv4lite.request import Delta, Prompt, RequestOutput


class MakeJob(Protocol):
    """Makes the job of a prompt, given its position in the batch."""

    def __call__(self, index: int, prompt: Prompt) -> Job: ...


def value_of(output: RequestOutput) -> RequestOutput:
    """Return an output, or raise why there is none."""
    if output.error is not None:
        raise output.error
    return output


class Submit(Protocol):
    """Encodes, checks and submits a job. It belongs to the ``AsyncLLM`` or ``LLM``, which lives as long as what can submit."""

    async def __call__(self, job: Job, *, streaming: bool = False, wake: Callable[[], None] = lambda: None) -> Ticket: ...


class AsyncStream:
    """One request whose output is read as it is made; made by ``AsyncLLM.stream`` and ``AsyncLLM.chat_stream``.

    Entering the block submits the request, leaving it ends the request. In between, iteration yields ``Delta`` objects: only what
    is new, in order, for all ``n`` completions. A slow reader loses nothing, nor does a cancelled read: the next one continues.
    """

    def __init__(self, session: Session, bridge: Bridge, submit: Submit, job: Job) -> None:
        self._session = session
        self._bridge = bridge
        self._submit = submit
        self._job = job
        self._signal = bridge.signal()
        self._ticket: Ticket | None = None

    async def __aenter__(self) -> Self:
        if self._ticket is not None:
            raise RuntimeError("a stream can be entered only once")
        self._ticket = await self._submit(self._job, streaming=True, wake=self._signal)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while True:
            delta, more = self._take()
            if delta is not None:
                return delta
            if not more:
                raise StopAsyncIteration
            await self._signal.wait()

    async def final(self) -> RequestOutput:
        """Wait for the end of the request and return all of it, whether or not the deltas were read.

        Raises:
            RequestFailedError, EngineDeadError: The request failed.
        """
        future = self._opened().future
        if not future.done():
            self._session.require_process("final")
        return value_of(await self._bridge.wait(future))

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._opened().request_id

    def abort(self) -> None:
        """End the request now: what came so far can still be read, the last delta has ``finish_reason="abort"``. Idempotent."""
        self._session.abort_ticket(self._opened())

    def _opened(self) -> Ticket:
        if self._ticket is None:
            raise RuntimeError("the stream is not open: enter it with `async with` (AsyncLLM) or `with` (LLM)")
        return self._ticket

    def _take(self) -> tuple[Delta | None, bool]:
        """Return the next delta if there is one, and whether there may be another.

        Raises:
            RequestFailedError, EngineDeadError: All deltas were read and the request failed.
        """
        ticket = self._opened()
        done = ticket.done  # asked first: the last delta may arrive between these lines
        if ticket.deltas:
            return ticket.deltas.popleft(), True
        if done:
            value_of(ticket.future.result())
        else:
            self._session.require_process("stream")
        return None, not done

    def __del__(self) -> None:
        if self._ticket is not None:
            self._session.drop_ticket(self._ticket)


class AsyncCompletions(AsyncIterator[RequestOutput]):
    """The outputs of many prompts as they finish; made by ``AsyncLLM.as_completed``."""

    def __init__(
        self,
        batch: Batch,
        signal: Signal,
        bridge: Bridge,
        submit: Submit,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        make_job: MakeJob,
    ) -> None:
        self._batch = batch
        self._signal = signal
        self._bridge = bridge
        self._source: _AsyncSource | _SyncSource
        if isinstance(prompts, AsyncIterable):
            assert isinstance(bridge, LoopBridge)
            self._source = _AsyncSource(self._batch, self._signal, bridge, submit, prompts, make_job)
        else:
            self._source = _SyncSource(self._batch, submit, prompts, make_job)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            await self._source.fill()
            output = self._batch.take()
            if output is not None:
                return output
            if self._batch.finished:
                raise StopAsyncIteration
            await self._signal.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is in flight and pull no more."""
        self._batch.close()

    def __del__(self) -> None:
        _close_later(self._bridge, self._batch)


class _SyncSource:
    """Prompts that are pulled whenever an output is asked for."""

    def __init__(self, batch: Batch, submit: Submit, prompts: Iterable[Prompt], make_job: MakeJob) -> None:
        self._batch = batch
        self._submit = submit
        self._rows = iter(prompts)
        self._make_job = make_job

    async def fill(self) -> None:
        """Submit as many prompts as there is room for."""
        while (row := self._batch.pull(self._rows)) is not None:
            with self._batch.row(row[0]):
                self._batch.add(await self._submit(self._make_job(*row)))


class _AsyncSource:
    """Prompts that are pulled by a task of their own, which ends with the batch.

    The source may wait for as long as it likes, even for what the consumer does with an output: outputs are handed out meanwhile.
    """

    def __init__(
        self, batch: Batch, signal: Signal, bridge: LoopBridge, submit: Submit, prompts: AsyncIterable[Prompt], make_job: MakeJob
    ) -> None:
        self._batch = batch
        self._signal = signal
        self._bridge = bridge
        self._submit = submit
        self._rows = aiter(prompts)
        self._make_job = make_job
        self._started = False

    async def fill(self) -> None:
        """Start the task."""
        if not self._started and not self._batch.closed:
            self._started = True
            self._bridge.spawn(self._run)

    async def _run(self) -> None:
        with anyio.CancelScope() as scope:
            self._batch.when_closed(lambda: self._bridge.run(scope.cancel))
            try:
                await self._pull()
            except Exception as error:
                self._batch.fail(error)
        if isinstance(self._rows, AsyncGenerator):
            with anyio.CancelScope(shield=True):
                try:
                    await self._rows.aclose()
                except Exception as error:
                    self._batch.fail(error)

    async def _pull(self) -> None:
        for index in itertools.count():
            while not self._batch.has_room:
                await self._signal.wait()
            try:
                prompt = await anext(self._rows)
            except StopAsyncIteration:
                self._batch.exhaust()
                return
            with self._batch.row(index):
                self._batch.add(await self._submit(self._make_job(index, prompt)))


def _close_later(bridge: Bridge, batch: Batch) -> None:
    """Close a batch from a finalizer, which may run in any thread and inside of anything, so that it must not take a lock."""
    if not batch.finished and not batch.forked:
        bridge.post(batch.close)
