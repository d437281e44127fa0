"""Drafts of the model's own drafter, made on the device right behind a step's samples: the MTP block (``mtp.py``), or DSpark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsv4lite.engine.cache import LayerCache, StateCache
from dsv4lite.engine.mtp import MtpDrafter
from dsv4lite.engine.peers import Peers
from dsv4lite.engine.samples import Samples
from dsv4lite.engine.step import NO_PAGE, UNKNOWN, SequencePlan, StepPlan, StepShape
from dsv4lite.models.batch import Batch, PagedBatch
from dsv4lite.models.deepseek_v4 import DeepseekV4
from dsv4lite.models.dspark import DraftBlock, Drafts
from dsv4lite.speculation import MTP, DSpark


class DeviceDrafter(Protocol):
    """What guesses on the device: on every rank that has a part of the drafter, at the same time."""

    def draft(
        self,
        plan: StepPlan,
        shape: StepShape,
        batch: Batch | PagedBatch,
        streams_TND: Tensor,
        first_rows: Sequence[int],
        samples: Samples | None,
    ) -> Tensor | None:
        """Guess what follows a step's samples.

        Args:
            plan: The step.
            shape: Of the step of all replicas, where they share experts.
            batch: Its tokens.
            streams_TND: The main model's final streams.
            first_rows: The row of each sequence's first token.
            samples: What was sampled, if anything was, on the rank that does so.

        Returns:
            Drafts int64 [S, K] of the sequences that sampled, in the order of the plan, ``UNKNOWN`` from where there are none;
            ``None`` if none are wanted. They count on the rank that samples.
        """
        ...

    def take_part(self, shape: StepShape, most_tokens: int) -> None:
        """Let this rank's experts work for replicas that draft, while its own has nothing to run.

        Args:
            shape: Of the step of all.
            most_tokens: As the others' batches say.
        """
        ...

    def run_padding(self, batch: PagedBatch, streams_TND: Tensor) -> None:
        """Launch what drafting behind such a step launches, and change nothing.

        Args:
            batch: A step without a single real token.
            streams_TND: The main model's final streams.
        """
        ...


def make_drafter(own: MTP | DSpark, model: DeepseekV4, cache: StateCache, peers: Peers) -> DeviceDrafter:
    """Return the drafter that a setting names."""
    if isinstance(own, MTP):
        return MtpDrafter(model, cache.layers[-1], peers, own.k)
    caches = cache.layers[model.config.num_hidden_layers :]
    return BlockDrafter(model=model, caches=caches, peers=peers, settings=own, max_sequences=cache.sizes.slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockDrafter:
    """Drafts with DSpark. The rows that it looks at come from the main model's own pass.

    Its window reaches one position farther back than the main model's, from the position after the step's last token that counts:
    just as far as the pages go that the step was given.
    """

    model: DeepseekV4
    caches: Sequence[LayerCache]
    peers: Peers
    settings: DSpark
    max_sequences: int

    def draft(
        self,
        plan: StepPlan,
        shape: StepShape,
        batch: Batch | PagedBatch,
        streams_TND: Tensor,
        first_rows: Sequence[int],
        samples: Samples | None,
    ) -> Tensor | None:
        """See ``DeviceDrafter``."""
        drafter = self.model.dspark
        assert drafter is not None
        count = min(self.settings.k, plan.max_drafts)
        plans = [s for s in plan.sequences if s.sample]
        if not plans or not count:
            self.take_part(shape, shape.tokens)
            return None
        seq_ids, settings = [s.seq_id for s in plans], self.settings
        behind_S, tokens_S = self.peers.ends(len(plans), samples)
        next_S = behind_S + self._int64([s.end - s.drafts for s in plans])

        def pick(logits_SV: Tensor, place: int) -> Tensor:
            return self.peers.told(self.peers.choose(logits_SV, seq_ids, (next_S + 1 + place).int()))

        out: Drafts = drafter(
            tokens_S,
            self._where(plans, next_S),
            self.caches,
            self.model.embed,
            self.model.head,
            pick,
            shape.sequences,
        )
        drafts_SK = out.token_ids_SG[:, :count]
        if settings.min_confidence:
            holds_SK = (out.confidence_SG[:, :count] >= settings.min_confidence).long().cumprod(1).bool()
            drafts_SK = torch.where(holds_SK, drafts_SK, UNKNOWN)
        return drafts_SK

    def take_part(self, shape: StepShape, most_tokens: int) -> None:
        """See ``DeviceDrafter``."""
        assert self.model.dspark is not None
        if shape.max_drafts and self.model.share.gathered > 1:
            self.model.dspark.take_part(shape.sequences)

    def run_padding(self, batch: PagedBatch, streams_TND: Tensor) -> None:
        """See ``DeviceDrafter``; as many blocks as have about as many rows as the step."""
        drafter = self.model.dspark
        assert drafter is not None
        count = min(max(1, len(batch.token_ids_T) // drafter.block), self.max_sequences)
        nowhere_S = self._int64([-1] * count)
        zero_S = torch.zeros_like(nowhere_S)
        pages_SP = nowhere_S.int()[:, None]
        where = DraftBlock.of(nowhere_S, pages_SP, zero_S.int(), drafter.block, self.model.rotary.main)
        drafter(zero_S, where, self.caches, self.model.embed, self.model.head)

    def _where(self, plans: Sequence[SequencePlan], next_S: Tensor) -> DraftBlock:
        """Place blocks behind sequences, whose newest tokens stand at ``next_S``, int64."""
        assert self.model.dspark is not None
        width = max(len(s.window_pages) for s in plans)
        pages = [[*s.window_pages, *[NO_PAGE] * (width - len(s.window_pages))] for s in plans]
        return DraftBlock.of(
            next_S,
            self._int64(pages).int(),
            self._int64([s.window_first for s in plans]).int(),
            self.model.dspark.block,
            self.model.rotary.main,
        )

    def _int64(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.numerics.device)
