"""Kernels of ``latent_attention``: products with each head's own matrix; attention itself is in the other modules."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div, compiled, power_of_2
from dsv4lite.kernels.e4m3 import as_stored
from dsv4lite.kernels.gemm.prefill_triton import many_rows, takes_many
from dsv4lite.kernels.latent_attention import ROUND_TOKENS, LatentAttentionInputs
from dsv4lite.kernels.latent_attention.decode_triton import attend_absorbed, widened_rows
from dsv4lite.kernels.latent_attention.prefill_triton import attend_projected, plan_prompts

_BLOCK_TOKENS, _BLOCK_OUTS = tl.constexpr(16), tl.constexpr(64)  # of one program
_MANY_TOKENS = 64  # above it, ``any_order`` uses the kernel of many rows


@triton.jit(do_not_specialize=["tokens"])
def _by_head_kernel(
    x, w, out, positions, tokens, x_token, x_head,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr, W_HEAD: tl.constexpr, W_OUT: tl.constexpr, W_IN: tl.constexpr,
    BK: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    # Reference: by_head
    PRECISION: tl.constexpr = "tf32x3" if x.dtype.element_ty == tl.float32 else "tf32"
    t = tl.program_id(0).to(tl.int64) * _BLOCK_TOKENS + tl.arange(0, _BLOCK_TOKENS)
    if SKIPS:  # noqa: SIM102  decided when compiled; the other when run
        if tl.max(tl.load(positions + t, mask=t < tokens, other=-1)) < 0:
            return
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * _BLOCK_OUTS + tl.arange(0, _BLOCK_OUTS)
    here = (t < tokens)[:, None]
    x += head * x_head + t[:, None] * x_token
    w += head * W_HEAD + tl.minimum(n, N - 1)[:, None] * W_OUT
    acc = tl.zeros((_BLOCK_OUTS, _BLOCK_TOKENS), tl.float32)
    for begin in tl.range(0, K, BK, num_stages=2):
        k = begin + tl.arange(0, BK)[None, :]
        a = tl.load(x + k, mask=here & (k < K), other=0.0)
        b = tl.load(w + k * W_IN, mask=k < K, other=0.0)
        if not compiled():
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(b, tl.trans(a), acc, input_precision=PRECISION)
    y = tl.trans(acc)
    tl.store(out + (t[:, None] * H + head) * N + n[None, :], as_stored(y, out), mask=here & (n < N)[None, :])


def by_head_triton(
    x_THK: Tensor, w_HNK: Tensor, *, any_order: bool, out: Tensor | None = None, positions_T: Tensor | None = None
) -> Tensor:
    """Return each head's ``x @ W.T`` [T, H, N] in the dtype of ``x``, in ``out`` if given; weights may have any strides.

    If ``positions_T`` is given, results are not written for blocks of tokens with negative positions alone.
    """
    (tokens, heads, inputs), outs = x_THK.shape, w_HNK.shape[1]
    assert x_THK.stride(2) == 1 and x_THK.dtype == w_HNK.dtype and w_HNK.shape == (heads, outs, inputs), (x_THK.shape, w_HNK.shape)
    if out is None:
        out = torch.empty(tokens, heads, outs, dtype=x_THK.dtype, device=x_THK.device)
    assert out.is_contiguous() and out.shape == (tokens, heads, outs), out.shape
    skips = positions_T is not None
    if any_order and not skips and tokens > _MANY_TOKENS and x_THK.element_size() == 2 and takes_many(x_THK, w_HNK, out):
        many_rows(x_THK, w_HNK, out)
        return out
    _by_head_kernel[(ceil_div(tokens, _BLOCK_TOKENS.value), heads, ceil_div(outs, _BLOCK_OUTS.value))](
        x_THK, w_HNK, out, positions_T if skips else out, tokens, x_THK.stride(0), x_THK.stride(1),
        H=heads, N=outs, K=inputs, W_HEAD=w_HNK.stride(0), W_OUT=w_HNK.stride(1), W_IN=w_HNK.stride(2),
        BK=min(64 if x_THK.element_size() == 4 else 128, max(16, power_of_2(inputs))), SKIPS=skips,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def latent_attention_triton(given: LatentAttentionInputs) -> Tensor:
    """See ``latent_attention.latent_attention``. Without ``host_spans`` only captured steps with prompts use both forms."""
    q_THC, up_HCL, nope, paging = given.q_THC, given.up_HCL, given.nope, given.paging
    assert q_THC.dtype in (torch.bfloat16, torch.float32), q_THC.dtype
    allocate = torch.zeros if given.captured else torch.empty  # products leave out blocks of padding, whose results are zeros
    out_THV = allocate(*q_THC.shape[:2], up_HCL.shape[1] - nope, dtype=q_THC.dtype, device=q_THC.device)
    prompts = None
    if given.captured or (given.any_order and paging.host_spans is not None):
        prompts = paging.once(("rounds", given.form), lambda: plan_prompts(given))
    # The other sequences' rows and padding, which lie between those of prompts.
    spans = () if prompts is None else prompts.spans
    rest = given if prompts is None else given._replace(paging=prompts.rest)
    wide_SNR = widened_rows(rest) if rest.widens(len(q_THC) - sum(new for _, new, _ in spans)) else None
    begin = 0
    for first, new, _ in (*spans, (len(q_THC), 0, 0)):
        for start in range(begin, first, ROUND_TOKENS):
            _attend(rest, out_THV, slice(start, min(start + ROUND_TOKENS, first)), wide_SNR)
        begin = first + new
    if prompts is not None and prompts.rounds:
        attend_projected(given, prompts, out_THV)  # in a captured step the absorbed form may write zeros for these tokens
    return out_THV


def _attend(given: LatentAttentionInputs, out_THV: Tensor, part: slice, wide_SNR: Tensor | None) -> None:
    """Write the results of some tokens in the absorbed form."""
    up_HCL, nope = given.up_HCL, given.nope
    by_head = partial(
        by_head_triton, any_order=given.any_order, positions_T=given.paging.positions_T[part] if given.captured else None
    )
    query_THL = by_head(given.q_THC[part, :, :nope], up_HCL[:, :nope].transpose(1, 2))
    mixed_THL = attend_absorbed(given, query_THL, part.start, wide_SNR)
    by_head(mixed_THL, up_HCL[:, nope:], out=out_THV[part])
