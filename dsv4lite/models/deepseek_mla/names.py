"""The names of an MLA model's tensors in releases and in transformers, each with the official code's name, used here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsv4lite.models.keys import MOST_EXPERTS
from dsv4lite.weights.names import NameTables

_TOP = {"embed_tokens": "embed", "lm_head": "head"}

# Below "layers.N." and "mtp.N.".
_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attn",
    "self_attn.q_proj": "attn.wq",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_layernorm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attn.wkv_a",
    "self_attn.kv_a_layernorm": "attn.kv_norm",
    "self_attn.kv_b_proj": "attn.wkv_b",
    "self_attn.o_proj": "attn.wo",
    "mlp.gate": "ffn.gate",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "shared_head.norm": "norm",
    **{
        f"mlp.{stack}{theirs}": f"ffn.{stack}{ours}"
        for stack in ("", "shared_experts.", "experts.*.")
        for theirs, ours in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
    },
}

# transformers' modules stack all experts of a layer in one tensor [E, rows, in].
_STACKED = {"mlp.experts.gate_up_proj": (("w1", "w3"), "weight"), "mlp.experts.down_proj": (("w2",), "weight")}

_NAMES = NameTables(
    top=_TOP,
    block=_BLOCK,
    stacked=_STACKED,
    max_experts=MOST_EXPERTS,
    drafter_only=("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head"),
)


def mla_names(raw: Mapping[str, Any]) -> NameTables:
    """Return the tables for a config; its number of hidden layers tells MTP blocks, which are numbered after them, apart.

    Some configs do not count the one MTP block that their checkpoints have.
    """
    layers, blocks = raw.get("num_hidden_layers"), raw.get("num_nextn_predict_layers")
    return replace(
        _NAMES, hidden_layers=layers if type(layers) is int else None, drafter_blocks=max(1, blocks) if type(blocks) is int else 1
    )
