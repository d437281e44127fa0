"""Small models and checkpoints for tests, and the configurations of the released models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4lite.models.config import ModelConfig
from dsv4lite.models.deepseek_v4.config import V4Config, parse_config
from dsv4lite.models.deepseek_v4.names import V4_NAMES
from dsv4lite.models.deepseek_v4.tensors import V4_SHARDING
from dsv4lite.parallel.shard import Shards
from dsv4lite.weights.names import NameTables

_SHARED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1048576,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
}
_QUANTIZED: dict[str, Any] = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
_RELEASED: dict[str, Any] = {
    **_SHARED,
    **_QUANTIZED,
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
}


def refreshed(
    config: Mapping[str, Any], *, targets: list[int], rank: int, block: int = 5, noise: int = 128799
) -> Mapping[str, Any]:
    """Return a release's config with a block drafter instead of the MTP block."""
    return {
        **config,
        "compress_ratios": [*config["compress_ratios"], 0, 0],
        "dspark_block_size": block,
        "dspark_noise_token_id": noise,
        "dspark_target_layer_ids": targets,
        "dspark_markov_rank": rank,
    }


FLASH: Mapping[str, Any] = {
    **_RELEASED,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "routed_scaling_factor": 1.5,
    "index_topk": 512,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
}
PRO: Mapping[str, Any] = {
    **_RELEASED,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
}
FLASH_REFRESHED = refreshed(FLASH, targets=[40, 41, 42], rank=256)
PRO_REFRESHED = refreshed(PRO, targets=[58, 59, 60], rank=512)
# Every kind of layer, with sizes that are no multiple of a scale block.
TINY: Mapping[str, Any] = {
    **_SHARED,
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_hash_layers": 2,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 8,
    "index_n_heads": 12,
    "index_head_dim": 16,
    "index_topk": 3,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
}
TINY_QUANTIZED: Mapping[str, Any] = {**TINY, **_QUANTIZED}
TINY_REFRESHED = refreshed(TINY, noise=59, targets=[2, 3, 4], rank=8)


# transformers' config class has these under other names.
RELEASE_ONLY = ("architectures", "model_type", "torch_dtype", "rope_scaling")


def changed(raw: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Return a copy with some keys changed; None removes a key."""
    return {key: value for key, value in {**raw, **settings}.items() if value is not None}


def v4_names(raw: Mapping[str, Any]) -> NameTables:
    """Return V4's names."""
    return V4_NAMES


def v4_shards(config: ModelConfig, **axes: tuple[int, int]) -> Shards:
    """Return a model's sharding seen from one rank, by axis its rank and the number of ranks; one stage has all layers."""
    return Shards(table=V4_SHARDING, axes=axes, stages=(range(config.num_hidden_layers),), num_experts=config.num_experts)


def flash() -> V4Config:
    """V4-Flash."""
    return parse_config(FLASH)


def pro() -> V4Config:
    """V4-Pro."""
    return parse_config(PRO)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int | None = None
) -> Path:
    """Write a checkpoint in the official form: shards in the order of ``tensors``; without ``shard_bytes`` a single file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        if shard_bytes is not None and shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        size += tensor.nbytes
        shards[-1][name] = tensor.contiguous()
    if shard_bytes is None:
        save_file(shards[0], folder / "model.safetensors")
        return folder
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def trainer_settings(*, ratios: Sequence[int], original_positions: int = 65536, **sizes: Any) -> dict[str, Any]:
    """Return settings for transformers' config class: ``TINY`` with other layers and sizes.

    Args:
        ratios: Compression of each layer; at most one other than 0 and 4.
        original_positions: Where YaRN begins; a small number makes it matter in short prompts.
        sizes: Keys of the release form.
    """
    hca = next((ratio for ratio in ratios if ratio not in (0, 4)), 128)
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", hca: "heavily_compressed_attention"}
    return {
        **{key: value for key, value in TINY.items() if key not in (*RELEASE_ONLY, "compress_ratios")},
        **sizes,
        "num_hidden_layers": len(ratios),
        "max_position_embeddings": 16 * original_positions,
        "layer_types": [kinds[ratio] for ratio in ratios],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": hca},
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": original_positions,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    }


def trainer_model(settings: Mapping[str, Any], *, seed: int, kind: str = "DeepseekV4") -> Any:
    """Build transformers' own model in float32, with random weights that let every part of it affect the output."""
    import transformers

    extra = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = getattr(transformers, f"{kind}Config")(**settings, **extra)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                _randomize(name, tensor, config.n_routed_experts, v4=kind == "DeepseekV4")
    return model


def _randomize(name: str, tensor: Tensor, experts: int, *, v4: bool) -> None:
    if name.endswith("inv_freq"):
        return
    if name.endswith("tid2eid"):
        order = torch.rand(len(tensor), experts).argsort(-1)
        tensor.copy_(order[:, : tensor.shape[1]])
    elif name.endswith("norm.weight"):
        tensor.normal_(1.0, 0.3)
    elif name.endswith("k_norm.bias"):
        tensor.normal_(0.0, 0.3)
    elif name.endswith("scale"):
        tensor.normal_(1.0, 0.2)
    elif name.endswith("e_score_correction_bias"):
        tensor.normal_(0.0 if v4 else -0.5, 0.3)  # some scores of an MLA model with bias are negative
    elif name.endswith("sinks"):
        tensor.normal_(0.0, 2.0)
    elif name.endswith(("base", "position_bias", "embed_tokens.weight")):
        tensor.normal_()
    else:
        wide = "gate_proj" in name and ("compressor" in name or not v4)
        tensor.normal_(0.0, (2.0 if wide else 1.0) * tensor.shape[-1] ** -0.5)
