"""The model with resident FP8 and FP4 weights against stored outputs of the official code, from the stored inputs.

On a CPU the references run; on CUDA (``-m gpu``) the kernels. The limits are those that the data's own page
suggests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from tests.golden import OFFICIAL, fill, official_ids, poisoned, rounded
from tests.models.paged import PagedModel
from tests.models.test_official_golden import NOISE, Outputs, check_experts, check_logits, distance, distances, in_steps

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = range(OFFICIAL.num_hidden_layers)


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, official_weights: Outputs) -> Iterator[DeepseekV4]:
    numerics = replace(
        rounded(),
        device=torch.device(request.param),
        matrix_dtype=torch.bfloat16,
        resident_fp8=True,
        resident_experts="fp4",
    )
    model = fill(poisoned(OFFICIAL, numerics, with_mtp=True), official_weights).requires_grad_(False)
    with torch.inference_mode():
        yield model


class Run:
    """One step of a whole sequence from position 0, and the state it works on."""

    def __init__(self, model: DeepseekV4, token_ids: list[int]) -> None:
        self.paged = PagedModel(model, tokens=len(token_ids), seed=1)
        batch = self.paged.batch([(self.paged.open(), token_ids)])
        self.batch, self.layers = batch, self.paged.cache.layers


def on(model: DeepseekV4, tensor: Tensor) -> Tensor:
    return tensor.to(model.numerics.device)


def attend(model: DeepseekV4, outputs: Outputs, layer: int) -> tuple[Tensor, Run]:
    """Run an attention layer over the 400 tokens of ``main``, from the official inputs."""
    run, x = Run(model, official_ids(400)), on(model, outputs[f"main.attn_in.{layer}"])
    return model.layers[layer].attn(x, quantize_fp8(x, 128), run.batch, run.layers[layer]).cpu(), run


def test_hca_agrees(model: DeepseekV4, outputs: Outputs) -> None:
    got, run = attend(model, outputs, 2)
    assert distance(got[outputs["main.pos"].long()], outputs["main.attn_out.2"]) < 2.5e-2
    check_entries(run, outputs, 2)


def test_csa_agrees(model: DeepseekV4, outputs: Outputs) -> None:
    got, run = attend(model, outputs, 1)
    got, wanted = got[outputs["main.pos"].long()], outputs["main.attn_out.1"]
    assert distance(got, wanted) < 3e-2
    assert distances(got, wanted).median() < 2.5e-2
    check_entries(run, outputs, 1)
    keys = outputs["main.index_keys.1"]
    places = addresses(run, len(keys), 4)
    stored = run.layers[1].stores["keys"].read(places, torch.bfloat16).cpu()
    assert (stored != keys).float().mean() < 5e-3


def addresses(run: Run, count: int, ratio: int) -> Tensor:
    entry, rows = torch.arange(count, device=run.paged.device), 256 // ratio
    return run.batch.paging.grow_SP[0].long()[entry // rows] * rows + entry % rows


def check_entries(run: Run, outputs: Outputs, layer: int) -> None:
    wanted = outputs[f"main.entries.{layer}"]
    got = run.layers[layer].stores["entries"].read(addresses(run, len(wanted), OFFICIAL.ratios[layer]), torch.bfloat16).cpu()
    assert distance(got, wanted) < 3e-3


@pytest.mark.parametrize("layer", [0, 2])
def test_experts_agree(model: DeepseekV4, outputs: Outputs, layer: int) -> None:
    check_experts(model, outputs, layer, 5e-3, with_fp8=True)


@pytest.mark.parametrize("layer", LAYERS)
def test_whole_layer_agrees(model: DeepseekV4, outputs: Outputs, layer: int) -> None:
    run = Run(model, official_ids(136))
    streams = model._streams(on(model, outputs[f"mid.streams.{layer}"]))
    model.layers[layer](streams, run.batch, run.layers[layer])
    assert distance(streams.final().cpu(), outputs[f"mid.streams.{layer + 1}"]) < 3.5e-2


def test_head_agrees(model: DeepseekV4, outputs: Outputs) -> None:
    got = model.logits(on(model, outputs["mid.streams.5"])).cpu()
    assert distances(got[outputs["mid.pos"].long()], outputs["mid.logits"]).max() < 1e-3
    assert torch.equal(got.argmax(-1), outputs["mid.argmax"].long())


def test_mtp_block_agrees(model: DeepseekV4, outputs: Outputs) -> None:
    run = Run(model, official_ids(136)[1:])
    streams = model.mtp_forward(on(model, outputs["mid.streams.5"][:-1]), run.batch, run.layers[-1])
    got = model.mtp_logits(streams).cpu()
    position = outputs["mid.pos"].long()
    position = position[position < len(got)]
    assert distances(got[position], outputs["mid.mtp_logits"]).median() < 2e-2


@pytest.mark.parametrize("run", NOISE)
def test_logits_agree_within_the_noise(model: DeepseekV4, outputs: Outputs, run: str) -> None:
    check_logits(in_steps(model, run, outputs).cpu(), run, outputs)
