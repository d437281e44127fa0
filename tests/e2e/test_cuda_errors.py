"""Errors of GPUs: none, an unsupported one, too little memory, software that does not fit it, and CUDA errors.

No GPU is needed: torch.cuda answers as if there were some.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import triton

from dsv4lite import device as devices
from dsv4lite.config import EngineConfig, tiny_model
from dsv4lite.device import available_memory, choose_device, own_stream, start_error
from dsv4lite.engine import rank as rank_module
from dsv4lite.engine.rank import Probe
from dsv4lite.engine.runner import Runner
from dsv4lite.errors import CapacityError, ConfigError, EngineDeadError, UnsupportedError
from dsv4lite.llm import LLM
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.planning.memory import MemoryPlan, plan_memory, require_fit
from dsv4lite.request import SamplingParams
from dsv4lite.state.store import StateCache
from dsv4lite.weights.source import ModelSource
from tests.e2e.engines import SMALL, engine_of, overlapping, prompts_of, raising, unopened, write_model

GIB = 1 << 30
SHORT, LONG = prompts_of((20, 300), SMALL["vocab_size"] - 1, seed=9)
ILLEGAL = "CUDA error: an illegal memory access was encountered"


Fake = Callable[..., None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a function that makes torch.cuda report such GPUs."""

    def fake(
        *, count: int = 1, capability: tuple[int, int] = (9, 0), free: int = 140 * GIB, total: int = 140 * GIB, kept: int = 0
    ) -> None:
        for name, value in {
            "is_available": count > 0,
            "device_count": count,
            "current_device": 0,
            "get_device_name": "NVIDIA Abacus",
            "get_device_capability": capability,
            "mem_get_info": (free, total),
            "memory_reserved": GIB + kept,
            "memory_allocated": GIB,
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(rank_module, "open_matrix_library", lambda device: None)

    return fake


def config_of(device: str, **settings: Any) -> EngineConfig:
    return EngineConfig(model=tiny_model(), device=device, **settings)


# -------------------------------------------------------------------------------------------------- no GPU, or an unsupported one


def test_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match=r"device='cuda:1': PyTorch .* is built without CUDA; install .* device='cpu'"):
        choose_device(config_of("cuda:1"))


def test_missing_driver_is_reported_with_its_own_message(gpu: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(count=0)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ConfigError, match=r"finds no device: The NVIDIA driver .* 11040\)\.; use device='cpu'") as error:
        choose_device(config_of("cuda"))
    assert isinstance(error.value.__cause__, RuntimeError)
    assert choose_device(config_of("auto")) == torch.device("cpu")


@pytest.mark.parametrize("count", [1, 4])
def test_device_beyond_the_last_is_refused(gpu: Fake, count: int) -> None:
    gpu(count=count)
    with pytest.raises(ConfigError, match=rf"device='cuda:7': this machine has {count} CUDA devices; use device='cpu'") as error:
        choose_device(config_of("cuda:7"))
    assert ("'cuda:0' to 'cuda:3'" in str(error.value)) == (count == 4)
    assert choose_device(config_of(f"cuda:{count - 1}")) == torch.device("cuda", count - 1)


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_chips_without_what_the_kernels_need_are_refused(gpu: Fake, device: str) -> None:
    gpu(capability=(7, 5))
    with pytest.raises(UnsupportedError, match=r"NVIDIA Abacus of compute capability 7\.5; the kernels need 8\.0 or newer"):
        choose_device(config_of(device))
    gpu(capability=(8, 0))
    assert choose_device(config_of(device)) == torch.device("cuda", 0)


def test_engine_is_on_the_gpu_that_is_current_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has a current device for each thread. All trainers' engines were on the first GPU."""
    assert LLM(tiny_model()).config.device == "auto"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for current, given, found in (
        (1, "auto", "cuda:1"),
        (1, "cuda", "cuda:1"),
        (0, "auto", "auto"),
        (1, "cuda:0", "cuda:0"),
        (1, "cpu", "cpu"),
    ):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert LLM(tiny_model(), device=given).config.device == found
    assert LLM(tiny_model(), device="cuda", tensor_parallel_size=2).config.device == "cuda"


def test_missing_triton_is_named(gpu: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedError, match=r"needs Triton, which cannot be imported .*; install it with pip install 'triton>="):
        choose_device(config_of("cuda"))


