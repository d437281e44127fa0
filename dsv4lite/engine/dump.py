"""A step in a file: what ran, what it read, and in which versions; ``engine/replay.py`` runs it again.

    header "dsv4lite"            json: reason, plan, model, numerics, versions
    layers.I.window              uint8 [pages, bytes], the window pages that the plan names, by ascending id
    layers.I.entries, .keys      the same of the grow pages
    layers.I.carry, .key_carry   float32 [slots, A, 3, C], the accumulators before the step

A step changes its sequences' accumulators, and adds to pages without changing what it has read there. So a step that may be saved
copies accumulators before it starts; pages are read afterwards, as long as nothing else has run.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsv4lite.config import EngineConfig
from dsv4lite.engine.cache import LayerCache, StateCache
from dsv4lite.engine.step import NO_PAGE, SequencePlan, StepPlan
from dsv4lite.errors import ConfigError
from dsv4lite.kernels.rows import RowStore
from dsv4lite.models.deepseek_v4 import DeepseekV4
from dsv4lite.weights.quant import Numerics

log = logging.getLogger("dsv4lite.engine")

HEADER = "dsv4lite"
VERSION = 1
_PACKAGES = ("dsv4lite", "torch", "triton", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The state that a plan's sequences use, ascending ids."""

    slots: tuple[int, ...]
    windows: tuple[int, ...]
    pages: tuple[int, ...]

    @classmethod
    def of(cls, plan: StepPlan) -> Places:
        """Collect what the sequences name."""
        return cls(
            slots=tuple(sorted({s.slot for s in plan.sequences})),
            windows=tuple(sorted({page for s in plan.sequences for page in s.window_pages if page != NO_PAGE})),
            pages=tuple(sorted({page for s in plan.sequences for page in s.pages})),
        )

    def renumber(self, plan: StepPlan) -> StepPlan:
        """Return the plan for a state that holds these places and nothing else."""
        slot, window, page = ({old: new for new, old in enumerate(ids)} for ids in (self.slots, self.windows, self.pages))
        window[NO_PAGE] = NO_PAGE
        return StepPlan(
            step=plan.step,
            sequences=tuple(
                s._replace(
                    slot=slot[s.slot],
                    pages=tuple(page[p] for p in s.pages),
                    window_pages=tuple(window[p] for p in s.window_pages),
                )
                for s in plan.sequences
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepDump:
    """One step.

    Attributes:
        reason: Why it was saved.
        plan: Its sequences.
        settings: ``EngineConfig`` fields that say which model it was.
        numerics: Its arithmetic, and where it ran.
        versions: Of packages, driver and device.
        rows: Tensors by the names above; empty where the device could not be read any more.
    """

    reason: str
    plan: StepPlan
    settings: Mapping[str, Any]
    numerics: Numerics
    versions: Mapping[str, str]
    rows: Mapping[str, Tensor]

    def save(self, path: Path) -> None:
        """Write the file; a half-written one has another name.

        Raises:
            OSError, SafetensorError: It cannot be written.
        """
        header = {
            "version": VERSION,
            "reason": self.reason,
            "step": self.plan.step,
            "sequences": [s._asdict() for s in self.plan.sequences],
            "settings": dict(self.settings),
            "numerics": {f.name: _plain(getattr(self.numerics, f.name)) for f in fields(self.numerics)},
            "versions": dict(self.versions),
        }
        partly = path.with_name(path.name + ".part")
        save_file({name: rows.contiguous() for name, rows in self.rows.items()}, partly, {HEADER: json.dumps(header)})
        os.replace(partly, path)

    @classmethod
    def load(cls, path: str | Path) -> StepDump:
        """Read a file.

        Raises:
            ConfigError: There is none, or it is no saved step of this version.
        """
        try:
            with safe_open(path, "pt") as file:
                text = (file.metadata() or {}).get(HEADER)
                rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"dump={str(path)!r} cannot be read: {error}") from error
        if text is None:
            raise ConfigError(f"dump={str(path)!r} is a safetensors file, but no step that dsv4lite has saved")
        header = json.loads(text)
        if header["version"] != VERSION:
            raise ConfigError(
                f"dump={str(path)!r} has version {header['version']}, this dsv4lite reads {VERSION}; it was saved by"
                f" {header['versions']}"
            )
        return cls(
            reason=header["reason"],
            plan=StepPlan(step=header["step"], sequences=tuple(_sequence(s) for s in header["sequences"])),
            settings=header["settings"],
            numerics=_numerics(header["numerics"]),
            versions=header["versions"],
            rows=rows,
        )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else value


def _numerics(values: Mapping[str, Any]) -> Numerics:
    dtypes = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}
    types = {name: dtypes[values[name]] for name in ("dtype", "matrix_dtype")}
    return Numerics(**{**values, **types, "device": torch.device(values["device"])})


def _sequence(values: Mapping[str, Any]) -> SequencePlan:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return SequencePlan(**plain)


