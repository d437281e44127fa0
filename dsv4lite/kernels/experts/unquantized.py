"""Routed experts whose weights are plain numbers: rows grouped by expert, two matrix products, an ordered sum.

    a, b = x @ w1_e.T, x @ w3_e.T
    u    = silu(min(a, limit)) * clamp(b, -limit, limit) * weight
    y    = sum_k u_k @ w2_e(k).T                                 float32, in the order of k

Source: DeepSeek-V4 specification 3.8.  Numerics: products are accumulated in float32; a, b, u and each expert's result are rounded
to the activations' dtype, so in float32 nothing is; nor is the result where ranks share the width I, and each has a part of it. The
kernels' sums have another order, which follows from the weights' shape alone: against the reference a result differs by 2^-14 of
the largest in float32, and by 2^-6 of it in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.gemm import matmul_rows
from dsv4lite.kernels.quantize import round_fp8
from dsv4lite.kernels.routing import swiglu

FP8_GROUP = 128


def wide_experts_forward(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    shared_TD: Tensor | None = None,
    *,
    partial: bool = False,
    row_tile: int | None = None,
    round_inputs: bool = False,
) -> Tensor:
    """Run every token through its experts and sum, in the order of k.

    Args:
        x_TD: Inputs, float32 or bfloat16.
        chosen_TK: int64 expert ids; ascending, so that the sum is in their order. E means none, and adds nothing.
        weight_TK: float32, applied before ``w2``.
        w13: [E, 2 I, D], the rows of w1 (gate) above those of w3 (up).
        w2: [E, D, I].
        limit: Of the activation.
        shared_TD: The shared expert's result, in the dtype of ``x``; added last.
        partial: These experts have a part of the width, other ranks the rest: each one's result stays float32.
        row_tile: As for ``gemm.matmul_rows``; the kernels do without.
        round_inputs: Both products see their inputs rounded to FP8, 1x128, as quantized models do: by the reference only.

    Returns:
        float32 [T, D]; with ``shared_TD``, rounded to the dtype of ``x``.
    """
    if use_triton(x_TD) and not round_inputs:
        from dsv4lite.kernels.experts.unquantized_triton import wide_experts_forward_triton

        return wide_experts_forward_triton(x_TD, chosen_TK, weight_TK, w13, w2, limit, shared_TD, partial=partial)
    return wide_experts_forward_ref(
        x_TD, chosen_TK, weight_TK, w13, w2, limit, shared_TD, partial=partial, row_tile=row_tile, round_inputs=round_inputs
    )


def wide_experts_forward_ref(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    shared_TD: Tensor | None = None,
    *,
    partial: bool = False,
    row_tile: int | None = None,
    round_inputs: bool = False,
) -> Tensor:
    """See ``wide_experts_forward``: expert by expert."""
    tokens, dtype, width = len(x_TD), x_TD.dtype, w2.shape[2]

    def as_input(x: Tensor) -> Tensor:
        return (round_fp8(x, FP8_GROUP) if round_inputs else x).to(w2.dtype)

    def one(expert: int, x: Tensor, weight_T1: Tensor) -> Tensor:
        h_TI = matmul_rows(x, w13[expert], row_tile).to(dtype)
        u_TI = (swiglu(h_TI[:, :width], h_TI[:, width:], limit) * weight_T1).to(dtype)
        if partial:
            return matmul_rows(as_input(u_TI).float(), w2[expert].float(), row_tile)
        return matmul_rows(as_input(u_TI), w2[expert], row_tile).to(dtype).float()

    x_TD = as_input(x_TD)
    if tokens == 1:  # launching costs more than the arithmetic
        chosen = [(k, e) for k, e in enumerate(chosen_TK[0].tolist()) if e < len(w2)]
        outputs = [one(e, x_TD, weight_TK[:, k : k + 1]) for k, e in chosen]
    else:
        outputs = list(_by_expert(one, x_TD, chosen_TK, weight_TK, w2).unbind(1))
    total = outputs[0] if outputs else x_TD.new_zeros(x_TD.shape, dtype=torch.float32)
    for output in outputs[1:]:
        total = total + output
    return total if shared_TD is None else (total + shared_TD.float()).to(dtype)


def _by_expert(
    one: Callable[[int, Tensor, Tensor], Tensor], x_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor, w2: Tensor
) -> Tensor:
    """Return ``one(expert, inputs, weights)`` of all tokens and experts, float32 [T, K, D]; zeros where there is no expert."""
    (tokens, per_token), (count, hidden, _) = chosen_TK.shape, w2.shape
    order = chosen_TK.flatten().argsort(stable=True)
    counts = torch.bincount(chosen_TK.flatten(), minlength=count + 1).tolist()
    weights, inputs = weight_TK.flatten()[order], x_TD[order // per_token]
    parts, begin = [], 0
    for expert, rows in enumerate(counts[:count]):
        if rows:
            part = slice(begin, begin + rows)
            parts.append(one(expert, inputs[part], weights[part, None]))
            begin += rows
    parts.append(weight_TK.new_zeros(counts[count], hidden))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return torch.cat(parts)[back].view(tokens, per_token, hidden)
