"""The grammar of tool calls: whatever is sampled under it, calls are well-formed, fit their tools, and stay out of text."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lite.errors import InvalidRequestError, UnsupportedError
from dsv4lite.text.forms import FORMS
from dsv4lite.text.parse import ParsedChat
from dsv4lite.text.releases import CallForm
from dsv4lite.text.structured import GrammarCompiler, GrammarMatcher
from dsv4lite.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
from dsv4lite.text.tool_calls import call_grammar
from tests.text import parsing
from tests.text.release import REAL
from tests.text.shipped import SHIPPED

V3 = GrammarCompiler(REAL)
COMPILERS = {"deepseek_v4": GrammarCompiler(SHIPPED), "deepseek_v31": V3, "deepseek_v3": V3}
TOKENIZERS = {"deepseek_v4": SHIPPED, "deepseek_v31": REAL, "deepseek_v3": REAL}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({} if parameters is None else {"parameters": parameters}), **more}}


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12, "description": "Where"},
            "unit": {"enum": ["celsius", "kelvin"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "at": {"$ref": "#/$defs/point"},
            "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": ["number", "null"]}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
)
OPTIONAL = tool("look", {"type": "object", "properties": {"deep": {"type": "boolean"}}, "additionalProperties": False})
NOTHING = tool("get_weather_now")
TOOLS = [WEATHER, OPTIONAL, NOTHING]
DSML = "｜DSML｜"
TWO_CALLS = (
    f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="get_weather">\n'
    f'<{DSML}parameter name="city" string="true">a </b> "c"\n</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
    f'<{DSML}parameter name="at" string="false">{{"x": 1.5, "y": null}}</{DSML}parameter>\n'
    f'</{DSML}invoke>\n<{DSML}invoke name="get_weather_now">\n\n</{DSML}invoke>\n</{DSML}tool_calls>'
)


def form_of(name: str) -> CallForm:
    form = FORMS[name].calls
    assert form is not None
    return form


def start(name: str, tools: list[dict[str, Any]], **options: Any) -> GrammarMatcher:
    options = {"must_call": True, "several": True, "may_think": False, **options}
    grammar = call_grammar(form_of(name), [tool["function"] for tool in tools], TOKENIZERS[name], **options)
    return COMPILERS[name].matcher(COMPILERS[name].begin(grammar))


def accept(matcher: GrammarMatcher, text: str) -> GrammarMatcher:
    for id in SHIPPED.encode(text):
        matcher.accept(id)
    return matcher


def walk(matcher: GrammarMatcher, tokenizer: Tokenizer, seed: int, limit: int = 400) -> tuple[str, bool]:
    """Sample allowed tokens; return the text with its markup, and whether it ended."""
    draw, ids, added = random.Random(seed), list[int](), torch.tensor(sorted(tokenizer.added_ids))
    while len(ids) < limit:
        mask = matcher.mask()
        special = added[mask[added]]
        allowed = special if len(special) and draw.random() < 0.7 else mask.nonzero().flatten()
        id = int(allowed[draw.randrange(len(allowed))])
        matcher.accept(id)
        if id == tokenizer.eos_token_id:
            return tokenizer.decode(ids, skip_special_tokens=False), True
        ids.append(id)
    return tokenizer.decode(ids, skip_special_tokens=False), False


def parse(name: str, text: str, tools: list[dict[str, Any]]) -> ParsedChat:
    return parsing.parse(text, False, range(1, len(text)), tools=tools, syntax=FORMS[name].syntax, guarded=True)


def check_calls(parsed: ParsedChat, *, ended: bool) -> None:
    """Names and arguments are those of the tools."""
    assert parsed.tool_calls or not ended
    for call in parsed.tool_calls:
        arguments = json.loads(call.arguments)
        if call.name == "get_weather":
            assert {"city", "days"} <= set(arguments) <= {"city", "unit", "days", "at", "code"}, call
            assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 12
            assert arguments["days"] in range(1, 15)
            assert arguments.get("unit") in (None, "celsius", "kelvin")
            assert arguments.get("at") is None or {"x"} <= set(arguments["at"]) <= {"x", "y"}
            assert arguments.get("code") is None or (len(arguments["code"]) == 3 and arguments["code"].isupper())
        elif call.name == "look":
            assert arguments in ({}, {"deep": True}, {"deep": False})
        else:
            assert (call.name, arguments) == ("get_weather_now", {})


def check_forced(name: str, seed: int, limit: int = 400) -> None:
    text, ended = walk(start(name, TOOLS), TOKENIZERS[name], seed, limit)
    parsed = parse(name, text, TOOLS)
    assert (parsed.content, parsed.reasoning) == ("", "")
    check_calls(parsed, ended=ended)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_whatever_is_sampled_under_a_forced_call_is_calls(seed: int) -> None:
    check_forced("deepseek_v4", seed)


@pytest.mark.parametrize("name", ["deepseek_v31", "deepseek_v3"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_calls_of_earlier_releases_are_calls_too(name: str, seed: int) -> None:
    check_forced(name, seed, limit=150)


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v31"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_whatever_is_sampled_beside_strict_tools_is_text_and_calls(name: str, seed: int) -> None:
    text, _ = walk(start(name, TOOLS, must_call=False), TOKENIZERS[name], seed)
    parsed = parse(name, text, TOOLS)
    marker = DSML if name == "deepseek_v4" else "<｜tool"
    assert marker not in parsed.content.rstrip("<")
    check_calls(parsed, ended=False)


def test_texts_of_the_release_are_accepted() -> None:
    """What the encoder writes for past turns, and what it means."""
    for text, must_call in (
        (TWO_CALLS, True),
        ("It is <b>5</b>. I will look.\n\n<" + TWO_CALLS[3:], False),
        ("Only text\n\n<", False),
    ):
        assert accept(start("deepseek_v4", TOOLS, must_call=must_call), text).mask()[1]
        parsed = parse("deepseek_v4", text, TOOLS)
        assert bool(parsed.tool_calls) == ("DSML" in text)
        if parsed.tool_calls:
            first, second = parsed.tool_calls
            assert json.loads(first.arguments) == {"city": 'a </b> "c"\n', "days": 3, "at": {"x": 1.5, "y": None}}
            assert (second.name, second.arguments) == ("get_weather_now", "{}")


@pytest.mark.parametrize(
    "wrong",
    [
        "Text first." + TWO_CALLS,
        TWO_CALLS.replace("get_weather_now", "get_weather_then"),
        TWO_CALLS.replace('"city"', '"town"'),
        TWO_CALLS.replace(">3<", ">15<"),
        TWO_CALLS.replace(">3<", "> 3<"),
        TWO_CALLS.replace('"x": 1.5, ', ""),
        TWO_CALLS.replace('"c"', '"c" is long'),
        TWO_CALLS.replace(f"</{DSML}invoke>\n<", "\n<", 1),
        TWO_CALLS + "and more",
    ],
)
def test_calls_that_do_not_fit_are_rejected(wrong: str) -> None:
    matcher = start("deepseek_v4", TOOLS)
    with pytest.raises(InvalidRequestError, match="does not allow token"):
        accept(matcher, wrong)


def test_markup_spelled_with_other_tokens_is_rejected() -> None:
    """The parser sees text, in which it would close the parameter, or open calls."""
    spelled = SHIPPED.encode(f"</{DSML}parameter>", allow_special=False)
    city = TWO_CALLS.partition("a </b>")[0]
    for matcher in (accept(start("deepseek_v4", TOOLS), city), start("deepseek_v4", TOOLS, must_call=False)):
        with pytest.raises(InvalidRequestError, match="does not allow token"):
            for id in spelled:
                matcher.accept(id)


def test_one_call_is_one_call() -> None:
    matcher = start("deepseek_v4", [NOTHING], several=False)
    one = f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="get_weather_now">\n\n</{DSML}invoke>\n</{DSML}tool_calls>'
    assert accept(matcher, one).is_terminated()


def test_tool_without_strictness_takes_any_arguments() -> None:
    loose = tool("get_weather", WEATHER["function"]["parameters"], strict=False)
    text = TWO_CALLS.partition(f'\n<{DSML}invoke name="get_weather_now')[0].replace('"city"', '"town"').replace(">3<", ">[3, {}]<")
    matcher = start("deepseek_v4", [loose])
    assert accept(matcher, text + f"\n</{DSML}tool_calls>").is_terminated()


def test_model_that_opens_its_reasoning_may_do_so() -> None:
    think = REAL.token_id("<think>")
    assert think is not None and start("deepseek_v3", TOOLS, may_think=True).mask()[think]
    assert not start("deepseek_v3", TOOLS).mask()[think]


def test_many_tools_are_compiled() -> None:
    """More rules and brackets than a grammar of the caller's may have."""
    many = [tool(f"tool_{i}", {**WEATHER["function"]["parameters"], "title": f"{i}"}) for i in range(40)]
    assert start("deepseek_v4", many).mask().any()


