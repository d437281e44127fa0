from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks, started


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to four processes to run functions on; they start when they are first needed."""
    with started(4) as four:
        yield four
