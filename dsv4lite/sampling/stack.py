"""The settings of a batch of sequences as tensors, by the stage of sampling that needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.request import LogprobsMode, SamplingParams
from dsv4lite.sampling.state import SequenceState

# What float32 can divide by and add up without leaving its range.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1.2e-38, 3.4e38
_MIN_REPETITION, _MAX_REPETITION = 1e-30, 1e30
_MAX_BIAS = 1e30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Penalties:
    members: tuple[int, ...]
    rows: Tensor | None
    count_rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """Single logits to change: row and token id of each, int64 [E], and a value, [E]."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """Some of the drawn rows to truncate by rank; ``width=None`` is a nucleus of the whole vocabulary."""

    rows: Tensor | None
    top_k: Tensor
    top_p: Tensor
    width: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """The rows that are drawn, not greedy."""

    rows: Tensor | None
    streams: Tensor
    temperature: Tensor
    log_min_p: Tensor | None
    cuts: tuple[Cut, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """The L rows that want log-probabilities, with the number of best tokens each; ``processed`` is bool [L, 1]."""

    rows: Tensor | None
    wanted: tuple[tuple[int, int], ...]
    processed: Tensor
    modes: frozenset[LogprobsMode]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """The settings of a batch as tensors, by stage: ``None`` where no row needs it, ``rows=None`` where every row does."""

    seq_ids: tuple[int, ...]
    penalties: Penalties | None
    bias: Entries | None
    forbidden: tuple[Tensor | None, Tensor] | None
    stops: Entries | None
    stops_from: tuple[tuple[int, int], ...]
    hosted: tuple[tuple[int, SequenceState], ...]
    draws: Draws | None
    scores: Scores | None


class Stacker:
    """Turns the settings of a batch's sequences into a ``Stack``."""

    def __init__(self, sequences: Sequence[SequenceState], vocab_size: int, device: torch.device) -> None:
        self._sequences = sequences
        self._vocab_size = vocab_size
        self._device = device

    def stack(self, seq_ids: tuple[int, ...]) -> Stack:
        every = list(enumerate(self._sequences))
        stops_from = [(row, s.stops_from) for row, s in every if s.params.min_tokens and s.stop_ids and not s.hosted]
        masks = [(row, s.forbidden) for row, s in every if s.forbidden is not None]
        return Stack(
            seq_ids=seq_ids,
            penalties=self._penalties([(row, s) for row, s in every if s.count_row is not None]),
            bias=self._entries([(r, t, clamp_bias(b)) for r, s in every for t, b in (s.params.logit_bias or {}).items()]),
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

    def _entries(self, entries: Sequence[tuple[int, int, float]]) -> Entries | None:
        if not entries:
            return None
        rows, token_ids, values = zip(*entries, strict=True)
        return Entries(rows=self._integers(rows), token_ids=self._integers(token_ids), values=self._column(values).squeeze(-1))

    def _penalties(self, some: Sequence[tuple[int, SequenceState]]) -> Penalties | None:
        if not some:
            return None
        return Penalties(
            members=tuple(row for row, _ in some),
            rows=self._rows([row for row, _ in some]),
            count_rows=self._integers([s.count_row for _, s in some if s.count_row is not None]),
            repetition=self._column([clamp_repetition(s.params.repetition_penalty) for _, s in some]),
            frequency=self._column([s.params.frequency_penalty for _, s in some]),
            presence=self._column([s.params.presence_penalty for _, s in some]),
        )

    def _draws(self, some: Sequence[tuple[int, SequenceState]]) -> Draws | None:
        if not some:
            return None
        params = [s.params for _, s in some]
        ranked = [i for i, p in enumerate(params) if 0 < p.top_k < self._vocab_size]
        nuclei = [i for i, p in enumerate(params) if p.top_p < 1 and not 0 < p.top_k < self._vocab_size]
        min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        return Draws(
            rows=self._rows([row for row, _ in some]),
            streams=torch.tensor([s.stream for _, s in some], dtype=torch.int32, device=self._device),
            temperature=self._column([clamp_temperature(p.temperature) for p in params]),
            log_min_p=self._column(min_p) if any(p.min_p > 0 for p in params) else None,
            cuts=tuple(
                Cut(
                    rows=self._rows(rows, total=len(params)),
                    top_k=self._integers([params[i].top_k for i in rows]).unsqueeze(-1),
                    top_p=self._column([params[i].top_p for i in rows], torch.float64),
                    width=width,
                )
                for rows, width in ((ranked, max((params[i].top_k for i in ranked), default=0)), (nuclei, None))
                if rows
            ),
        )

    def _scores(self, some: Sequence[tuple[int, SamplingParams]]) -> Scores | None:
        if not some:
            return None
        return Scores(
            rows=self._rows([row for row, _ in some]),
            wanted=tuple((row, min(p.logprobs or 0, self._vocab_size)) for row, p in some),
            processed=self._column([p.logprobs_mode == "processed" for _, p in some], torch.bool),
            modes=frozenset(p.logprobs_mode for _, p in some),
        )


def clamp_temperature(value: float) -> float:
    """Return a temperature that float32 can divide by."""
    return min(max(value, _MIN_TEMPERATURE), _MAX_TEMPERATURE)


def clamp_repetition(value: float) -> float:
    """Return a repetition penalty that float32 can divide and multiply by."""
    return min(max(value, _MIN_REPETITION), _MAX_REPETITION)


def clamp_bias(value: float) -> float:
    """Return a bias that float32 can add."""
    return min(max(value, -_MAX_BIAS), _MAX_BIAS)
