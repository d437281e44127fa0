from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4lite.errors import CheckpointError
from dsv4lite.models.deepseek_mla.names import mla_names
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.names import V4_NAMES
from dsv4lite.models.deepseek_v4.tensors import official_shapes
from dsv4lite.weights.checkpoint import Checkpoint, Wanted, read_tensors
from dsv4lite.weights.names import Piece, translate
from tests.golden import official_names
from tests.tiny import RELEASE_ONLY, TINY, flash, v4_names

# What transformers builds: the backbone without the MTP block.
EXPECTED = {name: spec.shape for name, spec in official_shapes(parse_config(TINY)).items() if not name.startswith("mtp.")}


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A random model of transformers' own making."""
    transformers = pytest.importorskip("transformers")
    settings = {key: value for key, value in TINY.items() if key not in RELEASE_ONLY}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**settings))


def test_module_names_of_transformers_give_the_official_table(theirs: Any) -> None:
    assert {name: tuple(tensor.shape) for name, tensor in official_names(theirs.state_dict(), V4_NAMES).items()} == EXPECTED


def test_saved_model_of_transformers_gives_the_official_table_and_values(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path, names=v4_names)
    assert {name: info.shape for name, info in checkpoint.headers.items()} == EXPECTED
    values = official_names(theirs.state_dict(), V4_NAMES)
    for info, tensor in read_tensors(Wanted(info) for info in checkpoint.headers.values()):
        assert torch.equal(tensor, values[info.name]), info.name


def test_model_saved_under_its_module_names_gives_the_same_values(theirs: Any, tmp_path: Path) -> None:
    """The matrices of one stacked tensor are read one by one, from where each lies in the file."""
    from safetensors.torch import save_file

    theirs.config.save_pretrained(tmp_path)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, names=v4_names)
    values = official_names(theirs.state_dict(), V4_NAMES)
    read = {info.name: tensor.clone() for info, tensor in read_tensors(Wanted(info) for info in checkpoint.headers.values())}
    assert read.keys() == values.keys() == EXPECTED.keys()
    assert all(torch.equal(read[name], values[name]) for name in values)


def test_official_names_stay_as_they_are() -> None:
    for name, spec in official_shapes(flash()).items():
        for given in (name, name.replace(".weight", ".scale")):
            assert translate(given, spec.shape, V4_NAMES) == [Piece(name=given)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("layers.3.attn.wq_a.weight_scale_inv", "layers.3.attn.wq_a.scale"),
        ("model.layers.3.self_attn.compressor.indexer.q_b_proj.weight_scale_inv", "layers.3.attn.indexer.wq_b.scale"),
        ("model.layers.3.mlp.gate.weight", "layers.3.ffn.gate.weight"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
        ("model.layers.3.ffn_hc.scale", "layers.3.hc_ffn_scale"),
        ("model.hc_head.hc_scale", "hc_head_scale"),
        ("model.layers.3.attn.norm.weight", "layers.3.attn.kv_norm.weight"),
        ("layers.3.attn.compressor.norm.weight", "layers.3.attn.compressor.norm.weight"),
        ("mtp.0.self_attn.kv_norm.weight", "mtp.0.attn.kv_norm.weight"),
        ("mtp.0.hc_head_fn", "mtp.0.hc_head_fn"),
        ("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w1.weight"),
    ],
)
def test_names_are_matched_by_whole_components(given: str, expected: str) -> None:
    assert translate(given, (4, 4), V4_NAMES) == [Piece(name=expected)]


@pytest.mark.parametrize("name", ["layers.3.mlp.gatekeeper.weight", "vision.patch_embed.weight", "lm_head2.weight", "layers.3"])
def test_unknown_name_stays_as_it_is(name: str) -> None:
    assert translate(name, (4, 4), V4_NAMES) == [Piece(name=name)]


@pytest.mark.parametrize(
    "name", ["mtp.0.embed.weight", "mtp.0.emb.tok.weight", "mtp.0.head.weight", "mtp.0.shared_head.head.weight"]
)
def test_copies_of_embedding_and_head_under_mtp_are_skipped(name: str) -> None:
    assert translate(name, (61, 64), V4_NAMES) == []


