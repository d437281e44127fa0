"""The tensors of a V4 checkpoint: names, shapes and kinds (spec 2.2), how they are stored, and how ranks share them."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4lite.models.deepseek_v4.config import DSparkConfig, V4Config
from dsv4lite.parallel.shard import Experts, Replicate, Rule, Split
from dsv4lite.weights.tensors import TensorKind, Tensors, TensorSpec

# Scales follow their weights. Heads of an output group stay together: tp is at most o_groups. The latent rows have one head, so
# whatever makes them and chooses among them is on every rank.
_BLOCK_SHARDING: Mapping[str, Rule] = {
    "attn_norm": Replicate(),
    "ffn_norm": Replicate(),
    "hc_attn_fn": Replicate(),
    "hc_attn_base": Replicate(),
    "hc_attn_scale": Replicate(),
    "hc_ffn_fn": Replicate(),
    "hc_ffn_base": Replicate(),
    "hc_ffn_scale": Replicate(),
    "attn.attn_sink": Split(0),
    "attn.wq_a": Replicate(),
    "attn.q_norm": Replicate(),
    "attn.wq_b": Split(0),
    "attn.wkv": Replicate(),
    "attn.kv_norm": Replicate(),
    "attn.wo_a": Split(0),
    "attn.wo_b": Split(1),
    "attn.compressor.ape": Replicate(),
    "attn.compressor.wkv": Replicate(),
    "attn.compressor.wgate": Replicate(),
    "attn.compressor.norm": Replicate(),
    "attn.indexer.wq_b": Replicate(),
    "attn.indexer.weights_proj": Replicate(),
    "attn.indexer.compressor.ape": Replicate(),
    "attn.indexer.compressor.wkv": Replicate(),
    "attn.indexer.compressor.wgate": Replicate(),
    "attn.indexer.compressor.norm": Replicate(),
    "ffn.gate": Replicate(),
    "ffn.gate.tid2eid": Replicate(),
    "ffn.gate.bias": Replicate(),
    "ffn.experts.*.w1": Experts(0),
    "ffn.experts.*.w2": Experts(1),
    "ffn.experts.*.w3": Experts(0),
    "ffn.shared_experts.w1": Split(0),
    "ffn.shared_experts.w2": Split(1),
    "ffn.shared_experts.w3": Split(0),
}

V4_SHARDING: Mapping[str, Rule] = {
    "embed": Split(0),
    "head": Split(0),
    "norm": Replicate(),
    "hc_head_fn": Replicate(),
    "hc_head_base": Replicate(),
    "hc_head_scale": Replicate(),
    **{f"layers.*.{name}": rule for name, rule in _BLOCK_SHARDING.items()},
    **{f"mtp.*.{name}": rule for name, rule in _BLOCK_SHARDING.items()},
    "mtp.*.e_proj": Replicate(),
    "mtp.*.h_proj": Replicate(),
    "mtp.*.enorm": Replicate(),
    "mtp.*.hnorm": Replicate(),
    "mtp.*.norm": Replicate(),
    "mtp.*.hc_head_fn": Replicate(),
    "mtp.*.hc_head_base": Replicate(),
    "mtp.*.hc_head_scale": Replicate(),
    "mtp.*.main_proj": Replicate(),
    "mtp.*.main_norm": Replicate(),
    "mtp.*.markov_head.markov_w1": Replicate(),
    "mtp.*.markov_head.markov_w2": Replicate(),
    "mtp.*.confidence_head.proj": Replicate(),
}


def official_shapes(config: V4Config) -> dict[str, TensorSpec]:
    """Return every tensor of a model by its official name; matrices are ``[out, in]`` and their scales are not listed."""
    dim, streams = config.hidden_size, config.streams
    head = {
        "norm.weight": TensorSpec((dim,), "bf16"),
        "hc_head_fn": TensorSpec((streams, streams * dim), "f32"),
        "hc_head_base": TensorSpec((streams,), "f32"),
        "hc_head_scale": TensorSpec((1,), "f32"),
    }
    specs = {
        "embed.weight": TensorSpec((config.vocab_size, dim), "bf16"),
        "head.weight": TensorSpec((config.vocab_size, dim), "bf16"),
        **head,
    }
    for layer in range(config.num_hidden_layers):
        specs.update({f"layers.{layer}.{name}": spec for name, spec in _block(config, layer).items()})
    for i in range(config.num_mtp_layers):
        mtp = {
            **_block(config, config.num_hidden_layers + i),
            "e_proj.weight": TensorSpec((dim, dim), "dense"),
            "h_proj.weight": TensorSpec((dim, dim), "dense"),
            "enorm.weight": TensorSpec((dim,), "bf16"),
            "hnorm.weight": TensorSpec((dim,), "bf16"),
            **head,
        }
        specs.update({f"mtp.{i}.{name}": spec for name, spec in mtp.items()})
    if config.dspark is not None:
        specs.update(_dspark(config, config.dspark, head))
    return specs


def _dspark(config: V4Config, dspark: DSparkConfig, head: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    dim, rank = config.hidden_size, dspark.markov_rank
    specs = {
        f"mtp.{stage}.{name}": spec
        for stage in range(dspark.stages)
        for name, spec in _block(config, config.num_hidden_layers + stage).items()
    }
    last = {
        **head,
        "markov_head.markov_w1.weight": TensorSpec((config.vocab_size, rank), "bf16"),
        "markov_head.markov_w2.weight": TensorSpec((config.vocab_size, rank), "bf16"),
        "confidence_head.proj.weight": TensorSpec((1, dim + rank), "bf16"),
    }
    specs["mtp.0.main_proj.weight"] = TensorSpec((dim, dim * len(dspark.targets)), "dense")
    specs["mtp.0.main_norm.weight"] = TensorSpec((dim,), "bf16")
    specs.update({f"mtp.{dspark.stages - 1}.{name}": spec for name, spec in last.items()})
    return specs


def _block(config: V4Config, layer: int) -> dict[str, TensorSpec]:
    dim, streams, rank = config.hidden_size, config.streams, config.q_lora_rank
    heads = config.num_attention_heads * config.head_dim
    outputs = config.o_groups * config.o_lora_rank
    mixes = (2 + streams) * streams
    specs = {
        "attn_norm.weight": TensorSpec((dim,), "bf16"),
        "ffn_norm.weight": TensorSpec((dim,), "bf16"),
        "attn.attn_sink": TensorSpec((config.num_attention_heads,), "f32"),
        "attn.wq_a.weight": TensorSpec((rank, dim), "dense"),
        "attn.q_norm.weight": TensorSpec((rank,), "bf16"),
        "attn.wq_b.weight": TensorSpec((heads, rank), "dense"),
        "attn.wkv.weight": TensorSpec((config.head_dim, dim), "dense"),
        "attn.kv_norm.weight": TensorSpec((config.head_dim,), "bf16"),
        "attn.wo_a.weight": TensorSpec((outputs, heads // config.o_groups), "dense"),
        "attn.wo_b.weight": TensorSpec((dim, outputs), "dense"),
    }
    for part in ("attn", "ffn"):
        specs[f"hc_{part}_fn"] = TensorSpec((mixes, streams * dim), "f32")
        specs[f"hc_{part}_base"] = TensorSpec((mixes,), "f32")
        specs[f"hc_{part}_scale"] = TensorSpec((3,), "f32")
    ratio = config.ratios[layer]
    if ratio:
        specs.update(_compressor(config, "attn.compressor", ratio, config.head_dim))
    if config.kind(layer) == "csa":
        specs["attn.indexer.wq_b.weight"] = TensorSpec((config.index_heads * config.index_dim, rank), "dense")
        specs["attn.indexer.weights_proj.weight"] = TensorSpec((config.index_heads, dim), "bf16")
        specs.update(_compressor(config, "attn.indexer.compressor", ratio, config.index_dim))
    specs["ffn.gate.weight"] = TensorSpec((config.num_experts, dim), "bf16")
    if config.hashed(layer):
        specs["ffn.gate.tid2eid"] = TensorSpec((config.vocab_size, config.experts_per_token), "i64")
    else:
        specs["ffn.gate.bias"] = TensorSpec((config.num_experts,), "f32")
    for expert in range(config.num_experts):
        specs.update(_expert(config, f"ffn.experts.{expert}", "expert"))
    specs.update(_expert(config, "ffn.shared_experts", "dense"))
    return specs


def _compressor(config: V4Config, name: str, ratio: int, width: int) -> dict[str, TensorSpec]:
    rows = width * 2 if ratio == 4 else width  # CSA pools overlapping windows: one half of the rows for each
    return {
        f"{name}.ape": TensorSpec((ratio, rows), "f32"),
        f"{name}.wkv.weight": TensorSpec((rows, config.hidden_size), "bf16"),
        f"{name}.wgate.weight": TensorSpec((rows, config.hidden_size), "bf16"),
        f"{name}.norm.weight": TensorSpec((width,), "bf16"),
    }


def _expert(config: V4Config, name: str, kind: TensorKind) -> dict[str, TensorSpec]:
    dim, width = config.hidden_size, config.expert_width
    return {
        f"{name}.w1.weight": TensorSpec((width, dim), kind),
        f"{name}.w2.weight": TensorSpec((dim, width), kind),
        f"{name}.w3.weight": TensorSpec((width, dim), kind),
    }


def _divides(config: V4Config) -> tuple[tuple[str, int, str], ...]:
    return (
        ("o_groups", config.o_groups, "tp"),
        ("vocab_size", config.vocab_size, "tp"),
        ("moe_intermediate_size", config.expert_width, "tp"),
        ("n_routed_experts", config.num_experts, "ep"),
    )


V4_TENSORS = Tensors(specs=official_shapes, sharding=V4_SHARDING, divides=_divides)
