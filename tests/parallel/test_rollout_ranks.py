"""Weights and memory of several ranks: all of them change, or none."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dsv4lite.config import MTP
from dsv4lite.engine import resident
from dsv4lite.engine.resident import Ask
from dsv4lite.errors import (
    CapacityError,
    DSV4LiteError,
    EngineDeadError,
    EngineStateError,
    WeightsNotLoadedError,
    WeightUpdateError,
)
from dsv4lite.layout import Layout
from dsv4lite.llm import LLM
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.request import Phase, SamplingParams
from dsv4lite.weights import host_memory
from dsv4lite.weights import update as update_file
from dsv4lite.weights.delta import DeltaSource
from dsv4lite.weights.quant import MatrixSlot
from dsv4lite.weights.update import DiskSource, ModuleSource, NamedTensors, ProcessGroupSource, broadcast_weights
from tests.e2e.engines import MODEST, engine_of, prompts_of, same_outputs, write_model
from tests.e2e.test_sleep import engine_of_any, failing
from tests.e2e.updates import GREEDY, ask, load, read
from tests.mla import write_random_model
from tests.parallel.ranks import Ranks
from tests.parallel.requests import SHARED, VOCAB

pytestmark = pytest.mark.usefixtures("forked_ranks")

LAYOUTS: dict[str, dict[str, Any]] = {
    "process": {"executor": "process"},
    "tp": {"tensor_parallel_size": 2, "executor": "thread"},
    "tp and ep": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "dp and ep": {"data_parallel_size": 2, "expert_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2, "executor": "thread"},
    "experts that move": {"tensor_parallel_size": 2, "expert_parallel_size": 2, "redundant_experts": 2, "rebalance_steps": 3},
}
SETTINGS: dict[str, Any] = {**MODEST, "speculative": MTP(1, adaptive=False)}
PROMPTS = prompts_of((5, 40, 61), VOCAB, seed=3)
# Of the last rank of ep, by its official name and by the release's.
W1 = {
    "v4": ("layers.0.ffn.experts.3.w1.weight", "layers.0.ffn.experts.3.w1.weight"),
    "v3": ("layers.1.ffn.experts.15.w1.weight", "model.layers.1.mlp.experts.15.gate_proj.weight"),
}


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """Which models: V4 or V3."""
    return str(getattr(request, "param", "v4"))


@pytest.fixture(scope="module")
def models(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    if kind == "v3":
        old, new = (write_random_model(folder / str(seed), kind, seed=seed, num_nextn_predict_layers=1) for seed in (0, 1))
        return old, new
    return write_model(folder / "a", SHARED, seed=0), write_model(folder / "b", SHARED, seed=1)


@pytest.fixture(scope="module")
def fresh(models: tuple[Path, Path]) -> list[Any]:
    """What fresh engines of one rank generate, and their checksums."""
    found = []
    for model in models:
        with LLM(str(model), **SETTINGS) as llm:
            found.append((llm.generate_batch(PROMPTS, GREEDY), llm.weight_checksums()))
    return found


@pytest.mark.parametrize(
    ("kind", "layout"), [*(("v4", layout) for layout in LAYOUTS), ("v3", "tp and ep"), ("v3", "pp")], indirect=["kind"]
)
def test_ranks_change_together(models: tuple[Path, Path], fresh: list[Any], kind: str, layout: str) -> None:
    """Updates from disk and from memory, refused ones, and both levels of sleep."""
    w1, named = W1[kind]
    (old, old_sums), (new, new_sums) = fresh
    with LLM(str(models[0]), **{**SETTINGS, **LAYOUTS[layout]}) as llm:

        def is_of(outputs: Any, checksums: Any, version: int) -> None:
            found = llm.generate_batch(PROMPTS, GREEDY)
            same_outputs(found, outputs, tolerance=1e-4)
            assert [one.outputs[0].weight_versions for one in found] == [((version, 0, 6),)] * len(PROMPTS)
            assert (llm.state, llm.weight_version, llm.weight_checksums()) == (Phase.READY, version, checksums)

        is_of(old, old_sums, 0)
        wrong = {**read(models[1]), named: torch.zeros(3, 3)}
        with pytest.raises(WeightUpdateError, match=rf"{w1}: (shape|dimension 0 of) \[3, 3\]"), llm.update_weights(1) as update:
            update.load(NamedTensors(wrong))
        is_of(old, old_sums, 0)
        del wrong[named]
        with pytest.raises(WeightUpdateError) as caught, llm.update_weights(1) as update:
            update.load(NamedTensors(wrong))
        assert caught.value.missing == (f"{w1}: missing",)
        is_of(old, old_sums, 0)
        load(llm, 2, DiskSource(str(models[1])))
        is_of(new, new_sums, 2)
        llm.sleep(1)
        llm.wake_up()
        is_of(new, new_sums, 2)
        llm.sleep(2)
        llm.wake_up()
        with pytest.raises(WeightsNotLoadedError):
            ask(llm)
        load(llm, 3, NamedTensors(read(models[0])))
        is_of(old, old_sums, 3)


@pytest.mark.parametrize(
    ("kind", "layout", "name"),
    [("v3", "tp and ep", "layers.0.ffn.experts.0.w1.weight"), ("v3", "pp", "embed.scale")],
    indirect=["kind"],
)
def test_tensors_that_the_model_lacks_are_refused_on_every_layout(models: tuple[Path, Path], layout: str, name: str) -> None:
    """Experts of a dense layer, and a scale without a use: each rank took them for those of another one."""
    with LLM(str(models[0]), **{**SETTINGS, **LAYOUTS[layout]}) as llm:
        with pytest.raises(WeightUpdateError) as caught, llm.update_weights(1, partial=True) as update:
            update.load(NamedTensors({name: torch.zeros(32, 64)}))
        assert caught.value.unexpected == (f"{name}: unexpected; the model has no such tensor",)


def held(model: torch.nn.Module, rank: int) -> int:
    """Bytes of a rank's weights."""
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def test_failed_sleep_and_wake_up_of_one_rank_leave_all_as_they_were(
    models: tuple[Path, Path], fresh: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(models[0]), **SETTINGS, **LAYOUTS["tp"]) as llm:
        # Not through ``apply``, which weights that sleep refuse.
        ask = Ask("apply", (held, ()))
        measure: Any = lambda: engine_of_any(llm).call(lambda engine: engine._runner.ask(ask)).result()
        awake = measure()
        with monkeypatch.context() as patch:
            patch.setattr(host_memory, "PIECE", 1)
            failing(patch, mmap, "mmap", after=3)  # in this process, which is rank 0
            with pytest.raises(CapacityError, match="the host has too little memory"):
                llm.sleep(1)
        assert (llm.state, measure()) == (Phase.READY, awake) and min(awake) > 10_000
        same_outputs(llm.generate_batch(PROMPTS, GREEDY), fresh[0][0], tolerance=1e-4)
        llm.sleep(1)
        with monkeypatch.context() as patch:
            failing(patch, resident, "fill_storage", after=3)
            with pytest.raises(CapacityError, match="cpu has too little memory to wake up"):
                llm.wake_up()
        assert (llm.state, measure()) == (Phase.ASLEEP, [0, 0])
        llm.wake_up()
        assert (llm.state, measure(), llm.weight_checksums()) == (Phase.READY, awake, fresh[0][1])
        same_outputs(llm.generate_batch(PROMPTS, GREEDY), fresh[0][0], tolerance=1e-4)


