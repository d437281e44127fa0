"""The sampler: what each sequence asked for, stacked into tensors, and one token per row.

The order in which a row's logits are processed:

    1. penalties      repetition (prompt and output), then frequency and presence (output)
    2. logit bias
    3. masks          allowed ids, bad words, end-of-sequence and stop ids before ``min_tokens``, grammar, thinking budget
    4. temperature    of sampled rows; greedy rows take the best token here
    5. min_p, top_k, top_p, each on what the one before has left

``logprobs_mode="raw"`` is the distribution before 1, ``"processed"`` the one after 5; for a greedy row that is after 3.

Some of this state lives on the device and follows the sampled ids without the host (output counts), so that a step can run before
the host knows the previous token. The rest needs the token on the host (``accept``): grammars, bad words of several tokens, and a
thinking budget about to run out. ``needs_host`` names the sequences that must wait for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4lite.engine.step import Sampled
from dsv4lite.errors import RequestFailedError
from dsv4lite.kernels import sampling
from dsv4lite.request import LogprobsMode, Request, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from dsv4lite.text.structured import GrammarCompiler, GrammarMatcher

# What float32 can divide by and add up without leaving its range.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1.2e-38, 3.4e38
_MIN_REPETITION, _MAX_REPETITION = 1e-30, 1e30
_MAX_BIAS = 1e30


def random_stream(seed: int | None, index: int, *, default_seed: int, request_id: str) -> tuple[int, int]:
    """Name the random stream of one sequence.

    Args:
        seed: The request's own; without one the stream follows from ``default_seed`` and ``request_id``.
        index: Which of the request's ``n`` sequences.

    Returns:
        Two int32.
    """
    name = f"seed {seed} {index}" if seed is not None else f"request {default_seed} {index} {request_id}"
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


@dataclass(slots=True, kw_only=True)
class _Thinking:
    """Where a sequence stands between ``<think>`` and ``</think>``; one of the mutable classes."""

    opening: int
    closing: int
    budget: int | None
    inside: bool
    spent: int = 0

    @classmethod
    def of(cls, request: Request) -> _Thinking | None:
        """Follow the thinking of a request, if its vocabulary has it and a setting depends on it."""
        params = request.params
        if request.think_ids is None or (params.thinking_budget is None and params.structured_outputs is None):
            return None
        opening, closing = request.think_ids
        last_tag = next((t for t in reversed(request.prompt_token_ids) if t in (opening, closing)), closing)
        return cls(opening=opening, closing=closing, budget=params.thinking_budget, inside=last_tag == opening)

    def accept(self, token_id: int) -> bool:
        """Follow one token; return whether it belongs to the thinking, tags included."""
        was_inside = self.inside
        if not was_inside:
            self.inside = token_id == self.opening
        elif token_id == self.closing:
            self.inside = False
        else:
            self.spent += 1
        return was_inside or self.inside

    @property
    def exhausted(self) -> bool:
        return self.budget is not None and self.spent >= self.budget

    @property
    def may_exhaust_next(self) -> bool:
        """Whether the next token can be the last of the budget."""
        return self.inside and self.budget is not None and self.spent + 1 >= self.budget


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """What the sampler keeps of one sequence; one of the mutable classes.

    Attributes:
        stream: Name of its random stream.
        forbidden: bool [V], tokens it may never sample, or ``None``.
        stop_ids: Tokens it may not sample before position ``stops_from``.
        count_row: Its row of ``_Occurrences``, ``None`` without penalties.
        bad_words: Those of at least two tokens.
        tail: The last tokens of prompt and output, as many as the longest bad word looks back.
        failure: Why the grammar gave up.
    """

    params: SamplingParams
    stream: tuple[int, int]
    forbidden: Tensor | None
    stop_ids: tuple[int, ...]
    stops_from: int
    count_row: int | None
    bad_words: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]
    matcher: GrammarMatcher | None
    thinking: _Thinking | None
    failure: RequestFailedError | None = None

    @property
    def hosted(self) -> bool:
        """Whether the host decides at every step what may come next."""
        return self.matcher is not None or self.thinking is not None or bool(self.bad_words)

    def accept(self, token_id: int) -> None:
        if self.bad_words:
            length = max(map(len, self.bad_words)) - 1
            self.tail = (*self.tail, token_id)[-length:]
        if self.thinking is not None and self.thinking.accept(token_id):
            return  # the grammar is for what is said, not for what is thought
        if self.matcher is not None and self.failure is None and not self.matcher.is_terminated():
            try:
                self.matcher.accept(token_id)
            except RequestFailedError as error:
                self.failure = error

    def forced_token(self) -> int | None:
        """The only token that may come next, if the thinking budget decides it."""
        if self.thinking is not None and self.thinking.inside and self.thinking.exhausted:
            return self.thinking.closing
        return None

    def forbidden_next(self, position: int, vocab_size: int) -> Tensor | None:
        """Tokens that ``min_tokens``, grammar, bad words or used up thinking rule out now, bool [V] on the CPU, or ``None``.

        Raises:
            RequestFailedError: The grammar gave up.
        """
        if self.failure is not None:
            raise self.failure
        # While a grammar waits for the thinking to end, the text is still to come.
        waiting = self.matcher is not None and self.thinking is not None and self.thinking.inside
        early = self.stop_ids if waiting or position < self.stops_from else ()
        banned = [word[-1] for word in self.bad_words if self.tail[max(0, len(self.tail) - len(word) + 1) :] == word[:-1]]
        if self.thinking is not None and self.thinking.exhausted:
            banned.append(self.thinking.opening)
        if self.matcher is not None and not waiting:
            forbidden = ~self.matcher.mask()
            # Where the grammar has nothing left but the end, the text may stay shorter than min_tokens.
            if early and not bool(_with(forbidden, early).all()):
                banned.extend(early)
        elif early or banned:
            forbidden = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
            banned.extend(early)
        else:
            return None
        return _with(forbidden, banned)


def _with(mask: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Return a mask with some more tokens set."""
    return mask.index_fill(0, torch.tensor(token_ids, dtype=torch.int64, device="cpu"), 1)


