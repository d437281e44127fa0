"""The draft controller: drafts as many tokens per step as yield the most tokens per second, learned from the steps themselves.

A step of R sequences with k draft tokens each takes T(R, k) seconds and yields R (1 + s_1 + ... + s_k) tokens, where s_i is the
probability that the first i drafts are accepted. Both are measured:

acceptance   by position, with exponential forgetting
cost         log T by batch-size bucket (half octaves) and k. What moves T for all k alike (longer contexts, other work on the
             machine) is tracked by the k in use and shifts the costs of all k. An unmeasured cost comes from the warm-up
             (``StepCosts``), else from the nearest bucket that has it

Decisions hold for a measurement window: steps with the same k, timed by its two ends. The controller switches the k of a bucket
once the accumulated loss against a better one, beyond a margin and the measurement error, exceeds one step. It probes other k as
often as the loss of a probe, switching there and back included, allows: below ``EXPLORATION`` of all time. A k that does not pay
even in the best case that the measurements allow is probed half as often each time.

Time comes from a clock argument: the same observations lead to the same decisions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt

EXPLORATION = 0.0075
"""Share of all time that probes may lose."""
WINDOW = 32
"""Steps between two decisions."""

_EARLY_WINDOWS = 8  # windows of a quarter of the length, at the start of a bucket
_MIN_WINDOW = 4  # steps; a shorter window is not timed
_SETTLE_STEPS = (
    2  # unmeasured steps after a switch or an interruption: the first has no drafts of the device yet, or others overlap
)
_PROBE_STEPS = 6  # of a probe that loses much
_MARGIN = 0.005  # relative gain that does not count
_PATIENCE = 1.0  # steps lost before a switch
_CONFIDENCE = 2.0  # standard deviations from an estimate to its best case
_PRIOR_ERROR = 0.05  # of a log cost that was not measured
_SWITCH_COST = 1.0  # steps lost by the two switches of a probe
_MAX_BACKOFF = 3  # doublings of a probe's interval
_LEVEL_MEMORY, _VARIANCE_MEMORY = 4, 16  # windows
_COST_MEMORY = 256  # steps
_FEW_STEPS = 48  # a cost from fewer steps may mislead
_MAX_DEVIATION = 0.7  # of a log cost, believed at once
_BUCKETS = (1, *sorted(size << octave for octave in range(14) for size in (2, 3)))

_FIRST_ACCEPTANCE, _FIRST_WEIGHT = 0.7, 2.0  # prior of a position's acceptance, and how many drafts it weighs
_DRAFT_MEMORY, _STEP_MEMORY = 512.0, (16.0, 256.0)  # drafts that acceptance remembers, but at least and at most so many steps
# A drafter with the KV of only the r latest tokens is accepted 1 - a / (1 + r / 10) times as often as one with all; a = 0.3 weighs
# 10 drafts. Measured on the shipped checkpoint's MTP block: 0.70, 0.82, 0.88, 0.94, 0.98 for r = 1, 8, 16, 32, 64. Each step
# without the drafter multiplies r by 0.92: measured 0.98, 0.96, 0.92, 0.85 after gaps of 4, 8, 16, 32 tokens.
_LOSS, _LOSS_WEIGHT, _RECOVERY, _KEPT = 0.3, 10.0, 10.0, 0.92
_CONTEXT, _FULL_CONTEXT = 128.0, 48.0  # tokens of the drafter's window; from how many on its acceptance counts as full


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Device time of steps, measured at warm-up.

    Attributes:
        seconds: By number of sequences, ascending, and draft tokens.
    """

    seconds: Mapping[int, tuple[float, ...]]

    def of(self, num_sequences: int) -> tuple[float, ...]:
        """Return the seconds of a step by draft tokens: on the line through the two sizes around it, or below it."""
        sizes = list(self.seconds)
        at = max(1, min(bisect_left(sizes, num_sequences), len(sizes) - 1))
        low, high = sizes[at - 1], sizes[min(at, len(sizes) - 1)]
        share = max(0.0, (num_sequences - low) / max(1, high - low))
        return tuple(a + share * max(0.0, b - a) for a, b in zip(self.seconds[low], self.seconds[high], strict=True))

    def __str__(self) -> str:
        return "; ".join(
            f"{', '.join(f'{1e3 * each:.2f}' for each in times)} ms with {size} sequences and 0 to {len(times) - 1} draft tokens"
            for size, times in self.seconds.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStats:
    """Statistics of one batch-size bucket.

    Attributes:
        num_sequences: Largest batch size of the bucket.
        k: Draft tokens in use.
        seconds: Of a step, by k; ``None`` where it was never measured.
        steps: Steps measured, by k.
        gains: Expected tokens per second relative to the k in use, by k.
        most_gains: The same in the best case that the measurements allow.
    """

    num_sequences: int
    k: int
    seconds: tuple[float | None, ...]
    steps: tuple[int, ...]
    gains: tuple[float, ...]
    most_gains: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStats:
    """Statistics of a draft controller.

    Attributes:
        acceptance: By position, the probability that a draft is accepted if those before it are.
        classes: Batch-size buckets, ascending.
        changes: Switches of the k in use, all buckets together.
        tries: Probes of other k.
        seconds: Time of all measured steps.
        lost_seconds: Time lost to probes, as estimated.
    """

    acceptance: tuple[float, ...]
    classes: tuple[BucketStats, ...]
    changes: int
    tries: int
    seconds: float
    lost_seconds: float


class Acceptance:
    """Acceptance by position, and the expected tokens of a sequence's step by k; older steps count less."""

    def __init__(self, max_k: int, *, forgets: bool) -> None:
        self._forgets = forgets
        self._accepted, self._reached = [0.0] * max_k, [0.0] * max_k
        self._context = _CONTEXT
        # First drafts, and how many were accepted, with full context and with less; the latter also weighted by the expected loss.
        self._full, self._full_accepted, self._part, self._part_accepted, self._part_loss = 0.0, 0.0, 0.0, 0.0, 0.0
        self.tokens = _tokens(self.probabilities())

    def learn(self, num_sequences: int, accepted: Sequence[int]) -> None:
        keep = 1 - 1 / min(max(_DRAFT_MEMORY / num_sequences, _STEP_MEMORY[0]), _STEP_MEMORY[1])
        reached = float(num_sequences)
        if self._forgets:
            self._context = min(_CONTEXT, self._context + 1)
            loss = 1 / (1 + self._context / _RECOVERY)
            full = self._full_accepted / self._full if self._full else 0.0
            lost = _LOSS * _LOSS_WEIGHT + max(0.0, full * self._part - self._part_accepted)
            reached *= 1 - loss * lost / (_LOSS_WEIGHT + full * self._part_loss)
            if self._context >= _FULL_CONTEXT:
                self._full, self._full_accepted = keep * self._full + num_sequences, keep * self._full_accepted + accepted[0]
            else:
                self._part, self._part_accepted = keep * self._part + num_sequences, keep * self._part_accepted + accepted[0]
                self._part_loss = keep * self._part_loss + num_sequences * loss
        for position, count in enumerate(accepted):
            self._accepted[position] = keep * self._accepted[position] + count
            self._reached[position] = keep * self._reached[position] + reached
            reached = count
        self.tokens = _tokens(self.probabilities())

    def skip(self, steps: int) -> None:
        """Account for steps that the drafter had no part in."""
        self._context *= _KEPT**steps

    def probabilities(self) -> list[float]:
        out, prior = [], _FIRST_ACCEPTANCE
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            prior = min(1.0, (accepted + _FIRST_WEIGHT * prior) / (reached + _FIRST_WEIGHT))
            out.append(prior)
        return out

    def most_tokens(self) -> list[float]:
        """Return the best case of ``tokens``."""
        best = []
        for p, reached in zip(self.probabilities(), self._reached, strict=True):
            best.append(min(1.0, p + _CONFIDENCE * sqrt((p * (1 - p) + 1 / (reached + 1)) / (reached + 1))))
        return _tokens(best)


def _tokens(acceptance: Sequence[float]) -> list[float]:
    out, survival = [1.0], 1.0
    for p in acceptance:
        survival *= p
        out.append(out[-1] + survival)
    return out


class _Bucket:
    """Steps of about the same number of sequences; lists are by k."""

    def __init__(self, size: int, max_k: int, device: tuple[float, ...] | None) -> None:
        self.size, self.k = size, 1
        self.device = device  # seconds of a step at warm-up
        self.cost, self.prior = (
            [0.0] * (max_k + 1),
            [0.0] * (max_k + 1),
        )  # log seconds of a step; the prior relative to the k in use
        self.steps, self.probed, self.backoff = [0] * (max_k + 1), [0] * (max_k + 1), [0] * (max_k + 1)
        self.regret = [0.0] * (max_k + 1)  # steps lost against each k
        self.windows, self.now, self.variance = 0, 0, 0.0  # variance of one step's log cost

    def ratio(self, k: int) -> float:
        """Return the log cost relative to the k in use."""
        return self.cost[k] - self.cost[self.k]

    def error(self, k: int) -> float:
        """Return the standard error of ``ratio``."""
        counts = [min(self.steps[j], _COST_MEMORY) for j in (k, self.k)]
        return sqrt(self.variance * sum(1 / count for count in counts)) if all(counts) else _PRIOR_ERROR

    def least_ratio(self, k: int) -> float:
        """Return the best case of ``ratio``: a step takes at least its device time, and no less with more drafts."""
        if k == self.k:
            return 0.0
        if self.steps[k]:
            return self.ratio(k) - _CONFIDENCE * self.error(k)
        if self.device is None or not self.windows:
            return -inf
        least = log(self.device[k]) - self.cost[self.k] - _PRIOR_ERROR
        return least if k < self.k else max(0.0, least)

    def learn(self, k: int, steps: int, cost: float) -> None:
        """Learn the log cost of a window; the k in use moves the level of all."""
        before, deviation = self.steps[k], cost - self.cost[k]
        self.steps[k] += steps
        if k != self.k:
            most = _MAX_DEVIATION if before else 2 * _MAX_DEVIATION
            self.cost[k] += max(-most, min(most, deviation)) * steps / min(before + steps, _COST_MEMORY)
            return
        self.windows += 1
        if self.windows > 1:
            deviation = max(-_MAX_DEVIATION, min(_MAX_DEVIATION, deviation))
            self.variance += (steps * deviation**2 - self.variance) / min(self.windows - 1, _VARIANCE_MEMORY)
            deviation /= min(self.windows - 1, _LEVEL_MEMORY)
        self.cost = [each + deviation for each in self.cost]


class DraftController:
    """Chooses the draft length of every step; mutable, one per engine.

    Args:
        max_k: Most tokens to draft.
        clock: Of the time that steps take, in seconds.
        forgets: Whether the drafter keeps KV, and is accepted less often after steps that it had no part in.
        costs: Step costs from the warm-up.

    Attributes:
        length: Draft tokens of the present window.
        windows: Decisions so far.
    """

    def __init__(self, max_k: int, clock: Callable[[], float], *, forgets: bool = False, costs: StepCosts | None = None) -> None:
        assert max_k >= 1
        self.length, self.windows = 0, 0
        self._max_k, self._clock, self._costs = max_k, clock, costs
        self._acceptance = Acceptance(max_k, forgets=forgets)
        self._buckets: dict[int, _Bucket] = {}
        self._changes, self._probes, self._total_seconds, self._lost_seconds = 0, 0, 0.0, 0.0
        # The present window: its batch size and those that end it, its steps and those left, measured steps and their seconds.
        self._sequences, self._low, self._high, self._planned, self._left, self._steps, self._seconds = 1, 1, 0, -1, 0, 0, 0.0
        self._chosen_at = 0.0
        self._unmeasured, self._settling, self._probing = 1, 0, False  # steps not to be measured; not to learn acceptance from

    def choose(self, num_sequences: int) -> int:
        """Return the number of tokens to draft for each sequence of the next step; called once per step."""
        now = self._clock()
        if self._unmeasured:
            self._unmeasured -= 1
        else:
            self._steps += 1
            self._seconds += now - self._chosen_at
        self._chosen_at = now
        self._left -= 1
        if self._settling:
            self._settling -= 1
        if self._left <= 0 or not self._low <= num_sequences <= self._high:
            self._next_window(max(1, num_sequences))
        return self.length

    def interrupt(self, *, idle: bool = False) -> None:
        """Do not measure the step that ``choose`` was just called for: it runs prompts, or the engine is ``idle`` after it."""
        self._unmeasured = _SETTLE_STEPS + idle

    def learn(self, num_sequences: int, accepted: Sequence[int]) -> None:
        """Learn from the drafts of a step.

        Args:
            num_sequences: Sequences that could have drafts.
            accepted: By position, how many sequences had their draft there accepted.
        """
        if not self._settling:
            self._acceptance.learn(num_sequences, accepted)

    def _next_window(self, num_sequences: int) -> None:
        ran = self._planned - self._left
        if not self.length:
            self._acceptance.skip(ran)
        if ran:
            bucket = self._bucket(self._sequences)
            bucket.now += ran
            if self._steps >= _MIN_WINDOW and self._seconds > 0:
                self._learn_window(bucket)
        self._sequences, self._low, self._high = (
            num_sequences,
            num_sequences - num_sequences // 4,
            num_sequences + num_sequences // 4,
        )
        before, self._steps, self._seconds = self.length, 0, 0.0
        self.length, self._left = self._decide(self._bucket(num_sequences))
        self.windows += 1
        if self.length != before:
            self._unmeasured, self._settling = max(self._unmeasured, _SETTLE_STEPS), _SETTLE_STEPS
            self._left += _SETTLE_STEPS
        self._planned = self._left

    def _learn_window(self, bucket: _Bucket) -> None:
        """Learn the cost of the steps that were measured, and switch the k in use once its regret exceeds one step."""
        k, steps, tokens = self.length, self._steps, self._acceptance.tokens
        self._total_seconds += self._seconds
        if k != bucket.k:
            if not bucket.windows:
                return
            step = exp(bucket.cost[bucket.k])
            self._lost_seconds += self._seconds + step * (_SWITCH_COST - steps * tokens[k] / tokens[bucket.k])
        bucket.learn(k, steps, log(self._seconds / steps))
        if k != bucket.k:
            bucket.backoff[k] = min(bucket.backoff[k] + 1, _MAX_BACKOFF) if self._most_gains(bucket)[k] < 1 else 0
        gains = self._gains(bucket)
        for j, gain in enumerate(gains):
            if bucket.steps[j] and bucket.steps[bucket.k]:
                bucket.regret[j] = max(0.0, bucket.regret[j] + steps * (gain - 1 - _MARGIN - bucket.error(j)))
        if max(bucket.regret) > _PATIENCE:
            bucket.k = max(range(len(gains)), key=lambda j: gains[j] if bucket.regret[j] else 0.0)
            bucket.regret = [0.0] * len(gains)
            self._changes += 1

    # -------------------------------------------------------------------------------------------------------------- choosing

    def _decide(self, bucket: _Bucket) -> tuple[int, int]:
        """Return the draft length and the steps of the next window: the k in use, or a probe."""
        self._update_priors(bucket)
        probe = None if self._unmeasured or self._probing else self._due_probe(bucket)
        self._probing = probe is not None
        if probe is None:
            return bucket.k, WINDOW if bucket.windows >= _EARLY_WINDOWS else WINDOW // 4
        bucket.probed[probe] = bucket.now
        self._probes += 1
        return probe, self._probe_steps(bucket, probe)

    def _bucket(self, num_sequences: int) -> _Bucket:
        size = _BUCKETS[min(bisect_left(_BUCKETS, num_sequences), len(_BUCKETS) - 1)]
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket(size, self._max_k, None if self._costs is None else self._costs.of(size))
            self._update_priors(bucket)
            if any(bucket.prior):
                gains = self._gains(bucket)
                bucket.k = max(range(len(gains)), key=gains.__getitem__)
        return bucket

    def _update_priors(self, bucket: _Bucket) -> None:
        """Take the costs that a bucket has hardly measured from the warm-up or from the nearest bucket that has measured them."""
        used = bucket.k
        for k, steps in enumerate(bucket.steps):
            if steps >= _FEW_STEPS or k == used:
                continue
            if bucket.device is not None:
                bucket.prior[k] = log(bucket.device[k] / bucket.device[used])
            else:
                others = [other for other in self._buckets.values() if other is not bucket and other.steps[k] and other.steps[used]]
                nearest = min(others, key=lambda other: abs(log(other.size / bucket.size)), default=bucket)
                bucket.prior[k] = nearest.cost[k] - nearest.cost[used]
            if not steps:
                bucket.cost[k] = bucket.cost[used] + bucket.prior[k]

    def _gains(self, bucket: _Bucket) -> list[float]:
        """Return the expected tokens per second relative to the k in use, by k."""
        tokens = self._acceptance.tokens
        return [each / tokens[bucket.k] * exp(-bucket.ratio(k)) for k, each in enumerate(tokens)]

    def _most_gains(self, bucket: _Bucket) -> list[float]:
        used = self._acceptance.tokens[bucket.k]
        return [most / used * exp(-bucket.least_ratio(k)) for k, most in enumerate(self._acceptance.most_tokens())]

    def _due_probe(self, bucket: _Bucket) -> int | None:
        """Return the most promising k that is due for a probe: at once if it was never measured and may pay, else the less a
        probe loses the sooner after the last one."""
        if not bucket.windows:
            return None
        gains, best, due = self._gains(bucket), self._most_gains(bucket), []
        for k in range(self._max_k + 1):
            if not bucket.steps[k] and best[k] > 1:
                wait = 1.0
            elif 0 < bucket.steps[k] < _FEW_STEPS and _MARGIN < gains[k] - 1 < _MARGIN + bucket.error(k):
                wait = WINDOW
            else:
                loss = self._probe_steps(bucket, k) * self._probe_loss(bucket, k) + _SWITCH_COST
                wait = loss * self._max_k / EXPLORATION * 2 ** bucket.backoff[k]
            if k != bucket.k and bucket.now - bucket.probed[k] >= wait:
                due.append(k)
        return max(due, key=gains.__getitem__, default=None)

    def _probe_loss(self, bucket: _Bucket, k: int) -> float:
        """Return the steps that each step of a probe loses; a cost from few steps counts no more than its prior."""
        ratio = min(bucket.ratio(k), bucket.prior[k]) if bucket.steps[k] < _FEW_STEPS else bucket.ratio(k)
        return max(0.0, exp(ratio) - self._acceptance.tokens[k] / self._acceptance.tokens[bucket.k])

    def _probe_steps(self, bucket: _Bucket, k: int) -> int:
        """Return the length of a probe: as many steps as lose the switch cost, within limits; the first one is short."""
        steps = _SWITCH_COST / max(self._probe_loss(bucket, k), 1e-3) if bucket.steps[k] else 0
        return max(_PROBE_STEPS, min(WINDOW, int(steps)))

    # ------------------------------------------------------------------------------------------------------------ statistics

    def stats(self) -> ControllerStats:
        """Return the present statistics."""
        classes = [
            BucketStats(
                num_sequences=bucket.size,
                k=bucket.k,
                seconds=tuple(exp(cost) if steps else None for cost, steps in zip(bucket.cost, bucket.steps, strict=True)),
                steps=tuple(bucket.steps),
                gains=tuple(self._gains(bucket)),
                most_gains=tuple(self._most_gains(bucket)),
            )
            for _, bucket in sorted(self._buckets.items())
        ]
        return ControllerStats(
            acceptance=tuple(self._acceptance.probabilities()),
            classes=tuple(classes),
            changes=self._changes,
            tries=self._probes,
            seconds=self._total_seconds,
            lost_seconds=self._lost_seconds,
        )
