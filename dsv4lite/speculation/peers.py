"""The ranks that draft together: all of them run the drafter, and one of them samples and chooses.

A model's own drafter lives on the last pipeline stage, shared as the model's layers are. What it begins with, the tokens that a
step sampled, and what it chains on, the drafts, are known to the rank that samples; the others are told.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4lite.parallel.mesh import Axis
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.sampling.samples import Samples
from dsv4lite.sampling.state import send
from dsv4lite.speculation.draft_state import Choose


class Peers:
    """One rank among those that draft together.

    Args:
        axis: The ranks that work on the same tokens; the first one samples.
        sampler: On that one.
        device: Of this rank.
    """

    def __init__(self, axis: Axis, sampler: Sampler | None, device: torch.device) -> None:
        assert (sampler is not None) == (axis.rank == 0)
        self._axis = axis
        self._sampler = sampler
        self._device = device

    def ends(self, count: int, samples: Samples | None) -> tuple[Tensor, Tensor]:
        """Tell or learn how many drafts of each sequence were right, and the token behind them, int64 [S] twice.

        Args:
            count: Sequences that sampled.
            samples: On the rank that has them.
        """
        ends = self._unknown(2, count) if samples is None else torch.stack(samples.ends())
        behind_S, tokens_S = self.told(ends)
        return behind_S, tokens_S

    def chooser(self, slots: Sequence[int]) -> Choose:
        """Return how drafts of the sequences in some slots are chosen: by ``Sampler.draft`` of the rank that samples."""
        sampler, slots_S = self._sampler, send(torch.tensor(slots, dtype=torch.int32, device="cpu"), self._device)

        def choose(logits_SV: Tensor, positions_S: Tensor) -> Tensor:
            return self.told(self._unknown(len(slots)) if sampler is None else sampler.draft(logits_SV, slots_S, positions_S))

        return choose

    def told(self, token_ids: Tensor) -> Tensor:
        """Return what the rank that samples gives."""
        return self._axis.broadcast(token_ids, 0)

    def _unknown(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self._device)
