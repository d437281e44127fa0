"""Weight-only packings written from their definitions, for small models of transformers: none of it is the package's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lite.models.deepseek_mla.config import parse_config
from dsv4lite.models.deepseek_mla.tensors import official_shapes
from tests.e2e.engines import write_tokenizer
from tests.mla import official, random_checkpoint, release_names, their_config, trainer_model
from tests.tiny import write_checkpoint

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Every width is a multiple of 128; a latent row has 160 channels.
SIZES: Mapping[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_nextn_predict_layers": 0,
}
Packed = tuple[dict[str, Tensor], Tensor]
"""A matrix's tensors by the last component of their names, and the numbers that they stand for, float32 [out, in]."""


class Packing(NamedTuple):
    """A packing: ``quantization_config``, and what makes a matrix's tensors."""

    config: Mapping[str, Any]
    pack: Callable[[Tensor], Packed]


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack unsigned numbers [..., 8 n] into int32 [..., n]: bits 4 i of a word are number ``order[i]`` of its eight."""
    eight, word = numbers.long().unflatten(-1, (-1, 8)), torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // 8, dtype=torch.int64)
    for i, place in enumerate(order):
        word |= eight[..., place] << 4 * i
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def int4(weight: Tensor, group: int, dtype: torch.dtype, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes [out, in], zero points and scales [out, in / group], and ``(q - z) * s``."""
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if symmetric:
        scale, zero = (groups.abs().amax(2) / 7).to(dtype), torch.full(low.shape, 8.0)
    else:
        scale = ((high - low) / 15).to(dtype)
        zero = (-low / scale.float()).round().clamp(1, 15)
    codes = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    numbers = (codes - zero[..., None]) * scale.float()[..., None]
    return codes.flatten(1), zero, scale, numbers.flatten(1)


def awq(group: int) -> Packing:
    """AutoAWQ: words along the outputs, in an order of its own."""

    def pack(weight: Tensor) -> Packed:
        codes, zero, scale, numbers = int4(weight, group, torch.float16, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": words(codes.t(), order), "qzeros": words(zero.t(), order), "scales": scale.t()}, numbers

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Packing({**config, "modules_to_not_convert": ["kv_b_proj"]}, pack)


def gptq(group: int, version: str, *, symmetric: bool) -> Packing:
    """AutoGPTQ: words along the inputs; the first version stores zero points less one."""

    def pack(weight: Tensor) -> Packed:
        codes, zero, scale, numbers = int4(weight, group, torch.float16, symmetric=symmetric)
        stored = zero.t() - int(version == "gptq")
        order = torch.arange(weight.shape[1], dtype=torch.int32) // group
        parts = {"qweight": words(codes).t(), "qzeros": words(stored), "scales": scale.t(), "g_idx": order}
        return parts, numbers

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": False}
    return Packing({**config, "checkpoint_format": version}, pack)


def compressed(group: int, *, symmetric: bool) -> Packing:
    """compressed-tensors: words along the inputs, zero points along the outputs."""

    def pack(weight: Tensor) -> Packed:
        codes, zero, scale, numbers = int4(weight, group, torch.bfloat16, symmetric=symmetric)
        shape = torch.tensor(weight.shape, dtype=torch.int64)
        zeros = {} if symmetric else {"weight_zero_point": words(zero.t()).t()}
        return {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": shape, **zeros}, numbers

    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group, "actorder": None}
    return Packing(_compressed("pack-quantized", weights), pack)


def _compressed(form: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}}
    ignored = ["lm_head", "re:.*kv_b_proj.*"]
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ignored}


