"""Compilation of kernels before their first launch: a dry run records them, and other processes compile them in parallel.

    with recording() as wanted:     a dry run, which launches nothing
        ...
    prepare(wanted, directory)      loads the kernels that the directory has, compiles the others into it
    with pretended(gpu):            the dry run uses tensors without memory, for a GPU that need not be in this machine

By default Triton compiles a kernel at its first launch: one after the other, mostly holding the GIL. Here a separate Python process
compiles all of them, with one fork per core; it does not use the device. Triton's configuration and the environment of this process
do not change, and launches from other threads are not affected.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import importlib
import json
import logging
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import pkgutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import build
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import JITFunction

import dsv4lite.kernels
from dsv4lite.kernels import dispatch

log = logging.getLogger("dsv4lite.kernels")

MOST_AT_ONCE = 16  # kernels that are compiled or loaded at the same time
_ABSENT_DEVICE = 1 << 20  # plus the capability: a device index that no real device has
# Ranks ignore SIGTERM, by which a pool ends its processes.
_PROGRAM = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_DFL); sys.path[:] = sys.argv[2:]; " + (
    "from dsv4lite.kernels.warmup import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """The description of one kernel to compile, in values that can be pickled.

    Attributes:
        module, name: Of the ``@triton.jit`` or ``@gluon.jit`` function.
        signature: Type of each argument, ``constexpr`` for constants.
        constants: Values by path to the argument.
        attributes: Properties of pointers and integers, such as alignment, by path to the argument.
        options: All options of the launch and of Triton: warps, stages, …
        target: Backend, architecture and threads of a warp.
    """

    module: str
    name: str
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    target: tuple[str, int, int]

    def source(self) -> Any:
        """Return Triton's input of the compilation."""
        kernel = getattr(importlib.import_module(self.module), self.name)
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        return source(kernel, dict(self.signature), dict(self.constants), dict(self.attributes))

    def compile(self) -> Any:
        """Compile, with the cache that Triton is configured for in this process; needs no device."""
        return triton.compile(self.source(), target=GPUTarget(*self.target), options=dict(self.options))

    def load(self, directory: Path) -> Any | None:
        """Return the compiled kernel if the directory, a Triton cache, has it."""
        digest, record = self.place(directory)
        try:
            paths = json.loads(record.read_text())["child_paths"]
        except (OSError, ValueError, KeyError):  # never compiled, or damaged
            return None
        files = {name: str(record.parent / Path(path).name) for name, path in paths.items()}  # the directory may have moved
        whole = all(Path(file).exists() for file in files.values())
        return CompiledKernel(self.source(), files, digest) if whole else None

    def place(self, directory: Path) -> tuple[str, Path]:
        """Return Triton's hash of the compiled kernel, and the file in which its cache lists the kernel's files."""
        source, backend = self.source(), make_backend(GPUTarget(*self.target))
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        digest = hashlib.sha256(key.encode())
        folder = base64.b32encode(digest.digest()).decode().rstrip("=")
        return digest.hexdigest(), directory / folder / f"__grp__{source.name[:150]}.json"  # Triton truncates names like this


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """A kernel that a launch did not find compiled, and the function that registers it for later launches."""

    specialization: Specialization
    install: Callable[[Any], None]

    def load(self, directory: Path, device: torch.device | None) -> bool:
        """Install the kernel, and load it on the device, if the directory has it; return whether it does."""
        kernel = self.specialization.load(directory)
        if kernel is None:
            return False
        self.install(kernel)
        if device is not None:
            with torch.cuda.device(device):
                _ = kernel.run  # loads it; Triton 3.6 also compiles a launcher in C for it, unless its cache has one
        return True


