"""Rows and sums of few tokens through memory that ranks open to each other, on two GPUs or more."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsv4lite.kernels.experts import ExpertSum
from dsv4lite.kernels.peer_memory import TokenRows, all_gather, all_gather_ref, reduce_scatter, reduce_scatter_ref
from tests.parallel.test_gpu_all_reduce import on_gpus, opened

pytestmark = pytest.mark.gpu
HIDDEN, TOP_K, EXPERTS = 4096, 6, 128
TOKENS = ((1, 1), (4, 4), (3, 4), (32, 32), (1, 8), (2, 2))
"""Of each rank, if it is of an odd or an even number, and the most of any."""


def rows_of(tokens: int, seed: int) -> TokenRows:
    rng = torch.Generator().manual_seed(seed)
    sizes = ((tokens, 2 * HIDDEN), (tokens, HIDDEN), (tokens, HIDDEN // 128))
    x, codes, scales = (torch.randint(0, 256, size, generator=rng, dtype=torch.uint8) for size in sizes)
    ids = torch.randint(0, 1 << 17, (tokens,), generator=rng)
    return TokenRows(x.view(torch.bfloat16), codes.view(torch.float8_e4m3fn), scales, ids, torch.arange(tokens, dtype=torch.int32))


def parts_of(ranks: int, count: int, seed: int) -> list[ExpertSum]:
    rng, found = torch.Generator().manual_seed(seed), []
    for _ in range(ranks):
        chosen = torch.randint(0, 2 * EXPERTS, (ranks * count, TOP_K), generator=rng)
        outputs = torch.randn(ranks * count, TOP_K, HIDDEN, generator=rng).bfloat16()
        outputs[chosen >= EXPERTS] = torch.nan
        found.append(ExpertSum(chosen, outputs, torch.randn(ranks * count, HIDDEN, generator=rng).bfloat16(), EXPERTS))
    return found


def on_device(rows: Any) -> Any:
    return type(rows)(*(x.cuda() if isinstance(x, Tensor) else x for x in rows))


def same(a: TokenRows, b: TokenRows) -> bool:
    return all(torch.equal(x.cpu().view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def right(found: Tensor, parts: list[ExpertSum], rank: int) -> bool:
    expected = reduce_scatter_ref(parts, rank, len(found), torch.bfloat16)
    if len(parts) == 2:
        return torch.equal(found.cpu(), expected)
    return torch.allclose(found.cpu().float(), expected.float(), rtol=1e-2, atol=1e-2)


def exchanges(rank: int, size: int, store: dist.TCPStore, answers: Any) -> None:
    """Gather and scatter by launches, then by replays of a graph of several sizes, with new numbers in every replay."""
    memory, inbox = opened(rank, size, store)
    wrong: list[Any] = []
    cases = [([(each, most)[r % 2] for r in range(size)], most, seed) for seed, (each, most) in enumerate(TOKENS)]
    given = [([rows_of(n, 8 * seed + r) for r, n in enumerate(own)], parts_of(size, most, seed)) for own, most, seed in cases]
    for _ in range(3):
        for (own, most, _), (rows, parts) in zip(cases, given, strict=True):
            if not same(all_gather(on_device(rows[rank]), inbox, most), all_gather_ref(rows, most)):
                wrong.append(("gather", own, most))
            if not right(reduce_scatter(on_device(parts[rank]), inbox, own[rank], torch.bfloat16), parts, rank):
                wrong.append(("scatter", own, most))
    inputs = [(on_device(rows[rank]), on_device(parts[rank])) for rows, parts in given]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = [
                (all_gather(rows, inbox, most), reduce_scatter(parts, inbox, own[rank], torch.bfloat16))
                for (rows, parts), (own, most, _) in zip(inputs, cases, strict=True)
            ]
        for replay in range(100):
            for (rows, parts), (hosts, sums) in zip(inputs, given, strict=True):
                rows.token_ids_T.copy_(hosts[rank].token_ids_T + replay)
                if replay % 25 == 0:
                    parts.outputs_TKD.copy_(sums[rank].outputs_TKD * (1 + replay // 25))
            graph.replay()
            if replay % 25 in (0, 13):
                stream.synchronize()
                for (found, sums), (hosts, parts), (_, most, _) in zip(outputs, given, cases, strict=True):
                    moved = [rows._replace(token_ids_T=rows.token_ids_T + replay) for rows in hosts]
                    scaled = [each._replace(outputs_TKD=each.outputs_TKD * (1 + replay // 25)) for each in parts]
                    if not same(found, all_gather_ref(moved, most)) or not right(sums, scaled, rank):
                        wrong.append(("replay", replay, most))
        stream.synchronize()
    answers.put((rank, wrong, []))
    if rank == 0:  # one more, for which the others never come
        all_gather(inputs[0][0], inbox, 1)
        ended = torch.cuda.Event()
        ended.record()
        time.sleep(0.5)
        waits = not ended.query()
        memory.abandon()
        torch.cuda.synchronize()
        answers.put((-1, [] if waits else ["it has not waited"], []))


@pytest.mark.parametrize("size", [2, 4])
def test_rows_and_sums_are_right_in_launches_and_replays_and_end_when_they_are_abandoned(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    found = {rank: wrong for rank, wrong, _ in on_gpus(exchanges, size, size + 1)}
    assert found == {rank: [] for rank in range(-1, size)}
