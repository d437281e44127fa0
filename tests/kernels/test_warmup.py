"""Kernels are found without launching them, compiled in another process, kept in a directory, and loaded from there."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402  only where there is Triton
from triton.runtime.build import compile_module_from_src  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from dsv4lite.kernels import warmup  # noqa: E402
from dsv4lite.kernels.norm.triton import rms_norm_kernel, rms_norm_triton  # noqa: E402
from dsv4lite.kernels.quantize.triton import quantize_fp8_triton, quantize_kernel  # noqa: E402
from dsv4lite.kernels.warmup import Specialization, Wanted, prepare, recording, started_early  # noqa: E402

DEVICE = 97  # no other test has kernels for it


class Hopper:
    """A driver that knows its device by name only: a launch fails."""

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


def forget() -> None:
    """Leave the kernels as they are in a new process."""
    for kernel in (rms_norm_kernel, quantize_kernel):
        kernel.device_caches.pop(DEVICE, None)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "of the host"))
    forget()
    yield
    forget()


def step(tokens: int = 3) -> torch.Tensor:
    """Launch three different kernels, one of them twice."""
    x = torch.ones(tokens, 512, dtype=torch.bfloat16)
    quantize_fp8_triton(rms_norm_triton(x, None, 1e-6), 128)
    quantize_fp8_triton(x, 64)
    return rms_norm_triton(x, None, 1e-5)


def record() -> list[Wanted]:
    with recording() as wanted:
        step()
    return wanted


def test_recording_lists_each_kernel_once() -> None:
    with recording() as wanted:
        for tokens in (3, 5):
            step(tokens)
    assert [one.specialization.name for one in wanted] == ["rms_norm_kernel", "quantize_kernel", "quantize_kernel"]
    assert {one.specialization.target for one in wanted} == {("cuda", 90, 32)}
    assert wanted[0].specialization.options["num_warps"] == 1
    assert not (rms_norm_kernel.device_caches[DEVICE][0] or quantize_kernel.device_caches[DEVICE][0])


def test_recording_ends_with_its_block_even_by_an_error() -> None:
    with pytest.raises(ZeroDivisionError), recording():
        raise ZeroDivisionError
    launched: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *args, grid, warmup, **options: launched.append(warmup))
        step()
    assert launched == [False] * 4


def test_recording_concerns_its_own_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, bool]] = []

    def run(*args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.append((threading.get_ident(), warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    with recording():
        other = threading.Thread(target=step)
        other.start()
        other.join()
        step()
    here = threading.get_ident()
    assert [warmup for thread, warmup in launched if thread != here] == [False] * 4
    assert [warmup for thread, warmup in launched if thread == here] == [True] * 4


def test_two_threads_record_side_by_side() -> None:
    inside, done, found = threading.Barrier(2), threading.Barrier(2), {}

    def one(name: str) -> None:
        with recording() as wanted:
            inside.wait()
            step()
            done.wait()
        found[name] = len(wanted)

    threads = [threading.Thread(target=one, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": 3, "b": 3}


def test_prepared_kernels_lie_in_the_directory_alone_and_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process compiles them, which is ``main``; the host's settings, and its own cache, are left alone."""
    environment, knobs, reports, ours = dict(os.environ), dict(vars(triton.knobs.cache)), [], tmp_path / "ours"
    assert prepare(record(), ours, lambda done, total: reports.append((done, total))) == 0
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700  # others could read, and with another umask change, what is run
    assert len(list(ours.rglob("*.cubin"))) == 3
    assert not (tmp_path / "of the host").exists()
    assert (dict(os.environ), vars(triton.knobs.cache)) == (environment, knobs)
    assert reports == [(1, 3), (2, 3), (3, 3)]
    assert [kernel.name for kernel in rms_norm_kernel.device_caches[DEVICE][0].values()] == ["rms_norm_kernel"]
    assert record() == []  # a second engine
    assert prepare([], ours) == 0

    forget()  # a new process
    with monkeypatch.context() as patch:
        patch.setattr(warmup, "_compile_apart", None)
        wanted = record()
        assert len(wanted) == 3
        assert prepare(wanted, ours) == 0
        assert record() == []

    assert_mended(ours)


