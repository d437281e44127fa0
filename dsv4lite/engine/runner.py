"""Executes step plans on one rank: packs a batch, runs the model, samples, drafts, and starts to copy the results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4lite.config import LoadProgress, Progress
from dsv4lite.engine.balancer import Balancer
from dsv4lite.engine.choices import Chosen, empty_choices, replayed_choices, sequence_choices
from dsv4lite.engine.packing import pack, padding, prepare_state, save_snapshots
from dsv4lite.engine.recorder import StepRecorder
from dsv4lite.engine.resident import Ask, Resident
from dsv4lite.engine.step_costs import measure_steps
from dsv4lite.engine.step_graphs import GraphShape, StepGraphs, StepOutput
from dsv4lite.kernels.dispatch import send
from dsv4lite.kernels.sampling import argmax_finite, token_logprobs
from dsv4lite.models.batch import Batch
from dsv4lite.models.family import Model
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.pipeline import StageLink, TokenBroadcast
from dsv4lite.planning.workspace import SCORED_ROWS, scored_logits
from dsv4lite.request import Logprobs, Replay, Request
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.sampling.samples import GivenSpan, HostCopy, Samples, Scores, slice_spans
from dsv4lite.scheduling.step_plan import IN_FLIGHT, UNKNOWN, Sampled, StepPlan, StepShape, sampled_of
from dsv4lite.speculation.controller import StepCosts
from dsv4lite.speculation.draft_state import AcceptedLengths, DraftState
from dsv4lite.speculation.drafters import DeviceDrafter, draft
from dsv4lite.state.paging import first_rows
from dsv4lite.state.store import StateCache
from dsv4lite.text.structured import StructuredOutputs

if TYPE_CHECKING:
    from dsv4lite.kernels.warmup import Compiler

log = logging.getLogger("dsv4lite.engine")

# Numbers of tokens to warm up: one from each range of numbers that launches its own kernels.
_WARM_UP_TOKENS = (1, 2, 3, 5, 9, 16, 17, 33, 65, 129, 257, 513, 1025)
# The expert op changes kernels at these numbers of (token, expert) pairs, and at these numbers of pairs per expert.
_WARM_UP_PAIRS, _WARM_UP_PAIRS_EACH = (8, 16, 24, 96), (16, 32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """The results of a step on the host, by sequence id.

    Attributes:
        sampled: Tokens of the sequences that sample.
        scores: Log-probabilities of prompt tokens.
        chosen: Chosen experts and index entries of the sequences that record them.
    """

    sampled: dict[int, Sampled] = field(default_factory=dict)
    scores: dict[int, Logprobs] = field(default_factory=dict)
    chosen: dict[int, Chosen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFlightStep:
    """A step that has been launched.

    Attributes:
        plan: The step's plan.
        samples: Tokens of the sequences that sample, being copied to the host; ``None`` on ranks that do not sample.
        scores: Log-probabilities of prompt tokens, being copied to the host.
        chosen: See ``StepResult``.
        drafts: int64 [S, K], draft tokens for the next step, being copied to the host; ``UNKNOWN`` where there are none.
    """

    plan: StepPlan
    samples: Samples | None
    scores: Scores
    chosen: dict[int, Chosen]
    drafts: HostCopy | None

    def wait(self) -> StepResult:
        """Wait for the device; return the results."""
        sampled = {} if self.samples is None else self.samples.to_host()
        if self.drafts is not None:
            for (seq_id, one), drafts in zip(sampled.items(), self.drafts.wait().tolist(), strict=True):
                found = drafts if drafts[-1] != UNKNOWN else takewhile(lambda token_id: token_id != UNKNOWN, drafts)
                token_id, logprob, error, after, _, drafted = one
                sampled[seq_id] = sampled_of((token_id, logprob, error, after, tuple(found), drafted))
        return StepResult(sampled=sampled, scores=self.scores.to_host(), chosen=self.chosen)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ForwardOutput:
    """Output of the model's forward pass of a step, before sampling.

    Attributes:
        first_rows: Row of each sequence's first token.
        batch, streams_TND: Tokens and final streams of a step that ran eagerly, or of a captured step with prompts.
        captured: Output of a captured step without prompts, on the last stage.
    """

    first_rows: Sequence[int]
    batch: Batch | None = None
    streams_TND: Tensor | None = None
    captured: StepOutput | None = None


class Runner:
    """Model, state and sampler of one rank.

    Attributes:
        recorder: Saves steps to files, if the engine has one rank in its own thread.
        warmed: Report of ``warm_up`` with the times of its phases, for the log.
        step_costs: Step times that ``warm_up`` measured, if steps can run with and without draft tokens.

    Args:
        sampler: ``None`` on ranks that do not sample.
        drafter: The model's own drafter, on the device.
        mesh: The ranks of the engine, which run the same steps.
        balancer: Moves experts between ranks.
        resident: Updates weights, and releases and restores memory; an engine's runner has one.
    """

    def __init__(
        self,
        model: Model,
        cache: StateCache,
        sampler: Sampler | None,
        graphs: StepGraphs | None = None,
        drafter: DeviceDrafter | None = None,
        mesh: Mesh | None = None,
        balancer: Balancer | None = None,
        resident: Resident | None = None,
    ) -> None:
        mesh = mesh or Mesh()
        self.model, self.cache, self.sampler = model, cache, sampler
        self._graphs = graphs
        self._drafter = drafter
        self._balancer = balancer
        self._resident = resident
        self._link, self._tokens = StageLink(mesh.pp), TokenBroadcast(mesh, cache.last_token)
        self._accepted: AcceptedLengths | None = None  # of the last step that drafted
        self._requests: dict[int, Request] = {}
        self._recording: set[int] = set()
        self._replays: dict[int, Replay] = {}
        self.recorder: StepRecorder | None = None
        self.warmed = ""
        self.step_costs: StepCosts | None = None

    def prepare(self, grammar: StructuredOutputs) -> None:
        """Start to compile a grammar that a sequence will need."""
        if self.sampler is not None:
            self.sampler.compile(grammar)

    def add(self, seq_id: int, request: Request, index: int) -> None:
        """Register a sequence before its first step."""
        self._requests[seq_id] = request
        if request.params.records_choices:
            self._recording.add(seq_id)
        if request.replay is not None:
            self._replays[seq_id] = request.replay
        if self.sampler is not None:
            self.sampler.add(seq_id, request, index)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._recording.discard(seq_id)
        self._replays.pop(seq_id, None)
        if self._requests.pop(seq_id, None) is not None and self.sampler is not None:
            self.sampler.remove(seq_id)

    def accept(self, seq_id: int, token_id: int) -> None:
        """Pass a sampled token to the sequence's rules on the host; unknown sequences are ignored."""
        if self.sampler is not None:
            self.sampler.accept(seq_id, token_id)

    def ask(self, ask: Ask) -> list[Any]:
        """Call a method of the ``Resident``; return its result in a list of one rank. No step may be in flight.

        Raises:
            Exception: What the method raises.
        """
        assert self._resident is not None
        return [getattr(self._resident, ask.method)(*ask.arguments)]

    def close(self) -> None:
        """Free the graphs, before the process groups, whose abort waits for them; the rest may be freed in any order."""
        if self._graphs is not None:
            self._graphs.forget()

    def warm_up(
        self, max_tokens: int, max_model_len: int, cache_dir: str, compiler: Compiler | None, progress: Progress | None = None
    ) -> None:
        """Compile and run the kernels of all steps of up to ``max_tokens`` tokens, and capture the graphs; on a CPU do nothing.

        Compiled kernels are kept in ``cache_dir``; see ``prepare`` for ``compiler``. ``progress`` is called with counts of kernels,
        then of shapes.
        """
        if self.cache.device.type == "cpu":
            return
        from dsv4lite.kernels.warmup import prepare, recording  # needs Triton, which only GPUs require

        def report(unit: str, done: int, total: int) -> None:
            if progress is not None:
                progress(LoadProgress(phase="warmup", done=done, total=total, unit=unit))

        started = time.monotonic()
        lengths, graphs = self._warm_up_lengths(max_tokens), self._graphs
        # The largest shapes first: smaller ones reuse the memory of their pool.
        captures: list[Callable[[], None]] = []
        if graphs is not None:
            captures += [graphs.reserve_prompts, *(partial(graphs.capture, shape) for shape in reversed(graphs.shapes))]
        with recording() as wanted, self.model.skip_repeated_layers():
            self.dry_run(max_tokens, max_model_len)
        found = time.monotonic()
        mesh = self.model.shard.mesh
        rank, ranks = mesh.rank, mesh.layout.world
        progressed = partial(report, "kernels")
        prepare(wanted, cache_dir, progressed, rank=rank, ranks=ranks, device=self.cache.device, compiler=compiler)
        prepared, total = time.monotonic(), len(lengths) + len(captures)
        with self.model.skip_repeated_layers():
            for done, length in enumerate(lengths):
                self._run_padding(length, length)
                report("shapes", done + 1, total)
        ran = time.monotonic()
        for done, capture in enumerate(captures):
            capture()
            report("shapes", len(lengths) + done + 1, total)
        padding_place = self.cache.sizes.slots
        self._tokens.begin([padding_place])  # connects the ranks
        self._tokens.await_tokens({padding_place})
        captured = time.monotonic()
        if graphs is not None and ranks == 1:  # several ranks would have to replay the same steps at the same time
            self.step_costs = measure_steps(graphs, self.cache, self.model.config.vocab_size)
        layers = self.model.shard.layers
        self.warmed = (
            f"warm-up of layers {layers.start} to {layers.stop - 1}: {found - started:.1f} s to find {len(wanted)} kernels, "
            f"{prepared - found:.1f} s to compile or load them, {ran - prepared:.1f} s to run them, "
            f"{captured - ran:.1f} s to capture {len(captures)} graphs"
        )
        if self.step_costs is not None:
            self.warmed += f", {time.monotonic() - captured:.2f} s to time steps: {self.step_costs}"
        log.info(self.warmed)

    def dry_run(self, max_tokens: int, max_model_len: int) -> None:
        """Launch, on padding, every kernel that steps of up to ``max_tokens`` tokens may launch on this rank."""
        for length in self._warm_up_lengths(max_tokens):
            for longest in {length, max_model_len}:
                self._run_padding(length, longest)
        longest = 2 * max_tokens  # kernels may depend on the power of two of the longest sequence
        while longest < max_model_len:
            self._run_padding(max_tokens, longest)
            longest *= 2
        if self._graphs is not None:
            for shape in self._graphs.shapes:
                self._graphs.dry_run(shape)
            self._graphs.prompts.dry_run()

    def _warm_up_lengths(self, max_tokens: int) -> list[int]:
        """Return numbers of tokens whose steps together launch all kernels."""
        shard, config = self.model.shard, self.model.config
        # Per token of this rank, experts run one row, the rows of all ranks gathered, or one row for each expert (all-to-all).
        each = {1, shard.gathered, config.experts_per_token if shard.gathered > 1 else 1}
        experts = {config.num_experts, config.num_experts // shard.mesh.ep.size}
        pairs = [*_WARM_UP_PAIRS, *(most * count for most in _WARM_UP_PAIRS_EACH for count in experts)]
        tokens = [*_WARM_UP_TOKENS, *(most // max(1, config.experts_per_token) for most in pairs)]
        wanted = {-(-most // rows) for rows in each for most in tokens}
        wanted |= {most * shard.mesh.layout.copies for most in _WARM_UP_TOKENS}  # each runs the shared expert on its part
        return sorted({max_tokens, *(length for length in wanted if 0 < length < max_tokens)})

    def _run_padding(self, tokens: int, longest: int) -> None:
        """Run a step of padding, with tables for sequences of up to ``longest`` tokens.

        The step is one prompt, or, if ``longest > tokens``, sequences of two tokens each: attention has a kernel for each case.
        """
        follow = longest > tokens  # the tokens follow earlier ones, and only the device knows their positions
        batch = padding(tokens, self.model, sequences=max(1, tokens // 2) if follow else 1)
        batch.max_tokens = longest
        if follow:
            batch.paging = replace(batch.paging, host_spans=None)
        streams_TND = self._forward(batch, drafts=True)
        if self.model.shard.last:
            logits = self.model.logits(streams_TND[:1])
            if self.sampler is not None and self._graphs is None:  # graphs capture their own sampling
                self.sampler.warm_up(logits)
        if self._drafter is not None:
            self._drafter.feed(batch, streams_TND, batch.token_ids_T)
            none = DraftState.empty(min(tokens, self.cache.sizes.slots), 1, streams_TND[0])
            # The draft token is 0: in a dry run no kernel has written the best one.
            self._drafter.draft(none, lambda logits_SV, positions_S: torch.zeros_like(argmax_finite(logits_SV)[1]))

    def _forward(self, batch: Batch, *, drafts: bool) -> Tensor:
        """Run this stage's layers, with the drafter's state if the step ``drafts``; return the final streams [T, N, D]."""
        model = self.model
        before_TND: Tensor | None = None
        if model.passes_taps and drafts:
            batch.taps_TK = model.empty_taps(len(batch.token_ids_T))
        rest = [*(() if batch.chosen is None else batch.chosen.tensors), *(() if batch.taps_TK is None else (batch.taps_TK,))]
        if not model.shard.first:
            shape = (len(batch.token_ids_T), *model.hidden_shape)
            before_TND = torch.empty(shape, dtype=model.numerics.dtype, device=model.numerics.device)
            self._link.receive((before_TND, *rest))
        layers = self.cache.layers if drafts else self.cache.layers[: len(model.shard.layers)]
        streams_TND: Tensor = model(batch, layers, before_TND)
        if not model.shard.last:
            self._link.send((streams_TND, *rest))
        return streams_TND

    def take_part(self, shape: StepShape) -> None:
        """Run this rank's experts in a step of the other replicas, of this shape; this replica has no sequences to run."""
        if self._balancer is not None:
            self._balancer.step()
        graphs, graph = self._graphs, self._graph_for(shape)
        if graphs is not None and graph is not None:
            output = graphs.replay((), graph)
            if graph.drafts:
                if shape.max_drafts and isinstance(output, StepOutput):
                    graphs.draft((), output.out[0], shape.max_drafts)
                return
        elif graphs is not None and (captured := graphs.prompts_for(shape)) is not None:
            graphs.run_prompts((), captured)
        else:
            self.model.take_part(shape.tokens)
        if self._drafter is not None:
            self._drafter.take_part(shape)

    def launch(self, plan: StepPlan, shape: StepShape | None = None) -> InFlightStep:
        """Start a step; on a GPU, return before it ends. ``shape`` is the joint shape of all replicas if they share experts."""
        if self._balancer is not None:
            self._balancer.step()
        if self._tokens.pending:
            self._tokens.await_tokens({s.slot for s in plan.sequences if s.token_ids[-1] == IN_FLIGHT})
        prepare_state(plan, self.cache, len(self.model.shard.layers))
        joint, shape = shape, shape or StepShape.of((plan,), self._recording)
        graph = self._graph_for(shape)
        if shape.unresolved and (graph is None or self._graphs is None or self._graphs.accepted is not self._accepted):
            plan, shape = self._resolve(plan, joint)
            graph = self._graph_for(shape)
        recorder = self.recorder if self.recorder is not None and self.recorder.active else None
        if recorder is not None:
            recorder.begin(plan, graph)
        if graph is not None:
            forward = self._replay(plan, graph)
        else:
            prompts = None if recorder is not None else self._run_prompts(plan, shape)
            forward = prompts or self._run_eagerly(plan, shape)
        save_snapshots(plan, self.cache)
        if shape.unresolved and self.sampler is not None and self.sampler.prepare(plan.sequences).needs_positions:
            plan, shape = self._resolve(plan, joint)  # the host needs the positions of some rows
        samples = self._sample(plan, shape, forward)
        if recorder is not None:
            recorder.watch(forward.streams_TND, samples)
        if not plan.max_drafts:  # after a step that drafts, tokens come from the next plan or from the accepted lengths
            self._tokens.begin(s.slot for s in plan.sequences if s.sample)
        drafts = self._draft(plan, shape, forward, samples)
        return InFlightStep(
            plan=plan, samples=samples, drafts=drafts, scores=self._scores(plan, forward), chosen=self._chosen(plan, forward)
        )

    def _graph_for(self, shape: StepShape) -> GraphShape | None:
        """Return the captured shape for a step; ``None`` if the step runs eagerly."""
        return None if self._graphs is None else self._graphs.shape_for(shape)

    def _resolve(self, plan: StepPlan, joint: StepShape | None) -> tuple[StepPlan, StepShape]:
        """Return the plan with the positions and tokens of the accepted lengths, and its shape. Waits for the device.

        The ``joint`` shape of replicas that share experts keeps its sizes: the other replicas do not know the accepted lengths.
        """
        if any(s.unresolved is not None for s in plan.sequences):
            assert self._accepted is not None
            plan = self._accepted.resolve(plan)
        return plan, StepShape.of((plan,), self._recording) if joint is None else joint._replace(unresolved=False)

    def _run_eagerly(self, plan: StepPlan, shape: StepShape) -> _ForwardOutput:
        """Run the model on a batch made for the plan."""
        config = self.model.config
        batch = pack(plan, self.model, self.cache, shape.tokens)
        tokens, device = len(batch.token_ids_T), self.cache.device
        if any(s.seq_id in self._recording for s in plan.sequences):
            entries = device if self.model.shard.mesh.pp.size > 1 else torch.device("cpu")
            batch.chosen = empty_choices(config, tokens, max(s.end for s in plan.sequences), device, entries)
        if any(s.seq_id in self._replays for s in plan.sequences):
            spans = [(s.start, s.end, self._replays.get(s.seq_id)) for s in plan.sequences]
            batch.given = replayed_choices(spans, config, tokens, device)
        streams_TND = self._forward(batch, drafts=shape.max_drafts > 0)
        return _ForwardOutput(batch=batch, first_rows=first_rows(plan.sequences), streams_TND=streams_TND)

    def _run_prompts(self, plan: StepPlan, shape: StepShape) -> _ForwardOutput | None:
        """Run a captured step with prompts; return ``None`` if no shape fits, or if a sequence replays given choices."""
        graphs, captured = self._graphs, None if self._graphs is None else self._graphs.prompts_for(shape)
        if graphs is None or captured is None or any(s.seq_id in self._replays for s in plan.sequences):
            return None
        batch, streams_TND = graphs.run_prompts(plan.sequences, captured)
        return _ForwardOutput(batch=batch, first_rows=first_rows(plan.sequences), streams_TND=streams_TND)

    def _replay(self, plan: StepPlan, graph: GraphShape) -> _ForwardOutput:
        """Run the captured step of a shape."""
        assert self._graphs is not None
        if not self.model.shard.first:
            self._link.receive((self._graphs.streams_before(graph),))
        output = self._graphs.replay(plan.sequences, graph)
        first_rows = range(0, graph.width * len(plan.sequences), graph.width)
        if isinstance(output, Tensor):
            self._link.send((output.clone(),))  # the next replay may overwrite the streams before they are sent
            return _ForwardOutput(first_rows=first_rows)
        return _ForwardOutput(first_rows=first_rows, captured=output)

    def _sample(self, plan: StepPlan, shape: StepShape, forward: _ForwardOutput) -> Samples | None:
        """Sample the next tokens of the sequences that sample; return ``None`` on ranks that do not sample."""
        captured, sampler, first_rows = forward.captured, self.sampler, forward.first_rows
        if captured is not None and self._graphs is not None:
            if sampler is None:
                return None
            sequences = plan.sequences  # all of them sample
            asked = sampler.prepare(sequences)
            masks, failures = sampler.rules(asked, sequences, first_rows)
            out = self._graphs.sample(asked.needs, masks) if asked.needs else captured.out
            placed = HostCopy(captured.placed.spans_XS[:, : len(sequences)]) if shape.unresolved else None
            return sampler.finish(out, captured.logits, captured.best, asked, sequences, first_rows, failures, placed)
        if forward.streams_TND is None or not self.model.shard.last:
            return None
        each = [(s, row + s.end - 1 - s.drafts - s.start) for s, row in zip(plan.sequences, first_rows, strict=True) if s.sample]
        if not each:
            return None
        rows = [row + place for s, row in each for place in range(1 + s.drafts)]
        streams = forward.streams_TND
        if len(rows) < len(streams):
            streams = streams[send(torch.tensor(rows, dtype=torch.int64, device="cpu"), streams.device)]
        logits = self.model.logits(streams)  # a collective call
        return None if sampler is None else sampler.sample(logits, [s for s, _ in each], self.cache.last_token)

    def _draft(self, plan: StepPlan, shape: StepShape, forward: _ForwardOutput, samples: Samples | None) -> HostCopy | None:
        """Draft the next tokens with the model's own drafter, if the step asks for drafts."""
        if self._drafter is None or not shape.max_drafts:
            return None
        sequences = [s for s in plan.sequences if s.sample]
        if forward.captured is not None and self._graphs is not None:
            tokens_R = (forward.captured if samples is None else samples).out[0]  # the value is ignored on ranks that do not sample
            drafts_SK: Tensor | None = self._graphs.draft(sequences, tokens_R, plan.max_drafts)[: len(sequences)]
            self._accepted = self._graphs.accepted
        else:
            assert forward.batch is not None and forward.streams_TND is not None
            # All ranks that work on the same tokens run the drafter; the first of them samples.
            axis, device, sampler = self.model.shard.mesh.peers, self.cache.device, self.sampler
            accepted: tuple[Tensor, Tensor] | None = None
            if sequences:
                none = torch.empty(2, len(sequences), dtype=torch.int64, device=device)
                counts_S, tokens_S = axis.broadcast_tokens(none if samples is None else torch.stack(samples.accepted()))
                accepted = counts_S, tokens_S
            slots_S = send(torch.tensor([s.slot for s in sequences], dtype=torch.int32, device="cpu"), device)

            def choose(logits_SV: Tensor, positions_S: Tensor) -> Tensor:
                if sampler is None:
                    return axis.broadcast_tokens(torch.empty_like(slots_S, dtype=torch.int64))
                return axis.broadcast_tokens(sampler.draft(logits_SV, slots_S, positions_S))

            where = forward.batch, forward.streams_TND, forward.first_rows
            drafts_SK = draft(self._drafter, plan, shape, *where, accepted, choose)
            if plan.decodes and accepted is not None and drafts_SK is not None:  # the next step may be planned ahead
                self._accepted = AcceptedLengths.of(sequences, accepted, drafts_SK)
        return None if drafts_SK is None or samples is None else HostCopy(drafts_SK)

    def _scores(self, plan: StepPlan, forward: _ForwardOutput) -> Scores:
        """Score the prompt tokens after the positions ``score`` of each sequence; all ranks run the output head.

        Tokens of many sequences share a call. Raw log-probabilities and processed ones (those of decoding) have calls of their own.
        """
        found, streams_TND = Scores(), forward.streams_TND
        if streams_TND is None or not self.model.shard.last:
            return found
        kinds: dict[bool, list[tuple[GivenSpan, int]]] = {False: [], True: []}
        for s, first_row in zip(plan.sequences, forward.first_rows, strict=True):
            if s.score is not None:
                request, (begin, end) = self._requests[s.seq_id], s.score
                processed = not request.generate and request.params.logprobs_mode == "processed"
                given = GivenSpan(s, begin + 1, request.prompt_token_ids[begin + 1 : end + 1])
                kinds[processed].append((given, first_row - s.start))
        for processed, spans in kinds.items():
            rows = [row + position - 1 for given, row in spans for position in range(given.position, given.end)]
            wanted = [self._requests[given.sequence.seq_id].params.prompt_logprobs or 0 for given, _ in spans]
            # Raw lists of best tokens copy the logits, and the memory plan has room for few such rows.
            most = SCORED_ROWS if not processed and any(wanted) else scored_logits(streams_TND.device)
            for start in range(0, len(rows), most):
                part = torch.tensor(rows[start : start + most], dtype=torch.int64, device="cpu")
                logits = self.model.logits(streams_TND[send(part, streams_TND.device)])
                if self.sampler is None:
                    continue
                some = slice_spans([given for given, _ in spans], start, start + most)
                tops = [self._requests[given.sequence.seq_id].params.prompt_logprobs or 0 for given in some]
                if processed:
                    scores = self.sampler.score(logits, some)
                else:
                    token_ids = torch.tensor([t for given in some for t in given.token_ids], dtype=torch.int64, device="cpu")
                    scores = token_logprobs(logits, send(token_ids, logits.device), min(max(tops), logits.shape[1]))
                found.add(some, tops, "processed" if processed else "raw", scores)
        return found

    def _chosen(self, plan: StepPlan, forward: _ForwardOutput) -> dict[int, Chosen]:
        """Return the chosen experts and index entries of the sequences that record them."""
        if forward.batch is None or forward.batch.chosen is None or not self.model.shard.last:
            return {}
        choices, config = forward.batch.chosen, self.model.config
        return {
            s.seq_id: sequence_choices(choices, row, s.start, s.end, config)
            for s, row in zip(plan.sequences, forward.first_rows, strict=True)
            if s.seq_id in self._recording
        }
