"""Sparse multi-query attention over lists of rows, with a sink.

    l_e = (q_h . e) scale          e in the token's rows; K and V are the same vector, shared by all heads
    o_h = sum_e exp(l_e) e / (sum_e exp(l_e) + exp(sink_h))

Source: DeepSeek-V4 specification 3.7 and 4.5.  Numerics: rows are taken in blocks with a running maximum; in bfloat16 the
probabilities are rounded per block before they meet the values, as the official kernel does (4e-5 of it). Blocks of masked rows
change no bit, so a token's result does not depend on how many rows the rest of the batch needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


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
        block: Rows taken at a time; ``None`` takes all at once (same result up to rounding).

    Returns:
        [T, H, C] in the dtype of q.
    """
    query = q_THC.float()
    count = rows.shape[-2]
    peak = total = out = None
    for start in range(0, count, block or count):
        part = slice(start, start + (block or count))
        mask, keys = valid_TR[:, part], rows[..., part, :].float()
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
