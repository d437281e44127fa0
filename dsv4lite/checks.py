"""Rules for the values of settings: of ``SamplingParams``, ``EngineConfig``, the drafters and the calls."""

from __future__ import annotations

import math
import operator
import os
import pickletools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeGuard, TypeVar

from dsv4lite.errors import InvalidRequestError, near_match, shown

Rule = Callable[[Any], str]
"""Returns what is wrong with a value, to be read after ``name=value``; empty if it is right."""
INT32_MAX = 2**31 - 1
_PLAIN = (int, float, str, bool, type(None))
T = TypeVar("T")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number that a float holds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond 1.8e308
        return False


def is_unicode(value: str) -> bool:
    """Whether a string can be encoded: it has no lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_integers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return token ids as integers. If one is ``True`` or ``False``, they stay as they are: ``check_vocabulary`` refuses it.

    Raises:
        TypeError: One is no integer.
    """
    ids = tuple(values)
    kinds = set(map(type, ids))
    return ids if kinds == {int} or bool in kinds else tuple(map(operator.index, ids))


def is_token(value: object) -> bool:
    """Whether a value can be a token id."""
    return is_integer(value) and 0 <= value <= INT32_MAX


def integer(least: int, most: int = INT32_MAX, *, optional: bool = False) -> Rule:
    """An integer in a range."""

    def problem(value: object) -> str:
        if (value is None and optional) or (is_integer(value) and least <= value <= most):
            return ""
        below = isinstance(value, int) and value < least
        limit = f"of at least {least}" if below and most == INT32_MAX else f"from {least} to {most}"
        return f"must be an integer {limit}" + (", or None" if optional else "")

    return problem


def number(good: Callable[[float], bool], rule: str) -> Rule:
    """A finite number for which ``good`` holds; ``rule`` says so."""
    return lambda value: "" if is_number(value) and good(value) else f"must be a finite number{rule}"


def one_of(*options: str) -> Rule:
    """One of some names."""
    return lambda value: "" if value in options else f"must be one of {options}{near_match(value, options)}"


def boolean(value: object) -> str:
    """``True`` or ``False``."""
    return "" if isinstance(value, bool) else "must be True or False"


def file_name(value: object) -> str:
    """A string or a path that can be the name of a file. Whether there is such a file is not checked."""
    name = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(name, str):
        return "must be a string or a path"
    if not name:
        return "is empty; give a name"
    if "\0" in name:
        return "contains a NUL character"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return "contains a character that no file name can have"
    return ""


def plain(value: Any) -> Any:
    """Return a value of a subclass of int, float or str, such as an ``IntEnum``, as that type, which every process can unpickle.

    The same inside tuples; other values are returned unchanged.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, str):
        return str.__str__(value)  # an ``Enum`` has a ``__str__`` of its own
    return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else value


def plain_fields(kind: type[T], value: T) -> T:
    """Return a dataclass of a subclass of ``kind`` as ``kind``, which every process can unpickle."""
    return value if type(value) is kind else kind(**{f.name: getattr(value, f.name) for f in fields(kind)})  # type: ignore[arg-type]


def names_main(pickled: bytes) -> bool:
    """Return whether pickled functions or objects are of the module ``__main__``, which child processes do not import."""
    return any(found == "__main__" for _, found, _ in pickletools.genops(pickled))


def require(ok: bool, parameter: str, value: object, problem: str) -> None:
    """Raise ``InvalidRequestError`` for the value of a parameter unless it is ``ok``."""
    if not ok:
        raise InvalidRequestError(f"{parameter}={shown(value)} {problem}", parameter=parameter, value=value)
