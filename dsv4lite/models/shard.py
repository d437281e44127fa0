"""How the ranks of a mesh share a model: which layouts divide it, and what one rank holds.

Within a pipeline stage, tp splits attention heads, dense matrices and the vocabulary, and ep distributes whole routed experts. If
tp exceeds ep, ``tp / ep`` ranks share each routed expert by its width. The family's ``Tensors`` say how each tensor is split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

import torch

from dsv4lite.errors import ConfigError
from dsv4lite.kernels.experts import can_tile
from dsv4lite.layout import Layout
from dsv4lite.models.config import ModelConfig
from dsv4lite.parallel.eplb import Placement, balance
from dsv4lite.parallel.experts import Dispatcher, DispatcherFactory, ExpertRanks, equal_part, make_dispatcher
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.shard import Shards
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.tensors import FORMATS, Tensors, stored_tensors

UNSHARED_TOKENS = 128  # up to here the shared expert takes as long as reading its weights: splitting the tokens saves nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShard:
    """One rank's shard of a model.

    Attributes:
        mesh: The rank's place and its collectives.
        vocab: Token ids whose rows of embedding and head the rank holds.
        layers: Hidden layers of the rank's pipeline stage.
        dispatcher, redundant_experts: See ``ModelSource.build``.
    """

    mesh: Mesh
    vocab: range
    layers: range
    dispatcher: str | DispatcherFactory
    redundant_experts: int | None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        tensors: Tensors,
        mesh: Mesh,
        dispatcher: str | DispatcherFactory = "auto",
        redundant_experts: int | None = None,
    ) -> ModelShard:
        """Return the shard of the mesh's rank.

        Raises:
            ConfigError: The mesh's layout does not divide the model.
        """
        check_layout(config, tensors, mesh.layout)
        part = config.vocab_size // mesh.layout.tp
        return cls(
            mesh=mesh,
            vocab=range(mesh.tp.rank * part, (mesh.tp.rank + 1) * part),
            layers=stages(config, tensors, mesh.layout.pp)[mesh.pp.rank],
            dispatcher=dispatcher,
            redundant_experts=redundant_experts,
        )

    @property
    def first(self) -> bool:
        """Whether this is the first pipeline stage, which holds the embedding."""
        return self.mesh.pp.rank == 0

    @property
    def last(self) -> bool:
        """Whether this is the last pipeline stage, which holds the head and the drafter."""
        return self.mesh.pp.rank == self.mesh.pp.size - 1

    def part(self, size: int) -> int:
        """Return a size divided by tp: heads, or the width of a dense matrix."""
        return size // self.mesh.layout.tp

    def expert_part(self, width: int) -> int:
        """Return how much of a routed expert's width one rank holds."""
        return width // width_ranks(self.mesh.layout)

    @property
    def gathered(self) -> int:
        """Number of groups of ranks with different tokens that share the routed experts, this rank's group included."""
        return max(1, self.mesh.ep.size // self.mesh.peers.size)

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of this rank's part of a result in ``dtype``: float32 if the parts must be summed over tp."""
        return dtype if self.mesh.tp.size == 1 else torch.float32

    def first_placement(self, config: ModelConfig) -> Placement:
        """Return the initial placement of experts."""
        ranks, extra = self.mesh.ep.size, self.redundant_experts
        if not extra:
            return Placement.consecutive(config.num_experts, ranks)
        if extra > (most := config.num_experts * (ranks - 1)):
            raise ConfigError(
                f"redundant_experts={extra} must be at most {most}, with which each of ep={ranks} ranks has all experts"
            )
        return balance([1] * config.num_experts, slots=config.num_experts + extra, ranks=ranks)

    def make_dispatcher(self, slots_per_rank: int, numerics: Numerics) -> Dispatcher | None:
        """Return the dispatcher of one layer; ``None`` if this rank holds all experts whole."""
        if self.mesh.ep.size == 1 and self.mesh.peers.size == 1:
            return None
        ranks = ExpertRanks(
            ep=self.mesh.ep,
            peers=self.mesh.peers,
            slots_per_rank=slots_per_rank,
            dtype=numerics.dtype,
            captured=numerics.device.type != "cpu",
        )
        return make_dispatcher(self.dispatcher, ranks)

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank belongs to the first copy of the attention part, which alone adds results that all copies compute."""
        return self.mesh.place.copy == 0

    def shared_tokens(self, tokens: int, *, any_order: bool = True) -> slice:
        """Return which of ``tokens`` tokens this rank's shared expert computes.

        If the attention part has several copies, each computes a part of a large step. Without ``any_order`` the first copy
        computes all tokens, because the order of a token's sum must not depend on its place in the step.
        """
        copies = self.mesh.layout.copies
        if copies == 1 or tokens <= UNSHARED_TOKENS or not any_order:
            return slice(0, tokens if self.is_first_copy else 0)
        return equal_part(tokens, self.mesh.place.copy, copies)


def width_ranks(layout: Layout) -> int:
    """Return how many ranks share one routed expert."""
    return max(1, layout.tp // layout.ep)


def shards_of(config: ModelConfig, tensors: Tensors, layout: Layout, rank: int) -> Shards:
    """Return the rules by which a rank takes its part of each checkpoint tensor."""
    place = layout.place(rank)
    axes = {
        "tp": (place.tp, layout.tp),
        "ep": (place.ep, layout.ep),
        "pp": (place.pp, layout.pp),
        "width": (place.tp // layout.ep, width_ranks(layout)),
    }
    return Shards(
        table=tensors.sharding,
        axes=axes,
        stages=stages(config, tensors, layout.pp),
        num_experts=config.num_experts,
        dense=frozenset(layer for layer in range(config.num_hidden_layers) if not config.has_experts(layer)),
    )


def check_layout(config: ModelConfig, tensors: Tensors, layout: Layout) -> None:
    """Check that a layout divides a model. Scale blocks are checked later, when tensors are cut.

    Raises:
        ConfigError: Names the size that does not divide.
    """
    tp, ep = layout.tp, layout.ep
    for name, count, axis in tensors.divides(config):
        size = getattr(layout, axis)
        if count % size:
            raise ConfigError(f"{name}={count} cannot be shared equally by {axis}={size} ranks; choose a divisor")
    if ep > 1 and not config.num_experts:
        raise ConfigError(f"ep={ep}: this model has no routed experts to share; leave it at 1")
    if tp % ep and ep % tp:
        raise ConfigError(f"ep={ep} must divide tp={tp} or be a multiple of it: ranks of tp share either experts or their width")
    if layout.copies > 1 and layout.dp > 1:
        raise ConfigError(f"{layout}: ep exceeds tp x dp, so replicas would have copies; raise dp to {layout.dp * layout.copies}")
    if layout.pp > max(1, config.num_hidden_layers):
        raise ConfigError(f"pp={layout.pp} stages for {config.num_hidden_layers} layers: each needs at least one; lower pp")


def layouts_for(config: ModelConfig, tensors: Tensors, devices: int, block: tuple[int, int] | None = None) -> tuple[Layout, ...]:
    """Return every layout of ``devices`` devices that divides a model, those with fewer stages first; replicas always do.

    Args:
        block: For weight-only formats, rows and columns of which each cut must be a multiple.
    """
    found = []
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for pp, tp in ((pp, tp) for pp, tp in product(sizes, sizes) if devices % (pp * tp) == 0):
        stage = devices // pp
        for ep in dict.fromkeys((1, tp, stage)):
            layout = Layout(tp=tp, ep=ep, dp=stage // tp, pp=pp)
            try:
                check_layout(config, tensors, layout)
                _check_blocks(config, tensors, layout, block)
            except ConfigError:
                continue
            found.append(layout)
    return tuple(found)


def _check_blocks(config: ModelConfig, tensors: Tensors, layout: Layout, block: tuple[int, int] | None) -> None:
    """Raise ``ConfigError`` if a cut goes through a scale block, or through the tiles of experts."""
    if not config.quantized and block is None:
        return
    parts = width_ranks(layout)
    if config.quantized and config.num_experts and parts > 1 and not can_tile(config.hidden_size, config.expert_width // parts):
        raise ConfigError(f"{layout} cuts experts of {config.expert_width} through tiles")
    shards = shards_of(config, tensors, replace(layout, pp=1), 0)  # stages cut no matrix, and take time to find
    blocks = {"dense": block or FORMATS["fp8"].block, "expert": block or FORMATS[config.expert_format].block}
    for name, spec in tensors.specs(_one_expert(config)).items():
        shards.cut(name, spec.shape, blocks.get(spec.kind, ()))


def _one_expert(config: ModelConfig) -> ModelConfig:
    """Return the config with one routed expert per layer: all experts of a layer have the same shapes. Dense models stay."""
    if not config.num_experts:
        return config
    return replace(config, num_experts=1, experts_per_token=1, expert_groups=1, top_groups=1)


def stages(config: ModelConfig, tensors: Tensors, count: int) -> tuple[range, ...]:
    """Return the layers of every pipeline stage; the cut minimises the bytes of weights of the largest stage."""
    layers = config.num_hidden_layers
    if count == 1:
        return (range(layers),)
    weights = [0] * layers
    for name, spec in tensors.specs(_one_expert(config)).items():
        copies = config.num_experts if ".experts." in name else 1
        experts = config.expert_format if config.quantized else "unquantized"
        stored = stored_tensors(name, spec, quantized=config.quantized, expert_format=experts)
        place = int(name.split(".")[1]) if name.startswith("layers.") else 0 if name.startswith("embed") else layers - 1
        weights[place] += copies * sum(tensor.nbytes for tensor in stored.values())
    before = [0, *accumulate(weights)]
    # Dynamic programming. ``row[end]`` is the best cut of the first ``end`` layers: bytes of its largest stage, then the sum of
    # squares, which evens out the other stages, then the ends of the stages.
    first: list[tuple[int, int, tuple[int, ...]]] = [(before[end], before[end] ** 2, (0, end)) for end in range(layers + 1)]
    best = [first]
    for parts in range(2, count + 1):
        row = [best[-1][end] for end in range(parts)]
        for end in range(parts, layers + 1):
            cuts = ((*best[-1][cut], before[end] - before[cut]) for cut in range(parts - 1, end))
            row.append(min((max(most, last), squares + last**2, (*ends, end)) for most, squares, ends, last in cuts))
        best.append(row)
    return tuple(range(a, b) for a, b in pairwise(best[-1][layers][2]))
