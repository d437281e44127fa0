"""Lightning indexer: which compressed entries a token attends to.

    I(t, w) = sum_h a_th relu(iq_th . ik_w)         w < (t + 1) // 4
    S(t)    = the top_k largest

Source: DeepSeek-V4 specification 3.6 and 4.5.  Numerics: in bfloat16 every step rounds, as in the official code (products, weighted
products and the sum over heads); ties at the threshold are common then and go to the older entry. The chosen entries are returned
in ascending order, so what is attended, and in which order, is a function of the scores alone. On packed pages scores equal the
reference but for the order of the sum over heads; the selection is exact, whatever the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.gemm import ROW_TILE, matmul_rows
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import RowStore

KEY_BLOCK = 64
PAGE_TOKENS = 256
SCORE_BYTES = 256 << 20  # that the scores of one round of tokens may take
_REF_TOKENS = 64  # that the reference scores together
_LEAST_SHARING = 2  # tokens of a sequence for which the reference reads its keys once


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


def choose_paged(
    iq_THC: Tensor,
    weights_TH: Tensor,
    keys: RowStore,
    paging: Paging,
    top_k: int,
    entries_max: int,
    weight_scale: float = 1.0,
    *,
    any_order: bool = False,
) -> Tensor:
    """Return the entries that each token attends to, int32 [T, top_k] ascending, as many tokens at a time as scores have room for.

    See ``index_scores_paged`` and ``select_paged``.
    """
    tokens = len(iq_THC)
    round_tokens = max(1, SCORE_BYTES // (iq_THC.element_size() * max(1, entries_max)))
    selected_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=iq_THC.device)
    for begin in range(0, tokens, round_tokens):
        part = slice(begin, min(begin + round_tokens, tokens))
        select_paged(  # which alone holds the scores: there is no room for those of two rounds
            index_scores_paged(
                iq_THC[part], weights_TH[part], keys, paging, top_k, entries_max, weight_scale, begin=begin, any_order=any_order
            ),
            paging,
            top_k,
            PAGE_TOKENS // keys.rows_per_page,
            begin=begin,
            out=selected_TK[part],
        )
    return selected_TK


def index_scores_paged(
    iq_NHC: Tensor,
    weights_NH: Tensor,
    keys: RowStore,
    paging: Paging,
    top_k: int,
    entries_max: int,
    weight_scale: float = 1.0,
    *,
    begin: int = 0,
    any_order: bool = False,
) -> Tensor:
    """Score the visible entries of tokens ``begin`` to ``begin + N`` of a step.

    Args:
        iq_NHC: bfloat16 index queries, already rounded to FP4; on plain keys as they are, in the keys' dtype.
        weights_NH: Head weights, any stride; rounded to the dtype of ``iq``, multiplied by ``weight_scale``, and rounded again.
        keys: Packed FP4 or plain index keys.
        paging: Where the tokens and keys are.
        top_k: Tokens that see no more entries than this need no scores.
        entries_max: Most entries that any token sees, as far as the host knows.
        weight_scale: See ``weights_NH``.
        begin: First token.
        any_order: The reference may sum in an order that depends on the rest of the step. Kernels do not ask.

    Returns:
        [N, entries_max] in the dtype of ``iq``; anything where the entry is not visible or the token needs no scores.
    """
    if use_triton(iq_NHC) and not keys.has_gradients:
        from dsv4lite.kernels.indexer.triton import index_scores_paged_triton

        return index_scores_paged_triton(iq_NHC, weights_NH, keys, paging, top_k, entries_max, begin, weight_scale)
    return index_scores_paged_ref(
        iq_NHC, weights_NH, keys, paging, top_k, entries_max, weight_scale, begin=begin, any_order=any_order
    )


def index_scores_paged_ref(
    iq_NHC: Tensor,
    weights_NH: Tensor,
    keys: RowStore,
    paging: Paging,
    top_k: int,
    entries_max: int,
    weight_scale: float = 1.0,
    *,
    begin: int = 0,
    any_order: bool = False,
) -> Tensor:
    """See ``index_scores_paged``; tokens of a sequence share its keys."""
    weights_NH = weights_NH.to(iq_NHC.dtype) * weight_scale
    scores = torch.full((len(iq_NHC), entries_max), float("-inf"), dtype=iq_NHC.dtype, device=iq_NHC.device)
    rows, ratio, row_tile = keys.rows_per_page, PAGE_TOKENS // keys.rows_per_page, None if any_order else ROW_TILE
    for block in paging.blocks(_REF_TOKENS, _LEAST_SHARING):
        first, end, count = max(block.begin - begin, 0), min(block.end - begin, len(scores)), (block.newest + 1) // ratio
        if first >= end or count <= top_k:
            continue
        entry_E = torch.arange(count, device=scores.device)
        if block.sequence is None:
            sequence_N1 = paging.sequence_T[begin + first : begin + end].long()[:, None]
            page = paging.grow_SP.long()[sequence_N1, entry_E // rows]
            seen_NE = entry_E < _visible(paging, ratio, begin + first, end - first)[:, None]
            addresses = torch.where(seen_NE, page * rows + entry_E % rows, -1)
        else:
            addresses = paging.grow_SP[block.sequence].long()[entry_E // rows] * rows + entry_E % rows
        part = slice(first, end)
        scores[part, :count] = index_scores(
            iq_NHC[part], weights_NH[part], keys.read(addresses, iq_NHC.dtype), row_tile=row_tile
        ).to(scores.dtype)
    return scores


def select_paged(scores_NE: Tensor, paging: Paging, top_k: int, ratio: int, *, begin: int = 0, out: Tensor | None = None) -> Tensor:
    """Return the best visible entries of tokens ``begin`` to ``begin + N`` of a step; of equals the older.

    Args:
        scores_NE: bfloat16 or float32; what is not visible may hold anything.
        paging: Where the tokens are.
        top_k: How many are wanted.
        ratio: Tokens of an entry.
        begin: First token.
        out: Where to, contiguous int32 [N, top_k].

    Returns:
        int32 [N, top_k] ascending; anything where a token sees no more than ``top_k``.
    """
    chosen = torch.empty(len(scores_NE), top_k, dtype=torch.int32, device=scores_NE.device) if out is None else out
    if use_triton(scores_NE):
        from dsv4lite.kernels.indexer.triton import select_paged_triton

        return select_paged_triton(scores_NE, paging, ratio, begin, chosen)
    return select_paged_ref(scores_NE, paging, ratio, begin, chosen)


def select_paged_ref(scores_NE: Tensor, paging: Paging, ratio: int, begin: int, out: Tensor) -> Tensor:
    """See ``select_paged``; sorts."""
    visible_N = _visible(paging, ratio, begin, len(scores_NE))
    rows_M = (visible_N > out.shape[1]).nonzero()[:, 0]
    if len(rows_M):
        out[rows_M] = select_entries(scores_NE[rows_M].float(), visible_N[rows_M], out.shape[1])[0].int()
    return out


def _visible(paging: Paging, ratio: int, begin: int, count: int) -> Tensor:
    """Return how many entries tokens see, int64; none for padding."""
    return (paging.positions_T[begin : begin + count].long() + 1) // ratio
