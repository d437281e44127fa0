"""Sampling of one token for every row of a step, on the CPU and on the GPU, with sampling settings by slot.

    x       = penalised(logits) + edits, stop ids at -inf while the text is too short, then what the host forbids or forces
    scaled  = (x - max x) / temperature, then min_p, then top_k, then top_p
    token   = argmax x, or of scaled - log(exponential variate of (stream, position, token id))

``kernels/sampling`` defines each stage and its bits. Each row of a step has a slot and a position. A table has one line per slot
with the settings of its request. The kernels read nothing from the host, so a captured step can sample.

Tokens are ranked by value, ties by id, and truncation keeps the first tokens of this ranking. The kernels do not sort:

* ``top_k`` up to ``BEST``: the ``k``-th best of the maxima of small groups is a threshold that little more than ``k`` tokens reach.
  These candidates are gathered and ranked against each other.
* ``top_p``: draw among all tokens. If the tokens ranked before the winner have less than the fraction p of the probability, the
  nucleus contains the winner, which is the result. Otherwise draw again among the tokens before it. The result is that of a draw
  from the nucleus; mostly the first draw gives it.
* Otherwise one program per row finds the rank of the last kept token bit by bit.

Numerics: integers, hash and fixed-point sums are those of the reference. ``exp``, ``log`` and ``log1p`` differ in the last bits:
if two tokens are within 1e-5 in the draw, or a nucleus ends within 1e-5 of its mass, the result may be another token.
Log-probabilities agree to 1e-5.

Shapes: R rows, V vocabulary, S slots.
"""

from __future__ import annotations

import ctypes
import enum
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels import sampling
from dsv4lite.kernels.dispatch import op

BEST = 128
"""Largest ``top_k`` that is found by gathering, and most best tokens that ``sample_rows`` lists (``scored_values``: any number)."""
CANDIDATES = 256  # most gathered tokens of a row
PIECE = 2048  # tokens of one program
GROUPS = 16  # groups of a piece, each with its maximum
HEADER = 5  # lines of the result before those of the best tokens
MOST_VOCABULARY = 1 << 23


class Column(enum.IntEnum):
    """Columns of the settings table, float64, which holds addresses exactly.

    Attributes:
        TEMPERATURE: 0 takes the best token.
        LOG_MIN_P: -inf without min_p.
        TOP_K: In [1, V), or 0 without top_k.
        TOP_P: In (0, 1].
        OCCURRENCES: Address of int32 [V], or 0. Lower 31 bits: how often the token was generated; sign bit: it is in the prompt.
        EDITS: Address of float32 [V], added to the logits, -inf for forbidden tokens; or 0.
        STOPS, NUM_STOPS: Address and number of int32 ids that are forbidden while the sampled token's position is below STOPS_FROM.
        STREAM: First of two columns with the int32 halves of the random stream.
        NUM_LOGPROBS: Number of best tokens to list with the sampled one's log-probability, at most BEST; -1 for no log-probability.
        PROCESSED: 1: log-probabilities are of the distribution that was sampled from; 0: of the model's logits.
    """

    TEMPERATURE = 0
    LOG_MIN_P = 1
    TOP_K = 2
    TOP_P = 3
    REPETITION = 4
    FREQUENCY = 5
    PRESENCE = 6
    OCCURRENCES = 7
    EDITS = 8
    STOPS = 9
    NUM_STOPS = 10
    STOPS_FROM = 11
    STREAM = 12
    NUM_LOGPROBS = 14
    PROCESSED = 15


NUM_COLUMNS = 16


class State(enum.IntEnum):
    """Columns of the state of each row between the stages of sampling, int64; floats are stored as their bits.

    Attributes:
        TOP, TOP_ID: Largest logit of an edited row, and the lowest token id that has it.
        DRAWN: The drawn token.
        LIMIT, TOTAL: The next draw of ``top_p`` takes tokens whose rank number is below LIMIT; the mass of all tokens.
        CUT: Rank number of the last token that ``top_k`` and ``top_p`` keep.
        REACH, COUNT: Threshold of candidates, and their number.
        LOG_SUM: Logarithm of the sum of exponentials of the distribution that is scored.
    """

    TOP = 0
    TOP_ID = 1
    DRAWN = 2
    LIMIT = 3
    TOTAL = 4
    CUT = 5
    REACH = 6
    COUNT = 7
    LOG_SUM = 8


