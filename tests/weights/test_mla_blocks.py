"""MLA checkpoints in FP8 with a scale for each block of 128 x 128: numbers, logits, and the engine on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4lite.config import EngineConfig
from dsv4lite.models.deepseek_mla.config import parse_config
from dsv4lite.planning.memory import choose_numerics
from dsv4lite.request import SamplingParams
from dsv4lite.weights.quant import MatrixSlot, Numerics, TensorSlot
from dsv4lite.weights.source import ModelSource
from tests.e2e.engines import opened, prompts_of, write_tokenizer
from tests.golden import plain, rounded
from tests.mla import BLOCKS, dequantized, filled, quantized_checkpoint, release_names
from tests.tiny import write_checkpoint

CONFIG = parse_config(BLOCKS)
PROMPT = prompts_of((70,), 96, seed=4)[0]
EVERY = replace(CONFIG, experts_per_token=8, expert_groups=1, top_groups=1)
"""The same model with all experts for each token, so that no rounding changes which ones they are."""
# What FP8 inputs, FP8 rows and bfloat16 activations change of these models' logits, as a share of the logits' standard deviation;
# with a choice of experts more, because some tokens choose others.
BOUND, BOUND_WITH_CHOICE = 0.2, 0.4


@torch.no_grad()
def logits(numerics: Numerics, checkpoint: dict[str, Tensor]) -> Tensor:
    """Return the logits of the prompt, of a model with all experts for each token."""
    model = filled(EVERY, numerics, checkpoint)
    return model.logits(model.one_pass(PROMPT))


def folder_of(path: Path, checkpoint: dict[str, Tensor], *, bytes_: bool = False) -> Path:
    """Write a release, with scales as float32 or as e8m0 bytes."""
    stored = {name: t.to(torch.float8_e8m0fnu) if bytes_ and name.endswith(".scale") else t for name, t in checkpoint.items()}
    write_checkpoint(path, BLOCKS, release_names(stored, BLOCKS))
    return write_tokenizer(path, BLOCKS["vocab_size"])


@pytest.mark.parametrize(("powers", "bytes_"), [(False, False), (True, False), (True, True)])
def test_numbers_are_codes_times_the_scales_of_their_blocks(tmp_path: Path, powers: bool, bytes_: bool) -> None:
    checkpoint = quantized_checkpoint(CONFIG, powers=powers)
    config = EngineConfig(model=str(folder_of(tmp_path / "blocks", checkpoint, bytes_=bytes_)), device="cpu")
    source, device = ModelSource.open(config), torch.device("cpu")
    assert source.model.quantized and source.expert_format == "fp8" and source.dense_fp8 == bytes_ and source.drafter == "mtp"
    model, wanted = source.build(choose_numerics(config, source, device), with_mtp=True), dequantized(checkpoint)
    slots = model.slots()
    assert slots.keys() == wanted.keys()
    for name, slot in slots.items():
        if isinstance(slot, TensorSlot):
            assert torch.equal(slot.tensor.float(), wanted[name]), name
        else:
            assert isinstance(slot, MatrixSlot)
            assert torch.equal(slot.matrix.weight.flatten(0, -2)[slot.begin : slot.end], wanted[name]), name


def test_logits_are_those_of_the_dequantized_model() -> None:
    """To the bit without the roundings of quantized models, and within their bound with them."""
    checkpoint = quantized_checkpoint(CONFIG, powers=False)
    exact = logits(plain(), dequantized(checkpoint))
    assert torch.equal(logits(plain(), checkpoint), exact)
    for fp8_rows in (False, True):
        off = logits(replace(rounded(), fp8_rows=fp8_rows), checkpoint) - exact
        assert 0 < off.square().mean().sqrt() < BOUND * exact.std() and off.abs().max() < 4 * BOUND * exact.std()


def test_weights_that_stay_quantized_give_the_same_but_for_order() -> None:
    """As on a GPU: experts in tiles with float32 scales, and matrices as codes where their scales are bytes."""
    checkpoint = quantized_checkpoint(CONFIG, powers=True)
    stored = {name: t.to(torch.float8_e8m0fnu) if name.endswith(".scale") else t for name, t in checkpoint.items()}
    numerics = replace(rounded(), resident_experts="fp8")
    widened = logits(rounded(), checkpoint)
    for got in (logits(numerics, checkpoint), logits(replace(numerics, resident_fp8=True), stored)):
        assert (got - widened).square().mean().sqrt() < 0.01 * widened.std()


@pytest.mark.parametrize("rows", ["auto", "fp8"])
def test_engine_scores_as_the_dequantized_model_does(tmp_path: Path, rows: str) -> None:
    checkpoint = quantized_checkpoint(CONFIG, powers=False)
    model = filled(CONFIG, plain(), dequantized(checkpoint))
    with torch.no_grad():
        wanted = model.logits(model.one_pass(PROMPT)).log_softmax(-1)
    with opened(folder_of(tmp_path / "blocks", checkpoint), kv_cache_dtype=rows, max_num_batched_tokens=33) as llm:
        scores = llm.score(PROMPT[:1], PROMPT[1:])
        llm.generate_batch([PROMPT, PROMPT[:5]], SamplingParams(max_tokens=8, ignore_eos=True))
    chosen = wanted[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert (scores.sampled - chosen).square().mean().sqrt() < BOUND_WITH_CHOICE
