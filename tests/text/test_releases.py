"""The encoders of V3, R1, V3.1 and V3.2 byte for byte, the parser of what these models write, and which model has which format."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from dsv4lite.errors import InvalidRequestError
from dsv4lite.text.forms import FORMS, ChatForm, find_form
from dsv4lite.text.parse import ChatParser
from dsv4lite.text.releases import RELEASES
from dsv4lite.text.tokenizer import Tokenizer
from tests.e2e.engines import write_tokenizer
from tests.text.parsing import Calls, check_output, parse_in_cuts, words

Message = dict[str, Any]

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
CALLS, END_CALLS, CALL, END_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP, OUTPUT, END_OUTPUT = "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
OUTPUTS, END_OUTPUTS = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'
FENCED = CALL + "function" + SEP + 'weather\n```json\n{"city": "Köln"}\n```' + END_CALL
V32_CALL = (
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
V32_CALLS = f"\n\n<｜DSML｜function_calls>\n{V32_CALL}\n{V32_CALL}\n</｜DSML｜function_calls>"
V32_RESULTS = "\n\n<function_results>\n<result>rain</result>\n<result>sun</result>\n</function_results>\n\n"


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str | None, reasoning: str = "", **more: Any) -> Message:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, **more}


def called(count: int = 1, content: str | None = None, reasoning: str = "") -> Message:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    return assistant(content, reasoning, tool_calls=[{**call, "id": str(i)} for i in range(count)])


def result(content: str) -> Message:
    return {"role": "tool", "content": content}


def render(name: str, messages: Sequence[Message], reasoning: str | None = "none", **options: Any) -> str:
    return "".join(FORMS[name].render(messages, reasoning=reasoning, **options))


# ------------------------------------------------------------------------------------------------------------- encoders

DEVELOPER = {"role": "developer", "content": "d"}
TALK = [system("Be brief."), user("Hi"), assistant("Hello!", "greet"), user("2+2?")]
RAW = [user("Hi"), assistant("<think>a</think>b</think>c"), user("2+2?")]
TOOLS = [user("go"), called(2, "Sure.", "look it up"), result("rain"), result("sun")]
DONE = [*TOOLS, assistant("Both.", "sum up"), user("thanks")]
V3_CALLS = f"Sure.{CALLS}{FENCED}\n{FENCED}{END_CALLS}{E}"
V3_RESULTS = f"{OUTPUTS}{OUTPUT}rain{END_OUTPUT}\n{OUTPUT}sun{END_OUTPUT}{END_OUTPUTS}"
V31_CALL = f'{CALL}weather{SEP}{{"city": "Köln"}}{END_CALL}'
V31_TURN = f"Sure.{CALLS}{V31_CALL}{V31_CALL}{END_CALLS}{E}{OUTPUT}rain{END_OUTPUT}{OUTPUT}sun{END_OUTPUT}"
EXAMPLES: list[tuple[str, list[Message], str | None, str]] = [
    ("deepseek_v3", TALK, "none", f"Be brief.{U}Hi{A}Hello!{E}{U}2+2?{A}"),
    ("deepseek_v3", TALK, None, f"Be brief.{U}Hi{A}Hello!{E}{U}2+2?{A}"),
    ("deepseek_v3", [user("a"), user("b")], "none", f"{U}a{A}{U}b{A}"),
    ("deepseek_v3", RAW, "none", f"{U}Hi{A}<think>a</think>b</think>c{E}{U}2+2?{A}"),
    ("deepseek_v3", [user("a"), system("S"), user("b"), system("T")], "none", f"S\n\nT{U}a{A}{U}b{A}"),
    ("deepseek_v3", TOOLS, "none", f"{U}go{A}{V3_CALLS}{V3_RESULTS}"),
    ("deepseek_v3", DONE, "none", f"{U}go{A}{V3_CALLS}{V3_RESULTS}Both.{E}{U}thanks{A}"),
    ("deepseek_v3", [user("a"), assistant("The", wo_eos=True)], "none", f"{U}a{A}The"),
    # R1 always thinks, whatever is asked.
    *(("deepseek_r1", TALK, asked, f"Be brief.{U}Hi{A}Hello!{E}{U}2+2?{A}<think>\n") for asked in ("none", "high", None)),
    ("deepseek_r1", RAW, "none", f"{U}Hi{A}c{E}{U}2+2?{A}<think>\n"),
    ("deepseek_r1", [user("a"), user("b")], "none", f"{U}a{U}b{A}<think>\n"),
    ("deepseek_r1", TOOLS, "none", f"{U}go{A}{V3_CALLS}{V3_RESULTS}"),
    ("deepseek_r1_0528", TALK, "high", f"Be brief.{U}Hi{A}Hello!{E}{U}2+2?{A}"),
    ("deepseek_r1_0528", RAW, "none", f"{U}Hi{A}c{E}{U}2+2?{A}"),
    ("deepseek_v31", TALK, "none", f"Be brief.{U}Hi{A}</think>Hello!{E}{U}2+2?{A}</think>"),
    ("deepseek_v31", TALK, "low", f"Be brief.{U}Hi{A}</think>Hello!{E}{U}2+2?{A}<think>"),
    ("deepseek_v31", TALK, None, f"Be brief.{U}Hi{A}</think>Hello!{E}{U}2+2?{A}<think>"),
    ("deepseek_v31", RAW, "none", f"{U}Hi{A}</think>b</think>c{E}{U}2+2?{A}</think>"),
    ("deepseek_v31", [user("a"), user("b")], "none", f"{U}a{U}b{A}</think>"),
    ("deepseek_v31", TOOLS, "none", f"{U}go{A}</think>{V31_TURN}"),
    ("deepseek_v31", DONE, "high", f"{U}go{A}</think>{V31_TURN}Both.{E}{U}thanks{A}<think>"),
    # The worked example of V3.2's release.
    (
        "deepseek_v32",
        [user("hello"), assistant("Hello! I am DeepSeek.", "a greeting"), user("1+1=?")],
        "high",
        f"{U}hello{A}</think>Hello! I am DeepSeek.{E}{U}1+1=?{A}<think>",
    ),
    ("deepseek_v32", TALK, "none", f"Be brief.{U}Hi{A}</think>Hello!{E}{U}2+2?{A}</think>"),
    ("deepseek_v32", [user("a"), system("S"), user("b")], "none", f"{U}a{A}</think>S{U}b{A}</think>"),
    ("deepseek_v32", TOOLS, "none", f"{U}go{A}</think>Sure.{V32_CALLS}{E}{V32_RESULTS}</think>"),
    ("deepseek_v32", TOOLS, "high", f"{U}go{A}<think>look it up</think>Sure.{V32_CALLS}{E}{V32_RESULTS}<think>"),
    (
        "deepseek_v32",
        DONE[:-1],
        "high",
        f"{U}go{A}<think>look it up</think>Sure.{V32_CALLS}{E}{V32_RESULTS}<think>sum up</think>Both.{E}",
    ),
    ("deepseek_v32", DONE, "high", f"{U}go{A}</think>Sure.{V32_CALLS}{E}{V32_RESULTS}</think>Both.{E}{U}thanks{A}<think>"),
    (
        "deepseek_v32",
        [{**DEVELOPER, "response_format": {"type": "object"}}],
        "high",
        f"{U}\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        f'{{"type": "object"}}\n\n# The user\'s message is: d{A}<think>',
    ),
    ("deepseek_v32", [{"role": "developer", "content": "d"}, user("a")], "high", f"{U}a{A}<think>"),
    (
        "deepseek_v32",
        [{"role": "developer", "content": "d"}, user("a")],
        "none",
        f"{U}\n\n# The user's message is: d{A}</think>{U}a{A}</think>",
    ),
]


@pytest.mark.parametrize(("name", "messages", "reasoning", "expected"), EXAMPLES)
def test_worked_example(name: str, messages: list[Message], reasoning: str | None, expected: str) -> None:
    assert render(name, messages, reasoning) == B + expected


SECTION = f"## Tools\nYou have access to the following tools:\n\n### weather\nDescription: Tells it.\n\nParameters: {SCHEMA}\n\n"
RULES = """

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, """


def test_sections_describe_the_tools_of_v3_to_v31() -> None:
    """Those of system messages and of the request."""
    rule = "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    messages = [{**system("S"), "tools": [TOOL]}, user("go")]
    call = f"{CALLS}{CALL}tool_call_name{SEP}tool_call_arguments{END_CALL}{{{{additional_tool_calls}}}}{END_CALLS}"
    own = f"S\n\n{SECTION}{rule}{call}{RULES}chain them directly without separators or spaces\n{U}go{A}</think>"
    assert render("deepseek_v31", messages) == B + own == render("deepseek_v31", [system("S"), user("go")], tools=[TOOL])
    call = f"{CALLS}{CALL}function{SEP}tool_call_name\n```json\ntool_call_arguments\n```{END_CALL}"
    call += f"{{{{additional_tool_calls}}}}{END_CALLS}"
    own = f"\n\n{SECTION}{rule}{call}{RULES}put each of them on a new line\n{U}go{A}"
    assert render("deepseek_v3", [user("go")], tools=[TOOL]) == B + own
    both = render("deepseek_v31", messages, tools=[{"function": {"name": "bare"}}])
    assert f"Parameters: {SCHEMA}\n\n### bare\nDescription: \n\nParameters: {{}}\n\nIMPORTANT" in both


def test_schemas_describe_the_tools_of_v32() -> None:
    """The text that the release was trained on keeps every byte."""
    text = RELEASES["deepseek_v32"].tools
    assert (len(text), hashlib.sha256(text.encode()).hexdigest()) == (
        1110,
        "fe3857c02a4ac94219814bc5ee7c13b55467fe01685a76b2d69d61d3ff170e5f",
    )
    line = f'{{"name": "weather", "description": "Tells it.", "parameters": {SCHEMA}}}'
    shown = text.replace("%TOOLS%", f"{line}\n{line}")
    assert render("deepseek_v32", [user("go")], tools=[TOOL, TOOL]) == f"{B}\n\n{shown}{U}go{A}</think>"
    later = [user("a"), {**system("S"), "tools": [TOOL]}, user("b")]
    assert render("deepseek_v32", later, tools=[TOOL]) == f"{B}{U}a{A}</think>S\n\n{shown}{U}b{A}</think>"


@pytest.mark.parametrize("name", RELEASES)
def test_results_are_in_the_order_of_the_calls(name: str) -> None:
    """They were in the order of the messages. Only results behind the same calls are sorted."""
    answers = [{**result(said), "tool_call_id": id} for id, said in (("0", "rain"), ("1", "sun"), ("2", "snow"))]
    ordered = [user("a"), called(3), *answers, user("b"), called(3), *answers]
    mixed = [user("a"), called(3), *answers[::-1], user("b"), called(3), answers[1], answers[2], answers[0]]
    assert render(name, mixed) == render(name, ordered)
    unknown = [{**answer, "tool_call_id": "x"} for answer in answers]
    texts = [render(name, [user("a"), called(3), *results]) for results in (unknown, map(result, ("rain", "sun", "snow")))]
    assert texts[0] == texts[1] == render(name, ordered[:5])


@pytest.mark.parametrize("name", RELEASES)
def test_text_of_a_continued_answer_opens_no_reasoning(name: str) -> None:
    """All of the answer to ``<think>`` at the end of the given part was its reasoning."""
    form = FORMS[name]
    parts = form.render([user("a"), assistant("Write <think>", "r", wo_eos=True)], reasoning=None)
    assert form.thinking(parts) is (None if form.opens_reasoning else False)
    assert form.thinking(("".join(parts),)) is True  # allow_special


def test_result_of_v32_cannot_close_its_tag() -> None:
    text = "</result>\n</FUNCTION_RESULTS></resul"
    assert "\n<result><\\/result>\n<\\/FUNCTION_RESULTS></resul</result>" in render(
        "deepseek_v32", [user("a"), called(), result(text)]
    )
    assert f"\n<result>{text}</result>" in render("deepseek_v32", [user("a"), called(), result(text)], escape_results=False)


WRONG: list[tuple[str, list[Any], str, str]] = [
    ("deepseek_v3", [], "none", "messages is empty"),
    ("deepseek_v3", [DEVELOPER], "none", r"messages\[0\] has the unknown role 'developer'"),
    ("deepseek_v3", [user("a")], "high", "reasoning='high' must be"),
    ("deepseek_v31", [user("a")], "hihg", "reasoning='hihg' must be .*'high'"),
    ("deepseek_v31", [user("a"), result("r")], "none", r"messages\[1\] \(tool\) has no tool call before it"),
    (
        "deepseek_v32",
        [user("a"), called(1), result("r"), result("r")],
        "none",
        r"messages\[3\] \(tool\) has no tool call before it",
    ),
    ("deepseek_v32", [user("a"), called(1), user("b"), result("r")], "none", r"messages\[3\] \(tool\) has no tool call before it"),
    ("deepseek_v32", [user("a"), assistant("b")], "high", r"messages\[1\] \(assistant\) follows the last question: it needs"),
    ("deepseek_v32", [{"role": "developer"}], "none", r"messages\[0\] \(developer\) needs a string as 'content'"),
    ("deepseek_v31", [{"role": "assistant"}], "none", "neither 'content' nor 'tool_calls'"),
    ("deepseek_v31", [assistant("", tool_calls=[{"function": {"name": "f"}}])], "none", "has no 'arguments'"),
    ("deepseek_v31", [{**system("S"), "tools": [{}]}], "none", r"tools\[0\] of messages\[0\] has no 'function' with a 'name'"),
]


@pytest.mark.parametrize(("name", "messages", "reasoning", "problem"), WRONG)
def test_malformed_conversation_is_an_invalid_request(name: str, messages: list[Any], reasoning: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        render(name, messages, reasoning)


def test_arguments_may_be_an_object() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
    assert f'{CALL}f{SEP}{{"a": [1, "é"]}}{END_CALL}' in render("deepseek_v31", [assistant(None, tool_calls=[call])])


# --------------------------------------------------------------------------------------------------------------- parser


COLOGNE: Calls = [("weather", '{"city": "Köln"}')]
READ: list[tuple[bool | None, str, str, str, Calls]] = [
    (True, f"why</think>so{E}", "why", "so", []),
    (None, f"<think>\nwhy</think>so{E}", "\nwhy", "so", []),
    (None, "so <think>why</think>", "", "so <think>why", []),
    (False, "<think>so", "", "so", []),
    (True, "cut off", "cut off", "", []),
    (None, "no tags", "", "no tags", []),
    (False, f"Sure.{CALLS}{FENCED}\n{FENCED}{END_CALLS}{E}", "", "Sure.", COLOGNE * 2),
    (True, f"r</think>{CALLS}{V31_CALL}{V31_CALL}{END_CALLS}{E}", "r", "", COLOGNE * 2),
    (True, f"r{CALLS}{V31_CALL}", "r", "", COLOGNE),  # without the end of reasoning and of the calls
    (False, f"{CALLS}now {V31_CALL} and {FENCED}{END_CALLS}later", "", "", COLOGNE * 2),
    # Without its end a call is none, and one without a separator is none either.
    (False, f'{CALLS}{V31_CALL}{CALL}weather{SEP}{{"city": "K', "", "", COLOGNE),
    (False, f"{CALLS}{CALL}weather{SEP}{{{CALL}x{END_CALL}{V31_CALL}{E}", "", "", COLOGNE),
    # Arguments that are no JSON object become one string.
    (False, f"{CALLS}{CALL}f{SEP}K{END_CALL}", "", "", [("f", '{"arguments": "K"}')]),
    (False, f"{CALLS}{CALL}f{SEP}[1]{END_CALL}", "", "", [("f", '{"arguments": "[1]"}')]),
    (False, f"{CALLS}{CALL}function{SEP} f \n\n```\n{{}}\n\n```\n{END_CALL}", "", "", [("f", "{}")]),
    (False, f"{CALLS}{CALL}function{SEP}f\n```json\n  {{}}\n```{END_CALL}", "", "", [("f", "{}")]),
    (False, f"{CALLS}{CALL}function{SEP}{' ' * 20_000}{END_CALL}", "", "", [("function", '{"arguments": ""}')]),  # in linear time
    (False, f"a{V32_CALLS}", "", f"a{V32_CALLS}", []),  # of other releases
]


@pytest.mark.parametrize(("thinking", "text", "reasoning", "content", "calls"), READ)
def test_output_has_reasoning_content_and_calls(
    thinking: bool | None, text: str, reasoning: str, content: str, calls: Calls
) -> None:
    check_output(text, thinking, reasoning, content, calls, syntax="tokens")


def test_other_syntaxes_are_text() -> None:
    text = f"{CALLS}{V31_CALL}{END_CALLS}{V32_CALLS}"
    for syntax, content in (("dsml", f"{CALLS}{V31_CALL}{END_CALLS}"), ("none", text)):
        parser = ChatParser(False, syntax=syntax)  # type: ignore[arg-type]
        assert parser.push(text).content + parser.finish().content == content


fragments = st.sampled_from(
    [
        "<think>",
        "</think>",
        E,
        CALLS,
        END_CALLS,
        CALL,
        END_CALL,
        SEP,
        FENCED,
        V31_CALL,
        "function",
        "\n```json\n",
        "{}",
        "\n",
        "<",
        "a",
        "▁",
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(fragments, max_size=14).map("".join), st.sampled_from([True, False, None]), st.data())
def test_any_text_parses_the_same_however_it_is_cut(text: str, thinking: bool | None, data: st.DataObject) -> None:
    parse_in_cuts(data, text, thinking, syntax="tokens")


objects = st.dictionaries(st.text("pqé _", min_size=1, max_size=3), words | st.integers() | st.booleans(), max_size=4)


@settings(deadline=None)
@given(
    st.sampled_from(["deepseek_v3", "deepseek_r1", "deepseek_v31", "deepseek_v32"]),
    words.map(lambda t: t + "."),
    st.lists(st.tuples(st.sampled_from(["f", "g"]), objects), max_size=3),
    st.data(),
)
def test_parser_inverts_the_encoder(name: str, content: str, made: list[tuple[str, Message]], data: st.DataObject) -> None:
    calls = [{"id": "x", "function": {"name": name, "arguments": json.dumps(given)}} for name, given in made]
    question = user("q")
    form = FORMS[name]
    opened = "".join(form.render([question, {**assistant("", "r"), "wo_eos": True}]))
    text = "".join(form.render([question, assistant(content, "r", tool_calls=calls)])).removeprefix(opened)
    parsed = parse_in_cuts(data, text, syntax=form.syntax)
    assert (parsed.reasoning, parsed.content) == ("", content)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == made


# ---------------------------------------------------------------------------------------------------------------- forms

MARKS = [B, E, U, A, CALLS]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer(*more: str, template: str | None = None) -> Tokenizer:
    """A vocabulary of single bytes and control tokens."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, normalized=False) for token in (*MARKS, *more)])
    return Tokenizer(backend, chat_template=template)


