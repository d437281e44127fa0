"""The scheduler: plans which tokens of which sequences the next step runs, and on which pages. Plain Python, no tensors.

Sequences are served in the order of (priority, arrival): pages are allocated in that order; the last sequence is preempted first.

A released id may be allocated again at once, even if a step in flight still uses it, because steps run in the order of their
plans. So the ids that a plan uses are released no earlier than when the next plan is made.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from dsv4lite.errors import DSV4LiteError
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.request import FinishReason, Request, SequenceUpdate, TokenLogprob
from dsv4lite.scheduling.kv_manager import KVManager
from dsv4lite.scheduling.pages import Pools, pages_for
from dsv4lite.scheduling.sequence import Sequence, State, WaitingQueue, make_sequences
from dsv4lite.scheduling.step_plan import IN_FLIGHT, UNKNOWN, Sampled, SequencePlan, StepPlan

if TYPE_CHECKING:
    from dsv4lite.request import Logprobs

LEAST_PIPELINE_TOKENS = 1024
"""Least token budget of a pipeline's step: with fewer tokens a step takes nearly as long, because it reads the same weights."""

REFILLED_SHARE = 64
MOST_STEPS_HELD = 8
"""Even a short prompt makes a step longer. So free places are filled together: when ``max_num_seqs // REFILLED_SHARE`` are free, or
enough for all waiting sequences, or when places have been held back for ``MOST_STEPS_HELD`` steps."""

