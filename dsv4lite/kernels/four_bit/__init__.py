"""4-bit weights: codes in groups along the inputs, each group with a scale. Activations are not quantized.

    int4     w = (q - z) * s           q and z from 0 to 15; one s and one z for each group of inputs
    NVFP4    w = e2m1(q) * (s * m)     one s in e4m3 for each group of 16 inputs, one m in float32 for each row
    y = x @ w.T                        accumulated in float32, rounded once

Source: AutoAWQ's and GPTQ's ``(q - z) * s``; NVFP4 of compressed-tensors and ModelOpt, whose factor per matrix is stored per row
here, so that several matrices can be rows of one.  Numerics: ``dequantize`` returns float32 and defines the weights; those of int4
are exact if scales are float16 or bfloat16. The reference multiplies in float32. So does the kernel, without rounding weights:
scales of int4 multiply a group's sum, factors of NVFP4 the result. They differ by at most 2^-14 of the sum of absolute products,
|x| @ |w|.T, and one rounding of the result. The kernel's order of summation depends on the weights' shape and groups alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.gemm import matmul_rows
from dsv4lite.kernels.quantize import FP4_MAX, FP8_MAX, e2m1_codes, e2m1_values, pack_fp4, unpack_fp4

_ZERO, _INT4_MAX = 8, 7  # zero point of symmetric int4 codes, and the largest code minus it


class FourBit(NamedTuple):
    """A matrix [N, K], or a stack of them [E, N, K].

    Attributes:
        codes: uint8 [..., N, K / 2]; the even input is the low nibble.
        scales: [..., N, K / group]: float16, bfloat16 or float32 of int4, float8_e4m3fn of NVFP4.
        offsets: Of int4 zero points, uint8 [..., N, K / group]; of NVFP4 factors of the rows, float32 [..., N, 1].
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor

    @classmethod
    def empty(cls, *shape: int, group: int, scale_dtype: torch.dtype, device: torch.device) -> FourBit:
        """Allocate ``[..., N, K]``; ``float8_e4m3fn`` scales mean NVFP4."""
        *rows, columns = shape
        nvfp4 = scale_dtype == torch.float8_e4m3fn
        groups = columns // group
        return cls(
            torch.empty(*rows, columns // 2, dtype=torch.uint8, device=device),
            torch.empty(*rows, groups, dtype=scale_dtype, device=device),
            torch.empty(*rows, 1 if nvfp4 else groups, dtype=torch.float32 if nvfp4 else torch.uint8, device=device),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical ``(..., N, K)``."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def nvfp4(self) -> bool:
        """Whether codes are e2m1, not integers."""
        return self.scales.dtype == torch.float8_e4m3fn

    def of_expert(self, expert: int) -> FourBit:
        """Return one matrix of a stack."""
        return FourBit(*(part[expert] for part in self))

    def rows(self, begin: int, end: int) -> FourBit:
        """Return rows; those of a stack are numbered across its matrices."""
        return FourBit(*(part.flatten(0, -2)[begin:end] for part in self))

    def dequantize(self) -> Tensor:
        """Return the numbers, float32 [..., N, K]."""
        codes = unpack_fp4(self.codes).unflatten(-1, (-1, self.group))
        if self.nvfp4:
            numbers = e2m1_values(codes) * (self.scales.float() * self.offsets)[..., None]
        else:
            numbers = (codes.float() - self.offsets.float()[..., None]) * self.scales.float()[..., None]
        return numbers.flatten(-2)


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
        return FourBit(pack_fp4(e2m1_codes(ratio.clamp(-FP4_MAX, FP4_MAX)).flatten(-2)), scales, offsets)
    scales = (amax / _INT4_MAX).to(scale_dtype)
    ratio = (groups / scales.float().clamp_min(tiny)[..., None]).round().clamp(-_INT4_MAX, _INT4_MAX)
    codes = (ratio + _ZERO).to(torch.uint8).flatten(-2)
    return FourBit(pack_fp4(codes), scales, torch.full_like(scales, _ZERO, dtype=torch.uint8))


def kernels_take(group: int) -> bool:
    """Return whether the kernels take groups of this many inputs; the references take any."""
    return group in (16, 32) or group % 64 == 0


@op("experts.weight_only_triton:four_bit_linear_triton", suits=lambda x_MK, w, *_, **__: kernels_take(w.group))
def four_bit_linear(x_MK: Tensor, w: FourBit, dtype: torch.dtype, row_tile: int | None = None) -> Tensor:
    """Return ``x @ w.T`` [M, N].

    Args:
        x_MK: float32 or bfloat16 [M, K].
        w: [N, K].
        dtype: Of the result.
        row_tile: As for ``gemm.matmul_rows``; the kernel ignores it.
    """
    return matmul_rows(x_MK.float(), w.dequantize(), row_tile).to(dtype)
