"""The vocabulary of a request: what goes in, what comes out. Plain data, no engine."""

from __future__ import annotations

import enum
import html
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from dsv4lite.checks import (
    INT32_MAX,
    Rule,
    boolean,
    integer,
    is_integer,
    is_number,
    is_token,
    is_unicode,
    number,
    one_of,
    plain,
    plain_fields,
    require,
)
from dsv4lite.errors import ContextLengthError, DSV4LiteError, InvalidRequestError, near_match, shown

if TYPE_CHECKING:
    import torch

    from dsv4lite.text.parse import ToolCall
    from dsv4lite.text.structured import StructuredOutputs
    from dsv4lite.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
LogprobsMode = Literal["raw", "processed"]
Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]
Kind = TypeVar("Kind")


LEAST_LOGPROB = -9999.0
"""What OpenAI's format has for a token of probability 0, because JSON has no infinities."""


def _as_tuple(parameter: str, value: object) -> tuple[Any, ...]:
    rule = "must be a sequence"
    require(isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)), parameter, value, rule)
    try:
        return tuple(value)  # type: ignore[arg-type]  # checked before
    except TypeError as error:  # a tensor without dimensions
        raise InvalidRequestError(f"{parameter}={shown(value)} {rule}", parameter=parameter, value=value) from error


class LogitBias(Mapping[int, float]):
    """The caller's ``logit_bias``, checked and copied: it can be pickled and hashed, and never changes."""

    __slots__ = ("_entries",)

    def __init__(self, given: object) -> None:
        require(isinstance(given, Mapping), "logit_bias", given, "must map token ids to numbers")
        entries = dict(given)  # type: ignore[call-overload]  # checked one line before
        for token, bias in entries.items():
            require(is_token(token), "logit_bias", token, f"must be a token id, at most {INT32_MAX}")
            require(is_number(bias), "logit_bias", bias, f"must be a finite number, the bias of token {token}")
        self._entries: dict[int, float] = {plain(token): plain(bias) for token, bias in entries.items()}

    def __getitem__(self, token: int) -> float:
        return self._entries[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)


def _as_structured(value: object) -> StructuredOutputs:
    from dsv4lite.text.structured import StructuredOutputs

    if isinstance(value, Mapping):
        return StructuredOutputs.from_dict(value)
    require(isinstance(value, StructuredOutputs), "structured_outputs", value, "must be a StructuredOutputs or a mapping")
    assert isinstance(value, StructuredOutputs)
    return plain_fields(StructuredOutputs, value)


def _names_unknown(kind: type[Kind]) -> type[Kind]:
    """Let the constructor of a dataclass refuse an unknown setting with a near match, which Python's own ``TypeError`` lacks."""
    construct = kind.__init__

    @wraps(construct)
    def init(self: Any, **settings: Any) -> None:
        if not settings.keys() <= kind.__dataclass_fields__.keys():  # type: ignore[attr-defined]  # it is a dataclass
            _refuse_unknown(settings)
        construct(self, **settings)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


