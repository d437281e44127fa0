"""Memory plans: for which device, and that their numbers agree with each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4lite import ConfigError, MemoryPlan, SamplingParams, plan_memory
from dsv4lite.__main__ import main
from dsv4lite.config import MTP, EngineConfig
from dsv4lite.device import CHIPS, host_memory
from dsv4lite.layout import Layout
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.shard import ModelShard
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.planning.memory import choose_numerics, merge_plans
from dsv4lite.state.store import StateCache
from dsv4lite.weights.dummy import dummy_tensors
from dsv4lite.weights.source import ModelSource
from tests.e2e.engines import SMALL, opened, write_tokenizer
from tests.mla import V2_LITE, V3, V32
from tests.tiny import FLASH, write_checkpoint

GIB = 1 << 30


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> str:
    """V4-Flash before it is fetched: its config."""
    folder: Path = tmp_path_factory.mktemp("flash")
    (folder / "config.json").write_text(json.dumps(dict(FLASH)))
    return str(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(dict(SMALL)))
    return str(folder)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ------------------------------------------------------------------------------------------------------------------ devices


@pytest.mark.usefixtures("no_gpu")
def test_plan_for_a_named_gpu_needs_none(flash: str) -> None:
    """A plan on a machine without a GPU was one of float32 on its CPU: 1,058 GiB of weights for V4-Flash."""
    plan = plan_memory(flash, gpu="h200", devices=2)
    assert plan.fits and len(plan.per_device) == 2
    (budget, _) = plan.per_device
    assert budget.device == "cuda" and budget.total == budget.available == CHIPS["h200"].memory_bytes
    assert 60 * GIB < budget.weights < 90 * GIB and budget.graphs > 0
    assert str(plan).splitlines()[1].strip() == (
        "planned for NVIDIA H200 with 139.000 GiB, compute capability 9.0: FP8 matrices, FP4 experts, FP8 KV rows"
    )


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:3"])
def test_plan_for_a_named_memory_needs_no_gpu(flash: str, device: str) -> None:
    """``device="cuda"`` was refused where there is none."""
    plan = plan_memory(flash, memory_bytes=180 * GIB, device=device)
    assert plan.fits and plan.per_device[0].total == 180 * GIB
    assert plan.planned_for == "a GPU with 180.000 GiB: FP8 matrices, FP4 experts, FP8 KV rows"


def test_memory_of_a_named_gpu_can_be_another(flash: str) -> None:
    plan = plan_memory(flash, gpu="H200", memory_bytes=30 * GIB)
    assert not plan.fits and plan.per_device[0].total == 30 * GIB and "NVIDIA H200 with 30.000 GiB" in plan.planned_for


@pytest.mark.usefixtures("no_gpu")
def test_plan_for_a_cpu_says_so_and_how_to_name_a_gpu(small: str) -> None:
    plan = plan_memory(small)
    assert plan.planned_for.startswith("the cpu of this machine") and "--gpu h200" in plan.planned_for
    assert "float32 matrices" in plan.planned_for
    wanted = plan_memory(small, device="cpu", memory_bytes=GIB)
    assert wanted.planned_for.startswith("a cpu with 1.000 GiB: ") and wanted.per_device[0].total == GIB


@pytest.mark.usefixtures("no_gpu")
def test_devices_that_cannot_be_planned_for_are_refused(small: str) -> None:
    with pytest.raises(ConfigError, match=r"gpu='h20' is not in the table of chips .*h200.*memory_bytes.*did you mean 'h200'"):
        plan_memory(small, gpu="h20")
    with pytest.raises(ConfigError, match="are two devices"):
        plan_memory(small, gpu="h200", device="cpu")
    with pytest.raises(ConfigError, match=r"device='cuda': this machine has no GPU .*gpu='h200'.*memory_bytes"):
        plan_memory(small, device="cuda")
    for wrong in (0, "1", float("nan"), float("inf"), 2**63, 1e300):
        for device in ("auto", "cpu"):
            with pytest.raises(ConfigError, match=r"memory_bytes=.* must be at least 1"):
                plan_memory(small, memory_bytes=wrong, device=device)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_gpu")
def test_command_plans_for_any_gpu(flash: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", flash, "--gpu", "b200"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("  planned for NVIDIA B200 with 178.000 GiB")
    assert main(["plan", flash, "--memory", "80GiB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["planned_for"].startswith("a GPU with 80.000 GiB")


# --------------------------------------------------------------------------------------------------------------- arithmetic


def test_used_is_the_sum_of_its_parts(flash: str) -> None:
    (budget,) = plan_memory(flash, gpu="b200").per_device
    names = [field.name for field in fields(budget) if field.name not in ("device", "total", "available")]
    parts = {name: getattr(budget, name) for name in names}
    assert len(parts) == 7 and all(parts.values())
    assert budget.used == sum(parts.values()) <= budget.total
    assert budget.state == budget.used - parts["weights"] - parts["workspace"] - parts["graphs"]


def test_plans_of_two_ranks_merge_to_the_shorter_length(flash: str) -> None:
    """Both ranks run every sequence, so the longest is that of the rank with less room for it."""

    def plan(memory: int) -> MemoryPlan:
        return plan_memory(flash, memory_bytes=memory, max_num_seqs=1, enable_prefix_caching=False)

    short, long = plan(164 * GIB), plan(165 * GIB)
    assert 0 < short.max_model_len < long.max_model_len
    for order in ([short, long], [long, short]):
        merged = merge_plans(order)
        assert merged.max_model_len == short.max_model_len and merged.kv_tokens == short.kv_tokens
        assert merged.sizes.grow_pages == short.sizes.grow_pages and len(merged.per_device) == 2


def test_plan_of_uneven_stages_counts_what_each_of_them_allocates(tmp_path: Path) -> None:
    """All stages have as many pages as the one with the fewest; the others were counted with all pages that they could hold."""
    raw = {**SMALL, "num_hidden_layers": 4, "compress_ratios": [4, 8, 8, 8, 0]}
    settings: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "pipeline_parallel_size": 3}
    plan = plan_memory(config_only(tmp_path, raw), load_format="dummy", **settings)
    source = ModelSource.open(EngineConfig(model=str(tmp_path), load_format="dummy", **settings))
    numerics = choose_numerics(EngineConfig(model=str(tmp_path)), source, torch.device("cpu"))
    held = []
    for rank in range(3):
        shard = ModelShard.of(source.model, source.family.tensors, Mesh.outline(Layout(pp=3), rank))
        spec = source.family.state(source.model, numerics, shard, drafter=False)
        held.append(StateCache.allocate(spec, plan.sizes, torch.device("cpu")).nbytes)
    assert plan.fits and [budget.state for budget in plan.per_device] == held and min(held) < max(held) <= 4 << 20


def test_dtype_of_experts_may_be_in_the_quantization_config(tmp_path: Path) -> None:
    """Transformers moves it there; experts were planned in FP4."""
    settings, sizes = {key: value for key, value in FLASH.items() if key != "expert_dtype"}, []
    for raw in ({"expert_dtype": "fp8"}, {"quantization_config": {**FLASH["quantization_config"], "expert_dtype": "fp8"}}):
        folder = config_only(tmp_path, {**settings, **raw})
        sizes.append(plan_memory(folder, gpu="h200", load_format="dummy").per_device[0].weights)
    assert sizes[0] == sizes[1] > 256 * GIB


@pytest.mark.parametrize("replicas", [1, 2])
def test_plan_counts_tokens_and_sequences_in_each_replica(small: str, replicas: int) -> None:
    """It printed the numbers of one replica as those of all."""
    one, plan = (plan_memory(small, gpu="h200", data_parallel_size=count) for count in (1, replicas))
    assert plan.replicas == replicas == len(plan.per_device)
    assert (plan.kv_tokens, plan.max_concurrency) == (one.kv_tokens, one.max_concurrency)
    where = "" if replicas == 1 else " in each of 2 replicas"
    room = f"{plan.max_concurrency:,} sequences of {plan.max_model_len:,} tokens at once"
    assert f"fits, with {plan.kv_tokens:,} tokens of KV cache{where}: {room}" in str(plan).splitlines()[0]


# -------------------------------------------------------------------------------------------------------- what the host has


def machine(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """Write what Linux reports of a machine with 64 GiB free, whose control groups have these files."""
    texts = {"proc/meminfo": "MemTotal: 1\nMemAvailable: 67108864 kB\n", "proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    for name, text in {**texts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


SECOND = "31 23 0:28 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
FIRST = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize("limited", ["a/b", "a"])
def test_host_memory_is_within_the_limit_of_the_group_and_of_those_around_it(tmp_path: Path, limited: str) -> None:
    """A plan fitted into what the machine had free, and the process was killed at its container's limit."""
    files = {f"sys/fs/cgroup/{group}/memory.max": "max\n" for group in ("a", "a/b")}
    files |= {f"sys/fs/cgroup/{group}/memory.current": str(3 * GIB) for group in ("a", "a/b")}
    files[f"sys/fs/cgroup/{limited}/memory.max"] = str(8 * GIB)
    assert host_memory(machine(tmp_path, "0::/a/b\n", SECOND.format(top="/"), files)) == 5 * GIB
    (tmp_path / f"sys/fs/cgroup/{limited}/memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")  # given up when it is needed
    assert host_memory(tmp_path) == 6 * GIB


