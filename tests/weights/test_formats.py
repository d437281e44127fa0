"""Weight-only checkpoints: their numbers, the engine on them, how ranks share them, and what is wrong with broken ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4lite.config import MTP, EngineConfig
from dsv4lite.errors import CheckpointError, ConfigError, WeightUpdateError
from dsv4lite.kernels.four_bit import FourBit
from dsv4lite.layout import Layout
from dsv4lite.models.shard import shards_of
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.planning.memory import choose_numerics, plan_memory
from dsv4lite.request import SamplingParams
from dsv4lite.weights.delta import DeltaSource
from dsv4lite.weights.formats import IN, OUT, Part, QuantFormat, modelopt
from dsv4lite.weights.formats import awq as awq_method
from dsv4lite.weights.source import ModelSource
from dsv4lite.weights.update import DiskSource, NamedTensors
from tests.e2e.engines import opened, prompts_of, unopened, write_tokenizer
from tests.e2e.updates import load
from tests.mla import BLOCKS
from tests.packings import Packed, Packing, Packs, awq, compressed, gptq, is_packed, nvfp4, write_packed, write_random_packed
from tests.tiny import write_checkpoint

PACKINGS: Mapping[str, Packing] = {
    "awq": awq(128),
    "awq, groups of 32": awq(32),
    "gptq": gptq(128, "gptq", symmetric=False),
    "gptq, symmetric": gptq(64, "gptq", symmetric=True),
    "gptq_v2": gptq(128, "gptq_v2", symmetric=False),
    "compressed-tensors": compressed(128, symmetric=True),
    "compressed-tensors, zero points": compressed(32, symmetric=False),
    "nvfp4 of compressed-tensors": nvfp4("compressed-tensors"),
    "nvfp4 of modelopt": nvfp4("modelopt"),
}
PROMPT = prompts_of((70,), 96, seed=4)[0]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
Q_A = "model.layers.0.self_attn.q_a_proj."
BOUND = 1e-4  # between log-probabilities of two implementations in float32


@pytest.fixture(scope="module", params=PACKINGS)
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packs:
    return write_packed(tmp_path_factory.mktemp("packs"), PACKINGS[request.param])


def built(folder: Path, *, quant_formats: Any = None, **changes: Any) -> tuple[Any, ModelSource]:
    """Return a model that is loaded, and what it was made from."""
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", quant_formats=quant_formats or {})
    source = ModelSource.open(config)
    numerics = replace(choose_numerics(config, source, torch.device("cpu")), **changes)
    return source.build(numerics, with_mtp=False), source


def test_numbers_are_those_of_the_packing_to_the_bit(packs: Packs) -> None:
    model, source = built(packs.folder)
    assert source.form is not None and source.expert_format == "four_bit" and source.dense_four_bit
    slots = model.slots()
    assert slots.keys() == packs.numbers.keys()
    for name, slot in slots.items():
        assert torch.equal(slot.values(), packs.numbers[name].float()), name


def test_numbers_that_stay_packed_are_the_same(packs: Packs) -> None:
    """As on a GPU: dense matrices and experts with four bits, but not the up-projections, which attention reads as they are."""
    _, source = built(packs.folder)
    assert source.form is not None
    stays = {"resident_experts": "four_bit", "resident_four_bit": True}
    model, _ = built(packs.folder, **stays)
    for name, slot in model.slots().items():
        assert torch.equal(slot.values(), packs.numbers[name].float()), name
    assert model.blocks[1].ffn.experts.w13.weight.dtype == torch.int32  # eight codes
    assert model.blocks[1].attn.wkv_b.weight.dtype == torch.float32
    with torch.no_grad():
        packed, wide = (m.logits(m.one_pass(PROMPT)) for m in (model, built(packs.plain)[0]))
    assert (packed - wide).abs().max() < BOUND


def test_engine_says_what_the_dequantized_models_say(packs: Packs) -> None:
    """In float32: transformers' model with the dequantized numbers, and this library's own."""
    with torch.no_grad():
        wanted = packs.model(torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
    chosen = wanted[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    with opened(packs.folder, dtype="float32") as llm:
        scores, tokens = llm.score(PROMPT[:1], PROMPT[1:]), llm.generate(PROMPT, GREEDY).token_ids
    assert (scores.sampled - chosen).abs().max() < BOUND
    with opened(packs.plain) as llm:
        assert llm.generate(PROMPT, GREEDY).token_ids == tokens


# Ranks.


@pytest.mark.parametrize("name", ["awq, groups of 32", "gptq, symmetric", "compressed-tensors, zero points", "nvfp4 of modelopt"])
def test_ranks_hold_their_parts_of_the_numbers(tmp_path: Path, name: str) -> None:
    packs, layout = write_packed(tmp_path, PACKINGS[name]), Layout(tp=2)
    for rank in range(2):
        _, source = built(packs.folder)
        config = EngineConfig(model=str(packs.folder), device="cpu", dtype="float32")
        numerics = choose_numerics(config, source, torch.device("cpu"))
        numerics = replace(numerics, resident_experts="four_bit", resident_four_bit=True)
        slots = source.build(numerics, Mesh.outline(layout, rank), with_mtp=False).slots()
        shards = shards_of(source.model, source.family.tensors, layout, rank)
        halves = 0
        for official, slot in slots.items():
            whole = packs.numbers[official].float()
            part = whole[shards.cut(official, whole.shape)]
            assert torch.equal(slot.values(), part), official
            halves += part.numel() < whole.numel()
        assert halves > 10


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    folder = write_packed(tmp_path, PACKINGS["compressed-tensors, zero points"]).folder
    found = []
    for size in (1, 2):
        with opened(folder, dtype="float32", tensor_parallel_size=size) as llm:
            found.append((llm.generate(PROMPT, GREEDY).token_ids, llm.score(PROMPT[:1], PROMPT[1:]).sampled))
    assert found[0][0] == found[1][0]
    assert (found[0][1] - found[1][1]).abs().max() < BOUND


# Plans.


def test_plan_counts_packed_bytes_on_a_gpu_and_floats_on_a_cpu(tmp_path: Path) -> None:
    packs = write_packed(tmp_path, PACKINGS["awq"])
    on_gpu = plan_memory(str(packs.folder), gpu="h200", max_model_len=256)
    assert "4-bit matrices, 4-bit experts, bfloat16 KV rows" in on_gpu.planned_for
    packed = [t for name, t in packs.numbers.items() if t.dim() == 2 and is_packed(name, kind_of(name)) and "wkv_b" not in name]
    others = [t for name, t in packs.numbers.items() if not any(t is one for one in packed)]
    # Codes, then scales in float16 and zero points in bytes; norms and the router's bias are float32.
    least = sum(t.numel() // 2 + 3 * t.numel() // 128 for t in packed) + sum(t.numel() * (2 if t.dim() == 2 else 4) for t in others)
    weights = on_gpu.per_device[0].weights
    assert least <= weights <= least + 4096
    on_cpu = plan_memory(str(packs.folder), device="cpu", max_model_len=256).per_device[0].weights
    embedding = packs.numbers["embed.weight"].numel()
    assert on_cpu >= 4 * sum(t.numel() for t in packs.numbers.values()) - 2 * embedding


def kind_of(name: str) -> str:
    """Return the kind of a matrix by its name."""
    return "other" if name.split(".")[-2] in ("embed", "head", "gate") else "dense"


def test_some_unpacked_dense_matrix_widens_the_dense_ones_and_leaves_experts_packed(tmp_path: Path) -> None:
    packs = write_packed(tmp_path, PACKINGS["awq"], unpacked=("attn.wkv_a.weight",))
    model, source = built(packs.folder)
    assert source.expert_format == "four_bit" and not source.dense_four_bit
    for name, slot in model.slots().items():
        assert torch.equal(slot.values(), packs.numbers[name].float()), name


def test_random_weights_have_the_format_of_the_config(tmp_path: Path) -> None:
    folder = write_packed(tmp_path, PACKINGS["nvfp4 of modelopt"]).folder
    config = EngineConfig(model=str(folder), device="cpu", load_format="dummy")
    source = ModelSource.open(config)
    numerics = choose_numerics(config, source, torch.device("cpu"))
    assert numerics.dtype == torch.bfloat16 and numerics.scale_dtype == torch.float8_e4m3fn and source.dense_four_bit
    numerics = replace(numerics, resident_experts="four_bit", resident_four_bit=True)
    model = source.build(numerics, with_mtp=False)
    values = model.slots()["layers.1.ffn.experts.3.w2.weight"].values()
    assert 0.5 < values.std() * values.shape[1] ** 0.5 < 2


def test_drafter_whose_projection_is_packed_drafts(tmp_path: Path) -> None:
    write_random_packed(tmp_path, {**BLOCKS, "quantization_config": None}, PACKINGS["awq"], packed=("mtp.0.eh_proj.weight",))
    with opened(tmp_path, dtype="float32", speculative=MTP(1, adaptive=False)) as llm:
        llm.generate(PROMPT, GREEDY)
        found = llm.stats().speculation
    assert found is not None and found.drafted > 0


# Updates.


@pytest.mark.parametrize(
    ("name", "leaves", "last"),
    [
        ("awq", "AWQ; send qweight, qzeros, scales", "scales"),
        ("nvfp4 of modelopt", "NVFP4 of .* weight, weight_scale,", "weight_scale"),
    ],
)
def test_packed_tensors_replace_packed_matrices_and_floats_are_refused(tmp_path: Path, name: str, leaves: str, last: str) -> None:
    first, second = (write_packed(tmp_path / str(seed), PACKINGS[name], seed=seed) for seed in (0, 1))
    with opened(second.folder, dtype="float32") as llm:
        wanted, sums = llm.generate(PROMPT, GREEDY).token_ids, llm.weight_checksums()
    with opened(first.folder, dtype="float32") as llm:
        before = llm.generate(PROMPT, GREEDY).token_ids
        with pytest.raises(WeightUpdateError, match=rf"attn\.wq_a\.weight: dtype F32, .* {leaves}"):
            load(llm, 1, NamedTensors(second.numbers))
        with pytest.raises(WeightUpdateError, match=rf"layers\.0\.attn\.wq_a\.{last}: missing"):
            with llm.update_weights(2, partial=True) as update:
                parts = {name: t for name, t in tensors_of(second.folder) if not name.endswith(Q_A + last)}
                update.load(NamedTensors(parts))
        assert llm.generate(PROMPT, GREEDY).token_ids == before != wanted
        load(llm, 3, NamedTensors(dict(reversed(list(tensors_of(second.folder))))))
        assert llm.generate(PROMPT, GREEDY).token_ids == wanted and llm.weight_checksums() == sums


@pytest.mark.parametrize("name", PACKINGS)
def test_engine_with_random_weights_takes_packed_matrices(tmp_path: Path, name: str) -> None:
    """Those that the checkpoint does not pack, too."""
    folder = write_packed(tmp_path, PACKINGS[name], unpacked=("attn.wo.weight",)).folder
    with opened(folder, dtype="float32") as llm:
        wanted = llm.weight_checksums()
    with opened(folder, dtype="float32", load_format="dummy") as llm:
        load(llm, 1, DiskSource(str(folder)))
        assert llm.weight_checksums() == wanted


@pytest.mark.parametrize("name", sorted({*PACKINGS} - {"awq, groups of 32", "gptq, symmetric", "gptq_v2", "compressed-tensors"}))
def test_delta_brings_all_tensors_of_the_packed_matrices_that_changed(tmp_path: Path, name: str) -> None:
    """Its order is the reverse of the checkpoint's; two matrices, a norm and one block of the embedding have changed."""
    first, second = (write_packed(tmp_path / str(seed), PACKINGS[name], seed=seed).folder for seed in (0, 1))
    before, other = dict(tensors_of(first)), dict(tensors_of(second))
    changed = (Q_A, "model.layers.1.mlp.experts.3.up_proj.")
    after = {name: other[name] if name.startswith((*changed, "model.norm.")) else tensor for name, tensor in before.items()}
    after["model.embed_tokens.weight"] = before["model.embed_tokens.weight"].clone()
    after["model.embed_tokens.weight"][3, 5] += 1
    kept = next(name for name in before if name.startswith(changed[1]))  # one of its tensors is as it was
    after[kept] = before[kept]
    delta = dict(DeltaSource(NamedTensors(dict(reversed(after.items()))), before, block=(32, 32)).tensors())
    assert {name for name in delta if "@" not in name} == {name for name in before if name.startswith((*changed, "model.norm."))}
    assert {name.partition("@")[0] for name in delta if "@" in name} == {"model.embed_tokens.weight"}
    sums = []
    with opened(first, dtype="float32") as llm:
        for version, (sent, partial) in enumerate(((before, False), (delta, True), (after, False))):
            load(llm, version, NamedTensors(sent), partial=partial)
            sums.append(llm.weight_checksums())
    assert sums[0] != sums[1] == sums[2]


