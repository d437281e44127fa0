"""Partial rotary embedding, with the YaRN frequency blend.

    (a, b) -> (a cos - b sin, a sin + b cos)      angle = position * f_i
    rope         pair i = channels (C - r + 2i, C - r + 2i + 1)
    rope_first   pair i = channels (2i, 2i + 1), or (i, r / 2 + i)

Source: DeepSeek-V4 specification 1.4 and 3.3, MLA specification 1.3, 3.2 and 3.10.  Numerics: float32 angles (the product is
rounded, as in the official code) and rotation, one rounding to the input dtype.  There is no magnitude factor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rope_frequencies(
    rope_dim: int, theta: float, *, factor: float = 1.0, original: int = 0, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> Tensor:
    """Return float32 [rope_dim / 2] frequencies; ``factor`` 1 means no YaRN."""
    freq = theta ** (-torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim)
    if factor == 1.0:
        return freq

    def correction(beta: float) -> float:
        return rope_dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    index = torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((index - low) / (high - low or 1e-3)).clamp(0, 1)  # descending if high < low
    return freq / factor * ramp + freq * (1 - ramp)


def rope_angles(positions_T: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [T, rope_dim / 2], of integer positions."""
    angle = positions_T.float()[:, None] * freq
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last channels of ``x`` [T, C] or [T, H, C] by ``cos``, ``sin`` [T, r / 2]; ``inverse`` rotates back."""
    if inverse:
        sin = -sin
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    width = 2 * cos.shape[-1]
    tail = x[..., -width:].float()
    a, b = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], -1)


def rope_first(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first channels of ``x`` [T, C] or [T, H, C]; pairs are neighbours if ``interleaved``, else of both halves."""
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    width = 2 * cos.shape[-1]
    head = x[..., :width].float()
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = [a * cos - b * sin, a * sin + b * cos]
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([joined.to(x.dtype), x[..., width:]], -1)
