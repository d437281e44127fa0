"""Requests with grammars, and with settings that bypass the checks, beside others: on one rank and on two ranks."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.config import MTP
from dsv4lite.errors import InvalidRequestError, RequestFailedError
from dsv4lite.llm import LLM
from dsv4lite.request import Phase, Request, RequestOutput, SamplingParams
from dsv4lite.text.structured import CACHED_GRAMMARS, GrammarCompiler
from tests.e2e.engines import MODEST, SMALL, engine_of, opened, prompts_of

pytestmark = pytest.mark.usefixtures("forked_ranks")

pytest.importorskip("llguidance")

PROMPTS = prompts_of((20, 300), SMALL["vocab_size"], seed=9)
ENGINES: dict[str, dict[str, Any]] = {
    "thread": {},
    "tp-mtp": {"tensor_parallel_size": 2, "executor": "thread", "speculative": MTP(2)},
}
ENOUGH_S = 120.0


def some(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "temperature": 0, "ignore_eos": True, **settings})


@pytest.fixture(scope="module", params=ENGINES)
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(model), **{**MODEST, **ENGINES[request.param]}) as llm:
        yield llm
        assert llm.state == Phase.READY.value
        engine_of(llm).call(lambda engine: engine._scheduler.check()).result(ENOUGH_S)


def good(llm: LLM) -> list[tuple[int, ...]]:
    kinds = [some(), some(structured_outputs={"regex": "[a-e]{4,8}"}, ignore_eos=False)]
    return [output.token_ids for output in llm.generate_batch(PROMPTS, kinds)]


def beside_others(llm: LLM, bad: list[SamplingParams]) -> list[RequestOutput]:
    """Run bad requests between good ones, whose outputs must not change."""
    expected = good(llm)
    kinds = [kind for one in bad for kind in (some(), one, some(structured_outputs={"regex": "[a-e]{4,8}"}, ignore_eos=False))]
    prompts = [prompt for _ in bad for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[1])]
    outputs = llm.generate_batch(prompts, kinds, on_error="return")
    assert [output.token_ids for output in outputs[0::3]] == [expected[0]] * len(bad)
    assert [output.token_ids for output in outputs[2::3]] == [expected[1]] * len(bad)
    assert good(llm) == expected
    return outputs[1::3]


FORGED: tuple[dict[str, Any], ...] = (
    {"min_tokens": 10**400},
    {"seed": 10**5000, "temperature": 1.0},
    {"logit_bias": {20: "high"}},
    {"logit_bias": {10**6: 1.0}},
    {"temperature": "hot"},
    {"presence_penalty": 10**400},
    {"top_k": object(), "temperature": 1.0},
    {"top_p": "half", "temperature": 1.0},
    {"bad_words_ids": ((10**30,),)},
    {"allowed_token_ids": (20, SMALL["vocab_size"])},
    {"stop_token_ids": ("a", 3)},
    {"n": "three"},
)


def test_invalid_settings_that_reach_the_engine_fail_their_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the settings had changed after the checks on the caller's side."""
    engine = engine_of(llm)
    submit, first = engine.submit, 1000

    def forge(request: Request) -> None:
        if (request.params.seed or 0) >= first:
            request = replace(request, params=copy.copy(request.params))
            for name, value in FORGED[(request.params.seed or 0) - first].items():
                object.__setattr__(request.params, name, value)
        submit(request)

    monkeypatch.setattr(engine, "submit", forge)
    for output in beside_others(llm, [some(seed=first + i, min_tokens=1, stop_token_ids=(9,)) for i in range(len(FORGED))]):
        assert isinstance(output.error, RequestFailedError) and output.token_ids == (), (output.index, output.error)
        assert output.error.__cause__ is not None


