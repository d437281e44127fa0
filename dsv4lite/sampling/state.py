"""The sampler's state of each sequence between steps, and the sampling rules that run on the host."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4lite.errors import RequestFailedError, described
from dsv4lite.kernels.sampling.rows import NOTHING, Needs
from dsv4lite.request import Replay, Request, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from dsv4lite.text.structured import GrammarMatcher


def random_stream(seed: int | None, index: int, *, default_seed: int, request_id: str) -> tuple[int, int]:
    """Name the random stream of one sequence.

    Args:
        seed: Seed of the request; without one, ``default_seed`` and ``request_id`` determine the stream.
        index: Which of the request's ``n`` sequences.

    Returns:
        Two int32.
    """
    name = f"seed {seed} {index}" if seed is not None else f"request {default_seed} {index} {request_id}"
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


@dataclass(slots=True, kw_only=True)
class Thinking:
    """Whether a sequence is between ``<think>`` and ``</think>``, and the tokens spent there; mutable."""

    opening: int
    closing: int
    budget: int | None
    inside: bool
    spent: int = 0

    @classmethod
    def of(cls, request: Request) -> Thinking | None:
        """Return the state after the prompt, or ``None`` if there are no thinking tags or no setting depends on them."""
        params = request.params
        if request.think_ids is None or (params.thinking_budget is None and params.structured_outputs is None):
            return None
        opening, closing = request.think_ids
        last_tag = next((t for t in reversed(request.prompt_token_ids) if t in (opening, closing)), closing)
        return cls(opening=opening, closing=closing, budget=params.thinking_budget, inside=last_tag == opening)

    def accept(self, token_id: int) -> bool:
        """Process one token; return whether it belongs to the thinking, tags included."""
        was_inside = self.inside
        if not was_inside:
            self.inside = token_id == self.opening
        elif token_id == self.closing:
            self.inside = False
        else:
            self.spent += 1
        return was_inside or self.inside

    @property
    def exhausted(self) -> bool:
        return self.budget is not None and self.spent >= self.budget


@dataclass(slots=True, eq=False)
class Line:
    """One sequence's line of the sampler's table, and the tensors whose addresses it has."""

    settings: list[float]
    drafting: list[float]
    held: tuple[Tensor, ...]
    occurrences: Tensor | None


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """The sampler's state of one sequence; mutable.

    Attributes:
        stream: Name of its random stream.
        stop_ids: Tokens that it may not sample before position ``stops_from``.
        prompt: Tokens of the prompt.
        penalised: Whether it has penalties, which depend on its tokens.
        bad_words: Bad words of at least two tokens, by their last token but one; shared by the completions of a request.
        look_back: Most tokens of a bad word before its last one.
        tail: Last tokens of prompt and output, as many as bad words are compared with.
        compiled: Its grammar, perhaps still being compiled.
        matcher: State of its grammar, from its first token on.
        failure: Why nothing can be sampled for it.
        replay: For a completion that is scored: the tokens that could be sampled, and its first position.
        num_logprobs: -1 without log-probabilities, else the number of best tokens to list.
        needs: Kernels that its rows need in a step.
        line: Its line of the table, made when it first takes a slot.
        slot: The slot that it took last.
    """

    params: SamplingParams
    stream: tuple[int, int]
    stop_ids: tuple[int, ...]
    stops_from: int
    prompt: tuple[int, ...]
    penalised: bool
    bad_words: Mapping[int, Sequence[tuple[int, ...]]]
    look_back: int
    tail: tuple[int, ...]
    thinking: Thinking | None
    compiled: Future[LLMatcher] | None = None
    matcher: GrammarMatcher | None = None
    failure: RequestFailedError | None = None
    replay: tuple[Replay, int] | None = None
    num_logprobs: int = -1
    needs: Needs = NOTHING
    line: Line | None = None
    slot: int | None = None

    @property
    def host_rules(self) -> bool:
        """Whether the host restricts the token of every step: grammars, bad words of several tokens, thinking budgets."""
        return self.compiled is not None or self.thinking is not None or bool(self.bad_words) or self.failure is not None

    @property
    def restricted(self) -> bool:
        """Whether there are tokens that it may never sample."""
        return self.params.allowed_token_ids is not None or 1 in map(len, self.params.bad_words_ids)

    @property
    def records_kept(self) -> bool:
        """Whether to record which tokens could be sampled: if it is wanted, and they are not always all tokens."""
        p = self.params
        wanted = p.return_replay and p.logprobs is not None and p.logprobs_mode == "processed"
        truncated = not p.greedy_sampling and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        return wanted and (truncated or self.restricted or self.host_rules or self.forbids_stops)

    @property
    def forbids_stops(self) -> bool:
        """Whether its line of the table forbids stop ids before ``stops_from``; with host rules, the host does."""
        return bool(self.params.min_tokens and self.stop_ids) and not self.host_rules

    def always_forbidden(self, vocab_size: int) -> Tensor:
        """Return the tokens that it may never sample, bool [V] on the CPU: all but the allowed ids, and bad words of one token."""
        allowed = self.params.allowed_token_ids
        forbidden = torch.full((vocab_size,), allowed is not None, dtype=torch.bool, device="cpu")
        forbidden[list(allowed or ())] = False
        forbidden[[word[0] for word in self.params.bad_words_ids if len(word) == 1]] = True
        return forbidden

    def fork(self) -> SequenceState:
        """Return a copy that can look ahead along drafts."""
        return replace(
            self,
            matcher=None if self.matcher is None else self.matcher.copy(),
            thinking=None if self.thinking is None else replace(self.thinking),
        )

    def accept(self, token_id: int) -> None:
        if self.bad_words:
            self.tail = (*self.tail, token_id)[-self.look_back :]
        if self.thinking is not None and self.thinking.accept(token_id):
            return  # the grammar applies to the answer, not to the thinking
        if self.matcher is not None and self.failure is None and not self.matcher.is_terminated():
            try:
                self.matcher.accept(token_id)
            except Exception as error:
                self.failure = failed(error)

    def forced_token(self) -> int | None:
        """The only token that may come next, if the thinking budget decides it."""
        if self.thinking is not None and self.thinking.inside and self.thinking.exhausted:
            return self.thinking.closing
        return None

    def forbidden_next(self, position: int, vocab_size: int) -> Tensor | None:
        """Tokens that ``min_tokens``, grammar, bad words or a spent thinking budget forbid now, bool [V] on the CPU, or ``None``.

        Raises:
            RequestFailedError: The grammar failed.
        """
        if self.failure is not None:
            raise self.failure
        # While a grammar waits for the end of the thinking, the answer has not begun.
        waiting = self.matcher is not None and self.thinking is not None and self.thinking.inside
        early = self.stop_ids if waiting or position < self.stops_from else ()
        words = self.bad_words.get(self.tail[-1], ()) if self.tail else ()
        banned = [word[-1] for word in words if self.tail[max(0, len(self.tail) - len(word) + 1) :] == word[:-1]]
        if self.thinking is not None and self.thinking.exhausted:
            banned.append(self.thinking.opening)
        if self.matcher is not None and not waiting:
            forbidden = ~self.matcher.mask()
            # If the grammar allows only stop ids, the answer may be shorter than min_tokens.
            if early and not bool(with_tokens(forbidden, early).all()):
                banned.extend(early)
        elif early or banned:
            forbidden = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
            banned.extend(early)
        else:
            return None
        return with_tokens(forbidden, banned)


def _bad_words(params: SamplingParams, sibling: SequenceState | None) -> tuple[Mapping[int, Sequence[tuple[int, ...]]], int]:
    """Return ``bad_words`` and ``look_back`` of a state; those of ``sibling`` if it has the same parameters."""
    if sibling is not None and sibling.params is params:
        return sibling.bad_words, sibling.look_back
    words: dict[int, list[tuple[int, ...]]] = {}
    for word in params.bad_words_ids:
        if len(word) > 1:
            words.setdefault(word[-2], []).append(word)
    return words, max(map(len, params.bad_words_ids), default=1) - 1


def state_of(request: Request, index: int, default_seed: int, sibling: SequenceState | None = None) -> SequenceState:
    """Return the state of one of a request's sequences before its first token, without tensors on the device or a grammar.

    ``sibling`` may be a state of the same request, with which to share what is large.
    """
    if not request.generate:  # the tokens that are scored count as output
        request = replace(request, prompt_token_ids=request.prompt_token_ids[: request.score_from])
    params, prompt = request.params, request.prompt_token_ids
    eos = () if request.eos_token_id is None else (request.eos_token_id,)
    stop_ids = {*params.stop_token_ids, *request.end_token_ids, *eos}
    bad_words, look_back = _bad_words(params, sibling)
    return SequenceState(
        params=params,
        stream=random_stream(params.seed, index, default_seed=default_seed, request_id=request.caller_id),
        stop_ids=tuple(sorted(stop_ids)),
        stops_from=len(prompt) + params.min_tokens,
        prompt=prompt,
        penalised=params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0,
        bad_words=bad_words,
        look_back=look_back,
        tail=prompt[max(0, len(prompt) - look_back) :],
        thinking=Thinking.of(request),
        replay=None if request.replay is None or request.replay.kept_ids is None else (request.replay, len(prompt)),
    )


def failed(error: Exception) -> RequestFailedError:
    """Return an exception as the error of the one request whose settings caused it."""
    if isinstance(error, RequestFailedError):
        return error
    failure = RequestFailedError(f"the request failed, other requests are unaffected: {described(error)}")
    failure.__cause__ = error
    return failure


def with_tokens(mask: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Return a mask, bool [V] on the CPU, in which these tokens are set as well; the same mask for no tokens."""
    if not token_ids:
        return mask
    return mask.index_fill(0, torch.tensor(token_ids, dtype=torch.int64, device="cpu"), 1)