@pytest.mark.parametrize("disk", [False, True])
def test_packed_tensors_that_cannot_be_read_are_refused_as_an_update(tmp_path: Path, disk: bool) -> None:
    folder = write_packed(tmp_path, PACKINGS["gptq"]).folder
    wrong = {name: tensor.flip(0) if name == Q_A + "g_idx" else tensor for name, tensor in tensors_of(folder)}
    save_file({name: tensor.contiguous() for name, tensor in wrong.items()}, tmp_path / "model.safetensors")
    with opened(folder) as llm:
        before = llm.generate(PROMPT, GREEDY).token_ids
        with pytest.raises(WeightUpdateError, match="update does not fit") as caught:
            load(llm, 1, DiskSource(str(tmp_path)) if disk else NamedTensors(wrong))
        assert "layers.0.attn.wq_a.weight: g_idx is not in the order of the inputs" in caught.value.mismatched[0]
        assert llm.generate(PROMPT, GREEDY).token_ids == before


def test_floats_are_rounded_to_symmetric_int4_of_compressed_tensors(tmp_path: Path) -> None:
    """What the packing of this test does too."""
    packs = write_packed(tmp_path, PACKINGS["compressed-tensors"])
    with opened(packs.folder, dtype="float32") as llm:
        before = llm.weight_checksums()
        load(llm, 1, NamedTensors(packs.numbers))
        assert llm.weight_checksums() == before
        name = "layers.1.ffn.experts.2.w1.weight"
        other, sums = packs.numbers[name].flip(0) * 1.7, []
        for version, weight in ((2, other), (3, PACKINGS["compressed-tensors"].pack(other)[1])):
            load(llm, version, NamedTensors({name: weight}), partial=True)
            sums.append(llm.weight_checksums())
        other[3, 5] = float("nan")
        with pytest.raises(WeightUpdateError, match=rf"{name}: has numbers that are infinite or NaN"):
            load(llm, 4, NamedTensors({name: other}), partial=True)
    assert sums[0] == sums[1] and {key for key, value in sums[0].items() if value != before[key]} == {name}


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    yield from load_file(folder / "model.safetensors").items()


