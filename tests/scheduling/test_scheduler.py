"""One test per rule. The harness executes every plan on the simulated device, so wrong state fails here too."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref
from typing import Any

import pytest

from dsv4lite.errors import CapacityError
from dsv4lite.paging import WINDOW_PAGE_TOKENS
from dsv4lite.request import SequenceUpdate
from dsv4lite.scheduling.pages import Pools
from dsv4lite.scheduling.scheduler import Sampled, SchedulerLimits, Sequence, SequencePlan, StepPlan
from dsv4lite.scheduling.sequence import State, WaitingQueue, make_sequences
from tests.scheduling.simulator import EOS, Harness, request


def make(
    *,
    seqs: int = 4,
    room: int = 1024,
    max_len: int = 4096,
    window: int = 128,
    every: int = 1024,
    caching: bool = True,
    grow: int = 64,
    window_pages: int = 64,
    slots: int | None = None,
    snapshots: int = 16,
    overlap: bool = False,
    drafts: int = 0,
    right: bool = True,
) -> Harness:
    """Return an engine's host; with ``drafts`` the device drafts, all accepted or all rejected."""
    limits = SchedulerLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=room,
        max_model_len=max_len,
        window=window,
        prefix_checkpoint_tokens=every,
        enable_prefix_caching=caching,
        max_drafts=drafts,
    )
    pools = Pools(grow=grow, window=window_pages, slots=seqs if slots is None else slots, snapshots=snapshots)
    return Harness(limits, pools, overlap=overlap, right=(lambda: right) if drafts else None, ahead=bool(drafts))


def text(num_tokens: int, seed: int = 1) -> list[int]:
    return [1 + (seed * i * i + i) % 47 for i in range(num_tokens)]


