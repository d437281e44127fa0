"""Configs of MLA models: what is read of the releases, of transformers' files, and what is refused."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4lite.errors import ConfigError, UnsupportedError
from dsv4lite.models.deepseek_mla.config import MODEL_TYPES, MlaConfig, Yarn, parse_config
from dsv4lite.models.family import find_family
from tests.mla import KIMI_K2, V2, V2_LITE, V3, V31, V32, VARIANTS, their_config, trainer_model
from tests.tiny import changed


def test_releases_are_read() -> None:
    lite, v2, v3, v32, kimi = (parse_config(raw) for raw in (V2_LITE, V2, V3, V32, KIMI_K2))
    assert (lite.q_lora_rank, lite.num_attention_heads, lite.num_shared_experts, lite.routed) == (0, 16, 2, (False,) + (True,) * 26)
    assert (lite.scoring, lite.biased, lite.renormalize, lite.expert_groups) == ("softmax", False, False, 1)
    assert (v2.scoring, v2.biased, v2.renormalize, v2.expert_groups, v2.top_groups) == ("softmax", False, False, 8, 3)
    assert (v2.route_scale, v2.routed.index(True), v2.quantized, v2.drafter) == (16.0, 1, False, None)
    assert (v3.scoring, v3.biased, v3.renormalize, v3.expert_groups, v3.top_groups) == ("sigmoid", True, True, 8, 4)
    assert (v3.routed.index(True), v3.row_width, v3.num_mtp_layers, v3.drafter, v3.selects) == (3, 576, 1, "mtp", False)
    assert (v3.quantized, v3.expert_format, v3.byte_scales) == (True, "fp8", False)
    assert (v32.selects, v32.index_heads, v32.index_dim, v32.index_topk, v32.index_interleaved) == (True, 64, 128, 2048, False)
    assert (kimi.expert_groups, kimi.num_experts, kimi.num_attention_heads, kimi.routed.index(True)) == (1, 384, 64, 1)
    assert (kimi.drafter, kimi.rope_theta, kimi.swiglu_limit) == (None, 50000.0, math.inf)
    assert parse_config(V31) == v3


def test_fp8_settings_that_transformers_writes_are_read() -> None:
    import transformers

    settings = json.loads(json.dumps(transformers.FineGrainedFP8Config().to_dict()))
    assert parse_config({**V3, "quantization_config": settings}) == parse_config(V3)


def test_softmax_scales_are_those_of_the_specification() -> None:
    assert parse_config(V2_LITE).attention_scale == pytest.approx(0.114721, abs=1e-6)
    assert parse_config(V3).attention_scale == pytest.approx(0.135234, abs=1e-6)
    assert parse_config(changed(V3, rope_scaling=None)).attention_scale == pytest.approx(0.0721688, abs=1e-7)
    assert parse_config(V3).rotary_scale == parse_config(V2_LITE).rotary_scale == 1.0


def test_magnitude_without_its_keys_is_in_the_angles() -> None:
    """Transformers does the same; the softmax scale has none then."""
    bare = {key: value for key, value in V3["rope_scaling"].items() if not key.startswith("mscale")}
    config = parse_config(changed(V3, rope_scaling=bare))
    assert config.yarn == Yarn(factor=40.0, original_positions=4096)
    assert config.rotary_scale == pytest.approx(0.1 * math.log(40) + 1) and config.attention_scale == 192**-0.5


@pytest.mark.parametrize(
    "magnitudes", [{"mscale": 1, "mscale_all_dim": 0}, {"mscale": 0, "mscale_all_dim": 0}, {"mscale": 2, "mscale_all_dim": 3}]
)
def test_magnitudes_are_those_of_transformers(magnitudes: dict[str, float]) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = changed(V3, rope_scaling={**V3["rope_scaling"], **magnitudes}, quantization_config=None)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](transformers.DeepseekV3Config(**raw), device="cpu")
    assert parse_config(raw).rotary_scale == factor


def test_rope_parameters_of_newer_writers_say_the_same() -> None:
    nested = {"rope_theta": 10000.0, "rope_type": "yarn", **{k: v for k, v in V3["rope_scaling"].items() if k != "type"}}
    for key in ("rope_parameters", "rope_scaling"):
        assert parse_config(changed(V3, **{"rope_scaling": None, "rope_theta": None, key: {**nested, "rope_theta": 500.0}})) == (
            parse_config({**V3, "rope_theta": 500.0})
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_writes_is_read(variant: str) -> None:
    raw = their_config(trainer_model(variant), variant)
    config = parse_config(raw)
    assert config.routed == (False, True, True) and config.selects == (variant in ("v32", "glm5"))
    assert config.index_interleaved == (variant == "glm5") and config.max_positions == 2048
    assert find_family(raw).name == raw["model_type"] and raw["model_type"] in MODEL_TYPES


def test_layers_without_experts_are_those_that_either_key_names() -> None:
    assert parse_config(changed(V2_LITE, num_hidden_layers=6, first_k_dense_replace=2, moe_layer_freq=2)).routed == (
        *(False, False, True, False, True, False),
    )
    kinds = ["sparse", "dense", "sparse"]
    assert parse_config(changed(V32, num_hidden_layers=3, mlp_layer_types=kinds)).routed == (True, False, True)


@pytest.mark.parametrize(
    ("key", "meant"), [("kv_lora_ranks", "kv_lora_rank"), ("topk_groups", "topk_group"), ("indx_topk", "index_topk")]
)
def test_misspelled_key_names_the_one_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{key!r}.*did you mean {meant!r}"):
        parse_config({**V32, key: 1})


@pytest.mark.parametrize("key", ["head_dim", "qk_head_dim", "pad_token_id", "transformers_version", "auto_map", "aux_loss_alpha"])
def test_foreign_key_is_passed_over(key: str) -> None:
    assert parse_config({**V3, key: 7}) == parse_config(V3)


def test_selection_of_every_layer_is_its_own() -> None:
    for whole in ({"index_topk_freq": 1}, {"index_topk_pattern": "F" * 61}, {"index_topk_pattern": "F" * 61, "index_topk_freq": 4}):
        assert parse_config({**V32, **whole}) == parse_config(V32)


def test_missing_keys_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"lacks kv_lora_rank, v_head_dim$"):
        parse_config(changed(V2_LITE, kv_lora_rank=None, v_head_dim=None))
    with pytest.raises(ConfigError, match=r"lacks q_lora_rank, index_topk$"):
        parse_config(changed(V32, q_lora_rank=None, index_topk=None))


@pytest.mark.parametrize(
    ("raw", "settings", "message"),
    [
        (V3, {"model_type": "deepseek_v5"}, "model_type='deepseek_v5'.*deepseek_v2, deepseek_v3"),
        (V3, {"architectures": ["DeepseekV2ForCausalLM"]}, "'deepseek_v3' is supported as DeepseekV3ForCausalLM"),
        (V3, {"scoring_func": "softmax"}, "scoring_func='softmax' with topk_method='noaux_tc'"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'.*group_limited_greedy"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob=True with softmax"),
        (V3, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (V3, {"rope_interleave": False}, "rope_interleave=False"),
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads=8.*num_attention_heads=128"),
        (V3, {"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'.*'yarn'"),
        (V3, {"rope_scaling": {**V3["rope_scaling"], "truncate": False}}, "truncate=False"),
        (V3, {"rope_scaling": {**V3["rope_scaling"], "attention_factor": 1.2}}, "attention_factor=1.2"),
        (V3, {"rope_scaling": {**V3["rope_scaling"], "mscale": 0}}, "mscale=0 and mscale_all_dim=1.0 is not supported"),
        (V3, {"rope_scaling": {**V3["rope_scaling"], "mscale": 0.5, "mscale_all_dim": 0}}, "mscale=0.5 and mscale_all_dim=0"),
        (V3, {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method='awq'"),
        (V3, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"weight_block_size=\[64, 64\]"),
        (V3, {"quantization_config": {"quant_method": "fp8", "scale_fmt": "int8"}}, "scale_fmt='int8'"),
        (V32, {"index_head_dim": 96}, "index_head_dim=96 must be a power of two"),
        (V32, {"index_head_dim": 32}, "index_head_dim=32.*qk_rope_head_dim=64"),
        (V32, {"indexer_types": ["full", "shared"]}, "indexer_types has 'shared'"),
        (V32, {"indexer_types": ["full", "shared"], "index_topk_freq": 4}, "indexer_types has 'shared'"),  # GLM-5.2
        (V32, {"index_topk_freq": 4}, "index_topk_freq=4: layers that reuse"),
        (V32, {"index_topk_pattern": "FSSF"}, "index_topk_pattern has 'S': layers that reuse"),
        (V32, {"index_topk_pattern": ["full", "shared"]}, "index_topk_pattern has 'shared': layers that reuse"),
    ],
)
def test_what_these_models_are_not_is_unsupported(raw: Mapping[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_config(changed(raw, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size='64' must be an integer"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"n_routed_experts": 250}, "n_group=8 must divide n_routed_experts=250"),
        ({"topk_group": 9}, "topk_group=9"),
        ({"num_experts_per_tok": 300, "n_routed_experts": 256}, "num_experts_per_tok=300"),
        ({"n_group": 64, "topk_group": 1}, "groups of 4 experts are too small for num_experts_per_tok=8"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 must be even"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types.*61 entries"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "original_max_position_embeddings"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob='yes'"),
    ],
)
def test_wrong_value_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(changed(V3, **settings))


words = st.text("ab64", max_size=5)
inner_keys = st.sampled_from(["type", "factor", "rope_type", "quant_method", "scale_fmt", "mscale", "rope_theta"])
junk = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 300), st.floats(), words, st.lists(st.integers(-1, 200) | words, max_size=7)),
    st.dictionaries(inner_keys, st.integers() | words),
)
keys = st.sampled_from([*V32, "rope_parameters", "mlp_layer_types", "indexer_types", "indexer_rope_interleave", "scale_fmt"])


@given(st.dictionaries(keys, junk, max_size=4))
def test_any_value_parses_or_is_a_config_error(settings: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_config({**V32, **settings}), MlaConfig)
