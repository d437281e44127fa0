"""Constrain a completion to a JSON schema, a regular expression, a choice or a grammar.

The grammar engine is llguidance, an optional package. It works on the bytes of the tokens; chat markup and special tokens never
match, and end-of-sequence is allowed exactly where the text is complete.
"""

from __future__ import annotations

import json as jsonlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from dsv4lite.errors import InvalidRequestError, RequestFailedError, UnsupportedError, near_match
from dsv4lite.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

CACHED_GRAMMARS = 64
"""Compiled grammars that a compiler keeps, the latest used ones."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between JSON tokens. Limited, because a model that is forced into a schema it does not like may write whitespace forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What a completion has to look like; exactly one is given.

    Attributes:
        json: A JSON schema, as a mapping or as text.
        regex: A regular expression (Rust syntax: no look-around, no back references) that the whole text matches.
        choice: The text is one of these.
        grammar: A context-free grammar in llguidance's variant of Lark; the rule ``start`` is the text.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            known = ", ".join(f.name for f in fields(self))
            raise _malformed(f"exactly one of {known} is needed, got {', '.join(given) or 'none'}", given)
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _malformed(f"{name} must be a non-empty string", value)
        if self.choice is not None:
            choices: object = self.choice
            if isinstance(choices, str) or not self.choice or not all(isinstance(c, str) and c for c in self.choice):
                raise _malformed("choice must be a sequence of non-empty strings", choices)
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json is not None:
            try:
                schema = jsonlib.loads(self.json if isinstance(self.json, str) else jsonlib.dumps(self.json))
            except (TypeError, ValueError) as error:
                raise _malformed(f"json is not a JSON schema: {error}", self.json) from error
            if not isinstance(schema, dict):
                raise _malformed(f"json must be a schema object, not {type(schema).__name__}", self.json)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> StructuredOutputs:
        """Build from a mapping such as ``{"regex": "[0-9]+"}``.

        Raises:
            InvalidRequestError: For an unknown key, with a near match, or a malformed value.
        """
        known = [f.name for f in fields(cls)]
        for key in settings:
            if key not in known:
                raise _malformed(f"unknown key {key!r}{near_match(str(key), known)}", key)
        return cls(**settings)


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and remembers them. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int | None = None) -> None:
        """Prepare the vocabulary, which takes about a second.

        Args:
            tokenizer: The vocabulary.
            vocab_size: Length of the masks: number of logits of the model, at least that of the tokenizer (the default).

        Raises:
            UnsupportedError: llguidance is not installed, or the vocabulary has no end-of-sequence token or more tokens than the
                model.
        """
        try:
            import llguidance
        except ImportError as error:
            raise UnsupportedError("structured outputs need the package llguidance: pip install 'dsv4lite[structured]'") from error
        if tokenizer.eos_token_id is None:
            raise UnsupportedError("structured outputs need a tokenizer with an end-of-sequence token")
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        if self.vocab_size < tokenizer.vocab_size:
            problem = (
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {self.vocab_size}: they do not belong together"
            )
            raise UnsupportedError(problem)
        self._eos_token_id = tokenizer.eos_token_id
        self._matcher_type = llguidance.LLMatcher
        self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(tokenizer, self.vocab_size)))
        bits_of_byte = [[byte >> bit & 1 for bit in range(8)] for byte in range(256)]
        self._bits_of_byte = torch.tensor(bits_of_byte, dtype=torch.bool, device="cpu")
        """To unpack llguidance's bit masks with one look-up."""
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: StructuredOutputs) -> GrammarMatcher:
        """Return a matcher at the beginning of a text.

        Raises:
            InvalidRequestError: The schema, expression or grammar is malformed, or uses a feature that cannot be enforced.
        """
        grammar = self._grammar(spec)
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._matcher_type(self._vocabulary, grammar, log_level=0)
            if compiled.is_error():
                reason = compiled.get_error().strip().partition("\n<state>")[0]
                raise _malformed(f"the grammar cannot be compiled: {reason}", spec)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            matcher = compiled.deep_copy()
        return GrammarMatcher(matcher, bits_of_byte=self._bits_of_byte, vocab_size=self.vocab_size, eos_token_id=self._eos_token_id)

    def _grammar(self, spec: StructuredOutputs) -> str:
        """Return a specification in llguidance's own terms."""
        if spec.json is not None:
            schema = spec.json if isinstance(spec.json, str) else jsonlib.dumps(spec.json)
            return self._matcher_type.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
        if spec.regex is not None:
            return self._matcher_type.grammar_from_regex(spec.regex)
        if spec.choice is not None:
            return self._matcher_type.grammar_from_lark("start: " + " | ".join(map(jsonlib.dumps, spec.choice)))
        assert spec.grammar is not None
        return self._matcher_type.grammar_from_lark(spec.grammar)


class GrammarMatcher:
    """Where one text stands in its grammar."""

    __slots__ = ("_bits_of_byte", "_ended", "_eos_token_id", "_matcher", "_vocab_size")

    def __init__(
        self, matcher: LLMatcher, *, bits_of_byte: torch.Tensor, vocab_size: int, eos_token_id: int, ended: bool = False
    ) -> None:
        self._matcher = matcher
        self._bits_of_byte = bits_of_byte
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._ended = ended
        """Whether end-of-sequence was accepted. llguidance never sees it: its rollback counts it only where text could follow."""

    def mask(self) -> torch.Tensor:
        """Return which tokens may come next, bool [vocab_size] on the CPU; never all false.

        Raises:
            RequestFailedError: The grammar exceeded llguidance's limits on this text.
        """
        if self._ended:
            mask = torch.zeros(self._vocab_size, dtype=torch.bool, device="cpu")
            mask[self._eos_token_id] = True
            return mask
        bits = self._matcher.compute_bitmask()
        self._check()
        packed = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        return self._bits_of_byte.index_select(0, packed.int()).flatten()[: self._vocab_size]

    def accept(self, token_id: int) -> None:
        """Advance by a token.

        Raises:
            InvalidRequestError: The grammar does not allow it here; the matcher stays where it is.
            RequestFailedError: The grammar exceeded llguidance's limits on this text.
        """
        if self._ended or not 0 <= token_id < self._vocab_size:
            accepted = False
        elif token_id == self._eos_token_id:
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

    def rollback(self, n: int) -> None:
        """Take back the last ``n`` accepted tokens."""
        if n > 0 and self._ended:
            self._ended = False
            n -= 1
        if n > 0:
            self._matcher.rollback(n)
            self._check()

    def copy(self) -> GrammarMatcher:
        """Return an independent matcher at the same place."""
        return GrammarMatcher(
            self._matcher.deep_copy(),
            bits_of_byte=self._bits_of_byte,
            vocab_size=self._vocab_size,
            eos_token_id=self._eos_token_id,
            ended=self._ended,
        )

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
            raise RequestFailedError(f"the grammar engine gave up on this text: {reason}")


class _Vocabulary:
    """A tokenizer as llguidance wants to see it.

    All added tokens count as special, so that no text matches them; the model's ids past the vocabulary are empty and never match.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.id_to_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.added_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text)


def _malformed(problem: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {problem}", parameter="structured_outputs", value=value)
