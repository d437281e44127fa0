"""The sampler: a table of settings by slot, and one sampled token per row of a step, on CPU and GPU alike.

The order in which a row's logits are processed:

    1. penalties      repetition (prompt and output), then frequency and presence (output)
    2. logit bias
    3. masks          allowed ids, bad words, end-of-sequence and stop ids before ``min_tokens``, grammar, thinking budget
    4. temperature    of sampled rows; greedy rows take the best token here
    5. min_p, top_k, top_p, each on the tokens that the previous one has left

``logprobs_mode="raw"`` is the distribution before 1, ``"processed"`` the one after 5; for a greedy row that is after 3. ``score``
runs the same stages for tokens that are given.

A sequence's line of the table is written when it takes a slot, and read by ``sample_rows``, eagerly or in a graph. Token counts are
updated on the device with each sampled id, so that a step can run before the host knows the previous token. Grammars, bad words of
several tokens and thinking budgets need the token on the host (``accept``). In each step they produce a mask, or a forced token,
for the rows of their sequences (``rules``). The scheduler plans the next step of such a sequence when its token has arrived.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4lite.errors import RequestFailedError
from dsv4lite.kernels.dispatch import send
from dsv4lite.kernels.sampling import argmax_finite, token_logprobs
from dsv4lite.kernels.sampling.rows import (
    BEST,
    EVERYTHING,
    HEADER,
    NOTHING,
    NUM_COLUMNS,
    Column,
    Needs,
    RowMasks,
    RowSpace,
    SampleInputs,
    sample_rows,
    scored_values,
)
from dsv4lite.request import Request, SamplingParams
from dsv4lite.sampling.samples import GivenSpan, HostCopy, Samples, slice_spans
from dsv4lite.sampling.state import Line, SequenceState, failed, state_of
from dsv4lite.scheduling.step_plan import UNKNOWN, SequencePlan

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from dsv4lite.text.structured import GrammarCompiler, StructuredOutputs

PREPARED_GRAMMARS = 64
"""Number of grammars, the latest ones, that are kept compiled for sequences to be added."""

# Bounds within which divisions and sums of logits stay in the range of float32.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1.2e-38, 3.4e38
_MIN_REPETITION, _MAX_REPETITION = 1e-30, 1e30
_MAX_BIAS = 1e30
_IN_PROMPT = -(1 << 31)

Best = tuple[Tensor, Tensor, Tensor]
"""The result of ``argmax_finite`` for some logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNeeds:
    """What the sequences of a step need from the sampler.

    Attributes:
        seq_ids: Ids of the sequences.
        slots: Their slots.
        needs: Union of their needs. If it is empty, every row takes its best token, and nothing else is computed.
        wanted: Index of each sequence that has log-probabilities, and the number of best tokens that it lists.
        ruled: Indices of the sequences with rules on the host.
        long: Indices of the sequences that list more best tokens than ``sample_rows`` does.
        kept: Indices of the sequences that record which tokens could be sampled.
    """

    seq_ids: tuple[int, ...]
    slots: tuple[int, ...]
    needs: Needs
    wanted: tuple[tuple[int, int], ...]
    ruled: tuple[int, ...]
    long: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def needs_positions(self) -> bool:
        """Whether the host needs the positions and drafts of the step's rows."""
        return bool(self.ruled or self.long or self.kept)


def dry_run(request: Request, vocab_size: int) -> None:
    """Convert a request's settings to tensors on the CPU, as its steps will on the device.

    An error here fails only the request; in a step it would fail all requests of the step.

    Raises:
        IndexError: A token id is too large. On a GPU it would end the process.
    """
    state = state_of(request, 0, 0)
    _line_of(state, vocab_size, torch.device("cpu"))
    if state.forbids_stops:
        torch.empty(vocab_size, dtype=torch.bool, device="cpu")[list(state.stop_ids)]


