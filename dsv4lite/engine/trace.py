"""A trace of the engine's thread, as events in Chrome's trace format, which Perfetto opens."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from dsv4lite.errors import ConfigError

log = logging.getLogger("dsv4lite.engine")


class StepTrace:
    """Writes events to a file; a context manager, mutable, used in the engine's thread.

    The file is a JSON array. If the process is killed, the closing bracket is missing, which Perfetto accepts.

    Args:
        path: Path of the file, which is overwritten.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  closed when the trace is left
        except OSError as error:
            raise ConfigError(f"trace_path={path!r} cannot be written: {error}; choose another file, or None") from error
        self._separator, self._path, self._failed = "[\n", path, False

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._write("[]\n" if self._separator == "[\n" else "\n]\n")
        try:
            self._file.close()  # writes buffered events, which may fail
        except OSError as problem:
            self._fail(problem)

    @contextmanager
    def span(self, name: str, facts: Mapping[str, int]) -> Iterator[None]:
        """Record the time of the block, with ``facts`` as its arguments."""
        began = time.perf_counter()
        try:
            yield
        finally:
            event = {"name": name, "ph": "X", "ts": 1e6 * began, "dur": 1e6 * (time.perf_counter() - began), "args": facts}
            event |= {"pid": os.getpid(), "tid": threading.get_native_id()}
            self._write(self._separator + json.dumps(event))
            self._separator = ",\n"

    def _write(self, text: str) -> None:
        """Write unless an earlier write has failed: requests do not fail because a disk is full."""
        if not self._failed:
            try:
                self._file.write(text)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed = True
        log.error("the trace %s ends here: %s", self._path, error)
