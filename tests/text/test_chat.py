"""The chat encoder: the format's worked examples byte for byte, and a second implementation on random conversations."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lite.errors import InvalidRequestError
from dsv4lite.text.chat import EFFORT_1, EFFORT_2, PREVIEW, REFRESHED, TOOLS, Efforts, render_messages

Message = dict[str, Any]

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
BRIEF = {"role": "system", "content": "Be brief."}
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
}
ADD_LINE = (
    '{"name": "add", "description": "Adds.", "parameters": {"type": "object", '
    '"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}'
)


def encode_messages(messages: list[Message], **options: Any) -> str:
    """Return the text that the official encoder writes, whatever control tokens the messages contain."""
    return "".join(render_messages(messages, escape_results=False, **options))


def user(content: str, **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def assistant(content: str, reasoning: str | None = None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **({} if reasoning is None else {"reasoning_content": reasoning}), **more}


def call(id: str, name: str, arguments: str) -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str, content: Any) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": content}


GREETING = [user("Hi"), assistant("Hello!", "greet"), user("2+2?")]


# ---- texts ----


@pytest.mark.parametrize(
    ("text", "length", "digest"),
    [
        (TOOLS, 960, "1ebce52d36fda298157d67bf87e496ad48e2c4fb802f4ec64c610e49f52b5b98"),
        (EFFORT_1, 476, "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"),
        (EFFORT_2, 526, "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"),
    ],
    ids=["tools", "effort-1", "effort-2"],
)
def test_trained_texts_keep_every_byte(text: str, length: int, digest: str) -> None:
    assert (len(text), hashlib.sha256(text.encode()).hexdigest()) == (length, digest)


# ---- worked examples, numbered as in the format's description; 4 is an option that has no use here ----

CALLED = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
SCHEMA = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
EXAMPLES: dict[str, tuple[list[Message], str, str]] = {
    "1 non-thinking": (
        [BRIEF, user("Hi"), assistant("Hello!"), user("2+2?")],
        "none",
        f"Be brief.{U}Hi{A}</think>Hello!{E}{U}2+2?{A}</think>",
    ),
    "2 thinking": ([user("2+2?")], "high", f"{U}2+2?{A}<think>"),
    "3 old reasoning is dropped": (GREETING, "high", f"{U}Hi{A}</think>Hello!{E}{U}2+2?{A}<think>"),
    "5 the last reasoning is kept": (
        [*GREETING, assistant("4", "add")],
        "high",
        f"{U}Hi{A}</think>Hello!{E}{U}2+2?{A}<think>add</think>4{E}",
    ),
    "6 maximum effort": ([BRIEF, user("2+2?")], "max", f"{EFFORT_1}Be brief.{U}2+2?{A}<think>"),
    "7 neighbouring user messages": ([user("a"), user("b")], "none", f"{U}a\n\nb{A}</think>"),
    "9 content before a call": (
        [user("go"), assistant("Sure.", tool_calls=[call("c1", "f", "{}")]), result("c1", "R1")],
        "none",
        f"{U}go{A}</think>Sure.{CALLED}{E}{U}<tool_result>R1</tool_result>{A}</think>",
    ),
    "10 response format": (
        [{**BRIEF, "response_format": {"type": "object"}}, user("go")],
        "none",
        f'Be brief.\n\n{SCHEMA}{{"type": "object"}}{U}go{A}</think>',
    ),
    "11 reminder": (
        [BRIEF, {"role": "latest_reminder", "content": "2026-01-01"}, user("hi")],
        "none",
        f"Be brief.<｜latest_reminder｜>2026-01-01{U}hi{A}</think>",
    ),
    "12 action": ([user("weather?", task="action")], "high", f"{U}weather?{A}<think><｜action｜>"),
    "12 query": ([user("weather?", task="query")], "high", f"{U}weather?<｜query｜>"),
    "12 title": (
        [user("Hi"), assistant("Hello!", task="title"), assistant("Greeting")],
        "none",
        f"{U}Hi{A}</think>Hello!{E}<｜title｜>Greeting{E}",
    ),
    "13 continued answer": ([user("a"), assistant("The answer", "r", wo_eos=True)], "high", f"{U}a{A}<think>r</think>The answer"),
    "14 system message amid the conversation": (
        [user("a"), assistant("b"), {"role": "system", "content": "S2"}, user("c")],
        "none",
        f"{U}a{A}</think>b{E}S2{U}c{A}</think>",
    ),
}


@pytest.mark.parametrize(("messages", "reasoning", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_worked_example(messages: list[Message], reasoning: str, expected: str) -> None:
    assert encode_messages(messages, reasoning=reasoning) == B + expected


def test_example_8_tools_with_results_in_the_order_of_the_calls() -> None:
    calls = [
        call("c1", "add", r'{"a": 1, "note": "x \"y\""}'),
        call("c2", "add", "{}"),
        call("c3", "add", '{"l": [1, {"k": null}], "t": true}'),
    ]
    messages = [
        {**BRIEF, "tools": [{"type": "function", "function": ADD}]},
        user("go"),
        assistant("", "need tools", tool_calls=calls),
        result("c2", "R2"),
        result("c1", "R1"),
        result("c3", "R3"),
        user("and?"),
    ]
    rest = """<｜User｜>go<｜Assistant｜><think>need tools</think>

