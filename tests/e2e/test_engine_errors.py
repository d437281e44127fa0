"""Errors of whole engines: requests, settings, memory, numbers that are not finite, and failures of the engine itself."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from dsv4lite.config import LoadProgress, tiny_model
from dsv4lite.engine import rank
from dsv4lite.engine.engine import Engine
from dsv4lite.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    RequestFailedError,
    UnsupportedError,
)
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.planning import memory
from dsv4lite.planning.memory import MemoryPlan
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.scheduling import scheduler
from dsv4lite.text import structured
from dsv4lite.weights.source import ModelSource
from tests.e2e.engines import (
    MODEST,
    SMALL,
    engine_of,
    nan_embedding,
    opened,
    overlapping,
    prompts_of,
    raising,
    room_for,
    tensor_bytes,
    unopened,
    write_model,
)

VOCAB = SMALL["vocab_size"]
POISON = VOCAB - 1
SHORT, LONG, OTHER = prompts_of((20, 300, 200), VOCAB - 1, seed=9)


def some(**settings: Any) -> SamplingParams:
    """Sample a few tokens, repeatably, and never the poisonous one."""
    return SamplingParams(
        **{"max_tokens": 12, "seed": 4, "ignore_eos": True, "logprobs": 0, "bad_words_ids": ((POISON,),), **settings}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small"), change=nan_embedding)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with opened(model, max_model_len=400) as llm:
        yield llm


# ------------------------------------------------------------------------------------------------------------ bad requests


@pytest.mark.parametrize(
    ("length", "settings"),
    [(400, {"max_tokens": None}), (401, {"max_tokens": None}), (1000, {}), (389, {}), (20, {"max_tokens": 381})],
)
def test_requests_over_the_limit_are_refused(llm: LLM, length: int, settings: dict[str, Any]) -> None:
    with pytest.raises(ContextLengthError, match="max_model_len=400") as error:
        llm.generate([9] * length, some(**settings))
    assert error.value.limit == 400 and error.value.length >= 400


def test_requests_at_the_limit_run(llm: LLM) -> None:
    assert len(llm.generate([9] * 388, some()).token_ids) == 12
    assert len(llm.generate([9] * 399, some(max_tokens=None)).token_ids) == 1
    assert len(llm.score([9] * 200, [10] * 200)) == 200
    with pytest.raises(ContextLengthError):
        llm.score([9] * 201, [10] * 200)


@pytest.mark.parametrize(
    "settings",
    [
        *({"n": value} for value in (0, "2", True, None)),
        *({"max_tokens": value} for value in (0, -1, "5", 2.0)),
        *({"min_tokens": value} for value in (-1, "3", None)),
        {"min_tokens": 9, "max_tokens": 5},
        *({"temperature": value} for value in (-1, float("nan"), float("inf"), "hot", None)),
        *({"top_p": value} for value in (0, 1.1, "all")),
        *({"top_k": value} for value in (-1, 1.5)),
        *({"min_p": value} for value in (-0.1, 2)),
        *({"presence_penalty": value} for value in (3, -3)),
        *({"frequency_penalty": value} for value in (3, float("nan"))),
        *({"repetition_penalty": value} for value in (0, -1)),
        *({"seed": value} for value in ("x", 1.5, True)),
        *({"stop": value} for value in (5, ("",), (5,), None)),
        *({"stop_token_ids": value} for value in (5, (-1,), "ab", None)),
        *({"bad_words_ids": value} for value in (5, (5,), ((),), ((-1,),), None)),
        *({"logit_bias": value} for value in (5, {"a": 1}, {1: float("inf")}, {-1: 0.0}, [(1, 2.0)])),
        *({"allowed_token_ids": value} for value in (5, (), (1, "a"))),
        *({"logprobs": value} for value in (-1, True, "all")),
        {"prompt_logprobs": -1},
        {"logprobs_mode": "cooked"},
        *({"structured_outputs": value} for value in ("a", {}, {"regx": "a"}, {"regex": "a", "choice": ["b"]}, {"choice": []})),
        {"thinking_budget": -1},
        {"detokenize": False, "stop": ("a",)},
        {"detokenize": False, "structured_outputs": {"regex": "a"}},
        *({name: "yes"} for name in ("return_routed_experts", "ignore_eos", "detokenize", "skip_special_tokens")),
    ],
    ids=str,
)
def test_settings_out_of_range_or_contradictory_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**settings)
    assert error.value.parameter in settings and error.value.parameter in str(error.value)


def test_unknown_sampling_parameter_has_a_near_match() -> None:
    with pytest.raises(InvalidRequestError, match=r"'max_token'.*'max_tokens'"):
        SamplingParams.from_dict({"max_token": 3})


def test_structure_without_its_package_is_refused_and_nothing_else(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **settings: Any) -> None:
        raise UnsupportedError("structured outputs need the package llguidance")

    monkeypatch.setattr(structured.GrammarCompiler, "__init__", missing)
    with opened(model) as llm:
        with pytest.raises(UnsupportedError, match="llguidance"):
            llm.generate(SHORT, some(structured_outputs={"regex": "a"}))
        assert len(llm.generate(SHORT, some()).token_ids) == 12


# ------------------------------------------------------------------------------------------------------------ bad settings


@pytest.mark.parametrize(
    "settings",
    [
        *({name: value} for name in ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests") for value in (0, "4", True)),
        *({name: value} for name in ("max_model_len", "kv_cache_memory_bytes") for value in (0, -1, 2.5)),
        *({"gpu_memory_utilization": value} for value in (0, 2, "x", float("nan"))),
        *({"prefix_checkpoint_tokens": value} for value in (0, 100, "256")),
        *({name: "yes"} for name in ("deterministic", "enable_prefix_caching", "progress")),
        *({name: 3} for name in ("device", "tokenizer", "revision", "hf_overrides")),
        {"seed": "a"},
    ],
    ids=str,
)
def test_engine_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    for make in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            make("somewhere", **settings)


def test_unknown_and_misspelled_engine_settings_have_a_near_match() -> None:
    with pytest.raises(ConfigError, match=r"'max_num_seq'.*'max_num_seqs'"):
        LLM("somewhere", max_num_seq=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"dtype='float23'.*'float32'"):
        LLM("somewhere", dtype="float23")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"load_format='dumy'.*'dummy'"):
        LLM("somewhere", load_format="dumy")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"device": "abacus"}, ConfigError, "device='abacus'"),
        ({"device": "meta"}, UnsupportedError, "only 'cpu' and 'cuda'"),
        ({"device": "cuda:7"}, ConfigError, "this machine has|without CUDA|finds no device"),
        ({"kv_cache_dtype": "fp8"}, UnsupportedError, "kv_cache_dtype='fp8' does not fit this unquantized"),
    ],
)
def test_settings_that_this_machine_or_model_cannot_have_are_refused(
    model: Path, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    if settings.get("device") == "cuda:7" and torch.cuda.device_count() > 7:
        pytest.skip("there is such a device")
    with pytest.raises(kind, match=message), opened(model, **settings):
        pass


def test_settings_that_contradict_a_quantized_checkpoint_are_refused() -> None:
    for settings in ({"dtype": "float32"}, {"kv_cache_dtype": "bfloat16"}):
        with pytest.raises(UnsupportedError, match=next(iter(settings))), opened(tiny_model(), **settings):
            pass


def test_overrides_replace_entries_of_the_model_config(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({**SMALL, "index_topk": 9}))
    with opened(folder, hf_overrides={"index_topk": SMALL["index_topk"]}) as changed, opened(model) as plain:
        assert changed.generate(LONG, some()).token_ids == plain.generate(LONG, some()).token_ids
    with pytest.raises(ConfigError, match=r"'index_topkk'.*'index_topk'"), opened(model, hf_overrides={"index_topkk": 3}):
        pass


# --------------------------------------------------------------------------------------------------- memory and numbers


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: Any, **settings: Any) -> None:
        raise AssertionError("weights were loaded before they were known to fit")

    monkeypatch.setattr(ModelSource, "build", build)


@pytest.mark.usefixtures("nothing_is_built")
def test_model_too_large_for_the_machine_is_refused_before_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: 100_000)
    with pytest.raises(CapacityError, match="do not fit") as error, opened(model):
        pass
    assert isinstance(error.value.plan, MemoryPlan) and not error.value.plan.fits and error.value.advice


@pytest.mark.usefixtures("nothing_is_built")
def test_sequences_longer_than_the_model_allows_are_refused_before_loading(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=401 is more .* max_position_embeddings=400"):
        with opened(model, max_model_len=401, hf_overrides={"max_position_embeddings": 400}):
            pass


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("budget", [1, 100_000])
def test_state_too_small_for_any_request_is_refused_before_loading(model: Path, budget: int) -> None:
    with pytest.raises(CapacityError) as error, opened(model, kv_cache_memory_bytes=budget, max_num_seqs=64, max_model_len=None):
        pass
    assert any("max_num_seqs" in advice for advice in error.value.advice)


@pytest.mark.usefixtures("nothing_is_built")
def test_state_too_small_for_max_model_len_is_refused_before_loading(model: Path) -> None:
    settings = {"max_model_len": 100_000, "kv_cache_memory_bytes": 10**6}
    with pytest.raises(CapacityError, match="max_model_len=100000"), opened(model, **settings):
        pass


def test_sequences_are_as_long_as_fits_unless_asked_otherwise(model: Path) -> None:
    with opened(model, max_model_len=None, kv_cache_memory_bytes=room_for(model, 3, max_num_seqs=8)) as llm:
        length = llm.memory().max_model_len
        assert length == 768
        out = llm.generate([9] * (length - 4), some(max_tokens=None))
        assert len(out.token_ids) == 4


def tokens_and_scores(output: RequestOutput) -> tuple[tuple[int, ...], list[float]]:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return output.token_ids, logprobs.sampled.tolist()


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_that_are_not_finite_fail_their_request_alone(model: Path, overlap: bool) -> None:
    healthy = (SHORT, LONG, OTHER)
    settings = {"deterministic": True, "overlap": overlap, "max_num_batched_tokens": 128, "max_model_len": 512, "max_num_seqs": 6}
    with opened(model, **settings) as alone:
        expected = [tokens_and_scores(alone.generate(prompt, some())) for prompt in healthy]
    # Few pages, so that those of failed requests are reused at once.
    room = room_for(model, 8, max_num_seqs=6)
    with opened(model, **settings, kv_cache_memory_bytes=room) as llm:
        assert llm.memory().sizes.grow_pages == 8
        ill = ([*LONG[:270], POISON, *LONG[270:]], [POISON, *SHORT], [*LONG, POISON], [*OTHER[:100], POISON])
        for _ in range(3):
            with ExitStack() as stack:
                prompts = [prompt for pair in zip(ill, (*healthy, SHORT), strict=True) for prompt in pair]
                streams = [stack.enter_context(llm.stream(prompt, some())) for prompt in prompts]
                for stream in streams[::2]:
                    with pytest.raises(RequestFailedError, match=r"logits at position .* are NaN") as error:
                        stream.final()
                    assert error.value.output is not None and error.value.output.token_ids == ()
                assert [tokens_and_scores(stream.final()) for stream in streams[1::2]] == [*expected, expected[0]]
        # A poisonous token that is sampled fails the request one token later.
        forced = some(bad_words_ids=(), logit_bias={POISON: 1000.0}, n=2)
        with pytest.raises(RequestFailedError) as error:
            llm.generate(SHORT, forced)
        assert error.value.output is not None
        assert [c.token_ids for c in error.value.output.outputs] == [(POISON,), (POISON,)]
        assert {c.finish_reason for c in error.value.output.outputs} == {"error"}
        outputs = llm.generate_batch([[POISON], SHORT], some(), on_error="return")
        assert isinstance(outputs[0].error, RequestFailedError) and outputs[1].error is None
        assert [tokens_and_scores(llm.generate(prompt, some())) for prompt in healthy] == expected


def test_poison_in_one_completion_leaves_the_others(model: Path) -> None:
    """Only the completion that samples the token fails; the output has both."""
    params = some(bad_words_ids=(), n=3, logit_bias={POISON: 0.3}, max_tokens=30)
    with opened(model) as llm:
        with pytest.raises(RequestFailedError) as error:
            llm.generate(SHORT, params)
        assert error.value.output is not None
        assert {c.finish_reason for c in error.value.output.outputs} == {"error", "length"}
        for completion in error.value.output.outputs:
            failed = completion.token_ids[-1] == POISON and len(completion.token_ids) < 30
            assert completion.finish_reason == ("error" if failed else "length")
            assert POISON not in completion.token_ids[:-1]


@pytest.mark.parametrize("n", [1, 3])
def test_request_that_cannot_be_added_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """With several completions the caller once waited for ever."""
    monkeypatch.setattr(scheduler, "make_sequences", raising(AssertionError("a flaw")))
    with pytest.raises(RequestFailedError, match="other requests are unaffected: AssertionError: a flaw"):
        llm.generate(SHORT, some(n=n))
    monkeypatch.undo()
    assert len(llm.generate(SHORT, some(n=n)).outputs) == n


# ------------------------------------------------------------------------------------------------- failures of the engine


def test_engine_that_could_not_start_leaves_nothing(model: Path) -> None:
    threads = set(threading.enumerate())
    llm = unopened(model, kv_cache_memory_bytes=1)
    with pytest.raises(CapacityError), llm:
        pass
    assert llm.state == "failed"
    with pytest.raises(EngineDeadError) as error:
        llm.generate(SHORT, some())
    assert isinstance(error.value.__cause__, CapacityError)
    llm.close()
    assert set(threading.enumerate()) == threads


def test_callback_cannot_close_the_engine_that_calls_it(model: Path) -> None:
    """``close`` waited for the start, which waited for the callback."""
    llm = unopened(model, progress=lambda report: llm.close())
    with pytest.raises(EngineStateError, match="a callback of the engine, such as `progress`, cannot close it"), llm:
        pass
    assert llm.state == "failed"
    llm.close()
    with unopened(model) as other:
        future = engine_of(other).call(lambda engine: other.close())
        assert isinstance(future.exception(60), EngineStateError) and other.state == "ready"


WAITING: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate(SHORT, some()),
    "as_completed": lambda llm: next(llm.as_completed([SHORT], some())),
    "stream": lambda llm: llm.stream(SHORT, some()),
    "weight_checksums": lambda llm: llm.weight_checksums(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "pause": lambda llm: llm.pause(),
    "sleep": lambda llm: llm.sleep(),
    "update_weights": lambda llm: llm.update_weights(1),
    "apply": lambda llm: llm.apply(lambda model, rank: rank),
}


@pytest.mark.parametrize("call", WAITING)
def test_function_of_apply_cannot_wait_for_the_engine_that_runs_it(llm: LLM, call: str) -> None:
    """Such a call waited for its own thread, for ever, and so did ``close``."""
    with pytest.raises(EngineStateError, match=f"{call}: a callback of the engine, such as a function of `apply`, would wait"):
        llm.apply(lambda model, rank: WAITING[call](llm))
    assert llm.apply(lambda model, rank: (llm.abort(), llm.state, llm.stats().num_running)) == [(None, "ready", 0)]
    assert len(llm.generate(SHORT, some()).token_ids) == 12


def test_exception_whose_causes_form_a_ring_ends_its_call(llm: LLM) -> None:
    """The engine's thread followed the causes for ever. A lost rank made such a ring of the error that two threads shared."""
    error, cause, found = ValueError("first"), KeyError("second"), list[BaseException]()
    error.__cause__, cause.__cause__ = cause, error

    def call() -> None:
        try:
            llm.apply(raising(error))
        except ValueError as raised:
            found.append(raised)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    in_time = list(found)
    cause.__cause__ = None  # otherwise the engine could not be closed
    thread.join()
    assert in_time == [error]


