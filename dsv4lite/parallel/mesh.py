"""Named axes of ranks, with their collectives as methods.

The collectives of an axis of size 1 do nothing and need no torch.distributed. A larger axis holds a process group, the host's or
one that ``Mesh.from_store`` makes. The default process group is never set.

Collectives return once the current stream can use the result; ``begin_…`` methods return at once. Rows are the first dimension.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4lite.errors import ConfigError
from dsv4lite.kernels.peer_memory import all_gather_columns
from dsv4lite.layout import AXES, Layout, Place
from dsv4lite.parallel.peer_memory import SIZES, PeerMemory

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger("dsv4lite.parallel")

LOOPBACK = "127.0.0.1"
T = TypeVar("T")

Group = Any
"""A ``ProcessGroup`` or a backend such as ``ProcessGroupGloo``; both have the methods used here."""


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer(Generic[T]):
    """A collective that has begun.

    Attributes:
        result: The tensor or tensors, complete after ``wait``.
        works: Handles of the backend.
        sent: Tensors that must stay allocated until then.
    """

    result: T
    works: Sequence[Any]
    sent: object = None

    def wait(self) -> T:
        """Make the current stream (on a CPU, the caller) wait; return the result."""
        for work in self.works:
            work.wait()
        return self.result


Transfer = _Transfer[Tensor]
Transfers = _Transfer[tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """Ranks along one axis of a mesh.

    Attributes:
        name: ``tp``, ``ep``, ``dp`` or ``pp``.
        rank: Position of this rank along the axis.
        size: Ranks along the axis.
        group: Their process group, in the order of their positions; ``None`` for size 1.
        memory: Memory that they have opened to each other; ``None`` if they cannot, or if no collective uses it.
    """

    name: str
    rank: int = 0
    size: int = 1
    group: Group | None = None
    memory: PeerMemory | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size and (self.size == 1 or self.group is not None), self

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the axis; ``x`` may be overwritten with it."""
        if self.size == 1:
            return x
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the tensors of all ranks, of equal shape, concatenated along ``dim`` in the order of the ranks."""
        if self.size == 1:
            return x
        (gathered,) = self.begin_all_gather(x).wait()
        return gathered if dim % x.dim() == 0 else torch.cat(gathered.chunk(self.size), dim)

    def begin_all_gather(self, *parts: Tensor) -> Transfers:
        """Begin to gather the rows of one or several tensors from all ranks; in one launch if the backend can.

        Each tensor has the same shape on all ranks, and must not be written to before ``wait``.
        """
        group, sent = self._group, tuple(part.contiguous() for part in parts)
        gathered = tuple(torch.empty(self.size * len(x), *x.shape[1:], dtype=x.dtype, device=x.device) for x in sent)
        together = len(parts) > 1 and group.supports_coalescing
        if together:
            group._start_coalescing()
        works = [group._allgather_base(_plain(to.flatten()), _plain(x.flatten())) for to, x in zip(gathered, sent, strict=True)]
        return _Transfer(gathered, [group._end_coalescing()] if together else works, sent)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum: the ``rank``-th of ``size`` equal parts of the rows."""
        return self.begin_reduce_scatter(x).wait() if self.size > 1 else x

    def begin_reduce_scatter(self, x: Tensor) -> Transfer:
        """Begin ``reduce_scatter``; ``x`` must not be written to before ``wait``. ``ConfigError`` if the rows are not divisible."""
        if len(x) % self.size:
            raise ConfigError(
                f"axis {self.name}: rows of {list(x.shape)} cannot be scattered over {self.size} ranks in equal parts"
            )
        x = x.contiguous()
        mine = torch.empty(len(x) // self.size, *x.shape[1:], dtype=x.dtype, device=x.device)
        return _Transfer(mine, [self._group._reduce_scatter_base(mine.flatten(), x.flatten())], x)

    def begin_all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Transfer:
        """Begin to send ``send_counts`` rows of [N, ...] to the ranks and receive ``receive_counts`` rows, in order of the ranks.

        ``x`` must not be written to before ``wait``.
        """
        received = torch.empty(sum(receive_counts), *x.shape[1:], dtype=x.dtype, device=x.device)
        sent = x.contiguous()
        work = self._group.alltoall_base(_plain(received), _plain(sent), list(receive_counts), list(send_counts))
        return _Transfer(received, [work], sent)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return ``x`` of the rank ``source`` along the axis; ``x``, of the same shape on all ranks, is overwritten with it."""
        return self.begin_broadcast(x, source).wait() if self.size > 1 else x

    def begin_broadcast(self, x: Tensor, source: int) -> Transfer:
        """Begin ``broadcast``; ``x`` must not be used before ``wait``."""
        x = x.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return _Transfer(x, [self._group.broadcast([_plain(x)], options)])

    def broadcast_tokens(self, tokens: Tensor, source: int = 0) -> Tensor:
        """Return the int64 tokens of the rank ``source``, of the same shape on all ranks, through peer memory if there is one.

        Each is above -2^31 and below 2^31. ``tokens`` may be overwritten.
        """
        if self.size == 1 or self.memory is None:
            return self.broadcast(tokens, source)
        words = all_gather_columns(tokens.to(torch.int32).reshape(1, -1), self.memory.shards)
        return words.view(self.size, *tokens.shape)[source].long()

    def begin_send(self, x: Tensor, to: int) -> Transfer:
        """Begin to send ``x`` to a rank along the axis, which must ``receive`` it; ``x`` must not be written to before ``wait``."""
        x = x.contiguous()
        return _Transfer(x, [self._group.send([_plain(x)], to, 0)])

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Receive into the contiguous tensor ``x`` from the rank ``source`` along the axis; return ``x``."""
        self._group.recv([_plain(x)], source, 0).wait()
        return x

    @property
    def _group(self) -> Group:
        assert self.group is not None, f"axis {self.name} has one rank only"
        return self.group


def _plain(x: Tensor) -> Tensor:
    """Return a view in a dtype that every backend can move."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """The axes of one rank, and its place among all ranks; by default, of a model on one device.

    Attributes:
        replica: All ranks that have the same requests, of every stage and copy; ``None`` if there is no such group.
    """

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    dp: Axis = field(default_factory=lambda: Axis("dp"))
    pp: Axis = field(default_factory=lambda: Axis("pp"))
    replica: Axis | None = field(default_factory=lambda: Axis("replica"))

    def __post_init__(self) -> None:
        axes = [(name, getattr(self, name)) for name in AXES]
        assert all((axis.rank, axis.size) == (getattr(self.place, n), getattr(self.layout, n)) for n, axis in axes), self

    @classmethod
    def outline(cls, layout: Layout, rank: int) -> Mesh:
        """Return the mesh of one rank without process groups: for sizes of shards, not for collectives."""
        place = layout.place(rank)
        axes = {name: Axis(name, getattr(place, name), getattr(layout, name), object()) for name in AXES}
        return cls(layout=layout, rank=rank, replica=None, **axes)

    @classmethod
    def from_store(
        cls, store: Store, layout: Layout, rank: int, device: torch.device, *, host: str = "", timeout_s: float = 600.0
    ) -> Mesh:
        """Return a mesh with its own process groups, NCCL on GPUs, gloo on CPUs; a collective call.

        Args:
            store: Store in which the ranks find each other; it must not have keys of another mesh.
            rank: Rank of this process in the layout.
            host: Name under which ranks reach the store. With ``LOOPBACK``, gloo listens only there, else at this machine's name.
            timeout_s: Seconds after which a collective fails.
        """
        # Every group of more than one rank, once, in an order that is the same on every rank.
        groups = sorted({ranks for name in (*AXES, "replica") for ranks in layout.groups(name) if len(ranks) > 1})
        time_limit = timedelta(seconds=timeout_s)
        made = {}  # in a loop: a comprehension would keep the store in the frames of an error, where nothing can clear it
        for ranks in groups:
            if rank in ranks:
                made[ranks] = _make_group(store, ranks, rank, device, host, time_limit)
        near, memory = layout.group(layout.exchanging, rank), None
        if device.type == "cuda" and len(near) in SIZES:
            memory = PeerMemory.open(_part_of(store, "memory", near), near.index(rank), len(near), device)
        return cls.of(layout, rank, made, memory)

    @classmethod
    def of(cls, layout: Layout, rank: int, groups: Mapping[tuple[int, ...], Group], memory: PeerMemory | None) -> Mesh:
        """Return the mesh of one rank.

        Args:
            groups: The process groups that it is in, by their ranks.
            memory: Of the ranks along ``layout.exchanging``. A replica that consists of the same ranks uses it, too.
        """
        axes, near = {}, layout.group(layout.exchanging, rank)
        for name in (*AXES, "replica"):
            ranks = layout.group(name, rank)
            shared = memory if name == layout.exchanging or (name == "replica" and ranks == near) else None
            axes[name] = Axis(name, ranks.index(rank), len(ranks), groups.get(ranks), shared)
        return cls(layout=layout, rank=rank, **axes)

    def abort(self) -> None:
        """Make collectives that wait for other ranks fail; the mesh cannot be used afterwards. Not for groups of the host.

        Returns at once. Each group is aborted in a thread: NCCL's abort waits until the CUDA graphs with its collectives are freed,
        and the abort of one group may wait for a kernel of another.
        """
        memory = getattr(self, self.layout.exchanging).memory
        if memory is not None:
            memory.abandon()
        for group in self.groups():
            threading.Thread(target=_abort, args=(group,), name="dsv4lite-abort", daemon=True).start()

    def close(self) -> None:
        """Abort the NCCL groups, since NCCL warns of groups that are only dropped; the mesh cannot be used afterwards.

        Does not wait for other ranks. CUDA graphs with collectives must be freed first: NCCL's abort waits for them.
        """
        for group in self.groups():
            if not isinstance(group, dist.ProcessGroupGloo):
                _abort(group)

    @property
    def place(self) -> Place:
        """The coordinates of this rank."""
        return self.layout.place(self.rank)

    @property
    def peers(self) -> Axis:
        """The ranks that work on the same tokens; see ``Layout``."""
        axis: Axis = getattr(self, self.layout.peers)
        return axis

    def groups(self) -> tuple[Group, ...]:
        """Return the process groups of all axes, each once."""
        axes = (self.tp, self.ep, self.dp, self.pp, self.replica)
        return tuple({id(axis.group): axis.group for axis in axes if axis is not None and axis.group is not None}.values())


def open_store(host: str, bind: str) -> Store:
    """Return a new store in which ranks find each other, on a free port of this machine, until the object is freed.

    Args:
        host: Name under which ranks reach this machine.
        bind: Address to listen at; empty for all. It should be given, since the store has no password.
    """
    listening = socket.create_server((bind, 0))
    port, number = listening.getsockname()[1], listening.detach()  # the store closes it
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=number, use_libuv=True
    )
    return store


def join_store(host: str, port: int) -> Store:
    """Connect to the store of another process."""
    store: Store = dist.TCPStore(host, port, None, is_master=False)  # type: ignore[attr-defined]
    return store


def _abort(group: Group) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        log.warning("a process group of the engine was not aborted properly: %s", error)


def _make_group(store: Store, ranks: tuple[int, ...], rank: int, device: torch.device, host: str, timeout: timedelta) -> Group:
    place = _part_of(store, "", ranks)
    position, size = ranks.index(rank), len(ranks)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(place, position, size, options)
    if host != LOOPBACK:
        return dist.ProcessGroupGloo(place, position, size, timeout)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout, gloo._devices = timeout, [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(place, position, size, gloo)


def _part_of(store: Store, name: str, ranks: tuple[int, ...]) -> Store:
    """Return a view of a store in which some ranks have their own keys."""
    from torch.distributed.distributed_c10d import PrefixStore  # missing in builds of torch without distributed

    return PrefixStore(name + "-".join(map(str, ranks)), store)
