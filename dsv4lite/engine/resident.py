"""The resident memory of one rank (weights, KV cache), and the operations on it: weight updates, sleep, wake-up, checksums."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsv4lite.device import fill_storage, free_storage, give_back_unused, holds_storage, is_out_of_memory, reserve, storage_bytes
from dsv4lite.engine.balancer import Balancer
from dsv4lite.engine.step_graphs import StepGraphs
from dsv4lite.errors import CapacityError, WeightUpdateError
from dsv4lite.models.family import Model
from dsv4lite.models.shard import shards_of
from dsv4lite.request import MemoryTag
from dsv4lite.state.store import StateCache
from dsv4lite.weights.host_memory import PIECE, HostMemory
from dsv4lite.weights.source import ModelSource
from dsv4lite.weights.update import Bucket, Transaction, checksum

log = logging.getLogger("dsv4lite.engine")

ResidentMethod = Literal[
    "begin", "take", "check", "write", "roll_back", "copy_out", "drop_copies", "release", "restore", "checksums", "apply", "capture"
]  # of ``Resident``
Checksums = dict[str, dict[tuple[tuple[int, int], ...], int]]
"""By official name and (begin, end) of a part in each dimension: the checksum of the part."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of a method of every rank's ``Resident``, made between two steps."""

    method: ResidentMethod
    arguments: tuple[Any, ...]


