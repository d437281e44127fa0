"""How the ranks of a mesh share a model: which layouts divide, and what one rank holds.

Within a pipeline stage, tp cuts attention heads, dense matrices and the vocabulary. Routed experts go to the ranks of ep whole;
where tp has more ranks than ep, each is cut by width among ``tp / ep`` of them. The family's ``Tensors`` say how each is cut.
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

UNSHARED_TOKENS = 128  # the shared expert of so many takes as long as reading its weights: splitting them saves nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShard:
    """One rank's shard of a model.

    Attributes:
        mesh: The rank's place and its collectives.
        vocab: Token ids whose rows of embedding and head it holds.
        layers: Hidden layers.
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
            ConfigError: The model cannot be shared so.
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
        """Whether tokens enter here: the stage holds the embedding."""
        return self.mesh.pp.rank == 0

    @property
    def last(self) -> bool:
        """Whether logits leave here: the stage holds the head, and the MTP blocks."""
        return self.mesh.pp.rank == self.mesh.pp.size - 1

    def part(self, size: int) -> int:
        """Return this rank's part of a size that tp divides: heads, or the width of a dense matrix."""
        return size // self.mesh.layout.tp

    def expert_part(self, width: int) -> int:
        """Return this rank's part of the width of a routed expert that it holds."""
        return width // width_ranks(self.mesh.layout)

    @property
    def gathered(self) -> int:
        """How many different tokens' ranks share the experts with this one."""
        return max(1, self.mesh.ep.size // self.mesh.peers.size)

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of this rank's part of a result that is wanted in ``dtype``: partial sums are float32."""
        return dtype if self.mesh.tp.size == 1 else torch.float32

    def first_placement(self, config: ModelConfig) -> Placement:
        """Return where experts are at the start."""
        ranks = self.mesh.ep.size
        if not self.redundant_experts:
            return Placement.consecutive(config.num_experts, ranks)
        return balance([1] * config.num_experts, slots=config.num_experts + self.redundant_experts, ranks=ranks)

    def make_dispatcher(self, slots_per_rank: int, numerics: Numerics) -> Dispatcher | None:
        """Return the dispatcher of one layer; ``None`` if this rank has all of every expert."""
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
    def leads(self) -> bool:
        """Whether this rank is of the first copy, which alone adds what every copy computes."""
        return self.mesh.place.copy == 0

    def shared_tokens(self, tokens: int, *, any_order: bool = True) -> slice:
        """Return which of so many tokens this rank's shared expert works on.

        Where there are copies, each takes a part of many tokens. Without ``any_order`` the first one takes all: the order of a
        token's sum is not to depend on its place in the step.
        """
        copies = self.mesh.layout.copies
        if copies == 1 or tokens <= UNSHARED_TOKENS or not any_order:
            return slice(0, tokens if self.leads else 0)
        return equal_part(tokens, self.mesh.place.copy, copies)


def width_ranks(layout: Layout) -> int:
    """Return how many ranks share one routed expert."""
    return max(1, layout.tp // layout.ep)


def shards_of(config: ModelConfig, tensors: Tensors, layout: Layout, rank: int) -> Shards:
    """Return which part of every tensor of the checkpoint belongs to a rank."""
    place = layout.place(rank)
    axes = {
        "tp": (place.tp, layout.tp),
        "ep": (place.ep, layout.ep),
        "pp": (place.pp, layout.pp),
        "width": (place.tp // layout.ep, width_ranks(layout)),
    }
    return Shards(table=tensors.sharding, axes=axes, num_experts=config.num_experts)


def check_layout(config: ModelConfig, tensors: Tensors, layout: Layout) -> None:
    """Check that a model can be shared in a layout. Scale blocks are checked later, when tensors are cut.

    Raises:
        ConfigError: Names what does not divide.
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
        raise ConfigError(f"{layout}: ep exceeds tp x dp, so ranks repeat each other; raise dp to {layout.dp * layout.copies}")
    if layout.pp > max(1, config.num_hidden_layers):
        raise ConfigError(f"pp={layout.pp} stages for {config.num_hidden_layers} layers; each needs at least one")


def layouts_for(config: ModelConfig, tensors: Tensors, devices: int, block: tuple[int, int] | None = None) -> tuple[Layout, ...]:
    """Return every layout of so many devices in which a model can be shared, those with fewer stages first.

    Args:
        block: Of weight-only formats, the rows and columns that ranks can cut matrices by.

    Raises:
        ConfigError: There is none.
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
    if not found:
        raise ConfigError(f"devices={devices}: no layout of so many shares this model equally; try another number")
    return tuple(found)


def _check_blocks(config: ModelConfig, tensors: Tensors, layout: Layout, block: tuple[int, int] | None) -> None:
    """Raise ``ConfigError`` if a cut goes through a scale block, or through the tiles of experts."""
    if not config.quantized and block is None:
        return
    if config.quantized and config.num_experts and not can_tile(config.hidden_size, config.expert_width // width_ranks(layout)):
        raise ConfigError(f"{layout} cuts experts of {config.expert_width} through tiles")
    shards = shards_of(config, tensors, layout, 0)
    blocks = {"dense": block or FORMATS["fp8"].block, "expert": block or FORMATS[config.expert_format].block}
    for name, spec in tensors.specs(_one_expert(config)).items():
        shards.cut(name, spec.shape, blocks.get(spec.kind, ()))


def _one_expert(config: ModelConfig) -> ModelConfig:
    """Return a config of one routed expert per layer, as all of a layer are alike; a dense model stays as it is."""
    if not config.num_experts:
        return config
    return replace(config, num_experts=1, experts_per_token=1, expert_groups=1, top_groups=1)


def stages(config: ModelConfig, tensors: Tensors, count: int) -> tuple[range, ...]:
    """Return the layers of every pipeline stage, such that the stage with the most bytes has as few as can be."""
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
    # The best cut of the first ``end`` layers: most bytes of a stage, then the sum of squares, which evens out the others; ends.
    first: list[tuple[int, int, tuple[int, ...]]] = [(before[end], before[end] ** 2, (0, end)) for end in range(layers + 1)]
    best = [first]
    for parts in range(2, count + 1):
        row = [best[-1][end] for end in range(parts)]
        for end in range(parts, layers + 1):
            cuts = ((*best[-1][cut], before[end] - before[cut]) for cut in range(parts - 1, end))
            row.append(min((max(most, last), squares + last**2, (*ends, end)) for most, squares, ends, last in cuts))
        best.append(row)
    return tuple(range(a, b) for a, b in pairwise(best[-1][layers][2]))
