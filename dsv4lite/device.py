"""The device of an engine: its choice, its requirements, its memory, and what its errors mean."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import stat
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from dsv4lite.config import EngineConfig
from dsv4lite.errors import CapacityError, ConfigError, DSV4LiteError, UnsupportedError, described, near_match

log = logging.getLogger("dsv4lite.engine")

LEAST_CAPABILITY = (8, 0)  # of the chips that the kernels are compiled for
LEAST_TRITON = (3, 6)
FREE_MEMORY = (
    "lower gpu_memory_utilization, kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs, "
    "or free what this program or other processes hold on the device"
)
_NEW_PROCESS = (
    "CUDA may refuse everything else in this process: start a new one; CUDA_LAUNCH_BLOCKING=1 in its environment names the kernel"
)
# In messages of driver, CUDA and ptxas about code that they cannot compile or load.
_MISMATCH = re.compile(
    "no kernel image|ptxas|invalid device function|device kernel image is invalid|unsupported toolchain|invalid ptx|is not defined "
    "for option|driver version is insufficient|forward compatibility|unsupported display driver|0 active drivers|libcuda",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU that can be planned for on any machine.

    Attributes:
        name: As its maker writes it.
        memory_bytes: What CUDA reports, in whole GiB rounded down.
        capability: Compute capability.
        memory_bytes_s: Memory bandwidth, from the data sheet.
        link_bytes_s: To another GPU, in one direction, from the data sheet: NVLink, or PCI Express.
        multiprocessors: How many it has.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    memory_bytes_s: float
    link_bytes_s: float
    multiprocessors: int


CHIPS = {
    "a100-40gb": Chip("NVIDIA A100 40GB", 39 << 30, (8, 0), 1.555e12, 300e9, 108),
    "a100-80gb": Chip("NVIDIA A100 80GB", 79 << 30, (8, 0), 2.039e12, 300e9, 108),
    "l40s": Chip("NVIDIA L40S", 44 << 30, (8, 9), 0.864e12, 32e9, 142),
    "rtx4090": Chip("NVIDIA GeForce RTX 4090", 23 << 30, (8, 9), 1.008e12, 32e9, 128),
    "h100": Chip("NVIDIA H100 80GB", 79 << 30, (9, 0), 3.35e12, 450e9, 132),
    "h200": Chip("NVIDIA H200", 139 << 30, (9, 0), 4.8e12, 450e9, 132),
    "b200": Chip("NVIDIA B200", 178 << 30, (10, 0), 8e12, 900e9, 148),
    "rtx5090": Chip("NVIDIA GeForce RTX 5090", 31 << 30, (12, 0), 1.792e12, 64e9, 170),
    "rtx-pro-6000": Chip("NVIDIA RTX PRO 6000 Blackwell", 94 << 30, (12, 0), 1.792e12, 64e9, 188),
}


def find_chip(name: str) -> Chip:
    """Return a chip by its name, ignoring case.

    Raises:
        ConfigError: The table has no such chip.
    """
    found = CHIPS.get(str(name).lower())
    if found is None:
        raise ConfigError(
            f"gpu={name!r} is not in the table of chips ({', '.join(CHIPS)}); to plan for another "
            f"GPU, give its memory: memory_bytes, or --memory{near_match(str(name), CHIPS)}"
        )
    return found


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device of an engine.

    Raises:
        ConfigError: The device does not exist.
        UnsupportedError: The device, or what is installed for it, cannot run the kernels.
    """
    if config.device == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        try:
            device = torch.device(config.device)
        except RuntimeError as error:
            raise ConfigError(f"device={config.device!r} is not a device: use 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device={config.device!r}: only 'cpu' and 'cuda' are supported")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        _require_cuda(config.device, device)
    return device


def sole_device(device: torch.device) -> str:
    """Return a name that no other device of this machine has, in any process; empty for a CPU, which ranks may share."""
    return "" if device.type == "cpu" else f"GPU {torch.cuda.get_device_properties(device).uuid}"


