"""Rendezvous of ranks that the host has started: finds the rank of this process, and connects the other ranks to the leader.

The host's process groups are used only here. Plans and results go over sockets to and from the leader. Collectives use the engine's
own groups, which can be aborted when a rank is lost without harm to the groups of the host.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from dsv4lite.config import EngineConfig
from dsv4lite.errors import ConfigError, DSV4LiteError, EngineDeadError, shown
from dsv4lite.layout import AXES
from dsv4lite.parallel.channel import Channel, Closed, portable
from dsv4lite.parallel.mesh import LOOPBACK

log = logging.getLogger("dsv4lite.parallel")

_TOKEN_BYTES = 32
_HELLO_S = 5.0  # within which a new connection must send its token and rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendezvous:
    """This rank among those that the host has started, and the exchange of facts between them.

    Attributes:
        config: Settings, with the sizes of the device mesh.
        rank: Number of this rank in the layout.
        groups: Process groups of the host; gathering over each in turn reaches every rank.
        problem: Error of the groups or the settings, which ``agree`` raises on all ranks.
    """

    config: EngineConfig
    rank: int
    groups: tuple[Any, ...]
    problem: DSV4LiteError | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> Rendezvous:
        """Find the rank of this process.

        Raises:
            ConfigError: There are no process groups, or the setting is not one, so that other ranks cannot get the error.
        """
        if config.device_mesh is not None:
            from torch.distributed.device_mesh import DeviceMesh  # slow to import

            if not isinstance(config.device_mesh, DeviceMesh):
                raise ConfigError(f"device_mesh={shown(config.device_mesh)} must be a torch.distributed.device_mesh.DeviceMesh")
            groups = tuple(config.device_mesh.get_all_groups())
            try:
                config, rank = _read_mesh(config, config.device_mesh)
            except DSV4LiteError as error:  # a unique negative number, since the layout has no place for this rank
                return cls(config=config, rank=-1 - dist.get_rank(), groups=groups, problem=error)
            return cls(config=config, rank=rank, groups=groups)
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "executor='external' needs the host's ranks: call torch.distributed.init_process_group (torchrun starts them), "
                "or give device_mesh or process_group"
            )
        group = config.process_group or dist.group.WORLD
        try:
            rank, size = dist.get_rank(group), dist.get_world_size(group)
        except ValueError as error:  # not a group, or a destroyed one
            raise ConfigError(f"process_group={shown(config.process_group)} must be a ProcessGroup: {error}") from error
        if rank < 0:
            raise ConfigError("this process is not in process_group; only its members can create the engine")
        problem: DSV4LiteError | None = None
        if size != config.layout.world:
            problem = ConfigError(f"{config.layout} needs {config.layout.world} ranks, and the process group has {size}")
        config = replace(config, executor="external", device_mesh=None, process_group=None)
        return cls(config=config, rank=rank, groups=(group,), problem=problem)

    def exchange(self, mine: object) -> dict[int, Any]:
        """Return the values ``mine`` of all ranks, by rank; a collective call.

        Raises:
            EngineDeadError: A rank did not call this before the timeout of a group.
        """
        known = {self.rank: mine}
        for group in self.groups:
            gathered: list[Any] = [None] * dist.get_world_size(group)
            try:
                dist.all_gather_object(gathered, known, group=group)
            except RuntimeError as error:
                raise EngineDeadError(f"not all ranks of the host have created the engine: {error}", phase="start") from error
            for part in gathered:
                known |= part
        return known

    def agree(self, versions: Mapping[str, str], error: DSV4LiteError | None, device: str = "") -> dict[int, str]:
        """Raise the error of any rank on all ranks; a collective call.

        Args:
            versions: Versions of this rank's software. They are compared first: other versions may fail to unpickle errors.
            error: Error of this rank: its ``problem``, or another one.
            device: Name of its device, unique on its machine; empty if ranks may share it.

        Returns:
            Names of the machines, by rank.

        Raises:
            DSV4LiteError: The error of a rank, raised on every rank.
        """
        if problems := differences(self.exchange(dict(versions))):
            raise ConfigError("the ranks of an engine must run the same software: " + "; ".join(problems))
        found = self.exchange((socket.gethostname(), device, None if error is None else portable(error)))
        for rank, (_, _, problem) in sorted(found.items()):
            if problem is not None:
                raise error if rank == self.rank and error is not None else problem
        owners: dict[tuple[str, str], int] = {}
        for rank, (machine, used, _) in sorted(found.items()):
            if used and owners.setdefault((machine, used), rank) != rank:
                raise ConfigError(
                    f"ranks {owners[machine, used]} and {rank} have the same device, {used} on {machine}: every rank needs a GPU "
                    "of its own, by LOCAL_RANK or the setting device='cuda:N'; use fewer ranks if there are not enough"
                )
        return {rank: name for rank, (name, _, _) in found.items()}


def differences(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a message for each fact in which a rank differs from the first rank."""
    first = 0 if 0 in facts else min(facts)  # a rank without a place in the layout has a negative number
    return [
        f"{name} is {found.get(name)} on rank {rank} and {facts[first].get(name)} on rank {first}"
        for rank, found in sorted(facts.items())
        for name in dict.fromkeys((*facts[first], *found))
        if found.get(name) != facts[first].get(name)
    ]