class _Gate:
    """Replaces a kernel's ``run`` permanently; in threads that record, launches are only recorded.

    Attributes:
        recording: For each of these threads, what returns the kernel's twin; see ``recorder``.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.recording: dict[int, Callable[[], Any]] = {}

    def __call__(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        twin = self.recording.get(threading.get_ident())
        if twin is None:
            return JITFunction.run(self._kernel, *args, grid=grid, warmup=warmup, **options)
        return twin().run(*args, grid=None, warmup=True, **options)

    def recorder(self, wanted: dict[tuple[str, str, str], Wanted]) -> Any:
        """Return a twin of the kernel that launches nothing, and adds to ``wanted`` what a launch would compile."""
        kernel, device = self._kernel, triton.runtime.driver.active.get_current_device()
        compiled, keys, target, *others = kernel.device_caches[device]
        seen = dict(compiled)
        twin = copy.copy(kernel)
        del twin.run  # this gate, which would call itself
        twin.device_caches = {device: (seen, keys, target, *others)}

        def note(key: str, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, warmup: bool) -> None:
            """Replace ``JITFunction._do_compile``: record instead of compiling."""
            specialization = Specialization(
                module=kernel.module,
                name=kernel.__name__,
                signature=signature,
                constants=constants,
                attributes=attributes,
                options=dict(vars(options)),
                target=(target.backend, target.arch, target.warp_size),
            )
            one = Wanted(specialization=specialization, install=lambda found: compiled.__setitem__(key, found))
            wanted.setdefault((kernel.module, kernel.__name__, key), one)
            seen[key] = one  # stands for the compiled kernel, which a recorded launch only looks up

        twin._do_compile = note
        return twin


@contextmanager
def recording() -> Iterator[list[Wanted]]:
    """Record launches of this package's kernels from this thread instead of launching; at the end, list the kernels to compile.

    The outputs of these launches are uninitialized. Float arithmetic on them is harmless, but torch ops must not index with them.
    """
    found: list[Wanted] = []
    wanted: dict[tuple[str, str, str], Wanted] = {}
    thread = threading.get_ident()
    # One gate per kernel, never removed, because several threads may record at the same time.
    gates = [vars(kernel).setdefault("run", _Gate(kernel)) for kernel in _kernels()]
    for gate in gates:
        gate.recording[thread] = cache(partial(gate.recorder, wanted))  # most kernels are not launched
    try:
        yield found
    finally:
        for gate in gates:
            del gate.recording[thread]
    found += wanted.values()


class _AbsentDriver:
    """A Triton driver of a GPU that is not in this machine: it reports the target, but cannot launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return _ABSENT_DEVICE + self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def pretended(gpu: dispatch.Gpu) -> Iterator[torch.device]:
    """Treat tensors on the meta device as those of a GPU; only for a process in which no other thread launches kernels.

    Yields:
        The meta device. ``recording`` records the GPU's kernels for launches on it. Addresses start at 0 and have the alignment of
        CUDA's allocations.
    """
    driver, before = triton.runtime.driver, (dispatch.GPU_TYPE, dispatch.ABSENT)
    active = vars(driver)["_active"]  # the property would create a driver
    dispatch.GPU_TYPE, dispatch.ABSENT = "meta", gpu
    driver.set_active(_AbsentDriver(gpu.capability))
    try:
        yield torch.device("meta")
    finally:
        driver.set_active(active)
        dispatch.GPU_TYPE, dispatch.ABSENT = before
        for kernel in _kernels():
            kernel.device_caches.pop(_ABSENT_DEVICE + gpu.capability, None)


def triton_modules() -> list[str]:
    """Return the full names of the modules with Triton kernels: ``triton`` and ``x_triton`` in the folders of the ops."""
    every = [info.name for info in pkgutil.walk_packages(dsv4lite.kernels.__path__, "dsv4lite.kernels.")]
    return [name for name in every if name.endswith((".triton", "_triton"))]


def _kernels() -> list[Any]:
    found = []
    for name in triton_modules():
        module = importlib.import_module(name)
        found += [value for value in vars(module).values() if isinstance(value, JITFunction) and value.module == module.__name__]
    return found