@pytest.mark.parametrize(("version", "old"), [("3.5.0", True), ("2.9", True), ("3.6.0", False), ("3.10.1+gitab12", False)])
def test_old_triton_is_refused(gpu: Fake, monkeypatch: pytest.MonkeyPatch, version: str, old: bool) -> None:
    gpu()
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(UnsupportedError, match=f"needs Triton 3.6 or newer, and finds {version}") if old else nullcontext():
        choose_device(config_of("cuda"))


# --------------------------------------------------------------------------------------------------------------- too little memory


def test_memory_of_other_processes_is_not_planned_with(gpu: Fake) -> None:
    gpu(free=140 * GIB)
    roomy = plan_memory(tiny_model(), device="cuda", max_num_seqs=64)
    assert roomy.fits and roomy.per_device[0].available == 140 * GIB
    used, fixed = roomy.per_device[0].used, roomy.per_device[0].used - roomy.per_device[0].grow_pages
    gpu(free=used)
    assert plan_memory(tiny_model(), device="cuda").fits
    gpu(free=used - 1)
    plan = plan_memory(tiny_model(), device="cuda")
    with pytest.raises(CapacityError, match=r"are wanted, but of the device's 140\.000 GiB only .* are free: free what") as error:
        require_fit(plan)
    assert error.value.plan is plan and len(plan.advice) == 1 and "nvidia-smi" in plan.advice[0]
    gpu(free=fixed - 1)
    assert "gpu_memory_utilization" not in str(plan_memory(tiny_model(), device="cuda").advice)  # it would not help


def test_advice_on_taken_memory_helps(gpu: Fake) -> None:
    wanted = {"max_num_seqs": 1024, "max_model_len": 4096}
    gpu(free=140 * GIB, total=140 * GIB)
    used = plan_memory(tiny_model(), device="cuda", **wanted).per_device[0]
    total = used.used + GIB
    free = used.used - used.grow_pages // 2
    gpu(free=free, total=total)
    (advice,) = plan_memory(tiny_model(), device="cuda", gpu_memory_utilization=1.0, **wanted).advice
    share = float(advice.partition("gpu_memory_utilization=")[2].split()[0])
    helped = plan_memory(tiny_model(), device="cuda", gpu_memory_utilization=share, **wanted)
    assert helped.fits and helped.kv_tokens > 0
    state = used.state
    (advice,) = plan_memory(tiny_model(), device="cuda", kv_cache_memory_bytes=state, **wanted).advice
    less = int(advice.rpartition(" by ")[2].replace(",", ""))
    assert plan_memory(tiny_model(), device="cuda", kv_cache_memory_bytes=state - less, **wanted).fits


def test_memory_that_torch_keeps_is_free(gpu: Fake) -> None:
    gpu(free=3 * GIB, total=10 * GIB, kept=2 * GIB)
    assert available_memory(torch.device("cuda", 0)) == (5 * GIB, 10 * GIB)


def cached_in(folder: Path) -> EngineConfig:
    return EngineConfig(model=tiny_model(), device="cuda", compile_cache_dir=str(folder), kv_cache_memory_bytes=GIB)


