"""Engines on ranks that the host has started: each makes the same engine, and the first one leads."""

from __future__ import annotations

import os
import resource
import socket
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dsv4lite.config import EngineConfig
from dsv4lite.engine import rank as rank_module
from dsv4lite.errors import ConfigError, DSV4LiteError, EngineDeadError, EngineStateError
from dsv4lite.layout import Layout
from dsv4lite.llm import LLM
from dsv4lite.parallel import rendezvous
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.rendezvous import Rendezvous, join, lead
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.weights.source import ModelSource
from tests.e2e.engines import MODEST, overlapping, same_outputs, thread_of, write_model
from tests.parallel.ranks import RankError, Ranks
from tests.parallel.requests import PROMPTS, SHARED, TOLERANCE, all_kinds, tight

Job = dict[str, Any]


def hosted(mesh: Mesh, job: Job) -> Any:
    """Be a host: open the default group, make the engine, and use it on rank 0."""
    store = dist.PrefixStore(job["name"], dist.TCPStore("127.0.0.1", job["port"], None, is_master=False))
    dist.init_process_group("gloo", store=store, rank=mesh.rank, world_size=job["ranks"])
    try:
        settings = {**job["settings"], **job.get("on_rank", {}).get(mesh.rank, {})}
        if "dimensions" in job:
            names, sizes = zip(*job["dimensions"].items(), strict=True)
            settings["device_mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        else:
            settings["executor"] = "external"
        return job["run"](job["model"], settings, mesh.rank)
    finally:
        dist.destroy_process_group()


def on_host(ranks: Ranks, model: Path | str, run: Any, settings: Job, number: int, **more: Any) -> list[Any]:
    """Call ``run(model, settings, rank)`` on every rank of a host of so many processes; return the results in order of ranks."""
    job = {"name": uuid.uuid4().hex, "port": ranks.port, "ranks": number, "model": model, "run": run, "settings": settings, **more}
    return ranks.run(hosted, job, layout=Layout(dp=number))


def generate(model: Path, settings: Job, rank: int) -> list[RequestOutput] | str:
    group = dist.group.WORLD
    with overlapping("device_mesh" in settings), LLM(str(model), **settings) as llm:
        if rank == 0:
            return all_kinds(llm)
        with pytest.raises(EngineStateError, match="engine of rank 0"):
            llm.generate("a")
        thread_of(llm).join(120)
        with pytest.raises(EngineStateError, match="rank 0 has closed its engine; open a new one"):
            llm.generate("a")
    assert dist.group.WORLD is group and dist.is_initialized()  # the host's own
    return "followed"


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"expert_parallel_size": 4}, {"dimensions": {"dp": 2, "tp": 2}}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}),
        ({}, {"dimensions": {"ep": 4}}),
        ({"redundant_experts": 4}, {"dimensions": {"ep": 4}}),
    ],
    ids=["dp-tp-ep", "tp-pp", "ep", "copies"],
)
def test_ranks_of_the_host_give_what_one_rank_gives(
    ranks: Ranks, model: Path, expected: list[RequestOutput], settings: Job, more: Job
) -> None:
    first, *others = on_host(ranks, model, generate, {**tight(model), **settings}, 4, **more)
    same_outputs(first, expected, tolerance=TOLERANCE)
    assert others == ["followed"] * 3


