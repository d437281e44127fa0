"""What a step allocates beside weights and state: the pass that the family counts, sampling, and exchange with other ranks."""

from __future__ import annotations

import torch

from dsv4lite.kernels.sampling.rows import row_bytes
from dsv4lite.models.config import ModelConfig, PassBytes
from dsv4lite.weights.quant import Numerics

MIB = 1 << 20
_FLOAT, _INT = 4, 4
_SAMPLING = (
    12  # copies of the logits, at most: penalties and masks, noise, sorted tokens with their ids and masses, log-probabilities
)
SCORED_ROWS = 64  # prompt tokens whose logits exist at a time while they are scored
_LISTED = 10  # words of each listed best token: keys and ids while they are ranked, ids and values
_LIBRARY = 32 * MIB  # scratch of the matrix library on one stream, on the chips where it is largest
_SCRATCH = 16 * MIB  # parts of products of few rows, and counters
SMALL_BLOCKS = 12 * MIB  # what tensors of less than a MiB take, which the allocator keeps apart from others
_GAPS = 1.2  # what the allocator takes for each byte that lives: blocks of other sizes than those before leave gaps
_GRAPH_SEGMENTS = (20 + 2) * MIB  # the least that the allocator takes for a graph's large and small tensors


def sampling_workspace(vocab_size: int, sequences: int, listed: int) -> int:
    """Return what sampling from the rows of some sequences takes, or scoring ``SCORED_ROWS`` prompt tokens.

    Args:
        vocab_size: Tokens of the vocabulary.
        sequences: Most rows that are sampled from.
        listed: Most best tokens of a row that are listed.
    """
    return _FLOAT * (_SAMPLING * vocab_size + _LISTED * min(listed, vocab_size)) * max(sequences, SCORED_ROWS)


def paged_workspace(step: PassBytes, numerics: Numerics, *, tokens: int, sampling: int) -> int:
    """Return the bytes that hold any step on an accelerator: ``SMALL_BLOCKS``, and the rest in one piece.

    Args:
        step: A pass of the most tokens.
        numerics: If deterministic, of all products only those of float32 are left to the library.
        tokens: Most tokens of a step.
        sampling: Bytes of ``sampling_workspace``.
    """
    live = max(step.widest, tokens * step.held + sampling, step.split)
    library = not numerics.deterministic or numerics.dtype == torch.float32
    return int(_GAPS * live) + _SCRATCH + SMALL_BLOCKS + (_LIBRARY if library else 0)


def graph_bytes(step: PassBytes, vocab_size: int, *, sequences: int) -> int:
    """Return what the graphs of decode steps keep: what the largest works with, and of every sequence what it samples from.

    The smaller graphs, captured later, find room in what the largest has left. All of them put their logits in one place.
    """
    return sequences * sampling_bytes(vocab_size) + step.widest + _GRAPH_SEGMENTS


def drafting_bytes(model: ModelConfig, hidden: int, *, sequences: int, rows: int, own: bool) -> int:
    """Return what graphs of verify steps keep besides, and those that draft on the device.

    Args:
        model: Sizes.
        hidden: Bytes of one token's residual.
        sequences: Most sequences of a step.
        rows: Most rows of a step.
        own: Whether the model's own drafter drafts: an MTP block one row of a sequence at a time, DSpark a block of rows.
    """
    if not own:
        return rows * hidden
    block = model.draft_block + 1  # and one row apart from the others
    return rows * hidden + sequences * (hidden + block * _FLOAT * model.vocab_size)


def sampling_bytes(vocab_size: int) -> int:
    """Return what sampling keeps of a sequence: its logits and what its settings make of them, and at most its counts and edits."""
    kept = (_FLOAT + _INT) * vocab_size  # made when a sequence that needs them takes its slot
    return _FLOAT * vocab_size + row_bytes(vocab_size) + kept


def exchange_bytes(
    model: ModelConfig,
    numerics: Numerics,
    tokens: int,
    gathered: int,
    experts: int,
    *,
    by_expert: bool = False,
    partial: bool = False,
) -> int:
    """Return what sharing a layer with other ranks takes besides: partial sums, and the rows of others and what becomes of them.

    Args:
        model: Sizes.
        numerics: Arithmetic.
        tokens: Most tokens of a step.
        gathered: How many ranks' tokens come together where experts are; 1 if rows do not travel.
        experts: Bytes of one token's row while routed experts work; with ``by_expert``, for one of its experts.
        by_expert: A row travels once for each of its experts, at worst all to the same rank.
        partial: Experts are cut by width, and each one's result is float32; their rows do not travel.
    """
    sums = 2 * _FLOAT * model.hidden_size  # of the routed experts, and of the shared one
    if partial:
        sums += (_FLOAT - numerics.dtype.itemsize) * model.experts_per_token * model.hidden_size
    if gathered == 1:
        return tokens * sums
    row = (_rounded(model.hidden_size, numerics) or numerics.dtype.itemsize * model.hidden_size) + model.experts_per_token * (
        8 + _FLOAT
    )
    if by_expert:
        k = model.experts_per_token
        results = (2 * _FLOAT + 2 * numerics.dtype.itemsize) * model.hidden_size  # there and back, and again in their order
        return tokens * (sums + gathered * k * (2 * row + experts + results))
    return tokens * (sums + row + gathered * (row + experts + 2 * _FLOAT * model.hidden_size))


def _rounded(width: int, numerics: Numerics) -> int:
    return width + -(-width // 128) if numerics.quantized else 0
