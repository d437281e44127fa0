"""How many tokens to draft: as many as gain the most tokens per second, learned from the steps themselves.

A step of R sequences with k drafts each takes T(R, k) seconds and gains R (1 + s_1 + ... + s_k) tokens, where s_i is the chance
that the first i drafts are accepted.  Both are measured:

acceptance   by position (``Acceptance``)
cost         by number of sequences, in classes of half octaves, and k, as a ratio to the k in use: whatever makes steps longer
             (contexts grow, others use the machine) moves all of them.  What a class never measured it takes from what steps took
             before there was traffic (``StepCosts``), else from the nearest class that has it

Decisions are for stretches of steps with the same k, each timed by its two ends.  The k in use changes when what it lost against
a better one, beyond a margin and beyond doubt, adds up to some steps: at once if much is lost, late if little is, and hardly ever
for noise about nothing.  Other k are tried now and then, as often as what a try loses, the steps on the way there and back
included, allows: below ``EXPLORATION`` of all time.  Each class has a first try of every k at its start, except of those that
could not pay if all drafts were accepted.  What is found not to pay, even at best, is tried half as often each time.

Time comes in as an argument: the same observations lead to the same decisions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt

from dsv4lite.speculation.draft_acceptance import Acceptance

EXPLORATION = 0.0075
"""Share of all time that trying other k may lose."""
STRETCH = 32
"""Steps between two decisions."""

_FIRST_STRETCHES = 8  # steps, of so many measured ones at the start of a class
_MARGIN = 0.005  # gain that does not count
_PATIENCE = 1.0  # steps lost, beyond the margin, before the k in use changes
_TRY_STEPS = (6, STRETCH)  # steps of a try, at least and at most
_WAY, _WAY_MEMORY, _LONGEST_WAY = 2.0, 4, 6.0  # steps lost on the way to a try and back, at first; tries remembered; at most
_MOST_DOUBTS = 3  # times that what waits for its next try is doubled
_CONFIDENCE = 2.0  # standard deviations to what cost is at best
_BELIEF_ERROR = 0.05  # of a ratio that is believed, not measured
_LEVEL_MEMORY, _NOISE_MEMORY = 4, 16  # stretches
_COST_MEMORY = 256  # steps that a ratio remembers
_FEW = 48  # steps that may mislead
_SURPRISE = 0.7  # log of the largest deviation that is believed at once
_LARGEST_CLASS = 1 << 14
_CLASSES = (1, *sorted(size << octave for octave in range(14) for size in (2, 3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What steps took of the device before there was traffic.

    Attributes:
        seconds: By number of sequences, ascending, and k.
    """

    seconds: Mapping[int, tuple[float, ...]]

    def of(self, num_sequences: int) -> tuple[float, ...]:
        """Return the seconds of a step by k, on the line through the two numbers of sequences around it, or below it."""
        sizes = list(self.seconds)
        at = max(1, min(bisect_left(sizes, num_sequences), len(sizes) - 1))
        low, high = sizes[at - 1], sizes[min(at, len(sizes) - 1)]
        share = max(0.0, (num_sequences - low) / max(1, high - low))
        return tuple(a + share * max(0.0, b - a) for a, b in zip(self.seconds[low], self.seconds[high], strict=True))

    def __str__(self) -> str:
        return "; ".join(
            f"{', '.join(f'{1e3 * each:.2f}' for each in times)} ms with {size} sequences and 0 to {len(times) - 1} guesses"
            for size, times in self.seconds.items()
        )


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
        classes: By number of sequences, ascending; each as it was when it was last in use.
        changes: How often the k in use of a class changed.
        tries: Stretches with another k than the one in use.
        seconds: Of all steps that were timed.
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
    ratio: list[float]  # logarithm of the seconds of a step over those with the k in use
    belief: list[float]  # likewise, by others
    steps: list[int]  # measured
    tried: list[int]  # when, in steps of the class
    doubts: list[int]  # how often in a row a try of k found that it cannot pay
    regret: list[float]
    device: tuple[float, ...] | None  # seconds of a step before there was traffic
    level: float | None = None  # logarithm of the seconds of a step with the k in use
    noise: float = 0.0  # mean square of the logarithm of one step's seconds over the expected ones
    stretches: int = 0  # with the k in use
    now: int = 0
    view: DraftClass | None = None  # until something changes


