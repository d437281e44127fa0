"""One step's tokens on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.errors import RequestFailedError
from dsv4lite.kernels.sampling.rows import BEST, HEADER
from dsv4lite.request import TokenLogprob
from dsv4lite.sampling.state import send
from dsv4lite.scheduling.step_plan import UNKNOWN, Sampled, SequencePlan, sampled_of


class Arrival:
    """A copy of a tensor to the host, which the host does not wait for until it needs the values."""

    def __init__(self, x: Tensor) -> None:
        on_gpu = x.device.type == "cuda"
        self._x = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=on_gpu)
        self._x.copy_(x, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if on_gpu:
            self._event = torch.cuda.current_stream(x.device).record_event()

    def wait(self) -> Tensor:
        """Return the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._x


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """One step's tokens as ``sample_rows`` leaves them, on their way to the host.

    Attributes:
        seq_ids: Of the S sequences.
        sequences: Likewise, their plans.
        first_rows: Likewise, the row of the first sampled token; one more follows for each draft.
        out: int32 [lines, R].
        wanted: Sequence, by its place, and number of best tokens of each one that has log-probabilities.
        failures: Rows in which the request itself failed, with the reason.
        long_rows: Rows whose lists have more than ``BEST`` tokens, in the order of ``long_lists``.
        long_lists: int32 [2, L, K], ids and log-probabilities (as bits) of their best tokens.
        download: The wanted lines of ``out``.
        begun: If the host did not know where runs begin: position, number of drafts, copy of the carry and tokens of each, int32
            [3 + width, S].
    """

    seq_ids: tuple[int, ...]
    sequences: Sequence[SequencePlan]
    first_rows: Sequence[int]
    out: Tensor
    wanted: tuple[tuple[int, int], ...]
    failures: Mapping[int, RequestFailedError]
    long_rows: tuple[int, ...]
    long_lists: Arrival | None
    download: Arrival
    begun: Arrival | None

    @classmethod
    def of(
        cls,
        out: Tensor,
        seq_ids: tuple[int, ...],
        sequences: Sequence[SequencePlan],
        first_rows: Sequence[int],
        *,
        wanted: tuple[tuple[int, int], ...] = (),
        failures: Mapping[int, RequestFailedError] | None = None,
        long_rows: tuple[int, ...] = (),
        long_lists: Tensor | None = None,
        begun: Arrival | None = None,
    ) -> Samples:
        """Start the copy of as many lines of ``out`` as are wanted."""
        lines = HEADER + 2 * max([k for _, k in wanted if k <= BEST], default=0) if wanted else 3
        return cls(
            seq_ids=seq_ids,
            sequences=sequences,
            first_rows=first_rows,
            out=out,
            wanted=wanted,
            failures=failures or {},
            long_rows=long_rows,
            long_lists=None if long_lists is None else Arrival(long_lists),
            download=Arrival(out[:lines]),
            begun=begun,
        )

    def ill(self) -> set[int]:
        """Return the sequences with logits that are unusable. Waits for the device."""
        finite = self.out[1].tolist()
        rows = zip(self.seq_ids, self.sequences, self.first_rows, strict=True)
        return {seq_id for seq_id, s, row in rows if not all(finite[row : row + 1 + s.drafts])}

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return how many drafts of each sequence are right, and the token after them, int64 [S] twice, on the device.

        The host knows all drafts, and does not wait.
        """
        tokens_R, device = self.out[0].long(), self.out.device
        first_S = send(torch.tensor(self.first_rows, dtype=torch.int64, device="cpu"), device)
        width = max(s.drafts for s in self.sequences)
        if not width:
            return torch.zeros_like(first_S), tokens_R[first_S]
        padded = [(*s.token_ids[len(s.token_ids) - s.drafts :], *[UNKNOWN] * (width - s.drafts)) for s in self.sequences]
        drafts_SK = send(torch.tensor(padded, dtype=torch.int64, device="cpu"), device)
        rows_SK = first_S[:, None] + torch.arange(width, device=device)
        right_SK = tokens_R[rows_SK.clamp_max(len(tokens_R) - 1)] == drafts_SK
        right_S = right_SK.long().cumprod(1).sum(1)
        return right_S, tokens_R[first_S + right_S]

    def to_host(self) -> dict[int, Sampled]:
        """Wait for the tokens, of each sequence up to its first wrong draft; a row that failed has an ``error`` in its place."""
        lines = self.download.wait()
        token_ids, finite, feasible = lines[:3].tolist()
        if self.wanted or self.failures or 0 in finite or 0 in feasible:
            return self._detailed(lines)
        if self.begun is None and not any(s.drafts for s in self.sequences):
            return dict(zip(self.seq_ids, map(Sampled, [token_ids[row] for row in self.first_rows]), strict=True))
        rows = zip(self.seq_ids, self.first_rows, self._drafts(), strict=True)
        return {seq_id: _accepted(token_ids, row, drafts) for seq_id, row, drafts in rows}

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

    def _detailed(self, lines: Tensor) -> dict[int, Sampled]:
        """Return tokens with their log-probabilities and errors."""
        token_ids, finite, feasible = lines[:3].tolist()
        logprobs = self._logprobs(lines)
        results = {}
        for i, (seq_id, first_row, drafts) in enumerate(zip(self.seq_ids, self.first_rows, self._drafts(), strict=True)):
            found = []
            for place in range(1 + len(drafts)):
                row, error = first_row + place, None
                if not (finite[row] and feasible[row]):
                    error = failure(self._position(i) + place, finite=bool(finite[row]), feasible=bool(feasible[row]))
                error = error or self.failures.get(row)
                found.append(Sampled(token_ids[row], logprobs.get(row) if error is None else None, error))
                if error is not None or (place < len(drafts) and token_ids[row] != drafts[place]):
                    break
            results[seq_id] = found[0]._replace(after=tuple(found[1:]), drafted=len(drafts))
        return results

    def _logprobs(self, lines: Tensor) -> dict[int, TokenLogprob]:
        """Return the log-probabilities of the rows that have them; no tensor is left in pinned memory."""
        if not self.wanted:
            return {}
        ranks, logprobs = lines[3].tolist(), lines[4].view(torch.float32).tolist()
        short = torch.stack((lines[HEADER::2], lines[HEADER + 1 :: 2])).transpose(1, 2).contiguous()
        long = short if self.long_lists is None else self.long_lists.wait().clone()
        at = {row: (long, i) for i, row in enumerate(self.long_rows)}
        found, drafts = {}, self._drafts()
        for i, k in self.wanted:
            for row in range(self.first_rows[i], self.first_rows[i] + 1 + len(drafts[i])):
                lists, index = at.get(row, (short, row))
                ids, values = lists[:, index, :k]
                values = values.view(torch.float32)
                found[row] = TokenLogprob(logprob=logprobs[row], rank=ranks[row], token_ids=ids, values=values)
        return found


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
