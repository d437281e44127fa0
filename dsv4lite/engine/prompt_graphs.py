"""Captured steps with prompts: CUDA graphs of the layers, from token ids to the residual of every token.

For up to a few thousand tokens, the host takes longer to launch some 25 kernels a layer than the device takes to run them. The
launches of a step with prompts do not depend on how its tokens are divided among sequences, so one graph serves every step that
fits into its shape; the rest is padding. Logits, sampling and drafting run eagerly: they have few launches.

Warm-up captures only the largest shape. For other shapes, the first step runs eagerly, the second one is captured, and later ones
replay the graph. Every graph reads its own block of integers (``state/paging.py``); all write their result to one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lite.engine.packing import known_tokens
from dsv4lite.models.batch import Batch
from dsv4lite.models.family import Model
from dsv4lite.paging import PAGE_TOKENS, window_pages
from dsv4lite.scheduling.step_plan import SequencePlan, StepShape
from dsv4lite.state.paging import PagingSizes, read_paging, write_paging
from dsv4lite.state.store import StateCache

Record = Callable[[Callable[[], Batch | None]], tuple[Any, Batch | None]]
"""Captures the launches of a function; returns the graph and the result of the function."""

_FEW_SEQUENCES = (1, 16)  # for a single prompt, attention dequantizes rows once for all tokens
_FEW_TOKENS, _FINE, _COARSE = 64, 128, 256  # tokens of the smallest shape; steps between shapes up to 1,024 tokens, and above
_LENGTHS = tuple(8192 << 2 * i for i in range(6))  # bounds of the longest sequence, for which tables and index scores have room
_LONG_TOKENS = 2048  # most tokens with sequences longer than ``_LENGTHS[0]``; with more, the host does not limit an eager step
_MOST_PAGES = 1 << 18  # in a step's page tables, which the host writes


class PromptShape(NamedTuple):
    """The shape of a captured step with prompts.

    Attributes:
        tokens, sequences: Numbers of tokens and sequences, padding included.
        longest: Most tokens of a sequence after the step.
        drafts: Whether the step keeps the tensors that a drafter on the device reads.
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
        most_drafts: Most draft tokens of the drafter on the device, for which plans have pages; 0: there is no drafter.
        pool_bytes: Size of the first segment of the graphs' memory pool, enough for any shape.

    Attributes:
        shapes: Ascending; a step runs in the first one that it fits in.
        hidden: The final residual [T, …] of the last step.
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
        self._inputs: dict[PromptShape, Tensor] = {}  # inputs of shapes that have run
        self._graphs: dict[PromptShape, tuple[Any, Batch | None]] = {}
        self._largest = max(self.shapes, key=lambda shape: (shape.tokens, shape.sequences, shape.longest), default=None)
        numerics, rows = model.numerics, 0 if self._largest is None else self._largest.tokens
        self.hidden = torch.empty(rows, *model.hidden_shape, dtype=numerics.dtype, device=numerics.device)

    def shape_for(self, step: StepShape) -> PromptShape | None:
        """Return the first shape that a step fits in; ``None`` if the step runs eagerly."""
        if not self._model.captures(step.tokens or 0, step.pairs, step.pages):
            return None
        drafts = step.max_drafts > 0 and self._most_drafts > 0
        for shape in self.shapes:
            large_enough = shape.tokens >= (step.tokens or 0) and shape.sequences >= step.sequences
            if large_enough and shape.longest >= step.longest and shape.drafts == drafts:
                return shape
        return None

    def run(self, sequences: Sequence[SequencePlan], shape: PromptShape, record: Record) -> tuple[Batch | None, Tensor]:
        """Run a step; return its batch, for the drafter, and its residual [T, …], padding included, valid until the next step."""
        block = write_paging(sequences, self._sizes(shape))
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
        """Run the smallest and the largest shape on padding; their kernels may be only recorded."""
        for shape in (*self.shapes[:1], self._largest):
            if shape is not None:
                self._forward(write_paging((), self._sizes(shape)).to(self._cache.device), shape)

    def reserve(self, record: Record) -> None:
        """Capture the largest shape first, on padding: captured later, it would not fit into the pool's free memory."""
        for _ in range(2):
            if self._largest is not None:
                self.run((), self._largest, record)

    def forget(self) -> None:
        """Free the graphs."""
        self._graphs.clear()
        self._inputs.clear()

    def _sizes(self, shape: PromptShape) -> PagingSizes:
        grow = -(-(shape.longest + self._most_drafts) // PAGE_TOKENS)
        window = window_pages(self._model.config.window, shape.tokens + self._most_drafts)
        return PagingSizes(shape.tokens, shape.sequences, grow, max(1, window))

    def _work(self, inputs: Tensor, shape: PromptShape) -> Batch | None:
        """Run what a graph captures. The first capture makes the pool start with one large segment: small ones leave gaps."""
        if not self._graphs:
            torch.empty(self._pool_bytes, dtype=torch.uint8, device=inputs.device)
        return self._forward(inputs, shape)

    def _forward(self, inputs: Tensor, shape: PromptShape) -> Batch | None:
        """Run the layers on a block of integers and write the residual to ``hidden``; return the batch if a drafter reads it."""
        model, cache = self._model, self._cache
        token_ids_T, paging = read_paging(inputs, self._sizes(shape), width=0)
        batch = model.batch(known_tokens(token_ids_T, paging, cache.last_token), paging, max_tokens=shape.longest)
        batch.most_tokens = shape.tokens
        self.hidden[: shape.tokens].copy_(model(batch, cache.layers if shape.drafts else cache.layers[: len(model.shard.layers)]))
        return batch if shape.drafts else None  # kept tensors take memory in every graph
