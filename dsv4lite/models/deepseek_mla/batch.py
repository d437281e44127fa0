"""The inputs of one forward pass, as tensors. Shapes: T tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.models.choices import Choices


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step's tokens; see ``models.family.Batch``.

    Attributes:
        rope_T: cos and sin, float32 [T, rope / 2].
    """

    token_ids_T: Tensor
    paging: Paging
    max_tokens: int
    rope_T: tuple[Tensor, Tensor]
    chosen: Choices | None = None
    given: Choices | None = None
    most_tokens: int | None = None
    taps_TK: Tensor | None = None
