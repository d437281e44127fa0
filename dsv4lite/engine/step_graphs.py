"""Captured steps: CUDA graphs of decode and verify steps.

A step of width W runs one known token and up to W - 1 draft tokens of each sequence; a decode step has width 1. A step runs in the
first shape that it fits in: missing sequences and missing draft tokens are padding. Steps of short sequences, whose tokens attend
to every compressed entry, have graphs of their own without the indexer.

The graph of a shape covers the model and the best token of each row; the graph of a pipeline stage covers its layers, from the
previous stage's streams to its own. Further graphs run after it on the same stream:

* a sampling graph, one for each combination of sampling kernels, captured when it is first needed;
* with a drafter on the device, a graph that counts the accepted draft tokens, stores the drafter's KV of the step and writes the
  draft state (``speculation/draft_state.py``) from which the drafter and the next step start;
* a graph of one drafter pass, replayed until there are enough draft tokens.

The device does not wait for the host between these graphs. All of them use tensors at fixed addresses: the inputs of each shape
(``step_inputs``), the KV page tables by slot, the token sampled last in each slot, logits, streams and draft state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from dsv4lite.device import fill_storage, free_storage, holds_storage
from dsv4lite.engine.packing import PageTables, step_batch, step_inputs
from dsv4lite.engine.prompt_graphs import PromptGraphs, PromptShape
from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling.rows import EVERYTHING, Needs, RowMasks
from dsv4lite.kernels.spans import PlacedSpans, place_spans
from dsv4lite.models.batch import Batch
from dsv4lite.models.family import Model
from dsv4lite.paging import window_pages
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.scheduling.step_plan import SequencePlan, StepShape
from dsv4lite.speculation.draft_state import AcceptedLengths, DraftState
from dsv4lite.speculation.drafters import DeviceDrafter
from dsv4lite.state.store import StateCache

T = TypeVar("T")

_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192)  # the time of padding is below noise; a graph takes 0.2 s
_WIDTHS = (1, 2, 3, 4, 5, 9)  # rows per sequence that are captured, besides the largest number


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """The shape of a captured step.

    Attributes:
        sequences: Number of sequences, padding included.
        width: Rows of each sequence: one known token, and draft tokens.
        max_model_len: Longest sequence.
        drafts: Whether the drafter on the device runs after the step.
    """

    sequences: int
    width: int
    max_model_len: int
    drafts: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """Results of a replay on the last stage, of R = sequences x width rows; valid on the same stream until the next replay.

    Attributes:
        placed: Positions, tokens and spans of the sequences, as the device has resolved them.
        logits: float32 [R, V].
        best: Per row: the largest logit, its token, and whether all logits are finite.
        out: int32 [3, R] in the format of ``sample_rows``: the best token of each row, and twice whether the row is finite.
        batch: The step's tokens, kept for the drafter.
        streams: Final streams [R, N, D], kept for the drafter.
    """

    placed: PlacedSpans
    logits: Tensor
    best: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    batch: Batch | None = None
    streams: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Captured:
    """The graphs of one shape.

    Attributes:
        graph: The step without sampling.
        inputs: int32, from ``step_inputs``; written before each replay.
        output: Output of ``graph``; on all pipeline stages but the last, the streams [B, N, D].
        start_drafts: Writes the draft state after the step.
        samplings: Sampling graphs and their results, by the kernels that the sequences need.
    """

    shape: GraphShape
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: StepOutput | Tensor
    start_drafts: torch.cuda.CUDAGraph | None
    samplings: dict[Needs, tuple[torch.cuda.CUDAGraph, Tensor]] = field(default_factory=dict)


class StepGraphs:
    """Captured steps of one model and one state; mutable, owned by the engine's thread, captured on its stream.

    Args:
        max_num_seqs: Most sequences of a step.
        max_model_len: Longest sequence.
        widths: Most tokens of a sequence, ascending; see ``graph_widths``. A pipeline stage has only width 1.
        max_tokens: Most rows of a step; larger ones run eagerly. Default: no limit.
        sampling: The sampler, on the rank that samples.
        drafter: The drafter on the device; all ranks that work on the same tokens have one.
        adaptive: With a drafter, whether decode steps without it are captured as well.
        prompt_tokens: Most tokens of captured steps with prompts; 0: none are captured.
        prompt_pool_bytes: Size of the first segment of the graphs' memory pool, enough for any captured step with prompts.

    Attributes:
        prompts: Captured steps with prompts; without shapes if there are none.
        shapes: Ascending; a step runs in the first one that it fits in.
        accepted: Accepted lengths of the last step that drafted. Unresolved spans start from these, on the device.
    """

    def __init__(
        self,
        model: Model,
        cache: StateCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        widths: Sequence[int] = (1,),
        max_tokens: int | None = None,
        sampling: Sampler | None = None,
        drafter: DeviceDrafter | None = None,
        adaptive: bool = False,
        prompt_tokens: int = 0,
        prompt_pool_bytes: int = 0,
    ) -> None:
        self.sampling, self.drafter = sampling, drafter
        self._model, self._cache = model, cache
        self._peers = model.shard.mesh.peers
        self._max_model_len = max_model_len
        self._tables = PageTables(cache, max_model_len)
        self._pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None
        self._captured: dict[GraphShape, _Captured] = {}
        self._passes: dict[int, torch.cuda.CUDAGraph] = {}  # of the drafter, by number of sequences
        self._last: _Captured | None = None
        self._most_pages = window_pages(model.config.window, widths[-1] + (0 if drafter is None else drafter.most))
        lengths = sorted({min(most, max_model_len) for most in (*model.short_lengths, max_model_len)})
        every = [(False, 1, lengths)] if drafter is None or adaptive else []
        every += [(drafter is not None, width, lengths[-1:]) for width in widths if width > 1 or drafter is not None]
        most = max_num_seqs if max_tokens is None else min(max_num_seqs, max_tokens)
        sizes = [*(size for size in _SIZES if size < most), *range(256, most, 128), most]
        self.shapes = [
            GraphShape(sequences=size, width=width, max_model_len=length, drafts=drafts)
            for drafts, width, longest in every
            for size in sizes
            for length in longest
            if max_tokens is None or size * width <= max_tokens
        ]
        self._allocate(max_num_seqs)
        self.prompts = PromptGraphs(
            model,
            cache,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_tokens=prompt_tokens,
            most_drafts=0 if drafter is None else drafter.most,
            pool_bytes=prompt_pool_bytes,
        )

    def _allocate(self, max_num_seqs: int) -> None:
        """Allocate the tensors that graphs pass to later graphs; all shapes share their addresses."""
        shard, config, device, dtype = self._model.shard, self._model.config, self._cache.device, self._model.numerics.dtype
        rows, streams = max((s.sequences * s.width for s in self.shapes), default=0), self._model.hidden_shape
        self._before = None if shard.first else torch.zeros(rows, *streams, dtype=dtype, device=device)
        self._streams = None
        if not shard.last or self.drafter is not None:
            self._streams = torch.empty(rows, *streams, dtype=dtype, device=device)
        if shard.last:
            self._logits = torch.empty(rows, config.vocab_size, dtype=torch.float32, device=device)
        num_drafts = 0
        if self.drafter is not None:
            num_drafts = -(-self.drafter.most // self.drafter.per_pass) * self.drafter.per_pass
            like_ND = torch.empty(streams, dtype=dtype, device=device)
            grow = 0 if config.window else self._tables.tensor.shape[1]
            self._draft_state = DraftState.empty(max_num_seqs, self._most_pages, like_ND, grow=grow)
            self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
            self._places = torch.arange(self.drafter.per_pass, device=device)  # rows of ``_drafts`` that the next pass writes
        self._next = torch.zeros(3, max_num_seqs, dtype=torch.int64, device=device)
        self._drafts = torch.zeros(num_drafts, max_num_seqs, dtype=torch.int64, device=device)
        self.accepted = AcceptedLengths(columns={}, next_3S=self._next, drafts_KS=self._drafts)

    def shape_for(self, step: StepShape) -> GraphShape | None:
        """Return the first shape that a step fits in; ``None`` if the step runs eagerly."""
        if not step.decodes:
            return None
        drafts, longest = step.max_drafts > 0 and self.drafter is not None, min(step.longest, self._max_model_len)
        for shape in self.shapes:
            large_enough = shape.sequences >= step.sequences and shape.width >= step.width and shape.max_model_len >= longest
            if large_enough and (shape.drafts or not drafts):
                return shape
        return None

    def prompts_for(self, step: StepShape) -> PromptShape | None:
        """Return the first captured shape with prompts that a step fits in; ``None`` if the step runs eagerly."""
        return None if step.records else self.prompts.shape_for(step)

    def run_prompts(self, sequences: Sequence[SequencePlan], shape: PromptShape) -> tuple[Batch | None, Tensor]:
        """See ``PromptGraphs.run``."""
        return self.prompts.run(sequences, shape, self._record)

    def reserve_prompts(self) -> None:
        """See ``PromptGraphs.reserve``."""
        self.prompts.reserve(self._record)

    def streams_before(self, shape: GraphShape) -> Tensor:
        """Return the tensor [B, N, D] from which a step reads the previous stage's streams, padding included."""
        assert self._before is not None, "the first stage begins with tokens"
        return self._before[: shape.sequences * shape.width]

    def forget(self) -> None:
        """Free the graphs. Call this before their tensors, and the process groups of their collectives, are freed."""
        self._last = None
        self._captured.clear()
        self._passes.clear()
        self.prompts.forget()
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()

    def _scratch(self) -> list[Tensor]:
        """Return the scratch tensors of steps: logits and streams, which hold nothing between steps."""
        found = [self._streams, self._logits if self._model.shard.last else None]
        found.append(None if self.sampling is None else self.sampling.space.edited)
        found.append(self.prompts.hidden)
        return [tensor for tensor in found if tensor is not None]

    def release_memory(self) -> None:
        """Free the scratch tensors; nothing may be captured or sampled until ``restore_memory``."""
        for tensor in self._scratch():
            free_storage(tensor)

    def restore_memory(self) -> None:
        """Allocate the scratch tensors that were freed."""
        for tensor in self._scratch():
            if not holds_storage(tensor):
                fill_storage(tensor)

    def dry_run(self, shape: GraphShape) -> Tensor:
        """Run a step of padding and all that may follow it; return its ``step_inputs``. Its kernels may be only recorded."""
        inputs = self._inputs((), shape).to(self._cache.device)
        output = self._forward(inputs, shape, dry=True)
        if isinstance(output, StepOutput):
            if self.sampling is not None:
                self._sample(self.sampling, inputs, output, EVERYTHING)
            if shape.drafts:
                self._start_drafts(output)
                self._draft(shape.sequences, dry=True)
        return inputs

    def capture(self, shape: GraphShape) -> None:
        """Capture the graphs of a shape, after a dry run that loads all kernels; it skips layers with the same ones."""
        with self._model.skip_repeated_layers():
            inputs = self.dry_run(shape)
        if self._cache.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        graph, output = self._record(partial(self._forward, inputs, shape))
        start_drafts = None
        if shape.drafts and isinstance(output, StepOutput):
            start_drafts, _ = self._record(partial(self._start_drafts, output))
            if shape.sequences not in self._passes:
                self._passes[shape.sequences], _ = self._record(partial(self._draft, shape.sequences))
        self._captured[shape] = _Captured(shape=shape, graph=graph, inputs=inputs, output=output, start_drafts=start_drafts)

    def capture_missing(self, shapes: Iterable[GraphShape]) -> None:
        """Capture the shapes that have no graphs, between two steps."""
        missing = [shape for shape in shapes if shape not in self._captured]
        if missing:
            following, drafts = self._next.clone(), self._drafts.clone()
            for shape in missing:
                self.capture(shape)
            self._next.copy_(following)  # captures overwrote these, and the next step may start from them
            self._drafts.copy_(drafts)

    def replay(self, sequences: Sequence[SequencePlan], shape: GraphShape) -> StepOutput | Tensor:
        """Run a step; all pipeline stages but the last return their streams [B, N, D].

        Args:
            sequences: In the order of the rows, ``shape.width`` rows each; the remaining rows are padding.
            shape: From ``shape_for``.
        """
        self.capture_missing([shape])
        captured = self._last = self._captured[shape]
        self._tables.update(sequences)
        inputs = self._inputs(sequences, shape)
        captured.inputs.copy_(inputs.pin_memory() if captured.inputs.is_cuda else inputs, non_blocking=True)
        captured.graph.replay()
        return captured.output

    def sample(self, needs: Needs, masks: RowMasks | None = None) -> Tensor:
        """Sample from the rows of the last replay, eagerly if there are masks; return the output of ``sample_rows``."""
        captured, sampling = self._last, self.sampling
        assert captured is not None and sampling is not None and isinstance(captured.output, StepOutput)
        work = partial(self._sample, sampling, captured.inputs, captured.output, needs, masks)
        if masks is not None:
            return work()
        if needs not in captured.samplings:
            captured.samplings[needs] = self._record(work)
        graph, out = captured.samplings[needs]
        graph.replay()
        return out

    def draft(self, sequences: Sequence[SequencePlan], tokens_R: Tensor, count: int) -> Tensor:
        """Draft the tokens after the last replay.

        Args:
            sequences: The sequences of that replay; their accepted lengths become ``accepted``.
            tokens_R: The token sampled from each row; ignored on ranks that do not sample.
            count: Most draft tokens of a sequence.

        Returns:
            int64 [B, count], ``UNKNOWN`` where there are none.
        """
        captured, drafter = self._last, self.drafter
        assert captured is not None and captured.start_drafts is not None and drafter is not None
        self._tokens[: len(tokens_R)].copy_(tokens_R)
        captured.start_drafts.replay()
        size, count = captured.shape.sequences, min(count, drafter.most)
        for _ in range(0, count, drafter.per_pass):
            self._passes[size].replay()
        self.accepted = replace(self.accepted, columns={s.seq_id: column for column, s in enumerate(sequences)})
        return self._drafts[:count, :size].t().contiguous()

    def _record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run ``work`` once and capture its launches on the current stream; return the graph and the result of ``work``."""
        graph = torch.cuda.CUDAGraph()
        # In any other mode the capture fails if the garbage collector frees an older graph on this thread during it.
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        try:
            result = work()
        finally:
            graph.capture_end()
        return graph, result

    def _inputs(self, sequences: Sequence[SequencePlan], shape: GraphShape) -> Tensor:
        pages = self._most_pages if shape.drafts else window_pages(self._model.config.window, shape.width)
        return step_inputs(sequences, shape.sequences, shape.width, pages, self.accepted.columns)

    def _forward(self, inputs: Tensor, shape: GraphShape, *, dry: bool = False) -> StepOutput | Tensor:
        """Run one step. With ``dry``, kernels may be only recorded, so indices come from the reference of ``place_spans``."""
        model, read = self._model, (inputs, shape.width, self._cache.last_token, self._next, self._drafts)
        placed = place_spans(*read)
        if dry:
            placed = place_spans.reference(*read)
        batch, rows = step_batch(inputs, placed, self._tables.tensor, model, shape.max_model_len), shape.sequences * shape.width
        layers = self._cache.layers if shape.drafts else self._cache.layers[: len(model.shard.layers)]
        streams: Tensor = model(batch, layers, None if self._before is None else self._before[:rows])
        if self._streams is not None and (shape.drafts or not model.shard.last):
            streams = self._streams[:rows].copy_(streams)
        if not model.shard.last:
            return streams
        logits = model.logits(streams, out=self._logits[:rows])
        best = argmax_finite(logits)
        _, token_ids, finite = best
        if shape.width == 1:  # in wider steps, the device or the host determines the last tokens
            self._cache.last_token.index_copy_(0, placed.places_S, token_ids)
        usable = finite.int()
        out = torch.stack([token_ids.int(), usable, usable])
        output = StepOutput(placed=placed, logits=logits, best=best, out=out)
        return replace(output, batch=batch, streams=streams) if shape.drafts else output  # kept tensors take memory in every graph

    def _sample(self, sampling: Sampler, inputs: Tensor, output: StepOutput, needs: Needs, masks: RowMasks | None = None) -> Tensor:
        slots_T, positions_T, size = inputs[1], output.placed.positions_T, inputs.shape[1]
        width = len(positions_T) // size
        drafts = None
        if width > 1:
            slots_T = torch.where(positions_T.view(-1, width) < 0, -1, slots_T[:, None]).flatten()
            place_T = torch.arange(width, dtype=torch.int32, device=inputs.device).repeat(size)
            drafts = (output.placed.tokens_T.int(), place_T)
        last_token = self._cache.last_token
        return sampling.run(output.logits, output.best, slots_T, positions_T, last_token, needs, drafts, masks)

    def _start_drafts(self, output: StepOutput) -> None:
        """Store the drafter's KV of a step whose sampled tokens are in ``_tokens``, and write the draft state."""
        assert self.drafter is not None and output.batch is not None and output.streams is not None
        streams, size = output.streams, len(output.placed.rows_S)
        tokens_T = self._peers.broadcast_tokens(self._tokens[: len(streams)])
        self.drafter.feed(output.batch, streams, tokens_T)
        state = self._draft_state.first(size)
        state.start(output.batch, streams, tokens_T.view(size, -1))
        accepted_S = state.positions_S - output.batch.paging.first_S
        self._next[:, :size].copy_(torch.stack((state.positions_S + 1, accepted_S, state.tokens_S)))
        self._places.copy_(torch.arange(self.drafter.per_pass, device=tokens_T.device))

    def _draft(self, size: int, *, dry: bool = False) -> None:
        """Run the drafter once. With ``dry``, kernels may be only recorded, so the drafter continues with token 0."""
        assert self.drafter is not None
        state, sampling = self._draft_state.first(size), self.sampling

        def choose(logits_SV: Tensor, positions_S: Tensor) -> Tensor:
            tokens_S = argmax_finite(logits_SV)[1] if sampling is None else sampling.draft(logits_SV, state.slots_S, positions_S)
            chosen_S = self._peers.broadcast_tokens(tokens_S)
            return torch.zeros_like(chosen_S) if dry else chosen_S

        drafts_SG = self.drafter.draft(state, choose)
        self._drafts[:, :size].index_copy_(0, self._places, drafts_SG.t())
        self._places.add_(self.drafter.per_pass)


def graph_widths(max_drafts: int, *, adaptive: bool) -> tuple[int, ...]:
    """Return the captured widths, ascending; with ``adaptive``, more of them, since steps often have fewer drafts."""
    if not max_drafts:
        return (1,)
    return (*(width for width in (_WIDTHS if adaptive else _WIDTHS[:1]) if width <= max_drafts), 1 + max_drafts)
