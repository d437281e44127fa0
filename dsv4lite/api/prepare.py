"""From a prompt to a request: encoding, chat rendering, checking. Pure functions of the engine's facts."""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, SupportsIndex

from dsv4lite.api.collect import ParserFactory
from dsv4lite.errors import InvalidRequestError, UnsupportedError, near_match, shown
from dsv4lite.request import Prompt, Request, SamplingParams, check_request, is_number, is_unicode
from dsv4lite.text.chat import CHAT_FORMS, END_THINK, THINK, render_messages
from dsv4lite.text.parse import ChatParser
from dsv4lite.text.tokenizer import Tokenizer

Reasoning = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Message = Mapping[str, Any]
Tool = Mapping[str, Any]

LONG_PROMPT = 50_000
"""Characters or token ids; a longer prompt is encoded and checked in a worker thread."""


class EngineFacts(Protocol):
    """Facts of an engine that has started."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_logprobs(self) -> int: ...
    @property
    def max_completions(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def default_params(self) -> SamplingParams: ...
    @property
    def chat(self) -> str | None: ...


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
        for name in ("request_id", "cache_salt"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value and is_unicode(value)):
                rule = "must be a non-empty string without lone surrogates, or None"
                raise InvalidRequestError(f"{name}={shown(value)} {rule}", parameter=name, value=value)
        if self.deadline is not None and not (is_number(self.deadline) and self.deadline > 0):
            rule = "must be a finite number of seconds from now, above 0, or None"
            raise InvalidRequestError(f"deadline={shown(self.deadline)} {rule}", parameter="deadline", value=self.deadline)
        if not isinstance(self.priority, int) or not -(2**63) <= self.priority < 2**63:
            message = f"priority={shown(self.priority)} must be an integer from -2**63 to 2**63 - 1"
            raise InvalidRequestError(message, parameter="priority", value=self.priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A checked request; its id is the one that the caller gave, or empty."""

    request: Request
    options: Options
    parser: ParserFactory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prompt that is not encoded and checked yet.

    Attributes:
        make: Encodes and checks it, in any thread. Raises ``InvalidRequestError`` (``ContextLengthError`` is one).
        is_long: ``make`` takes too long for an event loop.
    """

    make: Callable[[], CheckedRequest]
    is_long: bool


def completion_job(facts: EngineFacts, prompt: Prompt, params: SamplingParams | None, options: Options) -> Job:
    """Continue ``prompt``."""
    own, add_bos = _copied(prompt), facts.tokenizer.add_bos_token
    return _generation_job(facts, lambda: _encode(facts.tokenizer, own, "prompt", add_bos=add_bos), _size(own), params, options)


def _generation_job(
    facts: EngineFacts,
    encode: Callable[[], tuple[int, ...]],
    size: int,
    params: SamplingParams | None,
    options: Options,
    parser: ParserFactory | None = None,
) -> Job:
    """Continue what ``encode`` returns; ``parser`` reads the output if it is an assistant's turn."""

    def make() -> CheckedRequest:
        wanted = _params(facts, params)
        ids = encode()
        _check(facts, ids, wanted, facts.max_model_len)
        request = _request(facts.tokenizer, ids, wanted, options)
        if wanted.prompt_logprobs is not None:
            request = replace(request, score_from=1)
        return CheckedRequest(request=request, options=options, parser=parser)

    return Job(make=make, is_long=size > LONG_PROMPT)


def chat_job(
    facts: EngineFacts,
    messages: Sequence[Message],
    params: SamplingParams | None,
    options: Options,
    *,
    tools: Sequence[Tool] | None,
    reasoning: Reasoning,
    allow_special: bool,
) -> Job:
    """Write the assistant's next turn.

    Raises:
        InvalidRequestError: A message, a tool or ``reasoning`` is malformed.
        UnsupportedError: The model's family has no chat format.
    """
    if allow_special not in (True, False):
        message = f"allow_special={shown(allow_special)} must be True or False"
        raise InvalidRequestError(message, parameter="allow_special", value=allow_special)
    if facts.chat is None:
        raise UnsupportedError("this model's family has no chat format; render the conversation yourself and use generate()")
    efforts, tokenizer = CHAT_FORMS[facts.chat], facts.tokenizer
    parts = render_messages(messages, reasoning=reasoning, efforts=efforts, tools=tools, escape_results=not allow_special)
    thinking = parts[-1].endswith(THINK)
    all_tools = copy.deepcopy([*(tools or ()), *(tool for message in messages for tool in message.get("tools") or ())])

    def encode() -> tuple[int, ...]:
        return tuple(tokenizer.encode("".join(parts)) if allow_special else tokenizer.encode_parts(parts))

    def parser(prefix: str) -> ChatParser:
        return ChatParser(thinking, all_tools, call_id_prefix=prefix)

    return _generation_job(facts, encode, sum(map(len, parts)), params, options, parser)


