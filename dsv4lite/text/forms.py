"""Finds a checkpoint's chat format: one that this package implements, or the checkpoint's own Jinja template."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from dsv4lite.checks import one_of, require
from dsv4lite.errors import InvalidRequestError
from dsv4lite.text.chat import PREVIEW, REFRESHED, render_messages
from dsv4lite.text.messages import (
    ASSISTANT,
    DSML,
    THINK,
    USER,
    Parts,
    arguments_of,
    function_of,
    is_list,
    json_content,
    list_of,
    roles_of,
)
from dsv4lite.text.parse import CallSyntax
from dsv4lite.text.releases import CALLS, DSML_CALLS, EFFORTS, RELEASES, CallForm, render_release
from dsv4lite.text.tokenizer import Content, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """A model's chat format.

    Attributes:
        render: Returns a prompt in parts; takes messages and, by name, ``reasoning``, ``tools`` and ``escape_results``, as
            ``chat.render_messages`` does.
        calls: How the model writes tool calls; ``None`` if that is not known.
        opens_reasoning: The model may open its reasoning itself if the prompt does not.
    """

    render: Callable[..., Parts]
    calls: CallForm | None = DSML_CALLS
    opens_reasoning: bool = False

    @property
    def syntax(self) -> CallSyntax:
        """How the parser reads tool calls."""
        if self.calls is None:
            return "none"
        return "tokens" if self.calls.separator else "dsml"

    def thinking(self, parts: Parts) -> bool | None:
        """Return whether the answer to a prompt begins with reasoning; see ``ChatParser``."""
        if not isinstance(parts[-1], Content) and parts[-1].rstrip().endswith(THINK):  # in a message it is text
            return True
        return None if self.opens_reasoning else False


FORMS: Mapping[str, ChatForm] = MappingProxyType(
    {
        "deepseek_v4": ChatForm(render=partial(render_messages, efforts=PREVIEW)),
        "deepseek_v4_refreshed": ChatForm(render=partial(render_messages, efforts=REFRESHED)),
        **{
            name: ChatForm(
                render=partial(render_release, release=release),
                calls=release.calls,
                opens_reasoning=release.thinks == "always",
            )
            for name, release in RELEASES.items()
        },
    }
)


def find_form(family: str | None, tokenizer: Tokenizer, *, shipped: bool) -> tuple[ChatForm | None, str]:
    """Return a model's chat format and an empty string, or ``None`` and the reason.

    Args:
        family: The name that ``Family.chat`` returns.
        tokenizer: Its tokens and template tell releases with the same config apart.
        shipped: Use the checkpoint's template, even if this package implements the format.
    """
    template = tokenizer.chat_template
    name = release_of(family, tokenizer)
    if name is not None and not shipped:
        return FORMS[name], ""
    if template is None and name is not None:
        return None, "chat_template='checkpoint': this checkpoint ships no chat template; use 'auto', the package's own format"
    if template is None:
        return None, "this model has no chat format; render the conversation yourself and use generate()"
    try:
        return _template_form(template, tokenizer), ""
    except ImportError:
        return None, "this model's chat format is the template that it ships, which needs jinja2: pip install 'dsv4lite[chat]'"
    except Exception as error:  # Jinja's own errors; a SyntaxError of the code that it makes, or a RecursionError
        return None, f"the chat template that this model ships cannot be read: {error}"


def release_of(family: str | None, tokenizer: Tokenizer) -> str | None:
    """Return the name of a model's format. V3, R1 and V3.1 have the same config, and so do V3.2-Exp and V3.2."""
    template = tokenizer.chat_template
    if family not in ("deepseek_v3", "deepseek_v32"):
        return family
    if tokenizer.token_id(USER) is None:
        return None  # another maker's model of this family
    if family == "deepseek_v32":
        return family if template is None or DSML in template else "deepseek_v31"  # V3.2-Exp ships V3.1's
    if tokenizer.token_id("<｜search▁begin｜>") is not None:
        return "deepseek_v31"
    if tokenizer.token_id(THINK) is None:
        return "deepseek_v3"
    return "deepseek_r1" if template is None or ASSISTANT + THINK in template else "deepseek_r1_0528"


def _template_form(source: str, tokenizer: Tokenizer) -> ChatForm:
    """Return the format of a template, which runs in Jinja's sandbox; a malformed one raises any exception."""
    from jinja2 import sandbox

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
    template = environment.from_string(source)

    def render(
        messages: Sequence[Mapping[str, Any]],
        *,
        reasoning: str | None = "none",
        tools: Sequence[Mapping[str, Any]] | None = None,
        escape_results: bool = True,
    ) -> Parts:
        problem = "" if reasoning is None else one_of(*EFFORTS)(reasoning)
        require(not problem, "reasoning", reasoning, problem)
        roles_of(messages, tools, ("system", "developer", "user", "assistant", "tool"))
        json_content([messages, tools], "the conversation")  # raises if it is not JSON
        thinking = reasoning != "none"
        # A mark cuts every control token in messages and tools, so that it is encoded as text; see ``Tokenizer.encode_parts``. The
        # mark is random, so that no message can contain it, and has no characters that a template may escape.
        mark = secrets.token_hex(16) if escape_results else ""

        def written(conversation: Sequence[Mapping[str, Any]]) -> str:
            return template.render(
                messages=_cut(tokenizer, mark, conversation),
                tools=_cut(tokenizer, mark, tools or ()) or None,
                add_generation_prompt=True,
                thinking=thinking,
                enable_thinking=thinking,
                bos_token=tokenizer.bos_token or "",
                eos_token=tokenizer.eos_token or "",
            )

        try:  # a template is a program that may raise any exception
            text = written(messages)
        except Exception as error:
            try:  # some templates take a call's arguments as the text of JSON, others as an object
                text = written(list(map(_with_other_arguments, messages)))
            except Exception:
                raise InvalidRequestError(
                    f"the model's chat template does not take this conversation: {error}", parameter="messages", value=messages
                ) from error
        return tuple(text.split(mark)) if mark else (text,)

    calls = None
    if CALLS in source:
        calls = RELEASES["deepseek_v3" if "```json" in source else "deepseek_v31"].calls
    elif DSML in source:
        calls = RELEASES["deepseek_v32"].calls if "function_calls" in source else DSML_CALLS
    return ChatForm(render=render, calls=calls, opens_reasoning=True)


def _refuse(problem: str) -> None:
    raise ValueError(problem)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter of transformers, whose options may be given by position."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_other_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the other form of its tool calls' arguments: an object for the text of JSON, or the reverse."""
    calls = []
    for i, call in enumerate(list_of(message, "tool_calls", "the message")):
        function = function_of(call, f"tool_calls[{i}]")
        given = arguments_of(function, f"tool_calls[{i}]")
        other = json.loads(given) if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": other}})
    return {**message, "tool_calls": calls} if calls else message


def _cut(tokenizer: Tokenizer, mark: str, value: Any) -> Any:
    """Return a JSON value with a mark in every control token in its strings; see ``Tokenizer.cut_added``."""
    if isinstance(value, str):
        return tokenizer.cut_added(value, mark)
    if isinstance(value, Mapping):
        return {_cut(tokenizer, mark, key): _cut(tokenizer, mark, member) for key, member in value.items()}
    return [_cut(tokenizer, mark, member) for member in value] if is_list(value) else value
