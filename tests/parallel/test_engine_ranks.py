"""Whole engines of several ranks on gloo: the same results as one rank, and errors for all requests when a rank is lost."""

from __future__ import annotations

import asyncio
import enum
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch

from dsv4lite.config import EngineConfig
from dsv4lite.engine import engine as engine_module
from dsv4lite.engine import executor as executor_module
from dsv4lite.engine import rank as rank_module
from dsv4lite.engine.executor import MultiRankExecutor
from dsv4lite.engine.rank import Probe, common_plan
from dsv4lite.errors import CapacityError, ConfigError, EngineDeadError, InvalidRequestError, UnsupportedError
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.planning.memory import plan_memory
from dsv4lite.request import Phase, RequestOutput, SamplingParams
from dsv4lite.weights.update import NamedTensors
from tests.e2e.engines import MODEST, SMALL, engine_of, overlapping, same_outputs, write_model
from tests.e2e.updates import read
from tests.mla import write_random_model
from tests.parallel.dispatchers import Marked, refuses
from tests.parallel.holdings import held, listening
from tests.parallel.requests import PROMPTS, TOLERANCE, all_kinds, tight
from tests.processes import Zygote, forked

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
ENOUGH_S = 60.0  # for what comes at once unless the machine is busy


def processes(llm: LLM | AsyncLLM) -> dict[int, int]:
    """Process ids of an engine's ranks."""
    ranks = engine_of(llm)._executor
    assert isinstance(ranks, MultiRankExecutor)
    return {rank: process.pid for rank, process in ranks._processes.items()}


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Repeat:
    """A speculator of the host's own, which no other process could make."""

    def __init__(self) -> None:
        self.k, self.lock = 2, threading.Lock()

    def propose(self, sequence_id: int, token_ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        return token_ids[-max_drafts:]

    def forget(self, sequence_id: int) -> None:
        pass


def test_rank_in_a_process_gives_what_one_rank_gives_and_its_loss_names_it(model: Path, expected: list[RequestOutput]) -> None:
    before = held()
    with LLM(str(model), **tight(model, executor="process")) as llm:
        same_outputs(all_kinds(llm), expected, tolerance=TOLERANCE)
        engine_of(llm).call(lambda engine: engine._scheduler.check()).result(ENOUGH_S)
        (pid,) = processes(llm).values()
        assert_lost(doomed(llm, 0, signal.SIGKILL, busy=False), 1, 0, pid, "was killed by SIGKILL")
    assert not is_alive(pid) and held() <= before


@pytest.mark.parametrize("dispatcher", ["local", "all_gather", "all_to_all"])
def test_two_ranks_give_a_request_the_same_bits_in_company(model: Path, dispatcher: str, zygote: Zygote) -> None:
    """Wherever the tokens lie in their step: half of them are sent to their experts by one rank, and half by the other."""
    layout = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "dispatcher": dispatcher}
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    settings = {**MODEST, **layout, "deterministic": True, "enable_prefix_caching": False}
    with forked(zygote), LLM(str(model), **settings) as llm:
        same_outputs([llm.generate(prompt, params) for prompt in PROMPTS], llm.generate_batch(PROMPTS, params))


def refuse(kind: type[Exception]) -> None:
    raise kind("not to be unpickled")


