"""Runs a saved step again, op by op, each beside its reference, and names the first op that is wrong.

Model and state are the saved ones. Nothing is sampled: the model's own drafter continues the best tokens. A step that was replayed
from a CUDA graph of width 1 runs as it was captured, padding included, but without the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4lite.config import MTP, DSpark, EngineConfig
from dsv4lite.debug.watch import OpFailed, OpReport, OpWatch
from dsv4lite.device import choose_device, own_thread
from dsv4lite.engine.dump import REQUESTED, Places, StepDump, config_text, stores, versions
from dsv4lite.engine.packing import PageTables, pack, step_batch, step_inputs
from dsv4lite.engine.step_graphs import GraphShape
from dsv4lite.errors import ConfigError
from dsv4lite.kernels.spans import place_spans
from dsv4lite.models.batch import Batch
from dsv4lite.models.family import Family, Model
from dsv4lite.paging import window_pages
from dsv4lite.scheduling.step_plan import StepPlan, StepShape
from dsv4lite.speculation.drafters import draft, make_drafter
from dsv4lite.state.paging import first_rows
from dsv4lite.state.spec import StateSizes
from dsv4lite.state.store import StateCache
from dsv4lite.weights.formats import QuantMethod
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.source import ModelSource

_MOST_NAMED = 8  # parameters in a note


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The result of a replay; prints as a table by kind of op, and the first that is wrong.

    Attributes:
        reason: Why the step was saved.
        notes: Differences from the saved step, and limits of the replay.
        ops: In the order in which they ran.
    """

    reason: str
    notes: tuple[str, ...]
    ops: tuple[OpReport, ...]

    @property
    def first(self) -> OpReport | None:
        """The first op that is wrong."""
        return next((op for op in self.ops if op.problem is not None), None)

    def table(self) -> str:
        """Return every output of every op, a line each."""
        lines = [f"{'place':<28} {'op':<22} {'output':<10} {'difference':>10} {'not finite':>12} {'reference':>12}"]
        for op in self.ops:
            head, mark = f"{op.place:<28} {op.op:<22}", "" if op.problem is None else "  <--"
            if op.error is not None:
                lines.append(f"{head} {op.error}{mark}")
            for d in op.differences:
                apart, other = ("-", "-") if d.relative is None else (f"{d.relative:.2g}", f"{d.reference_not_finite}")
                lines.append(f"{head} {d.output:<10} {apart:>10} {d.not_finite:>12} {other:>12}{mark}")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [f"{'op':<22} {'calls':>6} {'beside a reference':>19} {'largest difference':>19} {'wrong':>6}"]
        for name in dict.fromkeys(op.op for op in self.ops):
            calls = [op for op in self.ops if op.op == name]
            apart = [d.relative for op in calls for d in op.differences if d.relative is not None]
            largest = f"{max(apart):.2g}" if apart else "-"
            wrong = sum(op.problem is not None for op in calls)
            lines.append(f"{name:<22} {len(calls):>6} {sum(op.compared for op in calls):>19} {largest:>19} {wrong:>6}")
        lines += ["", f"saved because {self.reason}", *(f"note: {note}" for note in self.notes)]
        return "\n".join([*lines, "no op is wrong" if self.first is None else f"first op that is wrong: {self.first}"])


def replay(
    path: str | Path,
    *,
    model: str | None = None,
    device: str | None = None,
    family: Family | None = None,
    quant_formats: Mapping[str, QuantMethod] | None = None,
) -> ReplayReport:
    """Run a saved step again.

    While it runs, op names in the modules of models refer to watched ops (``debug/watch.py``): one thread may call it at a time.

    Args:
        model: Folder or hub id of the checkpoint; default is the one that the step ran on.
        family: Family of the model, if the package has none for it.
        quant_formats: As in ``EngineConfig``.
        device: Default is the step's own device if this machine has it, else the CPU in the same arithmetic.

    Raises:
        ConfigError: The file is not a saved step, the model is another one, or there is no such device.
        CheckpointError: The model cannot be loaded.
    """
    dump = StepDump.load(path)
    if not dump.plan.sequences:
        raise ConfigError(f"dump={str(path)!r} has no sequence: the state of each was larger than a file may be")
    settings = {**dump.settings, "family": family, "quant_formats": quant_formats or {}} | (
        {} if model is None else {"model": model}
    )
    saved = dump.numerics.device
    home = str(saved) if saved.type == "cpu" or (saved.index or 0) < torch.cuda.device_count() else "cpu"
    where = choose_device(EngineConfig.from_dict({**settings, "device": home if device is None else device}))
    with own_thread(where, deterministic=dump.numerics.deterministic), torch.inference_mode():
        step = rebuild(dump, load_model(settings, replace(dump.numerics, device=where), drafter=dump.drafter))
        watch = OpWatch(step.model, step.cache, rows=len(step.batch.token_ids_T), tokens=dump.plan.num_tokens)
        with watch.watching(), suppress(OpFailed):  # the report's last line says which, and how
            drafts = dump.drafter and step.plan.max_drafts > 0  # else the drafter did not run
            layers = step.cache.layers if drafts else step.cache.layers[: len(step.model.shard.layers)]
            streams_TND = step.model(step.batch, layers)
            logits_TV = step.model.logits(streams_TND)
            if drafts:
                _draft(step, streams_TND, logits_TV)
        return ReplayReport(reason=dump.reason, notes=_notes(dump, where, watch), ops=tuple(watch.reports))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RebuiltStep:
    """A step that is ready to run: a model, the saved state, the plan of its sequences there, and tokens, padding last."""

    model: Model
    cache: StateCache
    plan: StepPlan
    batch: Batch


