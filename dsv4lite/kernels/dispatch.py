"""How an op chooses between its reference and its Triton kernel, and what launchers know about the chip."""

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

GPU_TYPE = "cuda"  # of the devices that run kernels; ``warmup.pretended`` and tests let others stand for a GPU


class AbsentGpu(NamedTuple):
    """What launchers ask about a GPU for which another device stands.

    Attributes:
        capability: Compute capability as one number.
        multiprocessors: How many it has.
    """

    capability: int
    multiprocessors: int


ABSENT: AbsentGpu | None = None


class ReferenceOnly:
    """An argument that no kernel can read: ops that get one run their references."""


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
        launcher: ``module:function`` below ``dsv4lite.kernels``; the function takes the same arguments and returns the same. Its
            module imports Triton, so it is imported by the first launch.
        suits: Given the arguments, whether the kernel takes them. ``None``: it takes all.
    """
    return lambda reference: Op(reference, f"dsv4lite.kernels.{launcher}", suits)


def send(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU to a device; on CUDA without waiting for the copy or for the steps in flight."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def by_most(table: Iterable[tuple[float | None, Choice]], count: float | None) -> Choice:
    """Return the first choice of a table that is for ``count`` things.

    Args:
        table: Choices by the most that each is for, ascending; the last one's is ``None``, for any number.
        count: ``None`` if it is not known: then the last choice.
    """
    return next(choice for most, choice in table if most is None or (count is not None and count <= most))


def on_gpu(device: torch.device) -> bool:
    """Return whether kernels on ``device`` are compiled for a GPU; else they are interpreted."""
    return device.type == GPU_TYPE


def use_triton(*arguments: object) -> bool:
    """Return whether an op with these arguments runs its kernel.

    It does if the first tensor, also of tuples, is on a GPU and needs no gradient, and nothing in them is ``ReferenceOnly``.
    """
    first = _first_tensor(arguments)
    if first is None or not on_gpu(first.device) or first.requires_grad:
        return False
    return not _holds_reference_only(arguments)


def _first_tensor(arguments: Iterable[Any]) -> Tensor | None:
    """Return the first tensor among arguments, those in tuples included. Every op asks: recursion costs less than a generator."""
    for argument in arguments:
        found = _first_tensor(argument) if isinstance(argument, tuple) else argument
        if isinstance(found, Tensor):
            return found
    return None


def _holds_reference_only(arguments: Iterable[Any]) -> bool:
    for argument in arguments:
        if _holds_reference_only(argument) if isinstance(argument, tuple) else isinstance(argument, ReferenceOnly):
            return True
    return False


def ceil_div(count: int, size: int) -> int:
    """Return how many parts of this size hold so many; Triton's own is a function for kernels, which takes 20 times as long."""
    return -(-count // size)


def power_of_2(least: int) -> int:
    """Return the smallest power of two that is no less."""
    return 1 << max(0, least - 1).bit_length()


def capability_of(device: torch.device) -> int:
    """Return the compute capability as one number, 90 for 9.0; the interpreter on a CPU stands for the newest."""
    if not on_gpu(device):
        return 120
    if ABSENT is not None:
        return ABSENT.capability
    return _capability(device) if device.index is None else _known_capability(device)


def multiprocessors_of(device: torch.device) -> int:
    """Return how many multiprocessors the chip has; the interpreter on a CPU runs one program after the other and needs none."""
    if ABSENT is not None:
        return ABSENT.multiprocessors
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache  # every launch asks, and PyTorch takes as long to answer as a launch does; without an index a device is the current one
def _known_capability(device: torch.device) -> int:
    return _capability(device)