STATE_COLUMNS = 16
ID_BITS = MOST_VOCABULARY.bit_length() - 1  # lower bits of a rank number, which hold the token id; the others hold the value


class Needs(enum.Flag):
    """Stages that the settings of a step's rows need; more stages than needed are harmless.

    Attributes:
        EDITS: Some row has penalties, bias or masks.
        DRAWS: Some row without ``top_k`` is drawn.
        NUCLEI: Some of these rows has ``top_p``.
        BEST: Some row has a ``top_k`` up to ``BEST``.
        SEARCHES: Some row has a larger ``top_k``, or ``top_p`` and log-probabilities of the truncated distribution.
        SCORES: Some row has log-probabilities.
        LISTS: Some row has log-probabilities of the best tokens.
    """

    EDITS = enum.auto()
    DRAWS = enum.auto()
    NUCLEI = enum.auto()
    BEST = enum.auto()
    SEARCHES = enum.auto()
    SCORES = enum.auto()
    LISTS = enum.auto()


NOTHING = Needs(0)
EVERYTHING = ~NOTHING


class RowMasks(NamedTuple):
    """What the host forbids or forces in M rows of a step, besides their settings. The settings of these rows have ``EDITS``.

    Attributes:
        rows: int64 [M].
        forbidden: bool [M, V].
        forced: int64 [M], the only possible token, even if it is forbidden elsewhere; -1 for none.
    """

    rows: Tensor
    forbidden: Tensor
    forced: Tensor


