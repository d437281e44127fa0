"""What few tokens leave behind once their latents are projected: ``latent_norms`` and the steps of a layer's compressors in one op.

None of them needs what another makes, and each is small: together they take the time of the longest.

Source: DeepSeek-V4 specification 3.3, 3.5 and 5.2.  Numerics: those of ``latent_norms`` and ``compress_step``. The kernel sums the
squares of an index key in another order than theirs does: about one in 10^3 of its codes is the neighbouring one.
"""

from __future__ import annotations

from torch import Tensor

from dsv4lite.kernels.compress import compress_step_ref
from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.latent import latent_norms_ref
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import RowStore


def latent_entries_ref(
    latent_TK: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    window: RowStore,
    paging: Paging,
    window_tokens: int,
    projected: Tensor,
    group_cos: Tensor,
    group_sin: Tensor,
    ratio: int,
    ape: Tensor,
    norm: Tensor,
    carry: Tensor,
    entries: RowStore,
    key_ape: Tensor | None = None,
    key_norm: Tensor | None = None,
    key_carry: Tensor | None = None,
    keys: RowStore | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``latent_entries``."""
    q_codes, q_scales, fresh_TB = latent_norms_ref(latent_TK, q_norm, kv_norm, cos, sin, eps, window, paging, window_tokens)
    assert q_scales is not None
    group = (paging, ratio, group_cos, group_sin, eps)
    compress_step_ref(projected, ape, norm, carry, entries, *group, False)
    if keys is not None:
        assert key_ape is not None and key_norm is not None and key_carry is not None
        compress_step_ref(projected[:, 2 * ape.shape[1] :], key_ape, key_norm, key_carry, keys, *group, True)
    return q_codes, q_scales, fresh_TB


def latent_entries(
    latent_TK: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    window: RowStore,
    paging: Paging,
    window_tokens: int,
    projected: Tensor,
    group_cos: Tensor,
    group_sin: Tensor,
    ratio: int,
    ape: Tensor,
    norm: Tensor,
    carry: Tensor,
    entries: RowStore,
    key_ape: Tensor | None = None,
    key_norm: Tensor | None = None,
    key_carry: Tensor | None = None,
    keys: RowStore | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise both latents, keep the kv rows in the window, advance the compressors and store the entries that close.

    Args:
        latent_TK: bfloat16 [T, R + C].
        q_norm, kv_norm, cos, sin, eps, window, paging, window_tokens: As for ``latent_norms``; rows are packed.
        projected: float32 [T, 2 columns + 2 key columns or more], what both compressors see, that of entries first.
        group_cos, group_sin, ratio: As for ``compress_step``.
        ape, norm, carry, entries: Of the compressor of entries.
        key_ape, key_norm, key_carry, keys: Of that of index keys, which are transformed, where the layer has one.

    Returns:
        What ``latent_norms`` does.
    """
    args = (latent_TK, q_norm, kv_norm, cos, sin, eps, window, paging, window_tokens, projected, group_cos, group_sin, ratio)
    pools = (ape, norm, carry, entries, key_ape, key_norm, key_carry, keys)
    if use_triton(latent_TK):
        from dsv4lite.kernels.latent_entries_triton import latent_entries_triton

        return latent_entries_triton(*args, *pools)
    return latent_entries_ref(*args, *pools)