def _read_mesh(config: EngineConfig, mesh: Any) -> tuple[EngineConfig, int]:
    """Return settings with the sizes of a device mesh, and the number of this rank in the layout.

    Raises:
        ConfigError: Its dimensions are not axes, or their sizes differ from the settings.
    """
    names = mesh.mesh_dim_names or ()
    if not names or set(names) - set(AXES) or {"ep"} < set(names) - {"pp"}:
        raise ConfigError(
            f"device_mesh has the dimensions {names}; name them tp, dp and pp, or ep and pp. ep over ranks of tp and dp is a "
            "setting, expert_parallel_size"
        )
    sizes = {}
    for dimension, name in enumerate(names):
        setting, size = AXES[name], mesh.size(dimension)
        if getattr(config, setting) not in (1, size):
            raise ConfigError(f"{setting}={getattr(config, setting)}, but the dimension {name} of device_mesh has {size} ranks")
        sizes[setting] = size
    config = replace(config, executor="external", device_mesh=None, process_group=None, **sizes)
    layout, at = config.layout, {name: mesh.get_local_rank(name) for name in names}
    if layout.world != mesh.size():
        raise ConfigError(f"{layout} needs {layout.world} ranks, and device_mesh has {mesh.size()}")
    rank = at.get("pp", 0) * layout.stage + at.get("dp", 0) * layout.tp + at.get("tp", 0) + at.get("ep", 0)
    return config, rank


class ExternalRank:
    """The leader's connections to another rank of the host; the same methods as ``RankProcess``."""

    def __init__(self, machine: str, pid: int, work: Channel, life: Channel) -> None:
        self.where = f"process {pid} on {machine}"
        self.work, self.life = work, life

    def fate(self) -> str:
        """Return why the connection may have ended, for a message."""
        return "has ended, or its machine cannot be reached"

    def kill(self, error: DSV4LiteError) -> None:
        """Send the rank the error that ended the engine; its process belongs to the host and continues."""
        try:
            self.life.send(error)
        except Closed:
            return  # it is gone
        finally:
            self.work.shut_down()

    def end(self, *, kill: bool) -> None:
        """Close the connections; messages that were sent still arrive. Without ``kill``, tell the rank that this is intended."""
        if not kill:
            with suppress(Closed):
                self.life.send(None)
        self.work.close()
        self.life.close()


def _listening_place(machines: Mapping[int, str]) -> tuple[str, str]:
    """Return the name under which ranks reach this machine (of rank 0), and the address to listen at; empty means all.

    With several machines it is the address from which this machine reaches the others, if it is the same for all of them.
    """
    others, found = {name for name in machines.values() if name != machines[0]}, set()
    if not others:
        return LOOPBACK, LOOPBACK
    for other in others:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((other, 9))  # sends nothing: it looks up the route
            found.add(probe.getsockname()[0])
    address = found.pop() if len(found) == 1 else ""
    if not address or address.startswith("127."):
        log.warning("ranks listen at all addresses of this machine: it reaches %s from no address, or from several", sorted(others))
        return socket.gethostname(), ""
    return address, address


def lead(ranks: Rendezvous, machines: Mapping[int, str], timeout_s: float) -> tuple[tuple[str, str], dict[int, ExternalRank]]:
    """Accept the connections of the other ranks; called by rank 0.

    Args:
        machines: Name of each rank's machine.
        timeout_s: Seconds until all ranks must have connected.

    Returns:
        The name under which ranks reach this machine with the address to listen at (empty for all), and the other ranks.

    Raises:
        EngineDeadError: Not all ranks connected in time.
    """
    (name, bind), token, others = _listening_place(machines), secrets.token_bytes(_TOKEN_BYTES), len(machines) - 1
    pending: dict[int, dict[int, socket.socket]] = {}
    pids: dict[int, int] = {}
    with socket.create_server((bind, 0)) as server:
        ranks.exchange((name, server.getsockname()[1], token))
        until = time.monotonic() + timeout_s
        while sum(map(len, pending.values())) < 2 * others:
            server.settimeout(max(0.01, until - time.monotonic()))
            try:
                end, _ = server.accept()
            except TimeoutError as error:
                missing = sorted(set(machines) - {0} - set(pending))
                raise EngineDeadError(f"ranks {missing} did not connect within {timeout_s:g} s", phase="start") from error
            try:
                end.settimeout(_HELLO_S)
                hello = end.recv(_TOKEN_BYTES + 12, socket.MSG_WAITALL)
            except OSError:  # not a rank: it sent nothing, or has closed the connection
                end.close()
                continue
            if not hmac.compare_digest(hello[:_TOKEN_BYTES], token):
                end.close()  # not a rank
                continue
            rank, kind, pid = (int.from_bytes(hello[_TOKEN_BYTES + i : _TOKEN_BYTES + i + 4], "little") for i in (0, 4, 8))
            pending.setdefault(rank, {})[kind], pids[rank] = end, pid
    channels = {rank: [_channel(ends[kind]) for kind in (0, 1)] for rank, ends in pending.items()}
    return (name, bind), {rank: ExternalRank(machines[rank], pids[rank], *pair) for rank, pair in channels.items()}


def join(ranks: Rendezvous, timeout_s: float) -> tuple[Channel, Channel]:
    """Connect to rank 0; return the connections for work and for signs of life.

    Raises:
        EngineDeadError: Rank 0 cannot be reached.
    """
    name, port, token = ranks.exchange(None)[0]
    ends = []
    for kind in (0, 1):
        try:
            end = socket.create_connection((name, port), timeout_s)
        except OSError as error:
            raise EngineDeadError(f"the leader cannot be reached at {name}, port {port}: {error}", phase="start") from error
        end.sendall(token + b"".join(number.to_bytes(4, "little") for number in (ranks.rank, kind, os.getpid())))
        ends.append(_channel(end))
    return ends[0], ends[1]


def _channel(end: socket.socket) -> Channel:
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(Connection(end.detach()))