# A format of the host's own.


def int8_rows(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round()
    return {"codes": codes.to(torch.int8), "row_scale": scale}, codes * scale[:, None]


def test_format_of_the_documentation_serves_and_updates(tmp_path: Path) -> None:
    """A byte for each number and a scale for each row, from the page's own text."""
    page = (Path(__file__).parents[2] / "docs/quantization.md").read_text(encoding="utf-8")
    (text,) = (block for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "QuantFormat" in block)
    names: dict[str, Any] = {}
    exec(text, names)

    packing = Packing({"quant_method": "int8_rows"}, int8_rows)
    first, second = (write_packed(tmp_path / str(i), packing, seed=i) for i in (0, 1))
    settings: dict[str, Any] = {"dtype": "float32", "quant_formats": names["config"].quant_formats}
    found = []
    for folder in (first.plain, second.plain):
        with opened(folder) as llm:
            found.append(llm.generate(PROMPT, GREEDY).token_ids)
    assert found[0] != found[1]
    with opened(first.folder, **settings) as llm:
        assert llm.generate(PROMPT, GREEDY).token_ids == found[0]
        load(llm, 1, NamedTensors(dict(tensors_of(second.folder))))
        assert llm.generate(PROMPT, GREEDY).token_ids == found[1]
        sums = llm.weight_checksums()
        name = "layers.0.ffn.w1.weight"
        load(llm, 2, NamedTensors({name: first.numbers[name] + 1.0}), partial=True)
        assert {key for key, value in llm.weight_checksums().items() if value != sums[key]} == {name}
    plan = plan_memory(str(first.folder), gpu="h200", max_model_len=256, quant_formats=settings["quant_formats"])
    assert "bfloat16 matrices, bfloat16 experts, bfloat16 KV rows" in plan.planned_for
    with pytest.raises(ConfigError, match=r"known: fp8, awq, gptq.*quant_formats"), opened(first.folder):
        pass


CODES, ROW_SCALE = Part("codes", ("I8",), ((OUT, 1), (IN, 1))), Part("row_scale", ("F32",), ((OUT, 1),))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    """A checkpoint in a format of the host's own."""
    return write_packed(tmp_path_factory.mktemp("own"), Packing({"quant_method": "int8_rows"}, int8_rows))


def own_format(**settings: Any) -> Any:
    def method(quantization: Mapping[str, Any]) -> QuantFormat:
        given = {"parts": (CODES, ROW_SCALE), "read": lambda parts: parts["codes"].float() * parts["row_scale"][:, None]}
        return QuantFormat(**{"name": "int8 rows", **given, **settings})

    return {"dtype": "float32", "quant_formats": {"int8_rows": method}}


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (lambda parts: parts["codes"][:1].float(), r"torch.float32 \[1, 384\]"),  # would be copied to every row
        (lambda parts: parts["codes"].float().t(), r"torch.float32 \[384, 256\]"),
        (lambda parts: parts["codes"].int(), r"torch.int32 \[256, 384\]"),
        (lambda parts: None, "None"),
    ],
)
def test_what_an_own_format_makes_of_a_matrix_is_checked(own: Packs, read: Any, given: str) -> None:
    wanted = rf"weight: the format 'int8 rows' made {given}; it must make floats \[256, 384\]"
    with pytest.raises(CheckpointError, match=wanted), opened(own.folder, **own_format(read=read)):
        pass


