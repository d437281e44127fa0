"""Routed experts, weights in FP4 or FP8, of four bits or unquantized: rows grouped by expert, two matrix products, an ordered sum.

    a, b = r(x @ w1_e.T), r(x @ w3_e.T)                                      quantized: x in FP8, per 128 channels
    u    = r(silu(min(a, limit)) * clamp(b, -limit, limit) * weight)         quantized: then to FP8, again per 128
    y    = sum_k r(u_k @ w2_e(k).T)                                          float32, in the order of k

r rounds to the activations' dtype: bfloat16 where weights are quantized. Where ranks share the width I, each has a part of every
u_k @ w2_e(k).T, which is not rounded before the parts are added up.

Source: DeepSeek-V4 specification 2.3, 3.8 and 4.1.  Numerics, quantized: the sum over each 128 inputs is scaled and added in
float32, one after the other, whatever else is computed: a token's result depends on the token alone. Against the reference, which
multiplies the dequantized numbers in float32, rounded values differ in their last place here and there, and where that moves an FP8
code of ``u``, by what one code is worth: at most 2^-5 of the largest result, 2^-9 in the root of the mean square.
Unquantized: products are accumulated in float32. The kernels' sums have another order, which follows from the weights' shape alone:
against the reference a result differs by 2^-14 of the largest in float32, and by 2^-6 of it in bfloat16. Weights of four bits
(``kernels/four_bit``) are the same to both products, dequantized in float32; the kernels round them to the inputs' dtype first.

Tensor cores take FP4 numbers as e5m2, which has room for 27 scales: enough for those of a whole row, so each number is multiplied
by its group's scale, relative to the row's, while it is widened, and sums need none. A group whose scale is less than 2^-26 of the
largest in its row, should a checkpoint have one, is rounded when it is stored, by at most 2^-28 of that one; others are exact.

How weights lie in memory ("tiles"): a matrix [N, K] is cut into tiles of 64 rows and 128 columns. A tile is two (FP4) or four (FP8)
pieces of 2048 bytes, each [4, 8, 4, 2, 2, 4]: 16 bytes for each of 128 threads, which are the four 32-bit operands that a thread
hands to a tensor core for 64 x 32 codes; so a tile is read in whole lines and never changes places. In row and column bits a byte
of a piece is (row 5-4, row 2-0, column 3-2, column 4, row 3, column 1-0). Four bytes of FP4 hold the codes of four columns from j
on and of four from j + 32 on, of a piece's 64, j < 32: the eight magnitudes in the nibbles' lower three bits, from the lowest on,
four of which select bytes of a table; the first four signs in the bytes' bits 7, the others in bits 3. Each row of a tile has one
32-bit word of scales: a float32, or a byte for each group of 32 whose bits 6-2 are the exponent, 1 to 27, over that of the row, an
e8m0 byte of which bits 1-0 are two bits, the first group's the lowest. In ``w13``, the rows with row bit 3 clear are those of w1
(gate), the others those of w3 (up).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.four_bit import FourBit, kernels_take
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
_PIECE = 2048
_FP4_BYTES, _FP8_BYTES = 2 * _PIECE, 4 * _PIECE
_MOST_EXPONENT = 27  # of a scale over its row's; the least is 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """A stack of matrices [E, N, K] in tiles.

    Attributes:
        codes: uint8 [E, N / 64, K / 128, 4096] of FP4, or [..., 8192] of FP8.
        scales: int32 [E, N / 64, K / 128, 64].
    """

    codes: Tensor
    scales: Tensor

    @staticmethod
    def shapes(count: int, rows: int, columns: int, *, fp4: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of codes and scales."""
        assert rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0, (rows, columns)
        tiles = (count, rows // TILE_ROWS, columns // TILE_COLUMNS)
        return (*tiles, _FP4_BYTES if fp4 else _FP8_BYTES), (*tiles, TILE_ROWS)

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
        """Take a matrix of the checkpoint.

        Args:
            expert: Which matrix of the stack.
            weight: Packed FP4 int8/uint8 [N, K / 2], or float8_e4m3fn [N, K].
            scale: e8m0 [N, K / 32]; or e8m0 or float32 [N / 128, K / 128].
            half: ``weight`` has N / 2 rows, which fill row bit 3 = ``half`` (see above); by default it has all.
        """
        device = self.codes.device
        store_matrix(self.codes[expert], self.scales[expert], weight.to(device), scale.to(device), half)

    def load(self, expert: int, half: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a matrix as ``store`` takes it; the scales of FP8 as float32 per row and 128 columns."""
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
        codes, words: What ``Tiles`` has of it.
        weight, scale, half: See ``Tiles.store``.
    """
    fp4 = codes.shape[-1] == _FP4_BYTES
    if fp4:
        numbers, scales = _fit(unpack_fp4(weight), scale.view(torch.uint8))
    else:
        rows = e8m0_to_float(scale).repeat_interleave(128, 0)[: weight.shape[0]]
        numbers, scales = weight.view(torch.uint8), rows.contiguous().view(torch.int32)
    parts = [(numbers, scales)] if half is not None else zip(_split_halves(numbers), _split_halves(scales), strict=True)
    for bit, (part, part_scales) in enumerate(parts, half or 0):
        home, home_scales = _homes(codes, words)
        if fp4:
            eight = part.unflatten(-1, (-1, 2, 8, 4)).transpose(-3, -2)  # [N, K / 64, 8, 2, 4]
            first, second = (eight & 8).unbind(-2)
            part = (pack_fp4(eight.flatten(-2) & 7) | first << 4 | second).flatten(1)
        tiles, chunks, pieces = home.shape[:3]
        home[..., bit, :] = part.view(tiles, 4, 8, chunks, pieces, 2, 4, 4).permute(0, 3, 4, 1, 2, 6, 5, 7)
        home_scales[..., bit, :] = part_scales.view(tiles, 4, 8, chunks).permute(0, 3, 1, 2)


def _homes(codes: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a matrix: codes [tiles, chunks, P, 4, 8, 4, 2, 2 halves, 4], scales [tiles, chunks, 4, 2 halves, 8]."""
    return codes.unflatten(-1, (-1, 4, 8, 4, 2, 2, 4)), words.unflatten(-1, (4, 2, 8))


def _load_half(codes: Tensor, words: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return half of the rows: uint8 [N / 2, K], a byte for each code, and int32 [N / 2, K / 128], words of scales."""
    home, scales = _homes(codes, words)
    rows = home[..., half, :].permute(0, 3, 4, 1, 2, 6, 5, 7).flatten(3).flatten(0, 2)
    if codes.shape[-1] == _FP4_BYTES:
        bytes_ = rows.unflatten(-1, (-1, 8, 4))
        signs = torch.stack([bytes_ >> 4 & 8, bytes_ & 8], -2)  # [N / 2, K / 64, 8, 2, 4]
        eight = unpack_fp4(bytes_ & 0x77).view(signs.shape) | signs
        rows = eight.transpose(-3, -2).flatten(1)
    return rows, scales[..., half, :].permute(0, 2, 3, 1).flatten(0, 2).contiguous()


def scale_words(scale: Tensor, base: Tensor) -> Tensor:
    """Return the words of FP4 scales, int32 [..., K / 128].

    Args:
        scale: e8m0 bytes [..., K / 32], each 1 to 27 above ``base``.
        base: e8m0 bytes of the rows [..., 1].
    """
    places = torch.arange(0, 8, 2, device=base.device).repeat(scale.shape[-1] // 4)
    return ((scale.int() - base.int()) << 2 | (base.int() >> places & 3)).to(torch.uint8).view(torch.int32)


def _e8m0(words: Tensor) -> Tensor:
    """Return the e8m0 bytes, uint8 [..., K / 32], of words of FP4 scales."""
    bytes_ = words.view(torch.uint8).unflatten(-1, (-1, 4))
    base = ((bytes_.int() & 3) << torch.arange(0, 8, 2, device=words.device)).sum(-1, keepdim=True)
    scale: Tensor = (bytes_ >> 2) + base
    return scale.to(torch.uint8).flatten(-2)


def _fit(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP4 codes, one in each byte, and the words of their scales; rounds groups that are too small for their row."""
    base = (scale.amax(-1, keepdim=True).int() - _MOST_EXPONENT).clamp_min(0)
    least = (base + 1).to(torch.uint8)
    if bool((scale < least).any()):
        numbers = e2m1_values(codes).unflatten(-1, (-1, 32))
        shrunk = torch.ldexp(numbers, (scale.int() - least.int()).clamp_max(0)[..., None]).flatten(-2)
        codes, scale = e2m1_codes(shrunk), torch.maximum(scale, least)
    return codes, scale_words(scale, base)


def _split_halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows whose number has bit 3 clear, and the others."""
    first, second = rows.unflatten(0, (-1, 2, 8)).unbind(1)
    return first.flatten(0, 1), second.flatten(0, 1)


def _join_halves(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first.unflatten(0, (-1, 8)), second.unflatten(0, (-1, 8))], 1).flatten(0, 2)


def can_tile(hidden: int, width: int) -> bool:
    """Return whether experts of this size can lie in tiles."""
    return hidden % FP8_GROUP == 0 and width % FP8_GROUP == 0


class ExpertInputs(NamedTuple):
    """What experts compute from.

    Attributes:
        x: Inputs [T, D]: float8_e4m3fn codes of numbers below 2^100; with unquantized weights float32 or bfloat16.
        x_scales: Scale bytes of the codes, uint8 [T, D / 128]; ``None`` with unquantized weights.
        slots_TK: Which experts, int64; ascending, so that the sum is in their order. E means none, and adds nothing.
        weight_TK: float32, applied before ``w2``.
        w13: Gate and up, [E, 2 I, D]; outside of tiles, the rows of w1 (gate) lie above those of w3 (up).
        w2: [E, D, I].
        limit: Of the activation.
        partial: These experts have a part of the width, other ranks the rest: each one's result stays float32.
        row_tile: As for ``gemm.matmul_rows``, with unquantized weights; the kernels do without.
        round_inputs: With unquantized weights, both products see their inputs rounded to FP8, 1x128, as quantized models do: by the
            reference only.
    """

    x: Tensor
    x_scales: Tensor | None
    slots_TK: Tensor
    weight_TK: Tensor
    w13: Tiles | FourBit | Tensor
    w2: Tiles | FourBit | Tensor
    limit: float
    partial: bool = False
    row_tile: int | None = None
    round_inputs: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """``(E, D, I)``."""
        count, hidden, width = self.w2.shape
        return count, hidden, width

    @property
    def dtype(self) -> torch.dtype:
        """Of each expert's result."""
        if self.partial:
            return torch.float32
        return torch.bfloat16 if isinstance(self.w2, Tiles) else self.x.dtype


class ExpertSum(NamedTuple):
    """A sum over experts that is still to be taken: the routed ones in order, then the shared one, float32, rounded once.

    Attributes:
        slots_TK: Experts by their slots, int64; where there is no such slot nothing is added, whatever the output.
        outputs_TKD: bfloat16 or float32 [T, K, D].
        shared_TD: The shared expert's result, [T, D]; ``None`` where another rank has it.
        experts: How many slots there are.
    """

    slots_TK: Tensor
    outputs_TKD: Tensor
    shared_TD: Tensor | None
    experts: int


def experts_forward(given: ExpertInputs, shared_TD: Tensor | None = None) -> Tensor:
    """Run every token through its experts and sum, see ``experts_outputs`` and ``sum_experts``."""
    return sum_experts(ExpertSum(given.slots_TK, experts_outputs(given), shared_TD, given.sizes[0]))


def _suits(given: ExpertInputs) -> bool:
    if isinstance(given.w2, FourBit):
        return isinstance(given.w13, FourBit) and kernels_take(given.w13.group) and kernels_take(given.w2.group)
    return not given.round_inputs


@op("experts.triton:experts_outputs_triton", suits=_suits)
def experts_outputs(given: ExpertInputs) -> Tensor:
    """Return each expert's result, [T, K, D] in ``given.dtype``: zero without an expert, or from a kernel anything."""
    x_TD, one = _quantized_expert(given) if isinstance(given.w2, Tiles) else _unquantized_expert(given)
    (tokens, top_k), (count, hidden, _) = given.slots_TK.shape, given.sizes
    rows_of: dict[int, list[int]] = {}
    for row, expert in enumerate(given.slots_TK.flatten().tolist()):
        if expert < count:
            rows_of.setdefault(expert, []).append(row)
    weight_N1 = given.weight_TK.reshape(-1, 1)
    outputs_ND = weight_N1.new_zeros(tokens * top_k, hidden)
    for expert, rows in rows_of.items():
        rows_N = torch.tensor(rows, dtype=torch.int64, device=x_TD.device)
        result = one(expert, x_TD.index_select(0, rows_N // top_k), weight_N1.index_select(0, rows_N))
        outputs_ND.index_copy_(0, rows_N, result)
    return outputs_ND.view(tokens, top_k, hidden).to(given.dtype)


Expert = Callable[[int, Tensor, Tensor], Tensor]
"""From an expert, rows of inputs [N, D] and their weights [N, 1] to its results, float32 [N, D]."""


def _quantized_expert(given: ExpertInputs) -> tuple[Tensor, Expert]:
    """Return the inputs as float32, and what an expert makes of rows of them, on dequantized numbers."""
    w13, w2 = given.w13, given.w2
    assert isinstance(w13, Tiles) and isinstance(w2, Tiles) and given.x_scales is not None

    def one(expert: int, x: Tensor, weight_N1: Tensor) -> Tensor:
        gate, up = ((x @ w13.dequantize(expert, half).T).bfloat16() for half in (0, 1))
        u = (swiglu(gate, up, given.limit) * weight_N1).bfloat16()
        return round_fp8(u, FP8_GROUP).float() @ w2.dequantize(expert).T

    return dequantize_fp8(given.x, given.x_scales, FP8_GROUP), one


def _unquantized_expert(given: ExpertInputs) -> tuple[Tensor, Expert]:
    """Return the same of unquantized weights, and of those of four bits."""
    w13, w2, dtype, row_tile = given.w13, given.w2, given.x.dtype, given.row_tile
    assert not isinstance(w13, Tiles) and not isinstance(w2, Tiles)
    numbers = torch.float32 if isinstance(w2, FourBit) else w2.dtype
    width, wide = w2.shape[2], torch.float32 if given.partial else numbers

    def as_input(x: Tensor) -> Tensor:
        return (round_fp8(x, FP8_GROUP) if given.round_inputs else x).to(numbers)

    def one(expert: int, x: Tensor, weight_N1: Tensor) -> Tensor:
        h_NI = matmul_rows(x, _matrix(w13, expert), row_tile).to(dtype)
        u_NI = as_input((swiglu(h_NI[:, :width], h_NI[:, width:], given.limit) * weight_N1).to(dtype))
        return matmul_rows(u_NI.to(wide), _matrix(w2, expert).to(wide), row_tile).float()

    return as_input(given.x), one


def _matrix(stack: FourBit | Tensor, expert: int) -> Tensor:
    return stack.of_expert(expert).dequantize() if isinstance(stack, FourBit) else stack[expert]


@op("experts.triton:combine_triton", suits=lambda parts: not parts.outputs_TKD.requires_grad)
def sum_experts(parts: ExpertSum) -> Tensor:
    """Return the sum, [T, D] in the dtype of the shared expert's result, or float32 without that."""
    found_TK1 = (parts.slots_TK < parts.experts)[..., None]
    total, *others = torch.where(found_TK1, parts.outputs_TKD, 0.0).float().unbind(1)
    for output in others:
        total = total + output
    return total if parts.shared_TD is None else (total + parts.shared_TD.float()).to(parts.shared_TD.dtype)