def spans(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """Return (sequence, start, end) of a plan."""
    assert plan is not None
    return [(part.seq_id, part.start, part.end) for part in plan.sequences]


def part_of(plan: StepPlan | None, seq_id: int) -> SequencePlan:
    assert plan is not None
    return next(part for part in plan.sequences if part.seq_id == seq_id)


def finish(harness: Harness, request_id: str) -> None:
    for _ in range(5000):
        if all((request_id, i) in harness.ends for i in range(harness.requests[request_id].params.n)):
            return
        harness.step()
    raise AssertionError(f"{request_id} does not end")


def sample(harness: Harness, token_id: int, now: float = 0.0) -> list[SequenceUpdate]:
    """Run a step without the device, in which every sequence that samples gets this token."""
    plan = harness.scheduler.schedule(now)
    assert plan is not None
    return harness.scheduler.update(plan, {part.seq_id: Sampled(token_id=token_id) for part in plan.sequences if part.sample})


def serve(harness: Harness, request_id: str, prompt: list[int], **settings: Any) -> int:
    """Run a request to its end, by default one token; return how many tokens of its prompt were cached."""
    harness.add(request(request_id, prompt, **{"max_tokens": 1, **settings}))
    finish(harness, request_id)
    return harness.cached[request_id, 0]


# ------------------------------------------------------------------------------------------------------------ batching


def test_plan_mixes_decode_and_chunked_prefill() -> None:
    h = make(room=100, caching=False)
    h.add(request("a", text(30), max_tokens=50))
    assert spans(h.step()) == [(0, 0, 30)]
    h.add(request("b", text(250, 2), max_tokens=5))
    h.add(request("c", text(40, 3), max_tokens=5))
    assert spans(h.step()) == [(0, 30, 31), (1, 0, 99)]
    assert spans(h.step()) == [(0, 31, 32), (1, 99, 198)]
    plan = h.step()
    assert spans(plan) == [(0, 32, 33), (1, 198, 250), (2, 0, 40)]
    assert [part.sample for part in plan.sequences] == [True, True, True] and plan.num_tokens == 93
    assert spans(h.step()) == [(0, 33, 34), (1, 250, 251), (2, 40, 41)]
    h.drain()


def test_plan_lists_single_tokens_first() -> None:
    h = make(room=100, caching=False)
    h.add(request("long", text(120), max_tokens=3))
    assert spans(h.step()) == [(0, 0, 100)]
    h.add(request("one", [7], max_tokens=3))
    assert spans(h.step()) == [(1, 0, 1), (0, 100, 120)]
    h.drain()


def test_decode_never_waits_for_prefill() -> None:
    h = make(room=10, caching=False)
    for name in "ab":
        h.add(request(name, text(3), max_tokens=60))
    h.step()
    h.add(request("urgent", text(500), priority=-1, max_tokens=1))
    for start in (3, 4, 5):
        plan = h.step()
        assert spans(plan)[:2] == [(0, start, start + 1), (1, start, start + 1)] and plan.num_tokens == 10
    h.drain()


def test_queue_is_strictly_in_order_of_priority_and_arrival() -> None:
    h = make(seqs=1, caching=False)
    for name, priority, arrival in (("c", 0, 2.0), ("b", 0, 1.0), ("d", 1, 0.0), ("a", -1, 3.0)):
        h.add(request(name, text(5), priority=priority, arrival=arrival, max_tokens=2))
    h.drain()
    assert list(h.ends) == [("a", 0), ("b", 0), ("c", 0), ("d", 0)]


@pytest.mark.parametrize("overlap", [False, True])
def test_places_that_get_free_are_filled_together_or_after_a_few_steps(overlap: bool) -> None:
    h = make(seqs=128, room=4096, max_len=100, caching=False, grow=160, window_pages=300, overlap=overlap)

    def starts() -> int:
        return sum(start == 0 for _, start, _ in spans(h.step()))

    for i in range(132):
        h.add(request(str(i), text(3, i), max_tokens=90))
    assert starts() == 128
    h.abort("0")
    assert starts() == starts() == 0
    h.abort("1")
    assert starts() == 2
    h.abort("2")
    assert [starts() for _ in range(9)] == [0] * 8 + [1]
    h.abort("3")
    assert starts() == 1, "it waits alone: there is nothing to fill together"
    h.drain()


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    h = make(grow=16, max_len=4096, caching=False, room=4096)
    h.add(request("a", text(2500), max_tokens=3))
    h.add(request("big", text(3000, 2), max_tokens=2))
    h.add(request("small", text(5, 3), max_tokens=2))
    assert spans(h.step()) == [(0, 0, 2500)]
    assert spans(h.step()) == [(0, 2500, 2501)]
    h.drain()
    assert list(h.ends) == [("a", 0), ("big", 0), ("small", 0)]


def test_starting_leaves_headroom_for_those_that_run() -> None:
    h = make(grow=200, max_len=51_200, room=60_000, caching=False)
    h.add(request("a", text(256), max_tokens=500))
    h.step()
    h.add(request("b", text(197 * 256, 2), max_tokens=1))  # a has 1, then 2 pages; 2 of 200 are headroom
    assert len(spans(h.step())) == 1
    h.drain()


def test_prefill_takes_its_pages_at_once_but_plans_only_those_it_has_reached() -> None:
    h = make(room=300, caching=False, grow=16)
    h.add(request("a", text(1000), max_tokens=1))
    plan = h.step()
    assert len(part_of(plan, 0).pages) == 2
    assert h.pools.grow.num_free == 12
    h.drain()


# -------------------------------------------------------------------------------------------------------- window pages


def test_window_pages_slide_away_one_plan_later() -> None:
    h = make(caching=False)
    h.add(request("a", text(200), max_tokens=130))
    plan = h.step()
    assert part_of(plan, 0).window_first == 1  # a chunk writes its last 128 rows only
    assert len(part_of(plan, 0).window_pages) == 3
    for end in range(201, 320):
        before = h.pools.window.num_free
        part = part_of(h.step(), 0)
        assert part.window_first == (end - 128) // 64 and len(part.window_pages) in (2, 3)
        assert abs(h.pools.window.num_free - before) <= 1
    h.drain()


def test_window_of_a_long_chunk_has_a_gap() -> None:
    h = make(room=600, caching=False)
    h.add(request("a", text(1200), max_tokens=1))
    h.step()
    part = part_of(h.step(), 0)
    assert (part.start, part.end, part.window_first) == (600, 1200, 7)
    assert [page >= 0 for page in part.window_pages] == [True] * 3 + [False] * 6 + [True] * 3
    h.drain()


def test_plans_share_page_tuples_until_a_page_is_added() -> None:
    h = make(caching=False)
    h.add(request("a", text(130), max_tokens=150))
    h.step()
    parts = [part_of(h.step(), 0) for _ in range(149)]
    assert len({id(part.pages) for part in parts}) == 2
    assert len({id(part.window_pages) for part in parts}) <= 6


# -------------------------------------------------------------------------------------------------------- prefix cache


@pytest.mark.parametrize(
    ("settings", "ends", "saves"),
    [
        ({}, [512, 600], [1, 0]),
        ({"caching": False}, [600], [0]),
        ({"room": 4096, "every": 512}, [512, 1024, 1280, 1500], [1, 1, 1, 0]),
        ({"room": 1000, "every": 1024}, [768, 1536, 2304, 3072, 3840, 4000], [1, 1, 1, 1, 1, 0]),
    ],
    ids=["last page boundary", "no caching", "every prefix to cache", "no small chunks"],
)
def test_prefill_stops_where_a_prefix_is_cached(settings: dict[str, Any], ends: list[int], saves: list[int]) -> None:
    """With room for slightly less than the distance of cached prefixes, every other chunk was once tiny."""
    h, plans = make(**settings), list[StepPlan | None]()
    h.add(request("a", text(ends[-1]), max_tokens=1))
    while ("a", 0) not in h.ends:
        plans.append(h.step())
    assert [spans(plan) for plan in plans] == [[(0, start, end)] for start, end in zip([0, *ends], ends)]
    assert [len(part.saves) for part in plans if part is not None] == saves
    h.drain()


def test_hit_restores_the_longest_prefix_and_runs_the_rest() -> None:
    h = make()
    serve(h, "a", text(600))
    h.add(request("b", text(600) + text(100, 2), max_tokens=4))
    plan = h.step()
    assert spans(plan) == [(1, 512, 700)] and len(plan.restores) == 1 and not plan.resets
    finish(h, "b")
    assert h.cached["b", 0] == 512 and h.cached["a", 0] == 0
    assert h.scheduler.stats().cached_tokens == 512 and h.scheduler.stats().prompt_tokens == 1300
    h.drain()


@pytest.mark.parametrize(("length", "cached"), [(256, 0), (257, 256), (512, 256), (513, 512)])
def test_hit_leaves_a_token_to_run(length: int, cached: int) -> None:
    h = make()
    h.add(request("a", text(513), max_tokens=1))
    h.add(request("a2", text(257), max_tokens=1))
    finish(h, "a")
    finish(h, "a2")
    assert serve(h, "b", text(length), max_tokens=2) == cached
    h.drain()


def test_prefix_of_the_same_step_is_not_hit() -> None:
    h = make(room=2048)
    for name in "ab":
        h.add(request(name, text(300), max_tokens=2))
    plan = h.step()
    assert spans(plan) == [(0, 0, 256), (1, 0, 256)] and not plan.restores
    assert h.scheduler.stats().checkpoints == 1
    h.drain()


def test_salts_do_not_share() -> None:
    h = make()
    for name, salt, cached in (("a", None, 0), ("b", "x", 0), ("c", "", 0), ("d", "x", 256), ("e", None, 256)):
        assert serve(h, name, text(300), salt=salt) == cached
    h.drain()


def test_reset_hides_prefixes_and_keeps_running_sequences() -> None:
    h = make()
    h.add(request("old", text(300), max_tokens=300))
    h.step()
    h.bump()
    h.step()
    assert serve(h, "new", text(300)) == 0
    assert h.scheduler.stats().checkpoints == 2, "one of each epoch; the old sequence adds no more"
    finish(h, "old")
    assert h.scheduler.stats().checkpoints == 2
    assert serve(h, "again", text(300)) == 256
    h.drain()


def test_experts_of_cached_tokens_are_unknown_so_they_run() -> None:
    h = make()
    for name in "ab":
        assert serve(h, name, text(300), return_routed_experts=True) == 0


def test_state_of_pages_alone_is_cached_without_snapshots() -> None:
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=1024, max_model_len=1024, window=0, snapshots=False)
    h = Harness(limits, Pools(grow=16, window=0, slots=2, snapshots=0))
    for name, cached in (("a", 0), ("b", 512)):
        assert serve(h, name, text(600)) == cached
    h.drain()


