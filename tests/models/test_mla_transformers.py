"""MLA models against transformers' independent implementations: logits of random models in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.models.deepseek_mla.model import DeepseekMla
from tests.golden import plain
from tests.mla import VARIANTS, our_model, trainer_model

SELECTING = ("v32", "glm5")


@dataclass(frozen=True)
class Pair:
    """The same weights in both implementations."""

    theirs: Any
    ours: DeepseekMla

    def ids(self, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(count)
        return torch.randint(self.ours.config.vocab_size, (count,), generator=generator).tolist()


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest) -> Pair:
    theirs = trainer_model(request.param)
    return Pair(theirs, our_model(theirs, request.param, plain()))


def their_logits(pair: Pair, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return pair.theirs(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("count", [1, 2, 6, 7, 40, 130, 300])
def test_logits_of_one_pass_agree(pair: Pair, count: int) -> None:
    """A selection among 300 tokens has boundaries within the rounding of scores: there most tokens agree, and those before it."""
    ids = pair.ids(count)
    with torch.no_grad():
        ours = pair.ours.logits(pair.ours.one_pass(ids))
    theirs = their_logits(pair, ids)
    assert theirs.abs().max() > 1  # a model that says nothing would agree as well
    apart_T = (ours - theirs).abs().amax(1) >= 1e-4
    assert not apart_T.any() or (pair.ours.config.selects and count == 300 and apart_T.sum() <= 15 and not apart_T[:100].any())
