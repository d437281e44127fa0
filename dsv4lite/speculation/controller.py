"""The draft controller: drafts as many tokens per step as yield the most tokens per second, learned from the steps themselves.

 1. A step with k draft tokens of each sequence takes T(k) seconds and yields 1 + s_1 + ... + s_k tokens of each, where s_i is the
    probability that the first i drafts are accepted. The gain of a k is its tokens per second relative to the k in use.
 2. Acceptance is measured by position, log T by batch-size bucket (half octaves) and k, on windows of steps with the same k.
 3. A new bucket starts with the costs of the warm-up, or of the nearest bucket, and with the best k by these; else with k = 1.
 4. Changes of T common to all k (longer contexts, other work on the machine) are measured on the k in use and applied to all.
 5. The regret of a k is the steps lost by not using it, beyond a margin and the error. Above one step, the bucket switches to it.
 6. Some windows are probes of another k, the nearest that is due. A k without measurements is skipped if it could not pay at best.
 7. Probes lose at most ``EXPLORATION`` of all steps, switches there and back included; each k has an equal share of that.
 8. Each probe of a k that cannot pay even in the best case that its measurements allow doubles the interval to its next probe.
 9. Steps with prompts and the first steps after a switch are not timed.
10. Time comes from a clock argument: the same observations lead to the same decisions.
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

_SETTLE_STEPS = 2  # not timed after a switch or a prompt: the first step has no drafts of the device yet, and steps overlap
_MIN_STEPS = 4  # timed steps that a window needs for a measurement
_PROBE_STEPS, _FEW_STEPS = 6, 48  # least steps of a probe; steps below which a measured cost is uncertain
_MARGIN, _PATIENCE = 0.005, 1.0  # relative gain that does not count; steps lost before a switch
_SWITCH_COST, _MAX_BACKOFF = 1.0, 3  # steps lost by the two switches of a probe; doublings of its interval
_ERROR, _CONFIDENCE = 0.05, 2.0  # error of the log cost of one step, or without measurement; standard deviations of the best case
_LEVEL_MEMORY, _COST_MEMORY = 4, 256  # windows; steps
_MAX_DEVIATION = 0.7  # of a log cost from its estimate; a larger one is clipped
_BUCKETS = (1, *sorted(size << octave for octave in range(14) for size in (2, 3)))
_PRIOR_ACCEPTANCE, _PRIOR_WEIGHT = 0.7, 2.0  # acceptance before any measurement; its weight in drafts
_DRAFT_MEMORY, _STEP_MEMORY = 512.0, (16.0, 256.0)  # memory of acceptance: drafts, but at least and at most these steps
_STALE, _OLD_DRAFTS = 0.99, 64.0  # decay of that memory in a step without drafts, and the drafts below which it stops
# A drafter with the KV of only the r latest tokens is accepted 1 - a / (1 + r / 10) times as often as one with all; the shipped
# checkpoint's MTP block with a = 0.3: measured 0.70, 0.82, 0.88, 0.94, 0.98 for r = 1, 8, 16, 32, 64. Others may forget less. Each
# step without the drafter multiplies r by 0.92: measured 0.98, 0.96, 0.92, 0.85 after gaps of 4, 8, 16, 32 tokens.
_LOSS, _RECOVERY, _KEPT, _CONTEXT = 0.2, 10.0, 0.92, 128.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Device time of steps, measured at warm-up.

    Attributes:
        seconds: By number of sequences, ascending, and draft tokens.
    """

    seconds: Mapping[int, tuple[float, ...]]

    def of(self, num_sequences: int) -> tuple[float, ...]:
        """Return the seconds of a step by draft tokens, interpolated (above the largest size, extrapolated) between two sizes."""
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
        seconds: Seconds of a step, by k; ``None`` if it was never measured.
        steps: Number of measured steps, by k.
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
    """Acceptance by position; older steps count less.

    Args:
        max_k: Positions.
        forgets: Whether the drafter has KV of its own, so that its drafts are accepted less often after steps without it.
    """

    def __init__(self, max_k: int, *, forgets: bool) -> None:
        self._accepted, self._reached = [0.0] * max_k, [0.0] * max_k
        self._forgets, self._context = forgets, _CONTEXT

    def learn(self, num_sequences: int, accepted: Sequence[int]) -> None:
        """Learn how many sequences had their draft accepted, by position."""
        keep = 1 - 1 / min(max(_DRAFT_MEMORY / num_sequences, _STEP_MEMORY[0]), _STEP_MEMORY[1])
        self._context = min(_CONTEXT, self._context + 1)
        reached = num_sequences * (1 - _LOSS / (1 + self._context / _RECOVERY) * self._forgets)
        for position, count in enumerate(accepted):
            self._accepted[position] = keep * self._accepted[position] + count
            self._reached[position] = keep * self._reached[position] + reached
            reached = count

    def skip(self, steps: int) -> None:
        """Account for steps without the drafter: measurements lose weight, down to that of ``_OLD_DRAFTS`` drafts."""
        self._context *= _KEPT**steps
        keep = max(_STALE**steps, min(1.0, _OLD_DRAFTS / max(1.0, self._reached[0])))
        self._accepted, self._reached = [keep * each for each in self._accepted], [keep * each for each in self._reached]

    def probabilities(self, deviations: float = 0.0) -> list[float]:
        """Return acceptance by position, ``deviations`` standard deviations above the expected value."""
        found, prior = [], _PRIOR_ACCEPTANCE
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            prior = min(1.0, (accepted + _PRIOR_WEIGHT * prior) / (reached + _PRIOR_WEIGHT))
            found.append(min(1.0, prior + deviations * sqrt((prior * (1 - prior) + 1 / (reached + 1)) / (reached + 1))))
        return found

    def tokens(self, deviations: float = 0.0) -> list[float]:
        """Return the tokens that a step yields per sequence, by k."""
        found, survival = [1.0], 1.0
        for p in self.probabilities(deviations):
            survival *= p
            found.append(found[-1] + survival)
        return found


