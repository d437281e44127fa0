"""Kernels compiled ahead of time, without a GPU, are those that an engine's start asks for, and are found where they are moved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from dsv4lite.__main__ import main  # noqa: E402  only where there is Triton
from dsv4lite.config import MTP, Drafting, EngineConfig, tiny_model  # noqa: E402
from dsv4lite.engine.ahead import _silent_mesh, compile_ahead  # noqa: E402
from dsv4lite.engine.rank import make_runner  # noqa: E402
from dsv4lite.errors import ConfigError  # noqa: E402
from dsv4lite.kernels import dispatch, warmup  # noqa: E402
from dsv4lite.kernels.warmup import Wanted, recording  # noqa: E402
from dsv4lite.models.decoder import Decoder  # noqa: E402
from dsv4lite.planning.memory import choose_drafting, choose_numerics, make_plan, merge_plans  # noqa: E402
from dsv4lite.weights.source import ModelSource  # noqa: E402
from examples.benchmarks.engine import arguments, configured  # noqa: E402
from tests.kernels.test_warmup import Hopper  # noqa: E402
from tests.recorded import without_device  # noqa: E402

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 4096, "max_num_batched_tokens": 64}
prepare = warmup.prepare


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """What was to be compiled; two kernels are, which is enough for a test."""
    every: list[Wanted] = []

    def some(wanted: Sequence[Wanted], directory: Path, progress: Any = None) -> int:
        every.extend(wanted)
        return prepare(wanted[:2], directory, progress)

    monkeypatch.setattr(warmup, "prepare", some)
    return every


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tensors with memory take the way of a GPU's; nothing is launched."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setattr(dispatch, "GPU_TYPE", "cpu")
    monkeypatch.setattr(dispatch, "ABSENT", dispatch.Gpu(90, 132))
    without_device(monkeypatch)
    with torch.inference_mode():
        yield


def asked_by_a_start(config: EngineConfig) -> set[str]:
    """What the start of every rank asks for, with its tensors in memory."""
    source, found = ModelSource.open(config), set()
    numerics = choose_numerics(config, source, torch.device("cuda"))
    drafting: Drafting = choose_drafting(config, source)
    ranks = range(config.layout.world)
    plan = merge_plans([make_plan(config, source, numerics, drafting=drafting, rank=rank, total=139 << 30) for rank in ranks])
    for rank in ranks:
        mesh = _silent_mesh(config.layout, rank, CPU)
        model = source.family.build(source.model, replace(numerics, device=CPU), mesh, with_mtp=drafting.own is not None)
        runner = make_runner(config, plan, mesh, drafting, model.requires_grad_(False), source)
        with recording() as wanted, model.skip_repeated_layers():
            runner.dry_run(config.max_num_batched_tokens, plan.max_model_len)
        found |= {repr(one.specialization) for one in wanted}
    return found


@pytest.mark.parametrize("settings", [{"speculative": MTP(1)}, {"tensor_parallel_size": 2}], ids=["MTP", "tp"])
def test_what_is_compiled_is_what_starts_ask_for(
    settings: dict[str, Any], asked: list[Wanted], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The same source, types, constants, alignments and options: Triton's name of a compiled kernel follows from these."""
    config = EngineConfig(model=tiny_model(), compile_cache_dir=str(tmp_path), **SETTINGS, **settings)
    compiled = compile_ahead(config, "h200")
    ahead = {repr(one.specialization) for one in asked}
    assert compiled.kernels == len(ahead) == len(asked) > 80 and compiled.missing == 0
    assert {one.specialization.target for one in asked} == {("cuda", 90, 32)}
    peers = {one.specialization.name for one in asked if "peer_memory" in one.specialization.module}
    assert bool(peers) == (config.layout.tp == 2)
    assert (dispatch.GPU_TYPE, dispatch.ABSENT) == ("cuda", None)
    request.getfixturevalue("memory")
    assert asked_by_a_start(config) == ahead


def test_kernels_are_found_where_they_are_moved(asked: list[Wanted], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["compile", "--gpu", "l40s", "--output", str(tmp_path / "made"), "--max-num-seqs", "1", "--max-num-batched-tokens", "8"]
    assert main([*line, "--max-model-len", "1024", "--deterministic", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found == {"gpu": "NVIDIA L40S", "kernels": len(asked), "missing": 0, "folder": str(tmp_path / "made")}
    assert "2 of 2 kernels" in printed.err
    assert {one.specialization.target for one in asked} == {("cuda", 89, 32)}
    shutil.move(tmp_path / "made", tmp_path / "moved")
    for one in asked[:2]:
        kernel = one.specialization.load(tmp_path / "moved")
        assert kernel is not None and kernel.asm["cubin"]
    assert asked[2].specialization.load(tmp_path / "moved") is None


def test_skipped_layers_launch_what_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V3.2's sizes: one dense layer, then six with experts. What is asked for is not compiled."""
    config, found = configured(arguments(["--model", "v3.2", "--layers", "7"])), []
    config = replace(config, device="cuda", compile_cache_dir=str(tmp_path), **SETTINGS)
    skipping, skipped = Decoder.skip_repeated_layers, set[int]()

    def ask(wanted: Sequence[Wanted], *_: Any) -> int:
        found.append({repr(one.specialization) for one in wanted})
        return 0

    @contextmanager
    def seen(model: Decoder) -> Iterator[None]:
        with skipping(model):
            skipped.update(model.skipped)
            yield

    monkeypatch.setattr(warmup, "prepare", ask)
    for skip in (seen, lambda model: nullcontext()):
        monkeypatch.setattr(Decoder, "skip_repeated_layers", skip)
        compile_ahead(config, "h200")
    assert skipped == {3, 4, 5, 6} and len(found) == 2 and found[0] == found[1] and len(found[0]) > 60


def test_gpus_that_are_not_known_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--gpu", "h20", "--output", str(tmp_path)]) == 2
    assert "did you mean" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="h2000"):
        compile_ahead(EngineConfig(model=tiny_model(), compile_cache_dir=str(tmp_path)), "h2000")


def test_output_that_is_a_file_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All kernels were compiled before it failed."""
    (tmp_path / "file").write_text("")
    assert main(["compile", "--gpu", "h200", "--output", str(tmp_path / "file")]) == 2
    found = capsys.readouterr().err
    assert "is not a folder; choose another" in found and "kernels\n" not in found.partition("dsv4lite: ")[0]
