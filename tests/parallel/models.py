"""Models on ranks: one small checkpoint on disk, each rank with its shard of it, and what they make of a few tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4lite.models import moe, partial_sums
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.shard import shards_of
from dsv4lite.parallel.experts import DispatcherFactory
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.weights.checkpoint import Checkpoint
from dsv4lite.weights.loader import load
from dsv4lite.weights.quant import CopiedSlot, MatrixSlot, TileSlot
from tests.golden import OFFICIAL, TINY, plain, poisoned, rounded
from tests.models.paged import PagedModel
from tests.tiny import v4_names, write_checkpoint

# Everything that four ranks share divides by four.
PLAIN = replace(TINY, vocab_size=64, num_attention_heads=8, o_groups=4, num_experts=8)
# In the official formats; two ranks of tp leave scale blocks whole, four do not.
QUANTIZED = replace(
    OFFICIAL,
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=2,
    ratios=(4, 128, 0),
    num_attention_heads=8,
    head_dim=128,
    q_lora_rank=128,
    experts_per_token=3,
    num_hash_layers=1,
    index_heads=16,
    index_topk=8,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the ranks are to do.

    Attributes:
        folder: The checkpoint.
        prompts: Token ids of each replica.
        cuts: Where chunks of the prompts end, for each replica; as many for all.
        dispatcher: As for ``DeepseekV4``.
        deterministic: Arithmetic does not depend on what else is computed.
        redundant_experts: As for ``DeepseekV4``.
        known_shapes: Every rank knows how many tokens of a step the one with the most has.
        resident: Weights stay quantized, as on a GPU.
    """

    folder: Path
    config: V4Config
    prompts: tuple[tuple[int, ...], ...]
    cuts: tuple[tuple[int, ...], ...]
    dispatcher: str | DispatcherFactory = "auto"
    deterministic: bool = False
    resident: bool = False
    known_shapes: bool = False
    redundant_experts: int | None = None


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint with an empty config."""
    return write_checkpoint(folder, {}, tensors.items())


def build(mesh: Mesh, job: Job) -> DeepseekV4:
    """Return this rank's shard of the model, filled from the checkpoint."""
    numerics = (rounded if job.config.quantized else plain)(job.deterministic)
    if job.resident:
        numerics = replace(numerics, resident_fp8=True, resident_experts="fp4")
    model = poisoned(job.config, numerics, mesh, dispatcher=job.dispatcher, redundant_experts=job.redundant_experts, with_mtp=True)
    load(
        Checkpoint.open(job.folder, names=v4_names),
        model.slots(),
        shards=shards_of(job.config, V4_TENSORS, mesh.layout, mesh.rank),
    )
    return model.requires_grad_(False)


@torch.no_grad()
def logits(mesh: Mesh, job: Job) -> Tensor | None:
    """Return the logits [T, V] of this replica's prompt; nothing from any but the last stage."""
    return run(build(mesh, job), mesh, job)


def logits_near(mesh: Mesh, job: Job) -> Tensor | None:
    """Return the same where rows of any number go through memory of peers, or as if they did."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "most_peer_tokens", lambda *args: 1 << 30)
        return logits(mesh, job)


def logits_sharded(mesh: Mesh, job: Job) -> Tensor | None:
    """Return the same where steps of more than a few tokens divide the residual streams among the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_sums, "LEAST_SHARDED", 10)
        return logits(mesh, job)


@torch.no_grad()
def rebalanced(mesh: Mesh, job: Job) -> tuple[Tensor | None, Tensor | None, int, list[float], list[float]]:
    """Return logits before and after experts have moved, how many tensors this rank read again, and the busiest ranks' loads.

    The loads of layers are over the average of the ranks, as experts lay before and after.
    """
    model = build(mesh, job)
    before = run(model, mesh, job)
    blocks = [layer.ffn for layer in model.layers]
    loads = [mesh.ep.all_reduce(ffn.map.load_E.clone())[:-1].tolist() for ffn in blocks]
    uneven = [ffn.placement.imbalance(load) for ffn, load in zip(blocks, loads, strict=True)]
    if mesh.dp.size > 1:  # each token is counted once, whichever rank routes it
        tokens = sum(len(prompt) for prompt in job.prompts)
        assert [sum(load) for load in loads] == [tokens * job.config.experts_per_token] * len(loads)
    moved, imbalances = model.rebalance()
    for slot in moved.values():
        for place in slot.copies if isinstance(slot, CopiedSlot) else (slot,):
            forget(place)
    shards = shards_of(job.config, V4_TENSORS, mesh.layout, mesh.rank)
    load(Checkpoint.open(job.folder, names=v4_names), moved, shards=shards, whole=False)
    even = [ffn.placement.imbalance(load) for ffn, load in zip(blocks, loads, strict=True)]
    assert imbalances[: len(blocks)] == list(zip(uneven, even, strict=True))
    return before, run(model, mesh, job), len(moved), uneven, even


def forget(place: MatrixSlot | TileSlot) -> None:
    """Spoil what lay in a place: it must not be used again."""
    if isinstance(place, TileSlot):
        place.stack.codes[place.expert].fill_(0x77)
    else:
        place.matrix.weight.flatten(0, -2)[place.begin : place.end] = float("nan")


def run(model: DeepseekV4, mesh: Mesh, job: Job) -> Tensor | None:
    """Return the logits of this replica's prompt, from the last stage."""
    replica = mesh.dp.rank % len(job.prompts)
    ids = job.prompts[replica]
    paged = PagedModel(model, tokens=len(ids), seed=3)
    sequence, parts = paged.open(), []
    chunks = [list(pairwise((0, *cuts, len(prompt)))) for cuts, prompt in zip(job.cuts, job.prompts, strict=True)]
    for number, (a, b) in enumerate(chunks[replica]):
        batch = paged.batch([(sequence, ids[a:b])])
        if job.known_shapes:
            batch.most_tokens = max(end - begin for begin, end in (steps[number] for steps in chunks[: mesh.dp.size]))
        before = None
        if not model.shard.first:
            shape = (b - a, model.config.streams, model.config.hidden_size)
            before = mesh.pp.receive(torch.empty(shape, dtype=model.numerics.dtype), mesh.pp.rank - 1)
        streams = model(batch, paged.cache.layers, before)
        sequence.length = b
        if model.shard.last:
            parts.append(model.logits(streams))
        else:
            mesh.pp.begin_send(streams, mesh.pp.rank + 1).wait()
    return torch.cat(parts) if parts else None
