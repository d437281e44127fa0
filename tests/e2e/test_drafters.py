"""Engines that draft from n-grams of the text, or with the block drafter of refreshed releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.config import MTP, DSpark, EngineConfig, NGram, tiny_model
from dsv4lite.errors import CheckpointError, ConfigError, UnsupportedError
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.planning.memory import plan_memory
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.speculation.ngram import NGramIndex, NGramSpeculator
from dsv4lite.weights.dummy import dummy_tensors
from dsv4lite.weights.source import ModelSource
from tests.e2e.engines import REFRESHED, SMALL, engine_of, float32, opened, prompts_of, same_outputs, write_model, write_tokenizer
from tests.e2e.test_engine_determinism import ask_all, asks
from tests.golden import plain
from tests.models.test_dspark import drafts_after
from tests.tiny import write_checkpoint

VOCAB = SMALL["vocab_size"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("refreshed"), REFRESHED, seed=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> Sequence[RequestOutput]:
    with opened(model, deterministic=True) as llm:
        return ask_all(llm, asks())


@pytest.mark.parametrize("speculative", ["auto", (NGram(k=2), DSpark(3, min_confidence=0.4))], ids=str)
def test_drafters_change_no_bit_in_deterministic_mode(model: Path, expected: Sequence[RequestOutput], speculative: Any) -> None:
    with opened(model, deterministic=True, speculative=speculative) as llm:
        same_outputs(ask_all(llm, asks()), expected)
        stats = llm.stats().speculation
        assert stats.drafted > 0
        if speculative == "auto":
            assert len(stats.drafted_by_position) == REFRESHED["dspark_block_size"]


@pytest.mark.parametrize("speculative", [DSpark(4), NGram(k=3, min_n=1)], ids=str)
def test_greedy_text_is_that_of_no_drafts(model: Path, speculative: Any) -> None:
    """In the default mode, in float32, while requests start and end."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    prompts = prompts_of((1, 17, 64, 250), VOCAB, seed=7)
    texts = []
    for setting in (None, speculative):
        with opened(model, speculative=setting, max_num_seqs=3) as llm:
            texts.append([output.token_ids for output in llm.generate_batch(prompts, params)])
    assert texts[0] == texts[1]


def test_engine_drafts_what_the_model_drafts_after_the_same_text(model: Path, drafted: list[list[int]]) -> None:
    """Rows of rejected drafts, of several chunks and of pages that slid away leave no trace: a single pass drafts the same."""
    (prompt,) = prompts_of((50,), VOCAB, seed=3)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with opened(model, speculative=DSpark(4, adaptive=False), max_num_batched_tokens=20) as llm:
        tokens = [*prompt, *llm.generate(prompt, params).token_ids]
        whole = engine_of(llm)._runner.model
        stats = llm.stats().speculation
    assert stats.runs > 5
    known = len(prompt) + 1
    for i, drafts in enumerate(drafted):
        if i % 5 == 0 and known < len(tokens):
            _, wanted = drafts_after(whole, tokens[: known - 1], anchor=tokens[known - 1])
            assert drafts == wanted.token_ids_SG[0].tolist()
        known += 1 + next((j for j, d in enumerate(drafts) if tokens[known + j : known + j + 1] != [d]), len(drafts))


def test_cached_prefix_includes_the_rows_of_the_drafter(model: Path, drafted: list[list[int]]) -> None:
    (prompt,) = prompts_of((260,), VOCAB, seed=4)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with opened(model, speculative=DSpark(4, adaptive=False)) as llm:
        first = llm.generate(prompt, params)
        alone, drafted[:] = list(drafted), []
        again = llm.generate(prompt, params)
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 256)
    assert alone == drafted and first.token_ids == again.token_ids


def test_least_confidence_leaves_drafts_out(model: Path) -> None:
    params, (prompt,) = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True), prompts_of((20,), VOCAB)
    drafted = []
    for least in (0.0, 0.7):
        with opened(model, speculative=DSpark(4, min_confidence=least)) as llm:
            llm.generate(prompt, params)
            drafted.append(llm.stats().speculation.drafted)
    assert drafted[0] > drafted[1] > 0