def _require_cuda(wanted: str, device: torch.device) -> None:
    """Raise unless kernels can be compiled for a device, and run there."""
    if torch.version.cuda is None:
        raise UnsupportedError(
            f"device={wanted!r}: PyTorch {torch.__version__} is built without CUDA; install a build for it "
            "(https://pytorch.org/get-started), or use device='cpu'"
        )
    count = torch.cuda.device_count()
    if count == 0:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # no driver, or one too old; the message says which
            raise ConfigError(f"device={wanted!r}: CUDA finds no device: {_first_line(error)}; use device='cpu'") from error
    if (device.index or 0) >= count:
        raise ConfigError(f"device={wanted!r}: this machine has {count} CUDA devices; use device='cpu'" + _others(count))
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        raise UnsupportedError(
            f"device={wanted!r} is {name} of compute capability {major}.{minor}; the kernels need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer: use device='cpu'" + _others(count)
        )
    _require_triton(wanted)


def _others(count: int) -> str:
    return f" or another one, 'cuda:0' to 'cuda:{count - 1}'" if count > 1 else ""


def _require_triton(wanted: str) -> None:
    least = ".".join(map(str, LEAST_TRITON))
    remedy = f"install it with pip install 'triton>={least}', or use device='cpu'"
    try:
        found = triton_version()
    except ImportError as error:
        raise UnsupportedError(f"device={wanted!r} needs Triton, which cannot be imported ({error}); {remedy}") from error
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < LEAST_TRITON:
        raise UnsupportedError(f"device={wanted!r} needs Triton {least} or newer, and finds {found}; {remedy}")


def triton_version() -> str:
    """Return the version of Triton.

    Raises:
        ImportError: There is none, or it does not work here.
    """
    import triton

    return str(triton.__version__)


def installed_version(package: str) -> str:
    """Return the version of a package; ``none`` if it is not installed, but found on ``sys.path``, or not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def available_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a CUDA device that an engine could take now, and all it has.

    Memory that PyTorch's allocator caches counts as available: PyTorch releases it when an allocation fails otherwise.
    """
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(total, free + kept), total


def host_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this machine could give to this process: what is free, within the limits of its control groups.

    Args:
        root: Root of the file system with ``/proc`` and the control groups.
    """
    lines = _lines(root / "proc/meminfo")
    free = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    if free is None:  # not Linux
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *_cgroup_headrooms(root)]))


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Yield what is left of the memory limits of this process's control groups, and of those that contain them."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        second = not controllers
        if not second and "memory" not in controllers.split(","):
            continue
        for mount in _lines(root / "proc/self/mountinfo"):
            place, _, system = mount.partition(" - ")
            kind, *_, options = system.split()
            if kind != ("cgroup2" if second else "cgroup") or not (second or "memory" in options.split(",")):
                continue
            top, at = place.split()[3:5]
            mounted = root / at.lstrip("/")
            inside = group.removeprefix(top) if group.startswith(top) else ""  # a container may see its own group only
            folder = mounted / inside.lstrip("/")
            for each in (folder, *folder.parents[: len(folder.parts) - len(mounted.parts)]):
                yield from _cgroup_headroom(each, second)


def _cgroup_headroom(folder: Path, second: bool) -> Iterator[int]:
    """Yield what is left of a group's limit, if it has one; cached files count as free, as they do for the whole machine."""
    limit, used = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    wanted, current = _lines(folder / limit), _lines(folder / used)
    if wanted and current and wanted[0] != "max":
        name = "inactive_file " if second else "total_inactive_file "
        cached = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(name))
        yield int(wanted[0]) - int(current[0]) + cached


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # other systems, and groups without a limit, have no such file
        return []


def require_private(folder: Path) -> None:
    """Raise if a path is no folder, or if another user than this one and root could put compiled kernels, which are code, into it.

    As with ssh's files, the folders that contain it count too, up to the home directory if it lies there. A containing folder that
    others can write, but whose sticky bit keeps them from renaming what is in it (``/tmp``), is accepted.

    Raises:
        ConfigError: Names the folder, and what to do.
    """
    try:
        _check_private(folder)
    except (OSError, RuntimeError) as error:  # below a file or a loop of links, in a folder of others, or a name that is too long
        message = f"compile_cache_dir={str(folder)!r} cannot be used: {error}; choose another place for the kernels"
        raise ConfigError(message) from error


