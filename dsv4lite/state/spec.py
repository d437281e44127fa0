"""The state that a model keeps of its sequences, as plain data: stores of rows in pages, and slots, by layer.

    lifetime   page                  content                                         kept
    grow       256 tokens            rows of all tokens, one per ``tokens_per_row``   with the sequence
    window     64 tokens             rows of the last tokens                         until the sliding window has passed them
    slot       one per sequence      tensors that every token changes                while the sequence runs
    snapshot   one per cached prefix parts of a slot at a 256-token boundary          with the cached prefix

The family of a model makes its ``StateSpec``; allocation, memory plan, copies and dumps iterate it. For a model without sliding
window or slots, window pages or slots take no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from dsv4lite.errors import ConfigError
from dsv4lite.kernels.rows import RowFormat, page_bytes
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS

Lifetime = Literal["grow", "window"]
_FLOAT = 4


class StoreSpec(NamedTuple):
    """A store of rows in pages.

    Attributes:
        name: Name of the store within its layer.
        format: Format of a row.
        lifetime: Lifetime of its pages.
        tokens_per_row: Tokens that one row stands for; divides the tokens of a page.
    """

    name: str
    format: RowFormat
    lifetime: Lifetime = "grow"
    tokens_per_row: int = 1

    @property
    def rows_per_page(self) -> int:
        """Rows of one page."""
        return (PAGE_TOKENS if self.lifetime == "grow" else WINDOW_PAGE_TOKENS) // self.tokens_per_row

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return page_bytes(self.format, self.rows_per_page)


class SharedStore(NamedTuple):
    """A store of another layer, which this layer reads under the same name; it takes no memory of its own.

    Attributes:
        name: Name of the store, in both layers.
        layer: Index of the layer that has the store: an earlier layer of the same spec, hence of the same pipeline stage.
    """

    name: str
    layer: int


class SlotSpec(NamedTuple):
    """A float32 tensor of each running sequence.

    Attributes:
        name: Name of the tensor within its layer.
        shape: Shape of one copy, at least two dimensions.
        fill: Initial values, by index of the second-to-last dimension.
        snapshot: Length of the part of the first dimension that a cached prefix keeps; the rest restarts at 256-token boundaries.
    """

    name: str
    shape: tuple[int, ...]
    fill: tuple[float, ...]
    snapshot: int = 0


LayerSpec = tuple[StoreSpec | SharedStore | SlotSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Numbers of pages, slots and snapshots."""

    grow_pages: int
    window_pages: int
    slots: int
    snapshots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The state of one rank's layers.

    Attributes:
        layers: What each layer keeps: the hidden layers of this rank, then those of a drafter.
        copies: Copies of every slot: one, and one more for each draft token that a step can verify.
    """

    layers: tuple[LayerSpec, ...]
    copies: int = 1

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            for part in layer:
                if isinstance(part, SharedStore) and not 0 <= part.layer < i:
                    raise ConfigError(
                        f"layer {i} of a rank reads the store {part.name!r} of layer {part.layer}, which is not before it on this"
                        " rank: choose a pipeline_parallel_size that leaves both on one stage"
                    )

    @property
    def stores(self) -> list[StoreSpec]:
        """All stores."""
        return [part for layer in self.layers for part in layer if isinstance(part, StoreSpec)]

    @property
    def slots(self) -> list[SlotSpec]:
        """All slots."""
        return [part for layer in self.layers for part in layer if isinstance(part, SlotSpec)]

    @property
    def grow_page_bytes(self) -> int:
        """Bytes of 256 tokens that stay with a sequence."""
        return sum(store.page_bytes for store in self.stores if store.lifetime == "grow")

    @property
    def window_page_bytes(self) -> int:
        """Bytes of 64 tokens of every sliding window."""
        return sum(store.page_bytes for store in self.stores if store.lifetime == "window")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's slots, all copies."""
        return _FLOAT * self.copies * sum(prod(slot.shape) for slot in self.slots)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot."""
        return _FLOAT * sum(slot.snapshot * prod(slot.shape[1:]) for slot in self.slots)

    def bytes(self, sizes: StateSizes) -> int:
        """Return all bytes of a state of these sizes."""
        return (
            sizes.grow_pages * self.grow_page_bytes
            + sizes.window_pages * self.window_page_bytes
            + sizes.slots * self.slot_bytes
            + sizes.snapshots * self.snapshot_bytes
        )
