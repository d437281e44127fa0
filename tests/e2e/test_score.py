"""Scores of given completions are what decoding with the same parameters records, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import torch

from dsv4lite.errors import InvalidRequestError, UnsupportedError
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.planning.workspace import SCORED_ROWS
from dsv4lite.request import SamplingParams
from tests.e2e.engines import END_THINK, FIRST_LETTER, MODEST, SMALL, THINK, opened, prompts_of, same_logprobs
from tests.loops import both_loops

pytestmark = pytest.mark.usefixtures("forked_ranks")

VOCAB = SMALL["vocab_size"]
PROMPT, OTHER, LONG = prompts_of((37, 5, 300), VOCAB, seed=8)
LETTERS = tuple(range(FIRST_LETTER, VOCAB))
NEUTRAL: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": 4, "logprobs": 3}


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with opened(model, deterministic=True) as llm:
        yield llm


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 9},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "top_p": 0.95},
    {"logit_bias": dict.fromkeys(LETTERS[:20], 3.5)},
    {"allowed_token_ids": LETTERS[3:60:2]},
    {"min_tokens": 10, "stop_token_ids": LETTERS[:30], "top_k": 50},
    {"bad_words_ids": ((LETTERS[0],), *((a, b) for a in LETTERS[:20] for b in LETTERS[:20])), "top_k": 20},
    {"thinking_budget": 4},
)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_score_with_the_parameters_of_decoding_equals_decoding(llm: LLM, mode: str) -> None:
    """Requests of all settings are decoded in one batch and scored in another."""
    params = [SamplingParams(**{**NEUTRAL, **settings}, logprobs_mode=mode) for settings in SETTINGS]  # type: ignore[arg-type]
    think = llm.tokenizer.token_id("<think>") or 0
    prompts = [[*PROMPT, think] if "thinking_budget" in settings else PROMPT for settings in SETTINGS]
    completions = [output.outputs[0] for output in llm.generate_batch(prompts, params)]
    pairs = [(prompt, completion.token_ids) for prompt, completion in zip(prompts, completions, strict=True)]
    for settings, score, completion in zip(SETTINGS, llm.score_batch(pairs, params), completions, strict=True):
        assert score.mode == mode, settings
        same_logprobs(score, completion.logprobs)
    same_logprobs(llm.score(*pairs[6], params[6]), completions[6].logprobs)  # alone, too


def random_settings(chance: Random) -> dict[str, Any]:
    """Draw settings that change the distribution, each in every second request."""
    some = chance.sample(LETTERS, 30)
    ranges: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.2, 0.9, 1.7, 30.0]),
        "top_k": chance.choice([1, 2, 17, VOCAB - 1, VOCAB, 3 * VOCAB]),
        "top_p": chance.choice([1e-6, 0.3, 0.9, 0.999]),
        "min_p": chance.choice([1e-4, 0.03, 0.5, 1.0]),
        "repetition_penalty": chance.uniform(0.5, 2.0),
        "frequency_penalty": chance.uniform(-2, 2),
        "presence_penalty": chance.uniform(-2, 2),
        "logit_bias": {token: chance.uniform(-5, 5) for token in some[:9]},
        "allowed_token_ids": tuple(some),
        "bad_words_ids": (tuple(some[:1]), *((a, b) for a in some[1:9] for b in some[9:20])),
        "min_tokens": 8,
        "stop_token_ids": tuple(some[20:]),
        "logprobs": chance.choice([0, 1, 5]),
        "ignore_eos": True,
    }
    return {name: value for name, value in ranges.items() if chance.random() < 0.5}


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_rollouts_with_any_parameters_are_what_was_recorded(llm: LLM, seed: int) -> None:
    """64 rollouts of random parameters, decoded together and scored together, in another order and at other prompts' sides."""
    chance = Random(seed)
    prompts = [chance.choices(LETTERS, k=chance.choice([1, 3, 20, 70])) for _ in range(64)]
    params = [SamplingParams.for_rollout(seed=i, max_tokens=20, **random_settings(chance)) for i in range(64)]
    rollouts = llm.generate_batch(prompts, params)
    order = chance.sample(range(64), 64)
    scores = llm.score_batch([(prompts[i], rollouts[i].token_ids) for i in order], [params[i] for i in order])
    for i, score in zip(order, scores, strict=True):
        same_logprobs(score, rollouts[i].outputs[0].logprobs)
        assert score.sampled.isfinite().all()


def test_rollout_scores_do_not_depend_on_other_requests(llm: LLM) -> None:
    """Completions longer than the rows scored at a time, several of a prompt, beside others."""
    params = SamplingParams.for_rollout(
        n=3, seed=5, max_tokens=2 * SCORED_ROWS + 7, ignore_eos=True, temperature=0.7, top_p=0.9, repetition_penalty=1.1
    )
    outs = llm.generate_batch([PROMPT, LONG], params)
    pairs = [(prompt, one.token_ids) for prompt, out in zip((PROMPT, LONG), outs, strict=True) for one in out.outputs]
    scores = llm.score_batch(pairs, params)
    assert [len(score) for score in scores] == [2 * SCORED_ROWS + 7] * 6
    for score, one in zip(scores, (c for out in outs for c in out.outputs), strict=True):
        same_logprobs(score, one.logprobs)