def test_no_snapshot_means_no_cached_prefix() -> None:
    h = make(snapshots=0)
    h.add(request("a", text(600), max_tokens=300))
    h.drain()
    assert h.scheduler.stats().checkpoints == 0 and not any(plan.saves for plan in h.plans)


@pytest.mark.parametrize("overlap", [False, True])
def test_decode_replaces_its_cached_prefix_until_a_lasting_one_is_due(overlap: bool) -> None:
    h = make(every=512, overlap=overlap)
    h.add(request("a", text(100), max_tokens=1300))
    counts = []
    while ("a", 0) not in h.ends:
        plan = h.step()
        if plan is not None and plan.saves:
            if h.outstanding:
                h.update()
            counts.append([c.num_tokens for c in h.scheduler._cache.prefixes()])
    assert counts == [[256], [512], [512, 768], [512, 1024], [512, 1024, 1280]]
    tokens = h.outputs["a", 0]
    assert serve(h, "b", text(100) + tokens[:-1]) == 1280
    h.drain()


def until_a_prefix_is_saved() -> Harness:
    """Return a host whose last plan saves a prefix, with the prefix's last token in flight."""
    h = make(overlap=True)
    h.add(request("a", text(250), max_tokens=20))
    while not (h.plans and h.plans[-1].saves):
        h.plan()
        if not h.plans[-1].saves:
            h.update() if len(h.outstanding) == 2 else None
    return h


def test_prefix_with_its_last_token_in_flight_is_cached_when_it_arrives() -> None:
    h = until_a_prefix_is_saved()
    assert part_of(h.plans[-1], 0).token_ids == (-1,) and part_of(h.plans[-1], 0).end == 256
    assert h.scheduler.stats().checkpoints == 0
    h.update()
    assert h.scheduler.stats().checkpoints == 1
    h.drain()


def test_abort_drops_a_prefix_whose_last_token_is_in_flight() -> None:
    h = until_a_prefix_is_saved()
    h.abort("a")
    h.scheduler.check()
    assert h.pools.snapshots.num_free == 16
    h.drain()


def test_error_forgets_the_prefixes_of_the_sequence() -> None:
    h = make()
    serve(h, "other", text(300, 2))
    h.add(request("a", text(300), max_tokens=9), fails_at=3)
    finish(h, "a")
    assert h.ends["a", 0].finish_reason == "error" and h.ends["a", 0].error is not None
    assert len(h.outputs["a", 0]) == 3 and h.scheduler.stats().checkpoints == 1
    h.drain()


# --------------------------------------------------------------------------------------------------------------- score


def test_score_covers_each_prompt_token_once() -> None:
    h = make(room=200)
    h.add(request("a", text(600), score_from=150, max_tokens=1))
    scores = []
    while ("a", 0) not in h.ends:
        scores.append(part_of(h.step(), 0).score)
    assert scores == [(149, 200), (200, 400), (400, 512), (512, 599)]
    h.drain()


def test_score_limits_the_hit() -> None:
    h = make()
    h.add(request("a", text(900), max_tokens=1))
    h.add(request("a2", text(300), max_tokens=1))
    finish(h, "a")
    finish(h, "a2")
    assert serve(h, "b", text(900), score_from=500) == 256
    h.drain()


