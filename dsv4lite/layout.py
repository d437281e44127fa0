"""How many ranks an engine has along each axis, and where a rank stands. Plain integers.

    world = pp x max(tp x dp, ep)        ranks count pipeline stage first, then copy, then replica (dp), then tp

Within a pipeline stage the ``ep`` axis runs over the same ranks as ``dp`` and ``tp``: consecutive groups of ``ep`` ranks share the
experts. Where ``ep`` is larger than ``tp x dp``, the attention part of the model stands on several copies of those ranks, which all
compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lite.errors import ConfigError

AXES = {"tp": "tensor_parallel_size", "ep": "expert_parallel_size", "dp": "data_parallel_size", "pp": "pipeline_parallel_size"}
"""The axes, and the setting of ``EngineConfig`` that is the size of each."""
MOST_RANKS = 1 << 16
"""Most ranks of a layout; bounds the lists of ranks in plans and messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the axes.

    Attributes:
        tp: Ranks that share the matrices of attention and the vocabulary.
        ep: Ranks that share the routed experts.
        dp: Replicas of attention, each with its own requests and caches.
        pp: Stages, each with consecutive layers.

    Raises:
        ConfigError: A size is not a positive integer, they do not divide, or there are too many ranks.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"{name}={size!r} must be an integer of at least 1")
        if self.world > MOST_RANKS:
            raise ConfigError(f"{self} has {self.world} ranks; at most {MOST_RANKS} are possible")
        plane = self.tp * self.dp
        if plane % self.ep and self.ep % plane:
            sizes = [size for size in range(1, plane + 1) if not (plane % size or (self.tp % size and size % self.tp))]
            larger = "" if self.dp > 1 else f", or a multiple of {plane}"
            remedy = f"choose one of {', '.join(map(str, sizes))}{larger}"
            raise ConfigError(
                f"ep={self.ep} does not fit tp={self.tp} x dp={self.dp}, the {plane} ranks that share experts; {remedy}"
            )

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return max(self.tp * self.dp, self.ep)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.stage

    @property
    def firsts(self) -> range:
        """The first rank of each stage."""
        return range(0, self.world, self.stage)

    @property
    def copies(self) -> int:
        """How often the attention part of a stage exists besides its replicas; 1 unless ``ep`` exceeds ``tp x dp``."""
        return self.stage // (self.tp * self.dp)

    @property
    def peers(self) -> str:
        """The axis of the ranks that work on the same tokens: tp, or ep where attention stands on several copies of them."""
        return "tp" if self.copies == 1 else "ep"

    @property
    def exchanging(self) -> str:
        """The axis of the ranks that exchange something small in every layer: the peers, or ep where each has tokens of its own."""
        return self.peers if self.tp > 1 or self.copies > 1 else "ep"

    def place(self, rank: int) -> Place:
        """Return where a rank stands.

        Raises:
            ConfigError: There is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank={rank} is not one of the {self.world} ranks of {self}")
        pp, inner = divmod(rank, self.stage)
        copy, inner = divmod(inner, self.tp * self.dp)
        dp, tp = divmod(inner, self.tp)
        return Place(tp=tp, ep=rank % self.stage % self.ep, dp=dp, pp=pp, copy=copy)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks along an axis through a rank, in order; ``replica`` means all ranks with the same requests."""
        here = self.place(rank)
        start = here.pp * self.stage
        inner = rank - start
        if axis == "pp":
            return tuple(range(inner, self.world, self.stage))
        if axis == "ep":
            first = start + inner - here.ep
            return tuple(range(first, first + self.ep))
        if axis == "tp":
            return tuple(range(rank - here.tp, rank - here.tp + self.tp))
        if axis == "replica":
            return tuple(r for r in range(self.world) if self.place(r).dp == here.dp)
        first = rank - here.dp * self.tp
        return tuple(range(first, first + self.dp * self.tp, self.tp))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of an axis; every rank is in one of them."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.world)}))

    def reporter(self, replica: int) -> int:
        """Return the rank that samples for a replica: the first one of its last stage."""
        return (self.pp - 1) * self.stage + replica * self.tp

    def __str__(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands along each axis; ``copy`` counts the copies of the attention part of its stage."""

    tp: int
    ep: int
    dp: int
    pp: int
    copy: int
