"""Sources that carry weights between processes, and deltas through every source."""

from __future__ import annotations

import gc
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear

from dsv4lite.errors import DSV4LiteError, InvalidRequestError, WeightUpdateError
from dsv4lite.llm import LLM
from dsv4lite.weights.delta import DeltaSource
from dsv4lite.weights.shared import HostPlace, IPCSource, SharedTensor, SharedWeights
from dsv4lite.weights.update import DiskSource, ModuleSource, NamedTensors, ProcessGroupSource, broadcast_weights
from tests.e2e.engines import MODEST, opened
from tests.e2e.updates import ask, quantized_tensors, read, same, write_quantized

pytestmark = pytest.mark.usefixtures("forked_ranks")

EXACT: dict[str, Any] = {"deterministic": True}
TRAINER = """
import pickle, sys, torch
from safetensors.torch import load_file
from dsv4lite import SharedWeights
tensors = {name: tensor.to(sys.argv[2]) for name, tensor in load_file(sys.argv[1]).items()}
with SharedWeights(tensors.items()) as shared:
    sys.stdout.buffer.write(pickle.dumps(shared.handles))
    sys.stdout.flush()
    sys.stdin.read()
"""


@contextmanager
def trainer(folder: Path, device: str = "cpu") -> Iterator[list[SharedTensor]]:
    """Another process that shares the tensors of a checkpoint, until the block is left."""
    command = [sys.executable, "-W", "ignore", "-c", TRAINER, str(folder / "model.safetensors"), device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        yield pickle.load(process.stdout)
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_weights_of_another_process_are_read_where_they_lie(models: tuple[Path, Path], fresh: Any, executor: str) -> None:
    """By the engine's own process, and by a rank in a child process."""
    with LLM(str(models[0]), **MODEST, **EXACT, executor=executor) as llm:
        before = llm.weight_checksums()
        with trainer(models[1]) as handles:
            assert len(pickle.dumps(handles)) < 0.1 * sum(handle.nbytes for handle in handles)
            with llm.update_weights(1) as update:
                update.load(IPCSource(handles))
        assert llm.weight_checksums() == fresh[1][1] != before
        assert same(ask(llm), fresh[1][0])
        with pytest.raises(WeightUpdateError, match="cannot be opened"), llm.update_weights(2) as update:
            update.load(IPCSource(handles))
        assert llm.weight_version == 1 and same(ask(llm), fresh[1][0])


@pytest.mark.gpu
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_weights_on_a_gpu_are_read_where_they_lie(models: tuple[Path, Path], executor: str) -> None:
    """Through CUDA's handles: no rank copies them to the host before it knows its own part."""
    settings: dict[str, Any] = {**MODEST, **EXACT, "device": "cuda", "executor": executor}
    with LLM(str(models[1]), **settings) as llm:
        wanted = llm.weight_checksums()
    with LLM(str(models[0]), **settings) as llm, trainer(models[1], "cuda") as handles:
        assert not any(isinstance(place, HostPlace) for handle in handles for place in handle.places if handle.nbytes)
        with llm.update_weights(1) as update:
            update.load(IPCSource(handles))
        assert llm.weight_checksums() == wanted
        assert not dict(DeltaSource(IPCSource(handles), read(models[1])).tensors())
        with llm.update_weights(2) as update:
            update.load(NamedTensors(read(models[0])))
        with llm.update_weights(3, partial=True) as update:
            update.load(DeltaSource(IPCSource(handles), read(models[0])))
        assert llm.weight_checksums() == wanted


def test_shared_memory_is_the_one_that_was_shared() -> None:
    """A path of a process whose number, or file's number, another has now."""
    lazy = torch.full((1,), 2j).conj()  # a view with PyTorch's conjugate bit; its imaginary part has the negative bit
    with SharedWeights({"x": torch.arange(3), "empty": torch.zeros(0, 4), "a": lazy, "b": lazy.imag}.items()) as shared:
        x, empty, *others = (handle.open(torch.device("cpu")) for handle in shared.handles)
        assert x.equal(torch.arange(3)) and empty.shape == (0, 4) and others == [-2j, -2]
        (place,) = shared.handles[0].places
        assert isinstance(place, HostPlace)
    with SharedWeights({"x": torch.arange(3)}.items()) as other, pytest.raises(OSError, match=r"is not the memory|No such file"):
        del other
        place.open()
    assert x.equal(torch.arange(3))  # what is open stays


def test_shared_memory_of_weights_that_are_dropped_is_freed() -> None:
    """A trainer that kept only the handles kept a copy of its weights for each update, until it ended."""
    with pytest.warns(ResourceWarning, match="SharedWeights were dropped without closing"):
        (handle,) = SharedWeights({"x": torch.arange(3)}.items()).handles
        gc.collect()
    with pytest.raises(OSError, match=r"is not the memory|No such file"):
        handle.open(torch.device("cpu"))


@pytest.mark.parametrize("share", [SharedWeights, broadcast_weights])
@pytest.mark.parametrize("given", [None, Linear(1, 1), ModuleSource(Linear(1, 1))], ids=["None", "module", "source"])
def test_only_pairs_are_shared(share: Any, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda *arguments, **settings: None)
    with pytest.raises(WeightUpdateError, match=r"expected a pair .* of a module ModuleSource\(it\)\.tensors\(\)"):
        share(given)


@pytest.mark.parametrize("given", [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), 5], ids=["sparse", "meta", "number"])
def test_only_dense_tensors_with_memory_are_shared(given: Any) -> None:
    with pytest.raises(WeightUpdateError, match=r"x.*, expected a "):
        SharedWeights([("x", given)])


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of the two kinds
@pytest.mark.parametrize(
    "make", [lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), lambda x: torch.nested.nested_tensor([x])]
)
def test_tensors_of_other_than_plain_numbers_are_refused(make: Callable[[Tensor], Tensor], models: tuple[Path, Path]) -> None:
    """Sharing PyTorch's quantized tensors ended the process with a segmentation fault, as did an update of a rank in a process."""
    given = {"norm.weight": make(torch.ones(32))}
    with pytest.raises(WeightUpdateError, match=r"norm\.weight: .*, expected a dense tensor of plain numbers"):
        SharedWeights(given.items())
    with opened(models[0]) as llm, pytest.raises(WeightUpdateError, match="expected a dense tensor of plain numbers"):
        with llm.update_weights(1, partial=True) as update:
            update.load(NamedTensors(given))


