"""Sparse multi-query attention with a sink, over lists of rows and over rows in pages.

    l_e = (q_h . e) scale          e in the token's rows; K and V are the same vector, shared by all heads
    o_h = sum_e exp(l_e) e / (sum_e exp(l_e) + exp(sink_h))

Source: DeepSeek-V4 specification 3.7 and 4.5.  Numerics: rows are processed in blocks with a running maximum. In bfloat16,
probabilities are rounded per block before the product with the values, as in the official kernel (agreement 4e-5). Blocks of masked
rows change no bit, so a token's result does not depend on how many rows the rest of the batch needs. Kernels may use other blocks
and split the rows. They agree with the reference to 2^-7 of a result plus 2^-8 of the head's largest one (in float32 2^-13). In
rotated channels the first term is 2^-6 of the pair's norm: these channels are rounded before and after the rotation, which can make
a large channel small. A kernel's bits depend only on the token's own rows and the number of splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.paging import Block, Paging
from dsv4lite.kernels.rope import rope
from dsv4lite.kernels.rows import RowStore, unpack_rows

BLOCK = 64
WINDOW = 128
DECODE_SPLITS = 4  # from this number of splits on, packed rows take the latency-bound kernel
WIDENED_ROWS = 16  # most visible rows per token of a step whose rows are all widened first
_REF_TOKENS = 64  # tokens whose rows the reference holds at a time
_LEAST_SHARING = 8  # in float32 with ``any_order``, sequences with so many tokens read their rows once, under a mask


def sparse_attention(
    q_THC: Tensor,
    rows: Tensor,
    valid_TR: Tensor,
    sink_H: Tensor | None,
    scale: float,
    *,
    block: int | None = BLOCK,
    width: int | None = None,
) -> Tensor:
    """Attend each token's heads to that token's rows.

    Args:
        q_THC: Queries, float32 or bfloat16.
        rows: [T, R, C], one list per token, or [R, C], shared by all tokens. Invalid rows of [T, R, C] may hold anything.
        valid_TR: Which rows a token attends to; every token needs at least one in its first block.
        sink_H: float32 logit that is only added to the denominator; ``None`` if there is none.
        scale: Multiplies the logits.
        block: Rows per block; the last block is padded. ``None``: one block of all rows (same result up to rounding).
        width: The first ``width`` channels of a row are its value; ``None``: all channels.

    Returns:
        [T, H, C] in the dtype of q, or [T, H, width].
    """
    query, count = q_THC.float(), rows.shape[-2]
    width = channels = width or rows.shape[-1]
    if block is not None and (rows.shape[-1] % 4 or width % 4):  # as in ``gemm.matmul_rows``
        query, rows = pad(query, (0, -query.shape[-1] % 4)), pad(rows, (0, -rows.shape[-1] % 4))
        width += -width % 4
    peak = total = out = None
    for start in range(0, count, block or count):
        part = slice(start, start + (block or count))
        mask, keys = valid_TR[:, part], rows[..., part, :].float()
        if block is not None and mask.shape[1] < block:  # a product of another shape may sum in another order
            missing = block - mask.shape[1]
            mask, keys = pad(mask, (0, missing)), pad(keys, (0, 0, 0, missing))
        unseen = None if bool(mask.all()) else ~mask
        if unseen is not None and keys.dim() == 3:
            # An invalid row may hold a NaN of another sequence; zero times NaN would still be NaN.
            keys = keys.masked_fill(unseen[..., None], 0.0)
        logits = torch.matmul(query, keys.transpose(-1, -2)) * scale
        if unseen is not None:
            logits = logits.masked_fill(unseen[:, None], float("-inf"))
        block_peak = logits.amax(-1, keepdim=True)
        new_peak = block_peak if peak is None else torch.maximum(peak, block_peak)
        p = torch.exp(logits - new_peak)
        weighted = torch.matmul(p.to(q_THC.dtype).float(), keys[..., :width])
        if peak is None or total is None or out is None:
            total, out = p.sum(-1, keepdim=True), weighted
        else:
            shrink = torch.exp(peak - new_peak)
            total, out = total * shrink + p.sum(-1, keepdim=True), out * shrink + weighted
        peak = new_peak
    assert peak is not None and total is not None and out is not None
    if sink_H is not None:
        total = total + torch.exp(sink_H[:, None] - peak)
    return (out / total)[..., :channels].to(q_THC.dtype)


class AttentionInputs(NamedTuple):
    """Arguments of ``paged_attention``.

    Attributes:
        q_THC: bfloat16 queries; with unquantized rows in the dtype of the rows.
        fresh_TB: uint8, packed rows of this step's tokens: data bytes, then scale bytes. Reads are faster if the stride is a
            multiple of 16 bytes.
        window, entries: Packed or unquantized kv rows; ``entries`` is ``None`` in a layer without compressed entries.
        paging: Positions of the tokens, and pages of the rows.
        sink_H: float32 logit that is only added to the denominator.
        scale: Multiplies the logits.
        cos, sin: float32 [T, rope / 2], angles of the tokens.
        ratio: Tokens per compressed entry; 0 without entries.
        selected_TK: int32 ascending entries of every token that sees more than K; other tokens, and all tokens if it is ``None``,
            attend to every entry they see.
        window_size: Number of latest positions that a token sees, including its own.
        any_order: The order in which a token's rows are summed may depend on the rest of the step. The reference uses this in
            float32; kernels ignore it.
    """

    q_THC: Tensor
    fresh_TB: Tensor
    window: RowStore
    entries: RowStore | None
    paging: Paging
    sink_H: Tensor
    scale: float
    cos: Tensor
    sin: Tensor
    ratio: int
    selected_TK: Tensor | None = None
    window_size: int = WINDOW
    any_order: bool = False

    @property
    def padded_width(self) -> int:
        """Channels of a kernel's tiles: a power of two, at least 32, so that tensor cores can multiply each half."""
        return max(32, 1 << (self.q_THC.shape[2] - 1).bit_length())

    @property
    def visible_rows(self) -> int:
        """Upper bound of the rows that the tokens see: the capacity of the page tables."""
        sequences, columns = self.paging.grow_SP.shape
        entries = 0 if self.entries is None else columns * self.entries.rows_per_page
        return len(self.q_THC) + sequences * (self.window_size + entries)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return queries, rows, selection and tables, in the order of the kernels' arguments."""
        paging = self.paging
        return (
            self.q_THC,
            self.fresh_TB,
            self.window.memory,
            (self.entries or self.window).memory,
            paging.positions_T if self.selected_TK is None else self.selected_TK,
            paging.positions_T,
            paging.sequence_T,
            paging.first_S,
            paging.rows_S,
            paging.grow_SP,
            paging.window_SP,
            paging.window_first_S,
        )

    def layer(self, rows: int) -> dict[str, int]:
        """Return the constants of the layer for kernels; a piece has ``rows`` rows."""
        return {
            "H": self.q_THC.shape[1],
            "WIDTH": self.q_THC.shape[2],
            "RATIO": max(self.ratio, 1),
            "TOP_K": 0 if self.selected_TK is None else self.selected_TK.shape[1],
            "WINDOW": self.window_size,
            "ROWS": rows,
        }

    def row_layout(self) -> dict[str, int]:
        """Return the constants of the rows' memory layout for kernels."""
        return {
            "FRESH_ROW": self.fresh_TB.stride(0),
            "WINDOW_BYTES": self.window.memory.shape[1],
            "WINDOW_ROWS": self.window.rows_per_page,
            "ENTRY_BYTES": (self.entries or self.window).memory.shape[1],
            "ENTRY_ROWS": 0 if self.entries is None else self.entries.rows_per_page,
        }

    def allocate_splits(self) -> tuple[Tensor, Tensor]:
        """Allocate each split's sums, float32 [splits, T, H, C], and its peak and total [splits, T, H, 2]."""
        parts = torch.empty(self.paging.splits, *self.q_THC.shape, dtype=torch.float32, device=self.q_THC.device)
        return parts, torch.empty(*parts.shape[:3], 2, dtype=torch.float32, device=parts.device)


