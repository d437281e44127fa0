"""Reading the keys of a ``config.json``: values within limits, and errors that name the key and say what it must be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dsv4lite.errors import ConfigError, UnsupportedError, shown

MOST_TOKENS = 1 << 23  # of a vocabulary: the sampler's limit
MOST_EXPERTS = 4096  # of a layer
MOST_MATRICES = 1 << 17  # routed experts of all layers together
_MOST_OTHERS = 1 << 31
_LEAST_REAL, _MOST_REAL = 1e-30, 1e30
_MOST_KEYS = 1000

# Keys of every family's configs; see ``Keys.numbers``. In brackets: the value of the largest release.
_NUMBERS: Mapping[str, tuple[str, int | None]] = {
    "vocab_size": ("vocab_size", MOST_TOKENS),  # (163,840)
    "hidden_size": ("hidden_size", 1 << 17),  # (7,168)
    "num_hidden_layers": ("num_hidden_layers", 256),  # (78)
    "num_attention_heads": ("num_attention_heads", 4096),  # (128)
    "qk_rope_head_dim": ("rope_dim", 8192),  # (64)
    "q_lora_rank": ("q_lora_rank", 1 << 17),  # (2,048)
    "n_routed_experts": ("num_experts", MOST_EXPERTS),  # (384)
    "num_experts_per_tok": ("experts_per_token", 64),  # (8)
    "n_shared_experts": ("num_shared_experts", 64),  # (2)
    "moe_intermediate_size": ("expert_width", 1 << 20),  # (3,072)
    "routed_scaling_factor": ("route_scale", None),
    "index_n_heads": ("index_heads", 4096),  # (64)
    "index_head_dim": ("index_dim", 8192),  # (128)
    "index_topk": ("index_topk", 1 << 16),  # (2,048)
    "rms_norm_eps": ("norm_eps", None),
    "rope_theta": ("rope_theta", None),
    "max_position_embeddings": ("max_positions", 1 << 24),  # float32 represents every position up to here (1,048,576)
    "num_nextn_predict_layers": ("num_mtp_layers", 64),  # (1)
}
# Keys of every family that have one value; see ``Keys.fixed``.
_FIXED: Mapping[str, object] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
_FIXED_QUANTIZATION: Mapping[str, object] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "moe_quant_algo": None,  # ModelOpt writes 'NVFP4' for such experts in a model of otherwise FP8 matrices
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN: blended frequencies for long context (V4 specification 1.4, MLA specification 1.3); V4 has no magnitudes.

    Attributes:
        mscale, mscale_all_dim: Cosines and sines are multiplied by ``magnitude(mscale) / magnitude(mscale_all_dim)``, and the
            softmax scale by ``magnitude(mscale_all_dim)`` squared.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def magnitude(self, weight: float) -> float:
        """Return ``0.1 weight ln(factor) + 1``."""
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of one family's configs; the keys that all families have are added to them.

    Attributes:
        family: Name of the family in error messages.
        numbers: For each key that is one number, the field that it sets and the largest accepted integer; ``None`` for a real
            number. Limits are several times the largest release's values: larger numbers mean a broken config.
        most: Limits of integers that are not in ``numbers``.
        may_be_zero: Integers whose least value is 0; that of others is 1.
        above_one: Real numbers that must be above 1; others must be above 0.
        fixed, fixed_quantization, fixed_yarn: Keys of the config, of its ``quantization_config`` and of its rope scaling that
            always have one value; a config may leave them out.
        others: Further keys that are read.
        ignored: Keys that have no effect, listed so that they are not taken for misspellings of keys that are read.
    """

    family: str
    numbers: Mapping[str, tuple[str, int | None]]
    most: Mapping[str, int]
    may_be_zero: tuple[str, ...]
    above_one: tuple[str, ...]
    fixed: Mapping[str, object]
    fixed_quantization: Mapping[str, object]
    fixed_yarn: Mapping[str, object]
    others: tuple[str, ...]
    ignored: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", {**self.numbers, **_NUMBERS})
        object.__setattr__(self, "fixed", {**_FIXED, **self.fixed})
        object.__setattr__(self, "fixed_quantization", {**_FIXED_QUANTIZATION, **self.fixed_quantization})

    def check(self, raw: Mapping[str, Any]) -> bool:
        """Check the spelling of keys and the values of fixed ones; return whether the config has a ``quantization_config``.

        Raises:
            ConfigError: There are too many keys, or one looks like a misspelling of a key that is read.
            UnsupportedError: A fixed key has another value than the family's.
        """
        self._check_spelling(raw)
        quantization = mapping(raw, "quantization_config")
        self._check_fixed("", raw, self.fixed)
        self._check_fixed("quantization_config.", quantization, self.fixed_quantization)
        return bool(quantization)

    def _check_fixed(self, prefix: str, given: Mapping[str, Any], fixed: Mapping[str, object]) -> None:
        for key, value in fixed.items():
            if given.get(key) is not None and given[key] != value:
                raise UnsupportedError(f"{prefix}{key}={shown(given[key])} is not supported; {self.family} has {value!r}")

    def _check_spelling(self, raw: Mapping[str, Any]) -> None:
        if len(raw) > _MOST_KEYS:
            raise ConfigError(f"config.json has {len(raw)} keys; at most {_MOST_KEYS} are read")
        meant = {*self.numbers, *self.fixed, *self.others}
        for key in raw:
            if not isinstance(key, str):
                raise ConfigError(f"key {shown(key)} of the model's config must be a string")
            if key not in meant and len(key) <= 100:  # comparing takes quadratic time
                close = get_close_matches(key, [*meant, *self.ignored], n=1, cutoff=0.8)
                if close and close[0] in meant and key not in self.ignored:
                    raise ConfigError(f"unknown key {key!r} in config.json; did you mean {close[0]!r}?")

    def settings(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the fields in ``numbers``; raise one ``ConfigError`` that names all wrong values."""
        settings: dict[str, Any] = {}
        problems: list[str] = []
        for key, (field, most) in self.numbers.items():
            if raw.get(key) is not None:
                try:
                    settings[field] = self.real(raw, key) if most is None else self.integer(raw, key)
                except ConfigError as error:
                    problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(problems))
        return settings

    def require(self, settings: Mapping[str, Any], fields: Iterable[str]) -> None:
        """Raise a ``ConfigError`` that names the keys of those of these fields that have no value."""
        wanted = set(fields)
        missing = [key for key, (field, _) in self.numbers.items() if field in wanted and field not in settings]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")

    def integer(self, raw: Mapping[str, Any], key: str) -> int:
        """Return an integer within the limits of its key, or raise ``ConfigError``."""
        most = self.numbers[key][1] if key in self.numbers else self.most.get(key)
        value, least, most = raw[key], 0 if key in self.may_be_zero else 1, most or _MOST_OTHERS
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(f"{key}={shown(value)} must be an integer from {least} to {most}")
        return value

    def real(self, raw: Mapping[str, Any], key: str) -> float:
        """Return a real number within the limits of its key, or raise ``ConfigError``."""
        value, above = raw[key], 1 if key in self.above_one else _LEAST_REAL
        if type(value) not in (int, float) or not above < value <= _MOST_REAL:
            raise ConfigError(f"{key}={shown(value)} must be a number above {above} and at most {_MOST_REAL:g}")
        return float(value)

    def yarn(self, scaling: Mapping[str, Any]) -> Yarn | None:
        """Return the YaRN settings among rotary settings; ``None`` for plain rotary embeddings.

        Raises:
            ConfigError: A number is missing or out of range, or two names of the kind differ.
            UnsupportedError: The settings describe another kind of scaling.
        """
        kind, newer = scaling.get("type"), scaling.get("rope_type")
        if kind and newer and kind != newer:
            raise ConfigError(
                f"rope scaling has type={shown(kind)} and rope_type={shown(newer)}; they must be equal, or one left out"
            )
        kind = kind or newer or "default"
        if kind == "default":
            return None
        if kind != "yarn":
            raise UnsupportedError(f"rope scaling {shown(kind)} is not supported; {self.family} uses 'yarn'")
        for key in ("factor", "original_max_position_embeddings"):
            if scaling.get(key) is None:
                raise ConfigError(f"rope scaling 'yarn' lacks {key}")
        self._check_fixed("rope scaling 'yarn' with ", scaling, self.fixed_yarn)
        names = [name for name in ("factor", "beta_fast", "beta_slow") if scaling.get(name) is not None]
        names += [name for name in ("mscale", "mscale_all_dim") if scaling.get(name)]  # 0 means absent
        given = {name: self.real(scaling, name) for name in names}
        if ("mscale" in given) != ("mscale_all_dim" in given) and given.get("mscale") != 1.0:
            problem = f"mscale={shown(scaling.get('mscale'))} and mscale_all_dim={shown(scaling.get('mscale_all_dim'))}"
            reason = "DeepSeek's code and transformers scale the angles differently unless both are above 0, or neither is"
            raise UnsupportedError(f"rope scaling 'yarn' with {problem} is not supported: {reason}")
        return Yarn(original_positions=self.integer(scaling, "original_max_position_embeddings"), **given)


def token_id(raw: Mapping[str, Any], key: str, vocab_size: int, *, default: int) -> int | None:
    """Return a token id, the first one if the value is a list, ``None`` for an explicit null; else raise ``ConfigError``."""
    value = raw.get(key, default)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ConfigError(f"{key}={shown(value)} must be a token id below vocab_size={vocab_size}, a list of them, or null")
    return ids[0] if ids else None


def mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a JSON object, an empty one for null or an absent key; raise ``ConfigError`` for other values."""
    value = {} if raw.get(key) is None else raw[key]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={shown(value)} must be an object")
    return value


def list_of(raw: Mapping[str, Any], key: str, kind: type) -> list[Any] | None:
    """Return a list of values of one type, ``None`` for null or an absent key; raise ``ConfigError`` for other values."""
    value = raw.get(key)
    if value is not None and not (isinstance(value, list | tuple) and all(type(item) is kind for item in value)):
        raise ConfigError(f"{key}={shown(value)} must be a list of {kind.__name__}")
    return None if value is None else list(value)
