"""The shape of an MLA model, from ``config.json`` as released or as transformers writes it (MLA specification 1).

One architecture under several names: V2-Lite, V2 and Coder-V2; V3, R1 and V3.1; Kimi K2's text model; V3.2 and GLM-5, which
select tokens (DSA).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from dsv4lite.errors import ConfigError, UnsupportedError, shown
from dsv4lite.models.config import DrafterKind, ModelConfig
from dsv4lite.models.keys import MOST_EXPERTS, MOST_MATRICES, Keys, Yarn, list_of, mapping, token_id

MODEL_TYPES: Mapping[str, str] = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}
"""The architecture that configs of each ``model_type`` name."""
_SELECTING = ("deepseek_v32", "glm_moe_dsa")

_SCALE_FORMATS = (None, "float", "ue8m0")  # V3's releases lack the key; transformers writes "float"
# (scoring_func, topk_method) that each family may have; the first pair is the default.
_SOFTMAX = (("softmax", "greedy"), ("softmax", "group_limited_greedy"))
_SIGMOID = (("sigmoid", "noaux_tc"),)
_KEYS = Keys(
    family="MLA",
    numbers={
        "kv_lora_rank": ("kv_lora_rank", 1 << 17),  # in brackets the largest release's: (512)
        "qk_nope_head_dim": ("nope_dim", 8192),  # (192)
        "v_head_dim": ("value_dim", 8192),  # (256)
        "intermediate_size": ("dense_width", 1 << 20),  # (18,432)
        "n_group": ("expert_groups", MOST_EXPERTS),  # (8)
        "topk_group": ("top_groups", MOST_EXPERTS),  # (4)
    },
    most={"original_max_position_embeddings": 1 << 24, "first_k_dense_replace": 256, "moe_layer_freq": 256},
    may_be_zero=("first_k_dense_replace", "num_nextn_predict_layers"),
    above_one=("rope_theta",),
    fixed={"rope_interleave": True},
    fixed_quantization={},
    fixed_yarn={"truncate": True, "attention_factor": None},
    others=(
        *("first_k_dense_replace", "moe_layer_freq", "mlp_layer_types", "layer_types", "indexer_types", "index_topk_freq"),
        *("index_topk_pattern", "indexer_rope_interleave", "scoring_func", "topk_method", "norm_topk_prob", "num_key_value_heads"),
        *("rope_scaling", "rope_parameters", "quantization_config", "architectures", "model_type", "bos_token_id", "eos_token_id"),
    ),
    ignored=("qk_head_dim", "head_dim", "attention_dropout", "pad_token_id", "num_local_experts", "num_experts", "ep_size"),
)
_LAYER_KINDS = ("dense", "sparse")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig(ModelConfig):
    """Sizes of an MLA model.

    Attributes:
        q_lora_rank: Rank of the query latent; 0 if queries are projected directly.
        kv_lora_rank: Rank of the latent that keys and values of all heads share.
        nope_dim, rope_dim: Channels of a query and key without and with rotary position.
        value_dim: Channels of a value.
        dense_width: Hidden channels of a layer without experts.
        routed: Which layers have experts.
        num_mtp_layers: MTP blocks, which have experts.
        index_heads, index_dim, index_topk: Heads and channels of the indexer, and tokens that it selects; 0 without one.
        index_interleaved: The indexer rotates pairs of neighbouring channels; otherwise pairs that are ``rope_dim / 2`` apart.
    """

    num_attention_heads: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    dense_width: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    norm_eps: float
    routed: tuple[bool, ...]
    q_lora_rank: int = 0
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    num_mtp_layers: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    index_interleaved: bool = False
    swiglu_limit: float = math.inf
    expert_format: Literal["fp4", "fp8"] = "fp8"
    byte_scales: bool = False

    def __post_init__(self) -> None:
        groups, experts = self.expert_groups, self.num_experts
        if self.experts_per_token > experts:
            raise ConfigError(f"num_experts_per_tok={self.experts_per_token} exceeds n_routed_experts={experts}")
        if experts % groups or self.top_groups > groups:
            raise ConfigError(
                f"n_group={groups} must divide n_routed_experts={experts}, and topk_group={self.top_groups} not exceed it"
            )
        if groups > self.top_groups and (experts // groups < 2 or self.top_groups * experts // groups < self.experts_per_token):
            raise ConfigError(
                f"n_group={groups}, topk_group={self.top_groups}: groups of {experts // groups} experts are too small "
                f"for num_experts_per_tok={self.experts_per_token}"
            )
        if (self.num_hidden_layers + self.num_mtp_layers) * experts > MOST_MATRICES:
            raise ConfigError(f"n_routed_experts={experts} in {self.num_hidden_layers} layers: more than {MOST_MATRICES} in all")
        if self.rope_dim % 2:
            raise ConfigError(f"qk_rope_head_dim={self.rope_dim} must be even")
        if self.selects and (self.rope_dim > self.index_dim or self.index_dim & (self.index_dim - 1)):
            raise UnsupportedError(
                f"index_head_dim={self.index_dim} must be a power of two for the Hadamard transform, "
                f"and at least qk_rope_head_dim={self.rope_dim}"
            )

    @property
    def selects(self) -> bool:
        """Whether an indexer selects the tokens that a token attends to."""
        return self.index_topk > 0

    @property
    def most_unselected(self) -> int:
        return self.index_topk if self.selects else self.max_positions

    @property
    def selection(self) -> tuple[int, int, int]:
        return self.num_hidden_layers if self.selects else 0, self.index_topk, 1

    @property
    def row_width(self) -> int:
        """Channels of a latent row: the latent, then the rotary channels of the key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def attention_scale(self) -> float:
        """Factor of attention's logits."""
        scale = float((self.nope_dim + self.rope_dim) ** -0.5)
        return scale if self.yarn is None else scale * self.yarn.magnitude(self.yarn.mscale_all_dim) ** 2

    @property
    def rotary_scale(self) -> float:
        """Factor of cosines and sines."""
        yarn = self.yarn
        return 1.0 if yarn is None else yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)

    @property
    def drafter(self) -> DrafterKind | None:
        return "mtp" if self.num_mtp_layers else None

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has routed experts; MTP blocks, numbered after the hidden layers, do."""
        return layer >= self.num_hidden_layers or self.routed[layer]


def parse_config(raw: Mapping[str, Any]) -> MlaConfig:
    """Read the ``config.json`` of an MLA model.

    Unknown keys are ignored, except those that look like a misspelling of a key that is read.

    Raises:
        ConfigError: A key is missing, misspelled, of the wrong type or contradictory.
        UnsupportedError: The config describes another model, or a variant that no release has.
    """
    kind = _model_type(raw)
    quantized, scale_format = _KEYS.check(raw), mapping(raw, "quantization_config").get("scale_fmt")
    if scale_format not in _SCALE_FORMATS:
        raise UnsupportedError(f"quantization_config.scale_fmt={shown(scale_format)}: known are 'float' and 'ue8m0'")
    settings = _KEYS.settings(raw)
    settings.update(_rope(raw))
    if kind not in _SELECTING:
        settings = {name: value for name, value in settings.items() if not name.startswith("index_")}
    _KEYS.require(settings, _REQUIRED | (_REQUIRED_TO_SELECT if kind in _SELECTING else frozenset()))
    heads = settings["num_attention_heads"]
    if raw.get("num_key_value_heads") not in (None, heads):
        raise UnsupportedError(f"num_key_value_heads={shown(raw['num_key_value_heads'])}: it must be num_attention_heads={heads}")
    settings.update(_routing(raw, kind))
    if kind in _SELECTING:
        settings["index_interleaved"] = _interleaved(raw, kind)
    vocab_size = settings["vocab_size"]
    return MlaConfig(
        **settings,
        routed=_routed(raw, settings["num_hidden_layers"]),
        quantized=quantized,
        bos_token_id=token_id(raw, "bos_token_id", vocab_size, default=0),
        eos_token_id=token_id(raw, "eos_token_id", vocab_size, default=1),
    )


_REQUIRED = frozenset(field.name for field in fields(MlaConfig) if field.default is MISSING)
_REQUIRED_TO_SELECT = frozenset(("q_lora_rank", "index_heads", "index_dim", "index_topk"))


def _model_type(raw: Mapping[str, Any]) -> str:
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise UnsupportedError(f"model_type={shown(kind)} is not supported; known are {', '.join(MODEL_TYPES)}")
    architectures = list_of(raw, "architectures", str) or [MODEL_TYPES[kind]]
    if MODEL_TYPES[kind] not in architectures:
        raise UnsupportedError(f"architectures={shown(architectures)}: model_type={kind!r} is supported as {MODEL_TYPES[kind]}")
    return kind


def _routing(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return how experts are scored and chosen; configs by transformers lack these keys, so they have defaults."""
    rules = _SOFTMAX if kind == "deepseek_v2" else _SIGMOID
    scoring, method = raw.get("scoring_func") or rules[0][0], raw.get("topk_method") or rules[0][1]
    if (scoring, method) not in rules:
        raise UnsupportedError(
            f"scoring_func={shown(scoring)} with topk_method={shown(method)}: {kind} has {' or '.join(map(str, rules))}"
        )
    normed = raw.get("norm_topk_prob")
    if normed not in (None, True, False):
        raise ConfigError(f"norm_topk_prob={shown(normed)} must be true or false")
    if scoring == "softmax" and normed:
        raise UnsupportedError("norm_topk_prob=True with softmax scores: implementations disagree about the scale of the weights")
    sigmoid = scoring == "sigmoid"
    rule = {"scoring": scoring, "biased": sigmoid, "renormalize": sigmoid and normed is not False}
    return rule | ({"expert_groups": 1, "top_groups": 1} if method == "greedy" else {})


