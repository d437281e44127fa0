"""What a pass of an MLA model allocates beside weights and state, counted where it is widest.

Attention runs as its reference on every device so far (``kernels/latent_attention``), so this counts float32 copies as those make
them. Bytes per token unless said otherwise; D model, H heads, I expert width, K experts per token.
"""

from __future__ import annotations

from dsv4lite.kernels.indexer import SCORE_BYTES
from dsv4lite.kernels.latent_attention import CHUNK_ROWS
from dsv4lite.models.config import PassBytes
from dsv4lite.models.deepseek_mla.config import MlaConfig
from dsv4lite.models.shard import ModelShard
from dsv4lite.weights.quant import Numerics

_FLOAT, _ID = 4, 8
_TOKENS = 64  # that attend together
_EXPERT_ROWS = 64  # of one expert's block, which may be almost empty


def workspace(config: MlaConfig, numerics: Numerics, shard: ModelShard, *, tokens: int, longest: int) -> PassBytes:
    """Return what a pass of up to ``tokens`` tokens allocates; see ``models.family.Family``."""
    c, item = config, numerics.dtype.itemsize
    heads, width = shard.part(c.num_attention_heads), max(shard.expert_part(c.expert_width), shard.part(c.expert_width))
    hidden = item * c.hidden_size
    # The residual before and after a sub-layer, its input and the same in FP8, angles, and the token's place.
    held = 3 * hidden + numerics.fp8_bytes(c.hidden_size) + _FLOAT * (c.rope_dim + 8)
    query = item * heads * (c.nope_dim + c.rope_dim)
    latents = 2 * item * (c.q_lora_rank + c.row_width) + _FLOAT * c.index_heads * (c.index_dim + 1)
    attending = latents + 2 * query + (item + _FLOAT) * heads * c.value_dim
    dense = 3 * item * shard.part(c.dense_width) + _FLOAT * c.hidden_size
    k, experts = c.experts_per_token, max(width, shard.part(c.num_shared_experts * c.expert_width))
    routing = _FLOAT * (3 * c.num_experts + 2 * k) + _ID * 2 * k
    pairs = routing + k * (_FLOAT * c.hidden_size + item * 3 * width) + 3 * item * experts + 2 * _FLOAT * c.hidden_size
    # Once: what some tokens read together, in either form, and the scores of one round of index keys.
    rows = min(CHUNK_ROWS, longest)
    projected = rows * _FLOAT * heads * (2 * c.nope_dim + c.rope_dim + c.value_dim) + 2 * _TOKENS * _FLOAT * heads * rows
    absorbed = longest * _FLOAT * (2 * c.row_width + 3 * heads) + 3 * _TOKENS * _FLOAT * heads * c.row_width
    scores = min(2 * SCORE_BYTES, 2 * tokens * _FLOAT * longest) if c.selects and longest > c.index_topk else 0
    blocks = _EXPERT_ROWS * min(c.num_experts, tokens * k) * _FLOAT * (1 + (c.hidden_size + c.expert_width) // 128)
    once = max(projected, absorbed, scores, blocks)
    return PassBytes(hidden=hidden, held=held, widest=tokens * (held + max(attending, dense, pairs)) + once, experts=pairs)
