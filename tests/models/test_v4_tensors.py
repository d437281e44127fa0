from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod

import pytest
import torch

from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.tensors import official_shapes
from dsv4lite.weights.tensors import StoredTensor, TensorSpec, stored_tensors
from tests.tiny import FLASH, FLASH_REFRESHED, PRO, PRO_REFRESHED, TINY, flash

RELEASES = {"flash": FLASH, "pro": PRO, "flash refreshed": FLASH_REFRESHED, "pro refreshed": PRO_REFRESHED}


@cache
def stored(release: str) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, spec in official_shapes(parse_config(RELEASES[release])).items():
        found |= stored_tensors(name, spec, quantized=True, expert_format="fp4")
    return found


@pytest.mark.parametrize(
    ("release", "tensors", "elements", "gib"),
    [("flash", 69_187, 158_069_433_298, 159_609_485_896 / 2**30), ("pro", 145_116, 861_608_274_846, 805.32)],
)
def test_table_has_the_published_totals(release: str, tensors: int, elements: int, gib: float) -> None:
    table = stored(release)
    assert len(table) == tensors
    assert sum(prod(tensor.shape) for tensor in table.values()) == elements
    assert sum(tensor.nbytes for tensor in table.values()) / 2**30 == pytest.approx(gib, abs=0.005)


def test_flash_has_the_published_parameters() -> None:
    """The hash tables hold expert ids and are no parameters; the rest of the backbone is 284.33 B, and the MTP block 6.61 B."""
    count = {"layers": 0, "mtp": 0}
    for name, spec in official_shapes(flash()).items():
        if spec.kind != "i64":
            count["mtp" if name.startswith("mtp.") else "layers"] += prod(spec.shape)
    assert (round(count["layers"] / 1e9, 2), round(count["mtp"] / 1e9, 2)) == (284.33, 6.61)


@pytest.mark.parametrize(
    ("release", "tensors", "drafter", "drafter_bytes"),
    [("flash refreshed", 72_317, 4_705, 10_862_838_300), ("pro refreshed", 149_782, 7_009, 41_979_375_900)],
)
def test_refreshed_releases_have_the_published_totals(release: str, tensors: int, drafter: int, drafter_bytes: int) -> None:
    table = stored(release)
    parts = [tensor for name, tensor in table.items() if name.startswith("mtp.")]
    assert (len(table), len(parts)) == (tensors, drafter)
    assert sum(tensor.nbytes for tensor in parts) == drafter_bytes
    if release == "flash refreshed":
        assert sum(tensor.nbytes for tensor in table.values()) == 166_878_536_440
        assert Counter(str(tensor.dtype).removeprefix("torch.") for tensor in table.values()) == {
            "int8": 35_328, "float8_e8m0fnu": 35_718, "float8_e4m3fn": 390, "bfloat16": 445, "float32": 433, "int64": 3,
        }  # fmt: skip
        stages = Counter(name.split(".")[1] for name in table if name.startswith("mtp."))
        assert stages == {"0": 1568, "1": 1565, "2": 1572}


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.2.attn.wq_a.scale", (8, 32), torch.float8_e8m0fnu),
        ("layers.2.attn.wo_a.weight", (8192, 4096), torch.float8_e4m3fn),
        ("layers.2.attn.compressor.ape", (4, 1024), torch.float32),
        ("layers.3.attn.compressor.ape", (128, 512), torch.float32),
        ("layers.2.attn.indexer.wq_b.scale", (64, 8), torch.float8_e8m0fnu),
        ("layers.2.attn.indexer.compressor.wkv.weight", (256, 4096), torch.bfloat16),
        ("layers.2.ffn.gate.tid2eid", (129280, 6), torch.int64),
        ("layers.3.ffn.gate.bias", (256,), torch.float32),
        ("layers.3.ffn.experts.255.w2.weight", (4096, 1024), torch.int8),
        ("layers.3.ffn.experts.255.w2.scale", (4096, 64), torch.float8_e8m0fnu),
        ("mtp.0.ffn.gate.bias", (256,), torch.float32),
        ("mtp.0.e_proj.scale", (32, 32), torch.float8_e8m0fnu),
        ("mtp.0.hc_head_scale", (1,), torch.float32),
    ],
)
def test_table_agrees_with_the_specification(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert stored("flash")[name] == StoredTensor(shape, dtype)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("mtp.0.main_proj.weight", (4096, 12288), torch.float8_e4m3fn),
        ("mtp.0.main_proj.scale", (32, 96), torch.float8_e8m0fnu),
        ("mtp.0.main_norm.weight", (4096,), torch.bfloat16),
        ("mtp.2.norm.weight", (4096,), torch.bfloat16),
        ("mtp.2.hc_head_fn", (4, 16384), torch.float32),
        ("mtp.2.markov_head.markov_w1.weight", (129280, 256), torch.bfloat16),
        ("mtp.2.markov_head.markov_w2.weight", (129280, 256), torch.bfloat16),
        ("mtp.2.confidence_head.proj.weight", (1, 4352), torch.bfloat16),
        ("mtp.1.ffn.gate.bias", (256,), torch.float32),
    ],
)
def test_drafter_tensors_agree_with_the_specification(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert stored("flash refreshed")[name] == StoredTensor(shape, dtype)


def test_tensors_exist_only_where_the_layer_kind_has_them() -> None:
    names = official_shapes(parse_config(TINY)).keys()
    layers = {
        part: {int(n.split(".")[1]) for n in names if n.startswith("layers.") and part in n}
        for part in (".compressor.", ".indexer.")
    }
    assert layers == {".compressor.": {1, 2, 3, 4}, ".indexer.": {1, 3}}
    assert {n for n in names if n.endswith("tid2eid")} == {"layers.0.ffn.gate.tid2eid", "layers.1.ffn.gate.tid2eid"}
    assert not any("compressor" in n or "tid2eid" in n for n in names if n.startswith("mtp."))


def test_storage_follows_the_format() -> None:
    spec, weight, scale = TensorSpec((256, 96), "expert"), "layers.0.ffn.experts.0.w1.weight", "layers.0.ffn.experts.0.w1.scale"
    fp4 = stored_tensors(weight, spec, quantized=True, expert_format="fp4")
    assert fp4 == {weight: StoredTensor((256, 48), torch.int8), scale: StoredTensor((256, 3), torch.float8_e8m0fnu)}
    fp8 = stored_tensors(weight, spec, quantized=True, expert_format="fp8")
    assert fp8 == {weight: StoredTensor((256, 96), torch.float8_e4m3fn), scale: StoredTensor((2, 1), torch.float8_e8m0fnu)}
    plain = stored_tensors(weight, spec, quantized=False, expert_format="unquantized")
    assert plain == {weight: StoredTensor((256, 96), torch.bfloat16)}
