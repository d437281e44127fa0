"""Kernels of ``sampling.argmax_finite`` and ``sampling.token_logprobs``.

A row's vocabulary is cut into pieces, one program each; the last program of a row to end combines their results. The bits of a
result do not depend on the pieces: a maximum is taken over integer keys, value above token id, and exponentials are summed in fixed
point.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.counters import COUNTERS, counters_of
from dsv4lite.kernels.dispatch import ceil_div, power_of_2
from dsv4lite.kernels.pdl import dependent_launch, wait_for_predecessor
from dsv4lite.kernels.sampling import best_tokens

PIECE = 2048  # logits of one program
_PIECE = tl.constexpr(PIECE)
_NUM_WARPS = 4


@triton.jit
def ascending(x):
    """Return int32 in the order of the floats; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def arrive(arrivals, row, pieces):
    """Return whether this program is the last of a row to arrive; it can then read what all have written, bypassing L1 (.cg)."""
    tl.debug_barrier()  # all threads have written before one of them counts the program
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
    last = arrived == pieces - 1
    if last:
        tl.store(arrivals + row, 0)  # for the next kernel
    return last


@triton.jit
def best_key(value, token):
    """Return the largest key of some logits; of two tokens the better one, or on a tie the lower id, has the larger key."""
    # Reference: top, token_ids = logits.max(dim=-1, keepdim=True): -0.0 equals 0.0, and a NaN wins over every number
    ordered = tl.where(value == value, ascending(value), 0x7FFFFFFF)
    return tl.max((ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64), axis=0)


@triton.jit
def best_token(keys, pieces, PIECES: tl.constexpr):
    """Return the token id of the largest of a row's keys, one per piece."""
    piece = tl.arange(0, PIECES)
    every = tl.load(keys + piece, mask=piece < pieces, other=-0x8000000000000000, cache_modifier=".cg")
    return 0x7FFFFFFF - (tl.max(every, axis=0) & 0x7FFFFFFF)


@triton.jit
def total_of(partial, pieces, PIECES: tl.constexpr):
    """Return the sum of a row's integers, one per piece."""
    piece = tl.arange(0, PIECES)
    return tl.sum(tl.load(partial + piece, mask=piece < pieces, other=0, cache_modifier=".cg"), 0)


@triton.jit
def _argmax_kernel(
    logits,
    keys,
    top,
    token_ids,
    finite,
    arrivals,
    vocabulary,
    row_stride,
    pieces,
    PIECES: tl.constexpr,
):
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * _PIECE + tl.arange(0, _PIECE)
    value = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf"))
    tl.store(keys + row * pieces + tl.program_id(1), best_key(value, token))
    if arrive(arrivals, row, pieces):
        token_id = best_token(keys + row * pieces, pieces, PIECES)
        best = tl.load(logits + row * row_stride + token_id)
        tl.store(top + row, best)
        tl.store(token_ids + row, token_id)
        # (top.abs() < float("inf")).squeeze(-1)
        tl.store(finite + row, (tl.abs(best) < float("inf")).to(tl.uint8))


@triton.jit
def fixed_exp(x):
    """Return ``exp(x)``, x <= 0, in units of 2**-40, int64: sums do not depend on their order."""
    # Reference: torch.exp(scaled).mul_(_FIXED_POINT).to(torch.int64)
    return (tl.exp(x) * 1099511627776.0).to(tl.int64)


@triton.jit
def log_of_fixed(total):
    """Return the logarithm of a sum of ``fixed_exp``."""
    return tl.log((total.to(tl.float64) * 9.094947017729282e-13).to(tl.float32))


@triton.jit
def _score_kernel(
    logits,
    token_ids,
    top,
    partial,
    logprobs,
    ranks,
    log_sums,
    arrivals,
    vocabulary,
    row_stride,
    pieces,
    PIECES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * _PIECE + tl.arange(0, _PIECE)
    value = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf"))
    best = tl.load(top + row)
    own = tl.load(logits + row * row_stride + tl.load(token_ids + row))
    mine = partial + row * 2 * pieces + tl.program_id(1)
    tl.store(mine, tl.sum(fixed_exp(value - best), 0))
    tl.store(mine + pieces, tl.sum((value > own).to(tl.int64), 0))
    if arrive(arrivals, row, pieces):
        # Reference: log_softmax(logits)[token_ids], (logits > logits[token_ids]).sum(-1) + 1
        log_sum = log_of_fixed(total_of(partial + row * 2 * pieces, pieces, PIECES))
        tl.store(logprobs + row, own - best - log_sum)
        tl.store(ranks + row, (1 + total_of(partial + (row * 2 + 1) * pieces, pieces, PIECES)).to(tl.int32))
        tl.store(log_sums + row, log_sum)


def argmax_finite_triton(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ``sampling.argmax_finite``."""
    rows, vocabulary = logits.shape
    assert logits.dtype == torch.float32 and vocabulary > 0 and rows <= COUNTERS, (logits.dtype, logits.shape)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    pieces = ceil_div(vocabulary, PIECE)
    keys = torch.empty(rows, pieces, dtype=torch.int64, device=logits.device)
    top = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        _argmax_kernel[(rows, pieces)](
            logits,
            keys,
            top,
            token_ids,
            finite.view(torch.uint8),
            counters_of(logits.device),
            vocabulary,
            logits.stride(0),
            pieces,
            PIECES=power_of_2(pieces),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
            launch_pdl=dependent_launch(logits.device),
        )
    return top, token_ids, finite


def token_logprobs_triton(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``sampling.token_logprobs``."""
    rows, vocabulary = logits.shape
    top, _, _ = argmax_finite_triton(logits)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    pieces, device = ceil_div(vocabulary, PIECE), logits.device
    partial = torch.empty(rows, 2, pieces, dtype=torch.int64, device=device)
    logprobs, log_sums = torch.empty(2, rows, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        _score_kernel[(rows, pieces)](
            logits,
            token_ids,
            top,
            partial,
            logprobs,
            ranks,
            log_sums,
            counters_of(device),
            vocabulary,
            logits.stride(0),
            pieces,
            PIECES=power_of_2(pieces),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
    best = best_tokens(logits, k)
    return logprobs, ranks, best.to(torch.int32), logits.gather(-1, best) - top - log_sums[:, None]
