"""What a pass of a V4 model allocates beside weights and state: tensors that live at the same time, counted where they are widest.

Bytes per token unless said otherwise; D model, N streams, H heads of C channels, R low rank, I expert width, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv4lite.kernels.attention import WIDENED_ROWS
from dsv4lite.kernels.compress import OVERLAP_RATIO
from dsv4lite.kernels.experts.decode_small import DECODE_SMALL_TOKENS
from dsv4lite.kernels.gemm import LIBRARY_ROWS
from dsv4lite.kernels.hc import has_kernel
from dsv4lite.kernels.indexer import SCORE_BYTES
from dsv4lite.models.config import PassBytes
from dsv4lite.models.deepseek_v4.batch import SPLITS
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.shard import ModelShard
from dsv4lite.weights.quant import Numerics

_BF16, _FLOAT, _INT = 2, 4, 4
# Largest block of rows that one expert multiplies: each expert may leave one such block almost empty.
_EXPERT_ROWS = 64
_SELECT_BINS, _SELECT_SEGMENT = 2 * 256, 4096  # histograms of scores too many for one program


def workspace(config: V4Config, numerics: Numerics, shard: ModelShard, *, tokens: int, longest: int) -> PassBytes:
    """Return what a pass of up to ``tokens`` tokens allocates; see ``models.family.Workspace``."""
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
            if most is not None:  # of the most tokens whose attention is split, float32 parts of the results live beside the rest
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
    """Return what lives during a whole pass: streams, the embedding that they began with, angles, and what says who is where."""
    angles = 2 * (2 + len({ratio for ratio in model.ratios if ratio})) * model.rope_dim // 2 * _FLOAT
    return numerics.dtype.itemsize * model.hidden_size * (model.streams + 1) + angles + 8 * _INT


def _input(model: V4Config, numerics: Numerics) -> int:
    """Return a sub-layer's input, as it is and in FP8, and the mix for its output."""
    mix = _FLOAT * model.streams * (model.streams + 1)
    return numerics.fp8_bytes(model.hidden_size) + numerics.dtype.itemsize * model.hidden_size + mix


def _model_pass(model: V4Config, numerics: Numerics, tokens: int, longest: int) -> int:
    """Return the bytes that live at the widest point of a pass over all layers."""
    c, item, selects = model, numerics.dtype.itemsize, OVERLAP_RATIO in model.ratios
    # The widest projection for compressed entries, those of index keys included.
    compressed = 4 * (c.head_dim + c.index_dim) + c.index_heads if selects else 2 * c.head_dim
    # The latents of queries and rows, from the projection; normed, queries in FP8, and at most: packed rows of this step's tokens.
    projected = item * (c.q_lora_rank + c.head_dim)
    latents = numerics.fp8_bytes(c.q_lora_rank) or item * c.q_lora_rank
    latents += item * c.head_dim + (_BF16 * c.rope_dim if numerics.quantized else 0)
    heads, index_heads = item * c.num_attention_heads * c.head_dim, item * c.index_heads * c.index_dim if selects else 0
    outputs = item * c.o_groups * c.o_lora_rank
    by_library = item == _FLOAT  # whose products of groups, or in tiles of rows, are put together at the end
    again = by_library and numerics.deterministic
    # Between sub-layers: streams before and after, what is written into them, the last input beside the next one.
    between = item * c.hidden_size * (c.streams + 1) + _input(c, numerics) + item * c.hidden_size
    if not (numerics.dtype == torch.float32 or has_kernel(numerics.dtype, c.streams)):  # the library projects wider streams
        between += _FLOAT * c.hidden_size * c.streams
    widest = max(
        between,
        # Projections for latents and compressed entries, and latents.
        projected + latents + _FLOAT * compressed * (2 if again else 1),
        # Queries as they come from the projection, and normed.
        latents + 2 * (heads + index_heads),
        # Normed queries, the entries they have chosen, rows that are widened first, and what attention returns.
        latents + 2 * heads + index_heads + _INT * c.index_topk + _BF16 * c.head_dim * (WIDENED_ROWS if numerics.quantized else 0),
        # Attention's results, their low-rank form in bfloat16 and FP8, the sub-layer's output.
        heads + outputs * (2 if by_library else 1) + numerics.fp8_bytes(outputs // item) + item * c.hidden_size,
        _experts(c, numerics),
    )
    # Of few tokens, the experts' outputs are summed between sub-layers only.
    unsummed = min(tokens, DECODE_SMALL_TOKENS) * (between + c.experts_per_token * (_BF16 * c.hidden_size + 8))
    whole = tokens * (_held(c, numerics) + _input(c, numerics))
    # Once, not for each token: weights that are widened for the library; scores of index keys, in rounds.
    widens = numerics.quantized and not numerics.deterministic and tokens > LIBRARY_ROWS
    widened = _BF16 * c.o_lora_rank * c.num_attention_heads * c.head_dim if widens else 0
    projecting = tokens * (heads + outputs) + widened
    padding = _EXPERT_ROWS * min(c.num_experts, tokens * c.experts_per_token) * _expert_words(c, numerics)
    chosen = _FLOAT * c.index_heads + _INT * c.index_topk  # head weights, and what they choose
    scoring = tokens * (latents + heads + index_heads + chosen) + _scores(c, numerics, tokens, longest)
    return whole + max(tokens * widest + padding, unsummed, projecting, scoring)


def _experts(model: V4Config, numerics: Numerics) -> int:
    """Return what lives while experts work: the shared result and its hidden layer, routes, and inputs or outputs of every pair."""
    c, k, item = model, model.experts_per_token, numerics.dtype.itemsize
    hidden = item * 2 * c.expert_width + (numerics.fp8_bytes(c.expert_width) or item * c.expert_width)
    routes = _FLOAT * c.num_experts + (8 + _FLOAT) * k + k * _expert_words(c, numerics)
    if numerics.quantized:
        pairs = k * (c.expert_width + max(_BF16 * c.expert_width, _BF16 * c.hidden_size))
    else:
        pairs = k * item * (c.expert_width + c.hidden_size)
    return 2 * item * c.hidden_size + max(hidden, routes + pairs)


def _expert_words(model: V4Config, numerics: Numerics) -> int:
    """Return the bytes of one place in a block of an expert: which pair it is, and scales of its inputs and hidden channels."""
    return _INT * (1 + (model.hidden_size + model.expert_width) // 128) if numerics.quantized else _INT


def _scores(model: V4Config, numerics: Numerics, tokens: int, longest: int) -> int:
    """Return the bytes of the scores of one round of tokens, and the histograms with which the best are found."""
    entries, item = longest // OVERLAP_RATIO if OVERLAP_RATIO in model.ratios else 0, numerics.dtype.itemsize
    if entries <= model.index_topk:
        return 0
    together = min(tokens, max(1, SCORE_BYTES // (item * entries)))
    return together * (item * entries + _SELECT_BINS * _INT * -(-entries // _SELECT_SEGMENT))