def load_model(settings: Mapping[str, Any], numerics: Numerics, *, drafter: bool = False) -> Model:
    """Load the model that a dump's settings name, in some arithmetic, with or without its own drafter.

    Raises:
        CheckpointError: It cannot be loaded.
    """
    config = EngineConfig.from_dict(settings)
    return ModelSource.open(config).build(numerics, with_mtp=drafter, seed=config.seed)


def rebuild(dump: StepDump, model: Model) -> RebuiltStep:
    """Restore a saved step with its state on the model's device.

    Raises:
        ConfigError: The model is another one.
    """
    here = config_text(model.config)
    _require_same(dump, [f"{name} was {was}, is {here[name]}" for name, was in dump.config.items() if here.get(name, was) != was])
    places = Places.of(dump.plan.sequences)
    cache, plan = _state(dump, places, model), places.renumber(dump.plan)
    if dump.graph is not None and dump.graph.width == 1:
        return RebuiltStep(model=model, cache=cache, plan=plan, batch=_captured(plan, dump.graph, model, cache))
    return RebuiltStep(model=model, cache=cache, plan=plan, batch=pack(plan, model, cache))


def _require_same(dump: StepDump, wrong: Sequence[str]) -> None:
    """Raise ``ConfigError`` if something of a model is wrong for a saved step."""
    if wrong:
        raise ConfigError(
            f"the saved step does not fit the model ({'; '.join(wrong[:3])}): give the checkpoint that the step ran on,"
            f" which was {dump.settings.get('model')!r}, as --model"
        )


def _draft(step: RebuiltStep, streams_TND: Tensor, logits_TV: Tensor) -> None:
    """Let the model's own drafter store its rows of a step and draft, as if every draft token in the step had been rejected."""
    model, plan = step.model, step.plan
    own = MTP(MTP.most) if model.config.drafter == "mtp" else DSpark(model.config.draft_block)
    rows = first_rows(plan.sequences)
    begins = [row + len(s.token_ids) - 1 - s.drafts for s, row in zip(plan.sequences, rows, strict=True) if s.sample]
    best_S = logits_TV[begins].argmax(-1)
    ends = (torch.zeros_like(best_S), best_S) if begins else None
    drafter, shape = make_drafter(own, model, step.cache), StepShape.of((plan,))
    draft(drafter, plan, shape, step.batch, streams_TND, rows, ends, lambda logits_SV, _: logits_SV.argmax(-1))


def _captured(plan: StepPlan, graph: GraphShape, model: Model, cache: StateCache) -> Batch:
    """Return the batch of a captured step of width 1, padding included."""
    device, tables = cache.device, PageTables(cache, graph.max_model_len)
    tables.update(plan.sequences)
    inputs = step_inputs(plan.sequences, graph.sequences, 1, window_pages(model.config.window), {}).to(device)
    resolved = (torch.zeros(3, 1, dtype=torch.int64, device=device), torch.zeros(0, 1, dtype=torch.int64, device=device))
    return step_batch(inputs, place_spans(inputs, 1, cache.last_token, *resolved), tables.tensor, model, graph.max_model_len)


def _state(dump: StepDump, places: Places, model: Model) -> StateCache:
    """Return a state that holds the rows of a dump, and nothing else."""
    sizes = StateSizes(grow_pages=len(places.pages), window_pages=max(1, len(places.windows)), slots=len(places.slots), snapshots=0)
    cache = StateCache.allocate(replace(model.state_spec, copies=dump.copies), sizes, model.numerics.device)
    if not dump.rows:
        return cache
    homes = {name: store.memory[: len(ids)] for name, store, ids in stores(cache, places)} | cache.slots()
    shapes, saved = ({name: tuple(x.shape) for name, x in rows.items()} for rows in (homes, dump.rows))
    wrong = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
    _require_same(dump, [f"{name} is {saved.get(name)}, and {shapes.get(name)} here" for name in wrong])
    for name, home in homes.items():
        home.copy_(dump.rows[name])
    return cache


def _notes(dump: StepDump, device: torch.device, watch: OpWatch) -> tuple[str, ...]:
    notes = []
    if bad := watch.bad_parameters:
        more = len(bad) - _MOST_NAMED
        named = ", ".join(bad[:_MOST_NAMED])
        notes.append(f"parameters that are not finite: {named}" + (f" and {more} more" if more > 0 else ""))
    if not dump.rows:
        notes.append("the device was lost before its state could be saved: it is empty here")
    if dump.left_out:
        notes.append(f"{dump.left_out} other sequences of the step are left out: the file would have been too large")
    if dump.reason != REQUESTED and all(op.problem is None for op in watch.reports):
        notes.append("the failure for which the step was saved did not happen again")
    if not any(op.compared for op in watch.reports):
        notes.append(f"there are no kernels on {device.type!r}: only numbers that are not finite were looked for")
    here = versions(device)
    notes += [f"{name} was {was}, is {here.get(name, 'none')}" for name, was in dump.versions.items() if here.get(name) != was]
    return tuple(notes)