def _hash_in_order() -> None:
    """Make Triton hash every function after the functions that it calls.

    A function's hash includes the constants of the functions it calls only if these were hashed before. Without a fixed order,
    processes could compute different names of compiled kernels, and one would not find what another has compiled.
    """
    seen: set[int] = set()

    def visit(function: Any) -> None:
        if id(function) in seen:
            return
        seen.add(id(function))
        for name in function.fn.__code__.co_names:
            called = function.fn.__globals__.get(name)
            if isinstance(called, JITFunction):
                visit(called)
        _ = function.cache_key

    for kernel in _kernels():
        visit(kernel)


@cache
def _load_launchers_one_by_one() -> None:
    """Let threads of this process load launchers at the same time, also those of other engines and of the host.

    Triton 3.6 loads the launcher of each kernel as a module, all with one name. If Python has loaded a launcher before, it writes
    its function into the module that has the name in ``sys.modules``. Another thread may have just loaded that module for its own
    launcher, and would read the wrong function.
    """
    lock, load = threading.Lock(), build._load_module_from_path

    def load_alone(name: str, path: str) -> ModuleType:
        with lock:
            found = ModuleType(name)  # no other thread has it
            vars(found).update(vars(load(name, path)))
            return found

    build._load_module_from_path = load_alone


def prepare(
    wanted: Sequence[Wanted],
    directory: str | Path,
    progress: Callable[[int, int], None] | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
    device: torch.device | None = None,
    compiler: Compiler | None = None,
) -> int:
    """Load or compile kernels, so that their launches find them.

    If the compiling process cannot start, or a kernel fails, log a warning; the first launch of a missing kernel then compiles it.

    Args:
        wanted: From ``recording``.
        directory: Cache of compiled kernels; created if it does not exist.
        progress: Called with the number of kernels that are compiled, and the number of all.
        rank, ranks: If several ranks prepare kernels at the same time, each compiles its share first, and then finds the others
            compiled.
        device: The GPU to load the kernels on; ``None`` if it is not in this machine.
        compiler: A compiler for this directory that was started before; default: one is started if kernels are missing.

    Returns:
        The number of kernels that are not ready.

    Raises:
        Exception: The device cannot load a kernel, or the C compiler fails; a launch would raise the same.
    """
    started, directory = time.monotonic(), Path(directory).absolute()
    _hash_in_order()
    _load_launchers_one_by_one()

    def order(one: Wanted) -> tuple[bool, int]:
        """This rank's share first; of each share kernels with many arguments, which take longest to compile."""
        digest, _ = one.specialization.place(directory)
        return int(digest, 16) % ranks != rank, -len(one.specialization.signature)

    load, complaint = partial(Wanted.load, directory=directory, device=device), ""
    with ThreadPoolExecutor(MOST_AT_ONCE) as loaders:  # Triton waits for the C compiler, or for the driver
        missing = [one for one, found in zip(wanted, loaders.map(load, wanted), strict=True) if not found]
        missing.sort(key=order)
        loaded, compiled = len(wanted) - len(missing), dict[int, Future[bool]]()
        try:
            for index, error in _compile_apart([one.specialization for one in missing], directory, compiler) if missing else ():
                if error:
                    complaint = complaint or f"{missing[index].specialization.name}: {error}"
                    continue
                compiled[index] = loaders.submit(load, missing[index])
                if progress is not None:
                    progress(loaded + len(compiled), len(wanted))
        except (OSError, pickle.PicklingError, subprocess.SubprocessError) as error:
            complaint = str(error)
        lost = [missing[index].specialization.name for index, found in compiled.items() if not found.result()]
    left = len(missing) - len(compiled) + len(lost)
    if lost:
        complaint = complaint or f"{lost[0]}: not found once compiled"
    if left:
        log.warning("%d kernels could not be compiled ahead; their first launches will compile them: %s", left, complaint)
    count, seconds = len(missing) - left, time.monotonic() - started
    log.info("loaded %d compiled kernels from %s, compiled %d more into it, in %.1f s", loaded, directory, count, seconds)
    return left