def test_rank_that_is_lost_during_an_update_is_the_error_of_open_requests(models: tuple[Path, Path]) -> None:
    """They got the failure of the update if it ended before the session had heard of the loss."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=900, ignore_eos=True))
        except DSV4LiteError as error:
            errors.append(error)

    with LLM(str(models[0]), **SETTINGS, executor="process") as llm:
        thread = threading.Thread(target=run)
        thread.start()
        while not llm.stats().steps:
            time.sleep(0.01)
        with pytest.raises(EngineDeadError), llm.update_weights(1, staged=False) as update:
            llm._session._bridge.post = lambda callback: True  # its thread comes too late
            os.kill(engine_of(llm)._executor._processes[0].pid, signal.SIGKILL)
            update.load(NamedTensors(read(models[1])))
        thread.join(30)
        assert not thread.is_alive()
    assert isinstance(errors[0], EngineDeadError) and "was killed by SIGKILL" in str(errors[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_write_that_fails_midway_leaves_no_valid_weights_until_a_full_update(
    models: tuple[Path, Path], fresh: list[Any], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """On the only rank or on one of two, when the device fails: then tensors of both versions are in memory."""
    with LLM(str(models[0]), **SETTINGS, tensor_parallel_size=ranks, executor="thread") as llm:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't allocate memory"):
            with llm.update_weights(1) as update:
                update.load(DiskSource(str(models[1])))
                failing(patch, Tensor, "copy_", after=3)
        assert (llm.state, llm.weight_version) == (Phase.WEIGHTS_INVALID, 0)
        with pytest.raises(WeightsNotLoadedError):
            ask(llm)
        load(llm, 2, DiskSource(str(models[1])))
        assert (llm.state, llm.weight_version, llm.weight_checksums()) == (Phase.READY, 2, fresh[1][1])
        same_outputs(llm.generate_batch(PROMPTS, GREEDY), fresh[1][0], tolerance=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_that_the_device_cannot_convert_for_lack_of_memory_changes_nothing(
    models: tuple[Path, Path], fresh: list[Any], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    with LLM(str(models[0]), **SETTINGS, tensor_parallel_size=ranks, executor="thread") as llm:
        with monkeypatch.context() as patch, pytest.raises(CapacityError, match="too little memory for an update: CUDA out of"):
            with llm.update_weights(1) as update:
                patch.setattr(MatrixSlot, "converted", out_of_memory)
                update.load(DiskSource(str(models[1])))
        assert (llm.state, llm.weight_version, llm.weight_checksums()) == (Phase.READY, 0, fresh[0][1])
        same_outputs(llm.generate_batch(PROMPTS, GREEDY), fresh[0][0], tolerance=1e-4)
        load(llm, 2, DiskSource(str(models[1])))
        assert (llm.weight_version, llm.weight_checksums()) == (2, fresh[1][1])


def trainer_and_rollout(mesh: Mesh, models: tuple[Path, Path], store: str) -> list[dict[str, str]]:
    """Rank 0 trains, and sends a delta and then all weights to the engine of rank 1, in a process group of the host's."""
    old, new = map(read, models)
    near = {**old, "head.weight": old["head.weight"].clone()}
    near["head.weight"][-1, -1] = new["head.weight"][-1, -1]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=mesh.rank, world_size=2)
    try:
        if mesh.rank == 0:
            delta = dict(DeltaSource(NamedTensors(near), old, block=(1, 1)).tensors())
            assert delta["head.weight@values"].numel() == 1
            broadcast_weights(delta.items())
            broadcast_weights(NamedTensors(new).tensors())
            return []
        with LLM(str(models[0]), **SETTINGS) as llm:
            found = [llm.weight_checksums()]
            for version, partial in ((1, True), (2, False)):
                load(llm, version, ProcessGroupSource(0), partial=partial)
                found.append(llm.weight_checksums())
            return found
    finally:
        dist.destroy_process_group()


