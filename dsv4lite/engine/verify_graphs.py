"""Steps that check guesses as CUDA graphs: one per number of sequences, and number of tokens that each may run.

A graph covers the model over one known token and guesses of each sequence, as many as it has places for; a sequence with fewer
leaves places empty, and so do missing sequences. Sampling, and guessing on the device, come behind it: which tokens a step counts
is nothing that a graph must know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsv4lite.engine.cache import GROW_PAGE, WINDOW_PAGE, StateCache
from dsv4lite.engine.plan import empty_last_token, graph_sizes
from dsv4lite.engine.sampling_state import send
from dsv4lite.engine.step import SequencePlan, StepShape
from dsv4lite.kernels.paging import Paging
from dsv4lite.models.batch import PagedBatch
from dsv4lite.models.deepseek_v4 import DeepseekV4

_COLUMNS = 5  # position, slot, copy of the carry, drafts, first window page


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyOutput:
    """What a replay leaves; valid until the next one, for those who work on the same stream.

    Attributes:
        width: Rows of each sequence.
        batch: The step's tokens, in B x width rows.
        streams: The final streams of each row.
        logits: float32 [B x width, V].
    """

    width: int
    batch: PagedBatch
    streams: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: VerifyOutput


class VerifyGraphs:
    """Graphs of one model and one state; mutable, owned by the engine's thread, captured on its stream.

    Args:
        model: Runs on paged state.
        cache: The state.
        max_num_seqs: Most sequences of a step.
        max_model_len: Longest sequence.
        max_drafts: Most guesses of a sequence.
        max_tokens: Most rows of a step; one that would need more of them runs without a graph.
    """

    def __init__(
        self,
        model: DeepseekV4,
        cache: StateCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_drafts: int,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._cache = cache
        self.last_token = empty_last_token(cache)
        self._max_model_len = max_model_len
        self._tables = torch.zeros(cache.sizes.slots + 1, -(-max_model_len // GROW_PAGE), dtype=torch.int32, device=cache.device)
        self._held: dict[int, tuple[int, ...]] = {}
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None
        sizes, widths = graph_sizes(max_num_seqs), (1, 1 + max_drafts)
        self.shapes = [(size, width) for size in sizes for width in widths if size * width <= max_tokens]
        # Of the step that ran last, whichever graph it was.
        rows = max((size * width for size, width in self.shapes), default=0)
        self._logits = torch.empty(rows, model.config.vocab_size, dtype=torch.float32, device=cache.device)

    def covers(self, step: StepShape) -> bool:
        """Whether a step can be replayed: one known token and guesses of each sequence, and nothing wanted but what follows."""
        return step.decodes and not step.in_flight and self._shape_for(step) is not None

    def _shape_for(self, step: StepShape) -> tuple[int, int] | None:
        return next((shape for shape in self.shapes if shape[0] >= step.sequences and shape[1] >= step.width), None)

    def rehearse(self, shape: tuple[int, int]) -> Tensor:
        """Run a step of sequences that are all padding; return its inputs.

        Args:
            shape: Number of sequences, and of tokens of each.
        """
        inputs = verify_inputs((), *shape, window_pages(self._model, shape[1])).to(self._cache.device)
        self._forward(inputs, shape[1])
        return inputs

    def capture(self, shape: tuple[int, int]) -> None:
        """Record a graph; runs it once before, so that everything it needs is compiled and loaded."""
        inputs = self.rehearse(shape)
        if self._cache.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        graph, output = self._record(partial(self._forward, inputs, shape[1]))
        self._captured[shape] = _Captured(graph=graph, inputs=inputs, output=output)

    def _record(self, work: Callable[[], VerifyOutput]) -> tuple[torch.cuda.CUDAGraph, VerifyOutput]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = work()
        finally:
            graph.capture_end()
        return graph, output

    def replay(self, sequences: Sequence[SequencePlan], step: StepShape) -> VerifyOutput:
        """Run a step; the rows of the sequences lie one behind the other, ``width`` of each, those that it does not need empty."""
        shape = self._shape_for(step)
        assert shape is not None, "a step that no graph covers"
        if shape not in self._captured:
            self.capture(shape)
        captured = self._captured[shape]
        self._update_tables(sequences)
        inputs = verify_inputs(sequences, *shape, window_pages(self._model, shape[1]))
        captured.inputs.copy_(send(inputs, self._cache.device))
        captured.graph.replay()
        return captured.output

    def _update_tables(self, sequences: Sequence[SequencePlan]) -> None:
        changed = [s for s in sequences if self._held.get(s.slot) != s.pages]
        if not changed:
            return
        self._held.update((s.slot, s.pages) for s in changed)
        width = max(len(s.pages) for s in changed)
        rows = torch.tensor([(s.slot, *s.pages, *([0] * (width - len(s.pages)))) for s in changed], dtype=torch.int32, device="cpu")
        rows = send(rows, self._cache.device)
        self._tables[rows[:, 0].long(), :width] = rows[:, 1:]

    def _forward(self, inputs: Tensor, width: int) -> VerifyOutput:
        batch = verify_batch(inputs, self._tables, self._model, width, self._max_model_len)
        streams = self._model(batch, self._cache.layers)
        logits = self._model.logits(streams, out=self._logits[: len(batch.token_ids_T)])
        return VerifyOutput(width=width, batch=batch, streams=streams, logits=logits)


def window_pages(model: DeepseekV4, width: int) -> int:
    """Return how many window pages a step of ``width`` tokens of a sequence may read or write."""
    return (model.config.window + width - 3) // WINDOW_PAGE + 2


def verify_inputs(sequences: Sequence[SequencePlan], size: int, width: int, pages: int) -> Tensor:
    """Return what a step is told, int32 [5 + width + pages, size] on the CPU; missing sequences are padding.

    The first rows are positions, slots, copies of the carry, drafts and first window pages, then come tokens by their place in a
    run; the rest, as [size, pages], are window pages.
    """
    missing = size - len(sequences)
    filled = partial(_filled, count=missing)
    tokens = [[*s.token_ids, *[0] * (width - len(s.token_ids))] for s in sequences]
    columns = [
        *filled([s.start for s in sequences], -1),
        *filled([s.slot for s in sequences], -1),
        *filled([s.carry for s in sequences], 0),
        *filled([s.drafts for s in sequences], 0),
        *filled([s.window_first for s in sequences], 0),
        *(value for place in range(width) for value in filled([ids[place] for ids in tokens], 0)),
        *(page for s in sequences for page in (*s.window_pages, *[-1] * (pages - len(s.window_pages)))),
        *[-1] * (missing * pages),
    ]
    return torch.tensor(columns, dtype=torch.int32, device="cpu").view(_COLUMNS + width + pages, size)


def _filled(values: list[int], filler: int, *, count: int) -> list[int]:
    return [*values, *[filler] * count]


def verify_batch(inputs: Tensor, tables: Tensor, model: DeepseekV4, width: int, max_model_len: int) -> PagedBatch:
    """Return a step of one known token and up to ``width - 1`` guesses of each sequence.

    Args:
        inputs: From ``verify_inputs``.
        tables: int32 [slots + 1, P], grow pages by slot.
        model: Whose step it is.
        width: Rows of each sequence.
        max_model_len: No sequence is longer.
    """
    size, device = inputs.shape[1], inputs.device
    start_S, slot_S, carry_S, drafts_S, window_first_S = inputs[:_COLUMNS]
    place_Q, every = (torch.arange(n, dtype=torch.int32, device=device) for n in (width, size * width))
    taken_SQ = (start_S[:, None] >= 0) & (place_Q <= drafts_S[:, None])
    paging = Paging(
        positions_T=torch.where(taken_SQ, start_S[:, None] + place_Q, -1).flatten(),
        sequence_T=every // width,
        slots_S=slot_S,
        first_S=start_S,
        rows_S=every[::width].contiguous(),
        lens_S=torch.ones_like(start_S) if width == 1 else taken_SQ.sum(1, dtype=torch.int32),
        drafts_S=drafts_S,
        carry_S=carry_S,
        grow_SP=tables.index_select(0, torch.where(slot_S < 0, len(tables) - 1, slot_S)),
        window_SP=inputs[_COLUMNS + width :].view(size, -1),
        window_first_S=window_first_S,
        singles=width == 1,
    )
    tokens_T = inputs[_COLUMNS : _COLUMNS + width].t().flatten().long()
    deterministic = model.numerics.deterministic
    batch = PagedBatch.of(tokens_T, paging, model.rotary, max_tokens=max_model_len, deterministic=deterministic)
    batch.most_tokens = size * width  # others replay the same graph
    return batch
