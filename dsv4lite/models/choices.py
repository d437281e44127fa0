"""What a model chooses for tokens, as tensors: to be recorded, or to be chosen again."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Choices(NamedTuple):
    """What a model chose for the tokens of a step, or has to choose.

    Attributes:
        routed_TLK: Experts, int16 [T, layers, K].
        selected_TLK: Entries that tokens attend to, int32 [T, layers that select, k]; anything for those who see no more. ``None``
            where no sequence of the step is long enough. On the host, unless ranks pass it on: it is large.
    """

    routed_TLK: Tensor | None = None
    selected_TLK: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [x for x in self if x is not None]


def experts_of(choices: Choices | None, layer: int) -> Tensor | None:
    """Return the experts [T, K] of a hidden layer, if they are wanted or given."""
    return None if choices is None or choices.routed_TLK is None else choices.routed_TLK[:, layer]
