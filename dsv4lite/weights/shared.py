"""Tensors that processes of one machine share: by CUDA IPC handles on a GPU, by shared memory on the host."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from dsv4lite.checks import require
from dsv4lite.errors import WeightUpdateError, shown


@dataclass(frozen=True, slots=True)
class CudaPlace:
    """Shared memory on a GPU.

    Attributes:
        gpu: UUID of the GPU, because processes may number GPUs differently.
        arguments: Arguments of PyTorch's ``rebuild_cuda_tensor`` for the bytes.
    """

    gpu: str
    arguments: tuple[Any, ...]

    def open(self) -> Tensor:
        """Return the bytes, uint8 [nbytes].

        Raises:
            OSError: This process does not see the GPU.
        """
        gpus = [_uuid(index) for index in range(torch.cuda.device_count())]
        if self.gpu not in gpus:
            raise OSError(f"this process does not see the GPU {self.gpu}")
        arguments = list(self.arguments)
        arguments[6] = gpus.index(self.gpu)
        found: Tensor = rebuild_cuda_tensor(*arguments)
        return found


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Shared memory on the host.

    Attributes:
        path: Path of an anonymous file in the owner's ``/proc`` folder; outside of Linux a temporary file.
        identity: Device and inode of the file, because another process may have taken over the owner's id.
        offset, nbytes: The bytes in the file.
    """

    path: str
    identity: tuple[int, int]
    offset: int
    nbytes: int

    def open(self) -> Tensor:
        """Return the bytes, uint8 [nbytes].

        Raises:
            OSError: The memory no longer exists, or belongs to another user or container.
        """
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        file = os.open(self.path, os.O_RDWR)
        try:
            if _identity(file) != self.identity:
                raise OSError(f"{self.path} is not the memory that was shared; its process has closed it")
            return torch.frombuffer(mmap.mmap(file, self.nbytes, offset=self.offset), dtype=torch.uint8)
        finally:
            os.close(file)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor of another process, as a value that can be pickled.

    Attributes:
        places: Locations of its bytes: one, or one for each GPU that has a copy.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    places: tuple[CudaPlace | HostPlace, ...]

    def open(self, device: torch.device) -> Tensor:
        """Return the tensor in the other process's memory: the copy on ``device``, or else the first one.

        Raises:
            OSError: This process cannot open it.
        """
        own = _uuid(device.index or 0) if device.type == "cuda" else ""
        near = [place for place in self.places if isinstance(place, CudaPlace) and place.gpu == own]
        return (near or self.places)[0].open().view(self.dtype).view(self.shape)


