"""How many tokens a step gains by the number of drafts: how often drafts are accepted, by position; older steps count less.

A drafter that was left out for a while has forgotten what was said meanwhile, and is accepted less often until it has seen some
tokens again.  That is known to be so, and allowed for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

# What a drafter is accepted that has seen r tokens, over one that has seen all: 1 - a / (1 + r / b), ``a`` at first.  The shipped
# checkpoint's MTP block: 0.70, 0.82, 0.88, 0.94 and 0.98 with 1, 8, 16, 32 and 64 of 128.  With a gap of 4, 8, 16 and 32 tokens
# before the latest it has 0.98, 0.96, 0.92 and 0.85: as if it had seen fewer, by the same share for each that it missed.
_FORGOTTEN, _RECALLED = 0.3, 10.0
_FORGOTTEN_TRUST = 10.0  # forgotten drafts that the first belief outweighs
_WINDOW, _KNOWS = 128.0, 48.0  # tokens that it looks back, and from which on it counts as one that has seen all
_KEPT = 0.92
_SAMPLES = 512.0  # drafts that acceptance remembers, but of
_STEPS = (16.0, 256.0)  # at least and at most so many steps
_FIRST_ACCEPTANCE, _TRUST = 0.7, 2.0  # what is believed before there are measurements, and how many it outweighs
_CONFIDENCE = 2.0  # standard deviations to what it is at most


@dataclass(slots=True)
class _Recall:
    """How much worse a drafter is that has seen only the latest tokens, by its first drafts; counts fade.

    Attributes:
        seen: Tokens that it may count on: as good as if it had seen only the latest ones.
        early, early_right: Drafts of one that had not seen all, and how many of them were accepted.
        forgotten: Share of the former that would be lost if all were the worst.
        late, late_right: Of one that had.
    """

    seen: float = _WINDOW
    early: float = 0.0
    early_right: float = 0.0
    forgotten: float = 0.0
    late: float = 0.0
    late_right: float = 0.0

    def share(self) -> float:
        """Return the acceptance over that of a drafter that has seen all."""
        full = self.late_right / self.late if self.late else 0.0
        lost = _FORGOTTEN * _FORGOTTEN_TRUST + max(0.0, full * self.early - self.early_right)
        worst = lost / (_FORGOTTEN_TRUST + full * self.forgotten)
        return 1 - worst / (1 + self.seen / _RECALLED)

    def learn(self, drafts: int, right: int, keep: float) -> None:
        """Take note of first drafts."""
        if self.seen >= _KNOWS:
            self.late, self.late_right = keep * self.late + drafts, keep * self.late_right + right
        else:
            self.early, self.early_right = keep * self.early + drafts, keep * self.early_right + right
            self.forgotten = keep * self.forgotten + drafts / (1 + self.seen / _RECALLED)


class Acceptance:
    """The chance of each draft to be accepted if those before it are; mutable.

    Args:
        max_k: Most tokens to draft.
        forgets: Whether a drafter is worse for a while after steps that it was left out of.

    Attributes:
        tokens: That a sequence gains in a step, as expected, by k.
    """

    def __init__(self, max_k: int, *, forgets: bool) -> None:
        self._forgets = forgets
        self._recall = _Recall()
        self._accepted = [0.0] * max_k
        self._reached = [0.0] * max_k
        self.tokens = _tokens(self.chances())

    def learn(self, num_sequences: int, accepted: Sequence[int]) -> None:
        """Take note of the drafts of a step.

        Args:
            num_sequences: That could have some.
            accepted: By position, the sequences whose draft there was accepted.
        """
        keep = 1 - 1 / min(max(_SAMPLES / num_sequences, _STEPS[0]), _STEPS[1])
        reached = float(num_sequences)
        if self._forgets:
            self._recall.seen = min(_WINDOW, self._recall.seen + 1)
            reached *= self._recall.share()
            self._recall.learn(num_sequences, accepted[0], keep)
        for position, count in enumerate(accepted):
            self._accepted[position] = keep * self._accepted[position] + count
            self._reached[position] = keep * self._reached[position] + reached
            reached = count
        self.tokens = _tokens(self.chances())

    def miss(self, steps: int) -> None:
        """Take note of steps that the drafter had no part in."""
        self._recall.seen *= _KEPT**steps

    def chances(self) -> list[float]:
        """Return the chances by position; where no draft was made, that of the one before."""
        out, belief = [], _FIRST_ACCEPTANCE
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            belief = min(1.0, (accepted + _TRUST * belief) / (reached + _TRUST))
            out.append(belief)
        return out

    def most_tokens(self) -> list[float]:
        """Return what ``tokens`` is at most, as far as drafts were made."""
        most = []
        for chance, reached in zip(self.chances(), self._reached, strict=True):
            room = (chance * (1 - chance) + 1 / (reached + 1)) / (reached + 1)
            most.append(min(1.0, chance + _CONFIDENCE * sqrt(room)))
        return _tokens(most)


def _tokens(chances: Sequence[float]) -> list[float]:
    """Return the tokens that a sequence gains in a step, by k."""
    out, survival = [1.0], 1.0
    for chance in chances:
        survival *= chance
        out.append(out[-1] + survival)
    return out
