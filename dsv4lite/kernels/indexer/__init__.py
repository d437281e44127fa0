"""Lightning indexer: selects the compressed entries that a token attends to.

    I(t, w) = sum_h a_th relu(iq_th . ik_w)         w < (t + 1) // 4
    S(t)    = the top_k largest

Source: DeepSeek-V4 specification 3.6 and 4.5, MLA specification 3.10.  Numerics: V4's scores are bfloat16, and every step rounds,
as in the official code (products, weighted products and the sum over heads). Ties at the threshold are then common; the older entry
is selected. DSA's scores are float32. Selected entries are returned in ascending order, so attention and its order of summation
depend on the scores alone. Scores of the kernels differ from the reference's by the order of the sum over heads; the selection from
given scores is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.gemm import ROW_TILE, matmul_rows
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import RowStore, UnquantizedRow

KEY_BLOCK = 64
PAGE_TOKENS = 256
SCORE_BYTES = 256 << 20  # most memory for scores; tokens are scored in rounds that fit
_REF_TOKENS = 64  # tokens that the reference scores at a time
_LEAST_SHARING = 2  # sequences with so many tokens are scored by the reference in blocks of their own, which read keys once


def index_scores(queries_NHC: Tensor, weights_NH: Tensor, keys: Tensor, *, row_tile: int | None = None) -> Tensor:
    """Score entries, float32 [N, E].

    Args:
        queries_NHC: Index queries.
        weights_NH: Head weights, may be negative.
        keys: [E, C] shared by all tokens, or [N, E, C].
        row_tile: As for ``gemm.matmul_rows``: products have fixed shapes, so that scores do not depend on N or E.
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
    positive = dots_NHE.to(dtype).float().relu()
    return (positive * weights_NH1).to(dtype).float().sum(1).to(dtype).float()


