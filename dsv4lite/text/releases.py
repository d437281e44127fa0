"""The chat formats of V3, R1, V3.1 and V3.2: one table of marks and rules, and one encoder.

Sources: the templates in the releases' repositories, and V3.2's encoder program. V3 and R1 publish no text that describes tools;
they get V3.1's wording with their own form of a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from dsv4lite.checks import one_of, require
from dsv4lite.text.messages import (
    ASSISTANT,
    DSML,
    END_THINK,
    THINK,
    USER,
    Parts,
    arguments_of,
    call_order,
    content_of,
    dsml_call,
    function_of,
    json_content,
    list_of,
    malformed,
    roles_of,
    sort_results,
    system_parts,
    text_of,
)
from dsv4lite.text.tokenizer import BOS, EOS, Content, Tokenizer

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, CALL_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_RESULT_END = re.compile("</(?=result|function_results)", re.IGNORECASE)
_SECTIONS = """## Tools
You have access to the following tools:

%TOOLS%
IMPORTANT: ALWAYS adhere to this exact format for tool use:
{call}{{{{additional_tool_calls}}}}<｜tool▁calls▁end｜>

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, {several}
"""
_FUNCTIONS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON \
format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, \
arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an \
example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
%TOOLS%
</functions>
"""

Message = Mapping[str, Any]
Turn = tuple[str, Message, str]
"""The role of a message, the message, and its name in errors."""


class Marks(NamedTuple):
    """Text around tool calls or results: ``first`` and ``last`` around all of a turn, ``before`` and ``after`` each."""

    first: str
    before: str
    after: str
    between: str
    last: str


class CallForm(NamedTuple):
    """How a release writes tool calls: their marks, and the separator of name and arguments; ``""`` stands for DSML."""

    marks: Marks
    separator: str = ""


DSML_CALLS = CallForm(Marks(f"\n\n<{DSML}tool_calls>\n", "", "", "\n", f"\n</{DSML}tool_calls>"))
"""V4's calls."""


