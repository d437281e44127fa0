"""The source of a model: a checkpoint, or a config and random weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dsv4lite.config import EngineConfig, LoadProgress, Progress
from dsv4lite.errors import CheckpointError
from dsv4lite.kernels.experts import Tiles
from dsv4lite.models.config import DrafterKind, ModelConfig
from dsv4lite.models.family import Family, Model, find_family
from dsv4lite.models.shard import shards_of
from dsv4lite.parallel.experts import DispatcherFactory
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.shard import Shards
from dsv4lite.progress import LoadBars
from dsv4lite.weights.checkpoint import (
    DTYPES,
    Checkpoint,
    ExpertFormat,
    HeldTensor,
    locate,
    read_config,
    read_generation_config,
)
from dsv4lite.weights.dummy import dummy_tensors, fill_tiles
from dsv4lite.weights.formats import Header, PackedTensor, QuantFormat, find_format
from dsv4lite.weights.loader import OwnFormat, load, match, own_formats, packed_headers, read_assigned, scale_name
from dsv4lite.weights.names import NameTables
from dsv4lite.weights.quant import CopiedSlot, Numerics, Slot, TileSlot
from dsv4lite.weights.tensors import FORMATS, TensorSpec, stored_form

log = logging.getLogger("dsv4lite.weights")

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "float32": torch.float32, "float16": torch.float16}  # others are bfloat16


def log_progress(report: LoadProgress) -> None:
    """Log progress, about ten times per phase."""
    step = max(1, report.total // 10)
    if report.done == report.total or report.done % step < report.total // 100 + 1:
        log.info("%s: %d of %d %s", report.phase, report.done, report.total, report.unit)


def _four_bit(specs: Mapping[str, TensorSpec], headers: Mapping[str, Header], dequantized: tuple[str, ...]) -> set[str]:
    """Return which of "dense", "expert" and "drafter" have only four-bit matrices, apart from ``dequantized`` ends of names."""
    found: dict[str, set[bool]] = {}
    for name, spec in specs.items():
        if spec.kind in ("dense", "expert") and name in headers and not name.endswith(dequantized):
            info = headers[name]
            group = "drafter" if name.startswith("mtp.") else spec.kind
            found.setdefault(group, set()).add(isinstance(info, PackedTensor) and info.format.group > 0)
    return {group for group, packed in found.items() if packed == {True}}


def _dense_scales(specs: Mapping[str, TensorSpec], headers: Mapping[str, Header]) -> str | None:
    """Return the dtype of the scales if all dense matrices are FP8 with scales of one dtype; otherwise ``None``."""
    dense = [name for name, spec in specs.items() if spec.kind == "dense" and name in headers]
    stored = {(headers[name].dtype, headers[scale_name(name)].dtype if scale_name(name) in headers else None) for name in dense}
    return stored.pop()[1] if len(stored) == 1 and {kind for kind, _ in stored} == {"F8_E4M3"} else None


def progress_of(config: EngineConfig) -> Progress | None:
    """Return the progress callback that the settings ask for."""
    if config.progress == "bar":
        return LoadBars()
    return log_progress if config.progress is True else config.progress or None


def _copies(slot: Slot) -> tuple[Slot, ...]:
    return slot.copies if isinstance(slot, CopiedSlot) else (slot,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model before it is loaded, as its configuration and the headers of its checkpoint describe it.

    Attributes:
        names: Translates other names of the model's tensors.
        dtype: Dtype of the unquantized tensors, taken from the embedding.
        dense_fp8: Every dense matrix is FP8, with e8m0 scales or, in families whose releases have them, float32 scales.
        scale_dtype: Dtype of these scales, uint8 or float32; or of the scales of four-bit weights.
        form: The weight-only format of the matrices; ``None`` without one.
        dense_four_bit: Every dense matrix outside the drafter is in four bits, except those that are dequantized at load anyway.
        drafter_four_bit: Every dense and expert matrix of the model's own drafter is in four bits.
        checkpoint: ``None`` for random weights.
        headers: The checkpoint's tensors, with packed matrices assembled; empty for random weights.
    """

    folder: Path
    generation_config: Mapping[str, Any]
    family: Family
    names: NameTables
    model: ModelConfig
    dtype: torch.dtype
    expert_format: ExpertFormat
    dense_fp8: bool
    scale_dtype: torch.dtype = torch.uint8
    form: QuantFormat | None = None
    dense_four_bit: bool = False
    drafter_four_bit: bool = False
    checkpoint: Checkpoint | None
    headers: Mapping[str, Header] = field(default_factory=dict)

    @property
    def drafter(self) -> DrafterKind | None:
        """The kind of drafter that the checkpoint has; ``None`` without one.

        Raises:
            CheckpointError: Config and tensors describe different kinds.
        """
        described = self.model.drafter
        if self.checkpoint is None or described is None:
            return described
        for kind, name in self.family.drafters.items():
            if name in self.headers and kind != described:
                raise CheckpointError(
                    f"{self.folder}: config.json describes a drafter of kind {described!r}, but the tensors are of kind {kind!r}; "
                    "take the config.json that came with them",
                    problems=[f"{name}: unexpected"],
                )
        return described if self.family.drafters[described] in self.headers else None

    @classmethod
    def open(cls, config: EngineConfig, *, fetch: bool = True) -> ModelSource:
        """Read configuration and headers.

        Args:
            config: Which model, and how to load it.
            fetch: Fetch weights from the hub. ``False``: without local weights, only the config is read.

        Raises:
            CheckpointError: The files cannot be found or read.
            ConfigError, UnsupportedError: The model's config is invalid, or of an unknown family.
        """

        def names_of(raw: Mapping[str, Any]) -> NameTables:
            raw = {**raw, **config.hf_overrides}
            return find_family(raw, config.family).names(raw)

        dummy, checkpoint = config.load_format == "dummy", None
        folder = locate(config.model, config.revision, weights=fetch and not dummy)
        if dummy or not (fetch or any(folder.glob("*.safetensors"))):
            raw, generation_config = read_config(folder), read_generation_config(folder)
        else:
            checkpoint = Checkpoint.open(folder, names=names_of)
            raw, generation_config = dict(checkpoint.config), dict(checkpoint.generation_config)
        raw = {**raw, **config.hf_overrides}
        family = find_family(raw, config.family)
        form = None if family.weight_only is None else find_format(raw, config.quant_formats)
        if form is not None:
            raw = {**raw, "quantization_config": None}  # families would read roundings of activations from it
        model = family.read_config(raw)
        four_bit: set[str] = set()
        headers: Mapping[str, Header] = {}
        if checkpoint is None:
            dtype = str(raw.get("torch_dtype") or raw.get("dtype"))
            default = (raw.get("quantization_config") or {}).get("expert_dtype", model.expert_format)  # where transformers moves it
            stored: object = raw.get("expert_dtype", default) if model.quantized else "unquantized"
            expert_format: ExpertFormat = "fp4" if stored == "fp4" else "fp8" if stored == "fp8" else "unquantized"
            scales: str | None = ("F8_E8M0" if model.byte_scales else "F32") if model.quantized else None
            if form is not None and form.group:
                expert_format, four_bit, scales = "four_bit", {"dense", "drafter"}, form.scale_code(())
        else:
            if "embed.weight" not in checkpoint.headers:
                raise CheckpointError(f"{folder} has no embedding; is it a whole model?", problems=["embed.weight: missing"])
            dtype, specs = checkpoint.headers["embed.weight"].dtype, family.tensors.specs(model)
            headers = checkpoint.headers if form is None else packed_headers(checkpoint.headers, form, str(folder))
            if form is None:
                expert_format, scales = checkpoint.expert_format, _dense_scales(specs, headers)
                model = replace(model, quantized=checkpoint.quantized)
            else:
                four_bit, scales = _four_bit(specs, headers, family.weight_only or ()), form.scale_code(headers.values())
                expert_format = "four_bit" if "expert" in four_bit else "unquantized"
        return cls(
            folder=folder,
            generation_config=generation_config,
            family=family,
            names=family.names(raw),
            model=model,
            dtype=_FLOATS.get(dtype, torch.bfloat16),
            expert_format=expert_format,
            dense_fp8=form is None and (scales == "F8_E8M0" or (scales == "F32" and not model.byte_scales)),
            scale_dtype=torch.uint8 if form is None and scales != "F32" else DTYPES[scales or "F32"],
            form=form,
            dense_four_bit="dense" in four_bit,
            drafter_four_bit="drafter" in four_bit,
            checkpoint=checkpoint,
            headers=headers,
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
        progress: Progress | None = None,
    ) -> Model:
        """Allocate the model, or a rank's shard of it, and fill it.

        Args:
            mesh: This rank's place; default is a single rank.
            with_mtp: Include the model's own drafter.
            dispatcher: How tokens get to experts on other ranks.
            redundant_experts: Extra slots per layer for copies of experts, over all ranks of ep; ``None``: experts never move.
            seed: Seed of random weights; every rank makes its part of the same weights.

        Raises:
            CheckpointError: The checkpoint does not fit the model, or cannot be read.
            ConfigError: The mesh's layout does not divide the model.
        """
        mesh, started = mesh or Mesh(), time.monotonic()
        empty = self.family.build(
            self.model, numerics, mesh, dispatcher=dispatcher, redundant_experts=redundant_experts, with_mtp=with_mtp
        )
        model: Model = empty.requires_grad_(False).eval()
        self.fill(model.slots(), numerics, mesh, seed=seed, progress=progress, whole=True)
        log.info("%s: weights ready in %.1f s", self.folder, time.monotonic() - started)
        return model

    def fill(
        self,
        slots: Mapping[str, Slot],
        numerics: Numerics,
        mesh: Mesh,
        *,
        seed: int = 0,
        progress: Progress | None = None,
        whole: bool = False,
    ) -> None:
        """Fill all slots of a rank's model, or refill some of them. Random weights are generated on the slots' device.

        Raises:
            CheckpointError: The checkpoint does not fit the model, or cannot be read.
        """
        shards = shards_of(self.model, self.family.tensors, mesh.layout, mesh.rank)
        if self.checkpoint is not None:
            load(self.checkpoint, slots, progress=progress, shards=shards, whole=whole, headers=self.headers)
            return
        self._fill_stacks(slots, shards, seed)
        form: dict[str, Any] = {"expert_format": self.expert_format, "quantized": self.model.quantized}
        names = {name for name, slot in slots.items() if not isinstance(_copies(slot)[0], TileSlot)}
        made: dict[str, HeldTensor] = {}
        for name, tensor in dummy_tensors(self.model, self.family.tensors, **form, seed=seed, device=numerics.device, names=names):
            made[name] = HeldTensor(name=name, tensor=tensor)
            if name in names:  # ``dummy_tensors`` yields scales first
                for _, slot, weight, scale in read_assigned(match(made, {name: slots[name]}, shards)):
                    slot.store(weight, scale)
                made.clear()

    def formats(self) -> dict[str, OwnFormat | QuantFormat]:
        """Return how the model stores each of its quantized matrices."""
        if self.checkpoint is not None:
            return own_formats(self.headers)
        form: dict[str, Any] = {"expert_format": self.expert_format, "quantized": self.model.quantized}
        return {
            name: OwnFormat(FORMATS[found], FORMATS[found].scales[0 if self.model.byte_scales else -1])
            for name, spec in self.family.tensors.specs(self.model).items()
            if (found := stored_form(spec, **form)) in FORMATS
        }

    def _fill_stacks(self, slots: Mapping[str, Slot], shards: Shards, seed: int) -> None:
        """Fill tiled experts with random numbers: a whole stack at once if all its matrices are among ``slots``."""
        stacks: dict[int, dict[int, tuple[str, TileSlot]]] = {}
        for name, slot in slots.items():
            for place in _copies(slot):
                if isinstance(place, TileSlot) and place.half != 1:  # w1 stands for the matrix that holds w1 and w3
                    stacks.setdefault(id(place.stack), {})[place.expert] = (name, place)
        hidden, width = self.model.hidden_size, self.model.expert_width
        for entries in stacks.values():
            name, place = next(iter(entries.values()))
            shape = (2 * width, hidden) if place.half == 0 else (hidden, width)
            tiles, cut = place.stack.stored, shards.cut(name, shape)
            if len(entries) == tiles.shape[0]:
                fill_tiles(tiles, [entries[i][0] for i in range(len(entries))], seed, shape=shape, cut=cut)
                continue
            for i, (name, _) in entries.items():
                fill_tiles(Tiles(tiles.codes[i : i + 1], tiles.scales[i : i + 1]), [name], seed, shape=shape, cut=cut)