@pytest.mark.parametrize(
    "items", [{"weight": torch.ones(1)}, [("weight", torch.ones(1), 1)], ["ab"]], ids=["dict", "three", "text"]
)
def test_items_that_are_no_pairs_are_named(items: Any, models: tuple[Path, Path]) -> None:
    """A mapping in place of its items, for example; a name of two letters was taken for a pair."""
    with pytest.raises(WeightUpdateError, match="expected a pair of a name and a tensor"):
        SharedWeights(items)
    with opened(models[0]) as llm, pytest.raises(WeightUpdateError, match="expected a pair of a name and a tensor"):
        with llm.update_weights(1, partial=True) as update:
            update.load(NamedTensors(iter(items)))


def test_prefix_that_no_tensor_has_is_refused(models: tuple[Path, Path]) -> None:
    with opened(models[0]) as llm, pytest.raises(DSV4LiteError, match=r"begins with prefix='mpt\.'; it has .*layers\."):
        with llm.update_weights(1, partial=True) as update:
            update.load(DiskSource(str(models[0]), prefix="mpt."))


@pytest.mark.parametrize(
    "arguments", [{"model": None}, {"model": ""}, {"model": 5}, {"prefix": None}, {"prefix": ["mtp.", "norm."]}], ids=str
)
def test_disk_sources_of_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    """``None`` was looked for on the hub by this name, and an empty name was the working directory."""
    with pytest.raises(InvalidRequestError, match=rf"^{next(iter(arguments))}="):
        DiskSource(**{"model": "folder", **arguments})


@pytest.mark.parametrize(
    "source, given",
    [
        (IPCSource, None),
        (IPCSource, {"x": 1}),
        (NamedTensors, Linear(1, 1)),
        (ModuleSource, {}),
        (ModuleSource, Linear),
        (ProcessGroupSource, None),
    ],
)
def test_sources_of_other_things_are_refused(source: Any, given: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"must (be|map)"):
        source(given)


@pytest.mark.parametrize(
    "arguments", [{"block": (0, 8)}, {"block": 8}, {"block": (8, 8, 8)}, {"before": []}, {"source": {}}], ids=str
)
def test_deltas_of_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(arguments))):
        DeltaSource(**{"source": NamedTensors({}), "before": {}, **arguments})


