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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from dsv4lite.engine.graph_set import Captured, GraphSet, rows_of_ints
from dsv4lite.engine.graphs import SharedMemory
from dsv4lite.engine.packing import empty_last_token, graph_sizes
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.runs import TOLD, PlacedRuns, place_runs, place_runs_ref
from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling.rows import EVERYTHING, Needs
from dsv4lite.models.family import Batch, Model
from dsv4lite.paging import window_pages
from dsv4lite.sampling.device import DeviceSampler
from dsv4lite.sampling.state import send
from dsv4lite.scheduling.step_plan import SequencePlan, StepShape
from dsv4lite.speculation.draft_state import Chain
from dsv4lite.speculation.drafters import DeviceDrafter
from dsv4lite.speculation.run_ends import RunEnds
from dsv4lite.state.store import StateCache

_WIDTHS = (1, 2, 3, 4, 5, 9)  # rows of a sequence that have graphs of their own, besides the most that there can be


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyOutput:
    """What a replay leaves; valid until the next one, for those who work on the same stream.

    Attributes:
        width: Rows of each sequence.
        batch: The step's tokens, in B x width rows.
        runs: int32 [3 + width, B]: where each begins, how many guesses it has, from which copy of the carry, and its tokens.
        streams: The final streams of each row.
        logits: float32 [B x width, V].
        best: Of these: the largest, its token, and whether a row can be sampled from.
        out: int32 [3, B x width], the best token of each row, and twice whether it can be sampled from: as ``sample_rows`` says it.
    """

    width: int
    batch: Batch
    runs: Tensor
    streams: Tensor
    logits: Tensor
    best: tuple[Tensor, Tensor, Tensor]
    out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Verified(Captured[VerifyOutput]):
    shape: tuple[int, int]
    beginning: torch.cuda.CUDAGraph | None