def test_what_an_own_format_makes_of_an_update_is_checked(own: Packs) -> None:
    name = "layers.0.ffn.w1.weight"
    for staged in (True, False):
        with unopened(own.folder, **own_format(quantize=lambda weight: weight[:1])) as llm:
            with pytest.raises(WeightUpdateError, match=rf"{name}: the format 'int8 rows' made torch.float32 \[1, 256\]"):
                with llm.update_weights(1, staged=staged) as update:
                    update.load(NamedTensors({name: own.numbers[name]}))


def four_bit(codes: Tensor, *, per: int = 32, scale: Any = None, offsets: Any = None) -> FourBit:
    shape = (len(codes), codes.shape[1] // per)
    given = torch.full(shape, 0.1) if scale is None else scale
    return FourBit.of(codes, given, torch.full(shape, 8, dtype=torch.uint8) if offsets is None else offsets)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda c: four_bit(c + 16), "the largest code is 16; codes must be from 0 to 15"),
        (lambda c: four_bit(c, offsets=torch.full((256, 12), 16).byte()), "the largest zero point is 16; zero points must"),
        (lambda c: four_bit(c.int()), r"codes are torch.int32 \[256, 384\]; they must be uint8"),
        (lambda c: four_bit(c[:, :-4]), r"codes are torch.uint8 \[256, 380\]; .* a multiple of 8"),
        (lambda c: four_bit(c, scale=torch.ones(256, 0)), r"scales have the shape \[256, 0\]"),
        (lambda c: four_bit(c, scale=torch.ones(1, 12)), r"made scales torch.float32 \[1, 12\]; they must be \[256, 12\]"),
        (lambda c: four_bit(c, per=64), r"made scales torch.float32 \[256, 6\]; .* for group=32"),
        (lambda c: four_bit(c, scale=torch.ones(256, 12, dtype=torch.int32)), r"made scales torch.int32 \[256, 12\]"),
        (lambda c: four_bit(c, offsets=torch.ones(256, 12)), r"made offsets torch.float32 .* must be torch.uint8 \[256, 12\]"),
        (lambda c: {}["scale"], "failed: KeyError: 'scale'"),
    ],
)
def test_four_bits_of_an_own_format_are_checked(own: Packs, make: Any, given: str) -> None:
    """Codes above 15 changed their neighbours and scales of other shapes were broadcast; others ended the start without a name."""
    settings = own_format(
        read=lambda parts: make(torch.zeros_like(parts["codes"], dtype=torch.uint8)), group=32, scales="row_scale"
    )
    with pytest.raises(CheckpointError, match=rf"(?s)\.weight: .*{given}"), opened(own.folder, **settings):
        pass


