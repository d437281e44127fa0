"""Fixtures for the tests of kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill what is not initialised with NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def language_patched_once_a_launch() -> Iterator[None]:
    """Let Triton's interpreter patch its language once per launch and module, not again at every call of a device function.

    To patch it again changes nothing, but takes a quarter of the time of a launch.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    patch_for: Callable[[Any], Any] = interpreter._patch_lang
    patched: set[int] = set()

    def once(function: Any) -> Any:
        first, module = not patched, id(function.__globals__)
        if module in patched:
            return SimpleNamespace(restore=lambda: None)
        patched.add(module)
        scope = patch_for(function)
        if not first:
            return scope

        def restore() -> None:
            patched.clear()
            scope.restore()

        return SimpleNamespace(restore=restore)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield
