"""The shipped tiny checkpoint, judged by its files; and the script that trains it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dsv4lite" / "assets" / "tiny"
FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip
TORCH_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8, "I64": torch.int64, "BF16": torch.bfloat16,
    "F32": torch.float32,
}  # fmt: skip
Table = dict[str, tuple[str, tuple[int, ...]]]


def expected_tensors(config: dict[str, Any]) -> Table:
    """The release's tensor table: {name: (safetensors dtype, shape)}."""
    hidden, vocab, streams = config["hidden_size"], config["vocab_size"], config["hc_mult"]
    heads, width, rank, layers = (config[k] for k in ("num_attention_heads", "head_dim", "q_lora_rank", "num_hidden_layers"))
    groups, out_rank = config["o_groups"], config["o_groups"] * config["o_lora_rank"]
    experts, inner, chosen = (config[k] for k in ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"))
    table: Table = {}

    def plain(dtype: str, **shapes: tuple[int, ...]) -> Table:
        return {name.replace("__", "."): (dtype, shape) for name, shape in shapes.items()}

    def fp8(name: str, rows: int, columns: int) -> Table:
        scale = (math.ceil(rows / 128), math.ceil(columns / 128))
        return {f"{name}.weight": ("F8_E4M3", (rows, columns)), f"{name}.scale": ("F8_E8M0", scale)}

    def fp4(name: str, rows: int, columns: int) -> Table:
        return {f"{name}.weight": ("I8", (rows, columns // 2)), f"{name}.scale": ("F8_E8M0", (rows, columns // 32))}

    def add(prefix: str, part: Table) -> None:
        table.update({prefix + name: value for name, value in part.items()})

    def add_head(prefix: str) -> None:
        add(prefix, plain("F32", hc_head_fn=(streams, streams * hidden), hc_head_base=(streams,), hc_head_scale=(1,)))

    def add_compressor(prefix: str, ratio: int, channels: int) -> None:
        wide = channels * (2 if ratio == 4 else 1)
        add(prefix, plain("F32", ape=(ratio, wide)))
        add(prefix, plain("BF16", wkv__weight=(wide, hidden), wgate__weight=(wide, hidden), norm__weight=(channels,)))

    def add_block(prefix: str, layer: int) -> None:
        ratio, mixed = config["compress_ratios"][layer], streams * (2 + streams)
        for part in ("attn", "ffn"):
            add(f"{prefix}{part}_norm.", plain("BF16", weight=(hidden,)))
            add(f"{prefix}hc_{part}_", plain("F32", fn=(mixed, streams * hidden), base=(mixed,), scale=(3,)))
        attn = f"{prefix}attn."
        for name, rows, columns in (
            ("wq_a", rank, hidden), ("wq_b", heads * width, rank), ("wkv", width, hidden),
            ("wo_a", out_rank, heads * width // groups), ("wo_b", hidden, out_rank),
        ):  # fmt: skip
            add(attn, fp8(name, rows, columns))
        add(attn, plain("BF16", q_norm__weight=(rank,), kv_norm__weight=(width,)) | plain("F32", attn_sink=(heads,)))
        if ratio:
            add_compressor(f"{attn}compressor.", ratio, width)
        if ratio == 4:
            index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
            add(f"{attn}indexer.", fp8("wq_b", index_heads * index_width, rank))
            add(f"{attn}indexer.", plain("BF16", weights_proj__weight=(index_heads, hidden)))
            add_compressor(f"{attn}indexer.compressor.", 4, index_width)
        ffn = f"{prefix}ffn."
        add(f"{ffn}gate.", plain("BF16", weight=(experts, hidden)))
        hashed = layer < config["num_hash_layers"]
        add(f"{ffn}gate.", plain("I64", tid2eid=(vocab, chosen)) if hashed else plain("F32", bias=(experts,)))
        for matrix, rows, columns in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
            add(ffn, fp8(f"shared_experts.{matrix}", rows, columns))
            for expert in range(experts):
                add(ffn, fp4(f"experts.{expert}.{matrix}", rows, columns))

    add("", plain("BF16", embed__weight=(vocab, hidden), head__weight=(vocab, hidden), norm__weight=(hidden,)))
    add_head("")
    for layer in range(layers):
        add_block(f"layers.{layer}.", layer)
    add_block("mtp.0.", layers)
    add_head("mtp.0.")
    add("mtp.0.", fp8("e_proj", hidden, hidden) | fp8("h_proj", hidden, hidden))
    add("mtp.0.", plain("BF16", enorm__weight=(hidden,), hnorm__weight=(hidden,), norm__weight=(hidden,)))
    return table


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
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in read_tensors().items()}
    expected = {name: (TORCH_DTYPES[dtype], shape) for name, (dtype, shape) in expected_tensors(read_json("config.json")).items()}
    assert found == expected


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
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in read_tensors(tmp_path).items()}
    table = expected_tensors(read_json("config.json", tmp_path))
    assert found == {name: (TORCH_DTYPES[dtype], shape) for name, (dtype, shape) in table.items()}
