"""A family's tables of checkpoint tensors: shapes and kinds, storage formats, and sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from dsv4lite.parallel.shard import Rule
from dsv4lite.weights.checkpoint import ExpertFormat

TensorKind = Literal["dense", "expert", "bf16", "f32", "i64"]


class MatrixFormat(NamedTuple):
    """A storage format of quantized matrices.

    Attributes:
        pack: Elements per stored element along the input dimension.
        block: Elements per scale along (out, in).
        dtype: Dtype of the codes in checkpoints that this package writes.
        scales: File-format codes of the dtypes that scales may have.
    """

    pack: int
    block: tuple[int, int]
    dtype: torch.dtype
    scales: tuple[str, ...]

    def blocks(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix ``[out, in]``."""
        return tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True))


FORMATS: Mapping[str, MatrixFormat] = {
    "fp4": MatrixFormat(2, (1, 32), torch.int8, ("F8_E8M0",)),
    "fp8": MatrixFormat(1, (128, 128), torch.float8_e4m3fn, ("F8_E8M0", "F32")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The tables of one family. Official names: ``embed.weight``, ``layers.N.…``, ``mtp.N.…`` (drafter); others belong to the head.

    Attributes:
        specs: Every tensor of a config's model by its official name; matrices are ``[out, in]``, and scales are not listed.
        sharding: How the ranks share each tensor.
        divides: Sizes of a config that an axis must divide: the key in ``config.json``, the size, the axis.
    """

    specs: Callable[[Any], dict[str, TensorSpec]]
    sharding: Mapping[str, Rule]
    divides: Callable[[Any], tuple[tuple[str, int, str], ...]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the model.

    Attributes:
        shape: In elements, before packing.
        kind: ``dense`` and ``expert`` matrices are quantized in quantized checkpoints; the others are stored in the dtype of that
            name.
    """

    shape: tuple[int, ...]
    kind: TensorKind


def swiglu_specs(name: str, hidden_size: int, width: int, kind: TensorKind) -> dict[str, TensorSpec]:
    """Return the three matrices of a feed-forward layer: w1 and w3 ``[width, hidden_size]``, w2 ``[hidden_size, width]``."""
    inner, outer = TensorSpec((width, hidden_size), kind), TensorSpec((hidden_size, width), kind)
    return {f"{name}.w1.weight": inner, f"{name}.w2.weight": outer, f"{name}.w3.weight": inner}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a checkpoint stores it: each packed byte is an element, and scales are separate tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def stored_form(spec: TensorSpec, *, quantized: bool, expert_format: ExpertFormat) -> ExpertFormat:
    """Return how a checkpoint stores a tensor of the model: a key of ``FORMATS``, or ``"unquantized"``; see ``stored_tensors``."""
    return expert_format if spec.kind == "expert" else "fp8" if spec.kind == "dense" and quantized else "unquantized"


def stored_tensors(name: str, spec: TensorSpec, *, quantized: bool, expert_format: ExpertFormat) -> dict[str, StoredTensor]:
    """Return how a checkpoint stores a tensor of the model: itself, and its scale if it has one.

    Args:
        quantized: The dense matrices are FP8.
        expert_format: Format of the routed experts.
    """
    form = FORMATS.get(stored_form(spec, quantized=quantized, expert_format=expert_format))
    if form is None:
        return {name: StoredTensor(spec.shape, _UNQUANTIZED_DTYPES[spec.kind])}
    rows, columns = spec.shape
    return {
        name: StoredTensor((rows, columns // form.pack), form.dtype),
        name.removesuffix("weight") + "scale": StoredTensor(form.blocks(rows, columns), torch.float8_e8m0fnu),
    }


_UNQUANTIZED_DTYPES: Mapping[str, torch.dtype] = {"f32": torch.float32, "i64": torch.int64} | dict.fromkeys(
    ("dense", "expert", "bf16"), torch.bfloat16
)
