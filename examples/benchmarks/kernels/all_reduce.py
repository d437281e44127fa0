"""Time all-reduces of float32 parts to bfloat16, by size, on a GPU for each rank.

    python -m examples.benchmarks.kernels.all_reduce [RANKS]

NCCL's all-reduce, alone and with the cast after it, and ``all_reduce``; microseconds of one call within a CUDA graph of 40.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4lite.kernels.peer_memory import all_reduce
from dsv4lite.layout import Layout
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.peer_memory import PeerMemory
from examples.benchmarks.kernels.ranks import run
from examples.benchmarks.kernels.timing import microseconds

KIB = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CALLS = 40


def main(rank: int, size: int, store: dist.Store) -> None:
    device = torch.device("cuda", rank)
    mesh = Mesh.from_store(store, Layout(tp=size), rank, device, timeout_s=30)
    memory = PeerMemory.open(dist.PrefixStore("bench", store), rank, size, device, numbers=max(KIB) * 256)
    if memory is None:
        sys.exit("ranks cannot open their memory to each other")
    inbox = memory.inbox
    few = torch.zeros(1, device=device)

    def barrier() -> Tensor:
        return mesh.tp.all_reduce(few)

    timed = partial(microseconds, copies=1, calls=CALLS, replays=9, before=barrier)
    barrier()
    if rank == 0:
        print(f"{size} GPUs\n{'KiB':>6}{'NCCL':>8}{'and cast':>10}{'few':>8}", flush=True)
    for kib in KIB:
        part = torch.randn(kib * 256, generator=torch.Generator().manual_seed(rank)).to(device)
        exact = mesh.tp.all_reduce(part.clone())
        torch.testing.assert_close(all_reduce(part, inbox, torch.float32), exact, rtol=1e-5, atol=1e-5)
        part.zero_()
        alone = timed(lambda _, part=part: mesh.tp.all_reduce(part))  # type: ignore[misc]
        cast = timed(lambda _, part=part: mesh.tp.all_reduce(part).to(torch.bfloat16))  # type: ignore[misc]
        ours = timed(lambda _, part=part: all_reduce(part, inbox, torch.bfloat16))  # type: ignore[misc]
        if rank == 0:
            print(f"{kib:>6}{alone:>8.2f}{cast:>10.2f}{ours:>8.2f}", flush=True)
    barrier()


if __name__ == "__main__":
    run(main)
