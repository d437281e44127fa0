from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dsv4lite.errors import ConfigError
from dsv4lite.layout import Layout
from dsv4lite.models.deepseek_mla.config import parse_config
from dsv4lite.models.deepseek_mla.tensors import MLA_TENSORS
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.tensors import V4_SHARDING, V4_TENSORS, official_shapes
from dsv4lite.models.shard import shards_of
from dsv4lite.parallel.shard import Cut, Experts, Replicate, Rule, Shards, Split, blocks_of, pattern_of
from tests.mla import V3
from tests.tiny import flash, pro, v4_shards

BLOCKS = {"dense": (128, 128), "expert": (1, 32)}


def cut_by(rule: Rule, shape: Sequence[int], rank: int, size: int, block: Sequence[int] = ()) -> Cut:
    """The part that one of ``size`` ranks along any axis holds."""
    shards = Shards(table={"wo": rule}, axes=dict.fromkeys(("tp", "ep", "width"), (rank, size)), stages=(range(1),), num_experts=8)
    return shards.cut("wo", shape, block)


def sizes(cut: Cut) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in cut)


@functools.cache
def shapes_of(config: Callable[[], V4Config]) -> dict[str, Any]:
    """One layer of each kind, the MTP block and the top: the others repeat them, and so do most experts."""
    shapes = official_shapes(config())
    repeated = {n for n in shapes if n.startswith("layers.") and int(n.split(".")[1]) not in (0, 2, 3)}
    repeated |= {n for n in shapes if ".experts." in n and not n.startswith("layers.2.")}
    return {name: spec for name, spec in shapes.items() if name not in repeated}


@pytest.mark.parametrize(("tp", "ep"), list(product((1, 2, 4), (1, 2, 4))))
@pytest.mark.parametrize("config", [flash, pro])
def test_v4_rules_cover_every_tensor_exactly_once(config: Callable[[], V4Config], tp: int, ep: int) -> None:
    c, shapes = config(), shapes_of(config)
    layout = Layout(tp=tp, ep=ep)
    ranks = [shards_of(c, V4_TENSORS, layout, rank) for rank in range(layout.world)]
    for name, spec in shapes.items():
        rule = V4_SHARDING[pattern_of(name)]
        cuts = [rank.cut(name, spec.shape, BLOCKS.get(spec.kind, ())) for rank in ranks]
        parts = 1 if isinstance(rule, Replicate) else tp if isinstance(rule, Split) else max(1, tp // ep)
        dim = 0 if isinstance(rule, Replicate) else rule.dim
        step = spec.shape[dim] // parts
        places = Counter((cut[dim].start, cut[dim].stop) for cut in cuts)
        assert places == {(i * step, (i + 1) * step): layout.world // parts for i in range(parts)}
        assert all(sizes(cut) == (*spec.shape[:dim], step, *spec.shape[dim + 1 :]) for cut in cuts)


@pytest.mark.parametrize(("config", "tp"), [(flash, 2), (flash, 8), (pro, 16)])
def test_v4_cuts_fall_between_heads_and_output_groups(config: Callable[[], V4Config], tp: int) -> None:
    c = config()
    shards = v4_shards(c, tp=(1, tp))
    shapes = shapes_of(config)
    units = {
        "attn.wq_b": c.head_dim * (c.num_attention_heads // c.o_groups),
        "attn.wo_a": c.o_lora_rank,
    }
    for part, unit in units.items():
        cut = shards.cut(f"layers.2.{part}.weight", shapes[f"layers.2.{part}.weight"].shape, (128, 128))
        assert cut[0].start and cut[0].start % unit == 0
    wo_b = shards.cut("layers.2.attn.wo_b.weight", shapes["layers.2.attn.wo_b.weight"].shape, (128, 128))
    assert wo_b[1].start % c.o_lora_rank == 0


@pytest.mark.parametrize(
    ("axes", "name", "elsewhere"),
    [
        ({"ep": (1, 4)}, "layers.0.ffn.experts.7.w1.weight", True),
        ({"ep": (1, 4)}, "layers.0.ffn.experts.8.w1.weight", False),
        ({"ep": (1, 4)}, "layers.0.attn.wkv.weight", False),
        ({"tp": (1, 4), "width": (1, 4)}, "layers.0.ffn.experts.7.w1.weight", False),
        ({"pp": (1, 2)}, "layers.0.attn.wkv.weight", True),
        ({"pp": (1, 2)}, "layers.1.attn.wkv.weight", False),  # its own
        ({"pp": (1, 2)}, "layers.2.attn.wkv.weight", False),  # nobody's
        ({"pp": (1, 2)}, "embed.weight", True),
        ({"pp": (0, 2)}, "embed.weight", False),  # its own, and so is a scale that it has no use for
        ({"pp": (0, 2)}, "head.weight", True),
        ({"pp": (1, 2)}, "head.weight", False),
        ({"pp": (1, 2), "ep": (1, 4)}, "layers.1.ffn.experts.7.w1.weight", True),
        ({"pp": (1, 2)}, "layers.0.ffn.experts.8.w1.weight", False),
        ({"pp": (1, 2)}, "layers.0.attn.wxv.weight", False),
    ],
)
def test_tensor_without_a_place_may_be_another_ranks(axes: dict[str, tuple[int, int]], name: str, elsewhere: bool) -> None:
    assert Shards(table=V4_SHARDING, axes=axes, stages=(range(1), range(1, 2)), num_experts=8).elsewhere(name) == elsewhere


def test_no_rank_has_experts_of_a_dense_layer() -> None:
    shards = shards_of(parse_config(V3), MLA_TENSORS, Layout(tp=2, ep=2), 1)  # the first three are dense
    assert [shards.elsewhere(f"layers.{layer}.ffn.experts.0.w1.weight") for layer in (2, 3)] == [False, True]


def test_experts_are_cut_by_width_where_tp_exceeds_ep() -> None:
    shards = shards_of(flash(), V4_TENSORS, Layout(tp=4, ep=2), 3)
    assert shards.cut("layers.0.ffn.experts.7.w1.weight", (2048, 4096), (1, 32)) == (slice(1024, 2048), slice(0, 4096))
    assert shards.cut("layers.0.ffn.experts.7.w2.weight", (4096, 2048), (1, 32)) == (slice(0, 4096), slice(1024, 2048))


def test_axis_that_is_absent_has_one_rank() -> None:
    shards = Shards(table=V4_SHARDING, axes={}, stages=(range(1),), num_experts=8)
    assert shards.cut("layers.0.attn.wq_b.weight", (640, 64)) == (slice(0, 640), slice(0, 64))
    assert shards.cut("layers.0.ffn.experts.7.w1.weight", (64, 32)) == (slice(0, 64), slice(0, 32))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("layers.17.ffn.experts.255.w1.scale", "layers.*.ffn.experts.*.w1"),
        ("mtp.0.norm.weight", "mtp.*.norm"),
        ("layers.3.ffn.gate.tid2eid", "layers.*.ffn.gate.tid2eid"),
        ("layers.3.hc_attn_scale", "layers.*.hc_attn_scale"),
    ],
)
def test_pattern_replaces_numbers_and_drops_the_leaf(name: str, pattern: str) -> None:
    assert pattern_of(name) == pattern
    assert pattern in V4_SHARDING


def test_tensor_without_a_rule_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no rule for layers\.0\.attn\.wx\.weight.*'layers\.\*\.attn\.wx'"):
        Shards(table=V4_SHARDING, axes={}, stages=(range(1),), num_experts=8).cut("layers.0.attn.wx.weight", (4, 4))


def test_unequal_parts_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"wo: dimension 0 of \[61, 64\].*4 equal parts along 'tp'"):
        cut_by(Split(0), (61, 64), 0, 4)


