"""The latents that all heads of MLA share: the query latent is normalised; the kv row is normalised, rotated and stored.

    qr  = rms_norm(latent[:R]) q_norm                                            R may be 0
    row = rms_norm(latent[R : R + L]) kv_norm | rope(latent[R + L:])             stored at the token's position

Source: MLA specification 3.3 and 5.1.  Numerics: those of ``rms_norm`` and ``rope``, then of the row's format. The kernel's sum of
squares has another order: before quantization about one bfloat16 in 10^4 is the neighbouring one; float32 agrees to 1e-6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope
from dsv4lite.kernels.rows import RowStore


class LatentRowInputs(NamedTuple):
    """Arguments of ``store_latent_rows``.

    Attributes:
        latent_TK: [T, R + L + rope], in the dtype of the model.
        q_norm: float32 [R]; ``None`` without a query latent.
        kv_norm: float32 [L].
        cos, sin: float32 [T, rope / 2].
        eps: Of both norms.
        rows: Receives the rows, in grow pages.
        paging: Positions and pages of the tokens; padding is not stored.
    """

    latent_TK: Tensor
    q_norm: Tensor | None
    kv_norm: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    rows: RowStore
    paging: Paging


@op("latent_rows.triton:store_latent_rows_triton")
def store_latent_rows(given: LatentRowInputs) -> Tensor | None:
    """Store the rows; return the normalised query latent [T, R], or ``None`` without one."""
    rank = 0 if given.q_norm is None else len(given.q_norm)
    query_TR, latent_TL, key_TC = given.latent_TK.split([rank, len(given.kv_norm), 2 * given.cos.shape[1]], 1)
    rows_TC = torch.cat([rms_norm(latent_TL, given.kv_norm, given.eps), rope(key_TC, given.cos, given.sin)], 1)
    places_N, addresses_N = given.paging.own_rows(given.rows.rows_per_page)
    given.rows.write(addresses_N, rows_TC if places_N is None else rows_TC[places_N])
    return None if given.q_norm is None else rms_norm(query_TR, given.q_norm, given.eps)
