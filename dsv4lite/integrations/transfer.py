"""Weight updates in the four phases of vLLM's weight transfer, for adapters to trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4lite.api.update import AsyncWeightUpdate
from dsv4lite.checks import require
from dsv4lite.errors import EngineStateError, WeightUpdateError
from dsv4lite.llm import AsyncLLM
from dsv4lite.request import Phase, WeightSource
from dsv4lite.weights.update import NamedTensors


class WeightTransfer:
    """The phases of vLLM's weight transfer, one call each, over one transaction; mutable, for one task at a time.

        transfer = WeightTransfer(llm)
        await transfer.init_weight_transfer_engine(IPCSource)
        await llm.pause(mode="keep")  # without it, requests continue while buckets load
        await transfer.start_weight_update()
        for handles in buckets:
            await transfer.update_weights(handles)
        await transfer.finish_weight_update()
        await llm.resume()

    If a bucket fails, the previous version stays in use, and ``finish_weight_update`` raises as well.

    Raises:
        InvalidRequestError: ``llm`` is no ``AsyncLLM``.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        require(isinstance(llm, AsyncLLM), "llm", llm, "must be an AsyncLLM; with LLM use its update_weights")
        self._llm = llm
        self._source: Callable[[Any], WeightSource] = NamedTensors
        self._version = 0
        self._update: AsyncWeightUpdate | None = None

    async def init_weight_transfer_engine(self, source: Callable[[Any], WeightSource]) -> None:
        """Set how a bucket becomes a source: ``IPCSource``, or ``lambda _: ProcessGroupSource(0)``; default is ``NamedTensors``."""
        self._source = source

    async def start_weight_update(self, version: int | None = None, *, partial: bool = False) -> None:
        """Open an update; default is the next version.

        Raises:
            EngineStateError: An update is open, or the weights are asleep.
        """
        wanted = self._llm.weight_version + 1 if version is None else version
        update = self._llm.update_weights(wanted, partial=partial)
        await update.__aenter__()
        self._update, self._version = update, wanted

    async def update_weights(self, bucket: Any) -> None:
        """Take a bucket: names and tensors, or other arguments of the source. On return its memory may be reused.

        Raises:
            WeightUpdateError: A tensor does not fit the model, or the source has failed.
            Exception: No source can be made from it; the update is cancelled.
        """
        update = self._opened("update_weights")
        try:
            source = self._source(bucket)
        except Exception:
            await self.cancel_weight_update()
            raise
        await update.load(source)

    async def finish_weight_update(self) -> int:
        """Publish the new weights, and return their version.

        Raises:
            WeightUpdateError: Tensors are missing, or a bucket has failed; nothing was published.
        """
        update, self._update = self._opened("finish_weight_update"), None
        await update.__aexit__(None, None, None)
        return self._version

    async def cancel_weight_update(self) -> None:
        """Drop the tensors since ``start_weight_update``, if an update is open."""
        update, self._update = self._update, None
        if update is not None:
            cancelled = WeightUpdateError("the update was cancelled")
            await update.__aexit__(WeightUpdateError, cancelled, None)

    def _opened(self, call: str) -> AsyncWeightUpdate:
        if self._update is None:
            message = f"{call}: no update is open; call start_weight_update first"
            raise EngineStateError(message, state=self._llm.state.value, allowed=[Phase.UPDATING.value])
        return self._update
