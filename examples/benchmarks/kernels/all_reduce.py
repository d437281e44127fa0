"""Time all-reduces of float32 parts to bfloat16, by size, on a GPU for each rank.

    python -m examples.benchmarks.kernels.all_reduce [RANKS]

NCCL's all-reduce, alone and with the cast after it, ``all_reduce`` and ``all_reduce_shards``; then the same of what ranks have of
experts, 6 of each token, and of a shared expert, with the same sum in rows of each rank and the gathering of such rows;
microseconds of one call within a CUDA graph of several.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4lite.kernels.experts import ExpertSum
from dsv4lite.kernels.peer_memory import (
    all_gather_shards,
    all_reduce,
    all_reduce_shards,
    part_of_experts,
    reduce_scatter_shards,
)
from dsv4lite.layout import Layout
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.peer_memory import PeerMemory
from examples.benchmarks.kernels.ranks import run
from examples.benchmarks.kernels.timing import microseconds

KIB = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 131072)
MOST_KIB = 8192  # that every rank adds up as a whole
TOKENS = (64, 128, 256, 512, 2048, 8192)
HIDDEN, CHOSEN, EXPERTS = 4096, 6, 256


def main(rank: int, size: int, store: dist.Store) -> None:
    device = torch.device("cuda", rank)
    mesh = Mesh.from_store(store, Layout(tp=size), rank, device, timeout_s=30)
    memory = PeerMemory.open(dist.PrefixStore("bench", store), rank, size, device, numbers=MOST_KIB * 256)
    if memory is None:
        sys.exit("ranks cannot open their memory to each other")
    few = torch.zeros(1, device=device)

    def barrier() -> Tensor:
        return mesh.tp.all_reduce(few)

    def timed(call: object, kib: int) -> float:
        return microseconds(call, copies=1, calls=40 if kib <= MOST_KIB else 8, replays=9, before=barrier)  # type: ignore[arg-type]

    barrier()
    names = f"{'NCCL':>9}{'and cast':>10}{'whole':>9}{'shards':>9}"
    if rank == 0:
        print(f"{size} GPUs\n{'KiB':>7}{names}", flush=True)
    for kib in KIB:
        part = torch.randn(kib // 8, 2048, generator=torch.Generator().manual_seed(rank)).to(device)
        exact = mesh.tp.all_reduce(part.clone())
        found = [all_reduce_shards(part, memory.shards)]
        if kib <= MOST_KIB:
            torch.testing.assert_close(all_reduce(part, memory.inbox, torch.float32), exact, rtol=1e-5, atol=1e-5)
            found += [all_reduce(part, memory.inbox, torch.bfloat16)]
        for one in found:
            torch.testing.assert_close(one, exact.bfloat16(), rtol=0 if size == 2 else 1e-2, atol=0 if size == 2 else 1e-2)
        part.zero_()
        times = [timed(lambda _, part=part: mesh.tp.all_reduce(part), kib)]
        times += [timed(lambda _, part=part: mesh.tp.all_reduce(part).to(torch.bfloat16), kib)]
        whole = partial(all_reduce, part, memory.inbox, torch.bfloat16)
        times += [timed(lambda _, whole=whole: whole(), kib) if kib <= MOST_KIB else float("nan")]
        times += [timed(lambda _, part=part: all_reduce_shards(part, memory.shards), kib)]
        if rank == 0:
            print(f"{kib:>7}{times[0]:>9.2f}{times[1]:>10.2f}{times[2]:>9.2f}{times[3]:>9.2f}", flush=True)
    if rank == 0:
        print(f"\n{'tokens':>7}{names}{'rows':>9}{'gather':>9}", flush=True)
    for tokens in TOKENS:
        rng, kib = torch.Generator(device).manual_seed(rank), tokens * HIDDEN // 256
        chosen = torch.randint(EXPERTS, (tokens, CHOSEN), device=device)
        outputs = torch.randn(tokens, CHOSEN, HIDDEN, device=device, generator=rng).bfloat16()
        parts = ExpertSum(chosen, outputs, torch.randn(tokens, HIDDEN, device=device, generator=rng), EXPERTS)
        exact = mesh.tp.all_reduce(part_of_experts(parts)).bfloat16()
        torch.testing.assert_close(all_reduce_shards(parts, memory.shards), exact, rtol=0 if size == 2 else 1e-2, atol=1e-2)
        times = [timed(lambda _, parts=parts: mesh.tp.all_reduce(part_of_experts(parts)), kib)]
        times += [timed(lambda _, parts=parts: mesh.tp.all_reduce(part_of_experts(parts)).bfloat16(), kib)]
        whole = partial(all_reduce, parts, memory.inbox, torch.bfloat16)
        times += [timed(lambda _, whole=whole: whole(), kib) if kib <= MOST_KIB else float("nan")]
        times += [timed(lambda _, parts=parts: all_reduce_shards(parts, memory.shards), kib)]
        rows = partial(reduce_scatter_shards, parts, memory.shards)
        own = rows()
        gather = partial(all_gather_shards, own, memory.shards)
        torch.testing.assert_close(gather(), exact, rtol=0 if size == 2 else 1e-2, atol=1e-2)
        times += [timed(lambda _, call=call: call(), kib) for call in (rows, gather)]
        if rank == 0:
            print(f"{tokens:>7}{times[0]:>9.2f}{times[1]:>10.2f}" + "".join(f"{time:>9.2f}" for time in times[2:]), flush=True)
    barrier()


if __name__ == "__main__":
    run(main)
