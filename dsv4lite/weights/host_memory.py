"""Page-locked host memory for copies of a device's tensors, which the device reads and writes at full speed.

The driver takes seconds to lock pages, and PyTorch keeps locked pages until the process ends. Here pages are locked in large pieces
of huge pages, reused, and freed with their owner.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain
from weakref import finalize

import torch
from torch import Tensor

from dsv4lite.device import return_stream, storage_bytes, take_stream
from dsv4lite.errors import CapacityError

PIECE = 256 << 20  # bytes locked at a time; a larger tensor gets a piece of its own size
WINDOW = 64 << 20  # bytes sent to the device at a time; two windows are there at once, which no plan has room for
_ALIGN = 512


class HostMemory:
    """Allocates tensors one after the other, page-locked if the device is a GPU.

    ``clear`` makes all memory available again; ``free`` returns it to the system, as does the end of the object. Tensors that were
    taken before must not be used after either.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._locked = device, device.type == "cuda"
        self._pieces: list[Tensor] = []
        finalize(self, _free, self._pieces, self._locked).atexit = False
        self._piece = self._used = 0  # index of the current piece, and bytes used of it

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose contents are undefined.

        Raises:
            CapacityError: The host has too little memory, or the limit of locked memory is too low.
        """
        size = math.prod(shape) * dtype.itemsize
        while self._piece < len(self._pieces) and self._used + size > len(self._pieces[self._piece]):
            self._piece, self._used = self._piece + 1, 0
        if self._piece == len(self._pieces):
            self._pieces.append(self._allocate(max(PIECE, size)))
        begin, self._used = self._used, self._used + _aligned(size)
        return self._pieces[self._piece][begin : begin + size].view(dtype).view(tuple(shape))

    def sent(self, groups: Iterable[Sequence[Tensor]]) -> Generator[Sequence[Tensor]]:
        """Yield the copies on the device of each group of tensors; groups and tensors are in the order of ``take``.

        The next ``WINDOW`` bytes are copied while the current stream uses the last ones: its work with a group must be launched
        before the next group is asked for.
        """
        if not self._locked:
            yield from groups
            return
        working = torch.cuda.current_stream(self._device)
        copying = take_stream(self._device)
        sending = (self._send(window, working, copying) for window in _windows(groups))
        try:
            following = next(sending, None)
            while following is not None:
                copies, arrived = following  # frees the copies before them
                following = next(sending, None)
                working.wait_event(arrived)
                yield from copies
        finally:
            working.wait_stream(copying)  # memory that becomes free here is no longer written
            return_stream(self._device, copying)

    def _send(
        self, window: Sequence[Sequence[Tensor]], working: torch.cuda.Stream, copying: torch.cuda.Stream
    ) -> tuple[list[list[Tensor]], torch.cuda.Event]:
        """Start copying groups; return the copies, and the event of their arrival."""
        places = [[_place(tensor) for tensor in group] for group in window]
        spans: dict[int, tuple[Tensor, int, int]] = {}  # by address of a piece: its bytes, the first and the end of those in use
        for tensor, (piece, begin) in zip(chain.from_iterable(window), chain.from_iterable(places), strict=True):
            whole, first, _ = spans.get(piece) or (storage_bytes(tensor), begin, begin)
            spans[piece] = (whole, first, _aligned(begin + tensor.nbytes))
        memory = torch.empty(sum(end - first for _, first, end in spans.values()), dtype=torch.uint8, device=self._device)
        copying.wait_stream(working)  # which may have used this memory until now
        shifts, used = {}, 0  # by address of a piece: from a place in it to the same byte's in ``memory``
        with torch.cuda.stream(copying):
            for piece, (whole, first, end) in spans.items():
                part = whole[first:end]  # the piece may end before
                memory[used : used + len(part)].copy_(part, non_blocking=True)
                shifts[piece] = used - first
                used += end - first
            arrived = copying.record_event()
        typed = {dtype: memory.view(dtype) for dtype in {tensor.dtype for tensor in chain.from_iterable(window)}}
        copies = [
            [
                typed[tensor.dtype].as_strided(tensor.shape, tensor.stride(), (begin + shifts[piece]) // tensor.itemsize)
                for tensor, (piece, begin) in zip(*parts, strict=True)
            ]
            for parts in zip(window, places, strict=True)
        ]
        return copies, arrived

    def clear(self) -> None:
        """Make all memory available again."""
        self._piece = self._used = 0

    def free(self) -> None:
        """Return the memory to the system."""
        self.clear()
        _free(self._pieces, self._locked)

    def _allocate(self, size: int) -> Tensor:
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if sys.platform == "linux":
                pages.madvise(mmap.MADV_HUGEPAGE)
            piece = torch.frombuffer(pages, dtype=torch.uint8)
            if self._locked:
                piece.zero_()  # many threads touch the pages; the driver would touch them one by one
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), size, 0))
        except (MemoryError, OSError, RuntimeError) as error:
            advice = ("free memory of the host, or raise the limit of locked memory (ulimit -l)",)
            raise CapacityError(f"the host has too little memory for copies of weights: {error}", advice=advice) from error
        return piece


def _windows(groups: Iterable[Sequence[Tensor]]) -> Iterator[Sequence[Sequence[Tensor]]]:
    """Split groups into runs of at least ``WINDOW`` bytes; the last may be smaller."""
    window: list[Sequence[Tensor]] = []
    size = 0
    for group in groups:
        window.append(group)
        size += sum(tensor.nbytes for tensor in group)
        if size >= WINDOW:
            yield window
            window, size = [], 0
    if window:
        yield window


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the piece in which a tensor lies, and the index of its first byte there."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _free(pieces: list[Tensor], locked: bool) -> None:
    while pieces:
        piece = pieces.pop()
        if locked:
            torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())
