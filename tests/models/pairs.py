"""The same weights in transformers' implementation and in ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dsv4lite.models.deepseek_mla.model import DeepseekMla
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.weights.names import NameTables
from dsv4lite.weights.quant import Slot, TensorSlot
from tests.golden import official_names
from tests.models.paged import run_in_cuts


def gradient(slot: Slot) -> Tensor:
    """Return the gradient of one tensor of the checkpoint."""
    whole = slot.tensor if isinstance(slot, TensorSlot) else slot.matrix.weight
    grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
    return grad if isinstance(slot, TensorSlot) else grad.flatten(0, -2)[slot.begin : slot.end]


@dataclass(frozen=True)
class Pair:
    """Both models, and the names of their tensors."""

    variant: str
    theirs: Any
    ours: DeepseekV4 | DeepseekMla
    names: NameTables

    def ids(self, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(count)
        return torch.randint(self.ours.config.vocab_size, (count,), generator=generator).tolist()

    def distances(self, count: int, cuts: Sequence[int] | None = None) -> Tensor:
        """Return how far apart the logits of each token are, ours computed in one pass or in chunks."""
        ids = self.ids(count)
        with torch.no_grad():
            ours = self.ours.logits(self.ours.one_pass(ids) if cuts is None else run_in_cuts(self.ours, ids, cuts))
            theirs = self.theirs(torch.tensor([ids]), use_cache=False).logits[0]
        assert theirs.abs().max() > 1  # a model that says nothing would agree as well
        return (ours - theirs).abs().amax(1)

    def check_gradients(self) -> None:
        """The gradients of all weights agree."""
        ids = torch.tensor(self.ids(41))
        loss = cross_entropy(self.theirs(ids[None], use_cache=False).logits[0, :-1], ids[1:])
        loss.backward()
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.theirs.named_parameters()}
        wanted, slots = official_names(found, self.names), self.ours.slots()
        mine = cross_entropy(self.ours.logits(self.ours.one_pass(ids.tolist()))[:-1], ids[1:])
        assert (mine - loss).abs() < 1e-5
        mine.backward()
        assert slots.keys() - wanted.keys() == {name for name in slots if name.endswith(("gate.bias", "tid2eid"))}
        for name, expected in wanted.items():
            got = gradient(slots[name])
            assert got.shape == expected.shape and (got - expected).norm() <= 1e-3 * expected.norm() + 1e-9, name
            # Selection has no gradient, so the indexer learns nothing; nor does an expert that no token chose.
            assert not expected.any() if ".indexer." in name else expected.norm() > 0 or ".experts." in name, name
