"""Every setting of a request through whole engines: small random models, and the shipped checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from dsv4lite.config import MTP, tiny_model
from dsv4lite.errors import CheckpointError, ConfigError, RequestFailedError, UnsupportedError
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.planning.memory import plan_memory
from dsv4lite.request import Logprobs, SamplingParams
from tests.e2e.engines import (
    END_THINK,
    EOS,
    FIRST_LETTER,
    MODEST,
    SMALL,
    THINK,
    assert_idle,
    engine_of,
    opened,
    prompts_of,
    room_for,
    write_tokenizer,
)
from tests.e2e.test_llm_api import until
from tests.loops import both_loops
from tests.mla import BLOCKS, write_random_model

VOCAB = SMALL["vocab_size"]
LENGTH = 24
PROMPT, OTHER = prompts_of((37, 300), VOCAB, seed=3)
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with opened(model, max_logprobs=VOCAB) as llm:
        yield llm


def seeded(**settings: Any) -> SamplingParams:
    """Sample letters, repeatably."""
    return SamplingParams(**{"seed": 11, "max_tokens": LENGTH, "ignore_eos": True, "allowed_token_ids": LETTER_IDS, **settings})


LETTER_IDS = tuple(range(FIRST_LETTER, VOCAB))


def full(part: Logprobs | None) -> Tensor:
    """Return log-probabilities [T, V] in the order of the vocabulary; what is not listed is impossible."""
    assert part is not None
    return torch.full((len(part), VOCAB), -math.inf).scatter_(1, part.token_ids.long(), part.values)


# ---------------------------------------------------------------------------------------------------------- where to stop


def test_stop_string_ends_the_text_wherever_tokens_are_cut(llm: LLM) -> None:
    whole = llm.generate(PROMPT, seeded())
    assert len(whole.text) == len(whole.token_ids) == LENGTH  # one character each
    stop = whole.text[12:15]
    begin = whole.text.index(stop)
    for include in (False, True):
        cut = llm.generate(PROMPT, seeded(stop=("never there", stop), include_stop_str_in_output=include))
        assert cut.text == whole.text[: begin + 3 * include]
        assert cut.token_ids == whole.token_ids[: begin + 3]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_stop_token_ends_the_completion_but_not_before_min_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPT, seeded()).token_ids
    stop = whole[9]
    cut = llm.generate(PROMPT, seeded(stop_token_ids=(stop,)))
    assert cut.token_ids == whole[: whole.index(stop) + 1]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    late = llm.generate(PROMPT, seeded(stop_token_ids=(stop,), min_tokens=12, logit_bias={stop: 100.0}))
    assert stop not in late.token_ids[:12] and len(late.token_ids) == 13 and late.token_ids[-1] == stop


def test_end_of_sequence_ends_unless_it_is_early_or_ignored(llm: LLM) -> None:
    eager = SamplingParams(temperature=0, max_tokens=9, logit_bias={EOS: 1000.0})
    assert llm.generate(PROMPT, eager).token_ids == (EOS,)
    assert llm.generate(PROMPT, eager).outputs[0].finish_reason == "stop"
    assert llm.generate(PROMPT, eager).outputs[0].stop_reason is None
    patient = llm.generate(PROMPT, eager.replace(min_tokens=4))
    assert EOS not in patient.token_ids[:4] and patient.token_ids[4:] == (EOS,)
    deaf = llm.generate(PROMPT, eager.replace(ignore_eos=True))
    assert deaf.token_ids == (EOS,) * 9 and deaf.outputs[0].finish_reason == "length" and deaf.text == ""


def test_completion_without_max_tokens_runs_to_the_limit(model: Path) -> None:
    with opened(model, max_model_len=64) as llm:
        out = llm.generate(PROMPT, seeded(max_tokens=None))
    assert len(out.token_ids) == 64 - len(PROMPT) and out.outputs[0].finish_reason == "length"


# ------------------------------------------------------------------------------------------------------ log-probabilities


def test_prompt_logprobs_are_those_of_score(llm: LLM) -> None:
    out = llm.generate(OTHER, seeded(prompt_logprobs=3, max_tokens=1))
    scored = llm.score(OTHER[:1], OTHER[1:], top_logprobs=3)
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == len(scored) == len(OTHER) - 1
    torch.testing.assert_close(out.prompt_logprobs.sampled, scored.sampled, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.prompt_logprobs.values, scored.values, rtol=0, atol=1e-5)
    assert torch.equal(out.prompt_logprobs.ranks, scored.ranks)
    first = llm.generate(OTHER[:1], seeded(prompt_logprobs=3, max_tokens=1)).prompt_logprobs
    assert first is not None and first.values.shape == (0, 3)


def test_raw_logprobs_are_those_of_score_whatever_distribution_is_sampled(llm: LLM) -> None:
    out = llm.generate(PROMPT, seeded(logprobs=VOCAB, temperature=0.3, top_k=7, presence_penalty=1.0))
    raw = out.outputs[0].logprobs
    scored = llm.score(PROMPT, out.token_ids, top_logprobs=VOCAB)
    assert raw is not None and raw.mode == "raw"
    torch.testing.assert_close(full(raw), full(scored), rtol=0, atol=1e-5)
    torch.testing.assert_close(raw.sampled, scored.sampled, rtol=0, atol=1e-5)
    assert out.outputs[0].cumulative_logprob == pytest.approx(float(raw.sampled.sum()), abs=1e-4)


def test_processed_logprobs_are_what_the_settings_make_of_the_raw_ones(llm: LLM) -> None:
    settings = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.7,
        "logit_bias": {FIRST_LETTER: 3.0, FIRST_LETTER + 1: -3.0},
        "allowed_token_ids": LETTER_IDS[:60],
        "bad_words_ids": ((FIRST_LETTER + 2,),),
        "temperature": 0.8,
        "min_p": 0.02,
        "top_k": 9,
        "top_p": 0.9,
    }
    out = llm.generate(PROMPT, seeded(logprobs=VOCAB, logprobs_mode="processed", **settings))
    logits = full(llm.score(PROMPT, out.token_ids, top_logprobs=VOCAB)).double()
    processed = full(out.outputs[0].logprobs).double()
    for i, row in enumerate(logits):
        counts = torch.bincount(torch.tensor(out.token_ids[:i], dtype=torch.int64), minlength=VOCAB)
        seen = (counts > 0) | (torch.bincount(torch.tensor(PROMPT), minlength=VOCAB) > 0)
        # A penalty divides logits, and log-probabilities are logits but for a constant: the engine's constant is unknown here,
        # so the two are only compared where it does not matter, see below.
        row = row - 0.4 * counts - 0.7 * (counts > 0)
        row[FIRST_LETTER] += 3.0
        row[FIRST_LETTER + 1] -= 3.0
        possible = processed[i] > -math.inf
        assert 1 <= int(possible.sum()) <= 9
        assert not possible[LETTER_IDS[60:],].any() and not possible[:FIRST_LETTER].any() and not possible[FIRST_LETTER + 2]
        assert processed[i].exp().sum() == pytest.approx(1.0, abs=1e-5)
        unpenalised = possible & ~seen
        if int(unpenalised.sum()) > 1:
            torch.testing.assert_close(
                torch.log_softmax(processed[i][unpenalised], 0), torch.log_softmax(row[unpenalised] / 0.8, 0), rtol=0, atol=1e-4
            )


def test_additive_settings_change_logprobs_by_what_they_say(llm: LLM) -> None:
    bias = {FIRST_LETTER: 2.0, FIRST_LETTER + 5: -1.5}
    settings = {"frequency_penalty": 1.1, "presence_penalty": -0.7, "logit_bias": bias, "temperature": 1.7}
    out = llm.generate(PROMPT, seeded(logprobs=VOCAB, logprobs_mode="processed", allowed_token_ids=None, **settings))
    expected = full(llm.score(PROMPT, out.token_ids, top_logprobs=VOCAB)).double()
    for i in range(len(expected)):
        counts = torch.bincount(torch.tensor(out.token_ids[:i], dtype=torch.int64), minlength=VOCAB)
        expected[i] += 0.7 * (counts > 0) - 1.1 * counts
        for token, value in bias.items():
            expected[i, token] += value
    processed = full(out.outputs[0].logprobs).double()
    torch.testing.assert_close(processed, torch.log_softmax(expected / 1.7, -1), rtol=0, atol=1e-4)
    assert any(out.token_ids.count(t) > 1 for t in out.token_ids)  # else frequency did not differ from presence


def test_greedy_takes_the_best_token_and_ranks_say_so(llm: LLM) -> None:
    out = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1))
    logprobs = out.outputs[0].logprobs
    assert logprobs is not None and logprobs.ranks.tolist() == [1] * 12
    assert logprobs.token_ids[:, 0].tolist() == list(out.token_ids)
    assert torch.equal(logprobs.values[:, 0], logprobs.sampled)
    assert llm.score(PROMPT, out.token_ids).ranks.tolist() == [1] * 12


# ---------------------------------------------------------------------------------------------------------- allowed tokens


def test_only_allowed_tokens_and_no_bad_words_are_generated(llm: LLM) -> None:
    a, b, c = LETTER_IDS[:3]
    allowed = llm.generate(PROMPT, seeded(allowed_token_ids=(a, b, c), max_tokens=60)).token_ids
    pairs = set(pairwise(allowed))
    assert set(allowed) == {a, b, c} and {(a, b), (b, a)} <= pairs
    polite = llm.generate(
        PROMPT, seeded(allowed_token_ids=(a, b, c), bad_words_ids=((c,), (a, b), (b, b, a)), max_tokens=60)
    ).token_ids
    found = set(pairwise(polite))
    assert set(polite) <= {a, b} and (a, b) not in found
    assert (b, b, a) not in zip(polite, polite[1:], polite[2:], strict=False)


def test_bad_word_may_begin_in_the_prompt(llm: LLM) -> None:
    a, b = LETTER_IDS[:2]
    out = llm.generate([*PROMPT, a], seeded(allowed_token_ids=(a, b), bad_words_ids=((a, b),), logit_bias={b: 50.0}))
    assert set(out.token_ids) == {a}


def test_settings_that_forbid_every_token_fail_their_request_alone(llm: LLM) -> None:
    a = LETTER_IDS[0]
    with pytest.raises(RequestFailedError, match="no token may follow") as failure:
        llm.generate(PROMPT, seeded(allowed_token_ids=(a,), bad_words_ids=((a, a, a),)))
    assert failure.value.output is not None and failure.value.output.token_ids == (a, a)
    assert len(llm.generate(PROMPT, seeded()).token_ids) == LENGTH


def test_temperature_and_truncation_narrow_the_choice(llm: LLM) -> None:
    greedy = llm.generate(PROMPT, seeded(temperature=0)).token_ids
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-7}):
        assert llm.generate(PROMPT, seeded(**narrow)).token_ids == greedy, narrow
    assert llm.generate(PROMPT, seeded()).token_ids != greedy


def test_completions_of_one_prompt_differ_and_repeat(llm: LLM) -> None:
    first, again = (llm.generate(OTHER, seeded(n=3)) for _ in range(2))
    texts = [c.token_ids for c in first.outputs]
    assert [c.index for c in first.outputs] == [0, 1, 2] and len(set(texts)) == 3
    assert texts == [c.token_ids for c in again.outputs]
    assert first.usage.completion_tokens == 3 * LENGTH


STRUCTURES: tuple[tuple[dict[str, Any], Callable[[str], bool]], ...] = (
    ({"regex": "[a-f]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-" and text[4:].isdigit()),
    ({"choice": ["yes", "no", "perhaps"]}, lambda text: text in ("yes", "no", "perhaps")),
    ({"grammar": 'start: "a" ("b" | "cd") "e"'}, lambda text: text in ("abe", "acde")),
    (
        {
            "json": {
                "type": "object",
                "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["kind", "age"],
                "additionalProperties": False,
            }
        },
        lambda text: set(json.loads(text)) == {"kind", "age"} and json.loads(text)["kind"] in ("cat", "dog"),
    ),
)


@OVERLAP
def test_structured_outputs_have_their_structure(model: Path, overlap: bool) -> None:
    pytest.importorskip("llguidance")
    with opened(model, overlap=overlap) as llm:
        for wanted, check in STRUCTURES:
            out = llm.generate(PROMPT, SamplingParams(seed=5, n=3, max_tokens=200, structured_outputs=wanted))
            for completion in out.outputs:
                assert completion.finish_reason == "stop" and check(completion.text), completion.text


@OVERLAP
def test_thinking_ends_with_its_budget(model: Path, overlap: bool) -> None:
    with opened(model, overlap=overlap) as llm:
        params = seeded(allowed_token_ids=(*LETTER_IDS, THINK, END_THINK), logit_bias={END_THINK: -50.0, THINK: -50.0})
        free = llm.generate([*PROMPT, THINK], params).token_ids
        assert END_THINK not in free
        limited = llm.generate([*PROMPT, THINK], params.replace(thinking_budget=6)).token_ids
        assert limited[:6] == free[:6] and limited[6] == END_THINK and THINK not in limited and len(limited) == LENGTH
        assert llm.generate([*PROMPT, THINK], params.replace(thinking_budget=0)).token_ids[0] == END_THINK


# ---------------------------------------------------------------------------------------------------------- routed experts


def experts_of(output: Any, index: int = 0) -> Tensor:
    experts = output.outputs[index].routed_experts
    assert experts is not None and experts.dtype == torch.int16
    return experts


@OVERLAP
def test_routed_experts_are_complete_in_chunks_forks_and_after_preemption(model: Path, overlap: bool) -> None:
    layers, per_token = SMALL["num_hidden_layers"], SMALL["num_experts_per_tok"]
    params = seeded(return_routed_experts=True, n=3)
    settings = {"deterministic": True, "overlap": overlap, "max_num_batched_tokens": 190}
    with opened(model, **settings) as llm:
        out = llm.generate(OTHER, params)
        again = llm.generate(OTHER, params)
        assert again.usage.cached_tokens == 0  # experts of cached tokens are unknown
        for index, completion in enumerate(out.outputs):
            tokens = [*OTHER, *completion.token_ids]
            experts = experts_of(out, index)
            assert experts.shape == (len(tokens) - 1, layers, per_token)
            whole = llm.generate(tokens[:-1], seeded(return_routed_experts=True, max_tokens=1))
            assert torch.equal(experts, experts_of(whole))
            assert torch.equal(experts, experts_of(again, index))
    # Each sequence comes to need a second grow page, and there are three.
    prompt = OTHER[:240]
    settings |= {"max_num_seqs": 4, "max_model_len": 600, "kv_cache_memory_bytes": room_for(model, 3, max_num_seqs=4)}
    with opened(model, **settings) as crowded:
        outs = crowded.generate_batch([prompt, prompt], params, max_in_flight=2)
        assert crowded.stats().preemptions > 0
        for out in outs:
            for index, completion in enumerate(out.outputs):
                tokens = [*prompt, *completion.token_ids]
                whole = crowded.generate(tokens[:-1], seeded(return_routed_experts=True, max_tokens=1))
                assert torch.equal(experts_of(out, index), experts_of(whole))


def test_layers_without_experts_report_none(tmp_path: Path) -> None:
    with opened(write_random_model(tmp_path, "v3"), max_num_batched_tokens=64) as llm:
        out = llm.generate(OTHER, seeded(return_routed_experts=True, max_tokens=3))
    experts = experts_of(out)
    assert experts.shape == (len(OTHER) + len(out.token_ids) - 1, 3, 4) and experts[:, 0].eq(-1).all()
    assert experts[:, 1:].min() >= 0 and experts[:, 1:].max() < 16 and (experts[:, 1:].diff(dim=2) > 0).all()


def test_routed_experts_survive_a_stop_string(llm: LLM) -> None:
    whole = llm.generate(PROMPT, seeded(return_routed_experts=True))
    cut = llm.generate(PROMPT, seeded(return_routed_experts=True, stop=(whole.text[10:13],)))
    assert cut.outputs[0].finish_reason == "stop" and len(cut.token_ids) < LENGTH
    assert torch.equal(experts_of(cut), experts_of(whole)[: len(PROMPT) + len(cut.token_ids) - 1])


@pytest.mark.parametrize("how", ["abort", "abort all", "pause"])
def test_an_aborted_request_has_what_was_chosen_for_its_tokens(llm: LLM, how: str) -> None:
    params = seeded(return_routed_experts=True, return_replay=True, max_tokens=200, ignore_eos=True)
    with llm.stream(PROMPT, params) as stream:
        for _ in range(3):
            next(stream)
        if how == "pause":
            llm.pause("abort")
            llm.resume()
        else:
            llm.abort(stream.request_id if how == "abort" else None)
        cut = stream.final()
    assert cut.outputs[0].finish_reason == "abort" and 3 <= len(cut.token_ids) < 200
    whole = llm.generate(PROMPT, params.replace(max_tokens=len(cut.token_ids)))
    assert torch.equal(experts_of(cut), experts_of(whole))
    replay = cut.outputs[0].replay
    assert replay is not None and replay.routed_experts is not None and len(replay.routed_experts) == len(experts_of(cut))
    scored = llm.score(PROMPT, cut.token_ids, params=params, replay=replay)
    assert len(scored) == len(cut.token_ids)


def test_routed_experts_of_a_single_token_prompt(llm: LLM) -> None:
    out = llm.generate(PROMPT[:1], seeded(return_routed_experts=True, n=2, max_tokens=1))
    assert [experts_of(out, i).shape[0] for i in (0, 1)] == [1, 1]


# ------------------------------------------------------------------------------------------------- order, time and control


def serving(model: Path, **settings: Any) -> AsyncLLM:
    return AsyncLLM(str(model), **{**MODEST, **settings})


async def check_idle(llm: AsyncLLM) -> None:
    await anyio.to_thread.run_sync(engine_of(llm).call(assert_idle).result)


@both_loops
async def test_more_urgent_requests_run_first(model: Path) -> None:
    order: list[int] = []
    async with serving(model, max_num_seqs=1) as llm:

        async def ask(priority: int) -> None:
            await llm.generate(PROMPT, seeded(max_tokens=3), priority=priority)
            order.append(priority)

        async with anyio.create_task_group() as group:
            async with llm.stream(PROMPT, seeded(max_tokens=900)) as blocker:
                await anext(blocker)
                for i, priority in enumerate((5, 1, 3, -2)):
                    group.start_soon(ask, priority)
                    await until(lambda i=i: llm.stats().num_waiting == i + 1)  # type: ignore[misc]
        await check_idle(llm)
    assert order == [-2, 1, 3, 5]


@both_loops
async def test_deadline_ends_with_what_there_is(model: Path) -> None:
    async with serving(model) as llm:
        endless = seeded(max_tokens=None)
        out = await llm.generate(PROMPT, endless.replace(n=2), deadline=0.1)
        assert {c.finish_reason for c in out.outputs} == {"deadline"}
        if out.token_ids:
            whole = await llm.generate(PROMPT, endless.replace(max_tokens=len(out.token_ids)))
            assert out.token_ids == whole.token_ids
        late = await llm.generate(PROMPT, endless, deadline=1e-9)
        assert late.outputs[0].finish_reason == "deadline" and late.token_ids == ()
        async with anyio.create_task_group() as group:
            outs = []

            async def ask() -> None:
                outs.append(await llm.generate(PROMPT, endless, deadline=0.3, request_id="kept"))

            group.start_soon(ask)
            await until(lambda: llm.stats().num_running == 1)
            await llm.pause()  # time goes on
        assert outs[0].outputs[0].finish_reason == "deadline"
        waiting = await llm.generate(PROMPT, endless, deadline=0.05)
        assert waiting.outputs[0].finish_reason == "deadline" and waiting.token_ids == ()
        await llm.resume()
        await check_idle(llm)


@both_loops
async def test_pause_changes_nothing_but_the_time(model: Path) -> None:
    async with serving(model, deterministic=True) as llm:
        params = seeded(max_tokens=30, logprobs=2)
        expected = await llm.generate(OTHER, params)
        async with llm.stream(OTHER, params) as stream:
            tokens: list[int] = []
            async for delta in stream:
                tokens += delta.token_ids
                if len(tokens) in (3, 20):
                    async with llm.paused():
                        assert llm.state == "paused"
                        steps = llm.stats().steps
                        await llm.reset_prefix_cache()
                        assert llm.stats().steps == steps
            final = await stream.final()
        assert tuple(tokens) == final.token_ids == expected.token_ids
        ours, theirs = final.outputs[0].logprobs, expected.outputs[0].logprobs
        assert ours is not None and theirs is not None and torch.equal(ours.sampled, theirs.sampled)
        await check_idle(llm)


@both_loops
async def test_main_calls_agree_in_both_loops(model: Path, llm: LLM) -> None:
    """asyncio and Trio give what a thread gets."""
    async with serving(model, max_num_seqs=8) as mine:
        prompts = [PROMPT, OTHER, PROMPT[:5]]
        params = seeded(logprobs=0)
        outs = await mine.generate_batch(prompts, params)
        assert [o.token_ids for o in outs] == [o.token_ids for o in llm.generate_batch(prompts, params)]
        found = {o.index: o.token_ids async for o in mine.as_completed(prompts, params)}
        assert found == {o.index: o.token_ids for o in outs}
        scored = await mine.score(PROMPT, outs[0].token_ids)
        expected = llm.score(PROMPT, outs[0].token_ids)
        torch.testing.assert_close(scored.sampled, expected.sampled, rtol=0, atol=1e-5)
        async with mine.stream(PROMPT, params.replace(n=2)) as stream:
            texts = ["", ""]
            async for delta in stream:
                texts[delta.index] += delta.text
            assert texts == [c.text for c in (await stream.final()).outputs]
            assert texts[0] == outs[0].text
        await check_idle(mine)


def test_reset_prefix_cache_forgets_prefixes(llm: LLM) -> None:
    llm.reset_prefix_cache()
    cached = [llm.generate(OTHER, seeded(max_tokens=2), cache_salt=salt).usage.cached_tokens for salt in (None, None, "a", "a")]
    assert cached == [0, 256, 0, 256]
    llm.reset_prefix_cache()
    assert llm.generate(OTHER, seeded(max_tokens=2)).usage.cached_tokens == 0


# --------------------------------------------------------------------------------------------------- the shipped checkpoint


@pytest.fixture(scope="module")
def shipped() -> Iterator[LLM]:
    with opened(tiny_model(), max_num_seqs=4, max_model_len=96, kv_cache_memory_bytes=64 << 20) as llm:
        yield llm


MESSAGES = ({"role": "system", "content": "Write Python."}, {"role": "user", "content": "Write the function `add`."})


def test_chat_and_its_stream_say_the_same(shipped: LLM) -> None:
    for reasoning in ("none", "high"):
        params = SamplingParams(temperature=0, max_tokens=12)
        whole = shipped.chat(MESSAGES, params, reasoning=reasoning)  # type: ignore[arg-type]
        with shipped.chat_stream(MESSAGES, params, reasoning=reasoning) as stream:  # type: ignore[arg-type]
            deltas = list(stream)
            final = stream.final()
        assert "".join(d.text for d in deltas) == whole.text == final.text
        assert "".join(d.reasoning for d in deltas) == (whole.reasoning or "") == (final.reasoning or "")
        assert final.token_ids == whole.token_ids and whole.token_ids
        assert whole.text or whole.reasoning


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}<｜Assistant｜><think>"


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_chat_of_an_mla_model_is_in_its_format_or_its_templates(tmp_path: Path, template: str | None) -> None:
    """A vocabulary with ``<think>`` is R1's, whose prompt opens the reasoning."""
    model = write_random_model(tmp_path, "v3")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, allowed_token_ids=(20, 21))
    if template is not None:
        (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    with opened(model, chat_template="auto" if template is None else "checkpoint") as llm:
        out = llm.chat([{"role": "user", "content": "ab"}], params)
        prompt = llm.tokenizer.decode(out.prompt_token_ids, skip_special_tokens=False)
        wanted = "<｜User｜>ab<｜Assistant｜><think>\n" if template is None else "ab<｜Assistant｜><think>"
        assert prompt == "<｜begin▁of▁sentence｜>" + wanted
        assert len(out.reasoning or "") == 6 and out.text == ""
    with pytest.raises(ConfigError, match=r"chat_template='checkpiont'.*'checkpoint'"):
        LLM(str(model), chat_template="checkpiont")  # type: ignore[arg-type]


def test_chat_without_format_or_template_is_refused(tmp_path: Path) -> None:
    with opened(write_random_model(tmp_path, "v2_lite")) as llm, pytest.raises(UnsupportedError, match="no chat format"):
        llm.chat([{"role": "user", "content": "ab"}])


def test_shipped_checkpoint_continues_code(shipped: LLM) -> None:
    out = shipped.generate("def add(a, b):\n    return", SamplingParams(temperature=0, max_tokens=8))
    assert out.text and out.usage.prompt_tokens == len(shipped.tokenizer.encode("def add(a, b):\n    return"))
    default = shipped.generate([300] * 84, deadline=600)
    assert default.outputs[0].finish_reason in ("stop", "length")


# -------------------------------------------------------------------------------------------------------- memory, dummy load


def test_random_weights_need_only_a_config_and_a_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "config only"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(SMALL)))
    tokenizer = write_tokenizer(tmp_path / "tokenizer", VOCAB)
    with pytest.raises(CheckpointError, match="tokenizer="), opened(folder, load_format="dummy"):
        pass
    outs = []
    for seed in (0, 0, 1):
        with opened(folder, load_format="dummy", tokenizer=str(tokenizer), seed=seed) as llm:
            outs.append(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)).token_ids)
    assert outs[0] == outs[1] != outs[2]


