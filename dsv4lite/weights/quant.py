"""How matrices are stored and multiplied: the only place that asks for the format of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dsv4lite.kernels.attention import BLOCK
from dsv4lite.kernels.gemm import ROW_TILE, matmul_rows
from dsv4lite.kernels.quantize import dequantize_matrix, round_fp8

ACTIVATION_GROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The arithmetic of one model instance.

    Attributes:
        dtype: Activations between operators.
        quantized: Apply the roundings of quantized checkpoints: FP8 activations, FP8 kv rows, Hadamard and FP4 index vectors.
        deterministic: A token's result does not depend on what else is computed with it.
        matrix_dtype: Resident form of matrices. On CPU they are widened to float32 once, at load.
        device: Where everything lives.
    """

    dtype: torch.dtype
    quantized: bool
    deterministic: bool
    matrix_dtype: torch.dtype
    device: torch.device

    @classmethod
    def choose(cls, *, dtype: torch.dtype, quantized: bool, deterministic: bool, device: torch.device) -> Numerics:
        """Pick the resident form for a device."""
        matrix_dtype = torch.float32 if device.type == "cpu" else dtype
        return cls(dtype=dtype, quantized=quantized, deterministic=deterministic, matrix_dtype=matrix_dtype, device=device)

    @property
    def row_tile(self) -> int | None:
        """Rows of one matrix product, ``None`` for any number."""
        return ROW_TILE if self.deterministic else None

    @property
    def attention_block(self) -> int | None:
        """Rows of one softmax block, ``None`` for all at once."""
        return BLOCK if self.deterministic or self.dtype != torch.float32 else None

    @property
    def banded(self) -> bool:
        """Whether tokens of a chunk may share their rows, whatever order of summation that gives."""
        return self.attention_block is None


class Matrix(nn.Module):
    """A weight ``[out, in]``, or a stack of them ``[E, out, in]``, in its resident form.

    Several matrices of the checkpoint that share an input may lie in one, row block under row block; ``rows`` names a block.

    Attributes:
        rounds_input: Inputs are rounded to FP8, 1x128, before the product (specification 4.1).
    """

    def __init__(self, *shape: int, numerics: Numerics, rounds_input: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype or numerics.matrix_dtype, device=numerics.device))
        self.rounds_input = rounds_input and numerics.quantized
        self.row_tile = numerics.row_tile

    def rows(self, begin: int, end: int, *, expert: int | None = None) -> MatrixSlot:
        """Return the place of one checkpoint matrix: rows ``begin`` to ``end``, of one expert in a stack."""
        return MatrixSlot(self.weight, begin, end, expert)

    def whole(self) -> MatrixSlot:
        """Return the place of a checkpoint matrix that fills this one."""
        return MatrixSlot(self.weight, 0, self.weight.shape[0], None)

    def stacked(self) -> MatrixSlot:
        """Return the place of a checkpoint matrix whose row blocks are this stack."""
        return MatrixSlot(self.weight, 0, self.weight.shape[0] * self.weight.shape[1], None)


@dataclass(frozen=True, slots=True)
class MatrixSlot:
    """Where one checkpoint matrix goes; it arrives in any format."""

    weight: nn.Parameter
    begin: int
    end: int
    expert: int | None
    kind: Literal["matrix"] = "matrix"

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical ``(out, in)``."""
        return (self.end - self.begin, self.weight.shape[-1])

    def store(self, weight: Tensor, scale: Tensor | None = None) -> None:
        """Convert a matrix of the checkpoint to the resident form."""
        with torch.no_grad():
            home = self.weight.flatten(0, -2) if self.expert is None else self.weight[self.expert]
            home[self.begin : self.end].copy_(dequantize_matrix(weight, scale))


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one checkpoint tensor goes as it is."""

    tensor: Tensor
    kind: Literal["plain"] = "plain"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def store(self, weight: Tensor, scale: Tensor | None = None) -> None:
        """Copy the tensor, cast to the resident dtype."""
        assert scale is None
        with torch.no_grad():
            self.tensor.copy_(weight)


Slot = MatrixSlot | TensorSlot


def round_input(x: Tensor, matrix: Matrix) -> Tensor:
    """Return ``x`` as the matrix wants to see it."""
    return round_fp8(x, ACTIVATION_GROUP) if matrix.rounds_input else x


def linear(x_TK: Tensor, matrix: Matrix, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x @ W.T`` [T, out] in ``dtype`` (default: that of ``x``), accumulated in float32, rounded once."""
    weight = matrix.weight
    return matmul_rows(round_input(x_TK, matrix).to(weight.dtype), weight, matrix.row_tile).to(dtype or x_TK.dtype)
