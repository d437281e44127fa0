"""Time the exchange of few tokens between ranks: ``python -m examples.benchmarks.kernels.exchange [ranks]``, a GPU each.

NCCL's all-gather of packed rows with the unpacking, and its reduce-scatter with the sums before it and the cast after it, beside
``all_gather`` and ``reduce_scatter``; V4-Flash's width, microseconds of one call within a CUDA graph of forty.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4lite.kernels.experts.decode_small import ExpertSum
from dsv4lite.kernels.peer_memory import TokenRows, all_gather, reduce_scatter
from dsv4lite.layout import Layout
from dsv4lite.models.partial_sums import all_gather_rows, reduce_scatter_experts
from dsv4lite.parallel.mesh import Axis, Mesh
from examples.benchmarks.kernels.ranks import run
from examples.benchmarks.kernels.timing import microseconds

HIDDEN, TOP_K = 4096, 6
TOKENS = (1, 2, 4, 8, 16, 32)  # of each rank


def main(rank: int, size: int, store: dist.Store) -> None:
    device = torch.device("cuda", rank)
    ep = Mesh.from_store(store, Layout(dp=size, ep=size), rank, device, timeout_s=30).ep
    memory, nccl = ep.memory, Axis("ep", rank, size, ep.group)
    if memory is None:
        sys.exit("ranks cannot open their memory to each other")
    inbox = memory.inbox
    few = torch.zeros(1, device=device)

    def barrier() -> Tensor:
        return nccl.all_reduce(few)

    timed = partial(microseconds, copies=1, calls=40, replays=9, before=barrier)
    barrier()
    if rank == 0:
        print(f"{size} GPUs\n{'tokens':>7}{'gather: NCCL':>14}{'few':>8}{'sums: NCCL':>14}{'few':>8}", flush=True)
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
        codes, scales = x.to(torch.float8_e4m3fn), torch.ones(tokens, HIDDEN // 128, dtype=torch.uint8, device=device)
        ids = torch.arange(tokens, device=device)
        rows = TokenRows(x, codes, scales, ids, ids.int())
        chosen = torch.randint(0, 256, (size * tokens, TOP_K), device=device)
        outputs = torch.randn(size * tokens, TOP_K, HIDDEN, device=device).bfloat16()
        parts = ExpertSum(chosen, outputs, torch.randn(size * tokens, HIDDEN, device=device).bfloat16(), 256 // size)
        for theirs, ours in zip(all_gather_rows(nccl, rows, tokens), all_gather(rows, inbox, tokens), strict=True):
            assert torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))
        sums = [reduce_scatter_experts(nccl, parts, tokens, x.dtype), reduce_scatter(parts, inbox, tokens, x.dtype)]
        torch.testing.assert_close(*sums, rtol=0 if size == 2 else 1e-2, atol=0 if size == 2 else 1e-2)
        times = [
            timed(lambda _, rows=rows, tokens=tokens: all_gather_rows(nccl, rows, tokens)),
            timed(lambda _, rows=rows, tokens=tokens: all_gather(rows, inbox, tokens)),
            timed(lambda _, parts=parts, tokens=tokens: reduce_scatter_experts(nccl, parts, tokens, torch.bfloat16)),
            timed(lambda _, parts=parts, tokens=tokens: reduce_scatter(parts, inbox, tokens, torch.bfloat16)),
        ]
        if rank == 0:
            print(f"{tokens:>7}{times[0]:>14.2f}{times[1]:>8.2f}{times[2]:>14.2f}{times[3]:>8.2f}", flush=True)
    barrier()


if __name__ == "__main__":
    run(main)
