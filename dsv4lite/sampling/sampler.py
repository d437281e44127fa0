"""The sampler: what each sequence asked for, stacked into tensors, and one token per row.

The order in which a row's logits are processed:

    1. penalties      repetition (prompt and output), then frequency and presence (output)
    2. logit bias
    3. masks          allowed ids, bad words, end-of-sequence and stop ids before ``min_tokens``, grammar, thinking budget
    4. temperature    of sampled rows; greedy rows take the best token here
    5. min_p, top_k, top_p, each on what the one before has left

``logprobs_mode="raw"`` is the distribution before 1, ``"processed"`` the one after 5; for a greedy row that is after 3. ``score``
runs the same stages for tokens that are given.

Some of this state lives on the device and follows the sampled ids without the host (output counts), so that a step can run before
the host knows the previous token. The rest needs the token on the host (``accept``): grammars, bad words of several tokens, and a
thinking budget about to run out. ``needs_host`` names the sequences that must wait for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4lite.errors import RequestFailedError
from dsv4lite.kernels import sampling
from dsv4lite.request import Request, SamplingParams
from dsv4lite.sampling.runs import Runs
from dsv4lite.sampling.samples import Download, Samples
from dsv4lite.sampling.stack import Draws, Scores, Stack, Stacker
from dsv4lite.sampling.state import Occurrences, SequenceState, Thinking, failed, random_stream, send
from dsv4lite.scheduling.step_plan import UNKNOWN

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from dsv4lite.text.structured import GrammarCompiler, StructuredOutputs

PREPARED_GRAMMARS = 64
"""Grammars that are compiled for sequences to come, the latest ones."""


def state_of(request: Request, index: int, default_seed: int) -> SequenceState:
    """Return what is kept of one of a request's sequences before its first token: nothing on the device, and no grammar."""
    if not request.generate:  # the tokens that are scored count as output
        request = replace(request, prompt_token_ids=request.prompt_token_ids[: request.score_from])
    params, prompt = request.params, request.prompt_token_ids
    stop_ids = {*params.stop_token_ids, *(() if request.eos_token_id is None else (request.eos_token_id,))}
    bad_words = tuple(word for word in params.bad_words_ids if len(word) > 1)
    look_back = max((len(word) - 1 for word in bad_words), default=0)
    return SequenceState(
        params=params,
        stream=random_stream(params.seed, index, default_seed=default_seed, request_id=request.request_id),
        stop_ids=tuple(sorted(stop_ids)),
        stops_from=len(prompt) + params.min_tokens,
        prompt=prompt,
        penalised=params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0,
        bad_words=bad_words,
        tail=prompt[max(0, len(prompt) - look_back) :],
        thinking=Thinking.of(request),
    )


