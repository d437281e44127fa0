"""Bytes that a pass of a V4 model allocates beside weights and state: the sum of tensors that live together, at its peak.

Bytes per token unless stated otherwise; D model, N streams, H heads of C channels, R low rank, I expert width, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv4lite.kernels.attention import WIDENED_ROWS
from dsv4lite.kernels.compress import OVERLAP_RATIO
from dsv4lite.kernels.experts.decode_small import DECODE_SMALL_TOKENS
from dsv4lite.kernels.gemm import MANY_ROWS
from dsv4lite.kernels.hc import has_kernel
from dsv4lite.kernels.indexer import SCORE_BYTES
from dsv4lite.models.config import PassBytes
from dsv4lite.models.deepseek_v4.batch import SPLITS
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.shard import ModelShard
from dsv4lite.weights.quant import Numerics

_BF16, _FLOAT, _INT = 2, 4, 4
# Largest row block of an expert's product; the last block of each expert may be almost all padding.
_EXPERT_ROWS = 64
_SELECT_BINS, _SELECT_SEGMENT = 2 * 256, 4096  # histograms, for tokens whose scores are too many for one program


def workspace(config: V4Config, numerics: Numerics, shard: ModelShard, *, tokens: int, longest: int) -> PassBytes:
    """Return what a pass of up to ``tokens`` tokens allocates; see ``models.family.Family``."""
    width = max(shard.part(config.expert_width), shard.expert_part(config.expert_width))
    heads, groups = shard.part(config.num_attention_heads), shard.part(config.o_groups)
    c = replace(config, num_attention_heads=heads, o_groups=groups, expert_width=width)
    if numerics.device.type == "cpu":
        # An estimate: streams and float32 copies, queries, expert inputs, gathered rows.
        per_token = 4 * c.streams * c.hidden_size * 3 + 4 * heads * c.head_dim * 3
        per_token += 4 * c.experts_per_token * (c.hidden_size + 2 * width)
        widest = tokens * per_token + 256 * (c.window + c.index_topk) * c.head_dim * 4 * 2
    else:
        widest = _model_pass(c, numerics, tokens, longest)
        for most, splits in () if numerics.deterministic else SPLITS:
            if most is not None:  # most tokens with so many KV splits: float32 parts of the results live beside the rest
                few = min(tokens, most)
                parts = splits * few * _FLOAT * heads * (c.head_dim + 2)
                widest = max(widest, _model_pass(c, numerics, few, longest) + parts)
    return PassBytes(
        hidden=numerics.dtype.itemsize * c.streams * c.hidden_size,
        held=_held(c, numerics),
        widest=widest,
        experts=_experts(c, numerics),
    )


def _held(model: V4Config, numerics: Numerics) -> int:
    """Return what lives during the whole pass: streams, the initial embedding, angles, and the indices of a token's place."""
    angles = 2 * (2 + len({ratio for ratio in model.ratios if ratio})) * model.rope_dim // 2 * _FLOAT
    return numerics.dtype.itemsize * model.hidden_size * (model.streams + 1) + angles + 8 * _INT


def _input(model: V4Config, numerics: Numerics) -> int:
    """Return a sub-layer's input, unquantized and in FP8, and the mixing coefficients for its output."""
    mix = _FLOAT * model.streams * (model.streams + 1)
    return numerics.fp8_bytes(model.hidden_size) + numerics.dtype.itemsize * model.hidden_size + mix


