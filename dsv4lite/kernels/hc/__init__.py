"""Manifold-constrained hyper-connections: N residual streams mixed by learned, input-dependent coefficients.

    M    = (Z fn^T) rsqrt(mean(Z^2) + norm_eps)                 Z = the N streams of a token side by side
    pre  = sigmoid(M[0:N] scale0 + base) + eps                  how the sub-layer reads the streams
    post = 2 sigmoid(M[N:2N] scale1 + base)                     how its output is written to them
    C    = sinkhorn(softmax_rows(M[2N:] scale2 + base) + eps)   how the streams mix
    x    = sum_j pre_j X_j           X'_k = post_k y + sum_j C_jk X_j

Source: DeepSeek-V4 specification 3.2.  Numerics: float32 inside; streams and x are rounded once to their dtype; coefficients agree
with the official kernel to 1e-5, and so do those of all kernels with the references.

``hc_enter`` follows the data: it writes the previous sub-layer's output into the streams, projects them, and turns the projection
into coefficients and the next sub-layer's normed input. Three kernels serve it: ``decode_small_triton`` does all of it in one
launch for up to ``DECODE_SMALL_TOKENS`` tokens; ``triton`` takes four streams in bfloat16; ``general_triton`` takes any others.
Between the launches of the latter two, the projection is partial sums [parts, T, rows of fn + 1]: the last number of a row is the
sum of squares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import multiprocessors_of, use_triton
from dsv4lite.kernels.experts import ExpertSum, sum_experts
from dsv4lite.kernels.gemm import matmul_rows
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.quantize import FP8_GROUP, quantize_fp8

SCALAR_TOKENS = 2
KERNEL_STREAMS = 4
DECODE_SMALL_TOKENS = 16  # of a step that enters in one launch, if its bits may depend on the number of tokens
DECODE_SMALL_WIDTH = 8192  # that one launch has memory for
COLLAPSED_CHANNELS = 512  # of a token, by one program of that launch
LEAST_RESIDENT = 2  # programs of four warps that a multiprocessor has registers for, however many each thread takes

Output = Tensor | ExpertSum
"""A sub-layer's output: [T, D], or a sum over experts that is still to be taken."""


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
    """How a sub-layer's output returns to the streams, float32: post [T, N], comb [T, N, N] summed over its first stream index."""

    post: Tensor
    comb: Tensor


class HcEntered(NamedTuple):
    """What a sub-layer starts from.

    Attributes:
        streams_TND: The streams, with the previous sub-layer's output.
        x_TD: The sub-layer's normed input.
        rounded: Its codes float8_e4m3fn [T, D] and scale bytes uint8 [T, ceil(D / 128)], if they were asked for.
        mix: How the sub-layer's output will be written.
    """

    streams_TND: Tensor
    x_TD: Tensor
    rounded: tuple[Tensor, Tensor] | None
    mix: HcMix


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


def has_kernel(dtype: torch.dtype, streams: int) -> bool:
    """Return whether streams have kernels made for their number and dtype; others take those of ``general_triton``."""
    return dtype == torch.bfloat16 and streams == KERNEL_STREAMS


def hc_sums(streams_TND: Tensor, fn: Tensor, row_tile: int | None = None) -> Tensor:
    """Return the projection of the streams and the sum of their squares, float32 [1, T, rows of fn + 1]."""
    z = streams_TND.flatten(1).float()
    return torch.cat([matmul_rows(z, fn, row_tile), z.square().sum(-1, keepdim=True)], -1)[None]


def hc_normalise(sums: Tensor, width: int, norm_eps: float) -> Tensor:
    """Return the normalised projection, float32 [T, rows of fn], from partial sums over ``width`` numbers per token."""
    total = sums[0] if len(sums) == 1 else sums.sum(0)
    return total[:, :-1] * torch.rsqrt(total[:, -1:] / width + norm_eps)


def hc_project(streams_TND: Tensor, fn: Tensor, norm_eps: float, row_tile: int | None = None) -> Tensor:
    """Return the normalised projection of the streams, float32 [T, rows of fn]."""
    return hc_normalise(hc_sums(streams_TND, fn, row_tile), fn.shape[1], norm_eps)


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


def hc_expand_ref(y_TD: Tensor, streams_TND: Tensor, mix: HcMix) -> Tensor:
    """See ``hc_expand``."""
    written = mix.post[..., None] * y_TD.float()[:, None]
    return torch.baddbmm(written, mix.comb.transpose(1, 2), streams_TND.float()).to(streams_TND.dtype)


def _whole(output: Output) -> Tensor:
    return sum_experts(output) if isinstance(output, ExpertSum) else output


def hc_expand(output: Output, streams_TND: Tensor, mix: HcMix) -> Tensor:
    """Write a sub-layer's output into the streams, [T, N, D] in their dtype."""
    y_TD = _whole(output)
    if not use_triton(streams_TND):
        return hc_expand_ref(y_TD, streams_TND, mix)
    leave_enter, _ = _kernels(streams_TND)
    return leave_enter(streams_TND, (y_TD, mix), None, None)[0]


def hc_collapse_ref(
    streams_TND: Tensor, sums: Tensor, weights: HcWeights, norm_weight: Tensor, settings: HcSettings, *, exact: bool = True
) -> tuple[Tensor, HcMix]:
    """Return a sub-layer's normed input [T, D] and the mix for its output, from partial sums of the projection."""
    projected = hc_normalise(sums, weights.fn.shape[1], settings.norm_eps)
    pre, post, comb = hc_split(projected, weights.base, weights.scale, settings.iters, settings.eps, exact=exact)
    return rms_norm.reference(weighted_sum(streams_TND, pre), norm_weight, settings.norm_eps), HcMix(post, comb)


