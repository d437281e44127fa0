"""Kernels of collectives: each rank writes into the buffers of all ranks, and waits until the peers have written into its own.

``all_reduce``: consumers poll the value itself; ``EMPTY`` marks "not written yet". So no program sends a flag or waits until its
write is visible. A program clears its buffer of the previous call. Peers fill that buffer again two calls after this one, when they
have received this rank's part of the call in between; by then this kernel has ended.

``all_reduce_shards``: a rank adds one shard of the numbers and sends the sums to its peers, which poll them in the same way. With R
ranks, each sends 6 (R - 1) / R bytes per number instead of 4 (R - 1). ``reduce_scatter_shards`` is its first half.
``all_gather_columns`` and ``all_gather_shards`` send to the same places, and all clear the same ones: their calls may follow each
other.

``all_gather`` and ``reduce_scatter``: a number and the count of its call are sent in one 64-bit word, which is written and read
atomically: the number has arrived when the count has. So any bits can be sent, and nothing has to be cleared. Peers fill a buffer
again when they have received this rank's block of a later call; by then this kernel has ended.

One program sends and receives one block of numbers and counts the calls of that block; calls use the ``TURNS`` buffers in rotation.
The block has the same place in every call, whatever the call's size. A program waits for the same block on its peers, never for
another program of its grid. If not all programs run at the same time, they take blocks in the order in which they start, so every
rank works on the first block that is not done.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import ceil_div, multiprocessors_of
from dsv4lite.kernels.e4m3 import as_stored, to_bf16
from dsv4lite.kernels.experts import ExpertSum
from dsv4lite.kernels.experts.triton import sum_of_token
from dsv4lite.kernels.peer_memory import BLOCK, EMPTY, TURNS, Inbox, TokenRows, most_rows, shard_numbers

_EMPTY, _BLOCK, _TURNS = tl.constexpr(EMPTY), tl.constexpr(BLOCK), tl.constexpr(TURNS)
_WARPS = 8
_RESIDENT = 2  # programs that fit on a multiprocessor at the largest number of registers per thread
_PATIENCE = 1 << 12  # polls of a buffer per poll of the host's flag, which is in host memory and slow to read


@triton.jit
def _still_missing(missing, polls, addresses, RANKS: tl.constexpr, PATIENCE: tl.constexpr):
    """Return ``missing``, or 0 once the host has ended all waiting."""
    if polls % PATIENCE == 0:
        abandoned = tl.load(tl.load(addresses + RANKS).to(tl.pointer_type(tl.int32)), volatile=True)
        missing = tl.where(abandoned != 0, 0, missing)
    return missing


@triton.jit
def _poll(source, wanted, addresses, RANKS: tl.constexpr, PATIENCE: tl.constexpr):
    """Wait until all wanted words at ``source``, which has two dimensions, have arrived; return them, and 0 for the others."""
    arrived = tl.load(source, mask=wanted, other=0, volatile=True)
    missing = tl.sum(tl.sum((arrived == _EMPTY).to(tl.int32), axis=0), axis=0)
    polls = 0
    while missing > 0:
        arrived = tl.load(source, mask=wanted, other=0, volatile=True)
        missing = tl.sum(tl.sum((arrived == _EMPTY).to(tl.int32), axis=0), axis=0)
        polls += 1
        missing = _still_missing(missing, polls, addresses, RANKS, PATIENCE)
    return arrived


@triton.jit
def _block_of(tickets, ORDERED: tl.constexpr):
    """Return the block of this program: its number, or if ORDERED its place in the order in which programs start."""
    block = tl.program_id(0)
    if ORDERED:
        block = tl.atomic_add(tickets, 1, sem="relaxed")
        if block == tl.num_programs(0) - 1:
            tl.store(tickets, 0)
    return block


@triton.jit
def _part_of_block(
    part, chosen, also, first, size, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Return the bits of a block of this rank's numbers from ``first`` on, with +0.0 for -0.0; undefined from ``size`` on."""
    at = first + tl.arange(0, _BLOCK)
    inside = at < size
    if TOP_K == 0:
        x = tl.load(part + at, mask=inside, other=0.0)
    else:  # HIDDEN is a multiple of BLOCK, so a block belongs to one token
        column = tl.multiple_of(first % HIDDEN, _BLOCK) + tl.arange(0, _BLOCK)
        token = tl.minimum(first, size - 1) // HIDDEN
        x = sum_of_token(part, chosen, token.to(tl.int64), column, EXPERTS, HIDDEN, TOP_K)
    if ADDED:
        x += tl.load(also + at, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits == _EMPTY, 0, bits)


