"""Which layout to choose: what fits, what it holds, and what its steps take at least."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4lite.config import Drafting, EngineConfig
from dsv4lite.device import CHIPS
from dsv4lite.errors import ConfigError
from dsv4lite.layout import Layout
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.state import row_reads
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.family import FAMILIES
from dsv4lite.models.shard import ModelShard, layouts_for
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.planning import memory
from dsv4lite.planning.memory import _working_bytes, plan_memory
from dsv4lite.planning.roofline import HOP_S, stage_roofline
from tests.e2e.engines import SMALL
from tests.golden import plain
from tests.tiny import flash, pro

MODEL = {**SMALL, "o_groups": 2, "n_routed_experts": 8}
H200 = CHIPS["h200"]
SETTINGS = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODEL))
    return str(path)


def test_layouts_are_those_that_divide() -> None:
    """Two output groups leave tp two ranks, and three layers leave pp two of four."""
    expected = {(tp, ep, 4 // tp // pp, pp) for pp in (1, 2) for tp in (1, 2) for ep in (1, tp, 4 // pp)}
    found = layouts_for(parse_config(MODEL), V4_TENSORS, 4)
    assert {(layout.tp, layout.ep, layout.dp, layout.pp) for layout in found} == expected
    assert len(found) == len(expected) and {layout.world for layout in found} == {4}


def test_layouts_leave_scale_blocks_whole() -> None:
    """V4-Pro's experts, 3072 wide, are cut between blocks of 128 by eight ranks, but not by sixteen."""
    assert Layout(tp=8) in layouts_for(pro(), V4_TENSORS, 8) and Layout(tp=8) in layouts_for(flash(), V4_TENSORS, 8)
    assert not any(layout.tp == 16 for layout in layouts_for(pro(), V4_TENSORS, 16))


def test_experts_without_tiles_may_stay_whole() -> None:
    """Experts of a width that no tile fits used to leave no layout at all."""
    found = layouts_for(replace(flash(), expert_width=2048 + 32), V4_TENSORS, 2)
    assert set(found) == {Layout(dp=2), Layout(dp=2, ep=2), Layout(pp=2)}


def test_plan_for_devices_is_that_of_the_best_layout(folder: str) -> None:
    settings = {**SETTINGS, "device": "auto", "gpu": "h200"}
    plan = plan_memory(folder, devices=4, **settings)
    best = plan.layouts[0]
    assert len(plan.per_device) == 4 and len(plan.layouts) == len(layouts_for(parse_config(MODEL), V4_TENSORS, 4))
    sizes = {
        "tensor_parallel_size": best.layout.tp,
        "expert_parallel_size": best.layout.ep,
        "data_parallel_size": best.layout.dp,
        "pipeline_parallel_size": best.layout.pp,
    }
    alone = plan_memory(folder, **sizes, **settings)
    assert [device.weights for device in plan.per_device] == [device.weights for device in alone.per_device]
    assert best.fits and best.kv_tokens == alone.kv_tokens * best.layout.dp
    assert all(0 < layout.alone_s <= layout.full_s for layout in plan.layouts)
    assert f"{1e3 * best.alone_s:.2f} ms" in str(plan)
    per_sequence = [layout.full_s / layout.layout.dp for layout in plan.layouts if layout.fits]
    assert per_sequence == sorted(per_sequence)
    assert str(best.layout) in str(plan)


def test_step_times_are_those_of_the_chip_that_was_named(folder: str) -> None:
    """Plans for a CPU, or for any GPU, used to show the times of an H200."""
    slow, fast = (
        {str(layout.layout): (layout.alone_s, layout.full_s) for layout in plan_memory(folder, devices=2, gpu=name).layouts}
        for name in ("l40s", "b200")
    )
    assert fast.keys() == slow.keys() and all(fast[one][0] < slow[one][0] and fast[one][1] < slow[one][1] for one in fast)
    for unnamed in ({"memory_bytes": 8 << 30}, SETTINGS):
        plan = plan_memory(folder, devices=2, **unnamed)
        assert all(layout.alone_s is None and layout.full_s is None for layout in plan.layouts) and " ms" not in str(plan)


def test_layouts_that_do_not_fit_come_last(folder: str) -> None:
    whole = plan_memory(folder, **SETTINGS).per_device[0].used
    plan = plan_memory(folder, devices=2, memory_bytes=whole - 1, **SETTINGS)
    fits = [layout.fits for layout in plan.layouts]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    assert not next(layout.fits for layout in plan.layouts if layout.layout == Layout(dp=2))


