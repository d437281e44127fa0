"""From a prompt to a request: encoding, chat rendering, checking. Pure functions of what the engine says about itself."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, SupportsIndex

from dsv4lite.errors import InvalidRequestError, near_match
from dsv4lite.face.collect import ParserFactory
from dsv4lite.request import Prompt, Request, SamplingParams, check_request
from dsv4lite.text.chat import END_THINK, PREVIEW, REFRESHED, THINK, encode_messages
from dsv4lite.text.parse import ChatParser
from dsv4lite.text.tokenizer import Tokenizer

Reasoning = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Message = Mapping[str, Any]
Tool = Mapping[str, Any]

LONG_PROMPT = 50_000
"""Characters or token ids from which on a prompt is encoded and checked in a worker thread."""


class ModelTraits(Protocol):
    """What this side wants to know of the model."""

    @property
    def dspark(self) -> object: ...


class EngineFacts(Protocol):
    """What an engine knows about itself once it has started."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_logprobs(self) -> int | None: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    @property
    def model_config(self) -> ModelTraits: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run one request; see ``AsyncLLM.generate``.

    Attributes:
        index: Position in a batch.
        arrival: Monotonic second of the call.

    Raises:
        InvalidRequestError: A value is of the wrong kind.
    """

    request_id: str | None = None
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    wait: bool = True
    index: int = 0
    arrival: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        for name, kind, rule in (
            ("request_id", str, "must be a non-empty string, or None"),
            ("cache_salt", str, "must be a string, or None"),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or value == "" or value != value):
                raise InvalidRequestError(f"{name}={value!r} {rule}", parameter=name, value=value)
        if self.deadline is not None and not _is_time(self.deadline):
            rule = "must be a finite number of seconds from now, above 0, or None"
            raise InvalidRequestError(f"deadline={_shown(self.deadline)} {rule}", parameter="deadline", value=self.deadline)
        if not isinstance(self.priority, int):
            raise InvalidRequestError(f"priority={self.priority!r} must be an integer", parameter="priority", value=self.priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checked request; its id is still what the caller asked for, or empty."""

    request: Request
    options: Options
    parser: ParserFactory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prompt that is still to be encoded and checked.

    Attributes:
        make: Does it, in any thread. Raises ``InvalidRequestError``, ``ContextLengthError`` among them.
        is_long: It takes longer than an event loop should be held up.
    """

    make: Callable[[], Draft]
    is_long: bool


def _shown(value: object) -> str:
    return f"{value!r:.50}" if not isinstance(value, int) or abs(value) < 10**20 else "an integer of more than 20 digits"


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and 0 < float(value) < math.inf
    except OverflowError:  # an integer beyond all floats
        return False


def completion_job(
    facts: EngineFacts, prompt: Prompt, params: SamplingParams | None, options: Options, parser: ParserFactory | None = None
) -> Job:
    """Continue ``prompt``; ``parser`` reads the output if it is an assistant's turn."""

    def make() -> Draft:
        wanted = _params(facts, params)
        ids = _encode(facts.tokenizer, prompt, "prompt", add_bos=facts.tokenizer.add_bos_token)
        check_request(ids, wanted, vocab_size=facts.vocab_size, max_model_len=facts.max_model_len, max_logprobs=facts.max_logprobs)
        request = _request(facts.tokenizer, ids, wanted, options)
        if wanted.prompt_logprobs is not None:
            request = replace(request, score_from=1)
        return Draft(request=request, options=options, parser=parser)

    return Job(make=make, is_long=_size(prompt) > LONG_PROMPT)


