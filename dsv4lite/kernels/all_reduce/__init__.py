"""The sum of a few numbers that every rank has a part of, through memory that ranks open to each other.

    out = part of rank 0 + part of rank 1 + …

Numerics: float32, rounded once to what is wanted. All ranks get the same bits; of two parts they are those of ``a + b``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertSum, sum_experts, sum_experts_ref

EMPTY = -(1 << 31)
"""The bits of -0.0: what memory holds where no number has arrived. Parts are sent with +0.0 instead."""
EXPERT_COLUMNS = 1024
"""Experts whose results are of a multiple of it are added up by the kernel that sends the sum."""
TURNS = 3  # a call writes one buffer, while others may still read the one before, and clears that of the call before


class Inbox(NamedTuple):
    """Where the parts of a rank and those of its peers meet.

    Every rank has such a buffer, int32 [TURNS, ranks, numbers], of ``EMPTY`` before the first call.

    Attributes:
        addresses: int64 [ranks + 1], of all buffers; then of an int32 that is not 0 once no kernel shall wait any more.
        calls: int64, zeros before the first call, one for each block of numbers.
        rank: Which rank this one is.
        numbers: Most numbers of a sum.
    """

    addresses: Tensor
    calls: Tensor
    rank: int
    numbers: int


def all_reduce_few(part: Tensor, inbox: Inbox, dtype: torch.dtype, also: Tensor | None = None) -> Tensor:
    """Return the sum of all ranks' parts; all must ask for the same, in the same order, each on one stream.

    Args:
        part: float32, contiguous, not more than ``inbox.numbers``.
        inbox: Of this rank.
        dtype: Of the result.
        also: Another part of this rank, of the same shape.
    """
    from dsv4lite.kernels.all_reduce.triton import all_reduce_triton

    return all_reduce_triton(part, inbox, dtype, also)


def all_reduce_experts(parts: ExpertSum, inbox: Inbox, dtype: torch.dtype) -> Tensor:
    """Return the sum of all ranks' experts [T, D], as ``all_reduce_few`` does of what ``part_of_experts`` returns.

    Args:
        parts: This rank's; D is a multiple of ``EXPERT_COLUMNS``.
        inbox: Of this rank.
        dtype: Of the result.
    """
    from dsv4lite.kernels.all_reduce.triton import all_reduce_experts_triton

    return all_reduce_experts_triton(parts, inbox, dtype)


def part_of_experts(parts: ExpertSum) -> Tensor:
    """Return a rank's part of the sum of experts, float32 [T, D]."""
    total = sum_experts(parts._replace(shared_TD=None))
    return total if parts.shared_TD is None else total + parts.shared_TD


def part_of_experts_ref(parts: ExpertSum) -> Tensor:
    """See ``part_of_experts``."""
    total = sum_experts_ref(parts._replace(shared_TD=None))
    return total if parts.shared_TD is None else total + parts.shared_TD.float()


def all_reduce_few_ref(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return what every rank gets of parts in the order of ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)
