"""Many prompts with a bounded number of them in flight: the state of one ``as_completed``."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Literal

from dsv4lite.api.session import Session, Ticket
from dsv4lite.errors import DSV4LiteError, EngineDeadError, EngineStateError, InvalidRequestError
from dsv4lite.request import Prompt, RequestOutput

OnError = Literal["raise", "return"]


class Batch:
    """The requests of one batch that are in flight, and the outputs that were not taken yet.

    The error of a row is raised at the next ``take`` or returned in its place, as ``on_error`` says. An error that ends the whole
    batch (the source of prompts raises, the engine dies or is closed) is always raised: at once with ``on_error="raise"``, else
    after the outputs of what was in flight.
    """

    def __init__(self, session: Session, on_error: OnError, max_in_flight: int | None, changed: Callable[[], None]) -> None:
        """Start empty.

        Args:
            session: Of the engine.
            on_error: See the class.
            max_in_flight: Most rows between being pulled from the source and taken; default is twice ``max_num_seqs``.
            changed: Called in any thread when there is something to take, or room; must not block.

        Raises:
            InvalidRequestError: An argument is wrong.
        """
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error={on_error!r} must be 'raise' or 'return'", parameter="on_error", value=on_error)
        limit = 2 * session.config.max_num_seqs if max_in_flight is None else max_in_flight
        if not isinstance(limit, int) or limit < 1:
            message = f"max_in_flight={limit!r} must be an integer of at least 1, or None"
            raise InvalidRequestError(message, parameter="max_in_flight", value=limit)
        self.closed = False
        self._exhausted = False
        self._on_close: list[Callable[[], None]] = []
        self._session = session
        self._on_error = on_error
        self._limit = limit
        self._changed = changed
        self._open: set[Ticket] = set()
        self._ready: deque[RequestOutput] = deque()
        self._failure: Exception | None = None
        self._indices = itertools.count()
        self._pulled: tuple[int, Prompt] | None = None  # a row that was pulled and not submitted yet

    @property
    def has_room(self) -> bool:
        """Whether another row may be pulled."""
        return not self._exhausted and len(self._open) + len(self._ready) < self._limit

    @property
    def finished(self) -> bool:
        """Whether everything was taken."""
        return self._exhausted and not self._open and not self._ready and self._failure is None

    @property
    def forked(self) -> bool:
        """Whether the engine is not in this process."""
        return self._session.forked

    def pull(self, rows: Iterator[Prompt]) -> tuple[int, Prompt] | None:
        """Return the next row and its position, ``None`` if there is no room or no more."""
        if not self.has_room:
            return None
        if self._pulled is None:
            try:
                self._pulled = next(self._indices), next(rows)
            except StopIteration:
                self.exhaust()
            except Exception as error:
                self.fail(error)
        return self._pulled

    def add(self, ticket: Ticket) -> None:
        """Add the request of a row."""
        self._open.add(ticket)
        ticket.future.add_done_callback(partial(self._complete, ticket))
        if self.closed:  # while the row was being prepared
            self._session.abort_ticket(ticket)

    @contextmanager
    def row(self, index: int) -> Iterator[None]:
        """Wrap the preparation of a row: an error becomes the row's output. After a cancellation ``pull`` returns the row again."""
        try:
            yield
        except (EngineStateError, EngineDeadError) as error:
            self.fail(error)
        except DSV4LiteError as error:
            self._ready.append(RequestOutput(request_id="", prompt_token_ids=(), outputs=(), index=index, error=error))
            self._changed()
        self._pulled = None

    def exhaust(self) -> None:
        """Pull no more rows."""
        self._exhausted = True
        self._changed()

    def fail(self, error: Exception) -> None:
        """Pull no more rows, and raise ``error`` from ``take``; see the class."""
        if not self.closed:
            self._failure = error
        self.exhaust()

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the batch is closed, at once if it is closed already."""
        self._on_close.append(callback)
        if self.closed:
            callback()

    def take(self) -> RequestOutput | None:
        """Return the next output, or ``None`` if there is none yet.

        Raises:
            Exception: Of a row or of the whole batch; see the class.
        """
        if self._failure is not None and (self._on_error == "raise" or not (self._open or self._ready)):
            failure = self._failure
            self.close()
            raise failure
        if not self._ready:
            if self._open:
                self._session.require_process("as_completed")
            return None
        output = self._ready.popleft()
        if output.error is not None and self._on_error == "raise":
            self.close()
            raise output.error
        self._changed()
        return output

    def close(self) -> None:
        """Pull no more rows, abort those in flight and drop outputs that were not taken. May be repeated."""
        self.closed = True
        self._failure = None
        for ticket in list(self._open):
            self._session.abort_ticket(ticket)
        self._ready.clear()
        for callback in self._on_close:
            callback()
        self.exhaust()

    def _complete(self, ticket: Ticket, future: Future[RequestOutput]) -> None:
        if not self.closed:
            self._ready.append(future.result())  # before it leaves the open ones, so that it is always in one of the two
        self._open.discard(ticket)
        self._changed()
