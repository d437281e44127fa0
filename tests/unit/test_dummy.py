from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.models.config import V4Config, parse_config
from dsv4lite.models.v4_tensors import official_shapes, stored_tensors
from dsv4lite.weights.checkpoint import ExpertFormat
from dsv4lite.weights.dummy import dummy_tensors
from tests.tiny import TINY_QUANTIZED
from tests.unit.test_loader import dequantize

FORMATS: list[tuple[ExpertFormat, bool]] = [("fp4", True), ("fp8", True), ("plain", False)]


@pytest.fixture(scope="module")
def config() -> V4Config:
    return parse_config(
        {**TINY_QUANTIZED, "vocab_size": 2000, "hidden_size": 256, "q_lora_rank": 128, "moe_intermediate_size": 160}
    )


def dummies(config: V4Config, expert_format: ExpertFormat = "fp4", quantized: bool = True, seed: int = 0) -> dict[str, Tensor]:
    return dict(dummy_tensors(config, expert_format=expert_format, quantized=quantized, seed=seed))


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
    first, again, other = dummies(config), dummies(config), dummies(config, seed=1)
    random = [name for name, spec in official_shapes(config).items() if spec.kind in ("dense", "expert")]
    assert all(torch.equal(t.view(torch.uint8), again[name].view(torch.uint8)) for name, t in first.items())
    assert not any(torch.equal(first[name].view(torch.uint8), other[name].view(torch.uint8)) for name in random)
    experts = [first[f"layers.2.ffn.experts.{e}.w1.weight"] for e in range(config.num_experts)]
    assert not any(torch.equal(experts[0], expert) for expert in experts[1:])
    assert torch.equal(dummies(config, "fp8")[random[0]].view(torch.uint8), first[random[0]].view(torch.uint8))


def test_dummy_leaves_global_randomness_alone(config: V4Config) -> None:
    state = torch.get_rng_state()
    dummies(config)
    assert torch.equal(torch.get_rng_state(), state)


def test_dummy_is_made_lazily(config: V4Config) -> None:
    """Asking for the first tensor of a huge model must not make the others."""
    huge = parse_config({**TINY_QUANTIZED, "vocab_size": 10, "moe_intermediate_size": 1 << 24, "hidden_size": 1 << 14})
    name, tensor = next(dummy_tensors(huge, expert_format="fp4", quantized=True))
    assert name == "embed.weight" and tensor.shape == (10, 1 << 14)
