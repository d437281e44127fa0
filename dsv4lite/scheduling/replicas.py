"""Several schedulers that act as one: each data-parallel replica has its own requests, pages and cached prefixes.

A request goes to the replica with its longest cached prefix, then to the one with the fewest live sequences; or to each in turn.
Full replicas are skipped while another one has room: waiting for a place costs more than the cached prefix saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from dsv4lite.config import ReplicaPlacement
from dsv4lite.request import FinishReason, Request, SequenceUpdate
from dsv4lite.scheduling.scheduler import Scheduler, SchedulerStats
from dsv4lite.scheduling.sequence import Sequence as Completion
from dsv4lite.scheduling.step_plan import Sampled, SequencePlan, StepPlan

if TYPE_CHECKING:
    from dsv4lite.request import Logprobs

SEQ_IDS = 1 << 40
"""Sequence ids per replica: those of replica r begin at ``r * SEQ_IDS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """One step of all replicas.

    Attributes:
        plans: The plan of each replica; ``None`` for one that has nothing to do.
    """

    plans: tuple[StepPlan | None, ...]

    @property
    def sequences(self) -> tuple[SequencePlan, ...]:
        """The scheduled spans of all replicas."""
        return tuple(part for plan in self.plans if plan is not None for part in plan.sequences)

    @property
    def max_drafts(self) -> int:
        """Most drafts in a span; the same in all plans."""
        return max(plan.max_drafts for plan in self.plans if plan is not None)

    @property
    def prompts(self) -> bool:
        """Whether prompts run on any replica."""
        return any(plan.prompts for plan in self.plans if plan is not None)


class Replicas:
    """The schedulers of an engine's replicas, with the methods of one; see ``Scheduler``.

    Args:
        schedulers: One per replica; their sequence ids begin at multiples of ``SEQ_IDS``.
        placement: How the replica of a request is chosen.
    """

    def __init__(self, schedulers: Sequence[Scheduler], placement: ReplicaPlacement) -> None:
        self._schedulers = tuple(schedulers)
        self._placement, self._turn = placement, 0
        self._chosen: dict[str, Scheduler] = {}  # by request id

    def add(self, request: Request, *, ready: bool = True) -> None:
        """Queue a request with one of the replicas."""
        scheduler = self._choose(request)
        scheduler.add(request, ready=ready)
        self._chosen[request.request_id] = scheduler

    def ready(self, request_id: str) -> None:
        self._chosen[request_id].ready(request_id)

    def _choose(self, request: Request) -> Scheduler:
        in_turn = (*self._schedulers[self._turn :], *self._schedulers[: self._turn])
        candidates = [scheduler for scheduler in in_turn if scheduler.has_place()] or in_turn
        if self._placement == "round_robin":
            self._turn = (self._schedulers.index(candidates[0]) + 1) % len(self._schedulers)
        if self._placement == "round_robin" or len(candidates) == 1:
            return candidates[0]
        hits = {id(scheduler): scheduler.cached_prefix(request) for scheduler in candidates}
        return min(candidates, key=lambda scheduler: (-hits[id(scheduler)], scheduler.num_live))

    def abort(
        self, request_id: str | None = None, reason: FinishReason = "abort", *, index: int | None = None
    ) -> list[SequenceUpdate]:
        if request_id is None:
            return self._forgetting([update for s in self._schedulers for update in s.abort(None, reason)])
        scheduler = self._chosen.get(request_id)
        return [] if scheduler is None else self._forgetting(scheduler.abort(request_id, reason, index=index))

    def expire(self, now: float) -> list[SequenceUpdate]:
        return self._forgetting([update for scheduler in self._schedulers for update in scheduler.expire(now)])

    def foresees(self, max_drafts: int) -> bool:
        return all(scheduler.foresees(max_drafts) for scheduler in self._schedulers)

    def schedule(self, now: float, max_drafts: int | None = None) -> JointPlan | None:
        """Plan the next step of all replicas."""
        plans = tuple(scheduler.schedule(now, max_drafts) for scheduler in self._schedulers)
        return None if all(plan is None for plan in plans) else JointPlan(plans=plans)

    def update(
        self, plan: JointPlan, results: Mapping[int, Sampled], *, scores: Mapping[int, Logprobs] | None = None
    ) -> list[SequenceUpdate]:
        updates = []
        for scheduler, part in zip(self._schedulers, plan.plans, strict=True):
            if part is not None:
                updates += scheduler.update(part, results, scores=scores)
        return self._forgetting(updates)

    def _forgetting(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Forget the replicas of requests that have ended."""
        for update in updates:
            scheduler = self._chosen.get(update.request_id) if update.finish_reason is not None else None
            if scheduler is not None and not scheduler.has_request(update.request_id):
                del self._chosen[update.request_id]
        return updates

    def reset_prefix_cache(self) -> None:
        for scheduler in self._schedulers:
            scheduler.reset_prefix_cache()

    def publish(self, weight_version: int) -> None:
        for scheduler in self._schedulers:
            scheduler.publish(weight_version)

    def preempt_all(self) -> None:
        for scheduler in self._schedulers:
            scheduler.preempt_all()

    def sequences_of(self, request_id: str) -> tuple[Completion, ...]:
        return self._chosen[request_id].sequences_of(request_id)

    def has_work(self) -> bool:
        return any(scheduler.has_work() for scheduler in self._schedulers)

    @property
    def num_running(self) -> int:
        """Sequences of the busiest replica that hold state on its device."""
        return max(scheduler.num_running for scheduler in self._schedulers)

    def stats(self) -> SchedulerStats:
        """Return the summed counts of all replicas."""
        every = [scheduler.stats() for scheduler in self._schedulers]
        return SchedulerStats(**{f.name: sum(getattr(one, f.name) for one in every) for f in fields(SchedulerStats)})

    def check_released(self) -> None:
        for scheduler in self._schedulers:
            scheduler.check_released()

    def check(self) -> None:
        for scheduler in self._schedulers:
            scheduler.check()
        for request_id, scheduler in self._chosen.items():
            assert scheduler.has_request(request_id), f"request {request_id!r} has ended"