class Unreadable:
    """An object that can be pickled only."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return refuse, (self.kind,)


def asked(model: torch.nn.Module, rank: int, wish: object) -> Any:
    """A function of the host for ``apply``."""
    if isinstance(wish, type):
        return Unreadable(wish)
    if rank == 1 and isinstance(wish, BaseException):
        raise wish
    return (lambda: rank) if wish == "local" else (rank, sum(weight.numel() for weight in model.parameters()))


def test_function_of_the_host_runs_on_every_rank_and_ends_none(
    model: Path, monkeypatch: pytest.MonkeyPatch, zygote: Zygote
) -> None:
    """Nor does one that ranks cannot unpickle, or one whose result the leader cannot; later answers are of later calls."""

    def of_script(model: torch.nn.Module, rank: int) -> int:
        return rank

    of_script.__module__, of_script.__qualname__ = "__main__", "of_script"
    monkeypatch.setattr(sys.modules["__main__"], "of_script", of_script, raising=False)
    with LLM(str(model), **tight(model)) as llm:
        ((_, whole),), alone = llm.apply(asked, ""), llm.generate(PROMPTS[0], GREEDY)
        assert llm.apply(lambda model, rank: rank) == [0]
    with forked(zygote), LLM(str(model), **tight(model, tensor_parallel_size=2, executor="process")) as llm:
        (zero, part), (one, other) = llm.apply(asked, "")
        assert (zero, one) == (0, 1) and part == other and whole / 2 < part < whole
        with pytest.raises(ValueError, match="this rank does not want to"):
            llm.apply(asked, ValueError("this rank does not want to"))
        for ends in (SystemExit, asyncio.CancelledError, KeyboardInterrupt):
            with pytest.raises(ends):
                llm.apply(asked, ends())
        with pytest.raises((AttributeError, PicklingError), match=r"asked\.<locals>\.<lambda>"):
            llm.apply(asked, "local")
        with pytest.raises(InvalidRequestError, match="other ranks get functions and arguments by pickle"):
            llm.apply(lambda model, rank: rank)
        with pytest.raises(InvalidRequestError, match="do not import the host's __main__"):
            llm.apply(of_script)
        with pytest.raises(InvalidRequestError, match="not to be unpickled"):
            llm.apply(asked, Unreadable(ValueError))
        for kind in (ValueError, FileNotFoundError):
            with pytest.raises(kind, match="not to be unpickled"):
                llm.apply(asked, kind)
            assert [rank for rank, _ in llm.apply(asked, "")] == [0, 1]
        assert llm.generate(PROMPTS[0], GREEDY).token_ids == alone.token_ids


def test_values_of_types_of_the_host_reach_the_ranks_as_plain_ones(model: Path, zygote: Zygote) -> None:
    """Ranks in child processes, which do not know the types, once ended the engine."""

    class Number(enum.IntEnum):
        ONE, THREE = 1, 3

    class Word(enum.StrEnum):
        STOP = "no such text"

    class Tag(enum.StrEnum):
        WEIGHTS = "weights"

    class Name(enum.StrEnum):
        HEAD = "head.weight"

    class Params(SamplingParams):
        pass

    given = Params(
        max_tokens=Number.THREE,
        seed=Number.ONE,
        stop=[Word.STOP],
        stop_token_ids=[Number.ONE],
        bad_words_ids=[[Number.ONE]],
        logit_bias={Number.ONE: Number.ONE},
    )
    plain = SamplingParams(max_tokens=3, seed=1, stop=["no such text"], stop_token_ids=[1], bad_words_ids=[[1]], logit_bias={1: 1})
    with forked(zygote), LLM(str(model), **tight(model, executor="process")) as llm:
        out = llm.generate(PROMPTS[0], given, priority=Number.ONE, cache_salt=Word.STOP, request_id=Word.STOP)
        assert out.token_ids == llm.generate(PROMPTS[0], plain).token_ids and type(out.request_id) is str
        llm.sleep()
        llm.wake_up([Tag.WEIGHTS, "kv_cache"])
        with llm.update_weights(1, partial=True) as update:
            update.load(NamedTensors({Name.HEAD: read(model)[Name.HEAD]}))
        assert out.token_ids == llm.generate(PROMPTS[0], plain).token_ids
    structure: Any = SamplingParams(structured_outputs={"choice": [Word.STOP]}).structured_outputs
    assert type(structure.choice[0]) is str


def test_pipeline_whose_requests_and_results_fill_both_directions_goes_on(model: Path, zygote: Zygote) -> None:
    """Leader and last stage each waited, for ever, until the other had read what it sent."""
    sizes = {"max_model_len": 16384, "max_num_batched_tokens": 1024, "max_logprobs": 96, "pipeline_parallel_size": 2}
    scored = SamplingParams(max_tokens=1, prompt_logprobs=96)  # 0.8 MB in the result of each step
    long = replace(GREEDY, stop=("x" * (1 << 20),))  # 1 MB in the plan of the next step
    found: list[RequestOutput] = []
    with forked(zygote), LLM(str(model), **{**MODEST, **sizes}) as llm:
        requests = (({"prompt_token_ids": [9] * 10_000}, scored), ({"prompt_token_ids": PROMPTS[0]}, long))
        threads = [threading.Thread(target=lambda args=args: found.append(llm.generate(*args))) for args in requests]
        threads[0].start()
        while llm.stats().steps < 1:
            time.sleep(0.01)
        threads[1].start()
        threads[0].join(ENOUGH_S)
        stuck = threads[0].is_alive()
        for pid in processes(llm).values() if stuck else ():
            os.kill(pid, signal.SIGKILL)  # otherwise the engine could not be closed
        threads[1].join(ENOUGH_S)
    assert not stuck and len(found) == 2


@pytest.fixture(scope="module")
def mla(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RequestOutput]]:
    """A model of the MLA family, and what one rank makes of requests of all kinds."""
    model = write_random_model(tmp_path_factory.mktemp(request.param), request.param)
    with LLM(str(model), **tight(model)) as llm:
        outputs = all_kinds(llm)
        assert llm.stats().preemptions > 0 and llm.stats().cached_tokens > 0
    return model, outputs


@pytest.mark.parametrize(
    ("mla", "sizes"),
    [
        ("v3", {"tensor": 2}),
        ("v3", {"tensor": 2, "expert": 2}),
        ("v3", {"data": 2, "expert": 2}),
        ("v32", {"tensor": 2, "expert": 2}),
        ("v2_lite", {"pipeline": 2}),
        ("v3", {"pipeline": 2}),
    ],
    indirect=["mla"],
)
def test_mla_models_on_two_ranks_give_what_one_gives(
    mla: tuple[Path, list[RequestOutput]], sizes: dict[str, int], zygote: Zygote
) -> None:
    model, expected = mla
    layout = {f"{axis}_parallel_size": size for axis, size in sizes.items()}
    with forked(zygote), LLM(str(model), **tight(model, **layout)) as llm:
        same_outputs(all_kinds(llm), expected, tolerance=TOLERANCE)
        engine_of(llm).call(lambda engine: engine._scheduler.check()).result(ENOUGH_S)


def test_ranks_whose_layers_are_all_dense_have_no_experts_to_move(tmp_path: Path, zygote: Zygote) -> None:
    model = write_random_model(tmp_path, "v3", first_k_dense_replace=3)
    settings = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "redundant_experts": 0, "rebalance_steps": 2}
    with forked(zygote), LLM(str(model), **MODEST, **settings) as llm:
        output = llm.generate({"prompt_token_ids": [9, 10]}, SamplingParams(max_tokens=6, ignore_eos=True))
        assert len(output.token_ids) == 6


@pytest.mark.parametrize(
    ("settings", "overlap"),
    [
        ({"expert_parallel_size": 2}, True),
        ({"data_parallel_size": 2, "expert_parallel_size": 2}, False),
        ({"pipeline_parallel_size": 2}, True),
    ],
    ids=["ep", "dp-ep", "pp"],
)
def test_ranks_in_processes_give_what_one_rank_gives_and_end_by_themselves(
    model: Path, expected: list[RequestOutput], settings: dict[str, Any], overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With overlap, tokens in flight reach the other ranks by themselves."""
    with overlapping(overlap), LLM(str(model), **tight(model, **settings, executor="thread")) as llm:
        same_outputs(all_kinds(llm), expected, tolerance=TOLERANCE)
        engine_of(llm).call(lambda engine: engine._scheduler.check()).result(ENOUGH_S)
        (pid,) = processes(llm).values()
    assert not is_alive(pid) and not caplog.messages  # it did not have to be killed


