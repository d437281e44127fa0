"""Async tests under both event loops."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

LOOPS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
BACKEND = inspect.Parameter("backend", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test under asyncio and under Trio; whatever hangs fails. The test may take the loop's name as ``backend``."""
    names = inspect.signature(test).parameters

    @functools.wraps(test)
    def run(**given: Any) -> None:
        async def guarded() -> None:
            with anyio.fail_after(120):
                await test(**{name: given[name] for name in names})

        anyio.run(guarded, backend=given["backend"])

    run.__signature__ = inspect.Signature({**names, "backend": BACKEND}.values())  # type: ignore[attr-defined]
    return LOOPS(run)