def test_text_that_repeats_itself_takes_fewer_steps(model: Path) -> None:
    params = SamplingParams(max_tokens=41, temperature=0, ignore_eos=True, allowed_token_ids=[20])
    with opened(model, speculative=NGram(4, adaptive=False)) as llm:
        assert llm.generate([8, 9], params).token_ids == (20,) * 41
        stats = llm.stats()
    # Three tokens until two of them have stood together before; then five a step.
    assert stats.steps == 3 + -(-(41 - 3) // 5)
    assert stats.speculation.accepted == stats.speculation.drafted == 41 - stats.steps


def test_trained_model_gives_the_same_with_drafts() -> None:
    prompts = ["The quick brown fox. The quick brown"]
    params = SamplingParams(max_tokens=12, temperature=0)
    texts = []
    for setting in (None, NGram(min_n=1)):
        with opened(tiny_model(), deterministic=True, speculative=setting) as llm:
            texts.append([output.token_ids for output in llm.generate_batch(prompts, params)])
    assert texts[0] == texts[1]


def test_ngram_speculator_keeps_an_index_per_sequence() -> None:
    speculator = NGramSpeculator(NGram(k=3, min_n=1, max_n=3, lookback=100))
    assert speculator.propose(1, [5, 6, 7, 5], 2) == [6, 7]
    assert speculator.propose(2, [5, 9, 5], 2) == [9, 5]
    assert speculator.propose(1, [5, 6, 7, 5, 8, 5], 1) == NGramIndex(NGram(min_n=1)).draft([5, 6, 7, 5, 8, 5], 1)
    speculator.forget(1)
    speculator.forget(1)
    assert speculator.propose(1, [3, 4], 2) == [] and speculator.propose(2, [5, 9, 5, 9], 1) == [5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NGram(0), "NGram: k=0"),
        (lambda: NGram(17), "NGram: k=17 must be an integer from 1 to 16"),
        (lambda: NGram(min_n=0), "min_n=0"),
        (lambda: NGram(min_n=5), "NGram"),
        (lambda: NGram(max_n=4.0), "NGram"),  # type: ignore[arg-type]
        (lambda: NGram(min_n=3, max_n=2), "max_n=2 must be an integer from 3 to 16"),
        (lambda: NGram(lookback=0), "lookback=0"),
        (lambda: DSpark(0), "DSpark: k=0"),
        (lambda: DSpark(min_confidence=1.0), "min_confidence=1.0"),
        (lambda: EngineConfig(model="m", speculative=(MTP(1), DSpark(1))), "at most one of the model's own"),
        (lambda: EngineConfig(model="m", speculative=NGram), "speculative"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_drafter_that_the_checkpoint_lacks_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"MTP\(k=1\).*no MTP block; use DSpark\(\)"):
        plan_memory(str(model), speculative=MTP())
    with pytest.raises(ConfigError, match=r"DSpark\(k=5.*the drafter's block has 4 rows"):
        plan_memory(str(model), speculative=DSpark())
    classic = write_model(tmp_path / "classic")
    with pytest.raises(UnsupportedError, match=r"DSpark\(k=5.*no block drafter; use MTP\(\)"):
        plan_memory(str(classic), speculative=DSpark())
    bare = write_model(tmp_path / "bare", REFRESHED, change=lambda name, t: None if name.startswith("mtp.") else t)
    with pytest.raises(UnsupportedError, match=r"no block drafter; use NGram\(\)"):
        plan_memory(str(bare), speculative=DSpark(4))
    assert plan_memory(str(bare), speculative="auto").fits


@pytest.mark.parametrize(("ours", "theirs"), [(SMALL, REFRESHED), (REFRESHED, SMALL)], ids=["refreshed", "classic"])
def test_drafter_that_the_config_does_not_describe_is_refused(
    tmp_path: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    """The preview's config with the weights of a refreshed release, and the reverse: an error only where drafts are wanted."""
    tensors = float32(dummy_tensors(parse_config(theirs), V4_TENSORS, expert_format="unquantized", quantized=False))
    folder = write_tokenizer(write_checkpoint(tmp_path, ours, tensors), VOCAB)
    for speculative in ("auto", MTP(), DSpark(4)):
        with pytest.raises(CheckpointError, match=r"config\.json describes a drafter of kind"):
            plan_memory(str(folder), speculative=speculative)
    with opened(folder) as llm:
        assert len(llm.generate([8, 9], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_plan_counts_the_drafter(model: Path) -> None:
    plans = [plan_memory(str(model), device="cpu", max_num_seqs=8, speculative=setting) for setting in (None, DSpark(4))]
    config = ModelSource.open(EngineConfig(model=str(model))).model
    bytes_of = [
        sum(t.nbytes for t in (*built.parameters(), *built.buffers()))
        for built in (DeepseekV4(config, plain(), with_mtp=drafts) for drafts in (False, True))
    ]
    weights = [plan.per_device[0].weights for plan in plans]
    assert weights == bytes_of
    assert plans[1].bytes_per_sequence > plans[0].bytes_per_sequence
    with opened(model, speculative=DSpark(4)) as llm:
        cache = engine_of(llm)._runner.cache
        assert len(cache.layers) == config.num_hidden_layers + 2 and cache.nbytes == llm.memory().per_device[0].state


@pytest.mark.gpu
def test_block_drafter_on_a_gpu_changes_no_bit() -> None:
    """The shipped model's sizes in the release's formats, with random weights and the drafter of refreshed releases."""
    refreshed = {
        "compress_ratios": [0, 0, 4, 128, 4, 128, 0, 0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": 4000,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": 32,
    }
    settings = {"device": "cuda", "load_format": "dummy", "hf_overrides": refreshed, "kv_cache_memory_bytes": 64 << 20}
    outputs = []
    for speculative in (None, DSpark(5)):
        with opened(tiny_model(), deterministic=True, speculative=speculative, **settings) as llm:
            outputs.append(ask_all(llm, asks(4096)))
            assert (llm.stats().speculation.drafted > 0) == (speculative is not None)
    same_outputs(outputs[1], outputs[0])
