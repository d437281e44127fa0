"""Every exception that dsv4lite raises on purpose; ``docs/api.md`` has them as a tree.

Abort and deadline are not errors: they are finish reasons. Cancellation of the caller's scope passes unaltered.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4lite.request import RequestOutput


class DSV4LiteError(Exception):
    """Base of all errors of this package. They can be pickled, with their attributes but without their causes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)


class ConfigError(DSV4LiteError, ValueError):
    """A configuration value is unknown, out of range, or contradicts another."""


class UnsupportedError(ConfigError):
    """A combination of features, or of a feature with this model or machine, cannot work."""


class InvalidRequestError(DSV4LiteError, ValueError):
    """A request is malformed.

    Attributes:
        parameter: Name of the offending parameter.
        value: What was given.
    """

    def __init__(self, message: str, *, parameter: str, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested completion exceed the model's or the engine's limit (in tokens)."""

    def __init__(self, message: str, *, length: int, limit: int, parameter: str = "prompt") -> None:
        super().__init__(message, parameter=parameter, value=length)
        self.length = length
        self.limit = limit


class QueueFullError(DSV4LiteError):
    """The bounded queue is full and the caller asked not to wait.

    Attributes:
        limit: ``max_queued_requests``.
        retry_after: Estimated seconds until a place is free.
    """

    def __init__(self, message: str, *, limit: int, retry_after: float) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after = retry_after


class EngineStateError(DSV4LiteError):
    """The engine's state does not allow the call.

    Attributes:
        state: The state it is in.
        allowed: The states in which the call is allowed.
    """

    def __init__(self, message: str, *, state: str, allowed: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.state = state
        self.allowed = tuple(allowed)


class WeightsNotLoadedError(EngineStateError):
    """There are no valid weights to generate with."""


class CheckpointError(DSV4LiteError):
    """A checkpoint is missing something, has something unexpected, or is malformed.

    Attributes:
        problems: One line for every problem that was found, not only the first.
    """

    def __init__(self, message: str, *, problems: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__(message + _listed(self.problems))


def _listed(lines: tuple[str, ...]) -> str:
    shown = [f"\n  - {line}" for line in lines[:40]]
    if len(lines) > 40:
        shown.append(f"\n  … and {len(lines) - 40} more")
    return "".join(shown)


class WeightUpdateError(DSV4LiteError):
    """An update of the weights failed; nothing was published. All lines begin with the name of a tensor.

    Attributes:
        reason: Why, without the lines.
        missing: Tensors that the model needs and the update did not bring.
        unexpected: Tensors that the model does not have, or that came twice.
        mismatched: Tensors of another shape, dtype or kind.
    """

    def __init__(
        self, message: str, *, missing: Iterable[str] = (), unexpected: Iterable[str] = (), mismatched: Iterable[str] = ()
    ) -> None:
        self.reason = message
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)
        super().__init__(message + _listed(self.missing + self.unexpected + self.mismatched))


class CapacityError(DSV4LiteError):
    """The model, or one sequence of the wanted length, does not fit in memory.

    Raised before anything is loaded; while loading, if other programs took memory since; and by ``sleep``, ``wake_up`` and staged
    updates if the host or the device has too little memory left.

    Attributes:
        plan: The ``MemoryPlan`` that did not fit; ``None`` after the start.
        advice: What would make it fit.
    """

    def __init__(self, message: str, *, plan: object = None, advice: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.plan = plan
        self.advice = tuple(advice)


class RequestFailedError(DSV4LiteError):
    """One request failed (its logits were not finite, its settings allow no token, …); the engine serves the others.

    Attributes:
        output: What had been generated until then.
    """

    def __init__(self, message: str, *, output: RequestOutput | None = None) -> None:
        super().__init__(message)
        self.output = output


class EngineDeadError(DSV4LiteError):
    """The engine failed; the original exception is ``__cause__``.

    Attributes:
        rank: Global rank on which it happened.
        phase: What the engine was doing: ``start``, ``load``, ``step``, ``collective``, ``close`` …
    """

    def __init__(self, message: str, *, rank: int = 0, phase: str = "step") -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase

    def copy(self) -> EngineDeadError:
        """Return an equal error for one more caller: a shared exception would gather the tracebacks of all callers."""
        error = EngineDeadError(str(self), rank=self.rank, phase=self.phase)
        error.__cause__ = self.__cause__ or self
        return error


def _restore(kind: type[DSV4LiteError], args: tuple[Any, ...], state: dict[str, Any]) -> DSV4LiteError:
    """Make a pickled error without its constructor, whose arguments are no longer known; ``state`` has the attributes."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


def near_match(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or an empty string."""
    if not isinstance(name, str):
        return ""
    close = get_close_matches(name[:100], list(known), n=1, cutoff=0.6)  # comparing takes the square of the length
    return f"; did you mean {close[0]!r}?" if close else ""


def described(error: BaseException) -> str:
    """Return the type and the text of an exception, as in ``KeyError: 'x'``. It never raises, even if ``__str__`` does."""
    try:
        text = str(error)
    except Exception:
        text = "<its text cannot be read: __str__ raised>"
    return f"{type(error).__name__}: {text}"


def shown(value: object) -> str:
    """Return the ``repr`` of a value for an error's message, shortened. It never raises, whatever a caller gave."""

    def integer(x: int, level: int) -> str:
        """Python refuses to print integers of more than 4,300 digits."""
        return repr(x) if x.bit_length() <= 128 else f"<an integer of {x.bit_length()} bits>"

    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 4, 100, 100
    short.maxlist = short.maxtuple = short.maxdict = 8
    short.repr_int = integer  # type: ignore[method-assign]
    return short.repr(value)