def test_scales_of_an_own_format_may_be_bytes_that_it_views_as_another_dtype(tmp_path: Path) -> None:
    """Matrices that stay packed kept them as numbers of the bytes' dtype, and all weights were wrong."""
    theirs = PACKINGS["nvfp4 of modelopt"]

    def pack(weight: Tensor) -> Packed:
        parts, numbers = theirs.pack(weight)
        return {**parts, "weight_scale": parts["weight_scale"].view(torch.uint8)}, numbers

    def method(quantization: Mapping[str, Any]) -> QuantFormat:
        form = modelopt({"quant_algo": "NVFP4"})
        codes, scale, factor = form.parts

        def read(parts: Mapping[str, Tensor]) -> FourBit | Tensor:
            return form.read({**parts, "weight_scale": parts["weight_scale"].view(torch.float8_e4m3fn)})

        return replace(form, parts=(codes, replace(scale, dtypes=("U8",)), factor), read=read, scale_dtype="F8_E4M3")

    packs = write_packed(tmp_path, Packing({"quant_method": "bytes"}, pack))
    for stays in ({}, {"resident_experts": "four_bit", "resident_four_bit": True}):
        model, source = built(packs.folder, quant_formats={"bytes": method}, **stays)
        assert source.scale_dtype == torch.float8_e4m3fn
        for name, slot in model.slots().items():
            assert torch.equal(slot.values(), packs.numbers[name].float()), name


