"""What the tests of all parsers share: texts come in pieces, and their cuts change nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from dsv4lite.text.parse import ChatParser, ParsedChat

Calls = list[tuple[str, str]]
words = st.text("ab <>\n\"'{é", max_size=6)


def parse(text: str, thinking: bool | None = False, cuts: Sequence[int] = (), **options: Any) -> ParsedChat:
    """Parse a text that is cut into pieces; what a client puts together of them is the whole."""
    parser = ChatParser(thinking, **options)
    pieces = [parser.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    pieces.append(parser.finish())
    whole = parser.result()
    assert "".join(p.reasoning for p in pieces) == whole.reasoning and "".join(p.content for p in pieces) == whole.content
    assert tuple(call for p in pieces for call in p.tool_calls) == whole.tool_calls
    return whole


def check_output(text: str, thinking: bool | None, reasoning: str, content: str, calls: Calls, **options: Any) -> None:
    """A text has this meaning, also if it comes by the character."""
    parsed = parse(text, thinking, **options)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert parse(text, thinking, range(len(text) + 1), **options) == parsed


def parse_in_cuts(data: st.DataObject, text: str, thinking: bool | None = False, **options: Any) -> ParsedChat:
    """Parse a text whole and in pieces, with the same result."""
    whole = parse(text, thinking, **options)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert parse(text, thinking, cuts, **options) == parse(text, thinking, range(len(text) + 1), **options) == whole
    for call in whole.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    return whole
