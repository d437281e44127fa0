"""What sequences asked for, by slot and on the device, so that a recorded step samples without the host.

A line of the table is written when a sequence takes a slot. What a line cannot hold stays with the ``Sampler``: grammars, bad words
of several tokens, thinking budgets, and longer lists of log-probabilities. Which of the two samples for a sequence depends on its
request alone, so its tokens do not depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.kernels.sampling.rows import BEST, NOTHING, NUM_COLUMNS, Column, Needs
from dsv4lite.sampling.stack import clamp_bias, clamp_repetition, clamp_temperature
from dsv4lite.sampling.state import SequenceState, send
from dsv4lite.scheduling.step_plan import SequencePlan

_IN_PROMPT = -(1 << 31)


@dataclass(slots=True, eq=False)
class _Settings:
    """One sequence's line, and what its addresses lead to; made when it first takes a slot."""

    state: SequenceState
    needs: Needs
    num_logprobs: int
    elsewhere: bool
    line: list[float] | None = None
    held: tuple[Tensor, ...] = ()
    occurrences: Tensor | None = None


class SlotTable:
    """The settings of all slots; mutable, owned by the engine's thread.

    Attributes:
        settings: float64 [S + 1, NUM_COLUMNS]; the last line is that of padding.
        drafting: Likewise, what guesses of each slot's tokens go by: settings that are the same for every token, but ``top_k`` and
            ``top_p``, which would have to rank. Sequences that are sampled elsewhere are guessed from here, too.

    Args:
        slots: S.
        vocab_size: V.
        device: Of the table.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._sequences: dict[int, _Settings] = {}
        self._seated: dict[int, int] = {}
        neutral = torch.tensor(self._neutral(), dtype=torch.float64, device=device)
        self.settings = neutral.repeat(slots + 1, 1)  # the last line is that of padding
        self.drafting = self.settings.clone()

    def holds(self, state: SequenceState) -> bool:
        """Whether a line can hold what a sequence asked for."""
        return not state.hosted and min(state.params.logprobs or 0, self._vocab_size) <= BEST

    def add(self, seq_id: int, state: SequenceState) -> None:
        """Take in a sequence before its first token; one whose settings no line can hold is sampled elsewhere."""
        if not self.holds(state):
            self._sequences[seq_id] = _Settings(state, NOTHING, -1, elsewhere=True)
            return
        params = state.params
        drawn, ranked = not params.greedy_sampling, 0 < params.top_k < self._vocab_size
        num_logprobs = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        processed = num_logprobs >= 0 and params.logprobs_mode == "processed"
        edited = state.penalised or state.restricted or bool(params.logit_bias) or _holds_back(state)
        wanted = {
            Needs.EDITS: edited,
            Needs.DRAWS: drawn and not ranked,
            Needs.NUCLEI: drawn and not ranked and params.top_p < 1,
            Needs.BEST: drawn and ranked and params.top_k <= BEST,
            Needs.SEARCHES: drawn and (params.top_k > BEST if ranked else params.top_p < 1 and processed),
            Needs.SCORES: num_logprobs >= 0,
            Needs.LISTS: num_logprobs > 0,
        }
        needs = NOTHING
        for need, is_wanted in wanted.items():
            needs = needs | need if is_wanted else needs
        self._sequences[seq_id] = _Settings(state, needs, num_logprobs, elsewhere=False)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._sequences.pop(seq_id, None)

    def num_logprobs(self, seq_id: int) -> int:
        """Best tokens to list beside the sampled one's log-probability; -1 for no log-probability, 0 for that alone."""
        settings = self._sequences.get(seq_id)
        return -1 if settings is None else settings.num_logprobs

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence is sampled from this table."""
        settings = self._sequences.get(seq_id)
        return settings is not None and not settings.elsewhere

    def needs(self, seq_ids: Sequence[int]) -> Needs:
        """Return what a batch of sequences needs; those that are sampled elsewhere need nothing."""
        needs = NOTHING
        for seq_id in seq_ids:
            settings = self._sequences.get(seq_id)
            needs = needs if settings is None else needs | settings.needs
        return needs

    def count(self, seq_id: int, token_ids: Tensor) -> None:
        """Count tokens, int32 [T], that a seated sequence was given; those that it samples are counted where they are sampled."""
        counts = self._sequences[seq_id].occurrences
        if counts is not None:
            counts.index_add_(0, token_ids, torch.ones_like(token_ids))

    def seat(self, sequences: Sequence[SequencePlan]) -> None:
        """Write the lines of those sequences of the next step that were not where they are now."""
        new = [(s.slot, s.seq_id) for s in sequences if self._seated.get(s.slot) != s.seq_id]
        if not new:
            return
        self._seated.update(new)
        lines = torch.tensor(
            [[slot, *self._line(seq_id), *self._drafting_line(seq_id)] for slot, seq_id in new], dtype=torch.float64, device="cpu"
        )
        lines = send(lines, self._device)
        slots, settings, drafting = lines.split([1, NUM_COLUMNS, NUM_COLUMNS], dim=1)
        self.settings[slots[:, 0].long()] = settings
        self.drafting[slots[:, 0].long()] = drafting

    @staticmethod
    def _neutral() -> list[float]:
        line = [0.0] * NUM_COLUMNS
        line[Column.TOP_P] = line[Column.REPETITION] = 1.0
        line[Column.LOG_MIN_P], line[Column.NUM_LOGPROBS] = -math.inf, -1.0
        return line

    def _line(self, seq_id: int) -> list[float]:
        settings = self._sequences.get(seq_id)
        if settings is None or settings.elsewhere:
            return self._neutral()
        if settings.line is None:
            settings.line = self._write(settings)
        return settings.line

    def _drafting_line(self, seq_id: int) -> list[float]:
        settings = self._sequences.get(seq_id)
        if settings is None:
            return self._neutral()
        line = self._drawing(settings.state)
        line[Column.EDITS] = 0.0 if settings.line is None else settings.line[Column.EDITS]
        return line

    def _drawing(self, state: SequenceState) -> list[float]:
        line, params = self._neutral(), state.params
        if not params.greedy_sampling:
            line[Column.TEMPERATURE] = clamp_temperature(params.temperature)
            line[Column.LOG_MIN_P] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        line[Column.STREAM], line[Column.STREAM + 1] = state.stream
        return line

    def _write(self, settings: _Settings) -> list[float]:
        state, params, line = settings.state, settings.state.params, self._drawing(settings.state)
        if not params.greedy_sampling:
            line[Column.TOP_K] = params.top_k if 0 < params.top_k < self._vocab_size else 0
            line[Column.TOP_P] = params.top_p
        line[Column.NUM_LOGPROBS] = settings.num_logprobs
        line[Column.PROCESSED] = params.logprobs_mode == "processed"
        if state.penalised:
            line[Column.REPETITION] = clamp_repetition(params.repetition_penalty)
            line[Column.FREQUENCY], line[Column.PRESENCE] = params.frequency_penalty, params.presence_penalty
            settings.occurrences = self._occurrences(state)
            line[Column.OCCURRENCES] = self._hold(settings, settings.occurrences)
        if state.restricted or params.logit_bias:
            line[Column.EDITS] = self._hold(settings, self._edits(state))
        if _holds_back(state):
            line[Column.STOPS] = self._hold(
                settings, send(torch.tensor(state.stop_ids, dtype=torch.int32, device="cpu"), self._device)
            )
            line[Column.NUM_STOPS], line[Column.STOPS_FROM] = len(state.stop_ids), state.stops_from
        return line

    @staticmethod
    def _hold(settings: _Settings, x: Tensor) -> int:
        """Keep a tensor as long as the sequence; return its address, which a float64 holds exactly."""
        settings.held = (*settings.held, x)
        assert x.data_ptr() < 1 << 53
        return x.data_ptr()

    def _occurrences(self, state: SequenceState) -> Tensor:
        counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        prompt = send(torch.tensor(state.prompt, dtype=torch.int64, device="cpu"), self._device)
        return counts.index_fill_(0, prompt, _IN_PROMPT)

    def _edits(self, state: SequenceState) -> Tensor:
        edits = torch.zeros(self._vocab_size, dtype=torch.float32, device=self._device)
        bias = state.params.logit_bias or {}
        if bias:
            values = torch.tensor([clamp_bias(value) for value in bias.values()], dtype=torch.float32, device="cpu")
            token_ids = torch.tensor(list(bias), dtype=torch.int64, device="cpu")
            edits.index_copy_(0, send(token_ids, self._device), send(values, self._device))
        return edits.masked_fill_(send(state.never(self._vocab_size), self._device), -math.inf) if state.restricted else edits


def _holds_back(state: SequenceState) -> bool:
    return bool(state.params.min_tokens and state.stop_ids)
