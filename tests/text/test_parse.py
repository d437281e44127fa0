"""The parser of reasoning and tool calls: what it reads, and that it reads the same however its input is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lite.text.chat import render_messages
from dsv4lite.text.parse import ChatParser, ParsedChat, ToolCall
from tests.text.parsing import Calls, check_output, parse, parse_in_cuts, words

EOS = "<｜end▁of▁sentence｜>"
OPEN, CLOSE = "\n\n<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": ["number", "null"]},
                "flag": {"type": "boolean"},
            },
        },
    },
}


def parameter(name: str, value: str, string: str | None = "true") -> str:
    attribute = "" if string is None else f' string="{string}"'
    return f'<｜DSML｜parameter name="{name}"{attribute}>{value}</｜DSML｜parameter>'


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n' + "\n".join(parameters) + "\n</｜DSML｜invoke>"


def one_call(*parameters: str, tools: Sequence[dict[str, Any]] | None = (TOOL,)) -> str:
    """Return the arguments of a single call."""
    (only,) = parse(OPEN + invoke("f", *parameters) + CLOSE, tools=tools).tool_calls
    return only.arguments


# ---- reasoning and content ----


F: Calls = [("f", "{}")]
A: Calls = [("f", '{"a": "1"}')]
V: Calls = [("f", '{"text": "v"}')]
HALF_OPEN = "<｜DSML｜parameter name="
IN_G = invoke("g") + CLOSE
# What was complete of a block that is cut.
CUT: list[tuple[str, Calls]] = [
    ("<｜DSML｜inv", []),
    ('<｜DSML｜invoke name="f', []),
    ('<｜DSML｜invoke name="f">\n', F),
    (f'<｜DSML｜invoke name="f">\n{parameter("a", "1")}\n<｜DSML｜parameter name="b" string="true">unfini', A),
    (invoke("f", parameter("a", "1")) + "\n</｜DSML｜tool", A),
]
OUTPUTS: list[tuple[bool, str, str, str, Calls]] = [
    (True, f"Simple.</think>4.{EOS}", "Simple.", "4.", []),
    (False, f"4.{EOS}", "", "4.", []),
    (True, "So far</thi", "So far</thi", "", []),
    # <think> is ignored at the start, and is text elsewhere.
    (True, "<think>a<think>b", "a<think>b", "", []),
    (False, "<think>a<think>b", "", "a<think>b", []),
    # A stray end of thinking is dropped, and what comes after end-of-sequence.
    (False, "</think>a</think>b", "", "ab", []),
    (True, "r</think>a</think>b", "r", "ab", []),
    (False, f"a{EOS}b", "", "a", []),
    (True, f"a{EOS}b</think>c", "a", "", []),
    # Two newlines at most belong to a block.
    *(
        (False, f"a{newlines}<｜DSML｜tool_calls>\n{invoke('f')}{CLOSE}", "", "a" + left, F)
        for newlines, left in (("", ""), ("\n", ""), ("\n\n", ""), ("\n\n\n", "\n"))
    ),
    # A block in unclosed reasoning ends it; its tag has variants, and spaces may come before the names of elements.
    (True, f"I call.{OPEN}{invoke('f')}{CLOSE}", "I call.", "", F),
    *(
        (False, f"a\n\n<｜DSML｜{name}>\n{invoke('f')}\n</｜DSML｜{name}>b", "", "a", F)
        for name in ("toolcalls", "function_calls", " tool_calls")
    ),
    (False, (OPEN + invoke("f", parameter("text", "v")) + CLOSE).replace("｜DSML｜", "｜DSML｜ "), "", "", V),
    # An opening that is cut off is dropped once its token is there; before that it may be text.
    *(
        (thinking, f"a{OPEN[:end]}", "a" * thinking, "" if thinking else "a", [])
        for thinking in (True, False)
        for end in (9, 12, 20)
    ),
    (False, "a\n\n<", "", "a\n\n<", []),
    # Text after a block and between its tags is dropped, and so are parameters outside of calls.
    (False, f"a{OPEN}{invoke('f')}{CLOSE}\nbye{OPEN}{IN_G}{EOS}", "", "a", F),
    (
        False,
        f"{OPEN}now <｜DSML｜nonsense>\n{invoke('f', 'x <y>', parameter('text', 'v'), '</｜DSML｜parameter>')}z{CLOSE}",
        "",
        "",
        V,
    ),
    (False, OPEN + parameter("a", "1") + invoke("f") + CLOSE, "", "", F),
    # An unclosed call and an unfinished tag end at the next one.
    (False, OPEN + invoke("f", parameter("a", "1")).removesuffix("</｜DSML｜invoke>") + IN_G, "", "", [*A, ("g", "{}")]),
    (False, OPEN + invoke("f", HALF_OPEN, parameter("a", "1")).removesuffix(">") + IN_G, "", "", [*A, ("g", "{}")]),
    *((False, f"a{OPEN}{cut}{end}", "", "a", calls) for cut, calls in CUT for end in ("", EOS)),
]


@pytest.mark.parametrize(("thinking", "text", "reasoning", "content", "calls"), OUTPUTS)
def test_output_has_reasoning_content_and_calls(thinking: bool, text: str, reasoning: str, content: str, calls: Calls) -> None:
    check_output(text, thinking, reasoning, content, calls)


@given(st.text("<｜DSML/think>\n ab", max_size=40).filter(lambda t: "think>" not in t and "<｜DSML｜" not in t), st.booleans())
def test_text_without_markup_is_kept_whole(text: str, thinking: bool) -> None:
    parsed = parse(text, thinking)
    assert (parsed.reasoning, parsed.content) == ((text, "") if thinking else ("", text))


@pytest.mark.parametrize(("syntax", "opening"), [("dsml", OPEN), ("tokens", "<｜tool▁calls▁begin｜>")])
def test_opening_of_a_forced_call_is_no_content(syntax: str, opening: str) -> None:
    for end in range(len(opening)):
        check_output(f"r</think>{opening[:end]}", True, "r", "", [], syntax=syntax, guarded=True, must_call=True)
    check_output("r</thi", True, "r</thi", "", [], syntax=syntax, guarded=True, must_call=True)


def test_only_a_possible_beginning_of_markup_is_held_back() -> None:
    parser = ChatParser(True)
    assert parser.push("why < </th") == ParsedChat(reasoning="why < ")
    assert parser.push("ink>be") == ParsedChat(content="be")
    assert parser.push("cause\n\n") == ParsedChat(content="cause")
    assert parser.push("\n<") == ParsedChat(content="\n")
    assert parser.push("b>") == ParsedChat(content="\n\n<b>")


# ---- tool calls ----


def test_block_has_calls_in_order() -> None:
    text = (
        f"Sure.{OPEN}"
        + invoke("f", parameter("text", 'x "y"\n</b>'), parameter("count", "1", "false"))
        + "\n"
        + invoke("g")
        + CLOSE
        + EOS
    )
    assert parse(text) == ParsedChat(
        reasoning="",
        content="Sure.",
        tool_calls=(
            ToolCall(id="call_0", name="f", arguments=r'{"text": "x \"y\"\n</b>", "count": 1}'),
            ToolCall(id="call_1", name="g", arguments="{}"),
        ),
    )


def test_call_comes_when_it_is_complete() -> None:
    parser = ChatParser(False, call_id_prefix="req7-")
    assert parser.push(OPEN + '<｜DSML｜invoke name="f">' + parameter("a", "1")) == ParsedChat()
    assert (
        parser.push("</｜DSML｜invoke>")
        == parser.result()
        == ParsedChat(tool_calls=(ToolCall(id="req7-0", name="f", arguments='{"a": "1"}'),))
    )
    assert parser.push("\n<｜DSML｜invoke") == parser.finish() == ParsedChat()


# ---- values ----


@pytest.mark.parametrize(
    ("name", "value", "string", "expected"),
    [
        ("text", "12", "true", '"12"'),
        ("text", " ä\\n\n", "true", r'" ä\\n\n"'),
        ("other", "12345678901234567890.10", "false", "12345678901234567890.10"),
        ("other", ' [1, {"k": null}]\n', "false", '[1, {"k": null}]'),
        ("other", "not json", "false", '"not json"'),
        ("other", "NaN", "false", '"NaN"'),
        ("other", "[" * 100_000, "false", '"' + "[" * 100_000 + '"'),
        ("other", "12", None, "12"),
        ("other", "a b", None, '"a b"'),
        ("flag", "True", "false", "true"),
        ("flag", "maybe", "false", '"maybe"'),
        ("count", "+5", "false", "5"),
        ("count", "+" + "9" * 400, "false", "9" * 400),
        ("count", "5.5.", "false", '"5.5."'),
        ("ratio", ".5", "false", "0.5"),
        ("ratio", "inf", "false", '"inf"'),
        ("ratio", "None", "false", "null"),
    ],
)
def test_value_follows_attribute_then_json_then_schema(name: str, value: str, string: str | None, expected: str) -> None:
    assert one_call(parameter(name, value, string)) == f'{{"{name}": {expected}}}'


@pytest.mark.parametrize("kind", [5, True, None, {"a": 1}, [5]])
def test_type_that_is_no_name_converts_nothing(kind: object) -> None:
    """A number in its place was gone through as a list, and the answer of the model was lost."""
    function = {"name": "f", "parameters": {"properties": {"count": {"type": kind}}}}
    assert one_call(parameter("count", "+5", "false"), tools=[{"function": function}]) == '{"count": "+5"}'


def test_first_of_parameters_with_the_same_name_counts() -> None:
    assert one_call(parameter("a", "1"), parameter("a", "2"), parameter("b", "3")) == '{"a": "1", "b": "3"}'


@pytest.mark.parametrize("wrapper", ["arguments", "input"])
@pytest.mark.parametrize("string", ["true", "false", None])
def test_single_wrapper_is_unwrapped(wrapper: str, string: str | None) -> None:
    assert one_call(parameter(wrapper, ' {"count": 1}', string)) == '{"count": 1}'


def test_wrapper_stays_if_it_may_be_meant() -> None:
    wrapped = parameter("input", '{"count": 1}', "false")
    assert one_call(wrapped, parameter("flag", "true", "false")) == '{"input": {"count": 1}, "flag": true}'
    assert one_call(parameter("flag", "true", "false"), wrapped) == '{"flag": true, "input": {"count": 1}}'
    assert one_call(parameter("x", "1", "false"), tools=[{"function": {"name": "f"}}]) == '{"x": 1}'
    assert one_call(wrapped, tools=None) == '{"input": {"count": 1}}'
    declared = {"function": {"name": "f", "parameters": {"properties": {"input": {"type": "object"}}}}}
    assert one_call(wrapped, tools=[declared]) == '{"input": {"count": 1}}'
    assert one_call(parameter("input", "[1]", "false")) == '{"input": [1]}'
    assert one_call(parameter("input", "{broken", "true")) == '{"input": "{broken"}'


# ---- properties ----


fragments = st.sampled_from(
    [
        *("<think>", "</think>", EOS, "\n", "\n\n", OPEN, CLOSE, "<｜DSML｜tool_calls>"),
        *("<｜DSML｜toolcalls>", "<｜DSML｜ tool_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"),
        *('<｜DSML｜parameter name="a" string="false">', "</｜DSML｜parameter>"),
        invoke("f", parameter("count", "+1", "false")),
        parameter("text", "<x>\n\n"),
        parameter("input", "{}", None),
        *("<｜DSML｜", "</｜DSML｜", '">', '" >', ">", "<", '"', "a", "{", "1"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(fragments, max_size=14).map("".join), st.booleans(), st.data())
def test_any_text_parses_the_same_however_it_is_cut(text: str, thinking: bool, data: st.DataObject) -> None:
    parse_in_cuts(data, text, thinking, tools=[TOOL])


scalars = st.one_of(words, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False))
values = scalars | st.lists(scalars, max_size=3)
calls = st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(st.text("pqé _", min_size=1, max_size=3), values, max_size=4))


@settings(deadline=None)
@given(words, words.map(lambda t: t + "."), st.lists(calls, max_size=3), st.booleans(), st.data())
def test_parser_inverts_the_encoder(
    reasoning: str, content: str, made: list[tuple[str, dict[str, Any]]], thinking: bool, data: st.DataObject
) -> None:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"id": "x", "function": {"name": name, "arguments": json.dumps(given)}} for name, given in made],
    }
    question = {"role": "user", "content": "q"}
    mode = "high" if thinking else "none"
    prompt, whole = ("".join(render_messages(turns, reasoning=mode)) for turns in ([question], [question, message]))
    parsed = parse_in_cuts(data, whole.removeprefix(prompt), thinking, tools=[TOOL])
    assert (parsed.reasoning, parsed.content) == (reasoning if thinking else "", content)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == made
