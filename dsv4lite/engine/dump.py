"""A saved step: its plan, the state that it read, and the software versions. ``debug/replay.py`` runs it again.

The file has the safetensors format. Its metadata have one JSON text under ``dsv4lite.step``, and its SHA-256 under
``dsv4lite.sha256``: a header that was edited would be run as a step that never was. Its tensors are the state that the step's
sequences use in every layer I (the drafter's layers last), by the names of the family's ``StateSpec``:

    layers.I.<store>   uint8 [pages, bytes], the pages of the store that the plan names, by ascending id
    layers.I.<slot>    float32 [slots, copies, …], before the step
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4lite.checks import file_name
from dsv4lite.device import installed_version
from dsv4lite.engine.step_graphs import GraphShape
from dsv4lite.errors import CheckpointError, ConfigError, shown
from dsv4lite.files import open_regular
from dsv4lite.kernels.rows import RowStore
from dsv4lite.models.config import ModelConfig
from dsv4lite.scheduling.step_plan import NO_PAGE, SequencePlan, StepPlan
from dsv4lite.state.store import StateCache
from dsv4lite.weights.checkpoint import DTYPES, write_tensors
from dsv4lite.weights.quant import Numerics

VERSION = 5
REQUESTED = "it was requested"  # a reason
_HEADER, _DIGEST = "dsv4lite.step", "dsv4lite.sha256"
_PLAIN = ("reason", "drafter", "copies", "left_out", "settings", "config", "versions")  # fields that JSON can store unchanged
_PACKAGES = ("dsv4lite", "torch", "triton", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Ids of the slots and pages that sequences use, ascending."""

    slots: tuple[int, ...]
    windows: tuple[int, ...]
    pages: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[SequencePlan]) -> Places:
        """Collect the ids in the plans of sequences."""
        return cls(
            slots=tuple(sorted({s.slot for s in sequences})),
            windows=tuple(sorted({page for s in sequences for page in s.window_pages if page != NO_PAGE})),
            pages=tuple(sorted({page for s in sequences for page in s.pages})),
        )

    def renumber(self, plan: StepPlan) -> StepPlan:
        """Return a plan's sequences with the ids of a state that has only these slots and pages."""
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
            max_drafts=plan.max_drafts,
        )


def stores(cache: StateCache, places: Places) -> list[tuple[str, RowStore, tuple[int, ...]]]:
    """Return the name, the store and the ids of saved pages of every store."""
    ids = {"grow": places.pages, "window": places.windows}
    return [(name, store, ids[part.lifetime]) for name, part, store in cache.stores()]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepDump:
    """One step.

    Attributes:
        reason: Why it was saved.
        plan: Its sequences and ``max_drafts``. The plan's copies of state are already applied to the saved state.
        drafter: Whether the engine had the model's own drafter, which ran if ``max_drafts`` is not 0.
        copies: Copies of each slot's compressor state.
        left_out: Number of sequences of the step that did not fit into the file.
        graph: Shape of the step if it was captured, else ``None``.
        settings: ``EngineConfig`` fields that identify the model.
        config: The model's config, by ``config_text``.
        numerics: Arithmetic and device.
        versions: Versions of packages and CUDA, and the device.
        rows: The state; empty if the device could no longer be read.
    """

    reason: str
    plan: StepPlan
    drafter: bool
    copies: int
    left_out: int
    graph: GraphShape | None
    settings: Mapping[str, Any]
    config: Mapping[str, str]
    numerics: Numerics
    versions: Mapping[str, str]
    rows: Mapping[str, Tensor]

    def save(self, path: Path) -> None:
        """Write or replace the file; it has a temporary name until it is complete.

        Raises:
            OSError: The file cannot be written.
            TypeError: A setting cannot be stored as JSON.
        """
        header = {
            "version": VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "step": self.plan.step,
            "sequences": [s._asdict() for s in self.plan.sequences],
            "max_drafts": self.plan.max_drafts,
            "graph": None if self.graph is None else asdict(self.graph),
            "numerics": {f.name: getattr(self.numerics, f.name) for f in fields(self.numerics)},
        }
        partly, text = path.with_name(path.name + ".part"), json.dumps(header, default=_text)
        try:
            write_tensors(partly, self.rows, {_HEADER: text, _DIGEST: sha256(text.encode()).hexdigest()})
            os.replace(partly, path)
        finally:
            partly.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> StepDump:
        """Read a file.

        Raises:
            ConfigError: The file is missing, damaged, edited, or not a saved step of this version.
        """
        if problem := file_name(path):
            raise ConfigError(f"dump={shown(path)} {problem}")
        try:
            open_regular(Path(path)).close()  # safetensors would wait for the writer of a FIFO
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, CheckpointError) as error:
            raise ConfigError(f"dump={str(path)!r} cannot be read: {error}") from error
        if _HEADER not in metadata:
            raise ConfigError(f"dump={str(path)!r} is a safetensors file, but not a step that dsv4lite saved")
        try:
            header = json.loads(metadata[_HEADER])
            if header["version"] != VERSION:
                raise ConfigError(
                    f"dump={str(path)!r} has version {shown(header['version'])}, this dsv4lite reads {VERSION}; replay it with the"
                    f" versions that saved it: {header['versions']!r}"
                )
            if metadata.get(_DIGEST) != sha256(metadata[_HEADER].encode()).hexdigest():
                raise ConfigError(
                    f"dump={str(path)!r} is not the step that was saved: its header was changed; replay the file as it was saved,"
                    " and give the checkpoint as --model if it has moved"
                )
            sequences = tuple(_sequence(s) for s in header["sequences"])
            return cls(
                **{name: header[name] for name in _PLAIN},
                plan=StepPlan(step=header["step"], sequences=sequences, max_drafts=header["max_drafts"]),
                graph=None if header["graph"] is None else GraphShape(**header["graph"]),
                numerics=_numerics(header["numerics"]),
                rows=rows,
            )
        except ConfigError:
            raise
        except (AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"dump={str(path)!r} is a damaged step: {type(error).__name__}: {error}") from error


def _text(value: object) -> str:
    """Return a dtype or a device as text, for JSON."""
    if not isinstance(value, torch.dtype | torch.device):
        raise TypeError(f"{value!r} cannot be stored as JSON")
    return str(value)


def _numerics(values: Mapping[str, Any]) -> Numerics:
    dtypes = {str(dtype): dtype for dtype in DTYPES.values()}
    types = {name: dtypes[values[name]] for name in ("dtype", "matrix_dtype", "scale_dtype")}
    return Numerics(**{**values, **types, "device": torch.device(values["device"])})


def _sequence(values: Mapping[str, Any]) -> SequencePlan:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return SequencePlan(**plain)


def config_text(config: ModelConfig) -> dict[str, str]:
    """Return each field of a model's config as text."""
    return {field.name: repr(getattr(config, field.name)) for field in fields(config)}


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions and the device that a step's numbers depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    found |= {package: installed_version(package) for package in _PACKAGES}
    found["device"] = device.type
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found["cuda"] = torch.version.cuda or "none"
    return found
