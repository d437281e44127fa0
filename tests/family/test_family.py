"""The seam: an engine serves a family that only the tests know, beside a direct forward of the same model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4lite.config import EngineConfig, NGram
from dsv4lite.debug.replay import replay
from dsv4lite.errors import ConfigError, UnsupportedError
from dsv4lite.kernels.rows import UnquantizedRow
from dsv4lite.llm import LLM
from dsv4lite.planning.memory import plan_memory
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.state.spec import SharedStore, StateSpec, StoreSpec
from tests.e2e.engines import MODEST, opened, prompts_of
from tests.family.tiny import CONFIG, TINY, make_weights, write_model

pytestmark = pytest.mark.usefixtures("forked_ranks")

WEIGHTS = make_weights(seed=0)
PAGE_BYTES = 2 * 256 * 2 * 32 * 4  # two layers have rows of 32 keys and 32 values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("family") / "tiny", WEIGHTS)


def direct(token_ids: Sequence[int]) -> Tensor:
    """Whole-sequence logits [T, V], in float64 and with nothing of the package."""
    w: Mapping[str, Tensor] = {name: tensor.double() for name, tensor in WEIGHTS.items()}
    count, heads, layers = len(token_ids), CONFIG["num_attention_heads"], CONFIG["num_hidden_layers"]
    width = CONFIG["hidden_size"] // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name + ".weight"]

    def rotate(x: Tensor) -> Tensor:  # pairs of channels as complex numbers
        angles = torch.outer(torch.arange(count), 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width))
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)

    def split(x: Tensor) -> Tensor:
        return x.unflatten(1, (heads, width)).transpose(0, 1)

    x = w["embed.weight"][list(token_ids)]
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    for i in range(layers):
        at, y = f"layers.{i}.attn.", norm(x, f"layers.{i}.attn_norm")
        if i < layers - 1:  # the last layer attends to the keys and values of the one before
            k, v = rotate(split(y @ w[at + "wk.weight"].T)), split(y @ w[at + "wv.weight"].T)
        scores = rotate(split(y @ w[at + "wq.weight"].T)) @ k.transpose(1, 2) / math.sqrt(width)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + mixed.transpose(0, 1).flatten(1) @ w[at + "wo.weight"].T
        y, at = norm(x, f"layers.{i}.ffn_norm"), f"layers.{i}.ffn."
        x = x + (torch.nn.functional.silu(y @ w[at + "w1.weight"].T) * (y @ w[at + "w3.weight"].T)) @ w[at + "w2.weight"].T
    return norm(x, "norm") @ w["head.weight"].T


def check(prompt: Sequence[int], output: RequestOutput, *, greedy: bool = True) -> None:
    """Each token's log-probability is that of the direct forward, and a greedy one is its best token."""
    (completion,) = output.outputs
    assert completion.logprobs is not None and completion.token_ids
    wanted = direct([*prompt, *completion.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
    chosen = wanted[torch.arange(len(wanted)), list(completion.token_ids)]
    torch.testing.assert_close(completion.logprobs.sampled.double(), chosen, rtol=0, atol=2e-4)
    if greedy:
        assert (wanted.max(-1).values - chosen < 1e-4).all()


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
PROMPTS = prompts_of([1, 7, 130, 300, 530], 96)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[int, ...]]:
    """Greedy tokens of each prompt, run by itself."""
    with opened(folder, family=TINY) as llm:
        return tokens([llm.generate(prompt, GREEDY) for prompt in PROMPTS])


def test_requests_give_what_a_direct_forward_gives(folder: Path) -> None:
    """Greedy and sampled, in one batch, in chunks, with single tokens beside them."""
    sampled = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=12, logprobs=0, ignore_eos=True)
    with opened(folder, family=TINY, max_num_batched_tokens=100) as llm:
        both = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, sampled)]
        outputs = llm.generate_batch([prompt for prompt, _ in both], [params for _, params in both])
        for (prompt, params), output in zip(both, outputs, strict=True):
            check(prompt, output, greedy=params is GREEDY)
        assert tokens(llm.generate_batch(PROMPTS, sampled)) == tokens(outputs[1::2])  # by seed, whatever else runs


def test_prefixes_are_cached_and_shared(folder: Path, alone: list[tuple[int, ...]]) -> None:
    with opened(folder, family=TINY) as llm:
        assert tokens([llm.generate(PROMPTS[4], GREEDY) for _ in range(2)]) == [alone[4]] * 2
        assert llm.stats().cached_tokens == 512
        outputs = llm.generate(PROMPTS[3], GREEDY.replace(n=3)).outputs  # forks in the middle of a page
        assert [tuple(output.token_ids) for output in outputs] == [alone[3]] * 3


