"""Rows of few tokens to the ranks that hold their experts, and sums back, through memory that ranks open to each other.

    gather     rows of rank 0, rows of rank 1, …: every rank has the tokens of all
    scatter    out = part of rank 0 + part of rank 1 + … + shared expert, of this rank's tokens

Numerics: rows arrive as they were sent; sums are float32, in the order of ranks for two of them, rounded once to what is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.all_reduce import Inbox, part_of_experts_ref
from dsv4lite.kernels.experts import ExpertSum

BLOCK = 1024
"""Numbers of one program: a row is filled up to a multiple of them."""


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


def fits(inbox: Inbox, count: int, hidden: int) -> bool:
    """Return whether rows of so many tokens of each rank go through an inbox: a number and the call's take two of its places."""
    there, back = hidden // 2 + hidden // 4 + -(-hidden // 128) + 2, hidden
    return 0 < 2 * count * -(-max(there, back) // BLOCK) * BLOCK <= inbox.numbers


def gather_few(rows: TokenRows, inbox: Inbox, count: int) -> TokenRows:
    """Return the rows of all ranks; all must ask for the same, in the same order, each on one stream.

    Args:
        rows: This rank's, contiguous; not more than ``count``.
        inbox: Of this rank, that serves for nothing but ``gather_few`` and ``scatter_few``, and ``fits``.
        count: Rows of every rank in what is returned: those that it has not have a negative position, and are zero.
    """
    from dsv4lite.kernels.exchange.triton import gather_triton

    return gather_triton(rows, inbox, count)


def gather_few_ref(ranks: Sequence[TokenRows], count: int) -> TokenRows:
    """Return what every rank gets of the rows of all."""
    return TokenRows(*(torch.cat(tensors) for tensors in zip(*(lengthened(rows, count) for rows in ranks), strict=True)))


def lengthened(rows: TokenRows, count: int) -> TokenRows:
    """Return so many rows: those that are given, and of no token."""
    if len(rows.x_TD) == count:
        return rows
    longer = TokenRows(*(tensor.new_empty(count, *tensor.shape[1:]) for tensor in rows))
    for whole, part, rest in zip(longer, rows, (0, 0, 0, 0, -1), strict=True):
        whole[: len(part)] = part
        whole[len(part) :] = rest
    return longer


def scatter_few(parts: ExpertSum, inbox: Inbox, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return the sum over all ranks' experts of this rank's tokens, and its shared expert's results, [T, D].

    Args:
        parts: Of the tokens of all ranks, equally many of each; the shared expert's results of this rank's count.
        inbox: As for ``gather_few``.
        tokens: How many this rank has.
        dtype: Of the result.
    """
    from dsv4lite.kernels.exchange.triton import scatter_triton

    return scatter_triton(parts, inbox, tokens, dtype)


def scatter_few_ref(ranks: Sequence[ExpertSum], rank: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return what a rank gets of the parts of all."""
    first, *others = [part_of_experts_ref(parts._replace(shared_TD=None)) for parts in ranks]
    for other in others:
        first = first + other
    count = len(first) // len(ranks)
    own, shared_TD = slice(rank * count, rank * count + tokens), ranks[rank].shared_TD
    return (first[own] if shared_TD is None else first[own] + shared_TD[own]).to(dtype)