def refused(model: Path, settings: Job, rank: int) -> tuple[str, str]:
    try:
        with LLM(**{"model": str(model), **settings}):
            return "nothing", ""
    except DSV4LiteError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("settings", "more", "kind", "error"),
    [
        ({"tensor_parallel_size": 2}, {"on_rank": {1: {"max_num_seqs": 9}}}, "ConfigError", "max_num_seqs is 9 on rank 1"),
        ({"tensor_parallel_size": 2}, {"on_rank": {1: {"device": "cuda:99"}}}, "DSV4LiteError", "cuda:99"),
        ({"tensor_parallel_size": 4}, {}, "ConfigError", "needs 4 ranks, and the process group has 2"),
        (
            {"tensor_parallel_size": 2},
            {"on_rank": {1: {"tensor_parallel_size": 4}}},
            "ConfigError",
            "needs 4 ranks, and the process",
        ),
        (
            {"expert_parallel_size": 2, "redundant_experts": 1},
            {},
            "ConfigError",
            "redundant_experts=1 must be a multiple of expert_parallel_size=2",
        ),
        ({"tensor_parallel_size": 2}, {"on_rank": {1: {"model": "/nowhere"}}}, "CheckpointError", "'/nowhere' is not a folder"),
        ({"tensor_parallel_size": 2}, {"on_rank": {0: {"model": "/nowhere"}}}, "CheckpointError", "'/nowhere' is not a folder"),
        ({"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1}, {}, "CapacityError", "kv_cache_memory_bytes"),
        ({"tensor_parallel_size": 4}, {"dimensions": {"tp": 2}}, "ConfigError", "tensor_parallel_size=4, but the dimension tp"),
        ({}, {"dimensions": {"tp": 2}, "on_rank": {0: {"tensor_parallel_size": 4}}}, "ConfigError", "but the dimension tp"),
        ({}, {"dimensions": {"rows": 2}}, "ConfigError", "name them tp, dp and pp"),
    ],
    ids="settings device size size-of-one slots checkpoint leaders-checkpoint memory mesh mesh-of-one names".split(),
)
def test_what_is_wrong_is_raised_on_every_rank(ranks: Ranks, model: Path, settings: Job, more: Job, kind: str, error: str) -> None:
    for found, text in on_host(ranks, model, refused, {**MODEST, **settings}, 2, **more):
        assert error in text and (found == kind or kind == "DSV4LiteError")


def lack_files(model: Path, settings: Job, rank: int) -> tuple[str, str]:
    """Rank 0 may hardly open a file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 10, limits[1]))
    try:
        return refused(model, settings, rank)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_limit_of_open_files_is_checked_on_every_rank(ranks: Ranks, model: Path) -> None:
    """The store of rank 0 had no file left to answer with."""
    for found, text in on_host(ranks, model, lack_files, {**MODEST, "tensor_parallel_size": 2, "start_timeout_s": 20}, 2):
        assert found == "CapacityError" and "must be able to open 24 files" in text


def come_late(model: Path, settings: Job, rank: int) -> tuple[str, str]:
    """Rank 1 has not looked at its checkpoint yet when rank 0 has failed, and is gone."""
    gone = dist.TCPStore("127.0.0.1", settings.pop("port"), None, is_master=False)
    name = settings.pop("name")
    if rank == 0:
        found = refused(model, {**settings, "model": "/nowhere"}, rank)
        gone.set(name, "")
        return found

    def opened(config: EngineConfig) -> ModelSource:
        gone.wait([name])
        return ModelSource.open(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_module, "ModelSource", SimpleNamespace(open=opened))
        return refused(model, settings, rank)


def test_late_rank_still_gets_the_error(ranks: Ranks, model: Path) -> None:
    settings = {**MODEST, "tensor_parallel_size": 2, "port": ranks.port, "name": uuid.uuid4().hex}
    for found, message in on_host(ranks, model, come_late, settings, 2):
        assert found == "CheckpointError" and "'/nowhere' is not a folder" in message


def test_ranks_with_different_weights_are_refused_on_every_rank(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    other = str(write_model(tmp_path, SHARED, seed=1))
    for found, message in on_host(ranks, model, refused, {**MODEST, "tensor_parallel_size": 2}, 2, on_rank={1: {"model": other}}):
        assert found == "ConfigError" and "and checkpoints: the checkpoint is " in message


def other_version(model: Path, settings: Job, rank: int) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(rank_module, "installed_version", lambda package: "9.9")
        return refused(model, settings, rank)


def test_versions_are_compared_before_anything_else(ranks: Ranks, model: Path) -> None:
    """Other errors of a rank would be pickled by its own version."""
    settings = {**MODEST, "tensor_parallel_size": 2}
    for found, message in on_host(ranks, model, other_version, settings, 2, on_rank={1: {"model": "/nowhere", "device": "cuda"}}):
        assert found == "ConfigError" and "the same software: dsv4lite is 9.9 on rank 1 and " in message


def share_devices(model: Path, settings: Job, rank: int) -> tuple[str, list[str]]:
    """Say that both ranks have one GPU, then that each has its own."""
    host = Rendezvous.of(EngineConfig(model=str(model), **settings))
    with pytest.raises(ConfigError) as caught:
        host.agree({}, None, "GPU 7")
    return str(caught.value), [name for _, name in sorted(host.agree({}, None, f"GPU {rank}").items())]


def test_ranks_on_one_gpu_are_refused_on_every_rank(ranks: Ranks, model: Path) -> None:
    for message, machines in on_host(ranks, model, share_devices, {**MODEST, "tensor_parallel_size": 2}, 2):
        assert "ranks 0 and 1 have the same device, GPU 7 on " in message
        assert machines == [socket.gethostname()] * 2


def own_address() -> str | None:
    """Return an address at which other machines would reach this one, if it has any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def is_open(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port)).close()
    except ConnectionRefusedError:
        return False
    return True


def hexadecimal(address: str) -> str:
    """Return an address as Linux lists it."""
    return socket.inet_aton(address)[::-1].hex().upper()


def listening() -> dict[tuple[str, int], str]:
    """Return the addresses and ports to which programs of this machine listen, with the inodes of their sockets."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    places = [(row[1].partition(":"), row[9]) for row in rows if row[3] == "0A"]
    return {(address, int(port, 16)): inode for (address, _, port), inode in places}


def owners(inode: str) -> set[str]:
    """Return the processes that have a socket open."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(file) == f"socket:[{inode}]":
                found.add(file.parts[2])
    return found


