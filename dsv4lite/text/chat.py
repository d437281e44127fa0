"""DeepSeek-V4's chat format: messages in, the prompt's text out.

The release has no template; the prompt is built by code. The constant texts below and every separator are part of what the model
was trained on. ``render_messages`` returns the official text in parts, which tell the template from what messages and tools say, so
that only the template writes control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dsv4lite.checks import one_of, require
from dsv4lite.errors import InvalidRequestError, near_match, shown
from dsv4lite.text.tokenizer import BOS, EOS, Content

USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
TASKS = ("action", "query", "authority", "domain", "title", "extracted_url", "read_url")
"""Quick instructions: what ``task`` of a message may be; the token is ``<｜TASK｜>``."""

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
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efforts:
    """The reasoning efforts of one release.

    Attributes:
        texts: For every effort the release knows, the text that opens the prompt.
        aliases: What other names of API values mean here.
    """

    texts: Mapping[str, str]
    aliases: Mapping[str, str]

    def resolve(self, reasoning: str | None) -> str | None:
        """Return the effort that an API value means; ``None`` is not to think.

        Args:
            reasoning: ``"none"``, one of minimal, low, medium, high, xhigh, max; ``None``, the absent value, means ``"high"``.

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
"""Efforts of the refreshed releases (0731 and later), one level further up; their configuration has ``dspark_block_size``."""

CHAT_FORMS: Mapping[str, Efforts] = MappingProxyType({"deepseek_v4": PREVIEW, "deepseek_v4_refreshed": REFRESHED})
"""Chat formats by the names that families give (``Family.chat``)."""

Parts = tuple[str, ...]
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
            arguments}}``) and ``wo_eos`` (leave the turn open, to be continued); a tool message names its ``tool_call_id``; a
            system or developer message may have ``tools`` and ``response_format``; any message a ``task`` (one of ``TASKS``).
            Other fields have no place in the format and are ignored.
        reasoning: ``"none"`` is non-thinking mode; otherwise the effort, see ``Efforts.resolve``. The reasoning of turns before the
            last user message is left out, unless the conversation has tools.
        efforts: ``PREVIEW`` or ``REFRESHED``, by the checkpoint's release.
        tools: Added to the first system message, which is created in front if there is none.
        escape_results: Write ``</tool_result`` inside a tool's result as ``<\\/tool_result``, so that it cannot close its own tag.

    Returns:
        Parts of the text, in order. What comes from messages and tools is ``Content``; see ``Tokenizer.encode_parts``.

    Raises:
        InvalidRequestError: A message, a tool or ``reasoning`` is malformed; the text names the index.
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
    """One message of a user turn; ``call_id`` is ``None`` for what the user wrote, and a tool call's id for its result."""

    parts: Parts
    call_id: str | None = None


@dataclass(slots=True, kw_only=True)
class _Turn:
    """A part of the prompt. A user turn gathers ``blocks`` until the next turn; all others have their body from the start.

    ``call_order`` is the position of each tool call by its id, if the turn has calls.
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
    if not _is_list(messages):
        raise _malformed(f"messages must be a list of messages, not {type(messages).__name__}", messages)
    if not messages:
        raise _malformed("messages is empty", messages)
    if not (tools is None or _is_list(tools)):
        raise _malformed(f"the request's tools must be a list, not {type(tools).__name__}", tools)
    roles = [_role(message, f"messages[{i}]") for i, message in enumerate(messages)]
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
            turn = _Turn(role=role, body=(REMINDER, _content(message, where)))
        elif i == tools_at:
            turn = _system({**message, "tools": [*_list(message, "tools", where), *(tools or ())]}, where)
        else:
            turn = _system(message, where)
        turn.task = _task(message, where)
        turns.append(turn)
    _sort_results(turns)
    return turns


def _add_block(turns: list[_Turn], message: Mapping[str, Any], where: str, escape_results: bool) -> None:
    """Append a user or tool message to the open user turn, or open one. A task closes its turn to further user messages."""
    is_result = message["role"] == "tool"
    if is_result:
        text = _content(message, where, placeholders=True)
        if escape_results:
            text = Content(_RESULT_END.sub(r"<\\/", text))
        block = _Block(parts=("<tool_result>", text, "</tool_result>"), call_id=_text(message, "tool_call_id", where))
    else:
        block = _Block(parts=(_content(message, where),))
    task = None if is_result else _task(message, where)
    if turns and turns[-1].role == "user" and (is_result or turns[-1].task is None):
        turns[-1].blocks.append(block)
    else:
        turns.append(_Turn(role="user", task=task, blocks=[block]))


def _sort_results(turns: Sequence[_Turn]) -> None:
    """Put the tool results of every turn into the order of the latest calls, those of unknown calls first; text keeps its place."""
    order: Mapping[str, int] = {}
    for turn in turns:
        if turn.call_order is not None:
            order = turn.call_order
        results = sorted((b for b in turn.blocks if b.call_id is not None), key=lambda b: order.get(b.call_id or "", 0))
        ordered = iter(results)
        turn.blocks = [block if block.call_id is None else next(ordered) for block in turn.blocks]


def _system(message: Mapping[str, Any], where: str) -> _Turn:
    """Render a system or developer message with its tools and response format."""
    role: str = message["role"]
    body: list[str] = [USER, _content(message, where)] if role == "developer" else [_content(message, where, optional=True)]
    tools = _list(message, "tools", where)
    if tools:
        places = [f"tools[{i}] of {where}" for i in range(len(tools))]
        schemas = [_json(_function(tool, place), place) for tool, place in zip(tools, places, strict=True)]
        before, after = TOOLS.split("%TOOLS%")
        body += ["\n\n" + before, Content("\n".join(schemas)), after]
    if message.get("response_format"):
        body += ["\n\n" + RESPONSE_FORMAT, _json(message["response_format"], f"the response_format of {where}")]
    return _Turn(role=role, body=tuple(body), has_tools=bool(tools))


def _assistant(message: Mapping[str, Any], where: str) -> _Turn:
    """Render an assistant message."""
    calls = _list(message, "tool_calls", where)
    if not calls and "content" not in message and "reasoning_content" not in message:
        raise _malformed(f"{where} (assistant) has neither 'content' nor 'tool_calls'", message)
    body: list[str] = [_content(message, where, optional=True)]
    order: dict[str, int] = {}
    for i, call in enumerate(calls):
        place = f"tool_calls[{i}] of {where}"
        function = _function(call, place)
        body += ["\n" if i else f"\n\n<{DSML}tool_calls>\n", *_invoke(function, place)]
        id = _text(call, "id", place) or _text(function, "id", place)
        if id:
            order[id] = i
    if calls:
        body.append(f"\n</{DSML}tool_calls>")
    if not message.get("wo_eos"):
        body.append(EOS)
    reasoning = Content(_text(message, "reasoning_content", where))
    return _Turn(role="assistant", body=tuple(body), reasoning=reasoning, call_order=order if calls else None)


def _invoke(function: Mapping[str, Any], where: str) -> Iterator[str]:
    """Write one tool call. Strings are raw, everything else is JSON; arguments that are no JSON object become one string."""
    if "arguments" not in function:
        raise _malformed(f"the function of {where} has no 'arguments'", function)
    given = function["arguments"]
    arguments: object = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        arguments = {"arguments": given}
    yield f'<{DSML}invoke name="'
    yield Content(function["name"])
    yield '">\n'
    for i, (name, value) in enumerate(arguments.items()):
        is_text = isinstance(value, str)
        yield ("\n" if i else "") + f'<{DSML}parameter name="'
        yield Content(name) if isinstance(name, str) else _json(name, where)
        yield f'" string="{"true" if is_text else "false"}">'
        yield Content(value) if is_text else _json(value, where)
        yield f"</{DSML}parameter>"
    yield f"\n</{DSML}invoke>"


def _header(turn: _Turn, thinking: bool, reasons: bool) -> str:
    """Return what follows a turn before the assistant speaks; ``reasons``: the turn's answer begins with its reasoning."""
    if turn.task == "action":
        return ASSISTANT + (THINK if thinking else END_THINK) + "<｜action｜>"
    if turn.task is not None:
        return f"<｜{turn.task}｜>"
    if turn.role in ("user", "developer"):
        return ASSISTANT + (THINK if reasons else END_THINK)
    return ""


