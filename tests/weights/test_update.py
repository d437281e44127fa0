"""An update's part of one rank, for every form in which weights are resident, those of a GPU included."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import WeightUpdateError
from dsv4lite.kernels.quantize import dequantize_matrix
from dsv4lite.models.deepseek_mla import config as mla_config
from dsv4lite.models.deepseek_mla.model import DeepseekMla
from dsv4lite.models.deepseek_mla.names import mla_names
from dsv4lite.models.deepseek_mla.tensors import MLA_SHARDING
from dsv4lite.models.deepseek_v4.config import V4Config, parse_config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.names import V4_NAMES
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.weights import mirror
from dsv4lite.weights.checkpoint import ExpertFormat, HeldTensor
from dsv4lite.weights.delta import Blocks, DeltaSource
from dsv4lite.weights.dummy import dummy_tensors
from dsv4lite.weights.host_memory import HostMemory
from dsv4lite.weights.loader import own_formats
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.update import NamedTensors, Transaction, buckets, checksum
from tests.golden import OFFICIAL, fill, poisoned, rounded
from tests.mla import BLOCKS, filled, quantized_checkpoint, raw_config
from tests.tiny import TINY_REFRESHED, v4_shards

CPU = torch.device("cpu")
NARROW = replace(OFFICIAL, vocab_size=64, num_attention_heads=4, num_experts=4, index_heads=8)
CONFIG = replace(NARROW, num_hidden_layers=3, ratios=(0, 4, 128, 0), num_hash_layers=1)
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


def transaction(
    model: DeepseekV4 | DeepseekMla, tensors: Mapping[str, Tensor], *, staged: bool, memory: HostMemory | None = None
) -> Transaction:
    formats = own_formats({name: HeldTensor(name=name, tensor=tensor) for name, tensor in tensors.items()})
    v4, shards = isinstance(model, DeepseekV4), v4_shards(model.config)
    shards = shards if v4 else replace(shards, table=MLA_SHARDING)
    names, staging = V4_NAMES if v4 else mla_names(BLOCKS), memory or HostMemory(CPU)
    return Transaction(model.slots(), names, formats, shards, CPU, staging=staging if staged else None)


def bytes_of(model: DeepseekV4 | DeepseekMla) -> dict[str, bytes]:
    """Return copies of a model's tensors in memory."""
    return {name: tensor.view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in model.state_dict().items()}