@_names_unknown
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt.

    Every setting is neutral by default: ``SamplingParams()`` samples from the model's own distribution until the end-of-sequence
    token or the context limit. ``None`` in place of a ``SamplingParams`` means the checkpoint's ``generation_config.json``.

    Attributes:
        n: Completions per prompt; they share the prompt's KV and differ in their random draws. At most the engine's
            ``max_completions``.
        max_tokens: Most tokens to generate; ``None`` runs to ``max_model_len``.
        min_tokens: End-of-sequence and ``stop_token_ids`` are not sampled before that many tokens, unless a grammar allows no
            others.
        temperature: 0 is greedy.
        top_p: Nucleus: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: Keep the k most probable tokens; 0 keeps all.
        min_p: Drop tokens below this fraction of the most probable token's probability, in [0, 1].
        presence_penalty: Subtracted from the logit of every token generated so far, in [-2, 2].
        frequency_penalty: The same, times the number of occurrences, in [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output, > 0.
        seed: Makes the draws repeatable: they depend on (seed, completion index, position) alone. From -2**63 to 2**64 - 1.
        stop: Strings that end the completion, also before ``min_tokens``; they may span token boundaries. In a chat they also match
            in the markup of reasoning and calls.
        stop_token_ids: Token ids that end it, besides end-of-sequence; their text is part of the completion's.
        include_stop_str_in_output: Keep the matched stop string in the text.
        ignore_eos: Generate past end-of-sequence, and past the ``eos_token_id`` of ``generation_config.json``.
        bad_words_ids: Token sequences that must not be generated.
        logit_bias: Added to logits, by token id.
        allowed_token_ids: Only these may be sampled.
        logprobs: Return log-probabilities of the sampled token and of this many best tokens; 0 for the sampled one only. At most
            the engine's ``max_logprobs``.
        prompt_logprobs: The same for the prompt's tokens, which nothing has sampled: always of the model's own distribution.
        logprobs_mode: ``raw``: the model's distribution; ``processed``: the one that was sampled from.
        structured_outputs: Constrain the text to a JSON schema, a regex, a choice or a grammar.
        thinking_budget: Most tokens inside ``<think>``; then ``</think>`` is forced.
        return_routed_experts: Return the experts chosen for every token and layer; refused for a model without routed experts.
        return_replay: Return a ``Replay``: all that the model and the sampler chose.
        detokenize: Return text (needed for ``stop``).
        skip_special_tokens: Leave special tokens out of the text; in ``chat``, not those of its markup, which is parsed.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    thinking_budget: int | None = None
    return_routed_experts: bool = False
    return_replay: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        put = object.__setattr__
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words_ids"):
            put(self, name, _as_tuple(name, getattr(self, name)))
        put(self, "bad_words_ids", tuple(_as_tuple("bad_words_ids", word) for word in self.bad_words_ids))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            put(self, "logit_bias", LogitBias(self.logit_bias))
        if self.structured_outputs is not None:
            put(self, "structured_outputs", _as_structured(self.structured_outputs))
        for name, rule in _RULES.items():
            problem = rule(getattr(self, name))
            require(not problem, name, getattr(self, name), problem)
            put(self, name, plain(getattr(self, name)))
        if self.max_tokens is not None:
            require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"exceeds max_tokens={self.max_tokens}")
        require(self.detokenize or not self.stop, "stop", self.stop, "needs detokenize=True")
        structure = self.structured_outputs
        require(self.detokenize or structure is None, "structured_outputs", structure, "needs detokenize=True")

    @property
    def greedy_sampling(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @property
    def records_choices(self) -> bool:
        """Whether the model's choices are recorded: every token then has to run, without cached prefixes and captured steps."""
        return self.return_routed_experts or self.return_replay

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a validated copy with some fields changed."""
        return replace(self, **changes)

    @classmethod
    def greedy(cls, *, max_tokens: int | None = None, stop: Sequence[str] = (), logprobs: int | None = None) -> SamplingParams:
        """Most probable token at every position."""
        return cls(temperature=0.0, max_tokens=max_tokens, stop=tuple(stop), logprobs=logprobs)

    @classmethod
    def for_rollout(cls, **settings: Any) -> SamplingParams:
        """Neutral sampling for reinforcement learning: token ids with the log-probabilities they were sampled with.

        Sets ``logprobs=0``, ``logprobs_mode="processed"`` and ``detokenize=False``; keyword arguments override.
        """
        return cls(**{"logprobs": 0, "logprobs_mode": "processed", "detokenize": False, **settings})

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """Read the fields of a ``generation_config.json`` that concern sampling; ``do_sample=false`` is greedy.

        Raises:
            InvalidRequestError: For a value out of range.
        """
        require(isinstance(config, Mapping), "config", config, "must be a mapping")
        known = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
        settings = {k: v for k, v in config.items() if k in known and v is not None}
        if config.get("max_new_tokens") is not None:
            settings["max_tokens"] = config["max_new_tokens"]
        if not config.get("do_sample", True):
            settings["temperature"] = 0.0
        eos = config.get("eos_token_id")
        if eos is not None:
            settings["stop_token_ids"] = (eos,) if is_integer(eos) else eos
        return cls(**settings)

    @classmethod
    def from_openai(cls, body: Mapping[str, Any]) -> SamplingParams:
        """Translate the sampling part of an OpenAI-style request body; keys that do not concern sampling are ignored.

        Raises:
            InvalidRequestError: For a value that is malformed or out of range.
        """
        return cls(**openai_settings(body))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping.

        Raises:
            InvalidRequestError: For an unknown key, with a near match, or a value out of range.
        """
        require(isinstance(settings, Mapping), "settings", settings, "must be a mapping")
        _refuse_unknown(settings)
        return cls(**settings)


def _refuse_unknown(settings: Mapping[Any, object]) -> None:
    """Raise ``InvalidRequestError`` for a key that is no sampling parameter."""
    names = [f.name for f in fields(SamplingParams)]
    for key in settings:
        if key not in names:
            message = f"unknown sampling parameter {shown(key)}{near_match(key, names)}"
            raise InvalidRequestError(message, parameter=key if isinstance(key, str) else shown(key))


def _stops(value: tuple[object, ...]) -> str:
    good = all(isinstance(stop, str) and stop and is_unicode(stop) for stop in value)
    return "" if good else "must be non-empty strings without lone surrogates"


def _tokens(value: tuple[object, ...] | None) -> str:
    return "" if all(map(is_token, value or ())) else f"must be token ids, at most {INT32_MAX}"


def _words(value: tuple[tuple[object, ...], ...]) -> str:
    good = all(word and all(map(is_token, word)) for word in value)
    return "" if good else f"must be non-empty sequences of token ids, at most {INT32_MAX}"


_RULES: Mapping[str, Rule] = {
    "n": integer(1),
    "max_tokens": integer(1, optional=True),
    **dict.fromkeys(("min_tokens", "top_k"), integer(0)),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "thinking_budget"), integer(0, optional=True)),
    "seed": integer(-(2**63), 2**64 - 1, optional=True),
    "temperature": number(lambda value: value >= 0, " of at least 0; 0 is greedy"),
    "top_p": number(lambda value: 0 < value <= 1, " in (0, 1]"),
    "min_p": number(lambda value: 0 <= value <= 1, " in [0, 1]"),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), number(lambda value: -2 <= value <= 2, " in [-2, 2]")),
    "repetition_penalty": number(lambda value: value > 0, " above 0; 1 is neutral"),
    "logprobs_mode": one_of("raw", "processed"),
    "stop": _stops,
    "stop_token_ids": _tokens,
    "allowed_token_ids": lambda value: "must not be empty" if value == () else _tokens(value),
    "bad_words_ids": _words,
    **dict.fromkeys(
        ("include_stop_str_in_output", "ignore_eos", "return_routed_experts", "return_replay", "detokenize", "skip_special_tokens"),
        boolean,
    ),
}


