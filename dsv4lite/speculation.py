"""How tokens are guessed ahead: what ``EngineConfig.speculative`` takes. Guesses change speed and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from dsv4lite.errors import ConfigError

MAX_DRAFTS = 16
"""Most guesses in a row, by whomever; each costs a copy of every sequence's accumulators."""


@dataclass(frozen=True, slots=True)
class MTP:
    """Guess with the model's own multi-token prediction block.

    Attributes:
        k: Most guesses in a row, 1 to 4; all but the first are chained, each on the one before.
        adaptive: Guess less, or not at all, where it does not pay: by what guesses and steps were measured to bring and to cost.
    """

    k: int = 1
    adaptive: bool = field(default=True, repr=False, kw_only=True)
    most: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_length("MTP", self.k, self.most)


@dataclass(frozen=True, slots=True)
class DSpark:
    """Guess with the block drafter of refreshed releases, all guesses in one pass.

    Attributes:
        k: Guesses in a row, at most the rows of the drafter's block, which is 5 in the releases.
        min_confidence: Guesses from the first one on whose chance to hold, as the drafter sees it, is lower are left out; 0 keeps
            all.
        adaptive: As in ``MTP``.
    """

    k: int = 5
    min_confidence: float = 0.0
    adaptive: bool = field(default=True, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_length("DSpark", self.k, MAX_DRAFTS)
        if not isinstance(self.min_confidence, int | float) or not 0 <= self.min_confidence < 1:
            raise ConfigError(f"DSpark: min_confidence={self.min_confidence!r} must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class NGram:
    """Guess, on the host, that text repeats itself: what followed the last tokens when they stood together before.

    Attributes:
        k: Guesses in a row.
        min_n: Fewest tokens that must have stood together before.
        max_n: Most tokens that are compared; the longest match decides, of equally long ones the latest.
        lookback: How many of the latest tokens are searched. Host memory per sequence: about 250 bytes for each of them and each
            length, at most; 6 MB by default.
        adaptive: As in ``MTP``.
    """

    k: int = 4
    min_n: int = 2
    max_n: int = 4
    lookback: int = 8192
    adaptive: bool = field(default=True, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_length("NGram", self.k, MAX_DRAFTS)
        for name, least, most in (("min_n", 1, 16), ("max_n", self.min_n, 16), ("lookback", 1, 1 << 20)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"NGram: {name}={value!r} must be an integer from {least} to {most}")


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


Drafter = MTP | DSpark | NGram | Speculator


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Who guesses in an engine, once its checkpoint is known.

    Attributes:
        own: The model's own drafter.
        speculators: Those on the host, the first one first.
        adaptive: Whether to guess less where it does not pay.
    """

    own: MTP | DSpark | None = None
    speculators: tuple[Speculator, ...] = ()
    adaptive: bool = False

    @property
    def max_drafts(self) -> int:
        """Most guesses of one run."""
        return max([0 if self.own is None else self.own.k, *(speculator.k for speculator in self.speculators)])


def adapts(drafters: Sequence[Drafter], own: MTP | DSpark | None) -> bool:
    """Return whether any of the drafters leaves it to the engine how far to guess."""
    return any(drafter.adaptive for drafter in (own, *drafters) if isinstance(drafter, MTP | DSpark | NGram))


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
        if isinstance(drafter, type) or not isinstance(drafter, MTP | DSpark | NGram | Speculator):
            raise ConfigError(
                f"speculative={value!r} must be MTP(k), DSpark(k), NGram(k), an object with the methods of Speculator, a tuple of "
                "these, 'auto' or None"
            )
        check_length(type(drafter).__name__, drafter.k, MAX_DRAFTS)
    if not drafters or sum(isinstance(drafter, MTP | DSpark) for drafter in drafters) > 1:
        raise ConfigError(f"speculative={value!r} must name at least one drafter, and at most one of the model's own")
    return drafters
