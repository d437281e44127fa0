"""FP8 matrices that stay codes: the same results as widened ones, at the size of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import CheckpointError
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.family import FAMILIES
from dsv4lite.planning.memory import weight_bytes
from dsv4lite.weights.dummy import dummy_tensors
from dsv4lite.weights.quant import Matrix, Numerics
from tests.golden import OFFICIAL, fill, poisoned, rounded

SMALL = replace(OFFICIAL, vocab_size=64, num_hidden_layers=3, ratios=(0, 4, 128, 0), num_hash_layers=1)
# Borders inside blocks of 128 rows, inputs that are no multiple of 128.
ODD = replace(SMALL, hidden_size=160, q_lora_rank=96, o_lora_rank=40)


def resident(deterministic: bool = False) -> Numerics:
    return replace(rounded(deterministic), resident_fp8=True)


def checkpoint(config: V4Config, seed: int = 0) -> Mapping[str, Tensor]:
    return dict(dummy_tensors(config, V4_TENSORS, expert_format="fp4", quantized=True, seed=seed))


@pytest.mark.parametrize(("config", "deterministic"), [(SMALL, False), (ODD, True)], ids=["small", "odd-deterministic"])
def test_resident_codes_give_the_bits_of_widened_weights(config: V4Config, deterministic: bool) -> None:
    tensors = checkpoint(config)
    models = [
        fill(poisoned(config, numerics, with_mtp=True), tensors) for numerics in (rounded(deterministic), resident(deterministic))
    ]
    ids = [(7 * i) % 64 for i in range(150)]
    with torch.no_grad():
        wide, codes = (model.logits(model.one_pass(ids)) for model in models)
        assert wide.isfinite().all() and torch.equal(wide, codes)
        embedded = models[0].embed[torch.tensor(ids)]
        streams = models[0].one_pass(ids)
        mixes = [model.mtp[0].mix(streams, embedded) for model in models]
    assert torch.equal(*mixes)


def test_fused_matrices_keep_one_scale_per_block_where_borders_allow() -> None:
    aligned, odd = (DeepseekV4(config, resident()).layers[1].attn for config in (SMALL, ODD))
    assert aligned.wq_a_wkv.scale.shape == (-(-(SMALL.q_lora_rank + SMALL.head_dim) // 128), SMALL.hidden_size // 128)
    assert odd.wq_a_wkv.scale.shape == (ODD.q_lora_rank + ODD.head_dim, 2)


def test_planned_bytes_are_those_held() -> None:
    model = DeepseekV4(SMALL, resident())
    assert weight_bytes(FAMILIES["deepseek_v4"], SMALL, resident(), with_mtp=False) == sum(
        t.nbytes for t in (*model.parameters(), *model.buffers())
    )
    matrices = [m for m in model.modules() if isinstance(m, Matrix) and m.scale is not None]
    assert matrices and all(m.weight.element_size() == m.scale.element_size() == 1 for m in matrices if m.scale is not None)


def test_resident_codes_are_for_accelerators_and_e8m0_checkpoints() -> None:
    choose = {"dtype": torch.bfloat16, "quantized": True, "deterministic": False}
    assert Numerics.choose(**choose, device=torch.device("cuda"), dense_fp8=True).resident_fp8
    assert not Numerics.choose(**choose, device=torch.device("cuda")).resident_fp8
    assert not Numerics.choose(**choose, device=torch.device("cpu"), dense_fp8=True).resident_fp8


@pytest.mark.parametrize("scale", [None, torch.ones(1, 1)])
def test_other_formats_are_refused(scale: Tensor | None) -> None:
    matrix = Matrix(128, 128, numerics=resident(), fp8=True)
    weight = torch.zeros(128, 128) if scale is None else torch.zeros(128, 128).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="float8_e8m0fnu"):
        matrix.whole().store(weight, scale)
