"""The grammar that constrains tool calls: every call is well-formed and follows the schema of its tool.

The grammar fixes the markup of the model's release around the names, parameters and values of the tools, with ``<｜DSML｜`` and the
other markup tokens. So a call cannot be malformed, and its markup cannot appear outside of calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dsv4lite.checks import is_integer
from dsv4lite.errors import InvalidRequestError, UnsupportedError, shown
from dsv4lite.text.messages import DSML, THINK
from dsv4lite.text.releases import CallForm, call_marker
from dsv4lite.text.structured import (
    COMPACT,
    MAX_BYTES,
    SYNTAX,
    StructuredOutputs,
    check_size,
    measure,
    num_bytes,
    schema_text,
    target_of,
)
from dsv4lite.text.tokenizer import Tokenizer

_MOST_COUNTED = 10_000
"""Characters; the grammar enforces no larger ``maxLength``."""
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"))
_RAW_KEYWORDS = frozenset(("type", "minLength", "maxLength", "enum", "const"))
"""Keywords that the grammar enforces on a raw string; a string whose schema has others is written as JSON."""
_OBJECT_KEYWORDS = frozenset(
    "$ref $dynamicRef anyOf oneOf allOf not if then else enum const minProperties maxProperties patternProperties propertyNames "
    "dependentRequired dependentSchemas dependencies unevaluatedProperties".split()
)
"""Keywords for an object as a whole. DSML cannot enforce them: it has no object, and each parameter is a value of its own."""

_NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({"properties": {}, "additionalProperties": False})
"""The schema of a function without ``parameters``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallGrammar(StructuredOutputs):
    """A grammar of this module. ``MAX_RULES`` does not apply: its rules are not nested, and the schemas in it are checked."""

    def __post_init__(self) -> None:
        assert self.grammar is not None
        name = "grammar of the tools"
        check_size(name, self.grammar, num_bytes(name, self.grammar), MAX_BYTES, "bytes")


def call_grammar(
    form: CallForm,
    functions: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    must_call: bool,
    several: bool,
    may_think: bool,
) -> ToolCallGrammar:
    """Return the grammar of an answer, which begins after the reasoning.

    Args:
        form: How the model's release writes calls.
        functions: Functions that may be called. Arguments follow ``parameters``; without these there are none, and with ``strict``
            ``False`` they are any object.
        must_call: The answer consists of calls only; otherwise it is text, and calls may follow.
        several: There may be more than one call.
        may_think: The model opens its reasoning itself, so its first token may be ``<think>``.

    Raises:
        InvalidRequestError: The schema of a tool is malformed or too large.
        UnsupportedError: The vocabulary lacks the tokens of the markup.
    """
    marker = call_marker(form, tokenizer)
    if marker is None:
        raise UnsupportedError(f"tool_choice: the markup of calls, {form.marks.first.strip()!r}, is not in this model's vocabulary")
    rules = _Rules(tokenizer, marker)
    lead = "" if form.separator else "<"  # DSML tags open with "<", which precedes the token ``｜DSML｜``
    opening, *rest = tokenizer.split_added(form.marks.first + lead)
    first, between = rules.markup("".join(rest)), rules.markup(form.marks.between + lead)
    call = " | ".join([rules.call(form, function) for function in functions])
    calls = f"call ({between} call)*" if several else "call"
    block = f"{first} {calls} {rules.markup(form.marks.last)}"
    text = rules.text("(.|\\n)+")
    if must_call:
        start = f"{rules.markup(opening)} {block}"
    elif opening:
        before = rules.text(f"(.|\\n)*{_pattern(opening)}")
        start = f"{text}? | {before} {block}"
    else:
        start = f"{text}? ({block})?"
    think = tokenizer.token_id(THINK) if may_think else None
    thought = "" if think is None else f" | <[{think}]>"
    return ToolCallGrammar(grammar="\n".join([f"start: {start}{thought}", f"call: {call}", *rules.lines]))


