"""A trainer's forward pass has a rollout's bits, what differs is named, and contracts say whether two sides can have the same."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dsv4lite.__main__ import main
from dsv4lite.config import NGram, tiny_model
from dsv4lite.debug.parity import compare_sides
from dsv4lite.engine.contract import ExecutionContract
from dsv4lite.errors import ConfigError, ContextLengthError, InvalidRequestError, WeightUpdateError
from dsv4lite.llm import LLM
from dsv4lite.models.deepseek_v4 import model as v4
from dsv4lite.request import SamplingParams
from dsv4lite.training import completion_logprobs, execution_contract, load_model
from dsv4lite.weights.shared import SharedWeights
from dsv4lite.weights.update import ModuleSource, NamedTensors
from tests.e2e.engines import MODEST, SMALL, opened, prompts_of, write_model
from tests.mla import write_random_model

pytestmark = pytest.mark.usefixtures("forked_ranks")

SHORT, LONG = prompts_of((7, 300), SMALL["vocab_size"], seed=5)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
PARTS = {
    "v4": {
        "attention, csa": 1,
        "attention, hca": 1,
        "attention, sliding": 1,
        "experts": 2,
        "experts, by token id": 1,
        "head": 1,
        "residual": 7,
    },
    **{name: {"attention": 3, "dense": 1, "experts": 2, "head": 1, "residual": 7} for name in ("v2_lite", "v3", "v32")},
}


@pytest.fixture(scope="module", params=PARTS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family, whose vocabularies have the same size."""
    return model if family == "v4" else write_random_model(tmp_path_factory.mktemp(family), family)


@DTYPES
def test_trainer_has_the_bits_of_decoding_and_scoring(checkpoint: Path, dtype: Any) -> None:
    """In company, in chunks, with drafts."""
    params = SamplingParams.for_rollout(n=2, seed=3, max_tokens=30, ignore_eos=True, temperature=0.7)
    policy = load_model(checkpoint, device="cpu", dtype=dtype)
    with opened(checkpoint, deterministic=True, dtype=dtype, max_num_batched_tokens=50, speculative=NGram(3)) as llm:
        outs = llm.generate_batch([LONG, SHORT, SHORT * 5], params)
        pairs = [(prompt, one.token_ids) for prompt, out in zip((LONG, SHORT, SHORT * 5), outs, strict=True) for one in out.outputs]
        scores = llm.score_batch(pairs, params)
    for pair, score, one in zip(pairs, scores, (one for out in outs for one in out.outputs), strict=True):
        trained = completion_logprobs(policy, *pair, params)
        assert trained.requires_grad and one.logprobs is not None
        assert torch.equal(trained, one.logprobs.sampled) and torch.equal(trained, score.sampled)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"prompt": [5, -100]}, "prompt token id -100"), ({"completion": [5, -100]}, "completion token id -100")),
        *(({"prompt": [96]}, "prompt token id 96"), ({"completion": [96]}, "completion token id 96")),
        *(({"completion": [5, 1.7]}, "completion"), ({"prompt": "text"}, "prompt"), ({"completion": None}, "completion")),
        *(({"completion": [5, True]}, "completion token id True"), ({"completion": torch.ones(2) > 0}, "completion token id True")),
        *(({"completion": torch.tensor([[5], [6]])}, "sequence of token ids"), ({"completion": b"ab"}, "sequence of token ids")),
        ({"params": {"temperature": 1.0}}, "SamplingParams.from_dict"),
        ({"replay": {}}, "must be a Replay"),
    ],
    ids=str,
)
def test_trainer_refuses_what_scoring_refuses(model: Path, changes: dict[str, Any], message: str) -> None:
    """An id below 0, as trainers pad with, took a row from the end of the embedding."""
    policy = load_model(model, device="cpu")
    assert policy.config.vocab_size == 96
    with pytest.raises(InvalidRequestError, match=message) as error:
        completion_logprobs(policy, **{"prompt": SHORT, "completion": [5, 6], **changes})
    assert error.value.parameter in changes