class VerifyGraphs(GraphSet):
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

    Attributes:
        ends: Where the runs of the step that ran last end. A plan may leave it to these where runs of the next one begin.
    """

    def __init__(
        self,
        model: Model,
        cache: StateCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        widths: Sequence[int],
        max_tokens: int,
        sampling: DeviceSampler | None = None,
        drafter: DeviceDrafter | None = None,
    ) -> None:
        pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None
        super().__init__(cache, max_model_len, empty_last_token(cache), sampling, pool)
        self.drafter = drafter
        self._model = model
        self._peers = model.share.peers
        most_later = 0 if drafter is None else drafter.most  # than the host knows: where runs follow others that are on their way
        self._window_pages = window_pages(model.config.window, widths[-1] + most_later)
        self._captured: dict[tuple[int, int], _Verified] = {}
        self._rounds: dict[int, torch.cuda.CUDAGraph] = {}
        self._last: _Verified | None = None
        sizes = graph_sizes(max_num_seqs)
        self.shapes = [(size, width) for width in widths for size in sizes if size * width <= max_tokens]
        self._allocate(max_num_seqs)
        self.shared = SharedMemory(last_token=self.last_token, logits=self._logits, pool=self._pool)

    def _allocate(self, max_num_seqs: int) -> None:
        """Make the places of what a step leaves to the next graph, whichever the graphs are."""
        c, device, dtype = self._model.config, self._cache.device, self._model.numerics.dtype
        rows = max((size * width for size, width in self.shapes), default=0)
        self._logits = torch.empty(rows, c.vocab_size, dtype=torch.float32, device=device)
        self._streams = torch.empty(rows, *self._model.hidden_shape, dtype=dtype, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        rounds = 0 if self.drafter is None else -(-self.drafter.most // self.drafter.round)
        guesses = 0 if self.drafter is None else rounds * self.drafter.round
        self._drafts = torch.zeros(guesses, max_num_seqs, dtype=torch.int64, device=device)
        self._heads = torch.zeros(3, max_num_seqs, dtype=torch.int64, device=device)
        self.ends = RunEnds(columns={}, heads=self._heads, drafts=self._drafts)
        if self.drafter is None:
            return
        like_ND = torch.empty(self._model.hidden_shape, dtype=dtype, device=device)
        self._chain = Chain.empty(max_num_seqs, self._window_pages, like_ND)
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
        inputs = verify_inputs((), *shape, self._window_pages, {}).to(self._cache.device)
        output = self._forward(inputs, shape[1], real=False)
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
        self._captured[shape] = _Verified(shape=shape, graph=graph, inputs=inputs, output=output, beginning=beginning)

    def replay(self, sequences: Sequence[SequencePlan], step: StepShape) -> VerifyOutput:
        """Run a step; the rows of the sequences lie one behind the other, ``width`` of each, those that it does not need empty."""
        shape = self._shape_for(step)
        assert shape is not None, "a step that no graph covers"
        if shape not in self._captured:
            heads, drafts = self._heads.clone(), self._drafts.clone()
            self.capture(shape)
            self._heads.copy_(heads)  # this step may begin there
            self._drafts.copy_(drafts)
        captured = self._last = self._captured[shape]
        self._tables.update(sequences)
        inputs = verify_inputs(sequences, *shape, self._window_pages, self.ends.columns)
        self.ends = replace(self.ends, columns={s.seq_id: column for column, s in enumerate(sequences)})
        captured.inputs.copy_(send(inputs, self._cache.device))
        captured.graph.replay()
        return captured.output

    def sample(self, sampling: DeviceSampler, needs: Needs) -> Tensor:
        """Sample from what ``replay`` has just left; return what ``sample_rows`` returns."""
        captured = self._last
        assert captured is not None
        work = partial(self._sample, sampling, captured.inputs, captured.output, needs)
        return self._replay_sampling(captured, needs, work)

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

    def _forward(self, inputs: Tensor, width: int, *, real: bool = True) -> VerifyOutput:
        """One step on ``inputs`` of ``verify_inputs``; one that is not ``real`` knows its rows even if its kernels do not run."""
        placed = place_runs(inputs, width, self.last_token, self._heads, self._drafts)
        if not real:
            placed = place_runs_ref(inputs, width, self.last_token, self._heads, self._drafts)
        batch = verify_batch(inputs, placed, self._tables.tensor, self._model, self._max_model_len)
        rows = len(batch.token_ids_T)
        streams = self._model(batch, self._cache.layers)
        logits = self._model.logits(streams, out=self._logits[:rows])
        best = argmax_finite(logits)
        _, token_ids, finite = best
        if width == 1:  # behind others the next step begins where ``_begin`` says
            self.last_token.index_copy_(0, placed.places_S, token_ids)
        usable = finite.int()
        out, kept = torch.stack([token_ids.int(), usable, usable]), self._streams[:rows].copy_(streams)
        return VerifyOutput(width=width, batch=batch, runs=placed.runs_XS, streams=kept, logits=logits, best=best, out=out)

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
        size = len(tokens_T) // output.width
        chain = self._chain.first(size)
        chain.begin(output.batch, streams, tokens_T.view(size, output.width))
        right_S = chain.positions_S - output.batch.paging.first_S
        self._heads[:, :size].copy_(torch.stack((chain.positions_S + 1, right_S, chain.tokens_S)))
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


def verify_inputs(sequences: Sequence[SequencePlan], size: int, width: int, pages: int, columns: Mapping[int, int]) -> Tensor:
    """Return what a step is told, int32 [6 + width + pages, size] on the CPU; missing sequences are padding.

    The first rows are positions, slots, copies of the carry, drafts, first window pages and, of runs with ``slack``, the column of
    the run that each follows, else -1. Then come tokens by their place in a run; the rest, as [size, pages], are window pages.
    """
    missing = size - len(sequences)
    nobody, nothing = [-1] * missing, [0] * missing
    _, slots, starts, token_ids, _, window_first, window_pages, _, _, drafts, carries, _, slacks = (
        zip(*sequences, strict=True) if sequences else ((),) * 13
    )
    tokens = [ids if len(ids) == width else (*ids, *[0] * (width - len(ids))) for ids in token_ids]
    tails = [(-1,) * (pages - count) for count in range(pages + 1)]
    values = [
        *(*starts, *nobody, *slots, *nobody, *carries, *nothing, *drafts, *nothing, *window_first, *nothing),
        *[-1 if slack is None else columns[s[0]] for s, slack in zip(sequences, slacks, strict=True)],
        *nobody,
        *(chain.from_iterable((*column, *nothing) for column in zip(*tokens, strict=True)) if tokens else nothing * width),
        *chain.from_iterable([held + tails[len(held)] for held in window_pages]),
        *nobody * pages,
    ]
    return rows_of_ints(values, size)


def verify_batch(inputs: Tensor, placed: PlacedRuns, tables: Tensor, model: Model, max_model_len: int) -> Batch:
    """Return a step of one known token and guesses of each sequence.

    Args:
        inputs: From ``verify_inputs``.
        placed: Where their rows stand.
        tables: int32 [slots + 1, P], grow pages by slot.
        model: Whose step it is.
        max_model_len: No sequence is longer.
    """
    size = inputs.shape[1]
    width = len(placed.tokens_T) // size
    start_S, drafts_S, carry_S = placed.runs_XS[:3]
    paging = Paging(
        positions_T=placed.positions_T,
        sequence_T=placed.sequence_T,
        slots_S=inputs[1],
        first_S=start_S,
        rows_S=placed.rows_S,
        lens_S=placed.lens_S,
        drafts_S=drafts_S,
        carry_S=carry_S,
        grow_SP=tables.index_select(0, placed.places_S),
        window_SP=inputs[TOLD + width :].view(size, -1),
        window_first_S=inputs[4],
        singles=width == 1,
    )
    batch = model.batch(placed.tokens_T, paging, max_tokens=max_model_len)
    batch.most_tokens = size * width  # others replay the same graph
    return batch
