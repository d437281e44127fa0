"""The ranks that draft together: all of them run the drafter, and one of them samples.

A model's own drafter belongs to the last pipeline stage and is sharded as the model's layers are. It starts from the tokens that a
step sampled and continues with its draft tokens; the rank that samples knows both and broadcasts them.
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

    def accepted(self, count: int, samples: Samples | None) -> tuple[Tensor, Tensor]:
        """Return the number of accepted draft tokens of each sequence and the token that follows them, int64 [S] twice.

        Args:
            count: Sequences that sampled.
            samples: On the rank that has them.
        """
        known = self._empty(2, count) if samples is None else torch.stack(samples.ends())
        accepted_S, tokens_S = self.broadcast(known)
        return accepted_S, tokens_S

    def chooser(self, slots: Sequence[int]) -> Choose:
        """Return what chooses draft tokens of the sequences in some slots: ``Sampler.draft`` of the rank that samples, for all."""
        sampler, slots_S = self._sampler, send(torch.tensor(slots, dtype=torch.int32, device="cpu"), self._device)

        def choose(logits_SV: Tensor, positions_S: Tensor) -> Tensor:
            return self.broadcast(self._empty(len(slots)) if sampler is None else sampler.draft(logits_SV, slots_S, positions_S))

        return choose

    def broadcast(self, token_ids: Tensor) -> Tensor:
        """Return the tokens of the rank that samples."""
        return self._axis.broadcast(token_ids, 0)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self._device)