<｜DSML｜tool_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
<｜DSML｜parameter name="note" string="true">x "y"</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="add">

</｜DSML｜invoke>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="l" string="false">[1, {"k": null}]</｜DSML｜parameter>
<｜DSML｜parameter name="t" string="false">true</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>R1</tool_result>

<tool_result>R2</tool_result>

<tool_result>R3</tool_result>

and?<｜Assistant｜><think>"""
    expected = f"{B}Be brief.\n\n{TOOLS.replace('%TOOLS%', ADD_LINE)}{rest}"
    assert encode_messages(messages, reasoning="high") == expected
    without = [{k: v for k, v in m.items() if k != "tools"} for m in messages]
    assert encode_messages(without, reasoning="high", tools=messages[0]["tools"]) == expected


# ---- effort ----


@pytest.mark.parametrize(
    ("efforts", "no_text", "texts"),
    [
        (PREVIEW, (None, "minimal", "low", "medium", "high"), {"xhigh": EFFORT_1, "max": EFFORT_1}),
        (REFRESHED, ("minimal", "low", "medium"), {None: EFFORT_1, "high": EFFORT_1, "xhigh": EFFORT_1, "max": EFFORT_2}),
    ],
    ids=["preview", "refreshed"],
)
def test_effort_opens_the_prompt_by_release(efforts: Efforts, no_text: tuple[str | None], texts: dict[str | None, str]) -> None:
    assert encode_messages([user("q")], reasoning="none", efforts=efforts) == f"{B}{U}q{A}</think>"
    for reasoning, text in {**dict.fromkeys(no_text, ""), **texts}.items():
        assert encode_messages([user("q")], reasoning=reasoning, efforts=efforts) == f"{B}{text}{U}q{A}<think>"


def test_unknown_effort_is_rejected_with_a_near_match() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean 'high'") as caught:
        encode_messages([user("q")], reasoning="hihg")
    assert caught.value.parameter == "reasoning"


# ---- tools of the request, system messages ----


def test_request_tools_create_a_system_message() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "é"}}]
    text = TOOLS.replace("%TOOLS%", '{"name": "f"}\n{"name": "é"}')
    assert encode_messages([user("go")], tools=tools) == f"{B}\n\n{text}{U}go{A}</think>"


def test_request_tools_join_those_of_the_first_system_message() -> None:
    own, more = {"function": {"name": "own"}}, {"function": {"name": "more"}}
    messages = [user("a"), {**BRIEF, "tools": [own]}, user("b"), BRIEF]
    text = TOOLS.replace("%TOOLS%", '{"name": "own"}\n{"name": "more"}')
    assert encode_messages(messages, tools=[more]) == f"{B}{U}aBe brief.\n\n{text}{U}bBe brief."
    assert messages[1]["tools"] == [own], "the caller's messages stay as they are"


def test_tools_keep_the_reasoning_of_every_turn() -> None:
    text = encode_messages(GREETING, reasoning="high", tools=[{"function": {"name": "f"}}])
    assert f"{A}<think>greet</think>Hello!" in text


# ---- contents ----


def test_lists_of_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert encode_messages([user("q"), assistant("", tool_calls=[call("c", "f", "{}")]), result("c", parts)]).endswith(
        f"<tool_result>a\n\nb</tool_result>{A}</think>"
    )
    assert encode_messages([{"role": "user", "content": parts}]) == f"{B}{U}a\n\nb{A}</think>"


def test_other_parts_are_placeholders_in_results_and_errors_elsewhere() -> None:
    image = [{"type": "image_url", "image_url": "x"}]
    assert "<tool_result>[Unsupported image_url]</tool_result>" in encode_messages([result("c", image)])
    with pytest.raises(InvalidRequestError, match=r"part 0 of messages\[1\] is not text"):
        encode_messages([BRIEF, {"role": "user", "content": image}])


@pytest.mark.parametrize("arguments", ["not json", "[1, 2]", '{"a": 1', "3"])
def test_arguments_that_are_no_object_become_one_string(arguments: str) -> None:
    text = encode_messages([assistant("", tool_calls=[call("c", "f", arguments)])])
    assert f'<｜DSML｜parameter name="arguments" string="true">{arguments}</｜DSML｜parameter>' in text


def test_arguments_may_be_an_object_already() -> None:
    spelled, given = call("c", "f", '{"a": "ä", "b": [1]}'), {"function": {"name": "f", "arguments": {"a": "ä", "b": [1]}}}
    assert encode_messages([assistant("", tool_calls=[given])]) == encode_messages([assistant("", tool_calls=[spelled])])


# ---- a second implementation, message by message, on random conversations ----


def second_encoder(messages: list[Message], thinking: bool, text: str) -> str:
    """Encode plain dictionaries with as little structure as possible; a block is (kind, call id, content)."""

    def dumps(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    def extras(m: Message) -> str:
        s = ""
        if m.get("tools"):
            s += "\n\n" + TOOLS.replace("%TOOLS%", "\n".join(dumps(t["function"]) for t in m["tools"]))
        if m.get("response_format"):
            s += "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n" + dumps(
                m["response_format"]
            )
        return s

    def calls(entries: list[Message]) -> str:
        invokes = []
        for function in (c["function"] for c in entries):
            try:
                arguments = json.loads(function["arguments"])
            except ValueError:
                arguments = {"arguments": function["arguments"]}
            lines = []
            for k, v in arguments.items():
                kind, shown = ("true", v) if isinstance(v, str) else ("false", dumps(v))
                lines.append(f'<｜DSML｜parameter name="{k}" string="{kind}">{shown}</｜DSML｜parameter>')
            invokes.append('<｜DSML｜invoke name="{}">\n{}\n</｜DSML｜invoke>'.format(function["name"], "\n".join(lines)))
        return "\n\n<｜DSML｜tool_calls>\n{}\n</｜DSML｜tool_calls>".format("\n".join(invokes))

    def block(b: tuple[str, str, Any]) -> str:
        kind, _, content = b
        if kind == "text":
            return str(content)
        if isinstance(content, list):
            content = "\n\n".join(x["text"] if x["type"] == "text" else f"[Unsupported {x['type']}]" for x in content)
        return f"<tool_result>{content}</tool_result>"

    merged: list[Message] = []
    for m in messages:
        if m["role"] not in ("tool", "user"):
            merged.append(dict(m))
            continue
        entry = ("tool" if m["role"] == "tool" else "text", m.get("tool_call_id", ""), m["content"])
        previous = merged[-1] if merged else {}
        if "blocks" in previous and (m["role"] == "tool" or previous.get("task") is None):
            previous["blocks"].append(entry)
        else:
            merged.append({"role": "user", "blocks": [entry], "task": m.get("task") if m["role"] == "user" else None})
    order: dict[str, int] = {}
    for m in merged:
        if m.get("tool_calls"):
            order = {c["id"]: i for i, c in enumerate(m["tool_calls"])}
        elif "blocks" in m:
            ordered = sorted((b for b in m["blocks"] if b[0] == "tool"), key=lambda b: order.get(b[1], 0))
            m["blocks"] = [ordered.pop(0) if b[0] == "tool" else b for b in m["blocks"]]

    drop = not any(m.get("tools") for m in merged)
    questions = [i for i, m in enumerate(merged) if m["role"] in ("user", "developer")]
    last = questions[-1] if questions else -1
    if thinking and drop:
        merged = [m for i, m in enumerate(merged) if i >= last or m["role"] != "developer"]
        questions = [i for i, m in enumerate(merged) if m["role"] in ("user", "developer")]
        last = questions[-1] if questions else -1
    s = B + text
    for i, m in enumerate(merged):
        role, task = m["role"], m.get("task")
        if role == "system":
            s += (m.get("content") or "") + extras(m)
        elif role == "developer":
            s += U + m["content"] + extras(m)
        elif role == "user":
            s += U + "\n\n".join(map(block, m["blocks"]))
        elif role == "latest_reminder":
            s += "<｜latest_reminder｜>" + m["content"]
        else:
            if thinking and (i == 0 or merged[i - 1].get("task") is None) and (not drop or i > last):
                s += (m.get("reasoning_content") or "") + "</think>"
            s += (m.get("content") or "") + (calls(m["tool_calls"]) if m.get("tool_calls") else "")
            s += "" if m.get("wo_eos") else E
        following = merged[i + 1]["role"] if i + 1 < len(merged) else None
        if following not in (None, "assistant", "latest_reminder"):
            continue
        if task is not None:
            s += (A + ("<think>" if thinking else "</think>") if task == "action" else "") + f"<｜{task}｜>"
        elif role in ("user", "developer"):
            s += A + ("<think>" if thinking and (not drop or i >= last) else "</think>")
    return s


words = st.text('ab\n<é"', max_size=4)
ids = st.sampled_from(["c0", "c1", "c2", "other"])
tasks = st.sampled_from([{}, {}, {}, {"task": "action"}, {"task": "query"}, {"task": "title"}])
values = st.one_of(
    words, st.integers(), st.booleans(), st.none(), st.lists(st.integers(), max_size=2), st.dictionaries(words, words)
)
arguments = st.one_of(
    st.dictionaries(st.text("pq", min_size=1, max_size=2), values, max_size=3).map(json.dumps), st.just("{broken"), st.just("")
)
tool_calls = st.lists(st.builds(call, ids, st.sampled_from("fg"), arguments), max_size=3)
parts = st.lists(st.one_of(st.builds(dict, type=st.just("text"), text=words), st.just({"type": "image_url"})), max_size=2)
tool_lists = st.sampled_from([{}, {}, {}, {"tools": [{"type": "function", "function": ADD}]}])
formats = st.sampled_from([{}, {}, {"response_format": {"type": "object", "title": "ä"}}])


def merge(*parts: Message) -> Message:
    return {k: v for part in parts for k, v in part.items()}


message = st.one_of(
    st.builds(merge, st.builds(user, words), tasks),
    st.builds(merge, st.builds(user, words), tasks),
    st.builds(result, ids, st.one_of(words, parts)),
    st.builds(
        merge,
        st.builds(assistant, words, st.none() | words),
        st.builds(dict, tool_calls=tool_calls),
        tasks,
        st.sampled_from([{}, {}, {"wo_eos": True}]),
    ),
    st.builds(merge, st.builds(dict, role=st.just("system"), content=st.none() | words), tool_lists, formats, tasks),
    st.builds(merge, st.builds(dict, role=st.just("developer"), content=words), tool_lists, formats, tasks),
    st.builds(dict, role=st.just("latest_reminder"), content=words),
)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(message, min_size=1, max_size=9),
    st.sampled_from([(PREVIEW, "none", ""), (PREVIEW, "high", ""), (PREVIEW, "max", EFFORT_1), (REFRESHED, "max", EFFORT_2)]),
)
def test_random_conversations_equal_the_second_implementation(messages: list[Message], effort: tuple[Efforts, str, str]) -> None:
    efforts, reasoning, text = effort
    before = json.dumps(messages)
    assert encode_messages(messages, reasoning=reasoning, efforts=efforts) == second_encoder(messages, reasoning != "none", text)
    assert json.dumps(messages) == before
