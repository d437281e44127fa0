"""What the sampler keeps of each sequence between its steps, and the rules that only the host can follow."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
        seed: The request's own; without one the stream follows from ``default_seed`` and ``request_id``.
        index: Which of the request's ``n`` sequences.

    Returns:
        Two int32.
    """
    name = f"seed {seed} {index}" if seed is not None else f"request {default_seed} {index} {request_id}"
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


@dataclass(slots=True, kw_only=True)
class Thinking:
    """Where a sequence stands between ``<think>`` and ``</think>``; one of the mutable classes."""

    opening: int
    closing: int
    budget: int | None
    inside: bool
    spent: int = 0

    @classmethod
    def of(cls, request: Request) -> Thinking | None:
        """Follow the thinking of a request, if its vocabulary has it and a setting depends on it."""
        params = request.params
        if request.think_ids is None or (params.thinking_budget is None and params.structured_outputs is None):
            return None
        opening, closing = request.think_ids
        last_tag = next((t for t in reversed(request.prompt_token_ids) if t in (opening, closing)), closing)
        return cls(opening=opening, closing=closing, budget=params.thinking_budget, inside=last_tag == opening)

    def accept(self, token_id: int) -> bool:
        """Follow one token; return whether it belongs to the thinking, tags included."""
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
    """One sequence's line of the sampler's table, and the tensors that its addresses lead to."""

    settings: list[float]
    drafting: list[float]
    held: tuple[Tensor, ...]
    occurrences: Tensor | None


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """What the sampler keeps of one sequence; one of the mutable classes.

    Attributes:
        stream: Name of its random stream.
        stop_ids: Tokens it may not sample before position ``stops_from``.
        prompt: Its tokens.
        penalised: Whether what it has said matters.
        bad_words: Those of at least two tokens.
        tail: The last tokens of prompt and output, as many as the longest bad word looks back.
        compiled: Its grammar, perhaps still being compiled.
        matcher: Where it stands in its grammar, from its first token on.
        failure: Why nothing can be sampled for it.
        replay: What could be sampled, of a completion that is scored; and its first position.
        num_logprobs: -1 without log-probabilities, else the number of best tokens to list.
        needs: What it asks of a step.
        line: Made when it first takes a slot.
        slot: The one that it took last.
    """

    params: SamplingParams
    stream: tuple[int, int]
    stop_ids: tuple[int, ...]
    stops_from: int
    prompt: tuple[int, ...]
    penalised: bool
    bad_words: tuple[tuple[int, ...], ...]
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
        """Whether the host decides at every step what may come next: grammars, bad words of several tokens, thinking budgets."""
        return self.compiled is not None or self.thinking is not None or bool(self.bad_words) or self.failure is not None

    @property
    def restricted(self) -> bool:
        """Whether there are tokens that it may never sample."""
        return self.params.allowed_token_ids is not None or any(len(word) == 1 for word in self.params.bad_words_ids)

    @property
    def keeps(self) -> bool:
        """Whether the tokens that could be sampled are wanted, and are not always all."""
        p = self.params
        wanted = p.return_replay and p.logprobs is not None and p.logprobs_mode == "processed"
        truncated = not p.greedy_sampling and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        return wanted and (truncated or self.restricted or self.host_rules or self.holds_back)

    @property
    def holds_back(self) -> bool:
        """Whether its settings forbid stop ids before ``stops_from``; with host rules, the host does."""
        return bool(self.params.min_tokens and self.stop_ids) and not self.host_rules

    def never(self, vocab_size: int) -> Tensor:
        """Return what never changes, bool [V] on the CPU: all but the allowed ids, and bad words of one token."""
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
            length = max(map(len, self.bad_words)) - 1
            self.tail = (*self.tail, token_id)[-length:]
        if self.thinking is not None and self.thinking.accept(token_id):
            return  # the grammar is for what is said, not for what is thought
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
        """Tokens that ``min_tokens``, grammar, bad words or used up thinking rule out now, bool [V] on the CPU, or ``None``.

        Raises:
            RequestFailedError: The grammar gave up.
        """
        if self.failure is not None:
            raise self.failure
        # While a grammar waits for the thinking to end, the text is still to come.
        waiting = self.matcher is not None and self.thinking is not None and self.thinking.inside
        early = self.stop_ids if waiting or position < self.stops_from else ()
        banned = [word[-1] for word in self.bad_words if self.tail[max(0, len(self.tail) - len(word) + 1) :] == word[:-1]]
        if self.thinking is not None and self.thinking.exhausted:
            banned.append(self.thinking.opening)
        if self.matcher is not None and not waiting:
            forbidden = ~self.matcher.mask()
            # Where the grammar has nothing left but the end, the text may stay shorter than min_tokens.
            if early and not bool(with_tokens(forbidden, early).all()):
                banned.extend(early)
        elif early or banned:
            forbidden = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
            banned.extend(early)
        else:
            return None
        return with_tokens(forbidden, banned)


def state_of(request: Request, index: int, default_seed: int) -> SequenceState:
    """Return what is kept of one of a request's sequences before its first token: nothing on the device, and no grammar."""
    if not request.generate:  # the tokens that are scored count as output
        request = replace(request, prompt_token_ids=request.prompt_token_ids[: request.score_from])
    params, prompt = request.params, request.prompt_token_ids
    eos = () if request.eos_token_id is None else (request.eos_token_id,)
    stop_ids = {*params.stop_token_ids, *request.end_token_ids, *eos}
    bad_words = tuple(word for word in params.bad_words_ids if len(word) > 1)
    look_back = max((len(word) - 1 for word in bad_words), default=0)
    return SequenceState(
        params=params,
        stream=random_stream(params.seed, index, default_seed=default_seed, request_id=request.request_id),
        stop_ids=tuple(sorted(stop_ids)),
        stops_from=len(prompt) + params.min_tokens,
        prompt=prompt,
        penalised=params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0,
        bad_words=bad_words,
        tail=prompt[max(0, len(prompt) - look_back) :],
        thinking=Thinking.of(request),
        replay=None if request.replay is None or request.replay.kept_ids is None else (request.replay, len(prompt)),
    )


def failed(error: Exception) -> RequestFailedError:
    """Return the error of one request whose own settings are behind an exception."""
    if isinstance(error, RequestFailedError):
        return error
    failure = RequestFailedError(f"the request failed, other requests are unaffected: {described(error)}")
    failure.__cause__ = error
    return failure


def with_tokens(mask: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Return a mask with some more tokens set."""
    if not token_ids:
        return mask
    return mask.index_fill(0, torch.tensor(token_ids, dtype=torch.int64, device="cpu"), 1)