@pytest.mark.parametrize("end", ["close", "interrupt"])
def test_start_that_is_closed_or_interrupted_ends_at_its_next_report(end: str) -> None:
    """Ctrl-C waited until the whole checkpoint was loaded."""
    every, reports = list[LoadProgress](), list[LoadProgress]()
    with unopened(tiny_model(), progress=every.append):
        pass
    threads, main = set(threading.enumerate()), threading.main_thread().ident or 0

    def report(progress: LoadProgress) -> None:
        reports.append(progress)
        if len(reports) > 1:
            return
        if end == "close":
            closing.start()
        else:
            signal.pthread_kill(main, signal.SIGINT)
        while llm.state == "starting":
            time.sleep(0.01)
        time.sleep(0.1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        llm = unopened(tiny_model(), progress=report)
        closing = threading.Thread(target=llm.close)
        with pytest.raises(EngineStateError if end == "close" else KeyboardInterrupt), llm:
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    llm.close()
    if end == "close":
        closing.join()
    assert llm.state == "closed" and 0 < len(reports) < len(every) and set(threading.enumerate()) == threads


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_start_that_is_cancelled_ends_at_its_next_report(backend: str) -> None:
    reports, reported = list[LoadProgress](), threading.Event()

    def report(progress: LoadProgress) -> None:
        reports.append(progress)
        reported.set()
        while llm.state == "starting":
            time.sleep(0.01)
        time.sleep(0.1)

    async def start() -> None:
        async def cancel() -> None:
            await anyio.to_thread.run_sync(reported.wait)
            scope.cancel()

        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(cancel)
                async with llm:
                    pass
        assert scope.cancelled_caught

    llm = AsyncLLM(tiny_model(), device="cpu", progress=report)
    anyio.run(start, backend=backend)
    assert len(reports) == 1


class NoText(Exception):
    def __str__(self) -> str:
        raise AttributeError


@pytest.mark.parametrize("kind", [NoText, type("NoTextAtRuntime", (NoText, RuntimeError), {})])
def test_step_that_raises_an_exception_without_text_ends_the_requests(model: Path, kind: type[NoText]) -> None:
    with unopened(model) as llm, llm.stream(SHORT, some(max_tokens=None)) as stream:
        next(iter(stream))
        engine_of(llm)._runner.launch = raising(kind())
        with pytest.raises(EngineDeadError, match=f"failed in a step: {kind.__name__}: <its text cannot be read") as error:
            stream.final()
        assert isinstance(error.value.__cause__, kind) and llm.state == "failed"


def test_start_ends_with_an_exception_of_the_host_that_has_no_text(model: Path) -> None:
    """The start once waited for ever for the engine's thread, which had failed to make an error's message."""
    llm = unopened(model, progress=raising(NoText()))
    with pytest.raises(EngineDeadError, match="could not start"), llm:
        pass
    assert llm.state == "failed"


def test_call_made_while_the_engine_fails_answers_no_other(model: Path) -> None:
    """Its caller holds a lock, which the other's callback takes: both once waited for ever."""
    in_step, failing, failed = threading.Event(), threading.Event(), threading.Event()

    class Failing:
        """An inbox whose ``put`` returns after the engine has failed."""

        def __init__(self, engine: Engine) -> None:
            self.engine, self.inbox = engine, engine._inbox

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inbox, name)

        def put(self, command: Any) -> None:
            self.inbox.put(command)
            if threading.current_thread().name == "straddles":
                failing.set()
                failed.wait(60)

    def fail(*arguments: Any) -> Any:
        in_step.set()
        failing.wait(60)
        raise RuntimeError("the device failed")

    with unopened(model) as llm, llm.stream(SHORT, some(max_tokens=None)) as stream:
        next(iter(stream))
        engine = engine_of(llm)
        engine._runner.launch = fail
        engine._inbox = Failing(engine)  # type: ignore[assignment]
        announce = engine._deliver_failure
        engine._deliver_failure = lambda error: (announce(error), failed.set(), time.sleep(0.2))  # type: ignore[assignment,func-returns-value]
        errors: list[BaseException] = []

        def run(call: Callable[[], object]) -> None:
            try:
                call()
            except EngineDeadError as error:
                errors.append(error)

        assert in_step.wait(60)
        update = threading.Thread(target=run, args=(lambda: llm.update_weights(1).__enter__(),), daemon=True)
        update.start()
        while engine._inbox.qsize() == 0 and update.is_alive():
            time.sleep(0.001)
        straddles = threading.Thread(target=run, args=(lambda: llm.generate(SHORT, some()),), name="straddles", daemon=True)
        straddles.start()
        for thread in (straddles, update):
            thread.join(60)
        assert (len(errors), llm.state, straddles.is_alive(), update.is_alive()) == (2, "failed", False, False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["launch", "results"])
