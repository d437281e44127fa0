"""Fixtures for the tests of kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill what is not initialised with NaN and the largest integers."""
    # ``use_deterministic_algorithms`` does the same, and imports torch's compiler for it: seconds for each process.
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="session", autouse=True)
def lighter_interpreter() -> Iterator[None]:
    """Let Triton's interpreter leave out work that has no effect, which takes most of its time.

    It patches its language once per launch and module, not again at every call of a device function. It finds numpy's type of a
    number once, not in a table that it builds every time. And it does not compute whether integers overflow, which it compares and
    then forgets unless its options say ``debug``.
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

    number_type_of: Callable[[Any], Any] = interpreter._get_np_dtype
    number_types: dict[str, Any] = {}

    def number_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in number_types:
            number_types[name] = number_type_of(dtype)
        return number_types[name]

    options = interpreter.interpreter_builder.options
    assert not options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(interpreter, "_get_np_dtype", number_type)
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        yield
