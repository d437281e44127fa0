"""Ranks in processes that are forked, with torch loaded, and not started.

``RankProcess`` starts an interpreter, which imports torch and this package: seconds for each rank. Within ``forked`` its program
runs in a process forked from one that has imported both, with the arguments, connections, environment, folder and standard error
that the interpreter would have. It is a child of the test process, as the interpreter would be. Only Linux can do that; elsewhere
interpreters start. Tests of how ranks start and end, and the programs that tests run, use interpreters everywhere.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from dsv4lite.parallel import launch

_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_LOADED = ("dsv4lite.engine.worker", "torch.distributed")
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from tests.processes import serve; serve(int(sys.argv[1]))"


class Forked:
    """What ``RankProcess`` uses of ``subprocess.Popen``, of a forked process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; ``None`` while the process runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; raises ``subprocess.TimeoutExpired``."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End the process at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Zygote:
    """A process that has imported what ranks need, and forks them."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def start(self, command: Sequence[str], *, pass_fds: Sequence[int], stdin: int, stdout: int) -> Forked:
        """Fork a process that runs the program of ``command``: ``[python, "-c", program, *arguments]``."""
        assert command[1] == "-c" and (stdin, stdout) == (subprocess.DEVNULL, 2), command
        job = pickle.dumps((command[2:], tuple(pass_fds), dict(os.environ), os.getcwd()))
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        # Processes whose parent has ended become this one's for the moment: the new one does, as its parent ends at once.
        assert prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        try:
            socket.send_fds(self._socket, [len(job).to_bytes(8, "little")], [2, *pass_fds])
            self._socket.sendall(job)
            pid = int.from_bytes(self._socket.recv(8, socket.MSG_WAITALL), "little")
        finally:
            assert prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
        assert pid, "the process that forks others has ended"
        return Forked(pid)

    def close(self) -> None:
        """End the process; those that it has forked stay."""
        self._socket.close()
        self._process.wait()


def serve(number: int) -> None:
    """Fork processes as the other end of a socket asks for them, until it is closed."""
    for name in _LOADED:
        __import__(name)
    with socket.socket(fileno=number) as asked:
        while True:
            size, fds, _, _ = socket.recv_fds(asked, 8, 16)
            if not size:
                return
            job = pickle.loads(asked.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
            read, write = os.pipe()
            first = os.fork()
            if first == 0:
                pid = os.fork()
                if pid == 0:
                    os.close(read)
                    os.close(write)
                    asked.close()
                    _run(fds, *job)
                os.write(write, pid.to_bytes(8, "little"))
                os._exit(0)
            os.waitpid(first, 0)  # now the new process has its other parent
            asked.sendall(os.read(read, 8))
            for fd in (read, write, *fds):
                os.close(fd)


def _run(fds: list[int], arguments: list[str], numbers: tuple[int, ...], environment: dict[str, str], folder: str) -> None:
    """Be what the interpreter of a command would be, and end."""
    above = 1 + max(*fds, *numbers)
    moved = [os.dup2(fd, above + i) for i, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(moved, (2, *numbers), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.dup2(2, 1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    program, *rest = arguments
    sys.argv = ["-c", *rest]
    try:
        exec(program, {"__name__": "__main__"})
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)
    os._exit(0)


@contextmanager
def forked(zygote: Zygote) -> Iterator[None]:
    """Let ranks of engines that start meanwhile be forked."""
    if sys.platform != "linux":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
        patch.setattr(launch, "subprocess", SimpleNamespace(Popen=zygote.start, **names))
        yield
