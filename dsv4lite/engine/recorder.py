"""Watches the steps of an engine, and saves the one that fails, has a number that is not finite, or was asked for.

A step changes its sequences' accumulators, and adds rows to pages without touching those that it reads. So a step that may be saved
copies its accumulators before it starts, which is little; pages are read when it has ended, as long as nothing else has run.

Nothing that goes wrong here becomes a step's failure: it is logged, and nothing is saved any more.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4lite.config import EngineConfig
from dsv4lite.engine.dump import REQUESTED, Places, StepDump, stores, versions
from dsv4lite.engine.step_graphs import GraphShape
from dsv4lite.errors import ConfigError
from dsv4lite.models.family import Model
from dsv4lite.sampling.samples import Samples
from dsv4lite.scheduling.step_plan import NO_PAGE, StepPlan
from dsv4lite.state.store import StateCache

log = logging.getLogger("dsv4lite.engine")

MAX_STATE_BYTES = 4 << 30  # of one file; sequences that do not fit are left out of it
_COPY_BYTES = 32 << 20  # on the device at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """A step on its way.

    Attributes:
        carries: What its sequences' accumulators held when it began.
        finite_T: bool [T], whether the final streams of each token are; ``None`` while they are not known.
    """

    plan: StepPlan
    graph: GraphShape | None
    carries: dict[str, Tensor]
    finite_T: Tensor | None = None


class StepRecorder:
    """Mutable, owned by the engine's thread.

    While it is ``active``, a step must start when the one before has been looked at, and be looked at before the next one starts.

    Args:
        config: ``dump_dir`` is where the first step that fails is saved; ``None`` for nowhere.
        model: What steps run on.
        cache: Its state.

    Raises:
        ConfigError: Nothing can be written to ``dump_dir``.
    """

    def __init__(self, config: EngineConfig, model: Model, cache: StateCache) -> None:
        self._folder = None if config.dump_dir is None else _writable(Path(config.dump_dir).absolute())
        local = Path(config.model)
        self._settings = {
            **{name: getattr(config, name) for name in ("revision", "load_format", "seed")},
            "model": str(local.absolute()) if local.exists() else config.model,
            "hf_overrides": dict(config.hf_overrides),
        }
        self._numerics, self._cache = model.numerics, cache
        self._drafter = len(cache.layers) > len(model.share.layers)
        self._versions = versions(cache.device)  # now: a device that has failed does not tell
        self._wanted: list[Path] = []
        self._step: _Step | None = None

    @property
    def active(self) -> bool:
        """Whether the next step may be saved."""
        return self._folder is not None or bool(self._wanted)

    def request(self, path: Path) -> None:
        """Save the next step."""
        self._wanted.append(path)

    def begin(self, plan: StepPlan, graph: GraphShape | None) -> None:
        """Keep what a step will change; the plan's copies of state are done, its sequences have not begun."""
        with self._harmless():
            slots = torch.tensor(Places.of(plan.sequences).slots, dtype=torch.int64, device=self._cache.device)
            kept = {name: carry.index_select(0, slots) for name, carry in self._cache.slots().items()}
            self._step = _Step(plan=plan, graph=graph, carries=kept)

    def watch(self, streams_TND: Tensor) -> None:
        """Look at the final streams of a step that is no graph; results are looked at anyway."""
        if self._step is not None:
            with self._harmless():  # sums need no room to speak of, and are not finite where a number is not
                finite_T = streams_TND.flatten(1).sum(1, dtype=torch.float32).isfinite()
                self._step = replace(self._step, finite_T=finite_T)

    def end(self, samples: Samples | None) -> None:
        """Save the step if it was asked for, or if a number is not finite.

        Raises:
            RuntimeError: The step itself failed, which shows here at the latest.
        """
        step = self._step
        if step is None:
            return
        ill = _not_finite(step, samples)
        with self._harmless():
            if self._wanted:
                self._save_wanted(step, REQUESTED, ill)
            if self._folder is not None and ill:
                self._save_failure(step, f"streams or logits of sequences {sorted(ill)} are not finite", ill)
        self._step = None

    def failed(self, error: BaseException) -> Path | None:
        """Save the step that was on its way when ``error`` was raised, if there is one; return where. Raises nothing."""
        step, self._step = self._step, None
        if step is None:
            return None
        reason = f"{type(error).__name__}: {error}"
        with self._harmless():
            self._save_wanted(step, reason, ())
            if self._folder is not None:
                return self._save_failure(step, reason, ())
        return None

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("a step could not be saved; none will be any more")
            self._folder, self._wanted, self._step = None, [], None

    def _save_wanted(self, step: _Step, reason: str, ill: Collection[int]) -> None:
        paths, self._wanted = self._wanted, []
        for path in paths:
            self._save(step, reason, path, ill)

    def _save_failure(self, step: _Step, reason: str, ill: Collection[int]) -> Path:
        """Save into the folder, once: what follows a failure tells little, and may be much."""
        assert self._folder is not None
        folder, self._folder = self._folder, None
        # Engines may share a folder, and count their steps alike.
        return self._save(step, reason, folder / f"step-{step.plan.step}-{uuid.uuid4().hex[:12]}.safetensors", ill)

    def _save(self, step: _Step, reason: str, path: Path, ill: Collection[int]) -> Path:
        plan = self._fitting(step.plan, ill)
        left_out = len(step.plan.sequences) - len(plan.sequences)
        rows: dict[str, Tensor] = {}
        try:
            rows = self._state(step, plan)
        except RuntimeError as error:  # nothing works after a CUDA error
            log.warning("the state cannot be read any more, so step %d is saved without: %s", plan.step, error)
        dump = StepDump(
            reason=reason,
            plan=plan,
            drafter=self._drafter,
            copies=self._cache.spec.copies,
            left_out=left_out,
            graph=step.graph,
            settings=self._settings,
            numerics=self._numerics,
            versions=self._versions,
            rows=rows,
        )
        dump.save(path)
        log.warning("saved step %d, %s; find its first bad op with: python -m dsv4lite replay %s", plan.step, reason, path)
        return path

    def _fitting(self, plan: StepPlan, ill: Collection[int]) -> StepPlan:
        """Return the plan of the sequences that there is room for: those that failed, then the others as they come."""
        spec, room, kept = self._cache.spec, MAX_STATE_BYTES, set()
        for sequence in sorted(plan.sequences, key=lambda s: s.seq_id not in ill):
            pages, windows = len(sequence.pages), sum(page != NO_PAGE for page in sequence.window_pages)
            size = spec.slot_bytes + pages * spec.grow_page_bytes + windows * spec.window_page_bytes
            if size <= room:
                kept.add(sequence.seq_id)
                room -= size
        kept_plans = tuple(s for s in plan.sequences if s.seq_id in kept)
        return StepPlan(step=plan.step, sequences=kept_plans, max_drafts=plan.max_drafts)

    def _state(self, step: _Step, plan: StepPlan) -> dict[str, Tensor]:
        """Copy to the host what a plan's sequences used."""
        places = Places.of(plan.sequences)
        kept = [i for i, slot in enumerate(Places.of(step.plan.sequences).slots) if slot in places.slots]
        rows = {name: carry.cpu()[kept] for name, carry in step.carries.items()}
        for name, store, ids in stores(self._cache, places):
            memory = store.memory
            rows[name] = torch.empty(len(ids), memory.shape[1], dtype=torch.uint8, device="cpu")
            index = torch.tensor(ids, dtype=torch.int64, device=memory.device)
            at_once = max(1, _COPY_BYTES // memory.shape[1])
            for begin in range(0, len(ids), at_once):
                part = slice(begin, begin + at_once)
                rows[name][part] = memory[index[part]].cpu()
        return rows


def _writable(folder: Path) -> Path:
    """Return a folder, made if it is missing, to which a file can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"dump_dir={str(folder)!r} cannot be written to: {error}; choose another folder, or None") from error


def _not_finite(step: _Step, samples: Samples | None) -> set[int]:
    """Return the sequences of a step that have a number which is not finite. Waits for the device."""
    ill: set[int] = set()
    if step.finite_T is not None:
        flags, row = step.finite_T.tolist(), 0
        for sequence in step.plan.sequences:
            end = row + len(sequence.token_ids)
            if not all(flags[row:end]):
                ill.add(sequence.seq_id)
            row = end
    if samples is not None:
        ill |= samples.ill()
    return ill
