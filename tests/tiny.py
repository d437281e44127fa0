"""Small models and checkpoints for tests, and the configurations of the released models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dsv4lite.models.config import V4Config, parse_config

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


# transformers' config class has these under other names.
RELEASE_ONLY = ("architectures", "model_type", "torch_dtype", "rope_scaling")


def flash() -> V4Config:
    """V4-Flash."""
    return parse_config(FLASH)


def pro() -> V4Config:
    """V4-Pro."""
    return parse_config(PRO)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int | None = None
) -> Path:
    """Write a checkpoint in the official form; without ``shard_bytes`` in a single file.

    Shards are filled in the order of ``tensors``, so a weight and its scale may come to lie in different ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors:
        if room is not None and shard_bytes is not None:
            if shards[-1] and tensor.nbytes > room:
                shards.append({})
                room = shard_bytes
            room -= tensor.nbytes
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
