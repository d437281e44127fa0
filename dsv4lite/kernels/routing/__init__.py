"""Mixture of experts: routing, clamped SwiGLU experts, weighted combination.

    score = sqrt(softplus(x gate^T))          experts: the k best of score + bias, or a table by token id
    w     = score[idx] / sum(score[idx]) * route_scale
    y     = sum_k w2_e ( silu(min(w1_e x, limit)) * clamp(w3_e x, -limit, limit) * w_k )

Source: DeepSeek-V4 specification 3.8.  Numerics: scores and sums float32; expert inputs, outputs of w1, w3, w2 and the product
before w2 round to the activation dtype; experts are summed in the order of their ids, so the result does not depend on what shares
the batch. The routing kernel's weights agree to 1e-6 of their size, and so do the scores that its selection compares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import use_triton


def silu(x: Tensor) -> Tensor:
    """``x sigmoid(x)`` from elementwise operations whose bits do not depend on an element's place."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """Stable ``log(1 + exp(x))``."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))


def route_ref(
    logits_TE: Tensor,
    top_k: int,
    route_scale: float,
    *,
    bias_E: Tensor | None = None,
    chosen_TK: Tensor | None = None,
    token_ids_T: Tensor | None = None,
    positions_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``route``."""
    scores = softplus(logits_TE).sqrt()
    if chosen_TK is None:
        selection = scores if bias_E is None else scores + bias_E
        chosen_TK = selection.topk(top_k).indices
    elif token_ids_T is not None:
        chosen_TK = chosen_TK[token_ids_T]
    chosen_TK = chosen_TK.sort(-1).values
    picked = scores.gather(1, chosen_TK)
    weights_TK = picked / picked.sum(-1, keepdim=True) * route_scale
    if positions_T is not None:
        padding = (positions_T < 0)[:, None]
        chosen_TK, weights_TK = chosen_TK.masked_fill(padding, logits_TE.shape[1]), weights_TK.masked_fill(padding, 0.0)
    return chosen_TK, weights_TK


def route(
    logits_TE: Tensor,
    top_k: int,
    route_scale: float,
    *,
    bias_E: Tensor | None = None,
    chosen_TK: Tensor | None = None,
    token_ids_T: Tensor | None = None,
    positions_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts and their weights.

    Args:
        logits_TE: float32 gate outputs.
        top_k: Experts per token.
        bias_E: Added to the scores for the selection only, float32.
        chosen_TK: Experts fixed by the token id (hash layers), int64; scores still give the weights.
        token_ids_T: Makes ``chosen_TK`` a table [V, K] of the experts of every token id; these are the tokens' ids.
        positions_T: Position of each token; a negative one is padding: its experts are E, which is none, and its weights 0.

    Returns:
        Expert ids int64 [T, K], ascending, and weights float32 [T, K]. Of equal scores the kernel takes the lowest id.
    """
    if use_triton(logits_TE):
        from dsv4lite.kernels.routing.triton import route_triton

        return route_triton(logits_TE, top_k, route_scale, bias_E, chosen_TK, token_ids_T, positions_T)
    return route_ref(
        logits_TE, top_k, route_scale, bias_E=bias_E, chosen_TK=chosen_TK, token_ids_T=token_ids_T, positions_T=positions_T
    )


class Copies(NamedTuple):
    """Which slots experts have, of which one may have several, and how often each expert was chosen.

    Attributes:
        slots_EC: int64 [E + 1, C], in each row as many as count; the last row is for padding.
        copies_E: How many do, int64 [E + 1].
        load_E: int64 [E + 1]; goes on counting. ``None`` if another rank counts these tokens.
    """

    slots_EC: Tensor
    copies_E: Tensor
    load_E: Tensor | None


def take_copies(chosen_TK: Tensor, copies: Copies) -> Tensor:
    """Count the chosen experts, and return their slots; tokens take the copies of an expert in turn."""
    # A pass that only asks which kernels there are leaves unwritten what was chosen.
    chosen_TK = chosen_TK.clamp(0, len(copies.copies_E) - 1)
    if copies.load_E is not None:
        chosen = chosen_TK.flatten()
        copies.load_E.scatter_add_(0, chosen, torch.ones_like(chosen))
    turn_T1 = torch.arange(len(chosen_TK), device=chosen_TK.device)[:, None]
    return copies.slots_EC[chosen_TK, turn_T1 % copies.copies_E[chosen_TK]]


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return ``silu(min(gate, limit)) * clamp(up, -limit, limit)`` in float32."""
    return silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
