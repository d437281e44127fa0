"""Sampling by rows, with the settings of slots: one token for every row of a step, on the CPU and on the GPU alike.

    x       = penalised(logits) + edits, stop ids at -inf while the text is too short, then what the host forbids or forces
    scaled  = (x - max x) / temperature, then min_p, then top_k, then top_p
    token   = argmax x, or of scaled - log(exponential variate of (stream, position, token id))

What each stage means, and its bits, is written in ``kernels/sampling``. A row says which slot it belongs to and where it stands;
what its request asked for is a line of a table of slots. The kernels ask the host for nothing, so a captured step can sample.

Tokens are ranked by value, equal ones by id, and what a row keeps is always the first of that ranking. The kernels do not sort:

* ``top_k`` up to ``BEST``: the ``k``-th best of the maxima of small groups is passed by little more than ``k`` tokens. They are
  gathered and ranked against each other.
* ``top_p``: the token that wins the race among all is kept if the tokens ranked before it weigh less than p; if not, only those
  before it can be kept, and the race goes on among them. The winner is that of the race among the kept ones, mostly found at once.
* Any other: the rank at which to cut is built bit by bit, by one program for a row.

Numerics: integers, hash and sums of shares are those of the reference. ``exp``, ``log`` and ``log1p`` differ in the last bits:
where two tokens race within 1e-5, or a nucleus ends within 1e-5 of its mass, another token may come out. Log-probabilities agree
to 1e-5.

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
"""The largest ``top_k`` that is found by gathering, and most best tokens that ``sample_rows`` lists; see ``scored_values``."""
CANDIDATES = 256
PIECE = 2048  # tokens of one program
GROUPS = 16  # of a piece: each has a maximum of its own
HEADER = 5
MOST_VOCABULARY = 1 << 23


class Column(enum.IntEnum):
    """Settings of a slot, one float64 each; they hold addresses, too.

    Attributes:
        TEMPERATURE: 0 takes the best token.
        LOG_MIN_P: -inf where there is none.
        TOP_K: In [1, V), or 0.
        TOP_P: In (0, 1].
        OCCURRENCES: Address of int32 [V]: how often each token was generated, and in the sign bit whether the prompt has it; or 0.
        EDITS: Address of float32 [V], added to the logits, -inf where forbidden; or 0.
        STOPS, NUM_STOPS: Address of int32 ids that are forbidden while the sampled token's position is below STOPS_FROM.
        STREAM: The first of two int32.
        NUM_LOGPROBS: Number of best tokens to list with the sampled one's log-probability, at most BEST; -1 for no log-probability.
        PROCESSED: 1 if they are of the distribution that was sampled from.
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
    """What one stage leaves to the next, of each row, int64; floats as their bits.

    Attributes:
        TOP, TOP_ID: Largest logit of an edited row, and the lowest token id that has it.
        DRAWN: The drawn token.
        LIMIT, TOTAL: How far the race in a nucleus has come, and the mass of all tokens.
        CUT: Rank number of the last token that ``top_k`` and ``top_p`` keep.
        REACH, COUNT: The value that candidates reach, and how many do.
        LOG_SUM: Logarithm of the sum of a distribution that is scored.
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
ID_BITS = MOST_VOCABULARY.bit_length() - 1  # lower bits of a rank number, which hold the token id; the value is above


class Needs(enum.Flag):
    """What the settings of a step's rows make necessary; more than that is harmless.

    Attributes:
        EDITS: Penalties, bias, masks.
        DRAWS: Rows without ``top_k`` are drawn.
        NUCLEI: Some of them with ``top_p``.
        BEST: Rows with ``top_k`` up to ``BEST``.
        SEARCHES: Rows with a larger one, or with a nucleus and log-probabilities of what is left.
        SCORES: Log-probabilities.
        LISTS: Of the best tokens, too.
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
    """What the host forbids or forces in M rows of a step, beside their settings. The lines of these rows have ``EDITS``.

    Attributes:
        rows: int64 [M].
        forbidden: bool [M, V].
        forced: int64 [M], the only token that may come, whatever else forbids it; -1 for none.
    """

    rows: Tensor
    forbidden: Tensor
    forced: Tensor


