"""Drafts of the model's own multi-token prediction block, computed on the device right after a step's samples.

The block reads the main model's final streams at a position, the embedding of the token that follows, and a window of its own kv
rows. It stores its kv rows for every token of a step. The rest of it runs only where a draft is wanted: at the last accepted
position, where it predicts the token after the next. Each further draft starts from the block's own streams and the draft before,
one position on. The window rows of drafts are overwritten when the main model runs their positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.models.deepseek_v4.batch import Batch
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.scheduling.step_plan import UNKNOWN, StepShape
from dsv4lite.speculation.draft_state import Chain, Choose
from dsv4lite.state.cache import WINDOW_PAGE, LayerCache


class MtpDrafter:
    """Drafts with the MTP block of a model; see ``drafters.DeviceDrafter``.

    Args:
        model: With its MTP block.
        cache: The block's window.
        most: Most draft tokens of a sequence.
    """

    def __init__(self, model: DeepseekV4, cache: LayerCache, most: int) -> None:
        assert len(model.mtp) > 0 and most > 0
        self.most = most
        self.round = 1
        self._model = model
        self._cache = cache

    def feed(self, batch: Batch, streams_TND: Tensor, next_T: Tensor) -> None:
        """Store the block's kv rows of a step."""
        self._model.mtp_feed(streams_TND, replace(batch, token_ids_T=next_T), self._cache)

    def guess(self, chain: Chain, choose: Choose) -> Tensor:
        """Run the block once, where the window pages reach that far; int64 [S, 1]."""
        page_S, pages = chain.positions_S // WINDOW_PAGE - chain.window_first_S, chain.window_SP.shape[1]
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
        most, deterministic = model.config.max_positions, model.numerics.deterministic
        batch = Batch.of(chain.tokens_S, paging, model.rotary, max_tokens=most, deterministic=deterministic)
        batch.most_tokens = chain.most
        return model.mtp_forward(chain.streams_SND, batch, self._cache)

    def take_part(self, shape: StepShape) -> None:
        """See ``drafters.DeviceDrafter``."""
        if self._model.share.gathered > 1:
            for _ in range(min(shape.max_drafts, self.most)):
                self._model.mtp_take_part(shape.sequences)