def _check_private(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():  # else the first kernel that is written would find it
        raise ConfigError(f"compile_cache_dir={str(folder)!r} is not a folder; choose another place for the kernels")
    if os.name != "posix":
        return
    home = Path(os.path.expanduser("~")).resolve()  # a user may have none
    folder, me = folder.resolve(), os.getuid()
    above = list(folder.parents)
    if home in above:
        above = above[: above.index(home) + 1]
    for each in (folder, *above):
        try:
            found = each.stat()
        except FileNotFoundError:  # it will be made, for this user only
            continue
        kept = each != folder and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, me) or (found.st_mode & 0o022 and not kept):
            raise ConfigError(
                f"compile_cache_dir={str(folder)!r}: {each} has the mode {stat.S_IMODE(found.st_mode):04o} and belongs to user "
                f"{found.st_uid}, so that users other than {me} can change compiled kernels, which this process runs; make it "
                "yours and run chmod -R go-w on it, or choose another folder"
            )


@contextmanager
def own_thread(device: torch.device, *, deterministic: bool) -> Iterator[None]:
    """Set up this thread as the one that runs a model, until the end: see ``own_stream`` and ``single_threaded``.

    Raises:
        UnsupportedError: Results are to be deterministic, and PyTorch would use several threads.
    """
    with own_stream(device), single_threaded() if deterministic and device.type == "cpu" else nullcontext():
        yield


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run the CPU operations of this thread on one thread; other threads keep their number. ``UnsupportedError`` if PyTorch cannot.

    With several threads the matrix library splits a product among them, so that the sum of a row depends on its place.
    ``torch.set_num_threads`` would change the number for the whole process.
    """
    before = torch.get_num_threads()  # PyTorch sets the number for a new thread when it first asks, which must not be later
    library = ctypes.CDLL(torch._C.__file__)
    set_openmp, set_mkl = (getattr(library, name, None) for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"))
    if set_openmp is not None:
        set_openmp(1)
    mkl_before = set_mkl(1) if set_mkl is not None else 0
    try:
        if (count := torch.get_num_threads()) != 1:
            raise UnsupportedError(
                f"deterministic=True on a CPU needs operations that run on one thread, and this PyTorch uses {count}: "
                "set OMP_NUM_THREADS=1 before the program starts, or call torch.set_num_threads(1)"
            )
        yield
    finally:
        if set_openmp is not None:
            set_openmp(before)
        if set_mkl is not None:
            set_mkl(mkl_before)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run this thread on a stream of its own, which neither waits for the host's CUDA work nor delays it.

    At the end unused memory is returned to the device: PyTorch would keep it for this stream.
    """
    if device.type != "cuda":
        yield
        return
    idle = _idle_streams(device)
    try:
        stream = idle.get_nowait()
    except Empty:
        stream = _new_stream(device)
    inside = torch.cuda.stream(stream)
    inside.__enter__()
    try:
        yield
    finally:
        try:
            inside.__exit__(None, None, None)
            torch.cuda.empty_cache()
            idle.put(stream)
        except RuntimeError as error:  # after a CUDA error, which was reported already, every call fails
            log.warning("memory could not be returned to %s: %s", device, _first_line(error))


def _new_stream(device: torch.device) -> torch.cuda.ExternalStream:
    """Let the driver create a stream. ``torch.cuda.Stream`` would create all streams of PyTorch's pools, which take 70 MiB.

    Raises:
        OSError: There is no driver.
        RuntimeError: The driver refuses.
    """
    handle, non_blocking = ctypes.c_void_p(), 1  # one that does not wait for the legacy default stream
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # creates the context, if there is none, and makes it this thread's
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), non_blocking)
    if status != 0 or handle.value is None:
        raise RuntimeError(f"CUDA error: cuStreamCreate returned {status}")
    return torch.cuda.ExternalStream(handle.value, device)