class DraftPolicy:
    """Chooses k for every stretch of steps, and learns from it.

    Args:
        max_k: Most tokens to draft.
        forgets: Whether a drafter is worse for a while after steps that it was left out of.
        costs: What is known of steps beforehand.
    """

    def __init__(self, max_k: int, *, forgets: bool = False, costs: StepCosts | None = None) -> None:
        assert max_k >= 1
        self.max_k = max_k
        self._costs = costs
        self._acceptance = Acceptance(max_k, forgets=forgets)
        self._classes: dict[int, _Class] = {}
        self._way = _WAY
        self._returns = False  # from a try
        self._changes = self._tries = 0
        self._seconds = self._lost = 0.0

    def choose(self, num_sequences: int, *, may_try: bool = True) -> tuple[int, int]:
        """Decide about the steps to come.

        Args:
            num_sequences: That they continue.
            may_try: Whether another k than the one in use may be tried.

        Returns:
            The number of tokens to draft for each sequence, 0 not to draft, and of how many steps that holds.
        """
        here = self._class(num_sequences)
        self._believe(here)
        candidate = self._candidate(here) if may_try and not self._returns else None
        self._returns = candidate is not None
        if candidate is None:
            return here.k, STRETCH if here.stretches >= _FIRST_STRETCHES else STRETCH // 4
        here.tried[candidate] = here.now
        self._tries += 1
        return candidate, self._try_steps(here, candidate)

    # ----------------------------------------------------------------------------------------------------------- learning

    def learn(self, num_sequences: int, accepted: Sequence[int]) -> None:
        """Learn from the drafts of a step; see ``Acceptance.learn``."""
        self._acceptance.learn(num_sequences, accepted)

    def observe(self, num_sequences: int, k: int, steps: int, seconds: float | None) -> None:
        """Learn from a stretch of steps with the same k, that came behind others with it.

        Args:
            num_sequences: How many they continued.
            k: Tokens that could be drafted for each; a drafter may have had fewer.
            steps: How many.
            seconds: From their start to their end; ``None`` if they did anything else, too.
        """
        assert 0 <= k <= self.max_k and steps > 0 and (seconds is None or seconds > 0)
        here = self._class(num_sequences)
        here.now += steps
        here.view = None
        if not k:
            self._acceptance.miss(steps)
        if seconds is None:
            return
        self._seconds += seconds
        if k == here.k:
            self._learn_level(here, steps, log(seconds / steps))
        elif here.level is not None:
            self._learn_ratio(here, k, steps, log(seconds / steps) - here.level)
            used = exp(here.level)
            self._lost += seconds - steps * used * self._acceptance.tokens[k] / self._acceptance.tokens[here.k]
        self._decide(here, steps)

    def observe_way(self, num_sequences: int, steps: int, seconds: float) -> None:
        """Take note of the steps on the way from one k to another, of which nothing else can be learned."""
        here = self._class(num_sequences)
        here.now += steps
        self._seconds += seconds
        if here.level is not None:
            lost = seconds / exp(here.level) - steps / self._acceptance.tokens[here.k]
            self._lost += lost * exp(here.level)
            self._way += (2 * max(0.0, min(lost, _LONGEST_WAY / 2)) - self._way) / _WAY_MEMORY

    def _class(self, num_sequences: int) -> _Class:
        size = _CLASSES[bisect_left(_CLASSES, min(num_sequences, _LARGEST_CLASS))]
        found = self._classes.get(size)
        if found is None:
            ks = self.max_k + 1
            device = None if self._costs is None else self._costs.of(size)
            found = _Class(size, 1, [0.0] * ks, [0.0] * ks, [0] * ks, [0] * ks, [0] * ks, [0.0] * ks, device)
            self._classes[size] = found
            self._believe(found)
            if any(found.ratio):
                self._use(found, max(range(ks), key=self._gains(found).__getitem__))
        return found

    def _believe(self, here: _Class) -> None:
        """Take what steps take, where the class itself has measured few of them, from elsewhere."""
        for k, steps in enumerate(here.steps):
            if steps >= _FEW or k == here.k:
                continue
            if here.device is not None:
                here.belief[k] = log(here.device[k] / here.device[here.k])
            else:
                others = [o for o in self._classes.values() if o is not here and o.steps[k] and o.steps[here.k]]
                near = min(others, key=lambda o: abs(log(o.size / here.size)), default=here)
                here.belief[k] = near.ratio[k] - near.ratio[here.k]
            if not steps:
                here.ratio[k] = here.belief[k]

    def _learn_level(self, here: _Class, steps: int, cost: float) -> None:
        here.stretches += 1
        here.steps[here.k] += steps
        if here.level is None:
            here.level = cost
            return
        surprise = max(-_SURPRISE, min(_SURPRISE, cost - here.level))
        here.noise += (steps * surprise * surprise - here.noise) / min(here.stretches, _NOISE_MEMORY)
        here.level += surprise / min(here.stretches, _LEVEL_MEMORY)

    def _learn_ratio(self, here: _Class, k: int, steps: int, ratio: float) -> None:
        before = here.steps[k]
        here.steps[k] += steps
        if not before:
            here.ratio[k] = max(-2 * _SURPRISE, min(2 * _SURPRISE, ratio))
        else:
            surprise = max(-_SURPRISE, min(_SURPRISE, ratio - here.ratio[k]))
            here.ratio[k] += surprise * steps / min(before + steps, _COST_MEMORY)
        hopeless = self._most_gains(here)[k] < 1
        here.doubts[k] = min(here.doubts[k] + 1, _MOST_DOUBTS) if hopeless else 0

    # ---------------------------------------------------------------------------------------------------------- expecting

    def _doubt(self, here: _Class, k: int) -> float:
        """Return the standard error of a ratio."""
        counts = [min(here.steps[j], _COST_MEMORY) for j in (k, here.k)]
        return sqrt(here.noise * sum(1 / count for count in counts)) if all(counts) else _BELIEF_ERROR

    def _gains(self, here: _Class) -> list[float]:
        """Return tokens per second over those of the k in use, by k."""
        tokens = self._acceptance.tokens
        return [gained / tokens[here.k] * exp(-ratio) for gained, ratio in zip(tokens, here.ratio, strict=True)]

    def _most_gains(self, here: _Class) -> list[float]:
        most, expected = self._acceptance.most_tokens(), self._acceptance.tokens
        return [most[k] / expected[here.k] * exp(-self._least_ratio(here, k)) for k in range(self.max_k + 1)]

    def _least_ratio(self, here: _Class, k: int) -> float:
        """Return what a ratio is at least: steps take as long as the device worked, and no shorter with more drafts."""
        if k == here.k:
            return 0.0
        if here.steps[k]:
            return here.ratio[k] - _CONFIDENCE * self._doubt(here, k)
        if here.device is None or here.level is None:
            return -inf
        least = log(here.device[k]) - here.level - _BELIEF_ERROR
        return least if k < here.k else max(0.0, least)

    # ----------------------------------------------------------------------------------------------------------- deciding

    def _decide(self, here: _Class, steps: int) -> None:
        """Add up what the k in use loses against each other one in so many steps; change to the best once it is enough."""
        gains = self._gains(here)
        for k, gain in enumerate(gains):
            if here.steps[k] and here.steps[here.k]:
                here.regret[k] = max(0.0, here.regret[k] + steps * (gain - 1 - _MARGIN - self._doubt(here, k)))
        if max(here.regret) > _PATIENCE:
            self._use(here, max(range(len(gains)), key=lambda k: gains[k] if here.regret[k] else 0.0))
            self._changes += 1

    def _use(self, here: _Class, k: int) -> None:
        step = here.ratio[k]
        here.ratio = [ratio - step for ratio in here.ratio]
        here.level = None if here.level is None else here.level + step
        here.regret = [0.0] * len(here.regret)
        here.k = k

    def _candidate(self, here: _Class) -> int | None:
        """Return another k that is due for a try: the less a try loses, the sooner after the last one."""
        if here.level is None:
            return None
        gains, best = self._gains(here), self._most_gains(here)
        due = []
        for k in range(self.max_k + 1):
            loss = self._try_steps(here, k) * self._lost_by(here, k) + self._way
            first = not here.steps[k] and best[k] > 1
            unsure = 0 < here.steps[k] < _FEW and _MARGIN < gains[k] - 1 < _MARGIN + self._doubt(here, k)
            wait = 1 if first else STRETCH if unsure else loss * self.max_k / EXPLORATION * 2 ** here.doubts[k]
            if k != here.k and here.now - here.tried[k] >= wait:
                due.append(k)
        return max(due, key=gains.__getitem__, default=None)

    def _lost_by(self, here: _Class, k: int) -> float:
        """Return what each step of a try loses, in steps; while few say what it takes, by what was believed if that is less."""
        ratio = min(here.ratio[k], here.belief[k]) if here.steps[k] < _FEW else here.ratio[k]
        return max(0.0, exp(ratio) - self._acceptance.tokens[k] / self._acceptance.tokens[here.k])

    def _try_steps(self, here: _Class, k: int) -> int:
        """Return how long a try lasts: but for the first one, longer where the way there is what loses."""
        least, most = _TRY_STEPS
        return int(max(least, min(most, self._way / max(self._lost_by(here, k), 1e-3)))) if here.steps[k] else least

    # ---------------------------------------------------------------------------------------------------------- telling

    def snapshot(self) -> DraftState:
        """Return what is known and was done."""
        return DraftState(
            acceptance=tuple(self._acceptance.chances()),
            classes=tuple(self._view(found) for _, found in sorted(self._classes.items())),
            changes=self._changes,
            tries=self._tries,
            seconds=self._seconds,
            lost_seconds=self._lost,
        )

    def _view(self, here: _Class) -> DraftClass:
        if here.view is None:
            level = 0.0 if here.level is None else here.level
            here.view = DraftClass(
                num_sequences=here.size,
                k=here.k,
                seconds=tuple(exp(level + ratio) if n else None for ratio, n in zip(here.ratio, here.steps, strict=True)),
                steps=tuple(here.steps),
                gains=tuple(self._gains(here)),
                most_gains=tuple(self._most_gains(here)),
            )
        return here.view
