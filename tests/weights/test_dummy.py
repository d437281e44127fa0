from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts import Tiles
from dsv4lite.models.deepseek_v4.config import V4Config, parse_config
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS, official_shapes
from dsv4lite.models.family import FAMILIES
from dsv4lite.weights.checkpoint import ExpertFormat
from dsv4lite.weights.dummy import dummy_tensors, fill_tiles
from dsv4lite.weights.names import NameTables
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.source import ModelSource
from dsv4lite.weights.tensors import stored_tensors
from tests.tiny import TINY_QUANTIZED
from tests.weights.test_loader import dequantize

FORMATS: list[tuple[ExpertFormat, bool]] = [("fp4", True), ("fp8", True), ("unquantized", False)]


@pytest.fixture(scope="module")
def config() -> V4Config:
    return parse_config(
        {**TINY_QUANTIZED, "vocab_size": 2000, "hidden_size": 256, "q_lora_rank": 128, "moe_intermediate_size": 160}
    )


def dummies(config: V4Config, expert_format: ExpertFormat = "fp4", quantized: bool = True, seed: int = 0) -> dict[str, Tensor]:
    return dict(dummy_tensors(config, V4_TENSORS, expert_format=expert_format, quantized=quantized, seed=seed))


@pytest.mark.parametrize(("expert_format", "quantized"), FORMATS)
def test_dummy_has_the_official_tensors(config: V4Config, expert_format: ExpertFormat, quantized: bool) -> None:
    expected = {}
    for name, spec in official_shapes(config).items():
        expected |= stored_tensors(name, spec, quantized=quantized, expert_format=expert_format)
    made = dummies(config, expert_format, quantized)
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == {
        name: (t.shape, t.dtype) for name, t in expected.items()
    }


def test_dummy_yields_scales_before_weights(config: V4Config) -> None:
    names = list(dummies(config))
    assert all(names[names.index(n) + 1] == n.removesuffix(".scale") + ".weight" for n in names if n.endswith(".scale"))


@pytest.mark.parametrize(("expert_format", "quantized"), FORMATS)
def test_dummy_matrices_keep_the_size_of_activations(config: V4Config, expert_format: ExpertFormat, quantized: bool) -> None:
    made = dummies(config, expert_format, quantized)
    for name, spec in official_shapes(config).items():
        value = dequantize(made[name], made.get(name.removesuffix(".weight") + ".scale"))
        assert value.isfinite().all(), name
        if spec.kind in ("dense", "expert") and value.numel() > 10_000:
            # Scales are powers of two, and the few scales of a small matrix may all be the lesser or the greater.
            assert 0.44 < value.std() * spec.shape[-1] ** 0.5 < 1.8, name
            assert abs(value.mean()) < 0.1 * value.std(), name


def test_dummy_plain_tensors_have_their_size(config: V4Config) -> None:
    made = dummies(config)
    for name, size in (("embed.weight", 1.0), ("head.weight", 1 / 16), ("layers.1.attn.compressor.wkv.weight", 1 / 16)):
        assert made[name].dtype == torch.bfloat16
        assert made[name].float().std().item() == pytest.approx(size, rel=0.02), name
        assert made[name].float().mean().item() == pytest.approx(0, abs=0.03 * size), name


def test_dummy_norms_are_one_and_router_bias_is_zero(config: V4Config) -> None:
    made = dummies(config)
    assert all((t == 1).all() for name, t in made.items() if name.endswith("norm.weight"))
    assert all((t == 0).all() for name, t in made.items() if name.endswith("gate.bias"))


def test_dummy_hash_table_spreads_distinct_experts(config: V4Config) -> None:
    table = dummies(config)["layers.0.ffn.gate.tid2eid"]
    assert table.dtype == torch.int64 and table.min() == 0 and table.max() == config.num_experts - 1
    assert (table[:, 0] != table[:, 1]).all()
    counts = torch.bincount(table.flatten(), minlength=config.num_experts)
    assert counts.min() > 0.8 * counts.float().mean() and counts.max() < 1.2 * counts.float().mean()


