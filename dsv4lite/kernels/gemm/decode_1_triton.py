"""Products of a single row: every program reads a few rows of the weights from end to end, and multiplies in float32.

Tensor cores want 64 rows of weights side by side, so their kernels (``triton.py``) read each in pieces of 128 bytes, and add
up parts. One row needs no tensor cores: what the weights weigh is all that counts, and long pieces of few rows come faster. Sums
have an order of their own, so these are not for results that must not depend on what shares the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.counters import counters_of
from dsv4lite.kernels.dispatch import capability_of, power_of_2
from dsv4lite.kernels.e4m3 import as_stored, e4m3_bytes, e8m0, fp8_scale_bits, fp8_scaled, has_e4m3, to_bf16
from dsv4lite.kernels.gemm import scale_rows
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.quantize import FP8_GROUP

_LEAST_CAPABILITY = 89  # the first with e4m3
_MOST_WEIGHTS = 1 << 24  # in bfloat16; larger matrices come at the copy rate with tensor cores, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """What one program reads.

    Attributes:
        outs: Rows of the weights.
        columns: Of each, at a time.
    """

    outs: int
    columns: int
    num_warps: int


_FP8 = Strip(outs=2, columns=4096, num_warps=4)
_FLOAT = Strip(outs=2, columns=2048, num_warps=8)
_PAIR = Strip(outs=2, columns=2048, num_warps=4)
_GROUPED = Strip(outs=8, columns=512, num_warps=2)


def _fits(strip: Strip, outs: int, inputs: int) -> bool:
    """Return whether weights [outs, inputs] are whole strips."""
    return outs % strip.outs == 0 and inputs % FP8_GROUP == 0


@triton.jit
def _strip(
    x, xs, w, ws, first, K: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, FP8_X: tl.constexpr,
    FP8_W: tl.constexpr,
):  # fmt: skip
    """Return the products, float32 [OUTS], of a row with the weights' rows from ``first`` on."""
    row = first + tl.arange(0, OUTS)
    acc = tl.zeros((OUTS, COLUMNS), tl.float32)
    for c in tl.range(0, (K + COLUMNS - 1) // COLUMNS, num_stages=1, loop_unroll_factor=2):  # prefetches the next columns
        column = c * COLUMNS + tl.arange(0, COLUMNS)
        block = column // 128
        inside = column < K if K % COLUMNS else tl.full((COLUMNS,), True, tl.int1)  # without a mask
        weights = tl.load(w + row[:, None] * K + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        numbers = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        # Powers of two: they may be multiplied with the inputs first.
        if FP8_X:
            numbers *= e8m0(tl.load(xs + block, mask=inside, other=0))
        if FP8_W:
            numbers *= e8m0(tl.load(ws + first // 128 * (K // 128) + block, mask=inside, other=0))
        acc += weights * numbers[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _row_kernel(
    x_codes, x_scales, w_codes, w_scales, fp8_out, x, w, out, unquantized,
    K: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    program = tl.program_id(0).to(tl.int64)
    if FLOAT and (not FP8 or program < unquantized):
        first = program * OUTS
        y = _strip(x, x, w, w, first, K, OUTS, COLUMNS, False, False)
        let_successor_in()
        tl.store(out + first + tl.arange(0, OUTS), as_stored(y, out))
    else:
        first = (program - unquantized) * OUTS if FLOAT else program * OUTS
        # x = dequantize_fp8(x_codes, x_scales); w = dequantize_fp8_rows(w_codes, w_scales); x @ w.T
        y = _strip(x_codes, x_scales, w_codes, w_scales, first, K, OUTS, COLUMNS, True, True)
        let_successor_in()
        tl.store(fp8_out + first + tl.arange(0, OUTS), as_stored(y, fp8_out))


@triton.jit
def _row_groups_kernel(
    x, w, ws, numbers, codes, scales, arrivals, x_group, N: tl.constexpr, K: tl.constexpr, OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    first = tl.program_id(0).to(tl.int64) * OUTS
    # matmul_rows(x[:, g].float(), dequantize_fp8_rows(w_codes, w_scales)[g])
    y = _strip(x + first // N * x_group, x, w, ws, first, K, OUTS, COLUMNS, False, True)
    let_successor_in()
    tl.store(numbers + first + tl.arange(0, OUTS), y)
    tl.debug_barrier()  # the writes of all threads precede the count
    block = first // 128
    arrived = tl.atomic_add(arrivals + block, 1, sem="acq_rel", scope="gpu")
    if arrived == 128 // OUTS - 1:
        column = block * 128 + tl.arange(0, 128)
        # Reference: quantize_fp8(y.to(x.dtype), FP8_GROUP)
        rounded = to_bf16(tl.load(numbers + column, cache_modifier=".cg")).to(tl.float32)[None, :]
        bits = fp8_scale_bits(rounded)
        tl.store(codes + column[None, :], e4m3_bytes(fp8_scaled(rounded, bits), has_e4m3()))
        tl.store(scales + block + tl.arange(0, 1), (bits >> 23).to(tl.uint8))
        tl.store(arrivals + block, 0)  # counters are zero between kernels


def _takes_row(x: Tensor, w_codes: Tensor, w_scales: Tensor, strip: Strip) -> bool:
    """Return whether ``x`` [M, ...] is one row, and FP8 weights [..., N, K] are whole strips on a chip with e4m3."""
    whole = _fits(strip, w_codes.shape[-2], w_codes.shape[-1]) and scale_rows(w_codes, w_scales) == FP8_GROUP
    return len(x) == 1 and whole and capability_of(x.device) >= _LEAST_CAPABILITY


def takes_fp8(x_codes: Tensor, w_codes: Tensor, w_scales: Tensor) -> bool:
    """Return whether ``fp8_row`` can multiply these, and is the faster way: parts of long rows need not be added up."""
    outs, inputs = w_codes.shape
    return inputs > outs and _takes_row(x_codes, w_codes, w_scales, _FP8)


def fp8_row(x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``gemm.fp8_linear``; for one row and what ``takes_fp8``."""
    out = torch.empty(1, len(w_codes), dtype=dtype, device=x_codes.device)
    _launch(_FP8, (x_codes, x_scales, w_codes, w_scales, out), None)
    return out


def takes_pair(x_MK: Tensor, w_codes: Tensor, w_scales: Tensor, w_NK: Tensor) -> bool:
    """Return whether ``pair_row`` can multiply these."""
    return _takes_row(x_MK, w_codes, w_scales, _PAIR) and _fits(_PAIR, *w_NK.shape)


def pair_row(
    x_MK: Tensor, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor, w_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``gemm.pair_linear``; for one row and what ``takes_pair``."""
    out = torch.empty(1, len(w_NK), dtype=torch.float32, device=x_MK.device)
    fp8_out = torch.empty(1, len(w_codes), dtype=x_MK.dtype, device=x_MK.device)
    _launch(_PAIR, (x_codes.contiguous(), x_scales, w_codes, w_scales, fp8_out), (x_MK.contiguous(), w_NK, out))
    return fp8_out, out


def takes_float(x_MGK: Tensor, w_GNK: Tensor) -> bool:
    """Return whether ``float_row`` can multiply these, and is the faster way: bfloat16, one group."""
    one = len(x_MGK) == len(w_GNK) == 1 and x_MGK.dtype == w_GNK.dtype == torch.bfloat16 and w_GNK.numel() <= _MOST_WEIGHTS
    return one and _fits(_FLOAT, *w_GNK.shape[1:]) and capability_of(x_MGK.device) >= _LEAST_CAPABILITY


def float_row(x_MK: Tensor, w_NK: Tensor, out: Tensor) -> None:
    """Write ``float_linear(x, w)`` to ``out`` [1, N], for one row and what ``takes_float``."""
    _launch(_FLOAT, None, (x_MK.contiguous(), w_NK, out))


def _launch(strip: Strip, fp8: tuple[Tensor, ...] | None, unquantized: tuple[Tensor, Tensor, Tensor] | None) -> None:
    """Launch a product in FP8, an unquantized one, or both of the same row: inputs, weights and results of each."""
    given = fp8 or unquantized
    assert given
    codes, numbers, inputs = fp8 or given[-1:] * 5, unquantized or given[-1:] * 3, given[0].shape[-1]
    fp8_programs, programs = len(fp8[2]) // strip.outs if fp8 else 0, len(unquantized[1]) // strip.outs if unquantized else 0
    assert all(tensor.is_contiguous() for tensor in (*codes, *numbers))
    _row_kernel[(programs + fp8_programs,)](
        *codes,
        *numbers,
        programs,
        K=inputs,
        OUTS=strip.outs,
        COLUMNS=min(strip.columns, power_of_2(inputs)),
        FP8=fp8 is not None,
        FLOAT=unquantized is not None,
        num_warps=strip.num_warps,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(numbers[-1].device),
    )


def takes_groups(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor) -> bool:
    """Return whether ``groups_row`` can multiply these."""
    return _takes_row(x_MGK, w_codes, w_scales, _GROUPED) and w_codes.shape[1] % FP8_GROUP == 0


def groups_row(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor) -> tuple[Tensor, Tensor]:
    """See ``gemm.fp8_weight_linear_quantize``; for one row and what ``takes_groups``."""
    groups, outs, inputs = w_codes.shape
    assert x_MGK.shape[1:] == (groups, inputs) and w_codes.is_contiguous() and w_scales.is_contiguous()
    x = x_MGK if x_MGK.stride(2) == 1 else x_MGK.contiguous()
    numbers = torch.empty(groups * outs, dtype=torch.float32, device=x.device)
    codes = torch.empty(1, groups * outs, dtype=torch.uint8, device=x.device)
    scales = torch.empty(1, groups * outs // FP8_GROUP, dtype=torch.uint8, device=x.device)
    _row_groups_kernel[(groups * outs // _GROUPED.outs,)](
        x,
        w_codes,
        w_scales,
        numbers,
        codes,
        scales,
        counters_of(x.device),
        x.stride(1),
        N=outs,
        K=inputs,
        OUTS=_GROUPED.outs,
        COLUMNS=min(_GROUPED.columns, power_of_2(inputs)),
        num_warps=_GROUPED.num_warps,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(x.device),
    )
    return codes.view(torch.float8_e4m3fn), scales
