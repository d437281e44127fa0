"""The calls of ``LLM``: those of ``AsyncLLM``, run to their end in the caller's thread.

A call of ``AsyncLLM`` waits only through its bridge. With a ``ThreadBridge`` these waits block and the coroutine never suspends, so
that one ``send`` runs it to its end: there is no event loop, hidden or other, and ``KeyboardInterrupt`` is raised inside the call.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from dsv4lite.api.streams import AsyncCompletions, AsyncStream
from dsv4lite.api.update import AsyncWeightUpdate
from dsv4lite.request import Delta, RequestOutput, WeightSource

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")


def finish(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        call.close()
    raise AssertionError(f"{call!r} was suspended, and there is no event loop to resume it")


def blocking(method: Callable[Concatenate[Any, P], A], run: Callable[[A], T]) -> Callable[Concatenate[Any, P], T]:
    """Return the method of ``LLM`` that does what one of ``AsyncLLM`` does: same name, parameters and text.

    Args:
        method: It is called with an ``LLM``, so that it may use only what ``BaseLLM`` has.
        run: Makes its result that of ``LLM``: ``finish`` for a coroutine, else a class of this module.
    """

    def _call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    update_wrapper(_call, method)
    _call.__qualname__ = method.__qualname__.replace("AsyncLLM", "LLM")
    if isinstance(run, type):
        signature = inspect.signature(method).replace(return_annotation=run.__name__)
        setattr(_call, "__signature__", signature)  # noqa: B010  # functions have it, and type checkers do not know
    return _call


class Block:
    """A block of ``LLM``, such as that of ``paused``."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __enter__(self) -> Self:
        finish(self._source.__aenter__())
        return self

    def __exit__(self, *exception: object) -> None:
        finish(self._source.__aexit__(*exception))


class _Iterator(Block, Iterator[T]):
    """An iterator of ``AsyncLLM`` whose bridge is a ``ThreadBridge``; threads that share it read one after the other."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._reading = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            with self._reading:
                item: T = finish(self._source.__anext__())
            return item
        except StopAsyncIteration:
            raise StopIteration from None


class Stream(_Iterator[Delta]):
    """One request whose output is read as it is made; made by ``LLM.stream`` and ``LLM.chat_stream``.

    Entering the block submits the request, leaving it ends the request. In between, iteration yields ``Delta`` objects: only what
    is new, in order, for all ``n`` completions. A slow reader loses nothing.
    """

    _source: AsyncStream

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._source.request_id

    def abort(self) -> None:
        """End the request now; see ``AsyncStream.abort``."""
        self._source.abort()

    def final(self) -> RequestOutput:
        """Wait for the end of the request and return all of it; see ``AsyncStream.final``."""
        return finish(self._source.final())


class WeightUpdate(Block):
    """A transaction of the weights; made by ``LLM.update_weights``. See ``AsyncWeightUpdate``."""

    _source: AsyncWeightUpdate

    def load(self, source: WeightSource, *, deadline: float | None = None) -> None:
        """Take the tensors of a source; see ``AsyncWeightUpdate.load``."""
        finish(self._source.load(source, deadline=deadline))


class Completions(_Iterator[RequestOutput]):
    """The outputs of many prompts as they finish; made by ``LLM.as_completed``."""

    _source: AsyncCompletions

    def close(self) -> None:
        """Abort what is in flight and pull no more."""
        finish(self._source.aclose())
