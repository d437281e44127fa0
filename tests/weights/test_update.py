"""An update's part of one rank, for every form in which weights are resident, those of a GPU included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import WeightUpdateError
from dsv4lite.kernels.quantize import dequantize_matrix
from dsv4lite.models.deepseek_v4.config import V4Config, parse_config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.names import V4_NAMES
from dsv4lite.models.deepseek_v4.tensors import V4_SHARDING, V4_TENSORS
from dsv4lite.parallel.shard import Shards
from dsv4lite.weights.checkpoint import ExpertFormat, HeldTensor
from dsv4lite.weights.dummy import dummy_tensors
from dsv4lite.weights.loader import own_formats
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.update import Transaction, buckets, checksum
from tests.golden import OFFICIAL, fill, poisoned, rounded
from tests.tiny import TINY_REFRESHED

CONFIG = replace(OFFICIAL, vocab_size=64, num_hidden_layers=3, ratios=(0, 4, 128, 0), num_hash_layers=1)
ODD = replace(CONFIG, hidden_size=160, q_lora_rank=96, o_lora_rank=40)  # boundaries inside blocks of scales
FORMS: dict[str, tuple[V4Config, ExpertFormat, Numerics]] = {
    "widened": (CONFIG, "fp4", rounded()),
    "fp8 and fp4 tiles": (CONFIG, "fp4", replace(rounded(), resident_fp8=True, resident_experts="fp4")),
    "fp8 and fp8 tiles": (CONFIG, "fp8", replace(rounded(), resident_fp8=True, resident_experts="fp8")),
    "fp8 with a scale per row": (ODD, "fp4", replace(rounded(), resident_fp8=True)),
}


def checkpoint(config: V4Config, form: ExpertFormat, seed: int) -> dict[str, Tensor]:
    return dict(dummy_tensors(config, V4_TENSORS, expert_format=form, quantized=True, seed=seed))


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers of all weights."""
    scales = {name.removesuffix(".scale") + ".weight": tensor for name, tensor in tensors.items() if name.endswith(".scale")}
    wide = {name: dequantize_matrix(tensor, scales[name]) if name in scales else tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in wide.items() if not name.endswith(".scale")}


def transaction(model: DeepseekV4, tensors: Mapping[str, Tensor], *, staged: bool) -> Transaction:
    headers = {name: HeldTensor(name=name, tensor=tensor) for name, tensor in tensors.items()}
    shards = Shards(table=V4_SHARDING, axes={}, num_experts=model.config.num_experts)
    return Transaction(model.slots(), V4_NAMES, own_formats(headers), shards, torch.device("cpu"), staged=staged)


@torch.no_grad()
@pytest.mark.parametrize("floats", [False, True], ids=["quantized", "floats"])
@pytest.mark.parametrize("form", FORMS)
def test_new_numbers_get_into_every_resident_form(form: str, floats: bool) -> None:
    """From the checkpoint's formats and from a trainer's floats, exactly; nothing changes before ``write``."""
    config, experts, numerics = FORMS[form]
    old, new = (checkpoint(config, experts, seed) for seed in (0, 1))
    model = fill(poisoned(config, numerics, with_mtp=True), old)
    before, slots = {name: tensor.clone() for name, tensor in model.state_dict().items()}, model.slots()
    update = transaction(model, old, staged=True)
    given = widened(new) if floats else new
    for bucket in buckets(reversed(given.items())):
        update.take(bucket)
    update.check(partial=False)
    assert all(torch.equal(held.view(torch.uint8), before[name].view(torch.uint8)) for name, held in model.state_dict().items())
    update.write()
    wanted = widened(new)
    for name, slot in slots.items():
        assert slot.values().float().equal(wanted[name].float()), name


def test_what_a_trainer_gives_may_change_once_it_is_taken() -> None:
    config, experts, numerics = FORMS["widened"]
    model, new = fill(poisoned(config, numerics), checkpoint(config, experts, 0)), checkpoint(config, experts, 1)
    wanted, update = {n: t.clone() for n, t in widened(new).items()}, transaction(model, new, staged=True)
    for name, tensor in new.items():
        update.take([(name, tensor)])
        tensor.view(torch.uint8).fill_(0)
    update.check(partial=False)
    update.write()
    assert all(slot.values().float().equal(wanted[name].float()) for name, slot in model.slots().items())


def test_float32_scales_are_refused_where_the_model_has_powers_of_two() -> None:
    config, experts, numerics = FORMS["fp8 and fp4 tiles"]
    tensors = checkpoint(config, experts, 0)
    update, name = transaction(fill(poisoned(config, numerics), tensors), tensors, staged=True), "layers.0.attn.wkv"
    with pytest.raises(WeightUpdateError, match=r"wkv\.scale: dtype F32, expected F8_E8M0"):
        update.take([(f"{name}.weight", tensors[f"{name}.weight"]), (f"{name}.scale", tensors[f"{name}.scale"].float())])


@pytest.mark.parametrize("config", [CONFIG, parse_config(TINY_REFRESHED)], ids=["mtp", "dspark"])
def test_slots_name_every_tensor_of_a_model(config: V4Config) -> None:
    """So that an update and a sleep miss none; tables of angles follow from the configuration."""
    numerics = Numerics.choose(dtype=torch.float32, quantized=False, deterministic=False, device=torch.device("cpu"))
    model = DeepseekV4(config, numerics, with_mtp=True)
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert {id(tensor) for slot in model.slots().values() for tensor in slot.tensors} == held


def test_checksums_of_parts_add_up_to_that_of_the_whole() -> None:
    whole = torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
    everything = (slice(0, 6), slice(0, 10))
    total = checksum(whole, everything, (6, 10))
    halves = [(slice(0, 6), slice(0, 4)), (slice(0, 6), slice(4, 10))]
    assert sum(checksum(whole[part], part, (6, 10)) for part in halves) % 2**64 == total
    for row, column in ((0, 0), (3, 7), (5, 9)):
        other = whole.clone()
        other[row, column] += 1e-6
        assert checksum(other, everything, (6, 10)) != total
    assert checksum(whole.flip(0), everything, (6, 10)) != total