def _last_question(turns: Sequence[_Turn]) -> int:
    """Return the index of the last user or developer turn, -1 without one."""
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


# ---- checks ----


def json_text(value: object) -> str:
    """Return JSON as the format writes it: ``", "`` and ``": "``, characters unescaped, keys in their order."""
    return json.dumps(value, ensure_ascii=False)


def _json(value: object, where: str) -> Content:
    try:
        return Content(json_text(value))
    except (TypeError, ValueError, RecursionError) as error:  # no JSON value, a cycle, a huge integer, too deep
        raise _malformed(f"{where} cannot be written as JSON: {error}", value) from error


def _malformed(problem: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(problem, parameter="messages", value=value)


def _role(message: Mapping[str, Any], where: str) -> str:
    if not isinstance(message, Mapping) or "role" not in message:
        raise _malformed(f"{where} is not a mapping with a 'role'", message)
    role: str = message["role"]
    if role not in ROLES:
        raise _malformed(f"{where} has the unknown role {shown(role)}{near_match(role, ROLES)}", role)
    return role


def _task(message: Mapping[str, Any], where: str) -> str | None:
    task: str | None = message.get("task")
    if task is not None and task not in TASKS:
        raise _malformed(f"{where} has the unknown task {shown(task)}{near_match(task, TASKS)}", task)
    return task


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _list(message: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    """Return a field that is a list, or nothing."""
    found: Any = message.get(name) or ()
    if not _is_list(found):
        raise _malformed(f"the {name} of {where} must be a list, not {type(found).__name__}", found)
    return found  # type: ignore[no-any-return]  # checked two lines before


def _text(message: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that is a string, or the empty string."""
    found: object = message.get(name) or ""
    if not isinstance(found, str):
        raise _malformed(f"the {name} of {where} must be a string, not {shown(found)}", found)
    return found


def _function(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the ``function`` of a tool definition or tool call."""
    function: object = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _malformed(f"{where} has no 'function' with a 'name'", entry)
    schema = function.get("parameters") or {}
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties") or {}, Mapping):
        raise _malformed(f"the parameters of {where} must be the JSON schema of an object, not {shown(schema)}", entry)
    return function


def _content(message: Mapping[str, Any], where: str, *, optional: bool = False, placeholders: bool = False) -> Content:
    """Return a message's content as text.

    Args:
        message: The message; a list as content is joined by blank lines.
        where: What to call the message in errors.
        optional: ``None`` or no content is the empty string.
        placeholders: Write ``[Unsupported TYPE]`` for a part that is not text, as the format does in tool results.
    """
    content: object = message.get("content")
    if isinstance(content, str):
        return Content(content)
    if content is None and optional:
        return Content()
    if not isinstance(content, Sequence):
        raise _malformed(f"{where} ({message['role']}) needs a string as 'content', not {type(content).__name__}", content)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            texts.append(_text(part, "text", f"part {i} of {where}"))
        elif placeholders and kind is not None:
            texts.append(f"[Unsupported {kind if isinstance(kind, str) else shown(kind)}]")
        else:
            raise _malformed(f"part {i} of {where} is not text", part)
    return Content("\n\n".join(texts))
