from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4lite.errors import ConfigError, UnsupportedError
from dsv4lite.models.deepseek_v4.config import DSparkConfig, V4Config, Yarn, parse_config
from tests.tiny import FLASH, PRO, RELEASE_ONLY, TINY, TINY_QUANTIZED, TINY_REFRESHED, changed


def test_release_config_gives_the_published_pattern() -> None:
    flash, pro = parse_config(FLASH), parse_config(PRO)
    assert [flash.kind(layer) for layer in (0, 1, 2, 3, 42, 43)] == ["sliding", "sliding", "csa", "hca", "csa", "sliding"]
    for config, expected in ((flash, (2, 21, 20)), (pro, (0, 30, 31))):
        kinds = [config.kind(layer) for layer in range(config.num_hidden_layers)]
        assert tuple(kinds.count(kind) for kind in ("sliding", "csa", "hca")) == expected
        assert [config.hashed(layer) for layer in (0, 2, 3)] == [True, True, False]
        assert (config.num_mtp_layers, config.nope_dim, config.quantized) == (1, 448, True)
        assert config.yarn == Yarn(factor=16.0, original_positions=65536, beta_fast=32.0, beta_slow=1.0)
    assert (pro.route_scale, pro.index_topk, pro.o_groups) == (2.5, 1024, 16)


def test_transformers_config_means_the_same_model() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {key: value for key, value in TINY.items() if key not in RELEASE_ONLY}
    scaling = {**TINY["rope_scaling"], "rope_type": "yarn"}
    saved = transformers.DeepseekV4Config(**theirs, rope_parameters=scaling).to_dict()
    assert "compress_ratios" not in saved and "num_hash_layers" not in saved and "rope_scaling" not in saved
    # A module of transformers has no MTP block.
    without_mtp = changed(TINY, num_nextn_predict_layers=0, compress_ratios=TINY["compress_ratios"][:5])
    assert parse_config(saved) == parse_config(without_mtp)
    assert parse_config(changed(TINY, rope_scaling=None, rope_parameters=scaling)) == parse_config(TINY)


def test_transformers_default_rope_means_no_yarn() -> None:
    nested = {"main": {"rope_type": "default", "rope_theta": 500.0}, "compress": {"rope_type": "default", "rope_theta": 7000.0}}
    config = parse_config(changed(TINY, rope_scaling=None, rope_theta=None, compress_rope_theta=None, rope_parameters=nested))
    assert (config.rope_theta, config.compress_rope_theta, config.yarn.factor) == (500.0, 7000.0, 1.0)


def test_drafter_of_a_refreshed_release_is_no_mtp_block() -> None:
    config = parse_config(TINY_REFRESHED)
    assert config.dspark == DSparkConfig(block=5, noise_token_id=59, targets=(2, 3, 4), markov_rank=8, stages=3)
    assert (config.num_mtp_layers, config.num_draft_layers, config.ratios) == (0, 3, (0, 4, 128, 4, 128, 0, 0, 0))
    assert parse_config(changed(TINY_REFRESHED, compress_ratios=TINY["compress_ratios"][:5])) == config
    fewer = parse_config(changed(TINY_REFRESHED, n_mtp_layers=2, compress_ratios=[*TINY["compress_ratios"], 0]))
    assert (fewer.num_draft_layers, len(fewer.ratios)) == (2, 7)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dspark_markov_rank", None, "lacks dspark_markov_rank"),
        ("dspark_block_size", None, "lacks dspark_block_size"),
        ("dspark_block_size", 0, "dspark_block_size=0"),
        ("dspark_block_size", 65, "dspark_block_size=65: a block has at most 64 rows"),
        ("dspark_noise_token_id", 61, "dspark_noise_token_id=61 must be below vocab_size=61"),
        ("dspark_target_layer_ids", [2, 3, 5], "must be ascending layers of 5"),
        ("dspark_target_layer_ids", [3, 2, 4], "must be ascending layers of 5"),
        ("dspark_target_layer_ids", [], "must be ascending layers of 5"),
        ("dspark_target_layer_ids", 4, "dspark_target_layer_ids=4 must be a list of int"),
        ("compress_ratios", [0, 4, 128, 4, 128, 0, 0], "8 entries|need 8"),
        ("compress_ratios", [0, 4, 128, 4, 128, 0, 0, 4], "drafters are sliding-window only"),
    ],
)
def test_wrong_drafter_of_a_refreshed_release_is_an_error(key: str, value: object, message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        parse_config(changed(TINY_REFRESHED, **{key: value}))


def test_ratios_without_mtp_entry_are_completed() -> None:
    assert parse_config(changed(TINY, compress_ratios=[0, 4, 128, 4, 128])).ratios == (0, 4, 128, 4, 128, 0)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("hiden_size", "hidden_size"),
        ("n_routed_expert", "n_routed_experts"),
        ("compress_ratio", "compress_ratios"),
        ("rope_scalling", "rope_scaling"),
        ("quantisation_config", "quantization_config"),
    ],
)
def test_misspelled_key_names_the_one_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{key!r}.*did you mean {meant!r}"):
        parse_config({**TINY, key: 1})