def versions(device: torch.device) -> dict[str, str]:
    """Return what a step depends on besides the model."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    found["device"] = device.type
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found["cuda"] = torch.version.cuda or "none"
    return found


class StepRecorder:
    """Says which steps are to be saved, and saves them; mutable, owned by the engine's thread.

    While it is ``active``, a step must start when the one before has been looked at, and be looked at before the next one starts.

    Args:
        config: ``dump_dir`` is where the first step that fails or has no finite result is saved; ``None`` for nowhere.
        model, cache: What steps run on.
    """

    def __init__(self, config: EngineConfig, model: DeepseekV4, cache: StateCache) -> None:
        self._folder = None if config.dump_dir is None else Path(config.dump_dir)
        self._settings = {
            **{name: getattr(config, name) for name in ("model", "revision", "load_format", "seed")},
            "hf_overrides": dict(config.hf_overrides),
        }
        self._numerics, self._cache = model.numerics, cache
        self._layers = cache.layers[: model.config.num_hidden_layers]
        self._versions = versions(cache.device)  # now: a device that has failed does not tell
        self._wanted: list[Path] = []
        self._started: tuple[StepPlan, dict[str, Tensor]] | None = None

    @property
    def active(self) -> bool:
        """Whether the next step may be saved."""
        return self._folder is not None or bool(self._wanted)

    def request(self, path: Path) -> None:
        """Save the next step."""
        self._wanted.append(path)

    def begin(self, plan: StepPlan) -> None:
        """Keep what a step that is about to start will change; copies of slots are done."""
        slots = torch.tensor(Places.of(plan).slots, dtype=torch.int64, device=self._cache.device)
        carries = (
            (f"layers.{i}.{name}", carry)
            for i, layer in enumerate(self._layers)
            for name, carry in (("carry", layer.carry), ("key_carry", layer.key_carry))
        )
        self._started = plan, {name: carry.index_select(0, slots) for name, carry in carries if carry is not None}

    def end(self, finite: Tensor | None) -> None:
        """Save the step if it was asked for, or if a row from which a token was to be sampled is not ``finite`` bool [R]."""
        if self._started is None:
            return
        if finite is None and self._cache.device.type == "cuda":
            torch.cuda.current_stream(self._cache.device).synchronize()  # a failure is this step's, not the next one's
        self._save_wanted("requested")
        if self._folder is not None and finite is not None and not bool(finite.all()):
            self._save_failure("logits are not finite")
        self._started = None

    def failed(self, error: BaseException) -> Path | None:
        """Save the step that was on its way when ``error`` was raised, if there is one; return where."""
        if self._started is None:
            return None
        reason = f"{type(error).__name__}: {error}"
        self._save_wanted(reason)
        return None if self._folder is None else self._save_failure(reason)

    def _save_wanted(self, reason: str) -> None:
        paths, self._wanted = self._wanted, []
        for path in paths:
            self._save(reason, path)

    def _save_failure(self, reason: str) -> Path | None:
        """Save into the folder, once: what follows a failure tells little, and may be much."""
        assert self._folder is not None and self._started is not None
        folder, self._folder = self._folder, None
        name = f"step-{self._started[0].step}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.safetensors"
        return self._save(reason, folder / name)

    def _save(self, reason: str, path: Path) -> Path | None:
        assert self._started is not None
        plan, carries = self._started
        try:
            rows = {name: carry.cpu() for name, carry in carries.items()} | self._pages(Places.of(plan))
        except RuntimeError as error:
            log.warning("the device cannot be read any more, so the saved step has a plan but no state: %s", error)
            rows = {}
        dump = StepDump(
            reason=reason,
            plan=plan,
            settings=self._settings,
            numerics=self._numerics,
            versions=self._versions,
            rows=rows,
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            dump.save(path)
        except (OSError, SafetensorError, TypeError) as error:
            log.error("step %d (%s) cannot be saved as %s: %s", plan.step, reason, path, error)
            return None
        log.warning("step %d is saved (%s); find its first bad op with: python -m dsv4lite replay %s", plan.step, reason, path)
        return path

    def _pages(self, places: Places) -> dict[str, Tensor]:
        rows = {}
        for name, store, ids in stores(self._layers, places):
            index = torch.tensor(ids, dtype=torch.int64, device=store.memory.device)
            rows[name] = store.memory.index_select(0, index).cpu()
        return rows


def stores(layers: Sequence[LayerCache], places: Places) -> list[tuple[str, RowStore, tuple[int, ...]]]:
    """Return the stores of layers by the names of their tensors, and which of their pages are meant."""
    named = [
        (f"layers.{i}.{name}", store, ids)
        for i, layer in enumerate(layers)
        for name, store, ids in (
            ("window", layer.window, places.windows),
            ("entries", layer.entries, places.pages),
            ("keys", layer.keys, places.pages),
        )
    ]
    return [(name, store, ids) for name, store, ids in named if isinstance(store, RowStore)]
