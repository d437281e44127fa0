"""Against transformers' independent implementation: logits and gradients of random models in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.names import V4_NAMES
from dsv4lite.weights.names import translate
from tests.golden import fill, plain, poisoned
from tests.models.gradients import gradient
from tests.models.paged import run_in_cuts
from tests.tiny import trainer_model, trainer_settings

BOUNDARIES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 130)
FAR = (255, 256, 257, 300)

# Limits on SwiGLU so low that most experts clamp; few entries to select, so that selection bites early.
MODELS: dict[str, dict[str, Any]] = {
    "short_groups": {"ratios": (0, 4, 8, 4, 8), "swiglu_limit": 0.6},
    "release_ratios": {
        "ratios": (4, 128, 0, 128, 4),
        "sliding_window": 128,
        "index_topk": 9,
        "num_hash_layers": 1,
        "swiglu_limit": 0.6,
    },
    "odd_sizes": {
        "ratios": (4, 16, 4),
        "sliding_window": 5,
        "hidden_size": 40,
        "num_attention_heads": 6,
        "o_groups": 3,
        "head_dim": 24,
        "qk_rope_head_dim": 6,
        "q_lora_rank": 17,
        "o_lora_rank": 7,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 19,
        "num_hash_layers": 0,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 1.0,
        "index_n_heads": 16,
        "index_head_dim": 8,
        "index_topk": 5,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 7,
        "original_positions": 64,
        "vocab_size": 131,
    },
    "wide_window": {"ratios": (128, 4, 4, 0), "sliding_window": 64, "num_hash_layers": 4, "index_topk": 17, "swiglu_limit": 0.6},
}


@dataclass(frozen=True)
class Pair:
    """The same weights in both implementations."""

    theirs: Any
    ours: DeepseekV4

    def ids(self, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(count)
        return torch.randint(self.ours.config.vocab_size, (count,), generator=generator).tolist()


def official(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by transformers' names under the official ones."""
    return {piece.name: tensor[piece.index] for name, tensor in named.items() for piece in translate(name, tensor.shape, V4_NAMES)}


def make_pair(name: str, *, deterministic: bool = False) -> Pair:
    theirs = trainer_model(trainer_settings(**MODELS[name]), seed=list(MODELS).index(name))
    config = parse_config(theirs.config.to_dict())
    state = {name: tensor for name, tensor in theirs.state_dict(keep_vars=True).items() if not name.endswith("inv_freq")}
    return Pair(theirs, fill(poisoned(config, plain(deterministic)), official(state)))


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return make_pair(request.param)


def their_logits(pair: Pair, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return pair.theirs(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("count", (*BOUNDARIES, *FAR))
def test_logits_of_one_pass_agree(pair: Pair, count: int) -> None:
    ids = pair.ids(count)
    with torch.no_grad():
        ours = pair.ours.logits(pair.ours.one_pass(ids))
    theirs = their_logits(pair, ids)
    assert theirs.abs().max() > 1  # a model that says nothing would agree as well
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(("count", "cuts"), [(67, (1, 2, 9, 14, 30, 31)), (300, (128, 129, 257, 290))])
def test_logits_of_chunks_agree(pair: Pair, count: int, cuts: tuple[int, ...]) -> None:
    ids = pair.ids(count)
    with torch.no_grad():
        ours = pair.ours.logits(run_in_cuts(pair.ours, ids, cuts))
    assert (ours - their_logits(pair, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_all_weights_agree(deterministic: bool) -> None:
    pair = make_pair("short_groups", deterministic=deterministic)
    ids = torch.tensor(pair.ids(41))
    loss = torch.nn.functional.cross_entropy(pair.theirs(ids[None], use_cache=False).logits[0, :-1], ids[1:])
    loss.backward()
    named = pair.theirs.named_parameters()
    wanted = official({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named})
    ours = torch.nn.functional.cross_entropy(pair.ours.logits(pair.ours.one_pass(ids.tolist()))[:-1], ids[1:])
    assert (ours - loss).abs() < 1e-5
    ours.backward()
    slots = pair.ours.slots()
    assert slots.keys() - wanted.keys() == {name for name in slots if name.endswith(("gate.bias", "tid2eid"))}
    for name, expected in wanted.items():
        got = gradient(slots[name])
        assert got.shape == expected.shape
        assert (got - expected).norm() <= 1e-3 * expected.norm() + 1e-9, name
        # Selection has no gradient, so the indexer learns nothing; nor does an expert that no token chose.
        assert expected.norm() > 0 or ".indexer." in name or ".experts." in name, name
