"""Incremental parser of the models' answers: reasoning, content and tool calls.

    reasoning</think>content

V4 and V3.2 write calls in DSML:

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="P" string="true">raw text</｜DSML｜parameter>
    <｜DSML｜parameter name="Q" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls><EOS>

V3 and R1 write calls as tokens around JSON; V3.1 has no fence and writes ``NAME<｜tool▁sep｜>JSON``:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    JSON
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜><EOS>

Models make mistakes, and their output may end anywhere, so the parser raises no errors: text that is not markup is content,
malformed text inside the block is skipped, an opening of the block that is cut off is dropped, and a call that the length limit
cuts off keeps its complete parameters. The result depends on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsv4lite.text.messages import DSML, END_THINK, THINK, json_text
from dsv4lite.text.releases import CALL, CALL_SEPARATOR, CALLS, END_CALL, END_CALLS
from dsv4lite.text.scan import Scanner
from dsv4lite.text.tokenizer import EOS

_BLOCK_NAMES = ("tool_calls", "toolcalls", "function_calls")
"""The trained name, then other names that models write."""
_BLOCK_OPENINGS = tuple(f"{gap}<{DSML}{space}{name}>" for name in _BLOCK_NAMES for space in ("", " ") for gap in ("\n\n", "\n", ""))
"""The newlines before the block belong to it."""
_TEXT_MARKERS = {
    syntax: (THINK, END_THINK, *openings) for syntax, openings in (("dsml", _BLOCK_OPENINGS), ("tokens", (CALLS,)), ("none", ()))
}
_MARKUP = {"dsml": (DSML,), "tokens": (CALLS, CALL, CALL_SEPARATOR, END_CALL, END_CALLS), "none": ()}
_OPEN, _CLOSE = f"<{DSML}", f"</{DSML}"
_TAG_MARKERS = (_OPEN, _CLOSE)
OPENING_ENDS = ('">', '" >', *_TAG_MARKERS)
"""What ends an opening tag, so that no name in it can contain these."""
_VALUE_MARKERS = (f"</{DSML}parameter>", f"</{DSML} parameter>")
_INVOKE = re.compile(r'\s*invoke\s+name="(?P<name>.*)', re.DOTALL)
_PARAMETER = re.compile(r'\s*parameter\s+name="(?P<name>.*?)(?:"\s+string="(?P<string>\w*))?', re.DOTALL)
_WRAPPERS = ("arguments", "input")
"""Names under which a model may put all arguments as one object."""

CallSyntax = Literal["dsml", "tokens", "none"]
"""How a model writes tool calls; with ``"none"`` calls are not recognised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A complete tool call; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedChat:
    """An assistant's turn, or the additions of one piece of output; a tool call is added once it is complete."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    BLOCK = enum.auto()
    """In the tool block, between tags; text there is dropped."""
    OPENING = enum.auto()
    """After ``<｜DSML｜``."""
    CLOSING = enum.auto()
    """After ``</｜DSML｜``."""
    VALUE = enum.auto()
    """In a parameter."""
    CALLS = enum.auto()
    """Between calls written as tokens; text there is dropped."""
    CALL = enum.auto()
    """In a call written as tokens."""
    DONE = enum.auto()
    """After the block or EOS; text there is dropped."""


class ChatParser:
    """Parses one assistant turn incrementally. The joined results of ``push`` and ``finish`` equal ``result``.

    Attributes:
        markup: Tokens that the text must contain although a vocabulary may call them special.
    """

    def __init__(
        self,
        thinking: bool | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        syntax: CallSyntax = "dsml",
        call_id_prefix: str = "call_",
        guarded: bool = False,
        must_call: bool = False,
        shows_eos: bool = True,
    ) -> None:
        """Start a turn.

        Args:
            thinking: Whether the output begins with reasoning, because the prompt ends with ``<think>``. ``None``: it does if the
                output begins with ``<think>``.
            tools: Tool definitions; their schemas give the type of values that should be JSON but are not.
            syntax: How the model writes tool calls.
            call_id_prefix: The id of a tool call is this prefix and the call's number.
            guarded: A grammar guarantees well-formed calls after the reasoning: reasoning contains no calls, and a call that is cut
                off is dropped.
            must_call: The answer consists of calls only, so that text before them is the beginning of their markup.
            shows_eos: The output has the end-of-sequence token, which ends the turn. Otherwise its spelling is text.
        """
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._may_open = thinking is None
        self.markup = (THINK, END_THINK, *_MARKUP[syntax])
        self._text_markers = _TEXT_MARKERS[syntax]
        self._guarded, self._must_call = guarded, must_call
        self._eos = (EOS,) if shows_eos else ()
        functions = [tool["function"] for tool in tools or ()]
        self._schemas = {function["name"]: (function.get("parameters") or {}).get("properties") or {} for function in functions}
        self._call_id_prefix = call_id_prefix
        self._scanner = Scanner()
        self._pieces: list[str] = []
        """Text of the tag or value that is being read."""
        self._parameter: tuple[str, str | None] = "", None
        """Name and ``string`` attribute of the parameter whose value is being read."""
        self._call_name: str | None = None
        self._given: dict[str, tuple[str, str | None]] = {}
        """The open call's parameters so far, by name: value and ``string`` attribute."""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> ParsedChat:
        """Read a piece of output. Text that may be the beginning of markup is held back until more text decides it."""
        seen = self._seen()
        if self._state is not _State.DONE:
            self._scanner.feed(text)
            while self._step():
                pass
        return self._since(*seen)

    def finish(self) -> ParsedChat:
        """End the turn: return the text held back, and close a call that was cut off."""
        seen = self._seen()
        if self._state is _State.REASONING or (self._state is _State.CONTENT and not self._must_call):
            rest = self._scanner.rest()
            self._emit("" if DSML in rest else rest)  # the text held back is the beginning of a marker
        self._end()
        return self._since(*seen)

    def result(self) -> ParsedChat:
        """Return everything read so far; complete after ``finish``."""
        return self._since(0, 0, 0)

    def _seen(self) -> tuple[int, int, int]:
        return len(self._reasoning), len(self._content), len(self._calls)

    def _since(self, reasoning: int, content: int, calls: int) -> ParsedChat:
        return ParsedChat(
            reasoning="".join(self._reasoning[reasoning:]),
            content="".join(self._content[content:]),
            tool_calls=tuple(self._calls[calls:]),
        )

    def _read_until(self, *markers: str) -> tuple[str, str | None]:
        return self._scanner.read_until((*markers, *self._eos))

    def _step(self) -> bool:
        """Read up to the next marker and act on it; return whether there may be more to read."""
        match self._state:
            case _State.REASONING | _State.CONTENT:
                return self._read_text()
            case _State.BLOCK:
                return self._at_tag(self._read_until(*_TAG_MARKERS)[1])
            case _State.OPENING | _State.CLOSING:
                return self._read_tag()
            case _State.VALUE:
                return self._read_value()
            case _State.CALLS | _State.CALL:
                return self._read_call()
            case _State.DONE:
                return False

    def _read_text(self) -> bool:
        reasons = self._guarded and self._state is _State.REASONING
        text, marker = self._read_until(*(_TEXT_MARKERS["none"] if reasons else self._text_markers))
        if marker == THINK:
            if text or self._reasoning or self._content:
                text += THINK  # only at the very start it opens the reasoning or repeats the prompt's; elsewhere it is text
            elif self._may_open:
                self._state = _State.REASONING
        self._emit(text)
        if marker == END_THINK:
            self._state = _State.CONTENT  # a further </think> in the content is dropped
        elif marker == EOS:
            self._end()
        elif marker in _BLOCK_OPENINGS:
            self._state = _State.BLOCK
        elif marker == CALLS:
            self._state = _State.CALLS
        return marker is not None

    def _emit(self, text: str) -> None:
        if text:
            (self._reasoning if self._state is _State.REASONING else self._content).append(text)

    def _at_tag(self, marker: str | None) -> bool:
        """Enter the tag that ``marker`` begins; an unfinished tag before it is dropped."""
        self._pieces = []
        if marker == EOS:
            self._end()
        elif marker is not None:
            self._state = _State.OPENING if marker == _OPEN else _State.CLOSING
        return marker is not None

    def _read_tag(self) -> bool:
        opening = self._state is _State.OPENING
        piece, marker = self._read_until(*(OPENING_ENDS if opening else (">", *_TAG_MARKERS)))
        self._pieces.append(piece)
        if marker is None or marker in (*_TAG_MARKERS, EOS):
            return marker is not None and self._at_tag(marker)
        text, self._pieces = "".join(self._pieces), []
        self._state = _State.BLOCK
        if not opening:
            if text.strip() == "invoke":
                self._close_call()
            elif text.strip() in _BLOCK_NAMES:
                self._end()
        elif invoke := _INVOKE.fullmatch(text):
            self._close_call()
            self._call_name = invoke["name"]
        elif parameter := _PARAMETER.fullmatch(text):
            self._parameter = parameter["name"], parameter["string"]
            self._state = _State.VALUE
        return True

    def _read_value(self) -> bool:
        piece, marker = self._read_until(*_VALUE_MARKERS)
        self._pieces.append(piece)
        if marker == EOS:
            self._end()
        elif marker is not None:
            name, string = self._parameter
            self._given.setdefault(name, ("".join(self._pieces), string))  # the first of several with the same name counts
            self._pieces = []
            self._state = _State.BLOCK
        return marker is not None

    def _read_call(self) -> bool:
        """Read a call written as tokens; one that is cut off or has no separator is dropped."""
        piece, marker = self._read_until(CALL, END_CALL, END_CALLS)
        if self._state is _State.CALL:
            self._pieces.append(piece)
        if marker is None:
            return False
        before, separator, after = "".join(self._pieces).partition(CALL_SEPARATOR)
        self._pieces = []
        if marker == END_CALL and separator:
            name, text = _fenced(after) or (before.strip(), after.strip())
            self._add_call(name, text if _is_json(text) and text.startswith("{") else json_text({"arguments": text}))
        self._state = _State.CALL if marker == CALL else _State.CALLS
        if marker in (END_CALLS, EOS):
            self._end()
        return True

    def _close_call(self) -> None:
        name, given = self._call_name, self._given
        self._call_name, self._given = None, {}
        if name is not None:
            self._add_call(name, _arguments(given, self._schemas.get(name)))

    def _add_call(self, name: str, arguments: str) -> None:
        self._calls.append(ToolCall(id=f"{self._call_id_prefix}{len(self._calls)}", name=name, arguments=arguments))

    def _end(self) -> None:
        if not self._guarded:
            self._close_call()
        self._scanner.rest()
        self._state = _State.DONE