def test_weights_come_over_a_process_group(models: tuple[Path, Path], fresh: list[Any], ranks: Ranks, tmp_path: Path) -> None:
    _, (before, changed, replaced) = ranks.run(trainer_and_rollout, models, str(tmp_path / "store"), layout=Layout(tp=2))
    assert [name for name in before if changed[name] != before[name]] == ["head.weight"]
    assert replaced == fresh[1][1]


def failing_and_refused(mesh: Mesh, models: tuple[Path, Path], store: str) -> list[Any]:
    """Rank 0 fails to send, sends what is no tensor, sends a tensor that does not fit before others, and at last what fits."""
    old, new = map(read, models)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "norm.weight", new["norm.weight"]
        raise ZeroDivisionError

    transfers: list[tuple[Any, Any, str]] = [
        (broken(), ZeroDivisionError, "rank 0 could not send all weights: ZeroDivisionError"),
        (DiskSource(str(models[1])).tensors(), WeightUpdateError, "expected a tensor"),
        ([("norm.weight", torch.zeros(3)), *old.items()], None, r"norm\.weight: shape \[3\]"),
        (new.items(), None, ""),
    ]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=mesh.rank, world_size=2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(update_file, "_BUCKET_BYTES", 1)
            if mesh.rank == 0:
                for tensors, error, _ in transfers:
                    with pytest.raises(error) if error else nullcontext():
                        broadcast_weights(tensors)
                return []
            with LLM(str(models[0]), **SETTINGS) as llm:
                for _, _, message in transfers:
                    with pytest.raises(WeightUpdateError, match=message) if message else nullcontext():
                        load(llm, 1, ProcessGroupSource(0), partial=True)
                return [llm.weight_version, llm.weight_checksums()]
    finally:
        dist.destroy_process_group()


