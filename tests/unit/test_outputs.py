"""Outputs as OpenAI's format has them, and as a prompt or a notebook shows them; what wrong names and prompts are told."""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any

import pytest
import torch

from dsv4lite import (
    LLM,
    CompletionOutput,
    Delta,
    InvalidRequestError,
    Logprobs,
    Replay,
    RequestOutput,
    SamplingParams,
    ToolCall,
)
from dsv4lite.api import session
from tests.fakes import FakeEngine, Lab
from tests.text.shipped import SHIPPED

IDS = tuple(SHIPPED.encode("def é"))
CALLS = (ToolCall(id="call_r_0_0", name="f", arguments='{"a": 1}'), ToolCall(id="call_r_0_1", name="g", arguments="{}"))


def logprobs_of(count: int, top: int = 2) -> Logprobs:
    values = torch.full((count, top), -0.5)
    values[0, 0] = -math.inf
    return Logprobs(
        sampled=torch.arange(count) * -0.25,
        ranks=torch.ones(count, dtype=torch.int32),
        token_ids=torch.arange(100, 100 + count * top, dtype=torch.int32).reshape(count, top),
        values=values,
    )


def output(**fields: Any) -> RequestOutput:
    given = {"index": 0, "text": "def é", "token_ids": IDS, "finish_reason": "stop", **fields}
    return RequestOutput(request_id="r", prompt_token_ids=(1, 2), outputs=(CompletionOutput(**given),))


def test_body_is_of_now_and_has_no_empty_reasoning() -> None:
    """``created`` was 0, and ``reasoning_content`` an empty string without reasoning."""
    before = int(time.time())
    body = output(reasoning="").to_openai(chat=True)
    assert before <= body["created"] <= time.time() and output().to_openai(created=7)["created"] == 7
    assert body["choices"][0] == {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "def é"},
        "logprobs": None,
    }
    assert output(reasoning="hm").to_openai(chat=True)["choices"][0]["message"]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("reason", "calls", "expected"),
    [
        ("stop", (), "stop"),
        ("stop", CALLS, "tool_calls"),
        ("length", (), "length"),
        ("length", CALLS, "length"),
        ("deadline", (), "length"),
        ("abort", (), "stop"),
        ("error", (), "error"),
    ],
)
def test_finish_reasons_are_those_of_openai(reason: Any, calls: tuple[ToolCall, ...], expected: str) -> None:
    """A call that the length had cut off was reported as complete."""
    body = output(finish_reason=reason, tool_calls=calls).to_openai(chat=True)
    assert body["choices"][0]["finish_reason"] == expected
    chunk = Delta(finish_reason=reason, call_offset=len(calls)).to_openai_chunk("r", chat=True)
    assert chunk["choices"][0]["finish_reason"] == expected


