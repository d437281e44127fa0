"""Sparse multi-query attention over lists of rows, with a sink.

    l_e = (q_h . e) scale          e in the token's rows; K and V are the same vector, shared by all heads
    o_h = sum_e exp(l_e) e / (sum_e exp(l_e) + exp(sink_h))

Source: DeepSeek-V4 specification 3.7 and 4.5.  Numerics: rows are taken in blocks with a running maximum; in bfloat16 the probabilities are
rounded per block before they meet the values, as the official kernel does (4e-5 of it). Blocks of masked rows change no bit, so a
token's result does not depend on how many rows the rest of the batch needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


def sparse_attention(
    q_THC: Tensor, rows_TRC: Tensor, valid_TR: Tensor, sink_H: Tensor, scale: float, *, block: int | None = BLOCK
) -> Tensor:
    """Attend each token's heads to that token's rows.

    Args:
        q_THC: Queries, float32 or bfloat16.
        rows_TRC: Rows in the dtype of q; rows that are not valid may hold anything but are read.
        valid_TR: Which rows count; every token needs at least one.
        sink_H: float32 logit that only joins the denominator.
        scale: Multiplies the logits.
        block: Rows taken at a time; ``None`` takes all at once (same result up to rounding).

    Returns:
        [T, H, C] in the dtype of q.
    """
    query = q_THC.float()
    size = rows_TRC.shape[1] if block is None else block
    peak = total = out = None
    for start in range(0, rows_TRC.shape[1], size):
        mask = valid_TR[:, start : start + size]
        # An invalid row may hold a NaN of another sequence; zero times NaN would still be NaN.
        rows = rows_TRC[:, start : start + size].float().masked_fill(~mask[..., None], 0.0)
        logits = torch.bmm(query, rows.transpose(1, 2)) * scale
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
        block_peak = logits.amax(-1, keepdim=True)
        if peak is None:
            peak = block_peak
            p = torch.exp(logits - peak)
            total = p.sum(-1, keepdim=True)
            out = torch.bmm(p.to(q_THC.dtype).float(), rows)
            continue
        assert total is not None and out is not None
        new_peak = torch.maximum(peak, block_peak)
        p = torch.exp(logits - new_peak)
        shrink = torch.exp(peak - new_peak)
        total = total * shrink + p.sum(-1, keepdim=True)
        out = torch.baddbmm(out * shrink, p.to(q_THC.dtype).float(), rows)
        peak = new_peak
    assert peak is not None and total is not None and out is not None
    return (out / (total + torch.exp(sink_H[:, None] - peak))).to(q_THC.dtype)
