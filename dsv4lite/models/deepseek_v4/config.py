"""The shape of a V4 model, read from ``config.json`` in the release form or in the one that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from dsv4lite.errors import ConfigError, UnsupportedError, shown
from dsv4lite.models.config import DrafterKind, ModelConfig
from dsv4lite.models.keys import MOST_EXPERTS, MOST_MATRICES, Keys, Yarn, list_of, mapping, token_id
from dsv4lite.paging import PAGE_TOKENS

LayerKind = Literal["sliding", "csa", "hca"]

ARCHITECTURE, MODEL_TYPE = "DeepseekV4ForCausalLM", "deepseek_v4"

_DSPARK = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
_DSPARK_STAGES = "n_mtp_layers"
_MOST_DSPARK_ROWS = 64  # a block lies in at most two window pages
_STRUCTURED = (
    *("compress_ratios", "layer_types", "compress_rates", "num_hash_layers", "mlp_layer_types"),
    *("rope_scaling", "rope_parameters", "partial_rotary_factor", "num_local_experts", "quantization_config"),
    *("architectures", "model_type", "bos_token_id", "eos_token_id"),
)
# Keys that change nothing here, listed because they could be taken for misspellings of the keys above.
_IGNORED = (
    *("intermediate_size", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "kv_lora_rank", "attention_dropout", "expert_dtype"),
    *("pad_token_id", "sep_token_id", "is_encoder_decoder"),
)
_KEYS = Keys(
    family="V4",
    numbers={
        "head_dim": ("head_dim", 8192),  # in brackets those of the largest release, V4-Pro: (512)
        "o_groups": ("o_groups", 4096),  # (16)
        "o_lora_rank": ("o_lora_rank", 1 << 17),  # (1,024)
        "swiglu_limit": ("swiglu_limit", None),
        "sliding_window": ("window", 1 << 16),  # (128)
        "hc_mult": ("streams", 64),  # (4)
        "hc_sinkhorn_iters": ("sinkhorn_iters", 256),  # (20)
        "hc_eps": ("hc_eps", None),
        "compress_rope_theta": ("compress_rope_theta", None),
    },
    most={
        "num_local_experts": MOST_EXPERTS,
        "original_max_position_embeddings": 1 << 24,
        "n_mtp_layers": 64,  # (3)
        "num_hash_layers": 256,  # (3)
        "dspark_markov_rank": 1 << 17,  # (512)
    },
    may_be_zero=("num_nextn_predict_layers", "num_hash_layers", "dspark_noise_token_id"),
    above_one=("rope_theta", "compress_rope_theta"),  # YaRN divides by their logarithm
    fixed={"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "num_key_value_heads": 1},
    fixed_quantization={"scale_fmt": "ue8m0"},
    fixed_yarn={"truncate": True, "attention_factor": 1.0},  # which transformers writes
    others=(*_STRUCTURED, *_DSPARK, _DSPARK_STAGES),
    ignored=_IGNORED,
)
_KIND_OF = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_YARN = Yarn(factor=16.0, original_positions=65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """The block drafter of refreshed releases.

    Attributes:
        block: Rows of a draft, the newest token and noise tokens; one pass drafts as many tokens.
        noise_token_id: Input in place of tokens that are not known yet.
        targets: Hidden layers whose streams it reads, ascending.
        markov_rank: Rank of the bias that each token adds to the logits of the next one.
        stages: Number of its layers.
    """

    block: int
    noise_token_id: int
    targets: tuple[int, ...]
    markov_rank: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Config(ModelConfig):
    """Sizes of a DeepSeek-V4 model.

    Attributes:
        ratios: Compression of each layer, those of the drafter last: 0 (sliding window only), 4 (CSA) or another number (HCA).
        num_hash_layers: Leading layers that choose experts by token id.
        num_mtp_layers: MTP blocks; a refreshed release has none.
        dspark: The drafter of a refreshed release.
    """

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
    num_mtp_layers: int = 1
    route_scale: float = 1.5
    window: int = 128
    streams: int = 4
    sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Yarn = _YARN
    max_positions: int = 1048576
    bos_token_id: int | None = 0
    eos_token_id: int | None = 1
    dspark: DSparkConfig | None = None

    def __post_init__(self) -> None:
        need = self.num_hidden_layers + self.num_draft_layers
        if len(self.ratios) != need:
            raise ConfigError(
                f"compress_ratios has {len(self.ratios)} entries; {self.num_hidden_layers} layers "
                f"and {self.num_draft_layers} of the drafter need {need}"
            )
        if any(self.ratios[self.num_hidden_layers :]):
            last = self.ratios[self.num_hidden_layers :]
            raise UnsupportedError(f"MTP blocks and drafters are sliding-window only; compress_ratios ends in {shown(last)}")
        if len(self.ratios) * self.num_experts > MOST_MATRICES:
            raise ConfigError(
                f"{len(self.ratios)} layers with n_routed_experts={self.num_experts} have more than {MOST_MATRICES} experts in all"
            )
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
        # A page must hold whole groups: a group's entry lies in the page of its tokens.
        uneven = [ratio for ratio in self.ratios if ratio and PAGE_TOKENS % ratio]
        if uneven:
            raise UnsupportedError(
                f"compress_ratios has {shown(uneven[0])}: it must divide {PAGE_TOKENS}, the tokens of a cache page"
            )

    def kind(self, layer: int) -> LayerKind:
        """Return the attention kind of a layer; MTP blocks follow the hidden layers."""
        ratio = self.ratios[layer]
        return "sliding" if ratio == 0 else "csa" if ratio == 4 else "hca"

    @property
    def most_unselected(self) -> int:
        """Length up to which a sequence needs no selection: each of its tokens attends to all entries that it sees."""
        return 4 * (self.index_topk + 1) - 1 if 4 in self.ratios else self.max_positions

    @property
    def selection(self) -> tuple[int, int, int]:
        return sum(self.kind(layer) == "csa" for layer in range(self.num_hidden_layers)), self.index_topk, 4

    def hashed(self, layer: int) -> bool:
        """Return whether a layer chooses its experts by token id."""
        return layer < self.num_hash_layers

    @property
    def num_draft_layers(self) -> int:
        """Layers of the drafter, after the hidden ones."""
        return self.num_mtp_layers if self.dspark is None else self.dspark.stages

    @property
    def drafter(self) -> DrafterKind | None:
        return None if not self.num_draft_layers else "mtp" if self.dspark is None else "dspark"

    @property
    def draft_block(self) -> int:
        return 0 if self.dspark is None else self.dspark.block

    @property
    def nope_dim(self) -> int:
        """Channels of a head without position."""
        return self.head_dim - self.rope_dim


def parse_config(raw: Mapping[str, Any]) -> V4Config:
    """Read a V4 ``config.json``, in the release form or in transformers' form (spec 1.2).

    Unknown keys are ignored, except those that look like a misspelling of a key that is read.

    Raises:
        ConfigError: A key is missing, misspelled, of the wrong type or contradictory.
        UnsupportedError: The config describes another model, or a variant that V4 does not have.
    """
    _check_architecture(raw)
    quantized = _KEYS.check(raw)
    settings = _KEYS.settings(raw)
    if raw.get("qk_rope_head_dim") is None and raw.get("partial_rotary_factor") is not None:
        settings["rope_dim"] = round(settings.get("head_dim", 0) * _KEYS.real(raw, "partial_rotary_factor"))
    if raw.get("n_routed_experts") is None and raw.get("num_local_experts") is not None:
        settings["num_experts"] = _KEYS.integer(raw, "num_local_experts")
    _KEYS.require(settings, _REQUIRED)
    settings.update(_rope(raw))
    settings.update(_hash_layers(raw))

    layers = settings["num_hidden_layers"]
    ratios = _ratios(raw, layers)
    # transformers never writes MTP blocks, even if its config counts them; in refreshed releases that key counts DSpark instead.
    dspark = _dspark(raw, layers)
    no_mtp = dspark is not None or raw.get("compress_ratios") is None
    settings["num_mtp_layers"] = mtp = 0 if no_mtp else settings.get("num_mtp_layers", max(0, len(ratios) - layers))
    drafting = mtp if dspark is None else dspark.stages
    if len(ratios) == layers:
        ratios += [0] * drafting
    vocab_size = settings["vocab_size"]
    return V4Config(
        **settings,
        ratios=tuple(ratios[: layers + drafting]),
        quantized=quantized,
        bos_token_id=token_id(raw, "bos_token_id", vocab_size, default=0),
        eos_token_id=token_id(raw, "eos_token_id", vocab_size, default=1),
        dspark=dspark,
    )


_REQUIRED = frozenset(field.name for field in fields(V4Config) if field.default is MISSING)


def _check_architecture(raw: Mapping[str, Any]) -> None:
    architectures = list_of(raw, "architectures", str) or [ARCHITECTURE]
    if ARCHITECTURE not in architectures or raw.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        given = f"architectures={shown(architectures)}, model_type={shown(raw.get('model_type'))}"
        raise UnsupportedError(f"{given}: only {ARCHITECTURE} ({MODEL_TYPE!r}) is supported")


def _ratios(raw: Mapping[str, Any], layers: int) -> list[int]:
    given = list_of(raw, "compress_ratios", int)
    if given is not None:
        if any(ratio < 0 for ratio in given):
            raise ConfigError(f"compress_ratios={shown(given)} must not be negative")
        return given
    kinds = list_of(raw, "layer_types", str)
    if kinds is None:
        raise ConfigError("config.json has neither compress_ratios nor layer_types; the layer pattern cannot be guessed")
    if len(kinds) < layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries for num_hidden_layers={layers}")
    given_rates = mapping(raw, "compress_rates")
    rates = {**_KIND_OF, **{kind: _KEYS.integer(given_rates, kind) for kind in given_rates if _KIND_OF.get(kind)}}
    for kind in kinds:
        if kind not in _KIND_OF:
            raise UnsupportedError(f"layer type {shown(kind)} is not supported; known are {', '.join(_KIND_OF)}")
    if rates["compressed_sparse_attention"] != 4 or rates["heavily_compressed_attention"] in (0, 4):
        raise UnsupportedError(f"compress_rates={dict(rates)!r}: compressed sparse attention is the one with rate 4")
    return [0 if kind == "sliding_attention" else rates[kind] for kind in kinds[:layers]]


def _dspark(raw: Mapping[str, Any], layers: int) -> DSparkConfig | None:
    """Return the drafter of a refreshed release, in which ``num_nextn_predict_layers`` is 1 and does not describe it."""
    missing = [key for key in _DSPARK if raw.get(key) is None]
    if len(missing) == len(_DSPARK):
        return None
    if missing:
        raise ConfigError(f"config.json describes a DSpark drafter, but lacks {', '.join(missing)}")
    targets = list_of(raw, "dspark_target_layer_ids", int) or []
    if not targets or targets != sorted(set(targets)) or targets[0] < 0 or targets[-1] >= layers:
        raise ConfigError(f"dspark_target_layer_ids={shown(targets)} must be ascending layers of {layers}")
    block, vocab_size = _KEYS.integer(raw, "dspark_block_size"), _KEYS.integer(raw, "vocab_size")
    noise = _KEYS.integer(raw, "dspark_noise_token_id")
    if noise >= vocab_size:
        raise ConfigError(f"dspark_noise_token_id={noise} must be below vocab_size={vocab_size}")
    if block > _MOST_DSPARK_ROWS:
        raise UnsupportedError(f"dspark_block_size={block}: a block has at most {_MOST_DSPARK_ROWS} rows")
    return DSparkConfig(
        block=block,
        noise_token_id=noise,
        targets=tuple(targets),
        markov_rank=_KEYS.integer(raw, "dspark_markov_rank"),
        stages=len(targets) if raw.get(_DSPARK_STAGES) is None else _KEYS.integer(raw, _DSPARK_STAGES),
    )


def _hash_layers(raw: Mapping[str, Any]) -> dict[str, int]:
    if raw.get("num_hash_layers") is not None:
        return {"num_hash_layers": _KEYS.integer(raw, "num_hash_layers")}
    kinds = list_of(raw, "mlp_layer_types", str)
    if kinds is None:
        return {}
    count = sum(kind == "hash_moe" for kind in kinds)
    if any(kind not in ("hash_moe", "moe") for kind in kinds) or "hash_moe" in kinds[count:]:
        raise UnsupportedError(f"mlp_layer_types={shown(kinds)}: V4 has hash_moe layers first, then only moe")
    return {"num_hash_layers": count}


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of ``rope_parameters``; keys of the release form take precedence."""
    nested = mapping(raw, "rope_parameters")
    main, compress = mapping(nested, "main"), mapping(nested, "compress")
    if not (main or compress):  # transformers takes them for those of compressed entries, and ignores a base in them
        compress = {key: value for key, value in nested.items() if key != "rope_theta"}
    out: dict[str, Any] = {}
    for key, part in (("rope_theta", main), ("compress_rope_theta", compress)):
        if raw.get(key) is None and part.get("rope_theta") is not None:
            out[key] = _KEYS.real(part, "rope_theta")
    if _KEYS.yarn(main) is not None:
        raise UnsupportedError("rope_parameters.main has rope_type='yarn'; V4 has it in layers with compressed entries only")
    yarn = _KEYS.yarn(mapping(raw, "rope_scaling") or compress)
    return {**out, "yarn": yarn or replace(_YARN, factor=1.0)}
