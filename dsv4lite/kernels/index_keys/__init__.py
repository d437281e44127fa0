"""Queries and keys of the indexer that selects tokens (DSA).

    k  = rope_first(layer_norm(x) w + b)           stored in the place of the token's position
    q  = rope_first(x), each head
    FP8 keys: hadamard of both, and q rounded to e4m3 as k is

Source: MLA specification 3.10 and 5.3.  Numerics: float32 throughout, so that scores do not tie; keys are rounded by the format of
their rows alone. There is no kernel yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.quantize import hadamard, round_fp8
from dsv4lite.kernels.rope import rope_first
from dsv4lite.kernels.rows import Fp8Key, RowStore

_EPS = 1e-6


class IndexKeyInputs(NamedTuple):
    """What ``store_index_keys`` takes.

    Attributes:
        key_TC: Projected keys.
        weight, bias: Of the layer norm, float32 [C].
        cos, sin: float32 [T, rope / 2].
        interleaved: Neighbouring channels rotate together, else halves.
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


def store_index_keys(given: IndexKeyInputs) -> Tensor:
    """Store the keys of a step's tokens; return them as they were before their rows' rounding, float32 [T, C]."""
    normed_TC = torch.nn.functional.layer_norm(given.key_TC.float(), given.weight.shape, given.weight, given.bias, _EPS)
    key_TC = rope_first(normed_TC, given.cos, given.sin, interleaved=given.interleaved)
    if isinstance(given.keys.format, Fp8Key):
        key_TC = hadamard(key_TC)
    places_N, addresses_N = given.paging.own_rows(given.keys.rows_per_page)
    given.keys.write(addresses_N, key_TC if places_N is None else key_TC[places_N])
    return key_TC


def index_queries(query_THC: Tensor, cos: Tensor, sin: Tensor, keys: RowStore, *, interleaved: bool) -> Tensor:
    """Return index queries, float32 [T, H, C], as they meet the keys of a store."""
    turned_THC = rope_first(query_THC.float(), cos, sin, interleaved=interleaved)
    if not isinstance(keys.format, Fp8Key):
        return turned_THC
    return round_fp8(hadamard(turned_THC), keys.format.width)
