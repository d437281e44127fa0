"""A transaction of the weights, as its caller sees it. ``blocking`` has it for ``LLM``."""

from __future__ import annotations

from typing import Self

from dsv4lite.api.bridge import Bridge
from dsv4lite.api.session import Session, Update
from dsv4lite.checks import require
from dsv4lite.config import SECONDS
from dsv4lite.errors import DSV4LiteError, WeightUpdateError, described
from dsv4lite.request import WeightSource


class AsyncWeightUpdate:
    """New weights that are published together, or not at all; made by ``AsyncLLM.update_weights``.

    Inside the block ``load`` takes tensors. Leaving it without an exception commits: every rank has all it needs, the new weights
    are written in place between two steps, cached prefixes are forgotten, and later tokens carry the new version. Leaving it by an
    exception, or after a ``load`` that failed, was cancelled or has not ended, rolls back.
    """

    def __init__(self, session: Session, bridge: Bridge, update: Update) -> None:
        self._session, self._bridge, self._update = session, bridge, update
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        if self._update.ended:
            raise RuntimeError("an update can be entered only once")
        self._session.open_update(self._update)
        try:
            if not self._update.staged:
                await self._stop_requests()
            await self._bridge.wait(self._session.begin_update(self._update))
        except BaseException:
            self._session.roll_back(self._update)
            raise
        return self

    async def load(self, source: WeightSource, *, deadline: float | None = None) -> None:
        """Take the tensors of a source. May be called several times, with other tensors.

        Args:
            source: ``NamedTensors``, ``ModuleSource``, ``DiskSource``, or an object with their method ``tensors``.
            deadline: Seconds that it may take; default is the setting ``start_timeout_s``.

        Raises:
            InvalidRequestError: ``deadline`` is no number of seconds above 0. The update stays as it is.
            WeightUpdateError: A tensor does not fit the model, the source raised, or the deadline has passed. Leaving the block
                then rolls back.
            CheckpointError: A checkpoint cannot be found or read.
            CapacityError: The host or the device has too little memory for the tensors.
            EngineStateError: The update is not open.
        """
        seconds = self._session.config.start_timeout_s if deadline is None else deadline
        problem = SECONDS(seconds)
        require(not problem, "deadline", deadline, f"{problem}, or None")
        loaded = self._session.load(self._update, source)
        try:
            await self._bridge.wait(loaded, seconds)
            self._update.loads.discard(loaded)
        except DSV4LiteError as error:
            self._failure = error
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError) and not loaded.done()
            reason = f"did not end within {seconds:g} s" if late else f"failed: {described(error)}"
            self._failure = WeightUpdateError(f"the source of the update {reason}")
            raise self._failure from error
        finally:
            loaded.cancel()  # if it goes on: the source is read no further

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        session, update = self._session, self._update
        complete = not update.loads
        try:
            if error is None and complete:
                if update.pause is None:
                    await self._stop_requests()
                await self._bridge.wait(session.commit_update(update))
        finally:
            session.roll_back(update)
        if error is None and not complete:
            reason = "has failed" if self._failure else "was cancelled or has not ended"
            raise WeightUpdateError(f"the update was rolled back, because a load {reason}") from self._failure

    def __del__(self) -> None:
        self._session.drop_update(self._update)

    async def _stop_requests(self) -> None:
        """Pause the engine until the update has ended."""
        mode = "keep" if self._update.mode == "recompute" else self._update.mode
        self._update.pause = self._session.pause(mode, block=True)
        await self._bridge.wait(self._update.pause.done)
