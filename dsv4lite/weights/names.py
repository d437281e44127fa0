"""Translates the names that checkpoints and trainers use to the official ones, which the rest of this library uses.

The tables of the model's family match a name from its start, by whole components; ``*`` stands for a number. A name that no table
matches stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dsv4lite.errors import CheckpointError

_LEAF = {"weight_scale_inv": "scale"}
_STACKS = ("layers", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTables:
    """External names with their official names; empty tables leave all names as they are.

    Attributes:
        top: Names of tensors outside of blocks.
        block: Names below ``layers.N.`` and ``mtp.N.``.
        stacked: Tensors [E, rows, in] of all experts of a layer: the matrices stacked along their rows, and the leaf, ``weight`` or
            ``scale``.
        max_experts: Most experts of a stacked tensor.
        hidden_layers: Number of hidden layers, if the drafter's blocks are numbered after them under ``layers.N.``.
        drafter_blocks: Most such blocks; layers after them are no part of the model.
        drafter_only: Parts of names that only such blocks have.
    """

    top: Mapping[str, str] = field(default_factory=dict)
    block: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    max_experts: int = 0
    hidden_layers: int | None = None
    drafter_blocks: int = 1
    drafter_only: tuple[str, ...] = ()

    def of_checkpoint(self, names: Iterable[str]) -> NameTables:
        """Return the tables for a checkpoint with tensors of these names, in which blocks without ``drafter_only`` are layers."""
        if not self.drafter_only:
            return self
        held: dict[int, set[str]] = {}
        for parts in map(_components, names):
            if (block := self.block_after(parts)) is not None:
                held.setdefault(block, set()).update(parts[2:])
        layers = (block for block, parts in held.items() if parts.isdisjoint(self.drafter_only))
        return replace(self, drafter_blocks=min([self.drafter_blocks, *layers]))

    def block_after(self, parts: Sequence[str]) -> int | None:
        """Return the number of a name's layer after the hidden ones, from 0 on; ``None`` for other names."""
        if self.hidden_layers is None or parts[0] != "layers" or len(parts) < 2 or not parts[1].isdecimal():
            return None
        block = int(parts[1]) - self.hidden_layers
        return block if block >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """An official tensor inside an external one.

    Attributes:
        name: Official name.
        index: The tensor is ``external[index]``: leading integers, then at most one slice, so it is contiguous in memory.
    """

    name: str
    index: tuple[int | slice, ...] = ()


def translate(name: str, shape: Sequence[int], tables: NameTables) -> list[Piece]:
    """Return the official tensors that an external tensor holds.

    A name that no table matches is returned as it is; ``loader.match`` reports it as unexpected.

    Args:
        shape: Its shape; the first dimension of a stacked tensor counts experts.

    Returns:
        One piece for most names; one or two per expert for stacked experts; none for copies of embedding and head under ``mtp.``,
        which some checkpoints have, and for rotary frequencies, which the config determines.

    Raises:
        CheckpointError: A stacked tensor does not have three dimensions, is empty or has too many experts, or its rows cannot be
            divided into gate and up.
    """
    parts = _components(name)
    if parts[-1] == "inv_freq":
        return []
    drafter_block = tables.block_after(parts)
    if drafter_block is not None and drafter_block < tables.drafter_blocks:
        parts[:2] = ["mtp", str(drafter_block)]
    if parts[0] == "mtp" and (any("emb" in part for part in parts) or (parts[-1] == "weight" and parts[-2].endswith("head"))):
        return []
    parts[-1] = _LEAF.get(parts[-1], parts[-1])
    if parts[0] not in _STACKS or len(parts) < 3:
        return [Piece(name=".".join(_renamed(parts, tables.top)))]
    block, rest = ".".join(parts[:2]), parts[2:]
    stacked = tables.stacked.get(".".join(rest))
    if stacked is None:
        return [Piece(name=".".join([block, *_renamed(rest, tables.block)]))]
    matrices, leaf = stacked
    if len(shape) != 3 or shape[1] % len(matrices) or not 0 < shape[0] <= tables.max_experts or 0 in shape:
        rule = f"[experts, {len(matrices)} x rows, in], with at most {tables.max_experts} experts and nothing empty"
        raise CheckpointError(f"{name} has shape {list(shape)}; stacked experts are {rule}")
    rows = shape[1] // len(matrices)
    return [
        Piece(name=f"{block}.ffn.experts.{expert}.{matrix}.{leaf}", index=(expert, slice(i * rows, (i + 1) * rows)))
        for expert in range(shape[0])
        for i, matrix in enumerate(matrices)
    ]


def _components(name: str) -> list[str]:
    return name.removeprefix("model.").split(".")


def _renamed(parts: list[str], table: Mapping[str, str]) -> list[str]:
    """Replace the longest leading run of components that ``table`` has; numbers are kept."""
    for end in range(len(parts), 0, -1):
        official = table.get(".".join("*" if part.isdecimal() else part for part in parts[:end]))
        if official is not None:
            numbers = (part for part in parts[:end] if part.isdecimal())
            return [*(next(numbers) if part == "*" else part for part in official.split(".")), *parts[end:]]
    return parts
