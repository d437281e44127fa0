"""Several schedulers as one: where requests go, and that nothing of any is lost."""

from __future__ import annotations

import random

from dsv4lite.config import ReplicaPlacement
from dsv4lite.request import Request, SamplingParams, SequenceUpdate
from dsv4lite.scheduling.pages import Pools
from dsv4lite.scheduling.replicas import SEQ_IDS, JointPlan, Replicas
from dsv4lite.scheduling.scheduler import Sampled, Scheduler, SchedulerLimits


def make(
    replicas: int = 2, *, max_num_seqs: int = 4, placement: ReplicaPlacement = "prefix", drafts: int = 0
) -> tuple[Replicas, list[Scheduler]]:
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 512, "max_model_len": 2048, "window": 128}
    limits = SchedulerLimits(**sizes, max_drafts=drafts)
    propose = (lambda sequence, most: (7,) * most) if drafts else None
    pools = [Pools(grow=32, window=64, slots=max_num_seqs, snapshots=8) for _ in range(replicas)]
    schedulers = [Scheduler(limits, own, propose=propose, first_seq_id=i * SEQ_IDS) for i, own in enumerate(pools)]
    return Replicas(schedulers, placement), schedulers


def request(name: str, prompt: list[int], **settings: object) -> Request:
    params = SamplingParams(max_tokens=settings.pop("max_tokens", 4), n=settings.pop("n", 1))  # type: ignore[arg-type]
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, **settings)  # type: ignore[arg-type]


def step(both: Replicas, now: float = 0.0) -> list[SequenceUpdate]:
    news = both.expire(now)
    plan = both.schedule(now)
    if plan is not None:
        results = {s.seq_id: Sampled(token_id=7) for s in plan.sequences if s.sample}
        news += both.update(plan, results)
    return news


def finish(both: Replicas) -> list[SequenceUpdate]:
    news = []
    while both.has_work():
        news += step(both)
    return news


def homes(schedulers: list[Scheduler], *names: str) -> list[int]:
    return [next(i for i, s in enumerate(schedulers) if s.has_request(name)) for name in names]


def test_requests_spread_over_replicas_that_know_nothing_of_them() -> None:
    both, schedulers = make()
    for i in range(6):
        both.add(request(str(i), [i + 1] * 20))
    assert homes(schedulers, *map(str, range(6))) == [0, 1, 0, 1, 0, 1]
    plan = both.schedule(0.0)
    assert isinstance(plan, JointPlan)
    assert [len(part.sequences) for part in plan.plans if part is not None] == [3, 3]
    assert len({s.seq_id for s in plan.sequences}) == 6


def test_idle_replica_keeps_no_other_from_planning_ahead() -> None:
    both, _ = make(drafts=2)
    both.add(request("alone", [1] * 20, max_tokens=20))
    step(both)
    spans = []
    for _ in range(2):  # the second while the first one's drafts are being verified
        assert both.foresees(2) == bool(spans)
        plan = both.schedule(0.0, 2)
        assert plan is not None and plan.plans[1] is None
        spans += [(s.drafts, s.unresolved) for s in plan.sequences]
    assert spans == [(2, None), (2, 2)]


def test_prefix_draws_a_request_to_the_replica_that_has_it() -> None:
    both, schedulers = make()
    prefix = list(range(300))
    both.add(request("idle", [1] * 20))
    both.add(request("first", [*prefix, 1]))
    assert homes(schedulers, "first") == [1]
    finish(both)
    for name in ("second", "third"):
        both.add(request(name, [*prefix, 2]))
    both.add(request("salted", [*prefix, 2], cache_salt="other"))
    both.add(request("fresh", [5] * 300))
    assert homes(schedulers, "second", "third", "salted", "fresh") == [1, 1, 0, 0]


def test_prefix_is_no_reason_to_wait() -> None:
    both, schedulers = make(max_num_seqs=2)
    prefix = list(range(300))
    both.add(request("first", [*prefix, 1]))
    finish(both)
    for i in range(5):
        both.add(request(str(i), [*prefix, 2]))
    assert homes(schedulers, *map(str, range(5))) == [0, 0, 1, 1, 0]


