"""Text to token ids and back, at once or as the ids arrive.

DeepSeek's vocabularies are byte-level: a token is a sequence of bytes, and a character may span several tokens. Decoding therefore
joins the bytes of the tokens and reads them as UTF-8; the standard library's decoder does this incrementally.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from dsv4lite.errors import CheckpointError, InvalidRequestError, UnsupportedError, shown
from dsv4lite.files import TABLE_BYTES, read_bytes, read_json
from dsv4lite.text.scan import Scanner

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
LONG_TEXT = 50_000  # characters, or token ids; longer prompts are encoded and checked in a worker thread
MOST_TOKENS = 1 << 23  # of a vocabulary: the sampler's limit


class Content(str):
    """Text in which control tokens are encoded as ordinary text; see ``Tokenizer.encode_parts``."""

    __slots__ = ()


class Tokenizer:
    """A byte-level vocabulary with its special tokens.

    Attributes:
        vocab_size: Number of ids, special tokens included. A model's embedding may be larger; further ids have no token.
        bos_token_id: Beginning of a prompt; ``None`` if the vocabulary has none.
        eos_token_id: End of a completion.
        pad_token_id: Padding.
        bos_token, eos_token: The first two tokens as text; ``None`` without an id.
        add_bos_token: Whether the checkpoint's configuration puts the BOS token before a plain prompt.
        chat_template: The Jinja template that the checkpoint ships, if any.
        special_ids: Ids that ``skip_special_tokens`` leaves out of decoded text. In DeepSeek's vocabularies chat markup such as
            ``<think>`` is a single token but not special.
        added_ids: All ids outside the byte-level vocabulary proper: ``special_ids``, chat markup and placeholders.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = BOS,
        eos_token: str | None = EOS,
        pad_token: str | None = PAD,
        add_bos_token: bool = False,
        chat_template: str | None = None,
    ) -> None:
        """Wrap a loaded ``tokenizers.Tokenizer``. A named token that its vocabulary lacks has the id ``None``.

        Raises:
            UnsupportedError: The vocabulary is not byte-level.
        """
        if not (isinstance(backend.decoder, ByteLevel) and isinstance(backend.model, BPE)):
            given = f"the tokenizer is {type(backend.model).__name__} with decoder {shown(backend.decoder)}"
            raise UnsupportedError(f"{given}; only byte-level BPE vocabularies are supported")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._bytes = _byte_table(vocabulary)
        self.vocab_size = len(self._bytes)
        self.added_ids = frozenset(added)
        longest_first = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if added else "(?!)")
        self._longest = len(longest_first[0]) if added else 0
        self._begun = {token[:size] for token in longest_first for size in range(1, len(token))}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.bos_token_id = None if bos_token is None else vocabulary.get(bos_token)
        self.eos_token_id = None if eos_token is None else vocabulary.get(eos_token)
        self.pad_token_id = None if pad_token is None else vocabulary.get(pad_token)
        self.bos_token = None if self.bos_token_id is None else bos_token
        self.eos_token = None if self.eos_token_id is None else eos_token
        self.add_bos_token = add_bos_token
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, path: str | Path, *, vocab_size: int = MOST_TOKENS) -> Tokenizer:
        """Load ``tokenizer.json`` and, if it exists, ``tokenizer_config.json`` from a checkpoint's folder.

        Without a configuration, the special tokens are those that all DeepSeek vocabularies share.

        Args:
            vocab_size: The model's vocabulary size; every id must be below it.

        Raises:
            CheckpointError: A file is missing or malformed, or names a special token that the vocabulary lacks.
            UnsupportedError: The vocabulary is not byte-level.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not os.path.lexists(file):
            problem = f"{file.name} is missing; tokenizer=FOLDER takes it from elsewhere"
            raise CheckpointError(f"no tokenizer in {str(folder)!r}", problems=[problem])
        backend = _read_vocabulary(file)
        config_file = folder / "tokenizer_config.json"
        config = read_json(config_file) if os.path.lexists(config_file) else {}
        entries = {key: config[key] for key in ("bos_token", "eos_token", "pad_token") if key in config}
        named = {key: entry.get("content") if isinstance(entry, dict) else entry for key, entry in entries.items()}  # older files
        vocabulary = backend.get_vocab(with_added_tokens=True)
        problems = [
            f"{key} {shown(text)} is not in the vocabulary"
            for key, text in named.items()
            if text is not None and not (isinstance(text, str) and text in vocabulary)
        ]
        largest = max(vocabulary.values(), default=-1)
        if largest >= vocab_size:
            problems.append(f"{file.name} has the token id {largest}; ids are below the model's vocab_size={vocab_size}")
        add_bos = config.get("add_bos_token", False)
        if not isinstance(add_bos, bool):
            problems.append(f"add_bos_token={shown(add_bos)} must be true or false")
        if problems:
            raise CheckpointError(
                f"the tokenizer in {str(folder)!r} does not fit its configuration or the model", problems=problems
            )
        return cls(backend, **named, add_bos_token=add_bos, chat_template=_chat_template(folder, config))

    def encode(self, text: str, *, add_bos: bool = False, allow_special: bool = True) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: Any text; a rendered chat already contains its BOS token.
            add_bos: Put the BOS token first unless the text begins with it.
            allow_special: Added tokens in the text, such as ``<｜User｜>``, become their ids; otherwise they are encoded as
                ordinary text, and no id is one of ``added_ids``.

        Raises:
            InvalidRequestError: ``text`` is not a string of Unicode characters, or there is no BOS token to add.
        """
        try:
            if isinstance(text, str) and len(text) > LONG_TEXT:  # unlike ``encode``, this method lets other threads run
                ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            else:
                ids = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            lone = re.search(r"[\ud800-\udfff]", text) if isinstance(text, str) else None
            given = f"has {lone[0]!r} at {lone.start()}; decode its bytes as UTF-8" if lone else f"is {type(text).__name__}"
            problem = f"the text to encode must be a str without lone surrogates, and {given}"
            raise InvalidRequestError(problem, parameter="prompt", value=text) from error
        if not allow_special and not self.added_ids.isdisjoint(ids):
            ids = self._encode_plain(text)
        if not add_bos:
            return ids
        if self.bos_token_id is None:
            raise InvalidRequestError("this tokenizer has no BOS token to add", parameter="add_bos", value=add_bos)
        return ids if ids[:1] == [self.bos_token_id] else [self.bos_token_id, *ids]

    def encode_parts(self, parts: Iterable[str]) -> list[int]:
        """Return the token ids of the joined parts of a prompt.

        Added tokens become their ids, except inside ``Content``. All text between two of them is encoded at once, so the ids are
        those of ``encode`` for the joined parts, unless ``Content`` contains an added token.

        Raises:
            InvalidRequestError: A part is not a string of Unicode characters.
        """
        pieces: list[tuple[bool, str]] = []
        for part in parts:
            split = [part] if isinstance(part, Content) else self.split_added(part)
            pieces += [(place % 2 == 1, piece) for place, piece in enumerate(split)]
        ids: list[int] = []
        for is_control, group in groupby(pieces, key=lambda piece: piece[0]):
            text = "".join(piece for _, piece in group)
            ids += self.encode(text, allow_special=is_control)
        return ids

    def split_added(self, text: str) -> list[str]:
        """Split a text at its added tokens: pieces with odd indices are added tokens, the others the text between them."""
        return self._added.split(text)

    def cut_added(self, text: str, mark: str) -> str:
        """Put a mark after the first character of every added token in a text, and of one that text behind it could complete."""
        *pieces, end = self.split_added(text)
        last = end.rstrip()  # blanks may be stripped
        for i in reversed(range(max(0, len(last) - self._longest), len(last))):
            if last[i:] in self._begun:
                end = f"{end[: i + 1]}{mark}{end[i + 1 :]}"
        return "".join(f"{piece[0]}{mark}{piece[1:]}" if i % 2 else piece for i, piece in enumerate(pieces)) + end

    def _encode_plain(self, text: str) -> list[int]:
        """Encode without recognising added tokens; the library has no such option, so its stages are called one by one."""
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
        return [token.id for word, _ in words for token in backend.model.tokenize(word)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; invalid UTF-8 becomes U+FFFD, and ids outside the vocabulary are skipped."""
        return self.decode_bytes(ids, skip_special_tokens=skip_special_tokens).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """Return the joined bytes of ``ids``."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return b"".join([self.id_to_bytes(id) for id in ids if id not in skipped])

    def id_to_bytes(self, id: int) -> bytes:
        """Return the bytes of a token; none for an id outside the vocabulary."""
        return self._bytes[id] if 0 <= id < self.vocab_size else b""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token given as the vocabulary spells it, such as ``"<think>"``."""
        return self._backend.token_to_id(token)


class Detokenizer:
    """Text from token ids that arrive a few at a time.

    An incomplete character is held back; U+FFFD appears only where no further byte could make the text valid. Without ``markup``,
    the joined results of ``push`` and ``flush`` equal ``Tokenizer.decode`` of all ids. The cost of a call is proportional to its
    new ids.
    """

    __slots__ = ("_decoder", "_skip_all", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, markup: Sequence[str] = ()) -> None:
        """Start with no ids; ``markup`` are special tokens that are never skipped."""
        self._tokenizer = tokenizer
        self._skip_all = skip_special_tokens and not markup
        skips_some = skip_special_tokens and markup
        self._skipped = tokenizer.special_ids.difference(map(tokenizer.token_id, markup)) if skips_some else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that ``ids`` complete."""
        ids = [id for id in ids if id not in self._skipped] if self._skipped else ids
        return self._decoder.decode(self._tokenizer.decode_bytes(ids, skip_special_tokens=self._skip_all))

    def flush(self) -> str:
        """Return the replacement text of an unfinished character, and reset the decoder."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class StopStrings:
    """Ends a stream of text at the first stop string, however the stream is cut into pieces.

    The stop string that ends first wins; among several that end at the same character, the longest. Text that may be the beginning
    of a stop string is held back until more text decides it.
    """

    __slots__ = ("_include", "_matched", "_scanner", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """Look for any of ``stops``, none of which is empty."""
        self._stops = tuple(stops)
        self._include = include_stop_str_in_output
        self._scanner = Scanner()
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text to emit and the stop string, once one is complete; later text is dropped."""
        if self._matched is not None:
            return "", self._matched
        self._scanner.feed(text)
        emitted, self._matched = self._scanner.read_until(self._stops)
        if self._matched is not None and self._include:
            emitted += self._matched
        return emitted, self._matched

    def flush(self) -> str:
        """Return the text held back, for a stream that ends without a stop string."""
        return "" if self._matched is not None else self._scanner.rest()


def _read_vocabulary(file: Path) -> tokenizers.Tokenizer:
    text = read_bytes(file, TABLE_BYTES)
    try:
        return tokenizers.Tokenizer.from_str(text.decode("utf-8"))
    except BaseException as error:  # the library raises bare Exception for a malformed file, or its Rust code panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"cannot read {str(file)!r}", problems=[str(error)]) from error


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return ``chat_template.jinja``, or the configuration's template: its only one, or the one named ``default``."""
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        return read_bytes(file, TABLE_BYTES).decode("utf-8", errors="replace")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = [entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[0] if named else None
    return found if isinstance(found, str) else None


def _byte_table(vocabulary: dict[str, int]) -> list[bytes]:
    """Return the bytes of every id up to the largest.

    The vocabulary writes each byte as one printable character. A token with any other character is an added token in plain text.
    """
    # The character for each byte: Latin-1's printable ones as they are, the others shifted past U+00FF in order.
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    byte_of = {chr(byte if byte in printable else next(shifted)): byte for byte in range(256)}
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id in vocabulary.items():
        try:
            table[id] = bytes([byte_of[char] for char in token])
        except KeyError:
            table[id] = token.encode()
    return table
