"""The experts of a layer for few tokens: routing, the shared expert and the routed experts, in two launches.

    experts, weights = route(logits)                     float32
    s   = fp8(swiglu(h)) @ shared_w2.T                   h: the shared expert's product with gate and up
    y_k = weights_k * expert_k(x)                        see ``experts``, which says where the weight is applied

``sum_experts``, or the exchange with other ranks, adds up ``sum_k y_k + s`` (``ExpertSum``).

Source: DeepSeek-V4 specification 3.8.  Numerics: those of ``route``, ``swiglu_quantize``, ``fp8_linear`` and
``experts_outputs``; the kernels here return the same bits as the kernels of these ops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.experts import ExpertInputs, ExpertSum, Tiles, experts_outputs
from dsv4lite.kernels.gemm import fp8_linear
from dsv4lite.kernels.routing import Copies, Router, own_slots, route, take_copies
from dsv4lite.kernels.swiglu import swiglu_quantize

DECODE_SMALL_TOKENS = 16
_MOST_EXPERTS = 8  # per token: one program compares all pairs of token and expert with each other


class Held(NamedTuple):
    """Which part of a layer's experts a rank has.

    Attributes:
        shared_partial: Each rank has a slice of the shared expert's width; its outputs are float32 parts of a sum over ranks.
        first: First of this rank's slots, which are numbered over all ranks. ``None``: this rank has all slots.
        copies: Slots of each expert; ``None`` if expert i has slot i.
    """

    shared_partial: bool = False
    first: int | None = None
    copies: Copies | None = None

    def own_slots(self, chosen_TK: Tensor, count: int) -> Tensor:
        """Return slots relative to this rank's first; ``count``, the number of its slots, for slots of other ranks."""
        slots_TK = chosen_TK if self.copies is None else take_copies(chosen_TK, self.copies)
        return slots_TK if self.first is None else own_slots(slots_TK, self.first, count)


def most_decode_small(top_k: int) -> int:
    """Return the most tokens, with ``top_k`` experts each, that ``moe_decode_small`` supports."""
    return DECODE_SMALL_TOKENS if top_k <= _MOST_EXPERTS else 0


class MoeInputs(NamedTuple):
    """Arguments of ``moe_decode_small``.

    Attributes:
        logits_TE: float32 outputs of the gate.
        router: How experts are chosen.
        x_codes, x_scales: Inputs in FP8, see ``ExpertInputs``.
        h_TI: The shared expert's gate and up, bfloat16 [T, 2 I]; ``None`` if another rank has the shared expert.
        shared_codes, shared_scales: The shared expert's w2, as ``fp8_linear`` takes it.
        w13, w2: Routed experts.
        limit: Clamp of the activations.
        held: The part of the experts that this rank has.
        row_tile: As for ``fp8_linear``.
    """

    logits_TE: Tensor
    router: Router
    x_codes: Tensor
    x_scales: Tensor
    h_TI: Tensor | None
    shared_codes: Tensor
    shared_scales: Tensor
    w13: Tiles
    w2: Tiles
    limit: float
    held: Held = Held()
    row_tile: int | None = None


@op("experts.decode_small_triton:moe_decode_small_triton")
def moe_decode_small(given: MoeInputs) -> ExpertSum:
    """Run up to ``most_decode_small`` tokens through their experts."""
    router, held, experts = given.router, given.held, given.w2.shape[0]
    chosen_TK, weight_TK = route.reference(given.logits_TE, router)
    shared_TD: Tensor | None = None
    if given.h_TI is not None:
        dtype = torch.float32 if held.shared_partial else given.h_TI.dtype
        activated = swiglu_quantize.reference(given.h_TI, given.limit)
        shared_TD = fp8_linear.reference(*activated, given.shared_codes, given.shared_scales, dtype, given.row_tile)
    slots_TK = held.own_slots(chosen_TK, experts)
    routed = ExpertInputs(given.x_codes, given.x_scales, slots_TK, weight_TK, given.w13, given.w2, given.limit)
    return ExpertSum(slots_TK, experts_outputs.reference(routed), shared_TD, experts)
