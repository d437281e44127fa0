"""Sampled tokens and scores of a step, and their asynchronous copies to the host."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from ctypes import string_at
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.errors import RequestFailedError
from dsv4lite.kernels.dispatch import send
from dsv4lite.kernels.sampling.rows import BEST, HEADER
from dsv4lite.request import Logprobs, LogprobsMode, TokenLogprob
from dsv4lite.scheduling.step_plan import UNKNOWN, Sampled, SequencePlan, sampled_of

_NONE = array("i"), array("f")


class HostCopy:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, x: Tensor) -> None:
        on_gpu = x.device.type == "cuda"
        self._x = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=on_gpu)
        self._x.copy_(x, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if on_gpu:
            self._event = torch.cuda.current_stream(x.device).record_event()

    def wait(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._x


class GivenSpan(NamedTuple):
    """Consecutive tokens of a sequence that are scored, not sampled.

    Attributes:
        sequence: Plan of their sequence.
        position: Index of the first one within prompt and output.
        token_ids: The tokens.
    """

    sequence: SequencePlan
    position: int
    token_ids: Sequence[int]

    @property
    def end(self) -> int:
        """Index after the last one."""
        return self.position + len(self.token_ids)


def slice_spans(spans: Sequence[GivenSpan], begin: int, end: int) -> list[GivenSpan]:
    """Return the tokens ``[begin, end)`` of concatenated spans."""
    found, first = [], 0
    for sequence, position, token_ids in spans:
        low, high = max(begin - first, 0), min(end - first, len(token_ids))
        if low < high:
            found.append(GivenSpan(sequence, position + low, token_ids[low:high]))
        first += len(token_ids)
    return found


class Scores:
    """Log-probabilities of a step's given tokens, being copied to the host; mutable until the step has been launched."""

    def __init__(self) -> None:
        self._parts: list[tuple[Sequence[GivenSpan], Sequence[int], LogprobsMode, list[HostCopy]]] = []

    def add(self, spans: Sequence[GivenSpan], tops: Sequence[int], mode: LogprobsMode, scores: Sequence[Tensor]) -> None:
        """Add the scores of some spans, one row per token.

        Args:
            spans: The spans, after those that were added before.
            tops: Number of best tokens that each span lists.
            mode: Distribution of the scores.
            scores: Results of ``kernels.sampling.token_logprobs``.
        """
        self._parts.append((spans, tops, mode, [HostCopy(x) for x in scores]))

    def to_host(self) -> dict[int, Logprobs]:
        """Wait for the scores; return them by sequence."""
        found: dict[int, list[Logprobs]] = {}
        for spans, tops, mode, scores in self._parts:
            columns, first = [x.wait() for x in scores], 0
            for given, top in zip(spans, tops, strict=True):
                sampled, ranks, top_ids, values = (x[first : first + len(given.token_ids)] for x in columns)
                part = Logprobs(sampled=sampled, ranks=ranks, token_ids=top_ids[:, :top], values=values[:, :top], mode=mode)
                found.setdefault(given.sequence.seq_id, []).append(part)
                first += len(given.token_ids)
        return {seq_id: Logprobs.join(parts) for seq_id, parts in found.items()}


