"""Collectives through memory that ranks open to each other, in one launch.

    all_reduce          out = part of rank 0 + part of rank 1 + …: every rank adds up all, for few numbers
    all_reduce_shards   the same in bfloat16: every rank adds up one shard, for many numbers
    all_gather          rows of rank 0, rows of rank 1, …: every rank has the tokens of all
    reduce_scatter      out = part of rank 0 + part of rank 1 + … + shared expert, of this rank's tokens

All ranks call the same, in the same order, each on one stream. What they compute together takes the parts of all ranks, so the
references here have other arguments than the ops.

Numerics: rows arrive as they were sent. Sums are float32, rounded once to what is wanted: of two parts those of ``a + b``, and of
``all_reduce`` the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertSum, sum_experts

EMPTY = -(1 << 31)
"""The bits of -0.0: what memory of ``all_reduce`` holds where no number has arrived. Parts are sent with +0.0 instead."""
BLOCK = 1024
"""Numbers of one program: 16 bytes for each of its threads."""
TURNS = 3  # a call writes one buffer, while others may still read the one before, and clears that of the call before


class Inbox(NamedTuple):
    """Where the parts of a rank and those of its peers meet.

    Every rank has such a buffer, int32 [TURNS, ranks, numbers], of ``EMPTY`` before the first call.

    Attributes:
        addresses: int64 [ranks + 1], of all buffers; then of an int32 that is not 0 once no kernel shall wait any more.
        calls: int64, zeros before the first call, one for each block of numbers.
        tickets: int32 [1], zero: counts the programs of a call that have started.
        rank: Which rank this one is.
        numbers: Most numbers of a sum.
    """

    addresses: Tensor
    calls: Tensor
    tickets: Tensor
    rank: int
    numbers: int


class TokenRows(NamedTuple):
    """What experts and their router take of tokens.

    Attributes:
        x_TD: bfloat16.
        codes, scales: The same in FP8, float8_e4m3fn [T, D] and uint8 [T, D / 128].
        token_ids_T: int32 or int64.
        positions_T: int32 or int64; negative where there is no token, or its result is not used.
    """

    x_TD: Tensor
    codes: Tensor
    scales: Tensor
    token_ids_T: Tensor
    positions_T: Tensor


def all_reduce(part: Tensor | ExpertSum, inbox: Inbox, dtype: torch.dtype, also: Tensor | None = None) -> Tensor:
    """Return the sum of all ranks' parts.

    Args:
        part: float32, contiguous, not more than ``inbox.numbers``; or experts, of which ``part_of_experts`` is the part [T, D], D a
            multiple of ``BLOCK``.
        inbox: Of this rank.
        dtype: Of the result.
        also: Another part of this rank, of the same shape; not with experts.
    """
    from dsv4lite.kernels.peer_memory.triton import all_reduce_triton

    return all_reduce_triton(part, inbox, dtype, also)


def all_reduce_shards(part: Tensor | ExpertSum, inbox: Inbox, also: Tensor | None = None) -> Tensor:
    """Return the sum of all ranks' parts, bfloat16, with the bits of ``all_reduce`` but for zeros, which are +0.0.

    Args:
        part: float32 [T, D], D even, contiguous, any number of rows; or experts, as for ``all_reduce``.
        inbox: Of this rank, that serves for nothing but this op.
        also: Another part of this rank, of the same shape; not with experts.
    """
    from dsv4lite.kernels.peer_memory.triton import all_reduce_shards_triton

    return all_reduce_shards_triton(part, inbox, also)


def all_reduce_ref(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return what every rank gets of parts in the order of ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)


def part_of_experts(parts: ExpertSum) -> Tensor:
    """Return a rank's part of the sum of experts, float32 [T, D]."""
    total = sum_experts(parts._replace(shared_TD=None))
    return total if parts.shared_TD is None else total + parts.shared_TD


def most_rows(inbox: Inbox, hidden: int) -> int:
    """Return the most tokens of each rank whose rows go through an inbox: a number and the call's take two of its places."""
    there, back = hidden // 2 + hidden // 4 + -(-hidden // 128) + 2, hidden
    return inbox.numbers // (2 * -(-max(there, back) // BLOCK) * BLOCK)


def shard_numbers(inbox: Inbox) -> int:
    """Return how many numbers of a shard go through an inbox: of three words two are for parts, one for two sums in bfloat16."""
    return inbox.numbers // 48 * 32  # a multiple of 16, so that words are written in fours


def all_gather(rows: TokenRows, inbox: Inbox, count: int) -> TokenRows:
    """Return the rows of all ranks.

    Args:
        rows: This rank's, contiguous; not more than ``count``.
        inbox: Of this rank, that serves for nothing but ``all_gather`` and ``reduce_scatter``; see ``most_rows``.
        count: Rows of every rank in what is returned: those that it has not have a negative position, and are zero.
    """
    from dsv4lite.kernels.peer_memory.triton import all_gather_triton

    return all_gather_triton(rows, inbox, count)


def all_gather_ref(ranks: Sequence[TokenRows], count: int) -> TokenRows:
    """Return what every rank gets of the rows of all."""
    return TokenRows(*(torch.cat(tensors) for tensors in zip(*(lengthened(rows, count) for rows in ranks), strict=True)))


def lengthened(rows: TokenRows, count: int) -> TokenRows:
    """Return so many rows: those that are given, and of no token."""
    if len(rows.x_TD) == count:
        return rows
    return TokenRows(*(padded(tensor, count, rest) for tensor, rest in zip(rows, (0, 0, 0, 0, -1), strict=True)))


def padded(part: Tensor, count: int, value: int) -> Tensor:
    """Return ``count`` rows: those of a tensor, and of ``value``."""
    if len(part) == count:
        return part
    longer = part.new_empty(count, *part.shape[1:])
    longer[: len(part)] = part
    longer[len(part) :] = value
    return longer


def reduce_scatter(parts: ExpertSum, inbox: Inbox, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return the sum over all ranks' experts of this rank's tokens, and its shared expert's results, [T, D].

    Args:
        parts: Of the tokens of all ranks, equally many of each; the shared expert's results of this rank's count.
        inbox: As for ``all_gather``.
        tokens: How many this rank has.
        dtype: Of the result.
    """
    from dsv4lite.kernels.peer_memory.triton import reduce_scatter_triton

    return reduce_scatter_triton(parts, inbox, tokens, dtype)


def reduce_scatter_ref(ranks: Sequence[ExpertSum], rank: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return what a rank gets of the parts of all."""
    total = all_reduce_ref([sum_experts.reference(parts._replace(shared_TD=None)) for parts in ranks], torch.float32)
    count = len(total) // len(ranks)
    own, shared_TD = slice(rank * count, rank * count + tokens), ranks[rank].shared_TD
    return (total[own] if shared_TD is None else total[own] + shared_TD[own]).to(dtype)
