"""Models in the official formats shared among ranks, stage by stage: each from inputs that are given, not from the stage before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.models.deepseek_v4.batch import Batch
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.moe import Tokens
from dsv4lite.parallel.mesh import Mesh
from tests.golden import OFFICIAL, OFFICIAL_OUTPUTS, official_ids
from tests.models.paged import PagedModel
from tests.parallel.models import Job, build


def start(model: DeepseekV4, token_ids: Sequence[int]) -> tuple[Batch, list[Any]]:
    """Return a step of a whole sequence, and empty state."""
    paged = PagedModel(model, tokens=len(token_ids), seed=1)
    batch = paged.batch([(paged.open(), token_ids)])
    return batch, list(paged.cache.layers)


@torch.no_grad()
def official_stages(mesh: Mesh, job: Job) -> dict[str, Tensor]:
    """Return what comes out of each stage of the official model from its stored inputs, under the names of the stored outputs.

    ``logits`` are those of a whole pass over the token ids of ``mid``, of a model whose weights are widened.
    """
    model = build(mesh, job)
    device = model.numerics.device
    stored = load_file(OFFICIAL_OUTPUTS, device=str(device))
    main, mid, kept = official_ids(400), official_ids(136), stored["main.pos"].long()
    found = {}
    for layer in (1, 2):
        batch, caches = start(model, main)
        x_TD = stored[f"main.attn_in.{layer}"]
        found[f"main.attn_out.{layer}"] = model.layers[layer].attn(x_TD, quantize_fp8(x_TD, 128), batch, caches[layer])[kept]
    for layer in (0, 2):
        x_TD = stored[f"main.ffn_in.{layer}"]
        ids_T = torch.tensor(main, device=device)[kept]
        found[f"main.ffn_out.{layer}"] = model.layers[layer].ffn(Tokens(x_TD, ids_T, None, quantize_fp8(x_TD, 128)))
    for layer in range(OFFICIAL.num_hidden_layers):
        batch, caches = start(model, mid)
        streams = model._streams(stored[f"mid.streams.{layer}"])
        model.layers[layer](streams, batch, caches[layer])
        found[f"mid.streams.{layer + 1}"] = streams.final()
    position = stored["mid.pos"].long()
    found["mid.logits"] = model.logits(stored["mid.streams.5"])[position]
    batch, caches = start(model, mid[1:])
    mtp = model.mtp_logits(model.mtp_forward(stored["mid.streams.5"][:-1], batch, caches[-1]))
    found["mid.mtp_logits"] = mtp[position[position < len(mtp)]]
    if not job.resident:  # whose references take their time
        found["logits"] = model.logits(model(*start(model, mid)))
    return found


@torch.no_grad()
def layer_outputs(mesh: Mesh, job: Job, inputs: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return the streams after the embedding and after each layer, and the logits.

    Args:
        mesh: Of the ranks.
        job: Of one prompt.
        inputs: What such a run returned: each stage starts from it, and not from its own results.
    """
    model = build(mesh, job)
    batch, caches = start(model, job.prompts[0])
    found = [model._initial_streams(batch)]
    for i, layer in enumerate(model.layers):
        streams = model._streams((inputs or found)[i])
        layer(streams, batch, caches[i])
        found.append(streams.final())
    return [*found, model.logits((inputs or found)[len(model.layers)])]
