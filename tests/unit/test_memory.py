"""Memory plans: for which device, and that their numbers agree with each other."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from dsv4lite import ConfigError, MemoryPlan, plan_memory
from dsv4lite.__main__ import main
from dsv4lite.device import CHIPS
from dsv4lite.memory import merge_plans
from tests.e2e.engines import SMALL
from tests.tiny import FLASH

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
    with pytest.raises(ConfigError, match=r"gpu='h20' is not in the table of chips .*h200.*did you mean 'h200'.*memory_bytes"):
        plan_memory(small, gpu="h20")
    with pytest.raises(ConfigError, match="names two devices"):
        plan_memory(small, gpu="h200", device="cpu")
    with pytest.raises(ConfigError, match=r"device='cuda': this machine has no GPU .*gpu='h200'.*memory_bytes"):
        plan_memory(small, device="cuda")
    with pytest.raises(ConfigError, match="memory_bytes=0 must be at least 1"):
        plan_memory(small, memory_bytes=0)


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

    short, long = plan(163 * GIB), plan(164 * GIB)
    assert 0 < short.max_model_len < long.max_model_len
    for order in ([short, long], [long, short]):
        merged = merge_plans(order)
        assert merged.max_model_len == short.max_model_len and merged.kv_tokens == short.kv_tokens
        assert merged.sizes.grow_pages == short.sizes.grow_pages and len(merged.per_device) == 2
