"""Plain models with kernels, on CUDA (``-m gpu``), against the same models with references, on the CPU.

Both run prompts in chunks and single tokens, past windows, pages and the point from which entries are selected; in float32 they
differ in the order of sums alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.weights.quant import Numerics
from tests.golden import TINY, WIDE, fill, poisoned, tiny_checkpoint, tiny_ids
from tests.models.paged import PagedModel, run_in_cuts

CONFIGS = {"short_groups": replace(TINY, streams=3), "release_ratios": WIDE}


def model_of(config: V4Config, dtype: torch.dtype, device: str, *, deterministic: bool = False) -> DeepseekV4:
    numerics = Numerics.choose(dtype=dtype, quantized=False, deterministic=deterministic, device=torch.device(device))
    model = poisoned(config, numerics, with_mtp=True)
    return fill(model, tiny_checkpoint(config)).requires_grad_(False)


def both(config: V4Config, dtype: torch.dtype, device: str) -> tuple[DeepseekV4, DeepseekV4]:
    """Return the model on the device, and the same on the CPU."""
    return model_of(config, dtype, device), model_of(config, dtype, "cpu")


def logits(model: DeepseekV4, ids: Sequence[int], cuts: Sequence[int]) -> Tensor:
    return model.logits(run_in_cuts(model, ids, cuts)).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_single_tokens_agree(name: str) -> None:
    ours, reference = both(CONFIGS[name], torch.float32, "cuda")
    ids, cuts = tiny_ids(262, CONFIGS[name]), [3, 4, 131, 255, 256, 257, 258]
    got, wanted = logits(ours, ids, cuts), logits(reference, ids, cuts)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-4)
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.gpu
def test_sequences_that_share_steps_agree() -> None:
    """Single tokens of some sequences beside chunks of others; what a sequence does not own is NaN."""
    ours, reference = both(TINY, torch.float32, "cuda")
    rng, models = random.Random(3), [PagedModel(model, tokens=200, sequences=4, seed=2) for model in (ours, reference)]
    sequences = [[model.open() for _ in range(4)] for model in models]
    for _ in range(6):
        lens = [rng.choice((1, 1, 2, 9, 22)) for _ in range(4)]
        ids = [[rng.randrange(TINY.vocab_size) for _ in range(length)] for length in lens]
        got, wanted = (model.step(list(zip(own, ids, strict=True))) for model, own in zip(models, sequences, strict=True))
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_drafts_agree() -> None:
    ours, reference = both(TINY, torch.float32, "cuda")
    ids = tiny_ids(80)
    outputs = []
    for model in (ours, reference):
        state = PagedModel(model, tokens=len(ids))
        batch = state.batch([(state.open(), ids[1:])])
        streams = torch.randn(79, TINY.streams, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
        streams = model.mtp_forward(streams.to(model.numerics.device), batch, state.cache.layers[-1])
        outputs.append(model.mtp_logits(streams).cpu())
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-4)


@pytest.mark.gpu
def test_bfloat16_agrees_within_its_noise() -> None:
    """Rounding a single number otherwise may change what is selected: most tokens agree closely, none is far off."""
    ours, reference = both(WIDE, torch.bfloat16, "cuda")
    exact = model_of(WIDE, torch.float32, "cpu")
    cuts, passes = [131, 178, 179], []
    for factor in (1, 3, 5, 7):
        ids = [token * factor % WIDE.vocab_size for token in tiny_ids(180, WIDE)]
        passes.append([logits(model, ids, cuts) for model in (ours, reference, exact)])
    got, wanted, truth = (torch.cat(parts) for parts in zip(*passes, strict=True))
    noise = (wanted - truth).norm(dim=-1)
    assert (got - truth).norm(dim=-1).median() < 1.2 * noise.median()
    assert (got - truth).norm(dim=-1).quantile(0.9) < 1.3 * noise.quantile(0.9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_cutting_a_prompt_changes_no_bit(dtype: torch.dtype, device: str) -> None:
    model = model_of(WIDE, dtype, device, deterministic=True)
    ids = tiny_ids(140, WIDE)
    whole = logits(model, ids, [])
    assert torch.equal(logits(model, ids, [1, 130, *range(136, 140)]), whole)
