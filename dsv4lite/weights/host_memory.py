"""Page-locked host memory for copies of a device's tensors, which the device reads and writes at full speed.

The driver takes seconds to lock pages, and PyTorch keeps locked pages until the process ends. Here pages are locked in large pieces
of huge pages, reused, and freed with their owner.
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

PIECE = 256 << 20  # bytes locked at a time; a larger tensor gets a piece of its own size
_ALIGN = 512


class HostMemory:
    """Allocates tensors, page-locked if the device is a GPU.

    ``clear`` makes all memory available again; ``free`` returns it to the system, as does the end of the object. Tensors that were
    taken before must not be used after either.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._locked = device, device.type == "cuda"
        self._pieces: list[Tensor] = []
        finalize(self, _free, self._pieces, self._locked).atexit = False
        self._used: list[int] = []  # bytes of each piece that are taken

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor in host memory, whose contents are undefined, valid until ``clear`` or ``free``.

        Raises:
            CapacityError: The host has too little memory, or the limit of locked memory is too low.
        """
        size = math.prod(shape) * dtype.itemsize
        i = next((i for i, piece in enumerate(self._pieces) if self._used[i] + size <= len(piece)), len(self._pieces))
        if i == len(self._pieces):
            self._pieces.append(self._allocate(max(PIECE, size)))
            self._used.append(0)
        begin = self._used[i]
        self._used[i] += -(-size // _ALIGN) * _ALIGN
        return self._pieces[i][begin : begin + size].view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Make all memory available again."""
        self._used = [0] * len(self._pieces)

    def free(self) -> None:
        """Return the memory to the system."""
        self._used.clear()
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


def _free(pieces: list[Tensor], locked: bool) -> None:
    while pieces:
        piece = pieces.pop()
        if locked:
            torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())
