"""Lightning indexer: which compressed entries a token attends to.

    I(t, w) = sum_h a_th relu(iq_th . ik_w)         w < (t + 1) // 4
    S(t)    = the top_k largest

Source: DeepSeek-V4 specification 3.6 and 4.5.  Numerics: in bfloat16 every step rounds, as in the official code (products, weighted
products and the sum over heads); ties at the threshold are common then and go to the older entry. The chosen entries are returned
in ascending order, so what is attended, and in which order, is a function of the scores alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4lite.kernels.gemm import matmul_rows

KEY_BLOCK = 64


def index_scores(queries_NHC: Tensor, weights_NH: Tensor, keys: Tensor, *, row_tile: int | None = None) -> Tensor:
    """Score entries, float32 [N, E].

    Args:
        queries_NHC: Index queries.
        weights_NH: Head weights, may be negative.
        keys: [E, C] shared by all tokens, or [N, E, C].
        row_tile: Fixed shapes for every product, so that scores do not depend on N or E.
    """
    dtype = queries_NHC.dtype
    queries, weights, keys = queries_NHC.float(), weights_NH.float()[..., None], keys.float()
    count = keys.shape[-2]
    if row_tile is None:
        dots = torch.matmul(queries, keys.transpose(-1, -2))
        return _weigh(dots, weights, dtype)
    heads = queries.shape[1]
    keys = pad(keys, (0, 0, 0, -count % KEY_BLOCK))
    blocks = []
    for block in keys.split(KEY_BLOCK, dim=-2):
        if block.dim() == 2:
            dots = matmul_rows(queries.flatten(0, 1), block, row_tile).unflatten(0, (-1, heads))
        else:
            dots = torch.stack([matmul_rows(q, k, row_tile) for q, k in zip(queries, block, strict=True)])
        blocks.append(_weigh(dots, weights, dtype))
    return torch.cat(blocks, -1)[:, :count]


def _weigh(dots_NHE: Tensor, weights_NH1: Tensor, dtype: torch.dtype) -> Tensor:
    closed = dots_NHE.to(dtype).float().relu()
    return (closed * weights_NH1).to(dtype).float().sum(1).to(dtype).float()


def select_entries(scores_NE: Tensor, visible_N: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` best visible entries of each token.

    Returns:
        int64 [N, min(top_k, E)] in ascending order, what is not valid last, and bool of the same shape.
    """
    count = scores_NE.shape[1]
    hidden = torch.arange(count, device=scores_NE.device) >= visible_N[:, None]
    order = scores_NE.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = torch.where(order < visible_N[:, None], order, count).sort(-1).values
    return chosen, chosen < count


def union_of(chosen_NK: Tensor, seen_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries that any token has chosen, int64 [U] ascending, and which of them each token has, bool [N, U]."""
    union_U, place_NK = torch.unique(torch.where(seen_NK, chosen_NK, -1), return_inverse=True)
    mask_NU = torch.zeros(len(chosen_NK), len(union_U), dtype=torch.bool, device=chosen_NK.device).scatter_(1, place_NK, True)
    first = int(union_U[0] < 0)
    return union_U[first:], mask_NU[:, first:]
