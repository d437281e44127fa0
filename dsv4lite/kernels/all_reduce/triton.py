"""Kernel of ``all_reduce_few``: every rank writes its part into the memory of all, and adds up what arrives in its own.

Consumers poll the value itself: buffers hold ``EMPTY`` before. So no program waits until a write is confirmed, and none sends
a flag behind it. One program sends and sums one block of numbers, which is its own in every call, whatever the call's size, and
counts its calls: they take three buffers in turn. A program clears the buffer of its last call, which the peers fill two calls
later, when they have this rank's part of the call between, that is, when this kernel has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.all_reduce import EMPTY, EXPERT_COLUMNS, TURNS, Inbox
from dsv4lite.kernels.e4m3 import native_e4m3, to_bf16
from dsv4lite.kernels.experts import ExpertSum

BLOCK = EXPERT_COLUMNS  # numbers of one program: 16 bytes for each of its threads
_WARPS = 8
_PATIENCE = 1 << 12  # looks at what has arrived between two at the host's word, which is far away


@triton.jit(do_not_specialize=["rank"])
def all_reduce_kernel(
    part, chosen, also, out, addresses, calls, size, rank, numbers, RANKS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, ADDED: tl.constexpr, NATIVE: tl.constexpr, EMPTY: tl.constexpr,
    TURNS: tl.constexpr, PATIENCE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    call = tl.load(calls + block)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if TOP_K == 0:
        x = tl.load(part + at, mask=inside, other=0.0)
    else:  # a block is of one token
        # Reference: total = total + outputs[:, k]
        token = (block * BLOCK // HIDDEN).to(tl.int64)
        column = block * BLOCK % HIDDEN + tl.arange(0, BLOCK)
        x = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(TOP_K):
            pair = token * TOP_K + k
            end = tl.where(tl.load(chosen + pair) < EXPERTS, HIDDEN, 0)  # nothing was written where there is no expert
            x += tl.load(part + pair * HIDDEN + column, mask=column < end, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(also + at, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits)
    turn = (call % TURNS).to(tl.int32)
    before = ((call + TURNS - 1) % TURNS).to(tl.int32)
    for peer in tl.static_range(RANKS):
        theirs = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(tl.int32)), 16)
        tl.store(theirs + (turn * RANKS + rank) * numbers + at, bits, mask=inside)
    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)
    place = tl.arange(0, RANKS)[:, None] * numbers + at[None, :]
    tl.store(own + before * RANKS * numbers + place, tl.full((RANKS, BLOCK), EMPTY, tl.int32))
    source = own + turn * RANKS * numbers + place
    wanted = tl.broadcast_to(inside[None, :], (RANKS, BLOCK))
    arrived = tl.load(source, mask=wanted, other=0, volatile=True)
    missing = tl.sum(tl.sum((arrived == EMPTY).to(tl.int32), axis=0), axis=0)
    looks = 0
    while missing > 0:
        arrived = tl.load(source, mask=wanted, other=0, volatile=True)
        missing = tl.sum(tl.sum((arrived == EMPTY).to(tl.int32), axis=0), axis=0)
        looks += 1
        if looks % PATIENCE == 0:
            abandoned = tl.load(tl.load(addresses + RANKS).to(tl.pointer_type(tl.int32)), volatile=True)
            missing = tl.where(abandoned != 0, 0, missing)
    total = tl.sum(arrived.to(tl.float32, bitcast=True), axis=0)
    if out.dtype.element_ty == tl.float32:
        tl.store(out + at, total, mask=inside)
    else:
        tl.store(out + at, to_bf16(total, NATIVE), mask=inside)
    tl.store(calls + block, call + 1)


def all_reduce_triton(part: Tensor, inbox: Inbox, dtype: torch.dtype, also: Tensor | None) -> Tensor:
    """Launch ``all_reduce_few``."""
    assert part.dtype == torch.float32 and part.is_contiguous(), part.dtype
    assert also is None or (also.is_contiguous() and also.shape == part.shape), also
    out = torch.empty(part.shape, dtype=dtype, device=part.device)
    _launch(part, part, part if also is None else also, out, inbox, TOP_K=0, EXPERTS=0, HIDDEN=BLOCK, ADDED=also is not None)
    return out


def all_reduce_experts_triton(parts: ExpertSum, inbox: Inbox, dtype: torch.dtype) -> Tensor:
    """Launch ``all_reduce_experts``."""
    outputs, shared, (tokens, top_k, hidden) = parts.outputs_TKD, parts.shared_TD, parts.outputs_TKD.shape
    assert hidden % BLOCK == 0 and outputs.is_contiguous() and (shared is None or shared.is_contiguous()), hidden
    out = torch.empty(tokens, hidden, dtype=dtype, device=outputs.device)
    sizes = {"TOP_K": top_k, "EXPERTS": parts.experts, "HIDDEN": hidden, "ADDED": shared is not None}
    _launch(outputs, parts.slots_TK, outputs if shared is None else shared, out, inbox, **sizes)
    return out


def _launch(part: Tensor, chosen: Tensor, also: Tensor, out: Tensor, inbox: Inbox, **sizes: int) -> None:
    assert 0 < out.numel() <= inbox.numbers and out.dtype in (torch.bfloat16, torch.float32), (out.shape, out.dtype)
    all_reduce_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        part,
        chosen,
        also,
        out,
        inbox.addresses,
        inbox.calls,
        out.numel(),
        inbox.rank,
        inbox.numbers,
        RANKS=len(inbox.addresses) - 1,
        BLOCK=BLOCK,
        NATIVE=native_e4m3(part),
        EMPTY=EMPTY,
        TURNS=TURNS,
        PATIENCE=_PATIENCE,
        **sizes,
        num_warps=_WARPS,
    )
