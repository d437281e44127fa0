"""How tokens are guessed ahead: what ``EngineConfig.speculative`` takes. Guesses change speed and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from dsv4lite.errors import ConfigError

MAX_DRAFTS = 16
"""Most guesses in a row, by whomever; each costs a copy of every sequence's accumulators."""


@dataclass(frozen=True, slots=True)
class MTP:
    """Guess with the model's own multi-token prediction block.

    Attributes:
        k: Guesses in a row, 1 to 4; all but the first are chained, each on the one before.
    """

    k: int = 1
    most: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_length("MTP", self.k, self.most)


@runtime_checkable
class Speculator(Protocol):
    """What guesses tokens on the host; users may supply their own.

    Methods are called in the engine's thread, between two steps, so they must not take long. What a method raises, or a guess that
    is no token of the vocabulary, ends guessing for that request and nothing else.
    """

    k: int
    """Most guesses in a row."""

    def propose(self, sequence_id: int, token_ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Guess what follows.

        Args:
            sequence_id: Of one completion, unique in the engine's life.
            token_ids: Its prompt and completion so far; read only, and valid only during the call.
            max_drafts: Most guesses wanted, at least 1.

        Returns:
            The guesses, in order; none if there is nothing to go by.
        """
        ...

    def forget(self, sequence_id: int) -> None:
        """Drop what is kept of a sequence: it ended. Called once, and for sequences that were never asked about, too."""
        ...


Drafter = MTP | Speculator


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Who guesses in an engine, once its checkpoint is known.

    Attributes:
        mtp: Guesses in a row of the model's MTP block; 0 without.
        speculators: Those on the host, the first one first.
    """

    mtp: int = 0
    speculators: tuple[Speculator, ...] = ()

    @property
    def max_drafts(self) -> int:
        """Most guesses of one run."""
        return max([self.mtp, *(speculator.k for speculator in self.speculators)])


def check_length(name: str, k: object, most: int) -> None:
    """Raise ConfigError unless ``k`` is an integer from 1 to ``most``."""
    if type(k) is not int or not 1 <= k <= most:
        raise ConfigError(f"{name}: k={k!r} must be an integer from 1 to {most}")


def check_speculative(value: object) -> tuple[Drafter, ...]:
    """Return the drafters that a setting names, the first one first; ``"auto"`` and ``None`` name none.

    Raises:
        ConfigError: It is not what ``EngineConfig.speculative`` takes.
    """
    if value is None or value == "auto":
        return ()
    drafters = value if isinstance(value, tuple) else (value,)
    for drafter in drafters:
        if isinstance(drafter, type) or not isinstance(drafter, MTP | Speculator):
            raise ConfigError(
                f"speculative={value!r} must be MTP(k), an object with the methods of Speculator, a tuple of these, 'auto' or None"
            )
        check_length(type(drafter).__name__, drafter.k, MAX_DRAFTS)
    if not drafters or sum(isinstance(drafter, MTP) for drafter in drafters) > 1:
        raise ConfigError(f"speculative={value!r} must name at least one drafter, and each kind of the model's own once")
    return drafters
