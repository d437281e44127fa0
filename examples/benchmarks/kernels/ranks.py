"""Ranks for the benchmarks of collectives: a process and a GPU each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Work = Callable[[int, int, dist.Store], None]
"""What a rank does, given its number, the number of ranks, and a store in which they find each other."""


def run(work: Work) -> None:
    """Do the work on as many ranks as the command line says, by default one for each GPU."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    mp.spawn(_be_rank, args=(ranks, store.port, work), nprocs=ranks)


def _be_rank(rank: int, size: int, port: int, work: Work) -> None:
    torch.cuda.set_device(rank)
    work(rank, size, dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=30)))
    torch.cuda.synchronize()
    os._exit(0)  # NCCL warns of ranks that end before others
