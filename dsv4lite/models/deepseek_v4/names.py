"""How transformers and ``save_pretrained`` name the tensors of a V4 model (spec 2.4), and the official names of each.

transformers' module names stack the experts of a layer in one tensor; ``save_pretrained`` writes official names under ``model.``
with a few names of transformers'. The namings never contradict each other, so one table serves both.
"""

from __future__ import annotations

from dsv4lite.models.keys import MOST_EXPERTS
from dsv4lite.weights.names import NameTables

_TOP = {
    "embed_tokens": "embed",
    "lm_head": "head",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}

# Below "layers.N." and "mtp.N.".
_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "attn.norm": "attn.kv_norm",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.kv_proj": "attn.compressor.wkv",
    "self_attn.compressor.gate_proj": "attn.compressor.wgate",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "self_attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
    "self_attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate": "ffn.gate",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
}

# All experts of a layer in one tensor [E, rows, in]: the matrices that it stacks along its rows, and their leaf name.
_STACKED = {
    "mlp.experts.gate_up_proj": (("w1", "w3"), "weight"),
    "mlp.experts.gate_up_proj_scale_inv": (("w1", "w3"), "scale"),
    "mlp.experts.down_proj": (("w2",), "weight"),
    "mlp.experts.down_proj_scale_inv": (("w2",), "scale"),
}

V4_NAMES = NameTables(top=_TOP, block=_BLOCK, stacked=_STACKED, max_experts=MOST_EXPERTS)