def test_failed_transfers_over_a_process_group_leave_nothing_behind(
    models: tuple[Path, Path], fresh: list[Any], ranks: Ranks, tmp_path: Path
) -> None:
    """Both ends get an error where the sender fails, and what follows a refused tensor does not come in the next update."""
    _, received = ranks.run(failing_and_refused, models, str(tmp_path / "store"), layout=Layout(tp=2))
    assert received == [1, fresh[1][1]]


def sharded_policy(mesh: Mesh, models: tuple[Path, Path], store: str, fsdp: bool) -> tuple[dict[str, str], list[Any]]:
    """Both ranks train and serve: each holds a half of every tensor of the policy, and a half of the engine."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=mesh.rank, world_size=2)
    try:
        world, policy = init_device_mesh("cpu", (2,)), torch.nn.Module()
        for name, tensor in read(models[1]).items():
            module, (*path, leaf) = policy, name.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            if fsdp and tensor.is_floating_point():
                module.register_parameter(leaf, torch.nn.Parameter(tensor))
            else:
                module.register_buffer(leaf, tensor if fsdp else distribute_tensor(tensor, world, [Shard(0)]))
        if fsdp:
            for layer in policy.get_submodule("layers").children():
                fully_shard(layer, mesh=world)
            fully_shard(policy, mesh=world)
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())

        with LLM(str(models[0]), **SETTINGS, tensor_parallel_size=2, executor="external") as llm:
            if mesh.rank > 0:
                for _ in ModuleSource(policy).tensors():
                    pass
                for call in (llm.sleep, llm.wake_up, llm.weight_checksums, llm.update_weights(1).__enter__):
                    with pytest.raises(EngineStateError, match="engine of rank 0") if call != llm.wake_up else nullcontext():
                        call()
                assert llm.state is Phase.READY
                return {}, []
            load(llm, 1, ModuleSource(policy))
            llm.sleep(1)
            llm.wake_up()
            return llm.weight_checksums(), llm.generate_batch(PROMPTS, GREEDY)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("fsdp", [False, True], ids=["DTensor", "fully_shard"])
def test_ranks_that_train_gather_their_tensors_for_the_rank_that_leads(
    models: tuple[Path, Path], fresh: list[Any], ranks: Ranks, tmp_path: Path, fsdp: bool
) -> None:
    (checksums, outputs), _ = ranks.run(sharded_policy, models, str(tmp_path / "store"), fsdp, layout=Layout(tp=2))
    assert checksums == fresh[1][1]
    same_outputs(outputs, fresh[1][0], tolerance=1e-4)
