"""Saves a step of an engine to a file: one that fails, has values that are not finite, or was requested.

A step changes its sequences' compressor state; it adds rows to pages, but does not change the rows that it reads. So the recorder
copies the compressor state, which is small, before a step that may be saved, and reads the pages after it, before anything else
runs.

An error of the recorder never fails a step: it is logged. If the state before a step cannot be copied, no further step is saved.
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
from dsv4lite.engine.dump import REQUESTED, Places, StepDump, config_text, stores, versions
from dsv4lite.engine.step_graphs import GraphShape
from dsv4lite.errors import ConfigError, described
from dsv4lite.kernels.dispatch import send
from dsv4lite.models.family import Model
from dsv4lite.sampling.samples import Samples
from dsv4lite.scheduling.step_plan import NO_PAGE, StepPlan
from dsv4lite.state.store import StateCache

log = logging.getLogger("dsv4lite.engine")

MAX_STATE_BYTES = 4 << 30  # of one file; sequences that do not fit are left out
_COPY_BYTES = 32 << 20  # on the device at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """A step that is running.

    Attributes:
        slots: Compressor state of its sequences before the step.
        finite_T: bool [T], whether the final streams of each token are finite; ``None`` if they are not checked.
    """

    plan: StepPlan
    graph: GraphShape | None
    slots: dict[str, Tensor]
    finite_T: Tensor | None = None
    samples: Samples | None = None


class StepRecorder:
    """Mutable, owned by the engine's thread. While it is ``active``, a step must begin after the ``end`` of the one before.

    Args:
        config: ``dump_dir`` is the folder for the first step that fails; with ``None``, only requested steps are saved.
        model: The model that runs the steps.
        cache: Its state.

    Raises:
        ConfigError: ``dump_dir`` is not writable.
    """

    def __init__(self, config: EngineConfig, model: Model, cache: StateCache) -> None:
        self._folder = None if config.dump_dir is None else _writable(Path(config.dump_dir).absolute())
        local = Path(config.model)
        self._settings = {
            **{name: getattr(config, name) for name in ("revision", "load_format", "seed")},
            "model": str(local.absolute()) if local.exists() else config.model,
            "hf_overrides": dict(config.hf_overrides),
        }
        self._numerics, self._cache, self._config = model.numerics, cache, config_text(model.config)
        self._drafter = len(cache.layers) > len(model.shard.layers)
        self._versions = versions(cache.device)  # read now, since the device may fail later
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
        """Copy the state that a step changes, after the plan's copies of state and before its sequences run."""
        with self._harmless():
            ids = send(torch.tensor(Places.of(plan.sequences).slots, dtype=torch.int64, device="cpu"), self._cache.device)
            slots = {name: slot.index_select(0, ids) for name, slot in self._cache.slots().items()}
            self._step = _Step(plan=plan, graph=graph, slots=slots)

    def watch(self, streams_TND: Tensor | None, samples: Samples | None) -> None:
        """Check the final streams of a step, unless it was captured, and keep its samples."""
        if self._step is not None:
            with self._harmless():  # a sum takes little memory, and is not finite if a value is not
                finite_T = None if streams_TND is None else streams_TND.flatten(1).sum(1, dtype=torch.float32).isfinite()
                self._step = replace(self._step, finite_T=finite_T, samples=samples)

    def end(self) -> None:
        """Save the step if it was requested, or if a value is not finite.

        Raises:
            RuntimeError: The step failed on the device.
        """
        if self._step is not None:
            bad = _not_finite(self._step)
            self._save(f"streams or logits of sequences {sorted(bad)} are not finite" if bad else None, bad)

    def failed(self, error: BaseException) -> Path | None:
        """Save the step that ran when ``error`` was raised, if there is one; return where. Raises nothing."""
        return None if self._step is None else self._save(described(error), ())

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("a step could not be saved; no further step will be saved")
            self._folder, self._wanted, self._step = None, [], None

    def _save(self, failure: str | None, bad: Collection[int]) -> Path | None:
        """Save the step to the requested paths, and, if it is the first that failed, into the folder; return the last file."""
        step, self._step = self._step, None
        assert step is not None
        paths, self._wanted = self._wanted, []
        if failure is not None and self._folder is not None:
            # Engines that share a folder may have equal step numbers.
            paths.append(self._folder / f"step-{step.plan.step}-{uuid.uuid4().hex[:12]}.safetensors")
            self._folder = None  # steps after a failure tell little, and may be large
        saved = None
        for path in paths:
            try:
                self._write(step, REQUESTED if failure is None else failure, path, bad)
                saved = path
            except Exception:
                log.exception("step %d could not be saved as %s", step.plan.step, path)
        return saved

    def _write(self, step: _Step, reason: str, path: Path, bad: Collection[int]) -> None:
        plan = self._fitting(step.plan, bad)
        rows: dict[str, Tensor] = {}
        try:
            rows = self._state(step, plan)
        except RuntimeError as error:  # after a CUDA error no call works
            log.warning("the state cannot be read any more, so step %d is saved without it: %s", plan.step, error)
        dump = StepDump(
            reason=reason,
            plan=plan,
            drafter=self._drafter,
            copies=self._cache.spec.copies,
            left_out=len(step.plan.sequences) - len(plan.sequences),
            graph=step.graph,
            settings=self._settings,
            config=self._config,
            numerics=self._numerics,
            versions=self._versions,
            rows=rows,
        )
        dump.save(path)
        log.warning("saved step %d (%s); find its first bad op with: python -m dsv4lite replay %s", plan.step, reason, path)

    def _fitting(self, plan: StepPlan, bad: Collection[int]) -> StepPlan:
        """Return the plan of the sequences that fit into a file: those that failed, then the others in order."""
        spec, room, kept = self._cache.spec, MAX_STATE_BYTES, set()
        for sequence in sorted(plan.sequences, key=lambda s: s.seq_id not in bad):
            pages, windows = len(sequence.pages), sum(page != NO_PAGE for page in sequence.window_pages)
            size = spec.slot_bytes + pages * spec.grow_page_bytes + windows * spec.window_page_bytes
            if size <= room:
                kept.add(sequence.seq_id)
                room -= size
        kept_plans = tuple(s for s in plan.sequences if s.seq_id in kept)
        return StepPlan(step=plan.step, sequences=kept_plans, max_drafts=plan.max_drafts)

    def _state(self, step: _Step, plan: StepPlan) -> dict[str, Tensor]:
        """Copy the state of a plan's sequences to the host."""
        places = Places.of(plan.sequences)
        kept = [i for i, slot in enumerate(Places.of(step.plan.sequences).slots) if slot in places.slots]
        rows = {name: slot.cpu()[kept] for name, slot in step.slots.items()}
        for name, store, ids in stores(self._cache, places):
            memory = store.memory
            rows[name] = torch.empty(len(ids), memory.shape[1], dtype=torch.uint8, device="cpu")
            index = send(torch.tensor(ids, dtype=torch.int64, device="cpu"), memory.device)
            at_once = max(1, _COPY_BYTES // memory.shape[1])
            for begin in range(0, len(ids), at_once):
                part = slice(begin, begin + at_once)
                rows[name][part] = memory[index[part]].cpu()
        return rows


def _writable(folder: Path) -> Path:
    """Create a folder if it is missing, check that it is writable, and return it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"dump_dir={str(folder)!r} cannot be written to: {error}; choose another folder, or None") from error


def _not_finite(step: _Step) -> set[int]:
    """Return the sequences of a step with values that are not finite. Waits for the device."""
    bad = set() if step.samples is None else step.samples.not_finite()
    if step.finite_T is not None:
        parts = step.finite_T.cpu().split([len(s.token_ids) for s in step.plan.sequences])
        bad |= {s.seq_id for s, finite in zip(step.plan.sequences, parts, strict=True) if not finite.all()}
    return bad
