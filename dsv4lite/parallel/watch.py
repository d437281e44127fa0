"""The leader's watch over its ranks: one thread that notices ranks that die, fail, or give no sign of life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import cast

from dsv4lite.parallel.channel import Channel, Closed
from dsv4lite.parallel.launch import HEARTBEAT_S

_NEVER = float("inf")
_GRACE_S = 0.5  # after a rank fails, how long to wait for the death of another rank, which is then the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A rank that is lost.

    Attributes:
        reason: Text without a subject, such as ``gave no sign of life for 10 s``.
        error: The error that it raised, if any.
        gone: Whether its connection ended.
    """

    rank: int
    reason: str = ""
    error: BaseException | None = None
    gone: bool = False


class Watch:
    """Listens to the signs of life of an engine's ranks.

    Args:
        ranks: Connection for signs of life of each rank.
        silence_s: Seconds without a sign of life after which a rank is lost.
        on_loss: Called once, in the thread of the watch, with the first loss; a death takes precedence over errors at that time.
    """

    def __init__(self, ranks: Mapping[int, Channel], silence_s: float, on_loss: Callable[[Loss], None]) -> None:
        self._ranks = dict(ranks)
        self._silence_s = silence_s
        self._on_loss = on_loss
        self._stop = threading.Event()
        self._decided = threading.Event()
        self._deadline: tuple[float, int, str] | None = None
        self._thread = threading.Thread(target=self._run, name="dsv4lite-ranks", daemon=True)
        self._thread.start()

    @contextmanager
    def within(self, seconds: float, rank: int, what: str) -> Iterator[None]:
        """Count a rank as lost if the block takes longer than ``seconds``; ``what`` names its task, for the message."""
        reason = f"did not {what} within {seconds:g} s: it, or a rank that it waits for, is stuck"
        self._deadline = (time.monotonic() + seconds, rank, reason)
        try:
            yield
        finally:
            self._deadline = None

    def await_decision(self) -> None:
        """Wait until ``on_loss`` has returned for a loss that may be about to be noticed, at most 1.5 seconds."""
        self._decided.wait(_GRACE_S + 2 * HEARTBEAT_S)

    def stop(self) -> None:
        """Stop listening; ranks that end from now on are not reported."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        seen = dict.fromkeys(self._ranks, _NEVER)  # silence counts from the first sign of life: starting Python takes its time
        failed: dict[int, Loss] = {}
        decide_at = _NEVER
        while not self._stop.is_set():
            present = {channel.connection: rank for rank, channel in self._ranks.items() if rank in seen}
            for ready in wait(list(present), min(HEARTBEAT_S, max(0.0, decide_at - time.monotonic()))):
                rank = present[cast(Connection, ready)]
                try:
                    message = self._ranks[rank].receive()
                except Closed:
                    del seen[rank]
                    if rank not in failed:
                        self._decide(Loss(rank=rank, gone=True))
                        return
                    continue
                seen[rank] = time.monotonic()
                if isinstance(message, BaseException):
                    failed[rank] = Loss(rank=rank, reason=f"failed: {type(message).__name__}: {message}", error=message)
                    decide_at = min(decide_at, time.monotonic() + _GRACE_S)
            loss = self._overdue(seen, time.monotonic(), None if failed else self._deadline) or (
                next(iter(failed.values())) if time.monotonic() >= decide_at else None
            )
            if loss is not None:
                self._decide(loss)
                return

    def _overdue(self, seen: Mapping[int, float], now: float, deadline: tuple[float, int, str] | None) -> Loss | None:
        for rank, last in seen.items():
            if now - last > self._silence_s:
                return Loss(rank=rank, reason=f"gave no sign of life for {self._silence_s:g} s")
        return Loss(rank=deadline[1], reason=deadline[2]) if deadline is not None and now > deadline[0] else None

    def _decide(self, loss: Loss) -> None:
        if not self._stop.is_set():
            self._on_loss(loss)
        self._decided.set()
