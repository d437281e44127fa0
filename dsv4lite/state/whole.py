"""One whole sequence as a step, with state for it alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import GradientStore, RowStore
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.state.paging import SequenceInput, make_paging
from dsv4lite.state.spec import StateSizes, StateSpec
from dsv4lite.state.store import LayerCache, StateCache


def whole_sequence(
    token_ids: Sequence[int], spec: StateSpec, device: torch.device, *, differentiable: bool
) -> tuple[Tensor, Paging, int, list[LayerCache]]:
    """Return token ids int64 [T], where they stand, their number, and state, which lets gradients through if ``differentiable``."""
    pages, windows = (range(-(-len(token_ids) // size)) for size in (PAGE_TOKENS, WINDOW_PAGE_TOKENS))
    whole = SequenceInput(token_ids=token_ids, start=0, slot=0, pages=pages, window_first=0, window_pages=windows)
    sizes = StateSizes(grow_pages=len(pages), window_pages=len(windows), slots=1, snapshots=0)
    rows = GradientStore if differentiable and torch.is_grad_enabled() else RowStore
    return *make_paging([whole], device), StateCache.allocate(spec, sizes, device, rows=rows).layers
