"""One step's tokens on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.errors import RequestFailedError
from dsv4lite.kernels.sampling.rows import HEADER
from dsv4lite.request import TokenLogprob
from dsv4lite.sampling.runs import Runs
from dsv4lite.scheduling.step_plan import UNKNOWN, Sampled, SequencePlan, sampled_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """One step's tokens, still on the device, on their way to the host.

    Attributes:
        runs: Whose the R rows are.
        positions: Of the sampled tokens.
        token_ids: int64 [R]; an arbitrary token of the vocabulary where the row failed.
        finite: bool [R], false where the model's logits are unusable: NaN, +inf, or all -inf.
        feasible: bool [R], false where besides the settings of the request leave no token.
        failures: Rows that failed before, with the reason.
        wanted: Row and number of best tokens of each of the L rows that have log-probabilities.
        logprobs: float32 [L], of the sampled tokens.
        ranks: int32 [L].
        top_ids: int32 [L, K], the best tokens, K the most that any row wants.
        top_values: float32 [L, K].
    """

    runs: Runs
    positions: tuple[int, ...]
    token_ids: Tensor
    finite: Tensor
    feasible: Tensor
    failures: Mapping[int, RequestFailedError]
    wanted: tuple[tuple[int, int], ...]
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor
    download: Download

    @classmethod
    def best(cls, seq_ids: Sequence[int], positions: Sequence[int], top: Tensor) -> Samples:
        """Return the best tokens of rows without settings.

        Args:
            seq_ids: Of the R rows.
            positions: Of the sampled tokens.
            top: int32 [3, B >= R], tokens and twice whether the row can be sampled from.
        """
        rows = top[:, : len(seq_ids)].long()
        token_ids, finite, _ = rows
        nothing = token_ids[:0].int()
        return cls(
            runs=Runs.of(seq_ids),
            positions=tuple(positions),
            token_ids=token_ids,
            finite=finite,
            feasible=finite,
            failures={},
            wanted=(),
            logprobs=nothing.float(),
            ranks=nothing,
            top_ids=nothing.view(0, 0),
            top_values=nothing.float().view(0, 0),
            download=Download((rows.flatten(),), ()),
        )

    def ill(self) -> set[int]:
        """Return the sequences with logits that are unusable. Waits for the device."""
        finite = self.finite.tolist()
        return {s for s, (begin, end) in zip(self.runs.seq_ids, self.runs.spans(), strict=True) if not all(finite[begin:end])}

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return how many drafts of each sequence are right, and the token behind them, int64 [S] twice; on the device."""
        return self.runs.ends(self.token_ids)

    def to_host(self) -> dict[int, Sampled]:
        """Wait for the tokens; a row that failed has an ``error`` in its place."""
        integers, floats = self.download.wait()
        num_rows, num_scores = len(self.positions), len(self.wanted)
        token_ids, finite, feasible = integers[: 3 * num_rows].view(3, num_rows).tolist()
        ranks = integers[3 * num_rows : 3 * num_rows + num_scores].tolist()
        top_ids = integers[3 * num_rows + num_scores :].to(torch.int32).view(num_scores, self.top_ids.shape[1])
        logprobs = floats[:num_scores].tolist()
        top_values = floats[num_scores:].view(num_scores, self.top_values.shape[1])
        scored = {
            row: TokenLogprob(logprob=logprobs[i], rank=ranks[i], token_ids=top_ids[i, :k], values=top_values[i, :k])
            for i, (row, k) in enumerate(self.wanted)
        }
        results = {}
        for seq_id, (begin, end) in zip(self.runs.seq_ids, self.runs.spans(), strict=True):
            found = []
            for row in range(begin, end):
                error = failure(self.positions[row], finite=bool(finite[row]), feasible=bool(feasible[row])) or self.failures.get(
                    row
                )
                logprob = scored.get(row) if error is None else None
                found.append(Sampled(token_id=token_ids[row], logprob=logprob, error=error))
                if error is not None or token_ids[row] != self.runs.drafts[row]:
                    break
            drafted = end - begin - 1
            results[seq_id] = found[0]._replace(after=tuple(found[1:]), drafted=drafted) if drafted else found[0]
        return results


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSamples:
    """One step's tokens as ``sample_rows`` leaves them, on their way to the host.

    Attributes:
        seq_ids: Of the S sequences.
        sequences: Likewise.
        first_rows: Likewise, the row of the first sampled token; one more follows for each draft. Without drafts they are as far
            apart as the first two.
        out: int32 [lines, R].
        wanted: Sequence, by its place, and number of best tokens of each one that has log-probabilities.
        hosted: Samples of those sequences that the host has sampled.
        begun: If the host did not know where runs begin: position, number of guesses, copy of the carry and tokens of each, int32
            [3 + width, S], on their way.
    """

    seq_ids: tuple[int, ...]
    sequences: Sequence[SequencePlan]
    first_rows: Sequence[int]
    out: Tensor
    wanted: tuple[tuple[int, int], ...]
    hosted: Samples | None
    download: Arrival
    begun: Arrival | None = None

    @classmethod
    def of(
        cls,
        out: Tensor,
        seq_ids: tuple[int, ...],
        sequences: Sequence[SequencePlan],
        first_rows: Sequence[int],
        *,
        wanted: tuple[tuple[int, int], ...] = (),
        hosted: Samples | None = None,
        begun: Arrival | None = None,
    ) -> RowSamples:
        """Send for as many lines of ``out`` as are wanted."""
        lines = HEADER + 2 * max(k for _, k in wanted) if wanted else 3
        download = Arrival(out[:lines])
        return cls(
            seq_ids=seq_ids,
            sequences=sequences,
            first_rows=first_rows,
            out=out,
            wanted=wanted,
            hosted=hosted,
            download=download,
            begun=begun,
        )

    def ill(self) -> set[int]:
        """Return the sequences with logits that are unusable. Waits for the device."""
        finite = self.out[1].tolist()
        rows = zip(self.seq_ids, self.sequences, self.first_rows, strict=True)
        return {seq_id for seq_id, s, row in rows if not all(finite[row : row + 1 + s.drafts])}

    def ends(self) -> tuple[Tensor, Tensor]:
        """See ``Samples.ends``; where no sequence has rows that it does not need."""
        drafts = tuple(d for s in self.sequences for d in (*s.token_ids[len(s.token_ids) - s.drafts :], UNKNOWN))
        return Runs(seq_ids=self.seq_ids, first_rows=(*self.first_rows, len(drafts)), drafts=drafts).ends(self.out[0].long())

    def to_host(self) -> dict[int, Sampled]:
        """Wait for the tokens; a row that failed has an ``error`` in its place."""
        lines = self.download.wait()
        if self.begun is not None or any(s.drafts for s in self.sequences):
            results = self._runs_to_host(lines)
        else:
            first = self.first_rows
            results = self._singles_to_host(lines[:, :: first[1] - first[0] if len(first) > 1 else 1][:, : len(first)])
        if self.hosted is not None:
            results.update(self.hosted.to_host())
        return results

    def _singles_to_host(self, lines: Tensor) -> dict[int, Sampled]:
        """Return what sequences of one row each have sampled, which nearly all have where nobody guesses."""
        token_ids, finite, feasible = lines[:3].tolist()
        results = dict(zip(self.seq_ids, map(Sampled, token_ids), strict=True))
        if self.wanted:
            ranks, logprobs = lines[3].tolist(), lines[4].view(torch.float32).tolist()
            ids, values = lines[HEADER::2].t().contiguous(), lines[HEADER + 1 :: 2].t().contiguous().view(torch.float32)
            for row, k in self.wanted:
                scored = TokenLogprob(logprob=logprobs[row], rank=ranks[row], token_ids=ids[row, :k], values=values[row, :k])
                results[self.seq_ids[row]] = Sampled(token_ids[row], scored)
        if 0 in finite or 0 in feasible:
            for row, seq_id in enumerate(self.seq_ids):
                error = failure(self.sequences[row].end, finite=bool(finite[row]), feasible=bool(feasible[row]))
                if error is not None:
                    results[seq_id] = Sampled(token_ids[row], None, error)
        return results

    def _drafts(self) -> list[tuple[int, ...]]:
        """Return the drafts of each sequence."""
        if self.begun is None:
            return [s.token_ids[len(s.token_ids) - s.drafts :] for s in self.sequences]
        _, counts, _, *columns = self.begun.wait().tolist()
        return [run[1 : 1 + count] for count, run in zip(counts, zip(*columns, strict=True), strict=True)]

    def _position(self, i: int) -> int:
        """Return the position of the first token that a sequence has sampled."""
        s = self.sequences[i]
        return s.end - s.drafts if self.begun is None else int(self.begun.wait()[0, i]) + 1

    def _runs_to_host(self, lines: Tensor) -> dict[int, Sampled]:
        """Return what each sequence has sampled up to its first wrong draft."""
        token_ids, finite, feasible = lines[:3].tolist()
        every = self._drafts()
        if not self.wanted and 0 not in finite and 0 not in feasible:
            rows = zip(self.seq_ids, self.first_rows, every, strict=True)
            return {seq_id: _accepted(token_ids, row, drafts) for seq_id, row, drafts in rows}
        listed = dict(self.wanted)
        floats = lines.view(torch.float32)
        results = {}
        for i, (seq_id, first_row, drafts) in enumerate(zip(self.seq_ids, self.first_rows, every, strict=True)):
            found = []
            for place in range(1 + len(drafts)):
                row, error, logprob = first_row + place, None, None
                if not (finite[row] and feasible[row]):
                    error = failure(self._position(i) + place, finite=bool(finite[row]), feasible=bool(feasible[row]))
                if i in listed and error is None:
                    end = HEADER + 2 * listed[i]
                    logprob = TokenLogprob(
                        logprob=float(floats[4, row]),
                        rank=int(lines[3, row]),
                        token_ids=lines[HEADER:end:2, row].clone(),
                        values=floats[HEADER + 1 : end + 1 : 2, row].clone(),
                    )
                found.append(Sampled(token_ids[row], logprob, error))
                if error is not None or (place < len(drafts) and token_ids[row] != drafts[place]):
                    break
            results[seq_id] = found[0]._replace(after=tuple(found[1:]), drafted=len(drafts))
        return results


