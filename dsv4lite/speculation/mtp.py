"""Guesses of the model's own multi-token prediction block, made on the device right behind a step's samples.

The block sees the main model's final streams at a position and the token that follows, and a window of its own rows. Its rows are
kept for every token of a step; the rest of it runs where a guess is wanted: at the last position whose token counts, where it
foretells the token after the next. Further guesses are chained, each from the block's own streams and the guess before, one
position on. What a chain writes into the window is overwritten when its positions run for good.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.models.deepseek_v4.batch import Batch, PagedBatch, SequenceInput, make_batch
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.paging import WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.step_plan import UNKNOWN, SequencePlan, StepShape
from dsv4lite.speculation.draft_state import Chain, Choose
from dsv4lite.state.store import LayerCache


class MtpDrafter:
    """Guesses with the MTP block of a model; see ``drafters.DeviceDrafter``.

    Args:
        model: With its MTP block.
        cache: The block's window.
        most: Most guesses in a row.
    """

    def __init__(self, model: DeepseekV4, cache: LayerCache, most: int) -> None:
        assert len(model.mtp) > 0 and most > 0
        self.most = most
        self.round = 1
        self._model = model
        self._cache = cache

    def feed(self, batch: Batch | PagedBatch, streams_TND: Tensor, next_T: Tensor) -> None:
        """Keep the block's rows of a step."""
        self._model.mtp_feed(streams_TND, replace(batch, token_ids_T=next_T), self._cache)

    def guess(self, chain: Chain, choose: Choose) -> Tensor:
        """Run the block once, where the window pages reach that far; int64 [S, 1]."""
        page_S, pages = chain.positions_S // WINDOW_PAGE_TOKENS - chain.window_first_S, chain.window_SP.shape[1]
        held_S = chain.window_SP.gather(1, page_S.clamp(0, pages - 1)[:, None])[:, 0] >= 0
        room_S = (chain.positions_S >= 0) & (page_S < pages) & held_S
        streams_SND = self._run_paged(chain, room_S) if self._model.paged else self._run(chain, room_S)
        tokens_S = choose(self._model.mtp_logits(streams_SND), (chain.positions_S + 1).int())
        chain.advance(streams_SND, tokens_S)
        return torch.where(room_S, tokens_S, UNKNOWN)[:, None]

    def _run(self, chain: Chain, room_S: Tensor) -> Tensor:
        """Run the block at one position of each sequence that has room; return the streams [S, N, D]."""
        positions, members = chain.positions_S.tolist(), room_S.nonzero()[:, 0].tolist()
        if not members:
            self._work_for_others(1, chain.most or 0)
            return chain.streams_SND
        places = [_place(chain.plans[i], positions[i]) for i in members]
        batch = make_batch(places, self._model.config, self._model.rotary, room_S.device)
        batch.token_ids_T, batch.most_tokens = chain.tokens_S[members], chain.most
        streams_SND = chain.streams_SND.clone()
        streams_SND[members] = self._model.mtp_forward(streams_SND[members], batch, self._cache)
        return streams_SND

    def _run_paged(self, chain: Chain, room_S: Tensor) -> Tensor:
        """Do the same where the host does not know the positions."""
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
        batch = PagedBatch.of(chain.tokens_S, paging, model.rotary, max_tokens=most, deterministic=deterministic)
        batch.most_tokens = chain.most
        return model.mtp_forward(chain.streams_SND, batch, self._cache)

    def take_part(self, shape: StepShape) -> None:
        """See ``drafters.DeviceDrafter``."""
        self._work_for_others(min(shape.max_drafts, self.most), shape.sequences)

    def _work_for_others(self, passes: int, most_tokens: int) -> None:
        """Take part in passes that this replica has nothing for, where replicas share the block's experts."""
        if self._model.share.gathered > 1:
            for _ in range(passes):
                self._model.mtp_take_part(most_tokens)


def _place(plan: SequencePlan, position: int) -> SequenceInput:
    """Return a single token of a sequence at a later position, whose grow page is not there yet and is not used."""
    return SequenceInput(
        token_ids=(0,),
        start=position,
        slot=plan.slot,
        pages=(*plan.pages, 0),
        window_first=plan.window_first,
        window_pages=plan.window_pages,
    )
