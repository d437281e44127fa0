"""``tool_choice``: which tools an answer calls. The model is random, with a drafter and the shipped vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4lite import LLM, MTP, InvalidRequestError, RequestOutput, SamplingParams, UnsupportedError, tiny_model
from tests.e2e.engines import MODEST, SMALL, write_model

pytest.importorskip("llguidance")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Say what the weather is like.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 10},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["celsius", "kelvin"]},
            },
            "required": ["city", "days"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "time_now"}}
TOOLS = [WEATHER, NOW]
MESSAGES = [{"role": "user", "content": "What is the weather like in Hangzhou?"}]


@pytest.fixture(scope="module", params=[None, MTP(2)], ids=["plain", "mtp"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_model(tmp_path_factory.mktemp("model"), {**SMALL, "vocab_size": 4096})
    with LLM(str(folder), tokenizer=tiny_model(), speculative=request.param, **MODEST) as llm:
        yield llm


def some(seed: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 400, "seed": seed, "temperature": 1.0, **settings})


def check_calls(out: RequestOutput, *names: str) -> None:
    for completion in out.outputs:
        assert completion.finish_reason == "stop" and completion.text == "", completion
        assert completion.tool_calls and {call.name for call in completion.tool_calls} <= set(names)
        for call in completion.tool_calls:
            arguments = json.loads(call.arguments)
            if call.name == "time_now":
                assert arguments == {}
            else:
                assert {"city", "days"} <= set(arguments) <= {"city", "days", "unit"}
                assert len(arguments["city"]) <= 10 and arguments["days"] in range(1, 10)
                assert arguments.get("unit") in (None, "celsius", "kelvin")


def test_forced_calls_fit_their_tools(llm: LLM) -> None:
    check_calls(llm.chat(MESSAGES, some(1, n=3), tools=TOOLS, tool_choice="required"), "get_weather", "time_now")


@pytest.mark.parametrize("choice", ["get_weather", {"type": "function", "function": {"name": "get_weather"}}])
def test_named_tool_is_called_once(llm: LLM, choice: Any) -> None:
    out = llm.chat(MESSAGES, some(2, n=2), tools=TOOLS, tool_choice=choice)
    check_calls(out, "get_weather")
    assert [len(completion.tool_calls) for completion in out.outputs] == [1, 1]


def test_calls_come_after_the_reasoning(llm: LLM) -> None:
    """What is thought is free, even the markup of calls; a budget ends it."""
    opening = llm.tokenizer.encode("\n\n<｜DSML｜tool_calls>\n")
    params = some(3, thinking_budget=12, logit_bias={opening[2]: 30.0})
    out = llm.chat(MESSAGES, params, tools=TOOLS, tool_choice="required", reasoning="high")
    check_calls(out, "get_weather", "time_now")
    assert out.reasoning and "｜DSML｜" in out.reasoning


def test_stream_has_whole_calls_and_no_markup(llm: LLM) -> None:
    with llm.chat_stream(MESSAGES, some(4), tools=TOOLS, tool_choice="required") as stream:
        deltas = list(stream)
        out = stream.final()
    check_calls(out, "get_weather", "time_now")
    assert tuple(call for delta in deltas for call in delta.tool_calls) == out.tool_calls
    assert "".join(delta.text + delta.reasoning for delta in deltas) == ""


def test_call_that_is_cut_off_is_none(llm: LLM) -> None:
    out = llm.chat(MESSAGES, some(5, max_tokens=25), tools=TOOLS, tool_choice="get_weather")
    assert (out.text, out.tool_calls, out.outputs[0].finish_reason) == ("", (), "length")


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_markup_that_is_cut_off_is_no_text(llm: LLM, choice: str) -> None:
    """The opening of the block was text, as in ``"\\n\\n<｜DSML｜tool"``."""
    for tokens in range(1, len(llm.tokenizer.encode("\n\n<｜DSML｜tool_calls>\n")) + 1):
        with llm.chat_stream(MESSAGES, some(5, max_tokens=tokens), tools=TOOLS, tool_choice=choice) as stream:
            assert "".join(delta.text for delta in stream) == stream.final().text == ""
            assert (stream.final().outputs[0].finish_reason, len(stream.final().token_ids)) == ("length", tokens)


def test_strict_tools_guard_what_the_model_may_call(llm: LLM) -> None:
    """The bias makes the model open calls wherever it may."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    marker = llm.tokenizer.token_id("｜DSML｜")
    assert marker is not None
    params = some(6, n=3, logit_bias={marker: 30.0}, max_tokens=100)
    for completion in llm.chat(MESSAGES, params, tools=[strict]).outputs:
        assert "｜DSML｜" not in completion.text
        assert all({"city", "days"} <= set(json.loads(call.arguments)) for call in completion.tool_calls)
    loose = llm.chat(MESSAGES, params, tools=[WEATHER]).outputs
    assert any("｜DSML｜" in completion.text for completion in loose)