@dataclass(frozen=True, slots=True, eq=False)
class Compiler:
    """A process that compiles kernels into a directory."""

    process: subprocess.Popen[bytes]
    complaints: IO[bytes]
    directory: Path

    def compile(self, specializations: Sequence[Specialization]) -> Iterator[tuple[int, str]]:
        """Yield the index of each kernel when it is done, and its error or ""; call this once.

        Raises:
            OSError, SubprocessError: The process ended early.
        """
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        with process.stdin:
            pickle.dump((str(self.directory), list(specializations)), process.stdin)
        for line in process.stdout:
            index, error = json.loads(line)
            yield index, error
        if process.wait() != 0:
            self.complaints.seek(0)
            last = self.complaints.read().decode(errors="replace").strip().splitlines()[-1:]
            raise subprocess.SubprocessError(f"the compiling process ended with {process.returncode}: {''.join(last)}")


@contextmanager
def _running(directory: Path) -> Iterator[Compiler]:
    """Run a compiling process until the end of the block.

    Raises:
        OSError: It cannot start.
    """
    executable = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    if getattr(sys, "frozen", False) or not Path(executable).name.startswith("python"):
        raise OSError(f"{executable or 'this program'} is no Python interpreter (multiprocessing.set_executable names one)")
    for folder in reversed((directory, *directory.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)  # private: its files are executed
    command = [executable, "-c", _PROGRAM, str(os.getpid()), *sys.path]
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints) as process,
    ):
        try:
            yield Compiler(process, complaints, directory)
        finally:
            process.kill()  # if it has not ended by itself; its forks end with it


@contextmanager
def started_early(directory: str | Path) -> Iterator[Compiler | None]:
    """Start a compiler for ``prepare``, which takes seconds, before it is needed; ``None`` if the directory has kernels already."""
    directory = Path(directory).absolute()
    with ExitStack() as stack:
        compiler = None
        if not (directory.exists() and any(directory.iterdir())):
            with suppress(OSError):  # ``prepare`` tries again, and reports it
                compiler = stack.enter_context(_running(directory))
        yield compiler


def _compile_apart(
    specializations: Sequence[Specialization], directory: Path, compiler: Compiler | None
) -> Iterator[tuple[int, str]]:
    """See ``Compiler.compile``; without a compiler, run one."""
    with ExitStack() as stack:
        yield from (compiler or stack.enter_context(_running(directory))).compile(specializations)


def _end_with(parent: int) -> None:
    """Let this process end with its parent, however that ends; kernels would be compiled to the last one, or waited for."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="dsv4lite-parent", daemon=True).start()


def main(parent: int) -> None:
    """Entry point of the compiling process: reads kernels from stdin, writes a line of JSON to stdout when one is done."""
    _hash_in_order()
    directory, specializations = pickle.load(sys.stdin.buffer)
    triton.knobs.cache.dir = directory
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # other code's output goes to stderr
        for specialization in specializations:  # before forking, so that forks inherit loaded modules and Triton's own hash
            _, record = specialization.place(Path(directory))
            if record.exists() and specialization.load(Path(directory)) is None:
                record.unlink(missing_ok=True)  # Triton fails on a list of files that no longer exist
        fork = "fork" in multiprocessing.get_all_start_methods()
        processes = min(len(os.sched_getaffinity(0)) if fork else os.cpu_count() or 1, len(specializations), MOST_AT_ONCE)
        context = multiprocessing.get_context("fork" if fork else "spawn")
        with ProcessPoolExecutor(processes, context, initializer=_end_with, initargs=(os.getpid(),)) as pool:
            under_way = {pool.submit(_compile, specialization): index for index, specialization in enumerate(specializations)}
            _end_with(parent)  # a thread, hence after the forks
            for future in as_completed(under_way):
                error = future.exception()
                answers.write(json.dumps([under_way[future], "" if error is None else f"{type(error).__name__}: {error}"]) + "\n")


def _compile(specialization: Specialization) -> None:
    specialization.compile()
