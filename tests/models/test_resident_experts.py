"""Routed experts that stay quantized, in tiles: the results of widened ones, at the size of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import CheckpointError
from dsv4lite.kernels.experts import ExpertSum, sum_experts
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.family import FAMILIES
from dsv4lite.models.moe import TiledExperts, WideExperts
from dsv4lite.planning.memory import weight_bytes
from dsv4lite.weights.checkpoint import ExpertFormat
from dsv4lite.weights.dummy import dummy_tensors
from dsv4lite.weights.quant import Numerics, linear
from tests.golden import OFFICIAL, fill, poisoned, rounded

SMALL = replace(OFFICIAL, vocab_size=64, num_hidden_layers=2, ratios=(0, 0), num_hash_layers=1, num_mtp_layers=0)


def resident(form: ExpertFormat) -> Numerics:
    return replace(rounded(), resident_experts=form, resident_fp8=True)


def whole(output: Tensor | ExpertSum) -> Tensor:
    return sum_experts(output) if isinstance(output, ExpertSum) else output


def checkpoint(config: V4Config, form: ExpertFormat) -> Mapping[str, Tensor]:
    return dict(dummy_tensors(config, V4_TENSORS, expert_format=form, quantized=True))


@pytest.mark.parametrize("form", ["fp4", "fp8"])
@pytest.mark.parametrize("tokens", [1, 30])
def test_tiled_experts_give_what_widened_ones_do(form: ExpertFormat, tokens: int) -> None:
    tensors = checkpoint(SMALL, form)
    wide, tiled = (fill(poisoned(SMALL, numerics), tensors) for numerics in (rounded(), resident(form)))
    x = torch.randn(tokens, SMALL.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.arange(tokens) % 64
    for layer in range(SMALL.num_hidden_layers):
        ffns = [model.layers[layer].ffn for model in (wide, tiled)]
        assert [type(ffn.experts) for ffn in ffns] == [WideExperts, TiledExperts]
        routed = [torch.full((tokens, SMALL.experts_per_token), -1) for _ in ffns]
        with torch.no_grad():
            expected, got = (whole(ffn(x, ids, chosen)).float() for ffn, chosen in zip(ffns, routed, strict=True))
        assert torch.equal(*routed) and routed[0].min() >= 0
        assert expected.isfinite().all() and (got != expected).float().mean() < 0.02
        assert (got - expected).abs().max() < 0.02 * expected.abs().max()


@torch.no_grad()
def test_padding_gets_the_shared_expert_alone() -> None:
    model = fill(poisoned(SMALL, resident("fp4")), checkpoint(SMALL, "fp4"))
    x = torch.randn(5, SMALL.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids, positions = torch.arange(5), torch.tensor([7, -1, 3, 4, -1])
    for layer in model.layers:
        ffn, routed = layer.ffn, torch.zeros(5, SMALL.experts_per_token, dtype=torch.int64)
        every, got = whole(ffn(x, ids)), whole(ffn(x, ids, routed, rounded=quantize_fp8(x, 128), positions_T=positions))
        assert torch.equal(got[[0, 2, 3]], every[[0, 2, 3]])
        assert torch.equal(got[[1, 4]], ffn.shared(linear(x, ffn.shared.w13), x.dtype)[[1, 4]])
        assert ((routed == SMALL.num_experts) == (positions < 0)[:, None]).all()


def test_planned_bytes_are_those_of_the_checkpoint() -> None:
    model, tensors = DeepseekV4(SMALL, resident("fp4")), checkpoint(SMALL, "fp4")
    held = (*model.parameters(), *model.buffers())
    assert weight_bytes(FAMILIES["deepseek_v4"], SMALL, resident("fp4"), with_mtp=False) == sum(t.nbytes for t in held)
    stored = sum(t.nbytes for name, t in tensors.items() if name.startswith("layers.0.ffn.experts."))
    experts = model.get_submodule("layers.0.ffn.experts")
    assert sum(t.nbytes for t in experts.parameters()) == stored


def test_odd_sizes_are_widened() -> None:
    config = replace(SMALL, expert_width=96)
    assert isinstance(DeepseekV4(config, resident("fp4")).get_submodule("layers.0.ffn.experts"), WideExperts)


def test_experts_stay_quantized_on_accelerators_only() -> None:
    choose = {"dtype": torch.bfloat16, "quantized": True, "deterministic": False}
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert Numerics.choose(**choose, device=cuda, expert_format="fp8").resident_experts == "fp8"
    assert Numerics.choose(**choose, device=cuda).resident_experts == "plain"
    assert Numerics.choose(**choose, device=cpu, expert_format="fp4").resident_experts == "plain"


def test_other_formats_are_refused() -> None:
    slot = DeepseekV4(SMALL, resident("fp4")).slots()["layers.0.ffn.experts.0.w1.weight"]
    assert slot.shape == (SMALL.expert_width, SMALL.hidden_size) and slot.kind == "matrix"
    for weight, scale in ((torch.zeros(slot.shape), None), (torch.zeros(slot.shape).to(torch.float8_e4m3fn), torch.ones(2, 2))):
        with pytest.raises(CheckpointError, match="int8 with scales"):
            slot.store(weight, scale)