@pytest.mark.parametrize("other", [None, torch.nn.Linear(2, 2)], ids=["None", "module"])
def test_models_of_others_are_refused(other: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be what load_model returns"):
        completion_logprobs(other, SHORT, SHORT)
    with pytest.raises(InvalidRequestError, match="must be what load_model returns"):
        execution_contract(other)


def test_trainer_takes_ids_as_a_tensor_and_no_more_than_the_model_has_positions(model: Path) -> None:
    policy = load_model(model, device="cpu", hf_overrides={"max_position_embeddings": 9})
    values = completion_logprobs(policy, SHORT, [5, 6])
    assert torch.equal(completion_logprobs(policy, torch.tensor(SHORT), torch.tensor([5, 6])), values)
    with pytest.raises(ContextLengthError, match="10 tokens, more than the model's 9 positions"):
        completion_logprobs(policy, SHORT, [5, 6, 7])


def test_trainer_has_the_bits_of_scoring_inside_autocast(checkpoint: Path) -> None:
    """Trainers of transformers compute losses there; the pass failed, or computed in bfloat16."""
    policy = load_model(checkpoint, device="cpu")
    with opened(checkpoint, deterministic=True) as llm:
        score = llm.score(LONG, SHORT)
    with torch.autocast("cpu", torch.bfloat16):
        values = completion_logprobs(policy, LONG, SHORT)
        values.sum().backward()
    assert torch.equal(values, score.sampled)


@pytest.mark.parametrize("way", ["reentrant", "recomputed", "sharded"])
def test_layers_can_be_wrapped(checkpoint: Path, way: str) -> None:
    """By activation checkpointing of both kinds, and by FSDP2."""
    policy: Any = load_model(checkpoint, device="cpu")
    parameters = dict(policy.named_parameters())  # wrappers change the names

    def gradients() -> dict[str, torch.Tensor]:
        completion_logprobs(policy, LONG[:30], SHORT).sum().backward()
        found = {name: policy.get_parameter(name) if way == "sharded" else p for name, p in parameters.items()}
        return {name: getattr(p.grad, "full_tensor", p.grad.clone)() for name, p in found.items() if p.grad is not None}

    wanted, weights, runs = gradients(), {name: tensor.clone() for name, tensor in ModuleSource(policy).tensors()}, []
    contract = execution_contract(policy)
    policy.zero_grad()
    for i, layer in enumerate(policy.layers):
        layer.register_forward_pre_hook(lambda *_: runs.append(1))
        if way != "sharded":
            policy.layers[i] = checkpoint_wrapper(
                layer, getattr(CheckpointImpl, "REENTRANT" if way == "reentrant" else "NO_REENTRANT")
            )
    with ExitStack() as stack:
        if way == "sharded":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
            for module in (*policy.layers, policy):
                fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        found = gradients()
        assert len(runs) == len(policy.layers) * (1 if way == "sharded" else 2)
        assert all(found[name].equal(expected) for name, expected in wanted.items()) and "embed" in wanted
        assert execution_contract(policy) == contract
        if way == "sharded":
            with pytest.raises(WeightUpdateError, match="a DTensor, expected a whole tensor; ModuleSource"):
                SharedWeights(policy.named_parameters())
        assert all(type(tensor) is torch.Tensor and tensor.equal(weights[name]) for name, tensor in ModuleSource(policy).tensors())


@DTYPES
def test_every_part_has_equal_bits(checkpoint: Path, family: str, dtype: Any) -> None:
    report = compare_sides(str(checkpoint), device="cpu", dtype=dtype, tokens=160)
    assert report.exact and report.largest == 0
    assert {part.part: part.count for part in report.parts} == PARTS[family]
    assert all((part.equal, part.largest, part.relative) == (1, 0, 0) for part in report.parts)


def test_part_that_differs_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of steps of one token is a little off in layers that select."""
    right = v4.paged_attention

    def wrong(given: Any) -> torch.Tensor:
        out = right(given)
        return out * 1.01 if len(out) == 1 and given.ratio == 4 else out

    monkeypatch.setattr(v4, "paged_attention", wrong)
    report = compare_sides(str(model), device="cpu", tokens=60)
    assert not report.exact and report.largest > 0
    off = {part.part for part in report.parts if part.equal < 1}
    assert off == {"attention, csa"}
    (part,) = (part for part in report.parts if part.part in off)
    assert 0.5 < part.equal < 0.7 and 0 < part.relative < 0.02  # three fifths are a prompt in chunks
    assert "attention, csa" in str(report)
    for tokens in (1, 10**8):
        with pytest.raises(InvalidRequestError, match=f"tokens={tokens} must be an integer"):
            compare_sides(str(model), device="cpu", tokens=tokens)
    with pytest.raises(ConfigError, match="model=5 must be a folder or a hub id"):
        compare_sides(5)  # type: ignore[arg-type]


def test_command_prints_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", tiny_model(), "--tokens", "40", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "100.00% have equal bits" in text and "residual" in text
    assert main(["parity", "--tokens", "40", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] == 1 and found["tokens"] == 40 and len(found["parts"]) > 3


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "nan", change=lambda name, tensor: tensor * float("nan") if name == "norm.weight" else tensor)
    assert main(["parity", str(folder), "--tokens", "10", "--device", "cpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["largest"] is None


def test_contracts_of_both_sides_are_equal_until_something_differs(model: Path) -> None:
    policy = load_model(model, device="cpu")
    ours = execution_contract(policy)
    with opened(model, deterministic=True) as llm:
        theirs = llm.execution_contract()
        assert ours == theirs and ours.digest == theirs.digest and ours.difference(theirs) == ""
        with llm.update_weights(1, partial=True) as update:
            update.load(NamedTensors({"layers.1.attn_norm.weight": torch.full((SMALL["hidden_size"],), 2.0)}))
        after = llm.execution_contract()
    assert after != ours and after.digest != ours.digest
    assert after.difference(ours) == f"weights: 1 of {len(ours.weights)} tensors: layers.1.attn_norm.weight"
    with opened(model, dtype="bfloat16") as llm:
        lines = llm.execution_contract().difference(ours).splitlines()
    assert lines == [
        "numerics.deterministic: False here, True there",
        "numerics.dtype: torch.bfloat16 here, torch.float32 there",
    ]
    other = replace(ours, kernels="other", versions={**ours.versions, "torch": "1.0"}, weights={})
    assert other.difference(ours).splitlines() == [
        f"versions.torch: 1.0 here, {torch.__version__} there",
        f"kernels: other here, {ours.kernels} there",
        f"weights: {len(ours.weights)} of 0 tensors: {', '.join(sorted(ours.weights)[:4])} and {len(ours.weights) - 4} more",
    ]


def test_contract_names_the_layout_and_no_drafter(model: Path) -> None:
    with LLM(str(model), **{**MODEST, "deterministic": True, "tensor_parallel_size": 2}) as llm:
        theirs: ExecutionContract = llm.execution_contract()
    ours = execution_contract(load_model(model, device="cpu"))
    assert theirs.difference(ours) == "numerics.tp: 2 here, 1 there"
    assert not any(name.startswith("mtp.") for name in theirs.weights)
