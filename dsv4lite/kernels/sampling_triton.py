"""Kernel of ``sampling.argmax_finite``.

A row's vocabulary is cut into pieces, one program each. Values become integers in their order with the token id beneath: the
largest key is the same in whatever order they are compared. The last program of a row to arrive picks the largest of all pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import Variant
from dsv4lite.kernels.gemm_triton import COUNTERS, counters_of

PIECE = 2048  # logits of one program
_NUM_WARPS = 4


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
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    value = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf"))
    # top, token_ids = logits.max(dim=-1, keepdim=True): -0.0 equals 0.0, and a NaN wins over every number
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    tl.store(keys + row * pieces + tl.program_id(1), tl.max(key, axis=0))
    tl.debug_barrier()  # the key is written before the thread that counts says so
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
    if arrived == pieces - 1:
        piece = tl.arange(0, PIECES)
        every = tl.load(keys + row * pieces + piece, mask=piece < pieces, other=-0x8000000000000000, cache_modifier=".cg")
        token_id = 0x7FFFFFFF - (tl.max(every, axis=0) & 0x7FFFFFFF)
        best = tl.load(logits + row * row_stride + token_id)
        tl.store(top + row, best)
        tl.store(token_ids + row, token_id)
        # (top.abs() < float("inf")).squeeze(-1)
        tl.store(finite + row, (tl.abs(best) < float("inf")).to(tl.uint8))
        tl.store(arrivals + row, 0)  # as the next kernel finds it


def argmax_finite_triton(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ``sampling.argmax_finite``."""
    rows, vocabulary = logits.shape
    assert logits.dtype == torch.float32 and vocabulary > 0 and rows <= COUNTERS, (logits.dtype, logits.shape)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    pieces = triton.cdiv(vocabulary, PIECE)
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
            PIECE=PIECE,
            PIECES=triton.next_power_of_2(pieces),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        )
    return top, token_ids, finite


def variants() -> list[Variant]:
    """Return the kernel for a small and for V4's vocabulary."""
    pointers = {"logits": "*fp32", "keys": "*i64", "top": "*fp32", "token_ids": "*i64", "finite": "*u8", "arrivals": "*i32"}
    sizes = dict.fromkeys(("vocabulary", "row_stride", "pieces"), "i32")
    return [
        Variant(
            kernel=_argmax_kernel,
            signature={**pointers, **sizes},
            constants={"PIECE": PIECE, "PIECES": pieces},
            num_warps=_NUM_WARPS,
        )
        for pieces in (1, 64)
    ]
