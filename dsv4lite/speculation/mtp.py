"""Guesses of the model's own multi-token prediction block, made on the device right behind a step's samples.

The block sees the main model's final streams at a position and the token that follows, and a window of its own rows. Its rows are
kept for every token of a step; the rest of it runs where a guess is wanted: at the last position whose token counts, where it
foretells the token after the next. Further guesses are chained, each from the block's own streams and the guess before, one
position on. What a chain writes into the window is overwritten when its positions run for good.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.models.family import Batch, MtpModel
from dsv4lite.paging import WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.step_plan import UNKNOWN, StepShape
from dsv4lite.speculation.draft_state import Chain, Choose
from dsv4lite.state.store import LayerCache


class MtpDrafter:
    """Guesses with the MTP block of a model; see ``drafters.DeviceDrafter``.

    Args:
        model: With its MTP block.
        cache: The block's window.
        most: Most guesses in a row.
    """

    def __init__(self, model: MtpModel, cache: LayerCache, most: int) -> None:
        self.most = most
        self.round = 1
        self._model = model
        self._cache = cache

    def feed(self, batch: Batch, streams_TND: Tensor, next_T: Tensor) -> None:
        """Keep the block's rows of a step."""
        fed = copy(batch)
        fed.token_ids_T = next_T
        self._model.mtp_feed(streams_TND, fed, self._cache)

    def guess(self, chain: Chain, choose: Choose) -> Tensor:
        """Run the block once, where the window pages reach that far; int64 [S, 1]."""
        page_S, pages = chain.positions_S // WINDOW_PAGE_TOKENS - chain.window_first_S, chain.window_SP.shape[1]
        held_S = chain.window_SP.gather(1, page_S.clamp(0, pages - 1)[:, None])[:, 0] >= 0
        room_S = (chain.positions_S >= 0) & (page_S < pages) & held_S
        streams_SND = self._run(chain, room_S)
        tokens_S = choose(self._model.mtp_logits(streams_SND), (chain.positions_S + 1).int())
        chain.advance(streams_SND, tokens_S)
        return torch.where(room_S, tokens_S, UNKNOWN)[:, None]

    def _run(self, chain: Chain, room_S: Tensor) -> Tensor:
        """Run the block at one position of each sequence that has room; return the streams [S, N, D]."""
        every = torch.arange(len(room_S), dtype=torch.int32, device=room_S.device)
        nothing, places_S = torch.zeros_like(every), torch.where(room_S, chain.positions_S, -1).int()
        paging = Paging(
            positions_T=places_S,
            sequence_T=every,
            slots_S=chain.slots_S,
            first_S=places_S,
            rows_S=every,
            lens_S=torch.ones_like(every),
            drafts_S=nothing,
            carry_S=nothing,
            grow_SP=nothing[:, None],
            window_SP=chain.window_SP,
            window_first_S=chain.window_first_S,
            singles=True,
        )
        model = self._model
        batch = model.batch(chain.tokens_S, paging, max_tokens=model.config.max_positions)
        batch.most_tokens = chain.most
        return model.mtp_forward(chain.streams_SND, batch, self._cache)

    def take_part(self, shape: StepShape) -> None:
        """See ``drafters.DeviceDrafter``."""
        if self._model.share.gathered > 1:
            for _ in range(min(shape.max_drafts, self.most)):
                self._model.mtp_take_part(shape.sequences)
