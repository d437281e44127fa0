"""Collectives of a model's layers: sums of partial results, and rows that ranks gather from each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertSum
from dsv4lite.kernels.peer_memory import (
    BLOCK,
    GATHERED_BYTES,
    TokenRows,
    all_gather,
    all_gather_columns,
    all_gather_shards,
    all_reduce,
    all_reduce_shards,
    lengthened,
    most_rows,
    padded,
    part_of_experts,
    reduce_scatter,
    reduce_scatter_shards,
)
from dsv4lite.parallel.mesh import Axis

LEAST_SHARDED = 512
"""Least tokens of a step whose residual streams the ranks share: with fewer, two more launches take longer than what is saved."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenShard:
    """Which of a step's tokens have their residual streams on this rank ("sequence parallelism"); see ``ALL_TOKENS``.

    Ranks that work on the same tokens hold equal consecutive parts; the last part is padded. Partial results are reduce-scattered
    to these parts, and what a layer reads is gathered from them: together as many bytes as an all-reduce.

    Attributes:
        axis: The ranks that share the tokens.
        tokens: All tokens of the step.
    """

    axis: Axis = field(default_factory=lambda: Axis("peers"))
    tokens: int = 0

    @classmethod
    def of(cls, axis: Axis, tokens: int) -> TokenShard:
        """Return the shard of a rank in a step of ``tokens`` tokens."""
        return cls(axis, tokens) if tokens >= LEAST_SHARDED else ALL_TOKENS

    @property
    def count(self) -> int:
        """Tokens of each rank, padding included."""
        return -(-self.tokens // self.axis.size)

    def own(self, rows: Tensor) -> Tensor:
        """Return this rank's rows [count, ...] of [T, ...]; padding is zero."""
        begin = self.axis.rank * self.count
        return rows if self.axis.size == 1 else padded(rows[begin : begin + self.count], self.count, 0)

    def gather(self, rows: Tensor) -> Tensor:
        """Return all rows [T, ...], given this rank's."""
        if self.axis.size == 1:
            return rows
        memory = self.axis.memory
        if memory is None or rows[0].nbytes % GATHERED_BYTES:
            return self.axis.all_gather(rows)[: self.tokens]
        return all_gather_shards(rows, memory.shards)[: self.tokens]


ALL_TOKENS = TokenShard()
"""The streams of all tokens are on this rank, as they are on its peers."""


def all_reduce_parts(
    axis: Axis, part: Tensor, dtype: torch.dtype, also: Tensor | None = None, shard: TokenShard = ALL_TOKENS
) -> Tensor:
    """Return the sum of all ranks' parts, of any shape, rounded once.

    Args:
        part: This rank's part, float32; may be overwritten.
        dtype: Of the result.
        also: A second part of this rank, of the same shape.
        shard: Return only this shard's rows.
    """
    part = part.contiguous()
    found = _peer_all_reduce(axis, part, part.numel(), dtype, also, shard)
    if found is not None:
        return found
    if axis.size == 1:
        return shard.own(rounded_sum(part, also, dtype))
    if also is not None:
        part = part + also
    return shard.own(axis.all_reduce(part).to(dtype))


def embedding(axis: Axis, table_VD: Tensor, vocab: range, token_ids_T: Tensor) -> Tensor:
    """Return rows [T, D] of a table that is sharded by rows: an all-reduce in which one rank adds the row and the others zeros.

    Args:
        table_VD: This rank's rows.
        vocab: The token ids of these rows.
        token_ids_T: int64.
    """
    if axis.size == 1:
        return table_VD[token_ids_T]
    row_T = token_ids_T - vocab.start
    found_T1 = ((row_T >= 0) & (row_T < len(vocab)))[:, None]
    part_TD = torch.where(found_T1, table_VD[row_T.clamp(0, len(vocab) - 1)], 0)
    return all_reduce_parts(axis, part_TD.float(), table_VD.dtype)


def gather_columns(axis: Axis, product: Callable[[Tensor | None], Tensor], out: Tensor | None) -> Tensor:
    """Return the columns of all ranks, in the order of the ranks.

    Args:
        product: Computes this rank's columns [T, V / ranks], into its argument unless that is ``None``.
        out: Receives the result [T, V], unless it is ``None``.
    """
    if axis.size == 1:
        return product(out)
    if axis.memory is not None:
        return all_gather_columns(product(None), axis.memory.shards, out)
    columns = axis.all_gather(product(None), dim=1)
    return columns if out is None else out.copy_(columns)


def all_reduce_experts(axis: Axis, parts: ExpertSum, dtype: torch.dtype, shard: TokenShard = ALL_TOKENS) -> Tensor:
    """Return the sum of all ranks' expert outputs, [T, D] or a shard's rows of it, rounded once."""
    tokens, _, hidden = parts.outputs_TKD.shape
    found = None if hidden % BLOCK else _peer_all_reduce(axis, parts, tokens * hidden, dtype, None, shard)
    return all_reduce_parts(axis, part_of_experts(parts), dtype, None, shard) if found is None else found


def most_peer_tokens(axis: Axis, hidden: int) -> int:
    """Return how many tokens per rank fit in the peer memory that carries rows and sums; 0 if there is none."""
    return 0 if axis.memory is None else most_rows(axis.memory.inbox, hidden)


def all_gather_rows(axis: Axis, rows: TokenRows, count: int) -> TokenRows:
    """Return the rows of all ranks' tokens, ``count`` per rank on every rank; ranks pad with rows of negative positions."""
    if axis.memory is not None and 0 < count <= most_peer_tokens(axis, rows.x_TD.shape[1]):
        return all_gather(rows, axis.memory.inbox, count)
    return TokenRows(*axis.begin_all_gather(*lengthened(rows, count)).wait())


def reduce_scatter_experts(axis: Axis, parts: ExpertSum, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return the sum over all ranks of the expert outputs of this rank's tokens, and its shared expert's, [T, D], rounded once.

    Args:
        parts: This rank's expert outputs of all tokens that ``all_gather_rows`` returned.
        tokens: How many of these tokens are this rank's.
        dtype: Of the result.
    """
    count = len(parts.slots_TK) // axis.size
    if axis.memory is not None and 0 < count <= most_peer_tokens(axis, parts.outputs_TKD.shape[2]):
        return reduce_scatter(parts, axis.memory.inbox, tokens, dtype)
    sums_TD = axis.reduce_scatter(part_of_experts(parts._replace(shared_TD=None)))[:tokens]
    begin = axis.rank * count
    return rounded_sum(sums_TD, None if parts.shared_TD is None else parts.shared_TD[begin : begin + tokens], dtype)


def rounded_sum(part_TD: Tensor, also_TD: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of two float32 tensors [T, D] (or the first alone), rounded once to ``dtype``, in one launch."""
    if also_TD is None:
        return part_TD.to(dtype)
    return torch.add(part_TD, also_TD, out=torch.empty_like(part_TD, dtype=dtype))


def _peer_all_reduce(
    axis: Axis, part: Tensor | ExpertSum, numbers: int, dtype: torch.dtype, also: Tensor | None, shard: TokenShard
) -> Tensor | None:
    """Return the sum of ``numbers`` numbers, or a shard's rows of it, by peer memory; ``None`` if it is absent or too small."""
    memory = axis.memory
    if memory is None or numbers == 0:
        return None
    if shard.axis is axis and dtype == torch.bfloat16 and numbers // shard.tokens % BLOCK == 0:
        return reduce_scatter_shards(part, memory.shards, also)
    if numbers <= memory.inbox.numbers:
        return shard.own(all_reduce(part, memory.inbox, dtype, also))
    return shard.own(all_reduce_shards(part, memory.shards, also)) if dtype == torch.bfloat16 else None