@cache
def _idle_streams(device: torch.device) -> SimpleQueue[torch.cuda.Stream]:
    """Return the streams that are not in use.

    They are not destroyed, because PyTorch keeps memory for a stream: blocks that results still use, and a workspace of 32 MiB if a
    product of cuBLAS ever ran on it.
    """
    return SimpleQueue()


def open_matrix_library(device: torch.device) -> None:
    """Load cuBLAS and allocate its workspace for this thread's stream; later it would keep a cached block of any size."""
    torch.mm(*torch.zeros(2, 1, 1, dtype=torch.float32, device=device))


def give_back_unused(device: torch.device) -> None:
    """Return memory that loading freed to the device: later small allocations would keep large cached blocks in use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def holds_storage(tensor: Tensor) -> bool:
    """Whether the storage of a tensor has its bytes."""
    return tensor.untyped_storage().nbytes() > 0


def free_storage(tensor: Tensor) -> None:
    """Free the bytes of a tensor that has a storage of its own; it and its views must not be read until ``fill_storage``."""
    tensor.untyped_storage().resize_(0)


def fill_storage(tensor: Tensor) -> None:
    """Allocate the bytes of a tensor whose storage was freed; their contents are undefined."""
    tensor.untyped_storage().resize_(tensor.nbytes)


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage, uint8 [N]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def reserve(device: torch.device, count: int) -> None:
    """Let PyTorch reserve memory in one piece for this thread's stream: if there is too little, the start fails, not a step."""
    torch.empty(count, dtype=torch.uint8, device=device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (is_cuda_error(error) and "out of memory" in described(error))


def is_cuda_error(error: BaseException) -> bool:
    """Whether an exception reports an error of CUDA, itself or through Triton."""
    reported = isinstance(error, RuntimeError) and any(mark in described(error) for mark in ("CUDA error", "[CUDA]"))
    return isinstance(error, torch.AcceleratorError) or reported


def advice_for(error: BaseException) -> str:
    """Return what to do about a step's error, or nothing."""
    if is_out_of_memory(error):
        return f"; {FREE_MEMORY}, and make a new engine"
    return f"; {_NEW_PROCESS}" if is_cuda_error(error) else ""


def start_error(error: BaseException, *, plan: object = None) -> BaseException:
    """Return what to raise for an error of an engine that was starting: one of this package's errors if it has advice.

    Args:
        error: Whatever was raised; the cause of what is returned, unless it is returned itself.
        plan: The memory plan, if there is one yet.
    """
    found: DSV4LiteError
    if isinstance(error, DSV4LiteError) or not isinstance(error, Exception):
        return error
    if is_out_of_memory(error):
        found = CapacityError(
            f"no memory left while starting: {_first_line(error)}; {FREE_MEMORY}", plan=plan, advice=[FREE_MEMORY]
        )
    elif _MISMATCH.search(described(error)) or (_through_triton(error) and not is_cuda_error(error)):
        found = UnsupportedError(
            f"the kernels cannot be compiled or loaded here: {type(error).__name__}: {_first_line(error)}; {_versions()}; "
            "update the driver, PyTorch and Triton so that they fit each other and the chip (Triton also needs a C compiler and "
            "Python's headers), or use device='cpu'"
        )
    else:
        return error
    found.__cause__ = error
    return found


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _through_triton(error: BaseException) -> bool:
    """Whether Triton raised an exception or passed it on."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.partition(".")[0] == "triton" for name in (*names, type(error).__module__))


def _versions() -> str:
    """Return the versions that have to fit together; never fails."""

    def driver_version() -> str:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def device_name() -> str:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{properties.name}, compute capability {properties.major}.{properties.minor}"

    found = [f"PyTorch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    for name, read in (("Triton", triton_version), ("driver's CUDA", driver_version), ("device", device_name)):
        try:
            found.append(f"{name} {read()}")
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            found.append(f"{name} unknown ({_first_line(error)})")
    return ", ".join(found)


def forget_frames(error: BaseException | None) -> None:
    """Clear the local variables of an exception's frames, and of its causes: a caller that keeps it must not keep the model."""
    seen: set[int] = set()  # causes may form a ring: an exception that several threads share gets the context of each
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
