"""Against transformers' independent implementation: logits and gradients of random models in float32."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.names import V4_NAMES
from tests.golden import fill, official_names, plain, poisoned
from tests.models.pairs import Pair
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


def make_pair(name: str, *, deterministic: bool = False) -> Pair:
    theirs = trainer_model(trainer_settings(**MODELS[name]), seed=list(MODELS).index(name))
    config = parse_config(theirs.config.to_dict())
    state = {name: tensor for name, tensor in theirs.state_dict(keep_vars=True).items() if not name.endswith("inv_freq")}
    return Pair(name, theirs, fill(poisoned(config, plain(deterministic)), official_names(state, V4_NAMES)), V4_NAMES)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return make_pair(request.param)


@pytest.mark.parametrize("count", (*BOUNDARIES, *FAR))
def test_logits_of_one_pass_agree(pair: Pair, count: int) -> None:
    assert pair.distances(count).max() < 1e-4


@pytest.mark.parametrize(("count", "cuts"), [(67, (1, 2, 9, 14, 30, 31)), (300, (128, 129, 257, 290))])
def test_logits_of_chunks_agree(pair: Pair, count: int, cuts: tuple[int, ...]) -> None:
    assert pair.distances(count, cuts).max() < 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_all_weights_agree(deterministic: bool) -> None:
    make_pair("short_groups", deterministic=deterministic).check_gradients()
