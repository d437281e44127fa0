"""Sequence state on one device: stores of rows by layer, accumulators by slot, and what every byte is for.

grow pages     256 tokens: compressed rows and index keys of every layer      with the sequence
window pages   64 tokens: raw kv rows of every layer                           slide away
carry slots    compressor accumulators of every layer                          one per running sequence
snapshots      what a carry slot holds at a 256-token border                   with a cached prefix
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4lite.kernels.compress import OVERLAP_RATIO, empty_carry
from dsv4lite.kernels.rows import Fp4Key, Fp8Kv, PlainRow, RowFormat, RowStore, page_bytes
from dsv4lite.models.deepseek_v4.config import PAGE_TOKENS, V4Config

GROW_PAGE = PAGE_TOKENS
WINDOW_PAGE = 64


@dataclass(slots=True)
class LayerCache:
    """State of one layer.

    Attributes:
        window: Raw kv rows.
        entries: Compressed rows, where the layer compresses.
        keys: Index keys of a csa layer, at the addresses of its entries.
        carry: Accumulators float32 [slots, copies, A, 3, C]: copy 0 after a run, or one for each beginning of a run with drafts.
        key_carry: Those of the index keys.
    """

    window: RowStore
    entries: RowStore | None = None
    keys: RowStore | None = None
    carry: Tensor | None = None
    key_carry: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """How many of each."""

    grow_pages: int
    window_pages: int
    slots: int
    snapshots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Formats of the rows of a model, and the bytes they take.

    Attributes:
        kv: Format of raw and compressed kv rows.
        key: Format of index keys.
        ratios: Compression of each layer that has state, MTP blocks included.
        copies: Of a slot's accumulators: one, and one more for every draft that a run can have.
    """

    kv: RowFormat
    key: RowFormat
    ratios: tuple[int, ...]
    copies: int = 1

    @classmethod
    def of(
        cls,
        config: V4Config,
        *,
        dtype: torch.dtype,
        quantized: bool,
        with_mtp: bool,
        drafts: int = 0,
        layers: range | None = None,
    ) -> StateLayout:
        """Choose formats: packed FP8 rows and FP4 keys for quantized models, plain rows otherwise.

        Args:
            config: The model.
            dtype: Of plain rows.
            quantized: Whether the model is.
            with_mtp: Whether the blocks of a drafter have state.
            drafts: Most drafts of a sequence in a step.
            layers: Hidden layers that have state; default is all.
        """
        held = slice(None, config.num_hidden_layers) if layers is None else slice(layers.start, layers.stop)
        ratios, copies = config.ratios[held] + (config.ratios[config.num_hidden_layers :] if with_mtp else ()), 1 + drafts
        if quantized:
            return cls(kv=Fp8Kv(config.nope_dim, config.rope_dim), key=Fp4Key(config.index_dim), ratios=ratios, copies=copies)
        return cls(kv=PlainRow(config.head_dim, dtype), key=PlainRow(config.index_dim, dtype), ratios=ratios, copies=copies)

    @property
    def grow_page_bytes(self) -> int:
        """Bytes of 256 tokens that stay with a sequence."""
        total = 0
        for ratio in self.ratios:
            if ratio:
                total += page_bytes(self.kv, GROW_PAGE // ratio)
            if ratio == OVERLAP_RATIO:
                total += page_bytes(self.key, GROW_PAGE // ratio)
        return total

    @property
    def window_page_bytes(self) -> int:
        """Bytes of 64 tokens of every layer's window."""
        return len(self.ratios) * page_bytes(self.kv, WINDOW_PAGE)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's accumulators."""
        total = 0
        for ratio in self.ratios:
            if ratio == OVERLAP_RATIO:
                total += 2 * 3 * 4 * (self.kv.width + self.key.width)
            elif ratio:
                total += 3 * 4 * self.kv.width
        return self.copies * total

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot: at a border only the csa layers' previous group matters."""
        return sum(3 * 4 * (self.kv.width + self.key.width) for ratio in self.ratios if ratio == OVERLAP_RATIO)

    def bytes(self, sizes: StateSizes) -> int:
        """Return all bytes of a state of these sizes."""
        return (
            sizes.grow_pages * self.grow_page_bytes
            + sizes.window_pages * self.window_page_bytes
            + sizes.slots * self.slot_bytes
            + sizes.snapshots * self.snapshot_bytes
        )


@dataclass(slots=True)
class StateCache:
    """The tensors of a ``StateLayout``; mutable, owned by one engine."""

    layout: StateLayout
    sizes: StateSizes
    device: torch.device
    layers: list[LayerCache]
    snapshots: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def allocate(
        cls, layout: StateLayout, sizes: StateSizes, device: torch.device, *, rows: type[RowStore] = RowStore
    ) -> StateCache:
        """Allocate ``layout.bytes(sizes)`` bytes, with stores of the class ``rows``."""
        layers, snapshots = [], []
        for ratio in layout.ratios:
            layer = LayerCache(rows(layout.kv, sizes.window_pages, WINDOW_PAGE, device))
            if ratio:
                layer.entries = rows(layout.kv, sizes.grow_pages, GROW_PAGE // ratio, device)
                sets = 2 if ratio == OVERLAP_RATIO else 1
                layer.carry = empty_carry(sizes.slots, layout.copies, sets, layout.kv.width, device=device)
            if ratio == OVERLAP_RATIO:
                layer.keys = rows(layout.key, sizes.grow_pages, GROW_PAGE // ratio, device)
                layer.key_carry = empty_carry(sizes.slots, layout.copies, 2, layout.key.width, device=device)
                snapshots.append(
                    (
                        empty_carry(sizes.snapshots, layout.kv.width, device=device),
                        empty_carry(sizes.snapshots, layout.key.width, device=device),
                    )
                )
            layers.append(layer)
        return cls(layout, sizes, device, layers, snapshots)

    @property
    def nbytes(self) -> int:
        """Bytes really held."""
        total = sum(a.nbytes + b.nbytes for a, b in self.snapshots)
        for layer in self.layers:
            for part in (layer.window, layer.entries, layer.keys, layer.carry, layer.key_carry):
                if part is not None:
                    total += part.nbytes
        return total

    def _carries(self) -> list[Tensor]:
        return [carry for layer in self.layers for carry in (layer.carry, layer.key_carry) if carry is not None]

    def reset(self, slots: Tensor) -> None:
        """Empty the accumulators of slots int64 [N], in copy 0."""
        for carry in self._carries():
            carry[slots, 0] = 0.0
            carry[slots, 0, :, 0] = float("-inf")

    def save(self, slots: Tensor, snapshots: Tensor) -> None:
        """Keep what slots hold in copy 0, at a 256-token border."""
        for layer, (main, key) in zip(self._overlapping(), self.snapshots, strict=True):
            assert layer.carry is not None and layer.key_carry is not None
            main[snapshots] = layer.carry[slots, 0, 0]
            key[snapshots] = layer.key_carry[slots, 0, 0]

    def restore(self, snapshots: Tensor, slots: Tensor) -> None:
        """Set slots to what snapshots hold."""
        self.reset(slots)
        for layer, (main, key) in zip(self._overlapping(), self.snapshots, strict=True):
            assert layer.carry is not None and layer.key_carry is not None
            layer.carry[slots, 0, 0] = main[snapshots]
            layer.key_carry[slots, 0, 0] = key[snapshots]

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy accumulators, those in copy 0, between slots."""
        for carry in self._carries():
            carry[target, 0] = carry[source, 0]

    def copy_grow_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy grow pages in every layer."""
        for layer in self.layers:
            for store in (layer.entries, layer.keys):
                if store is not None:
                    store.copy_pages(source, target)

    def copy_window_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy window pages in every layer."""
        for layer in self.layers:
            layer.window.copy_pages(source, target)

    def _overlapping(self) -> list[LayerCache]:
        return [layer for layer in self.layers if layer.key_carry is not None]
