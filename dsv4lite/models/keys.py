"""Reading the keys of a ``config.json``: values within limits, and errors that name the key and say what it must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dsv4lite.errors import ConfigError, UnsupportedError, shown

MOST_TOKENS = 1 << 23  # of a vocabulary, and what sampling can number
MOST_EXPERTS = 4096  # of a layer
MOST_MATRICES = 1 << 17  # routed experts of all layers together
_MOST_OTHERS = 1 << 31
_LEAST_REAL, _MOST_REAL = 1e-30, 1e30
_MOST_KEYS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of one family's configs.

    Attributes:
        numbers: Each key that is one number: the field that it sets, and the largest integer that is accepted; ``None`` for a real
            number. Limits are several times what the largest release has: larger numbers mean a broken config.
        most: Limits of integers in other places.
        may_be_zero: Integers from 0 on; others are from 1 on.
        above_one: Real numbers above 1; others are above 0.
        others: Further keys that are read.
        ignored: Keys that change nothing, listed because they could be taken for misspellings of those that are read.
    """

    numbers: Mapping[str, tuple[str, int | None]]
    most: Mapping[str, int]
    may_be_zero: tuple[str, ...]
    above_one: tuple[str, ...]
    others: tuple[str, ...]
    ignored: tuple[str, ...]

    def check_spelling(self, raw: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if there are too many keys, or one looks like a misspelling of a key that is read."""
        if len(raw) > _MOST_KEYS:
            raise ConfigError(f"config.json has {len(raw)} keys; at most {_MOST_KEYS} are read")
        meant = {*self.numbers, *self.others}
        for key in raw:
            if not isinstance(key, str):
                raise ConfigError(f"key {shown(key)} of the model's config must be a string")
            if key not in meant and len(key) <= 100:  # comparing takes the square of the length
                close = get_close_matches(key, [*meant, *self.ignored], n=1, cutoff=0.8)
                if close and close[0] in meant and key not in self.ignored:
                    raise ConfigError(f"unknown key {key!r} in config.json; did you mean {close[0]!r}?")

    def settings(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that ``numbers`` set; raise one ``ConfigError`` that names all wrong values."""
        settings: dict[str, Any] = {}
        problems: list[str] = []
        for key, (field, most) in self.numbers.items():
            if raw.get(key) is not None:
                try:
                    settings[field] = self.real(raw, key) if most is None else self.integer(raw, key)
                except ConfigError as error:
                    problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(problems))
        return settings

    def require(self, settings: Mapping[str, Any], fields: Iterable[str]) -> None:
        """Raise ``ConfigError`` that names the keys of ``numbers`` without which some of these fields have no value."""
        wanted = set(fields)
        missing = [key for key, (field, _) in self.numbers.items() if field in wanted and field not in settings]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")

    def integer(self, raw: Mapping[str, Any], key: str) -> int:
        """Return an integer."""
        most = self.numbers[key][1] if key in self.numbers else self.most.get(key)
        value, least, most = raw[key], 0 if key in self.may_be_zero else 1, most or _MOST_OTHERS
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(f"{key}={shown(value)} must be an integer from {least} to {most}")
        return value

    def real(self, raw: Mapping[str, Any], key: str) -> float:
        """Return a real number."""
        value, above = raw[key], 1 if key in self.above_one else _LEAST_REAL
        if type(value) not in (int, float) or not above < value <= _MOST_REAL:
            raise ConfigError(f"{key}={shown(value)} must be a number above {above} and at most {_MOST_REAL:g}")
        return float(value)


def check_fixed(prefix: str, fixed: Mapping[str, object], raw: Mapping[str, Any], whose: str) -> None:
    """Raise ``UnsupportedError`` if a key, absent or not, has another value than models of ``whose`` family always have."""
    for key, value in fixed.items():
        if raw.get(key) is not None and raw[key] != value:
            raise UnsupportedError(f"{prefix}{key}={shown(raw[key])} is not supported; {whose} has {value!r}")


def token_id(raw: Mapping[str, Any], key: str, vocab_size: int, *, default: int) -> int | None:
    """Return an id, the first one of a list; an explicit null means none."""
    value = raw.get(key, default)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ConfigError(f"{key}={shown(value)} must be a token id below vocab_size={vocab_size}, a list of them, or null")
    return ids[0] if ids else None


def mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object; an empty one for null."""
    value = {} if raw.get(key) is None else raw[key]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={shown(value)} must be an object")
    return value


def list_of(raw: Mapping[str, Any], key: str, kind: type) -> list[Any] | None:
    """Return a list of values of one type; ``None`` for null."""
    value = raw.get(key)
    if value is not None and not (isinstance(value, list | tuple) and all(type(item) is kind for item in value)):
        raise ConfigError(f"{key}={shown(value)} must be a list of {kind.__name__}")
    return None if value is None else list(value)