@op("attention.triton:paged_attention_triton")
def paged_attention(given: AttentionInputs) -> Tensor:
    """Attend each token's heads to its window and its compressed entries, and rotate the results back.

    The reference gathers rows, for each token or for a block of tokens, and calls ``sparse_attention``.

    Returns:
        [T, H, C] in the dtype of q; zeros for padding.
    """
    q_THC, cos, sin, padding_T = given.q_THC, given.cos, given.sin, given.paging.padding_T
    shares = given.any_order and q_THC.dtype == torch.float32
    recent, parts, size = _RecentRows(given), [q_THC[:0]], None if shares else BLOCK
    for block in given.paging.blocks(_REF_TOKENS, _LEAST_SHARING if shares else None):
        rows, valid = recent.of(block)
        if given.entries is not None:
            more, seen = _entry_rows(block, given, given.entries)
            rows, valid = torch.cat([rows, more], -2), torch.cat([valid, seen], 1)
        if padding_T is not None:
            valid = valid.clone()
            valid[:, 0] |= padding_T[block.begin : block.end]
        parts.append(sparse_attention(q_THC[block.begin : block.end], rows, valid, given.sink_H, given.scale, block=size))
    out_THC = rope(torch.cat(parts), cos, sin, inverse=True)
    return out_THC if padding_T is None else out_THC.masked_fill(padding_T[:, None, None], 0.0)


