"""Sampling of whole steps on the device, from the table of slots, and on the host what the table cannot hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.engine.sampler import Sampler
from dsv4lite.engine.samples import RowSamples, Samples
from dsv4lite.engine.sampling_state import send
from dsv4lite.engine.sampling_table import SlotTable
from dsv4lite.engine.step import SequencePlan
from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling_rows import Needs, RowSpace, sample_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNeeds:
    """What a batch of sequences asks for.

    Attributes:
        needs: Of the rows that the table holds.
        wanted: Row and number of best tokens of each of them that has log-probabilities.
        hosted: The other rows, which are the ``Sampler``'s.
    """

    seq_ids: tuple[int, ...]
    needs: Needs
    wanted: tuple[tuple[int, int], ...]
    hosted: tuple[int, ...]

    @property
    def nothing(self) -> bool:
        """Whether every row just takes its best token, and nothing else is wanted or kept."""
        return not self.needs and not self.hosted


class DeviceSampler:
    """Samples one token for each row of a step; mutable, owned by the engine's thread.

    Args:
        sampler: Knows the sequences, and samples for those that the table cannot hold.
        slots: Of the state.
        rows: Most rows of a step.
        vocab_size: V.
        device: A CUDA device.
    """

    def __init__(self, sampler: Sampler, *, slots: int, rows: int, vocab_size: int, device: torch.device) -> None:
        self._sampler = sampler
        self._device = device
        self._table = SlotTable(slots, vocab_size, device)
        self._space = RowSpace.allocate(rows, vocab_size, device)
        self._last: RowNeeds | None = None

    def add(self, seq_id: int) -> None:
        """Take in a sequence that the sampler knows."""
        state = self._sampler.state_of(seq_id)
        if self._table.holds(state):
            self._table.add(seq_id, state)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._table.remove(seq_id)

    def prepare(self, sequences: Sequence[SequencePlan]) -> RowNeeds:
        """Bring the table up to date for those who sample in a step, and return what they ask for."""
        self._table.seat(sequences)
        seq_ids = tuple([s.seq_id for s in sequences])
        if self._last is None or self._last.seq_ids != seq_ids:
            scores = [(row, self._table.num_logprobs(seq_id)) for row, seq_id in enumerate(seq_ids)]
            self._last = RowNeeds(
                seq_ids=seq_ids,
                needs=self._table.needs(seq_ids),
                wanted=tuple((row, k) for row, k in scores if k >= 0),
                hosted=tuple(row for row, seq_id in enumerate(seq_ids) if seq_id not in self._table),
            )
        return self._last

    def run(
        self,
        logits: Tensor,
        best: tuple[Tensor, Tensor, Tensor],
        slots: Tensor,
        positions: Tensor,
        last_token: Tensor,
        needs: Needs,
    ) -> Tensor:
        """Launch what ``needs`` says; see ``sample_rows``. Nothing here asks the host, so that it can be recorded."""
        return sample_rows(logits, best, slots, positions, self._table.settings, last_token, self._space, needs)

    def sample(self, logits: Tensor, sequences: Sequence[SequencePlan], last_token: Tensor) -> RowSamples:
        """Sample the next tokens of some sequences.

        Args:
            logits: float32 [R, V], of the last position of each.
            sequences: What they ran in this step.
            last_token: int64 [slots + 1], where the tokens are remembered.
        """
        rows = self.prepare(sequences)
        places = torch.tensor([[s.slot for s in sequences], [s.end - 1 for s in sequences]], dtype=torch.int32, device="cpu")
        slots, positions = send(places, self._device)
        out = self.run(logits, argmax_finite(logits), slots, positions, last_token, rows.needs)
        return self.finish(out, logits, rows, sequences, last_token)

    def finish(
        self, out: Tensor, logits: Tensor, rows: RowNeeds, sequences: Sequence[SequencePlan], last_token: Tensor
    ) -> RowSamples:
        """Sample what is the host's to sample, and send for the results.

        Args:
            out: From ``run``, at least as many columns as there are sequences.
            logits: float32 [R, V] of the same rows.
            rows: From ``prepare``.
            sequences: Of these rows.
            last_token: Where the host's tokens are remembered, too.
        """
        hosted = self._sample_hosted(logits, rows, sequences, last_token)
        return RowSamples.of(out, rows.seq_ids, sequences, wanted=rows.wanted, hosted=hosted)

    def _sample_hosted(
        self, logits: Tensor, rows: RowNeeds, sequences: Sequence[SequencePlan], last_token: Tensor
    ) -> Samples | None:
        if not rows.hosted:
            return None
        some = [sequences[row] for row in rows.hosted]
        places = torch.tensor([rows.hosted, [s.slot for s in some]], dtype=torch.int64, device="cpu")
        numbers, slots = send(places, self._device)
        theirs = self._sampler.sample(logits.index_select(0, numbers), [s.seq_id for s in some], [s.end for s in some])
        last_token[slots] = theirs.token_ids
        return theirs
