"""Weight-only checkpoints: their numbers, the engine on them, how ranks share them, and what is wrong with broken ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4lite.config import EngineConfig
from dsv4lite.planning.memory import choose_numerics
from dsv4lite.request import SamplingParams
from dsv4lite.weights.source import ModelSource
from tests.e2e.engines import opened, prompts_of
from tests.packings import Packing, Packs, awq, compressed, gptq, nvfp4, write_packed

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
BOUND = 1e-4  # between log-probabilities of two implementations in float32


@pytest.fixture(scope="module", params=PACKINGS)
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packs:
    return write_packed(tmp_path_factory.mktemp("packs"), PACKINGS[request.param])


def built(folder: Path, **changes: Any) -> tuple[Any, ModelSource]:
    """Return a model that is loaded, and what it was made from."""
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
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
    assert model.blocks[1].ffn.experts.w13.weight.dtype == torch.uint8
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