def test_vocabulary_without_the_markup_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="is not in this model's vocabulary"):
        call_grammar(form_of("deepseek_v31"), [], SHIPPED, must_call=True, several=True, may_think=False)


def test_name_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        start("deepseek_v4", [tool("\ud800", {})])


def test_malformed_schemas_name_their_tool() -> None:
    with pytest.raises(InvalidRequestError, match=r"the parameters of the tool 'f': .* not a JSON schema") as caught:
        start("deepseek_v4", [tool("f", {"properties": {"a": {"const": float("nan")}}})])
    assert caught.value.parameter == "tools"


@pytest.mark.parametrize("key", ["anyOf", "$ref", "minProperties", "dependentRequired", "patternProperties"])
def test_rules_that_calls_cannot_enforce_are_refused_by_name(key: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"the parameters of the tool 'f' have '{re.escape(key)}'"):
        start("deepseek_v4", [tool("f", {"type": "object", "properties": {}, key: {}})])
    start("deepseek_v4", [tool("f", {"type": "object", key: {}}, strict=False)])
    start("deepseek_v4", [tool("f", {"type": "object", "properties": {}, "x-note": {}, "$schema": "s"})])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {}}, "required": ["a", "b"]}, "'b' in 'required', but no schema for it in 'properties'"),
        ({"required": ["b"]}, "'b' in 'required'"),
        ({"properties": {"b": False}, "required": ["b"]}, "'b' in 'required'"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "property 'a', whose schema needs the reference '#/prop"),
        ({"properties": {"a": {"items": {"$ref": "#"}}}}, "property 'a', whose schema needs the reference '#'"),
        ({"properties": {"a": {"$ref": "#/$defs/d"}}}, "needs the reference '#/[$]defs/d'"),
        ({"additionalProperties": {"$ref": "#"}}, "property 'additionalProperties', whose schema needs the reference '#'"),
        ({"properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"items": {"$ref": "#"}}}}, "needs the reference '#'"),
    ],
)
def test_properties_that_calls_cannot_enforce_are_refused_by_name(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"the parameters of the tool 'f' have .*{message}"):
        start("deepseek_v4", [tool("f", schema)])
    start("deepseek_v4", [tool("f", schema, strict=False)])


