"""Products of a few rows on the tensor cores: every program reads some rows of the weights from end to end.

Kernels for more rows (``gemm_triton.py``) take 64 rows of the weights side by side, as the widest instruction wants them: so there
are few programs unless long rows are cut into parts, which the last program to arrive adds up. A few rows do with a narrow
instruction, of 16 rows of the weights: here the parts are warps of one program, a block of 128 inputs each at a time, and nobody
waits for another program. Sums have an order of their own, so these are not for results that must not depend on what shares the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import Variant
from dsv4lite.kernels.e4m3 import e4m3_bytes, fp8_scale_bits, fp8_scaled, to_bf16
from dsv4lite.kernels.gemm import FP8_BLOCK, scale_rows
from dsv4lite.kernels.gemm_triton import capability_of, counters_of, e4m3_to_bf16, e8m0
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor

FEW_ROWS = 8  # at most: columns of the narrow instruction
_LEAST_CAPABILITY = 89  # knows e4m3


@dataclass(frozen=True, slots=True, kw_only=True)
class Strips:
    """What one program reads.

    Attributes:
        outs: Rows of the weights.
        parts: Blocks of 128 inputs at a time, a warp each.
        num_stages: Of what is on its way.
    """

    outs: int
    parts: int
    num_stages: int


_GROUPED = Strips(outs=32, parts=2, num_stages=5)
_PAIR = Strips(outs=16, parts=2, num_stages=5)  # of the plain weights
_PAIR_FP8 = Strips(outs=16, parts=2, num_stages=6)


@triton.jit
def _strips(
    x, xs, w, ws, first, M, x_row, K: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, FP8_X: tl.constexpr, FP8_W: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Return the products, float32 [OUTS, ROWS], of the weights' rows from ``first`` on with rows ``x_row`` apart."""
    BLOCKS: tl.constexpr = K // 128
    TURNS: tl.constexpr = BLOCKS // PARTS
    part = tl.arange(0, PARTS)
    row = tl.arange(0, ROWS)
    here = row < M
    within = tl.arange(0, 128)
    wp = w + (first.to(tl.int64) + tl.arange(0, OUTS))[None, :, None] * K + part[:, None, None] * 128 + within[None, None, :]
    xp = x + row[None, None, :] * x_row + part[:, None, None] * 128 + within[None, :, None]
    # Scale bytes are too small for asynchronous copies: they are read one turn ahead.
    if FP8_W:
        wsp = ws + first // 128 * BLOCKS + part
        next_scale = e8m0(tl.load(wsp))[:, None]
        if FP8_X:
            xsp = xs + row[None, :] * BLOCKS + part[:, None]
            next_scale = next_scale * e8m0(tl.load(xsp, mask=here[None, :], other=0))
    acc = tl.zeros((PARTS, OUTS, ROWS), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        weights = tl.load(wp + turn * (PARTS * 128))
        numbers = tl.load(xp + turn * (PARTS * 128), mask=here[None, None, :], other=0.0)
        if FP8_W:
            scale = next_scale
            ahead = tl.minimum(turn + 1, TURNS - 1) * PARTS
            next_scale = e8m0(tl.load(wsp + ahead))[:, None]
            if FP8_X:
                next_scale = next_scale * e8m0(tl.load(xsp + ahead, mask=here[None, :], other=0))
            else:
                weights = e4m3_to_bf16(weights, GPU)
        if not GPU:  # the interpreter multiplies bfloat16 as integers
            weights, numbers = weights.to(tl.float32), numbers.to(tl.float32)
        if FP8_W:
            acc += tl.dot(weights, numbers) * scale[:, None, :]
        else:
            acc = tl.dot(weights, numbers, acc)
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["M", "plain"])
def _few_pair_kernel(
    x, w, x_codes, x_scales, w_codes, w_scales, out, fp8_out, M, N, FP8_N, plain,
    K: tl.constexpr, OUTS: tl.constexpr, FP8_OUTS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    FP8_STAGES: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)[None, :]
    if program < plain:
        first = program * OUTS
        exact = _strips(x, x, w, w, first, M, K, K, OUTS, ROWS, PARTS, STAGES, False, False, GPU)
        let_successor_in()
        tl.store(out + row * N + first + tl.arange(0, OUTS)[:, None], exact, mask=row < M)
    else:
        first = (program - plain) * FP8_OUTS
        y = _strips(
            x_codes, x_scales, w_codes, w_scales, first, M, K, K, FP8_OUTS, ROWS, PARTS, FP8_STAGES, True, True, GPU
        )  # fmt: skip
        let_successor_in()
        tl.store(fp8_out + row * FP8_N + first + tl.arange(0, FP8_OUTS)[:, None], to_bf16(y, GPU), mask=row < M)


