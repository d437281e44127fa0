"""Executes plans: packs, runs the model, samples, and hands back what the host needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from dsv4lite.config import LoadProgress, Progress
from dsv4lite.engine.balancer import Balancer
from dsv4lite.engine.graphs import DecodeGraphs
from dsv4lite.engine.packing import apply_copies, apply_saves, blank_rows, empty_last_token, pack, padding
from dsv4lite.engine.recorder import StepRecorder
from dsv4lite.engine.step_costs import measure_steps
from dsv4lite.engine.verify_graphs import VerifyGraphs, VerifyOutput
from dsv4lite.kernels.sampling import argmax_finite, token_logprobs
from dsv4lite.models.family import Batch, Model
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.pipeline import Hop, TokenRelay
from dsv4lite.planning.workspace import SCORED_ROWS
from dsv4lite.request import Logprobs, Request
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.sampling.samples import Arrival, RowSamples, Samples
from dsv4lite.sampling.state import send
from dsv4lite.scheduling.step_plan import IN_FLIGHT, UNKNOWN, Sampled, SequencePlan, StepPlan, StepShape, sampled_of
from dsv4lite.speculation.draft_policy import StepCosts
from dsv4lite.speculation.draft_state import Chain, Choose
from dsv4lite.speculation.drafters import DeviceDrafter, draft
from dsv4lite.speculation.peers import Peers
from dsv4lite.speculation.run_ends import RunEnds
from dsv4lite.state.store import StateCache
from dsv4lite.text.structured import StructuredOutputs

log = logging.getLogger("dsv4lite.engine")

_WARM_UP_TOKENS = (1, 2, 9, 16, 17, 33, 129, 513, 1025)  # one for each range of tokens that launches kernels of its own
# Up to so many pairs of token and expert, and so many for each expert, experts have kernels of their own.
_WARM_UP_PAIRS, _WARM_UP_PAIRS_EACH = (8, 16, 24, 96), (16, 32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedExperts:
    """The experts that one sequence chose, as they become known.

    Attributes:
        parts: First position, and int16 [tokens, layers, K] from there on.
        shared: Another sequence that may have run the prompt for this one, and how many tokens of it.
    """

    parts: list[tuple[int, Tensor]] = field(default_factory=list)
    shared: tuple[RoutedExperts, int] | None = None

    def by_position(self) -> Tensor | None:
        """Join the parts; a position that ran twice (after a preemption) counts once."""
        if not self.parts:
            return None
        every = self.parts
        if self.shared is not None:
            leader, tokens = self.shared
            every = [(start, part[: tokens - start]) for start, part in leader.parts if start < tokens] + every
        length = max(start + len(part) for start, part in self.parts)
        joined = torch.empty(length, *every[0][1].shape[1:], dtype=torch.int16, device="cpu")
        for start, part in every:
            joined[start : start + len(part)] = part[: max(0, length - start)]
        return joined


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flight:
    """A step on its way.

    Attributes:
        samples: Tokens of the sequences that sample, on the device.
        scores: Log-probabilities of prompt tokens, by sequence, on ranks that sample.
        routed: Experts int16 [tokens, layers, K] on the host, by sequence, with the position of the first token.
        drafts: Guesses int64 [S, K] of what follows, on their way, ``UNKNOWN`` from where there are none.
    """

    plan: StepPlan
    samples: Samples | RowSamples | None
    scores: dict[int, Logprobs] = field(default_factory=dict)
    routed: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    drafts: Arrival | None = None

    def results(self) -> dict[int, Sampled]:
        """Wait for the tokens."""
        if self.samples is None:
            return {}
        results = self.samples.to_host()
        if self.drafts is not None:
            for (seq_id, sampled), drafts in zip(results.items(), self.drafts.wait().tolist(), strict=True):
                found = drafts if drafts[-1] != UNKNOWN else takewhile(lambda token_id: token_id != UNKNOWN, drafts)
                token_id, logprob, error, after, _, drafted = sampled
                results[seq_id] = sampled_of((token_id, logprob, error, after, tuple(found), drafted))
        return results


class Runner:
    """Model, state and sampler of one rank.

    Attributes:
        hosted: Sequences that are to be told their tokens, see ``accept``.
        runs_ahead: Whether runs may be planned behind guesses that nobody has checked yet.
        warmed: What ``warm_up`` has done, in words.
        step_costs: What it has found out of how long steps take, if there are several lengths of guesses to choose from.

    Args:
        model: This rank's part of the model.
        cache: Its state.
        sampler: ``None`` on ranks that take over what another one samples.
        graphs: Recorded decode steps.
        drafter: Guesses ahead.
        plain: Recorded steps that have nothing to do with guesses, where ``graphs`` are those that have.
        mesh: The ranks of the engine, which run the same steps.
        balancer: Moves experts.
    """

    def __init__(
        self,
        model: Model,
        cache: StateCache,
        sampler: Sampler | None,
        graphs: DecodeGraphs | VerifyGraphs | None = None,
        drafter: DeviceDrafter | None = None,
        mesh: Mesh | None = None,
        balancer: Balancer | None = None,
        *,
        plain: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self._balancer = balancer
        self.cache = cache
        self.sampler = sampler
        mesh = mesh or Mesh.single()
        self._graphs, self._plain = graphs, plain
        self._sampling = graphs.sampling if graphs is not None else None
        self._drafter = drafter
        self._peers = None if drafter is None else Peers(model.share.peers, sampler, cache.device)
        self._last_token = graphs.last_token if graphs is not None else empty_last_token(cache)
        self._hop, self._relay = Hop(mesh.pp), TokenRelay(mesh, self._last_token)
        self._ends: RunEnds | None = None  # of the last step, where something may be planned behind it
        self.runs_ahead = drafter is not None and mesh.layout.world == 1
        self._requests: dict[int, Request] = {}
        self._routing: set[int] = set()
        self.hosted: set[int] = set()
        self.warmed = ""
        self.step_costs: StepCosts | None = None

    def prepare(self, grammar: StructuredOutputs) -> None:
        """Begin to compile a grammar of which a sequence will have need."""
        if self.sampler is not None:
            self.sampler.prepare(grammar)

    def add(self, seq_id: int, request: Request, index: int) -> None:
        """Learn of a sequence before its first step."""
        self._requests[seq_id] = request
        if request.params.return_routed_experts:
            self._routing.add(seq_id)
        if self.sampler is not None:
            self.sampler.add(seq_id, request, index)
            if self.sampler.state_of(seq_id).hosted:
                self.hosted.add(seq_id)
        if self._sampling is not None:
            self._sampling.add(seq_id)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; it may already be forgotten."""
        self._routing.discard(seq_id)
        self.hosted.discard(seq_id)
        if self._requests.pop(seq_id, None) is not None and self.sampler is not None:
            self.sampler.remove(seq_id)
            if self._sampling is not None:
                self._sampling.remove(seq_id)

    def accept(self, seq_id: int, token_id: int) -> None:
        """Tell a sequence the token that was sampled for it; it may be forgotten by now."""
        if self.sampler is not None:
            self.sampler.accept(seq_id, token_id)

    def close(self) -> None:
        """Free the graphs, which the process groups wait for; the rest goes in whatever order Python chooses."""
        for graphs in self._every_graph():
            graphs.forget()

    def warm_up(self, max_tokens: int, max_model_len: int, cache_dir: str, progress: Progress | None = None) -> None:
        """Make ready what steps of up to ``max_tokens`` tokens need, and record the graphs; nothing to do without kernels.

        Args:
            max_tokens: Most tokens of a step.
            max_model_len: No sequence is longer.
            cache_dir: Where compiled kernels are kept.
            progress: Told of kernels, then of shapes.
        """
        if self.cache.device.type == "cpu":
            return
        from dsv4lite.kernels.warmup import prepare, recording  # needs Triton, which is there where kernels are

        def tell(unit: str, done: int, total: int) -> None:
            if progress is not None:
                progress(LoadProgress(phase="warmup", done=done, total=total, unit=unit))

        started = time.monotonic()
        lengths = self._warm_up_lengths(max_tokens)
        recordings = self._recordings()
        with recording() as wanted, self.model.brief():
            self.rehearse(max_tokens, max_model_len)
        recorded = time.monotonic()
        prepare(wanted, cache_dir, partial(tell, "kernels"))
        prepared, total = time.monotonic(), len(lengths) + len(recordings)
        for done, length in enumerate(lengths):
            self._run_padding(length, length)
            tell("shapes", done + 1, total)
        ran = time.monotonic()
        for done, (_, capture) in enumerate(recordings):
            capture()
            tell("shapes", len(lengths) + done + 1, total)
        padding_place = len(self._last_token) - 1
        self._relay.begin([padding_place])  # connects the ranks
        self._relay.await_tokens({padding_place})
        captured = time.monotonic()
        self.step_costs = self._time_steps()
        layers = self.model.share.layers
        self.warmed = (
            f"warm-up of layers {layers.start} to {layers.stop - 1}: {recorded - started:.1f} s to find {len(wanted)} kernels, "
            f"{prepared - recorded:.1f} s to compile or load them, {ran - prepared:.1f} s to run them, "
            f"{captured - ran:.1f} s to record {len(recordings)} graphs"
        )
        if self.step_costs is not None:
            self.warmed += f", {time.monotonic() - captured:.2f} s to time steps: {self.step_costs}"
        log.info(self.warmed)

    def _time_steps(self) -> StepCosts | None:
        """Find out how long steps take, where that decides how far to guess: with others it would have to be done together."""
        verify, plain = self._graphs, self._plain
        if plain is None or not isinstance(verify, VerifyGraphs) or self.model.share.mesh.layout.world > 1:
            return None
        return measure_steps(plain, verify, self.cache, self.model.config.vocab_size)

    def rehearse(self, max_tokens: int, max_model_len: int) -> None:
        """Launch, on padding, whatever steps of up to ``max_tokens`` tokens may launch on this rank, whatever came before them."""
        for length in self._warm_up_lengths(max_tokens):
            for longest in {length, max_model_len}:
                self._run_padding(length, longest)
        for rehearse, _ in self._recordings():
            rehearse()

    def _warm_up_lengths(self, max_tokens: int) -> list[int]:
        """Return numbers of tokens that launch all kernels between them."""
        share, config = self.model.share, self.model.config
        # Where rows travel, experts get those of several ranks, or one for each expert of a token.
        each = {1, share.gathered, config.experts_per_token if share.gathered > 1 else 1}
        experts = {config.num_experts, config.num_experts // share.mesh.ep.size}
        pairs = [*_WARM_UP_PAIRS, *(most * count for most in _WARM_UP_PAIRS_EACH for count in experts)]
        tokens = [*_WARM_UP_TOKENS, *(most // max(1, config.experts_per_token) for most in pairs)]
        wanted = {-(-most // rows) for rows in each for most in tokens}
        wanted |= {most * share.mesh.layout.copies for most in _WARM_UP_TOKENS}  # each takes a part of the shared expert's
        return sorted({max_tokens, *(length for length in wanted if 0 < length < max_tokens)})

    def _every_graph(self) -> list[DecodeGraphs | VerifyGraphs]:
        """Return the recorded steps, those of the most rows first."""
        return [graphs for graphs in (self._graphs, self._plain) if graphs is not None]

    def _graphs_for(self, shape: StepShape) -> DecodeGraphs | VerifyGraphs | None:
        """Return the graphs that a step can be replayed from, if there are any: without guesses those that know of none."""
        return next((graphs for graphs in reversed(self._every_graph()) if graphs.covers(shape)), None)

    def _recordings(self) -> list[tuple[Callable[[], Tensor], Callable[[], None]]]:
        """Return how each graph is rehearsed and captured, the largest first: the others fit into the memory that it took."""
        found: list[tuple[Callable[[], Tensor], Callable[[], None]]] = []
        for graphs in self._every_graph():
            if isinstance(graphs, VerifyGraphs):
                found += [(partial(graphs.rehearse, shape), partial(graphs.capture, shape)) for shape in reversed(graphs.shapes)]
            else:
                found += [(partial(graphs.rehearse, each), partial(graphs.capture, each)) for each in reversed(graphs.shapes)]
        return found

    def _run_padding(self, tokens: int, longest: int) -> None:
        """Run a step of padding as if a sequence had as many as ``longest`` tokens."""
        batch = padding(tokens, self.model)
        batch.max_tokens = longest
        streams_TND = self._forward(batch, drafts=True)
        if self.model.share.last:
            self.model.logits(streams_TND[:1])
        if self._drafter is not None:
            self._drafter.feed(batch, streams_TND, batch.token_ids_T)
            nobody = Chain.empty(min(tokens, self.cache.sizes.slots), 1, streams_TND[0])
            # Whatever is chosen does not count: kernels are not launched while they are looked for.
            self._drafter.guess(nobody, lambda logits_SV, positions_S: torch.zeros_like(argmax_finite(logits_SV)[1]))

    def _forward(self, batch: Batch, *, drafts: bool) -> Tensor:
        """Run this stage's layers, and what a drafter keeps of them if it ``drafts``; return the streams [T, N, D] after them."""
        model, routed_TLK = self.model, batch.routed_TLK
        before_TND: Tensor | None = None
        if model.passes_taps and drafts:
            batch.taps_TK = model.empty_taps(len(batch.token_ids_T))
        rest = [x for x in (routed_TLK, batch.taps_TK) if x is not None]
        if not model.share.first:
            shape = (len(batch.token_ids_T), *model.hidden_shape)
            before_TND = torch.empty(shape, dtype=model.numerics.dtype, device=model.numerics.device)
            self._hop.take((before_TND, *rest))
        if routed_TLK is not None:
            batch.routed_TLK = routed_TLK[:, model.share.layers.start : model.share.layers.stop]
        layers = self.cache.layers if drafts else self.cache.layers[: len(model.share.layers)]
        streams_TND: Tensor = model(batch, layers, before_TND)
        batch.routed_TLK = routed_TLK
        if not model.share.last:
            self._hop.pass_on((streams_TND, *rest))
        return streams_TND

    def take_part(self, shape: StepShape) -> None:
        """Let this rank's experts work for replicas that have something to run, while its own has nothing.

        Args:
            shape: Of the step of all.
        """
        if self._balancer is not None:
            self._balancer.step()
        graphs = self._graphs_for(shape)
        if graphs is None:
            self.model.take_part(shape.tokens)
        else:
            output = graphs.replay((), shape)
            if isinstance(graphs, VerifyGraphs) and isinstance(output, VerifyOutput) and graphs.drafter is not None:
                if shape.max_drafts:
                    graphs.draft(output.out[0], shape.max_drafts)
                return
        if self._drafter is not None:
            self._drafter.take_part(shape)

    def launch(self, plan: StepPlan, recorder: StepRecorder | None = None, *, shape: StepShape | None = None) -> Flight:
        """Start a step; on a device with a stream of its own this returns before the step ends.

        Args:
            plan: What to run.
            recorder: Looks at the step, and may save it.
            shape: Of the step of all replicas, where they share experts.
        """
        if self._balancer is not None:
            self._balancer.step()
        config, numerics = self.model.config, self.model.numerics
        if self._relay.busy:
            self._relay.await_tokens({s.slot for s in plan.sequences if s.token_ids[-1] == IN_FLIGHT})
        if plan.blanks and self._drafter is not None:
            blank_rows(plan, self.cache, len(self.model.share.layers))
        apply_copies(plan, self.cache)
        shape = shape or StepShape.of((plan,), self._routing)
        graphs = self._graphs_for(shape)
        if not (plan.settled or (isinstance(graphs, VerifyGraphs) and graphs.ends is self._ends)):
            plan = self._settle(plan)
            shape = StepShape.of((plan,), self._routing)
        if recorder is not None:
            recorder.begin(plan, graphs.shape_for(shape) if isinstance(graphs, DecodeGraphs) else None)
        if isinstance(graphs, VerifyGraphs):
            return self._verify(plan, graphs, shape)
        if graphs is not None:
            return self._replay(plan, graphs, shape)
        batch = pack(plan, self.model, self._last_token, shape.tokens)
        routing = [s for s in plan.sequences if s.seq_id in self._routing] if self._routing else []
        if routing:
            size = (len(batch.token_ids_T), config.num_hidden_layers, config.experts_per_token)
            batch.routed_TLK = torch.empty(size, dtype=torch.int16, device=numerics.device)
        streams_TND = self._forward(batch, drafts=shape.max_drafts > 0)
        if recorder is not None:
            recorder.watch(streams_TND)
        apply_saves(plan, self.cache)
        if not self.model.share.last:
            self._remember(plan, [s for s in plan.sequences if s.sample])
            return Flight(plan=plan, samples=None)
        rows = [0, *accumulate(len(s.token_ids) for s in plan.sequences)][:-1]
        first_row = {s.seq_id: row for s, row in zip(plan.sequences, rows, strict=True)}
        samples = self._sample(plan, first_row, partial(self._logits, streams_TND))
        return Flight(
            plan=plan,
            samples=samples,
            drafts=self._draft(plan, shape, batch, streams_TND, rows, samples),
            scores=self._scores(plan, streams_TND, first_row),
            routed={s.seq_id: (s.start, self._routed(s, batch, first_row[s.seq_id])) for s in routing},
        )

    def _settle(self, plan: StepPlan) -> StepPlan:
        """Ask the device where runs begin that were planned before anybody knew."""
        assert self._ends is not None
        return self._ends.settle(plan)

    def _logits(self, streams_TND: Tensor, rows: list[int]) -> Tensor:
        return self.model.logits(_take(streams_TND, rows))

    def _verify(self, plan: StepPlan, graphs: VerifyGraphs, shape: StepShape) -> Flight:
        """Start a step that may check guesses from its graphs: one more samples, where it can, and others guess what follows."""
        output, sequences = graphs.replay(plan.sequences, shape), plan.sequences
        apply_saves(plan, self.cache)
        begun = None if plan.settled else Arrival(output.runs[:, : len(sequences)])
        rows = [i * output.width for i in range(len(sequences))]
        samples: Samples | RowSamples | None
        if self._sampling is not None:
            asked = self._sampling.prepare(sequences)
            if asked.hosted and begun is not None:
                plan, begun = self._settle(plan), None
                sequences = plan.sequences
            out = graphs.sample(self._sampling, asked.needs) if asked.needs else output.out
            samples = self._sampling.finish(out, output.logits, asked, sequences, rows, self._last_token, begun)
            tokens_R = out[0]
            self._remember(plan, sequences)
        else:
            if begun is not None:
                plan, begun = self._settle(plan), None
                sequences = plan.sequences
            first_row = {s.seq_id: row for s, row in zip(sequences, rows, strict=True)}
            samples, tokens_R = self._sample(plan, first_row, partial(_take, output.logits)), output.out[0]
            if isinstance(samples, Samples):
                each = [row + place for s, row in zip(sequences, rows, strict=True) for place in range(1 + s.drafts)]
                tokens_R[torch.tensor(each, dtype=torch.int64, device=tokens_R.device)] = samples.token_ids.int()
        if graphs.drafter is None:
            eager = self._draft(plan, shape, output.batch, output.streams, rows, samples)
            return Flight(plan=plan, samples=samples, drafts=eager)
        if not shape.max_drafts:
            return Flight(plan=plan, samples=samples)
        drafts = graphs.draft(tokens_R, plan.max_drafts)
        self._ends = graphs.ends
        arrival = None if samples is None else Arrival(drafts[: len(sequences)])
        return Flight(plan=plan, samples=samples, drafts=arrival)

    def _draft(
        self,
        plan: StepPlan,
        shape: StepShape,
        batch: Batch,
        streams_TND: Tensor,
        first_rows: list[int],
        samples: Samples | RowSamples | None,
    ) -> Arrival | None:
        if self._drafter is None or self._peers is None or not shape.max_drafts:
            return None
        sequences = [s for s in plan.sequences if s.sample]
        ends = self._peers.ends(len(sequences), samples) if sequences else None
        choose = self._chooser(sequences, self._peers)
        drafts = draft(self._drafter, plan, shape, batch, streams_TND, first_rows, ends, choose)
        if self.runs_ahead and shape.decodes and ends is not None and drafts is not None:
            self._ends = RunEnds.behind(sequences, ends, drafts)
        return None if drafts is None or samples is None else Arrival(drafts)

    def _chooser(self, sequences: list[SequencePlan], peers: Peers) -> Choose:
        """Return who chooses guesses of what follows some sequences."""
        sampling = self._sampling
        if sampling is None:
            return peers.chooser([s.seq_id for s in sequences])
        slots = send(torch.tensor([s.slot for s in sequences], dtype=torch.int32, device="cpu"), self._last_token.device)
        return lambda logits_SV, positions_S: peers.told(sampling.guess(logits_SV, slots, positions_S))

    def _replay(self, plan: StepPlan, graphs: DecodeGraphs, shape: StepShape) -> Flight:
        """Start a step of single tokens from its graphs: the second one samples, where more than best tokens is wanted."""
        sequences = plan.sequences
        if not self.model.share.first:
            self._hop.take((graphs.streams_before(shape),))
        output = graphs.replay(sequences, shape)
        apply_saves(plan, self.cache)
        samples: Samples | RowSamples | None = None
        if isinstance(output, Tensor):
            self._hop.pass_on((output.clone(),))  # the next replay may come before they are sent
        elif self._sampling is not None:
            rows = self._sampling.prepare(sequences)
            out = graphs.sample(self._sampling, rows.needs) if rows.needs else output.out
            samples = self._sampling.finish(out, output.logits, rows, sequences, range(len(sequences)), self._last_token)
        elif self.sampler is not None:
            seq_ids, positions = [s.seq_id for s in sequences], [s.end for s in sequences]
            if self.sampler.takes_best(seq_ids):
                samples = Samples.best(seq_ids, positions, output.out)
            else:
                samples = self.sampler.sample(output.logits[: len(seq_ids)], seq_ids, positions)
                self._write(sequences, samples)
        self._remember(plan, sequences)
        return Flight(plan=plan, samples=samples)

    def _write(self, sequences: Sequence[SequencePlan], samples: Samples) -> None:
        """Keep sampled tokens where the next step finds them."""
        places = torch.tensor([s.slot for s in sequences], dtype=torch.int64, device="cpu")
        self._last_token[send(places, self._last_token.device)] = samples.token_ids

    def _remember(self, plan: StepPlan, sequences: Sequence[SequencePlan]) -> None:
        """Let every rank that has these sequences have the tokens that were sampled for them.

        Where guesses are wanted of what follows a step, nobody begins with a token of it that the leader does not know.
        """
        if sequences and not plan.max_drafts:
            self._relay.begin([s.slot for s in sequences])

    def _sample(
        self, plan: StepPlan, first_row: dict[int, int], logits_of: Callable[[list[int]], Tensor]
    ) -> Samples | RowSamples | None:
        """Sample from the rows that want it, whose logits ``logits_of`` returns."""
        sampling = [s for s in plan.sequences if s.sample]
        if not sampling:
            return None
        each = [(s, range(s.end - 1 - s.drafts, s.end)) for s in sampling]  # positions that sample
        rows = [first_row[s.seq_id] + position - s.start for s, places in each for position in places]
        seq_ids = [s.seq_id for s, places in each for _ in places]
        positions = [position + 1 for _, places in each for position in places]
        logits = logits_of(rows)  # every rank has a part in the logits
        samples: Samples | RowSamples | None = None
        if self._sampling is not None:
            samples = self._sampling.sample(logits, sampling, self._last_token)
        elif len(rows) > len(sampling):
            drafts = [draft for s in sampling for draft in (*s.token_ids[len(s.token_ids) - s.drafts :], UNKNOWN)]
            return None if self.sampler is None else self.sampler.sample(logits, seq_ids, positions, drafts)
        elif self.sampler is not None:
            samples = self.sampler.sample(logits, seq_ids, positions)
            self._write(sampling, samples)
        self._remember(plan, sampling)
        return samples

    def _scores(self, plan: StepPlan, streams_TND: Tensor, first_row: dict[int, int]) -> dict[int, Logprobs]:
        """Score the prompt tokens that follow positions ``score`` of each sequence; on a rank that does not sample, take part."""
        found = {}
        for s in plan.sequences:
            if s.score is None:
                continue
            parts = []
            for start in range(*s.score, SCORED_ROWS):  # what rows take beside the logits is in the memory plan for so many
                stop = min(start + SCORED_ROWS, s.score[1])
                row = first_row[s.seq_id] - s.start
                logits = self.model.logits(streams_TND[row + start : row + stop])
                if self.sampler is not None:
                    parts.append([x.cpu() for x in self._score(s, logits, start + 1, stop + 1)])
            if parts:
                request = self._requests[s.seq_id]
                values, ranks, top_ids, top_values = (torch.cat(column) for column in zip(*parts, strict=True))
                mode = "raw" if request.generate else request.params.logprobs_mode
                found[s.seq_id] = Logprobs(sampled=values, ranks=ranks, token_ids=top_ids, values=top_values, mode=mode)
        return found

    def _score(self, sequence: SequencePlan, logits: Tensor, begin: int, end: int) -> tuple[Tensor, ...]:
        """Score the prompt tokens ``[begin, end)``: by the model's own distribution, or as decoding with the request's settings."""
        assert self.sampler is not None
        request, seq_id = self._requests[sequence.seq_id], sequence.seq_id
        token_ids, params = request.prompt_token_ids[begin:end], request.params
        if request.generate or params.logprobs_mode == "raw":
            targets = send(torch.tensor(token_ids, dtype=torch.int64, device="cpu"), logits.device)
            return token_logprobs(logits, targets, min(params.prompt_logprobs or 0, logits.shape[1]))
        if self._sampling is not None:
            return self._sampling.score(logits, sequence, begin, token_ids)
        return self.sampler.score(logits, seq_id, begin, token_ids)

    def _routed(self, sequence: SequencePlan, batch: Batch, first_row: int) -> Tensor:
        assert batch.routed_TLK is not None
        return batch.routed_TLK[first_row : first_row + len(sequence.token_ids)].cpu()


def _take(x: Tensor, rows: list[int]) -> Tensor:
    """Return some rows, in ascending order."""
    return x if len(rows) == len(x) else x[send(torch.tensor(rows, dtype=torch.int64, device="cpu"), x.device)]