@triton.jit(do_not_specialize=["rank"])
def all_reduce_kernel(
    part, chosen, also, out, addresses, calls, tickets, size, rank, numbers, RANKS: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, ADDED: tl.constexpr, PATIENCE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    block = _block_of(tickets, ORDERED)
    call = tl.load(calls + block)
    at = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = at < size
    bits = _part_of_block(part, chosen, also, block * _BLOCK, size, TOP_K, EXPERTS, HIDDEN, ADDED)
    turn = (call % _TURNS).to(tl.int32)
    before = ((call + _TURNS - 1) % _TURNS).to(tl.int32)
    for peer in tl.static_range(RANKS):
        theirs = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(tl.int32)), 16)
        tl.store(theirs + (turn * RANKS + rank) * numbers + at, bits, mask=inside)
    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)
    place = tl.arange(0, RANKS)[:, None] * numbers + at[None, :]
    tl.store(own + before * RANKS * numbers + place, tl.full((RANKS, _BLOCK), _EMPTY, tl.int32))
    wanted = tl.broadcast_to(inside[None, :], (RANKS, _BLOCK))
    arrived = _poll(own + turn * RANKS * numbers + place, wanted, addresses, RANKS, PATIENCE)
    total = tl.sum(arrived.to(tl.float32, bitcast=True), axis=0)
    tl.store(out + at, as_stored(total, out), mask=inside)
    tl.store(calls + block, call + 1)


@triton.jit
def _buffers(addresses, turn, rank, numbers, RANKS: tl.constexpr):
    """Return, by sender, where a peer's numbers arrive at this rank, [RANKS, 1]; this rank sends nothing to itself."""
    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)
    return own + (turn * (RANKS - 1) + (tl.arange(0, RANKS) + RANKS - 1 - rank) % RANKS)[:, None] * numbers


@triton.jit
def _buffer_at(addresses, i, turn, rank, numbers, RANKS: tl.constexpr):
    """Return where this rank's numbers arrive at its ``i``-th peer, counted from itself on."""
    theirs = tl.multiple_of(tl.load(addresses + (rank + i) % RANKS).to(tl.pointer_type(tl.int32)), 16)
    return theirs + (turn * (RANKS - 1) + RANKS - 1 - i) * numbers


