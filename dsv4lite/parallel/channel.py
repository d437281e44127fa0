"""Messages between an engine and its ranks: pickled values over a pipe or a socket.

Tensors are sent as their bytes. An exception that cannot be pickled is sent as a RuntimeError with the same text.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import os
import pickle
import socket
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from dsv4lite.errors import described


class Closed(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a connection; one thread may receive while others send."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message; see ``send_bytes``."""
        self.send_bytes(encode(message))

    def send_bytes(self, message: bytes) -> None:
        """Send a message that ``encode`` returned, for example the same one to several ranks.

        Raises:
            Closed: The other end is gone.
        """
        try:
            with self._sending:
                self.connection.send_bytes(message)
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for a message.

        Raises:
            Closed: The other end is gone.
            TimeoutError: Nothing arrived within ``timeout_s``.
        """
        try:
            if timeout_s is not None and not self.connection.poll(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            message = self.connection.recv_bytes()
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise Closed(str(error)) from error
        return pickle.loads(message)  # not above: it may raise any error, of objects of the host

    def shut_down(self) -> None:
        """End the connection on both sides; a thread that waits in ``receive`` gets ``Closed``."""
        try:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed

    def close(self) -> None:
        """Close this end; may be repeated."""
        self.connection.close()


def encode(message: object) -> bytes:
    """Return a message as bytes that ``pickle.loads`` understands."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduce}
    pickler.dump(message)
    return buffer.getvalue()


def portable(error: BaseException) -> BaseException:
    """Return an exception that can be sent, with its traceback as a note."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(encode(error))
        found = error
    except Exception as flaw:
        found = RuntimeError(described(error))
        text += f"(sent as text: {flaw})\n"
    found.add_note(text)
    return found


def _reduce(value: Tensor) -> tuple[Any, ...]:
    here = value.detach().cpu().contiguous()
    return _tensor, (ctypes.string_at(here.data_ptr(), here.nbytes), here.dtype, tuple(here.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
