"""Fixtures: a small checkpoint, and scripted engines behind the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4lite.api import session
from tests.e2e.engines import write_model
from tests.fakes import Lab


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with random weights."""
    return write_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    lab = Lab()
    monkeypatch.setattr(session, "open_engine", lab.open_engine)
    yield lab
    leaked = [engine for engine in lab.engines if engine.alive]
    for engine in leaked:
        engine.close()
    assert not leaked, "an engine outlived its test"
