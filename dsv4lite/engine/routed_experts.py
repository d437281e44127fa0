"""The experts that a request's tokens were routed to, for requests that ask for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedExperts:
    """The experts of one sequence, as steps report them.

    Attributes:
        parts: First position, and int16 [tokens, layers, K] from there on.
        shared: Another sequence that may have run the prompt for this one, and how many tokens of it.
    """

    parts: list[tuple[int, Tensor]] = field(default_factory=list)
    shared: tuple[RoutedExperts, int] | None = None

    def by_position(self) -> Tensor | None:
        """Join the parts; a position that ran twice (after a preemption) counts once."""
        if not self.parts:
            return None
        every = self.parts
        if self.shared is not None:
            leader, tokens = self.shared
            every = [(start, part[: tokens - start]) for start, part in leader.parts if start < tokens] + every
        length = max(start + len(part) for start, part in self.parts)
        joined = torch.empty(length, *every[0][1].shape[1:], dtype=torch.int16, device="cpu")
        for start, part in every:
            joined[start : start + len(part)] = part[: max(0, length - start)]
        return joined