class RowSpace(NamedTuple):
    """Where up to R rows are worked on; valid from ``sample_rows`` until the next call.

    Attributes:
        edited: float32 [R, V], what edited rows become.
        state: int64 [R, STATE_COLUMNS], see ``State``.
        partial: int64 [R, 2, pieces].
        peaks: int32 [R, pieces * GROUPS].
        candidates: int64 [R, CANDIDATES].
        single: int32 [R], zeros: the places of rows that are a sequence's only ones.
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
    """What ``sample_rows`` takes.

    A sequence may have several rows, one after the other: each is sampled as if the tokens of those before it were its drafts,
    and only rows up to the first wrong draft are counted and remembered.

    Attributes:
        logits: float32 [R, V], contiguous; not modified.
        best: Of these, from ``sampling.argmax_finite``.
        slots: int32 [R]; -1 for padding.
        positions: int32 [R], of the token before the sampled one.
        settings: float64 [S + 1, NUM_COLUMNS]; the last line is that of padding.
        last_token: int64 [S + 1], where the tokens are remembered.
        space: For at least R rows.
        needs: What the rows ask for.
        drafts: Where a sequence has several rows, int32 [R] twice: the token that each row saw last, which after a sequence's first
            row is the draft of what the row before samples; and the row's place in its sequence, 0, 1, 2, …
        scored: int32 [R], tokens to score instead of sampled ones. Nothing is drawn, counted or remembered: leave ``DRAWS`` and
            ``NUCLEI`` out of ``needs``. The score of a row that failed is NaN.
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
    """Sample one token for each row, and count it. The reference reads settings' tensors by address: all are on the CPU.

    Returns:
        int32 [HEADER + 2 BEST, R]: token, whether the logits are finite, whether settings leave a token, the token's rank and its
        log-probability (as bits); then id and log-probability (as bits) of each best token. Lines that no row asked for are
        undefined, and so is the token of a row that failed, but for being one of the vocabulary.
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
    """Return what the log-probabilities of some rows are of: the model's logits, or what ``sample_rows`` has sampled from.

    ``sample_rows`` was called last for these rows, and with ``SCORES``.

    Args:
        logits: float32 [R, V].
        top: float32 [R, 1], the largest of each row.
        lines: float64 [L, NUM_COLUMNS], the settings of some rows.
        positions: int32 [L], of the tokens before the sampled ones.
        space: As ``sample_rows`` has left it.
        rows: int64 [L], which rows they are.

    Returns:
        float32 [L, V], whose ``log_softmax`` is the distribution; a token that could not be sampled has -inf.
    """
    state, processed = space.state[rows], lines[:, Column.PROCESSED] != 0
    edited = (processed & _is_edited(lines, positions))[:, None]
    x, top = logits[rows], top[rows]
    if _some(edited):
        x = torch.where(edited, space.edited[rows], x)
        top = torch.where(edited, _floats(state[:, State.TOP])[:, None], top)
    temperature = lines[:, Column.TEMPERATURE, None].float()
    drawn = processed[:, None] & (temperature > 0)
    scaled, truncated = _scaled(x, top, torch.where(drawn, temperature, 1.0), lines), _is_truncated(lines)
    if _some(truncated):
        after = _rank_numbers(scaled, torch.arange(x.shape[1], device=x.device)) > state[:, State.CUT, None]
        scaled = scaled.masked_fill(truncated[:, None] & after, float("-inf"))
    return torch.where(drawn, scaled, x) if _some(~drawn) else scaled


def _some(mask: Tensor) -> bool:
    """Whether some of a mask may be true: a GPU would have to be waited for."""
    return mask.device.type != "cpu" or bool(mask.any())


def _is_truncated(lines: Tensor) -> Tensor:
    """Return which rows, of settings float64 [R, NUM_COLUMNS], have ``top_k`` or ``top_p``, bool [R]."""
    return (lines[:, Column.TOP_K] > 0) | (lines[:, Column.TOP_P] < 1)


def _is_edited(lines: Tensor, positions: Tensor) -> Tensor:
    """Return which rows, of settings float64 [R, NUM_COLUMNS], have logits of their own beside the model's, bool [R]."""
    return (lines[:, Column.OCCURRENCES] != 0) | (lines[:, Column.EDITS] != 0) | _holds_back(lines, positions)


