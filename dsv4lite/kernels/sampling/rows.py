"""Sampling on the device with the settings of slots: one token for every row of a step, without a word from the host.

    x       = penalised(logits) + edits, stop ids at -inf while the text is too short
    scaled  = (x - max x) / temperature, then min_p, then top_k, then top_p
    token   = argmax x, or of scaled - log(exponential variate of (stream, position, token id))

What each means, and its bits, is written in ``sampling`` and in the engine's sampler, which are the references. A row says which
slot it belongs to and where it stands; what its request asked for is a line of a table of slots, so a recorded step samples for
whoever holds the slots by then.

Tokens are ranked by value, equal ones by id, and what a row keeps is always the first of that ranking. Nothing is sorted:

* ``top_k`` up to ``BEST``: the ``k``-th best of the maxima of small groups is passed by little more than ``k`` tokens. They are
  gathered and ranked against each other.
* ``top_p``: the token that wins the race among all is kept if the tokens ranked before it weigh less than p; if not, only those
  before it can be kept, and the race goes on among them. The winner is that of the race among the kept ones, mostly found at once.
* Any other: the rank at which to cut is built bit by bit, by one program for a row.

Numerics: integers, hash and sums of shares as the references'. ``exp``, ``log`` and ``log1p`` differ in the last bits: where two
tokens race within 1e-5, or a nucleus ends within 1e-5 of its mass, another token may come out. Log-probabilities agree to 1e-5.

Shapes: R rows, V vocabulary, S slots.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

BEST = 128
"""The largest ``top_k`` that is found by gathering, and most best tokens that are listed with their log-probabilities."""
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


EVERYTHING = Needs.EDITS | Needs.DRAWS | Needs.NUCLEI | Needs.BEST | Needs.SEARCHES | Needs.SCORES | Needs.LISTS
NOTHING = Needs(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSpace:
    """Where rows are worked on, for up to R rows; what is in it does not outlive a call but for the edited logits.

    Attributes:
        edited: float32 [R, V], what edited rows become.
        state: int64 [R, 16], what one kernel leaves to the next.
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
            state=torch.empty(rows, 16, dtype=torch.int64, device=device),
            partial=torch.empty(rows, 2, pieces, dtype=torch.int64, device=device),
            peaks=torch.empty(rows, pieces * GROUPS, dtype=torch.int32, device=device),
            candidates=torch.empty(rows, CANDIDATES, dtype=torch.int64, device=device),
            single=torch.zeros(rows, dtype=torch.int32, device=device),
        )


def row_bytes(vocab_size: int) -> int:
    """Return the bytes of one row of a ``RowSpace``."""
    pieces = -(-vocab_size // PIECE)
    return 4 * vocab_size + 8 * (16 + 2 * pieces + CANDIDATES) + 4 * (pieces * GROUPS + 1)


def sample_rows(
    logits: Tensor,
    best: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    positions: Tensor,
    settings: Tensor,
    last_token: Tensor,
    space: RowSpace,
    needs: Needs,
    run: tuple[Tensor, Tensor] | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """Sample one token for each row, and count it; there are kernels only.

    A sequence may have several rows, one behind the other: each takes for granted that the tokens of those before it are what they
    guessed, and only rows up to the first wrong guess are counted and remembered.

    Args:
        logits: float32 [R, V], contiguous.
        best: Of these, from ``sampling.argmax_finite``.
        slots: int32 [R]; -1 for padding.
        positions: int32 [R], of the token before the sampled one.
        settings: float64 [S + 1, NUM_COLUMNS]; the last line is that of padding.
        last_token: int64 [S + 1], where the tokens are remembered.
        space: For at least R rows.
        needs: What the rows ask for.
        run: Where a sequence has several rows, int32 [R] twice: the token that each row saw last, which behind a sequence's first
            row is the guess of what the row before samples; and the row's place in its sequence, 0, 1, 2, …
        given: int32 [R], tokens to score instead of sampled ones. Nothing is drawn, counted or remembered: leave ``DRAWS`` and
            ``NUCLEI`` out of ``needs``. The score of a row that failed is NaN.

    Returns:
        int32 [HEADER + 2 BEST, R]: token, whether the logits are finite, whether settings leave a token, the token's rank and its
        log-probability (as bits); then id and log-probability (as bits) of each best token. Lines that nobody asked for are
        undefined, and so is the token of a row that failed, but for being one.
    """
    from dsv4lite.kernels.sampling.rows_triton import sample_rows_triton

    return sample_rows_triton(logits, best, slots, positions, settings, last_token, space, needs, run, given)
