"""Dispatchers that go wrong on one rank: in the first step, for models on a CPU are not warmed up."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor

from dsv4lite.parallel.experts import Dispatched, ExpertRanks, Local, Rows

ALARM = "DSV4LITE_TEST_ALARM"
"""Names a file in the environment; a sleeping rank wakes up when it exists."""


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
        alarm, until = Path(os.environ[ALARM]), time.monotonic() + 60
        while not alarm.exists() and time.monotonic() < until:
            time.sleep(0.01)
        raise ValueError("slept too long")


class LeaderSleeps(Sleeps):
    """Rank 0 does not, while the others wait for it."""

    on_rank = 0
