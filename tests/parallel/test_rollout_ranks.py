"""Weights and memory of several ranks: all of them change, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4lite.config import MTP
from dsv4lite.errors import WeightsNotLoadedError, WeightUpdateError
from dsv4lite.llm import LLM
from dsv4lite.request import Phase
from dsv4lite.weights.update import DiskSource, NamedTensors
from tests.e2e.engines import MODEST, prompts_of, write_model
from tests.e2e.updates import GREEDY, ask, read
from tests.parallel.requests import SHARED, VOCAB, assert_same

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
W1 = "layers.0.ffn.experts.3.w1.weight"  # of the last rank of ep


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "a", SHARED, seed=0), write_model(folder / "b", SHARED, seed=1)


@pytest.fixture(scope="module")
def fresh(models: tuple[Path, Path]) -> list[Any]:
    """What fresh engines of one rank generate, and their checksums."""
    found = []
    for model in models:
        with LLM(str(model), **SETTINGS) as llm:
            found.append((llm.generate_batch(PROMPTS, GREEDY), llm.weight_checksums()))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_change_together(models: tuple[Path, Path], fresh: list[Any], layout: str) -> None:
    """Updates from disk and from memory, refused ones, and both levels of sleep."""
    (old, old_sums), (new, new_sums) = fresh
    with LLM(str(models[0]), **{**SETTINGS, **LAYOUTS[layout]}) as llm:

        def is_of(outputs: Any, checksums: Any, version: int) -> None:
            found = llm.generate_batch(PROMPTS, GREEDY)
            assert_same(found, outputs, 1e-4)
            assert [one.outputs[0].weight_versions for one in found] == [((version, 0, 12),)] * len(PROMPTS)
            assert (llm.state, llm.weight_version, llm.weight_checksums()) == (Phase.READY, version, checksums)

        is_of(old, old_sums, 0)
        wrong = {**read(models[1]), W1: torch.zeros(3, 3)}
        with pytest.raises(WeightUpdateError, match=rf"{W1}: (shape|dimension 0 of) \[3, 3\]"), llm.update_weights(1) as update:
            update.load(NamedTensors(wrong))
        is_of(old, old_sums, 0)
        del wrong[W1]
        with pytest.raises(WeightUpdateError) as caught, llm.update_weights(1) as update:
            update.load(NamedTensors(wrong))
        assert caught.value.missing == (f"{W1}: missing",)
        is_of(old, old_sums, 0)
        with llm.update_weights(2) as update:
            update.load(DiskSource(str(models[1])))
        is_of(new, new_sums, 2)
        llm.sleep(1)
        llm.wake_up()
        is_of(new, new_sums, 2)
        llm.sleep(2)
        llm.wake_up()
        with pytest.raises(WeightsNotLoadedError):
            ask(llm)
        with llm.update_weights(3) as update:
            update.load(NamedTensors(read(models[0])))
        is_of(old, old_sums, 3)