def test_own_format_that_fails_on_an_update_is_named(own: Packs) -> None:
    """The source of the update was said to have failed."""
    name = "layers.0.ffn.w1.weight"
    with opened(own.folder, **own_format(quantize=lambda weight: {}["scale"])) as llm:
        before = llm.generate(PROMPT, GREEDY).token_ids
        with pytest.raises(WeightUpdateError, match=rf"{name}: the format 'int8 rows' failed: KeyError: 'scale'"):
            load(llm, 1, NamedTensors({name: own.numbers[name]}), partial=True)
        assert llm.generate(PROMPT, GREEDY).token_ids == before


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"parts": ()}, r"parts=\[\] must have a dimension for OUT and one for IN"),
        ({"parts": (ROW_SCALE, CODES)}, r"the first of parts=\['row_scale', 'codes'\] must have"),
        ({"parts": (CODES, Part("row_scale", ("F32",), ((OUT, 0),)))}, "part 'row_scale' has dims=.* at least 1"),
        ({"group": 32}, r"scales='' with group=32: it must be one of \['codes', 'row_scale'\]"),
        ({"group": 32, "scales": "codes"}, "scales in 'I8'; set scale_dtype to one of F8_E4M3, F16, BF16, F32"),
        ({"group": 32, "scales": "row_scale", "scale_dtype": torch.float16}, "scales in torch.float16; set scale_dtype to one of"),
    ],
)
def test_description_of_an_own_format_is_checked(own: Packs, settings: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"QuantFormat 'int8 rows': .*{wanted}"):
        plan_memory(str(own.folder), device="cpu", **own_format(**settings))


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (lambda quantization: None, "returned None, not a QuantFormat"),
        (lambda q: q["group_size"], "failed: KeyError: 'group_size'"),
    ],
)
def test_method_of_the_hosts_own_that_makes_no_format_is_named(own: Packs, method: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"quant_formats: the function for .*quant_method='int8_rows' {wanted}"):
        plan_memory(str(own.folder), device="cpu", quant_formats={"int8_rows": method})