def test_host_memory_is_within_the_limit_of_a_container_that_sees_its_own_group_only(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(2 * GIB), "sys/fs/cgroup/memory.current": str(GIB)}
    assert host_memory(machine(tmp_path, "0::/\n", SECOND.format(top="/"), files)) == GIB


def test_host_memory_is_within_limits_of_the_first_version_of_groups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        f"{folder}/memory.limit_in_bytes": str((1 << 63) - 4096),
        f"{folder}/memory.usage_in_bytes": "0",
        f"{folder}/job/memory.limit_in_bytes": str(4 * GIB),
        f"{folder}/job/memory.usage_in_bytes": str(2 * GIB),
        f"{folder}/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
    }
    groups = "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/x/job\n0::/\n"
    assert host_memory(machine(tmp_path, groups, FIRST.format(top="/docker/x"), files)) == 3 * GIB


def test_host_memory_without_limits_is_what_is_free(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path, "0::/a\n", SECOND.format(top="/"), {})) == 64 * GIB


# ---------------------------------------------------------------------------------------------------------------- float16


def test_float16_checkpoint_is_computed_in_float32_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was computed in bfloat16, which rounds its weights, without a word."""
    tensors = dummy_tensors(parse_config(SMALL), V4_TENSORS, expert_format="unquantized", quantized=False)
    halves = ((name, tensor.half() if tensor.is_floating_point() else tensor) for name, tensor in tensors)
    write_checkpoint(tmp_path, {**SMALL, "torch_dtype": "float16"}, halves)
    assert "float32 matrices, float32 experts, float32 KV rows" in plan_memory(str(tmp_path), memory_bytes=GIB).planned_for
    assert "is float16 and is computed in torch.float32: exact" in caplog.text
    assert "bfloat16 matrices" in plan_memory(str(tmp_path), memory_bytes=GIB, dtype="bfloat16").planned_for
    assert "rounded" in caplog.messages[-1]
    with opened(write_tokenizer(tmp_path, SMALL["vocab_size"])) as llm:
        assert len(llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)).token_ids) == 2


# ------------------------------------------------------------------------------------------------------------- MLA models


def config_only(folder: Path, raw: Mapping[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(dict(raw)))
    return str(folder)


@pytest.mark.parametrize(
    ("raw", "rows", "bytes_per_token", "least"),
    [
        (V3, "auto", 61 * 1152, 512_000),
        (V3, "fp8", 61 * 656, 900_000),
        (V32, "fp8", 61 * (656 + 132), 750_000),
        (V32, "auto", 61 * (1152 + 256), 440_000),
    ],
    ids=["v3", "v3-fp8", "v32-fp8", "v32"],
)
def test_v3_on_eight_gpus_holds_more_tokens_than_the_public_figure(
    tmp_path: Path, raw: Mapping[str, Any], rows: str, bytes_per_token: int, least: int
) -> None:
    """512,000 tokens of bfloat16 latents on 8 x 141 GB, where keys and values of all heads left room for 54,560."""
    folder, settings = config_only(tmp_path, raw), {"tensor_parallel_size": 8, "speculative": None, "kv_cache_dtype": rows}
    chip = plan_memory(folder, gpu="h200", **settings)
    powers_of_ten = plan_memory(folder, memory_bytes=141 * 10**9, gpu_memory_utilization=0.95, **settings)
    for plan in (chip, powers_of_ten):
        assert plan.fits and plan.bytes_per_token == bytes_per_token and plan.bytes_per_sequence == 0
        assert plan.max_model_len == 163840 and "FP8 experts" in plan.planned_for
        assert plan.kv_tokens >= least


def test_layouts_of_a_model_with_groups_of_experts_are_found(tmp_path: Path) -> None:
    """Its groups were those of one expert, which they cannot divide, so no layout would do."""
    plan = plan_memory(config_only(tmp_path, {**V3, "num_hidden_layers": 8}), gpu="h200", devices=8)
    assert plan.fits and {(entry.layout.tp, entry.layout.pp) for entry in plan.layouts} >= {(8, 1), (1, 1), (2, 2), (1, 8)}


def test_drafting_keeps_one_more_layer_of_rows(tmp_path: Path) -> None:
    plan = plan_memory(config_only(tmp_path, V3), gpu="h200", tensor_parallel_size=8, speculative=MTP(1))
    assert plan.fits and plan.bytes_per_token == 62 * 1152


def test_v2_lite_fits_on_one_gpu_and_layouts_are_compared(tmp_path: Path) -> None:
    plan = plan_memory(config_only(tmp_path, V2_LITE), gpu="h200", devices=2)
    assert plan.fits and {entry.layout.world for entry in plan.layouts} == {2}
    alone = plan_memory(str(tmp_path), gpu="h200")
    assert alone.fits and alone.bytes_per_token == 27 * 1152
    assert 31e9 < alone.per_device[0].weights < 33e9  # 15.71 billion parameters in bfloat16
