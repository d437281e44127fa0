"""Manifold-constrained hyper-connections: N residual streams mixed by learned, input-dependent coefficients.

    M    = (Z fn^T) rsqrt(mean(Z^2) + norm_eps)                 Z = the N streams of a token side by side
    pre  = sigmoid(M[0:N] scale0 + base) + eps                  how the sub-layer reads the streams
    post = 2 sigmoid(M[N:2N] scale1 + base)                     how its output is written to them
    C    = sinkhorn(softmax_rows(M[2N:] scale2 + base) + eps)   how the streams mix
    x    = sum_j pre_j X_j           X'_k = post_k y + sum_j C_jk X_j

Source: DeepSeek-V4 specification 3.2.  Numerics: float32 inside; streams and x are rounded once to their dtype. Coefficients of the
references agree with the official kernel's to 1e-5, and those of all kernels with the references' to 1e-5.

``hc_enter`` writes the previous sub-layer's output into the streams, projects them, and computes from the projection the
coefficients and the next sub-layer's normed input. It has three kernels: ``decode_small_triton`` does all of this in one launch for
up to ``DECODE_SMALL_TOKENS`` tokens; ``prefill_triton`` takes four bfloat16 streams and any number of tokens; ``general_triton``
takes any streams. Between the two launches of the latter two, the projection is stored as partial sums [parts, T, rows of fn + 1],
whose last column is the sum of squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import multiprocessors_of, op
from dsv4lite.kernels.gemm import matmul_rows
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.quantize import FP8_GROUP, quantize_fp8

KERNEL_STREAMS = 4
DECODE_SMALL_TOKENS = 16  # most tokens of the one-launch kernel
DECODE_SMALL_WIDTH = 8192  # most channels for which that kernel's sums fit into the counters
COLLAPSED_CHANNELS = 512  # channels of a token that one program of that kernel collapses
LEAST_RESIDENT = 2  # programs of four warps that fit on a multiprocessor at the largest number of registers per thread


class HcWeights(NamedTuple):
    """Parameters of one connection, float32: fn [N (N + 2), N D] (head: [N, N D]), base [rows of fn], scale [3] (head: [1])."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class HcSettings(NamedTuple):
    """Constants of the model: Sinkhorn iterations, ``eps`` of the coefficients, ``norm_eps`` of both norms."""

    iters: int
    eps: float
    norm_eps: float


class HcMix(NamedTuple):
    """Coefficients that write a sub-layer's output: float32 post [T, N]; comb [T, N, N], summed over its first stream index."""

    post: Tensor
    comb: Tensor


class HcInputs(NamedTuple):
    """Arguments of ``hc_enter``.

    Attributes:
        streams_TND: float32 or bfloat16.
        pending: The previous sub-layer's output, which is not yet in the streams, and its mix; ``None`` if there is none.
        weights: Parameters of the next sub-layer's connection, or of the model's head.
        norm_weight: Weight of its norm, float32 [D]; ``None`` only for a head without a norm.
        settings: Constants of the model.
        quantize: Also return the input in FP8.
        row_tile: As for ``gemm.matmul_rows``; unless ``None``, a token's bits do not depend on the number of tokens.
    """

    streams_TND: Tensor
    pending: tuple[Tensor, HcMix] | None
    weights: HcWeights
    norm_weight: Tensor | None
    settings: HcSettings
    quantize: bool = False
    row_tile: int | None = None

    @property
    def is_head(self) -> bool:
        """Whether this is the model's head, which has no output to write back and therefore no mix."""
        return len(self.weights.fn) == self.streams_TND.shape[1]


class HcEntered(NamedTuple):
    """Results of ``hc_enter``.

    Attributes:
        streams_TND: The streams, including the previous sub-layer's output.
        x_TD: The sub-layer's normed input.
        rounded: With ``quantize``, its codes float8_e4m3fn [T, D] and scale bytes uint8 [T, ceil(D / 128)]; otherwise ``None``.
        mix: Coefficients with which the sub-layer's output will be written; ``None`` for the head.
    """

    streams_TND: Tensor
    x_TD: Tensor
    rounded: tuple[Tensor, Tensor] | None
    mix: HcMix | None


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function whose bits do not depend on an element's place (torch.sigmoid differs by an ulp after the last vector)."""
    return (1.0 + torch.exp(-x)).reciprocal()