@pytest.mark.parametrize(("rule", "block", "step"), [(Split(0), (128, 128), 128), (Split(1), (1, 32), 32)])
def test_cut_through_a_scale_block_names_both(rule: Split, block: Sequence[int], step: int) -> None:
    with pytest.raises(ConfigError, match=rf"wo: tp=4 cuts dimension {rule.dim} of \[160, 160\] every 40 .*scale blocks of {step}"):
        cut_by(rule, (160, 160), 0, 4, block)


def test_uncut_tensor_may_have_a_partial_block() -> None:
    assert cut_by(Split(0), (100, 70), 0, 1, (128, 128)) == (slice(0, 100), slice(0, 70))
    assert cut_by(Replicate(), (100, 70), 3, 4, (128, 128)) == (slice(0, 100), slice(0, 70))


def test_a_tensor_of_three_dimensions_is_cut_along_the_dimension_of_its_rule() -> None:
    assert cut_by(Experts(0), (8, 6, 5), 1, 4) == (slice(2, 4), slice(0, 6), slice(0, 5))


@given(
    shape=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    dim=st.integers(0, 1),
    size=st.integers(1, 8),
    block=st.sampled_from([(1, 1), (128, 128), (1, 32)]),
)
def test_parts_and_their_scales_tile_the_whole(shape: tuple[int, int], dim: int, size: int, block: tuple[int, int]) -> None:
    try:
        cuts = [cut_by(Split(dim), shape, rank, size, block) for rank in range(size)]
    except ConfigError:
        part = shape[dim] / size
        assert part % 1 or part % block[dim]
        assume(False)
    assert [cut[dim].start for cut in cuts[1:]] == [cut[dim].stop for cut in cuts[:-1]]
    assert sum(prod(sizes(cut)) for cut in cuts) == prod(shape)
    scales = [blocks_of(cut, block) for cut in cuts]
    edges = [(part[dim].start, part[dim].stop) for part in scales]
    assert edges[0][0] == 0 and edges[-1][1] == -(-shape[dim] // block[dim])
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert all(part[1 - dim] == slice(0, -(-shape[1 - dim] // block[1 - dim])) for part in scales)
