"""What both kernels of attention on packed pages are launched with, for few tokens and for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import on_gpu
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import Fp8Kv, RowStore


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedInputs:
    """Arguments of ``attention.paged_attention`` that say which rows there are, and who looks at them."""

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
        top_k = 0 if self.selected_TK is None else self.selected_TK.shape[1]
        constants = self.layer_of(self.q_THC.shape[1], fmt.nope, self.ratio, top_k, self.splits, rows)
        return constants | {"WINDOW": self.window_size, "GPU": on_gpu(self.q_THC.device)}

    def places(self) -> dict[str, int]:
        """Return what is compiled in of where rows lie."""
        return {
            "FRESH_ROW": self.fresh_TB.stride(0),
            "WINDOW_BYTES": self.window.memory.shape[1],
            "WINDOW_ROWS": self.window.rows_per_page,
            "ENTRY_BYTES": self._entry_store.memory.shape[1],
            "ENTRY_ROWS": 0 if self.entries is None else self.entries.rows_per_page,
        }

    @staticmethod
    def layer_of(heads: int, nope: int, ratio: int, top_k: int, splits: int, rows: int) -> dict[str, int]:
        """Return what is compiled in of a layer of V4 on a GPU, see ``layer``."""
        sizes = {"H": heads, "NOPE": nope, "RATIO": max(ratio, 1), "TOP_K": top_k}
        return {**sizes, "WINDOW": 128, "SPLITS": splits, "ROWS": rows, "GPU": True}

    @staticmethod
    def places_of(nope: int, ratio: int, fresh_row: int) -> dict[str, int]:
        """Return what is compiled in of where rows of V4's layers lie, see ``places``."""
        page = 65 * (nope + 128)
        return {
            "FRESH_ROW": fresh_row,
            "WINDOW_BYTES": page,
            "WINDOW_ROWS": 64,
            "ENTRY_BYTES": page,
            "ENTRY_ROWS": 256 // ratio if ratio else 0,
        }

    @staticmethod
    def signature_of(names: Sequence[str]) -> dict[str, str]:
        """Return the types of those parameters of a kernel that are not compiled in."""
        tables = ("positions", "sequences", "firsts", "first_rows", "grow", "window_pages", "window_firsts", "selected")
        types = {
            **dict.fromkeys(("q", "out"), "*bf16"),
            **dict.fromkeys(("fresh", "window", "entries"), "*u8"),
            **dict.fromkeys(tables, "*i32"),
            **dict.fromkeys(("parts", "stats", "sink", "cos", "sin"), "*fp32"),
            **dict.fromkeys(("grow_columns", "window_columns", "q_row"), "i32"),
            **dict.fromkeys(("scale", "eps"), "fp32"),
        }
        return {name: types[name] for name in names if name in types}
