"""Matrices and routed experts that stay quantized: the results of widened ones, at the size of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import CheckpointError
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.family import FAMILIES
from dsv4lite.models.moe import Tokens
from dsv4lite.planning.memory import weight_bytes
from dsv4lite.weights.checkpoint import ExpertFormat
from dsv4lite.weights.dummy import dummy_tensors
from dsv4lite.weights.quant import Matrix, Numerics, linear
from tests.golden import OFFICIAL, fill, poisoned, rounded

SMALL = replace(OFFICIAL, vocab_size=64, num_hidden_layers=3, ratios=(0, 4, 128, 0), num_hash_layers=1)
# Boundaries inside blocks of 128 rows, inputs that are no multiple of 128.
ODD = replace(SMALL, hidden_size=160, q_lora_rank=96, o_lora_rank=40)
EXPERTS = replace(SMALL, num_hidden_layers=2, ratios=(0, 0), num_mtp_layers=0)


def resident(form: ExpertFormat = "unquantized", *, deterministic: bool = False) -> Numerics:
    return replace(rounded(deterministic), resident_experts=form, resident_fp8=True)


def checkpoint(config: V4Config, form: ExpertFormat = "fp4") -> Mapping[str, Tensor]:
    return dict(dummy_tensors(config, V4_TENSORS, expert_format=form, quantized=True))


@torch.no_grad()
@pytest.mark.parametrize(("config", "deterministic"), [(SMALL, False), (ODD, True)], ids=["small", "odd-deterministic"])
def test_resident_codes_give_the_bits_of_widened_weights(config: V4Config, deterministic: bool) -> None:
    tensors, ids = checkpoint(config), [(7 * i) % 64 for i in range(150)]
    both = (rounded(deterministic), resident(deterministic=deterministic))
    models = [fill(poisoned(config, numerics, with_mtp=True), tensors) for numerics in both]
    streams = [model.one_pass(ids) for model in models]
    assert streams[0].isfinite().all() and torch.equal(*streams)
    assert torch.equal(*(model.logits(streams[0]) for model in models))
    embedded = models[0].embed[torch.tensor(ids)]
    assert torch.equal(*(model.mtp[0].mix(streams[0], embedded) for model in models))


@torch.no_grad()
@pytest.mark.parametrize("form", ["fp4", "fp8"])
@pytest.mark.parametrize("tokens", [1, 30])
def test_tiled_experts_give_what_widened_ones_do(form: ExpertFormat, tokens: int) -> None:
    tensors = checkpoint(EXPERTS, form)
    wide, tiled = (fill(poisoned(EXPERTS, numerics), tensors) for numerics in (rounded(), resident(form)))
    x = torch.randn(tokens, EXPERTS.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.arange(tokens) % 64
    for layer in range(EXPERTS.num_hidden_layers):
        ffns = [model.layers[layer].ffn for model in (wide, tiled)]
        assert [ffn.experts.tiled for ffn in ffns] == [False, True]
        routed = [torch.full((tokens, EXPERTS.experts_per_token), -1) for _ in ffns]
        expected, got = (ffn(Tokens(x, ids, chosen)).float() for ffn, chosen in zip(ffns, routed, strict=True))
        assert torch.equal(*routed) and routed[0].min() >= 0
        assert expected.isfinite().all() and (got != expected).float().mean() < 0.02
        assert (got - expected).abs().max() < 0.02 * expected.abs().max()


@torch.no_grad()
def test_padding_gets_the_shared_expert_alone() -> None:
    model = fill(poisoned(EXPERTS, resident("fp4")), checkpoint(EXPERTS))
    x = torch.randn(5, EXPERTS.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids, positions = torch.arange(5), torch.tensor([7, -1, 3, 4, -1])
    for layer in model.layers:
        ffn, routed = layer.ffn, torch.zeros(5, EXPERTS.experts_per_token, dtype=torch.int64)
        every, got = ffn(Tokens(x, ids)), ffn(Tokens(x, ids, routed, quantize_fp8(x, 128), positions))
        assert torch.equal(got[[0, 2, 3]], every[[0, 2, 3]])
        assert torch.equal(got[[1, 4]], ffn.shared(linear(x, ffn.shared.w13), x.dtype)[[1, 4]])
        assert ((routed == EXPERTS.num_experts) == (positions < 0)[:, None]).all()


def test_fused_matrices_keep_one_scale_per_block_where_boundaries_allow() -> None:
    aligned, odd = (DeepseekV4(config, resident()).layers[1].attn for config in (SMALL, ODD))
    assert aligned.wq_a_wkv.scale.shape == (-(-(SMALL.q_lora_rank + SMALL.head_dim) // 128), SMALL.hidden_size // 128)
    assert odd.wq_a_wkv.scale.shape == (ODD.q_lora_rank + ODD.head_dim, 2)


@pytest.mark.parametrize("form", ["unquantized", "fp4"])
def test_planned_bytes_are_those_held(form: ExpertFormat) -> None:
    model, tensors = DeepseekV4(SMALL, resident(form)), checkpoint(SMALL)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert weight_bytes(FAMILIES["deepseek_v4"], SMALL, resident(form), with_mtp=False) == held
    matrices = [m for m in model.modules() if isinstance(m, Matrix) and m.scale is not None]
    assert matrices and all(m.weight.element_size() == m.scale.element_size() == 1 for m in matrices)
    if form == "fp4":
        stored = sum(t.nbytes for name, t in tensors.items() if name.startswith("layers.0.ffn.experts."))
        assert sum(t.nbytes for t in model.get_submodule("layers.0.ffn.experts").parameters()) == stored


def test_experts_of_odd_sizes_are_widened() -> None:
    assert not DeepseekV4(replace(EXPERTS, expert_width=96), resident("fp4")).get_submodule("layers.0.ffn").experts.tiled


@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_weights_stay_quantized_on_accelerators_and_as_the_checkpoint_stores_them(form: ExpertFormat) -> None:
    choose = {"dtype": torch.bfloat16, "quantized": True, "deterministic": False}
    for device, wanted in ((torch.device("cuda"), (True, form)), (torch.device("cpu"), (False, "unquantized"))):
        stored = Numerics.choose(**choose, device=device, dense_fp8=True, expert_format=form)
        assert (stored.resident_fp8, stored.resident_experts) == wanted
        other = Numerics.choose(**choose, device=device)
        assert (other.resident_fp8, other.resident_experts) == (False, "unquantized")


def test_other_formats_are_refused() -> None:
    matrix = Matrix(128, 128, numerics=resident(), fp8=True).whole()
    experts = DeepseekV4(EXPERTS, resident("fp4")).slots()["layers.0.ffn.experts.0.w1.weight"]
    assert experts.shape == (EXPERTS.expert_width, EXPERTS.hidden_size) and experts.kind == "matrix"
    for slot, wanted in ((matrix, "float8_e8m0fnu"), (experts, "int8 with scales")):
        codes = torch.zeros(slot.shape).to(torch.float8_e4m3fn)
        for weight, scale in ((torch.zeros(slot.shape), None), (codes, torch.ones(1, 1))):
            with pytest.raises(CheckpointError, match=wanted):
                slot.store(weight, scale)
