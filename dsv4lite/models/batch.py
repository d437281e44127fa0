"""The inputs of one forward pass that models of every family have."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.models.choices import Choices


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step's tokens, as ``Model.batch`` returns them; a family's subclass adds the tables that its layers share.

    Attributes:
        token_ids_T: int64; padding has any valid id.
        paging: Their positions, sequences and pages.
        max_tokens: Upper bound, known to the host, of the length of any sequence after the step.
        chosen: Unless ``None``, receives the experts and entries that the model chooses in all layers.
        given: Choices that replace the model's own; where a number is negative, the model chooses for that token and layer.
        most_tokens: Largest number of tokens on any replica that shares the experts; ``None`` if it is not known.
        taps_TK: Hidden states of several layers for a drafter, which the pipeline stages of these layers fill in one after another.
    """

    token_ids_T: Tensor
    paging: Paging
    max_tokens: int
    chosen: Choices | None = None
    given: Choices | None = None
    most_tokens: int | None = None
    taps_TK: Tensor | None = None