def test_random_weights_of_a_quantized_config_run(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_model()) / name, tmp_path)
    with opened(tmp_path, load_format="dummy", max_num_seqs=2, kv_cache_memory_bytes=32 << 20) as llm:
        out = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0))
        assert out.outputs[0].logprobs is not None and out.outputs[0].logprobs.sampled.isfinite().all()


@pytest.mark.parametrize("which", ["plain", "shipped", "dummy", "mla", "mla dummy"])
def test_memory_plan_is_what_is_held_to_the_byte(model: Path, tmp_path: Path, which: str) -> None:
    folder = {"plain": model, "shipped": Path(tiny_model())}.get(which, tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 3, "kv_cache_memory_bytes": 60_000_000, "max_model_len": 700}
    if which == "dummy":
        write_tokenizer(tmp_path, VOCAB)
        (tmp_path / "config.json").write_text(json.dumps({**SMALL, "torch_dtype": "bfloat16"}))
        settings |= {"load_format": "dummy", "speculative": MTP(3)}
    elif which == "mla":
        write_random_model(tmp_path, "v32", num_nextn_predict_layers=1)
        settings |= {"kv_cache_dtype": "fp8", "speculative": MTP(2)}
    elif which == "mla dummy":
        write_tokenizer(tmp_path, VOCAB)
        (tmp_path / "config.json").write_text(json.dumps(dict(BLOCKS)))
        settings |= {"load_format": "dummy", "speculative": MTP(3)}
    plan = plan_memory(str(folder), **settings)
    with opened(folder, **settings) as llm:
        assert llm.memory().per_device[0].state == plan.per_device[0].state
        assert (llm.memory().sizes, llm.memory().max_model_len) == (plan.sizes, plan.max_model_len)
        runner = engine_of(llm)._runner
        assert runner.cache.nbytes == plan.per_device[0].state <= 60_000_000
        held = {t.data_ptr(): t.nbytes for t in (*runner.model.parameters(), *runner.model.buffers()) if t.nbytes}
        assert sum(held.values()) == plan.per_device[0].weights


