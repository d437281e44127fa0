"""Memory that ranks open to each other: all of them have it, or none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dsv4lite.kernels.peer_memory import BLOCK, EMPTY, TURNS
from dsv4lite.parallel import peer_memory
from dsv4lite.parallel.peer_memory import Driver, Refused, open_buffers

RANKS = 3


class Machine:
    """A driver for ranks that are threads; what it refuses is said by its method's name and the rank."""

    def __init__(self, *refused: tuple[str, int]) -> None:
        self.refused, self.rank, self.held, self.lock = refused, threading.local(), list[int](), threading.Lock()

    def __call__(self) -> Machine:
        self._may("load", OSError)
        return self

    def _may(self, name: str, error: type[Exception] = Refused) -> None:
        if (name, self.rank.number) in self.refused:
            raise error(f"no {name} on rank {self.rank.number}")

    def allocate(self, count: int) -> int:
        self._may("allocate")
        with self.lock:
            self.held.append(1000 + self.rank.number)
        return 1000 + int(self.rank.number)

    def share(self, address: int) -> bytes:
        self._may("share")
        return address.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        self._may("open")
        with self.lock:
            self.held.append(10 * int.from_bytes(handle, "little") + self.rank.number)
        return 10 * int.from_bytes(handle, "little") + int(self.rank.number)

    def free(self, own: int, opened: list[int]) -> None:
        with self.lock:
            for address in (own, *opened):
                self.held.remove(address)


def opened(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> list[tuple[int, list[int], Driver] | str]:
    store = dist.HashStore()
    monkeypatch.setattr(peer_memory, "Driver", machine)

    def rank(number: int) -> tuple[int, list[int], Driver] | str:
        machine.rank.number = number
        return open_buffers(store, number, RANKS, 100)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


def test_buffers_are_those_of_the_peers_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(monkeypatch, Machine())
    assert [(own, others) for own, others, _ in found if not isinstance(own, str)] == [  # type: ignore[misc]
        (1000, [10010, 10020]),
        (1001, [10001, 10021]),
        (1002, [10002, 10012]),
    ]


@pytest.mark.parametrize("step", ["load", "allocate", "share", "open"])
def test_nobody_has_buffers_where_one_rank_cannot(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    machine = Machine((step, 1))
    assert opened(monkeypatch, machine) == [f"no {step} on rank 1"] * RANKS
    assert machine.held == []


def test_nobody_has_buffers_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(peer_memory, "_machine", lambda: f"machine {machine.rank.number // 2}")
    assert opened(monkeypatch, machine) == ["they are on several machines"] * RANKS
    assert machine.held == []


def test_memory_is_laid_out_as_the_kernel_wants_it() -> None:
    """The kernel waits for ever on a buffer filled with anything else; neither room knows the other."""
    assert peer_memory._NOTHING_YET == EMPTY & 0xFFFFFFFF
    assert (peer_memory._BUFFERS, peer_memory._BLOCK) == (TURNS, BLOCK)
