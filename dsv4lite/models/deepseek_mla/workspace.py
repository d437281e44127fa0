"""Bytes that a pass of an MLA model allocates beside weights and state, at its peak.

On a CPU the reference of attention runs (``kernels/latent_attention``), which makes float32 copies. Bytes per token unless stated
otherwise; D model, H heads, I expert width, K experts per token.
"""

from __future__ import annotations

from dsv4lite.kernels.attention import WIDENED_ROWS
from dsv4lite.kernels.indexer import SCORE_BYTES
from dsv4lite.kernels.latent_attention import CHUNK_ROWS, MOST_HEADS, PROGRAMS, ROUND_TOKENS, projected_rows
from dsv4lite.models.config import PassBytes
from dsv4lite.models.deepseek_mla.config import MlaConfig
from dsv4lite.models.shard import ModelShard
from dsv4lite.weights.quant import Numerics

_FLOAT, _ID = 4, 8
_TOKENS = 64  # tokens that attend together
_EXPERT_ROWS = 64  # largest row block of an expert, whose last one may be almost all padding


def workspace(config: MlaConfig, numerics: Numerics, shard: ModelShard, *, tokens: int, longest: int) -> PassBytes:
    """Return what a pass of up to ``tokens`` tokens allocates; see ``models.family.Family``."""
    c, item = config, numerics.dtype.itemsize
    heads, width = shard.part(c.num_attention_heads), max(shard.expert_part(c.expert_width), shard.part(c.expert_width))
    hidden = item * c.hidden_size
    # The residual before and after a sub-layer, its input, also in FP8, angles, and the indices of the token's place.
    held = 3 * hidden + numerics.fp8_bytes(c.hidden_size) + _FLOAT * (c.rope_dim + 8)
    query = item * heads * (c.nope_dim + c.rope_dim)
    latents = 2 * item * (c.q_lora_rank + c.row_width) + _FLOAT * c.index_heads * (c.index_dim + 1)
    attending = latents + 2 * query + (item + _FLOAT) * heads * c.value_dim
    dense = 3 * item * shard.part(c.dense_width) + _FLOAT * c.hidden_size
    k, experts = c.experts_per_token, max(width, shard.part(c.num_shared_experts * c.expert_width))
    routing = _FLOAT * (3 * c.num_experts + 2 * k) + _ID * 2 * k
    pairs = routing + k * (_FLOAT * c.hidden_size + item * 3 * width) + 3 * item * experts + 2 * _FLOAT * c.hidden_size
    # Per pass, not per token: rows that some tokens read together, in either form, and one round of index scores.
    attention = _references if numerics.device.type == "cpu" else _kernels
    reading = attention(config, numerics, heads, tokens, longest)
    scores = min(2 * SCORE_BYTES, 2 * tokens * _FLOAT * longest) if c.selects and longest > c.index_topk else 0
    blocks = _EXPERT_ROWS * min(c.num_experts, tokens * k) * _FLOAT * (1 + (c.hidden_size + c.expert_width) // 128)
    once = max(reading, scores, blocks)
    return PassBytes(hidden=hidden, held=held, widest=tokens * (held + max(attending, dense, pairs)) + once, experts=pairs)


def _references(config: MlaConfig, numerics: Numerics, heads: int, tokens: int, longest: int) -> int:
    """Return the bytes that the reference of attention allocates, in its larger form."""
    c, rows = config, min(CHUNK_ROWS, longest)
    projected = rows * _FLOAT * heads * (2 * c.nope_dim + c.rope_dim + c.value_dim) + 2 * _TOKENS * _FLOAT * heads * rows
    absorbed = longest * _FLOAT * (2 * c.row_width + 3 * heads) + 3 * _TOKENS * _FLOAT * heads * c.row_width
    return max(projected, absorbed)


def _kernels(config: MlaConfig, numerics: Numerics, heads: int, tokens: int, longest: int) -> int:
    """Return the same for the kernels.

    The absorbed form has queries, results and copies of FP8 rows; the other rows, keys and values of one round, partial results,
    and a bit for each token and row if tokens have selections.
    """
    c, item = config, numerics.dtype.itemsize
    absorbed = 2 * item * min(tokens, ROUND_TOKENS) * heads * c.kv_lora_rank
    absorbed += item * WIDENED_ROWS * tokens * c.row_width if numerics.fp8_rows else 0
    if numerics.deterministic:
        return absorbed
    absorbed += _FLOAT * PROGRAMS * MOST_HEADS * (c.kv_lora_rank + 2)
    rows = min(tokens * longest, projected_rows(heads, c.nope_dim + c.value_dim, item))
    read = _ID * 3 + item * c.row_width + (2 * _FLOAT * c.row_width if numerics.fp8_rows else 0)
    projected = rows * (read + item * heads * (c.nope_dim + c.value_dim)) + tokens * _FLOAT * heads * (c.value_dim + 2)
    projected += tokens * longest // 8 if c.selects else 0
    return max(absorbed, projected)
