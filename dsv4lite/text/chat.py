"""DeepSeek-V4's chat format: messages in, the prompt's text out.

The release ships no chat template, so code builds the prompt. The model was trained on the constant texts below and on every
separator. ``render_messages`` returns the official text in parts, which separate the template from the contents of messages and
tools, so that only the template can write control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dsv4lite.checks import one_of, require
from dsv4lite.errors import near_match, shown
from dsv4lite.text.messages import (
    ASSISTANT,
    END_THINK,
    THINK,
    USER,
    Parts,
    call_order,
    content_of,
    list_of,
    malformed,
    roles_of,
    sort_results,
    system_parts,
    text_of,
)
from dsv4lite.text.releases import DSML_CALLS, answer_parts
from dsv4lite.text.tokenizer import BOS, Content

REMINDER = "<｜latest_reminder｜>"
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
TASKS = ("action", "query", "authority", "domain", "title", "extracted_url", "read_url")
"""Quick instructions, the values of a message's ``task``; each has a token ``<｜TASK｜>``."""

EFFORT_1 = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and "
    "rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
EFFORT_2 = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem "
    "into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any "
    "surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no "
    "assumption remains unchecked and no error remains undiscovered.\n\n"
)
TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" \
block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any \
tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

%TOOLS%

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efforts:
    """The reasoning efforts of one release.

    Attributes:
        texts: For each effort of the release, the text that opens the prompt.
        aliases: Further API values, with the effort of the release that each stands for.
    """

    texts: Mapping[str, str]
    aliases: Mapping[str, str]

    def resolve(self, reasoning: str | None) -> str | None:
        """Return the effort for an API value; ``None`` turns reasoning off.

        Args:
            reasoning: none, minimal, low, medium, high, xhigh or max; ``None``, the absent value, stands for ``"high"``.

        Raises:
            InvalidRequestError: The value is unknown.
        """
        if reasoning == "none":
            return None
        wanted = "high" if reasoning is None else reasoning
        known = ("none", *self.texts, *self.aliases)
        problem = one_of(*known)(wanted)
        require(not problem, "reasoning", reasoning, problem)
        return self.aliases.get(wanted, wanted)


PREVIEW = Efforts(
    texts=MappingProxyType({"high": "", "max": EFFORT_1}),
    aliases=MappingProxyType({"minimal": "high", "low": "high", "medium": "high", "xhigh": "max"}),
)
"""Efforts of the preview releases."""
REFRESHED = Efforts(
    texts=MappingProxyType({"low": "", "high": EFFORT_1, "max": EFFORT_2}),
    aliases=MappingProxyType({"minimal": "low", "medium": "low", "xhigh": "high"}),
)
"""Efforts of the refreshed releases (0731 and later), with a new highest level; their configs have ``dspark_block_size``."""

_RESULT_END = re.compile("</(?=tool_result)", re.IGNORECASE)


def render_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    reasoning: str | None = "none",
    efforts: Efforts = PREVIEW,
    tools: Sequence[Mapping[str, Any]] | None = None,
    escape_results: bool = True,
) -> Parts:
    """Return the prompt of a conversation, from BOS to the header of the turn that the model continues.

    Args:
        messages: OpenAI-style. ``role`` is system, developer, user, assistant, tool or latest_reminder. ``content`` is a string or
            a list of text parts. An assistant message may have ``reasoning_content``, ``tool_calls`` (each ``{id, function: {name,
            arguments}}``) and ``wo_eos`` (the model continues the turn); a tool message names its ``tool_call_id``; a
            system or developer message may have ``tools`` and ``response_format``; any message a ``task`` (one of ``TASKS``).
            Other fields are ignored.
        reasoning: ``"none"`` is non-thinking mode; otherwise the effort, see ``Efforts.resolve``. The reasoning of turns before the
            last user message is left out, unless the conversation has tools.
        efforts: ``PREVIEW`` or ``REFRESHED``, by the checkpoint's release.
        tools: Added to the first system message; without one, to a new system message in front.
        escape_results: Write ``</tool_result`` inside a tool's result as ``<\\/tool_result``, so that it cannot close its own tag.

    Returns:
        Parts of the text, in order. The contents of messages and tools are ``Content``; see ``Tokenizer.encode_parts``.

    Raises:
        InvalidRequestError: A message, a tool or ``reasoning`` is malformed; the error names the index.
    """
    effort = efforts.resolve(reasoning)
    thinking = effort is not None
    turns = _turns(messages, tools, escape_results)
    keep_all = any(turn.has_tools for turn in turns)
    last = _last_question(turns)
    if thinking and not keep_all:
        turns = [turn for i, turn in enumerate(turns) if i >= last or turn.role != "developer"]
        last = _last_question(turns)
    text: list[str] = [BOS, "" if effort is None else efforts.texts[effort]]
    for i, turn in enumerate(turns):
        if turn.role == "assistant" and thinking and (keep_all or i > last) and not (i > 0 and turns[i - 1].task):
            text += [turn.reasoning, END_THINK]
        text += turn.parts()
        following = turns[i + 1].role if i + 1 < len(turns) else None
        if following in (None, "assistant", "latest_reminder"):
            text.append(_header(turn, thinking, thinking and (keep_all or i >= last)))
    return tuple(text)