def openai_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that an OpenAI-style request body sets.

    Raises:
        InvalidRequestError: A value is malformed.
    """
    require(isinstance(body, Mapping), "body", body, "must be a mapping")
    names = {f.name for f in fields(SamplingParams)}
    settings: dict[str, Any] = {k: v for k, v in body.items() if k in names and v is not None}
    if body.get("max_completion_tokens") is not None:
        settings["max_tokens"] = body["max_completion_tokens"]
    if isinstance(settings.get("logprobs"), bool):
        settings["logprobs"] = (body.get("top_logprobs") or 0) if settings["logprobs"] else None
    if settings.get("logit_bias") is not None:
        settings["logit_bias"] = _openai_bias(settings["logit_bias"])
    schema = _openai_schema(body.get("response_format"))
    if schema is not None:
        settings["structured_outputs"] = {"json": schema}
    return settings


def _openai_bias(given: object) -> dict[int, Any]:
    """Return a ``logit_bias`` whose keys are decimal text, as JSON has them."""
    if not isinstance(given, Mapping):
        return given  # type: ignore[return-value]  # SamplingParams says what is wrong
    bias = {}
    for key, value in given.items():
        try:
            bias[int(key) if isinstance(key, str) else key] = value
        except ValueError:
            require(False, "logit_bias", key, "keys must be token ids")
    return bias


def _openai_schema(response: object) -> object:
    """Return the JSON schema that a ``response_format`` asks for, ``None`` if it asks for text."""
    if response is None:
        return None
    rule = "must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'schema': ...}}"
    kind = response.get("type") if isinstance(response, Mapping) else None
    require(kind in ("text", "json_object", "json_schema"), "response_format", response, rule)
    assert isinstance(response, Mapping)
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    named = response.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    require(schema is not None, "response_format", response, rule)
    return schema


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Logprobs:
    """Log-probabilities of T tokens as CPU tensors.

    Attributes:
        sampled: float32 [T], of the token at each position.
        ranks: int32 [T], 1 for the most probable token.
        token_ids: int32 [T, K], the K best tokens; K may be 0.
        values: float32 [T, K], their log-probabilities.
        mode: Of which distribution.
    """

    sampled: torch.Tensor
    ranks: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor
    mode: LogprobsMode = "raw"

    def __len__(self) -> int:
        return int(self.sampled.shape[0])

    def __repr__(self) -> str:
        return f"Logprobs({len(self)} tokens, the {self.token_ids.shape[1]} best of each, mode={self.mode!r})"

    @classmethod
    def join(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Concatenate consecutive parts, at least one."""
        import torch

        names = ("sampled", "ranks", "token_ids", "values")
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names}, mode=parts[0].mode)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Replay:
    """What a rollout chose, as CPU tensors: given to ``score`` or to ``training.completion_logprobs``, they choose the same.

    Attributes:
        routed_experts: int16 [T, layers, K], ascending, of prompt and completion without the last token; ``None`` for a model
            without routed experts.
        index_from: The first token that sees more entries than a layer attends to: compressed entries, or tokens (V3.2, GLM-5).
        index_entries: int32 [T - index_from, layers that select, k], ascending: the entries that the tokens from ``index_from`` on
            attend to. ``None`` if there are no such tokens, or no layers that select.
        kept_counts: int32 [C], how many tokens could be sampled at each position of the completion. ``None`` if parameters forbid
            and truncate nothing, or log-probabilities are not of the distribution that was sampled from.
        kept_ids: int32, their ids: ascending, those of the first position first.
    """

    routed_experts: torch.Tensor | None = None
    index_from: int = 0
    index_entries: torch.Tensor | None = None
    kept_counts: torch.Tensor | None = None
    kept_ids: torch.Tensor | None = None

    def __repr__(self) -> str:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        shapes = [f"{name}={x if isinstance(x, int) else list(x.shape)}" for name, x in found.items() if x is not None]
        return f"Replay({', '.join(shapes)})"

    def kept(self, begin: int, end: int, vocab_size: int) -> torch.Tensor | None:
        """Return which tokens could be sampled at positions of the completion, bool [end - begin, V] on the CPU."""
        import torch

        if self.kept_counts is None or self.kept_ids is None:
            return None
        rows = torch.repeat_interleave(torch.arange(len(self.kept_counts), device="cpu"), self.kept_counts)
        some = (rows >= begin) & (rows < end)
        found = torch.zeros(end - begin, vocab_size, dtype=torch.bool, device="cpu")
        found[rows[some] - begin, self.kept_ids[some].long()] = True
        return found


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of ``generate_batch`` or ``as_completed`` with its own metadata and parameters.

    Attributes:
        prompt: As in ``generate``.
        metadata: Comes back as it is, as ``metadata`` of the row's output.
        params: Of this row; ``None`` means those of the call.
    """

    prompt: Prompt
    metadata: Any = None
    params: SamplingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request.

    Attributes:
        cached_tokens: Prompt tokens that came from the prefix cache.
        drafted_tokens: Draft tokens that were verified.
        accepted_tokens: How many of them were right.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one request, from its submission.

    Attributes:
        queued: Until its first step.
        first_token: Until its first token; 0 if there was none.
        total: Until it ended.
    """

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one completion of a stream.

    Attributes:
        index: Which of the ``n`` completions.
        text: New text; empty while characters or a possible stop string are held back.
        token_ids: New tokens.
        logprobs: Of the new tokens, if asked for.
        finish_reason: Set on the completion's last delta.
        reasoning: New reasoning text (``chat_stream`` only; ``text`` is then the content).
        tool_calls: Tool calls that became complete (``chat_stream`` only).
        token_offset: Tokens of the completion before these.
        call_offset: Tool calls of the completion before these.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_offset: int = 0
    call_offset: int = 0

    def to_openai_chunk(
        self,
        request_id: str,
        *,
        model: str = "dsv4lite",
        chat: bool = False,
        created: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> dict[str, Any]:
        """Return an OpenAI-style chunk of a streamed (chat) completion: the data of one server-sent event.

        Args:
            request_id: Of the stream.
            model, chat, created, tokenizer: As in ``RequestOutput.to_openai``; clients expect ``created`` to be that of all chunks.
        """
        calls = self.call_offset + len(self.tool_calls)
        choice: dict[str, Any] = {"index": self.index, "finish_reason": _openai_reason(self.finish_reason, calls > 0)}
        if chat:
            delta: dict[str, Any] = {"role": "assistant"} if self.token_offset == 0 else {}
            delta |= {"content": self.text} if self.text or "role" in delta else {}
            delta |= {"reasoning_content": self.reasoning} if self.reasoning else {}
            if self.tool_calls:
                numbered = enumerate(_openai_calls(self.tool_calls), self.call_offset)
                delta["tool_calls"] = [{"index": number, **call} for number, call in numbered]
            choice["delta"] = delta
        else:
            choice["text"] = self.text
        choice["logprobs"] = _openai_logprobs(self.token_ids, self.logprobs, tokenizer, chat=chat)
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {"id": request_id, "object": kind, "created": _now(created), "model": model, "choices": [choice]}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompletionOutput:
    """One finished completion.

    Attributes:
        finish_reason: ``stop`` (end-of-sequence or a stop string or id), ``length``, ``abort``, ``deadline`` or ``error``.
        stop_reason: The stop string or token id that ended it; ``None`` for end-of-sequence.
        cumulative_logprob: Sum of the sampled tokens' log-probabilities, if they were asked for.
        weight_versions: Spans ``(version, start, end)`` of token indices and the weights they were generated with.
        routed_experts: int16 [tokens, MoE layers, experts per token] for prompt and completion without the last token.
        replay: With ``return_replay``, all that was chosen.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None
    weight_versions: tuple[tuple[int, int, int], ...] = ()
    routed_experts: torch.Tensor | None = None
    replay: Replay | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def __repr__(self) -> str:
        said = {"reasoning": self.reasoning, "tool_calls": self.tool_calls, "logprobs": self.logprobs, "replay": self.replay}
        more = "".join(f", {name}={shown(value)}" for name, value in said.items() if value)
        ended = f"finish_reason={self.finish_reason!r}"
        return f"CompletionOutput(index={self.index}, text={shown(self.text)}, {len(self.token_ids)} tokens, {ended}{more})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RequestOutput:
    """All completions of one request. Notebooks show its texts.

    Attributes:
        index: Position in the batch the request came with, else 0.
        metadata: What the caller gave with its ``Row``.
        error: With ``on_error="return"``, why the request failed; ``outputs`` may then be partial or empty.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    index: int = 0
    prompt_logprobs: Logprobs | None = None
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=0, completion_tokens=0))
    timing: Timing = field(default_factory=Timing)
    error: DSV4LiteError | None = None
    metadata: Any = None

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first completion."""
        return self.outputs[0].token_ids if self.outputs else ()

    @property
    def reasoning(self) -> str | None:
        """Reasoning of the first completion, after ``chat``."""
        return self.outputs[0].reasoning if self.outputs else None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the first completion, after ``chat``."""
        return self.outputs[0].tool_calls if self.outputs else ()

    def __repr__(self) -> str:
        counts = f"{len(self.prompt_token_ids)} prompt tokens"
        more = "" if self.error is None else f", error={self.error!r}"
        more += "" if self.metadata is None else f", metadata={shown(self.metadata)}"
        return f"RequestOutput(index={self.index}, request_id={self.request_id!r}, {counts}, outputs={self.outputs!r}{more})"

    def _repr_html_(self) -> str:
        failed = "" if self.error is None else f"<p><b>{html.escape(f'{type(self.error).__name__}: {self.error}')}</b></p>"
        usage = f"{self.usage.prompt_tokens} prompt tokens, {self.usage.completion_tokens} generated in {self.timing.total:.2f} s"
        return f"<p>{usage}</p>{failed}" + "".join(map(_completion_html, self.outputs))

    def to_openai(
        self,
        *,
        model: str = "dsv4lite",
        chat: bool = False,
        created: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> dict[str, Any]:
        """Return the body of an OpenAI-style (chat) completion response.

        Args:
            model: Name of the model in the body.
            chat: The body of a chat completion.
            created: Unix second; default is now.
            tokenizer: ``llm.tokenizer``: makes text of the tokens of log-probabilities, which are ``token_id:N`` without it.

        Returns:
            The body. Its ``finish_reason`` is ``"tool_calls"`` where calls end a completion; ``"abort"`` is ``"stop"``,
            ``"deadline"`` is ``"length"``, and others stay.
        """
        choices = []
        for out in self.outputs:
            reason = _openai_reason(out.finish_reason, bool(out.tool_calls))
            choice: dict[str, Any] = {"index": out.index, "finish_reason": reason}
            if chat:
                message: dict[str, Any] = {"role": "assistant", "content": out.text or (None if out.tool_calls else "")}
                message |= {"reasoning_content": out.reasoning} if out.reasoning else {}
                message |= {"tool_calls": _openai_calls(out.tool_calls)} if out.tool_calls else {}
                choice["message"] = message
            else:
                choice["text"] = out.text
            choice["logprobs"] = _openai_logprobs(out.token_ids, out.logprobs, tokenizer, chat=chat)
            choices.append(choice)
        return {
            "id": self.request_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": _now(created),
            "model": model,
            "choices": choices,
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "total_tokens": self.usage.total_tokens,
                "prompt_tokens_details": {"cached_tokens": self.usage.cached_tokens},
            },
        }


