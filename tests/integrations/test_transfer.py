"""The four phases of an update as calls of their own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import EngineStateError, InvalidRequestError, WeightUpdateError
from dsv4lite.integrations.transfer import WeightTransfer
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.request import Phase
from dsv4lite.weights.shared import IPCSource, SharedWeights
from dsv4lite.weights.update import NamedTensors
from tests.e2e.engines import MODEST, opened, write_model
from tests.e2e.updates import GREEDY, PROMPT, ask, read, same


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "a", seed=0), write_model(folder / "b", seed=1)


@pytest.fixture(scope="module")
def fresh(models: tuple[Path, Path]) -> Any:
    with opened(models[1], deterministic=True) as llm:
        return ask(llm)


def buckets(tensors: dict[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    pairs = iter(tensors.items())
    while bucket := dict(islice(pairs, size)):
        yield bucket


def test_blocking_engines_are_refused(models: tuple[Path, Path]) -> None:
    """The first phase raised ``AttributeError`` for a method of asynchronous updates."""
    with pytest.raises(InvalidRequestError, match="must be an AsyncLLM"):
        WeightTransfer(LLM(str(models[0]), **MODEST))  # type: ignore[arg-type]


async def test_phases_make_the_engine_a_fresh_one(models: tuple[Path, Path], fresh: Any) -> None:
    """While it is paused and requests are open, bucket by bucket, from memory and from shared memory."""
    new = read(models[1])
    async with AsyncLLM(str(models[0]), **MODEST, deterministic=True) as llm:
        transfer = WeightTransfer(llm)
        await llm.pause(mode="keep")
        await transfer.start_weight_update()
        assert llm.state is Phase.UPDATING
        for bucket in buckets(new, 7):
            await transfer.update_weights(bucket)
        assert await transfer.finish_weight_update() == llm.weight_version == 1
        await llm.resume()
        assert same(await llm.generate(PROMPT, GREEDY), fresh)
        await transfer.init_weight_transfer_engine(IPCSource)
        await transfer.start_weight_update(5)
        for bucket in buckets(read(models[0]), 50):
            with SharedWeights(bucket.items()) as shared:
                await transfer.update_weights(shared.handles)
        assert await transfer.finish_weight_update() == llm.weight_version == 5
        assert not same(await llm.generate(PROMPT, GREEDY), fresh)


async def test_phases_out_of_order_and_failed_buckets(models: tuple[Path, Path]) -> None:
    """The previous version serves, and the next update begins anew."""
    async with AsyncLLM(str(models[0]), **MODEST, deterministic=True) as llm:
        before, transfer = await llm.generate(PROMPT, GREEDY), WeightTransfer(llm)
        for call in (transfer.update_weights({}), transfer.finish_weight_update()):
            with pytest.raises(EngineStateError, match="no update is open; call start_weight_update first"):
                await call
        await transfer.cancel_weight_update()
        await transfer.start_weight_update()
        with pytest.raises(EngineStateError):
            await transfer.start_weight_update()
        with pytest.raises(WeightUpdateError, match=r"norm\.weight: shape"):
            await transfer.update_weights({"norm.weight": torch.zeros(3)})
        with pytest.raises(WeightUpdateError, match="rolled back"):
            await transfer.finish_weight_update()
        await transfer.start_weight_update()
        await transfer.update_weights({"norm.weight": torch.zeros(32)})
        await transfer.cancel_weight_update()
        assert (llm.state, llm.weight_version) == (Phase.READY, 0)
        assert same(await llm.generate(PROMPT, GREEDY), before)
        await transfer.init_weight_transfer_engine(lambda bucket: NamedTensors(bucket["tensors"]))
        await transfer.start_weight_update(partial=True)
        await transfer.update_weights({"tensors": {"norm.weight": torch.zeros(32)}})
        with pytest.raises(KeyError):
            await transfer.update_weights({})
        with pytest.raises(EngineStateError, match="no update is open"):
            await transfer.finish_weight_update()
        await transfer.init_weight_transfer_engine(NamedTensors)
        await transfer.start_weight_update(partial=True)
        with pytest.raises(EngineStateError):  # it became the version that ``finish_weight_update`` returned
            await transfer.start_weight_update(9)
        await transfer.update_weights({"norm.weight": torch.zeros(32)})
        assert await transfer.finish_weight_update() == llm.weight_version == 1
