"""Bridges: how the engine's thread posts callbacks to its callers, and how a caller waits.

A bridge has a *loop* that runs short callbacks, posted from any thread, in order: the asyncio loop or the Trio run that was current
when the bridge was made, or for ``LLM`` a thread of the bridge. Posting never blocks and never raises: callbacks posted after the
end of the loop are dropped, so that the engine's thread does not fail when the host's loop ends.

Waiting is a coroutine on every bridge. On a ``LoopBridge`` it suspends the caller's task; on a ``ThreadBridge`` it blocks the
caller's thread and never suspends, so that ``blocking.finish`` can run the whole call without an event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import queue
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread

log = logging.getLogger("dsv4lite.api")

T = TypeVar("T")
Callback = Callable[[], None]

_LONGEST_WAIT_S = 3600.0  # far below ``threading.TIMEOUT_MAX``; a later timer is waited for in parts


class Bridge(ABC):
    """Runs callbacks in its loop, and lets callers wait."""

    @abstractmethod
    def post(self, callback: Callback) -> bool:
        """Let the loop run ``callback`` soon; from any thread, signal handler or finalizer. Return ``False`` if the loop has ended.

        The callback must not raise.
        """

    @property
    @abstractmethod
    def is_gone(self) -> bool:
        """Whether the loop has ended, perhaps before all posted callbacks have run."""

    @abstractmethod
    def post_later(self, seconds: float, callback: Callback) -> None:
        """Let the loop run ``callback`` after a delay of any length; dropped if the loop ends or the bridge is closed before."""

    @abstractmethod
    def close(self, *, wait: bool = True) -> None:
        """Drop timers and end the bridge's thread, if it has one. May be repeated.

        Args:
            wait: Wait for the end of the thread. Without, a finalizer may call this.
        """

    @abstractmethod
    def is_current(self) -> bool:
        """Whether the caller may wait here: on a bridge to a loop, only tasks of that loop may."""

    @abstractmethod
    async def wait(self, future: Future[T], seconds: float | None = None) -> T:
        """Wait for a future that any thread may complete. Cancelling the wait leaves the future alone.

        Raises:
            TimeoutError: It did not complete within ``seconds``.
        """

    @abstractmethod
    async def offload(self, work: Callable[[], T]) -> T:
        """Return the result of work that is too long for an event loop."""

    @abstractmethod
    def signal(self) -> Signal:
        """Return a new signal, to wake a reader that waits on this bridge.

        A reader first looks for something new, and waits if there is nothing. A call after the reader looked ends the wait. Calls
        may come from any thread and do not block.
        """


class LoopBridge(Bridge):
    """A bridge to an event loop; made by ``current_loop``."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._closed = anyio.Event()
        self._workers = anyio.CapacityLimiter(2)

    @abstractmethod
    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` as a task that belongs to no scope of the caller; call this in the loop. ``work`` must not raise."""

    def post_later(self, seconds: float, callback: Callback) -> None:
        async def wait() -> None:
            with anyio.move_on_after(seconds) as timer:
                await self._closed.wait()
            if timer.cancelled_caught:
                callback()

        self.post(lambda: self.spawn(wait))

    def close(self, *, wait: bool = True) -> None:
        self.post(self._closed.set)

    def run(self, callback: Callback) -> None:
        """Run ``callback`` now when called in the loop's thread, else post it."""
        if threading.get_ident() == self._thread:
            callback()
        else:
            self.post(callback)

    async def wait(self, future: Future[T], seconds: float | None = None) -> T:
        if not future.done():
            event = anyio.Event()
            future.add_done_callback(lambda _: self.run(event.set))
            with anyio.fail_after(seconds):
                await event.wait()
        return future.result()

    async def offload(self, work: Callable[[], T]) -> T:
        # A cancelled caller leaves its thread, which keeps its place until its work ends: asyncio's would give it back at once.
        place, begun = object(), Future[None]()
        await self._workers.acquire_on_behalf_of(place)

        def release() -> None:
            self._workers.release_on_behalf_of(place)

        def run() -> T | None:
            if not begun.set_running_or_notify_cancel():
                return None  # the caller left before this thread began
            try:
                return work()
            finally:
                self.post(release)

        try:
            return cast(T, await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)))
        finally:
            if begun.cancel():
                release()

    def signal(self) -> Signal:
        return LoopSignal(self)


class LoopSignal:
    """Wakes all tasks that wait. A task looks and waits on the loop, where callbacks run too, so that no call is missed."""

    def __init__(self, bridge: LoopBridge) -> None:
        self._bridge = bridge
        self._event: anyio.Event | None = None

    def __call__(self) -> None:
        self._bridge.run(self._fire)

    async def wait(self) -> None:
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()

    def _fire(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event.set()


class AsyncioBridge(LoopBridge):
    """A bridge to the running asyncio loop (uvloop included)."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds its tasks weakly

    def post(self, callback: Callback) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed
            return False
        return True

    @property
    def is_gone(self) -> bool:
        return self._loop.is_closed()

    def is_current(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class TrioBridge(LoopBridge):
    """A bridge to the current Trio run."""

    def __init__(self) -> None:
        import trio

        super().__init__()
        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()
        self._gone = False

    def post(self, callback: Callback) -> bool:
        try:
            self._token.run_sync_soon(callback)
        except self._trio.RunFinishedError:
            self._gone = True
        return not self._gone

    @property
    def is_gone(self) -> bool:
        return self._gone  # an ending run still runs what was posted; only the next post fails

    def is_current(self) -> bool:
        return self._trio.lowlevel.in_trio_task() and self._trio.lowlevel.current_trio_token() is self._token

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            self._trio.lowlevel.spawn_system_task(work, context=contextvars.copy_context())
        except RuntimeError:  # the run is ending, so that the work is not needed any more
            return


class ThreadBridge(Bridge):
    """A bridge whose loop is a daemon thread, until ``close``."""

    def __init__(self, name: str) -> None:
        self._inbox: queue.SimpleQueue[Callback | None] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Callback]] = []  # a heap; only the thread touches it
        self._order = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Like the engine's thread, it may be inside torch when the interpreter ends. Later finalizers run first: the engine's does.
        self._at_exit = weakref.finalize(self._thread, self.close)
        try:
            self._thread.start()
        except BaseException:  # an interrupt of its wait: the thread runs, and no caller has this bridge
            self.close(wait=False)
            raise

    def post(self, callback: Callback) -> bool:
        self._inbox.put(callback)
        return not self._closed

    @property
    def is_gone(self) -> bool:
        return self._closed

    def post_later(self, seconds: float, callback: Callback) -> None:
        due = time.monotonic() + seconds
        self.post(lambda: heapq.heappush(self._timers, (due, next(self._order), callback)))

    def close(self, *, wait: bool = True) -> None:
        """Run what is posted so far, and end the thread."""
        self._closed = True
        self._inbox.put(None)
        if wait and self._thread.is_alive() and threading.current_thread() is not self._thread:  # it may never have started
            self._thread.join()

    def is_current(self) -> bool:
        return True

    async def wait(self, future: Future[T], seconds: float | None = None) -> T:
        return future.result(seconds)

    async def offload(self, work: Callable[[], T]) -> T:
        return work()

    def signal(self) -> Signal:
        return ThreadSignal()

    def _run(self) -> None:
        while (callback := self._next()) is not None:
            try:
                callback()
            except BaseException:  # all other requests depend on this thread
                log.exception("a callback failed; the thread continues")
            del callback  # while the thread waits, no variable may keep an object of the callback alive
        self._at_exit.detach()

    def _next(self) -> Callback | None:
        """Wait for the next callback; ``None`` is the end."""
        while True:
            wait = min(_LONGEST_WAIT_S, max(0.0, self._timers[0][0] - time.monotonic())) if self._timers else None
            try:
                return self._inbox.get(timeout=wait)
            except queue.Empty:
                if self._timers[0][0] <= time.monotonic():
                    return heapq.heappop(self._timers)[2]


class ThreadSignal:
    """Wakes the thread that waits. A call that comes before the wait ends that wait at once."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        self._event.wait()
        self._event.clear()


Signal = LoopSignal | ThreadSignal


def current_loop() -> LoopBridge:
    """Return a bridge to the event loop that runs the caller.

    Raises:
        RuntimeError: No asyncio or Trio loop is running in this thread.
    """
    trio = sys.modules.get("trio")  # before asyncio: Trio can run as a guest of an asyncio loop
    if trio is not None and trio.lowlevel.in_trio_task():
        return TrioBridge()
    return AsyncioBridge()