def score_job(
    facts: EngineFacts, prompt: Prompt, completion: Prompt, params: SamplingParams | None, top_logprobs: int, options: Options
) -> Job:
    """Run a completion that is given, for its log-probabilities.

    Raises:
        UnsupportedError: ``params`` have a setting that a given completion cannot be scored with.
    """
    given = _params(facts, params)
    if not isinstance(top_logprobs, int) or top_logprobs < 0:
        message = f"top_logprobs={shown(top_logprobs)} must be an integer of at least 0"
        raise InvalidRequestError(message, parameter="top_logprobs", value=top_logprobs)
    top = max(top_logprobs, given.logprobs or 0)
    wanted = SamplingParams(logprobs=top, prompt_logprobs=top, detokenize=False)
    if given.logprobs_mode == "processed":
        if given.structured_outputs is not None:
            raise UnsupportedError(
                "score with structured_outputs and logprobs_mode='processed': a given completion is not run through a grammar; "
                "score with logprobs_mode='raw'"
            )
        neutral = {"n": 1, "max_tokens": None, "stop": (), "seed": None, "return_routed_experts": False}
        wanted = given.replace(**neutral, logprobs=top, prompt_logprobs=top, detokenize=False)
    own_prompt, own_completion = _copied(prompt), _copied(completion)

    def make() -> CheckedRequest:
        before = _encode(facts.tokenizer, own_prompt, "prompt", add_bos=facts.tokenizer.add_bos_token)
        after = _encode(facts.tokenizer, own_completion, "completion", add_bos=False)
        for name, ids in (("prompt", before), ("completion", after)):
            if not ids:
                raise InvalidRequestError(f"the {name} is empty; give at least one token", parameter=name, value=ids)
        _check(facts, before + after, wanted, facts.max_model_len + 1)  # nothing is generated
        request = _request(facts.tokenizer, before + after, wanted, options)
        return CheckedRequest(request=replace(request, score_from=len(before), generate=False), options=options)

    return Job(make=make, is_long=_size(own_prompt) + _size(own_completion) > LONG_PROMPT)


def _check(facts: EngineFacts, ids: tuple[int, ...], params: SamplingParams, max_model_len: int) -> None:
    if params.return_routed_experts and not facts.num_experts:
        raise UnsupportedError("return_routed_experts=True: this model has no routed experts; leave it at False")
    check_request(
        ids,
        params,
        vocab_size=facts.vocab_size,
        max_model_len=max_model_len,
        max_logprobs=facts.max_logprobs,
        max_completions=facts.max_completions,
    )


def _copied(prompt: object) -> object:
    """Return a copy of a prompt, which may be encoded later in another thread."""
    if isinstance(prompt, Mapping):
        return {key: _copied(value) for key, value in prompt.items()}
    if isinstance(prompt, (str, bytes, bytearray)) or not isinstance(prompt, Iterable):
        return prompt
    return list(prompt) if isinstance(prompt, list) else tuple(prompt)


def _params(facts: EngineFacts, params: object) -> SamplingParams:
    if params is None:
        return facts.default_params
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
                hint = near_match(key, ["prompt_token_ids"]) if isinstance(key, str) else ""
                raise InvalidRequestError(f"the {name} has the unknown key {shown(key)}{hint}", parameter=name, value=key)
        prompt = prompt.get("prompt_token_ids")
    if isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequestError(f"the {name} is bytes; decode it to a str first", parameter=name, value=prompt)
    try:
        return tuple(map(operator.index, prompt))  # type: ignore[call-overload]  # its type is checked here
    except TypeError as error:
        found = type(prompt).__name__
        if isinstance(prompt, Sequence):
            strange = next((part for part in prompt if not isinstance(part, SupportsIndex)), prompt[0])
            found += f" with {shown(strange)} in it; generate_batch takes several prompts"
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
    """Return the number of characters or tokens; 0 for a value that is no prompt and will be refused."""
    if isinstance(prompt, Mapping):
        return max(map(_size, prompt.values()), default=0)
    return len(prompt) if isinstance(prompt, Sized) else 0
