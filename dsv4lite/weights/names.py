"""From the names that checkpoints and trainers use to the official ones, which this library speaks everywhere else.

Three namings occur (spec 2.4): the official one; transformers' module names, with the experts of a layer stacked in one tensor;
and what ``save_pretrained`` writes, official names under ``model.`` with a few of transformers' own. They never contradict each
other, so one table serves all: a name is matched from its start, by whole components, and what the table does not mention stays
as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4lite.errors import CheckpointError
from dsv4lite.models.deepseek_v4.config import MOST_EXPERTS

_TOP = {
    "embed_tokens": "embed",
    "lm_head": "head",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}

# Below "layers.N." and "mtp.N.".
_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "attn.norm": "attn.kv_norm",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.kv_proj": "attn.compressor.wkv",
    "self_attn.compressor.gate_proj": "attn.compressor.wgate",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "self_attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
    "self_attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate": "ffn.gate",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
}

# All experts of a layer in one tensor [E, rows, in]: which matrices lie one below the other in it, and what it holds of them.
_STACKED = {
    "mlp.experts.gate_up_proj": (("w1", "w3"), "weight"),
    "mlp.experts.gate_up_proj_scale_inv": (("w1", "w3"), "scale"),
    "mlp.experts.down_proj": (("w2",), "weight"),
    "mlp.experts.down_proj_scale_inv": (("w2",), "scale"),
}

_LEAF = {"weight_scale_inv": "scale"}
_STACKS = ("layers", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """An official tensor inside an external one.

    Attributes:
        name: Official name.
        index: Where it lies: ``external[index]``. Leading integers, then at most one range, so the piece is contiguous in memory.
    """

    name: str
    index: tuple[int | slice, ...] = ()


def translate(name: str, shape: Sequence[int]) -> list[Piece]:
    """Return the official tensors that an external tensor holds.

    A name that no table knows is returned as it is: whoever compares it with a model says that it is unexpected.

    Args:
        name: External name, in any of the three namings.
        shape: Its shape, which tells how many experts a stacked tensor holds.

    Returns:
        One piece as a rule; one or two per expert for stacked experts; none for the copies of embedding and head that some repacks
        put under ``mtp.``.

    Raises:
        CheckpointError: A stacked tensor does not have three dimensions, is empty or has too many experts, or gate and up cannot be
            its two halves.
    """
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "mtp" and (any("emb" in part for part in parts) or (parts[-1] == "weight" and parts[-2].endswith("head"))):
        return []
    parts[-1] = _LEAF.get(parts[-1], parts[-1])
    if parts[0] not in _STACKS or len(parts) < 3:
        return [Piece(name=".".join(_renamed(parts, _TOP)))]
    block, rest = ".".join(parts[:2]), parts[2:]
    stacked = _STACKED.get(".".join(rest))
    if stacked is None:
        return [Piece(name=".".join([block, *_renamed(rest, _BLOCK)]))]
    matrices, leaf = stacked
    if len(shape) != 3 or shape[1] % len(matrices) or not 0 < shape[0] <= MOST_EXPERTS or 0 in shape:
        rule = f"[experts, {len(matrices)} x rows, in], with at most {MOST_EXPERTS} experts and nothing empty"
        raise CheckpointError(f"{name} has shape {list(shape)}; stacked experts are {rule}")
    rows = shape[1] // len(matrices)
    return [
        Piece(name=f"{block}.ffn.experts.{expert}.{matrix}.{leaf}", index=(expert, slice(i * rows, (i + 1) * rows)))
        for expert in range(shape[0])
        for i, matrix in enumerate(matrices)
    ]


def _renamed(parts: list[str], table: dict[str, str]) -> list[str]:
    """Replace the longest leading run of components that ``table`` knows."""
    for end in range(len(parts), 0, -1):
        official = table.get(".".join(parts[:end]))
        if official is not None:
            return [official, *parts[end:]]
    return parts
