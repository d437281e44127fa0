"""The files of the shipped tiny checkpoint, and the script that trains it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from dsv4lite.models.deepseek_v4.config import V4Config, parse_config
from tests.golden import TINY, TINY_DIGEST, TINY_DSPARK, TINY_DSPARK_DIGEST, digest, official_checkpoint, tiny_checkpoint

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dsv4lite" / "assets" / "tiny"
FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip


def table_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def release_table(folder: Path = FOLDER) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the tensors of a release with this config: name, dtype and shape."""
    return table_of(official_checkpoint(parse_config(read_json("config.json", folder))))


def read_json(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return content


def read_tensors(folder: Path = FOLDER) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_folder_holds_the_release_files_within_twenty_megabytes() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 20_000_000


def test_config_has_every_layer_kind_and_the_kernels_widths() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["DeepseekV4ForCausalLM"]
    assert len(config["compress_ratios"]) == config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    assert set(config["compress_ratios"][:-1]) == {0, 4, 128}
    assert 0 < config["num_hash_layers"] < config["num_hidden_layers"]
    assert (config["head_dim"], config["qk_rope_head_dim"]) == (128, 64)
    assert config["index_topk"] < 1024 // 4
    for key in ("hidden_size", "q_lora_rank", "moe_intermediate_size", "o_lora_rank", "index_head_dim"):
        assert config[key] % 128 == 0, key
    assert config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
    }  # fmt: skip
    assert config["expert_dtype"] == "fp4"
    assert config["rope_scaling"] == {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    assert read_json("generation_config.json")["eos_token_id"] == config["eos_token_id"] == 1


def test_tensors_match_the_release_table() -> None:
    assert table_of(read_tensors()) == release_table()


@pytest.mark.parametrize(("config", "expected"), [(TINY, TINY_DIGEST), (TINY_DSPARK, TINY_DSPARK_DIGEST)], ids=["mtp", "dspark"])
def test_computed_checkpoints_have_these_names_and_bytes(config: V4Config, expected: tuple[int, int, str]) -> None:
    assert digest(tiny_checkpoint(config)) == expected


def test_index_lists_every_tensor_and_their_total_size() -> None:
    index, tensors = read_json("model.safetensors.index.json"), read_tensors()
    assert index["weight_map"] == dict.fromkeys(tensors, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())


def test_tensors_are_finite_and_not_constant() -> None:
    for name, tensor in read_tensors().items():
        assert tensor.float().isfinite().all(), name
        if tensor.ndim == 2 and not name.endswith((".scale", "hc_head_scale")):
            assert tensor.view(torch.uint8).unique().numel() > 4 if tensor.dtype == torch.int8 else tensor.float().std() > 0, name


def test_hash_routing_gives_every_token_distinct_experts_evenly() -> None:
    config, tensors = read_json("config.json"), read_tensors()
    for layer in range(config["num_hash_layers"]):
        ids = tensors[f"layers.{layer}.ffn.gate.tid2eid"]
        assert ids.min() >= 0 and ids.max() < config["n_routed_experts"]
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
        share = ids.flatten().bincount(minlength=config["n_routed_experts"]) / ids.numel()
        assert (share * config["n_routed_experts"] - 1).abs().max() < 0.1


def test_tokenizer_has_the_chat_tokens_at_the_lowest_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"]
    names = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"]
    names += ["<think>", "</think>", "｜DSML｜"]
    assert [tokenizer.token_to_id(name) for name in names] == list(range(len(names)))
    text = "".join(names)
    assert tokenizer.encode(text, add_special_tokens=True).ids == list(range(len(names)))
    config = read_json("tokenizer_config.json")
    assert [config[key] for key in ("bos_token", "eos_token", "pad_token")] == [names[0], names[1], names[1]]
    assert config["add_bos_token"] is False


@given(text=st.text(max_size=200))
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


AWKWARD = ("def f(x):\n\treturn x\r\n\n\n    #  é 漢字 🙂 \x00", " " * 300 + "\n" * 40, "1234567890", "｜DSML｜ <think")


@pytest.mark.parametrize("text", AWKWARD)
def test_tokenizer_round_trips_awkward_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_training_script_writes_a_checkpoint_that_reloads_exactly(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "train_tiny.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "reloaded checkpoint: largest difference of a logit 0.00e+00" in done.stdout
    losses = [float(line.split("text ")[1].split()[0]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert min(losses) < losses[0] - 1
    assert table_of(read_tensors(tmp_path)) == release_table(tmp_path)
