"""Norms of the query and kv latents that all heads share; rotation of the kv row, which is packed and stored in the window.

    qr = rms_norm(latent[:R]) q_norm            rounded to bfloat16, then to FP8, 1x128, for the product with wq_b
    kv = rope(rms_norm(latent[R:]) kv_norm)     rounded to bfloat16 twice, then packed

With an unquantized window neither is quantized or packed; both keep the dtype of the latents.

Source: DeepSeek-V4 specification 3.3 and 5.2.  Numerics: those of ``rms_norm``, ``rope``, ``quantize_fp8`` and ``Fp8Kv.pack``.
The kernel's sum of squares has another order: before quantization about one bfloat16 in 10^4 is the neighbouring one; float32
agrees to 1e-6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.quantize import FP8_GROUP, quantize_fp8
from dsv4lite.kernels.rope import rope
from dsv4lite.kernels.rows import RowStore, UnquantizedRow, pack_rows

WINDOW_TOKENS = 128


class LatentInputs(NamedTuple):
    """Arguments of ``latent_norms``.

    Attributes:
        latent_TK: [T, R + C], bfloat16; with an unquantized window in the window's dtype.
        q_norm, kv_norm: float32 [R] and [C].
        cos, sin: float32 [T, rope / 2].
        eps: Of both norms.
        window: Receives the rows of each sequence's drafts and of the last ``window_tokens`` tokens before them, if ``paging`` has
            a page for them.
        paging: Positions and pages of the tokens. Results of padding are zeros.
        window_tokens: Number of latest positions that a later token sees.
    """

    latent_TK: Tensor
    q_norm: Tensor
    kv_norm: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    window: RowStore
    paging: Paging
    window_tokens: int = WINDOW_TOKENS


@op("latent_norm_store.triton:latent_norms_triton")
def latent_norms(given: LatentInputs) -> tuple[Tensor, Tensor | None, Tensor]:
    """Normalise both latents, rotate and pack the kv row, and store it in the window.

    Returns:
        Codes float8_e4m3fn [T, R] and scale bytes uint8 [T, ceil(R / 128)] of the query latent, or with an unquantized window
        the latent itself and ``None``; and the packed kv rows uint8 [T, data + scale bytes].
    """
    latent_TK, q_norm, kv_norm, cos, sin, eps, window, paging, window_tokens = given
    rank, padding_T = q_norm.shape[0], paging.padding_T
    if padding_T is not None:
        latent_TK = latent_TK.masked_fill(padding_T[:, None], 0.0)
    qr_TR = rms_norm(latent_TK[:, :rank], q_norm, eps)
    query = (qr_TR, None) if isinstance(window.format, UnquantizedRow) else quantize_fp8(qr_TR, FP8_GROUP)
    kv_TC = rope(rms_norm(latent_TK[:, rank:], kv_norm, eps), cos, sin)
    rows_N, addresses_N = paging.once(
        ("written", window_tokens, window.rows_per_page), lambda: _written(paging, window_tokens, window.rows_per_page)
    )
    window.write(addresses_N, kv_TC if rows_N is None else kv_TC[rows_N])
    return *query, pack_rows(window.format, kv_TC)


def _written(paging: Paging, window_tokens: int, rows_per_page: int) -> tuple[Tensor | None, Tensor]:
    """Return the rows of a step that the window stores, int64 [N] or ``None`` for all, and their addresses."""
    position_T, sequence_T = paging.positions_T.long(), paging.sequence_T.long()
    first_kept_S = paging.first_S + paging.lens_S - paging.drafts_S - window_tokens
    page_T = position_T // rows_per_page - paging.window_first_S[sequence_T]
    kept_T = (position_T >= 0) & (position_T >= first_kept_S[sequence_T])
    page_T = paging.window_SP[sequence_T, torch.where(kept_T, page_T, 0)].long()
    kept_T &= page_T >= 0
    addresses_T = page_T * rows_per_page + position_T % rows_per_page
    if bool(kept_T.all()):
        return None, addresses_T
    rows_N = kept_T.nonzero()[:, 0]
    return rows_N, addresses_T[rows_N]
