"""Sequence state on one device: the tensors of a ``StateSpec``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4lite.device import fill_storage, free_storage, holds_storage
from dsv4lite.kernels.dispatch import send
from dsv4lite.kernels.rows import RowStore
from dsv4lite.state.spec import Lifetime, SharedStore, StateSizes, StateSpec, StoreSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """State of one layer, by the names of its spec.

    Attributes:
        stores: Rows in pages.
        slots: float32 [slots, copies, *shape]: copy 0 is the state after a step, or copy i that after token i of a verify step.
    """

    stores: dict[str, RowStore] = field(default_factory=dict)
    slots: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class StateCache:
    """The tensors of a ``StateSpec``; mutable, owned by one engine.

    Attributes:
        layers: In the order of the spec.
        snapshots: Slot tensors that snapshots keep parts of, with those parts, float32 [snapshots, kept, …].
        last_token: int64 [slots + 1], the token sampled last in each slot; the last element is for padding.
    """

    spec: StateSpec
    sizes: StateSizes
    device: torch.device
    layers: list[LayerCache]
    snapshots: list[tuple[Tensor, Tensor]]
    last_token: Tensor
    _slots: list[tuple[Tensor, Tensor]]  # slot tensors and their initial values

    @classmethod
    def allocate(
        cls, spec: StateSpec, sizes: StateSizes, device: torch.device, *, rows: Callable[..., RowStore] = RowStore
    ) -> StateCache:
        """Allocate ``spec.bytes(sizes)`` bytes, with stores that ``rows`` makes."""
        counts: Mapping[Lifetime, int] = {"grow": sizes.grow_pages, "window": sizes.window_pages}
        layers: list[LayerCache] = []
        snapshots, filled = [], []
        for layer in spec.layers:
            stores: dict[str, RowStore] = {}
            slots: dict[str, Tensor] = {}
            for part in layer:
                if isinstance(part, StoreSpec):
                    stores[part.name] = rows(part.format, counts[part.lifetime], part.rows_per_page, device)
                elif isinstance(part, SharedStore):
                    stores[part.name] = layers[part.layer].stores[part.name]
                else:
                    fill = send(torch.tensor(part.fill, dtype=torch.float32, device="cpu"), device)[:, None]
                    slot = slots[part.name] = torch.empty(sizes.slots, spec.copies, *part.shape, dtype=torch.float32, device=device)
                    filled.append((slot, fill))
                    if part.snapshot:
                        kept = torch.empty(sizes.snapshots, part.snapshot, *part.shape[1:], dtype=torch.float32, device=device)
                        snapshots.append((slot, kept))
            layers.append(LayerCache(stores=stores, slots=slots))
        last_token = torch.zeros(sizes.slots + 1, dtype=torch.int64, device=device)
        cache = cls(spec, sizes, device, layers, snapshots, last_token, filled)
        cache._fill_slots()
        return cache

    def _fill_slots(self) -> None:
        for slot, fill in self._slots:
            slot.copy_(fill)
        for slot, kept in self.snapshots:
            kept.copy_(slot[0, 0, : kept.shape[1]])

    def _tensors(self) -> list[Tensor]:
        tensors = [slot for slot, _ in self._slots] + [kept for _, kept in self.snapshots]
        return [store.memory for _, _, store in self.stores()] + tensors

    def release_memory(self) -> None:
        """Free the memory; nothing may be read or written until ``restore_memory``."""
        for tensor in self._tensors():
            free_storage(tensor)

    def restore_memory(self) -> None:
        """Allocate memory that was freed, with its initial contents."""
        freed = [tensor for tensor in self._tensors() if not holds_storage(tensor)]
        for tensor in freed:
            fill_storage(tensor)
            tensor.zero_()
        if freed:
            self._fill_slots()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors())

    def stores(self, first: int = 0) -> Iterator[tuple[str, StoreSpec, RowStore]]:
        """Yield every store of the layers from ``first`` on, as ``layers.I.name``, with its spec."""
        for i in range(first, len(self.layers)):
            for part in self.spec.layers[i]:
                if isinstance(part, StoreSpec):
                    yield f"layers.{i}.{part.name}", part, self.layers[i].stores[part.name]

    def slots(self) -> dict[str, Tensor]:
        """Return every slot tensor float32 [slots, copies, …] by its name, ``layers.I.name``."""
        return {f"layers.{i}.{name}": slot for i, layer in enumerate(self.layers) for name, slot in layer.slots.items()}

    def reset(self, slots: Tensor) -> None:
        """Set copy 0 of slots int64 [N] to its initial values."""
        for slot, fill in self._slots:
            slot[slots, 0] = fill.expand(slot.shape[2:])

    def save(self, slots: Tensor, snapshots: Tensor) -> None:
        """Save copy 0 of slots to snapshots, at a 256-token boundary."""
        for slot, kept in self.snapshots:
            kept[snapshots] = slot[slots, 0, : kept.shape[1]]

    def restore(self, snapshots: Tensor, slots: Tensor) -> None:
        """Restore copy 0 of slots from snapshots."""
        self.reset(slots)
        for slot, kept in self.snapshots:
            slot[slots, 0, : kept.shape[1]] = kept[snapshots]

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy copy 0 of slots to other slots."""
        for slot, _ in self._slots:
            slot[target, 0] = slot[source, 0]

    def zero_rows(self, first: int, pages: Tensor, rows: Tensor) -> None:
        """Zero rows int64 [N] of window pages int64 [N], or of grow pages if there are none, in the layers from ``first`` on."""
        lifetime = "window" if self.spec.window_page_bytes else "grow"
        for _, part, store in self.stores(first):
            if part.lifetime == lifetime:
                store.clear(pages * store.rows_per_page + rows)

    def copy_pages(self, lifetime: Lifetime, source: Tensor, target: Tensor) -> None:
        """Copy pages in every store with this lifetime."""
        for _, part, store in self.stores():
            if part.lifetime == lifetime:
                store.copy_pages(source, target)