def foreign(template: str) -> Tokenizer:
    """A vocabulary of other makers: without DeepSeek's control tokens, and without BOS and EOS."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_template=template)


THINKING, SEARCH = ("<think>", "</think>"), "<｜search▁begin｜>"
FOUND: list[tuple[str | None, Tokenizer, str | None]] = [
    ("deepseek_v3", tokenizer(), "deepseek_v3"),
    ("deepseek_v3", tokenizer(template="{{ 1 }}"), "deepseek_v3"),
    ("deepseek_v3", tokenizer(*THINKING), "deepseek_r1"),
    ("deepseek_v3", tokenizer(*THINKING, template=f"{{{{ '{A}<think>\\n' }}}}"), "deepseek_r1"),
    ("deepseek_v3", tokenizer(*THINKING, template=f"{{{{ '{A}' }}}}"), "deepseek_r1_0528"),
    ("deepseek_v3", tokenizer(*THINKING, SEARCH, template="{{ 1 }}"), "deepseek_v31"),
    ("deepseek_v32", tokenizer(*THINKING, SEARCH), "deepseek_v32"),
    ("deepseek_v32", tokenizer(*THINKING, SEARCH, template="{{ 1 }}"), "deepseek_v31"),  # V3.2-Exp
    ("deepseek_v32", tokenizer(*THINKING, SEARCH, template="{%- set dsml = '｜DSML｜' -%}"), "deepseek_v32"),  # copies of V3.2
    ("deepseek_v4", tokenizer(*THINKING, template="{{ 1 }}"), "deepseek_v4"),
]


@pytest.mark.parametrize(("family", "tokens", "name"), FOUND)
def test_tokenizer_and_template_tell_releases_of_one_config_apart(family: str, tokens: Tokenizer, name: str) -> None:
    assert find_form(family, tokens, shipped=False) == (FORMS[name], "")


ALL_MARKS = [*MARKS, "<think>", "</think>", END_CALLS, CALL, END_CALL, SEP, OUTPUTS, OUTPUT, END_OUTPUT, END_OUTPUTS, "｜DSML｜"]
TOKENS = tokenizer(*(mark for mark in ALL_MARKS if mark not in MARKS))
HOSTILE = st.lists(st.sampled_from([*ALL_MARKS, "<", "｜", "User｜>", "</result>", " ", "a"]), max_size=5).map("".join)


def controls(name: str, reasoning: str | None, say: Sequence[str]) -> list[int]:
    """Return the control tokens of a conversation that says these texts wherever a caller may put text."""
    text, reason, answer, function, key, value, result_ = say
    call = {"id": "c", "function": {"name": function, "arguments": {key: value}}}
    tools = [{"function": {"name": function, "description": text, "parameters": {"properties": {key: {"title": value}}}}}]
    more = [{"role": "developer", "content": text, "tools": tools}] if name == "deepseek_v32" else []
    messages = [
        *(system(text), user(text), assistant(answer, reason), *more, user(value)),
        *(assistant(answer, reason, tool_calls=[call, call]), result(result_), result(result_)),
    ]
    parts = FORMS[name].render(messages, tools=tools, reasoning=reasoning)
    ids = TOKENS.encode_parts(parts)
    assert TOKENS.decode(ids, skip_special_tokens=False) == "".join(parts)
    return [id for id in ids if id in TOKENS.added_ids]


@given(st.sampled_from([*RELEASES]), st.sampled_from(["none", None]), st.tuples(*[HOSTILE] * 7))
def test_no_content_becomes_a_control_token(name: str, reasoning: str | None, say: tuple[str, ...]) -> None:
    assert controls(name, reasoning, say) == controls(name, reasoning, ("x",) * 7)


# ------------------------------------------------------------------------------------------------------------ templates

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}{{ m.content + eos_token }}"
    "{% endif %}{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking }}{% endif %}"
)


def template_form(template: str, *more: str, family: str | None = None, shipped: bool = False) -> ChatForm:
    form, problem = find_form(family, tokenizer(*more, template=template), shipped=shipped)
    assert form is not None, problem
    return form


@pytest.mark.parametrize(("family", "shipped"), [(None, False), ("deepseek_v3", True), ("deepseek_v4", True)])
def test_template_of_the_checkpoint_writes_the_prompt(family: str | None, shipped: bool) -> None:
    """Of models for which there is no encoder, and of any if it is wanted."""
    form = template_form(TEMPLATE, family=family, shipped=shipped)
    messages = [user("é"), assistant("b"), user("c")]
    assert "".join(form.render(messages, tools=[{"function": {"name": "ü"}}])) == (
        f'{B}{U}éb{E}{U}c{{"function": {{"name": "ü"}}}}{A}'
    )
    asked = [form.render(messages, reasoning=reasoning) for reasoning in ("none", "low", None)]
    assert ["".join(parts)[-7:] == "<think>" for parts in asked] == [False, True, True]
    assert [form.thinking(parts) for parts in asked] == [None, True, True]
    assert form.syntax == "none"


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_model_with_a_vocabulary_of_other_makers_is_talked_to_by_its_template(family: str) -> None:
    form, _ = find_form(family, foreign(TEMPLATE), shipped=False)
    assert form is not None and "".join(form.render([user("a"), assistant("b")])) == f"{U}ab{A}"


@pytest.mark.parametrize(("mark", "syntax"), [(CALLS, "tokens"), ("<｜DSML｜invoke", "dsml"), ("[TOOL_CALLS]", "none")])
def test_template_says_how_calls_are_written(mark: str, syntax: str) -> None:
    assert template_form(TEMPLATE + "{# " + mark + " #}").syntax == syntax


@given(st.lists(st.sampled_from([*MARKS, "<", "｜", "a", "\ue000", "\ue000\ue000", " "]), max_size=6).map("".join))
def test_control_tokens_of_messages_are_text(said: str) -> None:
    tokens = tokenizer(template=TEMPLATE)
    form, _ = find_form(None, tokens, shipped=False)
    assert form is not None
    messages, tools = [user(said), assistant(said), user("c")], [{"function": {"name": said, said: 1}}]
    parts = form.render(messages, tools=tools)
    ids = tokens.encode_parts(parts)
    assert (
        tokens.decode(ids, skip_special_tokens=False)
        == "".join(parts)
        == "".join(form.render(messages, tools=tools, escape_results=False))
    )
    assert [tokens.id_to_bytes(id).decode() for id in ids if id in tokens.added_ids] == [B, U, E, U, A]


@pytest.mark.parametrize("options", ["", "ensure_ascii=true", "true, none, none"])
def test_template_may_escape_what_is_not_ascii(options: str) -> None:
    """Of a control token in a text, escapes of the character that had cut it stayed in the prompt."""
    form = template_form("{{ messages[0].content | tojson(" + options + ") }}{{ strftime_now('%%') }}")
    assert "".join(form.render([user(f"{U} <")])) == json.dumps(f"{U} <", ensure_ascii=bool(options)) + "%"


@given(st.sampled_from([*MARKS, "<｜DSML｜"]), st.lists(st.integers(1, 8), max_size=3), st.sampled_from(["", " ", "\n"]))
def test_control_token_in_pieces_is_text(token: str, cuts: list[int], blank: str) -> None:
    """Templates such as GLM-5's write the parts of a message one behind the other: two parts became ``<｜User｜>``."""
    places = sorted({0, *cuts, len(token)})
    said = [{"type": "text", "text": token[a:b] + blank} for a, b in pairwise(places)]
    template = "<｜User｜>{% for p in messages[0].content %}{{ p.text | trim }}{% endfor %}<｜Assistant｜>"
    tokens = tokenizer("｜DSML｜", template=template)
    form, _ = find_form(None, tokens, shipped=False)
    assert form is not None
    ids = tokens.encode_parts(form.render([{"role": "user", "content": said}]))
    assert tokens.decode(ids, skip_special_tokens=False) == f"{U}{token}{A}"
    assert [tokens.id_to_bytes(id).decode() for id in ids if id in tokens.added_ids] == [U, A]


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", [user("a")], "does not take this conversation: roles must alternate"),
        ("{{ messages[0].content + 1 }}", [user("a")], "does not take this conversation"),
        ("{{ messages.append(1) }}", [user("a")], "does not take this conversation"),
        ("{{ now('%Y') }}", [user("a")], "does not take this conversation: 'now' is undefined"),
        ("{{ ''.__class__.__mro__ }}", [user("a")], "does not take this conversation"),
        (TEMPLATE, [], "messages is empty"),
        (TEMPLATE, [3], r"messages\[0\] is not a mapping"),
        (TEMPLATE, [user({1, 2})], "cannot be written as JSON"),  # type: ignore[arg-type]
    ],
)
def test_what_a_template_refuses_is_an_invalid_request(template: str, messages: list[Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        template_form(template).render(messages)
    with pytest.raises(InvalidRequestError, match="reasoning='hihg'"):
        template_form(TEMPLATE).render([user("a")], reasoning="hihg")


@pytest.mark.parametrize("given", ['{"city": "Bé"}', {"city": "Bé"}], ids=["JSON", "object"])
def test_templates_get_the_arguments_of_calls_as_they_need_them(given: Any) -> None:
    """GLM-5's goes through the members, V3.1's writes the JSON; OpenAI's messages have JSON, those of transformers objects."""
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": given}}]}
    call = "{% set call = messages[0].tool_calls[0].function %}{{ call.name }}"
    members = template_form(call + "{% for name, value in call.arguments.items() %} {{ name }}={{ value }}{% endfor %}")
    assert "".join(members.render([message])) == "weather city=Bé"
    assert "".join(template_form(call + "{{ ' ' + call.arguments }}").render([message])) == 'weather {"city": "Bé"}'
    with pytest.raises(InvalidRequestError, match="does not take this conversation"):
        members.render([{"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "no JSON"}}]}])


def test_what_is_missing_for_chat_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_form(None, tokenizer(), shipped=False) == (
        None,
        "this model has no chat format; render the conversation yourself and use generate()",
    )
    form, problem = find_form("deepseek_v4", tokenizer(), shipped=True)  # it has a format: that it had none was said
    assert form is None and "chat_template='checkpoint': this checkpoint ships no chat template; use 'auto'" in problem
    nested = f"{{{{ {'(' * 5000}1{')' * 5000} }}}}"  # Jinja raises RecursionError; the last one becomes code that Python refuses
    for template in ("{% if %}", "{% generation %}a{% endgeneration %}", nested, "{% break %}"):
        form, problem = find_form(None, tokenizer(template=template), shipped=False)
        assert form is None and "cannot be read" in problem
    monkeypatch.setitem(sys.modules, "jinja2", None)
    form, problem = find_form("deepseek_v3", tokenizer(template=TEMPLATE), shipped=True)
    assert form is None and "pip install 'dsv4lite[chat]'" in problem
    assert find_form("deepseek_v3", tokenizer(template=TEMPLATE), shipped=False)[0] is FORMS["deepseek_v3"]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "x", "template": "b"}, {"name": "default", "template": "a"}]}}, "a"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "x", "template": "b"}]}}, None),
        ({"tokenizer_config.json": {"chat_template": "b"}, "chat_template.jinja": "a"}, "a"),
    ],
)
def test_template_is_read_from_its_file_or_the_configuration(tmp_path: Path, files: Message, found: str | None) -> None:
    write_tokenizer(tmp_path, 96)
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).chat_template == found
