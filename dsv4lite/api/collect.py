"""From the engine's updates to text: the deltas and the ``RequestOutput`` of one request."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dsv4lite.errors import (
    CapacityError,
    ConfigError,
    DSV4LiteError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    RequestFailedError,
)
from dsv4lite.request import (
    CompletionOutput,
    Delta,
    FinishReason,
    Logprobs,
    LogprobsMode,
    Replay,
    Request,
    RequestOutput,
    SamplingParams,
    SequenceUpdate,
    Timing,
    TokenLogprob,
    Usage,
)
from dsv4lite.text.parse import ChatParser
from dsv4lite.text.tokenizer import Detokenizer, StopStrings, Tokenizer

if TYPE_CHECKING:
    import torch

_MOST_DEFERRED = 64  # tokens whose text is read at once
ParserFactory = Callable[[str], ChatParser]
"""Makes the parser of one completion, given the prefix for the ids of its tool calls."""


class Collector:
    """Accumulates the updates of one request. Not thread-safe."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        index: int = 0,
        parser: ParserFactory | None = None,
        streaming: bool = False,
    ) -> None:
        """Start with nothing received.

        Args:
            request: The request; the output has its caller's id.
            tokenizer: Its decoder.
            index: Position in the batch that the request came with.
            parser: For chats: the text is an assistant's turn, to be split into reasoning, content and tool calls.
            streaming: The deltas will be read, so they carry log-probabilities if those were asked for.
        """
        self._request = request
        self._request_id = request.caller_id
        self._index = index
        names = [f"call_{self._request_id}_{i}_" for i in range(request.params.n)]
        self._completions = [
            _Completion(i, request.params, tokenizer, None if parser is None else parser(name), streaming)
            for i, name in enumerate(names)
        ]
        self._never_defers = streaming or bool(request.params.stop)
        self._prompt_logprobs: list[Logprobs] = []
        self._cached_tokens = self._drafted = self._accepted = 0
        self._started: float | None = None
        self._first_token: float | None = None
        self._error: DSV4LiteError | None = None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended and is complete."""
        return all(c.complete for c in self._completions)

    def push(self, update: SequenceUpdate, now: float) -> Delta | None:
        """Add an update that arrived at the monotonic second ``now``, and return what is new.

        A stop string may end the completion before the engine does: then ``finish_reason`` of the delta is set and that of the
        update is not. Later tokens of a completion that has ended are dropped.

        Returns:
            ``None`` if the text of the update is read later, together with that of others. Without a stream and without stop
            strings this holds for every update that brings only tokens.
        """
        self._drafted += update.drafted
        self._accepted += update.accepted
        if update.index == 0:  # the others may find the prompt in the cache because this one has run it
            self._cached_tokens += update.cached_tokens
        completion = self._completions[update.index]
        bare = update.finish_reason is None and update.prompt_logprobs is None and update.routed_experts is None
        if bare and not self._never_defers and self._first_token is not None and completion.finish_reason is None:
            completion.defer(update)
            return None
        if self._started is None and update.started:
            self._started = update.started
        if self._first_token is None and update.token_ids:
            self._first_token = now
        if update.prompt_logprobs is not None:
            self._prompt_logprobs.append(update.prompt_logprobs)
        if completion.finish_reason is not None:
            completion.finish_in_engine(update)
            return Delta(index=update.index)
        if update.error is not None and self._error is None:
            self._error = update.error
        return completion.push(update)

    def end(self, reason: FinishReason, error: DSV4LiteError | None = None) -> list[Delta]:
        """End all open completions, and return the text that they had held back."""
        self._error = self._error or error
        open_ones = [c for c in self._completions if c.finish_reason is None]
        return [c.push(SequenceUpdate(request_id=self._request_id, index=c.index, finish_reason=reason)) for c in open_ones]

    def output(self, now: float) -> RequestOutput:
        """Return everything; all completions must have ended.

        If the request failed, ``error`` of the output says why: the engine's error if it is about the request or the engine, else
        a ``RequestFailedError`` that carries the partial output.
        """
        request = self._request
        arrival = request.arrival
        first_token = 0.0 if self._first_token is None else self._first_token - arrival
        started = self._started if self._started is not None else self._first_token
        output = RequestOutput(
            request_id=self._request_id,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple(c.output(len(request.prompt_token_ids)) for c in self._completions),
            index=self._index,
            prompt_logprobs=self._scores(),
            usage=Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=sum(len(c.token_ids) for c in self._completions),
                cached_tokens=self._cached_tokens,
                drafted_tokens=self._drafted,
                accepted_tokens=self._accepted,
            ),
            timing=Timing(queued=max(0.0, (started or now) - arrival), first_token=first_token, total=now - arrival),
        )
        if self._error is None:
            return output
        return replace(output, error=_with_output(self._error, output))

    def _scores(self) -> Logprobs | None:
        if self._prompt_logprobs or (top := self._request.params.prompt_logprobs) is None:
            return Logprobs.join(self._prompt_logprobs) if self._prompt_logprobs else None
        return _logprobs_of(array("f"), array("i"), array("i"), array("f"), top)  # the prompt has one token, or has not run


class _Completion:
    """One of the ``n`` sequences of a request."""

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer, parser: ChatParser | None, streaming: bool
    ) -> None:
        self.index = index
        self.token_ids = array("i")
        self.finish_reason: FinishReason | None = None
        self._ended_in_engine = not params.records_choices
        self._stop_reason: str | int | None = None
        self._params = params
        # Chat markup consists of tokens that a vocabulary may call special: the parser must see them, and removes them.
        markup, skip = () if parser is None else parser.markup, params.skip_special_tokens
        reads = params.detokenize or parser is not None
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, markup=markup) if reads else None
        self._stops = (
            StopStrings(params.stop, include_stop_str_in_output=params.include_stop_str_in_output) if params.stop else None
        )
        self._parser = parser
        self._streaming = streaming
        self._text: list[str] = []
        self._num_calls = 0
        self._sampled, self._ranks, self._best, self._values = array("f"), array("i"), array("i"), array("f")  # see ``Logprobs``
        self._kept: list[torch.Tensor] = []
        self._versions: list[tuple[int, int]] = []  # of weights, each with its first token
        self._read_tokens = 0  # how many tokens are in the text
        self._experts: torch.Tensor | None = None
        self._entries: tuple[int, torch.Tensor | None] = 0, None

    def defer(self, update: SequenceUpdate) -> None:
        """Add the tokens of an update that brings nothing else; their text is read together with that of later tokens.

        The update is not kept: an object for every token would make the garbage collector walk through the whole process.
        """
        self._add(update.token_ids, update.logprobs, update.weight_version)
        if len(self.token_ids) - self._read_tokens >= _MOST_DEFERRED:
            self._read_deferred()

    def _read_deferred(self) -> None:
        if self._read_tokens < len(self.token_ids):
            text, *_ = self._read(self.token_ids[self._read_tokens :].tolist())
            self._read_tokens = len(self.token_ids)
            self._delta(text, (), None)

    def push(self, update: SequenceUpdate) -> Delta:
        """Add the tokens of one step up to a stop string."""
        self._read_deferred()
        text, kept, stop = self._read(update.token_ids)
        if stop is None and update.finish_reason is not None:
            tail, stop = self._flush()
            text += tail
        if stop is not None:
            self.finish_reason, self._stop_reason = "stop", stop
        else:
            self.finish_reason, self._stop_reason = update.finish_reason, update.stop_reason
        ids, logprobs = update.token_ids[:kept], update.logprobs[:kept]
        self._add(ids, logprobs, update.weight_version)
        self._read_tokens = len(self.token_ids)
        self.finish_in_engine(update)
        return self._delta(text, ids, self._logprobs(len(self._sampled) - len(logprobs)) if ids and self._streaming else None)

    def _add(self, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], weight_version: int) -> None:
        """Add tokens, but not their text."""
        if ids and (not self._versions or self._versions[-1][0] != weight_version):
            self._versions.append((weight_version, len(self.token_ids)))
        self.token_ids.extend(ids)
        for logprob, rank, best, values, allowed in logprobs:
            self._sampled.append(logprob)
            self._ranks.append(rank)
            self._best.extend(best)
            self._values.extend(values)
            if allowed is not None:
                self._kept.append(allowed)

    @property
    def complete(self) -> bool:
        """Whether it has ended here and in the engine, whose last update brings routed experts even after a stop string."""
        return self.finish_reason is not None and self._ended_in_engine

    def finish_in_engine(self, update: SequenceUpdate) -> None:
        """Take routed experts and the engine's end of the sequence; a stop string may have ended the completion before."""
        if update.routed_experts is not None:
            self._experts = update.routed_experts
        if update.index_entries is not None:
            self._entries = update.index_entries
        if update.finish_reason is not None:
            self._ended_in_engine = True

    def output(self, prompt_tokens: int) -> CompletionOutput:
        assert self.finish_reason is not None, "a completion that is not finished has no output"
        parsed = None if self._parser is None else self._parser.result()
        # Of prompt and completion without the last token, and without tokens after a stop string.
        routed = None if self._experts is None else self._experts[: max(0, prompt_tokens + len(self.token_ids) - 1)]
        bounds = [*(begin for _, begin in self._versions), len(self.token_ids)]
        return CompletionOutput(
            index=self.index,
            text="".join(self._text) if parsed is None else parsed.content,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            logprobs=self._logprobs(0),
            cumulative_logprob=None if self._params.logprobs is None else sum(self._sampled),
            stop_reason=self._stop_reason,
            weight_versions=tuple((version, *span) for (version, _), span in zip(self._versions, pairwise(bounds), strict=True)),
            routed_experts=routed,
            replay=self._replay(routed, prompt_tokens + len(self.token_ids) - 1) if self._params.return_replay else None,
            reasoning=None if parsed is None else parsed.reasoning,
            tool_calls=() if parsed is None else parsed.tool_calls,
        )

    def _replay(self, routed: torch.Tensor | None, tokens: int) -> Replay:
        """Return what was chosen for the first ``tokens``, and could be sampled."""
        import torch

        first, entries = self._entries
        return Replay(
            routed_experts=routed,
            index_from=first,
            index_entries=None if entries is None or tokens <= first else entries[: tokens - first],
            kept_counts=torch.tensor([len(ids) for ids in self._kept], dtype=torch.int32, device="cpu") if self._kept else None,
            kept_ids=torch.cat(self._kept) if self._kept else None,
        )

    def _read(self, ids: Sequence[int]) -> tuple[str, int, str | None]:
        """Return the text of ``ids``, how many of them count, and the stop string that ended them."""
        if self._detokenizer is None:
            return "", len(ids), None
        if self._stops is None:
            return self._detokenizer.push(ids), len(ids), None
        text = ""
        for count, token in enumerate(ids, 1):
            piece, stop = self._stops.push(self._detokenizer.push((token,)))
            text += piece
            if stop is not None:
                return text, count, stop
        return text, len(ids), None

    def _flush(self) -> tuple[str, str | None]:
        """Return the text that was held back, and the stop string that an unfinished character may complete."""
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.flush()
        if self._stops is None:
            return text, None
        text, stop = self._stops.push(text)
        return text + self._stops.flush(), stop

    def _delta(self, text: str, ids: tuple[int, ...], logprobs: Logprobs | None) -> Delta:
        before, reason = len(self.token_ids) - len(ids), self.finish_reason
        if self._parser is None:
            self._text.append(text)
            return Delta(index=self.index, text=text, token_ids=ids, logprobs=logprobs, finish_reason=reason, token_offset=before)
        parts = [self._parser.push(text)]
        if reason is not None:
            parts.append(self._parser.finish())
        calls = tuple(call for part in parts for call in part.tool_calls)
        self._num_calls += len(calls)
        return Delta(
            index=self.index,
            text="".join(part.content for part in parts),
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=calls,
            token_offset=before,
            call_offset=self._num_calls - len(calls),
        )

    def _logprobs(self, begin: int) -> Logprobs | None:
        """Return the log-probabilities of the tokens from ``begin`` on, ``None`` if they were not asked for."""
        if (top := self._params.logprobs) is None:
            return None
        best, values = self._best[begin * top :], self._values[begin * top :]
        return _logprobs_of(self._sampled[begin:], self._ranks[begin:], best, values, top, self._params.logprobs_mode)


def _logprobs_of(
    sampled: array[float], ranks: array[int], best: array[int], values: array[float], top: int, mode: LogprobsMode = "raw"
) -> Logprobs:
    shape = len(sampled), top
    lists = {"token_ids": _tensor(best).view(shape), "values": _tensor(values).view(shape)}
    return Logprobs(sampled=_tensor(sampled), ranks=_tensor(ranks), **lists, mode=mode)


def _tensor(values: array[Any]) -> torch.Tensor:
    """Return an array's numbers, float32 or int32, as a tensor that keeps its memory."""
    import torch

    dtype = torch.float32 if values.typecode == "f" else torch.int32
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype, device="cpu")


def _with_output(error: DSV4LiteError, output: RequestOutput) -> DSV4LiteError:
    """Return the error to raise: a failure of one request carries its partial output, other errors pass unaltered."""
    if isinstance(error, (InvalidRequestError, ConfigError, CapacityError, EngineStateError, EngineDeadError)):
        return error
    failure = RequestFailedError(str(error), output=output)
    failure.__cause__ = error
    return failure
