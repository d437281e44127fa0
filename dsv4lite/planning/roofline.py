"""Roofline: the least time of a decode step on several devices, from the bytes that memory and links must move.

    stage  = (weights that its tokens need + state that they read) / memory bandwidth + collectives
    step   = sum over stages of the slowest rank
    collective = HOP_S + bytes / link bandwidth

The rates are those of a chip (``device.CHIPS``). Launches, small kernels and arithmetic are left out, so the numbers compare
layouts and do not predict speed. Sequences are assumed to be short: their state is the window and one selection.
"""

from __future__ import annotations

from math import pow

from dsv4lite.device import Chip
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.shard import ModelShard
from dsv4lite.weights.quant import Numerics

HOP_S = 10e-6
_FLOAT = 4
_EXPERT_ITEM = {"fp4": 0.5 + 1 / 32, "fp8": 1.0, "four_bit": 0.5 + 1 / 32}


def stage_roofline(
    model: ModelConfig, numerics: Numerics, shard: ModelShard, weights: int, sequences: int, chip: Chip, row_reads: int
) -> float:
    """Return the least seconds that one rank needs for its layers in a step with one token of each of its replica's sequences.

    ``weights`` are the bytes of its weights, ``row_reads`` the bytes of one layer's state that a sequence reads.
    """
    layers = len(shard.layers)
    read = weights_read(model, numerics, shard, weights, sequences) + sequences * layers * row_reads
    return read / chip.memory_bytes_s + layers * _collectives(model, shard, sequences, chip)


def weights_read(model: ModelConfig, numerics: Numerics, shard: ModelShard, weights: int, sequences: float) -> float:
    """Return the bytes of weights that a rank reads in a step of one token per sequence, if experts are chosen evenly.

    Arguments are those of ``stage_roofline``; ``sequences`` may be an average over replicas.
    """
    experts, slots = max(1, model.num_experts), model.num_experts // shard.mesh.ep.size
    item = _EXPERT_ITEM.get(numerics.resident_experts, numerics.matrix_dtype.itemsize)
    expert = 3 * model.hidden_size * shard.expert_part(model.expert_width) * item
    tokens = sequences * shard.gathered
    used = slots * (1 - pow(1 - model.experts_per_token / experts, tokens))
    idle = sum(map(model.has_experts, shard.layers)) * (slots - used) * expert
    if shard.first:  # only the tokens' rows of the embedding are read
        idle += len(shard.vocab) * model.hidden_size * numerics.dtype.itemsize
    return weights - idle


def _collectives(model: ModelConfig, shard: ModelShard, sequences: int, chip: Chip) -> float:
    """Return the seconds that one layer's collectives take."""
    sums, row, size = _FLOAT * sequences * model.hidden_size, sequences * model.hidden_size, shard.mesh.ep.size
    seconds = 0.0
    for axis in (shard.mesh.tp, shard.mesh.peers):
        if axis.size > 1:
            seconds += HOP_S + 2 * sums * (axis.size - 1) / axis.size / chip.link_bytes_s
    if shard.gathered > 1:
        seconds += 2 * HOP_S + (row * (shard.gathered - 1) + sums * shard.gathered * (size - 1) / size) / chip.link_bytes_s
    return seconds