def test_scored_prompt_ends_without_its_last_token() -> None:
    h = make(room=400, max_len=600)
    h.add(request("a", text(600), score_from=1, generate=False))
    plans = [h.step(), h.step()]
    assert [spans(plan)[0][1:] for plan in plans] == [(0, 400), (400, 512)] and not h.ends
    plan = h.step()
    assert spans(plan) == [(0, 512, 599)] and not plan.sequences[0].sample
    assert h.ends["a", 0].finish_reason == "stop" and h.ends["a", 0].token_ids == ()
    h.add(request("b", text(600), generate=False))  # nothing to score: all but the last token may be cached
    finish(h, "b")
    assert h.cached["b", 0] == 512
    h.drain()


def test_scores_are_passed_on_with_the_updates() -> None:
    h = make(room=10, caching=False)
    h.add(request("a", text(15), score_from=1, max_tokens=1))
    marks: list[object] = []
    for score in (object(), object()):
        plan = h.scheduler.schedule(0.0)
        assert plan is not None
        results = {0: Sampled(token_id=9)} if plan.sequences[0].sample else {}
        updates = h.scheduler.update(plan, results, scores={0: score})  # type: ignore[dict-item]
        assert [u.prompt_logprobs is score for u in updates] == [True]
        marks.append(updates[0].finish_reason)
    assert marks == [None, "length"]


def test_preempted_prompt_is_not_scored_twice() -> None:
    h = make(room=300, caching=False)
    h.add(request("a", text(800), score_from=1, max_tokens=3))
    h.step()
    h.preempt_all()
    parts = [part_of(h.step(), 0).score for _ in range(3)]
    assert parts == [None, (300, 600), (600, 799)]
    h.drain()


# --------------------------------------------------------------------------------------------------------------- forks


def test_fork_shares_full_pages_and_copies_the_rest() -> None:
    h = make(room=4096)
    h.add(request("a", text(600), n=3, max_tokens=4))
    assert spans(h.step()) == [(0, 0, 512)]
    assert spans(h.step()) == [(0, 512, 599)]
    assert (h.scheduler.num_running, h.scheduler.num_waiting) == (1, 2)
    plan = h.step()
    assert spans(plan) == [(0, 599, 600), (1, 599, 600), (2, 599, 600)]
    leader, *children = plan.sequences
    for child in children:
        assert child.pages[:2] == leader.pages[:2] and child.pages[2] != leader.pages[2]
        # Rows [472, 599) lie in window pages 7, 8 and 9; 599 = 9 * 64 + 23.
        assert child.window_pages[:2] == leader.window_pages[:2] and child.window_pages[2] != leader.window_pages[2]
    assert [len(c) for c in (plan.slot_copies, plan.grow_copies, plan.window_copies)] == [2, 2, 2]
    assert not plan.resets and h.scheduler.num_running == 3
    h.drain()


def test_fork_on_a_page_boundary_copies_the_compressor_state_only() -> None:
    h = make(room=4096)
    h.add(request("a", text(513), n=2, max_tokens=4))
    assert spans(h.step()) == [(0, 0, 512)]
    plan = h.step()
    assert spans(plan) == [(0, 512, 513), (1, 512, 513)]
    assert len(plan.slot_copies) == 1 and not plan.grow_copies and not plan.window_copies
    h.drain()


def test_fork_right_after_a_hit() -> None:
    h = make(room=4096)
    serve(h, "a", text(513))
    h.add(request("b", text(513), n=3, max_tokens=4))
    plan = h.step()
    assert spans(plan) == [(1, 512, 513), (2, 512, 513), (3, 512, 513)]
    assert len(plan.restores) == 1 and len(plan.slot_copies) == 2
    h.drain()


def test_completions_of_one_token_prompts_are_not_forked() -> None:
    h = make()
    h.add(request("a", [5], n=3, max_tokens=4))
    plan = h.step()
    assert spans(plan) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)] and not plan.slot_copies and len(plan.resets) == 3
    h.drain()


def test_completions_without_a_place_wait_and_compute_their_own() -> None:
    h = make(seqs=2, room=4096)
    h.add(request("a", text(600), n=4, max_tokens=3, score_from=1))
    h.step()
    h.step()
    plan = h.step()
    assert len(plan.slot_copies) == 1 and h.scheduler.num_waiting == 2
    h.drain()
    assert h.cached["a", 2] == h.cached["a", 3] == 512
    assert [len(h.device.truths[i].scored) for i in range(4)] == [599, 0, 0, 0]


def test_completions_wait_through_a_preemption_of_their_leader() -> None:
    h = make(room=300)
    h.add(request("a", text(600), n=2, max_tokens=3))
    h.step()
    h.preempt_all()
    assert h.scheduler.num_waiting == 2
    h.drain()
    assert sum(len(plan.slot_copies) for plan in h.plans) == 1


@pytest.mark.parametrize(
    ("length", "steps", "aborted", "waiting"), [(600, 1, (0, 2), 1), (20, 4, (1,), 0)], ids=["leader", "one of three"]
)
def test_completions_outlive_others(length: int, steps: int, aborted: tuple[int, ...], waiting: int) -> None:
    h = make(room=300)
    h.add(request("a", text(length), n=3, max_tokens=9))
    for _ in range(steps):
        h.step()
    for index in aborted:
        h.abort("a", index=index)
        assert h.scheduler.abort("a", index=index) == []
    assert h.scheduler.num_waiting == waiting
    h.drain()
    assert [h.ends["a", i].finish_reason == "abort" for i in range(3)] == [i in aborted for i in range(3)]
    assert {h.ends["a", i].finish_reason for i in range(3)} == {"abort", "length"}


