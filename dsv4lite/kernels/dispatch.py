"""How an op chooses between its reference and its Triton kernel, and what launchers can ask about the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, update_wrapper
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Choice = TypeVar("Choice")
F = TypeVar("F", bound=Callable[..., object])

GPU_TYPE = "cuda"  # type of the devices that run kernels; ``warmup.pretended`` and tests replace it


class Gpu(NamedTuple):
    """What launchers ask about a GPU.

    Attributes:
        capability: Compute capability as one number, such as 90.
        multiprocessors: Number of multiprocessors.
    """

    capability: int
    multiprocessors: int


ABSENT: Gpu | None = None  # stands for every GPU, if it is none of this machine; ``warmup.pretended`` sets it
HOPPER = 90  # compute capability
LARGE_SHARED_MEMORY = (90, 100, 103)  # compute capabilities with more than 200 KB of shared memory per program
_ALIGNED = 16  # bytes: what tensor descriptors ask of addresses and strides


class ReferenceOnly:
    """Base class of arguments that no kernel can read: an op with such an argument runs its reference."""


class Op(Generic[P, R]):
    """A function whose body is the reference and that launches a kernel on a GPU. Made by ``op``.

    Attributes:
        reference: The body: PyTorch only, on any device.
    """

    __name__: str

    def __init__(self, reference: Callable[P, R], launcher: str, suits: Callable[..., bool] | None) -> None:
        self.reference = reference
        self._path, self._launcher = launcher.split(":")
        self._module: ModuleType | None = None
        self._suits = suits
        update_wrapper(self, reference)

    def launches(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Return whether a call with these arguments runs the kernel."""
        return use_triton(*args, *kwargs.values()) and (self._suits is None or self._suits(*args, **kwargs))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.launches(*args, **kwargs):
            if self._module is None:
                self._module = import_module(self._path)
            launch: Callable[P, R] = getattr(self._module, self._launcher)
            return launch(*args, **kwargs)
        return self.reference(*args, **kwargs)


def op(launcher: str, suits: Callable[..., bool] | None = None) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a function an op: its body is the reference, its docstring the contract of both.

    Args:
        launcher: ``module:function`` below ``dsv4lite.kernels``. The function has the same arguments and results. Its module
            imports Triton and is therefore imported at the first launch.
        suits: Called with the arguments; returns whether the kernel accepts them. ``None``: it accepts all.
    """
    return lambda reference: Op(reference, f"dsv4lite.kernels.{launcher}", suits)


def send(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; on CUDA without waiting for the copy or for steps in flight."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def describable(x: Tensor) -> bool:
    """Return whether the address and the strides of a tensor are those of which a tensor descriptor can be made."""
    *strides, last = x.stride()
    return last == 1 and not x.data_ptr() % _ALIGNED and not [stride for stride in strides if x.itemsize * stride % _ALIGNED]


def by_most(table: Iterable[tuple[float | None, Choice]], count: float | None) -> Choice:
    """Return the first choice of a table whose limit is at least ``count``.

    Args:
        table: Pairs of limit and choice, by ascending limit; the last limit is ``None``: no limit.
        count: ``None`` if it is unknown; the last choice is returned then.
    """
    return next(choice for most, choice in table if most is None or (count is not None and count <= most))


def on_gpu(device: torch.device) -> bool:
    """Return whether kernels on ``device`` are compiled for a GPU; otherwise they are interpreted."""
    return device.type == GPU_TYPE


def asked_by_kernels(question: F) -> F:
    """Let kernels call a function: Triton's compiler passes ``_semantic``, and takes the result as a constant."""
    question.__triton_builtin__ = True  # type: ignore[attr-defined]
    return question


@asked_by_kernels
def compiled(_semantic: Any = None) -> bool:
    """Return whether the kernel is compiled. The interpreter supports neither assembly nor products of bfloat16."""
    return _semantic is not None


def use_triton(*arguments: object) -> bool:
    """Return whether an op with these arguments runs its kernel.

    It does if the first tensor is on a GPU and requires no gradient, no other one requires a gradient while gradients are recorded,
    and no argument is ``ReferenceOnly``. Tuples are searched too.
    """
    first = _first_tensor(arguments)
    if first is None or not on_gpu(first.device) or first.requires_grad:
        return False
    return not (torch.is_grad_enabled() and _requires_gradient(arguments)) and not _holds_reference_only(arguments)


def _first_tensor(arguments: Iterable[Any]) -> Tensor | None:
    """Return the first tensor in arguments and in their tuples. Every op calls this; recursion is faster than a generator."""
    for argument in arguments:
        found = _first_tensor(argument) if isinstance(argument, tuple) else argument
        if isinstance(found, Tensor):
            return found
    return None


def _requires_gradient(arguments: Iterable[Any]) -> bool:
    for argument in arguments:
        if _requires_gradient(argument) if isinstance(argument, tuple) else isinstance(argument, Tensor) and argument.requires_grad:
            return True
    return False


def _holds_reference_only(arguments: Iterable[Any]) -> bool:
    for argument in arguments:
        if _holds_reference_only(argument) if isinstance(argument, tuple) else isinstance(argument, ReferenceOnly):
            return True
    return False


def ceil_div(count: int, size: int) -> int:
    """Return ``count / size`` rounded up; ``triton.cdiv`` takes 20 times as long on the host."""
    return -(-count // size)


def power_of_2(least: int) -> int:
    """Return the smallest power of two that is at least ``least``."""
    return 1 << max(0, least - 1).bit_length()


def capability_of(device: torch.device) -> int:
    """Return the compute capability as one number, 90 for 9.0; on a CPU, where kernels are interpreted, that of the newest chip."""
    return _gpu_of(device).capability if on_gpu(device) else 120


def multiprocessors_of(device: torch.device) -> int:
    """Return the number of multiprocessors; on a CPU, where the interpreter runs one program after the other, that of an H100."""
    return _gpu_of(device).multiprocessors if on_gpu(device) else 132


def _gpu_of(device: torch.device) -> Gpu:
    if ABSENT is not None:
        return ABSENT
    return _query(device) if device.index is None else _known_gpu(device)


def _query(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    return Gpu(10 * found.major + found.minor, found.multi_processor_count)


@cache  # PyTorch's query takes as long as a launch. Only for devices with an index: without one, the current device can change.
def _known_gpu(device: torch.device) -> Gpu:
    return _query(device)
