"""The whole engine against transformers: random models saved by their trainer, all prompts at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dsv4lite.request import RequestOutput, SamplingParams
from tests.e2e.engines import opened, prompts_of, write_tokenizer
from tests.mla import VARIANTS, their_config
from tests.mla import trainer_model as mla_trainer_model
from tests.models.test_transformers import MODELS as transformers_models
from tests.tiny import trainer_model, trainer_settings

# Both sides of every boundary: groups of 4 and 8, window pages, windows and groups of 128, grow pages.
LENGTHS = (3, 4, 5, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257)
GENERATED = 64
TOLERANCE = 1e-4

MODELS: dict[str, dict[str, Any]] = {
    **{name: transformers_models[name] for name in ("short_groups", "release_ratios")},
    "odd_sizes": {
        "ratios": (4, 16, 4),
        "sliding_window": 70,
        "hidden_size": 40,
        "num_attention_heads": 6,
        "o_groups": 3,
        "head_dim": 24,
        "qk_rope_head_dim": 6,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "num_hash_layers": 0,
        "index_topk": 5,
        "hc_mult": 3,
        "original_positions": 64,
        "vocab_size": 96,
    },
}


def theirs_of(name: str) -> Any:
    """Return transformers' model: of V4, or of the MLA family."""
    if name in MODELS:
        return trainer_model(trainer_settings(**MODELS[name]), seed=list(MODELS).index(name))
    return mla_trainer_model(name, index_topk=40) if name in ("v32", "glm5") else mla_trainer_model(name)


@dataclass(frozen=True)
class Run:
    """Their model, the engine's outputs of all prompts, and their logits of prompts and completions, by length of the prompt."""

    theirs: Any
    outputs: dict[int, RequestOutput]
    logits: dict[int, torch.Tensor]


@pytest.fixture(scope="module", params=[*MODELS, *VARIANTS])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("transformers")
    name, theirs = request.param, theirs_of(request.param)
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    if name in VARIANTS:
        (folder / "config.json").write_text(json.dumps(their_config(theirs, name)))
    vocab_size = theirs.config.vocab_size
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size)
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, logprobs=vocab_size, prompt_logprobs=vocab_size)
    prompts = prompts_of(LENGTHS, vocab_size, seed=1)
    settings = {"max_model_len": 512, "max_num_seqs": len(LENGTHS), "max_num_batched_tokens": 200, "max_logprobs": vocab_size}
    with opened(folder, tokenizer=str(tokenizer), **settings) as llm:
        outputs = llm.generate_batch(prompts, params, max_in_flight=len(prompts))
        assert llm.stats().num_running == 0
    texts = [[*output.prompt_token_ids, *output.token_ids][:-1] for output in outputs]
    padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)  # what follows a text does not change its logits
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    # In float64, where they choose tokens and experts by scores: their float32 sums have another order than ours, and decided for
    # the other one of two tokens whose scores differ by a rounding (GLM-5, position 172).
    selects = name in ("v32", "glm5")
    with torch.no_grad():
        logits = (theirs.double() if selects else theirs)(padded, use_cache=False).logits.float()
    theirs.float()
    by_length = dict(zip(LENGTHS, outputs, strict=True))
    return Run(theirs, by_length, {n: row[: len(text)] for n, row, text in zip(LENGTHS, logits, texts, strict=True)})


def full(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Put log-probabilities that come best first in the order of the vocabulary."""
    return torch.empty_like(values).scatter_(1, ids.long(), values)


@pytest.mark.parametrize("length", LENGTHS)
def test_distributions_of_prompt_and_completion_agree(run: Run, length: int) -> None:
    output = run.outputs[length]
    ids = [*output.prompt_token_ids, *output.token_ids]
    assert len(output.token_ids) == GENERATED and output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    logits = run.logits[length]
    assert logits.abs().max() > 1  # else any model would agree
    theirs = torch.log_softmax(logits, -1)
    parts = (output.prompt_logprobs, output.outputs[0].logprobs)
    ours = torch.cat([full(part.token_ids, part.values) for part in parts])
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < TOLERANCE
    sampled = torch.cat([part.sampled for part in parts])
    assert (sampled - theirs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]).abs().max() < TOLERANCE
    # Every token is the best one of their distribution, so this is their greedy continuation.
    assert torch.equal(theirs[length - 1 :].argmax(-1), torch.tensor(output.token_ids))


@pytest.mark.parametrize("length", (5, 257))
def test_continuation_is_the_one_of_their_generate(run: Run, length: int) -> None:
    output = run.outputs[length]
    prompt = torch.tensor([output.prompt_token_ids])
    theirs = run.theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=GENERATED,
        eos_token_id=None,
        pad_token_id=2,
    )
    assert theirs[0, length:].tolist() == list(output.token_ids)
