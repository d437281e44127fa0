"""Expert balancing: places experts and copies of them so that every rank gets about the same number of rows.

Popular experts get copies (redundant experts), and slots are packed so that the loads of the ranks are even. This is the global
scheme of DeepSeek's EPLB.

    copies    each further slot goes to the expert with the most load per copy
    packing   items by descending load, each into the least loaded pack that has room

Source: specification of the V3 family, 6.3. Results are equal on every machine: ties go to the lower number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsv4lite.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one layer's experts lie.

    Attributes:
        experts: The expert in every slot; rank r holds the r-th of ``ranks`` equal consecutive parts of the slots.
        num_experts: Number of experts, without copies.
        ranks: Ranks that share them.
    """

    experts: tuple[int, ...]
    num_experts: int
    ranks: int

    def __post_init__(self) -> None:
        assert len(self.experts) % self.ranks == 0 and set(self.experts) == set(range(self.num_experts))

    @classmethod
    def consecutive(cls, num_experts: int, ranks: int) -> Placement:
        """Return the placement of a model that was never balanced: equal ranges of experts, one copy each.

        Raises:
            ConfigError: The ranges would be unequal.
        """
        if num_experts % ranks:
            raise ConfigError(f"{num_experts} experts cannot be shared equally by ep={ranks} ranks; choose a divisor")
        return cls(experts=tuple(range(num_experts)), num_experts=num_experts, ranks=ranks)

    @property
    def slots_per_rank(self) -> int:
        return len(self.experts) // self.ranks

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Return the experts in the slots of a rank."""
        return self.experts[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each expert, ascending."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        return tuple(tuple(of_expert) for of_expert in slots)

    def keeping_slots(self, before: Placement) -> Placement:
        """Return the same experts on the same ranks; experts that a rank held ``before`` keep their slots."""
        assert len(before.experts) == len(self.experts) and before.ranks == self.ranks
        placed: list[int] = []
        for rank in range(self.ranks):
            new = list(self.held_by(rank))
            slots: list[int | None] = []
            for expert in before.held_by(rank):
                stays = expert in new
                slots.append(expert if stays else None)
                if stays:
                    new.remove(expert)
            placed += [new.pop(0) if expert is None else expert for expert in slots]
        return replace(self, experts=tuple(placed))

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """Return the load of every rank if an expert's load is shared equally by its copies."""
        counts = [len(slots) for slots in self.copies]
        return [sum(loads[e] / counts[e] for e in self.held_by(rank)) for rank in range(self.ranks)]

    def imbalance(self, loads: Sequence[float]) -> float:
        """Return the load of the busiest rank divided by the average; 1 is even."""
        ranks = self.rank_loads(loads)
        return max(ranks) * len(ranks) / sum(ranks) if sum(ranks) else 1.0


def balance(loads: Sequence[float], *, slots: int, ranks: int) -> Placement:
    """Place one layer's experts by their loads.

    Args:
        loads: Rows that each expert got recently, or numbers in proportion.
        slots: Experts that all ranks hold together, copies included.
        ranks: Number of ranks; each holds ``slots / ranks``.

    Raises:
        ConfigError: There are fewer slots than experts, or ``ranks`` does not divide them.
    """
    experts = len(loads)
    if slots % ranks or slots < experts:
        raise ConfigError(
            f"{slots} expert slots on {ranks} ranks: must be a multiple of {ranks}, and at least {experts}, the experts"
        )
    owners = _copy(loads, slots)
    counts = [owners.count(expert) for expert in range(experts)]
    packs = _pack([loads[expert] / counts[expert] for expert in owners], ranks)
    return Placement(experts=tuple(owners[slot] for pack in packs for slot in pack), num_experts=experts, ranks=ranks)


def _copy(loads: Sequence[float], slots: int) -> list[int]:
    """Return the expert of every slot: each expert once, then the one with the most load per copy."""
    owners, counts = list(range(len(loads))), [1] * len(loads)
    while len(owners) < slots:
        busiest = max(range(len(loads)), key=lambda i: loads[i] / counts[i])
        owners.append(busiest)
        counts[busiest] += 1
    return owners


def _pack(loads: Sequence[float], packs: int) -> list[list[int]]:
    """Return the items of every pack, equally many in each."""
    room = len(loads) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    held: list[list[int]] = [[] for _ in range(packs)]
    totals = [0.0] * packs
    for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
        pack = min((p for p in range(packs) if len(held[p]) < room), key=lambda p: totals[p])
        held[pack].append(item)
        totals[pack] += loads[item]
    return held