def _routed(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return which layers have experts."""
    kinds = list_of(raw, "mlp_layer_types", str)
    if kinds is not None:
        if len(kinds) != layers or any(kind not in _LAYER_KINDS for kind in kinds):
            raise ConfigError(f"mlp_layer_types={shown(kinds)} must have {layers} entries, each one of {', '.join(_LAYER_KINDS)}")
        return tuple(kind == "sparse" for kind in kinds)
    first = 0 if raw.get("first_k_dense_replace") is None else _KEYS.integer(raw, "first_k_dense_replace")
    every = 1 if raw.get("moe_layer_freq") is None else _KEYS.integer(raw, "moe_layer_freq")
    return tuple(layer >= first and layer % every == 0 for layer in range(layers))


def _interleaved(raw: Mapping[str, Any], kind: str) -> bool:
    """Return ``index_interleaved``; raise ``UnsupportedError`` if layers reuse the selection of others."""
    key = "index_topk_pattern" if raw.get("indexer_types") is None else "indexer_types"
    kinds = list(raw[key]) if isinstance(raw.get(key), str) else list_of(raw, key, str)
    shared = [f"{key} has {shown(kind)}" for kind in kinds or () if kind not in ("full", "F")]
    if kinds is None and raw.get("index_topk_freq") not in (None, 1):  # the list takes precedence
        shared.append(f"index_topk_freq={shown(raw['index_topk_freq'])}")
    if shared:
        raise UnsupportedError(f"{shared[0]}: layers that reuse another layer's selection are not supported")
    given = raw.get("indexer_rope_interleave")
    if given not in (None, True, False):
        raise ConfigError(f"indexer_rope_interleave={shown(given)} must be true or false")
    return kind == "glm_moe_dsa" if given is None else bool(given)


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``rope_scaling`` or ``rope_parameters``; a top-level ``rope_theta`` takes precedence."""
    scaling, nested = mapping(raw, "rope_scaling"), mapping(raw, "rope_parameters")
    out: dict[str, Any] = {}
    for part in (raw, scaling, nested):
        if part.get("rope_theta") is not None:
            out["rope_theta"] = _KEYS.real(part, "rope_theta")
            break
    yarn = _KEYS.yarn(scaling or nested)
    return out if yarn is None else {**out, "yarn": yarn}