class _Bucket:
    """Steps of about the same number of sequences; lists are by k.

    Attributes:
        cost: Log seconds of a step; before the first measured window only differences count.
        prior: Initial cost; zeros if nothing is known.
        device: Log seconds that a step takes at least, measured at warm-up.
        steps: Number of measured steps.
        regret: Steps lost against each k.
        due, backoff: When to probe, by ``now``; doublings of the interval.
        windows: Windows measured with the k in use.
    """

    def __init__(self, size: int, cost: Sequence[float], device: Sequence[float]) -> None:
        self.size, self.k, self.cost, self.prior, self.device = size, 1, list(cost), cost, device
        self.steps, self.regret, self.due, self.backoff = [0] * len(cost), [0.0] * len(cost), [0.0] * len(cost), [0] * len(cost)
        self.now, self.windows = 0, 0

    def error(self, k: int) -> float:
        """Return the standard error of the log cost relative to that of the k in use."""
        counts = [min(self.steps[j], _COST_MEMORY) for j in (k, self.k)]
        return _ERROR * sqrt(sum(1 / count for count in counts)) if all(counts) else _ERROR

    def least_ratio(self, k: int) -> float:
        """Return a lower bound of the log cost relative to the k in use: the device time, and the bound of fewer drafts."""
        if k == self.k:
            return 0.0
        if self.steps[k]:
            return self.cost[k] - self.cost[self.k] - _CONFIDENCE * self.error(k)
        return max(self.device[k] - self.cost[self.k] - _ERROR, self.least_ratio(k - 1) if k else -inf)

    def gains(self, tokens: Sequence[float]) -> list[float]:
        """Return the expected tokens per second relative to the k in use."""
        return [each / tokens[self.k] * exp(self.cost[self.k] - cost) for each, cost in zip(tokens, self.cost, strict=True)]

    def learn(self, k: int, steps: int, cost: float) -> None:
        """Learn the log cost of a window; a window of the k in use shifts the costs of all k."""
        deviation, most = cost - self.cost[k], _MAX_DEVIATION if self.steps[k] else 2 * _MAX_DEVIATION
        self.steps[k] += steps
        if k != self.k:
            self.cost[k] += max(-most, min(most, deviation)) * steps / min(self.steps[k], max(steps, _COST_MEMORY))
            return
        if self.windows:
            deviation = max(-most, min(most, deviation))
            deviation /= min(self.windows, _LEVEL_MEMORY)
        self.windows += 1
        self.cost = [each + deviation for each in self.cost]


