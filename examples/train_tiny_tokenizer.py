"""Corpus and tokenizer of the tiny checkpoint.

Reads the Python files of this interpreter's standard library, sets about 3 % of the modules aside as held-out
text, trains a byte-level BPE tokenizer with the chat special tokens of DeepSeek-V4 on the rest, and writes

    OUT/tokenizer.json, OUT/tokenizer_config.json      the tokenizer, in the release format
    DATA/*.i64                                         the tokens that ``train_tiny.py`` reads, and where texts and lines begin

    python examples/train_tiny_tokenizer.py --out dsv4lite/assets/tiny --data build/tiny
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import sysconfig
import textwrap
from array import array
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
TASKS = ("action", "query", "authority", "domain", "title", "extracted_url", "read_url")
SPECIAL_TOKENS = (
    *(BOS, EOS, PAD, USER, ASSISTANT, "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"),
    *(f"<｜{task}｜>" for task in TASKS),
    *("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<|EOT|>"),
)
# Numbers in groups of three; then punctuation glued to a word, words, operators, line ends, runs of blanks. A run of
# indentation keeps its last blank for the word that follows, so that one token covers the indentation of most lines.
DIGITS = r"\p{N}{1,3}"
PIECES = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEST_FOLDERS = {"test", "tests", "idle_test"}
# Generated tables (character maps, help topics): useless for training, and trivial or noise in the held-out set.
GENERATED = ("encodings/", "pydoc_data/")
HELD_OUT_ONE_IN = 30


def read_standard_library() -> dict[str, dict[str, str]]:
    """Return {"main" | "tests" | "heldout": {path below the library's folder: text}}, each sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, dict[str, str]] = {"main": {}, "tests": {}, "heldout": {}}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", *GENERATED)):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # the tests of the parser hold files in other encodings
            continue
        if len(text) < 200:
            continue
        if TEST_FOLDERS & set(name.split("/")[:-1]):
            kind = "tests"
        elif hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_ONE_IN == 0:
            kind = "heldout"
        else:
            kind = "main"
        texts[kind][name] = text
    return texts


def chat_documents(modules: dict[str, str]) -> Iterator[str]:
    """Yield one chat, in the V4 wire format, per documented function: a request for it, and its source as the answer."""
    for text in modules.values():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc, source = ast.get_docstring(node), ast.get_source_segment(text, node, padded=True)
            if doc and source and len(source) < 1500:
                summary = " ".join(doc.split("\n\n")[0].split())
                code = textwrap.dedent(source)
                yield f"{BOS}{USER}Write the function `{node.name}`. {summary}{ASSISTANT}</think>{code}{EOS}"


def top_level_pieces(text: str) -> list[str]:
    """Cut a module before every line that starts at the margin.

    No token spans such a boundary, so the tokens are the same, and the library's time grows with the square of the length.
    """
    return re.split(r"(?<=\n)(?=\S)", text)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train the byte-level BPE tokenizer; every one of the 256 bytes has a token, so any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(DIGITS), "isolated"),
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in top_level_pieces(text)), trainer)
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, object]:
    """The release's tokenizer_config.json: no token is added automatically, and padding is EOS."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def pack(tokenizer: Tokenizer, documents: list[str]) -> tuple[list[int], list[int], list[int]]:
    """Concatenate documents: (tokens [N], document starts [D + 1], line starts [L])."""
    lengths, ids = [0], list[int]()
    for document in documents:
        encodings = tokenizer.encode_batch_fast(top_level_pieces(document), add_special_tokens=False)
        ids.extend(token for encoding in encodings for token in encoding.ids)
        lengths.append(len(ids))
    line_ends = {i for token, i in tokenizer.get_vocab().items() if token.endswith("Ċ")}  # Ċ: the newline of byte-level BPE
    return ids, lengths, [place for place, token in enumerate(ids, 1) if token in line_ends]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="folder of the tokens")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-length", type=int, default=16384)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.data.mkdir(parents=True, exist_ok=True)

    texts = read_standard_library()
    chats = list(chat_documents(texts["main"]))
    tokenizer = train_tokenizer([*texts["main"].values(), *texts["tests"].values()], args.vocab_size)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    config = json.dumps(tokenizer_config(args.max_length), indent=2, ensure_ascii=False)
    (args.out / "tokenizer_config.json").write_text(config + "\n")

    shuffle = random.Random(0).sample
    lists: dict[str, list[int]] = {}
    for kind, documents in {**{k: [f"{BOS}{t}{EOS}" for t in v.values()] for k, v in texts.items()}, "chat": chats}.items():
        ordered = documents if kind == "heldout" else shuffle(documents, len(documents))
        tokens, borders, lines = pack(tokenizer, ordered)
        lists |= {f"{kind}_tokens": tokens, f"{kind}_documents": borders, f"{kind}_lines": lines}
        size = sum(len(d.encode()) for d in documents)
        ratio = size / len(tokens)
        print(f"{kind:8} {len(documents):6,} documents {size:10,} bytes {len(tokens):9,} tokens {ratio:.2f} bytes/token")
    lists["heldout_bytes"] = [len(text.encode()) for text in texts["heldout"].values()]
    for name, values in lists.items():
        (args.data / f"{name}.i64").write_bytes(array("q", values).tobytes())
    print("held out:", ", ".join(texts["heldout"]))


if __name__ == "__main__":
    main()