def test_grammar_whose_thread_cannot_start_fails_its_request_and_not_the_next_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a container's limit of processes. The same grammar, asked for while the error was alive, never came."""
    start, params = threading.Thread.start, SamplingParams(max_tokens=9, structured_outputs={"regex": "b{9}"})

    def refused(thread: threading.Thread) -> None:
        if thread.name == "dsv4lite-grammars":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RequestFailedError, match="can't start new thread") as caught:
            llm.generate(PROMPTS[0], params)
    output = llm.generate(PROMPTS[0], params, deadline=ENOUGH_S)
    assert caught.value.__cause__ is not None and output.outputs[0].finish_reason != "deadline"


def test_requests_with_one_invalid_grammar_have_an_error_each(llm: LLM) -> None:
    outputs = llm.generate_batch(PROMPTS, some(structured_outputs={"regex": "(a"}), on_error="return")
    for index, output in enumerate(outputs):
        assert isinstance(output.error, InvalidRequestError) and output.error.parameter == "structured_outputs"
        assert [note.split(":")[0] for note in output.error.__notes__] == [f"row {index} of the batch"]


def test_completions_of_one_request_follow_its_grammar_each(llm: LLM) -> None:
    grammar = {"json": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 3}}
    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1000, n=4, seed=3, structured_outputs=grammar))
    texts = ["".join(completion.text.split()) for completion in output.outputs]
    assert all(text[0] + text[-1] == "[]" and len(text) == 7 for text in texts), texts


def test_answer_that_a_grammar_completes_ends_before_min_tokens(llm: LLM) -> None:
    """It was once filled up with end-of-sequence tokens."""
    for stop, ids in (("stop", ()), ("stop", (9,))):
        params = SamplingParams(max_tokens=60, min_tokens=40, structured_outputs={"choice": ["a", "b"]}, stop_token_ids=ids)
        (completion,) = llm.generate(PROMPTS[0], params).outputs
        assert completion.finish_reason == stop and completion.text in ("a", "b") and len(completion.token_ids) < 4


class Held:
    """Holds up the compilation of an engine's grammars."""

    def __init__(self, llm: LLM) -> None:
        self.may_go_on, self.begun = threading.Event(), threading.Event()
        compiler: Any = engine_of(llm)._grammars
        original = compiler._build

        def build(spec: Any) -> Any:
            self.begun.set()
            self.may_go_on.wait(ENOUGH_S)
            return original(spec)

        compiler._build = build


def test_other_requests_continue_while_a_grammar_is_compiled(model: Path) -> None:
    with opened(model) as llm, ExitStack() as stack:
        expected = llm.generate(PROMPTS[1], some()).token_ids
        held = Held(llm)
        stack.callback(held.may_go_on.set)
        waiting = [some(structured_outputs={"regex": "[a-e]{4,8}"}, n=n) for n in (1, 3, 2)]
        kept, aborted, _ = (stack.enter_context(llm.stream(PROMPTS[0], some, request_id=f"{some.n}")) for some in waiting)
        assert held.begun.wait(ENOUGH_S)
        assert llm.generate(PROMPTS[1], some()).token_ids == expected
        late = llm.generate(PROMPTS[0], waiting[0], deadline=0.05)
        assert [c.finish_reason for c in late.outputs] == ["deadline"]
        aborted.abort()
        assert [c.finish_reason for c in aborted.final().outputs] == ["abort"] * 3
        engine_of(llm).call(lambda engine: None).result(ENOUGH_S)
        assert engine_of(llm).call(lambda engine: engine._scheduler.num_waiting).result(ENOUGH_S) == 3
        # One completion of the third ends before its grammar is compiled.
        engine_of(llm).abort("2", index=0)
        held.may_go_on.set()
        assert set(kept.final().text) <= set("abcde")


def test_engine_closes_while_a_grammar_is_compiled(model: Path) -> None:
    with LLM(str(model), **MODEST) as llm:
        held = Held(llm)
        with llm.stream(PROMPTS[0], some(structured_outputs={"regex": "a+"}, n=2)) as stream:
            assert held.begun.wait(ENOUGH_S)
            llm.close()
            assert {c.finish_reason for c in stream.final().outputs} == {"abort"}
        held.may_go_on.set()
    assert llm.state == "closed"


ASKED, USED = list[bool](), list[bool]()  # on a rank: whether a grammar was compiled when it was asked for, and in a step


