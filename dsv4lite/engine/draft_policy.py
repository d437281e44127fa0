"""How many tokens to draft: as many as gain the most tokens per second, learned from the steps themselves.

A step of R sequences with k drafts each takes T(R, k) seconds and gains R (1 + s_1 + ... + s_k) tokens, where s_i is the chance
that the first i drafts are accepted.  Both are measured:

acceptance   by position, of the sequences whose drafts before it were accepted; older steps count less
cost         by number of sequences, in classes of half octaves, and k.  Steps of one class differ in length for many reasons
             (contexts grow, others use the machine); what moves the k in use moves the others with it, so that k is judged by
             ratios.  What was never measured is taken from the nearest class that has it.

The k in use changes when what it lost against a better one, beyond a margin, adds up to some steps: at once if much is lost, late
if little is, and hardly ever for noise about nothing.  Other k are tried now and then, as often as what a try loses allows: below
``EXPLORATION`` of all time, after a few steps that each class is granted at its start.  What cannot pay, even if as many drafts
were accepted as the measured ones allow at most, is tried half as often each time that this is found again.

A step costs what it costs only among steps with the same k: drafts are made a step before they run, and steps without any are
planned ahead.  So a try goes on until there were such steps, and the steps on the way to it and back count as what the try lost.

A drafter that was left out for a while has forgotten what was said meanwhile, and is accepted less often until it has seen some
tokens again.  That is known to be so, and allowed for.

Time comes in as an argument: the same observations lead to the same decisions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt

EXPLORATION = 0.0075
"""Share of all time that trying other k may lose."""

_GRANTED_STEPS = 1.0  # that each of the first tries may lose at once
_MARGIN = 0.005  # gain that does not count
_PATIENCE = 2.0  # steps lost, beyond the margin, before the k in use changes
_PAUSE = 4  # steps between two tries, and between two looks at what is known well
_TRIES = 3  # measurements of a k before it can be chosen
_TRY_STEPS, _TRY_DRAFTS = (2, 8), 32  # measurements of a try: at least and at most, and as many as give so many first drafts
_LONGEST_WAY = 6  # steps to the first measurement of a try
_MOST_DOUBTS = 3  # times that what waits for its next try is doubled
_CONFIDENCE = 2.0  # standard deviations to what acceptance is at most
# What a drafter is accepted that has seen r tokens, over one that has seen all: 1 - a / (1 + r / b), ``a`` at first.  The shipped
# checkpoint's MTP block: 0.70, 0.82, 0.88, 0.94 and 0.98 with 1, 8, 16, 32 and 64 of 128.  With a gap of 4, 8, 16 and 32 tokens
# before the latest it has 0.98, 0.96, 0.92 and 0.85: as if it had seen fewer, by the same share for each that it missed.
_FORGOTTEN, _RECALLED = 0.3, 10.0
_FORGOTTEN_TRUST = 10.0  # forgotten drafts that the first belief outweighs
_WINDOW, _KNOWS = 128.0, 48.0  # tokens that it looks back, and from which on it counts as one that has seen all
_KEPT = 0.92
_DETOUR_MEMORY = 4  # tries that what others lose on the way remembers
_SAMPLES = 512.0  # drafts that acceptance remembers, but of
_STEPS = (16.0, 256.0)  # at least and at most so many steps
_FIRST = 5  # measurements of a k of which the middle one counts: some do what is done once
_COST_MEMORY = (32, 128)  # measurements that the cost of a k remembers: one that is tried, and the one in use
_FEW = 16  # measurements that may mislead: until then what the nearest class says of a cost may be true
_LEVEL_GAIN = 1 / 16  # how fast all costs of a class follow the one that is measured
_SURPRISE = 0.7  # log of the largest deviation that is believed at once
_FIRST_ACCEPTANCE, _TRUST = 0.7, 2.0  # what is believed before there are measurements, and how many it outweighs
_LARGEST_CLASS = 1 << 14
_CLASSES = tuple(sorted(size << octave for octave in range(14) for size in (2, 3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftClass:
    """What is known of steps with about so many sequences.

    Attributes:
        num_sequences: Most sequences of the class.
        k: In use.
        seconds: Of a step, by k; ``None`` where it was never measured.
        steps: Steps measured, by k.
        gains: Tokens per second over those of the k in use, by k, as expected.
        most_gains: The same at most, as far as was measured: if more drafts are accepted, and steps are shorter.
    """

    num_sequences: int
    k: int
    seconds: tuple[float | None, ...]
    steps: tuple[int, ...]
    gains: tuple[float, ...]
    most_gains: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftState:
    """What a policy knows and has done.

    Attributes:
        acceptance: By position, the chance that a draft is accepted if those before it are.
        classes: By number of sequences, ascending.
        changes: How often the k in use of a class changed.
        tries: Steps with another k than the one in use.
        seconds: Of all steps.
        lost_seconds: What the tries lost of it, as far as known.
    """

    acceptance: tuple[float, ...]
    classes: tuple[DraftClass, ...]
    changes: int
    tries: int
    seconds: float
    lost_seconds: float


@dataclass(slots=True)
class _Class:
    """Steps with about the same number of sequences; lists are by k."""

    size: int
    k: int
    first: list[list[float]]  # logarithms of the seconds of the first steps, ascending
    cost: list[float]  # logarithm of the seconds
    steps: list[int]
    tried: list[int]  # when, in steps of the class
    detour: list[float]  # steps lost on the way to a try of k and back
    doubts: list[int]  # how often in a row a try of k found that it cannot pay
    regret: list[float] = field(default_factory=list)
    noise: float = 0.0  # mean square of the logarithm of a step's seconds over the expected ones
    now: int = 0
    last_try: int = 0  # its end


@dataclass(slots=True)
class _Try:
    """A try: of which k, how many steps and measurements it may still have, and what was lost on its ways."""

    k: int
    steps: int
    measurements: int
    lost: float = 0.0
    measured: bool = False


@dataclass(slots=True)
class _Recall:
    """How much worse a drafter is that has seen only the latest tokens, by its first drafts; counts fade.

    Attributes:
        early, early_right: Drafts of one that had not seen all, and how many of them were accepted.
        forgotten: Share of the former that would be lost if all were the worst.
        late, late_right: Of one that had.
    """

    early: float = 0.0
    early_right: float = 0.0
    forgotten: float = 0.0
    late: float = 0.0
    late_right: float = 0.0

    def share(self, seen: float) -> float:
        """Return the acceptance of a drafter that has seen so many tokens, over that of one that has seen all."""
        full = self.late_right / self.late if self.late else 0.0
        lost = _FORGOTTEN * _FORGOTTEN_TRUST + max(0.0, full * self.early - self.early_right)
        worst = lost / (_FORGOTTEN_TRUST + full * self.forgotten)
        return 1 - worst / (1 + seen / _RECALLED)

    def learn(self, seen: float, drafts: int, right: int, keep: float) -> None:
        """Take note of first drafts."""
        if seen >= _KNOWS:
            self.late, self.late_right = keep * self.late + drafts, keep * self.late_right + right
        else:
            self.early, self.early_right = keep * self.early + drafts, keep * self.early_right + right
            self.forgotten = keep * self.forgotten + drafts / (1 + seen / _RECALLED)


class DraftPolicy:
    """Chooses k for every step, and learns from it."""

    def __init__(self, max_k: int, *, forgets: bool = False) -> None:
        """Know nothing.

        Args:
            max_k: Most tokens to draft.
            forgets: Whether a drafter is worse for a while after steps that it was left out of.
        """
        assert max_k >= 1
        self.max_k = max_k
        self._forgets = forgets
        self._seen = _WINDOW  # tokens that a drafter may count on: as good as if it had seen only the latest ones
        self._accepted = [0.0] * max_k
        self._reached = [0.0] * max_k
        self._expected = self._tokens(self._acceptance())
        self._recall = _Recall()
        self._classes: dict[int, _Class] = {}
        self._try: _Try | None = None  # the last one
        self._changes = self._tries = 0
        self._seconds = self._lost = 0.0

    def choose(self, num_sequences: int) -> int:
        """Return the number of tokens to draft for each sequence of the next step; 0 is not to draft."""
        here = self._class(num_sequences)
        here.now += 1
        k = self._choose(here)
        if self._forgets:
            self._seen = min(_WINDOW, self._seen + 1) if k else self._seen * _KEPT
        return k

    def _choose(self, here: _Class) -> int:
        last = self._try
        if last is not None and last.measurements and last.steps:
            last.steps -= 1
            here.last_try = here.now
            return last.k
        candidate = self._candidate(here)
        if candidate is None:
            return here.k
        if last is not None and last.measured:
            here.detour[last.k] += (last.lost - here.detour[last.k]) / _DETOUR_MEMORY
        if here.steps[candidate]:
            hopeless = self._most_gains(here)[candidate] < 1
            here.doubts[candidate] = min(here.doubts[candidate] + 1, _MOST_DOUBTS) if hopeless else 0
        measurements = self._measurements(here, candidate)
        self._try = _Try(candidate, _LONGEST_WAY + 2 * measurements, measurements)
        here.last_try = here.tried[candidate] = here.now
        self._tries += 1
        return candidate

    def observe(self, num_sequences: int, k: int, seconds: float | None, accepted: Sequence[int]) -> None:
        """Learn from a step that came behind one with the same k.

        Args:
            num_sequences: How many it continued.
            k: Tokens that could be drafted for each; a drafter may have had fewer.
            seconds: From its start to its end; ``None`` if it did anything else, too.
            accepted: By position, the sequences whose draft there was accepted.
        """
        assert 0 <= k <= self.max_k and len(accepted) == k and (seconds is None or seconds > 0)
        if accepted:
            self._learn_acceptance(num_sequences, accepted)
        under_way = self._try if self._try is not None and self._try.k == k and self._try.measurements else None
        if under_way is not None:
            under_way.measured = True
            under_way.measurements -= 1
        if seconds is None:
            return
        here = self._class(num_sequences)
        self._seconds += seconds
        known = k == here.k and here.steps[k] >= _COST_MEMORY[True]
        if known and here.now % _PAUSE:  # a look takes the host its time
            return
        self._learn_cost(here, k, log(seconds))
        if under_way is not None and here.steps[k] >= _TRIES and self._most_gains(here)[k] < 1:
            under_way.measurements = 0
        if k != here.k:
            self._count_lost(here, seconds, self._expected[k])
        self._decide(here, _PAUSE if known else 1)

    def observe_detour(self, num_sequences: int, seconds: float, tokens: float) -> None:
        """Take note of a step behind one with another k, of which nothing can be learned.

        Args:
            num_sequences: How many it continued.
            seconds: From its start to its end.
            tokens: That each of them gained.
        """
        here = self._class(num_sequences)
        self._seconds += seconds
        if not here.steps[here.k]:
            return
        lost = self._count_lost(here, seconds, tokens)
        if self._try is not None:
            self._try.lost += lost

    def _count_lost(self, here: _Class, seconds: float, tokens: float) -> float:
        """Count what a step that tokens of each sequence came of lost against the k in use; return it in steps."""
        step = exp(self._cost(here, here.k))
        lost = seconds / step - tokens / self._expected[here.k]
        self._lost += lost * step
        return lost

    def snapshot(self) -> DraftState:
        """Return what is known and was done."""
        return DraftState(
            acceptance=tuple(self._acceptance()),
            classes=tuple(
                DraftClass(
                    num_sequences=size,
                    k=found.k,
                    seconds=tuple(exp(c) if n else None for c, n in zip(found.cost, found.steps, strict=True)),
                    steps=tuple(found.steps),
                    gains=tuple(self._gains(found, self._expected)),
                    most_gains=tuple(self._most_gains(found)),
                )
                for size, found in sorted(self._classes.items())
            ),
            changes=self._changes,
            tries=self._tries,
            seconds=self._seconds,
            lost_seconds=self._lost,
        )

    # ----------------------------------------------------------------------------------------------------------- learning

    def _class(self, num_sequences: int) -> _Class:
        size = num_sequences if num_sequences < 2 else _CLASSES[bisect_left(_CLASSES, min(num_sequences, _LARGEST_CLASS))]
        found = self._classes.get(size)
        if found is None:
            ks = self.max_k + 1
            found = _Class(size, 1, [[] for _ in range(ks)], [0.0] * ks, [0] * ks, [0] * ks, [0.0] * ks, [0] * ks, [0.0] * ks)
            others = self._nearest(size)
            self._classes[size] = found
            if others:  # until it is measured, it is taken for its neighbour
                found.k = max(range(ks), key=self._gains(others[0], self._expected).__getitem__)
        return found

    def _nearest(self, size: int) -> list[_Class]:
        """Return the other classes, the nearest first."""
        sizes = sorted((s for s in self._classes if s != size), key=lambda s: abs(log(s / size)))
        return [self._classes[s] for s in sizes if any(self._classes[s].steps)]

    def _learn_acceptance(self, num_sequences: int, accepted: Sequence[int]) -> None:
        memory = min(max(_SAMPLES / num_sequences, _STEPS[0]), _STEPS[1])
        reached = num_sequences * self._recall.share(self._seen)
        self._recall.learn(self._seen, num_sequences, accepted[0], 1 - 1 / memory)
        for position, count in enumerate(accepted):
            keep = 1 - 1 / memory
            self._accepted[position] = keep * self._accepted[position] + count
            self._reached[position] = keep * self._reached[position] + reached
            reached = count
        self._expected = self._tokens(self._acceptance())

    def _learn_cost(self, here: _Class, k: int, cost: float) -> None:
        steps = here.steps[k]
        here.tried[k] = here.now
        if steps == 0:
            here.cost[k] = cost
        here.steps[k] += 1
        surprise = max(-_SURPRISE, min(_SURPRISE, cost - here.cost[k]))
        here.noise += (surprise * surprise - here.noise) / max(1, min(sum(here.steps) - 1, _COST_MEMORY[0]))
        if steps >= _TRIES:
            for other, measured in enumerate(here.steps):
                if measured:
                    here.cost[other] += _LEVEL_GAIN * surprise
        if steps < _FIRST:
            insort(here.first[k], cost)
            here.cost[k] = here.first[k][steps // 2]
        else:
            here.cost[k] += surprise / min(steps + 1, _COST_MEMORY[k == here.k])

    # ---------------------------------------------------------------------------------------------------------- expecting

    def _acceptance(self) -> list[float]:
        out, belief = [], _FIRST_ACCEPTANCE
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            belief = min(1.0, (accepted + _TRUST * belief) / (reached + _TRUST))
            out.append(belief)
        return out

    def _most_acceptance(self) -> list[float]:
        """Return what acceptance is at most, as far as drafts were measured."""
        out = []
        for chance, reached in zip(self._acceptance(), self._reached, strict=True):
            room = (chance * (1 - chance) + 1 / (reached + 1)) / (reached + 1)
            out.append(min(1.0, chance + _CONFIDENCE * sqrt(room)))
        return out

    @staticmethod
    def _tokens(acceptance: Sequence[float]) -> list[float]:
        """Return the tokens that a sequence gains in a step, by k."""
        out, survival = [1.0], 1.0
        for chance in acceptance:
            survival *= chance
            out.append(out[-1] + survival)
        return out

    def _cost(self, here: _Class, k: int) -> float:
        """Return the logarithm of the seconds of a step: measured, by the ratio in the nearest class that has it, or guessed."""
        if here.steps[k]:
            return here.cost[k]
        likely = self._likely(here, k)
        if likely is not None:
            return likely
        known = self._known(here, k)
        if len(known) < 2:
            return here.cost[known[0]] if known else 0.0
        near, far = known[:2]
        at, slope = exp(here.cost[near]), (exp(here.cost[near]) - exp(here.cost[far])) / (near - far)
        return log(max(at + slope * (k - near), at / 2))

    @staticmethod
    def _known(here: _Class, k: int) -> list[int]:
        """Return the other lengths that were measured, the nearest first."""
        return sorted((j for j, steps in enumerate(here.steps) if steps and j != k), key=lambda j: abs(j - k))

    def _likely(self, here: _Class, k: int) -> float | None:
        """Return what the nearest class that has it says of a cost."""
        known = self._known(here, k)
        for other in self._nearest(here.size):
            if not other.steps[k]:
                continue
            if not known:
                return other.cost[k]
            for j in known:
                if other.steps[j]:
                    return here.cost[j] + other.cost[k] - other.cost[j]
        return None

    def _least_cost(self, here: _Class, k: int) -> float:
        """Return the cost, or what the nearest class says of it if that is less and few steps speak against it."""
        cost = self._cost(here, k)
        likely = self._likely(here, k) if k != here.k and here.steps[k] < _FEW else None
        return cost if likely is None else min(cost, likely)

    def _doubt(self, here: _Class, k: int) -> float:
        """Return the standard error of the gain of a k that was measured."""
        counts = self._counts(here)
        return sqrt(here.noise * (1 / counts[k] + 1 / counts[here.k]))

    @staticmethod
    def _counts(here: _Class) -> list[int]:
        """Return how many measurements each cost rests on."""
        return [min(steps, _COST_MEMORY[k == here.k]) for k, steps in enumerate(here.steps)]

    def _gains(self, here: _Class, tokens: Sequence[float]) -> list[float]:
        """Return tokens per second over those of the k in use, by k."""
        used = exp(self._cost(here, here.k)) / self._expected[here.k]
        return [count * used * exp(-self._cost(here, k)) for k, count in enumerate(tokens)]

    def _most_gains(self, here: _Class) -> list[float]:
        gains = self._gains(here, self._tokens(self._most_acceptance()))
        room = [exp(_CONFIDENCE * sqrt(here.noise / count)) if count else inf for count in self._counts(here)]
        less = [exp(self._cost(here, k) - self._least_cost(here, k)) for k in range(len(gains))]
        return [gain * more * most for gain, more, most in zip(gains, room, less, strict=True)]

    # ----------------------------------------------------------------------------------------------------------- deciding

    def _decide(self, here: _Class, steps: int) -> None:
        """Add up what the k in use loses against each other one in so many steps; change to the best once it is enough."""
        if here.steps[here.k] < _FIRST:
            return
        gains = self._gains(here, self._expected)
        for k, gain in enumerate(gains):
            if here.steps[k] >= _TRIES:
                here.regret[k] = max(0.0, here.regret[k] + steps * (gain - 1 - _MARGIN - self._doubt(here, k)))
        if max(here.regret) > _PATIENCE:
            here.k = max(range(len(gains)), key=lambda k: gains[k] if here.regret[k] else 0.0)
            here.regret = [0.0] * len(gains)
            self._changes += 1

    def _candidate(self, here: _Class) -> int | None:
        """Return another k that is due for a try: the longer ago it was measured and the less a try loses, the sooner."""
        if here.now % _PAUSE or here.now - here.last_try < _PAUSE or not here.steps[here.k]:
            return None
        gains = self._gains(here, self._expected)
        most, due = 0.0, None
        for k in range(self.max_k + 1):
            lost = self._lost_by(here, k)
            granted = here.steps[k] < _TRIES and lost < _GRANTED_STEPS
            # Each k may lose an equal share of what is allowed; the pause between tries bounds those that lose nothing.
            loss = self._measurements(here, k) * lost + max(0.0, here.detour[k])
            unsure = 0 < here.steps[k] < _FEW and _MARGIN < gains[k] - 1 < _MARGIN + self._doubt(here, k)
            wait = 0.0 if granted or unsure else loss * self.max_k / EXPLORATION * 2 ** here.doubts[k]
            overdue = (here.now - here.tried[k]) / (wait + _PAUSE)
            if k != here.k and overdue >= max(1.0, most):
                most, due = overdue, k
        return due

    def _lost_by(self, here: _Class, k: int) -> float:
        """Return what a step of a try loses, in steps."""
        used = exp(self._least_cost(here, k) - self._cost(here, here.k))
        return max(0.0, used - self._expected[k] / self._expected[here.k])

    def _measurements(self, here: _Class, k: int) -> int:
        """Return how many measurements a try takes: as many as give some drafts, and more where the way there is what loses."""
        least, most = _TRY_STEPS
        drafts = max(least, min(most, _TRY_DRAFTS // here.size))
        return max(drafts, min(most, int(max(0.0, here.detour[k]) / max(self._lost_by(here, k), 1e-3))))