class _Rules:
    """Builds the rules of a grammar. Methods return Lark expressions, and add the terminals that these need to ``lines``."""

    def __init__(self, tokenizer: Tokenizer, marker: str) -> None:
        self._tokenizer, self._marker = tokenizer, marker
        self.lines: list[str] = []

    def markup(self, text: str) -> str:
        """Return constant text, in which added tokens match by their ids."""
        pieces = self._tokenizer.split_added(text)
        return " ".join([f"<[{self._tokenizer.token_id(p)}]>" if i % 2 else _constant(p) for i, p in enumerate(pieces) if p])

    def text(self, pattern: str) -> str:
        """Return text that matches a pattern and does not contain the marker of calls, spelled with other tokens."""
        name = f"TEXT{len(self.lines)}"
        self.lines.append(f"{name}: /{pattern}/ & ~/(.|\\n)*{_pattern(self._marker)}(.|\\n)*/")
        return name

    def call(self, form: CallForm, function: Mapping[str, Any]) -> str:
        """Return one call of a function."""
        name = _constant(function["name"])
        schema = {} if function.get("strict") is False else _schema(function)
        if form.separator:
            separator, after = self.markup(form.separator), self.markup(form.marks.after)
            return f"{self.markup(form.marks.before)} {name} {separator} {_json({'type': 'object', **schema})} {after}"
        if problem := _problem_in_dsml(schema):
            message = f"the parameters of the tool {shown(function['name'])} have {problem}"
            raise InvalidRequestError(message, parameter="tools", value=schema)
        tag, end = self.markup(f'{DSML}invoke name="'), self.markup(f"{DSML}invoke>")
        return " ".join([tag, name, '"\\">"', *self._parameters(schema), end])

    def _parameters(self, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield the parameters of a call in DSML, then the opening of the tag after them."""
        others, definitions = schema.get("additionalProperties"), _definitions(schema)
        properties = schema.get("properties", {} if others is False else None)
        if not isinstance(properties, dict):
            rules = [others] if others and isinstance(others, dict) else [{"type": "string"}, {}]
            each = " | ".join([self._parameter("/[A-Za-z0-9_.-]{1,64}/", rule, definitions) for rule in rules])
            yield f'({each})* ("\\n</" | "\\n\\n</")'
            return
        given = schema.get("required")
        required = given if isinstance(given, list) else []
        for key, rule in properties.items():
            if rule is not False:
                one = self._parameter(_constant(key), rule if isinstance(rule, dict) else {}, definitions)
                yield one if key in required else f"({one})?"
        ends = [*(["\n</"] if properties else ()), *(() if required else ["\n\n</"])]
        yield f"({' | '.join(map(_constant, ends))})"

    def _parameter(self, name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> str:
        """Return a parameter in DSML: a raw string if the grammar can enforce its schema, otherwise JSON."""
        raw = self._string({key: value for key, value in schema.items() if key not in _ANNOTATIONS})
        value = raw or f'{_json({**schema, **(definitions or {})})} "</"'
        tag, end = self.markup(f'\n<{DSML}parameter name="'), self.markup(f"{DSML}parameter>")
        kind = _constant(f'" string="{"false" if raw is None else "true"}">')
        return f"{tag} {name} {kind} {value} {end}"

    def _string(self, schema: Mapping[str, Any]) -> str | None:
        """Return a raw string and the opening of the tag after it; ``None`` if the schema needs more than ``_RAW_KEYWORDS``."""
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        strings = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices) and bool(choices)
        if not _RAW_KEYWORDS.issuperset(schema) or schema.get("type", "string" if strings else None) != "string":
            return None
        if isinstance(choices, list):
            constants = [_constant(f"{choice}</") for choice in choices]
            alone = len(schema.keys() - {"type"}) == 1  # with other keywords, the value is JSON, whose grammar combines them
            return f"({' | '.join(constants)})" if strings and alone else None
        least, most = schema.get("minLength", 0), schema.get("maxLength", _MOST_COUNTED + 1)
        if not (is_integer(least) and is_integer(most)):
            return None
        bounds = f"{{{least},{'' if most > _MOST_COUNTED else most}}}"
        return self.text(f"(.|\\n){bounds}<\\/")


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked copy of the schema of a function's arguments; without ``parameters`` it allows none."""
    try:
        schema: dict[str, Any] = json.loads(schema_text(dict(function.get("parameters") or _NO_PARAMETERS)))
    except InvalidRequestError as error:
        problem = f"the parameters of the tool {shown(function['name'])}: {error}"
        raise InvalidRequestError(problem, parameter="tools", value=error.value) from error
    return schema


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions of a tool's schema, which the JSON schema of each parameter gets."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _problem_in_dsml(schema: Mapping[str, Any]) -> str | None:
    """Return what a tool's schema has that the grammar of a DSML call does not enforce; ``None`` if there is nothing."""
    if rules := sorted(_OBJECT_KEYWORDS.intersection(schema)):
        return f"{rules[0]!r}, which calls in DSML cannot enforce; leave it out"
    properties, required, definitions = schema.get("properties") or {}, schema.get("required"), _definitions(schema)
    inner = measure(definitions)[1]
    others = {} if isinstance(schema.get("properties"), dict) else {"additionalProperties": schema.get("additionalProperties")}
    for name, rule in (properties or others).items():
        document = {**rule, **definitions} if isinstance(rule, dict) else {}
        references = measure(rule)[1]
        for reference in sorted(references and references | inner):
            if not reference.startswith(("#/$defs/", "#/definitions/")) or target_of(document, reference) is document:
                problem = f"the property {shown(name)}, whose schema needs the reference {shown(reference)}"
                return f"{problem}; calls in DSML can only enforce references to the tool's '$defs' or 'definitions'"
    for name in required if isinstance(required, list) else ():
        if not isinstance(name, str) or properties.get(name, False) is False:
            return f"{shown(name)} in 'required', but no schema for it in 'properties'; add one there"
    return None


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT})


def _constant(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """Return a regular expression that matches constant text."""
    return SYNTAX.sub(r"\\\g<0>", text).replace("\n", "\\n")
