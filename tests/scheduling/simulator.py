"""A device that executes step plans on hashes instead of tensors, and that notices every wrong read.

Each state row is a pair of hashes: of all tokens up to its position, and of the same with the weight epoch and the cache salt that
each token ran with. A sequence that reads a row of another prefix, position, epoch or salt, a stale one, or one never written,
fails.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dsv4lite.errors import RequestFailedError
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.request import Request, SamplingParams, SequenceUpdate
from dsv4lite.scheduling.pages import Pools, first_window_page
from dsv4lite.scheduling.scheduler import Sampled, Scheduler, SchedulerLimits, SequencePlan, StepPlan
from dsv4lite.scheduling.sequence import Sequence

EOS = 0
VOCAB = 48
Row = tuple[int, int]
EMPTY: Row = (0, 0)
ZEROED: Row = (0, 1)


def next_token(prefix: int, request: Request, index: int, num_generated: int) -> int:
    """The fake model: a function of tokens, seed and completion index; end and stop ids come only after min_tokens."""
    params = request.params
    token = hash((prefix, params.seed or 0, index)) % VOCAB
    if num_generated < params.min_tokens and (token == EOS or token in params.stop_token_ids):
        return VOCAB
    return token


def run_alone(request: Request, index: int, max_model_len: int) -> tuple[tuple[int, ...], str, int | None]:
    """Return tokens, finish reason and stop reason that a request must get, whatever it shares the device with."""
    params, out, prefix = request.params, [], 0
    for token in request.prompt_token_ids:
        prefix = hash((prefix, token))
    while True:
        token = next_token(prefix, request, index, len(out))
        prefix = hash((prefix, token))
        out.append(token)
        if len(out) > params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return tuple(out), "stop", None
            if token in params.stop_token_ids:
                return tuple(out), "stop", token
        if len(out) == params.max_tokens or len(out) + len(request.prompt_token_ids) == max_model_len:
            return tuple(out), "length", None


@dataclass
class Truth:
    """What the device knows of a sequence."""

    request: Request
    index: int
    tokens: list[int]
    fails_at: int | None = None
    sampled_in: int = -1
    scored: list[int] = field(default_factory=list)
    hashed: tuple[int, int] = (0, 0)  # of so many tokens, which only grow


class Device:
    def __init__(self, window: int, stages: int = 1, *, snapshots: bool = True) -> None:
        self.window, self.stages, self.has_state = window, stages, snapshots
        self.epoch = 0
        self.truths: dict[int, Truth] = {}
        self.next_step = 0
        self.grow: dict[int, list[Row | None]] = {}
        self.window_rows: dict[int, list[Row | None]] = {}
        # Of a model's own drafter: in window pages, or, without a window, in grow pages.
        self.drafter_places = WINDOW_PAGE_TOKENS if window else PAGE_TOKENS
        self.drafter_rows: dict[int, list[Row | None]] = defaultdict(lambda: [None] * self.drafter_places)
        self.state: dict[int, dict[int, Row]] = {}  # of the compressor, by slot and copy
        self.snapshots: dict[int, Row] = {}
        self.owner: dict[int, int | None] = {}
        self.rows: dict[int, list[Row] | None] = {}  # by slot: what the sequence there must find; None: a restored prefix
        self.memo: dict[tuple[int, int, int, str | None], Row] = {}
        self.copies: dict[int, int] = {}  # by sequence: the copy of the compressor state that holds after its last span
        self.drafts: dict[int, tuple[int, ...]] = {}  # by sequence: of what follows its last span

    def advance(self, row: Row, token: int, salt: str | None) -> Row:
        key = (row[1], token, self.epoch, salt)
        if key not in self.memo:
            self.memo[key] = (hash((row[0], token)), hash(key))
        return self.memo[key]

    def resolve(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the starts and ends of unresolved spans, without their pages beyond."""
        return replace(plan, sequences=tuple(part if part.unresolved is None else self.resolved(part) for part in plan.sequences))

    def resolved(self, part: SequencePlan) -> SequencePlan:
        truth = self.truths[part.seq_id]
        start, drafts = len(truth.tokens) - 1, self.drafts[part.seq_id][: part.drafts]
        assert part.sample and part.token_ids == (-1,) * (1 + part.drafts) and part.state_copy == 0
        assert part.start <= start <= part.start + part.unresolved
        end, latest = start + 1 + len(drafts), part.end + part.unresolved
        first, oldest = part.window_first, first_window_page(start, self.window)
        assert first == first_window_page(part.start, self.window) <= oldest
        assert len(part.pages) == -(-latest // PAGE_TOKENS)
        assert not self.window or first + len(part.window_pages) == (latest - 1) // WINDOW_PAGE_TOKENS + 1
        assert -1 not in part.window_pages
        return part._replace(
            start=start,
            token_ids=(truth.tokens[-1], *drafts),
            drafts=len(drafts),
            state_copy=self.copies[part.seq_id],
            unresolved=None,
            pages=part.pages[: -(-end // PAGE_TOKENS)],
            window_first=oldest,
            window_pages=part.window_pages[oldest - first : (end - 1) // WINDOW_PAGE_TOKENS + 1 - first],
        )

    def execute(self, plan: StepPlan) -> dict[int, Sampled]:
        assert plan.step % 16 or pickle.loads(pickle.dumps(plan)) == plan
        assert plan.step == self.next_step
        self.next_step += 1
        lens = [len(part.token_ids) for part in plan.sequences]
        known = [count - part.drafts for count, part in zip(lens, plan.sequences, strict=True)]
        assert sorted(known, key=lambda n: n > 1) == known and plan.num_tokens == sum(lens)
        self.prepare(plan)
        self.check_exclusive(plan)
        for part in plan.sequences:
            self.check_reads(part)
            if plan.max_drafts:
                self.check_drafter(part)
        results = {}
        for part in plan.sequences:
            sampled = self.write(plan.step, part, drafter=plan.max_drafts > 0)
            if sampled is not None:
                results[part.seq_id] = sampled
        for slot, snapshot in plan.saves:
            self.snapshots[snapshot] = self.state[slot][0]
        return results

    def prepare(self, plan: StepPlan) -> None:
        for page, row in plan.zero_rows:
            assert page >= 0 and 0 <= row < self.drafter_places
            self.drafter_rows[page][row] = ZEROED
        for slot in plan.resets:
            self.state[slot], self.rows[slot], self.owner[slot] = {0: EMPTY}, [] if self.has_state else None, None
        for snapshot, slot in plan.restores:
            self.state[slot], self.rows[slot], self.owner[slot] = {0: self.snapshots[snapshot]}, None, None
        for src, dst in plan.slot_copies:
            if self.rows[src] is None:
                leader = next(self.truths[p.seq_id] for p in plan.sequences if p.slot == src)
                self.rows[src] = self.pure(leader, next(p.start for p in plan.sequences if p.slot == src))
            self.state[dst], self.rows[dst], self.owner[dst] = {0: self.state[src][0]}, list(self.rows[src]), None
        for src, dst in plan.grow_copies:
            self.grow[dst] = list(self.grow[src])
        for src, dst in plan.window_copies:
            self.window_rows[dst] = list(self.window_rows[src])
        for src, dst in plan.window_copies if self.window else plan.grow_copies:
            self.drafter_rows[dst] = list(self.drafter_rows[src])

    def check_exclusive(self, plan: StepPlan) -> None:
        fresh = [*plan.resets, *(slot for _, slot in plan.restores), *(slot for _, slot in plan.slot_copies)]
        targets = (fresh, [d for _, d in plan.grow_copies], [d for _, d in plan.window_copies], [d for _, d in plan.saves])
        for ids in (*targets, [p.slot for p in plan.sequences], [p.seq_id for p in plan.sequences]):
            assert len(set(ids)) == len(ids), "something is written twice in one step"
        listed = Counter(page for part in plan.sequences for page in part.pages)
        listed_window = Counter(page for part in plan.sequences for page in part.window_pages)
        for part in plan.sequences:
            for page in part.pages[part.start // PAGE_TOKENS :]:
                assert listed[page] == 1, f"grow page {page} is written by one and used by another"
            first = max(part.start, part.end - part.drafts - self.window) // WINDOW_PAGE_TOKENS
            for page in part.window_pages[first - part.window_first :]:
                assert listed_window[page] == 1, f"window page {page} is written by one and used by another"

    def pure(self, truth: Truth, length: int) -> list[Row]:
        """Rows of a prefix that ran in this epoch from its first token on."""
        rows, row = [], EMPTY
        for token in truth.tokens[:length]:
            row = self.advance(row, token, truth.request.cache_salt)
            rows.append(row)
        return rows

    def check_reads(self, part: SequencePlan) -> None:
        truth, start, end = self.truths[part.seq_id], part.start, part.end
        if part.token_ids == (-1,):
            assert 2 <= self.next_step - truth.sampled_in <= 1 + self.stages and start == len(truth.tokens) - 1
        else:
            known = end - part.drafts
            assert list(part.token_ids[: known - start]) == truth.tokens[start:known] and known > start
            assert part.next_id in (-1, truth.tokens[end] if end < len(truth.tokens) else -1)
            assert not part.drafts or (part.sample and known - start == 1 and start // PAGE_TOKENS == end // PAGE_TOKENS)
        if self.owner[part.slot] is None:
            self.owner[part.slot] = part.seq_id
        assert self.owner[part.slot] == part.seq_id, "the slot is another sequence's"
        if self.rows[part.slot] is None:
            self.rows[part.slot] = self.pure(truth, start)
        rows = self.rows[part.slot]
        assert len(rows) == start, "a span does not start where the last one ended"
        assert not self.has_state or self.state[part.slot][part.state_copy] == (rows[-1] if rows else EMPTY)
        assert len(part.pages) == len(set(part.pages)) == -(-end // PAGE_TOKENS) and min(part.pages) >= 0
        for first in range(0, start, PAGE_TOKENS):
            want = rows[first : first + PAGE_TOKENS]
            assert self.grow[part.pages[first // PAGE_TOKENS]][: len(want)] == want, f"wrong rows in [{first}, {start})"
        if not self.window:
            assert part.window_pages == () and part.window_first == 0
            return
        read = range(max(0, start - self.window + 1), start)
        write = range(max(start, end - part.drafts - self.window), end)
        assert part.window_first + len(part.window_pages) == (end - 1) // WINDOW_PAGE_TOKENS + 1
        ends = [(span[0] // WINDOW_PAGE_TOKENS, span[-1] // WINDOW_PAGE_TOKENS) for span in (read, write) if span]
        used = {page for first, last in ends for page in range(first, last + 1)}
        assert part.window_first == min(used)
        for logical, page in enumerate(part.window_pages, part.window_first):
            assert (page >= 0) == (logical in used), f"window page {logical}"
            lo = max(read.start, logical * WINDOW_PAGE_TOKENS)
            hi = min(read.stop, (logical + 1) * WINDOW_PAGE_TOKENS)
            if lo < hi:
                at = lo - logical * WINDOW_PAGE_TOKENS
                assert self.window_rows[page][at : at + hi - lo] == rows[lo:hi], f"wrong window rows in [{lo}, {hi})"

    def check_drafter(self, part: SequencePlan) -> None:
        """The drafter finds the rows of its window, or all, after a span, or zero-filled ones of tokens that it has missed."""
        rows = self.rows[part.slot]
        position = max(0, part.start - self.window + 1) if self.window else 0
        while position < part.start:
            page, place = self.drafter_place(part, position)
            wanted = rows[position : min(part.start, position + self.drafter_places - place)]
            found = self.drafter_rows[page][place : place + len(wanted)]
            if found != wanted:
                for at, (one, row) in enumerate(zip(found, wanted, strict=True), position):
                    assert one in (ZEROED, row), f"the drafter finds a wrong row at {at}"
            position += len(wanted)

    def drafter_place(self, part: SequencePlan, position: int) -> tuple[int, int]:
        """Return page and row of a token's KV of the drafter."""
        number, place = divmod(position, self.drafter_places)
        return (part.window_pages[number - part.window_first] if self.window else part.pages[number]), place

    def write(self, step: int, part: SequencePlan, *, drafter: bool) -> Sampled | None:
        truth, start, end = self.truths[part.seq_id], part.start, part.end
        rows = self.rows[part.slot]
        row = self.state[part.slot][part.state_copy] if self.has_state else (rows[-1] if rows else EMPTY)
        for token in truth.tokens[start:end] if not part.drafts else part.token_ids:
            row = self.advance(row, token, truth.request.cache_salt)
            rows.append(row)
        last = end - part.drafts
        self.state[part.slot].update((copy, rows[last - 1 + copy]) for copy in range(part.drafts + 1))
        for first in range(start - start % PAGE_TOKENS, end, PAGE_TOKENS):
            page = self.grow.setdefault(part.pages[first // PAGE_TOKENS], [None] * PAGE_TOKENS)
            lo, hi = max(start, first), min(end, first + PAGE_TOKENS)
            page[lo - first : hi - first] = rows[lo:hi]
        for position in range(max(start, last - self.window), end) if self.window else ():
            page_id = part.window_pages[position // WINDOW_PAGE_TOKENS - part.window_first]
            page = self.window_rows.setdefault(page_id, [None] * WINDOW_PAGE_TOKENS)
            page[position % WINDOW_PAGE_TOKENS] = rows[position]
        for position in range(max(start, last - self.window) if self.window else start, end) if drafter else ():
            page_id, place = self.drafter_place(part, position)
            self.drafter_rows[page_id][place] = rows[position]
        if part.score is not None:
            assert start <= part.score[0] < part.score[1] <= end
            truth.scored += range(*part.score)
        if not part.sample:
            assert end < len(truth.tokens), "the last known token ran and nothing was sampled"
            return None
        assert last == len(truth.tokens) and truth.request.generate
        truth.sampled_in = step
        found: list[Sampled] = []
        for place in range(last, end + 1):
            generated = place - len(truth.request.prompt_token_ids)
            token = next_token(rows[place - 1][0], truth.request, truth.index, generated)
            truth.tokens.append(token)
            failed = truth.fails_at is not None and generated >= truth.fails_at
            found.append(Sampled(token_id=token, error=RequestFailedError("the logits are not finite") if failed else None))
            if place == end or token != part.token_ids[place - start]:
                break
        del rows[len(truth.tokens) - 1 :]
        self.copies[part.seq_id] = len(found) - 1
        return found[0]._replace(after=tuple(found[1:]), drafted=part.drafts)

    def draft(self, seq_id: int, count: int, right: Callable[[], bool]) -> tuple[int, ...]:
        """Draft what a sequence samples next; ``right`` decides whether a draft is the token."""
        drafts, (known, prefix) = list[int](), (truth := self.truths[seq_id]).hashed
        for token in truth.tokens[known:]:
            prefix = hash((prefix, token))
        truth.hashed = len(truth.tokens), prefix
        done = len(truth.tokens) - len(truth.request.prompt_token_ids)
        for generated in range(done, done + count):
            token = next_token(prefix, truth.request, truth.index, generated)
            drafts.append(token if right() else (token + 1) % VOCAB)
            prefix = hash((prefix, drafts[-1]))
        return tuple(drafts)


class Harness:
    """Scheduler and device together, with what a user of the scheduler would keep."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pools: Pools,
        *,
        overlap: bool = True,
        right: Callable[[], bool] | None = None,
        ahead: bool = False,
    ) -> None:
        """``right`` decides whether a draft is the token; without it there are no drafts. With it and overlap there are times
        without drafts, when steps overlap. With drafts of the device (``ahead``) steps overlap at all times."""
        self.turns = overlap and right is not None and not ahead
        self.ahead = ahead and right is not None and limits.stages == 1
        self.limits, self.pools, self.overlap, self.right = limits, pools, overlap and right is None, right
        self.scheduler = Scheduler(limits, pools, propose=None if right is None else self.propose)
        self.device = Device(limits.window, limits.stages, snapshots=limits.snapshots)
        self.most_outstanding = limits.stages - 1 + self.overlap
        self.now = 0.0
        self.version = 0
        self.requests: dict[str, Request] = {}
        self.held: list[str] = []  # requests that are not ready
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], SequenceUpdate] = {}
        self.cached: dict[tuple[str, int], int] = {}
        self.outstanding: list[tuple[StepPlan, dict[int, Sampled]]] = []
        self.plans: list[StepPlan] = []

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        assert self.right is not None and 0 < most <= self.limits.max_drafts
        assert list(seq.tokens) == self.device.truths[seq.seq_id].tokens
        if self.ahead:
            return seq.drafts[:most]
        return self.device.draft(seq.seq_id, most - (self.right() and most > 1), self.right)

    def preempt_all(self) -> None:
        """Send all running sequences back to the queue, as if others needed their pages; no plan may be outstanding."""
        assert not self.outstanding
        self.scheduler.preempt_all()

    def add(self, request: Request, *, fails_at: int | None = None, held: bool = False) -> None:
        self.scheduler.add(request, ready=not held)
        self.held += [request.request_id] * held
        self.requests[request.request_id] = request
        for seq in self.scheduler.sequences_of(request.request_id):
            self.device.truths[seq.seq_id] = Truth(request, seq.index, list(request.prompt_token_ids), fails_at)
            self.outputs[request.request_id, seq.index] = []

    def take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            key = (update.request_id, update.index)
            assert not update.token_ids or update.weight_version == self.version
            assert key not in self.ends, "an update of a sequence that has ended"
            self.outputs[key] += update.token_ids
            assert not (update.cached_tokens and self.cached.get(key)), "cached tokens are reported twice"
            self.cached[key] = self.cached.get(key, 0) + update.cached_tokens
            if update.finish_reason is not None:
                self.ends[key] = update
            else:
                assert update.token_ids

    def plan(self, max_drafts: int | None = None) -> StepPlan | None:
        self.take(self.scheduler.expire(self.now))
        plan = self.scheduler.schedule(self.now, max_drafts)
        for key in self.outputs.keys() - self.ends.keys():
            deadline = self.requests[key[0]].deadline
            assert deadline is None or deadline > self.now, "a deadline was missed"
        if plan is not None:
            self.plans.append(plan)
            for part in plan.sequences:
                request = self.device.truths[part.seq_id].request
                assert not (-1 in part.token_ids and request.params.thinking_budget is not None)
                latest = part.end + (part.unresolved or 0)
                if request.params.max_tokens is not None:
                    assert latest < len(request.prompt_token_ids) + request.params.max_tokens, "a token too many"
                assert latest < self.limits.max_model_len
            assert plan.num_tokens <= self.limits.max_num_batched_tokens
            ran = self.device.resolve(plan)
            results = self.device.execute(ran)
            self.outstanding.append((ran, self.with_drafts(ran, results) if self.ahead and plan.max_drafts else results))
        return plan

    def with_drafts(self, plan: StepPlan, results: dict[int, Sampled]) -> dict[int, Sampled]:
        """Return results with drafts of what follows each span, as many as its pages have room for, or none."""
        assert self.right is not None
        for part in plan.sequences:
            if part.sample:
                count = plan.max_drafts if self.right() else 0
                drafts = self.device.drafts[part.seq_id] = self.device.draft(part.seq_id, count, self.right)
                results[part.seq_id] = results[part.seq_id]._replace(drafts=drafts)
        return results

    def update(self) -> None:
        plan, results = self.outstanding.pop(0)
        self.take(self.scheduler.update(plan, results))

    def step(self) -> StepPlan | None:
        undrafted = self.turns and len(self.plans) % 40 > 12
        if self.turns and not undrafted and self.limits.stages == 1:
            while self.outstanding:
                self.update()
        if self.ahead and not self.scheduler.foresees(self.limits.max_drafts):
            while self.outstanding:
                self.update()
        idle = not self.outstanding
        plan = self.plan(0 if undrafted else None)
        assert plan or not idle or not self.scheduler.has_work(), "stuck"
        room = self.most_outstanding + ((undrafted and self.limits.stages == 1) or self.ahead)
        if self.outstanding and (plan is None or len(self.outstanding) > room):
            self.update()
        self.scheduler.check()
        return plan

    def abort(self, request_id: str | None, index: int | None = None) -> None:
        self.take(self.scheduler.abort(request_id, index=index))
        self.scheduler.check()

    def bump(self) -> None:
        """Make cached prefixes unreachable; between steps by publishing other weights, whose version later tokens carry."""
        if self.outstanding:
            self.scheduler.reset_prefix_cache()
        else:
            self.version += 1
            self.scheduler.publish(self.version)
        self.device.epoch += 1

    def release(self) -> None:
        for name in filter(self.scheduler.has_request, self.held):
            self.scheduler.ready(name)
        self.held.clear()

    def drain(self) -> None:
        self.release()
        while len(self.outstanding) > self.most_outstanding:
            self.update()
        for _ in range(100_000):
            if not self.scheduler.has_work() and not self.outstanding:
                break
            self.step()
        self.step()
        self.check_end()

    def check_end(self) -> None:
        """Every sequence has ended once and as it must, and all ids are free."""
        assert self.ends.keys() == self.outputs.keys()
        for (request_id, index), end in self.ends.items():
            request, tokens = self.requests[request_id], tuple(self.outputs[request_id, index])
            if not request.generate:
                assert end.finish_reason in ("stop", "abort", "deadline") and not tokens
                continue
            want, reason, stop = run_alone(request, index, self.limits.max_model_len)
            if end.finish_reason in ("stop", "length"):
                assert (tokens, end.finish_reason, end.stop_reason) == (want, reason, stop)
            else:
                assert tokens == want[: len(tokens)] and (end.error is not None) == (end.finish_reason == "error")
        for truth in self.device.truths.values():
            request = truth.request
            wanted: list[int] = []
            if truth.index == 0 and request.score_from is not None:
                wanted = list(range(request.score_from - 1, len(request.prompt_token_ids) - 1))
            whole = self.ends[request.request_id, truth.index].finish_reason in ("stop", "length")
            assert truth.scored == (wanted if whole else wanted[: len(truth.scored)])
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        while self.scheduler._cache.evict_one():
            pass
        for pool in (self.pools.grow, self.pools.window, self.pools.slots, self.pools.snapshots):
            assert pool.num_free == pool.total, f"{pool.name}s leaked"


def request(
    request_id: str,
    prompt: tuple[int, ...] | list[int],
    *,
    priority: int = 0,
    deadline: float | None = None,
    salt: str | None = None,
    score_from: int | None = None,
    generate: bool = True,
    arrival: float = 0.0,
    **params: object,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"ignore_eos": True, **params}),
        priority=priority,
        deadline=deadline,
        cache_salt=salt,
        eos_token_id=EOS,
        score_from=score_from,
        generate=generate,
        arrival=arrival,
    )
