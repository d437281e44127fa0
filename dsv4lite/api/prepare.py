"""From a prompt to a request: encoding, chat rendering, checking. Pure functions of what an engine knows of its model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from dsv4lite.api.collect import ParserFactory
from dsv4lite.checks import as_integers, is_integer, is_number, is_unicode, plain, plain_fields, require
from dsv4lite.errors import InvalidRequestError, UnsupportedError, near_match, shown
from dsv4lite.request import Prompt, Replay, Request, Row, SamplingParams, check_request
from dsv4lite.text.forms import ChatForm
from dsv4lite.text.messages import END_THINK, THINK, function_of, json_content, list_of
from dsv4lite.text.parse import OPENING_ENDS, CallSyntax, ChatParser
from dsv4lite.text.releases import call_marker
from dsv4lite.text.tokenizer import EOS, LONG_TEXT, Tokenizer

if TYPE_CHECKING:
    from dsv4lite.engine.engine import EngineInfo

Reasoning = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolChoice = str | Mapping[str, Any]
Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_HINTS = {
    **dict.fromkeys(("prompt", "text"), "give the text itself, not in a mapping"),
    **dict.fromkeys(("messages", "role", "content"), "chat and chat_stream take messages"),
}
_BYTES = (bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run one request; see ``AsyncLLM.generate``.

    Attributes:
        index: Position in a batch.

    Raises:
        InvalidRequestError: A value is of the wrong kind.
    """

    request_id: str | None = None
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    wait: bool = True
    index: int = 0

    def __post_init__(self) -> None:
        for name in ("request_id", "cache_salt"):
            value = getattr(self, name)
            good = value is None or (isinstance(value, str) and value != "" and is_unicode(value))
            require(good, name, value, "must be a non-empty string without lone surrogates, or None")
        good = self.deadline is None or (is_number(self.deadline) and self.deadline > 0)
        require(good, "deadline", self.deadline, "must be a finite number of seconds from now, above 0, or None")
        good = is_integer(self.priority) and -(2**63) <= self.priority < 2**63
        require(good, "priority", self.priority, "must be an integer from -2**63 to 2**63 - 1")
        require(isinstance(self.wait, bool), "wait", self.wait, "must be True or False")
        for name in ("request_id", "cache_salt", "priority", "deadline"):
            object.__setattr__(self, name, plain(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request whose prompt is not encoded and checked yet.

    Attributes:
        make: Encodes and checks the prompt, in any thread; the id of its request is the caller's, or empty, and its arrival and
            deadline are not set yet. Raises ``InvalidRequestError`` (``ContextLengthError`` is one).
        is_long: ``make`` takes too long for an event loop.
        parser: Reads the output if it is an assistant's turn.
    """

    make: Callable[[], Request]
    options: Options
    is_long: bool
    parser: ParserFactory | None = None


def completion_job(info: EngineInfo, prompt: Prompt, params: SamplingParams | None, options: Options) -> Job:
    """Continue ``prompt``."""
    own, tokenizer = _copied(prompt), info.tokenizer
    encode = partial(_encode, tokenizer, own, "prompt", add_bos=tokenizer.add_bos_token)
    return _generation_job(info, encode, _size(own), params, options)


def _generation_job(
    info: EngineInfo,
    encode: Callable[[], tuple[int, ...]],
    size: int,
    params: SamplingParams | None,
    options: Options,
    parser: ParserFactory | None = None,
) -> Job:
    def make() -> Request:
        wanted = _params(info, params)
        return _request(info, encode(), wanted, options, score_from=None if wanted.prompt_logprobs is None else 1)

    return Job(make=make, options=options, is_long=size > LONG_TEXT, parser=parser)


def chat_job(
    info: EngineInfo,
    messages: Sequence[Message],
    params: SamplingParams | None,
    options: Options,
    tools: Sequence[Tool] | None,
    tool_choice: ToolChoice,
    reasoning: Reasoning | None,
    allow_special: bool,
) -> Job:
    """Write the assistant's next turn.

    Raises:
        InvalidRequestError: A message, a tool, ``tool_choice`` or ``reasoning`` is malformed.
        UnsupportedError: The model has no chat format, or a template for which jinja2 is missing; or the format of its tool calls
            is not known, and ``tool_choice`` needs it.
    """
    require(allow_special in (True, False), "allow_special", allow_special, "must be True or False")
    form, tokenizer = info.chat, info.tokenizer
    if form is None:
        raise UnsupportedError(info.no_chat)
    effort = "none" if reasoning is None else reasoning
    parts = form.render(messages, reasoning=effort, tools=tools, escape_results=not allow_special)
    thinking = form.thinking(("".join(parts),) if allow_special else parts)
    given = [*(tools or ()), *(tool for i, message in enumerate(messages) for tool in list_of(message, "tools", f"messages[{i}]"))]
    for i, tool in enumerate(given):
        function_of(tool, f"tools[{i}]")
    all_tools = json.loads(json_content(given, "the tools"))  # a copy
    choice = _tool_choice(tool_choice, [tool["function"]["name"] for tool in all_tools])
    syntax: CallSyntax = "none" if choice == "none" else form.syntax
    for function in (tool["function"] for tool in all_tools if syntax == "dsml"):
        names = [function["name"], *((function.get("parameters") or {}).get("properties") or {})]
        wrong = [name for name in names if any(end in name for end in OPENING_ENDS)]
        problem = f"has the names {shown(wrong)}, which the markup of calls cannot hold; rename the tool or property"
        require(not wrong, "tools", function["name"], problem)
    wanted = _params(info, params)
    must_call = choice not in ("auto", "none")
    guarded = must_call or (choice == "auto" and any(tool["function"].get("strict") for tool in all_tools))
    if guarded:
        wanted = _guarded(form, wanted, all_tools, choice, tokenizer, may_think=thinking is None)
    elif choice == "none" and form.calls is not None and (marker := call_marker(form.calls, tokenizer)) is not None:
        token = tokenizer.token_id(marker)
        assert token is not None
        wanted = wanted.replace(bad_words_ids=(*wanted.bad_words_ids, (token,)))
    eos = tokenizer.token_id(EOS)
    shows_eos = eos in tokenizer.added_ids and not (wanted.skip_special_tokens and eos in tokenizer.special_ids)

    def encode() -> tuple[int, ...]:
        return tuple(tokenizer.encode("".join(parts)) if allow_special else tokenizer.encode_parts(parts))

    def parser(prefix: str) -> ChatParser:
        return ChatParser(
            thinking, all_tools, syntax=syntax, call_id_prefix=prefix, guarded=guarded, must_call=must_call, shows_eos=shows_eos
        )

    return _generation_job(info, encode, sum(map(len, parts)), wanted, options, parser)


def _tool_choice(given: object, names: Sequence[str]) -> str | tuple[str]:
    """Return ``"auto"``, ``"none"``, ``"required"``, or a tool's name in a tuple.

    Raises:
        InvalidRequestError: It is none of these, or there is no such tool.
    """
    if isinstance(given, Mapping):
        function = given.get("function") if given.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        require(isinstance(name, str), "tool_choice", given, "must be {'type': 'function', 'function': {'name': NAME}}")
    else:
        require(isinstance(given, str), "tool_choice", given, "must be 'auto', 'none', 'required' or the name of a tool")
        name = given
    if name in ("auto", "none") and name == given:
        return str(name)
    require(bool(names), "tool_choice", given, "needs tools, and there are none")
    if name == given == "required":
        return "required"
    rule = f"must be 'auto', 'none', 'required' or one of the tools, {shown(list(names))}{near_match(name, names)}"
    require(name in names, "tool_choice", given, rule)
    return (str(name),)


def _guarded(
    form: ChatForm,
    params: SamplingParams,
    tools: Sequence[Tool],
    choice: str | tuple[str],
    tokenizer: Tokenizer,
    *,
    may_think: bool,
) -> SamplingParams:
    """Return parameters with the grammar of tool calls."""
    from dsv4lite.text.tool_calls import call_grammar

    what = f"tool_choice={choice[0] if isinstance(choice, tuple) else choice!r}" + (" with a strict tool" * (choice == "auto"))
    if params.structured_outputs is not None:
        raise UnsupportedError(f"{what} and structured_outputs both say what the answer looks like; leave one out")
    if form.calls is None:
        rule = "use 'auto' without strict tools, or 'none'"
        raise UnsupportedError(f"{what}: the template of this model does not tell how it writes tool calls; {rule}")
    functions = [tool["function"] for tool in tools if not isinstance(choice, tuple) or tool["function"]["name"] in choice]
    several, must_call = not isinstance(choice, tuple), choice != "auto"
    grammar = call_grammar(form.calls, functions, tokenizer, must_call=must_call, several=several, may_think=may_think)
    return params.replace(structured_outputs=grammar, detokenize=True)


def score_job(
    info: EngineInfo,
    prompt: Prompt,
    completion: Prompt,
    params: SamplingParams | None,
    top_logprobs: int,
    replay: Replay | None,
    index: int = 0,
) -> Job:
    """Compute the log-probabilities of a given completion.

    Raises:
        UnsupportedError: ``params`` have a setting that a given completion cannot be scored with.
        InvalidRequestError: ``params``, ``top_logprobs`` or ``replay`` is malformed.
    """
    given = _params(info, params)
    limit = min(info.max_logprobs, info.model.vocab_size)
    good = is_integer(top_logprobs) and 0 <= top_logprobs <= limit
    rule = f"must be an integer from 0 to {limit}: the engine's max_logprobs, or the size of the vocabulary"
    require(good, "top_logprobs", top_logprobs, rule)
    require(replay is None or isinstance(replay, Replay), "replay", replay, "must be a Replay or None")
    kept = replay is not None and replay.kept_ids is not None
    top = max(top_logprobs, given.logprobs or 0)
    wanted = SamplingParams(logprobs=top, prompt_logprobs=top, detokenize=False)
    if given.logprobs_mode == "processed":
        if given.structured_outputs is not None and not kept:
            raise UnsupportedError(
                "score with structured_outputs and logprobs_mode='processed': a given completion is not run through a grammar; "
                "score with logprobs_mode='raw', or with the replay of the rollout"
            )
        neutral: dict[str, Any] = {"n": 1, "max_tokens": None, "stop": (), "seed": None}
        neutral |= {"return_routed_experts": False, "return_replay": False}
        if kept:  # the replay's tokens replace these settings
            neutral |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0, "allowed_token_ids": None, "bad_words_ids": ()}
            neutral |= {"thinking_budget": None, "structured_outputs": None}
        wanted = given.replace(**neutral, logprobs=top, prompt_logprobs=top, detokenize=False)
    options, own_prompt, own_completion = Options(index=index), _copied(prompt), _copied(completion)

    def make() -> Request:
        before = _encode(info.tokenizer, own_prompt, "prompt", add_bos=info.tokenizer.add_bos_token)
        after = _encode(info.tokenizer, own_completion, "completion", add_bos=False)
        for name, ids in (("prompt", before), ("completion", after)):
            if not ids:
                raise InvalidRequestError(f"the {name} is empty; give at least one token", parameter=name, value=ids)
        if replay is not None:
            from dsv4lite.engine.choices import check_replay

            check_replay(replay, info.model, len(before), len(after))
        request = _request(info, before + after, wanted, options, score_from=len(before), generate=False)
        return replace(request, replay=None if replay is None else plain_fields(Replay, replay))

    return Job(make=make, options=options, is_long=_size(own_prompt) + _size(own_completion) > LONG_TEXT)


RowJob = Callable[["EngineInfo", Any, SamplingParams | None, int], Job]
"""Makes the job of a row of a batch, given its params and its index."""


def row_job(options: Options) -> RowJob:
    """Continue the prompts of a batch."""

    def job(info: EngineInfo, row: Prompt | Row, params: SamplingParams | None, index: int) -> Job:
        prompt, own = (row.prompt, row.params) if isinstance(row, Row) else (row, None)
        return completion_job(info, prompt, params if own is None else own, replace(options, index=index))

    return job


def pair_job(top_logprobs: int, replays: Sequence[Replay | None] | None, pairs: object) -> RowJob:
    """Score the pairs of a batch, each with its replay."""
    good = replays is None or (isinstance(replays, Sequence) and not isinstance(replays, str))
    require(good, "replays", replays, "must be a sequence with one Replay, or None, for each pair")
    given = None if replays is None else tuple(replays)
    if given is not None and isinstance(pairs, Sized):
        good = len(pairs) == len(given)
        require(good, "replays", given, f"has {len(given)} entries for {len(pairs)} pairs; give one for each, which may be None")

    def job(info: EngineInfo, pair: Any, params: SamplingParams | None, index: int) -> Job:
        good = isinstance(pair, Sequence) and not isinstance(pair, (str, bytes)) and len(pair) == 2
        require(good, "pairs", pair, f"row {index} must be (prompt, completion)")
        before, after = pair
        require(given is None or index < len(given), "replays", given, f"has no entry for pair {index}")
        return score_job(info, before, after, params, top_logprobs, None if given is None else given[index], index)

    return job


def _copied(prompt: object) -> object:
    """Return a copy of a prompt, which may be encoded later in another thread; token ids are then in a list or a tuple.

    Sets and one-time iterators are no sequences of token ids, and are returned as they are.
    """
    if isinstance(prompt, Mapping):
        return {key: value if isinstance(value, Mapping) else _copied(value) for key, value in prompt.items()}
    if isinstance(prompt, list):
        return list(prompt)
    if isinstance(prompt, (str, *_BYTES, Set)) or not (isinstance(prompt, Sized) and isinstance(prompt, Iterable)):
        return prompt
    tolist = getattr(prompt, "tolist", None)  # of an array or tensor, whose booleans and rows of one would pass for token ids
    values = tolist() if callable(tolist) else tuple(prompt)
    return values if isinstance(values, (list, tuple)) else prompt  # a tensor without dimensions has no list


def check_params(params: object) -> None:
    """Raise ``InvalidRequestError`` for what is neither parameters nor ``None``."""
    rule = "must be SamplingParams or None; SamplingParams.from_dict reads a mapping"
    require(params is None or isinstance(params, SamplingParams), "params", params, rule)


def _params(info: EngineInfo, params: object) -> SamplingParams:
    check_params(params)
    return plain_fields(SamplingParams, params) if isinstance(params, SamplingParams) else info.default_params


def _encode(tokenizer: Tokenizer, prompt: object, name: str, *, add_bos: bool) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, add_bos=add_bos))
    if isinstance(prompt, Mapping):
        for key in prompt:
            if key != "prompt_token_ids":
                hint = _HINTS.get(key) if isinstance(key, str) else None
                hint = near_match(key, ["prompt_token_ids"]) if hint is None else f"; {hint}"
                raise InvalidRequestError(f"the {name} has the unknown key {shown(key)}{hint}", parameter=name, value=key)
        prompt = prompt.get("prompt_token_ids")
    if isinstance(prompt, _BYTES):
        raise InvalidRequestError(f"the {name} is bytes; decode it to a str first", parameter=name, value=prompt)
    found = type(prompt).__name__
    if isinstance(prompt, (list, tuple)):
        try:
            return as_integers(prompt)
        except TypeError:
            strange = next((part for part in prompt if not isinstance(part, SupportsIndex)), prompt[0])
            messages = isinstance(strange, Mapping) and "role" in strange
            found += f" with {shown(strange)} in it; "
            found += "chat and chat_stream take messages" if messages else "generate_batch takes several prompts"
    rule = "must be a str, token ids, or {'prompt_token_ids': [...]}"
    raise InvalidRequestError(f"the {name} {rule}, not {found}", parameter=name, value=prompt)


def _request(
    info: EngineInfo,
    ids: tuple[int, ...],
    params: SamplingParams,
    options: Options,
    *,
    score_from: int | None,
    generate: bool = True,
) -> Request:
    """Check a request against the limits of the engine, and return it."""
    if params.return_routed_experts and not info.model.num_experts:
        raise UnsupportedError("return_routed_experts=True: this model has no routed experts; leave it at False")
    check_request(
        ids,
        params,
        vocab_size=info.model.vocab_size,
        max_model_len=info.max_model_len,
        max_logprobs=info.max_logprobs,
        max_completions=info.max_completions,
        completion_from=None if generate else score_from,
    )
    think, end_think = info.tokenizer.token_id(THINK), info.tokenizer.token_id(END_THINK)
    return Request(
        request_id=options.request_id or "",
        prompt_token_ids=ids,
        params=params,
        priority=options.priority,
        cache_salt=options.cache_salt,
        eos_token_id=info.tokenizer.eos_token_id,
        end_token_ids=info.end_token_ids,
        think_ids=None if think is None or end_think is None else (think, end_think),
        score_from=score_from,
        generate=generate,
    )


def _size(prompt: object) -> int:
    """Return the number of characters or tokens; 0 for a value that is no prompt and will be refused."""
    if isinstance(prompt, Mapping):
        return max(map(_size, (value for value in prompt.values() if not isinstance(value, Mapping))), default=0)
    return len(prompt) if isinstance(prompt, (str, list, tuple)) else 0
