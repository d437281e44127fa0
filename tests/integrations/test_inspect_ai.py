"""The model provider of Inspect, with the real package where it is installed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsv4lite.errors import InvalidRequestError, UnsupportedError
from dsv4lite.llm import LLM
from dsv4lite.request import SamplingParams
from tests.e2e.engines import MODEST, write_model

pytestmark = pytest.mark.filterwarnings("ignore")
SOME = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Found by its name, as Inspect finds it."""
    pytest.importorskip("inspect_ai")
    from inspect_ai.model import get_model

    given = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]["inspect_ai"]
    EntryPoint("dsv4lite", given["dsv4lite"], "inspect_ai").load()
    folder = write_model(tmp_path_factory.mktemp("model"))
    made = get_model(f"dsv4lite/{folder}", **MODEST, deterministic=True)
    yield made
    made.api.close()


def ask(model: Any, messages: Any, **options: Any) -> Any:
    from inspect_ai.model import GenerateConfig

    config = GenerateConfig(**{**SOME, **options.pop("config", {})})

    async def call() -> Any:
        return await model.generate(messages, config=config, **options)

    return anyio.run(call)


def test_answers_are_those_of_chat(model: Any) -> None:
    """In an event loop of its own each, with settings under Inspect's names."""
    llm: LLM = model.api.llm
    for config, params in (
        ({}, {}),
        ({"num_choices": 2, "temperature": 1.0, "seed": 3, "top_k": 9}, {"n": 2, "temperature": 1.0, "seed": 3, "top_k": 9}),
        ({"stop_seqs": ["q", "e"], "frequency_penalty": 0.5}, {"stop": ["q", "e"], "frequency_penalty": 0.5}),
        ({"extra_body": {"ignore_eos": True, "max_tokens": 3}}, {"ignore_eos": True, "max_tokens": 3}),
    ):
        found = ask(model, "abc", config=config)
        wanted = llm.chat([{"role": "user", "content": "abc"}], SamplingParams(**{**SOME, **params}))
        assert [choice.message.text for choice in found.choices] == [out.text for out in wanted.outputs]
        reasons = {"stop": "stop", "length": "max_tokens"}
        assert [choice.stop_reason for choice in found.choices] == [reasons[out.finish_reason] for out in wanted.outputs]
        assert found.usage.output_tokens == wanted.usage.completion_tokens
        assert found.usage.total_tokens == wanted.usage.total_tokens
    assert anyio.run(model.api.tokenize, "abc") == llm.tokenizer.encode("abc")


def test_conversations_logprobs_and_limits(model: Any) -> None:
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ChatMessageUser, ContentImage, ContentText
    from inspect_ai.tool import ToolCall

    llm: LLM = model.api.llm
    call = ToolCall(id="c1", function="f", arguments={"x": 1})
    talk = [
        ChatMessageUser(content=[ContentText(text="ab"), ContentText(text="cd")]),
        ChatMessageAssistant(content="e", tool_calls=[call]),
        ChatMessageTool(content="g", tool_call_id="c1"),
    ]
    same = [
        {"role": "user", "content": "ab\n\ncd"},
        {"role": "assistant", "content": "e", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "g"},
    ]
    found = ask(model, talk, config={"logprobs": True, "top_logprobs": 2})
    wanted = llm.chat(same, SamplingParams(**SOME, logprobs=2)).outputs[0]
    assert found.completion == wanted.text and wanted.logprobs is not None
    values = [token.logprob for token in found.choices[0].logprobs.content]
    assert values == pytest.approx(wanted.logprobs.sampled.tolist())
    assert all(len(token.top_logprobs) == 2 for token in found.choices[0].logprobs.content)
    assert ask(model, "k" * 2000).stop_reason == "model_length"
    with pytest.raises(UnsupportedError, match="best_of=2; leave it out"):
        ask(model, "abc", config={"best_of": 2})
    with pytest.raises(InvalidRequestError, match=r"part 0 of .* is not text"):
        ask(model, [ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AAAA")])])


def test_cancelled_calls_end_their_requests(model: Any) -> None:
    from inspect_ai.model import GenerateConfig

    config = GenerateConfig(max_tokens=900, extra_body={"ignore_eos": True})

    async def leave() -> None:
        with anyio.move_on_after(0.3) as scope:
            await model.generate("abc", config=config)
        assert scope.cancelled_caught

    anyio.run(leave)
    assert ask(model, "abc").completion
    assert model.api.llm.stats().num_running == 0


def test_inspect_evaluates_a_task_with_it(model: Any, tmp_path: Path) -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import exact

    texts = ["ab", "c d"]
    wanted = [model.api.llm.chat([{"role": "user", "content": text}], SamplingParams(**SOME)).text for text in texts]
    samples = [Sample(input=text, target=answer) for text, answer in zip(texts, wanted, strict=True)]
    (log,) = eval(Task(samples, scorer=exact()), model=model, log_dir=str(tmp_path), display="none", **SOME)
    assert log.status == "success", log.error
    assert [sample.output.completion for sample in log.samples] == wanted