@triton.jit(do_not_specialize=["M"])
def _few_groups_kernel(
    x, w, ws, numbers, codes, scales, arrivals, M, ALL, x_row, x_group, N: tl.constexpr, K: tl.constexpr, OUTS: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, NATIVE: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    first = tl.program_id(0) * OUTS
    row = tl.arange(0, ROWS)
    # matmul_rows(x[:, g].float(), dequantize_fp8_rows(w_codes, w_scales)[g])
    y = _strips(
        x + first // N * x_group, x, w, ws, first, M, x_row, K, OUTS, ROWS, PARTS, STAGES, False, True, GPU
    )  # fmt: skip
    let_successor_in()
    tl.store(numbers + row[None, :] * ALL + first + tl.arange(0, OUTS)[:, None], y, mask=(row < M)[None, :])
    tl.debug_barrier()  # all threads have written when one of them says so
    block = first // 128
    arrived = tl.atomic_add(arrivals + block, 1, sem="acq_rel", scope="gpu")
    if arrived == 128 // OUTS - 1:
        at = row[:, None] * ALL + block * 128 + tl.arange(0, 128)[None, :]
        here = (row < M)[:, None]
        # Reference: quantize_fp8(y.to(x.dtype), FP8_BLOCK)
        rounded = to_bf16(tl.load(numbers + at, mask=here, other=0.0, cache_modifier=".cg"), GPU).to(tl.float32)
        bits = fp8_scale_bits(rounded)
        tl.store(codes + at, e4m3_bytes(fp8_scaled(rounded, bits), NATIVE), mask=here)
        tl.store(scales + row * (ALL // 128) + block, (bits >> 23).to(tl.uint8), mask=row < M)
        tl.store(arrivals + block, 0)  # as the next product finds it


def _takes(x: Tensor, w: Tensor, strips: Strips) -> bool:
    """Return whether ``x`` [M, ...] are few rows, and weights [..., N, K] whole strips on a chip that knows FP8 numbers."""
    whole = w.shape[-2] % strips.outs == 0 and w.shape[-1] % (strips.parts * FP8_BLOCK) == 0
    return 0 < len(x) <= FEW_ROWS and whole and capability_of(x.device) >= _LEAST_CAPABILITY


def takes_pair(x_MK: Tensor, w_codes: Tensor, w_scales: Tensor, w_NK: Tensor) -> bool:
    """Return whether ``pair_few`` can multiply these."""
    whole = scale_rows(w_codes, w_scales) == FP8_BLOCK
    return whole and _takes(x_MK, w_codes, _PAIR_FP8) and _takes(x_MK, w_NK, _PAIR)


def pair_few(
    x_MK: Tensor, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor, w_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``gemm.pair_linear``; for what ``takes_pair``."""
    rows, (fp8_outs, inputs), outs = len(x_MK), w_codes.shape, len(w_NK)
    assert w_codes.is_contiguous() and w_scales.is_contiguous() and w_NK.is_contiguous()
    out = torch.empty(rows, outs, dtype=torch.float32, device=x_MK.device)
    fp8_out = torch.empty(rows, fp8_outs, dtype=x_MK.dtype, device=x_MK.device)
    plain = outs // _PAIR.outs
    _few_pair_kernel[(plain + fp8_outs // _PAIR_FP8.outs,)](
        x_MK.contiguous(),
        w_NK,
        x_codes.contiguous(),
        x_scales.contiguous(),
        w_codes,
        w_scales,
        out,
        fp8_out,
        rows,
        outs,
        fp8_outs,
        plain,
        K=inputs,
        OUTS=_PAIR.outs,
        FP8_OUTS=_PAIR_FP8.outs,
        ROWS=FEW_ROWS,
        PARTS=_PAIR.parts,
        STAGES=_PAIR.num_stages,
        FP8_STAGES=_PAIR_FP8.num_stages,
        GPU=out.is_cuda,
        num_warps=_PAIR.parts,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(out.device),
    )
    return fp8_out, out


def takes_groups(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor) -> bool:
    """Return whether ``groups_few`` can multiply these."""
    whole = scale_rows(w_codes, w_scales) == FP8_BLOCK and w_codes.shape[1] % FP8_BLOCK == 0
    return whole and _takes(x_MGK, w_codes, _GROUPED)


def groups_few(x_MGK: Tensor, w_codes: Tensor, w_scales: Tensor) -> tuple[Tensor, Tensor]:
    """See ``gemm.fp8_weight_linear_quantize``; for what ``takes_groups``."""
    rows, (groups, outs, inputs) = len(x_MGK), w_codes.shape
    assert x_MGK.shape[1:] == (groups, inputs) and w_codes.is_contiguous() and w_scales.is_contiguous()
    x = x_MGK if x_MGK.stride(2) == 1 and not any(stride % 16 for stride in x_MGK.stride()[:2]) else x_MGK.contiguous()
    numbers = torch.empty(rows, groups * outs, dtype=torch.float32, device=x.device)
    codes = torch.empty(rows, groups * outs, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, groups * outs // FP8_BLOCK, dtype=torch.uint8, device=x.device)
    _few_groups_kernel[(groups * outs // _GROUPED.outs,)](
        x,
        w_codes.view(torch.uint8),
        w_scales,
        numbers,
        codes,
        scales,
        counters_of(x.device),
        rows,
        groups * outs,
        x.stride(0),
        x.stride(1),
        N=outs,
        K=inputs,
        OUTS=_GROUPED.outs,
        ROWS=FEW_ROWS,
        PARTS=_GROUPED.parts,
        STAGES=_GROUPED.num_stages,
        NATIVE=x.is_cuda,
        GPU=x.is_cuda,
        num_warps=_GROUPED.parts,
        enable_fp_fusion=True,
        launch_pdl=dependent_launch(x.device),
    )
    return codes.view(torch.float8_e4m3fn), scales


def variants() -> list[Variant]:
    """Return V4-Flash's products."""
    pair = {"x": "*bf16", "w": "*bf16", "x_codes": "*fp8e4nv", "x_scales": "*u8", "w_codes": "*fp8e4nv", "w_scales": "*u8"}
    pair |= {"out": "*fp32", "fp8_out": "*bf16", **dict.fromkeys(("M", "N", "FP8_N", "plain"), "i32")}
    groups = {"x": "*bf16", "w": "*u8", "ws": "*u8", "numbers": "*fp32", "codes": "*u8", "scales": "*u8", "arrivals": "*i32"}
    groups |= dict.fromkeys(("M", "ALL", "x_row", "x_group"), "i32")
    return [
        Variant(
            kernel=kernel,
            signature=signature,
            constants={
                "K": 4096,
                "OUTS": strips.outs,
                "ROWS": FEW_ROWS,
                "PARTS": strips.parts,
                "STAGES": strips.num_stages,
                "GPU": True,
                **more,
            },
            num_warps=strips.parts,
            capabilities=(89, 90, 100, 120),
        )
        for kernel, signature, strips, more in (
            (_few_pair_kernel, pair, _PAIR, {"FP8_OUTS": _PAIR_FP8.outs, "FP8_STAGES": _PAIR_FP8.num_stages}),
            (_few_groups_kernel, groups, _GROUPED, {"N": 1024, "NATIVE": True}),
        )
    ]
