"""Memory of the host for copies of a device's tensors, which the device reads and writes at full speed.

The driver takes seconds to lock pages, and PyTorch keeps what it has locked until the process ends. Here they are locked in large
pieces of huge pages, are used again, and are freed with their owner.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from weakref import finalize

import torch
from torch import Tensor

from dsv4lite.errors import CapacityError

PIECE = 256 << 20  # bytes that are locked at a time; larger tensors have a piece of their own, which no other may fit
_ALIGN = 512


class HostMemory:
    """Tensors one after the other, page-locked if the device is a GPU; mutable.

    ``clear`` lets the same memory be given out again; ``free`` returns it, as does the end of the object. Both need that none of
    the tensors is used any more.
    """

    def __init__(self, device: torch.device) -> None:
        self._locked = device.type == "cuda"
        self._pieces: list[Tensor] = []
        finalize(self, _free, self._pieces, self._locked).atexit = False
        self._piece = self._used = 0  # the piece that is given out, and how much of it was

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose contents are undefined.

        Raises:
            CapacityError: The host has too little memory, or may not lock as much.
        """
        size = math.prod(shape) * dtype.itemsize
        while self._piece < len(self._pieces) and self._used + size > len(self._pieces[self._piece]):
            self._piece, self._used = self._piece + 1, 0
        if self._piece == len(self._pieces):
            self._pieces.append(self._allocate(max(PIECE, size)))
        begin, self._used = self._used, self._used + -(-size // _ALIGN) * _ALIGN
        return self._pieces[self._piece][begin : begin + size].view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Give out the same memory again."""
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
                piece.zero_()  # by many threads; the driver would touch the pages one after the other
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), size, 0))
        except (MemoryError, OSError, RuntimeError) as error:
            advice = ("free memory of the host, or raise the limit of locked memory (ulimit -l)",)
            raise CapacityError(f"the host has too little memory for copies of weights: {error}", advice=advice) from error
        return piece


def _free(pieces: list[Tensor], locked: bool) -> None:
    while pieces:
        piece = pieces.pop()
        if locked:
            torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())
