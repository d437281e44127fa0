"""Plans on their way to other ranks: only what changed since the last one.

Most of a plan are tables of grow pages, which change once in 256 tokens. They are sent when they do, and a rank keeps them by slot,
as the same tuple object until then, which is what ``SequencePlan`` promises.
"""

from __future__ import annotations

from typing import Any

from dsv4lite.scheduling.step_plan import SequencePlan, StepPlan

Wire = tuple[Any, ...]


class PlanWriter:
    """Makes messages of plans; mutable, one for all the ranks that get the same plans."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}

    def write(self, plan: StepPlan) -> Wire:
        """Return a plan as plain tuples; every one must be read, in this order."""
        sequences = []
        for s in plan.sequences:
            known = self._held.get(s.slot) is s.pages
            if not known:
                self._held[s.slot] = s.pages
            sequences.append((*s[:4], None if known else s.pages, *s[5:]))
        moves = (plan.resets, plan.restores, plan.grow_copies, plan.window_copies, plan.slot_copies, plan.saves, plan.zero_rows)
        return plan.step, plan.max_drafts, sequences, moves if any(moves) else None


class PlanReader:
    """Makes plans of messages; mutable, one per rank."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}

    def read(self, wire: Wire) -> StepPlan:
        """Return the plan."""
        step, max_drafts, parts, moves = wire
        sequences = []
        for seq_id, slot, start, token_ids, pages, *rest in parts:
            if pages is None:
                pages = self._held[slot]
            else:
                self._held[slot] = pages
            sequences.append(SequencePlan(seq_id, slot, start, token_ids, pages, *rest))
        if moves is None:
            return StepPlan(step=step, sequences=tuple(sequences), max_drafts=max_drafts)
        resets, restores, grow_copies, window_copies, slot_copies, saves, zero_rows = moves
        return StepPlan(
            step=step,
            sequences=tuple(sequences),
            resets=resets,
            restores=restores,
            grow_copies=grow_copies,
            window_copies=window_copies,
            slot_copies=slot_copies,
            saves=saves,
            zero_rows=zero_rows,
            max_drafts=max_drafts,
        )