def call_marker(form: CallForm, tokenizer: Tokenizer) -> str | None:
    """Return the added token that begins all calls; ``None`` if the vocabulary lacks it."""
    return next(iter(tokenizer.split_added(form.marks.first)[1:]), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The marks and rules of one release.

    Attributes:
        thinks: When the model reasons before it answers. ``"asked"``: unless ``reasoning`` is ``"none"``.
        headers: Text after a question: before an answer without reasoning, and before one with reasoning.
        each_question: A header follows every user message, not only those that an answer follows.
        keeps_reasoning: Assistant messages after the last question keep their reasoning.
        splits: Most ``</think>`` at which a past answer is split; only the last piece is kept. -1: no limit.
        tools: Text about tools; ``%TOOLS%`` stands for their descriptions.
        schemas: Tools are lines of JSON, and system messages stay in place. Otherwise tools are sections of text, and all system
            messages are joined at the beginning of the prompt.
        calls: How the model writes tool calls.
        results: Text around tool results.
        after_results: Text after the results: before an answer without reasoning, and before one with reasoning.
    """

    thinks: Literal["never", "always", "asked"]
    headers: tuple[str, str]
    each_question: bool = False
    keeps_reasoning: bool = False
    splits: int = 0
    tools: str
    schemas: bool = False
    calls: CallForm
    results: Marks
    after_results: tuple[str, str] = ("", "")


_FENCED = f"{CALL}function{CALL_SEPARATOR}"
_V3 = Release(
    thinks="never",
    headers=(ASSISTANT, ASSISTANT),
    each_question=True,
    tools=_SECTIONS.format(
        call=f"{CALLS}{_FENCED}tool_call_name\n```json\ntool_call_arguments\n```{END_CALL}",
        several="put each of them on a new line",
    ),
    calls=CallForm(Marks(CALLS, _FENCED, f"\n```{END_CALL}", "\n", END_CALLS), "\n```json\n"),
    results=Marks("<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "\n", "<｜tool▁outputs▁end｜>"),
)
RELEASES: Mapping[str, Release] = MappingProxyType(
    {
        "deepseek_v3": _V3,
        "deepseek_r1": replace(_V3, thinks="always", headers=(ASSISTANT, f"{ASSISTANT}{THINK}\n"), each_question=False, splits=-1),
        "deepseek_r1_0528": replace(_V3, thinks="always", splits=-1),  # the model opens its reasoning itself
        "deepseek_v31": Release(
            thinks="asked",
            headers=(ASSISTANT + END_THINK, ASSISTANT + THINK),
            splits=1,
            tools=_SECTIONS.format(
                call=f"{CALLS}{CALL}tool_call_name{CALL_SEPARATOR}tool_call_arguments{END_CALL}",
                several="chain them directly without separators or spaces",
            ),
            calls=CallForm(Marks(CALLS, CALL, END_CALL, "", END_CALLS), CALL_SEPARATOR),
            results=Marks("", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "", ""),
        ),
        "deepseek_v32": Release(
            thinks="asked",
            headers=(ASSISTANT + END_THINK, ASSISTANT + THINK),
            each_question=True,
            keeps_reasoning=True,
            tools=_FUNCTIONS,
            schemas=True,
            calls=CallForm(Marks(f"\n\n<{DSML}function_calls>\n", "", "", "\n", f"\n</{DSML}function_calls>")),
            results=Marks("\n\n<function_results>", "\n<result>", "</result>", "", "\n</function_results>"),
            after_results=("\n\n" + END_THINK, "\n\n" + THINK),
        ),
    }
)


def render_release(
    messages: Sequence[Message],
    *,
    release: Release,
    reasoning: str | None = "none",
    tools: Sequence[Message] | None = None,
    escape_results: bool = True,
) -> Parts:
    """Return the prompt of a conversation, from BOS to the header of the turn that the model continues.

    Args:
        messages: OpenAI-style, as in ``chat.render_messages``, without ``task`` and latest_reminder. Only V3.2 has developer
            messages and ``response_format``.
        release: One of ``RELEASES``.
        reasoning: ``"none"`` is non-thinking mode, any other effort thinking mode; ``None`` is thinking mode if the release has
            one. V3 never thinks, and R1 always does. Past answers lose their reasoning.
        tools: Added to the first system message; without one, to a new system message in front.
        escape_results: Write ``</result`` inside a result of V3.2 as ``<\\/result``, so that it cannot close its own tag.

    Returns:
        As ``chat.render_messages``.

    Raises:
        InvalidRequestError: A message, a tool or ``reasoning`` is malformed; the error names the index.
    """
    turns = _with_sorted_results(_turns(messages, tools, release))
    thinking = _thinks(release, reasoning)
    last = max((i for i, (role, _, _) in enumerate(turns) if role in ("user", "developer")), default=-1)
    parts, open_calls = [BOS], 0
    for i, (role, message, where) in enumerate(turns):
        open_calls = open_calls if role == "tool" else 0
        following = turns[i + 1][0] if i + 1 < len(turns) else None
        reasons = thinking and i >= last and (release.keeps_reasoning or following is None)
        if role == "system":
            parts.append(content_of(message, where, optional=True))
            parts += system_parts(message, where, release.tools, json_content if release.schemas else _section)
        elif role == "developer" and thinking and i < last:
            continue
        elif role in ("user", "developer"):
            parts.append(USER)
            if role == "developer":
                parts += [*system_parts(message, where, release.tools), "\n\n# The user's message is: "]
            parts.append(content_of(message, where))
            if release.each_question or following in (None, "assistant"):
                parts.append(release.headers[reasons])
        elif role == "tool":
            if not open_calls:
                raise malformed(f"{where} (tool) has no tool call before it that is without a result", message)
            first = turns[i - 1][0] != "tool"
            open_calls -= 1
            text = content_of(message, where, placeholders=True)
            text = Content(_RESULT_END.sub(r"<\\/", text)) if escape_results and release.schemas else text
            parts += [release.results.first if first else release.results.between, release.results.before, text]
            parts.append(release.results.after)
            if following != "tool":
                parts += [release.results.last, release.after_results[reasons]]
        else:
            keeps = thinking and release.keeps_reasoning and i > last
            parts += answer_parts(message, where, release.calls, splits=release.splits, keeps=keeps)
            open_calls = len(list_of(message, "tool_calls", where))
    return tuple(parts)


def _thinks(release: Release, reasoning: str | None) -> bool:
    """Return whether answers begin with reasoning; raise ``InvalidRequestError`` for an unknown effort."""
    wanted = reasoning if reasoning is not None else "none" if release.thinks == "never" else "high"
    problem = one_of(*(EFFORTS[:1] if release.thinks == "never" else EFFORTS))(wanted)
    require(not problem, "reasoning", reasoning, problem)
    return release.thinks == "always" or wanted != "none"


def _turns(messages: Sequence[Message], tools: Sequence[Message] | None, release: Release) -> list[Turn]:
    """Check the roles of the messages; add the request's tools to a system message."""
    known = ("system", *(("developer",) if release.schemas else ()), "user", "assistant", "tool")
    roles = roles_of(messages, tools, known)
    turns = [(role, message, f"messages[{i}]") for i, (role, message) in enumerate(zip(roles, messages))]
    heads = [turn for turn in turns if turn[0] == "system"]
    heads = heads[:1] if release.schemas else heads
    if not heads and not tools:
        return turns
    head = {
        "role": "system",
        "content": "\n\n".join(content_of(message, where, optional=True) for _, message, where in heads),
        "tools": [*(tool for _, message, where in heads for tool in list_of(message, "tools", where)), *(tools or ())],
        "response_format": heads[0][1].get("response_format") if release.schemas and heads else None,
    }
    place = turns.index(heads[0]) if release.schemas and heads else 0
    rest = [turn for turn in turns if turn not in heads]
    return [*rest[:place], ("system", head, heads[0][2] if heads else "the request"), *rest[place:]]


def _with_sorted_results(turns: Sequence[Turn]) -> list[Turn]:
    """Sort the tool results that follow each assistant message by the order of its calls."""
    found: list[Turn] = []
    order: Mapping[str, int] = {}
    for role, group in groupby(turns, key=lambda turn: turn[0]):
        run = list(group)
        found += sort_results(run, order, lambda turn: text_of(turn[1], "tool_call_id", turn[2])) if role == "tool" else run
        order = call_order(*run[-1][1:]) if role == "assistant" else {}
    return found


def _section(function: Message, where: str) -> str:
    """Describe a tool's function."""
    about, schema = text_of(function, "description", where), json_content(function.get("parameters") or {}, where)
    return f"### {function['name']}\nDescription: {about}\n\nParameters: {schema}\n"


def answer_parts(message: Message, where: str, form: CallForm, *, splits: int = 0, keeps: bool = False) -> Iterator[str]:
    """Yield an assistant message; ``splits``: see ``Release``; ``keeps``: with its reasoning."""
    calls, (marks, separator) = list_of(message, "tool_calls", where), form
    if not calls and "content" not in message and "reasoning_content" not in message:
        raise malformed(f"{where} (assistant) has neither 'content' nor 'tool_calls'", message)
    if keeps:
        reasoning = text_of(message, "reasoning_content", where)
        if not reasoning and not calls:
            raise malformed(f"{where} (assistant) follows the last question: it needs 'reasoning_content' or 'tool_calls'", message)
        yield from (Content(reasoning), END_THINK)
    yield Content(content_of(message, where, optional=True).split(END_THINK, splits)[-1])
    for i, call in enumerate(calls):
        place = f"tool_calls[{i}] of {where}"
        function = function_of(call, place)
        yield (marks.between if i else marks.first) + marks.before
        if not separator:
            yield from dsml_call(function, place)
            continue
        given = arguments_of(function, place)
        text = Content(given) if isinstance(given, str) else json_content(given, place)
        yield from (Content(function["name"]), separator, text, marks.after)
    if calls:
        yield marks.last
    if not message.get("wo_eos"):
        yield EOS
