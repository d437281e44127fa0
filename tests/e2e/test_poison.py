"""The poison suite: bad requests beside good ones, on every kind of executor, with and without speculation.

The good requests of the batch give the bits that they give alone, each bad one fails with a typed error of its own or succeeds, the
engine stays ready, and everything the requests held is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.config import MTP
from dsv4lite.errors import ContextLengthError, DSV4LiteError, InvalidRequestError, RequestFailedError
from dsv4lite.llm import LLM
from dsv4lite.request import Phase, RequestOutput, SamplingParams
from tests.e2e.engines import nan_embedding, opened, prompts_of, same_outputs, write_model
from tests.e2e.schemas import chain, rules
from tests.parallel.requests import SHARED

pytestmark = pytest.mark.usefixtures("forked_ranks")

VOCAB = SHARED["vocab_size"]
NAN_TOKEN = VOCAB - 1
FINITE: Mapping[str, Any] = {"seed": 1, "bad_words_ids": ((NAN_TOKEN,),)}
A, B, C, D = prompts_of((5, 40, 130, 70), NAN_TOKEN, seed=11)
SETTINGS: Mapping[str, Any] = {"max_model_len": 512, "deterministic": True, "max_num_seqs": 12}
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "thread": {},
    "thread-mtp": {"speculative": MTP(2, adaptive=False)},
    "process": {"executor": "process"},
    "process-mtp": {"executor": "process", "speculative": MTP(2, adaptive=False)},
    "tp2": {"tensor_parallel_size": 2},
    "tp2-mtp": {"tensor_parallel_size": 2, "speculative": MTP(2, adaptive=False)},
}
GOOD = (
    (A, SamplingParams(max_tokens=10, temperature=0, logprobs=2, ignore_eos=True, bad_words_ids=((NAN_TOKEN,),))),
    (B, SamplingParams(max_tokens=10, seed=5, n=2, logprobs=0, ignore_eos=True, bad_words_ids=((NAN_TOKEN,),))),
    (C, SamplingParams(max_tokens=10, seed=6, prompt_logprobs=1, structured_outputs={"regex": "[a-e]{4,8}"})),
)


def nested(depth: int, leaf: Any) -> Any:
    """Return a schema of objects inside objects."""
    for _ in range(depth):
        leaf = {"type": "object", "properties": {"a": leaf}, "required": ["a"], "additionalProperties": False}
    return leaf


def any_of(depth: int) -> Any:
    """Return a schema of alternatives inside alternatives."""
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "integer"}]}
    return schema


def changed_later(name: str, before: Any, change: Callable[[Any], None]) -> Callable[[], tuple[Any, SamplingParams]]:
    """Return a request whose setting is changed by the caller after the parameters were made."""

    def make() -> tuple[Any, SamplingParams]:
        value = before.copy()
        params = SamplingParams(max_tokens=6, **FINITE, **{name: value})
        change(value)
        return D, params

    return make


@dataclass(frozen=True, kw_only=True)
class Poison:
    """A bad request.

    Attributes:
        make: Returns prompt and parameters, or raises.
        options: Further arguments of the call.
        error: What it fails with; ``None`` if it succeeds.
        text: What it must generate, if that is known.
    """

    make: Callable[[], tuple[Any, SamplingParams]]
    options: Mapping[str, Any] = field(default_factory=dict)
    error: type[DSV4LiteError] | None = InvalidRequestError
    text: str | None = None


def settings(error: type[DSV4LiteError] | None = InvalidRequestError, text: str | None = None, **values: Any) -> Poison:
    """A request with a bad parameter."""
    return Poison(make=lambda: (D, SamplingParams(**{"max_tokens": 12, **FINITE, **values})), error=error, text=text)


def structured(error: type[DSV4LiteError] | None = InvalidRequestError, text: str | None = None, **value: Any) -> Poison:
    """A request with a bad grammar."""
    return settings(error, text, structured_outputs=value, max_tokens=40)


def prompt(value: Any, error: type[DSV4LiteError] | None = InvalidRequestError) -> Poison:
    """A request with a bad prompt."""
    return Poison(make=lambda: (value, SamplingParams(max_tokens=4, **FINITE)), error=error)


def option(error: type[DSV4LiteError] | None = InvalidRequestError, **values: Any) -> Poison:
    """A request with a bad option of the call."""
    return Poison(make=lambda: (D, SamplingParams(max_tokens=4, **FINITE)), options=values, error=error)


HUGE = 10**400
GROUPS = 3
"""Groups of about twenty bad requests of all kinds; those of a group run at once."""
POISONS: Mapping[str, Poison] = {
    # Grammars that do not compile.
    "regex-unclosed": settings(structured_outputs={"regex": "(a"}, n=3),
    "regex-deep": structured(regex="(" * 1000 + "a" + ")" * 1000),
    "regex-look-ahead": structured(regex="(?=a)b"),
    "regex-explodes": structured(RequestFailedError, regex="((a{1000}){1000}){1000}"),
    "regex-surrogate": structured(regex="a\ud800"),
    "lark-malformed": structured(grammar="start: ("),
    "lark-nonsense": structured(grammar="start: ~~~"),
    "lark-unknown-rule": structured(grammar="start: missing"),
    "lark-chain": structured(grammar=rules(3000)),
    "lark-surrogate": structured(grammar='start: "\udc80"'),
    "schema-unknown-type": structured(json={"type": "widget"}),
    "schema-unresolved-reference": structured(json={"$ref": "#/$defs/none"}),
    "schema-of-itself": structured(json={"$ref": "#"}),
    "schema-unique-items": structured(json={"type": "array", "uniqueItems": True}),
    "schema-minimum-huge": structured(json={"minimum": 10**400}),
    "schema-nan": structured(json={"const": float("nan")}),
    "schema-infinite-text": structured(json='{"type": "number", "maximum": 1e400}'),
    "schema-nested-3000": structured(json=nested(3000, {"type": "integer"})),
    "schema-any-of-3000": structured(json=any_of(3000)),
    "schema-references-3000": structured(json=chain(3000)),
    "schema-surrogate": structured(json={"const": "\ud800"}),
    "schema-text-deep": structured(json='{"a":' * 100_000 + "1" + "}" * 100_000),
    "choice-surrogate": structured(choice=["\ud83d"]),
    "choice-huge": structured(choice=[f"c{i}" for i in range(100_001)]),
    # Grammars whose text contains what a tokenizer turns into one added token.
    "const-with-tag": structured(None, '"a </think> b"', json={"const": "a </think> b"}),
    "choice-of-a-token": structured(None, "</think>", choice=["</think>"]),
    "lark-of-a-token": structured(None, "</think>", grammar='start: "</think>"'),
    "choice-beyond-the-vocabulary": structured(RequestFailedError, choice=["<｜User｜>"]),
    "regex-with-tag": structured(None, "<think>ab", regex="<think>ab"),
    # Grammars that other settings leave no token for.
    "grammar-without-tokens": settings(RequestFailedError, structured_outputs={"regex": "abc"}, allowed_token_ids=(60, 61)),
    # Numbers no field can hold.
    "min-tokens-huge": settings(min_tokens=HUGE, max_tokens=None),
    "max-tokens-huge": settings(ContextLengthError, max_tokens=2**31 - 1),
    "max-tokens-absurd": settings(max_tokens=10**18),
    "seed-huge": settings(seed=10**5000),
    "temperature-huge": settings(temperature=HUGE),
    "top-k-huge": settings(None, top_k=2**31 - 1),
    "top-k-absurd": settings(top_k=HUGE),
    "thinking-budget-huge": settings(thinking_budget=HUGE),
    "repetition-penalty-huge": settings(repetition_penalty=HUGE),
    "completions-huge": settings(n=200_000),
    "logprobs-huge": settings(logprobs=HUGE),
    "prompt-logprobs-huge": settings(prompt_logprobs=10**9),
    "stop-token-huge": settings(stop_token_ids=(2**31,)),
    "bias-of-huge-token": settings(logit_bias={2**63: 1.0}),
    "bias-huge": settings(logit_bias={3: HUGE}),
    # What the caller changes after the parameters were made must not matter.
    "bias-changed-later": Poison(make=changed_later("logit_bias", {3: 1.0}, lambda bias: bias.update({"x": "y"})), error=None),
    "stop-changed-later": Poison(make=changed_later("stop_token_ids", [9], lambda stop: stop.append("x")), error=None),
    "allowed-changed-later": Poison(make=changed_later("allowed_token_ids", [9, 10], lambda ids: ids.append(2**40)), error=None),
    # Logits that leave nothing, or nothing finite.
    "every-token-forbidden": settings(RequestFailedError, allowed_token_ids=(9,), bad_words_ids=((9,),)),
    "embedding-of-nan": prompt([9, NAN_TOKEN, 12], RequestFailedError),
    # Prompts.
    "prompt-empty": prompt([]),
    "prompt-token-2**31": prompt([2**31]),
    "prompt-token-2**63": prompt([2**63]),
    "prompt-token-negative": prompt([5, -1]),
    "prompt-number": prompt(HUGE),
    "prompt-key-huge": prompt({HUGE: [5]}),
    "prompt-of-fractions": prompt([1.5, 2.5]),
    "prompt-surrogate": prompt("a\ud800b"),
    "prompt-too-long": prompt([9] * 513, ContextLengthError),
    # Options of the call.
    "salt-surrogate": option(cache_salt="\ud800"),
    "salt-no-text": option(cache_salt=b"x"),
    "id-surrogate": option(request_id="a\udfff"),
    "priority-huge": option(priority=HUGE),
    "deadline-huge": option(deadline=HUGE),
    "deadline-nan": option(deadline=float("nan")),
    "deadline-negative": option(deadline=-1.0),
    "deadline-far": option(None, deadline=1e12),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("shared"), SHARED, change=nan_embedding)


@dataclass(frozen=True)
class Subject:
    """An engine, and what the good requests give on it undisturbed."""

    llm: LLM
    expected: list[RequestOutput]


@pytest.fixture(scope="module", params=ENGINES)
def subject(model: Path, request: pytest.FixtureRequest) -> Iterator[Subject]:
    with opened(model, **SETTINGS, **ENGINES[request.param]) as llm:  # on leaving, all pages and slots are accounted for
        yield Subject(llm, good_outputs(llm))


def good_outputs(llm: LLM) -> list[RequestOutput]:
    return llm.generate_batch([p for p, _ in GOOD], [s for _, s in GOOD])


def result_of(llm: LLM, poison: Poison) -> RequestOutput | DSV4LiteError:
    """Return what a bad request brought: its output or its error."""
    try:
        bad_prompt, params = poison.make()
        return llm.generate(bad_prompt, params, **poison.options)
    except DSV4LiteError as error:
        return error


@pytest.mark.parametrize("group", range(GROUPS))
def test_bad_requests_hurt_no_other(subject: Subject, group: int) -> None:
    """The bad requests of a group run at once, between the good ones; each still ends with its own error or output."""
    poisons = {name: POISONS[name] for name in [*POISONS][group::GROUPS]}
    with ThreadPoolExecutor(len(poisons)) as threads, ExitStack() as stack:
        streams = [stack.enter_context(subject.llm.stream(p, s)) for p, s in GOOD]
        found = dict(zip(poisons, threads.map(partial(result_of, subject.llm), poisons.values()), strict=True))
        same_outputs([stream.final() for stream in streams], subject.expected)
    same_outputs([subject.llm.generate(*GOOD[0])], subject.expected[:1])  # the request after them
    assert subject.llm.state is Phase.READY
    for name, poison in poisons.items():
        if poison.error is None:
            output = found[name]
            assert isinstance(output, RequestOutput), (name, output)
            assert poison.text is None or output.text == poison.text, name
        else:
            assert isinstance(found[name], poison.error), (name, found[name])
            assert len(str(found[name])) < 2000, name  # an error names the value, shortened
