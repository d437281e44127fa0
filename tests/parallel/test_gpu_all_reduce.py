"""Sums through memory that ranks open to each other, on two GPUs or more."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from dsv4lite.kernels.peer_memory import (
    BLOCK,
    Inbox,
    all_gather_columns,
    all_gather_shards,
    all_reduce,
    all_reduce_ref,
    all_reduce_shards,
    reduce_scatter_shards,
)
from dsv4lite.parallel.peer_memory import SHARDED_NUMBERS, PeerMemory

pytestmark = pytest.mark.gpu
NUMBERS = 1 << 18
COUNTS = (7, 4096, 8 * 4096, 5000, NUMBERS, 64 * 4096, 1)
ROWS = (1, 32, 2 * SHARDED_NUMBERS // BLOCK, SHARDED_NUMBERS // BLOCK + 3, 9)
SHARDED = (2, 4096, NUMBERS + 2, SHARDED_NUMBERS, SHARDED_NUMBERS + 3 * 4096, 5000)


def parts_of(size: int, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) for _ in range(size)]


def opened(rank: int, size: int, store: dist.TCPStore) -> tuple[PeerMemory, Inbox]:
    torch.cuda.set_device(rank)
    memory = PeerMemory.open(store, rank, size, torch.device("cuda", rank), numbers=NUMBERS)
    assert memory is not None, "this machine's GPUs do not open their memory to each other"
    return memory, memory.inbox


def sums(rank: int, size: int, store: dist.TCPStore, answers: Any) -> None:
    """Sum by launches, then by replays of graphs that hold calls of several sizes, with new numbers in every replay."""
    memory, inbox = opened(rank, size, store)
    wrong = []
    for seed, count in enumerate(COUNTS * 3):
        parts = parts_of(size, count, seed)
        for dtype in (torch.float32, torch.bfloat16):
            if not right(all_reduce(parts[rank].cuda(), inbox, dtype), parts, dtype):
                wrong.append(("launch", count, str(dtype)))
    for seed, count in enumerate(SHARDED * 3):
        parts = parts_of(size, count, seed)
        sums_N = all_reduce_shards(parts[rank].cuda().view(-1, 2), memory.shards)
        if not right(sums_N.flatten(), parts, torch.bfloat16):
            wrong.append(("shards", count, ""))
        rows = [part[: count // 7 * 7].view(7, -1) if count > 7 else part.view(1, -1) for part in parts]
        columns = all_gather_columns(rows[rank].cuda(), memory.shards)  # calls of both follow each other
        if not torch.equal(columns.cpu(), torch.cat(rows, 1)):
            wrong.append(("columns", count, ""))
    for seed, rows in enumerate(ROWS * 3):
        parts = parts_of(size, rows * BLOCK, seed)
        if not right(in_rows(parts[rank].cuda().view(rows, -1), memory), parts, torch.bfloat16):
            wrong.append(("rows", rows, ""))
    parts = [parts_of(size, count, 99) for count in COUNTS]
    inputs = [each[rank].cuda() for each in parts]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for x in inputs:
            all_reduce(x, inbox, torch.float32, x)  # compiled and loaded before it is recorded
        all_reduce_shards(inputs[1].view(2, -1), memory.shards, inputs[1].view(2, -1))
        in_rows(inputs[2].view(32, -1), memory)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = [all_reduce(x, inbox, torch.float32, x) for x in inputs]
            sharded = all_reduce_shards(inputs[1].view(2, -1), memory.shards, inputs[1].view(2, -1))
            gathered = all_gather_columns(inputs[2].view(8, -1), memory.shards)
            from_rows = in_rows(inputs[2].view(32, -1), memory)
        for replay in range(200):
            factor = 1.0 + replay % 7
            for x, each in zip(inputs, parts, strict=True):
                x.copy_(each[rank] * factor)
            graph.replay()
            if replay % 20 == 0:
                found = [right(y, [2 * factor * p for p in each], torch.float32) for y, each in zip(outputs, parts, strict=True)]
                found.append(right(sharded.flatten(), [2 * factor * p for p in parts[1]], torch.bfloat16))
                found.append(torch.equal(gathered.cpu(), torch.cat([(factor * p).view(8, -1) for p in parts[2]], 1)))
                found.append(right(from_rows, [factor * p for p in parts[2]], torch.bfloat16))
                wrong += [("replay", replay, count) for count, fine in zip((*COUNTS, 0, -1, -2), found, strict=True) if not fine]
        stream.synchronize()
    answers.put((rank, wrong, [y.tolist() for y in outputs[:3]]))
    if rank == 0:  # one more sum, for which the others never come
        all_reduce(inputs[0], inbox, torch.float32)
        ended = torch.cuda.Event()
        ended.record()
        time.sleep(0.5)
        waits = not ended.query()
        memory.abandon()
        torch.cuda.synchronize()
        answers.put((-1, [] if waits else ["it has not waited"], []))


def in_rows(part: Tensor, memory: PeerMemory) -> Tensor:
    """Return the sum, of which each rank adds up some rows."""
    mine = reduce_scatter_shards(part, memory.shards)
    return all_gather_shards(mine, memory.shards)[: len(part)].flatten()


def right(found: Tensor, parts: list[Tensor], dtype: torch.dtype) -> bool:
    expected = all_reduce_ref(parts, dtype)
    if len(parts) == 2:
        return torch.equal(found.cpu(), expected)
    return torch.allclose(found.cpu().float(), expected.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def reported(function: Callable[..., None], rank: int, size: int, port: int, answers: Any) -> None:
    """Run one rank; an exception is its answer. Its memory stays open until all ranks have answered."""
    torch.set_num_threads(4)  # the ranks check their results at the same time
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=300))
    try:
        function(rank, size, store, answers)
        store.wait(["answered"])
    except BaseException:
        answers.put((rank, [traceback.format_exc()], []))
        raise


def on_gpus(function: Callable[..., None], size: int, count: int) -> list[tuple[int, list[Any], list[list[float]]]]:
    """Run a function on each rank; return ``count`` answers, or those up to the first that names something wrong."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    answers, found = context.Queue(), []
    processes = [
        context.Process(target=reported, args=(function, rank, size, store.port, answers), daemon=True) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        while len(found) < count and not any(wrong for _, wrong, _ in found):
            found.append(answers.get(timeout=300))
        return found
    finally:
        store.set("answered", "")
        for process in processes:
            process.join(10)
            process.kill()


@pytest.mark.parametrize("size", [2, 4])
def test_all_reduce_is_right_in_launches_and_replays_and_ends_when_it_is_abandoned(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    found = {rank: (wrong, outputs) for rank, wrong, outputs in on_gpus(sums, size, size + 1)}
    assert {rank: wrong for rank, (wrong, _) in found.items()} == {rank: [] for rank in range(-1, size)}
    for rank in range(1, size):
        assert found[rank][1] == found[0][1]
