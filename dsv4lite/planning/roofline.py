"""The least time of a decode step on several devices: what memory and links have to move, and nothing else.

    stage  = (weights that its tokens need + state that they read) / memory bandwidth + collectives
    step   = sum over stages of the slowest rank
    collective = HOP_S + bytes / link bandwidth

The rates are a chip's (``device.CHIPS``). A step takes longer: launches, small kernels and arithmetic are left out, so the
numbers compare layouts and do not foretell speed. Sequences are short: their state is the window and one selection.
"""

from __future__ import annotations

from math import pow

from dsv4lite.device import Chip
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.share import Share
from dsv4lite.weights.quant import Numerics

HOP_S = 10e-6
_FLOAT = 4
_EXPERT_ITEM = {"fp4": 0.5 + 1 / 32, "fp8": 1.0}


def stage_floor(
    model: ModelConfig, numerics: Numerics, share: Share, weights: int, sequences: int, chip: Chip, row_reads: int
) -> float:
    """Return the seconds that one rank needs at least for its layers, where every sequence has one token.

    Args:
        model: Sizes of the whole model.
        numerics: How weights lie in memory.
        share: What the rank has.
        weights: Bytes of its weights.
        sequences: Of its replica.
        chip: What it runs on.
        row_reads: Bytes of one layer's state that a sequence reads.
    """
    layers = len(share.layers)
    state = sequences * layers * row_reads
    read = weights_read(model, numerics, share, weights, sequences) + state
    return read / chip.memory_bytes_s + layers * _collectives(model, share, sequences, chip)


def weights_read(model: ModelConfig, numerics: Numerics, share: Share, weights: int, sequences: float) -> float:
    """Return the bytes of its weights that a rank needs where every sequence has one token, and experts are chosen evenly.

    Arguments are those of ``stage_floor``; ``sequences`` may be an average over replicas.
    """
    experts, slots = max(1, model.num_experts), model.num_experts // share.mesh.ep.size
    item = _EXPERT_ITEM.get(numerics.resident_experts, numerics.matrix_dtype.itemsize)
    expert = 3 * model.hidden_size * share.expert_part(model.expert_width) * item
    tokens = sequences * share.gathered
    used = slots * (1 - pow(1 - model.experts_per_token / experts, tokens))
    idle = len(share.layers) * (slots - used) * expert
    if share.first:  # of the embedding only the tokens' rows are read
        idle += len(share.vocab) * model.hidden_size * numerics.dtype.itemsize
    return weights - idle


def _collectives(model: ModelConfig, share: Share, sequences: int, chip: Chip) -> float:
    """Return the seconds that one layer's collectives take."""
    sums, row, size = _FLOAT * sequences * model.hidden_size, sequences * model.hidden_size, share.mesh.ep.size
    seconds = 0.0
    if share.mesh.tp.size > 1:
        seconds += HOP_S + 2 * sums * (share.mesh.tp.size - 1) / share.mesh.tp.size / chip.link_bytes_s
    if share.peers.size > 1:
        seconds += HOP_S + 2 * sums * (share.peers.size - 1) / share.peers.size / chip.link_bytes_s
    if share.gathered > 1:
        seconds += 2 * HOP_S + (row * (share.gathered - 1) + sums * share.gathered * (size - 1) / size) / chip.link_bytes_s
    return seconds