def test_fork_larger_than_the_step_goes_on_in_the_next() -> None:
    h = make(seqs=8, room=4, caching=False)
    h.add(request("a", text(4), n=6, max_tokens=3))
    assert spans(h.step()) == [(0, 0, 3)]
    assert [s for s, _, _ in spans(h.step())] == [0, 1, 2, 3]
    assert h.scheduler.num_running == 6
    h.drain()


# ---------------------------------------------------------------------------------------------------------- preemption


def test_preemption_takes_the_last_of_the_lowest_priority() -> None:
    h = make(grow=5, max_len=1000, caching=False)
    h.add(request("low", text(250), priority=1, arrival=0.0, max_tokens=300))
    h.add(request("first", text(500), priority=0, arrival=1.0, max_tokens=300))
    h.add(request("second", text(250), priority=0, arrival=2.0, max_tokens=300))
    h.step()
    assert h.scheduler.num_running == 3 and h.pools.grow.num_free == 1
    states = []
    while h.scheduler.stats().preemptions == 0:
        h.step()
    states = [h.scheduler.sequences_of(n)[0].slot >= 0 for n in ("low", "first", "second")]
    assert states == [False, True, True]
    h.drain()
    assert list(h.ends)[-1] == ("low", 0)


def test_preempted_sequence_computes_its_completion_again_as_prompt() -> None:
    h = make(room=4096, caching=False)
    h.add(request("a", text(100), max_tokens=50))
    for _ in range(20):
        h.step()
    h.preempt_all()
    assert (h.scheduler.num_running, h.scheduler.num_waiting) == (0, 1)
    plan = h.step()
    assert spans(plan) == [(0, 0, 120)] and plan.sequences[0].sample
    h.drain()


def test_preempted_sequence_resumes_from_its_own_cached_prefix() -> None:
    h = make()
    h.add(request("a", text(100), max_tokens=500))
    for _ in range(450):
        h.step()
    h.preempt_all()
    plan = h.step()
    assert part_of(plan, 0).start == 512 and plan.restores
    h.drain()
    assert h.cached["a", 0] == 0, "these were not prompt tokens from another request"


def test_cached_prefixes_are_evicted_before_a_sequence_is_preempted() -> None:
    h = make(grow=4, max_len=1000)
    serve(h, "a", text(600))
    assert h.pools.grow.num_available - h.pools.grow.num_free == 2
    h.add(request("b", text(300, 2), max_tokens=600))
    h.drain()
    assert h.scheduler.stats().preemptions == 0


def test_request_that_cannot_start_yet_leaves_the_cache_alone() -> None:
    h = make(grow=8, max_len=2000, room=4096)
    serve(h, "a", text(300))
    h.add(request("b", text(900, 2), max_tokens=60))
    h.step()
    h.add(request("big", text(1800, 3), max_tokens=1))
    before = h.scheduler.stats().checkpoints
    for _ in range(10):
        h.step()
    assert h.scheduler.num_waiting == 1 and h.scheduler.stats().checkpoints >= before
    h.drain()


def test_last_sequence_stalls_rather_than_preempting_itself() -> None:
    h = make(grow=4, max_len=1000, caching=False)
    h.add(request("a", text(500), arrival=0.0, max_tokens=9))
    h.add(request("b", text(500), arrival=1.0, max_tokens=40))
    h.step()
    for _ in range(8):
        h.step()
    h.add(request("c", text(3), arrival=2.0, max_tokens=3))
    finish(h, "a")
    assert h.scheduler.stats().preemptions == 0
    h.drain()
    assert h.scheduler.stats().preemptions == 0


def test_no_sequence_starts_in_a_step_that_preempted_one() -> None:
    h = make(grow=4, max_len=1000, caching=False)
    h.add(request("a", text(505), arrival=0.0, max_tokens=30))
    h.add(request("b", text(505), arrival=1.0, max_tokens=30))
    while h.scheduler.sequences_of("a")[0].num_computed < 512:
        h.step()
    h.add(request("c", text(3), priority=-1, max_tokens=2))
    assert [s for s, _, _ in spans(h.step())] == [0] and h.scheduler.stats().preemptions == 1
    assert [s for s, _, _ in spans(h.step())] == [0, 2]
    h.drain()


def test_preempted_sequence_gets_its_token_in_flight() -> None:
    h = make(overlap=True, caching=False)
    h.add(request("a", text(100), max_tokens=9))
    h.plan()
    seq = h.scheduler.sequences_of("a")[0]
    h.scheduler._preempt(seq)
    assert h.plan() is None, "it waits for its token"
    h.update()
    assert spans(h.plan()) == [(0, 0, 101)]
    h.drain()


# ------------------------------------------------------------------------------------------------------------- overlap


def test_overlap_plans_with_the_token_in_flight() -> None:
    h = make(overlap=True, caching=False)
    h.add(request("a", text(10), max_tokens=3))
    assert spans(h.plan()) == [(0, 0, 10)]
    assert part_of(h.plan(), 0).token_ids == (-1,)
    h.update()
    assert part_of(h.plan(), 0).token_ids == (-1,)
    h.update()
    assert h.plan() is None, "the third token is in flight and the last"
    h.update()
    assert len(h.outputs["a", 0]) == 3 and not h.scheduler.has_work()