def test_exception_in_a_step_reaches_every_caller_with_its_cause(model: Path, overlap: bool, where: str) -> None:
    boom = ZeroDivisionError("the device is on fire")
    fail = raising(boom)
    threads = set(threading.enumerate())
    with overlapping(overlap), unopened(model) as llm, ExitStack() as stack:
        streams = [stack.enter_context(llm.stream(prompt, some(max_tokens=None, n=2))) for prompt in (SHORT, LONG)]
        queued = [stack.enter_context(llm.stream(SHORT, some())) for _ in range(5)]
        for stream in streams:
            next(iter(stream))
        engine = engine_of(llm)
        target, name = (engine._runner, "launch") if where == "launch" else (engine._scheduler, "update")
        setattr(target, name, fail)
        for stream in streams + queued:
            with pytest.raises(EngineDeadError, match="ZeroDivisionError: the device is on fire") as error:
                stream.final()
            assert error.value.__cause__ is boom and error.value.phase == "step"
        assert llm.state == "failed"
        for call in (
            lambda: llm.generate(SHORT, some()),
            lambda: llm.score(SHORT, SHORT),
            lambda: llm.generate_batch([SHORT], some(), on_error="return"),
            lambda: llm.pause(),
            lambda: llm.resume(),
            lambda: llm.reset_prefix_cache(),
        ):
            with pytest.raises(EngineDeadError) as error:
                call()
            assert error.value.__cause__ is boom
        # Each caller gets an exception of its own: a shared one would collect all their tracebacks.
        raised = []
        for call in (partial(engine.set_paused, True), partial(engine.set_paused, False), engine.reset_prefix_cache):
            with pytest.raises(EngineDeadError) as error:
                call()
            raised.append(error.value)
            assert error.value.__cause__ is boom
        assert len(set(map(id, raised))) == 3 and len({len(traceback.extract_tb(one.__traceback__)) for one in raised}) == 1
        llm.abort()
    assert llm.state == "closed" and not set(threading.enumerate()) - threads