class Sampler:
    """Samples the next tokens of the sequences of a step; mutable, owned by the engine thread.

    A sequence is known from ``add`` to ``remove``, also while it is preempted. Its state depends on its tokens only, so preemption
    changes no result.

    Attributes:
        settings: float64 [slots + 1, NUM_COLUMNS], see ``Column``; the last line is for padding.
        drafting: The settings by which drafts are chosen, in the same format: those that are the same for every token, without
            ``top_k`` and ``top_p``, which need a ranking.
        space: Scratch memory of ``sample_rows``.

    Args:
        vocab_size: V, at most 2**23.
        device: Device of the logits.
        default_seed: Seed of requests without one.
        grammars: Compiler for ``structured_outputs``; may be ``None`` if no request uses them.
        slots: Number of slots of the state.
        rows: Most rows of a step.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        default_seed: int,
        grammars: GrammarCompiler | None = None,
        *,
        slots: int,
        rows: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._default_seed = default_seed
        self._grammars = grammars
        self._prepared: OrderedDict[StructuredOutputs, Future[LLMatcher]] = OrderedDict()
        self._sequences: dict[int, SequenceState] = {}
        self._slot_owners: dict[int, int] = {}  # sequence id by slot
        self._last: RowNeeds | None = None
        self.settings = send(torch.tensor(_default_line(), dtype=torch.float64, device="cpu"), self._device).repeat(slots + 1, 1)
        self.drafting = self.settings.clone()
        self.space = RowSpace.allocate(rows, vocab_size, self._device)

    @property
    def num_sequences(self) -> int:
        """Sequences between ``add`` and ``remove``."""
        return len(self._sequences)

    def compile(self, grammar: StructuredOutputs) -> None:
        """Start to compile a grammar that a sequence will need."""
        if self._grammars is not None:
            self._prepared[grammar] = self._grammars.begin(grammar)
            self._prepared.move_to_end(grammar)
            if len(self._prepared) > PREPARED_GRAMMARS:
                self._prepared.popitem(last=False)

    def add(self, seq_id: int, request: Request, index: int) -> None:
        """Register a sequence before its first token. An error in its settings fails its first token.

        Args:
            seq_id: Not in use.
            request: Already checked against the vocabulary.
            index: Which of the request's ``n`` sequences.
        """
        assert seq_id not in self._sequences
        try:
            last = next(reversed(self._sequences.values()), None)  # the completions of a request are added one after the other
            state, grammar = state_of(request, index, self._default_seed, last), request.params.structured_outputs
            if grammar is not None:
                assert self._grammars is not None and not isinstance(grammar, Mapping)
                state.compiled = self._grammars.begin(grammar, caches=False)
        except Exception as error:  # the leader has checked the request; an error on this rank alone must not end the rank
            state = state_of(replace(request, params=SamplingParams()), index, self._default_seed)
            state.failure = failed(error)
        if state.params.logprobs is not None:
            state.num_logprobs = min(state.params.logprobs, self._vocab_size)
        state.needs = _needs_of(state, self._vocab_size)
        self._sequences[seq_id] = state

    def remove(self, seq_id: int) -> None:
        """Forget a sequence and its state; unknown sequences are ignored."""
        state = self._sequences.pop(seq_id, None)
        if state is not None and state.slot is not None and self._slot_owners.get(state.slot) == seq_id:
            del self._slot_owners[state.slot]
        if self._last is not None and seq_id in self._last.seq_ids:
            self._last = None

    def accept(self, seq_id: int, token_id: int) -> None:
        """Pass a sampled token to the sequence's rules on the host, in order.

        Unknown sequences are ignored: they ended while a step was in flight.
        """
        state = self._sequences.get(seq_id)
        if state is not None and state.host_rules:
            state.accept(token_id)

    def prepare(self, sequences: Sequence[SequencePlan]) -> RowNeeds:
        """Write the table's lines of the sequences that sample in a step; return their needs."""
        seq_ids, slots = tuple([s.seq_id for s in sequences]), tuple([s.slot for s in sequences])
        if self._last is None or self._last.seq_ids != seq_ids or self._last.slots != slots:
            self._write_lines(sequences)
            states = [self._sequences[seq_id] for seq_id in seq_ids]
            needs = NOTHING
            for each in states:
                needs |= each.needs
            self._last = RowNeeds(
                seq_ids=seq_ids,
                slots=slots,
                needs=needs,
                wanted=tuple((i, each.num_logprobs) for i, each in enumerate(states) if each.num_logprobs >= 0),
                ruled=tuple(i for i, each in enumerate(states) if each.host_rules),
                long=tuple(i for i, each in enumerate(states) if each.num_logprobs > BEST),
                kept=tuple(i for i, each in enumerate(states) if each.records_kept),
            )
        return self._last

    def rules(
        self, asked: RowNeeds, sequences: Sequence[SequencePlan], first_rows: Sequence[int]
    ) -> tuple[RowMasks | None, Mapping[int, RequestFailedError]]:
        """Return the tokens that the host forbids or forces in the rows of a step, and the rows whose rules failed, with reason.

        Args:
            asked: From ``prepare``.
            sequences: Their plans in this step; the host knows their tokens.
            first_rows: Row of the first token that each of them samples.
        """
        found: list[tuple[int, Tensor, int]] = []
        failures: dict[int, RequestFailedError] = {}
        for i in asked.ruled:
            s, state = sequences[i], self._sequences[sequences[i].seq_id]
            drafts = s.token_ids[len(s.token_ids) - s.drafts :]
            self._constrain(state, s.end - s.drafts, drafts, first_rows[i], found, failures)
        return self._masks(found), failures

    def run(
        self,
        logits: Tensor,
        best: Best,
        slots: Tensor,
        positions: Tensor,
        last_token: Tensor,
        needs: Needs,
        drafts: tuple[Tensor, Tensor] | None = None,
        masks: RowMasks | None = None,
    ) -> Tensor:
        """Sample; see ``SampleInputs``. Without ``masks`` this can be captured, since nothing depends on the host."""
        where = (slots, positions, self.settings, last_token, self.space)
        return sample_rows(SampleInputs(logits, best, *where, needs, drafts, masks=masks))

    def warm_up(self, logits: Tensor) -> None:
        """Launch every kernel once on rows of padding, whose logits float32 [R, V] are arbitrary."""
        padding = torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device)
        nowhere = torch.empty(len(self.settings), dtype=torch.int64, device=logits.device)
        self.run(logits, argmax_finite(logits), padding, padding, nowhere, EVERYTHING)

    def finish(
        self,
        out: Tensor,
        logits: Tensor,
        best: Best,
        asked: RowNeeds,
        sequences: Sequence[SequencePlan],
        first_rows: Sequence[int],
        failures: Mapping[int, RequestFailedError] | None = None,
        placed: HostCopy | None = None,
    ) -> Samples:
        """List best tokens beyond those that ``sample_rows`` lists, and start the copy of the results to the host.

        Args:
            out: Result of ``run``, whose last call had these rows; without ``needs``, the best tokens [3, R].
            logits: float32 [R, V].
            best: ``argmax_finite`` of the logits.
            asked: From ``prepare``.
            sequences: Plans of the sequences of these rows.
            first_rows: First row of each sequence.
            failures: From ``rules``.
            placed: See ``Samples``.
        """

        def rows_of(places: Sequence[int]) -> tuple[list[int], Tensor]:
            """Return the rows of the tokens that some sequences sample, and rows, slots and positions, int32 [3, L]."""
            each = [(i, place) for i in places for place in range(1 + sequences[i].drafts)]
            rows = [first_rows[i] + place for i, place in each]
            slots, positions = [sequences[i].slot for i, _ in each], [_position(sequences[i]) + place for i, place in each]
            return rows, self._columns(rows, slots, positions)

        long = kept = None
        if asked.long:
            rows, numbers_3L = rows_of(asked.long)
            long = rows, self._long_lists(out, logits, best[0], numbers_3L, max(k for _, k in asked.wanted))
        if asked.kept:
            rows, numbers_3L = rows_of(asked.kept)
            kept = rows, self._scored_values(logits, best[0], numbers_3L) > -math.inf
        return Samples(out, sequences, first_rows, wanted=asked.wanted, failures=failures, long=long, kept=kept, placed=placed)

    def sample(self, logits: Tensor, sequences: Sequence[SequencePlan], last_token: Tensor) -> Samples:
        """Sample the next tokens of some sequences.

        Args:
            logits: float32 [R, V], of each sequence in order: at the position before each draft, and at the last position.
            sequences: Their plans in this step.
            last_token: int64 [slots + 1], to which the tokens are written.
        """
        asked, best = self.prepare(sequences), argmax_finite(logits)
        first_rows = [0, *accumulate(1 + s.drafts for s in sequences)][:-1]
        masks, failures = self.rules(asked, sequences, first_rows)
        each = [(s, place) for s in sequences for place in range(1 + s.drafts)]
        slots, positions, *drafts = self._columns(
            [s.slot for s, _ in each],
            [_position(s) + place for s, place in each],
            [s.token_ids[place - s.drafts - 1] for s, place in each],
            [place for _, place in each],
        )
        out = self.run(logits, best, slots, positions, last_token, asked.needs, (drafts[0], drafts[1]), masks)
        return self.finish(out, logits, best, asked, sequences, first_rows, failures)

    def draft(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Draft one token per row: the best one, or, for a request that draws, the one that the position's noise draws.

        The draw that verifies the draft uses the same noise, so that both agree as often as their distributions allow. This can be
        captured, since nothing depends on the host.

        Args:
            logits: float32 [S, V], of a drafter.
            slots: int32 [S], slots of the sequences; -1 for padding.
            positions: int32 [S], positions of the tokens before the drafted ones.

        Returns:
            int64 [S].
        """
        nowhere = torch.empty(len(self.drafting), dtype=torch.int64, device=logits.device)
        best, needs = argmax_finite(logits), Needs.EDITS | Needs.DRAWS
        return sample_rows(SampleInputs(logits, best, slots, positions, self.drafting, nowhere, self.space, needs))[0].long()

    def score(self, logits: Tensor, spans: Sequence[GivenSpan]) -> tuple[Tensor, ...]:
        """Score given tokens by the distributions that they would have been sampled from; they count as their sequence's output.

        Args:
            logits: float32 [T, V], not modified.
            spans: T tokens in all; the tokens of a sequence follow those that were scored before.

        Returns:
            The results of ``kernels.sampling.token_logprobs``, with as many best tokens as any of the requests lists.
        """
        most, rows = len(self.space.state), range(len(logits))
        if len(rows) > most:
            some = [logits[start : start + most] for start in rows[::most]]
            some = [part if part.data_ptr() % 16 == 0 else part.clone() for part in some]  # kernels require alignment
            parts = [self.score(part, slice_spans(spans, row, row + most)) for part, row in zip(some, rows[::most], strict=True)]
            width = max(part[2].shape[1] for part in parts)
            parts = [(*part[:2], *(pad(x, (0, width - x.shape[1])) for x in part[2:])) for part in parts]
            return tuple(torch.cat(column) for column in zip(*parts, strict=True))
        self._last = None  # lines of slots change here
        self._write_lines([given.sequence for given in spans])
        states = [self._sequences[given.sequence.seq_id] for given in spans]
        best, needs, found, row = argmax_finite(logits), NOTHING, list[tuple[int, Tensor, int]](), 0
        for given, state in zip(spans, states, strict=True):
            needs |= state.needs
            for place, token_id in enumerate(given.token_ids if state.host_rules else ()):
                self._constrain(state, given.position + place, (), row + place, found, {})
                state.accept(token_id)  # a grammar that cannot follow the given tokens forbids nothing after them
            if state.replay is not None:
                replay, first = state.replay
                kept = replay.kept(given.position - first, given.end - first, self._vocab_size)
                assert kept is not None
                found += [(row + place, ~mask, -1) for place, mask in enumerate(kept)]
            row += len(given.token_ids)
        each = [(given, place) for given in spans for place in range(len(given.token_ids))]
        slots, positions, seen, places, token_ids = self._columns(
            [given.sequence.slot for given, _ in each],
            [given.position - 1 + place for given, place in each],
            [given.token_ids[place - 1] if place else 0 for given, place in each],
            [place for _, place in each],
            [given.token_ids[place] for given, place in each],
        )
        nowhere = torch.empty(0, dtype=torch.int64, device=self._device)
        where = slots, positions, self.settings, nowhere, self.space
        needs &= ~(Needs.DRAWS | Needs.NUCLEI)
        out = sample_rows(SampleInputs(logits, best, *where, needs, (seen, places), token_ids, self._masks(found)))
        for state, ids in zip(states, token_ids.split([len(given.token_ids) for given in spans]), strict=True):
            if state.line is not None and state.line.occurrences is not None:
                state.line.occurrences.index_add_(0, ids, torch.ones_like(ids))
        k = max(state.num_logprobs for state in states)
        if k > BEST:
            numbers_3L = torch.stack((torch.arange(len(logits), dtype=torch.int32, device=self._device), slots, positions))
            lists = self._long_lists(out, logits, best[0], numbers_3L, k)
        else:
            lists = torch.stack((out[HEADER : HEADER + 2 * k : 2].t(), out[HEADER + 1 : HEADER + 2 * k : 2].t()))
        return out[4].view(torch.float32), out[3], lists[0], lists[1].view(torch.float32)

    def _write_lines(self, sequences: Sequence[SequencePlan]) -> None:
        """Write the lines of sequences that are new in their slots."""
        new = [(s.slot, s.seq_id) for s in sequences if self._slot_owners.get(s.slot) != s.seq_id]
        if not new:
            return
        lines = []
        for slot, seq_id in new:
            state = self._sequences[seq_id]
            state.line = state.line or _line_of(state, self._vocab_size, self._device)
            state.slot, self._slot_owners[slot] = slot, seq_id
            lines.append((slot, *state.line.settings, *state.line.drafting))
        table = send(torch.tensor(lines, dtype=torch.float64, device="cpu"), self._device)
        slots, settings, drafting = table.split([1, NUM_COLUMNS, NUM_COLUMNS], dim=1)
        self.settings[slots[:, 0].long()] = settings
        self.drafting[slots[:, 0].long()] = drafting

    def _columns(self, *columns: Sequence[int]) -> Tensor:
        """Send columns of numbers to the device, as int32 [columns, R]."""
        return send(torch.tensor(columns, dtype=torch.int32, device="cpu"), self._device)

    def _long_lists(self, out: Tensor, logits: Tensor, top: Tensor, numbers_3L: Tensor, k: int) -> Tensor:
        """Return ids and log-probabilities (as bits) of the ``k`` best tokens of some rows, int32 [2, L, k]."""
        values = self._scored_values(logits, top, numbers_3L)
        _, _, ids, listed = token_logprobs(values, out[0, numbers_3L[0].long()].long(), k)
        return torch.stack((ids, listed.view(torch.int32)))

    def _scored_values(self, logits: Tensor, top: Tensor, numbers_3L: Tensor) -> Tensor:
        """Return the logits whose log-probabilities L rows report, float32 [L, V]; ``numbers_3L``: rows, slots, positions."""
        rows_L, slots_L, positions_L = numbers_3L
        return scored_values(logits, top, self.settings[slots_L.long()], positions_L, self.space, rows_L.long())

    def _constrain(
        self,
        state: SequenceState,
        position: int,
        drafts: Sequence[int],
        row: int,
        found: list[tuple[int, Tensor, int]],
        failures: dict[int, RequestFailedError],
    ) -> None:
        """Find the tokens that the host forbids or forces in the rows of one sequence; a rule that fails, fails its row only.

        With drafts, a copy of the sequence's state accepts them, up to the first one that is forbidden.

        Args:
            state: State of the sequence.
            position: Position of the token that the first row samples.
            drafts: Drafts of the tokens that the rows sample, except the last row's.
            row: The first row.
            found: Receives row, forbidden tokens bool [V], and the forced token or -1.
            failures: Receives row and reason.
        """
        self._create_matcher(state)
        state = state.fork() if drafts else state
        for place, draft in enumerate((*drafts, UNKNOWN)):
            token_id, mask = state.forced_token(), None
            try:
                if token_id is None:
                    mask = state.forbidden_next(position + place, self._vocab_size)
            except Exception as error:
                failures[row + place] = failed(error)
                return
            if token_id is not None:
                found.append((row + place, torch.ones(self._vocab_size, dtype=torch.bool, device="cpu"), token_id))
            elif mask is not None:
                found.append((row + place, mask, -1))
            if draft == UNKNOWN or token_id not in (None, draft) or (mask is not None and mask[draft]):
                return
            state.accept(draft)

    def _create_matcher(self, state: SequenceState) -> None:
        """Create the grammar matcher of a sequence, at its first token."""
        if state.compiled is not None and state.matcher is None and state.failure is None:
            assert self._grammars is not None
            try:
                state.matcher = self._grammars.matcher(state.compiled)
            except Exception as error:
                state.failure = failed(error)

    def _masks(self, found: Sequence[tuple[int, Tensor, int]]) -> RowMasks | None:
        if not found:
            return None
        rows, masks, forced = zip(*found, strict=True)
        numbers = send(torch.tensor((rows, forced), dtype=torch.int64, device="cpu"), self._device)
        return RowMasks(rows=numbers[0], forbidden=send(torch.stack(masks), self._device), forced=numbers[1])


def _position(sequence: SequencePlan) -> int:
    """Return the position of the token before the first one that a sequence samples."""
    return sequence.end - 1 - sequence.drafts


def _needs_of(state: SequenceState, vocab_size: int) -> Needs:
    params, num_logprobs = state.params, state.num_logprobs
    drawn, ranked = not params.greedy_sampling, 0 < params.top_k < vocab_size
    processed = num_logprobs >= 0 and params.logprobs_mode == "processed"
    wanted = {
        Needs.EDITS: state.penalised or _has_edits(state) or state.forbids_stops,
        Needs.DRAWS: drawn and not ranked,
        Needs.NUCLEI: drawn and not ranked and params.top_p < 1,
        Needs.BEST: drawn and ranked and params.top_k <= BEST,
        Needs.SEARCHES: drawn and (params.top_k > BEST if ranked else params.top_p < 1 and processed),
        Needs.SCORES: num_logprobs >= 0,
        Needs.LISTS: 0 < num_logprobs <= BEST,
    }
    needs = NOTHING
    for need, is_wanted in wanted.items():
        needs = needs | need if is_wanted else needs
    return needs


def _has_edits(state: SequenceState) -> bool:
    return state.restricted or bool(state.params.logit_bias) or state.host_rules or state.replay is not None


def _default_line() -> list[float]:
    line = [0.0] * NUM_COLUMNS
    line[Column.TOP_P] = line[Column.REPETITION] = 1.0
    line[Column.LOG_MIN_P], line[Column.NUM_LOGPROBS] = -math.inf, -1.0
    return line


def _line_of(state: SequenceState, vocab_size: int, device: torch.device) -> Line:
    """Return a sequence's line of the table."""
    params, line, held = state.params, _default_line(), list[Tensor]()

    def hold(x: Tensor) -> int:
        """Keep a tensor as long as the line; return its address, which a float64 holds exactly."""
        held.append(x)
        assert x.data_ptr() < 1 << 53
        return x.data_ptr()

    line[Column.STREAM], line[Column.STREAM + 1] = state.stream
    if not params.greedy_sampling:
        line[Column.TEMPERATURE] = _clamp(params.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE)
        line[Column.LOG_MIN_P] = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if _has_edits(state):
        line[Column.EDITS] = hold(_edits(state, vocab_size, device))
    drafting = list(line)
    if not params.greedy_sampling:
        line[Column.TOP_K] = params.top_k if 0 < params.top_k < vocab_size else 0
        line[Column.TOP_P] = params.top_p
    line[Column.NUM_LOGPROBS] = state.num_logprobs if state.num_logprobs <= BEST else 0
    line[Column.PROCESSED] = params.logprobs_mode == "processed"
    occurrences = None
    if state.penalised:
        line[Column.REPETITION] = _clamp(params.repetition_penalty, _MIN_REPETITION, _MAX_REPETITION)
        line[Column.FREQUENCY], line[Column.PRESENCE] = params.frequency_penalty, params.presence_penalty
        occurrences = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        prompt = send(torch.tensor(state.prompt, dtype=torch.int64, device="cpu"), device)
        line[Column.OCCURRENCES] = hold(occurrences.index_fill_(0, prompt, _IN_PROMPT))
    if state.forbids_stops:
        line[Column.STOPS] = hold(send(torch.tensor(state.stop_ids, dtype=torch.int32, device="cpu"), device))
        line[Column.NUM_STOPS], line[Column.STOPS_FROM] = len(state.stop_ids), state.stops_from
    # A value that is not a float fails here, where it fails only the request.
    return Line([float(x) for x in line], [float(x) for x in drafting], tuple(held), occurrences)


def _edits(state: SequenceState, vocab_size: int, device: torch.device) -> Tensor:
    """Return the values to add to the logits of a sequence, float32 [V]: bias, and -inf for tokens that it may never sample."""
    edits = torch.zeros(vocab_size, dtype=torch.float32, device=device)
    bias = state.params.logit_bias or {}
    if bias:
        values = torch.tensor([_clamp(x, -_MAX_BIAS, _MAX_BIAS) for x in bias.values()], dtype=torch.float32, device="cpu")
        token_ids = torch.tensor(list(bias), dtype=torch.int64, device="cpu")
        edits.index_copy_(0, send(token_ids, device), send(values, device))
    return edits.masked_fill_(send(state.always_forbidden(vocab_size), device), -math.inf) if state.restricted else edits


def _clamp(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