@pytest.mark.parametrize("key", ["intermediate_size", "qk_nope_head_dim", "pad_token_id", "transformers_version", "auto_map"])
def test_foreign_key_is_passed_over(key: str) -> None:
    assert parse_config({**TINY, key: 7}) == parse_config(TINY)


def test_missing_keys_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"lacks head_dim, q_lora_rank$"):
        parse_config(changed(TINY, head_dim=None, q_lora_rank=None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM.*only DeepseekV4ForCausalLM"),
        ({"model_type": "deepseek_v41"}, "deepseek_v41"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'.*'sqrtsoftplus'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"index_head_dim": 24}, "index_head_dim=24"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method='awq'.*'fp8'"),
        ({"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}}, "moe_quant_algo='NVFP4' is not supported"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}, r"weight_block_size=\[32, 32\]"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'.*'yarn'"),
        ({"rope_scaling": {**TINY["rope_scaling"], "attention_factor": 1.2}}, "attention_factor=1.2"),
        ({"rope_parameters": {"main": TINY["rope_scaling"]}}, "rope_parameters.main has rope_type='yarn'"),
        ({"compress_ratios": [0, 4, 128, 4, 128, 4]}, r"MTP.*\(4,\)"),
        ({"compress_ratios": None, "layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, "'full_attention'"),
        ({"num_hash_layers": None, "mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, "mlp_layer_types"),
    ],
)
def test_what_v4_is_not_is_unsupported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_config(changed(TINY, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size='64' must be an integer"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries.*need 6"),
        ({"compress_ratios": [0, 4, 128, 4, -1, 0]}, "compress_ratios"),
        ({"compress_ratios": None}, "neither compress_ratios nor layer_types"),
        ({"compress_ratios": None, "layer_types": ["sliding_attention"]}, "layer_types has 1 entries"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "original_max_position_embeddings"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"rope_scaling": {**TINY["rope_scaling"], "rope_type": "linear"}}, "type='yarn' and rope_type='linear'"),
        ({"num_attention_heads": 3}, "num_attention_heads=3.*o_groups=2"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7.*n_routed_experts=6"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim=32"),
    ],
)
def test_wrong_value_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(changed(TINY, **settings))


words = st.text("ab64", max_size=5)
inner_keys = st.sampled_from(["type", "factor", "main", "compress", "rope_type", "quant_method"])
junk = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 300), st.floats(), words, st.lists(st.integers(-1, 200), max_size=7)),
    st.dictionaries(inner_keys, st.integers() | words),
)
keys = st.sampled_from(
    [*TINY_QUANTIZED, "layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "num_local_experts"]
)


@given(st.dictionaries(keys, junk, max_size=4))
def test_any_value_parses_or_is_a_config_error(settings: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_config({**TINY_QUANTIZED, **settings}), V4Config)
