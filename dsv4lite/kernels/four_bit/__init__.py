"""4-bit weights: codes in groups along the inputs, each group with a scale. Activations are not quantized.

    int4     w = (q - z) * s           q and z from 0 to 15; one s and one z for each group of inputs
    NVFP4    w = e2m1(q) * (s * m)     one s in e4m3 for each group of 16 inputs, one m in float32 for each row
    y = x @ w.T                        accumulated in float32, rounded once

Source: AutoAWQ's and GPTQ's ``(q - z) * s``; NVFP4 of compressed-tensors and ModelOpt, whose factor per matrix is stored per row
here, so that several matrices can be rows of one.  Numerics: ``dequantize`` returns float32 and defines the weights; those of int4
are exact if scales are float16 or bfloat16. The reference multiplies in float32. So does the kernel, without rounding weights:
scales of int4 multiply a group's sum, factors of NVFP4 the result. They differ by at most 2^-14 of the sum of absolute products,
|x| @ |w|.T, and one rounding of the result. The kernel's order of summation depends on the weights' shape and groups, and on the
number of rows if any order is allowed.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.gemm import matmul_rows
from dsv4lite.kernels.quantize import FP4_MAX, FP8_MAX, e2m1_codes, e2m1_values, pack_fp4, unpack_fp4

_ZERO, _INT4_MAX = 8, 7  # zero point of symmetric int4 codes, and the largest code minus it
_BLOCK, _LEAST_BLOCK = 128, 32  # inputs of the largest and of the smallest block whose codes lie in the order of lanes
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
"""Of ``FourBit.scales``; the last one means NVFP4."""


class FourBit(NamedTuple):
    """A matrix [N, K], or a stack of them [E, N, K].

    A thread loads the codes that its lane multiplies as whole words, because a row's codes lie in the order of lanes, block by
    block of ``lane_block`` inputs: in a block of 32 V inputs, nibble 4 j + 2 s + h of word V q + v belongs to input
    32 v + 16 s + 8 h + 2 q + j, with q below 4 and j, s and h below 2. ``of`` and ``codes`` convert.

    Attributes:
        words: int32 [..., N, K / 8].
        scales: [..., N, K / group]: float16, bfloat16 or float32 of int4, float8_e4m3fn of NVFP4.
        offsets: Of int4 zero points, uint8 [..., N, K / group]; of NVFP4 factors of the rows, float32 [..., N, 1].
    """

    words: Tensor
    scales: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, offsets: Tensor) -> FourBit:
        """Make a matrix, or a stack, of its codes.

        Args:
            codes: One per byte, uint8 [..., N, K] in the order of the inputs.
            scales, offsets: See the class.

        Raises:
            ValueError: Codes or zero points are not from 0 to 15, codes are not uint8, K is no multiple of 8, or there are more
                scales than inputs, or none.
        """
        columns = codes.shape[-1]
        if codes.dtype != torch.uint8 or columns % 8:
            raise ValueError(f"codes are {codes.dtype} {list(codes.shape)}; they must be uint8, and their inputs a multiple of 8")
        if not 0 < scales.shape[-1] <= columns:
            raise ValueError(f"scales have the shape {list(scales.shape)}, for codes {list(codes.shape)}; each group must have one")
        bounded = {"code": codes} if scales.dtype == torch.float8_e4m3fn else {"code": codes, "zero point": offsets}
        for name, numbers in bounded.items():
            if numbers.numel() and (largest := int(numbers.amax())) > 15:  # a code's upper bits would become part of the next one
                raise ValueError(f"the largest {name} is {largest}; {name}s must be from 0 to 15, one in each byte")
        return cls.pack(codes, scales, offsets)

    @classmethod
    def pack(cls, codes: Tensor, scales: Tensor, offsets: Tensor) -> FourBit:
        """Return ``of`` without its checks, for which the host waits for the device."""
        if block := _lane_block(codes.shape[-1], scales):
            v_s_h_q_j = codes.unflatten(-1, (-1, block // 32, 2, 2, 4, 2))
            codes = v_s_h_q_j.movedim((-2, -1), (-5, -3)).flatten(-6)  # q, v, j, s, h
        return cls(pack_fp4(codes.contiguous()).view(torch.int32), scales, offsets)

    @classmethod
    def empty(cls, *shape: int, group: int, scale_dtype: torch.dtype, device: torch.device) -> FourBit:
        """Allocate ``[..., N, K]``; ``float8_e4m3fn`` scales mean NVFP4."""
        *rows, columns = shape
        nvfp4 = scale_dtype == torch.float8_e4m3fn
        groups = columns // group
        return cls(
            torch.empty(*rows, columns // 8, dtype=torch.int32, device=device),
            torch.empty(*rows, groups, dtype=scale_dtype, device=device),
            torch.empty(*rows, 1 if nvfp4 else groups, dtype=torch.float32 if nvfp4 else torch.uint8, device=device),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical ``(..., N, K)``."""
        return (*self.words.shape[:-1], 8 * self.words.shape[-1])

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def nvfp4(self) -> bool:
        """Whether codes are e2m1, not integers."""
        return self.scales.dtype == torch.float8_e4m3fn

    @property
    def lane_block(self) -> int:
        """Inputs of a block in the order of lanes, all of one group if codes are int4; 0: codes are in the order of the inputs."""
        return _lane_block(self.shape[-1], self.scales)

    @property
    def codes(self) -> Tensor:
        """One code per byte, uint8 [..., N, K], in the order of the inputs."""
        codes = unpack_fp4(self.words.view(torch.uint8))
        if block := self.lane_block:
            q_v_j_s_h = codes.unflatten(-1, (-1, 4, block // 32, 2, 2, 2))
            codes = q_v_j_s_h.movedim((-5, -3), (-2, -1)).flatten(-6)
        return codes

    def of_expert(self, expert: int) -> FourBit:
        """Return one matrix of a stack."""
        return FourBit(*(part[expert] for part in self))

    def rows(self, begin: int, end: int) -> FourBit:
        """Return rows; those of a stack are numbered across its matrices."""
        return FourBit(*(part.flatten(0, -2)[begin:end] for part in self))

    def dequantize(self) -> Tensor:
        """Return the numbers, float32 [..., N, K]."""
        codes = self.codes.unflatten(-1, (-1, self.group))
        if self.nvfp4:
            numbers = e2m1_values(codes) * (self.scales.float() * self.offsets)[..., None]
        else:
            numbers = (codes.float() - self.offsets.float()[..., None]) * self.scales.float()[..., None]
        return numbers.flatten(-2)


def _lane_block(columns: int, scales: Tensor) -> int:
    nvfp4 = scales.dtype == torch.float8_e4m3fn
    block = gcd(_BLOCK, columns if nvfp4 else columns // scales.shape[-1])
    return block if block >= _LEAST_BLOCK else 0


def round_four_bit(weight: Tensor, *, group: int, scale_dtype: torch.dtype) -> FourBit:
    """Round a matrix to the nearest codes: int4 without zero points, ``s = amax / 7`` of each group; or NVFP4.

    Args:
        weight: Float [N, K].
        group: Divides K.
        scale_dtype: Of the scales; ``float8_e4m3fn`` means NVFP4, whose factors make the largest scale of each row 448.
    """
    groups, tiny = weight.float().unflatten(-1, (-1, group)), torch.finfo(torch.float32).tiny
    amax = groups.abs().amax(-1)
    if scale_dtype == torch.float8_e4m3fn:
        offsets = (amax.amax(-1, keepdim=True) / (FP4_MAX * FP8_MAX)).clamp_min(tiny)
        scales = (amax / (FP4_MAX * offsets)).clamp(max=FP8_MAX).to(scale_dtype)
        ratio = groups / (scales.float() * offsets).clamp_min(tiny)[..., None]
        codes = e2m1_codes(ratio.clamp(-FP4_MAX, FP4_MAX)).flatten(-2)
        return FourBit.pack(codes, scales, offsets)
    scales = (amax / _INT4_MAX).to(scale_dtype)
    ratio = (groups / scales.float().clamp_min(tiny)[..., None]).round().clamp(-_INT4_MAX, _INT4_MAX)
    codes = (ratio + _ZERO).to(torch.uint8).flatten(-2)
    return FourBit.pack(codes, scales, torch.full_like(scales, _ZERO, dtype=torch.uint8))


@op("experts.weight_only_triton:four_bit_linear_triton", suits=lambda x_MK, w, *_, **__: w.lane_block > 0)
def four_bit_linear(x_MK: Tensor, w: FourBit, dtype: torch.dtype, row_tile: int | None = None) -> Tensor:
    """Return ``x @ w.T`` [M, N].

    Args:
        x_MK: float32 or bfloat16 [M, K].
        w: [N, K].
        dtype: Of the result.
        row_tile: As for ``gemm.matmul_rows``. With a number, the kernel's order of summation is the same for any number of rows.
    """
    return matmul_rows(x_MK.float(), w.dequantize(), row_tile).to(dtype)
