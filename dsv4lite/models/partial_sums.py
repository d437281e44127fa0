"""Results that several ranks have a part of, and rows that they have for each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertSum
from dsv4lite.kernels.peer_memory import (
    BLOCK,
    TokenRows,
    all_gather,
    all_reduce,
    all_reduce_shards,
    lengthened,
    most_rows,
    part_of_experts,
    reduce_scatter,
)
from dsv4lite.parallel.mesh import Axis


def total(axis: Axis, part: Tensor, dtype: torch.dtype, also: Tensor | None = None) -> Tensor:
    """Return the sum of the ranks' parts, rounded once.

    Args:
        part: float32; may be overwritten.
        dtype: Of the result.
        also: Another part of this rank, of the same shape.
    """
    found = _through_peers(axis, part.contiguous(), part.numel(), dtype, also)
    if found is not None:
        return found
    if axis.size == 1:
        return rounded_sum(part, also, dtype)
    if also is not None:
        part = part + also
    return axis.all_reduce(part).to(dtype)


def embedding(axis: Axis, table_VD: Tensor, vocab: range, token_ids_T: Tensor) -> Tensor:
    """Return rows [T, D] of a table that ranks share: each comes from the rank that has it, and zeros from the others.

    Args:
        table_VD: This rank's rows.
        vocab: Which token ids they are of.
        token_ids_T: int64.
    """
    if axis.size == 1:
        return table_VD[token_ids_T]
    row_T = token_ids_T - vocab.start
    found_T1 = ((row_T >= 0) & (row_T < len(vocab)))[:, None]
    return axis.all_reduce(torch.where(found_T1, table_VD[row_T.clamp(0, len(vocab) - 1)], 0))


def side_by_side(axis: Axis, product: Callable[[Tensor | None], Tensor], out: Tensor | None) -> Tensor:
    """Return the columns that the ranks compute, in the order of the ranks.

    Args:
        product: Returns this rank's columns [T, V / ranks], in the given tensor unless that is ``None``.
        out: Receives the result [T, V], unless it is ``None``.
    """
    if axis.size == 1:
        return product(out)
    columns = axis.all_gather(product(None), dim=1)
    return columns if out is None else out.copy_(columns)


def total_of_experts(axis: Axis, parts: ExpertSum, dtype: torch.dtype) -> Tensor:
    """Return the sum of the ranks' parts of experts, [T, D], rounded once."""
    tokens, _, hidden = parts.outputs_TKD.shape
    found = None if hidden % BLOCK else _through_peers(axis, parts, tokens * hidden, dtype)
    return total(axis, part_of_experts(parts), dtype) if found is None else found


def most_near(axis: Axis, hidden: int) -> int:
    """Return of how many tokens of each rank the rows and sums fit in memory that the ranks have opened to each other."""
    return 0 if axis.memory is None else most_rows(axis.memory.inbox, hidden)


def gather_rows(axis: Axis, rows: TokenRows, count: int) -> TokenRows:
    """Return the rows of all ranks' tokens, ``count`` of each, the same on all ranks: a missing one has a negative position."""
    if axis.memory is not None and 0 < count <= most_near(axis, rows.x_TD.shape[1]):
        return all_gather(rows, axis.memory.inbox, count)
    return TokenRows(*axis.begin_all_gather(*lengthened(rows, count)).wait())


def total_of_own(axis: Axis, parts: ExpertSum, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of the ranks' parts of experts of this rank's tokens [T, D], and its shared expert's results, rounded once.

    Args:
        parts: Of the tokens that ``gather_rows`` returned.
        tokens: How many of them are this rank's.
        dtype: Of the result.
    """
    count = len(parts.slots_TK) // axis.size
    if axis.memory is not None and 0 < count <= most_near(axis, parts.outputs_TKD.shape[2]):
        return reduce_scatter(parts, axis.memory.inbox, tokens, dtype)
    sums_TD = axis.reduce_scatter(part_of_experts(parts._replace(shared_TD=None)))[:tokens]
    begin = axis.rank * count
    return rounded_sum(sums_TD, None if parts.shared_TD is None else parts.shared_TD[begin : begin + tokens], dtype)


def rounded_sum(part_TD: Tensor, also_TD: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of float32 numbers and others, rounded once: in one launch."""
    if also_TD is None:
        return part_TD.to(dtype)
    return torch.add(part_TD, also_TD, out=torch.empty_like(part_TD, dtype=dtype))


def _through_peers(
    axis: Axis, part: Tensor | ExpertSum, numbers: int, dtype: torch.dtype, also: Tensor | None = None
) -> Tensor | None:
    """Return the sum of so many numbers through memory that the ranks have opened to each other; ``None`` where none goes there."""
    memory = axis.memory
    if memory is None or numbers == 0:
        return None
    if numbers <= memory.inbox.numbers:
        return all_reduce(part, memory.inbox, dtype, also)
    return all_reduce_shards(part, memory.shards, also) if dtype == torch.bfloat16 else None