def test_stacked_experts_are_gate_over_up() -> None:
    pieces = translate("model.layers.1.mlp.experts.gate_up_proj", (2, 6, 5), V4_NAMES)
    assert [(piece.name.removeprefix("layers.1.ffn.experts."), piece.index) for piece in pieces] == [
        ("0.w1.weight", (0, slice(0, 3))),
        ("0.w3.weight", (0, slice(3, 6))),
        ("1.w1.weight", (1, slice(0, 3))),
        ("1.w3.weight", (1, slice(3, 6))),
    ]
    scales = translate("model.layers.1.mlp.experts.down_proj_scale_inv", (2, 6, 5), V4_NAMES)
    assert [piece.name for piece in scales] == ["layers.1.ffn.experts.0.w2.scale", "layers.1.ffn.experts.1.w2.scale"]


@pytest.mark.parametrize("shape", [(2, 5, 5), (6, 5), (2, 2, 6, 5)])
def test_stacked_experts_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match="gate_up_proj has shape"):
        translate("model.layers.1.mlp.experts.gate_up_proj", shape, V4_NAMES)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("model.layers.60.self_attn.kv_a_proj_with_mqa.weight_scale_inv", "layers.60.attn.wkv_a.scale"),
        ("model.layers.3.mlp.experts.255.down_proj.weight", "layers.3.ffn.experts.255.w2.weight"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.ffn.w3.weight"),
        ("model.layers.7.self_attn.indexer.k_norm.bias", "layers.7.attn.indexer.k_norm.bias"),
        ("model.layers.61.eh_proj.weight", "mtp.0.eh_proj.weight"),
        ("model.layers.61.shared_head.norm.weight", "mtp.0.norm.weight"),
        ("model.layers.62.mlp.shared_experts.gate_proj.weight", "mtp.1.ffn.shared_experts.w1.weight"),
        ("layers.5.attn.wkv_b.weight", "layers.5.attn.wkv_b.weight"),
        ("layers.5.ffn.experts.3.w1.scale", "layers.5.ffn.experts.3.w1.scale"),
    ],
)
def test_names_of_mla_releases_have_official_ones(name: str, ours: str) -> None:
    assert translate(name, (4, 4), mla_names({"num_hidden_layers": 61, "num_nextn_predict_layers": 2})) == [Piece(name=ours)]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
        "model.layers.4.self_attn.rotary_emb.inv_freq",
    ],
)
def test_copies_and_frequencies_of_mla_releases_are_skipped(name: str) -> None:
    assert translate(name, (4, 4), mla_names({"num_hidden_layers": 61})) == []


def test_layer_after_the_last_is_no_drafter_where_the_config_does_not_say_how_many_there_are() -> None:
    assert translate("model.layers.61.enorm.weight", (4,), mla_names({})) == [Piece(name="layers.61.enorm.weight")]


@pytest.mark.parametrize(
    ("held", "ours"),
    [
        (["model.layers.62.eh_proj.qweight", "model.layers.62.mlp.up_proj.qweight"], "mtp.1.ffn.w3.weight"),
        (["model.layers.62.mlp.up_proj.weight"], "layers.62.ffn.w3.weight"),
        (["model.layers.61.mlp.up_proj.weight", "model.layers.62.eh_proj.weight"], "layers.62.ffn.w3.weight"),
        (["model.layers.60.mlp.up_proj.weight"], "mtp.1.ffn.w3.weight"),  # an update may bring what the checkpoint lacks
    ],
)
def test_layers_of_a_checkpoint_without_a_drafters_tensors_are_no_drafters(held: list[str], ours: str) -> None:
    tables = mla_names({"num_hidden_layers": 61, "num_nextn_predict_layers": 2}).of_checkpoint(held)
    assert translate("model.layers.62.mlp.up_proj.weight", (4, 4), tables) == [Piece(name=ours)]


@pytest.mark.parametrize("blocks", [None, 0, 1])
def test_layers_after_the_drafter_are_no_part_of_the_model(blocks: int | None) -> None:
    tables = mla_names({"num_hidden_layers": 61, "num_nextn_predict_layers": blocks})
    assert translate("model.layers.61.enorm.weight", (4,), tables) == [Piece(name="mtp.0.enorm.weight")]
    assert translate("model.layers.62.enorm.weight", (4,), tables) == [Piece(name="layers.62.enorm.weight")]