def _completion_html(completion: CompletionOutput) -> str:
    parts = [("reasoning", completion.reasoning), ("text", completion.text)]
    parts += [(f"call of {call.name}", call.arguments) for call in completion.tool_calls]
    shown_parts = "".join(f"<i>{html.escape(name)}</i><pre>{html.escape(text)}</pre>" for name, text in parts if text)
    ended = f"{len(completion.token_ids)} tokens, {completion.finish_reason}"
    return f"<p><b>{completion.index}</b>: {ended}</p>{shown_parts}"


def _now(created: int | None) -> int:
    return int(time.time()) if created is None else created


def _openai_reason(reason: FinishReason | None, calls: bool) -> str | None:
    if reason == "stop" and calls:
        return "tool_calls"
    return {"abort": "stop", "deadline": "length"}.get(reason, reason) if reason is not None else None


def _openai_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]


def _openai_logprobs(
    token_ids: Sequence[int], logprobs: Logprobs | None, tokenizer: Tokenizer | None, *, chat: bool
) -> dict[str, Any] | None:
    """Return log-probabilities in the format of chat completions, or in that of the older completions."""
    if logprobs is None:
        return None

    def entry(token: int, value: float) -> dict[str, Any]:
        data = None if tokenizer is None else tokenizer.id_to_bytes(token)
        text = f"token_id:{token}" if data is None else data.decode(errors="replace")
        return {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": None if data is None else list(data)}

    sampled = [entry(*pair) for pair in zip(token_ids, logprobs.sampled.tolist(), strict=True)]
    best = [[entry(*pair) for pair in zip(*row)] for row in zip(logprobs.token_ids.tolist(), logprobs.values.tolist())]
    if chat:
        return {"content": [{**one, "top_logprobs": top} for one, top in zip(sampled, best, strict=True)]}
    return {
        "tokens": [one["token"] for one in sampled],
        "token_logprobs": [one["logprob"] for one in sampled],
        "top_logprobs": [{one["token"]: one["logprob"] for one in reversed(top)} for top in best],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt on its way to the engine: token ids only, validated, and of types that every process can unpickle.

    Attributes:
        request_id: Unique in the engine.
        deadline: Absolute ``time.monotonic()`` second, or ``None``.
        priority: Smaller runs earlier; equal ones run in order of arrival.
        cache_salt: Requests share cached prefixes only with requests of the same salt.
        eos_token_id: End-of-sequence of the checkpoint, ``None`` if it has none.
        end_token_ids: Further ids that end a completion as it does: those of ``generation_config.json``.
        think_ids: Ids of ``<think>`` and ``</think>``, if the vocabulary has them.
        score_from: Index of the first prompt token whose log-probability is wanted, at least 1; ``None`` if none is.
        replay: Choices to make again, of a completion that is scored.
        generate: ``False`` only scores the prompt: its last token is not run and nothing is sampled.
        arrival: ``time.monotonic()`` second of submission.
        given_id: The caller's id, if it may differ from ``request_id``; else empty.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    eos_token_id: int | None = None
    end_token_ids: Sequence[int] = ()
    think_ids: tuple[int, int] | None = None
    score_from: int | None = None
    replay: Replay | None = None
    generate: bool = True
    arrival: float = 0.0
    given_id: str = ""

    @property
    def caller_id(self) -> str:
        """The caller's id, which names the output, and the random stream if there is no seed."""
        return self.given_id or self.request_id


class TokenLogprob(NamedTuple):
    """Log-probability of one token. The best tokens are in arrays: tensors for each token take many times the memory and time.

    Attributes:
        token_ids: int32, the K best tokens.
        values: float32, their log-probabilities.
        kept: int32, the tokens that could be sampled, if that is wanted and not all could.
    """

    logprob: float
    rank: int
    token_ids: array[int]
    values: array[float]
    kept: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class SequenceUpdate:
    """What one engine step did to one sequence of a request; a list of these crosses to the event loop once per step.

    Never changed once made. There is one per token: a frozen class would take several times as long to make, and keywords twice as
    long.

    Attributes:
        index: Which of the ``n`` sequences.
        token_ids: New tokens, in order; empty on a bare end.
        logprobs: One per new token, if asked for.
        prompt_logprobs: For prompt tokens whose scores became known in this step, in order; sequence 0 only.
        finish_reason: Set on the last update of the sequence.
        stop_reason: A stop token id other than end-of-sequence.
        cached_tokens: Prompt tokens taken from the prefix cache, set on the first update.
        drafted: Draft tokens that the step verified.
        accepted: How many of ``token_ids`` were draft tokens.
        routed_experts, index_entries: What the model chose, on the last update of a sequence that records it; the entries with the
            position of the first token that has any.
        error: Why the sequence failed, with ``finish_reason="error"``; or the whole request, before any has ``started``.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    started: float = 0.0
    weight_version: int = 0
    routed_experts: torch.Tensor | None = None
    drafted: int = 0
    accepted: int = 0
    error: DSV4LiteError | None = None
    index_entries: tuple[int, torch.Tensor | None] | None = None


@runtime_checkable
class WeightSource(Protocol):
    """Where the new weights of an update come from; users may supply their own."""

    def tensors(self) -> Iterable[tuple[str, Any]]:
        """Yield names and whole tensors, in any order. A thread of the update's own calls this, once for each ``load``.

        Names are official ones, or those of transformers' modules. Tensors may be on any device, and must stay as they are until
        ``load`` has returned.
        """
        ...


MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
"""What an engine can put to sleep."""


class Phase(enum.StrEnum):
    """State of an engine; see ``docs/api.md`` for which calls each allows.

    Attributes:
        UPDATING: A weight update is open; requests continue unless it was opened in a state that does not serve.
        ASLEEP: Weights or KV cache have no memory.
        WEIGHTS_INVALID: The weights were lost, by a sleep of level 2 or a failed update; a full update repairs them.
    """

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    UPDATING = "updating"
    ASLEEP = "asleep"
    WEIGHTS_INVALID = "weights_invalid"
    FAILED = "failed"
    CLOSED = "closed"


def check_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    max_logprobs: int,
    max_completions: int,
    completion_from: int | None = None,
) -> None:
    """Check a request against the limits of the model and of the engine.

    Args:
        completion_from: Of a request that only scores: where the ids of the given completion begin.

    Raises:
        InvalidRequestError: For an empty prompt, an id that the vocabulary does not have, or more than the engine's settings allow.
        ContextLengthError: When the prompt leaves no room for a single token, or ``max_tokens`` does not fit.
    """
    length, generate = len(prompt_token_ids), completion_from is None
    if length == 0:
        raise InvalidRequestError("the prompt is empty; give at least one token", parameter="prompt", value=prompt_token_ids)
    check_vocabulary(prompt_token_ids, vocab_size, completion_from)
    if length >= max_model_len + (not generate):  # the last token of a scored completion is not run
        message = f"prompt and completion have {length} tokens, more than max_model_len={max_model_len}; score a shorter one"
        if generate:
            most = max_model_len - 1
            message = f"the prompt has {length} tokens; max_model_len={max_model_len} allows at most {most} and one to generate"
        raise ContextLengthError(message, length=length, limit=max_model_len)
    if params.max_tokens is not None and length + params.max_tokens > max_model_len:
        message = (
            f"prompt ({length} tokens) plus max_tokens={params.max_tokens} exceed max_model_len={max_model_len};"
            " shorten the prompt, lower max_tokens, or leave max_tokens=None"
        )
        raise ContextLengthError(message, length=length + params.max_tokens, limit=max_model_len, parameter="max_tokens")
    rule = f"must be at most {max_completions}, the engine's max_completions; split the request, or raise that setting"
    require(params.n <= max_completions, "n", params.n, rule)
    limit = min(max_logprobs, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        rule = f"must be at most {limit}: the engine's max_logprobs, or the size of the vocabulary"
        require(value is None or value <= limit, name, value, rule)
    check_token_ids(params, vocab_size)


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, completion_from: int | None = None) -> None:
    """Check that the vocabulary has all ids of a prompt, and of a completion from ``completion_from`` on.

    Raises:
        InvalidRequestError: Names the first that it does not have.
    """
    # Prompts are long and mostly valid: ids are checked one by one only to name the first that is wrong.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for i, t in enumerate(token_ids):
        if not is_integer(t) or not 0 <= t < vocab_size:
            name = "prompt" if completion_from is None or i < completion_from else "completion"
            message = f"{name} token id {shown(t)} is outside the vocabulary [0, {vocab_size})"
            raise InvalidRequestError(message, parameter=name, value=t)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Check that the vocabulary has the token ids of some settings.

    Raises:
        InvalidRequestError: A token id is outside the vocabulary.
    """
    words = {"bad_words_ids": (t for word in params.bad_words_ids for t in word)}
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words_ids"):
        for t in words.get(name) or getattr(params, name) or ():
            require(t < vocab_size, name, t, f"is outside the vocabulary [0, {vocab_size})")