def test_objects_of_the_host_work_with_ranks_in_processes_which_listen_at_loopback_only(
    model: Path, expected: list[RequestOutput], caplog: pytest.LogCaptureFixture
) -> None:
    """A speculator and a dispatcher; torch's TCPStore listened at all addresses."""
    before = listening()
    settings = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "executor": "thread"}
    with LLM(str(model), **tight(model, **settings, speculative=Repeat(), dispatcher=Marked)) as llm:
        same_outputs(all_kinds(llm), expected, tolerance=TOLERANCE)
        executor = engine_of(llm)._executor
        assert isinstance(executor, MultiRankExecutor) and executor._local is not None
        used = [layer.ffn.dispatch for layer in executor._local.model.layers]
        mine = listening() - before
        (pid,) = processes(llm).values()
        found = mine | listening(pid)
    assert not is_alive(pid) and not caplog.messages
    assert all(isinstance(one, Marked) and one.calls > 4 and one.ranks.ep.size == 2 for one in used)
    assert len({one.calls for one in used}) == 1  # once in every step
    del executor, used  # they hold the store
    assert len(mine) >= 1 and {address for address, _ in found} == {"0100007F"}
    assert listening() <= before


def test_dispatcher_that_cannot_be_made_is_named(model: Path, zygote: Zygote) -> None:
    with pytest.raises(EngineDeadError, match=r"rank 1 .*no dispatcher for ep=2") as caught:
        with forked(zygote), LLM(str(model), **MODEST, expert_parallel_size=2, executor="thread", dispatcher=refuses) as llm:
            raise AssertionError(llm)
    assert caught.value.phase == "load"


