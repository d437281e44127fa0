"""The tensors of an MLA checkpoint: names, shapes and kinds (MLA specification 2), and how ranks share them."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4lite.models.deepseek_mla.config import MlaConfig
from dsv4lite.parallel.shard import Experts, Replicate, Rule, Split
from dsv4lite.weights.tensors import Tensors, TensorSpec, swiglu_specs

# Scales follow their weights. All heads share the latent rows, so the matrices that make rows and select tokens are replicated.
_BLOCK_SHARDING: Mapping[str, Rule] = {
    **dict.fromkeys(["attn_norm", "ffn_norm"], Replicate()),
    **dict.fromkeys([f"attn.{name}" for name in ("wq_a", "q_norm", "wkv_a", "kv_norm")], Replicate()),
    **dict.fromkeys([f"attn.indexer.{name}" for name in ("wq_b", "wk", "k_norm", "k_norm.bias", "weights_proj")], Replicate()),
    **dict.fromkeys([f"attn.{name}" for name in ("wq", "wq_b", "wkv_b")], Split(0)),
    "attn.wo": Split(1),
    **dict.fromkeys(["ffn.gate", "ffn.gate.bias"], Replicate()),
    **dict.fromkeys(["ffn.experts.*.w1", "ffn.experts.*.w3"], Experts(0)),
    "ffn.experts.*.w2": Experts(1),
    **dict.fromkeys([f"ffn.{part}{name}" for part in ("", "shared_experts.") for name in ("w1", "w3")], Split(0)),
    **dict.fromkeys(["ffn.w2", "ffn.shared_experts.w2"], Split(1)),
}
MLA_SHARDING: Mapping[str, Rule] = {
    **dict.fromkeys(["embed", "head"], Split(0)),
    "norm": Replicate(),
    **{f"{stack}.*.{name}": rule for stack in ("layers", "mtp") for name, rule in _BLOCK_SHARDING.items()},
    **{f"mtp.*.{name}": Replicate() for name in ("eh_proj", "enorm", "hnorm", "norm")},
}


def official_shapes(config: MlaConfig) -> dict[str, TensorSpec]:
    """Return every tensor of a model by its official name; matrices are ``[out, in]`` and their scales are not listed."""
    dim, norm = config.hidden_size, TensorSpec((config.hidden_size,), "bf16")
    specs = {name: TensorSpec((config.vocab_size, dim), "bf16") for name in ("embed.weight", "head.weight")}
    specs["norm.weight"] = norm
    for layer, routed in enumerate(config.routed):
        specs |= {f"layers.{layer}.{name}": spec for name, spec in _block(config, routed=routed).items()}
    for i in range(config.num_mtp_layers):
        block = _block(config, routed=True) | {f"{name}.weight": norm for name in ("enorm", "hnorm", "norm")}
        block["eh_proj.weight"] = TensorSpec((dim, 2 * dim), "bf16")
        specs |= {f"mtp.{i}.{name}": spec for name, spec in block.items()}
    return specs


def _block(config: MlaConfig, *, routed: bool) -> dict[str, TensorSpec]:
    c, dim, heads = config, config.hidden_size, config.num_attention_heads
    queries = heads * (c.nope_dim + c.rope_dim)
    specs = {f"{name}.weight": TensorSpec((dim,), "bf16") for name in ("attn_norm", "ffn_norm")}
    if c.q_lora_rank:
        specs["attn.wq_a.weight"] = TensorSpec((c.q_lora_rank, dim), "dense")
        specs["attn.q_norm.weight"] = TensorSpec((c.q_lora_rank,), "bf16")
        specs["attn.wq_b.weight"] = TensorSpec((queries, c.q_lora_rank), "dense")
    else:
        specs["attn.wq.weight"] = TensorSpec((queries, dim), "dense")
    specs["attn.wkv_a.weight"] = TensorSpec((c.row_width, dim), "dense")
    specs["attn.kv_norm.weight"] = TensorSpec((c.kv_lora_rank,), "bf16")
    specs["attn.wkv_b.weight"] = TensorSpec((heads * (c.nope_dim + c.value_dim), c.kv_lora_rank), "dense")
    specs["attn.wo.weight"] = TensorSpec((dim, heads * c.value_dim), "dense")
    if c.selects:
        specs["attn.indexer.wq_b.weight"] = TensorSpec((c.index_heads * c.index_dim, c.q_lora_rank), "dense")
        specs["attn.indexer.wk.weight"] = TensorSpec((c.index_dim, dim), "dense")
        specs["attn.indexer.k_norm.weight"] = TensorSpec((c.index_dim,), "f32")
        specs["attn.indexer.k_norm.bias"] = TensorSpec((c.index_dim,), "f32")
        specs["attn.indexer.weights_proj.weight"] = TensorSpec((c.index_heads, dim), "bf16")
    if not routed:
        return specs | swiglu_specs("ffn", dim, c.dense_width, "dense")
    specs["ffn.gate.weight"] = TensorSpec((c.num_experts, dim), "bf16")
    if c.biased:
        specs["ffn.gate.bias"] = TensorSpec((c.num_experts,), "f32")
    for expert in range(c.num_experts):
        specs |= swiglu_specs(f"ffn.experts.{expert}", dim, c.expert_width, "expert")
    return specs | swiglu_specs("ffn.shared_experts", dim, c.num_shared_experts * c.expert_width, "dense")


def _divides(config: MlaConfig) -> tuple[tuple[str, int, str], ...]:
    return (
        ("num_attention_heads", config.num_attention_heads, "tp"),
        ("vocab_size", config.vocab_size, "tp"),
        ("intermediate_size", config.dense_width, "tp"),
        ("moe_intermediate_size", config.expert_width, "tp"),
        ("n_routed_experts", config.num_experts, "ep"),
    )


MLA_TENSORS = Tensors(specs=official_shapes, sharding=MLA_SHARDING, divides=_divides)