def rehearse(request: Request, vocab_size: int) -> None:
    """Turn a request's settings into tensors as its steps will, on the CPU.

    What cannot be done fails here, where only the request knows of it, and not in a step that it shares with others.
    """
    state = state_of(request, 0, 0)
    if state.restricted:
        state.forbidden = state.never(vocab_size)
    if state.penalised:
        state.count_row = 0
    stack = Stacker([state], vocab_size, torch.device("cpu")).stack((0,))
    for entries in (stack.bias, stack.stops):
        if entries is not None:
            torch.empty(vocab_size, dtype=torch.bool, device="cpu")[
                entries.token_ids
            ]  # an id too large would end the process that has the device


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _put(x: Tensor, rows: Tensor | None, values: Tensor) -> Tensor:
    """Return ``x`` with some rows replaced; ``x`` stays as it is."""
    return values if rows is None else x.index_copy(0, rows, values)


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
        self._sequences: dict[int, SequenceState] = {}
        self._prepared: deque[Future[LLMatcher]] = deque(maxlen=PREPARED_GRAMMARS)
        self._occurrences = Occurrences(vocab_size, self._device)
        self._stack: Stack | None = None
        self._draft_stack: Stack | None = None
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

        What turns out to be wrong with it fails its first token.
        """
        assert seq_id not in self._sequences
        try:
            state, grammar = state_of(request, index, self._default_seed), request.params.structured_outputs
            if grammar is not None:
                assert self._grammars is not None and not isinstance(grammar, Mapping)
                state.compiled = self._grammars.begin(grammar)
        except Exception as error:  # the leader has looked at it before; whatever this rank makes of it is no reason to end
            state = state_of(replace(request, params=SamplingParams()), index, self._default_seed)
            state.failure = failed(error)
        self._sequences[seq_id] = state

    def prepare(self, grammar: StructuredOutputs) -> None:
        """Begin to compile a grammar of which a sequence will have need."""
        if self._grammars is not None:
            self._prepared.append(self._grammars.begin(grammar))

    def _start(self, sequence: SequenceState) -> None:
        """Take what a sequence is sampled with, which it does not have while it waits for its first token."""
        if sequence.penalised and sequence.count_row is None:
            sequence.count_row = self._occurrences.take(sequence.prompt)
        if sequence.restricted and sequence.forbidden is None:
            sequence.forbidden = send(sequence.never(self._vocab_size), self._device)
        if sequence.compiled is not None and sequence.matcher is None and sequence.failure is None:
            assert self._grammars is not None
            try:
                sequence.matcher = self._grammars.matcher(sequence.compiled)
            except Exception as error:
                sequence.failure = failed(error)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence and everything kept for it; unknown ones are ignored."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is None:
            return
        if sequence.count_row is not None:
            self._occurrences.give_back(sequence.count_row)
        if self._stack is not None and seq_id in self._stack.seq_ids:
            self._stack = None
        if self._draft_stack is not None and seq_id in self._draft_stack.seq_ids:
            self._draft_stack = None

    def state_of(self, seq_id: int) -> SequenceState:
        """Return what is kept of a sequence."""
        return self._sequences[seq_id]

    def needs_host(self, seq_id: int) -> bool:
        """Whether the sequence's next step has to wait until ``accept`` was called with the token now in flight."""
        sequence = self._sequences[seq_id]
        if sequence.compiled is not None or sequence.bad_words:
            return True
        return sequence.thinking is not None and sequence.thinking.may_exhaust_next

    def accept(self, seq_id: int, token_id: int) -> None:
        """Tell a sequence the token that was sampled for it, in order, when the host knows it.

        A sequence that ended while its last step was still under way is unknown by then, and ignored.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is not None and sequence.hosted:
            sequence.accept(token_id)

    def draft(self, logits: Tensor, seq_ids: Sequence[int], positions: Tensor) -> Tensor:
        """Guess one token per row: the best one, or where the request draws, the one that its own draw at that place would take.

        The noise is that of the draw which the guess has to equal, so that the two agree as often as their distributions do. Only
        settings that are the same for every token count, and neither ``top_k`` nor ``top_p``, which would have to sort.

        Args:
            logits: float32 [S, V], of a drafter.
            seq_ids: Of the rows, each at most once.
            positions: int32 [S], index of the guessed token within prompt and output.

        Returns:
            int64 [S].
        """
        if self._draft_stack is None or self._draft_stack.seq_ids != tuple(seq_ids):
            self._draft_stack = self._stack_of(tuple(seq_ids))
        stack = self._draft_stack
        edited = self._edit_always(logits, stack)
        top, token_ids, _ = sampling.argmax_finite(edited)
        if stack.draws is not None:
            draws = replace(stack.draws, cuts=())
            scaled = self._truncate(_take(edited, draws.rows), _take(top, draws.rows), draws)
            drawn = sampling.draw(scaled, draws.streams, _take(positions, draws.rows))
            token_ids = _put(token_ids, draws.rows, drawn)
        return token_ids

    def takes_best(self, seq_ids: Sequence[int]) -> bool:
        """Whether each of these sequences just takes its best token, and nothing else is wanted or kept."""
        stack = self._stacked(tuple(seq_ids))
        settings = (stack.penalties, stack.bias, stack.forbidden, stack.stops, stack.draws, stack.scores)
        return not stack.hosted and all(setting is None for setting in settings)

    def sample(
        self, logits: Tensor, seq_ids: Sequence[int], positions: Sequence[int], drafts: Sequence[int] | None = None
    ) -> Samples:
        """Sample one token per row, and count those that count.

        A sequence may have several rows, one behind the other: each is sampled as if the drafts before it were the sequence's
        tokens, with the draw of its own position. It counts if they turn out to be.

        Args:
            logits: float32 [R, V], not modified.
            seq_ids: Of the R rows.
            positions: Index of the token that is sampled within prompt and output, of each row.
            drafts: Guess of the token that each row samples, which the sequence's next row takes for granted; ``UNKNOWN`` at its
                last. By default every sequence has one row.

        Returns:
            The samples; their copy to the host is already under way.
        """
        stack, runs = self._stacked(tuple(seq_ids)), Runs.of(seq_ids, drafts)
        edited = self._edit(logits, stack, runs, positions)
        edited, failures = self._constrain(edited, stack.hosted, runs, positions)
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
            place = (penalties.count_rows, _take(token_ids, penalties.rows))
            if runs.single:
                self._occurrences.output_counts[place] += 1
            else:
                counted = _take(runs.counting(token_ids), penalties.rows).int()
                self._occurrences.output_counts.index_put_(place, counted, accumulate=True)
        logprobs, ranks, top_ids, top_values = self._score(stack.scores, logits, processed, token_ids)
        return Samples(
            runs=runs,
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
            download=Download((token_ids, finite, feasible, ranks, top_ids.flatten()), (logprobs, top_values.flatten())),
        )

    def score(self, logits: Tensor, seq_id: int, position: int, token_ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Score given tokens by the distributions that ``sample`` would have drawn them from; they count as the sequence's output.

        Args:
            logits: float32 [T, V], not modified.
            seq_id: Of the sequence.
            position: Index of the first token within prompt and output.
            token_ids: T tokens, the ones after those that were scored before.

        Returns:
            What ``sampling.token_logprobs`` returns, with as many best tokens as the request wants.
        """
        rows, sequence = len(token_ids), self._sequences[seq_id]
        stack = self._stack_of((seq_id,) * rows)
        runs, positions = Runs.of(stack.seq_ids, (*token_ids[:-1], UNKNOWN)), range(position, position + rows)
        processed, _ = self._constrain(self._edit(logits, stack, runs, positions), stack.hosted, runs, positions)
        if stack.draws is not None:
            processed = self._truncate(processed, sampling.argmax_finite(processed)[0], stack.draws)
        given = send(torch.tensor(token_ids, dtype=torch.int64, device="cpu"), self._device)
        if stack.penalties is not None:
            place = (stack.penalties.count_rows, given)
            self._occurrences.output_counts.index_put_(place, torch.ones_like(given, dtype=torch.int32), accumulate=True)
        for token_id in token_ids:
            self.accept(seq_id, token_id)
        return sampling.token_logprobs(processed, given, min(sequence.params.logprobs or 0, self._vocab_size))

    def _stacked(self, seq_ids: tuple[int, ...]) -> Stack:
        """Stack the settings of a batch, or return the last stack while the same sequences run on."""
        if self._stack is None or self._stack.seq_ids != seq_ids:
            self._stack = self._stack_of(seq_ids)
        return self._stack

    def _stack_of(self, seq_ids: tuple[int, ...]) -> Stack:
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        for sequence in sequences:
            self._start(sequence)
        return Stacker(sequences, self._vocab_size, self._device).stack(seq_ids)

    def _places(self, positions: Sequence[int]) -> Tensor:
        return torch.tensor(positions, dtype=torch.int32, device=self._device)

    def _edit(self, logits: Tensor, stack: Stack, runs: Runs, positions: Sequence[int]) -> Tensor:
        """Apply penalties, bias and masks that need no host; returns ``logits`` itself where there is nothing to do."""
        edited = logits
        if stack.penalties is not None:
            penalties = stack.penalties
            penalised = sampling.penalize(
                _take(logits, penalties.rows),
                self._occurrences.in_prompt[penalties.count_rows],
                self._counts(stack, runs),
                repetition=penalties.repetition,
                frequency=penalties.frequency,
                presence=penalties.presence,
            )
            edited = _put(edited, penalties.rows, penalised)
        edited = self._edit_always(edited, stack)
        if stack.stops is not None and any(positions[row] < start for row, start in stack.stops_from):
            stops = stack.stops
            held = self._places(positions)[stops.rows] < stops.values
            edited = edited.index_put(
                (stops.rows, stops.token_ids), torch.where(held, -math.inf, edited[stops.rows, stops.token_ids])
            )
        return edited

    @staticmethod
    def _edit_always(edited: Tensor, stack: Stack) -> Tensor:
        """Apply what is the same for all tokens of a sequence: bias, allowed ids, bad words of one token."""
        if stack.bias is not None:
            bias = stack.bias
            edited = edited.index_put((bias.rows, bias.token_ids), bias.values, accumulate=True)
        if stack.forbidden is not None:
            rows, mask = stack.forbidden
            edited = _put(edited, rows, _take(edited, rows).masked_fill(mask, -math.inf))
        return edited

    def _counts(self, stack: Stack, runs: Runs) -> Tensor:
        """Return how often each penalised row's output has each token, drafts that the row takes for granted included."""
        assert stack.penalties is not None
        counts = self._occurrences.output_counts[stack.penalties.count_rows]
        if not runs.single:
            index = {row: i for i, row in enumerate(stack.penalties.members)}
            given = [(index[row], token_id) for row, token_id in runs.given() if row in index]
            if given:
                rows, token_ids = torch.tensor(given, dtype=torch.int64, device=self._device).unbind(dim=1)
                counts.index_put_((rows, token_ids), torch.ones_like(rows, dtype=counts.dtype), accumulate=True)
        return counts

    def _constrain(
        self, edited: Tensor, hosted: Sequence[tuple[int, SequenceState]], runs: Runs, positions: Sequence[int]
    ) -> tuple[Tensor, dict[int, RequestFailedError]]:
        """Apply what the host knows: grammars, bad words and thinking budgets. A grammar that gives up fails its own row only.

        Along drafts a copy of the sequence's state looks ahead, up to the first draft that may not be.
        """
        forced: list[tuple[int, int]] = []
        forbidden: list[tuple[int, Tensor]] = []
        failures: dict[int, RequestFailedError] = {}
        state: SequenceState | None = None
        for row, sequence in hosted:
            draft, follows = runs.drafts[row], row > 0 and runs.drafts[row - 1] != UNKNOWN
            if not follows:
                state = sequence if draft == UNKNOWN else sequence.fork()
            if state is None:  # a draft before this row may not be
                continue
            token_id, mask, error = self._next_of(state, positions[row])
            if token_id is not None:
                forced.append((row, token_id))
            if mask is not None:
                forbidden.append((row, mask))
            if error is not None:
                failures[row] = error
            if draft != UNKNOWN:
                possible = error is None and token_id in (None, draft) and (mask is None or not mask[draft])
                if possible:
                    state.accept(draft)
                else:
                    state = None
        if forbidden:
            rows = torch.tensor([row for row, _ in forbidden], dtype=torch.int64, device=self._device)
            masks = torch.stack([mask for _, mask in forbidden]).to(self._device, non_blocking=True)
            edited = _put(edited, rows, edited.index_select(0, rows).masked_fill(masks, -math.inf))
        if forced:  # whatever else forbids the token
            rows, token_ids = torch.tensor(forced, dtype=torch.int64, device=self._device).unbind(dim=1)
            edited = edited.index_fill(0, rows, -math.inf).index_put((rows, token_ids), edited.new_zeros(()))
        return edited, failures

    def _next_of(self, state: SequenceState, position: int) -> tuple[int | None, Tensor | None, RequestFailedError | None]:
        """Return the only token that may come next, or those that may not, or why the grammar gave up."""
        token_id = state.forced_token()
        if token_id is not None:
            return token_id, None, None
        try:
            return None, state.forbidden_next(position, self._vocab_size), None
        except Exception as error:
            return None, None, failed(error)

    @staticmethod
    def _truncate(logits: Tensor, top: Tensor, draws: Draws) -> Tensor:
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

    def _score(self, scores: Scores | None, logits: Tensor, processed: Tensor, token_ids: Tensor) -> tuple[Tensor, ...]:
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
