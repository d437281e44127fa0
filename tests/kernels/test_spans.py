"""The kernel that lays out spans against its reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from dsv4lite.kernels.spans import FIELDS, PlacedSpans, place_spans
from tests.kernels.tensors import DEVICE, launch

pytestmark = pytest.mark.kernel

SLOTS, COLUMNS = 9, 7


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 6, 33])
def test_spans_are_laid_out_alike(size: int, width: int, num_drafts: int) -> None:
    """Padding, spans that the host knows, and spans that follow others with as many drafts as were made, or fewer, or none."""
    generator = torch.Generator().manual_seed(size * 100 + width * 10 + num_drafts)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    given = torch.stack(
        [
            draw(0, 900, size),
            draw(0, SLOTS, size),
            draw(0, width, size),
            draw(0, width, size),
            draw(0, 9, size),
            draw(-1, COLUMNS, size),
            *draw(-1, 50, width, size),
            *draw(0, 9, 3, size),
        ]
    )
    given[:FIELDS, size - size // 3 :] = torch.tensor([-1, -1, 0, 0, 0, -1])[:, None]
    following, drafts = draw(0, 999, 3, COLUMNS), draw(-1, 50, num_drafts, COLUMNS)
    arguments = given.int().to(DEVICE), width, draw(0, 50, SLOTS + 1).to(DEVICE), following.to(DEVICE), drafts.to(DEVICE)
    found, wanted = launch(place_spans, *arguments), place_spans.reference(*arguments)
    for field in fields(PlacedSpans):
        ours, theirs = getattr(found, field.name), getattr(wanted, field.name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field.name
