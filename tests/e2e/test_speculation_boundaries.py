"""Right and wrong drafts across every boundary of state and of a completion: outputs have the bits of no speculation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4lite.config import MTP
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.request import RequestOutput, SamplingParams
from tests.e2e.engines import SMALL, engine_of, opened, prompts_of, room_for, same_outputs, write_model
from tests.e2e.test_engine_determinism import MODELS, Ask, ask_all
from tests.e2e.test_speculation import Oracle, record, same_tokens

VOCAB = SMALL["vocab_size"]
SOME: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}


def crossing() -> list[Ask]:
    """Return requests whose completions begin before groups of 4 and 128, windows and pages end, and end after it."""
    prompts = prompts_of((1, 3, 57, 60, 118, 122, 247, 250, 254), VOCAB, seed=7)
    return [Ask(f"{len(p)}", p, SamplingParams(**SOME, seed=len(p), temperature=i % 3 / 2)) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module", params=[*MODELS, "window of fewer tokens than a step"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = MODELS.get(request.param, {**SMALL, "sliding_window": 2})
    return write_model(tmp_path_factory.mktemp(request.param), config, seed=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> Sequence[RequestOutput]:
    with opened(model, deterministic=True, max_num_seqs=9) as llm:
        return ask_all(llm, crossing())


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_drafts_cross_boundaries_of_state(model: Path, expected: Sequence[RequestOutput], right: float) -> None:
    with opened(model, deterministic=True, max_num_seqs=9, speculative=Oracle(expected, k=3, right=right)) as llm:
        same_outputs(ask_all(llm, crossing()), expected)
        assert llm.stats().speculation.accepted > 20


@pytest.mark.parametrize("captured", [False, True])
def test_steps_planned_with_unresolved_drafts_cross_boundaries(
    tmp_path: Path, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts among two tokens are often right. The host waits before a prefix boundary and before the end, and only there."""
    logits_of, two = DeepseekV4.mtp_logits, torch.full((VOCAB,), -1e9).index_fill_(0, torch.tensor([9, 10]), 0)
    monkeypatch.setattr(DeepseekV4, "mtp_logits", lambda model, streams: logits_of(model, streams) + two)
    folder = write_model(tmp_path, seed=2)
    some: dict[str, Any] = {"max_tokens": 25, "ignore_eos": True, "allowed_token_ids": (9, 10), "frequency_penalty": 0.1}
    prompts = prompts_of((3, 57, 118, 240, 250), VOCAB, seed=7)
    asked = [Ask(str(len(p)), p, SamplingParams(**some, seed=len(p), temperature=i % 3 / 2)) for i, p in enumerate(prompts)]
    with opened(folder, deterministic=True, overlap=True) as llm:
        expected = ask_all(llm, asked)
    with opened(folder, deterministic=True, overlap=True, speculative=MTP(2, adaptive=False)) as llm:
        graphs = engine_of(llm).call(partial(record, widths=(1, 3))).result() if captured else None
        same_tokens(ask_all(llm, asked), expected)
        stats = llm.stats()
    assert stats.speculation.accepted > 30 and stats.steps < 40
    assert graphs is None or graphs.unresolved > 30


def test_preempted_sequences_keep_drafting(model: Path, expected: Sequence[RequestOutput]) -> None:
    """Resumed sequences find their prefixes in the cache, with the rows of the drafter's window."""
    settings = {"max_num_seqs": 6, "max_model_len": 270, "deterministic": True}
    oracle = Oracle(expected, k=2, right=0.7)
    room = room_for(model, 3, **settings, speculative=(oracle, MTP(2, adaptive=False)))
    with opened(model, **settings, kv_cache_memory_bytes=room, speculative=(oracle, MTP(2, adaptive=False))) as llm:
        for _ in range(2):
            same_outputs(ask_all(llm, crossing()), expected)
        assert llm.stats().preemptions > 0 and llm.stats().speculation.accepted > 10


# ------------------------------------------------------------------------------------------------------ boundaries of a completion


def ends(text: str, tokens: Sequence[int]) -> list[tuple[str, SamplingParams]]:
    """Return settings that end a completion of 24 known tokens among or after accepted drafts."""
    some: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 1}
    found = [(f"max {n}", SamplingParams(**some, max_tokens=n)) for n in (1, 2, 3, 4, 5, 6, 7, 23, 24)]
    found += [(f"id {i}", SamplingParams(**some, max_tokens=24, stop_token_ids=[tokens[i]])) for i in (0, 1, 2, 5, 9)]
    found += [(f"min {i}", SamplingParams(**some, max_tokens=24, stop_token_ids=[tokens[i]], min_tokens=i)) for i in (3, 8)]
    found += [(f"text {i}", SamplingParams(**some, max_tokens=24, stop=[text[i : i + 2]])) for i in (1, 2, 6, 11)]
    return found


def test_completions_end_among_accepted_drafts(tmp_path: Path) -> None:
    folder = write_model(tmp_path, seed=2)
    (prompt,) = prompts_of((30,), VOCAB, seed=9)
    with opened(folder, deterministic=True) as llm:
        whole = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        asked = [Ask(name, prompt, params) for name, params in ends(whole.text, whole.token_ids)]
        expected = ask_all(llm, asked)
        llm.generate(prompt, asked[0].params)  # after which the engine has processed the abort of the last stop string
    assert {output.outputs[0].finish_reason for output in expected} == {"length", "stop"}
    for right in (1.0, 0.7):
        with opened(folder, deterministic=True, speculative=Oracle([whole], k=4, right=right)) as llm:
            same_outputs(ask_all(llm, asked), expected)
            llm.generate(prompt, asked[0].params)


def test_longest_sequences_are_filled_to_the_last_token(tmp_path: Path) -> None:
    folder = write_model(tmp_path, seed=2)
    (prompt,) = prompts_of((50,), VOCAB, seed=9)
    params = SamplingParams(temperature=0, ignore_eos=True)
    with opened(folder, deterministic=True, max_model_len=66) as llm:
        expected = llm.generate(prompt, params)
    with opened(folder, deterministic=True, max_model_len=66, speculative=Oracle([expected], k=4, right=1.0)) as llm:
        output = llm.generate(prompt, params)
    assert output.token_ids == expected.token_ids and len(prompt) + len(output.token_ids) == 66
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_and_deadlines_between_steps_with_drafts_leave_nothing(tmp_path: Path, overlap: bool) -> None:
    """``opened`` asserts that every page, slot and snapshot is back."""
    folder = write_model(tmp_path, seed=2)
    with opened(folder, speculative=MTP(2, adaptive=False), overlap=overlap) as llm:
        for turn, prompt in enumerate(prompts_of((5, 70, 250, 300), VOCAB, seed=1)):
            with llm.stream(prompt, SamplingParams(n=3, ignore_eos=True, seed=turn)) as stream:
                for _, _ in zip(range(4 + turn), stream, strict=False):
                    pass
            late = llm.generate(prompt, SamplingParams(ignore_eos=True, seed=turn), deadline=0.15)
            assert late.outputs[0].finish_reason == "deadline"
        assert llm.stats().speculation.drafted > 10