class Samples:
    """Results of ``sample_rows`` for one step; the copy of the needed lines to the host starts at once.

    Args:
        out: int32 [lines, R].
        sequences: S plans.
        first_rows: The row of each sequence's first sampled token; one more follows for each draft.
        wanted: See ``RowNeeds``.
        failures: Rows in which the request itself failed, with the reason.
        long: Rows that list more than ``BEST`` tokens, and their lists: ids and log-probabilities (as bits), int32 [2, L, K].
        kept: Rows that record which tokens could be sampled, and these tokens, bool [L, V].
        placed: If the host does not know where spans start: position, number of drafts, copy of the compressor state and tokens
            of each span, int32 [3 + width, S].
    """

    def __init__(
        self,
        out: Tensor,
        sequences: Sequence[SequencePlan],
        first_rows: Sequence[int],
        *,
        wanted: tuple[tuple[int, int], ...] = (),
        failures: Mapping[int, RequestFailedError] | None = None,
        long: tuple[Sequence[int], Tensor] | None = None,
        kept: tuple[Sequence[int], Tensor] | None = None,
        placed: HostCopy | None = None,
    ) -> None:
        lines = HEADER + 2 * max([k for _, k in wanted if k <= BEST], default=0) if wanted else 3
        self.out, self._sequences, self._first_rows = out, sequences, first_rows
        self._wanted, self._failures = wanted, failures or {}
        self._long = None if long is None else (long[0], HostCopy(long[1]))
        self._kept = None if kept is None else (kept[0], HostCopy(kept[1]))
        self._download, self._placed = HostCopy(out[:lines]), placed

    def not_finite(self) -> set[int]:
        """Return the sequences with logits that are not finite. Waits for the device."""
        finite = self.out[1].tolist()
        rows = zip(self._sequences, self._first_rows, strict=True)
        return {s.seq_id for s, row in rows if not all(finite[row : row + 1 + s.drafts])}

    def accepted(self) -> tuple[Tensor, Tensor]:
        """Return the number of accepted drafts of each sequence and the token that follows them, int64 [S] twice, on the device.

        Only for steps whose drafts the host knows. Does not wait for the device.
        """
        tokens_R, device = self.out[0].long(), self.out.device
        first_S = send(torch.tensor(self._first_rows, dtype=torch.int64, device="cpu"), device)
        width = max(s.drafts for s in self._sequences)
        if not width:
            return torch.zeros_like(first_S), tokens_R[first_S]
        padded = [(*s.token_ids[len(s.token_ids) - s.drafts :], *[UNKNOWN] * (width - s.drafts)) for s in self._sequences]
        drafts_SK = send(torch.tensor(padded, dtype=torch.int64, device="cpu"), device)
        rows_SK = first_S[:, None] + torch.arange(width, device=device)
        accepted_SK = tokens_R[rows_SK.clamp_max(len(tokens_R) - 1)] == drafts_SK
        accepted_S = accepted_SK.long().cumprod(1).sum(1)
        return accepted_S, tokens_R[first_S + accepted_S]

    def to_host(self) -> dict[int, Sampled]:
        """Wait for the tokens; return those of each sequence up to its first rejected draft. A row that failed has an ``error``."""
        lines = self._download.wait()
        token_ids, finite, feasible = lines[:3].tolist()
        if self._wanted or self._failures or 0 in finite or 0 in feasible:
            return self._detailed(lines)
        if self._placed is None and not any(s.drafts for s in self._sequences):
            return {s.seq_id: Sampled(token_ids[row]) for s, row in zip(self._sequences, self._first_rows, strict=True)}
        rows = zip(self._sequences, self._first_rows, self._drafts(), strict=True)
        return {s.seq_id: _accepted(token_ids, row, drafts) for s, row, drafts in rows}

    def _drafts(self) -> list[tuple[int, ...]]:
        """Return the drafts of each sequence."""
        if self._placed is None:
            return [s.token_ids[len(s.token_ids) - s.drafts :] for s in self._sequences]
        _, counts, _, *columns = self._placed.wait().tolist()
        return [span[1 : 1 + count] for count, span in zip(counts, zip(*columns, strict=True), strict=True)]

    def _position(self, i: int) -> int:
        """Return the position of the first token that a sequence sampled."""
        s = self._sequences[i]
        return s.end - s.drafts if self._placed is None else int(self._placed.wait()[0, i]) + 1

    def _detailed(self, lines: Tensor) -> dict[int, Sampled]:
        """Return tokens with their log-probabilities and errors."""
        token_ids, finite, feasible = lines[:3].tolist()
        logprobs = self._logprobs(lines)
        results = {}
        for i, (s, first_row, drafts) in enumerate(zip(self._sequences, self._first_rows, self._drafts(), strict=True)):
            found = []
            for place in range(1 + len(drafts)):
                row, error = first_row + place, None
                if not (finite[row] and feasible[row]):
                    error = _failure(self._position(i) + place, finite=bool(finite[row]))
                error = error or self._failures.get(row)
                found.append(Sampled(token_ids[row], logprobs.get(row) if error is None else None, error))
                if error is not None or (place < len(drafts) and token_ids[row] != drafts[place]):
                    break
            results[s.seq_id] = found[0]._replace(after=tuple(found[1:]), drafted=len(drafts)) if drafts else found[0]
        return results

    def _logprobs(self, lines: Tensor) -> dict[int, TokenLogprob]:
        """Return the log-probabilities of the rows that have them."""
        if not self._wanted:
            return {}
        ranks, logprobs = lines[3].tolist(), lines[4].view(torch.float32).tolist()
        best = dict(enumerate(_rows(torch.stack((lines[HEADER::2].t(), lines[HEADER + 1 :: 2].t())))))
        if self._long is not None:
            rows, lists = self._long
            best.update(zip(rows, _rows(lists.wait()), strict=True))
        found, drafts, kept = {}, self._drafts(), {}
        if self._kept is not None:
            rows, masks = self._kept
            kept = {row: mask.nonzero()[:, 0].int() for row, mask in zip(rows, masks.wait(), strict=True)}
        for i, k in self._wanted:
            for row in range(self._first_rows[i], self._first_rows[i] + 1 + len(drafts[i])):
                ids, values = best[row] if k else _NONE
                found[row] = TokenLogprob(logprobs[row], ranks[row], ids[:k], values[:k], kept.get(row))
        return found


def _rows(lists: Tensor) -> list[tuple[array[int], array[float]]]:
    """Return the ids and the values of each row of int32 [2, R, K], the values as the bits of float32. Empty rows are left out."""
    lists = lists.contiguous()
    (_, rows, k), size = lists.shape, lists[0].nbytes
    ids, values = array("i", string_at(lists[0].data_ptr(), size)), array("f", string_at(lists[1].data_ptr(), size))
    return [(ids[at : at + k], values[at : at + k]) for at in range(0, rows * k, k or 1)]


def _accepted(token_ids: list[int], row: int, drafts: tuple[int, ...]) -> Sampled:
    """Return the tokens sampled from ``row`` on, up to the first that differs from its draft."""
    last = row
    for draft in drafts:
        if token_ids[last] != draft:
            break
        last += 1
    after = tuple([sampled_of((token_id, None, None, (), (), 0)) for token_id in token_ids[row + 1 : last + 1]])
    return sampled_of((token_ids[row], None, None, after, (), len(drafts)))


def _failure(position: int, *, finite: bool) -> RequestFailedError:
    """Return why no token could be sampled."""
    if finite:
        return RequestFailedError(
            f"no token may follow at position {position}: allowed_token_ids, bad_words_ids, min_tokens, logit_bias and"
            " structured_outputs together leave none; relax one of them"
        )
    return RequestFailedError(
        f"the model's logits at position {position} are NaN, infinite or all -inf, so no token can be sampled; other requests are"
        " unaffected. If it repeats, check the weights"
    )
