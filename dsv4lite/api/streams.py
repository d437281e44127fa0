"""Iterators: the deltas of one request and the outputs of many prompts. ``blocking`` has them for ``LLM``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

from dsv4lite.api.batch import Batch, Submit
from dsv4lite.api.bridge import Bridge, Callback
from dsv4lite.api.session import Session, Ticket
from dsv4lite.request import Delta, RequestOutput


class AsyncStream:
    """One request whose output is read as it is made; made by ``AsyncLLM.stream`` and ``AsyncLLM.chat_stream``.

    Entering the block submits the request, leaving it ends the request. In between, iteration yields ``Delta`` objects: only what
    is new, in order, for all ``n`` completions. A slow reader loses nothing, nor does a cancelled read: the next one continues.
    """

    def __init__(self, session: Session, bridge: Bridge, submit: Callable[[Callback], Awaitable[Ticket]]) -> None:
        """``submit`` keeps the ``AsyncLLM`` or ``LLM`` alive."""
        self._session = session
        self._bridge = bridge
        self._submit = submit
        self._signal = bridge.signal()
        self._ticket: Ticket | None = None
        self._entered = False

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a stream can be entered only once")
        self._entered = True  # another task may enter while this one waits
        self._ticket = await self._submit(self._signal)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        ticket = self._opened()
        while True:
            done = ticket.done  # asked first: the last delta may arrive between these lines
            if ticket.deltas:
                return ticket.deltas.popleft()
            if done:
                ticket.result()
                raise StopAsyncIteration
            self._session.require_here("stream")
            await self._signal.wait()

    async def final(self) -> RequestOutput:
        """Wait for the end of the request and return all of it, whether or not the deltas were read.

        Raises:
            RequestFailedError, EngineDeadError: The request failed.
        """
        ticket = self._opened()
        if not ticket.done:
            self._session.require_here("final")
        await self._bridge.wait(ticket.future)
        return ticket.result()

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._opened().request_id

    def abort(self) -> None:
        """End the request now: what came so far can still be read, the last delta has ``finish_reason="abort"``. Idempotent.

        Routed experts and a replay come with the engine's last update and are lost; ``AsyncLLM.abort`` waits for that update.
        """
        self._session.abort_ticket(self._opened())

    def _opened(self) -> Ticket:
        if self._ticket is None:
            raise RuntimeError("the stream is not open: enter it with `async with` (AsyncLLM) or `with` (LLM)")
        return self._ticket

    def __del__(self) -> None:
        if self._ticket is not None:
            self._session.drop_ticket(self._ticket)


class AsyncCompletions(AsyncIterator[RequestOutput]):
    """The outputs of many prompts as they finish; made by ``AsyncLLM.as_completed``."""

    def __init__(self, batch: Batch, submit: Submit, bar: Any = None) -> None:
        """``bar`` is one of tqdm's, and counts outputs and their tokens."""
        self._batch = batch
        self._submit = submit
        self._bar = bar
        self._tokens = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._bar is None:
            return await self._batch.take(self._submit)
        try:
            output = await self._batch.take(self._submit)
        except Exception:
            self._bar.close()
            raise
        self._tokens += output.usage.completion_tokens
        self._bar.set_postfix(tokens=self._tokens, refresh=False)
        self._bar.update()
        return output

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is in flight and pull no more."""
        self._batch.close()
        if self._bar is not None:
            self._bar.close()

    def __del__(self) -> None:
        self._batch.drop()
