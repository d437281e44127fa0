"""What a model chooses for tokens, as tensors: to be recorded, or to be chosen again."""

from __future__ import annotations

from typing import NamedTuple

import torch
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


def selection_of(selected_TK: Tensor, place: int, given: Choices | None, chosen: Choices | None) -> Tensor:
    """Return the entries that a layer attends to, int32 [T, K]: those given, or for other tokens its own; keep them in ``chosen``.

    Args:
        selected_TK: What the layer itself selects.
        place: Of the layer, among the hidden layers that select.
        given: What it has to select; see ``family.Batch``.
        chosen: If it has room for them, receives the entries.
    """
    if given is not None and given.selected_TLK is not None:
        given_TK = given.selected_TLK[:, place].to(selected_TK.device)
        selected_TK = torch.where(given_TK < 0, selected_TK, given_TK)
    if chosen is not None and chosen.selected_TLK is not None:
        chosen.selected_TLK[:, place] = selected_TK
    return selected_TK
