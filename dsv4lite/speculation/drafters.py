"""The model's own drafter, which runs on the device right after a step is sampled: the MTP block, or DSpark."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from dsv4lite.config import MTP, DSpark
from dsv4lite.kernels.dispatch import send
from dsv4lite.kernels.paging import Paging
from dsv4lite.models.batch import Batch
from dsv4lite.models.family import BlockModel, MtpModel
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.step_plan import UNKNOWN, StepPlan, StepShape
from dsv4lite.speculation.draft_state import Choose, DraftState
from dsv4lite.state.store import LayerCache, StateCache


class MtpDrafter:
    """Drafts with the MTP block of a model.

    The block reads the main model's final streams at a position, the token after it, and a window of its own KV rows. Its rows are
    stored for every token of a step. The rest of the block runs only at the last accepted position, where it predicts the token
    after the next. Each further draft token comes from the block's own streams and the previous draft token, one position later.
    Drafting writes rows into the window; they are overwritten when the main model runs these positions.

    Args:
        model: A model with an MTP block.
        cache: The block's rows, in window pages, or in grow pages for a model without sliding window.

    Attributes:
        most: Most draft tokens of a sequence.
        per_pass: Draft tokens of one call of ``draft``.
    """

    def __init__(self, model: MtpModel, cache: LayerCache, most: int) -> None:
        self.most = most
        self.per_pass = 1
        self._model = model
        self._cache = cache

    def feed(self, batch: Batch, streams_TND: Tensor, next_T: Tensor) -> None:
        """Store the drafter's own rows of a step.

        Args:
            batch: The step's tokens.
            streams_TND: The main model's final streams.
            next_T: int64, the token after each; arbitrary where a later step runs the position again.
        """
        fed = copy(batch)
        fed.token_ids_T = next_T
        self._model.mtp_store_kv(streams_TND, fed, self._cache)

    def draft(self, state: DraftState, choose: Choose) -> Tensor:
        """Draft the next tokens of each sequence, and advance the state. The block runs for sequences with a page for its row.

        Returns:
            int64 [S, per_pass], ``UNKNOWN`` where there are none.
        """
        if state.grow_SP is None:
            table_SP, page_S = state.window_SP, state.positions_S // WINDOW_PAGE_TOKENS - state.window_first_S
        else:
            table_SP, page_S = state.grow_SP, state.positions_S // PAGE_TOKENS
        pages = table_SP.shape[1]
        held_S = table_SP.gather(1, page_S.clamp(0, pages - 1)[:, None])[:, 0] >= 0
        room_S = (state.positions_S >= 0) & (page_S < pages) & held_S
        streams_SND = self._run(state, room_S)
        tokens_S = choose(self._model.mtp_logits(streams_SND), (state.positions_S + 1).int())
        state.advance(streams_SND, tokens_S)
        return torch.where(room_S, tokens_S, UNKNOWN)[:, None]

    def _run(self, state: DraftState, room_S: Tensor) -> Tensor:
        """Run the block at one position of each sequence that has room; return the streams [S, N, D]."""
        every = torch.arange(len(room_S), dtype=torch.int32, device=room_S.device)
        nothing, places_S = torch.zeros_like(every), torch.where(room_S, state.positions_S, -1).int()
        paging = Paging(
            positions_T=places_S,
            sequence_T=every,
            slots_S=state.slots_S,
            first_S=places_S,
            rows_S=every,
            lens_S=torch.ones_like(every),
            drafts_S=nothing,
            state_copy_S=nothing,
            grow_SP=nothing[:, None] if state.grow_SP is None else state.grow_SP.clamp_min(0),
            window_SP=state.window_SP,
            window_first_S=state.window_first_S,
            width=1,
        )
        model = self._model
        batch = model.batch(state.tokens_S, paging, max_tokens=model.config.max_positions)
        batch.most_tokens = state.most
        return model.mtp_forward(state.streams_SND, batch, self._cache)

    def take_part(self, shape: StepShape) -> None:
        """Run this rank's experts for replicas that draft, when its own replica has nothing to draft.

        Args:
            shape: Shape of the step of all replicas.
        """
        if self._model.shard.gathered > 1:
            for _ in range(min(shape.max_drafts, self.most)):
                self._model.mtp_take_part(shape.sequences)


class BlockDrafter:
    """Drafts with DSpark, by the methods of ``MtpDrafter``. The main model's forward pass writes the rows that it reads.

    Its window, counted from the position after the last accepted token, reaches one position farther back than the main model's:
    exactly as far as the window pages of the step.
    """

    def __init__(self, model: BlockModel, caches: Sequence[LayerCache], settings: DSpark) -> None:
        self.most = settings.k
        self.per_pass = model.config.draft_block
        self._model = model
        self._caches = caches
        self._least = settings.min_confidence

    def feed(self, batch: Batch, streams_TND: Tensor, next_T: Tensor) -> None:
        """Do nothing: the main model's pass has stored the rows."""

    def draft(self, state: DraftState, choose: Choose) -> Tensor:
        next_S = torch.where(state.positions_S < 0, -1, state.positions_S + 1)

        def pick(logits_SV: Tensor, place: int) -> Tensor:
            return choose(logits_SV.contiguous(), (next_S + place).int())

        windows = (state.window_SP, state.window_first_S)
        token_ids_SG, confidence_SG = self._model.draft_block(state.tokens_S, next_S, *windows, self._caches, pick, state.most)
        if not self._least:
            return token_ids_SG
        holds_SG = (confidence_SG >= self._least).long().cumprod(1).bool()
        return torch.where(holds_SG, token_ids_SG, UNKNOWN)

    def take_part(self, shape: StepShape) -> None:
        if shape.max_drafts and self._model.shard.gathered > 1:
            self._model.draft_take_part(shape.sequences)