class _Occurrences:
    """Which tokens each penalised sequence has in its prompt and how often in its output, one row each; a mutable class."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._free: list[int] = []
        self.clear()

    def clear(self) -> None:
        self._free = []
        self.in_prompt = torch.zeros((0, self._vocab_size), dtype=torch.bool, device=self._device)
        self.output_counts = torch.zeros((0, self._vocab_size), dtype=torch.int32, device=self._device)

    @property
    def num_used(self) -> int:
        return self.output_counts.shape[0] - len(self._free)

    def take(self, prompt_token_ids: Sequence[int]) -> int:
        if not self._free:
            rows = self.output_counts.shape[0]
            more = max(4, rows)
            self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros((more, self._vocab_size))])
            self.output_counts = torch.cat([self.output_counts, self.output_counts.new_zeros((more, self._vocab_size))])
            self._free = list(range(rows + more - 1, rows - 1, -1))
        row = self._free.pop()
        self.in_prompt[row] = False
        self.in_prompt[row, torch.tensor(prompt_token_ids, dtype=torch.int64, device=self._device)] = True
        self.output_counts[row] = 0
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)
        if self.num_used == 0:
            self.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Penalties:
    rows: Tensor | None
    count_rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entries:
    """Single logits to change: row and token id of each, int64 [E], and a value, [E]."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cut:
    """Some of the drawn rows to truncate by rank; ``width=None`` is a nucleus of the whole vocabulary."""

    rows: Tensor | None
    top_k: Tensor
    top_p: Tensor
    width: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Draws:
    """The rows that are drawn, not greedy."""

    rows: Tensor | None
    streams: Tensor
    temperature: Tensor
    log_min_p: Tensor | None
    cuts: tuple[_Cut, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scores:
    """The L rows that want log-probabilities, with the number of best tokens each; ``processed`` is bool [L, 1]."""

    rows: Tensor | None
    wanted: tuple[tuple[int, int], ...]
    processed: Tensor
    modes: frozenset[LogprobsMode]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stack:
    """The settings of a batch as tensors, by stage: ``None`` where no row needs it, ``rows=None`` where every row does."""

    seq_ids: tuple[int, ...]
    penalties: _Penalties | None
    bias: _Entries | None
    forbidden: tuple[Tensor | None, Tensor] | None
    stops: _Entries | None
    stops_from: tuple[tuple[int, int], ...]
    hosted: tuple[tuple[int, _Sequence], ...]
    draws: _Draws | None
    scores: _Scores | None


class _Stacker:
    """Turns the settings of a batch's sequences into a ``_Stack``."""

    def __init__(self, sequences: Sequence[_Sequence], vocab_size: int, device: torch.device) -> None:
        self._sequences = sequences
        self._vocab_size = vocab_size
        self._device = device

    def stack(self, seq_ids: tuple[int, ...]) -> _Stack:
        every = list(enumerate(self._sequences))
        stops_from = [(row, s.stops_from) for row, s in every if s.params.min_tokens and s.stop_ids and not s.hosted]
        masks = [(row, s.forbidden) for row, s in every if s.forbidden is not None]
        return _Stack(
            seq_ids=seq_ids,
            penalties=self._penalties([(row, s) for row, s in every if s.count_row is not None]),
            bias=self._entries(
                [(r, t, _clamp(b, -_MAX_BIAS, _MAX_BIAS)) for r, s in every for t, b in (s.params.logit_bias or {}).items()]
            ),
            forbidden=(self._rows([row for row, _ in masks]), torch.stack([mask for _, mask in masks])) if masks else None,
            stops=self._entries([(row, token, start) for row, start in stops_from for token in self._sequences[row].stop_ids]),
            stops_from=tuple(stops_from),
            hosted=tuple((row, s) for row, s in every if s.hosted),
            draws=self._draws([(row, s) for row, s in every if not s.params.greedy_sampling]),
            scores=self._scores([(row, s.params) for row, s in every if s.params.logprobs is not None]),
        )

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device).unsqueeze(-1)

    def _rows(self, rows: Sequence[int], total: int | None = None) -> Tensor | None:
        return None if len(rows) == (len(self._sequences) if total is None else total) else self._integers(rows)

    def _entries(self, entries: Sequence[tuple[int, int, float]]) -> _Entries | None:
        if not entries:
            return None
        rows, token_ids, values = zip(*entries, strict=True)
        return _Entries(rows=self._integers(rows), token_ids=self._integers(token_ids), values=self._column(values).squeeze(-1))

    def _penalties(self, some: Sequence[tuple[int, _Sequence]]) -> _Penalties | None:
        if not some:
            return None
        return _Penalties(
            rows=self._rows([row for row, _ in some]),
            count_rows=self._integers([s.count_row for _, s in some if s.count_row is not None]),
            repetition=self._column([_clamp(s.params.repetition_penalty, _MIN_REPETITION, _MAX_REPETITION) for _, s in some]),
            frequency=self._column([s.params.frequency_penalty for _, s in some]),
            presence=self._column([s.params.presence_penalty for _, s in some]),
        )

    def _draws(self, some: Sequence[tuple[int, _Sequence]]) -> _Draws | None:
        if not some:
            return None
        params = [s.params for _, s in some]
        ranked = [i for i, p in enumerate(params) if 0 < p.top_k < self._vocab_size]
        nuclei = [i for i, p in enumerate(params) if p.top_p < 1 and not 0 < p.top_k < self._vocab_size]
        min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        return _Draws(
            rows=self._rows([row for row, _ in some]),
            streams=torch.tensor([s.stream for _, s in some], dtype=torch.int32, device=self._device),
            temperature=self._column([_clamp(p.temperature, _MIN_TEMPERATURE, _MAX_TEMPERATURE) for p in params]),
            log_min_p=self._column(min_p) if any(p.min_p > 0 for p in params) else None,
            cuts=tuple(
                _Cut(
                    rows=self._rows(rows, total=len(params)),
                    top_k=self._integers([params[i].top_k for i in rows]).unsqueeze(-1),
                    top_p=self._column([params[i].top_p for i in rows], torch.float64),
                    width=width,
                )
                for rows, width in ((ranked, max((params[i].top_k for i in ranked), default=0)), (nuclei, None))
                if rows
            ),
        )

    def _scores(self, some: Sequence[tuple[int, SamplingParams]]) -> _Scores | None:
        if not some:
            return None
        return _Scores(
            rows=self._rows([row for row, _ in some]),
            wanted=tuple((row, min(p.logprobs or 0, self._vocab_size)) for row, p in some),
            processed=self._column([p.logprobs_mode == "processed" for _, p in some], torch.bool),
            modes=frozenset(p.logprobs_mode for _, p in some),
        )


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _put(x: Tensor, rows: Tensor | None, values: Tensor) -> Tensor:
    """Return ``x`` with some rows replaced; ``x`` stays as it is."""
    return values if rows is None else x.index_copy(0, rows, values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """One step's tokens, still on the device, on their way to the host.

    Attributes:
        seq_ids: Of the R rows.
        positions: Of the sampled tokens.
        token_ids: int64 [R]; an arbitrary token of the vocabulary where the row failed.
        finite: bool [R], false where the model's logits are unusable: NaN, +inf, or all -inf.
        feasible: bool [R], false where besides the settings of the request leave no token.
        failures: Rows that failed before, with the reason.
        wanted: Row and number of best tokens of each of the L rows that have log-probabilities.
        logprobs: float32 [L], of the sampled tokens.
        ranks: int32 [L].
        top_ids: int32 [L, K], the best tokens, K the most that any row wants.
        top_values: float32 [L, K].
    """

    seq_ids: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: Tensor
    finite: Tensor
    feasible: Tensor
    failures: Mapping[int, RequestFailedError]
    wanted: tuple[tuple[int, int], ...]
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor
    download: _Download

    def to_host(self) -> dict[int, Sampled]:
        """Wait for the tokens; a row that failed has an ``error`` in its place."""
        integers, floats = self.download.wait()
        num_rows, num_scores = len(self.seq_ids), len(self.wanted)
        token_ids, finite, feasible = integers[: 3 * num_rows].view(3, num_rows).tolist()
        ranks = integers[3 * num_rows : 3 * num_rows + num_scores].tolist()
        top_ids = integers[3 * num_rows + num_scores :].to(torch.int32).view(num_scores, self.top_ids.shape[1])
        logprobs = floats[:num_scores].tolist()
        top_values = floats[num_scores:].view(num_scores, self.top_values.shape[1])
        scored = {
            row: TokenLogprob(logprob=logprobs[i], rank=ranks[i], token_ids=top_ids[i, :k], values=top_values[i, :k])
            for i, (row, k) in enumerate(self.wanted)
        }
        results = {}
        for row, seq_id in enumerate(self.seq_ids):
            error = self._failure(row, finite=bool(finite[row]), feasible=bool(feasible[row]))
            logprob = scored.get(row) if error is None else None
            results[seq_id] = Sampled(token_id=token_ids[row], logprob=logprob, error=error)
        return results

    def _failure(self, row: int, *, finite: bool, feasible: bool) -> RequestFailedError | None:
        place = f"at position {self.positions[row]}"
        if not finite:
            return RequestFailedError(
                f"the model's logits {place} are NaN, infinite or all -inf, so no token can be sampled; other requests are"
                " unaffected. If it repeats, check the weights"
            )
        if not feasible:
            return RequestFailedError(
                f"no token may follow {place}: allowed_token_ids, bad_words_ids, min_tokens, logit_bias and structured_outputs"
                " together leave none; relax one of them"
            )
        return self.failures.get(row)


class _Download:
    """Device tensors on their way to the host in one copy, which runs while the host goes on.

    What ``wait`` returns for users to keep, top ids and floats, has left the pinned buffer by its conversion to 32 bits.
    """

    def __init__(self, integers: Sequence[Tensor], floats: Sequence[Tensor]) -> None:
        packed = torch.cat([*integers, *(x.view(torch.int32) for x in floats)])
        self._num_integers = sum(map(len, integers))
        self._arrived: torch.cuda.Event | None = None
        self._packed = packed
        if packed.device.type == "cuda":
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.current_stream(packed.device).record_event()

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the integers (int64) and the floats (float32), each in one row."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._packed[: self._num_integers], self._packed[self._num_integers :].to(torch.int32).view(torch.float32)


class Sampler:
    """Samples the next token of every sequence of a step; mutable, owned by the engine thread.

    A sequence is known from ``add`` to ``remove``, also while it is preempted; its state follows its tokens alone, so it resumes as
    if nothing had happened.

    Args:
        vocab_size: V, at most 2**23.
        device: Where the logits are.
        default_seed: Seed of requests that give none.
        grammars: Compiler for ``structured_outputs``; may be ``None`` if no request uses them.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str, default_seed: int, grammars: GrammarCompiler | None = None
    ) -> None:
        assert 0 < vocab_size <= 2**23
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._default_seed = default_seed
        self._grammars = grammars
        self._sequences: dict[int, _Sequence] = {}
        self._occurrences = _Occurrences(vocab_size, self._device)
        self._stack: _Stack | None = None
        nothing = torch.empty(0, dtype=torch.int32, device=self._device)
        self._no_scores = (nothing.float(), nothing, nothing.view(0, 0), nothing.float().view(0, 0))

    @property
    def num_sequences(self) -> int:
        """Sequences between ``add`` and ``remove``."""
        return len(self._sequences)

    def add(self, seq_id: int, request: Request, index: int) -> None:
        """Take in a sequence before its first token.

        Args:
            seq_id: Not in use.
            request: Already checked against the vocabulary.
            index: Which of the request's ``n`` sequences.

        Raises:
            InvalidRequestError: For ``structured_outputs`` that do not compile.
        """
        assert seq_id not in self._sequences
        params = request.params
        matcher = None
        if params.structured_outputs is not None:
            assert self._grammars is not None and not isinstance(params.structured_outputs, Mapping)
            matcher = self._grammars.compile(params.structured_outputs)
        penalised = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        stop_ids = {*params.stop_token_ids, *(() if request.eos_token_id is None else (request.eos_token_id,))}
        bad_words = tuple(word for word in params.bad_words_ids if len(word) > 1)
        look_back = max((len(word) - 1 for word in bad_words), default=0)
        prompt = request.prompt_token_ids
        self._sequences[seq_id] = _Sequence(
            params=params,
            stream=random_stream(params.seed, index, default_seed=self._default_seed, request_id=request.request_id),
            forbidden=self._forbidden(params),
            stop_ids=tuple(sorted(stop_ids)),
            stops_from=len(prompt) + params.min_tokens,
            count_row=self._occurrences.take(prompt) if penalised else None,
            bad_words=bad_words,
            tail=prompt[max(0, len(prompt) - look_back) :],
            matcher=matcher,
            thinking=_Thinking.of(request),
        )

    def _forbidden(self, params: SamplingParams) -> Tensor | None:
        """Return what never changes: all but the allowed ids, and bad words of one token."""
        single = [word[0] for word in params.bad_words_ids if len(word) == 1]
        if params.allowed_token_ids is None and not single:
            return None
        forbidden = torch.full((self._vocab_size,), params.allowed_token_ids is not None, dtype=torch.bool, device="cpu")
        forbidden[list(params.allowed_token_ids or ())] = False
        forbidden[single] = True
        return forbidden.to(self._device)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence and everything kept for it; unknown ones are ignored."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is None:
            return
        if sequence.count_row is not None:
            self._occurrences.give_back(sequence.count_row)
        if self._stack is not None and seq_id in self._stack.seq_ids:
            self._stack = None

    def needs_host(self, seq_id: int) -> bool:
        """Whether the sequence's next step has to wait until ``accept`` was called with the token now in flight."""
        sequence = self._sequences[seq_id]
        if sequence.matcher is not None or sequence.bad_words:
            return True
        return sequence.thinking is not None and sequence.thinking.may_exhaust_next

    def accept(self, seq_id: int, token_id: int) -> None:
        """Tell a sequence the token that was sampled for it, in order, when the host knows it.

        A sequence that ended while its last step was still under way is unknown by then, and ignored.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is not None and sequence.hosted:
            sequence.accept(token_id)

    def sample(self, logits: Tensor, seq_ids: Sequence[int], positions: Sequence[int]) -> Samples:
        """Sample one token per row, and count it.

        Args:
            logits: float32 [R, V], not modified.
            seq_ids: Of the R rows, each at most once.
            positions: Index of the token that is sampled within prompt and output, of each row.

        Returns:
            The samples; their copy to the host is already under way.
        """
        stack = self._stacked(tuple(seq_ids))
        edited = self._edit(logits, stack, positions)
        edited, failures = self._constrain(edited, stack.hosted, positions)
        top, token_ids, feasible = sampling.argmax_finite(edited)
        finite = feasible if edited is logits else sampling.argmax_finite(logits)[2]
        processed = edited
        if stack.draws is not None:
            draws = stack.draws
            scaled = self._truncate(_take(edited, draws.rows), _take(top, draws.rows), draws)
            drawn = sampling.draw(scaled, draws.streams, _take(self._places(positions), draws.rows))
            token_ids = _put(token_ids, draws.rows, drawn)
            if stack.scores is not None and "processed" in stack.scores.modes:
                processed = _put(edited, draws.rows, scaled)
        if stack.penalties is not None:
            penalties = stack.penalties
            self._occurrences.output_counts[penalties.count_rows, _take(token_ids, penalties.rows)] += 1
        logprobs, ranks, top_ids, top_values = self._score(stack.scores, logits, processed, token_ids)
        return Samples(
            seq_ids=stack.seq_ids,
            positions=tuple(positions),
            token_ids=token_ids,
            finite=finite,
            feasible=feasible,
            failures=failures,
            wanted=() if stack.scores is None else stack.scores.wanted,
            logprobs=logprobs,
            ranks=ranks,
            top_ids=top_ids,
            top_values=top_values,
            download=_Download((token_ids, finite, feasible, ranks, top_ids.flatten()), (logprobs, top_values.flatten())),
        )

    def _stacked(self, seq_ids: tuple[int, ...]) -> _Stack:
        """Stack the settings of a batch, or return the last stack while the same sequences run on."""
        if self._stack is None or self._stack.seq_ids != seq_ids:
            sequences = [self._sequences[seq_id] for seq_id in seq_ids]
            self._stack = _Stacker(sequences, self._vocab_size, self._device).stack(seq_ids)
        return self._stack

    def _places(self, positions: Sequence[int]) -> Tensor:
        return torch.tensor(positions, dtype=torch.int32, device=self._device)

    def _edit(self, logits: Tensor, stack: _Stack, positions: Sequence[int]) -> Tensor:
        """Apply penalties, bias and masks that need no host; returns ``logits`` itself where there is nothing to do."""
        edited = logits
        if stack.penalties is not None:
            penalties = stack.penalties
            penalised = sampling.penalize(
                _take(logits, penalties.rows),
                self._occurrences.in_prompt[penalties.count_rows],
                self._occurrences.output_counts[penalties.count_rows],
                repetition=penalties.repetition,
                frequency=penalties.frequency,
                presence=penalties.presence,
            )
            edited = _put(edited, penalties.rows, penalised)
        if stack.bias is not None:
            bias = stack.bias
            edited = edited.index_put((bias.rows, bias.token_ids), bias.values, accumulate=True)
        if stack.forbidden is not None:
            rows, mask = stack.forbidden
            edited = _put(edited, rows, _take(edited, rows).masked_fill(mask, -math.inf))
        if stack.stops is not None and any(positions[row] < start for row, start in stack.stops_from):
            stops = stack.stops
            held = self._places(positions)[stops.rows] < stops.values
            edited = edited.index_put(
                (stops.rows, stops.token_ids), torch.where(held, -math.inf, edited[stops.rows, stops.token_ids])
            )
        return edited

    def _constrain(
        self, edited: Tensor, hosted: Sequence[tuple[int, _Sequence]], positions: Sequence[int]
    ) -> tuple[Tensor, dict[int, RequestFailedError]]:
        """Apply what the host knows: grammars, bad words and thinking budgets. A grammar that gives up fails its own row only."""
        forced, forbidden, failures = [], [], {}
        for row, sequence in hosted:
            token_id = sequence.forced_token()
            if token_id is not None:
                forced.append((row, token_id))
                continue
            try:
                mask = sequence.forbidden_next(positions[row], self._vocab_size)
            except RequestFailedError as error:
                failures[row] = error
                continue
            if mask is not None:
                forbidden.append((row, mask))
        if forbidden:
            rows = torch.tensor([row for row, _ in forbidden], dtype=torch.int64, device=self._device)
            masks = torch.stack([mask for _, mask in forbidden]).to(self._device, non_blocking=True)
            edited = _put(edited, rows, edited.index_select(0, rows).masked_fill(masks, -math.inf))
        if forced:  # whatever else forbids the token
            rows, token_ids = torch.tensor(forced, dtype=torch.int64, device=self._device).unbind(dim=1)
            edited = edited.index_fill(0, rows, -math.inf).index_put((rows, token_ids), edited.new_zeros(()))
        return edited, failures

    @staticmethod
    def _truncate(logits: Tensor, top: Tensor, draws: _Draws) -> Tensor:
        """Apply temperature, min_p, top_k and top_p to the drawn rows."""
        scaled = sampling.scale(logits, top, draws.temperature)
        if draws.log_min_p is not None:
            scaled = sampling.drop_below(scaled, draws.log_min_p)
        for cut in draws.cuts:
            whole = _take(scaled, cut.rows)
            if cut.width is None:
                kept = sampling.keep_nucleus(whole, cut.top_p)
            else:
                kept = sampling.keep_best(whole, cut.top_k, cut.top_p, width=cut.width)
            scaled = _put(scaled, cut.rows, kept)
        return scaled

    def _score(self, scores: _Scores | None, logits: Tensor, processed: Tensor, token_ids: Tensor) -> tuple[Tensor, ...]:
        """Score the sampled tokens of the rows that want it."""
        if scores is None:
            return self._no_scores
        if scores.modes == {"raw"}:
            distribution = _take(logits, scores.rows)
        elif scores.modes == {"processed"}:
            distribution = _take(processed, scores.rows)
        else:
            distribution = torch.where(scores.processed, _take(processed, scores.rows), _take(logits, scores.rows))
        return sampling.token_logprobs(distribution, _take(token_ids, scores.rows), max(k for _, k in scores.wanted))
