"""Fixtures for the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill what is not initialised with NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
