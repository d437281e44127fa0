"""Constrain a completion to a JSON schema, a regular expression, a choice or a grammar.

The grammar engine is llguidance, an optional package. It works on the bytes of the tokens; chat markup and special tokens never
match, and end-of-sequence is allowed only where the text is complete.
"""

from __future__ import annotations

import json as jsonlib
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, fields
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote
from weakref import WeakValueDictionary, ref

import torch

from dsv4lite.checks import one_of, plain
from dsv4lite.errors import (
    DSV4LiteError,
    EngineStateError,
    InvalidRequestError,
    RequestFailedError,
    UnsupportedError,
    near_match,
    shown,
)
from dsv4lite.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED_GRAMMARS = 64
"""Number of compiled grammars that a compiler keeps, least recently used ones dropped first."""

# llguidance recurses on the native stack, and compares properties pair by pair. The limits keep its stack below 2 MiB (it takes at
# most 4.4 KiB for a level of a schema or a rule of a grammar), and the compilation of one grammar within a few seconds.
MAX_BYTES = 256 << 10
"""Most UTF-8 bytes of a JSON schema, a regular expression or a grammar."""
MAX_CHOICES = 100_000
"""Most strings of a choice."""
MAX_CHOICE_BYTES = 1 << 20
"""Most UTF-8 bytes of all strings of a choice together."""
MAX_NESTING = 100
"""Most objects and arrays inside each other in a JSON schema, as it is written."""
MAX_DEPTH = 400
"""Most levels of nesting if each ``$ref`` is followed once; a cycle of references counts with all its levels."""
MAX_PROPERTIES = 2_000
"""Most entries of all ``properties`` of a JSON schema together."""
MAX_PATTERN_PROPERTIES = 100
"""Most entries of all ``patternProperties`` of a JSON schema together."""
MAX_RULES = 600
"""Most rules and brackets of a grammar, counted as its characters ``:``, ``(``, ``[`` and ``{``."""
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""llguidance's options for compact JSON: at most one blank after a comma or colon, and no other whitespace."""
FLEXIBLE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
"""The same for ``json_whitespace="flexible"``. Limited, because a model that cannot write what it prefers may write whitespace
forever."""
_THREAD = "dsv4lite-grammars"
_EXCLUSIVE = (
    ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
    ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the text of a completion. Exactly one of the first four attributes is set.

    Attributes:
        json: A JSON schema, as a mapping or as text; kept as text.
        regex: A regular expression (Rust syntax: no look-around, no back references) that the whole text matches.
        choice: The text is one of these.
        grammar: A context-free grammar in llguidance's variant of Lark; the whole text matches the rule ``start``.
        json_whitespace: Whitespace in ``json`` texts: ``"compact"`` allows one blank after a comma or colon and nothing else,
            ``"flexible"`` up to 64 blanks, tabs and line ends between any two tokens of JSON.

    Raises:
        InvalidRequestError: None or several are set, or one is malformed or exceeds the limits of this module.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_whitespace: Literal["compact", "flexible"] = "compact"

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar")
        given = [name for name in kinds if getattr(self, name) is not None]
        if problem := one_of("compact", "flexible")(self.json_whitespace):
            raise _malformed(f"json_whitespace={shown(self.json_whitespace)} {problem}", self.json_whitespace)
        if len(given) != 1:
            raise _malformed(f"exactly one of {', '.join(kinds)} is needed, got {', '.join(given) or 'none'}", given)
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None:
                if not (isinstance(value, str) and value):
                    raise _malformed(f"{name} must be a non-empty string", value)
                check_size(name, value, num_bytes(name, value), MAX_BYTES, "bytes")
        if self.grammar is not None:
            check_size("grammar", self.grammar, sum(map(self.grammar.count, ":([{")), MAX_RULES, "rules and brackets")
        if self.choice is not None:
            choices: object = self.choice
            good = isinstance(choices, Sequence) and not isinstance(choices, str) and len(choices) > 0
            if not good or not all(isinstance(c, str) and c for c in self.choice):
                raise _malformed("choice must be a sequence of non-empty strings", self.choice)
            object.__setattr__(self, "choice", tuple(self.choice))
            check_size("choice", self.choice, len(self.choice), MAX_CHOICES, "strings")
            check_size("choice", self.choice, num_bytes("choice", "".join(self.choice)), MAX_CHOICE_BYTES, "bytes")
        if self.json is not None:
            object.__setattr__(self, "json", schema_text(self.json))
        for f in fields(self):
            object.__setattr__(self, f.name, plain(getattr(self, f.name)))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> StructuredOutputs:
        """Build from a mapping such as ``{"regex": "[0-9]+"}``.

        Raises:
            InvalidRequestError: For an unknown key, with a near match, or a malformed value.
        """
        known = [f.name for f in fields(cls)]
        for key in settings:
            if key not in known:
                raise _malformed(f"unknown key {shown(key)}{near_match(key, known)}", key)
        return cls(**settings)


def _program_ends() -> bool:
    """Whether only daemons, and threads that compile grammars, are left; other threads may wait for a grammar until they end."""
    return not any(t.is_alive() and not t.daemon and t.name != _THREAD for t in threading.enumerate())


class GrammarCompiler:
    """Compiles grammars for one vocabulary in a background thread, and caches them. Thread-safe.

    The background thread ends when its queue is empty. The first grammar imports llguidance and prepares the vocabulary, which
    takes about a second; engines without grammars do neither.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int | None = None) -> None:
        """Check that grammars can be compiled.

        Args:
            vocab_size: Length of the masks: number of logits of the model, at least that of the tokenizer (the default).

        Raises:
            UnsupportedError: llguidance is not installed, or the vocabulary has no end-of-sequence token or more tokens than the
                model.
        """
        if not _is_installed("llguidance"):
            raise UnsupportedError("structured outputs need the package llguidance: pip install 'dsv4lite[structured]'")
        if tokenizer.eos_token_id is None:
            raise UnsupportedError("structured outputs need a tokenizer with an end-of-sequence token")
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        if self.vocab_size < tokenizer.vocab_size:
            sizes = f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {self.vocab_size}"
            raise UnsupportedError(f"{sizes}: they do not belong together")
        self.eos_token_id = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None  # used by the background thread only
        bits_of_byte = [[byte >> bit & 1 for bit in range(8)] for byte in range(256)]
        self.bits_of_byte = torch.tensor(bits_of_byte, dtype=torch.bool, device="cpu")
        """Look-up table that unpacks llguidance's bit masks."""
        self._lock = threading.Lock()  # guards the attributes below, and copies of matchers
        self._known: WeakValueDictionary[StructuredOutputs, Future[LLMatcher]] = WeakValueDictionary()
        self._recent: OrderedDict[StructuredOutputs, Future[LLMatcher] | None] = OrderedDict()  # ``None`` until it is compiled
        self._queue: deque[tuple[StructuredOutputs, ref[Future[LLMatcher]]]] = deque()
        self._working = False

    def begin(self, spec: StructuredOutputs, *, caches: bool = True) -> Future[LLMatcher]:
        """Queue a grammar for compilation unless it is cached; return at once. A queued future that is dropped is not compiled.

        The future fails with ``InvalidRequestError`` if the schema, expression or grammar is malformed, or uses a feature that
        cannot be enforced.

        Args:
            caches: Makes it the latest of those that are cached. These depend on the order of such calls alone, so that all ranks,
                which get them in the leader's order, have what the leader has: a grammar that was dropped is compiled again, even
                if a sequence still has it.

        Raises:
            EngineStateError: The program ends, so no grammar is compiled any more.
        """
        with self._lock:
            compiled = self._known.get(spec)
            if caches:
                if compiled is not None and compiled.done() and spec not in self._recent:
                    compiled = None
                self._recent[spec] = self._recent.pop(spec, None)
                if len(self._recent) > CACHED_GRAMMARS:
                    self._recent.popitem(last=False)
            if compiled is None:
                if _program_ends():  # an exit handler waits for this request
                    raise EngineStateError("the program ends: no grammar is compiled any more", state="ready")
                if not self._working:
                    # Not a daemon, unlike the engine's thread, which starts it: at exit, one in llguidance would crash the process.
                    threading.Thread(target=self._work, name=_THREAD, daemon=False).start()
                    self._working = True
                compiled = self._known[spec] = Future()  # not before: the thread may not start
                self._queue.append((spec, ref(compiled)))
            return compiled

    def matcher(self, compiled: Future[LLMatcher]) -> GrammarMatcher:
        """Wait until the grammar is compiled; return a matcher at the beginning of a text.

        Raises:
            InvalidRequestError: See ``begin``.
        """
        whole = compiled.result()
        with self._lock:
            copy = whole.deep_copy()
        return GrammarMatcher(self, copy)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue or _program_ends():
                    self._queue.clear()
                    self._working = False
                    return
                spec, waiting = self._queue.popleft()
            future = waiting()
            if future is None:
                continue
            try:
                compiled = self._build(spec)
            except DSV4LiteError as error:
                future.set_exception(error)
            except BaseException as error:  # a Rust panic is not an Exception
                problem = _malformed(f"the grammar cannot be compiled: {type(error).__name__}: {error}", spec)
                problem.__cause__ = error
                future.set_exception(problem)
            else:
                with self._lock:
                    if spec in self._recent:
                        self._recent[spec] = future
                future.set_result(compiled)
            del future

    def _build(self, spec: StructuredOutputs) -> LLMatcher:
        import llguidance

        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self.vocab_size)))
        try:
            compiled = llguidance.LLMatcher(self._vocabulary, _grammar_text(spec), log_level=0)
        except ValueError as error:  # the text of a schema
            raise _malformed(f"the grammar cannot be compiled: {error}", spec) from error
        if not compiled.is_error():
            compiled.compute_bitmask()  # the first mask is the slowest; copies reuse its caches
        if compiled.is_error():
            reason = compiled.get_error().strip().partition("\n<state>")[0]
            if len(reason) > 1000:  # the library repeats the grammar
                reason = f"{reason[:500]} ... {reason[-500:]}"
            raise _malformed(f"the grammar cannot be compiled: {reason}", spec)
        return compiled