def test_blocks_are_no_larger_than_their_tensor() -> None:
    """A number of columns for whole rows of every tensor took memory for as many."""
    before = {"x.weight": torch.zeros(64, 32), "y.weight": torch.zeros(3, 96)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        tensor[2, 5] = 1.0
    delta = dict(DeltaSource(NamedTensors(after), before, block=(1, 10**12)).tensors())
    for name, tensor in after.items():
        assert delta[f"{name}@offsets"].tolist() == [[2, 0]] and delta[f"{name}@values"].equal(tensor[None, 2:3])
    whole = dict(DeltaSource(NamedTensors(after), before, block=(10**12, 10**12)).tensors())
    assert {name: tensor.tolist() for name, tensor in whole.items()} == {name: tensor.tolist() for name, tensor in after.items()}
    nothing = {"z.weight": torch.zeros(0, 8)}
    assert not dict(DeltaSource(NamedTensors(nothing), nothing, block=(1, 10**12)).tensors())


def test_copies_on_other_gpus_belong_to_their_tensor() -> None:
    with SharedWeights({"x": torch.ones(2), "y": torch.zeros(2)}.items()) as a, SharedWeights({"y": torch.ones(1)}.items()) as b:
        found = dict(IPCSource(a.handles, b.handles).tensors())
        assert found["x"] == a.handles[0]
        assert found["y"].places == (*a.handles[1].places, *b.handles[0].places)


def through_shared_memory(tensors: Mapping[str, Tensor], folder: Path, stack: ExitStack) -> Any:
    return IPCSource(stack.enter_context(SharedWeights(tensors.items())).handles)


def through_a_file(tensors: Mapping[str, Tensor], folder: Path, stack: ExitStack) -> Any:
    save_file(dict(tensors), folder / "model.safetensors")
    return DiskSource(str(folder))


CARRIERS: dict[str, Callable[[Mapping[str, Tensor], Path, ExitStack], Any]] = {
    "memory": lambda tensors, folder, stack: NamedTensors(tensors),
    "disk": through_a_file,
    "shared memory": through_shared_memory,
}


@pytest.fixture(scope="module", params=["plain", "v4", "v3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape: plain; quantized with scales in e8m0, under official names; or in float32, under V3's names."""
    if request.param == "plain":
        return request.getfixturevalue("models")
    folder = tmp_path_factory.mktemp(request.param)
    a, b = (write_quantized(folder / str(seed), quantized_tensors(seed, request.param), request.param) for seed in (0, 1))
    return a, b


def neighbour(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """Return tensors of which few have other bits, and the names of those that a delta has to bring.

    Another embedding and another matrix; if matrices are quantized, also another scale.
    """
    scales = [name for name in tensors if name.endswith((".scale", "_scale_inv"))]
    pairs = [(name.removesuffix("_scale_inv").replace(".scale", ".weight"), name) for name in scales]
    embed = next(name for name in tensors if name.endswith(("embed.weight", "embed_tokens.weight")))
    changed = [embed, pairs[3][0], pairs[7][1]] if pairs else [embed, "layers.2.ffn.experts.3.w2.weight"]
    near = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in changed:
        near[name].flatten().view(torch.uint8)[0] ^= 1
    return near, {*changed, *(name for both in pairs if {*both} & {*changed} for name in both)}


LAYOUTS: dict[str, dict[str, Any]] = {
    "thread": {},
    "two processes": {"executor": "process", "pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_delta_goes_through_every_source_and_is_made_from_every_source(
    pair: tuple[Path, Path], tmp_path: Path, carrier: str, layout: str
) -> None:
    """From the first checkpoint to a neighbour of it, and from there to the second one."""
    old, new = read(pair[0]), read(pair[1])
    near, changed = neighbour(old)
    with LLM(str(pair[0]), **MODEST, **EXACT, **LAYOUTS[layout]) as llm, ExitStack() as stack:
        version = itertools.count(1)

        def carried(tensors: Mapping[str, Tensor]) -> Any:
            folder = tmp_path / str(next(version))
            folder.mkdir()
            return CARRIERS[carrier](tensors, folder, stack)

        def load(source: Any, *, partial: bool = True) -> dict[str, str]:
            with llm.update_weights(next(version), partial=partial) as update:
                update.load(source)
            return llm.weight_checksums()

        wanted = {key: load(NamedTensors(tensors), partial=False) for key, tensors in (("new", new), ("near", near), ("old", old))}
        assert wanted["old"] != wanted["near"]
        assert not dict(DeltaSource(carried(old), old).tensors())
        delta = dict(DeltaSource(NamedTensors(near), old, block=(4, 4)).tensors())
        assert {name.partition("@")[0] for name in delta} == changed
        assert sum(tensor.nbytes for tensor in delta.values()) < 0.1 * sum(tensor.nbytes for tensor in old.values())
        assert load(carried(delta)) == wanted["near"]
        assert load(DeltaSource(carried(new), near)) == wanted["new"]
        assert load(NamedTensors(old), partial=False) == wanted["old"]
        source = DeltaSource(carried(near), old, block=(4, 4))
        assert {name.partition("@")[0] for name, _ in source.tensors()} == changed
        assert load(source) == wanted["near"]
