"""Messages of plans to other ranks, without the tables of grow pages that the ranks already have.

Tables are most of a plan, and change once in 256 tokens. A rank keeps the table of each slot, as the same tuple object until it
changes, as ``SequencePlan`` promises. A table that is left out is sent as an empty one: a scheduled span has at least one page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dsv4lite.scheduling.step_plan import SequencePlan, StepPlan

Wire = tuple[StepPlan, list[tuple[Any, ...]]]
"""A plan without sequences, and the sequences as plain tuples, which pickle four times as fast."""


class PlanWriter:
    """Converts plans to messages; mutable, one for all ranks that get the same plans."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}

    def write(self, plan: StepPlan) -> Wire:
        """Return the message of a plan; a ``PlanReader`` must read all messages in order."""
        sequences = []
        for s in plan.sequences:
            known = self._held.get(s.slot) is s.pages
            if not known:
                self._held[s.slot] = s.pages
            sequences.append((*s[:4], () if known else s.pages, *s[5:]))
        return replace(plan, sequences=()), sequences


class PlanReader:
    """Converts messages to plans; mutable, one per rank."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}

    def read(self, wire: Wire) -> StepPlan:
        """Return the plan."""
        plan, sent = wire
        sequences = []
        for seq_id, slot, start, token_ids, pages, *rest in sent:
            pages = self._held[slot] = pages or self._held[slot]
            sequences.append(SequencePlan(seq_id, slot, start, token_ids, pages, *rest))
        return replace(plan, sequences=tuple(sequences))
