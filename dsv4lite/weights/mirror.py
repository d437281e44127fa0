"""The bytes that resident tensors will have after an update, in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4lite.device import storage_bytes
from dsv4lite.kernels.four_bit import FourBit
from dsv4lite.weights.host_memory import HostMemory
from dsv4lite.weights.quant import Slot

SEGMENT = 64 << 20  # bytes of a storage that get host memory at a time
_MOST_HELD = 8  # places that wait on their device for the rest of their tensors

_Segment = tuple[Tensor, Tensor, dict[int, int]]
"""A part of a resident storage: its bytes, those in host memory, and the ranges of these that were stored: the end by the begin."""


class Mirror:
    """Stores checkpoint tensors in host memory, in their resident form, until ``send`` copies them to their slots.

    Segments of storages get host memory when they are first written. The device copies in its own time: wait for it before the
    memory of given tensors or the host memory is used for anything else. Nothing else may write the slots in between.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._segments: dict[tuple[int, int], _Segment] = {}  # by address of a storage, and first byte
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by address: places that are half filled, and their contents

    def store(self, slot: Slot, weight: Tensor | FourBit, scale: Tensor | None = None) -> None:
        """Convert a checkpoint tensor as ``slot.store`` does, on the device of the given tensors, and keep the result.

        Raises:
            CheckpointError: See ``Slot.store``.
            CapacityError: See ``HostMemory.take``.
        """
        places = slot.places
        complete = slot.fills or places[0].data_ptr() in self._held
        for place, part in zip(places, slot.converted(weight, scale, map(self._copy, places)), strict=True):
            self._held[place.data_ptr()] = place, part
            if complete:
                self._write(*self._held.pop(place.data_ptr()))
        self._settle(_MOST_HELD)  # the rest of a place usually arrives soon, and copies between host and device take longest

    def send(self) -> None:
        """Copy what was stored to the slots. Ranges that touch are copied together, often a whole segment."""
        self._settle(0)
        for resident, host, ends in self._segments.values():
            for begin in sorted(ends):
                if begin in ends:
                    end = ends.pop(begin)
                    while end in ends:
                        end = ends.pop(end)
                    resident[begin:end].copy_(host[begin:end], non_blocking=True)

    def _settle(self, most: int) -> None:
        """Write the oldest places of ``_held`` to their host memory, until at most ``most`` are left."""
        while len(self._held) > most:
            self._write(*self._held.pop(next(iter(self._held))))

    def _copy(self, place: Tensor) -> Tensor:
        """Return the contents that a place would have after ``send`` now, on its device."""
        if held := self._held.pop(place.data_ptr(), None):
            return held[1]
        copy = place.clone()
        for (_, host, ends), begin, end, at in self._parts(place):
            if begin in ends:  # of two slots, places are the same or disjoint
                copy.view(-1).view(torch.uint8)[at : at + end - begin].copy_(host[begin:end], non_blocking=True)
        return copy

    def _write(self, place: Tensor, values: Tensor) -> None:
        assert values.shape == place.shape, (values.shape, place.shape)
        flat, size = values.reshape(-1), place.itemsize
        for (_, host, ends), begin, end, at in self._parts(place):
            part = flat[at // size : (at + end - begin) // size]
            if part.is_cuda or part.dtype != place.dtype:  # the device casts faster, a segment at a time to need little memory
                part = part.to(place.device).to(place.dtype)
            host[begin:end].view(place.dtype).copy_(part, non_blocking=True)  # a part of any strides, which bytes cannot view
            ends[begin] = end

    def _parts(self, place: Tensor) -> Iterator[tuple[_Segment, int, int, int]]:
        """Yield each segment in which a place lies; begin and end of the bytes there, and the index of the first in the place."""
        address, first = place.untyped_storage().data_ptr(), int(place.storage_offset()) * place.itemsize
        last = first + place.nbytes
        for start in range(first // SEGMENT * SEGMENT, last, SEGMENT):
            if (address, start) not in self._segments:
                resident = storage_bytes(place)[start : start + SEGMENT]
                self._segments[address, start] = resident, self._memory.take(resident.shape, torch.uint8), {}
            begin, end = max(first, start), min(last, start + SEGMENT)
            yield self._segments[address, start], begin - start, end - start, begin - first
