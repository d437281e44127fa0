"""An engine as a model provider of Inspect, the evaluation framework; written for inspect-ai 0.3.285.

The entry point makes it known to Inspect: ``inspect eval task.py --model dsv4lite/PATH -M max_model_len=8192``. Texts are those of
``chat``. Torch and the engine are loaded with the first model, as Inspect imports the providers of all packages.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack
from uuid import uuid4

import anyio
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    Content,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolInfo

from dsv4lite.errors import ContextLengthError, UnsupportedError

if TYPE_CHECKING:
    from dsv4lite.config import EngineSettings
    from dsv4lite.llm import LLM
    from dsv4lite.request import CompletionOutput, SamplingParams

_NAMES = {"stop_seqs": "stop", "num_choices": "n", "reasoning_tokens": "thinking_budget"}
_SAME = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "logit_bias", "seed")
_UNSUPPORTED = ("best_of", "prompt_logprobs", "modalities")
_REASONS = {"stop": "stop", "length": "max_tokens", "deadline": "max_tokens"}


@modelapi(name="dsv4lite")
class Model(ModelAPI):
    """Generates by an engine, which batches the samples of an evaluation by itself.

    The engine runs in threads of its own, so that evaluations in several event loops can use the same model.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  # Inspect's own default
        llm: LLM | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Take an engine that has started, or start one; ``close`` ends it.

        Args:
            model_name: Folder or hub id, what follows ``dsv4lite/`` in the model's name.
            base_url, api_key: Given by Inspect, and without effect.
            config: Defaults of ``generate``.
            llm: An engine, in place of ``settings``.
            **settings: Fields of ``EngineConfig``.
        """
        from dsv4lite.llm import LLM

        super().__init__(model_name, base_url, api_key, [], config)
        self.llm = LLM.create(model_name, **settings) if llm is None else llm

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Write the assistant's next turn. A conversation that is too long ends with ``model_length``, as Inspect expects.

        Raises:
            InvalidRequestError: A message is malformed, or has content that is not text.
            UnsupportedError: ``config`` has a field that an engine does not have.
        """
        request_id = f"inspect-{uuid4().hex}"
        call = partial(
            self.llm.chat,
            [_message(message) for message in input],
            _params(config),
            tools=[{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools] or None,
            tool_choice=_choice(tool_choice) if tools else "auto",
            reasoning=config.reasoning_effort,
            request_id=request_id,
        )
        try:
            output = await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        except ContextLengthError as error:
            return ModelOutput.from_content(self.model_name, str(error), "model_length", str(error))
        except anyio.get_cancelled_exc_class():
            self.llm.abort(request_id)
            raise
        body, usage = output.to_openai(chat=True, tokenizer=self.llm.tokenizer), output.usage
        return ModelOutput(
            model=self.model_name,
            choices=[
                ChatCompletionChoice(
                    message=self._answer(out),
                    stop_reason="tool_calls" if out.tool_calls else _REASONS.get(out.finish_reason, "unknown"),
                    logprobs=None if choice["logprobs"] is None else Logprobs(**choice["logprobs"]),
                )
                for out, choice in zip(output.outputs, body["choices"], strict=True)
            ],
            usage=ModelUsage(
                input_tokens=usage.prompt_tokens - usage.cached_tokens,
                input_tokens_cache_read=usage.cached_tokens,
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
            time=output.timing.total,
            response_id=request_id,
        )

    def _answer(self, out: CompletionOutput) -> ChatMessageAssistant:
        content: list[Content] = [ContentReasoning(reasoning=out.reasoning)] if out.reasoning else []
        content.append(ContentText(text=out.text))
        return ChatMessageAssistant(
            content=content if out.reasoning else out.text,
            tool_calls=[_call(call.id, call.name, call.arguments) for call in out.tool_calls] or None,
            model=self.model_name,
            source="generate",
        )

    async def count_text_tokens(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(await self.tokenize(text))

    async def tokenize(self, text: str) -> list[int]:
        """Encode a text."""
        return self.llm.tokenizer.encode(text)

    def max_connections(self) -> int:
        """Return how many samples are generated at once, and so how large batches become."""
        return self.llm.config.max_num_seqs

    def connection_key(self) -> str:
        """Return the model's name: each engine has its own limit of samples at once."""
        name: str = self.model_name
        return name

    def close(self) -> None:
        """End the engine."""
        self.llm.close()


def _params(config: GenerateConfig) -> SamplingParams:
    from dsv4lite.request import SamplingParams

    for name in _UNSUPPORTED:
        if getattr(config, name):
            raise UnsupportedError(f"dsv4lite with Inspect: {name}={getattr(config, name)!r}; leave it out")
    names = {**_NAMES, **{name: name for name in _SAME}}
    settings = {ours: getattr(config, name) for name, ours in names.items() if getattr(config, name) is not None}
    if config.logprobs or config.top_logprobs:
        settings["logprobs"] = config.top_logprobs or 0
    if config.response_schema is not None:
        settings["structured_outputs"] = {"json": config.response_schema.json_schema.model_dump(exclude_none=True)}
    return SamplingParams.from_dict({**settings, **(config.extra_body or {})})


def _choice(choice: ToolChoice) -> str:
    name: str = {"any": "required"}.get(choice, choice) if isinstance(choice, str) else choice.name
    return name


def _message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as ``chat`` takes it."""
    parts = [] if isinstance(message.content, str) else message.content
    said = [{"type": part.type, "text": getattr(part, "text", "")} for part in parts if not isinstance(part, ContentReasoning)]
    given: dict[str, Any] = {"role": message.role, "content": said if parts else message.content}
    if message.role == "assistant":
        given["reasoning_content"] = "".join(part.reasoning for part in parts if isinstance(part, ContentReasoning))
        given["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": json.dumps(call.arguments)}}
            for call in message.tool_calls or ()
        ]
    elif message.role == "tool":
        given["tool_call_id"] = message.tool_call_id
        given["content"] = f"Error: {message.error.message}" if message.error else given["content"]
    return given


def _call(id: str, name: str, arguments: str) -> ToolCall:
    """Return a call as Inspect takes it; arguments that are no JSON object become its error, which the model is told."""
    try:
        parsed, error = json.loads(arguments), None
    except ValueError as problem:
        parsed, error = None, f"the arguments are not JSON: {problem}"
    if error is None and not isinstance(parsed, dict):
        error = "the arguments are not a JSON object"
    return ToolCall(id=id, function=name, arguments=parsed if error is None else {}, parse_error=error)