class RowSpace(NamedTuple):
    """Work buffers of ``sample_rows`` for up to R rows; their contents are valid until the next call.

    Attributes:
        edited: float32 [R, V], logits of edited rows.
        state: int64 [R, STATE_COLUMNS], see ``State``.
        partial: int64 [R, 2, pieces], results of pieces.
        peaks: int32 [R, pieces * GROUPS], maxima of groups.
        candidates: int64 [R, CANDIDATES], rank numbers.
        single: int32 [R], zeros: the places in their sequence of rows if each is its sequence's only one.
    """

    edited: Tensor
    state: Tensor
    partial: Tensor
    peaks: Tensor
    candidates: Tensor
    single: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device) -> RowSpace:
        """Allocate for ``rows`` rows."""
        assert 0 < vocab_size <= MOST_VOCABULARY
        pieces = -(-vocab_size // PIECE)
        return cls(
            edited=torch.empty(rows, vocab_size, dtype=torch.float32, device=device),
            state=torch.empty(rows, STATE_COLUMNS, dtype=torch.int64, device=device),
            partial=torch.empty(rows, 2, pieces, dtype=torch.int64, device=device),
            peaks=torch.empty(rows, pieces * GROUPS, dtype=torch.int32, device=device),
            candidates=torch.empty(rows, CANDIDATES, dtype=torch.int64, device=device),
            single=torch.zeros(rows, dtype=torch.int32, device=device),
        )


def row_bytes(vocab_size: int) -> int:
    """Return the bytes of one row of a ``RowSpace``."""
    return sum(part.nbytes for part in RowSpace.allocate(1, vocab_size, torch.device("meta")))


class SampleInputs(NamedTuple):
    """Arguments of ``sample_rows``.

    A sequence may have several consecutive rows, one for each of its draft tokens and one more. A row is sampled as if all earlier
    drafts were accepted. Only the samples up to and including the first that differs from its draft are counted and stored.

    Attributes:
        logits: float32 [R, V], contiguous; not modified.
        best: Result of ``sampling.argmax_finite`` for the logits.
        slots: int32 [R]; -1 for padding.
        positions: int32 [R], of the token before the sampled one.
        settings: float64 [S + 1, NUM_COLUMNS]; the last line is for padding.
        last_token: int64 [S + 1]; receives the last sampled token of each slot.
        space: For at least R rows.
        needs: Stages that the rows need.
        drafts: If a sequence has several rows, two int32 [R]: each row's input token, which after a sequence's first row is the
            draft for the sample of the previous row; and the row's place in its sequence, 0, 1, 2, …
        scored: int32 [R], tokens to score instead of sampled ones. Nothing is drawn, counted or stored: leave ``DRAWS`` and
            ``NUCLEI`` out of ``needs``. The log-probability is NaN where the logits are not finite or no token is possible.
        masks: What the host forbids or forces in this step; ``EDITS`` must be in ``needs``.
    """

    logits: Tensor
    best: tuple[Tensor, Tensor, Tensor]
    slots: Tensor
    positions: Tensor
    settings: Tensor
    last_token: Tensor
    space: RowSpace
    needs: Needs
    drafts: tuple[Tensor, Tensor] | None = None
    scored: Tensor | None = None
    masks: RowMasks | None = None


@op("sampling.rows_triton:sample_rows_triton")
def sample_rows(given: SampleInputs) -> Tensor:
    """Sample one token for each row, and count it. The reference reads the addresses in the settings, so all must be on the CPU.

    Returns:
        int32 [HEADER + 2 BEST, R]: token, whether the logits are finite, whether any token is possible, the token's rank and its
        log-probability (as bits); then id and log-probability (as bits) of each best token. Lines that no row needs are undefined.
        Where the logits are not finite or no token is possible, the token is undefined but within the vocabulary.
    """
    logits, (top, token_ids, finite), slots, positions, settings, last_token, space, needs, drafts, scored, masks = given
    vocab_size = logits.shape[1]
    lines, state = settings[slots.long()], space.state[: len(logits)]
    x, tokens, places = logits, *((slots, torch.zeros_like(slots)) if drafts is None else drafts)
    edited = _is_edited(lines, positions)
    if Needs.EDITS in needs and edited.any():
        rows = edited.nonzero()[:, 0]
        space.edited[rows] = _edited_logits(logits, lines, positions, tokens, places, rows)
        _put_best(space, rows)
        if masks is not None:
            apply_masks(space, masks)
        x = torch.where(edited[:, None], space.edited[: len(logits)], logits)
        top = torch.where(edited[:, None], _floats(state[:, State.TOP])[:, None], top)
        token_ids = torch.where(edited, state[:, State.TOP_ID], token_ids)
    feasible = (top.abs() < float("inf"))[:, 0]
    drawn = feasible & (lines[:, Column.TEMPERATURE] > 0)
    drawn = (drawn if scored is None else drawn & _is_truncated(lines)).nonzero()[:, 0]
    if needs & _DRAWN and len(drawn):
        scaled = _truncated(x[drawn], top[drawn], lines[drawn])
        if Needs.SCORES in needs:
            state[drawn, State.CUT] = _last_rank(scaled)
        if scored is None:
            streams = lines[drawn, Column.STREAM : Column.STREAM + 2].int()
            token_ids = token_ids.index_copy(0, drawn, sampling.draw(scaled, streams, positions[drawn] + 1))
    out = torch.zeros(HEADER + 2 * BEST, len(logits), dtype=torch.int32, device=logits.device)
    out[1], out[2] = finite, feasible
    if scored is None:
        out[0] = token_ids.clamp(0, vocab_size - 1)
        _count(out, slots, tokens, places, lines, last_token, vocab_size)
    else:
        out[0] = scored
        out[4].view(torch.float32).fill_(float("nan"))
    if Needs.SCORES in needs:
        usable = torch.where(lines[:, Column.PROCESSED] == 0, finite, feasible)
        rows = (usable & (lines[:, Column.NUM_LOGPROBS] >= 0)).nonzero()[:, 0]
        k = int(lines[rows, Column.NUM_LOGPROBS].max()) if len(rows) else 0
        values = scored_values(logits, given.best[0], lines[rows], positions[rows], space, rows)
        logprobs, ranks, top_ids, top_values = sampling.token_logprobs(values, out[0, rows].long(), k)
        out[3, rows], out[4, rows] = ranks, logprobs.view(torch.int32)
        out[HEADER : HEADER + 2 * k : 2, rows] = top_ids.t()
        out[HEADER + 1 : HEADER + 2 * k : 2, rows] = top_values.view(torch.int32).t()
    return out


def scored_values(logits: Tensor, top: Tensor, lines: Tensor, positions: Tensor, space: RowSpace, rows: Tensor) -> Tensor:
    """Return the logits of which some rows have log-probabilities: the model's, or those that ``sample_rows`` sampled from.

    The last call of ``sample_rows`` must have had these rows, and ``SCORES`` in its ``needs``.

    Args:
        logits: float32 [R, V].
        top: float32 [R, 1], the largest of each row.
        lines: float64 [L, NUM_COLUMNS], the settings of these rows.
        positions: int32 [L], of the tokens before the sampled ones.
        space: As ``sample_rows`` left it.
        rows: int64 [L], indices of the rows.

    Returns:
        float32 [L, V]; its ``log_softmax`` is the distribution. Tokens that could not be sampled have -inf.
    """
    state, processed = space.state[rows], lines[:, Column.PROCESSED] != 0
    edited = (processed & _is_edited(lines, positions))[:, None]
    x, top = logits[rows], top[rows]
    if _may_have_any(edited):
        x = torch.where(edited, space.edited[rows], x)
        top = torch.where(edited, _floats(state[:, State.TOP])[:, None], top)
    temperature = lines[:, Column.TEMPERATURE, None].float()
    drawn = processed[:, None] & (temperature > 0)
    scaled, truncated = _scaled(x, top, torch.where(drawn, temperature, 1.0), lines), _is_truncated(lines)
    if _may_have_any(truncated):
        after = _rank_numbers(scaled, torch.arange(x.shape[1], device=x.device)) > state[:, State.CUT, None]
        scaled = scaled.masked_fill(truncated[:, None] & after, float("-inf"))
    return torch.where(drawn, scaled, x) if _may_have_any(~drawn) else scaled


def _may_have_any(mask: Tensor) -> bool:
    """Return whether a mask may have a true element: always on a GPU, where reading it would wait for the device."""
    return mask.device.type != "cpu" or bool(mask.any())


def _is_truncated(lines: Tensor) -> Tensor:
    """Return which rows, of settings float64 [R, NUM_COLUMNS], have ``top_k`` or ``top_p``, bool [R]."""
    return (lines[:, Column.TOP_K] > 0) | (lines[:, Column.TOP_P] < 1)


def _is_edited(lines: Tensor, positions: Tensor) -> Tensor:
    """Return which rows, of settings float64 [R, NUM_COLUMNS], are sampled from edited logits, bool [R]."""
    return (lines[:, Column.OCCURRENCES] != 0) | (lines[:, Column.EDITS] != 0) | _forbids_stops(lines, positions)


def _forbids_stops(lines: Tensor, positions: Tensor) -> Tensor:
    """Return in which rows stop ids are forbidden because the text is too short, bool [R]."""
    return (lines[:, Column.NUM_STOPS] > 0) & (positions + 1 < lines[:, Column.STOPS_FROM])


def _scaled(x: Tensor, top: Tensor, temperature: Tensor, lines: Tensor) -> Tensor:
    """Apply temperature and ``min_p`` to rows."""
    scaled, log_min_p = sampling.scale(x, top, temperature), lines[:, Column.LOG_MIN_P, None].float()
    return sampling.drop_below(scaled, log_min_p) if _may_have_any(log_min_p > float("-inf")) else scaled


def apply_masks(space: RowSpace, masks: RowMasks) -> None:
    """Forbid and force tokens in edited rows, and find their best tokens again; does not wait for the device."""
    edited = space.edited.index_select(0, masks.rows).masked_fill_(masks.forbidden, float("-inf"))
    forced = masks.forced[:, None]
    at = forced.clamp_min(0)
    edited.scatter_(1, at, torch.where(forced < 0, edited.gather(1, at), 0.0))
    space.edited.index_copy_(0, masks.rows, edited)
    _put_best(space, masks.rows)


def _put_best(space: RowSpace, rows: Tensor) -> None:
    """Store the best tokens of edited rows, int64 [M], in their state."""
    top, token_ids, _ = sampling.argmax_finite(space.edited.index_select(0, rows))
    space.state[rows, State.TOP] = top[:, 0].view(torch.int32).long()
    space.state[rows, State.TOP_ID] = token_ids


_DRAWN = Needs.DRAWS | Needs.NUCLEI | Needs.BEST | Needs.SEARCHES


def _edited_logits(logits: Tensor, lines: Tensor, positions: Tensor, tokens: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Return penalised and edited logits of some rows, float32 [M, V]."""
    x, lines, vocab_size = logits[rows], lines[rows], logits.shape[1]
    penalised, occurrences = _rows_at_addresses(lines, Column.OCCURRENCES, vocab_size, torch.int32)
    if len(penalised):
        seen, at = tokens.tolist(), places.tolist()
        drafts = [(i, t) for i, row in enumerate(rows[penalised].tolist()) for t in seen[row + 1 - at[row] : row + 1]]
        if drafts:  # a row counts the drafts before it as generated
            indices = torch.tensor(drafts, dtype=torch.int64, device=x.device).unbind(1)
            occurrences.index_put_(indices, torch.ones_like(indices[0], dtype=torch.int32), accumulate=True)
        counts, chosen = occurrences & 0x7FFFFFFF, lines[penalised].float()
        x[penalised] = sampling.penalize(
            x[penalised],
            occurrences < 0,
            counts,
            repetition=chosen[:, Column.REPETITION, None],
            frequency=chosen[:, Column.FREQUENCY, None],
            presence=chosen[:, Column.PRESENCE, None],
        )
    changed, edits = _rows_at_addresses(lines, Column.EDITS, vocab_size, torch.float32)
    if len(changed):
        x[changed] += edits
    for i in _forbids_stops(lines, positions[rows]).nonzero()[:, 0].tolist():
        x[i, _at(int(lines[i, Column.STOPS]), int(lines[i, Column.NUM_STOPS]), torch.int32).long()] = float("-inf")
    return x


def _rows_at_addresses(lines: Tensor, column: Column, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return which of M rows have an address in a column, int64 [K], and copies of the vectors at these addresses, [K, V]."""
    rows = (lines[:, column] != 0).nonzero()[:, 0]
    found = [_at(int(address), vocab_size, dtype) for address in lines[rows, column].tolist()]
    return rows, torch.stack(found) if found else torch.empty(0, vocab_size, dtype=dtype, device=lines.device)


def _truncated(x: Tensor, top: Tensor, lines: Tensor) -> Tensor:
    """Apply temperature, ``min_p``, ``top_k`` and ``top_p`` to rows that are drawn."""
    scaled = _scaled(x, top, lines[:, Column.TEMPERATURE, None].float(), lines)
    top_k, top_p = lines[:, Column.TOP_K, None].long(), lines[:, Column.TOP_P, None]
    ranked = (top_k[:, 0] > 0).nonzero()[:, 0]
    if len(ranked):
        scaled[ranked] = sampling.keep_best(scaled[ranked], top_k[ranked], top_p[ranked], width=int(top_k.max()))
    nuclei = ((top_k == 0) & (top_p < 1))[:, 0].nonzero()[:, 0]
    if len(nuclei):
        scaled[nuclei] = sampling.keep_nucleus(scaled[nuclei], top_p[nuclei])
    return scaled


def _count(out: Tensor, slots: Tensor, tokens: Tensor, places: Tensor, lines: Tensor, last_token: Tensor, vocab_size: int) -> None:
    """Count and store the sampled tokens, up to the first in each sequence that differs from its draft."""
    sampled, seen, at, counts = out[0].tolist(), tokens.tolist(), places.tolist(), False
    for row, (slot, address) in enumerate(zip(slots.tolist(), lines[:, Column.OCCURRENCES].tolist(), strict=True)):
        counts = at[row] == 0 or (counts and sampled[row - 1] == seen[row])
        if counts:
            last_token[slot] = sampled[row]
        if counts and address:
            _at(int(address), vocab_size, torch.int32)[sampled[row]] += 1


def _at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return a view of ``count`` numbers of 4 bytes at an address of host memory."""
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=dtype)


def _floats(bits: Tensor) -> Tensor:
    return bits.int().view(torch.float32)


def _rank_numbers(values: Tensor, token_ids: Tensor) -> Tensor:
    """Return rank numbers, int64 >= 0: the better a token, the smaller."""
    return (0x7FFFFFFF - sampling.ascending(values).long()).bitwise_left_shift_(ID_BITS).bitwise_or_(token_ids)


def _last_rank(scaled: Tensor) -> Tensor:
    """Return the rank number of the last token that truncation keeps, int64 [R]."""
    least = scaled.masked_fill(scaled == float("-inf"), float("inf")).amin(-1, keepdim=True)
    token_ids = torch.arange(scaled.shape[1], device=scaled.device).masked_fill(scaled != least, -1).amax(-1, keepdim=True)
    return _rank_numbers(least, token_ids)[:, 0]