def hc_enter_ref(
    streams_TND: Tensor,
    pending: tuple[Output, HcMix] | None,
    weights: HcWeights,
    norm_weight: Tensor,
    settings: HcSettings,
    *,
    quantize: bool = False,
    row_tile: int | None = None,
) -> HcEntered:
    """See ``hc_enter``."""
    if pending is not None:
        streams_TND = hc_expand_ref(_whole(pending[0]), streams_TND, pending[1])
    sums = hc_sums(streams_TND, weights.fn, row_tile)
    x_TD, mix = hc_collapse_ref(streams_TND, sums, weights, norm_weight, settings, exact=row_tile is not None)
    return HcEntered(streams_TND, x_TD, quantize_fp8.reference(x_TD, FP8_GROUP) if quantize else None, mix)


def hc_enter(
    streams_TND: Tensor,
    pending: tuple[Output, HcMix] | None,
    weights: HcWeights,
    norm_weight: Tensor,
    settings: HcSettings,
    *,
    quantize: bool = False,
    row_tile: int | None = None,
) -> HcEntered:
    """Write the previous sub-layer's output into the streams, if one is pending, and enter the next sub-layer.

    Args:
        streams_TND: float32 or bfloat16.
        pending: That output, and the mix with which it is written.
        weights: Of the next sub-layer's connection.
        norm_weight: Of its norm, float32 [D].
        settings: Of the model.
        quantize: Return the input in FP8, too.
        row_tile: As for ``gemm.matmul_rows``; any number makes a token's bits independent of the number of tokens.
    """
    if not use_triton(streams_TND):
        return hc_enter_ref(streams_TND, pending, weights, norm_weight, settings, quantize=quantize, row_tile=row_tile)
    if suits_decode_small(streams_TND, row_tile):
        from dsv4lite.kernels.hc.decode_small_triton import enter_triton

        return enter_triton(streams_TND, pending, weights, norm_weight, settings, quantize=quantize)
    leave_enter, collapse = _kernels(streams_TND)
    written = None if pending is None else (_whole(pending[0]), pending[1])
    streams_TND, sums = leave_enter(streams_TND, written, weights.fn, row_tile)
    return HcEntered(streams_TND, *collapse(streams_TND, sums, weights, norm_weight, settings, quantize=quantize))


def _kernels(streams_TND: Tensor) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Any]]:
    """Return the launchers of both halves of ``hc_enter`` for streams of this number and dtype; both kinds take the same."""
    if has_kernel(streams_TND.dtype, streams_TND.shape[1]):
        from dsv4lite.kernels.hc import triton as kernels

        return kernels.leave_enter_triton, kernels.collapse_triton
    from dsv4lite.kernels.hc import general_triton

    return general_triton.leave_enter_triton, general_triton.collapse_triton


def suits_decode_small(streams_TND: Tensor, row_tile: int | None) -> bool:
    """Return whether these streams are entered in one launch; its sums have another order than those of the other kernels.

    Some of its programs wait for others. They may do so only if all that wait leave room for one that does not: then the launch
    ends in whatever order its programs start.
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


def hc_head_norm(
    streams_TND: Tensor, weights: HcWeights, norm_weight: Tensor, *, eps: float, norm_eps: float, row_tile: int | None = None
) -> Tensor:
    """Collapse the streams at the end of the model, and norm the result, [T, D]."""
    if use_triton(streams_TND) and suits_decode_small(streams_TND, row_tile):
        from dsv4lite.kernels.hc.decode_small_triton import enter_triton

        return enter_triton(streams_TND, None, weights, norm_weight, HcSettings(0, eps, norm_eps), quantize=False).x_TD
    y_TD = hc_head(streams_TND, weights, eps=eps, norm_eps=norm_eps, row_tile=row_tile)
    return rms_norm(y_TD, norm_weight, norm_eps)


def weighted_sum(streams_TND: Tensor, weights_TN: Tensor) -> Tensor:
    """Return ``sum_j weights_j streams_j`` [T, D], float32 inside, one rounding."""
    return torch.bmm(weights_TN[:, None], streams_TND.float())[:, 0].to(streams_TND.dtype)


def hc_head_ref(streams_TND: Tensor, weights: HcWeights, *, eps: float, norm_eps: float, row_tile: int | None = None) -> Tensor:
    """See ``hc_head``."""
    projected = hc_project(streams_TND, weights.fn, norm_eps, row_tile)
    return weighted_sum(streams_TND, sigmoid(projected * weights.scale + weights.base) + eps)


def hc_head(streams_TND: Tensor, weights: HcWeights, *, eps: float, norm_eps: float, row_tile: int | None = None) -> Tensor:
    """Collapse the streams at the end of the model, [T, D]."""
    if not use_triton(streams_TND):
        return hc_head_ref(streams_TND, weights, eps=eps, norm_eps=norm_eps, row_tile=row_tile)
    leave_enter, collapse = _kernels(streams_TND)
    _, sums = leave_enter(streams_TND, None, weights.fn, row_tile)
    y_TD: Tensor = collapse(streams_TND, sums, weights, None, HcSettings(1, eps, norm_eps), quantize=False)[0]
    return y_TD