class SharedWeights:
    """Tensors of this process that an engine in another process of the machine can read until ``close``.

        with SharedWeights(ModuleSource(policy).tensors()) as shared:
            connection.send(shared.handles)  # the other process loads IPCSource(handles)
            connection.recv()  # the other process has loaded them

    GPU tensors are shared in place and must not change until then; others are copied to shared memory. An object that is dropped
    without ``close`` stops sharing with a ``ResourceWarning``.

    Args:
        tensors: Names and tensors.
        on_host: Copy GPU tensors to shared memory, too.

    Attributes:
        handles: Picklable descriptions to send to the other process.

    Raises:
        WeightUpdateError: An item is not a named, dense tensor.
    """

    _file = -1  # none is open

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], *, on_host: bool = False) -> None:
        self.handles: list[SharedTensor] = []
        self._held: list[Tensor] = []
        self._file, self._path = _open_memory()
        try:
            for name, tensor in as_pairs(tensors):
                check_item(name, tensor, Tensor)
                self.handles.append(self._share(name, tensor.detach().contiguous(), on_host))
        except BaseException:
            self.close()
            raise

    def _share(self, name: str, tensor: Tensor, on_host: bool) -> SharedTensor:
        data = bytes_of(tensor).flatten()
        place: CudaPlace | HostPlace
        if tensor.is_cuda and not on_host:
            self._held.append(data)
            place = CudaPlace(_uuid(data.device.index), reduce_tensor(data)[1])
        else:
            offset = -(-os.fstat(self._file).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            place = HostPlace(self._path, _identity(self._file), offset, tensor.nbytes)
            os.truncate(self._file, offset + tensor.nbytes)
            place.open().copy_(data)
        return SharedTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), nbytes=tensor.nbytes, places=(place,))

    def close(self) -> None:
        """Stop sharing. Memory that other processes have open stays valid for them. May be called repeatedly."""
        self._held.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if sys.platform != "linux":
                os.unlink(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._file >= 0:
            self.close()
            message = "SharedWeights were dropped without closing, and end: use a `with` block, or `close`"
            warnings.warn(message, ResourceWarning, stacklevel=2)


class IPCSource:
    """Tensors of another process of the machine, which each rank of the engine opens itself.

    Args:
        handles: ``SharedWeights.handles`` of that process.
        others: Handles of the same tensors on other GPUs: each rank reads the copy on its own GPU, if there is one.

    Raises:
        InvalidRequestError: They are no handles.
    """

    def __init__(self, handles: Sequence[SharedTensor], *others: Sequence[SharedTensor]) -> None:
        for given in (handles, *others):
            good = isinstance(given, Sequence) and all(isinstance(handle, SharedTensor) for handle in given)
            require(good, "handles", given, "must be a list, the handles of SharedWeights")
        self._handles, self._others = handles, others

    def tensors(self) -> Iterator[tuple[str, SharedTensor]]:
        """Yield the locations of the tensors."""
        copies = [{handle.name: handle.places for handle in other} for other in self._others]
        for handle in self._handles:
            further = tuple(place for copy in copies for place in copy.get(handle.name, ()))
            yield handle.name, replace(handle, places=handle.places + further)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's numbers, of any strides, uint8 [..., bytes of a number]: a view unless signs are lazy."""
    return tensor.resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8)


def as_pairs(items: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a source, pairs.

    Raises:
        WeightUpdateError: One is something else, such as a name where a mapping was given in place of its items, or a module.
    """
    for item in items if isinstance(items, Iterable) else (items,):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            rule = (
                "expected a pair of a name and a tensor; those of a mapping are its items(), of a module ModuleSource(it).tensors()"
            )
            raise WeightUpdateError("the update does not fit the model:", mismatched=[f"{shown(item)}: {rule}"])
        yield item[0], item[1]


def is_distributed(given: object) -> bool:
    """Return whether an object is a ``DTensor``, of whose numbers this process may have only some."""
    module = sys.modules.get("torch.distributed.tensor")  # imported where there is one; importing it takes long
    return module is not None and isinstance(given, module.DTensor)


def check_item(name: object, given: object, kinds: type | UnionType) -> None:
    """Check that an item of a source is a name and one of ``kinds``, and that a tensor is dense and has memory.

    Raises:
        WeightUpdateError: It is not.
    """
    if not isinstance(name, str) or not isinstance(given, kinds):
        problem = f"{shown(name)}: {shown(given)}, expected a name and a tensor"
    elif is_distributed(given):
        problem = f"{name}: a DTensor, expected a whole tensor; ModuleSource gathers those of a module, full_tensor() gathers one"
    elif isinstance(given, Tensor) and (given.is_quantized or given.is_nested):  # whose bytes are not those of its numbers
        problem = f"{name}: {'nested' if given.is_nested else given.dtype}, expected a dense tensor of plain numbers"
    elif isinstance(given, Tensor) and (given.is_meta or given.layout is not torch.strided):
        problem = f"{name}: {given.layout} on {given.device}, expected a dense tensor with memory"
    else:
        return
    raise WeightUpdateError("the update does not fit the model:", mismatched=[problem])


def _open_memory() -> tuple[int, str]:
    """Return a new file for shared memory, and the path by which other processes open it."""
    if sys.platform == "linux":
        file = os.memfd_create("dsv4lite")  # not in /dev/shm, which containers limit; freed with its last process
        return file, f"/proc/{os.getpid()}/fd/{file}"
    else:  # noqa: RET505  # type checkers need both branches to narrow by platform
        return tempfile.mkstemp(prefix="dsv4lite-")


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