DeviceDrafter = MtpDrafter | BlockDrafter
"""Every rank that has a part of a drafter runs it at the same time. It reads nothing on the host, so that it can be captured."""


def make_drafter(own: MTP | DSpark, model: Any, cache: StateCache) -> DeviceDrafter:
    """Return the drafter for a setting, of an ``MtpModel`` or a ``BlockModel``."""
    if isinstance(own, MTP):
        return MtpDrafter(model, cache.layers[-1], own.k)
    return BlockDrafter(model, cache.layers[len(model.shard.layers) :], own)


def draft(
    drafter: DeviceDrafter,
    plan: StepPlan,
    shape: StepShape,
    batch: Batch,
    streams_TND: Tensor,
    first_rows: Sequence[int],
    accepted: tuple[Tensor, Tensor] | None,
    choose: Choose,
) -> Tensor | None:
    """Draft the next tokens after a step that ran eagerly.

    Args:
        drafter: The drafter.
        plan: The step.
        shape: Shape of the step; of all replicas if they share experts.
        batch: The step's tokens.
        streams_TND: The main model's final streams.
        first_rows: The row of each sequence's first token.
        accepted: For the sequences that sampled, if any: the number of accepted draft tokens and the token after them, int64 [S]
            twice.
        choose: Chooses the draft tokens.

    Returns:
        int64 [S, K] for the sequences that sampled, in the order of the plan, ``UNKNOWN`` where there are none; ``None`` if there
        is nothing to draft. Only the values of the rank that samples are valid.
    """
    next_T = batch.token_ids_T.roll(-1)
    rows = zip(plan.sequences, first_rows, strict=True)
    known = [(row + len(s.token_ids) - 1, s.next_id) for s, row in rows if s.next_id != UNKNOWN]
    if known:
        places, token_ids = send(torch.tensor(known, dtype=torch.int64, device="cpu"), next_T.device).unbind(dim=1)
        next_T[places] = token_ids
    every = [(s, row + len(s.token_ids) - 1 - s.drafts) for s, row in zip(plan.sequences, first_rows, strict=True) if s.sample]
    if accepted is not None:
        begins = torch.tensor([begin for _, begin in every], dtype=torch.int64, device="cpu")
        next_T[send(begins, next_T.device) + accepted[0]] = accepted[1]
    drafter.feed(batch, streams_TND, next_T)
    count = min(plan.max_drafts, drafter.most)
    if accepted is None or not count:
        drafter.take_part(shape)
        return None
    state = DraftState.after([s for s, _ in every], [begin for _, begin in every], streams_TND, accepted, shape.sequences)
    return torch.cat([drafter.draft(state, choose) for _ in range(0, count, drafter.per_pass)], dim=1)[:, :count]
