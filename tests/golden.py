"""Two models with computed weights, and how to load a checkpoint into a model.

``tiny``      five layers, float32, the known-answer test of the specification (9.4)
``official``  five layers in the release's formats; the outputs of the official code on it are in ``data/v4-official-A.safetensors``

Weights come from an integer hash and exactly rounded arithmetic: their bytes are the same on every machine.
They depend on names and shapes, which come from the package; the digests here say what these are.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsv4lite.models.config import ModelConfig
from dsv4lite.models.deepseek_mla.model import DeepseekMla
from dsv4lite.models.deepseek_v4.config import DSparkConfig, V4Config, Yarn
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.tensors import official_shapes
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.weights.names import NameTables, translate
from dsv4lite.weights.quant import Numerics

OFFICIAL_OUTPUTS = Path(__file__).parent / "data" / "v4-official-A.safetensors"
TINY_DIGEST = (276, 1116120, "100bad066c5eb862d2d2254014a4ad980341c47047557288ad03692801339dc3")
TINY_DSPARK_DIGEST = (355, 1435896, "6c662fba6db97466e9999596aac3480dc1b2772646d4a8779c0a4bcdb2c7b0ce")
OFFICIAL_DIGEST = (508, 50422744, "886a22888fc94d80bde5609e1239288709a5f6bc7deed8997228e74e81a2deaa")

TINY = V4Config(
    vocab_size=61,
    hidden_size=48,
    num_hidden_layers=5,
    num_attention_heads=4,
    head_dim=32,
    rope_dim=8,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=12,
    num_experts=6,
    experts_per_token=2,
    expert_width=20,
    num_hash_layers=2,
    route_scale=1.5,
    swiglu_limit=0.6,
    window=8,
    ratios=(0, 4, 8, 4, 8, 0),
    index_heads=12,
    index_dim=16,
    index_topk=3,
    yarn=Yarn(factor=16.0, original_positions=65536),
)

TINY_DSPARK = replace(
    TINY,
    num_mtp_layers=0,
    ratios=(0, 4, 8, 4, 8, 0, 0, 0),
    dspark=DSparkConfig(block=5, noise_token_id=59, targets=(2, 3, 4), markov_rank=8, stages=3),
)
"""The known-answer model with the drafter of refreshed releases."""

OFFICIAL = V4Config(
    vocab_size=1024,
    hidden_size=512,
    num_hidden_layers=5,
    num_attention_heads=16,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=256,
    o_groups=4,
    o_lora_rank=128,
    num_experts=8,
    experts_per_token=2,
    expert_width=256,
    num_hash_layers=2,
    route_scale=1.5,
    swiglu_limit=2.0,
    window=128,
    ratios=(0, 4, 128, 4, 128, 0),
    index_heads=32,
    index_dim=128,
    index_topk=64,
    yarn=Yarn(factor=16.0, original_positions=65536),
    quantized=True,
)


def plain(deterministic: bool = False) -> Numerics:
    """Arithmetic without any rounding, float32 on the CPU."""
    return Numerics.choose(dtype=torch.float32, quantized=False, deterministic=deterministic, device=torch.device("cpu"))


def rounded(deterministic: bool = False) -> Numerics:
    """Arithmetic of the official release, on the CPU."""
    return Numerics.choose(dtype=torch.bfloat16, quantized=True, deterministic=deterministic, device=torch.device("cpu"))


M = TypeVar("M", DeepseekV4, DeepseekMla)


def fill(model: M, checkpoint: Mapping[str, Tensor]) -> M:
    """Store every tensor of a checkpoint in its slot; names must match exactly."""
    slots = model.slots()
    weights = {name for name in checkpoint if not name.endswith(".scale")}
    if not model.mtp and getattr(model, "dspark", None) is None:
        weights = {name for name in weights if not name.startswith("mtp.")}
    assert weights == set(slots), weights ^ set(slots)
    for name, slot in slots.items():
        slot.store(checkpoint[name], checkpoint.get(name.removesuffix(".weight") + ".scale"))
    return model


def official_names(named: Mapping[str, Tensor], names: NameTables) -> dict[str, Tensor]:
    """Return tensors by other names under the official ones, of which none comes twice."""
    pieces = [(piece, tensor) for name, tensor in named.items() for piece in translate(name, tensor.shape, names)]
    found = {piece.name: tensor[piece.index] for piece, tensor in pieces}
    assert len(found) == len(pieces)
    return found


def poison(model: M) -> M:
    """Make every parameter NaN (or expert -1), so that a missing tensor shows in the results."""
    buffers = [buffer for name, buffer in model.named_buffers() if ".map." not in name]
    with torch.no_grad():
        for tensor in (*model.parameters(), *buffers):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    return model


def poisoned(config: V4Config, numerics: Numerics, mesh: Mesh | None = None, **options: Any) -> DeepseekV4:
    """Build a poisoned model; options are those of its class."""
    return poison(DeepseekV4(config, numerics, mesh, **options))


def tiny_model(*, config: V4Config = TINY, deterministic: bool = False, with_mtp: bool = True) -> DeepseekV4:
    """Return the known-answer model; other sizes than ``TINY`` get weights by the same rule."""
    return fill(poisoned(config, plain(deterministic), with_mtp=with_mtp), tiny_checkpoint(config))


def official_model(
    checkpoint: Mapping[str, Tensor], *, deterministic: bool = False, with_mtp: bool = True, config: V4Config = OFFICIAL
) -> DeepseekV4:
    """Return the quantized model with the official arithmetic."""
    return fill(poisoned(config, rounded(deterministic), with_mtp=with_mtp), checkpoint)


def _hash(key: str, count: int) -> Tensor:
    """Return ``count`` 32-bit hashes as int64."""
    mask = 0xFFFFFFFF
    x = (zlib.crc32(key.encode()) + torch.arange(count) * 2654435761) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & mask
    return x ^ (x >> 16)


# The tiny model ---------------------------------------------------------------------


def tiny_ids(count: int, config: ModelConfig = TINY) -> list[int]:
    """Return the token ids of the known-answer test."""
    return [(7 * t * t + 3 * t + 1) % config.vocab_size for t in range(count)]


def tiny_checkpoint(config: V4Config = TINY) -> dict[str, Tensor]:
    """Return every tensor of the known-answer model, float32 (expert tables int64), by its official name."""
    return {name: _tiny_tensor(name, spec.shape, config) for name, spec in official_shapes(config).items()}


def _tiny_tensor(name: str, shape: tuple[int, ...], config: V4Config) -> Tensor:
    if name.endswith("tid2eid"):
        token, experts = torch.arange(config.vocab_size), config.num_experts
        assert config.experts_per_token == 2
        return torch.stack([token % experts, (token + 1 + (token // experts) % (experts - 1)) % experts], 1)
    offset = 0.0
    if name.endswith("norm.weight"):
        amplitude, offset = 0.3, 1.0
    elif name.endswith("_scale"):
        amplitude, offset = 0.2, 1.0
    elif name.endswith(("_base", "attn_sink", "ape")) or name == "embed.weight":
        amplitude = 1.0
    elif name.endswith("gate.bias"):
        amplitude = 0.3
    else:
        amplitude = (2.0 if "wgate" in name else 1.0) * shape[-1] ** -0.5
    unit = 2 * (_hash(name, math.prod(shape)).double() / 2**32) - 1
    return (unit * amplitude * math.sqrt(3) + offset).float().view(shape)


# The official model ---------------------------------------------------------------------

_SEED = "A"
# Tensors that a release does not store in FP8 or FP4: ends of their names, dtype, amplitude, and what is added.
_PLAIN = (
    (("tid2eid",), torch.int64, 0.0, 0.0),
    (("embed.weight",), torch.bfloat16, 2.0, 0.0),
    (("head.weight", "gate.weight", "weights_proj.weight"), torch.bfloat16, 1 / 8, 0.0),
    (("norm.weight",), torch.bfloat16, 0.5, 1.0),
    (("compressor.wkv.weight",), torch.bfloat16, 1 / 16, 0.0),
    (("_fn",), torch.float32, 1 / 32, 0.0),
    (("_base", "ape"), torch.float32, 1.0, 0.0),
    (("_scale",), torch.float32, 0.25, 1.0),
    (("attn_sink",), torch.float32, 2.0, 0.0),
    (("gate.bias",), torch.float32, 0.5, 0.0),
)


def official_ids(count: int) -> list[int]:
    """Return the token ids of the run with ``count`` tokens."""
    return ((_hash(f"{_SEED}:ids.{count}", count) >> 16) % OFFICIAL.vocab_size).tolist()


def official_checkpoint(c: V4Config = OFFICIAL) -> dict[str, Tensor]:
    """Return every tensor in the release's formats, by its official name."""
    tensors: dict[str, Tensor] = {}
    for name, spec in official_shapes(c).items():
        for ends, dtype, amplitude, offset in _PLAIN:
            if name.endswith(ends):
                tensors[name] = (
                    _official_experts(c) if dtype == torch.int64 else _official(name, spec.shape, dtype, amplitude, offset)
                )
                break
        else:
            tensors |= _quantized(name.removesuffix(".weight"), *spec.shape, fp4=".experts." in name)
    return tensors


