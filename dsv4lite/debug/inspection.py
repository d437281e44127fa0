"""What a checkpoint holds, read from its configuration and headers: ``python -m dsv4lite inspect CHECKPOINT``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from dsv4lite.config import EngineConfig
from dsv4lite.errors import CheckpointError
from dsv4lite.planning.memory import choose_numerics, in_gib
from dsv4lite.text.forms import find_form, release_of
from dsv4lite.text.tokenizer import Tokenizer
from dsv4lite.weights.checkpoint import TensorInfo
from dsv4lite.weights.loader import fit
from dsv4lite.weights.source import ModelSource

_MOST_PROBLEMS = 20
_GROUPS = (
    (".shared_experts.", "shared experts"),
    (".experts.", "routed experts"),
    (".ffn.", "other feed-forward"),
    (".attn", "attention"),
    (".hc_", "residual streams"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Tensors of one part of a model: how many, their bytes as stored, and their dtypes in the file format."""

    name: str
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What a checkpoint holds; prints as a table.

    Attributes:
        model: As it was given.
        architecture: ``model_type`` of its config.
        matrices: How they are stored: ``FP8``, ``unquantized``, or the name of a weight-only format.
        expert_format: Of the routed experts; ``None`` for a model without.
        groups: Its tensors; empty where there are no weights in the folder.
        vocab_size: Of the model.
        tokens: Of the tokenizer; ``None`` without one.
        chat: Name of the chat format, or ``template``; ``None`` without one.
        drafter: Kind of the drafter that it comes with.
        problems: Whatever is missing, unexpected or of the wrong shape.
    """

    model: str
    architecture: str
    layers: int
    experts: int
    max_positions: int
    matrices: str
    expert_format: str | None
    groups: tuple[TensorGroup, ...]
    vocab_size: int
    tokens: int | None
    chat: str | None
    drafter: str | None
    problems: tuple[str, ...]

    def __str__(self) -> str:
        count, size = sum(group.tensors for group in self.groups), sum(group.bytes for group in self.groups)
        verdict = f"{len(self.problems):,} problems" if self.problems else "complete"
        held = f"{count:,} tensors, {in_gib(size)}" if self.groups else "no weights in this folder"
        experts = f", {self.experts} experts in {self.expert_format}" if self.experts else ""
        lines = [
            f"{self.model}: {verdict}, {held}",
            f"  {'architecture':<22}{self.architecture}, {self.layers} layers{experts}",
            f"  {'matrices':<22}{self.matrices}",
            f"  {'longest sequence':<22}{self.max_positions:,} tokens",
        ]
        for group in self.groups:
            lines.append(f"  {group.name:<22}{group.tensors:>8,} tensors{in_gib(group.bytes):>16}  {', '.join(group.dtypes)}")
        known = "none" if self.tokens is None else f"{self.tokens:,} of the model's {self.vocab_size:,} tokens"
        lines += [
            f"  {'tokenizer':<22}{known}",
            f"  {'chat format':<22}{self.chat or 'none'}",
            f"  {'drafter':<22}{self.drafter or 'none'}",
        ]
        lines += [f"  {problem}" for problem in self.problems[:_MOST_PROBLEMS]]
        left = len(self.problems) - _MOST_PROBLEMS
        return "\n".join([*lines, f"  ... and {left:,} more"] if left > 0 else lines)


def inspect_checkpoint(model: str, *, revision: str | None = None) -> CheckpointReport:
    """Read what a checkpoint holds, without its numbers.

    Args:
        model: Folder or hub id; of the hub only configuration and tokenizer are fetched.
        revision: Hub revision.

    Raises:
        ConfigError, UnsupportedError: Its config is wrong, or of an architecture that is not known.
        CheckpointError: Its files are damaged; lists all problems.
    """
    config = EngineConfig(model=model, revision=revision, device="cpu")
    source = ModelSource.open(config, fetch=False)
    headers = {} if source.checkpoint is None else source.checkpoint.headers
    problems = list(_misfits(config, source))
    try:
        tokenizer = Tokenizer.from_folder(source.folder, vocab_size=source.model.vocab_size)
    except CheckpointError as error:
        tokenizer = None
        problems += error.problems or [str(error)]
    named = None if source.family.chat is None else source.family.chat(source.model)
    chat = None
    if tokenizer is not None:
        form, _ = find_form(named, tokenizer, shipped=False)
        chat = release_of(named, tokenizer) or ("template" if form is not None else None)
    return CheckpointReport(
        model=model,
        architecture=source.family.name,
        layers=source.model.num_hidden_layers,
        experts=source.model.num_experts,
        max_positions=source.model.max_positions,
        matrices=source.form.name if source.form is not None else "FP8" if source.model.quantized else "unquantized",
        expert_format=source.expert_format if source.model.num_experts else None,
        groups=_groups(headers.values()),
        vocab_size=source.model.vocab_size,
        tokens=None if tokenizer is None else tokenizer.vocab_size,
        chat=chat,
        drafter=source.drafter,
        problems=tuple(problems),
    )


def _misfits(config: EngineConfig, source: ModelSource) -> Iterable[str]:
    """Return what the headers lack for the model of the config, or have besides."""
    if source.checkpoint is None:
        return ()
    numerics = replace(choose_numerics(config, source, torch.device("cpu")), device=torch.device("meta"))
    drafts = source.model.drafter is not None and any(name.startswith("mtp.") for name in source.headers)
    skeleton = source.family.build(source.model, numerics, None, with_mtp=drafts)
    found = fit(source.headers, skeleton.slots())
    return (*found.missing, *found.mismatched, *found.unexpected)


def _group_of(name: str) -> str:
    """Return the part of a model that a tensor belongs to, by its official name."""
    if name.startswith("mtp."):
        return "drafter"
    if not name.startswith("layers."):
        return "embedding and head"
    return next((group for mark, group in _GROUPS if mark in name), "norms of layers")


def _groups(headers: Iterable[TensorInfo]) -> tuple[TensorGroup, ...]:
    found: dict[str, list[TensorInfo]] = {}
    for info in headers:
        found.setdefault(_group_of(info.name), []).append(info)
    return tuple(
        TensorGroup(name=name, tensors=len(some), bytes=sum(i.nbytes for i in some), dtypes=tuple(sorted({i.dtype for i in some})))
        for name, some in found.items()
    )