def _holds_back(lines: Tensor, positions: Tensor) -> Tensor:
    """Return in which of these rows stop ids are forbidden, because the text is too short, bool [R]."""
    return (lines[:, Column.NUM_STOPS] > 0) & (positions + 1 < lines[:, Column.STOPS_FROM])


def _scaled(x: Tensor, top: Tensor, temperature: Tensor, lines: Tensor) -> Tensor:
    """Apply temperature and ``min_p`` to rows."""
    scaled, log_min_p = sampling.scale(x, top, temperature), lines[:, Column.LOG_MIN_P, None].float()
    return sampling.drop_below(scaled, log_min_p) if _some(log_min_p > float("-inf")) else scaled


def apply_masks(space: RowSpace, masks: RowMasks) -> None:
    """Forbid and force tokens in edited rows, and find their best tokens anew; nothing waits for the device."""
    edited = space.edited.index_select(0, masks.rows).masked_fill_(masks.forbidden, float("-inf"))
    forced = masks.forced[:, None]
    at = forced.clamp_min(0)
    edited.scatter_(1, at, torch.where(forced < 0, edited.gather(1, at), 0.0))
    space.edited.index_copy_(0, masks.rows, edited)
    _put_best(space, masks.rows)


def _put_best(space: RowSpace, rows: Tensor) -> None:
    """Put the best tokens of edited rows, int64 [M], into their state."""
    top, token_ids, _ = sampling.argmax_finite(space.edited.index_select(0, rows))
    space.state[rows, State.TOP] = top[:, 0].view(torch.int32).long()
    space.state[rows, State.TOP_ID] = token_ids


_DRAWN = Needs.DRAWS | Needs.NUCLEI | Needs.BEST | Needs.SEARCHES


def _edited_logits(logits: Tensor, lines: Tensor, positions: Tensor, tokens: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Return penalised and edited logits of some rows, float32 [M, V]."""
    x, lines, vocab_size = logits[rows], lines[rows], logits.shape[1]
    penalised, occurrences = _held(lines, Column.OCCURRENCES, vocab_size, torch.int32)
    if len(penalised):
        seen, at = tokens.tolist(), places.tolist()
        drafts = [(i, t) for i, row in enumerate(rows[penalised].tolist()) for t in seen[row + 1 - at[row] : row + 1]]
        if drafts:  # each row takes those before it for granted
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
    changed, edits = _held(lines, Column.EDITS, vocab_size, torch.float32)
    if len(changed):
        x[changed] += edits
    for i in _holds_back(lines, positions[rows]).nonzero()[:, 0].tolist():
        x[i, _at(int(lines[i, Column.STOPS]), int(lines[i, Column.NUM_STOPS]), torch.int32).long()] = float("-inf")
    return x


def _held(lines: Tensor, column: Column, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return which of M rows have an address in a column, int64 [K], and copies of what is there, [K, V]."""
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
    """Count and remember what rows have sampled, up to the first wrong draft of each sequence."""
    sampled, seen, at, counts = out[0].tolist(), tokens.tolist(), places.tolist(), False
    for row, (slot, address) in enumerate(zip(slots.tolist(), lines[:, Column.OCCURRENCES].tolist(), strict=True)):
        counts = at[row] == 0 or (counts and sampled[row - 1] == seen[row])
        if counts:
            last_token[slot] = sampled[row]
        if counts and address:
            _at(int(address), vocab_size, torch.int32)[sampled[row]] += 1


def _at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the ``count`` numbers of 4 bytes at an address of the host's memory; they are not copied."""
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=dtype)


def _floats(bits: Tensor) -> Tensor:
    return bits.int().view(torch.float32)


def _rank_numbers(values: Tensor, token_ids: Tensor) -> Tensor:
    """Return rank numbers, int64 >= 0: the better a token, the less."""
    return (0x7FFFFFFF - sampling.ascending(values).long()).bitwise_left_shift_(ID_BITS).bitwise_or_(token_ids)


def _last_rank(scaled: Tensor) -> Tensor:
    """Return the rank number of the last token that truncation has left, int64 [R]."""
    least = scaled.masked_fill(scaled == float("-inf"), float("inf")).amin(-1, keepdim=True)
    token_ids = torch.arange(scaled.shape[1], device=scaled.device).masked_fill(scaled != least, -1).amax(-1, keepdim=True)
    return _rank_numbers(least, token_ids)[:, 0]
