"""Results that several ranks have a part of."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lite.kernels.all_reduce import EXPERT_COLUMNS, Inbox, all_reduce_experts, all_reduce_few, part_of_experts
from dsv4lite.kernels.moe_few import ExpertSum
from dsv4lite.parallel.mesh import Axis


def total(axis: Axis, part: Tensor, dtype: torch.dtype, also: Tensor | None = None) -> Tensor:
    """Return the sum of the ranks' parts, rounded once.

    Args:
        axis: The ranks.
        part: float32; may be overwritten.
        dtype: Of the result.
        also: Another part of this rank, of the same shape.
    """
    inbox = _inbox(axis, part.numel())
    if inbox is not None:
        return all_reduce_few(part.contiguous(), inbox, dtype, None if also is None else also.float())
    if also is not None:
        part = part + also
    return axis.all_reduce(part).to(dtype)


def total_of_experts(axis: Axis, parts: ExpertSum, dtype: torch.dtype) -> Tensor:
    """Return the sum of the ranks' parts of experts, [T, D], rounded once."""
    tokens, _, hidden = parts.outputs_TKD.shape
    inbox = _inbox(axis, tokens * hidden)
    if inbox is not None and hidden % EXPERT_COLUMNS == 0:
        return all_reduce_experts(parts, inbox, dtype)
    return total(axis, part_of_experts(parts), dtype)


def _inbox(axis: Axis, numbers: int) -> Inbox | None:
    """Return where parts of so many numbers meet, if they go through memory that the ranks have opened to each other."""
    memory = axis.memory
    if memory is None or not 0 < numbers <= memory.numbers:
        return None
    return Inbox(addresses=memory.addresses, calls=memory.calls, rank=memory.rank, numbers=memory.numbers)
