"""TRL's colocated generation, with the real package where it is installed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from dsv4lite.errors import UnsupportedError
from dsv4lite.request import SamplingParams
from tests.e2e.engines import MODEST, prompts_of, write_tokenizer
from tests.tiny import trainer_model, trainer_settings

pytestmark = pytest.mark.filterwarnings("ignore")
VOCAB = 96
PROMPTS = prompts_of((5, 9), VOCAB, seed=1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' own model, saved."""
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("policy")
    model = trainer_model(trainer_settings(ratios=(0, 4, 8), vocab_size=VOCAB), seed=0)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    model.name_or_path = str(folder)
    return model


@pytest.fixture
def make(policy: Any) -> Iterator[Any]:
    from accelerate import Accelerator

    from dsv4lite.integrations.trl import Generation

    class Mine(Generation):
        SETTINGS = {**MODEST, "deterministic": True}

    made: list[Generation] = []

    def _make(model: Any = policy, **settings: Any) -> Generation:
        made.append(Mine(model, Accelerator(cpu=True), None, max_completion_length=6, **settings))
        return made[-1]

    yield _make
    for one in made:
        one.llm.close()


def test_policy_s_weights_reach_the_engine_in_sleep_and_awake(make: Any, policy: Any) -> None:
    """All of them, router biases and tables of ids included, which are no parameters; log-probabilities are the policy's."""
    generation = make(enable_sleep_mode=True, temperature=0.8)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    prompt_ids, completion_ids, logprobs, token_ids = generation.generate(PROMPTS, None, 1)
    assert prompt_ids == PROMPTS and [len(ids) for ids in completion_ids] == [len(values) for values in logprobs]
    assert [[one for (one,) in ids] for ids in token_ids] == completion_ids
    for prompt, completion, values in zip(prompt_ids, completion_ids, logprobs, strict=True):
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.8
        wanted = logits.log_softmax(-1)[range(len(completion)), completion]
        assert torch.allclose(torch.tensor(values)[:, 0], wanted, atol=1e-4)
    assert generation.llm.state == "asleep"
    assert generation.llm.weight_version == 1
    with torch.no_grad():
        for parameter, old in zip(policy.parameters(), before, strict=True):
            parameter.copy_(old)
    generation.sync_weights()
    assert generation.llm.weight_version == 2


@pytest.mark.parametrize("more", [{"modules_to_save": ["gate"]}, {"target_parameters": ["gate.weight"]}], ids=["copied", "adapted"])
def test_buffers_of_a_router_that_peft_trains_have_their_names(make: Any, policy: Any, more: dict[str, Any]) -> None:
    """PEFT wraps modules, so that their buffers lie at other paths."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(policy), peft.LoraConfig(r=2, target_modules=["q_a_proj"], **more))
    make(model).sync_weights()


def test_buffers_of_a_policy_that_fsdp_shards_have_their_names(make: Any, policy: Any) -> None:
    """FSDP of version 1, accelerate's default, wraps modules, too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrap = ModuleWrapPolicy({type(policy.model.layers[0])})
        model = FullyShardedDataParallel(
            copy.deepcopy(policy), auto_wrap_policy=wrap, device_id=torch.device("cpu"), use_orig_params=True
        )
        model(torch.tensor(PROMPTS[:1]))  # as in training: FSDP is ready after the first pass
        generation = make(model)
        generation._dist.fsdp_version = 1
        generation.sync_weights()
    finally:
        dist.destroy_process_group()


def test_lists_of_log_probabilities_are_sorted_and_have_the_sampled_token(make: Any) -> None:
    generation = make(logprobs=2, generation_kwargs={"seed": 3})
    generation.sync_weights()
    _, completion_ids, logprobs, token_ids = generation.generate(PROMPTS, None, 1)
    direct = generation.llm.generate_batch(PROMPTS, SamplingParams(max_tokens=6, logprobs=2, seed=3, logprobs_mode="processed"))
    assert [list(output.token_ids) for output in direct] == completion_ids
    for ids, values, made in zip(token_ids, logprobs, completion_ids, strict=True):
        for row, numbers, token in zip(ids, values, made, strict=True):
            assert token in row and len(row) == len(set(row)) == len(numbers) <= 3 and numbers == sorted(numbers, reverse=True)


def test_settings_that_need_text_are_used(make: Any) -> None:
    generation = make(structured_outputs_regex="abc")
    generation.sync_weights()
    _, completion_ids, _, _ = generation.generate(PROMPTS, None, 1)
    assert {generation.llm.tokenizer.decode(ids) for ids in completion_ids} == {"abc"}
    generation.structured_outputs_regex, generation.generation_kwargs = None, {"stop": ["c"], "allowed_token_ids": [9]}
    _, completion_ids, _, _ = generation.generate(PROMPTS, None, 1)
    assert completion_ids == [[9], [9]] and generation.llm.tokenizer.decode([9]) == "c"


def test_conversation_with_tools_goes_on_to_the_longest_length(make: Any) -> None:
    """TRL's loop of tools reads this length there, and asks for ``max_completion_length`` tokens after each result."""
    generation = make()
    generation.sync_weights()
    longest = generation.llm.llm_engine.model_config.max_model_len
    assert longest == generation.llm.memory().max_model_len
    generation.generation_kwargs = {"ignore_eos": True, "top_k": -1, "stop": None}
    _, completion_ids, _, _ = generation.generate([PROMPTS[0], *prompts_of((longest - 2,), VOCAB, seed=2)], None, 1)
    assert [len(ids) for ids in completion_ids] == [6, 2]


def test_what_it_does_not_do_is_said_at_once(make: Any) -> None:
    with pytest.raises(UnsupportedError, match="vllm_mode='server'"):
        make(mode="server")
    generation = make()
    with pytest.raises(UnsupportedError, match="images"):
        generation.generate(PROMPTS, [["picture"], None], 1)


def test_trainer_of_trl_learns_with_it(policy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step of GRPOTrainer, whose importance ratios are those of one and the same policy."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    from dsv4lite.integrations.trl import Generation

    class Mine(Generation):
        SETTINGS = {**MODEST, "deterministic": True}

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Mine)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{policy.name_or_path}/tokenizer.json", eos_token="<｜end▁of▁sentence｜>")
    tokenizer.pad_token = tokenizer.eos_token
    settings = GRPOConfig(
        output_dir=str(tmp_path), use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True, max_steps=2, num_generations=4,
        per_device_train_batch_size=4, max_completion_length=6, report_to=[], logging_steps=1, use_cpu=True, bf16=False,
        router_aux_loss_coef=0.0, gradient_checkpointing=False,
        save_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": ["ab", "cd"] * 4})
    trainer = GRPOTrainer(
        policy, reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions], args=settings, train_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip
    try:
        trainer.train()
        found = trainer.state.log_history
        ratios = [
            entry["sampling/importance_sampling_ratio/mean"]
            for entry in found
            if "sampling/importance_sampling_ratio/mean" in entry
        ]
        assert ratios and all(abs(ratio - 1) < 1e-3 for ratio in ratios)
        assert trainer.vllm_generation.llm.weight_version >= 2
    finally:
        trainer.vllm_generation.llm.close()