def test_calls_have_no_content() -> None:
    message = output(text="", tool_calls=CALLS).to_openai(chat=True)["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0] == {"id": "call_r_0_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_chat_logprobs_have_texts_and_bytes() -> None:
    out = output(logprobs=logprobs_of(len(IDS)))
    content = out.to_openai(chat=True, tokenizer=SHIPPED)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == "def é"
    assert [one["logprob"] for one in content] == [-0.25 * i for i in range(len(IDS))]
    best = content[0]["top_logprobs"]
    assert [one["logprob"] for one in best] == [-9999.0, -0.5]
    assert [bytes(one["bytes"]) for one in best] == [SHIPPED.id_to_bytes(100), SHIPPED.id_to_bytes(101)]
    plain = out.to_openai(chat=True)["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in plain] == [(f"token_id:{id}", None) for id in IDS]
    json.dumps(out.to_openai(chat=True), allow_nan=False)


def test_completion_logprobs_are_lists() -> None:
    logprobs = output(logprobs=logprobs_of(len(IDS))).to_openai(tokenizer=SHIPPED)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [SHIPPED.id_to_bytes(id).decode(errors="replace") for id in IDS]
    assert logprobs["token_logprobs"] == [-0.25 * i for i in range(len(IDS))]
    assert logprobs["top_logprobs"][0] == {
        SHIPPED.id_to_bytes(100).decode(errors="replace"): -9999.0,
        SHIPPED.id_to_bytes(101).decode(errors="replace"): -0.5,
    }


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab()
    monkeypatch.setattr(session, "open_engine", lab.open_engine)
    return lab


TURN = "Let me see.</think>It is 4.\n\n<｜DSML｜tool_calls>\n" + "".join(
    f'<｜DSML｜invoke name="{name}">\n<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    for name in "fg"
)
TURN += "</｜DSML｜tool_calls>"


def test_chunks_of_a_chat_add_up_to_its_body(lab: Lab) -> None:
    """As a client of OpenAI's adds them up: texts are joined, calls go by their index."""
    lab.model = lambda request, index: iter([*SHIPPED.encode(TURN), 1])
    with (
        LLM("m") as llm,
        llm.chat_stream([{"role": "user", "content": "?"}], SamplingParams(n=2, logprobs=1), reasoning="high") as stream,
    ):
        chunks = [delta.to_openai_chunk(stream.request_id, chat=True, created=5, tokenizer=SHIPPED) for delta in stream]
        body = stream.final().to_openai(chat=True, created=5, tokenizer=SHIPPED)
    assert {(chunk["id"], chunk["object"], chunk["created"]) for chunk in chunks} == {(body["id"], "chat.completion.chunk", 5)}
    for expected in body["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == expected["index"]]
        deltas = [part["delta"] for part in parts]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call.pop("index") for call in calls] == [0, 1]
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert expected["message"] == {
            "role": "assistant",
            "content": "".join(delta.get("content", "") for delta in deltas),
            "reasoning_content": "".join(delta.get("reasoning_content", "") for delta in deltas),
            "tool_calls": calls,
        }
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
        assert [one for part in parts for one in part["logprobs"]["content"]] == expected["logprobs"]["content"]


def test_chunks_of_a_text_add_up(lab: Lab) -> None:
    with LLM("m") as llm, llm.stream("Hello wörld", SamplingParams()) as stream:
        chunks = [delta.to_openai_chunk(stream.request_id) for delta in stream]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello wörld"


# ---- what is shown ----


def test_outputs_print_in_a_few_lines() -> None:
    long = output(text="x" * 5000, token_ids=(7,) * 5000, logprobs=logprobs_of(5000), reasoning="y" * 5000, tool_calls=CALLS)
    text = repr(long)
    assert len(text) < 1000 and "5000 tokens" in text and "finish_reason='stop'" in text and "2 prompt tokens" in text
    assert repr(logprobs_of(3)) == "Logprobs(3 tokens, the 2 best of each, mode='raw')"
    assert repr(Replay(routed_experts=torch.zeros(5, 2, 3))) == "Replay(routed_experts=[5, 2, 3], index_from=0)"


def test_notebooks_show_texts_and_escape_them() -> None:
    page = output(text="<b>&", reasoning="hm", tool_calls=CALLS)._repr_html_()
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page and "hm" in page and "call of f" in page
    failed = RequestOutput(request_id="r", prompt_token_ids=(), outputs=(), error=InvalidRequestError("<no>", parameter="prompt"))
    assert "InvalidRequestError: &lt;no&gt;" in failed._repr_html_()


# ---- what wrong calls are told ----


def test_unknown_parameters_suggest_the_name() -> None:
    for make in (lambda: SamplingParams(max_token=3), lambda: SamplingParams().replace(max_token=3)):  # type: ignore[call-arg]
        with pytest.raises(
            InvalidRequestError, match="unknown sampling parameter 'max_token'; did you mean 'max_tokens'"
        ) as caught:
            make()
        assert caught.value.parameter == "max_token"


@pytest.mark.parametrize(
    ("prompt", "hint"),
    [
        ({"prompt": "Hello"}, "give the text itself"),
        ({"role": "user", "content": "Hello"}, "chat and chat_stream take messages"),
        ([{"role": "user", "content": "Hello"}], "chat and chat_stream take messages"),
        (["Hello"], "generate_batch takes several prompts"),
        ({"prompt_tokens_ids": [1]}, "did you mean 'prompt_token_ids'"),
    ],
)
def test_wrong_prompts_are_told_what_to_pass(lab: Lab, prompt: Any, hint: str) -> None:
    with LLM("m") as llm, pytest.raises(InvalidRequestError, match=hint):
        llm.generate(prompt)


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "hello"}])
def test_text_as_messages_is_told_what_to_pass(lab: Lab, messages: Any) -> None:
    with LLM("m") as llm, pytest.raises(InvalidRequestError, match=r"write \[\{'role': 'user', 'content': ...\}\]"):
        llm.chat(messages)


def test_missing_limit_is_said_once(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def unlimited(engine: FakeEngine) -> None:
        object.__setattr__(engine.info, "default_params", SamplingParams())

    for prepare, expected in ((lambda engine: None, 0), (unlimited, 1)):
        lab.prepare = prepare
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dsv4lite"), LLM("m") as llm:
            llm.generate("Hello", SamplingParams(max_tokens=3))
            llm.score("Hello", " you")
            llm.generate("Hello")
            llm.generate_batch(["Hello", "you"])
        assert len([record for record in caplog.records if "without max_tokens" in record.message]) == expected