class GrammarMatcher:
    """The position of one text in its grammar."""

    __slots__ = ("_compiler", "_ended", "_matcher")

    def __init__(self, compiler: GrammarCompiler, matcher: LLMatcher, *, ended: bool = False) -> None:
        self._compiler = compiler
        self._matcher = matcher
        self._ended = ended
        """Whether end-of-sequence was accepted; llguidance never sees it."""

    def mask(self) -> torch.Tensor:
        """Return which tokens may come next, bool [vocab_size] on the CPU; never all false.

        Raises:
            RequestFailedError: The grammar exceeded llguidance's limits on this text.
        """
        if self._ended:
            mask = torch.zeros(self._compiler.vocab_size, dtype=torch.bool, device="cpu")
            mask[self._compiler.eos_token_id] = True
            return mask
        bits = self._matcher.compute_bitmask()
        self._check()
        packed = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        return self._compiler.bits_of_byte.index_select(0, packed.int()).flatten()[: self._compiler.vocab_size]

    def accept(self, token_id: int) -> None:
        """Advance by a token.

        Raises:
            InvalidRequestError: The grammar does not allow it here; the matcher stays where it is.
            RequestFailedError: The grammar exceeded llguidance's limits on this text.
        """
        if self._ended or not 0 <= token_id < self._compiler.vocab_size:
            accepted = False
        elif token_id == self._compiler.eos_token_id:
            accepted = self._ended = self._matcher.is_accepting()
        else:
            accepted = self._matcher.try_consume_tokens([token_id]) == 1
            self._check()
        if not accepted:
            problem = f"the grammar does not allow token {token_id} here"
            raise InvalidRequestError(problem, parameter="structured_outputs", value=token_id)

    def is_terminated(self) -> bool:
        """Return whether the text is complete and nothing but end-of-sequence can follow."""
        return self._ended or self._matcher.is_stopped()

    def copy(self) -> GrammarMatcher:
        """Return an independent matcher at the same place."""
        return GrammarMatcher(self._compiler, self._matcher.deep_copy(), ended=self._ended)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
            raise RequestFailedError(f"the grammar engine gave up on this text: {reason}")