def test_overlap_never_runs_beyond_max_model_len() -> None:
    h = make(overlap=True, caching=False, max_len=20)
    h.add(request("a", text(10)))
    h.drain()
    assert len(h.outputs["a", 0]) == 10 and max(part.end for plan in h.plans for part in plan.sequences) == 19


def test_overlap_gives_the_state_back_with_the_last_step_in_flight() -> None:
    h = make(overlap=True, caching=False, seqs=1)
    h.add(request("a", text(10), max_tokens=1))
    h.add(request("b", text(10), max_tokens=1))
    first, second = h.plan(), h.plan()
    assert part_of(first, 0).slot == part_of(second, 1).slot and second is not None and second.resets == (0,)
    h.scheduler.check()
    h.drain()


def test_overlap_drops_the_step_after_the_end() -> None:
    h = make(overlap=True, caching=False)
    h.add(request("a", text(10), ignore_eos=False))
    plan = h.scheduler.schedule(0.0)
    extra = h.scheduler.schedule(0.0)
    assert plan is not None and extra is not None and extra.sequences[0].token_ids == (-1,)
    (update,) = h.scheduler.update(plan, {0: Sampled(token_id=EOS)})
    assert (update.token_ids, update.finish_reason, update.stop_reason) == ((EOS,), "stop", None)
    assert h.scheduler.update(extra, {0: Sampled(token_id=7)}) == []
    assert not h.scheduler.has_work() and h.pools.grow.num_free == 64


@pytest.mark.parametrize("params", [{"thinking_budget": 3}, {"bad_words_ids": ((1, 2),)}, {"bad_words_ids": ((1,),)}, {}])
def test_overlap_waits_for_the_host_where_it_must_see_the_token(params: dict[str, object]) -> None:
    h = make(overlap=True, caching=False)
    h.add(request("a", text(10), max_tokens=3, **params))
    h.add(request("b", text(10), max_tokens=5))
    assert len(spans(h.plan())) == 2
    waits = params.get("bad_words_ids") != ((1,),) and bool(params)
    assert [s for s, _, _ in spans(h.plan())] == ([1] if waits else [0, 1])
    h.update()
    if waits:
        assert part_of(h.plan(), 0).token_ids == (h.outputs["a", 0][0],)
    h.drain()


def test_plans_are_updated_in_order_and_at_most_two_are_open() -> None:
    h = make(overlap=True)
    h.add(request("a", text(10), max_tokens=9))
    h.plan()
    second = h.plan()
    assert second is not None
    with pytest.raises(AssertionError, match="missing"):
        h.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="order"):
        h.scheduler.update(second, {})


# -------------------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize(
    ("params", "token", "reason", "stop"),
    [
        ({"ignore_eos": False}, EOS, "stop", None),
        ({"ignore_eos": True}, EOS, None, None),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, EOS, "stop", EOS),
        ({"stop_token_ids": (3, 9)}, 9, "stop", 9),
        ({"stop_token_ids": (3, 9)}, 8, None, None),
        ({"ignore_eos": False, "min_tokens": 1}, EOS, None, None),
        ({"stop_token_ids": (9,), "min_tokens": 1}, 9, None, None),
        ({"max_tokens": 1}, 9, "length", None),
        ({"max_tokens": 1, "ignore_eos": False}, EOS, "stop", None),
    ],
)
def test_first_token_ends_the_sequence_as_asked(
    params: dict[str, object], token: int, reason: str | None, stop: int | None
) -> None:
    h = make()
    h.add(request("a", text(10), **params))
    (update,) = sample(h, token)
    assert (update.token_ids, update.finish_reason, update.stop_reason) == ((token,), reason, stop)
    assert h.scheduler.has_work() == (reason is None)
    h.scheduler.check()


def test_min_tokens_holds_for_exactly_that_many() -> None:
    h = make()
    h.add(request("a", text(10), ignore_eos=False, min_tokens=2))
    reasons = []
    while h.scheduler.has_work():
        reasons += [u.finish_reason for u in sample(h, EOS)]
    assert reasons == [None, None, "stop"]


def test_updates_carry_the_start_and_the_cached_tokens_once() -> None:
    h = make()
    h.now = 5.0
    serve(h, "a", text(300))
    h.now = 9.0
    h.add(request("b", text(300), max_tokens=2))
    (first,), (second,) = sample(h, 9, now=9.0), sample(h, 9, now=10.0)
    assert (h.ends["a", 0].started, first.started, first.cached_tokens) == (5.0, 9.0, 256)
    assert (second.started, second.cached_tokens, second.finish_reason) == (9.0, 0, "length")


def test_error_of_a_chunk_that_samples_nothing_ends_the_sequence() -> None:
    h = make(room=100)
    h.add(request("a", text(300), max_tokens=5))
    plan = h.scheduler.schedule(0.0)
    assert plan is not None
    error = CapacityError("x")
    (update,) = h.scheduler.update(plan, {0: Sampled(token_id=-1, error=error)})
    assert (update.finish_reason, update.error, update.token_ids) == ("error", error, ())
    h.scheduler.check()
    assert not h.scheduler.has_work()


