"""How matrices are stored and multiplied: the only file that distinguishes the formats of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from dsv4lite.errors import CheckpointError
from dsv4lite.kernels.experts import Tiles
from dsv4lite.kernels.four_bit import FourBit, four_bit_linear, round_four_bit
from dsv4lite.kernels.gemm import (
    ROW_TILE,
    dequantize_fp8_rows,
    float_linear,
    fp8_linear,
    fp8_weight_linear,
    fp8_weight_linear_quantize,
    pair_linear,
    scale_rows,
)
from dsv4lite.kernels.quantize import FP8_GROUP, dequantize_fp8, dequantize_matrix, e8m0_to_float, quantize_fp8, round_fp8
from dsv4lite.weights.checkpoint import ExpertFormat

ACTIVATION_GROUP = 128
Rounded = tuple[Tensor, Tensor]
"""Inputs in FP8, one scale per 128 channels: codes float8_e4m3fn [T, K], e8m0 scale bytes uint8 [T, ceil(K / 128)]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The arithmetic of one model instance.

    Attributes:
        dtype: Activations between operators.
        quantized: Apply the roundings of quantized checkpoints: FP8 activations; in V4 FP8 kv rows, Hadamard, FP4 index vectors.
        deterministic: A token's result does not depend on the other tokens of the step.
        matrix_dtype: Dtype of unquantized matrices, and of those that are dequantized at load; float32 on a CPU.
        device: Device of weights and activations.
        resident_fp8: Matrices stored in FP8 stay codes and scales; otherwise they are dequantized at load.
        scale_dtype: Dtype of the scales of FP8 matrices, uint8 for e8m0 bytes or float32; or of the scales of four-bit weights.
        resident_experts: Form of routed experts: ``fp4`` and ``fp8`` lie in tiles (``kernels/experts``), ``four_bit`` in groups
            (``kernels/four_bit``); ``unquantized`` includes experts that are dequantized at load.
        resident_four_bit: Dense matrices stored in four bits, weight-only, stay in four bits.
        drafter_four_bit: The model's own drafter stays in four bits like the other layers; otherwise it is dequantized at load.
        group: Inputs that share a scale in four-bit weights.
        fp8_rows: KV rows are FP8. Families without ``Family.free_rows`` need the value of ``quantized``.
    """

    dtype: torch.dtype
    quantized: bool
    deterministic: bool
    matrix_dtype: torch.dtype
    device: torch.device
    resident_fp8: bool = False
    scale_dtype: torch.dtype = torch.uint8
    resident_experts: ExpertFormat = "unquantized"
    resident_four_bit: bool = False
    drafter_four_bit: bool = False
    group: int = 0
    fp8_rows: bool = False

    @classmethod
    def choose(
        cls,
        *,
        dtype: torch.dtype,
        quantized: bool,
        deterministic: bool,
        device: torch.device,
        fp8_rows: bool | None = None,
        dense_fp8: bool = False,
        scale_dtype: torch.dtype = torch.uint8,
        expert_format: ExpertFormat = "unquantized",
        dense_four_bit: bool = False,
        drafter_four_bit: bool = False,
        group: int = 0,
    ) -> Numerics:
        """Choose the resident forms for a device: a CPU dequantizes all weights.

        Args:
            dtype, quantized, deterministic, device, scale_dtype, drafter_four_bit, group: See the class.
            fp8_rows: See the class; ``None`` stands for the value of ``quantized``.
            dense_fp8: The checkpoint stores every dense matrix in FP8.
            expert_format: How the checkpoint stores routed experts.
            dense_four_bit: The checkpoint stores every dense matrix in four bits, weight-only.
        """
        on_cpu = device.type == "cpu"
        return cls(
            dtype=dtype,
            quantized=quantized,
            deterministic=deterministic,
            matrix_dtype=torch.float32 if on_cpu else dtype,
            device=device,
            resident_fp8=dense_fp8 and not on_cpu,
            scale_dtype=scale_dtype,
            resident_experts=expert_format if (quantized or expert_format == "four_bit") and not on_cpu else "unquantized",
            resident_four_bit=dense_four_bit and not on_cpu,
            drafter_four_bit=drafter_four_bit,
            group=group,
            fp8_rows=quantized if fp8_rows is None else fp8_rows,
        )

    @property
    def uses_library(self) -> bool:
        """Whether a GPU computes products by the matrix library, which it does in float32."""
        return self.dtype == torch.float32

    @property
    def of_drafter(self) -> Numerics:
        """The arithmetic of the model's own drafter."""
        if self.group == 0 or self.drafter_four_bit:
            return self
        return replace(self, resident_four_bit=False, resident_experts="unquantized")

    def fp8_bytes(self, width: int) -> int:
        """Return the bytes of a row of FP8 inputs, codes and scales; 0 if inputs are not quantized."""
        return width + -(-width // ACTIVATION_GROUP) if self.quantized else 0

    @property
    def row_tile(self) -> int | None:
        """Rows that a deterministic product computes at a time; ``None`` for any number."""
        return ROW_TILE if self.deterministic else None


class Matrix(nn.Module):
    """A weight ``[out, in]``, or a stack of weights ``[E, out, in]``, in its resident form.

    One ``Matrix`` may hold several checkpoint matrices that share an input, as consecutive row blocks; ``rows`` names a block.

    Attributes:
        weight: Unquantized numbers, FP8 codes, or bytes of two four-bit codes.
        scale: Scales of FP8 codes, uint8 e8m0 bytes or float32, [S, ceil(in / 128)] with the rows of a stack counted through: one
            per 128 rows as in the checkpoint, or one per row if a row block ends within 128 rows. ``None`` for other weights.
        groups: Scales and offsets of four-bit codes; ``None`` for other weights.
        rounds_input: Inputs are rounded to FP8, with a scale per 128 channels, before the product (specification 4.1).
    """

    def __init__(
        self,
        *shape: int,
        numerics: Numerics,
        rounds_input: bool = False,
        fp8: bool = False,
        boundaries: Sequence[int] = (),
        four_bit: bool | None = None,
    ) -> None:
        """Allocate.

        Args:
            shape: ``[out, in]`` or ``[E, out, in]``.
            numerics: Chooses the resident form, and whether inputs are rounded at all.
            rounds_input: Quantized models round the inputs.
            fp8: Quantized checkpoints store the matrix in FP8, one scale per 128 x 128, or in a weight-only format.
            four_bit: Keep four bits; ``None``: as ``numerics.resident_four_bit`` says, if ``fp8``.
            boundaries: Rows at which one matrix of the checkpoint ends and another begins.
        """
        super().__init__()
        self.shape, self.row_tile = shape, numerics.row_tile
        self.rounds_input = rounds_input and numerics.quantized
        self.scale: nn.Parameter | None = None
        self.groups: nn.ParameterList | None = None
        if fp8 and numerics.resident_four_bit if four_bit is None else four_bit:
            parts = FourBit.empty(*shape, group=numerics.group, scale_dtype=numerics.scale_dtype, device=numerics.device)
            self.weight, *groups = (nn.Parameter(part, requires_grad=False) for part in parts)
            self.groups = nn.ParameterList(groups)
            return
        dtype = numerics.matrix_dtype
        if fp8 and numerics.resident_fp8:
            dtype = torch.float8_e4m3fn
            per = 1 if any(row % FP8_GROUP for row in boundaries if row < shape[-2]) else FP8_GROUP
            blocks = (-(-prod(shape[:-1]) // per), -(-shape[-1] // FP8_GROUP))
            self.scale = nn.Parameter(torch.empty(blocks, dtype=numerics.scale_dtype, device=numerics.device), requires_grad=False)
        self.weight = nn.Parameter(
            torch.empty(shape, dtype=dtype, device=numerics.device), requires_grad=dtype != torch.float8_e4m3fn
        )

    @property
    def stored(self) -> Tensor | FourBit:
        """The weight in the form that kernels take."""
        return self.weight if self.groups is None else FourBit(self.weight, *self.groups)

    def rows(self, begin: int, end: int, *, expert: int = 0) -> MatrixSlot:
        """Return the slot of one checkpoint matrix: rows ``begin`` to ``end``, of one expert in a stack."""
        first = expert * self.shape[-2]
        return MatrixSlot(self, first + begin, first + end)

    def whole(self) -> MatrixSlot:
        """Return the slot of a checkpoint matrix that fills this matrix, or this whole stack."""
        return MatrixSlot(self, 0, prod(self.shape[:-1]))


class _Stored(ABC):
    """A slot: the place of one checkpoint tensor, in its resident form.

    Each slot has ``shape``, of a matrix ``(out, in)``; ``tensors``, in which its numbers lie; and ``values()``, the numbers in
    float32, or ids as they are.
    """

    __slots__ = ()
    kind: Literal["matrix", "tensor"] = "matrix"

    @property
    def fills(self) -> bool:
        """Whether the tensor fills ``places``; otherwise another slot has the rest of them."""
        return True

    @property
    @abstractmethod
    def places(self) -> tuple[Tensor, ...]:
        """Views of the parts of ``tensors`` that ``store`` writes; each is contiguous."""

    @abstractmethod
    def converted(self, weight: Tensor | FourBit, scale: Tensor | None, room: Iterator[Tensor]) -> Sequence[Tensor]:
        """Return what ``store`` copies to each of ``places``: tensors of their shapes, which the copy casts.

        Args:
            weight, scale: See ``store``.
            room: A tensor for each place, with its present bytes, which may be overwritten and returned; few conversions need it.
        """

    def store(self, weight: Tensor | FourBit, scale: Tensor | None = None) -> None:
        """Convert a checkpoint tensor to the resident form and write it.

        Raises:
            CheckpointError: The resident form cannot hold it.
        """
        places = self.places
        for place, part in zip(places, self.converted(weight, scale, iter(places)), strict=True):
            place.copy_(part)  # does nothing if ``part`` is ``place``


@dataclass(frozen=True, slots=True)
class MatrixSlot(_Stored):
    """Rows of a ``Matrix`` that hold one checkpoint matrix, which may arrive in any format; rows of a stack are counted through."""

    matrix: Matrix
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.end - self.begin, self.matrix.shape[-1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.matrix.parameters())

    @property
    def places(self) -> tuple[Tensor, ...]:
        if isinstance(stored := self.matrix.stored, FourBit):
            return tuple(stored.rows(self.begin, self.end))
        home, scales = self.matrix.weight.detach().flatten(0, -2)[self.begin : self.end], self.matrix.scale
        if scales is None:
            return (home,)
        per = scale_rows(self.matrix.weight, scales)
        return home, scales[self.begin // per : (self.end - 1) // per + 1]

    def values(self) -> Tensor:
        home, *scales = self.places
        if self.matrix.groups is not None:
            return FourBit(home, *scales).dequantize()
        return dequantize_fp8_rows(home, *scales) if scales else home.float()

    def converted(self, weight: Tensor | FourBit, scale: Tensor | None, room: Iterator[Tensor]) -> Sequence[Tensor]:
        if isinstance(stored := self.matrix.stored, FourBit):
            if isinstance(weight, FourBit):
                return weight
            return round_four_bit(weight, group=stored.group, scale_dtype=stored.scales.dtype)
        weight = weight.dequantize() if isinstance(weight, FourBit) else weight
        scales = self.matrix.scale
        if scales is None:
            unquantized = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
            return (weight if unquantized else dequantize_matrix(weight, scale),)
        wide = scales.dtype == torch.float32
        wanted = [torch.float8_e8m0fnu, *([torch.float32] if wide else [])]
        if scale is None or weight.dtype != torch.float8_e4m3fn or scale.dtype not in wanted:
            raise _misfit(weight, scale, f"float8_e4m3fn with {' or '.join(str(d).removeprefix('torch.') for d in wanted)} scales")
        source = e8m0_to_float(scale) if wide else scale.view(torch.uint8)
        if scale_rows(self.matrix.weight, scales) == 1:
            source = source.repeat_interleave(FP8_GROUP, 0)[: self.end - self.begin]
        return weight, source


def _misfit(weight: Tensor, scale: Tensor | None, wanted: str) -> CheckpointError:
    given = f"{weight.dtype} with scales {None if scale is None else scale.dtype}"
    return CheckpointError(f"a matrix is {given}, where this model keeps {wanted}")


class TiledStack(nn.Module):
    """A stack of matrices ``[E, out, in]`` in FP4 or FP8 tiles. Its kernels take FP8 inputs, and rows need no tile."""

    row_tile, rounds_input = None, False

    def __init__(self, *shape: int, numerics: Numerics) -> None:
        super().__init__()
        codes, scales = Tiles.shapes(*shape, fp4=numerics.resident_experts == "fp4")
        self.shape = shape
        self.codes = nn.Parameter(torch.empty(codes, dtype=torch.uint8, device=numerics.device), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(scales, dtype=torch.int32, device=numerics.device), requires_grad=False)

    @property
    def stored(self) -> Tiles:
        """The stack in the form that kernels take."""
        return Tiles(self.codes, self.scales)

    def rows(self, begin: int, end: int, *, expert: int) -> TileSlot:
        """Return the slot of one checkpoint matrix: all rows of an expert, or their first (gate) or second (up) half."""
        return TileSlot(self, expert, None if end - begin == self.shape[1] else begin // (end - begin))


@dataclass(frozen=True, slots=True)
class TileSlot(_Stored):
    """One matrix of a ``TiledStack``, or one half of its rows, which holds one checkpoint matrix."""

    stack: TiledStack
    expert: int
    half: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        _, rows, columns = self.stack.shape
        return (rows if self.half is None else rows // 2, columns)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.stack.codes, self.stack.scales

    @property
    def fills(self) -> bool:
        return self.half is None

    @property
    def places(self) -> tuple[Tensor, ...]:
        expert = slice(self.expert, self.expert + 1)
        return self.stack.codes[expert], self.stack.scales[expert]

    def values(self) -> Tensor:
        return self.stack.stored.dequantize(self.expert, self.half)

    def converted(self, weight: Tensor | FourBit, scale: Tensor | None, room: Iterator[Tensor]) -> Sequence[Tensor]:
        assert isinstance(weight, Tensor)
        fp4 = self.stack.stored.fp4
        if scale is None or weight.dtype not in ((torch.int8, torch.uint8) if fp4 else (torch.float8_e4m3fn,)):
            raise _misfit(weight, scale, "int8 with scales per 32 inputs" if fp4 else "float8_e4m3fn with scales per 128 x 128")
        tiles = Tiles(next(room), next(room))
        tiles.store(0, weight, scale, self.half)
        return tiles.codes, tiles.scales


@dataclass(frozen=True, slots=True)
class TensorSlot(_Stored):
    """A tensor that holds one checkpoint tensor, cast to its dtype."""

    tensor: Tensor
    kind = "tensor"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def places(self) -> tuple[Tensor, ...]:
        return (self.tensor.detach(),)

    def values(self) -> Tensor:
        return self.tensor.detach().float() if self.tensor.is_floating_point() else self.tensor

    def converted(self, weight: Tensor | FourBit, scale: Tensor | None, room: Iterator[Tensor]) -> Sequence[Tensor]:
        assert scale is None and isinstance(weight, Tensor)
        return (weight,)


@dataclass(frozen=True, slots=True)
class IdSlot(TensorSlot):
    """A table of ids [N, K]. ``converted`` checks it, because kernels use the ids as indices without checks.

    Attributes:
        name: Official name of the table.
        limit: Ids must be below it, and those of a row distinct.
    """

    name: str = ""
    limit: int = 0

    def _problem(self, weight: Tensor) -> str:
        """Return what is wrong with a table; the empty string for a valid one."""
        wrong = ((weight < 0) | (weight >= self.limit)).nonzero()
        if len(wrong):
            at = wrong[0].tolist()
            first = f"{weight[*at].item()} at {at}"
            return f"{self.name}: {len(wrong)} ids are out of range, the first one {first}; ids are from 0 to {self.limit - 1}"
        repeated = (weight.sort(-1).values.diff(dim=-1) == 0).any(-1).nonzero()
        if len(repeated):
            row = int(repeated[0])
            return f"{self.name}: {len(repeated)} rows have an id twice, the first one row {row}: {weight[row].tolist()}"
        return ""

    def converted(self, weight: Tensor | FourBit, scale: Tensor | None, room: Iterator[Tensor]) -> Sequence[Tensor]:
        assert isinstance(weight, Tensor)
        if problem := self._problem(weight):
            advice = "fetch the checkpoint again, or take the config.json that came with it"
            raise CheckpointError(f"a table of experts is wrong; {advice}:", problems=[problem])
        return (weight,)


@dataclass(frozen=True, slots=True)
class CopiedSlot(_Stored):
    """The slots of one checkpoint matrix that is stored several times: an expert with copies."""

    copies: tuple[MatrixSlot | TileSlot, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.copies[0].shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for copy in self.copies for tensor in copy.tensors)

    @property
    def fills(self) -> bool:
        return self.copies[0].fills

    @property
    def places(self) -> tuple[Tensor, ...]:
        return tuple(place for copy in self.copies for place in copy.places)

    def values(self) -> Tensor:
        return self.copies[0].values()

    def converted(self, weight: Tensor | FourBit, scale: Tensor | None, room: Iterator[Tensor]) -> Sequence[Tensor]:
        return [*self.copies[0].converted(weight, scale, room)] * len(self.copies)


Slot = MatrixSlot | TileSlot | TensorSlot | CopiedSlot
NamedSlots = Iterator[tuple[str, Slot]]


def parameter(*shape: int, numerics: Numerics, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Allocate a parameter that is not a matrix: a norm, a table, a bias."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=numerics.device))


def linear(
    x_TK: Tensor, matrix: Matrix, dtype: torch.dtype | None = None, *, rounded: Rounded | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ``x @ W.T`` [T, out] in ``dtype`` (default: that of ``x``), accumulated in float32, rounded once.

    Args:
        matrix: W; also says whether ``x`` is rounded to FP8 first.
        dtype: Of the result.
        rounded: ``x`` in FP8, if it has been computed.
        out: Contiguous tensor that receives the result.
    """
    dtype, weight, tile = dtype or x_TK.dtype, matrix.stored, matrix.row_tile
    if isinstance(weight, FourBit):
        result = four_bit_linear(x_TK, weight, dtype, tile)
        return result if out is None else out.copy_(result)
    if matrix.scale is None:
        x_TK = round_fp8(x_TK, ACTIVATION_GROUP) if matrix.rounds_input else x_TK
        return float_linear(x_TK, weight, dtype, tile, out=out)
    result = rounded_linear(*(rounded or quantize_fp8(x_TK, ACTIVATION_GROUP)), matrix, dtype)
    return result if out is None else out.copy_(result)


def rounded_linear(codes: Tensor, scales: Tensor | None, matrix: Matrix, dtype: torch.dtype, *, rows: int | None = None) -> Tensor:
    """Return ``x @ W.T`` [T, out] for inputs that have been rounded.

    Args:
        codes, scales: ``Rounded``; or unrounded inputs and ``None``, if the matrix does not round its inputs.
        dtype: Of the result.
        rows: Return the products with the first ``rows`` rows of W; ``None`` for all. Deterministic products compute all rows,
            because a smaller product may sum in another order.
    """
    if matrix.scale is None:
        x_TK = codes if scales is None else dequantize_fp8(codes, scales, ACTIVATION_GROUP).to(dtype)
        return float_linear(x_TK, matrix.weight, dtype, matrix.row_tile)[:, :rows]
    assert matrix.rounds_input and scales is not None
    count = len(matrix.weight) if rows is None or matrix.row_tile is not None else rows
    blocks = -(-count // scale_rows(matrix.weight, matrix.scale))
    return fp8_linear(codes, scales, matrix.weight[:count], matrix.scale[:blocks], dtype, matrix.row_tile)[:, :rows]


def linear_pair(x_TK: Tensor, fp8: Matrix, other: Matrix, *, rounded: Rounded | None = None) -> tuple[Tensor, Tensor]:
    """Return ``linear(x, fp8)`` and, in float32, ``linear(x, other)``. Products of few rows run at the same time.

    Args:
        fp8: A matrix that quantized checkpoints store in FP8.
        other: A matrix that they store in bfloat16, whose inputs are not rounded.
        rounded: ``x`` in FP8, if it has been computed.
    """
    if fp8.scale is None or other.scale is not None or other.rounds_input:
        return linear(x_TK, fp8, rounded=rounded), linear(x_TK, other, torch.float32)
    codes, scales = rounded or quantize_fp8(x_TK, ACTIVATION_GROUP)
    return pair_linear(x_TK, codes, scales, fp8.weight, fp8.scale, other.weight, fp8.row_tile)


def grouped_then_linear(x_TGK: Tensor, grouped: Matrix, dense: Matrix, dtype: torch.dtype) -> Tensor:
    """Return ``linear(y, dense)`` [T, out] in ``dtype``, where y [T, G, inner] is ``x @ W.T`` in each group of ``grouped``.

    The inputs of ``grouped`` are not rounded (specification 4.4). A single row is quantized for ``dense`` in the first launch.
    """
    weight, scale, row_tile = grouped.weight, grouped.scale, grouped.row_tile
    if scale is None:
        return linear(float_linear(x_TGK, weight, x_TGK.dtype, row_tile).flatten(1), dense, dtype)
    if dense.scale is None or len(x_TGK) != 1:
        return linear(fp8_weight_linear(x_TGK, weight, scale, row_tile).flatten(1), dense, dtype)
    return rounded_linear(*fp8_weight_linear_quantize(x_TGK, weight, scale, row_tile), dense, dtype)
