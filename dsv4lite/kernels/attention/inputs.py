"""What both kernels of attention on packed pages are launched with, for few tokens and for many."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import on_gpu
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import Fp8Kv, RowStore


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedInputs:
    """Arguments of ``attention.paged_attention`` that say which rows there are, and which token attends to which."""

    q_THC: Tensor
    fresh_TB: Tensor
    window: RowStore
    entries: RowStore | None
    paging: Paging
    ratio: int
    selected_TK: Tensor | None
    splits: int
    window_size: int

    @property
    def _entry_store(self) -> RowStore:
        return self.window if self.entries is None else self.entries

    def tensors(self) -> tuple[Tensor, ...]:
        """Return queries, rows, selection and tables, as kernels take them."""
        paging = self.paging
        return (
            self.q_THC,
            self.fresh_TB,
            self.window.memory,
            self._entry_store.memory,
            paging.positions_T if self.selected_TK is None else self.selected_TK,
            paging.positions_T,
            paging.sequence_T,
            paging.first_S,
            paging.rows_S,
            paging.grow_SP,
            paging.window_SP,
            paging.window_first_S,
        )

    def columns(self) -> tuple[int, int]:
        """Return how far apart the sequences' pages are in their two tables."""
        return self.paging.grow_SP.stride(0), self.paging.window_SP.stride(0)

    def shares(self) -> tuple[Tensor, Tensor]:
        """Return places for what each share of the rows adds up to, and for its peak and total, float32 [splits, T, H, C or 2]."""
        tokens, heads, channels = self.q_THC.shape
        parts = torch.empty(self.splits, tokens, heads, channels, dtype=torch.float32, device=self.q_THC.device)
        return parts, torch.empty(self.splits, tokens, heads, 2, dtype=torch.float32, device=self.q_THC.device)

    def layer(self, rows: int) -> dict[str, int]:
        """Return what is compiled in of the layer; a piece has so many ``rows``."""
        fmt = self.window.format
        assert isinstance(fmt, Fp8Kv)
        return {
            "H": self.q_THC.shape[1],
            "NOPE": fmt.nope,
            "RATIO": max(self.ratio, 1),
            "TOP_K": 0 if self.selected_TK is None else self.selected_TK.shape[1],
            "WINDOW": self.window_size,
            "SPLITS": self.splits,
            "ROWS": rows,
            "GPU": on_gpu(self.q_THC.device),
        }

    def places(self) -> dict[str, int]:
        """Return what is compiled in of where rows lie."""
        return {
            "FRESH_ROW": self.fresh_TB.stride(0),
            "WINDOW_BYTES": self.window.memory.shape[1],
            "WINDOW_ROWS": self.window.rows_per_page,
            "ENTRY_BYTES": self._entry_store.memory.shape[1],
            "ENTRY_ROWS": 0 if self.entries is None else self.entries.rows_per_page,
        }
