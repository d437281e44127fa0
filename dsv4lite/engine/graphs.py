"""Decode steps as CUDA graphs: one per number of sequences, replayed with nothing but a small copy to the device in front.

Sequences so short that each token attends to all entries it sees have a second one, in which nobody chooses.

A graph covers a whole step of single tokens: which token each sequence has (the one sampled last, if the host does not know it
yet), where its rows lie, the model, and the best token of each row. That of a pipeline's stage covers its layers, from the streams
that have come to those that go. Where more is asked for than best tokens, a graph of its own
samples behind it: one for each size and each set of settings that need kernels of their own, recorded when it is first needed.
Places beyond the step's sequences are padding.

What changes between steps lies in tensors that stay where they are: one block of integers per graph, and the tables of grow pages
by slot, whose rows are sent only when a sequence has taken a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dsv4lite.engine.graph_set import Captured, GraphSet, rows_of_ints
from dsv4lite.engine.packing import empty_last_token, graph_sizes
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling.rows import EVERYTHING, Needs
from dsv4lite.models.family import Batch, Model
from dsv4lite.paging import window_pages
from dsv4lite.sampling.device import DeviceSampler
from dsv4lite.scheduling.step_plan import SequencePlan, StepShape
from dsv4lite.state.store import StateCache

_COLUMNS = 4  # token, position, slot, first window page


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """What a graph was recorded for.

    Attributes:
        size: Number of sequences, padding included.
        max_model_len: No sequence is longer.
    """

    size: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeOutput:
    """What a replay leaves; valid until the next one, for those who work on the same stream.

    Attributes:
        logits: float32 [B, V].
        best: Of these: the largest, its token, and whether a row can be sampled from.
        out: int32 [3, B], the best token of each row, and twice whether the row can be sampled from: as ``sample_rows`` says it.
    """

    logits: Tensor
    best: tuple[Tensor, Tensor, Tensor]
    out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedMemory:
    """What graphs of an engine have together that run one after the other.

    Attributes:
        last_token: int64 [slots + 1], the token sampled last in each slot.
        logits: float32 [B, V].
        pool: Where what they work with lies.
    """

    last_token: Tensor
    logits: Tensor
    pool: Any


class DecodeGraphs(GraphSet):
    """Graphs of one model and one state; mutable, owned by the engine's thread, captured on its stream.

    Args:
        model: Runs on paged state.
        cache: The state.
        max_num_seqs: Most sequences of a step.
        max_model_len: Longest sequence.
        sampling: Samples behind the steps, if somebody does on the device.
        shared: What other graphs of the same steps have, with whom these take turns.
    """

    def __init__(
        self,
        model: Model,
        cache: StateCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        sampling: DeviceSampler | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        last_token = empty_last_token(cache) if shared is None else shared.last_token
        pool = torch.cuda.graph_pool_handle() if shared is None else shared.pool
        super().__init__(cache, max_model_len, last_token, sampling, pool)
        self._model = model
        self._layers = cache.layers[: len(model.share.layers)]  # a drafter has no part in these steps
        self._window_pages = window_pages(model.config.window)
        self._captured: dict[GraphShape, Captured[DecodeOutput | Tensor]] = {}
        self._last: Captured[DecodeOutput | Tensor] | None = None
        sizes, lengths = (
            graph_sizes(max_num_seqs),
            sorted({min(most, max_model_len) for most in (*model.short_lengths, max_model_len)}),
        )
        self.shapes = [GraphShape(size=size, max_model_len=length) for size in sizes for length in lengths]
        # Of the step that ran last, whichever graph it was: streams as they come from the stage before, and what leaves this one.
        share, config, device = model.share, model.config, cache.device
        streams = (max_num_seqs, *model.hidden_shape)
        self._before = None if share.first else torch.zeros(streams, dtype=model.numerics.dtype, device=device)
        if not share.last:
            self._leaving = torch.empty(streams, dtype=model.numerics.dtype, device=device)
        elif shared is None:
            self._leaving = torch.empty(max_num_seqs, config.vocab_size, dtype=torch.float32, device=device)
        else:
            self._leaving = shared.logits[:max_num_seqs]

    def covers(self, shape: StepShape) -> bool:
        """Whether a step can be replayed: single tokens, of which nothing else is wanted than the next ones."""
        wanted = shape.max_drafts > 0 or shape.behind_drafts
        return shape.decodes and shape.width == 1 and not wanted and shape.sequences <= self.shapes[-1].size

    def forget(self) -> None:
        """Free the graphs. The process groups of collectives in them cannot end before."""
        self._captured.clear()
        self._last = None

    def rehearse(self, shape: GraphShape) -> Tensor:
        """Run a step of as many sequences that are all padding; return its inputs."""
        inputs = torch.full((_COLUMNS + self._window_pages, shape.size), -1, dtype=torch.int32, device=self._cache.device)
        inputs[0] = 0
        output = self._forward(inputs, shape.max_model_len)
        if self.sampling is not None and isinstance(output, DecodeOutput):
            self._sample(self.sampling, inputs, output, EVERYTHING)
        return inputs

    def capture(self, shape: GraphShape) -> None:
        """Record the graph of a shape; runs it once before, so that everything it needs is compiled and loaded."""
        inputs = self.rehearse(shape)
        torch.cuda.current_stream().synchronize()
        graph, output = self._record(partial(self._forward, inputs, shape.max_model_len))
        self._captured[shape] = Captured(graph=graph, inputs=inputs, output=output)

    def shape_for(self, step: StepShape) -> GraphShape:
        """Return which graph runs a step."""
        return next(shape for shape in self.shapes if shape.size >= step.sequences and shape.max_model_len >= step.longest)

    def streams_before(self, shape: StepShape) -> Tensor:
        """Return where a step wants to find the streams [B, N, D] of the stage before, those of padding included."""
        assert self._before is not None, "the first stage begins with tokens"
        return self._before[: self.shape_for(shape).size]

    def replay(self, sequences: Sequence[SequencePlan], shape: StepShape) -> DecodeOutput | Tensor:
        """Run a step; rows follow the order of ``sequences``, the rest is padding. Stages but the last return streams [B, N, D]."""
        wanted = self.shape_for(shape)
        if wanted not in self._captured:
            self.capture(wanted)
        captured = self._last = self._captured[wanted]
        self._tables.update(sequences)
        captured.inputs.copy_(decode_inputs(sequences, wanted.size, self._window_pages).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.output

    def sample(self, sampling: DeviceSampler, needs: Needs) -> Tensor:
        """Sample from what ``replay`` has just left; return what ``sample_rows`` returns."""
        captured = self._last
        assert captured is not None and isinstance(captured.output, DecodeOutput)
        work = partial(self._sample, sampling, captured.inputs, captured.output, needs)
        return self._replay_sampling(captured, needs, work)

    def _forward(self, inputs: Tensor, longest: int) -> DecodeOutput | Tensor:
        """One step on ``inputs`` of ``decode_inputs``, of sequences of up to ``longest`` tokens."""
        size = inputs.shape[1]
        batch, places = decode_batch(inputs, self._tables.tensor, self.last_token, self._model, longest)
        streams = self._model(batch, self._layers, None if self._before is None else self._before[:size])
        if not self._model.share.last:
            return self._leaving[:size].copy_(streams)
        logits = self._model.logits(streams, out=self._leaving[:size])
        best = argmax_finite(logits)
        _, token_ids, finite = best
        self.last_token.index_copy_(0, places.long(), token_ids)
        usable = finite.int()
        out = torch.stack([token_ids.int(), usable, usable])
        return DecodeOutput(logits=logits, best=best, out=out)

    def _sample(self, sampling: DeviceSampler, inputs: Tensor, output: DecodeOutput, needs: Needs) -> Tensor:
        _, positions, slots, _ = inputs[:_COLUMNS]
        return sampling.run(output.logits, output.best, slots, positions, self.last_token, needs)


def decode_inputs(sequences: Sequence[SequencePlan], size: int, window_pages: int) -> Tensor:
    """Return what a step of single tokens is told, int32 [4 + window pages, size] on the CPU; missing sequences are padding.

    The first rows are tokens, positions, slots and first window pages; the rest, as [size, window pages], are window pages.
    """
    missing = size - len(sequences)
    filler = [-1] * missing
    paddings = [(-1,) * (window_pages - count) for count in range(window_pages + 1)]
    columns = [
        *[s.token_ids[0] for s in sequences],
        *[0] * missing,
        *[s.start for s in sequences],
        *filler,
        *[s.slot for s in sequences],
        *filler,
        *[s.window_first for s in sequences],
        *filler,
        *chain.from_iterable([s.window_pages + paddings[len(s.window_pages)] for s in sequences]),
        *filler * window_pages,
    ]
    return rows_of_ints(columns, size)


def decode_batch(inputs: Tensor, tables: Tensor, last_token: Tensor, model: Model, max_model_len: int) -> tuple[Batch, Tensor]:
    """Return a step of single tokens.

    Args:
        inputs: From ``decode_inputs``.
        tables: int32 [slots + 1, P], grow pages by slot.
        last_token: int64 [slots + 1], the token sampled last in each slot, where ``inputs`` has ``IN_FLIGHT``.
        model: Whose step it is.
        max_model_len: No sequence is longer.

    Returns:
        The batch, and int32 [B], the row of ``tables`` of each sequence; that of padding is the last one.
    """
    size = inputs.shape[1]
    token_ids, positions, slots, window_first = inputs[:_COLUMNS]
    places = torch.where(slots < 0, len(last_token) - 1, slots)
    every = torch.arange(size, dtype=torch.int32, device=inputs.device)
    paging = Paging(
        positions_T=positions,
        sequence_T=every,
        slots_S=slots,
        first_S=positions,
        rows_S=every,
        lens_S=torch.ones_like(every),
        drafts_S=torch.zeros_like(every),
        carry_S=torch.zeros_like(every),
        grow_SP=tables.index_select(0, places),
        window_SP=inputs[_COLUMNS:].view(size, -1),
        window_first_S=window_first,
        singles=True,
    )
    tokens = torch.where(token_ids < 0, last_token[places], token_ids)
    batch = model.batch(tokens, paging, max_tokens=max_model_len)
    batch.most_tokens = size  # others replay the same graph
    return batch, places
