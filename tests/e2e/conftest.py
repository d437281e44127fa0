"""Fixtures of the tests that run the API on a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsv4lite.api import session
from tests.fakes import Lab


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    lab = Lab()
    monkeypatch.setattr(session, "open_engine", lab.open_engine)
    yield lab
    leaked = [engine for engine in lab.engines if engine.alive]
    for engine in leaked:
        engine.close()
    assert not leaked, "an engine outlived its test"