class Resident:
    """The weights and the KV cache of one rank; mutable, used in the rank's thread between steps.

    Tensors keep their identity and views: sleep frees the bytes of their storages, and wake-up allocates new ones.

    Args:
        model: The model; its slots are the weights.
        cache: The state of sequences.
        source: The source that the model was built from.
        graphs: Captured steps, which read fixed addresses. Updates keep the addresses; after a sleep, steps are captured again.
        balancer: Moves experts by reading the source again, so it stops at the first update.
        workspace: Bytes of the device to reserve for steps.
    """

    def __init__(
        self,
        model: Model,
        cache: StateCache,
        source: ModelSource,
        *,
        graphs: StepGraphs | None,
        balancer: Balancer | None,
        workspace: int,
    ) -> None:
        self._model, self._cache, self._source = model, cache, source
        self._graphs, self._balancer, self._workspace = graphs, balancer, workspace
        mesh = model.shard.mesh
        self._shards = shards_of(source.model, source.family.tensors, mesh.layout, mesh.rank)
        self._device = cache.device
        self._open: tuple[int, Transaction] | None = None
        self._copies: dict[int, list[Tensor]] = {}  # host copies of the weights' storages, in the order of ``_weights``
        self._host = HostMemory(cache.device)  # for host copies, or for the staged tensors of an update

    # -------------------------------------------------------------------------------------------------------------- updates

    def begin(self, serial: int, staged: bool) -> None:
        """Open a weight update with this serial number; it replaces an open one."""
        if self._open is not None:
            self._host.clear()
        if self._balancer is not None:
            self._balancer.on = False  # experts do not move during an update
        source, staging = self._source, self._host if staged else None
        transaction = Transaction(
            self._model.slots(), source.names, source.formats(), self._shards, self._device, staging=staging, packing=source.form
        )
        self._open = (serial, transaction)

    def take(self, serial: int, bucket: Bucket) -> None:
        """Check tensors, and stage or store this rank's part of them; see ``Transaction.take``.

        Raises:
            CapacityError: The host or the device has too little memory.
        """
        try:
            self._transaction(serial).take(bucket)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(f"{self._device} has too little memory for an update: {error}", advice=("free memory",)) from error

    def check(self, serial: int, partial: bool) -> None:
        """Require that the transaction is complete; see ``Transaction.check``."""
        self._transaction(serial).check(partial=partial)

    def write(self, serial: int) -> None:
        """Copy the staged weights to their slots, and end the update. It needs no memory: only the device itself can fail."""
        self._transaction(serial).write()
        self._open = None
        self._host.clear()
        if self._balancer is not None:
            log.warning("experts are no longer rebalanced: moving them would read the checkpoint, whose weights were replaced")
            self._balancer = None

    def roll_back(self, serial: int) -> None:
        """Drop the staged tensors, if that update is open."""
        if self._open is not None and self._open[0] == serial:
            self._open = None
            self._host.clear()
            if self._balancer is not None:
                self._balancer.on = True

    def _transaction(self, serial: int) -> Transaction:
        if self._open is None or self._open[0] != serial:
            raise WeightUpdateError("this update has ended")
        return self._open[1]

    def checksums(self) -> Checksums:
        """Return the checksum of every tensor that this rank has a part of."""
        found: Checksums = {}
        specs = self._source.family.tensors.specs(self._source.model)
        for name, slot in self._model.slots().items():
            cut = self._shards.cut(name, specs[name].shape)
            bounds = tuple((part.start, part.stop) for part in cut)
            found[name] = {bounds: checksum(slot.values().float(), cut, specs[name].shape)}
        return found

    def apply(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the result of a function of the model and this rank's number."""
        return function(self._model, self._model.shard.mesh.rank, *arguments)

    # --------------------------------------------------------------------------------------------------------------- memory

    def capture(self) -> None:
        """Capture the steps that have no graphs, the largest first: smaller ones reuse the memory of their pool."""
        if self._graphs is not None:
            self._graphs.capture_missing(reversed(self._graphs.shapes))

    def _weights(self) -> list[Tensor]:
        """Return the tensors that a full update writes, each once."""
        return list({id(tensor): tensor for slot in self._model.slots().values() for tensor in slot.tensors}.values())

    def copy_out(self) -> None:
        """Copy the weights, which must not be released, to host memory, pinned for a GPU.

        Raises:
            CapacityError: There is too little host memory.
        """
        for i, tensor in enumerate(self._weights()):
            self._copies[i] = [self._host.take(part.shape, part.dtype).copy_(part) for part in _pieces(tensor)]

    def drop_copies(self, free: bool) -> None:
        """Forget the host copies of the weights; free their memory, or keep it for the next ones."""
        self._copies.clear()
        self._host.clear()
        if free:
            self._host.free()

    def release(self, tags: Collection[MemoryTag]) -> None:
        """Free the captured steps, and the tagged memory of weights and KV cache; skip memory that is already free."""
        if self._graphs is not None:
            self._graphs.forget()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for tensor in self._weights() if "weights" in tags else ():
            free_storage(tensor)
        if "kv_cache" in tags:
            self._cache.release_memory()
            if self._graphs is not None:
                self._graphs.release_memory()
        give_back_unused(self._device)

    def restore(self, tags: Collection[MemoryTag]) -> None:
        """Allocate memory that was released, and copy the weights back if there are copies; skip memory that was not released.

        Raises:
            CapacityError: The device has too little memory; a part may have been allocated.
        """
        try:
            for i, tensor in enumerate(self._weights()) if "weights" in tags else ():
                if not holds_storage(tensor):
                    fill_storage(tensor)
                    if i in self._copies:
                        for part, copy in zip(_pieces(tensor), self._copies[i], strict=True):
                            part.copy_(copy)
            if "kv_cache" in tags:
                self._cache.restore_memory()
                if self._graphs is not None:
                    self._graphs.restore_memory()
                if self._device.type == "cuda":
                    reserve(self._device, self._workspace)
        except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError where the host has no memory
            problem = f"{self._device} has too little memory to wake up: {error}"
            raise CapacityError(problem, advice=("free memory, and try again",)) from error


def whole_checksums(parts: Iterable[Checksums]) -> dict[str, str]:
    """Return the checksums of whole tensors, 16 hexadecimal digits, from those of all ranks' parts."""
    joined: Checksums = {}
    for part in parts:
        for name, found in part.items():
            joined.setdefault(name, {}).update(found)
    return {name: f"{sum(found.values()) & (1 << 64) - 1:016x}" for name, found in sorted(joined.items())}


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the bytes of a tensor's storage in pieces of at most ``PIECE``, which fit into reused host memory."""
    return tuple(storage_bytes(tensor).split(PIECE))
