"""Checkpoints and requests for tests that replace the weights of engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4lite.config import tiny_model
from dsv4lite.llm import LLM
from dsv4lite.models.deepseek_mla import config as mla_config
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.weights.dummy import dummy_tensors
from tests.e2e.engines import SMALL, prompts_of, write_tokenizer
from tests.mla import BLOCKS, INDEXER, V32, quantized_checkpoint, release_names
from tests.tiny import TINY_QUANTIZED, write_checkpoint

VOCAB = SMALL["vocab_size"]
PROMPT, LONG = prompts_of((37, 300), VOCAB, seed=5)
# Of so few tokens, drafts of random weights are right now and then. Log-probabilities are those of the whole vocabulary.
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True, allowed_token_ids=(20, 21, 22))
QUANTIZED: Mapping[str, Any] = {
    **SMALL,
    "torch_dtype": "bfloat16",
    **{k: TINY_QUANTIZED[k] for k in ("expert_dtype", "quantization_config")},
}
FOR_KERNELS: Mapping[str, Any] = json.loads((Path(tiny_model()) / "config.json").read_text())
"""The shipped checkpoint's shapes, which the kernels of a GPU take."""


class Kind(NamedTuple):
    """A quantized model with a drafter.

    Attributes:
        config: Its ``config.json``.
        tensors: All tensors by their official names, from a seed; none of them is the same with another seed.
        drafter: How the names of the drafter's tensors begin on disk, after ``model.``.
        others: How those of all others do.
    """

    config: Mapping[str, Any]
    tensors: Callable[[int], dict[str, Tensor]]
    drafter: str
    others: tuple[str, ...]


def _v4(seed: int, config: Mapping[str, Any] = QUANTIZED) -> dict[str, Tensor]:
    tensors = dict(dummy_tensors(parse_config(config), V4_TENSORS, expert_format="fp4", quantized=True, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith(("norm.weight", "_scale", "gate.bias")):  # which are constant
            tensor += (0.5 * torch.rand(tensor.shape, generator=generator)).to(tensor.dtype)
    return tensors


def _mla(config: Mapping[str, Any], *, powers: bool) -> Kind:
    parsed = mla_config.parse_config(config)
    tensors = lambda seed: quantized_checkpoint(parsed, powers=powers, seed=seed)
    layers = [f"layers.{i}." for i in range(parsed.num_hidden_layers + 1)]
    return Kind(config, tensors, layers[-1], (*layers[:-1], "embed", "lm_head", "norm"))


KINDS: Mapping[str, Kind] = {
    "v4": Kind(QUANTIZED, _v4, "mtp.", ("layers.", "embed", "head", "norm", "hc_")),
    "v3": _mla(BLOCKS, powers=False),
    "v32": _mla({**BLOCKS, **{key: V32[key] for key in ("architectures", "model_type")}, **INDEXER}, powers=True),
}


def quantized_tensors(seed: int, kind: str = "v4") -> dict[str, Tensor]:
    """Return all tensors of a quantized checkpoint by their official names; none of them is the same with another seed."""
    return KINDS[kind].tensors(seed)


def write_quantized(folder: Path, tensors: Mapping[str, Tensor], kind: str = "v4") -> Path:
    """Write a quantized checkpoint under the names of its release, with a tokenizer."""
    config = KINDS[kind].config
    write_checkpoint(folder, config, tensors.items() if kind == "v4" else release_names(tensors, config))
    return write_tokenizer(folder, VOCAB)


def write_for_kernels(folder: Path, seed: int) -> Path:
    """Write a checkpoint of random weights in the shipped one's shapes, with its tokenizer."""
    write_checkpoint(folder, FOR_KERNELS, _v4(seed, FOR_KERNELS).items())
    shutil.copy(Path(tiny_model()) / "tokenizer.json", folder)
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint of one file."""
    return load_file(folder / "model.safetensors")


def load(llm: LLM, version: int, *sources: Any, **options: Any) -> None:
    """Replace weights by those of some sources."""
    with llm.update_weights(version, **options) as update:
        for source in sources:
            update.load(source)


def ask(llm: LLM, prompt: list[int] = PROMPT, tokens: int = 6) -> RequestOutput:
    """Generate greedily; 12 tokens tell most drafters from another."""
    return llm.generate(prompt, GREEDY.replace(max_tokens=tokens))


def same(ours: RequestOutput, theirs: RequestOutput) -> bool:
    """Whether two outputs have the same tokens, with the same bits of log-probabilities, of the same drafts."""
    (a,), (b,) = ours.outputs, theirs.outputs
    assert a.logprobs is not None and b.logprobs is not None
    drafts = (ours.usage.drafted_tokens, ours.usage.accepted_tokens) == (theirs.usage.drafted_tokens, theirs.usage.accepted_tokens)
    values = a.logprobs.values.equal(b.logprobs.values) and a.logprobs.sampled.equal(b.logprobs.sampled)
    return a.token_ids == b.token_ids and values and drafts
