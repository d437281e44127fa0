"""Shared by all chat formats: checked access to the fields of messages, and the DSML tool calls of V3.2 and V4."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dsv4lite.errors import InvalidRequestError, near_match, shown
from dsv4lite.text.tokenizer import Content

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

T = TypeVar("T")
Parts = tuple[str, ...]
"""A prompt's text, in order; the contents of messages and tools are ``Content``."""


def json_text(value: object) -> str:
    """Return JSON as the formats write it: separators ``", "`` and ``": "``, no escapes of non-ASCII characters, keys in order."""
    return json.dumps(value, ensure_ascii=False)


def json_content(value: object, where: str) -> Content:
    """Return a value as JSON; ``where`` names it in errors."""
    try:
        return Content(json_text(value))
    except (TypeError, ValueError, RecursionError) as error:  # not a JSON value, a cycle, a huge integer, nesting too deep
        raise malformed(f"{where} cannot be written as JSON: {error}", value) from error


def malformed(problem: str, value: object) -> InvalidRequestError:
    """Return the error for a malformed conversation."""
    return InvalidRequestError(problem, parameter="messages", value=value)


def roles_of(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, roles: Sequence[str]) -> list[str]:
    """Return the roles of a conversation's messages, each one of ``roles``.

    Raises:
        InvalidRequestError: There is no message, a role is unknown, or messages or tools are not lists.
    """
    if not is_list(messages):
        example = "write [{'role': 'user', 'content': ...}]" if isinstance(messages, (str, Mapping)) else ""
        problem = f"messages must be a list of messages, not {type(messages).__name__}"
        raise malformed(f"{problem}; {example}" if example else problem, messages)
    if not messages:
        raise malformed("messages is empty", messages)
    if not (tools is None or is_list(tools)):
        raise malformed(f"the request's tools must be a list, not {type(tools).__name__}", tools)
    return [_role(message, f"messages[{i}]", roles) for i, message in enumerate(messages)]


def _role(message: Mapping[str, Any], where: str, roles: Sequence[str]) -> str:
    if not isinstance(message, Mapping) or "role" not in message:
        raise malformed(f"{where} is not a mapping with a 'role'", message)
    role: str = message["role"]
    if role not in roles:
        raise malformed(f"{where} has the unknown role {shown(role)}{near_match(role, roles)}", role)
    return role


def is_list(value: object) -> bool:
    """Whether a value is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def list_of(message: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    """Return a field that must be a list; an empty sequence if it is absent."""
    found: Any = message.get(name) or ()
    if not is_list(found):
        raise malformed(f"the {name} of {where} must be a list, not {type(found).__name__}", found)
    return found  # type: ignore[no-any-return]  # checked two lines before


def text_of(message: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that must be a string; the empty string if it is absent."""
    found: object = message.get(name) or ""
    if not isinstance(found, str):
        raise malformed(f"the {name} of {where} must be a string, not {shown(found)}", found)
    return found


def function_of(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the ``function`` of a tool definition or tool call."""
    function: object = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise malformed(f"{where} has no 'function' with a 'name'", entry)
    schema = function.get("parameters") or {}
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties") or {}, Mapping):
        raise malformed(f"the parameters of {where} must be the JSON schema of an object, not {shown(schema)}", entry)
    return function


def arguments_of(function: Mapping[str, Any], where: str) -> object:
    """Return the arguments of a tool call's function: the text of JSON, or the value itself."""
    if "arguments" not in function:
        raise malformed(f"the function of {where} has no 'arguments'", function)
    arguments: object = function["arguments"]
    return arguments


def call_order(message: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return the positions of an assistant message's tool calls, by their ids."""
    order: dict[str, int] = {}
    for i, call in enumerate(list_of(message, "tool_calls", where)):
        place = f"tool_calls[{i}] of {where}"
        function = function_of(call, place)
        if id := text_of(call, "id", place) or text_of(function, "id", place):
            order[id] = i
    return order


def sort_results(results: Iterable[T], order: Mapping[str, int], id_of: Callable[[T], str]) -> list[T]:
    """Return tool results in the order of their calls; those of unknown calls are sorted as results of the first call.

    Args:
        results: The results that follow a message with calls.
        order: ``call_order`` of that message.
        id_of: Returns the id of a result's call.
    """
    return sorted(results, key=lambda result: order.get(id_of(result), 0))


def content_of(message: Mapping[str, Any], where: str, *, optional: bool = False, placeholders: bool = False) -> Content:
    """Return a message's content as text.

    Args:
        message: The message; blank lines join the parts of a list.
        where: Name of the message in errors.
        optional: Missing content and ``None`` are the empty string; otherwise they are errors.
        placeholders: Write ``[Unsupported TYPE]`` for a part that is not text, as the format does in tool results.
    """
    content: object = message.get("content")
    if isinstance(content, str):
        return Content(content)
    if content is None and optional:
        return Content()
    if not isinstance(content, Sequence):
        raise malformed(f"{where} ({message['role']}) needs a string as 'content', not {type(content).__name__}", content)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            texts.append(text_of(part, "text", f"part {i} of {where}"))
        elif placeholders and kind is not None:
            texts.append(f"[Unsupported {kind if isinstance(kind, str) else shown(kind)}]")
        else:
            raise malformed(f"part {i} of {where} is not text", part)
    return Content("\n\n".join(texts))


def system_parts(message: Mapping[str, Any], where: str, text: str, describe: Callable[..., str] = json_content) -> Parts:
    """Return the parts of a system or developer message about its tools and response format.

    Args:
        text: Text about tools, with ``%TOOLS%`` in place of their descriptions.
        describe: Describes the function of a tool; the second argument is its name in errors.
    """
    parts: list[str] = []
    tools = list_of(message, "tools", where)
    if tools:
        places = [f"tools[{i}] of {where}" for i in range(len(tools))]
        described = [describe(function_of(tool, place), place) for tool, place in zip(tools, places, strict=True)]
        before, after = text.split("%TOOLS%")
        parts += ["\n\n" + before, Content("\n".join(described)), after]
    if message.get("response_format"):
        parts += ["\n\n" + RESPONSE_FORMAT, json_content(message["response_format"], f"the response_format of {where}")]
    return tuple(parts)


def dsml_call(function: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield one tool call. Strings are raw, other values are JSON; arguments that are not a JSON object become one string."""
    given = arguments_of(function, where)
    arguments = given
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
        yield Content(name) if isinstance(name, str) else json_content(name, where)
        yield f'" string="{"true" if is_text else "false"}">'
        yield Content(value) if is_text else json_content(value, where)
        yield f"</{DSML}parameter>"
    yield f"\n</{DSML}invoke>"
