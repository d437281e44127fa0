"""Captured steps with prompts: CUDA graphs of the layers, from token ids to the residual of every token.

Launching some 25 kernels a layer takes the host longer than the device takes to run them on up to a few thousand tokens. What a
step with prompts launches does not depend on how its tokens are shared among sequences, so one graph serves every step that fits
into its shape; the rest is padding. Logits, sampling and drafting run eagerly: they are few launches.

No start waits for these shapes, except the largest. The first step of a shape launches its kernels one by one, the second one is
captured, later ones replay. Every graph reads its own block of integers (``state/paging.py``); all leave results in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lite.engine.packing import known_tokens
from dsv4lite.models.family import Batch, Model
from dsv4lite.paging import PAGE_TOKENS, window_pages
from dsv4lite.scheduling.step_plan import SequencePlan, StepShape
from dsv4lite.state.paging import Room, read_paging, write_paging
from dsv4lite.state.store import StateCache

Record = Callable[[Callable[[], Batch | None]], tuple[Any, Batch | None]]
"""Captures what a function launches; returns the graph, and what the function returns."""

_FEW_SEQUENCES = (1, 16)  # of one prompt alone, attention widens rows once for all of its tokens
_FEW_TOKENS, _FINE, _COARSE = 64, 128, 256  # the smallest shape, and between shapes up to 1,024 tokens and above
_LENGTHS = tuple(8192 << 2 * i for i in range(6))  # tables and index scores have room for the longest sequence
_LONG_TOKENS = 2048  # of a step whose sequences are longer than the first of these: more take the device longer than the host
_MOST_PAGES = 1 << 18  # of a step's tables, which the host writes


class PromptShape(NamedTuple):
    """The shape of a captured step with prompts.

    Attributes:
        tokens, sequences: Of the step, padding included.
        longest: No sequence is longer after the step.
        drafts: Whether what a drafter on the device reads of the layers is kept as well.
    """

    tokens: int
    sequences: int
    longest: int
    drafts: bool = False


class PromptGraphs:
    """Captured steps with prompts of one model and one state; mutable, owned by the engine's thread.

    Args:
        max_num_seqs: Most sequences of a step.
        max_model_len: Longest sequence.
        max_tokens: Most tokens of a captured step.
        most_drafts: Of the drafter on the device, for whose draft tokens plans have pages; 0: there is none.
        pool_bytes: Memory that the graphs' pool begins with, in one segment: enough for any shape.

    Attributes:
        shapes: Ascending; a step runs in the first one that it fits in.
        hidden: The residual [T, …] of the step that ran last.
    """

    def __init__(
        self,
        model: Model,
        cache: StateCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int,
        most_drafts: int = 0,
        pool_bytes: int = 0,
    ) -> None:
        self._model, self._cache, self._most_drafts, self._pool_bytes = model, cache, most_drafts, pool_bytes
        bounds = sorted({min(most, max_model_len) for most in (*model.short_lengths, *_LENGTHS)})
        counts = sorted({*_FEW_SEQUENCES, -(-max_num_seqs // _FEW_SEQUENCES[-1]) * _FEW_SEQUENCES[-1]})
        sizes = [_FEW_TOKENS, *range(_FINE, 1024, _FINE), *range(1024, max_tokens + 1, _COARSE)]
        self.shapes = [
            PromptShape(tokens, sequences, longest, drafts)
            for drafts in ((False, True) if most_drafts else (False,))
            for longest in bounds
            for tokens in sizes
            for sequences in counts
            if tokens <= (max_tokens if longest <= _LENGTHS[0] else min(max_tokens, _LONG_TOKENS))
            and sequences * (longest // PAGE_TOKENS) <= _MOST_PAGES
        ]
        self._inputs: dict[PromptShape, Tensor] = {}  # of shapes that have run
        self._graphs: dict[PromptShape, tuple[Any, Batch | None]] = {}
        self._largest = max(self.shapes, key=lambda shape: (shape.tokens, shape.sequences, shape.longest), default=None)
        numerics, rows = model.numerics, 0 if self._largest is None else self._largest.tokens
        self.hidden = torch.empty(rows, *model.hidden_shape, dtype=numerics.dtype, device=numerics.device)

    def shape_for(self, step: StepShape) -> PromptShape | None:
        """Return the first shape that a step fits in; ``None`` if it runs eagerly."""
        drafts = step.max_drafts > 0 and self._most_drafts > 0
        for shape in self.shapes:
            large_enough = shape.tokens >= (step.tokens or 0) and shape.sequences >= step.sequences
            if large_enough and shape.longest >= step.longest and shape.drafts == drafts:
                return shape
        return None

    def run(self, sequences: Sequence[SequencePlan], shape: PromptShape, record: Record) -> tuple[Batch | None, Tensor]:
        """Run a step; return its batch, for the drafter, and its residual [T, …], padding included, valid until the next one."""
        block = write_paging(sequences, self._room(shape))
        first = shape not in self._inputs
        if first:
            self._inputs[shape] = torch.empty_like(block, device=self._cache.device)
        inputs = self._inputs[shape]
        inputs.copy_(block.pin_memory() if inputs.is_cuda else block, non_blocking=True)
        if first:
            batch = self._forward(inputs, shape)
        else:
            if shape not in self._graphs:
                self._capture(inputs, shape, record)
            graph, batch = self._graphs[shape]
            graph.replay()
        return batch, self.hidden[: shape.tokens]

    def _capture(self, inputs: Tensor, shape: PromptShape, record: Record) -> None:
        if not self._graphs and shape != self._largest:
            self.reserve(record)
        if inputs.is_cuda:
            torch.cuda.current_stream().synchronize()
        self._graphs[shape] = record(partial(self._work, inputs, shape))

    def dry_run(self) -> None:
        """Launch what the smallest and the largest shape launch, on padding; kernels may be held back."""
        for shape in (*self.shapes[:1], self._largest):
            if shape is not None:
                self._forward(write_paging((), self._room(shape)).to(self._cache.device), shape)

    def reserve(self, record: Record) -> None:
        """Capture the largest shape, on padding: a larger one that came later would not find room in the memory of the others."""
        for _ in range(2):
            if self._largest is not None:
                self.run((), self._largest, record)

    def forget(self) -> None:
        """Free the graphs."""
        self._graphs.clear()
        self._inputs.clear()

    def _room(self, shape: PromptShape) -> Room:
        grow = -(-(shape.longest + self._most_drafts) // PAGE_TOKENS)
        window = window_pages(self._model.config.window, shape.tokens + self._most_drafts)
        return Room(shape.tokens, shape.sequences, grow, max(1, window))

    def _work(self, inputs: Tensor, shape: PromptShape) -> Batch | None:
        """Do what a graph captures. The first one lets the pool begin with one segment: smaller ones would leave gaps."""
        if not self._graphs:
            torch.empty(self._pool_bytes, dtype=torch.uint8, device=inputs.device)
        return self._forward(inputs, shape)

    def _forward(self, inputs: Tensor, shape: PromptShape) -> Batch | None:
        """Run the layers on a block of integers and write their residual to ``hidden``; return what a drafter reads besides."""
        model, cache = self._model, self._cache
        token_ids_T, paging = read_paging(inputs, self._room(shape), width=0)
        batch = model.batch(known_tokens(token_ids_T, paging, cache.last_token), paging, max_tokens=shape.longest)
        batch.most_tokens = shape.tokens
        self.hidden[: shape.tokens].copy_(model(batch, cache.layers if shape.drafts else cache.layers[: len(model.shard.layers)]))
        return batch if shape.drafts else None  # what is kept takes memory in every graph