def test_exception_while_pausing_reaches_every_caller(model: Path) -> None:
    """With a step in flight, a pause has to wait for it."""
    boom = ZeroDivisionError("the device is on fire")
    fail = raising(boom)
    with overlapping(True), unopened(model) as llm, llm.stream(LONG, some(max_tokens=None)) as stream:
        next(iter(stream))
        engine = engine_of(llm)

        def sabotage(engine: Engine) -> None:
            engine._scheduler.update = fail  # type: ignore[method-assign]
            engine._set_paused(True)

        assert isinstance(engine.call(sabotage).exception(timeout=60), EngineDeadError)
        with pytest.raises(EngineDeadError) as error:
            stream.final()
        assert error.value.__cause__ is boom
        with pytest.raises(EngineDeadError):
            engine.call(lambda engine: None).result(timeout=60)
        with pytest.raises(EngineDeadError):
            llm.generate(SHORT, some())


def test_engines_share_a_process(model: Path) -> None:
    with opened(model) as one, opened(model) as other:
        expected = one.generate(LONG, some()).token_ids
        with ThreadPoolExecutor(2) as threads:
            assert [o.token_ids for o in threads.map(lambda llm: llm.generate(LONG, some()), (one, other))] == [expected] * 2
        with opened(model) as third:
            assert third.generate(LONG, some()).token_ids == expected
        assert one.generate(LONG, some()).token_ids == expected


