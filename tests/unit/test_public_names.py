"""The package's door: what can be imported from it, and what importing it does not do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dsv4lite
from dsv4lite import errors


@pytest.mark.parametrize("name", dsv4lite.__all__)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(dsv4lite, name).__name__ == name
    assert name in dir(dsv4lite)


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(dsv4lite.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsv4lite.")]
    assert {alias.name: node.module for node in imports for alias in node.names} == dsv4lite._HOME


def test_public_names_include_every_error() -> None:
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__}
    assert tree <= set(dsv4lite.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AsyncLM'"):
        dsv4lite.AsyncLM  # noqa: B018


def test_import_is_cheap() -> None:
    """Neither importing nor constructing may import torch, start a thread or touch the host's state."""
    program = """
import sys, threading, logging, signal, os
handlers, environment = signal.getsignal(signal.SIGINT), dict(os.environ)
import dsv4lite
assert not {"torch", "anyio", "dsv4lite.llm"} & set(sys.modules)
dsv4lite.AsyncLLM("no/such/model"), dsv4lite.LLM("no/such/model"), dsv4lite.SamplingParams(), dsv4lite.tiny_model()
assert "torch" not in sys.modules
assert threading.active_count() == 1 and not logging.getLogger().handlers and not logging.getLogger("dsv4lite").handlers
assert signal.getsignal(signal.SIGINT) is handlers and dict(os.environ) == environment
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(dsv4lite.__file__).parent.parent)