def test_round_robin_takes_replicas_in_turn_whatever_they_have_cached() -> None:
    both, schedulers = make(3, max_num_seqs=2, placement="round_robin")
    prefix = list(range(300))
    for i in range(3):
        both.add(request(str(i), [*prefix, i]))
        finish(both)
    both.add(request("both places", [*prefix, 3], n=2))
    for name in "abcde":
        both.add(request(name, [*prefix, 4]))
    assert homes(schedulers, "both places", *"abcde") == [0, 1, 2, 1, 2, 0], "full ones are passed over until all are"
    both.check()


def test_reset_makes_prefixes_of_all_replicas_unreachable() -> None:
    both, schedulers = make()
    prefix = list(range(300))
    for name in ("a", "b"):
        both.add(request(name, [*prefix, 1]))
    finish(both)
    assert [s.cached_prefix(request("x", [*prefix, 2])) for s in schedulers] == [256, 256]
    both.reset_prefix_cache()
    assert [s.cached_prefix(request("x", [*prefix, 2])) for s in schedulers] == [0, 0]


def test_new_weights_and_lost_state_concern_all_replicas() -> None:
    both, schedulers = make()
    prefix = list(range(300))
    for name in ("a", "b"):
        both.add(request(name, [*prefix, 1]))
    finish(both)
    both.publish(7)
    assert [s.cached_prefix(request("x", [*prefix, 2])) for s in schedulers] == [0, 0]
    for name in ("c", "d"):
        both.add(request(name, prefix))
    updates = step(both) + step(both)  # a prefix of 256 tokens, then the rest
    assert {update.weight_version for update in updates} == {7} and [s.num_running for s in schedulers] == [1, 1]
    both.preempt_all()
    assert [(s.num_running, s.num_waiting) for s in schedulers] == [(0, 1), (0, 1)]
    finish(both)
    both.check()


def test_requests_of_all_replicas_end_once_and_leave_nothing() -> None:
    both, schedulers = make(3)
    chance = random.Random(0)
    open_requests: dict[str, int] = {}
    ends: list[tuple[str, int]] = []
    for number in range(120):
        name = str(number)
        n = chance.choice((1, 1, 3))
        deadline = number + 5.0 if chance.random() < 0.2 else None
        both.add(request(name, [chance.randrange(9) for _ in range(chance.choice((1, 20, 600)))], n=n, deadline=deadline))
        open_requests[name] = n
        news = step(both, float(number))
        if chance.random() < 0.2:
            news += both.abort(chance.choice(list(open_requests)))
        ends += [(update.request_id, update.index) for update in news if update.finish_reason is not None]
        both.check()
    ends += [(update.request_id, update.index) for update in finish(both) if update.finish_reason is not None]
    assert sorted(ends) == sorted((name, index) for name, n in open_requests.items() for index in range(n))
    assert both.schedule(1e9) is None
    both.check()
    stats = both.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages) == (0, 0, 96)
    assert stats.available_pages == 96 and sum(s._pools.slots.num_free for s in schedulers) == 12
    assert stats.prompt_tokens == sum(s.stats().prompt_tokens for s in schedulers)


def test_idle_replica_has_no_plan_of_its_own() -> None:
    both, _ = make()
    both.add(request("only", [1] * 10))
    plan = both.schedule(0.0)
    assert plan is not None and plan.plans[1] is None and plan.plans[0] is not None
    both.update(plan, {s.seq_id: Sampled(token_id=7) for s in plan.sequences if s.sample})
    assert [update.finish_reason for update in both.abort(None)] == ["abort"]
    assert both.schedule(0.0) is None and both.abort("only") == [] and not both.has_work()


def test_id_of_an_ended_request_may_be_used_again() -> None:
    both, _ = make()
    for name in ("a", "b"):
        both.add(request(name, [1] * 10))
    finish(both)
    both.add(request("a", [1] * 10))
    both.check()