def test_single_sequence_without_prefix_cache_has_window_pages_for_chunks(model: Path) -> None:
    """A chunk reads its old window pages while it writes new ones: a sequence alone, without snapshots, needs spare pages too."""
    with opened(model, max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=64) as llm:
        alone, _ = (llm.generate(prompt, seeded()) for prompt in (OTHER, PROMPT))
    with opened(model) as llm:
        assert llm.generate(OTHER, seeded()).token_ids == alone.token_ids


# ------------------------------------------------------------------------------------------------------------- events


@OVERLAP
def test_events_are_delivered_while_the_device_computes(model: Path, overlap: bool) -> None:
    """With overlap, readers get events after the next launch; on a CPU, where a launch computes, before it."""
    events: list[str] = []

    def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return call

    with opened(model, overlap=overlap) as llm:
        engine = engine_of(llm)
        engine._deliver, engine._process = logged("deliver", engine._deliver), logged("process", engine._process)  # type: ignore[method-assign]
        engine._runner.launch = logged("launch", engine._runner.launch)  # type: ignore[method-assign]
        assert len(llm.generate(PROMPT, seeded()).token_ids) == LENGTH
        assert llm.stats().generated_tokens == LENGTH
    turn = ["launch", "deliver", "process"] if overlap else ["launch", "process", "deliver"]
    middle = events[6:36]
    assert middle == turn * 10


def test_a_step_that_a_pause_waits_for_is_counted(model: Path) -> None:
    with opened(model, overlap=True) as llm:
        with llm.stream(PROMPT, seeded()) as stream:
            for i, _ in enumerate(stream):
                if i == 5:
                    llm.pause()
                    llm.resume()
            assert len(stream.final().token_ids) == llm.stats().generated_tokens == LENGTH
