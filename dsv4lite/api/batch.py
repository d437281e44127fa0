"""Many prompts with a bounded number of them in flight: the state of one ``as_completed``."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Literal

import anyio

from dsv4lite.api.bridge import Bridge, LoopBridge
from dsv4lite.api.session import STARTED, Session, Ticket
from dsv4lite.checks import is_integer, require
from dsv4lite.errors import DSV4LiteError, EngineDeadError, EngineStateError, shown
from dsv4lite.request import Prompt, RequestOutput, Row

OnError = Literal["raise", "return"]
BatchRow = Prompt | Row
Submit = Callable[[int, BatchRow], Awaitable[Ticket]]
"""Encodes, checks and submits a prompt, given its position in the batch; keeps the ``AsyncLLM`` or ``LLM`` alive."""


class Batch:
    """Pulls prompts, submits them while there is room, and keeps the outputs that were not taken yet.

    The error of a row is raised at the next ``take`` or returned in its place, as ``on_error`` says. An error that ends the whole
    batch (the source of prompts raises, the engine dies or is closed) is always raised: at once with ``on_error="raise"``, else
    after the outputs of what was in flight.
    """

    def __init__(
        self,
        session: Session,
        bridge: Bridge,
        rows: Iterable[BatchRow] | AsyncIterable[BatchRow],
        on_error: OnError,
        max_in_flight: int | None,
    ) -> None:
        """Start empty; see ``AsyncLLM.as_completed``.

        Raises:
            InvalidRequestError: ``on_error`` or ``max_in_flight`` is wrong.
        """
        require(on_error in ("raise", "return"), "on_error", on_error, "must be 'raise' or 'return'")
        limit = 2 * session.config.max_num_seqs if max_in_flight is None else max_in_flight
        require(is_integer(limit) and limit >= 1, "max_in_flight", limit, "must be an integer of at least 1, or None")
        self._session = session
        self._bridge = bridge
        self._rows = aiter(rows) if isinstance(rows, AsyncIterable) else iter(rows)
        self._on_error = on_error
        self._limit = limit
        self._signal = bridge.signal()
        self._indices = itertools.count()
        self._pulled: tuple[int, BatchRow] | None = None  # a row that was pulled and not submitted yet
        self._filling = False  # a reader is submitting rows
        self._pulling: anyio.CancelScope | None = None  # of the task that pulls an asynchronous source
        self._open: set[Ticket] = set()
        self._ready: deque[RequestOutput] = deque()
        self._failure: BaseException | None = None
        self._exhausted = False
        self._closed = False

    async def take(self, submit: Submit) -> RequestOutput:
        """Submit as many prompts as there is room for, and return the next output.

        Raises:
            StopAsyncIteration: All outputs were taken.
            Exception: Of a row or of the whole batch; see the class.
        """
        while True:
            self._session.require_here("as_completed")
            await self._fill(submit)
            if self._failure is not None and (self._on_error == "raise" or not (self._open or self._ready)):
                failure = self._failure
                self.close()
                raise failure
            if self._ready:
                break
            if self._finished:
                raise StopAsyncIteration
            if not self._open:  # waiting for the source, which does not notice the engine's end
                self._session.require("as_completed", *STARTED)
            await self._signal.wait()
        output = self._ready.popleft()
        if output.error is not None and self._on_error == "raise":
            self.close()
            raise output.error
        self._signal()
        return output

    def close(self) -> None:
        """Pull no more rows, abort those in flight and drop outputs that were not taken. May be repeated."""
        self._closed = True
        self._failure = None
        for ticket in list(self._open):
            self._session.abort_ticket(ticket)
        self._ready.clear()
        if self._pulling is not None:
            assert isinstance(self._bridge, LoopBridge)
            self._bridge.run(self._pulling.cancel)
        self._exhaust()

    def drop(self) -> None:
        """Close from a finalizer, which may run in any thread and interrupt any code, and so must not take a lock."""
        if not self._finished and not self._session.forked:
            self._bridge.post(self.close)

    @property
    def _has_room(self) -> bool:
        return not self._exhausted and len(self._open) + len(self._ready) < self._limit

    @property
    def _finished(self) -> bool:
        return self._exhausted and not self._open and not self._ready and self._failure is None

    async def _fill(self, submit: Submit) -> None:
        """Submit as many rows as there is room for; for an asynchronous source, start the task that does so."""
        if isinstance(self._rows, AsyncIterator):
            if self._pulling is None and not self._closed:
                assert isinstance(self._bridge, LoopBridge)
                self._pulling = anyio.CancelScope()
                self._session.wake_at_end(self._signal)
                self._bridge.spawn(partial(self._pull, self._rows, submit, self._pulling))
            return
        while self._has_room and not self._filling:
            self._filling = True
            try:
                self._pulled = self._pulled or (next(self._indices), next(self._rows))
                await self._start(submit, *self._pulled)
                self._pulled = None
            except StopIteration:
                self._exhaust()
            except Exception as error:
                self._fail(error)
            except BaseException:
                self._signal()  # a cancelled read leaves the row to the next reader
                raise
            finally:
                self._filling = False

    async def _pull(self, rows: AsyncIterator[BatchRow], submit: Submit, scope: anyio.CancelScope) -> None:
        """Submit the rows of an asynchronous source, which may wait for anything, even until the consumer has taken an output."""
        with scope:
            try:
                for index in self._indices:
                    while not self._has_room:
                        await self._signal.wait()
                    await self._start(submit, index, await anext(rows))
            except StopAsyncIteration:
                self._exhaust()
            except (anyio.get_cancelled_exc_class(), GeneratorExit) as error:  # of this task, or of what the source waited for
                self._fail(error)
                raise
            except BaseException as error:
                self._fail(error)
        if isinstance(rows, AsyncGenerator):
            with anyio.CancelScope(shield=True):
                try:
                    await rows.aclose()
                except Exception as error:
                    self._fail(error)

    async def _start(self, submit: Submit, index: int, prompt: BatchRow) -> None:
        """Submit a row. An error of the row becomes its output."""
        try:
            ticket = await submit(index, prompt)
        except (EngineStateError, EngineDeadError) as error:
            self._fail(error)
        except DSV4LiteError as error:
            _note_row(error, index, prompt)
            metadata = prompt.metadata if isinstance(prompt, Row) else None
            self._ready.append(
                RequestOutput(request_id="", prompt_token_ids=(), outputs=(), index=index, error=error, metadata=metadata)
            )
            self._signal()
        else:
            self._open.add(ticket)
            ticket.future.add_done_callback(partial(self._complete, ticket, index, prompt))
            if self._closed:  # while the row was being prepared
                self._session.abort_ticket(ticket)

    def _exhaust(self) -> None:
        """Pull no more rows."""
        self._exhausted = True
        self._signal()

    def _fail(self, error: BaseException) -> None:
        """Pull no more rows, and raise ``error`` from ``take``."""
        if not self._closed:
            # ``take`` raises it, and a StopAsyncIteration would end the iteration.
            self._failure = RuntimeError(f"the source raised {error!r}") if isinstance(error, StopAsyncIteration) else error
        self._exhaust()

    def _complete(self, ticket: Ticket, index: int, prompt: BatchRow, future: Future[RequestOutput]) -> None:
        if not self._closed:
            output = future.result()
            if output.error is not None:
                _note_row(output.error, index, prompt)
            if isinstance(prompt, Row):
                output = replace(output, metadata=prompt.metadata)
            self._ready.append(output)  # before it leaves ``_open``, so that it is always in one of the two
        self._open.discard(ticket)
        self._signal()


def _note_row(error: BaseException, index: int, prompt: BatchRow) -> None:
    """Let a traceback say which row has failed."""
    error.add_note(f"row {index} of the batch: {shown(prompt)}")
