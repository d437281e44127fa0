"""What a process holds, by name, so that a test can tell its own leaks from what an earlier test frees late."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def held() -> set[str]:
    """Return the children, the open sockets and the threads of this process."""
    children = {f"child {child}" for task in Path("/proc/self/task").glob("*/children") for child in task.read_text().split()}
    threads = {f"thread {thread.name} {thread.native_id}" for thread in threading.enumerate()}
    return children | threads | set(_sockets())


def listening(pid: int | str = "self") -> set[tuple[str, int]]:
    """Return the addresses, as the kernel writes them in hexadecimal, and ports at which a process listens for TCP."""
    own = {name.removeprefix("socket:[").removesuffix("]") for name in _sockets(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in own:
                address, port = local.split(":")
                found.add((address, int(port, 16)))
    return found


def _sockets(pid: int | str = "self") -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # it was closed meanwhile
            continue
    return [name for name in found if name.startswith("socket:")]
