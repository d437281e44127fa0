"""Sequence state on one device: the tensors of a ``StateSpec``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4lite.device import fill_storage, free_storage, holds_storage
from dsv4lite.kernels.dispatch import send
from dsv4lite.kernels.rows import RowStore
from dsv4lite.state.spec import Lifetime, SharedStore, SlotSpec, StateSizes, StateSpec, StoreSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """State of one layer, by the names of its spec.

    Attributes:
        stores: Rows in pages.
        slots: float32 [slots, copies, *shape]: copy 0 is the state after a step, or copy i that after token i of a verify step.
    """

    stores: dict[str, RowStore] = field(default_factory=dict)
    slots: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotStack:
    """The slot tensors of all layers with equal specs: one operation changes those of all layers.

    Attributes:
        slots: float32 [layers, slots, copies, *shape].
        fill: Initial values, float32 [shape[-2], 1].
        kept: What snapshots keep, float32 [layers, snapshots, kept, …]; ``None`` if they keep nothing.
    """

    slots: Tensor
    fill: Tensor
    kept: Tensor | None

    @classmethod
    def allocate(cls, spec: SlotSpec, layers: int, copies: int, sizes: StateSizes, device: torch.device) -> SlotStack:
        """Allocate the tensors for so many layers, without their initial values."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(layers, *shape, dtype=torch.float32, device=device)

        return cls(
            slots=empty(sizes.slots, copies, *spec.shape),
            fill=send(torch.tensor(spec.fill, dtype=torch.float32, device="cpu"), device)[:, None],
            kept=empty(sizes.snapshots, spec.snapshot, *spec.shape[1:]) if spec.snapshot else None,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors whose memory can be released."""
        return [self.slots, *(() if self.kept is None else (self.kept,))]

    @property
    def first(self) -> Tensor:
        """Copy 0 of the slots, float32 [layers, slots, *shape]."""
        return self.slots[:, :, 0]

    def initialize(self) -> None:
        """Write the initial values."""
        self.slots.copy_(self.fill)
        if self.kept is not None:
            self.kept.copy_(self.slots[:1, :1, 0, : self.kept.shape[2]])


@dataclass(slots=True)
class StateCache:
    """The tensors of a ``StateSpec``; mutable, owned by one engine.

    Attributes:
        layers: In the order of the spec.
        stacks: The slot tensors of the layers, and their snapshots.
        last_token: int64 [slots + 1], the token sampled last in each slot; the last element is for padding.
    """

    spec: StateSpec
    sizes: StateSizes
    device: torch.device
    layers: list[LayerCache]
    stacks: list[SlotStack]
    last_token: Tensor

    @classmethod
    def allocate(
        cls, spec: StateSpec, sizes: StateSizes, device: torch.device, *, rows: Callable[..., RowStore] = RowStore
    ) -> StateCache:
        """Allocate ``spec.bytes(sizes)`` bytes, with stores that ``rows`` makes."""
        counts: Mapping[Lifetime, int] = {"grow": sizes.grow_pages, "window": sizes.window_pages}
        kinds = Counter(part._replace(name="") for part in spec.slots)
        stacks = {kind: SlotStack.allocate(kind, count, spec.copies, sizes, device) for kind, count in kinds.items()}
        given = Counter[SlotSpec]()  # slot tensors of each kind that have a layer
        layers: list[LayerCache] = []
        for layer in spec.layers:
            stores: dict[str, RowStore] = {}
            slots: dict[str, Tensor] = {}
            for part in layer:
                if isinstance(part, StoreSpec):
                    stores[part.name] = rows(part.format, counts[part.lifetime], part.rows_per_page, device)
                elif isinstance(part, SharedStore):
                    stores[part.name] = layers[part.layer].stores[part.name]
                else:
                    kind = part._replace(name="")
                    slots[part.name] = stacks[kind].slots[given[kind]]
                    given[kind] += 1
            layers.append(LayerCache(stores=stores, slots=slots))
        last_token = torch.zeros(sizes.slots + 1, dtype=torch.int64, device=device)
        for stack in stacks.values():
            stack.initialize()
        return cls(spec, sizes, device, layers, list(stacks.values()), last_token)

    def _tensors(self) -> list[Tensor]:
        return [store.memory for _, _, store in self.stores()] + [tensor for stack in self.stacks for tensor in stack.tensors]

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
            for stack in self.stacks:
                stack.initialize()

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
        for stack in self.stacks:
            stack.first[:, slots] = stack.fill.expand(stack.first.shape[2:])

    def save(self, slots: Tensor, snapshots: Tensor) -> None:
        """Save copy 0 of slots to snapshots, at a 256-token boundary."""
        for stack in self.stacks:
            if stack.kept is not None:
                stack.kept[:, snapshots] = stack.first[:, slots, : stack.kept.shape[2]]

    def restore(self, snapshots: Tensor, slots: Tensor) -> None:
        """Restore copy 0 of slots from snapshots."""
        self.reset(slots)
        for stack in self.stacks:
            if stack.kept is not None:
                stack.first[:, slots, : stack.kept.shape[2]] = stack.kept[:, snapshots]

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy copy 0 of slots to other slots."""
        for stack in self.stacks:
            stack.first[:, target] = stack.first[:, source]

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
