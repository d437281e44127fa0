"""The model's own drafter, which guesses on the device right behind a step's samples: the MTP block (``mtp.py``), or DSpark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv4lite.config import MTP, DSpark
from dsv4lite.models.family import Batch, BlockModel
from dsv4lite.sampling.state import send
from dsv4lite.scheduling.step_plan import UNKNOWN, StepPlan, StepShape
from dsv4lite.speculation.draft_state import Chain, Choose
from dsv4lite.speculation.mtp import MtpDrafter
from dsv4lite.state.store import LayerCache, StateCache


class DeviceDrafter(Protocol):
    """What guesses on the device: on every rank that has a part of it, at the same time.

    It never waits for the device, so that it can be captured in a graph.

    Attributes:
        most: Most guesses in a row.
        round: How many come of one ``guess``.
    """

    most: int
    round: int

    def feed(self, batch: Batch, streams_TND: Tensor, next_T: Tensor) -> None:
        """Keep what the drafter itself wants to know of a step later.

        Args:
            batch: The step's tokens.
            streams_TND: The main model's final streams.
            next_T: int64, the token that follows each; any where a later step runs the same position again.
        """
        ...

    def guess(self, chain: Chain, choose: Choose) -> Tensor:
        """Guess what follows each sequence, and go on behind it.

        Returns:
            int64 [S, round], ``UNKNOWN`` from where there are none.
        """
        ...

    def take_part(self, shape: StepShape) -> None:
        """Let this rank's experts work for replicas that guess, while its own has nothing to guess for.

        Args:
            shape: Of the step of all.
        """
        ...


def make_drafter(own: MTP | DSpark, model: Any, cache: StateCache) -> DeviceDrafter:
    """Return the drafter that a setting names, of a model that has it: an ``MtpModel`` or a ``BlockModel``."""
    if isinstance(own, MTP):
        return MtpDrafter(model, cache.layers[-1], own.k)
    return BlockDrafter(model, cache.layers[len(model.share.layers) :], own)


def draft(
    drafter: DeviceDrafter,
    plan: StepPlan,
    shape: StepShape,
    batch: Batch,
    streams_TND: Tensor,
    first_rows: Sequence[int],
    ends: tuple[Tensor, Tensor] | None,
    choose: Choose,
) -> Tensor | None:
    """Guess what follows a step.

    Args:
        drafter: Who guesses.
        plan: The step.
        shape: Of the step of all replicas, where they share experts.
        batch: Its tokens.
        streams_TND: The main model's final streams.
        first_rows: The row of each sequence's first token.
        ends: Of the sequences that sampled, if there are any: how many drafts were right, and the token behind them, int64 [S]
            twice.
        choose: Of these sequences.

    Returns:
        int64 [S, K] of the sequences that sampled, in the order of the plan, ``UNKNOWN`` from where there are none; ``None`` if
        none are wanted. They count on the rank that samples.
    """
    next_T = batch.token_ids_T.roll(-1)
    rows = zip(plan.sequences, first_rows, strict=True)
    known = [(row + len(s.token_ids) - 1, s.next_id) for s, row in rows if s.next_id != UNKNOWN]
    if known:
        places, token_ids = send(torch.tensor(known, dtype=torch.int64, device="cpu"), next_T.device).unbind(dim=1)
        next_T[places] = token_ids
    every = [(s, row + len(s.token_ids) - 1 - s.drafts) for s, row in zip(plan.sequences, first_rows, strict=True) if s.sample]
    if ends is not None:
        begins = torch.tensor([begin for _, begin in every], dtype=torch.int64, device="cpu")
        next_T[send(begins, next_T.device) + ends[0]] = ends[1]
    drafter.feed(batch, streams_TND, next_T)
    count = min(plan.max_drafts, drafter.most)
    if ends is None or not count:
        drafter.take_part(shape)
        return None
    chain = Chain.behind([s for s, _ in every], [begin for _, begin in every], streams_TND, ends, shape.sequences)
    return torch.cat([drafter.guess(chain, choose) for _ in range(0, count, drafter.round)], dim=1)[:, :count]


class BlockDrafter:
    """Guesses with DSpark; see ``DeviceDrafter``. The rows that it looks at come from the main model's own pass.

    Its window reaches one position farther back than the main model's, from the position after the step's last token that counts:
    just as far as the pages go that the step was given.
    """

    def __init__(self, model: BlockModel, caches: Sequence[LayerCache], settings: DSpark) -> None:
        self.most = settings.k
        self.round = model.config.draft_block
        self._model = model
        self._caches = caches
        self._least = settings.min_confidence

    def feed(self, batch: Batch, streams_TND: Tensor, next_T: Tensor) -> None:
        """Nothing is left to keep."""

    def guess(self, chain: Chain, choose: Choose) -> Tensor:
        """Guess a block."""
        next_S = torch.where(chain.positions_S < 0, -1, chain.positions_S + 1)

        def pick(logits_SV: Tensor, place: int) -> Tensor:
            return choose(logits_SV.contiguous(), (next_S + place).int())

        windows = (chain.window_SP, chain.window_first_S)
        token_ids_SG, confidence_SG = self._model.draft_block(chain.tokens_S, next_S, *windows, self._caches, pick, chain.most)
        if not self._least:
            return token_ids_SG
        holds_SG = (confidence_SG >= self._least).long().cumprod(1).bool()
        return torch.where(holds_SG, token_ids_SG, UNKNOWN)

    def take_part(self, shape: StepShape) -> None:
        """See ``DeviceDrafter``."""
        if shape.max_drafts and self._model.share.gathered > 1:
            self._model.draft_take_part(shape.sequences)
