"""Layers that ranks of tp share against stored outputs of the official code, and against one rank, from the same inputs.

The limits are those of the reference data's page, or closer where sums alone are cut. A whole pass amplifies every moved rounding
to the noise of the quantization, so that it is measured against what a single one does to one rank.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4lite.kernels.quantize import dequantize_matrix, round_fp8
from dsv4lite.kernels.swiglu import swiglu
from dsv4lite.layout import Layout
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.weights.dummy import dummy_tensors
from tests.golden import OFFICIAL, OFFICIAL_OUTPUTS, official_checkpoint, official_ids, official_model
from tests.models.test_official_golden import Outputs, distance, distances
from tests.parallel.models import QUANTIZED, Job, write
from tests.parallel.ranks import Ranks
from tests.parallel.stages import layer_outputs, official_stages

WIDE = replace(QUANTIZED, expert_width=512)
"""Four ranks of tp leave its scale blocks whole."""


@pytest.fixture(scope="module")
def outputs() -> Outputs:
    return load_file(OFFICIAL_OUTPUTS)


@pytest.fixture(scope="module")
def weights() -> Outputs:
    return official_checkpoint()


@pytest.fixture(scope="module")
def folder(weights: Outputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("official") / "model", weights)


@pytest.fixture(scope="module", params=[False, True], ids=["widened", "resident"])
def found(request: pytest.FixtureRequest, ranks: Ranks, folder: Path) -> Outputs:
    """What two ranks make of every stage."""
    job = Job(folder=folder, config=OFFICIAL, prompts=(), cuts=(), resident=request.param)
    first, second = ranks.run(official_stages, job, layout=Layout(tp=2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first


@pytest.mark.parametrize(
    ("stage", "whole", "median"),
    [
        # As close as one rank: the numbers after the sum over heads are rounded where it rounds them.
        ("main.attn_out.1", 1.5e-2, 2e-3),
        ("main.attn_out.2", 4e-3, 2e-3),
        # One rank rounds what each expert returns; two ranks round a part of it each.
        ("main.ffn_out.0", 5e-3, 5e-3),
        ("main.ffn_out.2", 5e-3, 5e-3),
        *((f"mid.streams.{layer + 1}", 3.5e-2, 5e-3) for layer in range(OFFICIAL.num_hidden_layers)),
        ("mid.logits", 1e-6, 1e-6),
        ("mid.mtp_logits", 2e-2, 5e-3),
    ],
)
def test_stage_is_within_the_limits_of_the_official_outputs(
    found: Outputs, outputs: Outputs, stage: str, whole: float, median: float
) -> None:
    assert distance(found[stage], outputs[stage]) < whole
    assert distances(found[stage], outputs[stage]).median() < median


@pytest.mark.parametrize("layer", [0, 2])
def test_each_rank_rounds_its_part_of_an_expert(found: Outputs, outputs: Outputs, weights: Outputs, layer: int) -> None:
    """The formula with every rounding of the specification, but what an expert returns is rounded in two parts.

    Parts of the shared expert are not rounded.
    """

    def matrix(name: str) -> Tensor:
        name = f"layers.{layer}.ffn.{name}"
        return dequantize_matrix(weights[f"{name}.weight"], weights[f"{name}.scale"])

    def expert(name: str, x_TD: Tensor, weight_T1: Tensor | float) -> Tensor:
        gate, up = ((x_TD @ matrix(f"{name}.{part}").T).bfloat16() for part in ("w1", "w3"))
        u_TI = (swiglu(gate, up, OFFICIAL.swiglu_limit) * weight_T1).bfloat16()
        parts = [u @ w.T for u, w in zip(round_fp8(u_TI, 128).float().chunk(2, 1), matrix(f"{name}.w2").chunk(2, 1), strict=True)]
        return sum(part if name == "shared_experts" else part.bfloat16().float() for part in parts)

    x_TD = round_fp8(outputs[f"main.ffn_in.{layer}"], 128).float()
    total, kept = expert("shared_experts", x_TD, 1.0), outputs["main.pos"].long()
    chosen_TK, weight_TK = outputs[f"main.gate_idx.{layer}"][kept], outputs[f"main.gate_w.{layer}"][kept]
    for number in range(OFFICIAL.num_experts):
        token, k = torch.where(chosen_TK == number)
        total[token] += expert(f"experts.{number}", x_TD[token], weight_TK[token, k, None])
    assert (found[f"main.ffn_out.{layer}"] == total.bfloat16()).float().mean() > 0.995


@pytest.fixture(scope="module")
def noise(weights: Outputs) -> tuple[Tensor, Tensor]:
    """One rank's logits of ``mid``, and those after the last bit of one number in 512 of every embedding has moved."""
    model = official_model(weights).requires_grad_(False)
    alone = model.logits(model.one_pass(official_ids(136)))
    model.embed[:, 7] = (model.embed[:, 7].view(torch.int16) + 1).view(torch.bfloat16)
    return alone, model.logits(model.one_pass(official_ids(136)))


@pytest.mark.parametrize("found", [False], ids=["widened"], indirect=True)
def test_logits_move_no_further_than_by_one_rounding(found: Outputs, outputs: Outputs, noise: tuple[Tensor, Tensor]) -> None:
    (alone, moved), shared = noise, found["logits"]
    usual, off = distances(moved, alone), distances(shared, alone)
    assert off.median() < 1.25 * usual.median() and off.quantile(0.9) < 1.25 * usual.quantile(0.9)
    top = alone.argmax(1, keepdim=True)
    of_alone, of_moved, of_shared = (logits.log_softmax(1).gather(1, top) for logits in (alone, moved, shared))
    assert (of_shared - of_alone).abs().median() < 1.25 * (of_moved - of_alone).abs().median()
    error = distances(shared[outputs["mid.pos"].long()], outputs["mid.logits"])
    assert error.median() < 9e-2 and error.quantile(0.9) < 0.25
    assert (shared.argmax(1) == outputs["mid.argmax"]).float().mean() > 0.75


@pytest.mark.parametrize("resident", [False, True], ids=["widened", "resident"])
def test_layers_of_four_ranks_are_within_the_limits_of_one(ranks: Ranks, tmp_path: Path, resident: bool) -> None:
    ids = tuple((37 * t * t + 11 * t) % WIDE.vocab_size for t in range(139))
    folder = write(tmp_path / "model", dict(dummy_tensors(WIDE, V4_TENSORS, expert_format="fp4", quantized=True)))
    job = Job(folder=folder, config=WIDE, prompts=(ids,), cuts=(), resident=resident)
    (one,) = ranks.run(layer_outputs, job, layout=Layout())
    for layout in (Layout(tp=4), Layout(tp=4, ep=2)):
        embedded, *streams, logits = ranks.run(layer_outputs, job, one, layout=layout)[0]
        assert torch.equal(embedded, one[0])
        for got, wanted in zip(streams, one[1:-1], strict=True):
            assert distance(got, wanted) < 3.5e-2 and distances(got, wanted).median() < 5e-3
        assert distance(logits, one[-1]) < 1e-6
