"""Drafts of the model's own multi-token prediction block, made on the device right behind a step's samples.

The block runs at every position, with the main model's final streams there and the token that follows, and so fills its own
window. At the last position whose token counts it foretells the token after the next; further drafts are chained, each from
the block's own streams and the draft before, one position on. What a chain writes into the window is overwritten when its
positions run for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4lite.engine.cache import WINDOW_PAGE, LayerCache
from dsv4lite.engine.peers import Peers
from dsv4lite.engine.samples import Samples
from dsv4lite.engine.step import UNKNOWN, SequencePlan, StepPlan, StepShape
from dsv4lite.kernels.paging import Paging
from dsv4lite.models.batch import Batch, PagedBatch, SequenceInput, make_batch
from dsv4lite.models.deepseek_v4 import DeepseekV4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ends:
    """Where the sequences that sample stand.

    Attributes:
        plans: Of the S sequences.
        sequences: Their places in the step.
        positions_S: int64, position of the last token that counts.
        most: Where replicas share experts, sequences of the one with the most.
    """

    plans: tuple[SequencePlan, ...]
    sequences: tuple[int, ...]
    positions_S: Tensor
    most: int


class MtpDrafter:
    """Drafts with the MTP block of a model.

    Args:
        model: With its MTP block.
        cache: The block's window.
        peers: The ranks that share it, one of which chooses.
        num_drafts: Most drafts in a row.
    """

    def __init__(self, model: DeepseekV4, cache: LayerCache, peers: Peers, num_drafts: int) -> None:
        assert len(model.mtp) > 0 and num_drafts > 0
        self._model = model
        self._cache = cache
        self._peers = peers
        self._num_drafts = num_drafts

    def draft(
        self,
        plan: StepPlan,
        shape: StepShape,
        batch: Batch | PagedBatch,
        streams_TND: Tensor,
        first_rows: Sequence[int],
        samples: Samples | None,
    ) -> Tensor | None:
        """Run the block over a step; see ``drafters.DeviceDrafter``."""
        device = streams_TND.device
        next_T = batch.token_ids_T.roll(-1)
        ends = zip(plan.sequences, first_rows, strict=True)
        known = [(row + len(s.token_ids) - 1, s.next_id) for s, row in ends if s.next_id != UNKNOWN]
        if known:
            rows, token_ids = torch.tensor(known, dtype=torch.int64, device=device).unbind(dim=1)
            next_T[rows] = token_ids
        count = min(plan.max_drafts, self._num_drafts)
        every = tuple((i, s) for i, s in enumerate(plan.sequences) if s.sample)
        if not every:
            self._model.mtp_forward(streams_TND, replace(batch, token_ids_T=next_T), self._cache)
            self._work_for_others(count - 1, shape.sequences)
            return None
        behind_S, tokens_S = self._peers.ends(len(every), samples)
        begins = [first_rows[i] + len(s.token_ids) - 1 - s.drafts for i, s in every]
        rows_S = torch.tensor(begins, dtype=torch.int64, device=device) + behind_S
        next_T[rows_S] = tokens_S
        streams_TND = self._model.mtp_forward(streams_TND, replace(batch, token_ids_T=next_T), self._cache)
        if not count:
            return None
        starts = torch.tensor([s.end - 1 - s.drafts for _, s in every], dtype=torch.int64, device=device)
        lasts = _Ends(
            plans=tuple(s for _, s in every),
            sequences=tuple(i for i, _ in every),
            positions_S=starts + behind_S,
            most=shape.sequences,
        )
        return self._chain(streams_TND[rows_S], batch, lasts, count)

    def _chain(self, streams_SND: Tensor, batch: Batch | PagedBatch, ends: _Ends, count: int) -> Tensor:
        """Draft from the block's streams at the last positions that count."""
        seq_ids, run = [s.seq_id for s in ends.plans], self._run_paged if isinstance(batch, PagedBatch) else self._run
        drafts_S = self._peers.choose(self._model.mtp_logits(streams_SND), seq_ids, (ends.positions_S + 2).int())
        found = [drafts_S]
        for ahead in range(1, count):
            positions_S = ends.positions_S + ahead
            streams_SND, room_S = run(streams_SND, self._peers.told(drafts_S), positions_S, batch, ends)
            drafts_S = self._peers.choose(self._model.mtp_logits(streams_SND), seq_ids, (positions_S + 2).int())
            found.append(torch.where(room_S, drafts_S, UNKNOWN))
        return torch.stack(found, dim=1)

    def _run(
        self, streams_SND: Tensor, tokens_S: Tensor, positions_S: Tensor, batch: Batch | PagedBatch, ends: _Ends
    ) -> tuple[Tensor, Tensor]:
        """Run the block at one position of each sequence whose window pages reach that far.

        Returns:
            Its streams [S, N, D], and for which sequences it ran, bool [S].
        """
        positions, device = positions_S.tolist(), streams_SND.device
        pages = [position // WINDOW_PAGE - s.window_first for s, position in zip(ends.plans, positions, strict=True)]
        members = [i for i, (s, page) in enumerate(zip(ends.plans, pages, strict=True)) if page < len(s.window_pages)]
        room_S = torch.zeros(len(pages), dtype=torch.bool, device=device)
        if not members:
            self._work_for_others(1, ends.most)
            return streams_SND, room_S
        room_S[members] = True
        chained = make_batch([_place(ends.plans[i], positions[i]) for i in members], self._model.config, self._model.rotary, device)
        chained.token_ids_T, chained.most_tokens = tokens_S[members], ends.most
        streams_SND = streams_SND.clone()
        streams_SND[members] = self._model.mtp_forward(streams_SND[members], chained, self._cache)
        return streams_SND, room_S

    def _run_paged(
        self, streams_SND: Tensor, tokens_S: Tensor, positions_S: Tensor, batch: Batch | PagedBatch, ends: _Ends
    ) -> tuple[Tensor, Tensor]:
        """Do the same where the host does not know the positions."""
        assert isinstance(batch, PagedBatch)
        step, numerics = batch.paging, self._model.numerics
        index = torch.tensor(ends.sequences, dtype=torch.int64, device=streams_SND.device)
        window_SP, first_S = step.window_SP[index], step.window_first_S[index]
        page_S = positions_S // WINDOW_PAGE - first_S
        held_S = window_SP.gather(1, page_S.clamp_max(window_SP.shape[1] - 1)[:, None])[:, 0] >= 0
        room_S = (page_S < window_SP.shape[1]) & held_S
        every = torch.arange(len(positions_S), dtype=torch.int32, device=streams_SND.device)
        places_S = torch.where(room_S, positions_S, -1).int()
        paging = Paging(
            positions_T=places_S,
            sequence_T=every,
            slots_S=step.slots_S[index],
            first_S=places_S,
            rows_S=every,
            lens_S=torch.ones_like(every),
            drafts_S=torch.zeros_like(every),
            carry_S=torch.zeros_like(every),
            grow_SP=step.grow_SP[index],
            window_SP=window_SP,
            window_first_S=first_S,
            singles=True,
        )
        chained = PagedBatch.of(
            tokens_S, paging, self._model.rotary, max_tokens=batch.max_tokens, deterministic=numerics.deterministic
        )
        chained.most_tokens = ends.most
        return self._model.mtp_forward(streams_SND, chained, self._cache), room_S

    def take_part(self, shape: StepShape, most_tokens: int) -> None:
        """See ``drafters.DeviceDrafter``."""
        self._work_for_others(1, most_tokens)
        self._work_for_others(min(shape.max_drafts, self._num_drafts) - 1, shape.sequences)

    def _work_for_others(self, passes: int, most_tokens: int) -> None:
        """Take part in passes that this replica has nothing for, where replicas share the block's experts."""
        if self._model.share.gathered > 1:
            for _ in range(passes):
                self._model.mtp_take_part(most_tokens)

    def run_padding(self, batch: PagedBatch, streams_TND: Tensor) -> None:
        """Launch what drafting behind a step without a single real token launches."""
        self._model.mtp_logits(self._model.mtp_forward(streams_TND, batch, self._cache)[:1])


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