@triton.jit
def _clear(buffers, peers, number, word, RANKS: tl.constexpr):
    """Clear what peers have sent of a block: numbers, and the half as many words of ``all_reduce_shards`` for its sums."""
    tl.store(buffers + number[None, :], tl.full((RANKS, _BLOCK), _EMPTY, tl.int32), mask=peers)
    tl.store(buffers + word[None, :], tl.full((RANKS, _BLOCK // 2), _EMPTY, tl.int32), mask=peers)


@triton.jit
def _sum_of_shard(
    part, chosen, also, addresses, block, turn, rank, shard, size, sent, numbers, sums, RANKS: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, ADDED: tl.constexpr, PATIENCE: tl.constexpr,
):  # fmt: skip
    """Return the words of a block's sum of this rank's shard: pairs of bfloat16 numbers, with +0.0 for -0.0.

    Shards begin every ``shard`` numbers. Of ``size`` numbers that there are, the first ``sent`` are sent, which may be more than
    ``size``: then what is sent of the others is undefined.
    """
    HALF: tl.constexpr = _BLOCK // 2
    number, word = block * _BLOCK + tl.arange(0, _BLOCK), sums + block * HALF + tl.arange(0, HALF)
    for i in tl.static_range(1, RANKS):
        first = (rank + i) % RANKS * shard + block * _BLOCK
        bits = _part_of_block(part, chosen, also, first, size, TOP_K, EXPERTS, HIDDEN, ADDED)
        to = _buffer_at(addresses, i, turn, rank, numbers, RANKS)
        tl.store(to + number, bits, mask=first + tl.arange(0, _BLOCK) < sent)
    sender = tl.arange(0, RANKS)[:, None]
    _clear(_buffers(addresses, (turn + _TURNS - 1) % _TURNS, rank, numbers, RANKS), sender != rank, number, word, RANKS)
    first = rank * shard + block * _BLOCK
    mine = _part_of_block(part, chosen, also, first, size, TOP_K, EXPERTS, HIDDEN, ADDED)
    wanted = (sender != rank) & (first + tl.arange(0, _BLOCK) < sent)[None, :]
    source = _buffers(addresses, turn, rank, numbers, RANKS) + number[None, :]
    arrived = _poll(source, wanted, addresses, RANKS, PATIENCE)
    total = tl.sum(tl.where(sender == rank, mine[None, :], arrived).to(tl.float32, bitcast=True), axis=0)
    rounded = to_bf16(total).to(tl.int16, bitcast=True).to(tl.int32)
    low, high = tl.split(tl.reshape(tl.where(rounded == -32768, 0, rounded), (HALF, 2)))
    return (high << 16) | (low & 0xFFFF)


@triton.jit(do_not_specialize=["rank"])
def all_reduce_shards_kernel(
    part, chosen, also, out, addresses, calls, tickets, size, rank, numbers, sums, RANKS: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, ADDED: tl.constexpr, PATIENCE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    # Words that a rank receives from a peer: the peer's part of this rank's shard, float32; from ``sums`` on, the sums of the
    # peer's shard, bfloat16 in pairs.
    HALF: tl.constexpr = _BLOCK // 2
    blocks = tl.num_programs(0)
    block = _block_of(tickets, ORDERED)
    call = tl.load(calls + block)
    turn = (call % _TURNS).to(tl.int32)
    words = _sum_of_shard(
        part, chosen, also, addresses, block, turn, rank, blocks * _BLOCK, size, size, numbers, sums,
        RANKS, TOP_K, EXPERTS, HIDDEN, ADDED, PATIENCE,
    )  # fmt: skip
    word = sums + block * HALF + tl.arange(0, HALF)
    at = (rank * blocks + block) * HALF + tl.arange(0, HALF)
    inside = at < size // 2
    for i in tl.static_range(1, RANKS):
        tl.store(_buffer_at(addresses, i, turn, rank, numbers, RANKS) + word, words, mask=inside)
    out = out.to(tl.pointer_type(tl.int32))
    tl.store(out + at, words, mask=inside)
    # Sums of the peers' shards.
    sender = tl.arange(0, RANKS)[:, None]
    at = (sender * blocks + block) * HALF + tl.arange(0, HALF)[None, :]
    wanted = (sender != rank) & (at < size // 2)
    arrived = _poll(_buffers(addresses, turn, rank, numbers, RANKS) + word[None, :], wanted, addresses, RANKS, PATIENCE)
    tl.store(out + at, arrived, mask=wanted)
    tl.store(calls + block, call + 1)


@triton.jit(do_not_specialize=["rank"])
def reduce_scatter_shards_kernel(
    part, chosen, also, out, addresses, calls, tickets, shard, size, rank, numbers, sums, RANKS: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, ADDED: tl.constexpr, PATIENCE: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    # Ranks send rows past the last token, too: every program must wait for its peers, or this rank could be two calls ahead.
    HALF: tl.constexpr = _BLOCK // 2
    block = _block_of(tickets, ORDERED)
    call = tl.load(calls + block)
    words = _sum_of_shard(
        part, chosen, also, addresses, block, (call % _TURNS).to(tl.int32), rank, shard, size, RANKS * shard, numbers, sums,
        RANKS, TOP_K, EXPERTS, HIDDEN, ADDED, PATIENCE,
    )  # fmt: skip
    tl.store(out.to(tl.pointer_type(tl.int32)) + block * HALF + tl.arange(0, HALF), words)
    tl.store(calls + block, call + 1)


@triton.jit(do_not_specialize=["size", "columns", "rank"])
def all_gather_columns_kernel(
    part, out, addresses, calls, tickets, size, columns, rank, numbers, sums,
    ALIGNED: tl.constexpr, RANKS: tl.constexpr, PATIENCE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    block = _block_of(tickets, ORDERED)
    if ALIGNED:  # multiples of 16: now the compiler knows, and a thread moves 16 bytes
        size, columns = size // 16 * 16, columns // 16 * 16
    call = tl.load(calls + block)
    turn, before = (call % _TURNS).to(tl.int32), ((call + _TURNS - 1) % _TURNS).to(tl.int32)
    number, word = block * _BLOCK + tl.arange(0, _BLOCK), sums + block * (_BLOCK // 2) + tl.arange(0, _BLOCK // 2)
    inside = number < size
    bits = tl.load(part + number, mask=inside, other=0)
    bits = tl.where(bits == _EMPTY, 0, bits)
    for i in tl.static_range(1, RANKS):
        tl.store(_buffer_at(addresses, i, turn, rank, numbers, RANKS) + number, bits, mask=inside)
    sender = tl.arange(0, RANKS)[:, None]
    _clear(_buffers(addresses, before, rank, numbers, RANKS), sender != rank, number, word, RANKS)
    to = out + (number // columns * (RANKS * columns) + number % columns)
    tl.store(to + rank * columns, bits, mask=inside)
    wanted = (sender != rank) & inside[None, :]
    source = _buffers(addresses, turn, rank, numbers, RANKS) + number[None, :]
    arrived = _poll(source, wanted, addresses, RANKS, PATIENCE)
    tl.store(to[None, :] + sender * columns, arrived, mask=wanted)
    tl.store(calls + block, call + 1)


def _constants(inbox: Inbox) -> dict[str, int]:
    """Return the constants and launch options that all collectives share."""
    return {"RANKS": len(inbox.addresses) - 1, "PATIENCE": _PATIENCE, "num_warps": _WARPS, "enable_fp_fusion": True}


def _experts_of(parts: ExpertSum) -> dict[str, int]:
    """Return the sizes of a sum over experts, as kernel constants."""
    return {"TOP_K": parts.outputs_TKD.shape[1], "EXPERTS": parts.experts, "HIDDEN": parts.outputs_TKD.shape[2]}


def _word_arguments(inbox: Inbox, tokens: int, count: int) -> tuple[Tensor, Tensor, int, int, int, int]:
    """Return the arguments of ``all_gather_kernel`` and ``reduce_scatter_kernel`` from ``addresses`` to ``blocks``."""
    return inbox.addresses, inbox.calls, tokens, count, inbox.rank, inbox.numbers // (2 * BLOCK)


def _operands(part: Tensor | ExpertSum, also: Tensor | None) -> tuple[tuple[Tensor, Tensor, Tensor], torch.Size, dict[str, int]]:
    """Return the tensors that an all-reduce reads, the shape of the result, and the kernel's constants."""
    chosen, sizes = None, {"TOP_K": 0, "EXPERTS": 0, "HIDDEN": BLOCK}
    if isinstance(part, ExpertSum):
        assert also is None and part.outputs_TKD.shape[2] % BLOCK == 0, part.outputs_TKD.shape
        sizes = _experts_of(part)
        chosen, part, also, _ = part
        shape = part[:, 0].shape
    else:
        assert part.dtype == torch.float32 and (also is None or also.shape == part.shape), part.dtype
        shape = part.shape
    assert part.is_contiguous() and (also is None or also.is_contiguous()) and shape.numel() > 0, shape
    sizes |= {"ADDED": also is not None}
    return (part, part if chosen is None else chosen, part if also is None else also), shape, sizes


def _ordered(blocks: int, out: Tensor) -> bool:
    """Return whether there may be more programs than run at the same time, at the largest number of registers per thread."""
    return blocks > _RESIDENT * multiprocessors_of(out.device)


def all_reduce_triton(part: Tensor | ExpertSum, inbox: Inbox, dtype: torch.dtype, also: Tensor | None = None) -> Tensor:
    """Launch ``all_reduce``."""
    read, shape, sizes = _operands(part, also)
    assert shape.numel() <= inbox.numbers and dtype in (torch.bfloat16, torch.float32), (shape, dtype)
    out = torch.empty(shape, dtype=dtype, device=read[0].device)
    blocks = ceil_div(out.numel(), BLOCK)
    all_reduce_kernel[(blocks,)](
        *read, out, inbox.addresses, inbox.calls, inbox.tickets, out.numel(), inbox.rank, inbox.numbers,
        **sizes, **_constants(inbox), ORDERED=_ordered(blocks, out),
    )  # fmt: skip
    return out


def all_reduce_shards_triton(part: Tensor | ExpertSum, inbox: Inbox, also: Tensor | None = None) -> Tensor:
    """Launch ``all_reduce_shards``, in several launches if the rows do not fit into the inbox."""
    read, shape, sizes = _operands(part, also)
    assert len(shape) == 2 and shape[1] % 2 == 0, shape
    ranks = len(inbox.addresses) - 1
    out = torch.empty(shape, dtype=torch.bfloat16, device=read[0].device)
    shard = shard_numbers(inbox)
    rows_per_launch = ranks * (shard // BLOCK) * BLOCK // shape[1]
    assert rows_per_launch > 0, shape
    for begin in range(0, shape[0], rows_per_launch):
        rows = slice(begin, begin + rows_per_launch)
        size = out[rows].numel()
        blocks = ceil_div(size, ranks * BLOCK)
        all_reduce_shards_kernel[(blocks,)](
            *(tensor[rows] for tensor in read), out[rows], inbox.addresses, inbox.calls, inbox.tickets, size, inbox.rank,
            inbox.numbers, shard, **sizes, **_constants(inbox), ORDERED=_ordered(blocks, out),
        )  # fmt: skip
    return out


def reduce_scatter_shards_triton(part: Tensor | ExpertSum, inbox: Inbox, also: Tensor | None = None) -> Tensor:
    """Launch ``reduce_scatter_shards``, in several launches if the rows do not fit into the inbox."""
    read, shape, sizes = _operands(part, also)
    (tokens, hidden), ranks, shard = shape, len(inbox.addresses) - 1, shard_numbers(inbox)
    assert hidden % BLOCK == 0, shape
    count = ceil_div(tokens, ranks)
    out = torch.empty(count, hidden, dtype=torch.bfloat16, device=read[0].device)
    rows_per_launch = shard // BLOCK * BLOCK // hidden
    assert rows_per_launch > 0, (hidden, shard)
    for begin in range(0, count, rows_per_launch):
        mine = out[begin : begin + rows_per_launch]
        blocks = mine.numel() // BLOCK
        reduce_scatter_shards_kernel[(blocks,)](
            *(tensor[begin:] for tensor in read), mine, inbox.addresses, inbox.calls, inbox.tickets, count * hidden,
            (tokens - begin) * hidden, inbox.rank, inbox.numbers, shard,
            **sizes, **_constants(inbox), ORDERED=_ordered(blocks, out),
        )  # fmt: skip
    return out


def all_gather_columns_triton(part_TC: Tensor, inbox: Inbox, out: Tensor | None = None) -> Tensor:
    """Launch ``all_gather_columns``, in several launches if the rows do not fit into the inbox."""
    rows, columns = part_TC.shape
    ranks, fit = len(inbox.addresses) - 1, shard_numbers(inbox) // BLOCK * BLOCK
    if out is None:
        out = torch.empty(rows, ranks * columns, dtype=part_TC.dtype, device=part_TC.device)
    assert part_TC.is_contiguous() and out.is_contiguous() and out.shape == (rows, ranks * columns), (part_TC.shape, out.shape)
    assert out.dtype == part_TC.dtype and part_TC.dtype.itemsize == 4, (part_TC.dtype, out.dtype)
    rows_per_launch = fit // columns
    assert rows_per_launch > 0, (columns, fit)
    for begin in range(0, rows, rows_per_launch):
        _gather(part_TC[begin : begin + rows_per_launch], out[begin:], columns, inbox, aligned=False)
    return out


def all_gather_shards_triton(part: Tensor, inbox: Inbox) -> Tensor:
    """Launch ``all_gather_shards``, in several launches if the rows do not fit into the inbox."""
    words = part.view(torch.int32).flatten()
    ranks, columns, fit = len(inbox.addresses) - 1, len(words), shard_numbers(inbox) // BLOCK * BLOCK
    assert part.is_contiguous() and columns % 16 == 0, part.shape
    out = torch.empty(ranks * len(part), *part.shape[1:], dtype=part.dtype, device=part.device)
    whole = out.view(torch.int32).flatten()
    for begin in range(0, columns, fit):
        _gather(words[begin : begin + fit], whole[begin:], columns, inbox, aligned=True)
    return out


def _gather(part: Tensor, out: Tensor, columns: int, inbox: Inbox, *, aligned: bool) -> None:
    """Send one launch of whole rows of ``columns`` words, or a part of one row, to all ranks; ``out`` begins at its place."""
    blocks = ceil_div(part.numel(), BLOCK)
    all_gather_columns_kernel[(blocks,)](
        part.view(torch.int32), out.view(torch.int32), inbox.addresses, inbox.calls, inbox.tickets, part.numel(), columns,
        inbox.rank, inbox.numbers, shard_numbers(inbox), ALIGNED=aligned, **_constants(inbox), ORDERED=_ordered(blocks, out),
    )  # fmt: skip


@triton.jit
def _words(addresses, peer):
    """Return the address of a rank's buffer, as words of 64 bits."""
    return tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def _send(addresses, peer, rank, blocks, block, call, value, RANKS: tl.constexpr):
    """Write a block of numbers, int32, and the call's count into a rank's buffer."""
    word = (call << 32) | (value.to(tl.int64) & 0xFFFFFFFF)
    to = (((call % _TURNS) * RANKS + rank) * blocks + block) * _BLOCK + tl.arange(0, _BLOCK)
    tl.store(_words(addresses, peer) + to, word)


@triton.jit
def _receive(
    addresses, rank, blocks, block, call, RANKS: tl.constexpr, PATIENCE: tl.constexpr
):  # fmt: skip
    """Wait until all numbers have arrived, or the host ends all waiting; return those of all ranks, int32 [RANKS, BLOCK]."""
    first = (((call % _TURNS) * RANKS + tl.arange(0, RANKS)) * blocks + block) * _BLOCK
    source = _words(addresses, rank) + (first[:, None] + tl.arange(0, _BLOCK)[None, :])
    expected = call.to(tl.int32)
    words = tl.load(source, volatile=True)
    missing = tl.sum(((words >> 32).to(tl.int32) != expected).to(tl.int32))
    polls = 0
    while missing > 0:
        words = tl.load(source, volatile=True)
        missing = tl.sum(((words >> 32).to(tl.int32) != expected).to(tl.int32))
        polls += 1
        missing = _still_missing(missing, polls, addresses, RANKS, PATIENCE)
    return words.to(tl.int32)


@triton.jit(do_not_specialize=["tokens", "count", "rank", "blocks"])
def all_gather_kernel(
    x, codes, scales, ids, positions, all_x, all_codes, all_scales, all_ids, all_positions, addresses, calls,
    tokens, count, rank, blocks, RANKS: tl.constexpr, X: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    PARTS: tl.constexpr, PATIENCE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    here = row + tl.zeros((_BLOCK,), tl.int64) < tokens
    call = tl.load(calls + program) + 1
    # Words of a row: pairs of bfloat16 numbers, fours of codes, scales, token id, position.
    number = (program % PARTS) * _BLOCK + tl.arange(0, _BLOCK)
    code = number - X
    scale = code - CODES
    last = scale - SCALES
    is_number, is_code = number < X, (code >= 0) & (code < CODES)
    is_scale, is_id, is_position = (scale >= 0) & (scale < SCALES), last == 0, last == 1
    value = tl.load(x + row * X + number, mask=here & is_number, other=0)
    value |= tl.load(codes + row * CODES + code, mask=here & is_code, other=0)
    value |= tl.load(scales + row * SCALES + scale, mask=here & is_scale, other=0).to(tl.int32)
    value |= tl.load(ids + row + last, mask=here & is_id, other=0).to(tl.int32)
    value |= tl.load(positions + row + (last - 1), mask=here & is_position, other=0).to(tl.int32)
    value = tl.where(here | (last != 1), value, -1)
    for i in tl.static_range(RANKS):
        _send(addresses, (rank + 1 + i) % RANKS, rank, blocks, program, call, value, RANKS)  # itself last
    found = _receive(addresses, rank, blocks, program, call, RANKS, PATIENCE)
    to = tl.arange(0, RANKS)[:, None].to(tl.int64) * count + row
    tl.store(all_x + to * X + number[None, :], found, mask=is_number[None, :])
    tl.store(all_codes + to * CODES + code[None, :], found, mask=is_code[None, :])
    tl.store(all_scales + to * SCALES + scale[None, :], found.to(tl.uint8), mask=is_scale[None, :])
    tl.store(all_ids + to + last[None, :], found.to(all_ids.dtype.element_ty), mask=is_id[None, :])
    tl.store(all_positions + to + (last[None, :] - 1), found.to(all_positions.dtype.element_ty), mask=is_position[None, :])
    tl.store(calls + program, call)


@triton.jit(do_not_specialize=["tokens", "count", "rank", "blocks"])
def reduce_scatter_kernel(
    y, chosen, shared, out, addresses, calls, tokens, count, rank, blocks, RANKS: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, PATIENCE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    column = (program % PARTS) * _BLOCK + tl.arange(0, _BLOCK)
    call = tl.load(calls + program) + 1
    for i in tl.static_range(RANKS):
        peer = (rank + 1 + i) % RANKS  # itself last
        part = sum_of_token(y, chosen, peer * count + row, column, EXPERTS, HIDDEN, TOP_K)
        _send(addresses, peer, rank, blocks, program, call, part.to(tl.int32, bitcast=True), RANKS)
    found = _receive(addresses, rank, blocks, program, call, RANKS, PATIENCE)
    total = tl.sum(found.to(tl.float32, bitcast=True), axis=0)
    inside = column < tl.where(row < tokens, HIDDEN, 0)
    if SHARED:
        total += tl.load(shared + (rank * count + row) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (row * HIDDEN + column), as_stored(total, out), mask=inside)
    tl.store(calls + program, call)


def all_gather_triton(rows: TokenRows, inbox: Inbox, count: int) -> TokenRows:
    """Launch ``all_gather``."""
    tokens, hidden = rows.x_TD.shape
    ranks = len(inbox.addresses) - 1
    assert 0 < tokens <= count <= most_rows(inbox, hidden) and hidden % 4 == 0, (tokens, count, hidden)
    assert inbox.numbers % (2 * BLOCK) == 0 and rows.x_TD.dtype == torch.bfloat16, (inbox.numbers, rows.x_TD.dtype)
    assert all(tensor.is_contiguous() and len(tensor) == tokens for tensor in rows)
    every = TokenRows(*(torch.empty(ranks * count, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device) for tensor in rows))
    scales = rows.scales.shape[1]
    parts = ceil_div(hidden // 2 + hidden // 4 + scales + 2, BLOCK)
    all_gather_kernel[(count * parts,)](
        *_as_sent(rows),
        *_as_sent(every),
        *_word_arguments(inbox, tokens, count),
        X=hidden // 2,
        CODES=hidden // 4,
        SCALES=scales,
        PARTS=parts,
        **_constants(inbox),
    )
    return every


def _as_sent(rows: TokenRows) -> tuple[Tensor, ...]:
    return rows.x_TD.view(torch.int32), rows.codes.view(torch.int32), *rows[2:]


def reduce_scatter_triton(parts: ExpertSum, inbox: Inbox, tokens: int, dtype: torch.dtype) -> Tensor:
    """Launch ``reduce_scatter``."""
    outputs, shared, (every, _, hidden) = parts.outputs_TKD, parts.shared_TD, parts.outputs_TKD.shape
    ranks = len(inbox.addresses) - 1
    count, pieces = every // ranks, ceil_div(hidden, BLOCK)
    assert every == ranks * count and 0 < tokens <= count and 2 * count * pieces * BLOCK <= inbox.numbers, (every, ranks, tokens)
    assert outputs.is_contiguous() and parts.slots_TK.is_contiguous() and (shared is None or shared.is_contiguous())
    assert dtype in (torch.bfloat16, torch.float32), dtype
    out = torch.empty(tokens, hidden, dtype=dtype, device=outputs.device)
    reduce_scatter_kernel[(count * pieces,)](
        outputs,
        parts.slots_TK,
        outputs if shared is None else shared,
        out,
        *_word_arguments(inbox, tokens, count),
        SHARED=shared is not None,
        PARTS=pieces,
        **_experts_of(parts),
        **_constants(inbox),
    )
    return out
