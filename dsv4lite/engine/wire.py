"""Plans as they are sent to other ranks: without the tables of grow pages that these know.

Tables are most of a plan and change once in 256 tokens. A rank keeps them by slot, as the same tuple object until they change, as
``SequencePlan`` promises. A table that is left out is empty: a scheduled span has at least one page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dsv4lite.scheduling.step_plan import SequencePlan, StepPlan

Wire = tuple[StepPlan, list[tuple[Any, ...]]]
"""A plan without sequences, and these as plain tuples, which are pickled in a quarter of the time."""


class PlanWriter:
    """Makes messages of plans; mutable, one for all the ranks that get the same plans."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}

    def write(self, plan: StepPlan) -> Wire:
        """Return a message; every one must be read, in this order."""
        sequences = []
        for s in plan.sequences:
            known = self._held.get(s.slot) is s.pages
            if not known:
                self._held[s.slot] = s.pages
            sequences.append((*s[:4], () if known else s.pages, *s[5:]))
        return replace(plan, sequences=()), sequences


class PlanReader:
    """Makes plans of messages; mutable, one per rank."""

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