def nvfp4(method: str) -> Packing:
    """NVFP4 of compressed-tensors, whose global scale divides, or of ModelOpt, whose global scale multiplies."""
    divides = method == "compressed-tensors"

    def pack(weight: Tensor) -> Packed:
        groups = weight.float().unflatten(1, (-1, 16))
        factor = weight.abs().max() / (6 * 448)
        stored = 1 / factor if divides else factor
        multiplier = 1 / stored if divides else stored
        scale = (groups.abs().amax(2) / 6 / multiplier).to(torch.float8_e4m3fn)
        wide = (scale.float() * multiplier)[..., None]
        code = ((groups / wide).abs()[..., None] - E2M1).abs().argmin(-1)
        numbers = torch.where(groups < 0, -E2M1[code], E2M1[code]) * wide
        codes = (code + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        packed = codes[:, 0::2] + 16 * codes[:, 1::2]
        names = (
            ("weight_packed", "weight_global_scale", "input_global_scale")
            if divides
            else ("weight", "weight_scale_2", "input_scale")
        )
        whole = stored.reshape(1) if divides else stored
        return dict(zip(names, (packed, whole, torch.ones(1)), strict=True)) | {"weight_scale": scale}, numbers.flatten(1)

    if divides:
        return Packing(_compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}), pack)
    return Packing({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*kv_b_proj*"]}, pack)


class Packs(NamedTuple):
    """A packed checkpoint, the same numbers unpacked in another, by official name, and in transformers' model."""

    folder: Path
    plain: Path
    numbers: dict[str, Tensor]
    model: Any


def is_packed(name: str, kind: str) -> bool:
    """Return whether a matrix of the checkpoints below is packed: the up-projections of the first layer are not."""
    return kind in ("dense", "expert") and name != "layers.0.attn.wkv_b.weight"


def write_packed(path: Path, packing: Packing, *, seed: int = 0, unpacked: tuple[str, ...] = ()) -> Packs:
    """Write a small model of transformers, packed and not, with its weights replaced by what the packing holds.

    Args:
        path: Where.
        packing: Of its matrices.
        seed: Of the weights.
        unpacked: Ends of the names of matrices that are not packed.
    """
    theirs = trainer_model("v3", seed=seed, **SIZES)
    raw = {**their_config(theirs, "v3"), "torch_dtype": "float32", "architectures": ["DeepseekV3ForCausalLM"]}
    specs, numbers, parts = official_shapes(parse_config(raw)), official(theirs.state_dict(), raw), {}
    with torch.no_grad():
        for name, tensor in numbers.items():
            if is_packed(name, specs[name].kind) and not name.endswith(unpacked):
                parts[name], dequantized = packing.pack(tensor)
                tensor.copy_(dequantized)
    write_checkpoint(path / "plain", raw, release_names(numbers, raw))
    write_checkpoint(path / "packed", {**raw, "quantization_config": packing.config}, packed_names(numbers, parts, raw))
    write_tokenizer(path / "plain", raw["vocab_size"])
    return Packs(write_tokenizer(path / "packed", raw["vocab_size"]), path / "plain", numbers, theirs)


def write_random_packed(
    folder: Path, raw: Mapping[str, Any], packing: Packing, *, seed: int = 0, packed: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Write a model of random weights whose MTP block alone is not packed, but in bfloat16; return the numbers by official name.

    Args:
        folder: Where.
        raw: Its config.
        packing: Of its matrices.
        seed: Of the weights.
        packed: Further matrices that are packed.
    """
    config = parse_config(raw)
    specs, numbers, parts = official_shapes(config), random_checkpoint(config, seed=seed), {}
    for name, tensor in numbers.items():
        if name in packed or (is_packed(name, specs[name].kind) and not name.startswith("mtp.")):
            parts[name], numbers[name] = packing.pack(tensor)
        elif specs[name].kind != "f32":
            numbers[name] = tensor.bfloat16().float()
    write_checkpoint(folder, {**raw, "quantization_config": packing.config}, packed_names(numbers, parts, raw))
    write_tokenizer(folder, raw["vocab_size"])
    return numbers


def packed_names(
    numbers: Mapping[str, Tensor], parts: Mapping[str, Mapping[str, Tensor]], raw: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under transformers' names, those of packed matrices in place of these."""
    for (name, tensor), (theirs, _) in zip(numbers.items(), release_names(numbers, raw), strict=True):
        if name in parts:
            yield from ((f"{theirs.removesuffix('weight')}{leaf}", part) for leaf, part in parts[name].items())
        else:
            yield theirs, tensor
