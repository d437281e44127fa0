"""Which sequence runs which tokens in the next step, and on which pages. Plain Python, no tensors.

Sequences are served in the order of (priority, arrival): pages are handed out in that order, and taken away from its end.

Released ids may be handed out again at once, though a step in flight still uses them: steps run in the order in which they were
planned. Hence what a plan uses is released when the next one is made, at the earliest.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv4lite.errors import CapacityError, InvalidRequestError
from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.request import FinishReason, Request, SequenceUpdate
from dsv4lite.scheduling.intake import append
from dsv4lite.scheduling.kv_manager import Holdings, StepDraft
from dsv4lite.scheduling.limits import SchedulerLimits, SchedulerStats
from dsv4lite.scheduling.micro_batches import choose_group, tokens_of_step
from dsv4lite.scheduling.pages import Pools, PrefixCache, pages_for
from dsv4lite.scheduling.sequence import Sequence, SequenceQueue, State, WaitingQueue, make_sequences, needs_host
from dsv4lite.scheduling.step_plan import IN_FLIGHT, UNKNOWN, Sampled, SequencePlan, StepPlan

if TYPE_CHECKING:
    from dsv4lite.request import Logprobs

__all__ = ["Sampled", "Scheduler", "SchedulerLimits", "SchedulerStats", "Sequence", "SequencePlan", "StepPlan", "needs_host"]

Propose = Callable[[Sequence, int], tuple[int, ...]]
_IN_FLIGHT = (IN_FLIGHT,)
_new_tuple = tuple.__new__


def _most_drafts(seq: Sequence, start: int, room: int) -> int:
    """Return how many of ``room`` guesses a run from ``start`` may have: it reaches no border, and what follows is long enough."""
    return min(room, PAGE_TOKENS - 2 - start % PAGE_TOKENS, seq.last_run - start - 1)


@dataclass(slots=True, eq=False)
class _Group:
    """The sequences of one request and how many of them have not ended."""

    request: Request
    sequences: list[Sequence]
    open: int


class Scheduler:
    """Continuous batching with chunked prefill, recompute preemption, a prefix cache, micro-batches and one step of overlap.

    ``schedule`` makes a plan and ``update`` takes its results, in the same order. As many plans as there are stages may be
    outstanding, and one more, by which those who run steps are told ahead what comes next. Not thread-safe.

    Args:
        limits: Settings.
        pools: Ids of sequence state; the scheduler is their only user.
        needs_host: Asked for a sequence with a token in flight: whether it must arrive before the next step is planned. The default
            goes by the request's settings alone.
        propose: Asked for at most so many guesses of what follows the tokens of a sequence, all of which are known. With it, a plan
            is made only when the results of the last one are there, unless the scheduler ``foresees`` the next.
        first_seq_id: Ids of sequences count from here.

    Raises:
        CapacityError: The pools cannot hold a single sequence of ``max_model_len``.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pools: Pools,
        *,
        needs_host: Callable[[Sequence], bool] | None = None,
        propose: Propose | None = None,
        first_seq_id: int = 0,
    ) -> None:
        needs = ((pools.grow, pages_for(limits.max_model_len - 1)), (pools.window, limits.window_pages), (pools.slots, 1))
        for pool, need in needs:
            if pool.total < need:
                raise CapacityError(
                    f"a sequence of max_model_len={limits.max_model_len} tokens takes {need} {pool.name}s; there are {pool.total}",
                    advice=("lower max_model_len", "give more memory to sequence state"),
                )
        self._limits = limits
        self._pools = pools
        self._needs_host = needs_host
        self._propose = propose
        self._cache = PrefixCache(pools)
        self._holdings = Holdings(pools, self._cache, window=limits.window)
        self._groups: dict[str, _Group] = {}
        self._live: dict[int, Sequence] = {}
        self._running = SequenceQueue()
        self._waiting = WaitingQueue()
        self._retiring: list[Sequence] = []  # their last step is planned
        self._sliding: dict[Sequence, None] = {}  # their last step left window pages behind
        self._deadlines: list[tuple[float, int, str]] = []
        self._expired: list[SequenceUpdate] = []
        self._outstanding: deque[StepPlan] = deque()
        self._num_unforked = 0
        self._next_seq_id = first_seq_id
        self._next_step = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    # ------------------------------------------------------------------------------------------------- what comes in and out

    def add(self, request: Request) -> None:
        """Queue the ``n`` sequences of a request.

        Raises:
            InvalidRequestError: Its id is in use, or it asks for a score of several completions or of a prompt of one token.
            ContextLengthError: Its prompt leaves no room in ``max_model_len``.
        """
        if request.request_id in self._groups:
            raise InvalidRequestError(
                f"request_id={request.request_id!r} is in use; it must be unique among live requests",
                parameter="request_id",
                value=request.request_id,
            )
        sequences = make_sequences(request, first_id=self._next_seq_id, max_model_len=self._limits.max_model_len)
        self._next_seq_id += len(sequences)
        for seq in sequences:
            seq.may_wait = self._needs_host is not None or needs_host(seq)
        self._live.update((seq.seq_id, seq) for seq in sequences)
        self._groups[request.request_id] = _Group(request, sequences, len(sequences))
        leader, *others = sequences
        self._waiting.add(leader)
        if request.deadline is not None:
            if len(self._deadlines) > 2 * len(self._groups) + 8:  # most are of requests that ended before their time
                self._deadlines = [entry for entry in self._deadlines if self._ends(entry) is not None]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, leader.seq_id, request.request_id))
        for seq in others:
            if leader.prompt_len == 1:  # nothing to share
                self._waiting.add(seq)
            else:
                seq.state = State.UNFORKED
                leader.unforked[seq] = None
                self._num_unforked += 1

    def abort(
        self, request_id: str | None = None, reason: FinishReason = "abort", *, index: int | None = None
    ) -> list[SequenceUpdate]:
        """End a request, one of its completions, or (``None``) everything, and free the state. What ended already is left alone."""
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
        """End the requests whose deadline is not later than ``now``; ``schedule`` does so too."""
        ends = []
        while self._deadlines and self._deadlines[0][0] <= now:
            group = self._ends(heapq.heappop(self._deadlines))
            if group is not None:
                ends += self._end_group(group, "deadline")
        return ends

    def _ends(self, deadline: tuple[float, int, str]) -> _Group | None:
        """Return the request that a deadline ends; none if the request has ended. Its id may be in use again."""
        _, first_seq_id, request_id = deadline
        group = self._groups.get(request_id)
        return group if group is not None and group.sequences[0].seq_id == first_seq_id else None

    def pop_expired(self) -> list[SequenceUpdate]:
        """Return the ends of sequences whose deadlines ``schedule`` found passed, once."""
        expired, self._expired = self._expired, []
        return expired

    def reset_prefix_cache(self) -> None:
        """Make cached prefixes unreachable. Running sequences go on, and what they computed so far is not cached any more."""
        self._cache.bump_epoch()

    def sequences_of(self, request_id: str) -> tuple[Sequence, ...]:
        """Return the sequences of a live request in the order of their index, ended ones included."""
        return tuple(self._groups[request_id].sequences)

    def has_request(self, request_id: str) -> bool:
        """Return whether a request has sequences that did not end."""
        return request_id in self._groups

    def has_place(self) -> bool:
        """Return whether one more sequence could run beside those that run and wait."""
        return len(self._live) < self._limits.max_num_seqs

    def cached_prefix(self, request: Request) -> int:
        """Return how many tokens of a request's prompt are cached."""
        most = len(request.prompt_token_ids) - 1
        return self._cache.longest(self._cache.chain(list(request.prompt_token_ids), request.cache_salt), most)

    def has_work(self) -> bool:
        """Return whether any sequence has not ended."""
        return bool(self._live)

    def foresees(self, max_drafts: int) -> bool:
        """Whether the next step, of at most ``max_drafts`` guesses in a run, can be planned before the results of the last.

        It can if neither has guesses. If both have as many, made on the device, it can while sequences just go on: none starts,
        has a prompt to run, or waits for the host. A waiting sequence starts only if there is room for it.
        """
        guessing = [plan for plan in self._outstanding if plan.max_drafts]
        if not guessing or not max_drafts:
            return not guessing and not max_drafts
        if self._num_unforked or (self._waiting and self._has_room(self._waiting.first())):
            return False
        last = guessing[-1]
        if last.max_drafts != max_drafts or not last.decodes:
            return False
        return not [seq for seq in self._running.items if seq.may_wait or seq.num_computed < len(seq.tokens) - 1]

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
        """Sequences that wait for a place."""
        return len(self._waiting) + self._num_unforked

    def stats(self) -> SchedulerStats:
        """Return the present counts."""
        pools = self._pools
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            checkpoints=len(self._cache),
            grow=pools.grow.stats(),
            window=pools.window.stats(),
            slots=pools.slots.stats(),
            snapshots=pools.snapshots.stats(),
        )

    # ------------------------------------------------------------------------------------------------------- making a plan

    def schedule(self, now: float, max_drafts: int | None = None) -> StepPlan | None:
        """Plan the next step.

        Args:
            now: ``time.monotonic()``; requests whose deadline is not later end here, see ``pop_expired``.
            max_drafts: Most guesses in a run; at most, and by default, what the limits say.

        Returns:
            The plan, which must be run and given to ``update``; ``None`` when there is nothing to do before ``update`` or ``add``.
        """
        max_drafts = self._limits.max_drafts if max_drafts is None else max_drafts
        most = self._limits.stages + (self._propose is None or self._limits.stages == 1)
        assert len(self._outstanding) < most, "update() of the plan before the last one is missing"
        self._expired += self.expire(now)
        self._release_deferred()
        draft = StepDraft(now, self._room(), max_drafts)
        self._holdings.feed(self._running, on=max_drafts > 0 and self._limits.drafter_rows)
        self._plan_running(draft)
        # From here on nobody is preempted, so that an id that this draft hands out cannot be handed out twice.
        for leader in draft.leaders:
            self._fork(leader, draft)
        if not draft.crowded:
            self._admit(draft)
        if not draft.singles and not draft.chunks:
            return None
        self._holdings.capture(draft.borders, draft.moves)
        plan = draft.plan(self._next_step, self._holdings.take_blanks())
        self._next_step += 1
        self._outstanding.append(plan)
        return plan

    def _release_deferred(self) -> None:
        """Release what only the plan made last still needed."""
        for seq in self._retiring:
            if seq.state is State.RUNNING:
                self._running.remove(seq)
                self._holdings.release(seq)
                seq.state = State.RETIRED
        self._retiring.clear()
        for seq in self._sliding:
            if seq.state is State.RUNNING:
                self._holdings.slide(seq)
        unsure = [seq for seq in self._sliding if seq.num_computed >= self._holdings.slides_at(seq)]  # once guesses are known
        self._sliding = dict.fromkeys(unsure)

    def _plan_running(self, draft: StepDraft) -> None:
        """Plan the next run of every running sequence, in order; prefill gets the room that single tokens leave."""
        running = self._running.items
        resting = self._resting() if self._limits.stages > 1 else ()
        guessing = any(plan.max_drafts for plan in self._outstanding)
        singles = sum([len(seq.tokens) + seq.in_flight - seq.num_computed <= 1 for seq in running if seq.seq_id not in resting])
        spare = max(0, draft.room - singles)
        guesses = min(spare // 2, singles * draft.max_drafts)
        prefill_room = spare - guesses
        i = 0
        while i < len(running) and draft.room:  # those behind i may be preempted on the way
            seq = running[i]
            i += 1
            if seq.may_wait and seq.in_flight and (self._needs_host is None or self._needs_host(seq)):
                continue
            if seq.seq_id in resting:
                continue
            if seq.in_flight and guessing:
                guesses -= self._plan_behind(seq, min(guesses, draft.max_drafts), draft)
                continue
            start = seq.num_computed
            end = start + 1
            if end < seq.quiet_until and not guesses:
                self._plan_quiet(seq, draft)
                continue
            drafts: tuple[int, ...] = ()
            if guesses and end == len(seq.tokens):
                drafts = self._drafts(seq, min(guesses, draft.max_drafts))
                guesses -= len(drafts)
                end += len(drafts)
            elif end != len(seq.tokens) + seq.in_flight:
                if not prefill_room:
                    continue
                end = self._chunk_end(seq, min(prefill_room, draft.room))
                prefill_room -= end - start
            if not drafts and end < seq.quiet_until:
                self._plan_quiet(seq, draft)
                continue
            while not (fits := self._holdings.extend(seq, end)) and running[-1] is not seq:
                draft.crowded = True
                self._preempt(running[-1])
            if fits:
                self._plan(seq, end, draft, drafts)
            else:  # everybody else comes first; it keeps what it has until somebody needs that
                draft.crowded = True

    def _room(self) -> int:
        """Return how many tokens the next step may have."""
        most, stages = self._limits.max_num_batched_tokens, self._limits.stages
        if stages == 1:
            return most
        left = (seq.num_to_run - seq.num_computed for queue in (self._running, self._waiting) for seq in queue)
        return tokens_of_step(left, most, stages)

    def _resting(self) -> set[int]:
        """Return which sequences that decode do not run in the next step: it is others' turn, or their tokens are on the way."""
        most = 1 if self._propose is None else 0  # tokens in flight: guesses follow known ones
        decoding = {s.seq_id: s.in_flight > most for s in self._running if s.in_flight or len(s.tokens) - s.num_computed == 1}
        under_way = [[part.seq_id for part in plan.sequences if part.sample] for plan in self._outstanding]
        group = choose_group(list(decoding), under_way, self._limits.stages)
        return {seq_id for seq_id, early in decoding.items() if early}.union(decoding.keys() - group)

    def _drafts(self, seq: Sequence, room: int) -> tuple[int, ...]:
        """Return at most ``room`` guesses of what follows the last token of a sequence, which gets the pages for them.

        The run must stay before the next border, which a known token has to reach alone, and may not be longer than what follows.
        """
        assert self._propose is not None
        start = seq.num_computed
        most = _most_drafts(seq, start, room)
        if most < 1 or seq.unforked:
            return ()
        drafts = self._propose(seq, most)
        assert len(drafts) <= most
        return drafts if self._holdings.extend(seq, start + 1 + len(drafts)) else ()

    def _plan_behind(self, seq: Sequence, room: int, draft: StepDraft) -> int:
        """Plan a run behind one whose guesses are being checked, for wherever that ends; return how many guesses it has itself.

        Where it depends on that whether a border is reached, the sequence waits for what is in flight.
        """
        start, latest = len(seq.tokens), seq.num_computed
        slack, end, pages = latest - start, latest + 1 + room, seq.page_tuple
        quiet = end < seq.quiet_until and room < draft.room and (slack or room) and start // PAGE_TOKENS == end // PAGE_TOKENS
        if not quiet:
            room = max(0, min(_most_drafts(seq, latest, room), draft.room - 1))
            end, known = latest + 1 + room, not slack and not room
            stays = known or start // PAGE_TOKENS == end // PAGE_TOKENS
            if end > seq.last_run or not stays or not self._holdings.extend(seq, end):
                return 0
            if known:
                self._plan(seq, end, draft, slack=0)
                return 0
            if end >= self._holdings.slides_at(seq):
                self._sliding[seq] = None
            pages = seq.page_table(pages_for(end))
            seq.quiet_until = self._holdings.steady_until(seq)
        assert pages is not None
        token_ids, held = _IN_FLIGHT * (1 + room), seq.window_tuple or seq.window_table()
        every = (seq.seq_id, seq.slot, start, token_ids, pages, seq.window_first, held, True, None, room, 0, UNKNOWN, slack)
        draft.singles.append(_new_tuple(SequencePlan, every))  # as in ``_plan_quiet``
        draft.room -= 1 + room
        seq.num_computed = end
        seq.in_flight += 1
        return room

    def _chunk_end(self, seq: Sequence, room: int) -> int:
        """Return where the next prefill chunk of at most ``room`` tokens ends, so that checkpoints come to lie on borders."""
        start = seq.num_computed
        to_run = seq.prompt_len - 1 if seq.unforked else seq.num_to_run
        end = min(start + room, to_run)
        if not self._limits.enable_prefix_caching:
            return end
        due = seq.kept_border + self._limits.prefix_checkpoint_tokens
        if start < seq.prompt_border < end:
            end = seq.prompt_border
        if due <= end:
            return due
        if end == start + room < to_run and end + room > due:
            # Another chunk like this one would be cut at ``due``; a border before it serves as well, and leaves no small chunk.
            aligned = end // PAGE_TOKENS * PAGE_TOKENS
            end = aligned if aligned > start else end
        return end

    def _plan_quiet(self, seq: Sequence, draft: StepDraft) -> None:
        """Do what ``_plan`` does for a single token that concerns nothing but the token."""
        pages, window_pages, start = seq.page_tuple, seq.window_tuple, seq.num_computed
        assert pages is not None and window_pages is not None
        token_ids = _IN_FLIGHT if seq.in_flight else (seq.tokens[start],)
        every = (seq.seq_id, seq.slot, start, token_ids, pages, seq.window_first, window_pages, True, None, 0, 0, UNKNOWN, None)
        # This runs for nearly every token of every completion, and the usual way of making one would take twice as long.
        draft.singles.append(_new_tuple(SequencePlan, every))
        draft.room -= 1
        seq.num_computed = start + 1
        seq.in_flight += 1

    def _plan(self, seq: Sequence, end: int, draft: StepDraft, drafts: tuple[int, ...] = (), *, slack: int | None = None) -> None:
        """Enter the run ``[num_computed, end)`` of a sequence, which has the pages for it and ends in drafts, into the draft."""
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
            pages=seq.page_table(pages_for(end)),
            window_first=seq.window_first,
            window_pages=seq.window_table(),
            sample=sample,
            score=score,
            drafts=len(drafts),
            carry=seq.carry if slack is None else 0,
            next_id=tokens[end] if end < len(tokens) else UNKNOWN,
            slack=slack,
        )
        (draft.singles if known - start == 1 else draft.chunks).append(plan)
        draft.room -= end - start
        seq.num_computed = end
        seq.carry = 0
        seq.in_flight += sample
        if sample and seq.unforked:
            draft.leaders.append(seq)
        if end == seq.last_run and not drafts:
            self._retiring.append(seq)
        if end >= self._holdings.slides_at(seq):
            self._sliding[seq] = None
        if end % PAGE_TOKENS == 0 and self._limits.enable_prefix_caching:
            due = seq.kept_border + self._limits.prefix_checkpoint_tokens
            lasting = end == seq.prompt_border or 2 * end - start > due
            draft.borders.append((seq, end, lasting))
            if lasting:
                seq.kept_border = end
        seq.quiet_until = self._holdings.steady_until(seq) if sample else 0

    def _fork(self, leader: Sequence, draft: StepDraft) -> None:
        """Let completions share the prompt of their leader, whose last prompt token is in this draft; the others must wait."""
        children, leader.unforked = leader.unforked, {}
        self._num_unforked -= len(children)
        for child in children:
            if len(self._running) >= self._limits.max_num_seqs or not self._holdings.fork(leader, child, draft.moves):
                self._enqueue(child)
                continue
            child.started = draft.now
            self._run(child)
            if draft.room:
                self._plan(child, child.num_computed + 1, draft)

    def _admit(self, draft: StepDraft) -> None:
        """Start waiting sequences, strictly in order, while there is room for them."""
        while self._waiting and draft.room and len(self._running) < self._limits.max_num_seqs:
            seq = self._waiting.first()
            if seq.in_flight or not self._holdings.take_slot(seq):
                return
            checkpoint = self._holdings.attach_prefix(seq)
            end = seq.num_computed + 1 if len(seq.tokens) - seq.num_computed == 1 else self._chunk_end(seq, draft.room)
            # All grow pages of the known tokens are taken at once: sequences in prefill do not end up fighting for them.
            if not self._leaves_headroom(seq) or not self._holdings.extend(seq, end, reserve=seq.num_to_run):
                self._holdings.release(seq)
                return
            self._holdings.begin(seq, checkpoint, draft.moves)
            if seq.started is None:
                seq.started = draft.now
                seq.cached_tokens = seq.num_computed
            self._prompt_tokens += len(seq.tokens)
            self._cached_tokens += seq.num_computed
            self._waiting.pop()
            self._run(seq)
            self._plan(seq, end, draft)
            if draft.leaders and draft.leaders[-1] is seq:
                self._fork(seq, draft)

    def _has_room(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence could start if none of its prefix is cached."""
        return len(self._running) < self._limits.max_num_seqs and self._pools.slots.num_free > 0 and self._leaves_headroom(seq)

    def _leaves_headroom(self, seq: Sequence) -> bool:
        """Return whether starting a sequence leaves 1 % of the pages to those that run, lest they preempt it right away."""
        headroom = self._pools.grow.total // 100 if len(self._running) else 0
        return self._holdings.can_reserve(seq, seq.num_to_run, spare=headroom)

    # ------------------------------------------------------------------------------------------------------- taking results

    def update(
        self,
        plan: StepPlan,
        results: Mapping[int, Sampled],
        *,
        scores: Mapping[int, Logprobs] | None = None,
        weight_version: int = 0,
    ) -> list[SequenceUpdate]:
        """Take the results of the oldest outstanding plan.

        Args:
            plan: That plan.
            results: By sequence id, for every sequence that sampled; for others only to report an error.
            scores: By sequence id, for every sequence with a ``score`` range.
            weight_version: Of the weights that the plan ran with.

        Returns:
            News of the sequences in the order of the plan. Results of sequences that ended in between are dropped.
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
                news = append(seq, part, sampled, score, weight_version, self._holdings)
                if news.finish_reason is not None:
                    self._close(seq)
                updates.append(news)
            elif part.end == seq.last_run:
                self._close(seq)
                updates.append(seq.report(finish_reason="stop", prompt_logprobs=score, weight_version=weight_version))
            elif score is not None:
                updates.append(seq.report(prompt_logprobs=score, weight_version=weight_version))
        return updates

    def _end(self, seq: Sequence, reason: FinishReason) -> SequenceUpdate:
        self._close(seq)
        return seq.report(finish_reason=reason)

    def _end_group(self, group: _Group, reason: FinishReason) -> list[SequenceUpdate]:
        return [self._end(seq, reason) for seq in group.sequences if seq.state is not State.ENDED]

    def _close(self, seq: Sequence) -> None:
        """Take a sequence out of everything; completions that wait for its prefill must do their own."""
        group = self._groups[seq.request.request_id]
        if seq.state is State.RUNNING:
            self._running.remove(seq)
            self._holdings.release(seq)
        elif seq.state is State.UNFORKED:
            del group.sequences[0].unforked[seq]
            self._num_unforked -= 1
        for child in seq.unforked:
            self._enqueue(child)
        self._num_unforked -= len(seq.unforked)
        seq.unforked = {}
        self._holdings.drop_pending(seq)
        waited, seq.state = seq.state is State.WAITING, State.ENDED
        if waited:
            self._waiting.leave(seq)
        del self._live[seq.seq_id]
        group.open -= 1
        if not group.open:
            del self._groups[seq.request.request_id]

    def _run(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        self._running.add(seq)

    def _enqueue(self, seq: Sequence) -> None:
        seq.state = State.WAITING
        self._waiting.add(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's state away. Tokens of its own that are in flight still arrive, before it can start again."""
        self._holdings.drop_pending(seq)
        self._running.remove(seq)
        self._holdings.release(seq)
        self._enqueue(seq)
        self._preemptions += 1

    # ------------------------------------------------------------------------------------------------------------- integrity

    def check(self) -> None:
        """Assert that every id is free, or held or cached by exactly those who think so, and every sequence in its one place."""
        running, waiting = self._running.items, list(self._waiting)
        self._holdings.check(self._live.values())
        unforked = [child for seq in self._live.values() for child in seq.unforked]
        retired = [seq for seq in self._live.values() if seq.state is State.RETIRED]
        assert len(unforked) == self._num_unforked
        for members, state in (
            (running, State.RUNNING),
            (waiting, State.WAITING),
            (unforked, State.UNFORKED),
            (retired, State.RETIRED),
        ):
            for seq in members:
                assert seq.state is state and self._live.get(seq.seq_id) is seq, f"sequence {seq.seq_id} is not {state.name}"
        places = Counter(seq.seq_id for members in (running, waiting, unforked, retired) for seq in members)
        assert places == Counter(self._live.keys()), "a sequence is lost or in two places"
        assert running == sorted(running, key=lambda seq: seq.order), "a queue is out of order"
        assert len(waiting) == len(self._waiting), "the number of waiting sequences is wrong"
        for seq in self._live.values():
            most = min(2, len(self._outstanding))
            assert 0 <= seq.in_flight <= most, f"sequence {seq.seq_id} has {seq.in_flight} tokens in flight"
        assert len(running) <= self._limits.max_num_seqs
        alive = Counter(seq.request.request_id for seq in self._live.values())
        assert alive == Counter({request_id: group.open for request_id, group in self._groups.items()}), "a request is lost"