def test_ranks_begin_with_different_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks compile all kernels, so that none waits for another; what another one has compiled is found."""
    orders: list[list[str]] = []

    def compile_apart(specializations: Any, directory: Path, compiler: None) -> list[tuple[int, str]]:
        orders.append([one.place(directory)[0] for one in specializations])
        return []

    with recording() as wanted:
        for width in (128, 256, 384, 512):
            rms_norm_triton(torch.ones(3, width, dtype=torch.bfloat16), None, 1e-6)
            quantize_fp8_triton(torch.ones(3, width, dtype=torch.bfloat16), 64)
    with monkeypatch.context() as patch:
        patch.setattr(warmup, "_compile_apart", compile_apart)
        for rank in range(2):
            assert prepare(wanted, tmp_path, rank=rank, ranks=2) == len(wanted) > 4
    first, second = orders
    assert set(first) == set(second)
    own = [sum(int(digest, 16) % 2 == rank for digest in first) for rank in range(2)]
    assert set(first[: own[0]]) == set(second[own[1] :]) and set(first[own[0] :]) == set(second[: own[1]])
    assert prepare(wanted, tmp_path, rank=1, ranks=2) == 0
    assert len(list(tmp_path.rglob("*.cubin"))) == len(wanted)


def test_compiler_starts_early_where_nothing_is_compiled_and_ends_with_its_block(tmp_path: Path) -> None:
    before = children()
    with started_early(tmp_path / "ours") as compiler:
        assert compiler is not None
        assert prepare(record(), tmp_path / "ours", compiler=compiler) == 0
    assert len(list(tmp_path.rglob("*.cubin"))) == 3
    with started_early(tmp_path / "ours") as compiler:
        assert compiler is None  # an engine that finds its kernels needs no process
    with pytest.raises(ZeroDivisionError), started_early(tmp_path / "others") as compiler:
        raise ZeroDivisionError
    assert compiler is not None and children() <= before


class Endless(Specialization):
    """A kernel whose compilation never ends; ``name`` is a folder in which the compiling process leaves its id."""

    def place(self, directory: Path) -> tuple[str, Path]:
        return "0", directory / "none"

    def compile(self) -> None:
        Path(self.name, str(os.getpid())).touch()
        time.sleep(3600)


def prepare_endless(folder: str) -> None:
    """A program that never ends by itself."""
    kernel = Endless(module="", name=folder, signature={}, constants={}, attributes={}, options={}, target=("cuda", 90, 32))
    prepare([Wanted(specialization=kernel, install=id)], Path(folder, "cache"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_processes_that_compile_end_with_their_program(tmp_path: Path, signum: signal.Signals) -> None:
    """They compiled all kernels first: Ctrl-C, or the end of the program by a signal, left one process for each core."""
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.path[:] = sys.argv[2:]; " + (
        "from tests.kernels.test_warmup import prepare_endless; prepare_endless(sys.argv[1])"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path), *sys.path], stderr=subprocess.DEVNULL) as running:
        while not (compiling := list(tmp_path.glob("[0-9]*"))):
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signum)
    process = Path("/proc", compiling[0].name)
    try:
        for _ in range(1200):
            if not process.exists() or "\nState:\tZ" in (process / "status").read_text():
                return
            time.sleep(0.05)
        raise AssertionError(f"process {compiling[0].name} compiles on")
    finally:
        if process.exists():
            os.kill(int(process.name), signal.SIGKILL)


_MODULE = """
#include <Python.h>
static PyObject *launch(PyObject *module, PyObject *arguments) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_launchers_of_one_name_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    """Python gives two launchers that were loaded before one module, and kernels are loaded in several threads."""
    prepare([], tmp_path)
    for _ in range(2):
        loaded = [compile_module_from_src(_MODULE % number, "__triton_launcher") for number in range(3)]
        assert [module.launch() for module in loaded] == [0, 1, 2]