# Broken checkpoints.


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Sound checkpoints, to be broken."""
    names = ("awq", "gptq", "compressed-tensors", "nvfp4 of modelopt")
    return {name: write_packed(tmp_path_factory.mktemp("sound"), PACKINGS[name]).folder for name in names}


def refused(folder: Path, path: Path, quantization: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> str:
    """Change a checkpoint's ``quantization_config`` and tensors; return what the engine says of it."""
    raw = json.loads((folder / "config.json").read_text())
    stored = {**load_file(folder / "model.safetensors"), **tensors}
    write_checkpoint(
        path,
        {**raw, "quantization_config": {**raw["quantization_config"], **quantization}},
        ((name, tensor) for name, tensor in stored.items() if tensor is not None),
    )
    write_tokenizer(path, raw["vocab_size"])
    with pytest.raises((CheckpointError, ConfigError)) as caught, opened(path):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "quantization", "wanted"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported (known: fp8, awq, gptq"),
        ("awq", {"quant_method": ["awq"]}, "quant_method=['awq'] is not supported"),
        ("awq", {"bits": 8}, "quant_method='awq' with bits=8 is not supported; it must be 4"),
        ("awq", {"version": "gemv"}, "version='gemv' is not supported; it must be 'gemm'"),
        ("awq", {"group_size": -1}, "group_size=-1 is not supported"),
        ("awq", {"group_size": 64}, "layers.0.attn.wq_a.scales: shape [2, 128], expected [4, 128]: one for 64 inputs x 1 rows"),
        ("awq", {"group_size": 96}, "layers.0.attn.wq_a.scales: shape [2, 128], expected [2.66"),
        ("gptq", {"desc_act": True}, "desc_act=True is not supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("compressed-tensors", {"config_groups": {}}, "config_groups={} is not supported; one group"),
        (
            "compressed-tensors",
            {"config_groups": {"g": {"weights": {"num_bits": 4, "actorder": "group"}}}},
            "actorder='group' is not",
        ),
        ("compressed-tensors", {"config_groups": {"g": {"weights": {"num_bits": 8}}}}, "with num_bits=8 is not supported"),
        ("compressed-tensors", {"format": "marlin-24"}, "format='marlin-24' is not supported"),
        ("nvfp4 of modelopt", {"quant_algo": "FP8"}, "quant_algo='FP8' is not supported; ModelOpt's 'NVFP4' is"),
    ],
)
def test_settings_that_are_not_supported_are_named(
    broken: Mapping[str, Path], tmp_path: Path, name: str, quantization: Mapping[str, Any], wanted: str
) -> None:
    assert wanted in refused(broken[name], tmp_path, quantization, {})