def test_none_calls_nothing(llm: LLM) -> None:
    marker = llm.tokenizer.token_id("｜DSML｜")
    assert marker is not None
    out = llm.chat(MESSAGES, some(7, max_tokens=30, logit_bias={marker: 90.0}), tools=TOOLS, tool_choice="none")
    assert out.tool_calls == () and marker not in out.token_ids and out.token_ids
    assert out.prompt_token_ids == llm.chat(MESSAGES, some(7, max_tokens=1), tools=TOOLS).prompt_token_ids


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
        ({"tools": TOOLS, "tool_choice": "get_wether"}, "did you mean 'get_weather'"),
        ({"tools": TOOLS, "tool_choice": 3}, "must be 'auto', 'none', 'required' or the name of a tool"),
        ({"tools": TOOLS, "tool_choice": {"name": "get_weather"}}, "must be {'type': 'function'"),
    ],
)
def test_choices_that_cannot_be_are_refused(llm: LLM, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        llm.chat(MESSAGES, some(0), **options)
    assert caught.value.parameter == "tool_choice"


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", ['a">b', 'a" >b', "</｜DSML｜"])
def test_names_that_the_markup_cannot_hold_are_refused(llm: LLM, name: str, choice: str) -> None:
    """A call of a tool ``a">b`` was taken for one of ``a``."""
    for tool in ({"name": name}, {"name": "f", "parameters": {"properties": {name: {}}}}):
        tools = [{"type": "function", "function": tool}]
        with pytest.raises(InvalidRequestError, match=f"{tool['name']}.* has the names .*{name}.* markup of calls cannot hold"):
            llm.chat(MESSAGES, some(0), tools=tools, tool_choice=choice)
        llm.chat(MESSAGES, some(0, max_tokens=1), tools=tools, tool_choice="none")


def test_spelling_of_the_end_of_sequence_is_text(llm: LLM) -> None:
    """With other tokens, as the model writes what a user says about it. The turn ended there, and its calls were lost."""
    said = "a <｜end▁of▁sentence｜> b"
    assert llm.chat(MESSAGES, some(1, structured_outputs={"choice": [said]})).text == said
    write = {"name": "write", "parameters": {"type": "object", "properties": {"x": {"const": said}}, "required": ["x"]}}
    (call,) = llm.chat(MESSAGES, some(1), tools=[{"type": "function", "function": write}], tool_choice="write").tool_calls
    assert json.loads(call.arguments) == {"x": said}


def test_two_grammars_are_refused(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match="tool_choice='required' and structured_outputs"):
        llm.chat(MESSAGES, some(0, structured_outputs={"regex": "a"}), tools=TOOLS, tool_choice="required")


def test_template_that_does_not_show_its_calls_takes_no_strict_tools(tmp_path: Path) -> None:
    """The error for a strict tool under ``auto`` advised ``auto``."""
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ tools | tojson }}")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with LLM(str(folder), chat_template="checkpoint", **MODEST) as llm:
        for tools, choice in ((TOOLS, "required"), ([strict], "auto")):
            with pytest.raises(UnsupportedError, match="use 'auto' without strict tools, or 'none'"):
                llm.chat(MESSAGES, some(7), tools=tools, tool_choice=choice)
        assert llm.chat(MESSAGES, some(7, max_tokens=2), tools=[strict], tool_choice="none").usage.completion_tokens == 2