def _accepted(token_ids: list[int], row: int, drafts: tuple[int, ...]) -> Sampled:
    """Return the tokens that were sampled from a row on, up to the first that is not the draft of it."""
    last = row
    for draft in drafts:
        if token_ids[last] != draft:
            break
        last += 1
    right = token_ids[row + 1 : last + 1]
    after = tuple([sampled_of((token_id, None, None, (), (), 0)) for token_id in right]) if right else ()
    return sampled_of((token_ids[row], None, None, after, (), len(drafts)))


def failure(position: int, *, finite: bool, feasible: bool) -> RequestFailedError | None:
    """Return why no token could be sampled, if so."""
    place = f"at position {position}"
    if not finite:
        return RequestFailedError(
            f"the model's logits {place} are NaN, infinite or all -inf, so no token can be sampled; other requests are"
            " unaffected. If it repeats, check the weights"
        )
    if not feasible:
        return RequestFailedError(
            f"no token may follow {place}: allowed_token_ids, bad_words_ids, min_tokens, logit_bias and structured_outputs"
            " together leave none; relax one of them"
        )
    return None


class Arrival:
    """A tensor's copy on its way to the host, which goes on meanwhile."""

    def __init__(self, x: Tensor) -> None:
        on_gpu = x.device.type == "cuda"
        self._x = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=on_gpu)
        self._x.copy_(x, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if on_gpu:
            self._event = torch.cuda.current_stream(x.device).record_event()

    def wait(self) -> Tensor:
        """Return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._x


class Download:
    """Device tensors on their way to the host in one copy, which runs while the host goes on.

    What ``wait`` returns for users to keep, top ids and floats, has left the pinned buffer by its conversion to 32 bits.
    """

    def __init__(self, integers: Sequence[Tensor], floats: Sequence[Tensor]) -> None:
        packed = torch.cat([*integers, *(x.view(torch.int32) for x in floats)])
        self._num_integers = sum(map(len, integers))
        self._arrival = Arrival(packed)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the integers (int64) and the floats (float32), each in one row."""
        packed = self._arrival.wait()
        return packed[: self._num_integers], packed[self._num_integers :].to(torch.int32).view(torch.float32)