def test_plans_count_what_gpus_of_one_machine_open_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or four that exchange something in every layer: three buffers, for sums as a whole and for shards of 2^22 numbers."""
    found = {}
    for layout in (
        Layout(tp=2),
        Layout(ep=4),
        Layout(dp=2, ep=2),
        Layout(dp=2, tp=2, ep=4),
        Layout(tp=4, pp=2),
        Layout(dp=2),
        Layout(tp=8),
    ):
        sizes = {"tensor_parallel_size": layout.tp, "expert_parallel_size": layout.ep, "data_parallel_size": layout.dp}
        config = EngineConfig(model="any", **sizes, pipeline_parallel_size=layout.pp)
        shard = ModelShard.of(flash(), V4_TENSORS, Mesh.outline(layout, 0))
        source: Any = SimpleNamespace(model=flash(), family=FAMILIES["deepseek_v4"])
        arguments = (config, source, replace(plain(), device=torch.device("cuda")), 100, shard, Drafting())
        opened = _working_bytes(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "opened_bytes", lambda ranks: 0)
            without = _working_bytes(*arguments)
        found[str(layout)] = opened[0] - without[0]
        assert opened[1] == without[1]
    assert list(found.values()) == [opened << 20 for opened in (6 + 144, 12 + 216, 6 + 144, 6 + 144, 12 + 216, 0, 0)]


def test_what_does_not_fit_is_said_with_what_would_help(folder: str) -> None:
    budget = plan_memory(folder, **SETTINGS).per_device[0]
    (advice,) = plan_memory(folder, memory_bytes=budget.weights - 1, **SETTINGS).advice
    assert "the weights (" in advice and "tensor_parallel_size" in advice
    (advice,) = plan_memory(folder, memory_bytes=budget.weights + 1, **SETTINGS).advice
    assert "the workspace of a step (" in advice and "max_num_batched_tokens" in advice


@pytest.mark.parametrize(
    ("state", "longest", "named"),
    [
        (4096, None, r"max_num_seqs=4 with one page of tokens needs \S+ KiB of state; there are 4.0 KiB: lower it, or raise kv_"),
        (1 << 20, 10**6, r"max_model_len=1000000 needs .*; there are 0.001 GiB: lower it or max_num_seqs=4, or raise kv_cache_mem"),
        (1 << 40, None, r"kv_cache_memory_bytes=1,099,511,627,776 exceeds the [\d,]+ that weights and workspace leave; lower it$"),
    ],
    ids=["page", "length", "room"],
)
def test_advice_on_state_names_setting_limit_and_remedy(folder: str, state: int, longest: int | None, named: str) -> None:
    """Too little for the first page was said twice, without what there is; a length that does not fit, without a remedy; and the
    most bytes of state in rounded GiB, which no setting takes."""
    settings = {**SETTINGS, "kv_cache_memory_bytes": state, "max_model_len": longest}
    (advice,) = plan_memory(folder, memory_bytes=1 << 30, **settings).advice
    assert re.match(named, advice), advice


def test_any_number_of_devices_can_be_replicas(folder: str) -> None:
    assert [layout.layout for layout in plan_memory(folder, devices=7, **SETTINGS).layouts] == [Layout(dp=7)]
    for devices in (0, 1.5, "2", 10**9):
        with pytest.raises(ConfigError, match=r"^devices=.* must be an integer (of|from)"):
            plan_memory(folder, devices=devices, **SETTINGS)
    for axis in ("tensor", "data", "pipeline"):  # such sizes were ignored
        with pytest.raises(ConfigError, match=r"^devices=2 compares all layouts, but the settings name one, .*=2.*; leave one out"):
            plan_memory(folder, devices=2, **SETTINGS, **{f"{axis}_parallel_size": 2})
    with pytest.raises(ConfigError, match="dp=1000000 pp=1 has 1000000 ranks; at most 65536 are possible"):
        plan_memory(folder, **SETTINGS, data_parallel_size=10**6)


def test_floor_counts_what_is_read_and_what_travels() -> None:
    """With so many sequences that every expert is used, a step reads all weights but the embedding."""
    config = replace(parse_config(MODEL), num_hidden_layers=2, ratios=(0, 0, 0))
    for layout, sums in ((Layout(), 0), (Layout(tp=2), 2), (Layout(tp=2, ep=2), 2), (Layout(ep=2), 1)):
        shard = ModelShard.of(config, V4_TENSORS, Mesh.outline(layout, 0))
        sequences, weights = 1000, 10**9
        got = stage_roofline(config, plain(), shard, weights, sequences, H200, row_reads(config, plain()))
        rows = sequences * 2 * (config.window + config.index_topk) * 4 * config.head_dim
        read = weights - 4 * len(shard.vocab) * config.hidden_size + rows
        travels = HOP_S + 4 * sequences * config.hidden_size / H200.link_bytes_s  # an all-reduce of two sends half of it twice
        assert got == pytest.approx(read / H200.memory_bytes_s + 2 * sums * travels, rel=1e-6)


def test_floor_of_one_token_reads_its_experts_only() -> None:
    config, layout = parse_config(MODEL), Layout(ep=2)
    shard = ModelShard.of(config, V4_TENSORS, Mesh.outline(layout, 0))
    one, all_of_them = (
        stage_roofline(config, plain(), shard, 10**9, count, H200, row_reads(config, plain())) for count in (1, 10**4)
    )
    expert = 3 * config.hidden_size * config.expert_width * 4
    assert one < all_of_them
    idle = config.num_hidden_layers * (4 - 4 * config.experts_per_token / 8) * expert
    rows = config.num_hidden_layers * (config.window + config.index_topk) * 4 * config.head_dim
    embed = 4 * config.vocab_size * config.hidden_size
    travels = config.num_hidden_layers * (HOP_S + 4 * config.hidden_size / H200.link_bytes_s)
    assert one == pytest.approx((10**9 - idle - embed + rows) / H200.memory_bytes_s + travels, rel=1e-9)
