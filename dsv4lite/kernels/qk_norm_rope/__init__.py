"""The norm and the rotation of every query head, and what the indexer's heads go through.

    q  = rope(rms_norm_heads(query[:H C]))
    iq = round_fp4(hadamard(rope(query[H C:])))        plain models: rope(query[H C:])

Source: DeepSeek-V4 specification 3.3, 3.6 and 4.3.  Numerics: those of ``rms_norm_heads``, ``rope``, ``hadamard`` and
``round_fp4``. The kernel's sum of squares has another order, and the mean is rounded to bfloat16: where the sum lies at a border,
a head's factor is the neighbouring bfloat16 (seen in one of 10^4 heads), and the head differs by one unit in the last place.
Index heads are equal. In float32 heads agree to 1e-6.
"""

from __future__ import annotations

from torch import Tensor

from dsv4lite.kernels.attention import FEW_SPLITS
from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.norm import rms_norm_heads
from dsv4lite.kernels.quantize import hadamard, round_fp4
from dsv4lite.kernels.rope import rope


def head_norms_ref(
    query_TK: Tensor,
    heads: int,
    channels: int,
    index_heads: int,
    index_dim: int,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *,
    fp4: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """See ``head_norms``."""
    q_THC = query_TK[:, : heads * channels].unflatten(1, (heads, channels))
    q_THC = rope(rms_norm_heads(q_THC, eps), cos, sin)
    if not index_heads:
        return q_THC, None
    iq_THC = query_TK[:, heads * channels :].unflatten(1, (index_heads, index_dim))
    iq_THC = rope(iq_THC, cos, sin)
    return q_THC, round_fp4(hadamard(iq_THC)) if fp4 else iq_THC


def head_norms(
    query_TK: Tensor,
    heads: int,
    channels: int,
    index_heads: int,
    index_dim: int,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    *,
    fp4: bool = True,
    splits: int = 1,
) -> tuple[Tensor, Tensor | None, float | None]:
    """Normalise and rotate query heads; rotate index heads, and transform and round them.

    Where attention has a kernel that includes this (packed rows, ``FEW_SPLITS`` or more, no index heads), queries stay as they are.

    Args:
        query_TK: [T, H C + Hi Ci], bfloat16; float32 only in plain models.
        heads, channels: H and C.
        index_heads, index_dim: Hi and Ci; no index heads if Hi is 0.
        cos, sin: float32 [T, rope / 2].
        eps: Of the norm.
        fp4: Transform and round index heads, as keys of quantized models are.
        splits: Of the attention that follows.

    Returns:
        Queries [T, H, C], and index queries [T, Hi, Ci] or ``None``, in the dtype of what was given; and the ``norm_eps`` that
        ``paged_attention`` must be told: ``eps`` if queries stay as they are, else ``None``.
    """
    if fp4 and splits >= FEW_SPLITS and not index_heads:
        return query_TK.unflatten(1, (heads, channels)), None, eps
    if use_triton(query_TK):
        from dsv4lite.kernels.norm.unquantized_triton import plain_head_norms_triton
        from dsv4lite.kernels.qk_norm_rope.triton import head_norms_triton

        op = head_norms_triton if fp4 else plain_head_norms_triton
        return *op(query_TK, heads, channels, index_heads, index_dim, cos, sin, eps), None
    return *head_norms_ref(query_TK, heads, channels, index_heads, index_dim, cos, sin, eps, fp4=fp4), None
