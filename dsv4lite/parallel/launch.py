"""Ranks as child processes of the engine's process.

A child is a new Python interpreter. Unlike a ``multiprocessing`` process, it does not import the host's ``__main__``, needs no
resource tracker, and is not in the host's list of children. It has two connections to its parent, one for work and one for signs of
life; both close when either process ends. A child ends at once when its parent is gone.
"""

from __future__ import annotations

import logging
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from dsv4lite.errors import ConfigError, DSV4LiteError, EngineDeadError
from dsv4lite.parallel.channel import Channel, Closed

log = logging.getLogger("dsv4lite.parallel")

HEARTBEAT_S = 0.5
# A terminal or a service manager sends these signals to all processes at once: the engine's process handles them.
_PROGRAM = (
    "import signal\nfor number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
    "import sys; work, life, parent, module = sys.argv[1:5]; sys.path[:] = sys.argv[5:]\n"
    "from dsv4lite.bare import import_torch; import_torch()\n"
    "import importlib; importlib.import_module(module).main(int(work), int(life), int(parent))"
)
_EXIT_S = 5.0


class RankProcess:
    """The leader's connections to a rank in a child process: ``work`` for messages, ``life`` for signs of life and errors."""

    def __init__(self, rank: int, module: str) -> None:
        """Start ``module.main(work, life, parent)`` in a child, with two socket descriptors and the id of this process.

        Raises:
            ConfigError: This program cannot start a Python interpreter.
        """
        self.rank = rank
        executable = os.fsdecode(multiprocessing.spawn.get_executable() or "")
        if getattr(sys, "frozen", False) or not Path(executable).name.startswith("python"):
            raise ConfigError(
                f"ranks are Python processes, and {executable or 'this program'} is not an interpreter: name one with "
                "multiprocessing.set_executable, or use executor='thread' and one rank"
            )
        (work, their_work), (life, their_life) = socket.socketpair(), socket.socketpair()
        with their_work, their_life:
            ends = (their_work.fileno(), their_life.fileno())
            command = [executable, "-c", _PROGRAM, *map(str, ends), str(os.getpid()), module, *sys.path]
            try:
                # Its standard output goes to standard error: standard output is for the host's own results.
                self._process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=2)
            except OSError as error:
                work.close()
                life.close()
                raise ConfigError(f"rank {rank} cannot be started: {error}") from error
        self.work, self.life = Channel(Connection(work.detach())), Channel(Connection(life.detach()))

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def where(self) -> str:
        """Name of the process in messages."""
        return f"process {self.pid}"

    def fate(self, wait_s: float = 1.0) -> str:
        """Return how the process ended, for a message; wait up to ``wait_s`` seconds for its exit status."""
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"was killed by {names.get(-status, f'signal {-status}')}"
        if status == 0:  # also what ``subprocess`` says of a child that it could not wait for
            return "ended, perhaps killed: its exit status is lost if this program ignores SIGCHLD or waits for all children"
        return f"ended with exit status {status}; its messages are on standard error"

    def kill(self, error: DSV4LiteError) -> None:
        """End the process at once; ``error`` says why."""
        self._process.kill()
        self.work.shut_down()

    def end(self, *, kill: bool) -> None:
        """Close the connections and wait for the process; kill it after 5 seconds, or at once with ``kill``."""
        if kill:
            self._process.kill()
        self.work.close()
        self.life.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            log.warning("rank %d (process %d) did not end by itself and is killed", self.rank, self.pid)
            self._process.kill()
            self._process.wait()


class Heartbeat:
    """A thread that sends a rank's signs of life twice a second, and listens for errors from the leader and for its end.

    Args:
        life: Connection to the leader.
        on_end: Called in that thread, at most once: with an error from the leader, or if the leader is gone without notice.
        parent: Id of the leader's process, if it started this one.
    """

    def __init__(self, life: Channel, on_end: Callable[[DSV4LiteError], None], parent: int | None = None) -> None:
        self._life, self._on_end, self._parent = life, on_end, parent
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsv4lite-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            error: DSV4LiteError | None
            try:
                with suppress(Closed):  # a message of the leader may still be unread
                    self._life.send(None)
                error = self._life.receive(HEARTBEAT_S)
            except TimeoutError:
                if self._parent is None or os.getppid() == self._parent:
                    continue
                error = EngineDeadError("the engine's process is gone", phase="step")
            except Closed:
                error = EngineDeadError("the leader is gone", phase="step")
            if error is not None and not self._stop.is_set():
                self._on_end(error)
            return


def set_up_child(device: torch.device, ranks_here: int) -> None:
    """Set up this process, which the engine owns, for one rank of ``ranks_here`` on this machine."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))
