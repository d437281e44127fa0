"""Manifold-constrained hyper-connections: N residual streams mixed by learned, input-dependent coefficients.

    M    = (Z fn^T) rsqrt(mean(Z^2) + norm_eps)                 Z = the N streams of a token side by side
    pre  = sigmoid(M[0:N] scale0 + base) + eps                  how the sub-layer reads the streams
    post = 2 sigmoid(M[N:2N] scale1 + base)                     how its output is written to them
    C    = sinkhorn(softmax_rows(M[2N:] scale2 + base) + eps)   how the streams mix
    x    = sum_j pre_j X_j           X'_k = post_k y + sum_j C_jk X_j

Source: DeepSeek-V4 specification 3.2.  Numerics: float32 inside; streams and x are rounded once to their dtype; coefficients agree
with the official kernel to 1e-5.

The two ops follow the data: ``hc_leave_enter`` writes one sub-layer's output into the streams and projects them for the next one
(one pass over the streams); ``hc_collapse`` turns the projection into coefficients and the next sub-layer's normed input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.gemm import matmul_rows
from dsv4lite.kernels.norm import rms_norm

SCALAR_TOKENS = 2


class HcWeights(NamedTuple):
    """Parameters of one connection, float32: fn [N (N + 2), N D] (head: [N, N D]), base [rows of fn], scale [3] (head: [1])."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class HcMix(NamedTuple):
    """How a sub-layer's output returns to the streams, float32: post [T, N], comb [T, N, N] summed over its first stream index."""

    post: Tensor
    comb: Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function with the same bits wherever an element lies (torch.sigmoid's vector tail differs by an ulp)."""
    return 1.0 / (1.0 + torch.exp(-x))


def sinkhorn(mix_TNN: Tensor, iters: int, eps: float) -> Tensor:
    """Return the doubly stochastic projection, float32 [T, N, N]: columns end normalised, rows nearly.

        m /= colsum(m) + eps;  (iters - 1) x { m /= rowsum(m) + eps; m /= colsum(m) + eps }

    Written in scaling vectors, m_jk = a_jk / (r_j c_k): dividing by ``colsum + eps`` is c <- a^T (1/r) + eps c, exactly.
    """
    transposed = mix_TNN.transpose(1, 2).contiguous()
    row = torch.ones_like(mix_TNN[..., :1])
    col = torch.baddbmm(row, transposed, row, beta=eps)
    for _ in range(iters - 1):
        row = torch.baddbmm(row, mix_TNN, col.reciprocal(), beta=eps)
        col = torch.baddbmm(col, transposed, row.reciprocal(), beta=eps)
    return mix_TNN / (row * col.transpose(1, 2))


def sinkhorn_scalar(mix_TNN: Tensor, iters: int, eps: float) -> Tensor:
    """The same in Python floats: for a token or two, launching a hundred tensor operations costs more than the arithmetic."""
    n = mix_TNN.shape[-1]
    rows = [range(j * n, j * n + n) for j in range(n)]
    columns = [range(k, n * n, n) for k in range(n)]
    order = [columns] + [rows, columns] * (iters - 1)
    done = []
    for m in mix_TNN.flatten(1).tolist():
        for lines in order:
            for line in lines:
                total = eps
                for i in line:
                    total += m[i]
                for i in line:
                    m[i] /= total
        done.append(m)
    return torch.tensor(done, dtype=torch.float32, device=mix_TNN.device).view_as(mix_TNN)


def hc_project(streams_TND: Tensor, fn: Tensor, norm_eps: float, row_tile: int | None = None) -> Tensor:
    """Return the normalised projection of the streams, float32 [T, rows of fn]."""
    z = streams_TND.flatten(1).float()
    return matmul_rows(z, fn, row_tile) * torch.rsqrt(z.square().mean(-1, keepdim=True) + norm_eps)


def hc_split(
    projected: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, *, exact: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``pre`` [T, N], ``post`` [T, N] and ``comb`` [T, N, N] from the projection [T, N (N + 2)], all float32.

    Unless ``exact``, the last bits may depend on the number of tokens.
    """
    n = round((1 + projected.shape[-1]) ** 0.5) - 1
    pre = sigmoid(projected[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(projected[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (projected[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + eps
    few = not exact and len(comb) <= SCALAR_TOKENS and comb.device.type == "cpu" and not torch.is_grad_enabled()
    return pre, post, (sinkhorn_scalar if few else sinkhorn)(comb, iters, eps)


def hc_expand(y_TD: Tensor, streams_TND: Tensor, mix: HcMix) -> Tensor:
    """Write a sub-layer's output into the streams, [T, N, D] in their dtype."""
    written = mix.post[..., None] * y_TD.float()[:, None]
    return torch.baddbmm(written, mix.comb.transpose(1, 2), streams_TND.float()).to(streams_TND.dtype)


def hc_leave_enter(
    streams_TND: Tensor, pending: tuple[Tensor, HcMix] | None, fn: Tensor, norm_eps: float, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the pending output of the previous sub-layer, if any, and project for the next one.

    Returns:
        The streams [T, N, D] and their projection float32 [T, rows of fn].
    """
    if pending is not None:
        streams_TND = hc_expand(pending[0], streams_TND, pending[1])
    return streams_TND, hc_project(streams_TND, fn, norm_eps, row_tile)


def hc_collapse(
    streams_TND: Tensor,
    projected: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    exact: bool = True,
) -> tuple[Tensor, HcMix]:
    """Return the sub-layer's normed input [T, D] and the mix for its output."""
    pre, post, comb = hc_split(projected, base, scale, iters, eps, exact=exact)
    x = weighted_sum(streams_TND, pre)
    return rms_norm(x, norm_weight, norm_eps), HcMix(post, comb)


def weighted_sum(streams_TND: Tensor, weights_TN: Tensor) -> Tensor:
    """Return ``sum_j weights_j streams_j`` [T, D], float32 inside, one rounding."""
    return torch.bmm(weights_TN[:, None], streams_TND.float())[:, 0].to(streams_TND.dtype)


def hc_head(streams_TND: Tensor, weights: HcWeights, *, eps: float, norm_eps: float, row_tile: int | None = None) -> Tensor:
    """Collapse the streams at the end of the model, [T, D]."""
    projected = hc_project(streams_TND, weights.fn, norm_eps, row_tile)
    return weighted_sum(streams_TND, sigmoid(projected * weights.scale + weights.base) + eps)
