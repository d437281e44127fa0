"""Small random MLA models of every variant, made by transformers, and the released configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4lite.models.deepseek_mla.config import MlaConfig, parse_config
from dsv4lite.models.deepseek_mla.model import DeepseekMla
from dsv4lite.models.deepseek_mla.names import mla_names
from dsv4lite.models.deepseek_mla.tensors import official_shapes
from dsv4lite.weights.quant import Numerics
from tests import tiny
from tests.e2e.engines import write_tokenizer
from tests.golden import fill, official_names, plain, poison
from tests.tiny import write_checkpoint

YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": YARN,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LITE_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_V3 = {**_SIZES, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
INDEXER: Mapping[str, Any] = {"index_n_heads": 24, "index_head_dim": 32, "index_topk": 6}
# Heads as in the releases, which kernels are made for, in a small model of whole blocks of 128.
RELEASED_HEADS: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "v2_lite": (
        "DeepseekV2",
        {
            **_SIZES,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "rope_parameters": _LITE_YARN,
        },
    ),
    "v2": (
        "DeepseekV2",
        {
            **_SIZES,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 8,
            "topk_group": 3,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "rope_parameters": _LITE_YARN,
        },
    ),
    "v3": ("DeepseekV3", {**_V3, "num_nextn_predict_layers": 0}),
    "kimi_k2": ("DeepseekV3", {**_V3, "n_group": 1, "topk_group": 1, "n_routed_experts": 12, "num_nextn_predict_layers": 0}),
    "v32": ("DeepseekV32", {**_V3, **INDEXER}),
    "glm5": (
        "GlmMoeDsa",
        {
            **_V3,
            **INDEXER,
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-3,  # not that of the latents
        },
    ),
}
"""By variant, transformers' class and its settings."""

