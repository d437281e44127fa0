"""Files of a checkpoint, which may be broken or hostile: only regular ones are opened, up to a size, and JSON is read strictly."""

from __future__ import annotations

import json
import os
import stat
from io import FileIO
from math import isfinite
from pathlib import Path
from typing import Any

from dsv4lite.errors import CheckpointError, shown

SETTINGS_BYTES = 4 << 20  # of config.json and its like; real ones have some kilobytes
TABLE_BYTES = 64 << 20  # of an index or a vocabulary; real ones have up to 20 MB
_MOST_DEPTH = 64  # of objects and lists in each other
_TOO_DEEP = f"objects and lists are nested more than {_MOST_DEPTH} levels deep"


def open_regular(path: Path) -> FileIO:
    """Open a file for reading, unbuffered; never wait for a writer of a FIFO, never touch a device.

    Raises:
        CheckpointError: It cannot be opened, or is no regular file.
    """
    try:
        _require_regular(path, os.stat(path).st_mode)  # opening a device may have effects
        handle = FileIO(path, opener=_open_without_waiting)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        _require_regular(path, os.fstat(handle.fileno()).st_mode)  # it may have been replaced since
    except CheckpointError:
        handle.close()
        raise
    return handle


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "FIFO" if stat.S_ISFIFO(mode) else "device or socket"
        raise CheckpointError(f"{path}: cannot be read: it is a {kind}, and must be a regular file")


def read_bytes(path: Path, most: int) -> bytes:
    """Return what a file holds.

    Raises:
        CheckpointError: It cannot be read, or has more than ``most`` bytes.
    """
    with open_regular(path) as handle:
        try:
            size = os.fstat(handle.fileno()).st_size
            data = b"" if size > most else handle.read(most + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if max(size, len(data)) > most:
        raise CheckpointError(f"{path}: has {max(size, len(data)):,} bytes; at most {most:,} are read")
    return data


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: It is not JSON, an object has a key twice, a number is not finite, or the nesting is too deep.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MOST_DEPTH):
        items = (item for node in level for item in (node.values() if isinstance(node, dict) else node))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{shown(text)} is not a finite number")
    return number


def read_json(path: Path, most: int = SETTINGS_BYTES) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        CheckpointError: It cannot be read, has more than ``most`` bytes, or holds something else.
    """
    data = read_bytes(path, most)
    try:
        value = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; it must hold a JSON object")
    return value
