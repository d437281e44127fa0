from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4lite.llm import LLM
from dsv4lite.request import RequestOutput
from tests.e2e.engines import write_model
from tests.parallel.ranks import Ranks, started
from tests.parallel.requests import SHARED, all_kinds, tight


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Up to four processes to run functions on, from their first use to the module's end: idle groups wake up all the time."""
    with started(4) as four:
        yield four


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint that four ranks can share."""
    return write_model(tmp_path_factory.mktemp("model"), SHARED)


@pytest.fixture(scope="session")
def expected(model: Path) -> list[RequestOutput]:
    """What one rank makes of requests of all kinds."""
    with LLM(str(model), **tight(model)) as llm:
        outputs = all_kinds(llm)
        assert llm.stats().preemptions > 0 and llm.stats().cached_tokens > 0
    return outputs
