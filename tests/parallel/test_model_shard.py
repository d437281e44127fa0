"""What each rank holds of a model: together everything, each part as often as it has to be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from math import prod
from pathlib import Path

import pytest
import torch

from dsv4lite.errors import ConfigError
from dsv4lite.layout import Layout
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS, official_shapes
from dsv4lite.models.family import FAMILIES
from dsv4lite.models.shard import check_layout, shards_of, stages
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.weights.checkpoint import ExpertFormat
from dsv4lite.weights.names import NameTables
from dsv4lite.weights.quant import MatrixSlot, Numerics, Slot, TileSlot
from dsv4lite.weights.source import ModelSource
from dsv4lite.weights.tensors import stored_tensors
from tests.golden import plain, rounded
from tests.parallel.models import PLAIN, QUANTIZED
from tests.tiny import flash, pro

META = torch.device("meta")
LAYOUTS = [
    Layout(tp=2),
    Layout(ep=4),
    Layout(tp=2, ep=2),
    Layout(tp=4, ep=2),
    Layout(tp=2, ep=4),
    Layout(dp=2, ep=2),
    Layout(dp=2, tp=2, ep=4),
    Layout(pp=2),
    Layout(tp=2, pp=2, ep=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("config", "numerics"), [(PLAIN, plain()), (QUANTIZED, rounded())], ids=["unquantized", "quantized"])
def test_ranks_hold_every_element_once_and_otherwise_whole_copies(config: V4Config, numerics: Numerics, layout: Layout) -> None:
    """Every tensor is tiled by different parts, and each of these is on equally many ranks."""
    held: dict[str, Counter[tuple[tuple[int, int], ...]]] = {}
    shapes = official_shapes(config)
    for rank in range(layout.world):
        model = DeepseekV4(config, replace(numerics, device=META), Mesh.outline(layout, rank), dispatcher=Idle, with_mtp=True)
        shards = shards_of(config, V4_TENSORS, layout, rank)
        for name, slot in model.slots().items():
            cut = shards.cut(name, shapes[name].shape)
            assert slot.shape == tuple(part.stop - part.start for part in cut)
            held.setdefault(name, Counter())[tuple((part.start, part.stop) for part in cut)] += 1
    # The last stage has the embedding, too: the MTP block reads it.
    assert held.keys() == shapes.keys()
    for name, parts in held.items():
        assert sum(prod(b - a for a, b in part) for part in parts) == prod(shapes[name].shape), name
        assert any(len({part[dim] for part in parts}) == len(parts) for dim in range(len(shapes[name].shape))), name
        assert len(set(parts.values())) == 1, name


class Idle:
    """A dispatcher of the user's own, made for every layer and never called."""

    def __init__(self, ranks: object) -> None:
        self.ranks = ranks


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (Layout(tp=2), {"vocab_size": 61}, "vocab_size=61 cannot be shared equally by tp=2 ranks"),
        (Layout(tp=8), {}, "o_groups=4 cannot be shared equally by tp=8 ranks"),
        (Layout(tp=4), {"expert_width": 30}, "moe_intermediate_size=30 cannot be shared equally by tp=4 ranks"),
        (Layout(ep=3), {}, "n_routed_experts=8 cannot be shared equally by ep=3 ranks"),
        (Layout(tp=2, dp=3, ep=3), {"num_experts": 9}, "ep=3 must divide tp=2 or be a multiple of it"),
        (Layout(dp=2, ep=4), {}, "replicas would have copies; raise dp to 4"),
        (Layout(pp=6), {}, "pp=6 stages for 5 layers"),
    ],
    ids=str,
)
def test_layout_that_does_not_divide_is_refused(layout: Layout, change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(replace(PLAIN, **change), V4_TENSORS, layout)


@pytest.mark.parametrize(
    ("config", "count", "expected"),
    [
        (flash(), 1, [43]),
        (flash(), 2, [22, 21]),
        (flash(), 4, [11, 11, 11, 10]),
        (pro(), 4, [15, 16, 16, 14]),
    ],
)
def test_stages_have_about_equally_many_bytes(config: V4Config, count: int, expected: list[int]) -> None:
    found = stages(config, V4_TENSORS, count)
    assert [layer for stage in found for layer in stage] == list(range(config.num_hidden_layers))
    assert [len(stage) for stage in found] == expected


@pytest.mark.parametrize("count", [2, 3, 4])
def test_stages_are_the_best_of_all_cuts(count: int) -> None:
    config = replace(PLAIN, num_hidden_layers=9, ratios=(4, 4, 0, 0, 0, 4, 4, 4, 0, 0), vocab_size=512)
    weights = [0] * 9
    for name, spec in official_shapes(config).items():
        stored = stored_tensors(name, spec, quantized=False, expert_format="unquantized").values()
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0 if "embed" in name else 8
        weights[layer] += sum(tensor.nbytes for tensor in stored)
    cuts = [(0, *cut, 9) for cut in combinations(range(1, 9), count - 1)]
    best = min(max(sum(weights[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    assert max(sum(weights[layer] for layer in stage) for stage in stages(config, V4_TENSORS, count)) == best


def value(slot: Slot) -> torch.Tensor:
    """What lies in a place, as numbers."""
    if isinstance(slot, TileSlot):
        return slot.stack.stored.dequantize(slot.expert, slot.half)
    if isinstance(slot, MatrixSlot):
        return slot.matrix.weight.detach().flatten(0, -2)[slot.begin : slot.end]
    return slot.tensor


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4, ep=2), Layout(tp=2, ep=2), Layout(ep=4), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("form", ["unquantized", "fp4", "fp8"])
def test_random_weights_of_ranks_are_parts_of_the_same(form: ExpertFormat, layout: Layout) -> None:
    # Experts of 256 in tiles: four ranks would cut through the scale blocks of the shared one.
    layout = Layout(tp=2) if layout.tp == 4 and form != "unquantized" else layout
    config = replace(QUANTIZED, quantized=form != "unquantized", num_experts=4, vocab_size=64)
    numerics = plain() if form == "unquantized" else replace(rounded(), resident_experts=form)
    source = ModelSource(
        family=FAMILIES["deepseek_v4"],
        folder=Path("."),
        generation_config={},
        names=NameTables(),
        model=config,
        dtype=torch.bfloat16,
        expert_format=form,
        dense_fp8=form != "unquantized",
        checkpoint=None,
    )
    whole = source.build(numerics, with_mtp=True, seed=3).slots()
    for rank in range(layout.world):
        mesh, shards = Mesh.outline(layout, rank), shards_of(config, V4_TENSORS, layout, rank)
        slots = source.build(numerics, mesh, with_mtp=True, dispatcher=Idle, seed=3).slots()
        for name, slot in slots.items():
            assert torch.equal(value(slot), value(whole[name])[shards.cut(name, whole[name].shape)]), name
