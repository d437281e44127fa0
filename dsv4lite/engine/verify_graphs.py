"""Steps that check guesses as CUDA graphs: one per number of sequences, and number of tokens that each may run.

A graph covers the model over one known token and guesses of each sequence, as many as it has places for, and the best token of each
row; a sequence with fewer guesses leaves places empty, and so do missing sequences. Behind it come graphs of their own:

* where more is asked for than best tokens, one that samples, as behind steps of single tokens (``graphs.py``);
* with a drafter on the device, one that finds out how many guesses of each sequence were right, lets the drafter know of the step,
  and puts what it goes on from where the next kind finds it (``chain.py``);
* one that runs a round of guessing, the same whatever the step was like, replayed as often as guesses are wanted.

Nobody asks the host in between. Every graph is a function of tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from dsv4lite.engine.cache import GROW_PAGE, WINDOW_PAGE, StateCache
from dsv4lite.engine.chain import Chain
from dsv4lite.engine.drafters import DeviceDrafter
from dsv4lite.engine.graphs import SharedMemory
from dsv4lite.engine.plan import empty_last_token, graph_sizes
from dsv4lite.engine.sampling_device import DeviceSampler
from dsv4lite.engine.sampling_state import send
from dsv4lite.engine.step import SequencePlan, StepShape
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling_rows import EVERYTHING, Needs
from dsv4lite.models.batch import PagedBatch
from dsv4lite.models.deepseek_v4 import DeepseekV4

T = TypeVar("T")

_COLUMNS = 5  # position, slot, copy of the carry, drafts, first window page
_WIDTHS = (1, 2, 3, 4, 5, 9)  # rows of a sequence that have graphs of their own, besides the most that there can be


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyOutput:
    """What a replay leaves; valid until the next one, for those who work on the same stream.

    Attributes:
        width: Rows of each sequence.
        batch: The step's tokens, in B x width rows.
        streams: The final streams of each row.
        logits: float32 [B x width, V].
        best: Of these: the largest, its token, and whether a row can be sampled from.
        out: int32 [3, B x width], the best token of each row, and twice whether it can be sampled from: as ``sample_rows`` says it.
    """

    width: int
    batch: PagedBatch
    streams: Tensor
    logits: Tensor
    best: tuple[Tensor, Tensor, Tensor]
    out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Captured:
    shape: tuple[int, int]
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: VerifyOutput
    beginning: torch.cuda.CUDAGraph | None
    samplings: dict[Needs, tuple[torch.cuda.CUDAGraph, Tensor]] = field(default_factory=dict)


class VerifyGraphs:
    """Graphs of one model and one state; mutable, owned by the engine's thread, captured on its stream.

    Args:
        model: Runs on paged state.
        cache: The state.
        max_num_seqs: Most sequences of a step.
        max_model_len: Longest sequence.
        widths: Most tokens of a sequence in the graphs, ascending; see ``verify_widths``.
        max_tokens: Most rows of a step; one that would need more of them runs without a graph.
        sampling: Samples behind the steps, if somebody does on the device.
        drafter: Guesses behind them, if that is to be recorded; together with those of the ranks that work on the same tokens.
    """

    def __init__(
        self,
        model: DeepseekV4,
        cache: StateCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        widths: Sequence[int],
        max_tokens: int,
        sampling: DeviceSampler | None = None,
        drafter: DeviceDrafter | None = None,
    ) -> None:
        self.sampling, self.drafter = sampling, drafter
        self._model = model
        self._peers = model.share.peers
        self._cache = cache
        self.last_token = empty_last_token(cache)
        self._max_model_len = max_model_len
        self._window_pages = window_pages(model, widths[-1])
        self._tables = torch.zeros(cache.sizes.slots + 1, -(-max_model_len // GROW_PAGE), dtype=torch.int32, device=cache.device)
        self._held: dict[int, tuple[int, ...]] = {}
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._rounds: dict[int, torch.cuda.CUDAGraph] = {}
        self._last: _Captured | None = None
        self._pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None
        sizes = graph_sizes(max_num_seqs)
        self.shapes = [(size, width) for width in widths for size in sizes if size * width <= max_tokens]
        self._allocate(max_num_seqs)
        self.shared = SharedMemory(last_token=self.last_token, logits=self._logits, pool=self._pool)

    def _allocate(self, max_num_seqs: int) -> None:
        """Make the places of what a step leaves to the next graph, whichever the graphs are."""
        c, device, dtype = self._model.config, self._cache.device, self._model.numerics.dtype
        rows = max((size * width for size, width in self.shapes), default=0)
        self._logits = torch.empty(rows, c.vocab_size, dtype=torch.float32, device=device)
        self._streams = torch.empty(rows, c.streams, c.hidden_size, dtype=dtype, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        if self.drafter is None:
            return
        like_ND = torch.empty(c.streams, c.hidden_size, dtype=dtype, device=device)
        self._chain = Chain.empty(max_num_seqs, self._window_pages, like_ND)
        rounds = -(-self.drafter.most // self.drafter.round)
        self._drafts = torch.zeros(rounds * self.drafter.round, max_num_seqs, dtype=torch.int64, device=device)
        self._made = torch.arange(self.drafter.round, device=device)  # where the next round puts its guesses

    def covers(self, step: StepShape) -> bool:
        """Whether a step can be replayed: one known token and guesses of each sequence, and nothing wanted but what follows."""
        return step.decodes and self._shape_for(step) is not None

    def _shape_for(self, step: StepShape) -> tuple[int, int] | None:
        return next((shape for shape in self.shapes if shape[0] >= step.sequences and shape[1] >= step.width), None)

    def forget(self) -> None:
        """Free the graphs. The process groups of collectives in them cannot end before."""
        self._last = None
        self._captured.clear()
        self._rounds.clear()

    def rehearse(self, shape: tuple[int, int]) -> Tensor:
        """Run a step of sequences that are all padding, and all that may come behind it; return its inputs.

        Args:
            shape: Number of sequences, and of tokens of each.
        """
        inputs = verify_inputs((), *shape, self._window_pages).to(self._cache.device)
        output = self._forward(inputs, shape[1])
        if self.sampling is not None:
            self._sample(self.sampling, inputs, output, EVERYTHING)
        if self.drafter is not None:
            self._begin(self.drafter, output)
            self._guess(self.drafter, shape[0], real=False)
        return inputs

    def capture(self, shape: tuple[int, int]) -> None:
        """Record the graphs of a shape; runs them once before, so that everything they need is compiled and loaded."""
        inputs = self.rehearse(shape)
        if self._cache.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        graph, output = self._record(partial(self._forward, inputs, shape[1]))
        beginning = None
        if self.drafter is not None:
            beginning, _ = self._record(partial(self._begin, self.drafter, output))
            if shape[0] not in self._rounds:
                self._rounds[shape[0]], _ = self._record(partial(self._guess, self.drafter, shape[0]))
        self._captured[shape] = _Captured(shape=shape, graph=graph, inputs=inputs, output=output, beginning=beginning)

    def _record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
        return graph, result

    def replay(self, sequences: Sequence[SequencePlan], step: StepShape) -> VerifyOutput:
        """Run a step; the rows of the sequences lie one behind the other, ``width`` of each, those that it does not need empty."""
        shape = self._shape_for(step)
        assert shape is not None, "a step that no graph covers"
        if shape not in self._captured:
            self.capture(shape)
        captured = self._last = self._captured[shape]
        self._update_tables(sequences)
        inputs = verify_inputs(sequences, *shape, self._window_pages)
        captured.inputs.copy_(send(inputs, self._cache.device))
        captured.graph.replay()
        return captured.output

    def sample(self, sampling: DeviceSampler, needs: Needs) -> Tensor:
        """Sample from what ``replay`` has just left; return what ``sample_rows`` returns."""
        captured = self._last
        assert captured is not None
        if needs not in captured.samplings:
            captured.samplings[needs] = self._record(partial(self._sample, sampling, captured.inputs, captured.output, needs))
        graph, out = captured.samplings[needs]
        graph.replay()
        return out

    def draft(self, tokens_R: Tensor, count: int) -> Tensor:
        """Guess what follows the step that ``replay`` has just run.

        Args:
            tokens_R: What was sampled from each of its rows, any integers; does not count on ranks that do not sample.
            count: How many guesses in a row; with 0 the drafter only learns of the step.

        Returns:
            int64 [B, count], ``UNKNOWN`` from where there are none.
        """
        captured = self._last
        assert captured is not None and captured.beginning is not None and self.drafter is not None
        self._tokens[: len(tokens_R)].copy_(tokens_R)
        captured.beginning.replay()
        size, count = captured.shape[0], min(count, self.drafter.most)
        for _ in range(0, count, self.drafter.round):
            self._rounds[size].replay()
        return self._drafts[:count, :size].t().contiguous()

    def _update_tables(self, sequences: Sequence[SequencePlan]) -> None:
        changed = [s for s in sequences if self._held.get(s.slot) is not s.pages]
        if not changed:
            return
        self._held.update((s.slot, s.pages) for s in changed)
        width = max(len(s.pages) for s in changed)
        rows = torch.tensor([(s.slot, *s.pages, *([0] * (width - len(s.pages)))) for s in changed], dtype=torch.int32, device="cpu")
        rows = send(rows, self._cache.device)
        self._tables[rows[:, 0].long(), :width] = rows[:, 1:]

    def _forward(self, inputs: Tensor, width: int) -> VerifyOutput:
        """One step on ``inputs`` of ``verify_inputs``."""
        batch, places_S = verify_batch(inputs, self._tables, self.last_token, self._model, width, self._max_model_len)
        rows = len(batch.token_ids_T)
        streams = self._model(batch, self._cache.layers)
        logits = self._model.logits(streams, out=self._logits[:rows])
        best = argmax_finite(logits)
        _, token_ids, finite = best
        if width == 1:  # behind others the next step is planned when their tokens are known
            self.last_token.index_copy_(0, places_S, token_ids)
        usable = finite.int()
        out, kept = torch.stack([token_ids.int(), usable, usable]), self._streams[:rows].copy_(streams)
        return VerifyOutput(width=width, batch=batch, streams=kept, logits=logits, best=best, out=out)

    def _sample(self, sampling: DeviceSampler, inputs: Tensor, output: VerifyOutput, needs: Needs) -> Tensor:
        width, positions_T = output.width, output.batch.paging.positions_T
        slots_T = torch.where(positions_T.view(-1, width) < 0, -1, inputs[1][:, None]).flatten()
        place_T = torch.arange(width, dtype=torch.int32, device=inputs.device).repeat(inputs.shape[1])
        run = (output.batch.token_ids_T.int(), place_T)
        return sampling.run(output.logits, output.best, slots_T, positions_T, self.last_token, needs, run)

    def _begin(self, drafter: DeviceDrafter, output: VerifyOutput) -> None:
        """Let the drafter know of a step whose sampled tokens are in their place, and put down where it is to go on."""
        tokens_T, streams = self._peers.broadcast(self._tokens[: len(output.streams)], 0), output.streams
        drafter.feed(output.batch, streams, tokens_T)
        self._chain.first(len(tokens_T) // output.width).begin(output.batch, streams, tokens_T.view(-1, output.width))
        self._made.copy_(torch.arange(drafter.round, device=tokens_T.device))

    def _guess(self, drafter: DeviceDrafter, size: int, *, real: bool = True) -> None:
        """Run a round of guessing from there; one that is not ``real`` goes on with token 0, for its kernels may not have run."""
        chain, sampling = self._chain.first(size), self.sampling

        def choose(logits_SV: Tensor, positions_S: Tensor) -> Tensor:
            tokens_S = argmax_finite(logits_SV)[1] if sampling is None else sampling.guess(logits_SV, chain.slots_S, positions_S)
            told_S = self._peers.broadcast(tokens_S, 0)
            return told_S if real else torch.zeros_like(told_S)

        found_SG = drafter.guess(chain, choose)
        self._drafts[:, :size].index_copy_(0, self._made, found_SG.t())
        self._made.add_(drafter.round)


def verify_widths(max_drafts: int, *, adaptive: bool) -> tuple[int, ...]:
    """Return how many tokens of a sequence have graphs of their own, ascending; a step takes the next larger number.

    Args:
        max_drafts: Most guesses of a sequence.
        adaptive: Whether steps often have fewer.
    """
    return (*(width for width in (_WIDTHS if adaptive else _WIDTHS[:1]) if width <= max_drafts), 1 + max_drafts)


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


def verify_batch(
    inputs: Tensor, tables: Tensor, last_token: Tensor, model: DeepseekV4, width: int, max_model_len: int
) -> tuple[PagedBatch, Tensor]:
    """Return a step of one known token and up to ``width - 1`` guesses of each sequence.

    Args:
        inputs: From ``verify_inputs``.
        tables: int32 [slots + 1, P], grow pages by slot.
        last_token: int64 [slots + 1], the token sampled last in each slot, where ``inputs`` has ``IN_FLIGHT``.
        model: Whose step it is.
        width: Rows of each sequence.
        max_model_len: No sequence is longer.

    Returns:
        The batch, and int64 [B], the row of ``tables`` of each sequence; that of padding is the last one.
    """
    size, device = inputs.shape[1], inputs.device
    start_S, slot_S, carry_S, drafts_S, window_first_S = inputs[:_COLUMNS]
    places_S = torch.where(slot_S < 0, len(tables) - 1, slot_S).long()
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
        grow_SP=tables.index_select(0, places_S),
        window_SP=inputs[_COLUMNS + width :].view(size, -1),
        window_first_S=window_first_S,
        singles=width == 1,
    )
    tokens_SQ = inputs[_COLUMNS : _COLUMNS + width].t().long()
    tokens_SQ = torch.where(tokens_SQ < 0, last_token[places_S][:, None], tokens_SQ)
    deterministic = model.numerics.deterministic
    batch = PagedBatch.of(tokens_SQ.flatten(), paging, model.rotary, max_tokens=max_model_len, deterministic=deterministic)
    batch.most_tokens = size * width  # others replay the same graph
    return batch, places_S
