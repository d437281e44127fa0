"""The kernel that lays out runs against its reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from dsv4lite.kernels.runs import TOLD, PlacedRuns, place_runs_ref

triton = pytest.importorskip("triton")

from dsv4lite.kernels.runs.triton import place_runs_triton  # noqa: E402

pytestmark = pytest.mark.kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, COLUMNS = 9, 7


@pytest.mark.parametrize("guesses", [0, 1, 4])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 6, 33])
def test_runs_are_laid_out_alike(size: int, width: int, guesses: int) -> None:
    """Padding, runs that the host knows, and runs behind others with as many guesses as were made, or fewer, or none."""
    generator = torch.Generator().manual_seed(size * 100 + width * 10 + guesses)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    told = torch.stack(
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
    told[:TOLD, size - size // 3 :] = torch.tensor([-1, -1, 0, 0, 0, -1])[:, None]
    heads, drafts = draw(0, 999, 3, COLUMNS), draw(-1, 50, guesses, COLUMNS)
    arguments = told.int().to(DEVICE), width, draw(0, 50, SLOTS + 1).to(DEVICE), heads.to(DEVICE), drafts.to(DEVICE)
    found, wanted = place_runs_triton(*arguments), place_runs_ref(*arguments)
    for field in fields(PlacedRuns):
        ours, theirs = getattr(found, field.name), getattr(wanted, field.name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field.name