def test_dummy_depends_on_seed_and_name_only(config: V4Config) -> None:
    state = torch.get_rng_state()
    first, again, other = dummies(config), dummies(config), dummies(config, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    random = [name for name, spec in official_shapes(config).items() if spec.kind in ("dense", "expert")]
    assert all(torch.equal(t.view(torch.uint8), again[name].view(torch.uint8)) for name, t in first.items())
    assert not any(torch.equal(first[name].view(torch.uint8), other[name].view(torch.uint8)) for name in random)
    experts = [first[f"layers.2.ffn.experts.{e}.w1.weight"] for e in range(config.num_experts)]
    assert not any(torch.equal(experts[0], expert) for expert in experts[1:])
    assert torch.equal(dummies(config, "fp8")[random[0]].view(torch.uint8), first[random[0]].view(torch.uint8))


def test_dummy_is_made_lazily(config: V4Config) -> None:
    """Asking for the first tensor of a huge model must not make the others."""
    huge = parse_config({**TINY_QUANTIZED, "vocab_size": 10, "moe_intermediate_size": 1 << 20, "hidden_size": 1 << 14})
    name, tensor = next(dummy_tensors(huge, V4_TENSORS, expert_format="fp4", quantized=True))
    assert name == "embed.weight" and tensor.shape == (10, 1 << 14)


def test_dummy_makes_only_what_is_wanted(config: V4Config) -> None:
    names = {"norm.weight", "layers.1.attn.wkv.weight"}
    some, every = dict(dummy_tensors(config, V4_TENSORS, expert_format="fp4", quantized=True, names=names)), dummies(config)
    assert some.keys() == names | {"layers.1.attn.wkv.scale"}
    assert all(torch.equal(tensor.view(torch.uint8), every[name].view(torch.uint8)) for name, tensor in some.items())


def stack(*, fp4: bool) -> Tiles:
    codes, scales = Tiles.shapes(2, 128, 256, fp4=fp4)
    return Tiles(torch.full(codes, 255, dtype=torch.uint8), torch.full(scales, -1, dtype=torch.int32))


@pytest.mark.parametrize("fp4", [True, False])
def test_filled_tiles_keep_the_size_of_activations(fp4: bool) -> None:
    tiles = stack(fp4=fp4)
    fill_tiles(tiles, ["a", "b"])
    values = [tiles.dequantize(expert) for expert in range(2)]
    for value in values:
        assert value.isfinite().all() and abs(value.mean()) < 0.1 * value.std()
        assert value.std() * 256**0.5 == pytest.approx(1.0, rel=0.4)
    assert not torch.equal(*values)
    assert len(tiles.load(0)[1].unique()) == 2  # scales differ, so that one used for another shows


def test_filled_tiles_depend_on_name_and_seed_only() -> None:
    def filled(name: str, seed: int = 0) -> Tensor:
        tiles = stack(fp4=True)
        fill_tiles(tiles, [f"{name}.0", f"{name}.1"], seed)
        return torch.cat([tiles.codes.flatten(), tiles.scales.view(torch.uint8).flatten()])

    state = torch.get_rng_state()
    assert torch.equal(filled("a"), filled("a"))
    assert not torch.equal(filled("a"), filled("b")) and not torch.equal(filled("a"), filled("a", seed=1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("form", ["unquantized", "fp4"])
def test_dummy_fills_every_parameter(form: ExpertFormat) -> None:
    model = parse_config({**TINY_QUANTIZED, "hidden_size": 128, "moe_intermediate_size": 128})
    source = ModelSource(
        family=FAMILIES["deepseek_v4"],
        folder=Path("."),
        generation_config={},
        names=NameTables(),
        model=model,
        dtype=torch.bfloat16,
        expert_format="fp4",
        dense_fp8=True,
        checkpoint=None,
    )
    numerics = Numerics(
        dtype=torch.bfloat16,
        quantized=True,
        deterministic=False,
        matrix_dtype=torch.float32,
        device=torch.device("cpu"),
        resident_experts=form,
    )
    built, again = (source.build(numerics, with_mtp=False, seed=3) for _ in range(2))
    assert {name for name, _ in built.named_parameters() if name.endswith("w13.codes")} == (
        {f"layers.{i}.ffn.experts.w13.codes" for i in range(model.num_hidden_layers)} if form == "fp4" else set()
    )
    for held, other in zip(built.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(held, other) and (held.dtype.is_floating_point is False or held.isfinite().all())
    with torch.no_grad():
        assert built.logits(built.one_pass([1, 5, 3])).isfinite().all()
