"""Results that several ranks have a part of."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lite.kernels.all_reduce import Inbox, all_reduce_few
from dsv4lite.parallel.mesh import Axis


def total(axis: Axis, part: Tensor, dtype: torch.dtype, also: Tensor | None = None) -> Tensor:
    """Return the sum of the ranks' parts, rounded once.

    Args:
        axis: The ranks.
        part: float32; may be overwritten.
        dtype: Of the result.
        also: Another part of this rank, of the same shape.
    """
    memory = axis.memory
    if memory is not None and 0 < part.numel() <= memory.numbers:
        inbox = Inbox(addresses=memory.addresses, calls=memory.calls, rank=memory.rank, numbers=memory.numbers)
        return all_reduce_few(part.contiguous(), inbox, dtype, also)
    if also is not None:
        part = part + also
    return axis.all_reduce(part).to(dtype)
