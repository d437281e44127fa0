"""Root-mean-square normalisation.

    y = x * rsqrt(mean(x^2) + eps) * w

Source: DeepSeek-V4 specification 3.1.  Numerics: float32 inside, one rounding to the input dtype. The kernel agrees with the
reference to this rounding, and in float32 to 1e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op


@op("norm.triton:rms_norm_triton")
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dimension; ``weight`` [N] or ``None``."""
    y = x.float()
    y = y * torch.rsqrt(y.square().sum(-1, keepdim=True) / y.shape[-1] + eps)  # faster than ``mean``
    return (y if weight is None else y * weight.float()).to(x.dtype)


def rms_norm_heads(q_THC: Tensor, eps: float) -> Tensor:
    """Normalise each head of ``q`` [T, H, C] without a weight.

    In bfloat16 every step rounds, as in the official code: the factor is common to a head, so rounding it once or five times
    changes the whole head (specification 3.3).
    """
    if q_THC.dtype == torch.float32:
        return rms_norm(q_THC, None, eps)
    mean = q_THC.square().float().mean(-1, keepdim=True).to(q_THC.dtype)
    # In float32: torch's bfloat16 rsqrt rounds twice for elements after the last full vector, so bits would depend on the number of
    # tokens.
    return q_THC * torch.rsqrt((mean + eps).float()).to(q_THC.dtype)
