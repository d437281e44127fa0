"""The experts of one token, from its input on: all of ``moe_few.py``, and the two products before it, in one launch.

    h, logits = fp8(x) @ shared_w13.T, x @ gate.T      see ``gemm.pair_linear``
    sum       = moe_few(logits, h)

Source: DeepSeek-V4 specification 3.8.  Numerics: those of ``pair_linear`` and ``moe_few``. With ``row_tile`` the kernel has the
bits of theirs; without, the router adds in an order of its own, in float32.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.experts import GROUP, Tiles
from dsv4lite.kernels.gemm import pair_linear_ref
from dsv4lite.kernels.moe_few import ExpertSum, Held, Router, moe_few_ref

_MOST_WIDTH = 128 * GROUP  # of the shared expert, whose groups are counted apart


class Shared(NamedTuple):
    """The expert of every token, gate above up; codes and scales as ``fp8_linear`` takes them.

    Attributes:
        w13, w2: float8_e4m3fn [2 I, D] and [D, I].
        w13_scales, w2_scales: uint8.
    """

    w13: Tensor
    w13_scales: Tensor
    w2: Tensor
    w2_scales: Tensor


def suits_one(tokens: int, width: int) -> bool:
    """Return whether ``moe_one`` is for so many tokens and a shared expert of this width."""
    return tokens == 1 and width % GROUP == 0 and width <= _MOST_WIDTH


def moe_one(
    x_TD: Tensor,
    x_codes: Tensor,
    x_scales: Tensor,
    gate_ED: Tensor,
    router: Router,
    shared: Shared,
    w13: Tiles,
    w2: Tiles,
    limit: float,
    row_tile: int | None = None,
    *,
    held: Held,
) -> ExpertSum:
    """Run one token through its experts, all of which this rank has, or a part of each.

    Args:
        x_TD: Input; the kernel takes bfloat16.
        x_codes, x_scales: The same in FP8, as ``experts_forward`` takes it.
        gate_ED: Weights of the logits; the kernel takes bfloat16.
        router: Chooses by the logits.
        shared: The expert of every token.
        w13, w2: Routed experts.
        limit: Of the activations.
        row_tile: As for ``fp8_linear``; to the kernel any number means the same.
        held: Which part of the experts there is.
    """
    given = (x_TD, x_codes, x_scales, gate_ED, router, shared, w13, w2, limit)
    if use_triton(x_codes):
        from dsv4lite.kernels.moe_one_triton import moe_one_triton

        return moe_one_triton(*given, held, any_order=row_tile is None)
    return moe_one_ref(*given, row_tile, held=held)


def moe_one_ref(
    x_TD: Tensor,
    x_codes: Tensor,
    x_scales: Tensor,
    gate_ED: Tensor,
    router: Router,
    shared: Shared,
    w13: Tiles,
    w2: Tiles,
    limit: float,
    row_tile: int | None = None,
    *,
    held: Held,
) -> ExpertSum:
    """See ``moe_one``."""
    h_TI, logits_TE = pair_linear_ref(x_TD, x_codes, x_scales, shared.w13, shared.w13_scales, gate_ED, row_tile)
    down = (shared.w2, shared.w2_scales)
    return moe_few_ref(logits_TE, router, x_codes, x_scales, h_TI, *down, w13, w2, limit, row_tile, held=held)
