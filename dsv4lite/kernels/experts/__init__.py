"""Routed experts whose weights stay in FP4 or FP8: rows grouped by expert, two matrix products, an ordered sum.

    a, b = bf16(x @ w1_e.T), bf16(x @ w3_e.T)                                x in FP8, per 128 channels
    u    = fp8(bf16(silu(min(a, limit)) * clamp(b, -limit, limit) * weight))   again per 128
    y    = sum_k bf16(u_k @ w2_e(k).T)                                       float32, in the order of k

Source: DeepSeek-V4 specification 2.3, 3.8 and 4.1.  Numerics: the sum over each 128 inputs is scaled and added in float32, one
after the other, whatever else is computed: a token's result depends on the token alone. Against the reference, which multiplies the
dequantized numbers in float32, rounded values differ in their last place here and there, and where that moves an FP8 code of ``u``,
by what one code is worth: at most 2^-5 of the largest result, 2^-9 in the root of the mean square. Where ranks share the width I,
each has a part of every y_k, which is not rounded before the parts are added up.

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

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.quantize import (
    dequantize_fp4,
    dequantize_fp8,
    e2m1_codes,
    e2m1_values,
    e8m0_to_float,
    pack_fp4,
    round_fp8,
    unpack_fp4,
)
from dsv4lite.kernels.routing import swiglu

TILE_ROWS, TILE_COLUMNS = 64, 128
HALF_ROWS = TILE_ROWS // 2
GROUP = 128  # activations that share a scale
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
        codes, words = self._numbers(weight.to(device), scale.to(device))
        if half is None:
            halves = zip(_split_halves(codes), _split_halves(words), strict=True)
            for bit, (codes, words) in enumerate(halves):
                self._store_half(expert, codes, words, bit)
        else:
            self._store_half(expert, codes, words, half)

    def load(self, expert: int, half: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a matrix as ``store`` takes it; the scales of FP8 as float32 per row and 128 columns."""
        if half is None:
            codes, words = (
                _join_halves(*parts) for parts in zip(self._load_half(expert, 0), self._load_half(expert, 1), strict=True)
            )
        else:
            codes, words = self._load_half(expert, half)
        if self.fp4:
            return pack_fp4(codes), _e8m0(words)
        return codes.view(torch.float8_e4m3fn), words.view(torch.float32)

    def dequantize(self, expert: int, half: int | None = None) -> Tensor:
        """Return a matrix, or half of its rows, as float32 [N, K]."""
        codes, scale = self.load(expert, half)
        if self.fp4:
            return dequantize_fp4(unpack_fp4(codes), scale, 32)
        return dequantize_fp8(codes, scale, TILE_COLUMNS)

    def _numbers(self, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return a matrix as one byte per code, uint8 [N, K], and one word per row and 128 columns, int32 [N, K / 128]."""
        if self.fp4:
            return _fit(unpack_fp4(weight), scale.view(torch.uint8))
        rows = e8m0_to_float(scale).repeat_interleave(128, 0)[: weight.shape[0]]
        return weight.view(torch.uint8), rows.contiguous().view(torch.int32)

    def _homes(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return views of a matrix: codes [tiles, chunks, P, 4, 8, 4, 2, 2 halves, 4], scales [tiles, chunks, 4, 2 halves, 8]."""
        return self.codes[expert].unflatten(-1, (-1, 4, 8, 4, 2, 2, 4)), self.scales[expert].unflatten(-1, (4, 2, 8))

    def _store_half(self, expert: int, codes: Tensor, words: Tensor, half: int) -> None:
        home, scales = self._homes(expert)
        if self.fp4:
            eight = codes.unflatten(-1, (-1, 2, 8, 4)).transpose(-3, -2)  # [N, K / 64, 8, 2, 4]
            first, second = (eight & 8).unbind(-2)
            codes = (pack_fp4(eight.flatten(-2) & 7) | first << 4 | second).flatten(1)
        tiles, chunks, pieces = home.shape[:3]
        home[..., half, :] = codes.view(tiles, 4, 8, chunks, pieces, 2, 4, 4).permute(0, 3, 4, 1, 2, 6, 5, 7)
        scales[..., half, :] = words.view(tiles, 4, 8, chunks).permute(0, 3, 1, 2)

    def _load_half(self, expert: int, half: int) -> tuple[Tensor, Tensor]:
        """Return what ``_numbers`` does, of half of the rows."""
        home, scales = self._homes(expert)
        codes = home[..., half, :].permute(0, 3, 4, 1, 2, 6, 5, 7).flatten(3).flatten(0, 2)
        if self.fp4:
            words = codes.unflatten(-1, (-1, 8, 4))
            signs = torch.stack([words >> 4 & 8, words & 8], -2)  # [N / 2, K / 64, 8, 2, 4]
            eight = unpack_fp4(words & 0x77).view(signs.shape) | signs
            codes = eight.transpose(-3, -2).flatten(1)
        return codes, scales[..., half, :].permute(0, 2, 3, 1).flatten(0, 2).contiguous()


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
    return hidden % GROUP == 0 and width % GROUP == 0


def experts_forward(
    x_codes: Tensor,
    x_scales: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    w13: Tiles,
    w2: Tiles,
    limit: float,
    shared_TD: Tensor | None = None,
    *,
    partial: bool = False,
) -> Tensor:
    """Run every token through its experts and sum, in the order of k.

    Args:
        x_codes, x_scales: Inputs, float8_e4m3fn [T, D] and scale bytes uint8 [T, D / 128], of numbers below 2^100.
        chosen_TK: int64 expert ids; ascending, so that the sum is in their order. E means none, and adds nothing.
        weight_TK: float32, applied before ``w2``.
        w13: Gate and up, [E, 2 I, D].
        w2: [E, D, I].
        limit: Of the activation.
        shared_TD: Added last, bfloat16.
        partial: These experts have a part of the width, other ranks the rest: each one's result stays float32.

    Returns:
        float32 [T, D]; with ``shared_TD``, rounded to its dtype.
    """
    if use_triton(x_codes):
        from dsv4lite.kernels.experts.triton import experts_forward_triton

        return experts_forward_triton(x_codes, x_scales, chosen_TK, weight_TK, w13, w2, limit, shared_TD, partial=partial)
    return experts_forward_ref(x_codes, x_scales, chosen_TK, weight_TK, w13, w2, limit, shared_TD, partial=partial)


def experts_outputs(
    x_codes: Tensor,
    x_scales: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    w13: Tiles,
    w2: Tiles,
    limit: float,
    *,
    partial: bool = False,
) -> Tensor:
    """Return what ``experts_forward`` sums, [T, K, D]: bfloat16, float32 if ``partial``, and anything without an expert."""
    given = (x_codes, x_scales, chosen_TK, weight_TK, w13, w2, limit)
    if use_triton(x_codes):
        from dsv4lite.kernels.experts.triton import experts_outputs_triton

        return experts_outputs_triton(*given, partial=partial)
    outputs = experts_outputs_ref(*given, partial=partial)
    return outputs if partial else outputs.bfloat16()


def experts_forward_ref(
    x_codes: Tensor,
    x_scales: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    w13: Tiles,
    w2: Tiles,
    limit: float,
    shared_TD: Tensor | None = None,
    *,
    partial: bool = False,
) -> Tensor:
    """See ``experts_forward``."""
    outputs = experts_outputs_ref(x_codes, x_scales, chosen_TK, weight_TK, w13, w2, limit, partial=partial)
    total = outputs[:, 0]
    for k in range(1, chosen_TK.shape[1]):
        total = total + outputs[:, k]
    return total if shared_TD is None else (total + shared_TD.float()).to(shared_TD.dtype)


def experts_outputs_ref(
    x_codes: Tensor,
    x_scales: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    w13: Tiles,
    w2: Tiles,
    limit: float,
    *,
    partial: bool = False,
) -> Tensor:
    """Return what ``experts_forward`` sums, float32 [T, K, D], zero without an expert: one by one, on dequantized numbers."""
    x_TD = dequantize_fp8(x_codes, x_scales, GROUP)
    outputs = x_TD.new_zeros(*chosen_TK.shape, w2.shape[1])
    for expert in chosen_TK[chosen_TK < w2.shape[0]].unique().tolist():
        at = torch.nonzero(chosen_TK == expert, as_tuple=True)
        x = x_TD[at[0]]
        gate, up = ((x @ w13.dequantize(expert, half).T).bfloat16() for half in (0, 1))
        u = (swiglu(gate, up, limit) * weight_TK[at][:, None]).bfloat16()
        u = round_fp8(u, GROUP).float()
        y = u @ w2.dequantize(expert).T
        outputs[at] = y if partial else y.bfloat16().float()
    return outputs
