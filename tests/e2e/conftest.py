"""Fixtures: a small checkpoint, and scripted engines behind the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dsv4lite.api import session
from dsv4lite.engine import runner
from dsv4lite.engine.step_graphs import StepGraphs
from dsv4lite.speculation import drafters
from tests.e2e.engines import opened, write_model
from tests.e2e.updates import ask
from tests.fakes import Lab


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with random weights."""
    return write_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two plain checkpoints of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "a", seed=0), write_model(folder / "b", seed=1)


@pytest.fixture(scope="module")
def fresh(models: tuple[Path, Path]) -> tuple[Any, Any]:
    """What fresh engines of the two generate, and their checksums."""
    found = []
    for model in models:
        with opened(model, deterministic=True) as llm:
            found.append((ask(llm), llm.weight_checksums()))
    return found[0], found[1]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    lab = Lab()
    monkeypatch.setattr(session, "open_engine", lab.open_engine)
    yield lab
    leaked = [engine for engine in lab.engines if engine.alive]
    for engine in leaked:
        engine.close()
    assert not leaked, "an engine outlived its test"


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The drafts of an engine's first sequence, as they are made, eagerly or in captured steps."""
    found: list[list[int]] = []

    def spied(inner: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def spy(*args: Any) -> Tensor | None:
            out = inner(*args)
            if out is not None:
                found.append(out[0].tolist())
            return out

        return spy

    monkeypatch.setattr(runner, "draft", spied(drafters.draft))
    monkeypatch.setattr(StepGraphs, "draft", spied(StepGraphs.draft))
    return found
