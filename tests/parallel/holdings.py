"""What a process holds, by name, so that what is left behind can be told from what an earlier test lets go of late."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def held() -> set[str]:
    """Return the children, the open sockets and the threads of this process."""
    children = {f"child {child}" for task in Path("/proc/self/task").glob("*/children") for child in task.read_text().split()}
    threads = {f"thread {thread.name} {thread.native_id}" for thread in threading.enumerate()}
    return children | threads | set(_sockets())


def _sockets() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # it was closed meanwhile
            continue
    return [name for name in found if name.startswith("socket:")]