def sinkhorn(mix_TNN: Tensor, iters: int, eps: float) -> Tensor:
    """Return the doubly stochastic projection, float32 [T, N, N]; columns are normalised last, so rows only nearly sum to 1.

        m /= colsum(m) + eps;  (iters - 1) x { m /= rowsum(m) + eps; m /= colsum(m) + eps }

    Written in scaling vectors, m_jk = a_jk / (r_j c_k): dividing by ``colsum + eps`` is c <- a^T (1/r) + eps c, exactly.
    """
    transposed = mix_TNN.transpose(1, 2).contiguous()
    ones = torch.ones_like(mix_TNN[..., :1])
    row, col = ones.clone(), torch.baddbmm(ones, transposed, ones, beta=eps)
    for _ in range(iters - 1):  # in place: autograd saves the reciprocals, not ``row`` and ``col``
        row.baddbmm_(mix_TNN, col.reciprocal(), beta=eps)
        col.baddbmm_(transposed, row.reciprocal(), beta=eps)
    return mix_TNN / (row * col.transpose(1, 2))


def has_kernel(dtype: torch.dtype, streams: int) -> bool:
    """Return whether streams of this number and dtype have specialized kernels; others take ``general_triton``."""
    return dtype == torch.bfloat16 and streams == KERNEL_STREAMS


def hc_project(streams_TND: Tensor, fn: Tensor, norm_eps: float, row_tile: int | None = None) -> Tensor:
    """Return the normalised projection of the streams, float32 [T, rows of fn]."""
    z = streams_TND.flatten(1).float()
    return matmul_rows(z, fn, row_tile) * torch.rsqrt(z.square().sum(-1, keepdim=True) / z.shape[1] + norm_eps)


def hc_split(projected: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``pre`` [T, N], ``post`` [T, N] and ``comb`` [T, N, N] from the projection [T, N (N + 2)], all float32."""
    n = round((1 + projected.shape[-1]) ** 0.5) - 1
    scale_of_row = torch.cat([scale, scale[2:].expand(n - 1)])[:, None]
    scaled = projected.view(-1, n + 2, n) * scale_of_row + base.view(n + 2, n)
    gates = sigmoid(scaled[:, :2])
    comb = scaled[:, 2:].softmax(-1) + eps
    return gates[:, 0] + eps, 2 * gates[:, 1], sinkhorn(comb, iters, eps)


def weighted_sum(streams_TND: Tensor, weights_TN: Tensor) -> Tensor:
    """Return ``sum_j weights_j streams_j`` [T, D], float32 inside, one rounding."""
    return torch.bmm(weights_TN[:, None], streams_TND.float())[:, 0].to(streams_TND.dtype)


@op("hc.triton:hc_expand_triton")
def hc_expand(output_TD: Tensor, streams_TND: Tensor, mix: HcMix) -> Tensor:
    """Write a sub-layer's output into the streams, [T, N, D] in their dtype."""
    written = mix.post[..., None] * output_TD.float()[:, None]
    return written.baddbmm_(mix.comb.transpose(1, 2), streams_TND.float()).to(streams_TND.dtype)


@op("hc.triton:hc_enter_triton")
def hc_enter(given: HcInputs) -> HcEntered:
    """Write the previous sub-layer's output into the streams, if one is pending, and enter the next sub-layer."""
    streams_TND, pending, weights, norm_weight, settings, quantize, row_tile = given
    if pending is not None:
        streams_TND = hc_expand.reference(pending[0], streams_TND, pending[1])
    projected = hc_project(streams_TND, weights.fn, settings.norm_eps, row_tile)
    mix = None
    if given.is_head:
        pre = sigmoid(projected * weights.scale + weights.base) + settings.eps
    else:
        pre, *coefficients = hc_split(projected, weights.base, weights.scale, settings.iters, settings.eps)
        mix = HcMix(*coefficients)
    x_TD = weighted_sum(streams_TND, pre)
    if norm_weight is not None:
        x_TD = rms_norm.reference(x_TD, norm_weight, settings.norm_eps)
    return HcEntered(streams_TND, x_TD, quantize_fp8.reference(x_TD, FP8_GROUP) if quantize else None, mix)


def hc_head(
    streams_TND: Tensor, weights: HcWeights, norm_weight: Tensor | None, eps: float, norm_eps: float, row_tile: int | None = None
) -> Tensor:
    """Return the weighted sum of the streams at the end of the model, [T, D], normed if there is a ``norm_weight``."""
    return hc_enter(HcInputs(streams_TND, None, weights, norm_weight, HcSettings(0, eps, norm_eps), row_tile=row_tile)).x_TD


def suits_decode_small(streams_TND: Tensor, row_tile: int | None) -> bool:
    """Return whether the one-launch kernel takes these streams; its sums have another order than those of the other kernels.

    Some programs of that kernel wait for others. All waiting programs together must leave room on the GPU for one that does not
    wait; then the launch ends in whatever order its programs start.
    """
    tokens, streams, width = streams_TND.shape
    waiting = tokens * (1 + -(-width // COLLAPSED_CHANNELS))
    return (
        row_tile is None
        and 0 < tokens <= DECODE_SMALL_TOKENS
        and width <= DECODE_SMALL_WIDTH
        and has_kernel(streams_TND.dtype, streams)
        and waiting < LEAST_RESIDENT * multiprocessors_of(streams_TND.device)
    )
