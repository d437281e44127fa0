"""Requests that wait for their grammar to be compiled, before the scheduler gets them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv4lite.errors import UnsupportedError
from dsv4lite.request import FinishReason, Request, SequenceUpdate
from dsv4lite.text.structured import GrammarCompiler, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting:
    """A request, its grammar, and the indices of its sequences that have ended since."""

    request: Request
    compiled: Future[LLMatcher]
    ended: set[int] = field(default_factory=set)


class Preparing:
    """Compiles grammars in another thread while the engine runs steps; mutable, owned by the engine's thread.

    Args:
        grammars: The compiler of this process; ``None`` if there is none, for the reason ``problem``.
        announce: Called with each grammar, so that other ranks compile it at the same time.
        ready: Called in another thread with a request when its grammar is compiled, or has failed to compile.
    """

    def __init__(
        self,
        grammars: GrammarCompiler | None,
        problem: str,
        announce: Callable[[StructuredOutputs], None],
        ready: Callable[[Request], None],
    ) -> None:
        self._grammars, self._problem = grammars, problem
        self._announce, self._ready = announce, ready
        self._waiting: dict[str, _Waiting] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their grammars."""
        return sum([one.request.params.n - len(one.ended) for one in self._waiting.values()])

    def begin(self, request: Request) -> bool:
        """Start to compile the grammar of a request; return whether the request can be added now.

        Raises:
            InvalidRequestError: Its grammar cannot be compiled.
            UnsupportedError: There is no compiler.
            EngineStateError: The program ends.
        """
        grammar = request.params.structured_outputs
        assert request.request_id not in self._waiting
        if grammar is None:
            return True
        if self._grammars is None:
            raise UnsupportedError(self._problem)
        assert isinstance(grammar, StructuredOutputs)
        self._announce(grammar)
        compiled = self._grammars.begin(grammar)
        if compiled.done():
            compiled.result()
            return True
        self._waiting[request.request_id] = _Waiting(request=request, compiled=compiled)
        compiled.add_done_callback(lambda _: self._ready(request))
        return False

    def finish(self, request: Request) -> tuple[Future[LLMatcher], set[int]] | None:
        """Return a request's grammar and the indices of its sequences that have ended since; ``None`` if all have.

        Raises:
            InvalidRequestError: Its grammar cannot be compiled.
        """
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.request is not request:
            return None
        del self._waiting[request.request_id]
        waiting.compiled.result()
        return waiting.compiled, waiting.ended

    def end(self, request_id: str | None, reason: FinishReason, index: int | None = None) -> list[SequenceUpdate]:
        """End a waiting request, one of its completions, or (``None``) all waiting requests."""
        updates = []
        for name in list(self._waiting) if request_id is None else [request_id]:
            waiting = self._waiting.get(name)
            if waiting is None:
                continue
            n = waiting.request.params.n
            ends = [i for i in (range(n) if index is None else (index,)) if i not in waiting.ended]
            waiting.ended.update(ends)
            if len(waiting.ended) == n:
                del self._waiting[name]
            updates += [SequenceUpdate(name, i, finish_reason=reason) for i in ends]
        return updates

    def expire(self, now: float) -> list[SequenceUpdate]:
        """End the waiting requests whose deadline has passed."""
        deadlines = [(name, one.request.deadline) for name, one in self._waiting.items()]
        late = [name for name, deadline in deadlines if deadline is not None and deadline <= now]
        return [update for name in late for update in self.end(name, "deadline")]