def children() -> set[str]:
    """Return the ids of this process's children that have not been waited for."""
    found = Path("/proc").glob("[0-9]*/status")
    return {status.parent.name for status in found if f"\nPPid:\t{os.getpid()}\n" in status.read_text()}


def assert_mended(tmp_path: Path) -> None:
    """Damage a directory: what is missing is compiled again."""
    records = sorted(tmp_path.rglob("__grp__*"))
    records[0].write_text("{")
    next(records[1].parent.glob("*.cubin")).unlink()
    forget()
    assert sum(one.specialization.load(tmp_path) is None for one in record()) == 2
    assert prepare(record(), tmp_path) == 0


@pytest.mark.parametrize(
    ("executable", "complaint"),
    [("/bin/app", "/bin/app is no Python interpreter"), ("/nowhere/python3", "No such file"), (None, "this program is no Python")],
)
def test_without_a_process_kernels_are_left_to_their_launches(
    executable: str | None, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: executable)
    with caplog.at_level(logging.WARNING, "dsv4lite"):
        assert prepare(record(), tmp_path) == 3
    assert "3 kernels could not be compiled ahead" in caplog.text and complaint in caplog.text
    assert len(record()) == 3


def test_process_that_ends_early_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warmup, "_PROGRAM", "import sys; sys.stdin.buffer.read(); sys.exit('out of luck')")
    with caplog.at_level(logging.WARNING, "dsv4lite"):
        assert prepare(record(), tmp_path) == 3
    assert "ended with 1: out of luck" in caplog.text


def test_frozen_programs_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert prepare(record(), tmp_path) == 3


def test_kernel_that_does_not_compile_leaves_the_others_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = record()
    bad = dataclasses.replace(wanted[0].specialization, constants={})
    wanted[0] = dataclasses.replace(wanted[0], specialization=bad)
    with caplog.at_level(logging.WARNING, "dsv4lite"):
        assert prepare(wanted, tmp_path) == 1
    assert "1 kernels could not be compiled ahead" in caplog.text and "rms_norm_kernel: " in caplog.text
    assert [one.specialization.name for one in record()] == ["rms_norm_kernel"]


def test_specialization_is_what_triton_compiles_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is one of Triton's caches: what a launch would have compiled is found in it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.ones(3, 512, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        run = JITFunction.run
        patch.setattr(JITFunction, "run", lambda *args, warmup, **options: run(*args, warmup=True, **options))
        rms_norm_triton(x, None, 1e-6)
    forget()
    specialization: Specialization = record()[0].specialization
    assert specialization.load(tmp_path) is not None


_HASHES = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dsv4lite.kernels import warmup
kernels = warmup._kernels()
warmup._kernels = lambda: kernels[:: int(sys.argv[2])]
warmup._hash_in_order()
print(json.dumps([[kernel.module, kernel.__name__, kernel.cache_key] for kernel in kernels]))
"""


def test_names_of_compiled_kernels_follow_from_no_order() -> None:
    """Triton hashes the constants of a called function only if that was hashed before; processes have to agree."""
    programs = [[sys.executable, "-c", _HASHES, json.dumps(sys.path), step] for step in ("1", "-1")]
    found = [subprocess.run(program, capture_output=True, text=True, check=True).stdout for program in programs]
    assert found[0] == found[1] and len(json.loads(found[0])) > 50


def test_no_kernel_uses_two_constants_of_one_name() -> None:
    """Triton hashes them in the order of their modules' addresses, so that processes would disagree about the kernel's name."""
    warmup._hash_in_order()
    for kernel in warmup._kernels():
        names = [name for (name, _), (value, _) in kernel.used_global_vals.items() if isinstance(value, triton.language.constexpr)]
        assert len(names) == len(set(names)), kernel.__name__
