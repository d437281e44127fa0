from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from dsv4lite.config import LoadProgress
from dsv4lite.errors import CheckpointError, ConfigError
from dsv4lite.models.deepseek_v4.config import V4Config, parse_config
from dsv4lite.models.deepseek_v4.tensors import V4_SHARDING, V4_TENSORS, official_shapes
from dsv4lite.parallel.shard import Shards, Split, pattern_of
from dsv4lite.weights import checkpoint as reading
from dsv4lite.weights.checkpoint import Checkpoint, ExpertFormat
from dsv4lite.weights.dummy import dummy_tensors
from dsv4lite.weights.loader import load, match
from dsv4lite.weights.tensors import TensorKind
from tests.tiny import TINY_QUANTIZED, TINY_REFRESHED, v4_names, v4_shards, write_checkpoint

# Cuts into two must fall on scale blocks of 128.
CONFIG = {
    **TINY_QUANTIZED,
    "vocab_size": 96,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "q_lora_rank": 40,
    "o_lora_rank": 128,
    "n_routed_experts": 4,
    "index_n_heads": 16,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "compress_ratios": [0, 4, 0],
    "num_hash_layers": 1,
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dequantize(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return float32 [out, in], straight from the definition of the formats."""
    if scale is None:
        return weight.float()
    if weight.dtype == torch.float8_e4m3fn:
        values, block = weight.float(), (128, 128)
    else:
        codes = weight.view(torch.uint8).long()
        values, block = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2)], (1, 32)
    factors = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return values * factors[: values.shape[0], : values.shape[1]]


@dataclass
class FakeSlot:
    """Keeps what it was given, dequantized, and says what is wrong with how it was called."""

    shape: tuple[int, ...]
    kind: Literal["tensor", "matrix"] = "matrix"
    stored: list[Tensor] = field(default_factory=list)

    def store(self, weight: Tensor, scale: Tensor | None = None) -> None:
        assert self.kind == "matrix" or scale is None
        value = dequantize(weight, scale) if self.kind == "matrix" else weight.clone()
        assert tuple(value.shape) == self.shape
        self.stored.append(value)

    @property
    def value(self) -> Tensor:
        (value,) = self.stored
        return value


MATRICES: tuple[TensorKind, ...] = ("dense", "expert")


def holds(shards: Shards, name: str) -> bool:
    """Whether a tensor is none of another rank's experts."""
    if ".experts." not in name:
        return True
    rank, size = shards.axes.get("ep", (0, 1))
    return int(name.split(".experts.")[1].split(".")[0]) * size // shards.num_experts == rank


def slots_for(config: V4Config, shards: Shards | None = None, *, mtp: bool = True) -> dict[str, FakeSlot]:
    found = {}
    for name, spec in official_shapes(config).items():
        cut = tuple(slice(0, n) for n in spec.shape) if shards is None else shards.cut(name, spec.shape)
        if (shards is None or holds(shards, name)) and (mtp or not name.startswith("mtp.")):
            shape = tuple(part.stop - part.start for part in cut)
            found[name] = FakeSlot(shape, "matrix" if spec.kind in MATRICES else "tensor")
    return found


def truth(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    scales = {name.removesuffix(".scale") + ".weight": tensor for name, tensor in tensors.items() if name.endswith(".scale")}
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(".scale"):
            found[name] = dequantize(tensor, scales[name]) if name in scales else tensor
    return found


def everything(config: V4Config, expert_format: ExpertFormat = "fp4", quantized: bool = True) -> dict[str, Tensor]:
    return dict(dummy_tensors(config, V4_TENSORS, expert_format=expert_format, quantized=quantized, seed=3))


def opened(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int | None = None) -> Checkpoint:
    return Checkpoint.open(write_checkpoint(folder, CONFIG, tensors, shard_bytes=shard_bytes), names=v4_names)


@pytest.fixture(scope="module")
def config() -> V4Config:
    return parse_config(CONFIG)


# ------------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(("expert_format", "quantized"), [("fp4", True), ("fp8", True), ("unquantized", False)])
@pytest.mark.parametrize("shard_bytes", [None, 100_000])
def test_load_fills_every_slot_once(
    tmp_path: Path, config: V4Config, expert_format: ExpertFormat, quantized: bool, shard_bytes: int | None
) -> None:
    tensors = everything(config, expert_format, quantized)
    slots = slots_for(config)
    reports: list[LoadProgress] = []
    found = opened(tmp_path, tensors.items(), shard_bytes)
    load(found, slots, progress=reports.append)
    expected = truth(tensors)
    assert slots.keys() == expected.keys()
    assert all(torch.equal(slots[name].value, expected[name].to(slots[name].value.dtype)) for name in slots)
    assert reports[-1].done == reports[-1].total == sum(info.nbytes for info in found.headers.values())


def test_load_joins_pairs_that_lie_in_different_shards(tmp_path: Path, config: V4Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are reused between shards, so what waits for its partner must have been copied."""
    monkeypatch.setattr(reading, "_WINDOW_BYTES", 1)
    tensors = everything(config)
    weights_first = sorted(tensors.items(), key=lambda item: item[0].endswith(".scale"))
    slots = slots_for(config)
    load(opened(tmp_path, weights_first, 200_000), slots)
    assert all(torch.equal(slots[name].value, value.to(slots[name].value.dtype)) for name, value in truth(tensors).items())


def test_load_passes_over_an_mtp_block_without_slots(tmp_path: Path, config: V4Config) -> None:
    slots, tensors = slots_for(config, mtp=False), everything(config)
    reports: list[LoadProgress] = []
    load(opened(tmp_path, tensors.items()), slots, progress=reports.append)
    assert all(slot.stored for slot in slots.values())
    assert reports[-1].total == sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith("mtp."))


def test_load_takes_float32_scales(tmp_path: Path) -> None:
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3)
    slot = FakeSlot((200, 300))
    load(opened(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}.items()), {"a.weight": slot})
    assert torch.equal(slot.value, dequantize(weight, scale))


def test_load_takes_unsigned_packed_experts(tmp_path: Path) -> None:
    weight = torch.randint(0, 256, (8, 32), dtype=torch.uint8)
    scale = torch.randint(120, 130, (8, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    slot = FakeSlot((8, 64))
    load(opened(tmp_path, {"a.weight": weight, "a.scale": scale}.items()), {"a.weight": slot})
    assert torch.equal(slot.value, dequantize(weight, scale))


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize(("expert_format", "quantized"), [("fp4", True), ("unquantized", False)])
def test_shards_of_all_ranks_make_the_whole(
    tmp_path: Path, config: V4Config, tp: int, ep: int, expert_format: ExpertFormat, quantized: bool
) -> None:
    tensors = everything(config, expert_format, quantized)
    found = opened(tmp_path, tensors.items())
    expected = truth(tensors)
    seen: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for t, e in product(range(tp), range(ep)):
        shards = v4_shards(config, tp=(t, tp), ep=(e, ep))
        slots = slots_for(config, shards)
        load(found, slots, shards=shards)
        for name, slot in slots.items():
            cut = shards.cut(name, expected[name].shape)
            assert torch.equal(slot.value, expected[name][cut].to(slot.value.dtype)), name
            seen.setdefault(name, {})[tuple(part.start for part in cut)] = slot.value
    assert seen.keys() == expected.keys()
    assert all(sum(part.numel() for part in seen[name].values()) == expected[name].numel() for name in seen)


def test_shards_read_only_this_ranks_experts(tmp_path: Path, config: V4Config) -> None:
    found = opened(tmp_path, everything(config).items())
    experts = {name: info for name, info in found.headers.items() if ".experts." in name}
    totals = []
    for ep in (1, 4):
        shards = v4_shards(config, ep=(0, ep))
        reports: list[LoadProgress] = []
        load(found, slots_for(config, shards), shards=shards, progress=reports.append)
        totals.append(reports[-1].total)
    assert totals[0] - totals[1] == sum(info.nbytes for info in experts.values()) * 3 // 4


@pytest.mark.parametrize("dim", [0, 1])
def test_packed_experts_can_be_cut_between_scales(tmp_path: Path, dim: int) -> None:
    weight = torch.randint(0, 256, (8, 64), dtype=torch.uint8).view(torch.int8)
    scale = torch.randint(120, 130, (8, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = opened(tmp_path, {"a.weight": weight, "a.scale": scale}.items())
    parts = []
    for rank in range(2):
        slot = FakeSlot((4, 128) if dim == 0 else (8, 64))
        load(
            found,
            {"a.weight": slot},
            shards=Shards(table={"a": Split(dim)}, axes={"tp": (rank, 2)}, stages=(range(1),), num_experts=1),
        )
        parts.append(slot.value)
    assert torch.equal(torch.cat(parts, dim), dequantize(weight, scale))


def test_cut_through_a_scale_block_is_an_error(tmp_path: Path, config: V4Config) -> None:
    found = opened(tmp_path, everything(config).items())
    shards = v4_shards(config, tp=(0, 4))
    with pytest.raises(ConfigError, match=r"attn\.\w+\.weight: tp=4 cuts .* through scale blocks of 128"):
        load(found, slots_for(config, shards), shards=shards)


# -------------------------------------------------------------------------------------------------------------- what is wrong


def spoil(change: Callable[[dict[str, Tensor]], None], config: V4Config, folder: Path) -> tuple[str, ...]:
    """Return the problems found after a change; nothing may have been stored or read."""
    tensors = everything(config)
    change(tensors)
    slots = slots_for(config)
    found = opened(folder, tensors.items())
    reports: list[LoadProgress] = []
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        load(found, slots, progress=reports.append)
    assert not any(slot.stored for slot in slots.values()) and not reports
    return caught.value.problems


W1, W1_SCALE = "layers.0.ffn.experts.1.w1.weight", "layers.0.ffn.experts.1.w1.scale"
WKV, WKV_SCALE = "layers.0.attn.wkv.weight", "layers.0.attn.wkv.scale"


def replaced(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


def removed(*names: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def e8m0(*shape: int) -> Tensor:
    return torch.full(shape, 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (removed("norm.weight"), "norm.weight: missing"),
        (removed(WKV, WKV_SCALE), f"{WKV}: missing"),
        (removed(W1_SCALE), f"{W1_SCALE}: missing; {W1} is I8 and needs a scale"),
        (removed(WKV_SCALE), f"{WKV_SCALE}: missing; {WKV} is F8_E4M3 and needs a scale"),
        (replaced("layers.0.attn.wx.weight", torch.zeros(2)), "layers.0.attn.wx.weight: unexpected; the model has no such tensor"),
        (replaced("layers.0.attn.wx.scale", e8m0(1, 1)), "layers.0.attn.wx.scale: unexpected; the model has no such tensor"),
        (replaced("norm.scale", e8m0(1, 1)), "norm.scale: unexpected; the model has no such tensor"),
        (replaced("norm.weight", torch.zeros(127)), "norm.weight: shape [127], expected [128]"),
        (replaced("norm.weight", torch.zeros(128, 1)), "norm.weight: shape [128, 1], expected [128]"),
        (replaced("norm.weight", torch.zeros(128, dtype=torch.int64)), "norm.weight: dtype I64, expected BF16 or F16 or F32"),
        (replaced("layers.0.ffn.gate.tid2eid", torch.zeros(96, 2)), "layers.0.ffn.gate.tid2eid: dtype F32, expected I64 or I32"),
        (replaced(W1, torch.zeros(256, 128, dtype=torch.int8)), f"{W1}: shape [256, 256], expected [256, 128]"),
        (replaced(W1, torch.zeros(64, dtype=torch.int8)), f"{W1}: shape [128], expected [256, 128]"),
        (
            replaced(W1, torch.zeros(256, 64, dtype=torch.bool)),
            f"{W1}: dtype BOOL, expected F8_E4M3 or I8 or U8 or BF16 or F16 or F32",
        ),
        (replaced(W1, torch.zeros(256, 128)), f"{W1_SCALE}: a scale, but {W1} is F32, which has none"),
        (replaced(W1_SCALE, torch.ones(256, 4)), f"{W1_SCALE}: dtype F32, expected F8_E8M0"),
        (replaced(W1_SCALE, e8m0(256, 8)), f"{W1_SCALE}: shape [256, 8], expected [256, 4]: one per (1, 32)"),
        (replaced(WKV_SCALE, e8m0(32, 1)), f"{WKV_SCALE}: shape [32, 1], expected [1, 1]: one per (128, 128)"),
        (replaced(WKV_SCALE, torch.ones(1, 1).bfloat16()), f"{WKV_SCALE}: dtype BF16, expected F8_E8M0 or F32"),
    ],
)
def test_misfit_is_found_before_reading(
    tmp_path: Path, config: V4Config, change: Callable[[dict[str, Tensor]], None], problem: str
) -> None:
    assert spoil(change, config, tmp_path) == (problem,)


def test_all_misfits_are_listed_at_once(tmp_path: Path, config: V4Config) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        removed("norm.weight", W1_SCALE)(tensors)
        tensors["head.weight"] = torch.zeros(3, 3)
        tensors["stray"] = torch.zeros(1)

    problems = spoil(change, config, tmp_path)
    assert [problem.split(":")[0] for problem in problems] == ["head.weight", "norm.weight", W1_SCALE, "stray"]


def test_misfit_of_a_shard_tells_both_shapes(tmp_path: Path, config: V4Config) -> None:
    found = opened(tmp_path, everything(config).items())
    shards = v4_shards(config, tp=(0, 2))
    slots = slots_for(config, shards)
    slots["embed.weight"].shape = (96, 128)
    with pytest.raises(
        CheckpointError, match=r"embed\.weight: shape \[96, 128\], of which this rank holds \[48, 128\], expected \[96,"
    ):
        match(found.headers, slots, shards)


def test_tensor_that_has_no_equal_parts_is_listed_with_other_problems(tmp_path: Path, config: V4Config) -> None:
    """It was a ``ConfigError`` by itself, though the layout suits the model."""
    tensors = everything(config)
    shards = v4_shards(config, tp=(0, 2))
    slots = slots_for(config, shards)
    tensors["head.weight"], tensors["norm.weight"] = tensors["head.weight"][:-1], tensors["norm.weight"][:-1]
    with pytest.raises(CheckpointError) as caught:
        match(opened(tmp_path, tensors.items()).headers, slots, shards)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["head.weight", "norm.weight"]
    assert "which has no parts of the expected [" in caught.value.problems[0]


def test_stray_tensor_is_not_taken_for_another_ranks(tmp_path: Path, config: V4Config) -> None:
    tensors = {**everything(config), "layers.0.stray.weight": torch.zeros(2), "layers.0.ffn.experts.9.w1.bias": torch.zeros(2)}
    found = opened(tmp_path, tensors.items())
    shards = v4_shards(config, ep=(0, 2))
    with pytest.raises(CheckpointError) as caught:
        match(found.headers, slots_for(config, shards), shards)
    assert sorted(problem.split(":")[0] for problem in caught.value.problems) == [
        "layers.0.ffn.experts.9.w1.bias",
        "layers.0.stray.weight",
    ]


def test_every_official_tensor_has_a_sharding_rule(config: V4Config) -> None:
    for model in (config, parse_config(TINY_REFRESHED)):
        assert {pattern_of(name) for name in official_shapes(model)} <= V4_SHARDING.keys()
