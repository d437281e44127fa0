"""Posting to a loop, a run or a thread, alive or gone."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from concurrent.futures import Future

import anyio
import anyio.to_thread
import pytest

from dsv4lite.api.bridge import AsyncioBridge, LoopBridge, ThreadBridge, TrioBridge, current_loop
from tests.loops import LOOPS, both_loops


@both_loops
async def test_loop_bridge_runs_posts_at_home_in_order(backend: str) -> None:
    seen: list[tuple[int, bool]] = []
    bridge = current_loop()
    assert type(bridge) is {"asyncio": AsyncioBridge, "trio": TrioBridge}[backend] and bridge.is_current()
    home, done = threading.get_ident(), anyio.Event()

    def work() -> None:
        assert not bridge.is_current()
        for number in range(100):
            assert bridge.post(lambda n=number: seen.append((n, threading.get_ident() == home)))  # type: ignore[misc]
        bridge.run(done.set)

    await anyio.to_thread.run_sync(work)
    await done.wait()
    assert seen == [(number, True) for number in range(100)]


@both_loops
async def test_loop_bridge_waits_for_futures_of_other_threads() -> None:
    bridge = current_loop()
    future: Future[int] = Future()
    with anyio.move_on_after(0.001) as scope:
        await bridge.wait(future)
    assert scope.cancelled_caught and not future.done()
    thread = threading.Thread(target=lambda: future.set_result(5))
    thread.start()
    assert await bridge.wait(future) == 5 == await bridge.wait(future)
    thread.join()
    failed: Future[int] = Future()
    failed.set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await bridge.wait(failed)


@both_loops
async def test_work_of_cancelled_callers_keeps_its_place() -> None:
    """On asyncio, callers that gave up and tried again started any number of threads."""
    bridge, go, begun = current_loop(), threading.Event(), list[int]()

    def work() -> None:
        begun.append(1)
        go.wait(30)

    for _ in range(6):
        with anyio.move_on_after(0.02):
            await bridge.offload(work)
    assert len(begun) <= 2
    go.set()
    assert [await bridge.offload(lambda n=number: n) for number in range(4)] == list(range(4))  # type: ignore[misc]


@LOOPS
def test_loop_bridge_swallows_posts_to_a_loop_that_is_gone(backend: str) -> None:
    async def main() -> LoopBridge:
        bridge = current_loop()
        bridge.post_later(3600, lambda: pytest.fail("ran"))
        await anyio.sleep(0.001)
        return bridge

    bridge = anyio.run(main, backend=backend)
    assert bridge.post(lambda: pytest.fail("ran")) is False
    assert bridge.is_gone and not bridge.is_current()
    bridge.post_later(0, lambda: pytest.fail("ran"))


@both_loops
async def test_loop_bridge_runs_later_what_is_posted_for_later() -> None:
    bridge, done, order = current_loop(), anyio.Event(), list[str]()
    bridge.post_later(0.02, done.set)
    bridge.post_later(0.01, lambda: order.append("first"))
    await done.wait()
    assert order == ["first"]


@both_loops
async def test_loop_bridge_that_is_closed_leaves_no_timer(backend: str) -> None:
    bridge = current_loop()
    before = anyio.get_running_tasks() if backend == "asyncio" else []
    for seconds in (1e12, 1e300):
        bridge.post_later(seconds, lambda: pytest.fail("ran"))
    await anyio.sleep(0.01)
    bridge.close()
    bridge.close()
    await anyio.sleep(0.01)
    assert backend == "trio" or len(anyio.get_running_tasks()) == len(before)


def test_current_loop_needs_one() -> None:
    with pytest.raises(RuntimeError):
        current_loop()


async def test_current_loop_sees_asyncio_although_trio_is_imported() -> None:
    assert isinstance(current_loop(), AsyncioBridge)
    assert asyncio.get_running_loop() is current_loop()._loop  # type: ignore[attr-defined]


def test_thread_bridge_runs_posts_and_timers_on_its_thread() -> None:
    before = set(threading.enumerate())
    bridge = ThreadBridge("test-delivery")
    seen: list[str] = []
    done = threading.Event()
    for seconds, name in ((0.02, "later"), (0.01, "sooner")):
        bridge.post_later(seconds, lambda name=name: seen.append(name))  # type: ignore[misc]
    bridge.post_later(0.03, done.set)
    bridge.post(lambda: seen.append(threading.current_thread().name))
    assert done.wait(10)
    bridge.close()
    bridge.close()
    assert seen == ["test-delivery", "sooner", "later"]
    assert bridge.is_gone and bridge.post(lambda: pytest.fail("ran")) is False
    assert not set(threading.enumerate()) - before


def test_thread_bridge_whose_thread_cannot_start_leaves_nothing_for_the_exit() -> None:
    """As at the limit of a container's processes: the exit handler joined the thread, and printed a traceback."""
    program = """
import threading
from dsv4lite.api.bridge import ThreadBridge

def refused(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = refused
try:
    ThreadBridge("bridge")
except RuntimeError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "can't start new thread\n", "")


def test_thread_bridge_survives_timers_of_any_length_and_callbacks_that_fail(caplog: pytest.LogCaptureFixture) -> None:
    """A wait beyond ``threading.TIMEOUT_MAX``, and any exception, once ended the thread: later callbacks never ran."""
    bridge, done, later = ThreadBridge("test-delivery"), threading.Event(), threading.Event()
    for seconds in (1e12, 1e300, float("inf")):
        bridge.post_later(seconds, lambda: pytest.fail("ran"))
        bridge.post(lambda: None)

    class Panic(BaseException):
        pass

    def fail(error: BaseException) -> None:
        raise error

    with caplog.at_level(logging.ERROR, "dsv4lite"):
        for error in (ZeroDivisionError("once"), Panic("twice")):
            bridge.post(lambda error=error: fail(error))  # type: ignore[misc]
            bridge.post_later(0.001, lambda error=error: fail(error))  # type: ignore[misc]
        bridge.post_later(0.002, later.set)
        bridge.post(done.set)
        assert done.wait(30) and later.wait(30)
    bridge.close()
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info].count("once") == 2
    assert len(caplog.records) == 4