class DraftController:
    """Chooses the draft length of every step; mutable, one per engine.

    Args:
        max_k: Most tokens to draft.
        clock: Returns the time in seconds, to time steps.
        forgets: See ``Acceptance``.
        costs: Step costs from the warm-up.

    Attributes:
        length: Draft tokens of the current window.
        windows: Decisions so far.
    """

    def __init__(self, max_k: int, clock: Callable[[], float], *, forgets: bool = False, costs: StepCosts | None = None) -> None:
        assert max_k >= 1
        self.length, self.windows = 0, 0
        self._max_k, self._clock, self._costs = max_k, clock, costs
        self._acceptance = Acceptance(max_k, forgets=forgets)
        self._buckets: dict[int, _Bucket] = {}
        self._changes, self._probes, self._total_seconds, self._lost_seconds = 0, 0, 0.0, 0.0
        # The current window: batch size, steps planned, steps run, steps measured and their seconds.
        self._sequences, self._planned, self._ran, self._steps, self._seconds = 1, 0, 0, 0, 0.0
        self._chosen_at, self._unmeasured, self._settling = 0.0, 1, 0  # steps left not to time; not to learn from

    def choose(self, num_sequences: int) -> int:
        """Return the number of tokens to draft for each sequence of the next step; called once per step."""
        now = self._clock()
        if self._unmeasured:
            self._unmeasured -= 1
        else:
            self._steps += 1
            self._seconds += now - self._chosen_at
        self._chosen_at = now
        self._ran += self.windows > 0
        self._settling -= self._settling > 0
        if self._ran >= self._planned or abs(num_sequences - self._sequences) > self._sequences // 4:
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
        """Learn from the window that ends, and choose the length of the next: the k in use, or a probe."""
        if not self.length:
            self._acceptance.skip(self._ran)
        if self._ran:
            self._bucket(self._sequences).now += self._ran
            if self._steps >= _MIN_STEPS and self._seconds > 0:
                self._learn_window(self._bucket(self._sequences))
        self._sequences, self._ran, self._steps, self._seconds = num_sequences, 0, 0, 0.0
        bucket, before = self._bucket(num_sequences), self.length
        probe = None if self._unmeasured or not bucket.windows else self._due_probe(bucket)
        if probe is None:
            self.length, self._planned = bucket.k, WINDOW if bucket.now >= 2 * WINDOW else WINDOW // 4
        else:
            self.length, self._planned = probe, self._probe_steps(bucket, probe)
            self._probes += 1
        self.windows += 1
        if self.length != before:
            self._unmeasured, self._settling = max(self._unmeasured, _SETTLE_STEPS), _SETTLE_STEPS
            self._planned += _SETTLE_STEPS

    def _learn_window(self, bucket: _Bucket) -> None:
        """Learn the cost of the steps that were measured, and switch the k in use once its regret exceeds one step."""
        k, used, steps, tokens = self.length, bucket.k, self._steps, self._acceptance.tokens()
        self._total_seconds += self._seconds
        if k != used:
            self._lost_seconds += self._seconds + exp(bucket.cost[used]) * (_SWITCH_COST - steps * tokens[k] / tokens[used])
        bucket.learn(k, steps, log(self._seconds / steps))
        gains = bucket.gains(tokens)
        if k != used:
            pays = self._most_gain(bucket, k) > 1
            bucket.backoff[k] = 0 if pays else min(bucket.backoff[k] + 1, _MAX_BACKOFF)
            bucket.due[k] = bucket.now + self._interval(bucket, k)
        for j, gain in enumerate(gains):
            if bucket.steps[j]:
                bucket.regret[j] = max(0.0, bucket.regret[j] + steps * (gain - 1 - _MARGIN - bucket.error(j)))
        if max(bucket.regret) > _PATIENCE:
            bucket.k = max(range(len(gains)), key=lambda j: gains[j] if bucket.regret[j] else 0.0)
            bucket.regret, bucket.backoff[used] = [0.0] * len(gains), 0
            bucket.due[used] = bucket.now + self._interval(bucket, used)
            self._changes += 1

    def _bucket(self, num_sequences: int) -> _Bucket:
        """Return the bucket of a batch size; a new one starts with the costs of the warm-up, or of the nearest bucket."""
        size = _BUCKETS[min(bisect_left(_BUCKETS, num_sequences), len(_BUCKETS) - 1)]
        if size not in self._buckets:
            cost, device = [0.0] * (self._max_k + 1), [-inf] * (self._max_k + 1)
            if self._costs is not None:
                cost = device = [log(seconds) for seconds in self._costs.of(size)]
            elif self._buckets:
                cost = min(self._buckets.values(), key=lambda other: abs(log(other.size / size))).cost
            bucket = self._buckets[size] = _Bucket(size, cost, device)
            if any(cost):
                gains = bucket.gains(self._acceptance.tokens())
                bucket.k = gains.index(max(gains))
        return self._buckets[size]

    def _most_gain(self, bucket: _Bucket, k: int) -> float:
        """Return the tokens per second relative to the k in use in the best case that the measurements allow."""
        return self._acceptance.tokens(_CONFIDENCE)[k] / self._acceptance.tokens()[bucket.k] * exp(-bucket.least_ratio(k))

    def _due_probe(self, bucket: _Bucket) -> int | None:
        """Return the nearest k that is due for a probe; a k that was never measured is skipped if it cannot pay."""
        for k in sorted(range(self._max_k + 1), key=lambda k: abs(k - bucket.k)):
            if k != bucket.k and bucket.now >= bucket.due[k]:
                bucket.due[k] = bucket.now + self._interval(bucket, k)
                if bucket.steps[k] or self._most_gain(bucket, k) > 1:
                    return k
        return None

    def _probe_loss(self, bucket: _Bucket, k: int) -> float:
        """Return the steps lost per step of a probe; a cost from few steps is capped by its prior."""
        costs = (bucket.cost, bucket.prior) if bucket.steps[k] < _FEW_STEPS and any(bucket.prior) else (bucket.cost,)
        tokens = self._acceptance.tokens()
        return max(0.0, exp(min(cost[k] - cost[bucket.k] for cost in costs)) - tokens[k] / tokens[bucket.k])

    def _probe_steps(self, bucket: _Bucket, k: int) -> int:
        """Return the steps of a probe: as many as lose the switch cost, within limits; the first probe is short."""
        steps = _SWITCH_COST / max(self._probe_loss(bucket, k), 1e-3) if bucket.steps[k] else 0
        return max(_PROBE_STEPS, min(WINDOW, int(steps)))

    def _interval(self, bucket: _Bucket, k: int) -> float:
        """Return the steps between two probes of a k, so that they lose at most their share of ``EXPLORATION``."""
        loss = self._probe_steps(bucket, k) * self._probe_loss(bucket, k) + _SWITCH_COST
        probed = max(1, sum(steps > 0 for steps in bucket.steps) - 1)  # lengths that share the time
        return loss * probed / EXPLORATION * 2.0 ** bucket.backoff[k]

    def stats(self) -> ControllerStats:
        """Return the current statistics."""
        classes = [
            BucketStats(
                num_sequences=bucket.size,
                k=bucket.k,
                seconds=tuple(exp(cost) if steps else None for cost, steps in zip(bucket.cost, bucket.steps, strict=True)),
                steps=tuple(bucket.steps),
                gains=tuple(bucket.gains(self._acceptance.tokens())),
                most_gains=tuple(self._most_gain(bucket, k) for k in range(self._max_k + 1)),
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
