"""Grammar-constrained decoding on DeepSeek's real vocabulary."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lite.errors import InvalidRequestError, RequestFailedError, UnsupportedError
from dsv4lite.text.structured import CACHED_GRAMMARS, GrammarCompiler, GrammarMatcher, StructuredOutputs
from tests.e2e.schemas import chain, rules
from tests.text.release import REAL

EOS = 1
PADDED = REAL.vocab_size + 77
nonempty_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    pytest.importorskip("llguidance")
    return GrammarCompiler(REAL, vocab_size=PADDED)


def start(compiler: GrammarCompiler, spec: StructuredOutputs) -> GrammarMatcher:
    """Return a matcher at the beginning of a text."""
    return compiler.matcher(compiler.begin(spec))


def advance(matcher: GrammarMatcher, text: str) -> GrammarMatcher:
    for id in REAL.encode(text):
        matcher.accept(id)
    return matcher


def same_place(a: GrammarMatcher, b: GrammarMatcher) -> bool:
    return torch.equal(a.mask(), b.mask()) and a.is_terminated() == b.is_terminated()


def random_walk(matcher: GrammarMatcher, seed: int, limit: int = 200) -> str:
    """Sample allowed tokens until end-of-sequence, preferring short ones so that the text ends."""
    draw, ids = random.Random(seed), []
    while len(ids) < limit:
        allowed = matcher.mask().nonzero().flatten().tolist()
        if EOS in allowed and draw.random() < 0.5:
            break
        id = min(draw.choices(allowed, k=3), key=lambda id: len(REAL.id_to_bytes(id)))
        if id == EOS:
            break
        matcher.accept(id)
        ids.append(id)
    matcher.accept(EOS)
    return REAL.decode(ids)


def nested(levels: int) -> str:
    """Return a schema of so many objects inside each other."""
    return '{"not":' * (levels - 1) + "{}" + "}" * (levels - 1)


def loops(count: int) -> dict[str, Any]:
    """Return a schema of definitions that all refer to each other."""
    every = [{"$ref": f"#/$defs/d{i}"} for i in range(count)]
    return {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"anyOf": [{"type": "null"}, every[(i + 1) % count]]} for i in range(count)}}


# ---- specification ----


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "exactly one of json, regex, choice, grammar is needed, got none"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of .* got regex, choice"),
        ({"json": {}, "json_whitespace": "compakt"}, "json_whitespace='compakt' must be one of .* did you mean 'compact'"),
        ({"regexp": "a"}, "unknown key 'regexp'; did you mean 'regex'"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"regex": 3}, "regex must be a non-empty string"),
        ({"grammar": ""}, "grammar must be a non-empty string"),
        ({"choice": []}, "choice must be"),
        ({"choice": ["a", ""]}, "choice must be"),
        ({"choice": "ab"}, "choice must be"),
        ({"json": "{"}, "json is not a JSON schema"),
        ({"json": {"type": {1, 2}}}, "json is not a JSON schema"),
        ({"json": "[]"}, "json must be a schema object, not list"),
        ({"json": {"const": float("nan")}}, "json is not a JSON schema: .* not JSON compliant"),
        ({"json": '{"const": NaN}'}, "json is not a JSON schema: .* not JSON compliant"),
        ({"json": '{"maximum": 1e400}'}, "json is not a JSON schema: .* not JSON compliant"),
        ({"json": {"maximum": 10**5000}}, "json is not a JSON schema: Exceeds the limit"),
        ({"json": {"const": "\ud800"}}, r"json has the lone surrogate '\\ud800'"),
        ({"json": '{"const": "\\ud800"}'}, r"json has the lone surrogate '\\ud800'"),
        ({"regex": "a\udfff"}, r"regex has the lone surrogate '\\udfff'"),
        ({"choice": ["a", "\ud800"]}, r"choice has the lone surrogate '\\ud800'"),
        ({"grammar": 'start: "\ud800"'}, r"grammar has the lone surrogate '\\ud800'"),
        ({"json": {"exclusiveMinimum": 0, "maximum": 0.5}}, "exclusiveMinimum=0 and another bound .* use minimum"),
        ({"json": {"items": {"exclusiveMaximum": -10, "minimum": -10.5}}}, "exclusiveMaximum=-10 and another bound .* use maximum"),
        ({"json": nested(101)}, "json has 101 objects and arrays inside each other, more than 100; make it smaller"),
        ({"json": nested(130)}, "json has 130 objects and arrays"),
        ({"json": nested(30_000)}, "json is nested too deep; at most 100|json has 30,000 objects and arrays"),
        ({"json": nested(100_000)}, "json has 799,994 characters"),
        ({"json": {"properties": dict.fromkeys(map(str, range(2_001)), True)}}, "json has 2,001 properties, more than 2,000"),
        ({"json": {"patternProperties": dict.fromkeys(map(str, range(101)), 1)}}, "json has 101 patternProperties, more than 100"),
        ({"json": {"const": "x" * 262_144}}, "json has 262,1.. characters, more than 262,144"),
        ({"json": {"const": "\u4e00" * 100_000}}, "json has .* more than 262,144"),
        ({"json": chain(3_000)}, "json has 3,00. levels along its references, more than 400"),
        ({"json": chain(3_000, lambda rest: {"anyOf": [{"type": "null"}, rest]})}, "json has 9,00. levels along its references"),
        ({"json": loops(200)}, "json has .* levels along its references, more than 400"),
        ({"regex": "a" * 262_145}, "regex has 262,145 bytes, more than 262,144"),
        ({"grammar": rules(3_000)}, "grammar has 3,002 rules and brackets, more than 600"),
        ({"grammar": "start: %json " + json.dumps(chain(300))}, "grammar has .* rules and brackets, more than 600"),
        ({"choice": ["a"] * 100_001}, "choice has 100,001 strings, more than 100,000"),
        ({"choice": ["x" * 1_048_576, "y"]}, "choice has 1,048,577 bytes, more than 1,048,576"),
        ({"choice": 3}, "choice must be a sequence"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value), "nothing"),
)
def test_malformed_specification_is_rejected(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        StructuredOutputs.from_dict(settings)
    assert caught.value.parameter == "structured_outputs"


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutputs(regex="a("),
        StructuredOutputs(regex="(?=a)b"),
        StructuredOutputs(grammar="start: missing"),
        StructuredOutputs(json={"type": "nonsense"}),
        StructuredOutputs(json={"$ref": "#"}),
        StructuredOutputs(json={"type": "array", "uniqueItems": True}),
        StructuredOutputs(json={"type": "string", "minLength": 3, "maxLength": 2}),
    ],
)
def test_grammar_that_cannot_be_enforced_is_rejected(compiler: GrammarCompiler, spec: StructuredOutputs) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be compiled: ") as caught:
        start(compiler, spec)
    assert "<state>" not in str(caught.value)


def test_specification_is_a_copy() -> None:
    assert StructuredOutputs.from_dict({"choice": ["a", "b"]}) == StructuredOutputs(choice=("a", "b"))
    assert StructuredOutputs.from_dict({"json": {"type": "object"}}).json == '{"type": "object"}'
    schema = {"enum": ["a"]}
    spec = StructuredOutputs(json=schema)
    schema["enum"].append("b")
    assert spec == StructuredOutputs(json='{"enum": ["a"]}')


def test_schemas_that_lead_back_to_themselves_are_no_longer_than_what_they_pass(compiler: GrammarCompiler) -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}, "additionalProperties": False}
    assert start(compiler, StructuredOutputs(json=tree)).mask().any()
    assert start(compiler, StructuredOutputs(json=loops(80))).mask().any()
    wide = {"$defs": {f"d{i}": {"type": "object", "properties": {"a": {"$ref": "#/$defs/leaf"}}} for i in range(500)}}
    wide |= {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(500)]}
    wide["$defs"]["leaf"] = {"type": "string"}
    assert start(compiler, StructuredOutputs(json=wide)).mask().any()


def test_whatever_the_limits_allow_leaves_the_stack_alone() -> None:
    """In a process of its own, which a stack that overflows would end, and on a stack that is a fourth of the usual one."""
    pytest.importorskip("llguidance")
    program = """
