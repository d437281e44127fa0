"""Sampling of whole steps on the device, from the table of slots, and on the host what the table cannot hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling.rows import HEADER, Needs, RowSpace, sample_rows
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.sampling.samples import Arrival, RowSamples, Samples
from dsv4lite.sampling.state import send
from dsv4lite.sampling.table import SlotTable
from dsv4lite.scheduling.step_plan import UNKNOWN, SequencePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNeeds:
    """What a batch of sequences asks for.

    Attributes:
        needs: Of the sequences that the table holds.
        wanted: Sequence, by its place, and number of best tokens of each of them that has log-probabilities.
        hosted: The other sequences, which are the ``Sampler``'s.
    """

    seq_ids: tuple[int, ...]
    needs: Needs
    wanted: tuple[tuple[int, int], ...]
    hosted: tuple[int, ...]

    @property
    def nothing(self) -> bool:
        """Whether every sequence just takes its best token, and nothing else is wanted or kept."""
        return not self.needs and not self.hosted


class DeviceSampler:
    """Samples a token for each row of a step, and picks guesses; mutable, owned by the engine's thread.

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
        self._slots: list[int] = []  # of its sequences

    def add(self, seq_id: int) -> None:
        """Take in a sequence that the sampler knows."""
        self._table.add(seq_id, self._sampler.state_of(seq_id))

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._table.remove(seq_id)

    def prepare(self, sequences: Sequence[SequencePlan]) -> RowNeeds:
        """Bring the table up to date for those who sample in a step, and return what they ask for."""
        seq_ids, slots = tuple([s.seq_id for s in sequences]), [s.slot for s in sequences]
        if self._last is None or self._last.seq_ids != seq_ids or self._slots != slots:
            self._table.seat(sequences)
            self._slots = slots
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
        run: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Launch what ``needs`` says; see ``sample_rows``. Nothing here asks the host, so that it can be recorded."""
        return sample_rows(logits, best, slots, positions, self._table.settings, last_token, self._space, needs, run)

    def guess(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Guess one token per row: the best one, or where the request draws, the one that its own draw there would take.

        The noise is that of the draw which the guess has to equal, so that the two agree as often as their distributions do.
        Nothing here asks the host, so that it can be recorded.

        Args:
            logits: float32 [S, V], of a drafter.
            slots: int32 [S], of the sequences; -1 for padding.
            positions: int32 [S], of the token before the guessed one.

        Returns:
            int64 [S].
        """
        drafting = self._table.drafting
        nowhere = torch.empty(len(drafting), dtype=torch.int64, device=logits.device)
        best, needs = argmax_finite(logits), Needs.EDITS | Needs.DRAWS
        return sample_rows(logits, best, slots, positions, drafting, nowhere, self._space, needs)[0].long()

    def score(self, logits: Tensor, sequence: SequencePlan, position: int, token_ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Score given tokens of a sequence with the kernels that sample them; see ``Sampler.score``."""
        seq_id = sequence.seq_id
        if seq_id not in self._table:
            return self._sampler.score(logits, seq_id, position, token_ids)
        self._last = None  # the line of the slot is written here
        self._table.seat([sequence])
        needs = self._table.needs((seq_id,)) & ~(Needs.DRAWS | Needs.NUCLEI)
        nowhere, num_best = torch.empty(0, dtype=torch.int64, device=self._device), self._table.num_logprobs(seq_id)
        most, parts = len(self._space.state), []
        for start in range(0, len(token_ids), most):
            rows = logits[start : start + most].clone() if len(logits) > most else logits
            given, every = token_ids[start : start + most], range(len(rows))
            before = [position + start - 1 + i for i in every]
            columns = [[sequence.slot for _ in every], before, [0, *given[:-1]], list(every), list(given)]
            slots, positions, seen, places, ids = send(torch.tensor(columns, dtype=torch.int32, device="cpu"), self._device)
            settings, best = self._table.settings, argmax_finite(rows)
            out = sample_rows(rows, best, slots, positions, settings, nowhere, self._space, needs, (seen, places), ids)
            self._table.count(seq_id, ids)
            listed = out[HEADER : HEADER + 2 * num_best].view(num_best, 2, len(rows))
            ids_TK, values_TK = listed.permute(1, 2, 0).contiguous()
            parts.append((out[4].view(torch.float32), out[3], ids_TK, values_TK.view(torch.float32)))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def sample(self, logits: Tensor, sequences: Sequence[SequencePlan], last_token: Tensor) -> RowSamples:
        """Sample the next tokens of some sequences.

        Args:
            logits: float32 [R, V], of the last position of each, and with drafts of the one before each of them, in order.
            sequences: What they ran in this step.
            last_token: int64 [slots + 1], where the tokens are remembered.
        """
        rows = self.prepare(sequences)
        each = [(s, place) for s in sequences for place in range(1 + s.drafts)]
        columns = [
            [s.slot for s, _ in each],
            [s.end - 1 - s.drafts + place for s, place in each],
            [s.token_ids[place - s.drafts - 1] for s, place in each],
            [place for _, place in each],
        ]
        slots, positions, *run = send(torch.tensor(columns, dtype=torch.int32, device="cpu"), self._device)
        out = self.run(logits, argmax_finite(logits), slots, positions, last_token, rows.needs, (run[0], run[1]))
        first_rows = [0, *accumulate(1 + s.drafts for s in sequences)][:-1]
        return self.finish(out, logits, rows, sequences, first_rows, last_token)

    def finish(
        self,
        out: Tensor,
        logits: Tensor,
        rows: RowNeeds,
        sequences: Sequence[SequencePlan],
        first_rows: Sequence[int],
        last_token: Tensor,
        begun: Arrival | None = None,
    ) -> RowSamples:
        """Sample what is the host's to sample, and send for the results.

        Args:
            out: From ``run``; the host's tokens are put between the others.
            logits: float32 [R, V] of the same rows.
            rows: From ``prepare``.
            sequences: Of these rows.
            first_rows: Of each sequence.
            last_token: Where the host's tokens are remembered, too.
            begun: Where the runs of the sequences begin, and with which guesses, if the host does not know; see ``RowSamples``.
        """
        hosted = None
        if rows.hosted:
            some = [(sequences[i], first_rows[i]) for i in rows.hosted]
            hosted = self._sample_hosted(out, logits, some, last_token)
        return RowSamples.of(out, rows.seq_ids, sequences, first_rows, wanted=rows.wanted, hosted=hosted, begun=begun)

    def _sample_hosted(self, out: Tensor, logits: Tensor, some: Sequence[tuple[SequencePlan, int]], last_token: Tensor) -> Samples:
        each = [(s, first + place, s.end - s.drafts + place) for s, first in some for place in range(1 + s.drafts)]
        guesses = [guess for s, _ in some for guess in (*s.token_ids[len(s.token_ids) - s.drafts :], UNKNOWN)]
        drafts = guesses if len(each) > len(some) else None
        places = torch.tensor([*(row for _, row, _ in each), *(s.slot for s, _ in some)], dtype=torch.int64, device="cpu")
        numbers, slots = send(places, self._device).split([len(each), len(some)])
        seq_ids, positions = [s.seq_id for s, _, _ in each], [position for _, _, position in each]
        theirs = self._sampler.sample(logits.index_select(0, numbers), seq_ids, positions, drafts)
        out[0, numbers] = theirs.token_ids.int()
        last_token[slots] = theirs.ends()[1]
        return theirs
