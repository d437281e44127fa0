"""Draft tokens of the model's own multi-token prediction block, made on the device right after a step is sampled.

The block reads the main model's final streams at a position and the token that follows, and a window of its own rows. Its rows are
stored for every token of a step; the rest of it runs where a draft token is wanted: at the last accepted position, where it
predicts the token after the next. Each further draft token comes from the block's own streams and the draft token before, one
position later. The rows that drafting writes into the window are overwritten when the main model runs these positions.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.models.family import Batch, MtpModel
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.step_plan import UNKNOWN, StepShape
from dsv4lite.speculation.draft_state import Choose, DraftState
from dsv4lite.state.store import LayerCache


class MtpDrafter:
    """Drafts with the MTP block of a model; see ``drafters.DeviceDrafter``.

    Args:
        model: With its MTP block.
        cache: The block's rows, in window pages, or in grow pages of a model without sliding window.
        most: Most draft tokens in a row.
    """

    def __init__(self, model: MtpModel, cache: LayerCache, most: int) -> None:
        self.most = most
        self.per_pass = 1
        self._model = model
        self._cache = cache

    def feed(self, batch: Batch, streams_TND: Tensor, next_T: Tensor) -> None:
        """Store the block's kv rows of a step."""
        fed = copy(batch)
        fed.token_ids_T = next_T
        self._model.mtp_feed(streams_TND, fed, self._cache)

    def draft(self, state: DraftState, choose: Choose) -> Tensor:
        """Run the block once, where the pages of its rows reach that far; int64 [S, 1]."""
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
            singles=True,
        )
        model = self._model
        batch = model.batch(state.tokens_S, paging, max_tokens=model.config.max_positions)
        batch.most_tokens = state.most
        return model.mtp_forward(state.streams_SND, batch, self._cache)

    def take_part(self, shape: StepShape) -> None:
        """See ``drafters.DeviceDrafter``."""
        if self._model.share.gathered > 1:
            for _ in range(min(shape.max_drafts, self.most)):
                self._model.mtp_take_part(shape.sequences)
