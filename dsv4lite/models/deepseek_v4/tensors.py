"""The tensors of a V4 checkpoint: names, shapes and kinds (spec 2.2), how they are stored, and how ranks share them."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4lite.kernels.compress import OVERLAP_RATIO
from dsv4lite.models.deepseek_v4.config import DSparkConfig, V4Config
from dsv4lite.parallel.shard import Experts, Replicate, Rule, Split
from dsv4lite.weights.tensors import Tensors, TensorSpec, swiglu_specs

# Scales follow their weights. The heads of an output group stay on one rank: tp is at most o_groups. All heads share the kv rows,
# so the matrices that make rows and select entries are replicated.
_COMPRESSOR = ("ape", "wkv", "wgate", "norm")
_HC = [f"hc_{part}_{name}" for part in ("attn", "ffn", "head") for name in ("fn", "base", "scale")]
_BLOCK_SHARDING: Mapping[str, Rule] = {
    **dict.fromkeys(["attn_norm", "ffn_norm", *_HC[:6]], Replicate()),
    **dict.fromkeys([f"attn.{name}" for name in ("wq_a", "q_norm", "wkv", "kv_norm")], Replicate()),
    **dict.fromkeys([f"attn.compressor.{name}" for name in _COMPRESSOR], Replicate()),
    **dict.fromkeys([f"attn.indexer.compressor.{name}" for name in _COMPRESSOR], Replicate()),
    **dict.fromkeys(["attn.indexer.wq_b", "attn.indexer.weights_proj"], Replicate()),
    **dict.fromkeys(["ffn.gate", "ffn.gate.tid2eid", "ffn.gate.bias"], Replicate()),
    **dict.fromkeys(["attn.attn_sink", "attn.wq_b", "attn.wo_a"], Split(0)),
    "attn.wo_b": Split(1),
    **dict.fromkeys(["ffn.experts.*.w1", "ffn.experts.*.w3"], Experts(0)),
    "ffn.experts.*.w2": Experts(1),
    **dict.fromkeys(["ffn.shared_experts.w1", "ffn.shared_experts.w3"], Split(0)),
    "ffn.shared_experts.w2": Split(1),
}
_DRAFTER = (
    *("e_proj", "h_proj", "enorm", "hnorm", "norm", *_HC[6:]),
    *("main_proj", "main_norm", "markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"),
)
V4_SHARDING: Mapping[str, Rule] = {
    **dict.fromkeys(["embed", "head"], Split(0)),
    **dict.fromkeys(["norm", *_HC[6:]], Replicate()),
    **{f"{stack}.*.{name}": rule for stack in ("layers", "mtp") for name, rule in _BLOCK_SHARDING.items()},
    **{f"mtp.*.{name}": Replicate() for name in _DRAFTER},
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
    specs = {name: TensorSpec((config.vocab_size, dim), "bf16") for name in ("embed.weight", "head.weight")} | head
    for layer in range(config.num_hidden_layers):
        specs.update({f"layers.{layer}.{name}": spec for name, spec in _block(config, layer).items()})
    for i in range(config.num_draft_layers):
        block = {**_block(config, config.num_hidden_layers + i), **_drafter(config, config.dspark, head, i)}
        specs.update({f"mtp.{i}.{name}": spec for name, spec in block.items()})
    return specs


def _drafter(config: V4Config, dspark: DSparkConfig | None, head: Mapping[str, TensorSpec], i: int) -> dict[str, TensorSpec]:
    """Return the tensors of a drafter layer besides those of its block."""
    dim, vocab = config.hidden_size, config.vocab_size
    norm = TensorSpec((dim,), "bf16")
    if dspark is None:
        square = TensorSpec((dim, dim), "dense")
        return {"e_proj.weight": square, "h_proj.weight": square, "enorm.weight": norm, "hnorm.weight": norm, **head}
    specs = {}
    if i == 0:
        specs = {"main_proj.weight": TensorSpec((dim, dim * len(dspark.targets)), "dense"), "main_norm.weight": norm}
    if i == dspark.stages - 1:
        specs |= head
        specs |= {f"markov_head.markov_w{k}.weight": TensorSpec((vocab, dspark.markov_rank), "bf16") for k in (1, 2)}
        specs["confidence_head.proj.weight"] = TensorSpec((1, dim + dspark.markov_rank), "bf16")
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
        specs.update(swiglu_specs(f"ffn.experts.{expert}", dim, config.expert_width, "expert"))
    specs.update(swiglu_specs("ffn.shared_experts", dim, config.expert_width, "dense"))
    return specs


def _compressor(config: V4Config, name: str, ratio: int, width: int) -> dict[str, TensorSpec]:
    rows = width * 2 if ratio == OVERLAP_RATIO else width  # two overlapping windows, each with half of the rows
    return {
        f"{name}.ape": TensorSpec((ratio, rows), "f32"),
        f"{name}.wkv.weight": TensorSpec((rows, config.hidden_size), "bf16"),
        f"{name}.wgate.weight": TensorSpec((rows, config.hidden_size), "bf16"),
        f"{name}.norm.weight": TensorSpec((width,), "bf16"),
    }


def _divides(config: V4Config) -> tuple[tuple[str, int, str], ...]:
    return (
        ("o_groups", config.o_groups, "tp"),
        ("vocab_size", config.vocab_size, "tp"),
        ("moe_intermediate_size", config.expert_width, "tp"),
        ("n_routed_experts", config.num_experts, "ep"),
    )


V4_TENSORS = Tensors(specs=official_shapes, sharding=V4_SHARDING, divides=_divides)