def watch_grammars(model: object, rank: int) -> None:
    """Let a rank record whether grammars are compiled when they are asked for, and when a step uses them."""
    begin, matcher = GrammarCompiler.begin, GrammarCompiler.matcher

    def asked(self: GrammarCompiler, *args: Any, **kwargs: Any) -> Any:
        compiled = begin(self, *args, **kwargs)
        ASKED.append(compiled.done())
        return compiled

    def used(self: GrammarCompiler, compiled: Any) -> Any:
        USED.append(compiled.done())
        return matcher(self, compiled)

    GrammarCompiler.begin, GrammarCompiler.matcher = asked, used  # type: ignore[method-assign]


def what_was_compiled(model: object, rank: int) -> tuple[list[bool], list[bool]]:
    """Return what a rank has recorded since the last call, once it compiles no more."""
    while any(thread.name == "dsv4lite-grammars" for thread in threading.enumerate()):
        time.sleep(0.01)
    found = list(ASKED), list(USED)
    ASKED.clear()
    USED.clear()
    return found


@pytest.fixture
def replicas(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Two replicas, the first one in this process."""
    for name in ("begin", "matcher"):
        monkeypatch.setattr(GrammarCompiler, name, getattr(GrammarCompiler, name))  # restored at the end
    with opened(model, data_parallel_size=2, executor="thread", enable_prefix_caching=False) as llm:
        llm.apply(watch_grammars)
        yield llm
        llm.apply(what_was_compiled)


def test_every_replica_compiles_a_grammar(replicas: LLM) -> None:
    """A replica that got the grammar's second request compiled it within a step, and all replicas waited."""
    params = some(structured_outputs={"regex": "[x-z]{3,5}"}, n=2)
    replicas.generate(PROMPTS[0], params)
    assert sum(len(used) for _, used in replicas.apply(what_was_compiled)) == 2
    replicas.generate_batch(PROMPTS, params)
    for asked, used in replicas.apply(what_was_compiled):
        assert len(asked) > len(used) == 2 and all(asked) and all(used)


def test_requests_of_more_grammars_than_are_kept_compile_none_in_a_step(replicas: LLM) -> None:
    """Ranks were told of sequences with the next step only, and had dropped the first grammars by then."""
    replicas.pause()
    with ExitStack() as stack:
        kinds = [some(structured_outputs={"regex": f"x{{{i + 1}}}"}, max_tokens=1) for i in range(2 * CACHED_GRAMMARS + 8)]
        streams = [stack.enter_context(replicas.stream(PROMPTS[0], params)) for params in kinds]
        assert [used for _, used in replicas.apply(what_was_compiled)] == [[], []]
        replicas.resume()
        assert [stream.final().text for stream in streams] == ["x"] * len(kinds)
    used = [used for _, used in replicas.apply(what_was_compiled)]
    assert sum(map(len, used)) == len(kinds) and all(used) and all(map(all, used))


@pytest.mark.parametrize("grammar", [None, {"regex": "a+"}])
def test_deadline_passes_in_a_paused_engine_that_is_called_all_the_time(model: Path, grammar: dict[str, str] | None) -> None:
    """It passed only when no call came for 20 ms."""
    with opened(model) as llm, ExitStack() as stack:
        held, engine, over = Held(llm), engine_of(llm), threading.Event()
        stack.callback(held.may_go_on.set)
        engine.set_paused(True).result(ENOUGH_S)
        stack.callback(engine.set_paused, False)

        def call() -> None:
            until = time.monotonic() + ENOUGH_S
            while time.monotonic() < until and not over.is_set():
                engine.call(lambda engine: None).result(ENOUGH_S)
                time.sleep(0.001)

        caller = threading.Thread(target=call)
        caller.start()
        late = llm.generate(PROMPTS[0], some(structured_outputs=grammar), deadline=0.05)
        in_time = caller.is_alive()
        over.set()
        caller.join()
        assert [c.finish_reason for c in late.outputs] == ["deadline"] and in_time
