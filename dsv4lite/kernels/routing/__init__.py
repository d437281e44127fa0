"""The router of a mixture of experts.

    score = sqrt(softplus(z)), softmax(z) or sigmoid(z)      z = x gate^T
    experts: the k best of score + bias, or a table by token id
    w     = score[idx] / (sum(score[idx]) + 1e-20) * route_scale, or without the division

With groups of experts, the k best are chosen from the best groups. With a bias, groups are ranked by the sum of their two best
experts, otherwise by their best expert.

Source: DeepSeek-V4 specification 3.8, MLA specification 3.8.  Numerics: float32. Experts are in the order of their ids, and their
outputs are summed in this order, so a token's result does not depend on the rest of the batch. The kernel's weights and the scores
that it compares agree to a relative 1e-6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op

_LEAST_SUM = 1e-20  # avoids a division by zero if all scores underflow; does not change any other sum


class Router(NamedTuple):
    """How experts are chosen, and the ids and positions of a step's tokens.

    Attributes:
        top_k: Experts per token.
        scale: Multiplies the weights.
        bias_E: Added to the scores for the selection only, float32.
        table_VK: Experts of every token id, int64, instead of a selection (hash layers); scores still give the weights.
        token_ids_T: The tokens' ids; needed only with a table.
        positions_T: Position of each token; negative for padding, whose experts are E (none) and whose weights are 0.
        scoring: ``sqrtsoftplus``, ``softmax`` or ``sigmoid``.
        groups: Number of equally large groups of consecutive experts.
        top_groups: Number of groups from which a token's experts are chosen.
        renormalize: Divide weights by their sum.
    """

    top_k: int
    scale: float
    bias_E: Tensor | None = None
    table_VK: Tensor | None = None
    token_ids_T: Tensor | None = None
    positions_T: Tensor | None = None
    scoring: str = "sqrtsoftplus"
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True


def softplus(x: Tensor) -> Tensor:
    """Stable ``log(1 + exp(x))``."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))


def scores_of(logits_TE: Tensor, scoring: str) -> Tensor:
    """Return the scores [T, E] of float32 logits, by operations whose bits do not depend on an element's place."""
    if scoring == "softmax":
        exponentials = torch.exp(logits_TE - logits_TE.amax(-1, keepdim=True))
        return exponentials / exponentials.sum(-1, keepdim=True)
    if scoring == "sigmoid":
        return 1.0 / (1.0 + torch.exp(-logits_TE))
    return softplus(logits_TE).sqrt()


def in_top_groups(selection_TE: Tensor, router: Router) -> Tensor:
    """Return the selection scores [T, E], with minus infinity for experts outside of a token's groups."""
    if router.groups == router.top_groups:
        return selection_TE
    grouped_TGE: Tensor = torch.unflatten(selection_TE, -1, (router.groups, -1))
    ranks_TG = grouped_TGE.topk(1 if router.bias_E is None else 2).values.sum(-1)
    kept_TG = torch.zeros_like(ranks_TG, dtype=torch.bool).scatter_(1, ranks_TG.topk(router.top_groups).indices, True)
    return grouped_TGE.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)


@op("routing.triton:route_triton")
def route(logits_TE: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Choose experts and their weights by float32 gate outputs.

    Returns:
        Expert ids int64 [T, K], ascending, and weights float32 [T, K]. On ties the kernel chooses the lowest id.
    """
    scores = scores_of(logits_TE, router.scoring)
    if router.table_VK is None:
        selection = scores if router.bias_E is None else scores + router.bias_E
        chosen_TK = in_top_groups(selection, router).topk(router.top_k).indices
    else:
        chosen_TK = router.table_VK[router.token_ids_T]
    chosen_TK = chosen_TK.sort(-1).values
    picked = scores.gather(1, chosen_TK)
    weights_TK = (picked / (picked.sum(-1, keepdim=True) + _LEAST_SUM) if router.renormalize else picked) * router.scale
    if router.positions_T is not None:
        padding = (router.positions_T < 0)[:, None]
        chosen_TK, weights_TK = chosen_TK.masked_fill(padding, logits_TE.shape[1]), weights_TK.masked_fill(padding, 0.0)
    return chosen_TK, weights_TK


class Copies(NamedTuple):
    """The slots of each expert, one or several (copies), and how often each expert was chosen.

    Attributes:
        slots_EC: int64 [E + 1, C]; row e has ``copies_E[e]`` valid slots. The last row is for padding.
        copies_E: int64 [E + 1], number of copies.
        load_E: int64 [E + 1], number of choices, incremented here; ``None`` if another rank counts these tokens.
    """

    slots_EC: Tensor
    copies_E: Tensor
    load_E: Tensor | None


def own_slots(slots_TK: Tensor, first: int, count: int) -> Tensor:
    """Return slots [T, K] relative to a rank's first; slots of other ranks become ``count``, the number of its slots."""
    # The mask turns negative differences into large numbers.
    return ((slots_TK - first) & torch.iinfo(torch.int64).max).clamp_(max=count)


def take_copies(chosen_TK: Tensor, copies: Copies) -> Tensor:
    """Count the chosen experts int64 [T, K], and return their slots; token t takes copy t modulo the number of copies."""
    # In a dry run, which records kernels, ``chosen_TK`` is uninitialized.
    chosen_TK = chosen_TK.clamp(0, len(copies.copies_E) - 1)
    if copies.load_E is not None:
        chosen = chosen_TK.flatten()
        copies.load_E.scatter_add_(0, chosen, torch.ones_like(chosen))
    turn_T1 = torch.arange(len(chosen_TK), device=chosen_TK.device)[:, None]
    return copies.slots_EC[chosen_TK, turn_T1 % copies.copies_E[chosen_TK]]
