"""What a V4 model keeps of its sequences: the formats of rows, compressor state, and which layers have them (report 3.5).

    window                every layer    raw kv rows of the last tokens
    entries               csa and hca    compressed kv rows, one per ``ratio`` tokens
    keys                  csa            index keys, at the addresses of the entries
    compressor_state      csa and hca    float32 [A, 3, C]: running maximum, sum and weighted sum of each channel, for the previous
                                         and the current group (csa, A = 2) or for the current group (hca, A = 1)
    key_compressor_state  csa            the same for the index keys

At a 256-token boundary all groups are complete, so a snapshot keeps the previous group of csa layers only.
"""

from __future__ import annotations

from dsv4lite.kernels.compress import OVERLAP_RATIO
from dsv4lite.kernels.rows import Fp4Key, Fp8Kv, RowFormat, UnquantizedRow, page_bytes
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.shard import ModelShard
from dsv4lite.state.spec import LayerSpec, SlotSpec, StateSpec, StoreSpec
from dsv4lite.weights.quant import Numerics

_EMPTY = (float("-inf"), 0.0, 0.0)


def row_formats(config: V4Config, numerics: Numerics) -> tuple[RowFormat, RowFormat]:
    """Return the formats of kv rows, raw and compressed, and of index keys: FP8 and FP4 for quantized models."""
    if numerics.quantized:
        return Fp8Kv(config.nope_dim, config.rope_dim), Fp4Key(config.index_dim)
    return UnquantizedRow(config.head_dim, numerics.dtype), UnquantizedRow(config.index_dim, numerics.dtype)


def state_spec(config: V4Config, numerics: Numerics, shard: ModelShard, *, drafter: bool) -> StateSpec:
    """Return the state of a rank's hidden layers and, with ``drafter``, of the drafter's."""
    numbers = [*shard.layers, *range(config.num_hidden_layers, len(config.ratios) if drafter else 0)]
    return StateSpec(layers=tuple(_layer(config, numerics, config.ratios[number]) for number in numbers))


def _layer(config: V4Config, numerics: Numerics, ratio: int) -> LayerSpec:
    kv, key = row_formats(config, numerics)
    window = StoreSpec("window", kv, "window")
    if not ratio:
        return (window,)
    entries = StoreSpec("entries", kv, tokens_per_row=ratio)
    if ratio != OVERLAP_RATIO:
        return window, entries, SlotSpec("compressor_state", (1, 3, kv.width), _EMPTY)
    return (
        window,
        entries,
        StoreSpec("keys", key, tokens_per_row=ratio),
        SlotSpec("compressor_state", (2, 3, kv.width), _EMPTY, snapshot=1),
        SlotSpec("key_compressor_state", (2, 3, key.width), _EMPTY, snapshot=1),
    )


def row_reads(config: V4Config, numerics: Numerics) -> int:
    """Return the bytes of rows that one token reads in one layer: a full window and a full selection."""
    return (config.window + config.index_topk) * page_bytes(row_formats(config, numerics)[0], 1)