Propose = Callable[[Sequence, int], tuple[int, ...]]
_IN_FLIGHT = (IN_FLIGHT,)
_ORDER = attrgetter("order")
_new_tuple = tuple.__new__


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The scheduler's settings; see ``EngineConfig`` for those of the same name.

    Attributes:
        window: Tokens that sliding-window attention sees, the token itself included; 0 for a model without it.
        snapshots: Whether a cached prefix needs a snapshot of compressor state.
        max_drafts: Most draft tokens in one scheduled span.
        drafter_rows: Whether the model's own drafter computes KV in steps with drafts.
        stages: Pipeline stages; as many steps are in progress at a time.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    window: int
    snapshots: bool = True
    prefix_checkpoint_tokens: int = 2048
    enable_prefix_caching: bool = True
    max_drafts: int = 0
    drafter_rows: bool = False
    stages: int = 1

    @property
    def window_pages(self) -> int:
        """Most window pages that one scheduled span reads and writes."""
        return 2 * (1 + -(-self.window // WINDOW_PAGE_TOKENS)) if self.window else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot of counts.

    Attributes:
        num_running: Sequences that hold state.
        num_waiting: Sequences that wait to start, or to start again after a preemption; held ones are included.
        preemptions: Preemptions so far.
        prompt_tokens: Tokens of sequences that started, so far; a preempted sequence counts again when it starts again.
        cached_tokens: Those of ``prompt_tokens`` that came from the prefix cache.
        checkpoints: Cached prefixes, unreachable ones of older epochs included.
        num_pages: Grow pages.
        available_pages: Grow pages that are free or held by the prefix cache alone.
    """

    num_running: int
    num_waiting: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    checkpoints: int
    num_pages: int
    available_pages: int


@dataclass(slots=True, eq=False)
class _Planning:
    """A step plan under construction.

    Attributes:
        now: ``time.monotonic()``.
        room: Tokens that the step can still take.
        max_drafts: Most draft tokens in a span.
        singles, chunks: Spans of one known token, and others.
        leaders: Sequences whose prompt ends in this step, with completions that wait for it.
        prefixes: For each span that fills a page: sequence, its length then, and whether its cached prefix is a lasting one.
        short_of_pages: A sequence was preempted or could not run, so no waiting one may start.
    """

    now: float
    room: int
    max_drafts: int
    singles: list[SequencePlan] = field(default_factory=list)
    chunks: list[SequencePlan] = field(default_factory=list)
    leaders: list[Sequence] = field(default_factory=list)
    prefixes: list[tuple[Sequence, int, bool]] = field(default_factory=list)
    short_of_pages: bool = False


@dataclass(slots=True, eq=False)
class _Group:
    """The sequences of one request, the number of those that have not ended, the deadline, and whether they may run."""

    sequences: list[Sequence]
    open: int
    deadline: float
    ready: bool = False


class Scheduler:
    """Continuous batching with chunked prefill, recompute preemption, a prefix cache, micro-batches and one step of overlap.

    ``schedule`` makes a plan and ``update`` takes its results, in the same order. One plan per stage may be outstanding, and one
    more unless a pipeline has a ``propose``. Not thread-safe.

    Args:
        limits: Settings.
        pools: Ids of pages and slots, enough for one sequence of ``max_model_len``; the scheduler is their only user.
        propose: Returns at most a given number of draft tokens for a sequence whose tokens are all known. With it and one stage,
            a plan needs the results of the previous one, unless the scheduler ``foresees`` the step.
        first_seq_id: Id of the first sequence; later ids count up from it.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pools: Pools,
        *,
        propose: Propose | None = None,
        first_seq_id: int = 0,
    ) -> None:
        needs = ((pools.grow, pages_for(limits.max_model_len - 1)), (pools.window, limits.window_pages), (pools.slots, 1))
        assert all(pool.total >= need for pool, need in needs)
        self._limits = limits
        self._pools = pools
        self._propose = propose
        self._kv = KVManager(pools, window=limits.window, snapshots=limits.snapshots)
        self._cache = self._kv.cache
        self._groups: dict[str, _Group] = {}
        self._live: dict[int, Sequence] = {}
        self._running: list[Sequence] = []  # by (priority, arrival)
        self._waiting = WaitingQueue()
        self._retiring: list[Sequence] = []  # their last step is planned
        self._sliding: dict[Sequence, None] = {}  # the window may have passed their first page
        self._next_deadline = inf  # the earliest of all requests
        self._outstanding: deque[StepPlan] = deque()
        self._num_unforked = self._num_held = 0
        self._steps_held = 0  # during which free places were held back
        self._next_seq_id = first_seq_id
        self._next_step = 0
        self._weight_version = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    # ------------------------------------------------------------------------------------------------- requests

    def add(self, request: Request, *, ready: bool = True) -> None:
        """Queue the ``n`` sequences of a checked request, whose id is not in use, or hold them until it is ``ready``."""
        assert request.request_id not in self._groups
        sequences = make_sequences(request, first_id=self._next_seq_id, max_model_len=self._limits.max_model_len)
        self._next_seq_id += len(sequences)
        self._live.update((seq.seq_id, seq) for seq in sequences)
        deadline = inf if request.deadline is None else request.deadline
        self._groups[request.request_id] = _Group(sequences, len(sequences), deadline)
        self._next_deadline = min(self._next_deadline, deadline)
        self._num_held += len(sequences)
        if ready:
            self.ready(request.request_id)

    def ready(self, request_id: str) -> None:
        """Queue the sequences of a request that has been held; those that have ended stay so."""
        group = self._groups[request_id]
        group.ready = True
        self._num_held -= group.open
        leader = group.sequences[0]
        for seq in group.sequences:
            if seq.state is State.ENDED:
                continue
            if seq is leader or leader.state is State.ENDED or leader.prompt_len == 1:  # nothing to share
                self._waiting.add(seq)
            else:
                seq.state = State.UNFORKED
                leader.unforked[seq] = None
                self._num_unforked += 1

    def abort(
        self, request_id: str | None = None, reason: FinishReason = "abort", *, index: int | None = None
    ) -> list[SequenceUpdate]:
        """End a request, one of its completions, or (``None``) everything, and free the state. Ended sequences are ignored."""
        if request_id is None:
            return [update for group in list(self._groups.values()) for update in self._end_group(group, reason)]
        group = self._groups.get(request_id)
        if group is None:
            return []
        if index is None:
            return self._end_group(group, reason)
        seq = group.sequences[index]
        return [] if seq.state is State.ENDED else [self._end(seq, reason)]

    def expire(self, now: float) -> list[SequenceUpdate]:
        """End the requests whose deadline is not later than ``now``."""
        if now < self._next_deadline:
            return []
        groups = list(self._groups.values())
        self._next_deadline = min((group.deadline for group in groups if group.deadline > now), default=inf)
        return [update for group in groups if group.deadline <= now for update in self._end_group(group, "deadline")]

    def reset_prefix_cache(self) -> None:
        """Make cached prefixes unreachable. Running sequences continue; their prefixes so far are no longer cached."""
        self._cache.bump_epoch()

    def publish(self, weight_version: int) -> None:
        """Mark later tokens with a weight version and make all cached prefixes unreachable; no step may be outstanding."""
        assert not self._outstanding
        self._weight_version = weight_version
        self.reset_prefix_cache()

    def preempt_all(self) -> None:
        """Preempt all sequences, which compute their state again from their tokens; no step may be outstanding."""
        assert not self._outstanding
        self._release_deferred()
        while self._running:
            self._preempt(self._running[-1])

    def sequences_of(self, request_id: str) -> tuple[Sequence, ...]:
        """Return the sequences of a live request in the order of their index, ended ones included."""
        return tuple(self._groups[request_id].sequences)

    def has_request(self, request_id: str) -> bool:
        """Return whether a request has sequences that have not ended."""
        return request_id in self._groups

    def has_place(self) -> bool:
        """Return whether fewer than ``max_num_seqs`` sequences run and wait."""
        return len(self._live) < self._limits.max_num_seqs

    def cached_prefix(self, request: Request) -> int:
        """Return how many tokens of a request's prompt are cached."""
        most = len(request.prompt_token_ids) - 1
        return self._cache.longest(self._cache.chain(request.prompt_token_ids, request.cache_salt), most)

    def has_work(self) -> bool:
        """Return whether any sequence has not ended and is not held."""
        return len(self._live) > self._num_held

    def foresees(self, max_drafts: int) -> bool:
        """Return whether a step with at most ``max_drafts`` drafts per span can be planned before the results of the last step.

        It can if neither step has drafts. It also can if both have the same number of drafts, made on the device, all running
        sequences decode without rules on the host, and no waiting sequence can start. A scheduler without work, such as that of an
        idle replica, foresees any step.
        """
        if not self.has_work():
            return True
        drafting = [plan for plan in self._outstanding if plan.max_drafts]
        if not drafting or not max_drafts:
            return not drafting and not max_drafts
        if self._num_unforked or (self._waiting and self._has_room(self._waiting.first())):
            return False
        last = drafting[-1]
        if last.max_drafts != max_drafts or not last.decodes:
            return False
        return not [seq for seq in self._running if seq.needs_host or seq.num_computed < len(seq.tokens) - 1]

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Sequences that hold state on the device."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to start, held ones included."""
        return len(self._waiting) + self._num_unforked + self._num_held

    def stats(self) -> SchedulerStats:
        """Return the present counts."""
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            checkpoints=len(self._cache),
            num_pages=self._pools.grow.total,
            available_pages=self._pools.grow.num_available,
        )

    # ------------------------------------------------------------------------------------------------------- making a plan

    def schedule(self, now: float, max_drafts: int | None = None) -> StepPlan | None:
        """Plan the next step.

        Args:
            now: ``time.monotonic()``.
            max_drafts: Most draft tokens in a span, at most the ``max_drafts`` of the limits, which is the default.

        Returns:
            The plan, which must be run and given to ``update``; ``None`` when there is nothing to do before ``update`` or ``add``.
        """
        max_drafts = self._limits.max_drafts if max_drafts is None else max_drafts
        most = self._limits.stages + (self._propose is None or self._limits.stages == 1)
        assert len(self._outstanding) < most, "update() of the plan before the last one is missing"
        self._release_deferred()
        step = _Planning(now, self._max_tokens(), max_drafts)
        self._kv.run_drafter(self._running, on=max_drafts > 0 and self._limits.drafter_rows)
        self._plan_running(step)
        # From here on no sequence is preempted, so that an id that this plan uses cannot be allocated twice within it.
        for leader in step.leaders:
            self._fork(leader, step)
        if not step.short_of_pages:
            self._admit(step)
        if not step.singles and not step.chunks:
            return None
        self._kv.capture(step.prefixes)
        sequences = (*step.singles, *step.chunks)
        plan = StepPlan(step=self._next_step, sequences=sequences, max_drafts=max_drafts, **self._kv.take_changes())
        self._next_step += 1
        self._outstanding.append(plan)
        return plan

    def _release_deferred(self) -> None:
        """Release the pages and slots that only the last plan still needed."""
        for seq in self._retiring:
            if seq.state is State.RUNNING:
                self._stop(seq)
                seq.state = State.RETIRED
        self._retiring.clear()
        for seq in self._sliding:
            if seq.state is State.RUNNING:
                self._kv.slide(seq)
        unresolved = [seq for seq in self._sliding if seq.num_computed >= self._kv.slides_at(seq)]  # if drafts are accepted
        self._sliding = dict.fromkeys(unresolved)

    def _plan_running(self, step: _Planning) -> None:
        """Plan the next span of every running sequence, in order; prefill gets the tokens that decode leaves."""
        running = self._running
        skipped = self._other_groups() if self._limits.stages > 1 else ()
        unresolved = any(plan.max_drafts for plan in self._outstanding)
        singles = sum([len(seq.tokens) + seq.in_flight - seq.num_computed <= 1 for seq in running if seq.seq_id not in skipped])
        spare = max(0, step.room - singles)
        draft_room = min(spare // 2, singles * step.max_drafts)
        prefill_room = spare - draft_room
        i = 0
        while i < len(running) and step.room:  # sequences after i may be preempted on the way
            seq = running[i]
            i += 1
            if seq.needs_host and seq.in_flight:
                continue
            if seq.seq_id in skipped:
                continue
            if seq.in_flight and unresolved:
                draft_room -= self._plan_unresolved(seq, min(draft_room, step.max_drafts), step)
                continue
            end = seq.num_computed + 1
            drafts: tuple[int, ...] = ()
            if end == len(seq.tokens) + seq.in_flight:
                if draft_room and not seq.in_flight:
                    drafts = self._drafts(seq, min(draft_room, step.max_drafts))
                    draft_room -= len(drafts)
                    end += len(drafts)
                if not drafts and end < seq.steady_until:
                    self._plan_steady(seq, step)
                    continue
            else:
                if not prefill_room:
                    continue
                end = self._chunk_end(seq, min(prefill_room, step.room))
                prefill_room -= end - seq.num_computed
            while not (fits := self._kv.extend(seq, end)) and running[-1] is not seq:
                step.short_of_pages = True
                self._preempt(running[-1])
            if fits:
                self._plan_span(seq, end, step, drafts)
            else:  # the sequence comes last; it keeps its pages until another one needs them
                step.short_of_pages = True

    def _max_tokens(self) -> int:
        """Return how many tokens the next step may have."""
        most, stages = self._limits.max_num_batched_tokens, self._limits.stages
        if stages == 1:
            return most
        left = (seq.num_to_run - seq.num_computed for queue in (self._running, self._waiting) for seq in queue)
        return pipeline_tokens(left, most, stages)

    def _other_groups(self) -> set[int]:
        """Return the decoding sequences that a pipeline's next step skips: other groups, and those with tokens in flight."""
        most = 1 if self._propose is None else 0  # tokens in flight: drafts follow known ones
        decoding = {s.seq_id: s.in_flight > most for s in self._running if s.in_flight or len(s.tokens) - s.num_computed == 1}
        in_progress = [[part.seq_id for part in plan.sequences if part.sample] for plan in self._outstanding]
        group = pipeline_group(list(decoding), in_progress, self._limits.stages)
        return {seq_id for seq_id, early in decoding.items() if early}.union(decoding.keys() - group)

    def _drafts(self, seq: Sequence, room: int) -> tuple[int, ...]:
        """Return at most ``room`` draft tokens for a sequence, and allocate the pages for them."""
        assert self._propose is not None
        most = _most_drafts(seq, seq.num_computed, room)
        if most < 1 or seq.unforked:
            return ()
        drafts = self._propose(seq, most)
        assert len(drafts) <= most
        return drafts if self._kv.extend(seq, seq.num_computed + 1 + len(drafts)) else ()

    def _plan_unresolved(self, seq: Sequence, room: int, step: _Planning) -> int:
        """Plan the next span of a sequence while its drafts are being verified, valid for any number of accepted drafts.

        If that number decides whether the span fills a page or ends the sequence, plan nothing: the sequence waits for its results.

        Returns:
            The number of draft tokens of the span.
        """
        start, latest = len(seq.tokens), seq.num_computed
        unresolved, end, pages = latest - start, latest + 1 + room, seq.pages
        fits = room < step.room and start // PAGE_TOKENS == end // PAGE_TOKENS
        if not (fits and end < seq.steady_until and (unresolved or room)):
            room = max(0, min(_most_drafts(seq, latest, room), step.room - 1))
            end, known = latest + 1 + room, not unresolved and not room
            stays = known or start // PAGE_TOKENS == end // PAGE_TOKENS
            if end > seq.last_run or not stays or not self._kv.extend(seq, end):
                return 0
            if known:
                self._plan_span(seq, end, step, resolved=False)
                return 0
            if end >= self._kv.slides_at(seq):
                self._sliding[seq] = None
            pages = seq.pages[: pages_for(end)]
            seq.steady_until = self._kv.steady_limit(seq)
        token_ids, window = _IN_FLIGHT * (1 + room), seq.window
        fields = (seq.seq_id, seq.slot, start, token_ids, pages, seq.window_first, window, True, None, room, 0, UNKNOWN, unresolved)
        step.singles.append(_new_tuple(SequencePlan, fields))  # as in ``_plan_steady``
        step.room -= 1 + room
        seq.num_computed = end
        seq.in_flight += 1
        return room

    def _chunk_end(self, seq: Sequence, room: int) -> int:
        """Return the end of the next prefill chunk of at most ``room`` tokens; a chunk ends where a prefix is to be cached."""
        start = seq.num_computed
        to_run = seq.prompt_len - 1 if seq.unforked else seq.num_to_run
        end = min(start + room, to_run)
        if not self._limits.enable_prefix_caching:
            return end
        due = seq.cached_until + self._limits.prefix_checkpoint_tokens
        if start < seq.prompt_pages_end < end:
            end = seq.prompt_pages_end
        if due <= end:
            return due
        if end == start + room < to_run and end + room > due:
            # The next chunk would be cut at ``due``. Instead this one ends at a page boundary, and its prefix is cached.
            aligned = end // PAGE_TOKENS * PAGE_TOKENS
            end = aligned if aligned > start else end
        return end

    def _plan_steady(self, seq: Sequence, step: _Planning) -> None:
        """Plan one token of a sequence in steady-state decode, where the general ``_plan_span`` has nothing else to do."""
        pages, window, start = seq.pages, seq.window, seq.num_computed
        token_ids = _IN_FLIGHT if seq.in_flight else (seq.tokens[start],)
        fields = (seq.seq_id, seq.slot, start, token_ids, pages, seq.window_first, window, True, None, 0, 0, UNKNOWN, None)
        # This runs for nearly every token of every completion, and the generated constructor would take twice as long.
        step.singles.append(_new_tuple(SequencePlan, fields))
        step.room -= 1
        seq.num_computed = start + 1
        seq.in_flight += 1

    def _plan_span(self, seq: Sequence, end: int, step: _Planning, drafts: tuple[int, ...] = (), *, resolved: bool = True) -> None:
        """Plan the span ``[num_computed, end)`` of a sequence, which has its pages; its last tokens are ``drafts``."""
        start, tokens = seq.num_computed, seq.tokens
        known = end - len(drafts)
        sample = known == len(tokens) + seq.in_flight and seq.request.generate
        score = None
        if seq.score_next is not None and seq.score_next < end:
            assert start <= seq.score_next
            score = (seq.score_next, min(end, seq.prompt_len - 1))
            seq.score_next = score[1] if score[1] < seq.prompt_len - 1 else None
        plan = SequencePlan(
            seq_id=seq.seq_id,
            slot=seq.slot,
            start=start,
            token_ids=(*tokens[start:known], *drafts) if known <= len(tokens) else _IN_FLIGHT,
            pages=seq.pages[: pages_for(end)],  # the same object if it is all of them
            window_first=seq.window_first,
            window_pages=seq.window,
            sample=sample,
            score=score,
            drafts=len(drafts),
            state_copy=seq.state_copy if resolved else 0,
            next_id=tokens[end] if end < len(tokens) else UNKNOWN,
            unresolved=None if resolved else 0,
        )
        (step.singles if known - start == 1 else step.chunks).append(plan)
        step.room -= end - start
        seq.num_computed = end
        seq.state_copy = 0
        seq.in_flight += sample
        if sample and seq.unforked:
            step.leaders.append(seq)
        if end == seq.last_run and not drafts:
            self._retiring.append(seq)
        if end >= self._kv.slides_at(seq):
            self._sliding[seq] = None
        if end % PAGE_TOKENS == 0 and self._limits.enable_prefix_caching:
            due = seq.cached_until + self._limits.prefix_checkpoint_tokens
            lasting = end == seq.prompt_pages_end or 2 * end - start > due
            step.prefixes.append((seq, end, lasting))
            if lasting:
                seq.cached_until = end
        seq.steady_until = self._kv.steady_limit(seq) if sample else 0

    def _fork(self, leader: Sequence, step: _Planning) -> None:
        """Start the completions that share the prompt of their leader, whose last prompt token is in this plan, or queue them."""
        children, leader.unforked = leader.unforked, {}
        self._num_unforked -= len(children)
        for child in children:
            if len(self._running) >= self._limits.max_num_seqs or not self._kv.fork(leader, child):
                self._waiting.add(child)
                continue
            child.started = step.now
            self._run(child)
            if step.room:
                self._plan_span(child, child.num_computed + 1, step)

    def _admit(self, step: _Planning) -> None:
        """Start waiting sequences, strictly in order, while there is room for them."""
        self._steps_held = self._steps_held + 1 if self._holds_places() else 0
        if self._steps_held:
            return
        while self._waiting and step.room and len(self._running) < self._limits.max_num_seqs:
            seq = self._waiting.first()
            if seq.in_flight or not self._kv.take_slot(seq):
                return
            prefix = self._kv.attach_prefix(seq)
            end = seq.num_computed + 1 if len(seq.tokens) - seq.num_computed == 1 else self._chunk_end(seq, step.room)
            # All grow pages of the known tokens are allocated at once, so that sequences in prefill do not preempt each other.
            if not self._leaves_headroom(seq) or not self._kv.extend(seq, end, reserve=seq.num_to_run):
                self._kv.release(seq)
                return
            self._kv.start(seq, prefix)
            if seq.started is None:
                seq.started = step.now
                seq.cached_tokens = seq.num_computed
            self._prompt_tokens += len(seq.tokens)
            self._cached_tokens += seq.num_computed
            self._waiting.pop()
            self._run(seq)
            self._plan_span(seq, end, step)
            if step.leaders and step.leaders[-1] is seq:
                self._fork(seq, step)

    def _holds_places(self) -> bool:
        """Return whether too few places are free to fill them now; see ``REFILLED_SHARE``."""
        together = min(len(self._waiting), self._limits.max_num_seqs // REFILLED_SHARE)
        return 0 < self._limits.max_num_seqs - len(self._running) < together and self._steps_held < MOST_STEPS_HELD

    def _has_room(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence could start if none of its prefix is cached."""
        place = len(self._running) < self._limits.max_num_seqs and not self._holds_places()
        return place and self._pools.slots.num_free > 0 and self._leaves_headroom(seq)

    def _leaves_headroom(self, seq: Sequence) -> bool:
        """Return whether starting a sequence leaves 1 % of the pages to those that run, so that they do not preempt it at once."""
        headroom = self._pools.grow.total // 100 if len(self._running) else 0
        return self._pools.grow.num_available - (pages_for(seq.num_to_run) - len(seq.pages)) >= headroom

    # ------------------------------------------------------------------------------------------------------ process outputs

    def update(
        self,
        plan: StepPlan,
        results: Mapping[int, Sampled],
        *,
        scores: Mapping[int, Logprobs] | None = None,
    ) -> list[SequenceUpdate]:
        """Process the outputs of the oldest outstanding plan.

        Args:
            plan: That plan.
            results: By sequence id, for every sequence that sampled; for others only to report an error.
            scores: By sequence id, for every sequence with a ``score`` range.

        Returns:
            Events in the order of the plan. Outputs of sequences that ended in between are dropped.
        """
        assert self._outstanding and self._outstanding[0].step == plan.step, "plans must be updated in the order of their making"
        updates = []
        for part in self._outstanding.popleft().sequences:
            seq_id, sample = part.seq_id, part.sample
            seq = self._live.get(seq_id)
            if seq is None:
                continue
            seq.in_flight -= sample
            sampled = results[seq_id] if sample else results.get(seq_id)
            score = scores[seq_id] if scores and part.score is not None else None
            if sampled is not None:
                update = self._append(seq, part.drafts, sampled, score)
                if update.finish_reason is not None:
                    self._close(seq)
                updates.append(update)
            elif part.end == seq.last_run:
                self._close(seq)
                updates.append(seq.event(finish_reason="stop", prompt_logprobs=score))
            elif score is not None:
                updates.append(seq.event(prompt_logprobs=score))
        return updates

    def _append(self, seq: Sequence, planned: int, sampled: Sampled, score: Logprobs | None) -> SequenceUpdate:
        """Append the tokens sampled by a span with ``planned`` drafts, up to one that ends the sequence; rewind rejected drafts.

        This runs for every token of every completion; hence the update is made without keywords, which would take twice as long.
        """
        token_id, logprob, error, after, drafts, drafted = sampled
        token_ids = (token_id, *[one.token_id for one in after]) if after else (token_id,)
        logprobs: tuple[TokenLogprob, ...] = () if logprob is None or after else (logprob,)
        finish: FinishReason | None = None
        stop = None
        tokens = seq.tokens
        ends = len(tokens) + len(token_ids) > seq.last_run or not seq.end_ids.isdisjoint(token_ids)
        if ends or error is not None or seq.pending is not None or (after and (logprob is not None or after[-1].error is not None)):
            token_ids, logprobs, finish, stop, error = self._append_one_by_one(seq, sampled)
        else:
            tokens.extend(token_ids)
        accepted = len(token_ids) - 1
        if planned and finish is None and seq.state is State.RUNNING:  # it may have been preempted since
            if accepted and not seq.in_flight:  # a span in flight takes the copy on the device
                seq.state_copy, seq.steady_until = accepted, 0
            if accepted < planned:
                self._kv.rewind(seq, seq.num_computed - planned + accepted)
        seq.drafts = drafts
        cached, started = seq.take_cached_tokens() if seq.cached_tokens else 0, seq.started or 0.0
        name, accepted = seq.request.request_id, max(0, accepted)
        return SequenceUpdate(
            name,
            seq.index,
            token_ids,
            logprobs,
            score,
            finish,
            stop,
            cached,
            started,
            self._weight_version,
            None,
            drafted,
            accepted,
            error,
        )

    def _append_one_by_one(
        self, seq: Sequence, sampled: Sampled
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...], FinishReason | None, int | None, DSV4LiteError | None]:
        """Append tokens up to one that ends the sequence; return them, log-probabilities, finish and stop reasons, and error."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish: FinishReason | None = None
        stop = None
        for one in (sampled, *sampled.after):
            if one.error is not None:
                if seq.chain is not None:
                    self._cache.forget(seq.chain)
                return tuple(token_ids), tuple(logprobs), "error", None, one.error
            seq.tokens.append(one.token_id)
            token_ids.append(one.token_id)
            if one.logprob is not None:
                logprobs.append(one.logprob)
            self._kv.insert_pending(seq)
            if one.token_id in seq.end_ids or len(seq.tokens) > seq.last_run:
                finish, stop = seq.outcome()
                if finish is not None:
                    break
        return tuple(token_ids), tuple(logprobs), finish, stop, None

    def _end(self, seq: Sequence, reason: FinishReason) -> SequenceUpdate:
        self._close(seq)
        return seq.event(finish_reason=reason)

    def _end_group(self, group: _Group, reason: FinishReason) -> list[SequenceUpdate]:
        return [self._end(seq, reason) for seq in group.sequences if seq.state is not State.ENDED]

    def _close(self, seq: Sequence) -> None:
        """Remove a sequence everywhere; completions that wait for its prefill are queued to do their own."""
        group = self._groups[seq.request.request_id]
        if seq.state is State.RUNNING:
            self._stop(seq)
        elif seq.state is State.UNFORKED:
            del group.sequences[0].unforked[seq]
            self._num_unforked -= 1
        for child in seq.unforked:
            self._waiting.add(child)
        self._num_unforked -= len(seq.unforked)
        seq.unforked = {}
        self._kv.drop_pending(seq)
        waited, seq.state = seq.state is State.WAITING, State.ENDED
        if waited:
            self._waiting.leave(seq)
        del self._live[seq.seq_id]
        group.open -= 1
        self._num_held -= not group.ready
        if not group.open:
            del self._groups[seq.request.request_id]

    def _run(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        insort(self._running, seq, key=_ORDER)

    def _stop(self, seq: Sequence) -> None:
        """Remove a sequence from those that run, and release its state."""
        at = bisect_left(self._running, seq.order, key=_ORDER)
        assert self._running[at] is seq
        del self._running[at]
        self._kv.release(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Release a running sequence's state and queue it. Its tokens in flight still arrive, before it can start again."""
        self._kv.drop_pending(seq)
        self._stop(seq)
        self._waiting.add(seq)
        self._preemptions += 1

    # ------------------------------------------------------------------------------------------------------------- integrity

    def check_released(self) -> None:
        """Assert that no id is held if no sequence is live. Compares counts; ``check`` looks at every id."""
        if not self._live:
            self._pools.check_released()

    def check(self) -> None:
        """Assert that holders of ids are exactly the sequences and prefixes that list them, and each sequence is in one queue."""
        running, waiting = self._running, list(self._waiting)
        self._kv.check(self._live.values())
        unforked = [child for seq in self._live.values() for child in seq.unforked]
        retired = [seq for seq in self._live.values() if seq.state is State.RETIRED]
        held = [
            seq for group in self._groups.values() if not group.ready for seq in group.sequences if seq.state is not State.ENDED
        ]
        assert (len(unforked), len(held)) == (self._num_unforked, self._num_held)
        for members, state in (
            (running, State.RUNNING),
            (waiting, State.WAITING),
            (unforked, State.UNFORKED),
            (retired, State.RETIRED),
            (held, State.HELD),
        ):
            for seq in members:
                assert seq.state is state and self._live.get(seq.seq_id) is seq, f"sequence {seq.seq_id} is not {state.name}"
        places = Counter(seq.seq_id for members in (running, waiting, unforked, retired, held) for seq in members)
        assert places == Counter(self._live.keys()), "a sequence is lost or in two places"
        assert running == sorted(running, key=lambda seq: seq.order), "a queue is out of order"
        assert len(waiting) == len(self._waiting), "the number of waiting sequences is wrong"
        for seq in self._live.values():
            most = min(2, len(self._outstanding))
            assert 0 <= seq.in_flight <= most, f"sequence {seq.seq_id} has {seq.in_flight} tokens in flight"
        assert len(running) <= self._limits.max_num_seqs
        alive = Counter(seq.request.request_id for seq in self._live.values())
        assert alive == Counter({request_id: group.open for request_id, group in self._groups.items()}), "a request is lost"


def _most_drafts(seq: Sequence, start: int, room: int) -> int:
    """Return how many of ``room`` draft tokens a span from ``start`` may have: it fills no page, and does not pass ``last_run``."""
    return min(room, PAGE_TOKENS - 2 - start % PAGE_TOKENS, seq.last_run - start - 1)


def pipeline_group(decoding: Sized[int], in_progress: Sized[Collection[int]], stages: int) -> list[int]:
    """Return which of the decoding sequences run in the next step of a pipeline of P stages, in the order given.

    A pipeline works on P steps at a time. A sequence is in one of them only, since its next token is known when the last stage has
    sampled it; hence the decoding sequences take turns, in P groups. Groups are not stored: each step takes a P-th of the decoding
    sequences, from those in no other step. While the same sequences decode, each runs once in any P consecutive steps, and group
    sizes differ by at most one. With fewer than P sequences every step takes one, whose token may still be in flight.

    Args:
        decoding: Ids of all sequences that have only their last token to run, known or in flight, the most urgent first.
        in_progress: Ids of those that sample in each step whose results are outstanding, the oldest step first.
        stages: P.
    """
    if not decoding:
        return []
    groups = min(stages, len(decoding))
    recent = in_progress[max(0, len(in_progress) - groups + 1) :]
    busy = {seq_id for step in recent for seq_id in step}
    size, larger = divmod(len(decoding), groups)
    if larger > sum(len(step) > size for step in recent):
        size += 1
    return [seq_id for seq_id in decoding if seq_id not in busy][:size]


def pipeline_tokens(left: Iterable[int], most: int, stages: int) -> int:
    """Return how many tokens the next step of a pipeline of P stages may have: a P-th of the tokens left to run.

    Chunks of prompts wait for no token: a prompt is cut so that all stages work on it.

    Args:
        left: Tokens that each sequence has still to run.
        most: Tokens that a step can have.
        stages: P.
    """
    total = 0
    for tokens in left:
        total += max(0, tokens)
        if total >= most * stages:
            return most
    return min(most, max(LEAST_PIPELINE_TOKENS, -(-total // stages)))