import bisect
import threading
from tests.text.test_structured import *

wraps = [
    lambda rest: rest,
    lambda rest: {"type": "object", "properties": {"a": rest}},
    lambda rest: {"type": "array", "prefixItems": [rest]},
    lambda rest: {"anyOf": [{"type": "null"}, rest]},
    lambda rest: {"allOf": [rest]},
    lambda rest: {"type": ["object", "array"], "properties": {"a": rest}, "items": {"type": "string"}},
]


def stacked(levels, wrap):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = wrap(schema)
    return {"allOf": [schema]}


def largest(make, wrap, most):
    def refused(length):
        try:
            StructuredOutputs(json=make(length, wrap))
        except InvalidRequestError:
            return True
        return False

    return StructuredOutputs(json=make(bisect.bisect_left(range(1, most), True, key=refused), wrap))


specs = [largest(make, wrap, 400) for make in (chain, stacked) for wrap in wraps[make is stacked :]]
specs.append(StructuredOutputs(grammar=rules(598)))
specs.append(StructuredOutputs(grammar=rules(598).replace("r", "R").replace("staRt", "start")))
for depth in (1, 5, 30):
    opening, closing = '("b" | ' * depth, ")" * depth
    text = "".join(f"r{i}: {opening}r{i + 1}{closing}\\n" for i in range(598 // (depth + 1)))
    specs.append(StructuredOutputs(grammar=f"start: r0\\n{text}r{598 // (depth + 1)}: \\"a\\"\\n"))
specs += [StructuredOutputs(regex="(" * n + "a" + ")" * n) for n in (100, 240, 1000, 100_000)]
specs += [StructuredOutputs(grammar="start: " + "(" * n + '"a"' + ")" * n) for n in (30, 500)]


def compile_all() -> None:
    compiler = GrammarCompiler(REAL)
    for spec in specs:
        try:
            start(compiler, spec)
        except InvalidRequestError:
            pass


threading.stack_size(2 << 20)  # inherited by the compiler's own thread
thread = threading.Thread(target=compile_all)
thread.start()
thread.join()
print(len(specs), "survived")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("22 survived"), (done.returncode, done.stdout, done.stderr[-2000:])


def test_repetition_that_is_too_much_fails_its_text(compiler: GrammarCompiler) -> None:
    """The first mask, which takes longest, belongs to what the compiler does; a text that is too much for the library fails."""
    matcher = start(compiler, StructuredOutputs(regex="a{10000000}"))
    with pytest.raises(RequestFailedError, match="gave up on this text"):
        while True:
            matcher.mask()
            matcher.accept(REAL.encode("a")[0])


def test_grammar_of_a_request_that_ended_is_not_compiled(compiler: GrammarCompiler) -> None:
    """Requests that ended do not delay others."""
    one = GrammarCompiler(REAL)
    busy, built = threading.Event(), list[StructuredOutputs]()

    def build(spec: StructuredOutputs) -> Any:
        busy.wait(60)
        built.append(spec)
        return original(spec)

    original = one._build
    one._build = build  # type: ignore[method-assign]
    specs = [StructuredOutputs(regex=f"a{i}") for i in range(3)]
    first, given_up, last = map(one.begin, specs)
    assert one.begin(specs[0]) is first and not first.done()
    del given_up
    busy.set()
    last.result(timeout=60)
    assert built == [specs[0], specs[2]]


def test_missing_package_is_unsupported_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=re.escape("pip install 'dsv4lite[structured]'")):
        GrammarCompiler(REAL)


def test_compiler_loads_the_package_with_the_first_grammar() -> None:
    """It was loaded at the start of every engine, with a vocabulary that takes a second."""
    program = """
import sys
from tests.text.test_structured import *

compiler = GrammarCompiler(REAL)
assert "llguidance" not in sys.modules
assert start(compiler, StructuredOutputs(regex="ab")).mask().any()
assert "llguidance" in sys.modules
"""
    pytest.importorskip("llguidance")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_vocabulary_that_does_not_fit_is_unsupported() -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(UnsupportedError, match="do not belong together"):
        GrammarCompiler(REAL, vocab_size=1000)


# ---- masks ----


SPECIAL_TEXTS = ("a </think> b", "<｜User｜>", "x<｜end▁of▁sentence｜>", "<think>")


@pytest.mark.parametrize("text", SPECIAL_TEXTS)
@pytest.mark.parametrize("kind", ["const", "key", "regex", "choice", "grammar"])
def test_added_tokens_in_a_grammar_are_plain_text(compiler: GrammarCompiler, kind: str, text: str) -> None:
    specs = {
        "const": StructuredOutputs(json={"const": text}),
        "key": StructuredOutputs(json={"type": "object", "properties": {text: {"const": 1}}, "required": [text]}),
        "regex": StructuredOutputs(regex=text.replace("｜", "[｜]")),
        "choice": StructuredOutputs(choice=(text, text + "!")),
        "grammar": StructuredOutputs(grammar=f"start: {json.dumps(text)}"),
    }
    matcher = start(compiler, specs[kind])
    said = {"const": json.dumps(text, ensure_ascii=False), "key": json.dumps({text: 1}, ensure_ascii=False)}.get(kind, text)
    for id in REAL.encode(said, allow_special=False):
        allowed = set(matcher.mask().nonzero().flatten().tolist())
        assert id in allowed and not REAL.added_ids.intersection(allowed)
        matcher.accept(id)
    assert matcher.mask()[EOS]


def test_mask_has_the_models_size_and_allows_no_padding(compiler: GrammarCompiler) -> None:
    mask = start(compiler, StructuredOutputs(regex="(.|\n)*")).mask()
    assert (mask.shape, mask.dtype, mask.device.type) == ((PADDED,), torch.bool, "cpu")
    assert not mask[REAL.vocab_size :].any()
    assert mask.sum() > 100_000


def test_special_tokens_and_chat_markup_never_match_text(compiler: GrammarCompiler) -> None:
    matcher = start(compiler, StructuredOutputs(json={"type": "string"}))
    mask = advance(matcher, '"a').mask()
    assert not mask[sorted(REAL.added_ids)].any()


def test_mask_allows_exactly_the_tokens_that_continue(compiler: GrammarCompiler) -> None:
    mask = start(compiler, StructuredOutputs(choice=("yes", "no"))).mask()
    allowed = {REAL.id_to_bytes(id) for id in mask.nonzero().flatten().tolist()}
    vocabulary = {REAL.id_to_bytes(id) for id in range(REAL.vocab_size)}
    assert allowed == {b"y", b"ye", b"yes", b"n", b"no"} & vocabulary


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_end_of_sequence_is_allowed_exactly_where_the_text_matches(compiler: GrammarCompiler, seed: int) -> None:
    pattern = r"(ab|c[0-9]{1,3})*x?"
    matcher, draw, text = start(compiler, StructuredOutputs(regex=pattern)), random.Random(seed), ""
    for _ in range(12):
        mask = matcher.mask()
        assert bool(mask[EOS]) == (re.fullmatch(pattern, text) is not None)
        following = [id for id in mask.nonzero().flatten().tolist() if id != EOS]
        assert bool(following) != matcher.is_terminated()
        if not following:
            break
        id = draw.choice(following)
        matcher.accept(id)
        text += REAL.decode([id])


def test_finished_text_allows_only_end_of_sequence(compiler: GrammarCompiler) -> None:
    matcher = advance(start(compiler, StructuredOutputs(regex="ab")), "ab")
    assert matcher.is_terminated()
    assert matcher.mask().nonzero().flatten().tolist() == [EOS]
    matcher.accept(EOS)
    assert matcher.is_terminated()
    assert matcher.mask().nonzero().flatten().tolist() == [EOS]
    with pytest.raises(InvalidRequestError):
        matcher.accept(EOS)


@pytest.mark.parametrize("bad", [EOS, 5, 128803, REAL.vocab_size, PADDED, 10**9, -1])
def test_token_that_is_not_allowed_is_rejected_and_changes_nothing(compiler: GrammarCompiler, bad: int) -> None:
    matcher = advance(start(compiler, StructuredOutputs(regex="abcd")), "ab")
    before = matcher.copy()
    with pytest.raises(InvalidRequestError, match=f"does not allow token {bad} here"):
        matcher.accept(bad)
    assert same_place(matcher, before)
    assert advance(matcher, "cd").is_terminated()


# ---- kinds ----


@settings(max_examples=25, deadline=None)
@given(st.lists(nonempty_text, min_size=1, max_size=3), st.integers(0, 99))
def test_choice_yields_one_of_the_strings(compiler: GrammarCompiler, choices: list[str], seed: int) -> None:
    assert random_walk(start(compiler, StructuredOutputs(choice=tuple(choices))), seed) in choices


@pytest.mark.parametrize("seed", range(5))
def test_json_schema_yields_valid_json(compiler: GrammarCompiler, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["a", "ü"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    }
    matcher = start(compiler, StructuredOutputs(json=schema if seed % 2 else json.dumps(schema)))
    value = json.loads(random_walk(matcher, seed))
    assert set(value) == {"name", "count", "kind"}
    assert len(value["name"]) <= 8
    assert value["count"] in range(100)
    assert value["kind"] in ("a", "ü")


def test_json_is_compact_unless_asked(compiler: GrammarCompiler) -> None:
    """One blank behind commas and colons, or none; there used to be up to 64 anywhere."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    compact = start(compiler, StructuredOutputs(json=schema))
    for text in ('{"a": [1, 2]}', '{"a":[1,2]}', '{"a":[1, 2]}'):
        assert advance(compact.copy(), text).is_terminated()
    for text in ("{ ", '{"a" ', '{"a":  ', '{"a":\n', '{"a": [1 ', '{"a": [1,  ', '{"a": [1]\n'):
        with pytest.raises(InvalidRequestError, match="does not allow token"):
            advance(compact.copy(), text)
    flexible = start(compiler, StructuredOutputs.from_dict({"json": schema, "json_whitespace": "flexible"}))
    assert advance(flexible, '{\n  "a" : [1 ,  2 ]\n}').mask()[EOS]


def test_json_whitespace_cannot_go_on_forever(compiler: GrammarCompiler) -> None:
    flexible = StructuredOutputs(json={"type": "object"}, json_whitespace="flexible")
    matcher, newline = start(compiler, flexible), REAL.encode("\n")[0]
    advance(matcher, "{")
    for _ in range(64):
        matcher.accept(newline)
    assert not matcher.mask()[newline]
    assert advance(matcher, "}").is_terminated()


@pytest.mark.parametrize(("pattern", "text"), [("a/b", "a/b"), ("x\ny", "x\ny"), (r'"\\', '"\\'), ("é+", "ééé")])
def test_regex_with_awkward_characters(compiler: GrammarCompiler, pattern: str, text: str) -> None:
    assert advance(start(compiler, StructuredOutputs(regex=pattern)), text).mask()[EOS]


def test_lark_grammar_nests(compiler: GrammarCompiler) -> None:
    matcher = start(compiler, StructuredOutputs(grammar='start: "(" start ")" | "x"'))
    assert not advance(matcher, "((x)").mask()[EOS]
    assert advance(matcher, ")").is_terminated()


# ---- copies, cache ----


def test_copies_are_independent(compiler: GrammarCompiler) -> None:
    matcher = start(compiler, StructuredOutputs(regex="ab"))
    copy = matcher.copy()
    advance(copy, "ab").accept(EOS)
    assert same_place(matcher, start(compiler, StructuredOutputs(regex="ab")))
    assert copy.copy().is_terminated()


def test_same_grammar_is_compiled_once_and_the_cache_is_bounded() -> None:
    pytest.importorskip("llguidance")
    compiler, spec = GrammarCompiler(REAL), StructuredOutputs(json={"const": 1})
    compiled = compiler.begin(spec)
    for _ in range(2):
        matcher = compiler.matcher(compiled)
        assert matcher.mask().shape == (REAL.vocab_size,) and advance(matcher, "1").is_terminated()
    assert compiler.begin(spec) is compiled
    known = weakref.ref(compiled)
    del compiled
    for i in range(CACHED_GRAMMARS):
        assert known() is not None
        start(compiler, StructuredOutputs(regex=f"a{{{i + 1}}}"))
    assert known() is None


def test_compilers_that_are_asked_in_one_order_keep_the_same_grammars() -> None:
    """A rank lacked grammars that the leader had: sequences had kept them there, or had made them the latest on the rank."""
    pytest.importorskip("llguidance")
    leader, rank = GrammarCompiler(REAL), GrammarCompiler(REAL)
    specs = [StructuredOutputs(regex=f"a{{{i + 1}}}") for i in range(CACHED_GRAMMARS + 9)]
    rng, last = random.Random(0), dict[tuple[bool, StructuredOutputs], weakref.ref[Any]]()
    running = leader.begin(specs[0], caches=False)  # of a sequence on the leader
    running.result(timeout=60)
    last[True, specs[0]] = weakref.ref(running)
    for spec in [*specs, *rng.choices([*specs, StructuredOutputs(regex="(")], k=300)]:
        had = list[bool]()
        for leads in (True, False):
            compiled = (leader if leads else rank).begin(spec)
            had.append((leads, spec) in last and last[leads, spec]() is compiled)
            compiled.exception(timeout=60)
            last[leads, spec] = weakref.ref(compiled)
        assert had[1] or not had[0]  # what the leader need not compile again, the rank need not, either
        rank.begin(rng.choice(specs), caches=False).result(timeout=60)  # of a sequence on the rank