class _RecentRows:
    """The rows of a step's windows: for each sequence the W - 1 rows before this step; then all rows of the step.

    Attributes:
        rows: [S (W - 1) + T, C]; rows that no window includes may hold anything.
    """

    def __init__(self, given: AttentionInputs) -> None:
        self._paging, self._size, per_page, dtype = given.paging, given.window_size, given.window.rows_per_page, given.q_THC.dtype
        self._before = self._size - 1
        self._stored = len(self._paging.first_S) * self._before
        addresses = self._paging.once(("before", self._size, per_page), lambda: self._addresses(per_page))
        stored = given.window.read(addresses, dtype)
        self.rows = torch.cat([stored, unpack_rows(given.window.format, given.fresh_TB, dtype)])

    def of(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return the rows of a block, [N, W, C], or [R, C] if it is of one sequence; and which of them each token sees, bool."""
        if block.sequence is None:
            index_TW, valid_TW = self._paging.once(("windows", self._size), self._windows)
            part = slice(block.begin, block.end)
            index_TW = index_TW[part]
            return self.rows.index_select(0, index_TW.flatten()).unflatten(0, index_TW.shape), valid_TW[part]
        first, row = int(self._paging.first_S[block.sequence]), int(self._paging.rows_S[block.sequence])
        oldest, end = max(0, block.oldest - self._before), self._before * (block.sequence + 1)
        own = self.rows[self._stored + row + max(0, oldest - first) : self._stored + row + block.newest + 1 - first]
        rows = torch.cat([self.rows[end - (first - oldest) : end], own]) if oldest < first else own
        at_R = torch.arange(oldest, block.newest + 1, device=own.device)
        position_N1 = self._paging.positions_T[block.begin : block.end, None]
        return rows, (at_R <= position_N1) & (at_R > position_N1 - self._size)

    def _addresses(self, rows_per_page: int) -> Tensor:
        """Return the addresses of each sequence's rows before the step, int64 [S (W - 1)]; undefined before position 0."""
        at_SW = self._paging.first_S.long()[:, None] + torch.arange(-self._before, 0, device=self._paging.first_S.device)
        page_SW = at_SW // rows_per_page - self._paging.window_first_S[:, None]
        page_SW = self._paging.window_SP.long().gather(1, page_SW.clamp(0, self._paging.window_SP.shape[1] - 1))
        return (page_SW * rows_per_page + at_SW % rows_per_page).flatten()

    def _windows(self) -> tuple[Tensor, Tensor]:
        """Return the indices in ``rows`` of each token's window, int64 [T, W], and which of them are valid, bool."""
        sequence_T1, position_T1 = self._paging.sequence_T.long()[:, None], self._paging.positions_T.long()[:, None]
        at_TW = (position_T1 + 1 - self._size).clamp_min(0) + torch.arange(self._size, device=position_T1.device)
        valid_TW = at_TW <= position_T1
        since_TW = at_TW - self._paging.first_S[sequence_T1]
        stored_T1 = (sequence_T1 + 1) * self._before
        index_TW = since_TW + torch.where(since_TW < 0, stored_T1, self._stored + self._paging.rows_S[sequence_T1])
        return torch.where(valid_TW, index_TW, 0), valid_TW


def _entry_rows(block: Block, given: AttentionInputs, entries: RowStore) -> tuple[Tensor, Tensor]:
    """Return the entries of a block, [N, K, C], or [K, C] if it is of one sequence; and which of them each token sees, bool."""
    paging, ratio, selected_TK, rows = given.paging, given.ratio, given.selected_TK, entries.rows_per_page
    count = (block.newest + 1) // ratio
    if selected_TK is None or count <= selected_TK.shape[1]:  # cached: the same in every layer of this ratio
        addresses, seen = paging.once(("entries", ratio, block), lambda: entry_addresses(block, paging, ratio, rows, None))
    else:
        addresses, seen = entry_addresses(block, paging, ratio, rows, selected_TK[block.begin : block.end])
    return entries.read(addresses, given.q_THC.dtype), seen


def entry_addresses(block: Block, paging: Paging, ratio: int, rows: int, selected_NK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the addresses of a block's entries, int64 [N, K], or [K] if it is of one sequence; and which each token sees, bool.

    Args:
        block: Consecutive tokens.
        paging: Their positions and pages.
        ratio: Tokens per entry.
        rows: Entries per page.
        selected_NK: Their selected entries, see ``AttentionInputs``; ``None`` unless some token sees more than K entries.
    """
    visible_N1 = (paging.positions_T[block.begin : block.end].long()[:, None] + 1) // ratio
    count = (block.newest + 1) // ratio if selected_NK is None else selected_NK.shape[1]
    entry = torch.arange(count, device=visible_N1.device)
    seen = entry < visible_N1
    if selected_NK is not None:
        entry = torch.where(visible_N1 > count, selected_NK.long(), entry)
        if block.sequence is not None:
            entry, seen = union_of(entry, seen)
    if block.sequence is not None:
        page = paging.grow_SP[block.sequence].long()[entry // rows]
    else:
        entry = torch.where(seen, entry, 0)
        page = paging.grow_SP.long()[paging.sequence_T[block.begin : block.end].long()[:, None], entry // rows]
    return page * rows + entry % rows, seen


def union_of(chosen_NK: Tensor, seen_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the union of all tokens' entries, int64 [U] ascending, and which of them each token has, bool [N, U]."""
    union_U, place_NK = torch.unique(torch.where(seen_NK, chosen_NK, -1), return_inverse=True)
    mask_NU = torch.zeros(len(chosen_NK), len(union_U), dtype=torch.bool, device=chosen_NK.device).scatter_(1, place_NK, True)
    first = int(union_U[0] < 0)
    return union_U[first:], mask_NU[:, first:]
