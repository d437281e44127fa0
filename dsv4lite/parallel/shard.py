"""Sharding of tensors: the rules of a model's sharding table, and the part of a tensor that a rank holds.

A table maps a pattern to a rule. The pattern of ``layers.7.attn.wo_b.weight`` and of its scale is ``layers.*.attn.wo_b``: numbers
become ``*``, and a scale follows its weight. Axes are those of the mesh, and ``width``: the ranks of tp that share one expert, if
tp is larger than ep. Cuts are given in elements ``[out, in]`` for every storage format; ``blocks_of`` converts them to positions of
packed bytes and of scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsv4lite.errors import ConfigError

Cut = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Split:
    """Ranks along ``tp`` hold equal consecutive parts of dimension ``dim``."""

    dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Ranks along ``ep`` share the experts, in equal ranges unless balanced; those along ``width`` cut dimension ``dim``."""

    dim: int


Rule = Replicate | Split | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """A sharding table seen from one rank.

    Attributes:
        table: Pattern to rule.
        axes: Axis to (rank, size); an axis that is absent has size 1.
        stages: Hidden layers of every pipeline stage.
        num_experts: Routed experts of a layer.
        dense: Hidden layers without routed experts.
    """

    table: Mapping[str, Rule]
    axes: Mapping[str, tuple[int, int]]
    stages: tuple[range, ...]
    num_experts: int
    dense: frozenset[int] = frozenset()

    def cut(self, name: str, shape: Sequence[int], block: Sequence[int] = ()) -> Cut:
        """Return this rank's part of a tensor that it holds.

        Args:
            name: Official name of any tensor but a scale, which is cut with its weight.
            shape: Shape in elements.
            block: Elements per scale along each dimension; a cut must not go through a block.

        Raises:
            ConfigError: The table has no rule for the name, the parts would be unequal, or a cut would go through a scale block.
        """
        rule = self.table.get(pattern_of(name))
        if rule is None:
            raise ConfigError(f"the sharding table has no rule for {name}; its pattern is {pattern_of(name)!r}")
        whole = [slice(0, n) for n in shape]
        if isinstance(rule, Replicate):
            return tuple(whole)
        dim, axis = rule.dim, "width" if isinstance(rule, Experts) else "tp"
        rank, size = self.axes.get(axis, (0, 1))
        if size == 1:
            return tuple(whole)
        part, left = divmod(shape[dim], size)
        if left:
            raise ConfigError(f"{name}: dimension {dim} of {list(shape)} cannot be cut into {size} equal parts along {axis!r}")
        step = block[dim] if block else 1
        if part % step:
            raise ConfigError(
                f"{name}: {axis}={size} cuts dimension {dim} of {list(shape)} every {part} elements, "
                f"through scale blocks of {step}; choose a size that gives multiples of {step}"
            )
        whole[dim] = slice(rank * part, (rank + 1) * part)
        return tuple(whole)

    def elsewhere(self, name: str) -> bool:
        """Return whether another rank may hold a tensor that this rank does not: an expert, or a tensor of another stage."""
        rule = self.table.get(pattern_of(name))
        if rule is None:
            return False
        parts, routed, (stage, count) = name.split("."), isinstance(rule, Experts), self.axes.get("pp", (0, 1))
        last = self.stages[-1].stop - 1
        layer = int(parts[1]) if parts[0] == "layers" else 0 if parts[0] == "embed" else last
        if layer > last:
            return False
        if routed and (layer in self.dense or int(parts[parts.index("experts") + 1]) >= self.num_experts):
            return False
        return (count > 1 and layer not in self.stages[stage]) or (routed and self.axes.get("ep", (0, 1))[1] > 1)


def pattern_of(name: str) -> str:
    """Return the key of a tensor in a sharding table."""
    parts = name.split(".")
    if parts[-1] in ("weight", "scale"):
        parts.pop()
    return ".".join("*" if part.isdecimal() else part for part in parts)


def blocks_of(cut: Cut, block: Sequence[int]) -> Cut:
    """Return the blocks that a cut in elements covers: of scales, or of bytes that pack several elements.

    >>> blocks_of((slice(0, 4096), slice(256, 512)), (1, 32))
    (slice(0, 4096, None), slice(8, 16, None))
    """
    return tuple(slice(part.start // size, -(-part.stop // size)) for part, size in zip(cut, block, strict=True))