def test_deadline_ends_all_sequences_of_a_request_once() -> None:
    h = make(seqs=2)
    h.add(request("a", text(600), n=3, deadline=10.0, max_tokens=500))
    h.add(request("b", text(50, 2), deadline=11.0, max_tokens=20))
    for _ in range(5):
        h.step()
    h.now = 9.99
    h.step()
    assert not h.ends
    h.now = 10.0
    h.step()
    assert {key: end.finish_reason for key, end in h.ends.items()} == {("a", i): "deadline" for i in range(3)}
    assert h.scheduler.expire(h.now) == []
    finish(h, "b")
    h.now = 12.0
    h.drain()
    assert h.ends["b", 0].finish_reason == "length"


def test_deadline_of_an_ended_request_does_not_touch_its_successor() -> None:
    h = make()
    serve(h, "a", text(10), deadline=10.0)
    h.scheduler.add(request("a", text(10), max_tokens=5))
    h.now = 20.0
    assert h.scheduler.expire(h.now) == [] and h.scheduler.schedule(h.now) is not None


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    """They once stayed until their time, of every request that had one."""

    class Name(str):
        __slots__ = ("__weakref__",)

    h = make()
    scheduler, names = h.scheduler, []
    for number in range(300):
        name = Name(number)
        names.append(weakref.ref(name))
        scheduler.add(request(name, text(10), deadline=1e12 + number, max_tokens=5))
        if number % 10:
            scheduler.abort(name)
        del name
    gc.collect()
    assert sum(name() is not None for name in names) <= 2 * 30 + 20
    assert len(scheduler.expire(1e12 + 299)) == 30 and not scheduler.has_work()


def test_deadlines_pass_without_a_step_too() -> None:
    h = make()
    h.add(request("a", text(10), deadline=1.0, max_tokens=5))
    h.step()
    assert h.scheduler.expire(0.5) == []
    assert [u.finish_reason for u in h.scheduler.expire(1.0)] == ["deadline"]
    assert not h.scheduler.has_work() and h.pools.slots.num_free == 4


@pytest.mark.parametrize("right", [True, False])
def test_spans_after_unresolved_drafts_wait_only_where_they_must(right: bool) -> None:
    """Where it depends on drafts whether a page boundary is reached, which a single token has to do."""
    h = make(drafts=2, right=right)
    h.add(request("a", text(100), max_tokens=300))
    h.drain()
    parts = [part_of(plan, 0) for plan in h.plans[1:]]
    known = [part.start for part in parts if part.unresolved is None]
    assert known in ([100], [100, 255]) and len(parts) > 100
    assert any(part.end == 256 and part.unresolved in (None, 0) for part in parts) and sum(bool(plan.saves) for plan in h.plans) > 0
    assert {part.unresolved for part in parts} <= {None, 0, 1, 2} and any(part.unresolved == 2 for part in parts)


@pytest.mark.parametrize("right", [True, False])
def test_window_slides_after_unresolved_drafts_only_where_a_page_is_left(right: bool) -> None:
    h = make(drafts=2, right=right)
    h.add(request("a", text(100), max_tokens=600))
    h.drain()
    pages = 700 // WINDOW_PAGE_TOKENS
    assert len(h.plans) > 200 and pages - 4 < len({id(part_of(plan, 0).window_pages) for plan in h.plans}) <= 8 * pages


def test_step_is_not_planned_after_unresolved_drafts_when_a_sequence_can_start() -> None:
    h = make(seqs=2, drafts=2)
    h.add(request("a", text(10), max_tokens=60))
    for _ in range(4):
        h.step()
    assert h.scheduler.foresees(2) and not h.scheduler.foresees(1) and not h.scheduler.foresees(0)
    h.add(request("b", text(20), max_tokens=60))
    assert not h.scheduler.foresees(2)
    h.drain()


def test_step_is_planned_after_unresolved_drafts_while_the_waiting_sequence_has_no_pages() -> None:
    """Any waiting sequence once ended planning ahead, for as long as it waited."""
    h = make(seqs=4, grow=16, room=4096, caching=False, drafts=2)
    h.add(request("a", text(2500), max_tokens=60))
    for _ in range(4):
        h.step()
    h.add(request("big", text(3000, 2), max_tokens=5))
    h.add(request("small", text(20, 3), max_tokens=5))
    while ("a", 0) not in h.ends:
        assert h.scheduler.num_waiting == 2
        assert h.scheduler.foresees(2)
        h.step()
    assert not h.scheduler.foresees(2)
    h.drain()
    assert list(h.ends) == [("a", 0), ("big", 0), ("small", 0)]


def test_end_after_unresolved_drafts_drops_what_was_planned_there() -> None:
    h = make(drafts=2)
    h.add(request("a", text(10), max_tokens=60, ignore_eos=False, stop_token_ids=tuple(range(1, 12))))
    h.drain()
    assert h.ends["a", 0].finish_reason == "stop" and h.plans[-1].sequences[0].unresolved is not None


def test_deadline_drops_the_token_in_flight() -> None:
    h = make(overlap=True)
    h.add(request("a", text(10), deadline=1.0, max_tokens=5))
    h.plan()
    h.now = 1.0
    assert h.plan() is None
    h.update()
    assert h.ends["a", 0].finish_reason == "deadline" and h.outputs["a", 0] == []
    h.check_end()


