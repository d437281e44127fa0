"""Steps of several sequences as ``Paging``, with pages and slots in a shuffled order, for the tests of paged kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from dsv4lite.kernels.paging import Paging

GROW, WINDOW, REACH = 256, 64, 128


def step_of(
    starts: Sequence[int],
    lens: Sequence[int],
    *,
    slots: Sequence[int] | None = None,
    drafts: Sequence[int] | None = None,
    copies: Sequence[int] | None = None,
    padding: int = 0,
    width: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Paging:
    """Describe a step of sequences with ``lens`` new tokens from positions ``starts``, followed by tokens of padding.

    A sequence keeps its pages from step to step as long as ``seed`` and the number of sequences stay. With a ``width``, each has so
    many rows, and padding counts sequences; without, there is one more sequence, an empty one. ``drafts`` of the new tokens are
    draft tokens. ``copies`` are the copies of the compressor state that the sequences start from.
    """
    count = len(starts)
    assert all(length >= 0 and (not width or length <= width) for length in lens), lens
    slots = list(range(count)) if slots is None else list(slots)
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    grow_pages, window_pages = 4096 // GROW, 4096 // WINDOW
    grow = random.Random(seed).sample(range(count * grow_pages), count * grow_pages)
    window = random.Random(seed + 1).sample(range(count * window_pages), count * window_pages)
    firsts = [max(0, start - REACH + 1) // WINDOW for start in starts]
    tables = []
    for i, (start, end, first) in enumerate(zip(starts, ends, firsts, strict=True)):
        pages = range(first, (max(end, 1) - 1) // WINDOW + 1)
        used = [(page + 1) * WINDOW > end - REACH or page * WINDOW < start for page in pages]
        tables.append([window[i * window_pages + page] if u else -1 for page, u in zip(pages, used, strict=True)])
    blank = padding if width else min(padding, 1)
    held = [width or length for length in lens]  # rows of each sequence
    rows = [sum(held[:i]) for i in range(count)]
    positions = []
    for start, end, room in zip(starts, ends, held, strict=True):
        positions += [*range(start, end), *[-1] * (room - end + start)]
    positions += [-1] * (padding * max(1, width))
    sequences = [i for i, room in enumerate(held) for _ in range(room)]
    sequences += [count + i for i in range(padding) for _ in range(width)] or [0] * padding
    pages_of = [grow[i * grow_pages : (i + 1) * grow_pages] for i in range(count)] + [[0] * grow_pages] * blank
    wide = max([1, *(len(table) for table in tables)])

    def ints(values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Paging(
        positions_T=ints(positions),
        sequence_T=ints(sequences),
        slots_S=ints(slots + [-1] * blank),
        first_S=ints([*starts, *[0] * blank]),
        rows_S=ints([*rows, *(sum(held) + i * max(1, width) for i in range(blank))]),
        lens_S=ints([*lens, *[min(width, 1)] * blank]),
        drafts_S=ints([*(drafts or [0] * count), *[0] * blank]),
        state_copy_S=ints([*(copies or [0] * count), *[0] * blank]),
        grow_SP=ints(pages_of).view(-1, grow_pages),
        window_SP=ints([table + [-1] * (wide - len(table)) for table in tables] + [[-1] * wide] * blank).view(-1, wide),
        window_first_S=ints([*firsts, *[0] * blank]),
        width=width,
    )