def select_entries(scores_NE: Tensor, visible_N: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` best visible entries of each token.

    Returns:
        Entries int64 [N, min(top_k, E)] in ascending order, invalid ones last; and which of them are valid, bool.
    """
    count = scores_NE.shape[1]
    hidden = torch.arange(count, device=scores_NE.device) >= visible_N[:, None]
    order = scores_NE.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = torch.where(order < visible_N[:, None], order, count).sort(-1).values
    return chosen, chosen < count


class IndexInputs(NamedTuple):
    """Arguments of the indexer for a step.

    Attributes:
        iq_THC: Index queries, rounded as the keys are: bfloat16, or the dtype of unquantized keys. The reference takes all dtypes.
        weights_TH: Head weights, any stride; rounded to ``dtype``, multiplied by ``weight_scale``, and rounded again.
        keys: Packed or unquantized index keys.
        paging: Positions and pages of the tokens.
        top_k: Number of selected entries; tokens that see no more entries need no scores.
        entries_max: Upper bound of the entries that a token sees, as far as the host knows.
        weight_scale: See ``weights_TH``.
        any_order: In the reference, the order of sums may depend on the rest of the step. Kernels ignore it.
        float32: Scores and every step towards them are float32, so that they do not tie; otherwise each step rounds to the dtype of
            the queries.
    """

    iq_THC: Tensor
    weights_TH: Tensor
    keys: RowStore
    paging: Paging
    top_k: int
    entries_max: int
    weight_scale: float = 1.0
    any_order: bool = False
    float32: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of scores and of their intermediate results."""
        return torch.float32 if self.float32 else self.iq_THC.dtype

    @property
    def has_kernel(self) -> bool:
        """Whether the kernel takes these queries with these keys."""
        form = self.keys.format
        return self.iq_THC.dtype == (form.dtype if isinstance(form, UnquantizedRow) else torch.bfloat16)

    @property
    def ratio(self) -> int:
        """Tokens per entry."""
        return PAGE_TOKENS // self.keys.rows_per_page


def choose_paged(given: IndexInputs) -> Tensor:
    """Return the entries that each token attends to, int32 [T, top_k] ascending; undefined for tokens that see at most ``top_k``.

    Tokens are scored in rounds, whose scores take at most ``SCORE_BYTES``.
    """
    tokens, iq_THC = len(given.iq_THC), given.iq_THC
    round_tokens = max(1, SCORE_BYTES // (given.dtype.itemsize * max(1, given.entries_max)))
    selected_TK = torch.empty(tokens, given.top_k, dtype=torch.int32, device=iq_THC.device)
    for begin in range(0, tokens, round_tokens):
        end = min(begin + round_tokens, tokens)
        # The scores are a temporary, so that they are freed before those of the next round are allocated.
        select_paged(index_scores_paged(given, begin, end), given.paging, given.ratio, begin, selected_TK[begin:end])
    return selected_TK


@op("indexer.triton:index_scores_paged_triton", suits=lambda given, begin, end: given.has_kernel)
def index_scores_paged(given: IndexInputs, begin: int, end: int) -> Tensor:
    """Score the visible entries of the tokens ``begin`` to ``end`` of a step; tokens of a sequence share its keys.

    Returns:
        [N, entries_max] in ``given.dtype``; undefined where the entry is not visible or the token needs no scores.
    """
    iq_NHC, keys, paging = given.iq_THC[begin:end].to(given.dtype), given.keys, given.paging
    weights_NH = given.weights_TH[begin:end].to(iq_NHC.dtype) * given.weight_scale
    scores = torch.full((len(iq_NHC), given.entries_max), float("-inf"), dtype=iq_NHC.dtype, device=iq_NHC.device)
    rows, row_tile = keys.rows_per_page, None if given.any_order else ROW_TILE
    for block in paging.blocks(_REF_TOKENS, _LEAST_SHARING):
        first, last, count = max(block.begin - begin, 0), min(block.end, end) - begin, (block.newest + 1) // given.ratio
        if first >= last or count <= given.top_k:
            continue
        entry_E = torch.arange(count, device=scores.device)
        if block.sequence is None:
            sequence_N1 = paging.sequence_T[begin + first : begin + last].long()[:, None]
            page = paging.grow_SP.long()[sequence_N1, entry_E // rows]
            seen_NE = entry_E < _visible(paging, given.ratio, begin + first, last - first)[:, None]
            addresses = torch.where(seen_NE, page * rows + entry_E % rows, -1)
        else:
            addresses = paging.grow_SP[block.sequence].long()[entry_E // rows] * rows + entry_E % rows
        part, found = slice(first, last), keys.read(addresses, iq_NHC.dtype)
        scores[part, :count] = index_scores(iq_NHC[part], weights_NH[part], found, row_tile=row_tile).to(scores.dtype)
    return scores


@op("indexer.triton:select_paged_triton")
def select_paged(scores_NE: Tensor, paging: Paging, ratio: int, begin: int, out: Tensor) -> Tensor:
    """Write the best visible entries of the tokens ``begin`` to ``begin + N`` of a step, ascending; on ties the older ones.

    Args:
        scores_NE: bfloat16 or float32, as ``index_scores_paged`` returns them; those of invisible entries may hold anything.
        paging: Positions of the tokens.
        ratio: Tokens per entry.
        out: Contiguous int32 [N, top_k]; undefined afterwards for tokens that see at most ``top_k`` entries.
    """
    visible_N = _visible(paging, ratio, begin, len(scores_NE))
    rows_M = (visible_N > out.shape[1]).nonzero()[:, 0]
    if len(rows_M):
        out[rows_M] = select_entries(scores_NE[rows_M].float(), visible_N[rows_M], out.shape[1])[0].int()
    return out


def _visible(paging: Paging, ratio: int, begin: int, count: int) -> Tensor:
    """Return how many entries tokens see, int64; 0 for padding."""
    return (paging.positions_T[begin : begin + count].long() + 1) // ratio
