"""Sparse multi-query attention over lists of rows, with a sink; and the same on packed pages.

    l_e = (q_h . e) scale          e in the token's rows; K and V are the same vector, shared by all heads
    o_h = sum_e exp(l_e) e / (sum_e exp(l_e) + exp(sink_h))

Source: DeepSeek-V4 specification 3.7 and 4.5.  Numerics: rows are taken in blocks with a running maximum; in bfloat16 the
probabilities are rounded per block before they meet the values, as the official kernel does (4e-5 of it). Blocks of masked rows
change no bit, so a token's result does not depend on how many rows the rest of the batch needs. On packed pages the kernel may
take other blocks and splits the rows: it agrees with the reference to 2^-7 of a result plus 2^-8 of the head's largest one (in
float32 2^-13), and in channels that rotate to 2^-6 of their pair's norm instead of the first: these are rounded before and after
they turn, and what turns to little was as large as the pair. Its bits follow from the token's own rows and the number of splits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.norm import rms_norm_heads
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope
from dsv4lite.kernels.rows import PlainRow, RowStore

BLOCK = 64
WINDOW = 128
FEW_SPLITS = 4  # from here on tokens are so few that latency is all: they have a kernel of their own, which norms queries, too
_REF_TOKENS = 64  # whose rows the reference holds at a time


def sparse_attention(
    q_THC: Tensor, rows: Tensor, valid_TR: Tensor, sink_H: Tensor, scale: float, *, block: int | None = BLOCK
) -> Tensor:
    """Attend each token's heads to that token's rows.

    Args:
        q_THC: Queries, float32 or bfloat16.
        rows: [T, R, C], each token's own, or [R, C], shared by all tokens; invalid ones of the former may hold anything.
        valid_TR: Which rows count; every token needs at least one.
        sink_H: float32 logit that only joins the denominator.
        scale: Multiplies the logits.
        block: Rows taken at a time, the last ones padded to so many; ``None`` takes all at once (same result up to rounding).

    Returns:
        [T, H, C] in the dtype of q.
    """
    query = q_THC.float()
    count = rows.shape[-2]
    peak = total = out = None
    for start in range(0, count, block or count):
        part = slice(start, start + (block or count))
        mask, keys = valid_TR[:, part], rows[..., part, :].float()
        if block is not None and mask.shape[1] < block:  # a product of another width may have another order of summation
            missing = block - mask.shape[1]
            mask, keys = pad(mask, (0, missing)), pad(keys, (0, 0, 0, missing))
        if keys.dim() == 3 and not bool(mask.all()):
            # An invalid row may hold a NaN of another sequence; zero times NaN would still be NaN.
            keys = keys.masked_fill(~mask[..., None], 0.0)
        logits = torch.matmul(query, keys.transpose(-1, -2)) * scale
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
        block_peak = logits.amax(-1, keepdim=True)
        new_peak = block_peak if peak is None else torch.maximum(peak, block_peak)
        p = torch.exp(logits - new_peak)
        weighted = torch.matmul(p.to(q_THC.dtype).float(), keys)
        if peak is None or total is None or out is None:
            total, out = p.sum(-1, keepdim=True), weighted
        else:
            shrink = torch.exp(peak - new_peak)
            total, out = total * shrink + p.sum(-1, keepdim=True), out * shrink + weighted
        peak = new_peak
    assert peak is not None and total is not None and out is not None
    return (out / (total + torch.exp(sink_H[:, None] - peak))).to(q_THC.dtype)


def paged_attention(
    q_THC: Tensor,
    fresh_TB: Tensor,
    window: RowStore,
    entries: RowStore | None,
    paging: Paging,
    sink_H: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    ratio: int,
    selected_TK: Tensor | None = None,
    splits: int = 1,
    *,
    window_size: int = WINDOW,
    norm_eps: float | None = None,
) -> Tensor:
    """Attend each token's heads to its window and its compressed entries, and rotate the results back.

    Args:
        q_THC: bfloat16 queries; on plain rows in their dtype.
        fresh_TB: uint8, packed rows of this step's tokens: data bytes, then scale bytes. A stride of a multiple of 16 bytes is
            read faster.
        window, entries: Packed or plain kv rows; ``None`` for a layer without compressed entries.
        paging: Where tokens and rows are.
        sink_H: float32 logit that only joins the denominator.
        scale: Multiplies the logits.
        cos, sin: float32 [T, rope / 2], angles of the tokens.
        ratio: Tokens of a compressed entry; 0 without entries.
        selected_TK: int32 ascending entries of every token that sees more than K; others, and all tokens if it is ``None``, attend
            to every entry they see.
        splits: Programs that share a token's rows; part of what the result's bits depend on.
        window_size: Latest positions that a token sees, itself included.
        norm_eps: Queries are as their product has left them, and are normed, with this, and rotated here, as ``head_norms`` does
            it; on packed rows with ``FEW_SPLITS`` or more. ``None``: they come so.

    Returns:
        [T, H, C] in the dtype of q; zeros for padding.
    """
    if use_triton(q_THC):
        from dsv4lite.kernels.attention.triton import paged_attention_triton
        from dsv4lite.kernels.attention.unquantized_triton import plain_paged_attention_triton

        rows = (fresh_TB, window, entries, paging, sink_H, scale, cos, sin, ratio, selected_TK, splits, window_size)
        if isinstance(window.format, PlainRow):
            assert norm_eps is None
            return plain_paged_attention_triton(q_THC, *rows)
        return paged_attention_triton(q_THC, *rows, norm_eps)
    return paged_attention_ref(
        q_THC, fresh_TB, window, entries, paging, sink_H, scale, cos, sin, ratio, selected_TK,
        window_size=window_size, norm_eps=norm_eps,
    )  # fmt: skip


def paged_attention_ref(
    q_THC: Tensor,
    fresh_TB: Tensor,
    window: RowStore,
    entries: RowStore | None,
    paging: Paging,
    sink_H: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    ratio: int,
    selected_TK: Tensor | None = None,
    *,
    window_size: int = WINDOW,
    norm_eps: float | None = None,
) -> Tensor:
    """See ``paged_attention``; gathers rows and calls ``sparse_attention``."""
    if norm_eps is not None:
        q_THC = rope(rms_norm_heads(q_THC, norm_eps), cos, sin)
    out = torch.empty_like(q_THC)
    for part in torch.arange(len(q_THC), device=q_THC.device).split(_REF_TOKENS):
        rows, valid = _window_rows(part, fresh_TB, window, paging, window_size, q_THC.dtype)
        if entries is not None:
            more, seen = _entry_rows(part, entries, paging, ratio, selected_TK, q_THC.dtype)
            rows, valid = torch.cat([rows, more], 1), torch.cat([valid, seen], 1)
        padding = paging.positions_T[part] < 0
        valid[:, 0] |= padding
        rows = rows.masked_fill(padding[:, None, None], 0.0)
        out[part] = rope(sparse_attention(q_THC[part], rows, valid, sink_H, scale), cos[part], sin[part], inverse=True)
    return out


def _window_rows(
    part: Tensor, fresh_TB: Tensor, window: RowStore, paging: Paging, window_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the window's rows of tokens ``part`` int64 [N], [N, W, C] in ``dtype``, and which of them there are."""
    sequence, position = paging.sequence_T[part].long(), paging.positions_T[part].long()[:, None]
    at_NW = (position + 1 - window_size).clamp_min(0) + torch.arange(window_size, device=position.device)
    valid = at_NW <= position
    since = at_NW - paging.first_S[sequence].long()[:, None]
    page = at_NW // window.rows_per_page - paging.window_first_S[sequence].long()[:, None]
    page = paging.window_SP[sequence].long().gather(1, torch.where(valid & (since < 0), page, 0))
    stored = window.read(page * window.rows_per_page + at_NW % window.rows_per_page, dtype)
    fresh = fresh_TB[torch.where(valid & (since >= 0), paging.rows_S[sequence].long()[:, None] + since, 0)]
    data, scales = fresh.split([window.format.data_bytes, window.format.scale_bytes], -1)
    return torch.where((since >= 0)[..., None], window.format.unpack(data, scales, dtype), stored), valid


def _entry_rows(
    part: Tensor, entries: RowStore, paging: Paging, ratio: int, selected_TK: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the entries of tokens ``part`` int64 [N], [N, K, C] in ``dtype``, and which of them there are."""
    visible = (paging.positions_T[part].long()[:, None] + 1) // ratio
    count = int(visible.max()) if selected_TK is None else selected_TK.shape[1]
    entry_NK = torch.arange(count, device=visible.device).expand(len(part), -1)
    valid = entry_NK < visible
    if selected_TK is not None:
        entry_NK = torch.where(visible > count, selected_TK[part].long(), entry_NK)
    entry_NK = torch.where(valid, entry_NK, 0)
    page = paging.grow_SP[paging.sequence_T[part].long()].long().gather(1, entry_NK // entries.rows_per_page)
    return entries.read(page * entries.rows_per_page + entry_NK % entries.rows_per_page, dtype), valid