def _model_pass(model: V4Config, numerics: Numerics, tokens: int, longest: int) -> int:
    """Return the peak bytes of a pass over all layers, for all tokens."""
    c, item, selects = model, numerics.dtype.itemsize, OVERLAP_RATIO in model.ratios
    # The widest projection for compressed entries, including index keys and head weights.
    compressed = 4 * (c.head_dim + c.index_dim) + c.index_heads if selects else 2 * c.head_dim
    # Latents of queries and rows: as projected; normed, with queries in FP8 and at most the packed rows of this step's tokens.
    projected = item * (c.q_lora_rank + c.head_dim)
    latents = numerics.fp8_bytes(c.q_lora_rank) or item * c.q_lora_rank
    latents += item * c.head_dim + (_BF16 * c.rope_dim if numerics.quantized else 0)
    heads, index_heads = item * c.num_attention_heads * c.head_dim, item * c.index_heads * c.index_dim if selects else 0
    outputs = item * c.o_groups * c.o_lora_rank
    by_library = item == _FLOAT  # products of groups are copied together at the end
    by_tiles = by_library and numerics.deterministic  # so are products of row tiles
    # Between sub-layers: streams before and after, the output written to them, and the last input beside the next one.
    between = item * c.hidden_size * (c.streams + 1) + _input(c, numerics) + item * c.hidden_size
    if not (numerics.dtype == torch.float32 or has_kernel(numerics.dtype, c.streams)):  # the library projects a float32 copy
        between += _FLOAT * c.hidden_size * c.streams
    widest = max(
        between,
        # Projections for latents and compressed entries, and normed latents.
        projected + latents + _FLOAT * compressed * (2 if by_tiles else 1),
        # Queries as projected, and normed.
        latents + 2 * (heads + index_heads),
        # Normed queries, their selected entries, dequantized rows, and the results of attention.
        latents + 2 * heads + index_heads + _INT * c.index_topk + _BF16 * c.head_dim * (WIDENED_ROWS if numerics.quantized else 0),
        # Attention's results, their low-rank form in bfloat16 and FP8, the sub-layer's output.
        heads + outputs * (2 if by_library else 1) + numerics.fp8_bytes(outputs // item) + item * c.hidden_size,
        _experts(c, numerics),
    )
    # In small decode steps, the experts' outputs are summed only between sub-layers.
    unsummed = min(tokens, DECODE_SMALL_TOKENS) * (between + c.experts_per_token * (_BF16 * c.hidden_size + 8))
    whole = tokens * (_held(c, numerics) + _input(c, numerics))
    # Per pass, not per token: weights widened for products of many rows; scores of index keys, computed in rounds.
    widens = numerics.quantized and not numerics.deterministic and tokens > MANY_ROWS
    widened = _BF16 * c.o_lora_rank * c.num_attention_heads * c.head_dim if widens else 0
    projecting = tokens * (heads + outputs) + widened
    padding = _EXPERT_ROWS * min(c.num_experts, tokens * c.experts_per_token) * _expert_words(c, numerics)
    chosen = _FLOAT * c.index_heads + _INT * c.index_topk  # head weights, and selected entries
    scoring = tokens * (latents + heads + index_heads + chosen) + _scores(c, numerics, tokens, longest)
    return whole + max(tokens * widest + padding, unsummed, projecting, scoring)


def _experts(model: V4Config, numerics: Numerics) -> int:
    """Return what lives while experts run: the shared expert's hidden layer and result, routes, inputs or outputs of all pairs."""
    c, k, item = model, model.experts_per_token, numerics.dtype.itemsize
    hidden = item * 2 * c.expert_width + (numerics.fp8_bytes(c.expert_width) or item * c.expert_width)
    routes = _FLOAT * c.num_experts + (8 + _FLOAT) * k + k * _expert_words(c, numerics)
    if numerics.quantized:
        pairs = k * (c.expert_width + max(_BF16 * c.expert_width, _BF16 * c.hidden_size))
    else:
        pairs = k * item * (c.expert_width + c.hidden_size)
    return 2 * item * c.hidden_size + max(hidden, routes + pairs)


def _expert_words(model: V4Config, numerics: Numerics) -> int:
    """Return the bytes per row of an expert's row block: the index of its pair, and scales of its inputs and hidden channels."""
    return _INT * (1 + (model.hidden_size + model.expert_width) // 128) if numerics.quantized else _INT


def _scores(model: V4Config, numerics: Numerics, tokens: int, longest: int) -> int:
    """Return the bytes of one round of index scores, and of the histograms that find the best ones."""
    entries, item = longest // OVERLAP_RATIO if OVERLAP_RATIO in model.ratios else 0, numerics.dtype.itemsize
    if entries <= model.index_topk:
        return 0
    together = min(tokens, max(1, SCORE_BYTES // (item * entries)))
    return together * (item * entries + _SELECT_BINS * _INT * -(-entries // _SELECT_SEGMENT))