def chat_job(
    facts: EngineFacts,
    messages: Sequence[Message],
    params: SamplingParams | None,
    options: Options,
    *,
    tools: Sequence[Tool] | None,
    reasoning: Reasoning,
) -> Job:
    """Write the assistant's next turn.

    Raises:
        InvalidRequestError: A message, a tool or ``reasoning`` is malformed.
    """
    efforts = REFRESHED if facts.model_config.dspark else PREVIEW
    text = encode_messages(messages, reasoning=reasoning, efforts=efforts, tools=tools)
    all_tools = [*(tools or ()), *(tool for message in messages for tool in message.get("tools") or ())]
    thinking = text.endswith(THINK)
    return completion_job(facts, text, params, options, lambda prefix: ChatParser(thinking, all_tools, call_id_prefix=prefix))


def score_job(facts: EngineFacts, prompt: Prompt, completion: Prompt, top_logprobs: int, options: Options) -> Job:
    """Run a completion that is given, for its log-probabilities."""

    def make() -> Draft:
        before = _encode(facts.tokenizer, prompt, "prompt", add_bos=facts.tokenizer.add_bos_token)
        after = _encode(facts.tokenizer, completion, "completion", add_bos=False)
        for name, ids in (("prompt", before), ("completion", after)):
            if not ids:
                raise InvalidRequestError(f"the {name} is empty; give at least one token", parameter=name, value=ids)
        params = SamplingParams(prompt_logprobs=top_logprobs, detokenize=False)
        limit = facts.max_model_len + 1  # nothing is generated, so no room need be left for it
        check_request(before + after, params, vocab_size=facts.vocab_size, max_model_len=limit, max_logprobs=facts.max_logprobs)
        request = _request(facts.tokenizer, before + after, params, options)
        return Draft(request=replace(request, score_from=len(before), generate=False), options=options)

    return Job(make=make, is_long=_size(prompt) + _size(completion) > LONG_PROMPT)


def _params(facts: EngineFacts, params: object) -> SamplingParams:
    if params is None:
        return SamplingParams.from_generation_config(facts.generation_config)
    if isinstance(params, SamplingParams):
        return params
    message = f"params must be SamplingParams or None, not {type(params).__name__}; SamplingParams.from_dict reads a mapping"
    raise InvalidRequestError(message, parameter="params", value=params)


def _encode(tokenizer: Tokenizer, prompt: object, name: str, *, add_bos: bool) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, add_bos=add_bos))
    if isinstance(prompt, Mapping):
        for key in prompt:
            if key != "prompt_token_ids":
                hint = near_match(str(key), ["prompt_token_ids"])
                raise InvalidRequestError(f"the {name} has the unknown key {key!r}{hint}", parameter=name, value=key)
        prompt = prompt.get("prompt_token_ids")
    if isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequestError(f"the {name} is bytes; decode it to a str first", parameter=name, value=prompt)
    try:
        return tuple(map(operator.index, prompt))  # type: ignore[call-overload]  # what it is, is the question
    except TypeError as error:
        found = type(prompt).__name__
        if isinstance(prompt, Sequence):
            strange = next((part for part in prompt if not isinstance(part, SupportsIndex)), prompt[0])
            found += f" with {strange!r:.50} in it; generate_batch takes several prompts"
        rule = "must be a str, token ids, or {'prompt_token_ids': [...]}"
        raise InvalidRequestError(f"the {name} {rule}, not {found}", parameter=name, value=prompt) from error


def _request(tokenizer: Tokenizer, ids: tuple[int, ...], params: SamplingParams, options: Options) -> Request:
    think, end_think = tokenizer.token_id(THINK), tokenizer.token_id(END_THINK)
    return Request(
        request_id=options.request_id or "",
        prompt_token_ids=ids,
        params=params,
        priority=options.priority,
        deadline=None if options.deadline is None else options.arrival + options.deadline,
        cache_salt=options.cache_salt,
        eos_token_id=tokenizer.eos_token_id,
        think_ids=None if think is None or end_think is None else (think, end_think),
        arrival=options.arrival,
    )


def _size(prompt: object) -> int:
    """Return the number of characters or tokens; 0 for what is no prompt at all and will be refused."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids")
    return len(prompt) if isinstance(prompt, Sized) else 0
