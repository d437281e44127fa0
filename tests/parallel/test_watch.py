"""Which rank the watch counts as lost, and how fast."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest

from dsv4lite.errors import ConfigError, EngineDeadError
from dsv4lite.parallel import watch
from dsv4lite.parallel.channel import Channel
from dsv4lite.parallel.launch import Heartbeat, RankProcess
from dsv4lite.parallel.watch import Loss, Watch

ENOUGH_S = 20.0


class Life:
    """Both ends of the connections of life of three ranks, and the watch over them."""

    def __init__(self) -> None:
        self.ours: dict[int, Channel] = {}
        self.theirs: dict[int, Channel] = {}
        for rank in range(3):
            ends = socket.socketpair()
            self.ours[rank], self.theirs[rank] = (Channel(Connection(end.detach())) for end in ends)
        self.losses: SimpleQueue[Loss] = SimpleQueue()
        self.watch = Watch(self.ours, 1.0, self.losses.put)

    def loss(self) -> Loss:
        return self.losses.get(timeout=ENOUGH_S)


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setattr(watch, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(watch, "_GRACE_S", 0.2)
    life = Life()
    yield life
    life.watch.stop()
    for channel in (*life.ours.values(), *life.theirs.values()):
        channel.close()


def test_watch_notices_a_death(life: Life) -> None:
    life.theirs[1].close()
    assert life.loss() == Loss(rank=1, gone=True)
    life.watch.await_decision()  # returns, for it is decided


def test_watch_blames_the_dead_rank_for_errors_of_others(life: Life) -> None:
    life.theirs[0].send(RuntimeError("connection closed by peer"))
    life.theirs[2].send(RuntimeError("connection closed by peer"))
    life.theirs[2].close()  # one that has failed may end
    life.theirs[1].close()
    assert life.loss() == Loss(rank=1, gone=True)


def test_watch_blames_the_rank_that_failed_if_none_died(life: Life) -> None:
    error = ValueError("of rank 2")
    life.theirs[2].send(error)
    life.theirs[2].close()
    loss = life.loss()
    assert (loss.rank, loss.reason, str(loss.error)) == (2, "failed: ValueError: of rank 2", "of rank 2")


def test_watch_notices_silence_once_there_was_a_sign_of_life(life: Life) -> None:
    stop = threading.Event()
    for rank in (0, 1):
        life.theirs[rank].send(None)
    pulse = Heartbeat(life.theirs[0], lambda error: stop.set())
    assert life.loss() == Loss(rank=1, reason="gave no sign of life for 1 s")  # rank 2 is still starting
    pulse.stop()
    assert not stop.is_set()


def test_watch_notices_what_takes_too_long(life: Life) -> None:
    with life.watch.within(0.1, 2, "finish a step"):
        pass
    with life.watch.within(0.1, 1, "finish a step"):
        loss = life.loss()
    assert loss == Loss(rank=1, reason="did not finish a step within 0.1 s: it, or a rank that it waits for, is stuck")


def test_watch_that_is_stopped_reports_no_loss(life: Life) -> None:
    life.watch.stop()
    life.theirs[1].close()
    time.sleep(0.1)
    assert life.losses.empty()


def test_heartbeat_notices_the_end_of_the_leader(life: Life) -> None:
    reasons: SimpleQueue[EngineDeadError] = SimpleQueue()
    pulse = Heartbeat(life.theirs[0], reasons.put)
    life.watch.stop()
    life.ours[0].close()
    assert str(reasons.get(timeout=ENOUGH_S)) == "the leader is gone"
    pulse.stop()


def test_heartbeat_passes_on_the_leaders_error(life: Life) -> None:
    reasons: SimpleQueue[EngineDeadError] = SimpleQueue()
    pulse = Heartbeat(life.theirs[0], reasons.put)
    life.ours[0].send(EngineDeadError("rank 1 is lost", rank=1, phase="load"))
    error = reasons.get(timeout=ENOUGH_S)
    assert (str(error), error.rank, error.phase) == ("rank 1 is lost", 1, "load")
    pulse.stop()


def test_fate_of_a_rank_that_ends_early_is_its_status() -> None:
    process = RankProcess(3, "sys")  # which has no main
    try:
        assert process.rank == 3 and os.getpgid(process.pid) == os.getpgid(0)
        assert process.fate(ENOUGH_S) == "ended with exit status 1; its messages are on standard error"
    finally:
        process.end(kill=True)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_fate_of_a_rank_whose_status_the_host_takes_is_not_made_up() -> None:
    """A killed rank "ended with exit status 0" in a program that ignores SIGCHLD."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = RankProcess(3, "sys")
        process.kill(EngineDeadError("the end"))
        assert process.fate(ENOUGH_S).startswith("ended, perhaps killed: its exit status is lost if this program ignores SIGCHLD")
        process.end(kill=True)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_program_that_is_no_interpreter_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ConfigError, match="Python processes"):
        RankProcess(0, "sys")
