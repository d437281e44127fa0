"""Engines on ranks that the host has started: each makes the same engine, and the first one leads."""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dsv4lite.errors import ConfigError, DSV4LiteError, EngineDeadError, EngineStateError
from dsv4lite.layout import Layout
from dsv4lite.llm import LLM
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.request import RequestOutput, SamplingParams
from tests.e2e.engines import MODEST
from tests.parallel.ranks import RankError, Ranks
from tests.parallel.requests import PROMPTS, all_kinds, assert_same, tight

Job = dict[str, Any]


def hosted(mesh: Mesh, job: Job, rank: int) -> Any:
    """Be a host: open the default group, make the engine, and use it on rank 0."""
    store = dist.PrefixStore(job["name"], dist.TCPStore("127.0.0.1", job["port"], None, is_master=False))
    dist.init_process_group("gloo", store=store, rank=mesh.rank, world_size=job["ranks"])
    try:
        settings = {**job["settings"], **job.get("on_rank", {}).get(rank, {})}
        if "dimensions" in job:
            names, sizes = zip(*job["dimensions"].items(), strict=True)
            settings["device_mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        else:
            settings["executor"] = "external"
        return job["run"](job["model"], settings, rank)
    finally:
        dist.destroy_process_group()


def on_ranks(mesh: Mesh, job: Job) -> Any:
    return hosted(mesh, job, mesh.rank)


def job_of(ranks: Ranks, model: Path, run: Any, settings: Job, number: int, **more: Any) -> Job:
    return {"name": uuid.uuid4().hex, "port": ranks.port, "ranks": number, "model": model, "run": run, "settings": settings, **more}


def generate(model: Path, settings: Job, rank: int) -> list[RequestOutput] | str:
    group = dist.group.WORLD
    with LLM(str(model), **settings) as llm:
        if rank == 0:
            return all_kinds(llm)
        with pytest.raises(EngineStateError, match="follows rank 0"):
            llm.generate("a")
    assert dist.group.WORLD is group and dist.is_initialized()  # the host's own
    return "followed"


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"expert_parallel_size": 4}, {"dimensions": {"dp": 2, "tp": 2}}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}),
        ({}, {"dimensions": {"ep": 4}}),
        ({"tensor_parallel_size": 4}, {}),
    ],
    ids=["dp-tp-ep", "tp-pp", "ep", "tp"],
)
def test_ranks_of_the_host_give_what_one_rank_gives(
    ranks: Ranks, model: Path, expected: list[RequestOutput], settings: Job, more: Job
) -> None:
    first, *others = ranks.run(
        on_ranks, job_of(ranks, model, generate, {**tight(model), **settings}, 4, **more), layout=Layout(dp=4)
    )
    assert_same(first, expected)
    assert others == ["followed"] * 3


def refused(model: Path, settings: Job, rank: int) -> tuple[str, str]:
    try:
        with LLM(str(model), **settings):
            return "nothing", ""
    except DSV4LiteError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("settings", "more", "kind", "told"),
    [
        ({"tensor_parallel_size": 2}, {"on_rank": {1: {"max_num_seqs": 9}}}, "ConfigError", "max_num_seqs is 9 on rank 1"),
        ({"tensor_parallel_size": 2}, {"on_rank": {1: {"device": "cuda:99"}}}, "DSV4LiteError", "cuda:99"),
        ({"tensor_parallel_size": 4}, {}, "ConfigError", "needs 4 ranks, and the process group has 2"),
        ({"tensor_parallel_size": 4}, {"dimensions": {"tp": 2}}, "ConfigError", "tensor_parallel_size=4, but the dimension tp"),
        ({}, {"dimensions": {"rows": 2}}, "ConfigError", "name them tp, dp and pp"),
    ],
    ids=["settings", "device", "size", "mesh", "names"],
)
def test_what_is_wrong_is_raised_on_every_rank(ranks: Ranks, model: Path, settings: Job, more: Job, kind: str, told: str) -> None:
    job = job_of(ranks, model, refused, {**MODEST, **settings}, 2, **more)
    for found, message in ranks.run(on_ranks, job, layout=Layout(dp=2)):
        assert told in message and (found == kind or kind == "DSV4LiteError")


def die_later(model: Path, settings: Job, rank: int) -> None:
    """Rank 1 dies while rank 0 generates; what rank 0 gets comes back as its failure, for the test has lost a rank, too."""
    with LLM(str(model), **settings) as llm:
        if rank == 1:
            threading.Timer(0.5, os._exit, (1,)).start()
        else:
            llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=None, ignore_eos=True))


def test_host_that_loses_a_rank_is_told_which(ranks: Ranks, model: Path) -> None:
    job = job_of(ranks, model, die_later, {**MODEST, "tensor_parallel_size": 2, "max_model_len": 100_000}, 2)
    with pytest.raises(RankError) as caught:
        ranks.run(on_ranks, job, layout=Layout(dp=2))
    assert "EngineDeadError: rank 1 (process " in str(caught.value) and "rank 1 died" in str(caught.value)


def leave(model: Path, settings: Job, rank: int) -> str:
    """The leader dies, and the other rank's engine ends with an error of its own."""
    with LLM(str(model), **settings) as llm:
        if rank == 0:
            os._exit(1)
        engine = llm._session.engine("test")
        engine._thread.join(30)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="the leader is gone"):
            llm.generate("a")
    raise AssertionError("as it should be")


def test_rank_that_loses_its_leader_is_told_so(ranks: Ranks, model: Path) -> None:
    job = job_of(ranks, model, leave, {**MODEST, "pipeline_parallel_size": 2}, 2)
    with pytest.raises(RankError, match="as it should be"):
        ranks.run(on_ranks, job, layout=Layout(dp=2))


def test_external_ranks_without_a_group_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="init_process_group"), LLM(str(model), **MODEST, executor="external"):
        raise AssertionError
