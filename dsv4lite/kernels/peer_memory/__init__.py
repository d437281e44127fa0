"""Collectives through peer memory, which all ranks of a machine can write: one launch each.

    all_reduce              out = part of rank 0 + part of rank 1 + …: every rank adds all parts, for few numbers
    all_reduce_shards       the same in bfloat16: every rank adds one shard of all parts, for many numbers
    reduce_scatter_shards   the same, but every rank only gets its shard, which is a part of the rows
    all_gather_shards       rows of rank 0, rows of rank 1, …: every rank gets the rows of all ranks
    all_gather_columns      columns of rank 0, columns of rank 1, …: every rank gets whole rows of 32-bit numbers
    all_gather              tokens of rank 0, tokens of rank 1, …: every rank gets the inputs of experts of all ranks
    reduce_scatter          out = part of rank 0 + part of rank 1 + … + shared expert, for this rank's tokens

All ranks must call the same collectives in the same order, each on one stream. A reference (``x_ref``) takes the arguments of all
ranks, an op those of its own rank.

Numerics: gathered rows and columns are exact copies, but ``all_gather_columns`` and ``all_gather_shards`` turn the bits of a
float32 -0.0 into 0. Sums are float32, rounded once to the result's dtype. With two ranks they have the bits of ``a + b``;
``all_reduce`` returns the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertSum, sum_experts

EMPTY = -(1 << 31)
"""The bits of -0.0, which mark "not written yet" in buffers of ``all_reduce``. Parts are sent with +0.0 instead of -0.0."""
BLOCK = 1024
"""Numbers of one program: 16 bytes for each of its threads."""
GATHERED_BYTES = 64  # rows that ``all_gather_shards`` gathers are multiples of these
TURNS = 3  # buffers per rank, in rotation: while a call fills one of a peer, the peer may still read the previous call's


class Inbox(NamedTuple):
    """A rank's receive buffers and the addresses of those of its peers.

    Every rank has int32 [TURNS, ranks, numbers], filled with ``EMPTY`` before the first call. The ops of shards and
    ``all_gather_columns`` send nothing to the rank itself: they have [TURNS, ranks - 1, numbers], from the next rank on.

    Attributes:
        addresses: int64 [ranks + 1]: of all ranks' buffers; then of an int32 that the host sets to end all waiting.
        calls: int64, number of calls of each block of numbers; zeros before the first call.
        tickets: int32 [1], zero between calls: counts the programs of a call that have started.
        rank: Index of this rank.
        numbers: Most numbers of a sum.
    """

    addresses: Tensor
    calls: Tensor
    tickets: Tensor
    rank: int
    numbers: int


class TokenRows(NamedTuple):
    """The inputs of experts and their router for some tokens.

    Attributes:
        x_TD: bfloat16.
        codes, scales: The same in FP8, float8_e4m3fn [T, D] and uint8 [T, D / 128].
        token_ids_T: int32 or int64.
        positions_T: int32 or int64; negative for rows without a token, and for tokens whose result is not used.
    """

    x_TD: Tensor
    codes: Tensor
    scales: Tensor
    token_ids_T: Tensor
    positions_T: Tensor


def all_reduce(part: Tensor | ExpertSum, inbox: Inbox, dtype: torch.dtype, also: Tensor | None = None) -> Tensor:
    """Return the sum of all ranks' parts.

    Args:
        part: float32, contiguous, at most ``inbox.numbers``; or the terms of a sum over experts, whose part [T, D] is
            ``part_of_experts``; D is a multiple of ``BLOCK``.
        inbox: This rank's.
        dtype: Of the result.
        also: Added to ``part``, same shape; only if ``part`` is a tensor.
    """
    from dsv4lite.kernels.peer_memory.triton import all_reduce_triton

    return all_reduce_triton(part, inbox, dtype, also)


def all_reduce_shards(part: Tensor | ExpertSum, inbox: Inbox, also: Tensor | None = None) -> Tensor:
    """Return the sum of all ranks' parts, bfloat16, with the bits of ``all_reduce`` but for zeros, which are +0.0.

    Args:
        part: float32 [T, D], D even, contiguous, any number of rows; or the terms of a sum over experts, as for ``all_reduce``.
        inbox: This rank's, used only by this op, ``reduce_scatter_shards``, ``all_gather_columns`` and ``all_gather_shards``.
        also: Added to ``part``, same shape; only if ``part`` is a tensor.
    """
    from dsv4lite.kernels.peer_memory.triton import all_reduce_shards_triton

    return all_reduce_shards_triton(part, inbox, also)


def reduce_scatter_shards(part: Tensor | ExpertSum, inbox: Inbox, also: Tensor | None = None) -> Tensor:
    """Return this rank's rows [ceil(T / ranks), D] of the sum of all ranks' parts, with the bits of ``all_reduce_shards``.

    Rows past the last one of ``part`` are undefined.

    Args:
        part: As for ``all_reduce_shards``; D is a multiple of ``BLOCK``.
        inbox: See ``all_reduce_shards``.
        also: Added to ``part``, same shape; only if ``part`` is a tensor.
    """
    from dsv4lite.kernels.peer_memory.triton import reduce_scatter_shards_triton

    return reduce_scatter_shards_triton(part, inbox, also)


def all_reduce_ref(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return every rank's result; ``parts`` are in the order of ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)


def part_of_experts(parts: ExpertSum) -> Tensor:
    """Return a rank's part of the sum over experts, float32 [T, D]."""
    total = sum_experts(parts._replace(shared_TD=None))
    return total if parts.shared_TD is None else total + parts.shared_TD


