"""Routed experts with FP4, FP8, 4-bit or unquantized weights: rows grouped by expert, two matrix products, an ordered sum.

    a, b = r(x @ w1_e.T), r(x @ w3_e.T)                                      quantized: x in FP8, per 128 channels
    u    = r(silu(min(a, limit)) * clamp(b, -limit, limit) * weight)         quantized: then to FP8, again per 128
    y    = sum_k r(u_k @ w2_e(k).T)                                          float32, in the order of k

r rounds to the activations' dtype, which is bfloat16 with quantized weights. With tensor parallelism each rank has a slice of the
width I, and rounds its part of u_k @ w2_e(k).T.

Source: DeepSeek-V4 specification 2.3, 3.8 and 4.1.  Numerics, quantized: each sum over 128 inputs is scaled and added to a float32
accumulator, in order, so a token's result does not depend on the rest of the batch. The reference multiplies dequantized numbers in
float32. Compared with it, some rounded values differ in the last place. If that changes an FP8 code of ``u``, results differ by the
step of one code: at most 2^-5 of the largest result, 2^-9 as root mean square.
Unquantized: products are accumulated in float32. The order of the kernels' sums follows from the weights' shape alone and differs
from the reference's: results differ by 2^-14 of the largest in float32, by 2^-6 of it in bfloat16. The reference dequantizes 4-bit
weights (``kernels/four_bit``) to float32; the kernels also round them to the inputs' dtype.

FP4 on tensor cores: the kernels widen FP4 numbers to e5m2, whose exponents have room for 27 different scales. Widening multiplies
each number by its group's scale relative to the scale of the row, so sums over groups need no scales. A group whose scale is less
than 2^-26 of the largest in its row is rounded when the matrix is stored, by at most 2^-28 of that scale; other groups are exact.

Memory layout of weights ("tiles"): a matrix [N, K] is cut into tiles of 64 rows x 128 columns, so that kernels read whole cache
lines. In ``w13``, rows with row bit 3 clear are those of w1 (gate), the others those of w3 (up).

A tile of FP8 has its rows one after the other, and two float32 scales: of the rows whose row bit 3 is clear, and of the others.

A tile of FP4 is two pieces of 2048 bytes, each [4, 8, 4, 2, 2, 4]. A piece has 16 bytes for each of 128 threads: the four 32-bit
operands that a thread passes to a tensor core for 64 x 32 codes, so no byte moves between threads. The address bits of a byte in a
piece are, from the highest: row 5-4, row 2-0, column 3-2, column 4, row 3, column 1-0. A 32-bit word holds eight codes: of columns
j to j + 3 and of j + 32 to j + 35 of the piece's 64, j < 32. The lower three bits of nibble i are the magnitude of code i, so that
four magnitudes at a time select bytes of a table. Bit 7 of byte i is the sign of code i, bit 3 that of code i + 4. Each row has one
32-bit word of scales, with a byte for each group of 32: bits 6-2 are the group's exponent minus that of the row, 1 to 27; bits 1-0
are two bits of the row's exponent, an e8m0 byte whose lowest bits are in the first byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.four_bit import FourBit
from dsv4lite.kernels.gemm import matmul_rows
from dsv4lite.kernels.quantize import (
    FP8_GROUP,
    dequantize_fp4,
    dequantize_fp8,
    e2m1_codes,
    e2m1_values,
    e8m0_to_float,
    pack_fp4,
    round_fp8,
    unpack_fp4,
)
from dsv4lite.kernels.swiglu import swiglu

TILE_ROWS, TILE_COLUMNS = 64, 128
HALF_ROWS = TILE_ROWS // 2
_FP4_BYTES, _FP8_BYTES = TILE_ROWS * TILE_COLUMNS // 2, TILE_ROWS * TILE_COLUMNS
_MOST_EXPONENT = 27  # largest exponent of a group's scale minus that of its row; the smallest is 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """A stack of matrices [E, N, K] in tiles.

    Attributes:
        codes: uint8 [E, N / 64, K / 128, 4096] of FP4, or [..., 8192] of FP8.
        scales: Of FP4 words, int32 [E, N / 64, K / 128, 64]; of FP8 the bits of float32, int32 [E, N / 64, K / 128, 2].
    """

    codes: Tensor
    scales: Tensor

    @staticmethod
    def shapes(count: int, rows: int, columns: int, *, fp4: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of codes and scales."""
        assert rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0, (rows, columns)
        tiles = (count, rows // TILE_ROWS, columns // TILE_COLUMNS)
        return (*tiles, _FP4_BYTES if fp4 else _FP8_BYTES), (*tiles, TILE_ROWS if fp4 else 2)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Logical ``(E, N, K)``."""
        count, tiles, chunks, _ = self.codes.shape
        return count, tiles * TILE_ROWS, chunks * TILE_COLUMNS

    @property
    def fp4(self) -> bool:
        """Whether codes are FP4, not FP8."""
        return self.codes.shape[-1] == _FP4_BYTES

    def store(self, expert: int, weight: Tensor, scale: Tensor, half: int | None = None) -> None:
        """Store a checkpoint's matrix.

        Args:
            expert: Index of the matrix in the stack.
            weight: Packed FP4 int8/uint8 [N, K / 2], or float8_e4m3fn [N, K].
            scale: Of FP4 e8m0 [N, K / 32]; of FP8 e8m0 or float32 [N / 128, K / 128].
            half: 0 or 1: ``weight`` has N / 2 rows, for the places whose row bit 3 is ``half``. ``None``: ``weight`` has all rows.
        """
        device = self.codes.device
        store_matrix(self.codes[expert], self.scales[expert], weight.to(device), scale.to(device), half)

    def load(self, expert: int, half: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a matrix as ``store`` takes it, but FP8 scales as float32 per row and 128 columns."""
        stored = self.codes[expert], self.scales[expert]
        if half is None:
            codes, words = (_join_halves(*parts) for parts in zip(_load_half(*stored, 0), _load_half(*stored, 1), strict=True))
        else:
            codes, words = _load_half(*stored, half)
        if self.fp4:
            return pack_fp4(codes), _e8m0(words)
        return codes.view(torch.float8_e4m3fn), words.view(torch.float32)

    def dequantize(self, expert: int, half: int | None = None) -> Tensor:
        """Return a matrix, or half of its rows, as float32 [N, K]."""
        codes, scale = self.load(expert, half)
        if self.fp4:
            return dequantize_fp4(unpack_fp4(codes), scale, 32)
        return dequantize_fp8(codes, scale, TILE_COLUMNS)


@op("experts.store_triton:store_matrix_triton")
def store_matrix(codes: Tensor, words: Tensor, weight: Tensor, scale: Tensor, half: int | None) -> None:
    """Write a matrix into its tiles.

    Args:
        codes, words: One matrix of ``Tiles.codes`` and of ``Tiles.scales``; written.
        weight, scale, half: See ``Tiles.store``.
    """
    if codes.shape[-1] == _FP8_BYTES:
        numbers, size = weight.view(torch.uint8), TILE_ROWS if half is None else HALF_ROWS
        of_tiles = e8m0_to_float(scale).view(torch.int32).repeat_interleave(FP8_GROUP // size, 0)[: len(codes)]
        for bit, part in enumerate([numbers] if half is not None else _split_halves(numbers), half or 0):
            rows = _fp8_rows(codes, bit)
            rows.copy_(part.view(rows.shape))
            words[..., bit] = of_tiles
        return
    numbers, scales = _fit_scales(unpack_fp4(weight), scale.view(torch.uint8))
    pairs = [(numbers, scales)] if half is not None else zip(_split_halves(numbers), _split_halves(scales), strict=True)
    for bit, (part, part_scales) in enumerate(pairs, half or 0):
        tile_codes, tile_words = _tile_views(codes, words)
        eight = part.unflatten(-1, (-1, 2, 8, 4)).transpose(-3, -2)  # [N, K / 64, 8, 2, 4]
        first, second = (eight & 8).unbind(-2)
        part = (pack_fp4(eight.flatten(-2) & 7) | first << 4 | second).flatten(1)
        tiles, chunks, pieces = tile_codes.shape[:3]
        tile_codes[..., bit, :] = part.view(tiles, 4, 8, chunks, pieces, 2, 4, 4).permute(0, 3, 4, 1, 2, 6, 5, 7)
        tile_words[..., bit, :] = part_scales.view(tiles, 4, 8, chunks).permute(0, 3, 1, 2)


def _tile_views(codes: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of an FP4 matrix: codes [tiles, chunks, 2, 4, 8, 4, 2, 2 halves, 4], scales [tiles, chunks, 4, 2 halves, 8]."""
    return codes.unflatten(-1, (2, 4, 8, 4, 2, 2, 4)), words.unflatten(-1, (4, 2, 8))


def _fp8_rows(codes: Tensor, half: int) -> Tensor:
    """Return a view of half of the rows of a matrix of FP8, [tiles, 4, 8, chunks, 128]."""
    rows: Tensor = codes.unflatten(-1, (4, 2, 8, TILE_COLUMNS))[..., half, :, :]
    return rows.permute(0, 2, 3, 1, 4)


def _load_half(codes: Tensor, words: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return half of the rows: codes, one per byte, uint8 [N / 2, K], and words of scales, int32 [N / 2, K / 128]."""
    if codes.shape[-1] == _FP8_BYTES:
        return _fp8_rows(codes, half).flatten(3).flatten(0, 2), words[..., half].repeat_interleave(HALF_ROWS, 0)
    tile_codes, scales = _tile_views(codes, words)
    bytes_ = tile_codes[..., half, :].permute(0, 3, 4, 1, 2, 6, 5, 7).flatten(3).flatten(0, 2).unflatten(-1, (-1, 8, 4))
    signs = torch.stack([bytes_ >> 4 & 8, bytes_ & 8], -2)  # [N / 2, K / 64, 8, 2, 4]
    eight = unpack_fp4(bytes_ & 0x77).view(signs.shape) | signs
    return eight.transpose(-3, -2).flatten(1), scales[..., half, :].permute(0, 2, 3, 1).flatten(0, 2).contiguous()


def scale_words(scale: Tensor, base: Tensor) -> Tensor:
    """Return the words of FP4 scales, int32 [..., K / 128].

    Args:
        scale: e8m0 bytes [..., K / 32], each 1 to 27 above ``base``.
        base: e8m0 bytes of the rows [..., 1].
    """
    shifts = torch.arange(0, 8, 2, device=base.device).repeat(scale.shape[-1] // 4)
    return ((scale.int() - base.int()) << 2 | (base.int() >> shifts & 3)).to(torch.uint8).view(torch.int32)


def _e8m0(words: Tensor) -> Tensor:
    """Return the e8m0 bytes, uint8 [..., K / 32], of words of FP4 scales."""
    bytes_ = words.view(torch.uint8).unflatten(-1, (-1, 4))
    base = ((bytes_.int() & 3) << torch.arange(0, 8, 2, device=words.device)).sum(-1, keepdim=True)
    scale: Tensor = (bytes_ >> 2) + base
    return scale.to(torch.uint8).flatten(-2)


def _fit_scales(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP4 codes, one per byte, and the words of their scales; round groups whose scale is too small for their row."""
    base = (scale.amax(-1, keepdim=True).int() - _MOST_EXPONENT).clamp_min(0)
    least = (base + 1).to(torch.uint8)
    if bool((scale < least).any()):
        numbers = e2m1_values(codes).unflatten(-1, (-1, 32))
        shrunk = torch.ldexp(numbers, (scale.int() - least.int()).clamp_max(0)[..., None]).flatten(-2)
        codes, scale = e2m1_codes(shrunk), torch.maximum(scale, least)
    return codes, scale_words(scale, base)


def _split_halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows whose index has bit 3 clear, and the others."""
    first, second = rows.unflatten(0, (-1, 2, 8)).unbind(1)
    return first.flatten(0, 1), second.flatten(0, 1)


def _join_halves(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first.unflatten(0, (-1, 8)), second.unflatten(0, (-1, 8))], 1).flatten(0, 2)


def can_tile(hidden: int, width: int) -> bool:
    """Return whether experts of this size can be stored in tiles."""
    return hidden % FP8_GROUP == 0 and width % FP8_GROUP == 0


class ExpertInputs(NamedTuple):
    """Arguments of ``experts_outputs``.

    Attributes:
        x: Inputs [T, D]. With FP4 or FP8 weights float8_e4m3fn codes of numbers below 2^100, otherwise float32 or bfloat16.
        x_scales: Scale bytes of the codes, uint8 [T, D / 128]; ``None`` if ``x`` is not FP8.
        slots_TK: Experts of each token, int64, ascending, so that outputs are summed in this order. E means none and adds nothing.
        weight_TK: Routing weights, float32, applied before ``w2``.
        w13: Gate and up, [E, 2 I, D]. Unless it is in tiles, the rows of w1 (gate) precede those of w3 (up).
        w2: [E, D, I].
        limit: Clamp of the activation.
        row_tile: As for ``gemm.matmul_rows``, with unquantized or 4-bit weights; the kernels ignore it.
        round_inputs: Round the inputs of both products to FP8, 1x128, as quantized models do. Only with unquantized or 4-bit
            weights, and only by the reference.
    """

    x: Tensor
    x_scales: Tensor | None
    slots_TK: Tensor
    weight_TK: Tensor
    w13: Tiles | FourBit | Tensor
    w2: Tiles | FourBit | Tensor
    limit: float
    row_tile: int | None = None
    round_inputs: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """``(E, D, I)``."""
        count, hidden, width = self.w2.shape
        return count, hidden, width

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of each expert's output."""
        return torch.bfloat16 if isinstance(self.w2, Tiles) else self.x.dtype


class ExpertSum(NamedTuple):
    """The terms of a sum over experts: the routed ones in order, then the shared one, added in float32 and rounded once.

    Attributes:
        slots_TK: Slots of the experts, int64; an output whose slot is ``experts`` or more is not added and may hold anything.
        outputs_TKD: bfloat16 or float32 [T, K, D].
        shared_TD: The shared expert's output, [T, D]; ``None`` if another rank has it.
        experts: Number of slots.
    """

    slots_TK: Tensor
    outputs_TKD: Tensor
    shared_TD: Tensor | None
    experts: int


def experts_forward(given: ExpertInputs, shared_TD: Tensor | None = None) -> Tensor:
    """Run every token through its experts and sum their outputs; see ``experts_outputs`` and ``sum_experts``."""
    return sum_experts(ExpertSum(given.slots_TK, experts_outputs(given), shared_TD, given.sizes[0]))


def _suits(given: ExpertInputs) -> bool:
    if isinstance(given.w2, FourBit):
        taken = all(isinstance(w, FourBit) and w.lane_block > 0 for w in (given.w13, given.w2))
        return taken and not given.round_inputs
    return not given.round_inputs


@op("experts.triton:experts_outputs_triton", suits=_suits)
def experts_outputs(given: ExpertInputs) -> Tensor:
    """Return each expert's output, [T, K, D] in ``given.dtype``; zero where there is no expert, or undefined from a kernel."""
    x_TD, run = _quantized_expert(given) if isinstance(given.w2, Tiles) else _unquantized_expert(given)
    (tokens, top_k), (count, hidden, _) = given.slots_TK.shape, given.sizes
    rows_of: dict[int, list[int]] = {}
    for row, expert in enumerate(given.slots_TK.flatten().tolist()):
        if expert < count:
            rows_of.setdefault(expert, []).append(row)
    weight_N1 = given.weight_TK.reshape(-1, 1)
    outputs_ND = weight_N1.new_zeros(tokens * top_k, hidden)
    for expert, rows in rows_of.items():
        rows_N = torch.tensor(rows, dtype=torch.int64, device=x_TD.device)
        result = run(expert, x_TD.index_select(0, rows_N // top_k), weight_N1.index_select(0, rows_N))
        outputs_ND.index_copy_(0, rows_N, result)
    return outputs_ND.view(tokens, top_k, hidden).to(given.dtype)


Expert = Callable[[int, Tensor, Tensor], Tensor]
"""Takes an expert's index, its inputs [N, D] and their routing weights [N, 1]; returns its outputs, float32 [N, D]."""


def _quantized_expert(given: ExpertInputs) -> tuple[Tensor, Expert]:
    """Return the inputs as float32, and the function that runs an expert on dequantized numbers."""
    w13, w2 = given.w13, given.w2
    assert isinstance(w13, Tiles) and isinstance(w2, Tiles) and given.x_scales is not None

    def run(expert: int, x: Tensor, weight_N1: Tensor) -> Tensor:
        gate, up = ((x @ w13.dequantize(expert, half).T).bfloat16() for half in (0, 1))
        u = (swiglu(gate, up, given.limit) * weight_N1).bfloat16()
        return round_fp8(u, FP8_GROUP).float() @ w2.dequantize(expert).T

    return dequantize_fp8(given.x, given.x_scales, FP8_GROUP), run


def _unquantized_expert(given: ExpertInputs) -> tuple[Tensor, Expert]:
    """Return the inputs, and the function that runs an expert with unquantized or 4-bit weights."""
    w13, w2, dtype, row_tile = given.w13, given.w2, given.x.dtype, given.row_tile
    assert not isinstance(w13, Tiles) and not isinstance(w2, Tiles)
    numbers = torch.float32 if isinstance(w2, FourBit) else w2.dtype
    width = w2.shape[2]

    def as_input(x: Tensor) -> Tensor:
        return (round_fp8(x, FP8_GROUP) if given.round_inputs else x).to(numbers)

    def run(expert: int, x: Tensor, weight_N1: Tensor) -> Tensor:
        h_NI = matmul_rows(x, _matrix(w13, expert), row_tile).to(dtype)
        u_NI = as_input((swiglu(h_NI[:, :width], h_NI[:, width:], given.limit) * weight_N1).to(dtype))
        return matmul_rows(u_NI, _matrix(w2, expert), row_tile).float()

    return as_input(given.x), run


def _matrix(stack: FourBit | Tensor, expert: int) -> Tensor:
    return stack.of_expert(expert).dequantize() if isinstance(stack, FourBit) else stack[expert]


@op("experts.triton:combine_triton")
def sum_experts(parts: ExpertSum) -> Tensor:
    """Return the sum, [T, D] in the dtype of the shared expert's output, or float32 without one."""
    found_TK1 = (parts.slots_TK < parts.experts)[..., None]
    total, *others = torch.where(found_TK1, parts.outputs_TKD, 0.0).float().unbind(1)
    for output in others:
        total = total + output
    return total if parts.shared_TD is None else (total + parts.shared_TD.float()).to(parts.shared_TD.dtype)