def _official(name: str, shape: tuple[int, ...], dtype: torch.dtype, amplitude: float, offset: float) -> Tensor:
    drop, half = (16, 2**15) if dtype == torch.bfloat16 else (8, 2**23)
    unit = ((_hash(f"{_SEED}:{name}", math.prod(shape)) >> drop) - half).double() / half
    return (unit * amplitude + offset).float().to(dtype).view(shape)


def _quantized(name: str, rows: int, cols: int, *, fp4: bool) -> dict[str, Tensor]:
    """Return codes, and a power-of-two scale per 128 x 128 (FP8) or per 32 columns (FP4)."""
    if fp4:
        pairs = (_hash(f"{_SEED}:{name}.weight", rows * cols // 2) >> 24).to(torch.uint8)
        weight, blocks, middle = pairs.view(rows, cols // 2).view(torch.int8), (rows, cols // 32), 127 - 2
    else:
        value = ((_hash(f"{_SEED}:{name}.weight", rows * cols) >> 16) - 2**15).float() * 7 / 512
        weight, blocks, middle = value.view(rows, cols).to(torch.float8_e4m3fn), (-(-rows // 128), -(-cols // 128)), 127 - 8
    exponent = middle - cols.bit_length() // 2 + (_hash(f"{_SEED}:{name}.scale", math.prod(blocks)) >> 16) % 3 - 1
    return {name + ".weight": weight, name + ".scale": exponent.to(torch.uint8).view(blocks).view(torch.float8_e8m0fnu)}


def _official_experts(c: V4Config) -> Tensor:
    token = torch.arange(c.vocab_size)
    turn = (token // c.num_experts) % (c.num_experts - c.experts_per_token + 1)
    return torch.stack([(token + j + (j > 0) * turn) % c.num_experts for j in range(c.experts_per_token)], 1)


def digest(checkpoint: Mapping[str, Tensor]) -> tuple[int, int, str]:
    """Return the number of tensors, their bytes, and SHA-256 over names and raw bytes in sorted order of names."""
    sha = hashlib.sha256()
    for name in sorted(checkpoint):
        sha.update(name.encode())
        sha.update(checkpoint[name].contiguous().view(torch.uint8).numpy().tobytes())
    return len(checkpoint), sum(t.nbytes for t in checkpoint.values()), sha.hexdigest()


WIDE = replace(TINY, vocab_size=97, num_hidden_layers=4, ratios=(0, 4, 128, 4, 0), window=128, index_topk=9, num_hash_layers=1)
"""The tiny model with the release's window and ratios; long prompts make its selection bite."""
