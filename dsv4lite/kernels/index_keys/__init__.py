"""Queries and keys of the indexer that selects tokens (DSA).

    k  = rope_first(layer_norm(x) w + b)           stored at the token's position
    q  = rope_first(x), each head
    with FP8 keys, hadamard of both

Source: MLA specification 3.10 and 5.3.  Numerics: float32, then one rounding, of keys by the row format and of queries like keys.
The kernels' sums have another order: results agree to 1e-5 before they are rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.quantize import hadamard, round_fp8
from dsv4lite.kernels.rope import rope_first
from dsv4lite.kernels.rows import Fp8Key, RowStore, UnquantizedRow

EPS = 1e-6


class IndexKeyInputs(NamedTuple):
    """Arguments of ``store_index_keys``.

    Attributes:
        key_TC: Projected keys.
        weight, bias: Of the layer norm, float32 [C].
        cos, sin: float32 [T, rope / 2].
        interleaved: Pairs of ``rope_first`` are neighbouring channels; otherwise one channel of each half.
        keys: Receives the keys, in grow pages.
        paging: Positions and pages of the tokens; padding is not stored.
    """

    key_TC: Tensor
    weight: Tensor
    bias: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool
    keys: RowStore
    paging: Paging


@op("index_keys.triton:store_index_keys_triton")
def store_index_keys(given: IndexKeyInputs) -> Tensor:
    """Store the keys of a step's tokens; return them before the row format's rounding, float32 [T, C]."""
    normed_TC = torch.nn.functional.layer_norm(given.key_TC.float(), given.weight.shape, given.weight, given.bias, EPS)
    key_TC = rope_first(normed_TC, given.cos, given.sin, interleaved=given.interleaved)
    if isinstance(given.keys.format, Fp8Key):
        key_TC = hadamard(key_TC)
    places_N, addresses_N = given.paging.own_rows(given.keys.rows_per_page)
    given.keys.write(addresses_N, key_TC if places_N is None else key_TC[places_N])
    return key_TC


@op("index_keys.triton:index_queries_triton")
def index_queries(query_THC: Tensor, cos: Tensor, sin: Tensor, keys: RowStore, *, interleaved: bool) -> Tensor:
    """Return index queries [T, H, C] for the keys of a store, rounded as these: in their dtype, or of FP8 codes bfloat16."""
    turned_THC = rope_first(query_THC.float(), cos, sin, interleaved=interleaved)
    form = keys.format
    if isinstance(form, Fp8Key):
        return round_fp8(hadamard(turned_THC), form.width).bfloat16()
    assert isinstance(form, UnquantizedRow)
    return turned_THC.to(form.dtype)
