"""Norm and rotation of query heads; rotation, Hadamard transform and FP4 rounding of the indexer's query heads.

    q  = rope(rms_norm_heads(query[:H C]))
    iq = round_fp4(hadamard(rope(query[H C:])))        unquantized models: rope(query[H C:])

Source: DeepSeek-V4 specification 3.3, 3.6 and 4.3.  Numerics: those of ``rms_norm_heads``, ``rope``, ``hadamard`` and
``round_fp4``. The kernel's sum of squares has another order, and the mean is rounded to bfloat16: near a tie a head's factor is the
neighbouring bfloat16 (seen in one of 10^4 heads), and the head differs by one unit in the last place. Index heads have the same
bits. In float32 heads agree to 1e-6.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.norm import rms_norm_heads
from dsv4lite.kernels.quantize import hadamard, round_fp4
from dsv4lite.kernels.rope import rope


class HeadInputs(NamedTuple):
    """Arguments of ``head_norms``.

    Attributes:
        query_TK: [T, H C + Hi Ci], bfloat16; float32 only in unquantized models.
        heads, channels: H and C.
        index_heads, index_dim: Hi and Ci; no index heads if Hi is 0.
        cos, sin: float32 [T, rope / 2].
        eps: Of the norm.
        fp4: Index heads are transformed and rounded to FP4, like the keys.
    """

    query_TK: Tensor
    heads: int
    channels: int
    index_heads: int
    index_dim: int
    cos: Tensor
    sin: Tensor
    eps: float
    fp4: bool


@op("qk_norm_rope.triton:head_norms_triton")
def head_norms(given: HeadInputs) -> tuple[Tensor, Tensor | None]:
    """Normalise and rotate query heads; rotate index heads, and transform and round them.

    Returns:
        Queries [T, H, C], and index queries [T, Hi, Ci] or ``None``, in the dtype of ``query_TK``.
    """
    queries_TK = given.query_TK[:, : given.heads * given.channels]
    q_THC = queries_TK.unflatten(1, (given.heads, given.channels))
    q_THC = rope(rms_norm_heads(q_THC, given.eps), given.cos, given.sin)
    if not given.index_heads:
        return q_THC, None
    iq_THC = given.query_TK[:, queries_TK.shape[1] :].unflatten(1, (given.index_heads, given.index_dim))
    iq_THC = rope(iq_THC, given.cos, given.sin)
    return q_THC, round_fp4(hadamard(iq_THC)) if given.fp4 else iq_THC