@pytest.mark.parametrize("where", ["itself", "above"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_compiled_kernels_that_others_could_change_are_refused(gpu: Fake, tmp_path: Path, where: str, mode: int) -> None:
    """They are code that the process runs."""
    gpu()
    above = tmp_path / "above"
    folder = above / "kernels"
    folder.mkdir(parents=True)
    wide = folder if where == "itself" else above
    wide.chmod(mode)
    config = cached_in(folder)
    if (where, mode) == ("above", 0o1777):  # as /tmp is
        assert Probe.of(config, torch.device("cuda")).report.plan.fits
        return
    with pytest.raises(ConfigError) as error:
        Probe.of(config, torch.device("cuda"))
    assert all(text in str(error.value) for text in ("compile_cache_dir=", f"{wide} has the mode {mode:04o}", "chmod"))
    wide.chmod(0o750)
    assert Probe.of(config, torch.device("cuda")).report.plan.fits


def test_compiled_kernels_of_another_user_are_refused(gpu: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:  # whose files are trusted; give them to another
        (tmp_path / "kernels").mkdir()
        os.chown(tmp_path / "kernels", 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user \d+, so that users other than"):
        Probe.of(cached_in(tmp_path / "kernels"), torch.device("cuda"))


def test_cache_of_kernels_need_not_be_there(gpu: Fake, tmp_path: Path) -> None:
    gpu()
    assert Probe.of(cached_in(tmp_path / "new" / "kernels"), torch.device("cuda")).report.plan.fits
    assert not (tmp_path / "new").exists()


def test_places_where_no_folder_can_be_are_refused_by_name(gpu: Fake, tmp_path: Path) -> None:
    """The engine died in its start, of an ``OSError`` that did not name the setting."""
    gpu()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder in (tmp_path / "file" / "kernels", tmp_path / "loop" / "kernels", tmp_path / ("a" * 300)):
        with pytest.raises(ConfigError, match=r"compile_cache_dir=.* cannot be used: .*; choose another place for the kernels"):
            Probe.of(cached_in(folder), torch.device("cuda"))


def test_user_without_a_home_folder_names_the_place(gpu: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    for variable in ("HOME", "DSV4LITE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", raising(KeyError("no such user")))
    assert Probe.of(cached_in(tmp_path), torch.device("cuda")).report.plan.fits
    with pytest.raises(ConfigError, match="there is no home folder; give a folder, or set DSV4LITE_CACHE"):
        Probe.of(replace(cached_in(tmp_path), compile_cache_dir=None), torch.device("cuda"))


def test_plan_for_another_machine_has_all_its_memory(gpu: Fake) -> None:
    gpu(free=1)
    plan = plan_memory(tiny_model(), device="cuda", memory_bytes=8 * GIB)
    assert plan.fits and plan.per_device[0].available == plan.per_device[0].total == 8 * GIB


# ------------------------------------------------------------------------------------------------------------- a failed start


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


@pytest.mark.parametrize("where", [(ModelSource, "build"), (StateCache, "allocate"), (Runner, "warm_up")])
def test_memory_that_ends_while_starting_is_a_lack_of_capacity(
    model: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    monkeypatch.setattr(*where, raising(OUT_OF_MEMORY))
    llm, threads = unopened(model), set(threading.enumerate())
    with (
        pytest.raises(CapacityError, match=r"no memory left while starting: CUDA out of memory.*gpu_memory_utilization") as error,
        llm,
    ):
        pass
    assert error.value.__cause__ is OUT_OF_MEMORY and isinstance(error.value.plan, MemoryPlan) and error.value.advice
    assert llm.state == "failed" and not set(threading.enumerate()) - threads


def of_triton(name: str, code: str) -> Callable[[], None]:
    """Return a function that stands in a module of Triton's."""
    module = types.ModuleType(name)
    exec(f"def run(*args, **options):\n    {code}", vars(module))
    run: Callable[[], None] = vars(module)["run"]
    return run


MISFITS = {
    "ptxas": (
        RuntimeError,
        "raise RuntimeError('Internal Triton PTX codegen error: ptxas fatal : sm_121 is not defined for option')",
    ),
    "driver": (RuntimeError, "raise RuntimeError('Triton Error [CUDA]: device kernel image is invalid')"),
    "image": (RuntimeError, "raise RuntimeError('CUDA error: no kernel image is available for execution on the device')"),
    "compiler": (FileNotFoundError, "open('/no/such/gcc')"),
    "old": (TypeError, "int([])"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_kernels_that_cannot_be_compiled_or_loaded_name_the_versions(
    model: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kind, code = MISFITS[what]
    monkeypatch.setattr(Runner, "warm_up", of_triton("triton.runtime.jit", code))
    with pytest.raises(UnsupportedError, match="cannot be compiled or loaded here") as error, unopened(model):
        pass
    assert type(error.value.__cause__) is kind
    for part in (f"PyTorch {torch.__version__}", f"Triton {triton.__version__}", "driver", "device", "C compiler", "device='cpu'"):
        assert part in str(error.value)


@pytest.mark.parametrize("boom", [ZeroDivisionError("ours"), torch.AcceleratorError(ILLEGAL)])
def test_other_errors_of_a_start_stay_what_they_are(model: Path, monkeypatch: pytest.MonkeyPatch, boom: Exception) -> None:
    monkeypatch.setattr(Runner, "warm_up", raising(boom))
    with pytest.raises(EngineDeadError, match="could not start") as error, unopened(model):
        pass
    assert error.value.__cause__ is boom and error.value.phase == "start"


def test_cuda_error_in_a_launch_is_no_misfit() -> None:
    boom = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as error:
        of_triton("triton.runtime.jit", "raise args[0]")(boom)  # type: ignore[call-arg]
    assert start_error(error.value) is boom


def test_failed_start_holds_no_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[DeepseekV4]] = []

    def fail(runner: Runner, *args: object) -> None:
        seen.append(weakref.ref(runner.model))
        raise OUT_OF_MEMORY

    monkeypatch.setattr(Runner, "warm_up", fail)
    with pytest.raises(CapacityError) as error, unopened(model):
        pass
    gc.collect()
    assert seen[0]() is None and error.value.__cause__ is OUT_OF_MEMORY


# --------------------------------------------------------------------------------------------------------- a failed step


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("boom", "advice"),
    [
        (torch.AcceleratorError(ILLEGAL), "start a new one"),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), "start a new one"),
        (OUT_OF_MEMORY, "gpu_memory_utilization"),
        (torch.AcceleratorError("CUDA error: out of memory"), "gpu_memory_utilization"),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}"[:50] if isinstance(value, Exception) else "",
)
def test_cuda_error_in_a_step_ends_the_engine_and_frees_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, boom: Exception, advice: str
) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    with overlapping(overlap), unopened(model) as llm, ExitStack() as stack:
        streams = [stack.enter_context(llm.stream(prompt, params)) for prompt in (SHORT, LONG, SHORT) * 4]  # 8 run, 4 wait
        next(iter(streams[0]))
        engine = engine_of(llm)
        held = [weakref.ref(engine._runner.model), weakref.ref(engine._runner.cache.layers[0].stores["window"])]
        monkeypatch.setattr(DeepseekV4, "logits", raising(boom))
        errors = []
        for stream in streams:
            with pytest.raises(EngineDeadError, match=advice) as error:
                stream.final()
            assert error.value.__cause__ is boom and error.value.phase == "step"
            errors.append(error.value)
        with pytest.raises(EngineDeadError):
            llm.generate(SHORT, params)
        assert engine._thread is not None
        engine._thread.join(timeout=60)
        gc.collect()
        assert [ref() for ref in held] == [None, None]  # although callers still hold the error
    assert llm.state == "closed" and len(errors) == 12


@contextmanager
def broken(boom: Exception) -> Any:
    """Stand in for a stream whose context raises at its end."""
    yield
    raise boom


@pytest.mark.parametrize("opens", [True, False])
def test_matrix_library_is_opened_only_for_models_in_float32(
    gpu: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    gpu()
    opened: list[torch.device] = []
    monkeypatch.setattr(rank_module, "open_matrix_library", opened.append)
    config = cached_in(tmp_path / "kernels")
    Probe.of(replace(config, model=str(write_model(tmp_path / "model"))) if opens else config, torch.device("cuda"))
    assert opened == [torch.device("cuda")] * opens
    monkeypatch.setattr(devices, "_idle_streams", lambda device: SimpleQueue[str]())
    monkeypatch.setattr(devices, "_new_stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "mm", raising(AssertionError()))
    with own_stream(torch.device("cuda", 0)):
        pass


@pytest.mark.parametrize("works", [True, False])
def test_stream_that_cannot_be_restored_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, works: bool
) -> None:
    boom, emptied, idle = torch.AcceleratorError(ILLEGAL), [], SimpleQueue[str]()
    monkeypatch.setattr(devices, "_idle_streams", lambda device: idle)
    idle.put("a stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext() if works else broken(boom))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError, match="first"), own_stream(torch.device("cuda", 0)):
        raise ZeroDivisionError("first")
    assert emptied == [True] * works and ("could not be returned" in caplog.text) != works
    assert idle.qsize() == works  # the next engine runs on it, unless it is broken


def test_kinds_of_errors_are_distinguished() -> None:
    assert devices.is_cuda_error(torch.AcceleratorError(ILLEGAL)) and not devices.is_cuda_error(ValueError("CUDA error"))
    assert devices.is_out_of_memory(OUT_OF_MEMORY) and not devices.is_out_of_memory(MemoryError("out of memory"))
    assert devices.advice_for(ZeroDivisionError()) == ""
