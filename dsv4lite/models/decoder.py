"""What models of all families have in common: embedding and output head, experts of all layers, passes of whole sequences.

Shape suffixes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import store_for_pass
from dsv4lite.models.choices import Choices
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.moe import MoE, rebalance_experts
from dsv4lite.models.partial_sums import embedding, gather_columns
from dsv4lite.models.shard import ModelShard
from dsv4lite.state.paging import make_paging, whole_sequences
from dsv4lite.state.spec import StateSpec
from dsv4lite.state.store import LayerCache, StateCache
from dsv4lite.weights.quant import Matrix, Numerics, Slot, TensorSlot, linear, parameter


class Decoder(nn.Module, ABC):
    """A rank's part of a model; a family's model is a subclass.

    Args:
        drafts: This rank has a drafter, which embeds tokens.

    Attributes:
        embed: This rank's rows of the embedding, on the first stage and beside a drafter.
        head, norm: This rank's rows of the output head, and the weights of the norm before it, on the last stage.
        blocks: This stage's layers, each with ``ffn``, which may be a ``MoE``. The subclass makes them.
        mtps: The MTP blocks, if they are loaded, each with its layer ``block``. The subclass makes them, too.
        skipped: Layers that ``forward`` leaves out; see ``skip_repeated_layers``.
    """

    blocks: tuple[Any, ...]
    mtps: tuple[Any, ...]

    def __init__(self, config: ModelConfig, numerics: Numerics, shard: ModelShard, *, drafts: bool) -> None:
        super().__init__()
        self.numerics, self.shard, rows = numerics, shard, len(shard.vocab)
        self.skipped: frozenset[int] = frozenset()
        if shard.first or drafts:
            self.embed = parameter(rows, config.hidden_size, numerics=numerics, dtype=numerics.dtype)
        if shard.last:
            self.head = Matrix(rows, config.hidden_size, numerics=numerics)
            self.norm = parameter(config.hidden_size, numerics=numerics)

    @abstractmethod
    def spec_of(self, *, drafter: bool) -> StateSpec:
        """Return the state that the layers, and with ``drafter`` the drafter's layers, keep of a sequence."""

    @abstractmethod
    def batch(self, token_ids_T: Tensor, paging: Paging, *, max_tokens: int) -> Any:
        """Return a step as ``forward`` takes it."""

    @abstractmethod
    def kind_of(self, layer: int) -> Hashable:
        """Return what the kernels of a layer depend on."""

    @contextmanager
    def skip_repeated_layers(self) -> Iterator[None]:
        """Skip layers after the second of a kind: they launch no other kernels than the first two. Results are meaningless."""
        layers = self.shard.layers
        kinds = [self.kind_of(layer) for layer in layers]
        self.skipped = frozenset(layer for i, layer in enumerate(layers) if kinds[:i].count(kinds[i]) >= 2)
        try:
            yield
        finally:
            self.skipped = frozenset()

    @property
    def state_spec(self) -> StateSpec:
        """The state of this rank's layers, and of its drafter."""
        return self.spec_of(drafter=bool(self.drafting_blocks))

    @property
    def capturable(self) -> bool:
        """Whether a step that has ``most_tokens`` can be captured in a CUDA graph."""
        dispatchers = [block.ffn.dispatch for block in self.blocks if isinstance(block.ffn, MoE)]
        return all(dispatch is None or dispatch.capturable for dispatch in dispatchers)

    def captures(self, tokens: int, pairs: int, pages: int) -> bool:
        """Return whether a step with prompts may be replayed; see ``models.family.Model``."""
        return True

    @property
    def drafting_blocks(self) -> tuple[Any, ...]:
        """The layers of the drafter."""
        return tuple(mtp.block for mtp in self.mtps)

    def embedded(self, token_ids_T: Tensor) -> Tensor:
        """Return embeddings [T, D]."""
        return embedding(self.shard.mesh.tp, self.embed, self.shard.vocab, token_ids_T)

    def project(self, normed_TD: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [T, V], in ``out`` if given."""
        return gather_columns(self.shard.mesh.tp, lambda place: linear(normed_TD, self.head, torch.float32, out=place), out)

    def take_part(self, most_tokens: int | None = None) -> None:
        """Run this rank's experts on other ranks' tokens, with none of its own; ``most_tokens`` is the one of their batches."""
        for block in self.blocks:
            if isinstance(block.ffn, MoE):
                block.ffn.take_part(most_tokens)

    def mtp_take_part(self, most_tokens: int) -> None:
        """As ``take_part``, for the MTP block."""
        ffn = self.mtps[0].block.ffn
        if isinstance(ffn, MoE):
            ffn.take_part(most_tokens)

    def rebalance(self) -> tuple[dict[str, Slot], list[tuple[float, float]]]:
        """Choose anew which ranks hold which experts; see ``models.moe.rebalance_experts``."""
        named = {f"layers.{i}.ffn.": block.ffn for i, block in enumerate(self.blocks, self.shard.layers.start)}
        named |= {f"mtp.{i}.ffn.": block.ffn for i, block in enumerate(self.drafting_blocks)}
        return rebalance_experts(self.shard.mesh.ep, {name: ffn for name, ffn in named.items() if isinstance(ffn, MoE)})

    def slots(self) -> dict[str, Slot]:
        """Return the slot of every tensor of the checkpoint, by its official name; a scale shares the slot of its matrix."""
        named: dict[str, Slot] = {}
        if self.shard.first or self.drafting_blocks:
            named["embed.weight"] = TensorSlot(self.embed)
        if self.shard.last:
            named |= {"head.weight": self.head.whole(), "norm.weight": TensorSlot(self.norm)}
        for i, block in enumerate(self.blocks, self.shard.layers.start):
            named.update(block.slots(f"layers.{i}."))
        for i, mtp in enumerate(self.mtps):
            named.update(mtp.slots(f"mtp.{i}."))
        return named

    def prepare(self, *sequences: Sequence[int], drafter: bool = False) -> tuple[Any, list[LayerCache]]:
        """Return a step of whole sequences, and fresh state for it; gradients flow through the state of unquantized models."""
        whole, sizes = whole_sequences(sequences)
        cache = StateCache.allocate(self.spec_of(drafter=drafter), sizes, self.numerics.device, rows=store_for_pass)
        ids_T, paging, longest = make_paging(whole, self.numerics.device)
        return self.batch(ids_T, paging, max_tokens=longest), cache.layers

    def one_pass(self, *sequences: Sequence[int], given: Choices | None = None) -> Tensor:
        """Run whole sequences without a lasting cache, differentiably; return what ``forward`` returns of their tokens, in order.

        Args:
            sequences: Token ids, T in all.
            given: Choices that the model must make; see ``models.batch.Batch``.
        """
        batch, caches = self.prepare(*sequences)
        batch.given = given
        residual: Tensor = self(batch, caches)
        return residual
