"""What steps have sampled, entered into sequences. Plain Python, no tensors.

This runs for every token of every completion. Hence a way of its own for what nearly all of them are, and news made without
keywords, which would take twice as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4lite.request import FinishReason, SequenceUpdate
from dsv4lite.scheduling.kv_manager import Holdings
from dsv4lite.scheduling.sequence import Sequence, State
from dsv4lite.scheduling.step_plan import Sampled, SequencePlan

if TYPE_CHECKING:
    from dsv4lite.errors import DSV4LiteError
    from dsv4lite.request import Logprobs, TokenLogprob

_ALONE = Sampled(0)[2:]  # no error, nothing behind it, and no guesses, run or to come


def _append_one(seq: Sequence, sampled: Sampled, score: Logprobs | None, weight_version: int, holdings: Holdings) -> SequenceUpdate:
    """Do what ``append`` does for a token that is alone: of nearly every run, where nobody guesses."""
    token_id, logprob, tokens = sampled.token_id, sampled.logprob, seq.tokens
    tokens.append(token_id)
    if seq.pending is not None:
        holdings.insert_pending(seq)
    finish: FinishReason | None = None
    stop = None
    if token_id in seq.end_ids or len(tokens) > seq.last_run:
        finish, stop = seq.outcome()
    seq.drafts = ()
    cached = seq.report_cached_tokens() if seq.cached_tokens else 0
    logprobs, started = () if logprob is None else (logprob,), seq.started or 0.0
    return SequenceUpdate(
        seq.request.request_id, seq.index, (token_id,), logprobs, score, finish, stop, cached, started, weight_version
    )


def append(
    seq: Sequence, part: SequencePlan, sampled: Sampled, score: Logprobs | None, weight_version: int, holdings: Holdings
) -> SequenceUpdate:
    """Add what a run sampled to a sequence, up to the token that ends it, and take back the state of wrong drafts.

    Args:
        seq: The sequence.
        part: What was planned for it.
        sampled: What came of that.
        score: Of its prompt tokens.
        weight_version: Of the weights that it ran with.
        holdings: What the sequence has its state from. That of one that ends is left to the caller.
    """
    if sampled[2:] == _ALONE and not part.drafts:
        return _append_one(seq, sampled, score, weight_version, holdings)
    token_id, logprob, error, after, drafts, drafted = sampled
    token_ids = (token_id, *[one.token_id for one in after]) if after else (token_id,)
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop = None
    plain = logprob is None and error is None and seq.pending is None and not (after and after[-1].error)
    if plain and len(seq.tokens) + len(token_ids) <= seq.last_run and seq.end_ids.isdisjoint(token_ids):
        seq.tokens += token_ids
    else:
        token_ids, logprobs, finish, stop, error = _one_by_one(seq, sampled, holdings)
    right, planned = len(token_ids) - 1, part.drafts
    if finish is None and planned and seq.state is State.RUNNING:  # else it was preempted meanwhile
        if right and not seq.in_flight:  # a run that is under way leaves a carry of its own
            seq.carry, seq.quiet_until = right, 0
        if right < planned:
            holdings.rewind(seq, seq.num_computed - planned + right)
    seq.drafts = drafts
    cached, started = seq.report_cached_tokens() if seq.cached_tokens else 0, seq.started or 0.0
    name, accepted = seq.request.request_id, max(0, right)
    return SequenceUpdate(
        name, seq.index, token_ids, logprobs, score, finish, stop, cached, started, weight_version, None, drafted, accepted, error
    )


def _one_by_one(
    seq: Sequence, sampled: Sampled, holdings: Holdings
) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...], FinishReason | None, int | None, DSV4LiteError | None]:
    """Add tokens of which one may end the sequence; return them, their log-probabilities, and how and why it ends."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    stop = None
    for one in (sampled, *sampled.after):
        if one.error is not None:
            holdings.forget_prefixes(seq)
            return tuple(token_ids), tuple(logprobs), "error", None, one.error
        seq.tokens.append(one.token_id)
        token_ids.append(one.token_id)
        if one.logprob is not None:
            logprobs.append(one.logprob)
        if seq.pending is not None:
            holdings.insert_pending(seq)
        if one.token_id in seq.end_ids or len(seq.tokens) > seq.last_run:
            finish, stop = seq.outcome()
            if finish is not None:
                break
    return tuple(token_ids), tuple(logprobs), finish, stop, None
