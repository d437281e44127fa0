"""Moves experts between the ranks of an engine while it serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from dsv4lite.models.deepseek_v4 import DeepseekV4
from dsv4lite.weights.quant import Slot

log = logging.getLogger("dsv4lite.engine")


class Balancer:
    """Counts steps, and rebalances the experts of one rank after every so many; all ranks that share experts do so together.

    Args:
        model: This rank's share.
        refill: Fills places of the model, by official names, from where its weights come from.
        every: Steps.
    """

    def __init__(self, model: DeepseekV4, refill: Callable[[Mapping[str, Slot]], None], every: int) -> None:
        self._model, self._refill, self._every = model, refill, every
        self._steps = 0

    def step(self) -> None:
        """Call before every step.

        Raises:
            CheckpointError: The weights of experts that move cannot be read any more.
        """
        self._steps += 1
        if self._steps % self._every:
            return
        started = time.monotonic()
        waiting = self._model.rebalance()
        if waiting:
            self._refill(waiting)
        log.info("experts rebalanced: %d matrices read in %.1f s", len(waiting), time.monotonic() - started)
