"""The model of the evaluation harness, with the real package where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dsv4lite.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from dsv4lite.llm import LLM
from dsv4lite.request import SamplingParams
from tests.e2e.engines import MODEST, write_model

pytestmark = pytest.mark.filterwarnings("ignore")
PAIRS = [("abc", " de"), ("hello ", "x"), ("", "ab"), ("k" * 90, "mm"), ("ka", "m" * 80)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("lm_eval")
    from dsv4lite.integrations.lm_eval import Model

    folder = write_model(tmp_path_factory.mktemp("model"))
    made = Model(str(folder), **{**MODEST, "max_model_len": 64, "deterministic": True}, batch_size=1)
    yield made
    made.llm.close()


def instances(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]


def test_loglikelihoods_are_those_of_score(model: Any) -> None:
    """Also behind no context, and of contexts and continuations that are too long, of which the end counts."""
    llm: LLM = model.llm
    encode = llm.tokenizer.encode
    split = [
        ("abc", " de"),
        ("hello", " x"),
        ([llm.tokenizer.bos_token_id], "ab"),
        (encode("k" * 62), "mm"),
        (encode("a"), "m" * 63),
    ]
    found = model.loglikelihood(instances("loglikelihood", PAIRS))
    for (value, greedy), (prompt, completion) in zip(found, split, strict=True):
        scores = llm.score(prompt, completion)
        assert value == float(scores.sampled.sum()) and greedy == bool((scores.ranks == 1).all())


def test_best_continuation_is_said_to_be_greedy(model: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, allowed_token_ids=tuple(range(7, 90)))
    text = model.llm.generate("abc", params).text
    ids = model.llm.tokenizer.encode(text)
    greedy = model.llm.score("abc", ids).ranks.tolist() == [1] * len(ids)
    (found,) = model.loglikelihood(instances("loglikelihood", [("abc", text)]))
    assert found[1] is greedy


def test_rolling_loglikelihood_counts_every_token_once(model: Any) -> None:
    text = "abcdefgh" * 12
    ids, begin = model.llm.tokenizer.encode(text), model.llm.tokenizer.bos_token_id
    (short, long) = model.loglikelihood_rolling(instances("loglikelihood_rolling", [("abc",), (text,)]))
    assert short == float(model.llm.score([begin], "abc").sampled.sum())
    assert len(ids) == 96 and model.max_length == 64
    parts = [([begin], ids[:63]), (ids[32:63], ids[63:])]
    assert long == sum(float(model.llm.score(*part).sampled.sum()) for part in parts)


def test_texts_are_those_of_generate(model: Any) -> None:
    given: list[Any] = [
        ("abc", {"until": ["q", "e", ""], "max_gen_toks": 20}),
        ("hello", {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 4, "max_gen_toks": 9, "until": "z"}),
        ("k" * 90, {"max_gen_toks": 10}),
        ("kx", {"max_gen_toks": 80}),
    ]
    llm: LLM = model.llm
    wanted = [
        llm.generate("abc", SamplingParams(temperature=0, stop=["q", "e"], max_tokens=20)).text,
        llm.generate("hello", SamplingParams(temperature=0.7, top_p=0.9, seed=4, max_tokens=9, stop="z")).text,
        llm.generate("k" * 54, SamplingParams(temperature=0, max_tokens=10)).text,
        llm.generate("x", SamplingParams(temperature=0, max_tokens=63)).text,
    ]
    assert model.generate_until(instances("generate_until", given)) == wanted
    with pytest.raises(InvalidRequestError, match="num_beams"):
        model.generate_until(instances("generate_until", [("abc", {"num_beams": 4})]))
    talk = model.apply_chat_template([{"role": "user", "content": "ab"}])
    with pytest.raises(ContextLengthError):  # a conversation is not cut
        model.generate_until(instances("generate_until", [(talk, {"max_gen_toks": 63})]))


def test_harness_evaluates_a_task_with_it(model: Any) -> None:
    """Two choices, of which the likelier one by ``score`` is what the harness counts as the answer."""
    from datasets import Dataset
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rows = [{"text": "abc", "choices": [" x", " y"], "label": 0}, {"text": "hello", "choices": [" x", " y"], "label": 1}]
    task: dict[str, Any] = {"task": "small", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test"}
    task |= {"doc_to_text": "text", "doc_to_target": "label", "doc_to_choice": "choices", "target_delimiter": ""}
    task |= {"custom_dataset": lambda **_: {"test": Dataset.from_list(rows)}, "metric_list": [{"metric": "acc"}]}
    found = simple_evaluate(model=model, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)

    def likelier(text: str) -> int:
        values = [float(model.llm.score(text, choice).sampled.sum()) for choice in (" x", " y")]
        return values.index(max(values))

    right = [likelier(row["text"]) == row["label"] for row in rows]
    assert found["results"]["small"]["acc,none"] == sum(right) / len(right)


def test_chat_template_of_the_harness_is_the_model_s_own(model: Any) -> None:
    """``simple_evaluate`` applies it: the answers are those of ``chat``."""
    from datasets import Dataset
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rows = [{"text": "ab"}, {"text": "c d"}]
    task: dict[str, Any] = {"task": "talk", "dataset_path": "json", "output_type": "generate_until", "test_split": "test"}
    task |= {"doc_to_text": "text", "doc_to_target": "x", "generation_kwargs": {"until": ["q"], "max_gen_toks": 8}}
    task |= {"custom_dataset": lambda **_: {"test": Dataset.from_list(rows)}, "metric_list": [{"metric": "exact_match"}]}
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, apply_chat_template=True)
    params = SamplingParams(temperature=0, max_tokens=8, stop=["q"])
    wanted = [model.llm.chat([{"role": "user", "content": row["text"]}], params).text for row in rows]
    assert [sample["resps"][0][0] for sample in found["samples"]["talk"]] == wanted
    talk = model.apply_chat_template([{"role": "user", "content": "ab"}])
    with pytest.raises(UnsupportedError, match="log-likelihoods with a chat template"):
        model.loglikelihood(instances("loglikelihood", [(talk, "x")]))
    with pytest.raises(UnsupportedError, match="gen_prefix with a chat template; leave --apply_chat_template out"):
        model.apply_chat_template([], add_generation_prompt=False)


def test_harness_makes_it_by_name_with_settings_as_text(model: Any) -> None:
    from lm_eval.api.registry import get_model

    line = f"model={model.llm.config.model},max_model_len=32,device=cpu,kv_cache_memory_bytes=16777216"
    made = get_model("dsv4lite").create_from_arg_string(line, {"batch_size": 4, "max_batch_size": None, "device": None})
    try:
        assert type(made) is type(model) and made.max_length == 32
    finally:
        made.llm.close()
