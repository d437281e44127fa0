"""The shape of a V4 model, read from ``config.json`` in the release form or in the one that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsv4lite.errors import ConfigError, UnsupportedError, near_match

LayerKind = Literal["sliding", "csa", "hca"]

# Keys that carry nothing this library needs; everything else that is unknown is reported.
_IGNORED = frozenset(
    """architectures model_type torch_dtype dtype transformers_version initializer_range hidden_act attention_bias attention_dropout
    num_key_value_heads tie_word_embeddings use_cache pad_token_id bos_token_id eos_token_id norm_topk_prob scoring_func topk_method
    n_group topk_group quantization_config expert_dtype auto_map _name_or_path router_aux_loss_coef output_router_logits router_jitter_noise
    num_local_experts partial_rotary_factor default_theta rope_interleave attention_factor aux_loss_alpha seq_aux moe_layer_freq
    first_k_dense_replace return_dict output_hidden_states output_attentions chunk_size_feed_forward is_encoder_decoder
    id2label label2id problem_type license v_head_dim kv_lora_rank rope_parameters layer_types compress_rates mlp_layer_types
    rope_scaling compress_ratios num_hash_layers pretraining_tp ep_size scale_fmt mlp_bias keys_to_ignore_at_inference name""".split()
)
_RENAMED = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads", "head_dim": "head_dim", "qk_rope_head_dim": "rope_dim", "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups", "o_lora_rank": "o_lora_rank", "n_routed_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "num_shared_experts", "moe_intermediate_size": "expert_width", "routed_scaling_factor": "route_scale",
    "swiglu_limit": "swiglu_limit", "sliding_window": "window", "index_n_heads": "index_heads", "index_head_dim": "index_dim",
    "index_topk": "index_topk", "hc_mult": "streams", "hc_sinkhorn_iters": "sinkhorn_iters", "hc_eps": "hc_eps",
    "rms_norm_eps": "norm_eps", "rope_theta": "rope_theta", "compress_rope_theta": "compress_rope_theta",
    "max_position_embeddings": "max_positions", "num_nextn_predict_layers": "num_mtp_layers",
}  # fmt: skip
_DSPARK = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
_KIND_OF = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Frequency blend of long-context layers; there is no magnitude factor (spec 1.4)."""

    factor: float = 16.0
    original_positions: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Config:
    """Sizes of a DeepSeek-V4 model.

    Attributes:
        ratios: Compression of each layer, MTP blocks last: 0 (sliding window only), 4 (CSA) or another number (HCA).
        num_hash_layers: Leading layers that choose experts by token id.
        quantized: The checkpoint's matrices are FP8 or FP4, so its arithmetic includes the roundings of spec chapter 4.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    ratios: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    num_hash_layers: int = 3
    num_shared_experts: int = 1
    num_mtp_layers: int = 1
    route_scale: float = 1.5
    swiglu_limit: float = 10.0
    window: int = 128
    streams: int = 4
    sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Yarn = Yarn()
    max_positions: int = 1048576
    quantized: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | None = 1
    dspark: bool = False

    def __post_init__(self) -> None:
        need = self.num_hidden_layers + self.num_mtp_layers
        if len(self.ratios) != need:
            raise ConfigError(
                f"compress_ratios has {len(self.ratios)} entries; {self.num_hidden_layers} layers and {self.num_mtp_layers} MTP blocks need {need}"
            )
        if any(self.ratios[self.num_hidden_layers :]):
            raise UnsupportedError(f"MTP blocks are sliding-window only; compress_ratios ends in {self.ratios[self.num_hidden_layers :]}")
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(f"num_attention_heads={self.num_attention_heads} is not a multiple of o_groups={self.o_groups}")
        if self.rope_dim % 2 or not 0 < self.rope_dim < self.head_dim:
            raise ConfigError(f"qk_rope_head_dim={self.rope_dim} must be even and below head_dim={self.head_dim}")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(f"num_experts_per_tok={self.experts_per_token} exceeds n_routed_experts={self.num_experts}")
        if self.num_shared_experts != 1:
            raise UnsupportedError(f"n_shared_experts={self.num_shared_experts}: V4 has exactly one shared expert")
        if self.index_dim & (self.index_dim - 1):
            raise UnsupportedError(f"index_head_dim={self.index_dim} must be a power of two for the Hadamard transform")

    def kind(self, layer: int) -> LayerKind:
        """Return the attention kind of a layer; MTP blocks follow the hidden layers."""
        ratio = self.ratios[layer]
        return "sliding" if ratio == 0 else "csa" if ratio == 4 else "hca"

    def hashed(self, layer: int) -> bool:
        """Return whether a layer chooses its experts by token id."""
        return layer < self.num_hash_layers

    @property
    def nope_dim(self) -> int:
        """Channels of a head without position."""
        return self.head_dim - self.rope_dim


def _ratios(raw: Mapping[str, Any], layers: int) -> list[int]:
    if raw.get("compress_ratios") is not None:
        return [int(r) for r in raw["compress_ratios"]]
    if raw.get("layer_types") is None:
        raise ConfigError("config has neither compress_ratios nor layer_types; the layer pattern cannot be guessed")
    rates = {**_KIND_OF, **raw.get("compress_rates", {})}
    for kind in raw["layer_types"]:
        if kind not in _KIND_OF:
            raise UnsupportedError(f"unknown layer type {kind!r}{near_match(kind, _KIND_OF)}")
    return [0 if kind == "sliding_attention" else int(rates[kind]) for kind in raw["layer_types"][:layers]]


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    nested = raw.get("rope_parameters") or {}
    main, compress = nested.get("main", {}), nested.get("compress", {})
    scaling = raw.get("rope_scaling") or compress
    out: dict[str, Any] = {}
    if "rope_theta" not in raw and "rope_theta" in main:
        out["rope_theta"] = float(main["rope_theta"])
    if "compress_rope_theta" not in raw and "rope_theta" in compress:
        out["compress_rope_theta"] = float(compress["rope_theta"])
    kind = scaling.get("type", scaling.get("rope_type", "default")) if scaling else "default"
    if kind == "yarn":
        out["yarn"] = Yarn(
            factor=float(scaling["factor"]),
            original_positions=int(scaling["original_max_position_embeddings"]),
            beta_fast=float(scaling.get("beta_fast") or 32),
            beta_slow=float(scaling.get("beta_slow") or 1),
        )
    elif kind == "default":
        out["yarn"] = Yarn(factor=1.0)
    else:
        raise UnsupportedError(f"rope scaling {kind!r} is not supported; V4 uses 'yarn'")
    return out


def parse_config(raw: Mapping[str, Any]) -> V4Config:
    """Read a V4 ``config.json``, in the release form or in transformers' form (spec 1.2).

    Raises:
        ConfigError: A key is missing, unknown (with a near match) or contradictory.
        UnsupportedError: The values describe something that V4 is not.
    """
    known = set(_RENAMED) | _IGNORED | set(_DSPARK)
    for key in raw:
        if key not in known and not key.startswith("_"):
            hint = near_match(key, _RENAMED)
            if hint:
                raise ConfigError(f"unknown config key {key!r}{hint}")
    for key, fixed in (("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"), ("tie_word_embeddings", False), ("hidden_act", "silu")):
        if raw.get(key, fixed) != fixed:
            raise UnsupportedError(f"{key}={raw[key]!r}: V4 has {fixed!r}")
    settings: dict[str, Any] = {ours: raw[theirs] for theirs, ours in _RENAMED.items() if raw.get(theirs) is not None}
    if "rope_dim" not in settings and "partial_rotary_factor" in raw:
        settings["rope_dim"] = round(settings["head_dim"] * raw["partial_rotary_factor"])
    if "num_experts" not in settings and "num_local_experts" in raw:
        settings["num_experts"] = raw["num_local_experts"]
    missing = [k for k, v in _RENAMED.items() if v in _REQUIRED and v not in settings]
    if missing:
        raise ConfigError(f"config lacks {', '.join(missing)}")
    layers = settings["num_hidden_layers"]
    ratios = _ratios(raw, layers)
    dspark = any(raw.get(key) is not None for key in _DSPARK)
    # A trainer's config has no MTP; a refreshed release lists its drafter's layers, which are not MTP blocks.
    mtp = 0 if dspark else settings.get("num_mtp_layers", max(0, len(ratios) - layers))
    if len(ratios) == layers:
        mtp = mtp if raw.get("layer_types") is None else 0
        ratios = ratios + [0] * mtp
    settings["num_mtp_layers"] = mtp
    if raw.get("num_hash_layers") is not None:
        settings["num_hash_layers"] = int(raw["num_hash_layers"])
    elif raw.get("mlp_layer_types") is not None:
        settings["num_hash_layers"] = sum(kind == "hash_moe" for kind in raw["mlp_layer_types"])
    quantization = raw.get("quantization_config") or {}
    if quantization and quantization.get("quant_method", "fp8") != "fp8":
        raise UnsupportedError(f"quant_method={quantization['quant_method']!r} is not supported; V4 checkpoints use 'fp8'")
    eos = raw.get("eos_token_id", 1)
    return V4Config(
        **{k: v for k, v in settings.items() if k not in ("ratios",)},
        **_rope(raw),
        ratios=tuple(ratios[: layers + mtp]),
        quantized=bool(quantization),
        bos_token_id=raw.get("bos_token_id", 0),
        eos_token_id=eos[0] if isinstance(eos, list) else eos,
        dspark=dspark,
    )


_REQUIRED = frozenset(
    """vocab_size hidden_size num_hidden_layers num_attention_heads head_dim rope_dim q_lora_rank o_groups o_lora_rank num_experts
    experts_per_token expert_width index_heads index_dim index_topk""".split()
)
