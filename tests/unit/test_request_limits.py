"""What a caller gives is checked and copied before it reaches the engine: every error is typed and can be printed."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4lite.config import EngineConfig
from dsv4lite.errors import ConfigError, InvalidRequestError, shown
from dsv4lite.request import SamplingParams, check_request

HUGE = 10**5000
"""Has more digits than Python prints."""
CYCLE: dict[str, Any] = {}
CYCLE["itself"] = CYCLE
SURROGATE = "a\ud800b"
INT32 = 2**31


COUNTS = ("n", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "thinking_budget")


@pytest.mark.parametrize("value", [10**400, HUGE, -HUGE, 2.5, "3", True, [HUGE]], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", [*COUNTS, "seed"])
def test_integers_outside_their_range_are_invalid(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}=") as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.parameter == name and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        *((name, (1, INT32 - 1), (INT32,)) for name in COUNTS),
        ("seed", (-(2**63), 2**64 - 1), (-(2**63) - 1, 2**64)),
    ],
)
def test_counts_are_int32_and_seeds_have_64_bits(name: str, good: tuple[int, ...], bad: tuple[int, ...]) -> None:
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(InvalidRequestError, match=str(good[-1])):
            SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_numbers_beyond_floats_are_invalid(name: str) -> None:
    """``math.isfinite`` raises OverflowError for such an integer."""
    with pytest.raises(InvalidRequestError, match=f"{name}=<an integer of 1329 bits>"):
        SamplingParams(**{name: 10**400})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"stop_token_ids": [INT32]},
        {"stop_token_ids": [HUGE]},
        {"allowed_token_ids": [5, INT32]},
        {"allowed_token_ids": [-1]},
        {"bad_words_ids": [[1], [2, HUGE]]},
        {"logit_bias": {HUGE: 1.0}},
        {"logit_bias": {5: 10**400}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": [(5, 1.0)]},
        {"stop": [SURROGATE]},
        {"stop": SURROGATE},
        {"stop_token_ids": torch.tensor(1)},  # it was a TypeError
        {"bad_words_ids": torch.tensor([1])},
        {"allowed_token_ids": torch.tensor(1)},
    ],
    ids=shown,
)
def test_tokens_and_texts_that_cannot_be_are_invalid(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**settings)
    assert caught.value.parameter in settings and len(str(caught.value)) < 400


def test_settings_are_copies() -> None:
    """A caller who changes what it gave must not change a request that is on its way."""
    given: dict[str, Any] = {
        "stop": ["x"],
        "stop_token_ids": [3],
        "bad_words_ids": [[4, 5]],
        "logit_bias": {6: 1.0},
        "allowed_token_ids": [6, 7],
    }
    params = SamplingParams(**given)
    before = pickle.loads(pickle.dumps(params))
    for value in given.values():
        value.clear()
    assert (
        params
        == before
        == SamplingParams(stop=("x",), stop_token_ids=(3,), bad_words_ids=((4, 5),), logit_bias={6: 1.0}, allowed_token_ids=(6, 7))
    )
    assert hash(params) == hash(before) and params.replace(n=2).logit_bias == {6: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[6] = 2.0  # type: ignore[index]


LIMITS: Mapping[str, int] = {"vocab_size": 100, "max_model_len": 50, "max_logprobs": 4, "max_completions": 3}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"n": 4}, "max_completions"),
        ({"logprobs": 5}, "must be at most 4"),
        ({"prompt_logprobs": 5}, "max_logprobs"),
        ({"stop_token_ids": (100,)}, "vocabulary"),
        ({"logit_bias": {100: 1.0}}, "vocabulary"),
        ({"allowed_token_ids": (1, 100)}, "vocabulary"),
        ({"bad_words_ids": ((1, 100),)}, "vocabulary"),
    ],
    ids=shown,
)
def test_request_beyond_the_engines_limits_is_invalid(settings: dict[str, Any], rule: str) -> None:
    check_request([1], SamplingParams(n=3, logprobs=4, prompt_logprobs=4), **LIMITS)
    with pytest.raises(InvalidRequestError, match="<an integer of"):
        check_request([1, HUGE], SamplingParams(), **LIMITS)
    with pytest.raises(InvalidRequestError, match=rule) as caught:
        check_request([1], SamplingParams(**settings), **LIMITS)
    assert caught.value.parameter in settings


# ---- other forms of parameters ----


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ([], "body"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": ["json_object"]}}, "response_format"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "a"}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": "many"}, "logprobs"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"stop": [None]}, "stop"),
        ({"n": "2"}, "n"),
        ({"seed": HUGE}, "seed"),
        ({"max_completion_tokens": 1.5}, "max_tokens"),
    ],
    ids=shown,
)
def test_malformed_openai_body_is_invalid(body: Any, parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams.from_openai(body)
    assert caught.value.parameter == parameter


def test_openai_body_is_translated() -> None:
    body = {"logit_bias": {"5": -1}, "logprobs": True, "top_logprobs": 3, "stop": "x", "response_format": {"type": "text"}}
    assert SamplingParams.from_openai(body) == SamplingParams(logit_bias={5: -1}, logprobs=3, stop=("x",))
    assert SamplingParams.from_openai({"logprobs": False, "response_format": None}) == SamplingParams()


def test_generation_config_may_name_one_end_of_sequence() -> None:
    """An integer was ignored."""
    assert SamplingParams.from_generation_config({"eos_token_id": 7}).stop_token_ids == (7,)
    assert SamplingParams.from_generation_config({"eos_token_id": [7, 8]}).stop_token_ids == (7, 8)
    assert SamplingParams.from_generation_config({"eos_token_id": None}).stop_token_ids == ()


@pytest.mark.parametrize("read", [SamplingParams.from_dict, SamplingParams.from_generation_config, SamplingParams.from_openai])
@pytest.mark.parametrize("given", [None, 3, [("n", 2)], "n=2"])
def test_what_is_no_mapping_is_invalid(read: Callable[[Any], SamplingParams], given: object) -> None:
    with pytest.raises(InvalidRequestError, match="must be a mapping"):
        read(given)


def test_unknown_keys_of_any_kind_are_invalid() -> None:
    for key in (5, HUGE, ("n",), None):
        with pytest.raises(InvalidRequestError, match="unknown sampling parameter"):
            SamplingParams.from_dict({key: 1})  # type: ignore[dict-item]


# ---- the engine's settings ----


@pytest.mark.parametrize(
    "name",
    [
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_completions", "max_logprobs",
        "kv_cache_memory_bytes", "prefix_checkpoint_tokens", "rebalance_steps", "tensor_parallel_size", "pipeline_parallel_size",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [2**63, HUGE, -1, 1.5, "8", True, []], ids=lambda value: type(value).__name__)
def test_sizes_of_the_engine_have_limits(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        EngineConfig(model="m", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 2**64},
        {"seed": -HUGE},
        {"redundant_experts": HUGE},
        {"step_timeout_s": HUGE},
        {"step_timeout_s": 1e12},
        {"gpu_memory_utilization": HUGE},
        {"gpu_memory_utilization": float("nan")},
        {"dtype": HUGE},
        {"dtype": []},
        {"device": HUGE},
        {"progress": HUGE},
        {"model": HUGE},
        {"tokenizer": "a\0b"},
        *({name: ""} for name in ("revision", "tokenizer", "compile_cache_dir", "dump_dir", "trace_path", "device")),
        {"max_model_len": 1},
        {"hf_overrides": {"x": int}},
        {"hf_overrides": {"x": threading.Lock()}},
        {"hf_overrides": CYCLE},
        {"trace_path": SURROGATE},
        {"dump_dir": SURROGATE},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_cannot_be_are_config_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))}="):
        EngineConfig(**{"model": "m", **settings})


def test_folder_may_be_any_kind_of_path(tmp_path: Path) -> None:
    """The text of an entry of ``os.scandir`` is not its path."""
    (tmp_path / "model").mkdir()
    (entry,) = os.scandir(tmp_path)
    assert EngineConfig(model=entry).model == str(tmp_path / "model")  # type: ignore[arg-type]


def test_engine_config_keeps_a_copy_of_what_it_was_given() -> None:
    overrides: dict[str, Any] = {"rope_scaling": {"factor": 4}}
    config = EngineConfig(model="m", hf_overrides=overrides)
    overrides["rope_scaling"]["factor"] = 8
    assert config.hf_overrides == {"rope_scaling": {"factor": 4}} and pickle.loads(pickle.dumps(config)) == config
