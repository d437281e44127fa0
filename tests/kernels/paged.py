"""Steps on paged state for tests of kernels: random tables, stores full of random rows, and what a store must not lack poisoned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.quantize import round_fp4, round_fp8
from dsv4lite.kernels.rows import (
    KEY_GROUP,
    KV_GROUP,
    LATENT_GROUP,
    Fp4Key,
    Fp8Key,
    Fp8Latent,
    RowFormat,
    RowStore,
    UnquantizedRow,
)
from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.state.paging import PagingSizes, read_paging, write_paging

GROW, WINDOW = 256, 64


def make_paging(steps: Sequence[tuple[int, int]], device: torch.device, *, padding: int = 0, seed: int = 0) -> Paging:
    """Return the places of sequences given by first position and number of tokens, pages in random order; then padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    lens = [length for _, length in steps]
    ends = [first + length for first, length in steps]
    columns = max((-(-end // GROW) for end in ends), default=1)
    grow = torch.randperm(len(steps) * columns + 1, generator=generator)[: len(steps) * columns].view(len(steps), columns)
    firsts = [max(0, first - 130) // WINDOW for first, _ in steps]
    width = max((-(-end // WINDOW) - page for end, page in zip(ends, firsts)), default=1)
    window = torch.randperm(len(steps) * width + 1, generator=generator)[: len(steps) * width].view(len(steps), width)
    sizes = PagingSizes(sum(lens) + padding, max(1, len(steps)), columns, width)  # a block is of one sequence at least
    plans = [
        SequencePlan(s, s, first, (0,) * length, tuple(grow[s].tolist()), firsts[s], tuple(window[s].tolist()), sample=False)
        for s, (first, length) in enumerate(steps)
    ]
    block = write_paging(plans, sizes).to(device)
    return read_paging(block, sizes, width=int(not padding and all(length == 1 for length in lens)))[1]


def fill_store(fmt: RowFormat, pages: int, rows_per_page: int, device: torch.device, *, seed: int = 0) -> RowStore:
    """Return a store whose every row is random, of random size."""
    store = RowStore(fmt, pages, rows_per_page, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    count = pages * rows_per_page
    rows = torch.randn(count, fmt.width, generator=generator)
    rows *= 2.0 ** torch.randint(-2, 3, (count, 1), generator=generator)
    store.write(torch.arange(count), rows.to(torch.bfloat16))
    if device.type == "cpu":
        return store
    moved = RowStore(fmt, pages, rows_per_page, device)
    moved.memory.copy_(store.memory)
    return moved


def simulate(fmt: RowFormat, rows: Tensor) -> Tensor:
    """Return what a reader of packed rows gets."""
    if isinstance(fmt, UnquantizedRow):
        return rows.to(fmt.dtype).to(rows.dtype)
    if isinstance(fmt, Fp4Key):
        return round_fp4(rows, KEY_GROUP)
    if isinstance(fmt, Fp8Key):
        return round_fp8(rows, fmt.width)
    split, group = (fmt.latent, LATENT_GROUP) if isinstance(fmt, Fp8Latent) else (fmt.nope, KV_GROUP)
    return torch.cat([round_fp8(rows[..., :split], group), rows[..., split:].to(torch.bfloat16).to(rows.dtype)], -1)


def pages_of(tables: Tensor) -> int:
    """Return how many pages a store must have."""
    return int(tables.max()) + 1 if tables.numel() else 1


def attention_bound(wanted: Tensor, rope: int = 64) -> Tensor:
    """Return how far results of attention [T, H, C] in bfloat16 may be from these, as the docstring of ``attention`` promises."""
    exact = wanted.float()
    pairs = exact[..., -rope:].unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(*exact.shape[:-1], -1, 2).flatten(-2)
    size = torch.cat([2**-7 * exact[..., :-rope].abs(), 2**-6 * pairs], -1)
    return size + 2**-8 * exact.abs().amax(-1, keepdim=True)