@torch.no_grad()
@pytest.mark.parametrize("floats", [False, True], ids=["quantized", "floats"])
@pytest.mark.parametrize("form", FORMS)
def test_new_numbers_get_into_every_resident_form(form: str, floats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint's formats and from a trainer's floats, in several buckets, exactly; nothing changes before ``write``."""
    monkeypatch.setattr("dsv4lite.weights.update._BUCKET_BYTES", 1 << 20)
    config, experts, numerics = FORMS[form]
    old, new = (checkpoint(config, experts, seed) for seed in (0, 1))
    model = fill(poisoned(config, numerics, with_mtp=True), old)
    before, slots = bytes_of(model), model.slots()
    update = transaction(model, old, staged=True)
    given = widened(new) if floats else new
    for bucket in buckets(reversed(given.items())):
        update.take(bucket)
    update.check(partial=False)
    assert bytes_of(model) == before
    update.write()
    wanted = widened(new)
    for name, slot in slots.items():
        assert slot.values().float().equal(wanted[name].float()), name


MLA = mla_config.parse_config(BLOCKS)
MLA_NUMERICS = replace(rounded(), resident_fp8=True, resident_experts="fp8", scale_dtype=torch.float32)


def filled_with(form: str, seeds: Iterable[int]) -> tuple[Callable[[], DeepseekV4 | DeepseekMla], list[dict[str, Tensor]]]:
    """Return checkpoints, and what makes a model with the first one's numbers."""
    if form == "mla":
        sets = [{n: t for n, t in quantized_checkpoint(MLA, powers=False, seed=seed).items() if "mtp." not in n} for seed in seeds]
        return lambda: filled(MLA, MLA_NUMERICS, sets[0]), sets
    config, experts, numerics = FORMS[form]
    sets = [checkpoint(config, experts, seed) for seed in seeds]
    return lambda: fill(poisoned(config, numerics, with_mtp=True), sets[0]), sets


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", [*FORMS, "mla"])
def test_staged_update_writes_the_bytes_that_an_update_in_place_does(form: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some tensors, quantized or floats, in any order and in buckets of any size, after another update was interrupted."""
    rng = random.Random(seed)
    monkeypatch.setattr(mirror, "SEGMENT", rng.choice([1 << 12, 1 << 16, 1 << 26]))
    build, (old, new, other) = filled_with(form, range(3))
    staged, stored, memory = build(), build(), HostMemory(CPU)
    before, floats, weights = bytes_of(staged), widened(new), sorted(staged.slots())
    interrupted = transaction(staged, old, staged=True, memory=memory)
    for bucket in buckets(other.items()):
        interrupted.take(bucket)
    memory.clear()
    given: list[tuple[str, Tensor]] = []
    for name in rng.sample(weights, rng.choice([3, len(weights) // 2, len(weights)])):
        pair = {each: new[each] for each in (name, name.removesuffix("weight") + "scale") if each in new}
        given += pair.items() if rng.random() < 0.7 else [(name, floats[name])]
    for model in (staged, stored):
        update = transaction(model, old, staged=model is staged, memory=memory)
        rng.shuffle(given)
        rest = list(given)
        while rest:
            size = rng.randrange(1, 9)
            update.take(rest[:size])
            rest = rest[size:]
        update.check(partial=True)
        assert (bytes_of(model) == before) is (model is staged)
        update.write()
    after = bytes_of(staged)
    assert after == bytes_of(stored)
    touched = {id(tensor) for name, _ in given if name in weights for tensor in staged.slots()[name].tensors}
    kept = [name for name, tensor in staged.named_parameters() if id(tensor) not in touched]
    assert all(after[name] == before[name] for name in kept)


@torch.no_grad()
def test_matrix_that_cannot_be_converted_is_refused_and_nothing_changes() -> None:
    """Floats for tiles, of a model that does not say how to quantize; the next update has nothing of this one."""
    config, experts, numerics = FORMS["fp8 and fp4 tiles"]
    old, new = (checkpoint(config, experts, seed) for seed in (0, 1))
    model, memory = fill(poisoned(config, numerics, with_mtp=True), old), HostMemory(CPU)
    before = bytes_of(model)
    update = Transaction(model.slots(), V4_NAMES, {}, v4_shards(config), CPU, staging=memory)
    kept = r"a matrix is torch.bfloat16 with scales None, where this model keeps int8 with scales per 32 inputs"
    with pytest.raises(WeightUpdateError) as caught:
        update.take([("norm.weight", new["norm.weight"] + 1), (W1, widened(new)[W1].bfloat16())])
    assert len(caught.value.mismatched) == 1 and re.fullmatch(f"{W1}: {kept}", caught.value.mismatched[0])
    assert bytes_of(model) == before
    memory.clear()
    update = transaction(model, old, staged=True, memory=memory)
    update.take([("layers.0.attn_norm.weight", new["layers.0.attn_norm.weight"] + 2)])
    update.check(partial=True)
    update.write()
    assert [name for name, found in bytes_of(model).items() if found != before[name]] == ["layers.0.attn_norm"]


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


MODELS = {
    "mtp": partial(DeepseekV4, CONFIG),
    "dspark": partial(DeepseekV4, parse_config(TINY_REFRESHED)),
    **{
        name: partial(DeepseekMla, mla_config.parse_config(raw_config(name, num_nextn_predict_layers=1)))
        for name in ("v2_lite", "v32")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_slots_name_every_tensor_of_a_model(name: str) -> None:
    """So that an update and a sleep miss none; tables of angles follow from the configuration."""
    numerics = Numerics.choose(dtype=torch.float32, quantized=False, deterministic=False, device=torch.device("cpu"))
    model = MODELS[name](numerics, with_mtp=True)
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


# ------------------------------------------------------------------------------------------------------------- deltas


def nudged(tensors: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return tensors of which some have other numbers in a corner, some in one place, and some none."""
    found = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        found[name] = tensor.clone()
        if tensor.is_floating_point() and i % 3 and tensor.numel():
            place = tuple(int(torch.randint(n, (), generator=generator)) for n in tensor.shape)
            found[name][place] += 0.25
            if i % 3 == 2 and tensor.dim() == 2:
                found[name][-3:, -5:] *= -1.5
    return found


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_delta_makes_the_model_that_the_whole_update_makes(form: str) -> None:
    """For every resident form, with blocks at edges; numbers that share a scale with new ones are quantized with them."""
    config, experts, numerics = FORMS[form]
    old = widened(checkpoint(config, experts, 0))
    new, tensors = nudged(old, torch.Generator().manual_seed(3)), checkpoint(config, experts, 0)
    models = [fill(poisoned(config, numerics, with_mtp=True), tensors) for _ in range(2)]
    sent: list[dict[str, Tensor]] = [new, dict(DeltaSource(NamedTensors(new), old).tensors())]
    for model, given in zip(models, sent, strict=True):
        update = transaction(model, tensors, staged=True)
        for bucket in buckets(reversed(given.items())):
            update.take(bucket)
        update.check(partial=True)
        update.write()
    slots = models[1].slots()
    for name, slot in models[0].slots().items():
        assert slot.values().float().equal(slots[name].values().float()), name
    assert any(name.endswith("@values") for name in sent[1])
    assert sum(tensor.nbytes for tensor in sent[1].values()) < 0.5 * sum(tensor.nbytes for tensor in new.values())
    assert not dict(DeltaSource(NamedTensors(new), new).tensors())


@torch.no_grad()
def test_delta_of_stacked_experts_and_of_a_rank_s_part() -> None:
    """transformers keeps the experts of a layer in one tensor; a rank of two takes what is its own of each block."""
    config, numerics = CONFIG, replace(rounded(), quantized=False)
    old = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in widened(checkpoint(config, "fp4", 0)).items()
    }
    experts = [f"layers.1.ffn.experts.{e}" for e in range(config.num_experts)]
    stacks = {"down_proj": ("w2",), "gate_up_proj": ("w1", "w3")}
    for stack, matrices in stacks.items():
        before = torch.stack([torch.cat([old[f"{expert}.{m}.weight"] for m in matrices]) for expert in experts])
        after = before.clone()
        after[1, 3, 2:9] += 1
        after[-1, -1, -1] += 1
        model = fill(DeepseekV4(config, numerics, with_mtp=False), old)
        update = Transaction(model.slots(), V4_NAMES, {}, v4_shards(config), CPU, staging=HostMemory(CPU))
        name = f"model.layers.1.mlp.experts.{stack}"
        update.take(list(DeltaSource(NamedTensors({name: after}), {name: before}, block=(7, 5)).tensors()))
        update.check(partial=True)
        update.write()
        slots = model.slots()
        for e, expert in enumerate(experts):
            found = torch.cat([slots[f"{expert}.{m}.weight"].values() for m in matrices])
            assert found.equal(after[e]), (stack, e)


def test_blocks_of_a_part_are_written_where_the_part_lies() -> None:
    """A part that begins and ends inside blocks, of a tensor with blocks beyond its edges."""
    old = torch.arange(60.0).view(6, 10)
    new = old.clone()
    new[1, 4], new[5, 9] = -1, -2
    parts = dict(DeltaSource(NamedTensors({"x": new}), {"x": old}, block=(4, 2)).tensors())
    blocks = Blocks.of({name.partition("@")[2]: tensor for name, tensor in parts.items()})
    assert blocks.offsets.tolist() == [[0, 4], [4, 8]]
    for cut in ((slice(0, 6), slice(0, 10)), (slice(1, 3), slice(0, 10)), (slice(0, 6), slice(5, 10)), (slice(2, 6), slice(3, 5))):
        assert blocks.write(old[cut], blocks.whole()[cut], None).equal(new[cut])


class OneBuffer:
    """A source that can be read once, and yields every tensor in the same memory: a tensor that a reader keeps is overwritten."""

    def __init__(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self._pairs = iter(pairs)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(64, dtype=torch.uint8)
        for name, tensor in self._pairs:
            yield name, buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            buffer.fill_(0xFF)


@pytest.mark.parametrize("changed", [(), ("matrix",), ("scale",), ("matrix", "scale")], ids="-".join)
@pytest.mark.parametrize("first", ["matrix", "scale"])
@pytest.mark.parametrize("scale", ["x.scale", "x.weight_scale_inv", "experts.down_proj_scale_inv"])
def test_quantized_matrix_and_its_scale_are_sent_whole_if_either_has_changed(
    scale: str, first: str, changed: tuple[str, ...]
) -> None:
    """In either order and far apart; of the two in between, one never changes, and the other has no partner."""
    names = {"matrix": "experts.down_proj" if scale.startswith("experts") else "x.weight", "scale": scale}
    last = next(key for key in names if key != first)
    codes, scales = torch.arange(32, dtype=torch.int8).view(4, 8), torch.ones(4, 1)
    before = {names["matrix"]: codes, scale: scales, "y.weight": codes, "y.scale": scales, "attn_hc.scale": scales}
    after = {name: tensor.clone() for name, tensor in before.items()}
    for key in changed:
        after[names[key]].view(torch.uint8)[0, 0] ^= 1
    order = (names[first], "y.weight", "attn_hc.scale", "y.scale", names[last])
    sent = [(name, tensor.clone()) for name, tensor in DeltaSource(OneBuffer((n, after[n]) for n in order), before).tensors()]
    assert [name for name, _ in sent] == ([names[first], names[last]] if changed else [])
    assert all(tensor.equal(after[name]) for name, tensor in sent)
    after["attn_hc.scale"] += 1
    lone = dict(DeltaSource(NamedTensors({"attn_hc.scale": after["attn_hc.scale"]}), before).tensors())
    assert lone.keys() == {"attn_hc.scale"} and lone["attn_hc.scale"].equal(after["attn_hc.scale"])


VALUES = torch.zeros(1, 4, 4)
PARTS = {"norm.weight@shape": torch.tensor([512]), "norm.weight@offsets": torch.tensor([[0, 0]]), "norm.weight@values": VALUES}
W1 = "layers.0.ffn.experts.0.w1.weight"
REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "a part is missing": (
        {k: v for k, v in PARTS.items() if "values" not in k},
        "norm.weight: only shape and offsets of its blocks",
    ),
    "another part": ({"norm.weight@sizes": VALUES}, "norm.weight@sizes: unexpected; blocks of weights have shape, offsets, values"),
    "another shape": ({**PARTS, "norm.weight@shape": torch.tensor([3])}, r"norm.weight: shape \[3\], expected \[512\]"),
    "offsets": ({**PARTS, "norm.weight@offsets": torch.tensor([0.0])}, r"norm.weight: shape \[1\] and offsets \[1\]"),
    "a block before the first column": (
        {**PARTS, "norm.weight@offsets": torch.tensor([[0, -2]])},
        r"norm.weight: a block begins at \[0, -2\], outside of its 1 rows of 512 columns",
    ),
    "a block after the last row": ({**PARTS, "norm.weight@offsets": torch.tensor([[1, 0]])}, r"norm.weight: a block .* \[1, 0\]"),
    "values": (
        {**PARTS, "norm.weight@values": torch.zeros(2, 4, 4)},
        r"norm.weight: values of blocks are torch.float32 \[2, 4, 4\]",
    ),
    "a shape of no tensor": ({**PARTS, "norm.weight@shape": torch.tensor([1 << 30, 1 << 30])}, "norm.weight: blocks of a tensor"),
    "an unknown tensor": ({k.replace("norm", "nom"): v for k, v in PARTS.items()}, "nom.weight: unexpected"),
    "a scale": ({"layers.0.attn.wkv.scale@values": VALUES}, "scale@values: unexpected"),
    "twice": ({**PARTS, "norm.weight": torch.zeros(512)}, "norm.weight: given twice"),
    "a part of what is quantized together": (
        {f"{W1}@shape": torch.tensor([256, 512]), f"{W1}@offsets": torch.tensor([[0, 0]]), f"{W1}@values": VALUES},
        f"{W1}: blocks of 4 x 4 cut through numbers that are quantized 1 x 32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_blocks_that_do_not_fit_are_refused(case: str) -> None:
    config, experts, numerics = FORMS["fp8 and fp4 tiles"]
    tensors = checkpoint(config, experts, 0)
    model = fill(poisoned(config, numerics), tensors)
    given, message = REFUSED[case]
    update = transaction(model, tensors, staged=True)
    with pytest.raises(WeightUpdateError, match=message):
        for name, tensor in given.items():
            update.take([(name, tensor)])
        update.check(partial=True)


def test_blocks_need_a_staged_update() -> None:
    """Otherwise the present numbers, which they change, may be gone."""
    config, experts, numerics = FORMS["widened"]
    tensors = checkpoint(config, experts, 0)
    with pytest.raises(WeightUpdateError, match=r"norm.weight@shape: .* need a staged update"):
        transaction(fill(poisoned(config, numerics), tensors), tensors, staged=False).take(list(PARTS.items()))
