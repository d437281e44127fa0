"""Moves experts between the ranks of an engine while it serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from statistics import mean

from dsv4lite.models.family import Model
from dsv4lite.weights.quant import Slot

log = logging.getLogger("dsv4lite.engine")


class Balancer:
    """Rebalances the experts of one rank each ``every`` steps, together with all ranks that share experts.

    ``refill`` fills slots of the model, by official name, from the source of its weights.

    Attributes:
        on: ``False`` during a weight update, and for good once it is written: the source then has other weights.
    """

    def __init__(self, model: Model, refill: Callable[[Mapping[str, Slot]], None], every: int) -> None:
        self._model, self._refill, self._every = model, refill, every
        self._steps = 0
        self.on = True

    def step(self) -> None:
        """Call before every step.

        Raises:
            CheckpointError: The weights of an expert that moves can no longer be read.
        """
        self._steps += self.on
        if not self.on or self._steps % self._every:
            return
        started = time.monotonic()
        waiting, loads = self._model.rebalance()
        if not loads:  # a stage without experts
            return
        if waiting:
            self._refill(waiting)
        before, after = (mean(of_layers) for of_layers in zip(*loads, strict=True))
        message = "experts rebalanced: the busiest rank had %.2f times the average load, now %.2f; %d matrices read in %.1f s"
        log.info(message, before, after, len(waiting), time.monotonic() - started)
