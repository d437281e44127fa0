"""Sleep and wake-up: the memory really goes, everything comes back, and a failure changes nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from dsv4lite.config import MTP
from dsv4lite.engine import resident
from dsv4lite.engine.engine import Engine
from dsv4lite.errors import CapacityError, EngineStateError, InvalidRequestError, WeightsNotLoadedError, WeightUpdateError
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.request import Phase, SamplingParams
from dsv4lite.state import store
from dsv4lite.weights import host_memory
from dsv4lite.weights.update import DiskSource, NamedTensors
from tests.e2e.engines import MODEST, engine_of, opened, write_model
from tests.e2e.updates import GREEDY, KINDS, LONG, PROMPT, ask, quantized_tensors, read, same, write_for_kernels, write_quantized
from tests.loops import both_loops
from tests.recorded import captured_engines, recorded

DRAFTING: dict[str, Any] = {"deterministic": True, "speculative": MTP(2, adaptive=False)}


@pytest.fixture(scope="module", params=["v4", "v3"])
def kind(request: pytest.FixtureRequest) -> str:
    """V4, and V3 with float32 scales."""
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized(tmp_path_factory.mktemp("model"), quantized_tensors(0, kind), kind)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32, with which steps take less time."""
    return write_model(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with opened(model, **DRAFTING) as llm:
        yield llm


def tensors_of(engine: Engine) -> dict[str, list[Tensor]]:
    """All tensors of the model and of the state."""
    runner: Any = engine._runner
    cache = runner.cache
    rows = [store.memory for _, _, store in cache.stores()]
    return {
        "weights": [*runner.model.parameters(), *(ids for name, ids in runner.model.named_buffers() if "tid2eid" in name)],
        "kv_cache": [*rows, *(tensor for stack in cache.stacks for tensor in stack.tensors)],
    }


def held(llm: LLM) -> dict[str, int]:
    """Bytes that an engine holds of each."""
    found = engine_of_any(llm).call(tensors_of).result()
    return {tag: sum(x.untyped_storage().nbytes() for x in tensors) for tag, tensors in found.items()}


def engine_of_any(llm: LLM) -> Engine:
    """The engine in any state."""
    engine = llm._session._engine
    assert isinstance(engine, Engine)
    return engine


def poison(engine: Engine) -> None:
    for tensor in tensors_of(engine)["weights"]:
        resident.storage_bytes(tensor).fill_(0xFF)


def test_level_1_frees_the_memory_and_brings_everything_back(llm: LLM) -> None:
    before, checksums, bytes_before = ask(llm, tokens=12), llm.weight_checksums(), held(llm)
    assert min(bytes_before.values()) > 50_000
    llm.sleep(1)
    assert (llm.state, held(llm)) == (Phase.ASLEEP, {"weights": 0, "kv_cache": 0})
    llm.sleep(1)
    with pytest.raises(EngineStateError, match="the engine is asleep; wake it up") as caught:
        ask(llm)
    assert not isinstance(caught.value, WeightsNotLoadedError)
    llm.wake_up(["kv_cache"])
    assert (llm.state, held(llm)) == (Phase.ASLEEP, {"weights": 0, "kv_cache": bytes_before["kv_cache"]})
    with pytest.raises(EngineStateError):
        ask(llm)
    llm.wake_up()
    llm.wake_up()
    assert (llm.state, held(llm)) == (Phase.READY, bytes_before)
    assert same(ask(llm, tokens=12), before) and llm.weight_checksums() == checksums and before.usage.accepted_tokens > 0


def test_captured_steps_give_back_the_rows_that_they_work_in(plain: Path) -> None:
    """A row of the vocabulary, in the logits and in the sampler, for every row of the largest step; they come with the KV cache."""

    def rows_of(engine: Engine) -> int:
        runner: Any = engine._runner
        return sum(x.untyped_storage().nbytes() for x in (runner._graphs._logits, runner.sampler.space.edited))

    with recorded() as captured, captured_engines(), opened(plain) as llm:
        before, steps, whole = ask(llm), llm.stats().steps, 2 * 8 * 96 * 4
        assert engine_of_any(llm).call(rows_of).result() == whole
        llm.sleep(1)
        assert engine_of_any(llm).call(rows_of).result() == 0
        llm.wake_up(["weights"])
        assert engine_of_any(llm).call(rows_of).result() == 0
        llm.wake_up()
        assert engine_of_any(llm).call(rows_of).result() == whole
        released = len(captured)
        llm.warmup()
        count = len(captured)
        assert count > released
        assert same(ask(llm), before) and llm.stats().steps == 2 * steps
        llm.warmup()
        assert len(captured) - count <= 1  # of the sampler


def test_after_level_2_nothing_is_generated_before_a_full_update(llm: LLM, model: Path, kind: str) -> None:
    """The drafter's weights were lost without a word elsewhere, and nothing was accepted any more."""
    before, checksums, bytes_before = ask(llm, tokens=12), llm.weight_checksums(), held(llm)
    llm.sleep(2)
    assert (llm.state, held(llm)) == (Phase.ASLEEP, {"weights": 0, "kv_cache": 0})
    with pytest.raises(WeightsNotLoadedError, match=r"wake it up .* and give it all weights"):
        ask(llm)
    with pytest.raises(WeightsNotLoadedError, match=r"wake_up\(tags=\['weights'\]\)` first"), llm.update_weights(1):
        raise AssertionError
    llm.wake_up(["weights"])
    engine_of_any(llm).call(poison).result()
    assert (llm.state, held(llm)) == (Phase.ASLEEP, {"weights": bytes_before["weights"], "kv_cache": 0})
    for attempt in range(2):
        with pytest.raises(WeightUpdateError, match=r"mtp\.0\.norm\.weight: missing"), llm.update_weights(1) as update:
            update.load(NamedTensors({n: t for n, t in quantized_tensors(0, kind).items() if n != "mtp.0.norm.weight"}))
        assert llm.state is (Phase.ASLEEP, Phase.WEIGHTS_INVALID)[attempt]
        with pytest.raises(WeightsNotLoadedError):
            ask(llm)
        llm.wake_up()
    with llm.update_weights(2) as update:
        update.load(DiskSource(str(model), prefix=KINDS[kind].drafter))
        update.load(NamedTensors({n: t for n, t in quantized_tensors(0, kind).items() if not n.startswith("mtp.")}))
    assert (llm.state, llm.weight_version, held(llm)) == (Phase.READY, 2, bytes_before)
    assert same(ask(llm, tokens=12), before) and llm.weight_checksums() == checksums and before.usage.accepted_tokens > 0


def test_update_of_awake_weights_of_an_engine_that_sleeps(llm: LLM, tmp_path: Path, kind: str) -> None:
    new = quantized_tensors(1, kind)
    with opened(write_quantized(tmp_path, new, kind), **DRAFTING) as other:
        wanted = ask(other)
    llm.sleep(1)
    llm.wake_up(["weights"])
    with llm.update_weights(3) as update:
        assert llm.state is Phase.UPDATING
        with pytest.raises(EngineStateError, match="the engine is asleep"):
            ask(llm)
        with pytest.raises(EngineStateError, match="the engine is updating"):
            llm.wake_up()
        update.load(NamedTensors(new))
    assert llm.state is Phase.ASLEEP
    llm.wake_up()
    assert same(ask(llm), wanted)


def test_deeper_sleep_drops_the_copies_and_a_lighter_one_does_nothing(llm: LLM, model: Path) -> None:
    before = ask(llm)
    llm.sleep(1)
    copies: Any = engine_of_any(llm)._runner._resident._copies  # type: ignore[union-attr]
    assert copies
    llm.sleep(2)
    assert not copies
    llm.sleep(1)
    llm.wake_up()
    assert llm.state is Phase.WEIGHTS_INVALID
    llm.sleep(1)  # what it would keep is worth nothing
    llm.wake_up()
    assert llm.state is Phase.WEIGHTS_INVALID
    with llm.update_weights(1) as update:
        update.load(DiskSource(str(model)))
    assert same(ask(llm), before)


def test_prefixes_of_before_are_forgotten(llm: LLM) -> None:
    before = ask(llm, LONG)
    assert ask(llm, LONG).usage.cached_tokens == 256
    llm.sleep(1)
    llm.wake_up()
    after = ask(llm, LONG)
    assert after.usage.cached_tokens == 0 and same(after, before)


def test_two_engines_sleep_in_turn_and_memory_stays_flat(plain: Path) -> None:
    with ExitStack() as stack:
        pair = [stack.enter_context(opened(plain, deterministic=True)) for _ in range(2)]
        before = [ask(llm) for llm in pair]
        for turn in range(20):
            asleep, awake = pair[turn % 2], pair[1 - turn % 2]
            asleep.sleep(1)
            assert set(held(asleep).values()) == {0} and min(held(awake).values()) > 0
            asleep.wake_up()
            assert held(asleep) == held(awake)
        assert all(same(ask(llm), one) for llm, one in zip(pair, before, strict=True))


def failing(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, *, after: int) -> None:
    """Let a function raise as PyTorch does without memory, once it has been called a few times."""
    real, calls = getattr(module, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, counted)


def test_failed_sleep_leaves_the_engine_awake(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before, bytes_before = ask(llm), held(llm)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "PIECE", 1)  # as many pieces as tensors
        failing(patch, host_memory.mmap, "mmap", after=3)
        with pytest.raises(CapacityError, match="the host has too little memory for copies of weights: Default"):
            llm.sleep(1)
    resident_: Any = engine_of(llm)._runner._resident  # type: ignore[union-attr]
    assert (llm.state, held(llm), resident_._copies) == (Phase.READY, bytes_before, {})
    assert same(ask(llm), before)


@pytest.mark.parametrize("module", [resident, store], ids=["weights", "kv_cache"])
def test_failed_wake_up_leaves_the_engine_asleep(llm: LLM, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    before = ask(llm)
    llm.sleep(1)
    llm.wake_up(["weights"] if module is store else ["kv_cache"])
    awake = held(llm)
    with monkeypatch.context() as patch:
        failing(patch, module, "fill_storage", after=2)
        for _ in range(2):
            with pytest.raises(CapacityError, match="cpu has too little memory to wake up: Default"):
                llm.wake_up()
            assert (llm.state, held(llm)) == (Phase.ASLEEP, awake)
    llm.wake_up()
    assert same(ask(llm), before)


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
@both_loops
async def test_calls_behind_one_that_fails_find_what_it_left(plain: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were made when it was expected to succeed. They read no weights that are not there, and the state is the true one."""
    begun, go = threading.Event(), threading.Event()

    def fails(*args: Any, **options: Any) -> Any:
        begun.set()
        assert go.wait(60)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    async def refused(error: type[Exception], run: Callable[..., Awaitable[Any]], *args: Any) -> None:
        with pytest.raises(error):
            await run(*args)

    async def update(llm: AsyncLLM) -> None:
        async with llm.update_weights(1) as opened_update:
            await opened_update.load(DiskSource(str(plain)))

    async with AsyncLLM(str(plain), **MODEST) as llm:
        before = await llm.generate(PROMPT, GREEDY)
        kept = []
        if call == "wake_up":
            kept.append(await llm.stream(PROMPT, GREEDY).__aenter__())
            await llm.sleep(mode="keep")
        with monkeypatch.context() as patch:
            patch.setattr(*((resident, "fill_storage") if call == "wake_up" else (host_memory.mmap, "mmap")), fails)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(refused, CapacityError, getattr(llm, call))
                assert await anyio.to_thread.run_sync(begun.wait, 60)
                if call == "wake_up":
                    for run in (llm.weight_checksums, partial(llm.apply, lambda model, rank: rank), partial(update, llm)):
                        tasks.start_soon(refused, EngineStateError, run)
                else:
                    tasks.start_soon(llm.sleep, 2)
                await anyio.wait_all_tasks_blocked()
                go.set()
        assert llm.state == Phase.ASLEEP
        await llm.wake_up()
        if kept:  # it ran on no weights that slept
            assert (await kept[0].final()).token_ids == before.token_ids
            await kept[0].__aexit__(None, None, None)
        if call == "sleep":  # at level 2
            await refused(WeightsNotLoadedError, llm.generate, PROMPT, GREEDY)
        await update(llm)
        assert (await llm.generate(PROMPT, GREEDY)).token_ids == before.token_ids


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
@both_loops
async def test_calls_without_effect_wait_for_the_one_that_is_under_way(
    plain: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their callers count on the memory that it gives back or takes."""
    begun, go, ended = threading.Event(), threading.Event(), list[str]()
    name = "free_storage" if call == "sleep" else "fill_storage"
    work = getattr(store, name)

    def slow(*args: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return work(*args)

    async def run(llm: AsyncLLM, who: str) -> None:
        await getattr(llm, call)()
        ended.append(who)

    async with AsyncLLM(str(plain), **MODEST) as llm:
        if call == "wake_up":
            await llm.sleep()
        monkeypatch.setattr(store, name, slow)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, llm, "first")
            assert await anyio.to_thread.run_sync(begun.wait, 60)
            tasks.start_soon(run, llm, "second")
            await anyio.wait_all_tasks_blocked()
            assert ended == []
            go.set()
        assert llm.state is (Phase.ASLEEP if call == "sleep" else Phase.READY)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@both_loops
async def test_open_requests_meet_a_sleep_as_its_mode_says(plain: Path, mode: Any) -> None:
    """Those that are kept end as if nothing had been."""
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=2)
    outputs: list[Any] = []

    async def generate() -> None:
        outputs.append(await llm.generate(PROMPT, params))

    async with AsyncLLM(str(plain), **MODEST, deterministic=True) as llm:
        undisturbed = await llm.generate(PROMPT, params)
        async with anyio.create_task_group() as group:
            done = llm.stats().generated_tokens
            group.start_soon(generate)
            while llm.stats().generated_tokens < done + 5:
                await anyio.sleep(0.001)
            await llm.sleep(1, mode=mode)
            await llm.sleep(1)  # has no effect
            assert llm.state is Phase.ASLEEP and len(outputs) == (mode != "keep")
            await llm.wake_up()
    (one,), (expected,) = outputs[0].outputs, undisturbed.outputs
    if mode == "abort":
        assert one.finish_reason == "abort" and one.token_ids == expected.token_ids[: len(one.token_ids)]
    else:
        assert one.token_ids == expected.token_ids and one.logprobs.values.equal(expected.logprobs.values)


@both_loops
async def test_requests_that_wait_in_the_queue_outlast_a_sleep(plain: Path) -> None:
    outputs: list[Any] = []

    async def generate() -> None:
        outputs.append(await llm.generate(PROMPT, GREEDY))

    async with AsyncLLM(str(plain), **MODEST, deterministic=True) as llm, anyio.create_task_group() as group:
        await llm.pause()
        group.start_soon(generate)
        await anyio.sleep(0.01)
        await llm.sleep(1, mode="keep")
        await llm.wake_up()
        assert llm.state is Phase.PAUSED and not outputs
        await llm.resume()
    assert outputs[0].outputs[0].finish_reason == "length"


def test_bad_arguments_are_refused(llm: LLM) -> None:
    for level in (0, 3, True, "1"):
        with pytest.raises(InvalidRequestError, match=r"level=.* must be 1 or 2"):
            llm.sleep(level)  # type: ignore[arg-type]
    for tags in ("weights", ["weight"], 3):
        with pytest.raises(InvalidRequestError, match=r"tags=.* must be a sequence of 'weights' and 'kv_cache'"):
            llm.wake_up(tags)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="mode='later' must be"):
        llm.sleep(1, mode="later")  # type: ignore[arg-type]
    assert llm.state is Phase.READY


def test_calls_that_read_weights_say_in_which_state_the_engine_is_and_what_helps(plain: Path) -> None:
    """They said that the weights are not in memory, or not valid, and neither which of the two nor what to do."""
    with opened(plain) as llm:

        def refused(error: type[EngineStateError], message: str) -> EngineStateError:
            calls = (llm.weight_checksums, llm.execution_contract, partial(llm.apply, lambda model, rank: rank))
            for call in calls:
                with pytest.raises(error, match=message) as caught:
                    call()
            return caught.value

        with llm.update_weights(1, staged=False) as update:
            found = refused(EngineStateError, "the engine is updating; leave the block of the open update first")
            assert found.state == "updating" and found.allowed == ("ready", "paused")
            update.load(DiskSource(str(plain)))
        llm.sleep(1)
        refused(EngineStateError, "the engine is asleep; wake it up with `wake_up`$")
        llm.sleep(2)
        refused(WeightsNotLoadedError, "the engine is asleep; wake it up with `wake_up`, and give it all weights")
        llm.wake_up()
        refused(WeightsNotLoadedError, "the engine is weights_invalid; give it all weights with `update_weights`")
        with llm.update_weights(2) as update:
            update.load(DiskSource(str(plain)))
        assert len(llm.weight_checksums()) > 10


def test_engine_that_sleeps_can_be_closed(model: Path) -> None:
    with LLM(str(model), **{**MODEST, **DRAFTING}) as llm:
        llm.sleep(2)
    assert llm.state is Phase.CLOSED


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="tests beside it take memory of the same GPU: run it without -n")
@pytest.mark.parametrize("deterministic", [False, True])
def test_gpu_gets_its_memory_back_and_steps_are_captured_again(tmp_path: Path, deterministic: bool) -> None:
    """To within 200 MB of a process that has only its context; results are those of before, with captured steps."""
    folder = write_for_kernels(tmp_path, 0)
    sizes = {"max_model_len": 1024, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 30}
    settings = {**DRAFTING, **sizes, "deterministic": deterministic}
    torch.cuda.init()
    idle, _ = torch.cuda.mem_get_info()
    with LLM(str(folder), **settings) as llm:
        before = ask(llm)
        for level in (1, 2):
            llm.sleep(level)  # type: ignore[arg-type]
            free, _ = torch.cuda.mem_get_info()
            assert idle - free < 200_000_000
            llm.wake_up()
            if level == 2:
                with llm.update_weights(1) as update:
                    update.load(NamedTensors({n: t.cuda() for n, t in read(folder).items()}))
            assert same(ask(llm), before)