def test_closed_engines_leave_no_threads_and_no_tensors(model: Path) -> None:
    async def use() -> tuple[int, ...]:
        async with AsyncLLM(str(model), **MODEST) as llm:
            async with llm.stream(LONG, some(max_tokens=None)) as stream:
                await anext(stream)
            return (await llm.generate(SHORT, some())).token_ids

    def use_in_both_loops() -> set[tuple[int, ...]]:
        return {anyio.run(use, backend=backend) for backend in ("asyncio", "trio")}

    seen = use_in_both_loops()
    threads, before = set(threading.enumerate()), tensor_bytes()
    for _ in range(2):
        seen |= use_in_both_loops()
        with unopened(model) as llm:
            seen.add(llm.generate(SHORT, some()).token_ids)
        del llm
    assert len(seen) == 1
    assert not set(threading.enumerate()) - threads
    assert tensor_bytes() <= before + 100_000  # an engine has far more


def test_closed_engine_frees_its_model_where_grammars_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        try:
            raise ModuleNotFoundError("llguidance")
        except ModuleNotFoundError as error:
            raise UnsupportedError("no library for grammars") from error

    monkeypatch.setattr(rank, "GrammarCompiler", missing)
    with opened(tiny_model()) as llm:
        model = weakref.ref(engine_of(llm)._runner.model)
        assert model() is not None
    assert model() is None
