"""What a model is made from: a checkpoint, or its config and random numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsv4lite.config import EngineConfig, LoadProgress, Progress
from dsv4lite.errors import CheckpointError
from dsv4lite.kernels.experts import Tiles
from dsv4lite.models.config import DrafterKind, ModelConfig
from dsv4lite.models.family import Family, Model, find_family
from dsv4lite.models.share import shards_of
from dsv4lite.parallel.experts import DispatcherFactory
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.shard import Shards
from dsv4lite.weights.checkpoint import Checkpoint, ExpertFormat, TensorInfo, locate, read_config, read_generation_config
from dsv4lite.weights.dummy import TilePart, dummy_tensors, fill_tiles
from dsv4lite.weights.loader import cut_pair, load, paired, reload, scale_name
from dsv4lite.weights.quant import CopiedSlot, Numerics, Slot, TileSlot
from dsv4lite.weights.tensors import TensorSpec, stored_tensors

log = logging.getLogger("dsv4lite.weights")

_EXPERT_FORMATS: Mapping[str, ExpertFormat] = {"fp4": "fp4", "fp8": "fp8"}
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def log_progress(report: LoadProgress) -> None:
    """Report progress to the package's logger, in tenths."""
    step = max(1, report.total // 10)
    if report.done == report.total or report.done % step < report.total // 100 + 1:
        log.info("%s: %d of %d %s", report.phase, report.done, report.total, report.unit)


def _dense_fp8(specs: Mapping[str, TensorSpec], headers: Mapping[str, TensorInfo]) -> bool:
    """Return whether every dense matrix of a checkpoint is FP8 with e8m0 scales."""
    dense = [name for name, spec in specs.items() if spec.kind == "dense" and name in headers]
    stored = {(headers[name].dtype, headers[scale_name(name)].dtype if scale_name(name) in headers else None) for name in dense}
    return stored == {("F8_E4M3", "F8_E8M0")}


def progress_of(config: EngineConfig) -> Progress | None:
    """Return who is told of progress."""
    return log_progress if config.progress is True else config.progress or None


def _places(slot: Slot) -> tuple[Slot, ...]:
    return slot.places if isinstance(slot, CopiedSlot) else (slot,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model before it is loaded: everything that configuration and headers tell.

    Attributes:
        dtype: What the plain tensors are stored in.
        dense_fp8: Every dense matrix is stored in FP8 with e8m0 scales; not so with float32 scales, or where some are plain.
        checkpoint: ``None`` for random weights.
    """

    folder: Path
    generation_config: Mapping[str, Any]
    family: Family
    model: ModelConfig
    dtype: torch.dtype
    expert_format: ExpertFormat
    dense_fp8: bool
    checkpoint: Checkpoint | None

    @property
    def drafter(self) -> DrafterKind | None:
        """The kind of drafter that it comes with.

        Raises:
            CheckpointError: Config and tensors tell of different ones.
        """
        told = self.model.drafter
        if self.checkpoint is None or told is None:
            return told
        for kind, name in self.family.drafters.items():
            if name in self.checkpoint.headers and kind != told:
                raise CheckpointError(
                    f"{self.folder}: config.json describes a drafter of kind {told!r}, but the tensors are of kind {kind!r}; "
                    "take the config.json that came with them",
                    problems=[f"{name}: unexpected"],
                )
        return told if self.family.drafters[told] in self.checkpoint.headers else None

    @classmethod
    def open(cls, config: EngineConfig, *, fetch: bool = True) -> ModelSource:
        """Read configuration and headers.

        Args:
            config: Which model, and how to load it.
            fetch: ``False`` does not fetch weights from the hub; without local ones the config alone speaks.

        Raises:
            CheckpointError: They cannot be found or read.
            ConfigError, UnsupportedError: The model's config is wrong, or of another family.
        """
        dummy = config.load_format == "dummy"
        if not (dummy or fetch):
            dummy = not any(locate(config.model, config.revision, weights=False).glob("*.safetensors"))
        if dummy:
            folder = locate(config.model, config.revision, weights=False)
            raw = {**read_config(folder), **config.hf_overrides}
            family = find_family(raw, config.family)
            model = family.read_config(raw)
            stored = str(raw.get("expert_dtype", "fp4")) if model.quantized else "plain"
            dtypes = {"float32": torch.float32, "float16": torch.float16}
            dtype = dtypes.get(str(raw.get("torch_dtype") or raw.get("dtype")), torch.bfloat16)
            return cls(
                folder=folder,
                generation_config=read_generation_config(folder),
                family=family,
                model=model,
                dtype=dtype,
                expert_format=_EXPERT_FORMATS.get(stored, "plain"),
                dense_fp8=model.quantized,
                checkpoint=None,
            )

        def family_of(raw: Mapping[str, Any]) -> Family:
            return find_family({**raw, **config.hf_overrides}, config.family)

        checkpoint = Checkpoint.open(config.model, config.revision, names=lambda raw: family_of(raw).names)
        family = family_of(checkpoint.config)
        model = family.read_config({**checkpoint.config, **config.hf_overrides})
        embed = checkpoint.headers.get("embed.weight")
        if embed is None:
            raise CheckpointError(f"{checkpoint.folder} has no embedding; is it a whole model?", problems=["embed.weight: missing"])
        return cls(
            folder=checkpoint.folder,
            generation_config=checkpoint.generation_config,
            family=family,
            model=replace(model, quantized=checkpoint.quantized),
            dtype=_FLOATS.get(embed.dtype, torch.bfloat16),
            expert_format=checkpoint.expert_format,
            dense_fp8=_dense_fp8(family.tensors.specs(model), checkpoint.headers),
            checkpoint=checkpoint,
        )

    def build(
        self,
        numerics: Numerics,
        mesh: Mesh | None = None,
        *,
        with_mtp: bool,
        dispatcher: str | DispatcherFactory = "auto",
        redundant_experts: int | None = None,
        seed: int = 0,
        progress: bool | Progress = False,
    ) -> Model:
        """Allocate the model, or a rank's share of it, and fill it.

        Args:
            numerics: Arithmetic and device.
            mesh: This rank's place; default is that there are no others.
            with_mtp: Whether the drafter is wanted.
            dispatcher: How tokens get to experts on other ranks.
            redundant_experts: Slots for copies of experts in every layer, on all ranks of ep together; with ``None`` no expert
                moves.
            seed: Of random weights; every rank gets its part of the same ones.
            progress: Told of the bytes read.

        Raises:
            CheckpointError: The checkpoint does not fit the model, or cannot be read.
            ConfigError: The model cannot be shared so.
        """
        mesh = mesh or Mesh.single()
        shards = shards_of(self.model, self.family.tensors, mesh.layout, mesh.rank)
        started = time.monotonic()
        report = log_progress if progress is True else progress or None
        model = self.family.build(
            self.model, numerics, mesh, dispatcher=dispatcher, redundant_experts=redundant_experts, with_mtp=with_mtp
        )
        slots = model.slots()
        if self.checkpoint is not None:
            load(self.checkpoint, slots, progress=report, shards=shards)
        else:
            self._invent(slots, shards, seed, numerics.device)
        built: Model = model.requires_grad_(False).eval()
        log.info("%s: weights ready in %.1f s", self.folder, time.monotonic() - started)
        return built

    def refill(self, slots: Mapping[str, Slot], numerics: Numerics, mesh: Mesh, *, seed: int = 0) -> None:
        """Fill some places of a rank's share again, with what ``build`` would have put there.

        Raises:
            CheckpointError: The checkpoint cannot be read any more, or is another one.
        """
        shards = shards_of(self.model, self.family.tensors, mesh.layout, mesh.rank)
        if self.checkpoint is not None:
            reload(self.checkpoint, slots, shards=shards)
        else:
            self._invent(slots, shards, seed, numerics.device)

    def _invent(self, slots: Mapping[str, Slot], shards: Shards, seed: int, device: torch.device) -> None:
        """Fill a model with random numbers, made where they stay; a stack of tiles is filled as a whole."""
        self._fill_stacks(slots, shards, seed)
        names = {name for name, slot in slots.items() if not isinstance(_places(slot)[0], TileSlot)}
        tensors = dummy_tensors(
            self.model,
            self.family.tensors,
            expert_format=self.expert_format,
            quantized=self.model.quantized,
            seed=seed,
            device=device,
            names=names,
        )
        for name, weight, scale in paired(tensors, self._scaled(names)):
            slots[name].store(*cut_pair(name, weight, scale, shards))

    def _fill_stacks(self, slots: Mapping[str, Slot], shards: Shards, seed: int) -> None:
        stacks: dict[int, dict[int, tuple[str, TileSlot]]] = {}
        for name, slot in slots.items():
            for place in _places(slot):
                if isinstance(place, TileSlot) and place.half != 1:  # w1 stands for the matrix that holds w1 and w3
                    stacks.setdefault(id(place.stack), {})[place.expert] = (name, place)
        hidden, width = self.model.hidden_size, self.model.expert_width
        for entries in stacks.values():
            name, place = next(iter(entries.values()))
            rows, columns = (2 * width, hidden) if place.half == 0 else (hidden, width)
            tiles = place.stack.tiles
            whole = tiles.shape[1:] == (rows, columns)
            part = None if whole else TilePart.of(rows, columns, shards.cut(name, (rows, columns)))
            if len(entries) == tiles.shape[0]:
                fill_tiles(tiles, [entries[i][0] for i in range(len(entries))], seed, part=part)
                continue
            for i, (name, _) in entries.items():
                fill_tiles(Tiles(tiles.codes[i : i + 1], tiles.scales[i : i + 1]), [name], seed, part=part)

    def _scaled(self, names: Container[str]) -> set[str]:
        """Return which of the tensors come with a scale."""
        stored = {
            name: stored_tensors(name, spec, quantized=self.model.quantized, expert_format=self.expert_format)
            for name, spec in self.family.tensors.specs(self.model).items()
            if name in names
        }
        return {name for name, parts in stored.items() if len(parts) == 2}