_MLA: Mapping[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "ep_size": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "pretraining_tp": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
V3: Mapping[str, Any] = {**_MLA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
V31: Mapping[str, Any] = {**V3, "quantization_config": {**V3["quantization_config"], "scale_fmt": "ue8m0"}}
V32: Mapping[str, Any] = {
    **V31,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
V2: Mapping[str, Any] = {
    **{key: value for key, value in _MLA.items() if key not in ("num_nextn_predict_layers", "quantization_config")},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "rope_scaling": {**_MLA["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
V2_LITE: Mapping[str, Any] = {
    **V2,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
KIMI_K2: Mapping[str, Any] = {
    **V3,
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "rope_scaling": {**_MLA["rope_scaling"], "factor": 32.0},
    "max_position_embeddings": 131072,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
}


# Below a layer, in this order.
_RELEASE_NAMES = (
    *(("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"), ("attn.", "self_attn."), ("ffn.", "mlp.")),
    *(("attn.wq_a", "attn.q_a_proj"), ("attn.q_norm", "attn.q_a_layernorm"), ("attn.wq_b", "attn.q_b_proj")),
    *(("attn.wq", "attn.q_proj"), ("attn.wkv_a", "attn.kv_a_proj_with_mqa"), ("attn.kv_norm", "attn.kv_a_layernorm")),
    *(("attn.wkv_b", "attn.kv_b_proj"), ("attn.wo", "attn.o_proj"), ("gate.bias", "gate.e_score_correction_bias")),
    *((".w1", ".gate_proj"), (".w2", ".down_proj"), (".w3", ".up_proj"), ("scale", "weight_scale_inv")),
)
_TYPES = {"DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3", "DeepseekV32": "deepseek_v32", "GlmMoeDsa": "glm_moe_dsa"}


def raw_config(variant: str, **settings: Any) -> dict[str, Any]:
    """Return a small ``config.json`` of a variant."""
    name, sizes = VARIANTS[variant]
    return {"model_type": _TYPES[name], "torch_dtype": "float32", **sizes, **settings}


def random_checkpoint(config: MlaConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Return random float32 tensors by their official names, which let every part of a model affect the output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in official_shapes(config).items():
        tensor = torch.randn(spec.shape, generator=generator)
        if len(spec.shape) > 1:
            tensor *= 1.0 if name == "embed.weight" else (2.0 if name.endswith("w1.weight") else 1.0) * spec.shape[-1] ** -0.5
        else:
            tensor = 0.3 * tensor + (0.0 if name.endswith("k_norm.bias") else -0.5 if name.endswith("gate.bias") else 1.0)
        tensors[name] = tensor
    return tensors


def random_model(variant: str, *, deterministic: bool = False, fp8_rows: bool = False) -> DeepseekMla:
    """Return a small model with an MTP block."""
    config = parse_config(raw_config(variant, num_nextn_predict_layers=1))
    numerics = replace(plain(deterministic), fp8_rows=fp8_rows)
    return filled(config, numerics, random_checkpoint(config), with_mtp=True)


def trainer_model(variant: str, *, seed: int = 0, **settings: Any) -> Any:
    """Build transformers' own model in float32, with random weights that let every part of it affect the output."""
    kind, sizes = VARIANTS[variant]
    return tiny.trainer_model({**sizes, **settings}, seed=seed, kind=kind)


def their_config(model: Any, variant: str) -> dict[str, Any]:
    """Return what ``config.json`` of transformers' model says, under the variant's own name."""
    raw = dict(model.config.to_dict())
    return raw | {"model_type": "kimi_k2"} if variant == "kimi_k2" else raw


def official(named: Mapping[str, Tensor], raw: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors by transformers' names under the official ones."""
    return official_names(named, mla_names(raw))


def filled(config: MlaConfig, numerics: Numerics, checkpoint: Mapping[str, Tensor], *, with_mtp: bool = False) -> DeepseekMla:
    """Return a model with every tensor of a checkpoint in its slot, and NaN where none came."""
    return fill(poison(DeepseekMla(config, numerics, with_mtp=with_mtp)), checkpoint)


def our_model(theirs: Any, variant: str, numerics: Numerics) -> DeepseekMla:
    """Return our model with the weights of transformers' one."""
    raw = their_config(theirs, variant)
    return filled(parse_config(raw), numerics, official(theirs.state_dict(keep_vars=True), raw))


def write_random_model(folder: Path, variant: str, *, seed: int = 0, **settings: Any) -> Path:
    """Write a checkpoint of random weights under the release's names, and a tokenizer of its size.

    Args:
        folder: Where.
        variant: Of ``VARIANTS``.
        seed: Of the weights.
        settings: Others of its config; matrices are stored in ``torch_dtype``, or in FP8 if ``quantization_config`` says so.
    """
    raw = raw_config(variant, **settings)
    config, stored = parse_config(raw), getattr(torch, raw["torch_dtype"])
    if config.quantized:
        tensors = quantized_checkpoint(config, powers=raw["quantization_config"].get("scale_fmt") == "ue8m0", seed=seed)
    else:
        specs = official_shapes(config)
        tensors = {
            name: t if specs[name].kind == "f32" else t.to(stored) for name, t in random_checkpoint(config, seed=seed).items()
        }
    write_checkpoint(folder, raw, release_names(tensors, raw))
    return write_tokenizer(folder, raw["vocab_size"])


def release_names(named: Mapping[str, Tensor], raw: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names that releases give them."""
    for name, tensor in named.items():
        stack, _, rest = name.partition(".")
        if stack in ("layers", "mtp"):
            number, _, rest = rest.partition(".")
            layer = int(number) + (raw["num_hidden_layers"] if stack == "mtp" else 0)
            for ours, theirs in _RELEASE_NAMES:
                rest = rest.replace(ours, theirs)
            yield f"model.layers.{layer}.{rest}", tensor
        else:
            yield {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}[stack] + "." + rest, tensor


# With blocks of 128 x 128, some of them ragged: a latent row has 160 channels.
BLOCKS: Mapping[str, Any] = {
    **V3,
    "vocab_size": 96,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def quantized_checkpoint(config: MlaConfig, *, powers: bool, seed: int = 0) -> dict[str, Tensor]:
    """Return a random checkpoint by official names, its matrices in FP8 with a float32 scale for each block of 128 x 128.

    Args:
        config: With sizes of about a block.
        powers: Scales are powers of two.
        seed: Of the weights.
    """
    tensors, specs = random_checkpoint(config, seed=seed), official_shapes(config)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if specs[name].kind not in ("dense", "expert"):
            found[name] = tensor if specs[name].kind == "f32" else tensor.bfloat16()
            continue
        scale = torch.empty(*(-(-size // 128) for size in tensor.shape))
        codes = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
        for i, j in product(*map(range, scale.shape)):
            part = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scale[i, j] = tensor[part].abs().max() / 448
            if powers:
                scale[i, j] = 2.0 ** torch.ceil(torch.log2(scale[i, j]))
            codes[part] = (tensor[part] / scale[i, j]).to(torch.float8_e4m3fn)
        found |= {name: codes, name.removesuffix("weight") + "scale": scale}
    return found


def dequantized(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint with each number times the scale of its block, ``codes[o, i] * scale[o // 128, i // 128]``."""
    found = {name: tensor.float() for name, tensor in checkpoint.items() if not name.endswith(".scale")}
    for name, tensor in found.items():
        scale = checkpoint.get(name.removesuffix("weight") + "scale")
        if scale is not None:
            out, into = (torch.arange(size) // 128 for size in tensor.shape)
            found[name] = tensor * scale.float()[out[:, None], into]
    return found
