"""Memory that the GPUs of one machine open to each other, so that a kernel can write to the memory of all ranks.

CUDA's driver opens it (``cuIpc…``); the ranks exchange handles in a store, without a process group. If one rank cannot open it
(its driver or container forbids it, or ranks are on several machines), no rank uses it.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4lite.kernels.peer_memory import BLOCK, EMPTY, TURNS, Inbox

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger("dsv4lite.parallel")

MOST_NUMBERS = 1 << 18
"""Elements of the largest all-reduce in which every rank adds up all elements."""
SHARDED_NUMBERS = 1 << 24
"""Elements of a larger all-reduce that one launch processes; each rank adds up a shard of them. More take several launches."""
SIZES = (2, 4)
"""Numbers of ranks that use it: kernels require a power of two, and more than 4 ranks are not measured."""
_HANDLE_BYTES = 64
_ENABLE_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def opened_bytes(ranks: int) -> int:
    """Return the bytes that each rank opens to the others, if they are GPUs of one machine."""
    return 4 * sum(_words(ranks, MOST_NUMBERS)) if ranks in SIZES else 0


def shard_words(ranks: int) -> int:
    """Return the words that a rank sends to each other rank: float32 parts of its shard, and bfloat16 sums of its own shard."""
    return SHARDED_NUMBERS // ranks // 2 * 3


def _words(ranks: int, numbers: int) -> tuple[int, int]:
    """Return the words of a rank's two buffers: for small all-reduces, and for shards."""
    return TURNS * ranks * numbers, TURNS * (ranks - 1) * shard_words(ranks)


class Refused(Exception):
    """The driver refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PeerMemory:
    """The buffers of all ranks.

    Attributes:
        inbox: Their addresses, for small all-reduces.
        shards: The same for ``all_reduce_shards`` and ``all_gather_columns``, in the same allocation.
        abandoned: int32 [1] in pinned memory, read by the device: not 0 once kernels must stop waiting for peers.
    """

    inbox: Inbox
    shards: Inbox
    abandoned: Tensor

    @classmethod
    def of(cls, places: Sequence[int], rank: int, numbers: int, abandoned: Tensor, device: torch.device) -> PeerMemory:
        """Return the memory of one rank.

        Args:
            places: Addresses of all ranks' buffers.
            rank: Position of this rank.
            numbers: See ``MOST_NUMBERS``.
            abandoned: See the class.
            device: Device of the kernels.
        """
        ranks, inboxes, begin = len(places), list[Inbox](), 0
        for count, words in zip((numbers, shard_words(ranks)), _words(ranks, numbers), strict=True):
            addresses = [*(place + 4 * begin for place in places), abandoned.data_ptr()]
            calls = torch.zeros(-(-count // BLOCK), dtype=torch.int64, device=device)
            tickets = torch.zeros(1, dtype=torch.int32, device=device)
            inboxes.append(Inbox(torch.tensor(addresses, dtype=torch.int64, device=device), calls, tickets, rank, count))
            begin += words
        inbox, shards = inboxes
        return cls(inbox, shards, abandoned)

    @classmethod
    def open(cls, store: Store, rank: int, size: int, device: torch.device, *, numbers: int = MOST_NUMBERS) -> PeerMemory | None:
        """Return the memory, filled with ``EMPTY``, or ``None`` if a rank cannot open it; a collective call.

        Args:
            store: Store of these ranks, without other keys.
            rank, size: Position of this rank, and number of ranks.
            device: The current GPU.
            numbers: See ``MOST_NUMBERS``.
        """
        with torch.cuda.device(device):
            torch.zeros(1, dtype=torch.int32, device=device)  # a context for the driver
            found = open_buffers(store, rank, size, sum(_words(size, numbers)))
        if isinstance(found, str):
            log.info("ranks use NCCL for all collectives: they cannot open their memory to each other (%s)", found)
            return None
        own, opened, driver = found
        abandoned = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        memory = cls.of([*opened[:rank], own, *opened[rank:]], rank, numbers, abandoned, device)
        weakref.finalize(memory, driver.free, own, opened).atexit = False
        return memory

    def abandon(self) -> None:
        """Make kernels stop waiting for peers, from now on; their results are not valid."""
        self.abandoned.fill_(1)


class Driver:
    """Calls of CUDA's driver, in the current context.

    Raises:
        OSError: There is no driver.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def allocate(self, count: int) -> int:
        """Allocate ``count`` 32-bit words, all ``EMPTY``; return the address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * count))
        self._call("cuMemsetD32_v2", address, ctypes.c_uint(EMPTY & 0xFFFFFFFF), ctypes.c_size_t(count))
        self._call("cuCtxSynchronize")
        return address.value

    def share(self, address: int) -> bytes:
        """Return the handle with which other processes can open memory."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Return the address of another process's memory in this one."""
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_ENABLE_PEERS))
        return address.value

    def free(self, own: int, opened: Sequence[int]) -> None:
        """Free this rank's memory and close that of others."""
        try:
            for address in opened:
                self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
            self._call("cuMemFree_v2", ctypes.c_uint64(own))
        except Refused as error:  # after a CUDA error no call works
            log.debug("memory of ranks was not freed: %s", error)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise Refused(f"{name} returned {status}")


def open_buffers(store: Store, rank: int, size: int, count: int) -> tuple[int, list[int], Driver] | str:
    """Return the addresses of this rank's buffer and of its peers' buffers, or, on all ranks, why a rank cannot open them."""
    own, opened, handle, problem = 0, list[int](), b"", ""
    try:
        driver = Driver()
        own = driver.allocate(count)
        handle = driver.share(own)
    except (OSError, Refused) as error:
        problem = str(error)
    every = [text.split("|", 2) for text in _exchange(store, "handle", rank, size, f"{_machine()}|{handle.hex()}|{problem}")]
    problems = [problem for _, _, problem in every if problem]
    if len({machine for machine, _, _ in every}) > 1:
        problems.append("they are on several machines")
    if not problems:
        try:
            for peer, (_, theirs, _) in enumerate(every):
                if peer != rank:
                    opened.append(driver.open(bytes.fromhex(theirs)))
        except Refused as error:
            problem = str(error)
        problems = list(filter(None, _exchange(store, "opened", rank, size, problem)))
    if not problems:
        return own, opened, driver
    if own:
        driver.free(own, opened)
    return problems[0]


def _exchange(store: Store, key: str, rank: int, size: int, text: str) -> list[str]:
    """Return the texts of all ranks, in order of ranks; a collective call."""
    store.set(f"{key}{rank}", text)
    return [store.get(f"{key}{peer}").decode() for peer in range(size)]


def _machine() -> str:
    """Return a name that is unique to this machine."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