def test_prefixes_of_pages_alone_are_cached_while_there_are_pages(folder: Path) -> None:
    """No other number limits them, such as that of sequences."""
    prompts = prompts_of((257,) * 24, CONFIG["vocab_size"], seed=3)
    few = SamplingParams(max_tokens=1)
    with opened(folder, family=TINY, max_num_seqs=2, kv_cache_memory_bytes=32 * PAGE_BYTES, max_model_len=2048) as llm:
        llm.generate_batch(prompts, few)
        assert [output.usage.cached_tokens for output in llm.generate_batch(prompts, few)] == [256] * 24


def test_preempted_requests_come_out_the_same(folder: Path, alone: list[tuple[int, ...]]) -> None:
    tight = {"kv_cache_memory_bytes": 3 * PAGE_BYTES, "max_model_len": 600, "enable_prefix_caching": False}
    with opened(folder, family=TINY, **tight) as llm:
        long = GREEDY.replace(max_tokens=150)
        prompts = [PROMPTS[2], PROMPTS[2][::-1], PROMPTS[1]]
        outputs = llm.generate_batch(prompts, long)
        assert llm.stats().preemptions > 0
        for prompt, output in zip(prompts, outputs, strict=True):
            check(prompt, output)


def test_drafts_of_the_host_change_no_token(folder: Path, alone: list[tuple[int, ...]]) -> None:
    with opened(folder, family=TINY, speculative=NGram(3, min_n=1, adaptive=False)) as llm:
        assert tokens(llm.generate_batch(PROMPTS, GREEDY)) == alone
        repeated = PROMPTS[1] * 5
        check(repeated, llm.generate(repeated, GREEDY))
        assert llm.stats().speculation.drafted > 0


def test_two_ranks_share_the_model(folder: Path, alone: list[tuple[int, ...]]) -> None:
    with LLM(str(folder), **{**MODEST, "family": TINY, "tensor_parallel_size": 2}) as llm:
        assert tokens(llm.generate_batch(PROMPTS, GREEDY)) == alone


def test_saved_steps_run_again(folder: Path, tmp_path: Path) -> None:
    with opened(folder, family=TINY) as llm:
        llm.dump_step(tmp_path / "step")
        llm.generate(PROMPTS[3], GREEDY)
    report = replay(tmp_path / "step", family=TINY)
    assert report.first is None and {op.op for op in report.ops} >= {"float_linear"}


def test_state_is_rows_of_grow_pages_and_nothing_else(folder: Path) -> None:
    plan = plan_memory(EngineConfig(model=str(folder), family=TINY, **MODEST))
    (budget,) = plan.per_device
    assert (budget.window_pages, budget.slots, budget.snapshots) == (0, 0, 0) and plan.bytes_per_sequence == 0
    assert plan.bytes_per_token == PAGE_BYTES / 256 and budget.weights == sum(4 * tensor.numel() for tensor in WEIGHTS.values())


def test_what_the_family_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"model_type='tiny' is not supported \(known: deepseek_v4, deepseek_v2, .*\)"):
        plan_memory(str(folder), device="cpu")
    with pytest.raises(ConfigError, match="num_attention_heads=4 cannot be shared equally by tp=3"):
        plan_memory(EngineConfig(model=str(folder), family=TINY, device="cpu", tensor_parallel_size=3))
    with opened(folder, family=TINY) as llm:
        with pytest.raises(UnsupportedError, match="no chat format"):
            llm.chat([{"role": "user", "content": "a"}])
        with pytest.raises(UnsupportedError, match="no routed experts"):
            llm.generate(PROMPTS[0], GREEDY.replace(return_routed_experts=True))


@pytest.mark.parametrize("layer", [-1, 1, 2])
def test_store_of_a_layer_that_is_not_before_on_the_same_stage_is_refused(layer: int) -> None:
    """A negative index read the store of another layer."""
    with pytest.raises(ConfigError, match=rf"layer 1 of a rank reads the store 'kv' of layer {layer}, .* pipeline_parallel_size"):
        StateSpec(layers=((StoreSpec("kv", UnquantizedRow(8, torch.float32)),), (SharedStore("kv", layer),)))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("deepseek_v5", False), ("deepseek_vl_v2", False), ("llama", False), ("DeepSeek-V4", True), ("deepseekv4", True)],
)
def test_another_architecture_is_named_before_missing_weights(tmp_path: Path, name: str, hint: bool) -> None:
    """Missing shards came first, and every number was taken for a misspelling of ``deepseek_v4``."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"embed.weight": "model-1.safetensors"}}')
    with pytest.raises(UnsupportedError, match=f"model_type='{name}' is not supported") as caught:
        plan_memory(str(tmp_path), gpu="h200")
    with pytest.raises(UnsupportedError, match=f"model_type='{name}' is not supported"), LLM(str(tmp_path), device="cpu"):
        pass
    assert ("did you mean 'deepseek_v4'" in str(caught.value)) is hint