def test_chunks_and_overlap_do_not_change_processed_scores(model: Path, llm: LLM) -> None:
    params = SamplingParams(
        **{**NEUTRAL, "max_tokens": 90}, logprobs_mode="processed", top_k=12, repetition_penalty=1.2, frequency_penalty=0.2
    )
    completion = llm.generate(PROMPT, params).outputs[0]
    for overlap in (False, True):
        with opened(model, deterministic=True, max_num_batched_tokens=16, overlap=overlap) as other:
            same_logprobs(other.score(PROMPT, completion.token_ids, params), completion.logprobs)


def test_ranks_score_together(model: Path) -> None:
    """Parameters travel to other processes; a rank that does not sample takes part in the logits."""
    params = SamplingParams(**NEUTRAL, logprobs_mode="processed", top_p=0.9, logit_bias={LETTERS[3]: 2.0}, repetition_penalty=1.2)
    with LLM(str(model), **{**MODEST, "deterministic": True, "tensor_parallel_size": 2}) as llm:
        completion = llm.generate(PROMPT, params).outputs[0]
        same_logprobs(llm.score(PROMPT, completion.token_ids, params), completion.logprobs)


def test_token_that_could_not_be_sampled_has_no_probability(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=LETTERS[:5], logprobs_mode="processed")
    scores = llm.score(PROMPT, [LETTERS[0], LETTERS[9], LETTERS[1]], params).sampled
    assert scores[1] == -torch.inf and scores[[0, 2]].isfinite().all()


def test_rules_go_on_after_a_token_that_breaks_one(llm: LLM) -> None:
    """The next tokens were scored without the rule, as many as are scored at a time. A spent budget forces the end."""
    params = SamplingParams(thinking_budget=2, logprobs_mode="processed")
    scores = llm.score([*PROMPT, THINK], [*LETTERS[:20], END_THINK, LETTERS[0], THINK], params)
    assert scores.sampled[:2].isfinite().all()
    assert scores.sampled[2:].isneginf().tolist() == [*[True] * 18, False, False, True]
    assert scores.sampled[20] == 0.0  # the only token that was allowed


def test_score_without_parameters_is_raw(llm: LLM) -> None:
    plain = llm.score(PROMPT, OTHER)
    assert plain.mode == "raw" and plain.token_ids.shape == (len(OTHER), 0)
    hot = SamplingParams(temperature=2.0, top_k=1, structured_outputs={"regex": "a"})
    same_logprobs(plain, llm.score(PROMPT, OTHER, hot))  # raw values do not depend on how tokens are sampled
    assert llm.score(PROMPT, OTHER, SamplingParams(logprobs=2), top_logprobs=4).token_ids.shape == (len(OTHER), 4)
    assert llm.score(PROMPT, OTHER, SamplingParams(logprobs=4), top_logprobs=2).token_ids.shape == (len(OTHER), 4)


def test_unsupported_scores_are_refused(llm: LLM) -> None:
    grammar = SamplingParams(structured_outputs={"regex": "a"}, logprobs_mode="processed")
    with pytest.raises(UnsupportedError, match=r"structured_outputs.*raw"):
        llm.score(PROMPT, OTHER, grammar)
    for wrong in (-1, 65, 10**400, "3", True):
        with pytest.raises(InvalidRequestError, match=r"^top_logprobs=") as caught:
            llm.score(PROMPT, OTHER, top_logprobs=wrong)  # type: ignore[arg-type]
        assert caught.value.parameter == "top_logprobs"
    with pytest.raises(InvalidRequestError, match=r"params=.* must be SamplingParams"):
        llm.score(PROMPT, OTHER, {"temperature": 1})  # type: ignore[arg-type]


def test_batch_takes_parameters_for_each_pair(llm: LLM) -> None:
    pairs = [(PROMPT, OTHER), (OTHER, PROMPT), (LONG, OTHER)]
    each = [SamplingParams(temperature=t, logprobs_mode="processed") for t in (0.5, 1.0, 2.0)]
    scores = llm.score_batch((pair for pair in pairs), each)
    for score, pair, params in zip(scores, pairs, each, strict=True):
        same_logprobs(score, llm.score(*pair, params))
    assert llm.score_batch([]) == []
    with pytest.raises(InvalidRequestError, match="2 entries for 3"):
        llm.score_batch(pairs, each[:2])
    for replays in ([None] * 2, [None] * 4):
        with pytest.raises(InvalidRequestError, match="entries for 3 pairs"):
            llm.score_batch(pairs, replays=replays)
    for wrong in ([(PROMPT,)], ["ab"], [PROMPT], [5]):
        with pytest.raises(InvalidRequestError, match=r"row 0 must be|must be a str"):
            llm.score_batch(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.score_batch([(PROMPT, OTHER), (PROMPT, [])])


@both_loops
async def test_batch_scores_in_both_loops(model: Path, llm: LLM) -> None:
    pairs = [(PROMPT, OTHER), (OTHER, PROMPT)]
    params = SamplingParams(top_p=0.9, logprobs_mode="processed")
    expected = llm.score_batch(pairs, params, top_logprobs=2)

    async def slowly() -> Any:
        for pair in pairs:
            await anyio.sleep(0)
            yield pair

    async with AsyncLLM(str(model), **{**MODEST, "deterministic": True}) as mine:
        for given in (pairs, slowly()):
            found = await mine.score_batch(given, params, top_logprobs=2)
            for ours, theirs in zip(found, expected, strict=True):
                same_logprobs(ours, theirs)
        same_logprobs(await mine.score(PROMPT, OTHER, params, top_logprobs=2), expected[0])