def test_dispatcher_that_does_not_suit_the_layout_is_refused(model: Path) -> None:
    settings = {"expert_parallel_size": 2, "data_parallel_size": 2, "dispatcher": "local"}
    with pytest.raises(ConfigError, match="ranks work on different tokens; choose the dispatcher all_gather or all_to_all"):
        plan_memory(str(model), device="cpu", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"redundant_experts": 2}, "redundant_experts=2 needs expert_parallel_size above 1"),
        ({"redundant_experts": -1, "expert_parallel_size": 2}, "redundant_experts=-1 must be an integer of at least 0"),
        ({"redundant_experts": 3, "expert_parallel_size": 2}, "redundant_experts=3 must be a multiple of expert_parallel_size=2"),
        ({"rebalance_steps": 0}, "rebalance_steps=0 must be an integer of at least 1"),
    ],
)
def test_bad_settings_of_balancing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)


def test_places_that_no_rank_can_use_are_refused(model: Path) -> None:
    """So many were placed one by one, for hours."""
    most = SMALL["n_routed_experts"]
    with pytest.raises(ConfigError, match=f"redundant_experts={2**31 - 2} must be at most {most}, with which each of ep=2 ranks"):
        plan_memory(str(model), device="cpu", expert_parallel_size=2, redundant_experts=2**31 - 2)


def doomed(llm: LLM, rank: int, number: int, *, busy: bool = True) -> list[BaseException]:
    """Send a signal to a rank, and return what open requests and the next one get."""
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    errors: list[BaseException] = []

    def run(prompt: list[int]) -> None:
        try:
            llm.generate({"prompt_token_ids": prompt}, params)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in (PROMPTS if busy else ())]
    for thread in threads:
        thread.start()
    while busy and engine_of(llm).stats().steps < 5:
        time.sleep(0.01)
    pid = processes(llm)[rank]
    os.kill(pid, number)
    for thread in threads:
        thread.join(ENOUGH_S)
        assert not thread.is_alive()
    run(PROMPTS[0])
    return errors


def assert_lost(errors: list[BaseException], count: int, rank: int, pid: int, reason: str) -> None:
    assert len(errors) == count
    for error in errors:
        assert isinstance(error, EngineDeadError)
        assert error.rank == rank and error.phase == "step"
        assert f"rank {rank} (process {pid}) {reason}" in str(error)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "gave no sign of life for 3 s")],
    ids=["killed", "stopped"],
)
def test_lost_rank_ends_every_request_with_its_name(model: Path, number: int, reason: str, zygote: Zygote) -> None:
    before, silence_s = held(), 3 if number == signal.SIGSTOP else 10
    with forked(zygote), LLM(str(model), **MODEST, expert_parallel_size=2, executor="thread", rank_timeout_s=silence_s) as llm:
        (pid,) = processes(llm).values()
        assert_lost(doomed(llm, 1, number), len(PROMPTS) + 1, 1, pid, reason)
        until = time.monotonic() + ENOUGH_S
        while is_alive(pid):  # before the engine is closed
            assert time.monotonic() < until
            time.sleep(0.01)
    assert held() <= before


