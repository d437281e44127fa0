"""Manifold-constrained hyper-connections: N residual streams mixed by learned, input-dependent coefficients.

    M    = (Z fn^T) rsqrt(mean(Z^2) + norm_eps)                 Z = the N streams of a token side by side
    pre  = sigmoid(M[0:N] scale0 + base) + eps                  how the sub-layer reads the streams
    post = 2 sigmoid(M[N:2N] scale1 + base)                     how its output is written to them
    C    = sinkhorn(softmax_rows(M[2N:] scale2 + base) + eps)   how the streams mix
    x    = sum_j pre_j X_j           X'_k = post_k y + sum_j C_jk X_j

Source: DeepSeek-V4 specification 3.2.  Numerics: float32 inside; streams and x are rounded once to their dtype; coefficients agree
with the official kernel to 1e-5, and so do those of our kernels, the fast ones of four streams in bfloat16 and the others, with the
references.

The two ops follow the data: ``hc_leave_enter`` writes one sub-layer's output into the streams and projects them for the next one
(one pass over the streams); ``hc_collapse`` turns the projection into coefficients and the next sub-layer's normed input. Between
them goes the projection as partial sums [parts, T, rows of fn + 1], the last of each row that of the squares. ``hc_enter_few`` is
both, for few tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import use_triton
from dsv4lite.kernels.experts.decode_small import ExpertSum, sum_experts
from dsv4lite.kernels.gemm import matmul_rows
from dsv4lite.kernels.norm import rms_norm, rms_norm_ref
from dsv4lite.kernels.quantize import quantize_fp8_ref

SCALAR_TOKENS = 2
FP8_GROUP = 128
KERNEL_STREAMS = 4
FEW_TOKENS = 16  # that leave and enter in one launch, where bits may depend on their number
FEW_WIDTH = 8192  # that one launch has room for

Output = Tensor | ExpertSum
"""What a sub-layer puts out: [T, D], or a sum over experts that is still to be taken."""


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


def has_kernel(dtype: torch.dtype, streams: int) -> bool:
    """Return whether the fast kernels are for so many streams of a dtype; others take those of ``plain_hc_triton``."""
    return dtype == torch.bfloat16 and streams == KERNEL_STREAMS


def _has_kernel(streams_TND: Tensor) -> bool:
    return use_triton(streams_TND) and has_kernel(streams_TND.dtype, streams_TND.shape[1])


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
    if _has_kernel(streams_TND):
        from dsv4lite.kernels.hc.triton import expand_triton

        return expand_triton(y_TD, streams_TND, *mix)
    if use_triton(streams_TND):
        from dsv4lite.kernels.hc.unquantized_triton import plain_leave_enter_triton

        return plain_leave_enter_triton(streams_TND, (y_TD, *mix), None)[0]
    return hc_expand_ref(y_TD, streams_TND, mix)


def hc_leave_enter_ref(
    streams_TND: Tensor, pending: tuple[Tensor, HcMix] | None, fn: Tensor, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """See ``hc_leave_enter``."""
    if pending is not None:
        streams_TND = hc_expand_ref(pending[0], streams_TND, pending[1])
    return streams_TND, hc_sums(streams_TND, fn, row_tile)


def hc_leave_enter(
    streams_TND: Tensor, pending: tuple[Output, HcMix] | None, fn: Tensor, norm_eps: float, row_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the pending output of the previous sub-layer, if any, and project for the next one.

    Returns:
        The streams [T, N, D] and partial sums of their projection, float32 [parts, T, rows of fn + 1], for ``hc_collapse``.
    """
    written = None if pending is None else (_whole(pending[0]), pending[1])
    if use_triton(streams_TND):
        left = None if written is None else (written[0], *written[1])
        if _has_kernel(streams_TND):
            from dsv4lite.kernels.hc.triton import leave_enter_triton

            return leave_enter_triton(streams_TND, left, fn)
        from dsv4lite.kernels.hc.unquantized_triton import plain_leave_enter_triton

        return plain_leave_enter_triton(streams_TND, left, fn, row_tile)
    return hc_leave_enter_ref(streams_TND, written, fn, row_tile)


def hc_collapse_ref(
    streams_TND: Tensor,
    sums: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    exact: bool = True,
) -> tuple[Tensor, HcMix]:
    """See ``hc_collapse``."""
    projected = hc_normalise(sums, streams_TND.shape[1] * streams_TND.shape[2], norm_eps)
    pre, post, comb = hc_split(projected, base, scale, iters, eps, exact=exact)
    return rms_norm_ref(weighted_sum(streams_TND, pre), norm_weight, norm_eps), HcMix(post, comb)