def most_rows(inbox: Inbox, hidden: int) -> int:
    """Return the most tokens per rank for ``all_gather`` and ``reduce_scatter``; each number is sent with its call's count."""
    gathered, reduced = hidden // 2 + hidden // 4 + -(-hidden // 128) + 2, hidden
    return inbox.numbers // (2 * -(-max(gathered, reduced) // BLOCK) * BLOCK)


def shard_numbers(inbox: Inbox) -> int:
    """Return how many numbers of a shard fit into an inbox: two words of three are for parts, the third for two bfloat16 sums."""
    return inbox.numbers // 48 * 32  # a multiple of 16, so that a thread writes four words at a time


def all_gather(rows: TokenRows, inbox: Inbox, count: int) -> TokenRows:
    """Return the rows of all ranks.

    Args:
        rows: This rank's, contiguous, at most ``count``.
        inbox: This rank's, used only by ``all_gather`` and ``reduce_scatter``; see ``most_rows``.
        count: Rows per rank in the result. Rows that a rank does not have are zero, with position -1.
    """
    from dsv4lite.kernels.peer_memory.triton import all_gather_triton

    return all_gather_triton(rows, inbox, count)


def all_gather_columns(part_TC: Tensor, inbox: Inbox, out: Tensor | None = None) -> Tensor:
    """Return the columns of all ranks in the order of the ranks, [T, ranks * C].

    Args:
        part_TC: This rank's columns: float32, or int32 above -2^31; contiguous, of the same shape on all ranks.
        inbox: See ``all_reduce_shards``; a row fits into ``shard_numbers``.
        out: Contiguous tensor that receives the result.
    """
    from dsv4lite.kernels.peer_memory.triton import all_gather_columns_triton

    return all_gather_columns_triton(part_TC, inbox, out)


def all_gather_shards(part: Tensor, inbox: Inbox) -> Tensor:
    """Return the rows of all ranks in the order of the ranks, [ranks * count, ...].

    Args:
        part: This rank's ``count`` rows, of the same shape on all ranks; contiguous, each a multiple of ``GATHERED_BYTES``.
        inbox: See ``all_reduce_shards``.
    """
    from dsv4lite.kernels.peer_memory.triton import all_gather_shards_triton

    return all_gather_shards_triton(part, inbox)


def all_gather_ref(ranks: Sequence[TokenRows], count: int) -> TokenRows:
    """Return every rank's result; ``ranks`` are the rows of each."""
    return TokenRows(*(torch.cat(tensors) for tensors in zip(*(lengthened(rows, count) for rows in ranks), strict=True)))


def lengthened(rows: TokenRows, count: int) -> TokenRows:
    """Return ``count`` rows: the given ones, then rows without a token (zeros, position -1)."""
    if len(rows.x_TD) == count:
        return rows
    return TokenRows(*(padded(tensor, count, rest) for tensor, rest in zip(rows, (0, 0, 0, 0, -1), strict=True)))


def padded(part: Tensor, count: int, value: int) -> Tensor:
    """Return ``count`` rows: those of a tensor, then rows of ``value``."""
    if len(part) == count:
        return part
    longer = part.new_empty(count, *part.shape[1:])
    longer[: len(part)] = part
    longer[len(part) :] = value
    return longer


def reduce_scatter(parts: ExpertSum, inbox: Inbox, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return, for this rank's tokens, the sum over all ranks' experts plus this rank's shared expert's outputs, [T, D].

    Args:
        parts: Terms for the tokens of all ranks, equally many per rank; the shared expert's for other ranks' tokens are ignored.
        inbox: As for ``all_gather``.
        tokens: Number of this rank's tokens.
        dtype: Of the result.
    """
    from dsv4lite.kernels.peer_memory.triton import reduce_scatter_triton

    return reduce_scatter_triton(parts, inbox, tokens, dtype)


def reduce_scatter_ref(ranks: Sequence[ExpertSum], rank: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's result; ``ranks`` are the parts of each."""
    total = all_reduce_ref([sum_experts.reference(parts._replace(shared_TD=None)) for parts in ranks], torch.float32)
    count = len(total) // len(ranks)
    own, shared_TD = slice(rank * count, rank * count + tokens), ranks[rank].shared_TD
    return (total[own] if shared_TD is None else total[own] + shared_TD[own]).to(dtype)
