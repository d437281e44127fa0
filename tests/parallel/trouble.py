"""Dispatchers that go wrong on one rank: in the first step, for models on a CPU are not warmed up; and passes that wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from dsv4lite.parallel.experts import Dispatched, ExpertRanks, Local, Rows

ALARM = "DSV4LITE_TEST_ALARM"
"""Names a file in the environment; a sleeping rank wakes up when it exists."""


def await_file(path: Path) -> None:
    """Return when a file exists, or after a minute."""
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def hold_passes(model: Module, rank: int, held: int, folder: str) -> None:
    """Let each pass of a rank wait for a file named by its number, for ``apply``."""

    def waits(forward: Callable[..., Any], numbers: count[int]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            await_file(Path(folder, str(next(numbers))))
            return forward(*arguments, **named)

        return run

    if rank == held:
        model.forward = waits(model.forward, count(1))


class Fails(Local):
    """A follower raises in its step."""

    on_rank = 1

    def __init__(self, ranks: ExpertRanks) -> None:
        super().__init__(ranks)
        self._here = ranks.ep.rank == self.on_rank

    def start(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, most_tokens: int | None = None) -> Dispatched:
        if self._here:
            self.fall()
        return super().start(rows, slots_TK, weight_TK, most_tokens)

    def fall(self) -> None:
        raise ValueError("no experts today")


class Sleeps(Fails):
    """A worker does not return from its step until it is woken."""

    def fall(self) -> None:
        await_file(Path(os.environ[ALARM]))
        raise ValueError("slept too long")


class LeaderSleeps(Sleeps):
    """Rank 0 does not, while the others wait for it."""

    on_rank = 0