def test_rank_that_is_lost_while_the_leader_waits_for_it_ends_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, zygote: Zygote
) -> None:
    """The leader connects to the ranks for up to five times ``start_timeout_s``, and the start did not end before that."""
    before, over = held(), threading.Event()

    def connect(*arguments: Any, **settings: Any) -> None:
        (child,) = (name for name in held() - before if name.startswith("child "))
        os.kill(int(child.split()[1]), signal.SIGKILL)
        over.wait(ENOUGH_S)
        raise RuntimeError("no such rank")

    monkeypatch.setattr(executor_module.Mesh, "from_store", connect)
    monkeypatch.setattr(engine_module, "_LAST_STEP_S", 0.1)
    llm = LLM(str(model), **MODEST, tensor_parallel_size=2, executor="thread")
    began = time.monotonic()
    with forked(zygote), pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) was killed by SIGKILL; phase: load"), llm:
        pass
    assert time.monotonic() - began < ENOUGH_S and llm.state == Phase.FAILED
    over.set()
    until = time.monotonic() + ENOUGH_S
    while held() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert held() <= before


def test_signals_that_reach_all_processes_are_for_the_host(model: Path, zygote: Zygote) -> None:
    """A service manager's SIGTERM, or the SIGHUP of a terminal, ended the ranks of a host that handles it, and all requests."""
    with forked(zygote), LLM(str(model), **MODEST, executor="process") as llm, llm.stream("a", GREEDY) as stream:
        next(stream)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(processes(llm)[0], number)
        assert stream.final().outputs[0].finish_reason == "length"


def test_lost_rank_shows_in_the_state_while_the_loop_is_busy(model: Path, zygote: Zygote) -> None:
    """A call that failed with the engine's error could be followed by ``ready`` or ``asleep``, and by calls that succeeded."""

    async def lose() -> None:
        async with AsyncLLM(str(model), **MODEST, executor="process") as llm:
            os.kill(processes(llm)[0], signal.SIGKILL)
            until = time.monotonic() + ENOUGH_S
            while llm.state is not Phase.FAILED and time.monotonic() < until:
                time.sleep(0.01)  # so the loop runs nothing else
            with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
                llm.stats()

    with forked(zygote):
        asyncio.run(lose())


def test_rank_that_cannot_start_raises_what_is_wrong_with_it(model: Path, tmp_path: Path) -> None:
    before = held()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="model_type=None"), LLM(str(tmp_path), **MODEST, executor="process"):
        pass
    assert held() <= before


@pytest.mark.parametrize(
    ("sizes", "error", "named"),
    [
        ({"tensor": 1000}, ConfigError, "cannot be shared equally by tp=1000 ranks"),
        ({"expert": 1000}, ConfigError, "cannot be shared equally by ep=1000 ranks"),
        ({"pipeline": 1000}, ConfigError, "pp=1000 stages for"),
        ({"tensor": 2, "data": 500, "expert": 1000}, ConfigError, "cannot be shared equally by ep=1000 ranks"),
        ({"data": 2, "expert": 4}, ConfigError, "raise dp to 4"),
        ({"data": 60_000}, CapacityError, "use fewer ranks"),
        ({"data": 2**31 - 1}, ConfigError, "at most 65536 are possible"),
    ],
)
def test_impossible_layout_is_refused_before_a_rank_is_started(
    model: Path, sizes: dict[str, int], error: type[Exception], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tp=1000 started hundreds of processes before rank 0 said that the model cannot be shared so; dp had no limit at all."""
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(error, match=named):
        with LLM(str(model), **MODEST, **{f"{axis}_parallel_size": size for axis, size in sizes.items()}) as llm:
            raise AssertionError(llm)


def test_limit_of_open_files_is_checked_before_a_rank_is_started(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks waited for a store that had no file left to answer with, until ``start_timeout_s``."""
    monkeypatch.setattr(subprocess, "Popen", None)
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 10, limits[1]))
    try:
        with pytest.raises(CapacityError, match=rf"open 24 files: it has \d+ open, of at most {held + 10}.* \(ulimit -n \d+"):
            with LLM(str(model), **MODEST, tensor_parallel_size=2) as llm:
                raise AssertionError(llm)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_layout_without_devices_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"has \d+ ranks, one on each GPU, but this machine has \d+ CUDA devices"):
        with LLM(str(model), data_parallel_size=torch.cuda.device_count() + 2, device="cuda") as llm:
            raise AssertionError(llm)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tensor_parallel_size": 3, "expert_parallel_size": 2}, "ep=2 does not fit tp=3"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"executor": "proces"}, "did you mean 'process'"),
        ({"data_parallel_placement": "prefixes"}, "did you mean 'prefix'"),
        ({"step_timeout_s": 0}, "step_timeout_s=0"),
        ({"rank_timeout_s": float("inf")}, "rank_timeout_s=inf"),
        ({"start_timeout_s": 3_000_000}, "start_timeout_s=3000000 must be a finite number of seconds above 0, at most 2147483"),
        ({"start_timeout_s": "long"}, "start_timeout_s='long'"),
        ({"device_mesh": object(), "process_group": object()}, "give one of them"),
        ({"process_group": object(), "executor": "thread"}, "executor='thread' starts ranks of its own"),
        ({"executor": "process", "dump_dir": "somewhere"}, "saved in the engine's own process only"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "is one device, but tp=2"),
        ({"dispatcher": "all_gathers"}, "did you mean 'all_gather'"),
        ({"dispatcher": 3}, "dispatcher=3 must be one of"),
        ({"expert_parallel_size": 2, "dispatcher": lambda ranks: Marked(ranks)}, "cannot be sent to ranks in child processes"),
    ],
)
def test_settings_of_ranks_are_checked(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="somewhere", **settings)
    assert named in str(caught.value)