def hc_collapse(
    streams_TND: Tensor,
    sums: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    exact: bool = True,
) -> tuple[Tensor, HcMix]:
    """Return the sub-layer's normed input [T, D] and the mix for its output.

    Unless ``exact``, the last bits may depend on the number of tokens; those of the kernel never do.
    """
    if _has_kernel(streams_TND):
        from dsv4lite.kernels.hc.triton import collapse_triton

        x_TD, _, _, *mix = collapse_triton(
            streams_TND, sums, base, scale, norm_weight, iters=iters, eps=eps, norm_eps=norm_eps, fp8=False
        )
        return x_TD, HcMix(*mix)
    if use_triton(streams_TND):
        from dsv4lite.kernels.hc.unquantized_triton import plain_collapse_triton

        x_TD, *mix = plain_collapse_triton(streams_TND, sums, base, scale, norm_weight, iters=iters, eps=eps, norm_eps=norm_eps)
        return x_TD, HcMix(*mix)
    return hc_collapse_ref(streams_TND, sums, base, scale, norm_weight, iters=iters, eps=eps, norm_eps=norm_eps, exact=exact)


def hc_collapse_quantize(
    streams_TND: Tensor,
    sums: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, HcMix]:
    """Collapse, and quantize what comes of it.

    Returns:
        The sub-layer's normed input [T, D], its codes float8_e4m3fn [T, D] and scale bytes uint8 [T, ceil(D / 128)], and the mix.
    """
    if _has_kernel(streams_TND):
        from dsv4lite.kernels.hc.triton import collapse_triton

        x_TD, codes, scales, *mix = collapse_triton(
            streams_TND, sums, base, scale, norm_weight, iters=iters, eps=eps, norm_eps=norm_eps, fp8=True
        )
        return x_TD, codes.view(torch.float8_e4m3fn), scales, HcMix(*mix)
    x_TD, returned = hc_collapse_ref(streams_TND, sums, base, scale, norm_weight, iters=iters, eps=eps, norm_eps=norm_eps)
    return x_TD, *quantize_fp8_ref(x_TD, FP8_GROUP), returned


def suits_few(streams_TND: Tensor, row_tile: int | None) -> bool:
    """Return whether ``hc_enter_few`` is for these streams; its sums depend on whether there are few tokens."""
    tokens, streams, width = streams_TND.shape
    return row_tile is None and 0 < tokens <= FEW_TOKENS and width <= FEW_WIDTH and has_kernel(streams_TND.dtype, streams)


def hc_enter_few(
    streams_TND: Tensor,
    pending: tuple[Output, HcMix] | None,
    weights: HcWeights,
    norm_weight: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    quantize: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None, HcMix]:
    """Leave the previous sub-layer, if its output is pending, and enter the next one.

    Returns:
        The streams [T, N, D], the sub-layer's normed input [T, D], its codes and scales as ``hc_collapse_quantize`` has them
        (``None`` unless ``quantize``), and the mix.
    """
    if use_triton(streams_TND):
        from dsv4lite.kernels.hc.decode_small_triton import enter_few_triton

        left = None if pending is None else (pending[0], *pending[1])
        streams_TND, x_TD, codes, scales, *mix = enter_few_triton(
            streams_TND, left, *weights, norm_weight, iters=iters, eps=eps, norm_eps=norm_eps, fp8=quantize
        )
        return streams_TND, x_TD, (codes.view(torch.float8_e4m3fn), scales) if quantize else None, HcMix(*mix)
    written = None if pending is None else (_whole(pending[0]), pending[1])
    streams_TND, sums = hc_leave_enter_ref(streams_TND, written, weights.fn)
    x_TD, returned = hc_collapse_ref(
        streams_TND, sums, weights.base, weights.scale, norm_weight, iters=iters, eps=eps, norm_eps=norm_eps, exact=False
    )
    return streams_TND, x_TD, quantize_fp8_ref(x_TD, FP8_GROUP) if quantize else None, returned


def hc_head_norm(
    streams_TND: Tensor, weights: HcWeights, norm_weight: Tensor, *, eps: float, norm_eps: float, row_tile: int | None = None
) -> Tensor:
    """Collapse the streams at the end of the model, and norm what comes of it, [T, D]."""
    if use_triton(streams_TND) and suits_few(streams_TND, row_tile):
        from dsv4lite.kernels.hc.decode_small_triton import enter_few_triton

        return enter_few_triton(streams_TND, None, *weights, norm_weight, iters=0, eps=eps, norm_eps=norm_eps, fp8=False)[1]
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
    if _has_kernel(streams_TND):
        from dsv4lite.kernels.hc.triton import collapse_triton, leave_enter_triton

        _, sums = leave_enter_triton(streams_TND, None, weights.fn)
        return collapse_triton(
            streams_TND, sums, weights.base, weights.scale, None, iters=1, eps=eps, norm_eps=norm_eps, fp8=False
        )[0]
    if use_triton(streams_TND):
        from dsv4lite.kernels.hc.unquantized_triton import plain_collapse_triton, plain_leave_enter_triton

        _, sums = plain_leave_enter_triton(streams_TND, None, weights.fn, row_tile)
        return plain_collapse_triton(streams_TND, sums, weights.base, weights.scale, None, iters=1, eps=eps, norm_eps=norm_eps)[0]
    return hc_head_ref(streams_TND, weights, eps=eps, norm_eps=norm_eps, row_tile=row_tile)