# ---- messages to turns ----


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One message of a user turn: a tool result with the ``call_id`` of its call, or a user message with ``None``."""

    parts: Parts
    call_id: str | None = None


@dataclass(slots=True, kw_only=True)
class _Turn:
    """A turn of the prompt. A user turn collects ``blocks``; other turns have a ``body``.

    ``call_order`` maps the ids of a turn's tool calls to their positions; ``None`` without calls.
    """

    role: str
    body: Parts = ()
    reasoning: str = ""
    task: str | None = None
    has_tools: bool = False
    blocks: list[_Block] = field(default_factory=list)
    call_order: Mapping[str, int] | None = None

    def parts(self) -> Iterator[str]:
        yield from self.body
        for i, block in enumerate(self.blocks):
            yield "\n\n" if i else USER
            yield from block.parts


def _turns(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, escape_results: bool) -> list[_Turn]:
    """Check the messages and merge neighbouring user and tool messages into turns."""
    roles = roles_of(messages, tools, ROLES)
    tools_at = roles.index("system") if tools and "system" in roles else None
    turns: list[_Turn] = []
    if tools and tools_at is None:
        turns.append(_system({"role": "system", "tools": tools}, "the request"))
    for i, (role, message) in enumerate(zip(roles, messages)):
        where = f"messages[{i}]"
        if role in ("user", "tool"):
            _add_block(turns, message, where, escape_results)
            continue
        if role == "assistant":
            turn = _assistant(message, where)
        elif role == "latest_reminder":
            turn = _Turn(role=role, body=(REMINDER, content_of(message, where)))
        elif i == tools_at:
            turn = _system({**message, "tools": [*list_of(message, "tools", where), *(tools or ())]}, where)
        else:
            turn = _system(message, where)
        turn.task = _task(message, where)
        turns.append(turn)
    _sort_results(turns)
    return turns


def _add_block(turns: list[_Turn], message: Mapping[str, Any], where: str, escape_results: bool) -> None:
    """Append a user or tool message to the open user turn, or open one. After a task, only tool messages join the turn."""
    is_result = message["role"] == "tool"
    if is_result:
        text = content_of(message, where, placeholders=True)
        if escape_results:
            text = Content(_RESULT_END.sub(r"<\\/", text))
        block = _Block(parts=("<tool_result>", text, "</tool_result>"), call_id=text_of(message, "tool_call_id", where))
    else:
        block = _Block(parts=(content_of(message, where),))
    task = None if is_result else _task(message, where)
    if turns and turns[-1].role == "user" and (is_result or turns[-1].task is None):
        turns[-1].blocks.append(block)
    else:
        turns.append(_Turn(role="user", task=task, blocks=[block]))


def _sort_results(turns: Sequence[_Turn]) -> None:
    """Sort the tool results of each turn by the order of the latest calls; user text stays put."""
    order: Mapping[str, int] = {}
    for turn in turns:
        if turn.call_order is not None:
            order = turn.call_order
        results = [block for block in turn.blocks if block.call_id is not None]
        ordered = iter(sort_results(results, order, lambda block: block.call_id or ""))
        turn.blocks = [block if block.call_id is None else next(ordered) for block in turn.blocks]


def _system(message: Mapping[str, Any], where: str) -> _Turn:
    """Render a system or developer message with its tools and response format."""
    role: str = message["role"]
    content = (USER, content_of(message, where)) if role == "developer" else (content_of(message, where, optional=True),)
    return _Turn(role=role, body=(*content, *system_parts(message, where, TOOLS)), has_tools=bool(message.get("tools")))


def _assistant(message: Mapping[str, Any], where: str) -> _Turn:
    """Render an assistant message."""
    body = tuple(answer_parts(message, where, DSML_CALLS))
    calls = list_of(message, "tool_calls", where)
    order = call_order(message, where) if calls else None
    reasoning = Content(text_of(message, "reasoning_content", where))
    return _Turn(role="assistant", body=body, reasoning=reasoning, call_order=order)


def _header(turn: _Turn, thinking: bool, reasons: bool) -> str:
    """Return the text between a turn and the assistant's answer; ``reasons``: the answer begins with reasoning."""
    if turn.task == "action":
        return ASSISTANT + (THINK if thinking else END_THINK) + "<｜action｜>"
    if turn.task is not None:
        return f"<｜{turn.task}｜>"
    if turn.role in ("user", "developer"):
        return ASSISTANT + (THINK if reasons else END_THINK)
    return ""


def _last_question(turns: Sequence[_Turn]) -> int:
    """Return the index of the last user or developer turn; -1 if there is none."""
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _task(message: Mapping[str, Any], where: str) -> str | None:
    task: str | None = message.get("task")
    if task is not None and task not in TASKS:
        raise malformed(f"{where} has the unknown task {shown(task)}{near_match(task, TASKS)}", task)
    return task