def _fenced(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call with a fence, else ``None``. A regular expression takes cubic time for many blanks."""
    name, _, rest = text.rstrip().partition("\n```")
    body = rest.removesuffix("```").removeprefix("json")
    arguments = body.lstrip()
    opened = "\n" in body[: len(body) - len(arguments)]
    return (name.strip(), arguments.rstrip()) if opened and rest.endswith("```") and "\n" not in name.strip() else None


def _arguments(given: Mapping[str, tuple[str, str | None]], properties: Mapping[str, Any] | None) -> str:
    """Return the arguments of a call as the text of a JSON object; ``properties`` are those of the tool, if it is known.

    A single parameter that the tool does not have may hold all arguments as an object.
    """
    if len(given) == 1 and properties is not None:
        ((name, (value, _)),) = given.items()
        if name in _WRAPPERS and name not in properties and value.lstrip().startswith("{") and _is_json(value):
            return value.strip()
    schemas = properties or {}
    members = [f"{json_text(name)}: {_value_json(value, string, schemas.get(name))}" for name, (value, string) in given.items()]
    return "{" + ", ".join(members) + "}"


def _value_json(value: str, string: str | None, schema: object) -> str:
    """Return a parameter's value as JSON text.

    A JSON value keeps its spelling, so that no digit of a number is lost. A value that should be JSON but is not is converted to
    the type in its schema if possible, otherwise to a string.
    """
    if string == "true":
        return json_text(value)
    if _is_json(value):
        return value.strip()
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    text = value.strip()
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind == "boolean" and text.lower() in ("true", "false"):
            return text.lower()
        if kind == "null" and text.lower() in ("null", "none"):
            return "null"
        if kind in ("integer", "number") and (number := _number(text, kind)) is not None:
            return number
    return json_text(value)


def _is_json(text: str) -> bool:
    """Whether ``text`` is strict JSON, without NaN and Infinity, which Python's parser accepts."""
    try:
        json.loads(text, parse_constant=_no_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _number(text: str, kind: str) -> str | None:
    """Return a number with a spelling that JSON lacks (``+5``, ``.5``) as JSON; ``None`` if it is not a finite number."""
    try:
        if kind == "integer":
            return str(int(text))
        number = float(text)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None
