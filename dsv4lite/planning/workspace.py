"""Memory that a step allocates besides weights and state: the forward pass, sampling, and exchange with other ranks."""

from __future__ import annotations

import torch

from dsv4lite.kernels.sampling.rows import row_bytes
from dsv4lite.models.config import ModelConfig, PassBytes
from dsv4lite.models.shard import ModelShard
from dsv4lite.weights.quant import Numerics

MIB = 1 << 20
_FLOAT, _INT = 4, 4
# Copies of the logits during sampling. On a CPU: top_p among all tokens (sorted keys, ids, masses, penalties). On a GPU, kernels
# have scratch rows (``row_bytes``), and only long lists of best tokens take copies (the processed logits and their keys).
_SAMPLING_CPU, _SAMPLING = 15, 8
SCORED_ROWS = 64  # prompt tokens scored at a time if scoring copies their logits
_SCORED_LOGITS = 1024  # prompt tokens whose logits exist at a time on a GPU; more tokens mean fewer reads of the output head
_LISTED = 10  # words of each listed best token: keys and ids while they are ranked, ids and values
_LIBRARY = 32 * MIB  # scratch of the matrix library on one stream, on the chips where it is largest
_SCRATCH = 16 * MIB  # partial products of matrices with few rows, and counters
SMALL_BLOCKS = 12 * MIB  # for tensors of less than a MiB, which the allocator keeps in separate segments
_GAPS = 1.2  # bytes that the allocator takes per live byte: blocks of different sizes leave gaps
_GRAPH_SEGMENTS = (20 + 2) * MIB  # the allocator's smallest segments for a graph's large and small tensors


def step_bytes(step: PassBytes, numerics: Numerics, vocab_size: int, *, tokens: int, sequences: int, listed: int) -> int:
    """Return the bytes that suffice for any step; on a GPU, ``SMALL_BLOCKS`` and one piece of the rest.

    Args:
        step: A pass of the most tokens; sampling and scoring run after it.
        numerics: Tells whether the matrix library computes products.
        vocab_size: Tokens of the vocabulary.
        tokens: Most tokens of a step.
        sequences: Most rows that are sampled from.
        listed: Most best tokens that a row lists.
    """
    on_cpu = numerics.device.type == "cpu"
    words = (_SAMPLING_CPU if on_cpu else _SAMPLING) * vocab_size + _LISTED * min(listed, vocab_size)
    sampling = _FLOAT * words * max(sequences, SCORED_ROWS)
    if on_cpu:  # its passes are only estimated
        return step.widest + sampling
    logits = _FLOAT * vocab_size * min(tokens, scored_logits(numerics.device))
    live = max(step.widest, tokens * step.held + sampling + logits)
    return int(_GAPS * live) + _SCRATCH + SMALL_BLOCKS + (_LIBRARY if numerics.uses_library else 0)


def scored_logits(device: torch.device) -> int:
    """Return how many prompt tokens have their logits computed at a time."""
    return SCORED_ROWS if device.type == "cpu" else _SCORED_LOGITS


def graph_bytes(step: PassBytes, vocab_size: int, *, sequences: int) -> int:
    """Return the bytes of the graphs of decode steps: the workspace of the largest one, and the sampling tensors of sequences.

    Smaller graphs are captured later and reuse that workspace. All graphs write their logits to one tensor. A sequence has logits,
    scratch rows, and at most its token counts and logit edits, which are allocated when its slot first needs them.
    """
    logits, counts, edits = _FLOAT * vocab_size, _INT * vocab_size, _FLOAT * vocab_size
    return sequences * (logits + row_bytes(vocab_size) + counts + edits) + step.widest + _GRAPH_SEGMENTS


def prompt_pool_bytes(step: PassBytes) -> int:
    """Return the bytes of one segment that suffices for any captured step with prompts; ``step`` is a pass of the most tokens."""
    return int(_GAPS * step.widest)


def drafting_bytes(model: ModelConfig, hidden: int, *, sequences: int, rows: int) -> int:
    """Return the further bytes of graphs with the model's own drafter: an MTP block runs one row at a time, DSpark a block of rows.

    Args:
        hidden: Bytes of one token's residual.
        sequences: Most sequences of a step.
        rows: Most rows of a verify step.
    """
    block = model.draft_block + 1  # and one separate row
    return rows * hidden + sequences * (hidden + block * _FLOAT * model.vocab_size)


def exchange_bytes(
    model: ModelConfig, numerics: Numerics, shard: ModelShard, tokens: int, experts: int, *, by_expert: bool = False
) -> int:
    """Return the further bytes of a layer that ranks share: partial sums, other ranks' rows, and their results.

    Args:
        tokens: Most tokens of a step.
        experts: Bytes of one token's row while routed experts run; with ``by_expert``, for one of its experts.
        by_expert: Whether a row is sent once for each of its experts, in the worst case all to the same rank.
    """
    gathered = shard.gathered
    sums = 2 * _FLOAT * model.hidden_size  # of the routed experts, and of the shared one
    if gathered == 1:
        return tokens * sums
    row = numerics.fp8_bytes(model.hidden_size) or numerics.dtype.itemsize * model.hidden_size
    row += model.experts_per_token * (8 + _FLOAT)
    if by_expert:
        k = model.experts_per_token
        results = (2 * _FLOAT + 2 * numerics.dtype.itemsize) * model.hidden_size  # there and back, and again in their order
        return tokens * (sums + gathered * k * (2 * row + experts + results))
    return tokens * (sums + row + gathered * (row + experts + 2 * _FLOAT * model.hidden_size))