def test_abort_frees_at_once_and_is_idempotent() -> None:
    h = make(overlap=True)
    h.add(request("a", text(600), n=2, max_tokens=50))
    h.add(request("b", text(20), max_tokens=5))
    for _ in range(4):
        h.step()
    h.abort("a")
    assert [h.ends["a", i].finish_reason for i in range(2)] == ["abort", "abort"]
    assert h.scheduler.abort("a") == [] and h.scheduler.abort("unknown") == [] and h.scheduler.abort("b", index=0) != []
    assert h.scheduler.abort() == [] and not h.scheduler.has_work()
    h.update()
    h.scheduler.check()
    assert h.pools.slots.num_free == 4


def test_abort_passes_its_reason() -> None:
    h = make()
    h.add(request("a", text(20), n=2, max_tokens=9))
    h.add(request("b", text(20), max_tokens=9))
    assert [u.finish_reason for u in h.scheduler.abort(None, "stop")] == ["stop"] * 3


# ---------------------------------------------------------------------------------------------------------- what comes in


def test_id_of_an_ended_request_may_be_used_again() -> None:
    h = make()
    h.add(request("a", text(10), max_tokens=1))
    finish(h, "a")
    h.scheduler.add(request("a", text(10)))
    assert [seq.index for seq in h.scheduler.sequences_of("a")] == [0]


@pytest.mark.parametrize(("length", "generate"), [(99, True), (100, False)])
def test_longest_prompts_run(length: int, generate: bool) -> None:
    h = make(max_len=100)
    h.add(request("a", text(length), generate=generate))
    h.drain()


def test_the_longest_sequence_runs_in_the_smallest_pools() -> None:
    limits = SchedulerLimits(
        max_num_seqs=1, max_num_batched_tokens=100, max_model_len=1025, window=128, prefix_checkpoint_tokens=256
    )
    h = Harness(limits, Pools(grow=4, window=limits.window_pages, slots=1, snapshots=1))
    h.add(request("a", text(500)))
    h.add(request("b", text(1024, 2)))
    h.drain()
    assert len(h.outputs["a", 0]) == 525


def test_nothing_to_do_makes_no_plan() -> None:
    h = make()
    assert h.scheduler.schedule(0.0) is None and not h.scheduler.has_work()


def test_stats_count() -> None:
    h = make(seqs=2, slots=3)
    for name in "abc":
        h.add(request(name, text(300), max_tokens=300))
    h.step()
    stats = h.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.preemptions, stats.checkpoints) == (2, 1, 0, 1)
    assert (stats.num_pages, stats.available_pages) == (64, h.pools.grow.num_available)
    slots, snapshots = h.pools.slots, h.pools.snapshots
    cached = snapshots.num_available - snapshots.num_free
    assert (slots.total, slots.num_free, h.pools.grow.num_free, cached) == (3, 1, 60, 1)


def test_check_notices_a_lost_page() -> None:
    h = make()
    h.add(request("a", text(300), max_tokens=300))
    h.step()
    seq = h.scheduler.sequences_of("a")[0]
    seq.pages = seq.pages[:-1]
    with pytest.raises(AssertionError, match="grow page: wrong references"):
        h.scheduler.check()


def test_check_notices_a_lost_sequence() -> None:
    h = make()
    h.add(request("a", text(300), max_tokens=300))
    h.scheduler._waiting.pop()
    with pytest.raises(AssertionError, match="lost"):
        h.scheduler.check()


@pytest.mark.parametrize("order", ["first", "last", "any", "all"])
def test_waiting_sequences_can_end_in_any_order(order: str) -> None:
    h = make(seqs=2)
    names = [f"r{i}" for i in range(300)]
    for i, name in enumerate(names):
        h.add(request(name, text(10), n=3 if i % 3 == 0 else 1, priority=i % 5))
    h.scheduler.schedule(0.0)
    num_live = h.scheduler.num_live
    if order == "all":
        assert len(h.scheduler.abort()) == num_live == 500
    elif order == "any":
        random.Random(1).shuffle(names)
    elif order == "last":
        names.reverse()
    for count, name in enumerate(names):
        h.scheduler.abort(name)
        if count % 50 == 0:
            h.scheduler.check()
    assert not h.scheduler.has_work() and h.scheduler.num_waiting == 0


def test_waiting_sequences_start_in_order_though_some_end() -> None:
    queue, draw = WaitingQueue(), random.Random(0)
    requests = [request(f"r{i}", text(10), priority=draw.randrange(9)) for i in range(400)]
    made = [make_sequences(one, first_id=i, max_model_len=99)[0] for i, one in enumerate(requests)]
    inside: list[Sequence] = []
    for seq in made:
        queue.add(seq)
        inside.append(seq)
        if draw.random() < 0.4:
            ended = inside.pop(draw.randrange(len(inside)))
            ended.state = State.ENDED
            queue.leave(ended)
        if inside and draw.random() < 0.3:
            first = min(inside, key=lambda seq: seq.order)
            assert queue.first() is first and queue.pop() is first
            inside.remove(first)
        assert len(queue) == len(inside) and {seq.seq_id for seq in queue} == {seq.seq_id for seq in inside}


def test_policy_needs_no_torch() -> None:
    code = "import sys, dsv4lite.scheduling.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