def test_parameters_of_any_name_obey_the_rule_for_them() -> None:
    """Any value was accepted."""
    opened = f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="any" string='
    number, text = f'{opened}"false">5</{DSML}parameter>', f'{opened}"true">5</{DSML}parameter>'
    for rule, right, wrong in (
        ({"type": "integer"}, number, text),
        ({"type": "string"}, text, number),
        ({"$ref": "#/$defs/d"}, number, text),
    ):
        tools = [tool("f", {"type": "object", "additionalProperties": rule, "$defs": {"d": {"const": 5}}})]
        accept(start("deepseek_v4", tools), right)
        with pytest.raises(InvalidRequestError, match="does not allow token"):
            accept(start("deepseek_v4", tools), wrong)
    for free in ({}, True):
        for said in (number, text):
            accept(start("deepseek_v4", [tool("f", {"additionalProperties": free})]), said)


@pytest.mark.parametrize(
    ("rules", "more", "value"),
    [
        # A choice with another rule obeys both.
        ({"type": "string", "enum": ["a", "abc"], "minLength": 3}, {}, '"abc"'),
        # References lead to definitions of the tool: a parameter's own once hid these.
        ({"$ref": "#/$defs/d", "$defs": {"d": {"const": 4}}}, {"$defs": {"d": {"const": 5}}}, "5"),
    ],
)
def test_value_that_obeys_every_rule_is_accepted(rules: dict[str, Any], more: dict[str, Any], value: str) -> None:
    text = f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="a" string="false">{value}</{DSML}parameter>'
    accept(start("deepseek_v4", [tool("f", {"properties": {"a": rules}, "required": ["a"], **more})]), text)