def test_dispatcher_of_the_main_program_is_refused_for_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type("Mine", (Marked,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Mine", mine, raising=False)
    with pytest.raises(ConfigError, match="is of __main__, which ranks in child processes do not import"):
        EngineConfig(model="somewhere", executor="process", dispatcher=mine)
    assert EngineConfig(model="somewhere", executor="external", expert_parallel_size=2, dispatcher=mine).dispatcher is mine


@pytest.fixture(scope="module")
def probe(model: Path) -> Probe:
    config = EngineConfig(model=str(model), **MODEST)
    return Probe.of(config, torch.device("cpu"), several=True)


def test_ranks_with_other_settings_or_weights_are_told_apart(
    model: Path, probe: Probe, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_model(tmp_path_factory.mktemp("other"), seed=1)
    wide = write_model(tmp_path_factory.mktemp("wide"), {**SMALL, "moe_intermediate_size": 32})
    config = probe.config
    for changed, named in (
        (replace(config, max_num_seqs=9), "max_num_seqs is 9 on rank 1 and 8 on rank 0"),
        (replace(config, model=str(other)), "the checkpoint is "),
        (replace(config, model=str(wide)), "the model's config is "),
    ):
        report = Probe.of(changed, torch.device("cpu"), several=True).report
        with pytest.raises(ConfigError, match="must have equal settings") as caught:
            common_plan({0: probe.report, 1: report})
        assert named in str(caught.value)
    elsewhere = replace(probe.report, facts={**probe.report.facts, "device": "cuda"})
    with pytest.raises(ConfigError, match="device is cuda on rank 1 and cpu on rank 0"):
        common_plan({0: probe.report, 1: elsewhere})
    with monkeypatch.context() as patch:
        patch.setattr(rank_module, "installed_version", lambda package: "9.9")
        newer = Probe.of(config, torch.device("cpu"), several=True).report
    known = probe.report.facts["dsv4lite"]
    with pytest.raises(ConfigError, match=rf"dsv4lite is 9\.9 on rank 1 and {known} on rank 0"):
        common_plan({0: probe.report, 1: newer})
    moved = replace(config, progress=True, compile_cache_dir="elsewhere")
    assert Probe.of(moved, torch.device("cpu"), several=True).report.facts == probe.report.facts


def test_common_plan_is_what_the_poorest_rank_can_hold(probe: Probe) -> None:
    rich = probe.report
    sizes = replace(rich.plan.sizes, grow_pages=5, snapshots=rich.plan.sizes.snapshots + 1)
    poor = replace(rich, plan=replace(rich.plan, sizes=sizes, kv_tokens=5 * 256, max_model_len=512, advice=("smaller",)))
    plan = common_plan({1: poor, 0: rich})
    assert plan.sizes == replace(rich.plan.sizes, grow_pages=5)
    assert (plan.kv_tokens, plan.max_model_len, len(plan.per_device), plan.advice) == (1280, 512, 2, ("smaller",))