class Crowd(Rendezvous):
    """A rank whose machine has others that connect to the leader's port first: one is silent, one leaves, one lies."""

    def exchange(self, mine: object) -> dict[int, Any]:
        known = super().exchange(mine)
        name, port, token = known[0]
        if name != "127.0.0.1" and is_open("127.0.0.1", port):  # another program may have the port at this address
            here, leader = hexadecimal("127.0.0.1"), hexadecimal(name)
            inodes = {address: inode for (address, number), inode in listening().items() if number == port}
            assert leader in inodes and set(inodes) <= {here, leader}
            new = here in inodes and inodes[here] not in earlier
            assert not new or not owners(inodes[here]) & owners(inodes[leader])
        ends = [socket.create_connection((name, port)) for _ in range(3)]
        strangers.extend(ends[:1])
        ends[1].close()
        ends[2].sendall(bytes(len(token) + 12))
        return known


strangers: list[socket.socket] = []
earlier: set[str] = set()  # sockets that listened before the leader's: Gloo listens in the same process and may have the same port


def among_strangers(model: Path, settings: Job, rank: int) -> tuple[str, str] | str:
    machine = settings.pop("machine")
    host = Rendezvous.of(EngineConfig(model=str(model), **settings))
    earlier.update(listening().values())
    host.exchange(None)  # from here on the leader may listen
    if rank == 1:
        ends = join(Crowd(config=host.config, rank=1, groups=host.groups), 20.0)
        ends[0].send("ready")
        message = ends[1].receive(20.0)
        strangers.pop().close()
        return str(message)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_HELLO_S", 0.2)
        place, found = lead(host, {0: "here", 1: machine}, 20.0)
    assert list(found) == [1] and found[1].work.receive(20.0) == "ready"
    found[1].life.send("alive")
    return place


@pytest.mark.parametrize("several", [False, True], ids=["one machine", "two machines"])
def test_leader_listens_where_ranks_reach_it_and_strangers_at_the_port_keep_no_rank_away(
    ranks: Ranks, model: Path, several: bool
) -> None:
    """With several machines it listened at all addresses."""
    address = own_address() if several else "127.0.0.1"
    if several and address in (None, "127.0.0.1"):
        pytest.skip("this machine has loopback only")
    settings = {**MODEST, "tensor_parallel_size": 2, "machine": address if several else "here"}
    assert on_host(ranks, model, among_strangers, settings, 2) == [(address, address), "alive"]


def die_later(model: Path, settings: Job, rank: int) -> None:
    """Rank 1 dies while rank 0 generates, and the test gets the error of rank 0 as its failure."""
    with LLM(str(model), **settings) as llm:
        if rank == 1:
            threading.Timer(0.5, os._exit, (1,)).start()
        else:
            llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=None, ignore_eos=True))


def test_host_that_loses_a_rank_gets_its_number(ranks: Ranks, model: Path) -> None:
    with pytest.raises(RankError) as caught:
        on_host(ranks, model, die_later, {**MODEST, "tensor_parallel_size": 2, "max_model_len": 100_000}, 2)
    assert "EngineDeadError: rank 1 (process " in str(caught.value) and "rank 1 died" in str(caught.value)


def leave(model: Path, settings: Job, rank: int) -> str:
    """The leader dies, and the other rank's engine ends with an error of its own."""
    with LLM(str(model), **settings) as llm:
        if rank == 0:
            os._exit(1)
        thread_of(llm).join(30)
        with pytest.raises(EngineDeadError, match="the leader is gone"):
            llm.generate("a")
    raise AssertionError("as it should be")


def test_rank_that_loses_its_leader_raises(ranks: Ranks, model: Path) -> None:
    with pytest.raises(RankError, match="as it should be"):
        on_host(ranks, model, leave, {**MODEST, "pipeline_parallel_size": 2}, 2)


def name_no_groups(model: Path, settings: Job, rank: int) -> list[tuple[str, str]]:
    settings.pop("executor")
    return [refused(model, {**settings, name: 5}, rank) for name in ("device_mesh", "process_group")]


def test_what_is_no_group_is_refused(ranks: Ranks, model: Path) -> None:
    """It was ``EngineDeadError`` with an ``AttributeError`` or a ``ValueError`` of torch."""
    for mesh, group in on_host(ranks, model, name_no_groups, dict(MODEST), 2):
        assert mesh == ("ConfigError", "device_mesh=5 must be a torch.distributed.device_mesh.DeviceMesh")
        assert group[0] == "ConfigError" and group[1].startswith("process_group=5 must be a ProcessGroup")


def test_external_ranks_without_a_group_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="init_process_group"), LLM(str(model), **MODEST, executor="external"):
        raise AssertionError
