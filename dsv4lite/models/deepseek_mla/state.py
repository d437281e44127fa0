"""The state of an MLA model's sequences: one row per token, layer and store, in pages that stay until the sequence ends.

    latent   every layer                    latent and rotated key of a token: 1152 bytes in bfloat16 at the sizes of V3, 656 in FP8
    keys     layers that select tokens      index keys: 256 bytes in bfloat16, 132 in FP8

The MTP blocks have layers of their own, after the hidden ones.
"""

from __future__ import annotations

from dsv4lite.kernels.rows import Fp8Key, Fp8Latent, RowFormat, UnquantizedRow, page_bytes
from dsv4lite.models.deepseek_mla.config import MlaConfig
from dsv4lite.models.shard import ModelShard
from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.state.spec import LayerSpec, StateSpec, StoreSpec
from dsv4lite.weights.quant import Numerics


def latent_format(config: MlaConfig, numerics: Numerics) -> RowFormat:
    """Return the format of latent rows."""
    if numerics.fp8_rows:
        return Fp8Latent(config.kv_lora_rank, config.rope_dim)
    return UnquantizedRow(config.row_width, numerics.dtype)


def state_spec(config: MlaConfig, numerics: Numerics, shard: ModelShard, *, drafter: bool) -> StateSpec:
    """Return the state of a rank's hidden layers and, with ``drafter``, of the drafter's."""
    layer: LayerSpec = (StoreSpec("latent", latent_format(config, numerics)),)
    if config.selects:
        keys = Fp8Key(config.index_dim) if numerics.fp8_rows else UnquantizedRow(config.index_dim, numerics.dtype)
        layer += (StoreSpec("keys", keys),)
    return StateSpec(layers=(layer,) * (len(shard.layers) + (config.num_mtp_layers if drafter else 0)))


def row_reads(config: MlaConfig, numerics: Numerics) -> int:
    """Return the bytes of rows that a token of a short sequence reads in one layer: one page."""
    return PAGE_TOKENS * page_bytes(latent_format(config, numerics), 1)
