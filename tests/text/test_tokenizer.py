"""Tokenizer, incremental detokenization and stop strings, on DeepSeek's real vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from dsv4lite.errors import CheckpointError, InvalidRequestError, UnsupportedError
from dsv4lite.text.scan import Scanner
from dsv4lite.text.tokenizer import LONG_TEXT, Detokenizer, StopStrings, Tokenizer
from tests.text.release import FOLDER, REAL

LIBRARY = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))

SPECIAL_TOKENS = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜▁pad▁｜>": 2,
    "<｜fim▁hole｜>": 128800,
    "<｜fim▁begin｜>": 128801,
    "<｜fim▁end｜>": 128802,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<|EOT|>": 128805,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜action｜>": 128829,
    "<｜query｜>": 128830,
    "<｜authority｜>": 128831,
    "<｜domain｜>": 128832,
    "<｜title｜>": 128836,
    "<｜extracted_url｜>": 128844,
    "<｜read_url｜>": 128845,
}

any_ids = st.lists(st.integers(0, REAL.vocab_size - 1), max_size=30)
byte_ids = st.lists(st.sampled_from([i for i in range(400) if len(REAL.id_to_bytes(i)) == 1]), max_size=30)
"""Single bytes, so mostly sequences that are not UTF-8."""
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def in_pieces(data: st.DataObject, whole: list[int] | str) -> list[list[int] | str]:
    """Cut a sequence at random places; pieces may be empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]


# ---- vocabulary ----


@pytest.mark.parametrize(("token", "id"), SPECIAL_TOKENS.items())
def test_special_token_is_one_id_in_vocabulary_and_text(token: str, id: int) -> None:
    assert REAL.token_id(token) == id
    assert REAL.encode(f"a{token}b") == [*REAL.encode("a"), id, *REAL.encode("b")]
    assert REAL.id_to_bytes(id) == token.encode()
    assert id in REAL.added_ids


def test_named_tokens_come_from_the_configuration() -> None:
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    assert (REAL.bos_token_id, REAL.eos_token_id) == (0, 1)
    assert REAL.pad_token_id == REAL.token_id(config["pad_token"]["content"])
    assert REAL.add_bos_token is False


def test_every_byte_has_a_token() -> None:
    assert (REAL.vocab_size, REAL.token_id("no such token")) == (129280, None)
    assert {REAL.id_to_bytes(i) for i in range(400)} >= {bytes([b]) for b in range(256)}


def test_encode_adds_bos_only_when_asked_and_only_once() -> None:
    plain = REAL.encode("Hello")
    assert plain[0] != 0
    assert REAL.encode("Hello", add_bos=True) == [0, *plain]
    assert REAL.encode("<｜begin▁of▁sentence｜>Hello", add_bos=True) == [0, *plain]
    assert REAL.encode("", add_bos=True) == [0]


@pytest.mark.parametrize("text", ["\ud800", "\ud800" * (LONG_TEXT + 1), ["a"] * (LONG_TEXT + 1), b"a", None])
def test_encode_rejects_what_is_not_unicode(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="surrogates"):
        REAL.encode(text)


def test_texts_that_are_not_unicode_are_told_where() -> None:
    """The error named neither what was given nor its place."""
    for text, told in ((b"abc", "is bytes"), ("ab\udcffc", r"has '\\udcff' at 2"), ("\ud800", r"has '\\ud800' at 0")):
        with pytest.raises(InvalidRequestError, match=told) as caught:
            REAL.encode(text)  # type: ignore[arg-type]
        assert caught.value.value == text