@pytest.mark.parametrize(
    ("name", "leaf", "tensor", "wanted"),
    [
        ("awq", "scales", None, "layers.0.attn.wq_a.scales: missing; AWQ needs it"),
        ("gptq", "g_idx", torch.arange(256).flip(0).int(), "layers.0.attn.wq_a.weight: g_idx is not in the order of the inputs"),
        ("gptq", "g_idx", torch.arange(256).int() // 128 + 3, "layers.0.attn.wq_a.weight: g_idx is not in the order of the inputs"),
        ("awq", "qweight", torch.zeros(256, 16), "layers.0.attn.wq_a.qweight: dtype F32, expected I32 (AWQ)"),
        ("awq", "qweight", torch.zeros(264, 16).int(), "layers.0.attn.wq_a.scales: shape [2, 128], expected [2.06"),
        ("awq", "qweight", torch.zeros(16).int(), "layers.0.attn.wq_a.qweight: shape [16], expected 2 dimensions (AWQ)"),
        ("nvfp4 of modelopt", "weight_scale_2", torch.ones(2), "wq_a.weight_scale_2: shape [2], expected one number"),
        ("compressed-tensors", "weight", torch.zeros(128, 256), "layers.0.attn.wq_a.weight: given twice"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    broken: Mapping[str, Path], tmp_path: Path, name: str, leaf: str, tensor: Tensor | None, wanted: str
) -> None:
    assert wanted in refused(broken[name], tmp_path, {}, {Q_A + leaf: tensor})


def test_version_of_awq_may_be_in_upper_case(tmp_path: Path) -> None:
    """Releases write "GEMM" as well as "gemm"; the former was refused."""
    packing = PACKINGS["awq"]
    packs = write_packed(tmp_path, packing._replace(config={**packing.config, "version": "GEMM"}))
    model, _ = built(packs.folder)
    assert all(torch.equal(slot.values(), packs.numbers[name].float()) for name, slot in model.slots().items())


@pytest.mark.parametrize(
    ("name", "leaf", "value"),
    [
        ("awq", "scales", float("inf")),
        ("gptq", "scales", float("nan")),
        ("compressed-tensors", "weight_scale", float("-inf")),
        ("nvfp4 of modelopt", "weight_scale", float("nan")),
        ("nvfp4 of modelopt", "weight_scale_2", float("inf")),
    ],
)
def test_scales_that_are_not_finite_are_named(
    broken: Mapping[str, Path], tmp_path: Path, name: str, leaf: str, value: float
) -> None:
    """One number of a matrix; such checkpoints used to load."""
    stored = load_file(broken[name] / "model.safetensors")[Q_A + leaf]
    tensor = stored.float()
    tensor.view(-1)[-1] = value
    message = refused(broken[name], tmp_path, {}, {Q_A + leaf: tensor.to(stored.dtype)})
    assert f"layers.0.attn.wq_a.weight: {leaf} must be finite numbers" in message


def test_ranks_do_not_cut_groups(broken: Mapping[str, Path]) -> None:
    _, source = built(broken["awq"])
    numerics = replace(choose_numerics(EngineConfig(model="any"), source, torch.device("cpu")), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"ffn\.w2\.weight: tp=2 cuts .* \[256, 384\] every 192 .* blocks of 128; choose a size"):
        source.build(numerics, Mesh.outline(Layout(tp=2), 1), with_mtp=False)


def test_quant_formats_must_be_functions_by_name(tmp_path: Path) -> None:
    for wrong in ({"mine": 1}, {1: awq_method}, [awq_method]):
        with pytest.raises(ConfigError, match="quant_formats="):
            EngineConfig(model=str(tmp_path), quant_formats=wrong)  # type: ignore[arg-type]


def test_layouts_that_cut_groups_are_not_advised(tmp_path: Path) -> None:
    folders = {group: write_packed(tmp_path / str(group), awq(group)).folder for group in (64, 128)}
    plans = {group: plan_memory(str(folder), gpu="h200", devices=2, max_model_len=256) for group, folder in folders.items()}
    sizes = {group: {entry.layout.tp for entry in plan.layouts} for group, plan in plans.items()}
    assert sizes == {64: {1, 2}, 128: {1}}


@pytest.mark.parametrize(("algorithm", "scheme"), [("NVFP4", "four_bit"), (None, "unquantized")])
def test_settings_of_older_exports_of_modelopt_are_in_a_file_of_their_own(
    tmp_path: Path, algorithm: str | None, scheme: str
) -> None:
    packs = write_packed(tmp_path, PACKINGS["nvfp4 of modelopt"])
    folder = packs.folder if algorithm else packs.plain
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": None}))
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    model, source = built(folder)
    assert source.expert_format == scheme
    assert all(torch.equal(slot.values(), packs.numbers[name].float()) for name, slot in model.slots().items())


def test_drafter_that_is_not_packed_leaves_the_others_packed(tmp_path: Path) -> None:
    numbers = write_random_packed(tmp_path, {**BLOCKS, "quantization_config": None}, PACKINGS["awq"])
    settings = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32")
    source = ModelSource.open(settings)
    assert (source.expert_format, source.dense_four_bit, source.drafter_four_bit) == ("four_bit", True, False)
    numerics = choose_numerics(settings, source, torch.device("cpu"))
    model = source.build(replace(numerics, resident_experts="four_bit", resident_four_bit=True), with_mtp=True)
    for name, slot in model.slots().items():
        assert torch.equal(slot.values(), numbers[name]), name
    held = {name: tensor.dtype for name, tensor in model.named_parameters() if name.endswith("ffn.experts.w2.weight")}
    assert held == {"layers.1.ffn.experts.w2.weight": torch.int32, "layers.2.ffn.experts.w2.weight": torch.int32} | {
        "mtp.0.block.ffn.experts.w2.weight": torch.float32
    }
    with opened(tmp_path, dtype="float32", speculative=MTP(1)) as llm:
        assert len(llm.generate(PROMPT, GREEDY).token_ids) == 12
