"""Experts and attended entries that a model chooses for tokens, as tensors to record or to replay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Choices(NamedTuple):
    """Choices for the tokens of a step: those that the model made, or those that it must make.

    Attributes:
        routed_TLK: Experts, int16 [T, layers, K].
        selected_TLK: Entries that tokens attend to, int32 [T, layers that select, k]; undefined for tokens that see at most k.
            ``None`` if no sequence of the step sees more. In host memory, because it is large, unless ranks exchange it.
    """

    routed_TLK: Tensor | None = None
    selected_TLK: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are not ``None``."""
        return [x for x in self if x is not None]


def experts_of(choices: Choices | None, layer: int) -> Tensor | None:
    """Return the experts [T, K] of a hidden layer; ``None`` if ``choices`` have none."""
    return None if choices is None or choices.routed_TLK is None else choices.routed_TLK[:, layer]


def selection_of(selected_TK: Tensor, index: int, given: Choices | None, chosen: Choices | None) -> Tensor:
    """Return the entries that a layer attends to, int32 [T, K]: the given ones, or its own where the given ones are negative.

    Args:
        selected_TK: The layer's own selection.
        index: Index of the layer among the hidden layers that select.
        given: Selections to replay; see ``Batch``.
        chosen: Receives the result, if it has a tensor for it.
    """
    if given is not None and given.selected_TLK is not None:
        given_TK = given.selected_TLK[:, index].to(selected_TK.device)
        selected_TK = torch.where(given_TK < 0, selected_TK, given_TK)
    if chosen is not None and chosen.selected_TLK is not None:
        chosen.selected_TLK[:, index] = selected_TK
    return selected_TK
