"""An engine whose ranks exchange everything through peer memory: here memory that processes share, and interpreted kernels."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsv4lite.config import MTP, tiny_model
from dsv4lite.kernels.peer_memory import EMPTY
from dsv4lite.layout import Layout
from dsv4lite.llm import LLM
from dsv4lite.models import partial_sums
from dsv4lite.parallel.mesh import Axis, Mesh
from dsv4lite.parallel.peer_memory import PeerMemory, opened_bytes
from dsv4lite.request import RequestOutput, SamplingParams
from tests.e2e.engines import same_outputs
from tests.parallel.ranks import fork_server

pytestmark = pytest.mark.usefixtures("forked_ranks")

NUMBERS = 1 << 12  # of the small all-reduce: larger ones go by shards
PROMPTS = ("def add(a, b):\n    return", "import os", "class A:\n    def __init__(self", "x")
TIMEOUT_S = 180.0


def generate(settings: dict[str, Any]) -> list[RequestOutput]:
    with LLM(tiny_model(), **settings) as llm:
        params = [SamplingParams(max_tokens=6, temperature=0.7 * (i % 2), seed=i, logprobs=2) for i in range(len(PROMPTS))]
        return llm.generate_batch(list(PROMPTS), params)


def be_a_rank(rank: int, port: int, folder: Path, settings: dict[str, Any], answers: Any) -> None:
    """Make the engine with peer memory for the axes that would have it on GPUs; no rows or tokens may take another way."""
    torch.set_num_threads(1)
    os.environ["TRITON_INTERPRET"] = "1"  # it counts when Triton is imported
    make, held = Mesh.from_store, list[torch.Tensor]()

    def from_store(store: Any, layout: Layout, rank: int, device: torch.device, **options: Any) -> Mesh:
        mesh = make(store, layout, rank, device, **options)
        near = layout.group(layout.exchanging, rank)
        words = opened_bytes(len(near)) // 4
        held.extend(torch.from_file(str(folder / str(one)), shared=True, size=words, dtype=torch.int32) for one in near)
        own = near.index(rank)
        held[own].fill_(EMPTY)
        mesh.peers.all_reduce(torch.zeros(1))  # all ranks have filled theirs
        abandoned = torch.zeros(1, dtype=torch.int32)
        memory = PeerMemory.of([buffer.data_ptr() for buffer in held], own, NUMBERS, abandoned, device)
        return Mesh.of(layout, rank, {near: mesh.peers.group}, memory)

    def refused(*args: Any) -> None:
        raise AssertionError("a collective went through the process group")

    try:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mesh, "from_store", staticmethod(from_store))
            patch.setattr(partial_sums, "LEAST_SHARDED", 17)  # prompts divide the residual streams
            for name in ("all_gather", "broadcast", "begin_broadcast", "begin_all_gather"):
                patch.setattr(Axis, name, refused)
            if rank == 0:
                torch.save(generate({**settings, "executor": "external"}), folder / "outputs")
            else:
                with LLM(tiny_model(), **settings, executor="external"):
                    pass
        dist.destroy_process_group()
        answers.put("")
    except BaseException:
        answers.put(traceback.format_exc())


@pytest.mark.parametrize(("axis", "drafts"), [("tensor", 0), ("tensor", 1), ("expert", 1)])
def test_ranks_give_the_same_bits_through_peer_memory(tmp_path: Path, axis: str, drafts: int) -> None:
    """Sums, logits, drafts and sampled tokens."""
    pytest.importorskip("triton")
    settings: dict[str, Any] = {f"{axis}_parallel_size": 2, "deterministic": True, "max_num_seqs": 4, "max_model_len": 64}
    settings["speculative"] = MTP(drafts, adaptive=False) if drafts else None
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    context = fork_server()
    answers = context.Queue()
    ranks = [context.Process(target=be_a_rank, args=(r, store.port, tmp_path, settings, answers), daemon=True) for r in range(2)]
    for rank in ranks:
        rank.start()
    try:
        expected = generate(settings)
        assert [answers.get(timeout=TIMEOUT_S) for _ in ranks] == ["", ""]
        same_outputs(torch.load(tmp_path / "outputs", weights_only=False), expected)
    finally:
        for rank in ranks:
            rank.join(30)
            rank.kill()
