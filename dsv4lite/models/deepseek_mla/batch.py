"""The inputs of one forward pass, as tensors. Shapes: T tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4lite.models import batch


@dataclass(slots=True, kw_only=True)
class Batch(batch.Batch):
    """One step's tokens.

    Attributes:
        rope_T: cos and sin, float32 [T, rope / 2].
    """

    rope_T: tuple[Tensor, Tensor]