def test_long_texts_have_the_ids_of_the_library() -> None:
    text = "def größe(a):\n    return a ** 2<｜User｜>" * (LONG_TEXT // 30)
    assert len(text) > LONG_TEXT and REAL.encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


def test_decode_skips_special_tokens_but_keeps_chat_markup() -> None:
    ids = REAL.encode("<｜begin▁of▁sentence｜><｜User｜>Hi<think>é</think><｜end▁of▁sentence｜>")
    assert REAL.decode(ids) == "<｜User｜>Hi<think>é</think>"
    assert REAL.decode(ids, skip_special_tokens=False) == "<｜begin▁of▁sentence｜><｜User｜>Hi<think>é</think><｜end▁of▁sentence｜>"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    a = REAL.encode("a")
    assert REAL.decode([*a, REAL.vocab_size, 10**6, -1, *a]) == "aa"
    assert REAL.id_to_bytes(REAL.vocab_size) == REAL.id_to_bytes(-1) == b""


@given(unicode_text)
def test_decode_inverts_encode(text: str) -> None:
    assert REAL.decode(REAL.encode(text), skip_special_tokens=False) == text


@given(any_ids | byte_ids, st.booleans())
def test_decode_equals_the_library(ids: list[int], skip: bool) -> None:
    assert REAL.decode(ids, skip_special_tokens=skip) == LIBRARY.decode(ids, skip_special_tokens=skip)


def test_every_single_token_decodes_as_in_the_library() -> None:
    ids = range(REAL.vocab_size)
    assert [REAL.decode([i], skip_special_tokens=False) for i in ids] == LIBRARY.decode_batch(
        [[i] for i in ids], skip_special_tokens=False
    )


# ---- loading ----


def save(folder: Path, *, config: object = None, vocabulary: str | None = None) -> Path:
    """Write a vocabulary of single bytes, and a configuration if given."""
    small = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    small.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.decoder = tokenizers.decoders.ByteLevel()
    small.add_special_tokens(["<s>"])
    small.enable_truncation(2)
    (folder / "tokenizer.json").write_text(small.to_str() if vocabulary is None else vocabulary)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_from_folder_works_without_a_configuration_and_ignores_truncation(tmp_path: Path) -> None:
    loaded = Tokenizer.from_folder(save(tmp_path))
    assert loaded.bos_token_id is loaded.eos_token_id is None
    assert loaded.decode(loaded.encode("äbc")) == "äbc"
    with pytest.raises(InvalidRequestError, match="no BOS token"):
        loaded.encode("a", add_bos=True)


@pytest.mark.parametrize("entry", ["<s>", {"content": "<s>"}])
def test_from_folder_reads_both_spellings_of_a_token(tmp_path: Path, entry: object) -> None:
    loaded = Tokenizer.from_folder(save(tmp_path, config={"bos_token": entry, "eos_token": None, "add_bos_token": True}))
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.add_bos_token) == (256, None, True)


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        *(({"vocabulary": vocabulary}, "cannot read") for vocabulary in ("{", "{}", "[1]")),
        *(({"config": config}, "tokenizer_config") for config in ("{", "[]")),
        ({"config": {"bos_token": "<s>", "eos_token": "</s>"}}, "eos_token '</s>' is not in the vocabulary"),
        (None, r"tokenizer\.json is missing"),
    ],
)
def test_from_folder_with_broken_files_is_a_checkpoint_error(tmp_path: Path, saved: dict[str, Any] | None, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        Tokenizer.from_folder(tmp_path if saved is None else save(tmp_path, **saved))


def test_vocabulary_that_is_not_byte_level_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="byte-level"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")))


# ---- incremental decoding ----


@given(any_ids | byte_ids | unicode_text.map(REAL.encode), st.booleans(), st.data())
def test_detokenizer_pieces_join_to_the_full_decode(ids: list[int], skip: bool, data: st.DataObject) -> None:
    stream = Detokenizer(REAL, skip_special_tokens=skip)
    text = "".join([stream.push(piece) for piece in in_pieces(data, ids)]) + stream.flush()
    assert text == LIBRARY.decode(ids, skip_special_tokens=skip)


@given(unicode_text.filter(lambda text: "�" not in text))
def test_detokenizer_never_shows_a_replacement_character_for_valid_text(text: str) -> None:
    stream = Detokenizer(REAL)
    pieces = [stream.push([id]) for id in REAL.encode(text)]
    assert not any("�" in piece for piece in pieces)
    assert stream.flush() == ""
    assert "".join(pieces) == text


def test_detokenizer_holds_a_character_until_its_last_byte() -> None:
    ids = [next(i for i in range(400) if REAL.id_to_bytes(i) == bytes([b])) for b in "😀".encode()]
    stream = Detokenizer(REAL)
    assert [stream.push([id]) for id in ids] == ["", "", "", "😀"]


def test_detokenizer_replaces_invalid_bytes_and_flushes_an_unfinished_character_once() -> None:
    begin, letter = (next(i for i in range(400) if REAL.id_to_bytes(i) == byte) for byte in (b"\xf0", b"A"))
    stream = Detokenizer(REAL)
    assert [stream.push([begin]), stream.push([letter]), stream.push([begin])] == ["", "�A", ""]
    assert [stream.flush(), stream.flush(), stream.push([letter])] == ["�", "", "A"]


# ---- stop strings ----


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search the whole text: smallest end, then smallest start."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.text("ab\n", max_size=40), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4), st.booleans(), st.data())
def test_stop_strings_equal_the_search_in_the_whole_text(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    stream = StopStrings(stops, include_stop_str_in_output=include)
    emitted, matched = "", None
    for piece in in_pieces(data, text):
        new, matched = stream.push(piece)
        emitted += new
        assert matched is not None or naive_stop(text, stops, include)[0].startswith(emitted)
    emitted += stream.flush()
    assert (emitted, matched) == naive_stop(text, stops, include)


def test_stop_strings_hold_back_only_what_may_begin_one() -> None:
    stream = StopStrings(["</end>"])
    assert stream.push("text <") == ("text ", None)
    assert stream.push("b> </e") == ("<b> ", None)
    assert stream.push("nd> more") == ("", "</end>")
    assert stream.push("ignored") == ("", "</end>")
    assert stream.flush() == ""


def test_stop_strings_across_detokenized_tokens() -> None:
    ids = REAL.encode("The end.\n\nQuestion: next")
    detokenizer, stops = Detokenizer(REAL), StopStrings(["\n\nQuestion:"])
    pieces = [stops.push(detokenizer.push([id])) for id in ids]
    assert "".join(text for text, _ in pieces) == "The end."
    assert pieces[-1][1] == "\n\nQuestion:"


def test_stop_strings_prefer_the_longest_that_ends_together() -> None:
    assert StopStrings(["c", "bc"]).push("abcd") == ("a", "bc")
    assert StopStrings(["abcd", "b"]).push("abcd") == ("a", "b")


@given(st.text("<ab>", max_size=30), st.data())
def test_scanner_returns_every_character_once(text: str, data: st.DataObject) -> None:
    scanner, seen = Scanner(), ""
    for piece in in_pieces(data, text):
        scanner.feed(piece)
        found: str | None = ""
        while found is not None:
            before, found = scanner.read_until(("<a>", "a><b", "b"))
            seen += before + (found or "")
    assert seen + scanner.rest() == text