class _Vocabulary:
    """A tokenizer with the interface that llguidance expects.

    All added tokens count as special, so that no text matches them. Ids of the model past the vocabulary are empty and never match.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.id_to_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.added_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, allow_special=False)  # ids of added tokens would match no text


def _grammar_text(spec: StructuredOutputs) -> str:
    """Return a constraint in llguidance's grammar format."""
    from llguidance import LLMatcher

    if spec.json is not None:
        assert isinstance(spec.json, str)
        options: Any = COMPACT if spec.json_whitespace == "compact" else FLEXIBLE
        return LLMatcher.grammar_from_json_schema(spec.json, defaults=options)
    if spec.grammar is not None:
        return LLMatcher.grammar_from_lark(spec.grammar)
    # Many strings compile much faster as alternatives of a regular expression than as alternatives of a grammar.
    regex = spec.regex or "|".join(SYNTAX.sub(r"\\\g<0>", choice) for choice in spec.choice or ())
    return LLMatcher.grammar_from_regex(regex)


def _is_installed(package: str) -> bool:
    """Whether a package is installed, without importing it."""
    try:
        return find_spec(package) is not None
    except ImportError:  # raised by an import hook of the host
        return False


def _malformed(problem: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {problem}", parameter="structured_outputs", value=value)


SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
"""Characters with a meaning in regular expressions."""


def check_size(name: str, value: object, size: int, limit: int, unit: str) -> None:
    if size > limit:
        raise _malformed(f"{name} has {size:,} {unit}, more than {limit:,}; make it smaller", value)


def num_bytes(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise _malformed(f"{name} has the lone surrogate {text[error.start]!r}; it must be Unicode text", text) from error


def schema_text(given: Mapping[str, Any] | str) -> str:
    """Return a JSON schema as the text of valid JSON that is given to llguidance."""
    try:
        if not isinstance(given, str):
            given = jsonlib.dumps(given, allow_nan=False)
        check_size("json", given, len(given), MAX_BYTES, "characters")
        schema = jsonlib.loads(given)
        text = jsonlib.dumps(schema, allow_nan=False, ensure_ascii=False)
    except InvalidRequestError:
        raise
    except RecursionError as error:
        raise _malformed(f"json is nested too deep; at most {MAX_NESTING} objects and arrays inside each other", given) from error
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: the mapping changes during serialisation
        raise _malformed(f"json is not a JSON schema: {error}", given) from error
    if not isinstance(schema, dict):
        raise _malformed(f"json must be a schema object, not {type(schema).__name__}", given)
    check_size("json", given, num_bytes("json", text), MAX_BYTES, "bytes")
    _check_schema(schema, given)
    return text


def _check_schema(schema: dict[str, Any], given: object) -> None:
    """Check how far llguidance recurses in a JSON schema; it visits the target of each reference once."""
    depth, references = measure(schema)
    check_size("json", given, depth, MAX_NESTING, "objects and arrays inside each other")
    objects = [(node, level) for node, level in _nodes(schema) if isinstance(node, dict)]
    for name, limit in (("properties", MAX_PROPERTIES), ("patternProperties", MAX_PATTERN_PROPERTIES)):
        count = sum(len(node[name]) for node, _ in objects if isinstance(node.get(name), dict))
        check_size("json", given, count, limit, name)
    for node, _ in objects:
        _check_bounds(node, given)
    has_ids = any(level > 1 and isinstance(node.get(name), str) for node, level in objects for name in ("$id", "id"))
    depth += _depth_of_references(schema, references, has_ids)
    check_size("json", given, depth, MAX_DEPTH, "levels along its references")


def _check_bounds(node: dict[str, Any], given: object) -> None:
    """Refuse an exclusive whole number as a bound if the other bound is less than 1 away: llguidance allows that number."""
    for name, inclusive, others, sign in _EXCLUSIVE:
        bound, *ends = (node.get(key) for key in (name, *others))
        near = [sign * end for end in ends if isinstance(end, (int, float))]
        if not isinstance(bound, (int, float)) or not near:
            continue
        bound = sign * bound
        if bound >= 0 and bound % 1 == 0 and bound < min(near) < bound + 1:
            problem = f"json has {name}={node[name]} and another bound less than 1 away, which cannot be enforced; use {inclusive}"
            raise _malformed(problem, given)


def _nodes(node: object) -> Iterator[tuple[object, int]]:
    """Yield the objects and arrays in a value, itself first, with their nesting levels from 1 on."""
    left = [(node, 1)]
    while left:
        value, level = left.pop()
        yield value, level
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        left += [(x, level + 1) for x in inner if isinstance(x, (dict, list))]


def measure(node: object) -> tuple[int, set[str]]:
    """Return how deep a value is nested, at least 1, and all references in it."""
    depth, references = 1, set[str]()
    for value, level in _nodes(node):
        depth = max(depth, level)
        if isinstance(value, dict) and isinstance(value.get("$ref"), str):
            references.add(value["$ref"])
    return depth, references


def _depth_of_references(schema: dict[str, Any], references: set[str], has_ids: bool) -> int:
    """Return an upper bound of the levels below the first reference."""
    known: dict[int, tuple[int, set[str]]] = {}  # by target, because references may share one
    measured: dict[str, tuple[int, set[str]]] = {}
    for reference in references:
        target = schema if has_ids else target_of(schema, reference)
        if id(target) not in known:
            known[id(target)] = measure(target)
        measured[reference] = known[id(target)]
    sorter = TopologicalSorter({reference: inner for reference, (_, inner) in measured.items()})
    with suppress(CycleError):  # the sorter still yields the references outside of cycles
        sorter.prepare()
    levels: dict[str, int] = {}
    while ready := sorter.get_ready():
        for reference in ready:
            depth, inner = measured[reference]
            levels[reference] = depth + max((levels[other] for other in inner), default=0)
        sorter.done(*ready)
    return max(levels.values(), default=0) + sum(depth for name, (depth, _) in measured.items() if name not in levels)


def target_of(schema: dict[str, Any], reference: str) -> object:
    """Return the target of a reference. If it cannot be resolved, return the whole schema: no target is deeper."""
    node: Any = schema
    for part in unquote(reference).split("/")[1:] if reference.startswith("#") else ():
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return schema
    return node
